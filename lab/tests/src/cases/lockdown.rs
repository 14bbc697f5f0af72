//! Under kernel lockdown debugfs is denied. This is reported, the kernel's protections stay on, and the rest is
//! applied.

use anyhow::{Result, ensure};

use crate::inside::command::{expect, read, run};
use crate::inside::daemon::{Daemon, check, report, reset};
use crate::inside::knobs::{expect_same, snapshot};

pub(crate) fn lockdown() -> Result<()> {
    let locked = || read("/sys/kernel/security/lockdown").is_ok_and(|state| state.contains("[integrity]"));
    if !locked() {
        run("mount -t securityfs securityfs /sys/kernel/security")?;
    }
    ensure!(locked(), "this host is not locked down");
    let before = snapshot()?;
    let lockdown = check("lockdown")?;
    ensure!(lockdown.state == "warning" && lockdown.text.contains("debugfs is denied"), "doctor: {}", lockdown.text);
    let daemon = Daemon::start()?;
    let status = report("ontime status")?;
    ensure!(status.to_lowercase().contains("lockdown"), "status does not say why protections stay on: {status}");
    ensure!(status.contains("kernel protections on"), "protections are said to be off: {status}");
    expect("NAPI threading of rt0", 1, read("/sys/class/net/rt0/threaded")?)?;
    reset()?;
    daemon.ends()?;
    expect_same("knobs after the reset", &before, &snapshot()?)
}
