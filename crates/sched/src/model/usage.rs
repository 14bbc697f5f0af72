//! Counters of a vCPU with a reservation.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of a vCPU since it has its reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Use {
    /// CPU time within its shares, ns; with back end `deadline`, all of its CPU time.
    pub ran: u64,
    /// CPU time beyond its shares, ns, which no other thread needed.
    pub beyond: u64,
    /// How often it used up its share of a slice or window.
    pub overruns: u64,
    /// Periods that were judged.
    pub periods: u64,
    /// Periods with less than the budget although the vCPU was runnable.
    pub misses: u64,
    /// Changes of its place.
    pub flips: u64,
    /// Changes that the kernel refused.
    pub refused: u64,
}

/// Counters of a vCPU, written by pacers and read by other threads at any time.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// CPU time within shares, ns.
    pub ran: AtomicU64,
    /// CPU time beyond them, ns.
    pub beyond: AtomicU64,
    /// How often a share was used up.
    pub overruns: AtomicU64,
    /// Periods that were judged.
    pub periods: AtomicU64,
    /// Periods with less than the budget although the vCPU was runnable: it waited for longer than the period less the
    /// budget.
    pub misses: AtomicU64,
    /// Changes of place.
    pub flips: AtomicU64,
    /// Changes of place that the kernel refused.
    pub refused: AtomicU64,
}

impl Tally {
    /// The present values.
    pub(crate) fn usage(&self) -> Use {
        Use {
            ran: self.ran.load(Ordering::Relaxed),
            beyond: self.beyond.load(Ordering::Relaxed),
            overruns: self.overruns.load(Ordering::Relaxed),
            periods: self.periods.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            flips: self.flips.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
        }
    }
}
