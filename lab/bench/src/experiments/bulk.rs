//! `bulk`: Access'18, IV-F (Figure 13). The cost of a byte of bulk TCP for the host and the guest, received and sent,
//! through vhost-net and with outsourced sockets.
//!
//! In: cases on one emulated host. Out: a [`MethodResult`] for each, named `METHOD-receive` and `METHOD-send`, with the
//! throughput at the NIC and the CPU time per byte. One bulk VM runs a stock `iperf3` server. On
//! the virtual clock CPU time is counted in instructions (1 ns each). The guest's part is the time that the host's tick
//! accounts to guests (`/proc/stat`); the host's part is all the rest.

use std::net::IpAddr;
use std::path::Path;
use std::process::ExitCode;

use ontime_lab::images::Images;

use super::{Emulated, Experiment, Measured, Methods, Output, command};
use crate::bulk::{self, BulkAnalysis, BulkFlows};
use crate::error::MeasureError;
use crate::flood::{Flood, Kind};
use crate::goals::{Figure, GoalSpec, goal, tcp};
use crate::host::{BULK_VMS, CpuTime, Host, Site, Vm, boot_vm, size};
use crate::progress::progress;
use crate::schema::{Load, MethodResult, Metric, Run, Unit};
use crate::server::{self, Sockets, Wake};
use crate::trial::{self, CaseResults};

/// The methods: the VM's path under a method of `ontime apply`, and outsourced sockets under `partitioned`.
const METHODS: Methods = Methods(&[
    ("threaded", "vhost-net under threaded"),
    ("partitioned", "vhost-net under partitioned"),
    ("outsourcing", "outsourced sockets under partitioned"),
]);
/// TCP connections, as in `rt-server`.
const STREAMS: u8 = 4;
/// The measured VM.
const VM: Vm<'static> = BULK_VMS[0];
/// Address of the client.
const CLIENT: [u8; 4] = [10, 2, 0, 1];
/// The socket policy of the measured VM.
const SOCKETS: Sockets<'_> =
    Sockets { vm: VM.name, bind: "tcp/5201", reach: "10.2.0.0/24", channels: 0, wake: Wake::Idle };

/// Name of a case in results.
fn name(method: &str, send: bool) -> String {
    format!("{method}-{}", if send { "send" } else { "receive" })
}

/// Boots the host and measures every method in both directions. If a case fails, the remaining cases are measured while
/// the host lives.
fn measure(args: &Options, site: &Site, images: &Images) -> Result<CaseResults, MeasureError> {
    if args.methods.iter().any(|method| method == "outsourcing") {
        server::bring_module(site, images)?;
    }
    let host = Host::start(site, images, &[], &[])?;
    let mut present = None;
    let cases = args.methods.iter().flat_map(|method| [false, true].map(|send| (method, send)));
    trial::each(
        host,
        cases,
        |(method, send)| name(method, *send),
        |host, &(method, send)| {
            put(host, &mut present, method == "outsourcing")?;
            measure_case(host, args, method, send)
        },
    )
}

/// Runs the VM with a NIC or with outsourced sockets. `present` is the present kind.
fn put(host: &mut Host, present: &mut Option<bool>, outsourced: bool) -> Result<(), MeasureError> {
    if *present == Some(outsourced) {
        return Ok(());
    }
    *present = None;
    server::stop_server(host, VM.name)?;
    SOCKETS.write(host)?;
    let net = if outsourced { "sockets:bulk" } else { "bulk" };
    boot_vm(host.lab()?, &Vm { net, ..VM })?;
    *present = Some(outsourced);
    Ok(())
}

fn measure_case(host: &mut Host, args: &Options, method: &str, send: bool) -> Result<MethodResult, MeasureError> {
    let case = name(method, send);
    progress(format_args!("{case}: applying"));
    host.apply(if method == "outsourcing" { "partitioned" } else { method })?;
    let capture = host.capture("bulk");
    let kind = if send { Kind::Send { streams: STREAMS } } else { Kind::Receive { streams: STREAMS } };
    let flood = Flood::start(host, "bulk", &[(VM.name, VM.address)], kind)?;
    progress(format_args!("{case}: measuring"));
    let from = size(&capture);
    let before = host.cpu_time()?;
    host.shell(&format!("sleep {}", args.seconds))?;
    let after = host.cpu_time()?;
    let cut = host.dir.join(format!("{case}.pcap"));
    host.cut(&capture, from, &cut)?;
    flood.stop(host)?;
    let bulk = toward(&cut, IpAddr::from(if send { CLIENT } else { [10, 2, 0, 2] }))?;
    // The capture's sums are in the result.
    let _ = std::fs::remove_file(&cut);
    let mut result = MethodResult::new(&Run {
        load: Load::Tcp,
        bulk: Some(&bulk),
        cpu_share: after.share_since(&before, host.cpus),
        ..host.run(&case, &label(method, send))
    });
    result.metrics.extend(cost(&before, &after, host.cpus, &bulk).map(metrics).unwrap_or_default());
    Ok(result)
}

/// The throughput toward one side, from a cut that may end in the middle of a packet.
fn toward(capture: &Path, side: IpAddr) -> Result<BulkAnalysis, MeasureError> {
    let mut bulk = bulk::analyse(capture, BulkFlows { ports: Vec::new(), window: None })?;
    bulk.receivers.retain(|receiver| receiver.address == side);
    Ok(bulk)
}

/// CPU time per byte of bulk payload, ns. On the virtual clock an instruction is 1 ns.
#[derive(Debug)]
struct Cost {
    /// The host's: everything except idle time and guests.
    host_ns_per_byte: f64,
    /// The guests', by the host's tick.
    guest_ns_per_byte: f64,
}

fn metrics(Cost { host_ns_per_byte: host, guest_ns_per_byte: guest }: Cost) -> Vec<Metric> {
    let all = [("host-cost", host), ("guest-cost", guest), ("cost", host + guest)];
    all.map(|(key, ns)| Metric::number(key, Unit::NsPerByte, ns)).to_vec()
}

/// CPU time per byte. It is computed from rates, because the readings and the capture do not start and end together.
fn cost(before: &CpuTime, after: &CpuTime, cpus: u16, bulk: &BulkAnalysis) -> Option<Cost> {
    let bytes_per_ns = bulk.gbps().filter(|gbps| *gbps > 0.0)? / 8.0;
    let (all, guest) = (after.share_since(before, cpus)?, after.guest_share_since(before, cpus)?);
    let of = |share: f64| share * f64::from(cpus) / bytes_per_ns;
    Some(Cost { host_ns_per_byte: of((all - guest).max(0.0)), guest_ns_per_byte: of(guest) })
}

fn label(method: &str, send: bool) -> String {
    format!("{}, the VM {}", METHODS.description(method), if send { "sends" } else { "receives" })
}

#[derive(Debug, Clone, clap::Args)]
struct Options {
    /// Methods: threaded and partitioned (vhost-net), outsourcing; default: threaded, outsourcing
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',', default_value = "threaded,outsourcing")]
    methods: Vec<String>,
    /// Seconds of the host's time a case
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=60))]
    seconds: u32,
    #[command(flatten)]
    emulated: Emulated,
    #[command(flatten)]
    output: Output,
}

/// Measures every method, receiving and sending, on one emulated host.
fn execute(args: &Options) -> anyhow::Result<ExitCode> {
    let methods = METHODS.chosen(&args.methods)?;
    let with_module = methods.iter().any(|method| method == "outsourcing");
    let args = &Options { methods, ..args.clone() };
    let found = args.emulated.measure(with_module, |site, images| measure(args, &site, images))?;
    let notes = vec![
        "paper (Access'18, IV-B and IV-F, its hardware): outsourcing has 5.6 % more bulk throughput than threaded at \
         32 % less CPU, 0.64 of its CPU a byte; two copies through vhost-net, one by outsourced sockets"
            .to_owned(),
    ];
    Measured { experiment: "bulk", seed: 1, found, notes }.report(&args.output)
}

/// Figure 13.
#[derive(Debug)]
pub(super) struct Bulk;

impl Experiment for Bulk {
    command!(
        "bulk",
        "Access'18 IV-F (Fig. 13): what a byte of bulk TCP costs host and guest, through vhost-net and by outsourced \
         sockets",
        Options,
        execute
    );

    fn cases(&self) -> Vec<(String, Load)> {
        let both = |method| [false, true].map(|send| (name(method, send), Load::Tcp));
        METHODS.iter().flat_map(both).collect()
    }

    fn columns(&self) -> &'static [Figure] {
        &[Figure::Bulk, Figure::Cpu]
    }

    fn has_response_times(&self) -> bool {
        false
    }

    fn meaning(&self) -> &'static str {
        "CPU time of a byte of bulk payload: the host's is everything but idle and guests, the guests' is by the \
         host's tick."
    }

    fn goals(&self) -> Vec<GoalSpec> {
        vec![
            goal("receive-throughput", "outsourced TCP receive: throughput at least vhost-net's")
                .of(Figure::Bulk, tcp("outsourcing-receive"), tcp("threaded-receive"))
                .at_least(1.0),
            goal("receive-cost", "outsourced TCP receive: host and guest CPU time a byte at most 0.64 of threaded's")
                .of(Figure::Own("cost"), tcp("outsourcing-receive"), tcp("threaded-receive"))
                .at_most(0.64),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bulk::{BulkBasis, BulkReceiver};

    #[test]
    fn cost_is_busy_time_by_what_was_received() {
        let [before, after] = ["10.0 100 100 0", "20.0 300 500 0"].map(|text| CpuTime::parse(text).unwrap());
        let address = IpAddr::from(CLIENT);
        let receiver = BulkReceiver { address, connections: 1, bytes: 1, gbps: 0.8, basis: BulkBasis::Acknowledged };
        let bulk = BulkAnalysis { receivers: vec![receiver], window_ns: 1, ..BulkAnalysis::default() };
        // 80 % busy, 40 % in guests, 0.1 bytes per ns.
        let cost = cost(&before, &after, 1, &bulk).unwrap();
        assert!((cost.host_ns_per_byte - 4.0).abs() < 1e-9 && (cost.guest_ns_per_byte - 4.0).abs() < 1e-9, "{cost:?}");
        assert!(super::cost(&before, &after, 1, &BulkAnalysis::default()).is_none());
    }
}
