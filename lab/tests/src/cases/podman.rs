//! Containers that Podman creates with crun, one RT and one bulk, from an image made here of /lab/busybox. The RT
//! container is found by its name. Its process, and a process that is started in it later by exec, are placed, and both
//! ends of its veth pair hand packets over by the receiver's NAPI. The bulk container is left unchanged. Both answer,
//! and a reset restores everything.

use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::inside::command::{expect, read, run, sh, within};
use crate::inside::daemon::{Daemon, configure, report, reset, rt_tenant};
use crate::inside::knobs::{expect_same, snapshot};
use crate::inside::thread::{Place, expect_place, place, processes};

pub(crate) fn podman() -> Result<()> {
    configure("tenants.toml", &rt_tenant("plc", "kind = \"container\"\nlevel = 0"))?;
    run("ip address add 10.1.0.1/24 dev br-rt")?;
    // An image with busybox. No registry is used.
    run("install -D -m 755 /lab/busybox /run/image/bin/busybox")?;
    run(sh("tar -C /run/image -c . | podman import --quiet - lab-image"))?;

    let hog = start("hog", "10.1.0.8")?;
    let before = snapshot()?;
    let daemon = Daemon::start()?;
    let plc = start("plc", "10.1.0.9")?;
    println!("cgroup of the RT container: {}", read(format!("/proc/{plc}/cgroup"))?);
    within(40, "the RT container is placed", || is_placed(plc))?;
    run("podman exec --detach plc /bin/busybox sleep 20000")?;
    within(40, "the process of podman exec is there", || executed().map(|_| true))?;
    let executed = executed()?;
    within(40, "the process of podman exec is placed", || is_placed(executed))?;
    expect_place("the bulk container", hog, Place::OTHER)?;
    let tenants = report("ontime ps")?;
    let has = |wanted: [&str; 3], source: &str| {
        let is_it = |line: &str| line.split_whitespace().take(3).eq(wanted) && line.contains(source);
        tenants.lines().any(is_it)
    };
    ensure!(has(["plc", "container", "rt0"], "tenants.toml"), "ontime ps has no container plc: {tenants}");
    ensure!(has(["hog", "container", "bulk"], ""), "ontime ps has no container hog: {tenants}");

    let (gro, tso) = ("generic-receive-offload", "tcp-segmentation-offload");
    within(40, "v-plc has GRO", || Ok(offload("v-plc", gro)? == "on"))?;
    expect("TSO of v-plc", "off", offload("v-plc", tso)?)?;
    let far_end = format!("nsenter -t {plc} -n ethtool -k eth0");
    expect("GRO of the far end", "on", feature(&far_end, gro)?)?;
    expect("TSO of the far end", "off", feature(&far_end, tso)?)?;
    expect("GRO of v-hog", "off", offload("v-hog", gro)?)?;
    within(40, "v-plc has a NAPI thread", || Ok(!processes("napi/v-plc*").is_empty()))?;
    for thread in processes("napi/v-plc*") {
        expect_place("NAPI of v-plc", thread, Place::fifo(49))?;
    }
    for address in ["10.1.0.8", "10.1.0.9"] {
        run(format!("ping -q -c 20 -i 0.02 {address}"))?;
    }

    // After a restart the container has another process, which is placed again. A removed container is no tenant.
    run("podman restart --time 0 plc")?;
    let plc = process("plc")?;
    within(40, "the RT container is placed after its restart", || is_placed(plc))?;
    run("podman rm --force --time 0 plc")?;
    within(40, "the removed container is no tenant", || Ok(!report("ontime ps --json")?.contains("\"plc\"")))?;

    reset()?;
    run("ip link del v-plc")?;
    expect_same("knobs after the reset", &before, &snapshot()?)?;
    run("podman rm --force --time 0 hog")?;
    daemon.ends()
}

/// Starts a container behind a veth pair on br-rt, as a network plugin makes it; its process.
fn start(name: &str, address: &str) -> Result<i32> {
    run(format!("ip netns add {name}"))?;
    run(format!("ip link add v-{name} master br-rt type veth peer name eth0 netns {name}"))?;
    run(format!("ip link set v-{name} up"))?;
    run(format!("ip -n {name} address add {address}/24 dev eth0"))?;
    run(format!("ip -n {name} link set eth0 up"))?;
    run(format!(
        "podman run --detach --quiet --name {name} --runtime crun --cgroup-manager cgroupfs \
         --network ns:/run/netns/{name} lab-image /bin/busybox sleep 10000"
    ))?;
    process(name)
}

/// The first process of a container.
fn process(container: &str) -> Result<i32> {
    number(&run(format!("podman inspect --format {{{{.State.Pid}}}} {container}"))?)
}

/// The process that `podman exec` has started.
fn executed() -> Result<i32> {
    let mut command = Command::new("pgrep");
    command.args(["-x", "-f", "/bin/busybox sleep 20000"]);
    number(&run(command)?)
}

fn number(text: &str) -> Result<i32> {
    text.trim().parse().with_context(|| format!("'{text}' is no process"))
}

/// Whether a process is where RT containers of level 0 are.
fn is_placed(process: i32) -> Result<bool> {
    Ok(place(process)? == Place::fifo(47))
}

/// Whether an interface has an offload: `on` or `off`.
fn offload(nic: &str, name: &str) -> Result<String> {
    feature(&format!("ethtool -k {nic}"), name)
}

/// The value of a feature in what a command prints: `NAME: on [fixed]`.
fn feature(command: &str, name: &str) -> Result<String> {
    let features = run(command)?;
    let value = features.lines().find_map(|line| line.strip_prefix(&format!("{name}: "))?.split(' ').next());
    value.map(str::to_owned).with_context(|| format!("'{command}' does not say {name}: {features}"))
}
