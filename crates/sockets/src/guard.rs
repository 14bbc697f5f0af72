//! The guard over wake-ups: a thread of normal priority that has one sent again which shows no effect (docs/device.md,
//! "The vCPU word and notifications").
//!
//! It costs a real-time thread one atomic increment a wake-up, and one system call where the guard rests. It touches no
//! ring itself: their locks are the real-time threads' own.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::Thread;
use std::time::Duration;

use vm_memory::{GuestAddressSpace, GuestMemoryAtomic};

use crate::memory::Memory;
use crate::notify;
use crate::shared::Shared;

/// How often the guard looks. A wake-up without effect is sent again at the second look after it.
const EVERY: Duration = Duration::from_millis(10);
/// So many looks without a wake-up in between, and it rests.
const QUIET: u32 = 100;

/// What the guard knows of a channel.
#[derive(Default)]
struct Watched {
    memory: OnceLock<GuestMemoryAtomic<Memory>>,
    /// Wake-ups so far.
    wakes: AtomicU32,
    /// One is to be sent again.
    again: AtomicBool,
}

/// See above.
#[derive(Default)]
pub struct Guard {
    channels: Vec<Watched>,
    thread: OnceLock<Thread>,
    rests: AtomicBool,
}

impl Guard {
    /// Over channels 1 to `channels`.
    pub fn new(channels: u32) -> Self {
        Self { channels: (0..=channels).map(|_| Watched::default()).collect(), ..Self::default() }
    }

    /// Where a channel's vCPU word is looked for.
    pub fn watch(&self, channel: u32, memory: GuestMemoryAtomic<Memory>) {
        let _ = self.channels.get(channel as usize).map(|watched| watched.memory.set(memory));
    }

    /// A wake-up was sent. From the channel's real-time thread.
    pub fn woken(&self, channel: u32) {
        let Some(watched) = self.channels.get(channel as usize) else { return };
        watched.wakes.fetch_add(1, Ordering::SeqCst);
        // Either it sees this wake-up before it rests, or it rests by now.
        if self.rests.load(Ordering::SeqCst) && self.rests.swap(false, Ordering::SeqCst) {
            if let Some(thread) = self.thread.get() {
                thread.unpark();
            }
        }
    }

    /// Whether a wake-up of this channel is to be sent again; it is asked for once.
    pub fn asked(&self, channel: u32) -> bool {
        self.channels.get(channel as usize).is_some_and(|watched| watched.again.swap(false, Ordering::SeqCst))
    }

    /// The guard's thread: never returns.
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

    /// Looks at each channel once; whether there is a reason to look again soon.
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
