//! `rta-periodic` and `rta-sporadic`: one real-time application per VM, four VMs on one CPU beside bulk work (RTVirt,
//! section 4.2, Tables 1 and 2, Figure 3). [`group`] has the applications. [`guests`] has the VMs that run them, also
//! for [`video`], [`many`] and `memcached-slo`. [`scale`] and [`motivation`] are computed.
//!
//! In: groups and methods, on one emulated host. Out: a [`MethodResult`] per pair, named `METHOD-GROUP`, with the
//! missed deadlines, the needed bandwidth and the reserved bandwidth. The applications are stock rt-app at
//! SCHED_DEADLINE in the guests. A miss is what rt-app logs on its guest's clock. `vanilla` is the kernel's own
//! scheduling: no method is applied, and the guests have no module. With the other methods the applications request
//! their bandwidth from the daemon, and the back end of that name provides it.

pub(super) mod group;
pub(super) mod guests;
pub(super) mod many;
pub(super) mod motivation;
pub(super) mod registration;
mod scale;
pub(super) mod video;

use std::process::ExitCode;

use anyhow::Context;
use ontime_figures::number;
use ontime_lab::images::Images;
use ontime_sched::ext;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

pub(super) use self::group::Rta;
pub(super) use self::guests::WORK_PERCENT;
use self::guests::{DECLARED_US, Guests, Log, Order, Releases, Reservations};
use super::{Emulated, Experiment, Measured, Methods, Output, chosen, command};
use crate::error::MeasureError;
use crate::goals::Figure::Own;
use crate::goals::{GoalSpec, goal, idle};
use crate::host::{CpuTime, Host, Site};
use crate::paper::Figures;
use crate::progress::progress;
use crate::schema::{JOBS, Load, MISSED, MethodResult, Metric, REFUSED, Run, Unit};
use crate::trial::{self, CaseResults};

/// The goals for RTVirt's Table 1, for periodic and sporadic jobs.
const TABLE_1: [GoalSpec; 12] = [
    goal("misses-h-equiv", "H-EQUIV: paced misses no deadline").missed(idle("paced-h-equiv")),
    goal("misses-h-dec", "H-DEC: paced misses no deadline").missed(idle("paced-h-dec")),
    goal("misses-h-inc", "H-INC: paced misses no deadline").missed(idle("paced-h-inc")),
    goal("misses-nh-equiv", "NH-EQUIV: paced misses no deadline").missed(idle("paced-nh-equiv")),
    goal("misses-nh-dec", "NH-DEC: paced misses no deadline").missed(idle("paced-nh-dec")),
    goal("misses-nh-inc", "NH-INC: paced misses no deadline").missed(idle("paced-nh-inc")),
    excess("excess-h-equiv", "H-EQUIV: paced reserves at most 1 % above need and slack", "paced-h-equiv"),
    excess("excess-h-dec", "H-DEC: paced reserves at most 1 % above need and slack", "paced-h-dec"),
    excess("excess-h-inc", "H-INC: paced reserves at most 1 % above need and slack", "paced-h-inc"),
    excess("excess-nh-equiv", "NH-EQUIV: paced reserves at most 1 % above need and slack", "paced-nh-equiv"),
    excess("excess-nh-dec", "NH-DEC: paced reserves at most 1 % above need and slack", "paced-nh-dec"),
    excess("excess-nh-inc", "NH-INC: paced reserves at most 1 % above need and slack", "paced-nh-inc"),
];

/// A goal for the bandwidth reserved beyond need and slack.
const fn excess(id: &'static str, text: &'static str, method: &'static str) -> GoalSpec {
    goal(id, text).only(Own("excess"), idle(method)).at_most(0.01)
}

/// The meaning of the times and metrics of experiments with applications.
const JOB_TIME: &str = "from a job's release to its end, by the guest's clock";
const DEADLINES: &str = "Deadlines by what the applications log on their guests' clock. Needed: slices over periods; \
    reserved: what the host set aside for that; excess: reserved beyond need and slack. Refused: applications that did \
    no job.";

/// The methods, in order of measurement. `vanilla` is first because the guest module cannot be unloaded.
pub(super) const METHODS: [&str; 5] = ["vanilla", "deadline", "dp-wrap", "sched_ext", "paced"];
/// The floor of what scheduling costs: vCPUs at one FIFO priority, without reservations, module and pacers.
const FLOOR: &str = "fifo";
/// [`METHODS`] and [`FLOOR`], in the order of measurement.
const WITH_FLOOR: Methods = Methods(&[
    ("vanilla", "Linux' defaults on host and guest"),
    (FLOOR, "Linux' defaults, but vCPUs at one FIFO priority: the floor of what scheduling costs"),
    ("deadline", "asked for by the guests, kept by SCHED_DEADLINE on the host"),
    ("dp-wrap", "asked for by the guests, kept by pacers by slices"),
    ("sched_ext", "asked for by the guests, kept by pacers through a scheduler in BPF"),
    ("paced", "asked for by the guests, kept by pacers"),
]);
/// Time from an application's start to its first release, us. In this time all applications are admitted and the bulk
/// threads start. With `deadline` a guest starts its application with the declared budget only, which takes longer.
const DELAY_US: u64 = 2_000_000;
const DELAY_DEADLINE_US: u64 = 9_000_000;
/// Number of VMs: one per application of a group.
const VMS: usize = 4;
/// The paper's time between sporadic requests, us, uniform. No period is longer than the shortest gap.
const GAPS_US: std::ops::RangeInclusive<u64> = 100_000..=1_000_000;

/// Release times of jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arrivals {
    /// One job per period, for a duration of the guest's time.
    Periodic {
        /// Duration, s.
        seconds: u32,
    },
    /// Jobs at random times.
    Sporadic {
        /// Jobs per application.
        requests: u32,
        /// Seed of the gaps; the same for all methods.
        seed: u64,
    },
}

impl Arrivals {
    /// Releases of the application in this VM.
    fn releases(self, rta: Rta, vm: u64) -> Releases {
        match self {
            Arrivals::Periodic { seconds } => Releases::Periodic(u64::from(seconds) * 1_000_000 / rta.period_us),
            Arrivals::Sporadic { requests, seed } => {
                let mut random = ChaCha8Rng::seed_from_u64(seed.wrapping_mul(VMS as u64).wrapping_add(vm));
                Releases::Sporadic((0..requests).map(|_| random.random_range(GAPS_US)).collect())
            }
        }
    }
}

/// What to measure on one emulated host.
#[derive(Debug, Clone)]
pub(super) struct RtaPlan {
    /// Methods from [`METHODS`].
    pub methods: Vec<String>,
    /// Names from [`group::NAMES`], with their applications.
    pub groups: Vec<(String, Vec<Rta>)>,
    /// Release times of the jobs.
    pub arrivals: Arrivals,
}

/// Name of a case in results.
pub(super) fn name(method: &str, group: &str) -> String {
    format!("{method}-{group}")
}

/// Boots the host and four VMs and measures every group with every method. If a case fails, the remaining cases are
/// measured while the host lives.
fn measure(plan: &RtaPlan, site: &Site, images: &Images) -> Result<CaseResults, MeasureError> {
    each_case(
        Setup { site, images, vms: VMS, declared_us: DECLARED_US },
        (&plan.methods, &plan.groups),
        |method, (group, _)| name(method, group),
        |host, guests, method, (group, rtas)| measure_case(host, guests, plan.arrivals, method, group, rtas),
    )
}

/// What to boot.
struct Setup<'a> {
    site: &'a Site,
    images: &'a Images,
    vms: usize,
    /// Declared bandwidth per VM, us per 20 ms.
    declared_us: u64,
}

/// Boots the host and its VMs and measures each of `cases` with each of `methods`, in the order of [`WITH_FLOOR`].
fn each_case<C>(
    setup: Setup<'_>,
    (methods, cases): (&[String], &[C]),
    name: impl Fn(&str, &C) -> String,
    measure: impl Fn(&mut Host, &Guests, &'static str, &C) -> Result<MethodResult, MeasureError>,
) -> Result<CaseResults, MeasureError> {
    let Setup { site, images, vms, declared_us } = setup;
    Guests::bring(site, images)?;
    let mut host = Host::start(site, images, &[], &[])?;
    let mut guests = Guests::boot(&mut host, vms, declared_us)?;
    let mut applied = None;
    let all = WITH_FLOOR.in_order(methods).flat_map(|method| cases.iter().map(move |case| (method, case)));
    trial::each(
        host,
        all,
        |(method, case)| name(method, case),
        |host, &(method, case)| {
            let name = name(method, case);
            if applied != Some(method) {
                progress(format_args!("{name}: applying"));
                applied = None;
                apply(host, &mut guests, method, "")?;
                applied = Some(method);
            }
            progress(format_args!("{name}: measuring"));
            measure(host, &guests, method, case)
        },
    )
}

/// Applies a method, with `more` in `sched.toml` in addition to the guests' reservations. `vanilla` applies nothing.
pub(crate) fn apply(host: &mut Host, guests: &mut Guests, method: &str, more: &str) -> Result<(), MeasureError> {
    if method == "vanilla" {
        return Ok(());
    }
    if method == FLOOR {
        return guests.make_fifo(host);
    }
    host.shell(&format!(
        "printf '%s' 'backend = \"{method}\"\ncpus = \"0-{}\"\n{}{more}' > /etc/ontime/sched.toml; kill -HUP \
         $(pgrep -x -f 'ontime daemon')",
        // The clients' CPU comes after these.
        host.cpus - 1,
        guests.reservations()
    ))?;
    host.apply("partitioned")?;
    guests.load_module(host)?;
    let reserved = guests.names().len() + more.matches("[[reservation]]").count();
    guests::wait_for_reservations(host, reserved)
}

fn measure_case(
    host: &mut Host,
    guests: &Guests,
    arrivals: Arrivals,
    method: &'static str,
    group: &str,
    rtas: &[Rta],
) -> Result<MethodResult, MeasureError> {
    let case = name(method, group);
    let before = host.cpu_time()?;
    let ran = run_all(host, guests, arrivals, &case, rtas, method);
    let after = host.cpu_time()?;
    guests::bulk_threads(host, false)?;
    let (held, logs) = ran?;
    let label = format!("{}; {}", WITH_FLOOR.description(method), group.to_uppercase());
    let mut result = without_requests(host, &case, &label, after.share_since(&before, host.cpus));
    result.notes.extend(pacers(&before, &after, WHOLE));
    summarise(&mut result, rtas, &logs, held, guests.declared_cpus() * VMS as f64);
    Ok(result)
}

/// The result of a case without requests over the network.
pub(crate) fn without_requests(host: &Host, case: &str, label: &str, cpu_share: Option<f64>) -> MethodResult {
    MethodResult::new(&Run { cpu_share, ..host.run(case, label) })
}

/// Text for [`pacers`]: the measured time is a whole case.
pub(crate) const WHOLE: &str = "the start and end of the applications with them";

/// A note on the CPU time of the pacers, if there are any, with the time that it covers.
pub(crate) fn pacers(before: &CpuTime, after: &CpuTime, when: &str) -> Option<String> {
    let share = after.pacers_share_since(before)?;
    Some(format!("the pacers took {} of a CPU ({when})", number::percent(share)))
}

/// Time from an application's start to its first release, us.
pub(crate) fn delay_us(method: &str) -> u64 {
    if method == "deadline" { DELAY_DEADLINE_US } else { DELAY_US }
}

/// Runs every VM's application. Returns the bandwidth reserved for them meanwhile (none for `vanilla`), and their logs.
fn run_all(
    host: &mut Host,
    guests: &Guests,
    arrivals: Arrivals,
    case: &str,
    rtas: &[Rta],
    method: &str,
) -> Result<(Option<f64>, Vec<Log>), MeasureError> {
    let delay_us = delay_us(method);
    let order = |(vm, rta): (u64, &Rta)| Order {
        tag: case.to_owned(),
        rta: *rta,
        releases: arrivals.releases(*rta, vm),
        delay_us,
        work_percent: WORK_PERCENT,
    };
    let lines: Vec<String> = (0..).zip(rtas).map(order).map(|order| order.line()).collect();
    guests.send_lines(host, &lines)?;
    let held = if method == "vanilla" {
        None
    } else {
        let held = Reservations::wait(host, rtas.len(), delay_us / 400_000)?;
        Some(held.beyond_declared(guests))
    };
    guests::bulk_threads(host, true)?;
    let logs = rtas.iter().enumerate().map(|(vm, rta)| guests.log(host, vm, case, *rta));
    Ok((held, logs.collect::<Result<_, _>>()?))
}

/// Metrics of applications' deadlines, and notes for the reader.
pub(crate) fn deadlines(
    rtas: &[Rta],
    logs: &[Log],
    reserved_cpus: Option<f64>,
    slack_cpus: f64,
) -> (Vec<Metric>, Vec<String>) {
    let is_late = |(rta, took): &(&Rta, u64)| *took > rta.period_us;
    let row = |(rta, log): (&Rta, &Log)| Row {
        rta: *rta,
        jobs: log.response_us.len() as u64,
        missed: log.response_us.iter().filter(|took| is_late(&(rta, **took))).count() as u64,
        worst_us: log.response_us.iter().max().copied(),
    };
    let rows: Vec<Row> = rtas.iter().zip(logs).map(row).collect();
    let mut notes = Vec::new();
    for ((rta, log), row) in rtas.iter().zip(logs).zip(&rows) {
        let Rta { slice_us, period_us } = rta;
        if log.status != 0 {
            notes.push(format!(
                "rt-app with {slice_us} us in {period_us} us ended with status {}: it was refused its bandwidth",
                log.status
            ));
        }
        if let Some((job, took)) = (1..).zip(&log.response_us).find(|(_, took)| is_late(&(rta, **took))) {
            notes.push(format!(
                "{slice_us} us in {period_us} us: {} of {} jobs were late, first job {job}, by {} us",
                row.missed,
                row.jobs,
                took - period_us
            ));
            notes.extend(log.late.iter().map(|line| format!("rt-app's line of a late job: {line}")));
        }
    }
    (metrics(&rows, reserved_cpus, slack_cpus), notes)
}

/// Counters of an application: one job per period.
#[derive(Debug)]
struct Row {
    rta: Rta,
    jobs: u64,
    /// Number of jobs that ended after their period.
    missed: u64,
    /// Longest time from a release to the job's end, us.
    worst_us: Option<u64>,
}

impl Row {
    /// The longest time from a release to the job's end, as a share of the period.
    fn slowest(&self) -> f64 {
        self.worst_us.unwrap_or(0) as f64 / self.rta.period_us as f64
    }
}

/// Metrics of all applications together, then of each.
fn metrics(rows: &[Row], reserved_cpus: Option<f64>, slack_cpus: f64) -> Vec<Metric> {
    let needed: f64 = rows.iter().map(|row| row.rta.bandwidth()).sum();
    let number_of = |is: fn(&Row) -> bool| rows.iter().filter(|row| is(row)).count() as u64;
    let sum = |of: fn(&Row) -> u64| rows.iter().map(of).sum();
    let most = |share: fn(&Row) -> f64| rows.iter().map(share).fold(0.0, f64::max);
    let mut all = vec![
        Metric::count("applications", rows.len() as u64),
        Metric::count(REFUSED, number_of(|row| row.jobs == 0)),
        Metric::number("needed", Unit::Cpus, needed),
        Metric::number("slack", Unit::Cpus, slack_cpus),
    ];
    if let Some(cpus) = reserved_cpus {
        all.push(Metric::number("reserved", Unit::Cpus, cpus));
        let due = needed + slack_cpus;
        all.extend((due > 0.0).then(|| Metric::number("excess", Unit::Share, (cpus + slack_cpus) / due - 1.0)));
    }
    all.extend([
        Metric::count(JOBS, sum(|row| row.jobs)),
        Metric::count(MISSED, sum(|row| row.missed)),
        Metric::count("with-misses", number_of(|row| row.missed > 0)),
        Metric::number("worst-missed", Unit::Share, most(|row| row.missed as f64 / row.jobs.max(1) as f64)),
        Metric::number("slowest-of-period", Unit::Share, most(Row::slowest)),
    ]);
    for (number, row) in (1..).zip(rows) {
        let part = format!("application {number}");
        let of = [
            Metric::number("slice", Unit::Us, row.rta.slice_us as f64),
            Metric::number("period", Unit::Us, row.rta.period_us as f64),
            Metric::count(JOBS, row.jobs),
            Metric::count(MISSED, row.missed),
        ];
        let worst = row.worst_us.map(|us| Metric::number("worst", Unit::Us, us as f64));
        all.extend(of.into_iter().chain(worst).map(|metric| metric.of(&part)));
    }
    all
}

/// Adds the applications' logs to a result. Its times are their response times.
pub(crate) fn summarise(
    result: &mut MethodResult,
    rtas: &[Rta],
    logs: &[Log],
    reserved_cpus: Option<f64>,
    slack_cpus: f64,
) {
    let (metrics, notes) = deadlines(rtas, logs, reserved_cpus, slack_cpus);
    let all: Vec<u64> = logs.iter().flat_map(|log| &log.response_us).map(|us| us * 1_000).collect();
    result.timed(&all);
    result.metrics.extend(metrics);
    result.notes.extend(notes);
}

/// What both have.
#[derive(Debug, clap::Args)]
struct Common {
    /// Methods: vanilla (Linux' defaults), deadline (SCHED_DEADLINE on the host), dp-wrap, sched_ext (where it is built
    /// in), paced; default: all
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',')]
    methods: Vec<String>,
    /// Groups of Table 1: h-equiv, h-dec, h-inc, nh-equiv, nh-dec, nh-inc; default: all
    #[arg(long = "group", value_name = "GROUP", value_delimiter = ',')]
    groups: Vec<String>,
    #[command(flatten)]
    emulated: Emulated,
    #[command(flatten)]
    output: Output,
}

#[derive(Debug, clap::Args)]
struct PeriodicOptions {
    /// How long each application runs, seconds of its guest's time (100 in the paper)
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=100))]
    seconds: u32,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, clap::Args)]
struct SporadicOptions {
    /// Jobs of each application, at random 0.1 to 1 s apart (the paper's 100 take 55 s of the guests' time)
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100))]
    requests: u32,
    /// Seed of the times between jobs
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    common: Common,
}

/// Measures every group with every method on one emulated host, with one job per period.
fn periodic(args: &PeriodicOptions) -> anyhow::Result<ExitCode> {
    execute("rta-periodic", &args.common, Arrivals::Periodic { seconds: args.seconds }, 0)
}

/// Measures the same with jobs at random times.
fn sporadic(args: &SporadicOptions) -> anyhow::Result<ExitCode> {
    let SporadicOptions { requests, seed, common } = args;
    execute("rta-sporadic", common, Arrivals::Sporadic { requests: *requests, seed: *seed }, *seed)
}

/// The chosen methods, from those built into this binary.
pub(super) fn methods(all: &[&'static str], asked: &[String]) -> anyhow::Result<Vec<String>> {
    let built_in: Vec<&str> = all.iter().copied().filter(|method| *method != "sched_ext" || ext::BUILT_IN).collect();
    chosen("method", asked, &built_in)
}

fn execute(experiment: &'static str, args: &Common, arrivals: Arrivals, seed: u64) -> anyhow::Result<ExitCode> {
    let figures = Figures::load()?;
    let methods = methods(&METHODS, &args.methods)?;
    let mut groups = Vec::new();
    for name in chosen("group", &args.groups, &group::NAMES)? {
        let rtas = group::scaled(&figures, &name).with_context(|| format!("group '{name}' has no slices"))?;
        groups.push((name, rtas));
    }
    let plan = RtaPlan { methods, groups, arrivals };
    let found = args.emulated.without_clients().measure(true, |site, images| measure(&plan, &site, images))?;
    let mut notes = vec![format!(
        "slices are the paper's divided by {}, as the groups need two CPUs and the virtual clock has one; a job \
         computes for {} % of its slice; four threads of the host want the CPU all the time",
        group::SCALE,
        WORK_PERCENT
    )];
    if let Arrivals::Sporadic { .. } = arrivals {
        notes.push(
            "jobs come by a timer in the guest at times drawn beforehand, not by a request over the network as in the \
             paper, which leaves the network's delay out too"
                .to_owned(),
        );
    }
    Measured { experiment, seed, found, notes }.report(&args.output)
}

/// Tables 1 and 2, Figure 3.
#[derive(Debug)]
pub(super) struct Periodic;

impl Experiment for Periodic {
    command!(
        "rta-periodic",
        "RTVirt 4.2 (Tables 1, 2, Fig. 3): periodic real-time applications in four VMs: deadlines missed, bandwidth \
         reserved for what need",
        PeriodicOptions,
        periodic
    );

    fn cases(&self) -> Vec<(String, Load)> {
        METHODS.iter().flat_map(|method| group::NAMES.map(|group| (name(method, group), Load::None))).collect()
    }

    fn remarks(&self, figures: &Figures) -> Vec<String> {
        vec![figures.rtvirt.periodic()]
    }

    fn timed(&self) -> &'static str {
        JOB_TIME
    }

    fn meaning(&self) -> &'static str {
        DEADLINES
    }

    fn goals(&self) -> Vec<GoalSpec> {
        TABLE_1.to_vec()
    }
}

/// Section 4.2 with jobs at random times.
#[derive(Debug)]
pub(super) struct Sporadic;

impl Experiment for Sporadic {
    command!(
        "rta-sporadic",
        "RTVirt 4.2: the same applications with jobs at random, 0.1 to 1 s apart",
        SporadicOptions,
        sporadic
    );

    fn cases(&self) -> Vec<(String, Load)> {
        METHODS.iter().flat_map(|method| group::NAMES.map(|group| (name(method, group), Load::None))).collect()
    }

    fn remarks(&self, figures: &Figures) -> Vec<String> {
        vec![figures.rtvirt.periodic(), figures.rtvirt.sporadic()]
    }

    fn timed(&self) -> &'static str {
        JOB_TIME
    }

    fn meaning(&self) -> &'static str {
        DEADLINES
    }

    fn goals(&self) -> Vec<GoalSpec> {
        TABLE_1.to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTA: Rta = Rta { slice_us: 5_750, period_us: 30_000 };

    #[test]
    fn sporadic_releases_are_the_papers_and_the_same_each_time() {
        let arrivals = Arrivals::Sporadic { requests: 200, seed: 3 };
        let Releases::Sporadic(gaps) = arrivals.releases(RTA, 1) else { panic!("periodic") };
        assert_eq!(gaps.len(), 200);
        assert!(gaps.iter().all(|gap| (100_000..=1_000_000).contains(gap)));
        // Uniform: the mean of 200 gaps is within three of its standard deviations.
        let mean = gaps.iter().sum::<u64>() / 200;
        assert!((495_000..605_000).contains(&mean), "{mean}");
        assert_eq!(arrivals.releases(RTA, 1), Releases::Sporadic(gaps.clone()));
        assert_ne!(arrivals.releases(RTA, 2), Releases::Sporadic(gaps));
        assert_eq!(Arrivals::Periodic { seconds: 2 }.releases(RTA, 0), Releases::Periodic(66));
    }

    #[test]
    fn the_first_late_job_is_told_with_its_number() {
        let run = Run::of("paced-x", "", "7.2", crate::schema::Clock::Virtual);
        let mut result = MethodResult::new(&run);
        let log = Log { status: 0, response_us: vec![7_000, 30_001, 30_000, 31_000], late: vec!["2 x".to_owned()] };
        summarise(&mut result, &[RTA], &[log], Some(0.2), 0.05);
        assert_eq!(
            (result.count, result.number(MISSED), result.number("excess")),
            (4, Some(2.0), Some(0.25 / (RTA.bandwidth() + 0.05) - 1.0))
        );
        let worst = result.metrics.iter().find(|metric| metric.key == "worst").unwrap();
        assert_eq!((worst.part.as_deref(), worst.print()), (Some("application 1"), "31,000".to_owned()));
        assert!(result.notes[0].contains("2 of 4 jobs were late, first job 2, by 1 us"), "{:?}", result.notes);
        assert!(result.notes[1].ends_with("2 x"));
    }

    #[test]
    fn a_simulation_alone_is_asked_for_no_file() {
        for experiment in [&video::Video as &dyn Experiment, &many::Scale] {
            let parse = |words: &[&str]| {
                let command = experiment.arguments(clap::Command::new("x"));
                command.try_get_matches_from(["x"].iter().chain(words)).map_err(|error| error.to_string())
            };
            assert!(parse(&["--json", "x"]).is_ok() && parse(&["--simulate"]).is_ok());
            for option in ["--json", "--csv", "--html"] {
                let error = parse(&["--simulate", option, "x"]).unwrap_err();
                assert!(error.contains("--simulate") && error.contains(option), "{error}");
            }
        }
    }
}
