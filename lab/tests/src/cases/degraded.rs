//! 6.12 with PREEMPT_RT: missing kernel features are reported, the rest is applied and reset.

use anyhow::{Result, ensure};

use crate::inside::command::{attempt, expect, read, run};
use crate::inside::daemon::{Daemon, check, reset};
use crate::inside::knobs::{expect_same, snapshot};

pub(crate) fn degraded() -> Result<()> {
    let release = run("uname -r")?;
    ensure!(release.starts_with("6.12"), "this is no 6.12: {release}");
    let before = knobs()?;
    let status = attempt("ontime doctor")?.status;
    ensure!(status == 1 || status == 2, "ontime doctor ended with {status}");
    let kernel = check("kernel")?;
    ensure!(kernel.text.contains("6.18"), "doctor does not say what 6.18 would bring: {}", kernel.text);
    let daemon = Daemon::start()?;
    expect("NAPI threading of rt0", 1, read("/sys/class/net/rt0/threaded")?)?;
    reset()?;
    daemon.ends()?;
    expect_same("knobs after the reset", &before, &knobs()?)
}

/// All knobs but NAPI threads: before 6.17 the kernel keeps the threads of a NAPI that is no longer threaded.
fn knobs() -> Result<Vec<String>> {
    let mut knobs = snapshot()?;
    knobs.retain(|line| !line.starts_with("napi/"));
    Ok(knobs)
}
