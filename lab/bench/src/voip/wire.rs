//! Forward delays of a SIP proxy, read from the RT NIC's capture.
//!
//! In: a pcap with whole messages, not cut to headers. Out: an exchange per forwarded message. A received and a sent
//! message match by Call-ID, CSeq (number and method) and kind (method or status). A proxy changes none of these (RFC
//! 3261, 16.6 and 16.7), while it adds Via headers with its own branches. The six messages of a call differ in CSeq or
//! kind. If a message is sent repeatedly, the first one counts: the time runs from its first arrival to its first
//! departure. The proxy's own messages (100 Trying), and messages outside a call (OPTIONS), are left out.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::Path;

use ontime_figures::number;

use crate::frame::{Frame, parse};
use crate::pcap::{PcapError, Record};
use crate::wire::{self, Exchange, Monitor, RtFlow, WireAnalysis};

/// The share of the offered rate from which a rate counts as kept.
const KEPT_UP: f64 = 0.95;

/// The result of an analysis.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Analysis {
    /// All forwarded messages. The intervals are those between INVITEs.
    pub forwards: WireAnalysis,
    /// Forward delays of the counted INVITEs, ns.
    pub invites_ns: Vec<u64>,
    /// Number of calls with an INVITE in the capture.
    pub calls: u64,
    /// Arriving calls per second, from the first INVITE to the last. `None` with fewer than two.
    pub came_per_s: Option<f64>,
    /// Ending calls per second, from the first forwarded answer to a BYE to the last.
    pub ended_per_s: Option<f64>,
}

impl Analysis {
    /// The rates of calls in words, compared with the `offered` rate.
    pub fn kept_up(&self, offered: Option<f64>) -> String {
        let per_s = |rate: Option<f64>| rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1}"));
        let (came, ended) = (per_s(self.came_per_s), per_s(self.ended_per_s));
        let mut said = format!(
            "forward delays of the six messages of {} calls; calls a second: {} offered, {came} came, {ended} ended",
            number::count(self.calls),
            per_s(offered)
        );
        for (rate, who) in [(self.came_per_s, "the callers"), (self.ended_per_s, "it")] {
            if rate.zip(offered).is_some_and(|(rate, offered)| rate < KEPT_UP * offered) {
                let _ = write!(said, "; {who} did not keep up with what was offered");
                break;
            }
        }
        said
    }
}

/// Analyses a whole capture. The first `warmup` messages do not count.
///
/// # Errors
/// See [`wire::analyse`].
pub fn analyse(path: &Path, port: u16, warmup: u64) -> Result<Analysis, PcapError> {
    let mut reader = Reader { port, ..Reader::default() };
    let flow = RtFlow { warmup, ..RtFlow::new(port) };
    let mut forwards = wire::analyse_by(&mut reader, path, flow)?;
    forwards.intervals_ns = reader
        .called_ns
        .iter()
        .zip(reader.called_ns.iter().skip(1))
        .map(|(from, to)| to.saturating_sub(*from))
        .collect();
    let is_invite = |exchange: &&Exchange| {
        usize::try_from(exchange.sequence).is_ok_and(|place| reader.is_invite.get(place) == Some(&true))
    };
    let invites_ns = forwards.exchanges.iter().filter(is_invite).map(|exchange| exchange.latency_ns).collect();
    let (came_per_s, ended_per_s) = (rate(&reader.called_ns), rate(&reader.ended_ns));
    Ok(Analysis { forwards, invites_ns, calls: reader.called_ns.len() as u64, came_per_s, ended_per_s })
}

/// Events per second, from their times; `None` if no time passes between the first and the last.
fn rate(at_ns: &[u64]) -> Option<f64> {
    let span_ns = at_ns.last()?.checked_sub(*at_ns.first()?).filter(|&span_ns| span_ns > 0)?;
    Some((at_ns.len() - 1) as f64 * 1e9 / span_ns as f64)
}

#[derive(Debug, Default)]
struct Reader {
    port: u16,
    known: HashMap<Message, u64>,
    /// By message number.
    is_invite: Vec<bool>,
    /// First arrival of each call's INVITE, ns.
    called_ns: Vec<u64>,
    /// First departure of each call's last answer, ns.
    ended_ns: Vec<u64>,
    /// Numbers of those answers.
    gone: HashSet<u64>,
}

impl wire::Reader for Reader {
    fn record(&mut self, record: &Record<'_>, monitor: &mut Monitor) {
        let Some(Frame::Udp(datagram)) = parse(record) else { return };
        let comes = datagram.to.port() == self.port;
        if !comes && datagram.from.port() != self.port {
            return;
        }
        let Some(message) = Message::parse(datagram.payload) else { return monitor.malformed() };
        if !message.is_forwarded() {
            return;
        }
        let is_invite = message.kind == "INVITE";
        let is_last = message.sequence.1 == "BYE" && message.kind == "200";
        let next = self.known.len() as u64;
        let sequence = *self.known.entry(message).or_insert(next);
        if sequence == next {
            self.is_invite.push(is_invite);
            if is_invite && comes {
                self.called_ns.push(record.at_ns);
            }
        }
        // A message arrives from one side and leaves to the other: both have only the proxy's address in common.
        let peers = SocketAddr::from(([0, 0, 0, 0], 0));
        if comes {
            monitor.request(record.at_ns, peers, datagram.to, sequence);
        } else {
            if is_last && self.gone.insert(sequence) {
                self.ended_ns.push(record.at_ns);
            }
            monitor.reply(record.at_ns, peers, datagram.from, sequence);
        }
    }
}

/// The fields that distinguish a SIP message from all others of its call.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Message {
    /// A method, or a status.
    kind: String,
    call_id: String,
    /// Number and method.
    sequence: (u32, String),
}

impl Message {
    /// Parses start line and headers (RFC 3261, 7); `None` if it is not a SIP message, or is cut too early.
    fn parse(payload: &[u8]) -> Option<Self> {
        let text = String::from_utf8_lossy(payload);
        let mut lines = text.split("\r\n");
        let mut start = lines.next()?.split(' ');
        let (first, second) = (start.next()?, start.next()?);
        let kind =
            if first == "SIP/2.0" { second } else { start.next().filter(|&last| last == "SIP/2.0").map(|_| first)? };
        let (mut call_id, mut sequence) = (None, None);
        for line in lines.take_while(|line| !line.is_empty()) {
            let Some((name, value)) = line.split_once(':') else { continue };
            let (name, value) = (name.trim(), value.trim());
            if name.eq_ignore_ascii_case("call-id") || name.eq_ignore_ascii_case("i") {
                call_id = Some(value.to_owned());
            } else if name.eq_ignore_ascii_case("cseq") {
                let (number, method) = value.split_once(' ')?;
                sequence = Some((number.parse().ok()?, method.trim().to_owned()));
            }
        }
        Some(Self { kind: kind.to_owned(), call_id: call_id?, sequence: sequence? })
    }

    /// Whether it is one of the six messages of a call.
    fn is_forwarded(&self) -> bool {
        matches!(self.sequence.1.as_str(), "INVITE" | "ACK" | "BYE") && self.kind != "100"
    }
}
