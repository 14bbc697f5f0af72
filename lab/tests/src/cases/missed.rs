//! Frames that come to a full ring of the NIC are missed and counted, and none is lost without a count.

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;

use crate::inside::command::{Running, attempt, figures, read_number, run, sh, start, within};

/// The host's own addresses.
pub(super) const RT: &str = "10.1.0.9";
pub(super) const BULK: &str = "10.2.0.9";

/// Each frame that the clients send is received by the host or counted as missed.
pub(crate) fn missed() -> Result<()> {
    addresses()?;
    // The NICs' links come up a second after the boot.
    within(10, "the host answers the clients", || Ok(attempt(format!("lab-client ping -q -c 1 {BULK}"))?.status == 0))?;
    let before = frames()?;
    let flood = flood(16)?;
    run("sleep 0.1")?;
    // No interrupt thread runs meanwhile, so the driver gives the NIC no buffers.
    run(["chrt", "--fifo", "99", "sh", "-c", "i=0; while [ $i -lt 50000 ]; do i=$((i + 1)); done"])?;
    flood.end(Signal::KILL)?;
    run("sleep 0.2")?;
    let since = frames()?.since(before);
    figures(format_args!("of {} frames {} were missed", since.sent, since.missed));
    ensure!(since.missed > 1_000 && since.received > 0, "{since:?}");
    ensure!(since.received + since.missed == since.sent, "some frames are not counted: {since:?}");
    Ok(())
}

/// Gives the host its addresses.
pub(super) fn addresses() -> Result<()> {
    run(format!("ip address add {RT}/24 dev br-rt"))?;
    run(format!("ip address add {BULK}/24 dev br-bulk")).map(drop)
}

/// Datagrams to the host on its bulk network.
pub(super) fn flood(bytes: u16) -> Result<Running> {
    let order = serde_json::json!({"flood": {"address": BULK, "bytes": bytes}}).to_string();
    start(sh(&format!("exec lab-client ontime-lab client '{order}'")))
}

/// Frames on the bulk network so far.
#[derive(Debug, Clone, Copy)]
pub(super) struct Frames {
    /// By the clients.
    pub(super) sent: u64,
    /// By the host.
    pub(super) received: u64,
    /// The host had no buffer for them.
    pub(super) missed: u64,
}

impl Frames {
    pub(super) fn since(self, before: Self) -> Self {
        Self {
            sent: self.sent - before.sent,
            received: self.received - before.received,
            missed: self.missed - before.missed,
        }
    }
}

pub(super) fn frames() -> Result<Frames> {
    let of_host = |name: &str| read_number(format!("/sys/class/net/bulk0/statistics/{name}"));
    let sent = run("lab-client cat /sys/class/net/bulk/statistics/tx_packets")?;
    let sent = sent.trim().parse().context("the clients' frames")?;
    Ok(Frames { sent, received: of_host("rx_packets")?, missed: of_host("rx_missed_errors")? })
}
