//! `ontime bench`: the experiments, one for each figure or table of the papers.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};

use anyhow::{Context, bail};
use clap::Subcommand;
use ontime_bench::paper::Figures;
use ontime_bench::rt_server::{self, Case, Plan};
use ontime_bench::schema::{self, MethodResult, Report};
use ontime_bench::{goals, report};
use ontime_lab::{Clock, Kernel, Machine, isolate};

use crate::exit::{OK, THRESHOLD};
use crate::lab;
use crate::paths::Paths;

/// `ontime bench`
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    experiment: Experiment,
}

#[derive(Debug, Subcommand)]
enum Experiment {
    /// Access'18 IV-A and B: an RT server in a VM beside two bulk VMs that receive TCP at full speed
    RtServer(RtServer),
    /// Make the table and the page again from results that `--json` wrote
    Show(Show),
}

#[derive(Debug, clap::Args)]
struct RtServer {
    /// Methods: vanilla (a kernel without PREEMPT_RT), rt-default, threaded, exclusive, partitioned; default: all but exclusive
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',')]
    methods: Vec<String>,
    /// What time is in the host: virtual or real; `exclusive` needs real, and brings what it is compared with
    #[arg(long, default_value = "virtual")]
    clock: Clock,
    /// CPUs of the host on the real clock
    #[arg(long, default_value_t = 2)]
    cpus: u8,
    /// The host's RT kernel: 7.2-rt or 6.12-rt (may be given twice)
    #[arg(long = "kernel", default_value = "7.2-rt", value_delimiter = ',')]
    kernels: Vec<Kernel>,
    /// Counted requests a method
    #[arg(long, default_value_t = 1000)]
    requests: u64,
    /// Seed of the gaps between requests
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Also measure each RT method without flood
    #[arg(long)]
    quiet_too: bool,
    #[command(flatten)]
    output: Output,
    /// Directory for captures and logs (default: removed at the end)
    #[arg(long)]
    out: Option<PathBuf>,
    /// One host's part, written to this file (the command starts itself so, a host at a time)
    #[arg(long, hide = true)]
    part: Option<PathBuf>,
}

/// Where a report goes, besides the terminal.
#[derive(Debug, clap::Args)]
struct Output {
    /// Write the results (docs/bench.schema.json)
    #[arg(long)]
    json: Option<PathBuf>,
    /// Write the table as CSV
    #[arg(long)]
    csv: Option<PathBuf>,
    /// Write the report page
    #[arg(long)]
    html: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
struct Show {
    /// What `--json` wrote; results of several are put together
    #[arg(required = true)]
    results: Vec<PathBuf>,
    #[command(flatten)]
    output: Output,
}

/// Runs `ontime bench`.
pub fn run(args: &Args, _: &Paths) -> anyhow::Result<ExitCode> {
    match &args.experiment {
        Experiment::RtServer(args) => match &args.part {
            Some(part) => measure_part(args, part),
            None => rt_server(args),
        },
        Experiment::Show(args) => show(args),
    }
}

/// One emulated host: its kernel and what is measured on it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Host {
    kernel: Kernel,
    clock: Clock,
    methods: Vec<String>,
}

/// Which hosts the wanted methods need: `vanilla` a kernel without PREEMPT_RT, `exclusive` two CPUs.
fn hosts(args: &RtServer) -> anyhow::Result<Vec<Host>> {
    const KNOWN: [&str; 5] = ["vanilla", "rt-default", "threaded", "exclusive", "partitioned"];
    let defaults = ["vanilla", "rt-default", "threaded", "partitioned"].map(str::to_owned);
    let wanted = if args.methods.is_empty() { defaults.to_vec() } else { args.methods.clone() };
    if let Some(unknown) = wanted.iter().find(|method| !KNOWN.contains(&method.as_str())) {
        bail!("method '{unknown}' is not one of {}", KNOWN.join(", "));
    }
    if wanted.iter().any(|method| method == "exclusive") && (args.clock == Clock::Virtual || args.cpus < 2) {
        bail!("exclusive keeps a CPU for the RT group, and the virtual clock has one: add --clock real --cpus 2");
    }
    let mut hosts = Vec::new();
    if wanted.iter().any(|method| method == "vanilla") {
        hosts.push(Host { kernel: Kernel::Plain72, clock: args.clock, methods: vec!["vanilla".to_owned()] });
    }
    let of_rt: Vec<String> = wanted.into_iter().filter(|method| method != "vanilla").collect();
    for kernel in &args.kernels {
        if *kernel == Kernel::Plain72 {
            bail!("--kernel is the RT kernel, 7.2-rt or 6.12-rt; vanilla brings 7.2 without PREEMPT_RT by itself");
        }
        if !of_rt.is_empty() {
            hosts.push(Host { kernel: *kernel, clock: args.clock, methods: of_rt.clone() });
        }
    }
    Ok(hosts)
}

/// Measures every host, two at a time on the virtual clock (which no other load can move), one on the real clock.
fn rt_server(args: &RtServer) -> anyhow::Result<ExitCode> {
    let hosts = hosts(args)?;
    lab::images()?;
    let kept = tempfile::tempdir().context("a directory for the results")?;
    let at_once = if args.clock == Clock::Virtual { 2 } else { 1 };
    let (mut results, mut missing) = (Vec::new(), Vec::new());
    let mut waiting = hosts.iter().enumerate();
    let mut running: Vec<(Part, Child)> = Vec::new();
    loop {
        while running.len() < at_once
            && let Some((number, host)) = waiting.next()
        {
            let part = Part { number, file: kept.path().join(format!("{number}.json")) };
            let child = part.start(args, host)?;
            running.push((part, child));
        }
        if running.is_empty() {
            break;
        }
        let (part, mut child) = running.remove(0);
        let status = child.wait().context("waiting for a part of the measurement")?;
        if status.success() {
            results.push((part.number, read_part(&part.file)?));
        } else if let Some(host) = hosts.get(part.number) {
            missing.push(format!(
                "{} on {}: not measured, the emulated host or a VM failed",
                host.methods.join(", "),
                host.kernel
            ));
        }
    }
    if results.is_empty() {
        bail!("nothing could be measured; what went wrong stands above");
    }
    results.sort_by_key(|(number, _)| *number);
    let results = results.into_iter().flat_map(|(_, results)| results).collect();
    let mut report = assemble(args, results)?;
    report.notes.extend(missing.iter().cloned());
    write(&report, &args.output)?;
    for line in &missing {
        eprintln!("ontime: {line}");
    }
    Ok(ExitCode::from(if missing.is_empty() { OK } else { THRESHOLD }))
}

struct Part {
    number: usize,
    file: PathBuf,
}

impl Part {
    fn start(&self, args: &RtServer, host: &Host) -> anyhow::Result<Child> {
        let clock = if host.clock == Clock::Virtual { "virtual" } else { "real" };
        let mut line: Vec<String> = vec!["bench".into(), "rt-server".into()];
        for (option, value) in [
            ("--clock", clock.to_owned()),
            ("--cpus", args.cpus.to_string()),
            ("--kernel", host.kernel.to_string()),
            ("--method", host.methods.join(",")),
            ("--requests", args.requests.to_string()),
            ("--seed", args.seed.to_string()),
            ("--part", self.file.to_string_lossy().into_owned()),
        ] {
            line.extend([option.to_owned(), value]);
        }
        if let Some(out) = &args.out {
            line.extend(["--out".to_owned(), out.join(host.kernel.to_string()).to_string_lossy().into_owned()]);
        }
        if args.quiet_too {
            line.push("--quiet-too".to_owned());
        }
        let mut command = Command::new(std::env::current_exe().context("this program")?);
        command.args(line);
        // SAFETY: between fork and exec only prctl(2) is called, which is async-signal-safe.
        unsafe { command.pre_exec(die_with_parent) };
        command.spawn().context("starting a part of the measurement")
    }
}

fn die_with_parent() -> std::io::Result<()> {
    Ok(rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?)
}

/// Measures one host in namespaces of its own.
fn measure_part(args: &RtServer, part: &Path) -> anyhow::Result<ExitCode> {
    isolate::enter()?;
    let images = lab::images()?;
    let kernel = *args.kernels.first().context("a part has a kernel")?;
    let kernel = if args.methods.iter().any(|method| method == "vanilla") { Kernel::Plain72 } else { kernel };
    let mut machine = Machine::new(args.clock, kernel);
    if args.clock == Clock::Real {
        machine.cpus = args.cpus;
    }
    let mut cases = Vec::new();
    for name in &args.methods {
        cases.push(Case { name: name.clone(), flood: true });
        if args.quiet_too && name != "vanilla" {
            cases.push(Case { name: name.clone(), flood: false });
        }
    }
    let kept = tempfile::tempdir().context("a directory for the lab")?;
    let dir = args.out.clone().unwrap_or_else(|| kept.path().to_owned());
    fs::create_dir_all(&dir).with_context(|| format!("directory {}", dir.display()))?;
    let binary = std::env::current_exe().context("this program")?;
    let plan = Plan { machine, cases, requests: args.requests, seed: args.seed, dir, binary };
    let results = rt_server::measure(&plan, &images, &mut |line| eprintln!("[{kernel}] {line}"));
    let results = match results {
        Ok(results) => results,
        Err(error) => {
            // The console log that the message names must outlive this process.
            if args.out.is_none() {
                let _ = kept.keep();
            }
            return Err(error.into());
        }
    };
    fs::write(part, serde_json::to_vec(&results)?).with_context(|| format!("writing {}", part.display()))?;
    Ok(ExitCode::SUCCESS)
}

fn read_part(file: &Path) -> anyhow::Result<Vec<MethodResult>> {
    let text = fs::read(file).with_context(|| format!("reading {}", file.display()))?;
    Ok(serde_json::from_slice(&text)?)
}

fn assemble(args: &RtServer, results: Vec<MethodResult>) -> anyhow::Result<Report> {
    let clock = match args.clock {
        Clock::Virtual => schema::Clock::Virtual,
        Clock::Real => schema::Clock::Real,
    };
    let kernel = results.iter().map(|result| result.kernel.as_str()).max().unwrap_or_default().to_owned();
    let words: Vec<String> = std::env::args().skip(1).collect();
    let created = Command::new("date").arg("--iso-8601=seconds").output().context("date")?.stdout;
    Ok(Report {
        schema_version: schema::SCHEMA_VERSION,
        experiment: "rt-server".to_owned(),
        clock,
        goals: goals::evaluate(goals::of_experiment("rt-server"), &results, clock, &kernel),
        kernel,
        seed: args.seed,
        command: format!("ontime {}", words.join(" ")),
        created: String::from_utf8_lossy(&created).trim().to_owned(),
        machine: machine_name(),
        results,
        paper: Figures::load()?.rows("rt-server")?,
        notes: Vec::new(),
    })
}

/// The processor this ran on: of interest on the real clock only.
fn machine_name() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")).and_then(|rest| rest.split(':').nth(1));
    let cpus = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    format!("{}, {cpus} CPUs", model.unwrap_or("unknown processor").trim())
}

fn show(args: &Show) -> anyhow::Result<ExitCode> {
    let mut all: Option<Report> = None;
    for path in &args.results {
        let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        let next = Report::from_json(&text).with_context(|| path.display().to_string())?;
        match &mut all {
            None => all = Some(next),
            Some(all) => {
                if all.experiment != next.experiment {
                    bail!("{} is of {}, not of {}", path.display(), next.experiment, all.experiment);
                }
                all.command = format!("{}; {}", all.command, next.command);
                all.results.extend(next.results);
            }
        }
    }
    let Some(mut report) = all else { bail!("no results") };
    let specs = goals::of_experiment(&report.experiment);
    report.goals = goals::evaluate(specs, &report.results, report.clock, &report.kernel);
    write(&report, &args.output)
}

fn write(report: &Report, output: &Output) -> anyhow::Result<ExitCode> {
    let put = |path: &Path, text: String| {
        fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
        eprintln!("wrote {}", path.display());
        anyhow::Ok(())
    };
    if let Some(path) = &output.json {
        put(path, report.to_json()?)?;
    }
    if let Some(path) = &output.csv {
        put(path, report::csv(report))?;
    }
    if let Some(path) = &output.html {
        put(path, report::html(report))?;
    }
    println!("{}\n{}", report::terminal(report), report::goals(report));
    Ok(ExitCode::SUCCESS)
}
