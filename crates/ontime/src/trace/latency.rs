//! Histograms of the latency of traced requests, for Prometheus through node_exporter's textfile collector.
//!
//! In: requests as they complete. Out: a file in the classic text format, replaced by a rename.

use std::io;
use std::path::Path;

use ontime_trace::Watch;
use ontime_trace::request::{Request, Segment};
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::daemon::metrics::Format;
use crate::metrics;

/// Upper bounds, seconds. 40, 120 and 250 us are acceptance limits for hosts by RHEL, VMware and IEC 61850.
const BOUNDS: [f64; 14] = [1e-5, 2e-5, 4e-5, 6e-5, 8e-5, 1.2e-4, 1.8e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 1e-2, 1e-1, 1.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Domain {
    domain: String,
    class: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfSegment {
    domain: String,
    class: String,
    segment: String,
}

type Histograms<L> = Family<L, Histogram, fn() -> Histogram>;

/// The histograms of a trace.
pub(super) struct Latency {
    registry: Registry,
    requests: Histograms<Domain>,
    segments: Histograms<OfSegment>,
}

impl Default for Latency {
    fn default() -> Self {
        let histogram: fn() -> Histogram = || Histogram::new(BOUNDS);
        let mut registry = Registry::with_prefix("ontime_trace");
        let (requests, segments) = (Family::new_with_constructor(histogram), Family::new_with_constructor(histogram));
        let of = "From a request's interrupt to its reply at the NIC";
        registry.register_with_unit("request", of, Unit::Seconds, Histograms::<Domain>::clone(&requests));
        let of = "The same by segment of the path";
        registry.register_with_unit("segment", of, Unit::Seconds, Histograms::<OfSegment>::clone(&segments));
        Self { registry, requests, segments }
    }
}

impl Latency {
    /// Counts a request of a path of `watch`.
    pub(super) fn add(&self, watch: &Watch, request: &Request) {
        let Some(path) = watch.paths.get(request.path) else { return };
        let seconds = |ns: u64| ns as f64 / 1e9;
        let (domain, class) = (path.tenant.clone(), path.class.to_string());
        for segment in Segment::ALL {
            let (domain, class) = (domain.clone(), class.clone());
            let labels = OfSegment { domain, class, segment: segment.name().to_owned() };
            self.segments.get_or_create(&labels).observe(seconds(request.segment(segment)));
        }
        self.requests.get_or_create(&Domain { domain, class }).observe(seconds(request.total()));
    }

    fn text(&self) -> String {
        let mut open = String::new();
        // Writing to a String cannot fail.
        let _ = text::encode(&mut open, &self.registry);
        Format::Classic.render(&open)
    }

    /// Replaces the file.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn write(&self, file: &Path) -> io::Result<()> {
        metrics::write(file, &self.text())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_in_the_bucket_of_their_time() {
        let latency = Latency::default();
        let labels = Domain { domain: "plc".to_owned(), class: "rt0".to_owned() };
        for us in [9.0, 41.0, 250.0, 7_000_000.0] {
            latency.requests.get_or_create(&labels).observe(us / 1e6);
        }
        let text = latency.text();
        for (bound, count) in [("0.00001", 1), ("0.00004", 1), ("0.00006", 2), ("0.00025", 3), ("1.0", 3), ("+Inf", 4)]
        {
            let line =
                format!("ontime_trace_request_seconds_bucket{{le=\"{bound}\",domain=\"plc\",class=\"rt0\"}} {count}\n");
            assert!(text.contains(&line), "{line} is not in {text}");
        }
        assert!(text.contains("# TYPE ontime_trace_request_seconds histogram\n") && !text.contains("EOF"), "{text}");
    }
}
