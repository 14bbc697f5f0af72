//! Netlink for the packet path: a socket, requests, dumps and attributes.
//!
//! In: requests of the modules below (`link`: interfaces; `generic`: families by name, of which `netdev`: NAPI, and
//! `ethtool`: interrupt moderation; `tc`: filters; `qdisc`: root qdiscs). Out: the kernel's answers, checked. Crates
//! `netlink-sys` and `netlink-packet-core` provide the socket and the framing. The few messages needed here are in no
//! published crate (family `netdev`, `act_skbedit`), or only in one for asynchronous run-times (`ethtool`). Their
//! attributes are therefore defined here, with the names of their kernel headers.

pub mod ethtool;
pub mod generic;
pub mod link;
pub mod netdev;
pub mod qdisc;
pub mod tc;

use std::io;

use netlink_packet_core::{
    NLA_F_NESTED, NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NLMSG_NOOP,
    NetlinkBuffer, NlasIterator,
};
use netlink_sys::{Socket, SocketAddr};

/// A netlink socket to the kernel, for one protocol.
pub struct Netlink {
    socket: Socket,
    sequence: u32,
}

/// Limit of the time for an answer, ms. The kernel answers within the system call, so this is only for a kernel that
/// hangs.
const TIMEOUT_MS: i64 = 2000;
/// Number of tries for a dump whose table changes meanwhile.
const DUMP_TRIES: usize = 5;

impl Netlink {
    /// Opens a socket of a protocol (`netlink_sys::protocols`) in this thread's network namespace.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn open(protocol: isize) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        // With strict checking the kernel filters dumps by the request (4.20). Without it, the callers filter them.
        let _ = socket.set_netlink_get_strict_chk(true);
        let _ = socket.set_cap_ack(true);
        let timeout = rustix::time::Timespec { tv_sec: TIMEOUT_MS / 1000, tv_nsec: 0 };
        let timeout = std::time::Duration::try_from(timeout).map_err(io::Error::other)?;
        rustix::net::sockopt::set_socket_timeout(&socket, rustix::net::sockopt::Timeout::Recv, Some(timeout))?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Sends a request, and receives its acknowledgement and its answer, if it has one.
    ///
    /// # Errors
    /// The kernel's error number, or `InvalidData` for an invalid answer.
    pub fn request(&mut self, kind: u16, flags: u16, payload: &[u8]) -> io::Result<Vec<Vec<u8>>> {
        self.send(kind, NLM_F_REQUEST | NLM_F_ACK | flags, payload)?;
        self.receive()?.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "netlink answer was interrupted"))
    }

    /// Requests a dump, and repeats the request if the kernel reports that the table changed meanwhile.
    ///
    /// # Errors
    /// As [`Self::request`]; `Interrupted` if the table changed in every try.
    pub fn dump(&mut self, kind: u16, payload: &[u8]) -> io::Result<Vec<Vec<u8>>> {
        for _ in 0..DUMP_TRIES {
            self.send(kind, NLM_F_REQUEST | NLM_F_DUMP, payload)?;
            if let Some(parts) = self.receive()? {
                return Ok(parts);
            }
        }
        Err(io::Error::new(io::ErrorKind::Interrupted, "the kernel's table went on changing while it was read"))
    }

    fn send(&mut self, kind: u16, flags: u16, payload: &[u8]) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let length = u32::try_from(HEADER + payload.len()).map_err(io::Error::other)?;
        let mut message = Vec::with_capacity(HEADER + payload.len());
        message.extend_from_slice(&length.to_ne_bytes());
        message.extend_from_slice(&kind.to_ne_bytes());
        message.extend_from_slice(&flags.to_ne_bytes());
        message.extend_from_slice(&self.sequence.to_ne_bytes());
        message.extend_from_slice(&[0; 4]);
        message.extend_from_slice(payload);
        self.socket.send(&message, 0).map(|_| ())
    }

    /// The parts of the answer, or `None` if the table changed during the dump.
    fn receive(&mut self) -> io::Result<Option<Vec<Vec<u8>>>> {
        let mut answer = Answer { consistent: true, ..Answer::default() };
        loop {
            let (datagram, _) = self.socket.recv_from_full()?;
            if answer.take(&datagram, self.sequence)? {
                return Ok(answer.consistent.then_some(answer.parts));
            }
        }
    }
}

/// An answer, as far as it has been received.
#[doc(hidden)]
#[derive(Debug, Default)]
pub struct Answer {
    /// Payloads of the messages.
    pub parts: Vec<Vec<u8>>,
    /// Whether the table stayed unchanged during the dump.
    pub consistent: bool,
}

impl Answer {
    /// Takes the messages with this sequence number from a datagram. Returns whether the answer is complete.
    ///
    /// # Errors
    /// The kernel's error number, or `InvalidData` for an invalid datagram.
    pub fn take(&mut self, datagram: &[u8], sequence: u32) -> io::Result<bool> {
        let mut rest = datagram;
        while !rest.is_empty() {
            let message = NetlinkBuffer::new_checked(rest).map_err(|error| invalid(&error))?;
            let length = (message.length() as usize).next_multiple_of(4);
            rest = rest.get(length..).unwrap_or_default();
            // The answer to an earlier request, which timed out.
            if message.sequence_number() != sequence {
                continue;
            }
            self.consistent &= message.flags() & NLM_F_DUMP_INTR == 0;
            match message.message_type() {
                NLMSG_NOOP => {}
                NLMSG_DONE => {
                    // A dump that failed halfway ends like this too, with the error (net/netlink/af_netlink.c,
                    // netlink_dump_done).
                    if !message.payload().is_empty() {
                        acknowledged(message.payload())?;
                    }
                    return Ok(true);
                }
                NLMSG_ERROR => {
                    acknowledged(message.payload())?;
                    return Ok(true);
                }
                _ => self.parts.push(message.payload().to_vec()),
            }
        }
        Ok(false)
    }
}

const HEADER: usize = 16;

fn acknowledged(payload: &[u8]) -> io::Result<()> {
    match payload.first_chunk().map(|code| i32::from_ne_bytes(*code)) {
        Some(0) => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(code.wrapping_neg())),
        None => Err(invalid(&"error message without a code")),
    }
}

fn invalid(why: &impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("netlink: {why}"))
}

/// Attributes for a message.
#[derive(Debug, Default)]
pub struct Attributes(Vec<u8>);

impl Attributes {
    /// A fixed header without attributes yet.
    pub fn after(header: &[u8]) -> Self {
        Self(header.to_vec())
    }

    /// Adds one attribute.
    #[must_use]
    pub fn with(mut self, kind: u16, value: &[u8]) -> Self {
        // Every value written here is shorter than a page.
        let length = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
        self.0.extend_from_slice(&length.to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    /// Adds a 32-bit number.
    #[must_use]
    pub fn with_u32(self, kind: u16, value: u32) -> Self {
        self.with(kind, &value.to_ne_bytes())
    }

    /// Adds a text, terminated by a zero byte.
    #[must_use]
    pub fn with_text(self, kind: u16, value: &str) -> Self {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.with(kind, &bytes)
    }

    /// Adds nested attributes.
    #[must_use]
    pub fn with_nested(self, kind: u16, nested: Attributes) -> Self {
        self.with(kind | NLA_F_NESTED, &nested.0)
    }

    /// The message's bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// The attributes of a message, as (kind, value). A malformed rest is left out.
pub fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    NlasIterator::new(bytes).map_while(Result::ok).map(|attribute| {
        let kind = attribute.kind();
        let end = usize::from(attribute.length());
        (kind, attribute.into_inner().get(4..end).unwrap_or_default())
    })
}

/// The first four bytes as a number.
pub fn read_u32(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.first_chunk()?))
}

/// The first two bytes as a number.
pub(crate) fn read_u16(bytes: &[u8]) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.first_chunk()?))
}

/// A text up to its zero byte. Bytes that are not UTF-8 are replaced.
pub fn read_text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(bytes.get(..end).unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RTM_GETSTATS. Without a filter mask the dump fails (`net/core/rtnetlink.c`, `rtnl_stats_dump`).
    const GETSTATS: u16 = 94;

    #[test]
    fn a_dump_that_fails_is_no_empty_one() {
        let mut netlink = Netlink::open(netlink_sys::protocols::NETLINK_ROUTE).unwrap();
        let failed = netlink.dump(GETSTATS, &[0; 12]).unwrap_err();
        assert_eq!(failed.raw_os_error(), Some(libc::EINVAL));
        // The socket is still usable.
        assert!(!link::links(&mut netlink).unwrap().is_empty());
    }
}
