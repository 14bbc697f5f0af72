//! A virtio device of a VM: the callbacks for vhost-user-backend, and the queues of each thread.
//!
//! | device | thread | queues | runs |
//! |---|---|---|---|
//! | main | 0 | call, event | the worker |
//! | main | 1 | control | vCPU words, deadline bandwidth |
//! | channel | 0 | | hands the doorbells to the channel's own thread (`channel`), which serves both queues |

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::VhostUserBackend;
use vm_memory::{ByteValued, GuestMemoryAtomic};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{EventConsumer, EventFlag, EventNotifier, new_event_consumer_and_notifier};

use crate::abi::*;
use crate::busy_counter::BusyCounter;
use crate::channel::{Channel, Running};
use crate::control_queue::ControlQueue;
use crate::engine::Engine;
use crate::limits::QUEUE_MAX;
use crate::memory::Memory;
use crate::owned_sockets::SOCKET_EVENTS;
use crate::shared::Shared;
use crate::vring::Vring;
use crate::wait::{Ring, Wait};
use crate::worker::Worker;

/// virtio's own feature bits (virtio 1.2, section 6).
const INDIRECT_DESC: u64 = 1 << 28;
const EVENT_IDX: u64 = 1 << 29;
const VERSION_1: u64 = 1 << 32;

/// Timeout for the threads when a ring is stopped.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the device's threads run. Each lock is taken by one thread only, except before that thread starts.
#[allow(clippy::large_enum_variant, reason = "there is one a device")]
enum Threads {
    Main { worker: Mutex<Worker>, control: Mutex<ControlQueue> },
    Channel { epoll: OnceLock<RawFd>, made: Mutex<Option<Channel>>, running: OnceLock<Running> },
}

/// A virtio device.
pub(crate) struct Device {
    shared: Arc<Shared>,
    channel: u32,
    threads: Threads,
    /// Turns of the control queue's thread; those of the first threads are in [`Shared`].
    control: BusyCounter,
    /// By thread: its queues, after its first event.
    rings: [OnceLock<Vec<Vring>>; 2],
}

impl Device {
    /// The device of a channel; 0 is main. A channel waits by `ring` if it is given.
    ///
    /// # Errors
    /// If a descriptor cannot be created.
    pub(crate) fn new(
        shared: Arc<Shared>,
        channel: u32,
        memory: GuestMemoryAtomic<Memory>,
        ring: Option<Ring>,
    ) -> std::io::Result<Self> {
        let threads = if channel == 0 {
            let control = Mutex::new(ControlQueue::new(shared.clone(), memory.clone()));
            Threads::Main { worker: Mutex::new(Worker::new(shared.clone(), memory)), control }
        } else {
            let wait = Wait::new(ring, usize::from(SOCKET_EVENTS) + shared.table.len())?;
            let engine = Engine::new(shared.clone(), channel, memory, wait);
            let made = Channel::new(shared.clone(), channel, engine)?;
            Threads::Channel { epoll: OnceLock::new(), made: Mutex::new(Some(made)), running: OnceLock::new() }
        };
        Ok(Self { shared, channel, threads, control: BusyCounter::default(), rings: Default::default() })
    }

    /// Sets the epoll of the first thread. The worker also waits for its sockets with it.
    ///
    /// # Errors
    /// The errno of epoll_ctl(2).
    pub(crate) fn attach(&self, epoll: RawFd) -> std::io::Result<()> {
        let attached = match &self.threads {
            Threads::Main { worker, .. } => worker.lock().map(|mut worker| worker.attach(epoll)).ok(),
            Threads::Channel { epoll: place, .. } => place.set(epoll).map(Ok).ok(),
        };
        attached.unwrap_or(Err(Errno(libc::EINVAL))).map_err(|error| std::io::Error::from_raw_os_error(error.0))
    }

    fn busy_counter(&self, thread: usize) -> Option<&BusyCounter> {
        if thread == 0 { self.shared.busy_counter(self.channel) } else { Some(&self.control) }
    }

    fn handle(&self, event: u16, events: EventSet, vrings: &[Vring], thread: usize) -> std::io::Result<()> {
        self.rings.get(thread).map(|rings| rings.get_or_init(|| vrings.to_vec()));
        // A poisoned lock means that its thread panicked: the process ends.
        match (&self.threads, thread) {
            (Threads::Main { worker, .. }, 0) => {
                if let Ok(mut worker) = worker.lock() {
                    self.turn(thread, || worker.handle(event, events.bits(), vrings));
                }
            }
            (Threads::Main { control, .. }, _) => {
                if let (Ok(mut control), [vring]) = (control.lock(), vrings) {
                    self.turn(thread, || control.handle(vring));
                }
            }
            (Threads::Channel { epoll, made, running }, _) => {
                if let (Some(vring), Some(epoll)) = (vrings.get(usize::from(event)), epoll.get()) {
                    vring.hand_over(*epoll);
                }
                let made = made.lock().ok().and_then(|mut made| made.take());
                if let Some(made) = made {
                    let _ = running.set(made.start(vrings.to_vec())?);
                }
                self.shared.mail.ring(self.channel);
            }
        }
        Ok(())
    }

    fn turn(&self, thread: usize, work: impl FnOnce()) {
        let busy = self.busy_counter(thread);
        busy.inspect(|busy| busy.toggle());
        work();
        busy.inspect(|busy| busy.toggle());
    }
}

impl VhostUserBackend for Device {
    type Bitmap = ();
    type Vring = Vring;

    fn num_queues(&self) -> usize {
        match self.threads {
            Threads::Main { .. } => ONTIME_VQS_MAIN as usize,
            Threads::Channel { .. } => ONTIME_VQS_CHANNEL as usize,
        }
    }

    fn max_queue_size(&self) -> usize {
        QUEUE_MAX
    }

    fn features(&self) -> u64 {
        let own = 1 << ONTIME_F_SOCKETS | 1 << ONTIME_F_CHANNELS | 1 << ONTIME_F_HINTS | 1 << ONTIME_F_LOCAL;
        let is_main = matches!(self.threads, Threads::Main { .. });
        let main = u64::from(is_main && self.shared.vm.deadlines) << ONTIME_F_DEADLINE;
        own | main | INDIRECT_DESC | EVENT_IDX | VERSION_1 | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::MQ | VhostUserProtocolFeatures::REPLY_ACK
    }

    fn set_event_idx(&self, _enabled: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        // A driver that reads the configuration while the rings are stopped is about to set them up.
        self.rings.iter().filter_map(OnceLock::get).flatten().for_each(Vring::probed);
        let config = self.shared.config(self.channel);
        let mut bytes = config.as_slice().to_vec();
        // QEMU may read beyond the end, because its own config_size decides: fill with zeros.
        bytes.resize(bytes.len().max(offset as usize + (size as usize).min(4096)), 0);
        bytes.get(offset as usize..offset as usize + (size as usize).min(4096)).unwrap_or_default().to_vec()
    }

    fn update_memory(&self, _memory: GuestMemoryAtomic<Memory>) -> std::io::Result<()> {
        Ok(())
    }

    fn queues_per_thread(&self) -> Vec<u64> {
        match self.threads {
            Threads::Main { .. } => vec![0b011, 0b100],
            Threads::Channel { .. } => vec![0b11],
        }
    }

    fn exit_event(&self, _thread: usize) -> Option<(EventConsumer, EventNotifier)> {
        new_event_consumer_and_notifier(EventFlag::NONBLOCK | EventFlag::CLOEXEC).ok()
    }

    /// The ring is already marked as stopped, so no thread starts to use it. Waits for a turn in progress before the
    /// VMM is told that the ring is stopped.
    fn stop_vring(&self, index: u32) -> std::io::Result<()> {
        let serves = |queues: &u64| queues >> index & 1 == 1;
        let thread = self.queues_per_thread().iter().position(serves);
        if !thread.and_then(|thread| self.busy_counter(thread)).is_none_or(|busy| busy.wait_idle(PATIENCE)) {
            let channel = self.channel;
            tracing::warn!(
                vm = self.shared.name,
                channel,
                index,
                "a ring is stopped though a thread may still use it; if sockets of this channel fail afterwards, \
                 restart the VM"
            );
        }
        Ok(())
    }

    fn handle_event(&self, event: u16, events: EventSet, vrings: &[Vring], thread: usize) -> std::io::Result<()> {
        self.handle(event, events, vrings, thread)
    }
}
