//! Several CPUs on the virtual clock: each gets its share, and VMs run on all of them.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::inside::clock::now;
use crate::inside::command::{expect, figures, program, read, run, start};
use crate::inside::vm::Vm;

pub(crate) fn cpus() -> Result<()> {
    let count: usize = run("nproc")?.trim().parse().context("nproc printed no number")?;
    expect("clock source", "tsc", read("/sys/devices/system/clocksource/clocksource0/current_clocksource")?)?;

    // The rounds that a process on each CPU completes in a second of the host's time, all at once.
    let mut processes = Vec::new();
    for cpu in 0..count {
        let rounds = program("cpus_take_turns_on_the_virtual_clock", "rounds", &[])?;
        let mut taskset = Command::new("taskset");
        taskset.arg("-c").arg(cpu.to_string()).arg(rounds.get_program()).args(rounds.get_args());
        processes.push(start(taskset)?);
    }
    let mut rounds: Vec<u64> = Vec::new();
    for process in processes {
        let said = process.wait()?.expect(&[0])?;
        rounds.push(said.trim().parse().with_context(|| format!("'{said}' is no number of rounds"))?);
    }
    let each = rounds.iter().map(u64::to_string).collect::<Vec<_>>().join(" ");
    figures(format_args!("rounds of each CPU: {each}"));
    rounds.sort_unstable();
    let (least, most) = (rounds.first().copied().unwrap_or(0), rounds.last().copied().unwrap_or(0));
    ensure!(rounds.len() > 1 && least * 10 > most * 8, "CPUs are unlike: {each}");

    // A VM on each CPU, all at once.
    let mut vms = Vec::new();
    for cpu in 0..count {
        vms.push(Vm::start_on(cpu, &format!("vm{cpu}"), "idle", "rt", &format!("10.1.0.{}", 11 + cpu))?);
    }
    for vm in vms {
        vm.wait()?;
        vm.stop()?;
    }
    let messages = run("dmesg")?;
    let complaints: Vec<&str> = messages.lines().filter(|line| complains(line)).collect();
    ensure!(complaints.is_empty(), "the kernel complains: {}", complaints.join("\n"));
    Ok(())
}

/// Program: how often it reads the clock in a second.
pub(crate) fn rounds(_: &[String]) -> Result<()> {
    let end = now() + Duration::from_secs(1);
    let mut rounds: u64 = 0;
    while now() < end {
        rounds += 1;
    }
    println!("{rounds}");
    Ok(())
}

/// Whether the kernel says in this line that a CPU or its clock does not run as it should.
fn complains(line: &str) -> bool {
    let line = line.to_lowercase();
    let mut words = line.split(|of: char| !of.is_alphanumeric() && of != '_');
    words.any(|word| word.starts_with("stall"))
        || line.contains("lockup")
        || line.contains("hung task")
        || line.split_once("clocksource:").is_some_and(|(_, rest)| rest.contains("unstable"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaints_are_told_from_other_messages() {
        for line in [
            "rcu: INFO: rcu_preempt detected stalls on CPUs/tasks: ",
            "watchdog: BUG: soft lockup - CPU#1 stuck for 22s!",
            "clocksource: Marking clocksource 'tsc' as Unstable because of skew",
            "INFO: hung task",
        ] {
            assert!(complains(line), "{line}");
        }
        for line in ["clocksource: Switched to clocksource tsc", "rcu: installed callbacks", "the clock is unstable"] {
            assert!(!complains(line), "{line}");
        }
    }
}
