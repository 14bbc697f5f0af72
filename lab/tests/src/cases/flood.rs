//! A flood of small packets from the clients' side. Their CPU is as fast as one of the host's, so it sends many with
//! one system call (`UDP_SEGMENT`, udp(7)).

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;

use anyhow::{Context, Result};

/// Payload of a packet, bytes.
const BYTES: usize = 16;
/// Packets that a system call sends.
const PACKETS: usize = 64;

/// The sender.
pub(crate) struct Flood(UdpSocket);

impl Flood {
    /// Packets to a port of the host's bulk network at which no program listens.
    pub(crate) fn to_bulk_network() -> Result<Self> {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).context("a socket")?;
        socket.connect(SocketAddr::from((Ipv4Addr::new(10, 2, 0, 9), 9))).context("the bulk network")?;
        let bytes = BYTES as libc::c_int;
        let length = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: the pointer is to a live int of that length, which setsockopt(2) only reads.
        let set = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_UDP,
                libc::UDP_SEGMENT,
                (&raw const bytes).cast::<libc::c_void>(),
                length,
            )
        };
        if set != 0 {
            return Err(std::io::Error::last_os_error()).context("UDP_SEGMENT");
        }
        Ok(Self(socket))
    }

    /// Sends some packets.
    pub(crate) fn send(&self) {
        // A packet that does not fit into a queue is lost, and the host answers "port unreachable". Neither ends it.
        let _ = self.0.send(&[b'x'; BYTES * PACKETS]);
    }
}
