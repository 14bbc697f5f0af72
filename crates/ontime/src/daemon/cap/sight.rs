//! What threads' `stat` files say, read for the watcher by a thread at normal priority (`ontime-sight`).
//!
//! The watcher must not read `stat` itself: for that file the kernel takes a reference to the address space of the
//! thread's process (`fs/proc/array.c`, `do_task_stat`). If the process ends in that moment, the reading thread drops
//! the last reference: it frees the memory of a whole VM and closes the files that were mapped, which a file system of
//! the process's user may delay for ever. Above every other thread, that would stop the CPU.
//!
//! The watcher asks, and uses the answer at its next turn. Until then a thread is where it was last seen, and does not
//! count as asleep. The reading thread has what real-time threads leave of the CPUs, which is the purpose of the caps.
//! If it does not end a read, another one is started ([`Readers::replace_stuck_reader`]). Its CPU time is charged to
//! the CPU as the watcher's own is, so that what the caps leave is left to others.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ontime_base::clock;
use ontime_tenants::limit_waits;
use rtrb::{Consumer, Producer, RingBuffer};
use rustix::thread::{futex, sched_getcpu};
use rustix::time::ClockId;

use crate::daemon::nice;

/// The bits of a state's letter in [`Sight::state`].
const LETTER: u64 = 0xff;
/// No CPU was seen.
const NO_CPU: u32 = u32::MAX;
/// How long no reader may get on, until another one is started, and the most readers.
const STUCK: Duration = Duration::from_secs(1);
const MOST: u32 = 16;
/// The most CPU time of a read that is charged, ns: the rest is the kernel's work for a process that has ended, and no
/// reason to pause other tenants' threads.
const CHARGED: u64 = 50_000;
/// Stack size of a reader, bytes. The daemon's memory is locked.
const STACK: usize = 256 * 1024;

/// A thread's `stat` file, kept open: it refers to the thread itself, not to a later thread with the same number.
#[derive(Debug)]
pub(crate) struct Sight {
    stat: File,
    /// It is in the queue.
    wanted: AtomicBool,
    /// The state's letter, see proc(5), in the lowest 8 bits; 0: not read since [`Sight::forget_state`]. Above them,
    /// how often that was called: a read that began before such a call has no answer for later.
    state: AtomicU64,
    cpu: AtomicU32,
}

impl Sight {
    /// Opens and reads the file of thread `tid`. `cpu`: where it will run, instead of where it ran last.
    ///
    /// # Errors
    /// ENOENT where the thread has ended.
    pub(crate) fn open(pid: i32, tid: i32, cpu: Option<u32>) -> io::Result<Self> {
        let stat = File::open(format!("/proc/{pid}/task/{tid}/stat"))?;
        let (wanted, state) = (AtomicBool::new(false), AtomicU64::new(0));
        let mut sight = Self { stat, wanted, state, cpu: AtomicU32::new(NO_CPU) };
        sight.read();
        if let Some(cpu) = cpu {
            *sight.cpu.get_mut() = cpu;
        }
        Ok(sight)
    }

    /// The CPU on which the thread was last seen.
    pub(crate) fn cpu(&self) -> Option<u32> {
        Some(self.cpu.load(Ordering::Relaxed)).filter(|cpu| *cpu != NO_CPU)
    }

    /// The state's letter, if it was read since [`Self::forget_state`].
    pub(crate) fn state(&self) -> Option<u8> {
        Some((self.state.load(Ordering::Relaxed) & LETTER) as u8).filter(|state| *state != 0)
    }

    /// The next [`Self::state`] is one that was read after this. Called by one thread only.
    pub(crate) fn forget_state(&self) {
        self.state.store(self.round().wrapping_add(LETTER + 1), Ordering::Relaxed);
    }

    /// How often the state was forgotten.
    fn round(&self) -> u64 {
        self.state.load(Ordering::Acquire) & !LETTER
    }

    /// Not for real-time threads.
    fn read(&self) {
        let round = self.round();
        let mut line = [0; 512];
        let length = self.stat.read_at(&mut line, 0).unwrap_or(0);
        let line = line.get(..length).unwrap_or_default();
        if let Some(cpu) = stat_field(line, STAT_PROCESSOR) {
            self.cpu.store(cpu as u32, Ordering::Relaxed);
        }
        // A thread that has ended has no line.
        self.answer(round, state(line).unwrap_or(b'X'));
    }

    /// Sets the state that was read from `round` on, unless it was forgotten since.
    fn answer(&self, round: u64, letter: u8) {
        let is_asked = |state: u64| (state & !LETTER == round).then_some(round | u64::from(letter));
        let _ = self.state.fetch_update(Ordering::Relaxed, Ordering::Relaxed, is_asked);
    }
}

/// The state letter of a `stat` line, see proc(5).
fn state(line: &[u8]) -> Option<u8> {
    let end_of_name = line.iter().rposition(|byte| *byte == b')')?;
    line.get(end_of_name + 2).copied()
}

/// The field number of the CPU in `/proc/PID/stat`, as in proc(5).
const STAT_PROCESSOR: usize = 39;

/// A numeric field of a `stat` line, numbered as in proc(5), from 3 on. The name (field 2) may contain any character,
/// even ")".
fn stat_field(line: &[u8], field: usize) -> Option<u64> {
    let end_of_name = line.iter().rposition(|byte| *byte == b')')?;
    let rest = line.get(end_of_name + 2..)?;
    std::str::from_utf8(rest.split(|byte| byte.is_ascii_whitespace()).nth(field.checked_sub(3)?)?).ok()?.parse().ok()
}

/// What the readers share.
#[derive(Debug)]
struct Queue {
    /// Held only to take one entry.
    wanted: Mutex<Consumer<Arc<Sight>>>,
    /// The readers' futex. Changes when there is work, or when they are to end.
    bell: AtomicU32,
    stop: AtomicBool,
    /// Readers that are reading, and reads so far, modulo 2^32.
    busy: AtomicU32,
    done: AtomicU32,
    /// The readers' CPU time that was not charged yet, ns, and the CPU on which a reader last was.
    took: AtomicU64,
    on: AtomicU32,
}

impl Queue {
    fn ring(&self) {
        self.bell.fetch_add(1, Ordering::Release);
        // It fails for an invalid address only.
        let _ = futex::wake(&self.bell, futex::Flags::PRIVATE, 1);
    }

    /// The body of a reader's thread.
    fn serve(&self) {
        let mut ran = own_time();
        loop {
            let seen = self.bell.load(Ordering::Acquire);
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            let next = self.wanted.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Ok(sight) = next else {
                // Woken, interrupted, or the bell had rung: check again.
                let _ = futex::wait(&self.bell, futex::Flags::PRIVATE, seen, None);
                continue;
            };
            self.busy.fetch_add(1, Ordering::Relaxed);
            limit_waits(|| {
                // A question from here on is read again; what was asked until here, and forgotten before, is read now.
                sight.wanted.swap(false, Ordering::AcqRel);
                sight.read();
                // Perhaps the last reference.
                drop(sight);
            });
            let now = own_time();
            self.on.store(u32::try_from(sched_getcpu()).unwrap_or(NO_CPU), Ordering::Relaxed);
            self.took.fetch_add(now.saturating_sub(ran).min(CHARGED), Ordering::Release);
            ran = now;
            self.done.fetch_add(1, Ordering::Relaxed);
            self.busy.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// CPU time of the calling thread, ns.
fn own_time() -> u64 {
    clock::read(ClockId::ThreadCPUTime)
}

/// The watcher's end.
#[derive(Debug)]
pub(crate) struct Asker {
    wanted: Producer<Arc<Sight>>,
    queue: Arc<Queue>,
}

impl Asker {
    /// Has a thread's file read, unless it is about to be. Called by the watcher: no system call, no allocation, no
    /// wait. Call [`Self::ring`] afterwards.
    pub(crate) fn ask(&mut self, sight: &Arc<Sight>) {
        if !sight.wanted.swap(true, Ordering::AcqRel) && self.wanted.push(Arc::clone(sight)).is_err() {
            // No room: the next turn asks again. This was not the last reference.
            sight.wanted.store(false, Ordering::Release);
        }
    }

    /// The readers' CPU time since the last call, ns, and the CPU to which it is charged.
    pub(crate) fn spent(&self) -> (u32, u64) {
        let took = self.queue.took.swap(0, Ordering::Acquire);
        (self.queue.on.load(Ordering::Relaxed), took)
    }

    /// Wakes a reader. One system call.
    pub(crate) fn ring(&self) {
        self.queue.ring();
    }
}

/// The planner's end. Its drop ends the readers, when they have finished their reads.
#[derive(Debug)]
pub(super) struct Readers {
    queue: Arc<Queue>,
    started: u32,
    /// How many reads were done when all readers were first seen reading, and when that was.
    since: Option<(u32, Instant)>,
}

impl Readers {
    /// Starts a reader. `room`: how many reads may wait.
    ///
    /// # Errors
    /// Where the thread cannot be started.
    pub(super) fn start(room: usize) -> io::Result<(Self, Asker)> {
        let (wanted, take) = RingBuffer::new(room);
        let queue = Queue {
            wanted: Mutex::new(take),
            bell: AtomicU32::new(0),
            stop: AtomicBool::new(false),
            busy: AtomicU32::new(0),
            done: AtomicU32::new(0),
            took: AtomicU64::new(0),
            on: AtomicU32::new(NO_CPU),
        };
        let queue = Arc::new(queue);
        let mut readers = Self { queue: Arc::clone(&queue), started: 0, since: None };
        readers.add()?;
        Ok((readers, Asker { wanted, queue }))
    }

    fn add(&mut self) -> io::Result<()> {
        let queue = Arc::clone(&self.queue);
        let thread = std::thread::Builder::new().name("ontime-sight".to_owned()).stack_size(STACK);
        thread.spawn(move || {
            nice::of_this_thread(nice::APPLYING);
            queue.serve();
        })?;
        self.started += 1;
        Ok(())
    }

    /// Whether no reader gets on and no more are started: where threads are is not known then.
    pub(super) fn hang(&self) -> bool {
        self.started >= MOST && self.since.is_some_and(|(_, since)| since.elapsed() > STUCK)
    }

    /// Starts another reader if none has got on with its read for [`STUCK`]. Called in every pass, and once a
    /// second while threads are watched.
    pub(super) fn replace_stuck_reader(&mut self) {
        let done = self.queue.done.load(Ordering::Relaxed);
        if self.queue.busy.load(Ordering::Relaxed) < self.started {
            self.since = None;
            return;
        }
        self.since = self.since.filter(|(before, _)| *before == done).or_else(|| Some((done, Instant::now())));
        if self.started < MOST && self.since.is_some_and(|(_, since)| since.elapsed() > STUCK) {
            self.since = None;
            if let Err(error) = self.add() {
                tracing::warn!("no thread reads for the cap watcher: {error}; {}", ontime_tenants::remedy(&error));
            }
        }
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.queue.stop.store(true, Ordering::Release);
        for _ in 0..self.started {
            self.queue.ring();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stat_line_is_read_past_any_name() {
        let line = b"77 (a) b (CPU 0/KVM)) R 1 77 77 0 -1 4194304 1 0 0 0 5 6 0 0 20 0 1 0 4242 100 5";
        assert_eq!(stat_field(line, 22), Some(4242));
        assert_eq!((state(line), state(b""), state(b"1 (x)")), (Some(b'R'), None, None));
        assert_eq!(stat_field(line, 99), None);
        assert_eq!(stat_field(b"", 22), None);
        assert_eq!(stat_field(b"1 (x)", 22), None);
        assert_eq!(stat_field(line, 0), None);
    }

    fn own(tid: i32) -> Arc<Sight> {
        Arc::new(Sight::open(std::process::id() as i32, tid, None).unwrap())
    }

    /// Waits for what another thread does, however busy the machine is.
    fn until(mut what: impl FnMut() -> bool) {
        let start = Instant::now();
        while !what() {
            assert!(start.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn what_was_asked_for_is_read_after_that() {
        let (mut readers, mut asker) = Readers::start(1).unwrap();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let (tell, told) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            tell.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
            let _ = ended.recv();
        });
        let sight = own(told.recv().unwrap());
        assert!(sight.cpu().is_some() && sight.state().is_some());
        let ask = |asker: &mut Asker| {
            sight.forget_state();
            asker.ask(&sight);
            asker.ring();
            until(|| sight.state().is_some());
            sight.state()
        };
        until(|| ask(&mut asker) == Some(b'S'));
        drop(end);
        thread.join().unwrap();
        until(|| ask(&mut asker) == Some(b'X'));
        readers.replace_stuck_reader();
        assert_eq!(readers.started, 1);
        let queue = Arc::clone(&readers.queue);
        drop((readers, asker));
        until(|| Arc::strong_count(&queue) == 1);
        assert_eq!(Arc::strong_count(&sight), 1, "nothing keeps the file open");
    }

    /// The reader may be kept from running between its read and its answer, for as long as the thread sleeps and wakes.
    #[test]
    fn a_state_that_was_read_before_it_was_forgotten_does_not_count() {
        let sight = own(std::process::id() as i32);
        let round = sight.round();
        sight.forget_state();
        sight.answer(round, b'S');
        assert_eq!(sight.state(), None);
        sight.answer(sight.round(), b'R');
        assert_eq!(sight.state(), Some(b'R'));
        sight.forget_state();
        assert_eq!(sight.state(), None);
        sight.read();
        assert!(sight.state().is_some());
    }

    #[test]
    fn without_room_a_later_turn_asks_again() {
        let (wanted, mut take) = RingBuffer::new(1);
        let (_readers, other) = Readers::start(1).unwrap();
        let mut asker = Asker { wanted, queue: Arc::clone(&other.queue) };
        let tid = std::process::id() as i32;
        let (first, second) = (own(tid), own(tid));
        for sight in [&first, &first, &second] {
            asker.ask(sight);
        }
        assert!(Arc::ptr_eq(&take.pop().unwrap(), &first) && take.pop().is_err(), "each is in the queue once");
        asker.ask(&second);
        assert!(take.pop().is_ok());
    }

    #[test]
    fn the_readers_cpu_time_is_told_once() {
        let (_readers, mut asker) = Readers::start(1).unwrap();
        let sight = own(std::process::id() as i32);
        let (mut total, mut cpu) = (0, NO_CPU);
        for _ in 0..20 {
            sight.forget_state();
            asker.ask(&sight);
            asker.ring();
            until(|| sight.state().is_some());
        }
        until(|| {
            let (on, took) = asker.spent();
            (total, cpu) = (total + took, on);
            total > 0
        });
        assert!(total <= 20 * CHARGED && cpu != NO_CPU, "{total} on {cpu}");
        until(|| asker.spent().1 == 0);
    }

    /// As where a reader frees a whole VM's memory, or waits for a file system.
    #[test]
    fn a_reader_that_does_not_get_on_is_replaced() {
        let (mut readers, mut asker) = Readers::start(4).unwrap();
        // The first reader seems to read for ever.
        readers.queue.busy.fetch_add(1, Ordering::Relaxed);
        readers.replace_stuck_reader();
        assert_eq!(readers.started, 1, "it may just be about to finish");
        readers.since = readers.since.map(|(done, since)| (done, since - 2 * STUCK));
        readers.replace_stuck_reader();
        assert_eq!(readers.started, 2);
        let sight = own(std::process::id() as i32);
        sight.forget_state();
        asker.ask(&sight);
        asker.ring();
        until(|| sight.state().is_some());
        // However many do not get on, their number is limited.
        assert!(!readers.hang());
        readers.queue.busy.fetch_add(100, Ordering::Relaxed);
        for _ in 0..30 {
            readers.replace_stuck_reader();
            readers.since = readers.since.map(|(done, since)| (done, since - 2 * STUCK));
        }
        assert!(readers.started <= MOST && readers.hang());
        readers.queue.done.fetch_add(1, Ordering::Relaxed);
        readers.replace_stuck_reader();
        assert!(!readers.hang(), "one has got on");
    }
}
