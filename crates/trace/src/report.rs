//! The report as a document: written by `--json`, shown in the terminal and on the HTML page.
//!
//! Input: an [`Analyser`] and the trace's parameters ([`Run`]). Output: a [`Document`]. Times are microseconds unless a
//! name ends in `_ns` (CLOCK_MONOTONIC time stamps) or `_s`. Percentiles are nearest rank, as in every report of Ontime
//! (docs/results/bench.md).

use std::collections::{BTreeMap, VecDeque};

use ontime_figures::stats::Summary;
use ontime_hostnet::RuleId;
use serde::Serialize;

use crate::analyser::{Analyser, Detail, SAMPLES};
use crate::hints::Hints;
use crate::request::{Counts, Segment};

/// The document's version. It increases when a field is removed or changes its meaning.
pub const SCHEMA_VERSION: u32 = 1;

/// Parameters of a trace.
#[derive(Debug, Clone, Default)]
pub struct Run {
    /// `uname -r`.
    pub kernel: String,
    /// Start, seconds since 1970.
    pub started_unix_s: u64,
    /// Cost of a probe on this machine, ns. None: not measured.
    pub probe_ns: Option<f64>,
    /// Machine-wide delays.
    pub hints: Hints,
    /// Records read, and how many of them could not be decoded.
    pub records: (u64, u64),
    /// Missing parts.
    pub notes: Vec<String>,
    /// Duration of the request that ended the trace (`--break`), us.
    pub broke_at_us: Option<f64>,
}

/// A distribution, us.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Figures {
    /// Samples.
    pub count: u64,
    /// The smallest sample.
    pub min: f64,
    /// Arithmetic mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 95 %.
    pub p95: f64,
    /// 99 %.
    pub p99: f64,
    /// 99.9 %.
    pub p99_9: f64,
    /// The largest sample.
    pub max: f64,
}

impl Figures {
    /// Figures of samples in ns. None without samples.
    pub fn of<'a>(samples: impl IntoIterator<Item = &'a u64>) -> Option<Self> {
        let samples: Vec<u64> = samples.into_iter().copied().collect();
        let summary = Summary::of(&samples)?;
        let us = |ns: u64| ns as f64 / 1e3;
        Some(Self {
            count: summary.count,
            min: us(summary.min),
            mean: summary.mean / 1e3,
            p50: us(summary.p50),
            p95: us(summary.p95),
            p99: us(summary.p99),
            p99_9: us(summary.p99_9),
            max: us(summary.max),
        })
    }
}

/// Values per segment, in the path's order: a map in JSON.
#[derive(Debug, Clone, PartialEq)]
pub struct InOrder<T>(Vec<(&'static str, T)>);

impl<T> InOrder<T> {
    /// The segment's value.
    pub fn get(&self, segment: &str) -> Option<&T> {
        self.iter().find(|(name, _)| *name == segment).map(|(_, value)| value)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &T)> {
        self.0.iter().map(|(name, value)| (*name, value))
    }
}

impl<T> FromIterator<(&'static str, T)> for InOrder<T> {
    fn from_iter<I: IntoIterator<Item = (&'static str, T)>>(values: I) -> Self {
        Self(values.into_iter().collect())
    }
}

impl<T: Serialize> Serialize for InOrder<T> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

/// One tenant's path.
#[derive(Debug, Clone, Serialize)]
pub struct PathReport {
    /// The name of the tenant, or of the NIC if no tenant is known.
    pub tenant: String,
    /// `rt0` to `rt8`, or `bulk`.
    pub class: String,
    /// Its physical NICs.
    pub nics: Vec<String>,
    /// Whether it is a VM (entry and exit seen) or a container.
    pub vm: bool,
    /// Counters.
    pub counts: Counts,
    /// From interrupt to NIC.
    pub total: Option<Figures>,
    /// Each segment, with its name in Access'18.
    pub segments: InOrder<Figures>,
    /// Time per request that a vCPU, or a container's thread, was runnable but did not run: the guest sees it as steal
    /// time.
    pub stolen: Option<Figures>,
    /// The slowest of all requests, including those that are not in the percentiles any more.
    pub max_us: f64,
}

/// A named inversion.
#[derive(Debug, Clone, Serialize)]
pub struct InversionReport {
    /// The delayed tenant.
    pub tenant: String,
    /// `waited`, `foreign`, `held` or `queued`.
    pub kind: crate::inversion::Kind,
    /// The segment in which the delays began.
    pub segment: Segment,
    /// The delayed thread: role, name, policy; none for the packet itself.
    pub waiter: Option<String>,
    /// The blocking thread: name, policy.
    pub behind: String,
    /// What the blocking thread did.
    pub place: String,
    /// Number of delayed requests.
    pub requests: u64,
    /// Total delay.
    pub total_us: f64,
    /// Longest delay.
    pub max_us: f64,
    /// Description of the longest one.
    pub example: String,
    /// The rule of `ontime doctor`.
    pub rule: Option<RuleId>,
    /// What to do about it: the setting of the rule, or other advice.
    pub cure: String,
}

/// The inversions of one cure; cures are sorted by total time, greatest first.
#[derive(Debug, Clone)]
pub struct ByCure<'a> {
    /// The rule of `ontime doctor`.
    pub rule: Option<RuleId>,
    /// What to do about them: the setting of the rule, or other advice.
    pub cure: &'a str,
    /// The inversions that it cures, greatest total time first.
    pub inversions: Vec<&'a InversionReport>,
}

impl ByCure<'_> {
    /// How often these inversions delayed a request.
    pub fn times(&self) -> u64 {
        self.inversions.iter().map(|inversion| inversion.requests).sum()
    }

    /// Total delay.
    pub fn total_us(&self) -> f64 {
        self.inversions.iter().map(|inversion| inversion.total_us).sum()
    }

    /// Longest delay.
    pub fn max_us(&self) -> f64 {
        self.inversions.iter().map(|inversion| inversion.max_us).fold(0.0, f64::max)
    }
}

/// A slow request.
#[derive(Debug, Clone, Serialize)]
pub struct WorstReport {
    /// The name of the tenant, or of the NIC if no tenant is known.
    pub tenant: String,
    /// Total time.
    pub total_us: f64,
    /// Each segment.
    pub segments_us: InOrder<f64>,
    /// Its stations, CLOCK_MONOTONIC.
    pub stations_ns: crate::request::Request,
    /// Its inversions, longest first.
    pub inversions: Vec<crate::inversion::Inversion>,
    /// The same in words.
    pub words: Vec<String>,
    /// Steal time or SMIs at that time.
    pub hint: Option<String>,
}

/// Cost and losses of the trace itself.
#[derive(Debug, Clone, Serialize)]
pub struct Tracing {
    /// Events analysed, by tracepoint.
    pub events: BTreeMap<&'static str, u64>,
    /// Records that were damaged or of unknown probes.
    pub undecoded: u64,
    /// Lower bound of lost events, by CPU: rings that overflowed before they were read.
    pub lost: BTreeMap<u32, u64>,
    /// Cost of one probe on this machine, measured at the start.
    pub probe_ns: Option<f64>,
    /// Cost of four probes, as in Access'18, IV-D (there below 0.5 us).
    pub four_probes_us: Option<f64>,
    /// Share of the watched CPUs' time that all probes took: number of events times cost.
    pub cpu_share: Option<f64>,
}

/// The report of a trace.
#[derive(Debug, Clone, Serialize)]
pub struct Document {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// `uname -r`.
    pub kernel: String,
    /// Start, seconds since 1970.
    pub started_unix_s: u64,
    /// From the first event to the last.
    pub duration_s: f64,
    /// One for each traced tenant or NIC.
    pub paths: Vec<PathReport>,
    /// Whether inversions were analysed (not with `--segments-only`).
    pub inversions_looked_for: bool,
    /// Requests with at least one inversion.
    pub hindered: u64,
    /// The inversions, sorted by total time.
    pub inversions: Vec<InversionReport>,
    /// Number of inversions beyond the limit of distinct ones.
    pub inversions_unnamed: u64,
    /// The worst requests, slowest first.
    pub worst: Vec<WorstReport>,
    /// Machine-wide delays.
    pub hints: Hints,
    /// Cost and losses of the trace.
    pub tracing: Tracing,
    /// Missing parts.
    pub notes: Vec<String>,
    /// Duration of the request that ended the trace (`--break`), us.
    pub broke_at_us: Option<f64>,
}

impl Document {
    /// Creates the document from the findings.
    pub fn new(analyser: &Analyser, run: &Run) -> Self {
        let findings = analyser.findings();
        let tenant =
            |path: usize| analyser.watch().paths.get(path).map_or_else(String::new, |path| path.tenant.clone());
        let (from, to) = findings.span.unwrap_or_default();
        let duration_s = (to - from) as f64 / 1e9;
        let mut inversions: Vec<InversionReport> = findings
            .culprits
            .iter()
            .map(|(culprit, tally)| InversionReport {
                tenant: tenant(culprit.path),
                kind: culprit.kind,
                segment: culprit.segment,
                waiter: culprit
                    .waiter
                    .as_ref()
                    .map(|(role, comm, policy)| format!("{} {comm} ({policy})", role.text())),
                behind: format!("{} ({})", culprit.blocker.0, culprit.blocker.1),
                place: culprit.place.clone(),
                requests: tally.requests,
                total_us: tally.total_ns as f64 / 1e3,
                max_us: tally.max_ns as f64 / 1e3,
                example: tally.example.clone(),
                rule: tally.rule,
                cure: tally.cure.to_owned(),
            })
            .collect();
        inversions.sort_by(|a, b| b.total_us.total_cmp(&a.total_us));
        let mut notes = run.notes.clone();
        if findings.samples.iter().any(|samples| samples.total.len() == SAMPLES) {
            notes.push(format!("percentiles are of the last {SAMPLES} requests"));
        }
        Self {
            schema_version: SCHEMA_VERSION,
            kernel: run.kernel.clone(),
            started_unix_s: run.started_unix_s,
            duration_s,
            paths: paths(analyser),
            inversions_looked_for: analyser.watch().paths.iter().any(|path| !path.segments_only),
            hindered: findings.hindered,
            inversions,
            inversions_unnamed: findings.unnamed,
            worst: findings.worst.iter().map(|detail| worst(tenant(detail.request.path), detail)).collect(),
            hints: run.hints.clone(),
            tracing: tracing(analyser, run, duration_s),
            notes,
            broke_at_us: run.broke_at_us,
        }
    }

    /// The inversions by cure, the cure with the greatest total time first.
    pub fn by_cure(&self) -> Vec<ByCure<'_>> {
        let mut cures: Vec<ByCure<'_>> = Vec::new();
        for inversion in &self.inversions {
            match cures.iter_mut().find(|of| of.rule == inversion.rule && of.cure == inversion.cure) {
                Some(of) => of.inversions.push(inversion),
                None => {
                    let (rule, cure) = (inversion.rule, inversion.cure.as_str());
                    cures.push(ByCure { rule, cure, inversions: vec![inversion] });
                }
            }
        }
        cures.sort_by(|a, b| b.total_us().total_cmp(&a.total_us()));
        cures
    }

    /// Lower bound of lost events on all CPUs.
    pub fn lost(&self) -> u64 {
        self.tracing.lost.values().sum()
    }
}

fn paths(analyser: &Analyser) -> Vec<PathReport> {
    let findings = analyser.findings();
    let counts = analyser.counts();
    (analyser.watch().paths.iter().zip(&findings.samples).zip(counts).zip(&findings.max_ns))
        .map(|(((path, samples), counts), max_ns)| {
            let of = |samples: &VecDeque<u64>| Figures::of(samples);
            let segments = Segment::ALL.into_iter().zip(&samples.segments);
            PathReport {
                tenant: path.tenant.clone(),
                class: path.class.to_string(),
                nics: path.nics.iter().map(ToString::to_string).collect(),
                vm: path.has(crate::path::PathRole::Vcpu),
                counts,
                total: of(&samples.total),
                segments: segments.filter_map(|(segment, samples)| Some((segment.name(), of(samples)?))).collect(),
                stolen: of(&samples.stolen),
                max_us: *max_ns as f64 / 1e3,
            }
        })
        .collect()
}

fn worst(tenant: String, detail: &Detail) -> WorstReport {
    let request = detail.request;
    let us = |ns: u64| ns as f64 / 1e3;
    WorstReport {
        tenant,
        total_us: us(request.total()),
        segments_us: Segment::ALL.into_iter().map(|segment| (segment.name(), us(request.segment(segment)))).collect(),
        stations_ns: request,
        inversions: detail.inversions.clone(),
        words: detail.inversions.iter().map(crate::inversion::Inversion::text).collect(),
        hint: detail.hint.clone(),
    }
}

fn tracing(analyser: &Analyser, run: &Run, duration_s: f64) -> Tracing {
    let findings = analyser.findings();
    let all: u64 = findings.events.values().sum();
    let time = duration_s * 1e9 * analyser.watch().cpus.len().max(1) as f64;
    Tracing {
        events: findings.events.clone(),
        undecoded: run.records.1,
        lost: findings.lost.clone(),
        probe_ns: run.probe_ns,
        four_probes_us: run.probe_ns.map(|ns| ns * 4.0 / 1e3),
        cpu_share: run.probe_ns.filter(|_| time > 0.0).map(|ns| ns * all as f64 / time),
    }
}
