//! The back ends: how reservations are enforced.
//!
//! | | what enforces the share | price |
//! |---|---|---|
//! | `paced`, `dp-wrap` | pacers change priorities (`run/pacer.rs`) | a few changes of priority for each deadline |
//! | `sched_ext` | pacers write places for a BPF scheduler ([`crate::ext`]) | it runs all SCHED_OTHER; one CPU a vCPU |
//! | `deadline` | SCHED_DEADLINE for each vCPU, like RT-Xen's servers | no unused time; affinity to a root domain |
//!
//! A back end neither sets a thread's policy for the first time nor restores it. The daemon does that by its plan,
//! whose journal keeps the original values. The back end gives the policy for the plan ([`Backend::place`]).

use std::collections::BTreeMap;
use std::fmt::Debug;

use ontime_tenants::{Policy, ThreadId};

use crate::admit::{Reservations, Reserved};
use crate::model::{PacerError, Places, Snapshot, Use};

/// Enforces reservations.
pub trait Backend: Debug {
    /// The policy that the daemon's plan gives a vCPU's thread before this back end takes over, and keeps in view from
    /// then on.
    fn place(&self, reserved: &Reserved) -> Policy;

    /// The policies between which this back end moves threads, so that the plan does not correct them; None if it moves
    /// none.
    fn places(&self) -> Option<Places>;

    /// Stops enforcing for vCPUs that are not in `reservations`: the plan may set their policies now.
    ///
    /// # Errors
    /// [`PacerError`]: no reservation is enforced any more.
    fn release(&mut self, reservations: &Reservations) -> Result<(), PacerError>;

    /// Enforces the reservations of exactly these vCPUs, whose policies the plan has set.
    ///
    /// # Errors
    /// [`PacerError`]: no reservation is enforced any more.
    fn set(&mut self, reservations: &Reservations) -> Result<(), PacerError>;

    /// The counters of each vCPU.
    fn uses(&self) -> BTreeMap<ThreadId, Use>;

    /// Whether a part of this back end hangs, so that [`Self::set`] has to be called although nothing has changed. To
    /// be asked once a second.
    fn hangs(&mut self) -> bool {
        false
    }

    /// Why the kernel does not count vCPUs' time for the pacers, which then take more CPU time; None if it does, or
    /// there are no pacers.
    fn uncounted(&self) -> Option<&str> {
        None
    }

    /// This back end's own real-time threads and their policies.
    fn threads(&self) -> Vec<(ThreadId, Policy)> {
        Vec::new()
    }

    /// The pacers' present state, if there are pacers.
    fn show(&mut self) -> Option<Snapshot>;
}
