//! Goals of an experiment, typed, and whether a report meets them.
//!
//! In: [`GoalSpec`]s and the results. Out: [`Goal`]s with the figures they were computed from. A goal whose results are
//! missing is neither met nor not met, and says what is missing.

use crate::number;
use crate::schema::{Bound, Clock, Goal, MethodResult, kernel_series};

/// A method under a condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    /// The method's name on the command line.
    pub method: &'static str,
    /// With the bulk tenants flooded.
    pub flood: bool,
}

/// What a goal compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measure {
    /// p99 of the first divided by p99 of the second.
    P99Ratio(Case, Case),
    /// Bulk throughput of the first divided by that of the second.
    BulkRatio(Case, Case),
    /// The smallest count of all results of the series.
    LeastCount,
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

const fn flooded(method: &'static str) -> Case {
    Case { method, flood: true }
}

/// The speed goals of `rt-server`: on the virtual clock, for the series that the project promises.
pub const RT_SERVER: [GoalSpec; 5] = [
    GoalSpec {
        id: "p99-vs-vanilla",
        text: "partitioned: p99 at least 20 times below vanilla",
        measure: Measure::P99Ratio(flooded("vanilla"), flooded("partitioned")),
        bound: Bound::AtLeast,
        target: 20.0,
    },
    GoalSpec {
        id: "p99-vs-threaded",
        text: "partitioned: p99 at least 8 times below threaded",
        measure: Measure::P99Ratio(flooded("threaded"), flooded("partitioned")),
        bound: Bound::AtLeast,
        target: 8.0,
    },
    GoalSpec {
        id: "p99-vs-no-flood",
        text: "partitioned: p99 under flood at most 1.25 times that without",
        measure: Measure::P99Ratio(flooded("partitioned"), Case { method: "partitioned", flood: false }),
        bound: Bound::AtMost,
        target: 1.25,
    },
    GoalSpec {
        id: "bulk-vs-vanilla",
        text: "partitioned: bulk throughput at least 0.95 of vanilla's",
        measure: Measure::BulkRatio(flooded("partitioned"), flooded("vanilla")),
        bound: Bound::AtLeast,
        target: 0.95,
    },
    GoalSpec {
        id: "requests",
        text: "at least 20,000 counted requests a method",
        measure: Measure::LeastCount,
        bound: Bound::AtLeast,
        target: 20_000.0,
    },
];

/// The goals of an experiment; none where it has none.
pub fn of_experiment(experiment: &str) -> &'static [GoalSpec] {
    if experiment == "rt-server" { &RT_SERVER } else { &[] }
}

/// Looks at every goal for every kernel series that has a result on `clock`. Those of `promised` (a release or series)
/// are binding and come first, the others are for information. Where a case was measured more than
/// once, the first result counts.
pub fn evaluate(specs: &[GoalSpec], results: &[MethodResult], clock: Clock, promised: &str) -> Vec<Goal> {
    let promised = kernel_series(promised);
    let mut series = vec![promised];
    for result in results.iter().filter(|result| result.clock == clock) {
        if !series.contains(&result.kernel_series()) {
            series.push(result.kernel_series());
        }
    }
    let look = |series: &str| {
        let of_series = |result: &&MethodResult| result.clock == clock && result.kernel_series() == series;
        let results: Vec<&MethodResult> = results.iter().filter(of_series).collect();
        specs.iter().map(|spec| spec.look(&results, series, series == promised)).collect::<Vec<_>>()
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
            Measure::P99Ratio(above, below) => {
                let p99 = |result: &MethodResult| result.latency_us.map(|latency| latency.p99);
                ratio(results, above, below, p99, "µs")
            }
            Measure::BulkRatio(above, below) => ratio(results, above, below, |result| result.bulk_gbps, "Gbit/s"),
            Measure::LeastCount => {
                let least = results.iter().min_by_key(|result| result.count).ok_or("nothing was measured")?;
                Ok((least.count as f64, format!("{} requests with {}", number::count(least.count), least.method)))
            }
        }
    }
}

fn ratio(
    results: &[&MethodResult],
    above: Case,
    below: Case,
    figure: impl Fn(&MethodResult) -> Option<f64>,
    unit: &str,
) -> Result<(f64, String), String> {
    let of = |case: Case| {
        let is_case = |result: &&&MethodResult| result.method == case.method && result.flood == case.flood;
        let found = results.iter().find(is_case).and_then(|result| figure(result));
        found.ok_or_else(|| format!("{} was not measured", case.name()))
    };
    let (over, under) = (of(above)?, of(below)?);
    if under <= 0.0 {
        return Err(format!("{} is {under} {unit}, which divides nothing", below.name()));
    }
    let figure = |case: Case, value| format!("{} {} {unit}", case.name(), number::significant(value));
    Ok((over / under, format!("{}, {}", figure(above, over), figure(below, under))))
}

impl Case {
    fn name(self) -> String {
        format!("{}{}", self.method, if self.flood { "" } else { " without flood" })
    }
}
