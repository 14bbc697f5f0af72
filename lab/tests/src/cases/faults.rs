//! Changes of links, drivers, queues, sysctls and of the daemon itself under traffic.

use std::fs;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::traffic::flows;
use crate::inside::command::{attempt, expect, files, read, run, sh, start, within, write};
use crate::inside::daemon::{Daemon, metric, report, reset};
use crate::inside::thread::{Place, expect_place, place, processes};

const SKB_DEFER_MAX: &str = "/proc/sys/net/core/skb_defer_max";

/// All faults, one after another. The daemon runs with rescan-seconds = 1 and has applied; at the end there is none,
/// and all is reset. `before`: the knobs before the daemon's start.
pub(crate) fn faults(daemon: Daemon, rt_vcpu: i32, before: &[String]) -> Result<()> {
    println!("== ifdown, ifup, rename under traffic");
    links()?;
    println!("== driver unbound and bound under traffic");
    driver()?;
    println!("== given back while an interface is down");
    given_back_while_down()?;
    println!("== queues");
    queues()?;
    println!("== a sysctl behind the daemon's back");
    sysctl()?;
    println!("== a full disk");
    daemon.ends()?;
    full_disk(rt_vcpu, before)?;
    println!("== killed while it applies, and while it resets");
    killed(rt_vcpu)?;
    flows(10)?;
    let log = Daemon::log()?;
    let is_stranger =
        |line: &&str| line.split_once("thread ").is_some_and(|(_, rest)| rest.contains(" (ontime) of process"));
    let strangers: Vec<&str> = log.lines().filter(is_stranger).collect();
    ensure!(strangers.is_empty(), "the guardian of a killed daemon was taken for a stranger: {strangers:?}");
    Ok(())
}

fn links() -> Result<()> {
    for nic in ["rt0", "bulk0"] {
        run(format!("ip link set {nic} down"))?;
        sleep(Duration::from_millis(200));
        run(format!("ip link set {nic} up"))?;
    }
    napi_comes("rt0", "rt0", Place::fifo(49))?;
    napi_comes("bulk0", "bulk0", Place::OTHER)?;
    rename("bulk0", "wan0")?;
    within(40, "wan0 is threaded", || {
        let is_it = |line: &str| line.split_whitespace().take(3).eq(["ok", "napi-threaded", "wan0"]);
        Ok(report("ontime status --all")?.lines().any(is_it))
    })?;
    rename("wan0", "bulk0")?;
    napi_comes("bulk0", "bulk0", Place::OTHER)?;
    flows(10)
}

fn rename(from: &str, to: &str) -> Result<()> {
    run(format!("ip link set {from} down"))?;
    run(format!("ip link set {from} name {to}"))?;
    run(format!("ip link set {to} up")).map(drop)
}

fn driver() -> Result<()> {
    let device = fs::canonicalize("/sys/class/net/rt0/device").context("the device of rt0")?;
    let device = device.file_name().and_then(|name| name.to_str()).context("the device of rt0 has no name")?;
    let driver = fs::canonicalize(format!("/sys/bus/pci/devices/{device}/driver")).context("the driver of rt0")?;
    write(driver.join("unbind"), device)?;
    sleep(Duration::from_millis(500));
    write(driver.join("bind"), device)?;
    let nics = || files(&format!("/sys/bus/pci/devices/{device}/net/*"));
    within(10, "the driver has its NIC again", || Ok(!nics().is_empty()))?;
    let nics = nics();
    let new = nics.first().and_then(|path| path.rsplit('/').next()).context("the driver has no NIC")?;
    if new != "rt0" {
        run(format!("ip link set {new} name rt0"))?;
    }
    run("ip link set rt0 master br-rt up")?;
    napi_comes("rt0", new, Place::fifo(49))
}

/// On an interface that is down the kernel would never finish ending the NAPI threads, and every program that uses an
/// interface would block after that.
fn given_back_while_down() -> Result<()> {
    let is_threaded = |wanted: u8| expect("NAPI threading of bulk0", wanted, read("/sys/class/net/bulk0/threaded")?);
    run("ip link set bulk0 down")?;
    let refused = attempt("ontime reset")?;
    let says_so = refused.stdout.contains("bulk0 is down") || refused.stderr.contains("bulk0 is down");
    ensure!(refused.status == 1 && says_so, "reset of an interface that is down: {refused:?}");
    is_threaded(1).context("down")?;
    run("ip link set bulk0 up")?;
    reset()?;
    is_threaded(0).context("up again")?;
    // An interface that is down when Ontime is applied becomes threaded only when it comes up, so that a reset before
    // that is possible.
    run("ip link set bulk0 down")?;
    run("ontime apply")?;
    is_threaded(0).context("down when Ontime was applied")?;
    run("ip link set bulk0 up")?;
    napi_comes("bulk0", "bulk0", Place::OTHER)?;
    flows(40)
}

fn queues() -> Result<()> {
    run("ip link add q0 numrxqueues 4 numtxqueues 4 type veth peer name q1")?;
    run("ethtool -K q0 gro on")?;
    run("ethtool -L q0 rx 1 tx 1")?;
    run("ip link set q1 up")?;
    run("ip link set q0 up")?;
    queues_come(1)?;
    for count in [4, 2] {
        run(format!("ethtool -L q0 rx {count} tx {count}"))?;
        queues_come(count)?;
    }
    run("ip link del q0").map(drop)
}

fn queues_come(count: usize) -> Result<()> {
    within(40, &format!("q0 has {count} threads"), || {
        Ok(processes("napi/q0*").len() == count && napi_is("q0", "q0", Place::OTHER)?)
    })
}

fn sysctl() -> Result<()> {
    let drifted = metric("ontime_drift_total")?;
    write(SKB_DEFER_MAX, "64\n")?;
    within(40, "skb_defer_max is 0 again", || Ok(read(SKB_DEFER_MAX)? == "0"))?;
    within(40, "the drift is counted", || Ok(metric("ontime_drift_total")? > drifted))?;
    let log = Daemon::log()?;
    ensure!(log.contains("skb_defer_max was changed to 64 by another program"), "the log does not say so");
    Ok(())
}

/// Where originals cannot be kept, nothing is changed, until there is space.
fn full_disk(rt_vcpu: i32, before: &[String]) -> Result<()> {
    reset()?;
    run("mkdir -p /run/small")?;
    run("mount -t tmpfs -o size=64k tmpfs /run/small")?;
    // It ends when the disk is full.
    attempt(sh("head -c 1M /dev/zero > /run/small/filler"))?;
    let daemon = Daemon::start_with("--state-dir /run/small")?;
    within(10, "status says that the disk is full", || {
        Ok(report("ontime status")?.contains("No space left on device"))
    })?;
    expect_place("the RT vCPU where originals cannot be kept", rt_vcpu, Place::OTHER)?;
    let original =
        before.iter().find_map(|line| line.strip_prefix(SKB_DEFER_MAX)).context("no skb_defer_max before")?;
    expect("skb_defer_max where originals cannot be kept", original.trim_start(), read(SKB_DEFER_MAX)?)?;
    fs::remove_file("/run/small/filler").context("making space")?;
    within(10, "the RT vCPU is placed", || Ok(place(rt_vcpu)? == Place::fifo(47)))?;
    reset()?;
    daemon.ends()
}

fn killed(rt_vcpu: i32) -> Result<()> {
    for milliseconds in [20, 100, 300] {
        let daemon = Daemon::start()?;
        reset()?;
        killed_during("ontime apply", daemon, milliseconds)?;
        let daemon = Daemon::start()?;
        within(5, "the RT vCPU is placed", || Ok(place(rt_vcpu)? == Place::fifo(47)))?;
        // A client that finds no daemon any more resets by itself.
        killed_during("ontime reset", daemon, milliseconds)?;
        reset()?;
        expect_place("the RT vCPU after kill -9 and reset", rt_vcpu, Place::OTHER)?;
    }
    Ok(())
}

/// Kills the daemon some time after the start of a command that asks it. The command must end.
fn killed_during(command: &str, daemon: Daemon, milliseconds: u64) -> Result<()> {
    let mut asking = start(command)?;
    sleep(Duration::from_millis(milliseconds));
    daemon.dies()?;
    within(30, &format!("'{command}' has ended"), || asking.is_over())
}

/// Waits until a NIC is threaded and every one of its threads has a place. A thread keeps the name that the NIC had
/// when the daemon made it threaded.
fn napi_comes(nic: &str, former: &str, wanted: Place) -> Result<()> {
    within(40, &format!("NAPI threads of {nic} at {wanted}"), || napi_is(nic, former, wanted))
}

fn napi_is(nic: &str, former: &str, wanted: Place) -> Result<bool> {
    let mut threads = processes(&format!("napi/{nic}-*"));
    if former != nic {
        threads.extend(processes(&format!("napi/{former}-*")));
    }
    let places = threads.iter().map(|thread| place(*thread)).collect::<Result<Vec<_>>>()?;
    let is_threaded = read(format!("/sys/class/net/{nic}/threaded"))? == "1";
    Ok(is_threaded && !places.is_empty() && places.iter().all(|place| *place == wanted))
}
