//! The arithmetic of a runtime cap: how much CPU time was taken at RT priority, and whether that exceeds the cap.
//!
//! Pure: times come in as ns of a monotonic clock, verdicts go out.

use ontime_plan::Bandwidth;
use ontime_tenants::RuntimeCap;
use serde::{Deserialize, Serialize};

/// Shares are integers in parts per million, so that the watcher needs no floating point.
pub(crate) const MILLION: u64 = 1_000_000;

/// A share of one CPU, or of several together, above 0, in parts per million of one CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Share(u32);

impl Share {
    /// What RT throttling leaves to real-time threads, and Ontime's default.
    pub(crate) const NINETY_FIVE: Share = Share(950_000);

    /// A quarter of a CPU.
    pub(crate) const QUARTER: Share = Share(250_000);
    /// Half of a CPU.
    pub(crate) const HALF: Share = Share(500_000);

    /// `fraction` of one CPU. `None` unless it is at least [`RuntimeCap::LEAST`] and at most 1.
    pub(crate) fn new(fraction: f64) -> Option<Self> {
        // The cast is in range: the fraction is within 0 to 1.
        (RuntimeCap::LEAST..=1.0).contains(&fraction).then(|| Self((fraction * MILLION as f64).round() as u32))
    }

    /// This share of each of `count` CPUs together.
    pub(crate) fn times(self, count: u32) -> Self {
        Self(self.0.saturating_mul(count.max(1)))
    }

    /// As a fraction of one CPU.
    pub fn fraction(self) -> f64 {
        f64::from(self.0) / MILLION as f64
    }

    /// What it leaves of a CPU.
    pub(crate) fn rest(self) -> Bandwidth {
        Bandwidth::ppm(MILLION.saturating_sub(u64::from(self.0)))
    }

    /// Whether this share is a whole CPU, so that there is nothing to cap.
    pub(crate) fn is_whole(self) -> bool {
        u64::from(self.0) >= MILLION
    }

    /// The share of `length` ns.
    pub(crate) fn of(self, length: u64) -> u64 {
        (u128::from(length) * u128::from(self.0) / u128::from(MILLION)) as u64
    }

    /// The shortest length, ns, of which `used` ns are no more than this share.
    pub(crate) fn stretch(self, used: u64) -> u64 {
        let length = (u128::from(used) * u128::from(MILLION)).div_ceil(u128::from(self.0));
        u64::try_from(length).unwrap_or(u64::MAX)
    }
}

/// The result of a charge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Within the cap.
    Within,
    /// Over the cap: no RT priority until this instant.
    Over {
        /// The instant, ns, at which the use is within the cap again.
        until: u64,
    },
}

/// The capped account of a thread or of a CPU.
///
/// Time is divided into intervals. The budget is the share of a period. An interval ends when at least one period has
/// passed and the use is within the share of the interval's length. If the budget is used up earlier, the verdict gives
/// the end of the necessary pause, and the interval ends there. So in every interval the use is at most share x length,
/// even if readings come late: the pause pays back what was overdrawn.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Account {
    share: Share,
    period: u64,
    start: u64,
    used: u64,
}

impl Account {
    /// An account whose first interval starts `now`.
    pub(crate) fn new(share: Share, period: u64, now: u64) -> Self {
        Self { share, period, start: now, used: 0 }
    }

    pub(crate) fn share(&self) -> Share {
        self.share
    }

    /// When the present interval began, or the pause in progress ends, ns.
    pub(crate) fn begins(&self) -> u64 {
        self.start
    }

    /// The budget: the share of a period, ns.
    pub(crate) fn budget(&self) -> u64 {
        self.share.of(self.period)
    }

    /// The shortest time after `looked`, ns, in which the budget can be used up. A pause in progress counts for one
    /// period at most: a small share makes pauses long, and other threads of the CPU must be looked at meanwhile.
    pub(crate) fn left_after(&self, looked: u64) -> u64 {
        let left = self.budget().saturating_sub(self.used);
        left.saturating_add(self.start.saturating_sub(looked).min(self.period))
    }

    /// The part of the use, ns, that does not fit into the time since the interval's start: it was used in the pause
    /// before.
    pub(crate) fn used_before(&self, now: u64) -> u64 {
        self.used.saturating_sub(now.saturating_sub(self.start))
    }

    /// Whether nothing was used in this interval yet.
    pub(crate) fn is_new(&self) -> bool {
        self.used == 0
    }

    /// The use, ns, from which an interval is judged. It is slightly below the budget: the kernel's timer and its
    /// run-time counter differ by microseconds, and a reading of 99.99 % must not count as an early reading.
    fn judged_from(&self) -> u64 {
        self.budget() - self.budget() / 16
    }

    /// Charges `ran` ns that were read at `now`.
    pub(crate) fn charge(&mut self, now: u64, ran: u64) -> Verdict {
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

    /// Starts a new interval: the pause is over.
    pub(crate) fn restart(&mut self, now: u64) {
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
            // 4.75 ms of CPU time in each 8 ms.
            assert_eq!(account.charge(n * 8 * MS, 4_750_000), Verdict::Within);
        }
    }

    proptest! {
        /// However a thread runs and sleeps, its RT time in any window is at most share x window, plus the content of
        /// the two intervals that the window's ends cut: for each a budget, the grain of a reading, and the delay of
        /// the reading.
        #[test]
        fn rt_time_in_any_window_is_capped(
            percent in 5u32..=99,
            period in 1u64..=20,
            // Alternating run and sleep times, us, and the delay of each reading.
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
                    // The thread runs until the grain is used, plus the delay of the reading.
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
