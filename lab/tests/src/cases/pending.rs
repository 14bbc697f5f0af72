//! Method interrupt-context: two RT VMs of one level. One spins, the other receives requests. A vCPU with a pending
//! interrupt is raised above the other, which keeps its priority and its cap. kill -9, a restart and a reset leave no
//! raised vCPU and no trace instance; the reset restores every policy. The outer half measures the latency of a
//! request.

use anyhow::{Result, ensure};
use rustix::process::Signal;

use crate::inside::clock::{now, percent};
use crate::inside::command::{expect, figures, files, run, spin, within};
use crate::inside::daemon::{Daemon, configure, metric, report, reset, rt_tenant};
use crate::inside::knobs::{expect_same, of_threads, snapshot};
use crate::inside::thread::{Place, expect_place, place, processes, ran};
use crate::inside::vm::Vm;

pub(crate) fn pending() -> Result<()> {
    configure("tenants.toml", &["rt", "spin"].map(|name| rt_tenant(name, "runtime-cap = 0.5")).concat())?;
    let rt = Vm::start_small("rt", "rt", "rt", "10.1.0.2")?;
    rt.wait()?;
    let spinner = Vm::start_small("spin", "spin", "rt", "10.1.0.3")?;
    spinner.wait()?;
    let (asked, spins) = (rt.vcpu()?, spinner.vcpu()?);
    spinner.signal(Signal::STOP)?;
    run("ip addr add 10.1.0.1/24 dev br-rt")?;
    let before = knobs()?;
    let daemon = Daemon::start()?;
    apply_strictly("interrupt-context")?;
    expect("trace instances", 1, instances())?;
    let tellers = processes("irq_work/*");
    ensure!(!tellers.is_empty(), "there is no thread irq_work");
    for teller in tellers {
        expect_place("irq_work", teller, Place::fifo(55))?;
    }
    let status = report("ontime status")?;
    ensure!(!status.contains("interrupt-context:"), "interrupts cannot be followed: {status}");

    // A request raises the vCPU. Only vhost and the threads that move packets have higher priorities.
    ask(20)?;
    ensure!(raised()? >= 1.0, "20 requests have put it ahead {} times", raised()?);
    // The spinning VM may use CPU time beyond its cap that no other thread uses. So another thread spins.
    let other = spin()?;
    spinner.signal(Signal::CONT)?;
    let (start, earlier) = (now(), ran(spins)?);
    ask(50)?;
    let took = now().saturating_sub(start);
    let share = percent(ran(spins)?.saturating_sub(earlier), took);
    figures(format_args!(
        "the spinning VM had {share} % of the CPU (cap 50) while the other was asked 50 times in {} ms; put ahead {} \
         times",
        took.as_millis(),
        raised()?
    ));
    other.end(Signal::TERM)?;
    ensure!(share <= 55, "the spinning VM has more than its cap");
    for _ in 0..5 {
        let place = place(spins)?;
        ensure!(place == Place::fifo(46) || place == Place::IDLE, "the spinning VM stands at {place}");
    }

    // The daemon's death leaves no raised vCPU, no probe, and no thread that spins at real-time priority on the only
    // CPU.
    daemon.dies()?;
    no_instance(40)?;
    spinner.signal(Signal::STOP)?;
    expect_place("the vCPU that was asked, after kill -9", asked, Place::fifo(46))?;
    expect_place("the vCPU that spins, after kill -9", spins, Place::OTHER)?;
    let daemon = Daemon::start()?;
    apply_strictly("interrupt-context")?;
    ask(20)?;
    ensure!(raised()? >= 1.0, "nothing is told after a restart");

    // A vCPU without another one of its level is not raised: its interrupts are not traced.
    spinner.stop()?;
    within(20, "one vCPU is left", || Ok(report("ontime ps")?.matches("CPU 0/KVM").count() == 1))?;
    apply_strictly("interrupt-context")?;
    let earlier = raised()?;
    ask(20)?;
    expect("times put ahead while alone", earlier, raised()?)?;

    // Another method, and a reset.
    apply_strictly("partitioned")?;
    no_instance(10)?;
    expect_place("the other under partitioned", asked, Place::fifo(47))?;
    apply_strictly("interrupt-context")?;
    reset()?;
    no_instance(10)?;
    expect_same("vCPUs after the reset", &before, &knobs()?)?;
    daemon.ends()
}

/// The places of vCPUs and of the threads that tell of their interrupts.
fn knobs() -> Result<Vec<String>> {
    Ok(of_threads(&snapshot()?, &["CPU 0/KVM", "irq_work/"]))
}

/// Applies a method, without any finding.
fn apply_strictly(method: &str) -> Result<()> {
    run(format!("ontime apply --method {method}")).map(drop)
}

/// The daemon's trace instances.
fn instances() -> usize {
    files("/sys/kernel/tracing/instances/ontime-daemon-*").len()
}

fn no_instance(seconds: u64) -> Result<()> {
    within(seconds, "the daemon's trace instance is gone", || Ok(instances() == 0))
}

/// How often a vCPU was put ahead.
fn raised() -> Result<f64> {
    metric("ontime_boosts_total{domain=\"rt\"")
}

/// Sends requests, each of which must be answered.
fn ask(count: u32) -> Result<()> {
    run(format!("/run/measures chrt -f 60 ping -q -i 0.02 -c {count} -W 2 10.1.0.2")).map(drop)
}
