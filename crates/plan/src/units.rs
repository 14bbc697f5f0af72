//! Nanoseconds, and CPU bandwidth as an exact fraction.

use std::cmp::Ordering;
use std::fmt;
use std::iter::Sum;
use std::ops::{Add, Sub};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, de};

/// A time or a duration in nanoseconds. Sums and differences saturate: 0 to 584 years.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Nanos(pub u64);

impl Nanos {
    /// No time.
    pub const ZERO: Nanos = Nanos(0);
    /// The latest time.
    pub const MAX: Nanos = Nanos(u64::MAX);

    /// From microseconds.
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros.saturating_mul(1_000))
    }

    /// From milliseconds.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1_000_000))
    }
}

impl Add for Nanos {
    type Output = Nanos;
    fn add(self, other: Nanos) -> Nanos {
        Nanos(self.0.saturating_add(other.0))
    }
}

impl Sub for Nanos {
    type Output = Nanos;
    fn sub(self, other: Nanos) -> Nanos {
        Nanos(self.0.saturating_sub(other.0))
    }
}

impl Sum for Nanos {
    fn sum<I: Iterator<Item = Nanos>>(iter: I) -> Nanos {
        iter.fold(Nanos::ZERO, Add::add)
    }
}

/// Parses a duration such as `250us`, `13.5ms`, `1s`. Exact: no more decimals than nanoseconds have.
impl FromStr for Nanos {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parse(text)
            .ok_or_else(|| format!("`{text}` is no duration; write a number and ns, us, ms or s, such as \"13.5ms\""))
    }
}

fn parse(text: &str) -> Option<Nanos> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, unit) = text.split_at(digits);
    let (unit, decimals) = match unit.trim() {
        "ns" => (1_u64, 0),
        "us" => (1_000, 3),
        "ms" => (1_000_000, 6),
        "s" => (1_000_000_000, 9),
        _ => return None,
    };
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    if part.len() > decimals.max(1) || part.is_empty() {
        return None;
    }
    let part = format!("{part:0<decimals$}").parse::<u64>().ok()?;
    let part = if decimals == 0 && part > 0 { return None } else { part };
    Some(Nanos(whole.parse::<u64>().ok()?.checked_mul(unit)?.checked_add(part)?))
}

impl<'de> Deserialize<'de> for Nanos {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(DurationText)
    }
}

/// Says what was expected in place of another type of value.
struct DurationText;

impl de::Visitor<'_> for DurationText {
    type Value = Nanos;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a duration in quotes, such as \"13.5ms\"")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Nanos, E> {
        text.parse().map_err(E::custom)
    }
}

/// Exact, in ms, us or ns: the largest unit that is not above the value and needs at most three decimals.
impl fmt::Display for Nanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, name) = match self.0 {
            n if n == 0 || (n >= 1_000_000 && n % 1_000 == 0) => (1_000_000, "ms"),
            n if n >= 1_000 => (1_000, "us"),
            _ => (1, "ns"),
        };
        let text = format!("{}.{:03}", self.0 / unit, u128::from(self.0 % unit) * 1_000 / u128::from(unit));
        write!(f, "{} {name}", text.trim_end_matches('0').trim_end_matches('.'))
    }
}

/// The largest numerator or denominator: the sum of two products of such numbers still fits into 128 bits.
const PART_MAX: u64 = 1 << 62;

/// A fraction of CPU time: nanoseconds of running per nanosecond of time; 1 is one whole CPU. Exact: a reduced
/// fraction.
///
/// A sum of fractions that needs more than 62 bits is rounded up by less than one part in 2^60. A sum is never less
/// than its parts, so admission stays safe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Bandwidth {
    runtime: u64,
    period: u64,
}

impl Default for Bandwidth {
    fn default() -> Self {
        Self::ZERO
    }
}

impl Bandwidth {
    /// No bandwidth.
    pub const ZERO: Bandwidth = Bandwidth { runtime: 0, period: 1 };
    /// The bandwidth of a whole CPU.
    pub const ONE: Bandwidth = Bandwidth { runtime: 1, period: 1 };

    /// `runtime` in each `period`. None if the period is 0.
    pub fn new(runtime: Nanos, period: Nanos) -> Option<Self> {
        (period.0 > 0).then(|| Self::reduced(u128::from(runtime.0), u128::from(period.0)))
    }

    /// Whole CPUs.
    pub fn cpus(count: usize) -> Self {
        Self { runtime: u64::try_from(count).map_or(PART_MAX, |count| count.min(PART_MAX)), period: 1 }
    }

    /// Millionths of one CPU.
    pub fn ppm(parts: u64) -> Self {
        Self::reduced(u128::from(parts), 1_000_000)
    }

    fn reduced(mut runtime: u128, mut period: u128) -> Self {
        let divisor = gcd(runtime, period).max(1);
        runtime /= divisor;
        period /= divisor;
        while runtime > u128::from(PART_MAX) || period > u128::from(PART_MAX) {
            if period <= 1 {
                return Self { runtime: PART_MAX, period: 1 };
            }
            runtime = runtime / 2 + 1;
            period /= 2;
        }
        let narrow = |wide: u128| u64::try_from(wide).unwrap_or(PART_MAX);
        Self { runtime: narrow(runtime), period: narrow(period).max(1) }
    }

    /// The numerator, in lowest terms.
    pub fn runtime(self) -> u64 {
        self.runtime
    }

    /// The denominator, in lowest terms; never 0.
    pub fn period(self) -> u64 {
        self.period
    }

    /// As a number of CPUs, for display only.
    pub fn as_f64(self) -> f64 {
        self.runtime as f64 / self.period as f64
    }

    /// CPU time of this bandwidth in `time`, rounded up.
    pub fn of(self, time: Nanos) -> Nanos {
        // Division of 64 bits takes one instruction, that of 128 bits a hundred.
        if let Some(product) = self.runtime.checked_mul(time.0) {
            return Nanos(product.div_ceil(self.period));
        }
        let wide = (u128::from(self.runtime) * u128::from(time.0)).div_ceil(u128::from(self.period));
        Nanos(u64::try_from(wide).unwrap_or(u64::MAX))
    }

    /// The smallest whole number of millionths of a CPU that is at least this bandwidth.
    pub fn whole_ppm(self) -> u64 {
        let parts = (u128::from(self.runtime) * 1_000_000).div_ceil(u128::from(self.period));
        u64::try_from(parts).unwrap_or(u64::MAX)
    }

    /// The smallest whole number of CPUs that is at least this bandwidth.
    pub fn whole_cpus(self) -> u64 {
        self.runtime.div_ceil(self.period)
    }
}

#[cfg(test)]
std::thread_local! {
    /// How many bandwidths this thread has added.
    pub(crate) static ADDITIONS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

impl Add for Bandwidth {
    type Output = Bandwidth;
    fn add(self, other: Bandwidth) -> Bandwidth {
        #[cfg(test)]
        ADDITIONS.set(ADDITIONS.get() + 1);
        let wide = u128::from;
        let divisor = gcd(wide(self.period), wide(other.period)).max(1);
        let (ours, theirs) = (wide(other.period) / divisor, wide(self.period) / divisor);
        let sum = (wide(self.runtime) * ours).saturating_add(wide(other.runtime) * theirs);
        Self::reduced(sum, wide(self.period) * ours)
    }
}

impl Sum for Bandwidth {
    fn sum<I: Iterator<Item = Bandwidth>>(iter: I) -> Bandwidth {
        iter.fold(Bandwidth::ZERO, Add::add)
    }
}

impl Ord for Bandwidth {
    fn cmp(&self, other: &Self) -> Ordering {
        let wide = u128::from;
        (wide(self.runtime) * wide(other.period)).cmp(&(wide(other.runtime) * wide(self.period)))
    }
}

impl PartialOrd for Bandwidth {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for Bandwidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3}", self.as_f64())
    }
}

/// The greatest common divisor; of 0 and x, x.
pub(crate) fn gcd(mut a: u128, mut b: u128) -> u128 {
    while b != 0 {
        // Nearly all values are small, and wide division is slow.
        (a, b) = match (u64::try_from(a), u64::try_from(b)) {
            (Ok(x), Ok(y)) => (u128::from(y), u128::from(x % y)),
            _ => (b, a % b),
        };
    }
    a
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn thirds_make_a_whole() {
        let third = Bandwidth::new(Nanos(1), Nanos(3)).unwrap();
        assert_eq!([third; 3].into_iter().sum::<Bandwidth>(), Bandwidth::ONE);
        assert_eq!(third.of(Nanos(10)), Nanos(4));
    }

    #[test]
    fn durations_are_shown_in_a_fitting_unit() {
        let shown = [0, 5, 1_500, 250_000, 7_500_000, 30_000_001].map(|n| Nanos(n).to_string());
        assert_eq!(shown, ["0 ms", "5 ns", "1.5 us", "250 us", "7.5 ms", "30000.001 us"]);
    }

    #[test]
    fn durations_are_exact() {
        let good = [("13ms", 13_000_000), ("0.5us", 500), ("1.000000001s", 1_000_000_001), ("7 ns", 7)];
        for (text, ns) in good {
            assert_eq!(parse(text), Some(Nanos(ns)), "{text}");
        }
        for text in ["", "13", "ms", "1.5ns", "1.0001us", "-1ms", "1e3ms", "1.ms", "99999999999999s", "1.2.3ms", "٣ms"]
        {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn sums_are_never_too_small_and_nearly_exact(
            parts in prop::collection::vec((any::<u64>(), 1..=u64::MAX), 1..20)
        ) {
            let sum: Bandwidth = parts.iter().map(|&(a, b)| Bandwidth::new(Nanos(a % b), Nanos(b)).unwrap()).sum();
            let float: f64 = parts.iter().map(|&(a, b)| (a % b) as f64 / b as f64).sum();
            prop_assert!((sum.as_f64() - float).abs() < 1e-9);
        }

        #[test]
        fn small_fractions_add_exactly(a in 0u64..1000, b in 1u64..1000, c in 0u64..1000, d in 1u64..1000) {
            let sum = Bandwidth::new(Nanos(a), Nanos(b)).unwrap() + Bandwidth::new(Nanos(c), Nanos(d)).unwrap();
            let (left, right) = (u128::from(sum.runtime()) * u128::from(b * d), u128::from(a * d + c * b));
            prop_assert_eq!(left, u128::from(sum.period()) * right);
        }
    }
}
