//! One vCPU thread, as its pacer sees it: reads its CPU time and changes its place. A change takes two system calls for
//! a policy, at most two for an entry of the sched_ext table, and no allocation.
//!
//! A thread with a [`Counter`] is read there. After a change its number must still be one of its process; so a change
//! that hit another process's thread is undone. The rest of this comment is about threads without one.
//!
//! The thread's files are held open (`run::files`), and read right after every change. So a change that hit a later
//! thread with the same number is noticed and undone, as in `ontime_tenants::thread` by pidfd. Whether the thread
//! sleeps is read by the pacer's reader (`run::reader`).
//!
//! A thread that did not run between its last two readings is read again only if its process has had CPU time since, by
//! the process's CPU clock. If no thread of the process ran, this one did not, and no wait of it has ended. That
//! question takes a quarter of a reading, and most vCPUs sleep at most checks. Nor does the guest write then: what it
//! published is not read again either. (A vCPU's entries are its own, `kernel/guest/dl_next.c`: with a counter it is
//! enough that the vCPU itself did not run.)

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ontime_tenants::{Policy, ProcessClock, ThreadId};

use crate::ext::TableEntry;
use crate::model::{Counts, Next, Place, Places, Tally};
use crate::run::counters::{Counter, State};
use crate::run::files::{ThreadFiles, ended};
use crate::run::guest::GuestReader;
use crate::run::reader::Reader;

/// How a thread's place is changed.
#[derive(Debug, Clone)]
pub(crate) enum Placement {
    /// By setting its policy.
    Policy(Places),
    /// By an entry in the table of the sched_ext scheduler.
    Table(TableEntry),
}

/// A vCPU thread, as its pacer sees it.
#[derive(Debug)]
pub(crate) struct VcpuThread {
    id: ThreadId,
    files: Arc<ThreadFiles>,
    /// The kernel's counter of the thread, in place of the files.
    counter: Option<Counter>,
    clock: ProcessClock,
    /// The last reading, and whether the thread had not run since the reading before.
    last: Counts,
    unchanged: bool,
    placement: Placement,
    /// Counts changes that the kernel refuses.
    pub(crate) tally: Arc<Tally>,
    /// What the vCPU's guest publishes and claims.
    pub(crate) guest: GuestReader,
}

impl VcpuThread {
    /// A thread with these open files. If it has ended since they were opened, the first reading shows that. The pacer
    /// makes that reading: a file is read under a lock of its own (`fs/seq_file.c`), which the daemon's thread must not
    /// hold while pacers have the file.
    pub(crate) fn new(
        files: Arc<ThreadFiles>,
        counter: Option<Counter>,
        id: ThreadId,
        placement: Placement,
        tally: Arc<Tally>,
        guest: GuestReader,
    ) -> Self {
        let clock = ProcessClock::new(id.pid);
        Self { id, files, counter, clock, last: Counts::default(), unchanged: false, placement, tally, guest }
    }

    /// A thread whose files are opened here, without a counter and a guest.
    #[cfg(test)]
    pub(crate) fn open(id: ThreadId, placement: Placement) -> io::Result<Self> {
        let files = Arc::new(ThreadFiles::open(id)?);
        Ok(Self::new(files, None, id, placement, Arc::default(), GuestReader::default()))
    }

    /// Whether both are the same thread.
    pub(crate) fn is_of(&self, other: &VcpuThread) -> bool {
        self.id == other.id
    }

    /// The thread's counters.
    ///
    /// # Errors
    /// ESRCH if the thread has ended.
    pub(crate) fn read(&mut self) -> io::Result<Counts> {
        if self.counter.is_some() {
            return self.read_counter();
        }
        // The clock is read before the counters: CPU time in between shows at the next call.
        if self.unchanged && self.clock.take() == 0 {
            return Ok(self.last);
        }
        self.guest.forget();
        let counts = self.files.counts()?;
        self.unchanged = counts.ran == self.last.ran;
        self.last = counts;
        Ok(counts)
    }

    /// Reads the counter. The guest may have written if the thread has run.
    fn read_counter(&mut self) -> io::Result<Counts> {
        let counter = self.counter.as_ref().map(Counter::read);
        let counts = match counter.ok_or(io::ErrorKind::NotFound)? {
            (State::Ended, _) => return Err(ended()),
            // It may have run all the time without a switch.
            (State::Unknown, _) => self.files.counts()?,
            (_, counts) => counts,
        };
        if counts.ran != self.last.ran {
            self.guest.forget();
        }
        self.last = counts;
        Ok(counts)
    }

    /// The next deadline after `after` that the guest publishes. `stays`: the thread can run on the pacer's CPU only.
    pub(crate) fn next_deadline(&mut self, after: u64, stays: bool, reader: &mut Reader) -> Option<Next> {
        if !stays {
            self.guest.forget();
        }
        let copied = self.counter.as_ref().filter(|_| stays).and_then(Counter::line);
        self.guest.next_deadline(after, copied, reader)
    }

    /// Whether the thread has not ended, by its files.
    pub(crate) fn is_there(&self) -> bool {
        self.files.counts().is_ok()
    }

    /// Whether the thread sleeps, is stopped, or has ended. A thread that waits for a CPU or for a kernel lock does not
    /// sleep; one whose state cannot be read now counts as such.
    pub(crate) fn is_asleep(&self, reader: &mut Reader) -> bool {
        let state = self.counter.as_ref().map_or(State::Unknown, |counter| counter.read().0);
        if state != State::Unknown {
            return matches!(state, State::Asleep | State::Ended);
        }
        self.files.is_asleep(reader)
    }

    /// Moves the thread to a place, which its children do not inherit, and returns its counters after that. A change
    /// that the kernel refuses is counted.
    ///
    /// # Errors
    /// ESRCH if the thread has ended. If another thread has its number by now, that thread gets its policy back.
    pub(crate) fn set_place(&mut self, place: Place) -> io::Result<Counts> {
        let places = match &self.placement {
            Placement::Policy(places) => *places,
            Placement::Table(entry) => {
                entry.place(place);
                return self.read();
            }
        };
        let (policy, priority) = raw(places.policy(place));
        let param = libc::sched_param { sched_priority: priority };
        // SAFETY: the kernel copies param, which outlives the call.
        if unsafe { libc::sched_setscheduler(self.id.tid, policy | libc::SCHED_RESET_ON_FORK, &raw const param) } != 0 {
            self.tally.refused.fetch_add(1, Ordering::Relaxed);
        }
        match self.read_after_change() {
            Ok(counts) => Ok(counts),
            Err(error) => {
                self.undo_on_successor(policy);
                Err(error)
            }
        }
    }

    /// The thread's counters after a change.
    ///
    /// # Errors
    /// ESRCH if the thread has ended.
    fn read_after_change(&mut self) -> io::Result<Counts> {
        if self.counter.is_some() {
            // The counter alone says too late that the thread has ended: its number is free from its exit on, and the
            // kernel's last event of it comes with its last switch.
            return if self.is_of_its_process() { self.read_counter() } else { Err(ended()) };
        }
        let counts = self.files.counts()?;
        (self.last, self.unchanged) = (counts, false);
        Ok(counts)
    }

    /// Whether the thread's number is one of its process.
    fn is_of_its_process(&self) -> bool {
        // SAFETY: takes numbers only, and sends nothing.
        let sent = unsafe { libc::syscall(libc::SYS_tgkill, self.id.pid, self.id.tid, 0) };
        // Permission is asked for only of one that is there.
        sent == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
    }

    /// Moves a thread that got the number of this ended thread, and so the policy that was meant for this one, to
    /// SCHED_OTHER: such a thread is new. What its creator has, as `ontime_tenants::thread` restores it, is in files
    /// that a pacer must not read.
    fn undo_on_successor(&self, policy: libc::c_int) {
        // SAFETY: takes and returns numbers only.
        let now = unsafe { libc::sched_getscheduler(self.id.tid) };
        if now >= 0 && now & !libc::SCHED_RESET_ON_FORK == policy {
            let param = libc::sched_param { sched_priority: 0 };
            // SAFETY: the kernel copies param, which outlives the call.
            unsafe { libc::sched_setscheduler(self.id.tid, libc::SCHED_OTHER, &raw const param) };
        }
    }
}

/// The kernel's numbers of a policy and its priority.
fn raw(policy: Policy) -> (libc::c_int, libc::c_int) {
    match policy {
        Policy::Fifo(priority) => (libc::SCHED_FIFO, priority.into()),
        Policy::Idle => (libc::SCHED_IDLE, 0),
        _ => (libc::SCHED_OTHER, 0),
    }
}

#[cfg(test)]
mod tests {
    use ontime_tenants::PriorityTable;

    use super::*;
    use crate::model::Beyond;
    use crate::run::counters::Counters;

    #[test]
    fn a_thread_takes_its_places_and_one_that_ended_is_noticed() {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: placing threads needs root");
            return;
        }
        let mut counters =
            Counters::start().inspect_err(|error| println!("SKIPPED in part: no counters: {error}")).ok();
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let id = ThreadId::of(pid, pid).unwrap();
        let places = Places::of(PriorityTable::default(), Beyond::Idle);
        let placement = Placement::Policy(places);
        let mut by_files = VcpuThread::open(id, placement.clone()).unwrap();
        let counter = counters.as_mut().and_then(|all| all.watch(id, &by_files.files));
        let mut by_counter = VcpuThread { counter, ..VcpuThread::open(id, placement.clone()).unwrap() };
        let mut reader = crate::run::reader::unplaced();
        for vcpu in [&mut by_files, &mut by_counter] {
            for (place, policy) in
                [(Place::Planned, places.planned), (Place::Entitled, places.entitled), (Place::Beyond, places.beyond)]
            {
                vcpu.set_place(place).unwrap();
                assert_eq!(id.policy().unwrap(), policy);
            }
            while !vcpu.is_asleep(&mut reader) {
                std::thread::yield_now();
            }
            assert!(vcpu.read().is_ok());
        }
        assert!(by_files.is_of(&by_counter));
        child.kill().unwrap();
        child.wait().unwrap();
        for vcpu in [&mut by_files, &mut by_counter] {
            assert!(vcpu.read().is_err());
            assert!(vcpu.is_asleep(&mut reader) || vcpu.is_asleep(&mut crate::run::reader::unplaced()));
            assert_eq!(vcpu.set_place(Place::Planned).unwrap_err().raw_os_error(), Some(libc::ESRCH));
        }
        assert!(VcpuThread::open(id, placement).is_err());
    }

    /// The files of a thread that has ended with the number of another thread, as if the number had been reused.
    #[test]
    fn a_thread_that_reuses_a_number_keeps_its_policy() {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: placing threads needs root");
            return;
        }
        let sleeper = || std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let id = |child: &std::process::Child| ThreadId::of(child.id() as i32, child.id() as i32).unwrap();
        let (mut ended, mut successor) = (sleeper(), sleeper());
        let placement = Placement::Policy(Places::of(PriorityTable::default(), Beyond::Idle));
        let mut vcpu = VcpuThread::open(id(&ended), placement).unwrap();
        ended.kill().unwrap();
        ended.wait().unwrap();
        vcpu.id.tid = successor.id() as i32;
        let of_successor = ThreadFiles::open(id(&successor)).unwrap();
        let before = id(&successor).policy().unwrap();
        // By the files; and by the number's process, where a counter does not yet say that the thread has ended.
        let mut counters =
            Counters::start().inspect_err(|error| println!("SKIPPED in part: no counters: {error}")).ok();
        for counter in [None, counters.as_mut().and_then(|all| all.watch(id(&successor), &of_successor))] {
            vcpu.counter = counter;
            for place in [Place::Planned, Place::Beyond] {
                assert_eq!(vcpu.set_place(place).unwrap_err().raw_os_error(), Some(libc::ESRCH));
                assert_eq!(id(&successor).policy().unwrap(), before);
            }
        }
        successor.kill().unwrap();
        successor.wait().unwrap();
    }
}
