//! The pacers: one thread for each CPU, which enforces the plan of [`crate::policy`] and sleeps until its next check.
//!
//! A pacer runs at SCHED_FIFO, just below the cap watcher, pinned to its CPU, in locked memory, and allocates
//! nothing after its start. It sleeps on a futex with an absolute timeout. On PREEMPT_RT, the timeout of a real-time
//! thread expires in the timer interrupt itself. A timerfd would need `ktimers/N`, which a spinning vCPU keeps from
//! running (`kernel/time/hrtimer.c`, `__hrtimer_setup_sleeper`).
//!
//! Each pacer works under the mutex of its own [`Part`] of the state: where vCPUs stay on their CPUs, a part for each
//! CPU, so that no pacer waits for another; by slices, one part for all. A pacer that carries out a command excludes
//! all others for that time. They all have the same priority, run on different CPUs, and hold these locks for a few
//! changes of place. The daemon's thread may be preempted for long, so it takes none of them. It exchanges [`Command`]s
//! with the pacers through two atomic cells: commands go in, and come back when they are carried out, so that the
//! thread that allocated them frees them.
//!
//! A pacer reads nothing that another process can make long. Its reader, a thread of its own, does that (`reader`).

use std::io;
use std::num::NonZeroU32;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ontime_base::clock::{now, timespec};
use ontime_tenants::{CpuSet, Policy, ThreadId};
use rustix::thread::futex;
use rustix::time::Timespec;

use crate::model::{NEVER, PacerError, Place, Snapshot};
use crate::policy::Schedule;
use crate::run::reader::{Progress, Reader};
use crate::run::threads::{Seen, VcpuThreads};
use crate::run::vcpu::VcpuThread;

/// The longest wait for pacers to carry out a command. A slice takes at most 100 ms.
const PATIENCE: Duration = Duration::from_secs(5);

/// The state that pacers work on.
#[derive(Debug)]
pub(crate) struct Pacing {
    /// A part for each CPU, or one for all.
    parts: Vec<Mutex<Part>>,
}

/// What one pacer works on at a time.
#[derive(Debug)]
struct Part {
    /// Which vCPU is at which place.
    schedule: Schedule,
    /// The threads of these vCPUs, by their numbers.
    vcpus: VcpuThreads,
}

/// Poisoned only by a panic, of which there is none; the state is valid all the same.
fn lock(part: &Mutex<Part>) -> MutexGuard<'_, Part> {
    part.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pacing {
    /// A schedule and the threads of its vCPUs, by their numbers.
    pub(crate) fn new(schedule: Schedule, vcpus: VcpuThreads) -> Self {
        let mut threads = vcpus.0;
        let part = |schedule: Schedule| {
            let here = |(number, vcpu): (usize, &mut Option<VcpuThread>)| vcpu.take_if(|_| schedule.has(number));
            let vcpus = VcpuThreads(threads.iter_mut().enumerate().map(here).collect());
            Mutex::new(Part { schedule, vcpus })
        };
        Self { parts: schedule.parts().into_iter().map(part).collect() }
    }

    /// The part of a CPU (by the planner's number).
    fn of(&self, cpu: usize) -> Option<&Mutex<Part>> {
        self.parts.get(cpu).or_else(|| self.parts.first())
    }

    fn can_be_replaced(&self, now: u64) -> bool {
        self.parts.iter().all(|part| lock(part).schedule.can_be_replaced(now))
    }

    /// Begins this plan, or continues `old`.
    fn begin(&self, now: u64, old: Option<&Pacing>, reader: &mut Reader) {
        for part in &self.parts {
            let Part { schedule, vcpus } = &mut *lock(part);
            let stay = schedule.has_no_migration();
            schedule.begin(now, &mut Seen { vcpus, reader, stay });
            for old in old.iter().flat_map(|old| &old.parts) {
                let old = lock(old);
                schedule.take_over(&old.schedule);
                vcpus.take_over(&old.vcpus);
            }
        }
    }

    /// Moves the threads that are not in `other` to a place.
    fn place_others(&self, other: Option<&Pacing>, place: Place) {
        let stays =
            |vcpu: &VcpuThread| other.iter().flat_map(|other| &other.parts).any(|part| lock(part).vcpus.has(vcpu));
        self.parts.iter().for_each(|part| lock(part).vcpus.place_others(stays, place));
    }
}

/// A request of the daemon to the pacers.
#[derive(Debug)]
enum Command {
    /// Work on this state, from the end of the present slice on. The command comes back with the old state.
    Replace(Option<Box<Pacing>>),
    /// Fill in this snapshot.
    Snapshot(Snapshot),
}

/// Shared by pacers and the daemon.
#[derive(Debug, Default)]
struct Shared {
    /// Read by pacers for a check, written for a command.
    state: RwLock<State>,
    /// Whether a command waits in `state`.
    waits: AtomicBool,
    /// The pacers' futex. Changes when all pacers are to check.
    word: AtomicU32,
    stop: AtomicBool,
    inbox: AtomicPtr<Command>,
    outbox: AtomicPtr<Command>,
    /// The daemon's futex. Changes when a command has been carried out.
    done: AtomicU32,
}

/// The pacers' state.
#[derive(Debug, Default)]
struct State {
    pacing: Option<Box<Pacing>>,
    waiting: Option<Box<Command>>,
}

/// Changes a futex word and wakes all its waiters.
fn wake(word: &AtomicU32) {
    word.fetch_add(1, Ordering::Release);
    // Waking fails only for an invalid address.
    let _ = futex::wake(word, futex::Flags::PRIVATE, i32::MAX as u32);
}

impl Shared {
    /// Takes the command out of a cell.
    fn take(cell: &AtomicPtr<Command>) -> Option<Box<Command>> {
        let raw = cell.swap(ptr::null_mut(), Ordering::AcqRel);
        // SAFETY: every pointer in a cell comes from Box::into_raw (`put`), and the swap gives it to one taker only.
        (!raw.is_null()).then(|| unsafe { Box::from_raw(raw) })
    }

    /// Puts a command into a cell; returns the command that was there.
    fn put(cell: &AtomicPtr<Command>, command: Box<Command>) -> Option<Box<Command>> {
        let raw = cell.swap(Box::into_raw(command), Ordering::AcqRel);
        // SAFETY: as in `take`.
        (!raw.is_null()).then(|| unsafe { Box::from_raw(raw) })
    }

    fn wake_all(&self) {
        wake(&self.word);
    }

    /// Carries out the daemon's command, if there is one and the present plan can be replaced.
    fn execute(&self, reader: &mut Reader) -> Option<Box<Command>> {
        if self.inbox.load(Ordering::Acquire).is_null() && !self.waits.load(Ordering::Acquire) {
            return None;
        }
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        if self.stop.load(Ordering::Acquire) {
            return None;
        }
        if state.waiting.is_none() {
            state.waiting = Self::take(&self.inbox);
        }
        let done = state.execute(now(), reader);
        self.waits.store(state.waiting.is_some(), Ordering::Release);
        done
    }

    /// Does what is due on a CPU. Returns when to do so again, and whether a calm time has ended.
    fn step(&self, cpu: usize, reader: &mut Reader) -> (u64, bool) {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        // The pacer that ends first has moved all vCPUs to `Beyond`, under the lock for writing.
        if self.stop.load(Ordering::Acquire) {
            return (NEVER, false);
        }
        let Some(part) = state.pacing.as_ref().and_then(|pacing| pacing.of(cpu)) else { return (NEVER, false) };
        let Part { schedule, vcpus } = &mut *lock(part);
        let start = now();
        let stay = schedule.has_no_migration();
        let due = schedule.step(cpu, start, &mut Seen { vcpus, reader, stay });
        schedule.record_cost(cpu, now().saturating_sub(start));
        (due, schedule.take_calm_ended())
    }

    /// One check of a pacer. Returns the time of the next one.
    fn work(&self, cpu: usize, reader: &mut Reader) -> u64 {
        reader.begin_check();
        let done = self.execute(reader);
        let (due, calm_ended) = self.step(cpu, reader);
        if let Some(command) = done {
            // At most one command is in progress, so no command is dropped here.
            let before = Self::put(&self.outbox, command);
            debug_assert!(before.is_none());
            wake(&self.done);
        }
        if calm_ended {
            self.wake_all();
        }
        due
    }

    /// Moves all vCPUs to `Beyond`. A spinning vCPU ahead of others and without a pacer would keep the daemon itself
    /// off its CPU, and the daemon must set the vCPU's policy.
    fn release_vcpus(&self) {
        let state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(pacing) = &state.pacing {
            pacing.place_others(None, Place::Beyond);
        }
    }

    /// The main loop of one CPU's pacer.
    fn run(&self, cpu: usize, mut reader: Reader) {
        loop {
            let seen = self.word.load(Ordering::Acquire);
            if self.stop.load(Ordering::Acquire) {
                self.release_vcpus();
                return;
            }
            let due = self.work(cpu, &mut reader);
            let until = timespec(due);
            let until = (due != NEVER).then_some(&until);
            // Woken, timed out, interrupted, or the word had changed: check again.
            let _ = futex::wait_bitset(&self.word, futex::Flags::PRIVATE, seen, until, NonZeroU32::MAX);
        }
    }
}

impl State {
    /// Carries out the waiting command, if the present plan can be replaced now.
    fn execute(&mut self, now: u64, reader: &mut Reader) -> Option<Box<Command>> {
        match self.waiting.as_deref_mut()? {
            Command::Snapshot(snapshot) => {
                snapshot.clear();
                for part in self.pacing.iter().flat_map(|pacing| &pacing.parts) {
                    lock(part).schedule.write_snapshot(now, snapshot);
                }
            }
            Command::Replace(next) => {
                let old = self.pacing.as_deref();
                if old.is_some_and(|old| !old.can_be_replaced(now)) {
                    return None;
                }
                if let Some(next) = next.as_deref() {
                    // The daemon's thread may have been preempted since it made this state.
                    next.begin(now, old, reader);
                    // New vCPUs go to the place that the plan assumes; those that leave go to `Beyond`, as in
                    // `release_vcpus`.
                    next.place_others(old, Place::Entitled);
                }
                if let Some(old) = old {
                    old.place_others(next.as_deref(), Place::Beyond);
                }
                if let Some(Command::Replace(next)) = self.waiting.as_deref_mut() {
                    std::mem::swap(next, &mut self.pacing);
                }
            }
        }
        self.waiting.take()
    }
}

/// The daemon's handle on the pacers.
#[derive(Debug)]
pub(crate) struct Pacers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    ids: Vec<ThreadId>,
    readers: Vec<Progress>,
}

impl Pacers {
    /// Starts a pacer on each of these CPUs, with this policy.
    ///
    /// # Errors
    /// [`PacerError::Setup`] if memory cannot be locked, or a thread cannot be started, pinned or given its policy.
    pub(crate) fn start(cpus: &[u32], place: Policy) -> Result<Self, PacerError> {
        let setup = |what| move |source: io::Error| PacerError::Setup { what, source };
        rustix::mm::mlockall(rustix::mm::MlockAllFlags::CURRENT | rustix::mm::MlockAllFlags::FUTURE)
            .map_err(|error| setup("locking memory (LimitMEMLOCK=infinity)")(error.into()))?;
        let below = below(place);
        let mut pacers = Self { shared: Arc::default(), threads: Vec::new(), ids: Vec::new(), readers: Vec::new() };
        for (index, cpu) in cpus.iter().copied().enumerate() {
            let reader = Reader::start(cpu, below, move || place_here(cpu, Policy::Fifo(below)).map(|_| ()))?;
            pacers.readers.push(reader.progress());
            let shared = Arc::clone(&pacers.shared);
            let (tell, told) = sync_channel(1);
            let thread = std::thread::Builder::new()
                .name(format!("ontime-pace/{cpu}"))
                .stack_size(256 * 1024)
                .spawn(move || {
                    let placed = place_here(cpu, place);
                    let go = placed.is_ok();
                    let _ = tell.send(placed);
                    if go {
                        shared.run(index, reader);
                    }
                })
                .map_err(setup("starting a pacer thread"))?;
            pacers.threads.push(thread);
            let placed = told.recv().map_err(|_| PacerError::Lost)?;
            pacers.ids.push(placed.map_err(setup("placing a pacer thread (CAP_SYS_NICE)"))?);
        }
        Ok(pacers)
    }

    /// The pacers' threads.
    pub(crate) fn ids(&self) -> impl Iterator<Item = ThreadId> {
        self.ids.iter().copied()
    }

    /// Pacers without threads, one of whose readers hangs.
    #[cfg(test)]
    pub(crate) fn hanging() -> Self {
        Self { shared: Arc::default(), threads: Vec::new(), ids: Vec::new(), readers: vec![Progress::hanging()] }
    }

    /// Whether a reader does not finish a read, so that its pacer learns neither deadlines nor who sleeps. The daemon
    /// then starts other pacers; the threads of such readers end when their reads do.
    pub(crate) fn cannot_read(&mut self) -> bool {
        // Every reader is asked, because a call notes the time.
        self.readers.iter_mut().fold(false, |stuck, reader| stuck | reader.is_stuck())
    }

    /// Has the pacers work on this state from the end of the present slice on; None: on nothing. Waits until they do.
    ///
    /// # Errors
    /// [`PacerError::Lost`].
    pub(crate) fn replace(&mut self, pacing: Option<Box<Pacing>>) -> Result<(), PacerError> {
        self.send(Command::Replace(pacing)).map(drop)
    }

    /// The pacers' present state; `vcpus`: how many vCPUs they have.
    ///
    /// # Errors
    /// [`PacerError::Lost`].
    pub(crate) fn snapshot(&mut self, vcpus: usize) -> Result<Snapshot, PacerError> {
        match *self.send(Command::Snapshot(Snapshot::with_room(vcpus)))? {
            Command::Snapshot(snapshot) => Ok(snapshot),
            Command::Replace(_) => Err(PacerError::Lost),
        }
    }

    /// Gives the pacers a command and waits, at normal priority, until a pacer has carried it out and wakes this
    /// thread. This is no sleep: a timer would need `ktimers/N`, and a spinning vCPU that this thread still has to cap
    /// keeps that from running.
    fn send(&mut self, command: Command) -> Result<Box<Command>, PacerError> {
        drop(Shared::put(&self.shared.inbox, Box::new(command)));
        self.shared.wake_all();
        let end = Instant::now() + PATIENCE;
        loop {
            let seen = self.shared.done.load(Ordering::Acquire);
            if let Some(done) = Shared::take(&self.shared.outbox) {
                return Ok(done);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || self.threads.iter().all(JoinHandle::is_finished) {
                return Err(PacerError::Lost);
            }
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            // Woken, timed out, interrupted, or already done: check again.
            let _ = futex::wait(&self.shared.done, futex::Flags::PRIVATE, seen, Some(&left));
        }
    }
}

impl Drop for Pacers {
    /// Ends the pacers, which first move their vCPUs to `Beyond`. Waits for each: at most a system call delays its end.
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        drop(Shared::take(&self.shared.inbox));
        drop(Shared::take(&self.shared.outbox));
    }
}

/// The FIFO priority of the readers of pacers with this policy. It is above every thread that a pacer moves.
fn below(place: Policy) -> u8 {
    match place {
        Policy::Fifo(priority) => priority.saturating_sub(1).max(1),
        _ => 1,
    }
}

/// Pins the calling thread and sets its policy.
fn place_here(cpu: u32, place: Policy) -> io::Result<ThreadId> {
    let own = rustix::thread::gettid().as_raw_nonzero().get();
    let process = rustix::process::getpid().as_raw_nonzero().get();
    let id = ThreadId::of(process, own).map_err(io::Error::other)?;
    id.set_affinity(&CpuSet::from_iter([cpu])).map_err(io::Error::other)?;
    id.set_policy(place).map_err(io::Error::other)?;
    Ok(id)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    use crate::admit::Reservations;
    use crate::model::Places;
    use crate::policy::Planning;
    use crate::run::reader::unplaced;
    use crate::run::vcpu::{Placement, VcpuThread};

    /// Policies that any user may set; the real ones need CAP_SYS_NICE.
    const PLACES: Places = Places { planned: Policy::BULK, entitled: Policy::BULK, beyond: Policy::Idle };

    /// A thread that waits until this is dropped.
    struct Waiting(ThreadId, #[expect(dead_code, reason = "its drop ends the thread")] Sender<()>);

    fn waiting() -> Waiting {
        let (end, ended) = channel::<()>();
        let (tell, told) = channel();
        std::thread::spawn(move || {
            let tid = rustix::thread::gettid().as_raw_nonzero().get();
            tell.send(ThreadId::of(rustix::process::getpid().as_raw_nonzero().get(), tid).unwrap()).unwrap();
            let _ = ended.recv();
        });
        Waiting(told.recv().unwrap(), end)
    }

    fn pacing(of: &[&Waiting]) -> Box<Pacing> {
        let vcpu = |waiting: &&Waiting| VcpuThread::open(waiting.0, Placement::Policy(PLACES)).ok();
        let reservations = Reservations { cpus: vec![0], ..Reservations::default() };
        let schedule = Schedule::new(&reservations, Planning::Slices, now(), |_| Arc::default());
        Box::new(Pacing::new(schedule, VcpuThreads(of.iter().map(vcpu).collect())))
    }

    fn is_behind(waiting: &Waiting) -> bool {
        // SAFETY: takes and returns numbers only.
        let policy = unsafe { libc::sched_getscheduler(waiting.0.tid) };
        policy & !libc::SCHED_RESET_ON_FORK == libc::SCHED_IDLE
    }

    /// Two CPUs with a vCPU each. The pacer of the second works while that of the first is in the middle of a check.
    #[test]
    fn pacers_of_cpus_without_migration_do_not_wait_for_each_other() {
        let reservations = crate::sim::reservations(2, 50_000, &[(1_000_000, 10_000_000); 2], true).unwrap();
        let schedule = Schedule::new(&reservations, Planning::Best, now(), |_| Arc::default());
        let (first, second) = (waiting(), waiting());
        let vcpu = |of: &Waiting| VcpuThread::open(of.0, Placement::Policy(PLACES)).ok();
        let pacing = Pacing::new(schedule, VcpuThreads(vec![vcpu(&first), vcpu(&second)]));
        let threads = |cpu: usize| {
            let part = lock(pacing.of(cpu).unwrap());
            [0, 1].map(|number: usize| part.vcpus.0.get(number).is_some_and(Option::is_some))
        };
        assert_eq!([threads(0), threads(1)], [[true, false], [false, true]]);
        let shared = Shared::default();
        {
            let mut state = shared.state.write().unwrap();
            state.waiting = Some(Box::new(Command::Replace(Some(Box::new(pacing)))));
            assert!(state.execute(now(), &mut unplaced()).is_some());
        }
        let state = shared.state.read().unwrap();
        let busy = lock(state.pacing.as_ref().unwrap().of(0).unwrap());
        assert_ne!(shared.work(1, &mut unplaced()), NEVER);
        drop(busy);
        drop(state);
        assert_ne!(shared.work(0, &mut unplaced()), NEVER);
        // A snapshot has both.
        let snapshot = Box::new(Command::Snapshot(Snapshot::with_room(2)));
        assert!(Shared::put(&shared.inbox, snapshot).is_none());
        shared.work(1, &mut unplaced());
        let Some(Command::Snapshot(snapshot)) = Shared::take(&shared.outbox).map(|command| *command) else { panic!() };
        assert_eq!(snapshot.standings.len(), 2);
    }

    #[test]
    fn vcpus_without_a_pacer_are_moved_behind_bulk() {
        let (stays, goes, comes) = (waiting(), waiting(), waiting());
        let shared = Shared::default();
        let replace = |next: &[&Waiting]| {
            let mut state = shared.state.write().unwrap();
            state.waiting = Some(Box::new(Command::Replace(Some(pacing(next)))));
            assert!(state.execute(now(), &mut unplaced()).is_some());
        };
        replace(&[&stays, &goes]);
        assert!(!is_behind(&stays) && !is_behind(&goes));
        // A vCPU that other pacers left at `Beyond` goes to the place that the new plan assumes.
        pacing(&[&comes]).place_others(None, Place::Beyond);
        assert!(is_behind(&comes));
        replace(&[&comes, &stays]);
        assert!(is_behind(&goes) && !is_behind(&stays) && !is_behind(&comes));
        shared.stop.store(true, Ordering::Release);
        shared.run(0, unplaced());
        assert!(is_behind(&stays) && is_behind(&comes));
    }
}
