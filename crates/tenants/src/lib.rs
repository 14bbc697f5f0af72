//! What runs on this host: virtual machines and containers, their threads, and the class of each.
//!
//! In: `/proc`, `/run/libvirt/qemu`, cgroups, the rules in `/etc/ontime`.
//! Out: [`Tenant`]s with verified threads, and the one [`PriorityTable`] every other crate places threads by.
//! Nothing here owns or starts a tenant.
//!
//! | file | |
//! |---|---|
//! | `class`, `model`, `cpus` | the words: classes, places, policies, tenants, CPU sets |
//! | `thread`, `sched`, `clock` | a thread's identity; its policy and affinity, read and set; a process's CPU time |
//! | `config`, `rules`, `users` | strict TOML; which tenant has which class |
//! | `discover`, `host`, `files`, `devices` | finding tenants; reading a host; who was found to serve a VM |
//! | `budget` | how much of a look at the host the processes of others may cost |
//! | `watch`, `connector` | learning that something changed |
//! | `proc`, `libvirt`, `vmm`, `qmp`, `container`, `vnic`, `peers` | one source each |
//! | `namespace` | asking the kernel from within a tenant's network namespace |
//! | `ownership`, `conflict`, `problem` | who decides about a thread; what works against the table; what went wrong |
//! | `text` | words of messages |

// The built host of `tests/common` names the crate.
#[cfg(test)]
extern crate self as ontime_tenants;

pub mod budget;
pub mod class;
pub mod clock;
pub mod config;
pub mod conflict;
pub mod connector;
pub mod container;
pub mod cpus;
pub mod devices;
pub mod discover;
mod files;
pub mod host;
pub mod libvirt;
pub mod model;
pub mod namespace;
pub mod ownership;
#[doc(hidden)]
pub mod peers;
pub mod problem;
pub mod proc;
pub mod qmp;
pub mod remedy;
pub mod rules;
mod sched;
#[cfg(test)]
mod testing;
pub mod text;
pub mod thread;
pub mod users;
pub mod vmm;
pub mod vnic;
pub mod watch;

pub use class::{Class, Level, Policy, PriorityTable, Role};
pub use clock::ProcessClock;
pub use config::ConfigError;
pub use conflict::Conflict;
pub use cpus::CpuList;
pub use discover::{Discovery, discover};
pub use host::Sources;
pub use model::{Attached, ClassSource, Kind, LibvirtTuning, Tenant, TenantThread, ThreadRole, Vnic};
pub use ownership::{Owner, owner, wanted};
pub use problem::{Problem, ProblemKind};
pub use remedy::remedy;
pub use rules::{Rules, RuntimeCap};
pub use thread::{ThreadError, ThreadId};
pub use watch::Watcher;
