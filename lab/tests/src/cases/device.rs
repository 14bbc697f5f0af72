//! An RT VM with outsourced sockets, and its device process.

use std::fs;
use std::io;
use std::net::UdpSocket;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;

use crate::inside::clock::{now, percent};
use crate::inside::command::{figures, program, run, spin, within, write};
use crate::inside::daemon::{Daemon, configure, metric, report, reset, rt_tenant};
use crate::inside::thread::{Place, place, ran, set_own};
use crate::inside::vm::Vm;

/// The command of the clients' side, for both tests ([`client`]).
pub(crate) const CLIENT: &str = "./ontime-lab-tests program a_device_process_is_capped client";
/// While this file exists in `/lab`, clients ask the RT VM's server ([`client`]).
const ASK: &str = "ask";
/// How often they look for the file.
const LOOK: Duration = Duration::from_millis(200);

/// Its server always has a request to answer. The thread of its device process that owns the server's socket is held to
/// the VM's runtime cap, as its vCPU is, and leaves the rest of the CPU to housekeeping.
pub(crate) fn cap() -> Result<()> {
    let cap = |cap: f64| configure("tenants.toml", &rt_tenant("rt", &format!("runtime-cap = {cap}")));
    cap(0.9)?;
    let _rt = start_rt("idle")?;
    let daemon = Daemon::start()?;
    ask("0")?;
    let housekeeping = spin()?;
    // The thread is named and placed at its server's first call.
    let mut socket = 0;
    within(60, "the thread that owns the server's socket is FIFO 48", || {
        socket = socket_thread()?;
        Ok(true)
    })?;
    let measured = |what: &str| -> Result<(u128, u128)> {
        let (start, socket_ran, work_ran) = (now(), ran(socket)?, ran(housekeeping.pid())?);
        sleep(Duration::from_secs(5));
        let took = now().saturating_sub(start);
        let socket_share = percent(ran(socket)?.saturating_sub(socket_ran), took);
        let work_share = percent(ran(housekeeping.pid())?.saturating_sub(work_ran), took);
        figures(format_args!("{what}: the socket thread {socket_share} % of the CPU, housekeeping {work_share} %"));
        Ok((socket_share, work_share))
    };
    within(60, "the socket thread is busy", || Ok(measured("looking")?.0 >= 15))?;
    let (free_socket, free_work) = measured("cap 90")?;
    cap(0.05)?;
    daemon.reload()?;
    within(60, "the daemon has the new cap", || Ok(metric("ontime_passes_total{reason=\"reload\"")? >= 1.0))?;
    let (socket_share, work_share) = measured("cap 5")?;
    ensure!(socket_share <= 10 && socket_share < free_socket, "the socket thread's share is not its cap");
    ensure!(work_share > free_work, "nobody has what it leaves");
    stop_asking()?;
    housekeeping.end(Signal::TERM)?;
    reset()?;
    within(10, "the socket thread is FIFO 48 after the reset", || Ok(place(socket)? == Place::fifo(48)))?;
    daemon.ends()
}

/// Method interrupt-context, beside a spinning VM of its level. An interrupt that its device process makes pending
/// raises its vCPU, as one from vhost does. When requests never stop, housekeeping still gets its share.
pub(crate) fn pending() -> Result<()> {
    configure("tenants.toml", &["rt", "spin"].map(|name| rt_tenant(name, "runtime-cap = 0.4")).concat())?;
    let _rt = start_rt("interrupt")?;
    Vm::start_small("spin", "spin", "rt", "10.1.0.3")?.wait()?;
    let daemon = Daemon::start()?;
    run("ontime apply --method interrupt-context")?;
    let status = report("ontime status")?;
    ensure!(!status.contains("interrupt-context:"), "interrupts cannot be followed: {status}");
    let raised = || metric("ontime_boosts_total{domain=\"rt\"");

    // One request at a time.
    let before = raised()?;
    sleep(Duration::from_secs(2));
    let quiet = raised()? - before;
    ask("0.05")?;
    let before = raised()?;
    within(60, "requests put the vCPU ahead", || Ok(raised()? - before >= 10.0 + 10.0 * quiet))?;
    stop_asking()?;
    let asked = raised()? - before;
    figures(format_args!("put ahead {quiet} times in 2 s without a question, {asked} times while asked"));

    // Without a pause: eight clients. Another process measures this, because this one is part of housekeeping.
    let housekeeping = spin()?;
    let pid = housekeeping.pid().to_string();
    let part = run(program("interrupts_of_a_device_process_raise_its_vcpu", "share", &[&pid])?)?;
    housekeeping.end(Signal::TERM)?;
    let part: u128 = part.trim().parse().with_context(|| format!("'{part}' is no share"))?;
    figures(format_args!("housekeeping had {part} % of the CPU while the VM was asked without a pause"));
    // The caps leave 5 %, and the threads that read for the watcher take a part of that: housekeeping has 3 %.
    ensure!(part >= 2, "housekeeping starves");
    daemon.ends()
}

/// Program: the share of the CPU that a process has while the VM is asked without a pause, measured at FIFO 60.
pub(crate) fn share(arguments: &[String]) -> Result<()> {
    const STRETCH: Duration = Duration::from_secs(4);
    let pid: i32 = arguments.first().and_then(|pid| pid.parse().ok()).context("the number of a process is missing")?;
    set_own(Place::fifo(60))?;
    ask("0")?;
    sleep(Duration::from_secs(6));
    let before = ran(pid)?;
    sleep(STRETCH);
    println!("{}", percent(ran(pid)?.saturating_sub(before), STRETCH));
    stop_asking()
}

/// Program for the clients' side. While the file `ask` is there, eight clients of the RT server send requests. Each
/// sends its next request as soon as it has its answer, so the host always has work, and never more than eight packets.
/// Where the file holds a number greater than 0, there is one client, which waits that many seconds between an answer
/// and its next request.
pub(crate) fn client(_: &[String]) -> Result<()> {
    loop {
        sleep(LOOK);
        // If the network cannot be reached, the next look tries again.
        asked().map_or(Ok(()), ask_while).unwrap_or_else(|error| eprintln!("{error:#}"));
    }
}

/// What the file says, if it is there.
fn asked() -> Option<Duration> {
    let seconds = fs::read_to_string(ASK).ok()?.trim().parse().unwrap_or(0.0);
    Some(Duration::try_from_secs_f64(seconds).unwrap_or_default())
}

/// Sends requests while the file has this gap.
fn ask_while(gap: Duration) -> Result<()> {
    // Number, flags (a client, wants an answer), length.
    let request = [&1_u64.to_be_bytes()[..], &3_u16.to_be_bytes(), &14_u32.to_be_bytes()].concat();
    let connected = |_| -> io::Result<UdpSocket> {
        let client = UdpSocket::bind("0.0.0.0:0")?;
        client.connect("10.1.0.2:11111")?;
        client.set_nonblocking(true)?;
        Ok(client)
    };
    let count = if gap.is_zero() { 8 } else { 1 };
    let clients = (0..count).map(connected).collect::<io::Result<Vec<_>>>().context("connecting to the server")?;
    let (mut looked, second) = (Instant::now(), Timespec { tv_sec: 1, tv_nsec: 0 });
    loop {
        let mut polled: Vec<_> = clients.iter().map(|client| PollFd::new(client, PollFlags::IN)).collect();
        let nobody = poll(&mut polled, Some(&second)).context("waiting for answers")? == 0;
        if looked.elapsed() >= LOOK {
            if asked() != Some(gap) {
                return Ok(());
            }
            looked = Instant::now();
        }
        for (client, polled) in clients.iter().zip(&polled) {
            // After a second without an answer one may be lost.
            if nobody || !polled.revents().is_empty() {
                // The answer, or the error of a request that did not arrive.
                let _ = client.recv(&mut [0; 100]);
                sleep(gap);
                // A request that cannot be sent is as one that is lost.
                let _ = client.send(&request);
            }
        }
    }
}

/// Starts the RT VM with outsourced sockets, and waits until its server is up.
fn start_rt(wake: &str) -> Result<Vm> {
    let sockets = format!(
        "[vm.rt]\nbind = [\"udp/11111\"]\nreach = [\"10.1.0.0/24\"]\nchannels = 1\nwake = \"{wake}\"\npriority = 48\n"
    );
    configure("sockets.toml", &sockets)?;
    configure("host.toml", "[nic.rt0]\nclass = \"rt\"\n")?;
    let rt = Vm::start("rt", "rt", "sockets:rt", "10.1.0.2")?;
    rt.wait()?;
    Ok(rt)
}

/// Lets the clients begin, with so many seconds between an answer and the next request.
fn ask(gap: &str) -> Result<()> {
    // The clients find all of the file or none.
    write("/lab/asks", gap)?;
    fs::rename("/lab/asks", "/lab/ask").context("asking")
}

fn stop_asking() -> Result<()> {
    fs::remove_file("/lab/ask").context("the end of asking")
}

/// The thread of the device process that owns the first socket, at FIFO 48.
fn socket_thread() -> Result<i32> {
    let tenants = report("ontime ps")?;
    let thread = |line: &str| -> Option<i32> {
        let (_, rest) = line.split_once(" device ")?.1.split_once("ontime-sock/1 ")?;
        let thread = rest.split_whitespace().next()?.parse().ok()?;
        rest.contains("FIFO 48 ").then_some(thread)
    };
    tenants.lines().find_map(thread).with_context(|| format!("no device thread ontime-sock/1 is FIFO 48: {tenants}"))
}
