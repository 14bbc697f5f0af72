//! The DP-WRAP planner: which vCPU runs on which CPU until the next global deadline.
//!
//! Input: reservations admitted by [`crate::Admission`]; at the start of each slice, the values that each vCPU
//! published. Output: [`Segment`]s per CPU. Only [`Planner::new`] and [`Planner::add`] allocate. A slice costs one pass
//! over the vCPUs; a sleep or wake-up costs one pass over the segments.
//!
//! **Shares.** Until the next global deadline t' each vCPU gets its bandwidth times the slice. This is rounded up to
//! whole nanoseconds while capacity is left, else down. The error, always below 1 ns, is carried over. So at every t'
//! the time that a vCPU has got since it became busy is its bandwidth times that time, exact to 1 ns in either
//! direction, and the sums never exceed the CPUs. A vCPU that is ahead stays ahead when it sleeps or changes. The sum
//! of all errors is never above 0, so there is capacity for the carried errors even on an exactly full host.
//!
//! **Wrap.** Shares are placed one after the other over the CPUs (McNaughton). A vCPU that crosses from one CPU to the
//! next runs at the end of the work on the first and at the start on the second, never on both at once. With m CPUs at
//! most m-1 vCPUs cross. All others stay on their CPU until the end of the slice, whichever vCPUs sleep or wake.
//!
//! **Sleepers** (DP-Fair for sporadic tasks). An idle vCPU has no segment. Its share is kept and shrinks in proportion
//! to the time left. When the vCPU wakes, it gets the rest of its share, and the plan is made anew from now to t'. That
//! always fits (the proof is in module `wrap`).

use crate::segment::{Segment, VcpuId};
use crate::units::{Bandwidth, Nanos};
use crate::wrap::{Layout, Wrap};

/// The shortest slice: as in the paper (RTVirt, section 4.1), and the shortest for which the rounding is proven.
pub const SLICE_MIN: Nanos = Nanos::from_micros(250);
/// The longest slice: limits how long a guest that publishes a distant deadline can delay other vCPUs' admission.
pub const SLICE_MAX: Nanos = Nanos::from_millis(100);

/// The values that a vCPU has published when a slice begins. Any value is safe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Demand {
    /// Its earliest deadline; for a sleeper, the earliest possible one.
    pub deadline: Nanos,
    /// Whether it has no work.
    pub idle: bool,
}

impl Demand {
    /// For a vCPU without any RTA.
    pub const NONE: Demand = Demand { deadline: Nanos::MAX, idle: true };
}

/// The share of a sleeper.
#[derive(Debug, Clone, Copy, Default)]
struct SleeperShare {
    amount: u64,
    since: u64,
}

#[derive(Debug, Clone)]
struct VcpuSlot {
    bandwidth: Bandwidth,
    home: Option<u32>,
    /// Time that is due but not planned yet, in 1/period ns: between -1 ns and 1 ns.
    carry: i128,
    /// Time to place in the plan, ns.
    planned: u64,
    kept: Option<SleeperShare>,
}

impl VcpuSlot {
    /// Its share of the slice, asleep or awake, ns.
    fn share(&self) -> u64 {
        self.kept.map_or(self.planned, |kept| kept.amount)
    }
}

/// The planner of one host.
#[derive(Debug, Clone)]
pub struct Planner {
    shared: Vec<bool>,
    slots: Vec<Option<VcpuSlot>>,
    /// Pinned vCPUs as (CPU, slot), sorted.
    pinned: Vec<(u32, u32)>,
    /// Per CPU: the time of pinned vCPUs in the slice, ns.
    claimed: Vec<u64>,
    /// Upper bound of the time by which removed unpinned vCPUs were ahead, ns: vCPUs that replace them start that much
    /// behind.
    ahead: u64,
    wrap: Wrap,
    layout: Layout,
    start: u64,
    end: u64,
    slice_min: u64,
    slice_max: u64,
}

impl Planner {
    /// A planner for as many CPUs as `shared` has entries; unpinned vCPUs run on those marked true (see
    /// [`crate::Admitted::shared`]).
    pub fn new(shared: &[bool]) -> Self {
        Self {
            shared: shared.to_vec(),
            slots: Vec::new(),
            pinned: Vec::new(),
            claimed: vec![0; shared.len()],
            ahead: 0,
            wrap: Wrap::new(shared.len()),
            layout: Layout::new(shared.len()),
            start: 0,
            end: 0,
            slice_min: SLICE_MIN.0,
            slice_max: SLICE_MAX.0,
        }
    }

    /// Bounds the slices: at least 250 us, and `longest` at least as long as `shortest`.
    pub(crate) fn set_slices(&mut self, shortest: Nanos, longest: Nanos) {
        self.slice_min = shortest.0.max(SLICE_MIN.0);
        self.slice_max = longest.0.max(self.slice_min);
    }

    /// Sets the CPUs for unpinned vCPUs from the next slice on. The number of CPUs cannot change: further entries are
    /// ignored.
    pub fn set_shared(&mut self, shared: &[bool]) {
        for (slot, is) in self.shared.iter_mut().zip(shared) {
            *slot = *is;
        }
    }

    /// Adds an admitted vCPU from the next slice on. `home` as in [`crate::Admitted::home`].
    pub fn add(&mut self, bandwidth: Bandwidth, home: Option<u32>) -> VcpuId {
        let carry = if home.is_none() { self.begin(bandwidth) } else { 0 };
        let slot = VcpuSlot { bandwidth, home, carry, planned: 0, kept: None };
        let index = match self.slots.iter().position(Option::is_none) {
            Some(free) => free,
            None => {
                self.slots.push(None);
                self.slots.len() - 1
            }
        };
        let vcpu = VcpuId(u32::try_from(index).unwrap_or(u32::MAX));
        if let Some(free) = self.slots.get_mut(index) {
            *free = Some(slot);
        }
        let vcpus = self.slots.len();
        self.pinned.reserve(vcpus.saturating_sub(self.pinned.len()));
        self.wrap.reserve(vcpus);
        self.layout.reserve(vcpus);
        self.pin(vcpu, home);
        vcpu
    }

    /// Changes an admitted vCPU's bandwidth and CPU from the next slice on. The CPU may differ because another vCPU was
    /// added: see [`crate::Admitted::home`].
    pub fn change(&mut self, vcpu: VcpuId, bandwidth: Bandwidth, home: Option<u32>) {
        let Some(slot) = self.slot(vcpu) else { return };
        let old = (slot.bandwidth, slot.home, slot.carry);
        (slot.bandwidth, slot.home) = (bandwidth, home);
        let (new, before) = (i128::from(bandwidth.period()), i128::from(old.0.period()));
        slot.carry = slot.carry.saturating_mul(new).div_euclid(before);
        if old.1 == home {
            return;
        }
        match (old.1, home) {
            (None, Some(_)) => self.leave(old.2),
            (Some(_), None) => {
                let carry = self.begin(bandwidth);
                if let Some(slot) = self.slot(vcpu) {
                    slot.carry = carry;
                }
            }
            _ => {}
        }
        self.pin(vcpu, home);
    }

    /// Removes a vCPU, also from the current plan.
    pub fn remove(&mut self, vcpu: VcpuId) {
        let Some(slot) = self.slots.get_mut(vcpu.index()).and_then(Option::take) else { return };
        if slot.home.is_none() {
            self.leave(slot.carry);
        }
        self.pin(vcpu, None);
        self.layout.remove(vcpu);
    }

    /// The carried error with which an unpinned vCPU starts: behind, if it replaces a vCPU that left ahead.
    fn begin(&mut self, bandwidth: Bandwidth) -> i128 {
        let behind = self.ahead.min(1);
        self.ahead -= behind;
        -i128::from(behind * bandwidth.period())
    }

    /// Records that an unpinned vCPU that was ahead has left.
    fn leave(&mut self, carry: i128) {
        self.ahead = self.ahead.saturating_add(u64::from(carry < 0));
    }

    /// Moves a vCPU to the pinned vCPUs of that CPU only.
    fn pin(&mut self, vcpu: VcpuId, home: Option<u32>) {
        self.pinned.retain(|(_, slot)| *slot != vcpu.0);
        if let Some(cpu) = home {
            let at = self.pinned.partition_point(|entry| *entry < (cpu, vcpu.0));
            self.pinned.insert(at, (cpu, vcpu.0));
        }
    }

    fn slot(&mut self, vcpu: VcpuId) -> Option<&mut VcpuSlot> {
        self.slots.get_mut(vcpu.index())?.as_mut()
    }

    /// The end of the current slice: when [`Planner::plan`] must be called again.
    pub fn end(&self) -> Nanos {
        Nanos(self.end)
    }

    /// The current plan: by CPU, then by time.
    pub fn segments(&self) -> &[Segment] {
        self.layout.segments()
    }

    /// The current plan of one CPU, by time.
    pub fn cpu(&self, cpu: usize) -> &[Segment] {
        self.layout.cpu(cpu)
    }

    /// Plans a new slice. Call it at the [`Planner::end`] of the last one, whose unused time is forfeited. `demands` is
    /// indexed by [`VcpuId::index`]; missing entries are [`Demand::NONE`]. Returns the slice's end: the earliest
    /// deadline, at least the shortest and at most the longest slice from now.
    pub fn plan(&mut self, now: Nanos, demands: &[Demand]) -> Nanos {
        let earliest = demands
            .iter()
            .zip(&self.slots)
            .filter_map(|(demand, slot)| slot.as_ref().map(|_| demand.deadline.0))
            .min()
            .unwrap_or(u64::MAX);
        self.start = now.0;
        let bound = |length: u64| now.0.saturating_add(length);
        self.end = earliest.clamp(bound(self.slice_min), bound(self.slice_max));
        let wrapped = self.shares(demands);
        self.round_up(wrapped);
        let free = (0_u32..).zip(&self.slots).filter_map(|(vcpu, slot)| {
            let slot = slot.as_ref().filter(|slot| slot.home.is_none())?;
            Some((vcpu, slot.share()))
        });
        self.wrap.assign(self.end - self.start, &self.shared, &self.pinned, &self.claimed, free);
        self.lay_out(self.start);
        Nanos(self.end)
    }

    /// Gives each vCPU its share, rounded down. Returns the sum for unpinned vCPUs.
    fn shares(&mut self, demands: &[Demand]) -> u64 {
        let length = self.end - self.start;
        let mut wrapped = 0_u64;
        self.claimed.fill(0);
        for (index, slot) in self.slots.iter_mut().enumerate() {
            let Some(slot) = slot else { continue };
            let idle = demands.get(index).is_none_or(|demand| demand.idle);
            if idle {
                // Time that a sleeper is ahead was other vCPUs' time and stays charged. Time that it is behind is
                // dropped: it did not need it.
                let (amount, carry) = share_of(slot.bandwidth, length, slot.carry.min(0));
                slot.carry = carry.min(0);
                slot.kept = Some(SleeperShare { amount, since: self.start });
                slot.planned = 0;
            } else {
                (slot.planned, slot.carry) = share_of(slot.bandwidth, length, slot.carry);
                slot.kept = None;
            }
            let sum = match slot.home {
                None => Some(&mut wrapped),
                Some(cpu) => usize::try_from(cpu).ok().and_then(|cpu| self.claimed.get_mut(cpu)),
            };
            if let Some(sum) = sum {
                *sum = sum.saturating_add(slot.share());
            }
        }
        wrapped
    }

    /// Rounds up the shares of unpinned vCPUs with an error while capacity is left. (For pinned vCPUs, admission has
    /// reserved capacity for rounding.)
    fn round_up(&mut self, wrapped: u64) {
        let length = self.end - self.start;
        let room: u64 = self
            .shared
            .iter()
            .zip(&self.claimed)
            .map(|(shared, claimed)| if *shared { length.saturating_sub(*claimed) } else { 0 })
            .fold(0, u64::saturating_add);
        let mut spare = room.saturating_sub(wrapped);
        for slot in self.slots.iter_mut().flatten() {
            if spare == 0 {
                break;
            }
            if slot.home.is_none() && slot.kept.is_none() && slot.carry > 0 && slot.planned < length {
                slot.planned += 1;
                slot.carry -= i128::from(slot.bandwidth.period());
                spare -= 1;
            }
        }
        if spare > 0 {
            // No vCPU is behind, so the recorded lead of removed vCPUs no longer matters.
            self.ahead = 0;
        }
    }

    /// Places `planned` of every vCPU from `start` to the end of the slice.
    fn lay_out(&mut self, start: u64) {
        let slots = &self.slots;
        self.wrap.lay_out(start, self.end, |vcpu| planned(slots, vcpu), &mut self.layout);
    }

    /// Reads from the current plan what is left after `now`.
    fn collect(&mut self, now: u64) {
        for slot in self.slots.iter_mut().flatten() {
            slot.planned = 0;
        }
        for segment in self.layout.segments() {
            if let Some(Some(slot)) = self.slots.get_mut(segment.vcpu.index()) {
                slot.planned += segment.left(now);
            }
        }
        let slots = &self.slots;
        self.wrap.take_up(now, |vcpu| planned(slots, vcpu), &self.layout);
    }

    /// A vCPU has no more work: the other vCPUs on its CPU move up into its time. True if the plan changed.
    pub fn sleep(&mut self, vcpu: VcpuId, now: Nanos) -> bool {
        let inside = (self.start..self.end).contains(&now.0);
        if !inside || self.slot(vcpu).is_none_or(|slot| slot.kept.is_some()) {
            return false;
        }
        self.collect(now.0);
        if let Some(slot) = self.slot(vcpu) {
            slot.kept = Some(SleeperShare { amount: slot.planned, since: now.0 });
            slot.planned = 0;
        }
        self.lay_out(now.0);
        true
    }

    /// A sleeper has work: it gets the rest of its share, which is bandwidth x (t' - now) if it slept since the slice
    /// began. True if the plan changed. A vCPU gains nothing by waking and sleeping often.
    pub fn wake(&mut self, vcpu: VcpuId, now: Nanos) -> bool {
        let (end, inside) = (self.end, (self.start..self.end).contains(&now.0));
        let Some(kept) = self.slot(vcpu).and_then(|slot| slot.kept).filter(|_| inside) else { return false };
        self.collect(now.0);
        if let Some(slot) = self.slot(vcpu) {
            let (left, whole) = (u128::from(end - now.0), u128::from(end.saturating_sub(kept.since).max(1)));
            slot.planned = u64::try_from(u128::from(kept.amount) * left / whole).unwrap_or(0);
            slot.kept = None;
        }
        self.lay_out(now.0);
        true
    }
}

fn planned(slots: &[Option<VcpuSlot>], vcpu: u32) -> u64 {
    slots.get(VcpuId(vcpu).index()).and_then(Option::as_ref).map_or(0, |slot| slot.planned)
}

/// Bandwidth x length plus the carried error: whole nanoseconds, and the new error in 1/period ns.
fn share_of(bandwidth: Bandwidth, length: u64, carry: i128) -> (u64, i128) {
    let product = i128::from(bandwidth.runtime()).saturating_mul(i128::from(length)).saturating_add(carry);
    // Nearly all values are small, and wide division is slow.
    if let Ok(small) = u64::try_from(product) {
        let (whole, rest) = (small / bandwidth.period(), small % bandwidth.period());
        return (whole.min(length), i128::from(rest));
    }
    if product < 0 {
        return (0, product);
    }
    let period = i128::from(bandwidth.period());
    (u64::try_from(product / period).unwrap_or(u64::MAX).min(length), product % period)
}

#[cfg(test)]
#[path = "dpwrap_tests.rs"]
mod tests;
