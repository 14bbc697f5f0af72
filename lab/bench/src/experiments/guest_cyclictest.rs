//! `guest-cyclictest`: cyclictest in a VM beside a busy host, as in the RFC pvsched (lkml, 13 December 2023).
//!
//! In: methods and loads on one emulated host with one VM. Out: a [`MethodResult`] for each, named `METHOD-LOAD`: the
//! latencies of a cyclictest in the VM (FIFO 95, a wake-up each 500 us). Two more run on the host at the same time, and
//! their figures are metrics: `host` is like the guest's, `ordinary` has normal priority, as the host's other work has.
//!
//! The images have no cyclictest. This machine's is copied into host and guest, with its library libnuma, which the
//! guests do not have. The guest's first process is that of `ontime_lab::role::RTA`, which takes orders.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use ontime_cli::usage;
use ontime_figures::number;
use ontime_figures::stats::Tally;
use ontime_lab::images::Images;
use ontime_lab::role::RTA;
use serde::Deserialize;

use super::rta::guests::{DECLARED_US, Guests, bulk_threads};
use super::rta::without_requests;
use super::{Emulated, Experiment, Measured, Methods, Output, chosen, command};
use crate::error::MeasureError;
use crate::goals::Figure::{self, Max, Own};
use crate::goals::{GoalSpec, goal, idle};
use crate::host::{Host, Site};
use crate::paper::Figures;
use crate::progress::progress;
use crate::schema::{Load, MethodResult, Metric, Unit};
use crate::trial::{self, CaseResults};

/// The methods, in the order of the report.
const METHODS: Methods = Methods(&[
    ("stock", "Linux as it is, nothing applied"),
    ("static-rt", "the VM's vCPU at FIFO, everything else as it is"),
    ("threaded", "threaded interrupts (Access'18, Table 2), NAPI not threaded"),
    ("partitioned", "every NAPI threaded, one priority table for the whole path"),
]);
/// The loads of the host: threads of normal priority that never sleep, or none.
const LOADS: Methods = Methods(&[("busy", "four host threads of normal priority never sleep"), ("none", "no load")]);
/// The program, if no other is named.
pub(super) const PROGRAM: &str = "/usr/bin/cyclictest";
/// Time between wake-ups, us.
const INTERVAL_US: u32 = 500;
/// Latencies from this one on are not in cyclictest's histogram, us.
const HISTOGRAM_US: u32 = 50_000;
/// cyclictest's options for an RT priority: above all of Linux's threads, as `ontime verify` has it.
const RT: &str = "--priority=95";
/// The cyclictests on the host: name, priority, and what its shell does before. The RT one is in the cgroup that the
/// daemon's configuration names as trusted, so that the kernel's protections against RT threads are those of a host
/// without it.
const ON_HOST: [(&str, &str, &str); 2] = [
    ("host", RT, "mkdir -p /sys/fs/cgroup/trusted && echo $$ > /sys/fs/cgroup/trusted/cgroup.procs && "),
    ("ordinary", "--policy=other", ""),
];
/// Keys of their maxima.
const HOST_MAX: &str = "host-max";
const ORDINARY_MAX: &str = "ordinary-max";
/// The host waits for the end of a run in steps of so many seconds.
const STEP_S: u32 = 2;

/// Name of a case in results.
fn name(method: &str, load: &str) -> String {
    format!("{method}-{load}")
}

/// Writes cyclictest into a host's files, and into the archive of its guests' role with the library that they lack.
pub(super) fn bring(cyclictest: &Path, files: &Path) -> Result<(), MeasureError> {
    let read = |path: &Path| fs::read(path).map_err(|source| MeasureError::File { path: path.to_owned(), source });
    let program = read(cyclictest)?;
    let ldd = Command::new("ldd").arg(cyclictest).output();
    let ldd = ldd.map_err(|source| MeasureError::File { path: "ldd".into(), source })?;
    let library = libnuma(&String::from_utf8_lossy(&ldd.stdout)).as_deref().map(read).transpose()?;
    let mut guest = vec![("role-cyclictest", program.as_slice())];
    guest.extend(library.as_deref().map(|bytes| ("role-libnuma.so.1", bytes)));
    RTA.bring_with(files, &guest)?;
    let path = files.join("cyclictest");
    fs::write(&path, &program).map_err(|source| MeasureError::File { path, source })
}

/// The path of libnuma in the output of ldd; `None` if the program does not need it.
fn libnuma(ldd: &str) -> Option<PathBuf> {
    let line = ldd.lines().find(|line| line.trim_start().starts_with("libnuma.so.1 => /"))?;
    line.split_whitespace().nth(2).map(PathBuf::from)
}

/// cyclictest's arguments.
fn arguments(seconds: u32, priority: &str, json: &str) -> String {
    format!(
        "--mlockall --default-system --quiet --threads=1 --interval={INTERVAL_US} --distance=0 \
         --histogram={HISTOGRAM_US} --duration={seconds} {priority} --json={json}"
    )
}

/// The order to a guest. Its answer is a line with cyclictest's status, and its JSON or its error.
fn order(tag: &str, seconds: u32) -> String {
    let arguments = arguments(seconds, RT, "/tmp/cyclictest.json");
    format!(
        "{{ mkdir -p /dev/shm; LD_PRELOAD=/dev/role-libnuma.so.1 /dev/role-cyclictest {arguments} > /dev/null \
         2> /tmp/said; status=$?; file=/tmp/cyclictest.json; [ $status = 0 ] || file=/tmp/said; \
         echo \"RTA {tag} $status $(tr -s \"\\n \" \" \" < $file) end\"; }} &"
    )
}

/// cyclictest's JSON (rt-tests), as far as it is read here.
#[derive(Debug, Deserialize)]
struct Document {
    thread: BTreeMap<String, Thread>,
}

#[derive(Debug, Deserialize)]
struct Thread {
    /// Number of wake-ups by latency, us, below [`HISTOGRAM_US`].
    histogram: BTreeMap<u64, u64>,
    cycles: u64,
    max: u64,
}

/// The latencies of one cyclictest.
#[derive(Debug, PartialEq)]
pub(super) struct Latencies {
    /// `guest`, or a name of [`ON_HOST`].
    place: &'static str,
    /// All of them, ns. One that is not in the histogram counts with the maximum.
    tally: Tally,
    /// Number of wake-ups that are not in the histogram.
    beyond: u64,
}

impl Latencies {
    /// Parses the JSON of a cyclictest with one thread that ran for so many seconds.
    fn parse(place: &'static str, json: &str, seconds: u32) -> Result<Self, String> {
        let document: Document =
            serde_json::from_str(json).map_err(|error| format!("no result in its JSON: {error}"))?;
        let Some(Thread { histogram, cycles, max }) = document.thread.into_values().next() else {
            return Err("its JSON has no thread".to_owned());
        };
        let counted = histogram.values().fold(0, |sum: u64, times| sum.saturating_add(*times));
        // A late end allows a few more.
        let most = 2 * u64::from(seconds) * 1_000_000 / u64::from(INTERVAL_US);
        if cycles == 0 || cycles.max(counted) > most {
            return Err(format!("{cycles} wake-ups, {counted} in its histogram: not a run of {seconds} s"));
        }
        let beyond = cycles.saturating_sub(counted);
        let mut tally = Tally::default();
        for (us, times) in histogram.into_iter().chain([(max, beyond)]) {
            for _ in 0..times {
                tally.take(us.saturating_mul(1_000));
            }
        }
        Ok(Self { place, tally, beyond })
    }

    /// As [`Self::parse`]; an error names the place.
    fn read(place: &'static str, json: &str, seconds: u32) -> Result<Self, MeasureError> {
        Self::parse(place, json, seconds)
            .map_err(|said| MeasureError::Program { program: format!("cyclictest ({place})"), said })
    }

    /// Their figures as metrics.
    pub(super) fn metrics(&self) -> Vec<Metric> {
        let Some(summary) = self.tally.summary() else { return Vec::new() };
        let key = |of: &str| format!("{}-{of}", self.place);
        vec![
            Metric::count(&key("wake-ups"), summary.count),
            Metric::number(&key("p99"), Unit::Us, summary.p99 as f64 / 1e3),
            Metric::number(&key("max"), Unit::Us, summary.max as f64 / 1e3),
        ]
    }

    /// A note for the reader if the percentiles are not exact.
    pub(super) fn note(&self) -> Option<String> {
        (self.beyond > 0).then(|| {
            format!(
                "{}: {} latencies of {} us or more count with the maximum",
                self.place,
                number::count(self.beyond),
                number::count(u64::from(HISTOGRAM_US))
            )
        })
    }
}

/// Boots the host and its VM and measures every method under every load. If a case fails, the remaining cases are
/// measured while the host lives.
fn measure(args: &Options, site: &Site, images: &Images) -> Result<CaseResults, MeasureError> {
    bring(&args.cyclictest, &site.dir.join("files"))?;
    let mut host = Host::start(site, images, &[], &[])?;
    host.shell("install -m 755 /lab/cyclictest /usr/local/bin/cyclictest")?;
    let guests = Guests::boot(&mut host, 1, DECLARED_US)?;
    // The daemon reads the VM's rule before a request that comes a second later.
    host.shell("kill -HUP $(pgrep -x -f 'ontime daemon'); sleep 1")?;
    let cases =
        LOADS.in_order(&args.loads).flat_map(|load| METHODS.in_order(&args.methods).map(move |method| (method, load)));
    trial::each(
        host,
        cases,
        |(method, load)| name(method, load),
        |host, &(method, load)| {
            progress(format_args!("{}: applying", name(method, load)));
            match method {
                "stock" => host.reset()?,
                "static-rt" => host.apply("vanilla")?,
                other => host.apply(other)?,
            }
            measure_case(host, &guests, args.seconds, method, load)
        },
    )
}

fn measure_case(
    host: &mut Host,
    guests: &Guests,
    seconds: u32,
    method: &str,
    load: &str,
) -> Result<MethodResult, MeasureError> {
    let case = name(method, load);
    bulk_threads(host, load == "busy")?;
    let before = host.cpu_time()?;
    let ran = run(host, guests, seconds, &case);
    let after = host.cpu_time()?;
    bulk_threads(host, false)?;
    let (guest, on_host) = ran?;
    let label = format!("{}; {}", METHODS.description(method), LOADS.description(load));
    let mut result = without_requests(host, &case, &label, after.share_since(&before, host.cpus));
    result.counted(&guest.tally, None);
    result.notes.extend(guest.note());
    for latencies in &on_host {
        result.metrics.extend(latencies.metrics());
        result.notes.extend(latencies.note());
    }
    Ok(result)
}

/// Runs cyclictest in the guest and on the host. Returns the guest's latencies, and those of [`ON_HOST`].
fn run(
    host: &mut Host,
    guests: &Guests,
    seconds: u32,
    case: &str,
) -> Result<(Latencies, Vec<Latencies>), MeasureError> {
    for (place, priority, before) in ON_HOST {
        let arguments = arguments(seconds, priority, &format!("/run/{place}.json"));
        host.shell(&format!(
            "rm -f /run/{place}.status; {{ setsid sh -c '{before}cyclictest {arguments}; echo $? > \
             /run/{place}.status' > /dev/null 2> /run/{place}.said < /dev/null & }}"
        ))?;
    }
    let guest = in_guest(host, guests, seconds, case)?;
    let mut on_host = Vec::new();
    for (place, ..) in ON_HOST {
        let json = host.shell(&format!(
            "for try in $(seq 20); do [ ! -s /run/{place}.status ] || break; sleep 0.5; done; \
             [ \"$(cat /run/{place}.status)\" = 0 ] || {{ cat /run/{place}.said >&2; exit 1; }}; cat /run/{place}.json"
        ))?;
        on_host.push(Latencies::read(place, &json, seconds)?);
    }
    Ok((guest, on_host))
}

/// Runs cyclictest in the guest. `tag` must differ between the runs of a guest.
pub(super) fn in_guest(host: &mut Host, guests: &Guests, seconds: u32, tag: &str) -> Result<Latencies, MeasureError> {
    guests.send_lines(host, &[order(tag, seconds)])?;
    // Nothing else of the laboratory runs on the host meanwhile.
    for _ in 0..seconds.div_ceil(STEP_S) {
        host.shell(&format!("sleep {STEP_S}"))?;
    }
    let text = guests.wait_line(host, 0, tag)?;
    match text.trim().split_once(' ') {
        Some(("0", json)) => Latencies::read("guest", json, seconds),
        _ => Err(MeasureError::Program { program: "cyclictest (guest)".to_owned(), said: text }),
    }
}

#[derive(Debug, Clone, clap::Args)]
struct Options {
    /// Methods: stock (nothing applied), static-rt (the vCPU at FIFO), threaded, partitioned; default: all
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',')]
    methods: Vec<String>,
    /// Loads of the host: busy (four threads that never sleep), none; default: both
    #[arg(long = "load", value_name = "LOAD", value_delimiter = ',')]
    loads: Vec<String>,
    /// Seconds of the host's time a case: 2,000 wake-ups each
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: u32,
    /// The program cyclictest (Debian: rt-tests), which is copied into host and guest
    #[arg(long, value_name = "FILE", default_value = PROGRAM)]
    cyclictest: PathBuf,
    #[command(flatten)]
    emulated: Emulated,
    #[command(flatten)]
    output: Output,
}

/// Refuses a program that is not there.
pub(super) fn check(cyclictest: &Path) -> anyhow::Result<()> {
    if !cyclictest.is_file() {
        usage!(
            "this machine's cyclictest is copied into host and guest, and {} is no file: install it (Debian: apt-get \
             install rt-tests), or name it with --cyclictest",
            cyclictest.display()
        );
    }
    Ok(())
}

/// Measures every method under every load on one emulated host.
fn execute(args: &Options) -> anyhow::Result<ExitCode> {
    let methods = METHODS.chosen(&args.methods)?;
    let loads = chosen("load", &args.loads, &LOADS.names())?;
    check(&args.cyclictest)?;
    let args = &Options { methods, loads, ..args.clone() };
    let found = args.emulated.without_clients().measure(false, |site, images| measure(args, &site, images))?;
    Measured { experiment: "guest-cyclictest", seed: 0, found, notes: Vec::new() }.report(&args.output)
}

/// The busy test of the RFC pvsched.
#[derive(Debug)]
pub(super) struct GuestCyclictest;

impl Experiment for GuestCyclictest {
    command!(
        "guest-cyclictest",
        "The busy test of the RFC pvsched (lkml, 13 December 2023): cyclictest in a VM and on the host, beside host \
         threads that never sleep",
        Options,
        execute
    );

    fn cases(&self) -> Vec<(String, Load)> {
        let of = LOADS.iter().flat_map(|load| METHODS.iter().map(move |method| name(method, load)));
        of.map(|case| (case, Load::None)).collect()
    }

    fn columns(&self) -> &'static [Figure] {
        &[Figure::Count, Figure::P50, Figure::P99, Figure::P99_9, Max]
    }

    fn remarks(&self, figures: &Figures) -> Vec<String> {
        vec![figures.pvsched.note()]
    }

    fn timed(&self) -> &'static str {
        "from a timer's expiry until its thread runs, by the guest's clock"
    }

    fn meaning(&self) -> &'static str {
        "Latencies of a cyclictest in the guest, and at the same time of two on the host: host has the guest's \
         priority (FIFO 95), ordinary has normal priority."
    }

    fn goals(&self) -> Vec<GoalSpec> {
        vec![
            goal("guest", "partitioned, busy host: maximum in the guest at most 200 us (the RFC's static RT: 1,728)")
                .only(Max, idle("partitioned-busy"))
                .at_most(200.0),
            goal("host", "partitioned, busy host: the host's maximum at most 1.1 times that without Ontime")
                .of(Own(HOST_MAX), idle("partitioned-busy"), idle("stock-busy"))
                .at_most(1.1),
            goal("ordinary", "the same of a cyclictest of normal priority on the host")
                .of(Own(ORDINARY_MAX), idle("partitioned-busy"), idle("stock-busy"))
                .at_most(1.1),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::options_of;

    const JSON: &str = r#"{ "file_version": 1, "rt_test_version": "2.80", "num_threads": 1, "resolution_in_ns": 0,
        "thread": { "0": { "histogram": { "3": 812, "41": 186 }, "cycles": 1000, "min": 3, "max": 61234, "avg": 4.61,
        "cpu": 0, "node": 0 } } }"#;

    #[test]
    fn latencies_beyond_the_histogram_count_with_the_maximum() {
        let latencies = Latencies::parse("host", JSON, 1).unwrap();
        let values: Vec<(u64, u64)> = latencies.tally.values().collect();
        assert_eq!(values, [(3_000, 812), (41_000, 186), (61_234_000, 2)]);
        let expected = [
            Metric::count("host-wake-ups", 1_000),
            Metric::number("host-p99", Unit::Us, 41.0),
            Metric::number(HOST_MAX, Unit::Us, 61_234.0),
        ];
        assert_eq!(latencies.metrics(), expected);
        assert_eq!(latencies.note().unwrap(), "host: 2 latencies of 50,000 us or more count with the maximum");
        let whole = JSON.replace("61234", "41").replace("1000", "998");
        let whole = Latencies::parse(ON_HOST[1].0, &whole, 1).unwrap();
        assert_eq!((whole.note(), whole.metrics()[2].key.as_str()), (None, ORDINARY_MAX));
    }

    #[test]
    fn what_is_no_result_of_the_run_is_refused() {
        for (json, said) in [
            (JSON.replace("1000", "0"), "0 wake-ups"),
            (JSON.replace("1000", "4001"), "not a run of 1 s"),
            (JSON.replace("812", "18446744073709551615"), "in its histogram"),
            (JSON.replace("\"0\":", "\"zero\":").replace("histogram", "other"), "no result in its JSON"),
            (r#"{ "thread": {} }"#.to_owned(), "no thread"),
            ("cyclictest: not found".to_owned(), "no result in its JSON"),
        ] {
            let error = Latencies::parse("guest", &json, 1).unwrap_err();
            assert!(error.contains(said), "{json}: {error}");
        }
    }

    #[test]
    fn the_library_is_found_where_the_program_needs_it() {
        let ldd = "\tlinux-vdso.so.1 (0x00007f)\n\tlibnuma.so.1 => /usr/lib64/libnuma.so.1 (0x00007f8a)\n\tlibc.so.6 \
                   => /usr/lib64/libc.so.6 (0x00007f)\n";
        assert_eq!(libnuma(ldd).unwrap(), Path::new("/usr/lib64/libnuma.so.1"));
        assert_eq!(libnuma("\tlibnuma.so.1 => not found\n"), None);
        assert_eq!(libnuma("\tnot a dynamic executable\n"), None);
    }

    /// `lab-vm tell` gets the order in single quotes, and the guest answers in one line that `Guests::wait_line` reads.
    #[test]
    fn a_guest_answers_an_order_in_one_line() {
        let order = order("stock-busy", 3);
        assert!(!order.contains('\'') && !order.contains('\n') && order.contains("--interval=500 "), "{order}");
        let dir = tempfile::tempdir().unwrap();
        let answer = |status: u8, json: &str, said: &str| {
            let own = |path: &str| dir.path().join(path).to_string_lossy().into_owned();
            fs::write(own("cyclictest.json"), json).unwrap();
            fs::write(own("program"), format!("#!/bin/sh\necho {said} >&2\nexit {status}\n")).unwrap();
            let order = order
                .replace("/tmp", &dir.path().to_string_lossy())
                .replace("mkdir -p /dev/shm; ", "")
                .replace("LD_PRELOAD=/dev/role-libnuma.so.1 /dev/role-cyclictest", &format!("sh {}", own("program")));
            let output = Command::new("sh").args(["-c", &format!("{order} wait")]).output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        let line = answer(0, JSON, "noise");
        let json = line.strip_prefix("RTA stock-busy 0 ").and_then(|line| line.strip_suffix(" end\n")).unwrap();
        assert_eq!(Latencies::parse("guest", json, 1), Latencies::parse("guest", JSON, 1));
        assert_eq!(answer(127, "", "no such library"), "RTA stock-busy 127 no such library  end\n");
    }

    #[test]
    fn a_missing_cyclictest_and_other_methods_are_told_before_anything_is_measured() {
        for (words, said) in [
            (vec!["--cyclictest", "/nonexistent/cyclictest"], "apt-get install rt-tests"),
            (vec!["--method", "vanilla"], "not one of stock, static-rt"),
            (vec!["--load", "tcp"], "not one of busy, none"),
        ] {
            let error = execute(&options_of::<Options>(&words).unwrap()).unwrap_err().to_string();
            assert!(error.contains(said), "{words:?}: {error}");
        }
    }
}
