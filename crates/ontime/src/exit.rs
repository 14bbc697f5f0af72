//! Exit statuses, the same for every subcommand but `doctor` (which says 0 ok, 1 warning, 2 critical, 3 unknown).

use std::process::ExitCode;

/// Done.
pub const OK: u8 = 0;
/// Done, and a threshold is passed: something drifted, failed or is not as wanted.
pub const THRESHOLD: u8 = 1;
/// Not done: called wrongly, or the daemon or host refused.
pub const USAGE: u8 = 2;
/// This host cannot do it.
pub const UNSUPPORTED: u8 = 3;

/// An error that decides the exit status itself.
#[derive(Debug)]
pub struct Exit {
    /// The status.
    pub status: u8,
    /// What is wrong and what to do.
    pub message: String,
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Exit {}

/// Prints the error and gives the status it asks for, else [`USAGE`].
pub fn of_error(error: &anyhow::Error) -> ExitCode {
    // A reader that went away (`ontime ps | head`) is no error.
    let of_writing = |cause: &(dyn std::error::Error + 'static)| {
        let kind = cause.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        kind.or_else(|| cause.downcast_ref::<serde_json::Error>().and_then(serde_json::Error::io_error_kind))
    };
    if error.chain().filter_map(of_writing).any(|kind| kind == std::io::ErrorKind::BrokenPipe) {
        return ExitCode::from(OK);
    }
    eprintln!("ontime: {}", chain(error));
    ExitCode::from(error.downcast_ref::<Exit>().map_or(USAGE, |exit| exit.status))
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
}
