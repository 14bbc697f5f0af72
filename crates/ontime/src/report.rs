//! `ontime report`: collects what a support request needs in one tar file.
//!
//! In: the output of this program's own commands and of some of the system's, files of Ontime and of `/proc`. Out: a
//! tar file that only its owner may read. Every part is limited in size and time: a long log keeps its newest lines,
//! any other part its beginning, and a line in the part says how much was left out. A part that cannot be collected is
//! listed in `manifest.json`, and the rest is collected anyway. Configuration files are opened without following
//! symbolic links.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::fs::{Mode, OFlags};
use serde::Serialize;

use crate::exit::Doing;
use crate::paths::Paths;
use crate::{api, check, exit};

/// The most bytes of a file, or of each output of a command; the rest is left out.
const MOST: usize = 8 << 20;
/// The most bytes of a longer file that are counted.
const COUNTED: u64 = 1 << 30;
/// The longest time that a command may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// `ontime report`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The file to create; it must not exist (default: ontime-report-HOST-SECONDS.tar in this directory).
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// One file of the report.
#[derive(Debug, Serialize)]
struct Part {
    name: String,
    /// The command or file that it was collected from.
    source: String,
    bytes: usize,
    /// Whether the source had more than [`MOST`] bytes.
    cut: bool,
    /// How many bytes were left out.
    cut_bytes: u64,
    /// The command's exit status.
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<i32>,
    /// Why the part is missing or incomplete.
    #[serde(skip_serializing_if = "Option::is_none")]
    missing: Option<String>,
}

#[derive(Debug, Serialize)]
struct Manifest<'a> {
    schema_version: u32,
    version: &'static str,
    collected_unix_s: u64,
    parts: &'a [Part],
}

/// Collects the report. Exit status 3 if not run as root, because parts may then be missing.
///
/// # Errors
/// Where the file cannot be created or written.
pub(crate) fn run(args: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let host: String = host.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
    let path = args.output.clone().unwrap_or_else(|| format!("ontime-report-{host}-{seconds}.tar").into());
    // A new file that only its owner may read, because it contains names of VMs, addresses and logs.
    let file = File::options().write(true).create_new(true).mode(0o600).open(&path);
    let file = file.doing(format_args!("{}: making the report (--output)", path.display()))?;
    let tar = tar::Builder::new(io::BufWriter::new(file));
    let mut report = Report { tar, path, seconds, parts: Vec::new() };
    report.collect(paths)?;
    let manifest = serde_json::to_vec_pretty(&Manifest {
        schema_version: api::SCHEMA_VERSION,
        version: crate::version(),
        collected_unix_s: seconds,
        parts: &report.parts,
    })?;
    report.append("manifest.json", &manifest)?;
    let (path, parts) = report.finish()?;
    let missing = parts.iter().filter(|part| part.missing.is_some()).count();
    let cut = parts.iter().filter(|part| part.cut).count();
    ontime_cli::print(format_args!(
        "{}: {} parts, {missing} of them missing or incomplete, {cut} cut to {} MiB (manifest.json says why and by how \
         much)\nIt has names of VMs and interfaces, addresses and logs: look at it before you send it.\n",
        path.display(),
        parts.len(),
        MOST >> 20
    ))?;
    Ok(ExitCode::from(if rustix::process::geteuid().is_root() { exit::OK } else { exit::UNKNOWN }))
}

struct Report {
    tar: tar::Builder<io::BufWriter<File>>,
    path: PathBuf,
    seconds: u64,
    parts: Vec<Part>,
}

/// Parts from this program's own commands: file name and arguments.
const OWN: [(&str, &[&str]); 9] = [
    ("status.json", &["status", "--json"]),
    ("status.txt", &["status", "--all"]),
    ("tenants.json", &["ps", "--json"]),
    ("nics.json", &["net", "status", "--json"]),
    ("plan.json", &["apply", "--dry-run", "--json"]),
    ("reservations.json", &["top", "--once", "--json", "--interval", "0.5"]),
    ("doctor.json", &["doctor", "--all", "--json"]),
    ("check.txt", &["check"]),
    ("metrics.txt", &["metrics"]),
];

/// The part of a text of more than [`MOST`] bytes that the report keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Keep {
    First,
    /// The end: of a log, the newest lines.
    Last,
}

/// Parts from the system's commands.
const SYSTEM: [(&str, &[&str], Keep); 5] = [
    (
        "log.txt",
        &["journalctl", "-u", "ontimed", "-u", "ontime-device@*", "-b", "--no-pager", "-n", "20000", "-o", "short-iso"],
        Keep::Last,
    ),
    ("unit.txt", &["systemctl", "show", "ontimed", "--no-pager"], Keep::First),
    ("links.txt", &["ip", "-details", "-statistics", "link"], Keep::First),
    ("qdiscs.txt", &["tc", "-statistics", "qdisc"], Keep::First),
    ("cpus.txt", &["lscpu"], Keep::First),
];

const FILES: [&str; 6] =
    ["/proc/version", "/proc/cmdline", "/proc/interrupts", "/proc/softirqs", "/proc/meminfo", "/etc/os-release"];

impl Report {
    fn collect(&mut self, paths: &Paths) -> anyhow::Result<()> {
        let program = std::env::current_exe().doing("finding the program `ontime`")?;
        for (name, args) in OWN {
            let mut command = Command::new(&program);
            command.args(args).args(paths.arguments());
            self.command(name, &format!("ontime {}", args.join(" ")), command, Keep::First)?;
        }
        for (name, args, keep) in SYSTEM {
            let Some((program, rest)) = args.split_first() else { continue };
            let mut command = Command::new(program);
            command.args(rest);
            self.command(name, &args.join(" "), command, keep)?;
        }
        for file in FILES {
            self.file(&format!("system{file}"), Path::new(file))?;
        }
        self.file("originals", &paths.state_dir.join("originals"))?;
        self.configuration(&paths.config_dir)
    }

    fn configuration(&mut self, directory: &Path) -> anyhow::Result<()> {
        let name = |path: &Path| format!("configuration/{}", path.strip_prefix(directory).unwrap_or(path).display());
        let (files, errors) = check::files(directory);
        for file in files {
            self.file(&name(&file), &file)?;
        }
        for error in errors {
            let path = check::path_of(&error);
            let (source, why) = (path.display().to_string(), error.to_string());
            self.add(&name(path), &source, LimitedText::default(), None, Some(why))?;
        }
        Ok(())
    }

    fn command(&mut self, name: &str, source: &str, command: Command, keep: Keep) -> anyhow::Result<()> {
        let _ = write!(io::stderr(), "{source} ... ");
        let start = Instant::now();
        let (text, status, missing) = match output(command, PATIENCE, keep) {
            Ok((text, status)) => {
                (text, status, status.is_none().then(|| format!("ended after {} s", PATIENCE.as_secs())))
            }
            Err(error) => (LimitedText::default(), None, Some(error.to_string())),
        };
        let said = missing.clone().unwrap_or_else(|| format!("{:.1} s", start.elapsed().as_secs_f64()));
        let cut = if text.cut > 0 { format!(", {} bytes left out", text.cut) } else { String::new() };
        ontime_cli::print_stderr(format_args!("{said}{cut}"));
        self.add(name, source, text, status, missing)
    }

    fn file(&mut self, name: &str, path: &Path) -> anyhow::Result<()> {
        let (text, missing) = match read(path) {
            Ok(LimitedText { text, cut }) => (LimitedText { text: without_secrets(&text), cut }, None),
            Err(error) => (LimitedText::default(), Some(error.to_string())),
        };
        self.add(name, &path.display().to_string(), text, None, missing)
    }

    fn add(
        &mut self,
        name: &str,
        source: &str,
        LimitedText { text, cut }: LimitedText,
        status: Option<i32>,
        missing: Option<String>,
    ) -> anyhow::Result<()> {
        self.append(name, &text)?;
        let (name, source) = (name.to_owned(), source.to_owned());
        self.parts.push(Part { name, source, bytes: text.len(), cut: cut > 0, cut_bytes: cut, status, missing });
        Ok(())
    }

    fn append(&mut self, name: &str, text: &[u8]) -> anyhow::Result<()> {
        append(&mut self.tar, name, text, self.seconds).doing(writing(&self.path))
    }

    /// Ends the file. Returns its path and its parts.
    fn finish(self) -> anyhow::Result<(PathBuf, Vec<Part>)> {
        let Self { tar, path, parts, .. } = self;
        let file = tar.into_inner().and_then(|buffer| buffer.into_inner().map_err(io::IntoInnerError::into_error));
        file.and_then(|file| file.sync_all()).doing(writing(&path))?;
        Ok((path, parts))
    }
}

/// A text of limited size. A line in it says how many bytes were left out at that place.
#[derive(Debug, Default)]
struct LimitedText {
    text: Vec<u8>,
    cut: u64,
}

/// Reads a source to its end, because a full pipe would block the command, and keeps at most `most` bytes of it, in
/// whole lines if the beginning is left out.
fn keep(mut source: impl Read, most: usize, keep: Keep) -> io::Result<LimitedText> {
    let (mut text, mut cut) = (Vec::new(), 0);
    if keep == Keep::First {
        source.by_ref().take(most as u64).read_to_end(&mut text)?;
        cut = io::copy(&mut source, &mut io::sink())?;
        if cut > 0 {
            text.extend_from_slice(format!("\n[ontime report: {cut} more bytes were left out here]\n").as_bytes());
        }
        return Ok(LimitedText { text, cut });
    }
    // The text is cut whenever it has twice the size, so that each byte is moved at most once on average.
    while source.by_ref().take(most as u64).read_to_end(&mut text)? > 0 {
        let more = text.len().saturating_sub(most);
        text.drain(..more);
        cut += more as u64;
    }
    if cut > 0 {
        let part_of_a_line = text.iter().position(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        text.drain(..part_of_a_line);
        cut += part_of_a_line as u64;
        let note = format!("[ontime report: {cut} bytes were left out here, the oldest]\n");
        text.splice(..0, note.into_bytes());
    }
    Ok(LimitedText { text, cut })
}

fn writing(path: &Path) -> String {
    format!("{}: writing the report (--output)", path.display())
}

fn append(tar: &mut tar::Builder<impl Write>, name: &str, text: &[u8], seconds: u64) -> io::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_size(text.len() as u64);
    header.set_mode(0o600);
    header.set_mtime(seconds);
    tar.append_data(&mut header, format!("ontime-report/{name}"), text)
}

/// Reads a regular file, without following a symbolic link.
fn read(path: &Path) -> io::Result<LimitedText> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = File::from(match rustix::fs::open(path, flags, Mode::empty()) {
        Err(rustix::io::Errno::LOOP) => return Err(io::Error::other("a symbolic link: not followed")),
        other => other?,
    });
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    keep(file.take(COUNTED), MOST, Keep::First)
}

/// Runs a command and returns what it prints on both outputs, limited in size: of standard output the part that `kept`
/// says, of standard error the beginning. The status is None if the command did not end in time.
fn output(mut command: Command, patience: Duration, kept: Keep) -> io::Result<(LimitedText, Option<i32>)> {
    // A process group of its own, so that processes which the command starts are killed with it.
    command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let out = read_beside(child.stdout.take(), kept);
    let err = read_beside(child.stderr.take(), Keep::First);
    let end = Instant::now() + patience;
    let status = loop {
        match child.try_wait()? {
            Some(status) => break Some(status.code().unwrap_or(-1)),
            None if Instant::now() >= end => {
                if let Some(group) = rustix::process::Pid::from_raw(i32::try_from(child.id()).unwrap_or(0)) {
                    rustix::process::kill_process_group(group, rustix::process::Signal::KILL)?;
                }
                child.wait()?;
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let (mut all, err) = (finished(out)?, finished(err)?);
    if !err.text.is_empty() {
        all.text.extend_from_slice(b"\nstandard error:\n");
        all.text.extend(err.text);
        all.cut += err.cut;
    }
    Ok((all, status))
}

/// Reads an output of a command to its end in a thread of its own.
fn read_beside(pipe: Option<impl Read + Send + 'static>, kept: Keep) -> JoinHandle<io::Result<LimitedText>> {
    std::thread::spawn(move || {
        let pipe = pipe.ok_or_else(|| io::Error::other("the command has no such output"))?;
        keep(pipe, MOST, kept)
    })
}

/// What such a thread has read. A thread that panicked has not read an empty output.
fn finished(reader: JoinHandle<io::Result<LimitedText>>) -> io::Result<LimitedText> {
    reader.join().unwrap_or_else(|_| Err(io::Error::other("the thread that reads its output panicked")))
}

/// Replaces the value of every key that looks like a secret by `left out`, in lines with `KEY = VALUE` or `KEY=VALUE`.
fn without_secrets(text: &[u8]) -> Vec<u8> {
    const SECRET: [&str; 6] = ["password", "passwd", "passphrase", "secret", "token", "private-key"];
    let mut out = Vec::with_capacity(text.len());
    for line in text.split_inclusive(|byte| *byte == b'\n') {
        let said = String::from_utf8_lossy(line);
        // Of the same length as the line.
        let lower = said.to_ascii_lowercase();
        // The value extends from the first such key to the end of the line.
        let key = SECRET.iter().filter_map(|word| lower.find(word)).min();
        let value = key.and_then(|at| lower.get(at..)?.find(['=', ':']).map(|sign| at + sign + 1));
        match value.and_then(|value| said.get(..value)) {
            Some(head) => {
                out.extend_from_slice(head.as_bytes());
                out.extend_from_slice(b" left out\n");
            }
            None => out.extend_from_slice(line),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_left_out_and_the_rest_stays() {
        let text = b"class = \"rt\"\nvnc-password = \"x\"\nroot=/dev/sda Token=abc quiet\nno value of a secret \
            here\n\xff\xfe\n";
        let kept = b"class = \"rt\"\nvnc-password = left out\nroot=/dev/sda Token= left out\nno value of a secret \
            here\n\xff\xfe\n";
        assert_eq!(without_secrets(text), kept, "{}", String::from_utf8_lossy(&without_secrets(text)));
        // A letter that is longer in lower case.
        assert_eq!(
            without_secrets("vm=\u{130} PASSWORD: x\n".as_bytes()),
            "vm=\u{130} PASSWORD: left out\n".as_bytes()
        );
    }

    #[test]
    fn configuration_that_cannot_be_listed_is_missing_and_not_absent() {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("config");
        std::fs::create_dir(&config).unwrap();
        std::fs::write(config.join("daemon.toml"), "mode = \"observe\"\n").unwrap();
        // No directory, so it cannot be listed.
        std::fs::write(config.join("sched.conf.d"), "").unwrap();
        let tar = tar::Builder::new(io::BufWriter::new(File::create(dir.path().join("report.tar")).unwrap()));
        let mut report = Report { tar, path: PathBuf::new(), seconds: 0, parts: Vec::new() };
        report.configuration(&config).unwrap();
        let parts: Vec<(&str, bool)> =
            report.parts.iter().map(|part| (part.name.as_str(), part.missing.is_some())).collect();
        assert_eq!(parts, [("configuration/daemon.toml", false), ("configuration/sched.conf.d", true)]);
    }

    #[test]
    fn a_full_disk_is_told_with_the_reports_name() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let tar = tar::Builder::new(io::BufWriter::new(full));
        let report = |tar| Report { tar, path: "x.tar".into(), seconds: 0, parts: Vec::new() };
        // Beyond the buffer, and within it.
        let mut long = report(tar);
        let error = long.append("long", &[b'x'; 100_000]).unwrap_err();
        let other = File::options().write(true).open("/dev/full").unwrap();
        let mut short = report(tar::Builder::new(io::BufWriter::new(other)));
        short.append("short", b"x").unwrap();
        for error in [error, short.finish().err().unwrap()] {
            let said = exit::chain(&error);
            assert!(said.starts_with("x.tar: writing the report (--output): No space left"), "{said}");
        }
    }

    #[test]
    fn links_devices_and_large_files_are_not_taken_whole() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("other"), "foreign").unwrap();
        std::os::unix::fs::symlink(at("other"), at("link")).unwrap();
        assert!(read(&at("link")).unwrap_err().to_string().contains("symbolic link"));
        assert!(read(dir.path()).unwrap_err().to_string().contains("not a regular file"));
        assert!(read(Path::new("/dev/zero")).is_err());
        let file = File::create(at("large")).unwrap();
        file.set_len(3 * MOST as u64).unwrap();
        let large = read(&at("large")).unwrap();
        assert_eq!((large.cut, large.text.iter().filter(|byte| **byte == 0).count()), (2 * MOST as u64, MOST));
        assert!(large.text.ends_with(format!("{} more bytes were left out here]\n", 2 * MOST).as_bytes()));
    }

    /// Sources that end at, below and beyond the limits at which the text is cut.
    #[test]
    fn a_long_log_keeps_its_newest_lines_in_order_and_says_how_much_was_cut() {
        for (lines, most) in [(0, 10), (3, 64), (8, 64), (9, 64), (16, 64), (100, 64), (1000, 64), (4096, 4096)] {
            let all: Vec<String> = (0..lines).map(|line| format!("line {line:4}\n")).collect();
            let text = all.concat();
            let kept = keep(text.as_bytes(), most, Keep::Last).unwrap();
            let kept_text = String::from_utf8(kept.text).unwrap();
            if text.len() <= most {
                assert_eq!((kept_text, kept.cut), (text, 0));
                continue;
            }
            let (note, rest) = kept_text.split_once('\n').unwrap();
            assert_eq!(note, format!("[ontime report: {} bytes were left out here, the oldest]", kept.cut));
            assert!(text.ends_with(rest) && rest.starts_with("line "), "{lines} {most}: {rest:?}");
            assert_eq!(rest.len() as u64 + kept.cut, text.len() as u64);
            assert!(rest.len() <= most && rest.len() + 10 > most, "{lines} {most}: {}", rest.len());
        }
        // One line without an end is kept as far as it fits.
        let kept = keep([b'x'; 100].as_slice(), 64, Keep::Last).unwrap();
        assert_eq!((kept.cut, kept.text.iter().filter(|byte| **byte == b'x').count()), (36, 64));
    }

    /// Of the commands, only the log is cut at its beginning: others are read from the top.
    #[test]
    fn a_command_with_a_long_log_loses_its_oldest_lines() {
        let newest: Vec<&str> =
            SYSTEM.iter().filter(|(.., keep)| *keep == Keep::Last).map(|(name, ..)| *name).collect();
        assert_eq!(newest, ["log.txt"]);
        let mut command = Command::new("seq");
        command.args(["1", "2000000"]);
        let (kept, status) = output(command, PATIENCE, Keep::Last).unwrap();
        assert!(status == Some(0) && kept.cut > 0, "{status:?} {}", kept.cut);
        assert!(kept.text.ends_with(b"\n1999999\n2000000\n"));
    }

    #[test]
    fn an_output_that_was_not_read_to_its_end_is_not_taken_for_an_empty_one() {
        struct Panics;
        impl Read for Panics {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                panic!("this panic belongs to the test")
            }
        }
        for kept in [Keep::First, Keep::Last] {
            let error = finished(read_beside(Some(Panics), kept)).unwrap_err();
            assert!(error.to_string().contains("panicked"), "{error}");
            // A directory can be opened, and its reading fails.
            assert!(finished(read_beside(File::open("/").ok(), kept)).is_err());
            assert!(finished(read_beside(None::<File>, kept)).is_err());
            assert_eq!(finished(read_beside(Some(&b"a\n"[..]), kept)).unwrap().text, b"a\n");
        }
    }

    #[test]
    fn a_command_is_bounded_in_time_and_output() {
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            command
        };
        let (text, status) = output(shell("echo a; echo b >&2; exit 3"), PATIENCE, Keep::First).unwrap();
        assert_eq!((text.text.as_slice(), status), (b"a\n\nstandard error:\nb\n".as_slice(), Some(3)));
        let (text, status) = output(shell("head -c 40000000 /dev/zero"), PATIENCE, Keep::First).unwrap();
        assert_eq!((text.cut + MOST as u64, status), (40_000_000, Some(0)));
        let (_, status) = output(shell("sleep 600 & sleep 600"), Duration::from_millis(50), Keep::Last).unwrap();
        assert_eq!(status, None);
        assert!(output(Command::new("/nonexistent/program"), PATIENCE, Keep::First).is_err());
    }
}
