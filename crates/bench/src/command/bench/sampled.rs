//! `ontime-lab bench sampled-values`: frames of IEC 61850-9-2 into a VM.

use std::process::ExitCode;

use super::{Measured, Output, Whose, noted, say};
use crate::host::Ground;
use crate::sampled;
use crate::schema::Load;
use crate::workload::HEADERS;

#[derive(Debug, clap::Args)]
pub struct SampledValues {
    /// Methods: rt-default (the RT kernel's defaults), threaded, partitioned
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',')]
    methods: Vec<String>,
    /// What the bulk VMs receive: small-packets (UDP at full speed), tcp (at full speed), none
    #[arg(long = "load", value_name = "LOAD", value_delimiter = ',', default_value = "small-packets")]
    loads: Vec<Load>,
    /// Counted frames a case: 4,000 are a second of the host's time; the long form is 10,000,000
    #[arg(long, default_value_t = 4_000, value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    frames: u64,
    #[command(flatten)]
    whose: Whose,
    #[command(flatten)]
    output: Output,
}

/// Measures every method under every load on one emulated host.
pub fn run(args: &SampledValues) -> anyhow::Result<ExitCode> {
    let methods = args.whose.hardware.methods(&args.methods, &sampled::METHODS, &sampled::METHODS)?;
    let mut missing = Vec::new();
    let plan = sampled::Plan { methods, loads: args.loads.clone(), frames: args.frames };
    let measure = |ground: Ground<'_>| sampled::measure(&plan, ground, &mut say, &mut noted(&mut missing));
    let (results, notes) = args.whose.measure(HEADERS, sampled::Plan::prepare, measure)?;
    let measured = Measured { experiment: "sampled-values", seed: 0, results, missing, notes };
    measured.report(&args.output)
}

#[cfg(test)]
mod tests {
    use crate::goals;

    use super::*;

    #[test]
    fn the_goals_name_cases_that_are_measured_where_nothing_is_said() {
        let specs = goals::of_experiment("sampled-values");
        assert!(!specs.is_empty());
        for case in specs.iter().flat_map(|spec| spec.measure.cases()) {
            assert!(sampled::METHODS.contains(&case.method) && case.load == Load::SmallPackets, "{case:?}");
        }
    }
}
