//! The clients' side of the wire: two taps with addresses, in the lab's own network namespace.
//!
//! The taps offload nothing, so that what the monitor sees is frames as they are on a wire (MTU 1500).

use std::process::Command;

use crate::error::LabError;

/// The RT network's tap.
pub const RT_TAP: &str = "rt";
/// The bulk network's tap.
pub const BULK_TAP: &str = "bulk";
/// The client's address on the RT network, /24.
pub const RT_CLIENT: &str = "10.1.0.1";
/// The clients' address on the bulk network, /24.
pub const BULK_CLIENT: &str = "10.2.0.1";

/// Makes the taps and gives them their addresses.
///
/// # Errors
/// `ip` is missing or refuses.
pub fn set_up() -> Result<(), LabError> {
    run("sysctl", &["-qw", "net.ipv6.conf.all.disable_ipv6=1", "net.ipv6.conf.default.disable_ipv6=1"])?;
    run("ip", &["link", "set", "lo", "up"])?;
    for (tap, address) in [(RT_TAP, RT_CLIENT), (BULK_TAP, BULK_CLIENT)] {
        run("ip", &["tuntap", "add", tap, "mode", "tap"])?;
        run("ip", &["address", "add", &format!("{address}/24"), "dev", tap])?;
        run("ip", &["link", "set", tap, "up"])?;
    }
    Ok(())
}

fn run(program: &str, arguments: &[&str]) -> Result<(), LabError> {
    let output = Command::new(program).args(arguments).output().map_err(|source| LabError::Program {
        program: program.to_owned(),
        source,
        remedy: "install Debian's iproute2 and procps",
    })?;
    if output.status.success() {
        return Ok(());
    }
    Err(LabError::Command {
        command: format!("{program} {}", arguments.join(" ")),
        output: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}
