//! Facts of the running host, read only: nothing here changes or wakes anything.
//!
//! In: `/proc`, `/sys`, debugfs (injectable as [`Roots`](crate::Roots)), netlink. Out: an [`Inventory`], plain data
//! that rules plan on. What this kernel or this process cannot tell becomes a [`Note`], never a guess.

mod cpu;
mod devices;
mod irqs;
mod nics;
pub(crate) mod scan;
mod threads;
mod udev;

use std::collections::BTreeMap;

use ontime_tenants::{Policy, ThreadId};
use serde::{Deserialize, Serialize};

pub(crate) use scan::{read, read_number};

use crate::cpus::CpuSet;
use crate::knob::{IrqId, Knob, Moderation, NicId};

/// Everything the rules look at.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Inventory {
    /// The kernel and what it is built with.
    pub kernel: Kernel,
    /// The processors and what makes them slow to answer.
    pub cpus: Cpus,
    /// Network interfaces, by index.
    pub nics: Vec<Nic>,
    /// Interrupts with a handler, by number.
    pub irqs: Vec<Irq>,
    /// Kernel threads on the packet path.
    pub threads: Vec<KernelThread>,
    /// Sysctls that rules look at, by their path below `/proc/sys`; absent where the kernel has none.
    pub sysctls: BTreeMap<String, String>,
    /// KVM.
    pub kvm: Kvm,
    /// What the kernel does to processes' memory by itself.
    pub memory: Memory,
    /// Kernel protections that run bulk work above FIFO.
    pub protections: Protections,
    /// Services that fight over the same knobs and run now.
    pub conflicts: Vec<Conflict>,
    /// What udev does with interrupts' CPUs.
    pub udev: Udev,
    /// kubelet's CPU manager, where kubelet has left a record of it that can be read.
    pub cpu_manager: Option<CpuManager>,
    /// What could not be read, and why.
    pub notes: Vec<Note>,
    /// Why interfaces or NAPI instances that are there may be missing: the look failed, not they.
    pub incomplete: Option<String>,
}

/// The kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Kernel {
    /// `uname -r`.
    pub release: String,
    /// Major and minor version.
    pub version: (u32, u32),
    /// PREEMPT_RT: `/sys/kernel/realtime`, or `PREEMPT_RT` in `uname -v`.
    pub realtime: bool,
    /// Interrupts are threaded: PREEMPT_RT or the boot parameter `threadirqs`.
    pub threaded_irqs: bool,
    /// This host is itself a guest: the hypervisor's CPUID bit, or `/sys/hypervisor/type`.
    pub hypervisor: bool,
    /// Kernel lockdown.
    pub lockdown: Lockdown,
    /// Pressure stall information is kept (`/proc/pressure`).
    pub pressure: bool,
}

/// Kernel lockdown (`/sys/kernel/security/lockdown`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lockdown {
    /// Not in force, or not built in.
    #[default]
    None,
    /// debugfs, among others, is denied.
    Integrity,
    /// As integrity, and secrets of the kernel are kept.
    Confidentiality,
}

/// The processors.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Cpus {
    /// Online CPUs.
    pub online: CpuSet,
    /// CPUs taken from the scheduler: at boot (`isolcpus`), or by an isolated cpuset partition (cgroup v2).
    pub isolated: CpuSet,
    /// CPUs without a tick while one task runs (`nohz_full`).
    pub nohz_full: CpuSet,
    /// CPUs whose RCU callbacks run elsewhere: those of `rcu_nocbs` at boot, and of `nohz_full`.
    pub rcu_nocbs: CpuSet,
    /// Whether hyper-threads share cores now; `None` where the kernel does not say.
    pub smt_active: Option<bool>,
    /// Online CPUs that share a core with another, by core.
    pub siblings: Vec<CpuSet>,
    /// Idle states, the same on all CPUs or the worst over them.
    pub idle_states: Vec<IdleState>,
    /// Most exit latency that idle may have now, us (`/dev/cpu_dma_latency`).
    pub dma_latency_us: Option<i64>,
    /// The same of single CPUs, where there is a limit (`power/pm_qos_resume_latency_us`).
    pub latency_limits_us: BTreeMap<u32, u64>,
    /// cpufreq governors, with the CPUs each has.
    pub governors: BTreeMap<String, CpuSet>,
    /// CPUs by NUMA node, and how far it is from each to the others, in the order of their numbers.
    pub nodes: BTreeMap<u32, (CpuSet, Vec<u32>)>,
    /// The BPF scheduler that is loaded (`/sys/kernel/sched_ext/root/ops`).
    pub bpf_scheduler: Option<String>,
    /// The clock source in use.
    pub clocksource: String,
    /// Whether the TSC could be chosen for it.
    pub has_tsc: bool,
}

/// A CPU idle state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct IdleState {
    /// Its name, `C6`.
    pub name: String,
    /// Its exit latency, us.
    pub latency_us: u64,
    /// The CPUs on which it may be entered.
    pub enabled_on: CpuSet,
}

/// A network interface.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Nic {
    /// Which.
    pub id: NicId,
    /// Its alternative names (`ip link property add dev X altname Y`).
    pub altnames: Vec<String>,
    /// Backed by a device on a bus (`/sys/class/net/X/device`) that has its interrupts and rings.
    pub physical: bool,
    /// Has a device, but its packets go by the interfaces below it ([`Nic::lower`]), which have the interrupts and
    /// rings: a port of a switch (DSA), or the upper interface of a failover pair.
    pub carried: bool,
    /// Indices of the interfaces below it, by which its packets go: the kernel's `lower_*` links, `iflink` of an
    /// interface with a device, and of a representor the interface of the NIC itself.
    pub lower: Vec<u32>,
    /// Its driver, where it has a device.
    pub driver: Option<String>,
    /// The NUMA node that its device is near to.
    pub node: Option<u32>,
    /// Its kind as `ip -d link` says it (`veth`, `tun`, `macvtap`, `bridge`); none for a physical one.
    pub kind: Option<String>,
    /// Administratively up (IFF_UP): NAPI runs only then.
    pub up: bool,
    /// Has carrier.
    pub carrier: bool,
    /// Hardware address, where it is an Ethernet one.
    pub mac: Option<[u8; 6]>,
    /// Index of the lower device (macvlan, macvtap, VLAN) or of the peer (veth).
    pub link: Option<u32>,
    /// Index of the other end of a veth pair that leads into another network namespace, there.
    pub peer: Option<u32>,
    /// Index of the bridge or bond it is a port of.
    pub controller: Option<u32>,
    /// Kind of the root qdisc: `mq`, `fq_codel`, `noqueue`.
    pub qdisc: Option<String>,
    /// Whether somebody chose the root qdisc: its text; none where the kernel did, or Ontime.
    pub qdisc_by_others: Option<String>,
    /// Receive queues.
    pub rx_queues: u32,
    /// Transmit queues in use, with their XPS CPUs; `None` where the driver has no XPS.
    pub tx_queues: Vec<TxQueue>,
    /// `/sys/class/net/X/threaded` (5.12): 0, 1, or 2 for polling.
    pub threaded: Option<u32>,
    /// At most how many packets its polls take, by the host module: a number, or `default`; `None` where that is not
    /// loaded.
    pub napi_weight: Option<String>,
    /// Whether threads of the host module poll it: `0` or `1`; `None` where that is not loaded.
    pub busy_poll: Option<String>,
    /// Its NAPI instances (netlink, 6.8; on older kernels those with a thread).
    pub napis: Vec<Napi>,
    /// Numbers of its interrupts ([`devices`]); one that several interfaces of a device share is in the list of each.
    pub irqs: Vec<u32>,
    /// How it holds receive interrupts back; `None` where its driver does not say (or the kernel: 5.7).
    pub moderation: Option<Moderation>,
    /// Descriptors of a transmit ring; `None` where its driver does not say (or the kernel: 5.7).
    pub tx_ring: Option<u32>,
}

/// A transmit queue.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct TxQueue {
    /// CPUs whose packets leave by it; `None` where XPS is not to be had.
    pub xps_cpus: Option<CpuSet>,
    /// Most bytes BQL leaves outstanding; `None` where the driver has no BQL.
    pub bql_limit_max: Option<u64>,
}

/// A NAPI instance.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Napi {
    /// Its id, unique on the host while it lives; 0 where it is not known (before 5.17, where its thread's name was
    /// cut).
    pub id: u32,
    /// Its interrupt, where the driver says so.
    pub irq: Option<u32>,
    /// Number of its thread, while it has one.
    pub pid: Option<i32>,
    /// 0 softirq, 1 thread, 2 polling thread; `None` before 6.17, where only [`Nic::threaded`] says it.
    pub threaded: Option<u32>,
    /// Receive queues it serves.
    pub rx_queues: Vec<u32>,
    /// Transmit queues it serves.
    pub tx_queues: Vec<u32>,
}

/// An interrupt with at least one handler.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Irq {
    /// Which.
    pub id: IrqId,
    /// Names of its handlers.
    pub actions: Vec<String>,
    /// CPUs it may be delivered to.
    pub affinity: CpuSet,
    /// Whether that may be set: not where the kernel or the driver keeps it to itself and the kernel says so, by a file
    /// without write permission (`kernel/irq/proc.c`, `irq_can_set_affinity_usr`).
    pub settable: bool,
    /// The device it is of, as its bus calls it: `0000:03:02.0`, `virtio4`; none where the device tree does not say.
    pub device: Option<String>,
    /// Of a network controller, whether or not its interfaces are in this network namespace.
    pub network: bool,
    /// Of a virtual function: of which function's interface it is one, or of which function where that has none here.
    pub virtual_of: Option<String>,
}

/// What a kernel thread on the packet path is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum KernelThreadKind {
    /// `irq/N-NAME`: handler of interrupt N.
    Irq(u32),
    /// `napi/NIC-ID`: polls NAPI instance ID.
    Napi(u32),
    /// `napi/NIC` with its end cut off, so that the instance's ID is not known (before 5.17).
    NapiCut,
    /// `napi-poll/NIC-ID`: polls NAPI instance ID all the time, by the host module.
    NapiPoll(u32),
    /// `ksoftirqd/CPU`.
    Ksoftirqd(u32),
    /// `ktimers/CPU`: timer softirq on PREEMPT_RT.
    Ktimers(u32),
    /// `rcuc/CPU`: RCU callbacks on PREEMPT_RT.
    Rcuc(u32),
    /// `backlog_napi/CPU`: the per-CPU backlog on PREEMPT_RT, 6.10 and later.
    BacklogNapi(u32),
    /// `irq_work/CPU`: what an interrupt or a tracepoint has left to do, on PREEMPT_RT.
    IrqWork(u32),
}

/// A kernel thread on the packet path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KernelThread {
    /// Which.
    pub id: ThreadId,
    /// What it is for.
    pub kind: KernelThreadKind,
    /// Its name.
    pub comm: String,
    /// Its policy when it was seen.
    pub policy: Policy,
}

/// KVM on this host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Kvm {
    /// `/dev/kvm` exists.
    pub device: bool,
    /// `halt_poll_ns`, ns.
    pub halt_poll_ns: Option<u64>,
    /// Whether it sets all vCPUs' clocks anew every 300 s (`kvmclock_periodic_sync`).
    pub clock_sync: bool,
    /// Whether it takes split huge pages back every minute (`nx_huge_pages`, and a recovery ratio).
    pub page_recovery: bool,
}

/// What the kernel does to the memory of any process by itself, guests' among it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Equal pages are merged (`ksm/run`).
    pub merged: bool,
    /// Pages are moved together into huge ones: what `transparent_hugepage/enabled` is set to, unless that is `never`.
    pub collapsed: Option<String>,
    /// Pages are unmapped to see who uses them (`kernel.numa_balancing`, on several nodes).
    pub balanced: bool,
    /// Pages may be written to a swap area (`/proc/swaps`).
    pub swap: bool,
}

/// Protections that let bulk threads run before FIFO ones.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Protections {
    /// Servers of `/sys/kernel/debug/sched` (`fair_server`, `ext_server`), with each CPU's runtime, ns a period.
    pub servers: BTreeMap<String, BTreeMap<u32, u64>>,
    /// Whether the kernel has such servers: `None` where debugfs cannot be read.
    pub readable: bool,
    /// `kernel.sched_rt_runtime_us`, us of each period; -1 for no limit.
    pub rt_runtime_us: Option<i64>,
}

/// A service that sets the same knobs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Conflict {
    /// Its name, `irqbalance`.
    pub service: String,
    /// Its process.
    pub pid: i32,
}

/// What udev does with interrupts' CPUs when a device appears.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Udev {
    /// What the `.link` files of interfaces say, by the interfaces' names.
    pub links: BTreeMap<String, LinkPolicy>,
    /// Lines of rules, `FILE:LINE`.
    pub rules: Vec<String>,
}

/// What an interface's `.link` file says of its interrupts' CPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LinkPolicy {
    /// The file, or drop-in, that says so.
    pub file: String,
    /// `single` or `spread`.
    pub policy: String,
    /// The options that choose the CPUs, as they stand there; empty for any CPU.
    pub among: String,
}

/// kubelet's CPU manager (`/var/lib/kubelet/cpu_manager_state`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CpuManager {
    /// `none` or `static`.
    pub policy: String,
    /// CPUs of all containers that have none to themselves.
    pub shared: CpuSet,
    /// CPUs that single containers have to themselves.
    pub exclusive: CpuSet,
}

/// Something that could not be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Note {
    /// What about.
    pub about: String,
    /// Why, and from which kernel version or with which right it can be read.
    pub why: String,
}

impl Inventory {
    /// The NIC of this name, or of this alternative name. The kernel gives no name twice in a network namespace.
    pub fn nic(&self, name: &str) -> Option<&Nic> {
        self.nics.iter().find(|nic| nic.id.name == name || nic.altnames.iter().any(|other| other == name))
    }

    /// The interfaces that have a device and send by this NIC: itself, and what stands on it, directly or by others
    /// between (ports of a switch on a bond). Discovery's way down from a virtual NIC ends at the first interface that
    /// has a device.
    pub fn senders_by<'a>(&'a self, nic: &'a Nic) -> Vec<&'a Nic> {
        let mut found = vec![nic];
        let mut at = 0;
        while let Some(below) = found.get(at).map(|nic| nic.id.ifindex) {
            at += 1;
            let above = self.nics.iter().filter(|upper| upper.lower.contains(&below));
            let new: Vec<&Nic> = above.filter(|upper| found.iter().all(|known| known.id != upper.id)).collect();
            found.extend(new);
        }
        found.retain(|sender| sender.physical || sender.carried || sender.id == nic.id);
        found
    }

    /// The NIC of this index.
    pub fn nic_by_index(&self, ifindex: u32) -> Option<&Nic> {
        self.nics.iter().find(|nic| nic.id.ifindex == ifindex)
    }

    /// The NIC that a knob is a part of: its files, queues, filters, interrupts, and their threads and its NAPI's.
    pub fn nic_of(&self, knob: &Knob) -> Option<&Nic> {
        match knob {
            Knob::NicFile { nic, .. }
            | Knob::XpsCpus { nic, .. }
            | Knob::NapiThreaded { nic, .. }
            | Knob::Moderation { nic }
            | Knob::Feature { nic, .. }
            | Knob::PeerFeature { nic, .. }
            | Knob::Clsact { nic }
            | Knob::TxSteer { nic, .. }
            | Knob::TxPriority { nic, .. }
            | Knob::RootQdisc { nic }
            | Knob::TapBatch { nic, .. }
            | Knob::SendBuffer { nic, .. } => self.nic_by_index(nic.ifindex),
            Knob::IrqAffinity { irq } => self.nics.iter().find(|nic| nic.irqs.contains(&irq.irq)),
            Knob::ThreadPolicy { thread, .. } | Knob::ThreadAffinity { thread, .. } => {
                let KernelThread { kind, id: thread, .. } = self.threads.iter().find(|known| known.id == *thread)?;
                self.nics.iter().find(|nic| match kind {
                    KernelThreadKind::Irq(irq) => nic.irqs.contains(irq),
                    KernelThreadKind::NapiCut => nic.napis.iter().any(|napi| napi.pid == Some(thread.tid)),
                    // Of a name that was cut within the id, the number of the thread tells.
                    KernelThreadKind::Napi(id) => {
                        nic.napis.iter().any(|napi| napi.id == *id || napi.pid == Some(thread.tid))
                    }
                    KernelThreadKind::NapiPoll(id) => nic.napis.iter().any(|napi| napi.id == *id),
                    _ => false,
                })
            }
            Knob::HostFile { .. } | Knob::HostCpus { .. } => None,
        }
    }

    /// Threads of one kind.
    pub fn threads_of(&self, wanted: impl Fn(KernelThreadKind) -> bool) -> impl Iterator<Item = &KernelThread> {
        self.threads.iter().filter(move |thread| wanted(thread.kind))
    }
}
