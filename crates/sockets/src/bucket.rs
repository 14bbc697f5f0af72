//! A token bucket: work of a guest that costs others something is done so often and no oftener. A guest that asks
//! faster waits, and nobody else.

use std::time::{Duration, Instant};

/// Tokens at most.
pub const BURST: u32 = 32;
/// The time after which one more token is there.
pub const REFILL: Duration = Duration::from_millis(20);

/// See above.
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
    /// Takes a token; sleeps until there is one.
    pub fn wait(&mut self) {
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
