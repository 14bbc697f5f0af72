//! The watcher thread: sleeps in epoll until a watched thread has used its grain, a pause ends, or an order comes.
//!
//! Runs above every thread it may have to stop, in locked memory, and allocates nothing after its start: slots are opened
//! by the planner's thread and handed over, and handed back to be closed there. It writes no log; what happened is counted in
//! [`Tally`].

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError};

use rustix::event::epoll;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};

use super::account::Share;
use super::place::Place;
use super::reading::Reading;
use super::table::{Action, SlotIndex, Table};

/// What happened to one watched thread; read by others while the watcher writes.
#[derive(Debug, Default)]
pub struct Tally {
    /// Times it was taken off RT priority.
    pub pauses: AtomicU64,
    /// How long it was off RT priority, ns.
    pub paused_ns: AtomicU64,
    /// CPU time seen at RT priority, ns.
    pub ran_ns: AtomicU64,
    /// Whether it is off RT priority now.
    pub paused: AtomicBool,
    /// Times the kernel refused to change its policy.
    pub refused: AtomicU64,
}

/// One watched thread: how to read it, how to place it, what it did.
#[derive(Debug)]
pub struct Slot {
    pub reading: Reading,
    pub place: Place,
    pub share: Share,
    pub cpu: u32,
    pub tally: Arc<Tally>,
    /// When its pause began, ns.
    pub since: u64,
}

/// An order from the planner's thread.
#[derive(Debug)]
pub enum Order {
    /// Watch this thread.
    Watch(SlotIndex, Box<Slot>),
    /// Stop watching; a paused thread gets its place back first.
    Forget(SlotIndex),
    /// Read it at another grain, ns.
    Grain(SlotIndex, u64),
    /// A paused thread was placed by the planner meanwhile: pause it again.
    Reassert,
    /// Answer when every order before this one is done.
    Sync(SyncSender<()>),
    /// Give every paused thread its place back, and end.
    Stop,
}

/// Wakes of the one epoll set that are no slot.
const ORDERS: u64 = u64::MAX;
const EXPIRY: u64 = u64::MAX - 1;
const POLL: u64 = u64::MAX - 2;

/// The descriptors and channels a watcher lives on.
#[derive(Debug)]
pub struct Channels {
    pub orders: Receiver<Order>,
    pub wake: Arc<OwnedFd>,
    pub returned: SyncSender<(SlotIndex, Box<Slot>)>,
}

/// The watcher's state; [`Watcher::run`] is the thread.
#[derive(Debug)]
pub struct Watcher {
    table: Table,
    slots: Vec<Option<Box<Slot>>>,
    channels: Channels,
    epoll: OwnedFd,
    expiry: OwnedFd,
    poll: OwnedFd,
    poll_every: u64,
    polled: usize,
    /// Actions of the charge under way; its capacity is the table's.
    acts: Vec<Action>,
}

/// Now, ns of CLOCK_MONOTONIC.
pub fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (now.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(now.tv_nsec as u64)
}

fn timespec(ns: u64) -> Timespec {
    Timespec { tv_sec: (ns / 1_000_000_000) as i64, tv_nsec: (ns % 1_000_000_000) as _ }
}

impl Watcher {
    /// A watcher of at most `capacity` threads that polls those without perf every `poll_every` ns.
    ///
    /// # Errors
    /// The kernel's, where descriptors run out.
    pub fn new(table: Table, capacity: usize, channels: Channels, poll_every: u64) -> io::Result<Self> {
        let timer = || {
            rustix::time::timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC.union(TimerfdFlags::NONBLOCK))
        };
        let (expiry, poll) = (timer()?, timer()?);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &channels.wake, epoll::EventData::new_u64(ORDERS), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &expiry, epoll::EventData::new_u64(EXPIRY), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &poll, epoll::EventData::new_u64(POLL), epoll::EventFlags::IN)?;
        let mut slots = Vec::new();
        slots.resize_with(capacity, || None);
        let acts = Vec::with_capacity(2 * capacity);
        Ok(Self { table, slots, channels, epoll, expiry, poll, poll_every, polled: 0, acts })
    }

    /// Runs until [`Order::Stop`] or the planner's end of the channel is gone.
    pub fn run(mut self) {
        let mut events =
            [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(ORDERS) }; 64];
        loop {
            let count = match epoll::wait(&self.epoll, events.as_mut_slice(), None) {
                Ok(count) => count,
                Err(rustix::io::Errno::INTR) => continue,
                // Not possible with a valid descriptor; leave everybody at their place rather than spin at high priority.
                Err(_) => break,
            };
            for event in events.iter().take(count) {
                match event.data.u64() {
                    ORDERS => {
                        drain(&self.channels.wake);
                        if !self.obey() {
                            self.release_all();
                            return;
                        }
                    }
                    EXPIRY => drain(&self.expiry),
                    POLL => {
                        drain(&self.poll);
                        self.read_polled();
                    }
                    slot => self.woken(slot as SlotIndex, event.flags),
                }
            }
            self.expire();
        }
        self.release_all();
    }

    /// Carries out the orders that are there. False: end.
    fn obey(&mut self) -> bool {
        loop {
            match self.channels.orders.try_recv() {
                Ok(Order::Watch(index, slot)) => self.watch(index, slot),
                Ok(Order::Forget(index)) => self.forget(index),
                Ok(Order::Grain(index, grain)) => {
                    if let Some(Some(slot)) = self.slots.get(index) {
                        let _ = slot.reading.set_grain(grain);
                    }
                }
                Ok(Order::Reassert) => self.reassert(),
                Ok(Order::Sync(answer)) => {
                    let _ = answer.try_send(());
                }
                Ok(Order::Stop) | Err(TryRecvError::Disconnected) => return false,
                Err(TryRecvError::Empty) => return true,
            }
        }
    }

    fn watch(&mut self, index: SlotIndex, slot: Box<Slot>) {
        self.table.watch(index, slot.share, slot.cpu, now());
        match slot.reading.wakes() {
            Some(fd) => {
                let data = epoll::EventData::new_u64(index as u64);
                if epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN).is_err() {
                    slot.tally.refused.fetch_add(1, Ordering::Relaxed);
                }
            }
            None => {
                self.polled += 1;
                self.arm_poll();
            }
        }
        if let Some(entry) = self.slots.get_mut(index) {
            *entry = Some(slot);
        }
    }

    fn forget(&mut self, index: SlotIndex) {
        let paused = self.table.forget(index);
        let Some(slot) = self.slots.get_mut(index).and_then(Option::take) else { return };
        match slot.reading.wakes() {
            Some(fd) => {
                let _ = epoll::delete(&self.epoll, fd);
            }
            None => {
                self.polled = self.polled.saturating_sub(1);
                self.arm_poll();
            }
        }
        if paused {
            let _ = slot.place.take();
            slot.tally.paused.store(false, Ordering::Relaxed);
        }
        // The channel holds as many as there are slots, so this neither waits nor fails while the planner lives.
        let _ = self.channels.returned.try_send((index, slot));
    }

    fn release_all(&mut self) {
        for index in 0..self.slots.len() {
            self.forget(index);
        }
    }

    fn reassert(&mut self) {
        for (index, slot) in self.slots.iter().enumerate() {
            if let Some(slot) = slot.as_ref().filter(|_| self.table.paused(index)) {
                let _ = slot.place.leave();
            }
        }
    }

    /// A slot's event: its thread has used its grain, or has ended.
    fn woken(&mut self, index: SlotIndex, flags: epoll::EventFlags) {
        if flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR) {
            self.forget(index);
            return;
        }
        let Some(cpu) = self.charge(index) else { return };
        // Those that share its CPU are read too, so that the CPU's account is exact at every wake.
        for other in 0..self.slots.len() {
            if other != index && self.table.shares(other, cpu) {
                self.charge(other);
            }
        }
        self.act();
    }

    fn read_polled(&mut self) {
        for index in 0..self.slots.len() {
            let polled = matches!(self.slots.get(index), Some(Some(slot)) if slot.reading.wakes().is_none());
            if polled && !self.table.paused(index) {
                self.charge(index);
            }
        }
        self.act();
    }

    /// Reads a slot, charges it, and says on which CPU it was seen.
    fn charge(&mut self, index: SlotIndex) -> Option<u32> {
        let slot = self.slots.get_mut(index)?.as_mut()?;
        let Ok(taken) = slot.reading.take() else {
            self.forget(index);
            return None;
        };
        slot.tally.ran_ns.fetch_add(taken.ran, Ordering::Relaxed);
        let cpu = taken.cpu.or(self.table.cpu(index))?;
        let acts = &mut self.acts;
        self.table.charge(index, cpu, taken.ran, now(), |act| acts.push(act));
        Some(cpu)
    }

    fn expire(&mut self) {
        let acts = &mut self.acts;
        self.table.expire(now(), |act| acts.push(act));
        self.act();
        let value = self.table.next_expiry().map_or(0, |at| at.max(1));
        let once = Itimerspec { it_interval: timespec(0), it_value: timespec(value) };
        let _ = rustix::time::timerfd_settime(&self.expiry, TimerfdTimerFlags::ABSTIME, &once);
    }

    fn act(&mut self) {
        while let Some(act) = self.acts.pop() {
            let index = match act {
                Action::Demote(index) | Action::Promote(index) => index,
            };
            let Some(Some(slot)) = self.slots.get_mut(index) else { continue };
            let done = match act {
                Action::Demote(_) => slot.pause(),
                Action::Promote(_) => slot.resume(),
            };
            match done {
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => self.forget(index),
                Err(_) => {
                    slot.tally.refused.fetch_add(1, Ordering::Relaxed);
                }
                Ok(()) => {}
            }
        }
    }

    fn arm_poll(&self) {
        let every = if self.polled > 0 { timespec(self.poll_every) } else { timespec(0) };
        let spec = Itimerspec { it_interval: every, it_value: every };
        let _ = rustix::time::timerfd_settime(&self.poll, TimerfdTimerFlags::empty(), &spec);
    }
}

impl Slot {
    fn pause(&mut self) -> io::Result<()> {
        self.place.leave()?;
        self.tally.paused.store(true, Ordering::Relaxed);
        self.tally.pauses.fetch_add(1, Ordering::Relaxed);
        self.since = now();
        self.reading.pause()
    }

    fn resume(&mut self) -> io::Result<()> {
        let counted = if self.reading.wakes().is_some() {
            // Counting starts before the place is back: no RT time is missed.
            let counted = self.reading.resume();
            self.place.take()?;
            counted
        } else {
            // The change of policy brings the kernel's count up to date, so what was taken while paused is left out whole.
            self.place.take()?;
            self.reading.resume()
        };
        self.tally.paused.store(false, Ordering::Relaxed);
        self.tally.paused_ns.fetch_add(now().saturating_sub(self.since), Ordering::Relaxed);
        counted
    }
}

fn drain(fd: &OwnedFd) {
    let mut count = [0; 8];
    let _ = rustix::io::read(fd, &mut count);
}
