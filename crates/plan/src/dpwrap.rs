//! The DP-WRAP planner: which vCPU runs on which CPU until the next global deadline.
//!
//! In: reservations that [`crate::Admission`] admitted; at the start of each slice, what each vCPU published. Out:
//! [`Segment`]s per CPU. It never allocates but in [`Planner::new`] and [`Planner::add`]; a slice costs one pass over
//! the vCPUs, a sleep or a wake-up one over the segments.
//!
//! **Shares.** Until t' each vCPU gets its bandwidth times the slice. In whole nanoseconds that is rounded up while
//! room is left, else down, and the error, always below 1 ns, is carried; so what a vCPU got since it became busy is at
//! every t' its bandwidth times that time, exact to the nanosecond above or below, and sums never exceed the CPUs. Who
//! is ahead stays so when it sleeps or changes: as all errors together are never above 0, the room for what is carried
//! is there even where a host is exactly full.
//!
//! **Wrap.** Shares are laid one after the other over the CPUs (McNaughton). A vCPU that crosses from one CPU to the
//! next runs at the end of what is to do on the one and at the start on the other, never on both at once; with m CPUs
//! at most m-1 do. All others stay on their CPU to the slice's end, whoever sleeps or wakes.
//!
//! **Sleepers** (DP-Fair for sporadic tasks). A vCPU that is idle has no segment; its part is kept in account and
//! shrinks in proportion to the time left. When it wakes it gets what is left of it, and the plan is laid anew from now
//! to t'. That always fits (module `wrap` has the proof).

use crate::units::{Bandwidth, Nanos};
use crate::wrap::{Layout, Wrap};

/// The shortest slice of the paper (RTVirt, section 4.1), in nanoseconds; also the shortest that the rounding is proven
/// for.
pub const SLICE_MIN: Nanos = Nanos::from_micros(250);
/// The longest slice: a guest that publishes a deadline far away delays nobody's admission for longer.
pub const SLICE_MAX: Nanos = Nanos::from_millis(100);

/// A vCPU of a planner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VcpuId(pub(crate) u32);

impl VcpuId {
    /// Its index: in the order added, from 0; those of removed vCPUs are used again.
    pub fn index(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

/// What a vCPU published when a slice begins. Any value is safe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Demand {
    /// Its next earliest deadline; of a sleeper, the earliest that it could have.
    pub deadline: Nanos,
    /// Whether it has nothing to run.
    pub idle: bool,
}

impl Demand {
    /// Of a vCPU without any RTA.
    pub const NONE: Demand = Demand { deadline: Nanos::MAX, idle: true };
}

/// One vCPU on one CPU, from start to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Which CPU, from 0.
    pub cpu: u32,
    /// Which vCPU.
    pub vcpu: VcpuId,
    /// From.
    pub start: Nanos,
    /// To, later than `start`.
    pub end: Nanos,
}

impl Segment {
    /// What is to come of it after `now`, ns.
    pub(crate) fn left(&self, now: u64) -> u64 {
        self.end.0.saturating_sub(self.start.0.max(now))
    }
}

/// A sleeper's part of the slice.
#[derive(Debug, Clone, Copy, Default)]
struct Kept {
    amount: u64,
    since: u64,
}

#[derive(Debug, Clone)]
struct Slot {
    bandwidth: Bandwidth,
    home: Option<u32>,
    /// What was due and not planned yet, in 1/period ns: between -1 ns and 1 ns.
    carry: i128,
    /// What is to be laid out, ns.
    planned: u64,
    kept: Option<Kept>,
}

impl Slot {
    /// What the slice holds for it, asleep or awake, ns.
    fn share(&self) -> u64 {
        self.kept.map_or(self.planned, |kept| kept.amount)
    }
}

/// The planner of one host.
#[derive(Debug, Clone)]
pub struct Planner {
    shared: Vec<bool>,
    slots: Vec<Option<Slot>>,
    /// Pinned vCPUs as (CPU, slot), sorted.
    pinned: Vec<(u32, u32)>,
    /// Per CPU: what pinned vCPUs take of the slice, ns.
    claimed: Vec<u64>,
    /// What unpinned vCPUs that left had got ahead at most, ns: who comes in their place begins that much behind.
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
    pub fn set_slices(&mut self, shortest: Nanos, longest: Nanos) {
        self.slice_min = shortest.0.max(SLICE_MIN.0);
        self.slice_max = longest.0.max(self.slice_min);
    }

    /// Which CPUs unpinned vCPUs run on, from the next slice on; more or fewer than before are ignored.
    pub fn set_shared(&mut self, shared: &[bool]) {
        for (slot, is) in self.shared.iter_mut().zip(shared) {
            *slot = *is;
        }
    }

    /// Adds an admitted vCPU, from the next slice on. `home` as [`crate::Admitted::home`] says.
    pub fn add(&mut self, bandwidth: Bandwidth, home: Option<u32>) -> VcpuId {
        let carry = if home.is_none() { self.begin(bandwidth) } else { 0 };
        let slot = Slot { bandwidth, home, carry, planned: 0, kept: None };
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

    /// Changes an admitted vCPU's bandwidth and CPU, from the next slice on. The CPU may be another because somebody
    /// else came: see [`crate::Admitted::home`].
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

    /// Takes a vCPU out; it leaves the present plan too.
    pub fn remove(&mut self, vcpu: VcpuId) {
        let Some(slot) = self.slots.get_mut(vcpu.index()).and_then(Option::take) else { return };
        if slot.home.is_none() {
            self.leave(slot.carry);
        }
        self.pin(vcpu, None);
        self.layout.remove(vcpu);
    }

    /// What an unpinned vCPU begins with: behind, if it takes the place of one that left ahead.
    fn begin(&mut self, bandwidth: Bandwidth) -> i128 {
        let behind = self.ahead.min(1);
        self.ahead -= behind;
        -i128::from(behind * bandwidth.period())
    }

    /// Notes what an unpinned vCPU that leaves had got ahead.
    fn leave(&mut self, carry: i128) {
        self.ahead = self.ahead.saturating_add(u64::from(carry < 0));
    }

    /// Puts a vCPU among the pinned ones of that CPU and no other.
    fn pin(&mut self, vcpu: VcpuId, home: Option<u32>) {
        self.pinned.retain(|(_, slot)| *slot != vcpu.0);
        if let Some(cpu) = home {
            let at = self.pinned.partition_point(|entry| *entry < (cpu, vcpu.0));
            self.pinned.insert(at, (cpu, vcpu.0));
        }
    }

    fn slot(&mut self, vcpu: VcpuId) -> Option<&mut Slot> {
        self.slots.get_mut(vcpu.index())?.as_mut()
    }

    /// When the present slice ends: the time to call [`Planner::plan`] again.
    pub fn end(&self) -> Nanos {
        Nanos(self.end)
    }

    /// The present plan: by CPU, then by time.
    pub fn segments(&self) -> &[Segment] {
        self.layout.segments()
    }

    /// The present plan of one CPU, by time.
    pub fn cpu(&self, cpu: usize) -> &[Segment] {
        self.layout.cpu(cpu)
    }

    /// Plans a new slice, to be called at the [`Planner::end`] of the last: what that still holds is forfeited.
    /// `demands` is by [`VcpuId::index`]; what it does not tell is [`Demand::NONE`]. Returns the slice's end: the
    /// earliest deadline, at least the shortest slice from now, at most the longest.
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

    /// Gives each vCPU its share rounded down; returns what unpinned ones have together.
    fn shares(&mut self, demands: &[Demand]) -> u64 {
        let length = self.end - self.start;
        let mut wrapped = 0_u64;
        self.claimed.fill(0);
        for (index, slot) in self.slots.iter_mut().enumerate() {
            let Some(slot) = slot else { continue };
            let idle = demands.get(index).is_none_or(|demand| demand.idle);
            if idle {
                // What it got ahead it had of others; what it is behind it did not ask for.
                let (amount, carry) = share_of(slot.bandwidth, length, slot.carry.min(0));
                slot.carry = carry.min(0);
                slot.kept = Some(Kept { amount, since: self.start });
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

    /// Rounds up the shares of unpinned vCPUs with an error while room is left. (Pinned ones have paid for theirs at
    /// admission.)
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
            // Nobody is behind, so no place is left to be taken by one who is.
            self.ahead = 0;
        }
    }

    /// Lays `planned` of every vCPU out from `start` to the slice's end.
    fn lay_out(&mut self, start: u64) {
        let slots = &self.slots;
        self.wrap.lay_out(start, self.end, |vcpu| planned(slots, vcpu), &mut self.layout);
    }

    /// Takes from the present plan what is still to come after `now`.
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

    /// A vCPU has nothing more to run: its time goes to the others on its CPU, who move up. True if the plan changed.
    pub fn sleep(&mut self, vcpu: VcpuId, now: Nanos) -> bool {
        let inside = (self.start..self.end).contains(&now.0);
        if !inside || self.slot(vcpu).is_none_or(|slot| slot.kept.is_some()) {
            return false;
        }
        self.collect(now.0);
        if let Some(slot) = self.slot(vcpu) {
            slot.kept = Some(Kept { amount: slot.planned, since: now.0 });
            slot.planned = 0;
        }
        self.lay_out(now.0);
        true
    }

    /// A sleeper has something to run: it gets what is left of its part, so bandwidth x (t' - now) if it slept since
    /// the slice began. True if the plan changed. Waking and sleeping often gains nothing.
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

fn planned(slots: &[Option<Slot>], vcpu: u32) -> u64 {
    slots.get(VcpuId(vcpu).index()).and_then(Option::as_ref).map_or(0, |slot| slot.planned)
}

/// Bandwidth x length plus what was carried: whole nanoseconds, and what is carried on in 1/period ns.
fn share_of(bandwidth: Bandwidth, length: u64, carry: i128) -> (u64, i128) {
    let product = i128::from(bandwidth.runtime()).saturating_mul(i128::from(length)).saturating_add(carry);
    // Nearly all are small, and wide division is slow.
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
