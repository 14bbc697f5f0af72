//! When a vCPU stands ahead of others of its level, because an interrupt is to be taken (Xen-ARM, APSys'11, section 4).
//!
//! Pure, and of one vCPU: interrupts and readings of its CPU time come in, [`Move`]s go out. It is put ahead when an
//! interrupt becomes pending that it does not take at once, for [`GRANT`] of CPU time; then it is behind those of its
//! level that wait. Not until the end of the interrupt (EOI): a guest's handler says that at its beginning, before the
//! stack and the application have run. One that has slept since stands ahead still, which costs nobody anything, and is
//! ahead already when it wakes. What it takes ahead is charged to an account of its own: at most [`SHARE`] of the time,
//! however many interrupts come.

use super::account::{Account, Share, Verdict};

/// CPU time ahead for one interrupt, ns: enough for the handler, the guest's stack and a short answer. Who of a level
/// has a pending interrupt waits for so much of each other one that has, at most.
pub const GRANT: u64 = 100_000;
/// The most of a pause, ns, that a vCPU which its runtime cap paused may run after all, because of interrupts. The
/// pause gets longer by it.
pub const OUT: u64 = 3 * GRANT;
/// What it may take ahead, of one CPU.
pub const SHARE: Share = Share::HALF;
/// A grant is used up when so little of it is left, ns: the kernel's timer and its counter differ.
const GRAIN: u64 = GRANT / 8;
/// The least time between two looks at one that is ahead, ns.
const LEAST: u64 = GRANT / 4;
/// One that did not run and does not sleep waits, or is stopped: it is looked at again after this, ns.
const LINGER: u64 = 1_000_000;

/// What is to be done with the thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Move {
    /// Ahead of its level.
    Raise,
    /// Ahead as it is, but behind the others that are: it has had its turn, and there are more interrupts.
    Again,
    /// To its own place, behind those who wait there.
    Lower,
}

/// Being ahead.
#[derive(Debug, Clone, Copy, Default)]
struct Grant {
    used: u64,
    /// Another interrupt came meanwhile.
    again: bool,
    /// When to look, ns; None: it sleeps.
    check: Option<u64>,
}

/// One vCPU.
#[derive(Debug, Clone, Copy)]
pub struct Boost {
    account: Account,
    /// Its share of being ahead is used up until then, ns.
    barred: u64,
    ahead: Option<Grant>,
}

impl Boost {
    /// One at its own place; its share is judged over this period, ns.
    pub fn new(period: u64, now: u64) -> Self {
        Self { account: Account::new(SHARE, period, now), barred: 0, ahead: None }
    }

    /// An interrupt is pending. `own`: the vCPU said so itself, thus runs, and takes it now.
    pub fn interrupt(&mut self, own: bool, now: u64) -> Option<Move> {
        match &mut self.ahead {
            Some(grant) if grant.check.is_some() => grant.again |= !own,
            Some(grant) => *grant = Grant { check: Some(now + GRANT), ..Grant::default() },
            None if own || now < self.barred => {}
            None => {
                self.ahead = Some(Grant { check: Some(now + GRANT), ..Grant::default() });
                return Some(Move::Raise);
            }
        }
        None
    }

    /// It took `ran` ns since the last reading.
    pub fn charge(&mut self, ran: u64, now: u64) -> Option<Move> {
        let grant = self.ahead.as_mut()?;
        grant.used = grant.used.saturating_add(ran);
        if let Verdict::Over { until } = self.account.charge(now, ran) {
            self.account.restart(until);
            self.barred = until;
            self.ahead = None;
            return Some(Move::Lower);
        }
        if grant.used + GRAIN < GRANT {
            return None;
        }
        if grant.again {
            *grant = Grant { check: Some(now + GRANT), ..Grant::default() };
            return Some(Move::Again);
        }
        self.ahead = None;
        Some(Move::Lower)
    }

    /// It was looked at because that was due, and charged with `ran` ns; whether it sleeps is asked where it did not
    /// run.
    pub fn checked(&mut self, ran: u64, now: u64, asleep: impl FnOnce() -> bool) {
        let Some(grant) = &mut self.ahead else { return };
        if grant.check.is_none_or(|at| at > now) {
            return;
        }
        let left = GRANT.saturating_sub(grant.used).max(LEAST);
        grant.check = match ran {
            0 if asleep() => None,
            0 => Some(now + LINGER),
            _ => Some(now + left),
        };
    }

    /// When to look at it, ns.
    pub fn check(&self) -> Option<u64> {
        self.ahead?.check
    }

    /// Whether it stands ahead.
    pub fn is_ahead(&self) -> bool {
        self.ahead.is_some()
    }

    /// Whether it stands ahead of others for an interrupt that it has not taken yet, as far as is known.
    pub fn is_pending(&self) -> bool {
        self.check().is_some()
    }

    /// It is somewhere else now, whatever is pending.
    pub fn end(&mut self) {
        self.ahead = None;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;

    fn boost() -> Boost {
        Boost::new(3 * MS, 0)
    }

    #[test]
    fn a_pending_interrupt_puts_it_ahead_for_a_grant() {
        let mut boost = boost();
        assert_eq!(boost.interrupt(false, 10), Some(Move::Raise));
        assert_eq!(boost.check(), Some(10 + GRANT));
        assert_eq!(boost.charge(GRANT / 2, 10 + GRANT), None);
        boost.checked(GRANT / 2, 10 + GRANT, || false);
        assert_eq!(boost.check(), Some(10 + GRANT + GRANT / 2));
        assert_eq!(boost.charge(GRANT / 2, 2 * GRANT), Some(Move::Lower));
        assert!(!boost.is_ahead() && boost.check().is_none());
    }

    #[test]
    fn who_runs_takes_its_interrupts_where_it_is() {
        let mut boost = boost();
        assert_eq!(boost.interrupt(true, 10), None);
        assert!(!boost.is_ahead());
    }

    #[test]
    fn a_sleeper_is_ahead_when_it_wakes_and_costs_no_looks() {
        let mut boost = boost();
        boost.interrupt(false, 0);
        let mut now = GRANT;
        assert_eq!(boost.charge(30_000, now), None);
        boost.checked(30_000, now, || true);
        let mut looks = 0;
        while let Some(at) = boost.check() {
            now = at;
            assert_eq!(boost.charge(0, now), None);
            boost.checked(0, now, || true);
            looks += 1;
        }
        assert!(looks == 1 && boost.is_ahead() && !boost.is_pending());
        // It wakes by its own timer, and computes.
        assert_eq!(boost.interrupt(true, 50 * MS), None);
        assert_eq!(boost.charge(GRANT, 50 * MS + GRANT), Some(Move::Lower));
    }

    #[test]
    fn one_that_is_stopped_or_kept_waiting_is_looked_at_until_it_has_had_its_turn() {
        let mut boost = boost();
        boost.interrupt(false, 0);
        for _ in 0..100 {
            let at = boost.check().unwrap();
            assert_eq!(boost.charge(0, at), None);
            boost.checked(0, at, || false);
            assert_eq!(boost.check(), Some(at + LINGER));
        }
        assert_eq!(boost.charge(LINGER, 200 * MS), Some(Move::Lower));
    }

    #[test]
    fn one_whose_wake_up_was_not_told_is_lowered_when_it_is_read() {
        let mut boost = boost();
        boost.interrupt(false, 0);
        boost.charge(0, GRANT);
        boost.checked(0, GRANT, || true);
        assert_eq!(boost.check(), None);
        assert_eq!(boost.charge(3 * MS, 100 * MS), Some(Move::Lower));
    }

    #[test]
    fn more_interrupts_are_more_turns_until_its_share_is_used_up() {
        let mut boost = boost();
        assert_eq!(boost.interrupt(false, 0), Some(Move::Raise));
        let (mut now, mut turns) = (0, 0);
        let until = loop {
            boost.interrupt(false, now);
            now += GRANT;
            match boost.charge(GRANT, now) {
                Some(Move::Again) => turns += 1,
                Some(Move::Lower) => break boost.barred,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(turns, 14 - 1 + u64::from(now > 14 * GRANT), "half of 3 ms in grants of 0.1 ms");
        assert!(until > now);
        assert_eq!(boost.interrupt(false, until - 1), None);
        assert_eq!(boost.interrupt(false, until), Some(Move::Raise));
    }

    proptest! {
        /// However interrupts come and whatever it does, what it takes ahead is at most its share; and it is never
        /// ahead without somebody looking, unless it sleeps.
        #[test]
        fn time_ahead_is_capped(
            // Steps: 0 an interrupt of others, 1 its own, 2 it runs, 3 it does not; and how long, us.
            steps in prop::collection::vec((0u8..4, 1u64..400), 1..400),
        ) {
            let mut boost = boost();
            let (mut now, mut ahead, mut unread, mut unseen) = (0u64, 0u64, 0u64, 0u64);
            for (what, us) in steps {
                match what {
                    0 | 1 => {
                        // As the watcher does: read before it is raised.
                        if !boost.is_ahead() { unread = 0; }
                        boost.interrupt(what == 1, now);
                    }
                    _ => {
                        let mut left = us * 1_000;
                        while left > 0 {
                            let step = boost.check().map_or(left, |at| left.min(at.saturating_sub(now).max(1)));
                            now += step;
                            left -= step;
                            if what == 2 {
                                unread += step;
                                if boost.is_ahead() { ahead += step; }
                            }
                            if boost.check().is_some_and(|at| at <= now) {
                                let ran = std::mem::take(&mut unread);
                                boost.charge(ran, now);
                                boost.checked(ran, now, || what == 3);
                            }
                        }
                        if what == 2 && boost.is_ahead() && !boost.is_pending() {
                            // Its wake-up was lost: a cap's look reads it.
                            unseen += us * 1_000;
                            boost.charge(std::mem::take(&mut unread), now);
                        }
                    }
                }
                let allowed = SHARE.of(now) + SHARE.of(3 * MS) + GRANT + 2 * LEAST + unseen;
                prop_assert!(ahead <= allowed, "{ahead} ns ahead in {now}, allowed {allowed}");
            }
        }
    }
}
