//! A planner's output: which vCPU has which CPU, from when to when.

use crate::units::Nanos;

/// A vCPU of a planner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VcpuId(pub(crate) u32);

impl VcpuId {
    /// Its index: in the order of addition, starting at 0; indexes of removed vCPUs are reused.
    pub fn index(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

/// A vCPU on a CPU, from start to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// The CPU, from 0.
    pub cpu: u32,
    /// The vCPU that runs.
    pub vcpu: VcpuId,
    /// Start.
    pub start: Nanos,
    /// End, later than `start`.
    pub end: Nanos,
}

impl Segment {
    /// The part of the segment after `now`, ns.
    pub(crate) fn left(&self, now: u64) -> u64 {
        self.end.0.saturating_sub(self.start.0.max(now))
    }
}
