//! The tests, one file each, or one for those that belong together. `crate::list` says which there are.

pub(crate) mod builds;
pub(crate) mod deadlines;
pub(crate) mod deadlines_vcpus;
pub(crate) mod degraded;
pub(crate) mod host_poll;
pub(crate) mod laboratory;
pub(crate) mod levels;
pub(crate) mod lockdown;
pub(crate) mod napi_wait;
pub(crate) mod napi_weight;
pub(crate) mod qdiscs;
pub(crate) mod vmm;
