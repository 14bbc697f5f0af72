//! With two CPUs: one goes offline and comes back while vCPUs are paced. The reservation that fits on one CPU is kept.
//! The other is refused, the report names its VM, and the VM continues to run. Both are enforced again when the CPU is
//! back. This is repeated ten times at arbitrary moments, and once with the daemon killed meanwhile. Bulk work
//! continues, and a reset restores every policy.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;

use crate::inside::command::{attempt, sh, start, within, write};
use crate::inside::daemon::{Daemon, configure, reset, rt_tenant};
use crate::inside::knobs::{expect_same, of_threads, snapshot};
use crate::inside::reserved::{Look, refused, reservation, shown};
use crate::inside::thread::{Place, place, ran};
use crate::inside::vm::Vm;

pub(crate) fn hotplug() -> Result<()> {
    // When its reservation is refused, a VM spins at real-time priority under its cap. This test needs CPU time as
    // well.
    configure("tenants.toml", &["a", "b"].map(|name| rt_tenant(name, "runtime-cap = 0.2")).concat())?;
    let (a, b) = (start_stopped("a", "10.1.0.2")?, start_stopped("b", "10.1.0.3")?);
    let (vcpu_a, vcpu_b) = (a.vcpu()?, b.vcpu()?);
    // Most of both CPUs is left for the daemon and for this test.
    configure("sched.toml", &format!("reserve = 0.8\n{}{}", reservation("a", "2ms"), reservation("b", "3ms")))?;
    let before = of_threads(&snapshot()?, &["CPU 0/KVM"]);
    let bulk = start(sh("exec nice -n 19 sh -c 'while :; do :; done'"))?;
    for vm in [&a, &b] {
        vm.signal(Signal::CONT)?;
    }
    let mut daemon = Daemon::start()?;
    both()?;
    let cpus = Look::take()?.cpus();
    ensure!(cpus == [0, 1], "not both CPUs: {cpus:?}");

    set_online(false)?;
    one()?;
    println!("{}", shown()?);
    let threads = [vcpu_a, vcpu_b, bulk.pid()];
    let have_run = || threads.iter().map(|thread| ran(*thread)).collect::<Result<Vec<_>>>();
    let earlier = have_run()?;
    sleep(Duration::from_secs(5));
    let later = have_run()?;
    let ms: Vec<u128> =
        earlier.iter().zip(&later).map(|(earlier, later)| later.saturating_sub(*earlier).as_millis()).collect();
    println!("one CPU: a, b and bulk ran {ms:?} ms of 5,000");
    ensure!(ms.iter().all(|ms| *ms > 0), "somebody starves on one CPU: a, b and bulk ran {ms:?} ms");
    set_online(true)?;
    both()?;

    // At arbitrary moments of a slice, and faster than the daemon checks the CPUs.
    for pause in [10, 300, 70, 1100, 0, 500, 20, 2000, 150, 3].map(Duration::from_millis) {
        set_online(false)?;
        sleep(pause);
        set_online(true)?;
        sleep(pause);
        attempt("ontime status")?.expect(&[0, 1, 2]).context("the daemon is gone")?;
    }
    both()?;
    ensure!(daemon.runs()?, "the daemon is gone");

    // The daemon and its pacers die while their CPU is offline.
    set_online(false)?;
    daemon.dies()?;
    for (name, vcpu) in [("a", vcpu_a), ("b", vcpu_b)] {
        let what = format!("{name} is SCHED_OTHER after the daemon's death");
        within(60, &what, || Ok(place(vcpu)? == Place::OTHER))?;
    }
    let daemon = Daemon::start()?;
    one()?;
    set_online(true)?;
    both()?;

    bulk.end(Signal::TERM)?;
    reset()?;
    for vm in [&a, &b] {
        vm.signal(Signal::STOP)?;
    }
    expect_same("vCPUs after the reset", &before, &of_threads(&snapshot()?, &["CPU 0/KVM"]))?;
    daemon.ends()
}

/// A guest that spins, stopped: it would only make the rest slow.
fn start_stopped(name: &str, address: &str) -> Result<Vm> {
    let vm = Vm::start_small(name, "spin", "rt", address)?;
    vm.wait()?;
    vm.signal(Signal::STOP)?;
    Ok(vm)
}

/// Takes CPU 1 away, or brings it back.
fn set_online(online: bool) -> Result<()> {
    write("/sys/devices/system/cpu/cpu1/online", if online { "1" } else { "0" })
}

/// Waits until both reservations are kept.
fn both() -> Result<()> {
    within(240, "both reservations are kept", || {
        let look = Look::take()?;
        Ok(look.keeps("a") && look.keeps("b"))
    })
}

/// Waits until one reservation is kept, on one CPU, and `ontime top` reports the other as refused.
fn one() -> Result<()> {
    within(240, "one reservation is kept on CPU 0, and the other is refused", || {
        let look = Look::take()?;
        Ok(look.cpus() == [0] && (look.keeps("a") || look.keeps("b")) && !refused()?.is_empty())
    })
}
