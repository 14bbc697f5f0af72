//! `ontime-lab bench connections`: fresh TCP connections a second; no paper has it.

use std::process::ExitCode;

use super::{Emulated, Measured, Output, chosen, noted, say};
use crate::connections;

#[derive(Debug, clap::Args)]
pub struct Connections {
    /// Methods: threaded and partitioned (vhost-net), outsourcing
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',')]
    methods: Vec<String>,
    /// Connections a method
    #[arg(long, default_value_t = 2_000, value_parser = clap::value_parser!(u64).range(2..=20_000))]
    count: u64,
    /// Clients at once
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=100))]
    clients: u32,
    #[command(flatten)]
    emulated: Emulated,
    #[command(flatten)]
    output: Output,
}

/// Measures every method on one emulated host.
pub fn run(args: &Connections) -> anyhow::Result<ExitCode> {
    let methods = chosen("method", &args.methods, &connections::METHODS)?;
    let mut missing = Vec::new();
    let with_module = methods.iter().any(|method| method == "outsourcing");
    let plan = connections::Plan { methods, count: args.count, clients: args.clients };
    let results = args.emulated.measure(with_module, |site, images| {
        connections::measure(&plan, &site, images, &mut say, &mut noted(&mut missing))
    })?;
    let measured = Measured { experiment: "connections", seed: 1, results, missing, notes: Vec::new() };
    measured.report(&args.output)
}

#[cfg(test)]
mod tests {
    use crate::goals;

    use super::*;

    #[test]
    fn the_goals_name_cases_that_the_experiment_makes() {
        let specs = goals::of_experiment("connections");
        assert!(!specs.is_empty());
        for case in specs.iter().flat_map(|spec| spec.measure.cases()) {
            assert!(connections::METHODS.contains(&case.method), "{} names no case", case.method);
        }
    }
}
