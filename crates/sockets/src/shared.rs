//! What the threads of one VM's device share: the table, the policy, counters, mail, and the vCPU words' places.

use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ontime_sched::Ledger;

use crate::abi::{
    Errno, ONTIME_MAGIC, ONTIME_ROLE_CHANNEL, ONTIME_ROLE_MAIN, ONTIME_VERSION, ONTIME_WAKE_IDLE,
    ONTIME_WAKE_INTERRUPT, ontime_config, ontime_vcpu,
};
use crate::closing::Closing;
use crate::config::{Vm, Wake};
use crate::deadlines::Deadlines;
use crate::guard::Guard;
use crate::host;
use crate::mail::Mail;
use crate::table::Table;
use crate::turns::Turns;
use crate::vring::Vring;

/// The largest virtqueue, entries.
pub const QUEUE_MAX: usize = 256;
/// Bytes of data of one call, in each direction.
pub const DATA_MAX: u32 = 1 << 20;
/// Descriptors of one call on main's queue, both directions together: 1,024 of data (IOV_MAX), and the headers'.
pub const SEGMENTS_MAIN: u32 = 1024 + 4;
/// Descriptors of one call on a channel's queue.
pub const SEGMENTS_CHANNEL: u32 = 64;

/// How long a channel's thread may be at it with a vCPU word that is taken back. Shorter than the driver's patience.
const PATIENCE: Duration = Duration::from_secs(2);

/// Bits of a vCPU word's address that are 0.
const VCPU_COUNT: u64 = size_of::<ontime_vcpu>() as u64 - 1;

/// Counts, by what was refused or done.
#[derive(Debug, Default)]
pub struct Counters {
    /// Calls executed.
    pub calls: AtomicU64,
    /// Calls that were malformed.
    pub malformed: AtomicU64,
    /// Binds the policy refused.
    pub refused_bind: AtomicU64,
    /// Connects, sends and joins the policy refused.
    pub refused_reach: AtomicU64,
    /// Options that are not passed.
    pub refused_option: AtomicU64,
    /// Beyond a limit: sockets or waiting calls.
    pub refused_limit: AtomicU64,
    /// Connections that were reset at their close: too many that were closed are not gone.
    pub reset_limit: AtomicU64,
    /// Sockets of the guest that stayed with its own stack because the last ones are kept for its root, as it says.
    pub stayed_local: AtomicU64,
    /// Wake-ups sent to halted vCPUs.
    pub wakes: AtomicU64,
    /// Wake-ups sent again by the guard.
    pub rewakes: AtomicU64,
    /// Interrupts sent because a more urgent thread waits.
    pub attentions: AtomicU64,
    /// Changes of deadline bandwidth.
    pub deadlines: AtomicU64,
    /// Of those, how many the host refused.
    pub refused_deadlines: AtomicU64,
}

/// Adds one.
pub fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Shared by the threads of one VM's device.
pub struct Shared {
    /// The VM's name.
    pub name: String,
    /// What the administrator says about it.
    pub vm: Vm,
    /// Its sockets.
    pub table: Table,
    /// Connections that were closed and are not gone.
    pub closing: Closing,
    /// Whether the host has IPv6 ([`crate::held::Held`]).
    pub ipv6: bool,
    /// Counts.
    pub counters: Counters,
    /// Bandwidth of the guest's deadline tasks.
    pub deadlines: Deadlines,
    /// Between the threads.
    pub mail: Mail,
    /// Over wake-ups.
    pub guard: Guard,
    /// By channel, see [`Shared::vcpu_named`].
    vcpus: Vec<AtomicU64>,
    /// By channel, 0 is the worker: of the threads that use what is named there.
    turns: Vec<Turns>,
    /// Main's control queue, whose notification is main's vector: set when the guest names a vCPU word.
    pub attention: OnceLock<Vring>,
    generation: u64,
}

impl Shared {
    /// For a VM; by the ledger it takes bandwidth that it is offered.
    ///
    /// # Errors
    /// Where no event descriptor can be made.
    pub fn new(name: &str, vm: Vm, generation: u64, ledger: Option<Ledger>) -> std::io::Result<Self> {
        let mail = Mail::new(vm.channels)?;
        Ok(Self {
            name: name.to_owned(),
            table: Table::new(vm.policy.limits.sockets),
            closing: Closing::new(vm.policy.limits.sockets),
            ipv6: true,
            vcpus: (0..=vm.channels).map(|_| AtomicU64::new(0)).collect(),
            turns: (0..=vm.channels).map(|_| Turns::default()).collect(),
            guard: Guard::new(vm.channels),
            vm,
            counters: Counters::default(),
            deadlines: Deadlines::new(ledger),
            mail,
            attention: OnceLock::new(),
            generation,
        })
    }

    /// Guest-physical address of a channel's `ontime_vcpu`, 0 for none.
    pub fn vcpu(&self, channel: u32) -> u64 {
        self.vcpu_named(channel) & !VCPU_COUNT
    }

    /// The same, and in the low bits, which are 0 in such an address, how often one was named: a new driver's word may
    /// lie where the old one's did.
    pub fn vcpu_named(&self, channel: u32) -> u64 {
        self.vcpus.get(channel as usize).map_or(0, |word| word.load(Ordering::SeqCst))
    }

    /// Names a channel's `ontime_vcpu`, or takes it back (0). When this returns the channel's thread, which takes note
    /// of it, uses the word before no more: it may be freed. For the control queue's thread only.
    ///
    /// # Errors
    /// EBUSY where the thread is at it for longer than [`PATIENCE`], kept from running by others: it has no word from
    /// then on, and may still write to the one before.
    pub fn name_vcpu(&self, channel: u32, address: u64) -> Result<(), Errno> {
        let (Some(word), Some(turns)) = (self.vcpus.get(channel as usize), self.turns(channel)) else { return Ok(()) };
        let count = word.load(Ordering::Relaxed).wrapping_add(1) & VCPU_COUNT;
        word.store(count, Ordering::SeqCst);
        if !turns.wait(PATIENCE) {
            return Err(Errno(libc::EBUSY));
        }
        word.store(address | count, Ordering::SeqCst);
        self.mail.ring(channel);
        Ok(())
    }

    /// Of the first thread of a channel's device.
    pub fn turns(&self, channel: u32) -> Option<&Turns> {
        self.turns.get(channel as usize)
    }

    /// Takes a word back, unless another one was named since it was `seen`: for the channel's thread, whose driver is
    /// gone.
    pub fn drop_vcpu(&self, channel: u32, seen: u64) {
        if let Some(word) = self.vcpus.get(channel as usize) {
            let _ = word.compare_exchange(seen, seen & VCPU_COUNT, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Leaves a connection whose end was sent to the thread that closes it; one that finds no place is reset, if the
    /// kernel has something left to send.
    pub fn leave(&self, fd: RawFd) {
        if self.closing.put(fd) {
            return;
        }
        if crate::closing::leaves_an_orphan(host::tcp_state(fd)) {
            count(&self.counters.reset_limit);
            host::abort_at_close(fd);
        }
        crate::closing::end(fd);
    }

    /// How many channels there are, main's included.
    pub fn channels(&self) -> u32 {
        self.mail.threads()
    }

    /// Differs after each start of the process.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Descriptors of one call of a channel.
    pub fn segments(channel: u32) -> u32 {
        if channel == 0 { SEGMENTS_MAIN } else { SEGMENTS_CHANNEL }
    }

    /// The configuration space of a channel's device.
    pub fn config(&self, channel: u32) -> ontime_config {
        ontime_config {
            magic: ONTIME_MAGIC,
            version: ONTIME_VERSION,
            generation: self.generation,
            role: if channel == 0 { ONTIME_ROLE_MAIN } else { ONTIME_ROLE_CHANNEL },
            channel,
            channels: self.channels(),
            wake: if self.vm.wake == Wake::Idle && channel > 0 { ONTIME_WAKE_IDLE } else { ONTIME_WAKE_INTERRUPT },
            sockets_max: self.table.len() as u32,
            calls_max: QUEUE_MAX as u32,
            segments_max: Self::segments(channel),
            data_max: DATA_MAX,
            reserved: [0; 4],
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    use super::*;

    /// The guest frees a word when it is told that the device has given it back.
    #[test]
    fn a_word_is_given_back_when_nobody_writes_to_it_any_more() {
        let vm = Vm { channels: 1, ..Vm::default() };
        let shared = Arc::new(Shared::new("a", vm, 1, None).unwrap());
        let word = 0x1000;
        shared.name_vcpu(1, word).unwrap();
        let turns = shared.turns(1).unwrap();
        // The channel's thread is about to notify.
        turns.turn();
        assert_eq!(shared.vcpu(1), word);
        let (tell, told) = channel();
        let other = shared.clone();
        let control = std::thread::spawn(move || tell.send(other.name_vcpu(1, 0)));
        assert!(told.recv_timeout(Duration::from_millis(100)).is_err(), "it may still be written to");
        turns.turn();
        assert_eq!(told.recv_timeout(Duration::from_secs(10)), Ok(Ok(())));
        control.join().unwrap().unwrap();
        assert_eq!(shared.vcpu(1), 0);
        // One that does not come to its end: the guest is told, and nothing is named.
        turns.turn();
        assert_eq!(shared.name_vcpu(1, word), Err(Errno(libc::EBUSY)));
        assert_eq!(shared.vcpu(1), 0);
    }
}
