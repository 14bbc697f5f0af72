//! What the threads of one VM's device tell each other: between the worker and each channel a ring each way, of one
//! producer and one consumer, and a bell for each thread.
//!
//! The rings are wait-free: a real-time thread takes what is there and goes on, also where the worker is preempted in
//! the middle of an order. (The receiver of `std::sync::mpsc` spins until a sender that has taken a place has filled
//! it.)

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use rtrb::{Consumer, Producer, RingBuffer};
use vmm_sys_util::eventfd::EventFd;

use crate::abi::Errno;
use crate::room::Room;
use crate::shared::QUEUE_MAX;
use crate::status::SocketStatus;

/// Messages to a thread that are not taken yet.
pub const ROOM: usize = 2 * QUEUE_MAX;

/// From the worker to a channel.
#[derive(Debug)]
pub enum Order {
    /// This socket is yours.
    Adopt { index: u32 },
    /// A call of the worker may have changed how ready this socket is; there is no edge for that.
    Look { index: u32 },
    /// Let go of the socket of this id, if it is still yours, and say so. `force` ends the calls that wait on it.
    Release { id: u32, ticket: u32, force: bool },
    /// Forget every socket, the guest's driver was reset, and say so.
    Forget { ticket: u32 },
}

/// From a channel to the worker: let go of (or not: EBUSY; EBADF where the channel has closed it).
#[derive(Debug)]
pub struct Released {
    /// The order's.
    pub ticket: u32,
    /// How it went.
    pub result: Result<(), Errno>,
}

/// From the status thread to the worker: tell about the sockets.
pub type Ask = SyncSender<Vec<SocketStatus>>;

/// A channel's end, for its real-time thread.
#[derive(Debug)]
pub struct ChannelEnd {
    /// What it is told.
    pub orders: Consumer<Order>,
    /// Its answers.
    pub released: Producer<Released>,
}

/// The worker's end of one channel.
#[derive(Debug)]
pub struct WorkerEnd {
    /// What the channel is told.
    pub orders: Producer<Order>,
    /// Its answers.
    pub released: Consumer<Released>,
}

/// All that the worker is told.
#[derive(Debug)]
pub struct WorkerEnds {
    /// By channel, from 1 on.
    pub channels: Vec<WorkerEnd>,
    /// Who wants to know of the sockets.
    pub asked: Receiver<Ask>,
}

/// See above. The ends lie here until their threads take them.
pub struct Mail {
    bells: Vec<EventFd>,
    /// By channel: the worker waits for room in its ring.
    awaited: Vec<Room>,
    ask: SyncSender<Ask>,
    worker: Mutex<Option<WorkerEnds>>,
    channels: Vec<Mutex<Option<ChannelEnd>>>,
}

impl Mail {
    /// Between the worker and so many channels.
    ///
    /// # Errors
    /// Where no event descriptor can be made.
    pub fn new(channels: u32) -> std::io::Result<Self> {
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

    /// How many threads have a bell: the worker, and one a channel.
    pub fn threads(&self) -> u32 {
        self.bells.len() as u32
    }

    /// Wakes a channel's thread; 0 is the worker.
    pub fn ring(&self, channel: u32) {
        // Full (2^64 - 2 rings) means it is being woken anyway.
        let _ = self.bells.get(channel as usize).map(|bell| bell.write(1));
    }

    /// The worker wants to know of room in a channel's ring, and tries once more after this.
    pub fn await_room(&self, channel: u32) {
        if let Some(room) = self.awaited.get(channel as usize) {
            room.wait();
        }
    }

    /// The channel's thread took orders: wakes the worker if that waits for room.
    pub fn made_room(&self, channel: u32) {
        if self.awaited.get(channel as usize).is_some_and(Room::made) {
            self.ring(0);
        }
    }

    /// What the thread waits on.
    pub fn bell(&self, channel: u32) -> RawFd {
        self.bells.get(channel as usize).map_or(-1, AsRawFd::as_raw_fd)
    }

    /// The same, of its own.
    ///
    /// # Errors
    /// The kernel's.
    pub fn copy_of_bell(&self, channel: u32) -> std::io::Result<OwnedFd> {
        // SAFETY: it is open as long as `self` is.
        let bell = self.bells.get(channel as usize).map(|bell| unsafe { BorrowedFd::borrow_raw(bell.as_raw_fd()) });
        bell.ok_or(std::io::ErrorKind::NotFound)?.try_clone_to_owned()
    }

    /// Has the worker tell about the sockets.
    ///
    /// # Errors
    /// EAGAIN where too many ask, or the worker is gone.
    pub fn ask(&self, answer: Ask) -> Result<(), Errno> {
        self.ask.try_send(answer).map_err(|_| Errno(libc::EAGAIN))?;
        self.ring(0);
        Ok(())
    }

    /// The worker's ends, once.
    pub fn take_worker(&self) -> Option<WorkerEnds> {
        self.worker.lock().ok()?.take()
    }

    /// A channel's end, once.
    pub fn take_channel(&self, channel: u32) -> Option<ChannelEnd> {
        self.channels.get(channel.checked_sub(1)? as usize)?.lock().ok()?.take()
    }
}
