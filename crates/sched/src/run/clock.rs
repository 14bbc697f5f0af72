//! The clock of plans, pacers and readers.

use rustix::time::{ClockId, Timespec, clock_gettime};

/// The present time, ns of CLOCK_MONOTONIC.
pub(crate) fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    (now.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(now.tv_nsec as u64)
}

/// A time of that clock, as the kernel takes it.
pub(crate) fn timespec(ns: u64) -> Timespec {
    Timespec { tv_sec: (ns / 1_000_000_000) as i64, tv_nsec: (ns % 1_000_000_000) as _ }
}
