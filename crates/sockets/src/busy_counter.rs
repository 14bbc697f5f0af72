//! A thread's turns: whether the thread is processing an event now. Another thread can wait until it no longer uses
//! what was there before.
//!
//! A turn costs the thread two atomic additions. The waiting thread polls.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Poll interval while waiting for the end of a turn. A turn takes milliseconds.
const LOOK: Duration = Duration::from_micros(100);

/// Counts the starts and ends of a thread's turns: odd while the thread works.
#[derive(Debug, Default)]
pub(crate) struct BusyCounter(AtomicU64);

impl BusyCounter {
    /// Marks the start or the end of a turn.
    pub(crate) fn toggle(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    /// Waits until the turn that was in progress has ended. False: it took longer than `patience`. Later turns see
    /// (SeqCst) what the caller stored before (SeqCst).
    pub(crate) fn wait_idle(&self, patience: Duration) -> bool {
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
