//! The guard: a thread of normal priority that has vCPU wake-ups sent again if they show no effect (docs/device.md,
//! "The vCPU word and notifications").
//!
//! It costs a real-time thread one atomic increment per wake-up, plus one system call if the guard is parked. The guard
//! accesses no ring, because the rings' locks belong to the real-time threads.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::Thread;
use std::time::Duration;

use vm_memory::{GuestAddressSpace, GuestMemoryAtomic};

use crate::memory::Memory;
use crate::notify;
use crate::shared::Shared;

/// Interval between checks. A wake-up without effect is sent again at the second check after it.
const EVERY: Duration = Duration::from_millis(10);
/// After this many checks without a wake-up the guard parks.
const QUIET: u32 = 100;

/// The guard's state for a channel.
#[derive(Default)]
struct Watched {
    memory: OnceLock<GuestMemoryAtomic<Memory>>,
    /// Number of wake-ups so far.
    wakes: AtomicU32,
    /// A wake-up must be sent again.
    again: AtomicBool,
}

/// The guard of one VM.
#[derive(Default)]
pub struct Guard {
    channels: Vec<Watched>,
    thread: OnceLock<Thread>,
    rests: AtomicBool,
}

impl Guard {
    /// A guard for channels 1 to `channels`.
    pub fn new(channels: u32) -> Self {
        Self { channels: (0..=channels).map(|_| Watched::default()).collect(), ..Self::default() }
    }

    /// Sets the memory that holds a channel's vCPU word.
    pub fn watch(&self, channel: u32, memory: GuestMemoryAtomic<Memory>) {
        let _ = self.channels.get(channel as usize).map(|watched| watched.memory.set(memory));
    }

    /// Records a wake-up. Called by the channel's real-time thread.
    pub fn woken(&self, channel: u32) {
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
    pub fn asked(&self, channel: u32) -> bool {
        self.channels.get(channel as usize).is_some_and(|watched| watched.again.swap(false, Ordering::SeqCst))
    }

    /// The guard's thread; never returns.
    pub fn run(&self, shared: &Shared) {
        let _ = self.thread.set(std::thread::current());
        let mut seen = vec![0; self.channels.len()];
        let mut quiet = 0;
        loop {
            quiet = if self.look(shared, &mut seen) { 0 } else { quiet + 1 };
            if quiet < QUIET {
                std::thread::sleep(EVERY);
                continue;
            }
            self.rests.store(true, Ordering::SeqCst);
            if self.look(shared, &mut seen) {
                self.rests.store(false, Ordering::SeqCst);
            }
            while self.rests.load(Ordering::SeqCst) {
                std::thread::park();
            }
            quiet = 0;
        }
    }

    /// Checks each channel once. Returns whether another check is needed soon.
    fn look(&self, shared: &Shared, seen: &mut [u32]) -> bool {
        let mut busy = false;
        for ((channel, watched), seen) in self.channels.iter().enumerate().zip(seen) {
            let Some(memory) = watched.memory.get() else { continue };
            let wakes = watched.wakes.load(Ordering::SeqCst);
            let fresh = std::mem::replace(seen, wakes) != wakes;
            busy |= fresh;
            if !fresh && notify::woken(&memory.memory(), shared.vcpu(channel as u32)) {
                busy = true;
                watched.again.store(true, Ordering::SeqCst);
                shared.mail.ring(channel as u32);
            }
        }
        busy
    }
}
