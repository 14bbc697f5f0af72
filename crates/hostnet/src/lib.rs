//! The packet path by class: typed rules for interrupts, NAPI, vhost, queues and the kernel's own threads.
//!
//! In: facts of the running host ([`inventory`]) and the configuration ([`intent`]: method, priority table, classes,
//! tenants). Out: a plan of knobs and values with findings, computed by pure functions. This crate also applies the
//! plan and keeps every original value in a write-ahead journal, undoes the plan, finds drift, and makes the checks of
//! `ontime doctor`.
//!
//! Nothing here resets a NIC or moves a running vCPU. Only method `vatc` replaces a root qdisc, where the
//! configuration asks for it.

pub mod adaptive;
pub mod apply;
pub mod doctor;
pub mod host_config;
pub mod inherit;
pub mod intent;
pub mod inventory;
pub mod journal;
mod kernel_files;
pub mod knob;
pub mod kvm;
pub mod live;
pub mod method;
pub mod netlink;
mod obstacle;
pub mod placement;
pub mod plan;
mod roots;
pub mod rule;
mod rule_id;
pub mod rules;
pub mod smi;
mod tap;

pub use ontime_base::cpus;

pub use apply::{
    ConvergeError, Counts, Done, Drift, Item, Report, accepting, add, adopt, apply, converge, drift, give_back, reset,
};
pub use cpus::CpuSet;
pub use doctor::{Check, Diagnosis, Probes, State, examine};
pub use host_config::{HostConfig, NicConfig};
pub use inherit::{Inherited, Paused};
pub use intent::{Intent, NicUse};
pub use inventory::Inventory;
pub use journal::{Journal, JournalError, Original, Originals};
pub use knob::{Host, IrqId, Knob, KnobError, Moderation, NicId, Obstacle, Root, SteerFrom, Value};
pub use kvm::KvmProbe;
pub use live::LiveHost;
pub use method::{Method, MethodError};
pub use plan::{Plan, as_found, plan, replan};
pub use roots::Roots;
pub use rule::{Cost, Finding, Outcome, Refusal, Rule, RuleId, Setting, Severity, Stage};
pub use rules::RULES;
pub use smi::SmiCount;

#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod message_tests;
