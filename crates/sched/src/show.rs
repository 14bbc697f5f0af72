//! What pacers are doing, for people to see.

use ontime_tenants::ThreadId;

use crate::account::Place;

/// What a vCPU is doing, for showing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    /// Its thread.
    pub id: ThreadId,
    /// Its place.
    pub place: Place,
    /// The end of its present period.
    pub deadline: u64,
}

/// A segment of the present slice's plan, for showing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Planned {
    /// Which CPU, as the planner counts.
    pub cpu: usize,
    /// Which vCPU.
    pub id: ThreadId,
    /// From.
    pub start: u64,
    /// To.
    pub end: u64,
}

/// The present state, for showing; filled without allocating as far as its lists have room.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// When.
    pub now: u64,
    /// When the slice, or the calm time, began.
    pub start: u64,
    /// When it ends.
    pub end: u64,
    /// Whether no plan is needed.
    pub calm: bool,
    /// Slices planned since the start.
    pub slices: u64,
    /// Pacers' wake-ups since the start.
    pub looks: u64,
    /// All vCPUs.
    pub standings: Vec<Standing>,
    /// The plan.
    pub plan: Vec<Planned>,
}

impl Snapshot {
    pub(crate) fn clear(&mut self) {
        self.standings.clear();
        self.plan.clear();
        (self.now, self.start, self.end, self.calm) = (0, 0, u64::MAX, true);
        (self.slices, self.looks) = (0, 0);
    }

    /// Of several CPUs, each with slices of its own, the earliest to end counts.
    pub(crate) fn span(&mut self, now: u64, start: u64, end: u64, calm: bool) {
        self.now = now;
        if end < self.end {
            (self.start, self.end) = (start, end);
        }
        self.calm &= calm;
    }

    pub(crate) fn stand(&mut self, standing: Standing) {
        if self.standings.len() < self.standings.capacity() {
            self.standings.push(standing);
        }
    }

    pub(crate) fn plan(&mut self, planned: Planned) {
        if self.plan.len() < self.plan.capacity() {
            self.plan.push(planned);
        }
    }

    /// One with room for this many vCPUs.
    pub fn with_room(vcpus: usize) -> Self {
        Self { standings: Vec::with_capacity(vcpus), plan: Vec::with_capacity(2 * vcpus), ..Self::default() }
    }
}
