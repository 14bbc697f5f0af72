//! The arithmetic of a runtime cap: how much CPU time was taken at RT priority, and whether that was too much.
//!
//! Pure: time comes in as nanoseconds of one monotonic clock, verdicts go out.

use ontime_tenants::RuntimeCap;
use serde::{Deserialize, Serialize};

/// Parts of a million: a share of one CPU without floating point.
pub const MILLION: u64 = 1_000_000;

/// A share of one CPU, over 0 and up to 1, held in parts per million.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Share(u32);

impl Share {
    /// What the kernel's own protections leave to real-time threads, and Ontime's default.
    pub const NINETY_FIVE: Share = Share(950_000);

    /// A quarter of a CPU.
    pub const QUARTER: Share = Share(250_000);
    /// Half of a CPU.
    pub const HALF: Share = Share(500_000);

    /// `fraction` of one CPU. `None` unless it is at least [`RuntimeCap::LEAST`] and at most 1.
    pub fn new(fraction: f64) -> Option<Self> {
        // The cast saturates and is in range: fraction is checked to be within 0 to 1.
        (RuntimeCap::LEAST..=1.0).contains(&fraction).then(|| Self((fraction * MILLION as f64).round() as u32))
    }

    /// As a fraction of one CPU.
    pub fn fraction(self) -> f64 {
        f64::from(self.0) / MILLION as f64
    }

    /// Whether this share is a whole CPU: nothing is left to cap.
    pub fn is_whole(self) -> bool {
        u64::from(self.0) >= MILLION
    }

    /// The share of `length` ns.
    pub fn of(self, length: u64) -> u64 {
        (u128::from(length) * u128::from(self.0) / u128::from(MILLION)) as u64
    }

    /// The least length, ns, of which `used` ns are no more than this share.
    pub fn stretch(self, used: u64) -> u64 {
        let length = (u128::from(used) * u128::from(MILLION)).div_ceil(u128::from(self.0));
        u64::try_from(length).unwrap_or(u64::MAX)
    }
}

/// What a charge means for the one charged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Within the cap.
    Within,
    /// Over it: no RT time until this instant, ns.
    Over {
        /// The instant, ns, at which use and cap are even again.
        until: u64,
    },
}

/// One capped account: a thread's, or a CPU's.
///
/// Time is cut into intervals. An interval ends when at least a period has gone by and its use is within the share of
/// its length; where the budget (the share of a period) is used up sooner, the verdict says until when to stay away,
/// and that instant ends it. So in every interval the use is at most share x length, late readings included: what was
/// overdrawn is paid back.
#[derive(Debug, Clone, Copy)]
pub struct Account {
    share: Share,
    period: u64,
    start: u64,
    used: u64,
}

impl Account {
    /// An account whose first interval starts `now`.
    pub fn new(share: Share, period: u64, now: u64) -> Self {
        Self { share, period, start: now, used: 0 }
    }

    /// The share of a period, ns.
    pub fn budget(&self) -> u64 {
        self.share.of(self.period)
    }

    /// The least time after `looked`, ns, in which the budget can be used up. Of a pause that is under way a period
    /// counts at most: where a small share makes it long, others of that CPU are looked at meanwhile.
    pub fn left_after(&self, looked: u64) -> u64 {
        let left = self.budget().saturating_sub(self.used);
        left.saturating_add(self.start.saturating_sub(looked).min(self.period))
    }

    /// What was used, ns, beyond all of the time since the interval's start: in the pause before it.
    pub fn used_before(&self, now: u64) -> u64 {
        self.used.saturating_sub(now.saturating_sub(self.start))
    }

    /// Whether nothing was used in this interval yet.
    pub fn is_new(&self) -> bool {
        self.used == 0
    }

    /// From this much on, an interval is judged. A little below the budget: the kernel's timer and its counter differ
    /// by microseconds, and a reading of 99.99 % must not be taken for an early one.
    fn judged_from(&self) -> u64 {
        self.budget() - self.budget() / 16
    }

    /// Charges `ran` ns, read at `now`.
    pub fn charge(&mut self, now: u64, ran: u64) -> Verdict {
        self.used = self.used.saturating_add(ran);
        let even_at = self.start.saturating_add(self.share.stretch(self.used));
        if self.used >= self.judged_from() && now < even_at {
            return Verdict::Over { until: even_at };
        }
        if now.saturating_sub(self.start) >= self.period {
            self.restart(now);
        }
        Verdict::Within
    }

    /// Starts a new interval: the cap's pause is over.
    pub fn restart(&mut self, now: u64) {
        self.start = now;
        self.used = 0;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_share_is_over_zero_and_at_most_one() {
        for bad in [0.0, -0.1, 1.01, f64::NAN, f64::INFINITY, 1e-9] {
            assert!(Share::new(bad).is_none(), "{bad}");
        }
        assert!(Share::new(1.0).unwrap().is_whole());
        assert!(!Share::new(0.999).unwrap().is_whole());
        assert_eq!(Share::new(0.95).unwrap().of(5 * MS), 4_750_000);
        assert_eq!(Share::new(0.95).unwrap().stretch(4_750_000), 5 * MS);
    }

    #[test]
    fn a_spinner_is_stopped_for_the_rest_of_the_period() {
        let mut account = Account::new(Share::new(0.95).unwrap(), 5 * MS, 0);
        assert_eq!(account.charge(4_750_000, 4_750_000), Verdict::Over { until: 5 * MS });
    }

    #[test]
    fn a_late_reading_is_paid_back_in_full() {
        let mut account = Account::new(Share::new(0.5).unwrap(), 10 * MS, 0);
        assert_eq!(account.charge(40 * MS, 40 * MS), Verdict::Over { until: 80 * MS });
    }

    #[test]
    fn a_counter_that_reads_a_little_short_still_counts() {
        let mut account = Account::new(Share::new(0.95).unwrap(), 5 * MS, 0);
        assert!(matches!(account.charge(4_750_000, 4_745_000), Verdict::Over { .. }));
    }

    #[test]
    fn honest_use_is_left_alone() {
        let mut account = Account::new(Share::new(0.95).unwrap(), 5 * MS, 0);
        for n in 1..1000 {
            // 4.75 ms of CPU in each 8 ms.
            assert_eq!(account.charge(n * 8 * MS, 4_750_000), Verdict::Within);
        }
    }

    proptest! {
        /// However a thread runs and sleeps, RT time in any window is at most share x window, plus what the two
        /// intervals cut by the window's ends may hold: a budget, the grain of a reading, and the reading's delay each.
        #[test]
        fn rt_time_in_any_window_is_capped(
            percent in 5u32..=99,
            period in 1u64..=20,
            // Runs of CPU time and of sleep, microseconds, in turn; and how late each reading comes.
            turns in proptest::collection::vec((1u64..30_000, 0u64..30_000, 0u64..200), 1..200),
        ) {
            let share = Share::new(f64::from(percent) / 100.0).unwrap();
            let period = period * MS;
            let mut account = Account::new(share, period, 0);
            let grain = account.budget();
            let mut now = 0u64;
            let mut since_reading = 0u64;
            let mut spans: Vec<(u64, u64)> = Vec::new(); // RT spans [from, to)
            for (run, sleep, late) in turns {
                let mut left = run * 1000;
                while left > 0 {
                    // Runs until the grain is used (and the reading's delay), as the perf event does.
                    let step = left.min(grain - since_reading.min(grain - 1) + late * 1000);
                    spans.push((now, now + step));
                    now += step;
                    left -= step;
                    since_reading += step;
                    if since_reading >= grain {
                        if let Verdict::Over { until } = account.charge(now, since_reading) {
                            now = now.max(until);
                            account.restart(now);
                        }
                        since_reading = 0;
                    }
                }
                now += sleep * 1000;
            }
            let late = 200_000;
            let slack = 2 * (grain + account.budget() + late);
            for (index, &(from, _)) in spans.iter().enumerate() {
                let mut ran = 0;
                for &(start, end) in &spans[index..] {
                    ran += end - start;
                    let allowed = share.of(end - from) + slack;
                    prop_assert!(ran <= allowed, "{ran} ns in {} ns, allowed {allowed}", end - from);
                }
            }
        }
    }
}
