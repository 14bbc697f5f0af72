//! A libvirt VM, a plain QEMU VM and a container (systemd-nspawn) that already run are found, classified and placed.
//! Tenants start and stop; libvirt's hook notifies the daemon.

use std::fs;
use std::os::unix::fs::MetadataExt;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;

use crate::inside::command::{attempt, expect, read, run, sh, signal, start, start_to, within};
use crate::inside::daemon::{Daemon, configure, json, metric, report, reset, rt_tenant};
use crate::inside::knobs::{expect_same, snapshot};
use crate::inside::thread::{Place, expect_place, name, place, processes, thread};
use crate::inside::vm::Vm;

/// The container's cgroup.
const BOX: &str = "/sys/fs/cgroup/machine.slice/systemd-nspawn@box.service";
/// The file by which libvirt's hook wakes the daemon.
const POKE: &str = "/run/ontime/poke";

pub(crate) fn tenants() -> Result<()> {
    for dir in ["/etc/libvirt/hooks/qemu.d", "/run/box", BOX] {
        fs::create_dir_all(dir).with_context(|| format!("making {dir}"))?;
    }
    fs::copy("/lab/hook", "/etc/libvirt/hooks/qemu.d/ontime").context("installing libvirt's hook")?;
    let tenants = [("plain", "kind = \"qemu\"\nlevel = 1"), ("box", "kind = \"container\"\nlevel = 3")];
    configure("tenants.toml", &tenants.map(|(name, settings)| rt_tenant(name, settings)).concat())?;
    configure("daemon.toml", "rescan-seconds = 3600\n")?;
    run("lab-libvirt up")?;
    let attributes = "class=\"rt\" level=\"0\" runtime-cap=\"0.8\"";
    run(["lab-libvirt", "define", "lv", "rt", "rt", "10.1.0.2", attributes])?;
    let lv = Vm::of_libvirt("lv");
    run("ip address add 10.1.0.9/24 dev br-rt")?;
    run("ip address add 10.2.0.9/24 dev br-bulk")?;
    let before = snapshot()?;
    let plain = Vm::start("plain", "rt", "bulk", "10.2.0.2")?;
    plain.wait()?;
    let daemon = Daemon::start()?;

    // Two more tenants start: only events notify the daemon.
    run("virsh -q start lv")?;
    run("mount --bind / /run/box")?;
    // As systemd-nspawn@.service does, without systemd.
    let nspawn = format!(
        "echo $$ > {BOX}/cgroup.procs; exec systemd-nspawn --quiet --keep-unit --register=no --link-journal=no \
         --machine=box --network-veth --volatile=overlay -D /run/box -- sleep 10000"
    );
    start_to(sh(&nspawn), "/lab/nspawn.log")?;
    lv.wait()?;
    let traffic = start("ping -q -c 200 -i 0.02 10.1.0.2")?;
    run("ping -q -c 20 -i 0.02 10.2.0.2")?;
    has_place("libvirt's vCPU", || lv.vcpu(), Place::fifo(47))?;
    has_place("QEMU's vCPU", || plain.vcpu(), Place::fifo(42))?;
    expect_place("libvirt's vhost", lv.vhost()?, Place::fifo(48))?;
    expect_place("QEMU's vhost", plain.vhost()?, Place::fifo(43))?;
    expect_place("libvirt's iothread", thread(lv.pid()?, "IO iothread1")?, Place::OTHER)?;
    within(40, "the container's process runs", || contained().map(|_| true))?;
    has_place("the container's process", contained, Place::fifo(32))?;
    expect("NAPI threading of rt0", 1, read("/sys/class/net/rt0/threaded")?)?;
    for nic in ["rt0", "bulk0"] {
        ensure!(!processes(&format!("napi/{nic}*")).is_empty(), "{nic} has no NAPI thread");
    }
    for thread in processes("napi/rt0*") {
        expect_place("NAPI of rt0", thread, Place::fifo(49))?;
    }
    are_shown()?;
    traffic.wait()?.expect(&[0]).context("the libvirt VM does not answer")?;

    // The hook, as libvirt calls it: it touches a file, which wakes the daemon.
    run(format!("touch -d @1 {POKE}"))?;
    run("virsh -q destroy lv")?;
    ensure!(fs::metadata(POKE).context(POKE)?.mtime() > 1, "libvirt did not run the hook");
    within(40, "lv is gone", || Ok(!report("ontime ps --json")?.contains("\"lv\"")))?;
    within(40, "no tenant has class rt0", || Ok(metric("ontime_tenants{class=\"rt0\"}")? == 0.0))?;
    // Together with another event the hook would not be recorded as the reason of the pass.
    within(40, "the hook is the reason of a pass", || {
        run(format!("touch {POKE}"))?;
        Ok(metric("ontime_passes_total{reason=\"hook\"}")? > 0.0)
    })?;

    // The VM starts again, with other threads, and its class changes while it runs.
    run("virsh -q start lv")?;
    has_place("the vCPU of the VM that starts again", || lv.vcpu(), Place::fifo(47))?;
    set_metadata("class=\"bulk\"")?;
    has_place("the vCPU with class bulk", || lv.vcpu(), Place::OTHER)?;
    set_metadata("class=\"rt\" level=\"2\"")?;
    has_place("the vCPU with level 2", || lv.vcpu(), Place::fifo(37))?;

    // VMs start and end in quick succession, beside one that runs.
    for _ in 0..5 {
        run("virsh -q destroy lv")?;
        run("virsh -q start lv")?;
        Vm::start("storm", "idle", "bulk", "10.2.0.7")?.stop()?;
    }
    has_place("the vCPU after the storm", || lv.vcpu(), Place::fifo(47))?;
    run("ping -q -c 20 -i 0.02 10.2.0.2").context("the VM beside the storm was hurt")?;
    expect("threads placed that could not be", 0, metric("ontime_knob_failures_total")?)?;

    // A reset restores all, also the tenants that still run.
    reset()?;
    expect_place("the vCPU after the reset", lv.vcpu()?, Place::OTHER)?;
    // Also processes that the container forked after it was placed.
    for file in run(format!("find {BOX} -name cgroup.threads"))?.lines() {
        for thread in read(file)?.lines() {
            let thread: i32 = thread.parse().with_context(|| format!("{file}: {thread}"))?;
            expect_place(&format!("the container after the reset: {}", name(thread)?), thread, Place::OTHER)?;
        }
    }
    daemon.ends()?;
    run("virsh -q destroy lv")?;
    plain.stop()?;
    // The first process of a PID namespace heeds nothing less.
    signal(contained()?, Signal::KILL)?;
    within(40, "the container's NIC is gone", || Ok(attempt("ip link show ve-box")?.status != 0))?;
    expect_same("knobs after the reset", &before, &snapshot()?)
}

/// Waits until a thread has a place.
fn has_place(what: &str, thread: impl Fn() -> Result<i32>, wanted: Place) -> Result<()> {
    within(40, &format!("{what}: {wanted}"), || Ok(place(thread()?)? == wanted))
}

/// The first process in the container.
fn contained() -> Result<i32> {
    let found = run(["pgrep", "-x", "-f", "sleep 10000"])?;
    found.trim().parse().with_context(|| format!("'{found}' is no process"))
}

/// Gives the running libvirt VM other attributes.
fn set_metadata(attributes: &str) -> Result<()> {
    let tenant = format!("<tenant {attributes}/>");
    let space = "https://ontime.dev/xmlns/tenant/1";
    run(["virsh", "-q", "metadata", "lv", space, "--key", "ontime", "--live", "--set", tenant.as_str()]).map(drop)
}

/// Fails unless `ontime ps` shows the three tenants with their classes, what decided these, and their threads.
fn are_shown() -> Result<()> {
    let shown = report("ontime ps")?;
    println!("{shown}");
    for (row, source) in
        [("lv libvirt rt0 metadata", ""), ("plain qemu rt1 ", "tenants.toml"), ("box container rt3 ", "tenants.toml")]
    {
        let fits = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ").starts_with(row);
        let found = shown.lines().any(|line| !line.starts_with(' ') && fits(line) && line.contains(source));
        ensure!(found, "ontime ps has no row '{row}' with {source}");
    }
    let count = |role: &str, name: &str| {
        let is_it = |line: &&str| line.split_once(role).is_some_and(|(_, rest)| rest.contains(name));
        shown.lines().filter(is_it).count()
    };
    expect("vCPUs in ontime ps", 2, count(" vcpu0 ", ""))?;
    expect("vhost threads in ontime ps", 2, count(" vhost ", ""))?;
    expect("iothreads in ontime ps", 1, count(" iothread ", "IO iothread1"))?;
    ensure!(count(" emulator ", "qemu-system") > 0, "no emulator thread in ontime ps");
    let tenants = json("ontime ps --json")?;
    let list = tenants.get("tenants").and_then(Value::as_array).into_iter().flatten();
    let mut caps = list.map(|tenant| tenant.get("runtime_cap").and_then(Value::as_f64));
    ensure!(caps.any(|cap| cap == Some(0.8)), "the cap of the metadata is not known: {tenants}");
    Ok(())
}
