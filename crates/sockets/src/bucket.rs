//! A token bucket: limits the rate of guest requests that cost other tenants time. Only the guest that exceeds the rate
//! waits.

use std::time::{Duration, Instant};

/// Most tokens.
pub(crate) const BURST: u32 = 32;
/// Time per additional token.
pub(crate) const REFILL: Duration = Duration::from_millis(20);

/// A token bucket.
#[derive(Debug)]
pub(crate) struct Bucket {
    tokens: u32,
    refilled: Instant,
}

impl Default for Bucket {
    fn default() -> Self {
        Self { tokens: BURST, refilled: Instant::now() }
    }
}

impl Bucket {
    /// Takes a token; sleeps until one is available.
    pub(crate) fn wait(&mut self) {
        let since = self.refilled.elapsed();
        let fresh = u32::try_from(since.as_millis() / REFILL.as_millis()).unwrap_or(u32::MAX);
        if fresh > 0 {
            self.tokens = self.tokens.saturating_add(fresh).min(BURST);
            self.refilled = Instant::now();
        }
        match self.tokens.checked_sub(1) {
            Some(left) => self.tokens = left,
            None => {
                std::thread::sleep(REFILL);
                self.refilled = Instant::now();
            }
        }
    }
}
