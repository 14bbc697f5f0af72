//! The guard's thread ([`crate::guard`]), at normal priority.

use std::sync::atomic::Ordering;
use std::time::Duration;

use vm_memory::GuestAddressSpace;

use crate::notify;
use crate::shared::Shared;

/// Interval between checks. A wake-up without effect is sent again at the second check after it.
const EVERY: Duration = Duration::from_millis(10);
/// After this many checks without a wake-up the guard parks.
const QUIET: u32 = 100;

/// The guard's thread; never returns.
pub(crate) fn run(shared: &Shared) {
    let guard = &shared.guard;
    let _ = guard.thread.set(std::thread::current());
    let mut seen = vec![0; guard.channels.len()];
    let mut quiet = 0;
    loop {
        quiet = if look(shared, &mut seen) { 0 } else { quiet + 1 };
        if quiet < QUIET {
            std::thread::sleep(EVERY);
            continue;
        }
        guard.rests.store(true, Ordering::SeqCst);
        if look(shared, &mut seen) {
            guard.rests.store(false, Ordering::SeqCst);
        }
        while guard.rests.load(Ordering::SeqCst) {
            std::thread::park();
        }
        quiet = 0;
    }
}

/// Checks each channel once. Returns whether another check is needed soon.
fn look(shared: &Shared, seen: &mut [u32]) -> bool {
    let mut busy = false;
    for ((channel, watched), seen) in shared.guard.channels.iter().enumerate().zip(seen) {
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
