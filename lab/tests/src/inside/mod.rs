//! What the inner halves of the tests share. They run in the emulated host, in `/lab`, which holds the test's files, as
//! root.
//!
//! | file | |
//! |---|---|
//! | `command` | commands and their output, conditions that are waited for, files of `/proc` and `/sys` |
//! | `thread` | policy, priority, CPUs and CPU time of threads; this thread's priority |
//! | `clock` | reading a clock, and waiting for a time, in programs that measure |
//! | `daemon` | the daemon, its configuration, its metrics, the operator's commands |
//! | `vm` | guests |
//! | `plc` | a guest with deadline tasks |
//! | `knobs` | everything that the daemon may change, before and after |
//! | `reserved` | reserved CPU time |
//! | `module` | the host module and its files of NICs |

pub(crate) mod clock;
pub(crate) mod command;
pub(crate) mod daemon;
pub(crate) mod knobs;
pub(crate) mod module;
pub(crate) mod plc;
pub(crate) mod reserved;
pub(crate) mod thread;
pub(crate) mod vm;

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::process::ExitCode;

use anyhow::{Context, Result};

use self::command::{MEASURES, read, tail, write};

/// Runs the inner half of a test, and prints the host's state if it fails.
pub(crate) fn run(test: fn() -> Result<()>) -> ExitCode {
    let outcome = set_up().and_then(|()| test());
    if let Err(error) = &outcome {
        println!("FAILED: {error:#}");
        report();
    }
    // The log is not written in /lab: a write there is a call to the emulator, and a process that is killed during the
    // call waits for its reply.
    match fs::copy(daemon::LOG, "/lab/daemon.log") {
        Err(error) if error.kind() != io::ErrorKind::NotFound => println!("copying the daemon's log: {error}"),
        _ => {}
    }
    ExitCode::from(u8::from(outcome.is_err()))
}

/// Makes the cgroup of clients and measurements beside the daemon, whose real-time threads need no cap, and the command
/// that enters it.
fn set_up() -> Result<()> {
    fs::create_dir_all("/sys/fs/cgroup/measures").context("making the cgroup of the measurements")?;
    daemon::configure("daemon.conf.d/measures.toml", "[cap]\nuncapped = [\"/measures\"]\n")?;
    write(MEASURES, "#!/bin/sh\necho $$ > /sys/fs/cgroup/measures/cgroup.procs && exec \"$@\"\n")?;
    fs::set_permissions(MEASURES, fs::Permissions::from_mode(0o755)).context(MEASURES)
}

/// Prints what may explain a failure: the daemon's last lines and passes, threads in uninterruptible sleep, the load.
fn report() {
    let log = fs::read_to_string(daemon::LOG).unwrap_or_default();
    print!("{}", tail(&log, 20));
    for tid in thread::blocked() {
        println!("blocked: {tid} {}", thread::name(tid).unwrap_or_default());
        let stack = read(format!("/proc/{tid}/stack")).unwrap_or_default();
        stack.lines().take(8).for_each(|line| println!("{line}"));
    }
    println!("load: {}", read("/proc/loadavg").unwrap_or_default());
    let metrics = daemon::metrics().unwrap_or_default();
    metrics.lines().filter(|line| line.starts_with("ontime_pass")).for_each(|line| println!("{line}"));
}
