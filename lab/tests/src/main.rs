//! `ontime-lab-tests`: tests that need a host of their own. Each boots the emulated host (`ontime-lab run`).
//!
//! A test has an outer half ([`outside`]), which runs on this machine, and mostly an inner half ([`inside`]), which
//! this same program runs in the emulated host.
//!
//! | file | |
//! |---|---|
//! | `list` | which tests there are |
//! | `test`, `emulated` | what a test is; the emulated host that it needs |
//! | `cases` | the tests |
//! | `outside`, `inside` | what the outer and the inner halves share |
//! | `runner` | runs tests, and reports their results |

mod cases;
mod emulated;
mod inside;
mod list;
mod outside;
mod runner;
mod test;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use ontime_cli::usage;

use crate::outside::Tools;
use crate::test::Test;

/// Tests in the emulated host
#[derive(Debug, Parser)]
#[command(
    name = "ontime-lab-tests",
    max_term_width = 100,
    args_conflicts_with_subcommands = true,
    disable_help_subcommand = true
)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    run: Run,
}

#[derive(Debug, clap::Args)]
struct Run {
    /// Print the names of the tests, and run none
    #[arg(long)]
    list: bool,
    /// The binary `ontime` for the emulated host (default: the one beside this program)
    #[arg(long, value_name = "FILE")]
    ontime: Option<PathBuf>,
    /// Names of tests, `everyday` (the default: those of `make test`) or `by-name` (those of `make thorough`). In the
    /// environment: RESULTS, a file for a line per test; CYCLES and INSTRUCTION of path_holds_under_traffic_and_faults;
    /// KILLS of guest_sockets_are_the_hosts
    #[arg(value_name = "TEST")]
    tests: Vec<String>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the inner half of a test (started in the emulated host)
    #[command(hide = true)]
    Inside { test: String },
    /// Run a program of a test (started by the test)
    #[command(hide = true)]
    Program {
        test: String,
        program: String,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

fn main() -> ExitCode {
    ontime_cli::main(env!("CARGO_PKG_VERSION"), |_| None, dispatch)
}

fn dispatch(cli: &Cli) -> Result<ExitCode> {
    match &cli.command {
        None => run(&cli.run),
        Some(Command::Inside { test }) => match find(test)?.inside {
            Some(function) => Ok(inside::run(function)),
            None => usage!("{test} has no function for the emulated host"),
        },
        Some(Command::Program { test, program, arguments }) => {
            let programs = find(test)?.programs;
            let Some((_, function)) = programs.iter().find(|(name, _)| name == program) else {
                usage!("{test} has no program {program}")
            };
            function(arguments).map(|()| ExitCode::SUCCESS)
        }
    }
}

fn find(name: &str) -> Result<&'static Test> {
    match list::find(name) {
        Some(test) => Ok(test),
        None => usage!("there is no test {name}; --list prints the names"),
    }
}

fn run(run: &Run) -> Result<ExitCode> {
    if run.list {
        for (kind, tests) in [("everyday", list::EVERYDAY), ("by-name", list::BY_NAME)] {
            tests.iter().try_for_each(|test| ontime_cli::print(format_args!("{kind:<8}  {}\n", test.name)))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let tests = match list::chosen(&run.tests) {
        Ok(tests) => tests,
        Err(name) => usage!("there is no test {name}; --list prints the names"),
    };
    let own = std::env::current_exe().context("finding the file of this program")?;
    let beside = |name: &str| own.with_file_name(name);
    let ontime = run.ontime.clone().unwrap_or_else(|| beside("ontime"));
    let tree = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let tools = Tools {
        ontime: ontime
            .canonicalize()
            .with_context(|| format!("finding the program under test, {}", ontime.display()))?,
        lab: beside("ontime-lab"),
        tree: tree.canonicalize().with_context(|| format!("finding the repository, {}", tree.display()))?,
        own,
    };
    let results = std::env::var_os("RESULTS").filter(|path| !path.is_empty()).map(PathBuf::from);
    runner::run(&tests, tools, results)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn names_of_tests_are_told_from_what_the_emulated_host_starts() {
        Cli::command().debug_assert();
        let read = |words: &[&str]| Cli::try_parse_from(["ontime-lab-tests"].iter().chain(words)).unwrap();
        let named = read(&["--ontime", "there", "a_panic_is_reported", "by-name"]);
        assert!(named.command.is_none());
        assert_eq!(named.run.tests, ["a_panic_is_reported", "by-name"]);
        let inside = read(&["inside", "levels_have_their_places"]).command.unwrap();
        assert!(matches!(inside, Command::Inside { test } if test == "levels_have_their_places"));
        let program = read(&["program", "some_test", "ask", "--mps", "-1"]).command.unwrap();
        let Command::Program { test, program, arguments } = program else { panic!("another command") };
        assert_eq!((test.as_str(), program.as_str(), arguments.join(" ").as_str()), ("some_test", "ask", "--mps -1"));
    }
}
