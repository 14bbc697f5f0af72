//! A virtqueue whose doorbell need not be read: vhost-user-backend's queue with an edge-triggered eventfd.
//!
//! vhost-user-backend waits for a ring's eventfd level-triggered, so it must read the eventfd at each doorbell. On a
//! PREEMPT_RT host that read is expensive: the doorbell's wake-up preempts the vCPU thread inside `eventfd_signal`
//! (`fs/eventfd.c`) while it holds the eventfd's lock. The reader then waits for the lock, boosts the vCPU thread's
//! priority, and two more context switches follow. With edge-triggered waiting the counter is never read. A channel's
//! doorbells are handed over to its own thread (`wait`).
//!
//! The type also counts how often the ring was set up anew, which the users of vhost-user-backend cannot see otherwise.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use arc_swap::ArcSwapOption;
use vhost_user_backend::{VringRwLock, VringStateGuard, VringStateMutGuard, VringT};
use virtio_queue::{DescriptorChain, Error, QueueT};
use vm_memory::GuestMemoryAtomic;

use crate::abi::Errno;
use crate::host;
use crate::memory::Memory;

type Inner = VringRwLock<GuestMemoryAtomic<Memory>>;

/// The VMM has enabled the ring.
const ENABLED: u8 = 1;
/// The VMM has made the queue ready.
const READY: u8 = 2;

/// A virtqueue. Clones refer to the same ring.
#[derive(Clone)]
pub(crate) struct Vring {
    inner: Inner,
    /// The eventfd is waited for edge-triggered and not read.
    edge: Arc<AtomicBool>,
    /// [`ENABLED`] and [`READY`], outside the lock because they are checked several times per event.
    up: Arc<AtomicU8>,
    /// How often the ring got another address or another start index.
    set_up: Arc<AtomicU32>,
    /// A driver has probed the device since the ring was stopped.
    probed: Arc<AtomicBool>,
    /// The notification's eventfd, outside the lock: real-time threads notify through main's control ring, whose lock a
    /// thread of normal priority takes.
    call: Arc<ArcSwapOption<File>>,
    /// The doorbell, on its way to the thread that will wait for it.
    doorbell: Arc<Mutex<Option<OwnedFd>>>,
}

impl Vring {
    /// Waits for the doorbell edge-triggered from now on, in this epoll under this number. The waiting thread calls
    /// this after each event; only the first call has an effect.
    pub(crate) fn wait_by_edge(&self, epoll: RawFd, number: u16) {
        if self.edge.load(Ordering::Acquire) {
            return;
        }
        let state = self.inner.get_ref();
        // Set before the epoll change: a thread that registers the eventfd anew meanwhile clears the flag afterwards.
        self.edge.store(true, Ordering::Release);
        let changed = state
            .get_kick()
            .as_ref()
            .map(|kick| host::change(epoll, kick.as_raw_fd(), u64::from(number), libc::EPOLLIN as u32));
        if !matches!(changed, Some(Ok(()))) {
            self.edge.store(false, Ordering::Release);
        }
    }

    /// Hands the doorbell over to another thread and removes it from this epoll. The thread that waits by this epoll
    /// calls this after each event; only the first call has an effect.
    pub(crate) fn hand_over(&self, epoll: RawFd) {
        if self.edge.load(Ordering::Acquire) {
            return;
        }
        let state = self.inner.get_ref();
        // As in `wait_by_edge`.
        self.edge.store(true, Ordering::Release);
        let Some(kick) = state.get_kick().as_ref().map(AsRawFd::as_raw_fd) else { return };
        // SAFETY: the ring's state is locked, so the descriptor is open.
        let copy = unsafe { BorrowedFd::borrow_raw(kick) }.try_clone_to_owned();
        match (copy, self.doorbell.lock()) {
            (Ok(copy), Ok(mut place)) => {
                host::unwatch(epoll, kick);
                *place = Some(copy);
            }
            // The doorbell stays level-triggered and is read.
            _ => self.edge.store(false, Ordering::Release),
        }
    }

    /// The doorbell that [`Self::hand_over`] stored; returned once. Does not wait for a thread that is just storing
    /// one: that thread rings the bell afterwards.
    pub(crate) fn take_doorbell(&self) -> Option<OwnedFd> {
        self.doorbell.try_lock().ok()?.take()
    }

    /// Whether the ring may be accessed.
    pub(crate) fn running(&self) -> bool {
        self.up.load(Ordering::SeqCst) == ENABLED | READY
    }

    /// Sets or clears one of the two bits: cleared before the ring's own state changes, set after it. SeqCst, because
    /// the thread that stops a ring then checks what the other threads do (`busy_counter::BusyCounter`).
    fn note(&self, bit: u8, on: bool, set: impl FnOnce()) {
        if on {
            set();
            self.up.fetch_or(bit, Ordering::SeqCst);
        } else {
            self.up.fetch_and(!bit, Ordering::SeqCst);
            set();
        }
        self.level();
    }

    /// The next chain that the guest offers. None: the queue is empty.
    ///
    /// # Errors
    /// EINVAL for a head beyond the descriptor table, which cannot be put into the used ring.
    pub(crate) fn pop<'a>(&self, memory: &'a Memory) -> Option<Result<DescriptorChain<&'a Memory>, Errno>> {
        let mut state = self.inner.get_mut();
        let queue = state.get_queue_mut();
        let chain = queue.pop_descriptor_chain(memory)?;
        Some(if chain.head_index() < queue.size() { Ok(chain) } else { Err(Errno(libc::EINVAL)) })
    }

    /// How often the driver set up the ring: 0 before the first time, unchanged after a pause. The count does not
    /// change while the ring runs.
    pub(crate) fn set_up(&self) -> u32 {
        self.set_up.load(Ordering::Acquire)
    }

    /// Records that a driver probes the device. A new driver that sets up the ring at index 0 and at the old ring's
    /// address otherwise looks like a paused VM that continues.
    pub(crate) fn probed(&self) {
        if !self.running() {
            self.probed.store(true, Ordering::Release);
        }
    }

    /// Whether the ring runs and was set up anew since `seen`. Updates `seen` if the ring runs.
    pub(crate) fn anew_since(&self, seen: &mut u32) -> bool {
        let now = self.set_up();
        self.running() && std::mem::replace(seen, now) != now
    }

    fn anew(&self) {
        self.set_up.store(self.set_up().wrapping_add(1).max(1), Ordering::Release);
    }

    /// Called where vhost-user-backend registers the eventfd level-triggered afterwards.
    fn level(&self) {
        self.edge.store(false, Ordering::Release);
    }
}

impl<'a> VringStateGuard<'a, GuestMemoryAtomic<Memory>> for Vring {
    type G = <Inner as VringStateGuard<'a, GuestMemoryAtomic<Memory>>>::G;
}

impl<'a> VringStateMutGuard<'a, GuestMemoryAtomic<Memory>> for Vring {
    type G = <Inner as VringStateMutGuard<'a, GuestMemoryAtomic<Memory>>>::G;
}

impl VringT<GuestMemoryAtomic<Memory>> for Vring {
    fn new(memory: GuestMemoryAtomic<Memory>, max_queue_size: u16) -> Result<Self, Error> {
        Ok(Self {
            inner: Inner::new(memory, max_queue_size)?,
            edge: Arc::default(),
            up: Arc::default(),
            set_up: Arc::default(),
            probed: Arc::default(),
            call: Arc::default(),
            doorbell: Arc::default(),
        })
    }

    fn get_ref(&self) -> <Self as VringStateGuard<'_, GuestMemoryAtomic<Memory>>>::G {
        self.inner.get_ref()
    }

    fn get_mut(&self) -> <Self as VringStateMutGuard<'_, GuestMemoryAtomic<Memory>>>::G {
        self.inner.get_mut()
    }

    fn add_used(&self, index: u16, len: u32) -> Result<(), Error> {
        self.inner.add_used(index, len)
    }

    fn signal_used_queue(&self) -> io::Result<()> {
        self.call.load().as_deref().map_or(Ok(()), |mut call| call.write_all(&1u64.to_ne_bytes()))
    }

    fn enable_notification(&self) -> Result<bool, Error> {
        self.inner.enable_notification()
    }

    fn disable_notification(&self) -> Result<(), Error> {
        self.inner.disable_notification()
    }

    fn needs_notification(&self) -> Result<bool, Error> {
        self.inner.needs_notification()
    }

    fn set_enabled(&self, enabled: bool) {
        self.note(ENABLED, enabled, || self.inner.set_enabled(enabled));
    }

    fn set_queue_info(&self, descriptors: u64, available: u64, used: u64) -> Result<(), Error> {
        let moved = descriptors != self.inner.get_ref().get_queue().desc_table();
        if self.probed.swap(false, Ordering::AcqRel) || moved || self.set_up() == 0 {
            self.anew();
        }
        self.inner.set_queue_info(descriptors, available, used)
    }

    fn queue_next_avail(&self) -> u16 {
        self.inner.queue_next_avail()
    }

    fn set_queue_next_avail(&self, base: u16) {
        if base != self.inner.queue_next_avail() {
            self.anew();
        }
        self.inner.set_queue_next_avail(base);
    }

    fn set_queue_next_used(&self, index: u16) {
        self.inner.set_queue_next_used(index);
    }

    fn queue_used_idx(&self) -> Result<u16, Error> {
        self.inner.queue_used_idx()
    }

    fn set_queue_size(&self, size: u16) {
        self.inner.set_queue_size(size);
    }

    fn set_queue_event_idx(&self, enabled: bool) {
        self.inner.set_queue_event_idx(enabled);
    }

    fn set_queue_ready(&self, ready: bool) {
        self.note(READY, ready, || self.inner.set_queue_ready(ready));
    }

    fn set_kick(&self, file: Option<File>) {
        self.inner.set_kick(file);
        self.level();
    }

    fn read_kick(&self) -> io::Result<bool> {
        if self.edge.load(Ordering::Acquire) {
            return Ok(self.inner.get_ref().is_enabled());
        }
        self.inner.read_kick()
    }

    fn set_call(&self, file: Option<File>) {
        self.call.store(file.map(Arc::new));
    }

    fn set_err(&self, file: Option<File>) {
        self.inner.set_err(file);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{FromRawFd, IntoRawFd};
    use std::time::Duration;

    use vmm_sys_util::eventfd::EventFd;

    use super::*;

    #[test]
    fn a_notification_does_not_wait_for_the_rings_lock() {
        let vring = Vring::new(GuestMemoryAtomic::new(Memory::new()), 1).unwrap();
        let event = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let descriptor = event.try_clone().unwrap().into_raw_fd();
        // SAFETY: the descriptor is owned here; the clone has given it up.
        vring.set_call(Some(unsafe { File::from_raw_fd(descriptor) }));
        let (done, waited) = std::sync::mpsc::channel();
        let held = vring.get_mut();
        let ring = vring.clone();
        std::thread::spawn(move || done.send(ring.signal_used_queue()));
        waited.recv_timeout(Duration::from_secs(60)).expect("it waits for the lock").unwrap();
        drop(held);
        assert_eq!(event.read().unwrap(), 1);
        vring.set_call(None);
        vring.signal_used_queue().unwrap();
        assert!(event.read().is_err(), "nobody is to be notified any more");
    }
}
