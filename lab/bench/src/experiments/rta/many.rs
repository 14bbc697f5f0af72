//! The part of `rta-scale` that one CPU can run: ten VMs with ten applications each (RTVirt, section 4.5, Table 5),
//! with slices divided by [`SCALE`], on an emulated host. [`super::scale`] simulates the paper's size. The two results
//! are labelled wherever they are shown.
//!
//! In: methods and a duration. Out: a [`MethodResult`] per method: missed deadlines from the applications' own logs,
//! the reserved bandwidth, what a job takes of the CPU, and in the notes the CPU time of the pacers. What a job takes,
//! less what it computes, is the cost of all scheduling, of host and guest together. Its floor is that cost with
//! [`FLOOR`].

use std::process::ExitCode;

use ontime_cli::{OK, WARNING};
use ontime_lab::images::Images;

use super::guests::{self, Guests, Log, Order, Releases, Reservations};
use super::scale::{self, SCENARIOS};
use super::{
    DEADLINES, FLOOR, JOB_TIME, Rta, Setup, WITH_FLOOR, each_case, group, methods, pacers, summarise, without_requests,
};
use crate::error::MeasureError;
use crate::experiments::{Emulated, Experiment, Measured, Methods, Output, command};
use crate::goals::Figure::Own;
use crate::goals::{GoalSpec, goal, idle};
use crate::host::{Host, Site};
use crate::paper::Figures;
use crate::report;
use crate::schema::{Load, MethodResult, Metric, Unit};
use crate::trial::CaseResults;

/// The methods, in the order of measurement.
pub(crate) const METHODS: Methods = WITH_FLOOR;
/// Divisor of the paper's slices: they need 14.2 CPUs.
pub(crate) const SCALE: u64 = 30;
/// The part of an application's slice that a job computes, percent. It is lower than elsewhere because rt-app's own
/// calls and its log, which count as its run time too, are not divided by [`SCALE`]. With 80 % of 200 to 700 us, a few
/// percent of the jobs overran and were throttled until their next period by their guest's kernel.
pub(crate) const WORK_PERCENT: u64 = 50;
/// Applications of a group, all in one VM.
pub(crate) const COPIES: usize = 10;
/// Declared bandwidth per VM for its guest's kernel and slack, us per 20 ms: ten VMs use a fifth of the CPU for it.
const DECLARED_US: u64 = 400;
/// Time from an application's start to its first release, us. Meanwhile the others start and are admitted.
const DELAY_US: u64 = 12_000_000;
/// Maximum of checks, half a second apart, until all applications are admitted.
const LOOKS: u32 = 60;
/// So many checks one after the other find the same bandwidth once all are admitted: applications of a VM ask in turn.
const SAME_LOOKS: u32 = 4;
/// The cost of all scheduling is to be this many times the floor at most. Jobs of different VMs overlap.
const FLOOR_TIMES: f64 = 3.0;
/// Name of that cost in results.
const SCHEDULING: &str = "a-job-scheduling";

/// What to measure on one emulated host.
#[derive(Debug, Clone)]
pub(crate) struct ManyPlan {
    /// Methods from [`METHODS`].
    pub methods: Vec<String>,
    /// Applications from [`groups`]: one VM each, with [`COPIES`] copies.
    pub groups: Vec<Rta>,
    /// How long each application has jobs, seconds of its guest's time.
    pub seconds: u32,
}

impl ManyPlan {
    /// Gives the host memory for the VMs.
    pub(crate) fn prepare(&self, site: Site) -> Site {
        site.with_room_for(self.groups.len() as u32)
    }
}

/// Boots the host and a VM for each group, and measures every method. If a method fails, the remaining methods are
/// measured while the host lives.
fn measure(plan: &ManyPlan, site: &Site, images: &Images) -> Result<CaseResults, MeasureError> {
    each_case(
        Setup { site, images, vms: plan.groups.len(), declared_us: DECLARED_US },
        (&plan.methods, &[()]),
        |method, ()| method.to_owned(),
        |host, guests, method, ()| measure_method(host, guests, method, &plan.groups, plan.seconds),
    )
}

/// The applications of Table 5, one group per VM.
pub(crate) fn groups(figures: &Figures) -> Vec<Rta> {
    group::table5(figures, SCALE)
}

/// The orders for a VM's applications.
fn orders(method: &str, vm: usize, rta: Rta, seconds: u32) -> Vec<Order> {
    let order = |copy| Order {
        tag: format!("{method}-{vm}-{copy}"),
        rta,
        releases: Releases::Periodic(u64::from(seconds) * 1_000_000 / rta.period_us),
        delay_us: DELAY_US,
        work_percent: WORK_PERCENT,
    };
    (0..COPIES).map(order).collect()
}

fn measure_method(
    host: &mut Host,
    guests: &Guests,
    method: &str,
    groups: &[Rta],
    seconds: u32,
) -> Result<MethodResult, MeasureError> {
    let all: Vec<Vec<Order>> = groups.iter().enumerate().map(|(vm, rta)| orders(method, vm, *rta, seconds)).collect();
    let line = |orders: &Vec<Order>| orders.iter().map(Order::line).collect::<Vec<_>>().join("; ");
    let sent = uptime(host)?;
    guests.send_lines(host, &all.iter().map(line).collect::<Vec<_>>())?;
    // Without the module guests reserve nothing on the host.
    let held = if matches!(method, "vanilla" | FLOOR) { None } else { Some(admitted(host, guests, groups)?) };
    guests::bulk_threads(host, true)?;
    let stretch = Stretch::new(sent, seconds);
    let mut run = || -> Result<_, MeasureError> {
        let wait = stretch.begin - uptime(host)?;
        let in_time = wait >= 0.0;
        host.shell(&format!("sleep {:.2}", wait.max(0.0)))?;
        let (before, spent) = (host.cpu_time()?, guests.spent(host)?);
        host.shell(&format!("sleep {:.2}", stretch.length))?;
        let a_job = guests.spent(host)?.a_job_since(&spent, jobs_a_second(groups), host.cpus);
        let after = host.cpu_time()?;
        let (mut rtas, mut logs) = (Vec::new(), Vec::<Log>::new());
        for (vm, orders) in all.iter().enumerate() {
            for order in orders {
                logs.push(guests.log(host, vm, &order.tag, order.rta)?);
                rtas.push(order.rta);
            }
        }
        Ok((before, after, (in_time, a_job), rtas, logs))
    };
    let ran = run();
    guests::bulk_threads(host, false)?;
    let (before, after, (in_time, a_job), rtas, logs) = ran?;
    let mut result = without_requests(host, method, METHODS.description(method), after.share_since(&before, host.cpus));
    result.notes.extend(pacers(&before, &after, "while all applications had jobs"));
    let reserved = held.as_ref().map(|held| held.cpus);
    summarise(&mut result, &rtas, &logs, reserved, guests.declared_cpus() * groups.len() as f64);
    if !in_time || held.is_some_and(|held| held.since - sent > stretch.starts) {
        result.notes.push(format!(
            "what a job takes is not known: {seconds} s of jobs are too short for a time in which all applications \
             have jobs, because the last ones were admitted late; give `--seconds` a higher number"
        ));
    } else if let Some((taken, vcpus)) = a_job {
        let computes = work_a_job(groups);
        let figures =
            [("a-job", taken), ("a-job-vcpus", vcpus), ("a-job-computes", computes), (SCHEDULING, taken - computes)];
        result.metrics.extend(figures.map(|(key, us)| Metric::number(key, Unit::Us, us)));
        result.notes.push(format!(
            "a job took {taken:.1} us of the CPU, {vcpus:.1} us of them its vCPU; it computes for {computes:.1} us, so \
             all scheduling, of host and guest, took {:.1} us",
            taken - computes
        ));
    }
    Ok(result)
}

/// The host's uptime, s.
fn uptime(host: &mut Host) -> Result<f64, MeasureError> {
    let said = host.shell("cut -d ' ' -f 1 /proc/uptime")?;
    said.trim().parse().map_err(|_| MeasureError::Accounting(said))
}

/// When what a job takes is measured: all applications have started by then, and none has ended.
struct Stretch {
    /// Within this time of the orders all applications have to start, s.
    starts: f64,
    /// The host's uptime at the begin, s.
    begin: f64,
    /// Its length, s: a quarter of the time in which an application has jobs, because commands in the host take time.
    length: f64,
}

impl Stretch {
    /// For orders that were sent at this uptime of the host.
    fn new(sent: f64, seconds: u32) -> Self {
        let starts = f64::from(seconds) / 2.0;
        Self { starts, begin: sent + DELAY_US as f64 / 1e6 + starts, length: f64::from(seconds) / 4.0 }
    }
}

/// How many jobs all applications have in a second.
fn jobs_a_second(groups: &[Rta]) -> f64 {
    groups.iter().map(|rta| COPIES as f64 * 1e6 / rta.period_us as f64).sum()
}

/// How long a job computes, us: the mean of all jobs.
fn work_a_job(groups: &[Rta]) -> f64 {
    let cpus: f64 = groups.iter().map(|rta| rta.bandwidth() * COPIES as f64).sum();
    cpus * WORK_PERCENT as f64 / 100.0 * 1e6 / jobs_a_second(groups)
}

/// The bandwidth that is reserved for applications.
struct Held {
    /// In CPUs.
    cpus: f64,
    /// The host's uptime when it had become so much, s.
    since: f64,
}

/// Waits until the bandwidth of all applications is reserved: all VMs have asked, what is reserved is what they need at
/// least, and it does not change any more. Returns the last reading.
fn admitted(host: &mut Host, guests: &Guests, groups: &[Rta]) -> Result<Held, MeasureError> {
    let needed: f64 = groups.iter().map(|rta| rta.bandwidth() * COPIES as f64).sum();
    let (mut held, mut same) = (Held { cpus: 0.0, since: 0.0 }, 0);
    for _ in 0..LOOKS {
        let look = Reservations::look(host)?;
        let cpus = look.beyond_declared(guests);
        if (cpus - held.cpus).abs() < 1e-6 {
            same += 1;
        } else {
            (held, same) = (Held { cpus, since: uptime(host)? }, 1);
        }
        if same >= SAME_LOOKS && look.asking() >= groups.len() && cpus >= needed * 0.999 {
            break;
        }
        host.shell("sleep 0.5")?;
    }
    Ok(held)
}

/// Notes the cost of all scheduling beside the floor, if both were measured.
fn compare_with_floor(results: &mut [MethodResult]) {
    let Some(floor) = results.iter().find(|result| result.method == FLOOR).and_then(|floor| floor.number(SCHEDULING))
    else {
        return;
    };
    for result in results.iter_mut().filter(|result| result.method != FLOOR) {
        let Some(cost) = result.number(SCHEDULING) else { continue };
        result.notes.push(format!(
            "all scheduling took {cost:.1} us a job, {:.2} times the floor of {floor:.1} us ({FLOOR})",
            cost / floor
        ));
    }
}

#[derive(Debug, clap::Args)]
struct Options {
    /// Only the simulation of the paper's size, no emulated host: as text
    #[arg(long, conflicts_with_all = ["json", "csv", "html"])]
    simulate: bool,
    /// Methods: vanilla (Linux' defaults), fifo (the floor: vCPUs at FIFO, no pacers), deadline (SCHED_DEADLINE on the
    /// host), dp-wrap, sched_ext (where it is built in), paced; default: all
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',')]
    methods: Vec<String>,
    /// How long applications have jobs, seconds of the guests' time (the simulation has the paper's 100 s)
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(4..=600))]
    seconds: u32,
    #[command(flatten)]
    emulated: Emulated,
    #[command(flatten)]
    output: Output,
}

/// Simulates both scenarios of the paper's size, measures the planner's time, and measures the scaled experiment.
fn execute(args: &Options) -> anyhow::Result<ExitCode> {
    let figures = Figures::load()?;
    let methods = methods(&METHODS.names(), &args.methods)?;
    let all = SCENARIOS.map(|scenario| scale::run(&figures, scenario, scale::LENGTH_S));
    let all = all.into_iter().collect::<Result<Vec<_>, _>>()?;
    let simulated = scale::table(&all);
    if args.simulate {
        ontime_cli::print(report::fitted(&simulated))?;
        return Ok(ExitCode::from(if all.iter().all(|of| of.missed == 0) { OK } else { WARNING }));
    }
    let plan = ManyPlan { methods, groups: groups(&figures), seconds: args.seconds };
    let mut found =
        args.emulated.without_clients().measure(true, |site, images| measure(&plan, &plan.prepare(site), images))?;
    compare_with_floor(&mut found.results);
    ontime_cli::print(report::fitted(&simulated) + "\n")?;
    let notes = vec![format!(
        "the emulated host: {}, {} VMs with a vCPU and {} applications each, slices the paper's divided by {}, so that \
         they fit on one CPU; a job computes for {} % of its slice; four threads of the host want the CPU all the time",
        args.emulated.cpus_in_words(),
        plan.groups.len(),
        COPIES,
        SCALE,
        WORK_PERCENT
    )];
    Measured { experiment: "rta-scale", seed: 0, found, notes }.report(&args.output)
}

/// RTVirt 4.5: a hundred applications.
#[derive(Debug)]
pub(crate) struct Scale;

impl Experiment for Scale {
    command!(
        "rta-scale",
        "RTVirt 4.5 (Tables 5, 6): 100 applications: as 10 VMs on one CPU measured, the paper's size, as 10 and as \
         100 VMs, simulated",
        Options,
        execute
    );

    fn cases(&self) -> Vec<(String, Load)> {
        METHODS.under(&[Load::None])
    }

    fn remarks(&self, figures: &Figures) -> Vec<String> {
        vec![figures.rtvirt.scale()]
    }

    fn timed(&self) -> &'static str {
        JOB_TIME
    }

    fn meaning(&self) -> &'static str {
        DEADLINES
    }

    fn goals(&self) -> Vec<GoalSpec> {
        vec![
            goal("misses", "paced: no deadline of a hundred applications is missed (RTVirt: none as 10 VMs with 10)")
                .missed(idle("paced")),
            goal(
                "scheduling",
                "paced: all scheduling costs at most 3 times the floor (plain FIFO without pacers; jobs overlap)",
            )
            .of(Own(SCHEDULING), idle("paced"), idle(FLOOR))
            .at_most(FLOOR_TIMES),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hundred_applications_fit_one_cpu_with_what_their_vms_declare() {
        let groups = groups(&Figures::load().unwrap());
        assert_eq!((groups.len(), groups[0]), (10, Rta { slice_us: 200, period_us: 75_000 }));
        let needed: f64 = groups.iter().map(|rta| rta.bandwidth() * COPIES as f64).sum();
        let declared = DECLARED_US as f64 / guests::DECLARED_PERIOD_US as f64 * groups.len() as f64;
        assert!((0.6..0.75).contains(&(needed + declared)), "{needed} {declared}");
        // A job's mean slice is 0.6 ms.
        assert!((290.0..310.0).contains(&work_a_job(&groups)), "{}", work_a_job(&groups));
        assert!((780.0..800.0).contains(&jobs_a_second(&groups)), "{}", jobs_a_second(&groups));
        let orders = orders("paced", 3, groups[0], 10);
        assert_eq!(orders.len(), COPIES);
        assert_eq!(orders[9].line(), "rta paced-3-9 SCHED_DEADLINE 200 75000 100 133 12000000");
    }
}
