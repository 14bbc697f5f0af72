//! 6.12 with PREEMPT_RT, method partitioned, with a flood of small packets to bulk0: the time in which a
//! thread at FIFO 47 sends a datagram through rt0, by the weight of bulk0's NAPI. The thread waits for the poll under
//! way, because both take the CPU's softirq lock. On the virtual clock: instructions of 4 ns each. No VM takes part.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::flood::Flood;
use super::trace::received;
use crate::inside::clock::now;
use crate::inside::command::{figures, program, read, run, within, write};
use crate::inside::daemon::{Daemon, configure};
use crate::inside::module::{file, load, set};
use crate::inside::thread::{Place, set_own};

const NAME: &str = "a_send_waits_for_short_polls_only";
/// Datagrams of a measurement.
const COUNT: u32 = 300;
/// While `/lab` has this file, [`client`] sends.
const FLOOD: &str = "flood";

pub(crate) fn napi_wait() -> Result<()> {
    load()?;
    run("ip addr add 10.1.0.9/24 dev br-rt")?;
    run("ip addr add 10.2.0.9/24 dev br-bulk")?;
    configure("host.toml", "without = [\"napi-weight\"]\n[nic.rt0]\nclass = \"rt\"\n")?;
    let daemon = Daemon::start()?;
    within(40, "bulk0 is threaded", || Ok(read("/sys/class/net/bulk0/threaded")? == "1"))?;
    run("ping -q -c 2 10.1.0.1").context("no answer of the clients' side")?;
    measure("no flood")?;
    let (flood, before) = (Path::new("/lab").join(FLOOD), received()?);
    write(&flood, "")?;
    within(40, "bulk0 is flooded", || Ok(received()? > before + 2000))?;
    let slowest = |weight: &str| {
        set(&file("bulk0", "napi_weight"), weight)?;
        measure(&format!("weight {weight}"))
    };
    let long = slowest("default")?;
    slowest("16")?;
    slowest("8")?;
    let short = slowest("4")?;
    slowest("2")?;
    fs::remove_file(flood).context("ending the flood")?;
    daemon.ends()?;
    // A poll of 4 packets instead of 64, with the same time for the rest of the path.
    ensure!(short < long, "with polls of 4 packets the slowest takes {short} us, with the driver's {long} us");
    Ok(())
}

/// The slowest of [`COUNT`] sends, us.
fn measure(name: &str) -> Result<u64> {
    let (began, before) = (Instant::now(), received()?);
    let said = run(program(NAME, "send", &[])?).with_context(|| format!("{name}: sending failed"))?;
    let rate = (received()? - before) as f64 / began.elapsed().as_secs_f64();
    let took = said.trim_end();
    figures(format_args!("{name}: {COUNT} sends, p50/p99/max {took} us; bulk0 took {rate:.0} packets a second"));
    let slowest = took.rsplit('/').next().and_then(|max| max.parse().ok());
    slowest.with_context(|| format!("{name}: the program printed: {said}"))
}

/// A program: prints how long its sends take at FIFO 47, us: `p50/p99/max`.
pub(crate) fn send(_: &[String]) -> Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).context("a socket")?;
    let to = SocketAddr::from((Ipv4Addr::new(10, 1, 0, 1), 9));
    set_own(Place::fifo(47))?;
    let mut took = Vec::new();
    for number in 1..=COUNT {
        thread::sleep(Duration::from_micros(u64::from(1000 + number * 7919 % 1000)));
        let from = now();
        socket.send_to(&[b'x'; 14], to).context("sending")?;
        took.push(now() - from);
    }
    took.sort();
    let last = took.len() - 1;
    let at = |index: usize| took.get(index).map_or(0.0, |took| took.as_secs_f64() * 1e6);
    println!("{:.0}/{:.0}/{:.0}", at(last / 2), at(last * 99 / 100), at(last));
    Ok(())
}

/// The clients' side: while a file [`FLOOD`] exists, floods the bulk NIC.
pub(crate) fn client(_: &[String]) -> Result<()> {
    let flood = Flood::to_bulk_network()?;
    loop {
        thread::sleep(Duration::from_millis(100));
        while Path::new(FLOOD).exists() {
            (0..16).for_each(|_| flood.send());
        }
    }
}
