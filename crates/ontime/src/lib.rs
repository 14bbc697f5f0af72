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
mod output;
mod paths;
mod plan;
mod ps;
mod reload;
mod replug;
mod report;
mod reset;
mod sockets;
mod status;
mod table;
mod top;
mod trace;
mod unseen;
mod verify;

use std::process::ExitCode;
use std::sync::OnceLock;

#[doc(hidden)]
pub use daemon::fuzzing;

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
    /// Show tenants, their class, and their threads' policies and CPUs
    Ps => ps,
    /// Run the daemon, which sets priorities and other settings and keeps them set (run by ontimed.service)
    Daemon => daemon,
    /// Show the daemon's state: settings that differ from the plan, and why; findings
    Status => status,
    /// Show reserved CPU time live: reserved, used, missed, and the plan of the current slice
    Top => top,
    /// Print the daemon's metrics, or write them to a file for node_exporter
    Metrics => metrics,
    /// Collect status, logs and host data for a support request in one file
    Report => report,
    /// Show the host's packet path, NIC by NIC
    Net => net,
    /// Apply the plan, with another method if one is given
    Apply => apply,
    /// Restore the original value of every setting
    Reset => reset,
    /// Check all configuration files for mistakes
    Check => check,
    /// Have the daemon read its configuration again, and show the result
    Reload => reload,
    /// Examine this host for causes of delay of RT packets
    Doctor => doctor,
    /// Show where RT requests spend their time, and which threads delay them
    Trace => trace,
    /// Measure the longest delays of this host and a guest, and judge them by limits
    Verify => verify,
    /// Compute whether a set of tenants fits, and what other analyses would reserve
    Plan => plan,
    /// Serve a VM's outsourced sockets (run by ontime-device@VM.service)
    Device => device,
    /// Print QEMU's options or libvirt's XML for a VM's outsourced sockets
    Attach => attach,
    /// Show a VM's outsourced sockets, as ss would
    Sockets => sockets,
    /// Print names for shell completion (run by the completions)
    #[command(hide = true)]
    Names => names,
    /// Restore kernel protections when the daemon dies (started by the daemon)
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
