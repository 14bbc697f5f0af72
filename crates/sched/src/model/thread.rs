//! A vCPU thread as a plan sees it: what it has used, what it is entitled to, and how its place is changed.

use ontime_plan::Bandwidth;

use crate::model::place::Place;

/// No further check.
pub(crate) const NEVER: u64 = u64::MAX;
/// The longest period of a prompt vCPU, ns: one that answers requests, and runs ahead of all others on the only CPU for
/// reservations.
pub(crate) const PROMPT: u64 = 1_000_000;

/// A vCPU's next deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Next {
    /// Its time, ns of CLOCK_MONOTONIC.
    pub at: u64,
    /// Whether one of the vCPU's tasks has run lately, so that its share is to be planned.
    pub live: bool,
}

/// Counters of a vCPU thread since its start, ns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Counts {
    /// Time on a CPU.
    pub ran: u64,
    /// Time runnable but waiting for a CPU. The kernel adds a wait when the wait ends: a present wait is not included.
    pub waited: u64,
}

/// CPU time that a vCPU is entitled to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Part of a CPU.
    pub bandwidth: Bandwidth,
    /// The period in which it is to be had, ns.
    pub period: u64,
}

/// Access to the vCPU threads by number. None: the thread has ended.
pub(crate) trait Threads {
    /// The thread's counters up to now.
    fn read(&mut self, vcpu: usize) -> Option<Counts>;
    /// Whether the thread sleeps: it neither waits for a CPU nor for a lock. False if that cannot be read now. Costs
    /// several readings.
    fn is_asleep(&mut self, vcpu: usize) -> bool;
    /// The next deadline after `after`, ns, that the guest publishes; None if it publishes none, or if it cannot be
    /// read now.
    fn next_deadline(&mut self, vcpu: usize, after: u64) -> Option<Next>;
    /// The vCPU's new share, if its guest has claimed from its offer ([`crate::ledger`]) since the last call.
    fn claimed(&mut self, vcpu: usize) -> Option<Share>;
    /// Changes the thread's place, and reads its counters. A change that the kernel refuses counts as made; the next
    /// change tries again.
    fn set_place(&mut self, vcpu: usize, place: Place) -> Option<Counts>;
}
