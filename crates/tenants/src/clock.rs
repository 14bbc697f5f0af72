//! What a process has had of the CPUs, by its clock.

/// The CPU clock of a whole process: at least what each of its threads takes, in one cheap system call, which adds up
/// what its threads have had (`kernel/sched/cputime.c`, `thread_group_cputime`): some ten of a VM, whose number its
/// guest does not choose. A thread's files cost several times that, and `stat` takes locks that others hold.
#[derive(Debug)]
pub struct ProcessClock {
    id: libc::clockid_t,
    last: u64,
}

impl ProcessClock {
    /// The clock of process `pid`; counts from now on.
    pub fn new(pid: i32) -> Self {
        // CPUCLOCK_SCHED of another process: include/linux/posix-timers.h, make_process_cpuclock.
        let mut clock = Self { id: (!pid << 3) | 2, last: 0 };
        clock.take();
        clock
    }

    /// ns taken since the last call; `u64::MAX` where the process has ended or another has its number, so that somebody
    /// looks.
    pub fn take(&mut self) -> u64 {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the kernel writes a timespec, which outlives the call; a clock that is none gives EINVAL.
        if unsafe { libc::clock_gettime(self.id, &raw mut time) } != 0 {
            return u64::MAX;
        }
        let count = (time.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(time.tv_nsec as u64);
        let ran = count.checked_sub(self.last).unwrap_or(u64::MAX);
        self.last = count;
        ran
    }

    /// What names the process.
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
