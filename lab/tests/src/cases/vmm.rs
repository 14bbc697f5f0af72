//! An RT VM whose vCPU leaves its guest for a device of QEMU's, four threads that never idle, and a tool that sends
//! QEMU a query fifty times a second, as monitoring does. Rule vmm-place prevents the vCPU from waiting for QEMU's main
//! thread while that waits for the four. `lab/tests/vmm-init.sh` is the guest's first process.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::inside::command::{expect, figures, program, spin, start, within};
use crate::inside::daemon::{Daemon, configure, reset, rt_tenant};
use crate::inside::knobs::{expect_same, snapshot};
use crate::inside::thread::{Place, expect_place, place, threads};
use crate::inside::vm::Vm;

const CONSOLE: &str = "/run/lab-vm/rt.log";

pub(crate) fn vmm() -> Result<()> {
    configure("tenants.toml", &rt_tenant("rt", "level = 0"))?;
    let rt = Vm::start("rt", "reads", "rt", "10.1.0.2")?;
    rt.wait()?;
    let main = rt.pid()?;
    let before = snapshot()?;
    for _ in 0..4 {
        spin()?;
    }
    let mut monitor = start(program("a_vcpu_does_not_wait_for_its_vmm", "monitor", &[])?)?;
    let daemon = Daemon::start()?;

    let has_place =
        |wanted: Place| within(40, &format!("QEMU's main thread is {wanted}"), || Ok(place(main)? == wanted));
    has_place(Place::fifo(3))?;
    let with = measured("vmm-place")?;
    configure("host.toml", "without = [\"vmm-place\"]\n")?;
    daemon.reload()?;
    has_place(Place::OTHER)?;
    let without = measured("without")?;
    if monitor.is_over()? {
        monitor.wait()?.expect(&[])?;
    }
    ensure!(
        without > 2 * with,
        "the slowest reading took {without} us without the rule, {with} with it: the rule makes no difference"
    );

    fs::remove_file("/etc/ontime/host.toml").context("removing host.toml")?;
    daemon.reload()?;
    has_place(Place::fifo(3))?;
    // Threads that the main thread starts do not inherit its policy.
    let alike = threads(main, "*")?.into_iter().filter(|thread| place(*thread).is_ok_and(|of| of == Place::fifo(3)));
    expect("threads of QEMU with the place of its main thread", 1, alike.count())?;
    reset()?;
    expect_place("QEMU's main thread after reset", main, Place::OTHER)?;
    expect_same("knobs after the reset", &before, &snapshot()?)
}

/// A program: the tool that asks QEMU.
pub(crate) fn monitor(_: &[String]) -> Result<()> {
    let mut qmp = BufReader::new(UnixStream::connect("/run/lab-vm/rt.qmp").context("QMP")?);
    let mut answer = String::new();
    qmp.read_line(&mut answer).context("QMP's greeting")?;
    let mut query = "qmp_capabilities";
    loop {
        qmp.get_mut().write_all(format!("{{\"execute\":\"{query}\"}}\n").as_bytes()).context("asking QEMU")?;
        ensure!(qmp.read_line(&mut answer).context("QEMU's answer")? > 0, "QMP ended");
        answer.clear();
        query = "query-blockstats";
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// What the guest prints after each 400 readings: how long they took, us.
struct Readings {
    p50: u64,
    p99: u64,
    max: u64,
}

impl Readings {
    /// `READ p50 1 p99 2 max 3`
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.strip_prefix("READ ")?.split_whitespace();
        let mut value = || -> Option<u64> { words.nth(1)?.parse().ok() };
        Some(Self { p50: value()?, p99: value()?, max: value()? })
    }

    /// All so far, without the line under way.
    fn all() -> Result<Vec<Self>> {
        let console = fs::read(CONSOLE).context(CONSOLE)?;
        let text = String::from_utf8_lossy(&console);
        Ok(text.split_inclusive('\n').filter(|line| line.ends_with('\n')).filter_map(Self::parse).collect())
    }
}

/// The slowest of 1,200 readings, us, which begin after those that are under way.
fn measured(name: &str) -> Result<u64> {
    let from = Readings::all()?.len();
    within(300, "the guest has read 1,200 times", || Ok(Readings::all()?.len() >= from + 4))?;
    let all = Readings::all()?;
    let last = || all.iter().rev().take(3);
    let p50 = last().next().map_or(0, |of| of.p50);
    let p99 = last().map(|of| of.p99).max().unwrap_or_default();
    let max = last().map(|of| of.max).max().unwrap_or_default();
    figures(format_args!("{name}: p50 {p50}, worst p99 of 3 x 400 {p99}, slowest {max} us"));
    Ok(max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings_are_taken_from_whole_lines() {
        let readings = Readings::parse("READ p50 41 p99 97 max 1203\r\n").unwrap();
        assert_eq!((readings.p50, readings.p99, readings.max), (41, 97, 1203));
        for other in ["LAB-GUEST-UP reads\n", "READ p50 41 p99\n", "READ p50 41 p99 x max 3\n"] {
            assert!(Readings::parse(other).is_none(), "{other}");
        }
    }
}
