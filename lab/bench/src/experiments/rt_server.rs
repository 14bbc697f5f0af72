//! `rt-server`: Access'18, IV-A and B. A simple RT server in a VM, beside two VMs that receive TCP at full speed.
//!
//! In: [`Case`]s and an emulated host. Out: a [`MethodResult`] per case. One [`measure`] is one boot of the host. Three
//! VMs are started as a user would start them (QEMU, vhost-net, bridges), and `ontime daemon` runs. Each case is a
//! method that `ontime apply` switches to, and a place of the server ([`crate::server`]). The requests and the flood
//! ([`crate::flood`]) come from outside the host, and all times are taken there. `ablation` and `segments` measure
//! other cases in the same way; `memcached` and `voip` use another [`Workload`].

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use anyhow::Context;
use ontime_cli::{print_stderr, usage};
use ontime_lab::{Clock, Kernel, Link, isolate};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use super::{Emulated, Experiment, Hardware, Measured, Methods, Output, command};
use crate::command::lab;
use crate::command::product::Product;
use crate::error::MeasureError;
use crate::goals::Figure::{Bulk, Own, P99, Sd};
use crate::goals::{GoalSpec, goal, idle, small, tcp};
use crate::hardware::HardwareError;
use crate::host::{self, AS_IS, BULK_VMS, Host, PlannedHost, RT_VM, Site};
use crate::memcached::ACCESS;
use crate::paper::Figures;
use crate::progress::{begin_messages_with, progress};
use crate::schema::{Load, MethodResult, PaperRow};
use crate::segments::{Trace, TraceDetail};
use crate::server::{self, PlacedServer, ServerPlace, Wake};
use crate::trial::{self, CaseCount, CaseResults, Requests, Trial};
use crate::workload::{SOCKPERF, Workload};

/// Requests at the start of each case that do not count: they fill caches, resolve ARP, and let the client learn the
/// clock.
const WARM_UP: u64 = 20;

/// The cases: methods of `ontime apply`; `rt-default`, which is `vanilla` on an RT kernel; outsourced sockets; the
/// limit ([`HOST_PROCESS`]); and the present state of a real host.
const CASES: Methods = Methods(&[
    ("vanilla", "stock kernel without PREEMPT_RT, RT vCPU and vNIC threads at FIFO"),
    ("rt-default", "PREEMPT_RT kernel with its defaults, RT vCPU and vNIC threads at FIFO"),
    ("threaded", "the paper's threaded interrupt handling: Table 2's priorities, NAPI not threaded"),
    (EXCLUSIVE, "the paper's exclusive CPU: one CPU for the RT group, everything else on the rest"),
    ("partitioned", "Ontime: every NAPI threaded, one priority table for the whole path"),
    ("outsourcing", "Ontime: as partitioned, and the VM's sockets are the host's; its halt ends, no interrupt"),
    ("outsourcing-interrupt", "as outsourcing, but arrivals interrupt the guest"),
    ("outsourcing-only", "outsourced sockets on the host path of threaded"),
    (HOST_PROCESS, "the same server as a process of the host, under partitioned: the limit"),
    (AS_IS, "the host as it stands"),
]);

/// The method that needs two CPUs.
const EXCLUSIVE: &str = "exclusive";
/// The limit: the same server as a process of the host, without a VM.
pub(crate) const HOST_PROCESS: &str = "host-process";

/// A method under a load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Case {
    /// The name in results: one of [`CASES`].
    pub(crate) name: String,
    /// The traffic that the bulk VMs receive.
    pub(crate) load: Load,
}

impl Case {
    /// The method of `ontime apply` for this case.
    pub(crate) fn method(&self) -> &str {
        match self.name.as_str() {
            "rt-default" => "vanilla",
            "outsourcing" | "outsourcing-interrupt" | HOST_PROCESS => "partitioned",
            "outsourcing-only" => "threaded",
            method => method,
        }
    }

    /// Whether the case needs the guest module.
    pub(crate) fn is_outsourced(&self) -> bool {
        matches!(self.place(), ServerPlace::Outsourced(_))
    }

    /// Where the server runs.
    pub(crate) fn place(&self) -> ServerPlace {
        match self.name.as_str() {
            "outsourcing" | "outsourcing-only" => ServerPlace::Outsourced(Wake::Idle),
            "outsourcing-interrupt" => ServerPlace::Outsourced(Wake::Interrupt),
            HOST_PROCESS => ServerPlace::Process,
            _ => ServerPlace::Vm,
        }
    }

    /// Text for progress messages, and for cases that could not be measured.
    fn description(&self) -> String {
        format!("{}, {}", self.name, self.load.description())
    }

    pub(crate) fn label(&self) -> &str {
        CASES.description(&self.name)
    }
}

/// What to measure on one host.
#[derive(Debug, Clone)]
struct RtServerPlan {
    /// The server and its client.
    workload: Workload,
    /// Lines for the host's `host.toml`, placed above its NIC tables.
    settings: Vec<String>,
    /// Words for the command line of the RT guest's kernel (emulated hosts).
    appended: Vec<String>,
    /// The cases, in order of measurement.
    cases: Vec<Case>,
    /// What `ontime trace` records in the host during the case ([`crate::segments`]); none without a trace.
    traced: Option<TraceDetail>,
    /// Minimum of counted requests per case.
    requests: u64,
    /// Seed of the gaps between requests.
    seed: u64,
}

/// Boots the host, starts the VMs (a real host has both already) and measures every case. Before each case, `begun`
/// gets its words. If a case fails, it is told by its name, and the remaining cases are measured while the host lives.
fn measure(
    plan: &RtServerPlan,
    ground: PlannedHost<'_>,
    begun: &mut dyn FnMut(&str),
    name: impl Fn(&&Case) -> String,
) -> Result<CaseResults, MeasureError> {
    let outsourced = plan.cases.iter().any(Case::is_outsourced);
    let mut placed_server = PlacedServer::new(plan.workload.server(), &ground, outsourced)?;
    let settings: String = plan.settings.iter().map(|line| format!("{line}\n")).collect();
    let config = server::CONFIG.map(|(name, text)| (name, format!("{settings}{text}")));
    let config: Vec<(&str, &str)> = config.iter().map(|(name, text)| (*name, text.as_str())).collect();
    if let PlannedHost::Emulated(site, _) = &ground {
        append(site, &plan.appended)?;
    }
    let host = ground.start(&BULK_VMS, &config)?;
    trial::each_of(host, &plan.cases, name, |host, case, results| {
        begun(&case.description());
        placed_server.put(host, case.place())?;
        let mut result = measure_case(host, plan, case)?;
        result.notes.extend(plan.settings.iter().map(|line| format!("host.toml: {line}")));
        result.notes.extend(plan.appended.iter().map(|word| format!("the RT guest's kernel: {word}")));
        results.push(result);
        Ok(())
    })
}

/// Adds these words to the command line of the RT guest's kernel (`lab-vm`).
fn append(site: &Site, words: &[String]) -> Result<(), MeasureError> {
    let path = site.dir.join("files").join(format!("append-{}", RT_VM.name));
    let write = || {
        path.parent().map_or(Ok(()), fs::create_dir_all)?;
        fs::write(&path, words.join("\n"))
    };
    write().map_err(|source| MeasureError::File { path: path.clone(), source })
}

/// Measures one case.
fn measure_case(host: &mut Host, plan: &RtServerPlan, case: &Case) -> Result<MethodResult, MeasureError> {
    let name = format!("{}-{}", case.name, case.load.name());
    progress(format_args!("{}: applying", case.description()));
    if case.name == "vanilla" && host.target().is_some() && host.shell("uname -v")?.contains("PREEMPT_RT") {
        let said = "vanilla is a kernel without PREEMPT_RT, and this host's has it: its defaults are rt-default";
        return Err(HardwareError::NotHere(said.to_owned()).into());
    }
    host.apply(case.method())?;
    let trial = Trial {
        method: &case.name,
        label: case.label(),
        load: case.load,
        requests: Requests::Client { workload: plan.workload, count: plan.requests + WARM_UP, seed: plan.seed },
        warmup: WARM_UP,
    };
    let Some(depth) = plan.traced else {
        return trial.run(host);
    };
    host.lab()?;
    let trace = Trace::start(host, &name, depth)?;
    let measured = trial.run(host);
    // The flood has ended, so the trace has CPU time to write its report. It must have ended before the next case.
    let segments = trace.finish(host);
    let mut result = measured?;
    segments?.add_to(&mut result);
    Ok(result)
}

/// An experiment with an RT server.
#[derive(Debug, Clone, Copy)]
struct Kind {
    /// The name on the command line and in reports.
    name: &'static str,
    /// The server and its client.
    workload: Workload,
    /// Methods that are measured by default.
    methods: &'static [&'static str],
    /// What a trace records during the measurement; none without a trace.
    traced: Option<TraceDetail>,
}

/// Table 3 and Figures 6 to 8. With one CPU, [`EXCLUSIVE`] is left out.
const RT_SERVER: Kind = Kind {
    name: "rt-server",
    workload: SOCKPERF,
    methods: &["vanilla", "rt-default", "threaded", EXCLUSIVE, "partitioned", "outsourcing", "host-process"],
    traced: None,
};
/// Figure 9, a to d, and the case without both techniques.
const ABLATION: Kind = Kind {
    name: "ablation",
    workload: SOCKPERF,
    methods: &["outsourcing", "partitioned", "outsourcing-only", "outsourcing-interrupt", "threaded"],
    traced: None,
};
/// Figure 11. An outsourced request has no packet in the guest that the trace could follow.
const SEGMENTS: Kind = Kind {
    name: "segments",
    workload: SOCKPERF,
    methods: &["vanilla", "rt-default", "threaded", "partitioned"],
    traced: Some(TraceDetail::Segments),
};
const SEGMENTS_PAPER: &str = "paper (Access'18, IV-D): Figure 11 is a plot without numbers. Its findings: most of the \
    variance is in host receive and in the guest; the inversions of host receive are gone with an exclusive CPU and \
    with partitioned softirqs; four probes cost under 0.5 us. The paper's figures beside ours are the whole \
    response's, Table 3";

/// Default methods for an application: as for the RT server.
const APPLICATION: &[&str] = &["vanilla", "threaded", "partitioned", "outsourcing", "host-process"];
/// Figure 14.
const VOIP: Kind = Kind { name: "voip", workload: Workload::Voip, methods: APPLICATION, traced: None };
/// Figure 15.
const MEMCACHED: Kind = Kind {
    name: "memcached",
    workload: Workload::Memcached { traffic: ACCESS, connections: CONNECTIONS },
    methods: APPLICATION,
    traced: None,
};
/// Default number of the memcached client's connections. The paper does not state its number.
const CONNECTIONS: u8 = 4;

#[derive(Debug, clap::Args)]
struct MemcachedOptions {
    #[command(flatten)]
    args: Args,
    /// TCP connections of the client; requests go by each in turn
    #[arg(long, default_value_t = CONNECTIONS, value_parser = clap::value_parser!(u8).range(1..=64))]
    connections: u8,
}

/// Runs the memcached experiment.
fn memcached(args: &MemcachedOptions) -> anyhow::Result<ExitCode> {
    execute(
        &args.args,
        &Kind { workload: Workload::Memcached { traffic: ACCESS, connections: args.connections }, ..MEMCACHED },
    )
}

#[derive(Debug, clap::Args)]
struct SegmentsOptions {
    #[command(flatten)]
    args: Args,
    /// Also look for priority inversions, by more probes: which thread waited behind which, and how often
    #[arg(long)]
    inversions: bool,
}

/// Runs the experiment on the segments of a request's way.
fn segments(args: &SegmentsOptions) -> anyhow::Result<ExitCode> {
    let depth = if args.inversions { TraceDetail::Inversions } else { TraceDetail::Segments };
    execute(&args.args, &Kind { traced: Some(depth), ..SEGMENTS })
}

#[derive(Debug, clap::Args)]
struct Args {
    /// Methods: vanilla (a kernel without PREEMPT_RT), rt-default, threaded, exclusive, partitioned, outsourcing,
    /// outsourcing-interrupt, outsourcing-only (on threaded's path), host-process (the limit); default: those of the
    /// experiment, in rt-server with exclusive if there are two CPUs
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',')]
    methods: Vec<String>,
    /// The host's clock: virtual or real
    #[arg(long, default_value = "virtual")]
    clock: Clock,
    /// CPUs of the host, 1 to 8 (default: 1 on the virtual clock, 2 on the real one); `exclusive` needs 2
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=8))]
    cpus: Option<u8>,
    /// The link of each NIC to clients inside, such as 1gbit,5us,256: each frame's time at that rate, a delay, and the
    /// most frames that wait; more are dropped and counted (default: 10gbit,5us,1000)
    #[arg(long, value_name = "RATE,DELAY,PACKETS", conflicts_with = "hardware")]
    link: Option<Link>,
    /// The host's RT kernel: 7.2-rt or 6.12-rt (may be given twice)
    #[arg(id = "kernel", long = "kernel", default_value = "7.2-rt", value_delimiter = ',')]
    kernels: Vec<Kernel>,
    /// Counted requests a method
    #[arg(long, default_value_t = 1000)]
    requests: u64,
    /// Seed of the gaps between requests
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A line for the host's host.toml (docs/reference/hostnet.md; may be repeated): 'without = ["napi-weight"]',
    /// 'bulk_napi_weight = 8'
    #[arg(long = "host-toml", value_name = "LINE")]
    settings: Vec<String>,
    /// A word for the command line of the RT guest's kernel (may be repeated): sysctl.net.core.busy_read=1
    #[arg(long = "guest-append", value_name = "WORD")]
    appended: Vec<String>,
    /// What the bulk VMs receive: tcp (at full speed, as in the paper), small-packets or large-packets (UDP at full
    /// speed), none
    #[arg(long = "load", value_name = "LOAD", value_delimiter = ',', default_value = "tcp")]
    loads: Vec<Load>,
    #[command(flatten)]
    output: Output,
    /// Real seconds without a sign of life after which a host counts as hung, 30 to 86400; raise it on a busy machine
    #[arg(long, default_value_t = 180)]
    silence: u64,
    /// Directory for captures and logs (default: removed at the end)
    #[arg(long)]
    out: Option<PathBuf>,
    #[command(flatten)]
    product: Product,
    #[command(flatten)]
    hardware: Hardware,
    /// One host's part, for the command that starts this one
    #[arg(long, hide = true)]
    part: bool,
}

impl Args {
    /// The host with this kernel.
    fn emulated(&self, kernel: Kernel) -> Emulated {
        let Self { clock, cpus, silence, link, .. } = *self;
        let (out, product) = (self.out.clone(), self.product.clone());
        Emulated { clock, cpus, kernel, silence, out, product, link, without_clients: false }
    }
}

/// One emulated host: its kernel and the methods measured on it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Part {
    kernel: Kernel,
    clock: Clock,
    methods: Vec<String>,
}

/// The plan for one host: these methods, each under every load.
fn plan(args: &Args, kind: &Kind, methods: &[String]) -> RtServerPlan {
    let of = |name: &String| args.loads.iter().map(|load| Case { name: name.clone(), load: *load }).collect::<Vec<_>>();
    RtServerPlan {
        workload: kind.workload,
        settings: args.settings.clone(),
        appended: args.appended.clone(),
        cases: methods.iter().flat_map(of).collect(),
        traced: kind.traced,
        requests: args.requests,
        seed: args.seed,
    }
}

/// The hosts that the chosen methods need: `vanilla` needs a kernel without PREEMPT_RT, `exclusive` needs two CPUs.
fn hosts(args: &Args, kind: &Kind) -> anyhow::Result<Vec<Part>> {
    let cpus = args.cpus.unwrap_or(host::machine(args.clock, Kernel::Rt72).cpus);
    let defaults: Vec<&str> = kind.methods.iter().copied().filter(|method| cpus > 1 || *method != EXCLUSIVE).collect();
    let wanted = args.hardware.methods(&args.methods, &defaults, &CASES.names())?;
    if cpus < 2 && wanted.iter().any(|method| method == EXCLUSIVE) {
        usage!("exclusive keeps a CPU for the RT group, and this host has one: add --cpus 2");
    }
    let mut hosts = Vec::new();
    if wanted.iter().any(|method| method == "vanilla") {
        hosts.push(Part { kernel: Kernel::Plain72, clock: args.clock, methods: vec!["vanilla".to_owned()] });
    }
    let of_rt: Vec<String> = wanted.into_iter().filter(|method| method != "vanilla").collect();
    for kernel in &args.kernels {
        if *kernel == Kernel::Plain72 {
            usage!("--kernel is the RT kernel, 7.2-rt or 6.12-rt; vanilla brings 7.2 without PREEMPT_RT by itself");
        }
        // The virtual clock is not affected by other processes, so hosts can run at the same time.
        let at_most = if args.clock == Clock::Virtual { 3 } else { of_rt.len().max(1) };
        let host = |methods: &[String]| Part { kernel: *kernel, clock: args.clock, methods: methods.to_vec() };
        hosts.extend(of_rt.chunks(at_most).map(host));
    }
    Ok(hosts)
}

/// Measures every host. On the virtual clock, where time is counted in instructions, two hosts run at a time; on the
/// real clock one.
fn execute(args: &Args, kind: &Kind) -> anyhow::Result<ExitCode> {
    if args.part {
        return measure_part(args, kind);
    }
    if args.hardware.hardware.is_some() {
        return measure_real(args, kind);
    }
    let hosts = hosts(args, kind)?;
    args.product.find()?;
    // The modules are built here because this process has network access: a part runs in a namespace without a network.
    let kernel = hosts.first().map_or(Kernel::Rt72, |host| host.kernel);
    let machine = args.emulated(kernel).machine();
    machine.check()?;
    let images = lab::images()?;
    let cases = |host: &Part| plan(args, kind, &host.methods).cases;
    if hosts.iter().flat_map(cases).any(|case| case.is_outsourced()) {
        lab::guest_module(&images)?;
    }
    for host in &hosts {
        lab::host_module(&images, host.kernel)?;
    }
    let at_once = if args.clock == Clock::Virtual { 2 } else { 1 };
    let (mut results, mut missing) = (Vec::new(), Vec::new());
    let total = hosts.iter().flat_map(cases).count();
    let count = Arc::new(Mutex::new(CaseCount::new(total, at_once.min(hosts.len()))));
    let mut waiting = hosts.iter().enumerate();
    let mut running: Vec<(usize, Child, JoinHandle<Option<CaseResults>>)> = Vec::new();
    loop {
        for _ in running.len()..at_once {
            let Some((number, host)) = waiting.next() else { break };
            let mut child = start_part(args, kind, number, host)?;
            let told = child.stdout.take().context("the standard output of a part of the measurement")?;
            let (count, kernel) = (Arc::clone(&count), host.kernel);
            running.push((number, child, thread::spawn(move || listen(told, kernel, &count))));
        }
        if running.is_empty() {
            break;
        }
        let (number, mut child, told) = running.remove(0);
        let found = told.join().ok().flatten();
        let ended = child.wait().context("waiting for a part of the measurement")?;
        if ended.success() {
            let found = found.context("what a part measured")?;
            results.push((number, found.results));
            missing.extend(found.missing);
        } else if let Some(host) = hosts.get(number) {
            missing.push(format!(
                "{} on {}: not measured, the emulated host or a VM failed",
                host.methods.join(", "),
                host.kernel
            ));
        }
    }
    results.sort_by_key(|(number, _)| *number);
    let found = CaseResults { results: results.into_iter().flat_map(|(_, results)| results).collect(), missing };
    let notes = if kind.traced.is_some() { vec![SEGMENTS_PAPER.to_owned()] } else { Vec::new() };
    Measured { experiment: kind.name, seed: args.seed, found, notes }.report(&args.output)
}

/// Default methods on a real host.
const ON_HARDWARE: &[&str] = &["rt-default", "threaded", "partitioned"];

/// Measures a real host, whose administrator runs the server.
fn measure_real(args: &Args, kind: &Kind) -> anyhow::Result<ExitCode> {
    if kind.name != RT_SERVER.name {
        usage!("{} has no --hardware: rt-server, sampled-values, kbp, vatc and vatc-network have", kind.name);
    }
    let methods = args.hardware.methods(&args.methods, ON_HARDWARE, &CASES.names())?;
    if !args.settings.is_empty() {
        usage!("--host-toml writes the host.toml of an emulated host; a real one's is its owner's");
    }
    if !args.appended.is_empty() {
        usage!("--guest-append is for the VM of an emulated host; a real one's is its owner's");
    }
    let plan = plan(args, kind, &methods);
    let found = args.hardware.measure(args.out.as_deref(), kind.workload.captured(), |ground| {
        let mut count = CaseCount::new(plan.cases.len(), 1);
        measure(&plan, ground, &mut |case| progress(count.begin(case)), |case| case.description())
    })?;
    let (found, notes) = found.context("a real host")?;
    Measured { experiment: kind.name, seed: args.seed, found, notes }.report(&args.output)
}

/// A line of a part's standard output, as JSON.
#[derive(Debug, Serialize, Deserialize)]
enum PartLine {
    /// A case begins.
    Case(String),
    /// The last line.
    Found(CaseResults),
}

impl PartLine {
    /// Writes the line for the command that started this part.
    fn write_line(&self) -> anyhow::Result<()> {
        Ok(writeln!(std::io::stdout(), "{}", serde_json::to_string(self)?)?)
    }
}

/// Shows each case that a part begins, until the part ends.
fn listen(told: impl Read, kernel: Kernel, count: &Mutex<CaseCount>) -> Option<CaseResults> {
    let mut found = None;
    for line in BufReader::new(told).lines().map_while(Result::ok) {
        match serde_json::from_str(&line) {
            Ok(PartLine::Case(name)) => {
                let begun = count.lock().unwrap_or_else(PoisonError::into_inner).begin(&name);
                print_stderr(format_args!("[{kernel}] {begun}"));
            }
            Ok(PartLine::Found(of)) => found = Some(of),
            Err(error) => {
                print_stderr(format_args!("[{kernel}] what a part of the measurement tells is no JSON: {error}"))
            }
        }
    }
    found
}

fn start_part(args: &Args, kind: &Kind, number: usize, host: &Part) -> anyhow::Result<Child> {
    let mut line: Vec<String> = vec!["bench".into(), kind.name.into(), "--part".into()];
    for (option, value) in [
        ("--clock", host.clock.to_string()),
        ("--kernel", host.kernel.to_string()),
        ("--method", host.methods.join(",")),
        ("--requests", args.requests.to_string()),
        ("--seed", args.seed.to_string()),
        ("--silence", args.silence.to_string()),
    ] {
        line.extend([option.to_owned(), value]);
    }
    line.extend(args.cpus.map(|cpus| format!("--cpus={cpus}")));
    line.extend(args.link.map(|link| format!("--link={link}")));
    if let Some(out) = &args.out {
        let out = out.join(format!("{}-{number}", host.kernel));
        line.extend(["--out".to_owned(), out.to_string_lossy().into_owned()]);
    }
    if let Some(ontime) = &args.product.ontime {
        line.extend(["--ontime".to_owned(), ontime.to_string_lossy().into_owned()]);
    }
    line.extend(args.settings.iter().map(|setting| format!("--host-toml={setting}")));
    line.extend(args.appended.iter().map(|word| format!("--guest-append={word}")));
    line.extend(kind.workload.options());
    if kind.traced == Some(TraceDetail::Inversions) {
        line.push("--inversions".to_owned());
    }
    line.push(format!("--load={}", args.loads.iter().map(|load| load.name()).collect::<Vec<_>>().join(",")));
    let mut command = Command::new(std::env::current_exe().context("finding the file of this program")?);
    command.args(line).stdout(Stdio::piped());
    isolate::end_with_parent(&mut command, Signal::TERM).spawn().context("starting a part of the measurement")
}

/// Measures one host in its own namespaces.
fn measure_part(args: &Args, kind: &Kind) -> anyhow::Result<ExitCode> {
    let kernel = *args.kernels.first().context("a part has a kernel")?;
    let kernel = if args.methods.iter().any(|method| method == "vanilla") { Kernel::Plain72 } else { kernel };
    let emulated = args.emulated(kernel);
    let plan = plan(args, kind, &args.methods);
    let found = emulated.measure_inside(&lab::images()?, |mut site, images| {
        site.machine.captured_bytes = kind.workload.captured();
        let ground = PlannedHost::Emulated(&site, images);
        // If the command that started this part has ended, this process ends too.
        let mut begun = |case: &str| drop(PartLine::Case(case.to_owned()).write_line());
        begin_messages_with(format!("[{kernel}] "));
        measure(&plan, ground, &mut begun, |case| format!("{} on {kernel}", case.description()))
    })?;
    PartLine::Found(found).write_line().context("telling what was measured")?;
    Ok(ExitCode::SUCCESS)
}

fn rt_server(args: &Args) -> anyhow::Result<ExitCode> {
    execute(args, &RT_SERVER)
}

fn ablation(args: &Args) -> anyhow::Result<ExitCode> {
    execute(args, &ABLATION)
}

fn voip(args: &Args) -> anyhow::Result<ExitCode> {
    execute(args, &VOIP)
}

/// Every case under every load.
fn all_cases() -> Vec<(String, Load)> {
    CASES.under(&Load::ALL)
}

/// Table 3, Figures 6 to 8.
#[derive(Debug)]
pub(crate) struct RtServer;

impl Experiment for RtServer {
    command!(
        "rt-server",
        "Access'18 IV-A and B: an RT server in a VM beside two bulk VMs that receive TCP at full speed",
        Args,
        rt_server
    );

    fn cases(&self) -> Vec<(String, Load)> {
        all_cases()
    }

    fn paper(&self, figures: &Figures) -> Vec<PaperRow> {
        figures.table3(&["vanilla", "threaded", "exclusive", "outsourcing"])
    }

    fn goals(&self) -> Vec<GoalSpec> {
        vec![
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
            goal("exclusive-p99", "outsourcing: p99 at most that of an exclusive CPU, TCP")
                .of(P99, tcp("outsourcing"), tcp("exclusive"))
                .at_most(1.0),
            goal("exclusive-bulk", "outsourcing: bulk throughput at least twice that beside an exclusive CPU (paper)")
                .of(Bulk, tcp("outsourcing"), tcp("exclusive"))
                .at_least(2.0),
            goal("requests", "at least 20,000 counted requests a method").at_least(20_000.0),
        ]
    }
}

/// Figure 9.
#[derive(Debug)]
pub(crate) struct Ablation;

impl Experiment for Ablation {
    command!(
        "ablation",
        "Access'18 IV-C (Fig. 9): the same load with both of its techniques, with each alone, and with virtual \
         interrupts",
        Args,
        ablation
    );

    fn cases(&self) -> Vec<(String, Load)> {
        all_cases()
    }

    // Figure 9 has only plots; its case a is Table 3's last line.
    fn paper(&self, figures: &Figures) -> Vec<PaperRow> {
        figures.table3(&["outsourcing", "threaded"])
    }

    fn goals(&self) -> Vec<GoalSpec> {
        vec![
            goal("sd-without-sockets", "both techniques: SD at most that of partitioned softirq handling alone")
                .of(Sd, tcp("outsourcing"), tcp("partitioned"))
                .at_most(1.0),
            goal("sd-without-partitioning", "both techniques: SD at most that of outsourced sockets alone")
                .of(Sd, tcp("outsourcing"), tcp("outsourcing-only"))
                .at_most(1.0),
            goal("sd-of-interrupts", "woken idle loop: SD at most that of virtual interrupts")
                .of(Sd, tcp("outsourcing"), tcp("outsourcing-interrupt"))
                .at_most(1.0),
        ]
    }
}

/// Figure 11.
#[derive(Debug)]
pub(crate) struct Segments;

impl Experiment for Segments {
    command!(
        "segments",
        "Access'18 IV-D (Fig. 11): the same load, and where a request's time goes: host receive, guest, host send",
        SegmentsOptions,
        segments
    );

    fn cases(&self) -> Vec<(String, Load)> {
        all_cases()
    }

    // Figure 11 is a plot. Its load is Table 3's, so Table 3 has the total of the three segments.
    fn paper(&self, figures: &Figures) -> Vec<PaperRow> {
        figures.table3(&["vanilla", "threaded"])
    }

    fn meaning(&self) -> &'static str {
        "Segments of the way, and with --inversions priority inversions, by the trace in the host, on its clock; the \
         probes' own cost is in them. Hindered: requests that met an inversion; not named: inversions that were too \
         many to be named."
    }

    fn goals(&self) -> Vec<GoalSpec> {
        vec![
            goal("inversions-small", "partitioned: no request meets a priority inversion under small packets")
                .only(Own("hindered"), small("partitioned"))
                .at_most(0.0),
            goal("inversions-tcp", "partitioned: no request meets a priority inversion under TCP")
                .only(Own("hindered"), tcp("partitioned"))
                .at_most(0.0),
        ]
    }
}

/// Figure 14, a plot; the text states differences only.
#[derive(Debug)]
pub(crate) struct Voip;

impl Experiment for Voip {
    command!(
        "voip",
        "Access'18 IV-G 1 (Fig. 14): forward delays of Kamailio between two SIPp, beside the same bulk VMs",
        Args,
        voip
    );

    fn cases(&self) -> Vec<(String, Load)> {
        all_cases()
    }

    fn remarks(&self, figures: &Figures) -> Vec<String> {
        vec![figures.outsourcing.application(
            "Figure 14, forward delays",
            &figures.outsourcing.workloads.voip,
            figures.outsourcing.relative.voip_p99_percent,
        )]
    }

    fn goals(&self) -> Vec<GoalSpec> {
        vec![
            goal(
                "p99-vs-threaded",
                "outsourcing: p99 of forward delays at most 0.37 of threaded's (the paper's 63 % less)",
            )
            .of(P99, tcp("outsourcing"), tcp("threaded"))
            .at_most(0.37),
            goal("p99-vs-partitioned", "outsourcing: p99 of forward delays at most partitioned's")
                .of(P99, tcp("outsourcing"), tcp("partitioned"))
                .at_most(1.0),
        ]
    }
}

/// Figure 15, a plot; the text states differences only.
#[derive(Debug)]
pub(crate) struct Memcached;

impl Experiment for Memcached {
    command!(
        "memcached",
        "Access'18 IV-G 2 (Fig. 15): GET response times of memcached, beside the same bulk VMs",
        MemcachedOptions,
        memcached
    );

    fn cases(&self) -> Vec<(String, Load)> {
        all_cases()
    }

    fn remarks(&self, figures: &Figures) -> Vec<String> {
        vec![figures.outsourcing.application(
            "Figure 15, response times of GETs",
            &figures.outsourcing.workloads.memcached,
            figures.outsourcing.relative.memcached_p99_percent,
        )]
    }

    fn goals(&self) -> Vec<GoalSpec> {
        vec![
            goal("p99-vs-threaded", "outsourcing: p99 of GETs at most 0.33 of threaded's (the paper's 67 % less)")
                .of(P99, tcp("outsourcing"), tcp("threaded"))
                .at_most(0.33),
            goal("p99-vs-partitioned", "outsourcing: p99 of GETs at most partitioned's")
                .of(P99, tcp("outsourcing"), tcp("partitioned"))
                .at_most(1.0),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goals_are_of_methods_that_are_measured_where_nothing_is_said() {
        for kind in [&RT_SERVER, &ABLATION, &SEGMENTS, &MEMCACHED, &VOIP] {
            assert!(kind.methods.iter().all(|method| CASES.iter().any(|name| name == *method)), "{}", kind.name);
            let goals = super::super::goals_of(kind.name);
            assert!(!goals.is_empty(), "{}", kind.name);
            for case in goals.iter().flat_map(|goal| goal.measure.cases()) {
                assert!(kind.methods.contains(&case.method), "{}: {} is not measured", kind.name, case.method);
            }
        }
    }

    #[test]
    fn a_part_tells_its_cases_and_then_what_it_found() {
        let found = CaseResults { results: Vec::new(), missing: vec!["threaded, no flood".to_owned()] };
        let lines = [PartLine::Case("vanilla, TCP flood".to_owned()), PartLine::Found(found)];
        let told: String = lines.map(|line| serde_json::to_string(&line).unwrap() + "\n").concat();
        let count = Mutex::new(CaseCount::new(3, 1));
        let found = listen(told.as_bytes(), Kernel::Rt72, &count).unwrap();
        assert_eq!(found.missing, ["threaded, no flood"]);
        assert!(count.lock().unwrap().begin("x").starts_with("case 2 of 3: x; about "));
        assert!(listen(&b"no JSON\n"[..], Kernel::Rt72, &count).is_none());
    }

    #[test]
    fn vanilla_has_a_host_of_its_own() {
        let args = |methods: &[&str]| Args {
            methods: methods.iter().map(|&name| name.to_owned()).collect(),
            clock: Clock::Virtual,
            cpus: None,
            link: None,
            kernels: vec![Kernel::Rt72],
            requests: 1,
            seed: 1,
            settings: Vec::new(),
            appended: Vec::new(),
            hardware: Hardware { hardware: None },
            loads: vec![Load::Tcp],
            silence: 180,
            output: Output::default(),
            out: None,
            part: false,
            product: Product::default(),
        };
        let both = hosts(&args(&[]), &RT_SERVER).unwrap();
        assert_eq!(
            both.iter().map(|host| host.kernel).collect::<Vec<_>>(),
            [Kernel::Plain72, Kernel::Rt72, Kernel::Rt72]
        );
        assert!(both[2].methods.iter().any(|method| method == "outsourcing"));
        assert_eq!(
            hosts(&args(&[]), &ABLATION).unwrap().iter().map(|host| host.methods.len()).collect::<Vec<_>>(),
            [3, 2]
        );
        let error = hosts(&args(&["outsourced"]), &RT_SERVER).unwrap_err().to_string();
        assert!(error.contains("host-process"), "{error}");
        assert!(hosts(&args(&["exclusive"]), &RT_SERVER).unwrap_err().to_string().contains("--cpus 2"));
        for cpus in [2, 8] {
            let several = Args { cpus: Some(cpus), ..args(&["exclusive"]) };
            assert_eq!(hosts(&several, &RT_SERVER).unwrap()[0].methods, ["exclusive"]);
        }
        // By default wherever there are two CPUs, which on the real clock is the default.
        let has_exclusive = |args: &Args, kind| {
            hosts(args, kind).unwrap().iter().any(|host| host.methods.iter().any(|method| method == "exclusive"))
        };
        for (cpus, clock, expected) in [
            (None, Clock::Virtual, false),
            (Some(1), Clock::Virtual, false),
            (Some(2), Clock::Virtual, true),
            (Some(7), Clock::Virtual, true),
            (None, Clock::Real, true),
            (Some(1), Clock::Real, false),
        ] {
            let args = Args { cpus, clock, ..args(&[]) };
            assert_eq!(has_exclusive(&args, &RT_SERVER), expected, "{cpus:?} {clock:?}");
            assert!(!has_exclusive(&args, &ABLATION), "{cpus:?} {clock:?}");
        }
    }
}
