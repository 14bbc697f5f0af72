//! Plan for one CPU: its vCPUs run in the order of their deadlines (EDF). Pure: readings and the clock come in, changes
//! of place go out.
//!
//! No vCPU of this plan can migrate, so time does not have to be cut into slices that all vCPUs share. Earliest
//! deadline first keeps every set of shares that fits (Liu and Layland 1973; for servers: Spuri and Buttazzo,
//! "Scheduling aperiodic tasks in dynamic priority systems", 1996), and a deadline of one vCPU costs the others
//! nothing. Each vCPU has *windows* that follow each other without a gap. A window ends at the next deadline that the
//! guest publishes, or else at the end of the vCPU's period; it lasts 250 us to 100 ms. At the start of a window the
//! vCPU is granted its *share*: its bandwidth times the window's length, to be used before the window ends. The unused
//! rest is taken back, and overuse is paid back later. So by each of its own deadlines a vCPU has had as much time as
//! DP-WRAP would have given it.
//!
//! **Two places for an order.** SCHED_FIFO has no order by deadline among threads of one priority. So the first vCPUs
//! in the order are at [`Place::Planned`], and the others with time left are at [`Place::Entitled`]. The *slack* of a
//! vCPU is the time that vCPUs behind it may run before it misses its deadline: the time to its deadline, less what it
//! and all vCPUs ahead of it may still need until then, including their grants of later windows. Either the vCPU with
//! the earliest deadline alone is planned, or as many as can all finish before the earliest deadline in any order. We
//! choose the number whose order stays valid longest. The pacer checks again when that time is over, usually at the
//! next end of a window.
//!
//! **Checks** (`looks`). A vCPU that ran since the last check is checked again when its share may be used up. A vCPU
//! that did not run, although none of them ran for a quarter of the time (three quarters, if it used up its last
//! share), was asleep. A shorter idle time proves nothing, because interrupts may have taken it. The kernel is asked
//! whether the vCPU sleeps, at most once a window and where the answer matters. What a sleeping vCPU may still need
//! shrinks with the time that is left (DP-Fair, for sporadic tasks). A vCPU that wakes is noticed at the next check.
//! Until then it may use more than its share of the others' slack, or of [`FLOOR`].
//!
//! **Unused time.** A vCPU keeps its unused time, up to its share of 100 ms. This pays for its overuse. Where the slack
//! of all is long ([`EdfCpu::lend`]), the vCPU is checked only when that saved time is used up as well: an application
//! whose job comes in one piece is not interrupted by a check, and does not wait for its next grant. Unused time beyond
//! that goes to a pool of at most [`UNUSED_MAX`], for vCPUs that have used up their shares: the earliest deadline
//! first, all of them ahead of bulk. What neither covers, they pay back. So in the long run all vCPUs together have no
//! more than their bandwidth, and bulk has the rest.
//!
//! **Calm.** If no guest has live deadlines and no vCPU used an eighth of its share in its last window, all vCPUs are
//! at [`Place::Planned`] with one check in each shortest period. If no vCPU ran at all, the time between checks
//! doubles, up to [`CALM_MAX`]. The price: a vCPU that begins to spin in a calm time delays all others until the next
//! check, once.
//!
//! Units: ns of CLOCK_MONOTONIC. Nothing is allocated after [`EdfCpu::new`].

use std::sync::Arc;

use ontime_plan::Nanos;
use ontime_plan::dpwrap::{SLICE_MAX, SLICE_MIN};
use ontime_tenants::ThreadId;

use crate::admit::{Reserved, Settled};
use crate::model::{NEVER, Place, Planned, Snapshot, Tally, Threads};
use crate::policy::account::{Account, CALM_MAX, UNUSED_MAX, signed};

/// The least time between two checks, ns, unless the next one is certain to be needed.
pub const FLOOR: u64 = 250_000;
/// Such a check also waits for this many times the duration of a check.
const COST_FACTOR: u64 = 4;
/// A vCPU that did not run is taken to sleep if no vCPU ran for more than this time, ns, and for more than a part of the
/// time since the last check. Interrupts may have taken less.
const IDLE: u64 = 20_000;
/// That part in quarters: usually, and after the vCPU used up its share.
const IDLE_QUARTERS: [u64; 2] = [1, 3];
/// A vCPU may use its saved time at once up to its share of this time, ns.
const LENT: u64 = 20_000_000;
/// The pool of unused time is given away in pieces of at least this length, ns: a piece costs a check and two changes
/// of place.
const WORTH_A_TURN: u64 = 1_000_000;
/// A bandwidth of one CPU, as a rate.
const RATE: u64 = 1 << 20;

/// One vCPU of this plan.
#[derive(Debug)]
struct Seat {
    /// The number by which [`Threads`] knows the vCPU.
    index: usize,
    account: Account,
    /// The vCPU's bandwidth in parts of [`RATE`], rounded up.
    rate: u64,
    /// The end of the present window, and the time granted for it, ns.
    end: u64,
    granted: u64,
    /// Saved unused time, ns, which pays for overuse; and unused time beyond that limit, until it goes to the CPU's
    /// pool.
    spare: u64,
    unused: u64,
    /// How far the balance may go below 0 until the next check, ns.
    lent: u64,
    /// Whether the guest publishes no deadlines; whether one of its deadline tasks has run lately.
    silent: bool,
    live: bool,
    /// Whether the last window gave no reason for a plan.
    quiet: bool,
    /// Whether the vCPU was seen running at the last check, and its place until then.
    ran: bool,
    was: Place,
    /// Whether the vCPU is assumed to be runnable; whether it used up the share of its last window; whether it is known
    /// to sleep.
    wants: bool,
    greedy: bool,
    asleep: bool,
    /// Whether only the kernel knows if the vCPU sleeps or waits; whether the CPU was idle long enough for sleep to be
    /// likely; how long vCPUs ran that it would have waited for, ns.
    unsure: bool,
    idle: bool,
    behind: u64,
    /// What the vCPU may still need of its window, ns; the least slack of the vCPUs behind it; whether it is to be
    /// planned.
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

    /// Applies the bandwidth that the guest claimed from its offer.
    fn hear(&mut self, now: u64, threads: &mut impl Threads) {
        if let Some(more) = self.account.hear(self.index, now, self.end, threads) {
            self.granted = self.granted.saturating_add_signed(more);
            self.rate = self.account.share(RATE) + 1;
        }
    }

    /// Reads the vCPU's CPU time; returns how long it ran within its share since the last check, ns.
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

    /// Reduces the vCPU's debt by at most `most` ns; returns by how much.
    fn pay(&mut self, most: u64) -> u64 {
        let paid = self.account.balance.min(0).unsigned_abs().min(most);
        self.account.balance += signed(paid);
        paid
    }

    /// Saves unused time, up to the vCPU's share of 100 ms; the rest is for the pool.
    fn save(&mut self, ns: u64) {
        let spare = self.spare.saturating_add(ns);
        self.spare = spare.min(self.account.share(SLICE_MAX.0));
        self.unused = self.unused.saturating_add(spare - self.spare);
    }

    /// The most that the vCPU may run until the next check, ns.
    fn left(&self) -> u64 {
        u64::try_from(self.account.balance.saturating_add(signed(self.lent))).unwrap_or(0)
    }

    /// Decides whether the vCPU sleeps. Since the last check, vCPUs at its place or ahead of it ran for `busy` ns.
    /// `idle`: for long enough none of them ran, so that the vCPU may sleep. The kernel is asked only about a vCPU that
    /// was assumed to be runnable, because the next check depends on that.
    fn doze(&mut self, now: u64, busy: u64, idle: bool, threads: &mut impl Threads) {
        let may = !self.ran && idle;
        self.idle = idle;
        // A vCPU that was at `Beyond`, behind bulk, may have waited all the time.
        let ask = self.wants && self.was != Place::Beyond;
        // `idle` alone proves nothing: interrupt threads may have run while the vCPU waited, and the mistake would
        // stand until its window ends.
        self.asleep = may && (self.asleep || ask && threads.sleeps(self.index));
        self.unsure = !self.ran && !self.asleep && !ask;
        self.wants = self.ran || self.was == Place::Beyond || self.wants && !self.asleep;
        self.behind = busy;
        self.reckon(now);
    }

    /// Asks the kernel whether the vCPU sleeps, if `doze` left that open.
    fn make_sure(&mut self, now: u64, threads: &mut impl Threads) {
        if std::mem::take(&mut self.unsure) {
            self.asleep = threads.sleeps(self.index);
            // It does not sleep, so it waits for a CPU, although no check has seen it run.
            self.wants = !self.asleep;
            self.reckon(now);
        }
    }

    /// Updates what the vCPU may still need of its window.
    fn reckon(&mut self, now: u64) {
        let mut need = u64::try_from(self.account.balance).unwrap_or(0);
        if self.asleep {
            // It may have woken since, and may have waited while the others ran.
            let left = self.end.saturating_sub(now).saturating_add(self.behind);
            need = need.min(self.account.bandwidth.of(Nanos(left)).0);
            if !self.silent {
                self.forfeit(signed(need));
            }
        }
        self.need = if self.account.is_used_up() { 0 } else { need };
    }

    /// Takes back what is left of the grant beyond `most`, and saves it as unused time.
    fn forfeit(&mut self, most: i64) {
        let account = &mut self.account;
        let less = account.balance.saturating_sub(most).max(0);
        account.balance -= less;
        self.save(less.unsigned_abs());
    }

    /// Whether the vCPU used more than 1/`part` of its grant.
    fn used_over(&self, part: u64) -> bool {
        let used = signed(self.granted).saturating_sub(self.account.balance);
        used.saturating_mul(signed(part)) > signed(self.granted)
    }

    /// Whether this vCPU needs no plan.
    fn is_quiet(&self) -> bool {
        !self.live && !self.used_over(8) && self.account.balance >= 0 && self.account.place != Place::Beyond
    }

    /// Begins the vCPU's next window.
    fn roll(&mut self, now: u64, threads: &mut impl Threads) {
        let start = if now.saturating_sub(self.end) < SLICE_MIN.0 { self.end } else { now };
        let next = threads.next(self.index, start);
        (self.silent, self.live) = (next.is_none(), next.is_some_and(|next| next.live));
        self.greedy = self.account.place == Place::Beyond || self.account.is_used_up();
        self.quiet = self.granted > 0 && self.is_quiet();
        // Unused time is taken back, except for the grain that was left when the vCPU went to `Beyond`.
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

    /// Shortens the vCPU's window if its guest has begun to publish deadlines.
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

/// The vCPUs of one CPU.
#[derive(Debug)]
pub struct EdfCpu {
    cpu: usize,
    seats: Vec<Seat>,
    /// Indices of `seats`, sorted by the ends of their windows; ended threads are left out.
    order: Vec<usize>,
    /// Time of the last check; end of the next window or of the calm time.
    last: u64,
    end: u64,
    calm: bool,
    /// Length of the last calm time, ns.
    calm_length: u64,
    /// The shortest period, ns.
    shortest: u64,
    /// Pool of unused time, ns, which no vCPU has had yet.
    unused: u64,
    windows: u64,
    looks: u64,
    /// Duration of a check, ns: a moving average, and the last one.
    cost: u64,
    took: u64,
}

impl EdfCpu {
    /// A plan for the vCPUs of this CPU (by the planner's numbers), which are at [`Place::Entitled`] now. `tally` gives
    /// each vCPU its counters.
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

    /// Takes each vCPU's first reading; earlier CPU time is not counted. The pacer that keeps the shares from `now` on
    /// calls this: what vCPUs use between this call and the first check is charged to them.
    pub fn begin(&mut self, now: u64, threads: &mut impl Threads) {
        for seat in &mut self.seats {
            seat.account.begin(now, threads.read(seat.index));
            seat.end = now;
        }
        (self.last, self.end) = (now, now);
    }

    /// Continues the plan `old`: vCPUs of both keep their place, debt, period and window. A changed bandwidth applies
    /// from now on. To be called after [`Self::begin`].
    pub fn take_over(&mut self, old: &EdfCpu) {
        let now = self.last;
        for seat in &mut self.seats {
            let is_of = |before: &&Seat| before.account.id == seat.account.id && !before.account.gone;
            let Some(before) = old.seats.iter().find(is_of) else { continue };
            let left = before.end.saturating_sub(now);
            let given = before.account.share(left);
            seat.account.take_over(&before.account, given);
            if old.calm {
                // Its first window of the new plan begins now.
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

    /// Continues a plan by slices: vCPUs of both keep their place, debt and period. `old` gives a vCPU's account there.
    pub(crate) fn take_over_accounts<'a>(&mut self, old: impl Fn(ThreadId) -> Option<&'a Account>) {
        for seat in &mut self.seats {
            if let Some(before) = old(seat.account.id) {
                seat.account.take_over(before, 0);
                seat.account.balance = seat.account.balance.min(0);
            }
        }
    }

    /// The account of one of the vCPUs, and its share of the time from `now` to the end of its window, ns.
    pub(crate) fn account(&self, id: ThreadId, now: u64) -> Option<(&Account, u64)> {
        let seat = self.seats.iter().find(|seat| seat.account.id == id && !seat.account.gone)?;
        Some((&seat.account, seat.account.share(seat.end.saturating_sub(now))))
    }

    /// Records how long a step took, ns.
    pub fn took(&mut self, ns: u64) {
        self.took = ns;
        self.cost = (3 * self.cost + ns) / 4;
    }

    /// Does what is due. Returns when the pacer is to check again.
    pub fn step(&mut self, now: u64, threads: &mut impl Threads) -> u64 {
        self.looks += 1;
        if self.seats.is_empty() {
            return NEVER;
        }
        if self.calm && now < self.end {
            return self.end;
        }
        // How long vCPUs ran that delay a vCPU at `Planned` (0) or at `Entitled` (1).
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
            // Behind bulk it may not have run although it was runnable.
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
        // Whether vCPUs sleep matters in two cases: where their need shortens the time for which the order is valid;
        // and where that time is too short for another check, so that a waiting vCPU must not be behind one with a
        // later deadline.
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

    /// The least delay, ns, of a check that is not urgent.
    fn patience(&self) -> u64 {
        self.cost.saturating_mul(COST_FACTOR)
    }

    /// Lets vCPUs run beyond their shares where no deadline is at risk: each for its own saved time, then the runnable
    /// vCPU with the earliest deadline for the pool.
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

    /// Pays debts from the pool of unused time, the earliest deadline first.
    fn settle(&mut self) {
        let Self { seats, order, unused, .. } = self;
        let given_up: u64 = seats.iter_mut().map(|seat| std::mem::take(&mut seat.unused)).sum();
        *unused = unused.saturating_add(given_up).min(UNUSED_MAX);
        for at in order.iter() {
            *unused -= seats.get_mut(*at).map_or(0, |seat| seat.pay(*unused));
        }
    }

    /// Begins the windows that are due. True if no vCPU needs a plan any more.
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

    /// Sorts the vCPUs by deadline, and computes for each the least slack of those behind it.
    fn line_up(&mut self, now: u64) {
        let Self { seats, order, .. } = self;
        order.clear();
        order.extend((0..seats.len()).filter(|at| seats.get(*at).is_some_and(|seat| !seat.account.gone)));
        order.sort_unstable_by_key(|at| seats.get(*at).map_or(u64::MAX, |seat| seat.end));
        // CPU time needed up to the deadline of each vCPU: what all up to it may still need, and their grants until
        // then.
        let (mut wanted, mut rate, mut before) = (0_u64, 0_u64, now);
        for at in order.iter() {
            let Some(seat) = seats.get_mut(*at) else { continue };
            let granted = rate.saturating_mul(seat.end.saturating_sub(before)) / RATE;
            wanted = wanted.saturating_add(granted).saturating_add(seat.need);
            (rate, before) = (rate.saturating_add(seat.rate), seat.end);
            // A vCPU that needs nothing more misses nothing.
            let slack = seat.end.saturating_sub(now).saturating_sub(wanted);
            seat.after = if seat.need > 0 { slack } else { u64::MAX };
        }
        let mut least = u64::MAX;
        for at in order.iter().rev() {
            let Some(seat) = seats.get_mut(*at) else { continue };
            (seat.after, least) = (least, least.min(seat.after));
        }
    }

    /// Chooses the vCPUs to be planned, and returns for how long that choice is valid, ns.
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
        // No choice stays valid until the next check. Then vCPUs up to the first runnable one are planned, so that it
        // does not wait for vCPUs that only may need the CPU. If it is the only runnable one, it may stay entitled: no
        // other delays it.
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

    /// Moves each vCPU to its place, the earliest deadline first: when a thread is raised, SCHED_FIFO appends it to the
    /// threads of its new priority.
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

    /// When to check again, if the order is valid for `holds` ns.
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

    /// Begins a calm time, without a plan. Returns when it ends.
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

    /// Adds the present state to the snapshot.
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
