//! Runtime caps: no thread that Ontime placed at RT priority keeps a CPU for itself.
//!
//! In: the threads the planner placed at RT priority, each with the most of one CPU it may take there
//! ([`Caps::set`]). Out: a thread over its cap runs at SCHED_IDLE until its use and its cap are even again, some
//! hundred microseconds later, then has its place back; counts of that ([`Caps::report`]).
//!
//! `account` is the arithmetic, `table` who pauses until when and when to look next, `boost` which vCPU stands ahead of
//! others of its level because an interrupt is pending, `who` whom an interrupt is for (all pure), `reading` how CPU
//! time is read, `place` the change of policy, `watcher` the thread. One thread for caps and interrupts: both move the
//! same vCPUs, and what one takes ahead is charged to its cap.
//!
//! Why a period of 2 ms: the pause, (1 - 0.95) x 2 ms = 0.1 ms, is all that an honest guest can lose when it computes
//! through a whole period. Where all watched processes together took less than half of one CPU since the last look,
//! their threads are not read. Why the watcher looks up to [`table::CALM`] budgets later where nobody took half of what
//! it might have: looking costs a few us a thread, at the highest priority. So a guest that begins to spin keeps others
//! waiting for up to (4 + 1) x 1.9 = 9.5 ms once (the kernel's own protection: 950 ms), which its first pause pays
//! back, and for two budgets from then on. Why CPUs have an account too: two threads at 95 % on one CPU would leave
//! nothing.

pub mod account;
mod boost;
pub mod place;
pub mod reading;
pub mod table;
pub mod watcher;
pub mod who;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use ontime_tenants::{Policy, ProcessClock, ThreadId, remedy};
use ontime_trace::TraceError;
use ontime_trace::interrupts::Interrupts;
use rtrb::{Consumer, Producer, PushError, RingBuffer};
use rustix::event::{EventfdFlags, epoll};
use rustix::thread::futex;
use rustix::time::Timespec;
use thiserror::Error;

pub use self::account::Share;
use self::place::Place;
use self::reading::Reading;
pub use self::table::Rank;
use self::table::{SlotIndex, Table};
use self::watcher::{Channels, Hearing, Order, Returned, Slot, Tally, Watcher};
use self::who::{Vm, Who};
use super::census::priority;

/// The longest wait for the watcher to carry out orders.
const PATIENCE: Duration = Duration::from_secs(5);

/// How caps are kept.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// The period over which a cap is judged.
    pub period: Duration,
    /// The most that all watched threads together may take of one CPU.
    pub cpu_share: Share,
    /// The watcher's own place: above every thread it may have to stop.
    pub watcher: Policy,
    /// The most threads watched; memory for them is taken at the start.
    pub capacity: usize,
    /// Descriptors that the daemon needs for so many threads, and for all else.
    pub descriptors: usize,
}

/// Why caps cannot be kept.
#[derive(Debug, Error)]
pub enum CapError {
    /// The watcher could not be set up.
    #[error("runtime caps are off and kernel protections stay on: {what}: {source}; {}", remedy(source))]
    Setup {
        /// What was tried.
        what: &'static str,
        /// The kernel's word.
        source: io::Error,
    },
    /// The process may not have enough files open.
    #[error(
        "runtime caps: cap.threads = {threads} needs {needed} descriptors, and this process may have {allowed}: lower \
         cap.threads in /etc/ontime/daemon.toml, or raise LimitNOFILE= of the unit (ulimit -n); kernel protections \
         stay on"
    )]
    Descriptors {
        /// The most threads watched.
        threads: usize,
        /// Descriptors for them and all else.
        needed: usize,
        /// The limit.
        allowed: u64,
    },
    /// The watcher does not answer.
    #[error(
        "runtime caps are off and kernel protections are restored: the watcher thread has ended or does not answer; \
         report it (`ontime report` collects what is needed), and restart the daemon: systemctl restart ontimed"
    )]
    Lost,
}

/// Why nobody is put ahead.
#[derive(Debug, Error)]
pub enum FollowError {
    /// The watcher does not answer.
    #[error(transparent)]
    Caps(#[from] CapError),
    /// There is no probe.
    #[error("pending interrupts cannot be followed, so vCPUs of a level take turns as under method partitioned: {0}")]
    Probe(#[from] TraceError),
    /// It cannot be waited for.
    #[error("pending interrupts cannot be waited for: {0}; {advice}", advice = remedy(.0))]
    Wait(#[from] io::Error),
}

/// A thread to watch.
#[derive(Debug, Clone, PartialEq)]
pub struct Watch {
    /// Which.
    pub id: ThreadId,
    /// Its place: SCHED_FIFO or SCHED_RR.
    pub place: Policy,
    /// The most of one CPU it may take there.
    pub share: Share,
    /// The CPUs it may run on.
    pub cpus: Vec<u32>,
    /// Who goes without first where a CPU's share is used up.
    pub rank: Rank,
    /// Where it stands while an interrupt is pending; None: always at its place.
    pub ahead: Option<Policy>,
}

impl Watch {
    /// Whether a watch goes on as it is.
    fn is_like(&self, other: &Watch) -> bool {
        let of = |watch: &Watch| (watch.place, watch.share, watch.rank, watch.ahead, watch.only_cpu());
        of(self) == of(other)
    }

    /// The CPU it may run on, where that is one.
    fn only_cpu(&self) -> Option<u32> {
        match self.cpus[..] {
            [cpu] => Some(cpu),
            _ => None,
        }
    }

    /// Whether both may want one CPU at one place.
    fn is_rival(&self, other: &Watch) -> bool {
        self.id != other.id && self.place == other.place && self.cpus.iter().any(|cpu| other.cpus.contains(cpu))
    }
}

/// A VM whose interrupts are followed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Followed {
    /// Threads that make its interrupts pending.
    pub threads: Vec<i32>,
    /// Its vCPUs.
    pub vcpus: Vec<(u32, ThreadId)>,
}

/// How well a thread is watched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cover {
    /// Yes.
    Watched,
    /// Not at all: its share is a whole CPU.
    Whole,
    /// Not at all: it has ended.
    Gone,
    /// Not at all, because of this.
    Failed(String),
}

impl Cover {
    /// Whether the thread cannot take its CPU for itself.
    pub fn holds(&self) -> bool {
        matches!(self, Cover::Watched | Cover::Gone)
    }
}

#[derive(Debug)]
struct Entry {
    index: SlotIndex,
    watch: Watch,
    tally: Arc<Tally>,
}

/// What one watched thread did.
#[derive(Debug, Clone)]
pub struct Use {
    /// Which.
    pub id: ThreadId,
    /// How it is watched.
    pub cover: Cover,
    /// Times it was taken off RT priority.
    pub pauses: u64,
    /// How long it was off RT priority, ns.
    pub paused_ns: u64,
    /// CPU time seen at RT priority, ns.
    pub ran_ns: u64,
    /// Whether it is off RT priority now.
    pub paused: bool,
    /// Times the kernel refused to change its policy.
    pub refused: u64,
    /// Times it was put ahead because of an interrupt.
    pub raised: u64,
    /// CPU time that it took ahead, ns.
    pub ahead_ns: u64,
}

/// Who may be paused, or ahead, while policies are read. A pause is not a thread's place: the planner would put it
/// right, or keep it for the thread's original and give it that on reset. (Nor can pauses be off while the planner
/// looks: on one CPU, a spinning thread at its place keeps the planner from looking.)
#[derive(Debug, Default)]
pub struct Pauses(BTreeMap<ThreadId, Seen>);

/// A watched thread when a [`Pauses`] was taken.
#[derive(Debug)]
struct Seen {
    place: Policy,
    ahead: Option<Policy>,
    tally: Arc<Tally>,
    count: u64,
    paused: bool,
}

impl Pauses {
    /// The place of a thread that was just read to have this policy, past a pause and past being ahead.
    pub fn past(&self, id: ThreadId, read: Policy) -> Policy {
        match (read, self.0.get(&id)) {
            (Policy::Idle, Some(seen)) if seen.has_been_paused() => seen.place,
            (ahead, Some(seen)) if seen.ahead == Some(ahead) => seen.place,
            _ => read,
        }
    }
}

impl Seen {
    fn has_been_paused(&self) -> bool {
        self.paused || self.tally.pauses.load(Ordering::Acquire) != self.count
    }
}

/// The planner's handle of the watcher.
#[derive(Debug)]
pub struct Caps {
    orders: Producer<Order>,
    /// How many orders were given, and carried out.
    ordered: u32,
    done: Arc<AtomicU32>,
    wake: Arc<OwnedFd>,
    returned: Consumer<Returned>,
    /// The set of rings that the watcher listens to.
    rings: Arc<OwnedFd>,
    /// What tells of interrupts, on which CPUs.
    interrupts: Option<(Interrupts, Vec<u32>)>,
    who: Who,
    /// Whether those that are put ahead may run into others of their level.
    rivals: bool,
    thread: Option<std::thread::JoinHandle<()>>,
    /// The watcher's place.
    watcher: Policy,
    /// The watcher's thread number.
    pub watcher_tid: i32,
    entries: BTreeMap<ThreadId, Entry>,
    uncovered: BTreeMap<ThreadId, Cover>,
    free: Vec<SlotIndex>,
}

impl Caps {
    /// Starts the watcher.
    ///
    /// # Errors
    /// [`CapError::Descriptors`]. [`CapError::Setup`] where memory cannot be locked, the thread cannot be started or
    /// not placed at its priority.
    pub fn start(settings: Settings) -> Result<Self, CapError> {
        let setup = |what| move |source: io::Error| CapError::Setup { what, source };
        let allowed = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        if let Some(allowed) = allowed.filter(|allowed| *allowed < settings.descriptors as u64) {
            let (threads, needed) = (settings.capacity, settings.descriptors);
            return Err(CapError::Descriptors { threads, needed, allowed });
        }
        rustix::mm::mlockall(rustix::mm::MlockAllFlags::CURRENT | rustix::mm::MlockAllFlags::FUTURE)
            .map_err(|error| setup("locking memory (LimitMEMLOCK=infinity)")(error.into()))?;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| setup("eventfd")(error.into()))?;
        let wake = Arc::new(wake);
        let capacity = settings.capacity;
        // Room for a forget and a watch of every slot at once, and a few single orders.
        let (orders, take_orders) = RingBuffer::new(2 * capacity + 8);
        // And for what is heard by: one order of it is under way at a time.
        let (give_back, returned) = RingBuffer::new(capacity + 2);
        let rings = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| setup("epoll")(error.into()))?;
        let rings = Arc::new(rings);
        let done = Arc::new(AtomicU32::new(0));
        let period = u64::try_from(settings.period.as_nanos()).unwrap_or(u64::MAX);
        let table = Table::new(capacity, cpu_count(), settings.cpu_share, period, watcher::now());
        let channels = Channels {
            orders: take_orders,
            done: Arc::clone(&done),
            wake: Arc::clone(&wake),
            returned: give_back,
            rings: Arc::clone(&rings),
        };
        let watcher = Watcher::new(table, capacity, channels).map_err(setup("epoll"))?;
        let (tell, told) = sync_channel(1);
        let thread = std::thread::Builder::new()
            .name("ontime-cap".into())
            .stack_size(256 * 1024)
            .spawn(move || {
                let placed = place::place_self(settings.watcher);
                let go = placed.is_ok();
                let _ = tell.send(placed.map(|()| rustix::thread::gettid().as_raw_nonzero().get()));
                if go {
                    watcher.run();
                }
            })
            .map_err(setup("starting the watcher thread"))?;
        let told = told.recv().map_err(|_| CapError::Lost)?;
        let watcher_tid = told.map_err(setup("placing the watcher thread (CAP_SYS_NICE)"))?;
        Ok(Self {
            orders,
            ordered: 0,
            done,
            wake,
            returned,
            rings,
            interrupts: None,
            who: Who::default(),
            rivals: false,
            thread: Some(thread),
            watcher: settings.watcher,
            watcher_tid,
            entries: BTreeMap::new(),
            uncovered: BTreeMap::new(),
            free: (0..capacity).rev().collect(),
        })
    }

    /// Whom [`Self::release`] stops watching.
    pub fn leaving<'a>(&'a self, wanted: &'a [Watch]) -> impl Iterator<Item = ThreadId> + 'a {
        let keep: BTreeMap<ThreadId, &Watch> = wanted.iter().map(|watch| (watch.id, watch)).collect();
        self.entries.values().map(|entry| &entry.watch).filter_map(move |watch| {
            let stays = keep.get(&watch.id).is_some_and(|kept| kept.is_like(watch));
            (!stays).then_some(watch.id)
        })
    }

    /// Stops watching every thread that is not in `wanted` at that place. After this the planner may place them: the
    /// watcher will not touch them again.
    ///
    /// # Errors
    /// [`CapError::Lost`].
    pub fn release(&mut self, wanted: &[Watch]) -> Result<(), CapError> {
        let leaving: Vec<ThreadId> = self.leaving(wanted).collect();
        for id in leaving {
            if let Some(entry) = self.entries.remove(&id) {
                self.order(Order::Forget(entry.index))?;
            }
        }
        self.sync()
    }

    /// Watches exactly `wanted`: the planner has placed them.
    ///
    /// # Errors
    /// [`CapError::Lost`].
    pub fn set(&mut self, wanted: &[Watch]) -> Result<(), CapError> {
        self.release(wanted)?;
        self.uncovered.clear();
        for watch in wanted {
            match self.entries.get_mut(&watch.id) {
                Some(entry) => entry.watch.cpus.clone_from(&watch.cpus),
                None => self.add(watch)?,
            }
        }
        self.sync()
    }

    /// Watches one more, which the planner has just placed, if it is not watched yet.
    ///
    /// # Errors
    /// [`CapError::Lost`].
    pub fn start_watching(&mut self, watch: &Watch) -> Result<(), CapError> {
        if self.entries.contains_key(&watch.id) {
            return Ok(());
        }
        self.add(watch)?;
        self.sync()
    }

    /// Puts vCPUs of these VMs ahead while an interrupt is pending, as far as they are watched with a place for that;
    /// with no VMs, nobody.
    ///
    /// # Errors
    /// [`FollowError`]: then nobody is put ahead.
    pub fn follow(&mut self, root: &Path, cpus: &[u32], vms: &[Followed]) -> Result<(), FollowError> {
        let slot = |(vcpu, id): &(u32, ThreadId)| Some((*vcpu, id.tid, self.entries.get(id)?.index));
        let of = |vm: &Followed| Vm { threads: vm.threads.clone(), vcpus: vm.vcpus.iter().filter_map(slot).collect() };
        let who = Who::new(&vms.iter().map(of).collect::<Vec<_>>());
        if vms.is_empty() || self.interrupts.as_ref().is_some_and(|(_, on)| on != cpus) {
            self.deafen()?;
        }
        if vms.is_empty() {
            return Ok(());
        }
        let followed = self.follow_probe(root, cpus, who);
        if followed.is_err() {
            self.deafen()?;
        }
        followed
    }

    fn follow_probe(&mut self, root: &Path, cpus: &[u32], who: Who) -> Result<(), FollowError> {
        let mut rings = None;
        if self.interrupts.is_none() {
            let (interrupts, new) = Interrupts::start(root, cpus)?;
            for (index, ring) in (0u64..).zip(new.fds()) {
                epoll::add(&self.rings, ring, epoll::EventData::new_u64(index), epoll::EventFlags::IN)
                    .map_err(io::Error::from)?;
            }
            self.interrupts = Some((interrupts, cpus.to_vec()));
            rings = Some(new);
        }
        let rivals = self.has_rivals(&who);
        if rings.is_some() || who != self.who || rivals != self.rivals {
            (self.who, self.rivals) = (who.clone(), rivals);
            self.order(Order::Hear(Box::new(Hearing { rings, who, rivals, deaf: false })))?;
            self.sync()?;
        }
        if let Some((interrupts, _)) = &mut self.interrupts {
            interrupts.follow(&self.who.threads())?;
        }
        Ok(())
    }

    /// Whether one of these may wait for another thread of its place: then it is told of all its interrupts, else only
    /// while it is paused.
    fn has_rivals(&self, who: &Who) -> bool {
        let watches = || self.entries.values().map(|entry| &entry.watch);
        let of = |thread| watches().filter(move |watch| watch.id.tid == thread);
        who.vcpus().flat_map(of).any(|watch| watches().any(|other| watch.is_rival(other)))
    }

    /// Ends telling of interrupts.
    fn deafen(&mut self) -> Result<(), CapError> {
        let Some((interrupts, _)) = self.interrupts.take() else { return Ok(()) };
        (self.who, self.rivals) = (Who::default(), false);
        self.order(Order::Hear(Box::new(Hearing { deaf: true, ..Hearing::default() })))?;
        self.sync()?;
        // After its rings are closed.
        drop(interrupts);
        Ok(())
    }

    /// The trace instance that tells of interrupts; nobody but its maker takes it away, or who is told of it.
    pub fn instance(&self) -> Option<PathBuf> {
        self.interrupts.as_ref().map(|(interrupts, _)| interrupts.dir())
    }

    /// For reading policies from now on.
    pub fn pauses(&self) -> Pauses {
        let seen = |entry: &Entry| {
            let count = entry.tally.pauses.load(Ordering::Acquire);
            let paused = entry.tally.paused.load(Ordering::Relaxed);
            let Watch { place, ahead, .. } = entry.watch;
            (entry.watch.id, Seen { place, ahead, tally: Arc::clone(&entry.tally), count, paused })
        };
        Pauses(self.entries.values().map(seen).collect())
    }

    fn add(&mut self, watch: &Watch) -> Result<(), CapError> {
        let cover = match self.open(watch) {
            Ok((index, slot)) => {
                let tally = Arc::clone(&slot.tally);
                self.order(Order::Watch(index, slot))?;
                self.entries.insert(watch.id, Entry { index, watch: watch.clone(), tally });
                return Ok(());
            }
            Err(cover) => cover,
        };
        self.uncovered.insert(watch.id, cover);
        Ok(())
    }

    fn open(&mut self, watch: &Watch) -> Result<(SlotIndex, Box<Slot>), Cover> {
        if watch.share.is_whole() {
            return Err(Cover::Whole);
        }
        // Threads of rank Teller are the kernel's.
        if watch.rank != Rank::Teller && priority(watch.place) >= priority(self.watcher) {
            let (place, watcher) = (watch.place, self.watcher);
            return Err(Cover::Failed(format!("its place {place} is not below the watcher's, {watcher}")));
        }
        let place = Place::open(watch.id, watch.place, watch.ahead)
            .map_err(refused)?
            .ok_or_else(|| Cover::Failed(format!("its place {} is no RT priority", watch.place)))?;
        let reading = Reading::open(watch.id.pid, watch.id.tid, watch.only_cpu()).map_err(refused)?;
        let index = self.free.pop().ok_or_else(|| {
            Cover::Failed(
                "more RT threads than it has room for: raise cap.threads in /etc/ontime/daemon.toml".to_owned(),
            )
        })?;
        let cpu = watch.cpus.first().copied().unwrap_or(0);
        let clock = ProcessClock::new(watch.id.pid);
        let tally = Arc::default();
        let rank = watch.rank;
        let share = watch.share;
        let (owed, busy) = (false, false);
        let (unread, read, since) = (0, 0, 0);
        let slot =
            Slot { reading, clock, leader: index, unread, owed, busy, read, place, share, cpu, rank, tally, since };
        Ok((index, Box::new(slot)))
    }

    /// What every watched thread did, and which are not watched.
    pub fn report(&self) -> Vec<Use> {
        let watched = self.entries.values().map(|entry| Use {
            id: entry.watch.id,
            cover: Cover::Watched,
            pauses: entry.tally.pauses.load(Ordering::Relaxed),
            paused_ns: entry.tally.paused_ns.load(Ordering::Relaxed),
            ran_ns: entry.tally.ran_ns.load(Ordering::Relaxed),
            paused: entry.tally.paused.load(Ordering::Relaxed),
            refused: entry.tally.refused.load(Ordering::Relaxed),
            raised: entry.tally.raised.load(Ordering::Relaxed),
            ahead_ns: entry.tally.ahead_ns.load(Ordering::Relaxed),
        });
        let unwatched = self.uncovered.iter().map(|(id, cover)| Use {
            id: *id,
            cover: cover.clone(),
            pauses: 0,
            paused_ns: 0,
            ran_ns: 0,
            paused: false,
            refused: 0,
            raised: 0,
            ahead_ns: 0,
        });
        watched.chain(unwatched).collect()
    }

    /// The threads that are watched.
    pub fn watched(&self) -> BTreeSet<ThreadId> {
        self.entries.keys().copied().collect()
    }

    /// Whether every thread of the last [`Self::set`] is held to its cap: it is watched, and the kernel has never
    /// refused to take it off its place.
    pub fn complete(&self) -> bool {
        self.uncovered.values().all(Cover::holds)
            && self.entries.values().all(|entry| entry.tally.refused.load(Ordering::Relaxed) == 0)
    }

    fn order(&mut self, order: Order) -> Result<(), CapError> {
        if let Err(PushError::Full(order)) = self.orders.push(order) {
            // The watcher takes what is there, then there is room.
            self.carried_out()?;
            self.orders.push(order).map_err(|_| CapError::Lost)?;
        }
        self.ordered = self.ordered.wrapping_add(1);
        Ok(())
    }

    /// Waits until every order is carried out. The watcher wakes this thread, at normal priority: a sleep would end by
    /// `ktimers/N`, which a vCPU that spins and that is still to be capped keeps from running (PREEMPT_RT).
    fn carried_out(&self) -> Result<(), CapError> {
        self.ring();
        let end = Instant::now() + PATIENCE;
        loop {
            let done = self.done.load(Ordering::Acquire);
            if done == self.ordered {
                return Ok(());
            }
            let left = end.saturating_duration_since(Instant::now());
            if self.orders.is_abandoned() || left.is_zero() {
                return Err(CapError::Lost);
            }
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            // Woken, timed out, interrupted, or done before: look again.
            let _ = futex::wait(&self.done, futex::Flags::PRIVATE, done, Some(&left));
        }
    }

    fn ring(&self) {
        // Full (2^64 - 1 rings) or invalid is impossible; the sync that follows would notice.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Waits until all orders are done, and closes what came back.
    fn sync(&mut self) -> Result<(), CapError> {
        self.carried_out()?;
        while let Ok(returned) = self.returned.pop() {
            match returned {
                Returned::Slot(index, closed_here) => {
                    drop(closed_here);
                    self.free.push(index);
                    self.entries.retain(|_, entry| entry.index != index);
                }
                Returned::Hearing(closed_here) => drop(closed_here),
            }
        }
        Ok(())
    }
}

impl Drop for Caps {
    fn drop(&mut self) {
        // While caps are kept: taking the trace instance away waits for grace periods, which do not end beside a thread
        // that spins.
        let deaf = self.deafen().is_ok();
        // A watcher that does not answer is not waited for: the planner has to go on.
        let answers = deaf && self.sync().is_ok();
        let stopped = self.orders.push(Order::Stop).is_ok();
        self.ring();
        if let Some(thread) = self.thread.take().filter(|_| answers && stopped) {
            let _ = thread.join();
        }
    }
}

fn refused(error: io::Error) -> Cover {
    match error.raw_os_error() {
        Some(libc::ESRCH | libc::ENOENT) => Cover::Gone,
        _ => Cover::Failed(error.to_string()),
    }
}

fn cpu_count() -> usize {
    // SAFETY: takes an integer, touches no memory of ours.
    let count = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) };
    usize::try_from(count).unwrap_or(1).max(1)
}

#[cfg(test)]
mod tests;
