//! Why the kernel refuses to set a knob, and what to do about it.
//!
//! In: a knob, a value, and for a refusal the kernel's error. Out: an [`Obstacle`], found from the files that decide.
//! The kernel returns EPERM or EINVAL for many causes. A host with all privileges meets these:
//!
//! - a cgroup without real-time budget (CONFIG_RT_GROUP_SCHED; `kernel/sched/syscalls.c`, `__sched_setscheduler`);
//! - a cpuset without the CPU (`kernel/sched/syscalls.c`, `__sched_setaffinity`), or a kernel thread that is bound to
//!   its own CPU;
//! - a module parameter or sysfs file without write permission (`fs/kernfs/file.c`, `kernfs_fop_open`), or a file
//!   system mounted read-only.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use ontime_tenants::proc::{parse_stat, printable};
use ontime_tenants::remedy::{of_limits, remedy};
use ontime_tenants::{Policy, ThreadId, limit_waits};

use crate::cpus::CpuSet;
use crate::kernel_files::RT_RUNTIME;
use crate::knob::{Knob, KnobError, Obstacle, Root, Value};
use crate::roots::{Roots, read};

/// The obstacle to a setting, found before it is tried.
pub(crate) fn foresee(roots: &Roots, knob: &Knob, value: &Value) -> Option<Obstacle> {
    match (knob, value) {
        (Knob::ThreadPolicy { thread, .. }, Value::Policy(policy)) if is_fixed(*policy) => no_budget(roots, *thread),
        (Knob::ThreadAffinity { thread, .. }, Value::Cpus(cpus)) => outside_cpuset(roots, *thread, cpus),
        (Knob::HostFile { root, path }, value) => read_only(&roots.path(*root, path), *root, path, value),
        _ => None,
    }
}

/// Adds the cause, if known, to the kernel's refusal. `value` is none if the knob was read.
pub(crate) fn explain(roots: &Roots, knob: &Knob, value: Option<&Value>, error: KnobError) -> KnobError {
    let KnobError::Os { knob: name, what, source } = error else { return error };
    let found = match source.raw_os_error() {
        Some(libc::EPERM | libc::EINVAL | libc::EACCES) => value.and_then(|value| foresee(roots, knob, value)),
        _ => None,
    };
    let found = found.or_else(|| hidden(roots, knob, value, &source)).or_else(|| from_errno(knob, &source));
    match found {
        Some(Obstacle { cause, remedy, lasting: true }) => {
            KnobError::Unsupported { knob: name, why: format!("{cause}; {remedy}") }
        }
        Some(Obstacle { cause, remedy, .. }) => KnobError::Refused { knob: name, what, source, cause, remedy },
        None => KnobError::Os { knob: name, what, source },
    }
}

/// FIFO and RR: the policies for which RT group scheduling has budgets.
fn is_fixed(policy: Policy) -> bool {
    matches!(policy, Policy::Fifo(_) | Policy::Rr(_))
}

/// The thread's cgroup in this controller's hierarchy: the controller's own in version 1, the single one in version 2
/// (an empty name).
fn cgroup_of(roots: &Roots, thread: ThreadId, controller: &str) -> Option<String> {
    let path = roots.proc.join(format!("{}/task/{}/cgroup", thread.pid, thread.tid));
    let text = fs::read(path).ok()?;
    let text = String::from_utf8_lossy(&text);
    text.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        controllers.split(',').any(|one| one == controller).then(|| path.to_owned())
    })
}

/// A thread's cgroup of a version 1 controller: the directory of its files, and its path.
fn of_version_1(roots: &Roots, thread: ThreadId, controller: &str) -> Option<(PathBuf, String)> {
    let path = cgroup_of(roots, thread, controller)?;
    let mounts = fs::read_dir(roots.sys.join("fs/cgroup")).ok()?.flatten();
    let is_it = |name: &str| name.split(',').any(|one| one == controller);
    let mount = mounts
        .map(|entry| entry.path())
        .find(|dir| dir.file_name().is_some_and(|name| is_it(&name.to_string_lossy())))?;
    Some((mount.join(path.trim_start_matches('/')), path))
}

/// If RT threads have no limit at all (-1), the kernel checks no cgroup budget (`rt_bandwidth_enabled`).
fn no_budget(roots: &Roots, thread: ThreadId) -> Option<Obstacle> {
    let limit = read(&roots.proc.join("sys").join(RT_RUNTIME));
    let (dir, path) = of_version_1(roots, thread, "cpu")?;
    let file = dir.join("cpu.rt_runtime_us");
    if limit.as_deref() == Some("-1") || read(&file)? != "0" {
        return None;
    }
    let cause = format!(
        "the kernel has RT group scheduling (CONFIG_RT_GROUP_SCHED), and cgroup {} of controller cpu has no \
         real-time budget",
        printable(path.as_bytes())
    );
    let remedy = format!(
        "give it one, after the cgroups above it: echo 900000 > {}; or boot with rt_group_sched=0 (6.14), or a kernel \
         without that option",
        printable(file.as_os_str().as_encoded_bytes())
    );
    Some(Obstacle::new(cause, remedy))
}

fn outside_cpuset(roots: &Roots, thread: ThreadId, wanted: &CpuSet) -> Option<Obstacle> {
    let (dir, path, files) = match of_version_1(roots, thread, "cpuset") {
        Some((dir, path)) => (dir, path, ["cpuset.effective_cpus", "cpuset.cpus"]),
        None => {
            let path = cgroup_of(roots, thread, "")?;
            let dir = roots.sys.join("fs/cgroup").join(path.trim_start_matches('/'));
            (dir, path, ["cpuset.cpus.effective", "cpuset.cpus"])
        }
    };
    let allowed = files.iter().find_map(|file| read(&dir.join(file))).and_then(|text| CpuSet::from_list(&text).ok())?;
    let outside: CpuSet = wanted.iter().filter(|cpu| !allowed.contains(*cpu)).collect();
    // If only some of the CPUs are allowed, the kernel uses these.
    if allowed.is_empty() || outside.is_empty() || outside.len() < wanted.len() {
        return None;
    }
    let path = printable(path.as_bytes());
    let cause = format!("the cpuset of cgroup {path} lets its threads run on CPUs {allowed} only, not on {outside}");
    let remedy = format!(
        "add {outside} to cpuset.cpus of that cgroup and of those above it (systemd: AllowedCPUs=), or name a CPU of \
         {allowed} in /etc/ontime/host.toml"
    );
    Some(Obstacle::new(cause, remedy))
}

fn read_only(file: &Path, root: Root, path: &str, value: &Value) -> Option<Obstacle> {
    if fs::metadata(file).ok()?.permissions().mode() & 0o222 != 0 {
        return None;
    }
    let parameter = path.strip_prefix("module/").and_then(|rest| rest.split_once("/parameters/"));
    let remedy = match parameter {
        Some((module, name)) => format!(
            "when {module} is loaded: options {module} {name}={value} in /etc/modprobe.d, or {module}.{name}={value} \
             on the kernel's \
             command line where it is built in"
        ),
        None => "boot a kernel that lets it be written".to_owned(),
    };
    Some(Obstacle { cause: format!("{root}/{path} is read-only in this kernel"), remedy, lasting: true })
}

fn mounted_read_only() -> Obstacle {
    let cause = "its file system is mounted read-only for this process".to_owned();
    let remedy = "run Ontime on the host, not in a container, with /sys and /proc/sys writable (systemd: no \
                  ProtectKernelTunables=)"
        .to_owned();
    Obstacle { cause, remedy, lasting: true }
}

/// Obstacles that show only in the kernel's error and in this process's capabilities.
fn hidden(roots: &Roots, knob: &Knob, value: Option<&Value>, source: &io::Error) -> Option<Obstacle> {
    let code = source.raw_os_error()?;
    if let (Knob::ThreadAffinity { thread, .. }, libc::EINVAL) = (knob, code) {
        return is_bound(roots, *thread).then(|| Obstacle {
            cause: "the kernel binds this thread to its CPU".to_owned(),
            remedy: "leave it there; no program can move it".to_owned(),
            lasting: true,
        });
    }
    let (name, bit) = right_for(knob, code)?;
    if !has_right(roots, bit)? {
        let remedy = "run it as root, or give it that capability (the unit ontimed.service does)";
        return Some(Obstacle::new(format!("this process has no {name}"), remedy.to_owned()));
    }
    if code == libc::EACCES {
        let cause = "a security module (SELinux, AppArmor) forbids it".to_owned();
        let remedy = "allow it in that module's policy; ausearch -m avc or journalctl -k shows the denial".to_owned();
        return Some(Obstacle::new(cause, remedy));
    }
    match (knob, value) {
        (Knob::ThreadPolicy { thread, .. }, Some(Value::Policy(policy))) if is_fixed(*policy) => {
            if let Some(path) = cgroup_of(roots, *thread, "").filter(|path| path != "/") {
                let cause = format!(
                    "the kernel may have RT group scheduling (CONFIG_RT_GROUP_SCHED), which cgroup v2 has no budgets \
                     for, and the thread is in cgroup {}",
                    printable(path.as_bytes())
                );
                let remedy = "boot with rt_group_sched=0 (6.14), or a kernel without that option".to_owned();
                return Some(Obstacle::new(cause, remedy));
            }
        }
        // kernel/sched/syscalls.c, __sched_setscheduler.
        (Knob::ThreadPolicy { .. }, Some(Value::Policy(Policy::Deadline { .. }))) => {
            let cause = "SCHED_DEADLINE takes only a thread that may run on all CPUs of its root domain".to_owned();
            let remedy = "let it run on all of them (taskset -p), or make its CPUs an isolated cpuset partition";
            return Some(Obstacle::new(cause, remedy.to_owned()));
        }
        _ => {}
    }
    let cause = format!("{name} of this process counts in a container's user namespace only");
    Some(Obstacle::new(cause, "run Ontime on the host, not in a container".to_owned()))
}

/// The meaning of an error number for a kind of knob.
fn from_errno(knob: &Knob, source: &io::Error) -> Option<Obstacle> {
    let lasting = |cause: &str, remedy: &str| {
        Some(Obstacle { cause: cause.to_owned(), remedy: remedy.to_owned(), lasting: true })
    };
    let found = |cause: &str, remedy: &str| Some(Obstacle::new(cause.to_owned(), remedy.to_owned()));
    let known = if by_netlink(knob) { of_netlink(source) } else { of_limits(source) };
    if let Some((cause, remedy)) = known {
        return found(cause, remedy);
    }
    let code = source.raw_os_error()?;
    match (knob, code) {
        (_, libc::EROFS) => Some(mounted_read_only()),
        // kernel/sched/deadline.c, dl_task_check_affinity.
        (Knob::ThreadAffinity { .. }, libc::EBUSY) => found(
            "a SCHED_DEADLINE thread runs on all CPUs of its root domain",
            "give it another policy (chrt), or make its CPUs an isolated cpuset partition",
        ),
        (knob, libc::EBUSY) if takes_deadline_time(knob) => found(
            "SCHED_DEADLINE threads and the kernel's servers hold the CPU time that this would need",
            "end or lower SCHED_DEADLINE threads (ps -eLo tid,cls,comm shows them as DLN)",
        ),
        (Knob::ThreadAffinity { .. } | Knob::IrqAffinity { .. } | Knob::HostCpus { .. }, libc::EINVAL) => found(
            "none of these CPUs is online",
            "put one online (echo 1 > /sys/devices/system/cpu/cpuN/online), or name another in /etc/ontime/host.toml",
        ),
        (Knob::HostFile { .. }, libc::EINVAL | libc::ERANGE | libc::EOPNOTSUPP) => {
            lasting("this kernel does not take that value there", "boot a kernel that takes it")
        }
        (Knob::TapBatch { process, .. } | Knob::SendBuffer { process, .. }, libc::EBUSY) => found(
            "the process replaced files while they were taken, and these are not closed yet",
            &format!("see what it does with them (ls -l /proc/{}/fd); they are closed in time", process.pid),
        ),
        _ => of_device(&knob.nic()?.name, code),
    }
}

/// The meaning of an error number for a NIC.
fn of_device(name: &str, code: i32) -> Option<Obstacle> {
    let (cause, remedy) = match code {
        libc::EBUSY | libc::ENODEV | libc::ENETDOWN => {
            ("the device is busy, asleep or being reset", format!("wait until it is up: ip link show dev {name}"))
        }
        libc::EIO | libc::ENXIO | libc::EREMOTEIO => {
            ("the device, its driver or its firmware fails", format!("see its messages: journalctl -k -g {name}"))
        }
        _ => return None,
    };
    Some(Obstacle::new(cause.to_owned(), remedy))
}

/// Whether the kernel admits this setting only within the bandwidth that SCHED_DEADLINE leaves
/// (`kernel/sched/deadline.c`, `sched_dl_overflow`, `dl_server_apply_params`, `sched_dl_global_validate`).
fn takes_deadline_time(knob: &Knob) -> bool {
    match knob {
        Knob::ThreadPolicy { .. } => true,
        Knob::HostFile { root, path } => *root == Root::Debug || path.ends_with(RT_RUNTIME),
        _ => false,
    }
}

/// The meaning of an error of netlink: cause and remedy.
fn of_netlink(error: &io::Error) -> Option<(&'static str, &'static str)> {
    if error.kind() == io::ErrorKind::Interrupted {
        let cause = "interfaces, queues or filters change all the time";
        return Some((cause, "wait until that ends; ip monitor and tc monitor show what changes"));
    }
    Some(match error.raw_os_error()? {
        libc::EAGAIN | libc::ETIMEDOUT => (
            "the kernel did not answer in 2 s, because a driver or a hung task holds its network lock (RTNL)",
            "see which: journalctl -k -g 'blocked for more than'",
        ),
        libc::EAFNOSUPPORT => {
            ("this process may not open netlink sockets", "let RestrictAddressFamilies= of the unit contain AF_NETLINK")
        }
        _ => return of_limits(error),
    })
}

/// Whether this knob is read and set through netlink.
fn by_netlink(knob: &Knob) -> bool {
    match knob {
        Knob::ThreadPolicy { .. }
        | Knob::ThreadAffinity { .. }
        | Knob::IrqAffinity { .. }
        | Knob::HostFile { .. }
        | Knob::HostCpus { .. }
        | Knob::NicFile { .. }
        | Knob::XpsCpus { .. }
        | Knob::TapBatch { .. }
        | Knob::SendBuffer { .. } => false,
        Knob::NapiThreaded { .. }
        | Knob::Moderation { .. }
        | Knob::Feature { .. }
        | Knob::PeerFeature { .. }
        | Knob::Clsact { .. }
        | Knob::TxSteer { .. }
        | Knob::RootQdisc { .. } => true,
    }
}

/// An error of netlink with cause and remedy, for a request that concerns no single knob.
pub(crate) fn netlink_error(what: &str, error: &io::Error) -> String {
    with_cause(what, error, of_netlink(error))
}

/// The error of a file of the kernel that is no knob, with cause and remedy.
pub(crate) fn file_error(what: &str, error: &io::Error) -> String {
    with_cause(what, error, of_limits(error))
}

fn with_cause(what: &str, error: &io::Error, known: Option<(&str, &str)>) -> String {
    match known {
        Some((cause, remedy)) => format!("{what}: {error}: {cause}; {remedy}"),
        None if matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES)) => {
            format!("{what}: {error}; {}", remedy(error))
        }
        None => format!("{what}: {error}; see the kernel's log (journalctl -k)"),
    }
}

/// The capability whose absence causes this error, and its number (`include/uapi/linux/capability.h`).
fn right_for(knob: &Knob, code: i32) -> Option<(&'static str, u32)> {
    match (knob, code) {
        (Knob::ThreadPolicy { .. } | Knob::ThreadAffinity { .. }, libc::EPERM | libc::EACCES) => {
            Some(("CAP_SYS_NICE", 23))
        }
        (Knob::PeerFeature { .. } | Knob::TapBatch { .. } | Knob::SendBuffer { .. }, libc::EACCES) => {
            Some(("CAP_SYS_PTRACE", 19))
        }
        (_, libc::EACCES) => Some(("CAP_DAC_OVERRIDE", 1)),
        (_, libc::EPERM) if knob.nic().is_some() => Some(("CAP_NET_ADMIN", 12)),
        _ => None,
    }
}

/// Whether this process has a capability.
fn has_right(roots: &Roots, bit: u32) -> Option<bool> {
    let status = fs::read(roots.proc.join("self/status")).ok()?;
    let mask = ontime_tenants::proc::status_value(&status, "CapEff")?;
    Some(u64::from_str_radix(mask, 16).ok()? >> bit & 1 == 1)
}

/// PF_NO_SETAFFINITY (`include/linux/sched.h`).
fn is_bound(roots: &Roots, thread: ThreadId) -> bool {
    let stat = roots.proc.join(format!("{}/task/{}/stat", thread.pid, thread.tid));
    limit_waits(|| fs::read(stat))
        .ok()
        .and_then(|line| parse_stat(&line))
        .is_some_and(|stat| stat.flags & 0x0400_0000 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const THREAD: ThreadId = ThreadId { pid: 700, tid: 701, start_time: 9 };

    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new(cgroup: &str) -> Self {
            let tree = Self(tempfile::tempdir().unwrap());
            tree.put("proc/700/task/701/cgroup", cgroup);
            tree
        }
        fn put(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        fn roots(&self) -> Roots {
            Roots { proc: self.0.path().join("proc"), sys: self.0.path().join("sys"), ..Roots::default() }
        }
    }

    fn place(policy: Policy) -> (Knob, Value) {
        (Knob::ThreadPolicy { thread: THREAD, comm: "CPU 0/KVM".to_owned() }, Value::Policy(policy))
    }

    fn on(cpus: &str) -> (Knob, Value) {
        let knob = Knob::ThreadAffinity { thread: THREAD, comm: "CPU 0/KVM".to_owned() };
        (knob, Value::Cpus(CpuSet::from_list(cpus).unwrap()))
    }

    /// The error that a refused write becomes.
    fn refused(tree: &Tree, (knob, value): &(Knob, Value), code: i32) -> KnobError {
        let source = io::Error::from_raw_os_error(code);
        explain(&tree.roots(), knob, Some(value), KnobError::Os { knob: knob.to_string(), what: "setting it", source })
    }

    #[test]
    fn a_cgroup_without_real_time_budget_is_the_cause() {
        for (mount, path) in
            [("cpu,cpuacct", "/machine.slice/vm"), ("cpu", "/docker/0a1b"), ("cpuacct,cpu", "/lxc.payload.plc")]
        {
            let tree = Tree::new(&format!("4:memory:{path}\n3:{mount}:{path}\n0::/other\n"));
            let budget = format!("sys/fs/cgroup/{mount}{path}/cpu.rt_runtime_us");
            tree.put(&budget, "0\n");
            let (knob, value) = place(Policy::Fifo(47));
            let found = foresee(&tree.roots(), &knob, &value).unwrap();
            assert!(found.cause.contains("CONFIG_RT_GROUP_SCHED") && found.cause.contains(path), "{found:?}");
            assert!(found.remedy.contains(&budget) && !found.lasting, "{found:?}");
            let error = refused(&tree, &place(Policy::Rr(3)), libc::EPERM);
            assert!(matches!(&error, KnobError::Refused { cause, .. } if *cause == found.cause), "{error}");
            // Policies that need no budget, and a cgroup that has one. Without an RT limit no cgroup is read.
            for policy in [Policy::BULK, Policy::Deadline { runtime: 1, deadline: 2, period: 2 }] {
                assert_eq!(foresee(&tree.roots(), &knob, &Value::Policy(policy)), None);
            }
            tree.put("proc/sys/kernel/sched_rt_runtime_us", "-1\n");
            assert_eq!(foresee(&tree.roots(), &knob, &value), None);
            tree.put("proc/sys/kernel/sched_rt_runtime_us", "950000\n");
            tree.put(&budget, "300000\n");
            assert_eq!(foresee(&tree.roots(), &knob, &value), None);
        }
    }

    #[test]
    fn a_refused_place_tells_a_missing_right_from_cgroup_v2() {
        let tree = Tree::new("0::/machine.slice/machine-qemu.scope\n");
        let fifo = place(Policy::Fifo(47));
        assert!(matches!(refused(&tree, &fifo, libc::EPERM), KnobError::Os { .. }), "nothing is known");
        tree.put("proc/self/status", "Name:\tontime\nCapEff:\t00000000a80425fb\n");
        assert!(refused(&tree, &fifo, libc::EPERM).to_string().contains("no CAP_SYS_NICE"));
        tree.put("proc/self/status", "Name:\tontime\nCapEff:\t000001ffffffffff\n");
        let error = refused(&tree, &fifo, libc::EPERM).to_string();
        assert!(
            error.contains("cgroup v2 has no budgets") && error.contains("/machine.slice/machine-qemu.scope"),
            "{error}"
        );
        tree.put("proc/700/task/701/cgroup", "0::/\n");
        let error = refused(&tree, &fifo, libc::EPERM).to_string();
        assert!(error.contains("container") && !error.contains("cgroup"), "the root has no limit: {error}");
    }

    #[test]
    fn a_cpuset_without_the_cpu_is_the_cause() {
        let version_1 = Tree::new("7:cpuset:/machine/plc\n0::/machine/plc\n");
        version_1.put("sys/fs/cgroup/cpuset/machine/plc/cpuset.effective_cpus", "0-1\n");
        let version_2 = Tree::new("0::/edge.slice/plc.scope\n");
        version_2.put("sys/fs/cgroup/edge.slice/plc.scope/cpuset.cpus.effective", "0-1\n");
        for tree in [&version_1, &version_2] {
            for (wanted, outside) in [("2", Some("2")), ("2-3", Some("2-3")), ("1-3", None), ("0", None)] {
                let (knob, value) = on(wanted);
                let found = foresee(&tree.roots(), &knob, &value);
                assert_eq!(found.is_some(), outside.is_some(), "{wanted}");
                let (Some(found), Some(outside)) = (found, outside) else { continue };
                assert!(
                    found.cause.contains("CPUs 0-1 only")
                        && found.remedy.contains(&format!("add {outside} to cpuset.cpus"))
                );
                let error = refused(tree, &on(wanted), libc::EINVAL).to_string();
                assert!(
                    error.contains("plc lets its threads run") || error.contains("plc.scope lets its threads run"),
                    "{error}"
                );
            }
        }
        // A kernel thread that is bound to its CPU, in a cgroup without limits.
        let bound = Tree::new("0::/\n");
        bound.put(
            "proc/700/task/701/stat",
            "701 (ktimers/3) S 2 0 0 0 -1 69238848 0 0 0 0 0 0 0 0 20 0 1 0 9 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 17 3 2 1 \
             0 0 0 0 0 0 0 0 0 0 0\n",
        );
        assert!(matches!(refused(&bound, &on("1"), libc::EINVAL), KnobError::Unsupported { .. }));
    }

    #[test]
    fn what_nobody_may_write_is_unsupported_with_where_it_is_set() {
        let tree = Tree::new("0::/\n");
        for (path, remedy) in [
            ("module/kvm/parameters/halt_poll_ns", "options kvm halt_poll_ns=0 in /etc/modprobe.d"),
            ("module/vhost_net/parameters/experimental_zcopytx", "options vhost_net experimental_zcopytx=0"),
            ("kernel/some/value", "boot a kernel that lets it be written"),
        ] {
            let file = format!("sys/{path}");
            tree.put(&file, "200000\n");
            let knob = Knob::HostFile { root: Root::Sys, path: path.to_owned() };
            let zero = (knob.clone(), Value::Text("0".to_owned()));
            assert_eq!(foresee(&tree.roots(), &knob, &zero.1), None);
            assert!(
                matches!(refused(&tree, &zero, libc::EACCES), KnobError::Os { .. }),
                "it is writable: another cause"
            );
            assert!(matches!(refused(&tree, &zero, libc::EROFS), KnobError::Unsupported { .. }));
            fs::set_permissions(tree.0.path().join(&file), fs::Permissions::from_mode(0o444)).unwrap();
            assert!(foresee(&tree.roots(), &knob, &zero.1).unwrap().lasting);
            let error = refused(&tree, &zero, libc::EACCES);
            assert!(matches!(&error, KnobError::Unsupported { why, .. } if why.contains(remedy)), "{error}");
        }
    }
}
