//! `memcached-slo`: a memcached in an RT VM with a small reservation, alone, beside VMs that never idle, and beside VMs
//! with deadlines (RTVirt, section 4.4, Table 4, Figures 5a and 5b), on one CPU.
//!
//! In: methods and neighbours on one emulated host. Out: a [`MethodResult`] per pair, named `METHOD-NEIGHBOURS`:
//! response times of GETs on the wire, with an objective of 500 us ([`memcached::RTVIRT`]), and beside video VMs their
//! deadlines. The reservation is declared for the VM (`sched.toml`), as in the paper: the paper's budget and period, no
//! slack.

use std::process::ExitCode;
use std::time::Duration;

use ontime_lab::images::Images;

use super::rta::guests::{DECLARED_US, Guests, Order, Releases, Reservations};
use super::rta::{self, Rta, WORK_PERCENT, group};
use super::{Emulated, Experiment, Measured, Methods, Output, command};
use crate::error::MeasureError;
use crate::goals::Figure::{self, P99_9};
use crate::goals::{GoalSpec, goal, idle};
use crate::host::{Host, RT_VM, Site, Vm, boot_vm};
use crate::memcached;
use crate::paper::{Figures, Rtvirt};
use crate::progress::progress;
use crate::schema::{Load, MethodResult, Metric, Unit};
use crate::server;
use crate::trial::{self, CaseResults, Requests, Trial};
use crate::workload::Workload;

/// The methods, in the order of measurement. `credit`, Linux's defaults, is first because the guest module cannot be
/// unloaded.
const METHODS: Methods = Methods(&[
    ("credit", "Linux as it is: fair shares, nothing applied"),
    ("deadline", "reserved, kept by SCHED_DEADLINE on the host"),
    ("paced", "reserved, kept by pacers"),
]);
/// Divisor of the paper's video slices: ten VMs and five memcached had 7.44 of 15 CPUs there, four and one have half a
/// CPU here.
const VIDEO_SCALE: u64 = 7;
/// Number of VMs that never idle, per CPU as many as the paper's 19 on two.
const NEIGHBOURS: u8 = 9;
/// Requests at the start of each case that do not count.
const WARM_UP: u64 = 20;

/// The neighbours of the memcached VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Neighbours {
    /// None (Table 4).
    Nobody,
    /// VMs that never idle (Figure 5a).
    Cpu,
    /// VMs that stream video (Figure 5b): periodic applications of Table 3.
    Video,
}

/// All of them.
const BESIDE: [Neighbours; 3] = [Neighbours::Nobody, Neighbours::Cpu, Neighbours::Video];

impl Neighbours {
    /// The name on the command line.
    fn name(self) -> &'static str {
        match self {
            Neighbours::Nobody => "alone",
            Neighbours::Cpu => "cpu",
            Neighbours::Video => "video",
        }
    }

    fn words(self, neighbours: u8) -> String {
        match self {
            Neighbours::Nobody => "the CPU for itself".to_owned(),
            Neighbours::Cpu => format!("beside {neighbours} VMs that never idle"),
            Neighbours::Video => "beside 4 video VMs".to_owned(),
        }
    }

    /// The paper's p99.9, us, for the method that corresponds to ours.
    fn paper(self, method: &str, figures: &Rtvirt) -> Option<f64> {
        let tails = &figures.table4_us;
        let of = |credit, rtxen, rtvirt| match method {
            "credit" => Some(credit),
            "deadline" => Some(rtxen),
            "paced" => Some(rtvirt),
            _ => None,
        };
        match self {
            Neighbours::Nobody => of(tails.credit.p99_9, tails.rtxen.p99_9, tails.rtvirt.p99_9),
            Neighbours::Cpu => {
                let tails = figures.memcached.fig5a_p99_9_us;
                of(tails.credit, tails.rtxen_a, tails.rtvirt)
            }
            Neighbours::Video => {
                let tails = figures.memcached.fig5b_p99_9_us;
                of(tails.credit, tails.rtxen_a, tails.rtvirt)
            }
        }
    }
}

impl std::str::FromStr for Neighbours {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let found = BESIDE.into_iter().find(|beside| beside.name() == text);
        found.ok_or_else(|| format!("neighbours '{text}' are not one of alone, cpu, video"))
    }
}

/// Name of a case in results.
fn name(method: &str, beside: Neighbours) -> String {
    format!("{method}-{}", beside.name())
}

/// Boots the host and its VMs and measures every method with all neighbours. If a case fails, the remaining cases are
/// measured while the host lives.
fn measure(args: &Options, figures: &Figures, site: &Site, images: &Images) -> Result<CaseResults, MeasureError> {
    let has = |beside| args.beside.contains(&beside);
    let video = group::video(figures, VIDEO_SCALE);
    Guests::bring(site, images)?;
    let mut host = Host::start(site, images, &[], &server::CONFIG)?;
    let mut setting = Setting {
        hogs: if has(Neighbours::Cpu) {
            (1..=args.neighbours).map(|number| format!("hog{number}")).collect()
        } else {
            Vec::new()
        },
        guests: Guests::boot(&mut host, if has(Neighbours::Video) { video.len() } else { 0 }, DECLARED_US)?,
        method: None,
    };
    boot_vm(host.lab()?, &Vm { role: server::MEMCACHED.role, ..RT_VM })?;
    for (number, hog) in (10..).zip(&setting.hogs) {
        let address = format!("10.2.0.{number}");
        boot_vm(host.lab()?, &Vm { name: hog, role: "spin", net: "bulk", address: &address })?;
        signal(&mut host, std::slice::from_ref(hog), "STOP")?;
    }
    let ordered = METHODS.in_order(&args.methods);
    let cases = ordered.flat_map(|method| args.beside.iter().map(move |beside| (method, *beside)));
    trial::each(
        host,
        cases,
        |(method, beside)| name(method, *beside),
        |host, &(method, beside)| {
            progress(format_args!("{}: applying", name(method, beside)));
            setting.apply(host, method, figures)?;
            let mut result = setting.measure_case(host, args, (method, beside), &video)?;
            let paper = beside.paper(method, &figures.rtvirt);
            result.metrics.extend(paper.map(|us| Metric::number("paper-p99.9", Unit::Us, us)));
            Ok(result)
        },
    )
}

/// The neighbouring VMs, and the method in force.
#[derive(Debug)]
struct Setting {
    hogs: Vec<String>,
    guests: Guests,
    method: Option<&'static str>,
}

fn signal(host: &mut Host, vms: &[String], signal: &str) -> Result<(), MeasureError> {
    let all: String = vms.iter().map(|vm| format!("kill -{signal} $(cat /run/lab-vm/{vm}.pid); ")).collect();
    host.shell(&format!("{all}:")).map(|_| ())
}

impl Setting {
    fn apply(&mut self, host: &mut Host, method: &'static str, figures: &Figures) -> Result<(), MeasureError> {
        if self.method == Some(method) {
            return Ok(());
        }
        self.method = None;
        if method == "credit" {
            host.reset()?;
        } else {
            let [budget, period] = figures.rtvirt.memcached.reservation_us.rtvirt;
            let own = format!("[[reservation]]\nname = \"rt\"\nbudget = \"{budget}us\"\nperiod = \"{period}us\"\n");
            rta::apply(host, &mut self.guests, method, &own)?;
        }
        self.method = Some(method);
        Ok(())
    }

    fn measure_case(
        &self,
        host: &mut Host,
        args: &Options,
        (method, beside): (&str, Neighbours),
        video: &[Rta],
    ) -> Result<MethodResult, MeasureError> {
        let case = name(method, beside);
        let trial = Trial {
            method: &case,
            label: &format!("{}; {}", METHODS.words(method), beside.words(args.neighbours)),
            load: Load::None,
            requests: Requests::Client {
                workload: Workload::Memcached { traffic: memcached::RTVIRT, connections: 1 },
                count: args.requests + WARM_UP,
                seed: args.seed,
            },
            warmup: WARM_UP,
        };
        let held =
            if beside == Neighbours::Video { Some(self.stream(host, args, &case, method, video)?) } else { None };
        if beside == Neighbours::Cpu {
            signal(host, &self.hogs, "CONT")?;
        }
        let before = host.cpu_time()?;
        let measured = trial.run(host);
        let after = host.cpu_time()?;
        if beside == Neighbours::Cpu {
            signal(host, &self.hogs, "STOP")?;
        }
        let mut result = measured?;
        result.notes.extend(rta::pacers(&before, &after, rta::WHOLE));
        if let Some(held) = held {
            let logs = video.iter().enumerate().map(|(vm, rta)| self.guests.log(host, vm, &case, *rta));
            let logs = logs.collect::<Result<Vec<_>, _>>()?;
            let (rtas, notes) = rta::deadlines(video, &logs, held, self.guests.declared_cpus() * video.len() as f64);
            result.metrics.extend(rtas);
            result.notes.extend(notes);
        }
        Ok(result)
    }

    /// Makes the video VMs stream as long as requests are sent. Returns the bandwidth reserved for them.
    fn stream(
        &self,
        host: &mut Host,
        args: &Options,
        case: &str,
        method: &str,
        video: &[Rta],
    ) -> Result<Option<f64>, MeasureError> {
        let delay_us = rta::delay_us(method);
        // A request every 10 ms, with time for slow ones and for the client's start.
        let seconds = (args.requests + WARM_UP) / 90 + 6;
        let order = |rta: &Rta| {
            let releases = Releases::Periodic(seconds * 1_000_000 / rta.period_us);
            Order { tag: case.to_owned(), rta: *rta, releases, delay_us, work_percent: WORK_PERCENT }.line()
        };
        self.guests.send_lines(host, &video.iter().map(order).collect::<Vec<_>>())?;
        let held = if method == "credit" {
            None
        } else {
            let held = Reservations::wait(host, video.len(), delay_us / 400_000)?;
            Some(held.beyond_declared(&self.guests))
        };
        host.shell(&format!("sleep {}", Duration::from_micros(delay_us).as_secs()))?;
        Ok(held)
    }
}

#[derive(Debug, Clone, clap::Args)]
struct Options {
    /// Methods: credit (Linux as it is), deadline (SCHED_DEADLINE on the host), paced; default: all
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',')]
    methods: Vec<String>,
    /// The VMs beside memcached: alone (none), cpu (VMs that never idle), video (VMs with deadlines)
    #[arg(long = "beside", value_name = "WHO", value_delimiter = ',', default_value = "alone,cpu,video")]
    beside: Vec<Neighbours>,
    /// Number of VMs that never idle (the paper has 19 on two CPUs)
    #[arg(long, default_value_t = NEIGHBOURS, value_parser = clap::value_parser!(u8).range(1..=32))]
    neighbours: u8,
    /// Counted requests a case: 100 are a second of the host's time
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    requests: u64,
    /// Seed of the gaps between requests
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    emulated: Emulated,
    #[command(flatten)]
    output: Output,
}

/// Measures every method with all neighbours on one emulated host.
fn execute(args: &Options) -> anyhow::Result<ExitCode> {
    let figures = Figures::load()?;
    let methods = METHODS.chosen(&args.methods)?;
    let args = &Options { methods, ..args.clone() };
    let found = args.emulated.measure(true, |site, images| {
        // Memory for the VMs that never idle, in addition to the others.
        measure(args, &figures, &site.with_room_for(u32::from(args.neighbours) + 5), images)
    })?;
    let notes = vec![format!(
        "{}: {} VMs that never idle for the paper's 19 on two; four video VMs, one of each frame rate, with the \
         paper's slices divided by {} (half a CPU in all with memcached, as the paper's 7.44 of 15), whose jobs \
         compute for {WORK_PERCENT} % of their slice; gaps are normally distributed, mean 10 ms, standard deviation \
         1.7 ms (the paper does not say which), from an answer to the next request",
        args.emulated.cpus_in_words(),
        args.neighbours,
        VIDEO_SCALE
    )];
    Measured { experiment: "memcached-slo", seed: args.seed, found, notes }.report(&args.output)
}

/// RTVirt 4.4: requests to a VM with a small reservation.
#[derive(Debug)]
pub(super) struct MemcachedSlo;

impl Experiment for MemcachedSlo {
    command!(
        "memcached-slo",
        "RTVirt 4.4 (Table 4, Figs. 5a, 5b): p99.9 of memcached with 58 us in 500 us reserved, beside VMs that never \
         idle, beside video VMs",
        Options,
        execute
    );

    fn cases(&self) -> Vec<(String, Load)> {
        let beside = |method| BESIDE.map(|beside| (name(method, beside), Load::None));
        METHODS.iter().flat_map(beside).collect()
    }

    fn columns(&self) -> &'static [Figure] {
        &[Figure::Count, Figure::Lost, Figure::P50, Figure::P90, Figure::P99, P99_9, Figure::Max]
    }

    fn remarks(&self, figures: &Figures) -> Vec<String> {
        vec![figures.rtvirt.memcached()]
    }

    fn meaning(&self) -> &'static str {
        "Late: answered later than the objective. Beside video VMs, the deadlines of their applications too."
    }

    fn goals(&self) -> Vec<GoalSpec> {
        vec![
            goal("beside-cpu", "paced, beside VMs that never idle: p99.9 at most 114 us (RTVirt 379, RT-Xen A 114)")
                .only(P99_9, idle("paced-cpu"))
                .at_most(114.0),
            goal("beside-video", "paced, beside video VMs: p99.9 at most 296 us (RTVirt 303, RT-Xen B 296)")
                .only(P99_9, idle("paced-video"))
                .at_most(296.0),
            goal("video-misses", "paced: the video VMs miss no deadline (RTVirt: the worst 0.8 %)")
                .missed(idle("paced-video")),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scaled_set_needs_what_the_papers_does_a_cpu() {
        let figures = Figures::load().unwrap();
        let video = group::video(&figures, VIDEO_SCALE);
        let needed: f64 = video.iter().copied().map(Rta::bandwidth).sum();
        let [budget, period] = figures.rtvirt.memcached.reservation_us.rtvirt;
        let own = budget as f64 / period as f64;
        // 7.44 CPUs of 15.
        assert!((0.45..0.55).contains(&(needed + own)), "{needed} {own}");
        assert_eq!(video[0], Rta { slice_us: 19_000 / VIDEO_SCALE, period_us: 41_000 });
    }

    #[test]
    fn each_case_has_the_papers_figure() {
        let figures = Figures::load().unwrap().rtvirt;
        assert_eq!(Neighbours::Cpu.paper("paced", &figures), Some(379.0));
        assert_eq!(Neighbours::Cpu.paper("deadline", &figures), Some(114.0));
        assert_eq!(Neighbours::Video.paper("credit", &figures), Some(1170.0));
        assert_eq!(Neighbours::Nobody.paper("paced", &figures), Some(57.5));
        assert_eq!(Neighbours::Nobody.paper("vanilla", &figures), None);
        for beside in BESIDE {
            assert_eq!(beside.name().parse(), Ok(beside));
        }
        assert!("hogs".parse::<Neighbours>().is_err());
    }
}
