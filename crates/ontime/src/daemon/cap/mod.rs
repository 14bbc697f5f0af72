//! Runtime caps: no thread that Ontime placed at RT priority can monopolize a CPU.
//!
//! Terms: a thread's place is the RT policy and priority that the planner gave it. A paused thread runs at SCHED_IDLE.
//! A vCPU that is ahead runs at a higher FIFO priority than its place, in front of the other vCPUs of its level,
//! because an interrupt is pending for it.
//!
//! In: the threads that the planner placed at RT priority, each with its cap, a share of one CPU ([`Caps::set`]). Out:
//! a thread over its cap is paused until its use is within the cap again, some hundred microseconds later, and then
//! gets its place back; counters of pauses and CPU time ([`Caps::report`]).
//!
//! Modules: `account` is the arithmetic. `table` decides which thread pauses until when, and when to look next. `boost`
//! decides when a vCPU is ahead. `targets` maps an interrupt to its vCPU. `inspections` decides when a paused thread's
//! policy is read. These five are pure. `reading` reads CPU time, `sight` reads where a thread is and whether it
//! sleeps, `place` changes the policy, `watcher` is the thread. One thread handles both caps and interrupts, because
//! both move the same vCPUs, and time that a vCPU runs ahead is charged to its cap.
//!
//! Why the period is 2 ms: an honest guest that computes through a whole period loses only one pause, (1 - 0.95) x 2 ms
//! = 0.1 ms.
//!
//! Why CPUs have an account too: two threads at 95 % each on one CPU would leave nothing.
//!
//! Reading a thread costs a few us at the highest priority, so the watcher looks as rarely as the caps allow. If all
//! watched processes together took less than half of one CPU since the last look, it reads none of their threads. While
//! no thread takes more than half of the elapsed time, the interval between two looks grows to [`table::CALM`] budgets.
//! So a guest that begins to spin can delay others once by up to (4 + 1) x 1.9 = 9.5 ms (with the kernel's own
//! protection: 950 ms); its first pause pays that back. From then on it can delay them by two budgets at most.

pub(crate) mod account;
mod boost;
mod inspections;
pub(crate) mod place;
pub(crate) mod reading;
mod sight;
pub(crate) mod table;
pub(crate) mod targets;
pub(crate) mod watcher;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use ontime_base::clock;
use ontime_tenants::{Policy, ProcessClock, ThreadId, limit_waits, remedy};
use ontime_trace::TraceError;
use ontime_trace::interrupts::Interrupts;
use rtrb::{Consumer, Producer, PushError, RingBuffer};
use rustix::event::{EventfdFlags, epoll};
use rustix::thread::futex;
use rustix::time::Timespec;
use thiserror::Error;

pub(crate) use self::account::Share;
use self::place::PlacedThread;
use self::reading::Reading;
use self::sight::Readers;
pub(crate) use self::table::Rank;
use self::table::{Pool, SlotIndex, Table};
use self::targets::{InterruptTargets, Vm};
use self::watcher::{Channels, InterruptFeed, Order, Returned, Tally, WatchedThread, Watcher};
use super::census::priority;
use super::own::{OwnThread, this_thread};

/// How long the planner's thread waits at most for the watcher to carry out orders.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long kernel protections stay on after a thread has escaped from its pause. The thread may have ended by then, or
/// be watched anew because it has changed its CPUs.
const AFTER_ESCAPE: Duration = Duration::from_secs(600);

/// Settings of the watcher.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    /// The period of every account: a cap is a share of this length.
    pub period: Duration,
    /// The most that all watched threads together may take of one CPU.
    pub cpu_share: Share,
    /// The watcher's own policy and priority, above those of every thread that it may have to pause.
    pub watcher: Policy,
    /// The most threads watched; their memory is allocated at the start.
    pub capacity: usize,
    /// File descriptors that the daemon needs for that many threads and for everything else.
    pub descriptors: usize,
}

/// Why caps cannot be kept.
#[derive(Debug, Error)]
pub(crate) enum CapError {
    /// The watcher could not be set up.
    #[error("runtime caps are off and kernel protections stay on: {what}: {source}; {}", remedy(source))]
    Setup {
        /// What the daemon tried to do.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The limit of open files (RLIMIT_NOFILE) is too low.
    #[error(
        "runtime caps: cap.threads = {threads} needs {needed} descriptors, and this process may have {allowed}: lower \
         cap.threads in /etc/ontime/daemon.toml, or raise LimitNOFILE= of the unit (ulimit -n); kernel protections \
         stay on"
    )]
    Descriptors {
        /// The most threads watched (`cap.threads`).
        threads: usize,
        /// Descriptors needed for these threads and for everything else.
        needed: usize,
        /// The present limit.
        allowed: u64,
    },
    /// The watcher thread has ended, or did not answer in time.
    #[error(
        "runtime caps are off and kernel protections are restored: the watcher thread has ended or does not answer; \
         report it (`ontime report` collects what is needed), and restart the daemon: systemctl restart ontimed"
    )]
    Lost,
}

/// Why no vCPU can be put ahead.
#[derive(Debug, Error)]
pub(crate) enum FollowError {
    /// The watcher thread has ended, or did not answer in time.
    #[error(transparent)]
    Caps(#[from] CapError),
    /// The trace probe could not be installed.
    #[error("pending interrupts cannot be followed, so vCPUs of a level take turns as under method partitioned: {0}")]
    Probe(#[from] TraceError),
    /// The probe's trace rings could not be added to the epoll set.
    #[error("pending interrupts cannot be waited for: {0}; {advice}", advice = remedy(.0))]
    Wait(#[from] io::Error),
}

/// A thread to watch.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Watch {
    pub id: ThreadId,
    /// Its place: SCHED_FIFO or SCHED_RR.
    pub place: Policy,
    /// Its cap: the most of one CPU that it may take at its place.
    pub share: Share,
    /// The CPUs it may run on.
    pub cpus: Vec<u32>,
    /// Decides which threads are paused first when a CPU's share is used up.
    pub rank: Rank,
    /// The place of this vCPU while an interrupt is pending; None: never put ahead.
    pub ahead: Option<Policy>,
    /// What it may take together with other threads.
    pub shared: Option<SharedCap>,
}

/// The most that all threads with a reservation may take together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SharedCap {
    /// The name of the reservation.
    pub reservation: String,
    /// What is reserved; above 1 for several CPUs.
    pub share: Share,
}

impl Watch {
    /// Whether a watch can continue unchanged.
    fn is_like(&self, other: &Watch) -> bool {
        let of = |watch: &Watch| (watch.place, watch.share, watch.rank, watch.ahead, watch.only_cpu());
        of(self) == of(other) && self.shared == other.shared
    }

    /// The CPU that the thread is pinned to; None where it may run on several.
    fn only_cpu(&self) -> Option<u32> {
        match self.cpus[..] {
            [cpu] => Some(cpu),
            _ => None,
        }
    }

    /// Whether both threads have the same place and may run on a common CPU, so that one may have to wait for the
    /// other.
    fn is_rival(&self, other: &Watch) -> bool {
        self.id != other.id && self.place == other.place && self.cpus.iter().any(|cpu| other.cpus.contains(cpu))
    }
}

/// A VM whose pending interrupts are followed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Followed {
    /// Threads that make interrupts of this VM pending.
    pub threads: Vec<i32>,
    /// Its vCPUs: number and thread.
    pub vcpus: Vec<(u32, ThreadId)>,
}

/// Whether a thread is watched, and why not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cover {
    /// It is watched.
    Watched,
    /// Not watched: its share is a whole CPU.
    Whole,
    /// Not watched: it has ended.
    Gone,
    /// Not watched, for this reason.
    Failed(Unwatched),
}

/// Why a thread is not watched. The text has the cause and the remedy, but not the thread.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum Unwatched {
    /// The watcher could not preempt it.
    #[error(
        "its place {place} is not below the watcher's, {watcher}; lower the thread (chrt, libvirt: <vcpusched>), or \
         raise priorities.base in /etc/ontime/tenants.toml"
    )]
    Above {
        /// The thread's place.
        place: Policy,
        /// The watcher's policy and priority.
        watcher: Policy,
    },
    /// The planner asked for a cap of a thread without real-time priority.
    #[error("its place {0} is no real-time priority, a defect of Ontime; report it with the output of `ontime report`")]
    NotRealTime(Policy),
    /// All slots are in use.
    #[error("there are more RT threads than cap.threads = {0}; raise that in /etc/ontime/daemon.toml")]
    NoRoom(usize),
    /// The kernel refuses to show or change the thread.
    #[error("the kernel does not show how much CPU time it takes: {error}; {advice}")]
    Unreadable {
        /// The kernel's error.
        error: String,
        advice: &'static str,
    },
}

impl Cover {
    /// Whether the thread cannot monopolize its CPU.
    pub(crate) fn holds(&self) -> bool {
        matches!(self, Cover::Watched | Cover::Gone)
    }
}

#[derive(Debug)]
struct Entry {
    index: SlotIndex,
    watch: Watch,
    tally: Arc<Tally>,
}

/// Counters of one thread.
#[derive(Debug, Clone)]
pub(crate) struct CapUsage {
    pub id: ThreadId,
    /// Whether it is watched.
    pub cover: Cover,
    /// How often it was paused.
    pub pauses: u64,
    /// How long it was paused, ns.
    pub paused_ns: u64,
    /// CPU time that was read while it was at RT priority, ns.
    pub ran_ns: u64,
    /// Whether it is paused now.
    pub paused: bool,
    /// Times the kernel refused to change its policy.
    pub refused: u64,
    /// How often it, or another program, ended a pause of its cap.
    pub escaped: u64,
    /// How often it was put ahead because of an interrupt.
    pub raised: u64,
    /// CPU time that it took while ahead, ns.
    pub ahead_ns: u64,
}

/// The threads that may be paused or ahead while the planner reads policies. The planner must not take SCHED_IDLE in a
/// pause for the thread's policy: it would correct it as drift, or record it as the original and restore it on reset.
/// (Pauses cannot be suspended while the planner reads: on one CPU, a spinning thread at its place would keep the
/// planner from running.)
#[derive(Debug, Default)]
pub(crate) struct Pauses(BTreeMap<ThreadId, Seen>);

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
    /// Adds the threads that have been watched since.
    pub(crate) fn with_later(self, mut later: Self) -> Self {
        later.0.extend(self.0);
        later
    }

    /// The thread's place, given the policy that was just read: SCHED_IDLE of a pause and the policy while ahead count
    /// as the place.
    pub(crate) fn planned(&self, id: ThreadId, read: Policy) -> Policy {
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

/// The planner's handle to the watcher.
#[derive(Debug)]
pub(crate) struct Caps {
    orders: Producer<Order>,
    /// How many orders were given, modulo 2^32. `done` counts those that the watcher has carried out.
    ordered: u32,
    done: Arc<AtomicU32>,
    wake: Arc<OwnedFd>,
    returned: Consumer<Returned>,
    /// When a thread last escaped from its pause, ns; 0: none has.
    escaped_at: Arc<AtomicU64>,
    /// The epoll set of trace rings that the watcher waits for.
    rings: Arc<OwnedFd>,
    /// The probe that reports pending interrupts, and the CPUs that it covers.
    interrupts: Option<(Interrupts, Vec<u32>)>,
    targets: InterruptTargets,
    /// Whether a vCPU that may be put ahead shares a CPU with another thread of its level.
    rivals: bool,
    thread: Option<std::thread::JoinHandle<()>>,
    /// The watcher's policy and priority.
    watcher: Policy,
    /// The watcher's thread.
    pub watcher_id: ThreadId,
    entries: BTreeMap<ThreadId, Entry>,
    uncovered: BTreeMap<ThreadId, Cover>,
    free: Vec<SlotIndex>,
    /// The number of each reservation's pool in the watcher's table.
    pools: BTreeMap<String, usize>,
    /// The threads that read for the watcher.
    readers: Readers,
    /// The most threads watched (`cap.threads`).
    capacity: usize,
}

impl Caps {
    /// Starts the watcher. It writes to the eventfd `alarm` when a thread escapes from its pause.
    ///
    /// # Errors
    /// [`CapError::Descriptors`]. [`CapError::Setup`] where memory cannot be locked, or the thread cannot be started or
    /// given its priority.
    pub(crate) fn start(settings: Settings, alarm: Arc<OwnedFd>) -> Result<Self, CapError> {
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
        // Room for a forget and a watch of every slot at once, and for a few single orders.
        let (orders, take_orders) = RingBuffer::new(2 * capacity + 8);
        // Room for every slot and for the former `InterruptFeed`: at most one `Order::Follow` is in flight.
        let (give_back, returned) = RingBuffer::new(capacity + 2);
        let rings = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| setup("epoll")(error.into()))?;
        let rings = Arc::new(rings);
        let done = Arc::new(AtomicU32::new(0));
        let escaped_at = Arc::new(AtomicU64::new(0));
        let period = u64::try_from(settings.period.as_nanos()).unwrap_or(u64::MAX);
        let table = Table::new(capacity, cpu_count(), settings.cpu_share, period, clock::now());
        // Room for every slot and for as many that were handed back.
        let (readers, sights) =
            Readers::start(2 * capacity).map_err(setup("starting a thread that reads for the watcher"))?;
        let channels = Channels {
            orders: take_orders,
            done: Arc::clone(&done),
            wake: Arc::clone(&wake),
            returned: give_back,
            rings: Arc::clone(&rings),
            sights,
            alarm,
            escaped_at: Arc::clone(&escaped_at),
        };
        let watcher = Watcher::new(table, capacity, channels).map_err(setup("epoll"))?;
        let (tell, told) = sync_channel(1);
        let thread = std::thread::Builder::new()
            .name("ontime-cap".into())
            .stack_size(256 * 1024)
            .spawn(move || {
                let placed = place::place_self(settings.watcher);
                let go = placed.is_ok();
                let _ = tell.send(placed.and_then(|()| this_thread()));
                if go {
                    watcher.run();
                }
            })
            .map_err(setup("starting the watcher thread"))?;
        let told = told.recv().map_err(|_| CapError::Lost)?;
        let watcher_id = told.map_err(setup("placing the watcher thread (CAP_SYS_NICE)"))?;
        Ok(Self {
            orders,
            ordered: 0,
            done,
            wake,
            returned,
            escaped_at,
            rings,
            interrupts: None,
            targets: InterruptTargets::default(),
            rivals: false,
            thread: Some(thread),
            watcher: settings.watcher,
            watcher_id,
            entries: BTreeMap::new(),
            uncovered: BTreeMap::new(),
            free: (0..capacity).rev().collect(),
            pools: BTreeMap::new(),
            readers,
            capacity,
        })
    }

    /// Starts another thread that reads for the watcher if the present ones hang. To be called once a second.
    pub(crate) fn replace_stuck_reader(&mut self) {
        self.readers.replace_stuck_reader();
    }

    /// The watcher's thread and its place.
    pub(crate) fn own(&self) -> OwnThread {
        OwnThread { name: "ontime-cap", id: self.watcher_id, place: self.watcher }
    }

    /// The threads that [`Self::release`] stops watching.
    pub(crate) fn leaving<'a>(&'a self, wanted: &'a [Watch]) -> impl Iterator<Item = ThreadId> + 'a {
        let keep: BTreeMap<ThreadId, &Watch> = wanted.iter().map(|watch| (watch.id, watch)).collect();
        self.entries.values().map(|entry| &entry.watch).filter_map(move |watch| {
            let stays = keep.get(&watch.id).is_some_and(|kept| kept.is_like(watch));
            (!stays).then_some(watch.id)
        })
    }

    /// Stops watching every thread that is not in `wanted` with the same place and cap. After this the planner may
    /// place these threads: the watcher does not touch them again.
    ///
    /// # Errors
    /// [`CapError::Lost`].
    pub(crate) fn release(&mut self, wanted: &[Watch]) -> Result<(), CapError> {
        let leaving: Vec<ThreadId> = self.leaving(wanted).collect();
        for id in leaving {
            if let Some(entry) = self.entries.remove(&id) {
                self.order(Order::Forget(entry.index))?;
            }
        }
        let shared = self.entries.values().filter_map(|entry| entry.watch.shared.as_ref());
        let used: BTreeSet<&String> = shared.map(|shared| &shared.reservation).collect();
        self.pools.retain(|reservation, _| used.contains(reservation));
        self.sync()
    }

    /// Watches exactly the threads in `wanted`. The planner has placed them before.
    ///
    /// # Errors
    /// [`CapError::Lost`].
    pub(crate) fn set(&mut self, wanted: &[Watch]) -> Result<(), CapError> {
        self.readers.replace_stuck_reader();
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

    /// Watches one more thread, which the planner has just placed. Does nothing if the thread is watched already.
    ///
    /// # Errors
    /// [`CapError::Lost`].
    pub(crate) fn start_watching(&mut self, watch: &Watch) -> Result<(), CapError> {
        if self.entries.contains_key(&watch.id) {
            return Ok(());
        }
        self.add(watch)?;
        self.sync()
    }

    /// From now on, puts vCPUs of these VMs ahead while an interrupt is pending for them, if they are watched and have
    /// a place ahead. With no VMs, ends this for all vCPUs.
    ///
    /// # Errors
    /// [`FollowError`]: then no vCPU is put ahead.
    pub(crate) fn follow(&mut self, root: &Path, cpus: &[u32], vms: &[Followed]) -> Result<(), FollowError> {
        let slot = |(vcpu, id): &(u32, ThreadId)| Some((*vcpu, id.tid, self.entries.get(id)?.index));
        let of = |vm: &Followed| Vm { threads: vm.threads.clone(), vcpus: vm.vcpus.iter().filter_map(slot).collect() };
        let targets = InterruptTargets::new(&vms.iter().map(of).collect::<Vec<_>>());
        if vms.is_empty() || self.interrupts.as_ref().is_some_and(|(_, on)| on != cpus) {
            self.unfollow()?;
        }
        if vms.is_empty() {
            return Ok(());
        }
        let followed = self.follow_probe(root, cpus, targets);
        if followed.is_err() {
            self.unfollow()?;
        }
        followed
    }

    fn follow_probe(&mut self, root: &Path, cpus: &[u32], targets: InterruptTargets) -> Result<(), FollowError> {
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
        let rivals = self.has_rivals(&targets);
        if rings.is_some() || targets != self.targets || rivals != self.rivals {
            (self.targets, self.rivals) = (targets.clone(), rivals);
            self.order(Order::Follow(Box::new(InterruptFeed { rings, targets, rivals, return_rings: false })))?;
            self.sync()?;
        }
        if let Some((interrupts, _)) = &mut self.interrupts {
            interrupts.follow(&self.targets.threads())?;
        }
        Ok(())
    }

    /// Whether one of these vCPUs may have to wait for another thread of its level. If so, the watcher listens to
    /// interrupts all the time, else only while a vCPU is paused.
    fn has_rivals(&self, targets: &InterruptTargets) -> bool {
        let watches = || self.entries.values().map(|entry| &entry.watch);
        let of = |thread| watches().filter(move |watch| watch.id.tid == thread);
        targets.vcpus().flat_map(of).any(|watch| watches().any(|other| watch.is_rival(other)))
    }

    /// Stops following interrupts.
    fn unfollow(&mut self) -> Result<(), CapError> {
        let Some((interrupts, _)) = self.interrupts.take() else { return Ok(()) };
        (self.targets, self.rivals) = (InterruptTargets::default(), false);
        self.order(Order::Follow(Box::new(InterruptFeed { return_rings: true, ..InterruptFeed::default() })))?;
        self.sync()?;
        // The probe may go only after the watcher has handed its rings back and `sync` has closed them.
        drop(interrupts);
        Ok(())
    }

    /// The trace instance that the probe uses. The guardian has to remove it if the daemon dies.
    pub(crate) fn instance(&self) -> Option<PathBuf> {
        self.interrupts.as_ref().map(|(interrupts, _)| interrupts.dir())
    }

    /// A snapshot, to be taken before policies are read.
    pub(crate) fn pauses(&self) -> Pauses {
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

    fn open(&mut self, watch: &Watch) -> Result<(SlotIndex, Box<WatchedThread>), Cover> {
        if watch.share.is_whole() {
            return Err(Cover::Whole);
        }
        // Threads of rank Teller belong to the kernel and keep a priority above the watcher's.
        if watch.rank != Rank::Teller && priority(watch.place) >= priority(self.watcher) {
            let (place, watcher) = (watch.place, self.watcher);
            return Err(Cover::Failed(Unwatched::Above { place, watcher }));
        }
        let place = PlacedThread::open(watch.id, watch.place, watch.ahead)
            .map_err(refused)?
            .ok_or(Cover::Failed(Unwatched::NotRealTime(watch.place)))?;
        let reading = limit_waits(|| Reading::open(watch.id.pid, watch.id.tid, watch.only_cpu())).map_err(refused)?;
        let room = self.capacity;
        let index = self.free.pop().ok_or(Cover::Failed(Unwatched::NoRoom(room)))?;
        let cpu = watch.cpus.first().copied().unwrap_or(0);
        let clock = ProcessClock::new(watch.id.pid);
        let tally = Arc::default();
        let rank = watch.rank;
        let share = watch.share;
        let pool = watch.shared.as_ref().map(|shared| self.pool(shared));
        let (owed, busy) = (false, false);
        let (unread, read, since) = (0, 0, 0);
        let slot = WatchedThread {
            reading,
            clock,
            leader: index,
            unread,
            owed,
            busy,
            read,
            place,
            share,
            cpu,
            rank,
            pool,
            tally,
            since,
        };
        Ok((index, Box::new(slot)))
    }

    /// The pool of a reservation: the one that it has, or another one. There are no more than slots.
    fn pool(&mut self, shared: &SharedCap) -> Pool {
        let pools = &mut self.pools;
        let number = pools.get(&shared.reservation).copied().unwrap_or_else(|| {
            let taken: BTreeSet<usize> = pools.values().copied().collect();
            (0..).find(|number| !taken.contains(number)).unwrap_or(taken.len())
        });
        pools.insert(shared.reservation.clone(), number);
        Pool { number, share: shared.share }
    }

    /// Counters of every watched thread, and the threads that are not watched.
    pub(crate) fn report(&self) -> Vec<CapUsage> {
        let watched = self.entries.values().map(|entry| CapUsage {
            id: entry.watch.id,
            cover: Cover::Watched,
            pauses: entry.tally.pauses.load(Ordering::Relaxed),
            paused_ns: entry.tally.paused_ns.load(Ordering::Relaxed),
            ran_ns: entry.tally.ran_ns.load(Ordering::Relaxed),
            paused: entry.tally.paused.load(Ordering::Relaxed),
            refused: entry.tally.refused.load(Ordering::Relaxed),
            escaped: entry.tally.escaped.load(Ordering::Relaxed),
            raised: entry.tally.raised.load(Ordering::Relaxed),
            ahead_ns: entry.tally.ahead_ns.load(Ordering::Relaxed),
        });
        let unwatched = self.uncovered.iter().map(|(id, cover)| CapUsage {
            id: *id,
            cover: cover.clone(),
            pauses: 0,
            paused_ns: 0,
            ran_ns: 0,
            paused: false,
            refused: 0,
            escaped: 0,
            raised: 0,
            ahead_ns: 0,
        });
        watched.chain(unwatched).collect()
    }

    /// The threads that are watched.
    pub(crate) fn watched(&self) -> BTreeSet<ThreadId> {
        self.entries.keys().copied().collect()
    }

    /// Whether every thread of the last [`Self::set`] is held to its cap: it is watched, it is known where it runs, the
    /// kernel has never refused a change of its policy, it has stayed in its pauses, and no thread has escaped lately.
    pub(crate) fn complete(&self) -> bool {
        let held = |tally: &Tally| [&tally.refused, &tally.escaped].iter().all(|of| of.load(Ordering::Relaxed) == 0);
        let known = !self.readers.hang() && self.uncovered.values().all(Cover::holds);
        known && self.escaped_since().is_none() && self.entries.values().all(|entry| held(&entry.tally))
    }

    /// How long ago a thread escaped from its pause, if that counts still.
    pub(crate) fn escaped_since(&self) -> Option<Duration> {
        let at = Some(self.escaped_at.load(Ordering::Acquire)).filter(|at| *at > 0)?;
        let since = Duration::from_nanos(clock::now().saturating_sub(at));
        (since < AFTER_ESCAPE).then_some(since)
    }

    fn order(&mut self, order: Order) -> Result<(), CapError> {
        if let Err(PushError::Full(order)) = self.orders.push(order) {
            // The queue is full: wait until the watcher has emptied it.
            self.carried_out()?;
            self.orders.push(order).map_err(|_| CapError::Lost)?;
        }
        self.ordered = self.ordered.wrapping_add(1);
        Ok(())
    }

    /// Waits until every order is carried out. The watcher wakes this thread by a futex. The time-out is no replacement
    /// for that: at normal priority it expires in `ktimers/N` (PREEMPT_RT), which a spinning vCPU that is not capped
    /// yet keeps from running.
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
            // Whether woken, timed out, interrupted or done before: look again.
            let _ = futex::wait(&self.done, futex::Flags::PRIVATE, done, Some(&left));
        }
    }

    fn ring(&self) {
        // A full counter (2^64 - 1 wake-ups) or a bad descriptor is impossible; the sync that follows would notice.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Waits until all orders are carried out, and closes the files that the watcher handed back.
    fn sync(&mut self) -> Result<(), CapError> {
        self.carried_out()?;
        while let Ok(returned) = self.returned.pop() {
            match returned {
                Returned::WatchedThread(index, closed_here) => {
                    drop(closed_here);
                    self.free.push(index);
                    self.entries.retain(|_, entry| entry.index != index);
                }
                Returned::InterruptFeed(closed_here) => drop(closed_here),
            }
        }
        Ok(())
    }
}

impl Drop for Caps {
    fn drop(&mut self) {
        // First remove the trace instance, while caps are still kept: the removal waits for RCU grace periods, which do
        // not end beside a spinning thread.
        let unfollowed = self.unfollow().is_ok();
        // A watcher that does not answer is not joined: the planner has to go on.
        let answers = unfollowed && self.sync().is_ok();
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
        _ => Cover::Failed(Unwatched::Unreadable { error: error.to_string(), advice: remedy(&error) }),
    }
}

fn cpu_count() -> usize {
    // SAFETY: takes an integer, touches no memory of ours.
    let count = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) };
    usize::try_from(count).unwrap_or(1).max(1)
}

#[cfg(test)]
mod tests;
