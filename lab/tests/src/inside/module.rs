//! The host module, its files of NICs, and what the kernel says of them.

use std::fs;
use std::io;
use std::process::Command;

use anyhow::{Result, ensure};

use super::command::{attempt, run, write};

/// Loads the module.
pub(crate) fn load() -> Result<()> {
    run("insmod /lab/ontime_napi.ko").map(drop)
}

pub(crate) fn unload() -> Result<()> {
    run("rmmod ontime_napi").map(drop)
}

/// The module's file of a NIC: `napi_weight`, `busy_poll`.
pub(crate) fn file(nic: &str, name: &str) -> String {
    format!("/sys/class/net/{nic}/ontime/{name}")
}

/// Writes a value into a file of the kernel, as `echo` does.
pub(crate) fn set(file: &str, value: &str) -> Result<()> {
    write(file, format!("{value}\n"))
}

/// The error with which the kernel refuses a value, if it does.
pub(crate) fn refusal(file: &str, value: &str) -> Option<io::Error> {
    fs::write(file, format!("{value}\n")).err()
}

/// Fails if a process of root without CAP_NET_ADMIN can set the value.
pub(crate) fn expect_privileged(file: &str, value: &str) -> Result<()> {
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", "-net_admin", "--inh-caps", "-net_admin", "sh", "-c"]);
    // A status that setpriv itself does not have.
    command.arg(format!("echo {value} > {file} || exit 42"));
    let tried = attempt(command)?;
    ensure!(tried.status != 0, "{file} was set without CAP_NET_ADMIN");
    ensure!(tried.status == 42, "a process without CAP_NET_ADMIN ended with {}: {}", tried.status, tried.stderr);
    Ok(())
}

/// Whether a ping gets all its replies.
pub(crate) fn replies(arguments: &str) -> Result<bool> {
    Ok(attempt(format!("ping -q {arguments}"))?.status == 0)
}

/// A warning of 6.12's own: the fair server of a CPU that is isolated at boot, as the clients' is, loses its
/// bandwidth's account (`dl_rq->running_bw`), and warns when the daemon sets its runtime.
const OF_THE_FAIR_SERVER: [&str; 2] = ["WARNING:", " task_non_contending+"];

/// Fails if the kernel's log has a complaint.
pub(crate) fn expect_healthy_kernel() -> Result<()> {
    let log = run("dmesg")?;
    let is_complaint = |line: &&str| {
        let complains = ["BUG:", "WARNING:", "Oops", "INFO: task"].iter().any(|word| line.contains(word));
        complains && !OF_THE_FAIR_SERVER.iter().all(|part| line.contains(part))
    };
    let complaints: Vec<&str> = log.lines().filter(is_complaint).collect();
    ensure!(complaints.is_empty(), "the kernel complains:\n{}", complaints.join("\n"));
    Ok(())
}
