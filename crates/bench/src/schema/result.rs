//! A method under a condition, and the figures that some experiments have besides.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Clock, Load, kernel_series};
use crate::bulk::BulkReceiver;
use crate::wire::WireCounts;

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
    /// Connections that were made, answered and closed, in `connections`; `null` elsewhere.
    pub connections: Option<Connections>,
    /// What `ontime doctor` says of the rule that is switched off, in `inversion`; `null` elsewhere.
    pub doctor: Option<DoctorRow>,
    /// Bytes of a frame with its check sequence, in `kbp`; `null` elsewhere.
    pub frame_bytes: Option<u32>,
    /// The highest rate without loss, in `kbp`; `null` elsewhere.
    pub zero_loss: Option<ZeroLoss>,
    /// How long the RT NIC polled and rested, under adaptive polling in `kbp`; `null` elsewhere.
    pub polling: Option<Polling>,
    /// Frames that came back later than their period, in `sampled-values`; answers later than 1 ms, in `xen-arm`, and
    /// than 500 us, in `memcached-slo`; `null` elsewhere.
    pub late: Option<Late>,
    /// Deadlines of real-time applications, in `rta-periodic`, `rta-sporadic`, `video` (`latency_us` is then from a
    /// job's release to its end) and `memcached-slo`; `null` elsewhere.
    pub rtas: Option<Rtas>,
    /// CPU time of the host's processes a change of a guest's bandwidth, in `registration`, where the host is asked;
    /// `null` elsewhere.
    pub host_time: Option<HostTime>,
    /// Where the requests' time went, by the trace in the host, in `segments`; empty elsewhere.
    pub segments: Vec<SegmentTime>,
    /// Priority inversions that the trace named, in `segments --inversions`; `null` elsewhere.
    pub inversions: Option<Inversions>,
    /// The response times' occupied bins, ascending.
    pub histogram: Vec<HistogramBin>,
    /// What a reader must know of this result.
    pub notes: Vec<String>,
}

impl MethodResult {
    /// The kernel's series, `7.2` of `7.2.12-rt-amd64`.
    pub fn kernel_series(&self) -> &str {
        kernel_series(&self.kernel)
    }
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

/// The highest rate at which no frame was lost (RFC 2544, 26.1), by a binary search, frames a second on the result's
/// clock: on the virtual one a count of instructions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ZeroLoss {
    /// That rate, as it was at the wire; 0 where frames were lost at every rate.
    pub frames_per_s: f64,
    /// The lowest rate with loss, as it was at the wire; `null` where the sender could not send so fast.
    pub lossy_frames_per_s: Option<f64>,
    /// Rates that were tried.
    pub trials: u32,
    /// Frames of a trial at least: a quarter of a second of them where that is more.
    pub frames_each: u64,
}

/// TCP connections of one request and its answer, at the NIC.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Connections {
    /// A second, from the first that was over to the last. On the virtual clock one a count of instructions.
    pub per_s: f64,
    /// Those that were answered and closed by both sides.
    pub completed: u64,
    /// Clients at once.
    pub clients: u32,
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

/// Real-time applications in guests (RTVirt, section 4.2), one a VM: what they need, what was reserved, what they
/// missed.
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

/// CPU time of the host's processes, us, beyond what they use anyway.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HostTime {
    /// The VM's device process.
    pub device_us: f64,
    /// The daemon without its pacers.
    pub daemon_us: f64,
    /// The pacers.
    pub pacers_us: f64,
}

impl HostTime {
    /// Together, us.
    pub fn sum_us(&self) -> f64 {
        self.device_us + self.daemon_us + self.pacers_us
    }
}

/// A part of the requests' way through the host (Access'18, Figure 10), us on the host's clock, the probes' own cost
/// included.
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

/// Priority inversions that requests met (docs/trace.md).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Inversions {
    /// Requests that the trace put together; those of the warm-up are among them.
    pub requests: u64,
    /// From the trace's first event to its last, seconds.
    pub duration_s: f64,
    /// Requests that met one or more.
    pub hindered: u64,
    /// Each by who waited, behind whom and where; by the time that they took in all.
    pub rows: Vec<InversionRow>,
    /// Those that were too many to be named.
    pub unnamed: u64,
}

/// A named inversion.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct InversionRow {
    /// `waited`, `foreign`, `held` or `queued`.
    pub kind: String,
    /// In which segment.
    pub segment: String,
    /// The thread that was kept; `null` for the packet itself.
    pub waiter: Option<String>,
    /// The thread in its way: name, policy.
    pub behind: String,
    /// What that did.
    pub place: String,
    /// Requests hindered.
    pub requests: u64,
    /// The longest.
    pub max_us: f64,
    /// The rule of `ontime doctor` that cures it.
    pub rule: Option<String>,
}

impl InversionRow {
    /// In words.
    pub fn words(&self) -> String {
        let who = self.waiter.as_deref().unwrap_or("the packet");
        let cure = self.rule.as_deref().unwrap_or("no rule");
        format!("{who} {} behind {} {}, {} [{cure}]", self.kind, self.behind, self.place, self.segment)
    }
}
