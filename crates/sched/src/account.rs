//! One vCPU's account: at which place it stands, what it has of its share, whether its periods were whole. Pure:
//! readings come in.
//!
//! Units: ns of CLOCK_MONOTONIC. Nothing is allocated.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ontime_plan::{Bandwidth, Nanos};
use ontime_tenants::ThreadId;

use crate::published::Next;
use crate::settle::Reserved;
use crate::show::Standing;

/// A share with no more than this left counts as used up, ns: a look for less would cost more. What was left is kept
/// for the next one. Of small budgets it is an eighth, and not below the least.
const GRAIN: u64 = 20_000;
const GRAIN_MIN: u64 = 2_000;

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
    /// Time runnable and waiting for one. The kernel adds a wait when it ends: who still waits does not show.
    pub waited: u64,
}

/// What a vCPU has a right to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Of a CPU.
    pub bandwidth: Bandwidth,
    /// In each of these periods, ns.
    pub period: u64,
}

/// The vCPU threads. None: it has ended.
pub trait Threads {
    /// What one has had up to now.
    fn read(&mut self, seat: usize) -> Option<Counts>;
    /// Whether it sleeps: does not wait for a CPU, or for a lock. Takes some three readings.
    fn sleeps(&mut self, seat: usize) -> bool;
    /// The next deadline after `after`, ns, that its guest publishes; None where it publishes none.
    fn next(&mut self, seat: usize, after: u64) -> Option<Next>;
    /// Its share, where its guest has taken what it was offered ([`crate::ledger`]) since this was asked last.
    fn claimed(&mut self, seat: usize) -> Option<Share>;
    /// Changes its place, and reads it. A change that the kernel refuses counts as made: it is tried again with the
    /// next one.
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
    /// Periods in which it had less than its budget although it wanted it: it waited for longer than the period less
    /// the budget.
    pub misses: AtomicU64,
    /// Changes of place.
    pub flips: AtomicU64,
    /// Changes of place that the kernel refused.
    pub refused: AtomicU64,
}

fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

/// A time as an amount that may be owed.
pub(crate) fn signed(ns: u64) -> i64 {
    i64::try_from(ns).unwrap_or(i64::MAX)
}

/// One vCPU.
#[derive(Debug)]
pub(crate) struct Account {
    pub id: ThreadId,
    pub bandwidth: Bandwidth,
    pub period: u64,
    /// See [`GRAIN`].
    pub grain: u64,
    pub tally: Arc<Tally>,
    pub gone: bool,
    pub place: Place,
    pub counts: Counts,
    /// What is left of its share, ns; below 0 where it took more.
    pub balance: i64,
    /// The end of its present period.
    pub deadline: u64,
    /// When its period began, as far as it was looked at, and what it had had then.
    since: u64,
    at_since: Counts,
    /// CPU time within shares since then; and what it had had too much before, which this period pays back.
    had: u64,
    owed: u64,
}

impl Account {
    /// Of one at [`Place::Entitled`].
    pub fn new(reserved: &Reserved, now: u64, tally: Arc<Tally>) -> Self {
        let mut account = Self {
            id: reserved.id,
            bandwidth: reserved.bandwidth,
            period: reserved.period.0,
            grain: 0,
            tally,
            gone: false,
            place: Place::Entitled,
            counts: Counts::default(),
            balance: 0,
            deadline: 0,
            since: now,
            at_since: Counts::default(),
            had: 0,
            owed: 0,
        };
        account.regrain();
        account.begin_period(now);
        account
    }

    fn regrain(&mut self) {
        self.grain = (self.share(self.period) / 8).clamp(GRAIN_MIN, GRAIN);
    }

    /// Has what its guest has taken, if that is news: what it is more for the time up to `end`, ns.
    pub fn hear(&mut self, index: usize, now: u64, end: u64, threads: &mut impl Threads) -> Option<i64> {
        let Share { bandwidth, period } = threads.claimed(index)?;
        if (bandwidth, period) == (self.bandwidth, self.period) {
            return None;
        }
        let left = end.saturating_sub(now);
        let before = signed(self.share(left));
        (self.bandwidth, self.period) = (bandwidth, period);
        self.regrain();
        let more = signed(self.share(left)) - before;
        self.balance = self.balance.saturating_add(more);
        Some(more)
    }

    /// Takes the first reading: what it had before is not counted.
    pub fn begin(&mut self, now: u64, counts: Option<Counts>) {
        match counts {
            Some(counts) => self.counts = counts,
            None => self.gone = true,
        }
        self.begin_period(now);
    }

    /// Goes on where another account of the same thread ends, of which it was `given` so much of the time to come: it
    /// keeps place and debt, and its period if that is the same.
    pub fn take_over(&mut self, before: &Account, given: u64) {
        self.place = before.place;
        self.counts = before.counts;
        self.balance = before.balance;
        if self.period == before.period && self.bandwidth == before.bandwidth {
            (self.deadline, self.since) = (before.deadline, before.since);
            (self.at_since, self.had, self.owed) = (before.at_since, before.had, before.owed);
        } else {
            self.owed = self.ahead(given);
        }
    }

    /// What it has had ahead of its share of the time up to now, if it was `given` so much of the time to come.
    pub fn ahead(&self, given: u64) -> u64 {
        self.balance.saturating_sub(signed(given)).min(0).unsigned_abs()
    }

    /// For showing.
    pub fn standing(&self) -> Standing {
        Standing { id: self.id, place: self.place, deadline: self.deadline }
    }

    /// What it is entitled to of this time.
    pub fn share(&self, ns: u64) -> u64 {
        self.bandwidth.of(Nanos(ns)).0
    }

    /// Whether its share is used up.
    pub fn is_used_up(&self) -> bool {
        self.balance <= signed(self.grain)
    }

    /// Reads it; returns how long it ran since the last reading, ns.
    pub fn read(&mut self, index: usize, threads: &mut impl Threads) -> u64 {
        let before = self.counts.ran;
        match threads.read(index) {
            Some(counts) => self.charge(counts),
            None => self.gone = true,
        }
        self.counts.ran - before
    }

    /// Takes a reading: time since the last one was had at the present place.
    fn charge(&mut self, counts: Counts) {
        let ran = counts.ran.saturating_sub(self.counts.ran);
        self.counts = Counts { ran: self.counts.ran + ran, ..counts };
        if self.place == Place::Beyond {
            add(&self.tally.beyond, ran);
        } else {
            self.balance = self.balance.saturating_sub(signed(ran));
            self.had = self.had.saturating_add(ran);
            add(&self.tally.ran, ran);
        }
    }

    /// Gives it the place that `target` says after a reading. A reading before the change may lack up to a tick where
    /// the thread runs on another CPU, the one after it is exact: hence a second try.
    pub fn advance(&mut self, index: usize, threads: &mut impl Threads, target: impl Fn(&Account) -> Place) {
        for _ in 0..2 {
            if self.gone {
                return;
            }
            if self.place != Place::Beyond {
                self.read(index, threads);
            }
            if self.gone || !self.move_to(index, target(self), threads) {
                return;
            }
        }
    }

    /// True if its place was another.
    pub fn move_to(&mut self, index: usize, place: Place, threads: &mut impl Threads) -> bool {
        if self.place == place {
            return false;
        }
        // The others have been read at this look: the thread is the one that was opened (see `crate::seat`).
        if self.place == Place::Beyond {
            self.read(index, threads);
            if self.gone {
                return true;
            }
        }
        match threads.place(index, place) {
            Some(counts) => {
                self.charge(counts);
                self.place = place;
                add(&self.tally.flips, 1);
                if place == Place::Beyond {
                    add(&self.tally.overruns, 1);
                }
            }
            None => self.gone = true,
        }
        true
    }

    /// Judges its period if that is over.
    pub fn close_period(&mut self, now: u64) {
        if now < self.deadline {
            return;
        }
        let length = now.saturating_sub(self.since);
        let budget = self.share(length);
        let waited = self.counts.waited.saturating_sub(self.at_since.waited);
        // A period is judged at a look, which comes late by microseconds; and the share of the last one may be a grain
        // short.
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
