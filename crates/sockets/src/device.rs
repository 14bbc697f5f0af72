//! One virtio device of a VM: what vhost-user-backend asks for, and which thread runs what.
//!
//! | device | thread | queues | |
//! |---|---|---|---|
//! | main | 0 | call, event | the worker |
//! | main | 1 | control | vCPU words, deadlines' bandwidth |
//! | channel | 0 | call, event | the engine, SCHED_FIFO |

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, Once};
use std::time::Duration;

use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::VhostUserBackend;
use vm_memory::{ByteValued, GuestMemoryAtomic};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{EventConsumer, EventFlag, EventNotifier, new_event_consumer_and_notifier};

use crate::abi::*;
use crate::control_queue::ControlQueue;
use crate::engine::Engine;
use crate::memory::Memory;
use crate::shared::{QUEUE_MAX, Shared};
use crate::turns::Turns;
use crate::vring::Vring;
use crate::worker::Worker;

/// virtio's own feature bits (virtio 1.2, section 6).
const INDIRECT_DESC: u64 = 1 << 28;
const EVENT_IDX: u64 = 1 << 29;
const VERSION_1: u64 = 1 << 32;

/// How long a ring that is to stop waits for the threads.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the threads of a device run. The locks are each thread's own, but for the moment before it starts.
#[allow(clippy::large_enum_variant, reason = "there is one a device")]
enum Threads {
    Main { worker: Mutex<Worker>, control: Mutex<ControlQueue> },
    Channel { engine: Mutex<Engine>, placed: Once },
}

/// See above.
pub struct Device {
    shared: Arc<Shared>,
    channel: u32,
    threads: Threads,
    /// The control queue's thread's; those of the first threads are shared.
    control: Turns,
}

impl Device {
    /// Of a channel: 0 is main.
    ///
    /// # Errors
    /// Where a descriptor cannot be made.
    pub fn new(shared: Arc<Shared>, channel: u32, memory: GuestMemoryAtomic<Memory>) -> std::io::Result<Self> {
        let threads = if channel == 0 {
            let control = Mutex::new(ControlQueue::new(shared.clone(), memory.clone()));
            Threads::Main { worker: Mutex::new(Worker::new(shared.clone(), memory)?), control }
        } else {
            Threads::Channel { engine: Mutex::new(Engine::new(shared.clone(), channel, memory)?), placed: Once::new() }
        };
        Ok(Self { shared, channel, threads, control: Turns::default() })
    }

    /// Lets the first thread wait for sockets by its epoll.
    ///
    /// # Errors
    /// The kernel's.
    pub fn attach(&self, epoll: RawFd) -> std::io::Result<()> {
        let attached = match &self.threads {
            Threads::Main { worker, .. } => worker.lock().map(|mut worker| worker.engine().attach(epoll)).ok(),
            Threads::Channel { engine, .. } => engine.lock().map(|mut engine| engine.attach(epoll)).ok(),
        };
        attached.unwrap_or(Err(Errno(libc::EINVAL))).map_err(|error| std::io::Error::from_raw_os_error(error.0))
    }

    fn turns(&self, thread: usize) -> Option<&Turns> {
        if thread == 0 { self.shared.turns(self.channel) } else { Some(&self.control) }
    }

    fn handle(&self, event: u16, events: EventSet, vrings: &[Vring], thread: usize) {
        // A poisoned lock means that the thread panicked: it will not come here again.
        match (&self.threads, thread) {
            (Threads::Main { worker, .. }, 0) => {
                if let Ok(mut worker) = worker.lock() {
                    worker.handle(event, events.bits(), vrings);
                }
            }
            (Threads::Main { control, .. }, _) => {
                if let (Ok(mut control), [vring]) = (control.lock(), vrings) {
                    control.handle(vring);
                }
            }
            (Threads::Channel { engine, placed }, _) => {
                placed.call_once(|| place(&self.shared.name, self.channel, self.shared.vm.priority));
                if let Ok(mut engine) = engine.lock() {
                    engine.handle(event, events.bits(), vrings);
                }
            }
        }
    }
}

/// Gives the calling thread its place. Without the right to it (RLIMIT_RTPRIO), it says so and goes on.
fn place(name: &str, channel: u32, priority: i32) {
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: one valid sched_param; 0 is the calling thread.
    if unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, &raw const parameters) } != 0
    {
        let error = std::io::Error::last_os_error();
        tracing::warn!(
            vm = name,
            channel,
            priority,
            "cannot run at SCHED_FIFO: {error}; raise RLIMIT_RTPRIO (LimitRTPRIO=)"
        );
    }
    // After its place: the daemon, which holds it to the VM's cap, hears of the name.
    let comm = std::ffi::CString::new(format!("ontime-sock/{channel}")).unwrap_or_default();
    // SAFETY: a valid string, of which the kernel takes 16 bytes.
    let _ = unsafe { libc::prctl(libc::PR_SET_NAME, comm.as_ptr()) };
}

impl VhostUserBackend for Device {
    type Bitmap = ();
    type Vring = Vring;

    fn num_queues(&self) -> usize {
        (if self.channel == 0 { ONTIME_VQS_MAIN } else { ONTIME_VQS_CHANNEL }) as usize
    }

    fn max_queue_size(&self) -> usize {
        QUEUE_MAX
    }

    fn features(&self) -> u64 {
        let own = 1 << ONTIME_F_SOCKETS | 1 << ONTIME_F_CHANNELS | 1 << ONTIME_F_HINTS;
        let main = u64::from(self.channel == 0 && self.shared.vm.deadlines) << ONTIME_F_DEADLINE;
        own | main | INDIRECT_DESC | EVENT_IDX | VERSION_1 | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::MQ | VhostUserProtocolFeatures::REPLY_ACK
    }

    fn set_event_idx(&self, _enabled: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let config = self.shared.config(self.channel);
        let mut bytes = config.as_slice().to_vec();
        // QEMU may ask for more than there is: its own config_size decides.
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

    /// The ring is marked: no thread begins with it any more. One that is at it ends before the VMM is told that it stands.
    fn stop_vring(&self, index: u32) -> std::io::Result<()> {
        let serves = |queues: &u64| queues >> index & 1 == 1;
        let thread = self.queues_per_thread().iter().position(serves);
        if !thread.and_then(|thread| self.turns(thread)).is_none_or(|turns| turns.wait(PATIENCE)) {
            let channel = self.channel;
            tracing::warn!(vm = self.shared.name, channel, index, "a ring is stopped though a thread may still use it");
        }
        Ok(())
    }

    fn handle_event(&self, event: u16, events: EventSet, vrings: &[Vring], thread: usize) -> std::io::Result<()> {
        let turns = self.turns(thread);
        turns.inspect(|turns| turns.turn());
        self.handle(event, events, vrings, thread);
        turns.inspect(|turns| turns.turn());
        Ok(())
    }
}
