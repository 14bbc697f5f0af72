//! The packet path by class: typed rules for interrupts, NAPI, vhost, queues and the kernel's own threads.
//!
//! In: facts of the running host ([`inventory`]) and what is wanted ([`intent`]: method, priority table, classes, tenants).
//! Out: a pure plan of knobs and values with findings, applying it with every original value kept in a write-ahead
//! journal, undoing it, noticing what drifted, and the checks behind `ontime doctor`.
//!
//! Nothing here resets a NIC, replaces a root qdisc or moves a running vCPU.

pub mod cpus;
pub mod intent;
pub mod inventory;
pub mod knob;
pub mod method;
pub mod rule;

pub use cpus::CpuSet;
pub use intent::{Intent, NicUse};
pub use inventory::Inventory;
pub use knob::{Host, IrqId, Knob, KnobError, NicId, Root, SteerFrom, Value};
pub use method::{Method, MethodError};
pub use rule::{Cost, Finding, Outcome, Refusal, Rule, RuleId, Setting, Severity, Stage};
