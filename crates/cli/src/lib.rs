//! What the command lines of `ontime` and `ontime-lab` share: exit statuses, printing of errors, and the version.
//!
//! The first four statuses are those of monitoring plug-ins. Usage and configuration errors have the numbers of
//! sysexits(3), which systemd shows by name, so that they cannot be mistaken for a state of the host.
//! docs/reference/daemon.md has the table for users.

use std::error::Error;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Done, and everything is as planned.
pub const OK: u8 = 0;
/// Done, and something drifted, failed, does not fit or was missed.
pub const WARNING: u8 = 1;
/// Done, and the guarantee of a class does not hold: a critical finding.
pub const CRITICAL: u8 = 2;
/// Not done, or not everything could be seen: rights, the daemon or a feature of the host is missing.
pub const UNKNOWN: u8 = 3;
/// EX_USAGE: wrong arguments, or the name of something that does not exist.
pub const USAGE: u8 = 64;
/// EX_CONFIG: a configuration file is wrong.
pub const CONFIG: u8 = 78;

/// An error with its own exit status.
#[derive(Debug)]
pub struct Exit {
    /// The exit status of the command.
    pub status: u8,
    /// What is wrong, and the remedy.
    pub message: String,
}

impl Exit {
    /// An error in the arguments.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { status: USAGE, message: message.into() }
    }

    /// Something was not done, or could not be seen.
    pub fn unknown(message: impl Into<String>) -> Self {
        Self { status: UNKNOWN, message: message.into() }
    }
}

/// Returns a usage error with this message.
#[macro_export]
macro_rules! usage {
    ($($word:tt)+) => { return Err($crate::Exit::usage(format!($($word)+)).into()) };
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for Exit {}

/// Determines the status of an error by its type, for the errors of a program's own crates.
pub type Known = fn(&(dyn Error + 'static)) -> Option<u8>;

/// Runs a program: reads its command line, runs it, and prints an error after the program's name. `version` is what
/// `--version` prints.
pub fn main<C: CommandFactory + FromArgMatches>(
    version: &'static str,
    known: Known,
    run: impl FnOnce(&C) -> anyhow::Result<ExitCode>,
) -> ExitCode {
    let mut command = C::command().version(version);
    let name = command.get_name().to_owned();
    let matches = command.try_get_matches_from_mut(std::env::args_os());
    let parsed = matches.and_then(|mut matches| C::from_arg_matches_mut(&mut matches));
    match parsed.map_err(|error| error.format(&mut command)) {
        Ok(cli) => run(&cli).unwrap_or_else(|error| of_error(&name, known, &error)),
        Err(error) => {
            // A closed standard error leaves no way to report.
            let _ = error.print();
            ExitCode::from(if error.use_stderr() { USAGE } else { OK })
        }
    }
}

/// Prints the error and returns its status.
fn of_error(program: &str, known: Known, error: &anyhow::Error) -> ExitCode {
    if is_of_closed(io::stdout(), error) {
        return ExitCode::from(OK);
    }
    print_stderr(format_args!("{program}: {}", harmless(&chain(error))));
    ExitCode::from(status(error, known))
}

/// Whether the cause is that the reader of this output has gone (`ontime ps | head`), which is no error. A broken pipe
/// alone does not say that: it is also the error of a socket whose other end has gone.
fn is_of_closed(output: impl AsFd, error: &anyhow::Error) -> bool {
    let of_writing = |cause: &(dyn Error + 'static)| {
        let kind = cause.downcast_ref::<io::Error>().map(io::Error::kind);
        kind.or_else(|| cause.downcast_ref::<serde_json::Error>().and_then(serde_json::Error::io_error_kind))
    };
    if !error.chain().filter_map(of_writing).any(|kind| kind == io::ErrorKind::BrokenPipe) {
        return false;
    }
    // Without events to wait for, only a missing reader (POLLERR of a pipe, POLLHUP of a socket) is reported.
    let mut polled = [PollFd::new(&output, PollFlags::empty())];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|closed| closed > 0)
}

/// Prints text on standard output.
///
/// # Errors
/// Where standard output is closed, at which `print!` would panic.
pub fn print(text: impl std::fmt::Display) -> io::Result<()> {
    write!(io::stdout().lock(), "{text}")
}

/// Prints a line on standard error. Where that is closed, at which `eprintln!` would panic, the line is lost.
pub fn print_stderr(line: impl std::fmt::Display) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// The status of an error.
pub fn status(error: &anyhow::Error, known: Known) -> u8 {
    let of_cause = |cause: &(dyn Error + 'static)| match cause.downcast_ref::<Exit>() {
        Some(exit) => Some(exit.status),
        None => known(cause),
    };
    error.chain().find_map(of_cause).unwrap_or(UNKNOWN)
}

/// The error and its causes in one line. Messages of the crates' own errors already end with their cause, which is not
/// repeated.
pub fn chain(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let message = cause.to_string();
        if line.is_empty() {
            line = message;
        } else if !line.contains(&message) {
            line = format!("{line}: {message}");
        }
    }
    line
}

/// Replaces characters that would control a terminal, but for ends of lines and tabs. An error may quote another
/// user's program, such as a VM's monitor.
fn harmless(text: &str) -> String {
    let controls = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    text.chars().map(|c| if controls(c) { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_broken_pipe_is_no_error_only_where_the_output_has_no_reader() {
        let of = |kind: io::ErrorKind| anyhow::Error::from(io::Error::from(kind)).context("asking a server");
        let (open, _reader) = UnixStream::pair().unwrap();
        let (closed, reader) = UnixStream::pair().unwrap();
        drop(reader);
        let mut child = Command::new("true").stdin(Stdio::piped()).spawn().unwrap();
        let pipe = child.stdin.take().unwrap();
        child.wait().unwrap();
        // A child of another test has the reader, too, until it runs its program.
        let begun = Instant::now();
        while !is_of_closed(&pipe, &of(io::ErrorKind::BrokenPipe)) && begun.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(Duration::from_millis(1));
        }
        for (kind, of_output) in [(io::ErrorKind::BrokenPipe, true), (io::ErrorKind::ConnectionReset, false)] {
            assert_eq!(is_of_closed(&closed, &of(kind)), of_output, "{kind}: socket");
            assert_eq!(is_of_closed(&pipe, &of(kind)), of_output, "{kind}: pipe");
            assert!(!is_of_closed(&open, &of(kind)), "{kind}: it was written to something else");
            assert!(!is_of_closed(std::fs::File::open("/dev/null").unwrap(), &of(kind)), "{kind}: a file");
        }
    }

    #[test]
    fn no_error_controls_a_terminal() {
        assert_eq!(
            harmless("a.toml:1\n\tb \x1b]0;c\x07\u{9b}d\r"),
            "a.toml:1\n\tb \u{fffd}]0;c\u{fffd}\u{fffd}d\u{fffd}"
        );
        let program = std::env::current_exe().unwrap();
        let said = Command::new(program).args(["--exact", "tests::says_an_error", "--ignored", "--nocapture"]).output();
        let said = String::from_utf8(said.unwrap().stderr).unwrap();
        assert!(said.contains("ontime: QEMU refuses: \u{fffd}[2J"), "{said:?}");
    }

    /// For the test above.
    #[test]
    #[ignore = "prints what the test above reads"]
    fn says_an_error() {
        let error = anyhow::anyhow!("QEMU refuses: \x1b[2J");
        assert_eq!(of_error("ontime", |_| None, &error), ExitCode::from(UNKNOWN));
    }

    #[test]
    fn a_cause_is_said_once() {
        let cause = || anyhow::anyhow!("no such file");
        assert_eq!(
            chain(&cause().context("x: no such file; make it").context("starting")),
            "starting: x: no such file; make it"
        );
        assert_eq!(chain(&cause().context("starting")), "starting: no such file");
    }

    #[test]
    fn an_error_that_is_not_known_is_status_unknown() {
        let known: Known = |cause| cause.downcast_ref::<std::fmt::Error>().map(|_| CONFIG);
        for (error, wanted) in [
            (anyhow::anyhow!("a file cannot be written"), UNKNOWN),
            (Exit::usage("no such VM").into(), USAGE),
            (anyhow::Error::from(Exit::unknown("no tracefs")).context("tracing"), UNKNOWN),
            (anyhow::Error::from(std::fmt::Error).context("starting"), CONFIG),
        ] {
            assert_eq!(status(&error, known), wanted, "{error:#}");
        }
    }
}
