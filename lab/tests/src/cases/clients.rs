//! The clients' side on a CPU of its own. It reaches VMs on both networks, on the host's clock. None of the host's
//! threads is on its CPU, and its work moves none of the host's interrupts.

use anyhow::{Context, Result, ensure};
use ontime_lab::clients::{READ, Reading};
use serde_json::{Value, json};

use crate::inside::command::{Output, attempt, expect, figures, read, run};
use crate::inside::thread;
use crate::inside::vm::Vm;

pub(crate) fn clients() -> Result<()> {
    let count: usize = run("nproc --all")?.trim().parse().context("nproc printed no number")?;
    let clients = count.saturating_sub(1);
    let hosts = if clients == 1 { "0".to_owned() } else { format!("0-{}", clients.saturating_sub(1)) };
    let own = i32::try_from(std::process::id()).context("this process")?;
    expect("CPUs of the host's processes", hosts, thread::cpus(own)?)?;
    let cpu = run(["lab-client", "sh", "-c", "taskset -cp $$"])?;
    expect("the clients' own CPU", clients, cpu.rsplit(": ").next().unwrap_or_default().trim())?;
    let addresses = run("lab-client ip -4 -o address show")?;
    let addresses: Vec<&str> = addresses.lines().filter_map(address).collect();
    expect("the clients' addresses", "10.1.0.1/24 10.2.0.1/24", addresses.join(" "))?;

    let rt = Vm::start_small("rt", "rt", "rt", "10.1.0.2")?;
    let bulk = Vm::start_small("bulk", "bulk", "bulk", "10.2.0.2")?;
    rt.wait()?;
    bulk.wait()?;
    let look =
        || anyhow::Ok(Reading::parse(&run(["sh", "-c", READ])?, u16::try_from(clients).context("the clients' CPU")?));
    let before = look()?;
    client(&json!({"requests": config(11111)}))?.expect(&[0])?;
    let unanswered = client(&json!({"requests": config(9)}))?;
    ensure!(
        unanswered.status != 0 && unanswered.stderr.contains("10.1.0.2:9 did not answer 5 requests"),
        "a port that nobody answers: {}, {}",
        unanswered.status,
        unanswered.stderr
    );
    rt.stop()?;
    let rt = Vm::start_small("rt", "memcached", "rt", "10.1.0.2")?;
    rt.wait()?;
    let traffic = json!({"key_bytes": 64, "value_bytes": 1024, "set_of": 10, "gaps_us": [1000, 10000],
        "normal_gaps": false, "late_ns": null});
    client(&json!({"store": {"server": "10.1.0.2:11211", "traffic": &traffic}}))?.expect(&[0])?;
    let load = json!({"memcached": {"config": config(11211), "traffic": &traffic, "connections": 4}});
    client(&load)?.expect(&[0])?;
    let report = run("lab-client iperf3 -c 10.2.0.2 -t 1 -i 0")?;
    let received = report.lines().filter(|line| line.contains("receiver"));
    let rate: Vec<&str> = received.flat_map(|line| line.split_whitespace().skip(6).take(2)).collect();
    figures(format_args!("TCP to a bulk VM for a second: {}", rate.join(" ")));
    let complaints = look()?.complaints(&before);
    ensure!(complaints.is_empty(), "{}: {}", complaints.join("; "), read("/proc/interrupts")?);
    rt.stop()?;
    bulk.stop()
}

/// What the clients' side does.
fn client(order: &Value) -> Result<Output> {
    attempt(["lab-client", "ontime-lab", "client", order.to_string().as_str()])
}

/// 50 requests to a port of the RT VM.
fn config(port: u16) -> Value {
    json!({"server": format!("10.1.0.2:{port}"), "message_bytes": 16, "min_gap_us": 1000, "max_gap_us": 2000,
        "normal_gaps": false, "timeout_us": 1_000_000, "requests": 50, "give_up_after": 5, "seed": 1})
}

/// The address in a line of `ip -o address show`, unless it is the loopback interface's.
fn address(line: &str) -> Option<&str> {
    let mut words = line.split_whitespace().skip(1);
    let nic = words.next()?;
    words.nth(1).filter(|_| nic != "lo")
}
