//! GET response times, read off the RT NIC's capture: TCP, one connection or several.
//!
//! In: a pcap cut to 96 bytes or more a frame. Out: an exchange a GET. A client has at most one request open on a
//! connection ([`super::client`]), so what a connection's server side sends after a request, and acknowledges it with,
//! is its answer. Requests are told by new bytes of the client's stream, so that a retransmission is a duplicate and no
//! request. The clock starts when the last byte of the GET first passes the NIC, and stops when the last byte of its
//! answer first does.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;

use super::Traffic;
use crate::frame::{Frame, Segment, parse};
use crate::pcap::{PcapError, Record};
use crate::tcp::Counter;
use crate::wire::{self, Monitor, RtFlow, WireAnalysis};

/// What the wire says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Analysis {
    /// Of the GETs.
    pub gets: WireAnalysis,
    /// SETs between them; they have no response time here, as in the paper.
    pub sets: u64,
}

/// Reads a whole capture; the first `warmup` GETs do not count.
///
/// # Errors
/// Those of [`wire::analyse`].
pub fn analyse(path: &Path, port: u16, traffic: Traffic, warmup: u64) -> Result<Analysis, PcapError> {
    let mut reader = Reader { port, answer_bytes: traffic.answer_bytes() as u64, ..Reader::default() };
    let flow = RtFlow { warmup, ..RtFlow::new(port) };
    let mut gets = wire::analyse_by(&mut reader, path, flow)?;
    gets.intervals_ns = reader.intervals_ns;
    Ok(Analysis { gets, sets: reader.sets })
}

#[derive(Debug, Default)]
struct Reader {
    port: u16,
    /// Of a GET.
    answer_bytes: u64,
    streams: HashMap<(SocketAddr, SocketAddr), Stream>,
    asked: u64,
    sets: u64,
    /// When the last piece of any answer passed, until the next request.
    replied_ns: Option<u64>,
    /// From an answer to the next request, whatever they are and go by.
    intervals_ns: Vec<u64>,
}

/// A connection: how far both sides are, and the request that is open.
#[derive(Debug, Default)]
struct Stream {
    client: Option<Counter>,
    server: Option<Counter>,
    open: Option<Open>,
}

#[derive(Debug, Clone, Copy)]
struct Open {
    sequence: u64,
    is_get: bool,
    /// When its last byte first passed, and that byte's end in the stream.
    asked_ns: u64,
    asked_to: u64,
    /// Bytes of its answer, and when the last of them first passed.
    answer: u64,
    answered_ns: u64,
}

/// Why a request is no longer open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// The client goes on: it has the answer, whatever it is.
    Next,
    /// The connection or the capture ends.
    Over,
}

impl wire::Reader for Reader {
    fn record(&mut self, record: &Record<'_>, monitor: &mut Monitor) {
        let Some(Frame::Tcp(segment)) = parse(record) else { return };
        if segment.to.port() == self.port {
            self.request(record.at_ns, &segment, monitor);
        } else if segment.from.port() == self.port {
            self.answer(record.at_ns, &segment, monitor);
        }
    }

    fn finish(&mut self, monitor: &mut Monitor) {
        for (key, stream) in std::mem::take(&mut self.streams) {
            self.close(key, stream.open, End::Over, monitor);
        }
    }
}

impl Reader {
    fn request(&mut self, at_ns: u64, segment: &Segment<'_>, monitor: &mut Monitor) {
        let key = (segment.from, segment.to);
        if segment.syn {
            let client = Some(Counter::begin(segment.sequence.wrapping_add(1)));
            // The same two ports again are another connection.
            let before = self.streams.insert(key, Stream { client, ..Stream::default() });
            return self.close(key, before.and_then(|stream| stream.open), End::Over, monitor);
        }
        if segment.len == 0 {
            return;
        }
        let stream = self.streams.entry(key).or_default();
        let (begin, end) = advance(&mut stream.client, segment);
        if begin >= end {
            if let Some(open) = stream.open.filter(|open| open.is_get && open.asked_to == end) {
                monitor.request(at_ns, key.0, key.1, open.sequence);
            }
            return;
        }
        match &mut stream.open {
            // A SET is of two segments where its connection's segments are small.
            Some(open) if open.answer == 0 => (open.asked_ns, open.asked_to) = (at_ns, end),
            _ => {
                let before = stream.open.take();
                let is_get = segment.payload.starts_with(b"get ");
                if is_get || segment.payload.starts_with(b"set ") {
                    let sequence = self.asked;
                    self.asked += 1;
                    stream.open =
                        Some(Open { sequence, is_get, asked_ns: at_ns, asked_to: end, answer: 0, answered_ns: 0 });
                } else {
                    monitor.malformed();
                }
                self.intervals_ns.extend(self.replied_ns.take().and_then(|replied| at_ns.checked_sub(replied)));
                self.close(key, before, End::Next, monitor);
            }
        }
    }

    fn answer(&mut self, at_ns: u64, segment: &Segment<'_>, monitor: &mut Monitor) {
        let stream = self.streams.entry((segment.to, segment.from)).or_default();
        if segment.syn {
            stream.server = Some(Counter::begin(segment.sequence.wrapping_add(1)));
            return;
        }
        if segment.len == 0 {
            return;
        }
        let (begin, end) = advance(&mut stream.server, segment);
        if begin >= end {
            return monitor.repeated();
        }
        let acknowledged = stream.client.zip(segment.acknowledged).map(|(client, value)| client.unwrap(value));
        match stream.open.as_mut().filter(|open| acknowledged >= Some(open.asked_to)) {
            Some(open) => {
                open.answer += end - begin;
                open.answered_ns = at_ns;
                self.replied_ns = Some(at_ns);
            }
            None => monitor.stray(),
        }
    }

    fn close(
        &mut self,
        (client, server): (SocketAddr, SocketAddr),
        open: Option<Open>,
        end: End,
        monitor: &mut Monitor,
    ) {
        let Some(open) = open else { return };
        if !open.is_get {
            self.sets += 1;
        } else if open.answer == self.answer_bytes {
            monitor.request(open.asked_ns, client, server, open.sequence);
            monitor.reply(open.answered_ns, client, server, open.sequence);
        } else if end == End::Over && open.answer < self.answer_bytes {
            monitor.request(open.asked_ns, client, server, open.sequence);
        } else {
            // A miss, or an error.
            monitor.malformed();
        }
    }
}

/// Takes a segment with payload: the new bytes it brings to its side's stream, from and to; none where the first is not
/// less.
fn advance(side: &mut Option<Counter>, segment: &Segment<'_>) -> (u64, u64) {
    let counter = side.get_or_insert_with(|| Counter::begin(segment.sequence));
    let start = counter.unwrap(segment.sequence);
    let end = start.saturating_add(u64::from(segment.len));
    let begin = start.max(counter.last);
    counter.last = counter.last.max(end);
    (begin, end)
}
