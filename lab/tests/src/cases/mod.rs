//! The tests, one file each, or one for those that belong together. `crate::list` says which there are.

pub(crate) mod builds;
pub(crate) mod busypoll;
pub(crate) mod cap;
pub(crate) mod degraded;
pub(crate) mod determinism;
pub(crate) mod faults;
pub(crate) mod laboratory;
pub(crate) mod levels;
pub(crate) mod lockdown;
pub(crate) mod on_demand;
pub(crate) mod path;
pub(crate) mod podman;
pub(crate) mod qdiscs;
pub(crate) mod trace;
pub(crate) mod traffic;
pub(crate) mod clients;
pub(crate) mod cpus;
pub(crate) mod device;
pub(crate) mod hotplug;
pub(crate) mod pending;
pub(crate) mod reservations;
pub(crate) mod tenants;
