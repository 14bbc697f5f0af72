//! Control messages: which of a SEND are passed to the host's socket, and those made here (pure).
//!
//! The layout is the host's own, so messages are passed without translation. All others are refused.

use crate::abi::{Errno, ONTIME_CONTROL_MAX};
use crate::options::{SOF_TIMESTAMPING_TX_HARDWARE, harmless_interface};

const HEADER: usize = size_of::<libc::cmsghdr>();
/// Missing in the libc crate.
const SCM_TS_OPT_ID: i32 = 81;
const IPV6_2292PKTINFO: i32 = 2;
const IPV6_2292HOPLIMIT: i32 = 8;

/// (level, type, longest value in bytes, purpose) of each message that is passed.
const PASSED: &[(i32, i32, usize, &str)] = &[
    (libc::SOL_SOCKET, libc::SCM_TIMESTAMPING, 4, "SO_TIMESTAMPING: stamps asked for one message"),
    (libc::SOL_SOCKET, SCM_TS_OPT_ID, 4, "the number that the stamps of one message carry (Linux 6.13)"),
    (libc::SOL_SOCKET, libc::SO_PRIORITY, 4, "priority of one message: 0 to 6, as by the option"),
    (libc::IPPROTO_IP, libc::IP_PKTINFO, 12, "source address of one datagram"),
    (libc::IPPROTO_IP, libc::IP_TTL, 4, "TTL of one datagram"),
    (libc::IPPROTO_IP, libc::IP_TOS, 4, "DSCP of one datagram"),
    (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, 20, "source address of one datagram"),
    (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT, 4, "hop limit of one datagram"),
    (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, 4, "DSCP of one datagram"),
    (libc::IPPROTO_IPV6, libc::IPV6_DONTFRAG, 4, "whether one datagram may be fragmented"),
    (libc::IPPROTO_IPV6, IPV6_2292PKTINFO, 20, "IPV6_PKTINFO by RFC 2292"),
    (libc::IPPROTO_IPV6, IPV6_2292HOPLIMIT, 4, "IPV6_HOPLIMIT by RFC 2292"),
    (libc::IPPROTO_UDP, libc::UDP_SEGMENT, 2, "segment size of one send (GSO)"),
];

/// Checks the control messages of a SEND.
///
/// # Errors
/// EINVAL if a length exceeds the buffer, or a message is not in the list or asks the NIC for a stamp
/// (`options::limit_stamps`).
pub(crate) fn check(bytes: &[u8]) -> Result<(), Errno> {
    let invalid = Errno(libc::EINVAL);
    if bytes.len() > ONTIME_CONTROL_MAX as usize {
        return Err(invalid);
    }
    let mut rest = bytes;
    while !rest.is_empty() {
        let len = usize::try_from(u64::from_le_bytes(*rest.first_chunk().ok_or(invalid)?)).map_err(|_| invalid)?;
        let field =
            |at: usize| rest.get(at..).and_then(|part| part.first_chunk()).map(|part| i32::from_le_bytes(*part));
        let (level, kind) = (field(8).ok_or(invalid)?, field(12).ok_or(invalid)?);
        let data = len.checked_sub(HEADER).ok_or(invalid)?;
        if len > rest.len() || !PASSED.iter().any(|(l, k, max, _)| (*l, *k) == (level, kind) && data <= *max) {
            return Err(invalid);
        }
        let asks_nic = field(HEADER).is_some_and(|flags| flags as u32 & SOF_TIMESTAMPING_TX_HARDWARE != 0);
        if (level, kind) == (libc::SOL_SOCKET, libc::SCM_TIMESTAMPING) && asks_nic {
            return Err(invalid);
        }
        // The last message need not be padded.
        rest = rest.get(len.next_multiple_of(8)..).unwrap_or_default();
    }
    Ok(())
}

/// Clears the interface index of each IP_PKTINFO and IPV6_PKTINFO that names an interface which the host may have. The
/// routes choose the interface then, as for a message without an index; the source address stays. For messages that
/// `check` has let pass, on a socket in the host's own network.
pub(crate) fn leave_interface_to_routes(bytes: &mut [u8]) {
    let mut rest = bytes;
    while let Some(len) = rest.first_chunk().and_then(|len| usize::try_from(u64::from_le_bytes(*len)).ok()) {
        let field =
            |at: usize| rest.get(at..).and_then(|part| part.first_chunk()).map(|part| i32::from_le_bytes(*part));
        // The index is first in struct in_pktinfo, and behind the address in struct in6_pktinfo.
        let at = match (field(8), field(12)) {
            (Some(libc::IPPROTO_IP), Some(libc::IP_PKTINFO)) => Some(HEADER),
            (Some(libc::IPPROTO_IPV6), Some(libc::IPV6_PKTINFO | IPV6_2292PKTINFO)) => Some(HEADER + 16),
            _ => None,
        };
        // The kernel refuses a message without one.
        let whole = |at: &usize| len >= at + size_of::<i32>();
        let harmful = |at: &usize| field(*at).is_some_and(|index| !harmless_interface(index));
        if let Some(at) = at.filter(whole).filter(harmful) {
            rest.iter_mut().skip(at).take(size_of::<i32>()).for_each(|byte| *byte = 0);
        }
        let Some(next) = len.max(HEADER).checked_next_multiple_of(8) else { return };
        rest = std::mem::take(&mut rest).get_mut(next..).unwrap_or_default();
    }
}

/// A control message whose data is a number.
pub(crate) fn number(level: i32, kind: i32, value: i32) -> [[u8; 4]; HEADER / 4 + 1] {
    // The length has 8 bytes.
    [(HEADER + size_of::<i32>()) as i32, 0, level, kind, value].map(i32::to_le_bytes)
}

/// Whether a message from the error queue was caused by ICMP: then the kernel also sets the socket's pending error
/// until it is read.
pub fn holds_icmp_error(bytes: &[u8]) -> bool {
    let mut rest = bytes;
    while let Some(len) = rest.first_chunk().and_then(|len| usize::try_from(u64::from_le_bytes(*len)).ok()) {
        let field = |at: usize| rest.get(at..)?.first_chunk().map(|part| i32::from_le_bytes(*part));
        let extended = matches!(
            (field(8), field(12)),
            (Some(libc::IPPROTO_IP), Some(libc::IP_RECVERR)) | (Some(libc::IPPROTO_IPV6), Some(libc::IPV6_RECVERR))
        );
        // struct sock_extended_err: the errno, then the origin.
        let origin = rest.get(HEADER + size_of::<u32>()).copied();
        if extended && matches!(origin, Some(libc::SO_EE_ORIGIN_ICMP | libc::SO_EE_ORIGIN_ICMP6)) {
            return true;
        }
        let next = len.max(HEADER).checked_next_multiple_of(8);
        rest = next.and_then(|next| rest.get(next..)).unwrap_or_default();
    }
    false
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(level: i32, kind: i32, data: &[u8]) -> Vec<u8> {
        let mut bytes = ((HEADER + data.len()) as u64).to_le_bytes().to_vec();
        bytes.extend(level.to_le_bytes());
        bytes.extend(kind.to_le_bytes());
        bytes.extend(data);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }

    /// Found by fuzzing (`call`): the offset overflowed, and without overflow checks the loop did not end.
    #[test]
    fn a_length_at_the_end_of_the_numbers_ends_the_walk() {
        for len in [u64::MAX, u64::MAX - 7, u64::MAX - 8, 0] {
            let bytes = [&len.to_le_bytes()[..], &[0; 24]].concat();
            assert!(!holds_icmp_error(&bytes));
            assert!(check(&bytes).is_err());
        }
    }

    #[test]
    fn listed_messages_pass() {
        let mut two = message(libc::IPPROTO_IP, libc::IP_TTL, &9i32.to_le_bytes());
        two.extend(message(libc::IPPROTO_IP, libc::IP_PKTINFO, &[0; 12]));
        assert_eq!(check(&two), Ok(()));
        two.truncate(two.len() - 4);
        assert_eq!(check(&two), Ok(()), "the last one's padding may be missing");
        // A number of the sender's own, which is no set of flags.
        assert_eq!(check(&message(libc::SOL_SOCKET, SCM_TS_OPT_ID, &u32::MAX.to_le_bytes())), Ok(()));
        assert_eq!(check(&message(libc::SOL_SOCKET, SCM_TS_OPT_ID, &[0; 8])), Err(Errno(libc::EINVAL)));
        assert_eq!(check(&[]), Ok(()));
    }

    #[test]
    fn no_message_asks_the_nic_for_a_stamp() {
        for (flags, passes) in [(2u32, true), (0x82, true), (1, false), (0x83, false)] {
            let message = message(libc::SOL_SOCKET, libc::SCM_TIMESTAMPING, &flags.to_le_bytes());
            assert_eq!(check(&message).is_ok(), passes, "{flags:#x}");
        }
        assert_eq!(check(&message(libc::IPPROTO_IP, libc::IP_TTL, &1i32.to_le_bytes())), Ok(()));
    }

    #[test]
    fn interfaces_of_the_host_are_left_to_its_routes() {
        let v4 = |index: i32| [&index.to_le_bytes()[..], &[127, 0, 0, 1, 9, 9, 9, 9]].concat();
        let v6 = |index: i32| [&[7u8; 16][..], &index.to_le_bytes()].concat();
        for (index, left) in [(0, 0), (1, 1), (2, 0), (77, 0), (-1, 0), (1 << 30, 1 << 30)] {
            let messages = |index: i32| {
                [
                    message(libc::IPPROTO_IP, libc::IP_TTL, &2i32.to_le_bytes()),
                    message(libc::IPPROTO_IP, libc::IP_PKTINFO, &v4(index)),
                    message(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &v6(index)),
                    message(libc::IPPROTO_IPV6, IPV6_2292PKTINFO, &v6(index)),
                ]
                .concat()
            };
            let mut bytes = messages(index);
            assert_eq!(check(&bytes), Ok(()));
            leave_interface_to_routes(&mut bytes);
            assert_eq!(bytes, messages(left), "{index}");
        }
        // Too short to have an index: what follows is another message.
        let mut short = message(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &[7; 16]);
        short.extend(message(libc::IPPROTO_IP, libc::IP_TTL, &9i32.to_le_bytes()));
        let before = short.clone();
        leave_interface_to_routes(&mut short);
        assert_eq!(short, before);
    }

    #[test]
    fn a_number_is_a_message() {
        let padded = message(libc::SOL_SOCKET, libc::SO_SNDBUF, &4608i32.to_le_bytes());
        assert_eq!(number(libc::SOL_SOCKET, libc::SO_SNDBUF, 4608).as_flattened(), &padded[..HEADER + 4]);
    }

    #[test]
    fn descriptors_and_lies_do_not() {
        let invalid = Err(Errno(libc::EINVAL));
        assert_eq!(check(&message(libc::SOL_SOCKET, libc::SCM_RIGHTS, &[0; 4])), invalid);
        assert_eq!(check(&message(libc::IPPROTO_IP, libc::IP_TTL, &[0; 64])), invalid);
        let mut long = message(libc::IPPROTO_IP, libc::IP_TTL, &[0; 4]);
        long[0] = 200;
        assert_eq!(check(&long), invalid);
        let mut none = long.clone();
        none[0] = 0;
        assert_eq!(check(&none), invalid);
        long[0..8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(check(&long), invalid);
    }

    #[test]
    fn an_icmp_error_is_told_from_a_time_stamp() {
        let extended = |origin: u8| [111, 0, 0, 0, origin, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let mut bytes = message(libc::IPPROTO_IP, libc::IP_TTL, &9i32.to_le_bytes());
        bytes.extend(message(libc::IPPROTO_IP, libc::IP_RECVERR, &extended(libc::SO_EE_ORIGIN_ICMP)));
        assert!(holds_icmp_error(&bytes));
        assert!(holds_icmp_error(&message(
            libc::IPPROTO_IPV6,
            libc::IPV6_RECVERR,
            &extended(libc::SO_EE_ORIGIN_ICMP6)
        )));
        for origin in [libc::SO_EE_ORIGIN_NONE, libc::SO_EE_ORIGIN_LOCAL, libc::SO_EE_ORIGIN_TIMESTAMPING] {
            assert!(!holds_icmp_error(&message(libc::IPPROTO_IP, libc::IP_RECVERR, &extended(origin))), "{origin}");
        }
        assert!(!holds_icmp_error(&message(libc::IPPROTO_IPV6, libc::IP_RECVERR, &extended(2))), "the wrong level");
        assert!(!holds_icmp_error(&[]) && !holds_icmp_error(&bytes[..30]));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic_or_loop(bytes in proptest::collection::vec(any::<u8>(), 0..1100)) {
            let _ = (check(&bytes), holds_icmp_error(&bytes));
            leave_interface_to_routes(&mut bytes.clone());
        }
    }
}
