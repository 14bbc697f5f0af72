//! 6.12 with PREEMPT_RT, two CPUs: first the polling threads of the host module alone, then method busypoll with them.
//! That NIC has no receive interrupt and no NET_RX softirq, the rest of the host continues to work, and a reset, ifdown
//! or rmmod restores everything.

use std::fs;
use std::io;

use anyhow::{Context, Result, ensure};

use super::busypoll::{expect_work_continues, interrupts};
use crate::inside::command::{attempt, expect, figures, read, run, sh, start, within};
use crate::inside::daemon::{Daemon, configure, reset};
use crate::inside::module::{expect_healthy_kernel, expect_privileged, file, load, refusal, replies, set, unload};
use crate::inside::thread::{Place, cpus, place, processes};

pub(crate) fn host_poll() -> Result<()> {
    run("ip addr add 10.1.0.9/24 dev br-rt")?;
    run("ip addr add 10.2.0.9/24 dev br-bulk")?;
    // A link is up some seconds after its interface.
    within(30, "the link of bulk0 is up", || replies("-c 1 -w 1 10.2.0.1"))?;
    within(30, "the link of rt0 is up", || replies("-c 1 -w 1 -I br-rt 10.1.0.1"))?;
    let raised = interrupts_of_traffic()?;
    ensure!(raised >= 25, "fifty packets raised {raised} interrupts; this test counts the wrong ones");
    the_module()?;
    the_method()?;
    unload()?;
    expect_healthy_kernel()
}

/// Loads the module and unloads it while it polls.
fn the_module() -> Result<()> {
    let (own, polled) = (deferral()?, file("rt0", "busy_poll"));
    load()?;
    expect("polled at first", 0, read(&polled)?)?;
    let bridge = file("br-rt", "busy_poll");
    for (file, value, error) in [
        (&bridge, "1", libc::EOPNOTSUPP),
        (&polled, "2x", libc::EINVAL),
        (&polled, "-1", libc::EINVAL),
        (&polled, "", libc::EINVAL),
    ] {
        let refusal = refusal(file, value).with_context(|| format!("{file} took '{value}'"))?;
        expect(&format!("{file}, '{value}'"), io::Error::from_raw_os_error(error), refusal)?;
    }
    expect_privileged(&polled, "1")?;
    set(&polled, "1")?;
    expect("polled", 1, read(&polled)?)?;
    ensure!(!threads().is_empty(), "no thread polls");
    traffic(3)?;
    let raised = interrupts_of_traffic()?;
    figures(format_args!("the module's threads: {raised} receive interrupts for 50 replies"));
    // If a thread gets no CPU time for 4 ms, because of this host or of the machine, its interrupt is enabled.
    ensure!(raised <= 10, "{raised} receive interrupts while it is polled");

    // Removing a tracer waits for every task, also for one that never sleeps.
    let tracer = "/sys/kernel/tracing/instances/away";
    fs::create_dir(tracer).context(tracer)?;
    set(&format!("{tracer}/set_ftrace_filter"), "vfs_read")?;
    set(&format!("{tracer}/current_tracer"), "function")?;
    let mut removal = start(sh(&format!("echo nop > {tracer}/current_tracer")))?;
    within(30, "the tracer is removed", || removal.is_over())?;
    removal.wait()?.expect(&[0])?;
    fs::remove_dir(tracer).context(tracer)?;

    // ifdown and ifup, also in quick succession; then the module is unloaded while it polls.
    run("ip link set rt0 down")?;
    expect("threads while it is down", 0, threads().len())?;
    run("ip link set rt0 up")?;
    ensure!(!threads().is_empty(), "no thread polls after ifup");
    within(10, "the link of rt0 is up again", || replies("-c 1 -W 1 -I br-rt 10.1.0.1"))?;
    for _ in 0..20 {
        set(&polled, "0")?;
        set(&polled, "1")?;
    }
    traffic(10)?;
    unload()?;
    expect("threads after the module", 0, threads().len())?;
    expect("deferral after the module", &own, deferral()?)?;
    traffic(10)
}

/// Method busypoll without the module, which a finding reports, and with it. The module is loaded at the end.
fn the_method() -> Result<()> {
    let (own, polled) = (deferral()?, file("rt0", "busy_poll"));
    configure("host.toml", "[nic.rt0]\nclass = \"rt\"\npoll_cpu = 1\n")?;
    let daemon = Daemon::start()?;
    let applied = attempt("ontime apply --method busypoll")?;
    let said = applied.stdout + &applied.stderr;
    ensure!(said.contains("modprobe ontime_napi"), "nobody says that the module is missing: {said}");
    reset()?;
    load()?;
    attempt("ontime apply --method busypoll")?;
    within(40, "rt0 is polled", || Ok(read(&polled)? == "1"))?;
    let thread = threads().into_iter().min().context("no thread polls")?;
    within(10, "the thread that polls is FIFO 1", || Ok(place(thread)? == Place::fifo(1)))?;
    expect("its CPU", 1, cpus(thread)?)?;
    traffic(3)?;
    let raised = interrupts_of_traffic()?;
    figures(format_args!("busypoll on 6.12: {raised} receive interrupts for 50 replies"));
    ensure!(raised <= 10, "{raised} receive interrupts under busypoll");
    expect_work_continues()?;
    reset()?;
    expect("polled after reset", 0, read(&polled)?)?;
    expect("threads after reset", 0, threads().len())?;
    expect("deferral after reset", &own, deferral()?)?;
    daemon.ends()
}

/// The threads that poll rt0.
fn threads() -> Vec<i32> {
    processes("napi-poll/rt0*")
}

/// How long the driver defers rt0's interrupts.
fn deferral() -> Result<String> {
    let knob = |name: &str| read(format!("/sys/class/net/rt0/{name}"));
    Ok(format!("{} {}", knob("napi_defer_hard_irqs")?, knob("gro_flush_timeout")?))
}

/// Pings both networks so often.
fn traffic(count: u32) -> Result<()> {
    run(format!("ping -q -c {count} -i 0.02 10.2.0.1"))?;
    run(format!("ping -q -c {count} -i 0.02 -I br-rt 10.1.0.1")).map(drop)
}

/// Receive interrupts of rt0 for fifty replies on each network.
fn interrupts_of_traffic() -> Result<u64> {
    let before = interrupts()?;
    traffic(50)?;
    Ok(interrupts()? - before)
}
