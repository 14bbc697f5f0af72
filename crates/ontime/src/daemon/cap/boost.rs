//! When a vCPU runs ahead of other vCPUs of its level, so that it can take an interrupt (Xen-ARM, APSys'11, section 4).
//!
//! Pure, and for one vCPU: interrupts and readings of its CPU time come in, [`Move`]s go out. The vCPU is put ahead
//! when an interrupt becomes pending that it does not take at once. After [`GRANT`] of CPU time it goes behind the
//! waiting vCPUs of its level. The end of the interrupt (EOI) would come too early as a limit: a guest's handler
//! signals EOI at its beginning, before the network stack and the application have run. A vCPU that goes to sleep stays
//! ahead, which delays no other thread, and so is ahead already when it wakes. The time that it runs ahead is charged
//! to a separate account: at most [`SHARE`], however many interrupts come.

use super::account::{Account, Share, Verdict};

/// CPU time ahead for one interrupt, ns: enough for the handler, the guest's network stack and a short answer. A vCPU
/// with a pending interrupt waits at most this long for each other vCPU of its level that also has one pending.
pub(super) const GRANT: u64 = 100_000;
/// How long a vCPU that its runtime cap has paused may run in that pause after all, because of interrupts, ns. The
/// pause gets longer in proportion.
pub(super) const OUT: u64 = 3 * GRANT;
/// The share of one CPU that a vCPU may take while ahead.
pub(super) const SHARE: Share = Share::HALF;
/// A grant counts as used up when no more than this is left of it, ns: the kernel's timer and its run-time counter
/// differ.
const GRAIN: u64 = GRANT / 8;
/// The least time between two checks of a vCPU that is ahead, ns.
const LEAST: u64 = GRANT / 4;
/// A vCPU that neither ran nor sleeps waits for its CPU, or is stopped. It is checked again after this time, ns.
const LINGER: u64 = 1_000_000;

/// A change of the thread's priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Move {
    /// Put it ahead of its level.
    Raise,
    /// Keep it ahead, but behind the other vCPUs that are: its grant is used up, and another interrupt is pending.
    Again,
    /// Back to its place, behind the threads that wait there.
    Lower,
}

/// The present stay ahead.
#[derive(Debug, Clone, Copy, Default)]
struct Grant {
    used: u64,
    /// Another interrupt became pending in the meantime.
    again: bool,
    /// When to check the vCPU, ns; None: it sleeps.
    check: Option<u64>,
}

/// The state of one vCPU.
#[derive(Debug, Clone, Copy)]
pub(super) struct Boost {
    account: Account,
    /// Not put ahead before this instant, ns, because its share is used up.
    barred: u64,
    ahead: Option<Grant>,
}

impl Boost {
    /// A vCPU at its place. Its share is judged over this period, ns.
    pub(super) fn new(period: u64, now: u64) -> Self {
        Self { account: Account::new(SHARE, period, now), barred: 0, ahead: None }
    }

    /// An interrupt is pending. `own`: the vCPU raised it itself, so it runs and takes the interrupt now.
    pub(super) fn interrupt(&mut self, own: bool, now: u64) -> Option<Move> {
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

    /// The vCPU ran for `ran` ns since the last reading.
    pub(super) fn charge(&mut self, ran: u64, now: u64) -> Option<Move> {
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

    /// A due check found, and charged, `ran` ns. `asleep` is called only if that is 0.
    pub(super) fn checked(&mut self, ran: u64, now: u64, asleep: impl FnOnce() -> bool) {
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

    /// When to check it, ns; None: not ahead, or asleep.
    pub(super) fn check(&self) -> Option<u64> {
        self.ahead?.check
    }

    /// Whether it is ahead.
    pub(super) fn is_ahead(&self) -> bool {
        self.ahead.is_some()
    }

    /// Whether it is ahead for an interrupt that it may not have taken yet.
    pub(super) fn is_pending(&self) -> bool {
        self.check().is_some()
    }

    /// It is no longer ahead, even if an interrupt is pending.
    pub(super) fn end(&mut self) {
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
        /// Whatever interrupts come and however the vCPU runs, the time ahead is at most its share. And a vCPU that is
        /// ahead always has a check scheduled, unless it sleeps.
        #[test]
        fn time_ahead_is_capped(
            // Steps: 0 an interrupt raised by another thread, 1 by itself, 2 the vCPU runs, 3 it does not run; and the
            // length, us.
            steps in prop::collection::vec((0u8..4, 1u64..400), 1..400),
        ) {
            let mut boost = boost();
            let (mut now, mut ahead, mut unread, mut unseen) = (0u64, 0u64, 0u64, 0u64);
            for (what, us) in steps {
                match what {
                    0 | 1 => {
                        // Like the watcher: read before it is raised.
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
                            // The wake-up was missed: the next look for the cap reads the vCPU.
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
