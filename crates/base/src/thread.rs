//! A thread's identity, and access to its policy that never leaves a change on another thread that got its number.
//!
//! Input: a process and a thread number. Output: a [`ThreadId`]. Each of its operations first verifies that the number
//! still means the same thread.
//!
//! # The race, and how it is closed
//!
//! `sched_setattr(2)` takes a thread *number*; no call takes a pidfd. A change is therefore made in four steps:
//!
//! 1. Open a pidfd. From now on the descriptor refers to one thread, even if its number is reused.
//! 2. Compare the start time in `/proc`: the number, and so the descriptor, means the thread that was found.
//! 3. Make the change.
//! 4. Check by the pidfd whether the thread still lives. If it does, it had its number throughout step 3, so the change
//!    affects this thread only.
//!
//! If the thread has ended in step 4, its number may have been reused in step 3. The kernel assigns numbers cyclically
//! (`kernel/pid.c`, `idr_alloc_cyclic`), so an attacker would have to make the cycle wrap around within those
//! microseconds. Even then, the thread that now has the number gets back what it inherited from its creator, and the
//! caller gets [`ThreadError::Gone`]. From Linux 6.9 the pidfd is the thread's own (`PIDFD_THREAD`). With older kernels
//! it is the process's, and the thread's start time is compared again: a number that is reused inside the same process
//! within one clock tick stays unnoticed, which affects only that tenant.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::event::{PollFd, PollFlags};
use rustix::time::Timespec;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::cpus::CpuSet;
use crate::policy::Policy;
use crate::{files, proc, sched};

/// A pidfd of a single thread (`include/uapi/linux/pidfd.h`), Linux 6.9.
const PIDFD_THREAD: libc::c_uint = libc::O_EXCL as libc::c_uint;

/// A thread, identified so that a reused number is detected.
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

/// Why a thread cannot be read or changed.
#[derive(Debug, Error)]
pub enum ThreadError {
    /// The thread ended, or another thread got its number. Run discovery again.
    #[error("thread {} of process {} has ended; nothing was changed, and nothing is to be done", .0.tid, .0.pid)]
    Gone(ThreadId),
    /// The kernel refused.
    #[error("thread {tid}: {what}: {source}; {}", remedy(source))]
    Os {
        /// Thread number.
        tid: i32,
        /// What Ontime tried to do with the thread.
        what: &'static str,
        /// The operating system's error.
        source: io::Error,
    },
}

/// A thread that has ended becomes ESRCH.
impl From<ThreadError> for io::Error {
    fn from(error: ThreadError) -> Self {
        match error {
            ThreadError::Gone(_) => Self::from_raw_os_error(libc::ESRCH),
            ThreadError::Os { source, .. } => source,
        }
    }
}

/// The remedy for an errno, as the end of a message.
fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => "run as root (CAP_SYS_NICE, and CAP_SYS_PTRACE to look)",
        Some(libc::EBUSY) => "SCHED_DEADLINE admission refused the bandwidth: lower runtime/period or free some",
        Some(libc::EINVAL) => {
            "the kernel has no such policy or range, or the thread is bound to its CPU by the kernel (see its flags)"
        }
        _ => crate::remedy(error),
    }
}

/// What a pidfd refers to.
enum Pin {
    Thread(OwnedFd),
    Process(OwnedFd),
}

/// A change of a thread.
enum Change<'a> {
    Policy(Policy),
    /// As `Policy`, but children do not inherit a real-time policy.
    PolicyAlone(Policy),
    Affinity(&'a CpuSet),
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

    /// Sets the thread's creator's value if the thread has the value of this change.
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
    /// [`ThreadError::Gone`] (with start time 0) if there is none or it has ended; [`ThreadError::Os`] if `/proc`
    /// cannot be read.
    pub fn of(pid: i32, tid: i32) -> Result<Self, ThreadError> {
        let missing = Self { pid, tid, start_time: 0 };
        let stat = missing.stat()?;
        Ok(Self { start_time: stat.start_time, ..missing })
    }

    /// Verifies that the number still means this thread and that it lives.
    ///
    /// # Errors
    /// [`ThreadError::Gone`] if not; [`ThreadError::Os`] if `/proc` cannot be read.
    pub fn verify(self) -> Result<(), ThreadError> {
        if self.stat()?.start_time == self.start_time { Ok(()) } else { Err(ThreadError::Gone(self)) }
    }

    /// The thread's policy.
    ///
    /// # Errors
    /// [`ThreadError::Gone`] if the thread ended; [`ThreadError::Os`] if the kernel refuses.
    pub fn policy(self) -> Result<Policy, ThreadError> {
        let policy = sched::policy(self.tid).map_err(|error| self.os("reading its policy", error))?;
        self.verify()?;
        Ok(policy)
    }

    /// Sets the thread's policy.
    ///
    /// The reset-on-fork flag stays unchanged. For kernel threads, which do not fork.
    ///
    /// # Errors
    /// [`ThreadError::Gone`] if the thread ended (nothing stays changed); [`ThreadError::Os`] if the kernel refuses.
    pub fn set_policy(self, policy: Policy) -> Result<(), ThreadError> {
        self.change(&Change::Policy(policy))
    }

    /// Sets the thread's policy; its children do not inherit a real-time policy (SCHED_RESET_ON_FORK). Any other policy
    /// clears that flag. For tenants' threads: the threads that they create get their policy and cap after they have
    /// been found. At its first run a vCPU creates the VM's kernel worker (`kvm_mmu_start_lpage_recovery` in
    /// `arch/x86/kvm/mmu/mmu.c`), which would otherwise keep real-time priority.
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
    pub fn affinity(self) -> Result<CpuSet, ThreadError> {
        let cpus = sched::affinity(self.tid).map_err(|error| self.os("reading its affinity", error))?;
        self.verify()?;
        Ok(cpus)
    }

    /// Restricts the thread to these CPUs.
    ///
    /// # Errors
    /// As [`Self::set_policy`].
    pub fn set_affinity(self, cpus: &CpuSet) -> Result<(), ThreadError> {
        self.change(&Change::Affinity(cpus))
    }

    /// Time that the thread has spent on a CPU since it started, ns (`/proc/PID/task/TID/schedstat`).
    ///
    /// One small read without an identity check: a decreasing value means that the number was reused.
    ///
    /// # Errors
    /// [`ThreadError::Gone`] if the thread ended; [`ThreadError::Os`] if the kernel has no such statistics.
    pub fn cpu_time(self) -> Result<u64, ThreadError> {
        self.times().map(|(ran, _)| ran)
    }

    /// Time that the thread was runnable but did not run, ns. For a vCPU this is the guest's steal time.
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

    /// Restores what a thread that got the number has inherited: its process leader's settings, or for a leader its
    /// parent's.
    fn undo_on_successor(self, change: &Change<'_>) {
        let mut status = [0; STATUS_HEAD];
        let Ok(length) = read_status(self.tid, &mut status) else { return };
        let status = status.get(..length).unwrap_or_default();
        let number = |key| proc::status_value(status, key).and_then(|value| value.parse::<i32>().ok());
        let (Some(leader), Some(parent)) = (number("Tgid"), number("PPid")) else { return };
        let creator = if leader == self.tid { parent } else { leader };
        // Errors are ignored: the successor may have ended, too, and the caller learns of the ended thread anyway.
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
        let path = format!("/proc/{}/task/{}/{file}", self.pid, self.tid);
        files::read_at(rustix::fs::CWD, path).map_err(|error| self.os(what, error.into()))
    }

    fn os(self, what: &'static str, source: io::Error) -> ThreadError {
        // ENOENT: no such directory in /proc. ESRCH: the thread ended during the read, or a system call did not find
        // it.
        match source.raw_os_error() {
            Some(libc::ENOENT | libc::ESRCH) => ThreadError::Gone(self),
            _ => ThreadError::Os { tid: self.tid, what, source },
        }
    }
}

fn pidfd_open(number: i32, flags: libc::c_uint) -> io::Result<OwnedFd> {
    // SAFETY: takes two integers and no memory of ours.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, number, flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel has just returned this descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Bytes of `/proc/TID/status` that contain Name, Umask, State, Tgid, Ngid, Pid and PPid (`fs/proc/array.c`,
/// `proc_pid_status`).
const STATUS_HEAD: usize = 512;

/// Reads the beginning of `/proc/TID/status`. The standard library keeps a path this short on the stack.
fn read_status(tid: i32, into: &mut [u8]) -> io::Result<usize> {
    let mut path = [0; 32];
    let mut rest = &mut path[..];
    write!(rest, "/proc/{tid}/status")?;
    let length = 32 - rest.len();
    let path = OsStr::from_bytes(path.get(..length).unwrap_or_default());
    File::open(path)?.read(into)
}

/// Whether a pidfd's thread or process has ended: the pidfd is then readable. True if the poll fails, to be safe.
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

    #[test]
    fn every_refusal_names_the_thread_and_has_a_remedy() {
        for (number, wanted) in [
            (libc::EPERM, "run as root"),
            (libc::EBUSY, "lower runtime/period"),
            (libc::EINVAL, "bound to its CPU"),
            (libc::EMFILE, "LimitNOFILE="),
            (libc::ENOMEM, "free memory"),
            (libc::EIO, "`ontime report`"),
        ] {
            let source = io::Error::from_raw_os_error(number);
            let said = ThreadError::Os { tid: 812, what: "setting its policy", source }.to_string();
            let remedy = said.strip_prefix("thread 812: setting its policy: ").and_then(|rest| rest.split_once("; "));
            assert!(remedy.is_some_and(|(cause, remedy)| !cause.is_empty() && remedy.contains(wanted)), "{said}");
        }
    }

    /// A thread that sleeps until it must end.
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
            // After the join, the thread's /proc entry disappears a moment later.
            let deadline = Instant::now() + Duration::from_secs(60);
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
            // SAFETY: takes an integer and no memory of ours.
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
        let one: CpuSet = before.iter().take(1).collect();
        thread.id.set_affinity(&one).unwrap();
        assert_eq!(thread.id.affinity().unwrap(), one);
        thread.id.set_affinity(&before).unwrap();
        assert_eq!(thread.id.affinity().unwrap(), before);
        assert!(matches!(thread.id.set_affinity(&CpuSet::default()), Err(ThreadError::Os { .. })));
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
        // A live thread plays the successor with the ended thread's number: `undo_on_successor` sees only the number.
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
        let deadline = Instant::now() + Duration::from_secs(60);
        while Instant::now() < deadline && !matches!(ThreadId::of(pid, pid), Err(ThreadError::Gone(_))) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(matches!(ThreadId::of(pid, pid), Err(ThreadError::Gone(_))));
        child.wait().unwrap();
    }

    #[test]
    fn kernel_threads_are_their_own_process() {
        // kthreadd, if this process sees the host's process numbers.
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
