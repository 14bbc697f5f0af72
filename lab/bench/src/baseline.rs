//! Whether results are worse than those of an earlier run, the baseline.
//!
//! In: two [`Report`]s of one experiment and a [`Tolerance`]. Out: a [`Comparison`]. Results are compared if method,
//! load, kernel series, clock, number of CPUs and the clients' side are the same. If the baseline has several such
//! results, as of several seeds, they are one sample. [`crate::path`] compares instructions in the same way.
//!
//! A figure may be worse by the tolerance and, beyond that, by what chance explains: each test alone has a false alarm
//! in at most [`CHANCE`] of the comparisons of runs whose requests are independent and alike:
//!
//! - p99 and maximum, by ranks ([`explained`]): how many of the new requests take longer than the baseline's.
//! - The slowest request alone ([`slowest_explained`]), for which the ranks of few requests prove nothing.
//! - The histogram ([`slower`]).
//!
//! A request more that is lost is worse.

use std::fmt::Write as _;
use std::str::FromStr;

use ontime_figures::number;
use ontime_figures::stats::Percentile;

use crate::schema::{HistogramBin, MethodResult, Report};

/// Probability with which chance alone makes a test call two runs of the same behaviour different.
const CHANCE: f64 = 0.001;
/// The largest tolerance, percent.
const MOST_PERCENT: f64 = 1_000.0;
/// The slowest request is judged by the slowest one of this many requests of the baseline.
const TAIL_OF: u64 = 10;
/// Fewest requests of a baseline by which a slowest request alone is judged. Fewer may lack what one of 33 requests
/// meets (the refill of the guest's receive ring, 24 us): two runs of 30 requests with one seed had maxima of 58 and 82
/// us.
const FEWEST: u64 = 1_000;

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

    pub(crate) fn description(self) -> String {
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
    pub(crate) fn description(&self, tolerance: Tolerance) -> String {
        let Self { compared, regressions, left_out } = self;
        let count = if regressions.is_empty() { "none".to_owned() } else { regressions.len().to_string() };
        let mut text =
            format!("Baseline: {compared} compared, {count} worse by more than {}\n", tolerance.description());
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
        let name = name(result);
        let of_case: Vec<&MethodResult> = baseline.results.iter().filter(|old| is_case(old, result)).collect();
        let alike = of_case.iter().copied().filter(|old| old.conditions() == result.conditions());
        match Stored::of(alike) {
            Some(old) if old.lost > 0 || !old.histogram.is_empty() => {
                comparison.compared += 1;
                let worse = regressions(result, &old, tolerance);
                comparison.regressions.extend(worse.into_iter().map(|what| format!("{name}: {what}")));
            }
            Some(_) => comparison.left_out.push(format!("{name}: the baseline has no response times of it")),
            None if of_case.is_empty() => comparison.left_out.push(format!("{name}: the baseline does not have it")),
            None => {
                let others: Vec<String> = of_case.iter().map(|old| old.conditions()).collect();
                let said = format!("{name}: {}; the baseline: {}", result.conditions(), others.join("; "));
                comparison.left_out.push(said);
            }
        }
    }
    for old in &baseline.results {
        let line = format!("{}: only the baseline has it", name(old));
        if !new.results.iter().any(|result| is_case(old, result)) && !comparison.left_out.contains(&line) {
            comparison.left_out.push(line);
        }
    }
    comparison
}

fn name(result: &MethodResult) -> String {
    format!("{}, {}", result.method, result.load.description())
}

fn is_case(old: &MethodResult, new: &MethodResult) -> bool {
    old.method == new.method && old.load == new.load
}

/// The baseline's results of one case.
struct Stored {
    /// The response times of all results together.
    histogram: Vec<HistogramBin>,
    /// The highest p99 of a result, us.
    p99: f64,
    /// The longest response time, us.
    max: f64,
    lost: u64,
    sent: u64,
}

impl Stored {
    /// `None` if there are none.
    fn of<'a>(results: impl Iterator<Item = &'a MethodResult>) -> Option<Self> {
        let mut stored: Option<Self> = None;
        for result in results {
            let all = stored.get_or_insert(Self { histogram: Vec::new(), p99: 0.0, max: 0.0, lost: 0, sent: 0 });
            all.lost = all.lost.saturating_add(result.lost);
            all.sent = all.sent.saturating_add(sent(result));
            all.histogram.extend_from_slice(&result.histogram);
            if let Some(times) = &result.latency_us {
                (all.p99, all.max) = (all.p99.max(times.p99), all.max.max(times.max));
            }
        }
        if let Some(all) = &mut stored {
            all.histogram.sort_by(|one, other| one.low_us.total_cmp(&other.low_us));
        }
        stored
    }

    /// The baseline's losses for as many requests as the new result has, rounded up.
    fn as_many_lost(&self, new: &MethodResult) -> u64 {
        let lost = (u128::from(self.lost) * u128::from(sent(new))).div_ceil(u128::from(self.sent).max(1));
        u64::try_from(lost).unwrap_or(u64::MAX)
    }
}

fn regressions(new: &MethodResult, old: &Stored, tolerance: Tolerance) -> Vec<String> {
    let mut found = Vec::new();
    if new.lost > old.as_many_lost(new) {
        let (sent, before) = (sent(new), old.sent);
        found.push(format!("{} of {sent} requests lost, {} of {before} in the baseline", new.lost, old.lost));
    }
    let (olds, news) = (total(&old.histogram), total(&new.histogram));
    let Some(now) = new.latency_us.as_ref().filter(|_| olds > 0) else {
        if olds > 0 {
            found.push("no response time, and the baseline has some".to_owned());
        }
        return found;
    };
    let ranked = [("p99", now.p99, old.p99, rank_of_p99(olds)), ("max", now.max, old.max, olds)];
    for (name, now, before, rank) in ranked {
        let limit = tolerance.limit(before);
        let (above, chance) = (above(&new.histogram, limit), explained(olds, rank, news));
        let [now, before] = [now, before].map(number::us);
        if above > chance {
            found.push(format!(
                "{name} {now} us, the baseline's {before} us: {above} of {news} requests take {} us or longer; chance \
                 explains {chance}",
                number::us(limit)
            ));
        }
    }
    let slowest = slowest_explained(&old.histogram, news).map(|more| tolerance.limit(old.max) + more);
    if let Some(limit) = slowest.filter(|limit| now.max > *limit) {
        let [now, before, limit] = [now.max, old.max, limit].map(number::us);
        found.push(format!("max {now} us, the baseline's {before} us; chance explains {limit} us"));
    }
    found.extend(slower(&new.histogram, &old.histogram, tolerance));
    found
}

fn sent(result: &MethodResult) -> u64 {
    result.count.saturating_add(result.lost)
}

fn total(bins: &[HistogramBin]) -> u64 {
    bins.iter().map(|bin| bin.count).sum()
}

/// Number of requests that take this long or longer. A bin that begins below the limit counts as below it.
fn above(bins: &[HistogramBin], limit_us: f64) -> u64 {
    bins.iter().filter(|bin| bin.low_us >= limit_us).map(|bin| bin.count).sum()
}

fn rank_of_p99(count: u64) -> u64 {
    Percentile::P99.rank(usize::try_from(count).unwrap_or(usize::MAX)) as u64
}

/// How many of `news` requests may take longer than the one of this rank among `olds` requests: more do in at most
/// [`CHANCE`] of the cases in which all are alike. All orders of all requests are then equally likely, whatever their
/// distribution: the number has the negative hypergeometric distribution (a precedence test).
fn explained(olds: u64, rank: u64, news: u64) -> u64 {
    let [of_old, at, of_new] = [olds, rank, news].map(|count| count as f64);
    // The logarithm of the probability of exactly `above`, as 0.99 to the power of a million is 0 in floating point.
    let mut log: f64 = (0..news).map(|one| ((at + one as f64) / (of_old + 1.0 + one as f64)).ln()).sum();
    let mut more = 1.0;
    for above in 0..news {
        more -= log.exp();
        if more <= CHANCE {
            return above;
        }
        let this = above as f64;
        log += ((of_old - at + this + 1.0) / (this + 1.0) * (of_new - this) / (at - 1.0 + of_new - this)).ln();
    }
    news
}

/// By how much, us, the slowest of `news` requests may exceed the slowest of the baseline; `None` if the baseline has
/// too few to say.
///
/// The times of the baseline's slowest tenth are taken as exponentially distributed, as tails of queues are. With the
/// mean excess `s` over the next one, the difference of two such maxima exceeds `s * x` with probability `exp(-x)`; as
/// `s` is the mean of `k` measured ones, with `(1 + x / k) ^ -k`. The slowest of twice as many is `s * ln 2` slower.
fn slowest_explained(bins: &[HistogramBin], news: u64) -> Option<f64> {
    let olds = total(bins);
    if olds < FEWEST {
        return None;
    }
    let tail = olds.div_ceil(TAIL_OF);
    let mut left = tail;
    let (mut sum, mut next) = (0.0, None);
    for bin in bins.iter().rev() {
        let taken = left.min(bin.count);
        sum += bin.high_us * taken as f64;
        left -= taken;
        if left == 0 && bin.count > taken {
            next = Some(bin.high_us);
            break;
        }
    }
    let (count, more) = (tail as f64, news as f64 / olds as f64);
    let excess = sum / count - next?;
    Some(excess * (count * (CHANCE.powf(-1.0 / count) - 1.0) + more.max(1.0).ln()))
}

/// The point at which the histograms differ most to the disadvantage of the new one, if they differ by more than chance
/// explains: a Kolmogorov-Smirnov test of one side, in which the baseline's times are longer by the tolerance.
fn slower(new: &[HistogramBin], old: &[HistogramBin], tolerance: Tolerance) -> Option<String> {
    let (news, olds) = (total(new) as f64, total(old) as f64);
    if news == 0.0 || olds == 0.0 {
        return None;
    }
    let allowed = (-CHANCE.ln() / 2.0 * (news + olds) / (news * olds)).sqrt();
    let mut seen = 0;
    let at = |bin: &HistogramBin| {
        seen += bin.count;
        let limit = tolerance.limit(bin.high_us);
        (seen as f64 / olds - (news - above(new, limit) as f64) / news, bin.high_us, limit)
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
    use crate::schema::{CLIENTS_INSIDE, Clock, LINK, Load, Run, SCHEMA_VERSION};
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
            cpus,
            load: Load::Tcp,
            wire: &wire,
            ..Run::of(method, "", "7.2.12-rt-amd64", Clock::Virtual)
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
        let said = "partitioned, TCP flood: max 400 us, the baseline's 69.0 us; chance explains 83.4 us";
        assert_eq!(comparison.regressions, [said]);
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

    /// The regressions of a run, at a tolerance of 5 %.
    fn told(new: impl IntoIterator<Item = u64>, old: &[MethodResult]) -> Vec<String> {
        compared(vec![result("partitioned", 1, new)], old.to_vec(), "5").regressions
    }

    /// [`usual`], but this number of requests take this long.
    fn but(slow: usize, us: u64) -> impl Iterator<Item = u64> {
        usual().enumerate().map(move |(at, usual)| if at < slow { us } else { usual })
    }

    #[test]
    fn slightly_more_than_chance_explains_is_worse_and_slightly_less_is_not() {
        // Ten slow requests, a p99 of 60 us, and p99s of 150 us, which the baseline's slowest exceed.
        let tail = (0..1_000).map(|at| if at < 10 { 200 } else { 50 + 10 * u64::from(at == 10) });
        let old = [result("partitioned", 1, tail)];
        let slow = |count| (0..1_000).map(move |at| if at < count { 150 } else { 50 });
        assert!(told(slow(30), &old).is_empty(), "{:?}", told(slow(30), &old));
        let said = "partitioned, TCP flood: p99 150 us, the baseline's 60.0 us: 31 of 1000 requests take 63.0 us or \
                    longer; chance explains 30";
        assert_eq!(told(slow(31), &old), [said]);
        // Requests that are slower than the baseline's slowest: some, and one.
        let old = [result("partitioned", 1, usual())];
        assert!(told(but(9, 80), &old).is_empty() && told(but(1, 83), &old).is_empty());
        let words = told(but(10, 80), &old).join("\n");
        assert!(words.contains("max 80.0 us, the baseline's 69.0 us: 10 of 1000 requests"), "{words}");
        assert!(told(but(1, 84), &old).join("\n").contains("max 84.0 us"));
        // The runs of nine seeds are known better than one.
        let nine: Vec<MethodResult> = (0..9).map(|_| result("partitioned", 1, usual())).collect();
        assert!(told(but(2, 80), &nine).is_empty());
        assert!(told(but(3, 80), &nine).join("\n").contains("3 of 1000 requests"));
        // One slow request beside few others proves nothing.
        assert!(told([4_000], &[result("partitioned", 1, [100])]).is_empty());
        let few = |slowest| (0..30).map(move |at| if at == 5 { slowest } else { 53 + at % 5 });
        assert!(told(few(82), &[result("partitioned", 1, few(58))]).is_empty());
    }

    #[test]
    fn chance_explains_as_many_as_the_negative_hypergeometric_distribution_says() {
        for (olds, rank, news, most) in [
            (1, 1, 1, 1),
            (10, 10, 10, 7),
            (30, 30, 30, 8),
            (1_000, 990, 1_000, 30),
            (1_000, 1_000, 1_000, 9),
            (1_000, 990, 300, 12),
            (9_000, 9_000, 1_000, 2),
            (20_000, 19_800, 20_000, 267),
            (1_000_000, 990_000, 1_000_000, 10_440),
        ] {
            assert_eq!(explained(olds, rank, news), most, "{olds} {rank} {news}");
        }
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
    fn the_tolerance_decides() {
        let all = |us| vec![result("partitioned", 1, [us; 1_000])];
        assert!(compared(all(104), all(100), "5").regressions.is_empty());
        assert!(compared(all(105), all(100), "5").regressions.is_empty());
        assert!(!compared(all(106), all(100), "5").regressions.is_empty());
        assert!(compared(all(106), all(100), "7").regressions.is_empty());
        assert!(compared(all(100), all(100), "0").regressions.is_empty());
        assert!(!compared(all(101), all(100), "0").regressions.is_empty());
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
        let words = comparison.description("5".parse().unwrap());
        assert!(words.starts_with("Baseline: 0 compared, none worse by more than 5.00 %\n"), "{words}");
        let said = "CPUs: 2, clients none; the baseline: Linux 7.2, virtual clock, CPUs: 1, clients none";
        assert!(
            words.contains(said) && words.contains("threaded, TCP flood: the baseline does not have it"),
            "{words}"
        );
        let mut inside = result("partitioned", 1, usual());
        inside.notes.push(CLIENTS_INSIDE.to_owned());
        let comparison = compared(vec![inside.clone()], vec![result("partitioned", 1, usual())], "5");
        assert!(comparison.compared == 0 && comparison.left_out[0].contains("CPUs: 1, clients inside; the baseline"));
        let mut linked = inside.clone();
        linked.notes.push(format!("{LINK}1gbit,5us,256"));
        let comparison = compared(vec![linked], vec![inside], "5");
        assert!(comparison.left_out[0].contains("clients inside, link 1gbit,5us,256; the baseline"), "{comparison:?}");
        // Neither is a case that was not measured, nor one without response times, passed over in silence.
        let times = |method| result(method, 1, usual());
        let rate = |method| result(method, 1, []);
        let old = vec![times("partitioned"), times("exclusive"), rate("threaded")];
        let comparison = compared(vec![times("partitioned"), rate("threaded")], old, "5");
        assert_eq!((comparison.compared, comparison.regressions.len()), (1, 0));
        let said = [
            "threaded, TCP flood: the baseline has no response times of it",
            "exclusive, TCP flood: only the baseline has it",
        ];
        assert_eq!(comparison.left_out, said);
    }
}
