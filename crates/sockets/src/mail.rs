//! Messages between the threads of one VM's device: between the worker and each channel one single-producer,
//! single-consumer ring per direction, and one eventfd (bell) per thread.
//!
//! The rings are wait-free: a real-time thread takes the available messages and continues, even if the worker is
//! preempted while it sends an order. (The receiver of `std::sync::mpsc` spins until a sender that has reserved an
//! entry has filled it.)

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use rtrb::{Consumer, Producer, RingBuffer};
use vmm_sys_util::eventfd::EventFd;

use crate::abi::Errno;
use crate::limits::QUEUE_MAX;
use crate::room::Room;
use crate::status::SocketStatus;

/// Capacity of a ring, messages.
pub(crate) const ROOM: usize = 2 * QUEUE_MAX;

/// From the worker to a channel.
#[derive(Debug)]
pub(crate) enum Order {
    /// Take ownership of this socket.
    Adopt { index: u32 },
    /// Poll this socket again. A call of the worker may have changed its readiness without an edge.
    Look { index: u32 },
    /// Release the socket with this id if this channel still owns it, and answer. `force` ends the calls that wait on
    /// it.
    Release { id: u32, ticket: u32, force: bool },
    /// Release every socket, because the guest's driver was reset, and answer.
    Forget { ticket: u32 },
    /// What another thread of the device does between two orders.
    #[cfg(test)]
    Meanwhile(fn(&crate::shared::Shared)),
}

/// From a channel to the worker: the result of a release. EBUSY: refused; EBADF: the channel has closed the socket.
#[derive(Debug)]
pub(crate) struct Released {
    /// The order's ticket.
    pub ticket: u32,
    pub result: Result<(), Errno>,
}

/// From the status thread to the worker: a request for the list of sockets, as the channel for the answer.
pub(crate) type Ask = SyncSender<Vec<SocketStatus>>;

/// A channel's end, for its real-time thread.
#[derive(Debug)]
pub(crate) struct ChannelEnd {
    /// Orders from the worker.
    pub orders: Consumer<Order>,
    /// Answers to the worker.
    pub released: Producer<Released>,
}

/// The worker's end of one channel.
#[derive(Debug)]
pub(crate) struct WorkerEnd {
    /// Orders to the channel.
    pub orders: Producer<Order>,
    /// Answers from the channel.
    pub released: Consumer<Released>,
}

/// All message sources of the worker.
#[derive(Debug)]
pub(crate) struct WorkerEnds {
    /// By channel, starting with channel 1.
    pub channels: Vec<WorkerEnd>,
    /// Requests for the list of sockets.
    pub asked: Receiver<Ask>,
}

/// The mail of one VM's device. It stores the ends until their threads take them.
pub(crate) struct Mail {
    bells: Vec<EventFd>,
    /// By channel: whether the worker waits for room in the channel's ring.
    awaited: Vec<Room>,
    ask: SyncSender<Ask>,
    worker: Mutex<Option<WorkerEnds>>,
    channels: Vec<Mutex<Option<ChannelEnd>>>,
}

impl Mail {
    /// Mail between the worker and `channels` channels.
    ///
    /// # Errors
    /// The errno of eventfd(2).
    pub(crate) fn new(channels: u32) -> std::io::Result<Self> {
        let bell = |_| EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
        let bells = (0..=channels).map(bell).collect::<Result<_, _>>()?;
        let awaited = (0..=channels).map(|_| Room::new()).collect();
        let (ask, asked) = sync_channel(ROOM);
        let ends = (0..channels).map(|_| {
            let (to_channel, orders) = RingBuffer::new(ROOM);
            let (released, from_channel) = RingBuffer::new(ROOM);
            let worker = WorkerEnd { orders: to_channel, released: from_channel };
            (worker, Mutex::new(Some(ChannelEnd { orders, released })))
        });
        let (worker, channels) = ends.unzip();
        Ok(Self { bells, awaited, ask, worker: Mutex::new(Some(WorkerEnds { channels: worker, asked })), channels })
    }

    /// Number of threads with a bell: the worker and one per channel.
    pub(crate) fn threads(&self) -> u32 {
        self.bells.len() as u32
    }

    /// Wakes a channel's thread; 0 is the worker.
    pub(crate) fn ring(&self, channel: u32) {
        // A full counter (2^64 - 2) means that the thread is being woken anyway.
        let _ = self.bells.get(channel as usize).map(|bell| bell.write(1));
    }

    /// The worker waits for room in a channel's ring. It must try once more after this call.
    pub(crate) fn await_room(&self, channel: u32) {
        if let Some(room) = self.awaited.get(channel as usize) {
            room.wait();
        }
    }

    /// The channel's thread took orders: wakes the worker if the worker waits for room.
    pub(crate) fn made_room(&self, channel: u32) {
        if self.awaited.get(channel as usize).is_some_and(Room::made) {
            self.ring(0);
        }
    }

    /// The thread's eventfd.
    pub(crate) fn bell(&self, channel: u32) -> RawFd {
        self.bells.get(channel as usize).map_or(-1, AsRawFd::as_raw_fd)
    }

    /// A duplicate of the thread's eventfd.
    ///
    /// # Errors
    /// The errno of dup(2), or NotFound.
    pub(crate) fn copy_of_bell(&self, channel: u32) -> std::io::Result<OwnedFd> {
        // SAFETY: the bell is open as long as `self` lives.
        let bell = self.bells.get(channel as usize).map(|bell| unsafe { BorrowedFd::borrow_raw(bell.as_raw_fd()) });
        bell.ok_or(std::io::ErrorKind::NotFound)?.try_clone_to_owned()
    }

    /// Requests the list of sockets from the worker.
    ///
    /// # Errors
    /// EAGAIN if too many requests are pending or the worker has ended.
    pub(crate) fn ask(&self, answer: Ask) -> Result<(), Errno> {
        self.ask.try_send(answer).map_err(|_| Errno(libc::EAGAIN))?;
        self.ring(0);
        Ok(())
    }

    /// Takes the worker's ends; works once.
    pub(crate) fn take_worker(&self) -> Option<WorkerEnds> {
        self.worker.lock().ok()?.take()
    }

    /// Takes a channel's end; works once.
    pub(crate) fn take_channel(&self, channel: u32) -> Option<ChannelEnd> {
        self.channels.get(channel.checked_sub(1)? as usize)?.lock().ok()?.take()
    }
}
