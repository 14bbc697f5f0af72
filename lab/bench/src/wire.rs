//! The hardware monitor: response times of a UDP request/response server, read from the RT NIC's capture.
//!
//! In: a pcap of the RT NIC, and the server's flow. In Access'18, IV-A, a splitter and a stamping capture card take the
//! capture; in the lab QEMU's `filter-dump` does. Out: one [`Exchange`] per counted request, and [`WireCounts`] for all
//! others. Every request in the capture is counted in exactly one of the two (see [`WireCounts::requests`]).
//!
//! A request and its reply match by both addresses, both ports and the 64-bit big-endian sequence number at
//! [`RtFlow::sequence_at`] of the payload. Delays in the client are not included: the time runs from the request's
//! passage of the NIC to the reply's.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::ops::AddAssign;
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::frame::{Datagram, Frame, parse};
use crate::pcap::{PcapError, Record, Tail};

/// A request without reply counts as open, not as lost, if the capture ends less than this time after it, ns.
pub(crate) const SETTLE_NS: u64 = 100_000_000;

/// The exchanges to analyse.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RtFlow {
    /// The server's UDP port.
    pub port: u16,
    /// The server's address; `None` for any.
    pub address: Option<IpAddr>,
    /// Offset of the sequence number in the payload, bytes (sockperf: 0).
    pub sequence_at: usize,
    /// Only requests within this range of the capture's clock count, ns, both ends included. Others are warm-up.
    pub window: Option<(u64, u64)>,
    /// Number of requests at the start of the window that do not count either.
    pub warmup: u64,
}

impl RtFlow {
    /// A sockperf server on `port`, without warm-up.
    pub fn new(port: u16) -> Self {
        Self { port, address: None, sequence_at: 0, window: None, warmup: 0 }
    }

    fn is_server(&self, socket: SocketAddr) -> bool {
        socket.port() == self.port && self.address.is_none_or(|address| address == socket.ip())
    }

    fn in_window(&self, at_ns: u64) -> bool {
        self.window.is_none_or(|(from, to)| (from..=to).contains(&at_ns))
    }
}

/// A counted request and the time to its reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exchange {
    /// Time at which the request passed the NIC, ns on the capture's clock.
    pub at_ns: u64,
    /// Time until its first reply passed the NIC, ns.
    pub latency_ns: u64,
    /// Sequence number.
    pub sequence: u64,
}

/// What became of every packet of the flow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WireCounts {
    /// Requests seen: the sum of the five that follow.
    pub requests: u64,
    /// Answered, and in the statistics.
    pub counted: u64,
    /// Never answered, though the capture went on for 100 ms.
    pub lost: u64,
    /// Not answered within less than 100 ms before the capture's end.
    pub open_at_end: u64,
    /// The same request again: a copy on the wire or a retransmission.
    pub duplicates: u64,
    /// Outside the window, or among the first that are left out.
    pub warmup: u64,
    /// A further reply to a request that already had one.
    pub duplicate_replies: u64,
    /// A reply to no request of this capture.
    pub stray_replies: u64,
    /// Datagrams to or from the server that are too short for a sequence number.
    pub malformed: u64,
    /// IP fragments, which cannot be told by port.
    pub fragments: u64,
    /// Bytes of an unfinished packet at the capture's end.
    pub truncated_bytes: u64,
}

impl AddAssign for WireCounts {
    fn add_assign(&mut self, more: Self) {
        let Self {
            requests,
            counted,
            lost,
            open_at_end,
            duplicates,
            warmup,
            duplicate_replies,
            stray_replies,
            malformed,
            fragments,
            truncated_bytes,
        } = more;
        self.requests += requests;
        self.counted += counted;
        self.lost += lost;
        self.open_at_end += open_at_end;
        self.duplicates += duplicates;
        self.warmup += warmup;
        self.duplicate_replies += duplicate_replies;
        self.stray_replies += stray_replies;
        self.malformed += malformed;
        self.fragments += fragments;
        self.truncated_bytes += truncated_bytes;
    }
}

/// The result of an analysis.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WireAnalysis {
    /// The counted requests, by time.
    pub exchanges: Vec<Exchange>,
    /// Counters of all packets of the flow.
    pub counts: WireCounts,
    /// Time from each counted request back to the previous reply of the same client, ns: the gaps as seen on the wire.
    pub intervals_ns: Vec<u64>,
    /// Resolution of the capture's time stamps, ns.
    pub resolution_ns: u64,
    /// First and last request in the window, ns on the capture's clock.
    pub span_ns: Option<(u64, u64)>,
    /// The error at which reading the capture stopped, if there was one.
    pub damage: Option<String>,
}

impl WireAnalysis {
    /// The counted response times in the order of their requests, ns.
    pub fn latencies_ns(&self) -> Vec<u64> {
        self.exchanges.iter().map(|exchange| exchange.latency_ns).collect()
    }
}

/// Direction of a datagram of the flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DatagramDirection {
    Request,
    Reply,
}

#[derive(Debug, Clone, Copy)]
struct Event {
    at_ns: u64,
    way: DatagramDirection,
    client: SocketAddr,
    server: SocketAddr,
    sequence: u64,
}

/// The fields in which a request and its reply agree.
type Key = (SocketAddr, SocketAddr, u64);

impl Event {
    fn key(&self) -> Key {
        (self.client, self.server, self.sequence)
    }
}

/// Collects the flow's packets one by one; [`Monitor::finish`] matches them. Does no I/O.
#[derive(Debug)]
pub struct Monitor {
    flow: RtFlow,
    events: Vec<Event>,
    counts: WireCounts,
    last_ns: u64,
}

impl Monitor {
    /// A monitor for one flow.
    pub fn new(flow: RtFlow) -> Self {
        Self { flow, events: Vec::new(), counts: WireCounts::default(), last_ns: 0 }
    }

    /// Takes a packet, whether or not it belongs to the flow.
    pub fn record(&mut self, record: &Record<'_>) {
        self.saw(record.at_ns);
        match parse(record) {
            Some(Frame::Udp(datagram)) => self.datagram(record.at_ns, &datagram),
            Some(Frame::Fragment) => self.counts.fragments += 1,
            Some(Frame::Tcp(_)) | None => {}
        }
    }

    /// Notes that the capture extends at least to this time.
    fn saw(&mut self, at_ns: u64) {
        self.last_ns = self.last_ns.max(at_ns);
    }

    /// Notes a request. The same `sequence` between the same two sockets again is a duplicate.
    pub fn request(&mut self, at_ns: u64, client: SocketAddr, server: SocketAddr, sequence: u64) {
        self.events.push(Event { at_ns, way: DatagramDirection::Request, client, server, sequence });
    }

    /// Notes the reply to a request.
    pub fn reply(&mut self, at_ns: u64, client: SocketAddr, server: SocketAddr, sequence: u64) {
        self.events.push(Event { at_ns, way: DatagramDirection::Reply, client, server, sequence });
    }

    /// Notes a packet of the server that is neither a request nor a reply.
    pub fn malformed(&mut self) {
        self.counts.malformed += 1;
    }

    /// Notes data that replies to no request.
    pub(crate) fn stray(&mut self) {
        self.counts.stray_replies += 1;
    }

    /// Notes repeated data of a reply.
    pub fn repeated(&mut self) {
        self.counts.duplicate_replies += 1;
    }

    fn datagram(&mut self, at_ns: u64, datagram: &Datagram<'_>) {
        let (way, client, server) = if self.flow.is_server(datagram.to) {
            (DatagramDirection::Request, datagram.from, datagram.to)
        } else if self.flow.is_server(datagram.from) {
            (DatagramDirection::Reply, datagram.to, datagram.from)
        } else {
            return;
        };
        let at = self.flow.sequence_at;
        let field = datagram.payload.get(at..at.saturating_add(8)).and_then(|bytes| bytes.try_into().ok());
        match field.map(u64::from_be_bytes) {
            Some(sequence) => self.events.push(Event { at_ns, way, client, server, sequence }),
            None => self.malformed(),
        }
    }

    /// Number of packets of the flow in memory.
    #[cfg(test)]
    pub(crate) fn held(&self) -> usize {
        self.events.len()
    }

    /// Time stamp of the last packet, ns; 0 before the first.
    pub(crate) fn last_ns(&self) -> u64 {
        self.last_ns
    }

    /// Matches the requests before `until_ns` with the replies so far, and drops both; later packets stay. For captures
    /// that are read while they grow, and for flows without warm-up. A reply that arrives later counts as a stray
    /// reply.
    pub(crate) fn take_before(&mut self, until_ns: u64) -> WireAnalysis {
        let is_request = |event: &&Event| event.way == DatagramDirection::Request && event.at_ns < until_ns;
        let requests: HashSet<_> = self.events.iter().filter(is_request).map(Event::key).collect();
        let (events, rest) = std::mem::take(&mut self.events)
            .into_iter()
            .partition(|event| event.at_ns < until_ns || requests.contains(&event.key()));
        self.events = rest;
        let (flow, counts) = (self.flow.clone(), std::mem::take(&mut self.counts));
        Self { flow, events, counts, last_ns: self.last_ns }.finish()
    }

    /// Matches requests and replies.
    pub fn finish(mut self) -> WireAnalysis {
        // Captures from several CPUs may be out of order. Equal stamps keep the file's order.
        self.events.sort_by_key(|event| event.at_ns);
        let requests = self.match_replies();
        self.classify(&requests)
    }

    /// One entry per distinct request, in order of time, with its first reply.
    fn match_replies(&mut self) -> Vec<Matched> {
        let mut requests: Vec<Matched> = Vec::new();
        let mut places: HashMap<Key, usize> = HashMap::new();
        for event in &self.events {
            let key = event.key();
            let place = places.get(&key).and_then(|&place| requests.get_mut(place));
            match (event.way, place) {
                (DatagramDirection::Request, None) => {
                    places.insert(key, requests.len());
                    requests.push(Matched { event: *event, replied_ns: None });
                }
                (DatagramDirection::Request, Some(_)) => self.counts.duplicates += 1,
                (DatagramDirection::Reply, None) => self.counts.stray_replies += 1,
                (DatagramDirection::Reply, Some(matched)) if matched.replied_ns.is_some() => {
                    self.counts.duplicate_replies += 1;
                }
                (DatagramDirection::Reply, Some(matched)) => matched.replied_ns = Some(event.at_ns),
            }
        }
        requests
    }

    fn classify(self, requests: &[Matched]) -> WireAnalysis {
        let mut analysis = WireAnalysis { counts: self.counts, resolution_ns: 1_000, ..WireAnalysis::default() };
        let counts = &mut analysis.counts;
        let mut left_out = 0;
        let mut last_reply: HashMap<SocketAddr, u64> = HashMap::new();
        for Matched { event, replied_ns } in requests {
            let at_ns = event.at_ns;
            let before = last_reply.get(&event.client).copied();
            // After a request without reply, the start of the next gap is unknown.
            match *replied_ns {
                Some(replied) => last_reply.insert(event.client, replied),
                None => last_reply.remove(&event.client),
            };
            let skipped = !self.flow.in_window(at_ns) || left_out < self.flow.warmup;
            if skipped {
                left_out += u64::from(self.flow.in_window(at_ns));
                counts.warmup += 1;
                continue;
            }
            analysis.span_ns = Some((analysis.span_ns.map_or(at_ns, |(first, _)| first), at_ns));
            match *replied_ns {
                None if self.last_ns.saturating_sub(at_ns) < SETTLE_NS => counts.open_at_end += 1,
                None => counts.lost += 1,
                Some(replied) => {
                    counts.counted += 1;
                    let (latency_ns, sequence) = (replied - at_ns, event.sequence);
                    analysis.exchanges.push(Exchange { at_ns, latency_ns, sequence });
                    analysis.intervals_ns.extend(before.and_then(|before| at_ns.checked_sub(before)));
                }
            }
        }
        counts.requests = counts.duplicates + requests.len() as u64;
        analysis
    }
}

#[derive(Debug)]
struct Matched {
    event: Event,
    replied_ns: Option<u64>,
}

/// Finds the requests and replies of an application in its packets. Does no I/O.
pub trait Reader {
    /// Takes a packet, whether or not it belongs to the application.
    fn record(&mut self, record: &Record<'_>, monitor: &mut Monitor);

    /// Called after the last packet.
    fn finish(&mut self, _: &mut Monitor) {}
}

/// Reader for sockperf, whose packets [`Monitor`] parses itself.
struct Sockperf;

impl Reader for Sockperf {
    fn record(&mut self, record: &Record<'_>, monitor: &mut Monitor) {
        monitor.record(record);
    }
}

/// Reads a whole capture of sockperf. A damaged or unfinished end is noted in the result; the packets before it count.
///
/// # Errors
/// [`PcapError::Io`], [`PcapError::NotPcap`] and [`PcapError::LinkType`]: nothing can be analysed then.
pub fn analyse(path: &Path, flow: RtFlow) -> Result<WireAnalysis, PcapError> {
    analyse_by(&mut Sockperf, path, flow)
}

/// As [`analyse`], for another application. Its reader applies the flow's port and address.
///
/// # Errors
/// As [`analyse`].
pub(crate) fn analyse_by(reader: &mut dyn Reader, path: &Path, flow: RtFlow) -> Result<WireAnalysis, PcapError> {
    let mut tail = Tail::open(path)?;
    let mut monitor = Monitor::new(flow);
    let read = tail.read_new(|record| {
        monitor.saw(record.at_ns);
        reader.record(&record, &mut monitor);
    });
    let damage = match read {
        Ok(_) => None,
        Err(error @ PcapError::Damaged { .. }) => Some(error.to_string()),
        Err(error) => return Err(error),
    };
    reader.finish(&mut monitor);
    let mut analysis = monitor.finish();
    analysis.resolution_ns = tail.resolution_ns().unwrap_or(1_000);
    analysis.counts.truncated_bytes = if damage.is_none() { tail.pending() as u64 } else { 0 };
    analysis.damage = damage;
    Ok(analysis)
}
