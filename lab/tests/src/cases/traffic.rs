//! Traffic of a running RT VM `rt`, which answers requests, and of a running bulk VM `bulk1`, which is flooded: its
//! clients' side, and its results.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::Signal;

use super::on_demand::OnDemand;
use crate::inside::command::{attempt, figures, read, read_number, run, start, start_to, within, write};

/// The clients' side: floods the bulk VM while a file `flood` exists, sends requests to the RT VM while a file `ask`
/// exists, and writes the counters of this side's kernel to `counters`: retransmitted segments, and those that the
/// receiver reported as duplicates.
pub(crate) fn client(_: &[String]) -> Result<()> {
    let (mut flood, mut ask) = (OnDemand::new("flood", Signal::INT), OnDemand::new("ask", Signal::INT));
    loop {
        sleep(Duration::from_millis(200));
        let flooding = "lab-client iperf3 -c 10.2.0.2 -t 86400 -i 0 -P 4 --connect-timeout 30000";
        flood.keep(|| start_to(flooding, "flood.log"))?;
        let asking = "lab-client sockperf ping-pong -i 10.1.0.2 -p 11111 --mps 2 -t 86400";
        if ask.follow(|| start_to(asking, "ask.log"))? {
            write("asked", "")?;
        }
        let again = counter("/proc/net/snmp", "Tcp:", "RetransSegs")?;
        let known = counter("/proc/net/netstat", "TcpExt:", "TCPDSACKRecvSegs")?;
        write("counters.new", format!("{again} {known}\n"))?;
        fs::rename("counters.new", "counters").context("renaming counters.new")?;
    }
}

/// A counter in a file that has a line with names and one with values for each table.
fn counter(file: &str, table: &str, name: &str) -> Result<u64> {
    let text = read(file)?;
    let mut rows = text.lines().map(str::split_whitespace).filter(|row| row.clone().next() == Some(table));
    let columns = rows.next().zip(rows.next()).map(|(names, values)| names.zip(values));
    let value = columns.and_then(|mut columns| columns.find(|(of, _)| *of == name)).map(|(_, value)| value);
    value.and_then(|value| value.parse().ok()).with_context(|| format!("{file} has no {table} {name}"))
}

/// Segments that the clients' side sent again because they were lost, so far.
fn lost() -> Result<i64> {
    let text = read("/lab/counters")?;
    let difference = text.split_once(' ').and_then(|(again, known)| {
        let (again, known): (i64, i64) = (again.parse().ok()?, known.parse().ok()?);
        again.checked_sub(known)
    });
    difference.with_context(|| format!("/lab/counters: {text}"))
}

/// Bytes that the bulk VM has received.
fn received() -> Result<u64> {
    read_number("/sys/class/net/t-bulk1/statistics/tx_bytes")
}

/// Waits until the flood goes on: 200 kB more.
pub(crate) fn flows(seconds: u64) -> Result<()> {
    let from = received()?;
    within(seconds, "the flood goes on", || Ok(received()? > from + 200_000))
}

/// What a NIC's reset, or a packet that was dropped, would leave. Not `rx_errors`: the emulated NIC sends frames below
/// 60 bytes as they are, and counts them as errors where they arrive. Not what `bulk0` missed: bursts of TCP overflow
/// its ring.
pub(crate) fn incidents() -> Result<Vec<String>> {
    let mut lines = Vec::new();
    for nic in ["rt0", "bulk0"] {
        let dir = format!("/sys/class/net/{nic}");
        let missed = ["statistics/rx_missed_errors", "statistics/rx_over_errors"];
        let received = if nic == "rt0" { &missed[..] } else { &[] };
        for counter in ["carrier_changes", "statistics/tx_errors", "statistics/tx_dropped"].iter().chain(received) {
            lines.push(format!("{nic} {counter} {}", read(format!("{dir}/{counter}"))?));
        }
        let counters = attempt(format!("ethtool -S {nic}"))?.stdout;
        let told = counters.lines().filter(|line| has_one(line, &["reset", "restart", "timeout", "hang"]));
        lines.extend(told.map(|line| format!("{nic} {line}")));
    }
    let log = run("dmesg")?;
    let words = ["reset adapter", "netdev watchdog", "hang", "nic link is"];
    lines.push(format!("lines of the kernel's log {}", log.lines().filter(|line| has_one(line, &words)).count()));
    Ok(lines)
}

/// Whether a line contains one of these words, which are in small letters.
fn has_one(line: &str, words: &[&str]) -> bool {
    let line = line.to_lowercase();
    words.iter().any(|word| line.contains(word))
}

/// A stretch of time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    /// Segments that the bulk VM received, and those that were lost.
    pub(crate) segments: i64,
    pub(crate) lost: i64,
    /// Requests to the RT VM, and those without an answer.
    pub(crate) asked: u64,
    pub(crate) unanswered: u64,
    /// The slowest answer, us.
    pub(crate) slowest: f64,
}

/// The flood's rate, segments lost and the RT VM's answers while something is done.
pub(crate) fn window(name: &str, done: impl FnOnce() -> Result<()>) -> Result<Window> {
    let (lost_before, bytes_before, began) = (lost()?, received()?, Instant::now());
    let ping = start("/run/measures chrt -f 40 ping -q -i 0.01 10.1.0.2")?;
    done().with_context(|| name.to_owned())?;
    let answers = ping.end(Signal::INT)?.expect(&[0]).with_context(|| format!("{name}: the RT VM did not answer"))?;
    let (took, bytes) = (began.elapsed().as_millis(), received()?.saturating_sub(bytes_before));
    // Until the clients' side has counted.
    sleep(Duration::from_millis(300));
    let lost = lost()?.saturating_sub(lost_before);
    let segments = i64::try_from(bytes / 1448).context("segments")?;
    let rate = u128::from(bytes) * 8 / took.max(1) / 1000;
    let (asked, unanswered, slowest) = answered(&answers).with_context(|| format!("{name}: ping said: {answers}"))?;
    figures(format_args!(
        "{name}: {took} ms, bulk {rate} Mbit/s, {lost} of {segments} segments lost; {asked} asked, {unanswered} \
         unanswered, slowest {slowest:.0} us"
    ));
    Ok(Window { segments, lost, asked, unanswered, slowest })
}

/// Requests, those without an answer, and the slowest answer in us: "250 packets transmitted, 250 received, ...",
/// "rtt min/avg/max/mdev = 0.1/0.2/0.3/0.0 ms".
fn answered(ping: &str) -> Option<(u64, u64, f64)> {
    let counts = ping.lines().find(|line| line.contains(" packets transmitted, "))?;
    let mut words = counts.split_whitespace();
    let asked: u64 = words.next()?.parse().ok()?;
    let answered = words.nth(2)?.parse().ok()?;
    let times = ping.lines().find_map(|line| line.strip_prefix("rtt min/avg/max/mdev = "))?;
    let slowest: f64 = times.split('/').nth(2)?.parse().ok()?;
    Some((asked, asked.saturating_sub(answered), slowest * 1000.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_counters_are_found_by_their_names() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("snmp");
        fs::write(&path, "Tcp: InSegs RetransSegs\nTcp: 8 3\nTcpExt: RetransSegs\nTcpExt: 5\n").unwrap();
        let path = path.to_str().unwrap();
        assert_eq!(counter(path, "Tcp:", "RetransSegs").unwrap(), 3);
        assert_eq!(counter(path, "TcpExt:", "RetransSegs").unwrap(), 5);
        assert!(counter(path, "Tcp:", "OutSegs").is_err());
        counter("/proc/net/netstat", "TcpExt:", "TCPDSACKRecvSegs").unwrap();
    }

    #[test]
    fn what_ping_says_is_understood() {
        let said = "--- 10.1.0.2 ping statistics ---\n250 packets transmitted, 249 received, 0.4% packet loss, time \
            2500ms\nrtt min/avg/max/mdev = 0.101/0.202/0.375/0.004 ms\n";
        assert_eq!(answered(said), Some((250, 1, 375.0)));
        assert_eq!(answered("ping: 10.1.0.2: no such host\n"), None);
    }
}
