//! An RT server that answers, and a flood of small packets on the other NIC. `ontime trace` reports the inversions
//! under `vanilla`, and none under `partitioned`. The test also checks its cost, that nothing of it is left, and its
//! messages when it cannot trace. The server is a process in a cgroup of its own, or a VM.

use std::fs;
use std::io;
use std::net::UdpSocket;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use serde_json::Value;

use super::flood::Flood;
use super::on_demand::OnDemand;
use crate::inside::clock::now;
use crate::inside::command::{
    MEASURES, Running, attempt, expect, figures, files, program, read, read_number, run, sh, start, start_to, within,
    write,
};
use crate::inside::daemon::{Daemon, apply, configure, rt_tenant};
use crate::inside::thread::{Place, set_own};
use crate::inside::vm::Vm;

const NAME: &str = "trace_names_the_inversions";
/// How long it traces a method, s.
const SECONDS: u64 = 5;
const INSTANCES: &str = "/sys/kernel/tracing/instances";
const CGROUP: &str = "/sys/fs/cgroup/plc.scope";

/// The RT server.
struct Server {
    /// As an option of `ontime trace`.
    option: &'static str,
    name: &'static str,
    address: &'static str,
}

/// With a process in a cgroup as the RT server.
pub(crate) fn trace() -> Result<()> {
    add_addresses()?;
    configure("tenants.toml", "[[tenant]]\ncgroup = \"/plc.scope\"\nclass = \"rt\"\nlevel = 0\n")?;
    configure("host.toml", "[nic.rt0]\ntenants = [\"plc.scope\"]\n")?;
    fs::create_dir_all(CGROUP).context("making the server's cgroup")?;
    start(program(NAME, "serve", &[])?)?;
    within(60, "the server is in its cgroup", || Ok(!read(format!("{CGROUP}/cgroup.procs"))?.is_empty()))?;
    let server = Server { option: "--container plc.scope", name: "plc.scope", address: "10.1.0.9" };
    inversions(&server)?;
    cost(&server)?;
    refusals()
}

/// With a VM as the RT server.
pub(crate) fn trace_vm() -> Result<()> {
    add_addresses()?;
    configure("tenants.toml", &rt_tenant("rt", "level = 0"))?;
    Vm::start("rt", "rt", "rt", "10.1.0.2")?.wait()?;
    inversions(&Server { option: "--vm rt", name: "rt", address: "10.1.0.2" })?;
    refusals()
}

fn add_addresses() -> Result<()> {
    run("ip address add 10.1.0.9/24 dev br-rt")?;
    run("ip address add 10.2.0.9/24 dev br-bulk").map(drop)
}

/// What is the same for both servers: all that needs the flood. It starts the daemon.
fn inversions(server: &Server) -> Result<()> {
    write("/lab/address", server.address)?;
    Daemon::start()?;
    let option = server.option;
    println!("== vanilla: inversions by name");
    let vanilla = traced(option, "vanilla")?;
    ensure!(vanilla.contains("cure [napi-threaded]"), "the cure is not named");
    let found = inversions_under("vanilla")?;
    let is_named = found.iter().any(|one| one.place == "NAPI of bulk0" && one.rule == "napi-threaded");
    ensure!(is_named, "no thread is named as delayed in bulk0's NAPI with its cure: {found:?}");

    println!("== partitioned: none");
    let partitioned = traced(option, "partitioned")?;
    // Each reply must be matched with its own request, also where other packets (ARP) arrive while the server is awake.
    let row = partitioned.lines().find(|line| line.starts_with("  in all"));
    // in, all, minimum, mean, median
    let median = row.and_then(|row| row.split_whitespace().nth(4)).map(|us| us.replace(',', ""));
    let median: f64 = median.and_then(|us| us.parse().ok()).context("no median under partitioned")?;
    ensure!(median < 2000.0, "half of the requests took {median} us and more under partitioned: not their own replies");
    // Ontime's cap watcher has the highest priority on purpose, but is reported too.
    let mut hindered = inversions_under("partitioned")?;
    hindered.retain(|one| !one.behind.starts_with("ontime-cap "));
    ensure!(hindered.is_empty(), "an inversion under partitioned: {hindered:?}");
    for ending in ["json", "html", "pftrace"] {
        let length = fs::metadata(format!("/lab/partitioned.{ending}")).map_or(0, |file| file.len());
        ensure!(length > 0, "no {ending}");
    }

    println!("== nothing is left behind, also when killed");
    let left = files(&format!("{INSTANCES}/*"));
    ensure!(left.is_empty(), "an instance stays: {left:?}");
    let trace = start(format!("ontime trace {option}"))?;
    within(40, "it traces", traces)?;
    trace.end(Signal::KILL)?;
    within(40, "the instance of a killed trace is gone", || Ok(files(&format!("{INSTANCES}/*")).is_empty()))?;

    println!("== a flood of events and small rings: the loss is told");
    // The reader is stopped until the kernel has counted lost records, so that records are lost however fast the
    // machine is. It is stopped only once it reads requests: before that no event is enabled, and nothing would be
    // lost.
    write("/lab/flood", "")?;
    let trace = start(format!("ontime trace {option} --duration 600 --ring 64"))?;
    // The flood leaves it a twentieth of the CPU.
    within(300, "it reads events", || Ok(has_counted("read events")))?;
    sleep(Duration::from_secs(3));
    trace.signal(Signal::STOP)?;
    within(120, "records are lost", || Ok(has_counted("overrun")))?;
    trace.signal(Signal::CONT)?;
    sleep(Duration::from_secs(1));
    let said = trace.end(Signal::INT)?.expect(&[0])?;
    let is_told = said.lines().any(|line| line.starts_with("LOST at least"));
    ensure!(is_told, "nothing was lost, or it was not told: {said}");

    println!("== break");
    let broken = attempt(format!("ontime trace {option} --duration 60 --break 1"))?;
    expect("status of --break", 1, broken.status)?;
    let request = format!("a request of {} took", server.name);
    ensure!(broken.stdout.contains(&request), "the request that broke is not shown: {}", broken.stdout);
    fs::remove_file("/lab/flood").context("ending the flood")?;
    fs::remove_file("/lab/ask").context("ending the requests")
}

/// What trace says of some seconds under flood.
fn traced(option: &str, method: &str) -> Result<String> {
    apply(method)?;
    let from = received()?;
    write("/lab/flood", "")?;
    write("/lab/ask", "")?;
    within(60, "a thousand packets of flood", || Ok(received()? > from + 1000))?;
    let from = received()?;
    // The flood stops because under vanilla it would leave no CPU time to write the report.
    let stopping = start(sh(&format!("sleep {}; rm /lab/flood", SECONDS + 1)))?;
    // The floor: a wake-up and its switch, with their records, take 40 to 50 us of instructions here, and a kernel
    // section takes up to 90.
    let said = run(format!(
        "ontime trace {option} --floor 100 --duration {SECONDS} --json /lab/{method}.json --html /lab/{method}.html \
         --perfetto /lab/{method}.pftrace"
    ))?;
    figures(format_args!("{method}: {} packets of flood in {SECONDS} s", received()?.saturating_sub(from)));
    println!("{said}");
    stopping.wait()?.expect(&[0])?;
    // "plc.scope (rt) by rt0: 1,234 requests"
    let number = |line: &str| -> Option<u64> {
        line.strip_suffix(" requests")?.rsplit_once(": ")?.1.replace(',', "").parse().ok()
    };
    let requests = said.lines().find_map(number).unwrap_or_default();
    ensure!(requests >= 10, "only {requests} requests were put together under {method}");
    Ok(said)
}

/// Packets that the bulk NIC has received.
pub(crate) fn received() -> Result<u64> {
    read_number("/sys/class/net/bulk0/statistics/rx_packets")
}

/// An inversion of a report.
#[derive(Debug, PartialEq, Eq)]
struct Inversion {
    /// The blocking thread: its name and its policy.
    behind: String,
    /// What that thread did.
    place: String,
    /// The rule that would cure it, or nothing.
    rule: String,
}

/// The inversions that trace has reported under a method. The text for a terminal wraps its lines and leaves most out.
fn inversions_under(method: &str) -> Result<Vec<Inversion>> {
    inversions_in(&read(format!("/lab/{method}.json"))?).with_context(|| format!("the report under {method}"))
}

fn inversions_in(report: &str) -> Result<Vec<Inversion>> {
    let report: Value = serde_json::from_str(report).context("no JSON")?;
    ensure!(report.get("inversions_looked_for") == Some(&Value::Bool(true)), "it did not look for inversions");
    let all = report.get("inversions").and_then(Value::as_array).context("it has no list of inversions")?;
    let inversion = |of: &Value| -> Option<Inversion> {
        let text = |name: &str| of.get(name)?.as_str().map(str::to_owned);
        Some(Inversion { behind: text("behind")?, place: text("place")?, rule: text("rule").unwrap_or_default() })
    };
    all.iter().map(|of| inversion(of).with_context(|| format!("an inversion without its thread: {of}"))).collect()
}

/// Whether a trace is under way.
fn traces() -> Result<bool> {
    Ok(!files(&format!("{INSTANCES}/ontime-trace*")).is_empty())
}

/// Whether a counter of the trace's rings is not 0.
fn has_counted(what: &str) -> bool {
    let stats = files(&format!("{INSTANCES}/ontime-trace-*/per_cpu/cpu*/stats"));
    let counts = |line: &str| {
        let count = line.strip_prefix(what).and_then(|rest| rest.strip_prefix(": "));
        count.is_some_and(|count| count.starts_with(|digit: char| ('1'..='9').contains(&digit)))
    };
    stats.iter().any(|file| read(file).unwrap_or_default().lines().any(counts))
}

/// The cost, at the answers. The requests come from a namespace beside the bridge, on the emulated clock, without the
/// flood.
fn cost(server: &Server) -> Result<()> {
    println!("== the cost, at the answers");
    run("ip netns add ask")?;
    run("ip link add v-ask master br-rt type veth peer name ask netns ask")?;
    run("ip -n ask address add 10.1.0.50/24 dev ask")?;
    run("ip -n ask link set ask up")?;
    run("ip link set v-ask up")?;
    within(60, "the flood is over", || {
        let from = received()?;
        sleep(Duration::from_secs(1));
        Ok(received()? == from)
    })?;
    let without = round_trips(server)?;
    for mode in ["", "--segments-only"] {
        let trace = start(format!("ontime trace {} --nic v-ask --duration 60 {mode}", server.option))?;
        within(40, "it traces", traces)?;
        sleep(Duration::from_secs(1));
        let with = round_trips(server)?;
        let said = trace.end(Signal::INT)?.expect(&[0])?;
        let probe = said.lines().find_map(|line| line.split_once("; a probe costs")).map_or("", |(_, rest)| rest);
        figures(format_args!(
            "minimum and median of 500 round trips, us: {without} without trace, {with} with trace {mode}; a probe \
             costs{probe}"
        ));
    }
    Ok(())
}

/// Runs [`measure`] in the clients' namespace; what it prints.
fn round_trips(server: &Server) -> Result<String> {
    let own = std::env::current_exe().context("finding this program")?;
    let mut command = Command::new(MEASURES);
    command.args(["ip", "netns", "exec", "ask"]).arg(own).args(["program", NAME, "measure", server.address]);
    Ok(run(command)?.trim_end().to_owned())
}

/// Fails unless `ontime trace` reports a VM and a NIC that do not exist.
fn refusals() -> Result<()> {
    println!("== what cannot be traced is said");
    let said = attempt("ontime trace --vm nobody")?;
    expect("status of an unknown VM", 64, said.status)?;
    ensure!(said.stderr.contains("there is no VM nobody; there are: "), "said: {}", said.stderr);
    let said = attempt("ontime trace --nic nowhere")?;
    ensure!(said.status != 0, "traced a NIC that is not there");
    ensure!(said.stderr.contains("there is no interface nowhere"), "said: {}", said.stderr);
    Ok(())
}

/// The program that is the RT server: it enters its cgroup, and sends every datagram back.
pub(crate) fn serve(_: &[String]) -> Result<()> {
    // 0 is the process that writes.
    write(format!("{CGROUP}/cgroup.procs"), "0")?;
    let socket = UdpSocket::bind("0.0.0.0:11111").context("the server's socket")?;
    let mut data = [0; 1500];
    loop {
        let (length, from) = socket.recv_from(&mut data).context("receiving a request")?;
        socket.send_to(data.get(..length).unwrap_or_default(), from).context("sending a reply")?;
    }
}

/// The program that prints the minimum and the median of 500 round trips to a server, us.
pub(crate) fn measure(arguments: &[String]) -> Result<()> {
    let [address] = arguments else { bail!("measure ADDRESS") };
    set_own(Place::fifo(40))?;
    let server = UdpSocket::bind("0.0.0.0:0").context("a socket")?;
    server.connect((address.as_str(), 11111)).context("the server's address")?;
    server.set_read_timeout(Some(Duration::from_secs(10))).context("a time limit")?;
    let (mut times, mut data) = (Vec::with_capacity(520), [0; 100]);
    for _ in 0..520 {
        let from = now();
        server.send(&[b'x'; 32]).context("sending a request")?;
        server.recv(&mut data).context("receiving a reply")?;
        times.push(now().saturating_sub(from));
        sleep(Duration::from_millis(2));
    }
    // The first ones warm up.
    let mut times = times.split_off(20);
    times.sort_unstable();
    let us = |at: usize| times.get(at).map_or(0.0, |time| time.as_secs_f64() * 1e6);
    println!("{:.1} {:.1}", us(0), us(250));
    Ok(())
}

/// The clients' side: sends requests to the RT server while a file `ask` exists, and floods the bulk NIC with small
/// packets while a file `flood` exists.
pub(crate) fn client(_: &[String]) -> Result<()> {
    let (mut flood, mut ask) = (OnDemand::new("flood", Signal::KILL), OnDemand::new("ask", Signal::KILL));
    loop {
        sleep(Duration::from_millis(200));
        flood.keep(|| own("flood", &[], "flood.log"))?;
        ask.keep(|| own("ask", &[&read("address")?], "ask.log"))?;
    }
}

/// Starts a program of this test at the clients' side.
fn own(name: &str, arguments: &[&str], log: &str) -> Result<Running> {
    let mut command = Command::new(std::env::current_exe().context("finding this program")?);
    command.args(["program", NAME, name]).args(arguments);
    start_to(command, log)
}

/// The program that floods the bulk NIC.
pub(crate) fn flood(_: &[String]) -> Result<()> {
    let flood = Flood::to_bulk_network()?;
    loop {
        flood.send();
    }
}

/// The program that sends requests. They are those of sockperf (the VM's server is sockperf's), but it sleeps between
/// them where sockperf would spin.
pub(crate) fn ask(arguments: &[String]) -> Result<()> {
    let [address] = arguments else { bail!("ask ADDRESS") };
    let server = UdpSocket::bind("0.0.0.0:0").context("a socket")?;
    server.connect((address.as_str(), 11111)).context("the server's address")?;
    server.set_read_timeout(Some(Duration::from_secs(2))).context("a time limit")?;
    let mut number = 0_u64;
    loop {
        number += 1;
        // A request or its reply may be lost.
        let _ = exchange(&server, number);
        sleep(Duration::from_millis(30));
    }
}

/// Sends a request, and waits for its reply.
fn exchange(server: &UdpSocket, number: u64) -> io::Result<()> {
    // Number, flags (a client, wants an answer), length.
    let mut request = number.to_be_bytes().to_vec();
    request.extend(3_u16.to_be_bytes());
    request.extend(32_u32.to_be_bytes());
    request.resize(32, b'x');
    server.send(&request)?;
    loop {
        let mut reply = [0; 100];
        server.recv(&mut reply)?;
        if reply.starts_with(&number.to_be_bytes()) {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reports_inversions_are_read_with_and_without_a_rule() {
        let report = r#"{"inversions_looked_for": true, "inversions": [
            {"behind": "irq/31-rt0 (FIFO 50)", "place": "NAPI of bulk0", "rule": "napi-threaded", "requests": 3},
            {"behind": "ontime-cap (FIFO 55)", "place": "thread", "rule": null}]}"#;
        let inversion = |behind: &str, place: &str, rule: &str| {
            let [behind, place, rule] = [behind, place, rule].map(str::to_owned);
            Inversion { behind, place, rule }
        };
        let found = inversions_in(report).unwrap();
        let watcher = inversion("ontime-cap (FIFO 55)", "thread", "");
        assert_eq!(found, [inversion("irq/31-rt0 (FIFO 50)", "NAPI of bulk0", "napi-threaded"), watcher]);
        for bad in [
            "",
            r#"{"inversions_looked_for": true}"#,
            r#"{"inversions_looked_for": false, "inversions": []}"#,
            r#"{"inversions_looked_for": true, "inversions": [{"place": "thread"}]}"#,
        ] {
            assert!(inversions_in(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_request_waits_for_its_own_reply() {
        let (server, client) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        client.connect(server.local_addr().unwrap()).unwrap();
        server.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let replies = std::thread::spawn(move || {
            let mut data = [0; 100];
            let (length, from) = server.recv_from(&mut data).unwrap();
            assert_eq!(length, 32);
            assert_eq!(data[..14], [0, 0, 0, 0, 0, 0, 0, 7, 0, 3, 0, 0, 0, 32]);
            for number in [6_u64, 7] {
                server.send_to(&number.to_be_bytes(), from).unwrap();
            }
        });
        exchange(&client, 7).unwrap();
        replies.join().unwrap();
        // The reply to another request is passed over, and there is no more.
        client.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
        assert!(client.recv(&mut [0; 100]).is_err());
    }
}
