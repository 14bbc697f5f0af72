//! The watcher thread: sleeps until somebody may have used up a budget, a pause ends, or an order comes.
//!
//! Runs above every thread it may have to stop, in locked memory, and allocates nothing after its start: slots are opened
//! by the planner's thread and handed over, and handed back to be closed there. It writes no log; what happened is counted in
//! [`Tally`]. What it shares with the planner it takes without waiting, also where the planner is preempted in the middle of an
//! order, perhaps by the very thread that is to be stopped: both ways are wait-free (`std::sync::mpsc` is not: its receiver spins
//! until a sender that has taken a place has filled it).
//!
//! It sleeps by the time-out of `epoll_wait`, not by timerfds: on PREEMPT_RT a timerfd expires in `ktimers/N`, which a spinning
//! thread keeps from running, while the time-out of a real-time thread expires in the interrupt itself
//! (`kernel/time/hrtimer.c`, `__hrtimer_setup_sleeper`).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rtrb::{Consumer, Producer};
use rustix::event::epoll;
use rustix::time::Timespec;

use super::account::Share;
use super::place::Place;
use super::reading::{ProcessClock, Reading};
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
    /// Of its process.
    pub clock: ProcessClock,
    /// Whether no slot before it is of the same process.
    pub first: bool,
    pub place: Place,
    pub share: Share,
    pub cpu: u32,
    /// At the place of threads that poll, or send for bulk tenants: the lowest, which pauses first.
    pub polls: bool,
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
    /// Give every paused thread its place back, and end.
    Stop,
}

/// The descriptors and channels a watcher lives on.
#[derive(Debug)]
pub struct Channels {
    pub orders: Consumer<Order>,
    /// How many orders were carried out since the start.
    pub done: Arc<AtomicU64>,
    pub wake: Arc<OwnedFd>,
    pub returned: Producer<(SlotIndex, Box<Slot>)>,
}

/// The watcher's state; [`Watcher::run`] is the thread.
#[derive(Debug)]
pub struct Watcher {
    table: Table,
    /// As long as the highest slot ever used.
    slots: Vec<Option<Box<Slot>>>,
    channels: Channels,
    epoll: OwnedFd,
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
    /// A watcher of at most `capacity` threads.
    ///
    /// # Errors
    /// The kernel's, where descriptors run out.
    pub fn new(table: Table, capacity: usize, channels: Channels) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &channels.wake, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        let slots = Vec::with_capacity(capacity);
        let acts = Vec::with_capacity(2 * capacity);
        Ok(Self { table, slots, channels, epoll, acts })
    }

    /// Runs until [`Order::Stop`] or the planner's end of the channel is gone.
    pub fn run(mut self) {
        let mut events = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 1];
        loop {
            let next = self.table.next_expiry().into_iter().chain(self.table.next_look()).min();
            let count = match wait(&self.epoll, &mut events, next) {
                Ok(count) => count,
                Err(rustix::io::Errno::INTR) => continue,
                // Not possible with a valid descriptor; leave everybody at their place rather than spin at high priority.
                Err(_) => break,
            };
            if count > 0 {
                drain(&self.channels.wake);
                if !self.obey() {
                    break;
                }
            }
            if self.table.next_look().is_some_and(|at| at <= now()) {
                self.look();
            }
            self.expire();
        }
        self.release_all();
    }

    /// Carries out the orders that are there. False: end.
    fn obey(&mut self) -> bool {
        loop {
            // Looked at first: what was ordered before the planner went is carried out.
            let abandoned = self.channels.orders.is_abandoned();
            match self.channels.orders.pop() {
                Ok(Order::Watch(index, slot)) => self.watch(index, slot),
                Ok(Order::Forget(index)) => self.forget(index),
                Ok(Order::Stop) => return false,
                Err(_) => return !abandoned,
            }
            self.channels.done.fetch_add(1, Ordering::Release);
        }
    }

    fn watch(&mut self, index: SlotIndex, slot: Box<Slot>) {
        self.table.watch(index, slot.share, slot.cpu, slot.polls, now());
        // Within the capacity: indices are below it. The list is as long as it must be, for every look goes through it.
        while self.slots.len() <= index && self.slots.len() < self.slots.capacity() {
            self.slots.push(None);
        }
        if let Some(entry) = self.slots.get_mut(index) {
            *entry = Some(slot);
        }
        self.mark_first(index);
    }

    /// Which slot of the process of the one at `index` stands for it.
    fn mark_first(&mut self, index: SlotIndex) {
        let Some((before, [Some(slot), after @ ..])) = self.slots.split_at_mut_checked(index) else { return };
        slot.first = !before.iter().flatten().any(|other| other.clock.same(&slot.clock));
        for other in after.iter_mut().flatten().filter(|other| other.clock.same(&slot.clock)) {
            other.first = false;
        }
    }

    fn forget(&mut self, index: SlotIndex) {
        let paused = self.table.forget(index);
        let Some(slot) = self.slots.get_mut(index).and_then(Option::take) else { return };
        let heir =
            self.slots.iter().position(|other| other.as_ref().is_some_and(|other| other.clock.same(&slot.clock)));
        if let Some(heir) = heir.filter(|_| slot.first) {
            self.mark_first(heir);
        }
        if paused {
            let _ = slot.place.take();
            slot.tally.paused.store(false, Ordering::Relaxed);
        }
        // The channel holds as many as there are slots, so this neither waits nor fails while the planner lives.
        let _ = self.channels.returned.push((index, slot));
    }

    fn release_all(&mut self) {
        for index in 0..self.slots.len() {
            self.forget(index);
        }
    }

    /// Looks at processes, and at their threads where those might be over a cap.
    fn look(&mut self) {
        let start = now();
        let ran = self.processes_ran();
        if !self.table.may_rest(ran, now()) {
            self.look_at_threads();
        }
        self.table.cost(this_cpu(), now().saturating_sub(start));
    }

    /// What all watched processes took since the last look, ns.
    fn processes_ran(&mut self) -> u64 {
        let first = self.slots.iter_mut().flatten().filter(|slot| slot.first);
        first.fold(0, |ran, slot| ran.saturating_add(slot.clock.take()))
    }

    /// Reads and charges every thread that is at its place.
    fn look_at_threads(&mut self) {
        for index in 0..self.slots.len() {
            if self.slots.get(index).is_some_and(Option::is_some) && !self.table.paused(index) {
                self.charge(index);
            }
        }
        let acts = &mut self.acts;
        self.table.looked(now(), |act| acts.push(act));
        self.act();
    }

    fn charge(&mut self, index: SlotIndex) {
        let Some(Some(slot)) = self.slots.get_mut(index) else { return };
        let Ok(taken) = slot.reading.take() else {
            self.forget(index);
            return;
        };
        slot.tally.ran_ns.fetch_add(taken.ran, Ordering::Relaxed);
        let Some(cpu) = taken.cpu.or(self.table.cpu(index)) else { return };
        let acts = &mut self.acts;
        self.table.charge(index, cpu, taken.ran, now(), |act| acts.push(act));
    }

    fn expire(&mut self) {
        let acts = &mut self.acts;
        self.table.expire(now(), |act| acts.push(act));
        self.act();
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
}

impl Slot {
    fn pause(&mut self) -> io::Result<()> {
        // Said before it is so: who then reads the thread's policy knows of the pause (`Pauses`).
        self.tally.paused.store(true, Ordering::Relaxed);
        self.tally.pauses.fetch_add(1, Ordering::Release);
        self.since = now();
        self.place.leave().inspect_err(|_| {
            self.tally.paused.store(false, Ordering::Relaxed);
            self.tally.pauses.fetch_sub(1, Ordering::Relaxed);
        })
    }

    fn resume(&mut self) -> io::Result<()> {
        // The change of policy brings the kernel's count up to date, so what was taken while paused is left out whole.
        self.place.take()?;
        self.tally.paused.store(false, Ordering::Relaxed);
        self.tally.paused_ns.fetch_add(now().saturating_sub(self.since), Ordering::Relaxed);
        self.reading.take().map(|_| ())
    }
}

/// Waits for an order, or until `next`, ns of [`now`].
fn wait(epoll: &OwnedFd, events: &mut [epoll::Event], next: Option<u64>) -> rustix::io::Result<usize> {
    let time_out = next.map(|at| timespec(at.saturating_sub(now())));
    epoll::wait(epoll, events, time_out.as_ref())
}

fn this_cpu() -> u32 {
    // SAFETY: takes nothing, touches no memory of ours. It cannot fail where the kernel has its vDSO; -1 is no CPU of the table.
    let cpu = unsafe { libc::sched_getcpu() };
    u32::try_from(cpu).unwrap_or(u32::MAX)
}

fn drain(fd: &OwnedFd) {
    let mut count = [0; 8];
    let _ = rustix::io::read(fd, &mut count);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_within_its_millisecond() {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let mut events = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 1];
        // The machine may have other work: the shortest of many is what the call itself takes.
        let shortest = (0..200).map(|_| {
            let start = now();
            assert_eq!(wait(&epoll, &mut events, Some(start + 150_000)), Ok(0));
            now() - start
        });
        let shortest = shortest.min().unwrap();
        assert!((150_000..1_000_000).contains(&shortest), "a wait of 150 us took {shortest} ns at best");
    }
}
