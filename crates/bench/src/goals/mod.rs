//! Goals of an experiment, typed, and whether a report meets them.
//!
//! In: [`GoalSpec`]s and the results. Out: [`Goal`]s with the figures they were computed from. A goal whose results are
//! missing is neither met nor not met, and says what is missing.

use Figure::{Bulk, Connections, Cost, HostTime, Max, P50, P95, P99, P99_9, Sd, ZeroLoss};

mod list;
use ontime_figures::number;

pub use self::list::{GOALS, of_experiment};
use crate::schema::{Bound, Clock, Goal, Load, MethodResult, kernel_series};

/// A method under a condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    /// The method's name on the command line.
    pub method: &'static str,
    /// What the bulk tenants do.
    pub load: Load,
}

/// A figure of a result that goals compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Figure {
    /// Median of response times.
    P50,
    /// 95th percentile.
    P95,
    /// 99th percentile.
    P99,
    /// 99.9th percentile.
    P99_9,
    /// The largest.
    Max,
    /// Standard deviation.
    Sd,
    /// Zero-loss throughput.
    ZeroLoss,
    /// Bulk throughput.
    Bulk,
    /// CPU time a byte, host and guest.
    Cost,
    /// Connections a second.
    Connections,
    /// CPU time of the host a change of bandwidth.
    HostTime,
}

/// What a goal looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measure {
    /// The figure of the first divided by that of the second.
    Ratio(Figure, Case, Case),
    /// By how much the figure of the first is above the sum of the others'; 0 where it is not.
    Beyond(Figure, Case, &'static [Case]),
    /// The figure itself.
    Only(Figure, Case),
    /// Frames that came late, or never.
    Late(Case),
    /// Requests that met a priority inversion, in the trace.
    Hindered(Case),
    /// Deadlines that applications missed.
    Missed(Case),
    /// What is reserved beyond need and slack, as a share of these.
    Excess(Case),
    /// The smallest count of all results of the series.
    LeastCount,
}

impl Measure {
    /// The cases it looks at; none where it looks at all.
    pub fn cases(self) -> Vec<Case> {
        match self {
            Measure::Ratio(_, over, under) => vec![over, under],
            Measure::Beyond(_, above, bases) => [&[above], bases].concat(),
            Measure::Only(_, case)
            | Measure::Late(case)
            | Measure::Hindered(case)
            | Measure::Missed(case)
            | Measure::Excess(case) => vec![case],
            Measure::LeastCount => Vec::new(),
        }
    }
}

/// A goal, before it is looked at.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GoalSpec {
    /// A short name.
    pub id: &'static str,
    /// In words.
    pub text: &'static str,
    /// What is compared.
    pub measure: Measure,
    /// Which side of the target is good.
    pub bound: Bound,
    /// The figure to reach.
    pub target: f64,
}

impl GoalSpec {
    const fn of(self, figure: Figure, over: Case, under: Case) -> Self {
        Self { measure: Measure::Ratio(figure, over, under), ..self }
    }

    const fn beyond(self, figure: Figure, above: Case, bases: &'static [Case]) -> Self {
        Self { measure: Measure::Beyond(figure, above, bases), ..self }
    }

    const fn only(self, figure: Figure, case: Case) -> Self {
        Self { measure: Measure::Only(figure, case), ..self }
    }

    const fn late(self, case: Case) -> Self {
        Self { measure: Measure::Late(case), ..self }
    }

    const fn hindered(self, case: Case) -> Self {
        Self { measure: Measure::Hindered(case), bound: Bound::AtMost, target: 0.0, ..self }
    }

    const fn missed(self, case: Case) -> Self {
        Self { measure: Measure::Missed(case), bound: Bound::AtMost, target: 0.0, ..self }
    }

    const fn excess(self, case: Case) -> Self {
        Self { measure: Measure::Excess(case), bound: Bound::AtMost, target: 0.01, ..self }
    }

    const fn at_least(self, target: f64) -> Self {
        Self { bound: Bound::AtLeast, target, ..self }
    }

    const fn at_most(self, target: f64) -> Self {
        Self { bound: Bound::AtMost, target, ..self }
    }
}

/// Looks at every goal for every kernel series that has a result on `clock`. Those of `promised` (a release or series)
/// come first and are binding, but on a real clock, where other work of the machine counts; the others are for
/// information. Where a case was measured more than once, the first result counts.
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
    /// The figure and what it was computed from, or what is missing.
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
                let late = case.find(results)?.late.ok_or_else(|| format!("{}: nothing is ever late", case.name()))?;
                let (late, lost) = (late.frames, case.find(results)?.lost);
                Ok(((late + lost) as f64, format!("{late} late, {lost} lost, {}", case.name())))
            }
            Measure::Hindered(case) => {
                let of = case.find(results)?.inversions.as_ref();
                let of = of.ok_or_else(|| format!("{}: inversions were not looked for (--inversions)", case.name()))?;
                if of.requests == 0 {
                    return Err(format!("{}: the trace put no request together", case.name()));
                }
                let (hindered, requests) = (number::count(of.hindered), number::count(of.requests));
                Ok((of.hindered as f64, format!("{hindered} of {requests} in {:.0} s, {}", of.duration_s, case.name())))
            }
            Measure::Missed(case) => {
                let result = case.find(results)?;
                let rtas = result.rtas.as_ref().ok_or_else(|| format!("{}: there are no deadlines", case.name()))?;
                let jobs: u64 = rtas.rows.iter().map(|row| row.jobs).sum();
                if let Some(idle) = rtas.rows.iter().find(|row| row.jobs == 0) {
                    let (slice, period) = (number::us(idle.slice_us), number::us(idle.period_us));
                    return Err(format!("{}: that of {slice} us in {period} us did no job", case.name()));
                }
                Ok((rtas.missed as f64, format!("{} of {jobs} jobs, {}", rtas.missed, case.method)))
            }
            Measure::Excess(case) => {
                let rtas = case.find(results)?.rtas.as_ref();
                let (rtas, share) = rtas
                    .and_then(|rtas| Some((rtas, rtas.excess()?)))
                    .ok_or_else(|| format!("{}: nothing was reserved", case.name()))?;
                let reserved = number::significant(rtas.reserved_cpus.unwrap_or(0.0) + rtas.slack_cpus);
                let (needed, slack) = (number::significant(rtas.needed_cpus), number::significant(rtas.slack_cpus));
                Ok((share, format!("{reserved} CPUs for {needed} and slack of {slack}, {}", case.method)))
            }
            Measure::LeastCount => {
                let least = results.iter().min_by_key(|result| result.count).ok_or("nothing was measured")?;
                Ok((least.count as f64, format!("{} requests with {}", number::count(least.count), least.method)))
            }
        }
    }
}

fn ratio(results: &[&MethodResult], figure: Figure, over: Case, under: Case) -> Result<(f64, String), String> {
    let (above, below, words) = pair(results, figure, over, under)?;
    if below <= 0.0 {
        return Err(format!("{} is {below} {}, which divides nothing", under.name(), figure.unit()));
    }
    Ok((above / below, words))
}

/// The figure of both, and what they are in words.
fn pair(results: &[&MethodResult], figure: Figure, first: Case, second: Case) -> Result<(f64, f64, String), String> {
    let ((first, words), (second, others)) = (value(results, figure, first)?, value(results, figure, second)?);
    Ok((first, second, format!("{words}, {others}")))
}

/// And in words.
fn value(results: &[&MethodResult], figure: Figure, case: Case) -> Result<(f64, String), String> {
    let result = case.find(results)?;
    if figure == ZeroLoss && result.zero_loss.is_some_and(|of| of.lossy_frames_per_s.is_none()) {
        return Err(format!(
            "{} lost no frame as fast as the client could send: its highest rate is not known",
            case.name()
        ));
    }
    let value = figure.of(result).ok_or_else(|| case.missing())?;
    Ok((value, format!("{} {} {}", case.name(), number::significant(value), figure.unit())))
}

impl Figure {
    fn of(self, result: &MethodResult) -> Option<f64> {
        let latency = result.latency_us;
        match self {
            P50 => latency.map(|of| of.p50),
            P95 => latency.map(|of| of.p95),
            P99 => latency.map(|of| of.p99),
            P99_9 => latency.map(|of| of.p99_9),
            Max => latency.map(|of| of.max),
            Sd => latency.map(|of| of.sd),
            ZeroLoss => result.zero_loss.map(|of| of.frames_per_s),
            Bulk => result.bulk_gbps,
            Cost => result.cost.map(|of| of.host_ns_per_byte + of.guest_ns_per_byte),
            Connections => result.connections.map(|of| of.per_s),
            HostTime => result.host_time.map(|of| of.sum_us()),
        }
    }

    fn unit(self) -> &'static str {
        match self {
            P50 | P95 | P99 | P99_9 | Max | Sd | HostTime => "µs",
            ZeroLoss => "frames/s",
            Connections => "a second",
            Bulk => "Gbit/s",
            Cost => "ns a byte",
        }
    }
}

impl Case {
    fn name(self) -> String {
        format!("{} ({})", self.method, self.load.words())
    }

    fn missing(self) -> String {
        format!("{} was not measured", self.name())
    }

    /// The first result of it.
    fn find<'a>(self, results: &[&'a MethodResult]) -> Result<&'a MethodResult, String> {
        let is_case = |result: &&&MethodResult| result.method == self.method && result.load == self.load;
        results.iter().find(is_case).copied().ok_or_else(|| self.missing())
    }
}
