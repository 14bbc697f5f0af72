//! The goals: every experiment's, by its name on the command line.
//!
//! In: nothing. Out: [`GOALS`]. A constant: which case's figure is compared with which, and the target.

use super::Figure::{Bulk, Connections, Cost, HostTime, Max, P50, P95, P99, P99_9, Sd, ZeroLoss};
use super::{Case, GoalSpec, Measure};
use crate::schema::{Bound, Load};

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

/// Every experiment's goals, by its name on the command line: on the virtual clock, for the series that the project
/// promises.
pub const GOALS: [(&str, &[GoalSpec]); 17] = [
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
            goal("unpolled-64", "VM, 64 bytes, closed loop, without polling: slowest at least 100 times below NAPI's")
                .of(Max, small("napi-vm-64"), small("partitioned-vm-64"))
                .at_least(100.0),
            goal("unpolled-512", "VM, 512 bytes, closed loop, without polling: slowest at least 100 times below NAPI's")
                .of(Max, small("napi-vm-512"), small("partitioned-vm-512"))
                .at_least(100.0),
            goal("unpolled-1518", "VM, 1518 bytes, closed loop, without polling: slowest at least 100 times below NAPI's")
                .of(Max, small("napi-vm-1518"), small("partitioned-vm-1518"))
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
            goal("nat-512", "container behind NAT, 512 bytes, closed loop: slowest at least 26 times below NAPI's")
                .of(Max, small("napi-nat-512"), small("busypoll-nat-512"))
                .at_least(26.0),
            goal("nat-512-fast", "container behind NAT, 512 bytes, open loop: slowest at least 26 times below NAPI's")
                .of(Max, small("napi-nat-512-fast"), small("busypoll-nat-512-fast"))
                .at_least(26.0),
            goal("nat-1518", "container behind NAT, 1518 bytes, closed loop: slowest at least 26 times below NAPI's")
                .of(Max, small("napi-nat-1518"), small("busypoll-nat-1518"))
                .at_least(26.0),
            goal("nat-1518-fast", "container behind NAT, 1518 bytes, open loop: slowest at least 26 times below NAPI's")
                .of(Max, small("napi-nat-1518-fast"), small("busypoll-nat-1518-fast"))
                .at_least(26.0),
            goal("macvlan-512", "container with macvlan, 512 bytes, closed loop: slowest at least 26 times below NAPI's")
                .of(Max, small("napi-macvlan-512"), small("busypoll-macvlan-512"))
                .at_least(26.0),
            goal("macvlan-512-fast", "container with macvlan, 512 bytes, open loop: slowest at least 26 times below NAPI's")
                .of(Max, small("napi-macvlan-512-fast"), small("busypoll-macvlan-512-fast"))
                .at_least(26.0),
            goal("macvlan-1518", "container with macvlan, 1518 bytes, closed loop: slowest at least 26 times below NAPI's")
                .of(Max, small("napi-macvlan-1518"), small("busypoll-macvlan-1518"))
                .at_least(26.0),
            goal("macvlan-1518-fast", "container with macvlan, 1518 bytes, open loop: slowest at least 26 times below NAPI's")
                .of(Max, small("napi-macvlan-1518-fast"), small("busypoll-macvlan-1518-fast"))
                .at_least(26.0),
            goal("vm-64-hours", "VM, 64 bytes, hours: slowest at least 100 times below NAPI's")
                .of(Max, small("napi-vm-64-hours"), small("busypoll-vm-64-hours"))
                .at_least(100.0),
            goal("vm-512-hours", "VM, 512 bytes, hours: slowest at least 100 times below NAPI's")
                .of(Max, small("napi-vm-512-hours"), small("busypoll-vm-512-hours"))
                .at_least(100.0),
            goal("vm-1518-hours", "VM, 1518 bytes, hours: slowest at least 100 times below NAPI's (paper: 83 in 60 s)")
                .of(Max, small("napi-vm-1518-hours"), small("busypoll-vm-1518-hours"))
                .at_least(100.0),
            goal("nat-64-hours", "container behind NAT, 64 bytes, hours: slowest at least 26 times below NAPI's")
                .of(Max, small("napi-nat-64-hours"), small("busypoll-nat-64-hours"))
                .at_least(26.0),
            goal("macvlan-64-hours", "container with macvlan, 64 bytes, hours: slowest at least 26 times below NAPI's")
                .of(Max, small("napi-macvlan-64-hours"), small("busypoll-macvlan-64-hours"))
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
            goal("guest", "a change takes a guest at most 10 us beyond the call itself and the bare notification")
                .beyond(P50, idle("change"), &[idle("same"), idle("bare")])
                .at_most(10.0),
            goal("guest-in-all", "the same beyond the bare notification alone, the call itself in it: at most 10 us")
                .beyond(P50, idle("change"), &[idle("bare")])
                .at_most(10.0),
            goal("guest-spare", "with something spare: at most 10 us beyond a call that asks nobody")
                .beyond(P50, idle("spare"), &[idle("same")])
                .at_most(10.0),
            goal("host", "a change takes at most 10 us of the host's CPU time beyond the bare notification, with what it does after it has answered")
                .beyond(HostTime, idle("change"), &[idle("bare")])
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
    (
        "connections",
        &[
            goal("rate-threaded", "outsourced sockets: at least as many fresh TCP connections a second as vhost-net, threaded")
                .of(Connections, idle("outsourcing"), idle("threaded"))
                .at_least(1.0),
            goal("rate-partitioned", "outsourced sockets: at least as many as vhost-net, partitioned")
                .of(Connections, idle("outsourcing"), idle("partitioned"))
                .at_least(1.0),
        ],
    ),
];

/// The goals of an experiment; none where it has none.
pub fn of_experiment(experiment: &str) -> &'static [GoalSpec] {
    GOALS.iter().find(|(of, _)| *of == experiment).map_or(&[], |(_, goals)| goals)
}
