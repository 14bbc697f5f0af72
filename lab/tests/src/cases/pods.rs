//! Two pods with requested reservations share a CPU with a process that uses what they leave. The four processes of one
//! pod together take what is reserved for it and not four times as much, so the other one has its own.

use std::fs;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::json;

use crate::inside::clock::{now, percent};
use crate::inside::command::{Running, figures, spin, within, write};
use crate::inside::daemon::{Daemon, configure, request, reset};
use crate::inside::thread::{is_fifo, ran};

pub(crate) fn pods() -> Result<()> {
    configure("sched.toml", "reserve = 0.05\n")?;
    let daemon = Daemon::start()?;
    let (many, one) = (Pod::start(1, 4)?, Pod::start(2, 1)?);
    for pod in [&many, &one] {
        let reservation =
            json!({"for": {"pod": pod.uid}, "budget_us": 3000, "period_us": 10_000, "lease_seconds": 600});
        let answer = request("PUT", &format!("/v1/reservations/{}", pod.uid), &reservation.to_string())?;
        ensure!(answer.contains(" 201 "), "the reservation is refused: {answer}");
    }
    let processes = || many.processes.iter().chain(&one.processes);
    for process in processes() {
        within(60, "the pods' processes have their places", || is_fifo(process.pid()))?;
    }
    let bulk = spin()?;
    bulk.signal(Signal::STOP)?;
    // The daemon's pass for the new process is over.
    sleep(Duration::from_secs(5));
    processes().chain([&bulk]).try_for_each(|process| process.signal(Signal::CONT))?;
    // What they do at once is noticed at the next look.
    sleep(Duration::from_millis(200));
    let times = || -> Result<[Duration; 3]> { Ok([many.ran()?, one.ran()?, ran(bulk.pid())?]) };
    let (before, began) = (times()?, now());
    sleep(Duration::from_secs(1));
    let (after, took) = (times()?, now().saturating_sub(began));
    let mut shares = [0; 3];
    for ((share, before), after) in shares.iter_mut().zip(before).zip(after) {
        *share = percent(after.saturating_sub(before), took);
    }
    let [of_many, of_one, of_bulk] = shares;
    figures(format_args!("30 % each: four processes {of_many} %, one {of_one} %; the rest {of_bulk} %"));
    // The caps' pauses are a little longer than necessary, and bulk work leaves a little to SCHED_IDLE. Of the rest the
    // emulated CPU needs most for the watcher: it executes a tenth of what hardware does in the same time.
    ensure!((20..=33).contains(&of_many) && (24..=33).contains(&of_one), "not what is reserved");
    ensure!(of_bulk >= 5, "bulk work has nothing");
    bulk.end(Signal::TERM)?;
    reset()?;
    daemon.ends()
}

/// Processes that spin in a container of a pod, stopped at first: the emulated host takes long where it never idles.
struct Pod {
    uid: String,
    processes: Vec<Running>,
}

impl Pod {
    fn start(number: u32, processes: u32) -> Result<Self> {
        let uid = format!("0e4b6a52-7f0d-4c3e-9d2a-{number:012x}");
        let container = format!("/sys/fs/cgroup/kubepods/pod{uid}/{number:x}{:063x}", 0);
        fs::create_dir_all(&container).context("making the container's cgroup")?;
        let join = |process: Running| {
            process.signal(Signal::STOP)?;
            write(format!("{container}/cgroup.procs"), process.pid().to_string()).map(|()| process)
        };
        let processes = (0..processes).map(|_| spin().and_then(join)).collect::<Result<_>>()?;
        Ok(Self { uid, processes })
    }

    /// CPU time of all together.
    fn ran(&self) -> Result<Duration> {
        self.processes.iter().map(|process| ran(process.pid())).sum()
    }
}
