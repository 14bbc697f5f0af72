//! Whether results are worse than those of an earlier run, the baseline.
//!
//! In: two [`Report`]s of one experiment and a [`Tolerance`]. Out: a [`Comparison`]. Results are compared if method,
//! load, kernel series, clock and number of CPUs are the same. [`crate::path`] compares instructions in the same way.

use std::fmt::Write as _;
use std::str::FromStr;

use ontime_figures::number;

use crate::schema::{HistogramBin, MethodResult, Report};

/// Probability with which chance alone makes two equal histograms differ by more than is allowed.
const CHANCE: f64 = 0.001;
/// The largest tolerance, percent.
const MOST_PERCENT: f64 = 1_000.0;

/// The share by which a figure may be worse than the baseline's.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Tolerance(f64);

impl Tolerance {
    /// The largest allowed figure for this one of the baseline.
    fn limit(self, baseline: f64) -> f64 {
        baseline * (1.0 + self.0)
    }

    /// If the figure is worse than the baseline's by more than is allowed: how many times larger it is, less one.
    pub(crate) fn exceeded(self, figure: f64, baseline: f64) -> Option<f64> {
        // A difference of rounding is none.
        (figure > self.limit(baseline) + 1e-9).then(|| figure / baseline.max(f64::MIN_POSITIVE) - 1.0)
    }

    pub(crate) fn words(self) -> String {
        number::percent(self.0)
    }
}

impl FromStr for Tolerance {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<f64>() {
            Ok(percent) if (0.0..=MOST_PERCENT).contains(&percent) => Ok(Self(percent / 100.0)),
            _ => Err(format!("'{text}' is not a number of percent from 0 to {MOST_PERCENT}")),
        }
    }
}

/// The result of a comparison.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Comparison {
    /// Number of results that were compared.
    pub(crate) compared: usize,
    /// What is worse than in the baseline by more than is allowed.
    pub(crate) regressions: Vec<String>,
    /// Results without a counterpart, and why.
    pub(crate) left_out: Vec<String>,
}

impl Comparison {
    /// The comparison for the terminal.
    pub(crate) fn words(&self, tolerance: Tolerance) -> String {
        let Self { compared, regressions, left_out } = self;
        let count = if regressions.is_empty() { "none".to_owned() } else { regressions.len().to_string() };
        let mut text = format!("Baseline: {compared} compared, {count} worse by more than {}\n", tolerance.words());
        for (head, lines) in [("WORSE", regressions), ("not compared", left_out)] {
            for line in lines {
                let _ = writeln!(text, "  {head}: {line}");
            }
        }
        text
    }
}

/// Compares every result with the baseline's.
pub(crate) fn compare(new: &Report, baseline: &Report, tolerance: Tolerance) -> Comparison {
    let mut comparison = Comparison::default();
    for result in &new.results {
        let name = format!("{}, {}", result.method, result.load.words());
        let is_case = |old: &&MethodResult| old.method == result.method && old.load == result.load;
        let of_case: Vec<&MethodResult> = baseline.results.iter().filter(is_case).collect();
        match of_case.iter().find(|old| conditions(old) == conditions(result)) {
            Some(old) => {
                comparison.compared += 1;
                let worse = regressions(result, old, tolerance);
                comparison.regressions.extend(worse.into_iter().map(|what| format!("{name}: {what}")));
            }
            None if of_case.is_empty() => comparison.left_out.push(format!("{name}: the baseline does not have it")),
            None => {
                let others: Vec<String> = of_case.iter().map(|old| conditions(old)).collect();
                let said = format!("{name}: {}; the baseline: {}", conditions(result), others.join("; "));
                comparison.left_out.push(said);
            }
        }
    }
    comparison
}

/// The conditions under which figures can be compared.
fn conditions(result: &MethodResult) -> String {
    format!("Linux {}, {} clock, CPUs: {}", result.kernel_series(), result.clock.name(), result.cpus)
}

fn regressions(new: &MethodResult, old: &MethodResult, tolerance: Tolerance) -> Vec<String> {
    let mut found = Vec::new();
    if new.lost > as_many_lost(new, old) {
        let [now, before] = [new, old].map(|of| format!("{} of {}", of.lost, sent(of)));
        found.push(format!("{now} requests lost, {before} in the baseline"));
    }
    let (Some(now), Some(before)) = (&new.latency_us, &old.latency_us) else {
        if old.latency_us.is_some() {
            found.push("no response time, and the baseline has some".to_owned());
        }
        return found;
    };
    for (name, now, before) in [("p99", now.p99, before.p99), ("max", now.max, before.max)] {
        if let Some(share) = tolerance.exceeded(now, before) {
            let [now, before] = [now, before].map(number::us);
            found.push(format!("{name} {now} us, {} above the baseline's {before} us", number::percent(share)));
        }
    }
    found.extend(slower(&new.histogram, &old.histogram, tolerance));
    found
}

fn sent(result: &MethodResult) -> u64 {
    result.count.saturating_add(result.lost)
}

/// The baseline's losses for as many requests as the new result has, rounded up.
fn as_many_lost(new: &MethodResult, old: &MethodResult) -> u64 {
    let lost = (u128::from(old.lost) * u128::from(sent(new))).div_ceil(u128::from(sent(old)).max(1));
    u64::try_from(lost).unwrap_or(u64::MAX)
}

/// The point at which the histograms differ most to the disadvantage of the new one, if they differ by more than chance
/// explains: a Kolmogorov-Smirnov test of one side, in which the baseline's times are longer by the tolerance.
fn slower(new: &[HistogramBin], old: &[HistogramBin], tolerance: Tolerance) -> Option<String> {
    let total = |bins: &[HistogramBin]| bins.iter().map(|bin| bin.count).sum::<u64>() as f64;
    let (news, olds) = (total(new), total(old));
    if news == 0.0 || olds == 0.0 {
        return None;
    }
    let allowed = (-CHANCE.ln() / 2.0 * (news + olds) / (news * olds)).sqrt();
    let mut seen = 0;
    let at = |bin: &HistogramBin| {
        seen += bin.count;
        let limit = tolerance.limit(bin.high_us);
        // A bin that begins below the limit counts as below it.
        let below = new.iter().filter(|bin| bin.low_us < limit).map(|bin| bin.count).sum::<u64>() as f64;
        (seen as f64 / olds - below / news, bin.high_us, limit)
    };
    let worst = old.iter().map(at).max_by(|one, other| one.0.total_cmp(&other.0));
    let (more, before, now) = worst.filter(|(more, ..)| *more > allowed)?;
    let [before, now] = [before, now].map(number::us);
    let [more, allowed] = [more, allowed].map(number::percent);
    Some(format!(
        "the histogram: {more} more of the requests take {now} us or longer than took {before} us or longer in the \
         baseline; chance explains {allowed}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::{Clock, Load, Run, SCHEMA_VERSION};
    use crate::wire::{Exchange, WireAnalysis};

    /// A result with these response times, us.
    fn result(method: &str, cpus: u32, times_us: impl IntoIterator<Item = u64>) -> MethodResult {
        let exchange = |(at, us): (usize, u64)| Exchange {
            sequence: at as u64,
            at_ns: at as u64 * 5_000_000,
            latency_ns: us * 1_000,
        };
        let mut wire = WireAnalysis {
            exchanges: times_us.into_iter().enumerate().map(exchange).collect(),
            ..WireAnalysis::default()
        };
        wire.counts.counted = wire.exchanges.len() as u64;
        MethodResult::new(&Run {
            method,
            label: "",
            kernel: "7.2.12-rt-amd64",
            clock: Clock::Virtual,
            cpus,
            load: Load::Tcp,
            wire: &wire,
            bulk: None,
            cpu_share: None,
            late_ns: None,
        })
    }

    fn report(results: Vec<MethodResult>) -> Report {
        Report {
            schema_version: SCHEMA_VERSION,
            experiment: "rt-server".into(),
            clock: Clock::Virtual,
            kernel: "7.2.12-rt-amd64".into(),
            seed: 1,
            command: String::new(),
            created: String::new(),
            machine: String::new(),
            results,
            paper: Vec::new(),
            goals: Vec::new(),
            notes: Vec::new(),
        }
    }

    fn compared(new: Vec<MethodResult>, old: Vec<MethodResult>, percent: &str) -> Comparison {
        compare(&report(new), &report(old), percent.parse().unwrap())
    }

    /// Response times of 1,000 requests between 50 and 69 us.
    fn usual() -> impl Iterator<Item = u64> {
        (0..1_000).map(|request| 50 + request % 20)
    }

    #[test]
    fn the_same_figures_and_better_ones_are_no_regression() {
        let old = || vec![result("partitioned", 1, usual())];
        for times in
            [usual().collect::<Vec<_>>(), usual().map(|us| us - 5).collect(), usual().map(|us| us + 2).collect()]
        {
            let comparison = compared(vec![result("partitioned", 1, times)], old(), "5");
            assert_eq!((comparison.compared, comparison.regressions.len()), (1, 0), "{comparison:?}");
        }
    }

    #[test]
    fn each_figure_is_told_with_the_baselines() {
        let old = || vec![result("partitioned", 1, usual())];
        // One slow request: only the maximum.
        let slow = usual().enumerate().map(|(at, us)| if at == 700 { 400 } else { us });
        let comparison = compared(vec![result("partitioned", 1, slow)], old(), "5");
        assert_eq!(comparison.regressions, ["partitioned, TCP flood: max 400 us, 480 % above the baseline's 69.0 us"]);
        // A fiftieth of them: p99 too; the histogram alone would be chance.
        let some = usual().enumerate().map(|(at, us)| if at % 50 == 0 { 90 } else { us });
        let words = compared(vec![result("partitioned", 1, some)], old(), "5").regressions.join("\n");
        assert!(
            words.contains("p99 90.0 us") && words.contains("max 90.0 us") && !words.contains("histogram"),
            "{words}"
        );
        // The lower half is slower, and the slowest are not: the histogram only.
        let shifted = usual().map(|us| us.max(66));
        let words = compared(vec![result("partitioned", 1, shifted)], old(), "5").regressions.join("\n");
        assert!(words.contains("histogram: ") && !words.contains("p99") && !words.contains("max"), "{words}");
        // No answer at all.
        let mut silent = result("partitioned", 1, []);
        silent.lost = 7;
        let words = compared(vec![silent], old(), "5").regressions.join("\n");
        let lost = "7 of 7 requests lost, 0 of 1000 in the baseline";
        assert!(words.contains(lost) && words.contains("no response time"), "{words}");
    }

    #[test]
    fn losses_are_compared_by_the_number_of_requests() {
        let with = |lost, count| {
            let mut result = result("partitioned", 1, usual().take(count));
            result.lost = lost;
            vec![result]
        };
        let words = |new, old| compared(new, old, "5").regressions.join("\n");
        assert_eq!(words(with(3, 997), with(1, 299)), "");
        assert_eq!(words(with(1, 99), with(1, 999)), "");
        assert!(words(with(2, 98), with(3, 997)).contains("2 of 100 requests lost, 3 of 1000 in the baseline"));
        assert!(words(with(1, 99), with(0, 1_000)).contains("1 of 100 requests lost"));
    }

    #[test]
    fn the_tolerance_decides_and_few_requests_prove_nothing_about_the_histogram() {
        let one = |us| vec![result("partitioned", 1, [us])];
        assert!(compared(one(104), one(100), "5").regressions.is_empty());
        assert!(compared(one(105), one(100), "5").regressions.is_empty());
        let words = compared(one(106), one(100), "5").regressions.join("\n");
        assert!(words.contains("p99 106 us, 6.00 % above") && !words.contains("histogram"), "{words}");
        assert_eq!(compared(one(106), one(100), "0").regressions.len(), 2);
        for bad in ["-1", "1001", "NaN", "inf", "5%", ""] {
            assert!(bad.parse::<Tolerance>().unwrap_err().contains("0 to 1000"), "{bad}");
        }
    }

    #[test]
    fn results_of_other_conditions_are_left_out_and_named() {
        let old = vec![result("partitioned", 1, usual())];
        let new = vec![result("partitioned", 2, usual()), result("threaded", 1, usual())];
        let comparison = compared(new, old, "5");
        assert_eq!(comparison.compared, 0);
        let words = comparison.words("5".parse().unwrap());
        assert!(words.starts_with("Baseline: 0 compared, none worse by more than 5.00 %\n"), "{words}");
        assert!(words.contains("CPUs: 2; the baseline: Linux 7.2, virtual clock, CPUs: 1"), "{words}");
        assert!(words.contains("threaded, TCP flood: the baseline does not have it"), "{words}");
    }
}
