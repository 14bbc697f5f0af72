//! The goals of an experiment as types, and whether a report meets them.
//!
//! In: [`GoalSpec`]s and the results. Out: [`Goal`]s with the figures from which they were computed. A goal with
//! missing results is neither met nor not met, and states what is missing.

use ontime_figures::number;

use crate::schema::{
    Bound, Clock, Distribution, Goal, JOBS, LATE, Load, MISSED, MethodResult, REFUSED, Unit, kernel_series,
};

/// A method under a condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    /// The method's name on the command line.
    pub method: &'static str,
    /// Traffic of the bulk tenants.
    pub load: Load,
}

/// A case under a flood of small packets.
pub const fn small(method: &'static str) -> Case {
    Case { method, load: Load::SmallPackets }
}

/// A case under TCP at full speed.
pub const fn tcp(method: &'static str) -> Case {
    Case { method, load: Load::Tcp }
}

/// A case without a flood.
pub const fn idle(method: &'static str) -> Case {
    Case { method, load: Load::None }
}

/// A goal of [`Measure::LeastCount`], unless [`GoalSpec::of`], [`GoalSpec::only`] or [`GoalSpec::late`] sets another
/// measure.
pub const fn goal(id: &'static str, text: &'static str) -> GoalSpec {
    GoalSpec { id, text, measure: Measure::LeastCount, bound: Bound::AtLeast, target: 0.0 }
}

/// A figure of a result, which goals compare and tables show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Figure {
    /// Requests in the statistics.
    Count,
    /// Requests without an answer.
    Lost,
    /// Arithmetic mean of response times.
    Mean,
    /// Median.
    P50,
    /// 90th percentile.
    P90,
    /// 95th percentile.
    P95,
    /// 99th percentile.
    P99,
    /// 99.9th percentile.
    P99_9,
    /// 99.99th percentile.
    P99_99,
    /// Maximum.
    Max,
    /// Standard deviation.
    Sd,
    /// Bulk throughput.
    Bulk,
    /// Busy share of the CPUs.
    Cpu,
    /// A metric of the result as a whole ([`MethodResult::metric`]).
    Own(&'static str),
}

/// The quantity that a goal evaluates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measure {
    /// The figure of the first divided by that of the second.
    Ratio(Figure, Case, Case),
    /// The amount by which the figure of the first exceeds the sum of the others' figures; at least 0.
    Beyond(Figure, Case, &'static [Case]),
    /// The figure itself.
    Only(Figure, Case),
    /// Frames that arrived late, or never.
    Late(Case),
    /// Deadlines that applications missed. Not evaluated if an application did no job.
    Missed(Case),
    /// The smallest count of all results of the series.
    LeastCount,
}

impl Measure {
    /// The cases that it uses; empty if it uses all.
    pub fn cases(self) -> Vec<Case> {
        match self {
            Measure::Ratio(_, over, under) => vec![over, under],
            Measure::Beyond(_, above, bases) => [&[above], bases].concat(),
            Measure::Only(_, case) | Measure::Late(case) | Measure::Missed(case) => vec![case],
            Measure::LeastCount => Vec::new(),
        }
    }
}

/// The definition of a goal.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GoalSpec {
    /// A short name.
    pub id: &'static str,
    /// The goal in words.
    pub text: &'static str,
    /// The quantity that is evaluated.
    pub measure: Measure,
    /// Which side of the target is good.
    pub bound: Bound,
    /// The figure to reach.
    pub target: f64,
}

impl GoalSpec {
    /// The goal with a ratio of two cases as its measure.
    pub const fn of(self, figure: Figure, over: Case, under: Case) -> Self {
        Self { measure: Measure::Ratio(figure, over, under), ..self }
    }

    /// The goal with the excess of one case over others as its measure.
    pub const fn beyond(self, figure: Figure, above: Case, bases: &'static [Case]) -> Self {
        Self { measure: Measure::Beyond(figure, above, bases), ..self }
    }

    /// The goal with a single figure as its measure.
    pub const fn only(self, figure: Figure, case: Case) -> Self {
        Self { measure: Measure::Only(figure, case), ..self }
    }

    /// The goal with late frames as its measure.
    pub const fn late(self, case: Case) -> Self {
        Self { measure: Measure::Late(case), ..self }
    }

    /// The goal that no deadline is missed.
    pub const fn missed(self, case: Case) -> Self {
        Self { measure: Measure::Missed(case), ..self }.at_most(0.0)
    }

    /// The goal with a lower limit.
    pub const fn at_least(self, target: f64) -> Self {
        Self { bound: Bound::AtLeast, target, ..self }
    }

    /// The goal with an upper limit.
    pub(crate) const fn at_most(self, target: f64) -> Self {
        Self { bound: Bound::AtMost, target, ..self }
    }
}

/// Evaluates every goal for every kernel series that has a result on `clock`. Goals for the series of `promised` (a
/// release or a series) come first. They are binding, except on a real clock, where other work of the machine has an
/// influence; all others are for information. If a case was measured more than once, the first result counts.
pub fn evaluate(specs: &[GoalSpec], results: &[MethodResult], clock: Clock, promised: &str) -> Vec<Goal> {
    let promised = kernel_series(promised);
    let exact = !matches!(clock, Clock::Real | Clock::Hardware);
    let mut series = vec![promised];
    for result in results.iter().filter(|result| result.clock == clock) {
        if !series.contains(&result.kernel_series()) {
            series.push(result.kernel_series());
        }
    }
    let look = |series: &str| {
        let of_series = |result: &&MethodResult| result.clock == clock && result.kernel_series() == series;
        let results: Vec<&MethodResult> = results.iter().filter(of_series).collect();
        specs.iter().map(|spec| spec.look(&results, series, exact && series == promised)).collect::<Vec<_>>()
    };
    series.iter().flat_map(|series| look(series)).collect()
}

impl GoalSpec {
    fn look(&self, results: &[&MethodResult], series: &str, binding: bool) -> Goal {
        let (actual, figures) = match self.measure.take(results) {
            Ok((actual, figures)) => (Some(actual), figures),
            Err(missing) => (None, missing),
        };
        let met = actual.map(|actual| match self.bound {
            Bound::AtLeast => actual >= self.target,
            Bound::AtMost => actual <= self.target,
        });
        Goal {
            id: self.id.to_string(),
            text: self.text.to_string(),
            bound: self.bound,
            target: self.target,
            actual,
            met,
            figures,
            kernel_series: series.to_string(),
            binding,
        }
    }
}

impl Measure {
    /// The figure and the figures from which it was computed, or what is missing.
    fn take(self, results: &[&MethodResult]) -> Result<(f64, String), String> {
        match self {
            Measure::Ratio(figure, over, under) => ratio(results, figure, over, under),
            Measure::Beyond(figure, above, bases) => {
                let (mut beyond, mut words) = value(results, figure, above)?;
                for base in bases {
                    let (of, said) = value(results, figure, *base)?;
                    beyond -= of;
                    words = format!("{words}, {said}");
                }
                Ok((beyond.max(0.0), words))
            }
            Measure::Only(figure, case) => value(results, figure, case),
            Measure::Late(case) => {
                let result = case.find(results)?;
                let late = result.number(LATE).ok_or_else(|| format!("{}: nothing is ever late", case.name()))?;
                let lost = result.lost;
                Ok((late + lost as f64, format!("{late} late, {lost} lost, {}", case.name())))
            }
            Measure::Missed(case) => {
                let result = case.find(results)?;
                let missed = result.number(MISSED).ok_or_else(|| format!("{}: there are no deadlines", case.name()))?;
                if let Some(refused) = result.number(REFUSED).filter(|refused| *refused > 0.0) {
                    return Err(format!("{}: applications that did no job: {refused}", case.name()));
                }
                let jobs = result.number(JOBS).unwrap_or_default();
                Ok((missed, format!("{missed} of {jobs} jobs, {}", case.method)))
            }
            Measure::LeastCount => {
                let least = results.iter().min_by_key(|result| result.count).ok_or("nothing was measured")?;
                Ok((least.count as f64, format!("{} requests with {}", number::count(least.count), least.method)))
            }
        }
    }
}

fn ratio(results: &[&MethodResult], figure: Figure, over: Case, under: Case) -> Result<(f64, String), String> {
    let ((above, words), (below, others)) = (value(results, figure, over)?, value(results, figure, under)?);
    if below <= 0.0 {
        return Err(format!("{others} divides nothing"));
    }
    Ok((above / below, format!("{words}, {others}")))
}

/// A figure of a case, and the figure in words.
fn value(results: &[&MethodResult], figure: Figure, case: Case) -> Result<(f64, String), String> {
    let result = case.find(results)?;
    let missing = || match figure {
        Figure::Own(key) => format!("{} has no figure '{}'", case.name(), key.replace('-', " ")),
        _ => case.missing(),
    };
    let (value, unit) = figure.of(result).ok_or_else(missing)?;
    let unit = if figure == Figure::Bulk { "Gbit/s" } else { unit.description() };
    Ok((value, format!("{} {} {unit}", case.name(), number::significant(value)).trim_end().to_owned()))
}

impl Figure {
    /// The figure of a result, and its unit; `None` if it was not measured.
    pub fn of(self, result: &MethodResult) -> Option<(f64, Unit)> {
        let latency = |pick: fn(&Distribution) -> f64| Some((pick(result.latency_us.as_ref()?), Unit::Us));
        match self {
            Figure::Count => Some((result.count as f64, Unit::Count)),
            Figure::Lost => Some((result.lost as f64, Unit::Count)),
            Figure::Mean => latency(|of| of.mean),
            Figure::P50 => latency(|of| of.p50),
            Figure::P90 => latency(|of| of.p90),
            Figure::P95 => latency(|of| of.p95),
            Figure::P99 => latency(|of| of.p99),
            Figure::P99_9 => latency(|of| of.p99_9),
            Figure::P99_99 => latency(|of| of.p99_99),
            Figure::Max => latency(|of| of.max),
            Figure::Sd => latency(|of| of.sd),
            Figure::Bulk => Some((result.bulk_gbps?, Unit::Times)),
            Figure::Cpu => Some((result.cpu_share?, Unit::Share)),
            Figure::Own(key) => Some((result.number(key)?, result.metric(key)?.unit)),
        }
    }

    /// The number of samples from which on a percentile differs from the maximum.
    pub(crate) fn least_count(self) -> u64 {
        match self {
            Figure::P99_9 => 1_000,
            Figure::P99_99 => 10_000,
            _ => 0,
        }
    }

    /// The head of the figure's column.
    pub fn head(self) -> &'static str {
        match self {
            Figure::Count => "count",
            Figure::Lost => "lost",
            Figure::Mean => "mean, µs",
            Figure::P50 => "p50, µs",
            Figure::P90 => "p90, µs",
            Figure::P95 => "p95, µs",
            Figure::P99 => "p99, µs",
            Figure::P99_9 => "p99.9, µs",
            Figure::P99_99 => "p99.99, µs",
            Figure::Max => "max, µs",
            Figure::Sd => "sd, µs",
            Figure::Bulk => "bulk, Gbit/s",
            Figure::Cpu => "CPU",
            Figure::Own(key) => key,
        }
    }
}

impl Case {
    fn name(self) -> String {
        format!("{} ({})", self.method, self.load.description())
    }

    fn missing(self) -> String {
        format!("{} was not measured", self.name())
    }

    /// The first result of the case.
    fn find<'a>(self, results: &[&'a MethodResult]) -> Result<&'a MethodResult, String> {
        let is_case = |result: &&&MethodResult| result.method == self.method && result.load == self.load;
        results.iter().find(is_case).copied().ok_or_else(|| self.missing())
    }
}
