//! `ontime-lab bench rta-periodic` and `rta-sporadic`: RTVirt, section 4.2.

use std::process::ExitCode;

use anyhow::Context;
use ontime_sched::ext;

use super::{Emulated, Measured, Output, chosen, noted, say};
use crate::paper::Figures;
use crate::rta::{self, Arrivals, group};

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
pub struct Periodic {
    /// How long each application runs, seconds of its guest's time (100 in the paper)
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=100))]
    seconds: u32,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, clap::Args)]
pub struct Sporadic {
    /// Jobs of each application, at random 0.1 to 1 s apart (the paper's 100 take 55 s of the guests' time)
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100))]
    requests: u32,
    /// Seed of the times between jobs
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    common: Common,
}

/// Measures every group by every method on one emulated host, with a job each period.
pub fn periodic(args: &Periodic) -> anyhow::Result<ExitCode> {
    run("rta-periodic", &args.common, Arrivals::Periodic { seconds: args.seconds }, 0)
}

/// The same with jobs at random.
pub fn sporadic(args: &Sporadic) -> anyhow::Result<ExitCode> {
    let Sporadic { requests, seed, common } = args;
    run("rta-sporadic", common, Arrivals::Sporadic { requests: *requests, seed: *seed }, *seed)
}

/// The methods asked for, of those that this binary has.
pub(super) fn methods(asked: &[String]) -> anyhow::Result<Vec<String>> {
    let built_in: Vec<&str> =
        rta::METHODS.into_iter().filter(|method| *method != "sched_ext" || ext::BUILT_IN).collect();
    chosen("method", asked, &built_in)
}

fn run(experiment: &'static str, args: &Common, arrivals: Arrivals, seed: u64) -> anyhow::Result<ExitCode> {
    let figures = Figures::load()?;
    let methods = methods(&args.methods)?;
    let mut groups = Vec::new();
    for name in chosen("group", &args.groups, &group::NAMES)? {
        let rtas = group::scaled(&figures, &name).with_context(|| format!("group '{name}' has no slices"))?;
        groups.push((name, rtas));
    }
    let mut missing = Vec::new();
    let plan = rta::Plan { methods, groups, arrivals };
    let results = args
        .emulated
        .measure(true, |site, images| rta::measure(&plan, &site, images, &mut say, &mut noted(&mut missing)))?;
    let mut notes = vec![format!(
        "slices are the paper's divided by {}, as the groups need two CPUs and the virtual clock has one; a job \
         computes for {} % of its slice; four threads of the host want the CPU all the time",
        group::SCALE,
        rta::WORK_PERCENT
    )];
    if let Arrivals::Sporadic { .. } = arrivals {
        notes.push(
            "jobs come by a timer in the guest at times drawn beforehand, not by a request over the network as in the \
             paper, which leaves the network's delay out too"
                .to_owned(),
        );
    }
    let measured = Measured { experiment, seed, results, missing, notes };
    measured.report(&args.output)
}

#[cfg(test)]
mod tests {
    use crate::goals;

    use super::*;

    #[test]
    fn the_goals_name_cases_that_the_experiments_make() {
        let all: Vec<String> =
            rta::METHODS.iter().flat_map(|method| group::NAMES.map(|group| rta::name(method, group))).collect();
        for experiment in ["rta-periodic", "rta-sporadic"] {
            let specs = goals::of_experiment(experiment);
            assert_eq!(specs.len(), 2 * group::NAMES.len());
            for case in specs.iter().flat_map(|spec| spec.measure.cases()) {
                assert!(all.iter().any(|name| name == case.method) && !case.load.floods(), "{case:?}");
            }
            assert!(!Figures::load().unwrap().notes(experiment).is_empty());
        }
    }
}
