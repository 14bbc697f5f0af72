//! The account of one vCPU: its place, what is left of its share, and whether it had its budget in each period. Pure:
//! readings come in.
//!
//! Units: ns of CLOCK_MONOTONIC. Nothing is allocated.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ontime_plan::{Bandwidth, Nanos};
use ontime_tenants::ThreadId;

use crate::admit::Reserved;
use crate::model::{Counts, Place, Share, Tally, Threads, VcpuState};

/// A share with at most this much left counts as used up, ns: a check for so little would cost more. The rest is added
/// to the next share. For small budgets the limit is an eighth of the budget, but at least [`GRAIN_MIN`].
const GRAIN: u64 = 20_000;
const GRAIN_MIN: u64 = 2_000;
/// The longest time between two checks of vCPUs that all sleep, ns.
pub(crate) const CALM_MAX: u64 = 50_000_000;
/// The limit of the pool of unused time, ns, which is kept for vCPUs that have used up their shares.
pub(crate) const UNUSED_MAX: u64 = 10_000_000;
/// The pool of unused time is given away in pieces of at least this length, ns: a piece costs a check and two changes
/// of place.
pub(crate) const POOL_PIECE_MIN: u64 = 1_000_000;

/// A time as a signed amount, which may be a debt.
pub(crate) fn signed(ns: u64) -> i64 {
    i64::try_from(ns).unwrap_or(i64::MAX)
}

fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

/// The account of one vCPU.
#[derive(Debug)]
pub(crate) struct Account {
    pub id: ThreadId,
    pub bandwidth: Bandwidth,
    pub period: u64,
    /// See [`GRAIN`].
    pub grain: u64,
    pub tally: Arc<Tally>,
    pub ended: bool,
    pub place: Place,
    pub counts: Counts,
    /// What is left of its share, ns; negative after overuse.
    pub balance: i64,
    /// The end of its present period.
    pub deadline: u64,
    /// When its period began, or rather the check that began it; the thread's counters then.
    period_start: u64,
    counts_at_start: Counts,
    /// CPU time within shares since then; and the overuse before, which this period pays back.
    used: u64,
    debt: u64,
}

impl Account {
    /// An account of a vCPU at [`Place::Entitled`].
    pub(crate) fn new(reserved: &Reserved, now: u64, tally: Arc<Tally>) -> Self {
        let mut account = Self {
            id: reserved.id,
            bandwidth: reserved.bandwidth,
            period: reserved.period.0,
            grain: 0,
            tally,
            ended: false,
            place: Place::Entitled,
            counts: Counts::default(),
            balance: 0,
            deadline: 0,
            period_start: now,
            counts_at_start: Counts::default(),
            used: 0,
            debt: 0,
        };
        account.update_grain();
        account.begin_period(now);
        account
    }

    fn update_grain(&mut self) {
        self.grain = (self.share(self.period) / 8).clamp(GRAIN_MIN, GRAIN);
    }

    /// Applies a bandwidth that the guest newly claimed from its offer. Returns the change of the share up to `end`,
    /// ns.
    pub(crate) fn apply_claim(&mut self, index: usize, now: u64, end: u64, threads: &mut impl Threads) -> Option<i64> {
        let Share { bandwidth, period } = threads.claimed(index)?;
        if (bandwidth, period) == (self.bandwidth, self.period) {
            return None;
        }
        let left = end.saturating_sub(now);
        let before = signed(self.share(left));
        (self.bandwidth, self.period) = (bandwidth, period);
        self.update_grain();
        let more = signed(self.share(left)) - before;
        self.balance = self.balance.saturating_add(more);
        Some(more)
    }

    /// Takes the first reading; earlier CPU time is not counted.
    pub(crate) fn begin(&mut self, now: u64, counts: Option<Counts>) {
        match counts {
            Some(counts) => self.counts = counts,
            None => self.ended = true,
        }
        self.begin_period(now);
    }

    /// Continues another account of the same thread, which had been given `given` ns of time still to come. Place and
    /// debt are kept; the period too, if the reservation is the same.
    pub(crate) fn take_over(&mut self, before: &Account, given: u64) {
        self.place = before.place;
        self.counts = before.counts;
        self.balance = before.balance;
        if self.period == before.period && self.bandwidth == before.bandwidth {
            (self.deadline, self.period_start) = (before.deadline, before.period_start);
            (self.counts_at_start, self.used, self.debt) = (before.counts_at_start, before.used, before.debt);
        } else {
            self.debt = self.overuse(given);
        }
    }

    /// How much the vCPU has used ahead of its share up to now, if it was given `given` ns of time still to come.
    pub(crate) fn overuse(&self, given: u64) -> u64 {
        self.balance.saturating_sub(signed(given)).min(0).unsigned_abs()
    }

    /// The vCPU's place and deadline, for a snapshot.
    pub(crate) fn state(&self) -> VcpuState {
        VcpuState { id: self.id, place: self.place, deadline: self.deadline }
    }

    /// The vCPU's share of `ns` nanoseconds.
    pub(crate) fn share(&self, ns: u64) -> u64 {
        self.bandwidth.of(Nanos(ns)).0
    }

    /// Whether the share is used up.
    pub(crate) fn is_used_up(&self) -> bool {
        self.balance <= signed(self.grain)
    }

    /// Charges time that checks on the vCPU took, as if it had run; gives it back if it is negative.
    pub(crate) fn charge_checks(&mut self, ns: i64) {
        self.balance = self.balance.saturating_sub(ns);
        self.used = self.used.saturating_add_signed(ns);
    }

    /// Reads the thread's counters; returns how long it ran since the last reading, ns.
    pub(crate) fn read(&mut self, index: usize, threads: &mut impl Threads) -> u64 {
        let before = self.counts.ran;
        match threads.read(index) {
            Some(counts) => self.charge(counts),
            None => self.ended = true,
        }
        self.counts.ran - before
    }

    /// Charges a reading: time since the last reading was used at the present place.
    fn charge(&mut self, counts: Counts) {
        let ran = counts.ran.saturating_sub(self.counts.ran);
        self.counts = Counts { ran: self.counts.ran + ran, ..counts };
        if self.place == Place::Beyond {
            add(&self.tally.beyond, ran);
        } else {
            self.balance = self.balance.saturating_sub(signed(ran));
            self.used = self.used.saturating_add(ran);
            add(&self.tally.ran, ran);
        }
    }

    /// Moves the vCPU to the place that `target` gives after a reading. Where the thread runs on another CPU, the
    /// reading before the change may lack up to a tick, and the reading after it is exact. Hence a second try.
    pub(crate) fn update_place(
        &mut self,
        index: usize,
        threads: &mut impl Threads,
        target: impl Fn(&Account) -> Place,
    ) {
        for _ in 0..2 {
            if self.ended {
                return;
            }
            if self.place != Place::Beyond {
                self.read(index, threads);
            }
            if self.ended || !self.move_to(index, target(self), threads) {
                return;
            }
        }
    }

    /// Moves the vCPU to a place. True if it had another.
    pub(crate) fn move_to(&mut self, index: usize, place: Place, threads: &mut impl Threads) -> bool {
        if self.place == place {
            return false;
        }
        // A vCPU at another place has been read at this check, so its thread is still the one that was opened
        // (`run/vcpu.rs`).
        if self.place == Place::Beyond {
            self.read(index, threads);
            if self.ended {
                return true;
            }
        }
        match threads.set_place(index, place) {
            Some(counts) => {
                self.charge(counts);
                self.place = place;
                add(&self.tally.flips, 1);
                if place == Place::Beyond {
                    add(&self.tally.overruns, 1);
                }
            }
            None => self.ended = true,
        }
        true
    }

    /// Judges the vCPU's period if it is over, and begins the next.
    pub(crate) fn end_period(&mut self, now: u64) {
        if now < self.deadline {
            return;
        }
        let length = now.saturating_sub(self.period_start);
        let budget = self.share(length);
        let waited = self.counts.waited.saturating_sub(self.counts_at_start.waited);
        // A period is judged at a check, which comes microseconds late; and the last share may have left a grain.
        let tolerance = budget / 50 + 2 * self.grain;
        let used = self.used.saturating_add(self.debt).saturating_add(tolerance);
        if used < budget && waited > length.saturating_sub(budget) + tolerance {
            add(&self.tally.misses, 1);
        }
        add(&self.tally.periods, length.div_ceil(self.period.max(1)));
        self.begin_period(now);
    }

    fn begin_period(&mut self, now: u64) {
        // All periods are counted from the clock's zero: equal periods end together, which makes fewer slices.
        self.deadline = (now / self.period.max(1) + 1).saturating_mul(self.period);
        self.period_start = now;
        self.counts_at_start = self.counts;
        self.used = 0;
        self.debt = self.balance.min(0).unsigned_abs();
    }
}
