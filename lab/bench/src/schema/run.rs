//! Makes a [`MethodResult`] from captures.

use std::sync::LazyLock;

use ontime_figures::stats::{Summary, Tally};

use super::{Clock, Distribution, HistogramBin, LATE, LATE_OVER, Load, MethodResult, Metric, Unit};
use crate::bulk::BulkAnalysis;
use crate::histogram::LogLinear;
use crate::wire::WireAnalysis;

/// A measured method, the input of [`MethodResult::new`].
#[derive(Debug, Clone)]
pub struct Run<'a> {
    /// The method's name on the command line.
    pub method: &'a str,
    /// The method in words.
    pub label: &'a str,
    /// The host kernel's release.
    pub kernel: &'a str,
    /// The clock of the captures.
    pub clock: Clock,
    /// CPUs of the host.
    pub cpus: u32,
    /// Traffic of the bulk tenants.
    pub load: Load,
    /// The analysis of the RT NIC's capture.
    pub wire: &'a WireAnalysis,
    /// The analysis of the bulk NIC's capture.
    pub bulk: Option<&'a BulkAnalysis>,
    /// Busy share of the host's CPUs, 0 to 1.
    pub cpu_share: Option<f64>,
    /// Answers later than this are late, ns.
    pub late_ns: Option<u64>,
}

/// No packets.
static NO_PACKETS: LazyLock<WireAnalysis> = LazyLock::new(WireAnalysis::default);

impl<'a> Run<'a> {
    /// A run on one CPU without load, of which nothing is known yet.
    pub fn of(method: &'a str, label: &'a str, kernel: &'a str, clock: Clock) -> Self {
        let load = Load::None;
        Self {
            method,
            label,
            kernel,
            clock,
            cpus: 1,
            load,
            wire: &NO_PACKETS,
            bulk: None,
            cpu_share: None,
            late_ns: None,
        }
    }
}

impl MethodResult {
    /// Summarises a run. Irregularities of its captures become notes.
    pub fn new(run: &Run<'_>) -> Self {
        let wire = run.wire;
        let latencies = wire.latencies_ns();
        let summary = Summary::of(&latencies);
        let max_at_s = summary.as_ref().and_then(|summary| {
            let first = wire.exchanges.first()?.at_ns;
            let slowest = wire.exchanges.iter().find(|exchange| exchange.latency_ns == summary.max)?;
            Some((slowest.at_ns - first) as f64 / 1e9)
        });
        let bins = LogLinear::of(&latencies);
        Self {
            method: run.method.to_string(),
            label: run.label.to_string(),
            kernel: run.kernel.to_string(),
            clock: run.clock,
            cpus: run.cpus,
            load: run.load,
            count: wire.counts.counted,
            lost: wire.counts.lost,
            wire: wire.counts,
            duration_s: wire.span_ns.map_or(0.0, |(first, last)| (last - first) as f64 / 1e9),
            latency_us: summary.map(|summary| Distribution { max_at_s, ..Distribution::from(&summary) }),
            interval_us: Summary::of(&wire.intervals_ns).map(|summary| Distribution::from(&summary)),
            bulk_gbps: run.bulk.and_then(BulkAnalysis::gbps),
            bulk: run.bulk.map_or_else(Vec::new, |bulk| bulk.receivers.clone()),
            cpu_share: run.cpu_share.filter(|share| share.is_finite()),
            metrics: run.late_ns.map_or_else(Vec::new, |over| late(over, &latencies)),
            histogram: bins.bins().iter().map(HistogramBin::from).collect(),
            notes: capture_notes(run),
        }
    }
}

impl MethodResult {
    /// Replaces the response times by times measured elsewhere than on the wire, ns.
    pub fn timed(&mut self, samples_ns: &[u64]) {
        self.show(Summary::of(samples_ns), None, &LogLinear::of(samples_ns));
    }

    /// Replaces the response times by a run's counters, ns. `max_at_s` is the time of the slowest after the first.
    pub fn counted(&mut self, tally: &Tally, max_at_s: Option<f64>) {
        self.show(tally.summary(), max_at_s, &LogLinear::counted(tally.values()));
    }

    fn show(&mut self, summary: Option<Summary>, max_at_s: Option<f64>, bins: &LogLinear) {
        self.count = summary.as_ref().map_or(0, |summary| summary.count);
        self.latency_us = summary.map(|summary| Distribution { max_at_s, ..Distribution::from(&summary) });
        self.histogram = bins.bins().iter().map(HistogramBin::from).collect();
    }
}

/// Metrics of late answers.
fn late(over_ns: u64, latencies: &[u64]) -> Vec<Metric> {
    let late = latencies.iter().filter(|latency| **latency > over_ns).count() as u64;
    vec![
        Metric::number(LATE_OVER, Unit::Us, us(over_ns as f64)),
        Metric::count(LATE, late),
        Metric::number("late-share", Unit::Share, late as f64 / latencies.len().max(1) as f64),
    ]
}

fn capture_notes(run: &Run<'_>) -> Vec<String> {
    let counts = &run.wire.counts;
    let mut notes = Vec::new();
    if let Some(damage) = &run.wire.damage {
        notes.push(format!("RT NIC: {damage}; packets after that are not in the figures"));
    }
    if let Some(damage) = run.bulk.and_then(|bulk| bulk.damage.as_ref()) {
        notes.push(format!("bulk NIC: {damage}; packets after that are not in the figures"));
    }
    if counts.lost > 0 {
        notes.push(format!("{} requests were never answered; no response time stands for them", counts.lost));
    }
    notes
}

fn us(ns: f64) -> f64 {
    ns / 1e3
}

impl From<&crate::histogram::Bin> for HistogramBin {
    fn from(bin: &crate::histogram::Bin) -> Self {
        Self { low_us: us(bin.low_ns as f64), high_us: us(bin.high_ns as f64), count: bin.count }
    }
}

impl From<&Summary> for Distribution {
    fn from(summary: &Summary) -> Self {
        let whole = |ns: u64| us(ns as f64);
        Self {
            min: whole(summary.min),
            mean: us(summary.mean),
            sd: us(summary.sd),
            p50: whole(summary.p50),
            p90: whole(summary.p90),
            p95: whole(summary.p95),
            p99: whole(summary.p99),
            p99_low: whole(summary.p99_interval.low_ns),
            p99_high: summary.p99_interval.high_ns.map(whole),
            p99_9: whole(summary.p99_9),
            p99_99: whole(summary.p99_99),
            max: whole(summary.max),
            max_at_s: None,
            beyond_p99_9: summary.beyond_p99_9,
        }
    }
}
