//! The watcher thread (`ontime-cap`). It sleeps until a thread may have used up its budget, a pause ends, an interrupt
//! becomes pending for a vCPU that may be put ahead, or an order comes from the planner's thread.
//!
//! It runs above every thread that it may have to pause, in locked memory, and allocates nothing after its start. The
//! planner's thread opens the files of a slot and hands the slot over; the watcher hands it back, and the planner's
//! thread closes the files. The watcher writes no log; it counts events in [`Tally`]. It never waits for the planner's
//! thread, which may be preempted in the middle of an order, perhaps by the very thread that has to be paused: the
//! queues in both directions are wait-free. (`std::sync::mpsc` is not: its receiver spins until a sender that has
//! reserved an entry has filled it.)
//!
//! It sleeps by the time-out of `epoll_wait`, not by timerfds. On PREEMPT_RT a timerfd expires in `ktimers/N`, which a
//! spinning thread keeps from running, while the time-out of a real-time thread expires in hard interrupt context
//! (`kernel/time/hrtimer.c`, `__hrtimer_setup_sleeper`).
//!
//! Interrupts are reported through trace rings (`ontime_trace::interrupts`), a page at a time. The watcher waits for
//! the rings only while that can put a vCPU ahead: where a vCPU shares a CPU with another thread of its level, or while
//! a vCPU that may be put ahead is paused. The time that the rings take is charged to the CPU's share like a look. It
//! is limited to the share [`RINGS_SHARE`]: beyond that the watcher ignores the rings for a while.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use ontime_base::clock::{self, now, timespec};
use ontime_tenants::ProcessClock;
use ontime_trace::interrupts::Rings;
use rtrb::{Consumer, Producer};
use rustix::event::epoll;
use rustix::thread::futex;
use rustix::time::ClockId;

use super::account::{Account, Share, Verdict};
use super::boost::GRANT;
use super::inspections::Inspections;
use super::place::PlacedThread;
use super::reading::Reading;
use super::sight::Asker;
use super::table::{Action, Pool, Rank, SlotIndex, Table, Watched};
use super::targets::InterruptTargets;

/// The most of one CPU that the trace rings may take, over [`RINGS_PERIOD`].
const RINGS_SHARE: Share = Share::QUARTER;
/// The period of that limit, ns.
const RINGS_PERIOD: u64 = 3_000_000;
/// The eventfd of orders, in the epoll set.
const BELL: u64 = 0;
/// The set of all trace rings, in the epoll set.
const RINGS: u64 = 1;

/// The least time between two alarms ([`Channels::alarm`]), ns: each has the guardian write the protections.
const ALARM_GAP: u64 = 1_000_000_000;

/// CPU time of a process, ns, below which its threads are not read. The time stays in [`WatchedThread::unread`] and is
/// charged later.
const QUIET: i64 = 50_000;

/// Counters of one watched thread. Other threads read them while the watcher writes.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// How often it was paused.
    pub pauses: AtomicU64,
    /// How long it was paused, ns.
    pub paused_ns: AtomicU64,
    /// CPU time that was read while it was at RT priority, ns.
    pub ran_ns: AtomicU64,
    /// Whether it is paused now.
    pub paused: AtomicBool,
    /// Times the kernel refused to change its policy.
    pub refused: AtomicU64,
    /// How often it had real-time priority in a pause or again at the end of one.
    pub escaped: AtomicU64,
    /// How often it was put ahead because of an interrupt.
    pub raised: AtomicU64,
    /// CPU time that it took while ahead, ns.
    pub ahead_ns: AtomicU64,
}

/// One watched thread: its open files, its place and cap, its counters.
#[derive(Debug)]
pub(crate) struct WatchedThread {
    pub reading: Reading,
    /// CPU time of the thread's process.
    pub clock: ProcessClock,
    /// The first slot of that process. Its fields `unread` and `owed` are those of the process.
    pub leader: SlotIndex,
    /// In the first slot of a process: CPU time of the process that was not read of its threads yet, ns. Negative where
    /// a thread was read after its process.
    pub unread: i64,
    /// In the first slot of a process: a thread of the process is paused and may have taken part of `unread`.
    pub owed: bool,
    /// Whether the last reading of this thread was [`QUIET`] or more.
    pub busy: bool,
    /// The number of the watcher's turn in which the thread was last read.
    pub read: u64,
    pub place: PlacedThread,
    pub share: Share,
    pub cpu: u32,
    pub rank: Rank,
    pub pool: Option<Pool>,
    pub tally: Arc<Tally>,
    /// When its pause began, ns.
    pub since: u64,
}

/// An order from the planner's thread.
#[derive(Debug)]
pub(crate) enum Order {
    /// Watch this thread.
    Watch(SlotIndex, Box<WatchedThread>),
    /// Stop watching this thread. If it is paused or ahead, it gets its place back first.
    Forget(SlotIndex),
    /// Follow interrupts of these vCPUs through these rings. The former [`InterruptFeed`] is handed back.
    Follow(Box<InterruptFeed>),
    /// Give every thread its place back, and end.
    Stop,
}

/// How interrupts are followed; the default value: not at all.
#[derive(Debug, Default)]
pub(crate) struct InterruptFeed {
    /// The trace rings of the probe; None: keep the present ones.
    pub rings: Option<Rings>,
    /// Maps an interrupt to the slot of its vCPU.
    pub targets: InterruptTargets,
    /// Whether a vCPU shares a CPU with another thread of its level: then the watcher waits for the rings all the time,
    /// else only while a vCPU is paused.
    pub rivals: bool,
    /// Whether the present rings have to be handed back.
    pub return_rings: bool,
}

/// What the watcher hands back to the planner's thread, which closes the files.
#[derive(Debug)]
pub(crate) enum Returned {
    /// The slot of a thread that is no longer watched.
    WatchedThread(SlotIndex, Box<WatchedThread>),
    /// The former rings and vCPUs.
    InterruptFeed(Box<InterruptFeed>),
}

/// Descriptors and queues that the watcher shares with the planner's thread.
#[derive(Debug)]
pub(crate) struct Channels {
    pub orders: Consumer<Order>,
    /// How many orders were carried out since the start, modulo 2^32. Also the futex on which the planner's thread
    /// waits.
    pub done: Arc<AtomicU32>,
    pub wake: Arc<OwnedFd>,
    pub returned: Producer<Returned>,
    /// The trace rings, as one epoll set: the watcher waits for all or for none.
    pub rings: Arc<OwnedFd>,
    /// Has a thread at normal priority read what this thread must not.
    pub sights: Asker,
    /// Written when a thread has escaped from its pause: the guardian then switches the kernel's protections on, also
    /// if such threads leave the planner's thread no CPU time.
    pub alarm: Arc<OwnedFd>,
    /// When a thread last escaped, ns; 0: none has.
    pub escaped_at: Arc<AtomicU64>,
}

/// The watcher's state. [`Watcher::run`] is the body of the thread.
#[derive(Debug)]
pub(crate) struct Watcher {
    table: Table,
    /// As long as the highest slot used so far.
    slots: Vec<Option<Box<WatchedThread>>>,
    channels: Channels,
    /// The set that the thread waits on: the eventfd and the set of rings.
    epoll: OwnedFd,
    feed: Box<InterruptFeed>,
    /// Whether the thread waits for the rings.
    listening: bool,
    /// Interrupts older than this, ns, are ignored.
    since: u64,
    /// Limits the time that the rings take ([`RINGS_SHARE`]).
    rings_account: Account,
    /// The rings are ignored until this instant, ns.
    ignored_until: Option<u64>,
    /// Actions of the charge in progress. Its capacity is that of the table.
    acts: Vec<Action>,
    inspections: Inspections,
    /// When the alarm was last given, ns.
    alarmed: u64,
    /// Counts turns of the loop. A thread that was read in this turn need not be verified again before its policy
    /// changes.
    turn: u64,
}

const NO_EVENT: epoll::Event = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };

/// CPU time of this thread, ns. It includes sleeping and waking up, which the difference of `now` around a turn leaves
/// out.
fn own_time() -> u64 {
    clock::read(ClockId::ThreadCPUTime)
}

impl Watcher {
    /// A watcher of at most `capacity` threads.
    ///
    /// # Errors
    /// The kernel's error, where descriptors run out.
    pub(crate) fn new(table: Table, capacity: usize, channels: Channels) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &channels.wake, epoll::EventData::new_u64(BELL), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &channels.rings, epoll::EventData::new_u64(RINGS), epoll::EventFlags::empty())?;
        let slots = Vec::with_capacity(capacity);
        let acts = Vec::with_capacity(3 * capacity + 64);
        let rings_account = Account::new(RINGS_SHARE, RINGS_PERIOD, now());
        let feed = Box::default();
        Ok(Self {
            table,
            slots,
            channels,
            epoll,
            feed,
            listening: false,
            since: 0,
            rings_account,
            ignored_until: None,
            acts,
            inspections: Inspections::new(capacity, now()),
            alarmed: 0,
            turn: 1,
        })
    }

    /// Runs until [`Order::Stop`], or until the planner's end of the queue is gone.
    pub(crate) fn run(mut self) {
        let mut events = [NO_EVENT; 2];
        let mut ran = own_time();
        loop {
            let table = &self.table;
            let inspection = self.inspections.next();
            let next = [table.next_expiry(), table.next_look(), table.next_check(), self.ignored_until, inspection];
            let next = next.into_iter().flatten().min();
            let count = match wait(&self.epoll, &mut events, next) {
                Ok(count) => count,
                Err(rustix::io::Errno::INTR) => continue,
                // Impossible with a valid descriptor. Give all threads their places back rather than spin at a high
                // priority.
                Err(_) => break,
            };
            let mut goes_on = true;
            self.turn += 1;
            for event in events.iter().take(count) {
                match event.data.u64() {
                    BELL => {
                        drain(&self.channels.wake);
                        goes_on = self.process_orders();
                    }
                    _ => self.read_rings(),
                }
            }
            if !goes_on {
                break;
            }
            self.check();
            self.inspect();
            if self.table.next_look().is_some_and(|at| at <= now()) {
                self.look();
                self.ask();
            }
            self.expire();
            self.listen();
            let now = own_time();
            self.table.spent(this_cpu(), now.saturating_sub(ran));
            ran = now;
            let (cpu, took) = self.channels.sights.spent();
            self.table.spent(cpu, took);
        }
        self.release_all();
    }

    /// Reads one page of each ring that has data, and puts vCPUs ahead. A ring that cannot be read (its CPU is gone) is
    /// removed from the set, because it would be ready for ever.
    fn read_rings(&mut self) {
        let start = now();
        let mut ready = [NO_EVENT; 8];
        let count = epoll::wait(&self.channels.rings, &mut ready, Some(&timespec(0))).unwrap_or(0);
        for event in ready.iter().take(count) {
            let ring = usize::try_from(event.data.u64()).unwrap_or(usize::MAX);
            let flags = event.flags;
            let gone = flags.intersects(epoll::EventFlags::ERR | epoll::EventFlags::HUP);
            // A ring with more than a page is ready again.
            if gone || self.read_page(ring).is_err() {
                self.give_up(ring);
            }
        }
        let end = now();
        let took = end.saturating_sub(start);
        if let Verdict::Over { until } = self.rings_account.charge(end, took) {
            self.rings_account.restart(until);
            self.ignored_until = Some(until);
        }
    }

    fn read_page(&mut self, ring: usize) -> io::Result<()> {
        let Self { table, slots, feed, since, acts, turn, .. } = self;
        let InterruptFeed { rings: Some(rings), targets, .. } = &mut **feed else { return Ok(()) };
        let read = rings.read(ring, |interrupt| {
            let Some((index, own)) = targets.find(interrupt).filter(|_| interrupt.at >= *since) else { return };
            let Some(Some(slot)) = slots.get_mut(index) else { return };
            let at = now();
            if !table.ahead(index) && !own {
                // The vCPU did not take the time until now while ahead: charge it before it is raised.
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

    /// Waits for the rings only while that can put a vCPU ahead. If there are rivals, all pending interrupts count.
    /// Otherwise those that came while the rings were not waited for are ignored, except in the last [`GRANT`] ns: a
    /// vCPU that is paused in the middle of its answer may run on to finish it.
    fn listen(&mut self) {
        self.ignored_until = self.ignored_until.filter(|until| *until > now());
        let wanted = self.ignored_until.is_none() && (self.feed.rivals || self.table.pauses_boosted());
        if wanted == self.listening {
            return;
        }
        self.listening = wanted;
        self.since = if self.feed.rivals { 0 } else { now().saturating_sub(GRANT) };
        let flags = if wanted { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        // It cannot fail for a descriptor that is in the set.
        let _ = epoll::modify(&self.epoll, &self.channels.rings, epoll::EventData::new_u64(RINGS), flags);
    }

    /// Removes this ring from the set.
    fn give_up(&self, ring: usize) {
        if let Some(ring) = self.feed.rings.iter().flat_map(Rings::fds).nth(ring) {
            let _ = epoll::delete(&self.channels.rings, ring);
        }
    }

    /// Checks every vCPU that is ahead and whose grant may be used up, each once.
    fn check(&mut self) {
        for _ in 0..self.slots.len() {
            let at = now();
            let Some(index) = self.table.due(at) else { return };
            let ran = self.charge(index).unwrap_or(0);
            let slot = self.slots.get_mut(index).and_then(Option::as_deref_mut);
            let sights = &mut self.channels.sights;
            let asleep = |slot: &mut WatchedThread| {
                let asleep = slot.reading.asleep();
                if slot.reading.ask(sights) {
                    sights.ring();
                }
                asleep
            };
            self.table.checked(index, ran, at, || slot.is_none_or(asleep));
            self.act();
        }
    }

    /// Reads the policy of a paused thread if that is due: one, because looks and ends of pauses come between. Pauses
    /// the thread again if it has escaped.
    fn inspect(&mut self) {
        let now = now();
        if let Some(index) = self.inspections.due(now) {
            if let Some(Some(slot)) = self.slots.get(index).filter(|_| self.table.paused(index)) {
                self.inspections.inspected(index, now);
                if slot.place.is_real_time().is_ok_and(|escaped| escaped) {
                    // The end of the pause notices a thread that cannot be changed.
                    let _ = slot.place.leave(true);
                    self.tell_escape(index);
                }
                self.plan_inspection(index);
            }
        }
    }

    /// Counts that this thread has escaped from its pause, and gives the alarm.
    fn tell_escape(&mut self, index: SlotIndex) {
        if let Some(Some(slot)) = self.slots.get(index) {
            slot.tally.escaped.fetch_add(1, Ordering::Relaxed);
        }
        let now = now();
        self.channels.escaped_at.store(now, Ordering::Release);
        if now.saturating_sub(self.alarmed) >= ALARM_GAP {
            self.alarmed = now;
            // It fails only for a full counter: then the guardian has not taken 2^64 alarms.
            let _ = rustix::io::write(&self.channels.alarm, &1u64.to_ne_bytes());
        }
    }

    /// Has this thread inspected in its pause.
    fn plan_inspection(&mut self, index: SlotIndex) {
        if let Some(until) = self.table.paused_until(index) {
            self.inspections.plan(index, now(), until);
        }
    }

    /// Carries out the pending orders. Returns false when the thread has to end.
    fn process_orders(&mut self) -> bool {
        let before = self.channels.done.load(Ordering::Relaxed);
        let goes_on = self.carry_out();
        if self.channels.done.load(Ordering::Relaxed) != before {
            // The wake-up fails for an invalid address only.
            let _ = futex::wake(&self.channels.done, futex::Flags::PRIVATE, 1);
        }
        goes_on
    }

    fn carry_out(&mut self) -> bool {
        loop {
            // Read this first, so that orders given before the planner's end was dropped are still carried out.
            let abandoned = self.channels.orders.is_abandoned();
            match self.channels.orders.pop() {
                Ok(Order::Watch(index, slot)) => self.watch(index, slot),
                Ok(Order::Forget(index)) => self.forget(index),
                Ok(Order::Follow(feed)) => self.install_feed(feed),
                Ok(Order::Stop) => return false,
                Err(_) => return !abandoned,
            }
            self.channels.done.fetch_add(1, Ordering::Release);
        }
    }

    /// Installs other rings, other vCPUs, or both, and hands the former ones back.
    fn install_feed(&mut self, mut next: Box<InterruptFeed>) {
        if next.rings.is_none() && !next.return_rings {
            next.rings = self.feed.rings.take();
        }
        let before = std::mem::replace(&mut self.feed, next);
        // One entry of the queue is reserved for this.
        let _ = self.channels.returned.push(Returned::InterruptFeed(before));
    }

    fn watch(&mut self, index: SlotIndex, slot: Box<WatchedThread>) {
        let boosted = slot.place.has_ahead();
        let WatchedThread { share, cpu, rank, pool, .. } = *slot;
        self.table.watch(index, Watched { share, cpu, rank, boosted, pool }, now());
        self.inspections.watch(index);
        // Indices are below the capacity. The list is only as long as necessary, because every look goes through it.
        while self.slots.len() <= index && self.slots.len() < self.slots.capacity() {
            self.slots.push(None);
        }
        let process = slot.clock.id();
        if let Some(entry) = self.slots.get_mut(index) {
            *entry = Some(slot);
        }
        self.lead(process);
    }

    /// Makes the first slot of a process the leader of all its slots.
    fn lead(&mut self, clock: libc::clockid_t) {
        let of = |slot: &Option<Box<WatchedThread>>| slot.as_ref().is_some_and(|slot| slot.clock.id() == clock);
        let Some(leader) = self.slots.iter().position(of) else { return };
        for slot in self.slots.iter_mut().flatten().filter(|slot| slot.clock.id() == clock) {
            slot.leader = leader;
        }
    }

    fn forget(&mut self, index: SlotIndex) {
        let elsewhere = self.table.forget(index);
        self.inspections.forget(index);
        let Some(slot) = self.slots.get_mut(index).and_then(Option::take) else { return };
        if slot.leader == index {
            self.lead(slot.clock.id());
        }
        if elsewhere {
            let _ = slot.place.take();
            slot.tally.paused.store(false, Ordering::Relaxed);
        }
        // The queue has an entry for every slot, so this neither waits nor fails while the planner lives.
        let _ = self.channels.returned.push(Returned::WatchedThread(index, slot));
    }

    fn release_all(&mut self) {
        for index in 0..self.slots.len() {
            self.forget(index);
        }
    }

    /// Reads the CPU time of processes, and of their threads if a thread may be over its cap.
    fn look(&mut self) {
        let start = now();
        let ran = self.processes_ran();
        if !self.table.may_rest(ran, now()) {
            self.look_at_threads();
        }
        self.table.cost(now().saturating_sub(start));
    }

    /// Has the states and CPUs of threads read that were needed since the last look.
    fn ask(&mut self) {
        let sights = &mut self.channels.sights;
        let asked = self.slots.iter_mut().flatten().fold(false, |asked, slot| slot.reading.ask(sights) | asked);
        if asked {
            sights.ring();
        }
    }

    /// The first slot of each process.
    fn leaders(&mut self) -> impl Iterator<Item = &mut WatchedThread> {
        let leaders = self.slots.iter_mut().enumerate();
        leaders.filter_map(|(index, slot)| slot.as_deref_mut().filter(|slot| slot.leader == index))
    }

    /// CPU time of all watched processes since the last look, ns.
    fn processes_ran(&mut self) -> u64 {
        self.leaders().fold(0, |all, slot| {
            let ran = slot.clock.take();
            slot.unread = slot.unread.saturating_add(i64::try_from(ran).unwrap_or(i64::MAX));
            all.saturating_add(ran)
        })
    }

    /// Whether the process of this slot took so little that reading its threads, some us each, is not worth it.
    fn is_quiet(&self, slot: &WatchedThread) -> bool {
        let leader = self.slots.get(slot.leader).and_then(Option::as_ref);
        leader.is_some_and(|leader| leader.unread < QUIET)
    }

    /// Reads and charges the threads that are not paused. Skips quiet processes. In each process the threads that were
    /// busy last time come first; the others are read only if those do not account for the time of the process.
    fn look_at_threads(&mut self) {
        for busy in [true, false] {
            for index in 0..self.slots.len() {
                let slot = self.slots.get(index).and_then(Option::as_ref);
                let wanted = |slot: &WatchedThread| slot.busy == busy && slot.read != self.turn && !self.is_quiet(slot);
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

    /// Drops time of a process that its watched threads do not account for: threads that are not watched took it. An
    /// exception is a process with a paused thread, which may have taken the time in its pause: that thread is read at
    /// the end of the pause, and its time is subtracted then. If the time were dropped before, that subtraction would
    /// hide as much of the process's later time.
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

    /// Reads and charges one thread. Returns its CPU time since the last reading, ns.
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

    /// Carries out actions in the order in which the table asked for them: one reading may both pause a thread and put
    /// it ahead.
    fn act(&mut self) {
        for at in 0..self.acts.len() {
            let Some(act) = self.acts.get(at).copied() else { break };
            let index = act.slot();
            let Some(Some(slot)) = self.slots.get_mut(index) else { continue };
            let mut escaped = false;
            let done = match act {
                Action::Demote(_) => slot.pause(slot.read == self.turn).map(|()| 0),
                Action::Promote(_) => slot.resume(&mut escaped),
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
            if escaped {
                self.tell_escape(index);
            }
            if matches!(act, Action::Demote(_)) {
                self.plan_inspection(index);
            }
        }
        self.acts.clear();
    }
}

/// Never pushes beyond the capacity, because this thread must not allocate. The capacity is three actions for each
/// slot, more than a turn produces. An action that does not fit is dropped; the next look asks for it again.
fn push(acts: &mut Vec<Action>, act: Action) {
    if acts.len() < acts.capacity() {
        acts.push(act);
    }
}

impl WatchedThread {
    /// `fresh`: the thread was read in this turn.
    fn pause(&mut self, fresh: bool) -> io::Result<()> {
        // Count the pause before the policy changes, so that a reader who sees SCHED_IDLE also sees the pause
        // (`Pauses`).
        self.tally.paused.store(true, Ordering::Relaxed);
        self.tally.pauses.fetch_add(1, Ordering::Release);
        self.since = now();
        self.place.leave(fresh).inspect_err(|_| {
            self.tally.paused.store(false, Ordering::Relaxed);
            self.tally.pauses.fetch_sub(1, Ordering::Relaxed);
        })
    }

    /// Puts the thread ahead, from its place or from a pause.
    fn raise(&mut self) -> io::Result<()> {
        self.place.raise()?;
        self.tally.raised.fetch_add(1, Ordering::Relaxed);
        if self.tally.paused.swap(false, Ordering::Relaxed) {
            self.tally.paused_ns.fetch_add(now().saturating_sub(self.since), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Gives the thread its place back, and tells whether it had `escaped` from the pause. Returns the CPU time that it
    /// took in the pause, ns. The figure is complete, because the change of policy makes the kernel update the thread's
    /// run time.
    fn resume(&mut self, escaped: &mut bool) -> io::Result<u64> {
        *escaped = self.place.take()?;
        self.tally.paused.store(false, Ordering::Relaxed);
        self.tally.paused_ns.fetch_add(now().saturating_sub(self.since), Ordering::Relaxed);
        self.reading.take().map(|taken| taken.ran)
    }
}

/// Records that the thread in this slot was read and had taken `ran` ns.
fn was_read(slots: &mut [Option<Box<WatchedThread>>], index: SlotIndex, ran: u64, turn: u64) {
    let ran = i64::try_from(ran).unwrap_or(i64::MAX);
    let Some(Some(slot)) = slots.get_mut(index) else { return };
    (slot.busy, slot.read) = (ran >= QUIET, turn);
    let leader = slot.leader;
    if let Some(Some(leader)) = slots.get_mut(leader) {
        leader.unread = leader.unread.saturating_sub(ran);
    }
}

/// Waits for an event, at most until `next`, ns of [`now`].
fn wait(epoll: &OwnedFd, events: &mut [epoll::Event], next: Option<u64>) -> rustix::io::Result<usize> {
    let time_out = next.map(|at| timespec(at.saturating_sub(now())));
    epoll::wait(epoll, events, time_out.as_ref())
}

fn this_cpu() -> u32 {
    // SAFETY: takes no arguments and touches no memory of ours. It cannot fail where the kernel has a vDSO; the -1 of
    // an error becomes u32::MAX, which is no CPU of the table.
    let cpu = unsafe { libc::sched_getcpu() };
    u32::try_from(cpu).unwrap_or(u32::MAX)
}

fn drain(fd: &OwnedFd) {
    let mut count = [0; 8];
    let _ = rustix::io::read(fd, &mut count);
}

#[cfg(test)]
mod tests {
    /// The result depends on how punctually this machine runs threads. `make thorough` runs it.
    mod real_speed {
        use super::super::*;

        #[test]
        #[ignore = "the machine's real speed decides: make thorough"]
        fn a_wait_ends_within_its_millisecond() {
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
            let mut events = [NO_EVENT; 1];
            // The machine may have other work: the shortest of many waits shows what the call itself takes.
            let shortest = (0..200).map(|_| {
                let start = now();
                assert_eq!(wait(&epoll, &mut events, Some(start + 150_000)), Ok(0));
                now() - start
            });
            let shortest = shortest.min().unwrap();
            assert!((150_000..1_000_000).contains(&shortest), "a wait of 150 us took {shortest} ns at best");
        }
    }
}
