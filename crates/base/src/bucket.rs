//! A token bucket: limits the rate of requests of a guest, or of its device process, that cost other tenants time.
//! Only the one that exceeds the rate waits.

use std::time::{Duration, Instant};

/// Most tokens.
pub const BURST: u32 = 32;
/// Time per additional token.
pub const REFILL: Duration = Duration::from_millis(20);
/// The most tokens that are owed, a minute's: nobody waits longer.
const DEBT: i64 = 3_000;

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

    /// Takes the tokens that refill in this time, whether they are there or not.
    pub fn spend(&mut self, time: Duration) {
        let tokens = i64::try_from(time.as_nanos() / REFILL.as_nanos()).unwrap_or(i64::MAX);
        self.tokens = self.tokens.saturating_sub(tokens).max(-DEBT);
    }

    /// Takes a token; sleeps until there is one.
    pub fn wait(&mut self) {
        while !self.take() {
            std::thread::sleep(REFILL);
        }
    }
}
