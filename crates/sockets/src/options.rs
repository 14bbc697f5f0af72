//! Socket options: which reach the host's socket (pure data).
//!
//! Only options whose value is flat: one with a pointer in it would make the host's kernel read this process's memory
//! where a guest says. What is missing here is refused with ENOPROTOOPT; docs/sockets.md has the reasons.

use libc::{IPPROTO_IP as IP, IPPROTO_IPV6 as V6, IPPROTO_TCP as TCP, IPPROTO_UDP as UDP, SOL_SOCKET as SOCKET};

/// What may be done with an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Set and get.
    Both,
    /// Only get.
    Get,
    /// Set and get; a buffer size in bytes, clamped to the policy's.
    Buffer,
    /// Set; a number of connections that wait, clamped to the policy's.
    Backlog,
    /// Set; the value begins with or holds a multicast group the policy must allow.
    Group(Group),
    /// As `Group`, and get, for which the value that is passed in names the group.
    Filter(Group),
}

/// How a multicast option names its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// The first 4 bytes.
    V4First,
    /// The first 16 bytes.
    V6First,
    /// A `sockaddr_storage` at byte 8 (`struct group_req`).
    Storage,
}

/// Says what may be done with an option; None where it is not passed.
pub fn access(level: i32, name: i32) -> Option<Access> {
    OPTIONS.iter().find(|(l, n, _)| (*l, *n) == (level, name)).map(|(_, _, access)| *access)
}

/// Not in the libc crate.
const IP_RECVFRAGSIZE: i32 = 25;
const IP_MSFILTER: i32 = 41;
const MCAST_MSFILTER: i32 = 48;
const IP_MULTICAST_ALL: i32 = 49;
const IP_PROTOCOL: i32 = 52;
const IP_UNICAST_IF: i32 = 50;
const IP_LOCAL_PORT_RANGE: i32 = 51;
const IPV6_MULTICAST_ALL: i32 = 29;
const UDP_NO_CHECK6_TX: i32 = 101;
const UDP_NO_CHECK6_RX: i32 = 102;
const TCP_CC_INFO: i32 = 26;
const TCP_FASTOPEN_NO_COOKIE: i32 = 34;
const TCP_INQ: i32 = 36;
const TCP_IS_MPTCP: i32 = 43;
const SO_BUF_LOCK: i32 = 72;
const IP_RECVERR_RFC4884: i32 = 26;
const IPV6_ADDRFORM: i32 = 1;
const IPV6_2292PKTINFO: i32 = 2;
const IPV6_2292HOPOPTS: i32 = 3;
const IPV6_2292DSTOPTS: i32 = 4;
const IPV6_2292RTHDR: i32 = 5;
const IPV6_2292HOPLIMIT: i32 = 8;
const IPV6_FLOWINFO: i32 = 11;
const IPV6_RECVERR_RFC4884: i32 = 31;
const IPV6_ADDR_PREFERENCES: i32 = 72;

const OPTIONS: &[(i32, i32, Access)] = {
    use Access::{Backlog, Both, Buffer, Filter, Get, Group as Member};
    use Group::{Storage, V4First, V6First};
    &[
        (SOCKET, libc::SO_REUSEADDR, Both),
        (SOCKET, libc::SO_TYPE, Get),
        (SOCKET, libc::SO_ERROR, Get),
        (SOCKET, libc::SO_DONTROUTE, Both),
        (SOCKET, libc::SO_BROADCAST, Both),
        (SOCKET, libc::SO_SNDBUF, Buffer),
        (SOCKET, libc::SO_RCVBUF, Buffer),
        (SOCKET, libc::SO_NO_CHECK, Both),
        (SOCKET, libc::SO_PEEK_OFF, Both),
        (SOCKET, SO_BUF_LOCK, Both),
        (SOCKET, libc::SO_KEEPALIVE, Both),
        (SOCKET, libc::SO_OOBINLINE, Both),
        (SOCKET, libc::SO_PRIORITY, Both),
        (SOCKET, libc::SO_REUSEPORT, Both),
        (SOCKET, libc::SO_RCVLOWAT, Both),
        (SOCKET, libc::SO_TIMESTAMP, Both),
        (SOCKET, libc::SO_ACCEPTCONN, Get),
        (SOCKET, libc::SO_TIMESTAMPNS, Both),
        (SOCKET, libc::SO_TIMESTAMPING, Both),
        (SOCKET, libc::SO_PROTOCOL, Get),
        (SOCKET, libc::SO_DOMAIN, Get),
        (SOCKET, libc::SO_RXQ_OVFL, Both),
        (SOCKET, libc::SO_MAX_PACING_RATE, Both),
        (SOCKET, libc::SO_INCOMING_CPU, Get),
        (SOCKET, libc::SO_MEMINFO, Get),
        (SOCKET, libc::SO_COOKIE, Get),
        // SO_TIMESTAMP_NEW, SO_TIMESTAMPNS_NEW, SO_TIMESTAMPING_NEW: 32-bit programs with 64-bit time.
        (SOCKET, 63, Both),
        (SOCKET, 64, Both),
        (SOCKET, 65, Both),
        (IP, libc::IP_TOS, Both),
        (IP, libc::IP_TTL, Both),
        (IP, libc::IP_PKTINFO, Both),
        (IP, libc::IP_MTU_DISCOVER, Both),
        (IP, libc::IP_RECVERR, Both),
        (IP, libc::IP_RECVTTL, Both),
        (IP, libc::IP_RECVTOS, Both),
        (IP, libc::IP_MTU, Get),
        (IP, libc::IP_MINTTL, Both),
        (IP, libc::IP_BIND_ADDRESS_NO_PORT, Both),
        (IP, libc::IP_MULTICAST_IF, Both),
        (IP, libc::IP_MULTICAST_TTL, Both),
        (IP, libc::IP_MULTICAST_LOOP, Both),
        (IP, libc::IP_ADD_MEMBERSHIP, Member(V4First)),
        (IP, libc::IP_DROP_MEMBERSHIP, Member(V4First)),
        (IP, libc::IP_ADD_SOURCE_MEMBERSHIP, Member(V4First)),
        (IP, libc::IP_DROP_SOURCE_MEMBERSHIP, Member(V4First)),
        (IP, libc::IP_BLOCK_SOURCE, Member(V4First)),
        (IP, libc::IP_UNBLOCK_SOURCE, Member(V4First)),
        (IP, IP_MSFILTER, Filter(V4First)),
        (IP, libc::MCAST_JOIN_GROUP, Member(Storage)),
        (IP, libc::MCAST_LEAVE_GROUP, Member(Storage)),
        (IP, libc::MCAST_BLOCK_SOURCE, Member(Storage)),
        (IP, libc::MCAST_UNBLOCK_SOURCE, Member(Storage)),
        (IP, libc::MCAST_JOIN_SOURCE_GROUP, Member(Storage)),
        (IP, libc::MCAST_LEAVE_SOURCE_GROUP, Member(Storage)),
        (IP, MCAST_MSFILTER, Filter(Storage)),
        (IP, libc::IP_RECVOPTS, Both),
        (IP, libc::IP_RETOPTS, Both),
        (IP, libc::IP_RECVORIGDSTADDR, Both),
        (IP, libc::IP_CHECKSUM, Both),
        (IP, IP_RECVFRAGSIZE, Both),
        (IP, IP_RECVERR_RFC4884, Both),
        (IP, IP_PROTOCOL, Get),
        (IP, IP_MULTICAST_ALL, Both),
        (IP, IP_UNICAST_IF, Both),
        // To set it is to choose a local port without a bind.
        (IP, IP_LOCAL_PORT_RANGE, Get),
        (TCP, libc::TCP_NODELAY, Both),
        (TCP, libc::TCP_MAXSEG, Both),
        (TCP, libc::TCP_CORK, Both),
        (TCP, libc::TCP_KEEPIDLE, Both),
        (TCP, libc::TCP_KEEPINTVL, Both),
        (TCP, libc::TCP_KEEPCNT, Both),
        (TCP, libc::TCP_SYNCNT, Both),
        (TCP, libc::TCP_LINGER2, Both),
        (TCP, libc::TCP_DEFER_ACCEPT, Both),
        (TCP, libc::TCP_WINDOW_CLAMP, Both),
        (TCP, libc::TCP_INFO, Get),
        (TCP, libc::TCP_QUICKACK, Both),
        (TCP, libc::TCP_CONGESTION, Both),
        (TCP, libc::TCP_THIN_LINEAR_TIMEOUTS, Both),
        (TCP, libc::TCP_USER_TIMEOUT, Both),
        (TCP, libc::TCP_NOTSENT_LOWAT, Both),
        (TCP, TCP_CC_INFO, Get),
        (TCP, TCP_INQ, Both),
        (TCP, libc::TCP_THIN_DUPACK, Both),
        (TCP, libc::TCP_SAVE_SYN, Both),
        (TCP, libc::TCP_SAVED_SYN, Get),
        (TCP, libc::TCP_FASTOPEN, Backlog),
        (TCP, TCP_FASTOPEN_NO_COOKIE, Both),
        (TCP, libc::TCP_TIMESTAMP, Get),
        (TCP, TCP_IS_MPTCP, Get),
        (UDP, libc::UDP_CORK, Both),
        (UDP, UDP_NO_CHECK6_TX, Both),
        (UDP, UDP_NO_CHECK6_RX, Both),
        (UDP, libc::UDP_SEGMENT, Both),
        (UDP, libc::UDP_GRO, Both),
        (V6, libc::IPV6_V6ONLY, Both),
        (V6, libc::IPV6_UNICAST_HOPS, Both),
        (V6, libc::IPV6_MULTICAST_IF, Both),
        (V6, libc::IPV6_MULTICAST_HOPS, Both),
        (V6, libc::IPV6_MULTICAST_LOOP, Both),
        (V6, libc::IPV6_ADD_MEMBERSHIP, Member(V6First)),
        (V6, libc::IPV6_DROP_MEMBERSHIP, Member(V6First)),
        (V6, libc::MCAST_JOIN_GROUP, Member(Storage)),
        (V6, libc::MCAST_LEAVE_GROUP, Member(Storage)),
        (V6, libc::MCAST_BLOCK_SOURCE, Member(Storage)),
        (V6, libc::MCAST_UNBLOCK_SOURCE, Member(Storage)),
        (V6, libc::MCAST_JOIN_SOURCE_GROUP, Member(Storage)),
        (V6, libc::MCAST_LEAVE_SOURCE_GROUP, Member(Storage)),
        (V6, MCAST_MSFILTER, Filter(Storage)),
        (V6, IPV6_ADDRFORM, Both),
        (V6, IPV6_2292PKTINFO, Both),
        (V6, IPV6_2292HOPOPTS, Both),
        (V6, IPV6_2292DSTOPTS, Both),
        (V6, IPV6_2292RTHDR, Both),
        (V6, IPV6_2292HOPLIMIT, Both),
        (V6, IPV6_FLOWINFO, Both),
        (V6, IPV6_RECVERR_RFC4884, Both),
        (V6, IPV6_ADDR_PREFERENCES, Both),
        (V6, libc::IPV6_RECVHOPOPTS, Both),
        (V6, libc::IPV6_RECVDSTOPTS, Both),
        (V6, libc::IPV6_RECVRTHDR, Both),
        (V6, libc::IPV6_RECVPATHMTU, Both),
        (V6, libc::IPV6_PATHMTU, Get),
        (V6, libc::IPV6_AUTOFLOWLABEL, Both),
        (V6, libc::IPV6_MINHOPCOUNT, Both),
        (V6, libc::IPV6_UNICAST_IF, Both),
        (V6, libc::IPV6_RECVORIGDSTADDR, Both),
        (V6, libc::IPV6_RECVFRAGSIZE, Both),
        (V6, libc::IPV6_MTU_DISCOVER, Both),
        (V6, libc::IPV6_MTU, Both),
        (V6, libc::IPV6_RECVERR, Both),
        (V6, libc::IPV6_RECVPKTINFO, Both),
        (V6, libc::IPV6_RECVHOPLIMIT, Both),
        (V6, libc::IPV6_RECVTCLASS, Both),
        (V6, libc::IPV6_TCLASS, Both),
        (V6, libc::IPV6_DONTFRAG, Both),
        (V6, IPV6_MULTICAST_ALL, Both),
    ]
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_harm_the_host_is_not_passed() {
        // Programs by pointer, other networks, marks that choose routes, blocking closes, upper layer protocols.
        let harmful = [
            (SOCKET, libc::SO_ATTACH_FILTER),
            (SOCKET, libc::SO_ATTACH_BPF),
            (SOCKET, libc::SO_BINDTODEVICE),
            (SOCKET, libc::SO_MARK),
            (SOCKET, libc::SO_LINGER),
            (SOCKET, libc::SO_RCVBUFFORCE),
            (SOCKET, libc::SO_BUSY_POLL),
            (TCP, libc::TCP_ULP),
            (TCP, libc::TCP_ZEROCOPY_RECEIVE),
            (TCP, libc::TCP_REPAIR),
            (TCP, libc::TCP_FASTOPEN_CONNECT),
            (IP, libc::IP_TRANSPARENT),
            (IP, libc::IP_FREEBIND),
            (IP, libc::IP_HDRINCL),
        ];
        for (level, name) in harmful {
            assert_eq!(access(level, name), None, "level {level}, option {name}");
        }
    }

    #[test]
    fn each_option_is_listed_once() {
        for (at, (level, name, _)) in OPTIONS.iter().enumerate() {
            let first = OPTIONS.iter().position(|(l, n, _)| (l, n) == (level, name));
            assert_eq!(first, Some(at), "level {level}, option {name}");
        }
    }
}
