//! A channel's real-time thread, `ontime-sock/N`, SCHED_FIFO at the VM's configured priority. It waits for events and
//! runs the engine. It owns everything that it gets at its start and does not allocate afterwards.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use crate::channel_calls::ChannelCalls;
use crate::engine::{BELL_EVENT, Engine};
use crate::shared::Shared;
use crate::vring::Vring;
use crate::wait::Events;

/// State of a channel's thread before it starts.
pub(crate) struct Channel {
    shared: Arc<Shared>,
    channel: u32,
    calls: ChannelCalls,
}

/// The running thread. Dropping this value ends the thread.
pub(crate) struct Running {
    shared: Arc<Shared>,
    channel: u32,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Channel {
    /// The channel of this number.
    ///
    /// # Errors
    /// The errno of duplicating the bell.
    pub(crate) fn new(shared: Arc<Shared>, channel: u32, mut engine: Engine) -> io::Result<Self> {
        engine.sockets.wait.doorbell(BELL_EVENT, shared.mail.copy_of_bell(channel)?);
        Ok(Self { shared, channel, calls: ChannelCalls::new(engine) })
    }

    /// Starts the thread for these rings. [`Shared::busy_counter`] of the channel counts its turns.
    ///
    /// # Errors
    /// If the thread cannot be created.
    pub(crate) fn start(self, vrings: Vec<Vring>) -> io::Result<Running> {
        let (shared, channel) = (self.shared.clone(), self.channel);
        let ended = Arc::new(AtomicBool::new(false));
        let told = ended.clone();
        let thread = std::thread::Builder::new().spawn(move || self.run(&vrings, &told))?;
        Ok(Running { shared, channel, ended, thread: Some(thread) })
    }

    fn run(mut self, vrings: &[Vring], ended: &AtomicBool) {
        let shared = self.shared.clone();
        let busy = shared.busy_counter(self.channel);
        let mut events = Events::default();
        self.calls.engine.sockets.wait.begin();
        place(&self.shared.name, self.channel, self.shared.vm.priority);
        while !ended.load(Ordering::Acquire) {
            if let Err(error) = self.calls.engine.sockets.wait.wait(&mut events) {
                tracing::error!(
                    vm = self.shared.name,
                    channel = self.channel,
                    "calls of this channel are not served any more: waiting for them failed: {error}; restart the VM"
                );
                return;
            }
            busy.inspect(|busy| busy.toggle());
            for event in events.iter() {
                if event.number == BELL_EVENT {
                    self.take_doorbells(vrings);
                }
                self.calls.handle(event.number, event.ready, vrings);
            }
            busy.inspect(|busy| busy.toggle());
        }
    }

    /// Watches the doorbells that were handed over.
    fn take_doorbells(&mut self, vrings: &[Vring]) {
        for (number, vring) in vrings.iter().enumerate() {
            if let Some(doorbell) = vring.take_doorbell() {
                self.calls.engine.sockets.wait.doorbell(number as u16, doorbell);
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        self.shared.mail.ring(self.channel);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Sets the calling thread's policy and priority. If RLIMIT_RTPRIO does not allow it, logs a warning and continues.
fn place(name: &str, channel: u32, priority: i32) {
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: one valid sched_param; 0 is the calling thread.
    if unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, &raw const parameters) } != 0
    {
        let error = io::Error::last_os_error();
        tracing::warn!(
            vm = name,
            channel,
            priority,
            "cannot run at SCHED_FIFO: {error}; raise LimitRTPRIO= of the unit, or lower `priority` in sockets.toml"
        );
    }
    // Set the name after the priority: the daemon limits the thread to the VM's cap when it learns of the name.
    let comm = std::ffi::CString::new(format!("ontime-sock/{channel}")).unwrap_or_default();
    // SAFETY: a valid C string, of which the kernel copies 16 bytes.
    let _ = unsafe { libc::prctl(libc::PR_SET_NAME, comm.as_ptr()) };
}
