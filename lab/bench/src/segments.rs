//! `segments`: Access'18, IV-D (Figure 11). The parts of a request's response time, from `ontime trace` in the host,
//! while the response times are measured outside.
//!
//! In: a host, and a case's name. Out: metrics of the segments of that case's requests, and of priority inversions if
//! these are traced. The load is `rt-server`'s. Without inversions the trace runs with `--segments-only`, which needs
//! few probes per request. The cost of a probe is in the result's notes, and is included in the response times.

use std::collections::BTreeMap;

use ontime_figures::number;
use serde::Deserialize;

use crate::error::MeasureError;
use crate::goals::Figure;
use crate::host::Host;
use crate::schema::{MethodResult, Metric, Unit};

/// The segments, in the order of the way.
pub(crate) const SEGMENTS: [&str; 3] = ["host receive", "guest", "host send"];
/// Size of the kernel's ring, KiB. Under vanilla's flood, an emulated host writes that much while the reader does not
/// run for seconds.
const RING_KIB: u32 = 65_536;

/// What a trace records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TraceDetail {
    /// The segments of the time.
    Segments,
    /// The segments, and the requests that met a priority inversion, which needs more probes.
    Inversions,
}

/// The fields of `ontime trace --json` (docs/reference/trace.md) that are used.
#[derive(Debug, Deserialize)]
struct Document {
    duration_s: f64,
    paths: Vec<PathReport>,
    inversions_looked_for: bool,
    hindered: u64,
    inversions: Vec<Inversion>,
    inversions_unnamed: u64,
    tracing: Tracing,
}

#[derive(Debug, Deserialize)]
struct Inversion {
    kind: String,
    segment: String,
    waiter: Option<String>,
    behind: String,
    place: String,
    requests: u64,
    max_us: f64,
    rule: Option<String>,
}

#[derive(Debug, Deserialize)]
struct PathReport {
    total: Option<Figures>,
    segments: BTreeMap<String, Figures>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
struct Figures {
    count: u64,
    min: f64,
    mean: f64,
    p50: f64,
    p95: f64,
    p99: f64,
    p99_9: f64,
    max: f64,
}

#[derive(Debug, Deserialize)]
struct Tracing {
    lost: BTreeMap<String, u64>,
    four_probes_us: Option<f64>,
}

/// A trace of the VM `rt` in the host.
#[derive(Debug)]
pub(crate) struct Trace<'a> {
    name: &'a str,
}

impl<'a> Trace<'a> {
    /// Starts the trace. Its report will be `/lab/trace-NAME.json`.
    pub(crate) fn start(host: &mut Host, name: &'a str, depth: TraceDetail) -> Result<Self, MeasureError> {
        let depth = if depth == TraceDetail::Segments { "--segments-only" } else { "" };
        host.shell(&format!(
            "{{ ontime trace --vm rt {depth} --quiet --ring {RING_KIB} --json /lab/trace-{name}.json \
             > /lab/trace-{name}.log 2>&1 < /dev/null & echo $! > /run/trace.pid; }}; \
             for try in $(seq 200); do ls /sys/kernel/tracing/instances | grep -q ontime-trace && exit 0; sleep 0.1; \
             done; cat /lab/trace-{name}.log; exit 1"
        ))?;
        Ok(Self { name })
    }

    /// Ends the trace and reads its report.
    pub(crate) fn finish(self, host: &mut Host) -> Result<Found, MeasureError> {
        let name = self.name;
        host.shell(&format!(
            "pid=$(cat /run/trace.pid); kill -INT $pid; \
             for try in $(seq 600); do kill -0 $pid 2> /dev/null || break; sleep 0.1; done; \
             [ -s /lab/trace-{name}.json ] || {{ cat /lab/trace-{name}.log; exit 1; }}"
        ))?;
        let path = host.dir.join(format!("files/trace-{name}.json"));
        let text =
            std::fs::read_to_string(&path).map_err(|source| MeasureError::File { path: path.clone(), source })?;
        let read = serde_json::from_str(&text);
        read.map(Found).map_err(|error| MeasureError::Trace { path, what: error.to_string() })
    }
}

/// The report of a trace.
#[derive(Debug)]
pub(crate) struct Found(Document);

impl Found {
    /// Adds the report to the result of the traced case.
    pub(crate) fn add_to(self, result: &mut MethodResult) {
        add(self.0, result);
    }
}

fn add(document: Document, result: &mut MethodResult) {
    let requests = document.paths.first().and_then(|path| path.total).map_or(0, |total| total.count);
    if document.inversions_looked_for {
        result.metrics.extend([
            Metric::count("traced", requests),
            Metric::number("traced-for", Unit::S, document.duration_s),
            Metric::count("not-named", document.inversions_unnamed),
        ]);
        // Without a request there is nothing to evaluate.
        result.metrics.extend((requests > 0).then(|| Metric::count("hindered", document.hindered)));
    }
    let path = document.paths.into_iter().next();
    let found = path.map(|path| {
        let named = SEGMENTS.into_iter().filter_map(|name| Some((name, *path.segments.get(name)?)));
        named.chain(path.total.map(|total| ("in all", total))).collect::<Vec<_>>()
    });
    let found = found.unwrap_or_default();
    result.metrics.extend(found.iter().flat_map(|(segment, of)| of.metrics(segment)));
    result.metrics.extend(document.inversions.iter().flat_map(Inversion::metrics));
    let lost: u64 = document.tracing.lost.values().sum();
    if lost > 0 {
        result.notes.push(format!(
            "the trace lost at least {} events (its ring was full before it was read): its segments are of the other \
             requests",
            number::count(lost)
        ));
    }
    if let Some(cost) = document.tracing.four_probes_us {
        result.notes.push(format!(
            "the trace's own probes are in the times: four of them cost {} us here (the paper's under 0.5)",
            number::us(cost)
        ));
    }
    if found.is_empty() {
        result.notes.push("the trace put no request together".to_owned());
    }
}

impl Figures {
    fn metrics(&self, segment: &str) -> Vec<Metric> {
        let Self { min, mean, p50, p95, p99, p99_9, max, .. } = *self;
        let times =
            [("min", min), ("mean", mean), ("p50", p50), ("p95", p95), ("p99", p99), ("p99.9", p99_9), ("max", max)];
        let is_told = |(key, _): &(&str, f64)| *key != "p99.9" || self.count >= Figure::P99_9.least_count();
        let times = times.into_iter().filter(is_told).map(|(key, us)| Metric::number(key, Unit::Us, us));
        [Metric::count("requests", self.count)].into_iter().chain(times).map(|metric| metric.of(segment)).collect()
    }
}

impl Inversion {
    /// The inversion in words.
    fn description(&self) -> String {
        let who = self.waiter.as_deref().unwrap_or("the packet");
        let cure = self.rule.as_deref().unwrap_or("no rule");
        let segment = self.segment.replace('-', " ");
        format!("{who} {} behind {} {}, {segment} [{cure}]", self.kind, self.behind, self.place)
    }

    fn metrics(&self) -> [Metric; 2] {
        let part = self.description();
        [Metric::count("requests", self.requests), Metric::number("max", Unit::Us, self.max_us)].map(|of| of.of(&part))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::{Clock, Load, Run};

    #[test]
    fn a_trace_report_becomes_segments_in_the_papers_order() {
        let figures = r#"{"count":3,"min":1,"mean":2,"p50":2,"p95":3,"p99":3,"p99_9":3,"max":3,"more":0}"#;
        let json = format!(
            r#"{{"schema_version":1,"duration_s":2.5,"inversions_looked_for":true,"hindered":2,"inversions_unnamed":0,
               "inversions":[
               {{"tenant":"rt","kind":"waited","segment":"host-receive","waiter":null,"behind":"vhost-7 (other)",
               "place":"in a softirq",
               "requests":2,"total_us":80,"max_us":50,"example":"","rule":"vnic-place","cure":""}}],
               "paths":[{{"tenant":"rt","total":{figures},"segments":{{"guest":{figures},"host send":{figures},
               "host receive":{figures}}}}}],"tracing":{{"lost":{{"0":2}},"four_probes_us":12.8}}}}"#
        );
        let mut result =
            MethodResult::new(&Run { load: Load::Tcp, ..Run::of("partitioned", "P", "7.2", Clock::Virtual) });
        add(serde_json::from_str(&json).unwrap(), &mut result);
        let mut parts: Vec<&str> = result.metrics.iter().filter_map(|metric| metric.part.as_deref()).collect();
        parts.dedup();
        let inversion = "the packet waited behind vhost-7 (other) in a softirq, host receive [vnic-place]";
        assert_eq!(parts, ["host receive", "guest", "host send", "in all", inversion]);
        let of = |key| result.metrics.iter().find(|metric| metric.part.is_some() && metric.key == key).unwrap().print();
        assert_eq!((of("requests"), of("max")), ("3".to_owned(), "3.0".to_owned()));
        assert!(result.metrics.iter().all(|metric| metric.key != "p99.9"), "3 requests have no p99.9");
        assert!(result.notes[0].contains("lost at least 2") && result.notes[1].contains("12.8"), "{:?}", result.notes);
        let judged = |result: &MethodResult| {
            let specs = crate::experiments::goals_of("segments");
            crate::goals::evaluate(&specs, std::slice::from_ref(result), Clock::Virtual, "7.2").remove(1)
        };
        assert_eq!((judged(&result).actual, judged(&result).met), (Some(2.0), Some(false)));
        let mut nothing = result.clone();
        nothing.metrics.clear();
        add(
            serde_json::from_str(&json.replace(&format!(r#""total":{figures}"#), r#""total":null"#)).unwrap(),
            &mut nothing,
        );
        assert_eq!(judged(&nothing).met, None, "no request, no verdict");
    }
}
