//! Notification when tenants or their threads appear or disappear, without polling.
//!
//! Input: process events from the kernel ([`crate::connector`]) and changes in libvirt's directory (inotify). Output: a
//! descriptor that becomes readable when discovery should run again, and the new processes of real-time tenants, which
//! need not wait for that ([`Watcher::newcomers`]). While nothing changes, no code runs.
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
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, epoll};
use rustix::fs::{CWD, inotify};
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use crate::budget::{Account, Item, limits};
use crate::class::{Class, Policy};
use crate::connector::{self, Connector, Event};
use crate::container;
use crate::container::ancestors;
use crate::discover::Discovery;
use crate::files;
use crate::host::Sources;
use crate::model::{Kind, Tenant, TenantThread, ThreadRole};
use crate::problem::{Problem, ProblemKind};
use crate::proc;
use crate::remedy;
use crate::rules::{Namer, Rules};
use crate::turns::Turns;
use crate::vmm::{self, Vmm};

/// Delay from the first sign of a change to the notification: threads of one VM appear within this time.
pub(crate) const SETTLE: Duration = Duration::from_millis(30);
/// The time from one reading of events to the next: a bound on wake-ups, however many programs start on the host.
const GAP: Duration = Duration::from_millis(2);
/// Most events that are looked into in one reading.
const LOOKS: usize = 64;
/// Most events of one owner that wait for a look, and most kernel's threads that wait for their names. With more,
/// discovery runs.
const WAITING: usize = 256;
/// Most events of all owners that wait for a look.
const WAITING_ALL: usize = 4096;
/// Looks into the events of one owner, and at the new processes, take at most one part in this of the time, once they
/// have taken [`BURST`].
const PART: u32 = 10;
const BURST: Duration = Duration::from_millis(100);
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

/// An event that waits for a look, and when it came.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    event: Event,
    came: Instant,
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
    /// Why not all processes of tenants are followed.
    unfollowed: Option<String>,
    followed: BTreeSet<i32>,
    /// The followed processes of real-time tenants, and the account of each.
    rt: BTreeMap<i32, Account>,
    named: BTreeMap<i32, Named>,
    bulk_cgroups: BTreeSet<String>,
    rules: Rules,
    /// Whether the event sources wake the watcher up.
    listening: bool,
    /// When events were last read.
    read_at: Instant,
    /// Until when no more events are read, because there were some, or because some have had no look yet.
    rests_until: Instant,
    /// Events that wait for a look. The owner of a process has its turn.
    turns: Turns<Account, Waiting>,
    /// New threads of the kernel that still had their creators' names.
    unnamed: Vec<(Account, Waiting)>,
    /// New processes and kernel threads of real-time tenants, or that may become such.
    news: BTreeMap<i32, Account>,
    /// What was seen, and when.
    pending: Option<(Change, Instant)>,
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
        let now = Instant::now();
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
            unfollowed: None,
            followed: BTreeSet::new(),
            rt: BTreeMap::new(),
            named: BTreeMap::new(),
            bulk_cgroups: BTreeSet::new(),
            rules: Rules::default(),
            listening: false,
            read_at: now,
            rests_until: now,
            turns: Turns::new(PART, BURST, None),
            unnamed: Vec::new(),
            news: BTreeMap::new(),
            pending: None,
            last_told: None,
            next_rescan: now,
            look_again: LOOK_AGAIN,
        };
        watcher.next_rescan += watcher.rescan();
        watcher.watch_libvirt();
        watcher.arm(now)?;
        Ok(watcher)
    }

    /// Why some changes are found only by rescans, if so. A reason may also come later.
    pub fn rescan_reasons(&self) -> impl Iterator<Item = &str> {
        [&self.rescan_reason, &self.unwatched, &self.unfollowed].into_iter().flatten().map(String::as_str)
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
        let is_rt = |tenant: &&&Tenant| tenant.class != Class::Bulk;
        let account =
            |tenant: &Tenant| Account::Container(tenant.cgroup.clone().unwrap_or_else(|| tenant.name.clone()));
        let processes_of = |tenant: &Tenant| {
            let threads = tenant.threads.iter().map(|thread| thread.id.pid);
            threads.chain([tenant.process.pid]).collect::<BTreeSet<i32>>()
        };
        let of = |tenant: &&Tenant| {
            let account = account(tenant);
            processes_of(tenant).into_iter().map(move |pid| (pid, account.clone())).collect::<Vec<_>>()
        };
        self.rt = followed.iter().filter(is_rt).flat_map(of).collect();
        let mut others: BTreeMap<Account, BTreeSet<i32>> = BTreeMap::new();
        for tenant in followed.iter().filter(|tenant| !is_rt(tenant)) {
            let by = match tenant.namer {
                Namer::User(_) => Account::User(tenant.owner),
                Namer::Container => account(tenant),
            };
            others.entry(by).or_default().extend(processes_of(tenant));
        }
        let processes = connector::followed(self.rt.keys().copied().collect(), &others);
        let is_left_out = |pid: &i32| !processes.contains(pid);
        // The text has no number that differs from pass to pass: each new text is logged.
        let has_room = !others.values().flatten().any(is_left_out);
        self.unfollowed = (self.connector.is_some() && !has_room).then(|| {
            format!(
                "bulk VMs have more processes than the kernel's filter of process events takes (with those of \
                 real-time tenants {}), so changes in some of them are noticed every {RESCAN:?}; stop VMs that are \
                 not needed",
                connector::FOLLOWED_MAX
            )
        });
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
            let changed: Vec<i32> = processes.difference(&self.followed).copied().collect();
            let changed: Vec<i32> = changed.into_iter().filter(|pid| self.changed(*pid, found)).collect();
            unheard = !changed.is_empty();
            self.news.extend(changed.iter().filter_map(|pid| Some((*pid, self.rt.get(pid)?.clone()))));
            self.followed = processes;
        }
        if unheard {
            return self.rescan_in(SPACING);
        }
        let unnamed = |problem: &Problem| matches!(problem.kind, ProblemKind::VcpusUnnamed { .. });
        if !found.problems.iter().any(unnamed) {
            self.look_again = LOOK_AGAIN;
        } else if self.next_rescan > Instant::now() + self.look_again.min(self.rescan()) {
            // The last delay is over.
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
    /// # Errors
    /// Errors of the descriptors.
    pub fn take(&mut self) -> io::Result<Option<Change>> {
        self.read_timer()?;
        self.read(Instant::now());
        let now = Instant::now();
        let told = match self.pending {
            Some((change, seen)) => (self.tells_at(seen) <= now).then_some(change),
            None => (self.next_rescan <= now).then_some(Change::Rescan),
        };
        if told.is_some() {
            (self.pending, self.last_told) = (None, Some(now));
            self.next_rescan = now + self.rescan();
        }
        self.arm(now)?;
        Ok(told)
    }

    /// Reads the events since the last time, unless that was within [`GAP`]. Changes are told by [`Self::take`], for
    /// which the descriptor becomes readable.
    ///
    /// # Errors
    /// Errors of the descriptors.
    pub fn gather(&mut self) -> io::Result<()> {
        let now = Instant::now();
        if now < (self.read_at + GAP).max(self.rests_until) {
            return Ok(());
        }
        self.read(now);
        self.arm(Instant::now())
    }

    fn read(&mut self, now: Instant) {
        if now < self.rests_until {
            return;
        }
        self.read_at = now;
        let changes = [self.libvirt_change(), self.process_change(now)];
        if changes.iter().any(Option::is_some) {
            self.rests_until = now + GAP;
        }
        changes.into_iter().flatten().for_each(|change| self.notice(change, now));
        self.look_into(now);
    }

    /// New processes and kernel threads that are, or may be, of real-time tenants, each with the account to which the
    /// look at it is to be charged ([`Self::charge`]). A number may mean another process by now.
    pub fn newcomers(&mut self) -> BTreeMap<i32, Account> {
        std::mem::take(&mut self.news)
    }

    /// A look at newcomers of these accounts has taken this long.
    pub fn charge<'a>(&mut self, accounts: impl Iterator<Item = &'a Account>, took: Duration) {
        let (accounts, now): (BTreeSet<&Account>, _) = (accounts.collect(), Instant::now());
        let each = took / u32::try_from(accounts.len().max(1)).unwrap_or(u32::MAX);
        accounts.into_iter().for_each(|account| self.turns.charge(account.clone(), each, now));
        // However many owners there are, looks at their newcomers leave half of the time to the caller's other work.
        self.rests_until = self.rests_until.max(now + took);
    }

    /// Looks into events by turns.
    fn look_into(&mut self, now: Instant) {
        for (owner, waiting) in std::mem::take(&mut self.unnamed) {
            self.enqueue(owner, waiting);
        }
        for _ in 0..LOOKS {
            let Some((owner, waiting)) = self.turns.next(now) else { break };
            let Waiting { event, came } = waiting;
            let start = Instant::now();
            if self.concerns(event) {
                self.notice(Change::Seen, now);
                self.news.extend(self.newcomer(event).map(|pid| (pid, owner.clone())));
            } else if self.is_unnamed(event) && now < came + SETTLE {
                if self.unnamed.len() < WAITING {
                    self.unnamed.push((owner.clone(), waiting));
                } else {
                    self.notice(Change::Seen, now);
                }
            }
            self.turns.charge(owner, start.elapsed(), now);
        }
        if !self.unnamed.is_empty() || self.turns.due_in(now).is_some_and(|wait| wait.is_zero()) {
            self.rests_until = now + GAP;
        }
    }

    fn enqueue(&mut self, owner: Account, waiting: Waiting) {
        let (own, all) = self.turns.waiting(&owner);
        if own < WAITING && all < WAITING_ALL {
            self.turns.push(owner, waiting);
        } else {
            self.notice(Change::Seen, waiting.came);
        }
    }

    fn notice(&mut self, change: Change, now: Instant) {
        let (before, since) = self.pending.unwrap_or((change, now));
        self.pending = Some((before.max(change), since));
    }

    /// When a change that was seen at this time is told.
    fn tells_at(&self, seen: Instant) -> Instant {
        (seen + SETTLE).max(self.last_told.map_or(seen, |told| told + SPACING))
    }

    fn rescan(&self) -> Duration {
        if self.connector.is_some() { RESCAN } else { RESCAN_BLIND }
    }

    fn rescan_in(&mut self, time: Duration) -> io::Result<()> {
        let now = Instant::now();
        self.next_rescan = now + time;
        self.arm(now)
    }

    /// Sets the timer to the next thing to do. While events are not read, their sources do not wake the
    /// caller up.
    fn arm(&mut self, now: Instant) -> io::Result<()> {
        let rests = now < self.rests_until;
        let turn = if self.unnamed.is_empty() { self.turns.due_in(now).map(|wait| now + wait) } else { Some(now) };
        let gather = turn.or(rests.then_some(now)).map(|at| at.max(self.rests_until));
        let tell = self.pending.map_or(self.next_rescan, |(_, seen)| self.tells_at(seen));
        self.listen(!rests)?;
        // Zero would stop the timer.
        let wait = gather.map_or(tell, |at| at.min(tell)).saturating_duration_since(now).max(Duration::from_nanos(1));
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let spec = Itimerspec { it_interval: zero, it_value: timespec(wait) };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec)?;
        Ok(())
    }

    /// Enables or disables the event sources.
    fn listen(&mut self, open: bool) -> io::Result<()> {
        if self.listening == open {
            return Ok(());
        }
        self.listening = open;
        for fd in [Some(self.inotify.as_fd()), self.connector.as_ref().map(AsFd::as_fd)].into_iter().flatten() {
            if open {
                epoll::add(&self.epoll, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
            } else {
                epoll::delete(&self.epoll, fd)?;
            }
        }
        Ok(())
    }

    fn read_timer(&self) -> io::Result<()> {
        let mut count = [0u8; 8];
        match rustix::io::read(&self.timer, &mut count) {
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
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

    /// Reads process events: those that need a look wait for it.
    fn process_change(&mut self, now: Instant) -> Option<Change> {
        let events = match self.connector.as_ref()?.take() {
            Ok(Some(events)) => events,
            Ok(None) => return Some(Change::Lost),
            Err(error) => {
                self.rescan_reason = Some(without_events("process events ended", &error));
                self.connector = None;
                return Some(Change::Lost);
            }
        };
        if events.is_empty() {
            return None;
        }
        self.rests_until = now + GAP;
        self.sort(events, now)
    }

    /// Has each event that needs a look wait for its owner's turn. To find the owner takes time, too, which counts as
    /// that owner's. However many owners there are, it leaves half of the time to the caller's other work.
    fn sort(&mut self, events: Vec<Event>, now: Instant) -> Option<Change> {
        let (mut seen, start) = (None, Instant::now());
        for event in events {
            let before = Instant::now();
            match self.owner(event) {
                Some(owner) => {
                    self.turns.charge(owner.clone(), before.elapsed(), now);
                    self.enqueue(owner, Waiting { event, came: now });
                }
                None => seen = seen.or(self.concerns(event).then_some(Change::Seen)),
            }
        }
        self.rests_until = self.rests_until.max(Instant::now() + start.elapsed());
        seen
    }

    /// The owner to which a look into an event is charged. None: it needs no look.
    fn owner(&self, event: Event) -> Option<Account> {
        let pid = match event {
            Event::Fork { parent: KTHREADD, .. } => return Some(Account::System),
            Event::Fork { child: pid, .. } | Event::Comm { pid, .. } | Event::Exec { pid } => pid,
            Event::Exit { .. } => return None,
        };
        Some(self.rt.get(&pid).cloned().unwrap_or_else(|| self.account(pid)))
    }

    /// The container of a process, or else its user. A container's root may take any user's number. In a user's slice,
    /// which no process of that user can leave, subordinate numbers and setuid programs are that user's, too.
    fn account(&self, pid: i32) -> Account {
        let dir = self.proc.join(pid.to_string());
        let path = std::fs::read(dir.join("cgroup")).ok().and_then(|text| proc::parse_cgroup(&text));
        let path = path.as_deref().unwrap_or("/");
        match (container::owner_of_path(path), container::of_path(path)) {
            (0, Some(container)) => Account::Container(container.cgroup),
            (0, None) => match std::fs::metadata(&dir).map_or(u32::MAX, |dir| dir.uid()) {
                0 => Account::System,
                user => Account::User(user),
            },
            (user, _) => Account::User(user),
        }
    }

    /// The process or kernel thread to which an event that concerns tenants calls for a look.
    fn newcomer(&self, event: Event) -> Option<i32> {
        match event {
            Event::Fork { parent: KTHREADD, tid, .. } => Some(tid),
            Event::Fork { parent, child, .. } => {
                (self.rt.contains_key(&parent) || self.rt.contains_key(&child)).then_some(child)
            }
            Event::Comm { pid, .. } => self.rt.contains_key(&pid).then_some(pid),
            Event::Exec { pid } => Some(pid),
            Event::Exit { .. } => None,
        }
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

    /// Whether a new thread of the kernel still has its creator's name. There is no event when it gets its own.
    fn is_unnamed(&self, event: Event) -> bool {
        let Event::Fork { parent, child, tid } = event else { return false };
        let text = files::read_at(CWD, self.proc.join(format!("{child}/task/{tid}/stat")));
        let stat = text.ok().and_then(|text| proc::parse_stat(&text));
        stat.is_some_and(|stat| match parent {
            KTHREADD => stat.comm == "kthreadd",
            _ => stat.is_user_worker() && !stat.comm.starts_with("iou-"),
        })
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
