//! An unmodified application in a VM sets SCHED_DEADLINE in its kernel and gets its CPU time from the host, beside bulk
//! work that uses all remaining time. Without SCHED_DEADLINE it misses deadlines. A request that does not fit is
//! refused: EBUSY in the guest. An application or a VM that is killed releases its bandwidth. After kill -9 of the
//! daemon the next one keeps the guarantees.

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;

use crate::inside::command::{expect, figures, spin, within};
use crate::inside::daemon::{Daemon, configure, metric, reset};
use crate::inside::plc::{Guest, SPARE, held, task};

const REFUSED: &str = "refused: EBUSY";

pub(crate) fn deadlines() -> Result<()> {
    // 1 ms for the VM without deadline tasks, and half of the CPU for its deadline tasks.
    configure("sched.toml", "[[reservation]]\nname = \"plc\"\nbudget = \"1ms\"\nperiod = \"20ms\"\ndeadlines = 0.5\n")?;
    let guest = Guest::boot(1)?;
    let hogs = (0..4).map(|_| spin()).collect::<Result<Vec<_>>>()?;
    let daemon = guarantees(&guest)?;
    let daemon = limits(&guest, daemon)?;
    spare(&guest)?;

    // A VM that is killed releases its bandwidth.
    guest.fits("held", 6000)?;
    holds(Some(6000.0))?;
    let Guest { vm, mut device, .. } = guest;
    vm.end(Signal::KILL)?;
    within(40, "the host holds nothing for a VM that was killed", || Ok(held()?.is_empty()))?;
    within(10, "the device process ends with its VM", || device.is_over())?;
    for hog in hogs {
        hog.end(Signal::TERM)?;
    }
    reset()?;
    daemon.ends()
}

/// The application reserves 6 ms in 20 ms and uses 5 ms. Four bulk threads spin as well. Returns the daemon that it
/// starts.
fn guarantees(guest: &Guest) -> Result<Daemon> {
    expect("a guarantee that nobody gives", REFUSED, rta(guest, "deadline 6000 20000 5000 10")?)?;
    let daemon = Daemon::start()?;
    within(30, "plc has a reservation", || Ok(!held()?.is_empty()))?;
    let without = rta(guest, "other 6000 20000 5000 50")?;
    let with = rta(guest, "deadline 6000 20000 5000 300")?;
    let (missed_without, missed_with) = (missed(&without)?, missed(&with)?);
    figures(format_args!("5 ms each 20 ms beside 4 bulk threads: without SCHED_DEADLINE {without} us; with {with} us"));
    ensure!(missed_without >= 25, "it makes its deadlines without a reservation: {without}");
    ensure!(missed_with == 0, "deadlines missed: {with}");
    holds(None)?;
    Ok(daemon)
}

/// What does not fit is refused, and what was given is kept by the next daemon, which is returned.
fn limits(guest: &Guest, daemon: Daemon) -> Result<Daemon> {
    // A deadline below 100 us is refused as invalid, not for lack of bandwidth.
    expect("20 us of 50", "refused: Invalid argument", rta(guest, "deadline 20 50 10 10")?)?;
    // First more than is allowed. Then as much as is allowed, held by a task: a second task is refused until the first
    // one is killed.
    expect("14 ms of 20", REFUSED, rta(guest, "deadline 14000 20000 1000 10")?)?;
    guest.fits("held", 6000)?;
    holds(Some(6000.0))?;
    expect("6 ms more", REFUSED, rta(guest, "deadline 6000 20000 1000 10")?)?;
    let (admitted, refused) = (metric("ontime_deadlines_admitted")?, metric("ontime_deadlines_refused")?);
    println!("metrics: admitted {admitted}, refused {refused}");
    ensure!(refused >= 2.0, "refusals are not counted: {refused}");

    daemon.dies()?;
    let daemon = Daemon::start()?;
    holds(Some(6000.0))?;
    guest.ends("held")?;
    holds(None)?;
    let again = rta(guest, "deadline 6000 20000 1000 10")?;
    ensure!(missed(&again)? == 0, "after its holder was killed: {again}");
    Ok(daemon)
}

/// With deadline_spare set, the host reserves that bandwidth before any task needs it. A task that fits into it is
/// admitted and meets its deadlines. A guarantee takes precedence over spare bandwidth.
fn spare(guest: &Guest) -> Result<()> {
    guest.ask(&format!("echo 3000/20000 > {SPARE}"))?;
    holds(Some(3000.0))?;
    let fits = rta(guest, "deadline 2000 20000 1000 100")?;
    ensure!(missed(&fits)? == 0, "deadlines missed by one that fits into what is spare: {fits}");
    guest.fits("held", 2000)?;
    holds(Some(5000.0))?;
    guest.ends("held")?;
    guest.fits("held", 9000).context("for the sake of what is spare")?;
    holds(Some(9000.0))?;
    // The host has no room for what is spare, so the module asks again 10 s later. The task's end does not wait for
    // that.
    guest.ask(&format!("echo 3000/20000 > {SPARE}; sleep 1; kill -9 {}", task("held")))?;
    holds_within(7, Some(3000.0))?;
    for bad in ["5/4", "1/2/3", "x", "1/99", "-1/20000"] {
        let said = guest.ask(&format!("echo {bad} > {SPARE} && echo taken"))?;
        ensure!(!said.contains("taken"), "deadline_spare takes {bad}");
    }
    expect("deadline_spare", "3000/20000", guest.ask(&format!("cat {SPARE}"))?)?;
    guest.ask(&format!("echo 0 > {SPARE}"))?;
    holds(None)
}

/// Waits until the host holds so many us of 20 ms for the guest's deadline tasks.
fn holds(budget: Option<f64>) -> Result<()> {
    holds_within(40, budget)
}

fn holds_within(seconds: u64, budget: Option<f64>) -> Result<()> {
    let wanted = [budget.map(|budget| (budget, 20000.0))];
    within(seconds, &format!("the host holds {wanted:?}"), || {
        let held = held()?;
        ensure!(held == wanted, "it holds {held:?}");
        Ok(true)
    })
}

/// Runs the application in the guest; what it says.
fn rta(guest: &Guest, arguments: &str) -> Result<String> {
    guest.ask(&format!("/lab/rta {arguments}"))
}

/// How many deadlines it missed: `jobs 50 missed 0 worst 5012`
fn missed(said: &str) -> Result<u64> {
    let number = said.split_once("missed ").and_then(|(_, rest)| rest.split_whitespace().next()?.parse().ok());
    number.with_context(|| format!("the application said: {said}"))
}
