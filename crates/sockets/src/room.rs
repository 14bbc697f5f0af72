//! Whether the worker waits for room in a channel's ring. The crate `ontime-model` also compiles this file.

use crate::atomic::{AtomicBool, Ordering, fence};

/// The flag of one ring.
#[derive(Debug)]
pub(crate) struct Room(AtomicBool);

impl Room {
    /// The worker does not wait.
    pub(crate) fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// For the worker, which found the ring full. The worker must try once more after this call, and waits only if the
    /// ring is still full.
    pub(crate) fn wait(&self) {
        self.0.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// For the channel's thread after it took orders: whether it must wake the worker.
    pub(crate) fn made(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed) && self.0.swap(false, Ordering::Relaxed)
    }
}
