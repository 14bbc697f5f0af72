//! Forward delays of a SIP proxy, read off the RT NIC's capture.
//!
//! In: a pcap with whole messages, not cut to headers. Out: an exchange a forwarded message. What came in and what went
//! out belong together by Call-ID, CSeq (number and method) and kind (method or status): a proxy changes none of them
//! (RFC 3261, 16.6 and 16.7), while it adds Via headers with branches of its own. A call's six messages differ in CSeq
//! or kind. Of a message that is sent again the first counts. The clock starts when it first came and stops when it
//! first went. What the proxy says of its own accord (100 Trying) and what is not of a call (OPTIONS) are left out.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::Path;

use ontime_figures::number;

use crate::frame::{Frame, parse};
use crate::pcap::{PcapError, Record};
use crate::wire::{self, Exchange, Monitor, RtFlow, WireAnalysis};

/// The share of a rate that counts as that rate.
const KEPT_UP: f64 = 0.95;

/// What the wire says.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Analysis {
    /// Of all forwarded messages. Its intervals are from one INVITE to the next.
    pub forwards: WireAnalysis,
    /// Forward delays of the counted INVITEs, ns.
    pub invites_ns: Vec<u64>,
    /// Calls that an INVITE was seen of.
    pub calls: u64,
    /// Calls that came, a second: from the first INVITE to the last. `None` of fewer than two.
    pub came_per_s: Option<f64>,
    /// Calls that ended, a second: from the first answer to a BYE that went out to the last.
    pub ended_per_s: Option<f64>,
}

impl Analysis {
    /// The calls' rates in words, beside the one they were `offered` at.
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

/// Reads a whole capture; the first `warmup` messages do not count.
///
/// # Errors
/// Those of [`wire::analyse`].
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

/// A second, of what happened at these times; `None` where no time is between the first and the last.
fn rate(at_ns: &[u64]) -> Option<f64> {
    let span_ns = at_ns.last()?.checked_sub(*at_ns.first()?).filter(|&span_ns| span_ns > 0)?;
    Some((at_ns.len() - 1) as f64 * 1e9 / span_ns as f64)
}

#[derive(Debug, Default)]
struct Reader {
    port: u16,
    known: HashMap<Message, u64>,
    /// By number of a message.
    is_invite: Vec<bool>,
    /// When each call's INVITE first came, ns.
    called_ns: Vec<u64>,
    /// When each call's last answer first went, ns.
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
        // It comes from one side and goes to the other: no address but the proxy's own is in both.
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

/// What tells a SIP message from every other one of its calls.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Message {
    /// A method, or a status.
    kind: String,
    call_id: String,
    /// Number and method.
    sequence: (u32, String),
}

impl Message {
    /// Reads start line and headers (RFC 3261, 7); `None` where it is none, or is cut before it can be told.
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

    /// Whether it is one of a call's six.
    fn is_forwarded(&self) -> bool {
        matches!(self.sequence.1.as_str(), "INVITE" | "ACK" | "BYE") && self.kind != "100"
    }
}
