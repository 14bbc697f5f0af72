//! Two RT levels, each VM on a NIC of its own. Every thread of a VM's path has its level's priority, and interrupt
//! threads of disks and consoles are below. A rule that is switched off restores what it set.

use anyhow::{Result, ensure};
use rustix::process::Signal;
use serde_json::Value;

use crate::inside::command::{attempt, expect, run, sh, start, within};
use crate::inside::daemon::{Daemon, check, configure, json, report, reset, rt_tenant};
use crate::inside::thread::{Place, expect_place, name, nice, place, processes};
use crate::inside::vm::Vm;

pub(crate) fn levels() -> Result<()> {
    configure("tenants.toml", &(rt_tenant("rt", "level = 0") + &rt_tenant("rt1", "level = 1")))?;
    let rt = Vm::start_small("rt", "paused", "rt", "10.1.0.2")?;
    let rt1 = Vm::start_small("rt1", "paused", "bulk", "10.2.0.2")?;
    ensure!(attempt("ontime net status")?.status != 0, "nothing is applied, and net status calls that well");
    let devices = devices()?;
    ensure!(devices.len() >= 2, "a disk and a console have no interrupt threads at FIFO 50: {devices:?}");
    let daemon = Daemon::start()?;
    run("ontime net status rt0 bulk0")?;
    for (vm, nic, top) in [(&rt, "rt0", 50), (&rt1, "bulk0", 45)] {
        let polls = processes(&format!("napi/{nic}*"));
        ensure!(!polls.is_empty(), "{nic} has no NAPI thread");
        for thread in polls {
            expect_place(&format!("NAPI of {nic}"), thread, Place::fifo(top - 1))?;
        }
        expect_place(&format!("vhost of {nic}"), vm.vhost()?, Place::fifo(top - 2))?;
        let vcpus = vm.vcpus()?;
        ensure!(!vcpus.is_empty(), "the VM on {nic} has no vCPU");
        for thread in vcpus {
            expect_place(&format!("vCPU on {nic}"), thread, Place::fifo(top - 3))?;
        }
        for thread in interrupts(|name| name.contains(&format!("-{nic}")))? {
            expect_place(&format!("interrupt of {nic}"), thread, Place::fifo(top))?;
        }
    }
    are_below(&devices)?;
    run("dd if=/dev/vdb of=/dev/null bs=4k count=100 iflag=direct")?;

    // Switched off: the former values are restored, there is a finding, and the doctor reports it.
    configure("host.toml", "without = [\"device-irq\"]\n")?;
    daemon.reload()?;
    within(40, "interrupt threads of devices are the kernel's again", || are_the_kernels(&devices))?;
    within(10, "status has the finding", || Ok(report("ontime status")?.contains("rule device-irq is switched off")))?;
    let rule = check("device-irq")?;
    ensure!(rule.state == "warning" && rule.text.contains("wanted OTHER nice -20"), "doctor: {}", rule.text);

    // One NIC for both levels: its threads have the priority of the higher level.
    configure(
        "host.toml",
        "[nic.bulk0]\nclass = \"bulk\"\n[nic.rt0]\ntenants = [\"rt1\"]\n[nic.nowhere]\nclass = \"rt\"\n",
    )?;
    daemon.reload()?;
    within(40, "bulk0 has class bulk", || Ok(row_of("bulk0")?.split_whitespace().nth(1) == Some("bulk")))?;
    ensure!(row_of("rt0")?.contains("rt0  rt0 (used by rt, rt1)"), "net status: {}", row_of("rt0")?);
    let status = report("ontime status")?;
    let is_said = |line: &str| line.split_once("nowhere").is_some_and(|(_, rest)| rest.contains("host-config"));
    ensure!(status.lines().any(is_said), "status does not say that there is no such NIC: {status}");
    within(10, "interrupt threads of devices are below", || Ok(are_below(&devices).is_ok()))?;
    are_below(&devices)?;

    // A VM on a macvtap: QEMU, whose vCPU never runs here, has a descriptor of the interface's character device.
    run("ip link add v0 type veth peer name v1")?;
    run("ip link add link v0 name mv0 type macvtap mode bridge")?;
    let qemu = "exec qemu-system-x86_64 -name guest=onmacvtap -S -display none -no-user-config -nodefaults -m 16 \
        -netdev tap,id=n,fd=3 -device virtio-net-pci,netdev=n,romfile= 3<> /dev/tap$(cat /sys/class/net/mv0/ifindex)";
    let qemu = start(sh(qemu))?;
    within(30, "the VM is on mv0", || is_on("onmacvtap", "mv0"))?;
    qemu.end(Signal::TERM)?;
    reset()?;
    ensure!(are_the_kernels(&devices)?, "interrupt threads of devices are not the kernel's after the reset");
    daemon.ends()
}

/// The interrupt threads whose names fit.
fn interrupts(fits: impl Fn(&str) -> bool) -> Result<Vec<i32>> {
    let mut threads = Vec::new();
    for thread in processes("irq/*") {
        if fits(&name(thread)?) {
            threads.push(thread);
        }
    }
    Ok(threads)
}

/// The interrupt threads of devices that are no NIC, at the kernel's own priority. Second halves have another one.
fn devices() -> Result<Vec<i32>> {
    let mut threads = interrupts(|name| !name.contains("-rt0") && !name.contains("-bulk0"))?;
    threads.retain(|thread| place(*thread).is_ok_and(|place| place == Place::fifo(50)));
    Ok(threads)
}

fn are_the_kernels(devices: &[i32]) -> Result<bool> {
    let places = devices.iter().map(|thread| place(*thread)).collect::<Result<Vec<_>>>()?;
    Ok(places.iter().all(|place| *place == Place::fifo(50)))
}

fn are_below(devices: &[i32]) -> Result<()> {
    for thread in devices {
        let name = name(*thread)?;
        expect_place(&name, *thread, Place::OTHER)?;
        expect(&format!("nice value of {name}"), -20, nice(*thread)?)?;
    }
    Ok(())
}

/// What `ontime net status` says of a NIC, from its name on.
fn row_of(nic: &str) -> Result<String> {
    let status = report(format!("ontime net status {nic}"))?;
    let row = status.lines().find(|line| line.starts_with(&format!("{nic}  ")));
    Ok(row.unwrap_or_default().to_owned())
}

fn is_on(vm: &str, nic: &str) -> Result<bool> {
    let named = |value: &Value, name: &str| value.get("name").and_then(Value::as_str) == Some(name);
    let answer = json("ontime ps --json")?;
    let mut tenants = answer.get("tenants").and_then(Value::as_array).into_iter().flatten();
    let tenant = tenants.find(|tenant| named(tenant, vm));
    let nics = tenant.and_then(|tenant| tenant.get("nics")?.as_array());
    Ok(nics.is_some_and(|nics| nics.iter().any(|of| named(of, nic))))
}
