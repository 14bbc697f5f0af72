//! Pods with requested reservations share CPUs with processes that use what they leave. All processes of a pod together
//! take what is reserved for it, and not each of them, so the other pods have theirs.

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
    let [of_many, of_one, of_bulk] = shares([(4, 3_000), (1, 3_000)], 1)?;
    figures(format_args!("30 % each: four processes {of_many} %, one {of_one} %; the rest {of_bulk} %"));
    // The caps' pauses are a little longer than necessary, and bulk work leaves a little to SCHED_IDLE. Of the rest the
    // emulated CPU needs most for the watcher: it executes a tenth of what hardware does in the same time.
    ensure!((20..=33).contains(&of_many) && (24..=33).contains(&of_one), "not what is reserved");
    ensure!(of_bulk >= 5, "bulk work has nothing");
    Ok(())
}

/// Three pods on two CPUs: each has its time only where the kernel moves its processes. In its pauses a process may
/// also take what bulk work leaves of a CPU, so there is no upper bound.
pub(crate) fn on_two_cpus() -> Result<()> {
    let [first, second, third, of_bulk] = shares([(1, 5_000), (1, 5_000), (2, 5_000)], 2)?;
    figures(format_args!("50 % each: {first} %, {second} %, two processes {third} %; the rest {of_bulk} %"));
    ensure!([first, second, third].iter().all(|share| *share >= 44), "less than what is reserved");
    ensure!(of_bulk >= 10, "bulk work has nothing");
    Ok(())
}

/// The shares of a CPU, in percent, that the spinning processes of pods take, and last what `bulk` other ones do. Each
/// pod is given by the number of its processes, and its budget in 10 ms, us.
fn shares<const PODS: usize, const ALL: usize>(pods: [(u32, u64); PODS], bulk: usize) -> Result<[u128; ALL]> {
    configure("sched.toml", "reserve = 0.05\n")?;
    let daemon = Daemon::start()?;
    let start = |(number, (processes, budget))| Pod::start(number, processes, budget);
    let pods = (1..).zip(pods).map(start).collect::<Result<Vec<_>>>()?;
    let processes = || pods.iter().flat_map(|pod| &pod.processes);
    for process in processes() {
        within(60, "the pods' processes have their places", || is_fifo(process.pid()))?;
    }
    let bulk = (0..bulk).map(|_| spin()).collect::<Result<Vec<_>>>()?;
    bulk.iter().try_for_each(|process| process.signal(Signal::STOP))?;
    // The daemon's pass for the new processes is over.
    sleep(Duration::from_secs(5));
    processes().chain(&bulk).try_for_each(|process| process.signal(Signal::CONT))?;
    // What they do at once is noticed at the next look.
    sleep(Duration::from_millis(200));
    let times = || -> Result<Vec<Duration>> { pods.iter().map(Pod::ran).chain([sum(&bulk)]).collect() };
    let (before, began) = (times()?, now());
    sleep(Duration::from_secs(1));
    let (after, took) = (times()?, now().saturating_sub(began));
    let mut shares = [0; ALL];
    for ((share, before), after) in shares.iter_mut().zip(before).zip(after) {
        *share = percent(after.saturating_sub(before), took);
    }
    for process in bulk {
        process.end(Signal::TERM)?;
    }
    reset()?;
    daemon.ends()?;
    Ok(shares)
}

/// CPU time of these processes together.
fn sum(processes: &[Running]) -> Result<Duration> {
    processes.iter().map(|process| ran(process.pid())).sum()
}

/// Processes that spin in a container of a pod, stopped at first: the emulated host takes long where it never idles.
struct Pod {
    processes: Vec<Running>,
}

impl Pod {
    /// With a reservation of `budget` us in 10 ms.
    fn start(number: u32, processes: u32, budget: u64) -> Result<Self> {
        let uid = format!("0e4b6a52-7f0d-4c3e-9d2a-{number:012x}");
        let container = format!("/sys/fs/cgroup/kubepods/pod{uid}/{number:x}{:063x}", 0);
        fs::create_dir_all(&container).context("making the container's cgroup")?;
        let join = |process: Running| {
            process.signal(Signal::STOP)?;
            write(format!("{container}/cgroup.procs"), process.pid().to_string()).map(|()| process)
        };
        let processes = (0..processes).map(|_| spin().and_then(join)).collect::<Result<_>>()?;
        let reservation = json!({"for": {"pod": uid}, "budget_us": budget, "period_us": 10_000, "lease_seconds": 600});
        let answer = request("PUT", &format!("/v1/reservations/{uid}"), &reservation.to_string())?;
        ensure!(answer.contains(" 201 "), "the reservation is refused: {answer}");
        Ok(Self { processes })
    }

    fn ran(&self) -> Result<Duration> {
        sum(&self.processes)
    }
}
