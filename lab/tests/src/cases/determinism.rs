//! Two runs of the same thing are one: what passed on the wires, the clock, the CPU times, all interrupts and the
//! kernel's random numbers, which have taken in the times of all interrupts.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use ontime_lab::events::EVENTS;

use crate::inside::command::{read, run, start, write};
use crate::inside::vm::Vm;
use crate::outside::Outside;

/// What a run leaves in its directory.
const LEFT: [&str; 3] = ["rt.pcap", "bulk.pcap", "files/state"];

/// The second run has a busy process beside it on this machine. Runs that differ are told by their first event that
/// does.
pub(crate) fn a_run_repeats_exactly(test: &Outside) -> Result<()> {
    let [quiet, busy] = ["quiet", "busy"].map(|name| test.directory(name));
    let (quiet, busy) = (quiet?, busy?);
    test.inside_in(&test.host(), &quiet)?;
    let beside = test.start(Command::new("sh").args(["-c", "while :; do :; done"]))?;
    test.inside_in(&test.host(), &busy)?;
    drop(beside);
    let mut events = test.lab(&["events"]);
    let compared = test.run(events.args([quiet.join(EVENTS), busy.join(EVENTS)]))?;
    ensure!(compared.status == 0, "the runs differ: {}", compared.said);
    let content = |dir: &Path, name: &str| {
        let path = dir.join(name);
        fs::read(&path).with_context(|| format!("reading {}", path.display()))
    };
    for name in LEFT {
        let (first, second) = (content(&quiet, name)?, content(&busy, name)?);
        let equal = first.iter().zip(&second).take_while(|(a, b)| a == b).count();
        ensure!(
            first == second,
            "{name}: {} and {} bytes, equal up to byte {equal}; compare {} and {}",
            first.len(),
            second.len(),
            quiet.display(),
            busy.display()
        );
    }
    let sums = test.run(Command::new("sha256sum").args(LEFT).current_dir(&quiet))?.expect(0)?;
    sums.lines().filter(|line| !line.starts_with('+')).try_for_each(|line| test.note(format_args!("figures: {line}")))
}

/// An RT VM is asked while a bulk VM receives TCP. The clients are inside.
pub(crate) fn repeat() -> Result<()> {
    let rt = Vm::start_small("rt", "rt", "rt", "10.1.0.2")?;
    let bulk = Vm::start_small("bulk", "bulk", "bulk", "10.2.0.2")?;
    rt.wait()?;
    bulk.wait()?;
    let requests = r#"{"requests": {"server": "10.1.0.2:11111", "message_bytes": 16, "min_gap_us": 1000,
        "max_gap_us": 2000, "normal_gaps": false, "timeout_us": 1000000, "requests": 100, "give_up_after": 5,
        "seed": 1}}"#;
    let flood = start("lab-client iperf3 -c 10.2.0.2 -t 1 -i 0")?;
    let mut client = Command::new("lab-client");
    client.args(["ontime-lab", "client", requests]);
    let answers = run(client)?;
    let received = flood.wait()?.expect(&[0])?;
    let random = run("od -An -tx8 -N32 /dev/urandom")?;
    let counters = ["/proc/uptime", "/proc/stat", "/proc/interrupts"].map(read);
    let mut state = format!("{answers}\n{received}\n{random}\n");
    for counter in counters {
        state += &counter?;
        state.push('\n');
    }
    write("/lab/state", state)
}
