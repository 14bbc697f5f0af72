//! The host's CPU time, and its users.

/// A shell command that prints the input of [`CpuTime::parse`], for a host with this many CPUs; a further one is the
/// clients'.
pub(super) fn read(cpus: u16) -> String {
    format!(
        "read -r up rest < /proc/uptime; \
         times=$(awk '$1 == \"cpu\" {{guest = $10 + $11}} /^cpu[0-9]/ && substr($1, 4) < {cpus} {{idle += $5 + $6}} \
         END {{print idle, guest}}' /proc/stat); pace=0; \
         for task in /proc/$(pgrep -x -f 'ontime daemon')/task/*; do \
         read -r name < $task/comm; case $name in ontime-pace/*|ontime-read/*) \
         read -r ran rest < $task/schedstat; pace=$((pace + ran)) ;; esac; done; \
         echo $up $times $pace"
    )
}

/// `/proc/uptime`, the idle time of the host's CPUs, the time that the tick accounts to guests (`/proc/stat`,
/// `Documentation/filesystems/proc.rst`; in 1/100 s), and the run time of the daemon's pacers and their readers. In
/// seconds.
#[derive(Debug)]
pub struct CpuTime {
    uptime: f64,
    idle: f64,
    guest: f64,
    pacers: f64,
}

impl CpuTime {
    /// Parses four numbers: seconds of uptime, idle and guests' time in 1/100 s, the pacers' nanoseconds.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace().map(|word| word.parse::<f64>().ok());
        let uptime = words.next()??;
        let (idle, guest) = (words.next()?? / 100.0, words.next()?? / 100.0);
        let pacers = words.next()?? / 1e9;
        Some(Self { uptime, idle, guest, pacers })
    }

    /// Share of the CPUs used by guests since an earlier reading, 0 to 1; `None` if no time has passed.
    pub(crate) fn guest_share_since(&self, before: &Self, cpus: u16) -> Option<f64> {
        let elapsed = (self.uptime - before.uptime) * f64::from(cpus);
        (elapsed > 0.0).then(|| ((self.guest - before.guest) / elapsed).clamp(0.0, 1.0))
    }

    /// Share of one CPU used by the pacers since an earlier reading; `None` if there are none, or no time has passed.
    pub(crate) fn pacers_share_since(&self, before: &Self) -> Option<f64> {
        let (ran, elapsed) = (self.pacers - before.pacers, self.uptime - before.uptime);
        (elapsed > 0.0 && ran > 0.0).then_some(ran / elapsed)
    }

    /// Busy share of the CPUs since an earlier reading, 0 to 1; `None` if no time has passed.
    pub(crate) fn share_since(&self, before: &Self, cpus: u16) -> Option<f64> {
        let elapsed = (self.uptime - before.uptime) * f64::from(cpus);
        (elapsed > 0.0).then(|| (1.0 - (self.idle - before.idle) / elapsed).clamp(0.0, 1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_the_time_between_two_readings() {
        let before = CpuTime::parse("100.0 100 100 0").unwrap();
        let after = CpuTime::parse("110.0 300 300 500000000").unwrap();
        assert!((after.guest_share_since(&before, 1).unwrap() - 0.2).abs() < 1e-9);
        assert!((after.share_since(&before, 1).unwrap() - 0.8).abs() < 1e-9);
        assert!((after.pacers_share_since(&before).unwrap() - 0.05).abs() < 1e-9);
        assert!(before.pacers_share_since(&before).is_none());
        assert!(before.share_since(&before, 1).is_none());
        assert!(CpuTime::parse("1 2 3").is_none());
        assert!(CpuTime::parse("a b c d").is_none());
    }
}
