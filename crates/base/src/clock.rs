//! The kernel's clocks. Reading one takes no lock, so that real-time threads may do it.

use rustix::time::{ClockId, Timespec, clock_gettime};

/// The present time, ns of CLOCK_MONOTONIC.
pub fn now() -> u64 {
    read(ClockId::Monotonic)
}

/// A clock's present time, ns.
pub fn read(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    (time.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(time.tv_nsec as u64)
}

/// A time or a length of time in ns, as the kernel takes it.
pub fn timespec(ns: u64) -> Timespec {
    Timespec { tv_sec: (ns / 1_000_000_000) as i64, tv_nsec: (ns % 1_000_000_000) as _ }
}

/// The CPU clock of a process: an upper bound for the time of each of its threads. Reading takes one cheap system call,
/// in which the kernel adds up all threads' times (`kernel/sched/cputime.c`, `thread_group_cputime`): about ten threads
/// for a VM, whose guest does not choose their number. Reading a thread's files costs several times that, and `stat`
/// takes locks that other threads hold.
#[derive(Debug)]
pub struct ProcessClock {
    id: libc::clockid_t,
    last: u64,
}

impl ProcessClock {
    /// The clock of process `pid`. Counting starts now.
    pub fn new(pid: i32) -> Self {
        // CPUCLOCK_SCHED of another process: include/linux/posix-timers.h, make_process_cpuclock.
        let mut clock = Self { id: (!pid << 3) | 2, last: 0 };
        clock.take();
        clock
    }

    /// ns used since the last call. `u64::MAX` if the process has ended or its number was reused, so that the caller
    /// checks.
    pub fn take(&mut self) -> u64 {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the kernel writes a timespec that outlives the call; an invalid clock gives EINVAL.
        if unsafe { libc::clock_gettime(self.id, &raw mut time) } != 0 {
            return u64::MAX;
        }
        let count = (time.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(time.tv_nsec as u64);
        let ran = count.checked_sub(self.last).unwrap_or(u64::MAX);
        self.last = count;
        ran
    }

    /// The clock's id, which names the process.
    pub fn id(&self) -> libc::clockid_t {
        self.id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_clock_counts_its_threads_and_tells_of_its_end() {
        let mut child = std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let mut clock = ProcessClock::new(child.id() as i32);
        let ran: u64 = (0..100)
            .map(|_| {
                std::thread::sleep(std::time::Duration::from_millis(10));
                clock.take()
            })
            .take_while({
                let mut sum = 0;
                move |ran| {
                    sum += ran;
                    sum < 20_000_000
                }
            })
            .sum();
        assert!(ran < 2_000_000_000, "{ran}");
        assert!(clock.last > 1_000_000, "{clock:?}");
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(clock.take(), u64::MAX);
    }
}
