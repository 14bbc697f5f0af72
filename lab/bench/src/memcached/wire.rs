//! GET response times, read from the RT NIC's capture: TCP, one connection or several.
//!
//! In: a pcap with at least 96 bytes per frame. Out: an exchange per GET. A client has at most one outstanding request
//! per connection ([`super::client`]). So the data that the server sends after a request, and with which it
//! acknowledges the request, is the answer. Requests are recognised by new bytes in the client's stream, so that a
//! retransmission counts as a duplicate. The time runs from the first passage of the GET's last byte to the first
//! passage of the answer's last byte.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;

use super::Traffic;
use crate::frame::{Frame, Segment, parse};
use crate::pcap::{PcapError, Record};
use crate::tcp::Counter;
use crate::wire::{self, Monitor, RtFlow, WireAnalysis};

/// The result of an analysis.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Analysis {
    /// The GETs.
    pub gets: WireAnalysis,
    /// Number of SETs between them. They have no response time here, as in the paper.
    pub sets: u64,
}

/// Analyses a whole capture. The first `warmup` GETs do not count.
///
/// # Errors
/// See [`wire::analyse`].
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
    /// Length of the answer to a GET.
    answer_bytes: u64,
    streams: HashMap<(SocketAddr, SocketAddr), Stream>,
    asked: u64,
    sets: u64,
    /// Time at which the last part of any answer passed, until the next request.
    replied_ns: Option<u64>,
    /// Times from an answer to the next request, of any kind and on any connection.
    intervals_ns: Vec<u64>,
}

/// A connection: the positions of both sides, and the outstanding request.
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
    /// First passage of the request's last byte, and the position of that byte's end in the stream.
    asked_ns: u64,
    asked_to: u64,
    /// Bytes of the answer so far, and the first passage of the last of them.
    answer: u64,
    answered_ns: u64,
}

/// Why a request is not outstanding any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// The client sends another request, so it has the answer.
    Next,
    /// The connection or the capture ended.
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
            // The same two ports again are a new connection.
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
            // A SET has two segments if the connection's segments are small.
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

/// Takes a segment with payload. Returns the range of new bytes in its side's stream; there are none if the first value
/// is not less than the second.
fn advance(side: &mut Option<Counter>, segment: &Segment<'_>) -> (u64, u64) {
    let counter = side.get_or_insert_with(|| Counter::begin(segment.sequence));
    let start = counter.unwrap(segment.sequence);
    let end = start.saturating_add(u64::from(segment.len));
    let begin = start.max(counter.last);
    counter.last = counter.last.max(end);
    (begin, end)
}
