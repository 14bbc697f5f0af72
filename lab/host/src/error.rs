//! Errors of the lab, with their remedies.

use std::path::PathBuf;

use thiserror::Error;

/// Why an operation of the lab failed.
#[derive(Debug, Error)]
pub enum LabError {
    /// An operation on a file or directory failed.
    #[error("{what} {path}: {source}; {remedy}", path = path.display(), remedy = remedy(source))]
    File {
        /// The operation.
        what: &'static str,
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A program the lab needs could not be started.
    #[error("cannot start {program}: {source}; {remedy}")]
    Program {
        /// The program's name.
        program: String,
        /// The system's error.
        source: std::io::Error,
        /// The remedy.
        remedy: &'static str,
    },
    /// A program the lab needs failed.
    #[error("{command} failed: {output}; {remedy}")]
    Command {
        /// The command line.
        command: String,
        /// The command's output.
        output: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// The lab was not started as root.
    #[error("the lab makes network namespaces and disks: run it as root")]
    NotRoot,
    /// The images could not be built.
    #[error("the lab's images could not be built: is there a network, a Debian mirror in apt's configuration, and 6 GB \
             of disk? `ontime-lab images` begins anew; the last lines of {log}:\n{tail}", log = log.display())]
    Images {
        /// The build's log.
        log: PathBuf,
        /// The end of the log.
        tail: String,
    },
    /// The emulator could not be built, or failed its self-test.
    #[error("the lab's emulator cannot be {what}; end the cause below, of which {files} has more, then begin anew: \
             `ontime-lab images`\n{said}", files = files.display())]
    Emulator {
        /// "built" or "used".
        what: &'static str,
        /// The reason: the log's end, or the figures out of bounds.
        said: String,
        /// The log, or the directory with the figures.
        files: PathBuf,
    },
    /// The emulated host's kernel panicked, or its user land gave up.
    #[error("the emulated host crashed: {line}; run it again, with --out DIR to keep its files\nits console log: \
        {log}", log = log.display())]
    Crashed {
        /// The console line that shows it.
        line: String,
        /// The console log.
        log: PathBuf,
    },
    /// The emulated host crashed because of a race in the emulator, on the real clock.
    #[error("the emulated host crashed at a breakpoint that its kernel had taken away again, which the emulator \
             missed; run it again\nits console log: {log}", log = log.display())]
    StaleCode {
        /// The console log.
        log: PathBuf,
    },
    /// The emulated host has sent no sign of life for too long.
    #[error("the emulated host hangs: no sign of life for {seconds} s; on a busy machine give it more with --silence; \
        its console log: {log}\n{tail}", log = log.display())]
    Hung {
        /// Real seconds without a heartbeat.
        seconds: u64,
        /// The console log.
        log: PathBuf,
        /// The end of the log.
        tail: String,
    },
    /// The emulator ended by itself.
    #[error("the emulator ended ({status}) before it was asked to; see its own messages below: another program may \
             have killed it (journalctl -k -g 'Out of memory'), else run it again with --out DIR to keep its files\n\
             its console log: {log}\n{tail}", log = log.display())]
    Ended {
        /// The emulator's exit status.
        status: String,
        /// The console log.
        log: PathBuf,
        /// The end of the log.
        tail: String,
    },
    /// A command in the emulated host exceeded its time limit.
    #[error(
        "'{command}' did not end within {seconds} s in the emulated host; give it more time with --timeout, or see \
         what its threads did then:\n{state}"
    )]
    Timeout {
        /// The command.
        command: String,
        /// The limit, real seconds.
        seconds: u64,
        /// The threads that were running or blocked at that moment.
        state: String,
    },
    /// The agent in the emulated host sent an invalid message.
    #[error("the lab's agent: {0}; run it again, with an ontime-lab and images of one version (`ontime-lab images`)")]
    Protocol(String),
    /// The machine's parameters are invalid.
    #[error("{0}")]
    Machine(String),
}

impl LabError {
    /// Whether the message names the console log, which must then outlive the command.
    pub fn names_log(&self) -> bool {
        matches!(self, Self::Crashed { .. } | Self::StaleCode { .. } | Self::Hung { .. } | Self::Ended { .. })
    }
}

/// The remedy for a file error.
fn remedy(source: &std::io::Error) -> &'static str {
    use std::io::ErrorKind as K;
    match source.kind() {
        K::StorageFull | K::QuotaExceeded => {
            "make room there, or give another place: TMPDIR or --out for what a run writes, ONTIME_LAB_CACHE for images"
        }
        K::NotFound => "correct the path, or make what is missing in it",
        K::PermissionDenied => "run the lab as root, or correct the permissions there",
        K::ReadOnlyFilesystem => "give another place: TMPDIR for what a run writes, ONTIME_LAB_CACHE for images",
        K::OutOfMemory => "free memory on this machine, or give the emulated host less (--memory)",
        _ => "see that machine's kernel log (journalctl -k), and try again",
    }
}

/// For `map_err` of file operations.
pub(crate) fn file(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> LabError {
    let path = path.into();
    move |source| LabError::File { what, path, source }
}

/// The last `lines` lines of a log.
pub(crate) fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all.get(all.len().saturating_sub(lines)..).unwrap_or_default().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_in_the_lab_has_a_remedy() {
        let on_file = |number| file("write", "/x/initrd")(std::io::Error::from_raw_os_error(number)).to_string();
        let log = || PathBuf::from("/x/console.log");
        for (said, wanted) in [
            (on_file(libc::ENOENT), "make what is missing"),
            (on_file(libc::EACCES), "as root"),
            (on_file(libc::ENOSPC), "TMPDIR"),
            (on_file(libc::EROFS), "ONTIME_LAB_CACHE"),
            (on_file(libc::EIO), "journalctl -k"),
            (
                LabError::Command { command: "ip link".into(), output: "denied".into(), remedy: "see `ip`" }
                    .to_string(),
                "see `ip`",
            ),
            (
                LabError::Ended { status: "signal: 9".into(), log: log(), tail: String::new() }.to_string(),
                "Out of memory",
            ),
            (
                LabError::Emulator { what: "built", said: "no space left".into(), files: log() }.to_string(),
                "`ontime-lab images`\nno space left",
            ),
            (LabError::Crashed { line: "Kernel panic".into(), log: log() }.to_string(), "--out DIR"),
            (LabError::Hung { seconds: 60, log: log(), tail: String::new() }.to_string(), "--silence"),
            (LabError::Timeout { command: "x".into(), seconds: 9, state: String::new() }.to_string(), "--timeout"),
            (LabError::Protocol("eof".into()).to_string(), "`ontime-lab images`"),
        ] {
            assert!(said.split_once("; ").is_some_and(|(_, remedy)| remedy.contains(wanted)), "{said}");
        }
    }
}
