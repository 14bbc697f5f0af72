//! Whether the worker waits for room in a channel's ring. The crate `ontime-model` compiles this file, too.

use crate::atomic::{AtomicBool, Ordering, fence};

/// The flag of one ring.
#[derive(Debug)]
pub struct Room(AtomicBool);

impl Room {
    /// Nothing waits.
    pub fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// For the worker, which found the ring full: tries once more after this, and waits only if the ring is full still.
    pub fn wait(&self) {
        self.0.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// For the channel's thread, which took orders: whether the worker is to be woken.
    pub fn made(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed) && self.0.swap(false, Ordering::Relaxed)
    }
}
