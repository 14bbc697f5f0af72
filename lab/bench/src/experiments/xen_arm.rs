//! `xen-arm`: Yoo, Kwak, Jo, Yoo, "Toward Under-Millisecond I/O Latency in Xen-ARM" (APSys'11), Figures 1, 3 and 6.
//! Random requests to a guest with its own CPU load, beside a VM that never idles.
//!
//! In: methods, loads and neighbours on one emulated host. Out: a [`MethodResult`] for each, named `METHOD-LOAD` beside
//! a bulk VM, and `METHOD-LOAD-rt` beside a VM of the same class and level. A request is an answered datagram
//! (`sockperf server` at FIFO 50 in the guest); the paper's is an answered ping. The response time is measured at the
//! NIC, from the request to the answer. The load is a process of normal priority in the guest that computes for its
//! share of each 10 ms (`ontime_lab::role::LOADED`).
//!
//! An instruction takes 1 ns here. With 4 ns the path of the VM alone would take longer than the effect to be shown
//! (docs/results/bench/xen-arm.md).

use std::process::ExitCode;

use ontime_lab::images::Images;
use ontime_lab::role::LOADED;

use super::{Emulated, Experiment, Measured, Methods, Output, command};
use crate::error::MeasureError;
use crate::goals::Figure::{self, Max};
use crate::goals::{GoalSpec, goal, idle};
use crate::host::{Host, RT_VM, Site, Vm, boot_vm};
use crate::paper::Figures;
use crate::progress::progress;
use crate::schema::{Load, MethodResult};
use crate::segments::{Depth, Trace};
use crate::server;
use crate::trial::{self, CaseResults, Requests, Trial};
use crate::workload::Workload;

/// The methods, in the order of the report. `credit` means Linux's defaults: every vCPU and vhost thread has its fair
/// share.
const METHODS: Methods = Methods(&[
    ("credit", "Linux as it is: fair shares, nothing applied"),
    ("partitioned", "one priority table: interrupt, NAPI, vhost, vCPU"),
    ("interrupt-context", "the same, and of one level's vCPUs those with a pending interrupt first"),
]);
/// The paper's CPU loads of the RT guest, percent.
const LOADS: [u8; 4] = [20, 40, 60, 80];
/// Number of requests in the paper.
const LONG: u64 = 1_000_000;
/// Requests at the start of each case that do not count.
const WARM_UP: u64 = 20;
/// The VM that never idles beside the RT VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Neighbour {
    /// A bulk VM, as in the paper.
    Bulk,
    /// An RT VM of the same level, with a runtime cap of one half. The paper does not have this case.
    Rt,
}

impl Neighbour {
    /// Name and address of the VM. The name decides its class.
    fn vm(self) -> Vm<'static> {
        match self {
            Neighbour::Bulk => Vm { name: "hog", role: "spin", net: "bulk", address: "10.2.0.2" },
            Neighbour::Rt => Vm { name: "rt2", role: "spin", net: "rt", address: "10.1.0.3" },
        }
    }

    fn words(self) -> &'static str {
        match self {
            Neighbour::Bulk => "a bulk VM",
            Neighbour::Rt => "an RT VM of the same level",
        }
    }
}

impl std::str::FromStr for Neighbour {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "bulk" => Ok(Neighbour::Bulk),
            "rt" => Ok(Neighbour::Rt),
            _ => Err(format!("neighbour '{text}' is not one of bulk, rt")),
        }
    }
}

/// Name of a case in results.
fn name(method: &str, load: u8, neighbour: Neighbour) -> String {
    match neighbour {
        Neighbour::Bulk => format!("{method}-{load}"),
        Neighbour::Rt => format!("{method}-{load}-rt"),
    }
}

/// Boots the host and its VMs and measures every method with every load and every neighbour. If a case fails, the
/// remaining cases are measured while the host lives.
fn measure(args: &Options, site: &Site, images: &Images) -> Result<CaseResults, MeasureError> {
    LOADED.bring(&site.dir.join("files"))?;
    let mut host = Host::start(site, images, &[], &server::CONFIG)?;
    boot_vm(host.lab()?, &Vm { role: LOADED.name, ..RT_VM })?;
    for neighbour in &args.beside {
        boot_vm(host.lab()?, &neighbour.vm())?;
        run(&mut host, *neighbour, false)?;
    }
    let loads = |neighbour| args.loads.iter().map(move |load| (*load, neighbour));
    let cases = args.beside.iter().flat_map(|neighbour| loads(*neighbour));
    let cases = cases.flat_map(|(load, neighbour)| args.methods.iter().map(move |method| (method, load, neighbour)));
    trial::each(
        host,
        cases,
        |(method, load, neighbour)| name(method, *load, *neighbour),
        |host, &(method, load, neighbour)| {
            let case = name(method, load, neighbour);
            progress(format_args!("{case}: applying"));
            if method == "credit" {
                host.reset()?;
            } else {
                host.apply(method)?;
            }
            host.settle()?;
            run(host, neighbour, true)?;
            let measured = measure_case(host, args, (method, load, neighbour));
            run(host, neighbour, false)?;
            measured
        },
    )
}

/// Continues or stops a neighbour as a whole.
fn run(host: &mut Host, neighbour: Neighbour, runs: bool) -> Result<(), MeasureError> {
    let (signal, name) = (if runs { "CONT" } else { "STOP" }, neighbour.vm().name);
    host.shell(&format!("kill -{signal} $(cat /run/lab-vm/{name}.pid)")).map(|_| ())
}

fn measure_case(
    host: &mut Host,
    args: &Options,
    (method, percent, neighbour): (&str, u8, Neighbour),
) -> Result<MethodResult, MeasureError> {
    let case = name(method, percent, neighbour);
    let workload = Workload::Loaded { percent };
    let trial = Trial {
        method: &case,
        label: &format!("{}; {percent} % CPU load in the guest, beside {}", METHODS.words(method), neighbour.words()),
        load: Load::None,
        requests: Requests::Client { workload, count: args.requests + WARM_UP, seed: args.seed },
        warmup: WARM_UP,
    };
    let trace = if args.segments { Some(Trace::start(host, &case, Depth::Segments)?) } else { None };
    let before = vcpu_time(host)?;
    let measured = trial.run(host);
    let after = vcpu_time(host)?;
    let segments = trace.map(|trace| trace.finish(host)).transpose();
    let mut result = measured?;
    if let Some(found) = segments? {
        found.add_to(&mut result);
    }
    if let (Some((ran, at)), Some((ran_then, then))) = (after, before) {
        let share = (ran - ran_then) / (at - then).max(1e-9);
        result.notes.push(format!("the RT guest's vCPU ran {:.0} % of the time", share * 100.0));
    }
    Ok(result)
}

/// CPU time of the RT VM's vCPU, and the host's uptime, s.
fn vcpu_time(host: &mut Host) -> Result<Option<(f64, f64)>, MeasureError> {
    let said = host.shell(
        "for task in /proc/$(cat /run/lab-vm/rt.pid)/task/*; do \
         read -r name < $task/comm; [ \"$name\" != 'CPU 0/KVM' ] || read -r ran rest < $task/schedstat; done; \
         read -r up idle < /proc/uptime; echo $ran $up",
    )?;
    let mut numbers = said.split_whitespace().map(|word| word.parse::<f64>().ok());
    Ok((|| Some((numbers.next()?? / 1e9, numbers.next()??)))())
}

#[derive(Debug, Clone, clap::Args)]
struct Options {
    /// Methods: credit (Linux as it is), partitioned, interrupt-context; default: all
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',')]
    methods: Vec<String>,
    /// CPU loads of the RT guest's own, percent
    #[arg(long = "cpu-load", value_name = "PERCENT", value_delimiter = ',', default_value = "20,40,60,80",
          value_parser = clap::value_parser!(u8).range(0..=100))]
    loads: Vec<u8>,
    /// The VM that never idles: bulk (as in the paper), rt (an RT VM of the same level, runtime cap one half)
    #[arg(long = "beside", value_name = "CLASS", value_delimiter = ',', default_value = "bulk")]
    beside: Vec<Neighbour>,
    /// Also trace where requests spend their time; the report's notes have the cost
    #[arg(long)]
    segments: bool,
    #[command(flatten)]
    emulated: Emulated,
    /// Counted requests a case
    #[arg(long, default_value_t = 1000)]
    requests: u64,
    /// The paper's million requests a case: 5.6 hours of the host's time each
    #[arg(long, conflicts_with = "requests")]
    long: bool,
    /// Seed of the gaps between requests
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    output: Output,
}

/// Measures every method with every load on one emulated host.
fn execute(args: &Options) -> anyhow::Result<ExitCode> {
    let methods = METHODS.chosen(&args.methods)?;
    let requests = if args.long { LONG } else { args.requests };
    let args = &Options { methods, requests, ..args.clone() };
    let found = args.emulated.measure(false, |site, images| measure(args, &site, images))?;
    let notes = vec![
        "a delay is the request's whole way at the wire: from its passage of the NIC to that of the guest's answer; \
         the paper's figures are of its parts"
            .to_owned(),
    ];
    Measured { experiment: "xen-arm", seed: args.seed, found, notes }.report(&args.output)
}

/// A goal: the maximum delay of a method at a CPU load of the guest.
macro_rules! worst {
    ($id:literal, $method:literal, $load:literal) => {
        goal(
            concat!($id, "-", $load),
            concat!($method, ", ", $load, " % CPU load: worst delay at most 200 us (paper: bounded by 1 ms at 20 %)"),
        )
        .only(Max, idle(concat!($method, "-", $load)))
        .at_most(200.0)
    };
}

/// Xen-ARM: a guest that computes, beside another VM.
#[derive(Debug)]
pub(crate) struct XenArm;

impl Experiment for XenArm {
    command!(
        "xen-arm",
        "Xen-ARM 3 and 4 (Figs. 1, 3, 6): requests at random to a guest with a CPU load of its own beside a VM that \
         never idles",
        Options,
        execute
    );

    fn cases(&self) -> Vec<(String, Load)> {
        let both = |method, load| [Neighbour::Bulk, Neighbour::Rt].map(|neighbour| name(method, load, neighbour));
        let of = METHODS.iter().flat_map(|method| LOADS.into_iter().flat_map(move |load| both(method, load)));
        of.map(|case| (case, Load::None)).collect()
    }

    fn columns(&self) -> &'static [Figure] {
        &[Figure::Count, Figure::Lost, Figure::P50, Figure::P99, Figure::P99_9, Max]
    }

    fn remarks(&self, figures: &Figures) -> Vec<String> {
        vec![figures.xen_arm.note()]
    }

    fn meaning(&self) -> &'static str {
        "Late: a delay over 1 ms, the paper's spike."
    }

    fn goals(&self) -> Vec<GoalSpec> {
        vec![
            worst!("worst", "partitioned", 20),
            worst!("worst", "partitioned", 40),
            worst!("worst", "partitioned", 60),
            worst!("worst", "partitioned", 80),
            worst!("first", "interrupt-context", 20),
            worst!("first", "interrupt-context", 40),
            worst!("first", "interrupt-context", 60),
            worst!("first", "interrupt-context", 80),
        ]
    }
}
