//! One CPU's vCPUs in the order of their deadlines. Pure: readings and the clock come in, changes of place go out.
//!
//! Where nobody can go to another CPU, no slice has to be shared among all: earliest deadline first keeps every share
//! that fits, and leaves whoever is not due alone (Liu and Layland 1973; as servers, Spuri and Buttazzo, "Scheduling
//! aperiodic tasks in dynamic priority systems", 1996). Each vCPU has *windows* that follow each other: one ends at the
//! next deadline of its guest, or at the end of a period where that publishes none (at least 250 us, at most 100 ms).
//! At its start it is granted its bandwidth times its length, to be had before its end; what it did not want is
//! forfeited, what it took too much is paid back. So by each of its own deadlines a vCPU has had what DP-WRAP would
//! have given it; and a deadline of somebody else's costs it nothing.
//!
//! **Two places for an order.** A host's FIFO has no order within a priority, so those that are next are at
//! [`Place::Planned`] and the others that have something left at [`Place::Entitled`]. How many are next, and for how
//! long that may stay, follows from what is left to everybody: time that whoever is later may take before one misses
//! its deadline is its *slack*, the time to its deadline less what it and all that are before it may still want, and
//! less what these are granted until then. The planned are a number of vCPUs from the earliest deadline on; one alone,
//! or as many as can all be done by the first one's deadline in whatever order. Of these numbers the one is taken with
//! which the order holds the longest, and the pacer looks again when that time is over: at the next end of a window as
//! a rule.
//!
//! **Looks.** A vCPU that ran since the last look is looked at when its share may be used up. One that did not run,
//! although for a quarter of the time nobody of them ran, was asleep (three quarters, if it used its last share up;
//! what is less may have gone to interrupts; and the kernel is asked whether it sleeps, once a window at the most, and
//! where the answer matters): what it may still want shrinks with the time that is left (DP-Fair, for sporadic tasks).
//! One that sleeps and wakes is noticed at the next look; until then it may take more than its share of the others'
//! slack, or of [`FLOOR`].
//!
//! **What is not wanted** is a vCPU's own for 100 ms: it pays for what that takes too much, and where everybody's slack
//! is long ([`Ordered::lend`]) nobody looks before it is used up as well, so an application whose job comes in one
//! piece costs no look in its midst and is not kept waiting for its next one. What is too much for that those have who
//! have used their shares up, the one that is due first before the others, and all of them ahead of bulk;
//! [`UNUSED_MAX`] is kept for them. Then they pay back. So all together never have more than their bandwidth in the
//! long run, and bulk has what is nobody's.
//!
//! **Calm.** Where no guest has live deadlines and nobody used an eighth of its share in its last window, all are at
//! [`Place::Planned`] and there is one look a shortest period; where nobody ran at all, looks come ever more seldom,
//! [`CALM_MAX`] apart at last. Hence the price: when all have been calm and one begins to spin, all others wait for it
//! until that look, once.
//!
//! Units: ns of CLOCK_MONOTONIC. Nothing is allocated after [`Ordered::new`].

use std::sync::Arc;

use ontime_plan::Nanos;
use ontime_plan::dpwrap::{SLICE_MAX, SLICE_MIN};
use ontime_tenants::ThreadId;

use crate::account::{Account, Place, Tally, Threads, signed};
use crate::settle::{Reserved, Settled};
use crate::shares::{CALM_MAX, NEVER, UNUSED_MAX};
use crate::show::{Planned, Snapshot};
use crate::wrapped::Wrapped;

/// A look for what is only possible comes no sooner than this after the last, ns.
pub const FLOOR: u64 = 250_000;
/// Nor sooner than this many costs of a look.
const COST_FACTOR: u64 = 4;
/// So much time in which nobody ran, and a quarter of all, shows that one who did not run was asleep: less may have
/// gone to interrupts. One that used its last share up takes three quarters.
const IDLE: u64 = 20_000;
const IDLE_QUARTERS: [u64; 2] = [1, 3];
/// So much of what it did not want lately a vCPU may have beyond its share: its part of this time, ns.
const LENT: u64 = 20_000_000;
/// Others' unused time is given away in no smaller pieces than this, ns: a piece is a look and two changes of place.
const WORTH_A_TURN: u64 = 1_000_000;
/// One, as a rate.
const RATE: u64 = 1 << 20;

/// One vCPU.
#[derive(Debug)]
struct Seat {
    /// As [`Threads`] counts.
    index: usize,
    account: Account,
    /// Its bandwidth in parts of [`RATE`], rounded up.
    rate: u64,
    /// Its window, and what it was granted for it.
    end: u64,
    granted: u64,
    /// What it did not want lately, ns: this pays for what it takes when nobody needs it; what is too much for that,
    /// until the CPU's others have it.
    spare: u64,
    unused: u64,
    /// What it may have beyond its share until the next look, ns.
    lent: u64,
    /// Whether its guest publishes deadlines; whether one of its tasks has run lately.
    silent: bool,
    live: bool,
    /// Whether its last window gave no reason for a plan.
    quiet: bool,
    /// What the last look showed, and where it was until then.
    ran: bool,
    was: Place,
    /// Whether it is taken to want the CPU now; whether it used its last window's share up.
    wants: bool,
    greedy: bool,
    asleep: bool,
    /// Whether it may sleep or wait, which only the kernel knows; whether the CPU was idle enough for sleep to be
    /// likely; how long others ran for which it would have waited.
    unsure: bool,
    idle: bool,
    behind: u64,
    /// What it may still want of its window, ns; the least slack of those that are after it; whether it is one of the
    /// next.
    need: u64,
    after: u64,
    next: bool,
}

impl Seat {
    fn new(index: usize, reserved: &Reserved, now: u64, tally: Arc<Tally>) -> Self {
        let account = Account::new(reserved, now, tally);
        Self {
            index,
            rate: account.share(RATE) + 1,
            account,
            end: now,
            granted: 0,
            spare: 0,
            unused: 0,
            lent: 0,
            silent: true,
            live: false,
            quiet: false,
            ran: false,
            was: Place::Entitled,
            wants: true,
            greedy: true,
            asleep: false,
            unsure: false,
            idle: false,
            behind: 0,
            need: 0,
            after: 0,
            next: false,
        }
    }

    /// Has what its guest has taken of what it was offered, from now on.
    fn hear(&mut self, now: u64, threads: &mut impl Threads) {
        if let Some(more) = self.account.hear(self.index, now, self.end, threads) {
            self.granted = self.granted.saturating_add_signed(more);
            self.rate = self.account.share(RATE) + 1;
        }
    }

    /// Reads it; returns how long it ran within its share since the last look, ns.
    fn observe(&mut self, now: u64, threads: &mut impl Threads) -> u64 {
        self.hear(now, threads);
        let account = &mut self.account;
        let mut ran = 0;
        if account.place != Place::Beyond {
            ran = account.read(self.index, threads);
        } else if now >= self.end || now >= account.deadline {
            account.read(self.index, threads);
        }
        self.ran = ran > 0;
        account.close_period(now);
        self.spare -= self.pay(self.spare);
        ran
    }

    /// Pays what it took too much, with so much at the most; returns what that took.
    fn pay(&mut self, most: u64) -> u64 {
        let paid = self.account.balance.min(0).unsigned_abs().min(most);
        self.account.balance += signed(paid);
        paid
    }

    /// Has so much more of what it did not want.
    fn save(&mut self, ns: u64) {
        let spare = self.spare.saturating_add(ns);
        self.spare = spare.min(self.account.share(SLICE_MAX.0));
        self.unused = self.unused.saturating_add(spare - self.spare);
    }

    /// What it may have until the next look, and no more, ns.
    fn left(&self) -> u64 {
        u64::try_from(self.account.balance.saturating_add(signed(self.lent))).unwrap_or(0)
    }

    /// Judges whether it sleeps, after a time of which vCPUs at its place or ahead of it ran for `busy`, and none of
    /// them for a part if `idle`. The kernel is asked about one that wanted the CPU, for looks go by that.
    fn doze(&mut self, now: u64, busy: u64, idle: bool, threads: &mut impl Threads) {
        let may = !self.ran && idle;
        self.idle = idle;
        // One that was behind bulk wants more than it had.
        let ask = self.wants && self.was != Place::Beyond;
        // Interrupt threads may have had the time, while it waited; and nobody would look at it again before its window
        // ends.
        self.asleep = may && (self.asleep || ask && threads.sleeps(self.index));
        self.unsure = !self.ran && !self.asleep && !ask;
        self.wants = self.ran || self.was == Place::Beyond || self.wants && !self.asleep;
        self.behind = busy;
        self.reckon(now);
    }

    /// Asks the kernel, if that was left.
    fn make_sure(&mut self, now: u64, threads: &mut impl Threads) {
        if std::mem::take(&mut self.unsure) {
            self.asleep = threads.sleeps(self.index);
            // A vCPU that does not sleep waits, although no look has seen it run.
            self.wants = !self.asleep;
            self.reckon(now);
        }
    }

    /// Reckons what it may still want.
    fn reckon(&mut self, now: u64) {
        let mut need = u64::try_from(self.account.balance).unwrap_or(0);
        if self.asleep {
            // It may have woken since, and waits for those that ran.
            let left = self.end.saturating_sub(now).saturating_add(self.behind);
            need = need.min(self.account.bandwidth.of(Nanos(left)).0);
            if !self.silent {
                self.forfeit(signed(need));
            }
        }
        self.need = if self.account.is_used_up() { 0 } else { need };
    }

    /// Leaves it no more than this.
    fn forfeit(&mut self, most: i64) {
        let account = &mut self.account;
        let less = account.balance.saturating_sub(most).max(0);
        account.balance -= less;
        self.save(less.unsigned_abs());
    }

    /// Whether it used more than this part of what it was granted.
    fn used_over(&self, part: u64) -> bool {
        let used = signed(self.granted).saturating_sub(self.account.balance);
        used.saturating_mul(signed(part)) > signed(self.granted)
    }

    /// Whether nothing of it needs a plan.
    fn is_quiet(&self) -> bool {
        !self.live && !self.used_over(8) && self.account.balance >= 0 && self.account.place != Place::Beyond
    }

    /// Begins its next window.
    fn roll(&mut self, now: u64, threads: &mut impl Threads) {
        let start = if now.saturating_sub(self.end) < SLICE_MIN.0 { self.end } else { now };
        let next = threads.next(self.index, start);
        (self.silent, self.live) = (next.is_none(), next.is_some_and(|next| next.live));
        self.greedy = self.account.place == Place::Beyond || self.account.is_used_up();
        self.quiet = self.granted > 0 && self.is_quiet();
        // What it did not want is forfeited; the grain that a look left it is not.
        if self.account.place != Place::Beyond {
            self.forfeit(0);
        }
        let account = &mut self.account;
        let period = account.period.max(1);
        let end = next.map_or((start / period + 1).saturating_mul(period), |next| next.at);
        let bound = |length: Nanos| start.saturating_add(length.0);
        self.end = end.clamp(bound(SLICE_MIN), bound(SLICE_MAX));
        self.granted = account.share(self.end - start);
        account.balance = account.balance.saturating_add(signed(self.granted));
        self.asleep = false;
    }

    /// Ends its window sooner where its guest has begun to publish deadlines.
    fn listen(&mut self, now: u64, threads: &mut impl Threads) {
        let Some(next) = threads.next(self.index, now) else { return };
        (self.silent, self.live) = (false, next.live);
        let end = next.at.max(now.saturating_add(SLICE_MIN.0));
        if end < self.end {
            self.end = end;
            let most = self.account.share(end - now);
            (self.granted, self.account.balance) = (most, self.account.balance.min(signed(most)));
        }
    }
}

/// The vCPUs of a CPU.
#[derive(Debug)]
pub struct Ordered {
    cpu: usize,
    seats: Vec<Seat>,
    /// Who is there, by the ends of their windows.
    order: Vec<usize>,
    /// The last look, and when the next window, or the calm time, ends.
    last: u64,
    end: u64,
    calm: bool,
    /// Length of the last calm time, ns.
    calm_length: u64,
    /// The shortest period, ns.
    shortest: u64,
    /// What vCPUs did not want, and nobody else has had, ns.
    unused: u64,
    windows: u64,
    looks: u64,
    /// What a look takes, ns, over the last few; and what the last one took.
    cost: u64,
    took: u64,
}

impl Ordered {
    /// Of the vCPUs of this CPU (as the planner counts), which are at [`Place::Entitled`] now. Each has the tally that
    /// `tally` gives.
    pub fn new(settled: &Settled, cpu: usize, now: u64, tally: impl Fn(ThreadId) -> Arc<Tally>) -> Self {
        let alone = settled.cpus.len() == 1;
        let here = |reserved: &Reserved| alone || reserved.home.is_some_and(|home| usize::try_from(home) == Ok(cpu));
        let seats: Vec<Seat> = settled
            .vcpus
            .iter()
            .enumerate()
            .filter(|(_, reserved)| here(reserved))
            .map(|(index, reserved)| Seat::new(index, reserved, now, tally(reserved.id)))
            .collect();
        let shortest = seats.iter().map(|seat| seat.account.period).min().unwrap_or(CALM_MAX).min(CALM_MAX);
        Self {
            cpu,
            order: Vec::with_capacity(seats.len()),
            seats,
            last: now,
            end: now,
            calm: false,
            calm_length: shortest,
            shortest,
            unused: 0,
            windows: 0,
            looks: 0,
            cost: 0,
            took: 0,
        }
    }

    /// Takes each vCPU's first reading: what it had before is not counted. By who looks after them from `now` on: what
    /// they take between this and the first look is charged to them.
    pub fn begin(&mut self, now: u64, threads: &mut impl Threads) {
        for seat in &mut self.seats {
            seat.account.begin(now, threads.read(seat.index));
            seat.end = now;
        }
        (self.last, self.end) = (now, now);
    }

    /// Goes on where `old` ends: vCPUs of both keep their place, their debt, their period and their window. One with
    /// another bandwidth has it from now on. To be called after [`Self::begin`].
    pub fn take_over(&mut self, old: &Ordered) {
        let now = self.last;
        for seat in &mut self.seats {
            let is_of = |before: &&Seat| before.account.id == seat.account.id && !before.account.gone;
            let Some(before) = old.seats.iter().find(is_of) else { continue };
            let left = before.end.saturating_sub(now);
            let given = before.account.share(left);
            seat.account.take_over(&before.account, given);
            if old.calm {
                // It begins a window now.
                seat.account.balance = -signed(before.account.ahead(given));
                continue;
            }
            (seat.end, seat.silent, seat.live) = (before.end, before.silent, before.live);
            (seat.wants, seat.greedy) = (before.wants, before.greedy);
            seat.spare = before.spare.min(seat.account.share(SLICE_MAX.0));
            let more = signed(seat.account.share(left)) - signed(given);
            seat.granted = before.granted.saturating_add_signed(more);
            seat.account.balance = seat.account.balance.saturating_add(more);
        }
        if old.cpu == self.cpu {
            (self.windows, self.looks, self.cost, self.took) = (old.windows, old.looks, old.cost, old.took);
            self.unused = old.unused;
        }
    }

    /// Goes on where a plan of another kind ends: vCPUs of both keep their place, their debt and their period.
    pub(crate) fn keep(&mut self, old: &Wrapped) {
        for seat in &mut self.seats {
            if let Some(before) = old.account(seat.account.id) {
                seat.account.take_over(before, 0);
                seat.account.balance = seat.account.balance.min(0);
            }
        }
    }

    /// The account of one of its vCPUs, and what it has been given of the time after `now`, ns.
    pub(crate) fn account(&self, id: ThreadId, now: u64) -> Option<(&Account, u64)> {
        let seat = self.seats.iter().find(|seat| seat.account.id == id && !seat.account.gone)?;
        Some((&seat.account, seat.account.share(seat.end.saturating_sub(now))))
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.seats.is_empty()
    }

    /// Says how long a step took, ns.
    pub fn took(&mut self, ns: u64) {
        self.took = ns;
        self.cost = (3 * self.cost + ns) / 4;
    }

    /// Does what is due. Returns when the pacer is to come again.
    pub fn step(&mut self, now: u64, threads: &mut impl Threads) -> u64 {
        self.looks += 1;
        if self.seats.is_empty() {
            return NEVER;
        }
        if self.calm && now < self.end {
            return self.end;
        }
        // For whom at each place nobody was in the way, and for how long somebody was.
        let mut busy = [0_u64; 2];
        for seat in self.seats.iter_mut().filter(|seat| !seat.account.gone) {
            (seat.was, seat.ran) = (seat.account.place, false);
            let ran = seat.observe(now, threads);
            busy[1] = busy[1].saturating_add(ran);
            busy[0] = busy[0].saturating_add(if seat.was == Place::Planned { ran } else { 0 });
        }
        self.settle();
        let passed = now.saturating_sub(self.last).saturating_sub(self.took);
        self.last = now;
        if self.roll(now, threads) {
            return self.rest(now, threads);
        }
        for seat in &mut self.seats {
            // Behind bulk it may not have run although it wanted to.
            let busy = match seat.was {
                Place::Planned => busy[0],
                Place::Entitled => busy[1],
                Place::Beyond => passed,
            };
            let [most, greedy] = IDLE_QUARTERS;
            let least = passed / 4 * if seat.greedy { greedy } else { most };
            seat.doze(now, busy, passed > busy.saturating_add(IDLE.max(least)), threads);
        }
        let mut holds = self.choose(now);
        // What sleepers may still want matters where it cuts the time short; and where the order holds no longer than
        // the next look takes, a vCPU that waits unseen must not stand behind one with a later deadline.
        self.end = self.seats.iter().filter(|seat| !seat.account.gone).map(|seat| seat.end).min().unwrap_or(NEVER);
        let unsure = |seat: &Seat| seat.unsure && seat.need > 0 && (seat.idle || holds < FLOOR);
        if holds < self.end.saturating_sub(now) && self.seats.iter().any(unsure) {
            self.seats.iter_mut().filter(|seat| unsure(seat)).for_each(|seat| seat.make_sure(now, threads));
            holds = self.choose(now);
        }
        self.lend(holds);
        self.place(threads);
        self.due(now, holds)
    }

    /// What a look that need not be at once waits for, ns.
    fn patience(&self) -> u64 {
        self.cost.saturating_mul(COST_FACTOR)
    }

    /// Lets vCPUs go on beyond their shares where nobody misses the time: each for what it did not want itself, then
    /// the one that is due first and wants the CPU for what others did not want.
    fn lend(&mut self, holds: u64) {
        let unhurried = holds >= 2 * FLOOR.max(self.patience());
        let Self { seats, order, unused, .. } = self;
        seats.iter_mut().for_each(|seat| seat.lent = 0);
        let mut others = *unused;
        for at in order.iter().filter(|_| unhurried) {
            let Some(seat) = seats.get_mut(*at) else { continue };
            let own = seat.spare.min(seat.account.share(LENT));
            seat.lent = if own >= FLOOR { own } else { 0 };
            if seat.wants && others >= WORTH_A_TURN {
                seat.lent += std::mem::take(&mut others);
            }
        }
    }

    /// Has those who took what others did not want, or could not be stopped in time, pay with it.
    fn settle(&mut self) {
        let Self { seats, order, unused, .. } = self;
        let given_up: u64 = seats.iter_mut().map(|seat| std::mem::take(&mut seat.unused)).sum();
        *unused = unused.saturating_add(given_up).min(UNUSED_MAX);
        for at in order.iter() {
            *unused -= seats.get_mut(*at).map_or(0, |seat| seat.pay(*unused));
        }
    }

    /// Begins the windows that are due. True if nothing needs a plan any more.
    fn roll(&mut self, now: u64, threads: &mut impl Threads) -> bool {
        let calm = std::mem::take(&mut self.calm);
        let mut rolled = false;
        for seat in self.seats.iter_mut().filter(|seat| !seat.account.gone) {
            if calm {
                seat.end = now;
            }
            if now >= seat.end {
                seat.roll(now, threads);
                rolled = true;
            } else if seat.silent {
                seat.listen(now, threads);
            }
        }
        self.windows += u64::from(rolled);
        let quiet = self.seats.iter().all(|seat| seat.quiet && !seat.live || seat.account.gone);
        if !quiet {
            self.calm_length = self.shortest;
        }
        quiet
    }

    /// Puts all in the order of their deadlines, and works out the slack of those that are after each.
    fn line_up(&mut self, now: u64) {
        let Self { seats, order, .. } = self;
        order.clear();
        order.extend((0..seats.len()).filter(|at| seats.get(*at).is_some_and(|seat| !seat.account.gone)));
        order.sort_unstable_by_key(|at| seats.get(*at).map_or(u64::MAX, |seat| seat.end));
        // What is wanted up to the deadline of each: what is left to all up to it, and what they are granted until
        // then.
        let (mut wanted, mut rate, mut before) = (0_u64, 0_u64, now);
        for at in order.iter() {
            let Some(seat) = seats.get_mut(*at) else { continue };
            let granted = rate.saturating_mul(seat.end.saturating_sub(before)) / RATE;
            wanted = wanted.saturating_add(granted).saturating_add(seat.need);
            (rate, before) = (rate.saturating_add(seat.rate), seat.end);
            // Who wants nothing more has time.
            let slack = seat.end.saturating_sub(now).saturating_sub(wanted);
            seat.after = if seat.need > 0 { slack } else { u64::MAX };
        }
        let mut least = u64::MAX;
        for at in order.iter().rev() {
            let Some(seat) = seats.get_mut(*at) else { continue };
            (seat.after, least) = (least, least.min(seat.after));
        }
    }

    /// Finds who is to be planned, and returns for how long that holds, ns.
    fn choose(&mut self, now: u64) -> u64 {
        self.line_up(now);
        let Self { seats, order, .. } = self;
        seats.iter_mut().for_each(|seat| seat.next = false);
        let line = || order.iter().filter_map(|at| seats.get(*at)).filter(|seat| seat.need > 0);
        let Some(first) = line().next().map(|seat| seat.end.saturating_sub(now)) else { return NEVER };
        let (mut best, mut holds, mut together) = (1, 0, 0_u64);
        for (number, seat) in (1_usize..).zip(line()) {
            together = together.saturating_add(seat.need);
            let within = if number == 1 { u64::MAX } else { first.saturating_sub(together) };
            let reach = within.min(seat.after);
            if number == 1 || reach > holds {
                (best, holds) = (number, reach);
            }
            if holds >= first || within == 0 {
                break;
            }
        }
        // No number of them does for sure: who wants the CPU is not to wait for who may, unless nobody is in its way.
        let mut eager = (1..).zip(line()).filter(|(_, seat)| seat.wants);
        if let (true, Some((number, _))) = (holds < FLOOR, eager.next()) {
            best = if eager.next().is_some() { number } else { (number - 1).max(1) };
        }
        for at in order.iter() {
            if let Some(seat) = seats.get_mut(*at).filter(|seat| best > 0 && seat.need > 0) {
                seat.next = true;
                best -= 1;
            }
        }
        holds
    }

    /// Moves each vCPU to its place, the earliest deadline first: FIFO appends a thread that is raised to those of its
    /// priority.
    fn place(&mut self, threads: &mut impl Threads) {
        let Self { seats, order, .. } = self;
        for at in order.iter() {
            let Some(seat) = seats.get_mut(*at) else { continue };
            let place = if seat.left() <= seat.account.grain {
                Place::Beyond
            } else if seat.next {
                Place::Planned
            } else {
                Place::Entitled
            };
            seat.account.move_to(seat.index, place, threads);
        }
    }

    /// When to look again, where the order holds for so long.
    fn due(&self, now: u64, holds: u64) -> u64 {
        let there = || self.seats.iter().filter(|seat| !seat.account.gone);
        let patience = self.patience();
        let alone = there().filter(|seat| seat.next).count() == 1;
        let used_up = |seat: &Seat| {
            let runs = seat.ran || alone && seat.next && !seat.asleep;
            let least = if runs { seat.account.grain } else { seat.account.grain.max(patience) };
            now.saturating_add(self.cost).saturating_add(seat.left().max(least))
        };
        let awake = there().filter(|seat| seat.account.place != Place::Beyond && seat.wants).map(used_up);
        let bounds = awake.chain([self.end, now.saturating_add(holds.max(FLOOR).max(patience))]);
        bounds.min().unwrap_or(self.end)
    }

    /// No plan for some time. Returns when it ends.
    fn rest(&mut self, now: u64, threads: &mut impl Threads) -> u64 {
        let ran = self.seats.iter().any(|seat| seat.ran);
        self.calm = true;
        self.calm_length = if ran { self.shortest } else { (self.calm_length * 2).min(CALM_MAX) };
        self.end = now.saturating_add(self.calm_length);
        for seat in self.seats.iter_mut().filter(|seat| !seat.account.gone) {
            seat.end = self.end;
            seat.granted = seat.account.share(self.calm_length);
            seat.account.balance = signed(seat.granted);
            seat.account.move_to(seat.index, Place::Planned, threads);
        }
        self.end
    }

    /// Adds the present state to what is shown.
    pub fn show(&self, now: u64, into: &mut Snapshot) {
        into.span(now, self.last, self.end, self.calm);
        into.slices += self.windows;
        into.looks += self.looks;
        for seat in self.seats.iter().filter(|seat| !seat.account.gone) {
            into.stand(seat.account.standing());
        }
        let mut start = self.last;
        let line = self.order.iter().filter_map(|at| self.seats.get(*at));
        for seat in line.filter(|seat| !self.calm && seat.need > 0) {
            let end = start.saturating_add(seat.need);
            into.plan(Planned { cpu: self.cpu, id: seat.account.id, start, end });
            start = end;
        }
    }
}
