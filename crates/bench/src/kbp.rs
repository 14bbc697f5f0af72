//! `kbp`: KBP (IEICE'22), sections 5 and 6. Round trips and zero-loss throughput of a UDP echo in a VM and in
//! containers, by polling and by interrupts.
//!
//! In: methods, places and frame sizes, on one emulated host. Out: for each a [`MethodResult`] named
//! `METHOD-PLACE-FRAME`: round trips of a closed loop while two bulk VMs are flooded with small packets on the other
//! NIC, and the highest rate without loss (RFC 2544, 26.1: a binary search) without that flood; and one named
//! `METHOD-PLACE-FRAME-fast`: round trips of an open loop at a steady rate, under the flood. Where hours are asked for,
//! one named `METHOD-PLACE-FRAME-hours` in place of them: the same open loop for as long. On the virtual clock a rate
//! is a count of instructions, not of a machine's time.

use ontime_figures::number;
use serde::Deserialize;

use crate::hardware::HardwareError;
use crate::host::{BULK_VMS, Ground, Host, MeasureError, size};
use crate::hours::{self, Hours};
use crate::paced::{Pace, Paced};
use crate::report;
use crate::schema::{Clock, Load, MethodResult, Polling, ZeroLoss};
use crate::server::{self, Net, Place, Seat};
use crate::trial::{self, Requests, SETTLED, Trial};
use crate::wire::{self, RtFlow};
use crate::workload::Workload;

/// Nothing applied; the paper's tuned baseline; KBP by the kernel's own means; the same, polling only while packets
/// come.
pub const METHODS: [&str; 5] = ["napi", "napi-tuned", "partitioned", "busypoll", "busypoll-adaptive"];
/// A VM (virtio-net, vhost-net, bridge), a container behind a bridge with NAT as Docker's, a container with a macvlan.
pub const PLACES: [&str; 3] = ["vm", "nat", "macvlan"];
/// The paper's frames, bytes with the frame check sequence.
pub const FRAMES: [u16; 3] = [64, 512, 1518];
/// Ethernet's header and check sequence, IPv4's and UDP's headers.
const HEADERS: u16 = 14 + 4 + 20 + 8;
/// Requests at the start of each closed loop that do not count.
const WARM_UP: u64 = 10;
/// The first rate that is tried, frames a second.
const FIRST_RATE: f64 = 1_000.0;
/// The search ends where the lossy rate is at most so many times the lossless one.
const CLOSE: f64 = 1.1;
/// Or after so many trials, where nothing else is said.
pub const TRIALS: u32 = 12;
/// A trial is so long at least, s of the host's clock (RFC 2544: 60): what rings and buffers on the way hold, some
/// hundred frames, takes no rate to get through.
const TRIAL_S: f64 = 0.25;

/// What to measure on one host.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Of [`METHODS`].
    pub methods: Vec<String>,
    /// Of [`PLACES`].
    pub places: Vec<String>,
    /// Of [`FRAMES`].
    pub frames: Vec<u16>,
    /// Counted requests of a closed loop, at least.
    pub requests: u64,
    /// Frames a second of the open loop.
    pub rate: f64,
    /// Frames of the open loop, and of each trial of the search at least; 0 for neither.
    pub frames_each: u64,
    /// The most trials of the search; 0 for none.
    pub trials: u32,
    /// The open loop alone, for so many hours of the host's clock.
    pub hours: Option<f64>,
}

/// A case's name in results.
pub fn name(method: &str, place: &str, frame: u16) -> String {
    format!("{method}-{place}-{frame}")
}

/// The name of its open loop, in results.
pub fn fast(case: &str) -> String {
    format!("{case}-fast")
}

/// The name of its open loop for hours, in results.
pub fn long(case: &str) -> String {
    format!("{case}-hours")
}

/// Boots the host and its VMs and measures every case. A case that fails is passed to `missing`, and the rest is
/// measured, as long as the host lives.
///
/// # Errors
/// The host or a bulk VM does not come up.
pub fn measure(
    plan: &Plan,
    ground: Ground<'_>,
    progress: &mut dyn FnMut(&str),
    missing: &mut dyn FnMut(&str, MeasureError),
) -> Result<Vec<MethodResult>, MeasureError> {
    let mut seat = Seat::new(server::SOCKPERF, &ground, false, progress)?;
    let host = ground.start(&BULK_VMS, &server::CONFIG, progress)?;
    let cases = plan.places.iter().flat_map(|place| plan.methods.iter().map(move |method| (method, place)));
    let name = |(method, place): &(&String, &String)| format!("{method}-{place}, one frame or more");
    trial::each(host, cases, name, missing, |host, &(method, place), results| {
        if seat.place().is_some_and(|before| before != seat_of(place)) {
            // Beside a thread that polls, making the next place has a twentieth of the one CPU, and takes minutes.
            apply(host, "napi")?;
        }
        seat.put(host, seat_of(place), progress)?;
        apply(host, method)?;
        plan.frames.iter().try_for_each(|frame| measure_case(host, plan, (method, place, *frame), progress, results))
    })
}

fn seat_of(place: &str) -> Place {
    match place {
        "nat" => Place::Container(Net::Nat),
        "macvlan" => Place::Container(Net::Macvlan),
        _ => Place::Vm,
    }
}

/// Puts a method in force.
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

/// Gives an emulated host's polling threads their CPU; a real one's owner has.
fn configure(host: &mut Host, method: &str) -> Result<(), MeasureError> {
    let config: String = server::CONFIG.iter().map(|(_, text)| *text).collect();
    let poll = format!("poll_cpu = {}", host.cpus - 1);
    let adaptive = if method == "busypoll-adaptive" { "[busypoll]\nadaptive = true\n" } else { "" };
    host.configure(&format!("{config}{poll}\n{adaptive}"))
}

fn words(method: &str) -> &str {
    match method {
        "napi" => "NAPI, the kernel's defaults, nothing at real-time priority",
        "napi-tuned" => "NAPI, vCPU, vhost and the container's threads at real-time priority",
        "partitioned" => "Ontime without polling: every NAPI threaded, one priority table for the whole path",
        "busypoll" => "a polling thread for the RT NIC (KBP)",
        "busypoll-adaptive" => "a polling thread while packets come",
        other => other,
    }
}

fn measure_case(
    host: &mut Host,
    plan: &Plan,
    (method, place, frame): (&str, &str, u16),
    progress: &mut dyn FnMut(&str),
    results: &mut Vec<MethodResult>,
) -> Result<(), MeasureError> {
    let message_bytes = usize::from(frame.saturating_sub(HEADERS));
    let workload = Workload::Sockperf { message_bytes };
    let server = host.server(workload);
    let case = name(method, place, frame);
    let label = format!("{}; {place}, frames of {frame} bytes", words(method));
    let load = |rate, count| Paced { server, message_bytes, rate, count };
    if let Some(hours) = plan.hours {
        let label =
            format!("{label}, {} a second for {} h", number::significant(plan.rate), number::significant(hours));
        let (paced, length_ns) = (load(plan.rate, u64::MAX), hours::length_ns(hours));
        let long = Hours { case: &long(&case), label: &label, load: Load::SmallPackets, paced, length_ns };
        let mut result = long.run(host, progress)?;
        result.frame_bytes = Some(u32::from(frame));
        result.polling = polling(host, method)?;
        results.push(result);
        return Ok(());
    }
    let (requests, warmup) = (Requests::Client { workload, count: plan.requests + WARM_UP, seed: 1 }, WARM_UP);
    let trial = Trial { method: &case, label: &label, load: Load::SmallPackets, requests, warmup };
    let mut result = trial.run(host, progress)?;
    result.frame_bytes = Some(u32::from(frame));
    result.polling = polling(host, method)?;
    if plan.frames_each > 0 && plan.trials > 0 {
        progress(&format!("{case}: searching the highest rate without loss"));
        result.zero_loss =
            Some(zero_loss(host, plan, &|rate| load(rate, plan.frames_each.max((rate * TRIAL_S) as u64)))?);
    }
    results.push(result);
    if plan.frames_each > 0 {
        let case = fast(&case);
        let label = format!("{label}, {} a second", number::significant(plan.rate));
        let requests = Requests::Paced(load(plan.rate, plan.frames_each));
        let trial = Trial { method: &case, label: &label, load: Load::SmallPackets, requests, warmup: 0 };
        let mut result = trial.run(host, progress)?;
        result.frame_bytes = Some(u32::from(frame));
        results.push(result);
    }
    Ok(())
}

/// The part of `ontime status --json` that is looked at.
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

/// How long the RT NIC has polled and rested under this method, after a rest as long as the linger time twice; of
/// adaptive polling only.
fn polling(host: &mut Host, method: &str) -> Result<Option<Polling>, MeasureError> {
    if method != "busypoll-adaptive" {
        return Ok(None);
    }
    let text = host.shell("sleep 2; ontime status --json || [ $? -le 2 ]")?;
    let status: Status = serde_json::from_str(&text).map_err(|error| MeasureError::Accounting(error.to_string()))?;
    let rt = status.polling.into_iter().find(|of| of.nic == "rt0");
    Ok(rt.map(|of| Polling { polled_s: of.polled_seconds, saved_s: of.saved_seconds }))
}

/// A binary search for the highest rate without loss. Pure.
#[derive(Debug)]
struct Search {
    next: f64,
    /// Asked for and without loss; the rate that it was at the wire.
    good: Option<(f64, f64)>,
    bad: Option<(f64, f64)>,
    trials: u32,
    most: u32,
}

impl Search {
    fn from(rate: f64, most: u32) -> Self {
        Self { next: rate, good: None, bad: None, trials: 0, most }
    }

    /// Takes a trial's outcome: frames a second at the wire, frames lost. False where the search is over.
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
        // A sender that cannot go faster, or a host that loses at any rate.
        let stuck = self.bad.is_none() && at_wire < last / 2.0;
        self.trials < self.most && self.next >= 10.0 && !stuck
    }
}

fn zero_loss(host: &mut Host, plan: &Plan, load: &dyn Fn(f64) -> Paced) -> Result<ZeroLoss, MeasureError> {
    let mut search = Search::from(FIRST_RATE, plan.trials);
    loop {
        let (at_wire, lost) = trial(host, &load(search.next))?;
        if !search.take(at_wire, lost) {
            break;
        }
    }
    let at_wire = |of: Option<(f64, f64)>| of.map(|(_, at_wire)| at_wire);
    Ok(ZeroLoss {
        frames_per_s: at_wire(search.good).unwrap_or(0.0),
        lossy_frames_per_s: at_wire(search.bad),
        trials: search.trials,
        frames_each: plan.frames_each,
    })
}

/// Frames a second at the wire, and how many of them were not answered within 0.3 s.
fn trial(host: &mut Host, load: &Paced) -> Result<(f64, u64), MeasureError> {
    let capture = host.capture("rt");
    host.stamp_arrivals(true)?;
    let from = size(&capture);
    let port = load.server.port();
    let sent = host.paced(load);
    let settled = host.shell(SETTLED);
    host.stamp_arrivals(false)?;
    sent?;
    settled?;
    let cut = host.dir.join("trial.pcap");
    host.cut(&capture, from, &cut)?;
    let wire = wire::analyse(&cut, RtFlow::new(port))?;
    let requests = wire.counts.requests;
    let span = wire.span_ns.map_or(0, |(first, last)| last - first);
    // Those that came at the first instant are before the span.
    let first = if host.clock == Clock::Virtual { Pace::of(load.rate).burst } else { 1 };
    if requests <= first || span == 0 {
        return Err(MeasureError::Flood { vm: "the RT server".to_owned(), said: "nothing was captured".to_owned() });
    }
    let answered = wire.counts.counted + wire.counts.batched;
    Ok(((requests - first) as f64 * 1e9 / span as f64, requests - answered))
}

/// Figures 8, 9, 11 and 12 as a table.
pub fn table(results: &[MethodResult]) -> String {
    let mut text = String::from(
        "case                          requests  lost      mean       p99       max  us   frames/s without loss\n",
    );
    for result in results {
        let figures = report::columns(result.latency_us, |of| [of.mean, of.p99, of.max]);
        let rate = result.zero_loss.as_ref().map_or_else(String::new, |of| number::significant(of.frames_per_s));
        text.push_str(&format!("{:<29} {:>8} {:>5}{figures}  {rate:>22}\n", result.method, result.count, result.lost));
    }
    for (method, of) in results.iter().filter_map(|result| Some((&result.method, result.polling?))) {
        let saved = of.saved_s / (of.polled_s + of.saved_s).max(f64::MIN_POSITIVE);
        text.push_str(&format!(
            "{method}: polled {:.1} s, rested {:.1} s: {:.0} % of a CPU saved\n",
            of.polled_s,
            of.saved_s,
            saved * 100.0
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn frames_are_the_papers_and_messages_fit() {
        for frame in FRAMES {
            let message = usize::from(frame - HEADERS);
            assert!((crate::sockperf::HEADER..=crate::sockperf::LONGEST).contains(&message), "{frame}");
        }
    }
}
