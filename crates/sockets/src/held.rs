//! Sockets that the process keeps open for the whole of its life, so that a guest cannot switch the host's kernel back
//! and forth.
//!
//! The kernel patches its code (a static key) when the first socket of the whole host switches one of these options on,
//! and once more when the last such socket closes. Each switch interrupts every CPU. A guest that opens a socket, sets
//! the option and closes the socket, in a loop, would do that to all other tenants. While the process holds one socket
//! with the option on, the guest's sockets are never the first and never the last.
//!
//! | option | key (Linux 6.1 to 7.2) |
//! |---|---|
//! | SO_TIMESTAMP, SO_TIMESTAMPNS, SO_TIMESTAMPING | `netstamp_needed_key`, one for all three and both families |
//! | UDP_GRO | `udp_encap_needed_key`; of an AF_INET6 socket `udpv6_encap_needed_key` as well |
//! | IP_MINTTL, IPV6_MINHOPCOUNT | `ip4_min_ttl`, `ip6_min_hopcount`: they stay on; switched at process start |
//!
//! No other option that `options` passes has a key: those of MD5, AO and TX_DELAY of TCP, leases of flow labels and
//! SO_MEMALLOC are not passed.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::abi::Errno;
use crate::host;
use crate::request::{Family, Protocol};

/// The options that are held on, each on a socket of its own.
const HELD: [(Family, i32, i32); 5] = [
    (Family::V4, libc::SOL_SOCKET, libc::SO_TIMESTAMP),
    (Family::V4, libc::IPPROTO_UDP, libc::UDP_GRO),
    (Family::V6, libc::IPPROTO_UDP, libc::UDP_GRO),
    (Family::V4, libc::IPPROTO_IP, libc::IP_MINTTL),
    (Family::V6, libc::IPPROTO_IPV6, libc::IPV6_MINHOPCOUNT),
];

/// The held sockets.
#[derive(Debug)]
pub(crate) struct Held {
    _sockets: Vec<OwnedFd>,
    /// Whether the host's kernel has IPv6. Without IPv6, each attempt to open such a socket makes the kernel start
    /// `modprobe`.
    pub ipv6: bool,
}

impl Held {
    /// Opens the sockets. A kernel that does not know an option has no static key for it either.
    ///
    /// # Errors
    /// If a socket cannot be created.
    pub(crate) fn open() -> Result<Self, Errno> {
        let mut held = Self { _sockets: Vec::new(), ipv6: true };
        for (family, level, option) in HELD {
            match host::socket(family, Protocol::Udp) {
                Ok(fd) => {
                    // SAFETY: a new descriptor that nothing else owns.
                    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
                    match host::set_option(socket.as_raw_fd(), level, option, &1i32.to_ne_bytes()) {
                        Ok(()) | Err(Errno(libc::ENOPROTOOPT)) => held._sockets.push(socket),
                        Err(error) => return Err(error),
                    }
                }
                Err(Errno(libc::EAFNOSUPPORT)) if family == Family::V6 => held.ipv6 = false,
                Err(error) => return Err(error),
            }
        }
        Ok(held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options;

    /// Each held option is one that a guest may set; otherwise it would be held for nothing.
    #[test]
    fn what_is_held_is_what_a_guest_may_set() {
        for (_, level, option) in HELD {
            assert!(options::access(level, option).is_some(), "level {level}, option {option}");
        }
    }
}
