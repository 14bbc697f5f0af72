//! `ontime-lab bench bulk`: Access'18, section IV-F.

use std::process::ExitCode;

use super::{Emulated, Measured, Output, chosen, noted, say};
use crate::heavy;

#[derive(Debug, clap::Args)]
pub struct Bulk {
    /// Methods: threaded and partitioned (vhost-net), outsourcing; default: threaded, outsourcing
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',', default_value = "threaded,outsourcing")]
    methods: Vec<String>,
    /// Seconds of the host's time a case
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=60))]
    seconds: u32,
    #[command(flatten)]
    emulated: Emulated,
    #[command(flatten)]
    output: Output,
}

/// Measures every method, receiving and sending, on one emulated host.
pub fn run(args: &Bulk) -> anyhow::Result<ExitCode> {
    let methods = chosen("method", &args.methods, &heavy::METHODS)?;
    let mut missing = Vec::new();
    let with_module = methods.iter().any(|method| method == "outsourcing");
    let plan = heavy::Plan { methods, seconds: args.seconds };
    let results = args.emulated.measure(with_module, |site, images| {
        heavy::measure(&plan, &site, images, &mut say, &mut noted(&mut missing))
    })?;
    let notes = vec![
        "paper (Access'18, IV-B and IV-F, its hardware): outsourcing has 5.6 % more bulk throughput than threaded at \
         32 % less CPU, 0.64 of its CPU a byte; two copies through vhost-net, one by outsourced sockets"
            .to_owned(),
    ];
    let measured = Measured { experiment: "bulk", seed: 1, results, missing, notes };
    measured.report(&args.output)
}

#[cfg(test)]
mod tests {
    use crate::goals;
    use crate::schema::Load;

    use super::*;

    #[test]
    fn the_goals_name_cases_that_the_experiment_makes() {
        let all: Vec<String> =
            heavy::METHODS.iter().flat_map(|method| [false, true].map(|send| heavy::name(method, send))).collect();
        let specs = goals::of_experiment("bulk");
        assert!(!specs.is_empty());
        for spec in specs {
            for case in spec.measure.cases() {
                let names_one = case.load == Load::Tcp && all.iter().any(|name| name == case.method);
                assert!(names_one, "{} names no case", case.method);
            }
        }
    }
}
