//! What is kept of the CPUs beside reservations.

use ontime_plan::Bandwidth;

/// The most that the cap watcher takes, in millionths of one CPU: a tenth of its time are looks. It runs on any CPU.
pub const WATCHER_PPM: u64 = 100_000;

/// What reservations leave of the CPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Beside {
    /// Of each CPU.
    pub reserve: Bandwidth,
    /// Of one CPU, whichever it is. None is kept where no reservation depends on runtime caps.
    pub watcher: Bandwidth,
}

impl Beside {
    /// Of so many CPUs together.
    pub fn of_all(self, cpus: usize) -> Bandwidth {
        std::iter::repeat_n(self.reserve, cpus).sum::<Bandwidth>() + self.watcher
    }
}
