//! What is installed beside the program: systemd accepts the unit, and the hook notifies the daemon without blocking.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test ends by panicking")]

mod support;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use support::{Daemon, Site, possible, until};

const PACKAGING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging");

#[test]
fn systemd_takes_the_units() {
    for unit in ["ontimed.service", "ontime-device@.service", "ontime-metrics.service"] {
        takes(unit);
    }
}

fn takes(name: &str) {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        println!("SKIPPED: this test needs systemd-analyze");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let unit = std::fs::read_to_string(format!("{PACKAGING}/systemd/{name}")).unwrap();
    assert!(unit.contains("/usr/bin/ontime"));
    // systemd-analyze checks that the programs exist.
    let unit = unit.replace("/usr/bin/ontime", env!("CARGO_BIN_EXE_ontime"));
    let path = dir.path().join(name);
    std::fs::write(&path, unit).unwrap();
    let out = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output().unwrap();
    let said = String::from_utf8(out.stderr).unwrap();
    let ours: Vec<&str> = said.lines().filter(|line| line.contains(name)).collect();
    assert!(out.status.success() && ours.is_empty(), "{said}");
    // systemd-analyze does report a setting that systemd does not know.
    std::fs::write(&path, "[Service]\nExecStart=/bin/true\nNoSuchSetting=1\n").unwrap();
    let out = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output().unwrap();
    assert!(String::from_utf8(out.stderr).unwrap().contains("NoSuchSetting"));
}

/// The number of files in a configuration directory, all of which `ontime check` accepts.
fn accepted(directory: &Path) -> usize {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ontime"));
    let out = command.arg("check").arg("--config-dir").arg(directory).output().unwrap();
    assert_eq!(out.status.code(), Some(0), "{out:?}");
    String::from_utf8(out.stdout).unwrap().lines().filter(|line| line.starts_with("ok ")).count()
}

#[test]
fn the_configuration_of_the_kubevirt_example_is_right() {
    let dir = tempfile::tempdir().unwrap();
    for file in ["tenants.toml", "host.toml"] {
        std::fs::copy(format!("{PACKAGING}/kubevirt/{file}"), dir.path().join(file)).unwrap();
    }
    assert_eq!(accepted(dir.path()), 2);
}

#[test]
fn the_configuration_that_cloud_init_writes_is_right() {
    let dir = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(format!("{PACKAGING}/cloud-init/ontime.yaml")).unwrap();
    let mut files = 0;
    for file in text.split("  - path: /etc/ontime/").skip(1) {
        let (name, content) = file.split_once("\n    content: |\n").unwrap();
        let lines = content.lines().take_while(|line| line.is_empty() || line.starts_with("      "));
        let content: String = lines.map(|line| format!("{}\n", line.trim_start())).collect();
        assert!(!content.trim().is_empty(), "{name}");
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
        files += 1;
    }
    assert!(files == 2 && accepted(dir.path()) == files, "{files} files");
    let rules = ontime_tenants::Rules::load(dir.path()).unwrap();
    assert!(format!("{rules:?}").contains("plc-1"), "{rules:?}");
}

/// Runs a maintainer script of the Debian package with all of its files below `root`, and `root` before the system's
/// programs.
fn maintain(root: &Path, script: &str, action: &str) -> Output {
    let text = std::fs::read_to_string(format!("{PACKAGING}/debian/{script}")).unwrap();
    // The character stands for the root, whose own name may begin like one of these.
    let directories = [" /etc/", " /var/", "=/var/", " /run/"];
    let below = directories.into_iter().fold(text, |text, of| text.replace(of, &of.replacen('/', "\u{1}/", 1)));
    let below = below.replace('\u{1}', &root.display().to_string());
    let path = format!("{}:{}", root.display(), std::env::var("PATH").unwrap());
    Command::new("sh").args(["-c", &below, script, action]).env("PATH", path).output().unwrap()
}

#[test]
fn removal_leaves_no_stale_metrics_and_purge_nothing_that_was_made_for_the_units() {
    let dir = tempfile::tempdir().unwrap();
    let metrics = "var/lib/prometheus/node-exporter/ontime.prom";
    let units = "etc/systemd/system";
    let of_package = [
        "etc/ontime/tenants.toml".to_owned(),
        "var/lib/ontime/originals".to_owned(),
        format!("{units}/multi-user.target.wants/ontime-device@web.service"),
        format!("{units}/timers.target.wants/ontime-metrics.timer"),
        format!("{units}/ontimed.service.d/override.conf"),
        format!("{units}/ontime-device@.service.d/override.conf"),
        format!("{units}/ontime-device@web.service.d/override.conf"),
        format!("{units}/ontime-metrics.service.d/override.conf"),
        format!("{units}/ontime-metrics.timer.d/override.conf"),
    ];
    let of_others = [
        "var/lib/prometheus/node-exporter/apt.prom".to_owned(),
        format!("{units}/multi-user.target.wants/other.service"),
        format!("{units}/other.service.d/override.conf"),
    ];
    for file in of_package.iter().chain(&of_others).map(String::as_str).chain([metrics]) {
        let path = dir.path().join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "").unwrap();
    }
    let left = |files: &[String]| files.iter().filter(|file| dir.path().join(file).exists()).count();
    let postrm = |action: &str| {
        let out = maintain(dir.path(), "ontime.postrm", action);
        assert!(out.status.success() && out.stderr.is_empty(), "{action}: {out:?}");
    };
    postrm("upgrade");
    assert!(dir.path().join(metrics).exists());
    postrm("remove");
    assert!(!dir.path().join(metrics).exists());
    assert_eq!(left(&of_package), of_package.len(), "the administrator's files stay until purge");
    postrm("purge");
    assert_eq!((left(&of_package), left(&of_others)), (0, of_others.len()));
    assert!(!dir.path().join(units).join("timers.target.wants").exists());
    // Without any of them, and without the directories.
    std::fs::remove_dir_all(dir.path().join("etc")).unwrap();
    postrm("purge");
}

#[test]
fn removal_says_which_settings_stay_and_why() {
    let dir = tempfile::tempdir().unwrap();
    let said = |outcome: &str, status: u8| {
        let reset = dir.path().join("ontime");
        std::fs::write(&reset, format!("#!/bin/sh\ncat << 'END'\n{outcome}END\nexit {status}\n")).unwrap();
        std::fs::set_permissions(&reset, std::fs::Permissions::from_mode(0o755)).unwrap();
        let out = maintain(dir.path(), "ontime.prerm", "remove");
        assert_eq!(out.status.code(), Some(0), "{out:?}");
        String::from_utf8([out.stdout, out.stderr].concat()).unwrap()
    };
    assert_eq!(said("never run\n", 1), "", "nothing was set");
    std::fs::create_dir_all(dir.path().join("var/lib/ontime")).unwrap();
    std::fs::write(dir.path().join("var/lib/ontime/originals"), "").unwrap();
    assert_eq!(said("", 0), "ontime: every setting has its original value again\n");
    let table = "method reset: 2 changes\n\nOUTCOME   KNOB\nrestored  one\n";
    let failed = said(&format!("{table}failed    two\n"), 1);
    assert!(failed.contains("\nOUTCOME   KNOB\nfailed    two\nontime: the original values stay"), "{failed}");
    // Of another version's value there is no row.
    let foreign = "ontime: not restored: another version of Ontime stored knob 3\n";
    let other = said(&format!("{table}{foreign}"), 1);
    assert!(other.contains(&format!("original value:\n{foreign}ontime: the original values stay")), "{other}");
    // An answer in an unknown form is shown whole.
    assert!(said("something else\n", 2).contains("original value:\nsomething else\n"));
    let refused = said("ontime: no\n", 3);
    assert!(refused.contains("'ontime reset' ended with status 3:\nontime: no\n"), "{refused}");
}

/// AppArmor's parser takes the lines inside a profile, which then has a rule for each of the device's sockets.
#[test]
fn apparmor_takes_the_lines_for_the_devices_sockets() {
    let lines = std::fs::read_to_string(format!("{PACKAGING}/apparmor/libvirt-qemu")).unwrap();
    let paths = ontime_sockets::Paths::new("/run/ontime".as_ref(), "web");
    for channel in [0, 1, 9, 10, 63] {
        let socket = paths.device(channel).display().to_string();
        let is_meant = |rule: &str| globset::Glob::new(rule).unwrap().compile_matcher().is_match(&socket);
        let rules = lines.lines().filter_map(|line| line.strip_prefix("  ")?.strip_suffix(" rw,"));
        assert_eq!(rules.filter(|rule| is_meant(rule)).count(), 1, "{socket}");
    }
    if Command::new("apparmor_parser").arg("--version").output().is_err() {
        println!("SKIPPED: this test needs apparmor_parser (apparmor)");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let parse = |rules: &str| {
        let profile = dir.path().join("profile");
        std::fs::write(&profile, format!("profile ontime-test {{\n{rules}\n}}\n")).unwrap();
        Command::new("apparmor_parser").args(["--skip-kernel-load", "--skip-cache"]).arg(&profile).output().unwrap()
    };
    let out = parse(&lines);
    assert!(out.status.success(), "{out:?}");
    assert!(!parse("  /run/ontime/device/*/main.sock rwz,").status.success());
}

#[test]
fn the_hook_wakes_the_daemon_and_does_nothing_without_one() {
    if !possible() {
        return;
    }
    let site = Site::new();
    let hook = |poke: &Path| {
        let mut command = Command::new(format!("{PACKAGING}/libvirt/hooks/qemu.d/ontime"));
        command.args(["vm", "started", "begin", "-"]).env("ONTIME_POKE", poke);
        assert!(command.status().unwrap().success());
    };
    let poke = site.path("run/poke");
    hook(&poke);
    assert!(!poke.exists(), "it made a file where no daemon is");
    let _daemon = Daemon::start(&site);
    let passes = || {
        let metrics = site.curl(&["http://o/metrics"]).1;
        let line = metrics.lines().find(|line| line.starts_with("ontime_passes_total{reason=\"hook\"}"));
        line.map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
    };
    assert_eq!(passes(), 0);
    hook(&poke);
    until("a pass because of the hook", || (passes() > 0).then_some(()));
}

#[test]
fn the_units_capabilities_are_enough() {
    if !possible() {
        return;
    }
    if Command::new("setpriv").arg("--version").output().is_err() {
        println!("SKIPPED: this test needs setpriv (util-linux)");
        return;
    }
    let unit = std::fs::read_to_string(format!("{PACKAGING}/systemd/ontimed.service")).unwrap();
    let line = unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet=")).unwrap();
    let bounding = line
        .split(' ')
        .fold("-all".to_owned(), |set, name| format!("{set},+{}", name.strip_prefix("CAP_").unwrap().to_lowercase()));
    let site = Site::new();
    let name = format!("caps-{}", std::process::id());
    site.configure("tenants.toml", &format!("[[tenant]]\nname = \"{name}\"\nclass = \"rt\"\n"));
    let guest = support::Guest::stopped(&name);
    guest.vcpu();
    let _daemon = Daemon::start_as(&site, &["setpriv", "--no-new-privs", "--bounding-set", &bounding]);
    site.poke();
    until("the vCPU is placed", || (guest.policy() == (libc::SCHED_FIFO, 47)).then_some(()));
    let caps = until("its cap is in force", || {
        let status = site.json(&["status", "--json"]);
        (status["caps"]["in_force"] == true && !status["caps"]["threads"].as_array()?.is_empty())
            .then(|| status["caps"].clone())
    });
    assert!(caps["threads"].as_array().unwrap().iter().all(|thread| thread["watched"] == "yes"), "{caps}");
    let proc = std::fs::read_to_string(format!("/proc/{}/status", _daemon.pid())).unwrap();
    assert!(!proc.contains("CapBnd:\t000001ff"), "the bounding set was not cut: {proc}");
}

/// docs/reference/security.md names a test for each rule, or states that there is none. A name before a crate is a test
/// there.
#[test]
fn the_tests_that_the_security_page_names_exist() {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let code_in = |folder: &str| {
        let (mut code, mut directories) = (String::new(), vec![root.join(folder)]);
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    directories.push(path);
                } else if path.extension().is_some_and(|ending| ending == "rs" || ending == "sh" || ending == "go") {
                    code += &std::fs::read_to_string(path).unwrap();
                }
            }
        }
        code
    };
    let code = code_in("crates") + &code_in("lab") + &code_in("scripts") + &code_in("dra");
    let page = std::fs::read_to_string(root.join("docs/reference/security.md")).unwrap();
    let (mut in_tests, mut names, mut missing) = (false, 0, Vec::new());
    for line in page.lines() {
        let Some(last) = line.strip_suffix('|').and_then(|line| line.rsplit('|').next()) else { continue };
        if line.starts_with("| rule ") {
            in_tests = last.trim_start().starts_with("test");
        } else if in_tests && !line.starts_with("|---") {
            let is_name = |name: &&str| {
                !name.starts_with("ontime") && name.chars().all(|of| of.is_ascii_alphanumeric() || of == '_')
            };
            let spans: Vec<&str> = last.split('`').skip(1).step_by(2).collect();
            let named: Vec<&str> = spans.iter().copied().filter(is_name).collect();
            for of in spans.windows(2).filter(|of| is_name(&of[0]) && of[1].starts_with("ontime")) {
                let folder = format!("crates/{}", of[1].strip_prefix("ontime-").unwrap_or(of[1]));
                let is_there = code_in(&folder).contains(&format!("fn {}(", of[0]));
                missing.extend((!is_there).then(|| format!("{} in {}", of[0], of[1])));
            }
            // A function of Rust, an entry of the lab's list, a function of a script in a guest, or one of Go.
            let forms = |name: &str| {
                let of_script = format!("\n{name}() {{");
                [format!("fn {name}("), format!("name: \"{name}\","), of_script, format!("func {name}(")]
            };
            let exists = |name: &str| forms(name).iter().any(|form| code.contains(form));
            let none = named.is_empty() && !last.contains("none") && !last.contains("no test");
            missing.extend(named.iter().filter(|name| !exists(name)).map(|name| (*name).to_owned()));
            missing.extend(none.then(|| format!("nothing in: {line}")));
            names += named.len();
        }
    }
    assert!(names > 40 && missing.is_empty(), "{names} tests; not there: {missing:?}");
}
