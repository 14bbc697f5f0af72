//! The DP-WRAP planner: which vCPU runs on which CPU until the next global deadline.
//!
//! In: reservations that [`crate::Admission`] admitted; at the start of each slice, what each vCPU published. Out: [`Segment`]s
//! per CPU. It never allocates but in [`Planner::new`] and [`Planner::add`]; a slice costs one pass over the vCPUs.
//!
//! **Shares.** Until t' each vCPU gets its bandwidth times the slice. In whole nanoseconds that is rounded up while room is left, else down, and
//! the error, always below 1 ns, is carried; so what a vCPU got since it became busy is at every t' its bandwidth times
//! that time, exact to the nanosecond above or below, and sums never exceed the CPUs.
//!
//! **Wrap.** Shares are laid one after the other over the CPUs (McNaughton). A vCPU that crosses from one CPU to the next runs at the end
//! of the slice on the one and at its start on the other, never on both at once; with m CPUs at most m-1 do. Pinned vCPUs
//! come after the crossing one, so idle time is always at a CPU's end.
//!
//! **Sleepers** (DP-Fair for sporadic tasks). A vCPU that is idle has no share; its part is kept in account and shrinks in proportion to the time
//! left. When it wakes it gets what is left of it, and the plan is laid anew from now to t'. All CPUs being busy or idle to the
//! end, that always fits (docs/plan.md has the proof).

use crate::units::{Bandwidth, Nanos};

/// The shortest slice of the paper (RTVirt, section 4.1), in nanoseconds; also the shortest that the rounding is proven for.
pub const SLICE_MIN: Nanos = Nanos::from_micros(250);
/// The longest slice: a guest that publishes a deadline far away delays nobody's admission for longer.
pub const SLICE_MAX: Nanos = Nanos::from_millis(100);

/// A vCPU of a planner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VcpuId(u32);

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

/// The planner of one host.
#[derive(Debug, Clone)]
pub struct Planner {
    shared: Vec<bool>,
    slots: Vec<Option<Slot>>,
    /// Pinned vCPUs as (CPU, slot), sorted.
    pinned: Vec<(u32, u32)>,
    /// Per CPU: what pinned vCPUs take of the slice, ns.
    claimed: Vec<u64>,
    layout: Vec<Segment>,
    /// Per CPU: where its segments end in `layout`.
    ends: Vec<usize>,
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
            layout: Vec::with_capacity(shared.len()),
            ends: vec![0; shared.len()],
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
        let slot = Slot { bandwidth, home, carry: 0, planned: 0, kept: None };
        let index = match self.slots.iter().position(Option::is_none) {
            Some(free) => free,
            None => {
                self.slots.push(None);
                self.slots.len() - 1
            }
        };
        let id = u32::try_from(index).unwrap_or(u32::MAX);
        if let Some(free) = self.slots.get_mut(index) {
            *free = Some(slot);
        }
        if let Some(cpu) = home {
            let at = self.pinned.partition_point(|entry| *entry < (cpu, id));
            self.pinned.insert(at, (cpu, id));
        }
        let most = self.slots.len() + self.shared.len();
        self.layout.reserve(most.saturating_sub(self.layout.len()));
        VcpuId(id)
    }

    /// Changes an admitted vCPU's bandwidth, from the next slice on.
    pub fn change(&mut self, vcpu: VcpuId, bandwidth: Bandwidth) {
        if let Some(slot) = self.slot(vcpu) {
            slot.bandwidth = bandwidth;
            slot.carry = 0;
        }
    }

    /// Takes a vCPU out; it leaves the present plan too.
    pub fn remove(&mut self, vcpu: VcpuId) {
        self.pinned.retain(|(_, slot)| *slot != vcpu.0);
        if let Some(slot) = self.slots.get_mut(vcpu.index()) {
            *slot = None;
        }
        self.layout.retain(|segment| segment.vcpu != vcpu);
        self.index();
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
        &self.layout
    }

    /// The present plan of one CPU, by time.
    pub fn cpu(&self, cpu: usize) -> &[Segment] {
        let from = cpu.checked_sub(1).map_or(0, |before| self.ends.get(before).copied().unwrap_or(0));
        let to = self.ends.get(cpu).copied().unwrap_or(from);
        self.layout.get(from..to).unwrap_or_default()
    }

    /// Plans a new slice. `demands` is by [`VcpuId::index`]; what it does not tell is [`Demand::NONE`]. Returns the slice's end:
    /// the earliest deadline, at least the shortest slice from now, at most the longest.
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
        let claimed = self.shares(demands);
        self.round_up(claimed);
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
            let share = if idle {
                slot.carry = 0;
                let (amount, _) = share_of(slot.bandwidth, length, 0);
                slot.kept = Some(Kept { amount, since: self.start });
                slot.planned = 0;
                amount
            } else {
                (slot.planned, slot.carry) = share_of(slot.bandwidth, length, slot.carry);
                slot.kept = None;
                slot.planned
            };
            match slot.home.and_then(|cpu| self.claimed.get_mut(usize::try_from(cpu).ok()?)) {
                Some(claimed) => *claimed = claimed.saturating_add(share),
                None => wrapped = wrapped.saturating_add(share),
            }
        }
        wrapped
    }

    /// Rounds up the shares of unpinned vCPUs with an error while room is left. (Pinned ones have paid for theirs at admission.)
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
    }

    /// Lays `planned` of every vCPU out from `start` to the slice's end.
    fn lay_out(&mut self, start: u64) {
        self.layout.clear();
        self.claimed.fill(0);
        for (cpu, slot) in &self.pinned {
            let planned = slot_at(&self.slots, *slot).map_or(0, |slot| slot.planned);
            if let Some(claimed) = usize::try_from(*cpu).ok().and_then(|cpu| self.claimed.get_mut(cpu)) {
                *claimed = claimed.saturating_add(planned);
            }
        }
        let mut wrap = Wrap { next: 0, crossing: None };
        let mut pinned = self.pinned.as_slice();
        for (cpu, shared) in (0_u32..).zip(&self.shared) {
            let mut row = Row { cpu, at: start, end: self.end, layout: &mut self.layout };
            let claimed = usize::try_from(cpu).ok().and_then(|cpu| self.claimed.get(cpu)).copied().unwrap_or(0);
            if *shared {
                wrap.cross(&mut row, claimed);
            }
            while let Some(((_, slot), rest)) = pinned.split_first().filter(|((home, _), _)| *home <= cpu) {
                row.put(*slot, slot_at(&self.slots, *slot).map_or(0, |slot| slot.planned));
                pinned = rest;
            }
            if *shared {
                wrap.fill(&mut row, &self.slots);
            }
        }
        self.index();
    }

    fn index(&mut self) {
        let mut segments = self.layout.iter().enumerate().peekable();
        for (cpu, end) in (0_u32..).zip(&mut self.ends) {
            while segments.next_if(|(_, segment)| segment.cpu <= cpu).is_some() {}
            *end = segments.peek().map_or(self.layout.len(), |(at, _)| *at);
        }
    }

    /// Takes from the present plan what is still to come after `now`.
    fn collect(&mut self, now: u64) {
        for slot in self.slots.iter_mut().flatten() {
            slot.planned = 0;
        }
        for segment in &self.layout {
            let left = segment.end.0.saturating_sub(segment.start.0.max(now));
            if let Some(Some(slot)) = self.slots.get_mut(segment.vcpu.index()) {
                slot.planned += left;
            }
        }
    }

    /// A vCPU has nothing more to run: its time goes to the others, who move up. True if the plan changed.
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

    /// A sleeper has something to run: it gets what is left of its part, so bandwidth x (t' - now) if it slept since the slice
    /// began. True if the plan changed. Waking and sleeping often gains nothing.
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

fn slot_at(slots: &[Option<Slot>], slot: u32) -> Option<&Slot> {
    slots.get(usize::try_from(slot).ok()?)?.as_ref()
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

/// One CPU's plan as it grows.
struct Row<'a> {
    cpu: u32,
    at: u64,
    end: u64,
    layout: &'a mut Vec<Segment>,
}

impl Row<'_> {
    /// Puts as much of `amount` as there is room for; returns the rest.
    fn put(&mut self, slot: u32, amount: u64) -> u64 {
        let taken = amount.min(self.end - self.at);
        if taken > 0 {
            let (start, end) = (Nanos(self.at), Nanos(self.at + taken));
            self.layout.push(Segment { cpu: self.cpu, vcpu: VcpuId(slot), start, end });
            self.at += taken;
        }
        amount - taken
    }
}

/// McNaughton's wrap over the CPUs.
struct Wrap {
    next: usize,
    crossing: Option<(u32, u64)>,
}

impl Wrap {
    /// Puts the rest of the vCPU that came from the CPU before; pinned vCPUs keep their room.
    fn cross(&mut self, row: &mut Row<'_>, claimed: u64) {
        if let Some((slot, rest)) = self.crossing.take() {
            let room = (row.end - row.at).saturating_sub(claimed);
            row.put(slot, rest.min(room));
        }
    }

    /// Puts vCPUs until the CPU is full; the last may cross.
    fn fill(&mut self, row: &mut Row<'_>, slots: &[Option<Slot>]) {
        while row.at < row.end {
            let Some(slot) = slots.get(self.next) else { return };
            let index = u32::try_from(self.next).unwrap_or(u32::MAX);
            self.next += 1;
            let Some(slot) = slot.as_ref().filter(|slot| slot.home.is_none()) else { continue };
            let rest = row.put(index, slot.planned);
            if rest > 0 {
                self.crossing = Some((index, rest));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn busy(deadline_us: u64) -> Demand {
        Demand { deadline: Nanos::from_micros(deadline_us), idle: false }
    }

    #[test]
    fn the_textbook_wrap_crosses_once_and_never_overlaps() {
        let mut planner = Planner::new(&[true, true]);
        for _ in 0..3 {
            planner.add(Bandwidth::new(Nanos(2), Nanos(3)).unwrap(), None);
        }
        let end = planner.plan(Nanos::ZERO, &[busy(3_000); 3]);
        assert_eq!(end, Nanos::from_millis(3));
        let shown: Vec<_> =
            planner.segments().iter().map(|s| (s.cpu, s.vcpu.0, s.start.0 / 1_000_000, s.end.0 / 1_000_000)).collect();
        assert_eq!(shown, [(0, 0, 0, 2), (0, 1, 2, 3), (1, 1, 0, 1), (1, 2, 1, 3)]);
        assert_eq!(planner.cpu(1).len(), 2);
        assert!(planner.cpu(7).is_empty());
    }

    #[test]
    fn hostile_deadlines_are_clamped() {
        let mut planner = Planner::new(&[true]);
        planner.add(Bandwidth::ppm(500_000), None);
        let now = Nanos::from_millis(10);
        assert_eq!(planner.plan(now, &[busy(0)]), now + SLICE_MIN);
        assert_eq!(planner.plan(now, &[Demand { deadline: Nanos::MAX, idle: false }]), now + SLICE_MAX);
        assert_eq!(planner.plan(now, &[]), now + SLICE_MAX);
        assert!(planner.segments().is_empty());
        let late = Nanos(u64::MAX - 5);
        assert_eq!(planner.plan(late, &[busy(0)]), Nanos::MAX);
    }

    #[test]
    fn a_sleeper_that_wakes_gets_its_bandwidth_of_what_is_left() {
        let mut planner = Planner::new(&[true]);
        let (a, b) = (planner.add(Bandwidth::ppm(500_000), None), planner.add(Bandwidth::ppm(500_000), None));
        planner.plan(Nanos::ZERO, &[busy(1_000), Demand { idle: true, ..busy(1_000) }]);
        assert_eq!(planner.segments().len(), 1);
        assert!(planner.wake(b, Nanos::from_micros(600)));
        let left: Vec<_> = planner.segments().iter().map(|s| (s.vcpu, s.start.0 / 1_000, s.end.0 / 1_000)).collect();
        assert_eq!(left, [(b, 600, 800)]);
        assert!(!planner.wake(b, Nanos::from_micros(600)), "it is awake");
        assert!(!planner.wake(a, Nanos::from_micros(600)), "it never slept");
        assert!(planner.sleep(b, Nanos::from_micros(700)));
        assert!(planner.wake(b, Nanos::from_micros(850)));
        assert_eq!(planner.segments().iter().map(|s| s.end.0 - s.start.0).sum::<u64>(), 50_000);
    }

    #[test]
    fn a_removed_vcpu_leaves_and_its_place_is_used_again() {
        let mut planner = Planner::new(&[true, true]);
        let a = planner.add(Bandwidth::ppm(500_000), None);
        let b = planner.add(Bandwidth::ppm(500_000), Some(1));
        planner.plan(Nanos::ZERO, &[busy(1_000); 2]);
        planner.remove(b);
        assert!(planner.cpu(1).is_empty() && planner.cpu(0).len() == 1);
        let c = planner.add(Bandwidth::ppm(250_000), None);
        assert_eq!((a.index(), c.index()), (0, 1));
        planner.plan(Nanos::from_millis(1), &[busy(2_000); 2]);
        assert_eq!(planner.cpu(0).len(), 2);
    }
}
