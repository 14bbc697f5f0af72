//! udev's configuration of interrupts' CPUs: options of `.link` files in newer versions of systemd, and rules.
//!
//! Source: systemd `src/udev/net/link-config.c`. When an interface appears, `IRQAffinityPolicy=single` puts all its
//! interrupts on one CPU, and `spread` one on each CPU, of those in `IRQAffinity=` and of the node `IRQAffinityNUMA=`.
//! udev records the `.link` file and drop-ins that it used (`/run/udev/data/nINDEX`).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use ontime_base::files::note;

use super::{LinkPolicy, Udev};
use crate::knob::NicId;
use crate::roots::{entries, read};

/// Directories of rules. Of several files with the same name, the first counts (`man udev`).
const RULES: [&str; 5] =
    ["etc/udev/rules.d", "run/udev/rules.d", "usr/local/lib/udev/rules.d", "usr/lib/udev/rules.d", "lib/udev/rules.d"];

pub(super) fn scan<'a>(root: &Path, nics: impl Iterator<Item = &'a NicId>) -> Udev {
    let links = nics.filter_map(|nic| Some((nic.name.clone(), link_policy(root, nic.ifindex)?))).collect();
    Udev { links, rules: rules(root) }
}

fn link_policy(root: &Path, ifindex: u32) -> Option<LinkPolicy> {
    let record = read(&root.join(format!("run/udev/data/n{ifindex}")))?;
    let value = |key: &str| record.lines().find_map(|line| line.strip_prefix("E:")?.strip_prefix(key));
    let file = value("ID_NET_LINK_FILE=")?;
    let dropins = value("ID_NET_LINK_FILE_DROPINS=").unwrap_or_default();
    let mut options: BTreeMap<String, (String, String)> = BTreeMap::new();
    for file in std::iter::once(file).chain(dropins.split(':')).filter(|file| !file.is_empty()) {
        for (key, value) in in_link_section(&read(&root.join(file.trim_start_matches('/'))).unwrap_or_default()) {
            options.insert(key.to_owned(), (value.to_owned(), file.to_owned()));
        }
    }
    let chosen = |key: &str| options.get(key).filter(|(value, _)| !value.is_empty());
    let (policy, file) = chosen("IRQAffinityPolicy")?;
    let among = ["IRQAffinity", "IRQAffinityNUMA"].iter();
    let among: Vec<String> = among.filter_map(|key| Some(format!("{key}={}", chosen(key)?.0))).collect();
    Some(LinkPolicy { file: file.clone(), policy: policy.clone(), among: among.join(" ") })
}

/// The assignments in section `[Link]`, in order.
fn in_link_section(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let mut inside = false;
    text.lines().map(str::trim).filter_map(move |line| {
        if line.starts_with('[') {
            inside = line == "[Link]";
        }
        let (key, value) = line.split_once('=').filter(|_| inside && !line.starts_with(['#', ';']))?;
        Some((key.trim(), value.trim()))
    })
}

/// Lines of rules that write interrupts' CPUs, or start a program whose name suggests that, as `FILE:LINE`.
fn rules(root: &Path) -> Vec<String> {
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for directory in RULES {
        let mut files: Vec<PathBuf> = entries(&root.join(directory)).map(|entry| entry.path()).collect();
        files.sort();
        for path in files.iter().filter(|path| path.extension().is_some_and(|ending| ending == "rules")) {
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
            // A file of the same name in an earlier directory replaces this one, even if it is empty or /dev/null.
            if !seen.insert(name.to_owned()) {
                continue;
            }
            let text = fs::read(path).inspect_err(note).unwrap_or_default().to_ascii_lowercase();
            let text = String::from_utf8_lossy(&text);
            let about = (1..).zip(text.lines()).filter(|(_, line)| !line.trim_start().starts_with('#'));
            let about = about.filter(|(_, line)| {
                ["smp_affinity", "irq_affinity", "irqaffinity"].iter().any(|word| line.contains(word))
            });
            found.extend(about.map(|(number, _)| format!("/{directory}/{name}:{number}")));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn put(root: &Path, name: &str, text: &str) {
        let file = root.join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }

    #[test]
    fn the_link_file_that_udev_took_and_its_dropins_tell_the_policy() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let took = |index: u32, file: &str, dropins: &str| {
            let dropins =
                if dropins.is_empty() { String::new() } else { format!("E:ID_NET_LINK_FILE_DROPINS={dropins}\n") };
            put(
                root,
                &format!("run/udev/data/n{index}"),
                &format!("I:77\nE:ID_NET_LINK_FILE={file}\n{dropins}G:systemd\n"),
            );
        };
        let (plain, single, spread) = (
            "/usr/lib/systemd/network/99-default.link",
            "/etc/systemd/network/10-cell.link",
            "/run/systemd/network/20-x.link",
        );
        put(root, plain, "[Match]\nOriginalName=*\n[Link]\nNamePolicy=keep\n#IRQAffinityPolicy=single\n");
        put(
            root,
            single.trim_start_matches('/'),
            "[Match]\nIRQAffinityPolicy=spread\n[Link]\nIRQAffinityPolicy = single\n",
        );
        put(
            root,
            spread.trim_start_matches('/'),
            "[Link]\nIRQAffinityPolicy=spread\nIRQAffinity=0-3\nIRQAffinityNUMA=1\n",
        );
        put(root, &plain[1..], "[Match]\nOriginalName=*\n[Link]\nNamePolicy=keep\n#IRQAffinityPolicy=single\n");
        put(root, "etc/systemd/network/20-x.link.d/a.conf", "[Link]\nIRQAffinityNUMA=\nIRQAffinity=6\n");
        put(root, "etc/systemd/network/20-x.link.d/b.conf", "[Link]\nIRQAffinityPolicy=\n");
        took(2, plain, "");
        took(3, single, "");
        took(4, spread, "");
        took(5, spread, "/etc/systemd/network/20-x.link.d/a.conf");
        took(6, spread, "/etc/systemd/network/20-x.link.d/a.conf:/etc/systemd/network/20-x.link.d/b.conf");
        took(7, "/etc/systemd/network/gone.link", "");
        let policy = |index| link_policy(root, index).map(|found| (found.file, found.policy, found.among));
        let told = |file: &str, policy: &str, among: &str| Some((file.to_owned(), policy.to_owned(), among.to_owned()));
        assert_eq!(policy(2), None);
        assert_eq!(policy(3), told(single, "single", ""));
        assert_eq!(policy(4), told(spread, "spread", "IRQAffinity=0-3 IRQAffinityNUMA=1"));
        assert_eq!(policy(5), told(spread, "spread", "IRQAffinity=6"));
        assert_eq!(policy(6), None, "taken back");
        assert_eq!((policy(7), policy(8)), (None, None));
    }

    #[test]
    fn rules_that_write_interrupts_cpus_are_found_unless_they_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let writes = "RUN+=\"/bin/sh -c 'echo 3 > /proc/irq/55/smp_affinity_list'\"\n";
        put(root, "usr/lib/udev/rules.d/70-plant.rules", &format!("# smp_affinity\nACTION==\"add\", {writes}"));
        put(root, "usr/lib/udev/rules.d/71-off.rules", writes);
        put(root, "usr/lib/udev/rules.d/72-other.rules", "SUBSYSTEM==\"net\", NAME=\"irq0\"\n");
        put(root, "usr/lib/udev/rules.d/73-no.conf", writes);
        put(root, "run/udev/rules.d/80-script.rules", "\nKERNEL==\"e*\", RUN+=\"/sbin/set_irq_affinity.sh %k\"\n");
        put(root, "etc/udev/rules.d/70-plant.rules.bak", writes);
        fs::create_dir_all(root.join("etc/udev/rules.d")).unwrap();
        symlink("/dev/null", root.join("etc/udev/rules.d/71-off.rules")).unwrap();
        assert_eq!(rules(root), ["/run/udev/rules.d/80-script.rules:2", "/usr/lib/udev/rules.d/70-plant.rules:2"]);
        assert!(rules(&root.join("none")).is_empty());
    }
}
