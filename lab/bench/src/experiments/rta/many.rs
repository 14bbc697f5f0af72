//! The part of `rta-scale` that one CPU can run: ten VMs with ten applications each (RTVirt, section 4.5, Table 5),
//! with slices divided by [`SCALE`], on an emulated host. [`super::scale`] simulates the paper's size. The two results
//! are labelled wherever they are shown.
//!
//! In: methods and a duration. Out: a [`MethodResult`] per method: missed deadlines from the applications' own logs,
//! the reserved bandwidth, what a job takes of the CPU, and in the notes the CPU time of the pacers. What a job takes
//! with a method, less what it takes with [`FLOOR`], is what the method's scheduling costs beyond the floor: the
//! applications compute the same.

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
    guests.send_lines(host, &all.iter().map(line).collect::<Vec<_>>())?;
    // Without the module guests reserve nothing on the host.
    let held = if matches!(method, "vanilla" | FLOOR) { None } else { Some(admitted(host, guests, groups)?) };
    guests::bulk_threads(host, true)?;
    let mut run = || -> Result<_, MeasureError> {
        // By then all applications have started, and none has ended.
        host.shell(&format!("sleep {}", DELAY_US / 1_000_000))?;
        let (before, spent) = (host.cpu_time()?, guests.spent(host)?);
        host.shell(&format!("sleep {}", (seconds / 2).max(1)))?;
        let a_job = guests.spent(host)?.a_job_since(&spent, jobs_a_second(groups), host.cpus);
        let after = host.cpu_time()?;
        let (mut rtas, mut logs) = (Vec::new(), Vec::<Log>::new());
        for (vm, orders) in all.iter().enumerate() {
            for order in orders {
                logs.push(guests.log(host, vm, &order.tag, order.rta)?);
                rtas.push(order.rta);
            }
        }
        Ok((before, after, a_job, rtas, logs))
    };
    let ran = run();
    guests::bulk_threads(host, false)?;
    let (before, after, a_job, rtas, logs) = ran?;
    let mut result = without_requests(host, method, METHODS.words(method), after.share_since(&before, host.cpus));
    result.notes.extend(pacers(&before, &after, "while all applications had jobs"));
    summarise(&mut result, &rtas, &logs, held, guests.declared_cpus() * groups.len() as f64);
    if let Some((taken, vcpus)) = a_job {
        let metric = |(key, us)| Metric::number(key, Unit::Us, us);
        result.metrics.extend([("a-job", taken), ("a-job-vcpus", vcpus)].map(metric));
        result.notes.push(format!("a job took {taken:.1} us of the CPU, {vcpus:.1} us of them its vCPU"));
    }
    Ok(result)
}

/// How many jobs all applications have in a second.
fn jobs_a_second(groups: &[Rta]) -> f64 {
    groups.iter().map(|rta| COPIES as f64 * 1e6 / rta.period_us as f64).sum()
}

/// Waits until the bandwidth of all applications is reserved. Returns the last reading, CPUs.
fn admitted(host: &mut Host, guests: &Guests, groups: &[Rta]) -> Result<f64, MeasureError> {
    let needed: f64 = groups.iter().map(|rta| rta.bandwidth() * COPIES as f64).sum();
    let mut held = 0.0;
    for _ in 0..LOOKS {
        held = Reservations::look(host)?.beyond_declared(guests);
        if held >= needed * 0.999 {
            break;
        }
        host.shell("sleep 0.5")?;
    }
    Ok(held)
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
    let found = args.emulated.measure(true, |site, images| measure(&plan, &plan.prepare(site), images))?;
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
        assert!((780.0..800.0).contains(&jobs_a_second(&groups)), "{}", jobs_a_second(&groups));
        let orders = orders("paced", 3, groups[0], 10);
        assert_eq!(orders.len(), COPIES);
        assert_eq!(orders[9].line(), "rta paced-3-9 SCHED_DEADLINE 200 75000 100 133 12000000");
    }
}
