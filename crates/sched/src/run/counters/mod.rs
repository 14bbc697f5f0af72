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
mod layout;
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
pub(crate) use self::layout::State;
use self::layout::{ADDRESS, BYTES, COPIED, COUNTERS, LINE_AT, RAN, STATE_BITS, WAITED, WORD, WORDS};
use self::maps::{Maps, Part};
use self::program::Needs;
use crate::admit::Reserved;
use crate::guest_page::LINE;
use crate::model::Counts;
use crate::run::files::ThreadFiles;

/// Where the kernel describes its types.
const BTF: &str = "/sys/kernel/btf/vmlinux";
/// The first namespaces (include/linux/proc_ns.h): numbers of threads and times are those of the programs there alone.
const FIRST: [(&str, &str); 2] = [("pid", "pid:[4026531836]"), ("time", "time:[4026531834]")];
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

    /// What the thread does, and its counters up to now. No system call. Of a thread that has just left another CPU the
    /// last run may be missing; the next reading has it.
    pub(crate) fn read(&self) -> (State, Counts) {
        let Some([word, ran, waited, ..]) = self.words() else { return (State::Ended, Counts::default()) };
        // The programs change the word first, and so the times are read first.
        let mut counts = Counts { ran: ran.load(Ordering::Acquire), waited: waited.load(Ordering::Acquire) };
        let word = word.load(Ordering::Acquire);
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
        let copied =
            words.get(ADDRESS)?.load(Ordering::Acquire) != 0 && words.get(COPIED)?.load(Ordering::Acquire) == 1;
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
    /// Counters without a thread.
    free: Vec<usize>,
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
    /// load them (CAP_SYS_ADMIN), or has a namespace of its own for process numbers or clocks.
    pub(crate) fn start() -> io::Result<Self> {
        for (kind, first) in FIRST {
            let own = std::fs::read_link(format!("/proc/self/ns/{kind}"));
            if own.is_ok_and(|own| own.as_os_str() != first) {
                return Err(io::Error::other(format!("this process is in a {kind} namespace of its own")));
            }
        }
        let described = std::fs::read(BTF).map_err(|error| io::Error::new(error.kind(), format!("{BTF}: {error}")))?;
        let lacks = |what: &str| io::Error::other(format!("{BTF}: no {what}"));
        let btf = Btf::new(&described).ok_or_else(|| lacks("type information of this machine"))?;
        let offset = |structure: &str, member: &str| {
            let at = btf.offset(structure, member).and_then(|at| i16::try_from(at).ok());
            at.ok_or_else(|| lacks(&format!("{structure}.{member}")))
        };
        let [pid, state, entity] = ["pid", "__state", "se"].map(|member| offset("task_struct", member));
        let runtime = offset("sched_entity", "sum_exec_runtime")?;
        let threads = kernel::threads(COUNTERS as u32)?;
        let counters = kernel::memory(Memory::BYTES as u32)?;
        let memory = Memory::map(&counters)?;
        let [thread_map, counter_map] = [&threads, &counters].map(std::os::fd::AsRawFd::as_raw_fd);
        let needs = Needs {
            pid: pid?,
            state: state?,
            runtime: entity?.saturating_add(runtime),
            threads: thread_map,
            counters: counter_map,
        };
        let attach = |code: Vec<u64>, point: &str| {
            let name = format!("btf_trace_{point}");
            let to = btf.typedef(&name).ok_or_else(|| lacks(&name))?;
            kernel::attach(&code, point, to)
        };
        let programs =
            [attach(program::switch(&needs), "sched_switch")?, attach(program::wakeup(&needs), "sched_wakeup")?];
        let (memory, maps) = (Arc::new(memory), Maps::start()?);
        let free = (0..COUNTERS).rev().collect();
        Ok(Self { _programs: programs, threads, memory, maps, entries: BTreeMap::new(), free })
    }

    fn counter(&self, index: usize) -> Counter {
        Counter { memory: Arc::clone(&self.memory), index }
    }

    /// The counter of a vCPU's thread, which has one from now on. None if there is none left, or the thread has ended.
    pub(crate) fn of(&mut self, vcpu: &Reserved, files: &ThreadFiles) -> Option<Counter> {
        let counter = self.watch(vcpu.id, files)?;
        let published = vcpu.page.as_ref().map(|page| {
            let (file, offset) = page.entries(vcpu.vcpu);
            Part { file, offset, length: LINE as u64 }
        });
        let entry = self.entries.get_mut(&vcpu.id)?;
        if entry.published != published {
            counter.set_address(0);
            // Without an answer the pacer's reader reads the page. Elsewhere than on x86-64 a copy from what a process
            // has of a device may end the kernel.
            let copies = cfg!(target_arch = "x86_64");
            entry.published = published.filter(|part| copies && self.maps.ask(vcpu.id, *part));
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

    /// Gives a thread with these files a counter, if it has none.
    pub(crate) fn watch(&mut self, id: ThreadId, files: &ThreadFiles) -> Option<Counter> {
        if let Some(entry) = self.entries.get(&id) {
            return Some(self.counter(entry.index));
        }
        let index = *self.free.last()?;
        let new = self.counter(index);
        let before = files.counts().ok()?;
        let since = State::Unknown.since(now());
        let words = new.words()?;
        for (at, word) in words.iter().enumerate() {
            let value = match at {
                WORD => since,
                RAN => before.ran,
                WAITED => before.waited,
                _ => 0,
            };
            word.store(value, Ordering::Release);
        }
        kernel::insert(self.threads.as_fd(), id.tid, index as u32).ok()?;
        // The entry is there, and the number still means this thread: so its events count.
        if id.verify().is_err() {
            kernel::remove(self.threads.as_fd(), id.tid);
            return None;
        }
        if files.sleeps() {
            // An event since then says more.
            let asleep = State::Asleep.since(now());
            let _ = words.get(WORD)?.compare_exchange(since, asleep, Ordering::AcqRel, Ordering::Relaxed);
        }
        self.free.pop();
        self.entries.insert(id, Entry { index, published: None });
        Some(new)
    }

    /// Takes back the counters of all other threads. No pacer may have them any more.
    pub(crate) fn release_others(&mut self, stays: impl Fn(ThreadId) -> bool) {
        let Self { threads, entries, free, .. } = self;
        let gone: Vec<ThreadId> = entries.keys().copied().filter(|id| !stays(*id)).collect();
        for id in gone {
            free.extend(entries.remove(&id).map(|entry| entry.index));
            // A later thread may have the number.
            if !entries.keys().any(|other| other.tid == id.tid) {
                kernel::remove(threads.as_fd(), id.tid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::BufRead;
    use std::process::{Child, Command};
    use std::time::{Duration, Instant};

    use rustix::process::{Pid, Signal};

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

    fn send(child: &Child, signal: Signal) {
        rustix::process::kill_process(Pid::from_raw(child.id() as i32).unwrap(), signal).unwrap();
    }

    /// Waits until this holds, which it must within a minute on a busy machine.
    fn until(what: &str, mut holds: impl FnMut() -> bool) {
        let start = Instant::now();
        while !holds() {
            assert!(start.elapsed() < Duration::from_secs(60), "not in a minute: {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn watch(counters: &mut Counters, id: ThreadId) -> Counter {
        counters.watch(id, &ThreadFiles::open(id).unwrap()).unwrap()
    }

    #[test]
    fn a_thread_that_spins_is_counted_as_the_kernel_counts_it() {
        let Some(mut counters) = start() else { return };
        let mut child = Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let id = id(&child);
        let files = ThreadFiles::open(id).unwrap();
        let ran = || files.counts().unwrap().ran;
        until("it runs before it is counted", || ran() > 20_000_000);
        let counter = watch(&mut counters, id);
        until("an event", || counter.read().0 != State::Unknown);
        let its = ran();
        until("the thread runs for a while", || ran() > its + 200_000_000);
        assert!(counter.read().1.ran > its);
        // While it runs, its files are a part of a tick behind.
        send(&child, Signal::STOP);
        until("it is stopped", || counter.read().0 == State::Asleep);
        assert_eq!(counter.read().1.ran, ran());
        child.kill().unwrap();
        child.wait().unwrap();
        until("it has ended", || counter.read().0 == State::Ended);
        assert!(counters.watch(id, &files).is_some(), "its counter stays until it is taken back");
        counters.release_others(|_| false);
        assert!(counters.watch(id, &files).is_none());
    }

    #[test]
    fn a_thread_that_sleeps_is_known_to_sleep_until_it_wakes() {
        let Some(mut counters) = start() else { return };
        let mut child = Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let id = id(&child);
        until("it sleeps", || std::fs::read_to_string(format!("/proc/{}/stat", id.pid)).unwrap().contains(") S "));
        // Without an event it is what it was when it got its counter.
        let counter = watch(&mut counters, id);
        let (state, slept) = counter.read();
        assert!(state == State::Asleep && slept.ran > 0);
        send(&child, Signal::STOP);
        until("it ran, and is stopped", || {
            let (state, counts) = counter.read();
            counts.ran > slept.ran && state == State::Asleep
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
        let both = [id(&children[0]), id(&children[1])].map(|id| watch(&mut counters, id));
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
        let files = ThreadFiles::open(id).unwrap();
        for (index, taken) in std::mem::take(&mut counters.free).into_iter().enumerate() {
            let other = ThreadId { tid: -1 - index as i32, ..id };
            counters.entries.insert(other, Entry { index: taken, published: None });
        }
        assert!(counters.watch(id, &files).is_none());
        counters.release_others(|other| other.tid != -1);
        assert!(counters.watch(id, &files).is_some());
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
        let counter = watch(&mut counters, id);
        let stat = rustix::fs::fstat(&file).unwrap();
        let part = Part { file: (stat.st_dev, stat.st_ino), offset: 0x2080, length: LINE as u64 };
        let wake = |child: &Child| {
            send(child, Signal::STOP);
            send(child, Signal::CONT);
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
        counter.set_address(0);
        assert_eq!(counter.line(), None, "it is not to be read any more");
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
