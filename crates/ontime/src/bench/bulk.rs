//! `ontime bench bulk`: Access'18, section IV-F.

use std::process::ExitCode;

use anyhow::bail;
use ontime_bench::schema::{MethodResult, Report, SCHEMA_VERSION};
use ontime_bench::{goals, heavy};

use super::{Emulated, Output, created, machine_name, schema_clock, write};
use crate::exit::{OK, THRESHOLD};

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
    if let Some(unknown) = args.methods.iter().find(|method| !heavy::METHODS.contains(&method.as_str())) {
        bail!("method '{unknown}' is not one of {}", heavy::METHODS.join(", "));
    }
    let mut missing = Vec::new();
    let with_module = args.methods.iter().any(|method| method == "outsourcing");
    let results = args.emulated.measure(with_module, |site, images| {
        let plan = heavy::Plan { site, methods: args.methods.clone(), seconds: args.seconds };
        heavy::measure(&plan, images, &mut |line| eprintln!("{line}"), &mut |case, error| {
            missing.push(format!("{case}: not measured: {error}"));
        })
    })?;
    if results.is_empty() {
        bail!("nothing could be measured: {}", missing.join("; "));
    }
    let report = assemble(args, results, &missing)?;
    println!("{}", heavy::table(&report.results));
    write(&report, &args.output)?;
    Ok(ExitCode::from(if missing.is_empty() { OK } else { THRESHOLD }))
}

fn assemble(args: &Bulk, results: Vec<MethodResult>, missing: &[String]) -> anyhow::Result<Report> {
    let clock = schema_clock(args.emulated.clock);
    let kernel = results.first().map(|result| result.kernel.clone()).unwrap_or_default();
    let words: Vec<String> = std::env::args().skip(1).collect();
    let mut notes = vec![
        "paper (Access'18, IV-B and IV-F, its hardware): outsourcing has 5.6 % more bulk throughput than threaded at 32 % less CPU, \
         0.64 of its CPU a byte; two copies through vhost-net, one by outsourced sockets"
            .to_owned(),
    ];
    notes.extend(missing.iter().cloned());
    Ok(Report {
        schema_version: SCHEMA_VERSION,
        experiment: "bulk".to_owned(),
        clock,
        goals: goals::evaluate(goals::of_experiment("bulk"), &results, clock, &kernel),
        kernel,
        seed: 1,
        command: format!("ontime {}", words.join(" ")),
        created: created()?,
        machine: machine_name(),
        results,
        paper: Vec::new(),
        notes,
    })
}

#[cfg(test)]
mod tests {
    use ontime_bench::schema::Load;

    use super::*;

    #[test]
    fn the_goals_name_cases_that_the_experiment_makes() {
        let all: Vec<String> =
            heavy::METHODS.iter().flat_map(|method| [false, true].map(|send| heavy::name(method, send))).collect();
        let specs = goals::of_experiment("bulk");
        assert!(!specs.is_empty());
        for spec in specs {
            match spec.measure {
                goals::Measure::BulkRatio(over, under) | goals::Measure::CostRatio(over, under) => {
                    for case in [over, under] {
                        assert!(
                            case.load == Load::Tcp && all.iter().any(|name| name == case.method),
                            "{} names no case",
                            case.method
                        );
                    }
                }
                other => panic!("{other:?} is not measured here"),
            }
        }
    }
}
