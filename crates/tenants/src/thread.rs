//! A thread's identity, and its policy read and set without ever leaving a change on a thread that took over its
//! number.
//!
//! In: a process and thread number. Out: a [`ThreadId`] whose every operation first proves that it still means the
//! same thread.
//!
//! # The race, and how it is closed
//!
//! `sched_setattr(2)` takes a thread *number*; no call takes a pidfd. A change is therefore made in four steps:
//!
//! 1. open a pidfd: from now on the identity behind the descriptor is fixed, whatever happens to the number;
//! 2. compare the start time in `/proc`: the number, and so the descriptor, means the thread that was found;
//! 3. make the change;
//! 4. ask the pidfd whether the thread still lives. If it does, it held its number throughout step 3, so the change is
//!    on it and on nothing else.
//!
//! If step 4 says that the thread ended, its number may have been free in step 3. The kernel hands out numbers in a
//! circle (`kernel/pid.c`, `idr_alloc_cyclic`), so somebody must have arranged that the circle closes within those
//! microseconds; still, whatever thread then has the number gets back what it inherited from its creator, and the
//! caller sees [`ThreadError::Gone`]. From Linux 6.9 the pidfd is the thread's own (`PIDFD_THREAD`). Before, it is the
//! process's, and the thread's start time is compared again: a number reused inside the same process within one clock
//! tick stays unnoticed, which touches nobody but that same tenant.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::event::{PollFd, PollFlags};
use rustix::time::Timespec;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::class::Policy;
use crate::cpus::CpuList;
use crate::{proc, sched};

/// A pidfd of a single thread (`include/uapi/linux/pidfd.h`), Linux 6.9.
const PIDFD_THREAD: libc::c_uint = libc::O_EXCL as libc::c_uint;

/// A thread, named so that a reused number is noticed.
///
/// A kernel thread is its own process: `pid` and `tid` are the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ThreadId {
    /// Process (thread group) number.
    pub pid: i32,
    /// Thread number.
    pub tid: i32,
    /// Start time in clock ticks since boot (`/proc/PID/task/TID/stat`, field 22).
    pub start_time: u64,
}

/// Why a thread could not be read or placed.
#[derive(Debug, Error)]
pub enum ThreadError {
    /// The thread ended, or another took over its number. Discover again.
    #[error("thread {} of process {} has ended; nothing was changed, and nothing is to be done", .0.tid, .0.pid)]
    Gone(ThreadId),
    /// The kernel refused.
    #[error("thread {tid}: {what}: {source}{}", remedy(source))]
    Os {
        /// Thread number.
        tid: i32,
        /// What was tried.
        what: &'static str,
        /// The kernel's word.
        source: io::Error,
    },
}

/// A thread that has ended is ESRCH.
impl From<ThreadError> for io::Error {
    fn from(error: ThreadError) -> Self {
        match error {
            ThreadError::Gone(_) => Self::from_raw_os_error(libc::ESRCH),
            ThreadError::Os { source, .. } => source,
        }
    }
}

/// What to do about an error number, as the tail of a message.
fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => "; run as root (CAP_SYS_NICE, and CAP_SYS_PTRACE to look)",
        Some(libc::EBUSY) => "; SCHED_DEADLINE admission refused the bandwidth: lower runtime/period or free some",
        Some(libc::EINVAL) => {
            "; the kernel has no such policy or range, or the thread is bound to its CPU by the kernel (see its flags)"
        }
        _ => "",
    }
}

/// Which identity a pidfd fixes.
enum Pin {
    Thread(OwnedFd),
    Process(OwnedFd),
}

/// A change of one thread.
enum Change<'a> {
    Policy(Policy),
    /// Not for its children, where it is a real-time policy.
    PolicyAlone(Policy),
    Affinity(&'a CpuList),
}

impl Change<'_> {
    fn name(&self) -> &'static str {
        match self {
            Change::Policy(_) | Change::PolicyAlone(_) => "setting its policy",
            Change::Affinity(_) => "setting its affinity",
        }
    }

    fn make(&self, tid: i32) -> io::Result<()> {
        match self {
            Change::Policy(policy) => sched::set_policy(tid, *policy),
            Change::PolicyAlone(policy) => sched::set_policy_alone(tid, *policy),
            Change::Affinity(cpus) => sched::set_affinity(tid, cpus),
        }
    }

    /// Gives a thread what its creator has, where it has what this change gives.
    fn undo(&self, tid: i32, creator: i32) -> io::Result<()> {
        match self {
            Change::Policy(policy) if sched::policy(tid)? == *policy => sched::set_policy(tid, sched::policy(creator)?),
            Change::PolicyAlone(policy) if sched::policy(tid)? == *policy => {
                sched::set_policy_alone(tid, sched::policy(creator)?)
            }
            Change::Affinity(cpus) if sched::affinity(tid)? == **cpus => {
                sched::set_affinity(tid, &sched::affinity(creator)?)
            }
            _ => Ok(()),
        }
    }
}

impl ThreadId {
    /// The thread that has this number now.
    ///
    /// # Errors
    /// [`ThreadError::Gone`] (with start time 0) where there is none or it has ended; [`ThreadError::Os`] where `/proc`
    /// cannot be read.
    pub fn of(pid: i32, tid: i32) -> Result<Self, ThreadError> {
        let missing = Self { pid, tid, start_time: 0 };
        let stat = missing.stat()?;
        Ok(Self { start_time: stat.start_time, ..missing })
    }

    /// Whether the number still means this thread, and it lives.
    ///
    /// # Errors
    /// [`ThreadError::Gone`] where it does not; [`ThreadError::Os`] where `/proc` cannot be read.
    pub fn verify(self) -> Result<(), ThreadError> {
        if self.stat()?.start_time == self.start_time { Ok(()) } else { Err(ThreadError::Gone(self)) }
    }

    /// The thread's policy.
    ///
    /// # Errors
    /// [`ThreadError::Gone`] where the thread ended; [`ThreadError::Os`] where the kernel refuses.
    pub fn policy(self) -> Result<Policy, ThreadError> {
        let policy = sched::policy(self.tid).map_err(|error| self.os("reading its policy", error))?;
        self.verify()?;
        Ok(policy)
    }

    /// Gives the thread a policy.
    ///
    /// The reset-on-fork flag stays as it is. For kernel threads, which make no others.
    ///
    /// # Errors
    /// [`ThreadError::Gone`] where the thread ended (nothing is left changed); [`ThreadError::Os`] where the kernel
    /// refuses.
    pub fn set_policy(self, policy: Policy) -> Result<(), ThreadError> {
        self.change(&Change::Policy(policy))
    }

    /// Gives the thread a policy that its children do not inherit where it is a real-time one (SCHED_RESET_ON_FORK); a
    /// policy that is none takes the flag away. For tenants' threads: what they make is placed, and capped, when it has
    /// been found. At its first run a vCPU makes the VM's own kernel worker (`kvm_mmu_start_lpage_recovery` in
    /// `arch/x86/kvm/mmu/mmu.c`), which would stay at real-time priority for good.
    ///
    /// # Errors
    /// As [`Self::set_policy`].
    pub fn set_policy_alone(self, policy: Policy) -> Result<(), ThreadError> {
        self.change(&Change::PolicyAlone(policy))
    }

    /// The CPUs the thread may run on.
    ///
    /// # Errors
    /// As [`Self::policy`].
    pub fn affinity(self) -> Result<CpuList, ThreadError> {
        let cpus = sched::affinity(self.tid).map_err(|error| self.os("reading its affinity", error))?;
        self.verify()?;
        Ok(cpus)
    }

    /// Restricts the thread to these CPUs.
    ///
    /// # Errors
    /// As [`Self::set_policy`].
    pub fn set_affinity(self, cpus: &CpuList) -> Result<(), ThreadError> {
        self.change(&Change::Affinity(cpus))
    }

    /// Time the thread has spent on a CPU since it started, in ns (`/proc/PID/task/TID/schedstat`).
    ///
    /// One small read; identity is checked only when the caller does, so a falling value means a reused number.
    ///
    /// # Errors
    /// [`ThreadError::Gone`] where the thread ended; [`ThreadError::Os`] where the kernel keeps no such statistics.
    pub fn cpu_time(self) -> Result<u64, ThreadError> {
        self.times().map(|(ran, _)| ran)
    }

    /// Time in which it was runnable and did not run, ns: of a vCPU, the guest's stolen time.
    ///
    /// # Errors
    /// As [`Self::cpu_time`].
    pub fn wait_time(self) -> Result<u64, ThreadError> {
        self.times().map(|(_, waited)| waited)
    }

    fn times(self) -> Result<(u64, u64), ThreadError> {
        let text = self.read("schedstat", "reading its CPU time")?;
        proc::parse_schedstat(&text).ok_or(ThreadError::Os {
            tid: self.tid,
            what: "reading its CPU time",
            source: io::Error::other("schedstat has an unknown form"),
        })
    }

    /// Steps 1 to 4 of the module's description.
    fn change(self, change: &Change<'_>) -> Result<(), ThreadError> {
        let pin = self.pin()?;
        self.verify()?;
        change.make(self.tid).map_err(|error| self.os(change.name(), error))?;
        let held = match &pin {
            Pin::Thread(fd) => !has_ended(fd),
            Pin::Process(fd) => !has_ended(fd) && self.verify().is_ok(),
        };
        if held {
            return Ok(());
        }
        self.undo_on_successor(change);
        Err(ThreadError::Gone(self))
    }

    /// Takes `policy` from a thread that took over the number of this one, which has ended, if it has that. For who
    /// places threads by number and learns afterwards that they had ended. Allocates nothing.
    pub fn undo_policy_on_successor(self, policy: Policy) {
        self.undo_on_successor(&Change::PolicyAlone(policy));
    }

    /// Gives a thread that took over the number what it inherited: its process's leader's settings, or for a leader its
    /// parent's.
    fn undo_on_successor(self, change: &Change<'_>) {
        let mut status = [0; STATUS_HEAD];
        let Ok(length) = read_status(self.tid, &mut status) else { return };
        let status = status.get(..length).unwrap_or_default();
        let number = |key| proc::status_value(status, key).and_then(|value| value.parse::<i32>().ok());
        let (Some(leader), Some(parent)) = (number("Tgid"), number("PPid")) else { return };
        let creator = if leader == self.tid { parent } else { leader };
        // Nothing to report to: the successor may itself be gone by now, and the caller learns of the lost thread
        // anyway.
        let _ = change.undo(self.tid, creator);
    }

    fn pin(self) -> Result<Pin, ThreadError> {
        match pidfd_open(self.tid, PIDFD_THREAD) {
            Ok(fd) => Ok(Pin::Thread(fd)),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                pidfd_open(self.pid, 0).map(Pin::Process).map_err(|error| self.os("opening its pidfd", error))
            }
            Err(error) => Err(self.os("opening its pidfd", error)),
        }
    }

    fn stat(self) -> Result<proc::Stat, ThreadError> {
        let text = self.read("stat", "reading its state")?;
        let stat = proc::parse_stat(&text).ok_or(ThreadError::Os {
            tid: self.tid,
            what: "reading its state",
            source: io::Error::other("/proc/PID/task/TID/stat has an unknown form or policy"),
        })?;
        if stat.has_ended() { Err(ThreadError::Gone(self)) } else { Ok(stat) }
    }

    fn read(self, file: &str, what: &'static str) -> Result<Vec<u8>, ThreadError> {
        std::fs::read(format!("/proc/{}/task/{}/{file}", self.pid, self.tid)).map_err(|error| self.os(what, error))
    }

    fn os(self, what: &'static str, source: io::Error) -> ThreadError {
        // ENOENT: no such directory in /proc. ESRCH: it ended while being read, or a system call found nobody.
        match source.raw_os_error() {
            Some(libc::ENOENT | libc::ESRCH) => ThreadError::Gone(self),
            _ => ThreadError::Os { tid: self.tid, what, source },
        }
    }
}

fn pidfd_open(number: i32, flags: libc::c_uint) -> io::Result<OwnedFd> {
    // SAFETY: takes two integers and touches no memory of ours.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, number, flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel has just given us this descriptor; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Name, Umask, State, Tgid, Ngid, Pid and PPid of `/proc/TID/status` are well within so many bytes (`fs/proc/array.c`,
/// `proc_pid_status`).
const STATUS_HEAD: usize = 512;

/// Reads the beginning of `/proc/TID/status`. The path is short enough for the standard library to keep it on the
/// stack.
fn read_status(tid: i32, into: &mut [u8]) -> io::Result<usize> {
    let mut path = [0; 32];
    let mut rest = &mut path[..];
    write!(rest, "/proc/{tid}/status")?;
    let length = 32 - rest.len();
    let path = OsStr::from_bytes(path.get(..length).unwrap_or_default());
    File::open(path)?.read(into)
}

/// A pidfd is readable once its thread or process has ended. Where asking fails, the careful answer is yes.
fn has_ended(pidfd: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(pidfd, PollFlags::IN)];
    !matches!(rustix::event::poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(0))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    use super::*;

    fn me() -> i32 {
        i32::try_from(std::process::id()).unwrap()
    }

    fn may_place() -> bool {
        let root = rustix::process::geteuid().is_root();
        if !root {
            println!("SKIPPED: placing threads needs root");
        }
        root
    }

    /// A thread that sleeps until it is told to end.
    struct Sleeper {
        id: ThreadId,
        stop: Option<mpsc::Sender<()>>,
        handle: Option<std::thread::JoinHandle<()>>,
    }

    impl Sleeper {
        fn start() -> Self {
            let (stop, stopped) = mpsc::channel::<()>();
            let (tell, told) = mpsc::channel();
            let handle = std::thread::spawn(move || {
                tell.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
                let _ = stopped.recv();
            });
            let id = ThreadId::of(me(), told.recv().unwrap()).unwrap();
            Self { id, stop: Some(stop), handle: Some(handle) }
        }

        fn end(&mut self) {
            self.stop.take();
            self.handle.take().unwrap().join().unwrap();
            // The join is told by the thread; its /proc entry goes a moment later.
            let deadline = Instant::now() + Duration::from_secs(5);
            while self.id.verify().is_ok() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    #[test]
    fn a_thread_goes_to_fifo_and_back() {
        if !may_place() {
            return;
        }
        let mut thread = Sleeper::start();
        let before = thread.id.policy().unwrap();
        for policy in [Policy::Fifo(47), Policy::Rr(3), Policy::Batch { nice: 5 }, Policy::Idle, before] {
            thread.id.set_policy(policy).unwrap();
            assert_eq!(thread.id.policy().unwrap(), policy);
            let stat = thread.id.stat().unwrap();
            assert_eq!(stat.policy, policy, "/proc says the same");
        }
        thread.end();
    }

    #[test]
    fn a_deadline_reservation_is_read_back_whole() {
        if !may_place() {
            return;
        }
        let mut thread = Sleeper::start();
        let wanted = Policy::Deadline { runtime: 1_000_000, deadline: 50_000_000, period: 100_000_000 };
        match thread.id.set_policy(wanted) {
            Ok(()) => assert_eq!(thread.id.policy().unwrap(), wanted),
            Err(ThreadError::Os { source, .. }) if source.raw_os_error() == Some(libc::EPERM) => {
                println!("SKIPPED: affinity does not span the root domain here, so SCHED_DEADLINE is refused");
            }
            Err(error) => panic!("{error}"),
        }
        thread.end();
    }

    #[test]
    fn reset_on_fork_is_kept_and_set_only_where_asked() {
        if !may_place() {
            return;
        }
        let flagged = |tid| {
            // SAFETY: takes an integer and touches no memory of ours.
            let policy = unsafe { libc::sched_getscheduler(tid) };
            policy & libc::SCHED_RESET_ON_FORK != 0
        };
        let mut thread = Sleeper::start();
        thread.id.set_policy(Policy::Fifo(2)).unwrap();
        assert!(!flagged(thread.id.tid));
        let param = libc::sched_param { sched_priority: 2 };
        // SAFETY: the parameter struct lives across the call.
        let set = unsafe {
            libc::sched_setscheduler(thread.id.tid, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, &raw const param)
        };
        assert_eq!(set, 0);
        thread.id.set_policy(Policy::Fifo(3)).unwrap();
        assert!(flagged(thread.id.tid));
        thread.id.set_policy_alone(Policy::BULK).unwrap();
        assert!(!flagged(thread.id.tid));
        thread.id.set_policy_alone(Policy::Fifo(4)).unwrap();
        assert!(flagged(thread.id.tid));
        assert_eq!(thread.id.policy().unwrap(), Policy::Fifo(4));
        thread.end();
    }

    #[test]
    fn affinity_is_set_and_returns() {
        let mut thread = Sleeper::start();
        let before = thread.id.affinity().unwrap();
        let one: CpuList = before.iter().take(1).collect();
        thread.id.set_affinity(&one).unwrap();
        assert_eq!(thread.id.affinity().unwrap(), one);
        thread.id.set_affinity(&before).unwrap();
        assert_eq!(thread.id.affinity().unwrap(), before);
        assert!(matches!(thread.id.set_affinity(&CpuList::default()), Err(ThreadError::Os { .. })));
        thread.end();
    }

    #[test]
    fn an_ended_thread_is_gone_for_every_operation() {
        let mut thread = Sleeper::start();
        assert!(thread.id.verify().is_ok());
        thread.end();
        let id = thread.id;
        assert!(matches!(id.verify(), Err(ThreadError::Gone(_))));
        assert!(matches!(id.policy(), Err(ThreadError::Gone(_))));
        assert!(matches!(id.set_policy(Policy::BULK), Err(ThreadError::Gone(_))));
        assert!(matches!(id.affinity(), Err(ThreadError::Gone(_))));
        assert!(matches!(id.cpu_time(), Err(ThreadError::Gone(_))));
        assert!(matches!(ThreadId::of(id.pid, id.tid), Err(ThreadError::Gone(_))));
    }

    #[test]
    fn a_stranger_with_the_same_number_is_not_touched() {
        let mut thread = Sleeper::start();
        let before = thread.id.policy().unwrap();
        let stale = ThreadId { start_time: thread.id.start_time.wrapping_sub(1), ..thread.id };
        assert!(matches!(stale.set_policy(Policy::Idle), Err(ThreadError::Gone(_))));
        assert_eq!(thread.id.policy().unwrap(), before);
        thread.end();
    }

    #[test]
    fn a_thread_that_ends_during_the_change_gives_its_successor_back_what_it_inherited() {
        if !may_place() {
            return;
        }
        // The successor of the ended thread's number is played by a live thread: `undo_on_successor` sees only the
        // number.
        let mut successor = Sleeper::start();
        sched::set_policy(successor.id.tid, Policy::Fifo(47)).unwrap();
        successor.id.undo_on_successor(&Change::Policy(Policy::Fifo(46)));
        assert_eq!(successor.id.policy().unwrap(), Policy::Fifo(47), "not what was set here: its own choice");
        successor.id.undo_on_successor(&Change::Policy(Policy::Fifo(47)));
        assert_eq!(successor.id.policy().unwrap(), sched::policy(me()).unwrap());
        successor.end();
    }

    #[test]
    fn a_zombie_is_gone_and_left_alone() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(5);
        while Instant::now() < deadline && !matches!(ThreadId::of(pid, pid), Err(ThreadError::Gone(_))) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(matches!(ThreadId::of(pid, pid), Err(ThreadError::Gone(_))));
        child.wait().unwrap();
    }

    #[test]
    fn kernel_threads_are_their_own_process() {
        // kthreadd, where this process sees the host's process numbers.
        match ThreadId::of(2, 2) {
            Ok(id) if id.stat().unwrap().is_kthread() => {
                let policy = id.policy().unwrap();
                if may_place() {
                    id.set_policy(policy).unwrap();
                    assert_eq!(id.policy().unwrap(), policy);
                }
            }
            _ => println!("SKIPPED: process 2 is not kthreadd here"),
        }
    }

    #[test]
    fn cpu_time_grows_with_work() {
        let id = ThreadId::of(me(), rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
        let before = id.cpu_time().unwrap();
        let end = Instant::now() + Duration::from_millis(60);
        while Instant::now() < end {
            std::hint::spin_loop();
        }
        assert!(id.cpu_time().unwrap() > before);
    }
}
