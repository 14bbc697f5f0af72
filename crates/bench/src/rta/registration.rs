//! `registration`: what it costs that a guest's application asks for its bandwidth (RTVirt, sections 4.3 and 4.5: a hypercall of 10 us).
//!
//! In: how often. Out: a program in a VM changes its own SCHED_DEADLINE runtime, up and down in turn, so that each change is an INC_BW or a DEC_BW: how
//! long the system call takes in the guest, with the time in which the daemon waits for its slice's end; the same where the VM has the host hold something
//! spare (docs/guest.md), so that the host is told afterwards; the same call with nothing changed, which asks nobody;
//! and the CPU time of each process of the host a change, which on the virtual clock is a count of instructions.

use std::fmt::Write as _;

use ontime_lab::images::Images;

use super::apply;
use super::guests::{DECLARED_US, Guests};
use crate::host::{Host, MeasureError, Site};
use crate::number;
use crate::schema::Clock;
use crate::stats::Summary;

/// The paper's hypercall, and the goal: of the host a change, and of the guest's call beyond one that asks nobody, us.
pub const GOAL_US: f64 = 10.0;
/// Between two changes, us: each finds the host at rest.
const PAUSE_US: u64 = 20_000;

/// What the VM has spare, us of us: twice what a change asks for.
const SPARE: &str = "2000/20000";

/// Ends when the daemon has used next to nothing for two seconds.
const SETTLED: &str = "ran() { read -r ran rest < /proc/$(pgrep -x -f 'ontime daemon')/schedstat; echo $ran; }; \
                       for look in $(seq 30); do before=$(ran); sleep 2; [ $(($(ran) - before)) -ge 1000000 ] || break; done";

/// What was found.
#[derive(Debug, Clone)]
pub struct Registration {
    /// The host's kernel and clock.
    pub kernel: String,
    /// See there.
    pub clock: Clock,
    /// Changes that the host was asked for.
    pub changes: u64,
    /// The system call where the host is asked, ns.
    pub asked: Summary,
    /// The same with something spare, ns.
    pub spare: Summary,
    /// Where nothing changes, ns.
    pub unasked: Summary,
    /// CPU time a change, us: the VM's device process, the daemon without its pacers, the pacers.
    pub host_us: [f64; 3],
    /// The same with something spare.
    pub spare_us: [f64; 3],
}

/// Boots a host and a VM and measures `count` changes.
///
/// # Errors
/// The host or the VM does not come up; the program fails.
pub fn measure(
    site: &Site,
    count: u32,
    images: &Images,
    progress: &mut dyn FnMut(&str),
) -> Result<Registration, MeasureError> {
    Guests::bring(site, images, progress)?;
    let mut host = Host::start(site, images, &[], &[], progress)?;
    let mut guests = Guests::boot(&mut host, 1, DECLARED_US, progress)?;
    apply(&mut host, &mut guests, "paced", "")?;
    // The daemon looks at the host again after an apply, and where QEMU starts threads to read the program from the disk: hundreds of times what
    // a change costs.
    calls(&mut host, &guests, "first", 1, 0)?;
    host.shell(SETTLED)?;
    progress("measuring calls that ask nobody");
    let (unasked, quiet) = calls(&mut host, &guests, "same", count, 0)?;
    progress("measuring changes");
    let (asked, busy) = calls(&mut host, &guests, "change", count, 1_000)?;
    guests.tell(&mut host, &[format!("echo {SPARE} > /sys/module/ontime/parameters/deadline_spare")])?;
    host.shell(SETTLED)?;
    progress("measuring changes with something spare");
    let (spare, spared) = calls(&mut host, &guests, "spare", count, 1_000)?;
    let changes = u64::from(count);
    // What they do in that time anyway is not the changes'.
    let rate = |place: usize| quiet.ran(place) / quiet.seconds().max(1e-9);
    let beyond = |used: Used, place| (used.ran(place) - rate(place) * used.seconds()).max(0.0);
    let each = |used| [0, 1, 2].map(|place| beyond(used, place) * 1e6 / changes.max(1) as f64);
    let none = || MeasureError::Accounting("no call was timed".to_owned());
    Ok(Registration {
        kernel: host.kernel.clone(),
        clock: host.clock,
        changes,
        asked: Summary::of(&asked).ok_or_else(none)?,
        spare: Summary::of(&spare).ok_or_else(none)?,
        unasked: Summary::of(&unasked).ok_or_else(none)?,
        host_us: each(busy),
        spare_us: each(spared),
    })
}

/// Has the guest call `count` times, its runtime `step` us more or less each time: what each call took, ns, and what the host's processes used.
fn calls(host: &mut Host, guests: &Guests, tag: &str, count: u32, step: u64) -> Result<(Vec<u64>, Used), MeasureError> {
    let before = Cpu::read(host)?;
    guests.tell(host, &[format!("register {tag} {count} {step} {PAUSE_US}")])?;
    // In the place of a job's slack stands what a call took, ns.
    let said = guests.said(host, 0, tag)?;
    let after = Cpu::read(host)?;
    let mut words = said.split_whitespace().map(str::parse::<u64>);
    let status = words.next().and_then(Result::ok).unwrap_or(1);
    let took: Vec<u64> = words.map_while(Result::ok).collect();
    if status != 0 || took.len() < usize::try_from(count).unwrap_or(usize::MAX) {
        let said = format!("status {status}, {} calls of {count}", took.len());
        return Err(MeasureError::Program { program: "a guest's sched_setattr(SCHED_DEADLINE)".to_owned(), said });
    }
    Ok((took, Used { before, after }))
}

/// CPU time of the device process, the daemon and the pacers, and the uptime, s.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Cpu([f64; 4]);

impl Cpu {
    fn read(host: &mut Host) -> Result<Self, MeasureError> {
        let said = host.shell(
            "device=0 daemon=0 pacers=0; \
             of() { for task in /proc/$1/task/*; do read -r name < $task/comm; read -r ran rest < $task/schedstat; \
             case $name in ontime-pace/*) pacers=$((pacers + ran)) ;; *) eval \"$2=\\$(($2 + ran))\" ;; esac; done; }; \
             of \"$(pgrep -f '^ontime device --vm rta1')\" device; of \"$(pgrep -x -f 'ontime daemon')\" daemon; \
             read -r up idle < /proc/uptime; echo $device $daemon $pacers $up",
        )?;
        Self::parse(&said).ok_or(MeasureError::Accounting(said))
    }

    fn parse(said: &str) -> Option<Self> {
        let mut numbers = said.split_whitespace().map(|word| word.parse::<f64>().ok());
        let mut next = || numbers.next().flatten();
        Some(Self([next()? / 1e9, next()? / 1e9, next()? / 1e9, next()?]))
    }
}

/// Between two readings.
#[derive(Debug, Clone, Copy)]
struct Used {
    before: Cpu,
    after: Cpu,
}

impl Used {
    /// By place in [`Cpu`], s.
    fn ran(&self, place: usize) -> f64 {
        let value = |cpu: &Cpu| cpu.0.get(place).copied().unwrap_or(0.0);
        value(&self.after) - value(&self.before)
    }

    fn seconds(&self) -> f64 {
        self.ran(3)
    }
}

impl Registration {
    /// Of the host's processes together, us.
    pub fn host_sum_us(&self) -> f64 {
        self.host_us.iter().sum()
    }

    /// What a call of the guest takes beyond one that asks nobody, medians, us.
    pub fn beyond_us(&self, of: &Summary) -> f64 {
        of.p50.saturating_sub(self.unasked.p50) as f64 / 1e3
    }

    /// As text.
    pub fn text(&self) -> String {
        let us = |ns: u64| number::us(ns as f64 / 1e3);
        let mut text = format!(
            "registration: {} changes of an application's bandwidth in a VM, {}, {} clock; us\n",
            number::count(self.changes),
            self.kernel,
            self.clock.name()
        );
        let rows = [
            ("asks the host", &self.asked),
            ("has something spare", &self.spare),
            ("changes nothing, asks nobody", &self.unasked),
        ];
        for (name, of) in rows {
            let _ = writeln!(
                text,
                "the system call in the guest, {name:<30} p50 {:>9}  p99 {:>9}  max {:>9}",
                us(of.p50),
                us(of.p99),
                us(of.max)
            );
        }
        for (when, [device, daemon, pacers]) in [("", self.host_us), (" with something spare", self.spare_us)] {
            let _ = writeln!(
                text,
                "CPU time of the host a change{when}: device process {}, daemon {}, pacers {}, together {}",
                number::us(device),
                number::us(daemon),
                number::us(pacers),
                number::us(device + daemon + pacers)
            );
        }
        let verdict = |reached: f64| if reached <= GOAL_US { "met" } else { "NOT MET" };
        for (what, reached) in [
            ("of the host's instructions a registration", self.host_sum_us()),
            ("in the guest beyond a call that asks nobody", self.beyond_us(&self.asked)),
            ("in the guest beyond a call that asks nobody, with something spare", self.beyond_us(&self.spare)),
        ] {
            let (verdict, reached) = (verdict(reached), number::us(reached));
            let _ = writeln!(text, "[{verdict}] at most {GOAL_US} us {what} (the paper's hypercall: 10 us): {reached}");
        }
        let _ = writeln!(text, "{} clock: {}", self.clock.name(), self.clock.meaning());
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_hosts_processes_do_anyway_is_not_counted() {
        let cpu = |text| Cpu::parse(text).unwrap();
        let used = Used { before: cpu("1000000000 0 0 5.0"), after: cpu("1500000000 2000000000 7 15.0\n") };
        assert!((used.ran(0) - 0.5).abs() < 1e-9 && (used.ran(1) - 2.0).abs() < 1e-9);
        assert!((used.seconds() - 10.0).abs() < 1e-9);
        assert_eq!(Cpu::parse("1 2 3"), None);
        assert_eq!(Cpu::parse("a b c d"), None);
    }
}
