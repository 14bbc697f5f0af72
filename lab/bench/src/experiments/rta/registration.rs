//! `registration`: the cost of a guest application's request for bandwidth (RTVirt, sections 4.3 and 4.5: a hypercall
//! of 10 us).
//!
//! In: the number of requests. Out: a [`MethodResult`] for each of [`METHODS`]. A program in a VM changes its own
//! SCHED_DEADLINE runtime, alternately up and down, so that each change is an INC_BW or a DEC_BW. Measured are:
//!
//! - the duration of the system call in the guest, within the host's offer (`change`);
//! - the same if the VM has spare bandwidth (docs/design/guest.md), so that the host is notified afterwards (`spare`);
//! - the same call without a change, which notifies nobody (`same`);
//! - the bare notification, the module's call to the device process without a request (`bare`);
//! - the CPU time per change of each process of the host. On the virtual clock this is a count of instructions.

use std::process::ExitCode;

use ontime_lab::images::Images;

use super::guests::{DECLARED_US, Guests};
use super::{apply, without_requests};
use crate::error::MeasureError;
use crate::experiments::{Emulated, Experiment, Measured, Methods, Output, command};
use crate::goals::Figure::{self, Own, P50};
use crate::goals::{GoalSpec, goal, idle};
use crate::host::{Host, Site};
use crate::paper::Figures;
use crate::progress::progress;
use crate::schema::{Load, MethodResult, Metric, Unit};
use crate::trial::{self, CaseResults};

/// The calls, in the order of measurement. `same` is first because it gives the base load of the host's processes;
/// `spare` is last because spare bandwidth cannot be given back.
pub(crate) const METHODS: Methods = Methods(&[
    ("same", "changes nothing, asks nobody"),
    ("bare", "the bare notification, asks for nothing"),
    ("change", "takes what the host offers"),
    ("spare", "has something spare, tells the host afterwards"),
]);
/// Pause between two changes, us, after which the host is idle again.
const PAUSE_US: u64 = 20_000;
/// A change of the runtime, us.
const STEP_US: u64 = 1_000;

/// The VM's spare bandwidth, us per us: twice the bandwidth of a change.
const SPARE: &str = "2000/20000";

/// A shell command that ends when the daemon has used almost no CPU time for two seconds.
const SETTLED: &str = "ran() { read -r ran rest < /proc/$(pgrep -x -f 'ontime daemon')/schedstat; echo $ran; }; \
                       for look in $(seq 30); do before=$(ran); sleep 2; [ $(($(ran) - before)) -ge 1000000 ] || \
                       break; done";

/// Boots a host and a VM and measures every method. If a method fails, the remaining methods are measured while the
/// host lives.
fn measure(args: &Options, site: &Site, images: &Images) -> Result<CaseResults, MeasureError> {
    Guests::bring(site, images)?;
    let mut host = Host::start(site, images, &[], &[])?;
    let mut guests = Guests::boot(&mut host, 1, DECLARED_US)?;
    apply(&mut host, &mut guests, "paced", "")?;
    // After an apply the daemon reads the host's state again, also when QEMU starts threads to read the program from
    // the disk. That costs hundreds of times as much as a change, so one call is made beforehand.
    calls(&mut host, &guests, "first", 1, &register("first", 1, 0))?;
    let mut anyway = None;
    trial::each(
        host,
        METHODS.iter(),
        |method| (*method).to_owned(),
        |host, &method| measure_method(host, &guests, args.count, method, &mut anyway),
    )
}

/// `anyway` is the CPU use of the host's processes without changes, once it has been measured.
fn measure_method(
    host: &mut Host,
    guests: &Guests,
    count: u32,
    method: &str,
    anyway: &mut Option<Used>,
) -> Result<MethodResult, MeasureError> {
    if method == "spare" {
        guests.send_lines(host, &[format!("echo {SPARE} > /sys/module/ontime/parameters/deadline_spare")])?;
    }
    host.shell(SETTLED)?;
    progress(format_args!("{method}: measuring"));
    let call = match method {
        "bare" => format!("ping {method} {count} {PAUSE_US}"),
        "same" => register(method, count, 0),
        _ => register(method, count, STEP_US),
    };
    let (took, used) = calls(host, guests, method, count, &call)?;
    let mut result = without_requests(host, method, METHODS.description(method), None);
    result.timed(&took);
    if method == "same" {
        *anyway = Some(used);
    } else {
        let none = || MeasureError::Accounting("no call that changes nothing".to_owned());
        result.metrics.extend(used.a_change(anyway.as_ref().ok_or_else(none)?, count));
    }
    Ok(result)
}

/// The line for a guest that makes `count` calls with `step` us more or less runtime each.
fn register(tag: &str, count: u32, step: u64) -> String {
    format!("register {tag} {count} {step} {PAUSE_US}")
}

/// Makes the guest run `call`, whose output has the mark `tag`. Returns the duration of each of `count` calls, ns, and
/// the CPU time of the host's processes.
fn calls(
    host: &mut Host,
    guests: &Guests,
    tag: &str,
    count: u32,
    call: &str,
) -> Result<(Vec<u64>, Used), MeasureError> {
    let before = Cpu::read(host)?;
    guests.send_lines(host, &[call.to_owned()])?;
    // The output has the duration of a call, ns, in the place of a job's slack.
    let said = guests.wait_line(host, 0, tag)?;
    let after = Cpu::read(host)?;
    let mut words = said.split_whitespace().map(str::parse::<u64>);
    let status = words.next().and_then(Result::ok).unwrap_or(1);
    let took: Vec<u64> = words.map_while(Result::ok).collect();
    if status != 0 || took.len() < usize::try_from(count).unwrap_or(usize::MAX) {
        let said = format!("status {status}, {} calls of {count}", took.len());
        return Err(MeasureError::Program { program: format!("a guest's {call}"), said });
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
             case $name in ontime-pace/*|ontime-read/*) pacers=$((pacers + ran)) ;; \
             *) eval \"$2=\\$(($2 + ran))\" ;; esac; done; }; \
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

#[derive(Debug, Clone, Copy)]
struct Used {
    before: Cpu,
    after: Cpu,
}

impl Used {
    /// Difference of the value at a place in [`Cpu`], s.
    fn ran(&self, place: usize) -> f64 {
        let value = |cpu: &Cpu| cpu.0.get(place).copied().unwrap_or(0.0);
        value(&self.after) - value(&self.before)
    }

    fn seconds(&self) -> f64 {
        self.ran(3)
    }

    /// CPU time per change, without the processes' base load in the same time.
    fn a_change(&self, anyway: &Used, changes: u32) -> [Metric; 4] {
        let beyond = |place| {
            let rate = anyway.ran(place) / anyway.seconds().max(1e-9);
            (self.ran(place) - rate * self.seconds()).max(0.0) * 1e6 / f64::from(changes.max(1))
        };
        let each @ [device, daemon, pacers] = [0, 1, 2].map(beyond);
        [("device-process", device), ("daemon", daemon), ("pacers", pacers), ("host", each.iter().sum())]
            .map(|(key, us)| Metric::number(key, Unit::Us, us))
    }
}

#[derive(Debug, Clone, clap::Args)]
struct Options {
    /// Changes of an application's bandwidth
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(2..=1000))]
    count: u32,
    #[command(flatten)]
    emulated: Emulated,
    #[command(flatten)]
    output: Output,
}

/// Measures the cost of a guest's requests for bandwidth.
fn execute(args: &Options) -> anyhow::Result<ExitCode> {
    let found = args.emulated.without_clients().measure(true, |site, images| measure(args, &site, images))?;
    let notes = vec!["one VM whose budget is in periods of 20 ms, method paced, nothing else on the host".to_owned()];
    Measured { experiment: "registration", seed: 0, found, notes }.report(&args.output)
}

/// RTVirt 4.5: the cost of a request for bandwidth.
#[derive(Debug)]
pub(crate) struct Registration;

impl Experiment for Registration {
    command!(
        "registration",
        "RTVirt 4.5: what it costs host and guest that an application asks for its bandwidth",
        Options,
        execute
    );

    fn cases(&self) -> Vec<(String, Load)> {
        METHODS.under(&[Load::None])
    }

    fn columns(&self) -> &'static [Figure] {
        &[Figure::Count, P50, Figure::P99, Figure::Max]
    }

    fn remarks(&self, figures: &Figures) -> Vec<String> {
        vec![figures.rtvirt.registration()]
    }

    fn timed(&self) -> &'static str {
        "system call in the guest"
    }

    fn meaning(&self) -> &'static str {
        "CPU time of the host's processes a change of a guest's bandwidth, beyond what they use anyway; host: all of \
         them."
    }

    fn goals(&self) -> Vec<GoalSpec> {
        const GOALS: [GoalSpec; 4] = [
            goal("guest", "a change takes a guest at most 10 us beyond the call itself and the bare notification")
                .beyond(P50, idle("change"), &[idle("same"), idle("bare")])
                .at_most(10.0),
            goal("guest-in-all", "the same beyond the bare notification alone, the call itself in it: at most 10 us")
                .beyond(P50, idle("change"), &[idle("bare")])
                .at_most(10.0),
            goal("guest-spare", "with something spare: at most 10 us beyond a call that asks nobody")
                .beyond(P50, idle("spare"), &[idle("same")])
                .at_most(10.0),
            goal(
                "host",
                "a change takes at most 10 us of the host's CPU time beyond the bare notification, with what \
             it does after it has answered",
            )
            .beyond(Own("host"), idle("change"), &[idle("bare")])
            .at_most(10.0),
        ];
        GOALS.to_vec()
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
        let anyway = Used { before: cpu("0 0 0 0"), after: cpu("0 1000000000 0 10") };
        let each = used.a_change(&anyway, 1_000);
        assert_eq!(each.map(|metric| metric.print()), ["500", "1,000", "0.0", "1,500"]);
        assert_eq!(Cpu::parse("1 2 3"), None);
        assert_eq!(Cpu::parse("a b c d"), None);
    }
}
