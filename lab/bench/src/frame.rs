//! Parses the fields of an Ethernet frame that the monitors need, even if it was cut: addresses, ports, TCP's counters.
//!
//! In: a [`Record`]. Out: a [`Datagram`] or a [`Segment`], or nothing for other frames. VLAN tags and IPv6 are
//! supported. For TCP's counters the first 20 bytes of the header suffice, and therefore a snap length of 96 bytes.

use std::net::{IpAddr, SocketAddr};

use etherparse::{IpNumber, LaxNetSlice, LaxSlicedPacket};

use crate::pcap::Record;

/// Sizes of the virtio-net header that QEMU before 8.0 leaves in front of a dumped frame: none, 10 and 12 bytes.
const PREFIXES: [usize; 3] = [0, 10, 12];

/// The largest IP packet whose length fits into the length field, bytes.
const MAX_STATED: usize = 65_535;

/// A parsed frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Frame<'a> {
    /// A UDP datagram.
    Udp(Datagram<'a>),
    /// A TCP segment.
    Tcp(Segment<'a>),
    /// A fragment of an IP packet, which has no ports.
    Fragment,
}

/// A UDP datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Datagram<'a> {
    /// Sender.
    pub from: SocketAddr,
    /// Receiver.
    pub to: SocketAddr,
    /// The captured part of the payload.
    pub payload: &'a [u8],
}

/// A TCP segment's counters, and the captured part of its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment<'a> {
    /// Sender.
    pub from: SocketAddr,
    /// Receiver.
    pub to: SocketAddr,
    /// Sequence number of the first byte.
    pub sequence: u32,
    /// The next byte that the sender expects, if the segment has the ACK flag.
    pub acknowledged: Option<u32>,
    /// Size of the payload on the wire, bytes, even if the capture was cut.
    pub len: u32,
    /// The SYN flag, which uses one sequence number.
    pub syn: bool,
    /// The FIN flag, which uses one sequence number.
    pub fin: bool,
    /// The captured part of the payload, at most `len` bytes.
    pub payload: &'a [u8],
}

/// Parses a frame. `None` if it is not UDP or TCP over IP, or was cut too short.
pub(crate) fn parse<'a>(record: &Record<'a>) -> Option<Frame<'a>> {
    PREFIXES.iter().find_map(|&prefix| {
        let data = record.data.get(prefix..)?;
        let wire_len = usize::try_from(record.wire_len).ok()?.checked_sub(prefix)?;
        parse_ethernet(data, wire_len)
    })
}

fn parse_ethernet(data: &[u8], wire_len: usize) -> Option<Frame<'_>> {
    let packet = LaxSlicedPacket::from_ethernet(data).ok()?;
    let ip_at = data.len().checked_sub(packet.ether_payload()?.payload.len())?;
    let (source, destination, headers, stated) = match packet.net.as_ref()? {
        LaxNetSlice::Ipv4(ip) => {
            let (header, auth) = (ip.header(), ip.extensions().auth.map_or(0, |auth| auth.slice().len()));
            let (source, destination) = (header.source_addr(), header.destination_addr());
            (IpAddr::V4(source), IpAddr::V4(destination), header.slice().len() + auth, usize::from(header.total_len()))
        }
        LaxNetSlice::Ipv6(ip) => {
            let (header, extensions) = (ip.header(), ip.extensions().slice().len());
            let (source, destination) = (header.source_addr(), header.destination_addr());
            let stated = usize::from(header.payload_length()) + header.slice().len();
            (IpAddr::V6(source), IpAddr::V6(destination), header.slice().len() + extensions, stated)
        }
        LaxNetSlice::Arp(_) => return None,
    };
    let ip = packet.net.as_ref()?.ip_payload_ref()?;
    if ip.fragmented {
        return Some(Frame::Fragment);
    }
    // A packet larger than 64 KiB before segmentation has no length: it ends with the frame (BIG TCP).
    let total = if stated <= headers && wire_len > MAX_STATED { wire_len.checked_sub(ip_at)? } else { stated };
    let transport_len = total.checked_sub(headers)?;
    let from = |port| SocketAddr::new(source, port);
    let to = |port| SocketAddr::new(destination, port);
    match ip.ip_number {
        IpNumber::UDP => {
            let length = usize::from(be16(ip.payload, 4)?);
            let end = ip.payload.len().min(length.max(8));
            Some(Frame::Udp(Datagram {
                from: from(be16(ip.payload, 0)?),
                to: to(be16(ip.payload, 2)?),
                payload: ip.payload.get(8..end)?,
            }))
        }
        IpNumber::TCP => {
            let offset = usize::from(ip.payload.get(12)? >> 4) * 4;
            let flags = *ip.payload.get(13)?;
            let len = transport_len.checked_sub(offset)?;
            // Short frames are padded; captures are cut.
            let payload = ip.payload.get(offset..).unwrap_or_default();
            Some(Frame::Tcp(Segment {
                from: from(be16(ip.payload, 0)?),
                to: to(be16(ip.payload, 2)?),
                sequence: be32(ip.payload, 4)?,
                acknowledged: if flags & 0x10 != 0 { Some(be32(ip.payload, 8)?) } else { None },
                len: u32::try_from(len).ok()?,
                syn: flags & 0x02 != 0,
                fin: flags & 0x01 != 0,
                payload: payload.get(..len).unwrap_or(payload),
            }))
        }
        _ => None,
    }
}

fn be16(data: &[u8], at: usize) -> Option<u16> {
    data.get(at..at + 2).and_then(|bytes| bytes.try_into().ok()).map(u16::from_be_bytes)
}

fn be32(data: &[u8], at: usize) -> Option<u32> {
    data.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_be_bytes)
}
