//! Threads by their number: policy, priority, CPUs, CPU time. They are read from the kernel by other means than the
//! product uses.

use std::fmt;
use std::fs;
use std::io;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::command::{files, read};

/// Scheduling policy and real-time priority of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    policy: i32,
    priority: i32,
}

impl Place {
    pub(crate) const OTHER: Self = Self { policy: libc::SCHED_OTHER, priority: 0 };
    pub(crate) const IDLE: Self = Self { policy: libc::SCHED_IDLE, priority: 0 };

    pub(crate) const fn fifo(priority: i32) -> Self {
        Self { policy: libc::SCHED_FIFO, priority }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let policy = match self.policy {
            libc::SCHED_OTHER => "SCHED_OTHER",
            libc::SCHED_FIFO => "SCHED_FIFO",
            libc::SCHED_RR => "SCHED_RR",
            libc::SCHED_BATCH => "SCHED_BATCH",
            libc::SCHED_IDLE => "SCHED_IDLE",
            libc::SCHED_DEADLINE => "SCHED_DEADLINE",
            other => return write!(f, "policy {other} {}", self.priority),
        };
        write!(f, "{policy} {}", self.priority)
    }
}

/// The policy and priority of a thread. The children's policy (SCHED_RESET_ON_FORK) is no part of it.
pub(crate) fn place(tid: i32) -> Result<Place> {
    Ok(Place { policy: stat(tid, 41)?, priority: stat(tid, 40)? })
}

/// Fails unless a thread has this policy and priority.
pub(crate) fn expect_place(what: &str, tid: i32, wanted: Place) -> Result<()> {
    let found = place(tid)?;
    ensure!(found == wanted, "{what}: wanted '{wanted}', found '{found}'");
    Ok(())
}

/// Whether the children of a thread get SCHED_OTHER (SCHED_RESET_ON_FORK).
pub(crate) fn resets_on_fork(tid: i32) -> Result<bool> {
    Ok(scheduler(tid)? & libc::SCHED_RESET_ON_FORK != 0)
}

/// Whether a thread is SCHED_FIFO: one system call, for loops at high priority.
pub(crate) fn is_fifo(tid: i32) -> Result<bool> {
    Ok(scheduler(tid)? & !libc::SCHED_RESET_ON_FORK == libc::SCHED_FIFO)
}

/// The policy of a thread, with SCHED_RESET_ON_FORK.
fn scheduler(tid: i32) -> Result<i32> {
    // SAFETY: the call only reads a number, and gives a number.
    let policy = unsafe { libc::sched_getscheduler(tid) };
    ensure!(policy >= 0, "policy of thread {tid}: {}", io::Error::last_os_error());
    Ok(policy)
}

/// Gives this thread SCHED_FIFO, or SCHED_OTHER with priority 0.
pub(crate) fn set_own(place: Place) -> Result<()> {
    set(0, place)
}

/// As [`set_own`], for another thread.
pub(crate) fn set(tid: i32, place: Place) -> Result<()> {
    let parameters = libc::sched_param { sched_priority: place.priority };
    // SAFETY: the parameters are only read, during the call; 0 is the calling thread.
    let done = unsafe { libc::sched_setscheduler(tid, place.policy, &raw const parameters) };
    ensure!(done == 0, "setting {place} of thread {tid}: {}", io::Error::last_os_error());
    Ok(())
}

/// The nice value of a thread. It has no effect while the thread is SCHED_FIFO.
pub(crate) fn nice(tid: i32) -> Result<i32> {
    stat(tid, 19)
}

/// CPU time of a thread.
pub(crate) fn ran(tid: i32) -> Result<Duration> {
    let text = read(format!("/proc/{tid}/schedstat"))?;
    let nanoseconds = text.split(' ').next().and_then(|field| field.parse().ok());
    nanoseconds.map(Duration::from_nanos).with_context(|| format!("schedstat of thread {tid}: {text}"))
}

/// The CPUs that a thread may use: `0`, `0-1`.
pub(crate) fn cpus(tid: i32) -> Result<String> {
    let text = read(format!("/proc/{tid}/status"))?;
    let value = text.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    value.map(|cpus| cpus.trim().to_owned()).with_context(|| format!("thread {tid} has no list of CPUs"))
}

/// The name of a thread.
pub(crate) fn name(tid: i32) -> Result<String> {
    read(format!("/proc/{tid}/comm"))
}

/// The threads of a process whose name is `wanted`, or begins with it if it ends in `*`: `CPU 0/KVM`, `vhost-*`.
pub(crate) fn threads(pid: i32, wanted: &str) -> Result<Vec<i32>> {
    let tasks = format!("/proc/{pid}/task");
    ensure!(fs::exists(&tasks).unwrap_or(false), "there is no process {pid}");
    Ok(named(&format!("{tasks}/*/comm"), wanted))
}

/// The only thread of a process with that name ([`threads`]).
pub(crate) fn thread(pid: i32, wanted: &str) -> Result<i32> {
    let found = threads(pid, wanted)?;
    ensure!(found.len() == 1, "process {pid} has {} threads '{wanted}'", found.len());
    found.first().copied().context("no thread")
}

/// The processes and kernel threads whose name is `wanted`, or begins with it if it ends in `*`: `napi/rt0*`.
pub(crate) fn processes(wanted: &str) -> Vec<i32> {
    named("/proc/*/comm", wanted)
}

/// The numbers in the paths of those `comm` files whose text fits.
fn named(pattern: &str, wanted: &str) -> Vec<i32> {
    let fits = |path: &str| {
        let name = read(path).unwrap_or_default();
        wanted.strip_suffix('*').map_or(name == wanted, |before| name.starts_with(before))
    };
    let number = |path: String| path.rsplit('/').nth(1).and_then(|number| number.parse().ok());
    files(pattern).into_iter().filter(|path| fits(path)).filter_map(number).collect()
}

pub(crate) fn all() -> Vec<i32> {
    let number = |path: String| path.rsplit('/').next().and_then(|number| number.parse().ok());
    files("/proc/*/task/*").into_iter().filter_map(number).collect()
}

/// Threads in uninterruptible sleep.
pub(crate) fn blocked() -> Vec<i32> {
    let is_blocked = |tid: &i32| {
        let text = read(format!("/proc/{tid}/stat")).unwrap_or_default();
        text.rsplit_once(')').is_some_and(|(_, fields)| fields.trim_start().starts_with('D'))
    };
    all().into_iter().filter(is_blocked).collect()
}

/// A field of `/proc/TID/stat`, by its number in proc_pid_stat(5).
fn stat(tid: i32, field: usize) -> Result<i32> {
    let text = read(format!("/proc/{tid}/stat"))?;
    // The name, which is in parentheses, may contain anything.
    let fields = text.rsplit_once(')').map(|(_, fields)| fields.split_whitespace());
    let value = fields.and_then(|mut fields| fields.nth(field.saturating_sub(3))).and_then(|value| value.parse().ok());
    value.with_context(|| format!("field {field} of thread {tid}: {text}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inside::command::{start, within};

    fn own() -> i32 {
        rustix::thread::gettid().as_raw_nonzero().get()
    }

    #[test]
    fn a_threads_values_are_those_that_the_kernel_and_other_programs_show() {
        std::thread::Builder::new()
            .name("one thread".to_owned())
            .spawn(|| {
                assert_eq!(place(own()).unwrap(), Place::OTHER);
                assert_eq!((name(own()).unwrap().as_str(), resets_on_fork(own()).unwrap()), ("one thread", false));
                assert!(!is_fifo(own()).unwrap());
                assert!(all().contains(&own()));
                let pid = i32::try_from(std::process::id()).unwrap();
                assert_eq!(thread(pid, "one thread").unwrap(), own());
                assert_eq!(threads(pid, "one thr*").unwrap(), [own()]);
                assert!(threads(pid, "one thr").unwrap().is_empty());
                assert!(thread(pid, "another").is_err());
                ran(own()).unwrap();
            })
            .unwrap()
            .join()
            .unwrap();
        let mut niced = start("nice -n 7 sleep 60").unwrap();
        let wanted = (nice(own()).unwrap() + 7).min(19);
        within(60, "it is nice", || Ok(nice(niced.pid())? == wanted)).unwrap();
        assert!(!niced.is_over().unwrap());
        niced.end(rustix::process::Signal::KILL).unwrap();
        assert!(place(i32::MAX).is_err());
    }

    #[test]
    fn the_policies_have_the_names_that_chrt_prints() {
        for (policy, wanted) in [("--idle", Place::IDLE), ("--other", Place::OTHER)] {
            let running = start(format!("chrt {policy} 0 sleep 60")).unwrap();
            let what = format!("chrt {policy}");
            within(60, &what, || Ok(place(running.pid())? == wanted)).unwrap();
            running.end(rustix::process::Signal::KILL).unwrap();
        }
        assert_eq!(Place::fifo(47).to_string(), "SCHED_FIFO 47");
        assert_eq!(Place::IDLE.to_string(), "SCHED_IDLE 0");
    }
}
