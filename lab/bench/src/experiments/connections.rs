//! `connections`: the number of TCP connections per second that a VM can accept, each with one request, one reply and
//! its end, through vhost-net and with outsourced sockets. No paper has this experiment. Other systems that outsource
//! sockets collapsed in it (docs/results/bench/outsourcing.md).
//!
//! In: methods on one emulated host, without load. Out: a [`MethodResult`] per method, with the rate at the NIC. The RT
//! VM runs a stock `memcached`. Clients ([`crate::connections`]) connect, request a key that does not exist, read the
//! answer and close, each as fast as possible.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;

use ontime_lab::images::Images;

use super::{Emulated, Experiment, Measured, Methods, Output, command};
use crate::client_side::Order;
use crate::connections::{ANSWER, Connecting};
use crate::error::MeasureError;
use crate::frame::{Frame, Segment, parse};
use crate::goals::{Figure, GoalSpec, goal, idle};
use crate::host::{Host, PlannedHost, Site, size};
use crate::pcap::{PcapError, Record, Tail};
use crate::progress::progress;
use crate::schema::{Load, MethodResult, Metric, Run, Unit};
use crate::server::{self, PlacedServer, ServerPlace, Wake};
use crate::trial::{self, CaseResults};

/// The methods: the VM's path under a method of `ontime apply`, and outsourced sockets under `partitioned`.
const METHODS: Methods = Methods(&[
    ("threaded", "vhost-net, the paper's threaded interrupt handling"),
    ("partitioned", "vhost-net, every NAPI threaded, one priority table"),
    ("outsourcing", "outsourced sockets, as partitioned"),
]);

/// Boots the host and measures every method. If a method fails, the remaining methods are measured while the host
/// lives.
fn measure(args: &Options, site: &Site, images: &Images) -> Result<CaseResults, MeasureError> {
    let ground = PlannedHost::Emulated(site, images);
    let outsourced = args.methods.iter().any(|method| method == "outsourcing");
    let mut placed = PlacedServer::new(server::MEMCACHED, &ground, outsourced)?;
    let host = ground.start(&[], &server::CONFIG)?;
    trial::each(
        host,
        &args.methods,
        |method| (*method).clone(),
        |host, method| {
            let (place, applied) = match method.as_str() {
                "outsourcing" => (ServerPlace::Outsourced(Wake::Idle), "partitioned"),
                other => (ServerPlace::Vm, other),
            };
            placed.put(host, place)?;
            progress(format_args!("{method}: applying"));
            host.apply(applied)?;
            measure_case(host, args, method)
        },
    )
}

fn measure_case(host: &mut Host, args: &Options, method: &str) -> Result<MethodResult, MeasureError> {
    let server = SocketAddr::from((server::ADDRESS, server::MEMCACHED.port));
    make(host, Connecting { server, count: 1, clients: 1 })?;
    progress(format_args!("{method}: {} connections, {} at once", args.count, args.at_once));
    let capture = host.capture("rt");
    let from = size(&capture);
    let before = host.cpu_time()?;
    let asked = make(host, Connecting { server, count: args.count, clients: args.at_once });
    let after = host.cpu_time()?;
    asked?;
    let cut = host.dir.join(format!("{method}.pcap"));
    host.cut(&capture, from, &cut)?;
    let seen = analyse(&cut, server.port())?;
    // The capture's sums are in the result.
    let _ = std::fs::remove_file(&cut);
    let mut result = MethodResult::new(&Run {
        cpu_share: after.share_since(&before, host.cpus),
        ..host.run(method, METHODS.description(method))
    });
    if let Some(per_s) = seen.per_s() {
        result.metrics.extend([
            Metric::number("rate", Unit::PerS, per_s),
            Metric::count("connections", seen.completed),
            Metric::count("clients", args.at_once.into()),
        ]);
    }
    Ok(result)
}

/// Makes the connections, from the clients' side. The first waits until the server listens.
fn make(host: &mut Host, connections: Connecting) -> Result<(), MeasureError> {
    if host.has_client_cpu() {
        // In the host's time, all of them are made within the minute for which a closed one keeps its port.
        host.shell("ip netns exec clients sysctl -qw net.ipv4.tcp_tw_reuse=1")?;
        return Order::Connecting(connections).run(host.lab()?, &mut |_| {});
    }
    Ok(connections.make()?)
}

/// The connections seen at the NIC.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
struct Seen {
    /// Connections that were answered and closed by both sides.
    completed: u64,
    /// Time of the first and the last of these, ns.
    span: Option<(u64, u64)>,
}

impl Seen {
    fn per_s(&self) -> Option<f64> {
        let (first, last) = self.span?;
        (last > first).then(|| (self.completed - 1) as f64 * 1e9 / (last - first) as f64)
    }
}

/// Progress of a connection.
#[derive(Debug, Default, Clone, Copy)]
struct Progress {
    answered: bool,
    client_ended: bool,
    server_ended: bool,
}

/// Counts connections to a port, packet by packet. Does no I/O.
#[derive(Debug)]
struct Monitor {
    port: u16,
    open: HashMap<SocketAddr, Progress>,
    seen: Seen,
}

impl Monitor {
    fn new(port: u16) -> Self {
        Self { port, open: HashMap::new(), seen: Seen::default() }
    }

    fn record(&mut self, record: &Record<'_>) {
        if let Some(Frame::Tcp(segment)) = parse(record) {
            self.segment(record.at_ns, &segment);
        }
    }

    fn segment(&mut self, at_ns: u64, segment: &Segment<'_>) {
        let (client, by_client) = match (segment.to.port() == self.port, segment.from.port() == self.port) {
            (true, _) => (segment.from, true),
            (_, true) => (segment.to, false),
            _ => return,
        };
        if by_client && segment.syn {
            // Also if the client's port is used again.
            self.open.insert(client, Progress::default());
        }
        // A connection from before the capture, or a finished one: further packets are ignored.
        let Some(of) = self.open.get_mut(&client) else { return };
        of.answered |= !by_client && segment.len as usize >= ANSWER.len();
        of.client_ended |= by_client && segment.fin;
        of.server_ended |= !by_client && segment.fin;
        if of.answered && of.client_ended && of.server_ended {
            self.open.remove(&client);
            self.seen.completed += 1;
            self.seen.span = Some((self.seen.span.map_or(at_ns, |(first, _)| first), at_ns));
        }
    }
}

fn analyse(path: &Path, port: u16) -> Result<Seen, PcapError> {
    let mut tail = Tail::open(path)?;
    let mut monitor = Monitor::new(port);
    match tail.read_new(|record| monitor.record(&record)) {
        Ok(_) | Err(PcapError::Damaged { .. }) => Ok(monitor.seen),
        Err(error) => Err(error),
    }
}

#[derive(Debug, Clone, clap::Args)]
struct Options {
    /// Methods: threaded and partitioned (vhost-net), outsourcing
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',')]
    methods: Vec<String>,
    /// Connections a method
    #[arg(long, default_value_t = 2_000, value_parser = clap::value_parser!(u64).range(2..=20_000))]
    count: u64,
    /// Connections at once
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=100))]
    at_once: u32,
    #[command(flatten)]
    emulated: Emulated,
    #[command(flatten)]
    output: Output,
}

/// Measures every method on one emulated host.
fn execute(args: &Options) -> anyhow::Result<ExitCode> {
    let methods = METHODS.chosen(&args.methods)?;
    let with_module = methods.iter().any(|method| method == "outsourcing");
    let args = &Options { methods, ..args.clone() };
    let found = args.emulated.measure(with_module, |site, images| measure(args, &site, images))?;
    Measured { experiment: "connections", seed: 1, found, notes: Vec::new() }.report(&args.output)
}

/// New TCP connections.
#[derive(Debug)]
pub(super) struct Connections;

impl Experiment for Connections {
    command!(
        "connections",
        "How many fresh TCP connections a second a VM takes, of one request each, through vhost-net and by outsourced \
         sockets",
        Options,
        execute
    );

    fn cases(&self) -> Vec<(String, Load)> {
        METHODS.under(&[Load::None])
    }

    fn columns(&self) -> &'static [Figure] {
        &[Figure::Cpu]
    }

    fn has_response_times(&self) -> bool {
        false
    }

    fn meaning(&self) -> &'static str {
        "TCP connections of one request each, answered and closed by both sides, at the NIC. On the virtual clock a \
         second is a count of instructions."
    }

    fn goals(&self) -> Vec<GoalSpec> {
        vec![
            goal(
                "rate-threaded",
                "outsourced sockets: at least as many fresh TCP connections a second as vhost-net, threaded",
            )
            .of(Figure::Own("rate"), idle("outsourcing"), idle("threaded"))
            .at_least(1.0),
            goal("rate-partitioned", "outsourced sockets: at least as many as vhost-net, partitioned")
                .of(Figure::Own("rate"), idle("outsourcing"), idle("partitioned"))
                .at_least(1.0),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(from_client: bool, flags: &str, len: u32) -> Segment<'static> {
        let (client, server) = ("10.1.0.1:40000".parse().unwrap(), "10.1.0.2:11211".parse().unwrap());
        let (from, to) = if from_client { (client, server) } else { (server, client) };
        let [syn, fin] = ['S', 'F'].map(|flag| flags.contains(flag));
        Segment { from, to, sequence: 0, acknowledged: None, len, syn, fin, payload: &[] }
    }

    #[test]
    fn a_connection_counts_once_it_is_answered_and_closed_by_both() {
        let mut monitor = Monitor::new(11_211);
        let whole = [(true, "S", 0), (false, "S", 0), (true, "", 13), (false, "", 5), (true, "F", 0), (false, "F", 0)];
        for (at, (from_client, flags, len)) in whole.into_iter().enumerate() {
            assert_eq!(monitor.seen.completed, 0);
            monitor.segment(at as u64, &segment(from_client, flags, len));
        }
        assert_eq!(monitor.seen, Seen { completed: 1, span: Some((5, 5)) });
        // A retransmission, and another connection without an answer, on the same port.
        monitor.segment(6, &segment(false, "F", 0));
        for (from_client, flags, len) in [(true, "S", 0), (true, "", 13), (true, "F", 0), (false, "F", 0)] {
            monitor.segment(7, &segment(from_client, flags, len));
        }
        assert_eq!(monitor.seen.completed, 1);
        for (from_client, flags, len) in whole {
            monitor.segment(1_000_000_005, &segment(from_client, flags, len));
        }
        assert_eq!(monitor.seen.per_s(), Some(1.0));
    }

    #[test]
    fn nothing_has_no_rate() {
        assert_eq!(Seen::default().per_s(), None);
        assert_eq!(Seen { completed: 1, span: Some((5, 5)) }.per_s(), None);
    }
}
