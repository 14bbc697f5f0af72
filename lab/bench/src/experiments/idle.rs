//! `idle`: the CPU time that Ontime itself takes on a host where nothing happens. No paper has this experiment.
//!
//! In: methods on one emulated host with one RT VM, which only waits for requests. Out: a [`MethodResult`] per method:
//! shares of one CPU that the daemon's pacers, its cap watcher, and its other threads with the guardian took.

use std::process::ExitCode;

use ontime_lab::images::Images;

use super::rta::guests::wait_for_reservations;
use super::rta::without_requests;
use super::{Emulated, Experiment, Measured, Methods, Output, command};
use crate::error::MeasureError;
use crate::goals::Figure;
use crate::host::{Host, RT_VM, Site};
use crate::progress::progress;
use crate::schema::{Load, MethodResult, Metric, Unit};
use crate::server;
use crate::trial::{self, CaseResults};

/// The methods: the daemon alone, the default method, and the default method with a reservation for the RT VM.
const METHODS: Methods = Methods(&[
    ("reset", "the daemon runs, nothing is applied"),
    ("partitioned", "the default method, no CPU time reserved"),
    ("paced", "the default method, a tenth of a CPU reserved for the RT VM"),
]);

/// A shell command that prints the input of [`OwnTime::parse`].
const READ: &str = "for pid in $(pgrep -x -f 'ontime daemon') $(pgrep -f '^[^ ]* guardian --priority'); do \
                    for task in /proc/$pid/task/*; do \
                    read -r name < $task/comm && read -r ran rest < $task/schedstat && echo $ran $name; done; done; \
                    read -r up idle < /proc/uptime; echo $up uptime";

/// The CPU time of Ontime's own threads so far, by what they do, ns, and the host's uptime, s.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct OwnTime {
    pacers: f64,
    watcher: f64,
    rest: f64,
    uptime: f64,
}

impl OwnTime {
    /// Parses a line for each thread: nanoseconds and name; and one with the uptime.
    fn parse(text: &str) -> Option<Self> {
        let mut own = Self::default();
        for line in text.lines() {
            let (number, name) = line.split_once(' ')?;
            let number: f64 = number.parse().ok()?;
            match name {
                "uptime" => own.uptime = number,
                "ontime-cap" => own.watcher += number,
                _ if name.starts_with("ontime-pace/") || name.starts_with("ontime-read/") => own.pacers += number,
                _ => own.rest += number,
            }
        }
        (own.uptime > 0.0).then_some(own)
    }

    fn read(host: &mut Host) -> Result<Self, MeasureError> {
        let text = host.ask(READ)?;
        Self::parse(&text).ok_or(MeasureError::Accounting(text))
    }

    /// Shares of one CPU since an earlier reading.
    fn shares_since(&self, before: &Self) -> [Metric; 3] {
        let elapsed_ns = (self.uptime - before.uptime).max(1e-9) * 1e9;
        let share = |key, now: f64, then: f64| Metric::number(key, Unit::Share, (now - then).max(0.0) / elapsed_ns);
        [
            share("pacers", self.pacers, before.pacers),
            share("watcher", self.watcher, before.watcher),
            share("rest", self.rest, before.rest),
        ]
    }
}

/// Boots the host and its VM and measures every method. If a method fails, the remaining methods are measured while the
/// host lives.
fn measure(args: &Options, site: &Site, images: &Images) -> Result<CaseResults, MeasureError> {
    let host = Host::start(site, images, &[RT_VM], &server::CONFIG)?;
    trial::each(
        host,
        &args.methods,
        |method| (*method).clone(),
        |host, method| {
            progress(format_args!("{method}: applying"));
            apply(host, method)?;
            host.settle()?;
            measure_case(host, args.seconds, method)
        },
    )
}

fn apply(host: &mut Host, method: &str) -> Result<(), MeasureError> {
    let file = if method == "paced" {
        let reservation = "[[reservation]]\nname = \"rt\"\nbudget = \"1ms\"\nperiod = \"10ms\"\n";
        let text = format!("backend = \"paced\"\ncpus = \"0-{}\"\n{reservation}", host.cpus - 1);
        format!("printf '%s' '{text}' > /etc/ontime/sched.toml")
    } else {
        "rm -f /etc/ontime/sched.toml".to_owned()
    };
    // The daemon handles the signal before a request that comes a second later.
    host.shell(&format!("{file}; kill -HUP $(pgrep -x -f 'ontime daemon'); sleep 1"))?;
    match method {
        "reset" => host.reset(),
        "paced" => {
            host.apply("partitioned")?;
            wait_for_reservations(host, 1)
        }
        other => host.apply(other),
    }
}

fn measure_case(host: &mut Host, seconds: u32, method: &str) -> Result<MethodResult, MeasureError> {
    let (before, own_before) = (host.cpu_time()?, OwnTime::read(host)?);
    host.shell(&format!("sleep {seconds}"))?;
    let (own_after, after) = (OwnTime::read(host)?, host.cpu_time()?);
    let mut result = without_requests(host, method, METHODS.description(method), after.share_since(&before, host.cpus));
    result.metrics.extend(own_after.shares_since(&own_before));
    Ok(result)
}

#[derive(Debug, Clone, clap::Args)]
struct Options {
    /// Methods: reset (nothing applied), partitioned, paced (with a reservation); default: all
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',')]
    methods: Vec<String>,
    /// Seconds of the host's time a method
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: u32,
    #[command(flatten)]
    emulated: Emulated,
    #[command(flatten)]
    output: Output,
}

/// Measures every method on one emulated host.
fn execute(args: &Options) -> anyhow::Result<ExitCode> {
    let args = &Options { methods: METHODS.chosen(&args.methods)?, ..args.clone() };
    let found = args.emulated.without_clients().measure(false, |site, images| measure(args, &site, images))?;
    Measured { experiment: "idle", seed: 1, found, notes: Vec::new() }.report(&args.output)
}

/// What an idle host pays.
#[derive(Debug)]
pub(super) struct Idle;

impl Experiment for Idle {
    command!(
        "idle",
        "The CPU time that the daemon and its pacers take on a host where nothing happens",
        Options,
        execute
    );

    fn cases(&self) -> Vec<(String, Load)> {
        METHODS.under(&[Load::None])
    }

    fn columns(&self) -> &'static [Figure] {
        &[Figure::Cpu]
    }

    fn has_response_times(&self) -> bool {
        false
    }

    fn meaning(&self) -> &'static str {
        "Shares of one CPU: of the pacers, of the cap watcher, and of the daemon's other threads with the guardian."
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_told_by_their_names() {
        let text = "3000 ontime\n500 ontime-cap\n200 ontime-pace/0\n100 ontime-read/0\n40 exe\n12.5 uptime\n";
        let before = OwnTime::parse(text).unwrap();
        assert_eq!(before, OwnTime { pacers: 300.0, watcher: 500.0, rest: 3040.0, uptime: 12.5 });
        let after = OwnTime { pacers: before.pacers + 5e6, uptime: before.uptime + 0.5, ..before };
        let shares = after.shares_since(&before);
        assert_eq!(shares[0], Metric::number("pacers", Unit::Share, 0.01));
        assert_eq!(shares[1], Metric::number("watcher", Unit::Share, 0.0));
        assert_eq!(OwnTime::parse("3000 ontime\n"), None, "no uptime");
        assert_eq!(OwnTime::parse("pgrep: not found\n"), None);
    }
}
