//! The watcher thread: sleeps until somebody may have used up a budget, a pause ends, an interrupt of a vCPU that is
//! put ahead becomes pending, or an order comes.
//!
//! Runs above every thread it may have to stop, in locked memory, and allocates nothing after its start: slots are
//! opened by the planner's thread and handed over, and handed back to be closed there. It writes no log; what happened
//! is counted in [`Tally`]. What it shares with the planner it takes without waiting, also where the planner is
//! preempted in the middle of an order, perhaps by the very thread that is to be stopped: both ways are wait-free
//! (`std::sync::mpsc` is not: its receiver spins until a sender that has taken a place has filled it).
//!
//! It sleeps by the time-out of `epoll_wait`, not by timerfds: on PREEMPT_RT a timerfd expires in `ktimers/N`, which a
//! spinning thread keeps from running, while the time-out of a real-time thread expires in the interrupt itself
//! (`kernel/time/hrtimer.c`, `__hrtimer_setup_sleeper`).
//!
//! Interrupts come by trace rings (`ontime_trace::interrupts`), a page at a time. They are listened to only while that
//! can put somebody ahead: where vCPUs may run into another of their level, or while one is paused. What they cost is
//! charged to the CPU's share like a look, and is at most [`HEARING`] of the time: beyond that the watcher is deaf for
//! a while.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use ontime_tenants::ProcessClock;
use ontime_trace::interrupts::Rings;
use rtrb::{Consumer, Producer};
use rustix::event::epoll;
use rustix::thread::futex;
use rustix::time::{ClockId, Timespec};

use super::account::{Account, Share, Verdict};
use super::boost::GRANT;
use super::place::Place;
use super::reading::Reading;
use super::table::{Action, Rank, SlotIndex, Table, Watched};
use super::who::Who;

/// The most of one CPU that hearing of interrupts may take, over [`HEARING_PERIOD`].
const HEARING: Share = Share::QUARTER;
/// ns.
const HEARING_PERIOD: u64 = 3_000_000;
/// What the order bell is in epoll.
const BELL: u64 = 0;
/// What the set of all rings is in epoll.
const RINGS: u64 = 1;

/// What a process may have taken, ns, without its threads being read: it is charged with what comes after.
const QUIET: i64 = 50_000;

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
    /// Times it was put ahead because of an interrupt.
    pub raised: AtomicU64,
    /// CPU time that it took ahead, ns.
    pub ahead_ns: AtomicU64,
}

/// One watched thread: how to read it, how to place it, what it did.
#[derive(Debug)]
pub struct Slot {
    pub reading: Reading,
    /// Of its process.
    pub clock: ProcessClock,
    /// The first slot of that process, which stands for it.
    pub leader: SlotIndex,
    /// If it stands for its process: what that took beyond what was read of its threads, ns; below zero where these
    /// were read since.
    pub unread: i64,
    /// If it stands for its process: a thread of that is paused, and may have taken of what is unread.
    pub owed: bool,
    /// At the last reading it had taken [`QUIET`] or more.
    pub busy: bool,
    /// The turn of the watcher in which it was last read.
    pub read: u64,
    pub place: Place,
    pub share: Share,
    pub cpu: u32,
    pub rank: Rank,
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
    /// Interrupts come by these rings, of these vCPUs; comes back with what was before, None where there was nothing.
    Hear(Box<Hearing>),
    /// Give every paused thread its place back, and end.
    Stop,
}

/// How interrupts are heard of; empty: not at all.
#[derive(Debug, Default)]
pub struct Hearing {
    /// What the probe says; None: what was heard before.
    pub rings: Option<Rings>,
    /// Whom it means.
    pub who: Who,
    /// Whether they are listened to all the time, not only while one of them is paused: some may run into another of
    /// their level.
    pub rivals: bool,
    /// Whether the rings are to be given up.
    pub deaf: bool,
}

/// What goes back to the planner, to be closed there.
#[derive(Debug)]
pub enum Returned {
    /// A thread that is not watched any more.
    Slot(SlotIndex, Box<Slot>),
    /// What was heard by before.
    Hearing(Box<Hearing>),
}

/// The descriptors and channels a watcher lives on.
#[derive(Debug)]
pub struct Channels {
    pub orders: Consumer<Order>,
    /// How many orders were carried out since the start, modulo 2^32; the futex of who waits for that.
    pub done: Arc<AtomicU32>,
    pub wake: Arc<OwnedFd>,
    pub returned: Producer<Returned>,
    /// The rings, in one set: they are listened to together, or not.
    pub rings: Arc<OwnedFd>,
}

/// The watcher's state; [`Watcher::run`] is the thread.
#[derive(Debug)]
pub struct Watcher {
    table: Table,
    /// As long as the highest slot ever used.
    slots: Vec<Option<Box<Slot>>>,
    channels: Channels,
    /// Where the bell and the set of rings are waited for.
    epoll: OwnedFd,
    hearing: Box<Hearing>,
    /// Whether the rings are waited for.
    listening: bool,
    /// Interrupts from before this, ns, are over.
    since: u64,
    /// What hearing has taken.
    heard: Account,
    /// Deaf until then, ns.
    deaf: Option<u64>,
    /// Actions of the charge under way; its capacity is the table's.
    acts: Vec<Action>,
    /// Turns, counted: what was read in this one names its thread still.
    turn: u64,
}

const NO_EVENT: epoll::Event = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };

/// Now, ns of CLOCK_MONOTONIC.
pub fn now() -> u64 {
    clock(ClockId::Monotonic)
}

/// What this thread has had of the CPUs, ns: also what waiting and waking took, which `now` around a turn leaves out.
fn own_time() -> u64 {
    clock(ClockId::ThreadCPUTime)
}

fn clock(id: ClockId) -> u64 {
    let time = rustix::time::clock_gettime(id);
    (time.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(time.tv_nsec as u64)
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
        epoll::add(&epoll, &channels.wake, epoll::EventData::new_u64(BELL), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &channels.rings, epoll::EventData::new_u64(RINGS), epoll::EventFlags::empty())?;
        let slots = Vec::with_capacity(capacity);
        let acts = Vec::with_capacity(3 * capacity + 64);
        let heard = Account::new(HEARING, HEARING_PERIOD, now());
        let hearing = Box::default();
        Ok(Self {
            table,
            slots,
            channels,
            epoll,
            hearing,
            listening: false,
            since: 0,
            heard,
            deaf: None,
            acts,
            turn: 1,
        })
    }

    /// Runs until [`Order::Stop`] or the planner's end of the channel is gone.
    pub fn run(mut self) {
        let mut events = [NO_EVENT; 2];
        let mut ran = own_time();
        loop {
            let table = &self.table;
            let next =
                [table.next_expiry(), table.next_look(), table.next_check(), self.deaf].into_iter().flatten().min();
            let count = match wait(&self.epoll, &mut events, next) {
                Ok(count) => count,
                Err(rustix::io::Errno::INTR) => continue,
                // Not possible with a valid descriptor; leave everybody at their place rather than spin at high
                // priority.
                Err(_) => break,
            };
            let mut goes_on = true;
            self.turn += 1;
            for event in events.iter().take(count) {
                match event.data.u64() {
                    BELL => {
                        drain(&self.channels.wake);
                        goes_on = self.obey();
                    }
                    _ => self.hear(),
                }
            }
            if !goes_on {
                break;
            }
            self.check();
            if self.table.next_look().is_some_and(|at| at <= now()) {
                self.look();
            }
            self.expire();
            self.listen();
            let now = own_time();
            self.table.spent(this_cpu(), now.saturating_sub(ran));
            ran = now;
        }
        self.release_all();
    }

    /// Reads the rings that have something, a page each, and does what their interrupts ask for. A ring that cannot be
    /// read (of a CPU that is gone) is not waited for any more: it would be ready for ever.
    fn hear(&mut self) {
        let start = now();
        let mut ready = [NO_EVENT; 8];
        let count = epoll::wait(&self.channels.rings, &mut ready, Some(&timespec(0))).unwrap_or(0);
        for event in ready.iter().take(count) {
            let ring = usize::try_from(event.data.u64()).unwrap_or(usize::MAX);
            let flags = event.flags;
            let gone = flags.intersects(epoll::EventFlags::ERR | epoll::EventFlags::HUP);
            // More than a page makes it ready again.
            if gone || self.hear_page(ring).is_err() {
                self.give_up(ring);
            }
        }
        let end = now();
        let took = end.saturating_sub(start);
        if let Verdict::Over { until } = self.heard.charge(end, took) {
            self.heard.restart(until);
            self.deaf = Some(until);
        }
    }

    fn hear_page(&mut self, ring: usize) -> io::Result<()> {
        let Self { table, slots, hearing, since, acts, turn, .. } = self;
        let Hearing { rings: Some(rings), who, .. } = &mut **hearing else { return Ok(()) };
        let read = rings.read(ring, |interrupt| {
            let Some((index, own)) = who.find(interrupt).filter(|_| interrupt.at >= *since) else { return };
            let Some(Some(slot)) = slots.get_mut(index) else { return };
            let at = now();
            if !table.ahead(index) && !own {
                // What it took until now, it did not take ahead.
                let Ok(taken) = slot.reading.take() else { return };
                let tally = Arc::clone(&slot.tally);
                was_read(slots, index, taken.ran, *turn);
                if !table.paused(index) {
                    tally.ran_ns.fetch_add(taken.ran, Ordering::Relaxed);
                    let cpu = taken.cpu.or(table.cpu(index)).unwrap_or(0);
                    table.charge(index, cpu, taken.ran, at, |act| push(acts, act));
                }
            }
            table.interrupt(index, own, at, |act| push(acts, act));
        });
        self.act();
        read.map(|_| ())
    }

    /// Waits for the rings while that can put somebody ahead, and no longer. What came while nobody listened is over,
    /// but for what a vCPU may still be at: one that answers when it is paused is let out to end that.
    fn listen(&mut self) {
        self.deaf = self.deaf.filter(|until| *until > now());
        let wanted = self.deaf.is_none() && (self.hearing.rivals || self.table.pauses_boosted());
        if wanted == self.listening {
            return;
        }
        self.listening = wanted;
        self.since = if self.hearing.rivals { 0 } else { now().saturating_sub(GRANT) };
        let flags = if wanted { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        // It cannot fail for a set that was added.
        let _ = epoll::modify(&self.epoll, &self.channels.rings, epoll::EventData::new_u64(RINGS), flags);
    }

    /// Waits for this ring no more.
    fn give_up(&self, ring: usize) {
        if let Some(ring) = self.hearing.rings.iter().flat_map(Rings::fds).nth(ring) {
            let _ = epoll::delete(&self.channels.rings, ring);
        }
    }

    /// Looks at those that are ahead and may have had their turn: each once.
    fn check(&mut self) {
        for _ in 0..self.slots.len() {
            let at = now();
            let Some(index) = self.table.due(at) else { return };
            let ran = self.charge(index).unwrap_or(0);
            let slot = self.slots.get(index).and_then(Option::as_ref);
            self.table.checked(index, ran, at, || slot.is_none_or(|slot| slot.reading.asleep()));
            self.act();
        }
    }

    /// Carries out the orders that are there. False: end.
    fn obey(&mut self) -> bool {
        let before = self.channels.done.load(Ordering::Relaxed);
        let goes_on = self.carry_out();
        if self.channels.done.load(Ordering::Relaxed) != before {
            // Waking fails for an address that is none only.
            let _ = futex::wake(&self.channels.done, futex::Flags::PRIVATE, 1);
        }
        goes_on
    }

    fn carry_out(&mut self) -> bool {
        loop {
            // Looked at first: what was ordered before the planner went is carried out.
            let abandoned = self.channels.orders.is_abandoned();
            match self.channels.orders.pop() {
                Ok(Order::Watch(index, slot)) => self.watch(index, slot),
                Ok(Order::Forget(index)) => self.forget(index),
                Ok(Order::Hear(hearing)) => self.hear_by(hearing),
                Ok(Order::Stop) => return false,
                Err(_) => return !abandoned,
            }
            self.channels.done.fetch_add(1, Ordering::Release);
        }
    }

    /// Takes other rings, other vCPUs, or both; gives back what it had.
    fn hear_by(&mut self, mut next: Box<Hearing>) {
        if next.rings.is_none() && !next.deaf {
            next.rings = self.hearing.rings.take();
        }
        let before = std::mem::replace(&mut self.hearing, next);
        // One place of the channel is kept for this.
        let _ = self.channels.returned.push(Returned::Hearing(before));
    }

    fn watch(&mut self, index: SlotIndex, slot: Box<Slot>) {
        let boosted = slot.place.has_ahead();
        self.table.watch(index, Watched { share: slot.share, cpu: slot.cpu, rank: slot.rank, boosted }, now());
        // Within the capacity: indices are below it. The list is as long as it must be, for every look goes through it.
        while self.slots.len() <= index && self.slots.len() < self.slots.capacity() {
            self.slots.push(None);
        }
        let process = slot.clock.id();
        if let Some(entry) = self.slots.get_mut(index) {
            *entry = Some(slot);
        }
        self.lead(process);
    }

    /// Has the first slot of a process stand for it.
    fn lead(&mut self, clock: libc::clockid_t) {
        let of = |slot: &Option<Box<Slot>>| slot.as_ref().is_some_and(|slot| slot.clock.id() == clock);
        let Some(leader) = self.slots.iter().position(of) else { return };
        for slot in self.slots.iter_mut().flatten().filter(|slot| slot.clock.id() == clock) {
            slot.leader = leader;
        }
    }

    fn forget(&mut self, index: SlotIndex) {
        let elsewhere = self.table.forget(index);
        let Some(slot) = self.slots.get_mut(index).and_then(Option::take) else { return };
        if slot.leader == index {
            self.lead(slot.clock.id());
        }
        if elsewhere {
            let _ = slot.place.take();
            slot.tally.paused.store(false, Ordering::Relaxed);
        }
        // The channel holds as many as there are slots, so this neither waits nor fails while the planner lives.
        let _ = self.channels.returned.push(Returned::Slot(index, slot));
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
        self.table.cost(now().saturating_sub(start));
    }

    /// Those that stand for their processes.
    fn leaders(&mut self) -> impl Iterator<Item = &mut Slot> {
        let leaders = self.slots.iter_mut().enumerate();
        leaders.filter_map(|(index, slot)| slot.as_deref_mut().filter(|slot| slot.leader == index))
    }

    /// What all watched processes took since the last look, ns.
    fn processes_ran(&mut self) -> u64 {
        self.leaders().fold(0, |all, slot| {
            let ran = slot.clock.take();
            slot.unread = slot.unread.saturating_add(i64::try_from(ran).unwrap_or(i64::MAX));
            all.saturating_add(ran)
        })
    }

    /// Whether the slot's process took so little that none of its threads is worth a reading, which costs some us each.
    fn is_quiet(&self, slot: &Slot) -> bool {
        let leader = self.slots.get(slot.leader).and_then(Option::as_ref);
        leader.is_some_and(|leader| leader.unread < QUIET)
    }

    /// Reads and charges every thread that is at its place, but those of quiet processes: of each process first those
    /// that were busy, and the others only if these do not account for it.
    fn look_at_threads(&mut self) {
        for busy in [true, false] {
            for index in 0..self.slots.len() {
                let slot = self.slots.get(index).and_then(Option::as_ref);
                let wanted = |slot: &Slot| slot.busy == busy && slot.read != self.turn && !self.is_quiet(slot);
                if slot.is_some_and(|slot| wanted(slot)) && !self.table.paused(index) {
                    self.charge(index);
                }
            }
        }
        self.write_off();
        let acts = &mut self.acts;
        self.table.looked(now(), |act| push(acts, act));
        self.act();
    }

    /// What all threads do not account for was taken by those that nobody watches; or by one in its pause, which is
    /// read, and taken off, when that ends: written off before, it would hide as much of what the process takes then.
    fn write_off(&mut self) {
        for index in 0..self.slots.len() {
            let slot = self.slots.get(index).and_then(Option::as_ref).filter(|_| self.table.paused(index));
            let Some(leader) = slot.map(|slot| slot.leader) else { continue };
            if let Some(Some(leader)) = self.slots.get_mut(leader) {
                leader.owed = true;
            }
        }
        for leader in self.leaders() {
            if !std::mem::take(&mut leader.owed) && leader.unread >= QUIET {
                leader.unread = 0;
            }
        }
    }

    /// Reads and charges one; what it took, ns.
    fn charge(&mut self, index: SlotIndex) -> Option<u64> {
        let slot = self.slots.get_mut(index)?.as_mut()?;
        let Ok(taken) = slot.reading.take() else {
            self.forget(index);
            return None;
        };
        slot.tally.ran_ns.fetch_add(taken.ran, Ordering::Relaxed);
        if self.table.ahead(index) {
            slot.tally.ahead_ns.fetch_add(taken.ran, Ordering::Relaxed);
        }
        was_read(&mut self.slots, index, taken.ran, self.turn);
        let cpu = taken.cpu.or(self.table.cpu(index))?;
        let acts = &mut self.acts;
        self.table.charge(index, cpu, taken.ran, now(), |act| push(acts, act));
        Some(taken.ran)
    }

    fn expire(&mut self) {
        let acts = &mut self.acts;
        self.table.expire(now(), |act| push(acts, act));
        self.act();
    }

    /// In the order in which they were asked for: a thread may be paused and let out in one reading.
    fn act(&mut self) {
        for at in 0..self.acts.len() {
            let Some(act) = self.acts.get(at).copied() else { break };
            let index = act.slot();
            let Some(Some(slot)) = self.slots.get_mut(index) else { continue };
            let done = match act {
                Action::Demote(_) => slot.pause(slot.read == self.turn).map(|()| 0),
                Action::Promote(_) => slot.resume(),
                Action::Raise(_) => slot.raise().map(|()| 0),
                Action::Again(_) => slot.place.again().map(|()| 0),
                Action::Lower(_) => slot.place.lower().map(|()| 0),
            };
            match done {
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => self.forget(index),
                Err(_) => {
                    slot.tally.refused.fetch_add(1, Ordering::Relaxed);
                }
                Ok(0) => {}
                Ok(ran) => was_read(&mut self.slots, index, ran, self.turn),
            }
        }
        self.acts.clear();
    }
}

/// Never beyond the capacity: this thread allocates nothing. It is that of three actions for each slot, more than a
/// turn makes; what would be too many is left undone, and found at the next look.
fn push(acts: &mut Vec<Action>, act: Action) {
    if acts.len() < acts.capacity() {
        acts.push(act);
    }
}

impl Slot {
    /// `fresh`: it was read in this turn.
    fn pause(&mut self, fresh: bool) -> io::Result<()> {
        // Said before it is so: who then reads the thread's policy knows of the pause (`Pauses`).
        self.tally.paused.store(true, Ordering::Relaxed);
        self.tally.pauses.fetch_add(1, Ordering::Release);
        self.since = now();
        self.place.leave(fresh).inspect_err(|_| {
            self.tally.paused.store(false, Ordering::Relaxed);
            self.tally.pauses.fetch_sub(1, Ordering::Relaxed);
        })
    }

    /// Ahead, from its place or from a pause.
    fn raise(&mut self) -> io::Result<()> {
        self.place.raise()?;
        self.tally.raised.fetch_add(1, Ordering::Relaxed);
        if self.tally.paused.swap(false, Ordering::Relaxed) {
            self.tally.paused_ns.fetch_add(now().saturating_sub(self.since), Ordering::Relaxed);
        }
        Ok(())
    }

    /// At its place again; what it took meanwhile, ns. The change of policy brings the kernel's count up to date, so
    /// that is all of it.
    fn resume(&mut self) -> io::Result<u64> {
        self.place.take()?;
        self.tally.paused.store(false, Ordering::Relaxed);
        self.tally.paused_ns.fetch_add(now().saturating_sub(self.since), Ordering::Relaxed);
        self.reading.take().map(|taken| taken.ran)
    }
}

/// The thread in this slot was read, and had taken `ran` ns.
fn was_read(slots: &mut [Option<Box<Slot>>], index: SlotIndex, ran: u64, turn: u64) {
    let ran = i64::try_from(ran).unwrap_or(i64::MAX);
    let Some(Some(slot)) = slots.get_mut(index) else { return };
    (slot.busy, slot.read) = (ran >= QUIET, turn);
    let leader = slot.leader;
    if let Some(Some(leader)) = slots.get_mut(leader) {
        leader.unread = leader.unread.saturating_sub(ran);
    }
}

/// Waits for an order, or until `next`, ns of [`now`].
fn wait(epoll: &OwnedFd, events: &mut [epoll::Event], next: Option<u64>) -> rustix::io::Result<usize> {
    let time_out = next.map(|at| timespec(at.saturating_sub(now())));
    epoll::wait(epoll, events, time_out.as_ref())
}

fn this_cpu() -> u32 {
    // SAFETY: takes nothing, touches no memory of ours. It cannot fail where the kernel has its vDSO; -1 is no CPU of
    // the table.
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
        let mut events = [NO_EVENT; 1];
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
