//! Facts of the running host. All reads: nothing here changes a setting or wakes a thread.
//!
//! In: `/proc`, `/sys`, debugfs (injectable as [`Roots`](crate::Roots)), netlink. Out: an [`Inventory`], plain data
//! from which the rules plan. A fact that this kernel or this process cannot read becomes a [`Note`], never a guess.

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

use crate::cpus::CpuSet;
use crate::knob::{IrqId, Knob, Moderation, NicId};

/// All facts that the rules read.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Inventory {
    /// The kernel and its build options.
    pub kernel: Kernel,
    /// The processors, and the reasons for wake-up latency on them.
    pub cpus: Cpus,
    /// Network interfaces, by index.
    pub nics: Vec<Nic>,
    /// Interrupts with a handler, by number.
    pub irqs: Vec<Irq>,
    /// Kernel threads on the packet path.
    pub threads: Vec<KernelThread>,
    /// Sysctls that the rules read, by path below `/proc/sys`. A sysctl that the kernel does not have is absent.
    pub sysctls: BTreeMap<String, String>,
    /// KVM.
    pub kvm: Kvm,
    /// Background work of the kernel on processes' memory.
    pub memory: Memory,
    /// Kernel protections that run bulk threads before FIFO threads.
    pub protections: Protections,
    /// Running services that set the same knobs.
    pub conflicts: Vec<Conflict>,
    /// Polling threads of Open vSwitch's DPDK datapath, with the CPUs that each may use.
    pub pollers: Vec<(String, CpuSet)>,
    /// How udev sets the CPUs of interrupts.
    pub udev: Udev,
    /// kubelet's CPU manager, if kubelet has left a readable record of it.
    pub cpu_manager: Option<CpuManager>,
    /// Facts that could not be read, and why.
    pub notes: Vec<Note>,
    /// Why interfaces, threads or settings may be missing here although the host has them: reading them failed.
    pub incomplete: Option<String>,
}

/// What the running kernel is and can do.
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
    /// Pressure stall information is available (`/proc/pressure`).
    pub pressure: bool,
    /// A timer ends the budgets of SCHED_DEADLINE threads (HRTICK_DL in `/sys/kernel/debug/sched/features`), not a
    /// tick; None if that cannot be read.
    pub hrtick_dl: Option<bool>,
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
    /// As integrity. The kernel also keeps its secrets from user space.
    Confidentiality,
}

/// Sets of CPUs that the rules distinguish.
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
    /// Whether hyper-threads share cores now; `None` where the kernel does not report it.
    pub smt_active: Option<bool>,
    /// Online CPUs that share a core with another, by core.
    pub siblings: Vec<CpuSet>,
    /// Idle states: the same on all CPUs, or the worst of them.
    pub idle_states: Vec<IdleState>,
    /// Highest exit latency that an idle state may have now, us (`/dev/cpu_dma_latency`).
    pub dma_latency_us: Option<i64>,
    /// The same limit for single CPUs that have one (`power/pm_qos_resume_latency_us`).
    pub latency_limits_us: BTreeMap<u32, u64>,
    /// cpufreq governors, with the CPUs that use each.
    pub governors: BTreeMap<String, CpuSet>,
    /// CPUs by NUMA node, and the node's distances to all nodes, in the order of their numbers.
    pub nodes: BTreeMap<u32, (CpuSet, Vec<u32>)>,
    /// The BPF scheduler that is loaded (`/sys/kernel/sched_ext/root/ops`).
    pub bpf_scheduler: Option<String>,
    /// The clock source in use.
    pub clocksource: String,
    /// Whether the TSC is available as the clock source.
    pub has_tsc: bool,
}

/// A CPU idle state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct IdleState {
    /// Name, such as `C6`.
    pub name: String,
    /// Exit latency, us. None if what the kernel says of the state cannot be read.
    pub latency_us: Option<u64>,
    /// The CPUs on which this state is enabled, or may be.
    pub enabled_on: CpuSet,
}

/// A network interface.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Nic {
    /// Index and name.
    pub id: NicId,
    /// Alternative names (`ip link property add dev X altname Y`).
    pub altnames: Vec<String>,
    /// The interface has a device on a bus (`/sys/class/net/X/device`), and this device has the interrupts and rings.
    pub physical: bool,
    /// The interface's packets pass through the interfaces below it ([`Nic::lower`]), which have the interrupts and
    /// rings: a port of a switch (DSA), the upper interface of a failover pair, or a representor without a device.
    pub carried: bool,
    /// Indices of the interfaces below, which carry this interface's packets: the kernel's `lower_*` links, `iflink` of
    /// an interface with a device or of a tunnel, and for a representor the interface of the NIC itself.
    pub lower: Vec<u32>,
    /// The driver, if the interface has a device.
    pub driver: Option<String>,
    /// The NUMA node of the device.
    pub node: Option<u32>,
    /// The kind in `ip -d link` (`veth`, `tun`, `macvtap`, `bridge`); none for a physical interface.
    pub kind: Option<String>,
    /// Administratively up (IFF_UP): NAPI runs only then.
    pub up: bool,
    /// Has carrier.
    pub carrier: bool,
    /// Hardware address, for Ethernet.
    pub mac: Option<[u8; 6]>,
    /// Index of the lower device (macvlan, macvtap, VLAN) or of the peer (veth).
    pub link: Option<u32>,
    /// Index of the peer of a veth pair, in the peer's network namespace, if that is not this one.
    pub peer: Option<u32>,
    /// Index of the bridge or bond that has this interface as a port.
    pub controller: Option<u32>,
    /// Kind of the root qdisc: `mq`, `fq_codel`, `noqueue`.
    pub qdisc: Option<String>,
    /// The root qdisc as text, if another program chose it; none if the kernel or Ontime chose it.
    pub qdisc_by_others: Option<String>,
    /// Receive queues.
    pub rx_queues: u32,
    /// Transmit queues in use, with their XPS CPUs; `None` where the driver has no XPS.
    pub tx_queues: Vec<TxQueue>,
    /// `/sys/class/net/X/threaded` (5.12): 0, 1, or 2 for polling.
    pub threaded: Option<u32>,
    /// Packets per poll at most, set through the host module: a number, or `default`. `None` if the module is not
    /// loaded.
    pub napi_weight: Option<String>,
    /// Whether threads of the host module poll this interface: `0` or `1`. `None` if the module is not loaded.
    pub busy_poll: Option<String>,
    /// NAPI instances (netlink, 6.8; on older kernels only those with a thread).
    pub napis: Vec<Napi>,
    /// Interrupt numbers ([`devices`]). An interrupt that several interfaces of a device share is in the list of each.
    pub irqs: Vec<u32>,
    /// Receive interrupt moderation; `None` where the driver (or a kernel before 5.7) does not report it.
    pub moderation: Option<Moderation>,
    /// Descriptors of a transmit ring; `None` where the driver (or a kernel before 5.7) does not report it.
    pub tx_ring: Option<u32>,
}

impl Nic {
    /// Whether packets only pass through this interface: it is virtual and has neither interrupts nor NAPI. A veth or a
    /// WireGuard interface has NAPI while it is up, which kernels before 6.8 do not list.
    pub fn passes_on(&self) -> bool {
        let may_have_napi = matches!(self.kind.as_deref(), Some("veth" | "wireguard"));
        !self.physical && !self.carried && self.napis.is_empty() && self.irqs.is_empty() && !may_have_napi
    }
}

/// A transmit queue.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct TxQueue {
    /// CPUs whose packets use this queue; `None` where the driver has no XPS.
    pub xps_cpus: Option<CpuSet>,
    /// Upper limit of the bytes that BQL lets the driver have queued; `None` where the driver has no BQL.
    pub bql_limit_max: Option<u64>,
}

/// A NAPI instance.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Napi {
    /// NAPI id, unique on the host while the instance lives. 0 if not known (before 5.17, where the kernel cut the name
    /// of the thread).
    pub id: u32,
    /// The interrupt, where the driver reports it.
    pub irq: Option<u32>,
    /// Thread id of the instance's thread, if there is one.
    pub pid: Option<i32>,
    /// 0 softirq, 1 thread, 2 polling thread; `None` before 6.17, where only [`Nic::threaded`] shows the mode.
    pub threaded: Option<u32>,
    /// Receive queues that this instance serves.
    pub rx_queues: Vec<u32>,
    /// Transmit queues that this instance serves.
    pub tx_queues: Vec<u32>,
}

/// An interrupt with at least one handler.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Irq {
    /// Number, chip and hardware interrupt.
    pub id: IrqId,
    /// Names of the handlers.
    pub actions: Vec<String>,
    /// CPUs to which the interrupt may be delivered.
    pub affinity: CpuSet,
    /// Whether user space may set the affinity. If the kernel or the driver manages it, the kernel shows the file
    /// without write permission (`kernel/irq/proc.c`, `irq_can_set_affinity_usr`).
    pub settable: bool,
    /// The device by its name on its bus: `0000:03:02.0`, `virtio4`. None where the device tree does not show it.
    pub device: Option<String>,
    /// The interrupt is a network controller's, whether or not its interfaces are in this network namespace.
    pub network: bool,
    /// If the device is a virtual function: the interface of its physical function, or the physical function itself if
    /// it has no interface here.
    pub virtual_of: Option<String>,
    /// Where the interrupt is of an interface here: another NIC that it serves, whose interfaces are in other network
    /// namespaces, by its device.
    pub elsewhere: Option<String>,
}

/// The purpose of a kernel thread on the packet path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum KernelThreadKind {
    /// `irq/N-NAME`: handler of interrupt N.
    Irq(u32),
    /// `napi/NIC-ID`: polls NAPI instance ID.
    Napi(u32),
    /// `napi/NIC` with the end cut off, so that the instance's id is not known (before 5.17).
    NapiCut,
    /// `napi-poll/NIC-ID`: a thread of the host module that polls NAPI instance ID without pause.
    NapiPoll(u32),
    /// `ksoftirqd/CPU`.
    Ksoftirqd(u32),
    /// `ktimers/CPU`: timer softirq on PREEMPT_RT.
    Ktimers(u32),
    /// `rcuc/CPU`: RCU callbacks on PREEMPT_RT.
    Rcuc(u32),
    /// `backlog_napi/CPU`: the per-CPU backlog on PREEMPT_RT, 6.10 and later.
    BacklogNapi(u32),
    /// `irq_work/CPU`: deferred work of interrupts and tracepoints, on PREEMPT_RT.
    IrqWork(u32),
}

/// A kernel thread on the packet path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KernelThread {
    /// Thread id and start time.
    pub id: ThreadId,
    /// Purpose.
    pub kind: KernelThreadKind,
    /// Name.
    pub comm: String,
    /// Scheduling policy when the inventory was read.
    pub policy: Policy,
}

/// KVM on this host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Kvm {
    /// `/dev/kvm` exists.
    pub device: bool,
    /// `halt_poll_ns`, ns.
    pub halt_poll_ns: Option<u64>,
    /// Whether KVM sets the clocks of all vCPUs anew every 300 s (`kvmclock_periodic_sync`).
    pub clock_sync: bool,
    /// Whether KVM takes split huge pages back every minute (`nx_huge_pages`, and a recovery ratio).
    pub page_recovery: bool,
}

/// Background work of the kernel on the memory of any process, guests included.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// The kernel merges equal pages (`ksm/run`).
    pub merged: bool,
    /// The value of `transparent_hugepage/enabled`, unless that is `never`: the kernel collapses pages into huge pages.
    pub collapsed: Option<String>,
    /// The kernel unmaps pages to find out which node uses them (`kernel.numa_balancing`, on several nodes).
    pub balanced: bool,
    /// The kernel may write pages to a swap area (`/proc/swaps`).
    pub swap: bool,
}

/// Protections that let bulk threads run before FIFO threads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Protections {
    /// Servers of `/sys/kernel/debug/sched` (`fair_server`, `ext_server`), with the runtime per CPU, ns per period.
    pub servers: BTreeMap<String, BTreeMap<u32, u64>>,
    /// Whether debugfs could be read. If not, `servers` is empty although the kernel may have servers.
    pub readable: bool,
    /// `kernel.sched_rt_runtime_us`, us per period; -1 for no limit.
    pub rt_runtime_us: Option<i64>,
}

/// A service that sets the same knobs as Ontime.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Conflict {
    /// Name, such as `irqbalance`.
    pub service: String,
    /// Process id.
    pub pid: i32,
}

/// How udev sets the CPUs of interrupts when a device appears.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Udev {
    /// Policies from the `.link` files of interfaces, by interface name.
    pub links: BTreeMap<String, LinkPolicy>,
    /// Places of udev rules, `FILE:LINE`.
    pub rules: Vec<String>,
}

/// The policy for interrupts' CPUs in an interface's `.link` file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LinkPolicy {
    /// The `.link` file or drop-in.
    pub file: String,
    /// `single` or `spread`.
    pub policy: String,
    /// The options that choose the CPUs, as written in the file; empty for any CPU.
    pub among: String,
}

/// kubelet's CPU manager (`/var/lib/kubelet/cpu_manager_state`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CpuManager {
    /// `none` or `static`.
    pub policy: String,
    /// CPUs for all containers without exclusive CPUs.
    pub shared: CpuSet,
    /// CPUs that are exclusive to single containers.
    pub exclusive: CpuSet,
}

/// A fact that could not be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Note {
    /// The file or fact, in words.
    pub about: String,
    /// The reason, and the kernel version or privilege that is needed to read it.
    pub why: String,
}

impl Inventory {
    /// The NIC with this name or alternative name. The kernel keeps these names unique in a network namespace.
    pub fn nic(&self, name: &str) -> Option<&Nic> {
        self.nics.iter().find(|nic| nic.id.name == name || nic.altnames.iter().any(|other| other == name))
    }

    /// The interfaces with a device that send through this NIC: the NIC itself, and interfaces above it, directly or
    /// through others between them (ports of a switch on a bond). When discovery goes down from a virtual NIC, it stops
    /// at the first interface that has a device.
    pub(crate) fn senders_by<'a>(&'a self, nic: &'a Nic) -> Vec<&'a Nic> {
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

    /// The NIC with this index.
    pub fn nic_by_index(&self, ifindex: u32) -> Option<&Nic> {
        self.nics.iter().find(|nic| nic.id.ifindex == ifindex)
    }

    /// The NIC to which a knob belongs: its files, queues, filters, interrupts, their threads and the threads of its
    /// NAPI instances.
    pub fn nic_of(&self, knob: &Knob) -> Option<&Nic> {
        if let Some(nic) = knob.nic() {
            return self.nic_by_index(nic.ifindex);
        }
        match knob {
            Knob::IrqAffinity { irq } => self.nics.iter().find(|nic| nic.irqs.contains(&irq.irq)),
            Knob::ThreadPolicy { thread, .. } | Knob::ThreadAffinity { thread, .. } => {
                let KernelThread { kind, id: thread, .. } = self.threads.iter().find(|known| known.id == *thread)?;
                self.nics.iter().find(|nic| match kind {
                    KernelThreadKind::Irq(irq) => nic.irqs.contains(irq),
                    KernelThreadKind::NapiCut => nic.napis.iter().any(|napi| napi.pid == Some(thread.tid)),
                    // If the thread's name was cut within the NAPI id, the thread id decides.
                    KernelThreadKind::Napi(id) => {
                        nic.napis.iter().any(|napi| napi.id == *id || napi.pid == Some(thread.tid))
                    }
                    KernelThreadKind::NapiPoll(id) => nic.napis.iter().any(|napi| napi.id == *id),
                    _ => false,
                })
            }
            _ => None,
        }
    }

    /// Kernel threads whose kind passes the filter.
    pub fn threads_of(&self, wanted: impl Fn(KernelThreadKind) -> bool) -> impl Iterator<Item = &KernelThread> {
        self.threads.iter().filter(move |thread| wanted(thread.kind))
    }
}
