//! Plan for one CPU: its vCPUs run in the order of their deadlines (EDF). Pure: readings and the clock come in, changes
//! of place go out.
//!
//! No vCPU of this plan can migrate, so time does not have to be cut into slices that all vCPUs share. Earliest
//! deadline first keeps every set of shares that fits (Liu and Layland 1973; for servers: Spuri and Buttazzo,
//! "Scheduling aperiodic tasks in dynamic priority systems", 1996), and a deadline of one vCPU costs the others
//! nothing. Each vCPU has *windows* that follow each other without a gap. A window ends at the next deadline that the
//! guest publishes, or else at the end of the vCPU's period; it lasts a period at most (since its vCPU woke, if that
//! slept), and 250 us to 100 ms. At the start of a window the vCPU is granted its *share*: its bandwidth times the
//! window's length, to be used before the window ends. The unused rest is taken back, and overuse is paid back later.
//! So by each of its own deadlines a vCPU has had as much time as DP-WRAP would have given it.
//!
//! **Two places for an order.** SCHED_FIFO has no order by deadline among threads of one priority. So the first vCPUs
//! in the order are at [`Place::Planned`], and the others with time left are at [`Place::Entitled`]. The *slack* of a
//! vCPU is the time that others may run before it misses its deadline: the time to its deadline, less what it and all
//! vCPUs with earlier deadlines may still need until then, including their grants of later windows. The vCPUs of one
//! place may run in any order if each one's slack covers what those with later deadlines may still need there, and the
//! checks of the order that may come until its deadline; otherwise they may for as long as the least slack that does
//! not. (A sleeping vCPU counts as if it needed the time until the soonest check, which finds that it has woken.) We
//! choose the number of planned vCPUs whose order stays valid longest, and among equals the one that changes the fewest
//! places. The pacer checks again when that time is over, usually at the next end of a window.
//!
//! Where that makes the order valid for longer, a runnable vCPU *leads* the entitled ones: SCHED_FIFO puts a thread
//! that is lowered ahead of those of its new priority, and it stays there until it sleeps. (The scheduler of back end
//! `sched_ext` appends it instead.) So there are three groups in the order of deadlines, and the planned vCPUs preempt
//! the leader when they wake. If no choice is valid for as long as a check is worth, as many vCPUs are planned as may
//! run in any order, and at least all ahead of the first runnable one, which leads. So this one runs, or one with an
//! earlier deadline that has woken, as the theorems require, and no check is needed for that.
//!
//! **Checks.** A vCPU that ran since the last check is checked again when its share may be used up. A vCPU
//! that did not run, although none of them ran for a quarter of the time (three quarters, if it used up its last
//! share), is likely to sleep. The idle time proves nothing, because interrupts may have taken it: the kernel is asked,
//! where the answer matters. A vCPU that waits stays awake until it runs, so it is asked about once. What a sleeping
//! vCPU may still need shrinks with the time that is left (DP-Fair, for sporadic tasks); without deadlines, its window
//! moves on instead, as far as its rest needs (as the deadline of a constant-bandwidth server: Abeni and Buttazzo,
//! 1998), and the next one begins where it would have ended. A vCPU that wakes is noticed at the next check, which
//! comes before it can use up the others' *spare* time: the least slack that is left when all vCPUs of a place run in
//! the worst order.
//!
//! **Unused time.** A vCPU keeps its unused time, up to its share of 100 ms. This pays for its overuse. Where the slack
//! of all is long ([`EdfCpu::allow_overuse`]), the vCPU is checked only when that saved time is used up as well: an
//! application whose job comes in one piece is not interrupted by a check, and does not wait for its next grant. Unused
//! time beyond that goes to a pool of at most [`UNUSED_MAX`], for vCPUs that have used up their shares: the earliest
//! deadline first, all of them ahead of bulk. What neither covers, they pay back. So in the long run all vCPUs together
//! have no more than their bandwidth, and bulk has the rest.
//!
//! **Further windows.** One window in each period of a vCPU, or in each 100 ms of a longer period, was admitted with
//! the pacers' time. A guest that publishes more deadlines, or nonsense, has more windows. The checks that these cost
//! are paid from the vCPU's unused time. While more than [`FURTHER_MAX`] windows are not paid, its windows last a
//! period at least, also up to a later deadline. So no guest's deadlines take time from other vCPUs. A job that comes
//! at any time needs no further window if its vCPU was known to sleep: the present window is prolonged.
//!
//! **Checks in vain.** Of the checks in a window that come because a vCPU may have used up its share, the first was
//! admitted. Together the further ones take at least their own duration from its share, so one that runs for moments
//! only (its guest's timer, or bad will) causes no more of them than it has time. What it runs counts as well, also
//! later: one that others preempt has its share in the end. Where others have time to spare, checks on a vCPU that ran
//! for a moment also keep a distance.
//!
//! **Calm.** If no guest has deadlines and no vCPU used an eighth of its share in its last window, all vCPUs are at
//! [`Place::Planned`] with one check in each shortest period. If no vCPU ran at all, the time between checks doubles,
//! up to [`CALM_MAX`]. The price: a vCPU that begins to spin in a calm time delays all others until the next check,
//! once. So there is no calm time while a guest has deadline tasks, also sleeping ones: they may wake together.
//!
//! **Rest.** If no vCPU ran for the shortest period, and all are known to sleep, their windows do not have to end. A
//! job that comes later has its deadline a period later at least. So each check lets all windows begin anew, and the
//! next check comes before those that wake could use up the others' spare time.
//!
//! Units: ns of CLOCK_MONOTONIC. Nothing is allocated after [`EdfCpu::new`].

use std::sync::Arc;

use ontime_plan::Nanos;
use ontime_plan::dpwrap::{SLICE_MAX, SLICE_MIN};
use ontime_tenants::ThreadId;

use crate::admit::{Reservations, Reserved};
use crate::model::{NEVER, Next, Place, Segment, Snapshot, Tally, Threads};
use crate::policy::account::{Account, CALM_MAX, POOL_PIECE_MIN, UNUSED_MAX, signed};

/// The least time between two checks, ns, unless the next one is certain to be needed.
pub(crate) const CHECK_DELAY_MIN: u64 = 250_000;
/// A check for which it may be too early waits for this many times the duration of a check.
const COST_FACTOR: u64 = 4;
/// So does a check only because the order of deadlines is not certain any longer. Such checks were not admitted: they
/// take at most a seventeenth of the CPU, about the default reserve. Where little slack is left they would otherwise
/// leave still less.
const ORDER_COST_FACTOR: u64 = 16;
/// While a planned vCPU runs, they take half of that: they change something only if it sleeps before it has used its
/// share, and what it leaves then is time for the others.
const RUNS_COST_FACTOR: u64 = 32;
/// A vCPU that did not run is taken to sleep if no vCPU ran for more than this time, ns, and for more than a part of
/// the time since the last check. Interrupts may have taken less.
const IDLE_MIN: u64 = 20_000;
/// That part in quarters: usually, and after the vCPU used up its share.
const IDLE_QUARTERS: [u64; 2] = [1, 3];
/// A vCPU may use its saved time at once up to its share of this time, ns.
const OVERUSE_TIME: u64 = 20_000_000;
/// How many windows beyond one in a period a vCPU may have before it has paid for them.
const FURTHER_MAX: u64 = 4;
/// Checks in a window: at its end, and when the share is used up.
const WINDOW_CHECKS: u64 = 2;
/// Of how many vCPUs the kernel is asked in a check whether they sleep, before a rest.
const REST_ASKS: usize = 4;
/// A late check is expected again; what is expected shrinks by this part with each check.
const LATE_FORGOTTEN: u64 = 16;
/// A bandwidth of one CPU, as a rate.
const RATE: u64 = 1 << 20;

/// What a vCPU's guest publishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Deadlines {
    /// No deadlines.
    None,
    /// Deadlines of tasks that all sleep.
    Asleep,
    /// Deadlines, and one of the tasks has run lately.
    Live,
}

impl Deadlines {
    fn of(next: Option<Next>) -> Self {
        match next {
            None => Self::None,
            Some(Next { live: false, .. }) => Self::Asleep,
            Some(Next { live: true, .. }) => Self::Live,
        }
    }
}

/// Whether a vCPU sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sleep {
    /// It was seen running, or nothing says that it sleeps.
    Awake,
    /// The kernel did not say that it does, and it has not run since: so it waits. It is asked again where the CPU was
    /// idle, because there may have been no answer.
    Waits,
    /// Only the kernel knows whether it sleeps or waits.
    Unknown,
    /// The kernel said so, and it has not run since.
    Asleep,
}

/// Checks of a window that came because its vCPU might have used up its share, and had run.
#[derive(Debug, Clone, Copy, Default)]
struct Alarms {
    count: u64,
    /// How long those that were not admitted took, ns.
    took: u64,
    /// How long the vCPU has run within its share in this window, and what such checks took of its share beyond that,
    /// ns.
    ran: u64,
    charged: u64,
}

/// One vCPU of this plan: a server, whose budget is granted anew in each window.
#[derive(Debug)]
struct Server {
    /// The number by which [`Threads`] knows the vCPU.
    index: usize,
    account: Account,
    /// The vCPU's bandwidth in parts of [`RATE`], rounded up.
    rate: u64,
    /// The end of the present window, what it was before it moved on, and the time granted for it, ns.
    end: u64,
    regular_end: u64,
    granted: u64,
    /// Saved unused time, ns, which pays for overuse.
    saved: u64,
    /// Unused time beyond the limit of `saved`, ns, until it goes to the CPU's pool.
    surplus: u64,
    /// The time of checks for further windows that it has not paid yet, ns.
    unpaid: u64,
    /// How far the balance may go below 0 until the next check, ns.
    overuse_max: u64,
    deadlines: Deadlines,
    /// Whether the last window gave no reason for a plan.
    quiet: bool,
    /// Whether the vCPU was seen running at the last check, for how long, ns, and its place until then.
    ran: bool,
    ran_for: u64,
    place_before: Place,
    /// Whether the vCPU is assumed to be runnable.
    runnable: bool,
    alarms: Alarms,
    /// Whether the window began anew in a rest.
    rested: bool,
    /// Whether the vCPU used up the share of its last window.
    exhausted: bool,
    sleep: Sleep,
    /// Whether the CPU was idle long enough for the vCPU to be likely to sleep.
    cpu_idle: bool,
    /// How long vCPUs ran that this vCPU would have waited for, ns.
    waited_for: u64,
    /// What the vCPU may still need of its window, ns.
    demand: u64,
    /// How long other vCPUs may run before this one misses its deadline, ns.
    slack: u64,
    /// What vCPUs with later deadlines may still need, ns.
    later: u64,
    /// How long checks of the order may take up to its deadline, ns.
    order_checks: u64,
    /// For how long the vCPUs up to this one may run in any order, ns; and those behind it.
    order_within: u64,
    order_behind: u64,
    /// Whether the vCPU is to be planned.
    planned: bool,
}

impl Server {
    fn new(index: usize, reserved: &Reserved, now: u64, tally: Arc<Tally>) -> Self {
        let account = Account::new(reserved, now, tally);
        Self {
            index,
            rate: account.share(RATE) + 1,
            account,
            end: now,
            regular_end: now,
            granted: 0,
            saved: 0,
            surplus: 0,
            unpaid: 0,
            overuse_max: 0,
            deadlines: Deadlines::None,
            quiet: false,
            ran: false,
            ran_for: 0,
            place_before: Place::Entitled,
            runnable: true,
            alarms: Alarms::default(),
            rested: false,
            exhausted: true,
            sleep: Sleep::Awake,
            cpu_idle: false,
            waited_for: 0,
            demand: 0,
            slack: 0,
            later: 0,
            order_checks: 0,
            order_within: 0,
            order_behind: 0,
            planned: false,
        }
    }

    /// Applies the bandwidth that the guest claimed from its offer.
    fn apply_claim(&mut self, now: u64, threads: &mut impl Threads) {
        let moved = self.account.share(self.end - self.regular_end);
        if let Some(more) = self.account.apply_claim(self.index, now, self.end, threads) {
            self.save(moved);
            self.regular_end = self.end;
            self.granted = self.granted.saturating_add_signed(more);
            self.rate = self.account.share(RATE) + 1;
        }
    }

    /// Reads the vCPU's CPU time; returns how long it ran within its share since the last check, ns.
    fn observe(&mut self, now: u64, threads: &mut impl Threads) -> u64 {
        self.apply_claim(now, threads);
        let account = &mut self.account;
        let mut ran = 0;
        if account.place != Place::Beyond {
            ran = account.read(self.index, threads);
        } else if now >= self.end || now >= account.deadline {
            account.read(self.index, threads);
        }
        (self.ran, self.ran_for) = (ran > 0, ran);
        if self.rested && now >= account.deadline {
            self.alarms = Alarms::default();
        }
        account.end_period(now);
        self.saved -= self.repay(self.saved);
        ran
    }

    /// Counts a check, of `cost` ns, that came because the vCPU's share might be used up. One in a window was admitted.
    fn count_alarm(&mut self, cost: u64) {
        if self.ran && self.place_before != Place::Beyond {
            self.alarms.count += 1;
            self.alarms.took += if self.alarms.count >= WINDOW_CHECKS { cost } else { 0 };
        }
    }

    /// Charges further checks, so that the vCPU has used as much of its share as they took. One that was preempted has
    /// run for moments so far; what it runs later takes the place of the charge.
    fn charge_alarms(&mut self) {
        let Alarms { took, ran, charged, .. } = self.alarms;
        self.alarms.charged = took.saturating_sub(ran);
        self.account.charge_checks(signed(self.alarms.charged) - signed(charged));
    }

    /// Reduces the vCPU's debt by at most `most` ns; returns by how much.
    fn repay(&mut self, most: u64) -> u64 {
        let paid = self.account.balance.min(0).unsigned_abs().min(most);
        self.account.balance += signed(paid);
        paid
    }

    /// Saves unused time, up to the vCPU's share of 100 ms; the rest is for the pool.
    fn save(&mut self, ns: u64) {
        let saved = self.saved.saturating_add(ns);
        self.saved = saved.min(self.account.share(SLICE_MAX.0));
        self.surplus = self.surplus.saturating_add(saved - self.saved);
    }

    /// The most that the vCPU may run until the next check, ns.
    fn remaining(&self) -> u64 {
        u64::try_from(self.account.balance.saturating_add(signed(self.overuse_max))).unwrap_or(0)
    }

    /// How long the vCPU may run before a check stops it, ns. If it is taken to sleep, its demand does not end its run,
    /// but the soonest check does, in `soonest` ns: only that one finds that it has woken.
    fn may_run(&self, soonest: u64) -> u64 {
        if self.runnable || self.demand == 0 { self.demand } else { self.demand.max(soonest) }
    }

    /// Decides whether the vCPU sleeps. Since the last check, that check and vCPUs at its place or ahead of it ran for
    /// `busy` ns. `cpu_idle`: for long enough none of them ran, so that the vCPU may sleep. The kernel is asked only
    /// about a vCPU that was assumed to be runnable, because the next check depends on that: if the CPU was idle, or if
    /// less than `in_doubt` ns are left to the vCPU, because checks for its small rest would follow each other while
    /// others run.
    fn update_sleep(&mut self, now: u64, busy: u64, cpu_idle: bool, in_doubt: u64, threads: &mut impl Threads) {
        self.cpu_idle = cpu_idle;
        // A vCPU that was at `Beyond`, behind bulk, may have waited or run all the time.
        let beyond = self.place_before == Place::Beyond;
        let may = !self.ran && !beyond && (cpu_idle || self.remaining() < in_doubt);
        // On a busy CPU one that slept may have woken, and may wait since.
        let waited = if may && !cpu_idle && self.sleep == Sleep::Asleep { self.waited_for } else { 0 };
        self.sleep = if self.ran {
            Sleep::Awake
        } else if self.sleep == Sleep::Waits && !beyond && !cpu_idle || may && self.sleep == Sleep::Asleep {
            self.sleep
        } else if self.runnable && !beyond {
            // `cpu_idle` alone proves nothing: interrupt threads may have run while the vCPU waited, and the mistake
            // would stand until its window ends.
            match may {
                true if threads.is_asleep(self.index) => Sleep::Asleep,
                true => Sleep::Waits,
                false => Sleep::Awake,
            }
        } else {
            Sleep::Unknown
        };
        let asleep = self.sleep == Sleep::Asleep;
        self.runnable = self.ran || beyond || self.runnable && !asleep;
        self.waited_for = waited.saturating_add(busy);
        self.update_demand(now);
    }

    /// Asks the kernel whether the vCPU sleeps, if `update_sleep` left that open.
    fn ask_kernel(&mut self, now: u64, threads: &mut impl Threads) {
        if self.sleep == Sleep::Unknown {
            let asleep = threads.is_asleep(self.index);
            self.sleep = if asleep { Sleep::Asleep } else { Sleep::Waits };
            // It does not sleep, so it waits for a CPU, although no check has seen it run.
            self.runnable = !asleep;
            self.update_demand(now);
        }
    }

    /// How much of the share may be left when it counts as used up, ns. While the vCPU sleeps, its rest shrinks: if the
    /// last of it did not count, a job that comes then would wait unseen until the next window, which begins with it
    /// and ends a period later, after the job's deadline.
    fn grain(&self) -> u64 {
        let sleeps = self.sleep == Sleep::Asleep && self.deadlines != Deadlines::None;
        if sleeps { 0 } else { self.account.grain }
    }

    /// Updates what the vCPU may still need of its window.
    fn update_demand(&mut self, now: u64) {
        let mut demand = u64::try_from(self.account.balance).unwrap_or(0);
        if self.sleep == Sleep::Asleep {
            // It may have woken since, and may have waited while the others ran.
            let left = self.end.saturating_sub(now).saturating_add(self.waited_for);
            if self.deadlines == Deadlines::None {
                let needed = (demand.saturating_mul(RATE) / self.rate).min(SLICE_MAX.0);
                self.end = self.end.saturating_add(needed.saturating_sub(left));
            } else {
                demand = demand.min(self.account.bandwidth.of(Nanos(left)).0);
                self.reclaim(signed(demand));
            }
        }
        // What checks took of its share, it gets back while it runs.
        let used_up = self.account.balance <= signed(self.grain());
        self.demand = if used_up { 0 } else { demand.saturating_add(self.alarms.charged) };
    }

    /// Takes back what is left of the grant beyond `most`, and saves it as unused time.
    fn reclaim(&mut self, most: i64) {
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
        self.deadlines == Deadlines::None
            && !self.used_over(8)
            && self.account.balance >= 0
            && self.account.place != Place::Beyond
    }

    /// Pays for checks of further windows from unused time.
    fn pay(&mut self) {
        let paid = self.unpaid.min(self.saved);
        self.unpaid -= paid;
        self.saved -= paid;
    }

    /// Whether so many further windows are not paid that the vCPU has no more of them.
    fn is_overdrawn(&self, cost: u64) -> bool {
        self.unpaid > cost.saturating_mul(FURTHER_MAX)
    }

    /// Charges a window that ends `early` ns before its period pays for the next one, of `cost` ns. In a period that is
    /// longer than the longest window several windows were admitted.
    fn charge_further(&mut self, early: u64, cost: u64) {
        let admitted = self.account.period.clamp(1, SLICE_MAX.0);
        let more = u128::from(cost) * u128::from(early.min(admitted)) / u128::from(admitted);
        self.unpaid = self.unpaid.saturating_add(u64::try_from(more).unwrap_or(cost));
    }

    /// Begins the vCPU's next window. A window costs `cost` ns of checks.
    fn begin_window(&mut self, now: u64, cost: u64, threads: &mut impl Threads) {
        let late = now.saturating_sub(self.end);
        let start = if late < SLICE_MIN.0 { self.end } else { now };
        // The vCPU is charged for what it used in a gap before a check that came late, so it is granted its share of
        // it.
        let gap = (start - self.end).min(self.account.period);
        let next = threads.next_deadline(self.index, start);
        let asleep = self.sleep == Sleep::Asleep && !self.ran && next.is_none();
        self.deadlines = Deadlines::of(next);
        self.exhausted = self.account.place == Place::Beyond || self.account.is_used_up();
        self.quiet = self.granted > 0 && self.is_quiet();
        // Unused time is taken back, except for the grain that was left when the vCPU went to `Beyond`.
        if self.account.place != Place::Beyond {
            self.reclaim(0);
        }
        self.settle();
        if asleep {
            self.save(self.account.share(gap));
        }
        self.pay();
        let overdrawn = self.is_overdrawn(cost);
        let period = self.account.period.max(1);
        // The windows of one that sleeps move on, so they need not end where its periods do.
        let regular = if asleep { start } else { start / period * period };
        // A deadline further away than a period costs a further window. One that is overdrawn has its share by the
        // deadline instead, although not by the end of each period.
        let most = if overdrawn { u64::MAX } else { now.saturating_add(period) };
        let end = next.map_or(regular.saturating_add(period), |next| next.at.min(most));
        let bound = |length: Nanos| start.saturating_add(length.0);
        let least = if overdrawn { Nanos(period).clamp(SLICE_MIN, SLICE_MAX) } else { SLICE_MIN };
        self.end = end.clamp(bound(least), bound(SLICE_MAX));
        self.regular_end = self.end;
        self.charge_further(period.min(SLICE_MAX.0).saturating_sub(self.end - start), cost);
        self.granted = self.account.share((self.end - start).saturating_add(if asleep { 0 } else { gap }));
        self.account.balance = self.account.balance.saturating_add(signed(self.granted));
        (self.alarms, self.rested) = (Alarms::default(), false);
        if self.sleep != Sleep::Waits {
            self.sleep = Sleep::Awake;
        }
        // The window begins where the next job of a task comes.
        self.runnable |= self.deadlines == Deadlines::Live;
    }

    /// Ends the window where it has moved to. What the vCPU was not granted for the time that it moved is unused.
    fn settle(&mut self) {
        self.save(self.account.share(self.end - self.regular_end));
        self.regular_end = self.end;
    }

    /// Whether the vCPU's window is over. One that moved on is over at its regular end if the vCPU sleeps and has not
    /// run since. If it waits, its need may have begun with the last check.
    fn is_over(&mut self, now: u64, threads: &mut impl Threads) -> bool {
        if self.ran {
            self.settle();
        }
        let stays = self.place_before == Place::Beyond || self.sleep == Sleep::Waits;
        if now < self.end && now >= self.regular_end && !stays {
            self.runnable = !threads.is_asleep(self.index);
            self.sleep = if self.runnable { Sleep::Waits } else { Sleep::Asleep };
            if !self.runnable {
                // It has slept since: its share of that time is unused.
                let start = if now - self.regular_end < SLICE_MIN.0 { self.regular_end } else { now };
                self.save(self.account.share(start - self.regular_end));
                (self.end, self.regular_end) = (start, start);
            }
        }
        now >= self.end
    }

    /// Whether the vCPU may have run since the last check. At `Beyond` its CPU time is not read at each check.
    fn may_have_run(&self) -> bool {
        self.ran || self.place_before == Place::Beyond
    }

    /// Shortens the vCPU's window if its guest has begun to publish deadlines. A vCPU that has not run has written
    /// nothing (`kernel/guest/dl_next.c`): its page is not read, which was not admitted for each check. Nor is it where
    /// the share is used up, because no rest could pay for a cut.
    fn shorten_window(&mut self, now: u64, cost: u64, threads: &mut impl Threads) {
        if self.account.is_used_up() || self.is_overdrawn(cost) {
            return;
        }
        let Some(next) = threads.next_deadline(self.index, now) else { return };
        self.deadlines = Deadlines::of(Some(next));
        self.settle();
        self.cut_window(next.at, now, cost);
    }

    /// Lets the window end at a deadline, if that is before its end.
    fn cut_window(&mut self, at: u64, now: u64, cost: u64) {
        // What the vCPU has used of its share is not forgotten: the window is cut by what its rest pays for.
        let rest = u64::try_from(self.account.balance).unwrap_or(0).saturating_mul(RATE) / self.rate;
        let end = at.max(now.saturating_add(SLICE_MIN.0)).max(self.end.saturating_sub(rest));
        if end < self.end {
            self.charge_further(self.end - end, cost);
            let less = self.account.share(self.end - end);
            self.granted = self.granted.saturating_sub(less);
            self.account.balance -= signed(less);
            (self.end, self.regular_end) = (end, end);
            self.reclaim(signed(self.account.share(end - now)));
        }
    }

    /// Prolongs the window of a vCPU that slept in it, and runs now, up to its guest's next deadline: none is before.
    /// The window was to end at the deadline that a job would have that came when the window began. So a job that comes
    /// at any time has one window, not two with a further one among them. The window ends a period at most after the
    /// vCPU woke, which was at least as long ago as it has run since the last check, or a moment later: its guest's job
    /// begins after the vCPU wakes, and a further window for that moment would cost as much as any other. After a rest
    /// a deadline may also be before the window's end, where it is nearer than a period.
    fn prolong_window(&mut self, now: u64, cost: u64, threads: &mut impl Threads) {
        let rested = std::mem::take(&mut self.rested);
        let Some(next) = threads.next_deadline(self.index, now) else {
            if rested {
                self.deadlines = Deadlines::None;
            }
            return;
        };
        self.deadlines = Deadlines::of(Some(next));
        let woke = now.saturating_sub(self.ran_for);
        let most = self.account.period.min(SLICE_MAX.0).saturating_add(SLICE_MIN.0);
        let end = next.at.min(woke.saturating_add(most));
        let more = self.account.share(end.saturating_sub(self.end));
        self.end = self.end.max(end);
        self.regular_end = self.end;
        self.granted = self.granted.saturating_add(more);
        self.account.balance = self.account.balance.saturating_add(signed(more));
        if rested && !self.is_overdrawn(cost) {
            self.cut_window(next.at, now, cost);
        }
    }

    /// Whether the vCPU is known to sleep, with time left: at `Beyond` it may wait.
    fn is_at_rest(&self) -> bool {
        self.sleep == Sleep::Asleep && self.account.place != Place::Beyond && self.account.balance >= 0
    }

    /// Begins the window of a sleeping vCPU anew: with what is left of its share of the time up to now, no more than
    /// its share of the window. What it is granted beyond that is unused.
    fn rest(&mut self, now: u64) {
        self.settle();
        let length = Nanos(self.account.period).clamp(SLICE_MIN, SLICE_MAX).0;
        let end = now.saturating_add(length).max(self.end);
        let more = self.account.share(end - self.end);
        self.account.balance = self.account.balance.saturating_add(signed(more));
        self.reclaim(signed(self.account.share(end - now)));
        (self.end, self.regular_end) = (end, end);
        self.granted = u64::try_from(self.account.balance).unwrap_or(0);
        (self.rested, self.exhausted, self.quiet) = (true, false, false);
        self.update_demand(now);
    }
}

/// If the vCPUs of a place need more than this, ns, one of them that runs last may miss its deadline; and the slack of
/// that one, ns.
#[derive(Debug, Clone, Copy)]
struct Limit {
    need: u64,
    slack: u64,
}

/// The vCPUs of one CPU.
#[derive(Debug)]
pub(crate) struct EdfCpu {
    cpu: usize,
    /// Whether all vCPUs can run on this CPU only, so that one runs at a time.
    stay: bool,
    servers: Vec<Server>,
    /// Indices of `servers`, sorted by the ends of their windows; ended threads are left out.
    by_deadline: Vec<usize>,
    /// Of each of these vCPUs that needs time, for [`Self::find_order_within`].
    limits: Vec<Limit>,
    /// Time of the last check; end of the next window or of the calm time.
    last: u64,
    end: u64,
    calm: bool,
    /// Length of the last calm time, ns.
    calm_length: u64,
    /// The shortest period, ns.
    shortest: u64,
    /// When a check last found that a vCPU had run.
    ran_at: u64,
    /// Pool of unused time, ns, which no vCPU has had yet.
    pool: u64,
    /// How long vCPUs may run beyond their shares, until the next check, without making any other miss its deadline,
    /// ns.
    spare: u64,
    /// The vCPU, by its number, because of whose share the next check comes, and the time of that check.
    alarm: Option<(usize, u64)>,
    /// The vCPU, by its number, that is to run first of those at [`Place::Entitled`]; and the first one there now, if
    /// that is known.
    leader: Option<usize>,
    first: Option<usize>,
    windows: u64,
    checks: u64,
    /// Duration of a check, ns: a moving average, and the last one.
    cost: u64,
    last_cost: u64,
    /// When the next check is to come, and how late checks came lately, ns.
    due: u64,
    late: u64,
}

impl EdfCpu {
    /// A plan for the vCPUs of this CPU (by the planner's numbers), which are at [`Place::Entitled`] now. `tally` gives
    /// each vCPU its counters.
    pub(crate) fn new(
        reservations: &Reservations,
        cpu: usize,
        now: u64,
        tally: impl Fn(ThreadId) -> Arc<Tally>,
    ) -> Self {
        let alone = reservations.cpus.len() == 1;
        let here = |reserved: &Reserved| alone || reserved.home.is_some_and(|home| usize::try_from(home) == Ok(cpu));
        let servers: Vec<Server> = reservations
            .vcpus
            .iter()
            .enumerate()
            .filter(|(_, reserved)| here(reserved))
            .map(|(index, reserved)| Server::new(index, reserved, now, tally(reserved.id)))
            .collect();
        let shortest = servers.iter().map(|server| server.account.period).min().unwrap_or(CALM_MAX).min(CALM_MAX);
        let stay = reservations.vcpus.iter().filter(|reserved| here(reserved)).all(|reserved| reserved.pinned);
        Self {
            cpu,
            stay,
            by_deadline: Vec::with_capacity(servers.len()),
            limits: Vec::with_capacity(servers.len()),
            servers,
            last: now,
            end: now,
            calm: false,
            calm_length: shortest,
            shortest,
            ran_at: now,
            pool: 0,
            spare: 0,
            alarm: None,
            leader: None,
            first: None,
            windows: 0,
            checks: 0,
            cost: 0,
            last_cost: 0,
            due: NEVER,
            late: 0,
        }
    }

    /// Whether each of the vCPUs can run on this CPU only.
    pub(crate) fn has_no_migration(&self) -> bool {
        self.stay
    }

    /// Whether this is the plan of a CPU (by the planner's number).
    pub(crate) fn is_on(&self, cpu: usize) -> bool {
        self.cpu == cpu
    }

    /// Whether the vCPU with this number is in this plan.
    pub(crate) fn has(&self, vcpu: usize) -> bool {
        self.servers.iter().any(|server| server.index == vcpu)
    }

    /// Takes each vCPU's first reading; earlier CPU time is not counted. The pacer that keeps the shares from `now` on
    /// calls this: what vCPUs use between this call and the first check is charged to them.
    pub(crate) fn begin(&mut self, now: u64, threads: &mut impl Threads) {
        for server in &mut self.servers {
            server.account.begin(now, threads.read(server.index));
            (server.end, server.regular_end) = (now, now);
        }
        (self.last, self.end, self.ran_at) = (now, now, now);
    }

    /// Continues the plan `old`: vCPUs of both keep their place, debt, period and window. A changed bandwidth applies
    /// from now on. To be called after [`Self::begin`].
    pub(crate) fn take_over(&mut self, old: &EdfCpu) {
        let now = self.last;
        for server in &mut self.servers {
            let is_of = |before: &&Server| before.account.id == server.account.id && !before.account.ended;
            let Some(before) = old.servers.iter().find(is_of) else { continue };
            let left = before.end.saturating_sub(now);
            let given = before.account.share(left);
            server.account.take_over(&before.account, given);
            let moved = before.account.share(before.end - before.regular_end);
            server.surplus = before.surplus;
            server.save(before.saved.saturating_add(moved));
            server.unpaid = before.unpaid;
            if old.calm {
                // Its first window of the new plan begins now.
                server.account.balance = -signed(before.account.overuse(given));
                continue;
            }
            (server.end, server.regular_end, server.deadlines) = (before.end, before.end, before.deadlines);
            (server.runnable, server.exhausted) = (before.runnable, before.exhausted);
            (server.alarms, server.rested) = (before.alarms, before.rested);
            let more = signed(server.account.share(left)) - signed(given);
            server.granted = before.granted.saturating_add_signed(more);
            server.account.balance = server.account.balance.saturating_add(more);
        }
        if old.cpu == self.cpu {
            (self.windows, self.checks, self.cost, self.last_cost) = (old.windows, old.checks, old.cost, old.last_cost);
            (self.pool, self.late) = (old.pool, old.late);
        }
    }

    /// Continues a plan by slices: vCPUs of both keep their place, debt and period. `old` gives a vCPU's account there.
    pub(crate) fn take_over_accounts<'a>(&mut self, old: impl Fn(ThreadId) -> Option<&'a Account>) {
        for server in &mut self.servers {
            if let Some(before) = old(server.account.id) {
                server.account.take_over(before, 0);
                server.account.balance = server.account.balance.min(0);
            }
        }
    }

    /// The account of one of the vCPUs, and its share of the time from `now` to the end of its window, ns.
    pub(crate) fn account(&self, id: ThreadId, now: u64) -> Option<(&Account, u64)> {
        let server = self.servers.iter().find(|server| server.account.id == id && !server.account.ended)?;
        Some((&server.account, server.account.share(server.end.saturating_sub(now))))
    }

    /// Records how long a step took, ns.
    pub(crate) fn record_cost(&mut self, ns: u64) {
        self.last_cost = ns;
        self.cost = (3 * self.cost + ns) / 4;
    }

    /// Does what is due. Returns when the pacer is to check again.
    pub(crate) fn step(&mut self, now: u64, threads: &mut impl Threads) -> u64 {
        // While the last check went on no vCPU ran.
        let soonest = self.due.max(self.last.saturating_add(self.last_cost));
        let late = now.saturating_sub(soonest).min(CHECK_DELAY_MIN);
        self.late = late.max(self.late - self.late / LATE_FORGOTTEN);
        self.due = self.check(now, threads);
        self.due
    }

    fn check(&mut self, now: u64, threads: &mut impl Threads) -> u64 {
        self.checks += 1;
        if self.servers.is_empty() {
            return NEVER;
        }
        if self.calm && now < self.end {
            return self.end;
        }
        let alarm = self.alarm.take().filter(|(_, due)| now >= *due).map(|(index, _)| index);
        // How long vCPUs ran that delay a vCPU at `Planned` (0) or at `Entitled` (1).
        let mut busy = [0_u64; 2];
        for server in self.servers.iter_mut().filter(|server| !server.account.ended) {
            (server.place_before, server.ran) = (server.account.place, false);
            let ran = server.observe(now, threads);
            server.alarms.ran += ran;
            if alarm == Some(server.index) {
                server.count_alarm(self.cost);
            }
            server.charge_alarms();
            busy[1] = busy[1].saturating_add(ran);
            busy[0] = busy[0].saturating_add(if server.place_before == Place::Planned { ran } else { 0 });
        }
        if busy.iter().any(|ran| *ran > 0) {
            self.ran_at = now;
        }
        self.repay_from_pool();
        let last_cost = self.last_cost;
        let passed = now.saturating_sub(self.last).saturating_sub(last_cost);
        self.last = now;
        if self.begin_windows(now, threads) {
            return self.begin_calm(now, threads);
        }
        let in_doubt = self.cost.saturating_mul(ORDER_COST_FACTOR);
        for server in self.servers.iter_mut().filter(|server| !server.account.ended) {
            // Behind bulk it may not have run although it was runnable.
            let busy = match server.place_before {
                Place::Planned => busy[0],
                // The others at its place run only while it sleeps.
                Place::Entitled if self.leader == Some(server.index) => busy[0],
                Place::Entitled => busy[1],
                Place::Beyond => passed,
            };
            let [most, exhausted] = IDLE_QUARTERS;
            let least = passed / 4 * if server.exhausted { exhausted } else { most };
            let idle = passed > busy.saturating_add(IDLE_MIN.max(least));
            server.update_sleep(now, busy.saturating_add(last_cost), idle, in_doubt, threads);
        }
        let mut holds = self.choose_planned(now);
        // Whether vCPUs sleep matters in two cases: where their need shortens the time for which the order is valid,
        // or the spare time; and where that time is too short for another check, so that a waiting vCPU must not be
        // behind one with a later deadline.
        self.end = self.first_end();
        let time = holds.min(self.spare);
        let ask = |server: &Server| {
            let open = server.sleep == Sleep::Unknown && server.demand > 0 && !server.account.ended;
            open && (server.cpu_idle || time < CHECK_DELAY_MIN)
        };
        if time < self.end.saturating_sub(now) && self.servers.iter().any(ask) {
            self.servers.iter_mut().filter(|server| ask(server)).for_each(|server| server.ask_kernel(now, threads));
            holds = self.choose_planned(now);
        }
        if now.saturating_sub(self.ran_at) >= self.shortest && self.begin_rest(now, threads) {
            self.end = self.first_end();
            holds = self.choose_planned(now);
        }
        self.allow_overuse(holds);
        self.apply_places(threads);
        self.next_check(now, holds)
    }

    /// When the first window ends.
    fn first_end(&self) -> u64 {
        self.servers.iter().filter(|server| !server.account.ended).map(|server| server.end).min().unwrap_or(NEVER)
    }

    /// Begins all windows anew if all vCPUs sleep and the guests of some have deadlines (for others there are calm
    /// times). The kernel is asked whether vCPUs sleep of which that is not known, a few in a check. Returns whether
    /// anything changed.
    ///
    /// The answer counts until the vCPU runs. If interrupt threads keep the CPU for longer than the shortest period, a
    /// vCPU that woke and waits for them has its window begun anew: it comes behind those with earlier ends until it
    /// runs.
    fn begin_rest(&mut self, now: u64, threads: &mut impl Threads) -> bool {
        let present = |server: &&mut Server| !server.account.ended;
        let of_deadlines = |server: &Server| server.deadlines != Deadlines::None && !server.account.ended;
        let runnable = |server: &Server| server.runnable && !server.account.ended;
        if self.servers.iter().any(runnable) || !self.servers.iter().any(of_deadlines) {
            return false;
        }
        let unknown = |server: &&mut Server| server.sleep == Sleep::Unknown && !server.account.ended;
        let mut asked = false;
        for server in self.servers.iter_mut().filter(unknown).take(REST_ASKS) {
            server.ask_kernel(now, threads);
            asked = true;
        }
        if !self.servers.iter().all(|server| server.is_at_rest() || server.account.ended) {
            return asked;
        }
        self.servers.iter_mut().filter(present).for_each(|server| server.rest(now));
        true
    }

    /// The least delay, ns, of a check that is needed only if vCPUs run in another order than expected.
    fn doubt_delay_min(&self) -> u64 {
        CHECK_DELAY_MIN.max(self.cost.saturating_mul(ORDER_COST_FACTOR))
    }

    /// How long checks of the order may take up to a time, ns. What vCPUs may run in any order leaves each of them this
    /// much of its slack: once their order matters, such checks would make those with earlier deadlines late.
    fn order_checks(&self, now: u64) -> impl Fn(u64) -> u64 + use<> {
        let (cost, delay) = (self.cost, self.doubt_delay_min());
        move |until| until.saturating_sub(now).saturating_mul(cost) / delay
    }

    /// The least delay, ns, of a check that is not urgent.
    fn delay_min(&self) -> u64 {
        self.cost.saturating_mul(COST_FACTOR)
    }

    /// Lets vCPUs run beyond their shares where no deadline is at risk: each for its own saved time, then the runnable
    /// vCPU with the earliest deadline for the pool.
    fn allow_overuse(&mut self, holds: u64) {
        let unhurried = holds >= 2 * CHECK_DELAY_MIN.max(self.delay_min());
        // The check that ends the overuse may come late.
        let kept = self.doubt_delay_min();
        let Self { servers, by_deadline, pool, spare, .. } = self;
        servers.iter_mut().for_each(|server| server.overuse_max = 0);
        let free = spare.saturating_sub(kept);
        let own = |server: &Server| {
            let own = server.saved.min(server.account.share(OVERUSE_TIME));
            if own >= CHECK_DELAY_MIN { own } else { 0 }
        };
        // Runnable vCPUs with deadlines may need their own saved time: a piece of the pool leaves them that much.
        let urgent = |server: &Server| server.runnable && server.deadlines != Deadlines::None && !server.account.ended;
        let claims: u64 = servers.iter().filter(|server| urgent(server)).map(own).sum();
        let mut others = *pool;
        for at in by_deadline.iter().filter(|_| unhurried) {
            let Some(server) = servers.get_mut(*at) else { continue };
            let mut most = own(server);
            if server.runnable && others >= POOL_PIECE_MIN {
                let theirs = claims - if urgent(server) { most } else { 0 };
                most += std::mem::take(&mut others).min(free.saturating_sub(theirs));
            }
            most = most.min(free);
            server.overuse_max = if most >= CHECK_DELAY_MIN { most } else { 0 };
        }
    }

    /// Pays debts from the pool of unused time, the earliest deadline first.
    fn repay_from_pool(&mut self) {
        let Self { servers, by_deadline, pool, .. } = self;
        let given_up: u64 = servers.iter_mut().map(|server| std::mem::take(&mut server.surplus)).sum();
        *pool = pool.saturating_add(given_up).min(UNUSED_MAX);
        for at in by_deadline.iter() {
            *pool -= servers.get_mut(*at).map_or(0, |server| server.repay(*pool));
        }
    }

    /// Begins the windows that are due. True if no vCPU needs a plan any more.
    fn begin_windows(&mut self, now: u64, threads: &mut impl Threads) -> bool {
        let calm = std::mem::take(&mut self.calm);
        let cost = self.cost.saturating_mul(WINDOW_CHECKS);
        let mut rolled = false;
        for server in self.servers.iter_mut().filter(|server| !server.account.ended) {
            let end = server.end;
            let over = server.is_over(now, threads);
            // The kernel has just said that the vCPU sleeps.
            let rolled_back = server.end < end;
            if calm {
                (server.end, server.regular_end) = (now, now);
            }
            if over || calm {
                server.begin_window(now, cost, threads);
                if rolled_back && server.deadlines != Deadlines::Live {
                    server.sleep = Sleep::Asleep;
                }
                rolled = true;
            } else if server.deadlines != Deadlines::None {
                if server.ran && !server.runnable {
                    server.prolong_window(now, cost, threads);
                }
            } else if server.may_have_run() {
                server.shorten_window(now, cost, threads);
            }
        }
        self.windows += u64::from(rolled);
        let quiet = self.servers.iter().all(|server| server.quiet && server.is_quiet() || server.account.ended);
        if !quiet {
            self.calm_length = self.shortest;
        }
        quiet
    }

    /// Sorts the vCPUs by deadline, and computes for each its slack, and what those with later deadlines need.
    fn sort_by_deadline(&mut self, now: u64) {
        let (cost, late) = (self.cost, self.late);
        let soonest = self.doubt_delay_min();
        let order_checks = self.order_checks(now);
        let Self { servers, by_deadline, .. } = self;
        by_deadline.clear();
        by_deadline
            .extend((0..servers.len()).filter(|at| servers.get(*at).is_some_and(|server| !server.account.ended)));
        by_deadline.sort_unstable_by_key(|at| servers.get(*at).map_or(u64::MAX, |server| server.end));
        // CPU time needed up to the deadline of each vCPU: what all up to it may still need, and their grants until
        // then, the present check, and one where each of them has used up its share or its window ends, also of one
        // that needs nothing more. While the next check is late, another one may run.
        let (mut wanted, mut rate, mut before) = (cost.saturating_add(late), 0_u64, now);
        for at in by_deadline.iter() {
            let Some(server) = servers.get_mut(*at) else { continue };
            let granted = rate.saturating_mul(server.end.saturating_sub(before)) / RATE;
            wanted = wanted.saturating_add(granted).saturating_add(server.demand);
            (rate, before) = (rate.saturating_add(server.rate), server.end);
            // A vCPU that needs nothing more misses nothing.
            let slack = server.end.saturating_sub(now).saturating_sub(wanted);
            server.slack = if server.demand > 0 { slack } else { u64::MAX };
            wanted = wanted.saturating_add(cost);
        }
        let (mut later, mut same, mut end, mut order) = (0_u64, 0_u64, u64::MAX, u64::MAX);
        for at in by_deadline.iter().rev() {
            let Some(server) = servers.get_mut(*at) else { continue };
            if server.end != end {
                (later, same, end) = (later.saturating_add(same), 0, server.end);
            }
            same = same.saturating_add(server.may_run(soonest));
            (server.later, server.order_behind, server.order_checks) = (later, order, order_checks(server.end));
            if server.slack < later.saturating_add(server.order_checks) && later > 0 {
                order = order.min(server.slack);
            }
        }
    }

    /// Computes for each vCPU how long it and those with earlier deadlines may run in any order: the least slack of
    /// those of them that would miss their deadlines if the others of them ran first.
    ///
    /// A vCPU's limit is at least what all up to it need, and those with the same deadline. So those that do not reach
    /// to a vCPU do not exceed its limit. Their need only grows from one vCPU to the next: each limit is passed once.
    fn find_order_within(&mut self) {
        let soonest = self.doubt_delay_min();
        let Self { servers, by_deadline, limits, .. } = self;
        let line = || by_deadline.iter().filter_map(|at| servers.get(*at)).filter(|server| server.demand > 0);
        let all = line().fold(0_u64, |sum, server| sum.saturating_add(server.may_run(soonest)));
        let limit = |server: &Server| {
            let others = server.slack.saturating_sub(server.order_checks);
            Limit { need: all.saturating_sub(server.later).saturating_add(others), slack: server.slack }
        };
        limits.clear();
        limits.extend(line().map(limit));
        limits.sort_unstable_by_key(|limit| limit.need);
        let mut limits = limits.iter().peekable();
        let (mut need, mut within) = (0_u64, u64::MAX);
        for at in by_deadline.iter() {
            let Some(server) = servers.get_mut(*at).filter(|server| server.demand > 0) else { continue };
            need = need.saturating_add(server.may_run(soonest));
            while let Some(limit) = limits.next_if(|limit| limit.need < need) {
                within = within.min(limit.slack);
            }
            server.order_within = within;
        }
    }

    /// Chooses the vCPUs to be planned, and returns for how long that choice is valid, ns.
    fn choose_planned(&mut self, now: u64) -> u64 {
        self.sort_by_deadline(now);
        self.find_order_within();
        let doubt_delay_min = self.doubt_delay_min();
        let order_delay = doubt_delay_min.max(self.cost.saturating_mul(RUNS_COST_FACTOR));
        let Self { servers, by_deadline, spare, leader, .. } = self;
        *leader = None;
        servers.iter_mut().for_each(|server| server.planned = false);
        let line = || by_deadline.iter().filter_map(|at| servers.get(*at)).filter(|server| server.demand > 0);
        let needs = |sum: u64, server: &Server| sum.saturating_add(server.may_run(doubt_delay_min));
        let all = line().fold(0, needs);
        let first_end = by_deadline.first().and_then(|at| servers.get(*at)).map_or(0, |server| server.end);
        // The choice so far, and how many places it changes; and the most vCPUs, up to a runnable one, that may run in
        // any order.
        let (mut best, mut holds, mut fewest) = (0, 0, 0);
        let (mut free, mut free_holds) = (0, 0);
        // The leader with which the order stays valid longest, and for how long; and for how long vCPUs ahead of the
        // present one may run in any order.
        let (mut led, mut led_holds, mut before) = (None, 0, u64::MAX);
        // How many places change.
        let mut changes = 0;
        for (number, server) in (1_usize..).zip(line()) {
            let within = server.order_within;
            if within == u64::MAX && (server.runnable || free == 0) {
                (free, free_holds) = (number, server.order_behind);
            }
            // The next check comes when the first window ends.
            let behind = server.order_behind.min(first_end.saturating_sub(now));
            let valid = within.min(behind);
            let valid_led = before.min(behind);
            if number > 1 && server.runnable && valid_led > led_holds {
                (led, led_holds) = (Some((number, server.index)), valid_led);
            }
            before = within;
            changes += match server.account.place {
                Place::Planned => -1,
                Place::Entitled => 1,
                Place::Beyond => 0,
            };
            if best == 0 || valid > holds || valid == holds && changes <= fewest {
                (best, holds, fewest) = (number, valid, changes);
            }
        }
        if let Some((number, index)) = led.filter(|_| led_holds > holds) {
            (best, holds, *leader) = (number - 1, led_holds, Some(index));
        }
        // No choice stays valid until the next check of the order may come. Then vCPUs up to the first runnable one are
        // planned at least, without that one if it leads the entitled ones, or is the only runnable one: so it waits
        // for no vCPU with a later deadline, and delays none with an earlier one that wakes. While none is runnable,
        // those that are planned stay so.
        if holds < order_delay.min(first_end.saturating_sub(now)) {
            (best, holds, *leader) = (free, free_holds, None);
            let mut eager = (1..).zip(line()).filter(|(_, server)| server.runnable);
            if let Some((number, server)) = eager.next() {
                best = best.max((number - 1).max(1));
                if best < number && eager.next().is_some() {
                    *leader = Some(server.index);
                    holds = server.order_behind;
                }
            } else {
                best = best.max(line().take_while(|server| server.account.place == Place::Planned).count());
            }
        }
        // What remains of each slack when all vCPUs of the same place with later deadlines run first.
        let planned = line().take(best).fold(0, needs);
        let remains = |(number, server): (usize, &Server)| {
            let ahead = number < best || *leader == Some(server.index);
            let entitled = if ahead { all.saturating_sub(planned) } else { 0 };
            server.slack.saturating_sub(server.later.saturating_sub(entitled).min(holds))
        };
        *spare = (0..).zip(line()).map(remains).min().unwrap_or(u64::MAX);
        if best == 0 {
            return NEVER;
        }
        for at in by_deadline.iter() {
            if let Some(server) = servers.get_mut(*at).filter(|server| best > 0 && server.demand > 0) {
                server.planned = true;
                best -= 1;
            }
        }
        holds
    }

    /// Moves each vCPU to its place, the earliest deadline first: when a thread is raised, SCHED_FIFO appends it to the
    /// threads of its new priority. When it is lowered, it is put ahead of them: so the leader is lowered last.
    fn apply_places(&mut self, threads: &mut impl Threads) {
        let Self { servers, by_deadline, leader, first, .. } = self;
        // The only one that ran at its place since the last check was the first one there. If none ran, none changed.
        let mut ran = servers.iter().filter(|server| server.ran && server.place_before == Place::Entitled);
        if let Some(server) = ran.next() {
            *first = ran.next().is_none().then_some(server.index);
        }
        let mut leads = None;
        for at in by_deadline.iter() {
            let Some(server) = servers.get_mut(*at) else { continue };
            let before = server.account.place;
            let place = if server.remaining() <= server.grain() {
                Place::Beyond
            } else if server.planned {
                Place::Planned
            } else {
                Place::Entitled
            };
            if place == Place::Entitled && *leader == Some(server.index) {
                leads = Some(*at);
                continue;
            }
            server.account.move_to(server.index, place, threads);
            if (before, place) == (Place::Planned, Place::Entitled) {
                *first = Some(server.index);
            } else if before != place && *first == Some(server.index) {
                *first = None;
            }
        }
        let Some(server) = leads.and_then(|at| servers.get_mut(at)) else { return };
        if server.account.place != Place::Entitled || *first != Some(server.index) {
            server.account.move_to(server.index, Place::Planned, threads);
            server.account.move_to(server.index, Place::Entitled, threads);
            *first = Some(server.index);
        }
    }

    /// When to check again, if the order is valid for `holds` ns.
    fn next_check(&mut self, now: u64, holds: u64) -> u64 {
        let present = || self.servers.iter().filter(|server| !server.account.ended);
        let alone = present().filter(|server| server.planned).count() == 1;
        let (delay_min, doubt_delay_min) = (self.delay_min(), self.doubt_delay_min());
        let planned = present().any(|server| server.planned && server.runnable);
        // The vCPU that ran goes on, at the first place where one is runnable. Others run when it sleeps.
        let known = present().any(|server| {
            server.ran && server.runnable && server.account.place != Place::Beyond && (server.planned || !planned)
        });
        // Each sleeping vCPU takes its part of the spare time while it sleeps on, because its rest does not shrink
        // before the next check.
        let rate: u64 = present()
            .filter(|server| server.sleep == Sleep::Asleep && server.demand > 0)
            .map(|server| server.rate)
            .sum();
        let asleep = self.spare.saturating_mul(RATE) / rate.max(1);
        let delay = |server: &Server| match server.sleep {
            Sleep::Asleep => asleep.min(server.demand.saturating_add(self.spare)).max(doubt_delay_min),
            _ if !server.runnable => self.spare.max(doubt_delay_min),
            _ => {
                let least = if server.ran && server.ran_for < self.cost {
                    self.spare.min(delay_min)
                } else if server.ran || alone && server.planned {
                    0
                } else if known || planned && !server.planned {
                    self.cost.saturating_mul(ORDER_COST_FACTOR)
                } else {
                    delay_min
                };
                let delay = self.cost.saturating_add(server.remaining().max(server.account.grain).max(least));
                // One that is to run now, and has not, may sleep. Then its need would not shrink with the time that is
                // left, until the others had too little.
                if server.planned && !server.ran && !known {
                    delay.min(server.slack.max(doubt_delay_min))
                } else {
                    delay
                }
            }
        };
        let entitled = present().filter(|server| server.account.place != Place::Beyond);
        let first = entitled.map(|server| (delay(server), server.index, server.runnable)).min();
        let ahead = |server: &Server| server.account.place == Place::Planned || self.leader == Some(server.index);
        let runs = present().any(|server| server.ran && server.runnable && ahead(server));
        let least = if runs { self.cost.saturating_mul(RUNS_COST_FACTOR) } else { 0 };
        let order = holds.max(doubt_delay_min).max(least);
        let (soonest, index, runnable) = first.unwrap_or((order, 0, false));
        let due = now.saturating_add(soonest.min(order)).min(self.end);
        self.alarm = (runnable && soonest < order && due < self.end).then_some((index, due));
        due
    }

    /// Begins a calm time, without a plan. Returns when it ends.
    fn begin_calm(&mut self, now: u64, threads: &mut impl Threads) -> u64 {
        let ran = self.servers.iter().any(|server| server.ran);
        self.calm = true;
        self.calm_length = if ran { self.shortest } else { (self.calm_length * 2).min(CALM_MAX) };
        self.end = now.saturating_add(self.calm_length);
        for server in self.servers.iter_mut().filter(|server| !server.account.ended) {
            (server.end, server.regular_end) = (self.end, self.end);
            server.granted = server.account.share(self.calm_length);
            server.account.balance = signed(server.granted);
            server.alarms = Alarms::default();
            server.account.move_to(server.index, Place::Planned, threads);
        }
        self.end
    }

    /// The state of each vCPU in a line, for the trace of a test; times in us.
    #[cfg(test)]
    pub(crate) fn describe(&self, now: u64) -> String {
        let us = |ns: u64| if ns == NEVER { "-".to_owned() } else { (ns / 1_000).to_string() };
        let line = |server: &Server| {
            let Alarms { count, charged, .. } = server.alarms;
            let waits = if server.runnable { "runnable" } else { "not runnable" };
            let overdrawn =
                if server.is_overdrawn(self.cost.saturating_mul(WINDOW_CHECKS)) { ", overdrawn" } else { "" };
            format!(
                "\n    VM {}: {:?}, {:?}, {waits}; ran {}; {:?}, {} left of its window, balance {}, demand {}, \
                 slack {}; saved {}, unpaid {}{overdrawn}; {count} alarms charged {}",
                server.index,
                server.account.place,
                server.sleep,
                us(server.ran_for),
                server.deadlines,
                us(server.end.saturating_sub(now)),
                server.account.balance / 1_000,
                us(server.demand),
                us(server.slack),
                us(server.saved),
                us(server.unpaid),
                us(charged),
            )
        };
        let vcpus: String = self.servers.iter().map(line).collect();
        let (spare, pool, cost, late) = (us(self.spare), us(self.pool), us(self.cost), us(self.late));
        format!("spare {spare}, pool {pool}, mean check {cost}, late {late}{vcpus}")
    }

    /// Adds the present state to the snapshot.
    pub(crate) fn write_snapshot(&self, now: u64, into: &mut Snapshot) {
        into.add_span(now, self.last, self.end, self.calm);
        into.slices += self.windows;
        into.looks += self.checks;
        for server in self.servers.iter().filter(|server| !server.account.ended) {
            into.add_vcpu(server.account.state());
        }
        let mut start = self.last;
        let line = self.by_deadline.iter().filter_map(|at| self.servers.get(*at));
        for server in line.filter(|server| !self.calm && server.demand > 0) {
            let end = start.saturating_add(server.demand);
            into.add_segment(Segment { cpu: self.cpu, id: server.account.id, start, end });
            start = end;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::sim::{Guest, Host, MS, reservations};

    /// A plan whose only vCPU has this share of 20 ms left, and ran for 10 us before each of three checks of 50 us.
    fn after_checks(share: u64) -> (EdfCpu, Host) {
        let reservations = reservations(1, 50_000, &[(share, 20 * MS)], false).unwrap();
        let host = Host::new(1, &reservations, &[Guest::Sleeps]);
        let mut plan = EdfCpu::new(&reservations, 0, 0, |_| Arc::default());
        let server = &mut plan.servers[0];
        server.end = 20 * MS;
        server.account.balance = signed(share);
        for _ in 0..3 {
            ran(server, 10_000);
            server.count_alarm(50_000);
            server.charge_alarms();
        }
        (plan, host)
    }

    fn ran(server: &mut Server, ns: u64) {
        server.ran = true;
        server.account.balance -= signed(ns);
        server.alarms.ran += ns;
    }

    #[test]
    fn what_a_vcpu_gets_back_of_its_checks_is_part_of_its_need() {
        for share in [400_000, 750_000] {
            let (mut plan, _) = after_checks(share);
            let server = &mut plan.servers[0];
            // Two of the checks were not admitted.
            assert_eq!((server.alarms.charged, server.account.balance), (70_000, signed(share) - 100_000));
            server.update_demand(MS);
            assert_eq!(server.demand, share - 30_000);
            for need in [share - 60_000, share - 100_000, share - 160_000] {
                let more = server.demand - need;
                ran(server, more);
                server.charge_alarms();
                server.update_demand(MS);
                assert_eq!(server.demand, need, "after {more} ns more");
            }
        }
    }

    #[test]
    fn the_end_of_a_window_takes_a_check_also_if_its_vcpu_needs_nothing_more() {
        for (demand, cost) in [(0, 50_000), (MS, 50_000), (0, 20_000)] {
            let reservations = reservations(1, 50_000, &[(2 * MS, 10 * MS), (4 * MS, 20 * MS)], false).unwrap();
            let mut plan = EdfCpu::new(&reservations, 0, 0, |_| Arc::default());
            (plan.servers[0].end, plan.servers[0].demand) = (10 * MS, demand);
            (plan.servers[1].end, plan.servers[1].demand) = (20 * MS, 4 * MS);
            plan.sort_by_deadline(0);
            let free = plan.servers[1].slack;
            plan.cost = cost;
            plan.sort_by_deadline(0);
            assert_eq!(free - plan.servers[1].slack, 2 * cost, "the first one needs {demand} ns");
        }
    }

    /// The vCPU with the first deadline sleeps, and must preempt the next one when it wakes. That one must run before
    /// the last one, which has waited for longer.
    #[test]
    fn a_runnable_vcpu_leads_the_entitled_ones_behind_a_sleeping_one() {
        let reservations = reservations(1, 50_000, &[(MS, 10 * MS); 3], false).unwrap();
        let mut host = Host::new(1, &reservations, &[Guest::Sleeps, Guest::Spins, Guest::Spins]);
        let mut plan = EdfCpu::new(&reservations, 0, 0, |_| Arc::default());
        for (server, (end, need)) in plan.servers.iter_mut().zip([(9, 4), (15, 3), (12, 6)]) {
            (server.end, server.demand, server.account.balance) = (end * MS, need * MS, signed(need * MS));
        }
        plan.servers[0].runnable = false;
        host.tick();
        let holds = plan.choose_planned(0);
        assert_eq!((plan.leader, holds), (Some(2), 9 * MS));
        for _ in 0..2 {
            plan.apply_places(&mut host);
            host.tick();
        }
        let places: Vec<Place> = plan.servers.iter().map(|server| server.account.place).collect();
        assert_eq!(places, [Place::Planned, Place::Entitled, Place::Entitled]);
        let ran: Vec<u64> = host.vms.iter().map(|vm| vm.counts.ran / crate::sim::TICK).collect();
        assert_eq!((ran, host.flips), (vec![0, 1, 2], 3));
    }

    /// A job that comes while the last of the share is left must not wait unseen until the next window.
    #[test]
    fn a_sleeping_vcpu_keeps_its_place_until_its_share_is_gone() {
        for (sleep, left, place) in [
            (Sleep::Asleep, 15_000, Place::Entitled),
            (Sleep::Asleep, 0, Place::Beyond),
            (Sleep::Awake, 15_000, Place::Beyond),
        ] {
            let reservations = reservations(1, 50_000, &[(MS, 10 * MS)], false).unwrap();
            let mut host = Host::new(1, &reservations, &[Guest::Sleeps]);
            let mut plan = EdfCpu::new(&reservations, 0, 0, |_| Arc::default());
            let server = &mut plan.servers[0];
            (server.end, server.account.balance) = (10 * MS, signed(left));
            (server.deadlines, server.sleep) = (Deadlines::Live, sleep);
            server.update_demand(8 * MS);
            assert_eq!(server.demand > 0, place == Place::Entitled, "{sleep:?}, {left} ns left");
            plan.sort_by_deadline(8 * MS);
            plan.apply_places(&mut host);
            assert_eq!(plan.servers[0].account.place, place, "{sleep:?}, {left} ns left");
        }
    }

    /// Each of the first three vCPUs has 1.1 to 1.3 ms of slack, less than those behind it may need. While a planned
    /// vCPU runs, the order is checked again after 32 durations of a check.
    #[test]
    fn an_order_holds_until_the_check_that_may_come_last() {
        for (cost, planned, leader) in [(20_000, 2, Some(2)), (50_000, 1, None)] {
            let reservations = reservations(1, 50_000, &[(MS / 10, 100 * MS); 4], false).unwrap();
            let mut plan = EdfCpu::new(&reservations, 0, 0, |_| Arc::default());
            plan.cost = cost;
            let windows = [(10_000, 8_700), (12_000, 2_000), (14_000, 2_000), (30_000, 5_000)];
            for (server, (end, need)) in plan.servers.iter_mut().zip(windows) {
                (server.end, server.demand) = (end * 1_000, need * 1_000);
                server.account.balance = signed(server.demand);
            }
            plan.choose_planned(0);
            let number = plan.servers.iter().filter(|server| server.planned).count();
            assert_eq!((number, plan.leader), (planned, leader), "a check takes {cost} ns");
        }
    }

    /// The first of the entitled vCPUs has not run, but the other one has: so the first one may sleep.
    #[test]
    fn the_kernel_is_asked_about_a_leader_that_does_not_run() {
        for (leader, sleep) in [(None, Sleep::Awake), (Some(0), Sleep::Asleep)] {
            let reservations = reservations(1, 50_000, &[(MS, 10 * MS); 2], false).unwrap();
            let mut host = Host::new(1, &reservations, &[Guest::Sleeps, Guest::Spins]);
            let mut plan = EdfCpu::new(&reservations, 0, 0, |_| Arc::default());
            for (server, end) in plan.servers.iter_mut().zip([10 * MS, 20 * MS]) {
                (server.end, server.regular_end, server.granted) = (end, end, MS);
                (server.account.balance, server.exhausted) = (signed(MS), false);
            }
            plan.leader = leader;
            (0..50).for_each(|_| host.tick());
            plan.check(host.now, &mut host);
            assert_eq!(plan.servers[0].sleep, sleep);
        }
    }

    /// One vCPU was planned and has not run. If it sleeps, its need does not shrink before a check finds that.
    #[test]
    fn a_planned_vcpu_that_does_not_run_is_checked_before_its_slack_is_used_up() {
        for (slack, check) in [(2 * MS, 2 * MS), (MS / 10, MS / 4), (8 * MS, 4 * MS)] {
            let reservations = reservations(1, 50_000, &[(4 * MS, 20 * MS)], false).unwrap();
            let mut plan = EdfCpu::new(&reservations, 0, 0, |_| Arc::default());
            (plan.end, plan.spare) = (20 * MS, slack);
            let server = &mut plan.servers[0];
            (server.demand, server.account.balance, server.slack) = (4 * MS, signed(4 * MS), slack);
            (server.planned, server.account.place) = (true, Place::Planned);
            assert_eq!(plan.next_check(0, NEVER), check, "slack of {slack} ns");
        }
    }

    /// Two vCPUs are planned, whose order is not certain. The first one runs, or none did.
    #[test]
    fn checks_of_the_order_are_rare_while_a_planned_vcpu_runs() {
        let check = |cost: u64, runs: bool| {
            let reservations = reservations(1, 50_000, &[(8 * MS, 20 * MS), (4 * MS, 20 * MS)], false).unwrap();
            let mut plan = EdfCpu::new(&reservations, 0, 0, |_| Arc::default());
            (plan.cost, plan.end) = (cost, 20 * MS);
            for (server, balance) in plan.servers.iter_mut().zip([8 * MS, 4 * MS]) {
                (server.account.balance, server.demand) = (signed(balance), balance);
                (server.planned, server.account.place) = (true, Place::Planned);
            }
            plan.servers[0].ran = runs;
            plan.servers[0].ran_for = if runs { MS } else { 0 };
            plan.next_check(0, 0)
        };
        for cost in [20_000, 40_000] {
            assert_eq!((check(cost, true), check(cost, false)), (32 * cost, 16 * cost));
        }
    }

    #[test]
    fn a_calm_time_gives_no_charge_back() {
        let (mut plan, mut host) = after_checks(400_000);
        plan.begin_calm(MS, &mut host);
        let server = &mut plan.servers[0];
        let granted = server.account.balance;
        ran(server, 60_000);
        server.charge_alarms();
        assert_eq!(server.account.balance, granted - 60_000);
    }

    /// What [`EdfCpu::find_order_within`] finds, by looking at all pairs of vCPUs.
    fn order_within_by_pairs(plan: &EdfCpu, now: u64) -> Vec<u64> {
        let soonest = plan.doubt_delay_min();
        let order_checks = plan.order_checks(now);
        let line = || plan.by_deadline.iter().map(|at| &plan.servers[*at]).filter(|server| server.demand > 0);
        let all: u64 = line().map(|server| server.may_run(soonest)).sum();
        let within = |number: usize| {
            let need: u64 = line().take(number).map(|server| server.may_run(soonest)).sum();
            let misses = |one: &&Server| {
                let others = need.saturating_sub(all - one.later);
                others > 0 && one.slack < others + order_checks(one.end)
            };
            line().take(number).filter(misses).map(|one| one.slack).min().unwrap_or(u64::MAX)
        };
        (1..=line().count()).map(within).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        /// Some vCPUs have the same deadline, need nothing, sleep, or have ended.
        #[test]
        fn how_long_the_first_vcpus_run_in_any_order_is_found_as_by_looking_at_all_pairs(
            vcpus in prop::collection::vec((1_u64..40, 0_u64..2_000, any::<bool>(), 0_u8..20), 1..40),
            unit in prop::sample::select(vec![1_000_u64, 100_000, MS]),
            cost in prop::sample::select(vec![0_u64, 1, 20_000, 200_000]),
            now in 0..2 * MS,
        ) {
            let asked: Vec<(u64, u64)> = vcpus.iter().map(|_| (MS, 100 * MS)).collect();
            let reservations = reservations(1, 50_000, &asked, false).unwrap();
            let mut plan = EdfCpu::new(&reservations, 0, 0, |_| Arc::default());
            plan.cost = cost;
            for (server, (end, demand, runnable, other)) in plan.servers.iter_mut().zip(vcpus) {
                (server.end, server.runnable) = (end * unit, runnable);
                server.demand = if other == 0 { 0 } else { demand * unit / 1_000 };
                server.account.ended = other == 1;
            }
            plan.sort_by_deadline(now);
            plan.find_order_within();
            let line = plan.by_deadline.iter().map(|at| &plan.servers[*at]).filter(|server| server.demand > 0);
            let found: Vec<u64> = line.map(|server| server.order_within).collect();
            prop_assert_eq!(found, order_within_by_pairs(&plan, now));
        }
    }
}
