//! Reads from `/proc` how much CPU time a thread has taken, and on which CPU.
//!
//! Why not a perf event: an event on the thread's task clock would wake the watcher exactly when the budget is used up.
//! But on PREEMPT_RT that wake-up goes through `irq_work/N` at FIFO 1, which a spinning thread keeps from running
//! (`kernel/events/core.c`, `perf_pending_irq`). So the watcher polls; module `watcher` says when.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// CPU time taken since the last reading, and the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    /// ns. For a running thread up to a tick may be missing, because the kernel updates the counter at ticks.
    pub ran: u64,
    /// The CPU on which the thread was last seen; None below [`WORTH_A_LOOK`] unless it is pinned.
    pub cpu: Option<u32>,
}

/// CPU time, ns, from which the CPU is looked up: reading `stat` costs several times as much as reading `schedstat`.
const WORTH_A_LOOK: u64 = 250_000;

/// A thread's `/proc` files, kept open: they refer to the thread itself, not to a later thread with the same number.
#[derive(Debug)]
pub struct Reading {
    schedstat: File,
    stat: File,
    /// The CPU that the thread is pinned to.
    only: Option<u32>,
    last: u64,
}

impl Reading {
    /// Opens the files of thread `tid` and counts from now on. `only`: the CPU that the thread is pinned to; then
    /// `stat` is not read for it.
    ///
    /// # Errors
    /// ENOENT or ESRCH where the thread has ended.
    pub fn open(pid: i32, tid: i32, only: Option<u32>) -> io::Result<Self> {
        let schedstat = File::open(format!("/proc/{pid}/task/{tid}/schedstat"))?;
        let stat = File::open(format!("/proc/{pid}/task/{tid}/stat"))?;
        let mut reading = Self { schedstat, stat, only, last: 0 };
        reading.take()?;
        Ok(reading)
    }

    /// Whether the thread sleeps: it does not run, does not wait for a CPU and is not stopped. True also where it has
    /// ended.
    pub fn asleep(&self) -> bool {
        let mut line = [0; 64];
        let length = self.stat.read_at(&mut line, 0).unwrap_or(0);
        !matches!(state(line.get(..length).unwrap_or_default()), Some(b'R' | b'T' | b't'))
    }

    /// CPU time since the last call.
    ///
    /// # Errors
    /// ESRCH where the thread has ended.
    pub fn take(&mut self) -> io::Result<Taken> {
        let mut buffer = [0; 512];
        let length = self.schedstat.read_at(&mut buffer, 0)?;
        let count = schedstat_ran(buffer.get(..length).unwrap_or_default()).ok_or(io::ErrorKind::InvalidData)?;
        let ran = count.saturating_sub(self.last);
        self.last = count;
        if ran < WORTH_A_LOOK || self.only.is_some() {
            return Ok(Taken { ran, cpu: self.only });
        }
        let length = self.stat.read_at(&mut buffer, 0)?;
        let cpu = stat_field(buffer.get(..length).unwrap_or_default(), STAT_PROCESSOR).map(|cpu| cpu as u32);
        Ok(Taken { ran, cpu })
    }
}

/// The state letter of a `stat` line, see proc(5).
fn state(line: &[u8]) -> Option<u8> {
    let end_of_name = line.iter().rposition(|byte| *byte == b')')?;
    line.get(end_of_name + 2).copied()
}

/// The field number of the CPU in `/proc/PID/stat`, as in proc(5).
const STAT_PROCESSOR: usize = 39;

/// A numeric field of a `stat` line, numbered as in proc(5), from 3 on. The name (field 2) may contain any character,
/// even ")".
fn stat_field(line: &[u8], field: usize) -> Option<u64> {
    let end_of_name = line.iter().rposition(|byte| *byte == b')')?;
    let rest = line.get(end_of_name + 2..)?;
    number(rest.split(|byte| byte.is_ascii_whitespace()).nth(field.checked_sub(3)?)?)
}

fn schedstat_ran(line: &[u8]) -> Option<u64> {
    number(line.split(|byte| byte.is_ascii_whitespace()).next()?)
}

fn number(digits: &[u8]) -> Option<u64> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stat_line_is_read_past_any_name() {
        let line = b"77 (a) b (CPU 0/KVM)) R 1 77 77 0 -1 4194304 1 0 0 0 5 6 0 0 20 0 1 0 4242 100 5";
        assert_eq!(stat_field(line, 22), Some(4242));
        assert_eq!((state(line), state(b""), state(b"1 (x)")), (Some(b'R'), None, None));
        assert_eq!(stat_field(line, 99), None);
        assert_eq!(stat_field(b"", 22), None);
        assert_eq!(stat_field(b"1 (x)", 22), None);
        assert_eq!(stat_field(line, 0), None);
    }

    fn own_tid() -> i32 {
        rustix::thread::gettid().as_raw_nonzero().get()
    }

    fn spin(for_ms: u64) {
        let start = std::time::Instant::now();
        while start.elapsed().as_millis() < u128::from(for_ms) {
            std::hint::spin_loop();
        }
    }

    /// On a thread of its own, so that other tests of this process do not disturb the count.
    #[test]
    fn a_threads_cpu_time_and_cpu_are_read() {
        std::thread::spawn(|| {
            let mut reading = Reading::open(std::process::id() as i32, own_tid(), None).unwrap();
            spin(50);
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
