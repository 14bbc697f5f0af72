//! Snapshots of the pacers' state, for `ontime top`.

use ontime_tenants::ThreadId;

use crate::model::place::Place;

/// Place and period of a vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VcpuState {
    /// The vCPU's thread.
    pub id: ThreadId,
    /// Where the pacer has put the thread.
    pub place: Place,
    /// The end of its present period.
    pub deadline: u64,
}

/// A segment of the present plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// The CPU, by the planner's number.
    pub cpu: usize,
    /// The vCPU's thread.
    pub id: ThreadId,
    /// Start of the segment, ns of CLOCK_MONOTONIC.
    pub start: u64,
    /// End of the segment.
    pub end: u64,
}

/// The state of all pacers; filled without allocating, as far as its lists have room.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// The time of the snapshot.
    pub now: u64,
    /// When the present slice, window or calm time began.
    pub start: u64,
    /// When it ends.
    pub end: u64,
    /// Whether no plan is needed.
    pub calm: bool,
    /// Slices planned since the start.
    pub slices: u64,
    /// Checks by pacers since the start.
    pub looks: u64,
    /// All vCPUs.
    pub standings: Vec<VcpuState>,
    /// Segments of the present plan.
    pub plan: Vec<Segment>,
}

impl Snapshot {
    pub(crate) fn clear(&mut self) {
        self.standings.clear();
        self.plan.clear();
        (self.now, self.start, self.end, self.calm) = (0, 0, u64::MAX, true);
        (self.slices, self.looks) = (0, 0);
    }

    /// With several CPUs, each with windows of its own, the window that ends first counts.
    pub(crate) fn add_span(&mut self, now: u64, start: u64, end: u64, calm: bool) {
        self.now = now;
        if end < self.end {
            (self.start, self.end) = (start, end);
        }
        self.calm &= calm;
    }

    pub(crate) fn add_vcpu(&mut self, state: VcpuState) {
        if self.standings.len() < self.standings.capacity() {
            self.standings.push(state);
        }
    }

    pub(crate) fn add_segment(&mut self, segment: Segment) {
        if self.plan.len() < self.plan.capacity() {
            self.plan.push(segment);
        }
    }

    /// A snapshot with room for this many vCPUs.
    pub(crate) fn with_room(vcpus: usize) -> Self {
        Self { standings: Vec::with_capacity(vcpus), plan: Vec::with_capacity(2 * vcpus), ..Self::default() }
    }
}
