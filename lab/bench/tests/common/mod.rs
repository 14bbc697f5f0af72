//! Makes captures byte by byte, in the format of QEMU's filter-dump.
#![allow(dead_code, missing_docs)]

pub(crate) mod process;

use std::net::{IpAddr, SocketAddr};

use etherparse::{PacketBuilder, PacketBuilderStep, VlanId};

/// In ns.
pub(crate) const US: u64 = 1_000;
pub(crate) const MS: u64 = 1_000_000;
/// The captures' clock begins at a wall-clock date, as QEMU's does.
pub(crate) const T0: u64 = 1_700_000_000_000_000_000;
pub(crate) const SERVER: &str = "10.1.0.2:11111";
pub(crate) const CLIENT: &str = "10.1.0.1:40000";

#[derive(Clone, Copy, Default)]
pub(crate) struct Format {
    pub nanoseconds: bool,
    pub big_endian: bool,
    pub snaplen: Option<usize>,
    pub virtio_header: usize,
    pub vlan: Option<u16>,
}

pub(crate) struct Capture {
    format: Format,
    pub bytes: Vec<u8>,
}

impl Capture {
    pub(crate) fn new(format: Format) -> Self {
        let magic = if format.nanoseconds { 0xa1b2_3c4d } else { 0xa1b2_c3d4 };
        let mut capture = Self { format, bytes: Vec::new() };
        capture.word(magic);
        let version = if format.big_endian { 0x0002_0004 } else { 0x0004_0002 };
        for field in [version, 0, 0, 65_536, 1] {
            capture.word(field);
        }
        capture
    }

    fn word(&mut self, value: u32) {
        let bytes = if self.format.big_endian { value.to_be_bytes() } else { value.to_le_bytes() };
        self.bytes.extend(bytes);
    }

    pub(crate) fn frame(&mut self, at_ns: u64, frame: &[u8]) {
        let mut whole = vec![0; self.format.virtio_header];
        whole.extend(frame);
        let captured = whole.len().min(self.format.snaplen.unwrap_or(usize::MAX));
        let fraction = at_ns % 1_000_000_000 / if self.format.nanoseconds { 1 } else { 1_000 };
        for field in [at_ns / 1_000_000_000, fraction, captured as u64, whole.len() as u64] {
            self.word(field as u32);
        }
        self.bytes.extend(&whole[..captured]);
    }

    fn ip(&self, from: SocketAddr, to: SocketAddr) -> PacketBuilderStep<etherparse::IpHeaders> {
        let ethernet = PacketBuilder::ethernet2([0x52, 0x54, 0, 0x12, 0x34, 1], [0x52, 0x54, 0, 0x12, 0x34, 2]);
        match (from.ip(), to.ip(), self.format.vlan) {
            (IpAddr::V4(a), IpAddr::V4(b), None) => ethernet.ipv4(a.octets(), b.octets(), 64),
            (IpAddr::V6(a), IpAddr::V6(b), None) => ethernet.ipv6(a.octets(), b.octets(), 64),
            (IpAddr::V4(a), IpAddr::V4(b), Some(id)) => {
                ethernet.single_vlan(VlanId::try_new(id).unwrap()).ipv4(a.octets(), b.octets(), 64)
            }
            (IpAddr::V6(a), IpAddr::V6(b), Some(id)) => {
                ethernet.single_vlan(VlanId::try_new(id).unwrap()).ipv6(a.octets(), b.octets(), 64)
            }
            _ => panic!("two families"),
        }
    }

    pub(crate) fn udp(&mut self, at_ns: u64, from: &str, to: &str, payload: &[u8]) {
        let (from, to): (SocketAddr, SocketAddr) = (from.parse().unwrap(), to.parse().unwrap());
        let mut frame = Vec::new();
        self.ip(from, to).udp(from.port(), to.port()).write(&mut frame, payload).unwrap();
        self.frame(at_ns, &frame);
    }

    pub(crate) fn request(&mut self, at_ns: u64, sequence: u64) {
        self.udp(at_ns, CLIENT, SERVER, &message(sequence));
    }

    pub(crate) fn reply(&mut self, at_ns: u64, sequence: u64) {
        self.udp(at_ns, SERVER, CLIENT, &message(sequence));
    }

    pub(crate) fn tcp(&mut self, at_ns: u64, from: &str, to: &str, segment: Tcp) {
        self.tcp_with(at_ns, from, to, segment, &vec![0; segment.len]);
    }

    /// A segment with this payload; `segment.len` is ignored.
    pub(crate) fn tcp_with(&mut self, at_ns: u64, from: &str, to: &str, segment: Tcp, payload: &[u8]) {
        let (from, to): (SocketAddr, SocketAddr) = (from.parse().unwrap(), to.parse().unwrap());
        let mut builder = self.ip(from, to).tcp(from.port(), to.port(), segment.sequence, 65_535);
        if let Some(acknowledged) = segment.acknowledged {
            builder = builder.ack(acknowledged);
        }
        if segment.syn {
            builder = builder.syn();
        }
        if segment.fin {
            builder = builder.fin();
        }
        let mut frame = Vec::new();
        builder.write(&mut frame, payload).unwrap();
        self.frame(at_ns, &frame);
    }

    pub(crate) fn file(&self) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &self.bytes).unwrap();
        file
    }
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Tcp {
    pub sequence: u32,
    pub acknowledged: Option<u32>,
    pub len: usize,
    pub syn: bool,
    pub fin: bool,
}

pub(crate) fn message(sequence: u64) -> [u8; 16] {
    let mut payload = [0; 16];
    ontime_bench::sockperf::write_request(&mut payload, sequence);
    payload
}
