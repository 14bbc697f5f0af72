//! The lab's namespaces (network, processes, mounts) and its directory, which end with the command.
//!
//! All taps, emulators, clients and servers of a lab are in namespaces that end with their first process. The kernel
//! then removes everything, also after `kill -9`. The process that made the namespaces stays outside. It ends them on
//! SIGINT, SIGTERM and SIGHUP, and removes the directory. If it is killed, its directory stays, and the next lab
//! removes it.

use std::env;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{self, Command};
use std::time::Duration;

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tempfile::TempDir;

use crate::error::{LabError, file};

/// Environment variable of the isolated process: its directory.
const MARK: &str = "ONTIME_LAB_ISOLATED";
/// Prefix of the directories' names.
const PREFIX: &str = "ontime-lab-";
/// File that marks a directory to be kept.
const KEPT: &str = "kept";
/// Minimum age of an abandoned directory: a younger one may not be locked by its owner yet.
const YOUNG: Duration = Duration::from_secs(60);

/// Continues in new namespaces: starts the same command line there, and exits with its status (128 plus the number of a
/// fatal signal). Returns in the new process, with its directory, which is in `$TMPDIR` or `/var/tmp`, because captures
/// are large and /tmp may be in memory. The directory is removed at the end, unless [`keep`] was called.
///
/// # Errors
/// [`LabError::NotRoot`]; `unshare` is missing or refused; no directory can be made.
pub fn enter() -> Result<PathBuf, LabError> {
    if let Some(dir) = env::var_os(MARK) {
        return Ok(dir.into());
    }
    possible()?;
    let base = env::var_os("TMPDIR").map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from);
    remove_abandoned(&base);
    let dir = tempfile::Builder::new().prefix(PREFIX).tempdir_in(&base).map_err(file("make a directory in", &base))?;
    let path = dir.path().canonicalize().map_err(file("find", dir.path()))?;
    let _owned = lock(&path).map_err(file("lock", &path))?;
    // Must be registered before the child process is started.
    let mut signals = Signals::new([SIGCHLD, SIGINT, SIGTERM, SIGHUP]).map_err(file("catch signals for", &path))?;
    // Makes this process see the end of the namespaces' first process, which is the last process there to end.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(|error| file("await the processes of", &path)(error.into()))?;
    let unshare = unshare(&path)?;
    let (status, interrupted) = attend(&mut signals, unshare);
    end(dir, interrupted);
    process::exit(status)
}

/// Checks that this process may make the lab's namespaces and images.
///
/// # Errors
/// [`LabError::NotRoot`].
pub fn possible() -> Result<(), LabError> {
    if rustix::process::geteuid().is_root() { Ok(()) } else { Err(LabError::NotRoot) }
}

/// Keeps the directory from [`enter`] after the command's end, if `named` is in it, because a message refers to it.
pub fn keep(named: &Path) {
    if let Some(own) = env::var_os(MARK).filter(|own| named.starts_with(own)) {
        // If this fails, the message refers to a removed directory.
        let _ = File::create(Path::new(&own).join(KEPT));
    }
}

/// Sends `signal` to the command's process when the thread that starts it ends, for whatever reason.
pub fn end_with_parent(command: &mut Command, signal: Signal) -> &mut Command {
    // SAFETY: between fork and exec only prctl(2) is called, which is async-signal-safe.
    unsafe { command.pre_exec(move || Ok(rustix::process::set_parent_process_death_signal(Some(signal))?)) }
}

/// A program in new namespaces for processes and mounts, and those of `more`. All its processes end with it, and
/// with the thread that starts it.
pub(crate) fn in_namespaces(more: &[&str], program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("unshare");
    command.args(more).args(["--pid", "--mount", "--fork", "--kill-child", "--mount-proc", "--"]).arg(program);
    end_with_parent(&mut command, Signal::KILL);
    command
}

fn unshare(dir: &Path) -> Result<Pid, LabError> {
    let program = env::current_exe().map_err(file("find", Path::new("/proc/self/exe")))?;
    let mut command = in_namespaces(&["--net"], program);
    let started = command.args(env::args_os().skip(1)).env(MARK, dir).spawn();
    let child = started.map_err(|source| LabError::Program {
        program: "unshare".into(),
        source,
        remedy: "install Debian's util-linux",
    })?;
    Ok(Pid::from_child(&child))
}

/// Waits until all processes have ended. Returns the exit status, and whether a signal caused the end.
fn attend(signals: &mut Signals, unshare: Pid) -> (i32, bool) {
    let (mut status, mut interrupted) = (None, None);
    for signal in signals.forever() {
        if signal != SIGCHLD {
            interrupted.get_or_insert(signal);
            if status.is_none() {
                // Killing this process ends the namespaces.
                let _ = rustix::process::kill_process(unshare, Signal::KILL);
            }
            continue;
        }
        loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some((pid, ended))) if pid == unshare => status = Some(shell_status(ended)),
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => break,
                Err(_) => {
                    return (interrupted.map_or(status.unwrap_or(1), |signal| 128 + signal), interrupted.is_some());
                }
            }
        }
    }
    (1, false)
}

/// The status as in a shell.
fn shell_status(ended: WaitStatus) -> i32 {
    ended.exit_status().or(ended.terminating_signal().map(|signal| 128 + signal)).unwrap_or(1)
}

fn end(dir: TempDir, interrupted: bool) {
    if !interrupted && dir.path().join(KEPT).exists() {
        let _ = dir.keep();
    } else if let Err(error) = dir.close() {
        let _ = writeln!(io::stderr(), "ontime-lab: a directory of the lab stays: {error}");
    }
}

/// Locks a directory, unless a process has locked it.
pub(crate) fn lock(dir: &Path) -> io::Result<File> {
    let held = File::open(dir)?;
    rustix::fs::flock(&held, FlockOperation::NonBlockingLockExclusive)?;
    Ok(held)
}

/// Removes directories that killed labs left in `base`. A directory that cannot be examined stays.
fn remove_abandoned(base: &Path) {
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        let path = entry.path();
        let ours = entry.file_name().to_string_lossy().starts_with(PREFIX)
            && entry.metadata().is_ok_and(|it| {
                it.is_dir() && it.uid() == 0 && it.modified().is_ok_and(|at| at.elapsed().is_ok_and(|age| age > YOUNG))
            });
        if ours && !path.join(KEPT).exists() && lock(&path).is_ok() {
            let _ = fs::remove_dir_all(&path);
        }
    }
}
