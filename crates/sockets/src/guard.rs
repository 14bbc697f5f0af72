//! The guard: a thread of normal priority that has vCPU wake-ups sent again if they show no effect
//! (docs/reference/device.md, "The vCPU word and notifications").
//!
//! It costs a real-time thread one atomic increment per wake-up, plus one system call if the guard is parked. The guard
//! accesses no ring, because the rings' locks belong to the real-time threads.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::Thread;

use vm_memory::GuestMemoryAtomic;

use crate::memory::Memory;

/// The guard's state for a channel.
#[derive(Default)]
pub(crate) struct Watched {
    pub(crate) memory: OnceLock<GuestMemoryAtomic<Memory>>,
    /// Number of wake-ups so far.
    pub(crate) wakes: AtomicU32,
    /// A wake-up must be sent again.
    pub(crate) again: AtomicBool,
}

/// The guard of one VM.
#[derive(Default)]
pub(crate) struct Guard {
    pub(crate) channels: Vec<Watched>,
    pub(crate) thread: OnceLock<Thread>,
    pub(crate) rests: AtomicBool,
}

impl Guard {
    /// A guard for channels 1 to `channels`.
    pub(crate) fn new(channels: u32) -> Self {
        Self { channels: (0..=channels).map(|_| Watched::default()).collect(), ..Self::default() }
    }

    /// Sets the memory that holds a channel's vCPU word.
    pub(crate) fn watch(&self, channel: u32, memory: GuestMemoryAtomic<Memory>) {
        let _ = self.channels.get(channel as usize).map(|watched| watched.memory.set(memory));
    }

    /// Records a wake-up. Called by the channel's real-time thread.
    pub(crate) fn woken(&self, channel: u32) {
        let Some(watched) = self.channels.get(channel as usize) else { return };
        watched.wakes.fetch_add(1, Ordering::SeqCst);
        // Either the guard sees this wake-up before it parks, or this thread sees that it is parked.
        if self.rests.load(Ordering::SeqCst) && self.rests.swap(false, Ordering::SeqCst) {
            if let Some(thread) = self.thread.get() {
                thread.unpark();
            }
        }
    }

    /// Whether a wake-up of this channel must be sent again. Clears the request.
    pub(crate) fn asked(&self, channel: u32) -> bool {
        self.channels.get(channel as usize).is_some_and(|watched| watched.again.swap(false, Ordering::SeqCst))
    }
}
