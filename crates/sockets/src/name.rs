//! Socket addresses in calls: `sockaddr_in` and `sockaddr_in6` in Linux's layout (pure).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use crate::abi::{Errno, ONTIME_ADDR_MAX};

/// Size of an address field, bytes.
pub const ROOM: usize = ONTIME_ADDR_MAX as usize;
const V4_LEN: usize = 16;
const V6_LEN: usize = 28;

/// The contents of a call's `addr`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Name {
    /// No address.
    None,
    /// AF_UNSPEC: disconnects.
    Unspec,
    /// An IPv4 or IPv6 address.
    Inet(SocketAddr),
}

/// Parses a guest's address.
///
/// # Errors
/// EINVAL for an invalid length, EAFNOSUPPORT for another family.
pub fn parse(bytes: &[u8; ROOM], len: usize) -> Result<Name, Errno> {
    if len == 0 {
        return Ok(Name::None);
    }
    if !(2..=ROOM).contains(&len) {
        return Err(Errno(libc::EINVAL));
    }
    let [f0, f1, p0, p1, rest @ ..] = *bytes;
    let port = u16::from_be_bytes([p0, p1]);
    match i32::from(u16::from_le_bytes([f0, f1])) {
        libc::AF_UNSPEC => Ok(Name::Unspec),
        libc::AF_INET if len >= V4_LEN => {
            let [a, b, c, d, ..] = rest;
            Ok(Name::Inet(SocketAddrV4::new(Ipv4Addr::new(a, b, c, d), port).into()))
        }
        libc::AF_INET6 if len >= V6_LEN => {
            let [l0, l1, l2, l3, rest @ ..] = rest;
            let [s0, s1, s2, s3] = *rest.last_chunk::<4>().ok_or(Errno(libc::EINVAL))?;
            let ip: [u8; 16] = *rest.first_chunk().ok_or(Errno(libc::EINVAL))?;
            let (flow, scope) = (u32::from_ne_bytes([l0, l1, l2, l3]), u32::from_le_bytes([s0, s1, s2, s3]));
            Ok(Name::Inet(SocketAddrV6::new(Ipv6Addr::from(ip), port, flow, scope).into()))
        }
        libc::AF_INET | libc::AF_INET6 => Err(Errno(libc::EINVAL)),
        _ => Err(Errno(libc::EAFNOSUPPORT)),
    }
}

/// Writes an address and returns its length in bytes.
pub fn write(address: &SocketAddr) -> ([u8; ROOM], u16) {
    let mut bytes = [0; ROOM];
    let mut at = 0;
    let mut put = |part: &[u8]| {
        if let Some(place) = bytes.get_mut(at..at + part.len()) {
            place.copy_from_slice(part);
        }
        at += part.len();
    };
    match address {
        SocketAddr::V4(v4) => {
            put(&(libc::AF_INET as u16).to_le_bytes());
            put(&v4.port().to_be_bytes());
            put(&v4.ip().octets());
            (bytes, V4_LEN as u16)
        }
        SocketAddr::V6(v6) => {
            put(&(libc::AF_INET6 as u16).to_le_bytes());
            put(&v6.port().to_be_bytes());
            put(&v6.flowinfo().to_ne_bytes());
            put(&v6.ip().octets());
            put(&v6.scope_id().to_le_bytes());
            (bytes, V6_LEN as u16)
        }
    }
}

/// The address that packets really go to: the unspecified address is this host, an IPv4-mapped one is IPv4.
pub fn destination(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V4(v4) if v4.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(v6) if v6.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    }
}

/// Whether packets to this address do not leave the host. (The host's other addresses are not known here.)
pub(crate) fn is_near(address: SocketAddr) -> bool {
    destination(address.ip()).is_loopback()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn addresses_come_back_as_they_went() {
        for text in ["192.0.2.7:80", "[2001:db8::1]:65535", "0.0.0.0:0", "[fe80::1%3]:1"] {
            let address: SocketAddr = text.parse().unwrap();
            let (bytes, len) = write(&address);
            assert_eq!(parse(&bytes, usize::from(len)), Ok(Name::Inet(address)), "{text}");
        }
    }

    #[test]
    fn short_and_foreign_addresses_are_refused() {
        let (bytes, _) = write(&"192.0.2.7:80".parse().unwrap());
        assert_eq!(parse(&bytes, 15), Err(Errno(libc::EINVAL)));
        assert_eq!(parse(&bytes, 1), Err(Errno(libc::EINVAL)));
        assert_eq!(parse(&bytes, 29), Err(Errno(libc::EINVAL)));
        let mut unix = [0; ROOM];
        unix[0] = libc::AF_UNIX as u8;
        assert_eq!(parse(&unix, 28), Err(Errno(libc::EAFNOSUPPORT)));
        assert_eq!(parse(&[0; ROOM], 2), Ok(Name::Unspec));
        assert_eq!(parse(&[0; ROOM], 0), Ok(Name::None));
    }

    #[test]
    fn where_it_really_goes() {
        for (written, meant) in
            [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("::ffff:10.0.0.1", "10.0.0.1"), ("::ffff:0.0.0.0", "127.0.0.1")]
        {
            assert_eq!(destination(written.parse().unwrap()), meant.parse::<IpAddr>().unwrap());
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes: [u8; ROOM], len in 0usize..64) {
            let _ = parse(&bytes, len);
        }
    }
}
