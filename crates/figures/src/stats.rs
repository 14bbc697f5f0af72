//! Exact statistics of a run's response times.
//!
//! In: every sample, ns, or how often each value was measured ([`Tally`]); nothing is estimated from a histogram. Out:
//! a [`Summary`].
//!
//! Definitions, the same in every report:
//! - percentile p: **nearest rank**, the smallest sample such that at least p percent of all samples are not above
//!   it, the `ceil(p/100 * n)`-th smallest (Hyndman and Fan, type 1). It is always a sample that was measured.
//! - standard deviation: of the **sample** (divided by n - 1); 0 for one sample.
//! - interval of a percentile: two-sided 95 %, distribution-free, from the order statistics around its rank (normal
//!   approximation of the binomial, ranks rounded outwards). It assumes independent samples. If the upper rank is
//!   beyond the largest sample, there is no upper bound.

use std::collections::BTreeMap;

/// A percentile in millionths of the whole: 990,000 is p99.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Percentile(u32);

impl Percentile {
    /// 50 %, the median.
    pub const P50: Self = Self(500_000);
    /// 90 %.
    pub const P90: Self = Self(900_000);
    /// 95 %.
    pub const P95: Self = Self(950_000);
    /// 99 %.
    pub const P99: Self = Self(990_000);
    /// 99.9 %.
    pub const P99_9: Self = Self(999_000);
    /// 99.99 %.
    pub const P99_99: Self = Self(999_900);

    /// The nearest rank among `n` samples, 1 to `n`; 0 where there are none.
    pub fn rank(self, n: usize) -> usize {
        let rank = (n as u128 * u128::from(self.0)).div_ceil(1_000_000) as usize;
        rank.max(1).min(n)
    }

    fn fraction(self) -> f64 {
        f64::from(self.0) / 1e6
    }
}

/// A percentile's 95 % interval, ns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interval {
    /// Lower bound, ns.
    pub low_ns: u64,
    /// Upper bound, ns; `None` where there are too few samples for one.
    pub high_ns: Option<u64>,
}

/// How often each value was measured, ns. This keeps a series of any length in little memory if it has few different
/// values.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally(BTreeMap<u64, u64>);

impl Tally {
    /// Adds a sample, ns.
    pub fn take(&mut self, sample: u64) {
        *self.0.entry(sample).or_default() += 1;
    }

    /// Each value and how often it was measured, ascending.
    pub fn values(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.iter().map(|(&value, &times)| (value, times))
    }

    /// The statistics of the samples; `None` without samples.
    pub fn summary(&self) -> Option<Summary> {
        Sorted::runs(self.values()).summary()
    }
}

/// Samples in increasing order: each value, and the number of samples that are not above it.
#[derive(Debug, Clone)]
pub struct Sorted(Vec<(u64, usize)>);

impl Sorted {
    /// Sorts samples, ns.
    pub fn new(mut samples: Vec<u64>) -> Self {
        samples.sort_unstable();
        Self::runs(samples.into_iter().map(|sample| (sample, 1)))
    }

    /// Counts values that come in increasing order; equal values may be repeated.
    fn runs(values: impl Iterator<Item = (u64, u64)>) -> Self {
        let mut runs: Vec<(u64, usize)> = Vec::new();
        let mut so_far = 0;
        for (value, times) in values {
            so_far += times as usize;
            match runs.last_mut() {
                Some(last) if last.0 == value => last.1 = so_far,
                _ => runs.push((value, so_far)),
            }
        }
        Self(runs)
    }

    /// The number of samples.
    fn count(&self) -> usize {
        self.0.last().map_or(0, |&(_, not_above)| not_above)
    }

    /// A percentile by nearest rank, ns; `None` without samples.
    pub fn percentile(&self, percentile: Percentile) -> Option<u64> {
        self.at_rank(percentile.rank(self.count()))
    }

    /// The number of samples above a percentile.
    pub fn beyond(&self, percentile: Percentile) -> u64 {
        let Some(value) = self.percentile(percentile) else { return 0 };
        let after = self.0.partition_point(|&(of, _)| of <= value);
        let not_above = after.checked_sub(1).and_then(|last| self.0.get(last)).map_or(0, |&(_, not_above)| not_above);
        (self.count() - not_above) as u64
    }

    /// The 95 % interval of a percentile; `None` without samples.
    pub fn interval(&self, percentile: Percentile) -> Option<Interval> {
        const Z_95: f64 = 1.959_964;
        let (n, p) = (self.count(), percentile.fraction());
        let half = Z_95 * (n as f64 * p * (1.0 - p)).sqrt();
        let centre = n as f64 * p;
        let low = ((centre - half).floor().max(1.0) as usize).min(n);
        let high = (centre + half).ceil() as usize + 1;
        Some(Interval { low_ns: self.at_rank(low)?, high_ns: self.at_rank(high) })
    }

    fn at_rank(&self, rank: usize) -> Option<u64> {
        let place = self.0.partition_point(|&(_, not_above)| not_above < rank.max(1));
        self.0.get(place).map(|&(value, _)| value)
    }

    /// Each value, and how often it was measured.
    fn values(&self) -> impl Iterator<Item = (u64, usize)> + '_ {
        let before = std::iter::once(0).chain(self.0.iter().map(|&(_, not_above)| not_above));
        self.0.iter().zip(before).map(|(&(value, not_above), before)| (value, not_above - before))
    }

    fn summary(&self) -> Option<Summary> {
        let (min, max) = (self.0.first()?.0, self.0.last()?.0);
        let (mean, sd) = self.mean_and_sd();
        Some(Summary {
            count: self.count() as u64,
            min,
            mean,
            sd,
            p50: self.percentile(Percentile::P50)?,
            p90: self.percentile(Percentile::P90)?,
            p95: self.percentile(Percentile::P95)?,
            p99: self.percentile(Percentile::P99)?,
            p99_interval: self.interval(Percentile::P99)?,
            p99_9: self.percentile(Percentile::P99_9)?,
            p99_99: self.percentile(Percentile::P99_99)?,
            max,
            beyond_p99_9: self.beyond(Percentile::P99_9),
        })
    }

    /// Calculated in two passes, so that a small deviation is not lost beside a large mean.
    fn mean_and_sd(&self) -> (f64, f64) {
        let n = self.count() as f64;
        let sum: u128 = self.values().map(|(value, times)| u128::from(value) * times as u128).sum();
        let mean = sum as f64 / n;
        if self.count() < 2 {
            return (mean, 0.0);
        }
        let squares: f64 = self.values().map(|(value, times)| (value as f64 - mean).powi(2) * times as f64).sum();
        (mean, (squares / (n - 1.0)).sqrt())
    }
}

/// Statistics of samples. All times in ns.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// The number of samples.
    pub count: u64,
    /// The smallest sample.
    pub min: u64,
    /// Arithmetic mean.
    pub mean: f64,
    /// Standard deviation of the sample (n - 1).
    pub sd: f64,
    /// Median.
    pub p50: u64,
    /// 90th percentile.
    pub p90: u64,
    /// 95th percentile.
    pub p95: u64,
    /// 99th percentile.
    pub p99: u64,
    /// Its 95 % interval.
    pub p99_interval: Interval,
    /// 99.9th percentile.
    pub p99_9: u64,
    /// 99.99th percentile.
    pub p99_99: u64,
    /// The largest sample.
    pub max: u64,
    /// Samples above the 99.9th percentile: the number of measurements on which the far tail is based.
    pub beyond_p99_9: u64,
}

impl Summary {
    /// Summarises samples, ns; `None` without samples.
    pub fn of(samples: &[u64]) -> Option<Self> {
        Sorted::new(samples.to_vec()).summary()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn percentiles_are_nearest_rank() {
        // The worked example of the nearest-rank method: 15, 20, 35, 40, 50.
        let sorted = Sorted::new(vec![40, 15, 50, 20, 35]);
        let at = |percent: u32| sorted.percentile(Percentile(percent * 10_000)).unwrap();
        assert_eq!([at(5), at(30), at(40), at(50), at(100)], [15, 20, 20, 35, 50]);
        assert_eq!(at(0), 15);
    }

    #[test]
    fn ranks_are_exact_where_floating_point_is_not() {
        assert_eq!(Percentile::P99_9.rank(1_000), 999);
        assert_eq!(Percentile::P99_9.rank(1_001), 1_000);
        assert_eq!(Percentile::P99.rank(20_000), 19_800);
        assert_eq!(Percentile::P99.rank(0), 0);
    }

    #[test]
    fn a_known_set_has_its_known_summary() {
        let summary = Summary::of(&[2, 4, 4, 4, 5, 5, 7, 9]).unwrap();
        assert_eq!((summary.count, summary.min, summary.max), (8, 2, 9));
        assert!((summary.mean - 5.0).abs() < 1e-12);
        assert!((summary.sd - (32.0_f64 / 7.0).sqrt()).abs() < 1e-12, "{}", summary.sd);
        assert_eq!(summary.beyond_p99_9, 0);
    }

    #[test]
    fn the_deviation_survives_a_large_mean() {
        let base = 1_700_000_000_000_000_000;
        let summary = Summary::of(&[base, base + 1_000_000, base + 2_000_000]).unwrap();
        assert!((summary.sd - 1_000_000.0).abs() < 1_000.0, "{}", summary.sd);
    }

    #[test]
    fn the_interval_holds_the_percentile_and_is_open_when_samples_are_few() {
        let sorted = Sorted::new((1..=10_000).collect());
        let interval = sorted.interval(Percentile::P99).unwrap();
        // 9,900 +- 1.96 * sqrt(10,000 * 0.99 * 0.01) = 9,900 +- 19.5.
        assert_eq!(interval, Interval { low_ns: 9_880, high_ns: Some(9_921) });
        assert_eq!(Sorted::new((1..=100).collect()).interval(Percentile::P99).unwrap().high_ns, None);
    }

    proptest! {
        #[test]
        fn any_samples_give_an_ordered_summary(samples in prop::collection::vec(any::<u64>(), 1..300)) {
            let s = Summary::of(&samples).unwrap();
            let ladder = [s.min, s.p50, s.p90, s.p95, s.p99, s.p99_9, s.p99_99, s.max];
            prop_assert!(ladder.is_sorted());
            prop_assert!(s.mean >= s.min as f64 * 0.999_999 && s.mean <= s.max as f64 * 1.000_001);
            prop_assert!(s.sd.is_finite());
            let not_above = samples.iter().filter(|&&sample| sample <= s.p90).count();
            prop_assert!(not_above * 10 >= samples.len() * 9);
            let below = samples.iter().filter(|&&sample| sample < s.p90).count();
            prop_assert!(below * 10 < samples.len() * 9);
            let mut tally = Tally::default();
            samples.iter().for_each(|&sample| tally.take(sample));
            prop_assert_eq!(tally.summary(), Some(s.clone()));
            prop_assert!(s.p99_interval.low_ns <= s.p99);
            prop_assert!(s.p99_interval.high_ns.is_none_or(|high| high >= s.p99));
        }
    }
}
