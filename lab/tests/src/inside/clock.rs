//! The host's clock, for programs that measure.

use std::time::Duration;

use anyhow::{Context, Result};
use rustix::io::Errno;
use rustix::time::{ClockId, Timespec};

/// Time since the host's start (CLOCK_MONOTONIC).
pub(crate) fn now() -> Duration {
    let now = rustix::time::clock_gettime(ClockId::Monotonic);
    // Neither is negative.
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or_default())
}

/// Sleeps until a time of [`now`].
pub(crate) fn sleep_until(time: Duration) -> Result<()> {
    let tv_sec = i64::try_from(time.as_secs()).context("a time that no clock reaches")?;
    let until = Timespec { tv_sec, tv_nsec: time.subsec_nanos().into() };
    loop {
        match rustix::thread::clock_nanosleep_absolute(ClockId::Monotonic, &until) {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("sleeping"),
        }
    }
}

/// A part of a time, in whole percent.
pub(crate) fn percent(part: Duration, of: Duration) -> u128 {
    part.as_nanos() * 100 / of.as_nanos().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_rounded_down() {
        let ms = Duration::from_millis;
        assert_eq!(
            (percent(ms(999), ms(5000)), percent(ms(5000), ms(5000)), percent(ms(1), ms(0))),
            (19, 100, 100_000_000)
        );
    }

    #[test]
    fn a_sleep_ends_at_its_time_or_later() {
        let end = now() + Duration::from_millis(20);
        sleep_until(end).unwrap();
        assert!(now() >= end);
        // A time that has passed.
        sleep_until(Duration::ZERO).unwrap();
    }
}
