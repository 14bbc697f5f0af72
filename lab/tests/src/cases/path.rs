//! An RT VM that answers requests and a bulk VM that is flooded run on while Ontime is applied and reset `CYCLES`
//! times, killed, and left without disk space, and while links, drivers, queues and sysctls change.

use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::faults::faults;
use super::traffic::{flows, incidents, window};
use crate::inside::command::{attempt, read, run, within, write};
use crate::inside::daemon::{Daemon, configure, reset, rt_tenant};
use crate::inside::knobs::{expect_same, snapshot};
use crate::inside::thread::{Place, place};
use crate::inside::vm::Vm;

pub(crate) fn path() -> Result<()> {
    configure("tenants.toml", &rt_tenant("rt", "level = 0"))?;
    configure("daemon.toml", "rescan-seconds = 1\n")?;
    let rt = Vm::start("rt", "rt", "rt", "10.1.0.2")?;
    rt.wait()?;
    let bulk = Vm::start("bulk1", "bulk", "bulk", "10.2.0.2")?;
    bulk.wait()?;
    run("ip address add 10.1.0.9/24 dev br-rt")?;
    let vcpu = rt.vcpu()?;
    let before = snapshot()?;
    write("/lab/flood", "")?;
    write("/lab/ask", "")?;
    flows(10)?;
    let daemon = Daemon::start()?;
    within(40, "the RT vCPU is placed", || Ok(place(vcpu)? == Place::fifo(47)))?;
    cycles()?;
    faults(daemon, vcpu, &before)?;
    println!("== every knob is what it was");
    fs::remove_file("/lab/flood").context("ending the flood")?;
    expect_same("knobs at the end", &before, &snapshot()?)
}

/// Resets and applies under traffic. The daemon runs and has applied.
fn cycles() -> Result<()> {
    let text = std::env::var("CYCLES").context("$CYCLES")?;
    let count: u32 = text.parse().with_context(|| format!("$CYCLES is '{text}', which is no number"))?;
    println!("== {count} cycles of reset and apply under traffic");
    let before = incidents()?;
    reset()?;
    // As long as the cycles, so that the slowest of many answers is not compared with the slowest of a few.
    let seconds = Duration::from_secs(2) * count;
    let usual = window("default", || {
        sleep(seconds);
        Ok(())
    })?;
    let noise = usual.lost * 1000 / (usual.segments + 1);
    run("ontime apply")?;
    window("applied", || {
        sleep(Duration::from_secs(1));
        Ok(())
    })?;
    let cycle = || {
        reset()?;
        attempt("ontime apply")?.expect(&[0, 1, 2]).map(drop)
    };
    let during = window("cycles", || (0..count).try_for_each(|_| cycle()))?;
    let (segments, lost) = (during.segments, during.lost);
    ensure!(count >= 1 && segments > 500 && during.asked > 20, "there was no traffic to speak of");
    // Bursts of segments are lost also while nothing is applied.
    ensure!(lost <= segments / 20, "{lost} of {segments} segments were lost");
    // One may be on its way at the end.
    ensure!(during.unanswered <= 1, "{} requests were not answered", during.unanswered);
    // A few cycles are no measurement. During a reset the RT VM has the priority of an ordinary VM, and waits for
    // others as it did before: 7 ms at 1 ns an instruction, 17 ms at 4 ns.
    if count >= 100 {
        let most = segments * (noise + 1) / 1000 + 1;
        ensure!(lost <= most, "{lost} of {segments} segments were lost, {noise} of 1000 without cycles");
        let (slowest, usual) = (during.slowest, usual.slowest);
        ensure!(
            slowest <= 10_000.0 || slowest <= usual,
            "the RT VM stood still for {slowest} us; without cycles for {usual}"
        );
    }
    expect_same("what NICs and the kernel's log say of resets and losses", &before, &incidents()?)?;
    fs::remove_file("/lab/ask").context("ending the requests")?;
    within(60, "the clients' side has ended its requests", || Ok(Path::new("/lab/asked").exists()))?;
    let said = read("/lab/ask.log")?;
    ensure!(said.contains("dropped messages = 0"), "answers to the client were lost: {said}");
    Ok(())
}
