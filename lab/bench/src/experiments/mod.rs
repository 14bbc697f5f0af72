//! The experiments, one file each: name, arguments, cases, measurement, figures, goals and the paper's figures.
//!
//! To add an experiment: write its file with an implementation of [`Experiment`], then add a `mod` line and a line in
//! [`EXPERIMENTS`] below. Figures besides response times are [`crate::schema::Metric`]s, which appear in table, CSV,
//! page and JSON.

mod bulk;
mod connections;
mod duel;
mod guest_cyclictest;
mod idle;
mod inversion;
mod kbp;
mod methods;
mod options;
mod path;
pub(crate) mod rt_server;
mod rt_vms;
mod rta;
mod sampled;
pub(crate) mod scenario;
mod slo;
mod vatc;
pub(crate) mod xen_arm;

use std::fmt::Debug;
use std::process::ExitCode;

use clap::{ArgMatches, Command};

pub(crate) use self::methods::Methods;
pub(crate) use self::options::*;
use crate::goals::{Figure, GoalSpec};
use crate::paper::Figures;
use crate::schema::{Load, PaperRow};

/// The interface of an experiment for the command line, the reports and the goals.
pub trait Experiment: Debug + Sync {
    /// The name on the command line and in reports.
    fn name(&self) -> &'static str;

    /// A line of help.
    fn about(&self) -> &'static str;

    /// Adds the experiment's options to its command.
    fn arguments(&self, command: Command) -> Command;

    /// Measures, and shows the results.
    ///
    /// # Errors
    /// The arguments are invalid; nothing could be measured.
    fn run(&self, arguments: &ArgMatches) -> anyhow::Result<ExitCode>;

    /// Every case: its name in results, and the traffic of the bulk tenants. Goals refer to these.
    fn cases(&self) -> Vec<(String, Load)> {
        Vec::new()
    }

    /// Figures of every result that the experiment's own table shows before its metrics.
    fn columns(&self) -> &'static [Figure] {
        &[]
    }

    /// The goals on the virtual clock, for the kernel series that the project promises.
    fn goals(&self) -> Vec<GoalSpec> {
        Vec::new()
    }

    /// The rows of the paper's table that the experiment reproduces.
    fn paper(&self, _: &Figures) -> Vec<PaperRow> {
        Vec::new()
    }

    /// Other statements of the paper, as sentences.
    fn remarks(&self, _: &Figures) -> Vec<String> {
        Vec::new()
    }

    /// The meaning of the times.
    fn timed(&self) -> &'static str {
        "response time at the NIC"
    }

    /// Whether results have response times. If so, a result without any states that nothing could be counted.
    fn has_response_times(&self) -> bool {
        true
    }

    /// The meaning of the metrics, for the page.
    fn meaning(&self) -> &'static str {
        ""
    }
}

/// Implements the first four functions of an [`Experiment`]: name, help, options that clap derives, and a function that
/// takes them.
macro_rules! command {
    ($name:literal, $about:literal, $options:ty, $execute:expr) => {
        fn name(&self) -> &'static str {
            $name
        }

        fn about(&self) -> &'static str {
            $about
        }

        fn arguments(&self, command: clap::Command) -> clap::Command {
            <$options as clap::Args>::augment_args(command)
        }

        fn run(&self, arguments: &clap::ArgMatches) -> anyhow::Result<std::process::ExitCode> {
            $execute(&<$options as clap::FromArgMatches>::from_arg_matches(arguments)?)
        }
    };
}
pub(crate) use command;

/// Every experiment, in the order of the help.
pub static EXPERIMENTS: &[&dyn Experiment] = &[
    &rt_server::RtServer,
    &rt_server::Ablation,
    &rt_server::Segments,
    &rt_vms::RtVms,
    &inversion::Inversion,
    &path::Path,
    &kbp::Kbp,
    &sampled::SampledValues,
    &rta::Periodic,
    &rta::Sporadic,
    &rta::video::Video,
    &rta::many::Scale,
    &rta::registration::Registration,
    &rta::motivation::Motivation,
    &slo::MemcachedSlo,
    &vatc::Vatc,
    &vatc::VatcNetwork,
    &xen_arm::XenArm,
    &guest_cyclictest::GuestCyclictest,
    &duel::Duel,
    &bulk::Bulk,
    &connections::Connections,
    &idle::Idle,
    &rt_server::Voip,
    &rt_server::Memcached,
    &scenario::FromFile,
];

/// The experiment with this name.
pub fn find(name: &str) -> Option<&'static dyn Experiment> {
    EXPERIMENTS.iter().copied().find(|experiment| experiment.name() == name)
}

/// The goals of the experiment with this name; empty if it has none.
pub fn goals_of(name: &str) -> Vec<GoalSpec> {
    find(name).map_or_else(Vec::new, |experiment| experiment.goals())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn goals_name_cases_that_their_experiment_measures() {
        for experiment in EXPERIMENTS {
            let cases = experiment.cases();
            let mut ids = BTreeSet::new();
            for goal in experiment.goals() {
                assert!(ids.insert(goal.id), "{}: two goals are {}", experiment.name(), goal.id);
                for case in goal.measure.cases() {
                    let is_case = |(name, load): &(String, Load)| name == case.method && *load == case.load;
                    assert!(cases.iter().any(is_case), "{}: {case:?} is no case of it", experiment.name());
                }
            }
            // A misspelt case would make a goal that is never evaluated.
            assert_eq!(cases.iter().map(|(name, load)| (name, *load)).collect::<BTreeSet<_>>().len(), cases.len());
        }
    }

    #[test]
    fn names_are_different_and_every_experiment_has_its_help() {
        let names: BTreeSet<&str> = EXPERIMENTS.iter().map(|experiment| experiment.name()).collect();
        assert_eq!(names.len(), EXPERIMENTS.len());
        for experiment in EXPERIMENTS {
            assert!(experiment.about().len() > 20 && !experiment.about().ends_with('.'), "{}", experiment.name());
            experiment.arguments(Command::new(experiment.name())).debug_assert();
        }
        assert!(find("no-such-experiment").is_none());
    }

    #[test]
    fn make_papers_names_experiments_with_options_that_they_have() {
        let script = include_str!("../../../../scripts/bench/papers.sh");
        let (_, rows) = script.split_once("<< 'END'\n").unwrap();
        let (rows, _) = rows.split_once("\nEND\n").unwrap();
        for row in rows.lines() {
            let words: Vec<&str> = row.split_whitespace().collect();
            let [name, cpus, cases, seconds, options @ ..] = &words[..] else { panic!("{row}") };
            assert!([cpus, cases, seconds].iter().all(|number| number.parse::<u32>().is_ok()), "{row}");
            let experiment = find(name).unwrap_or_else(|| panic!("no experiment '{name}'"));
            let line = [*name].into_iter().chain(options.iter().copied()).chain(["--json", "a", "--html", "b"]);
            experiment
                .arguments(Command::new(*name))
                .try_get_matches_from(line)
                .unwrap_or_else(|error| panic!("{error}"));
        }
    }

    /// An experiment without goals needs no page of results before it has any.
    #[test]
    fn every_experiment_with_goals_has_a_page() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/results/bench.md");
        let index = std::fs::read_to_string(page).unwrap();
        for experiment in EXPERIMENTS.iter().filter(|experiment| !experiment.goals().is_empty()) {
            let named = |line: &str| line.split(['[', ']', ',', ' ']).any(|word| word == experiment.name());
            assert!(index.lines().any(|line| line.starts_with("| [") && named(line)), "{}", experiment.name());
        }
    }
}
