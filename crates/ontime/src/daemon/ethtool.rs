//! A netlink socket that reports changes of a NIC's queues or rings, which cause no link event.
//!
//! Generic netlink family `ethtool`, multicast group `monitor` (Linux 5.6). Source:
//! `include/uapi/linux/ethtool_netlink.h`, `include/uapi/linux/genetlink.h`, `net/ethtool/netlink.c`
//! (`ethtool_notify`).

use std::io;

use netlink_sys::protocols::NETLINK_GENERIC;
use netlink_sys::{Socket, SocketAddr};
use ontime_hostnet::netlink::{Attributes, Netlink, attributes, read_text, read_u32};

const GENL_ID_CTRL: u16 = 0x10;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
const CTRL_ATTR_MCAST_GROUPS: u16 = 7;
const CTRL_ATTR_MCAST_GRP_NAME: u16 = 1;
const CTRL_ATTR_MCAST_GRP_ID: u16 = 2;
const GENL_HEADER: usize = 4;

/// A non-blocking socket that becomes readable after a change in this thread's network namespace.
///
/// # Errors
/// `NotFound` where the kernel has no such family or group, else the kernel's error.
pub(super) fn monitor() -> io::Result<Socket> {
    let mut netlink = Netlink::open(NETLINK_GENERIC)?;
    let ask = Attributes::after(&[CTRL_CMD_GETFAMILY, 1, 0, 0]).with_text(CTRL_ATTR_FAMILY_NAME, "ethtool");
    let answer = netlink.request(GENL_ID_CTRL, 0, ask.bytes())?;
    let group = answer
        .iter()
        .find_map(|part| group(part.get(GENL_HEADER..)?, "monitor"))
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "family ethtool has no group monitor"))?;
    let mut socket = Socket::new(NETLINK_GENERIC)?;
    socket.bind(&SocketAddr::new(0, 0))?;
    socket.add_membership(group)?;
    socket.set_non_blocking(true)?;
    Ok(socket)
}

/// The number of a multicast group, from the description of a family.
fn group(family: &[u8], wanted: &str) -> Option<u32> {
    let (_, groups) = attributes(family).find(|(kind, _)| *kind == CTRL_ATTR_MCAST_GROUPS)?;
    attributes(groups).find_map(|(_, group)| {
        let of = |kind| attributes(group).find(|(other, _)| *other == kind).map(|(_, value)| value);
        (read_text(of(CTRL_ATTR_MCAST_GRP_NAME)?) == wanted).then(|| read_u32(of(CTRL_ATTR_MCAST_GRP_ID)?))?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_found_by_its_name() {
        let entry = |name: &str, id: u32| {
            Attributes::default().with_text(CTRL_ATTR_MCAST_GRP_NAME, name).with_u32(CTRL_ATTR_MCAST_GRP_ID, id)
        };
        let groups = Attributes::default().with_nested(1, entry("other", 3)).with_nested(2, entry("monitor", 9));
        let family = Attributes::default().with_u32(1, 17).with_nested(CTRL_ATTR_MCAST_GROUPS, groups);
        assert_eq!(group(family.bytes(), "monitor"), Some(9));
        assert_eq!(group(family.bytes(), "none"), None);
        assert_eq!(group(&[], "monitor"), None);
    }

    #[test]
    fn the_running_kernel_has_the_group() {
        match monitor() {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => println!("SKIPPED: {error}"),
            Err(error) => panic!("{error:?}"),
        }
    }
}
