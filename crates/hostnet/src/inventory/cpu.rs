//! Processors, and the reasons for wake-up latency on them.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use ontime_base::files::note;

use super::{Cpus, IdleState, Note};
use crate::cpus::CpuSet;
use crate::roots::{Roots, entries, read, read_number};

/// The processors, and what of them could not be read.
pub(super) fn scan(roots: &Roots) -> (Cpus, Option<Note>) {
    let base = roots.sys.join("devices/system/cpu");
    let list = |name: &str| read(&base.join(name)).and_then(|text| CpuSet::from_list(&text).ok()).unwrap_or_default();
    let online = list("online");
    let clock =
        |name: &str| read(&roots.sys.join("devices/system/clocksource/clocksource0").join(name)).unwrap_or_default();
    let isolated = list("isolated").iter().chain(partitions(&roots.sys.join("fs/cgroup")).iter()).collect();
    // The kernel writes "(null)" for an empty set.
    let nohz_full = list("nohz_full");
    let possible = cpus_of(&base.join("possible")).filter(|cpus| !cpus.is_empty());
    let last = possible.as_ref().unwrap_or(&online).iter().last().unwrap_or_default();
    let command_line = read(&roots.proc.join("cmdline")).unwrap_or_default();
    let asked = rcu_nocbs(&command_line, last);
    let note = asked.as_ref().err().map(|why| Note { about: "rcu_nocbs".to_owned(), why: why.clone() });
    let siblings = siblings(&base, &online);
    // POWER has several threads a core and, before 6.6, no folder smt.
    let by_topology = || online.iter().any(|cpu| core_of(&base, cpu).is_some()).then_some(!siblings.is_empty());
    let cpus = Cpus {
        rcu_nocbs: asked.unwrap_or_default().iter().chain(nohz_full.iter()).collect(),
        smt_active: read(&base.join("smt/active")).map(|text| text == "1").or_else(by_topology),
        idle_states: idle_states(&base, &online),
        dma_latency_us: dma_latency(roots),
        governors: governors(&base, &online),
        clocksource: clock("current_clocksource"),
        has_tsc: clock("available_clocksource").split_ascii_whitespace().any(|name| name == "tsc"),
        siblings,
        nodes: nodes(&roots.sys.join("devices/system/node")),
        bpf_scheduler: read(&roots.sys.join("kernel/sched_ext/root/ops")).filter(|name| !name.is_empty()),
        latency_limits_us: latency_limits(&base, &online),
        isolated,
        nohz_full,
        online,
    };
    (cpus, note)
}

/// CPUs of the boot parameter `rcu_nocbs=LIST` (`kernel/rcu/tree_nocb.h`). Without a list it names no CPU. The last one
/// counts, and a list that the kernel cannot read means all CPUs.
fn rcu_nocbs(command_line: &str, last: u32) -> Result<CpuSet, String> {
    let mut lists = arguments(command_line).into_iter().filter_map(|word| {
        let (name, list) = word.split_once('=')?;
        // The kernel takes a dash in a parameter's name for an underscore.
        (name.replace('-', "_") == "rcu_nocbs").then(|| list.to_owned())
    });
    let Some(list) = lists.next_back() else { return Ok(CpuSet::new()) };
    boot_list(&list, last).map_err(|why| {
        let list: String = list.chars().take(80).filter(|c| !c.is_control()).collect();
        format!(
            "boot parameter rcu_nocbs={list}: {why}; the kernel then keeps RCU callbacks from every CPU; correct the \
             list"
        )
    })
}

/// The words of the kernel's command line that are for the kernel. Quotes keep a word with spaces together, and are not
/// part of it (`lib/cmdline.c`, `next_arg`).
fn arguments(command_line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quoted = false;
    for c in command_line.chars() {
        match (c, words.last_mut()) {
            ('"', _) => quoted = !quoted,
            (c, _) if c.is_ascii_whitespace() && !quoted => words.push(String::new()),
            (c, Some(word)) => word.push(c),
            (_, None) => {}
        }
    }
    words.into_iter().filter(|word| !word.is_empty()).take_while(|word| word != "--").collect()
}

/// Parses a list of CPUs as boot parameters have it (`lib/bitmap-str.c`, `bitmap_parselist`): in addition to `0-3,8`
/// there are `N` for the last CPU, `all`, and `RANGE:USED/GROUP` for the first CPUs of each group of the range.
fn boot_list(text: &str, last: u32) -> Result<CpuSet, String> {
    let number = |word: &str| match word {
        "N" => Ok(last),
        _ => word.parse::<u32>().map_err(|_| format!("`{word}` is not a CPU's number, `N` or `all`")),
    };
    let mut cpus = Vec::new();
    let parts = text.split(|c: char| c == ',' || c.is_ascii_whitespace()).filter(|part| !part.is_empty());
    for part in parts {
        let (range, pattern) = part.split_once(':').map_or((part, None), |(range, pattern)| (range, Some(pattern)));
        let (from, to) = match (range, range.split_once('-')) {
            ("all", _) => (0, last),
            (_, Some((from, to))) => (number(from)?, number(to)?),
            (one, None) if pattern.is_none() => (number(one)?, number(one)?),
            _ => return Err(format!("`{part}` has a pattern and no range before it")),
        };
        let (used, group) = match pattern.map(|pattern| pattern.split_once('/')) {
            None => (1, 1),
            Some(Some((used, group))) => (number(used)?, number(group)?),
            Some(None) => return Err(format!("`{part}` has no `/` in its pattern USED/GROUP")),
        };
        if from > to || used > group || group == 0 {
            return Err(format!("`{part}` is no range of CPUs"));
        }
        if to > last {
            return Err(format!("`{part}` has CPUs after {last}, the last of this host"));
        }
        cpus.extend((from..=to).filter(|cpu| (cpu - from) % group < used));
    }
    Ok(cpus.into_iter().collect())
}

/// CPUs of isolated cpuset partitions, which the scheduler treats like those of `isolcpus`. Since 6.7 the root cgroup
/// lists them (`kernel/cgroup/cpuset.c`, `cpuset.cpus.isolated`). Before, each is a child of the root or of another
/// partition.
fn partitions(cgroup: &Path) -> CpuSet {
    if let Some(all) = cpus_of(&cgroup.join("cpuset.cpus.isolated")) {
        return all;
    }
    let mut found = Vec::new();
    let mut open = vec![cgroup.to_owned()];
    while let Some(dir) = open.pop() {
        for child in entries(&dir).map(|entry| entry.path()) {
            // For an invalid partition the file has more words.
            match read(&child.join("cpuset.cpus.partition")).as_deref() {
                Some("isolated") => found.extend(cpus_of(&child.join("cpuset.cpus.effective"))),
                Some("root") => open.push(child),
                _ => {}
            }
        }
    }
    found.iter().flat_map(CpuSet::iter).collect()
}

fn cpus_of(file: &Path) -> Option<CpuSet> {
    CpuSet::from_list(&read(file)?).ok()
}

/// The CPUs of this CPU's core. `core_cpus_list` (5.3) is the newer name of `thread_siblings_list`.
fn core_of(base: &Path, cpu: u32) -> Option<CpuSet> {
    let files = ["thread_siblings_list", "core_cpus_list"];
    files.iter().find_map(|file| cpus_of(&base.join(format!("cpu{cpu}/topology/{file}"))))
}

/// Cores with more than one online CPU. On a hybrid processor only some cores have several.
fn siblings(base: &Path, online: &CpuSet) -> Vec<CpuSet> {
    let awake = |core: CpuSet| core.iter().filter(|cpu| online.contains(*cpu)).collect::<CpuSet>();
    let cores = online.iter().filter_map(|cpu| Some((cpu, awake(core_of(base, cpu)?))));
    // Each core once: by its first CPU.
    cores.filter(|(cpu, core)| core.len() > 1 && core.iter().next() == Some(*cpu)).map(|(_, core)| core).collect()
}

fn nodes(base: &Path) -> BTreeMap<u32, (CpuSet, Vec<u32>)> {
    let node = |dir: PathBuf| {
        let number = dir.file_name()?.to_str()?.strip_prefix("node")?.parse().ok()?;
        let distances = read(&dir.join("distance")).unwrap_or_default();
        let distances = distances.split_ascii_whitespace().filter_map(|text| text.parse().ok()).collect();
        Some((number, (cpus_of(&dir.join("cpulist"))?, distances)))
    };
    entries(base).filter_map(|entry| node(entry.path())).collect()
}

/// Limits of single CPUs. The file has `0` for no limit, and `n/a` for a limit of 0 (`drivers/base/power/sysfs.c`,
/// `pm_qos_resume_latency_us_show`).
fn latency_limits(base: &Path, online: &CpuSet) -> BTreeMap<u32, u64> {
    let limit = |cpu: u32| match read(&base.join(format!("cpu{cpu}/power/pm_qos_resume_latency_us")))?.as_str() {
        "n/a" => Some(0),
        "0" => None,
        text => text.parse().ok(),
    };
    online.iter().filter_map(|cpu| Some((cpu, limit(cpu)?))).collect()
}

/// States with the same name and latency on several CPUs are one state. On a hybrid processor a state's name has a
/// latency per kind of core. A state that cannot be read has no latency and may be enabled.
fn idle_states(base: &Path, online: &CpuSet) -> Vec<IdleState> {
    let mut states: BTreeMap<(u32, String, Option<u64>), Vec<u32>> = BTreeMap::new();
    for cpu in online.iter() {
        let entries = match fs::read_dir(base.join(format!("cpu{cpu}/cpuidle"))).inspect_err(note) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(_) => {
                states.entry((0, String::new(), None)).or_default().push(cpu);
                continue;
            }
        };
        for path in entries.filter_map(Result::ok).map(|entry| entry.path()) {
            let Some(number) = path.file_name().and_then(|name| name.to_str()?.strip_prefix("state")?.parse().ok())
            else {
                continue;
            };
            let name = read(&path.join("name")).unwrap_or_default();
            let disable = read(&path.join("disable"));
            let latency = read_number(&path.join("latency")).filter(|_| disable.is_some());
            let cpus = states.entry((number, name, latency)).or_default();
            if disable.is_none_or(|disable| disable == "0") {
                cpus.push(cpu);
            }
        }
    }
    let state = |((_, name, latency_us), cpus): ((u32, String, Option<u64>), Vec<u32>)| IdleState {
        name,
        latency_us,
        enabled_on: cpus.into_iter().collect(),
    };
    states.into_iter().map(state).collect()
}

fn governors(base: &Path, online: &CpuSet) -> BTreeMap<String, CpuSet> {
    let mut by_name: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for cpu in online.iter() {
        if let Some(name) = read(&base.join(format!("cpu{cpu}/cpufreq/scaling_governor"))) {
            by_name.entry(name).or_default().push(cpu);
        }
    }
    by_name.into_iter().map(|(name, cpus)| (name, cpus.into_iter().collect())).collect()
}

/// Reading `/dev/cpu_dma_latency` returns the limit in force, and requests none (`kernel/power/qos.c`).
fn dma_latency(roots: &Roots) -> Option<i64> {
    let bytes = fs::read(roots.dev.join("cpu_dma_latency")).inspect_err(note).ok()?;
    let latency = i32::from_ne_bytes(*bytes.first_chunk()?);
    Some(i64::from(latency))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(path: PathBuf, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn cpus(text: &str) -> CpuSet {
        CpuSet::from_list(text).unwrap()
    }

    #[test]
    fn only_cpus_that_share_a_core_are_siblings() {
        for (online, cores, wanted) in [
            // Two big cores with two threads, and four small ones; a core with one thread offline; a POWER9 with four;
            // none.
            ("0-7", &["0,4", "1,5", "2", "3", "6", "7"][..], &["0,4", "1,5"][..]),
            ("0-2", &["0-1", "2-3"], &["0-1"]),
            ("0-7", &["0-3", "4-7"], &["0-3", "4-7"]),
            ("0-1", &["0", "1"], &[]),
        ] {
            let dir = tempfile::tempdir().unwrap();
            for core in cores {
                for cpu in cpus(core).iter() {
                    put(dir.path().join(format!("cpu{cpu}/topology/thread_siblings_list")), core);
                }
            }
            let found = siblings(dir.path(), &cpus(online));
            assert_eq!(found, wanted.iter().map(|core| cpus(core)).collect::<Vec<_>>(), "{cores:?}");
        }
    }

    #[test]
    fn idle_states_of_unlike_cores_are_kept_apart() {
        let dir = tempfile::tempdir().unwrap();
        for (cpu, latency, disable) in [(0, 170, 0), (1, 170, 1), (2, 290, 0), (3, 290, 0)] {
            let state = dir.path().join(format!("cpu{cpu}/cpuidle/state2"));
            put(state.join("name"), "C6\n");
            put(state.join("latency"), &format!("{latency}\n"));
            put(state.join("disable"), &format!("{disable}\n"));
        }
        let found = || -> Vec<_> {
            idle_states(dir.path(), &cpus("0-5")).into_iter().map(|one| (one.latency_us, one.enabled_on)).collect()
        };
        assert_eq!(found(), [(Some(170), cpus("0")), (Some(290), cpus("2-3"))], "CPUs 4 and 5 have no states");
        // Files and directories that are there and cannot be read: a state may then be slow, and enabled.
        for file in ["cpu0/cpuidle/state2/latency", "cpu2/cpuidle/state2/disable"].map(|file| dir.path().join(file)) {
            fs::remove_file(&file).unwrap();
            fs::create_dir(&file).unwrap();
        }
        put(dir.path().join("cpu5/cpuidle"), "");
        let wanted = [(None, cpus("5")), (None, cpus("0,2")), (Some(170), cpus("")), (Some(290), cpus("3"))];
        assert_eq!(found(), wanted);
    }

    #[test]
    fn numa_nodes_are_read_with_their_distances() {
        let dir = tempfile::tempdir().unwrap();
        assert!(nodes(dir.path()).is_empty());
        for (node, list, distance) in [
            ("node0", "0-3", "10 21 31"),
            ("node2", "4-5", "31 21 10"),
            (
                "node1",
                "",
                "21 \
            10 21",
            ),
        ] {
            put(dir.path().join(node).join("cpulist"), list);
            put(dir.path().join(node).join("distance"), distance);
        }
        put(dir.path().join("possible"), "0-2");
        let found = nodes(dir.path());
        assert_eq!(found.keys().copied().collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(found[&2], (cpus("4-5"), vec![31, 21, 10]));
    }

    #[test]
    fn cpus_without_rcu_callbacks_are_those_of_the_command_line() {
        for (line, wanted) in [
            ("quiet rcu_nocbs=2-3,6 nohz_full=1", "2-3,6"),
            ("rcu_nocbs=1 rcu_nocbs=4-5", "4-5"),
            ("rcu_nocbs=all", "0-7"),
            ("rcu_nocbs", ""),
            ("quiet", ""),
            // In quotes, with a space, with dashes, and the arguments of init.
            (r#"quiet rcu_nocbs="2,5-6""#, "2,5-6"),
            (r#"dyndbg="file x.c +p" "rcu_nocbs=4 7" quiet"#, "4,7"),
            ("rcu-nocbs=6", "6"),
            ("rcu_nocbs=6 -- rcu_nocbs=1", "6"),
            // The last CPU, and the first of each group.
            ("rcu_nocbs=N", "7"),
            ("rcu_nocbs=1,5-N", "1,5-7"),
            ("rcu_nocbs=all:1/2", "0,2,4,6"),
            ("rcu_nocbs=1-7:2/3,0", "0-2,4-5,7"),
            ("rcu_nocbs=4-N:1/N", "4"),
        ] {
            assert_eq!(rcu_nocbs(line, 7).map(|found| found.to_string()), Ok(wanted.to_owned()), "{line}");
        }
    }

    #[test]
    fn a_list_that_the_kernel_does_not_take_is_told_and_not_guessed() {
        for (list, why) in [
            ("x", "`x` is not"),
            ("3-", "`` is not"),
            ("5-2", "`5-2` is no range"),
            ("0-9", "CPUs after 7"),
            ("2:1/2", "no range before"),
            ("0-7:1", "no `/`"),
            ("0-7:3/2", "is no range"),
            ("0-7:0/0", "is no range"),
            ("0-4294967295", "CPUs after 7"),
            ("^3", "`^3` is not"),
        ] {
            let found = rcu_nocbs(&format!("rcu_nocbs={list}"), 7).unwrap_err();
            assert!(found.contains(why) && found.contains(&format!("rcu_nocbs={list}:")), "{list}: {found}");
        }
        let dir = tempfile::tempdir().unwrap();
        let roots = Roots { sys: dir.path().join("sys"), proc: dir.path().join("proc"), ..Roots::default() };
        let base = dir.path().join("sys/devices/system/cpu");
        put(base.join("online"), "0-2");
        put(base.join("possible"), "0-5");
        put(dir.path().join("proc/cmdline"), "rcu_nocbs=4-N");
        let (found, note) = scan(&roots);
        assert_eq!((found.rcu_nocbs, note), (cpus("4-5"), None));
        put(dir.path().join("proc/cmdline"), "rcu_nocbs=4-M");
        let (found, note) = scan(&roots);
        assert!(found.rcu_nocbs.is_empty() && note.unwrap().why.contains("`M` is not"));
    }

    proptest::proptest! {
        #[test]
        fn any_command_line_is_read_without_harm(line in "(rcu_nocbs=[0-9Nal,:/\\-\"]{0,12} ?){0,3}|\\PC{0,40}") {
            if let Ok(found) = rcu_nocbs(&line, 7) {
                proptest::prop_assert!(found.is_subset(&cpus("0-7")));
            }
        }
    }

    #[test]
    fn without_a_folder_smt_the_topology_tells_whether_cores_are_shared() {
        for (file, cores, active, wanted) in [
            ("thread_siblings_list", &["0-1", "2-3"][..], None, Some(true)),
            ("core_cpus_list", &["0,2", "1,3"], None, Some(true)),
            ("core_cpus_list", &["0", "1", "2", "3"], None, Some(false)),
            ("core_cpus_list", &["0,2", "1,3"], Some("1"), Some(true)),
            ("thread_siblings_list", &["0", "1", "2", "3"], Some("0"), Some(false)),
            ("nothing", &["0-3"], None, None),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let roots = Roots { sys: dir.path().to_owned(), ..Roots::default() };
            let base = dir.path().join("devices/system/cpu");
            put(base.join("online"), "0-3");
            for core in cores {
                cpus(core).iter().for_each(|cpu| put(base.join(format!("cpu{cpu}/topology/{file}")), core));
            }
            if let Some(active) = active {
                put(base.join("smt/active"), active);
            }
            let (found, _) = scan(&roots);
            assert_eq!(found.smt_active, wanted, "{file} {cores:?}");
            assert_eq!(found.siblings.is_empty(), wanted != Some(true), "{file} {cores:?}");
        }
    }

    #[test]
    fn latency_limits_of_single_cpus_are_read() {
        let dir = tempfile::tempdir().unwrap();
        for (cpu, text) in [(0, "0\n"), (1, "n/a\n"), (2, "25\n"), (3, "?\n")] {
            put(dir.path().join(format!("cpu{cpu}/power/pm_qos_resume_latency_us")), text);
        }
        assert_eq!(latency_limits(dir.path(), &cpus("0-4")), BTreeMap::from([(1, 0), (2, 25)]));
    }

    #[test]
    fn cpus_of_isolated_partitions_are_isolated() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(partitions(dir.path()), CpuSet::new(), "no cgroups");
        let group = |name: &str, partition: &str, cpus: &str| {
            put(dir.path().join(name).join("cpuset.cpus.partition"), partition);
            put(dir.path().join(name).join("cpuset.cpus.effective"), cpus);
        };
        group("machine.slice", "root\n", "2-7\n");
        group("machine.slice/rt", "isolated\n", "6-7\n");
        group("edge", "isolated\n", "1\n");
        group("broken", "isolated invalid (Parent is not a partition root)\n", "0\n");
        group("system.slice", "member\n", "0\n");
        group("system.slice/no-partition-below-a-member", "isolated\n", "0\n");
        assert_eq!(partitions(dir.path()), cpus("1,6-7"));
        // The root's own file, from 6.7 on, also contains remote partitions.
        put(dir.path().join("cpuset.cpus.isolated"), "1,5-7\n");
        assert_eq!(partitions(dir.path()), cpus("1,5-7"));
    }
}
