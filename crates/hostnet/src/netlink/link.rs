//! Interfaces with the data of `ip -d link`, from one dump.
//!
//! Source: `include/uapi/linux/if_link.h`, `net/core/rtnetlink.c`.

use std::io;

use super::{Netlink, attributes, read_text, read_u32};

const RTM_GETLINK: u16 = 18;
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINK: u16 = 5;
const IFLA_QDISC: u16 = 6;
const IFLA_MASTER: u16 = 10;
const IFLA_LINKINFO: u16 = 18;
const IFLA_NUM_TX_QUEUES: u16 = 31;
const IFLA_NUM_RX_QUEUES: u16 = 32;
const IFLA_CARRIER: u16 = 33;
const IFLA_LINK_NETNSID: u16 = 37;
const IFLA_PROP_LIST: u16 = 52;
const IFLA_ALT_IFNAME: u16 = 53;
const IFLA_INFO_KIND: u16 = 1;
const IFINFO: usize = 16;
const IFF_UP: u32 = 1;
const IFF_LOOPBACK: u32 = 8;

/// An interface, from the kernel's table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Link {
    /// Interface index.
    pub ifindex: u32,
    /// Name.
    pub name: String,
    /// Alternative names (5.5).
    pub altnames: Vec<String>,
    /// IFF_UP.
    pub up: bool,
    /// IFF_LOOPBACK.
    pub loopback: bool,
    /// Has carrier.
    pub carrier: bool,
    /// `veth`, `tun`, `macvtap`; none for a physical interface.
    pub kind: Option<String>,
    /// Hardware address, if it has six bytes.
    pub mac: Option<[u8; 6]>,
    /// Lower device or peer, if it is in this network namespace.
    pub link: Option<u32>,
    /// Lower device or peer in another network namespace, by its index there. Here that index may be another
    /// interface's.
    pub peer: Option<u32>,
    /// Bridge or bond that has this interface as a port.
    pub controller: Option<u32>,
    /// Kind of the root qdisc.
    pub qdisc: Option<String>,
    /// Number of allocated receive queues.
    pub rx_queues: u32,
    /// Number of allocated transmit queues.
    pub tx_queues: u32,
}

/// All interfaces of this thread's network namespace.
///
/// # Errors
/// The kernel's error.
pub fn links(netlink: &mut Netlink) -> io::Result<Vec<Link>> {
    let header = [0u8; IFINFO];
    Ok(netlink.dump(RTM_GETLINK, &header)?.iter().filter_map(|part| parse_link(part)).collect())
}

/// Parses one interface of a dump.
#[doc(hidden)]
pub fn parse_link(part: &[u8]) -> Option<Link> {
    let header = part.get(..IFINFO)?;
    let flags = read_u32(header.get(8..)?)?;
    let mut link = Link {
        ifindex: read_u32(header.get(4..)?)?,
        up: flags & IFF_UP != 0,
        loopback: flags & IFF_LOOPBACK != 0,
        ..Link::default()
    };
    let mut elsewhere = false;
    for (kind, value) in attributes(part.get(IFINFO..)?) {
        match kind {
            IFLA_IFNAME => link.name = read_text(value),
            IFLA_ADDRESS => link.mac = <[u8; 6]>::try_from(value).ok(),
            IFLA_LINK => link.link = read_u32(value),
            IFLA_QDISC => link.qdisc = Some(read_text(value)),
            IFLA_MASTER => link.controller = read_u32(value),
            IFLA_NUM_TX_QUEUES => link.tx_queues = read_u32(value).unwrap_or_default(),
            IFLA_NUM_RX_QUEUES => link.rx_queues = read_u32(value).unwrap_or_default(),
            IFLA_CARRIER => link.carrier = value.first() == Some(&1),
            IFLA_LINK_NETNSID => elsewhere = true,
            IFLA_PROP_LIST => {
                let names = attributes(value).filter(|(kind, _)| *kind == IFLA_ALT_IFNAME);
                link.altnames = names.map(|(_, name)| read_text(name)).collect();
            }
            IFLA_LINKINFO => {
                link.kind =
                    attributes(value).find(|(kind, _)| *kind == IFLA_INFO_KIND).map(|(_, name)| read_text(name));
            }
            _ => {}
        }
    }
    if elsewhere {
        link.peer = link.link.take();
    }
    (!link.name.is_empty()).then_some(link)
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::netlink::Attributes;

    fn header() -> Vec<u8> {
        let mut header = vec![0u8; IFINFO];
        header.splice(4..8, 7u32.to_ne_bytes());
        header.splice(8..12, IFF_UP.to_ne_bytes());
        header
    }

    #[test]
    fn a_veth_of_another_namespace_has_no_peer_here() {
        let kind = Attributes::default().with_text(IFLA_INFO_KIND, "veth");
        let part = Attributes::after(&header())
            .with_text(IFLA_IFNAME, "veth0")
            .with_u32(IFLA_LINK, 2)
            .with_u32(IFLA_LINK_NETNSID, 0)
            .with(IFLA_ADDRESS, &[2, 0, 0, 0, 0, 1])
            .with_nested(IFLA_LINKINFO, kind)
            .with_nested(
                IFLA_PROP_LIST,
                Attributes::default()
                    .with_text(IFLA_ALT_IFNAME, "uplink")
                    .with_text(IFLA_ALT_IFNAME, "a-name-of-over-15-bytes"),
            );
        let link = parse_link(part.bytes()).unwrap();
        assert_eq!((link.ifindex, link.name.as_str(), link.up, link.link), (7, "veth0", true, None));
        assert_eq!((link.kind.as_deref(), link.mac), (Some("veth"), Some([2, 0, 0, 0, 0, 1])));
        assert_eq!(link.altnames, ["uplink", "a-name-of-over-15-bytes"]);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_without_harm(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            if let Some(link) = parse_link(&bytes) {
                proptest::prop_assert!(!link.name.is_empty());
            }
        }
    }
}
