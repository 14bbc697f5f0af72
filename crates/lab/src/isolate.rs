//! The lab's own namespaces: network, processes, mounts.
//!
//! Every tap, emulator, client and server of a lab lives in namespaces that end with its first process; the kernel then
//! removes all of it, also after `kill -9`. So there is nothing to clean up, and no second lab to be mixed up with.

use std::env;
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::error::LabError;

/// Set in the isolated process.
const MARK: &str = "ONTIME_LAB_ISOLATED";

/// Goes on inside namespaces of its own: replaces this process by `unshare(1)`, which starts the same command line
/// again. Returns at once in the process started so.
///
/// # Errors
/// [`LabError::NotRoot`]; `unshare` is missing or refused.
pub fn enter() -> Result<(), LabError> {
    if env::var_os(MARK).is_some() {
        return Ok(());
    }
    if !rustix::process::geteuid().is_root() {
        return Err(LabError::NotRoot);
    }
    let program =
        env::current_exe().map_err(|source| LabError::File { what: "find", path: "/proc/self/exe".into(), source })?;
    let source = Command::new("unshare")
        .args(["--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc", "--"])
        .arg(program)
        .args(env::args_os().skip(1))
        .env(MARK, "1")
        .exec();
    Err(LabError::Program { program: "unshare".into(), source, remedy: "install Debian's util-linux" })
}
