//! Histograms in formats of other tools: the layout of `rtla timerlat hist`, and HDR's `.hgrm`.
//!
//! Both are made from a report's bins, which are at most 0.8 % wide (see the crate's `histogram`). A sample counts as
//! its bin's lower edge. Mean, standard deviation, minimum and maximum come from the report, and are exact.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use hdrhistogram::Histogram;

use crate::schema::{MethodResult, Report};

/// The layout of `rtla timerlat hist`: a row per microsecond (occupied rows only), and a column per result with
/// response times.
pub fn rtla(report: &Report) -> String {
    let columns: Vec<_> =
        report.results.iter().filter_map(|result| Some((result, result.latency_us.as_ref()?))).collect();
    let mut rows: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for (place, (result, _)) in columns.iter().enumerate() {
        for bin in &result.histogram {
            let row = rows.entry(bin.low_us as u64).or_insert_with(|| vec![0; columns.len()]);
            if let Some(cell) = row.get_mut(place) {
                *cell = cell.saturating_add(bin.count);
            }
        }
    }
    let longest = report.results.iter().map(|result| result.duration_s).fold(0.0, f64::max) as u64;
    let (days, hours, minutes, seconds) = (longest / 86_400, longest / 3_600 % 24, longest / 60 % 60, longest % 60);
    let mut text = format!("# Ontime {}: response time histogram\n", report.experiment);
    let _ = writeln!(text, "# Time unit is microseconds (us), {} clock", report.clock.name());
    let _ = writeln!(text, "# Duration: {days:>3} {hours:02}:{minutes:02}:{seconds:02}");
    line(&mut text, "Index", columns.iter().map(|(result, _)| case(result)));
    for (us, counts) in &rows {
        line(&mut text, &us.to_string(), counts.iter().map(u64::to_string));
    }
    // Every value has a row, however large.
    line(&mut text, "over:", columns.iter().map(|_| "0".to_owned()));
    line(&mut text, "count:", columns.iter().map(|(result, _)| result.count.to_string()));
    let whole = |us: f64| (us as u64).to_string();
    line(&mut text, "min:", columns.iter().map(|(_, of)| whole(of.min)));
    line(&mut text, "avg:", columns.iter().map(|(_, of)| whole(of.mean)));
    line(&mut text, "max:", columns.iter().map(|(_, of)| whole(of.max)));
    text
}

fn line(text: &mut String, head: &str, cells: impl Iterator<Item = String>) {
    let _ = write!(text, "{head:<6}");
    for cell in cells {
        let _ = write!(text, " {cell:>11}");
    }
    text.push('\n');
}

/// The name that distinguishes a result from others of a run: `partitioned-tcp-7.2`.
pub fn case(result: &MethodResult) -> String {
    format!("{}-{}-{}", result.method, result.load.name(), result.kernel_series())
}

/// The files of [`hgrm`], one for each result with response times: name and text. Names consist of letters, digits,
/// `-`, `_` and `.`, and are unique: several runs may have results of the same case.
pub fn hgrm_files(report: &Report) -> Vec<(String, String)> {
    let mut seen: BTreeMap<String, u32> = BTreeMap::new();
    let files = report.results.iter().filter_map(|result| {
        let text = hgrm(result)?;
        let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
        let case: String = case(result).chars().map(plain).collect();
        let times = seen.entry(case.clone()).and_modify(|times| *times += 1).or_insert(1);
        let name = if *times == 1 { format!("{case}.hgrm") } else { format!("{case}-{times}.hgrm") };
        Some((name, text))
    });
    files.collect()
}

/// The percentile distribution in HDR's `.hgrm` layout, microseconds. `None` for a result without response times.
pub fn hgrm(result: &MethodResult) -> Option<String> {
    let exact = result.latency_us.as_ref()?;
    // In ns, so that HDR's three digits do not increase the rounding of the bins.
    let largest = ((exact.max * 1e3) as u64).clamp(2, u64::MAX / 4);
    let mut histogram = Histogram::<u64>::new_with_bounds(1, largest, 3).ok()?;
    for bin in &result.histogram {
        histogram.saturating_record_n((bin.low_us * 1e3) as u64, bin.count);
    }
    let mut text = format!("{:>12} {:>14} {:>10} {:>14}\n\n", "Value", "Percentile", "TotalCount", "1/(1-Percentile)");
    let mut total = 0_u64;
    for value in histogram.iter_quantiles(5) {
        total = total.saturating_add(value.count_since_last_iteration());
        let (us, quantile) = (value.value_iterated_to() as f64 / 1e3, value.quantile_iterated_to());
        let _ = if quantile < 1.0 {
            writeln!(text, "{us:>12.3} {quantile:>2.12} {total:>10} {:>14.2}", 1.0 / (1.0 - quantile))
        } else {
            writeln!(text, "{:>12.3} {quantile:>2.12} {total:>10}", exact.max)
        };
    }
    let _ = writeln!(text, "#[Mean    = {:>12.3}, StdDeviation   = {:>12.3}]", exact.mean, exact.sd);
    let _ = writeln!(text, "#[Max     = {:>12.3}, Total count    = {:>12}]", exact.max, histogram.len());
    let (buckets, sub) = (histogram.buckets(), histogram.distinct_values());
    let _ = writeln!(text, "#[Buckets = {buckets:>12}, SubBuckets     = {sub:>12}]");
    Some(text)
}
