//! The census: every thread of a program on this host that has a real-time policy, whichever program set it. This
//! includes tenants' threads, and threads of services, of users with an `rtprio` limit, and of rtkit's clients.
//!
//! The kernel's protections may be off only while none of these threads can monopolize a CPU ([`Census::uncapped`]).
//! All online CPUs lose their protections together, so a thread's affinity makes no difference. A change of policy
//! causes no event, so the daemon takes a census in each pass, and every [`EVERY`] while protections are off.
//!
//! In: `/proc`, and each thread's policy (one system call per thread; files are read for real-time threads only). Out:
//! [`RealTime`] threads, and which of them are not held to anything.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use ontime_tenants::container;
use ontime_tenants::proc::{parse_cgroup, parse_stat, parse_uids};
use ontime_tenants::{Policy, ThreadId, limit_waits, remedy};

/// The time from the end of a census to the next one while protections are off, and its minimum as a multiple of what a
/// census costs.
const EVERY: Duration = Duration::from_secs(1);
const COSTS: u32 = 100;
/// The most threads of a host whose policy is read: about 100 ms. With more threads protections stay on.
const THREADS_MAX: usize = 1 << 17;

/// A thread of a program with a real-time policy: SCHED_FIFO, SCHED_RR or SCHED_DEADLINE.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RealTime {
    pub id: ThreadId,
    /// Its name, which its program chose, made safe for a terminal.
    pub comm: String,
    pub policy: Policy,
    /// The user that its process belongs to.
    pub user: Option<u32>,
    /// Its cgroup v2 path.
    pub cgroup: Option<String>,
}

impl fmt::Display for RealTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, comm, policy, user, cgroup } = self;
        write!(f, "thread {} ({comm}) of process {} has policy {policy}", id.tid, id.pid)?;
        if let Some(user) = user {
            write!(f, ", user {user}")?;
        }
        write!(f, ", cgroup {}", cgroup.as_deref().unwrap_or("unknown"))
    }
}

impl RealTime {
    /// Whether the cap watcher, at this priority, preempts the thread.
    fn is_below(&self, watcher: Policy) -> bool {
        matches!((priority(self.policy), priority(watcher)), (Some(own), Some(watcher)) if own < watcher)
    }

    /// Whether it belongs to the daemon's unit.
    pub(super) fn is_daemon(&self) -> bool {
        self.cgroup.as_deref() == Some("/system.slice/ontimed.service")
    }

    /// Whether it belongs to a device process.
    pub(super) fn is_device(&self) -> bool {
        is_device(self.cgroup.as_deref())
    }
}

/// Whether a cgroup is the unit of a device process (`ontime device`): a unit of root's service manager, which a
/// process cannot enter or leave by itself. A unit of a user's or a container's service manager does not count.
fn is_device(cgroup: Option<&str>) -> bool {
    let cgroup = cgroup.unwrap_or_default();
    let is_unit = |part: &str| part.starts_with("ontime-device@") && part.ends_with(".service");
    cgroup.starts_with("/system.slice/")
        && container::of_path(cgroup).is_none()
        && cgroup.split('/').skip(2).take(2).any(is_unit)
}

/// The priority of a thread at SCHED_FIFO or SCHED_RR.
pub(super) fn priority(policy: Policy) -> Option<u8> {
    match policy {
        Policy::Fifo(priority) | Policy::Rr(priority) => Some(priority),
        _ => None,
    }
}

/// The real-time threads of a host at one moment.
#[derive(Debug, Default)]
pub(super) struct Census {
    /// Threads of programs; the kernel's own threads are left out.
    pub threads: Vec<RealTime>,
    /// Why threads may be missing.
    pub incomplete: Option<String>,
    most: usize,
    taken: Option<Instant>,
    took: Duration,
}

/// What holds real-time threads.
#[derive(Debug)]
pub(super) struct ThreadHolders<'a> {
    /// Threads that are held to a runtime cap.
    pub capped: &'a BTreeSet<ThreadId>,
    /// Threads with reserved CPU time, which a pacer or the kernel holds to their budgets.
    pub reserved: &'a BTreeMap<ThreadId, Policy>,
    /// The policy and priority of the cap watcher.
    pub watcher: Policy,
    /// Cgroups whose threads need no cap, as configured by the administrator.
    pub uncapped: &'a [String],
}

impl Census {
    /// Reads every thread below `/proc`. `own`: processes of this daemon, which are left out. `most`: the number of
    /// real-time threads whose files are read. `between` is called before each process.
    pub(super) fn take(proc: &Path, own: &[u32], most: usize, between: &mut dyn FnMut()) -> Self {
        Self::of_processes(proc, own, most, between, |_| true)
    }

    /// The same of device processes only. It takes no longer where other processes have many threads, of which it reads
    /// none.
    pub(super) fn of_devices(proc: &Path, own: &[u32], most: usize, between: &mut dyn FnMut()) -> Self {
        Self::of_processes(proc, own, most, between, |process| is_device(limit_waits(|| cgroup(process)).as_deref()))
    }

    /// `wanted`: whether to read the threads of a process, by its directory.
    fn of_processes(
        proc: &Path,
        own: &[u32],
        most: usize,
        between: &mut dyn FnMut(),
        wanted: impl Fn(&Path) -> bool,
    ) -> Self {
        let start = Instant::now();
        let mut census = Self { most, ..Self::default() };
        let mut left = THREADS_MAX;
        match fs::read_dir(proc) {
            Ok(processes) => {
                for entry in processes {
                    let pid = match entry {
                        Ok(entry) => number(&entry),
                        Err(error) => {
                            census.misses(format!("{}: {error}; {}", proc.display(), remedy(&error)));
                            break;
                        }
                    };
                    let Some(pid) = pid else { continue };
                    between();
                    let process = proc.join(pid.to_string());
                    if !own.iter().any(|own| i64::from(*own) == i64::from(pid)) && wanted(&process) {
                        census.add_process(&process, pid, &mut left);
                    }
                }
            }
            Err(error) => census.incomplete = Some(format!("{}: {error}; {}", proc.display(), remedy(&error))),
        }
        if left == 0 {
            census.misses(format!(
                "this host has more than {THREADS_MAX} threads, of which some were not looked at; end processes that \
                 are not needed"
            ));
        }
        census.taken = Some(Instant::now());
        census.took = start.elapsed();
        census
    }

    /// A census of these threads.
    #[cfg(test)]
    pub(super) fn of(threads: Vec<RealTime>) -> Self {
        Self { threads, ..Self::default() }
    }

    fn add_process(&mut self, process: &Path, pid: i32, left: &mut usize) {
        // A process that has ended has no threads. Root may list the threads of any other.
        let tasks = match fs::read_dir(process.join("task")) {
            Ok(tasks) => tasks,
            Err(error) if is_gone(&error) => return,
            Err(error) => return self.misses(format!("process {pid}: {error}; {}", remedy(&error))),
        };
        for entry in tasks {
            let tid = match entry {
                Ok(entry) => number(&entry),
                Err(error) if is_gone(&error) => return,
                Err(error) => return self.misses(format!("process {pid}: {error}; {}", remedy(&error))),
            };
            let Some(tid) = tid else { continue };
            if *left == 0 {
                return;
            }
            *left -= 1;
            if !has_real_time(tid) {
                continue;
            }
            if self.threads.len() >= self.most {
                let most = self.most;
                return self.misses(format!(
                    "this host has more than {most} real-time threads, process {pid}'s among them; raise cap.threads \
                     in /etc/ontime/daemon.toml, or lower their priority"
                ));
            }
            match limit_waits(|| read(process, pid, tid)) {
                Ok(thread) => self.threads.extend(thread),
                Err(error) if is_gone(&error) => {}
                Err(error) => self.misses(format!("thread {tid} of process {pid}: {error}; {}", remedy(&error))),
            }
        }
    }

    /// Records the first reason why threads may be missing.
    fn misses(&mut self, why: String) {
        self.incomplete.get_or_insert(why);
    }

    /// When the next census is due while protections are off.
    pub(super) fn next(&self) -> Option<Instant> {
        self.taken.map(|taken| taken + EVERY.max(self.took * COSTS))
    }

    /// Changes the census to the state after an apply: threads that get a place have it, and threads that lose theirs
    /// are no longer real-time threads.
    pub(super) fn plan(&mut self, places: &BTreeMap<ThreadId, Policy>) {
        self.threads.retain_mut(|thread| {
            thread.policy = places.get(&thread.id).copied().unwrap_or(thread.policy);
            is_real_time(thread.policy)
        });
    }

    /// Why protections stay on because of these uncapped threads, and the remedy.
    pub(super) fn why_protected(&self, uncapped: &[String]) -> Option<(String, &'static str)> {
        if let Some(why) = &self.incomplete {
            return Some((format!("{why}; kernel protections stay on"), "the next pass looks again"));
        }
        let (first, others) = uncapped.split_first()?;
        let more = if others.is_empty() { String::new() } else { format!(" (and {} more)", others.len()) };
        let remedy = "make it a tenant, lower its priority, or name its cgroup in cap.uncapped of \
                      /etc/ontime/daemon.toml if you trust it";
        Some((format!("{first}{more}: no cap holds it, so kernel protections stay on"), remedy))
    }

    /// The threads that could monopolize a CPU: neither capped by a watcher above them, nor with reserved CPU time, nor
    /// in a listed cgroup.
    pub(super) fn uncapped<'a>(&'a self, held: &'a ThreadHolders<'a>) -> impl Iterator<Item = &'a RealTime> {
        self.threads.iter().filter(|thread| {
            let capped = held.capped.contains(&thread.id) && thread.is_below(held.watcher);
            let is_held = capped || held.reserved.contains_key(&thread.id);
            !is_held && !held.uncapped.iter().any(|named| is_in(thread.cgroup.as_deref(), named))
        })
    }
}

/// Whether a cgroup is `named` or lies below that. All cgroups lie below `/`; a host without cgroup v2 can list only
/// that.
fn is_in(cgroup: Option<&str>, named: &str) -> bool {
    let below = |cgroup: &str| cgroup.strip_prefix(named).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    named == "/" || cgroup.is_some_and(below)
}

fn number(entry: &fs::DirEntry) -> Option<i32> {
    entry.file_name().to_str()?.parse().ok()
}

fn is_real_time(policy: Policy) -> bool {
    matches!(policy, Policy::Fifo(_) | Policy::Rr(_) | Policy::Deadline { .. })
}

/// Whether a thread has a real-time policy. False for a thread that has ended.
fn has_real_time(tid: i32) -> bool {
    // SAFETY: takes a number, touches no memory of ours.
    let policy = unsafe { libc::sched_getscheduler(tid) };
    policy >= 0
        && matches!(policy & !libc::SCHED_RESET_ON_FORK, libc::SCHED_FIFO | libc::SCHED_RR | libc::SCHED_DEADLINE)
}

/// Whether the error means that the process or thread has ended, which gives ENOENT or ESRCH depending on the moment.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}

/// Reads a real-time thread. None for a thread that has ended, belongs to the kernel, or has another policy by now.
fn read(process: &Path, pid: i32, tid: i32) -> io::Result<Option<RealTime>> {
    let dir = process.join("task").join(tid.to_string());
    let stat = parse_stat(&fs::read(dir.join("stat"))?).ok_or(io::ErrorKind::InvalidData)?;
    if stat.is_kthread() || stat.has_ended() {
        return Ok(None);
    }
    Ok(is_real_time(stat.policy).then(|| RealTime {
        id: ThreadId { pid, tid, start_time: stat.start_time },
        comm: stat.comm,
        policy: stat.policy,
        user: fs::read(dir.join("status")).ok().and_then(|text| parse_uids(&text)).map(|(real, _)| real),
        cgroup: cgroup(&dir),
    }))
}

/// The cgroup v2 path of a process or a thread, by its directory.
fn cgroup(dir: &Path) -> Option<String> {
    fs::read(dir.join("cgroup")).ok().and_then(|text| parse_cgroup(&text))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    const WATCHER: Policy = Policy::Fifo(55);

    fn thread(tid: i32, policy: Policy, cgroup: Option<&str>) -> RealTime {
        RealTime {
            id: ThreadId { pid: 1, tid, start_time: 1 },
            comm: "x".to_owned(),
            policy,
            user: Some(1000),
            cgroup: cgroup.map(str::to_owned),
        }
    }

    fn uncapped(threads: Vec<RealTime>, capped: &[i32], listed: &[&str]) -> Vec<i32> {
        let capped = capped.iter().map(|tid| ThreadId { pid: 1, tid: *tid, start_time: 1 }).collect();
        let listed: Vec<String> = listed.iter().map(|path| (*path).to_owned()).collect();
        let census = Census::of(threads);
        let held = ThreadHolders { capped: &capped, reserved: &BTreeMap::new(), watcher: WATCHER, uncapped: &listed };
        census.uncapped(&held).map(|thread| thread.id.tid).collect()
    }

    #[test]
    fn a_thread_with_reserved_time_is_held_at_any_place() {
        let deadline = Policy::Deadline { runtime: 1, deadline: 2, period: 2 };
        let threads = [(1, Policy::Fifo(46)), (2, deadline), (3, Policy::Fifo(46))];
        let census = Census::of(threads.map(|(tid, policy)| thread(tid, policy, Some("/a"))).to_vec());
        let reserved = census.threads.iter().take(2).map(|thread| (thread.id, thread.policy)).collect();
        let held = ThreadHolders { capped: &BTreeSet::new(), reserved: &reserved, watcher: WATCHER, uncapped: &[] };
        let uncapped: Vec<i32> = census.uncapped(&held).map(|thread| thread.id.tid).collect();
        assert_eq!(uncapped, [3]);
    }

    #[test]
    fn a_thread_without_a_cap_that_no_list_names_is_uncapped() {
        let services = Some("/system.slice/a.service");
        let deadline = Policy::Deadline { runtime: 1, deadline: 2, period: 2 };
        let threads = || {
            vec![
                thread(1, Policy::Fifo(1), services),
                thread(2, Policy::Rr(99), Some("/system.slice/a.service/sub")),
                thread(3, Policy::Fifo(1), Some("/system.slice/a.service2")),
                thread(4, deadline, Some("/user.slice/user-1000.slice")),
                thread(5, Policy::Fifo(47), None),
            ]
        };
        assert_eq!(uncapped(threads(), &[], &[]), [1, 2, 3, 4, 5]);
        assert_eq!(uncapped(threads(), &[5], &["/system.slice/a.service"]), [3, 4]);
        assert!(uncapped(threads(), &[5], &["/system.slice", "/user.slice"]).is_empty());
        assert!(uncapped(threads(), &[], &["/"]).is_empty());
    }

    #[test]
    fn a_cap_holds_nothing_that_the_watcher_does_not_preempt() {
        let deadline = Policy::Deadline { runtime: 1, deadline: 2, period: 2 };
        for (policy, holds) in [
            (Policy::Fifo(54), true),
            (Policy::Rr(54), true),
            (Policy::Fifo(55), false),
            (Policy::Rr(60), false),
            (deadline, false),
        ] {
            let found = uncapped(vec![thread(7, policy, Some("/a"))], &[7], &[]);
            assert_eq!(found.is_empty(), holds, "{policy}");
        }
    }

    #[test]
    fn only_a_unit_of_its_own_makes_a_device_process() {
        let is = |cgroup| thread(1, Policy::Fifo(48), cgroup).is_device();
        assert!(is(Some("/system.slice/system-ontime\\x2ddevice.slice/ontime-device@web.service")));
        assert!(is(Some("/system.slice/ontime-device@web.service")));
        let container = format!("/system.slice/docker-{}.scope/ontime-device@x.service", "0123456789abcdef".repeat(4));
        for posing in [
            "/user.slice/ontime-device@web",
            "/user.slice/user-1000.slice/user@1000.service/app.slice/ontime-device@x.service",
            "/machine.slice/machine-box.scope/payload/system.slice/ontime-device@x.service",
            &container,
            "/system.slice/a.service/deep/ontime-device@x.service",
            "/",
        ] {
            assert!(!is(Some(posing)), "{posing}");
        }
        assert!(!is(None));
    }

    /// The daemon looks at them before it places threads, and no user's threads make that last longer.
    #[test]
    fn threads_of_device_processes_alone_are_read() {
        let proc = tempfile::tempdir().unwrap();
        let process = proc.path().join("77");
        fs::create_dir(&process).unwrap();
        // No directory, so that looking at the threads fails.
        fs::write(process.join("task"), "").unwrap();
        let devices = |own: &[u32], cgroup: &str| {
            fs::write(process.join("cgroup"), format!("0::{cgroup}\n")).unwrap();
            Census::of_devices(proc.path(), own, 100, &mut || ()).incomplete
        };
        for other in ["/", "/system.slice/a.service", "/user.slice/ontime-device@x.service"] {
            assert_eq!(devices(&[], other), None, "{other}");
            assert!(Census::take(proc.path(), &[], 100, &mut || ()).incomplete.is_some());
        }
        let unit = "/system.slice/ontime-device@x.service";
        assert!(devices(&[], unit).is_some_and(|why| why.starts_with("process 77: ")));
        assert_eq!(devices(&[77], unit), None);
    }

    /// A thread that cannot be read must not count as ended, because protections could go off while it runs.
    #[test]
    fn what_could_not_be_read_makes_a_census_incomplete() {
        let (tell, told) = channel();
        let (end, ended) = channel::<()>();
        let idle = std::thread::spawn(move || {
            let tid = rustix::thread::gettid().as_raw_nonzero().get();
            let own = ThreadId::of(i32::try_from(std::process::id()).unwrap(), tid).unwrap();
            tell.send((tid, own.set_policy(Policy::Fifo(2)).is_ok())).unwrap();
            let _ = ended.recv();
        });
        let (tid, may) = told.recv().unwrap();
        let proc = tempfile::tempdir().unwrap();
        let task = proc.path().join("77/task").join(tid.to_string());
        fs::create_dir_all(&task).unwrap();
        // The thread has ended: its files are gone.
        let gone = Census::take(proc.path(), &[], 100, &mut || ());
        // The thread exists, but its file cannot be read.
        fs::create_dir(task.join("stat")).unwrap();
        let unreadable = Census::take(proc.path(), &[], 100, &mut || ());
        fs::remove_dir(task.join("stat")).unwrap();
        fs::write(task.join("stat"), "nonsense").unwrap();
        let nonsense = Census::take(proc.path(), &[], 100, &mut || ());
        let missing = Census::take(&proc.path().join("none"), &[], 100, &mut || ());
        fs::remove_dir_all(&task).unwrap();
        std::os::unix::fs::symlink(format!("/proc/self/task/{tid}"), &task).unwrap();
        let too_many = Census::take(proc.path(), &[], 0, &mut || ());
        let not_too_many = Census::take(proc.path(), &[], 1, &mut || ());
        drop(end);
        idle.join().unwrap();
        // Whatever is missing is said with the remedy.
        let said = |census: &Census| census.why_protected(&[]).unwrap().0;
        assert!(said(&missing).contains("; make what is missing in that path"), "{}", said(&missing));
        if !may {
            println!("SKIPPED: this test needs the right to real-time priority");
            return;
        }
        assert_eq!(gone.incomplete, None);
        assert!(unreadable.incomplete.is_some() && nonsense.incomplete.is_some());
        assert!(said(&unreadable).contains("; name a file"), "{}", said(&unreadable));
        assert!(said(&too_many).contains("; raise cap.threads in"), "{}", said(&too_many));
        assert!(too_many.incomplete.is_some_and(|why| why.contains("more than 0 real-time threads")));
        assert_eq!((not_too_many.incomplete, not_too_many.threads.len()), (None, 1));
    }

    /// Uses a thread of this test, at SCHED_RR 3 if this user is allowed to set that.
    #[test]
    fn a_thread_of_this_host_is_found_with_its_policy_and_cgroup() {
        let (tell, told) = channel();
        let (end, ended) = channel::<()>();
        let at_rr = std::thread::spawn(move || {
            let tid = rustix::thread::gettid().as_raw_nonzero().get();
            let own = ThreadId::of(i32::try_from(std::process::id()).unwrap(), tid).unwrap();
            tell.send((own, own.set_policy(Policy::Rr(3)).is_ok())).unwrap();
            let _ = ended.recv();
        });
        let (own, may) = told.recv().unwrap();
        let proc = Path::new("/proc");
        let found = Census::take(proc, &[], 1000, &mut || ());
        let without = Census::take(proc, &[std::process::id()], 1000, &mut || ());
        drop(end);
        at_rr.join().unwrap();
        if !may {
            println!("SKIPPED: this test needs the right to real-time priority");
            return;
        }
        let of = |census: &Census| census.threads.iter().find(|thread| thread.id == own).cloned();
        let thread = of(&found).unwrap();
        assert_eq!(thread.policy, Policy::Rr(3));
        assert_eq!(thread.user, Some(rustix::process::getuid().as_raw()));
        let cgroup = parse_cgroup(&fs::read("/proc/thread-self/cgroup").unwrap());
        assert_eq!(thread.cgroup, cgroup);
        assert!(of(&without).is_none() && found.next().is_some());
        assert!(found.threads.iter().all(|thread| thread.id.pid != 2), "kthreadd is a kernel thread");
    }
}
