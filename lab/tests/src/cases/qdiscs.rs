//! Method vatc on a shared NIC with real VMs, with the NIC's qdisc and without; a reset restores everything.

use anyhow::{Result, ensure};

use crate::inside::command::{expect, run};
use crate::inside::daemon::{Daemon, apply, configure, report, reset, rt_tenant};
use crate::inside::knobs::{expect_same, root_qdisc};
use crate::inside::thread::{Place, expect_place, processes};
use crate::inside::vm::Vm;

pub(crate) fn qdiscs() -> Result<()> {
    configure("tenants.toml", &rt_tenant("rt", "level = 0"))?;
    let rt = Vm::start_small("rt", "paused", "rt", "10.1.0.2")?;
    let bulk = Vm::start_small("bulk", "paused", "rt", "10.1.0.3")?;
    let (before, own) = (all()?, root_qdisc("rt0")?);
    let daemon = Daemon::start()?;
    apply("vatc")?;
    expect("vatc: root qdisc of rt0", &own, root_qdisc("rt0")?)?;
    expect_place("vatc: the RT VM's vhost thread", rt.vhost()?, Place::fifo(48))?;
    // The NIC has one transmit queue, so a thread that sends on it for a bulk tenant is above all other threads that
    // are not real-time.
    expect_place("vatc: the bulk VM's vhost thread", bulk.vhost()?, Place::fifo(1))?;
    let receivers = processes("napi/rt0*");
    ensure!(!receivers.is_empty(), "vatc: the shared NIC has no receive thread");
    for thread in receivers {
        expect_place("vatc: receive thread of the shared NIC", thread, Place::fifo(49))?;
    }
    configure("host.toml", "[nic.rt0]\nqdisc_bypass = true\n")?;
    report("ontime reload")?;
    expect("vatc with qdisc_bypass: root qdisc of rt0", "noqueue", root_qdisc("rt0")?)?;
    apply("vanilla")?;
    expect("vanilla: root qdisc of rt0", &own, root_qdisc("rt0")?)?;
    expect_place("vanilla after vatc: the bulk VM's vhost thread", bulk.vhost()?, Place::OTHER)?;
    reset()?;
    expect_same("qdiscs after the reset", &before, &all()?)?;

    // A qdisc that an administrator configured is not replaced.
    run("tc qdisc add dev rt0 root handle 1: pfifo limit 500")?;
    let findings = apply("vatc")?;
    expect("the administrator's qdisc", "pfifo", root_qdisc("rt0")?)?;
    let finding = "pfifo 1: was set by the administrator";
    ensure!(findings.contains(finding), "no finding says that the administrator's qdisc stays: {findings}");
    reset()?;
    daemon.ends()
}

/// The qdiscs of all interfaces, with their handles.
fn all() -> Result<Vec<String>> {
    Ok(run("tc qdisc show")?.lines().map(str::to_owned).collect())
}
