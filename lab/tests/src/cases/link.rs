//! The link to clients inside: its rate, its delay and its finite queue.

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;

use super::missed::{BULK, RT, addresses, flood, frames};
use crate::inside::command::{figures, run, start};
use crate::outside::Outside;

/// The link of the test: a request and its answer take 2 ms longer, and 64 frames wait.
pub(crate) const LINK: &str = "100mbit,1ms,64";

/// What the link drops is told at the end of the run.
pub(crate) fn a_link_has_its_rate_and_its_delay(test: &Outside) -> Result<()> {
    let said = test.inside_says()?;
    let dropped = |nic: &str| -> Result<u64> {
        let head = format!("link {LINK} of {nic}0: ");
        let line = said.lines().find(|line| line.contains(&head) && line.ends_with(" to the host"));
        let count = line.and_then(|line| line.split(&head).nth(1)?.split(' ').next()?.parse().ok());
        count.with_context(|| format!("the run does not tell what the link of {nic}0 has dropped: {said}"))
    };
    let (rt, bulk) = (dropped("rt")?, dropped("bulk")?);
    test.note(format_args!("figures: the link of bulk0 has dropped {bulk} frames of the flood"))?;
    ensure!(rt == 0 && bulk > 1_000, "dropped to the host: {rt} frames on rt0, {bulk} on bulk0");
    Ok(())
}

pub(crate) fn link() -> Result<()> {
    addresses()?;
    let said = run(format!("lab-client ping -q -c 20 -i 0.01 {RT}"))?;
    let times = said.lines().find_map(|line| line.strip_prefix("rtt min/avg/max/mdev = ")).context("no times")?;
    let fastest: f64 = times.split('/').next().unwrap_or_default().parse().context("no time")?;
    let megabits = tcp()?;
    let before = frames()?;
    let flood = flood(1_472)?;
    run("sleep 0.2")?;
    flood.end(Signal::KILL)?;
    run("sleep 0.1")?;
    let since = frames()?.since(before);
    figures(format_args!(
        "over {LINK}: a ping and its answer take {fastest} ms, TCP has {megabits} Mbit/s, of {} frames of a flood {} \
         arrive",
        since.sent, since.received
    ));
    ensure!((2.0..2.2).contains(&fastest), "{times}");
    // A full frame carries 1,448 of 1,538 bytes.
    ensure!((90.0..94.2).contains(&megabits), "TCP has {megabits} Mbit/s over a link of 100");
    ensure!(since.missed == 0 && since.received * 2 < since.sent, "{since:?}");
    Ok(())
}

/// The throughput of a TCP connection to the host for a second, Mbit/s. iperf3 is on the guests' disk, which
/// `lab-client` mounts.
fn tcp() -> Result<f64> {
    run("lab-client iperf3 --version")?;
    let server = start("chroot /run/guest iperf3 -s -1")?;
    run("sleep 0.2")?;
    let report = run(format!("lab-client iperf3 -c {BULK} -t 1 -i 0 -f m"))?;
    server.wait()?.expect(&[0])?;
    let received = report.lines().find(|line| line.contains("receiver")).context("no receiver")?;
    received.split_whitespace().nth(6).unwrap_or_default().parse().with_context(|| received.to_owned())
}
