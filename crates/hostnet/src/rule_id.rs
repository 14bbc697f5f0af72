//! The names of the rules.

use serde::{Deserialize, Serialize};
use strum::{Display, IntoStaticStr};

/// A rule's name. It is stable in reports, metrics and configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Display, IntoStaticStr)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum RuleId {
    /// Everything that `host.toml` names exists, and only one class claims it.
    HostConfig,
    /// Each NAPI instance is polled by its own thread.
    NapiThreaded,
    /// Interrupt threads get the place of their NIC's class.
    IrqThread,
    /// NAPI threads get the place of their NIC's class.
    NapiThread,
    /// Short polls on NICs that RT packets can wait for, on kernels where softirqs share a lock.
    NapiWeight,
    /// VMs' packets that RT packets can wait for are passed on one by one, on kernels where softirqs share a lock.
    TapBatch,
    /// Interrupt threads of devices other than NICs run below all RT threads.
    DeviceIrq,
    /// Each RT receive queue has a polling thread, placed where it delays no vCPU.
    BusyPoll,
    /// `backlog_napi/N` run below the vCPUs.
    Backlog,
    /// Veth pairs of RT containers pass packets by NAPI, not through the backlog.
    Veth,
    /// `ktimers/N`, `ksoftirqd/N`, `rcuc/N` run below the vCPUs.
    SoftirqThreads,
    /// RT NICs do not delay receive interrupts.
    Moderation,
    /// vCPU threads get the place of their tenant's class.
    VcpuPlace,
    /// vhost and kvm-pit threads get the place of their tenant's class.
    VnicPlace,
    /// The main threads of RT VMs' VMMs run before bulk threads.
    VmmPlace,
    /// Among vCPUs of one level, those with a pending interrupt run first.
    InterruptContext,
    /// One CPU is reserved for the RT group.
    ExclusiveCpu,
    /// RT packets have their own transmit queue on a NIC that both classes use.
    RtTxQueue,
    /// No qdisc on a NIC with one transmit queue that both classes use.
    QdiscBypass,
    /// Socket buffers are freed on the CPU that has used them up.
    SkbDefer,
    /// FIFO vCPUs do not halt-poll in KVM.
    HaltPoll,
    /// The fair server, the ext server and RT throttling are off, where runtime caps replace them.
    RtProtections,
}

impl RuleId {
    /// The name as in reports and configuration.
    pub fn name(self) -> &'static str {
        self.into()
    }
}
