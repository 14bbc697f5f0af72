//! `ontime-lab run` itself, from outside: statuses and files, and that nothing stays behind however a lab ends.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use ontime_lab::{Clients, Clock};
use rustix::process::{Pid, Signal};

use crate::emulated::{HOST, Host};
use crate::outside::Outside;

/// A command that does not end. On the virtual clock a `sleep` would: the clock jumps while the host is idle.
const ENDLESS: &str = "while :; do :; done";
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
    signalled(test, &labs, Signal::KILL, "agent.sock")?;
    test.until(END, "the processes of a killed lab have ended", || Ok(processes(&labs)?.is_empty()))?;
    test.until(END, "the namespaces of a killed lab are gone", || Ok(more()?.is_empty()))?;
    ensure!(!entries(&labs)?.is_empty(), "a killed lab has removed its directory, so this test shows nothing");
    // The next lab takes a younger directory for one whose owner has just begun.
    for dir in entries(&labs)? {
        let at = SystemTime::now() - Duration::from_secs(120);
        File::open(&dir).and_then(|dir| dir.set_modified(at)).with_context(|| format!("dating {}", dir.display()))?;
    }
    let status = signalled(test, &labs, Signal::INT, "agent.sock")?;
    ensure!(status == 130, "an interrupted lab ended with {status}");
    nothing_is_left(&labs)?;
    let left = more()?;
    ensure!(left.is_empty(), "network namespaces are left: {left:?}, before: {before}");
    Ok(())
}

pub(crate) fn an_interrupted_lab_leaves_nothing(test: &Outside) -> Result<()> {
    let labs = test.directory("labs")?;
    let status = signalled(test, &labs, Signal::TERM, "files/up")?;
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
    test.run(test.lab_run(&host, None, &["sh", "-c", ENDLESS]).env("TMPDIR", &labs))?.expect(124)?;
    nothing_is_left(&labs)
}

/// Its CPUs run in parallel, also those of guests.
pub(crate) fn real_clock_has_two_cpus(test: &Outside) -> Result<()> {
    let host = Host { clock: Clock::Real, cpus: Some(2), clients: Clients::Outside, ..HOST };
    let guests = "LAB_VM_SECONDS=300; export LAB_VM_SECONDS; lab-vm start a idle rt 10.1.0.10; \
                  lab-vm start b idle bulk 10.2.0.11; lab-vm wait a && lab-vm wait b && nproc";
    let said = test.run(&mut test.lab_run(&host, Some(test.dir()), &["sh", "-c", guests]))?.expect(0)?;
    ensure!(said.lines().any(|line| line == "2"), "nproc printed: {said}");
    Ok(())
}

/// Seen from outside, a stopped emulator looks like a host that hangs.
pub(crate) fn a_hang_is_reported(test: &Outside) -> Result<()> {
    let said = lab_with(test, &Host { silence: 120, ..HOST }, Signal::STOP)?;
    ensure!(said.contains("hangs: no sign of life for 120 s"), "it does not say that the host hangs: {said}");
    Ok(())
}

pub(crate) fn a_killed_emulator_is_reported(test: &Outside) -> Result<()> {
    let said = lab_with(test, &HOST, Signal::KILL)?;
    ensure!(said.contains("the emulator ended (signal: 9"), "it does not say that the emulator was killed: {said}");
    Ok(())
}

/// Sends a signal to the emulator of a lab of this host, whose command runs, and returns what the lab says. Before
/// that, a second lab cannot have the directory of the first.
fn lab_with(test: &Outside, host: &Host, signal: Signal) -> Result<String> {
    let lab = test.start(&mut test.lab_run(host, Some(test.dir()), &["sh", "-c", &format!("touch up; {ENDLESS}")]))?;
    let up = test.files()?.join("up");
    test.until(BOOT, "the command has started", || Ok(up.exists()))?;
    let second = test.run(&mut test.lab_run(host, Some(test.dir()), &["true"]))?.expect(64)?;
    ensure!(second.contains("another lab uses"), "a second lab in the directory of the first: {second}");
    let port = test.dir().join("agent.sock");
    let emulators = processes(&port)?;
    ensure!(!emulators.is_empty(), "no process has {} in its command line", port.display());
    for emulator in emulators {
        rustix::process::kill_process(emulator, signal).context("sending the emulator a signal")?;
    }
    let said = lab.wait()?.expect(125)?;
    ensure!(processes(&port)?.is_empty(), "the emulator still runs");
    Ok(said)
}

/// A lab that has no room for its files does not begin.
pub(crate) fn a_full_disk_is_reported(test: &Outside) -> Result<()> {
    on_a_disk_of(test, "1M", "true")
}

/// Without room the emulator would cut the captures short, and stop the host.
pub(crate) fn a_disk_that_fills_up_is_reported(test: &Outside) -> Result<()> {
    on_a_disk_of(test, "100M", &format!("cat /dev/zero > /lab/full; {ENDLESS}"))
}

/// Runs a shell command in a lab whose directory is on a disk of this size. The disk must become full, and the lab must
/// say so and leave nothing.
fn on_a_disk_of(test: &Outside, size: &str, command: &str) -> Result<()> {
    let labs = test.directory("labs")?;
    let lab = test.lab_run(&HOST, None, &["sh", "-c", command]);
    // The disk is gone with the mount namespace.
    let script = format!("mount -t tmpfs -o size={size} tmpfs $TMPDIR && \"$@\"; said=$?; ls $TMPDIR; exit $said");
    let mut there = Command::new("unshare");
    there.args(["--mount", "sh", "-c", &script, "sh"]).arg(lab.get_program()).args(lab.get_args());
    let said = test.run(there.env("TMPDIR", &labs))?.expect(125)?;
    let (said, left) = said.split_once("; make room there").context("it does not say that the disk is full")?;
    ensure!(said.contains("No space left"), "it says: {said}");
    let left: Vec<&str> = left.lines().skip(1).collect();
    ensure!(left.is_empty(), "left behind: {left:?}");
    nothing_is_left(&labs)
}

/// The build's own processes end with the program that started it.
pub(crate) fn an_interrupted_build_leaves_no_process(test: &Outside) -> Result<()> {
    let cache = test.directory("cache")?;
    let lab = test.start(test.lab(&["images"]).env("ONTIME_LAB_CACHE", &cache))?;
    let unpacks = || -> Result<bool> {
        let builds: Result<Vec<_>> = entries(&cache)?.iter().map(|dir| processes(&dir.join("work/host.tar"))).collect();
        Ok(!builds?.concat().is_empty())
    };
    test.until(END, "the build makes a user land", unpacks)?;
    lab.signal(Signal::TERM)?;
    let status = lab.wait()?.status;
    ensure!(status == 143, "a terminated build ended with {status}");
    test.until(END, "the processes of the build have ended", || Ok(processes(&cache)?.is_empty()))
}

/// Runs a lab whose directory is in `labs`, and returns its status. It gets a signal 3 s after it has made this file:
/// `agent.sock` while it boots, `files/up` when its command runs.
fn signalled(test: &Outside, labs: &Path, signal: Signal, made: &str) -> Result<i32> {
    let before = entries(labs)?;
    let lab =
        test.start(test.lab_run(&HOST, None, &["sh", "-c", &format!("touch up; {ENDLESS}")]).env("TMPDIR", labs))?;
    let is_up = || Ok(entries(labs)?.iter().any(|dir| !before.contains(dir) && dir.join(made).exists()));
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
