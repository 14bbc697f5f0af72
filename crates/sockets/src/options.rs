//! Socket options that are passed to the host's socket (pure data).
//!
//! Only options whose value contains no pointer are passed: with a pointer from the guest the host's kernel would read
//! this process's memory. Options that are not listed get ENOPROTOOPT; docs/design/sockets.md has the reasons.

use std::net::SocketAddr;

use crate::abi::Errno;
use libc::{IPPROTO_IP as IP, IPPROTO_IPV6 as V6, IPPROTO_TCP as TCP, IPPROTO_UDP as UDP, SOL_SOCKET as SOCKET};

/// How a guest may use an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Set and get.
    Both,
    /// Get only.
    Get,
    /// Set and get; a buffer size in bytes, limited by the policy.
    Buffer,
    /// Set only; as `Buffer`, but the answer is the size by the policy, of which the kernel takes what its own limits
    /// allow.
    BufferForce,
    /// Set and get; whether the kernel may resize a buffer. Forced to "no" if the policy fixes the sizes.
    BufferLock,
    /// Set and get; a number of queued connections, limited by the policy.
    Backlog,
    /// Set and get; whether the socket may share its port. The host's socket has it only while that is the guest's
    /// choice.
    Share,
    /// Set and get; the index of an interface, which may only be the loopback interface or none of the host's.
    Interface,
    /// Set and get; the index, in network byte order, of the interface that the socket sends by. In the host's own
    /// network it is limited as that of `Interface`.
    Route,
    /// Set and get; a set takes the host-wide `rtnl` lock, so its rate is limited.
    Rtnl,
    /// Set and get; the lowest and the highest port that the kernel may choose for the socket, which the policy must
    /// allow for a bind.
    LocalPorts,
    /// Set only; the value contains a multicast group that the policy must allow.
    Group(Group),
    /// As `Group`, and get; for a get the input value names the group.
    Filter(Group),
    /// Set and get; flags of time stamps, limited by `limit_stamps`.
    Stamps,
}

/// Where a multicast option's value holds the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// In the first 4 bytes.
    V4First,
    /// In the first 16 bytes.
    V6First,
    /// In a `sockaddr_storage` at byte 8 (`struct group_req`).
    Storage,
}

impl Group {
    /// Length of the shortest value that names a group, bytes; each option's structure is longer.
    pub fn shortest(self) -> usize {
        match self {
            Self::V4First => 4,
            Self::V6First => 16,
            Self::Storage => 8 + size_of::<libc::sockaddr_in>(),
        }
    }

    /// Limits the number of sources in a value for reading a source filter to those that the value has room for. The
    /// kernel copies as many sources as that number says, whatever the value's length (`net/ipv4/igmp.c`,
    /// `ip_mc_msfget`, `ip_mc_gsfget`; `net/ipv6/mcast.c`, `ip6_mc_msfget`).
    ///
    /// # Errors
    /// EINVAL if the value is too short for a filter without sources; ENOPROTOOPT if no filter names its group this
    /// way.
    pub(crate) fn limit_sources(self, value: &mut [u8]) -> Result<(), Errno> {
        // Where the number is, where the first source is, and the length of a source, bytes.
        let (number, first, each) = match self {
            // struct ip_msfilter
            Self::V4First => (12, 16, 4),
            // struct group_filter
            Self::Storage => (140, 144, size_of::<libc::sockaddr_storage>()),
            Self::V6First => return Err(Errno(libc::ENOPROTOOPT)),
        };
        let short = Errno(libc::EINVAL);
        let room = value.len().checked_sub(first).ok_or(short)? / each;
        let number = value.get_mut(number..).and_then(<[u8]>::first_chunk_mut).ok_or(short)?;
        *number = u32::from_ne_bytes(*number).min(room as u32).to_ne_bytes();
        Ok(())
    }
}

/// Flags of SO_TIMESTAMPING (include/uapi/linux/net_tstamp.h).
pub(crate) const SOF_TIMESTAMPING_TX_HARDWARE: u32 = 1;
const SOF_TIMESTAMPING_BIND_PHC: u32 = 1 << 15;

/// Limits the flags of SO_TIMESTAMPING to those that concern nothing but the socket. A NIC stamps one sent packet at a
/// time, for the whole host, and the synchronisation of the host's clock needs these stamps: the guest gets none.
///
/// # Errors
/// EOPNOTSUPP for the choice of a NIC's clock. The kernel gives a socket that is bound to no interface the same answer,
/// but writes a line to the host's log each time (`sock_timestamping_bind_phc`, net/core/sock.c).
pub(crate) fn limit_stamps(value: &mut [u8]) -> Result<(), Errno> {
    // The kernel refuses a value of fewer than 4 bytes.
    let Some(flags) = value.first_chunk_mut() else { return Ok(()) };
    let wanted = u32::from_ne_bytes(*flags);
    if wanted & SOF_TIMESTAMPING_BIND_PHC != 0 {
        return Err(Errno(libc::EOPNOTSUPP));
    }
    *flags = (wanted & !SOF_TIMESTAMPING_TX_HARDWARE).to_ne_bytes();
    Ok(())
}

/// How an option may be used; None if it is not passed.
pub fn access(level: i32, name: i32) -> Option<Access> {
    OPTIONS.iter().find(|option| (option.level, option.number) == (level, name)).map(|option| option.access)
}

/// Whether a socket may be bound to the interface with this index: 0 for none, the loopback interface, which is the
/// first one of each network namespace, or one that does not exist. The kernel counts the indices up, and takes one
/// that does not exist: such a socket sends and receives nothing.
pub(crate) fn harmless_interface(index: i32) -> bool {
    const LOOPBACK: i32 = 1;
    const FIRST_THAT_NO_HOST_HAS: i32 = 1 << 30;
    (0..=LOOPBACK).contains(&index) || index >= FIRST_THAT_NO_HOST_HAS
}

/// Whether the guest may choose the interface that an option's value names. `host_network`: the socket is in the host's
/// own network namespace, where another interface would lead past the host's routes.
pub(crate) fn may_choose_interface(access: Access, value: &[u8], host_network: bool) -> bool {
    // The kernel refuses a shorter value.
    let Some(index) = value.first_chunk() else { return true };
    match access {
        Access::Interface => harmless_interface(i32::from_ne_bytes(*index)),
        Access::Route => !host_network || harmless_interface(i32::from_be_bytes(*index)),
        _ => true,
    }
}

/// Whether a bind to this address leaves the socket's interface to the routes, as it must in the host's own network.
/// The kernel binds the socket to the interface that the scope id of a link-local address names, for whatever it sends,
/// also if the bind then fails (`__inet6_bind`). For other addresses it ignores the scope id.
pub(crate) fn binds_to_no_interface(address: SocketAddr) -> bool {
    link_of(address).is_none_or(|scope| i32::try_from(scope).is_ok_and(harmless_interface))
}

/// The scope id of an address that is one of a link; 0 where it has none. None for other addresses.
pub(crate) fn link_of(address: SocketAddr) -> Option<u32> {
    let SocketAddr::V6(v6) = address else { return None };
    // Multicast addresses of an interface (1) or a link (2) have a scope id as well.
    let group = matches!(v6.ip().octets(), [0xff, scope, ..] if matches!(scope & 0xf, 1 | 2));
    (group || v6.ip().is_unicast_link_local()).then(|| v6.scope_id())
}

/// Missing in the libc crate.
const IP_RECVFRAGSIZE: i32 = 25;
const IP_MSFILTER: i32 = 41;
const MCAST_MSFILTER: i32 = 48;
const IP_MULTICAST_ALL: i32 = 49;
const IP_PKTOPTIONS: i32 = 9;
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
const TCP_RTO_MAX_MS: i32 = 44;
const TCP_RTO_MIN_US: i32 = 45;
const TCP_DELACK_MAX_US: i32 = 46;
const SO_BUF_LOCK: i32 = 72;
const SO_TIMESTAMP_NEW: i32 = 63;
const SO_TIMESTAMPNS_NEW: i32 = 64;
const SO_TIMESTAMPING_NEW: i32 = 65;
pub(crate) const SO_BINDTOIFINDEX: i32 = 62;
const IP_RECVERR_RFC4884: i32 = 26;
const IPV6_ADDRFORM: i32 = 1;
const IPV6_2292PKTINFO: i32 = 2;
const IPV6_2292HOPOPTS: i32 = 3;
const IPV6_2292DSTOPTS: i32 = 4;
const IPV6_2292RTHDR: i32 = 5;
const IPV6_2292PKTOPTIONS: i32 = 6;
const IPV6_2292HOPLIMIT: i32 = 8;
const IPV6_FLOWINFO: i32 = 11;
const IPV6_ROUTER_ALERT_ISOLATE: i32 = 30;
const IPV6_RECVERR_RFC4884: i32 = 31;
const IPV6_FLOWINFO_SEND: i32 = 33;
const IPV6_ADDR_PREFERENCES: i32 = 72;

/// An option that is passed to the host's socket.
struct Passed {
    level: i32,
    number: i32,
    access: Access,
    /// For the table in docs/design/sockets.md.
    #[cfg_attr(not(test), allow(dead_code, reason = "a test compares the documentation with it"))]
    name: &'static str,
}

macro_rules! option {
    ($level:ident, $number:path, $access:expr) => {
        Passed { level: $level, number: $number, access: $access, name: stringify!($number) }
    };
}

const OPTIONS: &[Passed] = {
    use Access::{
        Backlog, Both, Buffer, BufferForce, BufferLock, Filter, Get, Group as Member, Interface, LocalPorts, Route,
        Rtnl, Share,
    };
    use Group::{Storage, V4First, V6First};
    &[
        option!(SOCKET, libc::SO_REUSEADDR, Both),
        option!(SOCKET, libc::SO_TYPE, Get),
        option!(SOCKET, libc::SO_ERROR, Get),
        option!(SOCKET, libc::SO_DONTROUTE, Both),
        option!(SOCKET, libc::SO_BROADCAST, Both),
        option!(SOCKET, libc::SO_SNDBUF, Buffer),
        option!(SOCKET, libc::SO_RCVBUF, Buffer),
        option!(SOCKET, libc::SO_SNDBUFFORCE, BufferForce),
        option!(SOCKET, libc::SO_RCVBUFFORCE, BufferForce),
        option!(SOCKET, libc::SO_NO_CHECK, Both),
        option!(SOCKET, libc::SO_PEEK_OFF, Both),
        option!(SOCKET, SO_BUF_LOCK, BufferLock),
        option!(SOCKET, libc::SO_KEEPALIVE, Both),
        option!(SOCKET, libc::SO_OOBINLINE, Both),
        option!(SOCKET, libc::SO_PRIORITY, Both),
        option!(SOCKET, libc::SO_REUSEPORT, Share),
        option!(SOCKET, libc::SO_RCVLOWAT, Both),
        option!(SOCKET, libc::SO_TIMESTAMP, Both),
        option!(SOCKET, libc::SO_ACCEPTCONN, Get),
        option!(SOCKET, libc::SO_TIMESTAMPNS, Both),
        option!(SOCKET, libc::SO_TIMESTAMPING, Access::Stamps),
        option!(SOCKET, libc::SO_PROTOCOL, Get),
        option!(SOCKET, libc::SO_DOMAIN, Get),
        option!(SOCKET, libc::SO_RXQ_OVFL, Both),
        option!(SOCKET, libc::SO_MAX_PACING_RATE, Both),
        option!(SOCKET, libc::SO_INCOMING_CPU, Get),
        option!(SOCKET, libc::SO_MEMINFO, Get),
        option!(SOCKET, libc::SO_COOKIE, Get),
        // Used by 32-bit programs with 64-bit time.
        option!(SOCKET, SO_TIMESTAMP_NEW, Both),
        option!(SOCKET, SO_TIMESTAMPNS_NEW, Both),
        option!(SOCKET, SO_TIMESTAMPING_NEW, Access::Stamps),
        option!(SOCKET, SO_BINDTOIFINDEX, Interface),
        option!(IP, libc::IP_TOS, Both),
        option!(IP, libc::IP_TTL, Both),
        option!(IP, libc::IP_PKTINFO, Both),
        option!(IP, libc::IP_MTU_DISCOVER, Both),
        option!(IP, libc::IP_RECVERR, Both),
        option!(IP, libc::IP_RECVTTL, Both),
        option!(IP, libc::IP_RECVTOS, Both),
        option!(IP, libc::IP_MTU, Get),
        option!(IP, libc::IP_MINTTL, Both),
        option!(IP, libc::IP_BIND_ADDRESS_NO_PORT, Both),
        option!(IP, libc::IP_MULTICAST_IF, Both),
        option!(IP, libc::IP_MULTICAST_TTL, Both),
        option!(IP, libc::IP_MULTICAST_LOOP, Both),
        option!(IP, libc::IP_ADD_MEMBERSHIP, Member(V4First)),
        option!(IP, libc::IP_DROP_MEMBERSHIP, Member(V4First)),
        option!(IP, libc::IP_ADD_SOURCE_MEMBERSHIP, Member(V4First)),
        option!(IP, libc::IP_DROP_SOURCE_MEMBERSHIP, Member(V4First)),
        option!(IP, libc::IP_BLOCK_SOURCE, Member(V4First)),
        option!(IP, libc::IP_UNBLOCK_SOURCE, Member(V4First)),
        option!(IP, IP_MSFILTER, Filter(V4First)),
        option!(IP, libc::MCAST_JOIN_GROUP, Member(Storage)),
        option!(IP, libc::MCAST_LEAVE_GROUP, Member(Storage)),
        option!(IP, libc::MCAST_BLOCK_SOURCE, Member(Storage)),
        option!(IP, libc::MCAST_UNBLOCK_SOURCE, Member(Storage)),
        option!(IP, libc::MCAST_JOIN_SOURCE_GROUP, Member(Storage)),
        option!(IP, libc::MCAST_LEAVE_SOURCE_GROUP, Member(Storage)),
        option!(IP, MCAST_MSFILTER, Filter(Storage)),
        option!(IP, libc::IP_RECVOPTS, Both),
        option!(IP, libc::IP_RETOPTS, Both),
        option!(IP, libc::IP_RECVORIGDSTADDR, Both),
        option!(IP, libc::IP_CHECKSUM, Both),
        option!(IP, IP_RECVFRAGSIZE, Both),
        option!(IP, IP_RECVERR_RFC4884, Both),
        option!(IP, IP_PROTOCOL, Get),
        option!(IP, IP_MULTICAST_ALL, Both),
        option!(IP, IP_UNICAST_IF, Route),
        option!(IP, IP_LOCAL_PORT_RANGE, LocalPorts),
        option!(IP, IP_PKTOPTIONS, Get),
        option!(TCP, libc::TCP_NODELAY, Both),
        option!(TCP, libc::TCP_MAXSEG, Both),
        option!(TCP, libc::TCP_CORK, Both),
        option!(TCP, libc::TCP_KEEPIDLE, Both),
        option!(TCP, libc::TCP_KEEPINTVL, Both),
        option!(TCP, libc::TCP_KEEPCNT, Both),
        option!(TCP, libc::TCP_SYNCNT, Both),
        option!(TCP, libc::TCP_LINGER2, Both),
        option!(TCP, libc::TCP_DEFER_ACCEPT, Both),
        option!(TCP, libc::TCP_WINDOW_CLAMP, Both),
        option!(TCP, libc::TCP_INFO, Get),
        option!(TCP, libc::TCP_QUICKACK, Both),
        option!(TCP, libc::TCP_CONGESTION, Both),
        option!(TCP, libc::TCP_THIN_LINEAR_TIMEOUTS, Both),
        option!(TCP, libc::TCP_USER_TIMEOUT, Both),
        option!(TCP, libc::TCP_NOTSENT_LOWAT, Both),
        option!(TCP, TCP_CC_INFO, Get),
        option!(TCP, TCP_INQ, Both),
        option!(TCP, libc::TCP_THIN_DUPACK, Both),
        option!(TCP, libc::TCP_SAVE_SYN, Both),
        option!(TCP, libc::TCP_SAVED_SYN, Get),
        option!(TCP, libc::TCP_FASTOPEN, Backlog),
        option!(TCP, TCP_FASTOPEN_NO_COOKIE, Both),
        option!(TCP, libc::TCP_TIMESTAMP, Get),
        option!(TCP, TCP_IS_MPTCP, Get),
        option!(TCP, TCP_RTO_MAX_MS, Both),
        option!(TCP, TCP_RTO_MIN_US, Both),
        option!(TCP, TCP_DELACK_MAX_US, Both),
        option!(UDP, libc::UDP_CORK, Both),
        option!(UDP, UDP_NO_CHECK6_TX, Both),
        option!(UDP, UDP_NO_CHECK6_RX, Both),
        option!(UDP, libc::UDP_SEGMENT, Both),
        option!(UDP, libc::UDP_GRO, Both),
        option!(V6, libc::IPV6_V6ONLY, Both),
        option!(V6, libc::IPV6_UNICAST_HOPS, Both),
        option!(V6, libc::IPV6_MULTICAST_IF, Both),
        option!(V6, libc::IPV6_MULTICAST_HOPS, Both),
        option!(V6, libc::IPV6_MULTICAST_LOOP, Both),
        option!(V6, libc::IPV6_ADD_MEMBERSHIP, Member(V6First)),
        option!(V6, libc::IPV6_DROP_MEMBERSHIP, Member(V6First)),
        option!(V6, libc::MCAST_JOIN_GROUP, Member(Storage)),
        option!(V6, libc::MCAST_LEAVE_GROUP, Member(Storage)),
        option!(V6, libc::MCAST_BLOCK_SOURCE, Member(Storage)),
        option!(V6, libc::MCAST_UNBLOCK_SOURCE, Member(Storage)),
        option!(V6, libc::MCAST_JOIN_SOURCE_GROUP, Member(Storage)),
        option!(V6, libc::MCAST_LEAVE_SOURCE_GROUP, Member(Storage)),
        option!(V6, MCAST_MSFILTER, Filter(Storage)),
        option!(V6, IPV6_2292PKTINFO, Both),
        option!(V6, IPV6_2292HOPOPTS, Both),
        option!(V6, IPV6_2292DSTOPTS, Both),
        option!(V6, IPV6_2292RTHDR, Both),
        option!(V6, IPV6_2292PKTOPTIONS, Get),
        option!(V6, IPV6_2292HOPLIMIT, Both),
        option!(V6, IPV6_FLOWINFO, Both),
        option!(V6, IPV6_FLOWINFO_SEND, Both),
        option!(V6, IPV6_ROUTER_ALERT_ISOLATE, Both),
        option!(V6, IPV6_RECVERR_RFC4884, Both),
        option!(V6, IPV6_ADDR_PREFERENCES, Both),
        option!(V6, libc::IPV6_RECVHOPOPTS, Both),
        option!(V6, libc::IPV6_RECVDSTOPTS, Both),
        option!(V6, libc::IPV6_RECVRTHDR, Both),
        option!(V6, libc::IPV6_RECVPATHMTU, Both),
        option!(V6, libc::IPV6_PATHMTU, Get),
        option!(V6, libc::IPV6_AUTOFLOWLABEL, Both),
        option!(V6, libc::IPV6_MINHOPCOUNT, Both),
        option!(V6, libc::IPV6_UNICAST_IF, Route),
        option!(V6, libc::IPV6_RECVORIGDSTADDR, Both),
        option!(V6, libc::IPV6_RECVFRAGSIZE, Both),
        option!(V6, libc::IPV6_MTU_DISCOVER, Both),
        option!(V6, libc::IPV6_MTU, Both),
        option!(V6, libc::IPV6_RECVERR, Both),
        option!(V6, libc::IPV6_RECVPKTINFO, Both),
        option!(V6, libc::IPV6_RECVHOPLIMIT, Both),
        option!(V6, libc::IPV6_RECVTCLASS, Both),
        option!(V6, libc::IPV6_TCLASS, Both),
        option!(V6, libc::IPV6_DONTFRAG, Both),
        option!(V6, IPV6_MULTICAST_ALL, Both),
        // An IPv6 socket with an IPv4 peer becomes one of IPv4.
        option!(V6, IPV6_ADDRFORM, Rtnl),
    ]
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_harm_the_host_is_not_passed() {
        // Programs given by pointer, other networks, marks that select routes, blocking closes, upper layer protocols.
        let harmful = [
            (SOCKET, libc::SO_ATTACH_FILTER),
            (SOCKET, libc::SO_ATTACH_BPF),
            (SOCKET, libc::SO_BINDTODEVICE),
            (SOCKET, libc::SO_MARK),
            (SOCKET, libc::SO_LINGER),
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
    fn no_socket_is_bound_to_an_interface_that_the_host_may_have() {
        for (index, harmless) in [(i32::MIN, false), (-1, false), (0, true), (1, true), (2, false), (3, false)] {
            assert_eq!(harmless_interface(index), harmless, "{index}");
        }
        for (index, harmless) in [((1 << 30) - 1, false), (1 << 30, true), (1 << 30 | 2, true), (i32::MAX, true)] {
            assert_eq!(harmless_interface(index), harmless, "{index}");
        }
    }

    #[test]
    fn a_guest_in_the_hosts_network_chooses_no_interface_of_the_host() {
        let may = |name, value: &[u8], host| may_choose_interface(access(IP, name).unwrap(), value, host);
        for (index, harmless) in [(0u32, true), (1, true), (2, false), (1 << 24, false), (1 << 30, true)] {
            assert_eq!(may(IP_UNICAST_IF, &index.to_be_bytes(), true), harmless, "{index}");
            assert!(may(IP_UNICAST_IF, &index.to_be_bytes(), false), "{index} in the VM's own network");
        }
        assert!(may(IP_UNICAST_IF, &[2, 0], true), "the kernel refuses it");
        assert!(may(libc::IP_TTL, &2i32.to_ne_bytes(), true), "no interface");
        let v6 = access(V6, libc::IPV6_UNICAST_IF).unwrap();
        assert!(!may_choose_interface(v6, &3u32.to_be_bytes(), true));
        let bound = access(SOCKET, SO_BINDTOIFINDEX).unwrap();
        for host in [false, true] {
            assert!(!may_choose_interface(bound, &2i32.to_ne_bytes(), host));
            assert!(may_choose_interface(bound, &1i32.to_ne_bytes(), host));
        }
    }

    #[test]
    fn a_scope_id_counts_where_the_kernel_reads_it() {
        for (address, leaves) in [
            ("127.0.0.1:7", true),
            ("[::]:7", true),
            ("[2001:db8::1%2]:7", true),
            ("[ff05::1%2]:7", true),
            ("[fec0::1%2]:7", true),
            ("[fe80::1]:7", true),
            ("[fe80::1%1]:7", true),
            ("[fe80::1%1073741824]:7", true),
            ("[fe80::1%2]:7", false),
            ("[febf::1%77]:7", false),
            ("[fe80::1%4294967295]:7", false),
            ("[ff02::fb%2]:7", false),
            ("[ff31::1%3]:7", false),
        ] {
            assert_eq!(binds_to_no_interface(address.parse().unwrap()), leaves, "{address}");
        }
    }

    #[test]
    fn each_option_is_listed_once() {
        for (at, option) in OPTIONS.iter().enumerate() {
            let first = OPTIONS.iter().position(|o| (o.level, o.number) == (option.level, option.number));
            assert_eq!(first, Some(at), "{}", option.name);
        }
    }

    /// The rows of the table in docs/design/sockets.md.
    fn rows() -> String {
        let levels = [
            (SOCKET, "SOL_SOCKET", "SO_"),
            (TCP, "TCP", "TCP_"),
            (UDP, "UDP", "UDP_"),
            (IP, "IP", "IP_"),
            (V6, "IPv6", "IPV6_"),
        ];
        let mut rows = String::new();
        for (level, title, prefix) in levels {
            let names = |wanted: &dyn Fn(Access) -> bool| {
                let chosen = OPTIONS.iter().filter(|option| option.level == level && wanted(option.access));
                let plain =
                    |option: &Passed| option.name.replace("libc :: ", "").replace("libc::", "").replace(prefix, "");
                chosen.map(plain).collect::<Vec<_>>().join(" ")
            };
            let read = names(&|access| access == Access::Get);
            let read = if read.is_empty() { read } else { format!("; to read: {read}") };
            rows += &format!("| {title} | {}{read} |\n", names(&|access| access != Access::Get));
        }
        rows
    }

    #[test]
    fn the_documentation_lists_the_options_that_are_passed() {
        let page = include_str!("../../../docs/design/sockets.md");
        assert!(
            page.contains(&rows()),
            "docs/design/sockets.md, \"What reaches the host's socket\", should have:\n{}",
            rows()
        );
    }

    /// An option, or several by the start of their names; their level and numbers.
    type Named = (&'static str, i32, &'static [i32]);

    /// What stays refused, and why, as docs/design/sockets.md says.
    const REFUSED: &[(&str, &[Named])] = &[
        (
            "pointers in the value",
            &[
                ("SO_ATTACH_FILTER", SOCKET, &[26]),
                ("SO_ATTACH_BPF", SOCKET, &[50]),
                ("SO_ATTACH_REUSEPORT", SOCKET, &[51, 52]),
                ("TCP_ZEROCOPY_RECEIVE", TCP, &[35]),
            ],
        ),
        (
            "leaving the VM's network",
            &[
                ("IP(V6)_TRANSPARENT", IP, &[19]),
                ("IP(V6)_TRANSPARENT", V6, &[75]),
                ("IP(V6)_FREEBIND", IP, &[15]),
                ("IP(V6)_FREEBIND", V6, &[78]),
                ("IPV6_JOIN_ANYCAST", V6, &[27]),
            ],
        ),
        (
            "keys, state, times or memory of the host's kernel",
            &[
                ("TCP_ULP", TCP, &[31]),
                ("TCP_REPAIR", TCP, &[19, 20, 21, 22, 29]),
                ("TCP_MD5SIG", TCP, &[14, 32]),
                ("TCP_AO", TCP, &[38, 39, 40, 41, 42]),
                ("TCP_FASTOPEN_KEY", TCP, &[33]),
                ("IP(V6)_IPSEC_POLICY", IP, &[16]),
                ("IP(V6)_IPSEC_POLICY", V6, &[34]),
                ("IP(V6)_XFRM_POLICY", IP, &[17]),
                ("IP(V6)_XFRM_POLICY", V6, &[35]),
                ("SO_TXTIME", SOCKET, &[61]),
                ("SO_RESERVE_MEM", SOCKET, &[73]),
                ("SO_DEVMEM_DONTNEED", SOCKET, &[80]),
            ],
        ),
        (
            "code of the host's kernel that each use patches for all CPUs",
            &[("TCP_TX_DELAY", TCP, &[37]), ("UDP_ENCAP", UDP, &[100]), ("IPV6_FLOWLABEL_MGR", V6, &[32])],
        ),
        (
            "headers of the guest's choice",
            &[
                ("IP_OPTIONS", IP, &[4]),
                ("IPV6_HOPOPTS", V6, &[54]),
                ("IPV6_RTHDR", V6, &[57]),
                ("IPV6_RTHDRDSTOPTS", V6, &[55]),
                ("IPV6_DSTOPTS", V6, &[59]),
                ("IPV6_PKTINFO", V6, &[50]),
                // It can be read.
                ("IPV6_2292PKTOPTIONS", V6, &[]),
            ],
        ),
        (
            "what no outsourced packet has",
            &[("IP_PASSSEC", IP, &[18]), ("SO_RCVMARK", SOCKET, &[75]), ("SO_RCVPRIORITY", SOCKET, &[82])],
        ),
    ];

    /// What the guest's kernel or module answers without the host (kernel/guest/opt.c).
    const KEPT: &[(i32, &[i32])] = &[
        (
            SOCKET,
            &[
                1, 13, 14, 16, 17, 19, 20, 21, 25, 27, 28, 31, 34, 36, 41, 43, 44, 45, 46, 48, 53, 56, 59, 60, 66, 67,
                68, 69, 70, 71, 74, 76, 77, 83, 84,
            ],
        ),
        (TCP, &[30]),
        (V6, &[28]),
    ];

    /// Numbers up to the last one of Linux 7.2 that are no option of a stream or datagram socket.
    const UNUSED: &[(i32, &[i32])] = &[
        (SOCKET, &[22, 23, 24, 54, 58, 78, 79, 81]),
        (TCP, &[15]),
        (IP, &[3, 5, 22, 27, 28, 29, 30, 31]),
        (V6, &[7, 9, 10, 12, 13, 14, 15, 22, 36, 37, 38, 39, 40, 41, 52, 63, 64, 65, 68, 69, 71]),
    ];

    #[test]
    fn each_option_of_linux_is_passed_or_kept_or_refused() {
        let listed = |table: &[(i32, &[i32])], level: i32, number: i32| {
            table.iter().any(|(of, numbers)| *of == level && numbers.contains(&number))
        };
        for (level, numbers) in [(SOCKET, 1..=84), (TCP, 1..=46), (UDP, 100..=104), (IP, 1..=52), (V6, 1..=78)] {
            for number in numbers {
                let refused = REFUSED
                    .iter()
                    .flat_map(|(_, options)| *options)
                    .any(|(_, of, numbers)| *of == level && numbers.contains(&number));
                let passed = access(level, number).is_some();
                let places = [passed, refused, listed(UNUSED, level, number)].into_iter().filter(|is| *is).count();
                // The guest keeps some that the host reads as well.
                let kept = usize::from(!passed && listed(KEPT, level, number));
                assert_eq!(places + kept, 1, "level {level}, option {number}");
            }
        }
    }

    #[test]
    fn the_documentation_lists_the_options_that_are_refused() {
        let page = include_str!("../../../docs/design/sockets.md");
        let refused = page.split_once("**Refused, and why:**").unwrap().1.split_once("\n## ").unwrap().0;
        let points: Vec<String> =
            refused.split("\n- ").skip(1).map(|point| point.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(points.len(), REFUSED.len());
        for (point, (why, options)) in points.iter().zip(REFUSED) {
            assert!(point.starts_with(&format!("{why}: ")), "not because of {why}: {point}");
            let is_name =
                |word: &&str| ["SO_", "IP_", "IP(V6)_", "IPV6_", "TCP_", "UDP_"].iter().any(|p| word.starts_with(*p));
            let names: Vec<&str> = point.split([' ', ',', ';', '.']).filter(is_name).collect();
            let mut expected: Vec<&str> = options.iter().map(|(name, ..)| *name).collect();
            expected.dedup();
            assert_eq!(names, expected, "docs/design/sockets.md, {why}");
        }
    }

    /// The kernel is never told of more sources than it has room for.
    #[test]
    fn a_filter_asks_for_as_many_sources_as_its_value_has_room_for() {
        for (group, number, first, each) in [(Group::V4First, 12, 16, 4), (Group::Storage, 140, 144, 128)] {
            assert_eq!(group.limit_sources(&mut vec![0xff; first - 1]), Err(Errno(libc::EINVAL)));
            for (len, wanted, limited) in [
                (first, u32::MAX, 0),
                (first + 2 * each - 1, 64, 1),
                (first + 2 * each, 3, 2),
                (first + 9 * each, 8, 8),
            ] {
                let mut value = vec![0xa5; len];
                value[number..number + 4].copy_from_slice(&u32::to_ne_bytes(wanted));
                let before = value.clone();
                group.limit_sources(&mut value).unwrap();
                let said = u32::from_ne_bytes(value[number..number + 4].try_into().unwrap());
                assert_eq!(said, limited, "{group:?}, {len} bytes, {wanted} sources");
                value[number..number + 4].copy_from_slice(&u32::to_ne_bytes(wanted));
                assert_eq!(value, before, "nothing else is changed");
            }
        }
        assert_eq!(Group::V6First.limit_sources(&mut [0; 4096]), Err(Errno(libc::ENOPROTOOPT)));
    }

    /// Of all 32 flags, one is refused and one is left out. `struct so_timestamping` has the clock behind the flags.
    #[test]
    fn stamps_concern_the_socket_only() {
        for bit in 0..32 {
            for rest in [vec![], vec![7, 0, 0, 0]] {
                let value = [&(1u32 << bit | 1 << 4).to_ne_bytes()[..], rest.as_slice()].concat();
                let mut limited = value.clone();
                match (bit, limit_stamps(&mut limited)) {
                    (15, done) => assert_eq!(done, Err(Errno(libc::EOPNOTSUPP))),
                    (0, Ok(())) => assert_eq!(limited, [&(1u32 << 4).to_ne_bytes()[..], rest.as_slice()].concat()),
                    (_, done) => assert_eq!((done, limited), (Ok(()), value), "bit {bit}"),
                }
            }
        }
        let mut short = [0xff; 3];
        assert_eq!((limit_stamps(&mut short), short), (Ok(()), [0xff; 3]));
    }

    #[test]
    fn short_values_name_no_group() {
        for option in OPTIONS {
            if let Access::Group(group) | Access::Filter(group) = option.access {
                assert!(group.shortest() >= 4, "{}", option.name);
            }
        }
    }
}
