//! The files of a host, and a snapshot of its processes.
//!
//! Input: a [`Sources`] with the roots of `/proc`, `/run/libvirt`, `/sys`. Output: processes, kernel threads and
//! threads, read once each. Processes that vanish meanwhile are omitted; this is no error.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::io::Errno;

use crate::class::Policy;
use crate::container::{self, ancestors};
use crate::devices::Devices;
use crate::files;
use crate::proc::{self, Stat};
use crate::qmp::Monitors;
use crate::thread::ThreadId;
use crate::wait_limit::limit_waits;
use crate::{sched, vmm};

/// Units of a process's start time (`USER_HZ`) per second.
const TICKS: u64 = 100;
/// Tolerance between a process's start and a file's later modification time, seconds: rounding, and a clock that is
/// slowly corrected.
const MARGIN: u64 = 2;
/// Most threads of a process among which one that lives is searched.
const PROBED: usize = 16;
/// How long a process is new, seconds: a guest of an unknown monitor may take as long until it has run.
const LATELY: u64 = 120;
/// How many processes are read in one go.
const BATCH: usize = 16;
/// Most children of a process that are looked at.
const CHILDREN: usize = 64;

/// The locations of a host's files. Tests use a tree of their own.
#[derive(Debug)]
pub struct Sources {
    /// `/proc`.
    pub proc: PathBuf,
    /// `/run/libvirt/qemu`.
    pub libvirt: PathBuf,
    /// `/sys/class/net`.
    pub net: PathBuf,
    /// The mount point of cgroup v2, if mounted.
    pub cgroups: Option<PathBuf>,
    /// The root directory below which container runtimes keep their state.
    pub runtimes: PathBuf,
    /// Whether `proc` belongs to the running kernel, so that system calls refer to the same threads.
    pub live: bool,
    /// QEMU monitors to ask for vCPU threads that have no names.
    pub monitors: Monitors,
    /// Known device processes.
    pub devices: Devices,
}

impl Sources {
    /// The running host.
    pub fn host() -> Self {
        Self { live: true, ..Self::below(Path::new("/")) }
    }

    /// A tree that looks like a host's root directory.
    pub fn below(root: &Path) -> Self {
        Self {
            proc: root.join("proc"),
            libvirt: root.join("run/libvirt/qemu"),
            net: root.join("sys/class/net"),
            // systemd mounts the second one beside cgroup v1.
            cgroups: ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
                .map(|path| root.join(path))
                .into_iter()
                .find(|mount| mount.join("cgroup.controllers").exists()),
            runtimes: root.to_owned(),
            live: false,
            monitors: Monitors::asking_for(Duration::from_millis(200)),
            devices: Devices::default(),
        }
    }

    pub(crate) fn process_dir(&self, pid: i32) -> PathBuf {
        self.proc.join(pid.to_string())
    }

    /// The directory with a process's descriptors, command line and namespaces: the process's own, or, if its main
    /// thread has ended (`pthread_exit`) and so has given these up, that of a thread that lives.
    pub(crate) fn living_dir(&self, pid: i32) -> PathBuf {
        let dir = self.process_dir(pid);
        let ended =
            self.read(pid, "stat").and_then(|text| proc::parse_stat(&text)).is_some_and(|stat| stat.has_ended());
        let living = ended.then(|| self.living_thread(pid)).flatten();
        living.map_or_else(|| dir.clone(), |stat| dir.join(format!("task/{}", stat.tid)))
    }

    /// The first thread of a process that lives. After its end, the main thread stays in the list, and a traced thread
    /// until its tracer has been told.
    fn living_thread(&self, pid: i32) -> Option<Stat> {
        self.threads(pid, PROBED).0.into_iter().next()
    }

    /// A process's network namespace if it differs from this thread's. `None` also if it cannot be read.
    pub(crate) fn own_network(&self, pid: i32) -> Option<PathBuf> {
        let namespace = |process: &Path| std::fs::read_link(process.join("ns/net")).ok();
        let its = self.live.then(|| namespace(&self.living_dir(pid)))??;
        (namespace(&self.proc.join("thread-self")).as_ref() != Some(&its)).then_some(its)
    }

    /// Whether two processes have different mount namespaces. False also if either cannot be read.
    pub(crate) fn have_other_mounts(&self, one: i32, other: i32) -> bool {
        let namespace = |pid: i32| std::fs::read_link(self.living_dir(pid).join("ns/mnt")).ok();
        namespace(one).zip(namespace(other)).is_some_and(|(one, other)| one != other)
    }

    /// A process's cgroup v2 path at this moment.
    pub(crate) fn cgroup(&self, pid: i32) -> Option<String> {
        proc::parse_cgroup(&files::read_at(rustix::fs::CWD, self.living_dir(pid).join("cgroup")).ok()?)
    }

    /// A file of a process. `None` if the process is gone or the file cannot be read.
    pub(crate) fn read(&self, pid: i32, file: &str) -> Option<Vec<u8>> {
        files::read_at(rustix::fs::CWD, self.process_dir(pid).join(file)).ok()
    }

    /// The arguments in the first `limit` bytes of a process's command line, and how many bytes were read.
    pub(crate) fn arguments(&self, pid: i32, limit: usize) -> (Vec<String>, usize) {
        let read = |directory: PathBuf| {
            let mut bytes = Vec::new();
            let opened = std::fs::File::open(directory.join("cmdline"));
            if let Ok(file) = opened.inspect_err(files::note) {
                // A process that vanished, or removed its command line, has none.
                let read = limit_waits(|| io::Read::read_to_end(&mut io::Read::take(file, limit as u64), &mut bytes));
                let _ = read.inspect_err(files::note);
            }
            bytes
        };
        let bytes = Some(read(self.process_dir(pid))).filter(|bytes| !bytes.is_empty());
        let bytes = bytes.unwrap_or_else(|| read(self.living_dir(pid)));
        (proc::parse_cmdline(&bytes), bytes.len())
    }

    /// The user who controls a process: its real user, or its effective user if the real one is root. (The owner of
    /// `/proc/PID` is root for any process that made itself undumpable.)
    pub(crate) fn owner(&self, pid: i32) -> Option<u32> {
        let (real, effective) = proc::parse_uids(&self.read(pid, "status")?)?;
        Some(if real == 0 { effective } else { real })
    }

    /// The user who created a cgroup's directory and so chose its path: root if only root may create directories above
    /// it, else the first other user who may. With `itself` the directory's own owner counts, too, because that user
    /// may move processes into it.
    pub(crate) fn cgroup_owner(&self, path: &str, itself: bool) -> u32 {
        let by_slice = container::owner_of_path(path);
        let Some(mount) = self.cgroups.as_ref().filter(|_| by_slice == 0) else { return by_slice };
        let owner = |part: &str| match std::fs::symlink_metadata(mount.join(part.trim_start_matches('/'))) {
            Ok(directory) => directory.uid(),
            // An existing cgroup has a directory; the owner of this one is unknown.
            Err(_) => u32::MAX,
        };
        let above = ancestors(path).filter(|part| itself || part.len() < path.len());
        above.map(owner).find(|user| *user != 0).unwrap_or(0)
    }

    /// Whether a process was started after a file was written. `None` if unknown. The answer is wrong if the clock was
    /// set meanwhile.
    pub(crate) fn started_after(&self, process: ThreadId, written: SystemTime) -> Option<bool> {
        let booted = proc::parse_boot_time(&files::read_at(rustix::fs::CWD, self.proc.join("stat")).ok()?)?;
        let started = booted.checked_add(process.start_time / TICKS)?;
        let written = written.duration_since(SystemTime::UNIX_EPOCH).ok()?;
        Some(started > written.as_secs().saturating_add(MARGIN))
    }

    /// The first `limit` living threads of a process, and whether these are all. The kernel lists them in order of
    /// creation.
    pub(crate) fn threads(&self, pid: i32, limit: usize) -> (Vec<Stat>, bool) {
        let Ok(tasks) = files::directory(self.process_dir(pid).join("task")) else { return (Vec::new(), true) };
        let (mut tids, whole) = files::first_numbers(&tasks, limit);
        // Sorted by number, which is the order of creation.
        tids.sort_unstable();
        let stats = tids.into_iter().filter_map(|tid| {
            let stat = proc::parse_stat(&files::read_at(&tasks, format!("{tid}/stat")).ok()?)?;
            (!stat.has_ended()).then_some(stat)
        });
        (limit_waits(|| stats.collect()), whole)
    }

    /// Seconds since the host's boot.
    pub(crate) fn uptime(&self) -> Option<u64> {
        let text = files::read_at(rustix::fs::CWD, self.proc.join("uptime")).ok()?;
        std::str::from_utf8(&text).ok()?.split('.').next()?.parse().ok()
    }

    /// Whether a process has run a KVM guest, by the guest time of all its threads, and whether it is new: its guest
    /// may not have run for a clock tick yet. `uptime`: the host's; without it, every process may be new.
    pub(crate) fn has_run_a_guest(&self, pid: i32, uptime: Option<u64>) -> (bool, bool) {
        let Some(stat) = self.read(pid, "stat").and_then(|text| proc::parse_stat(&text)) else {
            return (false, false);
        };
        let is_new = uptime.is_none_or(|uptime| uptime.saturating_sub(stat.start_time / TICKS) < LATELY);
        (stat.guest_time > 0, is_new)
    }

    /// A process's number in its innermost PID namespace.
    pub(crate) fn inner_process(&self, pid: i32) -> i32 {
        self.read(pid, "status").and_then(|status| proc::parse_inner_pid(&status)).unwrap_or(pid)
    }

    /// Whether a process is in the host's PID namespace: it has only one number. A kernel without PID namespaces lists
    /// no numbers.
    pub(crate) fn has_one_number(&self, pid: i32) -> bool {
        let Some(status) = self.read(pid, "status") else { return false };
        proc::status_value(&status, "NSpid").is_none_or(|numbers| numbers.split_ascii_whitespace().count() == 1)
    }

    /// A thread's number in its innermost PID namespace.
    pub(crate) fn inner_thread(&self, pid: i32, tid: i32) -> i32 {
        let status = self.read(pid, &format!("task/{tid}/status"));
        status.and_then(|status| proc::parse_inner_pid(&status)).unwrap_or(tid)
    }

    /// The main thread of a process. If it has ended, other threads must live.
    pub(crate) fn main_thread(&self, pid: i32) -> Option<Stat> {
        let stat = proc::parse_stat(&self.read(pid, &format!("task/{pid}/stat"))?)?;
        (!stat.has_ended() || self.living_thread(pid).is_some()).then_some(stat)
    }

    /// The first processes that a process's main thread has started or adopted. None where the kernel does not list
    /// them (CONFIG_PROC_CHILDREN).
    pub(crate) fn children(&self, pid: i32) -> Vec<i32> {
        let text = self.read(pid, &format!("task/{pid}/children")).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        text.split_ascii_whitespace().filter_map(|number| number.parse().ok()).take(CHILDREN).collect()
    }

    /// A process's identity, even if its main thread has ended and other threads live.
    pub(crate) fn identity(&self, pid: i32) -> Option<ThreadId> {
        let start_time = proc::parse_stat(&self.read(pid, "stat")?)?.start_time;
        Some(ThreadId { pid, tid: pid, start_time })
    }

    /// The CPUs that a thread may run on, in the kernel's list form; empty if it is gone.
    pub(crate) fn affinity(&self, pid: i32, tid: i32) -> String {
        if self.live {
            return sched::affinity(tid).map(|cpus| cpus.to_string()).unwrap_or_default();
        }
        let status = self.read(pid, &format!("task/{tid}/status")).unwrap_or_default();
        proc::status_value(&status, "Cpus_allowed_list").unwrap_or_default().to_owned()
    }

    /// A thread's policy from `stat`, with SCHED_DEADLINE's parameters if the running kernel can be asked.
    pub(crate) fn policy(&self, stat: &Stat) -> Policy {
        match stat.policy {
            Policy::Deadline { .. } if self.live => sched::policy(stat.tid).unwrap_or(stat.policy),
            policy => policy,
        }
    }
}

/// A process with a program.
#[derive(Debug)]
pub(crate) struct Process {
    pub pid: i32,
    /// The target of `/proc/PID/exe`.
    pub executable: String,
    /// Its cgroup v2 path.
    pub cgroup: Option<String>,
    /// The container in its cgroup v1 paths, if its v2 path has none.
    pub v1_container: Option<String>,
}

impl Process {
    /// `dir` is the directory of the process or of one of its threads.
    fn read(pid: i32, executable: String, dir: &OwnedFd) -> Self {
        let text = files::read_at(dir, "cgroup").unwrap_or_default();
        let cgroup = proc::parse_cgroup(&text);
        let in_container = |path: &str| container::of_path(path).map(|container| container.cgroup);
        let v1_container = match cgroup.as_deref().and_then(in_container) {
            Some(_) => None,
            None => proc::parse_cgroup_v1(&text).iter().find_map(|path| in_container(path)),
        };
        Self { pid, executable, cgroup, v1_container }
    }
}

/// A kernel thread that works for a VM.
#[derive(Debug)]
pub(crate) struct KernelThread {
    pub stat: Stat,
    pub role: crate::ThreadRole,
    /// The process or thread for which it works.
    pub works_for: i32,
}

/// A snapshot of all processes.
#[derive(Debug, Default)]
pub(crate) struct Processes {
    pub user: Vec<Process>,
    pub kernel: Vec<KernelThread>,
    /// Number of processes that could not be read.
    pub denied: usize,
}

impl Processes {
    /// All processes. Calls `between` after each [`BATCH`] of them.
    pub(crate) fn read(sources: &Sources, between: &mut dyn FnMut()) -> io::Result<Self> {
        let mut all = Self::default();
        for batch in files::numbers(&files::directory(&sources.proc)?).chunks(BATCH) {
            limit_waits(|| batch.iter().for_each(|pid| all.add(sources, *pid)));
            between();
        }
        Ok(all)
    }

    /// These processes alone.
    pub(crate) fn of(sources: &Sources, pids: &BTreeSet<i32>) -> Self {
        let mut these = Self::default();
        limit_waits(|| pids.iter().for_each(|pid| these.add(sources, *pid)));
        these
    }

    fn add(&mut self, sources: &Sources, pid: i32) {
        let dir = match files::directory(sources.process_dir(pid)) {
            Ok(dir) => dir,
            // With the mount option hidepid=1 not even the directory may be opened.
            Err(error) => return self.refused(pid, error),
        };
        match files::link_at(&dir, "exe") {
            Ok(executable) => self.user.push(Process::read(pid, executable, &dir)),
            Err(Errno::NOENT) => self.without_program(sources, pid, &dir),
            Err(error) => self.refused(pid, error),
        }
    }

    /// Takes in a kernel thread, or a process whose main thread has ended while others live: the first of these tells
    /// its program and cgroup. An exiting process is neither.
    fn without_program(&mut self, sources: &Sources, pid: i32, dir: &OwnedFd) {
        let stat = files::read_at(dir, "stat").ok().and_then(|text| proc::parse_stat(&text));
        let Some(stat) = stat else { return };
        if stat.is_kthread() {
            let known = vmm::kernel_thread(&stat.comm);
            self.kernel.extend(known.map(|(role, works_for)| KernelThread { stat, role, works_for }));
            return;
        }
        let living = stat.has_ended().then(|| sources.living_thread(pid)).flatten();
        let dir = living.map(|living| files::directory(sources.process_dir(pid).join(format!("task/{}", living.tid))));
        let Some(Ok(dir)) = dir else { return };
        match files::link_at(&dir, "exe") {
            Ok(executable) => self.user.push(Process::read(pid, executable, &dir)),
            Err(error) => self.refused(pid, error),
        }
    }

    /// The host's init is no tenant; a security module may hide it from root, too.
    fn refused(&mut self, pid: i32, error: Errno) {
        self.denied += usize::from(matches!(error, Errno::ACCESS | Errno::PERM) && pid != 1);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::*;
    use crate::testing::without_main_thread;

    #[test]
    fn a_real_process_has_its_children() {
        let host = Sources::host();
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 600 & echo $!; wait"]).stdout(Stdio::piped());
        let mut shell = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(shell.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let (pid, child): (i32, i32) = (shell.id().try_into().unwrap(), line.trim().parse().unwrap());
        let is_listed = host.process_dir(pid).join(format!("task/{pid}/children")).exists();
        let found = (host.children(pid), host.children(child));
        // SAFETY: ends the shell's child, which sleeps for longer than the test takes, and for which the shell waits.
        unsafe { libc::kill(child, libc::SIGKILL) };
        shell.wait().unwrap();
        assert_eq!(found, (if is_listed { vec![child] } else { vec![] }, vec![]));
    }

    #[test]
    fn a_real_process_is_read_without_its_main_thread() {
        let (child, host) = (without_main_thread(), Sources::host());
        let processes = Processes::read(&host, &mut || ()).unwrap();
        let found = processes.user.iter().find(|process| process.pid == child.0).unwrap();
        let own = std::env::current_exe().unwrap();
        assert_eq!(found.executable, own.to_string_lossy());
        assert_eq!(host.cgroup(child.0), found.cgroup);
        let line: Vec<String> = std::env::args().collect();
        assert_eq!(host.arguments(child.0, 1 << 20).0, line);
        assert!(std::fs::read_dir(host.living_dir(child.0).join("fd")).unwrap().count() > 0);
        assert_eq!(host.main_thread(child.0).unwrap().tid, child.0);
        assert_eq!(host.own_network(child.0), None, "it is in this thread's");
    }
}
