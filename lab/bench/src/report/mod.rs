//! A report in formats for people (terminal table, CSV, a self-contained HTML page) and for other tools (histograms of
//! rtla and HDR).
//!
//! In: a [`Report`], perhaps parsed from its JSON. Out: text. Nothing is measured here, and nothing is left out:
//! [`unfavourable`] collects everything that speaks against a method, and every format shows it.

mod charts;
mod csv;
mod figure_tables;
mod histograms;
mod html;
mod names;

mod table;

pub use csv::csv;
pub use figure_tables::{FigureTable, figure_tables};
pub use histograms::{case, hgrm, hgrm_files, rtla};
pub use html::html;
pub(crate) use table::fitted;
pub use table::{goals, terminal};

use ontime_figures::number;

use self::names::Names;
use crate::experiments::{self, Experiment};
use crate::goals::Figure;
use crate::schema::{Goal, JOBS, LATE, LATE_OVER, Load, MISSED, MethodResult, Metric, PaperRow, Report, Unit};

/// A row of the comparison: our result, the paper's, or both.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a> {
    /// Our result.
    pub result: Option<&'a MethodResult>,
    /// The paper's row for the same method. Only beside a result under TCP, the paper's load.
    pub paper: Option<&'a PaperRow>,
    /// p99 of `vanilla` under the same load and conditions, divided by this result's: 61 means 61 times lower.
    pub below_vanilla: Option<f64>,
}

/// The rows of the comparison: our results in order, then rows that only the paper has.
pub fn rows(report: &Report) -> Vec<Row<'_>> {
    let mut rows: Vec<Row<'_>> = report
        .results
        .iter()
        .map(|result| Row {
            result: Some(result),
            paper: report.paper.iter().find(|paper| result.load == Load::Tcp && paper.method == result.method),
            below_vanilla: below_vanilla(report, result),
        })
        .collect();
    let is_ours = |paper: &PaperRow| {
        report.results.iter().any(|result| result.load == Load::Tcp && result.method == paper.method)
    };
    let only_paper = report.paper.iter().filter(|paper| !is_ours(paper));
    rows.extend(only_paper.map(|paper| Row { result: None, paper: Some(paper), below_vanilla: None }));
    rows
}

/// The result of `vanilla` with which a result is compared.
fn vanilla<'a>(report: &'a Report, result: &MethodResult) -> Option<&'a MethodResult> {
    let is_alike = |other: &MethodResult| other.load == result.load && other.conditions() == result.conditions();
    report.results.iter().find(|other| other.method == "vanilla" && is_alike(other))
}

fn below_vanilla(report: &Report, result: &MethodResult) -> Option<f64> {
    if result.method == "vanilla" {
        return None;
    }
    let (vanilla, own) = (vanilla(report, result)?.latency_us?.p99, result.latency_us?.p99);
    (own > 0.0).then(|| vanilla / own)
}

/// p99 of the paper's `vanilla`, divided by that of one of its rows.
fn paper_below(report: &Report, row: &PaperRow) -> Option<f64> {
    let vanilla = report.paper.iter().find(|other| other.method == "vanilla")?;
    (row.method != "vanilla" && row.p99_us > 0.0).then(|| vanilla.p99_us / row.p99_us)
}

/// A figure of a result in the format of tables; `None` if it was not measured, or if there are too few samples for it.
fn printed(figure: Figure, result: &MethodResult) -> Option<String> {
    let (value, unit) = figure.of(result).filter(|_| result.count >= figure.least_count())?;
    Some(unit.print(value))
}

/// The goals that a verdict counts, and whether they are binding. Goals for information count only if none is binding.
fn counted_goals(report: &Report) -> (Vec<&Goal>, bool) {
    let binding = report.goals.iter().any(|goal| goal.binding);
    (report.goals.iter().filter(|goal| goal.binding == binding).collect(), binding)
}

fn experiment(report: &Report) -> Option<&'static dyn Experiment> {
    experiments::find(&report.experiment)
}

/// The meaning of the times.
fn timed(report: &Report) -> &'static str {
    experiment(report).map_or("response time", |experiment| experiment.timed())
}

/// Everything that speaks against a method, as sentences: missed goals, figures worse than `vanilla`'s, losses.
pub fn unfavourable(report: &Report) -> Vec<String> {
    let missed = report.goals.iter().filter(|goal| goal.binding && goal.met == Some(false));
    let mut sentences: Vec<String> = missed
        .map(|goal| {
            let actual = goal.actual.map_or_else(|| "nothing".to_string(), number::significant);
            format!("Goal not met: {}; reached {actual} ({}).", goal.text, goal.figures)
        })
        .collect();
    let has_response_times = experiment(report).is_none_or(|experiment| experiment.has_response_times());
    let names = Names::of(report);
    for (place, result) in report.results.iter().enumerate() {
        let name = names.description(place);
        if result.lost > 0 {
            let (lost, requests) = (number::count(result.lost), number::count(result.wire.requests));
            sentences.push(format!("{name}: {lost} of {requests} requests were never answered."));
        }
        if let Some(late) = result.number(LATE).filter(|late| *late > 0.0) {
            let (late, over) =
                (Unit::Count.print(late), result.metric(LATE_OVER).map(Metric::print).unwrap_or_default());
            sentences.push(format!(
                "{name}: {late} of {} were answered late (over {over} µs).",
                number::count(result.count)
            ));
        }
        if let Some(missed) = result.number(MISSED).filter(|missed| *missed > 0.0) {
            let jobs = result.metric(JOBS).map(Metric::print).unwrap_or_default();
            sentences.push(format!("{name}: {} of {jobs} deadlines were missed.", Unit::Count.print(missed)));
        }
        if result.latency_us.is_none() && (has_response_times || result.metrics.is_empty()) {
            sentences.push(format!("{name}: no request could be counted."));
        }
        if let Some(vanilla) = vanilla(report, result).filter(|vanilla| vanilla.method != result.method) {
            let worse = worse_than(result, vanilla);
            if !worse.is_empty() {
                sentences.push(format!("{name}, compared to vanilla: {}.", worse.join(", ")));
            }
        }
    }
    sentences
}

/// The ratio from which a figure is worse beyond noise: 5 %.
const NOISE: f64 = 1.05;

fn worse_than(result: &MethodResult, vanilla: &MethodResult) -> Vec<String> {
    let mut worse = Vec::new();
    if let (Some(own), Some(other)) = (result.latency_us, vanilla.latency_us) {
        for (name, own, other) in
            [("mean", own.mean, other.mean), ("p99", own.p99, other.p99), ("max", own.max, other.max)]
        {
            if own > other * NOISE {
                worse.push(format!("{name} {} µs against {} µs", number::us(own), number::us(other)));
            }
        }
    }
    if let (Some(own), Some(other)) = (result.bulk_gbps, vanilla.bulk_gbps) {
        if own * NOISE < other {
            let (own, other) = (number::significant(own), number::significant(other));
            worse.push(format!("bulk throughput {own} Gbit/s against {other} Gbit/s"));
        }
    }
    if let (Some(own), Some(other)) = (result.cpu_share, vanilla.cpu_share) {
        if own > other * NOISE {
            worse.push(format!("CPU use {} against {}", number::percent(own), number::percent(other)));
        }
    }
    worse
}
