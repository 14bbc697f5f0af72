//! A token bucket: limits the rate of requests of a guest, or of its device process, that cost other tenants time.
//! Only the one that exceeds the rate waits.

use std::time::{Duration, Instant};

/// Most tokens.
pub const BURST: u32 = 32;
/// Time per additional token.
pub const REFILL: Duration = Duration::from_millis(20);

/// A token bucket.
#[derive(Debug)]
pub struct Bucket {
    tokens: u32,
    refilled: Instant,
}

impl Default for Bucket {
    fn default() -> Self {
        Self { tokens: BURST, refilled: Instant::now() }
    }
}

impl Bucket {
    /// Takes a token. Returns whether there was one; else there is the next [`REFILL`] later.
    pub fn take(&mut self) -> bool {
        let since = self.refilled.elapsed();
        let fresh = u32::try_from(since.as_millis() / REFILL.as_millis()).unwrap_or(u32::MAX);
        if fresh > 0 {
            self.tokens = self.tokens.saturating_add(fresh).min(BURST);
            self.refilled = Instant::now();
        }
        let left = self.tokens.checked_sub(1);
        self.tokens = left.unwrap_or(0);
        left.is_some()
    }

    /// Takes a token; sleeps until there is one.
    pub fn wait(&mut self) {
        while !self.take() {
            std::thread::sleep(REFILL);
        }
    }
}
