//! Goals of an experiment, typed, and whether a report meets them.
//!
//! In: [`GoalSpec`]s and the results. Out: [`Goal`]s with the figures they were computed from. A goal whose results are
//! missing is neither met nor not met, and says what is missing.

use Load::{SmallPackets, Tcp};

use crate::number;
use crate::schema::{Bound, Clock, Goal, Load, MethodResult, kernel_series};

/// A method under a condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    /// The method's name on the command line.
    pub method: &'static str,
    /// What the bulk tenants do.
    pub load: Load,
}

/// What a goal compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measure {
    /// p99 of the first divided by p99 of the second.
    P99Ratio(Case, Case),
    /// p95 of the first divided by p95 of the second.
    P95Ratio(Case, Case),
    /// Maximum of the first divided by that of the second.
    MaxRatio(Case, Case),
    /// Zero-loss throughput of the first divided by that of the second.
    ZeroLossRatio(Case, Case),
    /// Standard deviation of the first divided by that of the second.
    SdRatio(Case, Case),
    /// Bulk throughput of the first divided by that of the second.
    BulkRatio(Case, Case),
    /// CPU time a byte, host and guest, of the first divided by that of the second.
    CostRatio(Case, Case),
    /// The smallest count of all results of the series.
    LeastCount,
}

/// A goal, before it is looked at.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GoalSpec {
    /// A short name.
    pub id: &'static str,
    /// In words.
    pub text: &'static str,
    /// What is compared.
    pub measure: Measure,
    /// Which side of the target is good.
    pub bound: Bound,
    /// The figure to reach.
    pub target: f64,
}

const fn under(load: Load, method: &'static str) -> Case {
    Case { method, load }
}

/// A goal of `partitioned`'s p99 against another method's, as a factor.
const fn below(id: &'static str, text: &'static str, load: Load, other: &'static str, target: f64) -> GoalSpec {
    let measure = Measure::P99Ratio(under(load, other), under(load, "partitioned"));
    GoalSpec { id, text, measure, bound: Bound::AtLeast, target }
}

/// A goal of `partitioned`'s p99 under a load against its own without.
const fn as_without_flood(id: &'static str, text: &'static str, load: Load) -> GoalSpec {
    let measure = Measure::P99Ratio(under(load, "partitioned"), under(Load::None, "partitioned"));
    GoalSpec { id, text, measure, bound: Bound::AtMost, target: 1.25 }
}

/// A goal of `outsourcing`'s spread.
const fn sd_below_threaded(id: &'static str, text: &'static str, load: Load) -> GoalSpec {
    let measure = Measure::SdRatio(under(load, "threaded"), under(load, "outsourcing"));
    GoalSpec { id, text, measure, bound: Bound::AtLeast, target: 10.0 }
}

/// A goal of `outsourcing`'s p99 against another method's.
const fn outsourced(id: &'static str, text: &'static str, load: Load, other: &'static str, target: f64) -> GoalSpec {
    let measure = Measure::P99Ratio(under(load, "outsourcing"), under(load, other));
    GoalSpec { id, text, measure, bound: Bound::AtMost, target }
}

/// The speed goals of `rt-server`: on the virtual clock, for the series that the project promises.
pub const RT_SERVER: [GoalSpec; 14] = [
    below(
        "p99-vs-vanilla-small",
        "partitioned: p99 at least 20 times below vanilla, small packets",
        SmallPackets,
        "vanilla",
        20.0,
    ),
    below(
        "p99-vs-threaded-small",
        "partitioned: p99 at least 8 times below threaded, small packets",
        SmallPackets,
        "threaded",
        8.0,
    ),
    below("p99-vs-vanilla-tcp", "partitioned: p99 at least 20 times below vanilla, TCP", Tcp, "vanilla", 20.0),
    below("p99-vs-threaded-tcp", "partitioned: p99 at least 8 times below threaded, TCP", Tcp, "threaded", 8.0),
    as_without_flood(
        "p99-vs-no-flood-small",
        "partitioned: p99 under small packets at most 1.25 times that without flood",
        SmallPackets,
    ),
    as_without_flood("p99-vs-no-flood-tcp", "partitioned: p99 under TCP at most 1.25 times that without flood", Tcp),
    GoalSpec {
        id: "bulk-vs-vanilla",
        text: "partitioned: bulk throughput at least 0.95 of vanilla's",
        measure: Measure::BulkRatio(under(Tcp, "partitioned"), under(Tcp, "vanilla")),
        bound: Bound::AtLeast,
        target: 0.95,
    },
    sd_below_threaded(
        "sd-vs-threaded-small",
        "outsourcing: SD at least 10 times below threaded, small packets",
        SmallPackets,
    ),
    sd_below_threaded("sd-vs-threaded-tcp", "outsourcing: SD at least 10 times below threaded, TCP (paper: 6.7)", Tcp),
    outsourced(
        "outsourced-small",
        "outsourcing: p99 at most half of partitioned's, small packets",
        SmallPackets,
        "partitioned",
        0.5,
    ),
    outsourced("outsourced-tcp", "outsourcing: p99 at most half of partitioned's, TCP", Tcp, "partitioned", 0.5),
    outsourced(
        "process-small",
        "outsourcing: p99 at most 1.3 times that of the same server as a host process, small packets",
        SmallPackets,
        "host-process",
        1.3,
    ),
    outsourced(
        "process-tcp",
        "outsourcing: p99 at most 1.3 times that of the same server as a host process, TCP",
        Tcp,
        "host-process",
        1.3,
    ),
    GoalSpec {
        id: "requests",
        text: "at least 20,000 counted requests a method",
        measure: Measure::LeastCount,
        bound: Bound::AtLeast,
        target: 20_000.0,
    },
];

/// The speed goals of `vatc`, by its cases' names.
pub const VATC: [GoalSpec; 2] = [
    GoalSpec {
        id: "p95-by-streams",
        text: "vatc: p95 with four streams at most 1.1 times that with none",
        measure: Measure::P95Ratio(under(SmallPackets, "vatc-4"), under(Load::None, "vatc-0")),
        bound: Bound::AtMost,
        target: 1.1,
    },
    GoalSpec {
        id: "p95-vs-prio",
        text: "vatc: p95 with four streams at least 40 times below prio's",
        measure: Measure::P95Ratio(under(SmallPackets, "prio-4"), under(SmallPackets, "vatc-4")),
        bound: Bound::AtLeast,
        target: 40.0,
    },
];

/// A goal of `busypoll`'s slowest round trip against default NAPI's, as a factor.
const fn max_below_napi(
    id: &'static str,
    text: &'static str,
    napi: &'static str,
    poll: &'static str,
    target: f64,
) -> GoalSpec {
    let measure = Measure::MaxRatio(under(SmallPackets, napi), under(SmallPackets, poll));
    GoalSpec { id, text, measure, bound: Bound::AtLeast, target }
}

/// A goal of `busypoll`'s rate without loss against default NAPI's.
const fn rate_above_napi(
    id: &'static str,
    text: &'static str,
    napi: &'static str,
    poll: &'static str,
    target: f64,
) -> GoalSpec {
    let measure = Measure::ZeroLossRatio(under(SmallPackets, poll), under(SmallPackets, napi));
    GoalSpec { id, text, measure, bound: Bound::AtLeast, target }
}

/// The speed goals of `kbp`, by its cases' names.
pub const KBP: [GoalSpec; 8] = [
    max_below_napi(
        "vm-64",
        "VM, 64 bytes: slowest at least 100 times below NAPI's",
        "napi-vm-64",
        "busypoll-vm-64",
        100.0,
    ),
    max_below_napi(
        "vm-512",
        "VM, 512 bytes: slowest at least 100 times below NAPI's",
        "napi-vm-512",
        "busypoll-vm-512",
        100.0,
    ),
    max_below_napi(
        "vm-1518",
        "VM, 1518 bytes: slowest at least 100 times below NAPI's (paper: 83)",
        "napi-vm-1518",
        "busypoll-vm-1518",
        100.0,
    ),
    max_below_napi(
        "nat-64",
        "container behind NAT, 64 bytes: slowest at least 26 times below NAPI's (paper: up to 26)",
        "napi-nat-64",
        "busypoll-nat-64",
        26.0,
    ),
    max_below_napi(
        "macvlan-64",
        "container with macvlan, 64 bytes: slowest at least 26 times below NAPI's",
        "napi-macvlan-64",
        "busypoll-macvlan-64",
        26.0,
    ),
    rate_above_napi(
        "rate-64",
        "VM, 64 bytes: no loss up to at least 1.36 times NAPI's rate",
        "napi-vm-64",
        "busypoll-vm-64",
        1.36,
    ),
    rate_above_napi(
        "rate-512",
        "VM, 512 bytes: no loss up to at least 1.75 times NAPI's rate",
        "napi-vm-512",
        "busypoll-vm-512",
        1.75,
    ),
    rate_above_napi(
        "rate-1518",
        "VM, 1518 bytes: no loss up to at least 3.28 times NAPI's rate",
        "napi-vm-1518",
        "busypoll-vm-1518",
        3.28,
    ),
];

/// What Access'18 finds in IV-C, as goals of `ablation`.
pub const ABLATION: [GoalSpec; 3] = [
    GoalSpec {
        id: "sd-without-sockets",
        text: "both techniques: SD at most that of partitioned softirq handling alone",
        measure: Measure::SdRatio(under(Tcp, "outsourcing"), under(Tcp, "partitioned")),
        bound: Bound::AtMost,
        target: 1.0,
    },
    GoalSpec {
        id: "sd-without-partitioning",
        text: "both techniques: SD at most that of outsourced sockets alone",
        measure: Measure::SdRatio(under(Tcp, "outsourcing"), under(Tcp, "outsourcing-only")),
        bound: Bound::AtMost,
        target: 1.0,
    },
    GoalSpec {
        id: "sd-of-interrupts",
        text: "woken idle loop: SD at most that of virtual interrupts",
        measure: Measure::SdRatio(under(Tcp, "outsourcing"), under(Tcp, "outsourcing-interrupt")),
        bound: Bound::AtMost,
        target: 1.0,
    },
];

/// What Access'18 finds of memcached in IV-G 2: p99 67 % below threaded's.
pub const MEMCACHED: [GoalSpec; 2] = [
    outsourced(
        "p99-vs-threaded",
        "outsourcing: p99 of GETs at most 0.33 of threaded's (the paper's 67 % less)",
        Tcp,
        "threaded",
        0.33,
    ),
    outsourced("p99-vs-partitioned", "outsourcing: p99 of GETs at most partitioned's", Tcp, "partitioned", 1.0),
];

/// What Access'18 finds of the VoIP server in IV-G 1: p99 63 % below threaded's.
pub const VOIP: [GoalSpec; 2] = [
    outsourced(
        "p99-vs-threaded",
        "outsourcing: p99 of forward delays at most 0.37 of threaded's (the paper's 63 % less)",
        Tcp,
        "threaded",
        0.37,
    ),
    outsourced(
        "p99-vs-partitioned",
        "outsourcing: p99 of forward delays at most partitioned's",
        Tcp,
        "partitioned",
        1.0,
    ),
];

/// The speed goals of `bulk`, by its cases' names.
pub const BULK: [GoalSpec; 2] = [
    GoalSpec {
        id: "receive-throughput",
        text: "outsourced TCP receive: throughput at least vhost-net's",
        measure: Measure::BulkRatio(under(Tcp, "outsourcing-receive"), under(Tcp, "threaded-receive")),
        bound: Bound::AtLeast,
        target: 1.0,
    },
    GoalSpec {
        id: "receive-cost",
        text: "outsourced TCP receive: host and guest CPU time a byte at most 0.64 of threaded's",
        measure: Measure::CostRatio(under(Tcp, "outsourcing-receive"), under(Tcp, "threaded-receive")),
        bound: Bound::AtMost,
        target: 0.64,
    },
];

/// The goals of an experiment; none where it has none.
pub fn of_experiment(experiment: &str) -> &'static [GoalSpec] {
    match experiment {
        "rt-server" => &RT_SERVER,
        "ablation" => &ABLATION,
        "bulk" => &BULK,
        "memcached" => &MEMCACHED,
        "voip" => &VOIP,
        "vatc" => &VATC,
        "kbp" => &KBP,
        _ => &[],
    }
}

/// Looks at every goal for every kernel series that has a result on `clock`. Those of `promised` (a release or series)
/// are binding and come first, the others are for information. Where a case was measured more than
/// once, the first result counts.
pub fn evaluate(specs: &[GoalSpec], results: &[MethodResult], clock: Clock, promised: &str) -> Vec<Goal> {
    let promised = kernel_series(promised);
    let mut series = vec![promised];
    for result in results.iter().filter(|result| result.clock == clock) {
        if !series.contains(&result.kernel_series()) {
            series.push(result.kernel_series());
        }
    }
    let look = |series: &str| {
        let of_series = |result: &&MethodResult| result.clock == clock && result.kernel_series() == series;
        let results: Vec<&MethodResult> = results.iter().filter(of_series).collect();
        specs.iter().map(|spec| spec.look(&results, series, series == promised)).collect::<Vec<_>>()
    };
    series.iter().flat_map(|series| look(series)).collect()
}

impl GoalSpec {
    fn look(&self, results: &[&MethodResult], series: &str, binding: bool) -> Goal {
        let (actual, figures) = match self.measure.take(results) {
            Ok((actual, figures)) => (Some(actual), figures),
            Err(missing) => (None, missing),
        };
        let met = actual.map(|actual| match self.bound {
            Bound::AtLeast => actual >= self.target,
            Bound::AtMost => actual <= self.target,
        });
        Goal {
            id: self.id.to_string(),
            text: self.text.to_string(),
            bound: self.bound,
            target: self.target,
            actual,
            met,
            figures,
            kernel_series: series.to_string(),
            binding,
        }
    }
}

impl Measure {
    /// The figure and what it was computed from, or what is missing.
    fn take(self, results: &[&MethodResult]) -> Result<(f64, String), String> {
        match self {
            Measure::P99Ratio(above, below) => {
                let p99 = |result: &MethodResult| result.latency_us.map(|latency| latency.p99);
                ratio(results, above, below, p99, "µs")
            }
            Measure::P95Ratio(above, below) => {
                let p95 = |result: &MethodResult| result.latency_us.map(|latency| latency.p95);
                ratio(results, above, below, p95, "µs")
            }
            Measure::MaxRatio(above, below) => {
                let max = |result: &MethodResult| result.latency_us.map(|latency| latency.max);
                ratio(results, above, below, max, "µs")
            }
            Measure::ZeroLossRatio(above, below) => {
                let rate = |result: &MethodResult| result.zero_loss.map(|of| of.frames_per_s);
                ratio(results, above, below, rate, "frames/s")
            }
            Measure::SdRatio(above, below) => {
                let sd = |result: &MethodResult| result.latency_us.map(|latency| latency.sd);
                ratio(results, above, below, sd, "µs")
            }
            Measure::BulkRatio(above, below) => ratio(results, above, below, |result| result.bulk_gbps, "Gbit/s"),
            Measure::CostRatio(above, below) => {
                let all =
                    |result: &MethodResult| result.cost.map(|cost| cost.host_ns_per_byte + cost.guest_ns_per_byte);
                ratio(results, above, below, all, "ns a byte")
            }
            Measure::LeastCount => {
                let least = results.iter().min_by_key(|result| result.count).ok_or("nothing was measured")?;
                Ok((least.count as f64, format!("{} requests with {}", number::count(least.count), least.method)))
            }
        }
    }
}

fn ratio(
    results: &[&MethodResult],
    above: Case,
    below: Case,
    figure: impl Fn(&MethodResult) -> Option<f64>,
    unit: &str,
) -> Result<(f64, String), String> {
    let of = |case: Case| {
        let is_case = |result: &&&MethodResult| result.method == case.method && result.load == case.load;
        let found = results.iter().find(is_case).and_then(|result| figure(result));
        found.ok_or_else(|| format!("{} was not measured", case.name()))
    };
    let (over, under) = (of(above)?, of(below)?);
    if under <= 0.0 {
        return Err(format!("{} is {under} {unit}, which divides nothing", below.name()));
    }
    let figure = |case: Case, value| format!("{} {} {unit}", case.name(), number::significant(value));
    Ok((over / under, format!("{}, {}", figure(above, over), figure(below, under))))
}

impl Case {
    fn name(self) -> String {
        format!("{} ({})", self.method, self.load.words())
    }
}
