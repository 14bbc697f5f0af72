//! Taking a thread off RT priority and giving it back its place: two system calls, no memory allocated.
//!
//! `ThreadId::set_policy` of crate tenants is the careful way for the planner; the watcher cannot afford its
//! allocations. The same proof is kept: the thread's `schedstat` file is held open, which names the thread and not its
//! number (reading it fails with ESRCH once the thread has ended, whoever has the number then), and is read right
//! before the change. `stat`, which tells when the thread started, costs three times that; it is read once, after the
//! other was opened.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;

use ontime_tenants::{Policy, ThreadId};

use super::reading::{STAT_START_TIME, stat_field};

/// A thread and the place the planner gave it.
#[derive(Debug)]
pub struct Place {
    tid: i32,
    schedstat: File,
    policy: libc::c_int,
    priority: libc::c_int,
    /// Where it stands while an interrupt is pending; 0: nowhere else.
    ahead: libc::c_int,
}

impl Place {
    /// The thread `id`, whose place is `policy`, and which is put ahead at times if `ahead` is a place at SCHED_FIFO.
    /// `None` where that is not SCHED_FIFO or SCHED_RR: nothing to cap.
    ///
    /// # Errors
    /// ESRCH or ENOENT where the thread has ended.
    pub fn open(id: ThreadId, policy: Policy, ahead: Option<Policy>) -> io::Result<Option<Self>> {
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
        let stat = fs::read(format!("/proc/{}/task/{}/stat", id.pid, id.tid))?;
        if stat_field(&stat, STAT_START_TIME) != Some(id.start_time) {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        let place = Self { tid: id.tid, schedstat, policy, priority, ahead };
        place.verify()?;
        Ok(Some(place))
    }

    /// Takes the thread off RT priority, to SCHED_IDLE: anything else on its CPU goes first, so that the CPU's rest is
    /// really the others'. At SCHED_OTHER it would compete with them for the little that the cap leaves. `fresh`: its
    /// times were just read, by a file that names the thread and not its number, which proves as much as reading them
    /// here.
    ///
    /// # Errors
    /// ESRCH where it has ended; else the kernel's.
    pub fn leave(&self, fresh: bool) -> io::Result<()> {
        if !fresh {
            self.verify()?;
        }
        self.set(libc::SCHED_IDLE, 0)
    }

    /// Gives the thread its place back.
    ///
    /// # Errors
    /// ESRCH where it has ended; else the kernel's.
    pub fn take(&self) -> io::Result<()> {
        self.verify()?;
        self.set(self.policy, self.priority)
    }

    /// Whether it has a place ahead.
    pub fn has_ahead(&self) -> bool {
        self.ahead != 0
    }

    /// Puts it ahead, behind others that are. Its times were just read, by a file that names the thread and not its
    /// number.
    ///
    /// # Errors
    /// ESRCH where it has ended; else the kernel's.
    pub fn raise(&self) -> io::Result<()> {
        self.fifo(self.ahead)
    }

    /// Puts it behind the others that are ahead: the kernel queues whom it raises last, and leaves alone whom nothing
    /// changes for.
    ///
    /// # Errors
    /// As [`Self::raise`].
    pub fn again(&self) -> io::Result<()> {
        self.fifo(self.priority)?;
        self.fifo(self.ahead)
    }

    /// To its place, behind those who wait there: whom it lowers the kernel queues first, so it is lowered further and
    /// raised.
    ///
    /// # Errors
    /// As [`Self::raise`].
    pub fn lower(&self) -> io::Result<()> {
        self.fifo(self.priority - 1)?;
        self.fifo(self.priority)
    }

    /// Only of threads that Ontime placed, which have SCHED_RESET_ON_FORK.
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

    fn set(&self, policy: libc::c_int, priority: libc::c_int) -> io::Result<()> {
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
        Ok(())
    }

    /// That the thread is there. One read per call: the kernel looks the thread up anew.
    fn verify(&self) -> io::Result<()> {
        self.schedstat.read_at(&mut [0; 64], 0).map(|_| ())
    }
}

/// Places the calling thread.
///
/// # Errors
/// The kernel's: EPERM without CAP_SYS_NICE.
pub fn place_self(policy: Policy) -> io::Result<()> {
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
