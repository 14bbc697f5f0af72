//! `ontime plan`: whether given tenants fit, what other analyses would reserve for them, and how the schedule looks. It
//! reads one file, uses no daemon and changes nothing.

pub(crate) mod file;
mod picture;
mod report;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use ontime_plan::simulate::Options;
use ontime_plan::{Bandwidth, Nanos};
use ontime_tenants::ConfigError;
use ontime_tenants::text::counted;

use self::picture::Picture;
use self::report::{Placed, Report};
use crate::exit::{Doing, Exit};
use crate::paths::Paths;
use crate::{exit, table};

/// The most hosts of a what-if.
const HOSTS_MAX: u32 = 1_000;
/// The longest simulation, in seconds.
const SIMULATION_MAX: f64 = 86_400.0;

/// `ontime plan`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The file of tenants (format: /usr/share/doc/ontime/reference/plan.md).
    file: PathBuf,
    /// Assume this many CPUs for tenants on each host, instead of the file's number.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(file::CPUS_MAX)))]
    cpus: Option<u32>,
    /// Assume this many such hosts; each tenant stays on one of them.
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(HOSTS_MAX)))]
    hosts: u32,
    /// Place the tenants in the order of the file, each on the emptiest host that has room; default: the largest first,
    /// each on the fullest. Kubernetes' scheduler may choose another host: `host` in the file says which.
    #[arg(long)]
    in_order: bool,
    /// Simulate the planner for this duration.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    simulate: Option<Nanos>,
    /// In the simulation, sporadic jobs come up to this many milliseconds after their earliest time.
    #[arg(long, value_name = "MS", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=3_600_000))]
    sporadic_delay_ms: u32,
    /// In the simulation, periodic RTAs begin at random times of their first period.
    #[arg(long)]
    scattered: bool,
    /// The seed of the simulation's random numbers.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Write a picture of the simulated schedule (with several hosts: of the fullest) to this file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// The duration that the picture shows, from the beginning of the schedule.
    #[arg(long, value_name = "MS", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    span_ms: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

fn seconds(text: &str) -> Result<Nanos, String> {
    let value: f64 = text.parse().map_err(|_| format!("`{text}` is no number of seconds"))?;
    if value > 0.0 && value <= SIMULATION_MAX {
        Ok(Nanos((value * 1e9).ceil() as u64))
    } else {
        Err(format!("{value} seconds: above 0 and at most {SIMULATION_MAX}"))
    }
}

/// Reports whether the tenants fit.
///
/// # Errors
/// Where the file is wrong, or output cannot be written.
pub(crate) fn run(args: &Args, _: &Paths) -> anyhow::Result<ExitCode> {
    let mut plan = file::load(&args.file).map_err(|error| match error {
        ConfigError::Read { .. } => Exit::usage(error.to_string()).into(),
        ConfigError::Invalid { .. } => anyhow::Error::from(error),
    })?;
    plan.cpus = args.cpus.unwrap_or(plan.cpus);
    if plan.kept() > Bandwidth::cpus(plan.cpus as usize) {
        exit::usage!(
            "{}: bulk-reserve = {} is more than --cpus {}; ask for more CPUs, or keep less for bulk",
            args.file.display(),
            plan.kept(),
            plan.cpus
        );
    }
    if let Some(beyond) = plan.hosts.iter().flatten().find(|host| **host > args.hosts) {
        exit::usage!(
            "{}: host = {beyond}, and --hosts is {}; give more --hosts, or correct the tenant's `host`",
            args.file.display(),
            args.hosts
        );
    }
    let (placed, refused) = report::place(&plan, args.hosts as usize, args.in_order);
    let mut report = report::report(&plan, &placed, refused);
    let names = plan.tenants.iter().map(|tenant| tenant.name.as_str()).collect();
    let drawn = simulate(args, &placed, &mut report, names)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &crate::api::Versioned::of(&report))?;
        writeln!(out)?;
    } else {
        print(&mut out, &report)?;
        if args.simulate.is_some() {
            write!(out, "{drawn}")?;
        }
    }
    let missed: u64 = report.hosts.iter().flat_map(|host| &host.simulation).map(|simulation| simulation.missed).sum();
    Ok(ExitCode::from(if report.fits && missed == 0 { exit::OK } else { exit::WARNING }))
}

/// Simulates each host if requested, and draws the fullest one. Returns its picture for the terminal.
fn simulate(args: &Args, placed: &[Placed], report: &mut Report, names: Vec<&str>) -> anyhow::Result<String> {
    let span = Nanos::from_millis(u64::from(args.span_ms));
    let Some(duration) = args.simulate.or(args.svg.is_some().then_some(span)) else { return Ok(String::new()) };
    let options = Options {
        duration,
        record: span.min(duration),
        sporadic_delay: Nanos::from_millis(u64::from(args.sporadic_delay_ms)),
        seed: args.seed,
        scattered: args.scattered,
    };
    let mut drawn = String::new();
    for (index, (on, said)) in placed.iter().zip(&mut report.hosts).enumerate() {
        let (simulation, outcome) = report::run(on, &options);
        said.simulation = Some(simulation);
        if index > 0 {
            continue;
        }
        let picture = Picture {
            runs: &outcome.runs,
            deadlines: &outcome.deadlines,
            places: picture::places(&on.vcpus),
            names: names.clone(),
            cpus: report.cpus_per_host,
            span: options.record,
        };
        if let Some(path) = &args.svg {
            std::fs::write(path, picture.svg()).doing(format_args!("{}: cannot be written (--svg)", path.display()))?;
        }
        drawn = format!("\nThe first {} of the simulation, host 1:\n{}", options.record, picture.text());
    }
    Ok(drawn)
}

fn print(out: &mut impl Write, report: &Report) -> std::io::Result<()> {
    let hosts = report.hosts.len();
    let cpus = report.cpus_per_host;
    let of = format!("{} of {}", counted(hosts, "host"), counted(cpus, "CPU"));
    let verdict = if report.fits { "Fits" } else { "Does not fit" };
    writeln!(
        out,
        "{verdict}: {:.3} CPUs needed, {:.3} reserved; {of}, {:.3} kept for others on each.",
        report.needed_cpus, report.reserved_cpus, report.bulk_reserve_cpus
    )?;
    for refused in &report.refused {
        writeln!(out, "  no place for {}: {}", table::visible(&refused.tenant), table::visible(&refused.why))?;
    }
    for note in &report.notes {
        writeln!(out, "  note: {}", table::visible(note))?;
    }
    writeln!(out)?;
    let rows = rows(report);
    if rows.is_empty() {
        return writeln!(out, "no tenant: the file has no [[tenant]]");
    }
    table::write(out, ["TENANT", "VCPUS", "NEEDED", "ONTIME", "PRM", "BUDGETS", "PRM INTERFACES"], &rows)?;
    writeln!(out)?;
    print_compositional(out, report)?;
    for (number, host) in (1..).zip(&report.hosts) {
        if hosts > 1 {
            let (tenants, reserved) = (counted(host.tenants.len(), "tenant"), host.reserved_cpus);
            writeln!(out, "Host {number}: {tenants}, {reserved:.3} CPUs reserved, {:.3} free.", host.free_cpus)?;
        }
        let Some(s) = &host.simulation else { continue };
        writeln!(
            out,
            "Simulation, host {number}: {} s, {} jobs, {} missed (worst by {} us), {:.3} CPUs used; per second {:.0} \
             slices, {:.0} replans, {:.0} switches, {:.0} migrations.",
            s.seconds,
            s.jobs,
            s.missed,
            s.late_max_us,
            s.used_cpus,
            s.slices_per_second,
            s.replans_per_second,
            s.switches_per_second,
            s.migrations_per_second
        )?;
    }
    Ok(())
}

fn print_compositional(out: &mut impl Write, report: &Report) -> std::io::Result<()> {
    let found = &report.compositional;
    let cpus = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |cpus| format!("{cpus:.3}"));
    let claimed = found.claimed_cpus.map_or_else(|| "-".to_owned(), |cpus| cpus.to_string());
    writeln!(
        out,
        "CPUs: Ontime {:.3}; compositional analysis (in {}): PRM {} allocated, {claimed} claimed (gEDF), DMPR {}, MPR \
         {}.",
        report.reserved_cpus,
        Nanos(found.unit_ns),
        cpus(found.prm_cpus),
        cpus(found.dmpr_cpus),
        cpus(found.mpr_cpus)
    )
}

fn rows(report: &Report) -> Vec<[String; 7]> {
    let pair = |(time, period): (u64, u64)| format!("{}/{}", Nanos(time), Nanos(period));
    report
        .tenants
        .iter()
        .map(|tenant| {
            let budgets: Vec<String> = tenant.vcpus.iter().map(|vcpu| pair(vcpu.budget_ns)).collect();
            let prm: Vec<String> =
                tenant.vcpus.iter().map(|vcpu| vcpu.prm_ns.map_or_else(|| "-".to_owned(), pair)).collect();
            [
                tenant.name.clone(),
                tenant.vcpus.len().to_string(),
                format!("{:.3}", tenant.needed_cpus),
                format!("{:.3}", tenant.reserved_cpus),
                tenant.prm_cpus.map_or_else(|| "-".to_owned(), |cpus| format!("{cpus:.3}")),
                budgets.join(", "),
                prm.join(", "),
            ]
        })
        .collect()
}
