//! `ontime-lab`: the emulated host.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Subcommand;
use ontime_cli::{Exit, usage};
use ontime_lab::agent::Stream;
use ontime_lab::events::{self, Turns};
use ontime_lab::images::Images;
use ontime_lab::module::{self, GUEST, HOST};
use ontime_lab::{Clients, Clock, Console, Kernel, Lab, LabError, Link, Machine, Way, agent, isolate};

use super::product::Product;
use crate::client_side::Order;
use crate::progress::progress;

/// Status of `ontime-lab run` if the command exceeded its time limit, as in timeout(1).
const TIMED_OUT: u8 = 124;
/// Script for the command in its arguments, beside the shell command in `$0` at the clients' side.
const BESIDE: &str = r#"setsid lab-client sh -c "$0" < /dev/null & client=$!
env -- "$@"
status=$?
kill -- -$client 2> /dev/null || kill $client 2> /dev/null
exit $status"#;
/// Status of `ontime-lab run` if the emulated host itself failed.
const LAB_FAILED: u8 = 125;

/// The commands of the emulated host.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command in an emulated host; its exit status is this one's (124: too long, 125: the host failed). Or
    /// measure what a scenario's file describes, as `ontime-lab bench scenario` does (2: a limit does not hold)
    Run(Run),
    /// A console on an emulated host (end it with Ctrl-A X, or by leaving the shell)
    Shell(MachineArgs),
    /// Build the lab's images and its emulator if they are missing, and test the emulator
    Images,
    /// Find the first event in which two runs differ that were made with `--events` (1: they differ, or the logs are
    /// not whole)
    Events {
        /// events.log in the directory of a run (`--out`)
        first: PathBuf,
        /// That of the other run
        second: PathBuf,
    },
    /// Run the lab's commands (started by the emulated host)
    #[command(hide = true)]
    Agent,
    /// Send a load (started at the clients' side of the emulated host)
    #[command(hide = true)]
    Client {
        /// What to send, as JSON
        order: String,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct MachineArgs {
    /// CPUs, 1 to 8 (default: 1 on the virtual clock, 2 on the real one)
    #[arg(long)]
    cpus: Option<u8>,
    /// Kernel: 7.2-rt, 7.2 or 6.12-rt, all Debian's
    #[arg(long, default_value = "7.2-rt")]
    kernel: Kernel,
    /// Memory, MiB
    #[arg(long, default_value_t = 4096)]
    memory: u32,
    /// A word for the kernel's command line (may be repeated)
    #[arg(long = "append", value_name = "WORD")]
    kernel_arguments: Vec<String>,
    /// Directory for the command's files (`/lab` inside), console log and captures (default: removed at the end)
    #[arg(long)]
    out: Option<PathBuf>,
    #[command(flatten)]
    product: Product,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Run {
    #[command(flatten)]
    host: MachineArgs,
    /// The clock inside: virtual (executed instructions; CPUs take turns) or real (this machine's)
    #[arg(long, default_value = "virtual")]
    clock: Clock,
    /// The clients' side: inside (virtual clock: on one more CPU, in the host's time; `lab-client COMMAND` runs there),
    /// outside (real clock), or none. Default: inside on the virtual clock, outside on the real one
    #[arg(long, value_name = "WHERE")]
    clients: Option<Clients>,
    /// The link of each NIC to the clients inside, such as 1gbit,5us,256: each frame's time at that rate, a delay, and
    /// the most frames that wait; more are dropped and counted (default: 10gbit,5us,1000)
    #[arg(long, value_name = "RATE,DELAY,PACKETS")]
    link: Option<Link>,
    /// Nanoseconds an instruction takes on the virtual clock: 4 is quick to run, 1 a CPU as of today (what `ontime-lab
    /// bench` measures on)
    #[arg(long, value_name = "NS", default_value = "4", value_parser = icount_shift)]
    instruction: u8,
    /// Log what enters the CPUs to events.log in the directory of `--out` (several CPUs on the virtual clock), which
    /// `ontime-lab events` compares. FROM-TO, ns: also each turn of a CPU that ends between these times
    #[arg(long, value_name = "FROM-TO", num_args = 0..=1, require_equals = true, default_missing_value = "0-0")]
    events: Option<Turns>,
    /// Limit of the command's duration, real seconds
    #[arg(long, default_value_t = 1800, value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    timeout: u64,
    /// Real seconds without a sign of life after which the host counts as hung, 30 to 86400
    #[arg(long, default_value_t = 180)]
    silence: u64,
    /// Bring the host module for a kernel that takes it (6.12-rt), built if it is missing: /lab/ontime_napi.ko inside
    #[arg(long)]
    host_module: bool,
    /// Bring the guest module, built if it is missing: `lab-vm start NAME ROLE sockets:rt ADDRESS` has it inside
    #[arg(long)]
    guest_module: bool,
    /// A shell command for clients inside, beside the command: 10.1.0.1 and 10.2.0.1 are its addresses; it ends with
    /// the command
    #[arg(long, value_name = "SHELL")]
    client: Option<String>,
    /// A scenario (docs/design/lab.md), instead of a command
    #[arg(value_name = "FILE", conflicts_with_all = SET_BY_SCENARIO)]
    scenario: Option<PathBuf>,
    /// The command and its arguments
    #[arg(last = true, required_unless_present = "scenario")]
    command: Vec<String>,
}

/// Options that a scenario's file decides on.
const SET_BY_SCENARIO: [&str; 14] = [
    "clock",
    "cpus",
    "clients",
    "link",
    "instruction",
    "kernel",
    "memory",
    "kernel_arguments",
    "events",
    "timeout",
    "host_module",
    "guest_module",
    "client",
    "command",
];

/// A scenario's file, and the options that go with it.
#[derive(Debug)]
pub(super) struct Scenario<'a> {
    pub(super) file: &'a Path,
    pub(super) silence: u64,
    pub(super) out: Option<&'a Path>,
    pub(super) product: &'a Product,
}

impl Command {
    /// The scenario that is to be run, if it is one.
    pub(super) fn scenario(&self) -> Option<Scenario<'_>> {
        let Command::Run(run) = self else { return None };
        let MachineArgs { out, product, .. } = &run.host;
        Some(Scenario { file: run.scenario.as_deref()?, silence: run.silence, out: out.as_deref(), product })
    }
}

/// Converts an instruction's time in nanoseconds into [`Machine::icount_shift`].
fn icount_shift(nanoseconds: &str) -> Result<u8, String> {
    match nanoseconds {
        "1" => Ok(0),
        "2" => Ok(1),
        "4" => Ok(2),
        _ => Err(format!("{nanoseconds} ns is not one of 1, 2, 4")),
    }
}

/// Runs a command of the emulated host.
pub(crate) fn run(command: &Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Agent => agent::inside::serve().map(|()| ExitCode::SUCCESS).map_err(unsupported),
        Command::Client { order } => {
            let order: Order = serde_json::from_str(order).context("the order of a load")?;
            order.carry_out()?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Events { first, second } => compare_events(first, second),
        Command::Images => images().map(|_| ExitCode::SUCCESS),
        Command::Run(run) => {
            run.check()?;
            // The images are built here, with network access; the namespaces have none.
            let images = images()?;
            if run.host_module {
                host_module(&images, run.host.kernel)?;
            }
            if run.guest_module {
                guest_module(&images)?;
            }
            run_command(run, &images, &isolate::enter().map_err(unsupported)?)
        }
        Command::Shell(host) => {
            console(host).check()?;
            let images = images()?;
            shell(host, &images, &isolate::enter().map_err(unsupported)?)
        }
    }
}

/// Prints what two logs of events have in common.
fn compare_events(first: &Path, second: &Path) -> anyhow::Result<ExitCode> {
    let events::Comparison { same, complete, difference } = events::compare(first, second)?;
    match difference {
        None if complete => {
            println!("all {same} events are the same");
            return Ok(ExitCode::SUCCESS);
        }
        None => println!("the same {same} events, but both logs end before the host was switched off: run it again"),
        Some(difference) => println!("{same} events are the same, the next one is not\n{difference}"),
    }
    Ok(ExitCode::FAILURE)
}

/// The lab's images and their emulator, built first if they are missing, with progress on standard error.
pub(crate) fn images() -> anyhow::Result<Images> {
    isolate::possible().map_err(unsupported)?;
    Ok(Images::ready(&mut |line| progress(line))?)
}

/// Builds the guest module for the lab's guests if it is missing, with progress on standard error.
pub(crate) fn guest_module(images: &Images) -> anyhow::Result<()> {
    GUEST.ready(&images.guest_version()?, &mut |line| progress(line))?;
    Ok(())
}

/// As [`guest_module`], for the host module, if the emulated host's kernel needs one.
pub(crate) fn host_module(images: &Images, kernel: Kernel) -> anyhow::Result<()> {
    if kernel.takes_host_module() {
        HOST.ready(&images.kernel_version(kernel)?, &mut |line| progress(line))?;
    }
    Ok(())
}

impl Run {
    /// # Errors
    /// What this host cannot have, and the remedy.
    fn check(&self) -> anyhow::Result<()> {
        let machine = self.machine();
        if self.client.is_some() && machine.clients != Clients::Inside {
            usage!("--client is a command of --clients inside (virtual clock), not of --clients {}", machine.clients);
        }
        Ok(machine.check()?)
    }

    fn machine(&self) -> Machine {
        let mut machine = self.host.machine(self.clock);
        machine.clients = self.clients.unwrap_or(machine.clients);
        machine.link = self.link;
        machine.icount_shift = self.instruction;
        machine.events = self.events;
        machine.silence_seconds = self.silence;
        machine
    }
}

impl MachineArgs {
    fn machine(&self, clock: Clock) -> Machine {
        let mut machine = Machine::new(clock, self.kernel);
        machine.cpus = self.cpus.unwrap_or(machine.cpus);
        machine.memory_mib = self.memory;
        machine.kernel_arguments.clone_from(&self.kernel_arguments);
        machine
    }
}

/// The machine of a console: on the clock that waits for its user.
fn console(host: &MachineArgs) -> Machine {
    Machine { console: Console::Terminal, ..host.machine(Clock::Real) }
}

fn run_command(run: &Run, images: &Images, scratch: &Path) -> anyhow::Result<ExitCode> {
    let machine = run.machine();
    let dir = run.host.out.as_deref().unwrap_or(scratch);
    if run.host_module {
        if !machine.kernel.takes_host_module() {
            usage!("kernel {} has no use for the host module; 6.12-rt has", machine.kernel);
        }
        HOST.bring(&images.kernel_version(machine.kernel)?, dir, &mut |line| progress(line))?;
    }
    if run.guest_module {
        let module = GUEST.ready(&images.guest_version()?, &mut |line| progress(line))?;
        module::write_archive(&module, &dir.join("files/module.cpio"))?;
    }
    let programs = run.host.product.find()?;
    let beside = run.client.iter().flat_map(|shell| ["sh", "-c", BESIDE, shell]);
    let argv: Vec<&str> = beside.chain(run.command.iter().map(String::as_str)).collect();
    let mut lab = match Lab::start(&machine, images, dir, &programs) {
        Ok(lab) => lab,
        Err(error) => return failed(error, dir),
    };
    let status = lab.run(&argv, &[], Duration::from_secs(run.timeout), &mut |stream, bytes| {
        // If the reader of the output has gone, the command still continues.
        let _ = match stream {
            Stream::Out => std::io::stdout().write_all(bytes).and_then(|()| std::io::stdout().flush()),
            Stream::Err => std::io::stderr().write_all(bytes),
        };
    });
    match status.and_then(|status| link_losses(&lab, run.link.is_some()).map(|losses| (status, losses))) {
        Ok((status, losses)) => {
            losses.iter().for_each(progress);
            if let Err(error) = lab.power_off() {
                return failed(error, dir);
            }
            Ok(ExitCode::from(u8::try_from(status).unwrap_or(u8::MAX)))
        }
        Err(error) => {
            drop(lab);
            failed(error, dir)
        }
    }
}

/// Lines that tell what the links have dropped. `all`: also of those that have dropped nothing.
fn link_losses(lab: &Lab, all: bool) -> Result<Vec<String>, LabError> {
    let Some(link) = lab.link() else { return Ok(Vec::new()) };
    let mut lines = Vec::new();
    for (nic, way) in ["rt", "bulk"].into_iter().flat_map(|nic| Way::ALL.map(|way| (nic, way))) {
        let dropped = lab.dropped(nic, way)?;
        if all || dropped > 0 {
            lines.push(format!("link {link} of {nic}0: {dropped} frames dropped {}", way.description()));
        }
    }
    Ok(lines)
}

/// Makes the error for a failure of the emulated host, and keeps the host's console log.
fn failed(error: LabError, dir: &Path) -> anyhow::Result<ExitCode> {
    match error {
        LabError::NotRoot | LabError::Program { .. } => return Err(unsupported(error)),
        LabError::Machine(_) => return Err(error.into()),
        _ => {}
    }
    let status = if matches!(error, LabError::Timeout { .. }) { TIMED_OUT } else { LAB_FAILED };
    if error.names_log() {
        isolate::keep(dir);
    }
    Err(Exit { status, message: error.to_string() }.into())
}

fn shell(host: &MachineArgs, images: &Images, scratch: &Path) -> anyhow::Result<ExitCode> {
    let machine = console(host);
    let programs = host.product.find()?;
    let dir = host.out.as_deref().unwrap_or(scratch);
    let lab = match Lab::start(&machine, images, dir, &programs) {
        Ok(lab) => lab,
        Err(error) => return failed(error, dir),
    };
    Ok(ExitCode::from(u8::try_from(lab.wait()?).unwrap_or(1)))
}

fn unsupported(error: LabError) -> anyhow::Error {
    Exit::unknown(error.to_string()).into()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::time::Instant;

    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(subcommand)]
        command: Command,
    }

    #[test]
    fn a_scenario_or_a_command_is_run_and_not_both() {
        let read = |words: &[&str]| Line::try_parse_from(["ontime-lab", "run"].iter().chain(words));
        let line = read(&["--silence", "90", "--out", "there", "a.toml"]).unwrap();
        let scenario = line.command.scenario().unwrap();
        assert_eq!(
            (scenario.file, scenario.silence, scenario.out),
            (Path::new("a.toml"), 90, Some(Path::new("there")))
        );
        assert!(read(&["--cpus", "2", "--", "true"]).unwrap().command.scenario().is_none());
        for words in [
            &["a.toml", "--", "true"][..],
            &["--cpus", "2", "a.toml"],
            &["--clients", "inside", "a.toml"],
            &["--append", "quiet", "a.toml"],
            &["--kernel", "7.2", "a.toml"],
            &["--timeout", "9", "a.toml"],
            &["--events", "a.toml"],
            &[],
        ] {
            assert!(read(words).is_err(), "{words:?}");
        }
    }

    #[test]
    fn a_command_of_the_clients_side_has_clients_inside() {
        let clients = |words: &[&str]| {
            let line = ["ontime-lab", "run"].iter().chain(words).chain(&["--", "true"]);
            let Command::Run(run) = Line::try_parse_from(line).unwrap().command else { panic!("{words:?}") };
            run.check().map(|()| run.machine().clients).map_err(|error| error.to_string())
        };
        for (words, expected) in [
            (&[][..], Clients::Inside),
            (&["--clock", "real"], Clients::Outside),
            (&["--clients", "none"], Clients::None),
            (&["--client", "true"], Clients::Inside),
            (&["--client", "true", "--clients", "inside"], Clients::Inside),
        ] {
            assert_eq!(clients(words), Ok(expected), "{words:?}");
        }
        let Command::Shell(host) = Line::try_parse_from(["ontime-lab", "shell"]).unwrap().command else { panic!() };
        let console = console(&host);
        assert_eq!((console.clock, console.clients), (Clock::Real, Clients::Outside));
        for words in [&["--clients", "none"][..], &["--clock", "real"]] {
            let error = clients(&[words, &["--client", "true"]].concat()).unwrap_err();
            assert!(error.contains("--client is a command of --clients inside"), "{error}");
        }
    }

    #[test]
    fn a_command_beside_the_clients_keeps_its_status() {
        let dir = tempfile::tempdir().unwrap();
        let (program, seen) = (dir.path().join("lab-client"), dir.path().join("seen"));
        std::fs::write(&program, "#!/bin/sh\nexec \"$@\"\n").unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap());
        let client = format!("touch {}; sleep 600", seen.display());
        let waits = format!("until [ -e {} ]; do sleep 0.01; done; exit 7", seen.display());
        for (command, status) in [
            (&["sh", "-c", waits.as_str()][..], 7),
            // A word that is a shell's own is no command.
            (&["exit", "3"], 127),
            (&["no-such-command"], 127),
            (&["sh", "-c", "kill -TERM $$"], 143),
        ] {
            let mut line = std::process::Command::new("sh");
            let ended = line.args(["-c", BESIDE, &client]).args(command).env("PATH", &path).output().unwrap();
            assert_eq!(ended.status.code(), Some(status), "{command:?}: {ended:?}");
        }
    }

    #[test]
    fn events_are_logged_with_the_turns_that_are_asked_for_or_none() {
        let read = |words: &[&str]| {
            let line = ["ontime-lab", "run"].iter().chain(words).chain(&["--", "true"]);
            Line::try_parse_from(line).map(|line| match line.command {
                Command::Run(run) => run.machine().events,
                _ => None,
            })
        };
        assert_eq!(read(&[]).unwrap(), None);
        assert_eq!(read(&["--events"]).unwrap(), Some(Turns::default()));
        assert_eq!(read(&["--events=5-9", "--cpus", "2"]).unwrap(), Some(Turns { from: 5, to: 9 }));
        assert!(read(&["--events=9-5"]).is_err());
    }

    #[test]
    fn a_time_limit_is_one_that_a_clock_can_tell() {
        let read = |seconds: &str| Line::try_parse_from(["ontime-lab", "run", "--timeout", seconds, "--", "true"]);
        for good in ["1", "31536000"] {
            let Command::Run(run) = read(good).unwrap().command else { panic!("{good}") };
            assert!(Instant::now().checked_add(Duration::from_secs(run.timeout)).is_some());
        }
        for bad in ["0", "31536001", "18446744073709551615"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
