//! Reads and sets the interfaces' root qdiscs.
//!
//! Source: `net/sched/sch_api.c`, `net/sched/sch_prio.c`, `net/sched/sch_generic.c` (`noqueue_qdisc_ops`),
//! `include/uapi/linux/pkt_sched.h`. A qdisc that the kernel attached by default has handle 0. Ontime's has a handle of
//! [`OURS`]. Any other handle belongs to the administrator or another program.

use std::collections::BTreeMap;
use std::io;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};

use super::tc::{RTM_DELQDISC, RTM_GETQDISC, RTM_NEWQDISC, TCA_KIND, TCA_OPTIONS, kind_of, parse_header, tcmsg};
use super::{Attributes, Netlink};

const TC_H_ROOT: u32 = 0xffff_ffff;
/// The kinds that Ontime attaches, with their handles. The kernel does not replace a qdisc by another kind under the
/// same handle (`net/sched/sch_api.c`, `tc_modify_qdisc`: EINVAL), so each kind has its own handle.
pub(crate) const OURS: [(&str, u32); 3] = [("prio", 0x4f4e_0000), ("fq_codel", 0x4f4f_0000), (NONE, 0x4f50_0000)];
/// No queue: packets go directly to the driver, or are dropped if the driver takes none.
pub const NONE: &str = "noqueue";
/// The kernel's default qdisc.
pub const DEFAULT: &str = "default";

/// An interface's root qdisc, and who attached it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RootQdisc {
    /// The kernel's default.
    Default,
    /// Attached by Ontime; the kind.
    Ours(String),
    /// Attached by the administrator or another program; kind and handle.
    Others(String, u32),
}

impl RootQdisc {
    /// As a knob's value: `default`, `prio`, or `htb 1:` for another program's.
    pub fn text(&self) -> String {
        match self {
            RootQdisc::Default => DEFAULT.to_owned(),
            RootQdisc::Ours(kind) => kind.clone(),
            RootQdisc::Others(kind, handle) => format!("{kind} {:x}:", handle >> 16),
        }
    }
}

/// Root qdiscs by interface index. An interface that is down has none.
///
/// # Errors
/// The kernel's error.
pub fn roots(netlink: &mut Netlink) -> io::Result<BTreeMap<u32, RootQdisc>> {
    let parts = netlink.dump(RTM_GETQDISC, &tcmsg(0, 0, 0, 0))?;
    Ok(parts.iter().filter_map(|part| root_of(part)).collect())
}

/// Interface index and root qdisc; `None` if the qdisc is not a root qdisc.
#[doc(hidden)]
pub fn root_of(part: &[u8]) -> Option<(u32, RootQdisc)> {
    let header = parse_header(part).filter(|header| header.parent == TC_H_ROOT)?;
    let kind = kind_of(part);
    let ours = OURS.iter().any(|(name, handle)| *name == kind && *handle == header.handle);
    let root = match header.handle {
        0 => RootQdisc::Default,
        _ if ours => RootQdisc::Ours(kind),
        handle => RootQdisc::Others(kind, handle),
    };
    Some((header.ifindex, root))
}

/// Attaches a root qdisc of [`OURS`]; `prio` has the kernel's default three bands. Packets in the old qdisc are dropped
/// (`net/sched/sch_generic.c`, `dev_deactivate`). [`DEFAULT`] removes Ontime's qdisc, and the kernel attaches its
/// default.
///
/// # Errors
/// The kernel's: `ENOENT` if the kernel has no such kind; `EINVAL` if the kind is not in [`OURS`].
pub(crate) fn set_root(netlink: &mut Netlink, ifindex: u32, kind: &str) -> io::Result<()> {
    if kind == DEFAULT {
        let Some(RootQdisc::Ours(now)) = roots(netlink)?.remove(&ifindex) else { return Ok(()) };
        let header = tcmsg(ifindex, handle_of(&now)?, TC_H_ROOT, 0);
        return netlink.request(RTM_DELQDISC, 0, &header).map(|_| ());
    }
    let message = root_message(ifindex, kind, handle_of(kind)?);
    netlink.request(RTM_NEWQDISC, NLM_F_CREATE | NLM_F_REPLACE, message.bytes()).map(|_| ())
}

fn handle_of(kind: &str) -> io::Result<u32> {
    let known = OURS.iter().find(|(name, _)| *name == kind);
    known.map(|(_, handle)| *handle).ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))
}

fn root_message(ifindex: u32, kind: &str, handle: u32) -> Attributes {
    let message = Attributes::after(&tcmsg(ifindex, handle, TC_H_ROOT, 0)).with_text(TCA_KIND, kind);
    if kind != "prio" {
        return message;
    }
    // struct tc_prio_qopt: number of bands, then the band for each skb->priority, as in pfifo_fast and tc-prio(8).
    let mut options = 3i32.to_ne_bytes().to_vec();
    options.extend_from_slice(&[1, 2, 2, 2, 1, 2, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]);
    message.with(TCA_OPTIONS, &options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_is_told_by_its_handle() {
        for (kind, handle) in OURS {
            let ours = root_message(7, kind, handle);
            assert_eq!(root_of(ours.bytes()), Some((7, RootQdisc::Ours(kind.to_owned()))));
        }
        let theirs = root_message(7, "prio", handle_of("fq_codel").unwrap());
        assert_eq!(root_of(theirs.bytes()).unwrap().1.text(), "prio 4f4f:");
        let of = |handle, parent| {
            root_of(Attributes::after(&tcmsg(3, handle, parent, 0)).with_text(TCA_KIND, "htb").bytes())
        };
        assert_eq!(of(0, TC_H_ROOT), Some((3, RootQdisc::Default)));
        let (_, others) = of(0x10000, TC_H_ROOT).unwrap();
        assert_eq!(others.text(), "htb 1:");
        assert_eq!(of(0x10000, 0x10001), None, "a child is no root");
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_without_harm(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            let _ = root_of(&bytes);
        }
    }
}
