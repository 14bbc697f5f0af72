//! `video`: VMs whose video applications start and end at random times (RTVirt, section 4.3, Table 3, Figure 4).
//!
//! In: a seed, from which [`draw`] draws the applications as the paper does. Out: two results, which are labelled
//! wherever they are shown. [`simulated`] simulates the paper's size on the planner: 4 VMs with 4 vCPUs on 15 CPUs for
//! 10 minutes. [`measure`] scales that to one CPU, with 4 VMs with one vCPU each, and gives a [`MethodResult`] per
//! method on an emulated host.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use ontime_cli::{OK, WARNING};
use ontime_figures::number;
use ontime_lab::images::Images;
use ontime_plan::simulate::{Change, IdleReservation, Options, Outcome, TemporaryRta, simulate_stays};
use ontime_plan::{Arrivals, Bandwidth, ModelError, Nanos};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::guests::{self, DECLARED_US, Guests, Log, Order, Releases};
use super::{
    DEADLINES, JOB_TIME, Rta, Setup, WHOLE, WITH_FLOOR, WORK_PERCENT, each_case, group, methods, pacers, summarise,
    without_requests,
};
use crate::error::MeasureError;
use crate::experiments::{Emulated, Experiment, Measured, Output, command, to_write};
use crate::goals::{GoalSpec, goal, idle};
use crate::host::{Host, Site};
use crate::paper::Figures;
use crate::report;
use crate::schema::{Load, MethodResult};
use crate::trial::CaseResults;

/// The methods, in the order of measurement, as for `rta-periodic`.
pub(crate) const METHODS: [&str; 5] = super::METHODS;
/// Divisor of the paper's slices on the emulated host: four applications of the highest rate need 0.63 of its one CPU.
pub(crate) const SCALE: u64 = 6;
/// Number of VMs, and of vCPUs per VM in the simulation.
const VMS: usize = 4;
const VCPUS: usize = 4;
/// CPUs of the simulation, as in the paper.
const CPUS: u32 = 15;
/// Duration in the paper.
pub(crate) const LENGTH_MS: u64 = 600_000;
/// Number of applications in the paper. A draw with fewer is not comparable.
pub(crate) const APPLICATIONS: usize = 54;
/// Duration of an application or an idle interval, as a share of the whole: 1/60 to 6/10 (10 s to 6 min of 10 min).
const SHORTEST: u64 = 60;
const LONGEST: (u64, u64) = (6, 10);
/// Bandwidth of an idle vCPU, millionths.
const IDLE_PPM: u64 = 100_000;
/// Time from an application's start to its first release on the emulated host, us. Meanwhile it is admitted.
const DELAY_US: u64 = 400_000;

/// A frame rate, or idleness, on a vCPU for some time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RatePeriod {
    /// Number among all VMs' vCPUs.
    pub vcpu: usize,
    /// Index in Table 3; none for idle.
    pub rate: Option<usize>,
    /// Start, ms.
    pub from_ms: u64,
    /// End, ms.
    pub until_ms: u64,
}

/// Fills each vCPU's time with spells up to the end: one of Table 3's rates or idleness, with equal probability, for a
/// uniformly distributed time.
pub(crate) fn draw(vcpus: usize, length_ms: u64, seed: u64) -> Vec<RatePeriod> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let lengths = length_ms / SHORTEST..=length_ms * LONGEST.0 / LONGEST.1;
    let mut spells = Vec::new();
    for vcpu in 0..vcpus {
        let mut now = 0;
        while now < length_ms {
            let until_ms = (now + random.random_range(lengths.clone())).min(length_ms);
            let rate = Some(random.random_range(0..=4_usize)).filter(|rate| *rate < 4);
            spells.push(RatePeriod { vcpu, rate, from_ms: now, until_ms });
            now = until_ms;
        }
    }
    spells
}

/// Result of the simulation.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Simulated {
    /// The first seed, from the given one on, whose draw has [`APPLICATIONS`].
    pub seed: u64,
    /// Simulated time, ms.
    pub length_ms: u64,
    /// Number of applications drawn.
    pub applications: usize,
    /// Number of refused applications.
    pub refused: usize,
    /// Number of applications that missed a deadline.
    pub with_misses: usize,
    /// Largest share of missed deadlines of one application.
    pub worst: f64,
    /// Number of jobs.
    pub jobs: u64,
    /// Number of late jobs.
    pub missed: u64,
    /// Mean reserved bandwidth, CPUs.
    pub mean_cpus: f64,
    /// Bandwidth if each VM had its highest need reserved all the time, CPUs.
    pub static_cpus: f64,
    /// Changes of the VMs' reservations, in order of time.
    pub changes: Vec<Change>,
}

/// Simulates the paper's size on the planner.
pub(crate) fn simulated(figures: &Figures, seed: u64, length_ms: u64) -> Result<Simulated, ModelError> {
    let rates = group::video(figures, 1);
    let applications = |spells: &[RatePeriod]| spells.iter().filter(|spell| spell.rate.is_some()).count();
    let draws = (seed..seed.saturating_add(1_000)).map(|seed| (seed, draw(VMS * VCPUS, length_ms, seed)));
    let mut draws = draws.filter(|(_, spells)| applications(spells) >= APPLICATIONS);
    let (seed, spells) = draws.next().unwrap_or_else(|| (seed, draw(VMS * VCPUS, length_ms, seed)));
    let stays = stays(&spells, &rates)?;
    let between =
        IdleReservation { idle: Bandwidth::ppm(IDLE_PPM), slack: Nanos::from_micros(figures.rtvirt.slack_us) };
    let options = Options {
        duration: Nanos::from_millis(length_ms),
        record: Nanos::ZERO,
        sporadic_delay: Nanos::ZERO,
        seed,
        scattered: false,
    };
    let (outcome, changes) = simulate_stays(CPUS, VMS * VCPUS, &stays, between, &options);
    Ok(summary(seed, length_ms, &outcome, changes))
}

fn stays(spells: &[RatePeriod], rates: &[Rta]) -> Result<Vec<TemporaryRta>, ModelError> {
    let busy = spells.iter().filter_map(|spell| Some((spell, rates.get(spell.rate?)?)));
    busy.map(|(spell, rta)| {
        let (slice, period) = (Nanos::from_micros(rta.slice_us), Nanos::from_micros(rta.period_us));
        Ok(TemporaryRta {
            vcpu: spell.vcpu,
            rta: ontime_plan::Rta::new(slice, period, Arrivals::Periodic)?,
            lead: Nanos::ZERO,
            from: Nanos::from_millis(spell.from_ms),
            until: Nanos::from_millis(spell.until_ms),
        })
    })
    .collect()
}

fn summary(seed: u64, length_ms: u64, outcome: &Outcome, changes: Vec<Change>) -> Simulated {
    let share = |rta: &ontime_plan::simulate::RtaResult| rta.missed as f64 / rta.jobs.max(1) as f64;
    let (mut mean, mut most) = (0.0, 0.0);
    for vm in 0..VMS {
        let (area, peak) = reserved(&changes, vm, length_ms);
        mean += area;
        most += peak;
    }
    Simulated {
        seed,
        length_ms,
        applications: outcome.rtas.len(),
        refused: outcome.rtas.iter().filter(|rta| rta.jobs == 0).count(),
        with_misses: outcome.rtas.iter().filter(|rta| rta.missed > 0).count(),
        worst: outcome.rtas.iter().map(share).fold(0.0, f64::max),
        jobs: outcome.jobs(),
        missed: outcome.missed(),
        mean_cpus: mean,
        static_cpus: most,
        changes,
    }
}

/// A VM's reserved bandwidth over time: mean and maximum, CPUs.
fn reserved(changes: &[Change], vm: usize, length_ms: u64) -> (f64, f64) {
    let idle = Bandwidth::ppm(IDLE_PPM).as_f64();
    let mut now = [idle; VCPUS];
    let (mut area, mut most, mut at) = (0.0, 0.0_f64, 0);
    let end = length_ms * 1_000_000;
    let own = changes.iter().filter(|change| change.vcpu / VCPUS == vm);
    for change in own {
        area += now.iter().sum::<f64>() * change.at.0.saturating_sub(at) as f64;
        // Changes at the same time count as one.
        if change.at.0 > at {
            most = most.max(now.iter().sum());
            at = change.at.0;
        }
        if let Some(now) = now.get_mut(change.vcpu % VCPUS) {
            *now = change.bandwidth.as_f64();
        }
    }
    area += now.iter().sum::<f64>() * end.saturating_sub(at) as f64;
    (area / end as f64, most.max(now.iter().sum()))
}

impl Simulated {
    /// The result as a sentence.
    pub(crate) fn description(&self) -> String {
        format!(
            "simulation (not measured; the paper's size: {VMS} VMs with {VCPUS} vCPUs on {CPUS} CPUs, {} s, seed {}): \
             {} applications, {} refused, {} with misses, the worst {} of its deadlines; {} of {} jobs late; {} CPUs \
             reserved on average, {} where each VM had its highest need all the time",
            self.length_ms / 1_000,
            self.seed,
            self.applications,
            self.refused,
            self.with_misses,
            number::percent(self.worst),
            number::count(self.missed),
            number::count(self.jobs),
            number::significant(self.mean_cpus),
            number::significant(self.static_cpus)
        )
    }

    /// Figure 4a as CSV: the reserved bandwidth over time, one line per change.
    pub(crate) fn csv(&self) -> String {
        let mut text = String::from("seconds,vm,vcpu,cpus\n");
        for Change { at, vcpu, bandwidth } in &self.changes {
            let _ = writeln!(
                text,
                "{:.3},{},{},{:.6}",
                at.0 as f64 / 1e9,
                vcpu / VCPUS + 1,
                vcpu % VCPUS + 1,
                bandwidth.as_f64()
            );
        }
        text
    }
}

/// Boots the host and four VMs and measures every method. If a method fails, the remaining methods are measured while
/// the host lives.
fn measure(args: &Asked, figures: &Figures, site: &Site, images: &Images) -> Result<CaseResults, MeasureError> {
    let rates = group::video(figures, SCALE);
    let spells = draw(VMS, u64::from(args.seconds) * 1_000, args.seed);
    each_case(
        Setup { site, images, vms: VMS, declared_us: DECLARED_US },
        (&args.methods, &[()]),
        |method, ()| method.to_owned(),
        |host, guests, method, ()| measure_method(host, guests, method, &spells, &rates),
    )
}

/// A VM's applications with their names, and the line that makes its guest run them one after the other.
fn programme(method: &str, vm: usize, spells: &[RatePeriod], rates: &[Rta]) -> (Vec<(String, Rta)>, String) {
    let (mut all, mut line) = (Vec::new(), String::from("{ "));
    for (place, spell) in spells.iter().filter(|spell| spell.vcpu == vm).enumerate() {
        let length_us = (spell.until_ms - spell.from_ms) * 1_000;
        let rta = spell.rate.and_then(|rate| rates.get(rate)).copied();
        match rta.map(|rta| (rta, length_us.saturating_sub(DELAY_US) / rta.period_us)) {
            Some((rta, jobs)) if jobs > 0 => {
                let tag = format!("{method}-{vm}-{place}");
                let order = Order {
                    tag: tag.clone(),
                    rta,
                    releases: Releases::Periodic(jobs),
                    delay_us: DELAY_US,
                    work_percent: WORK_PERCENT,
                };
                let _ = write!(line, "{}; ", order.line_in_turn());
                all.push((tag, rta));
            }
            _ => {
                let _ = write!(line, "sleep {}.{:06}; ", length_us / 1_000_000, length_us % 1_000_000);
            }
        }
    }
    line.push_str("} &");
    (all, line)
}

fn measure_method(
    host: &mut Host,
    guests: &Guests,
    method: &str,
    spells: &[RatePeriod],
    rates: &[Rta],
) -> Result<MethodResult, MeasureError> {
    let programmes: Vec<_> = (0..VMS).map(|vm| programme(method, vm, spells, rates)).collect();
    let lines: Vec<String> = programmes.iter().map(|(_, line)| line.clone()).collect();
    guests::bulk_threads(host, true)?;
    let before = host.cpu_time()?;
    let mut run = || -> Result<(Vec<Rta>, Vec<Log>), MeasureError> {
        guests.send_lines(host, &lines)?;
        let (mut rtas, mut logs) = (Vec::new(), Vec::new());
        for (vm, (all, _)) in programmes.iter().enumerate() {
            for (tag, rta) in all {
                logs.push(guests.log(host, vm, tag, *rta)?);
                rtas.push(*rta);
            }
        }
        Ok((rtas, logs))
    };
    let ran = run();
    let after = host.cpu_time()?;
    guests::bulk_threads(host, false)?;
    let (rtas, logs) = ran?;
    let mut result =
        without_requests(host, method, WITH_FLOOR.description(method), after.share_since(&before, host.cpus));
    result.notes.extend(pacers(&before, &after, WHOLE));
    summarise(&mut result, &rtas, &logs, None, guests.declared_cpus() * VMS as f64);
    Ok(result)
}

#[derive(Debug, Clone, clap::Args)]
struct Asked {
    /// Only the simulation of the paper's size, no emulated host: as text
    #[arg(long, conflicts_with_all = ["json", "csv", "html"])]
    simulate: bool,
    /// What each VM has reserved over time in the simulation (Figure 4), as CSV
    #[arg(long, value_name = "FILE", value_parser = to_write)]
    allocations: Option<PathBuf>,
    /// Methods: vanilla (Linux' defaults), deadline (SCHED_DEADLINE on the host), dp-wrap, sched_ext (where it is built
    /// in), paced; default: all
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',')]
    methods: Vec<String>,
    /// How long, seconds of the guests' time; applications last from a sixtieth to six tenths of it (the simulation has
    /// the paper's 600 s)
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(5..=600))]
    seconds: u32,
    /// Seed of the applications' starts and ends
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    emulated: Emulated,
    #[command(flatten)]
    output: Output,
}

/// Simulates the paper's size, and measures the scaled experiment on an emulated host.
fn execute(args: &Asked) -> anyhow::Result<ExitCode> {
    let figures = Figures::load()?;
    let methods = methods(&METHODS, &args.methods)?;
    let simulated = simulated(&figures, args.seed, LENGTH_MS)?;
    if let Some(path) = &args.allocations {
        fs::write(path, simulated.csv()).with_context(|| format!("writing {}", path.display()))?;
    }
    if args.simulate {
        let texts = [simulated.description(), figures.rtvirt.video()].map(|text| report::fitted(&text) + "\n");
        ontime_cli::print(texts.concat())?;
        return Ok(ExitCode::from(if simulated.missed == 0 { OK } else { WARNING }));
    }
    let args = &Asked { methods, ..args.clone() };
    let found = args.emulated.without_clients().measure(true, |site, images| measure(args, &figures, &site, images))?;
    let notes = vec![
        format!(
            "the emulated host: {}, four VMs with a vCPU each, {} s, slices the paper's divided by {}, so that they \
             fit on one CPU; a job computes for {WORK_PERCENT} % of its slice; four threads of the host want the CPU \
             all the time",
            args.emulated.cpus_in_words(),
            args.seconds,
            SCALE
        ),
        simulated.description(),
    ];
    Measured { experiment: "video", seed: args.seed, found, notes }.report(&args.output)
}

/// RTVirt 4.3: applications that start and end at random times.
#[derive(Debug)]
pub(crate) struct Video;

impl Experiment for Video {
    command!(
        "video",
        "RTVirt 4.3 (Table 3, Fig. 4): video applications that come and go at random: one CPU measured, the paper's \
         size simulated",
        Asked,
        execute
    );

    fn cases(&self) -> Vec<(String, Load)> {
        METHODS.map(|method| (method.to_owned(), Load::None)).to_vec()
    }

    fn remarks(&self, figures: &Figures) -> Vec<String> {
        vec![figures.rtvirt.video()]
    }

    fn timed(&self) -> &'static str {
        JOB_TIME
    }

    fn meaning(&self) -> &'static str {
        DEADLINES
    }

    fn goals(&self) -> Vec<GoalSpec> {
        vec![goal("misses", "paced: no application misses a deadline (RTVirt: 5 of 54 did)").missed(idle("paced"))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spells_fill_each_vcpu_and_last_as_the_papers() {
        let spells = draw(16, LENGTH_MS, 1);
        assert_eq!(spells, draw(16, LENGTH_MS, 1));
        for vcpu in 0..16 {
            let own: Vec<&RatePeriod> = spells.iter().filter(|spell| spell.vcpu == vcpu).collect();
            assert_eq!((own[0].from_ms, own[own.len() - 1].until_ms), (0, LENGTH_MS));
            assert!(own.windows(2).all(|pair| pair[0].until_ms == pair[1].from_ms));
            let ended = own.iter().take(own.len() - 1).map(|spell| spell.until_ms - spell.from_ms);
            assert!(ended.into_iter().all(|length| (10_000..=360_000).contains(&length)));
        }
        assert!(spells.iter().any(|spell| spell.rate.is_none()) && spells.iter().all(|spell| spell.rate < Some(4)));
    }

    #[test]
    fn the_papers_set_misses_nothing_in_the_simulation() {
        // Simulates a twentieth of the paper's time.
        let found = simulated(&Figures::load().unwrap(), 1, LENGTH_MS / 20).unwrap();
        assert!(found.applications >= APPLICATIONS, "{found:?}");
        assert_eq!((found.missed, found.with_misses, found.worst), (0, 0, 0.0));
        assert!(
            found.jobs > 5_000 && found.mean_cpus < found.static_cpus && found.mean_cpus > 5.0,
            "{}",
            found.description()
        );
        assert!(found.csv().lines().count() > found.applications - found.refused);
    }

    #[test]
    fn what_a_vm_has_reserved_is_its_vcpus_sum() {
        let change = |second: u64, vcpu, percent: u64| Change {
            at: Nanos::from_millis(second * 1_000),
            vcpu,
            bandwidth: Bandwidth::ppm(percent * 10_000),
        };
        // vCPU 0 of the first VM has 90 % for half of the time. Both changes at 300 s count as one.
        let (mean, most) =
            reserved(&[change(0, 0, 90), change(300, 0, 10), change(300, 1, 10), change(1, 4, 100)], 0, LENGTH_MS);
        assert!((mean - 0.8).abs() < 1e-9 && (most - 1.2).abs() < 1e-9, "{mean} {most}");
    }

    #[test]
    fn a_vms_programme_has_its_spells_in_turn() {
        let rates = [Rta { slice_us: 3_000, period_us: 41_000 }];
        let spell = |vcpu, rate, from_ms, until_ms| RatePeriod { vcpu, rate, from_ms, until_ms };
        let spells = [
            spell(0, None, 0, 1_500),
            spell(1, None, 0, 9),
            spell(0, Some(0), 1_500, 2_811),
            spell(0, Some(0), 2_811, 3_000),
        ];
        let (all, line) = programme("paced", 0, &spells, &rates);
        assert_eq!(all, [("paced-0-1".to_owned(), rates[0])]);
        // 400 of 1,311 ms are for admission. A spell too short for a job is idle.
        assert_eq!(
            line,
            "{ sleep 1.500000; run paced-0-1 SCHED_DEADLINE 3000 41000 2400 22 400000; sleep 0.189000; } &"
        );
    }
}
