//! The lab's own namespaces (network, processes, mounts) and its own directory, which end with the command.
//!
//! Every tap, emulator, client and server of a lab lives in namespaces that end with their first process; the kernel
//! then removes all of it, also after `kill -9`. The process that made them stays outside: it ends them at SIGINT,
//! SIGTERM and SIGHUP, and removes the directory. One that was killed leaves its directory, which the next lab removes.

use std::env;
use std::fs::{self, File};
use std::io;
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

/// Set in the isolated process: its directory.
const MARK: &str = "ONTIME_LAB_ISOLATED";
/// How directories' names begin.
const PREFIX: &str = "ontime-lab-";
/// In a directory that stays.
const KEPT: &str = "kept";
/// A directory may be this old before its owner has locked it.
const YOUNG: Duration = Duration::from_secs(60);

/// Goes on inside namespaces of its own: starts the same command line there, and ends with its status (128 and a
/// signal's number after that signal). Returns in the process started so, with its directory, in `$TMPDIR` or
/// `/var/tmp`: captures are large, and /tmp may be memory. It is removed at the end, unless [`keep`] was called.
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
    // Before the process that they are about.
    let mut signals = Signals::new([SIGCHLD, SIGINT, SIGTERM, SIGHUP]).map_err(file("catch signals for", &path))?;
    // So that the end of the namespaces' first process, which comes after that of all others there, is seen here.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(|error| file("await the processes of", &path)(error.into()))?;
    let unshare = unshare(&path)?;
    let (status, interrupted) = attend(&mut signals, unshare);
    end(dir, interrupted);
    process::exit(status)
}

/// Whether this process may make the lab's namespaces and images.
///
/// # Errors
/// [`LabError::NotRoot`].
pub fn possible() -> Result<(), LabError> {
    if rustix::process::geteuid().is_root() { Ok(()) } else { Err(LabError::NotRoot) }
}

/// Leaves the directory that [`enter`] gave there when the command ends, where `named` lies in it: a message names it.
pub fn keep(named: &Path) {
    if let Some(own) = env::var_os(MARK).filter(|own| named.starts_with(own)) {
        // Without it the message names what is no more.
        let _ = File::create(Path::new(&own).join(KEPT));
    }
}

/// Has a command's process end by `signal` when the thread that starts it does, however it ends.
pub fn end_with_parent(command: &mut Command, signal: Signal) -> &mut Command {
    // SAFETY: between fork and exec only prctl(2) is called, which is async-signal-safe.
    unsafe { command.pre_exec(move || Ok(rustix::process::set_parent_process_death_signal(Some(signal))?)) }
}

fn unshare(dir: &Path) -> Result<Pid, LabError> {
    let program = env::current_exe().map_err(file("find", Path::new("/proc/self/exe")))?;
    let mut command = Command::new("unshare");
    command
        .args(["--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc", "--"])
        .arg(program)
        .args(env::args_os().skip(1))
        .env(MARK, dir);
    let started = end_with_parent(&mut command, Signal::KILL).spawn();
    let child = started.map_err(|source| LabError::Program {
        program: "unshare".into(),
        source,
        remedy: "install Debian's util-linux",
    })?;
    Ok(Pid::from_child(&child))
}

/// Waits until nobody is left. Returns the status to end with, and whether a signal ended it.
fn attend(signals: &mut Signals, unshare: Pid) -> (i32, bool) {
    let (mut status, mut interrupted) = (None, None);
    for signal in signals.forever() {
        if signal != SIGCHLD {
            interrupted.get_or_insert(signal);
            if status.is_none() {
                // It takes the namespaces along.
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

/// As a shell tells it.
fn shell_status(ended: WaitStatus) -> i32 {
    ended.exit_status().or(ended.terminating_signal().map(|signal| 128 + signal)).unwrap_or(1)
}

fn end(dir: TempDir, interrupted: bool) {
    if !interrupted && dir.path().join(KEPT).exists() {
        let _ = dir.keep();
    } else if let Err(error) = dir.close() {
        eprintln!("ontime-lab: a directory of the lab stays: {error}");
    }
}

fn lock(dir: &Path) -> io::Result<File> {
    let held = File::open(dir)?;
    rustix::fs::flock(&held, FlockOperation::NonBlockingLockExclusive)?;
    Ok(held)
}

/// Removes what killed ones left in `base`. Whatever cannot be looked at is left alone.
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
