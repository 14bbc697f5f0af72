//! One line per result, then one per row of the paper without a result. RFC 4180, with a point as the decimal mark.

use super::rows;
use crate::schema::{Clock, Distribution, MethodResult, Metric, PaperRow, Report, Value};

/// The first columns. Units are in the names; an empty cell was not measured.
const FIRST: [&str; 29] = [
    "experiment",
    "method",
    "label",
    "kernel",
    "clock",
    "cpus",
    "load",
    "seed",
    "requests",
    "count",
    "lost",
    "open_at_end",
    "duplicates",
    "warmup",
    "duration_s",
    "min_us",
    "mean_us",
    "sd_us",
    "p50_us",
    "p90_us",
    "p95_us",
    "p99_us",
    "p99_low_us",
    "p99_high_us",
    "p99_9_us",
    "p99_99_us",
    "max_us",
    "bulk_gbps",
    "cpu_share",
];

/// The last columns.
const LAST: [&str; 5] = ["p99_times_below_vanilla", "paper_mean_us", "paper_p99_us", "paper_sd_us", "paper_bulk_gbps"];

/// The report as CSV. Between the first and the last columns there is one column per metric, in the order of
/// appearance.
pub fn csv(report: &Report) -> String {
    let mut metrics: Vec<String> = Vec::new();
    for name in report.results.iter().flat_map(|result| &result.metrics).map(name) {
        if !metrics.contains(&name) {
            metrics.push(name);
        }
    }
    let mut writer = ::csv::Writer::from_writer(Vec::new());
    let names = FIRST.iter().copied().chain(metrics.iter().map(String::as_str)).chain(LAST);
    let mut lines = vec![names.map(str::to_owned).collect::<Vec<_>>()];
    for row in rows(report) {
        let mut line = vec![report.experiment.clone()];
        match row.result {
            Some(result) => {
                line.extend(ours(result, report.seed));
                line.extend(metrics.iter().map(|wanted| {
                    let metric = result.metrics.iter().find(|metric| name(metric) == *wanted);
                    metric.map_or_else(String::new, |metric| match &metric.value {
                        Value::Number(value) => value.to_string(),
                        Value::Text(words) => words.clone(),
                    })
                }));
            }
            None => line.push(row.paper.map_or_else(String::new, |paper| paper.method.clone())),
        }
        line.resize(FIRST.len() + metrics.len(), String::new());
        line.push(cell(row.below_vanilla));
        line.extend(paper(row.paper));
        lines.push(line);
    }
    for line in lines {
        // Writing to memory fails only for lines of unequal length, which `resize` rules out.
        if writer.write_record(&line).is_err() {
            break;
        }
    }
    writer.into_inner().ok().and_then(|bytes| String::from_utf8(bytes).ok()).unwrap_or_default()
}

/// The column of a metric: part, key and unit.
fn name(metric: &Metric) -> String {
    let words = format!("{} {}", metric.part.as_deref().unwrap_or_default(), metric.key);
    let words: Vec<&str> = words.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()).collect();
    let (name, suffix) = (words.join("_"), metric.unit.suffix());
    if name.ends_with(suffix) { name } else { name + suffix }
}

fn ours(result: &MethodResult, seed: u64) -> Vec<String> {
    let wire = &result.wire;
    let mut cells = vec![
        result.method.clone(),
        result.label.clone(),
        result.kernel.clone(),
        Clock::name(result.clock).to_string(),
        result.cpus.to_string(),
        result.load.name().to_owned(),
    ];
    let counts = [seed, wire.requests, result.count, result.lost, wire.open_at_end, wire.duplicates, wire.warmup];
    cells.extend(counts.map(|count| count.to_string()));
    cells.push(result.duration_s.to_string());
    cells.extend(latency(result.latency_us.as_ref()));
    cells.extend([cell(result.bulk_gbps), cell(result.cpu_share)]);
    cells
}

fn latency(latency: Option<&Distribution>) -> [String; 12] {
    let figure = |pick: fn(&Distribution) -> f64| cell(latency.map(pick));
    [
        figure(|d| d.min),
        figure(|d| d.mean),
        figure(|d| d.sd),
        figure(|d| d.p50),
        figure(|d| d.p90),
        figure(|d| d.p95),
        figure(|d| d.p99),
        figure(|d| d.p99_low),
        cell(latency.and_then(|d| d.p99_high)),
        figure(|d| d.p99_9),
        figure(|d| d.p99_99),
        figure(|d| d.max),
    ]
}

fn paper(row: Option<&PaperRow>) -> [String; 4] {
    [
        cell(row.map(|row| row.mean_us)),
        cell(row.map(|row| row.p99_us)),
        cell(row.map(|row| row.sd_us)),
        cell(row.map(|row| row.bulk_gbps)),
    ]
}

fn cell(value: Option<f64>) -> String {
    value.map_or_else(String::new, |value| value.to_string())
}
