//! What runs on this host: virtual machines and containers, their threads, and the class of each.
//!
//! In: `/proc`, `/run/libvirt/qemu`, cgroups, the rules in `/etc/ontime`.
//! Out: [`Tenant`]s with verified threads, and the one [`PriorityTable`] every other crate places threads by.
//! Nothing here owns or starts a tenant.

pub mod class;
pub mod model;
pub mod thread;

pub use class::{Class, Level, Policy, PriorityTable, Role};
pub use model::{ClassSource, Kind, Tenant, TenantThread, ThreadRole, Vnic};
pub use thread::{ThreadError, ThreadId};
