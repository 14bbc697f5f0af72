//! The guardian: a child process of the daemon that sleeps until the daemon dies, then restores what is safe only while
//! the daemon runs.
//!
//! While runtime caps are in force, the kernel's own protections against real-time threads may be off. If the daemon is
//! killed, caps end. Then the guardian writes the original values of the protections within milliseconds. Paused
//! threads get their places back. If the protections cannot be restored (or have never been on), every capped thread
//! goes to SCHED_OTHER: this is slower, but a spinning guest cannot block the machine. vCPUs with reserved CPU time get
//! their original policies, until the next daemon takes them over.
//!
//! On PREEMPT_RT the protections are not enough. The kernel's fair server (`kernel/sched/deadline.c`) gives threads at
//! normal priority their share, but `ktimers`, `rcuc` and `rcub` have low real-time priorities. While a thread spins
//! above them, no sleep on its CPU ends and no grace period does. So for [`WATCH`] the guardian moves each capped
//! thread that exceeds its cap to SCHED_OTHER; the others keep their places.
//!
//! While the daemon lives, the guardian also restores the protections when the cap watcher gives the alarm ([`alarm`]):
//! a thread has escaped from its pause. Such threads may leave the daemon's main thread no CPU time. When the main
//! thread runs again, it leaves the protections on.
//!
//! In: one JSON line per change on standard input ([`Charge`]). The end of a second pipe shows that the daemon has died
//! (`life`). The guardian runs above every thread that it may have to preempt, in locked memory. `ontime reset
//! --protections` does the same from systemd's `ExecStopPost=`, in case the guardian was killed too.
//!
//! To know a thread by its start time the kernel's `stat` is read, which may take down the address space of a process
//! that ends in that moment (`cap::sight`). Above every other thread that would stop a CPU. So a thread just below the
//! guardian does this ([`Changer`]): if it takes longer than [`PATIENCE`], it goes on at normal priority. Before the
//! guardian ends, it waits [`LATE`] for what is left.

use std::collections::BTreeSet;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel, sync_channel};
use std::time::{Duration, Instant};

use anyhow::Context;
use ontime_base::clock::now;
use ontime_tenants::{Policy, ThreadId};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use serde::{Deserialize, Serialize};

use super::cap::account::{Account, Share, Verdict};
use super::cap::place::place_self;
use super::cap::reading::Time;
use super::life::Life;
use super::lock;
use super::own::OwnThread;
use crate::exit::Doing;
use crate::paths::Paths;

/// How long capped threads are watched after the daemon's end, where the kernel's protections are not enough.
const WATCH: Duration = Duration::from_secs(1);
/// How long a daemon waits for the guardian of the former one at most: [`WATCH`], [`LATE`], and up to 5 s to remove a
/// trace instance.
const FORMER: Duration = Duration::from_secs(8);
/// The time in which a new guardian has set its own priority.
const SETTLES: Duration = Duration::from_secs(2);
/// How long the guardian waits for the change of one thread's policy.
const PATIENCE: Duration = Duration::from_micros(200);
/// The most threads that go on with changes at normal priority at a time.
const ABANDONED: usize = 16;
/// How long the guardian waits for these threads in the end. Most are only late, as on a CPU that wakes from a deep
/// idle state, and with the process they would end before they have changed anything.
const LATE: Duration = Duration::from_secs(1);

/// By this eventfd the cap watcher tells the guardian that a thread has escaped.
///
/// # Errors
/// The kernel's error, where descriptors run out.
pub(crate) fn alarm() -> std::io::Result<Arc<OwnedFd>> {
    Ok(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
}

/// Waits until the guardian of a daemon that was killed has ended. That guardian still changes threads' policies, and
/// its own real-time thread would be in the census.
pub(crate) fn wait_for_former(paths: &Paths) {
    if !lock::wait_until_free(&paths.guardian_lock(), FORMER) {
        let path = paths.guardian_lock();
        tracing::warn!(
            "{}: the guardian of a former daemon has not ended within {FORMER:?}; end the process that \
             holds this lock (`fuser {0}` names it)",
            path.display()
        );
    }
}

/// A thread under a runtime cap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Capped {
    pub id: ThreadId,
    /// Its place, while it is within its cap.
    pub place: Policy,
    pub share: Share,
}

/// What the guardian has to do if the daemon dies.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Charge {
    /// Files and the values to write: the originals of protections that are off.
    pub protections: Vec<(PathBuf, String)>,
    /// Whether the kernel's protections are on once those are written.
    pub then_protected: bool,
    /// PREEMPT_RT: threads of the kernel run at real-time priorities that the protections do not serve.
    #[serde(default)]
    pub realtime: bool,
    /// Capped threads.
    pub threads: Vec<Capped>,
    /// The period of caps, ns.
    #[serde(default)]
    pub period: u64,
    /// vCPUs with reserved CPU time, and their original policies. Their pacers die with the daemon. A vCPU left at any
    /// of the pacers' places would keep others waiting, or wait for ever.
    #[serde(default)]
    pub paced: Vec<(ThreadId, Policy)>,
    /// vCPUs that may be ahead because of a pending interrupt, and their places. The watcher can no longer lower them.
    #[serde(default)]
    pub raised: Vec<(ThreadId, Policy)>,
    /// The trace instance that reports interrupts.
    #[serde(default)]
    pub instance: Option<PathBuf>,
    /// The daemon ends in an orderly way: there is nothing to do.
    pub relieved: bool,
}

impl Charge {
    /// Adds what stays in force while a pass is in progress: the threads of the former charge, and the fields that
    /// change only at the end of the pass.
    pub(crate) fn beside(mut self, former: Option<&Self>) -> Self {
        let Some(former) = former.filter(|former| !former.relieved) else { return self };
        let own: BTreeSet<ThreadId> = self.threads.iter().map(|of| of.id).collect();
        self.threads.extend(former.threads.iter().filter(|of| !own.contains(&of.id)));
        let Self { paced, raised, instance, .. } = former.clone();
        Self { paced, raised, instance, ..self }
    }
}

/// The daemon's handle to the guardian.
#[derive(Debug)]
pub(crate) struct Guardian {
    child: Child,
    /// Its main thread.
    id: Option<ThreadId>,
    started: Instant,
    pipe: ChildStdin,
    last: Charge,
    life: Life,
    place: Policy,
}

impl Guardian {
    /// Starts the guardian at this policy and priority.
    ///
    /// # Errors
    /// Where the process cannot be started.
    pub(crate) fn start(place: Policy, run_dir: &Path, alarm: &OwnedFd) -> anyhow::Result<Self> {
        let priority = match place {
            Policy::Fifo(priority) | Policy::Rr(priority) => priority,
            _ => 0,
        };
        let (life, death) = Life::start(place).doing("starting the thread that the guardian watches")?;
        // The child inherits this descriptor and gets its number as an argument.
        fcntl_setfd(&death, FdFlags::empty()).doing("handing a pipe to the guardian")?;
        // The same for a copy of this one.
        let alarm = rustix::io::dup(alarm).doing("handing the alarm to the guardian")?;
        let program = std::env::current_exe().doing("finding the program `ontime`")?;
        let mut child = Command::new(program)
            .args(["guardian", "--priority", &priority.to_string(), "--life", &death.as_raw_fd().to_string()])
            .args(["--alarm", &alarm.as_raw_fd().to_string()])
            .arg("--run-dir")
            .arg(run_dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .env_remove("NOTIFY_SOCKET")
            .spawn()
            .doing("starting the guardian process")?;
        let pipe = child.stdin.take().context("the guardian's pipe")?;
        let id = main_thread(&child);
        Ok(Self { child, id, started: Instant::now(), pipe, last: Charge::default(), life, place })
    }

    /// Sends the guardian a new charge.
    ///
    /// # Errors
    /// Where the guardian is dead.
    pub(crate) fn charge(&mut self, charge: Charge) -> anyhow::Result<()> {
        if let Some(status) = self.child.try_wait()? {
            anyhow::bail!(
                "the guardian process has ended ({status}); the next pass starts another; if it ends again, report it \
                 (`ontime report` collects what is needed)"
            );
        }
        if charge == self.last {
            return Ok(());
        }
        let mut line = serde_json::to_vec(&charge)?;
        line.push(b'\n');
        self.pipe.write_all(&line).doing("writing to the guardian process")?;
        self.last = charge;
        Ok(())
    }

    /// The policy and priority at which it was started.
    pub(crate) fn place(&self) -> Policy {
        self.place
    }

    /// The guardian's thread and the one by which it sees that the daemon lives, with their places.
    pub(crate) fn own(&self) -> impl Iterator<Item = OwnThread> {
        let place = self.place;
        let guardian = self.id.filter(|_| self.started.elapsed() > SETTLES);
        let guardian = guardian.map(|id| OwnThread { name: "ontime guardian", id, place });
        guardian.into_iter().chain(self.life.placed.map(|id| OwnThread { name: "ontime-life", id, place }))
    }

    /// Its present charge.
    pub(crate) fn charged(&self) -> &Charge {
        &self.last
    }

    /// Its process number.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Ends the guardian without action: the daemon has cleaned up itself.
    pub(crate) fn relieve(mut self) {
        let _ = self.charge(Charge { relieved: true, ..Charge::default() });
        self.end();
    }

    /// Ends the guardian after it has carried out its last charge. The daemon ends too.
    pub(crate) fn end(self) {
        let Self { mut child, pipe, life, .. } = self;
        drop(pipe);
        let _ = child.wait();
        drop(life);
    }
}

/// The main thread of a process that has not been waited for, whose number nothing else can have yet.
fn main_thread(child: &Child) -> Option<ThreadId> {
    let pid = i32::try_from(child.id()).ok()?;
    ThreadId::of(pid, pid).ok()
}

/// `ontime guardian`: started by the daemon only.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// SCHED_FIFO priority to run at.
    #[arg(long)]
    priority: u8,
    /// The descriptor whose other end closes when the daemon dies.
    #[arg(long)]
    life: RawFd,
    /// The eventfd by which the cap watcher has protections restored.
    #[arg(long)]
    alarm: RawFd,
}

/// Runs the guardian.
///
/// # Errors
/// Where its memory cannot be locked.
pub(crate) fn run(args: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    // If the lock cannot be taken, the next daemon does not wait for this guardian.
    let _lock = lock::take(&paths.guardian_lock());
    // The daemon's signals must not reach the guardian: Ctrl-C goes to the whole process group.
    let _ = rustix::process::setsid();
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT, signal_hook::consts::SIGHUP] {
        signal_hook::flag::register(signal, Arc::default())?;
    }
    rustix::mm::mlockall(rustix::mm::MlockAllFlags::CURRENT | rustix::mm::MlockAllFlags::FUTURE)
        .doing("locking the guardian's memory")?;
    if args.priority > 0 {
        // Without the right to SCHED_FIFO, protections are restored later, but are restored.
        let _ = place_self(Policy::Fifo(args.priority));
    }
    // SAFETY: the parent left this descriptor open for us, and nothing closes it.
    let life = unsafe { BorrowedFd::borrow_raw(args.life) };
    // SAFETY: as above.
    let alarm = unsafe { BorrowedFd::borrow_raw(args.alarm) };
    let charge = last_charge(std::io::stdin().as_fd(), life, alarm);
    if !charge.relieved {
        let mut changer = Changer::new(args.priority);
        act(&charge, &mut changer);
        changer.finish(LATE);
    }
    Ok(ExitCode::SUCCESS)
}

/// Has steps that change a thread's policy carried out by a thread just below the guardian.
struct Changer {
    /// The guardian's FIFO priority; 0: SCHED_OTHER.
    priority: u8,
    thread: Option<(Sender<Step>, libc::pid_t)>,
    /// The ends of the steps that go on at normal priority.
    abandoned: Vec<Receiver<()>>,
}

type Step = Box<dyn FnOnce() + Send>;

impl Changer {
    fn new(priority: u8) -> Self {
        Self { priority, thread: None, abandoned: Vec::new() }
    }

    /// Carries out a step. False if it has not ended in time: it may end later.
    fn run(&mut self, step: impl FnOnce() + Send + 'static) -> bool {
        self.abandoned.retain(|told| told.try_recv() == Err(TryRecvError::Empty));
        if self.abandoned.len() >= ABANDONED {
            return false;
        }
        let Some((steps, thread)) = self.thread.take().or_else(|| self.start()) else {
            // Without a thread the guardian does it itself, however long it takes.
            step();
            return true;
        };
        let (tell, told) = sync_channel(1);
        let told_after = Box::new(move || {
            step();
            let _ = tell.send(());
        });
        if steps.send(told_after).is_ok() && told.recv_timeout(PATIENCE).is_ok() {
            self.thread = Some((steps, thread));
            return true;
        }
        // The thread lives until `steps` is dropped.
        set_other(thread);
        self.abandoned.push(told);
        false
    }

    /// Waits for the steps that go on at normal priority, this long at most.
    fn finish(self, most: Duration) {
        let end = Instant::now() + most;
        for told in self.abandoned {
            let _ = told.recv_timeout(end.saturating_duration_since(Instant::now()));
        }
    }

    fn start(&self) -> Option<(Sender<Step>, libc::pid_t)> {
        let (steps, next) = channel::<Step>();
        let (tell, told) = sync_channel(1);
        let below = self.priority.saturating_sub(1);
        let body = move || {
            if below > 0 {
                let _ = place_self(Policy::Fifo(below));
            }
            let _ = tell.send(rustix::thread::gettid().as_raw_nonzero().get());
            next.into_iter().for_each(|step| step());
        };
        std::thread::Builder::new().name("ontime-change".to_owned()).stack_size(128 * 1024).spawn(body).ok()?;
        Some((steps, told.recv().ok()?))
    }
}

/// Moves a thread to SCHED_OTHER by its number alone.
fn set_other(tid: libc::pid_t) {
    let param = libc::sched_param { sched_priority: 0 };
    // SAFETY: the kernel copies param, which outlives the call.
    unsafe { libc::sched_setscheduler(tid, libc::SCHED_OTHER, &raw const param) };
}

/// Lowers a real-time thread that nothing may hold any more, and whose `stat` could not be read in time. Should another
/// thread have its number by now, that one loses a real-time policy, which is better than a blocked machine.
fn lower(id: ThreadId) {
    // SAFETY: takes and returns numbers only.
    let policy = unsafe { libc::sched_getscheduler(id.tid) };
    if matches!(policy & !libc::SCHED_RESET_ON_FORK, libc::SCHED_FIFO | libc::SCHED_RR) {
        set_other(id.tid);
    }
}

/// The last charge when the daemon died or closed the pipe. Charges that were written before its death are read first.
/// At each alarm the protections of the present charge are restored.
fn last_charge(orders: BorrowedFd<'_>, life: BorrowedFd<'_>, alarm: BorrowedFd<'_>) -> Charge {
    let mut charge = Charge::default();
    let (mut said, mut piece) = (Vec::new(), [0; 4096]);
    loop {
        let mut ready = [&orders, &life, &alarm].map(|fd| PollFd::new(fd, PollFlags::IN));
        match poll(&mut ready, None) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(_) => return charge,
        }
        let [orders_ready, dead, alarmed] = ready.map(|of| !of.revents().is_empty());
        if !orders_ready {
            if dead {
                return charge;
            }
            if alarmed {
                let _ = rustix::io::read(alarm, &mut [0; 8]);
                restore(&charge);
            }
            continue;
        }
        match rustix::io::read(orders, &mut piece) {
            Ok(0) => return charge,
            Ok(length) => said.extend_from_slice(piece.get(..length).unwrap_or_default()),
            Err(Errno::INTR) => continue,
            Err(_) => return charge,
        }
        // An incomplete last line means that the daemon died while writing: the charge before it holds.
        while let Some(end) = said.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = said.drain(..=end).collect();
            charge = serde_json::from_slice(&line).unwrap_or(charge);
        }
    }
}

/// Writes the original values of the protections. Returns whether the kernel's protections are on.
fn restore(charge: &Charge) -> bool {
    let write = |all, (path, value): &(PathBuf, String)| std::fs::write(path, value).is_ok() && all;
    charge.protections.iter().fold(charge.then_protected, write)
}

fn act(charge: &Charge, changer: &mut Changer) {
    let protected = restore(charge);
    for (id, original) in charge.paced.iter().copied() {
        // As below: an error is ignored.
        changer.run(move || {
            let _ = id.set_policy_alone(original);
        });
    }
    for (id, place) in charge.raised.iter().copied() {
        changer.run(move || {
            // Paused threads get their places back below.
            if id.policy().is_ok_and(|policy| policy != Policy::Idle && policy != place) {
                let _ = id.set_policy_alone(place);
            }
        });
    }
    for Capped { id, place, .. } in charge.threads.iter().copied() {
        // A thread that has ended needs nothing. If a policy cannot be changed, there is nothing left to try.
        let changed = changer.run(move || {
            let _ = match id.policy() {
                Ok(Policy::Idle) if protected => id.set_policy(place),
                Ok(_) if !protected => id.set_policy(Policy::BULK),
                _ => Ok(()),
            };
        });
        if !changed && !protected {
            lower(id);
        }
    }
    if protected && charge.realtime {
        watch(charge, changer);
    }
    // Last, because it waits for grace periods, which a spinning thread could prevent from ending.
    if let Some(instance) = &charge.instance {
        ontime_trace::tracefs::remove(instance);
    }
}

/// For [`WATCH`], moves each thread that exceeds its cap to SCHED_OTHER.
fn watch(charge: &Charge, changer: &mut Changer) {
    let start = now();
    let open = |of: &Capped| {
        let time = Time::open(of.id.pid, of.id.tid).ok()?;
        Some((*of, time, Account::new(of.share, charge.period, start)))
    };
    let mut watched: Vec<_> = charge.threads.iter().filter_map(open).collect();
    let end = start.saturating_add(u64::try_from(WATCH.as_nanos()).unwrap_or(u64::MAX));
    // At least a tick, because the kernel updates the run time of a running thread at ticks.
    let step = Duration::from_nanos(charge.period / 4).max(Duration::from_millis(1));
    while !watched.is_empty() && now() < end {
        std::thread::sleep(step);
        watched.retain_mut(|(of, time, account)| {
            // A thread that has ended is no longer watched.
            let Ok(ran) = time.take() else { return false };
            match account.charge(now(), ran) {
                Verdict::Within => true,
                Verdict::Over { .. } => {
                    let Capped { id, place, .. } = *of;
                    let changed = changer.run(move || {
                        if id.policy().is_ok_and(|policy| policy == place) {
                            let _ = id.set_policy(Policy::BULK);
                        }
                    });
                    if !changed {
                        lower(id);
                    }
                    false
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::own;
    use super::*;

    /// As where a step takes down an address space. The guardian goes on with the next thread.
    #[test]
    fn a_change_that_does_not_end_is_left_to_a_thread_at_normal_priority() {
        let root = rustix::process::geteuid().is_root();
        let mut changer = Changer::new(if root { 2 } else { 0 });
        let (tell, told) = channel();
        let (end, held) = channel::<()>();
        let ended = tell.clone();
        let done = changer.run(move || {
            tell.send(own::this_thread().unwrap()).unwrap();
            let _ = held.recv();
            ended.send(own::this_thread().unwrap()).unwrap();
        });
        assert!(!done);
        let is_other = |id: ThreadId| matches!(id.policy().unwrap(), Policy::Other { .. });
        let thread = told.recv().unwrap();
        assert!(is_other(thread));
        // On a busy machine these may be late, too, but each is carried out, by a thread of its own.
        let (answer, answers) = channel();
        for _ in 0..3 {
            let answer = answer.clone();
            changer.run(move || answer.send(own::this_thread().unwrap()).unwrap());
            assert_ne!(answers.recv().unwrap(), thread);
        }
        // The number of such threads is limited; a thread that may hold a CPU is lowered all the same.
        let (others, more): (Vec<_>, Vec<_>) = (0..ABANDONED).map(|_| sync_channel::<()>(1)).unzip();
        changer.abandoned.extend(more);
        assert!(!changer.run(|| panic!("one more")));
        // Those that have ended make room.
        drop(others);
        changer.run(move || answer.send(own::this_thread().unwrap()).unwrap());
        assert_ne!(answers.recv().unwrap(), thread);
        if root {
            place_self(Policy::Fifo(1)).unwrap();
        }
        lower(own::this_thread().unwrap());
        assert!(is_other(own::this_thread().unwrap()));
        drop(end);
        changer.finish(Duration::from_secs(3600));
        assert_eq!(told.try_recv(), Ok(thread), "it has gone on to its end");
    }

    /// Threads that escape from their pauses may leave the daemon's main thread no CPU time.
    #[test]
    fn an_alarm_restores_the_protections_while_the_daemon_lives() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("sched_rt_runtime_us");
        let (orders, order) = rustix::pipe::pipe().unwrap();
        let (life, death) = rustix::pipe::pipe().unwrap();
        let bell = alarm().unwrap();
        let given = Arc::clone(&bell);
        let guardian = std::thread::spawn(move || last_charge(orders.as_fd(), life.as_fd(), given.as_fd()));
        for original in ["950000", "870000"] {
            std::fs::write(&file, "-1").unwrap();
            let charge = Charge { protections: vec![(file.clone(), original.to_owned())], ..Charge::default() };
            let mut line = serde_json::to_vec(&charge).unwrap();
            line.push(b'\n');
            rustix::io::write(&order, &line).unwrap();
            rustix::io::write(&*bell, &1u64.to_ne_bytes()).unwrap();
            let start = Instant::now();
            while std::fs::read_to_string(&file).unwrap() != original {
                assert!(start.elapsed() < Duration::from_secs(60), "nothing was restored");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        assert!(!guardian.is_finished());
        drop(death);
        assert_eq!(guardian.join().unwrap().protections, [(file, "870000".to_owned())]);
    }

    /// Once a guardian that ended has been waited for, another process may have its number.
    #[test]
    fn a_guardian_is_known_by_its_start_not_by_its_number() {
        let place = Policy::BULK;
        let (life, _death) = Life::start(place).unwrap();
        let mut child = Command::new("sleep").arg("1000").stdin(Stdio::piped()).spawn().unwrap();
        let (id, pipe) = (main_thread(&child), child.stdin.take().unwrap());
        let started = Instant::now().checked_sub(2 * SETTLES).unwrap();
        let mut guardian = Guardian { child, id, started, pipe, last: Charge::default(), life, place };
        let known = |guardian: &Guardian| guardian.own().find(|own| own.name == "ontime guardian").unwrap();
        let before = known(&guardian);
        guardian.child.kill().unwrap();
        guardian.child.wait().unwrap();
        assert_eq!(known(&guardian), before);
        assert_eq!(own::keep(before).unwrap(), None, "it has ended");
    }
}
