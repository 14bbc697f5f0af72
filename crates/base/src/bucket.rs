//! A token bucket: limits the rate of requests of a guest, or of its device process, that cost other tenants time.
//! Only the one that exceeds the rate waits.

use std::time::{Duration, Instant};

/// Most tokens.
pub const BURST: u32 = 32;
/// Time per additional token.
pub const REFILL: Duration = Duration::from_millis(20);
/// The most tokens that are owed, those of 1.5 s. A device process waits 3 s for the daemon's answer.
const DEBT: i64 = 75;

/// A token bucket.
#[derive(Debug)]
pub struct Bucket {
    /// Negative: owed.
    tokens: i64,
    refilled: Instant,
}

impl Default for Bucket {
    fn default() -> Self {
        Self { tokens: BURST.into(), refilled: Instant::now() }
    }
}

impl Bucket {
    /// Takes a token. Returns whether there was one; else there is the next [`REFILL`] later.
    pub fn take(&mut self) -> bool {
        let since = self.refilled.elapsed();
        let fresh = i64::try_from(since.as_millis() / REFILL.as_millis()).unwrap_or(i64::MAX);
        if fresh > 0 {
            self.tokens = self.tokens.saturating_add(fresh).min(BURST.into());
            self.refilled = Instant::now();
        }
        let has = self.tokens > 0;
        self.tokens -= i64::from(has);
        has
    }

    /// Takes the tokens that refill in this time, whether they are there or not; no more than 1.5 s of them are owed.
    pub fn spend(&mut self, time: Duration) {
        let tokens = i64::try_from(time.as_nanos().div_ceil(REFILL.as_nanos())).unwrap_or(i64::MAX);
        self.tokens = self.tokens.saturating_sub(tokens).max(-DEBT);
    }

    /// Takes a token; sleeps until there is one.
    pub fn wait(&mut self) {
        while !self.take() {
            std::thread::sleep(REFILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_spent_is_rounded_up_and_owed_for_a_limited_time() {
        let left = |spent: &[Duration]| {
            let mut bucket = Bucket::default();
            spent.iter().for_each(|time| bucket.spend(*time));
            bucket.tokens - i64::from(BURST)
        };
        assert_eq!(left(&[Duration::ZERO]), 0);
        assert_eq!(left(&[Duration::from_nanos(1)]), -1);
        assert_eq!(left(&[REFILL, REFILL * 2 + Duration::from_nanos(1)]), -4);
        for long in [Duration::from_secs(9), Duration::MAX] {
            assert_eq!(left(&[long, long]), -DEBT - i64::from(BURST));
        }
        let mut bucket = Bucket::default();
        bucket.spend(REFILL * (BURST + 2));
        assert!(!bucket.take(), "owed");
        bucket.refilled -= REFILL * 3;
        assert!(bucket.take() && !bucket.take());
    }
}
