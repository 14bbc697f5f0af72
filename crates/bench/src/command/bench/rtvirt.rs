//! `ontime-lab bench video`, `rta-scale`, `motivation` and `registration`: RTVirt, sections 4.3, 4.5 and 2.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use ontime_cli::{OK, WARNING};

use super::rta::methods;
use super::{Emulated, Measured, Output, noted, say};
use crate::paper::Figures;
use crate::rta::scale::{self, SCENARIOS};
use crate::rta::{WORK_PERCENT, many, motivation, registration, video};

#[derive(Debug, clap::Args)]
pub struct Video {
    /// Only the simulation of the paper's size, no emulated host: as text
    #[arg(long, conflicts_with_all = ["json", "csv", "html"])]
    simulate: bool,
    /// What each VM has reserved over time in the simulation (Figure 4), as CSV
    #[arg(long, value_name = "FILE")]
    allocations: Option<PathBuf>,
    /// Methods: vanilla (Linux' defaults), deadline (SCHED_DEADLINE on the host), dp-wrap, sched_ext (where it is built
    /// in), paced; default: all
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',')]
    methods: Vec<String>,
    /// How long, seconds of the guests' time; applications last from a sixtieth to six tenths of it (the simulation has
    /// the paper's 600 s)
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(5..=600))]
    seconds: u32,
    /// Seed of what comes when
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    emulated: Emulated,
    #[command(flatten)]
    output: Output,
}

/// Simulates the paper's size, and measures what one CPU holds.
pub fn run(args: &Video) -> anyhow::Result<ExitCode> {
    let figures = Figures::load()?;
    let methods = methods(&args.methods)?;
    let simulated = video::simulated(&figures, args.seed, video::LENGTH_MS)?;
    if let Some(path) = &args.allocations {
        fs::write(path, simulated.csv()).with_context(|| format!("writing {}", path.display()))?;
    }
    if args.simulate {
        println!("{}", simulated.words());
        figures.notes("video").iter().for_each(|note| println!("{note}"));
        return Ok(ExitCode::from(if simulated.missed == 0 { OK } else { WARNING }));
    }
    let mut missing = Vec::new();
    let plan = video::Plan { methods, seconds: args.seconds, seed: args.seed };
    let results = args.emulated.measure(true, |site, images| {
        video::measure(&plan, &figures, &site, images, &mut say, &mut noted(&mut missing))
    })?;
    let notes = vec![
        format!(
            "the emulated host: four VMs with a vCPU each, {} s, slices the paper's divided by {}, as the virtual \
             clock has one CPU; a job computes for {WORK_PERCENT} % of its slice; four threads of the host want the \
             CPU all the time",
            args.seconds,
            video::SCALE
        ),
        simulated.words(),
    ];
    Measured { experiment: "video", seed: args.seed, results, missing, notes }.report(&args.output)
}

#[derive(Debug, clap::Args)]
pub struct Scale {
    /// Only the simulation of the paper's size, no emulated host: as text
    #[arg(long, conflicts_with_all = ["json", "csv", "html"])]
    simulate: bool,
    /// Methods: vanilla (Linux' defaults), deadline (SCHED_DEADLINE on the host), dp-wrap, sched_ext (where it is built
    /// in), paced; default: all
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',')]
    methods: Vec<String>,
    /// How long applications have jobs, seconds of the guests' time (the simulation has the paper's 100 s)
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(4..=600))]
    seconds: u32,
    #[command(flatten)]
    emulated: Emulated,
    #[command(flatten)]
    output: Output,
}

/// Simulates both scenarios of the paper's size and times the planner, and measures what one CPU holds.
pub fn scale(args: &Scale) -> anyhow::Result<ExitCode> {
    let figures = Figures::load()?;
    let methods = methods(&args.methods)?;
    let all = SCENARIOS.map(|scenario| scale::run(&figures, scenario, scale::LENGTH_S));
    let all = all.into_iter().collect::<Result<Vec<_>, _>>()?;
    let simulated = scale::table(&all);
    if args.simulate {
        print!("{simulated}");
        return Ok(ExitCode::from(if all.iter().all(|of| of.missed == 0) { OK } else { WARNING }));
    }
    let mut missing = Vec::new();
    let plan = many::Plan { methods, groups: many::groups(&figures), seconds: args.seconds };
    let results = args.emulated.measure(true, |site, images| {
        many::measure(&plan, &plan.prepare(site), images, &mut say, &mut noted(&mut missing))
    })?;
    println!("{simulated}");
    let notes = vec![format!(
        "the emulated host: {} VMs with a vCPU and {} applications each, slices the paper's divided by {}, as the \
         virtual clock has one CPU; a job computes for {} % of its slice; four threads of the host want the CPU all \
         the time",
        plan.groups.len(),
        many::COPIES,
        many::SCALE,
        many::WORK_PERCENT
    )];
    Measured { experiment: "rta-scale", seed: 0, results, missing, notes }.report(&args.output)
}

/// Simulates Figure 1.
pub fn motivation() -> anyhow::Result<ExitCode> {
    print!("{}", motivation::table()?);
    Ok(ExitCode::from(OK))
}

#[derive(Debug, clap::Args)]
pub struct Registration {
    /// Changes of an application's bandwidth
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(2..=1000))]
    count: u32,
    #[command(flatten)]
    emulated: Emulated,
    #[command(flatten)]
    output: Output,
}

/// Measures what a guest's asking for bandwidth costs.
pub fn registration(args: &Registration) -> anyhow::Result<ExitCode> {
    let mut missing = Vec::new();
    let plan = registration::Plan { count: args.count };
    let results = args.emulated.measure(true, |site, images| {
        registration::measure(&plan, &site, images, &mut say, &mut noted(&mut missing))
    })?;
    let notes = vec!["one VM whose budget is in periods of 20 ms, method paced, nothing else on the host".to_owned()];
    Measured { experiment: "registration", seed: 0, results, missing, notes }.report(&args.output)
}

#[cfg(test)]
mod tests {
    use crate::goals;
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    enum Command {
        Video(Video),
        Scale(Scale),
    }

    #[test]
    fn a_simulation_alone_is_asked_for_no_file() {
        for experiment in ["video", "scale"] {
            assert!(Command::try_parse_from(["", experiment, "--json", "x"]).is_ok());
            assert!(Command::try_parse_from(["", experiment, "--simulate"]).is_ok());
            for option in ["--json", "--csv", "--html"] {
                let error =
                    Command::try_parse_from(["", experiment, "--simulate", option, "x"]).unwrap_err().to_string();
                assert!(error.contains("--simulate") && error.contains(option), "{error}");
            }
        }
    }

    #[test]
    fn the_goals_name_cases_that_the_experiments_make() {
        let all: [(&str, &[&str], usize); 3] = [
            ("video", &video::METHODS, 1),
            ("rta-scale", &many::METHODS, 1),
            ("registration", &registration::METHODS, 4),
        ];
        for (experiment, methods, count) in all {
            let specs = goals::of_experiment(experiment);
            assert_eq!(specs.len(), count);
            for case in specs.iter().flat_map(|spec| spec.measure.cases()) {
                assert!(methods.contains(&case.method) && !case.load.floods(), "{case:?}");
            }
            assert!(!Figures::load().unwrap().notes(experiment).is_empty());
        }
    }
}
