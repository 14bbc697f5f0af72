//! Histograms of samples.
//!
//! In: samples, ns. Out: [`LogLinear`] bins.
//!
//! Bins are logarithmic by octave and linear within an octave, as in HDR histograms. Values below 256 ns have a bin
//! each. Above, every octave has [`SUB_BINS`] bins of equal width, so a bin is at most 1/128 (0.8 %) of its lower edge
//! wide. A bin includes its lower edge and excludes its upper edge.

use std::collections::BTreeMap;

/// Bins per octave.
pub(crate) const SUB_BINS: u64 = 128;

/// One bin, ns: `low <= sample < high`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bin {
    /// Lower edge, ns.
    pub low_ns: u64,
    /// Upper edge, ns; excluded.
    pub high_ns: u64,
    /// Number of samples.
    pub count: u64,
}

/// Occupied bins, ascending.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct LogLinear(Vec<Bin>);

impl LogLinear {
    /// Sorts samples into bins.
    pub(crate) fn of(samples_ns: &[u64]) -> Self {
        Self::counted(samples_ns.iter().map(|&sample| (sample, 1)))
    }

    /// Sorts values, ns, into bins. Each value comes with its number of samples.
    pub(crate) fn counted(values: impl Iterator<Item = (u64, u64)>) -> Self {
        let mut counts: BTreeMap<u64, u64> = BTreeMap::new();
        for (value, times) in values {
            *counts.entry(edges(value).0).or_default() += times;
        }
        Self(counts.into_iter().map(|(low_ns, count)| Bin { low_ns, high_ns: edges(low_ns).1, count }).collect())
    }

    /// The occupied bins.
    pub(crate) fn bins(&self) -> &[Bin] {
        &self.0
    }
}

/// The edges of the bin of a value.
fn edges(value: u64) -> (u64, u64) {
    let octave = (u64::BITS - 1 - SUB_BINS.leading_zeros()).min(63);
    let shift = (u64::BITS - 1).saturating_sub(value.leading_zeros()).saturating_sub(octave);
    let low = value >> shift << shift;
    (low, low.saturating_add(1 << shift))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn bins_are_exact_below_and_log_linear_above() {
        assert_eq!(edges(0), (0, 1));
        assert_eq!(edges(255), (255, 256));
        assert_eq!(edges(256), (256, 258));
        assert_eq!(edges(100_000), (99_840, 100_352));
        assert_eq!(edges(u64::MAX).1, u64::MAX);
    }

    proptest! {
        #[test]
        fn every_sample_is_in_its_bin(samples in prop::collection::vec(any::<u64>(), 0..200)) {
            let histogram = LogLinear::of(&samples);
            prop_assert_eq!(histogram.bins().iter().map(|bin| bin.count).sum::<u64>(), samples.len() as u64);
            for bin in histogram.bins() {
                prop_assert!(bin.low_ns < bin.high_ns);
                prop_assert!(bin.high_ns - bin.low_ns <= (bin.low_ns / SUB_BINS).max(1));
                let is_inside = |&&of: &&u64| of >= bin.low_ns && (of < bin.high_ns || bin.high_ns == u64::MAX);
                let inside = samples.iter().filter(is_inside);
                prop_assert_eq!(inside.count() as u64, bin.count);
            }
        }
    }
}
