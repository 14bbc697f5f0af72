//! Bulk throughput, read from the bulk NIC's capture.
//!
//! In: a pcap cut to headers (snap length of 96 bytes or more), the bulk VMs' receiving ports, and the range of the
//! capture's clock. Out: goodput toward each VM.
//!
//! Goodput is what the receiving VMs acknowledged: the advance of the acknowledgement number in the window, per TCP
//! connection. Retransmissions and packets that the host dropped do not count. If the capture has no acknowledgements
//! (only one direction was captured), the advance of the sender's sequence numbers is used, and the result states that.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::frame::{Frame, Segment, parse};
use crate::pcap::{PcapError, Record, Tail};
use crate::tcp::Counter;

/// The connections to count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BulkFlows {
    /// TCP ports of the receivers (iperf3: 5201); empty for every port.
    pub ports: Vec<u16>,
    /// Range of the capture's clock, ns, both ends included; `None` for all. With the first and last RT request as the
    /// range, the result is the throughput during the measurement.
    pub window: Option<(u64, u64)>,
}

/// How the bytes were told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BulkBasis {
    /// Acknowledged by the receiver.
    Acknowledged,
    /// Sent, retransmissions not counted: no acknowledgement was captured.
    Sent,
}

/// Goodput toward one VM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BulkReceiver {
    /// The VM's address.
    pub address: IpAddr,
    /// TCP connections.
    pub connections: u64,
    /// Unique TCP payload bytes.
    pub bytes: u64,
    /// Gbit/s (10^9 bit) of payload on the capture's clock.
    pub gbps: f64,
    /// How the bytes were told.
    pub basis: BulkBasis,
}

/// Goodput toward all VMs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct BulkAnalysis {
    /// Goodput by address.
    pub receivers: Vec<BulkReceiver>,
    /// Length of the window, ns.
    pub window_ns: u64,
    /// Payload bytes that were retransmitted in the window, over all connections.
    pub resent_bytes: u64,
    /// The error at which reading the capture stopped, if there was one.
    pub damage: Option<String>,
}

impl BulkAnalysis {
    /// Gbit/s toward all VMs; `None` if the window is empty.
    pub fn gbps(&self) -> Option<f64> {
        // An empty sum of floats is -0.
        (self.window_ns > 0).then(|| self.receivers.iter().fold(0.0, |sum, receiver| sum + receiver.gbps))
    }
}

/// One TCP connection toward a VM. SYN and FIN use a sequence number each, which is not a byte.
#[derive(Debug, Default, Clone, Copy)]
struct Connection {
    sent: Option<Counter>,
    acknowledged: Option<Counter>,
    payload: u64,
    fin: Option<u64>,
}

impl Connection {
    /// A counter that begins at `value`, relative to the zero that both directions share.
    fn begin(&self, value: u32) -> Counter {
        let near = self.sent.or(self.acknowledged);
        near.map_or_else(|| Counter::begin(value), |counter| Counter::at(counter.unwrap(value)))
    }

    fn segment(&mut self, segment: &Segment<'_>) {
        if segment.syn {
            self.sent = Some(self.sent.unwrap_or_else(|| self.begin(segment.sequence.wrapping_add(1))));
            return;
        }
        if segment.len == 0 && !segment.fin {
            return;
        }
        let counter = self.sent.unwrap_or_else(|| self.begin(segment.sequence));
        let start = counter.unwrap(segment.sequence);
        let end = start.saturating_add(u64::from(segment.len));
        self.sent = Some(Counter { first: counter.first.min(start), last: counter.last.max(end) });
        self.payload = self.payload.saturating_add(u64::from(segment.len));
        if segment.fin {
            self.fin = Some(end);
        }
    }

    fn acknowledge(&mut self, value: u32) {
        let counter = self.acknowledged.unwrap_or_else(|| self.begin(value));
        let now = counter.unwrap(value);
        self.acknowledged = Some(Counter { first: counter.first.min(now), last: counter.last.max(now) });
    }

    fn sent_bytes(&self) -> u64 {
        self.sent.map_or(0, Counter::advance)
    }

    fn acknowledged_bytes(&self) -> Option<u64> {
        let counter = self.acknowledged?;
        let beyond_fin = self.fin.is_some_and(|fin| counter.last > fin && counter.first <= fin);
        Some(counter.advance().saturating_sub(u64::from(beyond_fin)))
    }
}

/// Collects the bulk NIC's packets one by one. Does no I/O.
#[derive(Debug)]
pub struct BulkMonitor {
    flows: BulkFlows,
    connections: HashMap<(SocketAddr, SocketAddr), Connection>,
    span: Option<(u64, u64)>,
}

impl BulkMonitor {
    /// A monitor for these flows.
    pub fn new(flows: BulkFlows) -> Self {
        Self { flows, connections: HashMap::new(), span: None }
    }

    fn is_receiver(&self, socket: SocketAddr) -> bool {
        self.flows.ports.is_empty() || self.flows.ports.contains(&socket.port())
    }

    /// Takes a packet, whether or not it belongs to the flows.
    pub fn record(&mut self, record: &Record<'_>) {
        let at_ns = record.at_ns;
        if self.flows.window.is_some_and(|(from, to)| !(from..=to).contains(&at_ns)) {
            return;
        }
        let Some(Frame::Tcp(segment)) = parse(record) else { return };
        let to_receiver = self.is_receiver(segment.to);
        let from_receiver = self.is_receiver(segment.from);
        if !to_receiver && !from_receiver {
            return;
        }
        self.span = Some(self.span.map_or((at_ns, at_ns), |(from, to)| (from.min(at_ns), to.max(at_ns))));
        if to_receiver {
            self.connections.entry((segment.from, segment.to)).or_default().segment(&segment);
        }
        if let (true, Some(acknowledged)) = (from_receiver, segment.acknowledged) {
            self.connections.entry((segment.to, segment.from)).or_default().acknowledge(acknowledged);
        }
    }

    /// Adds up the result.
    pub fn finish(self) -> BulkAnalysis {
        let window = self.flows.window.or(self.span);
        let window_ns = window.map_or(0, |(from, to)| to.saturating_sub(from));
        let mut analysis = BulkAnalysis { window_ns, ..BulkAnalysis::default() };
        let mut receivers: BTreeMap<IpAddr, BulkReceiver> = BTreeMap::new();
        for ((_, receiver), connection) in &self.connections {
            let sent = connection.sent_bytes();
            let (bytes, basis) = match connection.acknowledged_bytes() {
                Some(bytes) => (bytes, BulkBasis::Acknowledged),
                None => (sent, BulkBasis::Sent),
            };
            analysis.resent_bytes += connection.payload.saturating_sub(sent);
            if bytes == 0 && sent == 0 {
                continue;
            }
            let address = receiver.ip();
            let empty = BulkReceiver { address, connections: 0, bytes: 0, gbps: 0.0, basis };
            let entry = receivers.entry(address).or_insert(empty);
            entry.connections += 1;
            entry.bytes = entry.bytes.saturating_add(bytes);
            if basis == BulkBasis::Sent {
                entry.basis = basis;
            }
        }
        analysis.receivers = receivers.into_values().collect();
        for receiver in &mut analysis.receivers {
            receiver.gbps = if window_ns == 0 { 0.0 } else { receiver.bytes as f64 * 8.0 / window_ns as f64 };
        }
        analysis
    }
}

/// Analyses a whole capture. A damaged end is noted in the result.
///
/// # Errors
/// [`PcapError::Io`], [`PcapError::NotPcap`] and [`PcapError::LinkType`]: nothing can be analysed then.
pub fn analyse(path: &Path, flows: BulkFlows) -> Result<BulkAnalysis, PcapError> {
    let mut tail = Tail::open(path)?;
    let mut monitor = BulkMonitor::new(flows);
    let damage = match tail.read_new(|record| monitor.record(&record)) {
        Ok(_) => None,
        Err(error @ PcapError::Damaged { .. }) => Some(error.to_string()),
        Err(error) => return Err(error),
    };
    Ok(BulkAnalysis { damage, ..monitor.finish() })
}
