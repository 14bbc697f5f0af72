//! The half of a test that runs on this machine: its directory, its log, and the commands that it starts.
//!
//! All output of the commands goes to the log, which is shown if the test fails.

use std::fmt::Display;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ontime_lab::isolate::end_with_parent;
use rustix::process::{Pid, Signal};

use crate::emulated::Host;

/// The name of this program in `/lab`.
const PROGRAM: &str = "ontime-lab-tests";

/// Files that the tests use.
#[derive(Debug, Clone)]
pub(crate) struct Tools {
    /// The program under test.
    pub(crate) ontime: PathBuf,
    pub(crate) lab: PathBuf,
    pub(crate) own: PathBuf,
    pub(crate) tree: PathBuf,
}

/// The commands under way, each in a process group of its own. An interrupted run ends them.
#[derive(Debug, Default)]
pub(crate) struct Commands(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    groups: Vec<Pid>,
    interrupted: Option<i32>,
}

impl Commands {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&self, command: &mut Command) -> Result<Child> {
        let program = command.get_program().to_string_lossy().into_owned();
        let mut state = self.state();
        ensure!(state.interrupted.is_none(), "interrupted");
        // If this program is killed, its commands end by themselves.
        let child = end_with_parent(command.process_group(0), Signal::TERM).spawn();
        let child = child.with_context(|| format!("starting {program}"))?;
        state.groups.push(Pid::from_child(&child));
        Ok(child)
    }

    fn forget(&self, child: &Child) {
        let ended = Pid::from_child(child);
        self.state().groups.retain(|group| *group != ended);
    }

    /// Ends all commands, and lets none start any more.
    pub(crate) fn interrupt(&self, signal: i32) {
        let mut state = self.state();
        state.interrupted.get_or_insert(signal);
        for group in &state.groups {
            // The command may have ended just now.
            let _ = rustix::process::kill_process_group(*group, Signal::TERM);
        }
    }

    /// The signal that interrupted the run, if any.
    pub(crate) fn interrupted(&self) -> Option<i32> {
        self.state().interrupted
    }
}

/// A test that runs.
pub(crate) struct Outside {
    name: &'static str,
    host: Host,
    has_inside: bool,
    dir: PathBuf,
    tools: Arc<Tools>,
    commands: Arc<Commands>,
}

/// A command that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    /// Exit status as in a shell: 128 + N for signal N.
    pub(crate) status: i32,
    /// What was written to the log since its start: its standard output and standard error.
    pub(crate) said: String,
}

impl Ended {
    /// Fails unless the command ended with this status.
    pub(crate) fn expect(self, status: i32) -> Result<String> {
        ensure!(self.status == status, "ended with {}, wanted {status}", self.status);
        Ok(self.said)
    }
}

impl Outside {
    /// A test whose files are in `dir`, which is made.
    pub(crate) fn new(
        name: &'static str,
        host: Host,
        has_inside: bool,
        dir: PathBuf,
        tools: Arc<Tools>,
        commands: Arc<Commands>,
    ) -> Result<Self> {
        fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
        Ok(Self { name, host, has_inside, dir, tools, commands })
    }

    /// The log of a test whose files are in `dir`.
    pub(crate) fn log_in(dir: &Path) -> PathBuf {
        dir.join("log")
    }

    /// The test's directory: `--out` of its emulated host.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn tree(&self) -> &Path {
        &self.tools.tree
    }

    /// The program under test.
    pub(crate) fn ontime(&self) -> &Path {
        &self.tools.ontime
    }

    /// The host that the list gives this test.
    pub(crate) fn host(&self) -> Host {
        self.host
    }

    /// A directory in the test's own, made if it is missing.
    pub(crate) fn directory(&self, name: &str) -> Result<PathBuf> {
        let dir = self.dir.join(name);
        fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
        Ok(dir)
    }

    /// The directory that is `/lab` in the test's emulated host.
    pub(crate) fn files(&self) -> Result<PathBuf> {
        self.directory("files")
    }

    fn log(&self) -> Result<File> {
        let path = Self::log_in(&self.dir);
        let log = OpenOptions::new().create(true).append(true).read(true).open(&path);
        log.with_context(|| format!("opening {}", path.display()))
    }

    /// Writes a line to the test's log. Lines that begin with `figures: ` are shown also if the test succeeds.
    pub(crate) fn note(&self, line: impl Display) -> Result<()> {
        writeln!(self.log()?, "{line}").context("writing the log")
    }

    /// `ontime-lab` with these words.
    pub(crate) fn lab(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.tools.lab);
        command.args(words);
        command
    }

    /// `ontime-lab run`: a command in an emulated host, whose files are in `out`, or are removed at the end.
    pub(crate) fn lab_run(&self, host: &Host, out: Option<&Path>, words: &[&str]) -> Command {
        let mut command = self.lab(&["run"]);
        command.args(host.options()).arg("--ontime").arg(&self.tools.ontime);
        if let Some(out) = out {
            command.arg("--out").arg(out);
        }
        command.arg("--").args(words);
        command
    }

    pub(crate) fn start(&self, command: &mut Command) -> Result<Running<'_>> {
        self.note(format_args!("+ {command:?}"))?;
        let log = self.log()?;
        let from = log.metadata().context("reading the log")?.len();
        let err = log.try_clone().context("opening the log again")?;
        let child = self.commands.start(command.stdin(Stdio::null()).stdout(log).stderr(err))?;
        Ok(Running { test: self, child, from })
    }

    /// Runs a command until it ends.
    pub(crate) fn run(&self, command: &mut Command) -> Result<Ended> {
        self.start(command)?.wait()
    }

    /// Runs a script of the repository, which must succeed.
    pub(crate) fn script(&self, path: &str, words: &[&str], variables: &[(&str, &str)]) -> Result<String> {
        let mut command = Command::new(self.tree().join(path));
        command.args(words).env("TMPDIR", &self.dir).envs(variables.iter().copied());
        self.run(&mut command)?.expect(0).with_context(|| path.to_owned())
    }

    /// Waits until a condition holds, for so many seconds of this machine's clock.
    pub(crate) fn until(&self, seconds: u64, what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
        let end = Instant::now() + Duration::from_secs(seconds);
        while !holds()? {
            ensure!(self.commands.interrupted().is_none(), "interrupted");
            ensure!(Instant::now() < end, "not within {seconds} s: {what}");
            thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Runs the test's inner half in the emulated host that the list gives it.
    pub(crate) fn inside(&self) -> Result<()> {
        self.inside_of(&self.host)
    }

    /// As [`Self::inside`]; returns the output of the inner half and of the emulated host.
    pub(crate) fn inside_says(&self) -> Result<String> {
        self.inside_in(&self.host, &self.dir)
    }

    /// Runs the test's inner half in this emulated host.
    pub(crate) fn inside_of(&self, host: &Host) -> Result<()> {
        self.inside_in(host, &self.dir).map(drop)
    }

    /// The same with its files in `dir`; returns what was said.
    pub(crate) fn inside_in(&self, host: &Host, dir: &Path) -> Result<String> {
        ensure!(self.has_inside, "{} has nothing to run in the emulated host", self.name);
        let files = dir.join("files");
        fs::create_dir_all(&files).with_context(|| format!("making {}", files.display()))?;
        copy(&self.tools.tree.join("packaging/libvirt/hooks/qemu.d/ontime"), &files.join("hook"))?;
        // The clients' side may be a program of the test (`Test::programs`).
        copy(&self.tools.own, &files.join(PROGRAM))?;
        // From /lab each page of the program would be a call to the emulator.
        let script = format!("cp /lab/{PROGRAM} /run/ && exec /run/{PROGRAM} inside {}", self.name);
        let mut command = self.lab_run(host, Some(dir), &["env"]);
        let ended = self.run(command.args(host.variables()).args(["sh", "-c", &script]))?;
        ensure!(ended.status == 0, "in the emulated host it ended with {}", ended.status);
        Ok(ended.said)
    }
}

/// Copies a file with its permissions.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("copying {} to {}", from.display(), to.display()))?;
    Ok(())
}

/// A command under way. Dropping it ends the command.
pub(crate) struct Running<'a> {
    test: &'a Outside,
    child: Child,
    /// Length of the log when it started.
    from: u64,
}

impl Running<'_> {
    /// Sends a signal to the command, not to its children.
    pub(crate) fn signal(&self, signal: Signal) -> Result<()> {
        rustix::process::kill_process(Pid::from_child(&self.child), signal).context("sending a signal to a command")
    }

    /// Waits until the command has ended.
    pub(crate) fn wait(mut self) -> Result<Ended> {
        let ended = self.child.wait().context("waiting for a command")?;
        let status = ended.code().unwrap_or_else(|| 128 + ended.signal().unwrap_or(0));
        let mut said = Vec::new();
        let mut log = self.test.log()?;
        log.seek(SeekFrom::Start(self.from)).context("reading the log")?;
        log.read_to_end(&mut said).context("reading the log")?;
        Ok(Ended { status, said: String::from_utf8_lossy(&said).into_owned() })
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            // The command may have ended just now.
            let _ = rustix::process::kill_process_group(Pid::from_child(&self.child), Signal::TERM);
            let _ = self.child.wait();
        }
        self.test.commands.forget(&self.child);
    }
}
