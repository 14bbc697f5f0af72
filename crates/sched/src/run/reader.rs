//! Reads, for a pacer, files whose reading another process can make long: a vCPU thread's `stat` and the page on which
//! a guest publishes.
//!
//! For `stat` the kernel takes a reference to the address space of the thread's process (`fs/proc/array.c`,
//! `do_task_stat`). If the process ends in that moment, the reading thread drops the last reference: it frees the
//! memory of the whole VM and closes the files that were mapped, and a file system of the process's user may answer as
//! late as it likes. A read of the guest's page waits for the page's lock, which has no priority inheritance: a thread
//! at the lowest priority of the host may hold the lock (`move_pages`, `madvise`) and be kept from running.
//!
//! A pacer preempts everything on its CPU and holds the mutex of its part of the plan. So another thread reads: pinned
//! to the pacer's CPU, just below the pacer, so that it runs as soon as the pacer waits for it. Beyond [`USUAL`], the
//! pacer waits at most [`PATIENCE`] for all reads of a check together. Then it moves its reader to SCHED_OTHER, where
//! the rest of the read delays no real-time thread, and does without what cannot be read until the reader has finished.
//! Only the pacer changes its reader's policy.

use std::fs::File;
use std::io;
use std::num::NonZeroU32;
use std::os::unix::fs::FileExt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use ontime_base::clock::{now, timespec};
use rustix::thread::futex;

use crate::model::PacerError;

/// What a read takes, ns, and more. So much is waited for each read.
const USUAL: u64 = 50_000;
/// The longest wait beyond that in a check, ns: many times what a read of memory takes.
const PATIENCE: u64 = 150_000;
/// The longest read, bytes.
const MOST: usize = 128;
/// A reader that has not finished a read for this long does not count on finishing it.
const STUCK: Duration = Duration::from_secs(1);

/// Why there is no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unread {
    /// This read does not end in time.
    Late,
    /// The reader has not finished a former read.
    Busy,
}

/// What a pacer and its reader share. The pacer asks, by the number of its question; the reader answers with that
/// number. The other fields belong to the reader while the numbers differ, otherwise to the pacer.
#[derive(Debug)]
struct Shared {
    /// The number of the last question; the reader's futex.
    asked: AtomicU32,
    /// The number of the last answer; the pacer's futex.
    answered: AtomicU32,
    stop: AtomicBool,
    /// The file of the question, with a reference of its own (`Arc::into_raw`).
    file: AtomicPtr<File>,
    offset: AtomicU64,
    /// How many bytes to read, then how many were read.
    length: AtomicU32,
    bytes: [AtomicU8; MOST],
    /// Held by a test in place of a file that cannot be read.
    #[cfg(test)]
    hold: std::sync::Mutex<()>,
    /// How long a read takes at least in a test, ns.
    #[cfg(test)]
    slow: AtomicU64,
}

impl Shared {
    fn new() -> Self {
        Self {
            asked: AtomicU32::new(0),
            answered: AtomicU32::new(0),
            stop: AtomicBool::new(false),
            file: AtomicPtr::new(ptr::null_mut()),
            offset: AtomicU64::new(0),
            length: AtomicU32::new(0),
            bytes: [const { AtomicU8::new(0) }; MOST],
            #[cfg(test)]
            hold: std::sync::Mutex::new(()),
            #[cfg(test)]
            slow: AtomicU64::new(0),
        }
    }

    fn take_file(&self) -> Option<Arc<File>> {
        let raw = self.file.swap(ptr::null_mut(), Ordering::AcqRel);
        // SAFETY: every pointer in this field comes from Arc::into_raw, and the swap gives it to one taker only.
        (!raw.is_null()).then(|| unsafe { Arc::from_raw(raw.cast_const()) })
    }

    /// The body of the reader's thread.
    fn serve(&self) {
        let mut done = 0;
        loop {
            let asked = self.asked.load(Ordering::Acquire);
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            if asked == done {
                // Woken, interrupted, or the word had changed: check again.
                let _ = futex::wait(&self.asked, futex::Flags::PRIVATE, asked, None);
                continue;
            }
            if let Some(file) = self.take_file() {
                self.read(&file);
                // This may be the last reference, and closing the file may take long, too.
                drop(file);
            }
            done = asked;
            self.answered.store(asked, Ordering::Release);
            let _ = futex::wake(&self.answered, futex::Flags::PRIVATE, 1);
        }
    }

    fn read(&self, file: &File) {
        #[cfg(test)]
        {
            drop(self.hold.lock());
            std::thread::sleep(Duration::from_nanos(self.slow.load(Ordering::Relaxed)));
        }
        let mut bytes = [0; MOST];
        let wanted = bytes.get_mut(..self.length.load(Ordering::Relaxed) as usize).unwrap_or_default();
        // A file that cannot be read has no bytes: its thread has ended.
        let length = file.read_at(wanted, self.offset.load(Ordering::Relaxed)).unwrap_or(0);
        for (to, from) in self.bytes.iter().zip(bytes).take(length) {
            to.store(from, Ordering::Relaxed);
        }
        self.length.store(length as u32, Ordering::Relaxed);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        drop(self.take_file());
    }
}

/// A pacer's end. Its drop ends the thread, when that has finished its read.
#[derive(Debug)]
pub(crate) struct Reader {
    shared: Arc<Shared>,
    /// The reader's thread number and its FIFO priority; 0: SCHED_OTHER.
    thread: libc::pid_t,
    priority: libc::c_int,
    /// The number of the last question.
    asked: u32,
    /// What is left of [`PATIENCE`] in this check; how much the last read took beyond [`USUAL`], ns.
    left: u64,
    excess: u64,
    /// The reader was moved to SCHED_OTHER.
    demoted: bool,
}

impl Reader {
    /// Starts the reader of the pacer on `cpu`. `place`, in the new thread, pins it and gives it this FIFO priority; 0:
    /// SCHED_OTHER.
    ///
    /// # Errors
    /// [`PacerError::Setup`] where the thread cannot be started or placed.
    pub(crate) fn start(
        cpu: u32,
        priority: u8,
        place: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> Result<Self, PacerError> {
        let setup = |what| move |source: io::Error| PacerError::Setup { what, source };
        let shared = Arc::new(Shared::new());
        let (tell, told) = sync_channel(1);
        let of = Arc::clone(&shared);
        std::thread::Builder::new()
            .name(format!("ontime-read/{cpu}"))
            .stack_size(64 * 1024)
            .spawn(move || {
                let placed = place();
                let go = placed.is_ok();
                let _ = tell.send(placed.map(|()| rustix::thread::gettid().as_raw_nonzero().get()));
                if go {
                    of.serve();
                }
            })
            .map_err(setup("starting a pacer's reading thread"))?;
        let thread = told.recv().map_err(|_| PacerError::Lost)?;
        let thread = thread.map_err(setup("placing a pacer's reading thread (CAP_SYS_NICE)"))?;
        let priority = priority.into();
        Ok(Self { shared, thread, priority, asked: 0, left: PATIENCE, excess: 0, demoted: false })
    }

    /// The pacer begins a check.
    pub(crate) fn begin_check(&mut self) {
        self.left = PATIENCE;
    }

    /// How much the last read took beyond [`USUAL`], ns, also if it was late.
    pub(crate) fn excess(&self) -> u64 {
        self.excess
    }

    /// Reads from a file as pread(2) does, at most [`MOST`] bytes; an error is an empty file. Called by the pacer:
    /// three system calls, no allocation, a wait of at most [`USUAL`] and what is left of [`PATIENCE`].
    pub(crate) fn read_at(&mut self, file: &Arc<File>, offset: u64, into: &mut [u8]) -> Result<usize, Unread> {
        if self.shared.answered.load(Ordering::Acquire) != self.asked {
            return Err(Unread::Busy);
        }
        if self.demoted {
            self.set_priority(self.priority).map_err(|_| Unread::Busy)?;
            self.demoted = false;
        }
        let shared = &*self.shared;
        shared.offset.store(offset, Ordering::Relaxed);
        shared.length.store(into.len().min(MOST) as u32, Ordering::Relaxed);
        // The reader has taken the file of the last question.
        shared.file.store(Arc::into_raw(Arc::clone(file)).cast_mut(), Ordering::Relaxed);
        self.asked = self.asked.wrapping_add(1);
        shared.asked.store(self.asked, Ordering::Release);
        let _ = futex::wake(&shared.asked, futex::Flags::PRIVATE, 1);
        let start = now();
        let answered = self.wait(start.saturating_add(USUAL + self.left));
        self.excess = now().saturating_sub(start).saturating_sub(USUAL);
        self.left = self.left.saturating_sub(self.excess);
        if !answered {
            // A thread that cannot be moved stays where it is, below the pacer.
            let _ = self.set_priority(0);
            self.demoted = true;
            return Err(Unread::Late);
        }
        let length = self.shared.length.load(Ordering::Relaxed) as usize;
        for (to, from) in into.iter_mut().zip(&self.shared.bytes).take(length) {
            *to = from.load(Ordering::Relaxed);
        }
        Ok(length)
    }

    /// Waits for the answer to the last question. A real-time thread's time-out expires in the timer interrupt itself
    /// (see `pacer`).
    fn wait(&self, end: u64) -> bool {
        loop {
            let seen = self.shared.answered.load(Ordering::Acquire);
            if seen == self.asked {
                return true;
            }
            if now() >= end {
                return false;
            }
            let word = &self.shared.answered;
            let _ = futex::wait_bitset(word, futex::Flags::PRIVATE, seen, Some(&timespec(end)), NonZeroU32::MAX);
        }
    }

    fn set_priority(&self, priority: libc::c_int) -> io::Result<()> {
        let policy = if priority > 0 { libc::SCHED_FIFO } else { libc::SCHED_OTHER };
        let param = libc::sched_param { sched_priority: priority };
        // SAFETY: the kernel copies param, which outlives the call. The thread lives as long as this value.
        let done = unsafe { libc::sched_setscheduler(self.thread, policy, &raw const param) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// For the daemon's thread: to notice a reader that does not finish.
    pub(crate) fn progress(&self) -> Progress {
        Progress { shared: Arc::clone(&self.shared), since: None }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.asked.fetch_add(1, Ordering::Release);
        let _ = futex::wake(&self.shared.asked, futex::Flags::PRIVATE, 1);
    }
}

/// Whether a reader goes on, as the daemon's thread sees it.
#[derive(Debug)]
pub(crate) struct Progress {
    shared: Arc<Shared>,
    /// The question without an answer that was seen last, and when it was first seen.
    since: Option<(u32, Instant)>,
}

impl Progress {
    /// That of a reader which has not answered its first question for long.
    #[cfg(test)]
    pub(crate) fn hanging() -> Self {
        let shared = Arc::new(Shared::new());
        shared.asked.store(1, Ordering::Release);
        Self { shared, since: Instant::now().checked_sub(2 * STUCK).map(|since| (1, since)) }
    }

    /// Whether the reader has worked on one question for longer than [`STUCK`], as far as the calls of this function
    /// show.
    pub(crate) fn is_stuck(&mut self) -> bool {
        let asked = self.shared.asked.load(Ordering::Acquire);
        if self.shared.answered.load(Ordering::Acquire) == asked {
            self.since = None;
            return false;
        }
        self.since = self.since.filter(|(number, _)| *number == asked).or_else(|| Some((asked, Instant::now())));
        self.since.is_some_and(|(_, since)| since.elapsed() > STUCK)
    }
}

/// A reader at normal priority, on any CPU.
#[cfg(test)]
pub(crate) fn unplaced() -> Reader {
    Reader::start(0, 0, || Ok(())).unwrap()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// Reads until the machine is not too busy for that.
    fn read(reader: &mut Reader, file: &Arc<File>, offset: u64, into: &mut [u8]) -> usize {
        loop {
            if let Ok(length) = reader.read_at(file, offset, into) {
                return length;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_file_is_read_as_by_pread() {
        let mut file = tempfile::tempfile().unwrap();
        let content: Vec<u8> = (0..200).collect();
        file.write_all(&content).unwrap();
        let file = Arc::new(file);
        let mut reader = unplaced();
        let mut bytes = [0; MOST + 10];
        for (offset, wanted) in [(0, &content[..MOST]), (150, &content[150..]), (200, &[]), (u64::MAX, &[])] {
            assert_eq!(read(&mut reader, &file, offset, &mut bytes), wanted.len());
            assert_eq!(&bytes[..wanted.len()], wanted);
        }
        assert_eq!(read(&mut reader, &file, 10, &mut bytes[..3]), 3);
        assert_eq!(bytes[..3], [10, 11, 12]);
        let writable = File::options().append(true).open("/dev/null").unwrap();
        assert_eq!(read(&mut reader, &Arc::new(writable), 0, &mut bytes), 0, "it cannot be read");
        drop(reader);
        // The reader keeps no file.
        while Arc::strong_count(&file) > 1 {
            std::thread::yield_now();
        }
    }

    /// As where the reader takes down an address space, or waits for a page's lock.
    #[test]
    fn a_read_that_does_not_end_is_left_to_a_thread_at_normal_priority() {
        let root = rustix::process::geteuid().is_root();
        if !root {
            println!("SKIPPED in part: placing threads needs root");
        }
        let file = Arc::new(File::open("/proc/self/stat").unwrap());
        let priority = if root { 1 } else { 0 };
        let mut reader = Reader::start(0, priority, || Ok(())).unwrap();
        reader.set_priority(reader.priority).unwrap();
        // SAFETY: takes and returns numbers only.
        let policy = |reader: &Reader| unsafe { libc::sched_getscheduler(reader.thread) };
        let at_its_place = policy(&reader);
        let mut progress = reader.progress();
        let mut bytes = [0; 64];
        let shared = Arc::clone(&reader.shared);
        let held = shared.hold.lock().unwrap();
        let start = Instant::now();
        assert_eq!(reader.read_at(&file, 0, &mut bytes), Err(Unread::Late));
        assert!(start.elapsed() < Duration::from_secs(60));
        assert_eq!(policy(&reader), libc::SCHED_OTHER);
        assert_eq!(reader.read_at(&file, 0, &mut bytes), Err(Unread::Busy), "the pacer does not wait again");
        assert!(!progress.is_stuck());
        progress.since = progress.since.map(|(number, since)| (number, since - 2 * STUCK));
        assert!(progress.is_stuck());
        drop(held);
        assert!(read(&mut reader, &file, 0, &mut bytes) > 0 && bytes.contains(&b'('));
        assert!(!progress.is_stuck());
        assert_eq!((policy(&reader), reader.demoted), (at_its_place, false));
    }

    /// Each read takes 0.15 ms or more: not long enough to be late alone. On a busy machine one may be late all the
    /// same.
    #[test]
    fn slow_reads_of_a_check_share_one_patience() {
        let file = Arc::new(File::open("/proc/self/stat").unwrap());
        let mut reader = unplaced();
        reader.shared.slow.store(150_000, Ordering::Relaxed);
        let mut excess = 0;
        while reader.left > 0 {
            match reader.read_at(&file, 0, &mut [0; 64]) {
                Err(Unread::Busy) => std::thread::yield_now(),
                _ => excess += reader.excess(),
            }
        }
        assert!(excess >= PATIENCE, "{excess}");
        // A read that does not end is not waited for longer than usual: all of its excess is the machine's.
        let shared = Arc::clone(&reader.shared);
        shared.slow.store(0, Ordering::Relaxed);
        while shared.answered.load(Ordering::Acquire) != reader.asked {
            std::thread::yield_now();
        }
        let held = shared.hold.lock().unwrap();
        assert_eq!(reader.read_at(&file, 0, &mut [0; 64]), Err(Unread::Late));
        assert_eq!(reader.left, 0);
        reader.begin_check();
        assert_eq!(reader.left, PATIENCE);
        drop(held);
    }

    /// A pacer ends although its reader does not.
    #[test]
    fn a_reader_that_is_abandoned_ends_when_its_read_does() {
        let file = Arc::new(File::open("/proc/self/stat").unwrap());
        let mut reader = unplaced();
        let shared = Arc::clone(&reader.shared);
        let held = shared.hold.lock().unwrap();
        assert_eq!(reader.read_at(&file, 0, &mut [0; 64]), Err(Unread::Late));
        drop(reader);
        drop(held);
        while Arc::strong_count(&shared) > 1 {
            std::thread::yield_now();
        }
        // If the reader had not taken the request yet, it is dropped with what both share.
        drop(shared);
        while Arc::strong_count(&file) > 1 {
            std::thread::yield_now();
        }
    }
}
