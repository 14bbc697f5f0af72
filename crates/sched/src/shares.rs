//! Who runs at which place until when. Pure: readings and the clock come in, changes of place go out.
//!
//! Time is cut into slices that end at the next deadline of any vCPU: what its guest publishes, else its period's end (at least 250 us, at most 100 ms). At a slice's start the
//! planner gives every vCPU its share of it as one or two segments. From then on a vCPU is
//!
//! | place | while |
//! |---|---|
//! | [`Place::Planned`] | it is in a segment and has some of its share left |
//! | [`Place::Entitled`] | it is in none and has some left: it runs when nobody planned wants the CPU, ahead of bulk |
//! | [`Place::Beyond`] | its share of the slice is used up |
//!
//! Use is *measured*, at every change of place and whenever a share may have been used up. So time that one does not use goes to
//! the others that are entitled, then to bulk; and a vCPU that never idles has its share and no more while others want
//! the CPU. A look takes time itself, and is followed by the next only after whoever is looked at could have run for what it has left; who waits for its turn is looked
//! at seldom enough that such looks take a fifth of the CPU at most. What it took too much (a look comes some microseconds late) is taken off its next share; what it did not want is forfeited.
//! Within a slice the order in which shares are had does not matter to anybody's deadline, which is never before its end.
//!
//! **Sleepers.** A vCPU that did not run in one slice, and had its share before it, is only entitled in the next, and looked at no sooner than at its end: it costs a
//! reading a slice. Should it wake and spin, the planned do not notice; others wait for it until that look, and it pays back what it took.
//! One whose guest publishes deadlines may not wait so: where a task of it ran lately it is planned as who is awake, since its tasks are
//! released when slices begin; else it is at [`Place::Planned`] all the slice and looked at as often as its share could be used up. While it
//! slept the others went ahead of their plan, so that there is room for its share whenever it wakes (on one CPU; on several it may keep one that is planned
//! elsewhere waiting, for its share at most).
//!
//! **Prompt.** A vCPU whose period is at most [`PROMPT`] and whose guest publishes nothing answers requests: one that has to be served soon, and seldom. With one CPU the
//! order within a slice is free, and as long as it has half of its budget left it is at [`Place::Planned`] all the slice, everybody else at [`Place::Entitled`], and its
//! period ends no slice: sixteen slices a video frame would cost more than it asks for. What it did not use of its share it keeps, up to one budget: a slice of 250 us has half
//! of a budget of 500 us, and a request is not to wait for the next. So it may have one budget more than its share of a slice, once, and others that much less of that slice. Who
//! has less than half of it left is as everybody again.
//!
//! **Calm.** Where nobody has such deadlines and nobody used an eighth of its share, nobody needs a plan: all are at [`Place::Planned`], and there is one look a
//! shortest period; where nobody ran at all, looks come ever more seldom, [`CALM_MAX`] apart at last. Hence the price: when all
//! have been calm and one begins to spin, all others wait for it until that look, once.
//!
//! Units: ns of CLOCK_MONOTONIC. Nothing is allocated after [`Shares::new`], and a step reads a vCPU only where something of it is
//! due.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ontime_plan::dpwrap::SLICE_MIN;
use ontime_plan::{Bandwidth, Demand, Nanos, Planner, VcpuId};
use ontime_tenants::ThreadId;

use crate::published::Next;
use crate::settle::Settled;

/// The longest time between two looks at vCPUs that all sleep, ns.
pub const CALM_MAX: u64 = 50_000_000;
/// Longer is no prompt vCPU's period, ns.
const PROMPT: u64 = 1_000_000;
/// A share with no more than this left counts as used up, ns: a look for less would cost more. What was left is kept for the next slice. Of
/// small budgets it is an eighth, and not below the least.
const GRAIN: u64 = 20_000;
const GRAIN_MIN: u64 = 2_000;
/// Who is only entitled and did not run waits for its turn: it is looked at no more often than this many costs of a look apart.
const COST_FACTOR: u64 = 4;
/// Never.
pub const NEVER: u64 = u64::MAX;

/// Where a vCPU stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Ahead of every other vCPU.
    Planned,
    /// Behind the planned, ahead of bulk.
    Entitled,
    /// It has had its share.
    Beyond,
}

/// What a vCPU thread has had since it started, ns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Time on a CPU.
    pub ran: u64,
    /// Time runnable and waiting for one.
    pub waited: u64,
}

/// The vCPU threads. None: it has ended.
pub trait Threads {
    /// What one has had up to now.
    fn read(&mut self, seat: usize) -> Option<Counts>;
    /// The next deadline after `after`, ns, that its guest publishes; None where it publishes none.
    fn next(&mut self, seat: usize, after: u64) -> Option<Next>;
    /// Changes its place, and reads it. A change that the kernel refuses counts as made: it is tried again with the next one.
    fn place(&mut self, seat: usize, place: Place) -> Option<Counts>;
}

/// What happened to a vCPU: written by pacers, read by others meanwhile.
#[derive(Debug, Default)]
pub struct Tally {
    /// CPU time within shares, ns.
    pub ran: AtomicU64,
    /// CPU time beyond them, ns.
    pub beyond: AtomicU64,
    /// Times a share was used up.
    pub overruns: AtomicU64,
    /// Periods that were looked at.
    pub periods: AtomicU64,
    /// Periods in which it had less than its budget although it wanted it: it waited for longer than the period less the budget.
    pub misses: AtomicU64,
    /// Changes of place.
    pub flips: AtomicU64,
    /// Changes of place that the kernel refused.
    pub refused: AtomicU64,
}

fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

/// A part of the present plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Part {
    cpu: usize,
    start: u64,
    end: u64,
}

/// One vCPU.
#[derive(Debug)]
struct Seat {
    id: ThreadId,
    vcpu: VcpuId,
    bandwidth: Bandwidth,
    period: u64,
    /// See [`GRAIN`].
    grain: u64,
    /// What a prompt vCPU keeps of its shares at most; 0 where it cannot be one.
    keeps: i64,
    tally: Arc<Tally>,
    gone: bool,
    place: Place,
    counts: Counts,
    /// What it had had when the slice began, and whether it had not run in the one before.
    at_start: u64,
    asleep: bool,
    /// Whether it is a sleeper whose guest publishes deadlines, or prompt.
    waits: bool,
    /// Whether it is served ahead of all, so that its period ends no slice; whether another one is.
    prompt: bool,
    below: bool,
    /// What is left of its share, ns; below 0 where it took more.
    balance: i64,
    /// What it was given for this slice, and what it had kept before, ns.
    granted: u64,
    kept: i64,
    parts: [Part; 2],
    /// Whose pacer looks after it in this slice, and when next.
    cpu: usize,
    look: u64,
    /// The end of its present period.
    deadline: u64,
    /// What its guest published when the slice began.
    next: Option<u64>,
    /// When its period began, as far as it was looked at, and what it had had then.
    since: u64,
    at_since: Counts,
    /// CPU time within shares since then; and what it had had too much before, which this period pays back.
    had: u64,
    owed: u64,
}

fn signed(ns: u64) -> i64 {
    i64::try_from(ns).unwrap_or(i64::MAX)
}

impl Seat {
    /// Takes a reading: time since the last one was had at the present place.
    fn charge(&mut self, counts: Counts) {
        let ran = counts.ran.saturating_sub(self.counts.ran);
        self.counts = counts;
        if self.place == Place::Beyond {
            add(&self.tally.beyond, ran);
        } else {
            self.balance = self.balance.saturating_sub(signed(ran));
            self.had = self.had.saturating_add(ran);
            add(&self.tally.ran, ran);
        }
    }

    /// Whether it used more than this part of what it was given.
    fn used_over(&self, part: u64) -> bool {
        let used = signed(self.granted).saturating_add(self.kept).saturating_sub(self.balance);
        used.saturating_mul(signed(part)) > signed(self.granted)
    }

    fn target(&self, now: u64) -> Place {
        if self.balance <= signed(self.grain) {
            Place::Beyond
        } else if self.below {
            Place::Entitled
        } else if self.waits || !self.asleep && self.parts.iter().any(|part| (part.start..part.end).contains(&now)) {
            Place::Planned
        } else {
            Place::Entitled
        }
    }

    /// When its place may have to change next, at most at `end`; a look takes `cost`, in which it does not run, and it may have `waited` since the last.
    fn due(&self, now: u64, end: u64, cost: u64, waited: bool) -> u64 {
        if self.gone || self.asleep || self.place == Place::Beyond {
            return end;
        }
        let patience = if waited && self.place == Place::Entitled { cost.saturating_mul(COST_FACTOR) } else { 0 };
        let least = self.grain.max(patience);
        let left = u64::try_from(self.balance).unwrap_or(0).max(least);
        let used_up = now.saturating_add(cost).saturating_add(left);
        // Where somebody is prompt, or is ahead of it, its segments decide nothing.
        let in_turn = !self.prompt && !self.below;
        let borders = self.parts.iter().flat_map(|part| [part.start, part.end]).filter(|at| in_turn && *at > now);
        borders.chain([used_up, end]).min().unwrap_or(end)
    }

    /// Judges its period if that is over.
    fn close_period(&mut self, now: u64) {
        if now < self.deadline {
            return;
        }
        let length = now.saturating_sub(self.since);
        let budget = self.bandwidth.of(Nanos(length)).0;
        let waited = self.counts.waited.saturating_sub(self.at_since.waited);
        // A period is judged at a look, which comes late by microseconds; and the share of the last one may be a grain short.
        let tolerance = budget / 50 + 2 * self.grain;
        let had = self.had.saturating_add(self.owed).saturating_add(tolerance);
        if had < budget && waited > length.saturating_sub(budget) + tolerance {
            add(&self.tally.misses, 1);
        }
        add(&self.tally.periods, length.div_ceil(self.period.max(1)));
        self.begin_period(now);
    }

    fn begin_period(&mut self, now: u64) {
        // All periods are counted from the clock's zero: those of equal length end together, which makes fewer slices.
        self.deadline = (now / self.period.max(1) + 1).saturating_mul(self.period);
        self.since = now;
        self.at_since = self.counts;
        self.had = 0;
        self.owed = self.balance.min(0).unsigned_abs();
    }
}

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
    /// One with room for this many vCPUs.
    pub fn with_room(vcpus: usize) -> Self {
        Self { standings: Vec::with_capacity(vcpus), plan: Vec::with_capacity(2 * vcpus), ..Self::default() }
    }
}

/// All vCPUs with reservations, and the present slice.
#[derive(Debug)]
pub struct Shares {
    planner: Planner,
    demands: Vec<Demand>,
    seats: Vec<Seat>,
    start: u64,
    end: u64,
    calm: bool,
    /// Nothing is known of its vCPUs yet: the first slice is planned.
    fresh: bool,
    /// Length of the last calm time, ns.
    calm_length: u64,
    /// The shortest period, ns.
    shortest: u64,
    stirred: bool,
    slices: u64,
    looks: u64,
    /// What a look takes, ns, over the last few.
    cost: u64,
}

impl Shares {
    /// Of vCPUs that are at [`Place::Entitled`] now. Each has the tally that `tally` gives.
    pub fn new(settled: &Settled, now: u64, tally: impl Fn(ThreadId) -> Arc<Tally>) -> Self {
        let mut planner = Planner::new(&settled.shared);
        for cpu in (0..).take(settled.cpus.len()) {
            planner.add(settled.reserve, Some(cpu));
        }
        let alone = settled.cpus.len() == 1;
        let seats: Vec<Seat> = settled
            .vcpus
            .iter()
            .map(|reserved| {
                let mut seat = Seat {
                    id: reserved.id,
                    vcpu: planner.add(reserved.bandwidth, reserved.home),
                    bandwidth: reserved.bandwidth,
                    period: reserved.period.0,
                    grain: (reserved.bandwidth.of(reserved.period).0 / 8).clamp(GRAIN_MIN, GRAIN),
                    keeps: if alone && reserved.period.0 <= PROMPT {
                        signed(reserved.bandwidth.of(reserved.period).0)
                    } else {
                        0
                    },
                    tally: tally(reserved.id),
                    gone: false,
                    place: Place::Entitled,
                    counts: Counts::default(),
                    at_start: 0,
                    asleep: false,
                    waits: false,
                    prompt: false,
                    below: false,
                    balance: 0,
                    granted: 0,
                    kept: 0,
                    parts: [Part::default(); 2],
                    cpu: 0,
                    look: 0,
                    deadline: 0,
                    next: None,
                    since: now,
                    at_since: Counts::default(),
                    had: 0,
                    owed: 0,
                };
                seat.begin_period(now);
                seat
            })
            .collect();
        // A prompt one is ahead of all anyway: looks for the others' sake are enough.
        let others = seats.iter().filter(|seat| seat.keeps == 0).map(|seat| seat.period).min();
        let shortest = others.or(seats.iter().map(|seat| seat.period).min()).unwrap_or(CALM_MAX);
        let demands = vec![Demand { deadline: Nanos::MAX, idle: false }; settled.cpus.len() + seats.len()];
        Self {
            planner,
            demands,
            seats,
            start: now,
            end: now,
            calm: false,
            fresh: true,
            calm_length: shortest,
            shortest: shortest.min(CALM_MAX),
            stirred: false,
            slices: 0,
            looks: 0,
            cost: 0,
        }
    }

    /// Takes each vCPU's first reading: what it had before is not counted. By who looks after them from `now` on: what they take
    /// between this and the first look is charged to them.
    pub fn begin(&mut self, now: u64, threads: &mut impl Threads) {
        for (index, seat) in self.seats.iter_mut().enumerate() {
            match threads.read(index) {
                Some(counts) => (seat.counts, seat.at_start) = (counts, counts.ran),
                None => seat.gone = true,
            }
            seat.begin_period(now);
        }
        (self.start, self.end) = (now, now);
    }

    /// Goes on where `old` ends: vCPUs of both keep their place, their debt and their period. To be called at the end of a slice, after
    /// [`Self::begin`].
    pub fn take_over(&mut self, old: &Shares) {
        for seat in &mut self.seats {
            let Some(before) = old.seats.iter().find(|before| before.id == seat.id && !before.gone) else { continue };
            seat.place = before.place;
            seat.counts = before.counts;
            seat.balance = before.balance;
            (seat.granted, seat.kept, seat.at_start) = (before.granted, before.kept, before.at_start);
            if seat.period == before.period && seat.bandwidth == before.bandwidth {
                (seat.deadline, seat.since) = (before.deadline, before.since);
                (seat.at_since, seat.had, seat.owed) = (before.at_since, before.had, before.owed);
            }
        }
        (self.slices, self.looks, self.cost) = (old.slices, old.looks, old.cost);
    }

    /// How many vCPUs.
    pub fn len(&self) -> usize {
        self.seats.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.seats.is_empty()
    }

    /// When the slice or the calm time ends: another set of vCPUs may take over from then on.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Whether no slice is planned: another set of vCPUs may take over at any time.
    pub fn is_calm(&self) -> bool {
        self.calm
    }

    /// Whether a calm time has just ended, so that the pacers of other CPUs have to look; asked once.
    pub fn take_stirred(&mut self) -> bool {
        std::mem::take(&mut self.stirred)
    }

    /// Says how long a step took, ns. Looks that follow each other as fast as they can would leave vCPUs no time to use their shares up.
    pub fn took(&mut self, ns: u64) {
        self.cost = (3 * self.cost + ns) / 4;
    }

    /// Does what is due on a CPU (as the planner counts). Returns when its pacer is to come again.
    pub fn step(&mut self, cpu: usize, now: u64, threads: &mut impl Threads) -> u64 {
        self.looks += 1;
        if self.seats.is_empty() {
            return NEVER;
        }
        if now >= self.end {
            self.turn(now, threads);
        }
        if self.calm {
            return if cpu == 0 { self.end } else { NEVER };
        }
        let (end, cost) = (self.end, self.cost);
        let mut due = end;
        // Beside a prompt one all are read at each look: all wait, and one look is as good as one for each.
        let all = self.seats.iter().any(|seat| (seat.prompt || seat.below) && seat.look <= now);
        for (index, seat) in self.seats.iter_mut().enumerate() {
            if seat.cpu == cpu {
                if all || now >= seat.look {
                    let before = seat.counts.ran;
                    advance(index, seat, now, threads);
                    seat.look = seat.due(now, end, cost, seat.counts.ran == before);
                }
                due = due.min(seat.look);
            }
        }
        due
    }

    /// Ends a slice and begins the next, or a calm time.
    fn turn(&mut self, now: u64, threads: &mut impl Threads) {
        // A look that comes a little late is none of the plan's business: slices follow each other without a gap.
        let late = now.saturating_sub(self.end);
        self.start = if late < SLICE_MIN.0 { self.end } else { now };
        let fresh = std::mem::take(&mut self.fresh);
        let (mut busy, mut ran, mut prompt) = (fresh, false, false);
        for (index, seat) in self.seats.iter_mut().enumerate().filter(|(_, seat)| !seat.gone) {
            match threads.read(index) {
                Some(counts) => seat.charge(counts),
                None => seat.gone = true,
            }
            let next = threads.next(index, self.start);
            seat.next = next.map(|next| next.at);
            let live = next.is_some_and(|next| next.live);
            busy |= live;
            // Behind bulk it may not have run although it wanted to.
            let slept = !fresh && !live && seat.place != Place::Beyond && seat.counts.ran == seat.at_start;
            let silent = next.is_none();
            seat.prompt = seat.keeps > 0 && silent && seat.balance >= seat.keeps / 2;
            prompt |= seat.prompt;
            (seat.asleep, seat.waits) = (slept && silent && !seat.prompt, slept && !silent || seat.prompt);
            seat.at_start = seat.counts.ran;
            ran |= !(slept && silent);
            busy |= seat.used_over(8) && !seat.prompt || seat.balance < 0 || seat.place == Place::Beyond;
            seat.close_period(now);
            // What it did not want is forfeited; the grain that a look left it is not.
            if seat.place != Place::Beyond {
                seat.balance = seat.balance.min(if silent { seat.keeps } else { 0 });
            }
        }
        for seat in &mut self.seats {
            seat.below = prompt && !seat.prompt;
        }
        if busy {
            self.stirred |= std::mem::take(&mut self.calm);
            self.calm_length = self.shortest;
            self.plan();
        } else {
            self.rest(if ran { self.shortest } else { (self.calm_length * 2).min(CALM_MAX) }, now, threads);
        }
    }

    fn plan(&mut self) {
        for seat in &self.seats {
            if let Some(demand) = self.demands.get_mut(seat.vcpu.index()) {
                let deadline = seat.next.unwrap_or(seat.deadline);
                demand.deadline = if seat.gone || seat.prompt { Nanos::MAX } else { Nanos(deadline) };
            }
        }
        self.end = self.planner.plan(Nanos(self.start), &self.demands).0;
        self.slices += 1;
        for seat in &mut self.seats {
            seat.parts = [Part::default(); 2];
            seat.granted = 0;
        }
        // The reserves are vCPUs 0 to m-1, then the seats in their order.
        let reserves = self.demands.len() - self.seats.len();
        for segment in self.planner.segments() {
            let seat = segment.vcpu.index().checked_sub(reserves).and_then(|at| self.seats.get_mut(at));
            let Some(seat) = seat else { continue };
            let cpu = usize::try_from(segment.cpu).unwrap_or(0);
            let [first, second] = &mut seat.parts;
            let part = if first.end == 0 { first } else { second };
            *part = Part { cpu, start: segment.start.0, end: segment.end.0 };
            seat.granted += segment.end.0 - segment.start.0;
        }
        for seat in &mut self.seats {
            seat.parts.sort_unstable_by_key(|part| (part.end == 0, part.start));
            (seat.cpu, seat.look) = (seat.parts.first().map_or(0, |part| part.cpu), 0);
            seat.kept = seat.balance.max(0);
            seat.balance = seat.balance.saturating_add(signed(seat.granted));
        }
    }

    /// No plan for `length` ns.
    fn rest(&mut self, length: u64, now: u64, threads: &mut impl Threads) {
        self.calm = true;
        self.calm_length = length;
        self.start = now;
        self.end = now.saturating_add(length);
        for (index, seat) in self.seats.iter_mut().enumerate().filter(|(_, seat)| !seat.gone) {
            seat.granted = seat.bandwidth.of(Nanos(length)).0;
            seat.kept = seat.balance.clamp(0, seat.keeps);
            seat.balance = signed(seat.granted).saturating_add(seat.kept);
            move_to(index, seat, Place::Planned, threads);
        }
    }

    /// Shows the present state.
    pub fn show(&self, now: u64, into: &mut Snapshot) {
        (into.now, into.start, into.end, into.calm) = (now, self.start, self.end, self.calm);
        (into.slices, into.looks) = (self.slices, self.looks);
        into.standings.clear();
        into.plan.clear();
        for seat in self.seats.iter().filter(|seat| !seat.gone) {
            if into.standings.len() < into.standings.capacity() {
                into.standings.push(Standing { id: seat.id, place: seat.place, deadline: seat.deadline });
            }
            for part in seat.parts.iter().filter(|part| !self.calm && part.end > part.start) {
                if into.plan.len() < into.plan.capacity() {
                    into.plan.push(Planned { cpu: part.cpu, id: seat.id, start: part.start, end: part.end });
                }
            }
        }
    }
}

/// Gives a vCPU the place that it should have now. A reading before the change may lack up to a tick where the thread runs on another
/// CPU, the one after it is exact: hence a second try.
fn advance(index: usize, seat: &mut Seat, now: u64, threads: &mut impl Threads) {
    for _ in 0..2 {
        if seat.gone {
            return;
        }
        if seat.place != Place::Beyond {
            match threads.read(index) {
                Some(counts) => seat.charge(counts),
                None => seat.gone = true,
            }
        }
        if seat.gone || !move_to(index, seat, seat.target(now), threads) {
            return;
        }
    }
}

/// True if its place was another.
fn move_to(index: usize, seat: &mut Seat, place: Place, threads: &mut impl Threads) -> bool {
    if seat.place == place {
        return false;
    }
    match threads.place(index, place) {
        Some(counts) => {
            seat.charge(counts);
            seat.place = place;
            add(&seat.tally.flips, 1);
            if place == Place::Beyond {
                add(&seat.tally.overruns, 1);
            }
        }
        None => seat.gone = true,
    }
    true
}

#[cfg(test)]
#[path = "shares_tests.rs"]
mod tests;
