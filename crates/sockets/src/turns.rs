//! A thread's turns: whether it is at work now, for who has to know that it is done with what was there before.
//!
//! The thread itself pays two atomic additions a turn; whoever waits looks now and then.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How often a turn that is waited for is looked at. Calls that are under way take milliseconds.
const LOOK: Duration = Duration::from_micros(100);

/// Counts what a thread begins and what it ends: odd while it works.
#[derive(Debug, Default)]
pub struct Turns(AtomicU64);

impl Turns {
    /// Begins a turn, or ends it.
    pub fn turn(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    /// Waits until what was under way has ended. False where that takes longer. What was stored before (SeqCst) is what
    /// every later turn loads (SeqCst).
    pub fn wait(&self, patience: Duration) -> bool {
        let (seen, start) = (self.0.load(Ordering::SeqCst), Instant::now());
        while seen % 2 == 1 && self.0.load(Ordering::SeqCst) == seen {
            if start.elapsed() > patience {
                return false;
            }
            std::thread::sleep(LOOK);
        }
        true
    }
}
