//! The tenants of this host: virtual machines and containers, their threads, and the class of each.
//!
//! Input: `/proc`, `/run/libvirt/qemu`, cgroups, the rules in `/etc/ontime`. Output: [`Tenant`]s with verified threads,
//! and the [`PriorityTable`] by which every other crate sets priorities. This crate does not own or start tenants.
//!
//! | file | |
//! |---|---|
//! | `class`, `model` | basic types: classes, roles, tenants |
//! | `rules`, `users` | which tenant has which class |
//! | `discover`, `host`, `devices` | finding tenants; reading a host; which device process serves which VM |
//! | `budget` | limits on the time that discovery spends on other users' processes |
//! | `watch`, `connector`, `turns` | notification of changes, and of new processes and threads by turns |
//! | `libvirt`, `vmm`, `qmp`, `container`, `vnic`, `tap`, `peers` | one source of information each |
//! | `namespace` | running code in a tenant's network namespace |
//! | `ownership`, `conflict`, `problem` | who sets a thread's policy; conflicts with the priority table; problems |
//!
//! The modules of [`ontime_base`] have their names here, too.

// `tests/common`, which builds a fake host, names the crate.
#[cfg(test)]
extern crate self as ontime_tenants;

pub mod budget;
pub mod class;
#[cfg(test)]
#[path = "../tests/common/mod.rs"]
mod common;
pub mod conflict;
pub mod connector;
pub mod container;
pub mod devices;
pub mod discover;
pub mod host;
pub mod libvirt;
pub mod model;
pub mod namespace;
pub mod ownership;
#[doc(hidden)]
pub mod peers;
pub mod problem;
pub mod qmp;
pub mod rules;
pub mod tap;
#[cfg(test)]
mod testing;
pub mod turns;
pub mod users;
pub mod vmm;
pub mod vnic;
pub mod watch;

pub use ontime_base::{clock, config, cpus, proc, remedy, repeats, text, thread};
use ontime_base::{files, sched, wait_limit};

pub use class::{Class, Level, Policy, PriorityTable, Role};
pub use clock::ProcessClock;
pub use config::ConfigError;
pub use conflict::Conflict;
pub use cpus::CpuSet;
pub use discover::{Discovery, discover, discover_between, newcomers};
pub use host::Sources;
pub use model::{Attached, ClassSource, Kind, LibvirtTuning, Tenant, TenantThread, ThreadRole, Vnic};
pub use ownership::{Owner, owner, wanted};
pub use problem::{Problem, ProblemKind};
pub use repeats::Repeats;
pub use rules::{Namer, Rules, RuntimeCap};
pub use thread::{ThreadError, ThreadId};
pub use wait_limit::{limit_waits, refuse_descriptors};
pub use watch::Watcher;
