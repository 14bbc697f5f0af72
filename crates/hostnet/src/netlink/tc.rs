//! The clsact qdisc of a NIC, and filters on its egress that set the transmit queue.
//!
//! clsact exists beside the root qdisc: adding or removing it does not affect queued packets
//! (`net/sched/sch_ingress.c`). `skbedit queue_mapping` on egress decides the queue since 5.19 (`net/core/dev.c`,
//! `netdev_xmit_txqueue_skipped`). Ontime's filter ends in TC_ACT_UNSPEC, so that other programs' filters on the same
//! hook still get the packet.

use std::io;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};

use super::{Attributes, Netlink, attributes, read_text, read_u16, read_u32};
use crate::knob::SteerFrom;

pub(super) const RTM_NEWQDISC: u16 = 36;
pub(super) const RTM_DELQDISC: u16 = 37;
pub(super) const RTM_GETQDISC: u16 = 38;
const RTM_NEWTFILTER: u16 = 44;
const RTM_DELTFILTER: u16 = 45;
const RTM_GETTFILTER: u16 = 46;

const TCMSG: usize = 20;
const CLSACT_HANDLE: u32 = 0xffff_0000;
const CLSACT_PARENT: u32 = 0xffff_fff1;
const CLSACT_INGRESS: u32 = 0xffff_fff2;
const CLSACT_EGRESS: u32 = 0xffff_fff3;

pub(super) const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const FLOWER_INDEV: u16 = 2;
const FLOWER_ACT: u16 = 3;
const FLOWER_KEY_ETH_SRC: u16 = 6;
const FLOWER_KEY_ETH_SRC_MASK: u16 = 7;
const FLOWER_FLAGS: u16 = 22;
/// Software only: a filter offloaded to the NIC could not choose a queue, and some drivers reset the NIC to take one.
const FLOWER_SKIP_HW: u32 = 1;
const ACT_KIND: u16 = 1;
const ACT_OPTIONS: u16 = 2;
const SKBEDIT_PARMS: u16 = 2;
const SKBEDIT_QUEUE_MAPPING: u16 = 4;
const TC_ACT_UNSPEC: i32 = -1;

/// The preference of Ontime's filters. No other filter uses it, and it is early, since an earlier filter may end the
/// walk.
pub(crate) const PREFERENCE: u16 = 0x4f;
const ETH_P_ALL: u16 = 0x0003;

/// A filter's handle, which distinguishes Ontime's filters on one NIC.
fn handle_of(from: &SteerFrom) -> u32 {
    match from {
        SteerFrom::Interface(source) => source.ifindex,
        SteerFrom::SourceMac([_, _, a, b, c, d]) => u32::from_be_bytes([*a, *b, *c, *d]) | 0x8000_0000,
    }
}

/// Whether a NIC has a clsact qdisc.
///
/// # Errors
/// The kernel's error; `AddrInUse` if an `ingress` qdisc is in clsact's place.
pub(crate) fn has_clsact(netlink: &mut Netlink, ifindex: u32) -> io::Result<bool> {
    for part in netlink.dump(RTM_GETQDISC, &tcmsg(ifindex, 0, 0, 0))? {
        let Some(header) = parse_header(&part) else { continue };
        if header.ifindex != ifindex || header.parent != CLSACT_PARENT {
            continue;
        }
        return match kind_of(&part).as_str() {
            "clsact" => Ok(true),
            other => Err(io::Error::new(io::ErrorKind::AddrInUse, format!("qdisc {other} holds the place of clsact"))),
        };
    }
    Ok(false)
}

/// Adds a clsact qdisc.
///
/// # Errors
/// The kernel's error.
pub(crate) fn add_clsact(netlink: &mut Netlink, ifindex: u32) -> io::Result<()> {
    let message = Attributes::after(&tcmsg(ifindex, CLSACT_HANDLE, CLSACT_PARENT, 0)).with_text(TCA_KIND, "clsact");
    netlink.request(RTM_NEWQDISC, NLM_F_CREATE | NLM_F_EXCL, message.bytes()).map(|_| ())
}

/// Removes the clsact qdisc, unless it has filters.
///
/// # Errors
/// The kernel's error; `AddrInUse` if it has filters.
pub(crate) fn remove_clsact_if_empty(netlink: &mut Netlink, ifindex: u32) -> io::Result<()> {
    for parent in [CLSACT_INGRESS, CLSACT_EGRESS] {
        if !netlink.dump(RTM_GETTFILTER, &tcmsg(ifindex, 0, parent, 0))?.is_empty() {
            let why = "filters of others stand on clsact, which stays until they are gone";
            return Err(io::Error::new(io::ErrorKind::AddrInUse, why));
        }
    }
    let message = Attributes::after(&tcmsg(ifindex, CLSACT_HANDLE, CLSACT_PARENT, 0)).with_text(TCA_KIND, "clsact");
    netlink.request(RTM_DELQDISC, 0, message.bytes()).map(|_| ())
}

/// Whether Ontime's filter that puts these packets on this queue exists.
///
/// # Errors
/// The kernel's error.
pub(crate) fn has_filter(netlink: &mut Netlink, ifindex: u32, from: &SteerFrom, queue: u16) -> io::Result<bool> {
    let info = u32::from(PREFERENCE) << 16;
    let parts = netlink.dump(RTM_GETTFILTER, &tcmsg(ifindex, 0, CLSACT_EGRESS, info))?;
    Ok(parts.iter().any(|part| {
        parse_header(part).is_some_and(|header| {
            header.ifindex == ifindex && header.info >> 16 == u32::from(PREFERENCE) && header.handle == handle_of(from)
        }) && queue_of(part) == Some(queue)
    }))
}

/// Adds Ontime's filter, or replaces Ontime's filter for the same packets. An interface is matched by its name in
/// `from`.
///
/// # Errors
/// The kernel's: `ENOENT` if it is built without `cls_flower` or `act_skbedit`.
pub(crate) fn set_filter(netlink: &mut Netlink, ifindex: u32, from: &SteerFrom, queue: u16) -> io::Result<()> {
    let message = filter_message(ifindex, from, queue);
    netlink.request(RTM_NEWTFILTER, NLM_F_CREATE | NLM_F_REPLACE, message.bytes()).map(|_| ())
}

/// Removes Ontime's filter for these packets, if it exists. The interface from which they came need not exist any more.
///
/// # Errors
/// The kernel's error.
pub(crate) fn remove_filter(netlink: &mut Netlink, ifindex: u32, from: &SteerFrom) -> io::Result<()> {
    let header = tcmsg(ifindex, handle_of(from), CLSACT_EGRESS, info());
    let message = Attributes::after(&header).with_text(TCA_KIND, "flower");
    match netlink.request(RTM_DELTFILTER, 0, message.bytes()) {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        other => other.map(|_| ()),
    }
}

fn filter_message(ifindex: u32, from: &SteerFrom, queue: u16) -> Attributes {
    // struct tc_skbedit: index, capabilities, action, reference count, bind count.
    let mut parms = Vec::with_capacity(20);
    parms.extend_from_slice(&[0; 8]);
    parms.extend_from_slice(&TC_ACT_UNSPEC.to_ne_bytes());
    parms.extend_from_slice(&[0; 8]);
    let parms = Attributes::default().with(SKBEDIT_PARMS, &parms).with(SKBEDIT_QUEUE_MAPPING, &queue.to_ne_bytes());
    let action = Attributes::default().with_text(ACT_KIND, "skbedit").with_nested(ACT_OPTIONS, parms);
    let options = match from {
        SteerFrom::Interface(source) => Attributes::default().with_text(FLOWER_INDEV, &source.name),
        SteerFrom::SourceMac(mac) => {
            Attributes::default().with(FLOWER_KEY_ETH_SRC, mac).with(FLOWER_KEY_ETH_SRC_MASK, &[0xff; 6])
        }
    };
    let options = options
        .with_nested(FLOWER_ACT, Attributes::default().with_nested(1, action))
        .with_u32(FLOWER_FLAGS, FLOWER_SKIP_HW);
    Attributes::after(&tcmsg(ifindex, handle_of(from), CLSACT_EGRESS, info()))
        .with_text(TCA_KIND, "flower")
        .with_nested(TCA_OPTIONS, options)
}

fn info() -> u32 {
    u32::from(PREFERENCE) << 16 | u32::from(ETH_P_ALL.to_be())
}

pub(super) fn tcmsg(ifindex: u32, handle: u32, parent: u32, info: u32) -> Vec<u8> {
    let mut header = vec![0; 4];
    for field in [ifindex, handle, parent, info] {
        header.extend_from_slice(&field.to_ne_bytes());
    }
    header
}

pub(super) struct Header {
    pub(super) ifindex: u32,
    pub(super) handle: u32,
    pub(super) parent: u32,
    info: u32,
}

pub(super) fn parse_header(part: &[u8]) -> Option<Header> {
    let field = |at: usize| part.get(at..).and_then(read_u32);
    Some(Header { ifindex: field(4)?, handle: field(8)?, parent: field(12)?, info: field(16)? })
}

/// The kind of a qdisc or filter.
#[doc(hidden)]
pub fn kind_of(part: &[u8]) -> String {
    attribute(part.get(TCMSG..).unwrap_or_default(), TCA_KIND).map(read_text).unwrap_or_default()
}

/// The transmit queue on which one of Ontime's filters puts packets.
#[doc(hidden)]
pub fn queue_of(part: &[u8]) -> Option<u16> {
    let options = attribute(part.get(TCMSG..)?, TCA_OPTIONS)?;
    let first_action = attribute(attribute(options, FLOWER_ACT)?, 1)?;
    attribute(attribute(first_action, ACT_OPTIONS)?, SKBEDIT_QUEUE_MAPPING).and_then(read_u16)
}

fn attribute(bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(kind, _)| *kind == wanted).map(|(_, value)| value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::knob::NicId;

    fn tap() -> SteerFrom {
        SteerFrom::Interface(NicId { ifindex: 7, name: "tap0".to_owned() })
    }

    #[test]
    fn a_filter_reads_back_as_written() {
        let from = tap();
        let message = filter_message(3, &from, 63);
        let header = parse_header(message.bytes()).unwrap();
        assert_eq!((header.ifindex, header.handle, header.parent), (3, 7, 0xffff_fff3));
        assert_eq!(header.info, 0x004f_0300);
        assert_eq!(kind_of(message.bytes()), "flower");
        assert_eq!(queue_of(message.bytes()), Some(63));
    }

    #[test]
    fn filters_of_one_nic_have_handles_of_their_own() {
        let tap = handle_of(&tap());
        let mac = handle_of(&SteerFrom::SourceMac([0x52, 0x54, 0, 1, 2, 3]));
        let other = handle_of(&SteerFrom::SourceMac([0x52, 0x54, 0, 1, 2, 4]));
        assert!(tap != mac && mac != other && mac >= 0x8000_0000);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_without_harm(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            let _ = (parse_header(&bytes).is_some(), kind_of(&bytes), queue_of(&bytes));
        }
    }
}
