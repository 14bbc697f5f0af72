//! The clients' side of the wire: two taps with addresses, in the lab's network namespace.
//!
//! The taps have no offloads, so that the monitor sees frames as on a wire (MTU 1500).

use std::process::Command;

use crate::error::LabError;

/// The RT network's tap.
pub const RT_TAP: &str = "rt";
/// The bulk network's tap.
pub(crate) const BULK_TAP: &str = "bulk";
/// The client's address on the RT network, /24.
const RT_CLIENT: &str = "10.1.0.1";
/// The clients' address on the bulk network, /24.
const BULK_CLIENT: &str = "10.2.0.1";

/// The clients' TCP congestion control. Reno fills queues until a packet is lost, and every kernel allows a namespace
/// to choose it (unlike cubic).
const CONGESTION_CONTROL: &str = "reno";

/// Queue length of the bulk network's tap, frames, for the time while the emulated host is busy. The clients send much
/// faster than an emulated host receives. With the default of 1,000 the tap drops some of each burst, TCP waits for its
/// timeouts, and the host gets less load than from a link at full speed.
const BULK_QUEUE: &str = "10000";

/// Minimum of segments that the clients' TCP passes to a tap at once: 64 KiB, the maximum. TCP would otherwise pass as
/// many as the connection sends in a millisecond (`tcp_tso_autosize`): only a few, because an emulated host is as slow
/// as a slow link. The last segment of each such packet has PSH, at which the host's GRO ends an aggregate. So a byte
/// would cost the host more if the machine has less CPU time for it. A sender at full speed sends full packets.
const SEGMENTS_AT_ONCE: &str = "44";

/// Makes the taps and sets their addresses.
///
/// # Errors
/// `ip` is missing or fails.
pub fn set_up() -> Result<(), LabError> {
    // On a machine without IPv6 there is nothing to switch off.
    run("sysctl", &["-eqw", "net.ipv6.conf.all.disable_ipv6=1", "net.ipv6.conf.default.disable_ipv6=1"])?;
    // The machine's default may be BBR, which paces by the rate that it measures. The host's load would then depend on
    // the machine's CPU time.
    run("sysctl", &["-qw", &format!("net.ipv4.tcp_congestion_control={CONGESTION_CONTROL}")])?;
    run("sysctl", &["-qw", &format!("net.ipv4.tcp_min_tso_segs={SEGMENTS_AT_ONCE}")])?;
    run("ip", &["link", "set", "lo", "up"])?;
    for (tap, address) in [(RT_TAP, RT_CLIENT), (BULK_TAP, BULK_CLIENT)] {
        run("ip", &["tuntap", "add", tap, "mode", "tap"])?;
        run("ip", &["address", "add", &format!("{address}/24"), "dev", tap])?;
        run("ip", &["link", "set", tap, "up"])?;
    }
    run("ip", &["link", "set", BULK_TAP, "txqueuelen", BULK_QUEUE])?;
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
        remedy: "run the lab as root on a machine, or in a container with CAP_NET_ADMIN, whose kernel has taps \
                 (CONFIG_TUN) and whose /proc/sys is writable",
    })
}
