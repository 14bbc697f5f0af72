//! How much CPU time a thread has taken, and on which CPU: read from a perf event that also wakes us, or polled from
//! `/proc` where perf is refused.
//!
//! The perf event is the kernel's task clock of that one thread with a sample period in ns: its timer runs only while the
//! thread does, so a thread that sleeps costs nothing. It is switched off while its thread is paused, so it counts time
//! at RT priority only. Source: `kernel/events/core.c`, `perf_swevent_hrtimer`, `task_clock_event_*`.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use perf_event_open_sys::{bindings, ioctls, perf_event_open};

/// Where a thread's CPU time is read.
#[derive(Debug)]
pub enum Reading {
    /// Its own perf event: wakes the watcher.
    Perf(PerfReading),
    /// `/proc`: has to be polled.
    Proc(ProcReading),
}

/// CPU time taken since the last reading, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    /// ns.
    pub ran: u64,
    /// The CPU it was last seen on, where the reading says.
    pub cpu: Option<u32>,
}

/// One thread's task clock.
#[derive(Debug)]
pub struct PerfReading {
    fd: OwnedFd,
    ring: Ring,
    last: u64,
}

impl PerfReading {
    /// Opens the task clock of thread `tid`, to wake its reader after each `grain` ns of CPU time.
    ///
    /// # Errors
    /// The kernel's: EACCES or EPERM where perf is refused, ESRCH where the thread is gone, EMFILE, ENOMEM.
    pub fn open(tid: i32, grain: u64) -> io::Result<Self> {
        let mut attr = bindings::perf_event_attr {
            size: size_of::<bindings::perf_event_attr>() as u32,
            type_: bindings::PERF_TYPE_SOFTWARE,
            config: bindings::PERF_COUNT_SW_TASK_CLOCK.into(),
            sample_type: bindings::PERF_SAMPLE_CPU.into(),
            ..Default::default()
        };
        attr.__bindgen_anon_1.sample_period = grain;
        attr.__bindgen_anon_2.wakeup_events = 1;
        let flags = bindings::PERF_FLAG_FD_CLOEXEC.into();
        // SAFETY: attr is initialised and outlives the call, which copies it.
        let fd = unsafe { perf_event_open(&mut attr, tid, -1, -1, flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just gave us this descriptor; nobody else has it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let ring = Ring::map(&fd)?;
        Ok(Self { fd, ring, last: 0 })
    }

    /// Sets the CPU time, ns, after which the reader is woken. Starts that count anew.
    ///
    /// # Errors
    /// The kernel's.
    pub fn set_grain(&self, grain: u64) -> io::Result<()> {
        // The crate passes its argument on as it is; the kernel takes it for a pointer to the value.
        let pointer = (&raw const grain) as u64;
        // SAFETY: the descriptor is a perf event; the kernel copies a u64 from the pointer, which outlives the call.
        answer(unsafe { ioctls::PERIOD(self.fd.as_raw_fd(), pointer) })
    }

    /// Stops counting (and waking) while the thread is paused; what is left of the grain is kept.
    ///
    /// # Errors
    /// The kernel's.
    pub fn pause(&self) -> io::Result<()> {
        // SAFETY: the descriptor is a perf event; no memory is passed.
        answer(unsafe { ioctls::DISABLE(self.fd.as_raw_fd(), 0) })
    }

    /// Counts again.
    ///
    /// # Errors
    /// The kernel's.
    pub fn resume(&self) -> io::Result<()> {
        // SAFETY: the descriptor is a perf event; no memory is passed.
        answer(unsafe { ioctls::ENABLE(self.fd.as_raw_fd(), 0) })
    }

    fn take(&mut self) -> io::Result<Taken> {
        let mut count = [0; 8];
        rustix::io::read(&self.fd, &mut count)?;
        let count = u64::from_ne_bytes(count);
        let ran = count.saturating_sub(self.last);
        self.last = count;
        Ok(Taken { ran, cpu: self.ring.last_cpu() })
    }
}

fn answer(code: libc::c_int) -> io::Result<()> {
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The event's shared pages: a control page and one page of records.
#[derive(Debug)]
struct Ring {
    pages: NonNull<u8>,
    page: NonZeroUsize,
}

// SAFETY: the mapping belongs to this value alone and is not tied to a thread.
unsafe impl Send for Ring {}

impl Ring {
    /// A record of ours: header (8 bytes) and CPU (u32, u32 reserved).
    const RECORD: u64 = 16;

    fn map(fd: &OwnedFd) -> io::Result<Self> {
        let page = NonZeroUsize::new(rustix::param::page_size()).ok_or(io::ErrorKind::InvalidData)?;
        // SAFETY: a new mapping at an address of the kernel's choice; the descriptor is a perf event, 1 + 1 pages.
        let pages = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                2 * page.get(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        if pages == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(pages.cast()).map(|pages| Self { pages, page }).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: offset is a field of the control page, which is longer.
        let address = unsafe { self.pages.byte_add(offset) };
        // SAFETY: mapped for as long as self lives, aligned (page start plus a u64 field's offset), shared with the kernel,
        // which reads and writes it as one word.
        unsafe { AtomicU64::from_ptr(address.as_ptr().cast()) }
    }

    /// Takes all records and returns the newest one's CPU. Only samples are asked for, all of one size, so the newest lies
    /// right before the head; anything else (a loss notice) is recognised by its header and skipped.
    fn last_cpu(&self) -> Option<u32> {
        let head = self.word(std::mem::offset_of!(bindings::perf_event_mmap_page, data_head)).load(Ordering::Acquire);
        let tail = self.word(std::mem::offset_of!(bindings::perf_event_mmap_page, data_tail));
        let new = head.wrapping_sub(tail.load(Ordering::Relaxed));
        let cpu = (new >= Self::RECORD).then(|| self.record(head.wrapping_sub(Self::RECORD))).flatten();
        tail.store(head, Ordering::Release);
        cpu
    }

    fn record(&self, at: u64) -> Option<u32> {
        let header = self.data(at) as u32;
        let sample = bindings::PERF_RECORD_SAMPLE;
        (header == sample).then(|| self.data(at + 8) as u32)
    }

    /// The 8 bytes of the record page at this position of the endless stream; records are multiples of 8, so are positions.
    fn data(&self, at: u64) -> u64 {
        let within = (at as usize & (self.page.get() - 1)) & !7;
        // SAFETY: page + within + 8 is at most two pages, the mapping's length.
        let address = unsafe { self.pages.byte_add(self.page.get() + within) };
        // SAFETY: mapped, 8-aligned, and the kernel does not write there between head and our tail.
        unsafe { address.cast::<u64>().read_volatile() }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: exactly what map() mapped; no reference to it outlives self.
        unsafe { libc::munmap(self.pages.as_ptr().cast(), 2 * self.page.get()) };
    }
}

/// A thread's `/proc` files, kept open: they name the thread itself, not whatever takes over its number.
#[derive(Debug)]
pub struct ProcReading {
    schedstat: File,
    stat: File,
    last: u64,
}

impl ProcReading {
    /// Opens thread `tid`'s files.
    ///
    /// # Errors
    /// ENOENT or ESRCH where the thread is gone.
    pub fn open(pid: i32, tid: i32) -> io::Result<Self> {
        let schedstat = File::open(format!("/proc/{pid}/task/{tid}/schedstat"))?;
        let stat = File::open(format!("/proc/{pid}/task/{tid}/stat"))?;
        let mut reading = Self { schedstat, stat, last: 0 };
        reading.take()?;
        Ok(reading)
    }

    fn take(&mut self) -> io::Result<Taken> {
        let mut buffer = [0; 512];
        let length = self.schedstat.read_at(&mut buffer, 0)?;
        let count = schedstat_ran(buffer.get(..length).unwrap_or_default()).ok_or(io::ErrorKind::InvalidData)?;
        let length = self.stat.read_at(&mut buffer, 0)?;
        let cpu = stat_field(buffer.get(..length).unwrap_or_default(), STAT_PROCESSOR).map(|cpu| cpu as u32);
        let ran = count.saturating_sub(self.last);
        self.last = count;
        Ok(Taken { ran, cpu })
    }
}

/// `/proc/PID/stat` field numbers, as proc(5) counts.
pub const STAT_START_TIME: usize = 22;
const STAT_PROCESSOR: usize = 39;

/// A numeric field of a `stat` line, numbered as proc(5) does, from 3 on. The name (field 2) may hold anything, also ")".
pub fn stat_field(line: &[u8], field: usize) -> Option<u64> {
    let end_of_name = line.iter().rposition(|byte| *byte == b')')?;
    let rest = line.get(end_of_name + 2..)?;
    number(rest.split(|byte| byte.is_ascii_whitespace()).nth(field.checked_sub(3)?)?)
}

fn schedstat_ran(line: &[u8]) -> Option<u64> {
    number(line.split(|byte| byte.is_ascii_whitespace()).next()?)
}

fn number(digits: &[u8]) -> Option<u64> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

impl Reading {
    /// Opens the best reading there is: perf, or `/proc` with perf's refusal.
    ///
    /// # Errors
    /// ESRCH or ENOENT where the thread is gone; anything else is a refusal of both.
    pub fn open(pid: i32, tid: i32, grain: u64) -> io::Result<(Self, Option<io::Error>)> {
        match PerfReading::open(tid, grain) {
            Ok(perf) => Ok((Self::Perf(perf), None)),
            Err(gone) if gone.raw_os_error() == Some(libc::ESRCH) => Err(gone),
            Err(refusal) => Ok((Self::Proc(ProcReading::open(pid, tid)?), Some(refusal))),
        }
    }

    /// What was taken since the last call.
    ///
    /// # Errors
    /// ESRCH where the thread is gone.
    pub fn take(&mut self) -> io::Result<Taken> {
        match self {
            Self::Perf(perf) => perf.take(),
            Self::Proc(proc) => proc.take(),
        }
    }

    /// The thread is paused: what it takes from now on is not counted.
    ///
    /// # Errors
    /// The kernel's.
    pub fn pause(&self) -> io::Result<()> {
        match self {
            Self::Perf(perf) => perf.pause(),
            Self::Proc(_) => Ok(()),
        }
    }

    /// The thread is back at its place: counts again.
    ///
    /// # Errors
    /// The kernel's.
    pub fn resume(&mut self) -> io::Result<()> {
        match self {
            Self::Perf(perf) => perf.resume(),
            // What it took while paused is not RT time.
            Self::Proc(proc) => proc.take().map(|_| ()),
        }
    }

    /// The descriptor to wait on, where there is one.
    pub fn wakes(&self) -> Option<&OwnedFd> {
        match self {
            Self::Perf(perf) => Some(&perf.fd),
            Self::Proc(_) => None,
        }
    }

    /// Sets the grain, ns of CPU time.
    ///
    /// # Errors
    /// The kernel's.
    pub fn set_grain(&self, grain: u64) -> io::Result<()> {
        match self {
            Self::Perf(perf) => perf.set_grain(grain),
            Self::Proc(_) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stat_line_is_read_past_any_name() {
        let line = b"77 (a) b (CPU 0/KVM)) R 1 77 77 0 -1 4194304 1 0 0 0 5 6 0 0 20 0 1 0 4242 100 5";
        assert_eq!(stat_field(line, STAT_START_TIME), Some(4242));
        assert_eq!(stat_field(line, 99), None);
        assert_eq!(stat_field(b"", 22), None);
        assert_eq!(stat_field(b"1 (x)", 22), None);
        assert_eq!(stat_field(line, 0), None);
    }

    fn own_tid() -> i32 {
        rustix::thread::gettid().as_raw_nonzero().get()
    }

    fn spin(for_ms: u64) {
        let start = std::time::Instant::now();
        while start.elapsed().as_millis() < u128::from(for_ms) {
            std::hint::spin_loop();
        }
    }

    /// On its own thread, so that other tests of this process do not disturb the count.
    fn counts_own_time(mut reading: impl FnMut() -> Reading + Send + 'static) {
        std::thread::spawn(move || {
            let mut reading = reading();
            spin(50);
            let first = reading.take().unwrap();
            assert!(first.ran > 1_000_000, "{first:?}");
            std::thread::sleep(std::time::Duration::from_millis(100));
            let slept = reading.take().unwrap();
            assert!(slept.ran < 50_000_000, "{slept:?}");
        })
        .join()
        .unwrap();
    }

    #[test]
    fn proc_counts_a_threads_cpu_time() {
        counts_own_time(|| Reading::Proc(ProcReading::open(std::process::id() as i32, own_tid()).unwrap()));
    }

    #[test]
    fn perf_counts_a_threads_cpu_time_and_names_the_cpu() {
        if let Err(refusal) = PerfReading::open(0, 1_000_000) {
            eprintln!("skipped: perf is refused here: {refusal}");
            return;
        }
        counts_own_time(|| Reading::Perf(PerfReading::open(own_tid(), 1_000_000).unwrap()));
        std::thread::spawn(|| {
            let mut perf = PerfReading::open(own_tid(), 1_000_000).unwrap();
            let mut seen = None;
            for _ in 0..50 {
                spin(5);
                seen = perf.take().unwrap().cpu.or(seen);
            }
            let cpus = std::thread::available_parallelism().unwrap().get().max(4096) as u32;
            assert!(seen.is_some_and(|cpu| cpu < cpus), "{seen:?}");
            perf.pause().unwrap();
            perf.take().unwrap();
            spin(20);
            assert_eq!(perf.take().unwrap().ran, 0, "counted while paused");
            perf.resume().unwrap();
            spin(20);
            assert!(perf.take().unwrap().ran > 0);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_thread_that_ended_is_noticed() {
        let (tx, rx) = std::sync::mpsc::channel();
        let (end, wait) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            tx.send(own_tid()).unwrap();
            wait.recv().unwrap();
        });
        let tid = rx.recv().unwrap();
        let mut reading = ProcReading::open(std::process::id() as i32, tid).unwrap();
        end.send(()).unwrap();
        thread.join().unwrap();
        // The kernel may take a moment to unhash it.
        let gone = (0..100).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            reading.take().is_err()
        });
        assert!(gone);
        assert!(Reading::open(std::process::id() as i32, tid, 1_000_000).is_err());
    }
}
