//! Notification when tenants or their threads appear or disappear, without polling.
//!
//! Input: process events from the kernel ([`crate::connector`]) and changes in libvirt's directory (inotify). Output: a
//! descriptor that becomes readable when discovery should run again. While nothing changes, no code runs.
//!
//! ```no_run
//! # fn main() -> std::io::Result<()> {
//! use ontime_tenants::{Rules, Sources, discover, watch::Watcher};
//! let (sources, rules) = (Sources::host(), Rules::default());
//! let mut watcher = Watcher::new(&sources)?;
//! loop {
//!     let found = discover(&sources, &rules);
//!     watcher.follow(&found, &rules)?;
//!     // ... apply ...
//!     while watcher.wait(None)?.is_none() {}
//! }
//! # }
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, epoll};
use rustix::fs::{CWD, inotify};
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use crate::budget::{Item, limits};
use crate::class::{Class, Policy};
use crate::connector::{Connector, Event};
use crate::container;
use crate::container::ancestors;
use crate::discover::Discovery;
use crate::files;
use crate::host::Sources;
use crate::model::{Kind, Tenant, TenantThread, ThreadRole};
use crate::problem::{Problem, ProblemKind};
use crate::proc;
use crate::remedy;
use crate::rules::Rules;
use crate::vmm::{self, Vmm};

/// Delay from the first sign of a change to the notification: threads of one VM appear within this time.
pub(crate) const SETTLE: Duration = Duration::from_millis(30);
/// Least time between two notifications, so that many changes cost a bounded share of a CPU.
pub const SPACING: Duration = Duration::from_millis(200);
/// Interval of additional discoveries if process events are available.
pub const RESCAN: Duration = Duration::from_secs(60);
/// Interval of discoveries without process events.
pub(crate) const RESCAN_BLIND: Duration = Duration::from_secs(5);
/// Requirements for process events.
const PROC_EVENTS: &str = "for events, run as root in the host's own namespaces, on a kernel with CONFIG_PROC_EVENTS";

/// Why there are no events, and what the watcher does instead.
fn without_events(why: &str, error: &io::Error) -> String {
    format!("{why} ({error}); looking every {RESCAN_BLIND:?} instead; {PROC_EVENTS}")
}

/// Delay before the next discovery if a VM's vCPUs could not be identified, because the VM may just be starting. Each
/// further delay is twice as long.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Why discovery should run again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    /// No event for [`RESCAN`] or [`RESCAN_BLIND`].
    Rescan,
    /// An event that concerns tenants.
    Seen,
    /// Events were lost, so anything may have changed.
    Lost,
}

/// A VM whose vCPUs are identified by their threads' names. QEMU constantly creates and ends threads for disk reads,
/// which have no place. Only threads that have, or may get, a place are relevant.
#[derive(Debug)]
struct Named {
    vmm: Vmm,
    /// Its known threads that have a place.
    placed: BTreeSet<i32>,
}

/// Tells when to run discovery again. Its descriptor is readable when [`Watcher::take`] has something to process.
#[derive(Debug)]
pub struct Watcher {
    epoll: OwnedFd,
    timer: OwnedFd,
    inotify: OwnedFd,
    connector: Option<Connector>,
    /// Why there is no connector.
    rescan_reason: Option<String>,
    /// Why `libvirt`, or the directory above it, is not watched although it is there.
    unwatched: Option<String>,
    proc: PathBuf,
    libvirt: PathBuf,
    /// Whether `libvirt` itself is watched, and not a directory above it.
    libvirt_there: bool,
    followed: BTreeSet<i32>,
    named: BTreeMap<i32, Named>,
    bulk_cgroups: BTreeSet<String>,
    rules: Rules,
    /// Whether a change was seen and is settling.
    gathering: bool,
    pending: Option<Change>,
    last_told: Option<Instant>,
    next_rescan: Instant,
    look_again: Duration,
}

impl Watcher {
    /// Starts watching. Without process events (not root, or not in the host's namespaces) the watcher only rescans:
    /// see [`Watcher::rescan_reasons`].
    ///
    /// # Errors
    /// If the process cannot get another epoll, timerfd or inotify instance.
    pub fn new(sources: &Sources) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        let inotify = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
        let (connector, rescan_reason) = match Connector::open() {
            Ok(connector) => (Some(connector), None),
            Err(error) => (None, Some(without_events("there are no process events", &error))),
        };
        epoll::add(&epoll, &timer, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        let mut watcher = Self {
            epoll,
            timer,
            inotify,
            connector,
            rescan_reason,
            unwatched: None,
            proc: sources.proc.clone(),
            libvirt: sources.libvirt.clone(),
            libvirt_there: false,
            followed: BTreeSet::new(),
            named: BTreeMap::new(),
            bulk_cgroups: BTreeSet::new(),
            rules: Rules::default(),
            gathering: true,
            pending: None,
            last_told: None,
            next_rescan: Instant::now(),
            look_again: LOOK_AGAIN,
        };
        watcher.watch_libvirt();
        watcher.tell(Change::Rescan)?;
        watcher.last_told = None;
        Ok(watcher)
    }

    /// Why some changes are found only by rescans, if so. A reason may also come later.
    pub fn rescan_reasons(&self) -> impl Iterator<Item = &str> {
        [&self.rescan_reason, &self.unwatched].into_iter().flatten().map(String::as_str)
    }

    /// Sets the result and the rules of the last discovery, which define the processes to follow. Call it after every
    /// discovery.
    ///
    /// # Errors
    /// The timer's error.
    pub fn follow(&mut self, found: &Discovery, rules: &Rules) -> io::Result<()> {
        self.rules = rules.clone();
        // Threads of bulk containers are irrelevant.
        let matters = |kind: Kind, class: Class| kind != Kind::Container || class != Class::Bulk;
        let (followed, ignored): (Vec<_>, Vec<_>) =
            found.tenants.iter().partition(|tenant| matters(tenant.kind, tenant.class));
        let threads = followed.iter().flat_map(|tenant| &tenant.threads);
        let processes: BTreeSet<i32> =
            threads.map(|thread| thread.id.pid).chain(followed.iter().map(|tenant| tenant.process.pid)).collect();
        self.named = followed.iter().filter_map(|tenant| Some((tenant.process.pid, self.named(tenant)?))).collect();
        self.bulk_cgroups = ignored.iter().filter_map(|tenant| tenant.cgroup.clone()).collect();
        let mut unheard = false;
        if processes != self.followed {
            if let Some(connector) = &self.connector {
                if let Err(error) = connector.follow(&processes) {
                    self.rescan_reason = Some(format!(
                        "process events cannot be filtered ({error}); looking anew now and then; {PROC_EVENTS}"
                    ));
                    self.connector = None;
                }
            }
            unheard = processes.difference(&self.followed).any(|pid| self.changed(*pid, found));
            self.followed = processes;
        }
        if unheard {
            return self.rescan_in(SPACING);
        }
        let unnamed = |problem: &Problem| matches!(problem.kind, ProblemKind::VcpusUnnamed { .. });
        if !found.problems.iter().any(unnamed) {
            self.look_again = LOOK_AGAIN;
        } else {
            self.rescan_in(self.look_again.min(self.rescan()))?;
            self.look_again = (self.look_again * 2).min(RESCAN);
        }
        Ok(())
    }

    fn named(&self, tenant: &Tenant) -> Option<Named> {
        let vmm = match tenant.kind {
            Kind::Libvirt | Kind::Qemu => Vmm::Qemu,
            Kind::Vmm => self.vmm(tenant.process.pid)?,
            Kind::Container => return None,
        };
        let mut vcpus = tenant.threads.iter().filter(|thread| matches!(thread.role, ThreadRole::Vcpu(_))).peekable();
        let tells = |thread: &TenantThread| matches!(vmm.role_of_name(&thread.comm), ThreadRole::Vcpu(_));
        // If the vCPUs are identified by other means, any thread may be one.
        if vcpus.peek().is_none() || !vcpus.all(tells) {
            return None;
        }
        let own = tenant.threads.iter().filter(|thread| thread.id.pid == tenant.process.pid);
        let placed = own.filter(|thread| !is_bystander(thread.role, thread.policy)).map(|thread| thread.id.tid);
        Some(Named { vmm, placed: placed.collect() })
    }

    /// Whether a newly followed process has other threads than discovery found: there were no events for it yet.
    fn changed(&self, pid: i32, found: &Discovery) -> bool {
        let threads = found.tenants.iter().flat_map(|tenant| &tenant.threads);
        let known: BTreeSet<i32> = threads.filter(|thread| thread.id.pid == pid).map(|thread| thread.id.tid).collect();
        let Ok(tasks) = files::directory(self.proc.join(pid.to_string()).join("task")) else { return true };
        let (tasks, _) = files::first_numbers(&tasks, limits(Item::Threads).process);
        tasks.into_iter().collect::<BTreeSet<_>>() != known
    }

    /// Waits until discovery should run again, or until `timeout`.
    ///
    /// # Errors
    /// The error of the wait.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<Option<Change>> {
        let until = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            let left = until.map(|until| timespec(until.saturating_duration_since(Instant::now())));
            let mut polled = [PollFd::new(&self.epoll, PollFlags::IN)];
            match rustix::event::poll(&mut polled, left.as_ref()) {
                Ok(0) => return Ok(None),
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            if let Some(change) = self.take()? {
                return Ok(Some(change));
            }
        }
    }

    /// Processes what made the descriptor readable. Returns a change after it has settled. Never blocks.
    ///
    /// The first event disables the event sources for [`SETTLE`]; then all events are processed together. So this wakes
    /// up at most once in that time, however many programs start on the host.
    ///
    /// # Errors
    /// Errors of the descriptors.
    pub fn take(&mut self) -> io::Result<Option<Change>> {
        let due = self.timer_is_due()?;
        if !self.gathering {
            if due {
                return self.tell(Change::Rescan).map(Some);
            }
            self.listen(false)?;
            self.arm(SETTLE)?;
            return Ok(None);
        }
        if !due {
            return Ok(None);
        }
        let seen = [self.libvirt_change(), self.process_change()];
        self.pending = seen.into_iter().flatten().chain(self.pending).max();
        let too_soon = SPACING.saturating_sub(self.last_told.map_or(SPACING, |told| told.elapsed()));
        match self.pending {
            Some(_) if !too_soon.is_zero() => self.arm(too_soon)?,
            Some(change) => return self.tell(change).map(Some),
            None => {
                self.listen(true)?;
                self.arm(self.next_rescan.saturating_duration_since(Instant::now()).max(SETTLE))?;
            }
        }
        Ok(None)
    }

    fn tell(&mut self, change: Change) -> io::Result<Change> {
        self.pending = None;
        self.last_told = Some(Instant::now());
        self.listen(true)?;
        self.rescan_in(self.rescan())?;
        Ok(change)
    }

    fn rescan(&self) -> Duration {
        if self.connector.is_some() { RESCAN } else { RESCAN_BLIND }
    }

    /// While a change settles, the timer belongs to it; the timer is armed for the rescan afterwards.
    fn rescan_in(&mut self, time: Duration) -> io::Result<()> {
        self.next_rescan = Instant::now() + time;
        if self.gathering { Ok(()) } else { self.arm(time) }
    }

    /// Enables or disables the event sources.
    fn listen(&mut self, open: bool) -> io::Result<()> {
        if self.gathering != open {
            return Ok(());
        }
        self.gathering = !open;
        for fd in [Some(self.inotify.as_fd()), self.connector.as_ref().map(AsFd::as_fd)].into_iter().flatten() {
            if open {
                epoll::add(&self.epoll, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
            } else {
                epoll::delete(&self.epoll, fd)?;
            }
        }
        Ok(())
    }

    fn arm(&self, after: Duration) -> io::Result<()> {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let spec = Itimerspec { it_interval: zero, it_value: timespec(after) };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec)?;
        Ok(())
    }

    fn timer_is_due(&self) -> io::Result<bool> {
        let mut count = [0u8; 8];
        match rustix::io::read(&self.timer, &mut count) {
            Ok(_) => Ok(true),
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Watches libvirt's directory, or the nearest existing directory above it until libvirt creates the next one.
    fn watch_libvirt(&mut self) {
        use inotify::WatchFlags as W;
        let content =
            W::CREATE | W::DELETE | W::MOVED_FROM | W::MOVED_TO | W::CLOSE_WRITE | W::DELETE_SELF | W::ONLYDIR;
        let name = W::CREATE | W::MOVED_TO | W::DELETE_SELF | W::ONLYDIR;
        let mut unwatched = None;
        let mut watch = |dir: &Path, flags| match inotify::add_watch(&self.inotify, dir, flags) {
            Ok(_) => true,
            Err(Errno::NOENT | Errno::NOTDIR) => false,
            Err(error) => {
                unwatched.get_or_insert_with(|| unwatchable(dir, error));
                false
            }
        };
        self.libvirt_there = watch(&self.libvirt, content);
        if !self.libvirt_there {
            let _ = self.libvirt.ancestors().skip(1).find(|dir| watch(dir, name));
        }
        self.unwatched = unwatched;
    }

    fn libvirt_change(&mut self) -> Option<Change> {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = inotify::Reader::new(&self.inotify, &mut buffer);
        let (mut change, mut moved) = (None, false);
        while let Ok(event) = reader.next() {
            let flags = event.events();
            if flags.contains(inotify::ReadFlags::QUEUE_OVERFLOW) {
                change = Some(Change::Lost);
            } else if flags.intersects(inotify::ReadFlags::DELETE_SELF | inotify::ReadFlags::IGNORED) {
                moved = true;
            } else if self.libvirt_there {
                let name = event.file_name().map(|name| name.to_bytes());
                let status = name.is_none_or(|name| name.ends_with(b".xml") || name.ends_with(b".pid"));
                change = change.or(status.then_some(Change::Seen));
            } else {
                moved = true;
            }
        }
        if moved {
            self.watch_libvirt();
            change = change.or(self.libvirt_there.then_some(Change::Seen));
        }
        change
    }

    fn process_change(&mut self) -> Option<Change> {
        let events = match self.connector.as_ref()?.take() {
            Ok(Some(events)) => events,
            Ok(None) => return Some(Change::Lost),
            Err(error) => {
                self.rescan_reason = Some(without_events("process events ended", &error));
                self.connector = None;
                return Some(Change::Lost);
            }
        };
        let news = self.pending.is_none() && events.iter().any(|event| self.concerns(*event));
        news.then_some(Change::Seen)
    }

    fn concerns(&self, event: Event) -> bool {
        match event {
            Event::Fork { parent: KTHREADD, tid, .. } => self.is_vms_kernel_thread(tid),
            Event::Fork { child, tid, .. } if child != tid && self.named.contains_key(&child) => {
                self.matters(child, tid)
            }
            Event::Fork { parent, child, .. } => self.followed.contains(&parent) || self.followed.contains(&child),
            Event::Comm { pid, tid } => {
                self.followed.contains(&pid) && (self.has_place(pid, tid) || self.matters(pid, tid))
            }
            Event::Exit { pid, tid } => self.followed.contains(&pid) && self.has_place(pid, tid),
            Event::Exec { pid } => self.followed.contains(&pid) || self.is_new_tenant(pid),
        }
    }

    /// Whether discovery found that a thread has a place.
    fn has_place(&self, pid: i32, tid: i32) -> bool {
        tid == pid || self.named.get(&pid).is_none_or(|named| named.placed.contains(&tid))
    }

    /// Whether a thread has a place now. Until it sets its name it has its creator's; the renaming is an event, too.
    fn matters(&self, pid: i32, tid: i32) -> bool {
        let Some(named) = self.named.get(&pid) else { return true };
        match files::read_at(CWD, self.proc.join(format!("{pid}/task/{tid}/stat"))) {
            Ok(text) => proc::parse_stat(&text).is_none_or(|stat| !is_bystander(named.vmm.role(&stat), stat.policy)),
            // It has already ended.
            Err(error) => !matches!(error, Errno::NOENT | Errno::SRCH),
        }
    }

    fn vmm(&self, pid: i32) -> Option<Vmm> {
        let executable = files::link_at(CWD, self.proc.join(pid.to_string()).join("exe")).ok()?;
        Vmm::of_executable(&executable).map(|(vmm, _)| vmm)
    }

    fn is_vms_kernel_thread(&self, tid: i32) -> bool {
        match std::fs::read(self.proc.join(tid.to_string()).join("comm")) {
            Ok(comm) => vmm::kernel_thread(proc::printable(comm.trim_ascii_end()).as_str())
                .is_some_and(|(role, _)| matches!(role, ThreadRole::Vhost | ThreadRole::KvmPit)),
            Err(error) => !has_ended(&error),
        }
    }

    fn is_new_tenant(&self, pid: i32) -> bool {
        let dir = self.proc.join(pid.to_string());
        if self.vmm(pid).is_some() {
            return true;
        }
        let text = match std::fs::read(dir.join("cgroup")) {
            Ok(text) => text,
            Err(error) => return !has_ended(&error),
        };
        proc::parse_cgroup(&text).is_some_and(|path| match container::of_path(&path) {
            Some(new) => !self.bulk_cgroups.contains(&new.cgroup),
            None => ancestors(&path).any(|part| self.rules.names_cgroup(part) && !self.bulk_cgroups.contains(part)),
        })
    }
}

/// Whether a process's file could not be read because the process has ended, and not for another reason.
fn has_ended(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// Why changes in a directory are not told.
fn unwatchable(dir: &Path, error: Errno) -> String {
    let remedy = match error {
        Errno::NOSPC => "raise the host's limit of watches (sysctl fs.inotify.max_user_watches)",
        _ => remedy(&error.into()),
    };
    let dir = dir.display();
    format!("{dir}: cannot be watched ({error}); changes of libvirt's domains may be seen {RESCAN:?} late; {remedy}")
}

const KTHREADD: i32 = 2;

/// Whether a monitor's thread, other than its main thread, needs no change: it has no place and a policy with which
/// threads start. (A thread created while its creator is paused is at SCHED_IDLE and needs a change; at real-time
/// priority it is capped.)
fn is_bystander(role: ThreadRole, policy: Policy) -> bool {
    role == ThreadRole::Emulator && matches!(policy, Policy::Other { .. } | Policy::Ext { .. } | Policy::Batch { .. })
}

impl AsFd for Watcher {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: duration.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: duration.subsec_nanos().into() }
}

#[cfg(test)]
#[path = "watch_tests.rs"]
mod tests;
