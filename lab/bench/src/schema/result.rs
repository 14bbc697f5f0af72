//! A method under a condition.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Clock, Load, Metric, kernel_series};
use crate::bulk::BulkReceiver;
use crate::wire::WireCounts;

/// A note of results whose clients' side was in the emulated machine.
pub(crate) const CLIENTS_INSIDE: &str =
    "the clients' side is a CPU of the emulated machine: its load is in the host's time";

/// Beginning of a note of results with a link between the host and clients inside; the link follows.
pub(crate) const LINK: &str = "link of each NIC (rate, delay, frames that may wait): ";

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
    /// TCP payload that the bulk tenants received, Gbit/s; `null` where it was not measured.
    pub bulk_gbps: Option<f64>,
    /// The same by tenant.
    pub bulk: Vec<BulkReceiver>,
    /// Busy share of the host's CPUs, 0 to 1; `null` where it was not measured.
    pub cpu_share: Option<f64>,
    /// What the experiment measures besides.
    pub metrics: Vec<Metric>,
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

    /// The conditions under which figures can be compared.
    pub(crate) fn conditions(&self) -> String {
        let inside = self.notes.iter().any(|note| note == CLIENTS_INSIDE);
        let clients = match self.clock {
            _ if inside => "inside",
            Clock::Virtual => "none",
            Clock::Real | Clock::Hardware => "outside",
        };
        let link = self.notes.iter().find_map(|note| note.strip_prefix(LINK));
        let link = link.map_or_else(String::new, |link| format!(", link {link}"));
        let (series, clock) = (self.kernel_series(), self.clock.name());
        format!("Linux {series}, {clock} clock, CPUs: {}, clients {clients}{link}", self.cpus)
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
