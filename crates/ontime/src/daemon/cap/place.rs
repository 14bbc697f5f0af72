//! Pauses a thread and gives it its place back: two system calls, and no memory is allocated.
//!
//! The planner uses the careful `ThreadId::set_policy` of crate tenants, but that allocates, which the watcher must not
//! do. The watcher makes sure in another way that it changes the right thread. It keeps the thread's `schedstat` file
//! open, which refers to the thread and not to its number: reading it fails with ESRCH once the thread has ended, even
//! if the number is in use again. The watcher reads the file right before the change. `stat`, which has the thread's
//! start time, costs three times as much; it is read only once, after `schedstat` was opened.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use ontime_tenants::{Policy, ThreadId};

/// A thread and the place that the planner gave it.
#[derive(Debug)]
pub(crate) struct PlacedThread {
    tid: i32,
    schedstat: File,
    policy: libc::c_int,
    priority: libc::c_int,
    /// The FIFO priority while an interrupt is pending; 0: never put ahead.
    ahead: libc::c_int,
}

impl PlacedThread {
    /// The thread `id`, whose place is `policy`. It may be put ahead if both `policy` and `ahead` are SCHED_FIFO.
    /// `None` if `policy` is neither SCHED_FIFO nor SCHED_RR: then there is nothing to cap.
    ///
    /// # Errors ESRCH or ENOENT where the thread has ended.
    pub(crate) fn open(id: ThreadId, policy: Policy, ahead: Option<Policy>) -> io::Result<Option<Self>> {
        let (policy, priority) = match policy {
            Policy::Fifo(priority) => (libc::SCHED_FIFO, priority.into()),
            Policy::Rr(priority) => (libc::SCHED_RR, priority.into()),
            _ => return Ok(None),
        };
        let schedstat = File::open(format!("/proc/{}/task/{}/schedstat", id.pid, id.tid))?;
        let ahead = match ahead {
            Some(Policy::Fifo(priority)) if policy == libc::SCHED_FIFO => priority.into(),
            _ => 0,
        };
        id.verify()?;
        let place = Self { tid: id.tid, schedstat, policy, priority, ahead };
        place.verify()?;
        Ok(Some(place))
    }

    /// Pauses the thread: SCHED_IDLE. Any other thread on its CPU then runs first, so the rest of the CPU really goes
    /// to other threads. At SCHED_OTHER the thread would compete with them for the little that the cap leaves. `fresh`:
    /// the caller has just read the thread's open `/proc` file, so the check is not necessary.
    ///
    /// # Errors ESRCH where the thread has ended; else the kernel's error.
    pub(crate) fn leave(&self, fresh: bool) -> io::Result<()> {
        if !fresh {
            self.verify()?;
        }
        self.set(libc::SCHED_IDLE, 0).map(|_| ())
    }

    /// Gives the thread its place back. Returns whether it had a real-time policy by then.
    ///
    /// # Errors
    /// ESRCH where the thread has ended; else the kernel's error.
    pub(crate) fn take(&self) -> io::Result<bool> {
        self.verify()?;
        let before = self.set(self.policy, self.priority)?;
        Ok(is_real_time(before))
    }

    /// Whether it has a real-time policy now.
    ///
    /// # Errors
    /// ESRCH where the thread has ended; else the kernel's error.
    pub(crate) fn is_real_time(&self) -> io::Result<bool> {
        self.verify()?;
        // SAFETY: takes an integer, touches no memory.
        match unsafe { libc::sched_getscheduler(self.tid) } {
            ..0 => Err(io::Error::last_os_error()),
            policy => Ok(is_real_time(policy & !libc::SCHED_RESET_ON_FORK)),
        }
    }

    /// Whether it may be put ahead.
    pub(crate) fn has_ahead(&self) -> bool {
        self.ahead != 0
    }

    /// Puts the thread ahead, behind other vCPUs that are. The caller has just read the thread's open `/proc` file.
    ///
    /// # Errors ESRCH where the thread has ended; else the kernel's error.
    pub(crate) fn raise(&self) -> io::Result<()> {
        self.fifo(self.ahead)
    }

    /// Puts the thread behind the other vCPUs that are ahead. The kernel queues a thread last when its priority is
    /// raised, and does not requeue a thread whose priority does not change. So this lowers the priority and raises it
    /// again.
    ///
    /// # Errors
    /// As [`Self::raise`].
    pub(crate) fn again(&self) -> io::Result<()> {
        self.fifo(self.priority)?;
        self.fifo(self.ahead)
    }

    /// Moves the thread to its place, behind the threads that wait there. The kernel queues a thread first when its
    /// priority is lowered, so this lowers it to one below its place and then raises it.
    ///
    /// # Errors
    /// As [`Self::raise`].
    pub(crate) fn lower(&self) -> io::Result<()> {
        self.fifo(self.priority - 1)?;
        self.fifo(self.priority)
    }

    /// For threads that Ontime placed only: they have SCHED_RESET_ON_FORK.
    fn fifo(&self, priority: libc::c_int) -> io::Result<()> {
        let param = libc::sched_param { sched_priority: priority };
        // SAFETY: the kernel copies param, which outlives the call.
        if unsafe { libc::sched_setscheduler(self.tid, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, &raw const param) }
            != 0
        {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Sets a policy and returns the former one.
    fn set(&self, policy: libc::c_int, priority: libc::c_int) -> io::Result<libc::c_int> {
        // SAFETY: takes an integer, touches no memory.
        let now = unsafe { libc::sched_getscheduler(self.tid) };
        if now < 0 {
            return Err(io::Error::last_os_error());
        }
        let flags = now & libc::SCHED_RESET_ON_FORK;
        let param = libc::sched_param { sched_priority: priority };
        // SAFETY: the kernel copies param, which outlives the call.
        if unsafe { libc::sched_setscheduler(self.tid, policy | flags, &raw const param) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(now & !libc::SCHED_RESET_ON_FORK)
    }

    /// Checks that the thread still exists. Reading at offset 0 makes the kernel look the thread up anew.
    fn verify(&self) -> io::Result<()> {
        self.schedstat.read_at(&mut [0; 64], 0).map(|_| ())
    }
}

fn is_real_time(policy: libc::c_int) -> bool {
    matches!(policy, libc::SCHED_FIFO | libc::SCHED_RR | libc::SCHED_DEADLINE)
}

/// Gives the calling thread this policy.
///
/// # Errors
/// The kernel's error: EPERM without CAP_SYS_NICE.
pub(crate) fn place_self(policy: Policy) -> io::Result<()> {
    let (policy, priority) = match policy {
        Policy::Fifo(priority) => (libc::SCHED_FIFO, priority.into()),
        Policy::Rr(priority) => (libc::SCHED_RR, priority.into()),
        _ => (libc::SCHED_OTHER, 0),
    };
    let param = libc::sched_param { sched_priority: priority };
    // SAFETY: 0 is the calling thread; the kernel copies param.
    if unsafe { libc::sched_setscheduler(0, policy, &raw const param) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
