//! With two CPUs: method busypoll polls the RT NIC without interrupts or softirqs, the rest of the host continues to
//! work, and a reset undoes it.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::net::{AddressFamily, SocketType, ipproto, socket};
use rustix::process::Signal;

use super::cap::rcu_stalls;
use crate::inside::command::{expect, figures, program, read, run, sh, start, within};
use crate::inside::daemon::{Daemon, configure, report, reset};
use crate::inside::knobs::{expect_same, snapshot};
use crate::inside::thread::{Place, cpus, place, processes};

const WORLD_OUTSIDE: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 1, 0, 1), 0);

pub(crate) fn busypoll() -> Result<()> {
    configure("host.toml", "[nic.rt0]\nclass = \"rt\"\npoll_cpu = 1\n")?;
    run("ip addr add 10.1.0.9/24 dev br-rt")?;
    warm_up();
    let before = snapshot()?;
    let daemon = Daemon::start()?;
    warm_up();
    let counted = interrupts()?;
    answered(100)?;
    let raised = interrupts()?.saturating_sub(counted);
    ensure!(raised >= 50, "partitioned: a hundred packets raised {raised} interrupts; this test counts the wrong ones");

    run("ontime apply --method busypoll").context("busypoll was not applied")?;
    warm_up();
    let (counted, soft) = (interrupts()?, softirqs()?);
    let replies = answered(100)?;
    let (raised, soft) = (interrupts()?.saturating_sub(counted), softirqs()?.saturating_sub(soft));
    figures(format_args!(
        "busypoll: {raised} interrupts, {soft} NET_RX softirqs for 100 requests; {replies} of 100 replies"
    ));
    expect("receive interrupts while polling", 0, raised)?;
    expect("NET_RX softirqs while polling", 0, soft)?;
    let polling = processes("napi/rt0*");
    ensure!(!polling.is_empty(), "no thread polls rt0");
    for thread in polling {
        expect("CPU of the polling thread", 1, cpus(thread)?)?;
        // The cap watcher pauses it briefly now and then.
        within(10, "the polling thread is at FIFO 1", || Ok(place(thread)? == Place::fifo(1)))?;
    }
    expect_work_continues()?;
    let said = report("ontime net status rt0")?;
    ensure!(said.contains("other threads may run on CPU 1"), "nobody says that its CPU is not isolated: {said}");

    // Adaptive: the thread sleeps without traffic, polls with it, and sleeps again. The time saved is reported, and a
    // reset undoes everything.
    configure("host.toml", "[nic.rt0]\nclass = \"rt\"\npoll_cpu = 1\n[busypoll]\nadaptive = true\nlinger_ms = 2000\n")?;
    daemon.reload()?;
    becomes("rests")?;
    let requests = start(program("busypoll_takes_no_interrupts", "ping", &[])?)?;
    becomes("polls")?;
    sleep(Duration::from_millis(500));
    let counted = interrupts()?;
    sleep(Duration::from_millis(300));
    expect("receive interrupts while it polls adaptively", 0, interrupts()?.saturating_sub(counted))?;
    requests.end(Signal::TERM)?;
    becomes("rests")?;
    for nic in polling_nics()? {
        figures(format_args!("adaptive: {nic}"));
    }
    reset()?;
    expect_same("knobs after the reset", &before, &snapshot()?)
}

/// Fails unless timers, RCU, workqueues and bulk work continue, also on the CPU that polls.
pub(crate) fn expect_work_continues() -> Result<()> {
    let from = Instant::now();
    run(sh("timeout 100 taskset -c 1 sh -c 'sleep 0.1; cat /proc/stat > /dev/null'"))
        .context("bulk work on the CPU that polls starves")?;
    run(sh("timeout 100 sh -c 'ip link add d0 type bridge && ip link del d0'")).context("RCU or workqueues starve")?;
    let took = from.elapsed().as_millis();
    figures(format_args!("busypoll: bulk work on the CPU that polls and an interface made and removed took {took} ms"));
    let stalls = rcu_stalls()?;
    ensure!(stalls.is_empty(), "RCU stalled: {stalls:?}");
    Ok(())
}

/// The program that asks the world outside until it is ended.
pub(crate) fn requests(_: &[String]) -> Result<()> {
    replies(100_000).map(drop)
}

/// Lets the bridge and the world outside find each other. Some of the requests may be lost.
fn warm_up() {
    if let Err(error) = replies(10) {
        println!("warming up: {error:#}");
    }
}

/// Asks so often; at least nine of ten must be answered.
fn answered(count: usize) -> Result<usize> {
    let replies = replies(count)?;
    ensure!(replies * 10 >= count * 9, "{replies} of {count} replies");
    Ok(replies)
}

/// Sends that many ICMP echo requests to the world outside, each 10 ms after the reply to the one before, or after a
/// second without; how many replies came.
fn replies(count: usize) -> Result<usize> {
    let raw = socket(AddressFamily::INET, SocketType::RAW, Some(ipproto::ICMP)).context("a socket for ICMP")?;
    // A socket whose ports are not used.
    let raw = UdpSocket::from(raw);
    let id = u16::try_from(std::process::id() & 0xffff).context("a process number")?;
    let mut replies = 0;
    for number in (0..=u16::MAX).cycle().take(count) {
        let sum = 0x0800 + u32::from(id) + u32::from(number);
        let folded = (sum & 0xffff) + (sum >> 16);
        let checksum = !u16::try_from((folded & 0xffff) + (folded >> 16)).context("a checksum")?;
        let words = [0x0800, checksum, id, number].map(u16::to_be_bytes);
        raw.send_to(&words.concat(), WORLD_OUTSIDE).context("sending an echo request")?;
        let end = Instant::now() + Duration::from_secs(1);
        replies += usize::from(is_answered(&raw, id, number, end)?);
        sleep(Duration::from_millis(10));
    }
    Ok(replies)
}

/// Whether the reply to a request comes before a time.
fn is_answered(raw: &UdpSocket, id: u16, number: u16, end: Instant) -> Result<bool> {
    let [id, number] = [id, number].map(u16::to_be_bytes);
    let mut packet = [0; 1500];
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        raw.set_read_timeout(Some(left)).context("a time limit")?;
        let length = match raw.recv(&mut packet) {
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error).context("receiving an echo reply"),
        };
        // An echo reply has type 0. The IP header before it has no options.
        let message = packet.get(20..length).unwrap_or_default();
        if message.first() == Some(&0) && message.get(4..8) == Some([id, number].concat().as_slice()) {
            return Ok(true);
        }
    }
}

/// The receive interrupts of rt0 so far, on both CPUs.
pub(crate) fn interrupts() -> Result<u64> {
    counted("/proc/interrupts", "rt0-rx")
}

fn softirqs() -> Result<u64> {
    counted("/proc/softirqs", "NET_RX")
}

/// The counts of both CPUs in the lines of a file that name something.
fn counted(file: &str, of: &str) -> Result<u64> {
    let text = read(file)?;
    let lines = text.lines().filter(|line| line.contains(of));
    Ok(lines
        .flat_map(|line| line.split_whitespace().skip(1).take(2))
        .filter_map(|count| count.parse::<u64>().ok())
        .sum())
}

/// What `ontime status` says of the NICs that poll while packets come: `rt0 rests: polled ...`.
fn polling_nics() -> Result<Vec<String>> {
    let status = report("ontime status")?;
    let lines = status.lines().filter_map(|line| line.strip_prefix("polling"));
    Ok(lines.map(|line| line.trim_start().to_owned()).collect())
}

/// Waits until rt0 `polls` or `rests`.
fn becomes(state: &str) -> Result<()> {
    let is_so = |line: &String| line.starts_with(&format!("rt0 {state}:"));
    within(60, &format!("rt0 {state}"), || Ok(polling_nics()?.iter().any(is_so)))
}
