//! `ontime bench vatc`: VATC, section IV-B.

use std::process::ExitCode;

use ontime_bench::host::Ground;
use ontime_bench::vatc;
use ontime_bench::workload::HEADERS;

use super::{Measured, Output, Whose, noted, say};

#[derive(Debug, clap::Args)]
pub struct Vatc {
    /// Methods: prio, fq_codel, vanilla, partitioned, vatc; default: all but partitioned
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',')]
    methods: Vec<String>,
    /// Numbers of bulk VMs that send
    #[arg(long, default_value = "0,1,2,3,4", value_delimiter = ',', value_parser = clap::value_parser!(u8).range(0..=4))]
    streams: Vec<u8>,
    #[command(flatten)]
    whose: Whose,
    /// Counted requests a case (1000 in the paper)
    #[arg(long, default_value_t = 1000)]
    requests: u64,
    #[command(flatten)]
    output: Output,
}

/// Measures every method with every number of streams on one emulated host.
pub fn run(args: &Vatc) -> anyhow::Result<ExitCode> {
    let defaults = ["prio", "fq_codel", "vanilla", "vatc"];
    let methods = args.whose.hardware.methods(&args.methods, &defaults, &vatc::METHODS)?;
    let mut missing = Vec::new();
    let plan = vatc::Plan { methods, streams: args.streams.clone(), requests: args.requests };
    let measure = |ground: Ground<'_>| vatc::measure(&plan, ground, &mut say, &mut noted(&mut missing));
    let (results, mut notes) = args.whose.measure(HEADERS, |site| site, measure)?;
    notes.extend([
        "paper (VATC, IV-B, its hardware): with two streams the 95th percentile of prio is 8 times VATC's on Linux 3.10 and 40 \
         times on 3.18; VATC's does not depend on the number of streams"
            .to_owned(),
        "a request comes from outside and is answered in the VM; the paper's comes from the VM and is answered outside: both ways \
         pass the host in either"
            .to_owned(),
    ]);
    let measured = Measured { experiment: "vatc", seed: 1, results, missing, notes };
    measured.report(&args.output)
}

#[cfg(test)]
mod tests {
    use ontime_bench::goals;

    use super::*;

    #[test]
    fn the_goals_name_cases_that_the_experiment_makes() {
        let all: Vec<String> =
            vatc::METHODS.iter().flat_map(|method| (0..=vatc::STREAMS_MAX).map(|n| vatc::name(method, n))).collect();
        let specs = goals::of_experiment("vatc");
        assert!(!specs.is_empty());
        for spec in specs {
            for case in spec.measure.cases() {
                assert!(all.iter().any(|name| name == case.method), "{} names no case", case.method);
                assert_eq!(case.load.floods(), !case.method.ends_with("-0"), "{}", case.method);
            }
        }
    }
}
