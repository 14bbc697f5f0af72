//! Who runs at which place until when. Pure: readings and the clock come in, changes of place go out.
//!
//! Time is cut into slices that end at the next deadline of any vCPU: what its guest publishes, else its period's end
//! (at least 250 us, at most 100 ms). At a slice's start the planner gives every vCPU its share of it as one or two
//! segments. From then on a vCPU is
//!
//! | place | while |
//! |---|---|
//! | [`Place::Planned`] | it is in a segment and has some of its share left |
//! | [`Place::Entitled`] | it is in none and has some left: it runs when nobody planned wants the CPU, ahead of bulk |
//! | [`Place::Beyond`] | its share of the slice is used up |
//!
//! Use is *measured*, at every change of place and whenever a share may have been used up. So time that one does not
//! use goes to the others that are entitled; what nobody of a slice wanted, the one that had used its share up and is
//! due first has beside its share of the next; the rest goes to bulk. A vCPU that never idles has no more than that
//! while others want the CPU. A look takes time itself, and is followed by the next only after whoever is looked at
//! could have run for what it has left; who waits for its turn is looked at seldom enough that such looks take a fifth
//! of the CPU at most. What it took too much (a look comes some microseconds late) is taken off its next share; what it
//! did not want is forfeited. Within a slice the order in which shares are had does not matter to anybody's deadline,
//! which is never before its end.
//!
//! **Sleepers.** A vCPU that did not run in one slice, and had its share before it, is only entitled in the next, and
//! looked at no sooner than at its end: it costs a reading a slice. Should it wake and spin, the planned do not notice;
//! others wait for it until that look, and it pays back what it took. One whose guest publishes deadlines may not wait
//! so: where a task of it ran lately it is planned as who is awake, since its tasks are released when slices begin;
//! else it is at [`Place::Planned`] all the slice and looked at as often as its share could be used up. While it slept
//! the others went ahead of their plan, so that there is room for its share whenever it wakes (on one CPU; on several
//! it may keep one that is planned elsewhere waiting, for its share at most).
//!
//! **Prompt.** A vCPU whose period is at most [`PROMPT`] and whose guest publishes nothing answers requests: one that
//! has to be served soon, and seldom. With one CPU the order within a slice is free, and as long as it has half of its
//! budget left it is at [`Place::Planned`] all the slice, everybody else at [`Place::Entitled`], and its period ends no
//! slice: sixteen slices a video frame would cost more than it asks for. What it did not use of its share it keeps, up
//! to one budget: a slice of 250 us has half of a budget of 500 us, and a request is not to wait for the next. So it
//! may have one budget more than its share of a slice, once, and others that much less of that slice. Who has less than
//! half of it left is as everybody again.
//!
//! **Calm.** Where nobody has such deadlines and nobody used an eighth of its share, nobody needs a plan: all are at
//! [`Place::Planned`], and there is one look a shortest period; where nobody ran at all, looks come ever more seldom,
//! [`CALM_MAX`] apart at last. Hence the price: when all have been calm and one begins to spin, all others wait for it
//! until that look, once.
//!
//! Units: ns of CLOCK_MONOTONIC. Nothing is allocated after [`Wrapped::new`], and a step reads a vCPU only where
//! something of it is due.

use std::sync::Arc;

use ontime_plan::dpwrap::SLICE_MIN;
use ontime_plan::{Demand, Nanos, Planner, VcpuId};
use ontime_tenants::ThreadId;

use crate::account::{Account, Place, Tally, Threads, signed};
use crate::ordered::Ordered;
use crate::settle::Settled;
use crate::shares::{CALM_MAX, NEVER, UNUSED_MAX};
use crate::show::{Planned, Snapshot};

/// Longer is no prompt vCPU's period, ns.
pub(crate) const PROMPT: u64 = 1_000_000;
/// Who is only entitled and did not run waits for its turn: it is looked at no more often than this many costs of a
/// look apart.
const COST_FACTOR: u64 = 4;
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
    account: Account,
    vcpu: VcpuId,
    home: Option<u32>,
    /// What a prompt vCPU keeps of its shares at most; 0 where it cannot be one.
    keeps: i64,
    /// What it had had when the slice began, and whether it had not run in the one before.
    at_start: u64,
    asleep: bool,
    /// Whether it is a sleeper whose guest publishes deadlines, or prompt.
    waits: bool,
    /// Whether it is served ahead of all, so that its period ends no slice; whether another one is.
    prompt: bool,
    below: bool,
    /// What it was given for this slice, and what it had kept before, ns.
    granted: u64,
    kept: i64,
    parts: [Part; 2],
    /// Whose pacer looks after it in this slice, and when next.
    cpu: usize,
    look: u64,
    /// What its guest published when the slice began.
    next: Option<u64>,
}

impl Seat {
    /// Whether it used more than this part of what it was given.
    fn used_over(&self, part: u64) -> bool {
        let used = signed(self.granted).saturating_add(self.kept).saturating_sub(self.account.balance);
        used.saturating_mul(signed(part)) > signed(self.granted)
    }

    /// Has what its guest has taken of what it was offered, from now on: within the slice, which ends at `end`, beside
    /// the plan, which has room for it.
    fn hear(&mut self, index: usize, now: u64, end: u64, planner: &mut Planner, threads: &mut impl Threads) {
        if let Some(more) = self.account.hear(index, now, end, threads) {
            self.granted = self.granted.saturating_add_signed(more);
            planner.change(self.vcpu, self.account.bandwidth, self.home);
        }
    }

    /// Gives it the place that it should have now.
    fn advance(&mut self, index: usize, now: u64, threads: &mut impl Threads) {
        let in_turn = self.waits || !self.asleep && self.parts.iter().any(|part| (part.start..part.end).contains(&now));
        let below = self.below;
        self.account.advance(index, threads, |account| {
            if account.is_used_up() {
                Place::Beyond
            } else if in_turn && !below {
                Place::Planned
            } else {
                Place::Entitled
            }
        });
    }

    /// When its place may have to change next, at most at `end`; a look takes `cost`, in which it does not run, and it
    /// may have `waited` since the last.
    fn due(&self, now: u64, end: u64, cost: u64, waited: bool) -> u64 {
        let Account { gone, place, grain, balance, .. } = self.account;
        if gone || self.asleep || place == Place::Beyond {
            return end;
        }
        let patience = if waited && place == Place::Entitled { cost.saturating_mul(COST_FACTOR) } else { 0 };
        let least = grain.max(patience);
        let left = u64::try_from(balance).unwrap_or(0).max(least);
        let used_up = now.saturating_add(cost).saturating_add(left);
        // Where somebody is prompt, or is ahead of it, its segments decide nothing.
        let in_turn = !self.prompt && !self.below;
        let borders = self.parts.iter().flat_map(|part| [part.start, part.end]).filter(|at| in_turn && *at > now);
        borders.chain([used_up, end]).min().unwrap_or(end)
    }
}

/// All vCPUs with reservations, and the present slice.
#[derive(Debug)]
pub struct Wrapped {
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
    /// What vCPUs did not want, and nobody else has had, ns.
    unused: u64,
    stirred: bool,
    slices: u64,
    looks: u64,
    /// What a look takes, ns, over the last few.
    cost: u64,
}

impl Wrapped {
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
                let account = Account::new(reserved, now, tally(reserved.id));
                let prompt = alone && account.period <= PROMPT;
                Seat {
                    vcpu: planner.add(reserved.bandwidth, reserved.home),
                    home: reserved.home,
                    keeps: if prompt { signed(account.share(account.period)) } else { 0 },
                    account,
                    at_start: 0,
                    asleep: false,
                    waits: false,
                    prompt: false,
                    below: false,
                    granted: 0,
                    kept: 0,
                    parts: [Part::default(); 2],
                    cpu: 0,
                    look: 0,
                    next: None,
                }
            })
            .collect();
        // A prompt one is ahead of all anyway: looks for the others' sake are enough.
        let period = |seat: &Seat| seat.account.period;
        let others = seats.iter().filter(|seat| seat.keeps == 0).map(period).min();
        let shortest = others.or(seats.iter().map(period).min()).unwrap_or(CALM_MAX);
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
            unused: 0,
            stirred: false,
            slices: 0,
            looks: 0,
            cost: 0,
        }
    }

    /// Takes each vCPU's first reading: what it had before is not counted. By who looks after them from `now` on: what
    /// they take between this and the first look is charged to them.
    pub fn begin(&mut self, now: u64, threads: &mut impl Threads) {
        for (index, seat) in self.seats.iter_mut().enumerate() {
            seat.account.begin(now, threads.read(index));
            seat.at_start = seat.account.counts.ran;
        }
        (self.start, self.end) = (now, now);
    }

    /// Goes on where `old` ends: vCPUs of both keep their place, their debt and their period. To be called at the end
    /// of a slice, after [`Self::begin`].
    pub fn take_over(&mut self, old: &Wrapped) {
        for seat in &mut self.seats {
            let is_of = |before: &&Seat| before.account.id == seat.account.id && !before.account.gone;
            let Some(before) = old.seats.iter().find(is_of) else { continue };
            seat.account.take_over(&before.account, 0);
            (seat.granted, seat.kept, seat.at_start) = (before.granted, before.kept, before.at_start);
        }
        (self.slices, self.looks, self.cost, self.unused) = (old.slices, old.looks, old.cost, old.unused);
    }

    /// Goes on where a plan of another kind ends: vCPUs of both keep their place, their debt and their period.
    pub(crate) fn keep(&mut self, old: &Ordered) {
        for seat in &mut self.seats {
            if let Some((before, given)) = old.account(seat.account.id, self.start) {
                seat.account.take_over(before, given);
                seat.account.balance = -signed(before.ahead(given));
            }
        }
    }

    /// The account of one of its vCPUs.
    pub(crate) fn account(&self, id: ThreadId) -> Option<&Account> {
        self.seats.iter().map(|seat| &seat.account).find(|account| account.id == id && !account.gone)
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

    /// Says how long a step took, ns. Looks that follow each other as fast as they can would leave vCPUs no time to use
    /// their shares up.
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
                    seat.hear(index, now, end, &mut self.planner, threads);
                    let before = seat.account.counts.ran;
                    seat.advance(index, now, threads);
                    seat.look = seat.due(now, end, cost, seat.account.counts.ran == before);
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
        for (index, seat) in self.seats.iter_mut().enumerate().filter(|(_, seat)| !seat.account.gone) {
            seat.account.read(index, threads);
            seat.hear(index, now, now, &mut self.planner, threads);
            let next = threads.next(index, self.start);
            seat.next = next.map(|next| next.at);
            let live = next.is_some_and(|next| next.live);
            busy |= live;
            // Behind bulk it may not have run although it wanted to; interrupt threads may have had a short slice.
            let idle = !fresh && !live && seat.account.place != Place::Beyond;
            let slept = idle && seat.account.counts.ran == seat.at_start && threads.sleeps(index);
            let silent = next.is_none();
            seat.prompt = seat.keeps > 0 && silent && seat.account.balance >= seat.keeps / 2;
            prompt |= seat.prompt;
            busy |= seat.used_over(8) && !seat.prompt;
            (seat.asleep, seat.waits) = (slept && silent && !seat.prompt, slept && !silent || seat.prompt);
            seat.at_start = seat.account.counts.ran;
            ran |= !(slept && silent);
            let account = &mut seat.account;
            busy |= account.balance < 0 || account.place == Place::Beyond;
            account.close_period(now);
            // What it did not want is forfeited; the grain that a look left it is not.
            if account.place != Place::Beyond {
                let kept = account.balance.min(if silent { seat.keeps } else { 0 });
                self.unused = self.unused.saturating_add((account.balance - kept).unsigned_abs()).min(UNUSED_MAX);
                account.balance = kept;
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
                let deadline = seat.next.unwrap_or(seat.account.deadline);
                demand.deadline = if seat.account.gone || seat.prompt { Nanos::MAX } else { Nanos(deadline) };
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
            let balance = &mut seat.account.balance;
            seat.kept = (*balance).max(0);
            *balance = balance.saturating_add(signed(seat.granted));
        }
        self.lend();
    }

    /// Lets the one that has used its share up and is due first have what others did not want, beside its share. Not
    /// where the order within the slice is free: there nobody's share would be kept from that.
    fn lend(&mut self) {
        if self.seats.iter().any(|seat| seat.below) {
            return;
        }
        let waits = self.seats.iter_mut().filter(|seat| seat.account.place == Place::Beyond && !seat.account.gone);
        if let Some(seat) = waits.min_by_key(|seat| seat.next.unwrap_or(seat.account.deadline)) {
            let more = signed(std::mem::take(&mut self.unused));
            seat.kept += more;
            seat.account.balance = seat.account.balance.saturating_add(more);
        }
    }

    /// No plan for `length` ns.
    fn rest(&mut self, length: u64, now: u64, threads: &mut impl Threads) {
        self.calm = true;
        self.calm_length = length;
        self.start = now;
        self.end = now.saturating_add(length);
        for (index, seat) in self.seats.iter_mut().enumerate().filter(|(_, seat)| !seat.account.gone) {
            let account = &mut seat.account;
            seat.granted = account.share(length);
            seat.kept = account.balance.clamp(0, seat.keeps);
            account.balance = signed(seat.granted).saturating_add(seat.kept);
            account.move_to(index, Place::Planned, threads);
        }
    }

    /// Shows the present state.
    pub fn show(&self, now: u64, into: &mut Snapshot) {
        into.span(now, self.start, self.end, self.calm);
        (into.slices, into.looks) = (self.slices, self.looks);
        for seat in self.seats.iter().filter(|seat| !seat.account.gone) {
            into.stand(seat.account.standing());
            for part in seat.parts.iter().filter(|part| !self.calm && part.end > part.start) {
                into.plan(Planned { cpu: part.cpu, id: seat.account.id, start: part.start, end: part.end });
            }
        }
    }
}
