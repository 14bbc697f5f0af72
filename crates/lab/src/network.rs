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
const RT_CLIENT: &str = "10.1.0.1";
/// The clients' address on the bulk network, /24.
const BULK_CLIENT: &str = "10.2.0.1";

/// The clients' TCP congestion control: it fills queues until something is lost, and every kernel lets a namespace
/// choose it (cubic not).
const CONGESTION_CONTROL: &str = "reno";

/// Frames the bulk network's tap holds while the emulated host is busy. The clients send in the machine's time, many
/// times faster than the host's clock goes: with the default of 1,000 the tap loses some of each burst, TCP stands
/// still for its timeouts, and the host has less to do than a link at full speed would give it. As many are left when a
/// flood ends: some 50 ms of the host's time.
const BULK_QUEUE: &str = "10000";

/// Segments that the clients' TCP hands to a tap at once, at least: 64 KiB, the most. It has as many as the connection
/// sends in a millisecond (`tcp_tso_autosize`), of the machine's time, in which the emulated host is slow: a few, as if
/// the link were slow. Each such packet's last segment has PSH, where the host's GRO ends what it puts together, so
/// that a byte would cost the host the more the less time the machine has for it. What feeds a host at full speed sends
/// full packets.
const SEGMENTS_AT_ONCE: &str = "44";

/// Makes the taps and gives them their addresses.
///
/// # Errors
/// `ip` is missing or refuses.
pub fn set_up() -> Result<(), LabError> {
    // There is nothing to switch off on a machine without IPv6.
    run("sysctl", &["-eqw", "net.ipv6.conf.all.disable_ipv6=1", "net.ipv6.conf.default.disable_ipv6=1"])?;
    // A machine's default may be BBR, which paces by the machine's clock, not by the emulated host's: the host then has
    // as much to do as the machine had time for.
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
    })
}
