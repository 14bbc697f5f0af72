//! Reads from `/proc` how much CPU time a thread has taken.
//!
//! Why not a perf event: an event on the thread's task clock would wake the watcher exactly when the budget is used up.
//! But on PREEMPT_RT that wake-up goes through `irq_work/N` at FIFO 1, which a spinning thread keeps from running
//! (`kernel/events/core.c`, `perf_pending_irq`). So the watcher polls; module `watcher` says when.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use super::sight::{Asker, Sight};

/// CPU time taken since the last reading, and the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Taken {
    /// ns. For a running thread up to a tick may be missing, because the kernel updates the counter at ticks.
    pub ran: u64,
    /// The CPU on which the thread was last seen.
    pub cpu: Option<u32>,
}

/// CPU time, ns, after which the CPU is looked up again: that is more work than reading the time.
const WORTH_A_LOOK: u64 = 1_000_000;

/// A thread's `schedstat` file, kept open: it refers to the thread itself, not to a later thread with the same number.
/// To read it, the kernel takes no reference to anything of the process (see `sight`).
#[derive(Debug)]
pub(crate) struct Time {
    schedstat: File,
    last: u64,
}

impl Time {
    /// Opens the file of thread `tid` and counts from now on.
    ///
    /// # Errors
    /// ENOENT or ESRCH where the thread has ended.
    pub(crate) fn open(pid: i32, tid: i32) -> io::Result<Self> {
        let mut time = Self { schedstat: File::open(format!("/proc/{pid}/task/{tid}/schedstat"))?, last: 0 };
        time.take()?;
        Ok(time)
    }

    /// CPU time since the last call, ns.
    ///
    /// # Errors
    /// ESRCH where the thread has ended.
    pub(crate) fn take(&mut self) -> io::Result<u64> {
        let mut buffer = [0; 96];
        let length = self.schedstat.read_at(&mut buffer, 0)?;
        let count = schedstat_ran(buffer.get(..length).unwrap_or_default()).ok_or(io::ErrorKind::InvalidData)?;
        let ran = count.saturating_sub(self.last);
        self.last = count;
        Ok(ran)
    }
}

/// How much CPU time a thread takes, where it is, and whether it sleeps.
#[derive(Debug)]
pub(crate) struct Reading {
    time: Time,
    sight: Arc<Sight>,
    /// CPU time since the sight was last asked for the CPU, ns.
    unseen: u64,
    /// The sight is to be read.
    wants: bool,
    /// The sight's state was asked for since the thread last ran.
    asked: bool,
}

impl Reading {
    /// Opens the files of thread `tid` and counts from now on. `only`: the CPU that the thread was pinned to, where it
    /// counts as seen until it is looked up: its process may have pinned it to another one since.
    ///
    /// # Errors
    /// ENOENT or ESRCH where the thread has ended.
    pub(crate) fn open(pid: i32, tid: i32, only: Option<u32>) -> io::Result<Self> {
        let time = Time::open(pid, tid)?;
        let sight = Arc::new(Sight::open(pid, tid, only)?);
        Ok(Self { time, sight, unseen: 0, wants: false, asked: false })
    }

    /// Whether the thread sleeps: it does not run, does not wait for a CPU and is not stopped. True also where it has
    /// ended. False until its state was read.
    pub(crate) fn asleep(&mut self) -> bool {
        let state = if self.asked { self.sight.state() } else { None };
        if state.is_none() {
            if !self.asked {
                self.sight.forget_state();
            }
            (self.asked, self.wants) = (true, true);
        }
        state.is_some_and(|state| !matches!(state, b'R' | b'T' | b't'))
    }

    /// CPU time since the last call.
    ///
    /// # Errors
    /// ESRCH where the thread has ended.
    pub(crate) fn take(&mut self) -> io::Result<Taken> {
        let ran = self.time.take()?;
        if ran > 0 {
            self.asked = false;
        }
        self.unseen = self.unseen.saturating_add(ran);
        if self.unseen >= WORTH_A_LOOK {
            (self.unseen, self.wants) = (0, true);
        }
        Ok(Taken { ran, cpu: self.sight.cpu() })
    }

    /// Has the sight read if it is needed. Returns whether it is.
    pub(crate) fn ask(&mut self, asker: &mut Asker) -> bool {
        let wants = std::mem::take(&mut self.wants);
        if wants {
            asker.ask(&self.sight);
        }
        wants
    }
}

fn schedstat_ran(line: &[u8]) -> Option<u64> {
    number(line.split(|byte| byte.is_ascii_whitespace()).next()?)
}

fn number(digits: &[u8]) -> Option<u64> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::super::sight::Readers;
    use super::*;

    fn own_tid() -> i32 {
        rustix::thread::gettid().as_raw_nonzero().get()
    }

    /// Until the calling thread has taken this much CPU time, however long that takes.
    fn spin(ns: i64) {
        let taken = || {
            let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
            time.tv_sec * 1_000_000_000 + time.tv_nsec
        };
        let end = taken() + ns;
        while taken() < end {
            std::hint::spin_loop();
        }
    }

    /// On a thread of its own, so that other tests of this process do not disturb the count.
    #[test]
    fn a_threads_cpu_time_and_cpu_are_read() {
        std::thread::spawn(|| {
            let mut reading = Reading::open(std::process::id() as i32, own_tid(), None).unwrap();
            spin(50_000_000);
            let first = reading.take().unwrap();
            assert!(first.ran > 1_000_000, "{first:?}");
            let cpus = std::thread::available_parallelism().unwrap().get().max(4096) as u32;
            assert!(first.cpu.is_some_and(|cpu| cpu < cpus), "{first:?}");
            std::thread::sleep(std::time::Duration::from_millis(100));
            let slept = reading.take().unwrap();
            assert!(slept.ran < 50_000_000, "{slept:?}");
        })
        .join()
        .unwrap();
    }

    /// A thread's process may pin it elsewhere, and may have many threads that each take little between two readings.
    #[test]
    fn a_thread_is_where_it_runs_and_not_where_it_was_pinned_to() {
        let (_readers, mut asker) = Readers::start(8).unwrap();
        std::thread::spawn(move || {
            let nowhere = u32::MAX - 1;
            let mut reading = Reading::open(std::process::id() as i32, own_tid(), Some(nowhere)).unwrap();
            assert_eq!(reading.take().unwrap().cpu, Some(nowhere), "until it is looked up");
            let start = std::time::Instant::now();
            while reading.take().unwrap().cpu == Some(nowhere) {
                assert!(start.elapsed() < std::time::Duration::from_secs(60), "it is never looked up");
                spin(WORTH_A_LOOK as i64 / 5);
                if reading.ask(&mut asker) {
                    asker.ring();
                }
            }
            let cpus = std::thread::available_parallelism().unwrap().get().max(4096) as u32;
            assert!(reading.take().unwrap().cpu.is_some_and(|cpu| cpu < cpus));
        })
        .join()
        .unwrap();
    }

    /// An answer counts only if it was asked for after the thread's last run.
    #[test]
    fn a_thread_sleeps_only_if_its_state_was_read_since_it_ran() {
        let (_readers, mut asker) = Readers::start(8).unwrap();
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let mut reading = Reading::open(child.id() as i32, child.id() as i32, Some(0)).unwrap();
        let mut sleeps = |reading: &mut Reading| {
            assert!(!reading.asleep() && reading.wants, "what was read before it was asked for does not count");
            while !reading.asleep() {
                if reading.ask(&mut asker) {
                    asker.ring();
                }
                reading.take().unwrap();
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        };
        sleeps(&mut reading);
        reading.asked = false;
        sleeps(&mut reading);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_thread_that_ended_is_noticed() {
        let (tx, rx) = std::sync::mpsc::channel();
        let (end, wait) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            tx.send(own_tid()).unwrap();
            wait.recv().unwrap();
        });
        let tid = rx.recv().unwrap();
        let mut reading = Reading::open(std::process::id() as i32, tid, None).unwrap();
        end.send(()).unwrap();
        thread.join().unwrap();
        // The kernel may take a moment to unhash the thread.
        let gone = (0..100).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            reading.take().is_err()
        });
        assert!(gone);
        assert!(Reading::open(std::process::id() as i32, tid, None).is_err());
    }
}
