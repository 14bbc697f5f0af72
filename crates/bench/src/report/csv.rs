//! One line a result, then one a row of the paper that has no result; RFC 4180, a point as the decimal mark.

use super::rows;
use crate::schema::{Clock, Distribution, MethodResult, PaperRow, Report};
use crate::segments::SEGMENTS;

/// The columns, in order. Units are in the names; an empty cell was not measured.
const COLUMNS: [&str; 63] = [
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
    "batched",
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
    "host_receive_mean_us",
    "host_receive_p50_us",
    "host_receive_p99_us",
    "host_receive_max_us",
    "guest_mean_us",
    "guest_p50_us",
    "guest_p99_us",
    "guest_max_us",
    "host_send_mean_us",
    "host_send_p50_us",
    "host_send_p99_us",
    "host_send_max_us",
    "doctor_state",
    "doctor_found",
    "connections_per_s",
    "frame_bytes",
    "zero_loss_frames_per_s",
    "lossy_frames_per_s",
    "polled_s",
    "saved_s",
    "late",
    "needed_cpus",
    "slack_cpus",
    "reserved_cpus",
    "deadlines_missed",
    "host_device_us",
    "host_daemon_us",
    "host_pacers_us",
    "p99_times_below_vanilla",
    "paper_mean_us",
    "paper_p99_us",
    "paper_sd_us",
    "paper_bulk_gbps",
];

/// The report as CSV.
pub fn csv(report: &Report) -> String {
    let mut writer = ::csv::Writer::from_writer(Vec::new());
    let mut lines = vec![COLUMNS.map(str::to_string).to_vec()];
    for row in rows(report) {
        let mut line = vec![report.experiment.clone()];
        match row.result {
            Some(result) => line.extend(ours(result, report.seed)),
            None => {
                line.push(row.paper.map_or_else(String::new, |paper| paper.method.clone()));
                line.resize(COLUMNS.len() - 5, String::new());
            }
        }
        line.push(cell(row.below_vanilla));
        line.extend(paper(row.paper));
        lines.push(line);
    }
    for line in lines {
        // Writing to memory fails only for lines of unequal length, which the test below rules out.
        if writer.write_record(&line).is_err() {
            break;
        }
    }
    writer.into_inner().ok().and_then(|bytes| String::from_utf8(bytes).ok()).unwrap_or_default()
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
    let counts =
        [seed, wire.requests, result.count, result.lost, wire.open_at_end, wire.batched, wire.duplicates, wire.warmup];
    cells.extend(counts.map(|count| count.to_string()));
    cells.push(result.duration_s.to_string());
    cells.extend(latency(result.latency_us.as_ref()));
    cells.extend([cell(result.bulk_gbps), cell(result.cpu_share)]);
    for name in SEGMENTS {
        let of = result.segments.iter().find(|of| of.segment == name);
        let figures = [of.map(|of| of.mean_us), of.map(|of| of.p50_us), of.map(|of| of.p99_us), of.map(|of| of.max_us)];
        cells.extend(figures.map(cell));
    }
    let doctor = result.doctor.as_ref();
    cells.extend(
        [doctor.map(|row| row.state.clone()), doctor.map(|row| row.found.clone())].map(Option::unwrap_or_default),
    );
    cells.push(cell(result.connections.map(|of| of.per_s)));
    cells.push(result.frame_bytes.map_or_else(String::new, |bytes| bytes.to_string()));
    let rate = result.zero_loss.as_ref();
    cells.extend([cell(rate.map(|of| of.frames_per_s)), cell(rate.and_then(|of| of.lossy_frames_per_s))]);
    cells.extend([cell(result.polling.map(|of| of.polled_s)), cell(result.polling.map(|of| of.saved_s))]);
    cells.push(result.late.map_or_else(String::new, |late| late.frames.to_string()));
    let rtas = result.rtas.as_ref();
    cells.extend([cell(rtas.map(|of| of.needed_cpus)), cell(rtas.map(|of| of.slack_cpus))]);
    cells.push(cell(rtas.and_then(|of| of.reserved_cpus)));
    cells.push(rtas.map_or_else(String::new, |of| of.missed.to_string()));
    let host = result.host_time;
    let figures = [host.map(|of| of.device_us), host.map(|of| of.daemon_us), host.map(|of| of.pacers_us)];
    cells.extend(figures.map(cell));
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
