//! The one JSON schema of every experiment's report.
//!
//! In: what was measured ([`Run`]). Out: a [`Report`] as JSON and back. `docs/bench.schema.json` is generated from
//! these types, and a test holds the two together. Any change of a field raises [`SCHEMA_VERSION`]. Units are in the
//! names: us are microseconds on the result's own clock, Gbit are 10^9 bit.

use schemars::{JsonSchema, Schema, schema_for};
use serde::{Deserialize, Serialize};

use crate::bulk::{BulkAnalysis, BulkReceiver};
use crate::histogram::LogLinear;
use crate::stats::Summary;
use crate::wire::{WireAnalysis, WireCounts};

/// The version that this code writes and reads.
pub const SCHEMA_VERSION: u32 = 8;

/// Why a report could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum SchemaError {
    /// No JSON, or not the fields of this version.
    #[error("the report is not version {SCHEMA_VERSION} of the benchmark schema: {0}; see docs/bench.schema.json")]
    Invalid(#[from] serde_json::Error),
    /// A figure that JSON cannot hold.
    #[error(
        "a figure of the report is NaN or infinite, or its version is not {SCHEMA_VERSION}: it is not written; this is a defect of Ontime"
    )]
    NotANumber,
    /// No version in it.
    #[error("the report has no whole number `schema_version`, so it is not from `ontime bench --json`")]
    NoVersion,
    /// Written by another version of Ontime.
    #[error("the report has schema version {found}, this Ontime reads {SCHEMA_VERSION}; {}", remedy(*found))]
    Version {
        /// The version it has.
        found: u64,
    },
}

fn remedy(found: u64) -> &'static str {
    if found > u64::from(SCHEMA_VERSION) {
        "read it with the newer Ontime that wrote it"
    } else {
        "run the experiment again, or read it with the older Ontime that wrote it"
    }
}

/// What a clock's seconds are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Clock {
    /// Emulated host, time is instructions executed, 1 ns each (4 ns in reports up to version 5). Shows queueing and path length, not caches.
    Virtual,
    /// Emulated host, or a real one that is joined to its client without hardware; time is the machine's; noisy.
    Real,
    /// A real host and a real NIC.
    Hardware,
}

impl Clock {
    /// As it is written on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Clock::Virtual => "virtual",
            Clock::Real => "real",
            Clock::Hardware => "hardware",
        }
    }

    /// What a reader must know of figures on this clock.
    pub fn meaning(self) -> &'static str {
        match self {
            Clock::Virtual => {
                "The host is emulated and its clock counts the instructions it executed, 1 ns each. Figures show queueing, \
                 priorities and path length, and repeat well. Caches, memory, interrupts' hardware cost and speculation \
                 are not in them: a microsecond here is an instruction count, not a promise for a machine."
            }
            Clock::Real => {
                "The host is emulated, or joined to its client without hardware (the report's notes say so), and its clock is the \
                 machine's. Figures carry the emulator's and the machine's noise: read them as an indication, and compare only methods of \
                 one run."
            }
            Clock::Hardware => "A real host and a real NIC: figures are this machine's.",
        }
    }
}

/// What the bulk tenants do while requests are answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Load {
    /// Nothing.
    None,
    /// TCP at full speed, as in the papers: it slows down where the host does not keep up.
    Tcp,
    /// Small UDP packets as fast as they can be sent: nothing slows them down but the host's own drops.
    SmallPackets,
    /// The same with packets of the size of the MTU.
    LargePackets,
}

impl Load {
    /// All of them.
    pub const ALL: [Load; 4] = [Load::None, Load::Tcp, Load::SmallPackets, Load::LargePackets];

    /// As it is written on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Load::None => "none",
            Load::Tcp => "tcp",
            Load::SmallPackets => "small-packets",
            Load::LargePackets => "large-packets",
        }
    }

    /// In words, for a table.
    pub fn words(self) -> &'static str {
        match self {
            Load::None => "no flood",
            Load::Tcp => "TCP flood",
            Load::SmallPackets => "small-packet flood",
            Load::LargePackets => "large-packet flood",
        }
    }

    /// Whether there is any.
    pub fn floods(self) -> bool {
        self != Load::None
    }
}

impl std::str::FromStr for Load {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        Load::ALL
            .into_iter()
            .find(|load| load.name() == text)
            .ok_or_else(|| format!("load '{text}' is not one of none, tcp, small-packets, large-packets"))
    }
}

/// A report: one experiment, its methods, and the paper's figures beside them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// The experiment's name on the command line (`rt-server`).
    pub experiment: String,
    /// The clock that the experiment was asked to run on; a result's own clock is what counts for it.
    pub clock: Clock,
    /// The host kernel release that the experiment is about; a result's own kernel is what counts for it.
    pub kernel: String,
    /// Seed of everything random in the load.
    pub seed: u64,
    /// The command that makes this report again.
    pub command: String,
    /// When it was made, RFC 3339.
    pub created: String,
    /// The machine it was made on, in words.
    pub machine: String,
    /// One a method and condition.
    pub results: Vec<MethodResult>,
    /// The paper's figures, where its text states them.
    pub paper: Vec<PaperRow>,
    /// What was to be reached, and whether it was.
    pub goals: Vec<Goal>,
    /// What a reader must know besides: limits, incidents, unfavourable figures.
    pub notes: Vec<String>,
}

/// One method under one condition.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MethodResult {
    /// The method's name on the command line (`partitioned`).
    pub method: String,
    /// The method in words.
    pub label: String,
    /// The host kernel's release.
    pub kernel: String,
    /// This result's clock.
    pub clock: Clock,
    /// CPUs of the host.
    pub cpus: u32,
    /// What the bulk tenants did meanwhile.
    pub load: Load,
    /// Requests that the statistics rest on.
    pub count: u64,
    /// Requests that were never answered.
    pub lost: u64,
    /// What became of every packet.
    pub wire: WireCounts,
    /// From the first to the last request, seconds.
    pub duration_s: f64,
    /// Response times; `null` where nothing was counted.
    pub latency_us: Option<Distribution>,
    /// Times from a reply to the next request, as the wire saw them.
    pub interval_us: Option<Distribution>,
    /// The period on which requests arrived, where the emulator released them at fixed times.
    pub arrival_quantum_us: Option<f64>,
    /// TCP payload that the bulk tenants received, Gbit/s; `null` where it was not measured.
    pub bulk_gbps: Option<f64>,
    /// The same by tenant.
    pub bulk: Vec<BulkReceiver>,
    /// Busy share of the host's CPUs, 0 to 1; `null` where it was not measured.
    pub cpu_share: Option<f64>,
    /// CPU time of a byte of bulk payload, in `bulk`; `null` elsewhere.
    pub cost: Option<Cost>,
    /// What `ontime doctor` says of the rule that is switched off, in `inversion`; `null` elsewhere.
    pub doctor: Option<DoctorRow>,
    /// Bytes of a frame with its check sequence, in `kbp`; `null` elsewhere.
    pub frame_bytes: Option<u32>,
    /// The highest rate without loss, in `kbp`; `null` elsewhere.
    pub zero_loss: Option<ZeroLoss>,
    /// How long the RT NIC polled and rested, under adaptive polling in `kbp`; `null` elsewhere.
    pub polling: Option<Polling>,
    /// Frames that came back later than their period, in `sampled-values`; answers later than 1 ms, in `xen-arm`, and than 500 us, in `memcached-slo`; `null` elsewhere.
    pub late: Option<Late>,
    /// Deadlines of real-time applications, in `rta-periodic`, `rta-sporadic`, `video` (`latency_us` is then from a job's release to its end) and `memcached-slo`; `null` elsewhere.
    pub rtas: Option<Rtas>,
    /// Where the requests' time went, by the trace in the host, in `segments`; empty elsewhere.
    pub segments: Vec<SegmentTime>,
    /// The response times' occupied bins, ascending.
    pub histogram: Vec<HistogramBin>,
    /// What a reader must know of this result.
    pub notes: Vec<String>,
}

/// A bin: `low_us <= sample < high_us`. At most 0.8 % wide (see the crate's `histogram`).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HistogramBin {
    /// Lower edge.
    pub low_us: f64,
    /// Upper edge, not in the bin.
    pub high_us: f64,
    /// Samples in it.
    pub count: u64,
}

/// Exact statistics of samples. Percentiles are by nearest rank, the deviation is the sample's (n - 1).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Distribution {
    /// Smallest.
    pub min: f64,
    /// Arithmetic mean.
    pub mean: f64,
    /// Standard deviation.
    pub sd: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 95th percentile.
    pub p95: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Lower end of its distribution-free 95 % interval.
    pub p99_low: f64,
    /// Upper end; `null` where the samples are too few to give one.
    pub p99_high: Option<f64>,
    /// 99.9th percentile.
    pub p99_9: f64,
    /// 99.99th percentile.
    pub p99_99: f64,
    /// Largest.
    pub max: f64,
    /// When the largest happened, seconds after the first counted request; `null` where that is not known.
    pub max_at_s: Option<f64>,
    /// Samples above the 99.9th percentile.
    pub beyond_p99_9: u64,
}

/// A line of a paper's table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PaperRow {
    /// The method's name here.
    pub method: String,
    /// Where it stands.
    pub source: String,
    /// The paper's machine and load, in words.
    pub conditions: String,
    /// Mean, us.
    pub mean_us: f64,
    /// 99th percentile, us.
    pub p99_us: f64,
    /// Standard deviation, us.
    pub sd_us: f64,
    /// Bulk throughput, Gbit/s.
    pub bulk_gbps: f64,
}

/// Which side of the target is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Bound {
    /// The target or more.
    AtLeast,
    /// The target or less.
    AtMost,
}

/// CPU time of a byte of bulk payload, ns; on the virtual clock an instruction is 1 ns.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Cost {
    /// The host's: everything but idle and guests.
    pub host_ns_per_byte: f64,
    /// The guests', by the host's tick.
    pub guest_ns_per_byte: f64,
}

/// A row of `ontime doctor` (docs/doctor.md).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DoctorRow {
    /// The rule.
    pub rule: String,
    /// `ok`, `unknown`, `warning` or `critical`.
    pub state: String,
    /// What was found.
    pub found: String,
    /// What to do.
    pub remedy: String,
}

/// The highest rate at which no frame was lost (RFC 2544, 26.1), by a binary search, frames a second on the result's clock: on the virtual
/// one a count of instructions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ZeroLoss {
    /// That rate, as it was at the wire; 0 where frames were lost at every rate.
    pub frames_per_s: f64,
    /// The lowest rate with loss, as it was at the wire; `null` where the sender could not send so fast.
    pub lossy_frames_per_s: Option<f64>,
    /// Rates that were tried.
    pub trials: u32,
    /// Frames of a trial.
    pub frames_each: u64,
}

/// Adaptive polling's balance since it was put in force, s.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Polling {
    /// It polled.
    pub polled_s: f64,
    /// It waited for interrupts: CPU time saved against polling always.
    pub saved_s: f64,
}

/// Frames that were answered too late; those that were never answered are `lost`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Late {
    /// Later than this.
    pub over_us: f64,
    /// So many.
    pub frames: u64,
}

/// Real-time applications in guests (RTVirt, section 4.2), one a VM: what they need, what was reserved, what they missed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Rtas {
    /// The sum of slices over periods, CPUs.
    pub needed_cpus: f64,
    /// What the VMs have besides, for their guests' kernels, CPUs.
    pub slack_cpus: f64,
    /// What the host reserved for the applications, `slack_cpus` not in it; `null` where it reserves nothing.
    pub reserved_cpus: Option<f64>,
    /// Jobs that ended after their period.
    pub missed: u64,
    /// By application.
    pub rows: Vec<RtaRow>,
}

/// An application: a job in each period.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RtaRow {
    /// CPU time that it asks for in each period.
    pub slice_us: f64,
    /// The period, which is its deadline.
    pub period_us: f64,
    /// Jobs that it did.
    pub jobs: u64,
    /// Of those, how many ended after their period.
    pub missed: u64,
    /// The longest from a release to the job's end; `null` where there was none.
    pub worst_us: Option<f64>,
}

impl Rtas {
    /// What is reserved beyond need and slack, as a share of these; `None` where nothing is reserved.
    pub fn excess(&self) -> Option<f64> {
        let due = self.needed_cpus + self.slack_cpus;
        self.reserved_cpus.filter(|_| due > 0.0).map(|cpus| (cpus + self.slack_cpus) / due - 1.0)
    }
}

/// A part of the requests' way through the host (Access'18, Figure 10), us on the host's clock, the probes' own cost included.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SegmentTime {
    /// `host receive`, `guest`, `host send`, or `in all`.
    pub segment: String,
    /// Requests; those of the warm-up are among them.
    pub count: u64,
    /// Smallest.
    pub min_us: f64,
    /// Arithmetic mean.
    pub mean_us: f64,
    /// Median.
    pub p50_us: f64,
    /// 95th percentile.
    pub p95_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// 99.9th percentile.
    pub p99_9_us: f64,
    /// Largest.
    pub max_us: f64,
}

/// A goal and what became of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Goal {
    /// A short name.
    pub id: String,
    /// The goal in words.
    pub text: String,
    /// Which side is good.
    pub bound: Bound,
    /// The figure to reach.
    pub target: f64,
    /// The figure reached; `null` where what it compares was not measured.
    pub actual: Option<f64>,
    /// Whether it was met; `null` where it was not measured.
    pub met: Option<bool>,
    /// The figures it was computed from, or what is missing.
    pub figures: String,
    /// The kernel series (`7.2`) it was computed for.
    pub kernel_series: String,
    /// Whether the project promises it for this series; otherwise it is for information.
    pub binding: bool,
}

/// A measured method, as [`MethodResult::new`] takes it.
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
    /// What the bulk tenants did.
    pub load: Load,
    /// The RT NIC's monitor.
    pub wire: &'a WireAnalysis,
    /// The bulk NIC's monitor.
    pub bulk: Option<&'a BulkAnalysis>,
    /// Busy share of the host's CPUs, 0 to 1.
    pub cpu_share: Option<f64>,
    /// Later than this is late, ns.
    pub late_ns: Option<u64>,
}

impl MethodResult {
    /// Summarises a run; what is odd about its captures goes into the notes.
    pub fn new(run: &Run<'_>) -> Self {
        let wire = run.wire;
        let latencies = wire.latencies_ns();
        let summary = Summary::of(&latencies);
        let max_at_s = summary.as_ref().and_then(|summary| {
            let first = wire.exchanges.first()?.at_ns;
            Some((wire.exchanges.get(summary.max_index)?.at_ns - first) as f64 / 1e9)
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
            arrival_quantum_us: wire.arrival_quantum_ns.map(|ns| us(ns as f64)),
            bulk_gbps: run.bulk.and_then(BulkAnalysis::gbps),
            bulk: run.bulk.map_or_else(Vec::new, |bulk| bulk.receivers.clone()),
            cpu_share: run.cpu_share.filter(|share| share.is_finite()),
            cost: None,
            doctor: None,
            frame_bytes: None,
            zero_loss: None,
            polling: None,
            late: run.late_ns.map(|over| Late {
                over_us: us(over as f64),
                frames: latencies.iter().filter(|latency| **latency > over).count() as u64,
            }),
            rtas: None,
            segments: Vec::new(),
            histogram: bins.bins().iter().map(HistogramBin::from).collect(),
            notes: capture_notes(run),
        }
    }

    /// The kernel's series, `7.2` of `7.2.12-rt-amd64`.
    pub fn kernel_series(&self) -> &str {
        kernel_series(&self.kernel)
    }
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
    if let Some(quantum) = run.wire.arrival_quantum_ns {
        notes.push(format!(
            "requests arrived on a grid of {} us (the emulator releases packets at fixed times)",
            quantum / 1_000
        ));
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

/// `7.2` of `7.2.12-rt-amd64`; the whole where it is no such number.
pub fn kernel_series(release: &str) -> &str {
    let number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let Some((major, rest)) = release.split_once('.') else { return release };
    let minor = rest.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
    if number(major) && number(minor) {
        release.get(..major.len() + 1 + minor.len()).unwrap_or(release)
    } else {
        release
    }
}

impl Report {
    /// The report as JSON. What is written has been read back, so that it can be read later.
    ///
    /// # Errors
    /// [`SchemaError::NotANumber`] where a figure is NaN or infinite.
    pub fn to_json(&self) -> Result<String, SchemaError> {
        let mut json = serde_json::to_string_pretty(self)?;
        // JSON has no NaN and no infinity; they would come back as "not measured".
        if Self::from_json(&json).ok().as_ref() != Some(self) {
            return Err(SchemaError::NotANumber);
        }
        json.push('\n');
        Ok(json)
    }

    /// Reads a report of this version.
    ///
    /// # Errors
    /// See [`SchemaError`].
    pub fn from_json(json: &str) -> Result<Self, SchemaError> {
        let value: serde_json::Value = serde_json::from_str(json)?;
        let version = value.get("schema_version").and_then(serde_json::Value::as_u64).ok_or(SchemaError::NoVersion)?;
        if version != u64::from(SCHEMA_VERSION) {
            return Err(SchemaError::Version { found: version });
        }
        Ok(serde_json::from_str(json)?)
    }
}

/// The JSON Schema (draft 2020-12) of [`Report`].
pub fn json_schema() -> Schema {
    schema_for!(Report)
}
