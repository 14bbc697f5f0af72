//! `segments`: Access'18, IV-D (Figure 11). Where a request's time goes, by `ontime trace` in the host, while the wire
//! is measured outside.
//!
//! In: a host, a case's name. Out: [`SegmentTime`]s of the requests of that case, and [`Inversions`] where these are
//! looked for. The load is `rt-server`'s ([`crate::rt_server`]). Unless they are, the trace runs with
//! `--segments-only`, so that it costs few probes a request; what a probe cost is in the result's notes, and the wire's
//! figures contain it.

use std::collections::BTreeMap;

use ontime_figures::number;
use serde::Deserialize;

use crate::host::{Host, MeasureError};
use crate::schema::{InversionRow, Inversions, MethodResult, SegmentTime};

/// The segments, in the order of the way.
pub const SEGMENTS: [&str; 3] = ["host receive", "guest", "host send"];
/// The kernel's ring, KiB: what an emulated host under vanilla's flood writes in the seconds in which the reader does
/// not run.
const RING_KIB: u32 = 65_536;

/// Inversions of a case that the table shows, by the time that they took.
const SHOWN: usize = 8;

/// What a trace looks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// Where the time goes.
    Segments,
    /// That, and which requests met a priority inversion: more probes.
    Inversions,
}

/// The part of `ontime trace --json` (docs/trace.md) that is looked at.
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

/// A trace of the VM `rt` that runs in the host.
#[derive(Debug)]
pub struct Trace<'a> {
    name: &'a str,
}

impl<'a> Trace<'a> {
    /// Starts it; its report will be `/lab/trace-NAME.json`.
    ///
    /// # Errors
    /// It does not start: the message has its words.
    pub fn start(host: &mut Host, name: &'a str, depth: Depth) -> Result<Self, MeasureError> {
        let depth = if depth == Depth::Segments { "--segments-only" } else { "" };
        host.shell(&format!(
            "{{ ontime trace --vm rt {depth} --quiet --ring {RING_KIB} --json /lab/trace-{name}.json \
             > /lab/trace-{name}.log 2>&1 < /dev/null & echo $! > /run/trace.pid; }}; \
             for try in $(seq 200); do ls /sys/kernel/tracing/instances | grep -q ontime-trace && exit 0; sleep 0.1; \
             done; cat /lab/trace-{name}.log; exit 1"
        ))?;
        Ok(Self { name })
    }

    /// Ends it.
    ///
    /// # Errors
    /// It does not end, or wrote no report; the message has its words.
    pub fn finish(self, host: &mut Host) -> Result<Found, MeasureError> {
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

/// What a trace found.
#[derive(Debug)]
pub struct Found(Document);

impl Found {
    /// Adds it to the result of the case that was traced.
    pub fn add_to(self, result: &mut MethodResult) {
        add(self.0, result);
    }
}

fn add(document: Document, result: &mut MethodResult) {
    let time = |segment: &str, of: Figures| SegmentTime {
        segment: segment.to_owned(),
        count: of.count,
        min_us: of.min,
        mean_us: of.mean,
        p50_us: of.p50,
        p95_us: of.p95,
        p99_us: of.p99,
        p99_9_us: of.p99_9,
        max_us: of.max,
    };
    let requests = document.paths.first().and_then(|path| path.total).map_or(0, |total| total.count);
    result.inversions = document.inversions_looked_for.then(|| Inversions {
        requests,
        duration_s: document.duration_s,
        hindered: document.hindered,
        rows: document.inversions.into_iter().map(InversionRow::from).collect(),
        unnamed: document.inversions_unnamed,
    });
    if let Some(path) = document.paths.into_iter().next() {
        let found = SEGMENTS.into_iter().filter_map(|name| Some(time(name, *path.segments.get(name)?)));
        result.segments = found.chain(path.total.map(|total| time("in all", total))).collect();
    }
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
    if result.segments.is_empty() {
        result.notes.push("the trace put no request together".to_owned());
    }
}

impl From<Inversion> for InversionRow {
    fn from(of: Inversion) -> Self {
        Self {
            kind: of.kind,
            segment: of.segment.replace('-', " "),
            waiter: of.waiter,
            behind: of.behind,
            place: of.place,
            requests: of.requests,
            max_us: of.max_us,
            rule: of.rule,
        }
    }
}

/// Figure 11 as a table.
pub fn table(results: &[MethodResult]) -> String {
    let mut text = String::from(
        "method          load          segment        requests       p50      mean       p99       max  us, by the \
         host's trace\n",
    );
    for result in results {
        for of in &result.segments {
            let figures =
                [of.p50_us, of.mean_us, of.p99_us, of.max_us].map(|value| format!("{:>10}", number::us(value)));
            let (method, load) = (&result.method, result.load.name());
            text.push_str(&format!("{method:<15} {load:<13} {:<13} {:>9}{}\n", of.segment, of.count, figures.concat()));
        }
    }
    for (result, of) in results.iter().filter_map(|result| Some((result, result.inversions.as_ref()?))) {
        text.push_str(&format!(
            "{}, {}: {} of {} requests in {:.0} s met a priority inversion\n",
            result.method,
            result.load.words(),
            number::count(of.hindered),
            number::count(of.requests),
            of.duration_s
        ));
        for row in of.rows.iter().take(SHOWN) {
            text.push_str(&format!(
                "  {:>8} x, at most {} us: {}\n",
                number::count(row.requests),
                number::us(row.max_us),
                row.words()
            ));
        }
        let more = of.unnamed + of.rows.iter().skip(SHOWN).map(|row| row.requests).sum::<u64>();
        if more > 0 {
            text.push_str(&format!(
                "  {:>8} x others (the JSON report has those that have a name)\n",
                number::count(more)
            ));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::{Clock, Load, Run};
    use crate::wire::WireAnalysis;

    #[test]
    fn a_trace_report_becomes_segments_in_the_papers_order() {
        let figures = r#"{"count":3,"min":1,"mean":2,"p50":2,"p95":3,"p99":3,"p99_9":3,"max":3,"more":0}"#;
        let json = format!(
            r#"{{"schema_version":1,"duration_s":2.5,"inversions_looked_for":true,"hindered":2,"inversions_unnamed":0,"inversions":[
               {{"tenant":"rt","kind":"waited","segment":"host-receive","waiter":null,"behind":"vhost-7 (other)","place":"in a softirq",
               "requests":2,"total_us":80,"max_us":50,"example":"","rule":"vnic-place","cure":""}}],"paths":[{{"tenant":"rt","total":{figures},"segments":{{"guest":{figures},"host send":{figures},
               "host receive":{figures}}}}}],"tracing":{{"lost":{{"0":2}},"four_probes_us":12.8}}}}"#
        );
        let mut result = MethodResult::new(&Run {
            method: "partitioned",
            label: "P",
            kernel: "7.2",
            clock: Clock::Virtual,
            cpus: 1,
            load: Load::Tcp,
            wire: &WireAnalysis::default(),
            bulk: None,
            cpu_share: None,
            late_ns: None,
        });
        add(serde_json::from_str(&json).unwrap(), &mut result);
        let names: Vec<&str> = result.segments.iter().map(|of| of.segment.as_str()).collect();
        assert_eq!(names, ["host receive", "guest", "host send", "in all"]);
        assert_eq!((result.segments[0].count, result.segments[0].max_us), (3, 3.0));
        assert!(result.notes[0].contains("lost at least 2") && result.notes[1].contains("12.8"), "{:?}", result.notes);
        let judged = |result: &MethodResult| {
            let specs = crate::goals::of_experiment("segments");
            crate::goals::evaluate(specs, std::slice::from_ref(result), Clock::Virtual, "7.2").remove(1)
        };
        assert_eq!((judged(&result).actual, judged(&result).met), (Some(2.0), Some(false)));
        let mut nothing = result.clone();
        nothing.inversions.as_mut().unwrap().requests = 0;
        assert_eq!(judged(&nothing).met, None, "no request, no verdict");
        let table = table(&[result]);
        assert_eq!(table.lines().count(), 7, "{table}");
        assert!(
            table.contains("2 of 3 requests in 2 s") && table.contains("behind vhost-7 (other) in a softirq"),
            "{table}"
        );
    }
}
