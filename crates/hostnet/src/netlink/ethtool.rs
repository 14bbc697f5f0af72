//! Generic netlink family `ethtool` (5.6): how a NIC holds its receive interrupts back (5.7).
//!
//! Source: `include/uapi/linux/ethtool_netlink.h`, `Documentation/netlink/specs/ethtool.yaml`, `net/ethtool/coalesce.c`.

use std::collections::BTreeMap;
use std::io;

use super::generic::{Family, HEADER, command};
use super::{Attributes, attributes, read_u32};
use crate::knob::Moderation;

const MSG_COALESCE_GET: u8 = 19;
const MSG_COALESCE_SET: u8 = 20;

const COALESCE_HEADER: u16 = 1;
const COALESCE_RX_USECS: u16 = 2;
const COALESCE_USE_ADAPTIVE_RX: u16 = 11;
const HEADER_DEV_INDEX: u16 = 1;

/// The family, where this kernel has it.
pub struct Ethtool(Family);

impl Ethtool {
    /// Opens it in this thread's network namespace.
    ///
    /// # Errors
    /// `NotFound` where the kernel has no such family, else the kernel's error.
    pub fn open() -> io::Result<Self> {
        Family::open("ethtool").map(Self)
    }

    /// Of all interfaces whose drivers say how they hold interrupts back, by interface index.
    ///
    /// # Errors
    /// `EOPNOTSUPP` before 5.7.
    pub fn moderations(&mut self) -> io::Result<BTreeMap<u32, Moderation>> {
        let ask = command(MSG_COALESCE_GET).with_nested(COALESCE_HEADER, Attributes::default());
        Ok(self.0.dump(&ask)?.iter().filter_map(|part| parse(part)).collect())
    }

    /// Of one interface.
    ///
    /// # Errors
    /// `ENODEV` where it is gone, `EOPNOTSUPP` where its driver does not say.
    pub fn moderation(&mut self, ifindex: u32) -> io::Result<Moderation> {
        let answer = self.0.request(&command(MSG_COALESCE_GET).with_nested(COALESCE_HEADER, of(ifindex)))?;
        let found = answer.first().and_then(|part| parse(part)).map(|(_, found)| found);
        found.ok_or_else(|| io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }

    /// Sets it; what the driver has beside stays as it is.
    ///
    /// # Errors
    /// `ENODEV` where it is gone, `EOPNOTSUPP` and `EINVAL` where the driver refuses.
    pub fn set_moderation(&mut self, ifindex: u32, wanted: Moderation) -> io::Result<()> {
        let mut set = command(MSG_COALESCE_SET)
            .with_nested(COALESCE_HEADER, of(ifindex))
            .with_u32(COALESCE_RX_USECS, wanted.rx_usecs);
        if let Some(adaptive) = wanted.adaptive {
            set = set.with(COALESCE_USE_ADAPTIVE_RX, &[u8::from(adaptive)]);
        }
        self.0.request(&set).map(|_| ())
    }
}

fn of(ifindex: u32) -> Attributes {
    Attributes::default().with_u32(HEADER_DEV_INDEX, ifindex)
}

/// Interface index and moderation; none where the driver counts no time.
fn parse(part: &[u8]) -> Option<(u32, Moderation)> {
    let (mut ifindex, mut rx_usecs, mut adaptive) = (None, None, None);
    for (kind, value) in attributes(part.get(HEADER..).unwrap_or_default()) {
        match kind {
            COALESCE_HEADER => {
                let mut inner = attributes(value);
                ifindex = inner.find(|(kind, _)| *kind == HEADER_DEV_INDEX).and_then(|(_, value)| read_u32(value));
            }
            COALESCE_RX_USECS => rx_usecs = read_u32(value),
            COALESCE_USE_ADAPTIVE_RX => adaptive = value.first().map(|byte| *byte != 0),
            _ => {}
        }
    }
    Some((ifindex?, Moderation { rx_usecs: rx_usecs?, adaptive }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_driver_says_is_read() {
        let part = command(MSG_COALESCE_GET)
            .with_nested(COALESCE_HEADER, of(7).with_text(2, "eth0"))
            .with_u32(COALESCE_RX_USECS, 3)
            .with(COALESCE_USE_ADAPTIVE_RX, &[1]);
        assert_eq!(parse(part.bytes()), Some((7, Moderation { rx_usecs: 3, adaptive: Some(true) })));
        let mute = command(MSG_COALESCE_GET).with_nested(COALESCE_HEADER, of(7));
        assert_eq!(parse(mute.bytes()), None);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_without_harm(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            let _ = parse(&bytes);
        }
    }
}
