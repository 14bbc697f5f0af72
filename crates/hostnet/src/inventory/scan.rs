//! One pass over the host that fills an [`Inventory`].

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use ontime_base::files;
use ontime_tenants::proc::{parse_cgroup, parse_cgroup_v1, status_value};
use ontime_tenants::{container, limit_waits};
use serde::Deserialize;

use super::devices::Pci;
use super::threads::CUT;
use super::{
    Conflict, CpuManager, Inventory, Kernel, Kvm, Lockdown, Memory, Note, Protections, cpu, irqs, nics, threads, udev,
};
use crate::cpus::CpuSet;
use crate::kernel_files::{DEV_WEIGHT, PANIC_ON_WARN, RT_RUNTIME, SKB_DEFER_MAX};
use crate::obstacle::file_error;
use crate::roots::{Roots, entries, parse_version, read, read_number};

/// Sysctls that rules and checks read, below `/proc/sys`.
const SYSCTLS: [&str; 13] = [
    SKB_DEFER_MAX,
    PANIC_ON_WARN,
    RT_RUNTIME,
    "kernel/sched_rt_period_us",
    DEV_WEIGHT,
    "net/core/netdev_budget",
    "net/core/netdev_budget_usecs",
    "net/core/busy_poll",
    "net/core/busy_read",
    "net/core/default_qdisc",
    "kernel/nmi_watchdog",
    "kernel/timer_migration",
    "vm/stat_interval",
];

/// Services that set the same knobs as this crate, or related ones.
const CONFLICTS: [&str; 8] =
    ["irqbalance", "tuned", "kubelet", "kubelite", "k3s-server", "k3s-agent", "ovs-vswitchd", "scx_loader"];
/// Services that are kubelet, or contain it.
const KUBELETS: [&str; 4] = ["kubelet", "kubelite", "k3s-server", "k3s-agent"];
/// Most processes of such a name that are asked for their folder.
const KUBELETS_MAX: usize = 4096;
/// Most threads of Open vSwitch that are read.
const THREADS_MAX: usize = 4096;
/// Folders of kubelet: the usual one, k0s's, and MicroK8s's.
const KUBELET_DIRS: [&str; 3] =
    ["/var/lib/kubelet", "/var/lib/k0s/kubelet", "/var/snap/microk8s/common/var/lib/kubelet"];
/// The file in kubelet's folder in which it records the CPUs that it has assigned.
const CPU_MANAGER: &str = "cpu_manager_state";
/// The longest record that is read, bytes.
const RECORD_MAX: u64 = 4 << 20;

/// Whether a process's name, which the kernel cuts, is that of a service, directly or as NixOS wraps it
/// (`.tuned-wrapped`).
fn is_called(comm: &str, service: &str) -> bool {
    let wrapped = format!(".{service}-wrapped");
    comm == service || comm == wrapped.get(..CUT).unwrap_or(&wrapped)
}

impl Inventory {
    /// Reads the running host. A fact that cannot be read becomes a [`Note`].
    pub fn scan(roots: &Roots) -> Inventory {
        Self::scan_between(roots, &mut || ())
    }

    /// As [`Self::scan`], and calls `between` after each process and each kind of files.
    pub fn scan_between(roots: &Roots, between: &mut dyn FnMut()) -> Inventory {
        // Clears an error that an earlier pass has met.
        files::exhausted();
        let (cpus, note) = cpu::scan(roots);
        let notes = Vec::from_iter(note);
        let mut inventory = Inventory { kernel: kernel(roots), cpus, notes, ..Inventory::default() };
        let found = threads::scan(&roots.proc, between);
        inventory.threads = found.threads;
        inventory.conflicts = found
            .services
            .into_iter()
            .filter_map(|(comm, pid)| {
                let service = CONFLICTS.into_iter().find(|service| is_called(&comm, service))?;
                Some(Conflict { service: service.to_owned(), pid })
            })
            .collect();
        // Any user can start a process of such a name, so each is asked whether it is root's.
        let is_kubelet = |one: &&Conflict| KUBELETS.contains(&one.service.as_str());
        let kubelets: Vec<i32> =
            inventory.conflicts.iter().filter(is_kubelet).take(KUBELETS_MAX).map(|one| one.pid).collect();
        // One process per service is enough for the report.
        inventory.conflicts.sort_by(|one, other| (&one.service, one.pid).cmp(&(&other.service, other.pid)));
        inventory.conflicts.dedup_by(|one, before| one.service == before.service);
        inventory.pollers = pollers(&roots.proc, &inventory.conflicts);
        let pci = Pci::scan(&roots.sys);
        between();
        inventory.irqs = irqs::scan(roots, &pci);
        between();
        nics::scan(roots, &mut inventory, &pci);
        between();
        inventory.udev = udev::scan(&roots.root, inventory.nics.iter().filter(|nic| nic.physical).map(|nic| &nic.id));
        let dirs = kubelets.into_iter().filter_map(|pid| kubelet_dir(&roots.proc.join(pid.to_string())));
        let mut dirs = dirs.chain(KUBELET_DIRS.map(str::to_owned));
        inventory.cpu_manager = dirs.find_map(|dir| {
            let record = roots.root.join(dir.trim_start_matches('/')).join(CPU_MANAGER);
            cpu_manager(&record_of_root(&record)?)
        });
        inventory.sysctls = SYSCTLS
            .iter()
            .filter_map(|name| Some(((*name).to_owned(), read(&roots.proc.join("sys").join(name))?)))
            .collect();
        inventory.kvm = kvm(roots);
        inventory.memory = memory(roots);
        inventory.protections = protections(roots, &inventory.sysctls);
        if !inventory.protections.readable {
            let why = without_debugfs(&roots.debug, inventory.kernel.lockdown);
            inventory.notes.push(Note { about: "fair server".to_owned(), why });
        }
        if let Some(error) = files::exhausted() {
            let why = file_error("/proc or /sys", &error.into());
            inventory.incomplete.get_or_insert_with(|| why.clone());
            inventory.notes.push(Note { about: "files of the kernel".to_owned(), why });
        }
        inventory
    }
}

/// Whether a process is root's. Any user can start a process with a service's name and arguments.
fn is_roots(process: &Path) -> bool {
    let status = limit_waits(|| read(&process.join("status")));
    let users = status.as_deref().and_then(|status| status.lines().find_map(|line| line.strip_prefix("Uid:")));
    users.is_some_and(|users| users.split_ascii_whitespace().all(|user| user == "0"))
}

/// The polling threads of Open vSwitch's DPDK datapath: `pmd-cNN/id:M` (`lib/dpif-netdev.c`, `pmd_thread_main`).
fn pollers(proc: &Path, conflicts: &[Conflict]) -> Vec<(String, CpuSet)> {
    let switch = conflicts.iter().filter(|one| one.service == "ovs-vswitchd");
    let switch = switch.map(|one| proc.join(one.pid.to_string())).find(|process| is_roots(process));
    let tasks = switch.map(|process| entries(&process.join("task")));
    let of_task = |task: fs::DirEntry| {
        let comm = read(&task.path().join("comm"))?;
        let status = comm.starts_with("pmd-c").then(|| limit_waits(|| read(&task.path().join("status"))))??;
        let cpus = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
        Some((comm, CpuSet::from_list(cpus.trim()).ok()?))
    };
    let mut found: Vec<_> = tasks.into_iter().flatten().take(THREADS_MAX).filter_map(of_task).collect();
    found.sort_by(|(one, _), (other, _)| one.cmp(other));
    found
}

/// The folder that a process has as kubelet's (`--root-dir`, or K3s's `--kubelet-arg=root-dir=`). Any user can start a
/// process with such a name and argument, so only root's counts, and none in a container: its root is not the host's. A
/// container without a cgroup of its own is known by its PID namespace.
fn kubelet_dir(process: &Path) -> Option<String> {
    if !is_roots(process) {
        return None;
    }
    let cgroups = fs::read(process.join("cgroup")).inspect_err(files::note).unwrap_or_default();
    let mut paths = parse_cgroup(&cgroups).into_iter().chain(parse_cgroup_v1(&cgroups));
    let status = limit_waits(|| read(&process.join("status"))).unwrap_or_default();
    let numbers = status_value(status.as_bytes(), "NSpid").unwrap_or_default().split_ascii_whitespace().count();
    if numbers > 1 || paths.any(|path| container::of_path(&path).is_some()) {
        return None;
    }
    let command_line = limit_waits(|| read(&process.join("cmdline")))?;
    let words: Vec<&str> = command_line.split('\0').collect();
    let with_next = words.iter().enumerate().map(|(at, word)| (*word, words.get(at + 1).copied().unwrap_or_default()));
    let mut given = with_next.filter_map(|(word, next)| {
        let option = word.trim_start_matches('-');
        let option = match option.strip_prefix("kubelet-arg") {
            Some("") => next.trim_start_matches('-'),
            Some(rest) => rest.strip_prefix('=')?.trim_start_matches('-'),
            None if !word.starts_with('-') => return None,
            None => option,
        };
        match option.strip_prefix("root-dir")? {
            "" => Some(next),
            rest => rest.strip_prefix('='),
        }
    });
    // kubelet's options: the last counts.
    given.rfind(|dir| dir.starts_with('/')).map(str::to_owned)
}

/// A file's text, if it is a regular file of bounded size that belongs to root. Opening it does not wait for a writer.
fn record_of_root(path: &Path) -> Option<String> {
    let file = fs::File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = file.inspect_err(files::note).ok()?;
    let meta = file.metadata().ok()?;
    if !meta.is_file() || meta.uid() != 0 || meta.len() > RECORD_MAX {
        return None;
    }
    let mut text = String::new();
    file.take(RECORD_MAX).read_to_string(&mut text).ok()?;
    Some(text)
}

/// kubelet's checkpoint (`pkg/kubelet/cm/cpumanager/state/checkpoint.go`): CPUs by container, or in version 2 by pod
/// and container.
fn cpu_manager(text: &str) -> Option<CpuManager> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Checkpoint {
        policy_name: String,
        #[serde(default)]
        default_cpu_set: String,
        #[serde(default)]
        entries: BTreeMap<String, serde_json::Value>,
    }
    let checkpoint: Checkpoint = serde_json::from_str(text).ok()?;
    let lists = checkpoint.entries.values().flat_map(|entry| match entry {
        serde_json::Value::Object(containers) => containers.values().filter_map(serde_json::Value::as_str).collect(),
        other => Vec::from_iter(other.as_str()),
    });
    let cpus = |list: &str| CpuSet::from_list(list).unwrap_or_default();
    Some(CpuManager {
        shared: cpus(&checkpoint.default_cpu_set),
        exclusive: lists.flat_map(|list| cpus(list).iter().collect::<Vec<_>>()).collect(),
        policy: checkpoint.policy_name,
    })
}

fn kvm(roots: &Roots) -> Kvm {
    let parameters = roots.sys.join("module/kvm/parameters");
    let is_set = |name: &str| read(&parameters.join(name)).is_some_and(|text| text == "Y");
    Kvm {
        device: roots.dev.join("kvm").exists(),
        halt_poll_ns: read_number(&parameters.join("halt_poll_ns")),
        clock_sync: is_set("kvmclock_periodic_sync"),
        // arch/x86/kvm/mmu/mmu.c: the ratio is 0 on PREEMPT_RT.
        page_recovery: is_set("nx_huge_pages")
            && read_number::<u32>(&parameters.join("nx_huge_pages_recovery_ratio")).is_some_and(|ratio| ratio > 0),
    }
}

fn memory(roots: &Roots) -> Memory {
    let mm = roots.sys.join("kernel/mm");
    let nodes = entries(&roots.sys.join("devices/system/node"));
    let nodes = nodes.filter(|entry| entry.file_name().to_string_lossy().starts_with("node")).count();
    let balancing = read(&roots.proc.join("sys/kernel/numa_balancing"));
    Memory {
        merged: read(&mm.join("ksm/run")).is_some_and(|text| text == "1"),
        collapsed: read(&mm.join("transparent_hugepage/enabled"))
            .and_then(|text| Some(chosen(&text)?.to_owned()))
            .filter(|word| word != "never"),
        balanced: nodes > 1 && balancing.is_some_and(|mode| mode != "0"),
        // The first line is a heading.
        swap: read(&roots.proc.join("swaps")).is_some_and(|text| text.lines().count() > 1),
    }
}

/// The word in brackets.
fn chosen(text: &str) -> Option<&str> {
    text.split_once('[')?.1.split_once(']').map(|(word, _)| word)
}

fn kernel(roots: &Roots) -> Kernel {
    let release = read(&roots.proc.join("sys/kernel/osrelease")).unwrap_or_default();
    let build = read(&roots.proc.join("sys/kernel/version")).unwrap_or_default();
    let realtime = read(&roots.sys.join("kernel/realtime")).as_deref() == Some("1") || build.contains("PREEMPT_RT");
    let command_line = read(&roots.proc.join("cmdline")).unwrap_or_default();
    let asked = command_line.split_ascii_whitespace().any(|word| word == "threadirqs");
    let flags = read(&roots.proc.join("cpuinfo")).unwrap_or_default();
    let hypervisor = flags
        .lines()
        .find(|line| line.starts_with("flags"))
        .is_some_and(|line| line.split_ascii_whitespace().any(|flag| flag == "hypervisor"));
    Kernel {
        version: parse_version(&release).unwrap_or_default(),
        release,
        realtime,
        threaded_irqs: realtime || asked,
        hypervisor: hypervisor || roots.sys.join("hypervisor/type").exists(),
        lockdown: lockdown(&read(&roots.sys.join("kernel/security/lockdown")).unwrap_or_default()),
        // kernel/sched/psi.c creates no files if PSI is switched off.
        pressure: roots.proc.join("pressure/cpu").exists(),
        hrtick_dl: hrtick_dl(&read(&roots.debug.join("sched/features")).unwrap_or_default()),
    }
}

/// The scheduler's features: `PLACE_LAG NO_HRTICK_DL`.
fn hrtick_dl(features: &str) -> Option<bool> {
    features.split_ascii_whitespace().find_map(|feature| match feature {
        "HRTICK_DL" => Some(true),
        "NO_HRTICK_DL" => Some(false),
        _ => None,
    })
}

/// The mode in brackets: `none [integrity] confidentiality`.
fn lockdown(text: &str) -> Lockdown {
    match chosen(text) {
        Some("integrity") => Lockdown::Integrity,
        Some("confidentiality") => Lockdown::Confidentiality,
        _ => Lockdown::None,
    }
}

/// Why the scheduler's directory in debugfs cannot be read.
fn without_debugfs(debug: &Path, lockdown: Lockdown) -> String {
    let is_empty = || fs::read_dir(debug).map(|mut entries| entries.next().is_none());
    match is_empty() {
        _ if lockdown != Lockdown::None => {
            "kernel lockdown denies debugfs; boot without lockdown (it comes with Secure Boot)".to_owned()
        }
        Ok(true) => {
            let place = debug.display();
            format!("debugfs is not mounted at {place}: mount -t debugfs debugfs {place}")
        }
        Ok(false) => {
            "this kernel has no directory sched in debugfs; use one with CONFIG_DEBUG_FS and CONFIG_SCHED_DEBUG"
                .to_owned()
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            format!("{}: {error}; use a kernel with CONFIG_DEBUG_FS", debug.display())
        }
        Err(error) => file_error(&debug.display().to_string(), &error),
    }
}

fn protections(roots: &Roots, sysctls: &BTreeMap<String, String>) -> Protections {
    let sched = roots.debug.join("sched");
    let mut protections = Protections {
        readable: fs::read_dir(&sched).inspect_err(files::note).is_ok(),
        rt_runtime_us: sysctls.get(RT_RUNTIME).and_then(|text| text.parse().ok()),
        ..Protections::default()
    };
    for server in ["fair_server", "ext_server"] {
        let Ok(entries) = fs::read_dir(sched.join(server)).inspect_err(files::note) else { continue };
        let runtimes: BTreeMap<u32, u64> = entries
            .filter_map(Result::ok)
            .filter_map(|entry| {
                let cpu = entry.file_name().to_str()?.strip_prefix("cpu")?.parse().ok()?;
                Some((cpu, read_number(&entry.path().join("runtime"))?))
            })
            .collect();
        protections.servers.insert(server.to_owned(), runtimes);
    }
    protections
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whether_budgets_end_by_a_timer_is_one_of_the_scheduler_s_features() {
        assert_eq!(hrtick_dl("PLACE_LAG NO_HRTICK HRTICK_DL TTWU_QUEUE\n"), Some(true));
        assert_eq!(hrtick_dl("PLACE_LAG HRTICK NO_HRTICK_DL\n"), Some(false));
        assert_eq!((hrtick_dl(""), hrtick_dl("PLACE_LAG NO_HRTICK\n")), (None, None));
    }

    #[test]
    fn services_are_known_as_they_are_and_as_nixos_wraps_them() {
        let services = |comm: &str| CONFLICTS.into_iter().find(|service| is_called(comm, service));
        for (comm, service) in [
            ("tuned", Some("tuned")),
            (".tuned-wrapped", Some("tuned")),
            (".irqbalance-wra", Some("irqbalance")),
            (".scx_loader-wra", Some("scx_loader")),
            (".ovs-vswitchd-w", Some("ovs-vswitchd")),
            ("ksmtuned", None),
            ("openshift-tuned", None),
            (".tuned", None),
            ("irqbalance-ui", None),
        ] {
            assert_eq!(services(comm), service, "{comm}");
        }
    }

    #[test]
    fn what_the_kernel_does_by_itself_is_read() {
        let tree = tempfile::tempdir().unwrap();
        let roots = Roots { proc: tree.path().join("proc"), sys: tree.path().join("sys"), ..Roots::default() };
        assert_eq!(memory(&roots), Memory::default(), "a kernel that has none of it");
        let write = |name: &str, text: &str| {
            let file = tree.path().join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        let kvm_has = |name: &str, text: &str| write(&format!("sys/module/kvm/parameters/{name}"), text);
        for (name, text) in [
            ("sys/kernel/mm/ksm/run", "1\n"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
            ("proc/sys/kernel/numa_balancing", "1\n"),
            ("sys/devices/system/node/node0/cpulist", "0\n"),
        ] {
            write(name, text);
        }
        let one_node = Memory { merged: true, collapsed: Some("madvise".to_owned()), ..Memory::default() };
        assert_eq!(memory(&roots), one_node);
        write("sys/devices/system/node/node1/cpulist", "1\n");
        write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
        assert_eq!(memory(&roots), Memory { collapsed: None, balanced: true, ..one_node });
        write("proc/swaps", "Filename\tType\tSize\tUsed\tPriority\n");
        assert!(!memory(&roots).swap);
        write("proc/swaps", "Filename\tType\tSize\tUsed\tPriority\n/dev/zram0 partition 2048 0 100\n");
        assert!(memory(&roots).swap);
        kvm_has("kvmclock_periodic_sync", "Y\n");
        kvm_has("nx_huge_pages", "Y\n");
        kvm_has("nx_huge_pages_recovery_ratio", "0\n");
        assert!(kvm(&roots).clock_sync && !kvm(&roots).page_recovery);
        kvm_has("nx_huge_pages_recovery_ratio", "60\n");
        assert!(kvm(&roots).page_recovery);
    }

    #[test]
    fn kubelets_record_of_cpus_is_read_in_each_of_its_versions() {
        for (text, wanted) in [
            (
                r#"{"policyName":"static","defaultCpuSet":"0-1,6-7","checksum":7,
                    "entries":{"pod-a":{"app":"2-3","log":"4"},"pod-b":{"x":"5"}}}"#,
                Some(("static", "0-1,6-7", "2-5")),
            ),
            (
                r#"{"policyName":"static","defaultCPUSet":"0","defaultCpuSet":"0-3","entries":{"id":"4-5"}}"#,
                Some(("static", "0-3", "4-5")),
            ),
            (r#"{"policyName":"none","defaultCpuSet":"","checksum":1353318690}"#, Some(("none", "", ""))),
            (
                r#"{"policyName":"static","defaultCpuSet":"x","entries":{"id":{"a":7},"b":[]}}"#,
                Some(("static", "", "")),
            ),
            ("{}", None),
            ("", None),
            ("[", None),
        ] {
            let found = cpu_manager(text);
            let found = found
                .as_ref()
                .map(|found| (found.policy.as_str(), found.shared.to_string(), found.exclusive.to_string()));
            let wanted = wanted.map(|(policy, shared, exclusive)| (policy, shared.to_owned(), exclusive.to_owned()));
            assert_eq!(found, wanted, "{text}");
        }
    }

    #[test]
    fn kubelets_record_is_found_where_its_process_keeps_it() {
        let record = |policy: &str| format!(r#"{{"policyName":"{policy}","defaultCpuSet":"0-1"}}"#);
        for (comm, user, words, dirs, wanted) in [
            ("kubelet", 0, &["/usr/bin/kubelet", "--root-dir=/data/kube", "--v=2"][..], &["data/kube"][..], "at-0"),
            ("kubelet", 0, &["kubelet", "-root-dir", "/srv/k", "--v=2"], &["srv/k", "var/lib/kubelet"], "at-0"),
            ("kubelet", 0, &["kubelet", "--root-dir=/a", "--root-dir=/b"], &["a", "b"], "at-1"),
            ("k3s-agent", 0, &["k3s", "agent", "--kubelet-arg=root-dir=/mnt/k3s"], &["mnt/k3s"], "at-0"),
            ("k3s-server", 0, &["k3s", "server", "--kubelet-arg", "--root-dir=/mnt/k"], &["mnt/k"], "at-0"),
            // Not absolute, without a value, another option, and another user's process.
            ("kubelet", 0, &["kubelet", "--root-dir=data"], &["data", "var/lib/k0s/kubelet"], "at-1"),
            ("kubelet", 0, &["kubelet", "--root-dir"], &["var/lib/kubelet"], "at-0"),
            ("kubelet", 0, &["kubelet", "--root-directory=/x", "root-dir=/x"], &["x"], ""),
            ("kubelet", 1000, &["kubelet", "--root-dir=/home/u"], &["home/u"], ""),
            ("kubelite", 0, &["kubelite"], &["var/snap/microk8s/common/var/lib/kubelet"], "at-0"),
        ] {
            let tree = tempfile::tempdir().unwrap();
            let process = tree.path().join("proc/77");
            for (at, dir) in dirs.iter().enumerate() {
                fs::create_dir_all(tree.path().join(dir)).unwrap();
                fs::write(tree.path().join(dir).join(CPU_MANAGER), record(&format!("at-{at}"))).unwrap();
            }
            fs::create_dir_all(&process).unwrap();
            fs::write(process.join("status"), format!("Name:\t{comm}\nUid:\t{user}\t{user}\t{user}\t{user}\n"))
                .unwrap();
            fs::write(process.join("cmdline"), words.join("\0") + "\0").unwrap();
            let stat = fs::read_to_string("/proc/self/stat").unwrap();
            let fields = stat.rsplit_once(')').unwrap().1;
            fs::write(process.join("stat"), format!("77 ({comm}){fields}")).unwrap();
            // A user's process of that name, with a lower number, hides nothing.
            let other = tree.path().join("proc/7");
            fs::create_dir_all(&other).unwrap();
            fs::write(other.join("stat"), format!("7 ({comm}){fields}")).unwrap();
            fs::write(other.join("status"), format!("Name:\t{comm}\nUid:\t1000\t1000\t1000\t1000\n")).unwrap();
            fs::write(other.join("cmdline"), "kubelet\0--root-dir=/nowhere\0").unwrap();
            let at = |name: &str| tree.path().join(name);
            let roots = Roots { proc: at("proc"), sys: at("sys"), debug: at("debug"), dev: at("dev"), root: at("") };
            let is_root = rustix::process::geteuid().is_root();
            let found = Inventory::scan(&roots).cpu_manager.map(|manager| manager.policy).unwrap_or_default();
            assert_eq!(found, if is_root { wanted } else { "" }, "{comm} {words:?}");
        }
    }

    #[test]
    fn a_kubelet_in_a_container_names_no_folder_of_the_host() {
        let process = tempfile::tempdir().unwrap();
        fs::write(process.path().join("cmdline"), "kubelet\0--root-dir=/data\0").unwrap();
        let id = "0123456789abcdef".repeat(4);
        for (cgroups, numbers, wanted) in [
            ("0::/system.slice/kubelet.service".to_owned(), "77", Some("/data")),
            ("4:memory:/system.slice\n0::/system.slice/kubelet.service".to_owned(), "77", Some("/data")),
            (format!("0::/system.slice/docker-{id}.scope"), "77", None),
            (format!("0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{id}.scope"), "77", None),
            (format!("4:memory:/docker/{id}\n0::/system.slice/docker.service"), "77", None),
            ("0::/system.slice/starter.service".to_owned(), "77\t7", None),
        ] {
            let status = format!("Name:\tkubelet\nUid:\t0\t0\t0\t0\nNSpid:\t{numbers}\n");
            fs::write(process.path().join("status"), status).unwrap();
            fs::write(process.path().join("cgroup"), format!("{cgroups}\n")).unwrap();
            assert_eq!(kubelet_dir(process.path()).as_deref(), wanted, "{cgroups}, {numbers}");
        }
    }

    #[test]
    fn polling_threads_of_open_vswitch_are_those_of_roots() {
        let tree = tempfile::tempdir().unwrap();
        let conflicts = [Conflict { service: "ovs-vswitchd".to_owned(), pid: 77 }];
        for (user, wanted) in [(0, &["pmd-c01/id:9 1", "pmd-c03/id:8 2-3"][..]), (1000, &[])] {
            let process = tree.path().join("77");
            let file = |task: &str, name: &str, text: &str| {
                let task = process.join("task").join(task);
                fs::create_dir_all(&task).unwrap();
                fs::write(task.join(name), text).unwrap();
            };
            for (task, comm, cpus) in
                [("79", "pmd-c03/id:8", "2-3"), ("78", "pmd-c01/id:9", "1"), ("80", "revalidator5", "0-7")]
            {
                file(task, "comm", &format!("{comm}\n"));
                file(task, "status", &format!("Name:\tx\nCpus_allowed_list:\t{cpus}\n"));
            }
            file("81", "comm", "pmd-c04/id:7\n");
            fs::write(process.join("status"), format!("Uid:\t{user}\t{user}\t{user}\t{user}\n")).unwrap();
            let found = pollers(tree.path(), &conflicts);
            let found: Vec<String> = found.iter().map(|(comm, cpus)| format!("{comm} {cpus}")).collect();
            assert_eq!(found, wanted);
        }
    }

    #[test]
    fn a_record_that_is_no_regular_file_of_root_is_not_read() {
        let tree = tempfile::tempdir().unwrap();
        let file = tree.path().join(CPU_MANAGER);
        let is_root = rustix::process::geteuid().is_root();
        fs::write(&file, "{}").unwrap();
        assert_eq!(record_of_root(&file).is_some(), is_root);
        if is_root {
            std::os::unix::fs::chown(&file, Some(65_534), None).unwrap();
            assert_eq!(record_of_root(&file), None, "another user's");
        }
        fs::remove_file(&file).unwrap();
        // Nobody writes to it: opening it must not wait.
        rustix::fs::mknodat(rustix::fs::CWD, &file, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert_eq!(record_of_root(&file), None, "a FIFO");
        fs::remove_file(&file).unwrap();
        fs::File::create(&file).unwrap().set_len(RECORD_MAX + 1).unwrap();
        assert_eq!(record_of_root(&file), None, "too long");
    }

    #[test]
    fn real_time_kernels_are_known_by_their_build_or_their_flag_and_not_by_their_release() {
        let preempted = "#1 SMP PREEMPT_DYNAMIC Sat Feb 3 10:00:00 UTC 2024";
        for (release, version, build, flag, realtime) in [
            ("6.12.31+deb13-rt-amd64", (6, 12), "#1 SMP PREEMPT_RT Debian 6.12.31-1", None, true),
            // Before Linux 6.12 the patches of PREEMPT_RT add the flag.
            ("5.14.0-503.11.1.el9_5.x86_64+rt", (5, 14), "#1 SMP PREEMPT_RT Tue Nov 12 2024", Some("1\n"), true),
            ("4.19.0-27-rt-arm64", (4, 19), "#1 SMP PREEMPT RT Debian 4.19.316-1", Some("1\n"), true),
            ("6.8.1-1015-realtime", (6, 8), "#16-Ubuntu SMP PREEMPT_RT Wed Jan 15 2025", Some("1\n"), true),
            ("6.4.0-150700.7-rt", (6, 4), "#1 SMP PREEMPT_RT (1a2b3c4)", None, true),
            ("6.6.63-v8-16k+", (6, 6), "#1825 SMP PREEMPT_RT Sun Nov 24 2024", None, true),
            ("10.3.0", (10, 3), "#1 SMP PREEMPT_RT", None, true),
            // A release is only a name.
            ("6.12.31-rt", (6, 12), preempted, None, false),
            ("6.8.0-45-lowlatency", (6, 8), "#45-Ubuntu SMP PREEMPT_DYNAMIC Fri Aug 30 2024", None, false),
            ("6.11.4-301.fc41.x86_64", (6, 11), preempted, Some("0\n"), false),
            ("6.10.11-amd64", (6, 10), "#1 SMP PREEMPT Debian 6.10.11-1", None, false),
            ("6.9.0-rt.cloud", (6, 9), "#2 SMP RT", None, false),
            ("custom", (0, 0), "", None, false),
        ] {
            let tree = tempfile::tempdir().unwrap();
            let roots = Roots { proc: tree.path().join("proc"), sys: tree.path().join("sys"), ..Roots::default() };
            let names = roots.proc.join("sys/kernel");
            fs::create_dir_all(&names).unwrap();
            fs::write(names.join("osrelease"), format!("{release}\n")).unwrap();
            fs::write(names.join("version"), format!("{build}\n")).unwrap();
            if let Some(flag) = flag {
                fs::create_dir_all(roots.sys.join("kernel")).unwrap();
                fs::write(roots.sys.join("kernel/realtime"), flag).unwrap();
            }
            let found = kernel(&roots);
            assert_eq!((found.release.as_str(), found.version), (release, version));
            assert_eq!((found.realtime, found.threaded_irqs), (realtime, realtime), "{release}");
        }
    }

    #[test]
    fn what_keeps_debugfs_from_being_read_is_named() {
        let tree = tempfile::tempdir().unwrap();
        let why = |lockdown| without_debugfs(tree.path(), lockdown);
        assert!(why(Lockdown::None).contains("mount -t debugfs debugfs /"), "{}", why(Lockdown::None));
        let locked = why(Lockdown::Integrity);
        assert!(locked.starts_with("kernel lockdown denies debugfs; boot without lockdown"), "{locked}");
        fs::create_dir(tree.path().join("tracing")).unwrap();
        assert!(why(Lockdown::None).contains("no directory sched"));
        let missing = without_debugfs(&tree.path().join("none"), Lockdown::None);
        assert!(
            missing.contains("none: No such file") && missing.contains("a kernel with CONFIG_DEBUG_FS"),
            "{missing}"
        );
    }

    #[test]
    fn versions_and_lockdown_are_read() {
        assert_eq!(parse_version("6.12.48+deb13-rt-amd64"), Some((6, 12)));
        assert_eq!(parse_version("7.2-rc1"), Some((7, 2)));
        assert_eq!(parse_version("linux"), None);
        assert_eq!(lockdown("none [integrity] confidentiality"), Lockdown::Integrity);
        assert_eq!(lockdown("[none] integrity confidentiality"), Lockdown::None);
        assert_eq!(lockdown(""), Lockdown::None);
    }
}
