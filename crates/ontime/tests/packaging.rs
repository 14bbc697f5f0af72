//! What is installed beside the program: the unit is one that systemd takes, the hook tells the daemon and blocks nobody.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test ends by panicking"
)]

mod support;

use std::process::Command;

use support::{Daemon, Site, possible, until};

const PACKAGING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging");

#[test]
fn systemd_takes_the_unit() {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        println!("SKIPPED: this test needs systemd-analyze");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let unit = std::fs::read_to_string(format!("{PACKAGING}/systemd/ontimed.service")).unwrap();
    assert!(unit.contains("/usr/bin/ontime"));
    // It checks that the programs are there.
    let unit = unit.replace("/usr/bin/ontime", env!("CARGO_BIN_EXE_ontime"));
    let path = dir.path().join("ontimed.service");
    std::fs::write(&path, unit).unwrap();
    let out = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output().unwrap();
    let said = String::from_utf8(out.stderr).unwrap();
    let ours: Vec<&str> = said.lines().filter(|line| line.contains("ontimed.service")).collect();
    assert!(out.status.success() && ours.is_empty(), "{said}");
    // And a setting that systemd does not know would be noticed.
    std::fs::write(&path, "[Service]\nExecStart=/bin/true\nNoSuchSetting=1\n").unwrap();
    let out = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output().unwrap();
    assert!(String::from_utf8(out.stderr).unwrap().contains("NoSuchSetting"));
}

#[test]
fn the_hook_wakes_the_daemon_and_does_nothing_without_one() {
    if !possible() {
        return;
    }
    let site = Site::new();
    let hook = |poke: &std::path::Path| {
        let start = std::time::Instant::now();
        let mut command = Command::new(format!("{PACKAGING}/libvirt/hooks/qemu.d/ontime"));
        command.args(["vm", "started", "begin", "-"]).env("ONTIME_POKE", poke);
        assert!(command.status().unwrap().success());
        assert!(start.elapsed() < std::time::Duration::from_secs(2));
    };
    let poke = site.path("run/poke");
    hook(&poke);
    assert!(!poke.exists(), "it made a file where no daemon is");
    let _daemon = Daemon::start(&site);
    let passes = || {
        let metrics = site.curl(&["http://o/metrics"]).1;
        let line = metrics.lines().find(|line| line.starts_with("ontime_passes_total{reason=\"hook\"}"));
        line.map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
    };
    assert_eq!(passes(), 0);
    hook(&poke);
    until("a pass because of the hook", || (passes() > 0).then_some(()));
}
