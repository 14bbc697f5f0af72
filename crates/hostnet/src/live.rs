//! The running host: reads and writes knobs through `/proc`, `/sys`, netlink and the scheduler's system calls.
//!
//! In: a [`Knob`]. Out: its value, or an error. Only open netlink sockets are kept between calls, so that a renamed or
//! unplugged interface is noticed at once.

use std::cell::RefCell;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use ontime_tenants::{Policy, ThreadError, ThreadId, namespace};

use crate::cpus::CpuSet;
use crate::kernel_files::UNTHREADING_WAITS;
use crate::knob::{Host, IrqId, Knob, KnobError, NicId, Obstacle, Root, SteerFrom, Value};
use crate::netlink::Netlink;
use crate::netlink::ethtool::Ethtool;
use crate::netlink::link::links;
use crate::netlink::netdev::Netdev;
use crate::netlink::qdisc::{self, RootQdisc};
use crate::netlink::tc;
use crate::obstacle;
use crate::roots::{Roots, parse_version};
use crate::tap::{self, Tap};

/// The running host.
#[derive(Default)]
pub struct LiveHost {
    roots: Roots,
    netdev: RefCell<Option<Netdev>>,
    route: RefCell<Option<Netlink>>,
    ethtool: RefCell<Option<Ethtool>>,
}

impl LiveHost {
    /// A host whose file systems are mounted elsewhere.
    pub fn with_roots(roots: Roots) -> Self {
        Self { roots, ..Self::default() }
    }

    /// Mount points of the file systems.
    pub fn roots(&self) -> &Roots {
        &self.roots
    }

    fn with_netdev<T>(&self, knob: &Knob, run: impl FnOnce(&mut Netdev) -> io::Result<T>) -> Result<T, KnobError> {
        let mut slot = self.netdev.borrow_mut();
        let netdev = opened(&mut slot, Netdev::open).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                unsupported(knob, "this kernel has no netlink family netdev", "Linux 6.8 or later")
            }
            _ => os(knob, "opening netlink family netdev", error),
        })?;
        run(netdev).map_err(|error| netdev_error(knob, error))
    }

    fn with_route<T>(&self, knob: &Knob, run: impl FnOnce(&mut Netlink) -> io::Result<T>) -> Result<T, KnobError> {
        let mut slot = self.route.borrow_mut();
        let route = opened(&mut slot, || Netlink::open(netlink_sys::protocols::NETLINK_ROUTE))
            .map_err(|error| os(knob, "opening rtnetlink", error))?;
        run(route).map_err(|error| route_error(knob, error))
    }

    fn with_ethtool<T>(
        &self,
        knob: &Knob,
        nic: &NicId,
        run: impl FnOnce(&mut Ethtool) -> io::Result<T>,
    ) -> Result<T, KnobError> {
        let mut slot = self.ethtool.borrow_mut();
        let ethtool = opened(&mut slot, Ethtool::open).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => unsupported(
                knob,
                "this kernel has no netlink family ethtool",
                "Linux 5.7 or later with CONFIG_ETHTOOL_NETLINK",
            ),
            _ => os(knob, "opening netlink family ethtool", error),
        })?;
        run(ethtool).map_err(|error| match error.raw_os_error() {
            // The kernel returns ENODEV also for a device that is being reset or is suspended (net/ethtool/netlink.c,
            // ethnl_ops_begin). Such a device comes back unchanged.
            Some(libc::ENODEV) => match self.nic_dir(knob, nic) {
                Ok(_) => ethtool_error(knob, error),
                Err(KnobError::Os { what, source, .. }) if !is_absent(&source) => os(knob, what, source),
                Err(_) => gone(knob),
            },
            _ => ethtool_error(knob, error),
        })
    }

    /// The NIC's directory in sysfs, under its present name.
    fn nic_dir(&self, knob: &Knob, nic: &NicId) -> Result<PathBuf, KnobError> {
        let class = self.roots.sys.join("class/net");
        let failed = |error| os(knob, "looking for its interface", error);
        let last = class.join(&nic.name);
        if index_of(&last).map_err(failed)? == Some(nic.ifindex) {
            return Ok(last);
        }
        for entry in fs::read_dir(&class).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if index_of(&path).map_err(failed)? == Some(nic.ifindex) {
                return Ok(path);
            }
        }
        Err(gone(knob))
    }

    fn path_of(&self, knob: &Knob) -> Result<PathBuf, KnobError> {
        match knob {
            Knob::HostFile { root, path } | Knob::HostCpus { root, path } => Ok(self.roots.path(*root, path)),
            Knob::NicFile { nic, path } => Ok(self.nic_dir(knob, nic)?.join(path)),
            Knob::XpsCpus { nic, queue } => Ok(self.nic_dir(knob, nic)?.join(format!("queues/tx-{queue}/xps_cpus"))),
            Knob::IrqAffinity { irq } => {
                self.same_irq(knob, irq)?;
                Ok(self.roots.proc.join(format!("irq/{}/smp_affinity_list", irq.irq)))
            }
            _ => Err(bad(knob, &"it is read and written as a file, and is none")),
        }
    }

    fn same_irq(&self, knob: &Knob, irq: &IrqId) -> Result<(), KnobError> {
        let dir = self.roots.sys.join(format!("kernel/irq/{}", irq.irq));
        for (file, wanted) in [("chip_name", &irq.chip), ("hwirq", &irq.hwirq)] {
            match fs::read_to_string(dir.join(file)) {
                Ok(text) if text.trim() == wanted.as_str() => {}
                Err(error) if !is_absent(&error) => return Err(os(knob, "looking for its interrupt", error)),
                Ok(_) | Err(_) => return Err(gone(knob)),
            }
        }
        Ok(())
    }

    fn read_file(&self, knob: &Knob) -> Result<String, KnobError> {
        let path = self.path_of(knob)?;
        let text = fs::read_to_string(&path).map_err(|error| file_error(knob, "reading", error))?;
        Ok(text.trim().to_owned())
    }

    fn write_file(&self, knob: &Knob, text: &str) -> Result<(), KnobError> {
        let path = self.path_of(knob)?;
        // Writes with one call, because sysfs and procfs treat each call as a complete value. Never creates a file.
        let written = fs::OpenOptions::new()
            .write(true)
            .truncate(true)
            .open(&path)
            .and_then(|mut file| file.write_all(text.as_bytes()));
        written.map_err(|error| file_error(knob, "writing", error))
    }

    /// New NAPI threads start at nice 0. There a ring may overflow before the next pass gives them their place. Until
    /// then they get the place of bulk drivers. Before 6.8 the kernel does not report the threads, and they stay at
    /// nice 0.
    fn lift_new_napi_threads(&self, knob: &Knob, nic: &NicId) {
        let napis = self.with_netdev(knob, Netdev::napis).unwrap_or_default();
        for pid in napis.get(&nic.ifindex).into_iter().flatten().filter_map(|napi| napi.pid) {
            // A thread that has ended, or that another program has placed, stays as it is.
            if let Ok(thread) = ThreadId::of(pid, pid) {
                if thread.policy().is_ok_and(|policy| policy == Policy::BULK) {
                    let _ = thread.set_policy(Policy::BULK_DRIVER);
                }
            }
        }
    }

    /// Returns an error if the kernel would wait forever while it holds the RTNL lock ([`UNTHREADING_WAITS`]). If the
    /// interface goes down between this check and the write, the write still blocks.
    fn may_end_threads(&self, knob: &Knob, nic: &NicId) -> Result<(), KnobError> {
        let dir = self.nic_dir(knob, nic)?;
        let release = fs::read_to_string(self.roots.proc.join("sys/kernel/osrelease")).unwrap_or_default();
        let waits = parse_version(release.trim()).is_none_or(|version| version >= UNTHREADING_WAITS);
        let flags = fs::read_to_string(dir.join("flags")).unwrap_or_default();
        let up = u32::from_str_radix(flags.trim().trim_start_matches("0x"), 16).is_ok_and(|flags| flags & IFF_UP != 0);
        if up || !waits || !dir.join("device").exists() {
            return Ok(());
        }
        let name = dir.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        Err(KnobError::Refused {
            knob: knob.to_string(),
            what: "writing 0",
            source: io::Error::from_raw_os_error(libc::ENETDOWN),
            cause: format!("{name} is down, and Linux {} would wait for ever to end its NAPI threads", release.trim()),
            remedy: format!("ip link set {name} up; until then they sleep"),
        })
    }

    /// Runs an operation on a tap, under its present name.
    fn at_tap<T>(&self, knob: &Knob, nic: &NicId, run: impl FnOnce(&Tap<'_>) -> io::Result<T>) -> Result<T, KnobError> {
        let dir = self.nic_dir(knob, nic)?;
        run(&Tap::of(&dir)).map_err(|error| tap_error(knob, error))
    }

    /// The source of a steering filter, under its present name.
    fn source_now(&self, knob: &Knob, from: &SteerFrom) -> Result<SteerFrom, KnobError> {
        let SteerFrom::Interface(source) = from else { return Ok(from.clone()) };
        let dir = self.nic_dir(knob, source)?;
        let name = dir.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        Ok(SteerFrom::Interface(NicId { ifindex: source.ifindex, name }))
    }
}

impl Host for LiveHost {
    fn read(&self, knob: &Knob) -> Result<Value, KnobError> {
        self.get(knob).map_err(|error| obstacle::explain(&self.roots, knob, None, error))
    }

    fn write(&self, knob: &Knob, value: &Value) -> Result<(), KnobError> {
        self.set(knob, value).map_err(|error| obstacle::explain(&self.roots, knob, Some(value), error))
    }

    fn foresee(&self, knob: &Knob, value: &Value) -> Option<Obstacle> {
        obstacle::foresee(&self.roots, knob, value)
    }
}

impl LiveHost {
    fn get(&self, knob: &Knob) -> Result<Value, KnobError> {
        match knob {
            Knob::ThreadPolicy { thread, .. } => {
                thread.policy().map(Value::Policy).map_err(|error| thread_error(knob, error))
            }
            Knob::ThreadAffinity { thread, .. } => {
                thread.affinity().map(Value::Cpus).map_err(|error| thread_error(knob, error))
            }
            Knob::HostFile { .. } | Knob::NicFile { .. } => self.read_file(knob).map(Value::Text),
            Knob::IrqAffinity { .. } => {
                CpuSet::from_list(&self.read_file(knob)?).map(Value::Cpus).map_err(|error| bad(knob, &error))
            }
            Knob::XpsCpus { .. } | Knob::HostCpus { .. } => {
                CpuSet::from_mask(&self.read_file(knob)?).map(Value::Cpus).map_err(|error| bad(knob, &error))
            }
            Knob::NapiThreaded { nic, napi } => {
                let (ifindex, found) = self.with_netdev(knob, |netdev| netdev.napi(*napi))?;
                if ifindex != nic.ifindex {
                    return Err(gone(knob));
                }
                found.threaded.map(Value::Threaded).ok_or_else(|| no_napi_threads(knob))
            }
            Knob::Moderation { nic } => {
                self.with_ethtool(knob, nic, |ethtool| ethtool.moderation(nic.ifindex)).map(Value::Moderation)
            }
            Knob::Feature { nic, feature } => {
                let on = self.with_ethtool(knob, nic, |ethtool| ethtool.features(nic.ifindex))?.contains(feature);
                Ok(Value::Text(switch(on).to_owned()))
            }
            Knob::PeerFeature { nic, process, peer, feature } => {
                let on = at_peer(knob, nic, *process, *peer, |ethtool| ethtool.features(*peer))?.contains(feature);
                Ok(Value::Text(switch(on).to_owned()))
            }
            Knob::Clsact { nic } => {
                self.nic_dir(knob, nic)?;
                self.with_route(knob, |route| tc::has_clsact(route, nic.ifindex)).map(Value::Present)
            }
            Knob::TxSteer { nic, queue, from } => {
                self.nic_dir(knob, nic)?;
                let found = self.with_route(knob, |route| tc::has_filter(route, nic.ifindex, from, *queue));
                found.map(Value::Present)
            }
            Knob::RootQdisc { nic } => {
                self.nic_dir(knob, nic)?;
                let roots = self.with_route(knob, qdisc::roots)?;
                let root = roots.get(&nic.ifindex).unwrap_or(&RootQdisc::Default);
                Ok(Value::Text(root.text()))
            }
            Knob::SendBuffer { nic, process } => {
                let size = self.at_tap(knob, nic, |tap| tap::send_buffer(*process, tap))?;
                Ok(Value::Text(size.to_string()))
            }
            Knob::TapBatch { nic, process } => {
                let batches = self.at_tap(knob, nic, |tap| tap::batches(*process, tap))?;
                Ok(Value::Present(batches))
            }
        }
    }

    fn set(&self, knob: &Knob, value: &Value) -> Result<(), KnobError> {
        match (knob, value) {
            (Knob::ThreadPolicy { thread, .. }, Value::Policy(policy)) => {
                let set = if is_user(*thread) { thread.set_policy_alone(*policy) } else { thread.set_policy(*policy) };
                set.map_err(|error| thread_error(knob, error))
            }
            (Knob::ThreadAffinity { thread, .. }, Value::Cpus(cpus)) => {
                thread.set_affinity(cpus).map_err(|error| thread_error(knob, error))
            }
            (Knob::NicFile { nic, path }, Value::Text(text)) => {
                if path == "threaded" && text == "0" {
                    self.may_end_threads(knob, nic)?;
                }
                self.write_file(knob, text)?;
                if path == "threaded" && text == "1" {
                    self.lift_new_napi_threads(knob, nic);
                }
                Ok(())
            }
            (Knob::HostFile { .. }, Value::Text(text)) => self.write_file(knob, text),
            (Knob::IrqAffinity { .. }, Value::Cpus(cpus)) => self.write_file(knob, &cpus.to_string()),
            (Knob::XpsCpus { .. } | Knob::HostCpus { .. }, Value::Cpus(cpus)) => self.write_file(knob, &cpus.to_mask()),
            (Knob::NapiThreaded { nic, napi }, Value::Threaded(mode)) => self.with_netdev(knob, |netdev| {
                if netdev.napi(*napi)?.0 != nic.ifindex {
                    return Err(io::Error::from_raw_os_error(libc::ENOENT));
                }
                netdev.set_threaded(*napi, *mode)
            }),
            (Knob::Moderation { nic }, Value::Moderation(wanted)) => {
                self.with_ethtool(knob, nic, |ethtool| {
                    // The kernel does not call the driver if the driver reports this value already
                    // (net/ethtool/coalesce.c, ethnl_set_coalesce).
                    if ethtool.moderation(nic.ifindex)? == *wanted {
                        ethtool.set_moderation(nic.ifindex, wanted.other())?;
                    }
                    ethtool.set_moderation(nic.ifindex, *wanted)
                })
            }
            (Knob::Feature { nic, feature }, Value::Text(wanted)) => self
                .with_ethtool(knob, nic, |ethtool| ethtool.set_feature(nic.ifindex, feature, wanted == switch(true))),
            (Knob::PeerFeature { nic, process, peer, feature }, Value::Text(wanted)) => {
                at_peer(knob, nic, *process, *peer, |ethtool| {
                    ethtool.set_feature(*peer, feature, wanted == switch(true))
                })
            }
            (Knob::Clsact { nic }, Value::Present(wanted)) => {
                self.nic_dir(knob, nic)?;
                self.with_route(knob, |route| match (tc::has_clsact(route, nic.ifindex)?, wanted) {
                    (false, true) => tc::add_clsact(route, nic.ifindex),
                    (true, false) => tc::remove_clsact_if_empty(route, nic.ifindex),
                    _ => Ok(()),
                })
            }
            (Knob::TxSteer { nic, queue, from }, Value::Present(wanted)) => {
                self.nic_dir(knob, nic)?;
                if !*wanted {
                    return self.with_route(knob, |route| tc::remove_filter(route, nic.ifindex, from));
                }
                let from = self.source_now(knob, from)?;
                self.with_route(knob, |route| tc::set_filter(route, nic.ifindex, &from, *queue))
            }
            (Knob::RootQdisc { nic }, Value::Text(kind)) => {
                self.nic_dir(knob, nic)?;
                self.with_route(knob, |route| qdisc::set_root(route, nic.ifindex, kind))
            }
            (Knob::SendBuffer { nic, process }, Value::Text(text)) => {
                let size = text.parse().map_err(|_| bad(knob, &format!("'{text}' is no number of bytes")))?;
                self.at_tap(knob, nic, |tap| tap::set_send_buffer(*process, tap, size))
            }
            (Knob::TapBatch { nic, process }, Value::Present(on)) => {
                self.at_tap(knob, nic, |tap| tap::set_batches(*process, tap, *on))
            }
            _ => Err(bad(knob, &format!("'{value}' is not a kind of value it can have"))),
        }
    }
}

/// The text of a feature's value.
fn switch(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

/// `include/uapi/linux/if.h`.
const IFF_UP: u32 = 1;

/// Runs an operation on the other end of a veth pair. First checks that it is that end, because the kernel reuses
/// interface indices.
fn at_peer<T: Send>(
    knob: &Knob,
    nic: &NicId,
    process: ThreadId,
    peer: u32,
    run: impl FnOnce(&mut Ethtool) -> io::Result<T> + Send,
) -> Result<T, KnobError> {
    let other = || io::Error::from_raw_os_error(libc::ENODEV);
    let asked = namespace::inside(process, || {
        let mut route = Netlink::open(netlink_sys::protocols::NETLINK_ROUTE)?;
        let found = links(&mut route)?.into_iter().find(|link| link.ifindex == peer).ok_or_else(other)?;
        if found.kind.as_deref() != Some("veth") || found.peer != Some(nic.ifindex) {
            return Err(other());
        }
        run(&mut Ethtool::open()?)
    });
    asked.map_err(|error| peer_error(knob, process, error))
}

/// Whether a thread belongs to a user program, which may create more threads. Such threads must not inherit a real-time
/// policy before a cap watches them: one that spins would keep the planner from ever capping it. Kernel threads have no
/// executable, nor has a process whose main thread has ended; its other threads have.
fn is_user(thread: ThreadId) -> bool {
    fs::read_link(format!("/proc/{}/task/{}/exe", thread.pid, thread.tid)).is_ok()
}

/// The index of the interface with this directory; None if there is no such interface.
fn index_of(dir: &Path) -> io::Result<Option<u32>> {
    match fs::read_to_string(dir.join("ifindex")) {
        Ok(text) => Ok(text.trim().parse().ok()),
        Err(error) if is_absent(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether a file is not there, or its device is being removed (`net/core/net-sysfs.c`, `netdev_show`: EINVAL). A file
/// that cannot be read for another reason, as for want of a descriptor, may well be there: its knob must not lose its
/// original value.
fn is_absent(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR | libc::ENODEV | libc::EINVAL))
}

/// The socket in `slot`; opens it if there is none.
fn opened<T>(slot: &mut Option<T>, open: impl FnOnce() -> io::Result<T>) -> io::Result<&mut T> {
    match slot {
        Some(open) => Ok(open),
        none => Ok(none.insert(open()?)),
    }
}

fn gone(knob: &Knob) -> KnobError {
    KnobError::Gone(knob.to_string())
}

fn unsupported(knob: &Knob, cause: &str, remedy: &str) -> KnobError {
    KnobError::Unsupported { knob: knob.to_string(), why: format!("{cause}; {remedy}") }
}

fn no_napi_threads(knob: &Knob) -> KnobError {
    let remedy = "Linux 6.17 or later, to have it poll 6.19";
    unsupported(knob, "this kernel cannot thread a single NAPI instance, or have it poll", remedy)
}

fn netdev_error(knob: &Knob, error: io::Error) -> KnobError {
    match error.raw_os_error() {
        Some(libc::ENOENT) => gone(knob),
        Some(libc::EOPNOTSUPP | libc::EINVAL) => no_napi_threads(knob),
        _ => os(knob, "asking netlink family netdev", error),
    }
}

fn route_error(knob: &Knob, error: io::Error) -> KnobError {
    match (error.raw_os_error(), error.kind()) {
        (Some(libc::ENODEV), _) => gone(knob),
        (Some(libc::ENOENT | libc::EOPNOTSUPP), _) => {
            let modules = match knob {
                Knob::RootQdisc { .. } => "packet scheduling (CONFIG_NET_SCHED)",
                Knob::Clsact { .. } => "sch_ingress",
                _ => "cls_flower or act_skbedit",
            };
            let cause = format!("the kernel is built or installed without {modules}");
            unsupported(knob, &cause, "install a kernel package that has it (modinfo tells)")
        }
        (_, io::ErrorKind::AddrInUse) => {
            let name = knob.nic().map(|nic| nic.name.as_str()).unwrap_or_default();
            let remedy = format!(
                "see `tc qdisc show dev {name}` and `tc filter show dev {name} egress` (and ingress); where they may \
                 go, take them away"
            );
            unsupported(knob, &error.to_string(), &remedy)
        }
        _ => os(knob, "asking rtnetlink", error),
    }
}

fn ethtool_error(knob: &Knob, error: io::Error) -> KnobError {
    match error.raw_os_error() {
        Some(libc::EOPNOTSUPP | libc::EINVAL) => {
            let option = if matches!(knob, Knob::Moderation { .. }) { "-c" } else { "-k" };
            let remedy = format!("use a kernel or NIC whose driver does (ethtool {option} shows)");
            unsupported(knob, "its driver does not let this be set", &remedy)
        }
        _ => os(knob, "asking netlink family ethtool", error),
    }
}

fn peer_error(knob: &Knob, process: ThreadId, error: io::Error) -> KnobError {
    match error.raw_os_error() {
        Some(libc::ENODEV | libc::ESRCH | libc::ENOENT) => gone(knob),
        Some(libc::EPERM) => unsupported(
            knob,
            "Ontime has no CAP_SYS_ADMIN, with which the namespace is entered",
            &format!("give it that right, or there: nsenter -t {} -n ethtool -K NIC gro on tso off", process.pid),
        ),
        _ => ethtool_error(knob, error),
    }
}

fn tap_error(knob: &Knob, error: io::Error) -> KnobError {
    let other = match knob {
        Knob::TapBatch { .. } => "start the VM with -netdev tap,sndbuf=2147483646",
        _ => "take qdisc_bypass out of the NIC's table in /etc/ontime/host.toml",
    };
    match error.raw_os_error() {
        Some(libc::ESRCH | libc::ENOENT) => gone(knob),
        Some(libc::ENODEV) => unsupported(knob, "that process does not have the tap open", other),
        Some(libc::ENOSYS) => {
            let remedy = format!("Linux 5.6 or later, or {other}");
            unsupported(knob, "this kernel cannot hand over a process's descriptor (pidfd_getfd)", &remedy)
        }
        Some(libc::EPERM) => {
            let cause = "Ontime has no CAP_SYS_PTRACE, or a security module keeps that process's files from it";
            unsupported(knob, cause, &format!("give it that right, or {other}"))
        }
        _ => os(knob, "asking at the tap", error),
    }
}

/// The error for a failed request, depending on the interface through which the knob is set.
#[cfg(test)]
pub(crate) fn meaning(knob: &Knob, error: io::Error) -> KnobError {
    match knob {
        Knob::ThreadPolicy { .. } | Knob::ThreadAffinity { .. } => os(knob, "setting it", error),
        Knob::IrqAffinity { .. }
        | Knob::HostFile { .. }
        | Knob::HostCpus { .. }
        | Knob::NicFile { .. }
        | Knob::XpsCpus { .. } => file_error(knob, "writing", error),
        Knob::NapiThreaded { .. } => netdev_error(knob, error),
        Knob::Moderation { .. } | Knob::Feature { .. } => ethtool_error(knob, error),
        Knob::PeerFeature { process, .. } => peer_error(knob, *process, error),
        Knob::Clsact { .. } | Knob::TxSteer { .. } | Knob::RootQdisc { .. } => route_error(knob, error),
        Knob::TapBatch { .. } | Knob::SendBuffer { .. } => tap_error(knob, error),
    }
}

fn os(knob: &Knob, what: &'static str, source: io::Error) -> KnobError {
    KnobError::Os { knob: knob.to_string(), what, source }
}

fn bad(knob: &Knob, why: &impl ToString) -> KnobError {
    KnobError::Value { knob: knob.to_string(), why: why.to_string() }
}

fn thread_error(knob: &Knob, error: ThreadError) -> KnobError {
    match error {
        ThreadError::Gone(_) => gone(knob),
        ThreadError::Os { what, source, .. } => os(knob, what, source),
    }
}

/// The error for a failed read or write of a one-value file, depending on the error number and the kind of file.
fn file_error(knob: &Knob, what: &'static str, error: io::Error) -> KnobError {
    match (knob, error.raw_os_error()) {
        // The files of a removed queue or CPU vanish with it. A missing host-wide file is a missing feature of the
        // kernel.
        (Knob::NicFile { .. } | Knob::XpsCpus { .. }, Some(libc::ENOENT | libc::ENODEV)) => gone(knob),
        (Knob::IrqAffinity { .. }, Some(libc::ENOENT)) => gone(knob),
        (Knob::IrqAffinity { .. }, Some(libc::EIO | libc::EPERM)) => unsupported(
            knob,
            "the kernel or its driver keeps the affinity of this interrupt to itself",
            "to keep such interrupts off some CPUs, boot with isolcpus=managed_irq,CPUS",
        ),
        (Knob::IrqAffinity { .. }, Some(libc::ENOSPC)) => unsupported(
            knob,
            "these CPUs have no interrupt vector left",
            "set up fewer queues of NICs whose interrupts are there (ethtool -L), or more CPUs",
        ),
        (Knob::HostFile { .. } | Knob::HostCpus { .. }, Some(libc::ENOENT)) => {
            unsupported(knob, "this kernel has no such file", "boot a kernel that has it")
        }
        (Knob::HostFile { root: Root::Debug, .. }, Some(libc::EPERM)) => {
            unsupported(knob, "kernel lockdown denies debugfs", "boot without lockdown (it comes with Secure Boot)")
        }
        (Knob::NicFile { .. }, Some(libc::EOPNOTSUPP | libc::EINVAL)) => {
            unsupported(knob, "the driver or device does not have this", "use a kernel or NIC whose driver does")
        }
        (Knob::XpsCpus { nic, .. }, Some(libc::EOPNOTSUPP | libc::EINVAL)) => unsupported(
            knob,
            "XPS needs more than one transmit queue",
            &format!("more queues, while the NIC is idle: ethtool -L {} combined 2", nic.name),
        ),
        _ => os(knob, what, error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_an_interface_that_is_down_are_not_ended_where_the_kernel_would_wait_for_ever() {
        let tree = tempfile::tempdir().unwrap();
        let roots = Roots { sys: tree.path().join("sys"), proc: tree.path().join("proc"), ..Roots::default() };
        let nic = NicId { ifindex: 3, name: "lan7".to_owned() };
        let dir = roots.sys.join("class/net").join(&nic.name);
        fs::create_dir_all(dir.join("device")).unwrap();
        fs::create_dir_all(roots.proc.join("sys/kernel")).unwrap();
        fs::write(dir.join("ifindex"), "3\n").unwrap();
        let knob = Knob::NicFile { nic, path: "threaded".to_owned() };
        let off = Value::Text("0".to_owned());
        let end = |release: &str, flags: &str| {
            fs::write(roots.proc.join("sys/kernel/osrelease"), release).unwrap();
            fs::write(dir.join("flags"), flags).unwrap();
            fs::write(dir.join("threaded"), "1\n").unwrap();
            let done = LiveHost::with_roots(roots.clone()).write(&knob, &off);
            (done, fs::read_to_string(dir.join("threaded")).unwrap())
        };
        for (release, flags) in [("7.2.12+deb13-rt-amd64", "0x1002"), ("6.17.0-5-generic", "0x1102"), ("", "0x1002")] {
            let (done, threaded) = end(release, flags);
            assert_eq!(threaded, "1\n");
            let said = done.unwrap_err().to_string();
            assert!(said.contains("lan7 is down") && said.contains("ip link set lan7 up"), "{said}");
        }
        for (release, flags) in [("7.2.12", "0x1003"), ("6.12.48-rt", "0x1002"), ("5.14.0-503.el9", "0x1103")] {
            let (done, threaded) = end(release, flags);
            assert_eq!((done.is_ok(), threaded.as_str()), (true, "0"), "{release} {flags}");
        }
        // A virtual interface has no NAPI instances while it is down, or they stay enabled.
        fs::remove_dir(dir.join("device")).unwrap();
        assert_eq!(end("7.2.12", "0x1002").1, "0");
    }

    #[test]
    fn what_cannot_be_looked_for_is_not_gone() {
        let tree = tempfile::tempdir().unwrap();
        let roots = Roots { sys: tree.path().join("sys"), proc: tree.path().join("proc"), ..Roots::default() };
        let (class, irq) = (roots.sys.join("class/net"), roots.sys.join("kernel/irq/24"));
        let put = |file: PathBuf, text: &str| {
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        put(class.join("bonding_masters"), "");
        put(class.join("eth1/ifindex"), "4\n");
        put(irq.join("chip_name"), "GIC\n");
        put(irq.join("hwirq"), "7\n");
        put(roots.proc.join("irq/24/smp_affinity_list"), "0-3\n");
        let host = LiveHost::with_roots(roots);
        let nic = |name: &str| NicId { ifindex: 3, name: name.to_owned() };
        let file = |name| Knob::NicFile { nic: nic(name), path: "threaded".to_owned() };
        let affinity = Knob::IrqAffinity { irq: IrqId { irq: 24, chip: "GIC".to_owned(), hwirq: "7".to_owned() } };
        assert!(host.read(&affinity).is_ok());
        assert!(matches!(host.read(&file("eth0")), Err(KnobError::Gone(_))));
        // Files that are there, and whose reading fails: the interface may be this one, by its name or renamed.
        fs::create_dir_all(class.join("eth0/ifindex")).unwrap();
        for name in ["eth0", "lan0"] {
            let error = host.read(&file(name)).unwrap_err();
            assert!(!matches!(error, KnobError::Gone(_)), "{error:?}");
        }
        fs::remove_file(irq.join("hwirq")).unwrap();
        assert!(matches!(host.read(&affinity), Err(KnobError::Gone(_))));
        fs::create_dir(irq.join("hwirq")).unwrap();
        let error = host.read(&affinity).unwrap_err();
        assert!(!matches!(error, KnobError::Gone(_)), "{error:?}");
    }

    /// Ends a process when it is dropped.
    struct Process(i32);

    impl Drop for Process {
        fn drop(&mut self) {
            // SAFETY: ends a child of ours that was not waited for, so the number is still the child's.
            unsafe { libc::kill(self.0, libc::SIGKILL) };
            // SAFETY: waits for it; no status is stored.
            unsafe { libc::waitpid(self.0, std::ptr::null_mut(), 0) };
        }
    }

    #[test]
    fn threads_that_outlive_their_main_thread_are_still_a_users() {
        // SAFETY: the child starts a thread that sleeps, and ends its own.
        let child = unsafe { libc::fork() };
        if child == 0 {
            std::thread::spawn(|| std::thread::sleep(std::time::Duration::from_secs(600)));
            // SAFETY: ends this thread alone.
            unsafe { libc::syscall(libc::SYS_exit, 0) };
        }
        assert!(child > 0);
        let child = Process(child);
        let dir = Path::new("/proc").join(child.0.to_string());
        while fs::read_link(dir.join("exe")).is_ok() {
            std::thread::yield_now();
        }
        let numbers = fs::read_dir(dir.join("task")).unwrap().map(|task| task.unwrap().file_name());
        let mut numbers = numbers.map(|name| name.to_string_lossy().parse::<i32>().unwrap());
        let tid = numbers.find(|tid| *tid != child.0).unwrap();
        assert!(is_user(ThreadId { pid: child.0, tid, start_time: 0 }));
        assert!(!is_user(ThreadId { pid: child.0, tid: child.0, start_time: 0 }), "it has ended");
    }

    #[test]
    fn a_device_that_is_away_is_not_gone() {
        let sys = tempfile::tempdir().unwrap();
        let host = LiveHost::with_roots(Roots { sys: sys.path().to_owned(), ..Roots::default() });
        // No interface has this index. The kernel returns the same error for an interface that is being reset.
        let nic = NicId { ifindex: 0x7fff_fff0, name: "away0".to_owned() };
        let knob = Knob::Moderation { nic: nic.clone() };
        let gone = host.read(&knob);
        if matches!(gone, Err(KnobError::Unsupported { .. })) {
            return println!("SKIPPED: this kernel has no netlink family ethtool");
        }
        assert!(matches!(gone, Err(KnobError::Gone(_))), "{gone:?}");
        let dir = sys.path().join("class/net").join(&nic.name);
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("ifindex"), nic.ifindex.to_string()).unwrap();
        let away = host.read(&knob);
        assert!(matches!(away, Err(KnobError::Refused { .. })), "{away:?}");
    }
}
