//! The free places for closed connections (`closing`): a lock-free stack. The crate `ontime-model` also compiles this
//! file.

use crate::atomic::{AtomicU32, AtomicU64, Ordering};

/// Attempts to take a place while other threads take places at the same time.
const TRIES: usize = 64;
/// No place.
const NOWHERE: u32 = u32::MAX;

/// The numbers of the free places.
pub(crate) struct Free {
    /// Low half: the top of the stack. High half: a change counter, so that a delayed thread's compare-exchange fails
    /// (ABA).
    top: AtomicU64,
    /// For each place, the free place below it.
    below: Box<[AtomicU32]>,
}

impl Free {
    /// A stack of `places` free places.
    pub(crate) fn new(places: u32) -> Self {
        let below = (0..places).map(|at| AtomicU32::new(if at + 1 < places { at + 1 } else { NOWHERE })).collect();
        Self { top: AtomicU64::new(if places > 0 { 0 } else { u64::from(NOWHERE) }), below }
    }

    /// The stack's word with another top.
    fn changed(free: u64, top: u32) -> u64 {
        (free >> 32).wrapping_add(1) << 32 | u64::from(top)
    }

    /// Takes a free place. None: no place is free, or other threads won every attempt.
    pub(crate) fn take(&self) -> Option<usize> {
        for _ in 0..TRIES {
            let free = self.top.load(Ordering::Acquire);
            let at = free as u32 as usize;
            let below = self.below.get(at)?.load(Ordering::Relaxed);
            let taken = Self::changed(free, below);
            if self.top.compare_exchange(free, taken, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return Some(at);
            }
        }
        None
    }

    /// Returns a place that was taken.
    pub(crate) fn give(&self, at: u32) {
        let Some(below) = self.below.get(at as usize) else { return };
        let mut free = self.top.load(Ordering::Relaxed);
        loop {
            below.store(free as u32, Ordering::Relaxed);
            let returned = Self::changed(free, at);
            match self.top.compare_exchange(free, returned, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => free = now,
            }
        }
    }
}
