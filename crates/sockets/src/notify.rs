//! Whether a channel's vCPU is woken, interrupted or left alone (docs/reference/device.md, "The vCPU word and
//! notifications").

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use vhost_user_backend::VringT;
use vm_memory::{GuestAddress, GuestMemoryBackend};

use crate::abi::*;
use crate::counters::count;
use crate::memory::Memory;
use crate::shared::Shared;
use crate::vring::Vring;

/// The notification that a vCPU needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Notice {
    /// Exchange HALTING for WOKEN, then notify.
    Wake,
    /// Interrupt the vCPU through main's vector.
    Attention,
    /// None: the vCPU polls its queues by itself.
    Nothing,
}

/// The rule (pure), from the vCPU's state and the priority of the most urgent waiting thread.
pub(crate) fn rule(state: u32, waiter: u16) -> Notice {
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

/// Sends a channel's notifications.
pub(crate) struct Notifier {
    channel: u32,
}

impl Notifier {
    /// The notifier of a channel.
    pub(crate) fn new(channel: u32) -> Self {
        Self { channel }
    }

    /// Notifies the guest that buffers of the queues marked in `used` were used. `waiter`: the highest priority of the
    /// threads that wait for them.
    pub(crate) fn used(&self, shared: &Shared, memory: &Memory, vrings: &[Vring], used: [bool; 2], waiter: u16) {
        let address = shared.vcpu(self.channel);
        if address == 0 {
            for (vring, _) in vrings.iter().zip(used).filter(|(_, used)| *used) {
                // Notify if the ring is unreadable: an additional notification does no harm.
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
                // If the state changed meanwhile, the vCPU has continued by itself and polls the queues before it runs
                // a thread (step 2).
                let halted = state.compare_exchange(seen, ONTIME_VCPU_WOKEN, Ordering::SeqCst, Ordering::Relaxed);
                if halted.is_ok() {
                    wake(vrings);
                    count(&shared.counters.wakes);
                    note(memory, address, 8, &shared.counters.wakes);
                    shared.guard.woken(self.channel);
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

    /// Sends a wake-up again if the guard requests it.
    pub(crate) fn again(&self, shared: &Shared, memory: &Memory, vrings: &[Vring]) {
        if shared.guard.asked(self.channel) && woken(memory, shared.vcpu(self.channel)) {
            wake(vrings);
            count(&shared.counters.rewakes);
        }
    }
}

fn wake(vrings: &[Vring]) {
    if let Some(vring) = vrings.first() {
        let _ = vring.signal_used_queue();
    }
}

/// Whether the vCPU with this word was sent a wake-up that has had no effect yet.
pub(crate) fn woken(memory: &Memory, address: u64) -> bool {
    address != 0 && word(memory, address, 0).is_some_and(|state| state.load(Ordering::SeqCst) == ONTIME_VCPU_WOKEN)
}

/// Whether a vCPU word may be at this address.
pub(crate) fn word_fits(memory: &Memory, address: u64) -> bool {
    address % size_of::<ontime_vcpu>() as u64 == 0
        && memory.check_range(GuestAddress(address), size_of::<ontime_vcpu>())
}

/// A field of `ontime_vcpu`. None if the guest's memory map changed since the word was named.
fn word(memory: &Memory, address: u64, offset: u64) -> Option<&AtomicU32> {
    let slice = memory.get_slice(GuestAddress(address + offset), 4).ok()?;
    let at = slice.ptr_guard_mut().as_ptr().cast::<u32>();
    // SAFETY: 4 bytes of mapped guest memory, aligned (the word's address is a multiple of 64), valid as long as
    // `memory` is borrowed. All accesses, also the guest's, are atomic.
    at.is_aligned().then(|| unsafe { AtomicU32::from_ptr(at) })
}

/// Publishes a counter to the guest.
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
