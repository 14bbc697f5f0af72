//! The command `ontime-lab`: the emulated host ([`lab`]) and the experiments ([`bench`]).

mod bench;
pub(crate) mod lab;
pub(crate) mod product;

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use ontime_lab::LabError;

use crate::experiments::{Output, scenario};

/// Ontime's laboratory: an emulated host with real VMs in it, and the papers' experiments.
#[derive(Debug, Parser)]
#[command(name = "ontime-lab", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[command(flatten)]
    Lab(lab::Command),
    /// Write the scenario of a live host that `ontime report` describes, or measure it before and after changes
    Twin(Box<scenario::TwinOptions>),
    /// Run the papers' experiments
    Bench(bench::Args),
}

/// Runs the program. `version` is what `ontime-lab --version` prints.
pub fn main(version: &'static str) -> ExitCode {
    ontime_cli::main(version, status, |cli: &Cli| match &cli.command {
        Command::Lab(command) => match command.scenario() {
            Some(lab::Scenario { file, silence, out, product }) => scenario::execute(&scenario::Options {
                file: file.to_owned(),
                run: scenario::RunArgs { silence, out: out.map(Path::to_owned), product: product.clone() },
                output: Output::default(),
            }),
            None => lab::run(command),
        },
        Command::Twin(args) => scenario::twin(args),
        Command::Bench(args) => bench::run(args),
    })
}

fn status(cause: &(dyn Error + 'static)) -> Option<u8> {
    matches!(cause.downcast_ref(), Some(LabError::Machine(_))).then_some(ontime_cli::USAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_cannot_be_is_a_usage_error() {
        for (error, wanted) in [
            (LabError::Machine("--cpus 9 is not one of 1 to 8".to_owned()), ontime_cli::USAGE),
            (LabError::Protocol("half a line".to_owned()), ontime_cli::UNKNOWN),
        ] {
            assert_eq!(ontime_cli::status(&error.into(), status), wanted);
        }
    }
}
