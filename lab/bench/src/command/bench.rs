//! `ontime-lab bench`: a subcommand for each experiment, and `show`.

use std::process::ExitCode;

use anyhow::Context;
use clap::{ArgMatches, Command};

use crate::experiments::{self, EXPERIMENTS, Show};

/// `ontime-lab bench`
#[derive(Debug)]
pub(super) struct Args {
    experiment: String,
    arguments: ArgMatches,
}

const SHOW: &str = "show";

impl clap::FromArgMatches for Args {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let missing = || clap::Error::new(clap::error::ErrorKind::MissingSubcommand);
        let (experiment, arguments) = matches.subcommand().ok_or_else(missing)?;
        Ok(Self { experiment: experiment.to_owned(), arguments: arguments.clone() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl clap::Args for Args {
    fn augment_args(command: Command) -> Command {
        let experiment = |of: &&dyn experiments::Experiment| of.arguments(Command::new(of.name())).about(of.about());
        let show = <Show as clap::Args>::augment_args(Command::new(SHOW))
            .about("Make the table and the page again from results that `--json` wrote");
        command
            .subcommand_required(true)
            .arg_required_else_help(true)
            .subcommands(EXPERIMENTS.iter().map(experiment))
            .subcommand(show)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// Runs an experiment, or shows results again.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.experiment == SHOW {
        return experiments::show(&<Show as clap::FromArgMatches>::from_arg_matches(&args.arguments)?);
    }
    experiments::check_baseline(&args.experiment, &args.arguments)?;
    experiments::find(&args.experiment).context("no such experiment")?.run(&args.arguments)
}
