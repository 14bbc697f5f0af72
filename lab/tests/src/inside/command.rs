//! Commands and their output, conditions that are waited for, and small files.
//!
//! A command is written as one line, whose words are separated by blanks (there is no quoting): `run("ip link set rt0
//! up")`. Where a word contains blanks, give an array of words; where a shell is needed, a [`Command`] ([`sh`]).

use std::fmt::Display;
use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, Signal};

use crate::emulated::variable;

/// A command that runs the rest of its line in the cgroup of the measurements: `run("/run/measures ping ...")`.
pub(crate) const MEASURES: &str = "/run/measures";

/// A command to run, made of a line, of words or of a [`Command`].
pub(crate) struct Words(Command);

impl From<&str> for Words {
    fn from(line: &str) -> Self {
        let mut words = line.split_whitespace();
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words);
        Self(command)
    }
}

impl From<String> for Words {
    fn from(line: String) -> Self {
        line.as_str().into()
    }
}

impl<const N: usize> From<[&str; N]> for Words {
    fn from(words: [&str; N]) -> Self {
        let mut words = words.into_iter();
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words);
        Self(command)
    }
}

impl From<Command> for Words {
    fn from(command: Command) -> Self {
        Self(command)
    }
}

/// A shell command.
pub(crate) fn sh(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    command
}

/// A program of a test (`Test::programs`), in the cgroup of the measurements.
pub(crate) fn program(test: &str, program: &str, arguments: &[&str]) -> Result<Command> {
    let own = std::env::current_exe().context("finding this program")?;
    let mut command = Command::new(MEASURES);
    command.arg(own).args(["program", test, program]).args(arguments);
    Ok(command)
}

/// A command that has ended.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) line: String,
    /// Exit status as in a shell: 128 + N for signal N.
    pub(crate) status: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Output {
    /// Standard output, if the command ended with one of these statuses; otherwise an error with all of its output.
    pub(crate) fn expect(self, statuses: &[i32]) -> Result<String> {
        let Self { line, status, stdout, stderr } = self;
        ensure!(statuses.contains(&status), "'{line}' ended with {status}: {stdout}{stderr}");
        Ok(stdout)
    }
}

/// Runs a command that must succeed; its standard output.
pub(crate) fn run(words: impl Into<Words>) -> Result<String> {
    attempt(words)?.expect(&[0])
}

/// Runs a command that may fail.
pub(crate) fn attempt(words: impl Into<Words>) -> Result<Output> {
    start(words)?.wait()
}

/// Starts a command in the background. It runs until it ends, or until the test ends it or has ended.
pub(crate) fn start(words: impl Into<Words>) -> Result<Running> {
    // Not pipes, of which a process that the command leaves behind would keep the other end. In memory, because writing
    // to /lab is slow.
    let memory = |name: &str| memfd_create(name, MemfdFlags::CLOEXEC).map(File::from).context("keeping output");
    spawn(words.into(), memory("stdout")?, memory("stderr")?)
}

/// As [`start`], with all of its output at the end of a file.
pub(crate) fn start_to(words: impl Into<Words>, path: &str) -> Result<Running> {
    let log = OpenOptions::new().create(true).append(true).open(path).with_context(|| format!("opening {path}"))?;
    let again = log.try_clone().with_context(|| format!("opening {path}"))?;
    spawn(words.into(), log, again)
}

/// Starts a process that computes without end.
pub(crate) fn spin() -> Result<Running> {
    start(sh("while :; do :; done"))
}

fn spawn(Words(mut command): Words, stdout: File, stderr: File) -> Result<Running> {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let line = words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
    let clone = |file: &File| file.try_clone().context("keeping output");
    command.stdin(Stdio::null()).stdout(clone(&stdout)?).stderr(clone(&stderr)?);
    let child = command.spawn().with_context(|| format!("starting '{line}'"))?;
    Ok(Running { line, child, stdout, stderr })
}

/// A command in the background.
#[derive(Debug)]
pub(crate) struct Running {
    line: String,
    child: Child,
    stdout: File,
    stderr: File,
}

impl Running {
    pub(crate) fn pid(&self) -> i32 {
        Pid::from_child(&self.child).as_raw_nonzero().get()
    }

    pub(crate) fn signal(&self, of: Signal) -> Result<()> {
        signal(self.pid(), of).with_context(|| self.line.clone())
    }

    /// Whether it has ended.
    pub(crate) fn is_over(&mut self) -> Result<bool> {
        Ok(self.child.try_wait().with_context(|| self.line.clone())?.is_some())
    }

    /// Waits until it has ended.
    pub(crate) fn wait(mut self) -> Result<Output> {
        let ended = self.child.wait().with_context(|| format!("waiting for '{}'", self.line))?;
        let status = ended.code().unwrap_or_else(|| 128 + ended.signal().unwrap_or(0));
        Ok(Output { status, stdout: contents(&self.stdout)?, stderr: contents(&self.stderr)?, line: self.line })
    }

    /// Ends it by a signal, whatever its status.
    pub(crate) fn end(self, signal: Signal) -> Result<Output> {
        self.signal(signal)?;
        self.wait()
    }
}

/// Everything in a file, from its beginning.
fn contents(file: &File) -> Result<String> {
    let bytes = fs::read(format!("/proc/self/fd/{}", file.as_raw_fd())).context("reading the output of a command")?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Sends a signal to a process.
pub(crate) fn signal(pid: i32, signal: Signal) -> Result<()> {
    let process = Pid::from_raw(pid).with_context(|| format!("{pid} is no process"))?;
    rustix::process::kill_process(process, signal).with_context(|| format!("sending a signal to process {pid}"))
}

/// Waits until a condition holds, for so many seconds of the host's clock. An error means that the condition does not
/// hold yet. A pass of the daemon may take seconds beside VMs at real-time priority on one CPU, the daemon pauses for
/// three seconds after it, and its watcher of tenants scans again after 60 s. With a debug kernel in the guest the time
/// is `$SLOW` times as long.
pub(crate) fn within(seconds: u64, what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    let seconds = variable("SLOW", "1").parse::<u64>().map_or(seconds, |slow| seconds.saturating_mul(slow));
    let end = Instant::now() + Duration::from_secs(seconds);
    loop {
        let held = holds();
        if matches!(held, Ok(true)) {
            return Ok(());
        }
        if Instant::now() >= end {
            let why = format!("not within {seconds} s: {what}");
            return held.context(why.clone()).and_then(|_| bail!(why));
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// Fails unless both are written alike.
pub(crate) fn expect(what: &str, wanted: impl Display, found: impl Display) -> Result<()> {
    let (wanted, found) = (wanted.to_string(), found.to_string());
    ensure!(wanted == found, "{what}: wanted '{wanted}', found '{found}'");
    Ok(())
}

/// Prints figures, which are shown also if the test succeeds.
pub(crate) fn figures(text: impl Display) {
    println!("figures: {text}");
}

/// The text of a file, without white space at its end.
pub(crate) fn read(path: impl AsRef<Path>) -> Result<String> {
    let path = path.as_ref();
    let bytes = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    Ok(String::from_utf8_lossy(&bytes).trim_end().to_owned())
}

/// The number in a file.
pub(crate) fn read_number<T>(path: impl AsRef<Path>) -> Result<T>
where
    T: FromStr,
    T::Err: std::error::Error + Send + Sync + 'static,
{
    let path = path.as_ref();
    let text = read(path)?;
    text.parse::<T>().with_context(|| format!("{}: '{text}' is no number", path.display()))
}

/// The last lines of a text.
pub(crate) fn tail(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let kept = lines.iter().skip(lines.len().saturating_sub(count));
    kept.map(|line| format!("{line}\n")).collect()
}

/// Writes a file.
pub(crate) fn write(path: impl AsRef<Path>, text: impl AsRef<[u8]>) -> Result<()> {
    let path = path.as_ref();
    fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}

/// The files of a pattern, in which `*` stands for any characters of one part of the path.
pub(crate) fn files(pattern: &str) -> Vec<String> {
    let mut found = vec![String::new()];
    for part in pattern.split('/').filter(|part| !part.is_empty()) {
        let below = |dir: &String| match part.split_once('*') {
            None => vec![format!("{dir}/{part}")],
            Some((before, after)) => {
                let entries = fs::read_dir(format!("{dir}/")).into_iter().flatten().flatten();
                let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
                let fits = |name: &String| {
                    name.len() >= before.len() + after.len() && name.starts_with(before) && name.ends_with(after)
                };
                names.filter(fits).map(|name| format!("{dir}/{name}")).collect()
            }
        };
        found = found.iter().flat_map(below).collect();
    }
    found.retain(|path| Path::new(path).exists());
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_command_is_named_with_all_that_it_said() {
        let error = run(sh("echo out; echo err >&2; exit 3")).unwrap_err().to_string();
        for wanted in ["echo err", "ended with 3", "out\n", "err\n"] {
            assert!(error.contains(wanted), "{error}");
        }
        let error = format!("{:#}", attempt("no-such-program-anywhere with words").unwrap_err());
        assert!(error.contains("no-such-program-anywhere with words"), "{error}");
        assert_eq!(run(["printf", "%s|", "one word", "another"]).unwrap(), "one word|another|");
    }

    #[test]
    fn what_a_process_left_behind_keeps_open_delays_nothing() {
        let output = attempt(sh("sleep 60 & echo $!")).unwrap();
        assert_eq!((output.status, output.stderr.as_str()), (0, ""));
        signal(output.stdout.trim().parse().unwrap(), Signal::KILL).unwrap();
    }

    #[test]
    fn a_command_in_the_background_is_heard_and_ended() {
        let mut running = start(sh("echo first; exec sleep 60")).unwrap();
        within(60, "it speaks", || Ok(contents(&running.stdout)? == "first\n")).unwrap();
        assert!(!running.is_over().unwrap());
        let ended = running.end(Signal::TERM).unwrap();
        assert_eq!((ended.status, ended.stdout.as_str()), (128 + 15, "first\n"));
    }

    #[test]
    fn a_condition_that_does_not_hold_in_time_is_named_with_its_error() {
        within(60, "at the second time", {
            let mut times = 0;
            move || {
                times += 1;
                ensure!(times > 1, "not yet");
                Ok(true)
            }
        })
        .unwrap();
        let error = within(0, "the moon is full", || Ok(false)).unwrap_err();
        assert_eq!(format!("{error:#}"), "not within 0 s: the moon is full");
        let error = within(0, "the moon is full", || bail!("there are clouds")).unwrap_err();
        assert_eq!(format!("{error:#}"), "not within 0 s: the moon is full: there are clouds");
    }

    #[test]
    fn the_last_lines_of_a_text_are_whole() {
        assert_eq!(tail("a\nb\nc", 2), "b\nc\n");
        assert_eq!(tail("a", 2), "a\n");
        assert_eq!(tail("", 2), "");
    }

    #[test]
    fn files_are_found_by_a_pattern() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["cpu0/online", "cpu1/online", "cpu1/other", "other0/online"] {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let root = dir.path().to_str().unwrap();
        assert_eq!(
            files(&format!("{root}/cpu*/online")),
            [format!("{root}/cpu0/online"), format!("{root}/cpu1/online")]
        );
        assert!(files(&format!("{root}/cpu*/absent")).is_empty());
    }
}
