//! Generic netlink family `netdev`: NAPI instances and queues (6.8), threading of one instance (6.17; polling 6.19).
//!
//! Source: `include/uapi/linux/netdev.h`, `Documentation/netlink/specs/netdev.yaml`, `net/core/netdev-genl.c`.

use std::collections::BTreeMap;
use std::io;

use super::generic::{Family, HEADER, command};
use super::{attributes, read_u32};
use crate::inventory::Napi;

const CMD_QUEUE_GET: u8 = 10;
const CMD_NAPI_GET: u8 = 11;
const CMD_NAPI_SET: u8 = 14;

const NAPI_IFINDEX: u16 = 1;
const NAPI_ID: u16 = 2;
const NAPI_IRQ: u16 = 3;
const NAPI_PID: u16 = 4;
const NAPI_THREADED: u16 = 8;

const QUEUE_ID: u16 = 1;
const QUEUE_IFINDEX: u16 = 2;
const QUEUE_TYPE: u16 = 3;
const QUEUE_NAPI_ID: u16 = 4;
const QUEUE_TYPE_RX: u32 = 0;

/// The family, if this kernel has it.
pub struct Netdev(Family);

impl Netdev {
    /// Opens the family in this thread's network namespace.
    ///
    /// # Errors
    /// `NotFound` if the kernel has no such family (before 6.3), otherwise the kernel's error.
    pub fn open() -> io::Result<Self> {
        Family::open("netdev").map(Self)
    }

    /// NAPI instances of all interfaces that are up, with their queues, by interface index.
    ///
    /// # Errors
    /// `EOPNOTSUPP` before 6.8.
    pub fn napis(&mut self) -> io::Result<BTreeMap<u32, Vec<Napi>>> {
        let mut found: BTreeMap<u32, Vec<Napi>> = BTreeMap::new();
        for part in self.0.dump(&command(CMD_NAPI_GET))? {
            let (ifindex, napi) = parse_napi(&part);
            found.entry(ifindex).or_default().push(napi);
        }
        for part in self.0.dump(&command(CMD_QUEUE_GET))? {
            add_queue(&mut found, &part);
        }
        Ok(found)
    }

    /// One NAPI instance, with the index of its interface.
    ///
    /// # Errors
    /// `ENOENT` if the instance does not exist.
    pub fn napi(&mut self, id: u32) -> io::Result<(u32, Napi)> {
        let answer = self.0.request(&command(CMD_NAPI_GET).with_u32(NAPI_ID, id))?;
        let part = answer.first().ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))?;
        Ok(parse_napi(part))
    }

    /// Sets how one NAPI instance is polled: 0, 1, or 2 from 6.19.
    ///
    /// # Errors
    /// `EOPNOTSUPP` before 6.13, `EINVAL` before 6.17 or for a mode that the kernel does not know, `ENOENT` if the
    /// instance does not exist.
    pub(crate) fn set_threaded(&mut self, id: u32, mode: u32) -> io::Result<()> {
        let set = command(CMD_NAPI_SET).with_u32(NAPI_ID, id).with_u32(NAPI_THREADED, mode);
        self.0.request(&set).map(|_| ())
    }
}

/// Parses one NAPI instance: the index of its interface, and the instance.
#[doc(hidden)]
pub fn parse_napi(part: &[u8]) -> (u32, Napi) {
    let mut ifindex = 0;
    let mut napi = Napi::default();
    for (kind, value) in attributes(part.get(HEADER..).unwrap_or_default()) {
        let number = read_u32(value);
        match kind {
            NAPI_IFINDEX => ifindex = number.unwrap_or_default(),
            NAPI_ID => napi.id = number.unwrap_or_default(),
            NAPI_IRQ => napi.irq = number,
            NAPI_PID => napi.pid = number.and_then(|pid| i32::try_from(pid).ok()),
            NAPI_THREADED => napi.threaded = number,
            _ => {}
        }
    }
    (ifindex, napi)
}

/// Adds a queue to its NAPI instance, if that is in `found`.
#[doc(hidden)]
pub fn add_queue(found: &mut BTreeMap<u32, Vec<Napi>>, part: &[u8]) {
    let (mut id, mut ifindex, mut direction, mut napi_id) = (None, None, None, None);
    for (kind, value) in attributes(part.get(HEADER..).unwrap_or_default()) {
        let number = read_u32(value);
        match kind {
            QUEUE_ID => id = number,
            QUEUE_IFINDEX => ifindex = number,
            QUEUE_TYPE => direction = number,
            QUEUE_NAPI_ID => napi_id = number,
            _ => {}
        }
    }
    let (Some(id), Some(ifindex), Some(napi_id)) = (id, ifindex, napi_id) else { return };
    let Some(napi) = found.get_mut(&ifindex).and_then(|napis| napis.iter_mut().find(|napi| napi.id == napi_id)) else {
        return;
    };
    if direction == Some(QUEUE_TYPE_RX) { napi.rx_queues.push(id) } else { napi.tx_queues.push(id) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_napi_is_read_with_its_queues() {
        let part = command(CMD_NAPI_GET)
            .with_u32(NAPI_IFINDEX, 3)
            .with_u32(NAPI_ID, 8194)
            .with_u32(NAPI_IRQ, 41)
            .with_u32(NAPI_PID, 977)
            .with_u32(NAPI_THREADED, 1);
        let (ifindex, napi) = parse_napi(part.bytes());
        let mut found = BTreeMap::from([(ifindex, vec![napi])]);
        for (id, direction) in [(0, 0), (5, 1)] {
            let queue = command(CMD_QUEUE_GET)
                .with_u32(QUEUE_ID, id)
                .with_u32(QUEUE_IFINDEX, 3)
                .with_u32(QUEUE_TYPE, direction)
                .with_u32(QUEUE_NAPI_ID, 8194);
            add_queue(&mut found, queue.bytes());
        }
        let wanted =
            Napi { id: 8194, irq: Some(41), pid: Some(977), threaded: Some(1), rx_queues: vec![0], tx_queues: vec![5] };
        assert_eq!(found, BTreeMap::from([(3, vec![wanted])]));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_without_harm(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            let (ifindex, napi) = parse_napi(&bytes);
            let mut found = BTreeMap::from([(ifindex, vec![napi])]);
            add_queue(&mut found, &bytes);
            proptest::prop_assert_eq!(found.len(), 1);
        }
    }
}
