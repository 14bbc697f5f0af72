//! What the threads of one VM's device share: the table, the policy, counters, inboxes, and the vCPU words' places.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, OnceLock};

use vmm_sys_util::eventfd::EventFd;

use crate::abi::{
    Errno, ONTIME_MAGIC, ONTIME_ROLE_CHANNEL, ONTIME_ROLE_MAIN, ONTIME_VERSION, ONTIME_WAKE_IDLE,
    ONTIME_WAKE_INTERRUPT, ontime_config,
};
use crate::config::{Vm, Wake};
use crate::table::Table;
use crate::vring::Vring;

/// The largest virtqueue, entries.
pub const QUEUE_MAX: usize = 256;
/// Bytes of data of one call, in each direction.
pub const DATA_MAX: u32 = 1 << 20;
/// Descriptors of one call on main's queue: 1,024 of data (IOV_MAX), and the headers'.
pub const SEGMENTS_MAIN: u32 = 1024 + 4;
/// Descriptors of one call on a channel's queue.
pub const SEGMENTS_CHANNEL: u32 = 64;
/// Messages to a thread that are not taken yet.
const INBOX: usize = 2 * QUEUE_MAX;

/// What threads tell each other.
#[derive(Debug)]
pub enum Message {
    /// To a channel: this socket is yours.
    Adopt { index: u32 },
    /// To a channel: a call of the worker may have changed how ready this socket is; there is no edge for that.
    Look { index: u32 },
    /// To a channel: let go of this socket, and say so. `force` ends the calls that wait on it.
    Release { index: u32, ticket: u32, force: bool },
    /// To a channel: forget every socket, the guest's driver was reset.
    Forget { ticket: u32 },
    /// To the worker: let go of (or not: EBUSY).
    Released { ticket: u32, result: Result<(), Errno> },
    /// To the worker: tell about the sockets.
    Status(SyncSender<Vec<crate::status::SocketStatus>>),
}

/// The way to a thread.
pub struct Inbox {
    sender: SyncSender<Message>,
    receiver: Mutex<Option<Receiver<Message>>>,
    bell: EventFd,
}

impl Inbox {
    fn new() -> std::io::Result<Self> {
        let (sender, receiver) = sync_channel(INBOX);
        Ok(Self {
            sender,
            receiver: Mutex::new(Some(receiver)),
            bell: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
        })
    }

    /// Leaves a message, without waiting or allocating.
    ///
    /// # Errors
    /// EAGAIN where the inbox is full or its thread is gone.
    pub fn send(&self, message: Message) -> Result<(), Errno> {
        self.sender.try_send(message).map_err(|_| Errno(libc::EAGAIN))?;
        self.ring();
        Ok(())
    }

    /// Only wakes the thread.
    pub fn ring(&self) {
        // Full (2^64 - 2 rings) means it is being woken anyway.
        let _ = self.bell.write(1);
    }

    /// The thread's own end, once.
    pub fn take(&self) -> Option<Receiver<Message>> {
        self.receiver.lock().ok()?.take()
    }

    /// What to wait on.
    pub fn bell(&self) -> RawFd {
        use std::os::fd::AsRawFd;
        self.bell.as_raw_fd()
    }
}

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
    /// Wake-ups sent to halted vCPUs.
    pub wakes: AtomicU64,
    /// Wake-ups sent again by the guard.
    pub rewakes: AtomicU64,
    /// Interrupts sent because a more urgent thread waits.
    pub attentions: AtomicU64,
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
    /// Counts.
    pub counters: Counters,
    /// By channel: 0 is the worker's.
    pub inboxes: Vec<Inbox>,
    /// By channel: guest-physical address of `ontime_vcpu`, 0 for none.
    pub vcpus: Vec<AtomicU64>,
    /// Main's control queue, whose notification is main's vector: set when the guest names a vCPU word.
    pub attention: OnceLock<Vring>,
    generation: u64,
}

impl Shared {
    /// For a VM.
    ///
    /// # Errors
    /// Where no event descriptor can be made.
    pub fn new(name: &str, vm: Vm, generation: u64) -> std::io::Result<Self> {
        let channels = vm.channels as usize + 1;
        Ok(Self {
            name: name.to_owned(),
            table: Table::new(vm.policy.limits.sockets),
            vm,
            counters: Counters::default(),
            inboxes: (0..channels).map(|_| Inbox::new()).collect::<Result<_, _>>()?,
            vcpus: (0..channels).map(|_| AtomicU64::new(0)).collect(),
            attention: OnceLock::new(),
            generation,
        })
    }

    /// How many channels there are, main's included.
    pub fn channels(&self) -> u32 {
        self.inboxes.len() as u32
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
