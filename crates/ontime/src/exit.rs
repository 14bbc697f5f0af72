//! Exit statuses, the same for every subcommand. docs/daemon.md has the table for users.
//!
//! The first four are those of monitoring plug-ins. Usage and configuration errors have sysexits(3)'s numbers, which
//! systemd shows by name, so that neither is taken for a state of the host. `lab run` gives its command's own status.

use std::io;
use std::process::ExitCode;

use ontime_lab::LabError;
use ontime_tenants::ConfigError;

use crate::client::ClientError;

/// Done, and all is as wanted.
pub const OK: u8 = 0;
/// Done, and something drifted, failed, does not fit or was missed.
pub const WARNING: u8 = 1;
/// Done, and the class guarantee does not hold: a critical finding.
pub const CRITICAL: u8 = 2;
/// Not done, or not all of it could be seen: rights, the daemon or an ability of the host are missing.
pub const UNKNOWN: u8 = 3;
/// EX_USAGE: called wrongly, or with the name of something that does not exist.
pub const USAGE: u8 = 64;
/// EX_CONFIG: a configuration file is wrong.
pub const CONFIG: u8 = 78;

/// An error that decides the exit status itself.
#[derive(Debug)]
pub struct Exit {
    /// The status.
    pub status: u8,
    /// What is wrong and what to do.
    pub message: String,
}

impl Exit {
    /// Called wrongly.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { status: USAGE, message: message.into() }
    }

    /// Not done, or not seen.
    pub fn unknown(message: impl Into<String>) -> Self {
        Self { status: UNKNOWN, message: message.into() }
    }
}

/// Returns a usage error with this message.
macro_rules! usage {
    ($($word:tt)+) => { return Err($crate::exit::Exit::usage(format!($($word)+)).into()) };
}
pub(crate) use usage;

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Exit {}

/// Prints the error and gives the status that it stands for.
pub fn of_error(error: &anyhow::Error) -> ExitCode {
    // A reader that went away (`ontime ps | head`) is no error.
    let of_writing = |cause: &(dyn std::error::Error + 'static)| {
        let kind = cause.downcast_ref::<io::Error>().map(io::Error::kind);
        kind.or_else(|| cause.downcast_ref::<serde_json::Error>().and_then(serde_json::Error::io_error_kind))
    };
    if error.chain().filter_map(of_writing).any(|kind| kind == io::ErrorKind::BrokenPipe) {
        return ExitCode::from(OK);
    }
    eprintln!("ontime: {}", chain(error));
    ExitCode::from(status(error))
}

fn status(error: &anyhow::Error) -> u8 {
    let of_cause = |cause: &(dyn std::error::Error + 'static)| {
        if let Some(exit) = cause.downcast_ref::<Exit>() {
            return Some(exit.status);
        }
        if let Some(error) = cause.downcast_ref::<ConfigError>() {
            return Some(of_config(error));
        }
        if let Some(LabError::Machine(_)) = cause.downcast_ref::<LabError>() {
            return Some(USAGE);
        }
        cause.downcast_ref::<ClientError>().map(ClientError::exit_status)
    };
    error.chain().find_map(of_cause).unwrap_or(UNKNOWN)
}

/// A file that may not be read is not known to be wrong.
pub fn of_config(error: &ConfigError) -> u8 {
    match error {
        ConfigError::Read { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => UNKNOWN,
        _ => CONFIG,
    }
}

/// The error and its causes in a line. Messages of the crates' own errors end in their cause already; it is not said twice.
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

#[cfg(test)]
mod tests {
    use super::*;

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
    fn a_status_stands_for_one_kind_of_error() {
        let read = |kind: io::ErrorKind| ConfigError::Read { path: "/etc/ontime/x.toml".into(), source: kind.into() };
        let invalid = ontime_tenants::config::Text::new("x.toml", "a = 1\n").error(&(0..1), "unknown");
        let refused = |status| ClientError::Refused { status, message: "why".to_owned() };
        for (error, wanted) in [
            (anyhow::anyhow!("a file cannot be written"), UNKNOWN),
            (Exit::usage("no such VM").into(), USAGE),
            (LabError::Machine("--cpus 9 is not one of 1 to 8".to_owned()).into(), USAGE),
            (LabError::Protocol("half a line".to_owned()).into(), UNKNOWN),
            (anyhow::Error::from(Exit::unknown("no tracefs")).context("tracing"), UNKNOWN),
            (anyhow::Error::from(invalid).context("starting"), CONFIG),
            (read(io::ErrorKind::NotFound).into(), CONFIG),
            (read(io::ErrorKind::PermissionDenied).into(), UNKNOWN),
            (refused(400).into(), USAGE),
            (refused(422).into(), CONFIG),
            (refused(403).into(), UNKNOWN),
            (refused(409).into(), UNKNOWN),
        ] {
            assert_eq!(status(&error), wanted, "{error:#}");
        }
    }
}
