//! Goals of an experiment, typed, and whether a report meets them.
//!
//! In: [`GoalSpec`]s and the results. Out: [`Goal`]s with the figures they were computed from. A goal whose results are
//! missing is neither met nor not met, and says what is missing.

use Figure::{Bulk, Cost, HostTime, Max, P50, P95, P99, P99_9, Sd, ZeroLoss};

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

/// A figure of a result that goals compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Figure {
    /// Median of response times.
    P50,
    /// 95th percentile.
    P95,
    /// 99th percentile.
    P99,
    /// 99.9th percentile.
    P99_9,
    /// The largest.
    Max,
    /// Standard deviation.
    Sd,
    /// Zero-loss throughput.
    ZeroLoss,
    /// Bulk throughput.
    Bulk,
    /// CPU time a byte, host and guest.
    Cost,
    /// CPU time of the host a change of bandwidth.
    HostTime,
}

/// What a goal looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measure {
    /// The figure of the first divided by that of the second.
    Ratio(Figure, Case, Case),
    /// By how much the figure of the first is above that of the second; 0 where it is not.
    Beyond(Figure, Case, Case),
    /// The figure itself.
    Only(Figure, Case),
    /// Frames that came late, or never.
    Late(Case),
    /// Requests that met a priority inversion, in the trace.
    Hindered(Case),
    /// Deadlines that applications missed.
    Missed(Case),
    /// What is reserved beyond need and slack, as a share of these.
    Excess(Case),
    /// The smallest count of all results of the series.
    LeastCount,
}

impl Measure {
    /// The cases it looks at; none where it looks at all.
    pub fn cases(self) -> Vec<Case> {
        match self {
            Measure::Ratio(_, over, under) | Measure::Beyond(_, over, under) => vec![over, under],
            Measure::Only(_, case)
            | Measure::Late(case)
            | Measure::Hindered(case)
            | Measure::Missed(case)
            | Measure::Excess(case) => vec![case],
            Measure::LeastCount => Vec::new(),
        }
    }
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

const fn small(method: &'static str) -> Case {
    Case { method, load: Load::SmallPackets }
}

const fn tcp(method: &'static str) -> Case {
    Case { method, load: Load::Tcp }
}

const fn idle(method: &'static str) -> Case {
    Case { method, load: Load::None }
}

/// One of [`Measure::LeastCount`], where [`GoalSpec::of`], [`GoalSpec::only`] or [`GoalSpec::late`] says nothing else.
const fn goal(id: &'static str, text: &'static str) -> GoalSpec {
    GoalSpec { id, text, measure: Measure::LeastCount, bound: Bound::AtLeast, target: 0.0 }
}

impl GoalSpec {
    const fn of(self, figure: Figure, over: Case, under: Case) -> Self {
        Self { measure: Measure::Ratio(figure, over, under), ..self }
    }

    const fn beyond(self, figure: Figure, above: Case, base: Case) -> Self {
        Self { measure: Measure::Beyond(figure, above, base), ..self }
    }

    const fn only(self, figure: Figure, case: Case) -> Self {
        Self { measure: Measure::Only(figure, case), ..self }
    }

    const fn late(self, case: Case) -> Self {
        Self { measure: Measure::Late(case), ..self }
    }

    const fn hindered(self, case: Case) -> Self {
        Self { measure: Measure::Hindered(case), bound: Bound::AtMost, target: 0.0, ..self }
    }

    const fn missed(self, case: Case) -> Self {
        Self { measure: Measure::Missed(case), bound: Bound::AtMost, target: 0.0, ..self }
    }

    const fn excess(self, case: Case) -> Self {
        Self { measure: Measure::Excess(case), bound: Bound::AtMost, target: 0.01, ..self }
    }

    const fn at_least(self, target: f64) -> Self {
        Self { bound: Bound::AtLeast, target, ..self }
    }

    const fn at_most(self, target: f64) -> Self {
        Self { bound: Bound::AtMost, target, ..self }
    }
}

/// Those of RTVirt's Table 1, whenever its applications' jobs come.
const TABLE_1: [GoalSpec; 12] = [
    goal("misses-h-equiv", "H-EQUIV: paced misses no deadline").missed(idle("paced-h-equiv")),
    goal("misses-h-dec", "H-DEC: paced misses no deadline").missed(idle("paced-h-dec")),
    goal("misses-h-inc", "H-INC: paced misses no deadline").missed(idle("paced-h-inc")),
    goal("misses-nh-equiv", "NH-EQUIV: paced misses no deadline").missed(idle("paced-nh-equiv")),
    goal("misses-nh-dec", "NH-DEC: paced misses no deadline").missed(idle("paced-nh-dec")),
    goal("misses-nh-inc", "NH-INC: paced misses no deadline").missed(idle("paced-nh-inc")),
    goal("excess-h-equiv", "H-EQUIV: paced reserves at most 1 % above need and slack").excess(idle("paced-h-equiv")),
    goal("excess-h-dec", "H-DEC: paced reserves at most 1 % above need and slack").excess(idle("paced-h-dec")),
    goal("excess-h-inc", "H-INC: paced reserves at most 1 % above need and slack").excess(idle("paced-h-inc")),
    goal("excess-nh-equiv", "NH-EQUIV: paced reserves at most 1 % above need and slack").excess(idle("paced-nh-equiv")),
    goal("excess-nh-dec", "NH-DEC: paced reserves at most 1 % above need and slack").excess(idle("paced-nh-dec")),
    goal("excess-nh-inc", "NH-INC: paced reserves at most 1 % above need and slack").excess(idle("paced-nh-inc")),
];

/// Every experiment's goals, by its name on the command line: on the virtual clock, for the series that the project promises.
pub const GOALS: [(&str, &[GoalSpec]); 16] = [
    (
        "rt-server",
        &[
            goal("p99-vs-vanilla-small", "partitioned: p99 at least 20 times below vanilla, small packets")
                .of(P99, small("vanilla"), small("partitioned"))
                .at_least(20.0),
            goal("p99-vs-threaded-small", "partitioned: p99 at least 8 times below threaded, small packets")
                .of(P99, small("threaded"), small("partitioned"))
                .at_least(8.0),
            goal("p99-vs-vanilla-tcp", "partitioned: p99 at least 20 times below vanilla, TCP")
                .of(P99, tcp("vanilla"), tcp("partitioned"))
                .at_least(20.0),
            goal("p99-vs-threaded-tcp", "partitioned: p99 at least 8 times below threaded, TCP")
                .of(P99, tcp("threaded"), tcp("partitioned"))
                .at_least(8.0),
            goal("p99-vs-no-flood-small", "partitioned: p99 under small packets at most 1.25 times that without flood")
                .of(P99, small("partitioned"), idle("partitioned"))
                .at_most(1.25),
            goal("p99-vs-no-flood-tcp", "partitioned: p99 under TCP at most 1.25 times that without flood")
                .of(P99, tcp("partitioned"), idle("partitioned"))
                .at_most(1.25),
            goal("bulk-vs-vanilla", "partitioned: bulk throughput at least 0.95 of vanilla's")
                .of(Bulk, tcp("partitioned"), tcp("vanilla"))
                .at_least(0.95),
            goal("sd-vs-threaded-small", "outsourcing: SD at least 10 times below threaded, small packets")
                .of(Sd, small("threaded"), small("outsourcing"))
                .at_least(10.0),
            goal("sd-vs-threaded-tcp", "outsourcing: SD at least 10 times below threaded, TCP (paper: 6.7)")
                .of(Sd, tcp("threaded"), tcp("outsourcing"))
                .at_least(10.0),
            goal("outsourced-small", "outsourcing: p99 at most half of partitioned's, small packets")
                .of(P99, small("outsourcing"), small("partitioned"))
                .at_most(0.5),
            goal("outsourced-tcp", "outsourcing: p99 at most half of partitioned's, TCP")
                .of(P99, tcp("outsourcing"), tcp("partitioned"))
                .at_most(0.5),
            goal(
                "process-small",
                "outsourcing: p99 at most 1.3 times that of the same server as a host process, small packets",
            )
            .of(P99, small("outsourcing"), small("host-process"))
            .at_most(1.3),
            goal("process-tcp", "outsourcing: p99 at most 1.3 times that of the same server as a host process, TCP")
                .of(P99, tcp("outsourcing"), tcp("host-process"))
                .at_most(1.3),
            goal("requests", "at least 20,000 counted requests a method").at_least(20_000.0),
        ],
    ),
    (
        "vatc",
        &[
            goal("p95-by-streams", "vatc: p95 with four streams at most 1.1 times that with none")
                .of(P95, small("vatc-4"), idle("vatc-0"))
                .at_most(1.1),
            goal("p95-vs-prio", "vatc: p95 with four streams at least 40 times below prio's")
                .of(P95, small("prio-4"), small("vatc-4"))
                .at_least(40.0),
        ],
    ),
    (
        "xen-arm",
        &[
            goal("worst-20", "partitioned, 20 % CPU load: worst delay at most 200 us (paper: bounded by 1 ms at 20 %)")
                .only(Max, idle("partitioned-20"))
                .at_most(200.0),
            goal("worst-40", "partitioned, 40 % CPU load: worst delay at most 200 us (paper: bounded by 1 ms at 20 %)")
                .only(Max, idle("partitioned-40"))
                .at_most(200.0),
            goal("worst-60", "partitioned, 60 % CPU load: worst delay at most 200 us (paper: bounded by 1 ms at 20 %)")
                .only(Max, idle("partitioned-60"))
                .at_most(200.0),
            goal("worst-80", "partitioned, 80 % CPU load: worst delay at most 200 us (paper: bounded by 1 ms at 20 %)")
                .only(Max, idle("partitioned-80"))
                .at_most(200.0),
            goal(
                "first-20",
                "interrupt-context, 20 % CPU load: worst delay at most 200 us (paper: bounded by 1 ms at 20 %)",
            )
            .only(Max, idle("interrupt-context-20"))
            .at_most(200.0),
            goal(
                "first-40",
                "interrupt-context, 40 % CPU load: worst delay at most 200 us (paper: bounded by 1 ms at 20 %)",
            )
            .only(Max, idle("interrupt-context-40"))
            .at_most(200.0),
            goal(
                "first-60",
                "interrupt-context, 60 % CPU load: worst delay at most 200 us (paper: bounded by 1 ms at 20 %)",
            )
            .only(Max, idle("interrupt-context-60"))
            .at_most(200.0),
            goal(
                "first-80",
                "interrupt-context, 80 % CPU load: worst delay at most 200 us (paper: bounded by 1 ms at 20 %)",
            )
            .only(Max, idle("interrupt-context-80"))
            .at_most(200.0),
        ],
    ),
    (
        "kbp",
        &[
            goal("vm-64", "VM, 64 bytes, closed loop: slowest at least 100 times below NAPI's")
                .of(Max, small("napi-vm-64"), small("busypoll-vm-64"))
                .at_least(100.0),
            goal("vm-64-fast", "VM, 64 bytes, open loop: slowest at least 100 times below NAPI's")
                .of(Max, small("napi-vm-64-fast"), small("busypoll-vm-64-fast"))
                .at_least(100.0),
            goal("vm-512", "VM, 512 bytes, closed loop: slowest at least 100 times below NAPI's")
                .of(Max, small("napi-vm-512"), small("busypoll-vm-512"))
                .at_least(100.0),
            goal("vm-512-fast", "VM, 512 bytes, open loop: slowest at least 100 times below NAPI's")
                .of(Max, small("napi-vm-512-fast"), small("busypoll-vm-512-fast"))
                .at_least(100.0),
            goal("vm-1518", "VM, 1518 bytes, closed loop: slowest at least 100 times below NAPI's")
                .of(Max, small("napi-vm-1518"), small("busypoll-vm-1518"))
                .at_least(100.0),
            goal("vm-1518-fast", "VM, 1518 bytes, open loop: slowest at least 100 times below NAPI's (paper: 83)")
                .of(Max, small("napi-vm-1518-fast"), small("busypoll-vm-1518-fast"))
                .at_least(100.0),
            goal(
                "nat-64",
                "container behind NAT, 64 bytes, closed loop: slowest at least 26 times below NAPI's (paper: up to 26)",
            )
            .of(Max, small("napi-nat-64"), small("busypoll-nat-64"))
            .at_least(26.0),
            goal(
                "nat-64-fast",
                "container behind NAT, 64 bytes, open loop: slowest at least 26 times below NAPI's (paper: up to 26)",
            )
            .of(Max, small("napi-nat-64-fast"), small("busypoll-nat-64-fast"))
            .at_least(26.0),
            goal("macvlan-64", "container with macvlan, 64 bytes, closed loop: slowest at least 26 times below NAPI's")
                .of(Max, small("napi-macvlan-64"), small("busypoll-macvlan-64"))
                .at_least(26.0),
            goal(
                "macvlan-64-fast",
                "container with macvlan, 64 bytes, open loop: slowest at least 26 times below NAPI's",
            )
            .of(Max, small("napi-macvlan-64-fast"), small("busypoll-macvlan-64-fast"))
            .at_least(26.0),
            goal("rate-64", "VM, 64 bytes: no loss up to at least 1.36 times NAPI's rate")
                .of(ZeroLoss, small("busypoll-vm-64"), small("napi-vm-64"))
                .at_least(1.36),
            goal("rate-512", "VM, 512 bytes: no loss up to at least 1.75 times NAPI's rate")
                .of(ZeroLoss, small("busypoll-vm-512"), small("napi-vm-512"))
                .at_least(1.75),
            goal("rate-1518", "VM, 1518 bytes: no loss up to at least 3.28 times NAPI's rate")
                .of(ZeroLoss, small("busypoll-vm-1518"), small("napi-vm-1518"))
                .at_least(3.28),
        ],
    ),
    (
        "sampled-values",
        &[goal("no-late-frame", "partitioned: no frame late or lost beside bulk VMs")
            .late(small("partitioned"))
            .at_most(0.0)],
    ),
    ("rta-periodic", &TABLE_1),
    ("rta-sporadic", &TABLE_1),
    (
        "memcached-slo",
        &[
            goal("beside-cpu", "paced, beside VMs that never idle: p99.9 at most 114 us (RTVirt 379, RT-Xen A 114)")
                .only(P99_9, idle("paced-cpu"))
                .at_most(114.0),
            goal("beside-video", "paced, beside video VMs: p99.9 at most 296 us (RTVirt 303, RT-Xen B 296)")
                .only(P99_9, idle("paced-video"))
                .at_most(296.0),
            goal("video-misses", "paced: the video VMs miss no deadline (RTVirt: the worst 0.8 %)")
                .missed(idle("paced-video")),
        ],
    ),
    (
        "rta-scale",
        &[goal("misses", "paced: no deadline of a hundred applications is missed (RTVirt: none as 10 VMs with 10)")
            .missed(idle("paced"))],
    ),
    (
        "registration",
        &[
            goal("host", "a change takes at most 10 us of the host's CPU time (the paper's hypercall: 10 us)")
                .only(HostTime, idle("change"))
                .at_most(10.0),
            goal("guest", "a change takes a guest at most 10 us beyond a call that asks nobody")
                .beyond(P50, idle("change"), idle("same"))
                .at_most(10.0),
            goal("guest-spare", "with something spare: at most 10 us beyond a call that asks nobody")
                .beyond(P50, idle("spare"), idle("same"))
                .at_most(10.0),
        ],
    ),
    ("video", &[goal("misses", "paced: no application misses a deadline (RTVirt: 5 of 54 did)").missed(idle("paced"))]),
    (
        "ablation",
        &[
            goal("sd-without-sockets", "both techniques: SD at most that of partitioned softirq handling alone")
                .of(Sd, tcp("outsourcing"), tcp("partitioned"))
                .at_most(1.0),
            goal("sd-without-partitioning", "both techniques: SD at most that of outsourced sockets alone")
                .of(Sd, tcp("outsourcing"), tcp("outsourcing-only"))
                .at_most(1.0),
            goal("sd-of-interrupts", "woken idle loop: SD at most that of virtual interrupts")
                .of(Sd, tcp("outsourcing"), tcp("outsourcing-interrupt"))
                .at_most(1.0),
        ],
    ),
    (
        "memcached",
        &[
            goal("p99-vs-threaded", "outsourcing: p99 of GETs at most 0.33 of threaded's (the paper's 67 % less)")
                .of(P99, tcp("outsourcing"), tcp("threaded"))
                .at_most(0.33),
            goal("p99-vs-partitioned", "outsourcing: p99 of GETs at most partitioned's")
                .of(P99, tcp("outsourcing"), tcp("partitioned"))
                .at_most(1.0),
        ],
    ),
    (
        "segments",
        &[
            goal("inversions-small", "partitioned: no request meets a priority inversion under small packets")
                .hindered(small("partitioned")),
            goal("inversions-tcp", "partitioned: no request meets a priority inversion under TCP")
                .hindered(tcp("partitioned")),
        ],
    ),
    (
        "voip",
        &[
            goal(
                "p99-vs-threaded",
                "outsourcing: p99 of forward delays at most 0.37 of threaded's (the paper's 63 % less)",
            )
            .of(P99, tcp("outsourcing"), tcp("threaded"))
            .at_most(0.37),
            goal("p99-vs-partitioned", "outsourcing: p99 of forward delays at most partitioned's")
                .of(P99, tcp("outsourcing"), tcp("partitioned"))
                .at_most(1.0),
        ],
    ),
    (
        "bulk",
        &[
            goal("receive-throughput", "outsourced TCP receive: throughput at least vhost-net's")
                .of(Bulk, tcp("outsourcing-receive"), tcp("threaded-receive"))
                .at_least(1.0),
            goal("receive-cost", "outsourced TCP receive: host and guest CPU time a byte at most 0.64 of threaded's")
                .of(Cost, tcp("outsourcing-receive"), tcp("threaded-receive"))
                .at_most(0.64),
        ],
    ),
];

/// The goals of an experiment; none where it has none.
pub fn of_experiment(experiment: &str) -> &'static [GoalSpec] {
    GOALS.iter().find(|(of, _)| *of == experiment).map_or(&[], |(_, goals)| goals)
}

/// Looks at every goal for every kernel series that has a result on `clock`. Those of `promised` (a release or series)
/// come first and are binding, but on a real clock, where other work of the machine counts; the others are for information. Where a case
/// was measured more than once, the first result counts.
pub fn evaluate(specs: &[GoalSpec], results: &[MethodResult], clock: Clock, promised: &str) -> Vec<Goal> {
    let promised = kernel_series(promised);
    let exact = !matches!(clock, Clock::Real | Clock::Hardware);
    let mut series = vec![promised];
    for result in results.iter().filter(|result| result.clock == clock) {
        if !series.contains(&result.kernel_series()) {
            series.push(result.kernel_series());
        }
    }
    let look = |series: &str| {
        let of_series = |result: &&MethodResult| result.clock == clock && result.kernel_series() == series;
        let results: Vec<&MethodResult> = results.iter().filter(of_series).collect();
        specs.iter().map(|spec| spec.look(&results, series, exact && series == promised)).collect::<Vec<_>>()
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
            Measure::Ratio(figure, over, under) => ratio(results, figure, over, under),
            Measure::Beyond(figure, above, base) => {
                let (above, base, words) = pair(results, figure, above, base)?;
                Ok(((above - base).max(0.0), words))
            }
            Measure::Only(figure, case) => {
                let value = figure.of(case.find(results)?).ok_or_else(|| case.missing())?;
                Ok((value, format!("{} {} {}", case.name(), number::significant(value), figure.unit())))
            }
            Measure::Late(case) => {
                let late = case.find(results)?.late.ok_or_else(|| format!("{}: nothing is ever late", case.name()))?;
                let (late, lost) = (late.frames, case.find(results)?.lost);
                Ok(((late + lost) as f64, format!("{late} late, {lost} lost, {}", case.name())))
            }
            Measure::Hindered(case) => {
                let of = case.find(results)?.inversions.as_ref();
                let of = of.ok_or_else(|| format!("{}: inversions were not looked for (--inversions)", case.name()))?;
                let (hindered, requests) = (number::count(of.hindered), number::count(of.requests));
                Ok((of.hindered as f64, format!("{hindered} of {requests} in {:.0} s, {}", of.duration_s, case.name())))
            }
            Measure::Missed(case) => {
                let result = case.find(results)?;
                let rtas = result.rtas.as_ref().ok_or_else(|| format!("{}: there are no deadlines", case.name()))?;
                let jobs: u64 = rtas.rows.iter().map(|row| row.jobs).sum();
                if let Some(idle) = rtas.rows.iter().find(|row| row.jobs == 0) {
                    let (slice, period) = (number::us(idle.slice_us), number::us(idle.period_us));
                    return Err(format!("{}: that of {slice} us in {period} us did no job", case.name()));
                }
                Ok((rtas.missed as f64, format!("{} of {jobs} jobs, {}", rtas.missed, case.method)))
            }
            Measure::Excess(case) => {
                let rtas = case.find(results)?.rtas.as_ref();
                let (rtas, share) = rtas
                    .and_then(|rtas| Some((rtas, rtas.excess()?)))
                    .ok_or_else(|| format!("{}: nothing was reserved", case.name()))?;
                let reserved = number::significant(rtas.reserved_cpus.unwrap_or(0.0) + rtas.slack_cpus);
                let (needed, slack) = (number::significant(rtas.needed_cpus), number::significant(rtas.slack_cpus));
                Ok((share, format!("{reserved} CPUs for {needed} and slack of {slack}, {}", case.method)))
            }
            Measure::LeastCount => {
                let least = results.iter().min_by_key(|result| result.count).ok_or("nothing was measured")?;
                Ok((least.count as f64, format!("{} requests with {}", number::count(least.count), least.method)))
            }
        }
    }
}

fn ratio(results: &[&MethodResult], figure: Figure, over: Case, under: Case) -> Result<(f64, String), String> {
    let (above, below, words) = pair(results, figure, over, under)?;
    if below <= 0.0 {
        return Err(format!("{} is {below} {}, which divides nothing", under.name(), figure.unit()));
    }
    Ok((above / below, words))
}

/// The figure of both, and what they are in words.
fn pair(results: &[&MethodResult], figure: Figure, first: Case, second: Case) -> Result<(f64, f64, String), String> {
    let unit = figure.unit();
    let of = |case: Case| figure.of(case.find(results)?).ok_or_else(|| case.missing());
    let values = (of(first)?, of(second)?);
    let words = |case: Case, value| format!("{} {} {unit}", case.name(), number::significant(value));
    Ok((values.0, values.1, format!("{}, {}", words(first, values.0), words(second, values.1))))
}

impl Figure {
    fn of(self, result: &MethodResult) -> Option<f64> {
        let latency = result.latency_us;
        match self {
            P50 => latency.map(|of| of.p50),
            P95 => latency.map(|of| of.p95),
            P99 => latency.map(|of| of.p99),
            P99_9 => latency.map(|of| of.p99_9),
            Max => latency.map(|of| of.max),
            Sd => latency.map(|of| of.sd),
            ZeroLoss => result.zero_loss.map(|of| of.frames_per_s),
            Bulk => result.bulk_gbps,
            Cost => result.cost.map(|of| of.host_ns_per_byte + of.guest_ns_per_byte),
            HostTime => result.host_time.map(|of| of.sum_us()),
        }
    }

    fn unit(self) -> &'static str {
        match self {
            P50 | P95 | P99 | P99_9 | Max | Sd | HostTime => "µs",
            ZeroLoss => "frames/s",
            Bulk => "Gbit/s",
            Cost => "ns a byte",
        }
    }
}

impl Case {
    fn name(self) -> String {
        format!("{} ({})", self.method, self.load.words())
    }

    fn missing(self) -> String {
        format!("{} was not measured", self.name())
    }

    /// The first result of it.
    fn find<'a>(self, results: &[&'a MethodResult]) -> Result<&'a MethodResult, String> {
        let is_case = |result: &&&MethodResult| result.method == self.method && result.load == self.load;
        results.iter().find(is_case).copied().ok_or_else(|| self.missing())
    }
}
