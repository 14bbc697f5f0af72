//! `ontime-lab bench rt-server`, `ablation`, `segments`, `memcached` and `voip`: Access'18, IV-A to IV-D and IV-G. An
//! RT server beside two bulk VMs: lists of cases, and what the server is.

use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};

use anyhow::Context;
use ontime_cli::usage;
use ontime_lab::{Clock, Kernel, isolate};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use super::{Emulated, Hardware, Measured, Output, noted, say};
use crate::command::lab;
use crate::command::product::Product;
use crate::host::{self, Ground};
use crate::memcached::ACCESS;
use crate::rt_server::{self, Case, Plan};
use crate::schema::{Load, MethodResult};
use crate::segments::Depth;
use crate::workload::{SOCKPERF, Workload};

/// An experiment of an RT server.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    /// Its name on the command line and in reports.
    name: &'static str,
    /// What answers, and who asks.
    workload: Workload,
    /// What is measured where nothing is said.
    methods: &'static [&'static str],
    /// What a trace looks for meanwhile; none where the host is not traced.
    traced: Option<Depth>,
}

/// Table 3 and Figures 6 to 8.
pub const RT_SERVER: Kind = Kind {
    name: "rt-server",
    workload: SOCKPERF,
    methods: &["vanilla", "rt-default", "threaded", "partitioned", "outsourcing", "host-process"],
    traced: None,
};
/// Figure 9, a to d, and what both techniques are left out of.
pub const ABLATION: Kind = Kind {
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
    traced: Some(Depth::Segments),
};
const SEGMENTS_PAPER: &str = "paper (Access'18, IV-D): Figure 11 is a plot without numbers. Its findings: most of the \
    variance is in host receive and in the guest; the inversions of host receive are gone with an exclusive CPU and \
    with partitioned softirqs; four probes cost under 0.5 us. The paper's figures beside ours are the whole \
    response's, Table 3";

/// What an application is measured with where nothing is said: as the RT server.
const APPLICATION: &[&str] = &["vanilla", "threaded", "partitioned", "outsourcing", "host-process"];
/// Figure 14.
pub const VOIP: Kind = Kind { name: "voip", workload: Workload::Voip, methods: APPLICATION, traced: None };
/// Figure 15.
const MEMCACHED: Kind = Kind {
    name: "memcached",
    workload: Workload::Memcached { traffic: ACCESS, connections: CONNECTIONS },
    methods: APPLICATION,
    traced: None,
};
/// The memcached client's connections where nothing is said; the paper does not say how many it had.
const CONNECTIONS: u8 = 4;

#[derive(Debug, clap::Args)]
pub struct Memcached {
    #[command(flatten)]
    args: Args,
    /// TCP connections of the client; requests go by each in turn
    #[arg(long, default_value_t = CONNECTIONS, value_parser = clap::value_parser!(u8).range(1..=64))]
    connections: u8,
}

/// Measures memcached.
///
/// # Errors
/// As [`run`].
pub fn memcached(args: &Memcached) -> anyhow::Result<ExitCode> {
    run(
        &args.args,
        &Kind { workload: Workload::Memcached { traffic: ACCESS, connections: args.connections }, ..MEMCACHED },
    )
}

#[derive(Debug, clap::Args)]
pub struct Segments {
    #[command(flatten)]
    args: Args,
    /// Look for priority inversions too, by more probes: who waited behind whom, and how often
    #[arg(long)]
    inversions: bool,
}

/// Measures where requests' time goes.
///
/// # Errors
/// As [`run`].
pub fn segments(args: &Segments) -> anyhow::Result<ExitCode> {
    let depth = if args.inversions { Depth::Inversions } else { Depth::Segments };
    run(&args.args, &Kind { traced: Some(depth), ..SEGMENTS })
}

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Methods: vanilla (a kernel without PREEMPT_RT), rt-default, threaded, exclusive, partitioned, outsourcing,
    /// outsourcing-interrupt, outsourcing-only (on threaded's path), host-process (the limit); default: those of the
    /// experiment
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',')]
    methods: Vec<String>,
    /// What time is in the host: virtual or real
    #[arg(long, default_value = "virtual")]
    clock: Clock,
    /// CPUs of the host, 1 to 8 (default: 1 on the virtual clock, 2 on the real one); `exclusive` needs 2
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=8))]
    cpus: Option<u8>,
    /// The host's RT kernel: 7.2-rt or 6.12-rt (may be given twice)
    #[arg(id = "kernel", long = "kernel", default_value = "7.2-rt", value_delimiter = ',')]
    kernels: Vec<Kernel>,
    /// Counted requests a method
    #[arg(long, default_value_t = 1000)]
    requests: u64,
    /// Seed of the gaps between requests
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A line for the host's host.toml (docs/hostnet.md; may be repeated): 'without = ["napi-weight"]',
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
    /// Most real seconds without a sign of life of a host, 30 to 86400: more where the machine has other work
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

/// One emulated host: its kernel and what is measured on it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Host {
    kernel: Kernel,
    clock: Clock,
    methods: Vec<String>,
}

/// What to measure on one host: these methods, each under every load.
fn plan(args: &Args, kind: &Kind, methods: &[String]) -> Plan {
    let of = |name: &String| args.loads.iter().map(|load| Case { name: name.clone(), load: *load }).collect::<Vec<_>>();
    Plan {
        workload: kind.workload,
        settings: args.settings.clone(),
        appended: args.appended.clone(),
        cases: methods.iter().flat_map(of).collect(),
        traced: kind.traced,
        requests: args.requests,
        seed: args.seed,
    }
}

/// Which hosts the wanted methods need: `vanilla` a kernel without PREEMPT_RT, `exclusive` two CPUs.
fn hosts(args: &Args, kind: &Kind) -> anyhow::Result<Vec<Host>> {
    let wanted = args.hardware.methods(&args.methods, kind.methods, &rt_server::CASES)?;
    let cpus = args.cpus.unwrap_or(host::machine(args.clock, Kernel::Rt72).cpus);
    if cpus < 2 && wanted.iter().any(|method| method == "exclusive") {
        usage!("exclusive keeps a CPU for the RT group, and this host has one: add --cpus 2");
    }
    let mut hosts = Vec::new();
    if wanted.iter().any(|method| method == "vanilla") {
        hosts.push(Host { kernel: Kernel::Plain72, clock: args.clock, methods: vec!["vanilla".to_owned()] });
    }
    let of_rt: Vec<String> = wanted.into_iter().filter(|method| method != "vanilla").collect();
    for kernel in &args.kernels {
        if *kernel == Kernel::Plain72 {
            usage!("--kernel is the RT kernel, 7.2-rt or 6.12-rt; vanilla brings 7.2 without PREEMPT_RT by itself");
        }
        // The virtual clock is the same in every host, and hosts run side by side.
        let at_most = if args.clock == Clock::Virtual { 3 } else { of_rt.len().max(1) };
        let host = |methods: &[String]| Host { kernel: *kernel, clock: args.clock, methods: methods.to_vec() };
        hosts.extend(of_rt.chunks(at_most).map(host));
    }
    Ok(hosts)
}

/// Measures every host, two at a time on the virtual clock, whose time is instructions, one on the real clock.
///
/// # Errors
/// A method that is none, or that these hosts cannot have; nothing could be measured.
pub fn run(args: &Args, kind: &Kind) -> anyhow::Result<ExitCode> {
    if args.part {
        return measure_part(args, kind);
    }
    if args.hardware.hardware.is_some() {
        return measure_real(args, kind);
    }
    let hosts = hosts(args, kind)?;
    args.product.find()?;
    // Here, where there is a network: a part is in a namespace without one.
    let images = lab::images(args.clock == Clock::Virtual && args.cpus.is_some_and(|cpus| cpus > 1))?;
    let cases = |host: &Host| plan(args, kind, &host.methods).cases;
    if hosts.iter().flat_map(cases).any(|case| case.is_outsourced()) {
        lab::guest_module(&images)?;
    }
    for host in &hosts {
        lab::host_module(&images, host.kernel)?;
    }
    let at_once = if args.clock == Clock::Virtual { 2 } else { 1 };
    let (mut results, mut missing) = (Vec::new(), Vec::new());
    let mut waiting = hosts.iter().enumerate();
    let mut running: Vec<(usize, Child)> = Vec::new();
    loop {
        for _ in running.len()..at_once {
            let Some((number, host)) = waiting.next() else { break };
            running.push((number, start_part(args, kind, number, host)?));
        }
        if running.is_empty() {
            break;
        }
        let (number, child) = running.remove(0);
        let ended = child.wait_with_output().context("waiting for a part of the measurement")?;
        if ended.status.success() {
            let found: Found = serde_json::from_slice(&ended.stdout).context("what a part measured")?;
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
    let results = results.into_iter().flat_map(|(_, results)| results).collect();
    let notes = if kind.traced.is_some() { vec![SEGMENTS_PAPER.to_owned()] } else { Vec::new() };
    let measured = Measured { experiment: kind.name, seed: args.seed, results, missing, notes };
    measured.report(&args.output)
}

/// What a real host can be asked where nothing is said.
const ON_HARDWARE: &[&str] = &["rt-default", "threaded", "partitioned"];

/// Measures a real host, whose server is its owner's.
fn measure_real(args: &Args, kind: &Kind) -> anyhow::Result<ExitCode> {
    if kind.name != RT_SERVER.name {
        usage!("{} has no --hardware: rt-server, sampled-values, kbp, vatc and vatc-network have", kind.name);
    }
    let methods = args.hardware.methods(&args.methods, ON_HARDWARE, &rt_server::CASES)?;
    if !args.settings.is_empty() {
        usage!("--host-toml writes the host.toml of an emulated host; a real one's is its owner's");
    }
    if !args.appended.is_empty() {
        usage!("--guest-append is for the VM of an emulated host; a real one's is its owner's");
    }
    let plan = plan(args, kind, &methods);
    let mut missing = Vec::new();
    let found = args.hardware.measure(args.out.as_deref(), kind.workload.captured(), |ground| {
        rt_server::measure(&plan, ground, &mut say, &mut noted(&mut missing))
    })?;
    let (results, notes) = found.context("a real host")?;
    Measured { experiment: kind.name, seed: args.seed, results, missing, notes }.report(&args.output)
}

/// What a part measured: its standard output.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Found {
    results: Vec<MethodResult>,
    /// Cases that failed, and why.
    missing: Vec<String>,
}

fn start_part(args: &Args, kind: &Kind, number: usize, host: &Host) -> anyhow::Result<Child> {
    let clock = if host.clock == Clock::Virtual { "virtual" } else { "real" };
    let mut line: Vec<String> = vec!["bench".into(), kind.name.into(), "--part".into()];
    for (option, value) in [
        ("--clock", clock.to_owned()),
        ("--kernel", host.kernel.to_string()),
        ("--method", host.methods.join(",")),
        ("--requests", args.requests.to_string()),
        ("--seed", args.seed.to_string()),
        ("--silence", args.silence.to_string()),
    ] {
        line.extend([option.to_owned(), value]);
    }
    line.extend(args.cpus.map(|cpus| format!("--cpus={cpus}")));
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
    if kind.traced == Some(Depth::Inversions) {
        line.push("--inversions".to_owned());
    }
    line.push(format!("--load={}", args.loads.iter().map(|load| load.name()).collect::<Vec<_>>().join(",")));
    let mut command = Command::new(std::env::current_exe().context("this program")?);
    command.args(line).stdout(Stdio::piped());
    isolate::end_with_parent(&mut command, Signal::TERM).spawn().context("starting a part of the measurement")
}

/// Measures one host in namespaces of its own.
fn measure_part(args: &Args, kind: &Kind) -> anyhow::Result<ExitCode> {
    let kernel = *args.kernels.first().context("a part has a kernel")?;
    let kernel = if args.methods.iter().any(|method| method == "vanilla") { Kernel::Plain72 } else { kernel };
    let Args { clock, cpus, silence, .. } = *args;
    let emulated = Emulated { clock, cpus, kernel, silence, out: args.out.clone(), product: args.product.clone() };
    let plan = plan(args, kind, &args.methods);
    let mut missing = Vec::new();
    let results = emulated.measure_inside(&lab::images(emulated.machine().takes_turns())?, |mut site, images| {
        site.machine.captured_bytes = kind.workload.captured();
        let ground = Ground::Emulated(&site, images);
        rt_server::measure(&plan, ground, &mut |line| eprintln!("[{kernel}] {line}"), &mut |case, error| {
            missing.push(format!("{case} on {kernel}: not measured: {error}"));
        })
    })?;
    serde_json::to_writer(std::io::stdout(), &Found { results, missing }).context("telling what was measured")?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use crate::goals;
    use crate::paper::Figures;

    use super::*;

    #[test]
    fn the_goals_name_cases_that_are_measured_where_nothing_is_said() {
        for kind in [&RT_SERVER, &ABLATION, &SEGMENTS, &MEMCACHED, &VOIP] {
            assert!(kind.methods.iter().all(|method| rt_server::CASES.contains(method)), "{}", kind.name);
            assert!(kind.traced.is_some() || !goals::of_experiment(kind.name).is_empty());
            for spec in goals::of_experiment(kind.name) {
                for case in spec.measure.cases() {
                    assert!(kind.methods.contains(&case.method), "{}: {} is not measured", kind.name, case.method);
                }
            }
            assert!(Figures::load().unwrap().rows(kind.name).is_ok());
        }
    }

    #[test]
    fn vanilla_has_a_host_of_its_own() {
        let args = |methods: &[&str]| Args {
            methods: methods.iter().map(|&name| name.to_owned()).collect(),
            clock: Clock::Virtual,
            cpus: None,
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
    }
}
