//! Reads and sets the interfaces' root qdiscs.
//!
//! Source: `net/sched/sch_api.c`, `net/sched/sch_generic.c` (`noqueue_qdisc_ops`), `include/uapi/linux/pkt_sched.h`. A
//! qdisc that the kernel attached by default has handle 0. Ontime's has a handle of its own. Any other handle belongs
//! to the administrator or another program.

use std::collections::BTreeMap;
use std::io;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};

use super::tc::{RTM_DELQDISC, RTM_GETQDISC, RTM_NEWQDISC, TCA_KIND, kind_of, parse_header, tcmsg};
use super::{Attributes, Netlink};

const TC_H_ROOT: u32 = 0xffff_ffff;
/// The handle of the qdisc that Ontime attaches. Its kind is [`NONE`].
const OURS: u32 = 0x4f50_0000;
/// No queue: packets go directly to the driver, or are dropped if the driver takes none.
pub const NONE: &str = "noqueue";
/// The kernel's default qdisc.
pub const DEFAULT: &str = "default";

/// An interface's root qdisc, and who attached it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RootQdisc {
    /// The kernel's default.
    Default,
    /// Attached by Ontime: [`NONE`].
    Ours,
    /// Attached by the administrator or another program; kind and handle.
    Others(String, u32),
}

impl RootQdisc {
    /// As a knob's value: `default`, `noqueue`, or `htb 1:` for another program's.
    pub fn text(&self) -> String {
        match self {
            RootQdisc::Default => DEFAULT.to_owned(),
            RootQdisc::Ours => NONE.to_owned(),
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
    let root = match header.handle {
        0 => RootQdisc::Default,
        OURS if kind == NONE => RootQdisc::Ours,
        handle => RootQdisc::Others(kind, handle),
    };
    Some((header.ifindex, root))
}

/// Attaches the root qdisc [`NONE`]. Packets in the old qdisc are dropped (`net/sched/sch_generic.c`,
/// `dev_deactivate`). [`DEFAULT`] removes Ontime's qdisc, and the kernel attaches its default.
///
/// # Errors
/// The kernel's; `EINVAL` for any other kind.
pub(crate) fn set_root(netlink: &mut Netlink, ifindex: u32, kind: &str) -> io::Result<()> {
    match kind {
        DEFAULT => match roots(netlink)?.remove(&ifindex) {
            Some(RootQdisc::Ours) => netlink.request(RTM_DELQDISC, 0, &tcmsg(ifindex, OURS, TC_H_ROOT, 0)).map(|_| ()),
            _ => Ok(()),
        },
        NONE => {
            let message = root_message(ifindex, NONE);
            netlink.request(RTM_NEWQDISC, NLM_F_CREATE | NLM_F_REPLACE, message.bytes()).map(|_| ())
        }
        _ => Err(io::Error::from_raw_os_error(libc::EINVAL)),
    }
}

fn root_message(ifindex: u32, kind: &str) -> Attributes {
    Attributes::after(&tcmsg(ifindex, OURS, TC_H_ROOT, 0)).with_text(TCA_KIND, kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_is_told_by_its_handle() {
        let of_kind = |kind| root_of(root_message(7, kind).bytes());
        assert_eq!(of_kind(NONE), Some((7, RootQdisc::Ours)));
        assert_eq!(of_kind("prio").unwrap().1.text(), "prio 4f50:", "another program's, by chance with this handle");
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
