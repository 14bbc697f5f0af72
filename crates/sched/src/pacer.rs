//! The pacers: one thread a CPU, which does what [`crate::shares`] says and sleeps until the next time that it is
//! needed.
//!
//! Each runs at SCHED_FIFO just below the cap watcher, on its own CPU, in locked memory, and allocates nothing after
//! its start. It sleeps in a futex with an absolute time-out: on PREEMPT_RT that of a real-time thread expires in the
//! interrupt itself, while a timerfd's needs `ktimers/N`, which a spinning vCPU keeps from running
//! (`kernel/time/hrtimer.c`, `__hrtimer_setup_sleeper`).
//!
//! Pacers share the state under a mutex that nobody else takes; they are all of one priority, on different CPUs, and
//! hold it for a few changes of place. The daemon's thread, which may be kept from running for long, talks to them by
//! two cells that are swapped, never locked: [`Order`]s go in, and come back carried out, to be freed where they were
//! made.

use std::io;
use std::num::NonZeroU32;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ontime_tenants::{CpuList, Policy, ThreadId, remedy};
use rustix::thread::futex;
use rustix::time::Timespec;
use thiserror::Error;

use crate::account::{Counts, Place, Share, Threads};
use crate::published::Next;
use crate::seat::Seat;
use crate::shares::{NEVER, Shares};
use crate::show::Snapshot;

/// The longest wait for pacers to carry out an order: a slice takes 100 ms at most.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why shares cannot be kept.
#[derive(Debug, Error)]
pub enum PacerError {
    /// The pacers could not be set up.
    #[error("reservations are not kept: {what}: {source}; {}", remedy(source))]
    Setup {
        /// What was tried.
        what: &'static str,
        /// The kernel's word.
        source: io::Error,
    },
    /// The sched_ext scheduler could not be started, or does not stand any more.
    #[error("reservations are not kept: sched_ext: {0}")]
    Ext(String),
    /// The pacers do not answer.
    #[error(
        "reservations are not kept any more: the pacer threads have ended or do not answer; collect what is needed \
         with `ontime report` and report it"
    )]
    Lost,
}

/// Everything that pacers work on.
#[derive(Debug)]
pub struct Pacing {
    /// Who stands where.
    pub shares: Shares,
    /// Their threads, as these count.
    pub seats: Seats,
}

/// vCPU threads; None are those that had ended when they were opened.
#[derive(Debug, Default)]
pub struct Seats(pub Vec<Option<Seat>>);

impl Seats {
    /// Goes on with what is known of those that are in `old`, too.
    fn go_on(&mut self, old: &Seats) {
        for seat in self.0.iter_mut().flatten() {
            if let Some(before) = old.0.iter().flatten().find(|before| before.is_of(seat)) {
                seat.go_on(before);
            }
        }
    }

    /// Puts those that are not in `other` at a place.
    fn place_others(&mut self, other: Option<&Seats>, place: Place) {
        let is_there = |seat: &Seat| other.iter().any(|other| other.0.iter().flatten().any(|there| there.is_of(seat)));
        for seat in self.0.iter_mut().flatten().filter(|seat| !is_there(seat)) {
            // Ended, or not permitted: then it is where it is.
            let _ = seat.look().and_then(|_| seat.place(place));
        }
    }
}

impl Threads for Seats {
    fn read(&mut self, seat: usize) -> Option<Counts> {
        self.0.get_mut(seat)?.as_mut()?.read().ok()
    }

    fn sleeps(&mut self, seat: usize) -> bool {
        self.0.get(seat).and_then(Option::as_ref).is_none_or(Seat::sleeps)
    }

    fn next(&mut self, seat: usize, after: u64) -> Option<Next> {
        self.0.get_mut(seat)?.as_mut()?.published.as_mut()?.next(after)
    }

    fn claimed(&mut self, seat: usize) -> Option<Share> {
        self.0.get_mut(seat)?.as_mut()?.claimed()
    }

    fn place(&mut self, seat: usize, place: Place) -> Option<Counts> {
        self.0.get_mut(seat)?.as_mut()?.place(place).ok()
    }
}

/// What the daemon asks of the pacers.
#[derive(Debug)]
enum Order {
    /// Work on this from the end of the slice on; comes back with what was worked on before.
    Replace(Option<Box<Pacing>>),
    /// Fill this in.
    Show(Snapshot),
}

/// What pacers and the daemon share.
#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Changes when somebody is to look; the futex.
    word: AtomicU32,
    stop: AtomicBool,
    inbox: AtomicPtr<Order>,
    outbox: AtomicPtr<Order>,
    /// Changes when an order has been carried out; the daemon's futex.
    done: AtomicU32,
}

/// Of the pacers alone.
#[derive(Debug, Default)]
struct State {
    pacing: Option<Box<Pacing>>,
    waiting: Option<Box<Order>>,
}

/// Now, ns of CLOCK_MONOTONIC.
pub fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (now.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(now.tv_nsec as u64)
}

/// Changes a futex and wakes all who wait for that.
fn wake(word: &AtomicU32) {
    word.fetch_add(1, Ordering::Release);
    // Waking fails for an address that is none only.
    let _ = futex::wake(word, futex::Flags::PRIVATE, i32::MAX as u32);
}

impl Shared {
    /// Takes what lies in a cell.
    fn take(cell: &AtomicPtr<Order>) -> Option<Box<Order>> {
        let raw = cell.swap(ptr::null_mut(), Ordering::AcqRel);
        // SAFETY: what is put into a cell comes from Box::into_raw (`put`), and a swap takes it out for one taker only.
        (!raw.is_null()).then(|| unsafe { Box::from_raw(raw) })
    }

    /// Puts an order into a cell; gives what lay there.
    fn put(cell: &AtomicPtr<Order>, order: Box<Order>) -> Option<Box<Order>> {
        let raw = cell.swap(Box::into_raw(order), Ordering::AcqRel);
        // SAFETY: as in `take`.
        (!raw.is_null()).then(|| unsafe { Box::from_raw(raw) })
    }

    fn wake_all(&self) {
        wake(&self.word);
    }

    /// What a pacer does when it is awake. Returns when it is to wake next.
    fn work(&self, cpu: usize) -> u64 {
        // Poisoned by a panic, which there is none of; what is in there is as good as it was.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if self.stop.load(Ordering::Acquire) {
            return NEVER;
        }
        if state.waiting.is_none() {
            state.waiting = Self::take(&self.inbox);
        }
        let done = state.obey(now());
        let due = state.pacing.as_mut().map_or(NEVER, |pacing| {
            let start = now();
            let due = pacing.shares.step(cpu, start, &mut pacing.seats);
            pacing.shares.took(cpu, now().saturating_sub(start));
            due
        });
        let stirred = state.pacing.as_mut().is_some_and(|pacing| pacing.shares.take_stirred());
        drop(state);
        if let Some(order) = done {
            // One order is under way at a time, so nothing lies there that would be dropped here.
            let before = Self::put(&self.outbox, order);
            debug_assert!(before.is_none());
            wake(&self.done);
        }
        if stirred {
            self.wake_all();
        }
        due
    }

    /// Puts everybody behind: a vCPU that spins and that nobody looks after would keep the daemon itself from its CPU,
    /// which is to place it.
    fn leave(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pacing) = &mut state.pacing {
            pacing.seats.place_others(None, Place::Beyond);
        }
    }

    /// The thread of one CPU.
    fn run(&self, cpu: usize) {
        loop {
            let seen = self.word.load(Ordering::Acquire);
            if self.stop.load(Ordering::Acquire) {
                self.leave();
                return;
            }
            let due = self.work(cpu);
            let until = Timespec { tv_sec: (due / 1_000_000_000) as i64, tv_nsec: (due % 1_000_000_000) as _ };
            let until = (due != NEVER).then_some(&until);
            // Woken, timed out, interrupted, or the word had changed: look again.
            let _ = futex::wait_bitset(&self.word, futex::Flags::PRIVATE, seen, until, NonZeroU32::MAX);
        }
    }
}

impl State {
    /// Carries out the order that waits, if it can be now.
    fn obey(&mut self, now: u64) -> Option<Box<Order>> {
        match self.waiting.as_deref_mut()? {
            Order::Show(snapshot) => {
                if let Some(pacing) = &self.pacing {
                    pacing.shares.show(now, snapshot);
                }
            }
            Order::Replace(next) => {
                if self.pacing.as_deref().is_some_and(|old| !old.shares.yields(now)) {
                    return None;
                }
                let old = self.pacing.as_deref();
                if let Some(next) = next {
                    // Who made it may have been kept from running since.
                    next.shares.begin(now, &mut next.seats);
                    if let Some(old) = old {
                        next.shares.take_over(&old.shares);
                    }
                }
                // Who comes is where shares believe it; who goes is behind, as in `leave`.
                let mut next = next.as_deref_mut().map(|next| &mut next.seats);
                let mut old = self.pacing.as_deref_mut().map(|old| &mut old.seats);
                if let Some(next) = &mut next {
                    old.iter().for_each(|old| next.go_on(old));
                    next.place_others(old.as_deref(), Place::Entitled);
                }
                if let Some(old) = &mut old {
                    old.place_others(next.as_deref(), Place::Beyond);
                }
                if let Some(Order::Replace(next)) = self.waiting.as_deref_mut() {
                    std::mem::swap(next, &mut self.pacing);
                }
            }
        }
        self.waiting.take()
    }
}

/// The daemon's handle of the pacers.
#[derive(Debug)]
pub struct Pacers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Pacers {
    /// Starts a pacer on each of these CPUs, at this place.
    ///
    /// # Errors
    /// [`PacerError::Setup`] where memory cannot be locked, or a thread not be started, placed or bound.
    pub fn start(cpus: &[u32], place: Policy) -> Result<Self, PacerError> {
        let setup = |what| move |source: io::Error| PacerError::Setup { what, source };
        rustix::mm::mlockall(rustix::mm::MlockAllFlags::CURRENT | rustix::mm::MlockAllFlags::FUTURE)
            .map_err(|error| setup("locking memory (LimitMEMLOCK=infinity)")(error.into()))?;
        let mut pacers = Self { shared: Arc::default(), threads: Vec::new() };
        for (index, cpu) in cpus.iter().copied().enumerate() {
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
                        shared.run(index);
                    }
                })
                .map_err(setup("starting a pacer thread"))?;
            pacers.threads.push(thread);
            told.recv().map_err(|_| PacerError::Lost)?.map_err(setup("placing a pacer thread (CAP_SYS_NICE)"))?;
        }
        Ok(pacers)
    }

    /// Has the pacers work on this from the end of the present slice on; None for nothing. Waits until they do.
    ///
    /// # Errors
    /// [`PacerError::Lost`].
    pub fn replace(&mut self, pacing: Option<Box<Pacing>>) -> Result<(), PacerError> {
        self.order(Order::Replace(pacing)).map(drop)
    }

    /// What they are doing; `vcpus` is how many there are.
    ///
    /// # Errors
    /// [`PacerError::Lost`].
    pub fn show(&mut self, vcpus: usize) -> Result<Snapshot, PacerError> {
        match *self.order(Order::Show(Snapshot::with_room(vcpus)))? {
            Order::Show(snapshot) => Ok(snapshot),
            Order::Replace(_) => Err(PacerError::Lost),
        }
    }

    /// The pacer that has carried the order out wakes this thread, at normal priority: a sleep would end by
    /// `ktimers/N`, which a vCPU that spins and that this thread has still to cap keeps from running.
    fn order(&mut self, order: Order) -> Result<Box<Order>, PacerError> {
        drop(Shared::put(&self.shared.inbox, Box::new(order)));
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
            // Woken, timed out, interrupted, or done before: look again.
            let _ = futex::wait(&self.shared.done, futex::Flags::PRIVATE, seen, Some(&left));
        }
    }
}

impl Drop for Pacers {
    /// Ends the pacers, which put vCPUs behind everybody. One that does not end is not waited for for ever: it is at
    /// most in a system call.
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

/// Places and binds the calling thread.
fn place_here(cpu: u32, place: Policy) -> io::Result<()> {
    let own = rustix::thread::gettid().as_raw_nonzero().get();
    let process = rustix::process::getpid().as_raw_nonzero().get();
    let id = ThreadId::of(process, own).map_err(io::Error::other)?;
    id.set_affinity(&CpuList::from_iter([cpu])).map_err(io::Error::other)?;
    id.set_policy(place).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::*;
    use ontime_plan::Bandwidth;

    use crate::seat::{Guest, Hand, Places};
    use crate::settle::Settled;
    use crate::shares::Planning;

    #[test]
    fn why_reservations_are_not_kept_has_a_remedy() {
        let setup = |what, number| PacerError::Setup { what, source: io::Error::from_raw_os_error(number) };
        for (error, wanted) in [
            (setup("starting a pacer thread", libc::EAGAIN), "; raise the limit of threads (TasksMax= of the unit"),
            (setup("locking memory", libc::ENOMEM), "; free memory, or raise MemoryMax= and LimitMEMLOCK="),
            (PacerError::Lost, "`ontime report`"),
        ] {
            let said = error.to_string();
            assert!(said.starts_with("reservations are not kept") && said.contains(wanted), "{said}");
        }
    }

    /// Everybody may take these places; the real ones take CAP_SYS_NICE.
    const PLACES: Places = Places { planned: Policy::BULK, entitled: Policy::BULK, beyond: Policy::Idle };

    /// A thread that waits for its end.
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
        let seat =
            |waiting: &&Waiting| Seat::open(waiting.0, Hand::Policy(PLACES), Arc::default(), Guest::default()).ok();
        let settled = Settled { cpus: vec![0], reserve: Bandwidth::ZERO, ..Settled::default() };
        let shares = Shares::new(&settled, Planning::Best, now(), |_| Arc::default());
        Box::new(Pacing { shares, seats: Seats(of.iter().map(seat).collect()) })
    }

    fn is_behind(waiting: &Waiting) -> bool {
        // SAFETY: takes and gives numbers.
        let policy = unsafe { libc::sched_getscheduler(waiting.0.tid) };
        policy & !libc::SCHED_RESET_ON_FORK == libc::SCHED_IDLE
    }

    #[test]
    fn nobody_is_left_ahead_with_nobody_to_look_after_them() {
        let (stays, goes, comes) = (waiting(), waiting(), waiting());
        let shared = Shared::default();
        let replace = |next: &[&Waiting]| {
            let mut state = shared.state.lock().unwrap();
            state.waiting = Some(Box::new(Order::Replace(Some(pacing(next)))));
            assert!(state.obey(now()).is_some());
        };
        replace(&[&stays, &goes]);
        assert!(!is_behind(&stays) && !is_behind(&goes));
        // One that was left behind by others' pacers comes to where these believe it.
        pacing(&[&comes]).seats.place_others(None, Place::Beyond);
        assert!(is_behind(&comes));
        replace(&[&comes, &stays]);
        assert!(is_behind(&goes) && !is_behind(&stays) && !is_behind(&comes));
        shared.stop.store(true, Ordering::Release);
        shared.run(0);
        assert!(is_behind(&stays) && is_behind(&comes));
    }
}
