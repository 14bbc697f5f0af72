//! `ontime bench rta-periodic` and `rta-sporadic`: RTVirt, section 4.2.

use std::process::ExitCode;

use anyhow::{Context, bail};
use ontime_bench::paper::Figures;
use ontime_bench::rta::{self, Arrivals, group};

use super::{Emulated, Measured, Output};

/// What both have.
#[derive(Debug, clap::Args)]
struct Common {
    /// Methods: vanilla (Linux' defaults), deadline (SCHED_DEADLINE on the host), paced; default: all
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

fn run(experiment: &'static str, args: &Common, arrivals: Arrivals, seed: u64) -> anyhow::Result<ExitCode> {
    let figures = Figures::load()?;
    let all = |given: &[String], known: &[&str]| {
        if given.is_empty() { known.iter().map(|name| (*name).to_owned()).collect() } else { given.to_vec() }
    };
    let (methods, names) = (all(&args.methods, &rta::METHODS), all(&args.groups, &group::NAMES));
    if let Some(unknown) = methods.iter().find(|method| !rta::METHODS.contains(&method.as_str())) {
        bail!("method '{unknown}' is not one of {}", rta::METHODS.join(", "));
    }
    let mut groups = Vec::new();
    for name in names {
        let rtas = group::scaled(&figures, &name)
            .with_context(|| format!("group '{name}' is not one of {}", group::NAMES.join(", ")))?;
        groups.push((name, rtas));
    }
    let mut missing = Vec::new();
    let results = args.emulated.measure(true, |site, images| {
        let plan = rta::Plan { site, methods, groups, arrivals };
        rta::measure(&plan, images, &mut |line| eprintln!("{line}"), &mut |case, error| {
            missing.push(format!("{case}: not measured: {error}"));
        })
    })?;
    let mut notes = vec![format!(
        "slices are the paper's divided by {}, as the groups need two CPUs and the virtual clock has one; a job computes for {} % of its slice; four \
         threads of the host want the CPU all the time",
        group::SCALE,
        rta::WORK_PERCENT
    )];
    if let Arrivals::Sporadic { .. } = arrivals {
        notes.push(
            "jobs come by a timer in the guest at times drawn beforehand, not by a request over the network as in the paper, which leaves the network's \
             delay out too"
                .to_owned(),
        );
    }
    let measured = Measured { experiment, seed, results, missing, notes };
    measured.report(&args.output)
}

#[cfg(test)]
mod tests {
    use ontime_bench::goals;

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
