//! Counters of vCPU threads that the kernel keeps in memory of this process: how long each has run and waited, and
//! whether it sleeps. Two BPF programs count at each switch of threads and at each wake-up (`program`).
//!
//! Without them a pacer reads a thread's files in /proc: a system call for its time and, for whether it sleeps and for
//! what its guest publishes, two changes of thread (`run::reader`). With them a pacer reads memory, and what it reads
//! is up to date on every CPU. [`Counters::start`] fails on a kernel without BPF or its type information; then the
//! pacers read the files.
//!
//! The kernel runs the programs on every CPU while there are reservations, for all threads: some 150 instructions for
//! one without a counter.

mod btf;
mod kernel;
mod maps;
mod program;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ontime_base::clock::now;
use ontime_tenants::ThreadId;
use rustix::mm::{MapFlags, ProtFlags};

use self::btf::Btf;
use self::maps::{Maps, Part};
use self::program::{Layout, STATE_BITS};
use crate::admit::Reserved;
use crate::guest_page::LINE;
use crate::model::Counts;

/// Where the kernel describes its types.
const BTF: &str = "/sys/kernel/btf/vmlinux";
/// The most threads with a counter. Further ones are read in /proc.
const COUNTERS: usize = 1024;
/// Bytes of a counter, a power of two, and its words: the time of the last event and the state since then; ns that the
/// thread has run, and has waited for a CPU, up to that event; the address in its process at which its guest publishes,
/// or 0; whether what is there was copied when it left its CPU; and the copy.
const BYTES: usize = 256;
const WORDS: usize = BYTES / size_of::<u64>();
const WORD: usize = 0;
const RAN: usize = 1;
const WAITED: usize = 2;
const ADDRESS: usize = 3;
const COPIED: usize = 4;
const LINE_AT: usize = 8;

/// What a thread does since its last event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// There was no event since it has its counter.
    Unknown = 0,
    /// Runs on a CPU.
    Running = 1,
    /// Is runnable, and waits for a CPU.
    Waits = 2,
    /// Sleeps, or is stopped.
    Asleep = 3,
    /// Waits for a lock of the kernel, or for a device.
    Blocked = 4,
    /// Has ended.
    Ended = 5,
}

impl State {
    fn of(word: u64) -> Self {
        let all = [Self::Running, Self::Waits, Self::Asleep, Self::Blocked, Self::Ended];
        let state = word & ((1 << STATE_BITS) - 1);
        all.into_iter().find(|one| *one as u64 == state).unwrap_or(Self::Unknown)
    }

    fn since(self, time: u64) -> u64 {
        time << STATE_BITS | self as u64
    }
}

/// The memory that the programs write.
#[derive(Debug)]
struct Memory(NonNull<[AtomicU64; WORDS]>);

// SAFETY: memory of atomics, which only its owner unmaps, when dropped.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    const BYTES: usize = COUNTERS * BYTES;

    fn map(file: impl AsFd) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), Self::BYTES, access, MapFlags::SHARED, file, 0) }?;
        NonNull::new(at.cast()).map(Self).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn all(&self) -> &[[AtomicU64; WORDS]] {
        // SAFETY: COUNTERS of them are mapped as long as this lives, with the alignment of a page.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr(), COUNTERS) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `map`; no reference into it is left.
        let _ = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), Self::BYTES) };
    }
}

/// A thread's counter, for its pacer.
#[derive(Debug, Clone)]
pub(crate) struct Counter {
    memory: Arc<Memory>,
    index: usize,
}

impl Counter {
    fn words(&self) -> Option<&[AtomicU64; WORDS]> {
        self.memory.all().get(self.index)
    }

    /// What the thread does, and its counters up to now. No system call, no loop but a second try where an event came
    /// in between.
    pub(crate) fn read(&self) -> (State, Counts) {
        let Some([word, ran, waited, ..]) = self.words() else { return (State::Ended, Counts::default()) };
        let read = || {
            let counts = Counts { ran: ran.load(Ordering::Acquire), waited: waited.load(Ordering::Acquire) };
            (counts, word.load(Ordering::Acquire))
        };
        let first = read();
        // The programs write the word last. So a word that belongs to later times than these shows in a second reading.
        let (mut counts, word) = Some(read()).filter(|again| again.1 != first.1).unwrap_or(first);
        let state = State::of(word);
        if state == State::Running {
            counts.ran = counts.ran.saturating_add(now().saturating_sub(word >> STATE_BITS));
        }
        (state, counts)
    }
}

impl Counter {
    /// What the thread's guest published when the thread left its CPU last; None if that was not copied. For a pacer on
    /// that CPU: the thread does not run while the pacer does.
    pub(crate) fn line(&self) -> Option<[u8; LINE]> {
        let words = self.words()?;
        let copied = words.get(COPIED)?.load(Ordering::Acquire) == 1;
        let mut line = [0; LINE];
        for (to, from) in line.chunks_exact_mut(size_of::<u64>()).zip(words.iter().skip(LINE_AT)) {
            to.copy_from_slice(&from.load(Ordering::Relaxed).to_ne_bytes());
        }
        copied.then_some(line)
    }

    fn set_address(&self, address: u64) {
        for (at, value) in [(ADDRESS, address), (COPIED, 0)] {
            self.words()
                .and_then(|words| words.get(at))
                .into_iter()
                .for_each(|word| word.store(value, Ordering::Release));
        }
    }
}

/// The programs and the counters, for the daemon. Dropped, the programs end.
#[derive(Debug)]
pub(crate) struct Counters {
    // Dropped first.
    _programs: [OwnedFd; 2],
    threads: OwnedFd,
    memory: Arc<Memory>,
    maps: Maps,
    entries: BTreeMap<ThreadId, Entry>,
}

/// Which counter a thread has, and where its guest publishes.
#[derive(Debug)]
struct Entry {
    index: usize,
    published: Option<Part>,
}

impl Counters {
    /// Loads and attaches the programs.
    ///
    /// # Errors
    /// The kernel has no BPF, or describes its types otherwise than these programs take it, or this process may not
    /// load them (CAP_SYS_ADMIN).
    pub(crate) fn start() -> io::Result<Self> {
        let described = std::fs::read(BTF).map_err(|error| io::Error::new(error.kind(), format!("{BTF}: {error}")))?;
        let lacks = |what: &str| io::Error::other(format!("{BTF}: no {what}"));
        let btf = Btf::new(&described).ok_or_else(|| lacks("type information of this machine"))?;
        let pid = btf.offset("task_struct", "pid").and_then(|at| i16::try_from(at).ok());
        let pid = pid.ok_or_else(|| lacks("task_struct.pid"))?;
        let threads = kernel::threads(COUNTERS as u32)?;
        let counters = kernel::memory(Memory::BYTES as u32)?;
        let memory = Memory::map(&counters)?;
        let [thread_map, counter_map] = [&threads, &counters].map(std::os::fd::AsRawFd::as_raw_fd);
        let layout = Layout { pid, threads: thread_map, counters: counter_map };
        let attach = |code: Vec<u64>, point: &str| {
            let name = format!("btf_trace_{point}");
            let to = btf.typedef(&name).ok_or_else(|| lacks(&name))?;
            kernel::attach(&code, point, to)
        };
        let programs =
            [attach(program::switch(&layout), "sched_switch")?, attach(program::wakeup(&layout), "sched_wakeup")?];
        let (memory, maps) = (Arc::new(memory), Maps::start()?);
        Ok(Self { _programs: programs, threads, memory, maps, entries: BTreeMap::new() })
    }

    fn counter(&self, index: usize) -> Counter {
        Counter { memory: Arc::clone(&self.memory), index }
    }

    /// The counter of a vCPU's thread, which has one from now on. None if there is none left, or the thread has ended.
    /// `asleep` tells whether the thread sleeps now.
    pub(crate) fn of(&mut self, vcpu: &Reserved, asleep: impl FnOnce() -> bool) -> Option<Counter> {
        let counter = self.watch(vcpu.id, asleep)?;
        let published = vcpu.page.as_ref().map(|page| {
            let (file, offset) = page.entries(vcpu.vcpu);
            Part { file, offset, length: LINE as u64 }
        });
        let entry = self.entries.get_mut(&vcpu.id)?;
        if entry.published != published {
            counter.set_address(0);
            // Without an answer the pacer's reader reads the page.
            entry.published = published.filter(|part| self.maps.ask(vcpu.id, *part));
        }
        Some(counter)
    }

    /// Takes the addresses that were found since the last call. To be called now and then.
    pub(crate) fn take_found(&self) {
        for (id, part, address) in self.maps.found() {
            let entry = self.entries.get(&id).filter(|entry| entry.published == Some(part));
            entry.into_iter().for_each(|entry| self.counter(entry.index).set_address(address));
        }
    }

    /// Gives a thread a counter, if it has none.
    pub(crate) fn watch(&mut self, id: ThreadId, asleep: impl FnOnce() -> bool) -> Option<Counter> {
        if let Some(entry) = self.entries.get(&id) {
            return Some(self.counter(entry.index));
        }
        let index = (0..COUNTERS).find(|index| !self.entries.values().any(|taken| taken.index == *index))?;
        let new = self.counter(index);
        let since = State::Unknown.since(now());
        let [word, others @ ..] = new.words()?;
        others.iter().for_each(|other| other.store(0, Ordering::Relaxed));
        word.store(since, Ordering::Release);
        kernel::insert(self.threads.as_fd(), id.tid, index as u32).ok()?;
        // The entry is there, and the number still means this thread: so its events count.
        if id.verify().is_err() {
            kernel::remove(self.threads.as_fd(), id.tid);
            return None;
        }
        if asleep() {
            // An event since then says more.
            let _ = word.compare_exchange(since, State::Asleep.since(now()), Ordering::AcqRel, Ordering::Relaxed);
        }
        self.entries.insert(id, Entry { index, published: None });
        Some(new)
    }

    /// Takes back the counters of all other threads. No pacer may have them any more.
    pub(crate) fn release_others(&mut self, stays: impl Fn(ThreadId) -> bool) {
        let threads = self.threads.as_fd();
        self.entries.retain(|id, _| {
            let stays = stays(*id);
            if !stays {
                kernel::remove(threads, id.tid);
            }
            stays
        });
    }
}

#[cfg(test)]
mod tests {
    use std::io::BufRead;
    use std::process::{Child, Command};
    use std::time::{Duration, Instant};

    use super::*;

    fn start() -> Option<Counters> {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: BPF programs need root");
            return None;
        }
        match Counters::start() {
            Ok(counters) => Some(counters),
            Err(error) => {
                println!("SKIPPED: this kernel does not take the programs: {error}");
                None
            }
        }
    }

    fn id(of: &Child) -> ThreadId {
        ThreadId::of(of.id() as i32, of.id() as i32).unwrap()
    }

    /// Waits until this holds, which it must within a minute on a busy machine.
    fn until(what: &str, mut holds: impl FnMut() -> bool) {
        let start = Instant::now();
        while !holds() {
            assert!(start.elapsed() < Duration::from_secs(60), "not in a minute: {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// By its own files.
    fn ran(id: ThreadId) -> u64 {
        let line = std::fs::read_to_string(format!("/proc/{}/task/{}/schedstat", id.pid, id.tid)).unwrap();
        line.split(' ').next().unwrap().parse().unwrap()
    }

    #[test]
    fn a_thread_that_spins_is_counted_as_the_kernel_counts_it() {
        let Some(mut counters) = start() else { return };
        let mut child = Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let id = id(&child);
        let counter = counters.watch(id, || false).unwrap();
        until("an event", || counter.read().0 != State::Unknown);
        // A thread that is read while it runs has a part of a tick more than its files say; the two are not read at
        // one time.
        let (mine, its) = (counter.read().1.ran, ran(id));
        until("the thread runs for a while", || ran(id) > its + 200_000_000);
        let (more, files) = (counter.read().1.ran - mine, ran(id) - its);
        assert!(more.abs_diff(files) < files / 4, "{more} ns by the counter, {files} ns by the files");
        assert!(matches!(counter.read().0, State::Running | State::Waits));
        child.kill().unwrap();
        child.wait().unwrap();
        until("it has ended", || counter.read().0 == State::Ended);
        assert!(counters.watch(id, || false).is_some(), "its counter stays until it is taken back");
        counters.release_others(|_| false);
        assert!(counters.watch(id, || false).is_none());
    }

    #[test]
    fn a_thread_that_sleeps_is_known_to_sleep_until_it_wakes() {
        let Some(mut counters) = start() else { return };
        let mut child = Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let id = id(&child);
        until("it sleeps", || std::fs::read_to_string(format!("/proc/{}/stat", id.pid)).unwrap().contains(") S "));
        // Without an event it is what it was when it got its counter.
        let counter = counters.watch(id, || true).unwrap();
        assert_eq!(counter.read(), (State::Asleep, Counts::default()));
        rustix::process::kill_process(rustix::process::Pid::from_raw(id.pid).unwrap(), rustix::process::Signal::STOP)
            .unwrap();
        until("it ran, and is stopped", || {
            let (state, counts) = counter.read();
            counts.ran > 0 && state == State::Asleep
        });
        let before = counter.read().1;
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(counter.read().1, before, "it does not run");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_thread_that_waits_for_its_cpu_is_known_to_wait() {
        let Some(mut counters) = start() else { return };
        let spin = || Command::new("taskset").args(["-c", "0", "sh", "-c", "while :; do :; done"]).spawn().unwrap();
        let mut children = [spin(), spin()];
        let both = [id(&children[0]), id(&children[1])].map(|id| counters.watch(id, || false).unwrap());
        until("each has run and has waited", || {
            both.iter().all(|counter| {
                let counts = counter.read().1;
                counts.ran > 10_000_000 && counts.waited > 10_000_000
            })
        });
        children.iter_mut().for_each(|child| {
            child.kill().unwrap();
            child.wait().unwrap();
        });
    }

    #[test]
    fn there_are_as_many_counters_as_there_are() {
        let Some(mut counters) = start() else { return };
        let child = Command::new("sleep").arg("1000").spawn();
        let mut child = child.unwrap();
        let id = id(&child);
        for index in 0..COUNTERS {
            counters.entries.insert(ThreadId { tid: -1 - index as i32, ..id }, Entry { index, published: None });
        }
        assert!(counters.watch(id, || false).is_none());
        counters.release_others(|other| other.tid != -1);
        assert!(counters.watch(id, || false).is_some());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// As QEMU does, a process maps a file whose other user is the guest.
    #[test]
    fn what_a_guest_publishes_is_copied_when_its_vcpu_leaves_the_cpu() {
        let Some(mut counters) = start() else { return };
        let file = rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::empty()).unwrap();
        rustix::fs::ftruncate(&file, 0x4000).unwrap();
        let path = format!("/proc/{}/fd/{}", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(&file));
        let script = "import mmap, sys, time\n\
            with open(sys.argv[1], 'r+b') as f: m = mmap.mmap(f.fileno(), 0x4000)\n\
            m[0x2080:0x2088] = b'deadline'\n\
            print(flush=True)\n\
            sys.stdin.readline()\n";
        let (to, from) = (std::process::Stdio::piped(), std::process::Stdio::piped());
        let mut child = Command::new("python3").args(["-c", script, &path]).stdin(to).stdout(from).spawn().unwrap();
        let mut line = String::new();
        io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let id = id(&child);
        let counter = counters.watch(id, || false).unwrap();
        let stat = rustix::fs::fstat(&file).unwrap();
        let part = Part { file: (stat.st_dev, stat.st_ino), offset: 0x2080, length: LINE as u64 };
        let wake = |child: &Child| {
            let pid = rustix::process::Pid::from_raw(child.id() as i32).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
        };
        wake(&child);
        assert_eq!(counter.line(), None, "its address is not known");
        counters.entries.get_mut(&id).unwrap().published = Some(part);
        assert!(counters.maps.ask(id, part));
        until("the line is copied", || {
            counters.take_found();
            wake(&child);
            counter.line().is_some_and(|line| line.starts_with(b"deadline\0"))
        });
        // Memory that is not there.
        counter.set_address(8);
        until("it ran", || {
            wake(&child);
            counter.read().0 == State::Asleep
        });
        assert_eq!(counter.line(), None);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
