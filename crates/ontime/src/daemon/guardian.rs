//! The guardian: a child of the daemon that sleeps until the daemon dies, then puts back what only the daemon made
//! safe.
//!
//! While runtime caps are in force, the kernel's own protections against threads at real-time priority may be off.
//! Should the daemon be killed, nobody caps any more: within milliseconds the guardian writes the protections'
//! originals. Threads that were off their place this moment get it back. Should the protections not come back (or never
//! have been on), every capped thread goes to SCHED_OTHER: slower, but no machine is lost to a spinning guest. vCPUs
//! with reserved CPU time have their original policy again, until the next daemon takes them over.
//!
//! On PREEMPT_RT the protections are not enough: the kernel's fair server (`kernel/sched/deadline.c`) gives threads at
//! normal priority their share, but `ktimers`, `rcuc` and `rcub` stand at low real-time priorities, and beside a thread
//! that spins above them no sleep on its CPU ends and no grace period does. So for [`WATCH`] a capped thread that its
//! cap would pause goes to SCHED_OTHER; the others keep their place.
//!
//! In: one JSON line a change on standard input ([`Charge`]); the end of another pipe is the daemon's end (`life`). It
//! runs above every thread it may have to get past, in locked memory, and prepares everything on receipt. `ontime reset
//! --protections` does the same from systemd's `ExecStopPost=`, should the guardian have been killed as well.

use std::collections::BTreeSet;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::Context;
use ontime_tenants::{Policy, ThreadId};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use serde::{Deserialize, Serialize};

use super::cap::account::{Account, Share, Verdict};
use super::cap::place::place_self;
use super::cap::reading::Reading;
use super::cap::watcher::now;
use super::life::Life;
use super::lock;
use crate::exit::Doing;
use crate::paths::Paths;

/// How long capped threads are watched after the daemon's end, where the kernel's protections are not enough.
const WATCH: Duration = Duration::from_secs(1);
/// The longest that a daemon waits for the guardian of the one before it: [`WATCH`], and what a trace instance takes to
/// be removed.
const FORMER: Duration = Duration::from_secs(6);

/// Waits until the guardian of a daemon that was killed has ended: it places threads, and its own place is no tenant's.
pub fn wait_for_former(paths: &Paths) {
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
pub struct Capped {
    /// Which.
    pub id: ThreadId,
    /// Where it stands while it is within its cap.
    pub place: Policy,
    /// The cap, of a period.
    pub share: Share,
}

/// What the guardian answers for.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Charge {
    /// Files with the values to write: the originals of protections that are off.
    pub protections: Vec<(PathBuf, String)>,
    /// Whether the kernel protects itself once those are written.
    pub then_protected: bool,
    /// Whether threads of the kernel run at real-time priorities that the protections do not serve: PREEMPT_RT.
    #[serde(default)]
    pub realtime: bool,
    /// Capped threads.
    pub threads: Vec<Capped>,
    /// The period of caps, ns.
    #[serde(default)]
    pub period: u64,
    /// vCPUs with reserved CPU time, whose pacers die with the daemon, and their originals: whatever place one stands
    /// at this moment, without a pacer it would keep others waiting, or wait for them for ever.
    #[serde(default)]
    pub paced: Vec<(ThreadId, Policy)>,
    /// vCPUs that are put ahead while an interrupt is pending, and their places: nobody lowers them any more.
    #[serde(default)]
    pub raised: Vec<(ThreadId, Policy)>,
    /// The trace instance that told of interrupts.
    #[serde(default)]
    pub instance: Option<PathBuf>,
    /// The daemon ends as it should: there is nothing to do.
    pub relieved: bool,
}

impl Charge {
    /// With what is in force besides while a pass is under way: the threads of the charge before it, and what only its
    /// end changes.
    pub fn beside(mut self, former: Option<&Self>) -> Self {
        let Some(former) = former.filter(|former| !former.relieved) else { return self };
        let own: BTreeSet<ThreadId> = self.threads.iter().map(|of| of.id).collect();
        self.threads.extend(former.threads.iter().filter(|of| !own.contains(&of.id)));
        let Self { paced, raised, instance, .. } = former.clone();
        Self { paced, raised, instance, ..self }
    }
}

/// The daemon's end.
#[derive(Debug)]
pub struct Guardian {
    child: Child,
    pipe: ChildStdin,
    last: Charge,
    life: Life,
    place: Policy,
}

impl Guardian {
    /// Starts the guardian, at this place.
    ///
    /// # Errors
    /// Where the process cannot be started.
    pub fn start(place: Policy, run_dir: &Path) -> anyhow::Result<Self> {
        let priority = match place {
            Policy::Fifo(priority) | Policy::Rr(priority) => priority,
            _ => 0,
        };
        let (life, death) = Life::start(place).doing("starting the thread that the guardian watches")?;
        // For the child, which is told its number.
        fcntl_setfd(&death, FdFlags::empty()).doing("handing a pipe to the guardian")?;
        let program = std::env::current_exe().doing("finding the program `ontime`")?;
        let mut child = Command::new(program)
            .args(["guardian", "--priority", &priority.to_string(), "--life", &death.as_raw_fd().to_string()])
            .arg("--run-dir")
            .arg(run_dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .env_remove("NOTIFY_SOCKET")
            .spawn()
            .doing("starting the guardian process")?;
        let pipe = child.stdin.take().context("the guardian's pipe")?;
        Ok(Self { child, pipe, last: Charge::default(), life, place })
    }

    /// Tells the guardian what it answers for now.
    ///
    /// # Errors
    /// Where it is dead.
    pub fn charge(&mut self, charge: Charge) -> anyhow::Result<()> {
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

    /// The place it was started at.
    pub fn place(&self) -> Policy {
        self.place
    }

    /// What it answers for now.
    pub fn charged(&self) -> &Charge {
        &self.last
    }

    /// Its process number.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Ends it: the daemon has cleaned up itself.
    pub fn relieve(mut self) {
        let _ = self.charge(Charge { relieved: true, ..Charge::default() });
        self.end();
    }

    /// Ends it when it has done its last charge. The daemon ends as well.
    pub fn end(self) {
        let Self { mut child, pipe, life, .. } = self;
        drop(pipe);
        let _ = child.wait();
        drop(life);
    }
}

/// `ontime guardian`: started by the daemon only.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// SCHED_FIFO priority to run at.
    #[arg(long)]
    priority: u8,
    /// The descriptor whose other end closes when the daemon dies.
    #[arg(long)]
    life: RawFd,
}

/// Runs the guardian.
///
/// # Errors
/// Where its memory cannot be locked.
pub fn run(args: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    // Without it the next daemon does not wait for us.
    let _lock = lock::take(&paths.guardian_lock());
    // The daemon's signals are not for us: a Ctrl-C goes to the whole group.
    let _ = rustix::process::setsid();
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT, signal_hook::consts::SIGHUP] {
        signal_hook::flag::register(signal, std::sync::Arc::default())?;
    }
    rustix::mm::mlockall(rustix::mm::MlockAllFlags::CURRENT | rustix::mm::MlockAllFlags::FUTURE)
        .doing("locking the guardian's memory")?;
    if args.priority > 0 {
        // Without the right to it, protections come back all the same, only later.
        let _ = place_self(Policy::Fifo(args.priority));
    }
    // SAFETY: whoever started us left this descriptor open for us, and nothing closes it.
    let life = unsafe { BorrowedFd::borrow_raw(args.life) };
    let charge = last_charge(std::io::stdin().as_fd(), life);
    if !charge.relieved {
        act(&charge);
    }
    Ok(ExitCode::SUCCESS)
}

/// What was charged last when the daemon died, or said that it ends. What it said before it died is heard first.
fn last_charge(orders: BorrowedFd<'_>, life: BorrowedFd<'_>) -> Charge {
    let mut charge = Charge::default();
    let (mut said, mut piece) = (Vec::new(), [0; 4096]);
    loop {
        let mut ready = [PollFd::new(&orders, PollFlags::IN), PollFd::new(&life, PollFlags::IN)];
        match poll(&mut ready, None) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(_) => return charge,
        }
        let [orders_ready, dead] = ready.map(|of| !of.revents().is_empty());
        if !orders_ready {
            if dead {
                return charge;
            }
            continue;
        }
        match rustix::io::read(orders, &mut piece) {
            Ok(0) => return charge,
            Ok(length) => said.extend_from_slice(piece.get(..length).unwrap_or_default()),
            Err(Errno::INTR) => continue,
            Err(_) => return charge,
        }
        // A torn last line is the daemon's death within a write: the charge before it holds.
        while let Some(end) = said.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = said.drain(..=end).collect();
            charge = serde_json::from_slice(&line).unwrap_or(charge);
        }
    }
}

fn act(charge: &Charge) {
    let mut protected = charge.then_protected;
    for (path, value) in &charge.protections {
        if std::fs::write(path, value).is_err() {
            protected = false;
        }
    }
    for (id, original) in &charge.paced {
        // As below.
        let _ = id.set_policy_alone(*original);
    }
    for (id, place) in &charge.raised {
        // One that is paused has its place back below.
        if id.policy().is_ok_and(|policy| policy != Policy::Idle && policy != *place) {
            let _ = id.set_policy_alone(*place);
        }
    }
    for Capped { id, place, .. } in &charge.threads {
        // A thread that has ended needs nothing; one that cannot be placed has nobody left to try again.
        let _ = match id.policy() {
            Ok(Policy::Idle) if protected => id.set_policy(*place),
            Ok(_) if !protected => id.set_policy(Policy::BULK),
            _ => Ok(()),
        };
    }
    if protected && charge.realtime {
        watch(charge);
    }
    // Waits for grace periods: no thread may keep these from ending.
    if let Some(instance) = &charge.instance {
        ontime_trace::tracefs::remove(instance);
    }
}

/// Sends a thread that is beyond its cap to SCHED_OTHER, for [`WATCH`].
fn watch(charge: &Charge) {
    let start = now();
    let open = |of: &Capped| {
        let reading = Reading::open(of.id.pid, of.id.tid, None).ok()?;
        Some((*of, reading, Account::new(of.share, charge.period, start)))
    };
    let mut watched: Vec<_> = charge.threads.iter().filter_map(open).collect();
    let end = start.saturating_add(u64::try_from(WATCH.as_nanos()).unwrap_or(u64::MAX));
    // A tick brings the count of a thread that runs up to date.
    let step = Duration::from_nanos(charge.period / 4).max(Duration::from_millis(1));
    while !watched.is_empty() && now() < end {
        std::thread::sleep(step);
        watched.retain_mut(|(of, reading, account)| {
            // One that has ended is no more watched.
            let Ok(taken) = reading.take() else { return false };
            match account.charge(now(), taken.ran) {
                Verdict::Within => true,
                Verdict::Over { .. } => {
                    if of.id.policy().is_ok_and(|policy| policy == of.place) {
                        let _ = of.id.set_policy(Policy::BULK);
                    }
                    false
                }
            }
        });
    }
}
