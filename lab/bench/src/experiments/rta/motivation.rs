//! `motivation`: RTVirt's section 2 (Figure 1), as a simulation. Two schedulers without knowledge of each other miss
//! deadlines on a fully reserved CPU, although each is correct by itself. The planner, which knows the next deadlines,
//! misses none.
//!
//! In: the figure's VMs and applications. Out: jobs and misses of each application under a host EDF with fixed budgets
//! ([`unaware`]) and under Ontime's planner ([`aware`]). Does no I/O.

use std::fmt::Write as _;
use std::process::ExitCode;

use ontime_plan::simulate::{IdleReservation, Options, TemporaryRta, simulate_stays};
use ontime_plan::{Arrivals, Bandwidth, ModelError, Nanos, Rta};

use crate::experiments::Experiment;

/// Slice and period of the VMs, ms (Figure 1a).
pub(crate) const VMS: [(u64, u64); 3] = [(5, 15), (5, 10), (5, 30)];
/// Slice and period of the first VM's applications, ms (Figure 1b), and the release of their first jobs. The figure
/// draws the second application's later than the first's, and the text gives no time; from 2 to 6 ms the result is the
/// same.
pub(crate) const RTAS: [(u64, u64, u64); 2] = [(1, 15, 0), (4, 15, 5)];
/// Duration, ms.
pub(crate) const LENGTH: u64 = 30_000;

/// Jobs of an application whose deadline has passed, and the misses among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Jobs {
    /// Number of jobs.
    pub jobs: u64,
    /// Number of late jobs.
    pub missed: u64,
}

#[derive(Debug, Clone, Copy)]
struct Job {
    deadline: u64,
    left: u64,
}

/// EDF on both levels, without knowledge of each other: the host gives each VM its slice per period, and the slice
/// passes unused if the guest has no runnable job. In steps of 1 ms.
pub(crate) fn unaware(first_jobs: [u64; 2]) -> [Jobs; 2] {
    let (mut left, mut pending) = ([0; 3], [const { Vec::new() }; 2]);
    let mut found = [Jobs::default(); 2];
    for now in 0..LENGTH {
        for (left, (slice, period)) in left.iter_mut().zip(VMS) {
            if now % period == 0 {
                *left = slice;
            }
        }
        for ((queue, (slice, period, _)), first) in pending.iter_mut().zip(RTAS).zip(first_jobs) {
            if now >= first && (now - first) % period == 0 {
                queue.push(Job { deadline: now + period, left: slice });
            }
        }
        // The VM with the earliest end of its period, among VMs with a part of their slice left; the first of equal
        // ones.
        let ends = left.iter().zip(VMS).enumerate().filter(|(_, (left, _))| **left > 0);
        let Some(vm) = ends.min_by_key(|(vm, (_, (_, period)))| ((now / period + 1) * period, *vm)).map(|(vm, _)| vm)
        else {
            continue;
        };
        if let Some(left) = left.get_mut(vm) {
            *left -= 1;
        }
        if vm != 0 {
            continue;
        }
        let heads = pending.iter_mut().zip(&mut found).filter(|(queue, _)| !queue.is_empty());
        let earliest = heads.min_by_key(|(queue, _)| queue.first().map(|job| job.deadline));
        if let Some((queue, found)) = earliest {
            if let Some(job) = queue.first_mut() {
                job.left -= 1;
                if job.left == 0 {
                    found.jobs += 1;
                    found.missed += u64::from(now + 1 > job.deadline);
                    queue.remove(0);
                }
            }
        }
    }
    found
}

/// The same VMs and applications under Ontime's planner, without slack, since the CPU is fully reserved. Also returns
/// the number of misses of the other VMs' applications.
pub(crate) fn aware(first_jobs: [u64; 2]) -> Result<([Jobs; 2], u64), ModelError> {
    let ms = Nanos::from_millis;
    let stay = |vcpu, slice, period, first| {
        let rta = Rta::new(ms(slice), ms(period), Arrivals::Periodic)?;
        Ok(TemporaryRta { vcpu, rta, lead: ms(first), from: Nanos::ZERO, until: ms(LENGTH) })
    };
    let own = RTAS.into_iter().zip(first_jobs).map(|((slice, period, _), first)| stay(0, slice, period, first));
    let others = (1..).zip(VMS.into_iter().skip(1)).map(|(vcpu, (slice, period))| stay(vcpu, slice, period, 0));
    let stays: Vec<TemporaryRta> = own.chain(others).collect::<Result<_, ModelError>>()?;
    let between = IdleReservation { idle: Bandwidth::ppm(10), slack: Nanos::ZERO };
    let options =
        Options { duration: ms(LENGTH), record: Nanos::ZERO, sporadic_delay: Nanos::ZERO, seed: 0, scattered: false };
    let (outcome, _) = simulate_stays(1, VMS.len(), &stays, between, &options);
    let mut found = [Jobs::default(); 2];
    for (found, rta) in found.iter_mut().zip(&outcome.rtas) {
        *found = Jobs { jobs: rta.jobs, missed: rta.missed };
    }
    Ok((found, outcome.rtas.iter().skip(RTAS.len()).map(|rta| rta.missed).sum()))
}

/// The figure as a table.
pub(crate) fn table() -> Result<String, ModelError> {
    let first_jobs = RTAS.map(|(_, _, first)| first);
    let (aware, others) = aware(first_jobs)?;
    let mut text = format!(
        "motivation: simulation, {} s of three VMs on one CPU, all of it reserved; deadlines missed of the first VM's \
         applications\n{:<58}{:>16}{:>16}\n",
        LENGTH / 1_000,
        "",
        "1 ms in 15",
        "4 ms in 15"
    );
    for (name, [first, second]) in [
        ("EDF on host and guest, which do not know of each other", unaware(first_jobs)),
        ("Ontime's planner, told the guests' next deadlines", aware),
    ] {
        let shown = |found: Jobs| format!("{} of {}", found.missed, found.jobs);
        let _ = writeln!(text, "{name:<58}{:>16}{:>16}", shown(first), shown(second));
    }
    let _ = writeln!(text, "the paper (Figure 1, by hand): the first misses none, the second every other one");
    let _ = writeln!(text, "the other VMs' applications under the planner: {others} missed");
    Ok(text)
}

/// Figure 1.
#[derive(Debug)]
pub(crate) struct Motivation;

impl Experiment for Motivation {
    fn name(&self) -> &'static str {
        "motivation"
    }

    fn about(&self) -> &'static str {
        "RTVirt 2 (Fig. 1): two schedulers that do not know of each other, and the planner: a simulation"
    }

    fn arguments(&self, command: clap::Command) -> clap::Command {
        command
    }

    fn run(&self, _: &clap::ArgMatches) -> anyhow::Result<ExitCode> {
        ontime_cli::print(crate::report::fitted(&table()?))?;
        Ok(ExitCode::SUCCESS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unaware_schedulers_miss_every_other_deadline_and_the_planner_none() {
        for first in 2..=6 {
            let [one, two] = unaware([0, first]);
            assert_eq!((one.missed, one.jobs), (0, LENGTH / 15), "{first}");
            assert!((two.jobs / 2).abs_diff(two.missed) <= 1 && two.jobs >= LENGTH / 15 - 2, "{first}: {two:?}");
            let ([one, two], others) = aware([0, first]).unwrap();
            assert_eq!((one.missed, two.missed, others), (0, 0, 0), "{first}");
            assert!(one.jobs >= LENGTH / 15 - 1 && two.jobs >= LENGTH / 15 - 2);
        }
        // If both first jobs are released together, the budget is sufficient for both.
        assert_eq!(unaware([0, 0])[1].missed, 0);
    }
}
