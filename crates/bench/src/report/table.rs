//! The paper's table with ours beside it, and the goals, for a terminal.

use std::fmt::Write as _;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, ContentArrangement, Table};
use ontime_figures::number;

use super::{Row, condition, rows, timed, unfavourable};
use crate::schema::{Bound, Distribution, Report};

const DASH: &str = "-";
/// Column heads; the first line names the group.
const HEADS: [&str; 16] = [
    "method",
    "paper\nmean",
    "paper\np99",
    "paper\nsd",
    "paper\nGbit/s",
    "count",
    "lost",
    "mean",
    "p50",
    "p99",
    "p99.9",
    "max",
    "sd",
    "bulk\nGbit/s",
    "CPU",
    "p99 vs\nvanilla",
];

/// The comparison, what the clocks mean, the goals, and what is unfavourable.
pub fn terminal(report: &Report) -> String {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Disabled).set_header(HEADS);
    for row in rows(report) {
        table.add_row(cells(&row).into_iter().enumerate().map(|(place, text)| {
            let alignment = if place == 0 { CellAlignment::Left } else { CellAlignment::Right };
            Cell::new(text).set_alignment(alignment)
        }));
    }
    let mut text = own(report);
    let _ = writeln!(text, "{}: {}, µs\n{table}", report.experiment, timed(report));
    let mut clocks: Vec<_> = report.results.iter().map(|result| result.clock).collect();
    clocks.sort_unstable();
    clocks.dedup();
    for clock in clocks {
        let _ = writeln!(text, "{} clock: {}", clock.name(), clock.meaning());
    }
    if let Some(paper) = report.paper.first() {
        let _ = writeln!(text, "paper: {}: {}", paper.source, paper.conditions);
    }
    for note in &report.notes {
        let _ = writeln!(text, "{note}");
    }
    for result in &report.results {
        for note in &result.notes {
            let _ = writeln!(text, "{} ({}): {note}", result.method, result.load.words());
        }
    }
    text.push_str(&goals(report));
    let against = unfavourable(report);
    if !against.is_empty() {
        let _ = writeln!(text, "Unfavourable:");
        for sentence in against {
            let _ = writeln!(text, "  - {sentence}");
        }
    }
    let _ = writeln!(text, "Again: {}", report.command);
    text
}

/// Rows of a result's parts that are shown; the page and the JSON have all.
const PARTS: usize = 8;

/// What an experiment shows that the general table has no column for.
fn own(report: &Report) -> String {
    let loads = report.results.windows(2).any(|pair| matches!(pair, [one, other] if one.load != other.load));
    let mut text = String::new();
    for own in super::own(report, false) {
        let mut table = Table::new();
        table.load_preset(UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Disabled);
        table.set_header(["case".to_owned()].iter().chain(&own.heads));
        for rows in own.rows.chunk_by(|(one, _), (other, _)| std::ptr::eq(*one, *other)) {
            for (result, cells) in rows.iter().take(PARTS) {
                let load = if loads { format!(", {}", result.load.words()) } else { String::new() };
                let cells = cells.iter().map(|cell| if cell.is_empty() { DASH.to_owned() } else { cell.clone() });
                let words = [true].iter().chain(&own.words);
                table.add_row([format!("{}{load}", result.method)].into_iter().chain(cells).zip(words).map(
                    |(text, words)| {
                        let side = if *words { CellAlignment::Left } else { CellAlignment::Right };
                        Cell::new(text).set_alignment(side)
                    },
                ));
            }
            if let (Some((result, _)), more @ 1..) = (rows.first(), rows.len().saturating_sub(PARTS)) {
                table.add_row([result.method.clone(), format!("{more} more (in the JSON report)")]);
            }
        }
        let _ = writeln!(text, "{table}");
    }
    text
}

/// The goals, a line each: met, NOT MET or not measured.
pub fn goals(report: &Report) -> String {
    let mut text = String::new();
    for goal in &report.goals {
        let verdict = match (goal.met, goal.binding) {
            (Some(true), _) => "met",
            (Some(false), true) => "NOT MET",
            (Some(false), false) => "not met",
            (None, _) => "not measured",
        };
        let bound = if goal.bound == Bound::AtLeast { ">=" } else { "<=" };
        let actual = goal.actual.map_or_else(|| DASH.to_string(), number::significant);
        let target = number::significant(goal.target);
        let information = if goal.binding { "" } else { ", for information" };
        let _ = writeln!(
            text,
            "[{verdict:^12}] {} (Linux {}{information}): {actual} {bound} {target}; {}",
            goal.text, goal.kernel_series, goal.figures
        );
    }
    text
}

fn cells(row: &Row<'_>) -> Vec<String> {
    let (result, paper) = (row.result, row.paper);
    let method = match (result, paper) {
        (Some(result), _) => format!("{}\n  {}", result.label, condition(result).replacen(", ", "\n  ", 1)),
        (None, Some(paper)) => format!("{}\n  the paper only", paper.method),
        (None, None) => String::new(),
    };
    let mut cells = vec![
        method,
        cell(paper.map(|paper| paper.mean_us), number::us),
        cell(paper.map(|paper| paper.p99_us), number::us),
        cell(paper.map(|paper| paper.sd_us), number::us),
        cell(paper.map(|paper| paper.bulk_gbps), number::significant),
        cell(result.map(|result| result.count), number::count),
        cell(result.map(|result| result.lost), number::count),
    ];
    let latency = result.and_then(|result| result.latency_us);
    let figures: [fn(&Distribution) -> f64; 6] = [|d| d.mean, |d| d.p50, |d| d.p99, |d| d.p99_9, |d| d.max, |d| d.sd];
    cells.extend(figures.map(|figure| cell(latency.as_ref().map(figure), number::us)));
    cells.push(cell(result.and_then(|result| result.bulk_gbps), number::significant));
    cells.push(cell(result.and_then(|result| result.cpu_share), number::percent));
    cells.push(cell(row.below_vanilla, number::times));
    cells
}

fn cell<T>(value: Option<T>, print: impl Fn(T) -> String) -> String {
    value.map_or_else(|| DASH.to_string(), print)
}
