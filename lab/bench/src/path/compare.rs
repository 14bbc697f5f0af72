//! Compares the instructions of requests with those of an earlier run.
//!
//! In: two [`Document`]s. Out: a [`Comparison`]. The median decides, together with the 40th percentile: some requests
//! also restart a tick or refill a ring, and their share, which differs between runs, can move one of the two. A change
//! that makes each request longer moves both. What the slowest has more depends on which rare event met a traced
//! request.

use std::collections::BTreeMap;

use ontime_figures::number;

use super::report::{Document, FunctionRow, Method, StageRow};
use crate::baseline::{Comparison, Tolerance};

/// Number of stages, and of functions, that a regression names.
const NAMED: usize = 3;

/// Compares every method with the baseline's. Both must be of one kernel and number of CPUs: other functions run on
/// others.
pub(crate) fn compare(new: &Document, baseline: &Document, tolerance: Tolerance) -> Comparison {
    let mut comparison = Comparison::default();
    for method in &new.methods {
        let name = &method.method;
        let Some(old) = baseline.methods.iter().find(|old| old.method == *name) else {
            comparison.left_out.push(format!("{name}: the baseline does not have it"));
            continue;
        };
        let [now, before] = [new, baseline].map(|of| format!("Linux {}, CPUs: {}", of.kernel, of.cpus));
        if now != before {
            comparison.left_out.push(format!("{name}: {now}; the baseline: {before}"));
            continue;
        }
        comparison.compared += 1;
        comparison.regressions.extend(regression(method, old, tolerance));
    }
    comparison
}

fn regression(new: &Method, old: &Method, tolerance: Tolerance) -> Option<String> {
    let [fewer, fewer_before] = [new, old].map(below_median);
    tolerance.exceeded(fewer as f64, fewer_before as f64)?;
    let share = tolerance.exceeded(new.median as f64, old.median as f64)?;
    let [now, before] = [new.median, old.median].map(number::count);
    Some(format!(
        "{}: {now} instructions, {} above the baseline's {before}; most in the stages {}; in the functions {}",
        new.method,
        number::percent(share),
        largest(new.stages.iter().map(stage), old.stages.iter().map(stage)),
        largest(new.functions.iter().map(function), old.functions.iter().map(function)),
    ))
}

/// Instructions that 40 % of the requests do not exceed.
fn below_median(method: &Method) -> u64 {
    let mut requests = method.requests.clone();
    requests.sort_unstable();
    requests.get(requests.len().saturating_sub(1) * 2 / 5).copied().unwrap_or(method.median)
}

fn stage(row: &StageRow) -> (String, u64) {
    (format!("{}, {}, {}", row.phase.description(), row.thread, row.level.description()), row.median)
}

fn function(row: &FunctionRow) -> (String, u64) {
    (format!("{} ({})", row.function, row.level.description()), row.median)
}

/// The parts that have grown most, with their growth.
fn largest(new: impl Iterator<Item = (String, u64)>, old: impl Iterator<Item = (String, u64)>) -> String {
    let mut growth: BTreeMap<String, i64> = BTreeMap::new();
    let signed = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    for (part, count) in new {
        *growth.entry(part).or_default() += signed(count);
    }
    for (part, count) in old {
        *growth.entry(part).or_default() -= signed(count);
    }
    let mut growth: Vec<(String, i64)> = growth.into_iter().filter(|(_, more)| *more > 0).collect();
    growth.sort_by_key(|(_, more)| std::cmp::Reverse(*more));
    let named = growth.into_iter().take(NAMED);
    named.map(|(part, more)| format!("{part} +{}", number::count(more.unsigned_abs()))).collect::<Vec<_>>().join("; ")
}
