//! The typed rule: one row of the table "what an RT packet can wait behind".
//!
//! In: an [`Inventory`] (facts) and an [`Intent`] (what is wanted). Out, by a pure
//! function: the [`Setting`]s that cure the row on this host, and [`Finding`]s for what no setting can cure.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::intent::Intent;
use crate::inventory::Inventory;
use crate::knob::{Knob, Value};
use crate::method::Method;

/// A rule's name, stable in reports, metrics and configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RuleId {
    /// What `host.toml` names is there, and is claimed by one class.
    HostConfig,
    /// Every NAPI polled by a thread of its own.
    NapiThreaded,
    /// Interrupt threads placed by the class of their NIC.
    IrqThread,
    /// NAPI threads placed by the class of their NIC.
    NapiThread,
    /// Polls of NICs that RT packets can wait for kept short, where softirqs share a lock.
    NapiWeight,
    /// Packets of VMs that RT packets can wait for handed over one by one, where softirqs share a lock.
    TapBatch,
    /// Interrupt threads of devices that are no NIC placed below every RT thread.
    DeviceIrq,
    /// A polling thread for each RT receive queue, placed where it delays no vCPU.
    BusyPoll,
    /// `backlog_napi/N` placed below the vCPUs.
    Backlog,
    /// Veth pairs of RT containers handed over by NAPI, not by the backlog.
    Veth,
    /// `ktimers/N`, `ksoftirqd/N`, `rcuc/N` placed below the vCPUs.
    SoftirqThreads,
    /// Receive interrupts of RT NICs not held back.
    Moderation,
    /// vCPU threads placed by their tenant's class.
    VcpuPlace,
    /// vhost and kvm-pit threads placed by their tenant's class.
    VnicPlace,
    /// The main threads of RT VMs' monitors ahead of bulk.
    VmmPlace,
    /// Among vCPUs of one level those with a pending interrupt first.
    InterruptContext,
    /// One CPU kept for the RT group.
    ExclusiveCpu,
    /// A transmit queue of its own for RT packets on a NIC that both classes use.
    RtTxQueue,
    /// No qdisc on a NIC that both classes send by with one queue.
    QdiscBypass,
    /// The root qdisc of a comparison method.
    NicQdisc,
    /// Buffers freed where they are used up.
    SkbDefer,
    /// No busy waiting in KVM by FIFO vCPUs.
    HaltPoll,
    /// The fair server, the ext server and RT throttling off, where runtime caps stand in for them.
    RtProtections,
}

impl RuleId {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            RuleId::HostConfig => "host-config",
            RuleId::NapiThreaded => "napi-threaded",
            RuleId::IrqThread => "irq-thread",
            RuleId::NapiThread => "napi-thread",
            RuleId::NapiWeight => "napi-weight",
            RuleId::TapBatch => "tap-batch",
            RuleId::DeviceIrq => "device-irq",
            RuleId::BusyPoll => "busy-poll",
            RuleId::Backlog => "backlog",
            RuleId::Veth => "veth",
            RuleId::SoftirqThreads => "softirq-threads",
            RuleId::Moderation => "moderation",
            RuleId::VcpuPlace => "vcpu-place",
            RuleId::VnicPlace => "vnic-place",
            RuleId::VmmPlace => "vmm-place",
            RuleId::InterruptContext => "interrupt-context",
            RuleId::ExclusiveCpu => "exclusive-cpu",
            RuleId::RtTxQueue => "rt-tx-queue",
            RuleId::QdiscBypass => "qdisc-bypass",
            RuleId::NicQdisc => "nic-qdisc",
            RuleId::SkbDefer => "skb-defer",
            RuleId::HaltPoll => "halt-poll",
            RuleId::RtProtections => "rt-protections",
        }
    }
}

impl RuleId {
    /// Whether `without` in `host.toml` may name it: not what is checked always, nor what another method is made of.
    pub fn may_be_left_out(self) -> bool {
        self != RuleId::HostConfig && Method::Partitioned.has(self)
    }
}

impl fmt::Display for RuleId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a row costs while it is not cured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Cost {
    /// The cost in words and figures (us, p50/p99/max where three figures stand together).
    pub text: &'static str,
    /// Where the figures are from: kernel, clock, load. Empty where there is no figure yet.
    pub source: &'static str,
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    /// Its name.
    pub id: RuleId,
    /// One line of what it wants.
    pub title: &'static str,
    /// What an RT packet can wait behind.
    pub waits_behind: &'static str,
    /// What that costs.
    pub cost: Cost,
    /// The cure.
    pub cure: &'static str,
    /// Why applying it is live-safe, with the kernel file that shows it.
    pub live_safe: &'static str,
    /// What is wanted on this host.
    pub plan: fn(&Inventory, &Intent) -> Outcome,
}

/// When, within one pass, a setting is made. Settings of an earlier stage are all made before those of a later one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// Creates threads: a plan made before it does not know them yet.
    Thread,
    /// Where threads and interrupts run.
    Affinity,
    /// Priorities.
    Place,
    /// Queues and filters.
    Steer,
    /// Host-wide values.
    Host,
    /// Kernel protections off: last, when everything else stands; on reset first.
    Protection,
}

/// A knob and the value a rule wants it to have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Setting {
    /// The rule that wants it.
    pub rule: RuleId,
    /// When it is made.
    pub stage: Stage,
    /// Which knob.
    pub knob: Knob,
    /// Which value.
    pub value: Value,
    /// Other knobs that this one overwrites: their originals are kept with its own, and restored after it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub overwrites: Vec<Knob>,
    /// Knobs without which it would do harm, or could not be given back: where one of these cannot be set, or is given
    /// back, it is not made, and given back if it was. One that is gone is no lack.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub needs: Vec<Knob>,
    /// What the journal is to keep for its original, where that is not what is found ([`crate::inherit`]).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub original: Option<Value>,
    /// Somebody else changes it from here on: its original is kept although it has the wanted value already.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub handed_on: bool,
    /// It is written in every pass, and once more soon after it was first: that it reads as wanted does not say that
    /// the device has it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub insists: bool,
}

impl Setting {
    /// One of what it needs that is among these keys of knobs.
    pub(crate) fn lacks(&self, missing: &BTreeSet<String>) -> Option<&Knob> {
        self.needs.iter().find(|knob| missing.contains(&knob.key()))
    }

    /// A setting that overwrites no other knob, and needs none.
    pub fn new(rule: RuleId, stage: Stage, knob: Knob, value: Value) -> Self {
        let (overwrites, needs) = (Vec::new(), Vec::new());
        Self { rule, stage, knob, value, overwrites, needs, original: None, handed_on: false, insists: false }
    }
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// Good to know; costs an RT packet nothing.
    Info,
    /// An RT packet waits longer than it must.
    Warning,
    /// The class guarantee does not hold.
    Critical,
}

/// Why something that would help is not done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Refusal {
    /// Kernel lockdown denies it.
    Lockdown,
    /// Runtime caps of the RT tenants are not in force.
    NoCaps,
    /// The kernel lacks the feature.
    Kernel,
    /// The device or driver lacks the feature.
    Device,
    /// It could not be done without disturbing live traffic.
    NotLiveSafe,
    /// The host's facts could not be read.
    Unreadable,
}

/// Something no setting cures.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The rule it is about.
    pub rule: RuleId,
    /// How bad it is.
    pub severity: Severity,
    /// The NIC, tenant, thread or file it is about.
    pub object: String,
    /// What was found.
    pub found: String,
    /// What to do about it.
    pub remedy: String,
    /// Why Ontime does not do it.
    pub refusal: Option<Refusal>,
}

/// What a rule wants on this host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Outcome {
    /// Settings that cure it.
    pub settings: Vec<Setting>,
    /// What stays, and why.
    pub findings: Vec<Finding>,
}
