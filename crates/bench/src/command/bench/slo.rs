//! `ontime-lab bench memcached-slo`: RTVirt, section 4.4.

use std::process::ExitCode;

use super::{Emulated, Measured, Output, chosen, noted, say};
use crate::paper::Figures;
use crate::rta::WORK_PERCENT;
use crate::slo::{self, Beside};

#[derive(Debug, clap::Args)]
pub struct Slo {
    /// Methods: credit (Linux as it is), deadline (SCHED_DEADLINE on the host), paced; default: all
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',')]
    methods: Vec<String>,
    /// Who is beside memcached: alone (nobody), cpu (VMs that never idle), video (VMs with deadlines)
    #[arg(long = "beside", value_name = "WHO", value_delimiter = ',', default_value = "alone,cpu,video")]
    beside: Vec<Beside>,
    /// How many VMs that never idle (the paper has 19 on two CPUs)
    #[arg(long, default_value_t = slo::NEIGHBOURS, value_parser = clap::value_parser!(u8).range(1..=32))]
    neighbours: u8,
    /// Counted requests a case: 100 are a second of the host's time
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    requests: u64,
    /// Seed of the gaps between requests
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    emulated: Emulated,
    #[command(flatten)]
    output: Output,
}

/// Measures every method beside everybody on one emulated host.
pub fn run(args: &Slo) -> anyhow::Result<ExitCode> {
    let figures = Figures::load()?;
    let methods = chosen("method", &args.methods, &slo::METHODS)?;
    let mut missing = Vec::new();
    let (beside, neighbours) = (args.beside.clone(), args.neighbours);
    let plan = slo::Plan { methods, beside, neighbours, requests: args.requests, seed: args.seed };
    let results = args.emulated.measure(true, |site, images| {
        slo::measure(&plan, &figures, &plan.prepare(site), images, &mut say, &mut noted(&mut missing))
    })?;
    let notes = vec![format!(
        "one CPU: {} VMs that never idle for the paper's 19 on two; four video VMs, one of each frame rate, with the \
         paper's slices divided by {} (half a CPU in all with memcached, as the paper's 7.44 of 15), whose jobs \
         compute for {WORK_PERCENT} % of their slice; gaps are normally distributed, mean 10 ms, standard deviation \
         1.7 ms (the paper does not say which), from an answer to the next request",
        args.neighbours,
        slo::VIDEO_SCALE
    )];
    let measured = Measured { experiment: "memcached-slo", seed: args.seed, results, missing, notes };
    measured.report(&args.output)
}

#[cfg(test)]
mod tests {
    use crate::goals;

    use super::*;

    #[test]
    fn the_goals_name_cases_that_the_experiment_makes() {
        let all: Vec<String> =
            slo::METHODS.iter().flat_map(|method| slo::BESIDE.map(|beside| slo::name(method, beside))).collect();
        let specs = goals::of_experiment("memcached-slo");
        assert_eq!(specs.len(), 3);
        for case in specs.iter().flat_map(|spec| spec.measure.cases()) {
            assert!(all.iter().any(|name| name == case.method) && !case.load.floods(), "{case:?}");
        }
    }
}
