//! `kbp`: KBP (IEICE'22), sections 5 and 6. Round trips and zero-loss throughput of a UDP echo in a VM and in
//! containers, with polling and with interrupts.
//!
//! In: methods, places and frame sizes, on one emulated host. Out: for each combination a [`MethodResult`] named
//! `METHOD-PLACE-FRAME`. It has the round trips of a closed loop while two bulk VMs are flooded with small packets on
//! the other NIC, and the highest rate without loss (RFC 2544, 26.1: a binary search) without that flood. A second
//! result, named `METHOD-PLACE-FRAME-fast`, has the round trips of an open loop at a steady rate, under the flood. With
//! `--hours` a result named `METHOD-PLACE-FRAME-hours` replaces both: the same open loop for that time. On the virtual
//! clock a rate refers to instructions, not to a machine's time.

use std::process::ExitCode;

use ontime_cli::usage;
use ontime_figures::number;
use serde::Deserialize;

use super::{Experiment, HostArgs, Measured, Methods, Output, chosen, command};
use crate::error::MeasureError;
use crate::goals::Figure::{self, Max, Own};
use crate::goals::{GoalSpec, goal, small};
use crate::hardware::HardwareError;
use crate::host::{BULK_VMS, Host, PlannedHost, size};
use crate::hours::{self, Hours};
use crate::paced::Paced;
use crate::progress::progress;
use crate::schema::{Load, MethodResult, Metric, Unit};
use crate::server::{self, Net, PlacedServer, ServerPlace};
use crate::trial::{self, CaseResults, Requests, SETTLED, Trial};
use crate::wire::{self, RtFlow, WireAnalysis};
use crate::workload::{self, Workload};

/// The methods: no settings; the paper's tuned baseline; Ontime without polling; KBP with the kernel's polling; the
/// same, polling only while packets arrive.
const METHODS: Methods = Methods(&[
    ("napi", "NAPI, the kernel's defaults, nothing at real-time priority"),
    ("napi-tuned", "NAPI, vCPU, vhost and the container's threads at real-time priority"),
    ("partitioned", "Ontime without polling: every NAPI threaded, one priority table for the whole path"),
    ("busypoll", "a polling thread for the RT NIC (KBP)"),
    ("busypoll-adaptive", "a polling thread while packets come"),
]);
/// A VM (virtio-net, vhost-net, bridge), a container behind a bridge with NAT as in Docker, a container with a macvlan.
const PLACES: [&str; 3] = ["vm", "nat", "macvlan"];
/// The paper's frame sizes, bytes with the frame check sequence.
const FRAMES: [u16; 3] = [64, 512, 1518];
/// Headers of Ethernet (with the check sequence), IPv4 and UDP, bytes.
const HEADERS: u16 = 14 + 4 + 20 + 8;
/// Requests at the start of each closed loop that do not count.
const WARM_UP: u64 = 10;
/// The first rate of the search, frames per second.
const FIRST_RATE: f64 = 1_000.0;
/// The search ends when the lossy rate is at most this multiple of the lossless rate.
const CLOSE: f64 = 1.1;
/// Default limit of trials, after which the search ends too.
const TRIALS: u32 = 12;
/// Minimum duration of a trial, s of the host's clock (RFC 2544: 60). Rings and buffers on the way hold some hundred
/// frames, which pass at any rate.
const TRIAL_S: f64 = 0.25;

/// Name of a case in results.
fn name(method: &str, place: &str, frame: u16) -> String {
    format!("{method}-{place}-{frame}")
}

/// Name of the case's open loop in results.
fn fast(case: &str) -> String {
    format!("{case}-fast")
}

/// Name of the case's open loop for hours in results.
fn long(case: &str) -> String {
    format!("{case}-hours")
}

/// Boots the host and its VMs and measures every case. If a case fails, the remaining cases are measured while the host
/// lives.
fn measure(args: &Options, ground: PlannedHost<'_>) -> Result<CaseResults, MeasureError> {
    let mut placed = PlacedServer::new(server::SOCKPERF, &ground, false)?;
    let host = ground.start(&BULK_VMS, &server::CONFIG)?;
    let cases = args.places.iter().flat_map(|place| args.methods.iter().map(move |method| (method, place)));
    let name = |(method, place): &(&String, &String)| format!("{method}-{place}, one frame or more");
    trial::each_with_several(host, cases, name, |host, &(method, place), results| {
        if placed.place().is_some_and(|before| before != server_place(place)) {
            // Beside a polling thread, the setup of the next place would get a twentieth of the one CPU and take
            // minutes.
            apply(host, "napi")?;
        }
        placed.put(host, server_place(place))?;
        apply(host, method)?;
        args.frames.iter().try_for_each(|frame| measure_case(host, args, (method, place, *frame), results))
    })
}

fn server_place(place: &str) -> ServerPlace {
    match place {
        "nat" => ServerPlace::Container(Net::Nat),
        "macvlan" => ServerPlace::Container(Net::Macvlan),
        _ => ServerPlace::Vm,
    }
}

/// Applies a method.
fn apply(host: &mut Host, method: &str) -> Result<(), MeasureError> {
    if host.target().is_none() {
        configure(host, method)?;
    } else if method == "busypoll-adaptive" {
        let said = "whether polling is adaptive is the host's own host.toml's to say: measure busypoll with it";
        return Err(HardwareError::NotHere(said.to_owned()).into());
    }
    match method {
        "napi" => host.reset(),
        "napi-tuned" => host.apply("vanilla"),
        "partitioned" => host.apply(method),
        _ => host.apply("busypoll"),
    }
}

/// Assigns the CPU to an emulated host's polling threads. The owner of a real host does that.
fn configure(host: &mut Host, method: &str) -> Result<(), MeasureError> {
    let config: String = server::CONFIG.iter().map(|(_, text)| *text).collect();
    let poll = format!("poll_cpu = {}", host.cpus - 1);
    let adaptive = if method == "busypoll-adaptive" { "[busypoll]\nadaptive = true\n" } else { "" };
    host.configure(&format!("{config}{poll}\n{adaptive}"))
}

fn measure_case(
    host: &mut Host,
    args: &Options,
    (method, place, frame): (&str, &str, u16),
    results: &mut Vec<MethodResult>,
) -> Result<(), MeasureError> {
    let message_bytes = usize::from(frame.saturating_sub(HEADERS));
    let workload = Workload::Sockperf { message_bytes };
    let server = workload.on(host);
    let case = name(method, place, frame);
    let label = format!("{}; {place}, frames of {frame} bytes", METHODS.description(method));
    let rate = f64::from(args.rate);
    let load = |rate, count| Paced { server, message_bytes, rate, count };
    if let Some(hours) = args.hours {
        let label = format!("{label}, {} a second for {} h", number::significant(rate), number::significant(hours));
        let (paced, length_ns) = (load(rate, u64::MAX), hours::length_ns(hours));
        let long = Hours { case: &long(&case), label: &label, load: Load::SmallPackets, paced, length_ns };
        let mut result = long.run(host)?;
        result.metrics.push(bytes(frame));
        result.metrics.extend(polling(host, method)?);
        results.push(result);
        return Ok(());
    }
    let (requests, warmup) = (Requests::Client { workload, count: args.requests + WARM_UP, seed: 1 }, WARM_UP);
    let trial = Trial { method: &case, label: &label, load: Load::SmallPackets, requests, warmup };
    let mut result = trial.run(host)?;
    result.metrics.push(bytes(frame));
    result.metrics.extend(polling(host, method)?);
    if args.frames_each > 0 && args.trials > 0 {
        progress(format_args!("{case}: searching the highest rate without loss"));
        result
            .metrics
            .extend(zero_loss(host, args, &|rate| load(rate, args.frames_each.max((rate * TRIAL_S) as u64)))?);
    }
    results.push(result);
    if args.frames_each > 0 {
        let case = fast(&case);
        let label = format!("{label}, {} a second", number::significant(rate));
        let requests = Requests::Paced(load(rate, args.frames_each));
        let trial = Trial { method: &case, label: &label, load: Load::SmallPackets, requests, warmup: 0 };
        let mut result = trial.run(host)?;
        result.metrics.push(bytes(frame));
        results.push(result);
    }
    Ok(())
}

/// The fields of `ontime status --json` that are used.
#[derive(Debug, Deserialize)]
struct Status {
    polling: Vec<NicPolling>,
}

#[derive(Debug, Deserialize)]
struct NicPolling {
    nic: String,
    polled_seconds: f64,
    saved_seconds: f64,
}

/// Polling times of the RT NIC under this method, read after a pause of twice the linger time. For adaptive polling
/// only.
fn polling(host: &mut Host, method: &str) -> Result<Vec<Metric>, MeasureError> {
    if method != "busypoll-adaptive" {
        return Ok(Vec::new());
    }
    let text = host.shell("sleep 2; ontime status --json || [ $? -le 2 ]")?;
    let status: Status = serde_json::from_str(&text).map_err(|error| MeasureError::Accounting(error.to_string()))?;
    let rt = status.polling.into_iter().find(|of| of.nic == "rt0");
    Ok(rt.map_or_else(Vec::new, |of| {
        let (polled, rested) = (of.polled_seconds, of.saved_seconds);
        vec![
            Metric::number("polled", Unit::S, polled),
            Metric::number("rested", Unit::S, rested),
            Metric::number("saved", Unit::Share, rested / (polled + rested).max(f64::MIN_POSITIVE)),
        ]
    }))
}

/// A binary search for the highest rate without loss. Does no I/O.
#[derive(Debug)]
struct Search {
    next: f64,
    /// The highest requested rate without loss, and the actual rate on the wire.
    good: Option<(f64, f64)>,
    bad: Option<(f64, f64)>,
    trials: u32,
    most: u32,
}

impl Search {
    fn from(rate: f64, most: u32) -> Self {
        Self { next: rate, good: None, bad: None, trials: 0, most }
    }

    /// Takes a trial's result: frames per second on the wire, and lost frames. Returns false when the search is over.
    fn take(&mut self, at_wire: f64, lost: u64) -> bool {
        self.trials += 1;
        if lost == 0 {
            self.good = Some((self.next, at_wire))
        } else {
            self.bad = Some((self.next, at_wire))
        }
        let (last, close) = (self.next, |good: f64, bad: f64| bad <= good * CLOSE);
        self.next = match (self.good, self.bad) {
            (Some((good, _)), None) => good * 2.0,
            (None, Some((bad, _))) => bad / 2.0,
            (Some((good, _)), Some((bad, _))) if close(good, bad) => return false,
            (Some((good, _)), Some((bad, _))) => (good + bad) / 2.0,
            (None, None) => last,
        };
        // The sender cannot go faster, or the host loses frames at any rate.
        let stuck = self.bad.is_none() && at_wire < last / 2.0;
        self.trials < self.most && self.next >= 10.0 && !stuck
    }

    /// The result. If the sender could not send fast enough to cause losses, the highest rate is unknown.
    fn metrics(&self, frames_each: u64) -> Vec<Metric> {
        let at_wire = |of: Option<(f64, f64)>| of.map(|(_, at_wire)| at_wire);
        let key = if self.bad.is_some() { "no-loss" } else { "no-loss-at-least" };
        let lossy = at_wire(self.bad).map(|rate| Metric::number("lossy", Unit::PerS, rate));
        [Metric::number(key, Unit::PerS, at_wire(self.good).unwrap_or(0.0))]
            .into_iter()
            .chain(lossy)
            .chain([Metric::count("trials", self.trials.into()), Metric::count("frames-each", frames_each)])
            .collect()
    }
}

fn bytes(frame: u16) -> Metric {
    Metric::number("frame", Unit::Bytes, frame.into())
}

fn zero_loss(host: &mut Host, args: &Options, load: &dyn Fn(f64) -> Paced) -> Result<Vec<Metric>, MeasureError> {
    let mut search = Search::from(FIRST_RATE, args.trials);
    loop {
        let (at_wire, lost) = trial(host, &load(search.next))?;
        if !search.take(at_wire, lost) {
            break;
        }
    }
    Ok(search.metrics(args.frames_each))
}

/// Frames per second on the wire, and the number of frames that were not answered within 0.3 s.
fn trial(host: &mut Host, load: &Paced) -> Result<(f64, u64), MeasureError> {
    let capture = host.capture("rt");
    let from = size(&capture);
    let port = load.server.port();
    let sent = host.paced(load);
    let settled = host.shell(SETTLED);
    sent?;
    settled?;
    let cut = host.dir.join("trial.pcap");
    host.cut(&capture, from, &cut)?;
    let wire = wire::analyse(&cut, RtFlow::new(port))?;
    let requests = wire.counts.requests;
    let Some(at_wire) = rate_at_wire(&wire) else {
        return Err(MeasureError::Flood { vm: "the RT server".to_owned(), said: "nothing was captured".to_owned() });
    };
    Ok((at_wire, requests - wire.counts.counted))
}

/// Frames per second from the first frame on the wire to the last. `None` if no time passed.
fn rate_at_wire(wire: &WireAnalysis) -> Option<f64> {
    let later = wire.counts.requests.checked_sub(1).filter(|&later| later > 0)?;
    let (from, to) = wire.span_ns.filter(|(from, to)| from < to)?;
    Some(later as f64 * 1e9 / (to - from) as f64)
}

#[derive(Debug, Clone, clap::Args)]
struct Options {
    /// Methods: napi (nothing applied), napi-tuned (the paper's baseline), partitioned (without polling), busypoll,
    /// busypoll-adaptive
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',')]
    methods: Vec<String>,
    /// Places of the server: vm, nat (a container behind a bridge with NAT, as Docker's), macvlan (a container)
    #[arg(long = "place", value_name = "PLACE", value_delimiter = ',')]
    places: Vec<String>,
    /// Frames, bytes with the check sequence: 64, 512, 1518
    #[arg(long = "frame", value_name = "BYTES", value_delimiter = ',')]
    frames: Vec<u16>,
    /// Counted requests of each closed loop
    #[arg(long, default_value_t = 300)]
    requests: u64,
    /// Frames a second of the open loop, on the host's clock
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rate: u32,
    /// Frames of the open loop, and of each trial of the search for the highest rate without loss; 0: neither
    #[arg(long, default_value_t = 500)]
    frames_each: u64,
    /// Most trials of the search; 0: the open loop alone
    #[arg(long, default_value_t = TRIALS)]
    trials: u32,
    /// In place of all that: the open loop alone, for so many hours of the host's clock (the paper: 12); 0.01 for a
    /// trial
    #[arg(long, value_name = "HOURS", value_parser = hours, conflicts_with_all = ["requests", "frames_each", "trials"])]
    hours: Option<f64>,
    #[command(flatten)]
    host: HostArgs,
    #[command(flatten)]
    output: Output,
}

/// Measures every method at every place with every frame size on one emulated host.
fn execute(args: &Options) -> anyhow::Result<ExitCode> {
    let methods = METHODS.chosen(&args.methods)?;
    let real = args.host.hardware.hardware.is_some();
    // The owner of a real host decides on the server's place.
    let places = chosen("place", &args.places, if real { &["vm"] } else { &PLACES })?;
    let frames = if args.frames.is_empty() { FRAMES.to_vec() } else { args.frames.clone() };
    if let Some(unknown) = frames.iter().find(|frame| !FRAMES.contains(frame)) {
        usage!("frames of {unknown} bytes are none of the paper's, {:?}", FRAMES);
    }
    let args = &Options { methods, places, frames, ..args.clone() };
    let measure = |ground: PlannedHost<'_>| measure(args, ground);
    let (found, mut notes) = args.host.measure(workload::HEADERS, measure)?;
    notes.extend([
        "paper (KBP, 5 and 6, its hardware): slowest round trip in a VM at 80 Mb/s under 200 us for KBP and \
         milliseconds for NAPI, 98.8 % less at 1 Gb/s with 1518 bytes; containers 21.1 to 96.1 % less; without loss \
         1.36, 1.75 and 3.28 times NAPI's rate in a VM at 64, 512 and 1518 bytes, up to 1.28 times in a container; in \
         12 hours none over 250 us for KBP in a VM, but at 1 Gb/s with 64 bytes"
            .to_owned(),
        "the paper has 60 s a trial and CPUs kept for polling; here a trial is a count of frames".to_owned(),
    ]);
    if args.host.hardware.hardware.is_none() {
        notes.push(format!("the emulated host has {}", args.host.emulated.cpus_in_words()));
    }
    Measured { experiment: "kbp", seed: 1, found, notes }.report(&args.output)
}

/// Upper limit of the duration.
const MOST_HOURS: f64 = 1_000.0;

fn hours(text: &str) -> Result<f64, String> {
    let hours = text.parse().ok().filter(|hours| *hours > 0.0 && *hours <= MOST_HOURS);
    hours.ok_or_else(|| format!("'{text}' is no number of hours above 0 and up to {MOST_HOURS}"))
}

/// A goal: the slowest round trip of a case with polling is this many times below NAPI's.
macro_rules! slowest {
    ($case:literal, $words:literal, $times:literal $(, $paper:literal)?) => {{
        const TIMES: u32 = $times;
        let words = concat!($words, ": slowest at least ", $times, " times below NAPI's" $(, " (paper: ", $paper, ")")?
        );
        goal($case, words)
            .of(Max, small(concat!("napi-", $case)), small(concat!("busypoll-", $case)))
            .at_least(TIMES as f64)
    }};
}

/// Polling compared with interrupts.
#[derive(Debug)]
pub(super) struct Kbp;

impl Experiment for Kbp {
    command!(
        "kbp",
        "KBP 5 and 6 (Figs. 8, 9, 11, 12): round trips and zero-loss throughput by polling and by interrupts, VM and \
         containers",
        Options,
        execute
    );

    fn cases(&self) -> Vec<(String, Load)> {
        let closed = METHODS
            .iter()
            .flat_map(|method| PLACES.iter().flat_map(move |place| FRAMES.map(|frame| name(method, place, frame))));
        let all = closed.flat_map(|case| [fast(&case), long(&case), case]);
        all.map(|case| (case, Load::SmallPackets)).collect()
    }

    fn columns(&self) -> &'static [Figure] {
        &[Figure::Count, Figure::Lost, Figure::Mean, Figure::P99, Max]
    }

    fn meaning(&self) -> &'static str {
        "The highest rate at which every frame was answered, by a binary search (RFC 2544). On the virtual clock it \
         is a count of instructions. `no loss at least`: the client could not send faster. Saved: the share of the \
         time that adaptive polling rested."
    }

    fn goals(&self) -> Vec<GoalSpec> {
        vec![
            slowest!("vm-64", "VM, 64 bytes, closed loop", 100),
            slowest!("vm-64-fast", "VM, 64 bytes, open loop", 100),
            slowest!("vm-512", "VM, 512 bytes, closed loop", 100),
            slowest!("vm-512-fast", "VM, 512 bytes, open loop", 100),
            slowest!("vm-1518", "VM, 1518 bytes, closed loop", 100),
            slowest!("vm-1518-fast", "VM, 1518 bytes, open loop", 100, "83"),
            goal("unpolled-64", "VM, 64 bytes, closed loop, without polling: slowest at least 100 times below NAPI's")
                .of(Max, small("napi-vm-64"), small("partitioned-vm-64"))
                .at_least(100.0),
            goal(
                "unpolled-512",
                "VM, 512 bytes, closed loop, without polling: slowest at least 100 times below NAPI's",
            )
            .of(Max, small("napi-vm-512"), small("partitioned-vm-512"))
            .at_least(100.0),
            goal(
                "unpolled-1518",
                "VM, 1518 bytes, closed loop, without polling: slowest at least 100 times below NAPI's",
            )
            .of(Max, small("napi-vm-1518"), small("partitioned-vm-1518"))
            .at_least(100.0),
            slowest!("nat-64", "container behind NAT, 64 bytes, closed loop", 26, "up to 26"),
            slowest!("nat-64-fast", "container behind NAT, 64 bytes, open loop", 26, "up to 26"),
            slowest!("macvlan-64", "container with macvlan, 64 bytes, closed loop", 26),
            slowest!("macvlan-64-fast", "container with macvlan, 64 bytes, open loop", 26),
            slowest!("nat-512", "container behind NAT, 512 bytes, closed loop", 26),
            slowest!("nat-512-fast", "container behind NAT, 512 bytes, open loop", 26),
            slowest!("nat-1518", "container behind NAT, 1518 bytes, closed loop", 26),
            slowest!("nat-1518-fast", "container behind NAT, 1518 bytes, open loop", 26),
            slowest!("macvlan-512", "container with macvlan, 512 bytes, closed loop", 26),
            slowest!("macvlan-512-fast", "container with macvlan, 512 bytes, open loop", 26),
            slowest!("macvlan-1518", "container with macvlan, 1518 bytes, closed loop", 26),
            slowest!("macvlan-1518-fast", "container with macvlan, 1518 bytes, open loop", 26),
            slowest!("vm-64-hours", "VM, 64 bytes, hours", 100),
            slowest!("vm-512-hours", "VM, 512 bytes, hours", 100),
            slowest!("vm-1518-hours", "VM, 1518 bytes, hours", 100, "83 in 60 s"),
            slowest!("nat-64-hours", "container behind NAT, 64 bytes, hours", 26),
            slowest!("macvlan-64-hours", "container with macvlan, 64 bytes, hours", 26),
            goal("rate-64", "VM, 64 bytes: no loss up to at least 1.36 times NAPI's rate")
                .of(Own("no-loss"), small("busypoll-vm-64"), small("napi-vm-64"))
                .at_least(1.36),
            goal("rate-512", "VM, 512 bytes: no loss up to at least 1.75 times NAPI's rate")
                .of(Own("no-loss"), small("busypoll-vm-512"), small("napi-vm-512"))
                .at_least(1.75),
            goal("rate-1518", "VM, 1518 bytes: no loss up to at least 3.28 times NAPI's rate")
                .of(Own("no-loss"), small("busypoll-vm-1518"), small("napi-vm-1518"))
                .at_least(3.28),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::WireCounts;

    #[test]
    fn the_search_finds_the_highest_rate_without_loss() {
        for limit in [130.0, 999.0, 5_300.0, 60_000.0] {
            let mut search = Search::from(FIRST_RATE, TRIALS);
            while search.take(search.next, u64::from(search.next > limit)) {}
            let (good, bad) = (search.good.unwrap().1, search.bad.unwrap().1);
            assert!(
                good <= limit && bad > limit && bad <= good * CLOSE && search.trials < TRIALS,
                "{limit}: {search:?}"
            );
        }
    }

    #[test]
    fn the_search_ends_where_the_sender_is_the_limit_and_where_all_is_lost() {
        let mut search = Search::from(FIRST_RATE, TRIALS);
        while search.take(search.next.min(3_000.0), 0) {}
        assert!(search.bad.is_none() && search.good.unwrap().1 <= 3_000.0 && search.trials < TRIALS, "{search:?}");
        let mut search = Search::from(FIRST_RATE, TRIALS);
        while search.take(search.next, 1) {}
        assert!(search.good.is_none() && search.trials <= TRIALS);
    }

    #[test]
    fn a_rate_that_nobody_could_go_beyond_is_no_highest_rate() {
        let found = |lost: fn(f64) -> bool| {
            let mut search = Search::from(FIRST_RATE, TRIALS);
            while search.take(search.next.min(3_000.0), u64::from(lost(search.next))) {}
            search.metrics(200).into_iter().map(|metric| metric.key).collect::<Vec<_>>()
        };
        assert_eq!(found(|rate| rate > 1_300.0), ["no-loss", "lossy", "trials", "frames-each"]);
        // No goal uses this metric.
        assert_eq!(found(|_| false), ["no-loss-at-least", "trials", "frames-each"]);
    }

    #[test]
    fn a_rate_leaves_out_the_first_frame() {
        let counts = WireCounts { requests: 404, ..WireCounts::default() };
        let wire = |span_ns| WireAnalysis { counts, span_ns, ..WireAnalysis::default() };
        let second = Some((5, 1_000_000_005));
        assert_eq!(rate_at_wire(&wire(second)), Some(403.0));
        assert_eq!(rate_at_wire(&wire(Some((5, 5)))), None);
        assert_eq!(rate_at_wire(&wire(None)), None);
        let one = WireAnalysis { counts: WireCounts { requests: 1, ..counts }, ..wire(second) };
        assert_eq!(rate_at_wire(&one), None);
    }

    #[test]
    fn frames_are_the_papers_and_messages_fit() {
        for frame in FRAMES {
            let message = usize::from(frame - HEADERS);
            assert!((crate::sockperf::HEADER..=crate::sockperf::LONGEST).contains(&message), "{frame}");
        }
    }

    #[test]
    fn what_is_not_known_is_refused_by_name() {
        assert_eq!(chosen("place", &[], &PLACES).unwrap(), PLACES);
        let error = chosen("place", &["docker".to_owned()], &PLACES).unwrap_err().to_string();
        assert!(error.contains("docker") && error.contains("macvlan"), "{error}");
    }

    #[test]
    fn hours_stand_alone() {
        let read = |line: &str| crate::experiments::options_of::<Options>(&line.split(' ').collect::<Vec<_>>());
        assert_eq!(read("--hours 0.01 --rate 500").unwrap().hours, Some(0.01));
        assert_eq!(read("--requests 10").unwrap().hours, None);
        for wrong in ["0", "-1", "nan", "inf", "1001", "a"] {
            assert!(read(&format!("--hours={wrong}")).is_err(), "{wrong}");
        }
        for other in ["--requests", "--frames-each", "--trials"] {
            assert!(read(&format!("--hours 1 {other} 5")).is_err(), "{other}");
        }
    }
}
