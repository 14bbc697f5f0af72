//! What a VM may do with the host's network: default deny (pure).
//!
//! In: the rules of one VM and what a call asks for. Out: yes with the host's port, or the errno the guest gets.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::abi::Errno;
use crate::name;
use crate::request::Protocol;

/// The rules of one VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Local ports it may bind; port 0 stands for "any free one".
    pub bind: Vec<Ports>,
    /// Networks it may send to, connect to, or join groups of.
    pub reach: Vec<Network>,
    /// The guest's port and the host's, where they differ.
    pub map: Vec<Mapped>,
    /// Limits.
    pub limits: Limits,
}

/// How much a VM may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Sockets open at once: 1 to [`SOCKETS_MAX`].
    pub sockets: u32,
    /// Largest listen backlog, connections.
    pub backlog: i32,
    /// Largest SO_SNDBUF or SO_RCVBUF, bytes as given to setsockopt.
    pub buffer: i32,
    /// The most memory of the host's kernel that the data of all sockets may take, bytes. None: no such limit.
    pub memory: Option<u64>,
}

/// Buffers that a VM can fill for each of its `sockets`: a socket's two; what a closed connection still sends; what a
/// connection has received that nobody has accepted. A listener has no data of its own, so its two are those of the two
/// connections that it may queue beyond its part of the backlogs.
const BUFFERS: u64 = 4;
/// The kernel lets a buffer be exceeded by one packet, of at most 64 KiB and their overhead.
const PACKET: u64 = 128 << 10;
/// The kernel takes twice the size of a buffer that it is given, for its overhead.
const DOUBLED: u64 = 2;
/// The smallest buffer, bytes as given to setsockopt.
pub const BUFFER_MIN: i32 = 4_096;

impl Limits {
    /// The size of each buffer, as given to setsockopt, with which all of them together are within `memory`.
    pub fn buffer_of(memory: u64, sockets: u32) -> u64 {
        (memory / BUFFERS / u64::from(sockets.max(1))).saturating_sub(PACKET) / DOUBLED
    }

    /// The least `memory` for so many sockets.
    pub fn memory_min(sockets: u32) -> u64 {
        BUFFERS * u64::from(sockets) * (PACKET + DOUBLED * BUFFER_MIN as u64)
    }

    /// The size of each socket's buffers from the start, where the kernel may not choose it.
    pub fn fixed_buffer(&self) -> Option<i32> {
        let fair = Self::buffer_of(self.memory?, self.sockets);
        Some(i32::try_from(fair).unwrap_or(i32::MAX).clamp(BUFFER_MIN, self.buffer.max(BUFFER_MIN)))
    }

    /// The largest buffer that the guest gets, as given to setsockopt.
    pub fn largest_buffer(&self) -> i32 {
        self.fixed_buffer().unwrap_or(self.buffer)
    }
}

/// The most sockets a VM can have: a socket's number must fit beside the queues' in vhost-user-backend's 16-bit events.
pub const SOCKETS_MAX: u32 = 60_000;

impl Default for Limits {
    fn default() -> Self {
        Self { sockets: 1024, backlog: 128, buffer: 4 << 20, memory: None }
    }
}

/// A range of ports of a protocol, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ports {
    /// Which protocol.
    pub protocol: Protocol,
    /// The lowest.
    pub first: u16,
    /// The highest.
    pub last: u16,
}

/// A guest's port that is another one on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapped {
    /// Which protocol.
    pub protocol: Protocol,
    /// As the guest says it.
    pub guest: u16,
    /// As the host has it.
    pub host: u16,
}

/// An IP network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    prefix: u8,
}

impl Network {
    /// The network of `prefix` leading bits of `address`. None where the prefix is too long or other bits are set.
    pub fn new(address: IpAddr, prefix: u8) -> Option<Self> {
        let (bits, width) = bits(address);
        let host_bits = width.checked_sub(u32::from(prefix))?;
        let clear = host_bits == 128 && bits == 0 || host_bits < 128 && bits & ((1 << host_bits) - 1) == 0;
        clear.then_some(Self { address, prefix })
    }

    /// Whether the address is in it. An IPv4 network holds no IPv6 address, mapped ones excepted.
    pub fn holds(&self, address: IpAddr) -> bool {
        let ((own, width), (other, other_width)) = (bits(self.address), bits(address.to_canonical()));
        let host_bits = width - u32::from(self.prefix);
        width == other_width && (host_bits == 128 || own >> host_bits == other >> host_bits)
    }
}

/// As in sockets.toml.
impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

/// The prefix length of the special range that the address is in; 0 for an ordinary address.
///
/// Special are the addresses that no administrator means by "the Internet": this host's loopback, the links around the
/// host with the metadata services of clouds (169.254.169.254, fd00:ec2::254), multicast groups, and the broadcast of a
/// link. A network such as 0.0.0.0/0 does not stand for them.
fn special_prefix(address: IpAddr) -> u8 {
    const METADATA: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);
    match address {
        IpAddr::V4(v4) if v4.is_broadcast() => 32,
        IpAddr::V4(v4) if v4.is_link_local() => 16,
        IpAddr::V4(v4) if v4.is_loopback() || v4.octets()[0] == 0 => 8,
        IpAddr::V4(v4) if v4.is_multicast() => 4,
        IpAddr::V6(v6) if v6.is_loopback() || v6.is_unspecified() || v6 == METADATA => 128,
        IpAddr::V6(v6) if v6.is_unicast_link_local() => 10,
        IpAddr::V6(v6) if v6.is_multicast() => 8,
        _ => 0,
    }
}

/// An address as a number, and how many bits it has.
fn bits(address: IpAddr) -> (u128, u32) {
    match address {
        IpAddr::V4(v4) => (u128::from(v4.to_bits()), 32),
        IpAddr::V6(v6) => (v6.to_bits(), 128),
    }
}

impl Policy {
    /// The host's address for a bind.
    ///
    /// # Errors
    /// EACCES.
    pub fn bind(&self, protocol: Protocol, address: SocketAddr) -> Result<SocketAddr, Errno> {
        let port = address.port();
        let allowed =
            self.bind.iter().any(|ports| ports.protocol == protocol && (ports.first..=ports.last).contains(&port));
        if allowed { Ok(self.mapped(protocol, address)) } else { Err(Errno(libc::EACCES)) }
    }

    /// The host's address for a connect or a send. On the host itself the guest's own servers are at mapped ports.
    ///
    /// # Errors
    /// EPERM.
    pub fn reach(&self, protocol: Protocol, address: SocketAddr) -> Result<SocketAddr, Errno> {
        let destination = name::destination(address.ip());
        if !self.holds(destination) {
            return Err(Errno(libc::EPERM));
        }
        Ok(if destination.is_loopback() { self.mapped(protocol, address) } else { address })
    }

    /// Whether a multicast group may be joined.
    ///
    /// # Errors
    /// EPERM.
    pub fn join(&self, group: IpAddr) -> Result<(), Errno> {
        if self.holds(group) { Ok(()) } else { Err(Errno(libc::EPERM)) }
    }

    /// A local name of the host as the guest is to see it.
    pub fn seen(&self, protocol: Protocol, mut local: SocketAddr) -> SocketAddr {
        let port = local.port();
        if let Some(mapped) = self.map.iter().find(|mapped| mapped.protocol == protocol && mapped.host == port) {
            local.set_port(mapped.guest);
        }
        local
    }

    /// A network allows a special address only if the network lies within that address's special range.
    fn holds(&self, address: IpAddr) -> bool {
        let prefix = special_prefix(address.to_canonical());
        self.reach.iter().any(|network| network.prefix >= prefix && network.holds(address))
    }

    fn mapped(&self, protocol: Protocol, mut address: SocketAddr) -> SocketAddr {
        let port = address.port();
        if let Some(mapped) = self.map.iter().find(|mapped| mapped.protocol == protocol && mapped.guest == port) {
            address.set_port(mapped.host);
        }
        address
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(text: &str) -> Option<Network> {
        let (address, prefix) = text.split_once('/').unwrap();
        Network::new(address.parse().unwrap(), prefix.parse().unwrap())
    }

    fn policy() -> Policy {
        Policy {
            bind: vec![Ports { protocol: Protocol::Tcp, first: 80, last: 89 }],
            reach: ["192.0.2.0/24", "2001:db8::/32", "127.0.0.0/8", "239.1.0.0/16"]
                .map(|text| network(text).unwrap())
                .into(),
            map: vec![Mapped { protocol: Protocol::Tcp, guest: 80, host: 8080 }],
            limits: Limits::default(),
        }
    }

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn only_listed_ports_are_bound_and_mapped_both_ways() {
        let policy = policy();
        assert_eq!(policy.bind(Protocol::Tcp, at("0.0.0.0:80")), Ok(at("0.0.0.0:8080")));
        assert_eq!(policy.bind(Protocol::Tcp, at("[::]:81")), Ok(at("[::]:81")));
        for (protocol, address) in [
            (Protocol::Udp, "0.0.0.0:80"),
            (Protocol::Tcp, "0.0.0.0:90"),
            (Protocol::Tcp, "0.0.0.0:0"),
            (Protocol::Tcp, "0.0.0.0:8080"),
        ] {
            assert_eq!(policy.bind(protocol, at(address)), Err(Errno(libc::EACCES)), "{protocol:?} {address}");
        }
        assert_eq!(policy.seen(Protocol::Tcp, at("192.0.2.1:8080")), at("192.0.2.1:80"));
        assert_eq!(policy.seen(Protocol::Udp, at("192.0.2.1:8080")), at("192.0.2.1:8080"));
    }

    #[test]
    fn only_listed_networks_are_reached() {
        let policy = policy();
        assert_eq!(policy.reach(Protocol::Tcp, at("192.0.2.255:80")), Ok(at("192.0.2.255:80")));
        assert_eq!(policy.reach(Protocol::Tcp, at("[::ffff:192.0.2.3]:80")), Ok(at("[::ffff:192.0.2.3]:80")));
        assert_eq!(policy.reach(Protocol::Tcp, at("127.0.0.1:80")), Ok(at("127.0.0.1:8080")), "its own server");
        for address in ["192.0.3.0:80", "[2001:db9::1]:80", "[::ffff:192.0.3.1]:80", "[::1]:80", "[::]:80"] {
            assert_eq!(policy.reach(Protocol::Tcp, at(address)), Err(Errno(libc::EPERM)), "{address}");
        }
        assert_eq!(policy.join("239.1.2.3".parse().unwrap()), Ok(()));
        assert_eq!(policy.join("239.2.2.3".parse().unwrap()), Err(Errno(libc::EPERM)));
    }

    #[test]
    fn an_unspecified_address_is_this_host() {
        let nothing_local = Policy { reach: vec![network("192.0.2.0/24").unwrap()], ..policy() };
        assert_eq!(nothing_local.reach(Protocol::Tcp, at("0.0.0.0:22")), Err(Errno(libc::EPERM)));
        assert_eq!(nothing_local.reach(Protocol::Tcp, at("[::ffff:0.0.0.0]:22")), Err(Errno(libc::EPERM)));
    }

    /// Whoever writes `0.0.0.0/0` means the Internet, not the host's own servers or the cloud's metadata service.
    #[test]
    fn special_addresses_must_be_named() {
        let of = |networks: &[&str]| Policy {
            reach: networks.iter().map(|text| network(text).unwrap()).collect(),
            ..policy()
        };
        let everything = of(&["0.0.0.0/0", "::/0"]);
        assert_eq!(everything.reach(Protocol::Udp, at("198.51.100.7:53")), Ok(at("198.51.100.7:53")));
        assert_eq!(everything.reach(Protocol::Udp, at("[fd00::1]:53")), Ok(at("[fd00::1]:53")));
        // By special range: addresses in it, a network that is too wide to stand for it, one that does.
        for (addresses, wide, named) in [
            (
                ["127.0.0.1:80", "127.255.255.254:80", "[::ffff:127.9.9.9]:80", "0.0.0.0:80"],
                "126.0.0.0/7",
                "127.0.0.0/8",
            ),
            (
                ["169.254.169.254:80", "169.254.0.0:80", "[::ffff:169.254.169.254]:80", "169.254.255.255:1"],
                "169.252.0.0/14",
                "169.254.0.0/16",
            ),
            (
                ["224.0.0.251:5353", "239.255.255.255:1", "232.0.0.1:1", "[::ffff:224.0.0.1]:1"],
                "192.0.0.0/2",
                "224.0.0.0/4",
            ),
            (["255.255.255.255:67"; 4], "255.0.0.0/8", "255.255.255.255/32"),
            (["[::1]:80", "[::]:80", "[::1]:443", "[::]:443"], "::/64", "::1/128"),
            (["[fe80::1]:80", "[febf::1]:80", "[fe80::a9fe:a9fe]:80", "[fe80::]:80"], "fe80::/9", "fe80::/10"),
            (["[ff02::fb]:5353", "[ff01::1]:1", "[ff3e::1]:1", "[ffff::]:1"], "fc00::/6", "ff00::/8"),
            (["[fd00:ec2::254]:80"; 4], "fd00:ec2::/32", "fd00:ec2::254/128"),
        ] {
            for address in addresses.map(at) {
                assert_eq!(everything.reach(Protocol::Tcp, address), Err(Errno(libc::EPERM)), "{address} by 0.0.0.0/0");
                assert_eq!(of(&[wide]).reach(Protocol::Tcp, address), Err(Errno(libc::EPERM)), "{address} by {wide}");
                assert!(everything.join(address.ip()).is_err(), "{address}");
                assert!(of(&["0.0.0.0/0", named]).reach(Protocol::Tcp, address).is_ok(), "{address} by {named}");
            }
        }
    }

    #[test]
    fn without_rules_everything_is_denied() {
        let none = Policy { bind: vec![], reach: vec![], map: vec![], limits: Limits::default() };
        assert!(none.bind(Protocol::Udp, at("0.0.0.0:0")).is_err());
        assert!(none.reach(Protocol::Udp, at("127.0.0.1:1")).is_err());
    }

    /// `sockets` x buffers is at most `memory`, whatever these are.
    #[test]
    fn all_buffers_together_are_within_the_memory() {
        for sockets in [1, 2, 7, 128, 1_024, SOCKETS_MAX] {
            let least = Limits::memory_min(sockets);
            for memory in [least, least + 1, least * 3 + 5, 1 << 40] {
                let limits = Limits { sockets, memory: Some(memory), ..Limits::default() };
                let size = limits.fixed_buffer().unwrap();
                assert!((BUFFER_MIN..=limits.buffer).contains(&size), "{size} of {memory} for {sockets}");
                let all = 4 * u64::from(sockets) * (2 * size as u64 + (128 << 10));
                assert!(all <= memory, "{all} of {memory} for {sockets}");
            }
            assert!(Limits::buffer_of(least - 1, sockets) < BUFFER_MIN as u64);
        }
        assert_eq!((Limits::default().fixed_buffer(), Limits::default().largest_buffer()), (None, 4 << 20));
    }

    #[test]
    fn networks_have_no_host_bits() {
        for text in ["192.0.2.1/24", "::1/0", "10.0.0.0/33", "0.0.0.1/0"] {
            assert_eq!(network(text), None, "{text}");
        }
        let all = network("::/0").unwrap();
        assert!(all.holds("2001:db8::1".parse().unwrap()) && !all.holds("192.0.2.1".parse().unwrap()));
        assert!(network("0.0.0.0/0").unwrap().holds("192.0.2.1".parse().unwrap()));
        assert!(network("192.0.2.1/32").unwrap().holds("192.0.2.1".parse().unwrap()));
    }
}
