//! When a channel's vCPU is woken, interrupted, or left alone (docs/device.md, "The vCPU word and notifications").

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use vhost_user_backend::VringT;
use vm_memory::{GuestAddress, GuestMemoryBackend};

use crate::abi::*;
use crate::memory::Memory;
use crate::shared::{Shared, count};
use crate::vring::Vring;

/// How often the guard looks whether a wake-up shows no effect, and then sends it again.
const GUARD: Duration = Duration::from_millis(10);

/// What to do about a vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// Exchange HALTING for WOKEN, then notify.
    Wake,
    /// Interrupt through main.
    Attention,
    /// It looks by itself.
    Nothing,
}

/// The rule (pure): the vCPU's state and the most urgent waiter's priority.
pub fn rule(state: u32, waiter: u16) -> Notice {
    match state & ONTIME_VCPU_STATE_MASK {
        ONTIME_VCPU_HALTING => Notice::Wake,
        ONTIME_VCPU_RUN => {
            let running = state >> ONTIME_VCPU_PRIO_SHIFT;
            let waiter = u32::from(waiter);
            if waiter > running || waiter == 0 && running == 0 { Notice::Attention } else { Notice::Nothing }
        }
        _ => Notice::Nothing,
    }
}

/// A channel's notifications.
pub struct Notifier {
    channel: u32,
    guard: rustix::fd::OwnedFd,
    guarding: bool,
    /// A wake-up was sent since the guard looked.
    woken: bool,
}

impl Notifier {
    /// Of a channel.
    ///
    /// # Errors
    /// Where no timer can be made.
    pub fn new(channel: u32) -> std::io::Result<Self> {
        let guard =
            rustix::time::timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
        Ok(Self { channel, guard, guarding: false, woken: false })
    }

    /// The guard's timer, to wait on.
    pub fn timer(&self) -> RawFd {
        self.guard.as_raw_fd()
    }

    /// Buffers of the queues marked in `used` were used, for a waiter of this priority at most.
    pub fn used(&mut self, shared: &Shared, memory: &Memory, vrings: &[Vring], used: [bool; 2], waiter: u16) {
        let address = shared.vcpus.get(self.channel as usize).map_or(0, |word| word.load(Ordering::Acquire));
        if address == 0 {
            for (vring, _) in vrings.iter().zip(used).filter(|(_, used)| *used) {
                // An unreadable ring gets the notification: one too many does no harm.
                if vring.needs_notification().unwrap_or(true) {
                    let _ = vring.signal_used_queue();
                }
            }
            return;
        }
        let Some(state) = word(memory, address, 0) else { return };
        fence(Ordering::SeqCst);
        let seen = state.load(Ordering::Relaxed);
        match rule(seen, waiter) {
            Notice::Nothing => {}
            Notice::Wake => {
                // If it changed meanwhile, the vCPU went on by itself, and looks: before it runs a thread it does (step 2).
                let halted = state.compare_exchange(seen, ONTIME_VCPU_WOKEN, Ordering::SeqCst, Ordering::Relaxed);
                if halted.is_ok() {
                    self.wake(vrings);
                    count(&shared.counters.wakes);
                    note(memory, address, 8, &shared.counters.wakes);
                    self.woken = true;
                    self.watch(true);
                }
            }
            Notice::Attention => {
                let (Some(flag), Some(main)) = (word(memory, address, 4), shared.attention.get()) else { return };
                flag.store(1, Ordering::SeqCst);
                let _ = main.signal_used_queue();
                count(&shared.counters.attentions);
                note(memory, address, 12, &shared.counters.attentions);
            }
        }
    }

    /// The guard looks.
    pub fn expired(&mut self, shared: &Shared, memory: &Memory, vrings: &[Vring]) {
        let mut expirations = [0; 8];
        let _ = rustix::io::read(self.guard.as_fd(), &mut expirations);
        let woken = std::mem::take(&mut self.woken);
        let address = shared.vcpus.get(self.channel as usize).map_or(0, |word| word.load(Ordering::Acquire));
        if address == 0 {
            return self.watch(false);
        }
        if word(memory, address, 0).is_some_and(|state| state.load(Ordering::SeqCst) == ONTIME_VCPU_WOKEN) {
            self.wake(vrings);
            count(&shared.counters.rewakes);
        } else if !woken {
            self.watch(false);
        }
    }

    fn wake(&self, vrings: &[Vring]) {
        if let Some(vring) = vrings.first() {
            let _ = vring.signal_used_queue();
        }
    }

    /// Has the guard look each GUARD, or never. While wake-ups follow each other it is left running: they cost no call.
    fn watch(&mut self, wanted: bool) {
        if self.guarding == wanted {
            return;
        }
        let every = Timespec { tv_sec: 0, tv_nsec: if wanted { GUARD.as_nanos() as _ } else { 0 } };
        let spec = Itimerspec { it_interval: every, it_value: every };
        if rustix::time::timerfd_settime(self.guard.as_fd(), TimerfdTimerFlags::empty(), &spec).is_ok() {
            self.guarding = wanted;
        }
    }
}

/// Whether a vCPU word may lie there.
pub fn word_fits(memory: &Memory, address: u64) -> bool {
    address % size_of::<ontime_vcpu>() as u64 == 0
        && memory.check_range(GuestAddress(address), size_of::<ontime_vcpu>())
}

/// A field of `ontime_vcpu`. None where the guest's memory changed since it was named.
fn word(memory: &Memory, address: u64, offset: u64) -> Option<&AtomicU32> {
    let slice = memory.get_slice(GuestAddress(address + offset), 4).ok()?;
    let at = slice.ptr_guard_mut().as_ptr().cast::<u32>();
    // SAFETY: 4 bytes of mapped guest memory, aligned (the word's address is a multiple of 64), valid as long as `memory` is
    // borrowed; everybody accesses them by atomic instructions only.
    at.is_aligned().then(|| unsafe { AtomicU32::from_ptr(at) })
}

/// Shows a counter to the guest.
fn note(memory: &Memory, address: u64, offset: u64, counter: &AtomicU64) {
    if let Some(field) = word(memory, address, offset) {
        field.store(counter.load(Ordering::Relaxed) as u32, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_more_urgent_waiter_interrupts_and_no_other() {
        let run = |prio: u32| ONTIME_VCPU_RUN | prio << ONTIME_VCPU_PRIO_SHIFT;
        assert_eq!(rule(ONTIME_VCPU_HALTING, 0), Notice::Wake);
        assert_eq!(rule(ONTIME_VCPU_WOKEN, 99), Notice::Nothing);
        assert_eq!(rule(ONTIME_VCPU_LOOKING, 99), Notice::Nothing);
        assert_eq!(rule(run(10), 10), Notice::Nothing, "first in, first out");
        assert_eq!(rule(run(10), 9), Notice::Nothing);
        assert_eq!(rule(run(10), 11), Notice::Attention);
        assert_eq!(rule(run(0), 1), Notice::Attention);
        assert_eq!(rule(run(0), 0), Notice::Attention, "no FIFO among normal threads");
    }

    #[test]
    fn a_word_lies_aligned_in_guest_memory() {
        let memory = Memory::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
        assert!(word_fits(&memory, 0xfc0));
        assert!(!word_fits(&memory, 0xfc4) && !word_fits(&memory, 0x1000) && !word_fits(&memory, u64::MAX - 63));
    }
}
