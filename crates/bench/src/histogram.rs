//! Histograms, and the two layouts in which real-time engineers read them.
//!
//! In: samples, ns. Out: [`LogLinear`] bins for the JSON, rtla's text layout, HDR's `.hgrm`.
//!
//! Bins are logarithmic by octave and linear within it, as HDR histograms are: values below 256 ns have a bin
//! each; above, every octave is cut into [`SUB_BINS`] bins of equal width, so a bin is never wider than 1/128 (0.8 %) of
//! its lower edge. A bin holds its lower edge and not its upper one.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use hdrhistogram::Histogram;

/// Bins an octave.
pub const SUB_BINS: u64 = 128;

/// One bin, ns: `low <= sample < high`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bin {
    /// Lower edge, ns.
    pub low_ns: u64,
    /// Upper edge, ns; not in the bin.
    pub high_ns: u64,
    /// Samples.
    pub count: u64,
}

/// Occupied bins, ascending.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogLinear(Vec<Bin>);

impl LogLinear {
    /// Sorts samples into bins.
    pub fn of(samples_ns: &[u64]) -> Self {
        let mut counts: BTreeMap<u64, u64> = BTreeMap::new();
        for &sample in samples_ns {
            *counts.entry(edges(sample).0).or_default() += 1;
        }
        Self(counts.into_iter().map(|(low_ns, count)| Bin { low_ns, high_ns: edges(low_ns).1, count }).collect())
    }

    /// The occupied bins.
    pub fn bins(&self) -> &[Bin] {
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

/// A method's samples under its name, ns.
#[derive(Debug, Clone, Copy)]
pub struct Column<'a> {
    /// The column's head.
    pub name: &'a str,
    /// Samples, ns.
    pub samples_ns: &'a [u64],
}

/// The layout of `rtla timerlat hist`: a row a microsecond (occupied rows only), a column a method, and what is beyond
/// `entries` microseconds in the `over` row. `duration_s` is the run's length on the clock that is named.
pub fn rtla(columns: &[Column<'_>], entries: u64, duration_s: f64, clock: &str) -> String {
    let mut rows: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    let mut over = vec![0_u64; columns.len()];
    for (place, column) in columns.iter().enumerate() {
        for sample in column.samples_ns {
            let us = sample / 1_000;
            let row = if us < entries { rows.entry(us).or_insert_with(|| vec![0; columns.len()]) } else { &mut over };
            if let Some(cell) = row.get_mut(place) {
                *cell += 1;
            }
        }
    }
    let seconds = duration_s.max(0.0) as u64;
    let (hours, minutes, seconds) = (seconds / 3_600, seconds / 60 % 60, seconds % 60);
    let mut text = format!("# Ontime response time histogram\n# Time unit is microseconds (us)\n# Clock: {clock}\n");
    let _ = writeln!(text, "# Duration: {:>3} {hours:02}:{minutes:02}:{seconds:02}", hours / 24);
    line(&mut text, "Index", columns.iter().map(|column| column.name.to_string()));
    for (us, counts) in &rows {
        line(&mut text, &us.to_string(), counts.iter().map(u64::to_string));
    }
    line(&mut text, "over:", over.iter().map(u64::to_string));
    let count = |column: &Column<'_>| column.samples_ns.len().to_string();
    let min = |column: &Column<'_>| dash(column.samples_ns.iter().min().map(|ns| ns / 1_000));
    let max = |column: &Column<'_>| dash(column.samples_ns.iter().max().map(|ns| ns / 1_000));
    let average = |column: &Column<'_>| {
        let sum: u128 = column.samples_ns.iter().map(|&ns| u128::from(ns)).sum();
        dash(sum.checked_div(column.samples_ns.len() as u128).map(|ns| ns / 1_000))
    };
    line(&mut text, "count:", columns.iter().map(count));
    line(&mut text, "min:  ", columns.iter().map(min));
    line(&mut text, "avg:  ", columns.iter().map(average));
    line(&mut text, "max:  ", columns.iter().map(max));
    text
}

fn line(text: &mut String, head: &str, cells: impl Iterator<Item = String>) {
    let _ = write!(text, "{head:<6}");
    for cell in cells {
        let _ = write!(text, " {cell:>11}");
    }
    text.push('\n');
}

fn dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_string(), |value| value.to_string())
}

/// The percentile distribution in HDR's `.hgrm` layout, microseconds, three significant digits.
pub fn hgrm(samples_ns: &[u64]) -> String {
    let mut text = format!("{:>12} {:>14} {:>10} {:>14}\n\n", "Value", "Percentile", "TotalCount", "1/(1-Percentile)");
    let mut bound = samples_ns.iter().max().copied().unwrap_or(1).max(2);
    bound = bound.min(u64::MAX / 4);
    let Ok(mut histogram) = Histogram::<u64>::new_with_bounds(1, bound, 3) else { return text };
    for &sample in samples_ns {
        histogram.saturating_record(sample);
    }
    let mut total = 0;
    for value in histogram.iter_quantiles(5) {
        total += value.count_since_last_iteration();
        let (us, quantile) = (value.value_iterated_to() as f64 / 1e3, value.quantile_iterated_to());
        let _ = if quantile < 1.0 {
            writeln!(text, "{us:>12.3} {quantile:>2.12} {total:>10} {:>14.2}", 1.0 / (1.0 - quantile))
        } else {
            writeln!(text, "{us:>12.3} {quantile:>2.12} {total:>10}")
        };
    }
    let us = |ns: f64| ns / 1e3;
    let _ =
        writeln!(text, "#[Mean    = {:>12.3}, StdDeviation   = {:>12.3}]", us(histogram.mean()), us(histogram.stdev()));
    let _ =
        writeln!(text, "#[Max     = {:>12.3}, Total count    = {:>12}]", us(histogram.max() as f64), histogram.len());
    let (buckets, sub) = (histogram.buckets(), histogram.distinct_values());
    let _ = writeln!(text, "#[Buckets = {buckets:>12}, SubBuckets     = {sub:>12}]");
    text
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

    #[test]
    fn rtla_layout_counts_every_sample_once() {
        // 5 us is the first beyond 5 entries.
        let a = [1_500, 1_900, 5_000];
        let text = rtla(
            &[Column { name: "vanilla", samples_ns: &a }, Column { name: "none", samples_ns: &[] }],
            5,
            61.0,
            "virtual",
        );
        let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert!(rows.contains(&vec!["1", "2", "0"]), "{text}");
        assert!(rows.contains(&vec!["over:", "1", "0"]), "{text}");
        assert!(rows.contains(&vec!["avg:", "2", "-"]), "{text}");
        assert!(rows.contains(&vec!["#", "Duration:", "0", "00:01:01"]), "{text}");
    }

    #[test]
    fn hgrm_is_the_layout_of_hdr_plotters() {
        let samples: Vec<u64> = (1..=1_000).map(|us| us * 1_000).collect();
        let text = hgrm(&samples);
        let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["Value", "Percentile", "TotalCount", "1/(1-Percentile)"]);
        let half = rows.iter().find(|row| row.get(1) == Some(&"0.500000000000")).unwrap();
        let value: f64 = half[0].parse().unwrap();
        assert!((value - 500.0).abs() < 1.0, "{value}");
        assert_eq!(half[3], "2.00");
        assert!(text.contains("Total count    =         1000]"), "{text}");
        assert!(hgrm(&[]).starts_with("       Value"));
    }

    proptest! {
        #[test]
        fn every_sample_is_in_its_bin(samples in prop::collection::vec(any::<u64>(), 0..200)) {
            let histogram = LogLinear::of(&samples);
            prop_assert_eq!(histogram.bins().iter().map(|bin| bin.count).sum::<u64>(), samples.len() as u64);
            for bin in histogram.bins() {
                prop_assert!(bin.low_ns < bin.high_ns);
                prop_assert!(bin.high_ns - bin.low_ns <= (bin.low_ns / SUB_BINS).max(1));
                let inside = samples.iter().filter(|&&s| s >= bin.low_ns && (s < bin.high_ns || bin.high_ns == u64::MAX));
                prop_assert_eq!(inside.count() as u64, bin.count);
            }
            let _ = hgrm(&samples);
            let _ = rtla(&[Column { name: "x", samples_ns: &samples }], 100, 1.0, "real");
        }
    }
}
