//! `ontime-lab bench xen-arm`: Xen-ARM, Figures 1, 3 and 6.

use std::process::ExitCode;

use super::{Emulated, Measured, Output, chosen, noted, say};
use crate::xen_arm::{self, Neighbour};

#[derive(Debug, clap::Args)]
pub struct XenArm {
    /// Methods: credit (Linux as it is), partitioned, interrupt-context; default: all
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',')]
    methods: Vec<String>,
    /// CPU loads of the RT guest's own, percent
    #[arg(long = "cpu-load", value_name = "PERCENT", value_delimiter = ',', default_value = "20,40,60,80",
          value_parser = clap::value_parser!(u8).range(0..=100))]
    loads: Vec<u8>,
    /// Who never idles beside it: bulk (as in the paper), rt (an RT VM of the same level, runtime cap one half)
    #[arg(long = "beside", value_name = "CLASS", value_delimiter = ',', default_value = "bulk")]
    beside: Vec<Neighbour>,
    /// Trace where requests spend their time, too: costs what the report's notes say
    #[arg(long)]
    segments: bool,
    #[command(flatten)]
    emulated: Emulated,
    /// Counted requests a case
    #[arg(long, default_value_t = 1000)]
    requests: u64,
    /// The paper's million of requests a case: 5.6 hours of the host's time each
    #[arg(long, conflicts_with = "requests")]
    long: bool,
    /// Seed of the gaps between requests
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    output: Output,
}

/// Measures every method with every load on one emulated host.
pub fn run(args: &XenArm) -> anyhow::Result<ExitCode> {
    let methods = chosen("method", &args.methods, &xen_arm::METHODS)?;
    let mut missing = Vec::new();
    let plan = xen_arm::Plan {
        methods,
        loads: args.loads.clone(),
        neighbours: args.beside.clone(),
        traced: args.segments,
        requests: if args.long { xen_arm::LONG } else { args.requests },
        seed: args.seed,
    };
    let results = args
        .emulated
        .measure(false, |site, images| xen_arm::measure(&plan, &site, images, &mut say, &mut noted(&mut missing)))?;
    let notes = vec![
        "a delay is the request's whole way at the wire: from its passage of the NIC to that of the guest's answer; \
         the paper's figures are of its parts"
            .to_owned(),
    ];
    let measured = Measured { experiment: "xen-arm", seed: args.seed, results, missing, notes };
    measured.report(&args.output)
}

#[cfg(test)]
mod tests {
    use crate::goals;
    use crate::schema::Load;

    use super::*;

    #[test]
    fn the_goals_name_cases_that_the_experiment_makes() {
        let neighbours = [Neighbour::Bulk, Neighbour::Rt];
        let of = |method| {
            let loads = move |load| neighbours.map(|neighbour| xen_arm::name(method, load, neighbour));
            xen_arm::LOADS.into_iter().flat_map(loads)
        };
        let all: Vec<String> = xen_arm::METHODS.into_iter().flat_map(of).collect();
        let specs = goals::of_experiment("xen-arm");
        assert!(specs.len() >= xen_arm::LOADS.len());
        for case in specs.iter().flat_map(|spec| spec.measure.cases()) {
            assert!(all.iter().any(|name| name == case.method) && case.load == Load::None, "{case:?}");
        }
    }
}
