//! Generic netlink: finds a family by its name (`net/netlink/genetlink.c`).

use std::io;

use super::{Attributes, Netlink, attributes, read_u16};

const GENL_ID_CTRL: u16 = 0x10;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
/// Size of the header before the attributes: command, version, reserved; bytes.
pub const HEADER: usize = 4;

/// A family of this kernel, and a socket for requests to it.
pub struct Family {
    netlink: Netlink,
    id: u16,
}

impl Family {
    /// Opens the family in this thread's network namespace.
    ///
    /// # Errors
    /// `NotFound` if the kernel has no such family, otherwise the kernel's error.
    pub fn open(name: &str) -> io::Result<Self> {
        let mut netlink = Netlink::open(netlink_sys::protocols::NETLINK_GENERIC)?;
        let ask = command(CTRL_CMD_GETFAMILY).with_text(CTRL_ATTR_FAMILY_NAME, name);
        let missing = || io::Error::new(io::ErrorKind::NotFound, format!("the kernel has no netlink family {name}"));
        let answer = netlink.request(GENL_ID_CTRL, 0, ask.bytes())?;
        let id = answer
            .iter()
            .flat_map(|part| attributes(part.get(HEADER..).unwrap_or_default()))
            .find(|(kind, _)| *kind == CTRL_ATTR_FAMILY_ID)
            .and_then(|(_, value)| read_u16(value))
            .ok_or_else(missing)?;
        Ok(Self { netlink, id })
    }

    /// See [`Netlink::request`].
    ///
    /// # Errors
    /// The kernel's error.
    pub fn request(&mut self, ask: &Attributes) -> io::Result<Vec<Vec<u8>>> {
        self.netlink.request(self.id, 0, ask.bytes())
    }

    /// See [`Netlink::dump`].
    ///
    /// # Errors
    /// The kernel's error.
    pub fn dump(&mut self, ask: &Attributes) -> io::Result<Vec<Vec<u8>>> {
        self.netlink.dump(self.id, ask.bytes())
    }
}

/// A request for a family's command, version 1, without attributes.
pub fn command(number: u8) -> Attributes {
    Attributes::after(&[number, 1, 0, 0])
}
