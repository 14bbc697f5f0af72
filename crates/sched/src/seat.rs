//! One vCPU thread: what it has had, and its change of place. Two system calls a change where the place is a policy, at
//! most two where it stands in a table; no allocation.
//!
//! The thread's `schedstat` file is held open, which names the thread and not its number: reading it fails with ESRCH
//! once the thread has ended, whoever has the number then. It is read right after every change, the same proof as
//! `ontime_tenants::thread` gives by pidfd: who took over the number meanwhile gets back what it had. Source of its
//! form: `fs/proc/base.c`, `proc_pid_schedstat`. Whether the thread sleeps is in its `stat` (`fs/proc/array.c`,
//! `do_task_stat`), which takes three times as long.
//!
//! A thread that did not run when it was read last is read only if its process has had some of a CPU since, by the
//! process's clock: where nobody of it ran, the thread did not, and has not waited to the end either. That question
//! takes a quarter of a reading, and most vCPUs sleep at most looks.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ontime_tenants::{Class, Level, Policy, PriorityTable, ProcessClock, Role, ThreadId};

use crate::account::{Counts, Place, Share, Tally};
use crate::config::Beyond;
use crate::ext::Slot;
use crate::offer::Offer;
use crate::published::Published;
use crate::settle::Reserved;

/// The policies of the three places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Places {
    /// Of [`Place::Planned`].
    pub planned: Policy,
    /// Of [`Place::Entitled`].
    pub entitled: Policy,
    /// Of [`Place::Beyond`].
    pub beyond: Policy,
}

impl Places {
    /// By the priority table. Among reservations time is shared by the plan, not by level: all have the first level's
    /// places.
    pub fn of(table: PriorityTable, beyond: Beyond) -> Self {
        let rt = Class::Rt(Level::HIGHEST);
        Self {
            planned: table.policy(rt, Role::VcpuPlanned),
            entitled: table.policy(rt, Role::VcpuEntitled),
            beyond: match beyond {
                Beyond::Idle => Policy::Idle,
                Beyond::Other => Policy::BULK,
            },
        }
    }

    /// Whether a thread that is paced may be found with this policy.
    pub fn has(&self, policy: Policy) -> bool {
        let at_beyond = match (self.beyond, policy) {
            // Its nice value is its own.
            (Policy::Other { .. }, Policy::Other { .. }) => true,
            (beyond, policy) => beyond == policy,
        };
        at_beyond || policy == self.planned || policy == self.entitled
    }

    fn policy(&self, place: Place) -> Policy {
        match place {
            Place::Planned => self.planned,
            Place::Entitled => self.entitled,
            Place::Beyond => self.beyond,
        }
    }

    fn raw(&self, place: Place) -> (libc::c_int, libc::c_int) {
        match self.policy(place) {
            Policy::Fifo(priority) => (libc::SCHED_FIFO, priority.into()),
            Policy::Idle => (libc::SCHED_IDLE, 0),
            _ => (libc::SCHED_OTHER, 0),
        }
    }
}

/// How a thread is given its place.
#[derive(Debug, Clone)]
pub enum Hand {
    /// By its policy.
    Policy(Places),
    /// In the table of the sched_ext scheduler.
    Table(Slot),
}

/// A thread's open files.
#[derive(Debug)]
pub struct Files {
    schedstat: File,
    stat: File,
}

/// What a vCPU's guest says without asking.
#[derive(Debug, Default)]
pub struct Guest {
    /// Its next deadlines.
    pub published: Option<Published>,
    /// What it takes of what it is offered.
    pub claims: Option<Claims>,
}

impl Guest {
    /// Of this vCPU.
    pub fn of(vcpu: &Reserved) -> Self {
        Self {
            published: vcpu.page.clone().map(|page| Published::new(page, vcpu.vcpu, vcpu.period.0)),
            // What it holds is read at the first look.
            claims: vcpu.offer.clone().map(|offer| Claims { offer, vcpu: vcpu.vcpu, seen: 0 }),
        }
    }
}

/// What a vCPU's guest takes of what it is offered, followed by its pacer.
#[derive(Debug)]
pub struct Claims {
    offer: Offer,
    vcpu: u32,
    /// The generation that was read last.
    seen: u64,
}

/// A vCPU thread.
#[derive(Debug)]
pub struct Seat {
    id: ThreadId,
    files: Arc<Files>,
    clock: ProcessClock,
    /// What it had had when it was read last, and whether that was no more than the time before.
    last: Counts,
    still: bool,
    hand: Hand,
    /// For what the kernel refuses.
    pub(crate) tally: Arc<Tally>,
    /// What its guest publishes.
    pub(crate) published: Option<Published>,
    /// What its guest takes.
    pub(crate) claims: Option<Claims>,
}

impl Seat {
    /// The thread `id`.
    ///
    /// # Errors
    /// ESRCH or ENOENT where it has ended.
    pub fn open(id: ThreadId, hand: Hand, tally: Arc<Tally>, guest: Guest) -> io::Result<Self> {
        let open = |name: &str| File::open(format!("/proc/{}/task/{}/{name}", id.pid, id.tid));
        let files = Files { schedstat: open("schedstat")?, stat: open("stat")? };
        // The number means the thread that was found, now that the files are open: so they are its.
        id.verify().map_err(|_| io::Error::from_raw_os_error(libc::ESRCH))?;
        let seat = Self::with(Arc::new(files), id, hand, tally, guest);
        seat.look()?;
        Ok(seat)
    }

    /// The same thread as one that was opened before, by its files. That it has ended meanwhile shows in the first
    /// reading, which is for its pacer: a file is read under a lock of its own (`fs/seq_file.c`), which the daemon's
    /// thread must not hold.
    pub fn with(files: Arc<Files>, id: ThreadId, hand: Hand, tally: Arc<Tally>, guest: Guest) -> Self {
        let clock = ProcessClock::new(id.pid);
        let Guest { published, claims } = guest;
        Self { id, files, clock, last: Counts::default(), still: false, hand, tally, published, claims }
    }

    /// For [`Seat::with`].
    pub fn files(&self) -> Arc<Files> {
        Arc::clone(&self.files)
    }

    /// Its share, where that may be another than when this was asked last. On a pacer: no system call, nothing
    /// allocated.
    pub(crate) fn claimed(&mut self) -> Option<Share> {
        let Claims { offer, vcpu, seen } = self.claims.as_mut()?;
        let held = offer.ledger.news(*vcpu, seen)?;
        // What was not offered, its device process wrote there by itself.
        let share = offer.share(&held)?;
        self.published.iter_mut().for_each(|published| published.set_period(share.period));
        Some(share)
    }

    /// Goes on where another seat of the same thread ends.
    pub(crate) fn go_on(&mut self, before: &Seat) {
        if let (Some(published), Some(before)) = (&mut self.published, &before.published) {
            published.go_on(before);
        }
    }

    /// Whether both are of one thread.
    pub(crate) fn is_of(&self, other: &Seat) -> bool {
        self.id == other.id
    }

    /// What it has had.
    ///
    /// # Errors
    /// ESRCH where it has ended.
    pub fn read(&mut self) -> io::Result<Counts> {
        // Asked before the reading: what it takes in between shows the next time.
        if self.still && self.clock.take() == 0 {
            return Ok(self.last);
        }
        let counts = self.look()?;
        self.still = counts.ran == self.last.ran;
        self.last = counts;
        Ok(counts)
    }

    /// Reads its file.
    pub(crate) fn look(&self) -> io::Result<Counts> {
        let mut line = [0; 96];
        let length = self.files.schedstat.read_at(&mut line, 0)?;
        counts(line.get(..length).unwrap_or_default()).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Whether it sleeps, or is stopped, or has ended: one that waits for a CPU does not, nor one that waits for a lock
    /// of the kernel. The kernel takes the process's signal lock for it, whose holder has the pacer's priority
    /// meanwhile on PREEMPT_RT.
    pub fn sleeps(&self) -> bool {
        // Number and name, of which the kernel gives 15 bytes, are well within these.
        let mut line = [0; 64];
        let length = self.files.stat.read_at(&mut line, 0).unwrap_or(0);
        matches!(state(line.get(..length).unwrap_or_default()), None | Some(b'S' | b'T' | b't' | b'Z' | b'X'))
    }

    /// Gives it a place, which what it makes does not inherit, and says what it has had then. A change that the kernel
    /// refuses is counted.
    ///
    /// # Errors
    /// ESRCH where it has ended: who took over its number, if somebody did, has what it had.
    pub fn place(&mut self, place: Place) -> io::Result<Counts> {
        let places = match &self.hand {
            Hand::Policy(places) => *places,
            Hand::Table(slot) => {
                slot.place(place);
                return self.read();
            }
        };
        let (policy, priority) = places.raw(place);
        let param = libc::sched_param { sched_priority: priority };
        // SAFETY: the kernel copies param, which outlives the call.
        if unsafe { libc::sched_setscheduler(self.id.tid, policy | libc::SCHED_RESET_ON_FORK, &raw const param) } != 0 {
            self.tally.refused.fetch_add(1, Ordering::Relaxed);
        }
        match self.look() {
            Ok(counts) => {
                (self.last, self.still) = (counts, false);
                Ok(counts)
            }
            Err(error) => {
                self.id.undo_policy_on_successor(places.policy(place));
                Err(error)
            }
        }
    }
}

fn counts(line: &[u8]) -> Option<Counts> {
    let mut numbers = line.split(|byte| byte.is_ascii_whitespace()).map(number);
    Some(Counts { ran: numbers.next()??, waited: numbers.next()?? })
}

/// The state's letter, behind the name in parentheses, which may have any in it.
fn state(line: &[u8]) -> Option<u8> {
    let name = line.iter().rposition(|byte| *byte == b')')?;
    line.get(name + 2).copied()
}

/// Digits and nothing else. Not by `str::parse`, which takes thrice as long: a pacer reads ten of these at a look.
fn number(digits: &[u8]) -> Option<u64> {
    let add = |sum: u64, digit: &u8| {
        let digit = digit.wrapping_sub(b'0');
        sum.checked_mul(10)?.checked_add(digit.into()).filter(|_| digit < 10)
    };
    digits.iter().try_fold(0, add).filter(|_| !digits.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedstat_is_read() {
        assert_eq!(counts(b"123 45 6\n"), Some(Counts { ran: 123, waited: 45 }));
        assert_eq!(counts(b"18446744073709551615 0 6\n"), Some(Counts { ran: u64::MAX, waited: 0 }));
        for bad in [&b""[..], b"12", b"x 1 2", b"1 y 2", b" 1 2", b"-1 2", b"18446744073709551616 0", b"1 9/"] {
            assert_eq!(counts(bad), None);
        }
    }

    #[test]
    fn a_state_is_read() {
        assert_eq!(state(b"7 (CPU 0/KVM) S 1 7"), Some(b'S'));
        assert_eq!(state(b"7 (a) R (b) R) D 1 7"), Some(b'D'));
        for bad in [&b""[..], b"7 (CPU", b"7 (CPU)", b"7 (CPU) "] {
            assert_eq!(state(bad), None);
        }
    }

    #[test]
    fn places_are_the_first_levels() {
        let places = Places::of(PriorityTable::default(), Beyond::Idle);
        assert_eq!((places.planned, places.entitled), (Policy::Fifo(47), Policy::Fifo(46)));
        assert!(places.has(Policy::Idle) && places.has(Policy::Fifo(46)) && !places.has(Policy::BULK));
        let places = Places::of(PriorityTable::default(), Beyond::Other);
        assert!(places.has(Policy::Other { nice: 5 }) && !places.has(Policy::Idle));
    }

    #[test]
    fn a_thread_takes_its_places_and_one_that_ended_is_noticed() {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: placing threads needs root");
            return;
        }
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let id = ThreadId::of(pid, pid).unwrap();
        let places = Places::of(PriorityTable::default(), Beyond::Idle);
        let mut seat = Seat::open(id, Hand::Policy(places), Arc::default(), Guest::default()).unwrap();
        for (place, policy) in
            [(Place::Planned, places.planned), (Place::Entitled, places.entitled), (Place::Beyond, places.beyond)]
        {
            seat.place(place).unwrap();
            assert_eq!(id.policy().unwrap(), policy);
        }
        while !seat.sleeps() {
            std::thread::yield_now();
        }
        let mut again = Seat::with(seat.files(), id, Hand::Policy(places), Arc::default(), Guest::default());
        assert!(again.is_of(&seat) && again.read().is_ok());
        child.kill().unwrap();
        child.wait().unwrap();
        for mut seat in [seat, again] {
            assert!(seat.read().is_err());
            assert_eq!(seat.place(Place::Planned).unwrap_err().raw_os_error(), Some(libc::ESRCH));
        }
        assert!(Seat::open(id, Hand::Policy(places), Arc::default(), Guest::default()).is_err());
    }
    /// The files of a thread that has ended, and the number of another: as if that had taken it over.
    #[test]
    fn who_took_over_a_number_keeps_its_policy() {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: placing threads needs root");
            return;
        }
        let sleeper = || std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let id = |child: &std::process::Child| ThreadId::of(child.id() as i32, child.id() as i32).unwrap();
        let (mut ended, mut successor) = (sleeper(), sleeper());
        let hand = Hand::Policy(Places::of(PriorityTable::default(), Beyond::Idle));
        let files = Seat::open(id(&ended), hand.clone(), Arc::default(), Guest::default()).unwrap().files();
        ended.kill().unwrap();
        ended.wait().unwrap();
        let before = id(&successor).policy().unwrap();
        let mut seat = Seat::with(files, id(&successor), hand, Arc::default(), Guest::default());
        for place in [Place::Planned, Place::Beyond] {
            assert_eq!(seat.place(place).unwrap_err().raw_os_error(), Some(libc::ESRCH));
            assert_eq!(id(&successor).policy().unwrap(), before);
        }
        successor.kill().unwrap();
        successor.wait().unwrap();
    }
}
