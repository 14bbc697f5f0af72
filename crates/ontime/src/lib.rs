//! The `ontime` command, with one file per subcommand. It is a library, so that `crates/manuals` makes the man pages
//! and completions from the same definitions, and the program does not contain their generators.
//!
//! To add a subcommand: write its file with `pub struct Args` (clap) and `pub fn run(&Args, &Paths)`, then add a `mod`
//! line and a line in `commands!` below.

mod api;
mod apply;
mod attach;
mod check;
mod client;
mod daemon;
mod device;
mod doctor;
mod exit;
mod log;
mod metrics;
mod names;
mod net;
mod paths;
mod plan;
mod ps;
mod reload;
mod replug;
mod report;
mod reset;
mod sight;
mod sockets;
mod status;
mod table;
mod top;
mod trace;
mod verify;

use std::process::ExitCode;
use std::sync::OnceLock;

use clap::{CommandFactory, Parser, Subcommand};

/// Consistent real-time latency for VMs and containers that share a host with bulk tenants.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    paths: paths::Paths,
    #[command(subcommand)]
    command: Command,
}

/// One line per subcommand: its help, its variant, its module.
macro_rules! commands {
    ($($(#[$meta:meta])* $name:ident => $($module:ident)::+),+ $(,)?) => {
        #[derive(Debug, Subcommand)]
        enum Command {
            $($(#[$meta])* $name($($module)::+::Args),)+
        }

        fn run(cli: &Cli) -> anyhow::Result<ExitCode> {
            match &cli.command {
                $(Command::$name(args) => $($module)::+::run(args, &cli.paths),)+
            }
        }
    };
}

commands! {
    /// Show tenants, their class, and their threads' places
    Ps => ps,
    /// Keep every thread of the path at its place (run by ontimed.service)
    Daemon => daemon,
    /// Show what is wanted of this host, what is, and why they differ
    Status => status,
    /// Show reserved CPU time live: reserved, used, missed, and the plan of the present slice
    Top => top,
    /// Print the daemon's metrics, or keep them in a file for node_exporter
    Metrics => metrics,
    /// Collect what a support request needs, in one file
    Report => report,
    /// The host's packet path, NIC by NIC
    Net => net,
    /// Apply, with another method if one is given
    Apply => apply,
    /// Give everything its original value
    Reset => reset,
    /// Tell whether the configuration files are right, all of them
    Check => check,
    /// Have the daemon read its configuration again, and tell what came of it
    Reload => reload,
    /// Examine this host for what makes RT packets late
    Doctor => doctor,
    /// Show where RT requests spend their time, and who is in their way
    Trace => trace,
    /// Measure whether this host and a guest are fit for their load
    Verify => verify,
    /// Tell whether a set of tenants fits, and what other analyses would reserve
    Plan => plan,
    /// Serve a VM's outsourced sockets (run by ontime-device@VM.service)
    Device => device,
    /// Print what a VM's QEMU or libvirt needs for outsourced sockets
    Attach => attach,
    /// Show a VM's outsourced sockets, as ss would
    Sockets => sockets,
    /// Print names for shell completion (run by the completions)
    #[command(hide = true)]
    Names => names,
    /// Put kernel protections back when the daemon dies (started by the daemon)
    #[command(hide = true)]
    Guardian => daemon::guardian,
    /// Remove a tracing instance when its process ends (started by trace)
    #[command(hide = true)]
    TraceGuardian => trace::guardian,
}

/// The command line: every subcommand with its options.
pub fn command() -> clap::Command {
    Cli::command()
}

/// What `--version` prints. Without `main`, it is the package's version.
static VERSION: OnceLock<&'static str> = OnceLock::new();

fn version() -> &'static str {
    VERSION.get().copied().unwrap_or(env!("CARGO_PKG_VERSION"))
}

/// Runs the program. `version` is what `ontime --version` prints.
pub fn main(version: &'static str) -> ExitCode {
    let _ = VERSION.set(version);
    ontime_cli::main(version, exit::status, run)
}
