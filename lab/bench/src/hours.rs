//! Response times of a steady request rate over hours: an open loop, read while its capture grows.
//!
//! In: a [`Paced`] rate and a duration, on the clock of the host under test. Out: a [`MethodResult`]. The memory use
//! does not grow with the duration: it holds packets of the last two [`PATIENCE_NS`], and a counter for each response
//! time that occurred, in steps of the capture's time stamps or of [`FINEST_NS`]. The parts of the captures that were
//! read are given back to the file system.
//!
//! The reader is a separate thread. A thread that reads and sends would send late whenever it evaluates, and the
//! datagrams with which it catches up would wait for each other.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ontime_figures::number;
use ontime_figures::stats::Tally;
use rustix::fs::{FallocateFlags, fallocate};

use crate::error::MeasureError;
use crate::host::{Host, size};
use crate::paced::Paced;
use crate::pcap::{Record, Tail};
use crate::progress::progress;
use crate::schema::{Load, MethodResult, Run};
use crate::trial::{self, SETTLED};
use crate::wire::{Exchange, Monitor, RtFlow, WireAnalysis};
use crate::workload::Workload;

/// A request without reply after this time is lost, ns of the host's clock. It is longer than the delay of all queues
/// on the way, at any rate that is useful for hours.
pub(crate) const PATIENCE_NS: u64 = 10_000_000_000;
/// Finest step of response times, ns. Nanoseconds would take memory for too many different times.
const FINEST_NS: u64 = 100;
/// Real time between two reads of the captures.
const LOOK: Duration = Duration::from_millis(200);
/// Real time between two progress messages.
const TOLD: Duration = Duration::from_secs(30);
/// Real time without a packet after which the load counts as lost.
const SILENCE: Duration = Duration::from_secs(300);
/// Minimum that is given back to the file system at once, bytes.
const PIECE: u64 = 1 << 20;
/// A part that is given back begins and ends at a multiple of this, bytes. The file's header stays.
const BLOCK: u64 = 4_096;

#[derive(Debug)]
pub(crate) struct Hours<'a> {
    /// The case's name in results.
    pub case: &'a str,
    /// The case in words.
    pub label: &'a str,
    /// Traffic of the bulk VMs: none, or datagrams.
    pub load: Load,
    /// The rate. Its count is ignored.
    pub paced: Paced,
    /// Duration, ns of the host's clock.
    pub length_ns: u64,
}

/// Hours as ns, for [`Hours::length_ns`].
pub(crate) fn length_ns(hours: f64) -> u64 {
    (hours * 3_600e9) as u64
}

impl Hours<'_> {
    /// Runs the measurement.
    pub(crate) fn run(&self, host: &mut Host) -> Result<MethodResult, MeasureError> {
        let captures = [host.capture("rt"), host.capture("bulk")];
        let workload = Workload::Sockperf { message_bytes: self.paced.message_bytes };
        workload.ready(host, 0)?;
        let flood = trial::flood(self.load, &host.bulk(), host)?;
        let shared = Shared::default();
        let flow = RtFlow::new(self.paced.server.port());
        let mut read = None;
        let stretch = trial::stretch(host, captures.clone(), flood, |host| {
            let mut reader = Reader::open(&captures, flow)?;
            let sent = thread::scope(|scope| {
                scope.spawn(|| reader.run(&shared));
                let sent = self.send(host, &shared);
                shared.stop.store(true, Ordering::Release);
                sent
            });
            read = Some(reader);
            sent
        })?;
        let read = read.ok_or(MeasureError::NoHost)?;
        let mut result = self.result(host, stretch.cpu_share, read);
        result.notes.extend(stretch.notes);
        Ok(result)
    }

    fn send(&self, host: &mut Host, shared: &Shared) -> Result<(), MeasureError> {
        let (mut told, mut silent) = (Instant::now(), false);
        let endless = Paced { count: u64::MAX, ..self.paced.clone() };
        // Clients inside end by their own clock: when this machine reads which part of the capture differs each time.
        let (inside, length) = (host.has_client_cpu(), Duration::from_nanos(self.length_ns));
        host.paced_while(&endless, Some(length), &mut || {
            let so_far = shared.so_far();
            silent = so_far.heard.elapsed() > SILENCE;
            if told.elapsed() > TOLD {
                told = Instant::now();
                progress(format_args!("{}: {}", self.case, so_far.description(self.length_ns)));
            }
            if so_far.ended || silent || (!inside && so_far.length_ns >= self.length_ns) {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })?;
        if silent {
            let said = format!("nothing was captured for {} s", SILENCE.as_secs());
            return Err(MeasureError::Flood { vm: "the RT server".to_owned(), said });
        }
        // Requests that are in flight at the last one are answered meanwhile.
        host.shell(SETTLED)?;
        host.catch_up()
    }

    fn result(&self, host: &Host, cpu_share: Option<f64>, read: Reader) -> MethodResult {
        let Reader { rolling, captures, .. } = read;
        let step = number::significant(rolling.step_ns as f64 / 1e3);
        let (wire, times, slowest) = rolling.finish();
        let mut result =
            MethodResult::new(&Run { load: self.load, wire: &wire, cpu_share, ..host.run(self.case, self.label) });
        let max_at_s = slowest.zip(wire.span_ns).map(|(of, (first, _))| (of.at_ns - first) as f64 / 1e9);
        result.counted(&times, max_at_s);
        result.notes.push(format!(
            "judged while the capture grew: a request without reply for {} s of the host's clock is lost; response \
             times are counted in steps of {step} us",
            PATIENCE_NS / 1_000_000_000
        ));
        let kept = captures.iter().filter_map(|of| Some((&of.path, of.refused.as_ref()?)));
        result.notes.extend(kept.map(|(path, error)| {
            format!("{}: what was read could not be given back, and the file has grown: {error}", path.display())
        }));
        result
    }
}

/// State shared by reader and sender.
#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    so_far: Mutex<ReaderProgress>,
}

impl Shared {
    fn so_far(&self) -> ReaderProgress {
        *self.so_far.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Progress of the reader.
#[derive(Debug, Clone, Copy)]
struct ReaderProgress {
    /// Time from the first packet to the last, ns of the host's clock.
    length_ns: u64,
    /// Number of evaluated requests: answered, lost.
    judged: (u64, u64),
    /// p99 and maximum of these, ns.
    p99_and_max: Option<(u64, u64)>,
    /// Time at which the last packet was read.
    heard: Instant,
    /// The capture cannot be read any further.
    ended: bool,
}

impl Default for ReaderProgress {
    fn default() -> Self {
        Self { length_ns: 0, judged: (0, 0), p99_and_max: None, heard: Instant::now(), ended: false }
    }
}

impl ReaderProgress {
    fn description(&self, length_ns: u64) -> String {
        let ((answered, lost), hours) = (self.judged, |ns: u64| number::significant(ns as f64 / 3_600e9));
        let us = |ns: u64| number::us(ns as f64 / 1e3);
        let times = self
            .p99_and_max
            .map_or_else(String::new, |(p99, max)| format!(", p99 {} us, slowest {} us", us(p99), us(max)));
        let (answered, lost) = (number::count(answered), number::count(lost));
        format!("{} of {} h, {answered} answered, {lost} lost{times}", hours(self.length_ns), hours(length_ns))
    }
}

/// Reads the captures while they grow.
struct Reader {
    tail: Tail,
    rolling: Rolling,
    captures: [ReadCapture; 2],
}

impl Reader {
    /// Opens the captures. The RT NIC's is read; the bulk NIC's is only given back.
    fn open(captures: &[PathBuf; 2], flow: RtFlow) -> Result<Self, MeasureError> {
        let [rt, bulk] = captures;
        let captures = [ReadCapture::open(rt)?, ReadCapture::open(bulk)?];
        let tail = Tail::open_at_end(rt)?;
        let rolling = Rolling::new(flow, tail.resolution_ns().unwrap_or_default());
        Ok(Self { tail, rolling, captures })
    }

    /// Reads until the sender sets `stop`, and then once more.
    fn run(&mut self, shared: &Shared) {
        loop {
            let last = shared.stop.load(Ordering::Acquire);
            let so_far = self.look(shared.so_far());
            *shared.so_far.lock().unwrap_or_else(PoisonError::into_inner) = so_far;
            if last || so_far.ended {
                return;
            }
            thread::sleep(LOOK);
        }
    }

    fn look(&mut self, before: ReaderProgress) -> ReaderProgress {
        let lengths = self.captures.each_ref().map(|of| size(&of.path));
        let rolling = &mut self.rolling;
        let read = self.tail.read_new(|record| rolling.record(&record));
        if let Err(error) = &read {
            rolling.damage = Some(error.to_string());
        }
        rolling.pending = self.tail.pending() as u64;
        let mut so_far = ReaderProgress { length_ns: rolling.length_ns(), ended: read.is_err(), ..before };
        if read.is_ok_and(|packets| packets > 0) {
            so_far.heard = Instant::now();
        }
        if rolling.judge() {
            so_far.judged = (rolling.wire.counts.counted, rolling.wire.counts.lost);
            so_far.p99_and_max = rolling.times.summary().map(|times| (times.p99, times.max));
        }
        for (capture, length) in self.captures.iter_mut().zip(lengths) {
            capture.give_back(length);
        }
        so_far
    }
}

/// Evaluates requests while packets arrive, with a delay of [`PATIENCE_NS`]. Does no I/O.
#[derive(Debug)]
struct Rolling {
    monitor: Monitor,
    /// Time of the first packet.
    first_ns: Option<u64>,
    /// Requests before this time have been evaluated.
    judged_ns: u64,
    /// Counters. Response times are in `times`.
    wire: WireAnalysis,
    times: Tally,
    /// Response times are rounded up to multiples of this, ns.
    step_ns: u64,
    slowest: Option<Exchange>,
    /// Bytes of an unfinished packet.
    pending: u64,
    damage: Option<String>,
}

impl Rolling {
    /// For a capture whose time stamps have this resolution.
    fn new(flow: RtFlow, resolution_ns: u64) -> Self {
        Self {
            monitor: Monitor::new(flow),
            first_ns: None,
            judged_ns: 0,
            wire: WireAnalysis::default(),
            times: Tally::default(),
            step_ns: resolution_ns.max(FINEST_NS),
            slowest: None,
            pending: 0,
            damage: None,
        }
    }

    fn record(&mut self, record: &Record<'_>) {
        if self.first_ns.is_none() {
            (self.first_ns, self.judged_ns) = (Some(record.at_ns), record.at_ns);
        }
        self.monitor.record(record);
    }

    fn length_ns(&self) -> u64 {
        self.first_ns.map_or(0, |first| self.monitor.last_ns().saturating_sub(first))
    }

    /// Evaluates requests that are old enough, if there are many. Returns whether it did.
    fn judge(&mut self) -> bool {
        let until = self.monitor.last_ns().saturating_sub(PATIENCE_NS);
        let due = until >= self.judged_ns.saturating_add(PATIENCE_NS);
        if due {
            self.judged_ns = until;
            let part = self.monitor.take_before(until);
            self.add(part);
        }
        due
    }

    fn add(&mut self, part: WireAnalysis) {
        self.wire.counts += part.counts;
        if let Some((first, last)) = part.span_ns {
            self.wire.span_ns = Some((self.wire.span_ns.map_or(first, |(first, _)| first), last));
        }
        for exchange in part.exchanges {
            self.times.take(exchange.latency_ns.next_multiple_of(self.step_ns));
            if self.slowest.is_none_or(|slowest| exchange.latency_ns > slowest.latency_ns) {
                self.slowest = Some(exchange);
            }
        }
    }

    /// Evaluates the remaining requests. Returns counters, response times, and the slowest request.
    fn finish(mut self) -> (WireAnalysis, Tally, Option<Exchange>) {
        let rest = std::mem::replace(&mut self.monitor, Monitor::new(RtFlow::new(0))).finish();
        self.add(rest);
        self.wire.counts.truncated_bytes = if self.damage.is_none() { self.pending } else { 0 };
        self.wire.damage = self.damage;
        (self.wire, self.times, self.slowest)
    }
}

/// A capture whose beginning is not needed any more. Its length, and the offsets in it, do not change.
struct ReadCapture {
    path: PathBuf,
    file: File,
    given_back: u64,
    /// The error, if the file system does not support holes.
    refused: Option<io::Error>,
}

impl ReadCapture {
    fn open(path: &Path) -> Result<Self, MeasureError> {
        let file = OpenOptions::new().write(true).open(path);
        let file = file.map_err(|source| MeasureError::File { path: path.to_owned(), source })?;
        Ok(Self { path: path.to_owned(), file, given_back: BLOCK, refused: None })
    }

    /// Gives back the part before `end`.
    fn give_back(&mut self, end: u64) {
        let length = (end / BLOCK * BLOCK).saturating_sub(self.given_back);
        if length < PIECE || self.refused.is_some() {
            return;
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match fallocate(&self.file, flags, self.given_back, length) {
            Ok(()) => self.given_back += length,
            Err(error) => self.refused = Some(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;
    use std::os::unix::fs::MetadataExt;

    use etherparse::PacketBuilder;

    use super::*;
    use crate::pcap::{HEADER, crafted};
    use crate::sockperf;
    use ontime_figures::stats::Summary;

    const PORT: u16 = 11_111;
    const CLIENT: ([u8; 4], u16) = ([10, 1, 0, 1], 40_000);
    const SERVER: ([u8; 4], u16) = ([10, 1, 0, 2], PORT);

    fn frame((from, to): (([u8; 4], u16), ([u8; 4], u16)), number: u64) -> Vec<u8> {
        let mut message = vec![0; sockperf::HEADER];
        sockperf::write_request(&mut message, number);
        let mut frame = Vec::new();
        let builder = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4(from.0, to.0, 64).udp(from.1, to.1);
        builder.write(&mut frame, &message).unwrap();
        frame
    }

    fn request(number: u64) -> Vec<u8> {
        frame((CLIENT, SERVER), number)
    }

    fn reply(number: u64) -> Vec<u8> {
        frame((SERVER, CLIENT), number)
    }

    fn take(rolling: &mut Rolling, at_us: u64, data: &[u8]) {
        rolling.record(&Record { at_ns: at_us * 1_000, wire_len: data.len() as u32, data });
        rolling.judge();
    }

    #[test]
    fn a_long_run_is_judged_as_a_whole_capture_and_holds_the_last_seconds_only() {
        let mut rolling = Rolling::new(RtFlow::new(PORT), 1_000);
        let (mut most, mut whole) = (0, Vec::new());
        let mut late: Vec<(u64, u64)> = Vec::new();
        // 100 s with a request every 10 ms. Every 1,000th has no reply; one reply comes after 6 s, another after 15 s.
        for number in 1..=10_000 {
            let at_us = number * 10_000;
            while let Some(position) = late.iter().position(|(due, _)| *due <= at_us) {
                let (due, number) = late.remove(position);
                take(&mut rolling, due, &reply(number));
            }
            take(&mut rolling, at_us, &request(number));
            match number {
                500 => late.push((at_us + 6_000_000 - 5, number)),
                600 => late.push((at_us + 15_000_000 - 5, number)),
                _ if number % 1_000 == 0 => continue,
                _ => take(&mut rolling, at_us + 50 + number % 7, &reply(number)),
            }
            let of = if number == 500 { 6_000_000 - 5 } else { 50 + number % 7 };
            if number != 600 {
                whole.push(of * 1_000);
            }
            most = most.max(rolling.monitor.held());
        }
        assert_eq!(rolling.length_ns(), 99_990_000_000);
        // 20 s of requests and replies.
        assert!(most <= 4_002, "{most}");
        let (wire, times, slowest) = rolling.finish();
        let counts = wire.counts;
        assert_eq!((counts.requests, counts.counted, counts.lost, counts.open_at_end), (10_000, 9_989, 10, 1));
        assert_eq!((counts.stray_replies, counts.duplicate_replies), (1, 0));
        assert_eq!(times.summary(), Summary::of(&whole));
        assert_eq!(slowest.map(|of| (of.sequence, of.latency_ns)), Some((500, 5_999_995_000)));
        assert_eq!(wire.span_ns, Some((10_000_000, 100_000_000_000)));
    }

    #[test]
    fn times_are_counted_in_steps_of_the_stamps_and_never_flattered() {
        // Stamps of an emulator with one CPU; of one with several, or of hardware.
        for (resolution_ns, counted) in [(1_000, [(50_000, 1), (51_000, 1)]), (1, [(50_000, 1), (50_100, 1)])] {
            let mut rolling = Rolling::new(RtFlow::new(PORT), resolution_ns);
            for (at_ns, data) in [(0, request(1)), (50_001, reply(1)), (90_000, request(2)), (139_999, reply(2))] {
                rolling.record(&Record { at_ns, wire_len: 64, data: &data });
            }
            let (_, times, slowest) = rolling.finish();
            assert_eq!(times.values().collect::<Vec<_>>(), counted);
            assert_eq!(slowest.map(|of| of.latency_ns), Some(50_001));
        }
    }

    #[test]
    fn a_growing_capture_is_read_from_where_it_stood_and_given_back() {
        let dir = tempfile::tempdir().unwrap();
        let captures = ["rt", "bulk"].map(|nic| dir.path().join(nic));
        // The part that was measured earlier has been given back: it contains no frames.
        let before: Vec<u8> = crafted(&[]).into_iter().chain(vec![0; 10_000]).collect();
        for path in &captures {
            fs::write(path, &before).unwrap();
        }
        let mut reader = Reader::open(&captures, RtFlow::new(PORT)).unwrap();
        let [mut rt, mut bulk] = captures.each_ref().map(|path| OpenOptions::new().append(true).open(path).unwrap());
        let frames: Vec<_> =
            (0..30).flat_map(|n| [(n * 1_000_000, request(n.into())), (n * 1_000_000 + 60, reply(n.into()))]).collect();
        let bytes = crafted(&frames).split_off(HEADER);
        let (first, second) = bytes.split_at(bytes.len() / 2 + 7);
        bulk.write_all(&vec![1; 3 << 20]).unwrap();
        let mut so_far = ReaderProgress::default();
        for part in [first, second] {
            rt.write_all(part).unwrap();
            so_far = reader.look(so_far);
            assert!(!so_far.ended);
        }
        assert_eq!(so_far.length_ns, 29_000_060_000);
        // Up to 10 s before the last packet. The rest is evaluated at the end.
        assert_eq!((so_far.judged, so_far.p99_and_max), ((20, 0), Some((60_000, 60_000))));
        assert!(so_far.description(60_000_000_000).contains("20 answered, 0 lost, p99 60.0 us, slowest 60.0 us"));
        let data = fs::metadata(&captures[1]).unwrap();
        assert!(data.blocks() * 512 < 1 << 20 && data.len() == (3 << 20) + before.len() as u64, "{data:?}");
        assert_eq!(fs::read(&captures[1]).unwrap()[..HEADER], before[..HEADER]);
        let (wire, times, _) = reader.rolling.finish();
        assert_eq!((wire.counts.counted, wire.counts.truncated_bytes, times.summary().unwrap().p50), (30, 0, 60_000));
    }

    #[test]
    fn a_damaged_capture_ends_it_and_what_stands_before_counts() {
        let dir = tempfile::tempdir().unwrap();
        let captures = ["rt", "bulk"].map(|nic| dir.path().join(nic));
        for path in &captures {
            fs::write(path, crafted(&[])).unwrap();
        }
        let mut reader = Reader::open(&captures, RtFlow::new(PORT)).unwrap();
        let mut bytes = crafted(&[(0, request(1)), (60, reply(1))]);
        bytes.extend([0xff; 16]);
        fs::write(&captures[0], bytes).unwrap();
        assert!(reader.look(ReaderProgress::default()).ended);
        let (wire, times, _) = reader.rolling.finish();
        assert_eq!(times.values().collect::<Vec<_>>(), [(60_000, 1)]);
        assert!(wire.damage.unwrap().contains("damaged"));
    }

    #[test]
    fn hours_may_be_fractions() {
        assert_eq!((length_ns(12.0), length_ns(0.01)), (43_200_000_000_000, 36_000_000_000));
    }
}
