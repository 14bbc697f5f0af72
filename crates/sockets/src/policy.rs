//! What a VM may do with the host's network; everything else is denied (pure).
//!
//! Input: the rules of one VM and a call's arguments. Output: the host's address and port, or the errno for the guest.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::abi::Errno;
use crate::name;
use crate::request::Protocol;

/// The rules of one VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Local ports that the VM may bind. Port 0 stands for "any free port".
    pub bind: Vec<Ports>,
    /// Networks that the VM may connect or send to, or whose groups it may join.
    pub reach: Vec<Network>,
    /// Ports that have different numbers in the guest and on the host.
    pub map: Vec<Mapped>,
    /// Resource limits.
    pub limits: Limits,
}

/// Resource limits of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most open sockets: 1 to [`SOCKETS_MAX`].
    pub sockets: u32,
    /// Largest listen backlog, connections.
    pub backlog: i32,
    /// Largest SO_SNDBUF or SO_RCVBUF, bytes as given to setsockopt.
    pub buffer: i32,
    /// Most host kernel memory for the data of all sockets, bytes. None: no limit.
    pub memory: Option<u64>,
}

/// Buffers per socket that a VM can fill: the socket's two; one with data that a closed connection still sends; one
/// with data that a connection in a backlog has received. A listener has no data of its own, so its two count for the
/// two connections that it may queue beyond its part of the backlogs.
const BUFFERS: u64 = 4;
/// The kernel lets a buffer exceed its size by one packet of at most 64 KiB plus overhead, bytes.
const PACKET: u64 = 128 << 10;
/// The kernel doubles a given buffer size to account for overhead.
const DOUBLED: u64 = 2;
/// Smallest buffer, bytes as given to setsockopt.
pub(crate) const BUFFER_MIN: i32 = 4_096;

impl Limits {
    /// The size per buffer, as given to setsockopt, with which all buffers together stay within `memory`.
    pub(crate) fn buffer_of(memory: u64, sockets: u32) -> u64 {
        (memory / BUFFERS / u64::from(sockets.max(1))).saturating_sub(PACKET) / DOUBLED
    }

    /// The least `memory` for this many sockets, bytes.
    pub(crate) fn memory_min(sockets: u32) -> u64 {
        BUFFERS * u64::from(sockets) * (PACKET + DOUBLED * BUFFER_MIN as u64)
    }

    /// The fixed size of each socket's buffers, as given to setsockopt. None: the kernel chooses it.
    pub fn fixed_buffer(&self) -> Option<i32> {
        let fair = Self::buffer_of(self.memory?, self.sockets);
        Some(i32::try_from(fair).unwrap_or(i32::MAX).clamp(BUFFER_MIN, self.buffer.max(BUFFER_MIN)))
    }

    /// The largest buffer that the guest gets, as given to setsockopt.
    pub(crate) fn largest_buffer(&self) -> i32 {
        self.fixed_buffer().unwrap_or(self.buffer)
    }
}

/// The most sockets of a VM: socket and queue numbers share vhost-user-backend's 16-bit event numbers.
pub(crate) const SOCKETS_MAX: u32 = 60_000;

impl Default for Limits {
    fn default() -> Self {
        Self { sockets: 1024, backlog: 128, buffer: 4 << 20, memory: None }
    }
}

/// A range of ports of a protocol, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ports {
    /// TCP and UDP have separate port numbers.
    pub protocol: Protocol,
    /// The lowest port.
    pub first: u16,
    /// The highest port.
    pub last: u16,
}

/// A port with different numbers in the guest and on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapped {
    /// TCP and UDP have separate port numbers.
    pub protocol: Protocol,
    /// The guest's port.
    pub guest: u16,
    /// The host's port.
    pub host: u16,
}

/// An IP network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    prefix: u8,
}

impl Network {
    /// The network of `prefix` leading bits of `address`. None if the prefix is too long or other bits are set.
    pub fn new(address: IpAddr, prefix: u8) -> Option<Self> {
        let (bits, width) = bits(address);
        let host_bits = width.checked_sub(u32::from(prefix))?;
        let clear = host_bits == 128 && bits == 0 || host_bits < 128 && bits & ((1 << host_bits) - 1) == 0;
        clear.then_some(Self { address, prefix })
    }

    /// Whether the network contains the address. An IPv4 network contains no IPv6 addresses except IPv4-mapped ones.
    pub fn holds(&self, address: IpAddr) -> bool {
        let ((own, width), (other, other_width)) = (bits(self.address), bits(address.to_canonical()));
        let host_bits = width - u32::from(self.prefix);
        width == other_width && (host_bits == 128 || own >> host_bits == other >> host_bits)
    }
}

/// The notation of sockets.toml.
impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

/// Prefix length of the special range that contains the address; 0 for an ordinary address.
///
/// Special addresses are those that an administrator does not mean by "the Internet": this host's loopback, the links
/// around the host with most clouds' metadata service (169.254.169.254), metadata services elsewhere, multicast groups,
/// the broadcast address, and what NAT64 translates to these. A network such as 0.0.0.0/0 does not include them.
fn special_prefix(address: IpAddr) -> u8 {
    // Alibaba Cloud, Azure, Oracle Cloud Classic.
    const METADATA_V4: [Ipv4Addr; 3] =
        [Ipv4Addr::new(100, 100, 100, 200), Ipv4Addr::new(168, 63, 129, 16), Ipv4Addr::new(192, 0, 0, 192)];
    // AWS, Google Cloud, Oracle Cloud, Scaleway.
    const METADATA_V6: [Ipv6Addr; 4] = [
        Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254),
        Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254),
        Ipv6Addr::new(0xfd00, 0xc1, 0, 0, 0, 0, 0xa9fe, 0xa9fe),
        Ipv6Addr::new(0xfd00, 0x42, 0, 0, 0, 0, 0, 0x42),
    ];
    match address {
        IpAddr::V4(v4) if METADATA_V4.contains(&v4) => 32,
        IpAddr::V4(v4) if v4.is_broadcast() => 32,
        IpAddr::V4(v4) if v4.is_link_local() => 16,
        IpAddr::V4(v4) if v4.is_loopback() || v4.octets()[0] == 0 => 8,
        IpAddr::V4(v4) if v4.is_multicast() => 4,
        IpAddr::V6(v6) if v6.is_loopback() || v6.is_unspecified() || METADATA_V6.contains(&v6) => 128,
        IpAddr::V6(v6) if v6.is_unicast_link_local() => 10,
        IpAddr::V6(v6) if v6.is_multicast() => 8,
        IpAddr::V6(v6) => match v6.segments() {
            // NAT64 translates the last 32 bits: 64:ff9b::/96, and any /96 of 64:ff9b:1::/48 (RFC 8215).
            [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x64, 0xff9b, 1, _, _, _, high, low] => {
                match special_prefix(Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low)).into()) {
                    0 => 0,
                    prefix => 96 + prefix,
                }
            }
            _ => 0,
        },
        IpAddr::V4(_) => 0,
    }
}

/// An address as a number, and its width in bits.
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
    /// EACCES if no rule allows it.
    pub fn bind(&self, protocol: Protocol, address: SocketAddr) -> Result<SocketAddr, Errno> {
        let port = address.port();
        let allowed =
            self.bind.iter().any(|ports| ports.protocol == protocol && (ports.first..=ports.last).contains(&port));
        if allowed { Ok(self.mapped(protocol, address)) } else { Err(Errno(libc::EACCES)) }
    }

    /// Whether the kernel may choose a local port among these for the guest; 0 stands for the lowest or highest that it
    /// would choose anyway.
    ///
    /// # Errors
    /// EACCES if no rule allows all of them, or one has another number on the host.
    pub fn bind_among(&self, protocol: Protocol, lowest: u16, highest: u16) -> Result<(), Errno> {
        let chosen = lowest.max(1)..=if highest == 0 { u16::MAX } else { highest };
        let allowed = self
            .bind
            .iter()
            .any(|ports| ports.protocol == protocol && ports.first <= *chosen.start() && *chosen.end() <= ports.last);
        let mapped = self.map.iter().any(|mapped| {
            mapped.protocol == protocol && (chosen.contains(&mapped.guest) || chosen.contains(&mapped.host))
        });
        if allowed && !mapped { Ok(()) } else { Err(Errno(libc::EACCES)) }
    }

    /// The host's address for a connect or a send. On the host itself, the guest's own servers are at mapped ports.
    ///
    /// # Errors
    /// EPERM if no rule allows it.
    pub fn reach(&self, protocol: Protocol, address: SocketAddr) -> Result<SocketAddr, Errno> {
        let destination = name::destination(address.ip());
        if !self.holds(destination) {
            return Err(Errno(libc::EPERM));
        }
        Ok(if destination.is_loopback() { self.mapped(protocol, address) } else { address })
    }

    /// Whether the VM may join a multicast group.
    ///
    /// # Errors
    /// EPERM if no rule allows it.
    pub fn join(&self, group: IpAddr) -> Result<(), Errno> {
        if self.holds(group) { Ok(()) } else { Err(Errno(libc::EPERM)) }
    }

    /// A local address of the host as the guest sees it.
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
    fn the_kernel_chooses_among_listed_ports_only() {
        let tcp = |lowest, highest| policy().bind_among(Protocol::Tcp, lowest, highest);
        for (lowest, highest) in [(81, 89), (85, 85)] {
            assert_eq!(tcp(lowest, highest), Ok(()), "{lowest} to {highest}");
            assert_eq!(policy().bind_among(Protocol::Udp, lowest, highest), Err(Errno(libc::EACCES)));
        }
        // Port 80 is another one on the host; 0 is the lowest or the highest.
        for (lowest, highest) in [(80, 89), (80, 80), (81, 90), (90, 99), (0, 89), (81, 0), (8080, 8080)] {
            assert_eq!(tcp(lowest, highest), Err(Errno(libc::EACCES)), "{lowest} to {highest}");
        }
        let any = Ports { protocol: Protocol::Tcp, first: 0, last: u16::MAX };
        let all = Policy { bind: vec![any], map: vec![], ..policy() };
        for (lowest, highest) in [(0, 0), (0, 9), (9, 0), (40_000, 50_000)] {
            assert_eq!(all.bind_among(Protocol::Tcp, lowest, highest), Ok(()), "{lowest} to {highest}");
        }
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

    /// An administrator who writes `0.0.0.0/0` means the Internet, not the host's own servers or the cloud's metadata
    /// service.
    #[test]
    fn special_addresses_must_be_named() {
        let of = |networks: &[&str]| Policy {
            reach: networks.iter().map(|text| network(text).unwrap()).collect(),
            ..policy()
        };
        let everything = of(&["0.0.0.0/0", "::/0"]);
        assert_eq!(everything.reach(Protocol::Udp, at("198.51.100.7:53")), Ok(at("198.51.100.7:53")));
        for ordinary in ["[fd00::1]:53", "[64:ff9b::198.51.100.7]:53", "100.100.100.201:53"] {
            assert_eq!(everything.reach(Protocol::Udp, at(ordinary)), Ok(at(ordinary)));
        }
        // Per special range: addresses in it, a network that is too wide to include it, and a network within it.
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
            (["[fd20:ce::254]:80"; 4], "fd20:ce::/64", "fd20:ce::254/128"),
            (["[fd00:c1::a9fe:a9fe]:80"; 4], "fd00:c1::/32", "fd00:c1::a9fe:a9fe/128"),
            (["[fd00:42::42]:80"; 4], "fc00::/7", "fd00:42::42/128"),
            (["100.100.100.200:80"; 4], "100.64.0.0/10", "100.100.100.200/32"),
            (["[::ffff:168.63.129.16]:80"; 4], "168.63.128.0/17", "168.63.129.16/32"),
            (["192.0.0.192:80"; 4], "192.0.0.0/24", "192.0.0.192/32"),
            (["[64:ff9b:1::169.254.169.254]:80"; 4], "64:ff9b:1::/48", "64:ff9b:1::a9fe:0/112"),
            (
                ["[64:ff9b::127.0.0.1]:80", "[64:ff9b::127.9.9.9]:80", "[64:ff9b::7f00:0]:1", "[64:ff9b::7fff:ffff]:1"],
                "64:ff9b::7e00:0/103",
                "64:ff9b::7f00:0/104",
            ),
            (["[64:ff9b::169.254.169.254]:80"; 4], "64:ff9b::/96", "64:ff9b::a9fe:a9fe/128"),
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

    /// For all values, `sockets` times the buffers is at most `memory`.
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
        // Why there is no default: MemoryMax= of the unit is less, and with twice that connections would be slow.
        assert!(Limits::memory_min(Limits::default().sockets) > 512 << 20);
        assert_eq!(Limits { memory: Some(1 << 30), ..Limits::default() }.fixed_buffer(), Some(64 << 10));
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
