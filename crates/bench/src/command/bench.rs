//! `ontime-lab bench`: the experiments, one for each figure or table of the papers.

mod bulk;
mod connections;
mod inversion;
mod kbp;
mod path;
mod rt_server;
mod rta;
mod rtvirt;
mod sampled;
mod slo;
mod vatc;
mod xen_arm;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, bail};
use clap::Subcommand;
use ontime_cli::{OK, WARNING, usage};
use ontime_lab::images::Images;
use ontime_lab::{Clock, Kernel, Machine, isolate};

use crate::command::lab;
use crate::command::product::Product;
use crate::hardware::{self, Target};
use crate::host::{self, AS_IS, Ground, MeasureError, Site};
use crate::paper::Figures;
use crate::schema::{MethodResult, Report, SCHEMA_VERSION};
use crate::{goals, report};

/// `ontime-lab bench`
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    experiment: Experiment,
}

#[derive(Debug, Subcommand)]
enum Experiment {
    /// Access'18 IV-A and B: an RT server in a VM beside two bulk VMs that receive TCP at full speed
    RtServer(rt_server::Args),
    /// Access'18 IV-C (Fig. 9): the same load with both of its techniques, with each alone, and with virtual interrupts
    Ablation(rt_server::Args),
    /// Access'18 IV-D (Fig. 11): the same load, and where a request's time goes: host receive, guest, host send
    Segments(rt_server::Segments),
    /// Each rule of hostnet's table switched off alone under a flood: what it costs, and what `ontime doctor` says
    Inversion(inversion::Inversion),
    /// Where the instructions of a request go: every instruction of host and guest, by stage and by function
    Path(path::Path),
    /// KBP 5 and 6 (Figs. 8, 9, 11, 12): round trips and zero-loss throughput by polling and by interrupts, VM and
    /// containers
    Kbp(kbp::Kbp),
    /// Frames of Sampled Values (IEC 61850-9-2), one every 250 us, into a VM beside two bulk VMs: how many are late
    SampledValues(sampled::SampledValues),
    /// RTVirt 4.2 (Tables 1, 2, Fig. 3): periodic real-time applications in four VMs: deadlines missed, bandwidth
    /// reserved for what need
    RtaPeriodic(rta::Periodic),
    /// RTVirt 4.2: the same applications with jobs at random, 0.1 to 1 s apart
    RtaSporadic(rta::Sporadic),
    /// RTVirt 4.3 (Table 3, Fig. 4): video applications that come and go at random: one CPU measured, the paper's size
    /// simulated
    Video(rtvirt::Video),
    /// RTVirt 4.5 (Tables 5, 6): 100 applications: as 10 VMs on one CPU measured, the paper's size, as 10 and as 100
    /// VMs, simulated
    RtaScale(rtvirt::Scale),
    /// RTVirt 4.5: what it costs host and guest that an application asks for its bandwidth
    Registration(rtvirt::Registration),
    /// RTVirt 2 (Fig. 1): two schedulers that do not know of each other, and the planner: a simulation
    Motivation,
    /// RTVirt 4.4 (Table 4, Figs. 5a, 5b): p99.9 of memcached with 58 us in 500 us reserved, beside VMs that never
    /// idle, beside video VMs
    MemcachedSlo(slo::Slo),
    /// VATC IV-B: a periodic RT request beside up to four VMs that send small packets by the same NIC
    Vatc(vatc::Vatc),
    /// VATC IV-C (Fig. 12): the same beside one VM that sends large packets, by UDP or TCP
    VatcNetwork(vatc::Network),
    /// Xen-ARM 3 and 4 (Figs. 1, 3, 6): requests at random to a guest with a CPU load of its own beside a VM that never
    /// idles
    XenArm(xen_arm::XenArm),
    /// Access'18 IV-F (Fig. 13): what a byte of bulk TCP costs host and guest, through vhost-net and by outsourced
    /// sockets
    Bulk(bulk::Bulk),
    /// How many fresh TCP connections a second a VM takes, of one request each, through vhost-net and by outsourced
    /// sockets
    Connections(connections::Connections),
    /// Access'18 IV-G 1 (Fig. 14): forward delays of Kamailio between two SIPp, beside the same bulk VMs
    Voip(rt_server::Args),
    /// Access'18 IV-G 2 (Fig. 15): GET response times of memcached, beside the same bulk VMs
    Memcached(rt_server::Memcached),
    /// Make the table and the page again from results that `--json` wrote
    Show(Show),
}

/// The one emulated host of an experiment.
#[derive(Debug, clap::Args)]
struct Emulated {
    /// What time is in the host: virtual or real
    #[arg(long, default_value = "virtual")]
    clock: Clock,
    /// CPUs of the host, 1 to 8 (default: 1 on the virtual clock, 2 on the real one)
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=8))]
    cpus: Option<u8>,
    /// The host's kernel: 7.2-rt, 7.2 or 6.12-rt
    #[arg(long, default_value = "7.2-rt")]
    kernel: Kernel,
    /// Most real seconds without a sign of life of the host, 30 to 86400: more where the machine has other work
    #[arg(long, default_value_t = 180)]
    silence: u64,
    /// Directory for captures and logs (default: removed at the end)
    #[arg(long)]
    out: Option<PathBuf>,
    #[command(flatten)]
    product: Product,
}

impl Emulated {
    /// Measures on it, in namespaces of its own; `with_module` where guests need the module.
    fn measure<T>(
        &self,
        with_module: bool,
        measure: impl FnOnce(Site, &Images) -> Result<T, MeasureError>,
    ) -> anyhow::Result<T> {
        self.product.find()?;
        // What is missing is built where there is a network: the namespaces have none.
        let images = lab::images(self.machine().takes_turns())?;
        if with_module {
            lab::guest_module(&images)?;
        }
        lab::host_module(&images, self.kernel)?;
        self.measure_inside(&images, measure)
    }

    fn machine(&self) -> Machine {
        let mut machine = host::machine(self.clock, self.kernel);
        machine.cpus = self.cpus.unwrap_or(machine.cpus);
        machine.silence_seconds = self.silence;
        machine
    }

    /// Measures on it, in namespaces of its own, where all that it takes has been built.
    fn measure_inside<T>(
        &self,
        images: &Images,
        measure: impl FnOnce(Site, &Images) -> Result<T, MeasureError>,
    ) -> anyhow::Result<T> {
        let scratch = isolate::enter()?;
        let machine = self.machine();
        let dir = self.out.clone().unwrap_or(scratch);
        fs::create_dir_all(&dir).with_context(|| format!("directory {}", dir.display()))?;
        let programs = self.product.find()?;
        measure(Site { machine, dir: dir.clone(), programs }, images).map_err(|error| {
            // The console log that the message names must outlive this process.
            isolate::keep(&dir);
            error.into()
        })
    }
}

/// A real host, in place of an emulated one.
#[derive(Debug, clap::Args)]
struct Hardware {
    /// Measure a real host with its owner's VMs, which this file describes (docs/hardware.md), in place of an emulated
    /// one
    #[arg(long, value_name = "SITE", conflicts_with_all = ["clock", "cpus", "kernel", "silence"])]
    hardware: Option<PathBuf>,
}

impl Hardware {
    /// Measures on it, with what a reader must know of it; `captured` bytes of an RT frame are kept. `None` where the
    /// host is emulated.
    fn measure<T>(
        &self,
        out: Option<&Path>,
        captured: u32,
        measure: impl FnOnce(Ground<'static>) -> Result<T, MeasureError>,
    ) -> anyhow::Result<Option<(T, Vec<String>)>> {
        let Some(path) = &self.hardware else { return Ok(None) };
        let site = hardware::Site::read(path)?;
        let kept = tempfile::tempdir().context("a directory for captures")?;
        let dir = out.unwrap_or(kept.path());
        fs::create_dir_all(dir).with_context(|| format!("directory {}", dir.display()))?;
        let mut target = Target::open(site, dir, captured as usize)?;
        let notes = target.notes()?;
        Ok(Some((measure(Ground::Real(Box::new(target)))?, notes)))
    }

    /// The methods asked for, or else `defaults`. Refuses what only the other kind of host has; `all` are the
    /// experiment's own.
    fn methods(&self, asked: &[String], defaults: &[&str], all: &[&str]) -> anyhow::Result<Vec<String>> {
        let (as_is, own): (Vec<_>, Vec<_>) = asked.iter().cloned().partition(|method| method == AS_IS);
        if !as_is.is_empty() && self.hardware.is_none() {
            usage!("method '{AS_IS}' is a real host's as it stands: it takes --hardware");
        }
        chosen("method", &own, all)?;
        Ok(if asked.is_empty() { defaults.iter().map(|&name| name.to_owned()).collect() } else { asked.to_vec() })
    }
}

/// An experiment's host, of either kind.
#[derive(Debug, clap::Args)]
struct Whose {
    #[command(flatten)]
    emulated: Emulated,
    #[command(flatten)]
    hardware: Hardware,
}

impl Whose {
    /// Measures on it, with what a reader must know of a real one; `captured` bytes of a real host's RT frame are kept,
    /// `prepare` sets the emulated machine up.
    fn measure<T>(
        &self,
        captured: u32,
        prepare: impl FnOnce(Site) -> Site,
        mut measure: impl FnMut(Ground<'_>) -> Result<T, MeasureError>,
    ) -> anyhow::Result<(T, Vec<String>)> {
        if let Some(found) = self.hardware.measure(self.emulated.out.as_deref(), captured, &mut measure)? {
            return Ok(found);
        }
        let emulated = |site: Site, images: &Images| measure(Ground::Emulated(&prepare(site), images));
        Ok((self.emulated.measure(false, emulated)?, Vec::new()))
    }
}

/// What was asked for, or all there are.
fn chosen(what: &str, asked: &[String], all: &[&str]) -> anyhow::Result<Vec<String>> {
    if let Some(unknown) = asked.iter().find(|name| !all.contains(&name.as_str())) {
        usage!("{what} '{unknown}' is not one of {}", all.join(", "));
    }
    Ok(if asked.is_empty() { all.iter().map(|&name| name.to_owned()).collect() } else { asked.to_vec() })
}

/// Shows how far an experiment is.
fn say(line: &str) {
    eprintln!("{line}");
}

/// Keeps why a case has no figures.
fn noted(missing: &mut Vec<String>) -> impl FnMut(&str, MeasureError) {
    |case, error| missing.push(format!("{case}: not measured: {error}"))
}

/// Where a report goes, besides the terminal.
#[derive(Debug, Default, clap::Args)]
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
    /// Write the response times' histogram in the layout of `rtla timerlat hist`
    #[arg(long)]
    rtla: Option<PathBuf>,
    /// Write each result's percentile distribution as METHOD-LOAD-KERNEL.hgrm, HDR histogram's layout, into this
    /// directory; -2 and so on behind it where results of several runs have the same
    #[arg(long, value_name = "DIR")]
    hgrm: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
struct Show {
    /// What `--json` wrote; results of several are put together
    #[arg(required = true)]
    results: Vec<PathBuf>,
    #[command(flatten)]
    output: Output,
}

/// Runs `ontime-lab bench`.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match &args.experiment {
        Experiment::RtServer(args) => rt_server::run(args, &rt_server::RT_SERVER),
        Experiment::Ablation(args) => rt_server::run(args, &rt_server::ABLATION),
        Experiment::Segments(args) => rt_server::segments(args),
        Experiment::Inversion(args) => inversion::run(args),
        Experiment::Path(args) => path::run(args),
        Experiment::Kbp(args) => kbp::run(args),
        Experiment::SampledValues(args) => sampled::run(args),
        Experiment::RtaPeriodic(args) => rta::periodic(args),
        Experiment::RtaSporadic(args) => rta::sporadic(args),
        Experiment::Video(args) => rtvirt::run(args),
        Experiment::RtaScale(args) => rtvirt::scale(args),
        Experiment::Registration(args) => rtvirt::registration(args),
        Experiment::Motivation => rtvirt::motivation(),
        Experiment::MemcachedSlo(args) => slo::run(args),
        Experiment::Voip(args) => rt_server::run(args, &rt_server::VOIP),
        Experiment::Memcached(args) => rt_server::memcached(args),
        Experiment::Bulk(args) => bulk::run(args),
        Experiment::Connections(args) => connections::run(args),
        Experiment::Vatc(args) => vatc::run(args),
        Experiment::VatcNetwork(args) => vatc::network(args),
        Experiment::XenArm(args) => xen_arm::run(args),
        Experiment::Show(args) => show(args),
    }
}

/// What an experiment measured, and the cases that it could not.
#[derive(Debug)]
struct Measured {
    experiment: &'static str,
    seed: u64,
    results: Vec<MethodResult>,
    missing: Vec<String>,
    /// What a reader must know besides.
    notes: Vec<String>,
}

impl Measured {
    /// Puts the report together and shows it. The status says whether anything is missing.
    fn report(self, output: &Output) -> anyhow::Result<ExitCode> {
        let Self { experiment, seed, results, missing, mut notes } = self;
        let Some(clock) = results.first().map(|result| result.clock) else {
            bail!("nothing could be measured: {}", missing.join("; "));
        };
        let figures = Figures::load()?;
        notes.extend(figures.notes(experiment));
        notes.extend(missing.iter().cloned());
        let kernel = kernel_of(&results);
        let words: Vec<String> = std::env::args().skip(1).collect();
        let report = Report {
            schema_version: SCHEMA_VERSION,
            experiment: experiment.to_owned(),
            clock,
            goals: goals::evaluate(goals::of_experiment(experiment), &results, clock, &kernel),
            kernel,
            seed,
            command: format!("ontime-lab {}", words.join(" ")),
            created: created()?,
            machine: machine_name(),
            results,
            paper: figures.rows(experiment)?,
            notes,
        };
        write(&report, output)?;
        for line in &missing {
            eprintln!("ontime-lab: {line}");
        }
        Ok(ExitCode::from(if missing.is_empty() { OK } else { WARNING }))
    }
}

/// Now, RFC 3339.
fn created() -> anyhow::Result<String> {
    let said = Command::new("date").arg("--iso-8601=seconds").output().context("date")?.stdout;
    Ok(String::from_utf8_lossy(&said).trim().to_owned())
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
                    usage!("{} is of {}, not of {}", path.display(), next.experiment, all.experiment);
                }
                all.command = format!("{}; {}", all.command, next.command);
                all.results.extend(next.results);
                let notes: Vec<String> = next.notes.into_iter().filter(|note| !all.notes.contains(note)).collect();
                all.notes.extend(notes);
            }
        }
    }
    let Some(mut report) = all else { bail!("no results") };
    report.kernel = kernel_of(&report.results);
    let specs = goals::of_experiment(&report.experiment);
    report.goals = goals::evaluate(specs, &report.results, report.clock, &report.kernel);
    write(&report, &args.output)
}

/// The kernel that a report is about: the newest, and of one version the one with PREEMPT_RT.
fn kernel_of(results: &[MethodResult]) -> String {
    results.iter().map(|result| result.kernel.as_str()).max().unwrap_or_default().to_owned()
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
    if let Some(path) = &output.rtla {
        put(path, report::rtla(report))?;
    }
    if let Some(dir) = &output.hgrm {
        fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
        for (name, text) in report::hgrm_files(report) {
            put(&dir.join(name), text)?;
        }
    }
    println!("{}", report::terminal(report));
    Ok(ExitCode::SUCCESS)
}
