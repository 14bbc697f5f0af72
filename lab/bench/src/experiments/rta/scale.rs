//! `rta-scale`: 100 real-time applications as 10 VMs with 10 each, and as 100 VMs with one each (RTVirt, section 4.5,
//! Tables 5 and 6), on the paper's 15 CPUs. A simulation on the planner gives the deadlines, and the planner's own CPU
//! time is measured on this machine.
//!
//! In: Table 5. Out: [`Scaled`] of each scenario. The paper's overhead is the time in its hypervisor's `schedule()` and
//! in context switches. [`Scaled::planning`] is the planner's part of `schedule()`, timed on this machine. It does not
//! include changes of priority, for which `paced` needs system calls.

use std::fmt::Write as _;
use std::time::Instant;

use ontime_figures::number;
use ontime_plan::edf::Partition;
use ontime_plan::simulate::{Options, simulate};
use ontime_plan::{Admission, Arrivals, Bandwidth, Demand, Nanos, Planner, Refusal, Reservation, Rta, Vcpu};

use crate::paper::{Figures, Overhead};

/// Duration in the paper, s.
pub(super) const LENGTH_S: u32 = 100;
/// Number of CPUs in the paper.
const CPUS: u32 = 15;
/// Applications per group. There are as many groups.
const COPIES: usize = 10;
/// Upper limit of vCPUs for a group.
const VCPUS_MAX: usize = 16;
/// Number of slices that are timed.
const TIMED: usize = 20_000;

/// Distribution of the applications.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scenario {
    /// One VM per group, with as few vCPUs as possible.
    Multi,
    /// A VM with one vCPU per application.
    Single,
}

pub(super) const SCENARIOS: [Scenario; 2] = [Scenario::Multi, Scenario::Single];

impl Scenario {
    fn description(self) -> &'static str {
        match self {
            Scenario::Multi => "10 VMs with 10",
            Scenario::Single => "100 VMs with 1",
        }
    }

    fn paper(self, figures: &Figures) -> Overhead {
        let table = figures.rtvirt.table6;
        match self {
            Scenario::Multi => table.multi_rta_vms.rtvirt,
            Scenario::Single => table.single_rta_vms.rtvirt,
        }
    }
}

/// The result of a scenario.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Scaled {
    pub scenario: Scenario,
    /// Number of vCPUs.
    pub vcpus: usize,
    /// Reserved bandwidth, including slack, CPUs.
    pub reserved_cpus: f64,
    /// Number of simulated jobs.
    pub jobs: u64,
    /// Number of late jobs.
    pub missed: u64,
    /// Slices per second.
    pub slices: f64,
    /// New plans within a slice, because a vCPU slept or woke up, per second.
    pub replans: f64,
    /// Switches of a CPU to another vCPU, per second.
    pub switches: f64,
    /// Cost of the planner, medians.
    pub planner: Cost,
    /// The paper's overhead.
    pub paper: Overhead,
}

/// Cost of the planner on this machine, ns.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Cost {
    /// Per slice.
    pub slice_ns: f64,
    /// Per sleep or wake-up within a slice.
    pub replan_ns: f64,
}

impl Scaled {
    /// The planner's share of one CPU of this machine.
    pub(super) fn planning(&self) -> f64 {
        (self.slices * self.planner.slice_ns + self.replans * self.planner.replan_ns) / 1e9
    }
}

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub(super) enum ScaleError {
    /// Table 5 exceeds the CPUs.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// An application of Table 5 is invalid.
    #[error(transparent)]
    Model(#[from] ontime_plan::ModelError),
    /// The applications do not fit on their VM's vCPUs.
    #[error(transparent)]
    Place(#[from] ontime_plan::edf::PlaceError),
}

/// The vCPUs of all VMs.
fn vcpus(figures: &Figures, scenario: Scenario) -> Result<Vec<Vcpu>, ScaleError> {
    let slack = Nanos::from_micros(figures.rtvirt.slack_us);
    let mut all = Vec::new();
    for [slice, period] in &figures.rtvirt.table5_ms.groups {
        let rta = Rta::new(Nanos::from_millis(*slice), Nanos::from_millis(*period), Arrivals::Periodic)?;
        let lists = match scenario {
            Scenario::Single => vec![vec![rta]; COPIES],
            Scenario::Multi => fewest(&rta, slack)?,
        };
        for rtas in lists {
            all.push(Vcpu::new(rtas, slack, None)?);
        }
    }
    Ok(all)
}

/// Distributes a group over as few vCPUs as possible.
fn fewest(rta: &Rta, slack: Nanos) -> Result<Vec<Vec<Rta>>, ScaleError> {
    for vcpus in 1.. {
        let mut partition = Partition::new(vcpus, slack);
        match (0..COPIES).try_for_each(|_| partition.insert(rta.clone())) {
            Ok(()) => return Ok(partition.into_vcpus()),
            Err(error) if vcpus >= VCPUS_MAX => return Err(error.into()),
            Err(_) => {}
        }
    }
    Ok(Vec::new())
}

/// Simulates a scenario and times the planner.
pub(super) fn run(figures: &Figures, scenario: Scenario, seconds: u32) -> Result<Scaled, ScaleError> {
    let all = vcpus(figures, scenario)?;
    let asked: Vec<Reservation> = all.iter().map(Reservation::from).collect();
    let admitted = Admission::new(CPUS, Bandwidth::ZERO).admit(&asked)?;
    let duration = Nanos::from_millis(u64::from(seconds) * 1_000);
    let options = Options { duration, record: Nanos::ZERO, sporadic_delay: Nanos::ZERO, seed: 1, scattered: true };
    let outcome = simulate(&all, &admitted, &options);
    let length = f64::from(seconds.max(1));
    Ok(Scaled {
        scenario,
        vcpus: all.len(),
        reserved_cpus: admitted.total.as_f64(),
        jobs: outcome.jobs(),
        missed: outcome.missed(),
        slices: outcome.slices as f64 / length,
        replans: outcome.replans as f64 / length,
        switches: outcome.switches as f64 / length,
        planner: time(&all, &admitted.shared),
        paper: scenario.paper(figures),
    })
}

/// Times slices of vCPUs that are all busy, with their periods' ends as deadlines. In each slice one vCPU sleeps and
/// wakes up. Returns medians, because other processes disturb the times.
fn time(all: &[Vcpu], shared: &[bool]) -> Cost {
    let mut planner = Planner::new(shared);
    let periods: Vec<u64> = all.iter().map(|vcpu| vcpu.period().unwrap_or(Nanos::MAX).0.max(1)).collect();
    let ids: Vec<_> = all.iter().map(|vcpu| planner.add(vcpu.bandwidth(), None)).collect();
    let mut demands = vec![Demand::NONE; all.len()];
    let (mut now, mut slices, mut replans) = (Nanos::ZERO, Vec::new(), Vec::new());
    for turn in 0..TIMED {
        // Each vCPU's periods are shifted, so that few deadlines coincide.
        for ((demand, period), shift) in demands.iter_mut().zip(&periods).zip((0_u64..).map(|n| n * 1_234_567)) {
            let deadline = ((now.0 + shift) / period + 1) * period - shift % period;
            *demand = Demand { deadline: Nanos(deadline.max(now.0 + 1)), idle: false };
        }
        let begun = Instant::now();
        let end = planner.plan(now, &demands);
        slices.push(begun.elapsed().as_nanos());
        if let Some(id) = ids.get(turn % ids.len().max(1)) {
            let begun = Instant::now();
            planner.sleep(*id, now + Nanos(1_000));
            planner.wake(*id, now + Nanos(2_000));
            replans.push(begun.elapsed().as_nanos());
        }
        now = end;
    }
    Cost { slice_ns: median(slices), replan_ns: median(replans) / 2.0 }
}

fn median(mut of: Vec<u128>) -> f64 {
    of.sort_unstable();
    of.get(of.len() / 2).map_or(0.0, |middle| *middle as f64)
}

/// Tables 5 and 6, with a column per scenario.
pub(super) fn table(all: &[Scaled]) -> String {
    let mut text = String::from(
        "rta-scale: simulation of the paper's size (15 CPUs, 500 us of slack a vCPU); the planner is timed on this \
         machine, real clock, without the changes of place\n",
    );
    let mut row = |name: &str, cell: &dyn Fn(&Scaled) -> String| {
        let cells: String = all.iter().map(|of| format!("{:>18}", cell(of))).collect();
        let _ = writeln!(text, "{name:<36}{cells}");
    };
    row("applications", &|of| of.scenario.description().to_owned());
    row("vCPUs", &|of| of.vcpus.to_string());
    row("reserved CPUs", &|of| format!("{:.3}", of.reserved_cpus));
    row("jobs", &|of| number::count(of.jobs));
    row("missed", &|of| number::count(of.missed));
    row("slices a second", &|of| format!("{:.0}", of.slices));
    row("replans a second", &|of| format!("{:.0}", of.replans));
    row("switches a second", &|of| format!("{:.0}", of.switches));
    row("planner: a slice, us", &|of| format!("{:.2}", of.planner.slice_ns / 1e3));
    row("planner: a replan, us", &|of| format!("{:.2}", of.planner.replan_ns / 1e3));
    row("planner: of a CPU", &|of| number::percent(of.planning()));
    row("the paper: missed", &|of| {
        of.paper.miss_percent.map_or_else(|| "-".to_owned(), |missed| format!("{missed} %"))
    });
    // us in the paper's 100 s.
    row("the paper: schedule(), of a CPU", &|of| number::percent(of.paper.schedule / 100e6));
    row("the paper: with switches, of a CPU", &|of| format!("{} %", of.paper.percent));
    for of in all {
        let verdict = if of.missed == 0 { "met" } else { "NOT MET" };
        let _ = writeln!(text, "[{verdict}] {}: no job is late", of.scenario.description());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hundred_applications_fit_and_miss_nothing() {
        let figures = Figures::load().unwrap();
        let all = SCENARIOS.map(|scenario| run(&figures, scenario, 2).unwrap());
        for of in &all {
            assert_eq!(of.missed, 0, "{of:?}");
            assert!(of.jobs > 1_400 && of.reserved_cpus < 15.0, "{of:?}");
            assert!(of.planner.slice_ns > 0.0 && of.planner.replan_ns > 0.0);
        }
        // The paper's number of vCPUs: 4 + 3 + 5 x 2 + 3 x 1, and one per VM.
        assert_eq!((all[0].vcpus, all[1].vcpus), (20, 100));
        assert_eq!((median(vec![3, 1, 100]), median(Vec::new())), (3.0, 0.0));
        let text = table(&all);
        assert!(text.contains("0.1 %") && text.contains("0.93 %") && text.contains("0.007 %"), "{text}");
    }
}
