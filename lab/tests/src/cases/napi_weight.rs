//! 6.12 with PREEMPT_RT: the host module alone, then rule napi-weight, compared with the budget of each poll in the
//! kernel's own tracepoint. The traffic is pings to the client's side.

use std::io;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::inside::command::{expect, read, run, sh, start, within};
use crate::inside::daemon::{Daemon, check, configure, report, reset};
use crate::inside::module::{expect_healthy_kernel, expect_privileged, file, load, refusal, replies, set, unload};

const TRACE: &str = "/sys/kernel/tracing/trace";
const POLLS: &str = "/sys/kernel/tracing/events/napi/napi_poll/enable";

pub(crate) fn napi_weight() -> Result<()> {
    run("ip addr add 10.2.0.9/24 dev br-bulk")?;
    within(20, "the link of bulk0 is up", || replies("-c 1 -W 1 10.2.0.1"))?;
    expect("budget before the module", 64, budget()?)?;
    the_module()?;
    expect("budget after the module", 64, budget()?)?;
    the_rule()?;
    unload()?;
    expect_healthy_kernel()
}

/// Loads the module and unloads it.
fn the_module() -> Result<()> {
    load()?;
    expect("weight at first", "default", weight("bulk0")?)?;
    ensure!(Path::new(&file("br-rt", "napi_weight")).exists(), "a bridge has no file");
    weigh("bulk0", "4")?;
    expect("weight set", 4, weight("bulk0")?)?;
    expect("the kernel's budget", 4, budget()?)?;
    expect("another NIC's weight", "default", weight("rt0")?)?;
    let bulk = file("bulk0", "napi_weight");
    for (values, error) in [(["0", "65", "-1"], libc::ERANGE), (["four", "", "4x"], libc::EINVAL)] {
        for value in values {
            let refusal = refusal(&bulk, value).with_context(|| format!("napi_weight took '{value}'"))?;
            expect(&format!("'{value}'"), io::Error::from_raw_os_error(error), refusal)?;
        }
    }
    expect_privileged(&bulk, "8")?;
    weigh("bulk0", "64")?;
    expect("the driver's own, as a limit", 64, budget()?)?;
    weigh("bulk0", "8")?;
    run("ip link set bulk0 down")?;
    expect("weight while it is down", 8, weight("bulk0")?)?;
    run("ip link set bulk0 up")?;
    within(10, "the link of bulk0 is up again", || replies("-c 1 -W 1 10.2.0.1"))?;
    expect("budget after ifdown and ifup", 8, budget()?)?;
    weigh("bulk0", "default")?;
    expect("budget of the driver again", 64, budget()?)?;

    // NAPI instances that are added later get the weight too. It ends with the interface, or when that moves to another
    // namespace.
    run("ip netns add away")?;
    run("ip link add v0 type veth peer name v1")?;
    weigh("v0", "2")?;
    run("ethtool -K v0 gro on")?;
    run("ip link set v0 up")?;
    expect("weight of instances made since", 2, weight("v0")?)?;
    run("ip link set v0 netns away")?;
    let away = run(format!("ip netns exec away cat {}", file("v0", "napi_weight")))?;
    expect("weight in another namespace", "default", away.trim_end())?;
    weigh("v1", "2")?;
    run("ip link del v1")?;
    // Its files are read and written while it is removed.
    for _ in 0..5 {
        run("ip link add v0 type veth peer name v1")?;
        let (of_v0, of_v1) = (file("v0", "napi_weight"), file("v1", "napi_weight"));
        let reader = start(sh(&format!("while cat {of_v0} > /dev/null; do :; done")))?;
        let writer = start(sh(&format!("while echo 3 > {of_v1}; do :; done")))?;
        run("ip link del v0")?;
        reader.wait()?;
        writer.wait()?;
    }
    weigh("bulk0", "4")?;
    unload()?;
    ensure!(!Path::new("/sys/class/net/bulk0/ontime").exists(), "a file outlives the module");
    Ok(())
}

/// The rule is reported while the module is missing, applied while it is loaded, and undone by a reset. The module is
/// loaded at the end.
fn the_rule() -> Result<()> {
    configure("host.toml", "[nic.rt0]\nclass = \"rt\"\n")?;
    is_said("modprobe ontime_napi")?;
    load()?;
    is_said("bulk0 ontime/napi_weight: default, wanted 4")?;
    configure("daemon.toml", "rescan-seconds = 1\n")?;
    let daemon = Daemon::start()?;
    let has_weight = || within(40, "the weight of bulk0 is 4", || Ok(weight("bulk0")? == "4"));
    has_weight()?;
    expect("the RT NIC's weight", "default", weight("rt0")?)?;
    expect("the backlog's weight", 4, read("/proc/sys/net/core/dev_weight")?)?;
    let rule = check("napi-weight")?;
    ensure!(rule.state == "ok", "doctor: {}", rule.text);
    ensure!(report("ontime net status bulk0")?.contains("napi_weight"), "net status does not show it");
    weigh("bulk0", "default")?;
    has_weight()?;
    run("ip link set bulk0 down")?;
    run("ip link set bulk0 up")?;
    has_weight()?;
    // Unloaded and loaded again while applied.
    unload()?;
    is_said("modprobe ontime_napi")?;
    load()?;
    has_weight()?;
    expect("the kernel's budget under the rule", 4, budget()?)?;
    reset()?;
    expect("weight after reset", "default", weight("bulk0")?)?;
    expect("the backlog's weight after reset", 64, read("/proc/sys/net/core/dev_weight")?)?;
    daemon.ends()
}

fn weight(nic: &str) -> Result<String> {
    read(file(nic, "napi_weight"))
}

fn weigh(nic: &str, value: &str) -> Result<()> {
    set(&file(nic, "napi_weight"), value)
}

/// The largest budget of bulk0's polls while packets come.
fn budget() -> Result<u64> {
    set(TRACE, "")?;
    set(POLLS, "1")?;
    run("ping -q -c 3 -i 0.2 -I br-bulk 10.2.0.1").context("no answer by bulk0")?;
    set(POLLS, "0")?;
    let trace = read(TRACE)?;
    largest_budget(&trace).with_context(|| format!("no poll of bulk0 is traced:\n{trace}"))
}

fn largest_budget(trace: &str) -> Option<u64> {
    let polls = trace.lines().filter_map(|line| line.split_once("for device bulk0 ")?.1.rsplit_once("budget "));
    polls.filter_map(|(_, budget)| budget.trim().parse().ok()).max()
}

/// Fails unless `ontime doctor` says this of the rule.
fn is_said(words: &str) -> Result<()> {
    let text = check("napi-weight")?.text;
    ensure!(text.contains(words), "doctor: wanted '{words}', found {text}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_budget_of_one_device_is_found() {
        let line = |device: &str, budget: u32| {
            let head = "  napi/bulk0-8193-411 [000] ..... 41.203: napi_poll: napi poll on napi struct 00000000c2d2";
            format!("{head} for device {device} work 1 budget {budget}\n")
        };
        let trace = ["# tracer: nop\n", &line("rt0", 64), &line("bulk0", 4), &line("bulk0", 8)].concat();
        assert_eq!(largest_budget(&trace), Some(8));
        assert_eq!(largest_budget(&line("rt0", 64)), None);
    }
}
