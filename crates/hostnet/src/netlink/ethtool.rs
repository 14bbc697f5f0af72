//! Generic netlink family `ethtool` (5.6): receive interrupt moderation of a NIC, the size of its rings (5.7), and its
//! active features.
//!
//! Source: `include/uapi/linux/ethtool_netlink.h`, `Documentation/netlink/specs/ethtool.yaml`,
//! `net/ethtool/coalesce.c`, `rings.c`, `features.c`, `bitset.c`.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use super::generic::{Family, HEADER, command};
use super::{Attributes, attributes, read_text, read_u32};
use crate::knob::Moderation;

const MSG_FEATURES_GET: u8 = 11;
const MSG_FEATURES_SET: u8 = 12;
const MSG_RINGS_GET: u8 = 15;
const MSG_COALESCE_GET: u8 = 19;
const MSG_COALESCE_SET: u8 = 20;

const COALESCE_HEADER: u16 = 1;
const COALESCE_RX_USECS: u16 = 2;
const COALESCE_USE_ADAPTIVE_RX: u16 = 11;
const HEADER_DEV_INDEX: u16 = 1;

const RINGS_HEADER: u16 = 1;
const RINGS_TX: u16 = 9;

const FEATURES_HEADER: u16 = 1;
const FEATURES_WANTED: u16 = 3;
const FEATURES_ACTIVE: u16 = 4;
const BITSET_BITS: u16 = 3;
const BITSET_BITS_BIT: u16 = 1;
const BIT_NAME: u16 = 2;
const BIT_VALUE: u16 = 3;

/// The family, if this kernel has it.
pub struct Ethtool(Family);

impl Ethtool {
    /// Opens the family in this thread's network namespace.
    ///
    /// # Errors
    /// `NotFound` if the kernel has no such family, otherwise the kernel's error.
    pub fn open() -> io::Result<Self> {
        Family::open("ethtool").map(Self)
    }

    /// Moderation of all interfaces whose drivers report it, by interface index.
    ///
    /// # Errors
    /// `EOPNOTSUPP` before 5.7.
    pub(crate) fn moderations(&mut self) -> io::Result<BTreeMap<u32, Moderation>> {
        let ask = command(MSG_COALESCE_GET).with_nested(COALESCE_HEADER, Attributes::default());
        Ok(self.0.dump(&ask)?.iter().filter_map(|part| parse(part)).collect())
    }

    /// Descriptors of a transmit ring, for all interfaces whose drivers report it, by interface index.
    ///
    /// # Errors
    /// `EOPNOTSUPP` before 5.7.
    pub(crate) fn tx_rings(&mut self) -> io::Result<BTreeMap<u32, u32>> {
        let ask = command(MSG_RINGS_GET).with_nested(RINGS_HEADER, Attributes::default());
        Ok(self.0.dump(&ask)?.iter().filter_map(|part| parse_ring(part)).collect())
    }

    /// Descriptors of a transmit ring of one interface.
    ///
    /// # Errors
    /// `ENODEV` if the interface does not exist or is suspended, `EOPNOTSUPP` if its driver does not report it.
    pub fn tx_ring(&mut self, ifindex: u32) -> io::Result<u32> {
        let answer = self.0.request(&command(MSG_RINGS_GET).with_nested(RINGS_HEADER, of(ifindex)))?;
        let found = answer.first().and_then(|part| parse_ring(part)).map(|(_, ring)| ring);
        found.ok_or_else(|| io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }

    /// Moderation of one interface.
    ///
    /// # Errors
    /// `ENODEV` if the interface does not exist or is suspended, `EOPNOTSUPP` if its driver does not report it.
    pub fn moderation(&mut self, ifindex: u32) -> io::Result<Moderation> {
        let answer = self.0.request(&command(MSG_COALESCE_GET).with_nested(COALESCE_HEADER, of(ifindex)))?;
        let found = answer.first().and_then(|part| parse(part)).map(|(_, found)| found);
        found.ok_or_else(|| io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }

    /// Sets the moderation. The driver's other settings stay.
    ///
    /// # Errors
    /// `ENODEV` if the interface does not exist, `EOPNOTSUPP` and `EINVAL` if the driver refuses.
    pub(crate) fn set_moderation(&mut self, ifindex: u32, wanted: Moderation) -> io::Result<()> {
        wanted.steps().try_for_each(|step| {
            let mut set = command(MSG_COALESCE_SET)
                .with_nested(COALESCE_HEADER, of(ifindex))
                .with_u32(COALESCE_RX_USECS, step.rx_usecs);
            if let Some(adaptive) = step.adaptive {
                set = set.with(COALESCE_USE_ADAPTIVE_RX, &[u8::from(adaptive)]);
            }
            self.0.request(&set).map(|_| ())
        })
    }

    /// Names of the active features (`ethtool -k` prints other names for some: generic-receive-offload for `rx-gro`).
    ///
    /// # Errors
    /// `ENODEV` if the interface does not exist.
    pub fn features(&mut self, ifindex: u32) -> io::Result<BTreeSet<String>> {
        let answer = self.0.request(&command(MSG_FEATURES_GET).with_nested(FEATURES_HEADER, of(ifindex)))?;
        Ok(answer.first().map(|part| parse_features(part)).unwrap_or_default())
    }

    /// Switches one feature.
    ///
    /// # Errors
    /// `ENODEV` if the interface does not exist, `EINVAL` if the device lacks the feature or does not allow the change.
    pub(crate) fn set_feature(&mut self, ifindex: u32, name: &str, on: bool) -> io::Result<()> {
        let bit = Attributes::default().with_text(BIT_NAME, name);
        let bit = if on { bit.with(BIT_VALUE, &[]) } else { bit };
        let bits = Attributes::default().with_nested(BITSET_BITS_BIT, bit);
        let set = command(MSG_FEATURES_SET)
            .with_nested(FEATURES_HEADER, of(ifindex))
            .with_nested(FEATURES_WANTED, Attributes::default().with_nested(BITSET_BITS, bits));
        self.0.request(&set).map(|_| ())
    }
}

fn of(ifindex: u32) -> Attributes {
    Attributes::default().with_u32(HEADER_DEV_INDEX, ifindex)
}

/// Interface index and moderation; none if the driver reports no interval.
#[doc(hidden)]
pub fn parse(part: &[u8]) -> Option<(u32, Moderation)> {
    let (mut ifindex, mut rx_usecs, mut adaptive) = (None, None, None);
    for (kind, value) in attributes(part.get(HEADER..).unwrap_or_default()) {
        match kind {
            COALESCE_HEADER => ifindex = index_in(value),
            COALESCE_RX_USECS => rx_usecs = read_u32(value),
            COALESCE_USE_ADAPTIVE_RX => adaptive = value.first().map(|byte| *byte != 0),
            _ => {}
        }
    }
    Some((ifindex?, Moderation { rx_usecs: rx_usecs?, adaptive }))
}

/// Interface index and descriptors.
#[doc(hidden)]
pub fn parse_ring(part: &[u8]) -> Option<(u32, u32)> {
    let (mut ifindex, mut ring) = (None, None);
    for (kind, value) in attributes(part.get(HEADER..).unwrap_or_default()) {
        match kind {
            RINGS_HEADER => ifindex = index_in(value),
            RINGS_TX => ring = read_u32(value),
            _ => {}
        }
    }
    Some((ifindex?, ring?))
}

/// The interface in a header.
fn index_in(header: &[u8]) -> Option<u32> {
    attributes(header).find(|(kind, _)| *kind == HEADER_DEV_INDEX).and_then(|(_, value)| read_u32(value))
}

/// The active features, of a bit set in its long form without a mask: the named bits.
#[doc(hidden)]
pub fn parse_features(part: &[u8]) -> BTreeSet<String> {
    let inner = |bytes: &[u8], wanted: u16| -> Vec<Vec<u8>> {
        attributes(bytes).filter(|(kind, _)| *kind == wanted).map(|(_, value)| value.to_vec()).collect()
    };
    let active = inner(part.get(HEADER..).unwrap_or_default(), FEATURES_ACTIVE);
    let bits = active.iter().flat_map(|set| inner(set, BITSET_BITS)).flat_map(|bits| inner(&bits, BITSET_BITS_BIT));
    bits.filter_map(|bit| inner(&bit, BIT_NAME).first().map(|name| read_text(name))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A driver like ice and virtio_net.
    fn driver(now: &mut Moderation, told: Moderation) -> bool {
        let refused = told.adaptive == Some(true) && told.rx_usecs != now.rx_usecs;
        if !refused {
            *now = told;
        }
        !refused
    }

    #[test]
    fn an_adaptive_interval_comes_back_where_the_driver_takes_none_beside() {
        let original = Moderation { rx_usecs: 50, adaptive: Some(true) };
        let wanted = Moderation { rx_usecs: 0, adaptive: Some(false) };
        let mut now = original;
        assert!(wanted.steps().all(|step| driver(&mut now, step)) && now == wanted);
        assert!(!driver(&mut now, original));
        assert!(original.steps().all(|step| driver(&mut now, step)) && now == original);
        let mute = Moderation { rx_usecs: 3, adaptive: None };
        assert_eq!((wanted.steps().count(), mute.steps().collect()), (1, vec![mute]));
    }

    #[test]
    fn what_a_driver_says_is_read() {
        let part = command(MSG_COALESCE_GET)
            .with_nested(COALESCE_HEADER, of(7).with_text(2, "eth0"))
            .with_u32(COALESCE_RX_USECS, 3)
            .with(COALESCE_USE_ADAPTIVE_RX, &[1]);
        assert_eq!(parse(part.bytes()), Some((7, Moderation { rx_usecs: 3, adaptive: Some(true) })));
        let mute = command(MSG_COALESCE_GET).with_nested(COALESCE_HEADER, of(7));
        assert_eq!(parse(mute.bytes()), None);
        let ring = command(MSG_RINGS_GET).with_nested(RINGS_HEADER, of(7)).with_u32(6, 512).with_u32(RINGS_TX, 256);
        assert_eq!((parse_ring(ring.bytes()), parse_ring(mute.bytes())), (Some((7, 256)), None));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_without_harm(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            let _ = (parse(&bytes), parse_ring(&bytes), parse_features(&bytes));
        }
    }
}
