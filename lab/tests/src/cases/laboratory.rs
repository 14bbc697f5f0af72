//! `ontime-lab run` itself, from outside: statuses and files, and that nothing stays behind however a lab ends.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use ontime_lab::Clock;
use rustix::process::{Pid, Signal};

use crate::emulated::{HOST, Host};
use crate::outside::Outside;

/// Real seconds in which a lab boots, on a machine that has other work.
const BOOT: u64 = 600;
/// Real seconds in which the kernel ends the processes of a lab.
const END: u64 = 120;

pub(crate) fn status_and_files_come_back(test: &Outside) -> Result<()> {
    let command = "uname -v | grep -q PREEMPT_RT && echo kept > /lab/kept; exit 7";
    test.run(&mut test.lab_run(&HOST, Some(test.dir()), &["sh", "-c", command]))?.expect(7)?;
    let kept = fs::read_to_string(test.files()?.join("kept")).context("the file of the command")?;
    ensure!(kept == "kept\n", "the file has: {kept}");
    let console = fs::metadata(test.dir().join("console.log")).context("the console's log")?;
    ensure!(console.len() > 0, "the console's log is empty");
    Ok(())
}

/// A lab that is killed leaves its directory, which the next lab removes.
pub(crate) fn nothing_stays_behind(test: &Outside) -> Result<()> {
    let namespaces = || test.run(Command::new("lsns").args(["-n", "-t", "net", "-o", "NS"]))?.expect(0);
    let before = namespaces()?;
    // Those of other programs of this machine may end meanwhile.
    let more = || -> Result<Vec<String>> {
        let known: BTreeSet<&str> = before.split_whitespace().collect();
        Ok(namespaces()?.split_whitespace().filter(|name| !known.contains(name)).map(str::to_owned).collect())
    };
    let labs = test.directory("labs")?;
    signalled(test, &labs, Signal::KILL)?;
    test.until(END, "the processes of a killed lab have ended", || Ok(processes(&labs)?.is_empty()))?;
    test.until(END, "the namespaces of a killed lab are gone", || Ok(more()?.is_empty()))?;
    ensure!(!entries(&labs)?.is_empty(), "a killed lab has removed its directory, so this test shows nothing");
    // The next lab takes a younger directory for one whose owner has just begun.
    for dir in entries(&labs)? {
        let at = SystemTime::now() - Duration::from_secs(120);
        File::open(&dir).and_then(|dir| dir.set_modified(at)).with_context(|| format!("dating {}", dir.display()))?;
    }
    let status = signalled(test, &labs, Signal::INT)?;
    ensure!(status == 130, "an interrupted lab ended with {status}");
    nothing_is_left(&labs)?;
    let left = more()?;
    ensure!(left.is_empty(), "network namespaces are left: {left:?}, before: {before}");
    Ok(())
}

pub(crate) fn an_interrupted_lab_leaves_nothing(test: &Outside) -> Result<()> {
    let labs = test.directory("labs")?;
    let status = signalled(test, &labs, Signal::TERM)?;
    ensure!(status == 143, "a terminated lab ended with {status}");
    nothing_is_left(&labs)
}

pub(crate) fn a_panic_is_reported(test: &Outside) -> Result<()> {
    let command = ["sh", "-c", "echo c > /proc/sysrq-trigger"];
    test.run(&mut test.lab_run(&HOST, Some(test.dir()), &command))?.expect(125)?;
    let console = fs::read(test.dir().join("console.log")).context("the console's log")?;
    ensure!(String::from_utf8_lossy(&console).contains("Kernel panic"), "the console's log has no panic");
    Ok(())
}

pub(crate) fn a_timeout_is_reported(test: &Outside) -> Result<()> {
    let labs = test.directory("labs")?;
    let host = Host { timeout: 3, ..HOST };
    test.run(test.lab_run(&host, None, &["sleep", "600"]).env("TMPDIR", &labs))?.expect(124)?;
    nothing_is_left(&labs)
}

pub(crate) fn real_clock_has_two_cpus(test: &Outside) -> Result<()> {
    let host = Host { clock: Clock::Real, cpus: Some(2), ..HOST };
    let said = test.run(&mut test.lab_run(&host, Some(test.dir()), &["nproc"]))?.expect(0)?;
    ensure!(said.lines().any(|line| line == "2"), "nproc printed: {said}");
    Ok(())
}

/// Seen from outside, a stopped emulator looks like a host that hangs.
pub(crate) fn a_hang_is_reported(test: &Outside) -> Result<()> {
    let host = Host { silence: 60, ..HOST };
    let lab = test.start(&mut test.lab_run(&host, Some(test.dir()), &["sh", "-c", "touch up; sleep 600"]))?;
    let up = test.files()?.join("up");
    test.until(BOOT, "the command has started", || Ok(up.exists()))?;
    let port = test.dir().join("agent.sock");
    let emulators = processes(&port)?;
    ensure!(!emulators.is_empty(), "no process has {} in its command line", port.display());
    for emulator in emulators {
        rustix::process::kill_process(emulator, Signal::STOP).context("stopping the emulator")?;
    }
    let said = lab.wait()?.expect(125)?;
    ensure!(said.contains("hangs: no sign of life for 60 s"), "it does not say that the host hangs: {said}");
    ensure!(processes(&port)?.is_empty(), "the emulator still runs");
    Ok(())
}

/// Runs a lab whose directory is in `labs`, sends it a signal when it is up, and returns its status.
fn signalled(test: &Outside, labs: &Path, signal: Signal) -> Result<i32> {
    let before = entries(labs)?;
    let lab = test.start(test.lab_run(&HOST, None, &["sleep", "600"]).env("TMPDIR", labs))?;
    let is_up = || Ok(entries(labs)?.iter().any(|dir| !before.contains(dir) && dir.join("agent.sock").exists()));
    test.until(BOOT, "the lab boots", is_up)?;
    thread::sleep(Duration::from_secs(3));
    lab.signal(signal)?;
    Ok(lab.wait()?.status)
}

fn nothing_is_left(labs: &Path) -> Result<()> {
    let (files, processes) = (entries(labs)?, processes(labs)?);
    ensure!(files.is_empty() && processes.is_empty(), "left behind: {files:?}, processes {processes:?}");
    Ok(())
}

fn entries(dir: &Path) -> Result<BTreeSet<PathBuf>> {
    let entries = fs::read_dir(dir).with_context(|| format!("reading {}", dir.display()))?;
    entries.map(|entry| Ok(entry.context("reading a directory")?.path())).collect()
}

/// The processes that have a path in their command line.
fn processes(path: &Path) -> Result<Vec<Pid>> {
    let wanted = path.as_os_str().as_bytes();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").context("reading /proc")?.flatten() {
        let pid = entry.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        // A process may have ended meanwhile.
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if line.windows(wanted.len()).any(|part| part == wanted) {
            found.extend(pid);
        }
    }
    Ok(found)
}
