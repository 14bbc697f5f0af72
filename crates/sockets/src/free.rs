//! The free places of connections that are being closed (`closing`): a stack that threads change without a lock. The
//! crate `ontime-model` compiles this file, too.

use crate::atomic::{AtomicU32, AtomicU64, Ordering};

/// How often a free place is taken for while other threads take places at the same moment.
const TRIES: usize = 64;
/// No place.
const NOWHERE: u32 = u32::MAX;

/// Numbers of free places.
pub struct Free {
    /// The topmost in the low half, and in the high half how often it has changed, so that a thread that was held up
    /// notices.
    top: AtomicU64,
    /// The free place below each.
    below: Box<[AtomicU32]>,
}

impl Free {
    /// So many, all free.
    pub fn new(places: u32) -> Self {
        let below = (0..places).map(|at| AtomicU32::new(if at + 1 < places { at + 1 } else { NOWHERE })).collect();
        Self { top: AtomicU64::new(if places > 0 { 0 } else { u64::from(NOWHERE) }), below }
    }

    /// The stack with another top.
    fn changed(free: u64, top: u32) -> u64 {
        (free >> 32).wrapping_add(1) << 32 | u64::from(top)
    }

    /// Takes a free place. None: there is none, or other threads were always faster.
    pub fn take(&self) -> Option<usize> {
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
    pub fn give(&self, at: u32) {
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
