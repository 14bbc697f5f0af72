//! One measured stretch of requests to several RT servers at the same time, each from a client of its own on the
//! clients' CPU ([`crate::client_side`]).
//!
//! In: [`Several`] and the host, whose VMs run. Out: a [`MethodResult`] of all requests, with the response times of
//! each server as metrics.

use std::fs;
use std::net::SocketAddr;

use ontime_figures::stats::Summary;

use crate::bulk::{self, BulkFlows};
use crate::client::ClientConfig;
use crate::client_side::Order;
use crate::datagrams;
use crate::error::MeasureError;
use crate::host::Host;
use crate::progress::progress;
use crate::schema::{Load, MethodResult, Metric, Run, Unit};
use crate::trial;
use crate::wire::{self, RtFlow, WireAnalysis};

/// Key: the highest p99 of a server.
pub(crate) const WORST_P99: &str = "worst-p99";
/// Key: the highest standard deviation of a server.
pub(crate) const WORST_SD: &str = "worst-sd";

/// What to measure.
#[derive(Debug)]
pub(crate) struct Several<'a> {
    /// The case's name in results.
    pub(crate) case: &'a str,
    /// The case in words.
    pub(crate) label: &'a str,
    /// Names and sockets of the servers (`sockperf server`).
    pub(crate) servers: &'a [(String, SocketAddr)],
    /// Traffic of the bulk VMs.
    pub(crate) load: Load,
    /// Names and addresses of the bulk VMs.
    pub(crate) bulk: &'a [(String, String)],
    /// Number of counted requests to each server.
    pub(crate) requests: u64,
    /// Number of requests to each server before these.
    pub(crate) warmup: u64,
    /// Seed of the gaps between requests.
    pub(crate) seed: u64,
}

impl Several<'_> {
    /// Runs the measurement. The cuts of the captures are put into the host's directory; only that of the RT NIC is
    /// kept.
    pub(crate) fn run(&self, host: &mut Host) -> Result<MethodResult, MeasureError> {
        let Some((_, first)) = self.servers.first() else {
            return Err(MeasureError::Program { program: self.case.to_owned(), said: "it has no server".to_owned() });
        };
        let captures = [host.capture("rt"), host.capture("bulk")];
        let flood = trial::flood(self.load, self.bulk, host)?;
        let order = Order::ToSeveral {
            config: ClientConfig::new(*first, self.requests + self.warmup, self.seed),
            servers: self.servers.iter().map(|(_, server)| *server).collect(),
        };
        let name = format!("{}, {}", self.case, self.load.words());
        let stretch = trial::stretch(host, captures.clone(), flood, |host| {
            order.run(host.lab()?, &mut |line| progress(format_args!("{name}: {line}")))
        })?;
        let [rt, bulk] =
            ["rt", "bulk"].map(|nic| host.dir.join(format!("{}-{}-{nic}.pcap", self.case, self.load.name())));
        for ((capture, from), cut) in captures.iter().zip(stretch.from).zip([&rt, &bulk]) {
            host.cut(capture, from, cut)?;
        }
        let by_server = self.servers.iter().map(|(name, server)| {
            let flow = RtFlow { warmup: self.warmup, address: Some(server.ip()), ..RtFlow::new(server.port()) };
            wire::analyse(&rt, flow).map(|analysis| (name.as_str(), analysis))
        });
        let by_server = by_server.collect::<Result<Vec<_>, _>>()?;
        let metrics = metrics(&by_server);
        let wire = together(by_server.into_iter().map(|(_, analysis)| analysis));
        let flows = BulkFlows { ports: vec![datagrams::PORT], window: wire.span_ns };
        let received = if self.load == Load::Tcp { Some(bulk::analyse(&bulk, flows)?) } else { None };
        // The capture of a flood is large, and its sums are in the result.
        let _ = fs::remove_file(&bulk);
        let mut result = MethodResult::new(&Run {
            load: self.load,
            wire: &wire,
            bulk: received.as_ref(),
            cpu_share: stretch.cpu_share,
            ..host.run(self.case, self.label)
        });
        result.metrics.extend(metrics);
        result.notes.extend(host.notes(stretch.missed));
        Ok(result)
    }
}

/// The response times of each server, and the worst of all. A server that answered nothing has none, and then there is
/// no worst either.
fn metrics(by_server: &[(&str, WireAnalysis)]) -> Vec<Metric> {
    let us = |key: &str, ns: f64| Metric::number(key, Unit::Us, ns / 1e3);
    let of = |(name, analysis): &(&str, WireAnalysis)| {
        let times = Summary::of(&analysis.latencies_ns())?;
        Some(((*name).to_owned(), times))
    };
    let times: Vec<(String, Summary)> = by_server.iter().filter_map(of).collect();
    let mut all = Vec::new();
    if times.len() == by_server.len() {
        let worst = |of: fn(&Summary) -> f64| times.iter().map(|(_, times)| of(times)).fold(0.0, f64::max);
        all.push(us(WORST_P99, worst(|times| times.p99 as f64)));
        all.push(us(WORST_SD, worst(|times| times.sd)));
    }
    for (name, Summary { p50, p99, sd, max, .. }) in &times {
        for (key, ns) in [("p50", *p50 as f64), ("p99", *p99 as f64), ("sd", *sd), ("max", *max as f64)] {
            all.push(us(key, ns).of(name));
        }
    }
    all
}

/// The requests to all servers by time, and the sums of the counters.
fn together(all: impl Iterator<Item = WireAnalysis>) -> WireAnalysis {
    let mut sum = WireAnalysis::default();
    for one in all {
        sum.exchanges.extend(one.exchanges);
        sum.intervals_ns.extend(one.intervals_ns);
        sum.counts += one.counts;
        sum.resolution_ns = sum.resolution_ns.max(one.resolution_ns);
        sum.damage = sum.damage.or(one.damage);
        if let Some((from, to)) = one.span_ns {
            let (first, last) = sum.span_ns.unwrap_or((from, to));
            sum.span_ns = Some((first.min(from), last.max(to)));
        }
    }
    sum.exchanges.sort_by_key(|exchange| exchange.at_ns);
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Exchange;

    fn analysis(from_ns: u64, times_us: &[u64]) -> WireAnalysis {
        let exchange = |(at, us): (u64, &u64)| Exchange { at_ns: at, latency_ns: us * 1_000, sequence: at };
        let exchanges: Vec<Exchange> = (from_ns..).step_by(10).zip(times_us).map(exchange).collect();
        let span_ns = exchanges.first().zip(exchanges.last()).map(|(first, last)| (first.at_ns, last.at_ns));
        let mut made = WireAnalysis { exchanges, span_ns, ..WireAnalysis::default() };
        made.counts.counted = times_us.len() as u64;
        made
    }

    fn number(metrics: &[Metric], part: Option<&str>, key: &str) -> Option<String> {
        metrics.iter().find(|metric| metric.part.as_deref() == part && metric.key == key).map(Metric::print)
    }

    #[test]
    fn each_server_has_its_times_and_the_worst_is_that_of_the_worst() {
        let by_server = [("rt1", analysis(5, &[50, 52, 54])), ("rt2", analysis(0, &[40, 90]))];
        let metrics = metrics(&by_server);
        assert_eq!(number(&metrics, Some("rt1"), "p50").as_deref(), Some("52.0"));
        assert_eq!(number(&metrics, Some("rt1"), "sd").as_deref(), Some("2.0"));
        assert_eq!(number(&metrics, Some("rt2"), "max").as_deref(), Some("90.0"));
        assert_eq!(number(&metrics, None, WORST_P99).as_deref(), Some("90.0"));
        assert_eq!(number(&metrics, None, WORST_SD).as_deref(), Some("35.4"));
        let all = together(by_server.into_iter().map(|(_, analysis)| analysis));
        assert_eq!(all.latencies_ns(), [40_000, 50_000, 90_000, 52_000, 54_000]);
        assert_eq!((all.counts.counted, all.span_ns), (5, Some((0, 25))));
    }

    #[test]
    fn a_silent_server_leaves_no_worst() {
        let metrics = metrics(&[("rt1", analysis(0, &[50])), ("rt2", analysis(0, &[]))]);
        assert_eq!(number(&metrics, None, WORST_P99), None);
        assert_eq!(number(&metrics, Some("rt1"), "p99").as_deref(), Some("50.0"));
        assert_eq!(number(&metrics, Some("rt2"), "p99"), None);
    }
}
