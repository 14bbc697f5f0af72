//! A spinning VM of class rt is held to its cap while the kernel's protections are off, and leaves the rest of the CPU
//! to housekeeping and to a bulk VM, each of which could use all of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use serde_json::Value;
use signal_hook::consts::SIGTERM;

use crate::inside::clock::{now, sleep_until};
use crate::inside::command::{Running, attempt, figures, program, read, run, signal, spin, start, within};
use crate::inside::daemon::{Daemon, configure, json, metric, report, reset};
use crate::inside::thread::{Place, expect_place, is_fifo, place, ran, set, set_own};
use crate::inside::vm::Vm;

const NAME: &str = "a_spinning_vm_leaves_the_rest";
/// Not 0 while the kernel's protections are on.
const FAIR_SERVER: &str = "/sys/kernel/debug/sched/fair_server/cpu0/runtime";

pub(crate) fn cap() -> Result<()> {
    is_given("class = \"rt\"\nruntime-cap = 0.5")?;
    let spinner = Vm::start("spin", "spin", "rt", "10.1.0.2")?;
    spinner.wait()?;
    // It would only make the other one boot slowly.
    spinner.signal(Signal::STOP)?;
    let busy = Vm::start("busy", "spin", "bulk", "10.2.0.2")?;
    busy.wait()?;
    let (spinning, busy) = (spinner.vcpu()?, busy.vcpu()?);
    let daemon = Daemon::start()?;
    let housekeeping = spin()?;
    let gap = start(program(NAME, "gap", &[])?)?;
    within(60, "the program that measures delays is at FIFO 1", || Ok(place(gap.pid())? == Place::fifo(1)))?;
    spinner.signal(Signal::CONT)?;
    within(10, "the spinning VM is paused", is_paused)?;
    let gap = gap.end(Signal::TERM)?.expect(&[0])?;
    let gap: u64 = gap.trim().parse().with_context(|| format!("the longest delay: '{gap}'"))?;

    let times = || -> Result<[Duration; 3]> { Ok([ran(spinning)?, ran(housekeeping.pid())?, ran(busy)?]) };
    let (began, [spin_ran, work_ran, busy_ran]) = (Instant::now(), times()?);
    ensure!(protections_are_off()?, "protections are on");
    sleep(Duration::from_secs(3));
    ensure!(protections_are_off()?, "protections came on");
    let took = began.elapsed();
    let [spin_more, work_more, busy_more] = times()?;
    let share = |before: Duration, after: Duration| after.saturating_sub(before).as_millis() * 100 / took.as_millis();
    let (spin_share, work_share, busy_share) =
        (share(spin_ran, spin_more), share(work_ran, work_more), share(busy_ran, busy_more));
    housekeeping.end(Signal::TERM)?;

    // With another cap, another level and no class: the spinning vCPU is held at every moment of the change. Otherwise
    // no other thread would ever run again.
    let mut reloads = 0.0;
    for (what, is_bulk) in [
        ("class = \"rt\"\nruntime-cap = 0.4", false),
        ("class = \"rt\"\nlevel = 1\nruntime-cap = 0.4", false),
        ("class = \"bulk\"", true),
        ("class = \"rt\"\nruntime-cap = 0.5", false),
    ] {
        is_given(what)?;
        daemon.reload()?;
        reloads += 1.0;
        within(10, "the daemon has read it", || Ok(metric("ontime_passes_total{reason=\"reload\"")? >= reloads))?;
        if is_bulk {
            within(10, "the bulk VM is at SCHED_OTHER", || Ok(place(spinning)? == Place::OTHER))?;
        } else {
            within(10, "the spinning VM is paused", is_paused)?;
        }
    }
    let stalls = rcu_stalls()?;
    figures(format_args!(
        "a spinning RT VM {spin_share} % of the CPU (cap 50), housekeeping {work_share} %, a busy bulk VM \
         {busy_share} %; who is below it waited for {gap} us at the most, {} RCU stalls",
        stalls.len()
    ));
    ensure!(gap <= 10_000, "a thread below it waited for {gap} us");
    ensure!(stalls.is_empty(), "RCU stalls: {stalls:?}");
    // The share is below the cap by the time that the cap watcher itself takes at the emulated CPU's speed.
    ensure!((25..=55).contains(&spin_share), "the spinning VM's share is not its cap");
    ensure!(work_share >= 12 && busy_share >= 12, "the others have no share");

    // After the daemon's death nothing enforces the cap. Beside a thread that spins at real-time priority this kernel's
    // timers and RCU grace periods would stall, even with its fair server. So the vCPU runs at SCHED_OTHER until the
    // next daemon.
    daemon.dies()?;
    within(10, "the vCPU is at SCHED_OTHER without a daemon", || Ok(place(spinning)? == Place::OTHER))?;
    // The same where the daemon dies in the middle of a pass: when it has just placed that vCPU, and when a reset has
    // just restored the protections.
    let daemon = Daemon::begin("")?;
    let killer = killed_when("placed", spinning, &daemon)?;
    killer.wait()?.expect(&[0]).context("killed in its first pass")?;
    daemon.dies()?;
    let daemon = Daemon::start()?;
    within(10, "the spinning VM is paused", is_paused)?;
    within(10, "protections are off", protections_are_off)?;
    let killer = killed_when("protected", spinning, &daemon)?;
    // Its daemon dies.
    attempt("ontime reset")?;
    killer.wait()?.expect(&[0]).context("killed in a reset")?;
    daemon.dies()?;
    let daemon = Daemon::start()?;
    within(10, "the spinning VM is paused", is_paused)?;
    daemon.ends()?;
    expect_place("the spinning VM when the daemon has ended", spinning, Place::OTHER)?;
    let daemon = Daemon::start()?;
    within(10, "the spinning VM is paused", is_paused)?;

    reset()?;
    expect_place("the spinning VM after the reset", spinning, Place::OTHER)?;
    ensure!(is_protected()?, "protections are off after the reset");
    daemon.ends()
}

/// The program that prints the longest delay of a thread at FIFO 1 when it is ended, us. It is below the guest, as the
/// kernel's own threads at FIFO 1 and 2 are.
pub(crate) fn gap(_: &[String]) -> Result<()> {
    let over = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGTERM, Arc::clone(&over)).context("catching SIGTERM")?;
    set_own(Place::fifo(1))?;
    let (mut at, mut most) = (now(), Duration::ZERO);
    while !over.load(Ordering::Relaxed) {
        at += Duration::from_millis(1);
        sleep_until(at)?;
        let late = now().saturating_sub(at);
        most = most.max(late);
        at += late;
    }
    println!("{}", most.as_micros());
    Ok(())
}

/// Starts the program that kills the daemon at a moment of a pass ([`kill_when`]).
fn killed_when(when: &str, vcpu: i32, daemon: &Daemon) -> Result<Running> {
    start(program(NAME, "kill-when", &[when, &vcpu.to_string(), &daemon.pid().to_string()])?)
}

/// The program that kills the daemon when a vCPU has been `placed`, or when the kernel is `protected` again. It uses
/// timers that no real-time thread delays. If the vCPU still spins at real-time priority after 5 s, the program resets
/// its policy.
pub(crate) fn kill_when(arguments: &[String]) -> Result<()> {
    let [when, vcpu, daemon] = arguments else { bail!("kill-when placed|protected VCPU DAEMON") };
    let number = |text: &String| text.parse::<i32>().with_context(|| format!("'{text}' is no number"));
    let (vcpu, daemon) = (number(vcpu)?, number(daemon)?);
    set_own(Place::fifo(60))?;
    let is_reached = || if when == "placed" { is_fifo(vcpu) } else { is_protected() };
    let mut left = 100_000_u32;
    while !is_reached()? {
        ensure!(left > 0, "the daemon never got so far: {when}");
        left -= 1;
        sleep(Duration::from_micros(200));
    }
    signal(daemon, Signal::KILL)?;
    for _ in 0..5000 {
        sleep(Duration::from_millis(1));
        if !is_fifo(vcpu)? {
            return Ok(());
        }
    }
    set(vcpu, Place::OTHER)?;
    bail!("the vCPU went on spinning, uncapped")
}

/// Gives the spinning VM a configuration.
fn is_given(what: &str) -> Result<()> {
    configure("tenants.toml", &format!("[[tenant]]\nname = \"spin\"\n{what}\n"))
}

/// Whether the kernel's protections are off and a thread of the spinning VM has been paused.
fn is_paused() -> Result<bool> {
    let status = json("ontime status --json")?;
    let is_off = status.pointer("/caps/protections_off").and_then(Value::as_bool) == Some(true);
    let threads = status.pointer("/caps/threads").and_then(Value::as_array).context("status has no threads")?;
    let has_paused = |thread: &Value| {
        let pauses = thread.get("pauses").and_then(Value::as_u64).unwrap_or_default();
        thread.get("of").and_then(Value::as_str) == Some("spin") && pauses > 0
    };
    Ok(is_off && threads.iter().any(has_paused))
}

fn protections_are_off() -> Result<bool> {
    Ok(report("ontime status")?.contains("kernel protections off"))
}

/// Whether the kernel itself leaves CPU time to threads that are not real-time.
fn is_protected() -> Result<bool> {
    Ok(read(FAIR_SERVER)? != "0")
}

/// What the kernel's log says of RCU stalls.
pub(crate) fn rcu_stalls() -> Result<Vec<String>> {
    let is_stall = |line: &&str| line.split_once("rcu").is_some_and(|(_, rest)| rest.contains("stall"));
    Ok(run("dmesg")?.to_lowercase().lines().filter(is_stall).map(str::to_owned).collect())
}
