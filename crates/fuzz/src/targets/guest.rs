//! Data in a guest's memory.

use ontime_sched::ledger::{Budget, NOTHING};
use ontime_sockets::abi::*;
use ontime_sockets::fuzzing::{self, Access, Chain, FREE, Group, QUEUE, REGIONS};
use ontime_sockets::name::{self, Name};
use ontime_sockets::request::{self, Request};
use vm_memory::ByteValued;

use crate::input::Input;

/// More chains than the ring has, to detect that one is returned twice.
const MOST: usize = 3 * QUEUE as usize;
/// MSG_DONTWAIT and MSG_NOSIGNAL.
const QUIET: i32 = 0x40 | 0x4000;

/// A virtqueue as a channel reads it. Input: flags, the next chain's index, then the guest's memory from address 0.
///
/// Property: a chain that is taken has a head within the table and at most the descriptors of that table or of an
/// indirect one; each is answered once; if a call can be read, its bytes are in the guest's memory; iovecs of the
/// answer's space are within the guest's memory and no longer than the call says; an invalid index gives at most as
/// many chains as the ring has.
pub fn ring(data: &[u8]) {
    let mut input = Input::new(data);
    let (flags, base) = (input.byte(), u16::from(input.byte()));
    let event_idx = flags & 1 != 0;
    let base = if flags & 2 != 0 { u16::MAX.wrapping_sub(base) } else { base };
    let Ok((chains, used)) = fuzzing::chains(input.rest(), event_idx, base, MOST) else { return };
    // An answer that the guest directs into its own ring changes the ring's indexes.
    let rewrites = |chain: &Chain| chain.descriptors.iter().any(|(at, _, writable)| *writable && *at < FREE);
    assert!(chains.len() <= usize::from(QUEUE) || chains.iter().any(rewrites), "{} chains of {QUEUE}", chains.len());
    let answered = chains.iter().filter(|chain| chain.head.is_some()).count();
    // The driver may have written the index itself; the device's own index starts at the base.
    assert!(answered == 0 || used == base.wrapping_add(answered as u16), "{used} used of {base} and {answered}");
    chains.iter().for_each(check);
}

fn check(chain: &Chain) {
    let Some(head) = chain.head else { return };
    assert!(head < QUEUE);
    let sum = |write: bool| -> usize {
        let some = chain.descriptors.iter().filter(|(_, _, writable)| *writable == write);
        some.map(|(_, len, _)| *len as usize).sum()
    };
    let is_ordered = chain.descriptors.is_sorted_by_key(|(_, _, writable)| *writable);
    if let Ok((parts, request)) = &chain.request {
        assert!(is_ordered, "a readable part behind a writable one: {chain:?}");
        assert_eq!((sum(false), sum(true)), chain.lengths, "all descriptors are counted");
        let call = chain.call.unwrap_or_default();
        assert_eq!(CALL_LEN + usize::from(call.control_len) + parts.data, chain.lengths.0);
        assert_eq!(DONE_LEN + usize::from(call.control_room) + parts.room, chain.lengths.1);
        bounded(request);
    }
    if let Ok((inside, length)) = chain.room {
        assert!(inside, "an iovec leaves the guest's memory: {chain:?}");
        assert!(length <= chain.lengths.1.saturating_sub(DONE_LEN));
    }
    if chain.call.is_some() {
        let mut left = CALL_LEN as u64;
        for (address, len, _) in chain.descriptors.iter().filter(|(_, _, writable)| !writable) {
            let part = left.min(u64::from(*len));
            assert!(part == 0 || in_memory(*address, part), "read beyond the guest's memory: {chain:?}");
            left -= part;
        }
        assert_eq!(left, 0);
    }
    if chain.answer == Some(Ok(())) && chain.descriptors.iter().filter(|(_, _, write)| *write).count() == 1 {
        let writable = chain.descriptors.iter().find(|(_, _, writable)| *writable);
        assert!(writable.is_some_and(|(address, ..)| in_memory(*address, DONE_LEN as u64)));
    }
}

/// Whether a range is entirely in the guest's memory. The first two regions are adjacent.
fn in_memory(address: u64, len: u64) -> bool {
    let [(first, one), (_, two), (third, three)] = REGIONS.map(|(start, length)| (start, length as u64));
    let within = |start: u64, length: u64| {
        address.checked_sub(start).and_then(|at| at.checked_add(len)).is_some_and(|end| end <= length)
    };
    within(first, one + two) || within(third, three)
}

/// Fields that other code uses as indexes or limits are within their ranges.
fn bounded(request: &Request) {
    match *request {
        Request::Socket { channel, .. } | Request::Channel { channel } => assert!(channel < fuzzing::CHANNELS),
        Request::Shutdown { how } => assert!((0..=2).contains(&how)),
        Request::Query(number) => assert!(number <= ONTIME_QUERY_OUTQNSD),
        Request::Listen { backlog } => assert!(backlog >= 0),
        Request::Send { flags, .. } | Request::Recv { flags } => {
            assert_eq!(flags & QUIET, QUIET, "it could block or raise SIGPIPE");
        }
        _ => {}
    }
}

/// A call's header, an address, control messages and an option. Input: the header of a call, the lengths of its
/// buffers, then control messages or the option's value.
///
/// Property: the parts have the lengths of their buffers; a parsed address is the same after writing and parsing it
/// again; accepted control messages are a list of complete messages, which name no interface of the host where they may
/// not; an option that names a multicast group is long enough for the group, and a filter of sources for those that it
/// asks for; no option concerns a NIC's clock or its stamps of sent packets.
pub fn call(data: &[u8]) {
    let mut input = Input::new(data);
    let mut words = ontime_call::default();
    words.as_mut_slice().copy_from_slice(&input.bytes::<CALL_LEN>());
    let [readable, writable] = [0; 2].map(|_: u8| usize::from(u16::from_le_bytes(input.bytes())));
    let rest = input.rest();
    if let Ok(parts) = request::parts(&words, readable, writable, 4096) {
        assert_eq!(parts.data + CALL_LEN + usize::from(words.control_len), readable);
        assert_eq!(parts.room + DONE_LEN + usize::from(words.control_room), writable);
        assert!(parts.data <= 4096 && parts.room <= 4096 && words.control_len <= ONTIME_CONTROL_MAX as u16);
    }
    if let Ok(request) = request::request(&words, fuzzing::CHANNELS) {
        bounded(&request);
        if let Request::SetOpt { level, name } | Request::GetOpt { level, name } = request {
            if let Some(Access::Group(group) | Access::Filter(group)) = fuzzing::access(level, name) {
                assert!((4..=ONTIME_OPTION_MAX as usize).contains(&group.shortest()));
            }
            fuzzing::access(level, name).into_iter().for_each(|access| limited(access, rest));
        }
    }
    if let Ok(Name::Inet(address)) = name::parse(&words.addr, usize::from(words.addr_len)) {
        let (bytes, len) = name::write(&address);
        assert!(len <= words.addr_len, "{address} needs {len} bytes of {}", words.addr_len);
        assert_eq!(name::parse(&bytes, usize::from(len)), Ok(Name::Inet(address)));
        assert_eq!(name::destination(name::destination(address.ip())), name::destination(address.ip()));
    }
    fuzzing::holds_icmp_error(rest);
    if request::send_control(rest).is_ok() {
        let mut control = rest.to_vec();
        assert!(control.len() <= ONTIME_CONTROL_MAX as usize);
        fuzzing::leave_interface_to_routes(&mut control);
        // The kernel iterates over them in the same way (`__cmsg_nxthdr`, CMSG_OK).
        let mut at = 0;
        while at < control.len() {
            let length = u64::from_le_bytes(control[at..at + 8].try_into().unwrap()) as usize;
            assert!(length >= 16 && at + length <= control.len());
            let message = &control[at..at + length];
            assert!(request::send_control(message).is_ok(), "a message alone passes, too");
            let number =
                |at: usize| message.get(at..).and_then(|part| part.first_chunk()).map(|n| i32::from_le_bytes(*n));
            // Level and type of IP_PKTINFO, IPV6_PKTINFO and IPV6_2292PKTINFO, and where the interface is.
            let interface = match (number(8), number(12)) {
                (Some(0), Some(8)) => number(16),
                (Some(41), Some(50 | 2)) => number(32),
                _ => None,
            };
            assert!(interface.is_none_or(|index| matches!(index, 0 | 1) || index >= 1 << 30), "{message:?}");
            at += length.next_multiple_of(8);
        }
    }
}

/// Property: see [`call`].
fn limited(access: Access, value: &[u8]) {
    let mut value = value.to_vec();
    if !fuzzing::limit_value(access, &mut value) {
        return;
    }
    let number = |at: usize| value.get(at..).and_then(|part| part.first_chunk()).map_or(0, |n| u32::from_ne_bytes(*n));
    match access {
        Access::Filter(Group::V4First) => assert!(16 + 4 * u64::from(number(12)) <= value.len() as u64),
        Access::Filter(_) => assert!(144 + 128 * u64::from(number(140)) <= value.len() as u64),
        // SOF_TIMESTAMPING_TX_HARDWARE and SOF_TIMESTAMPING_BIND_PHC.
        Access::Stamps => assert_eq!(number(0) & (1 | 1 << 15), 0),
        _ => {}
    }
}

/// The control queue with everything behind it: vCPU words, published deadlines, bandwidth. Input: which vCPUs get an
/// offer, whether the daemon admits, then the guest's memory from address 0.
///
/// Property: the bandwidth that the guest holds is within the limits of the ABI, and within the offers if the daemon
/// admits nothing; vCPU words are in the guest's memory; the daemon gets well-formed lines within the ABI's limits.
pub fn control(data: &[u8]) {
    let mut input = Input::new(data);
    let (offered, admits) = (input.byte(), input.byte() & 1 != 0);
    let offer = Budget { budget: 4_000_000, period: 10_000_000 };
    let mut offers = NOTHING;
    for vcpu in (0..8).filter(|vcpu| offered & (1 << vcpu) != 0) {
        offers[vcpu] = offer;
    }
    let Ok(done) = fuzzing::control(input.rest(), &offers, admits) else { return };
    let periods = u64::from(ONTIME_BW_PERIOD_MIN)..=u64::from(ONTIME_BW_PERIOD_MAX);
    for need in &done.held {
        assert!(need.vcpu < ONTIME_VCPUS_MAX && need.budget > 0 && need.budget <= need.period, "{need:?}");
        assert!(periods.contains(&need.period), "{need:?}");
        let own = Budget { budget: need.budget, period: need.period };
        assert!(admits || own.fits(&offers[need.vcpu as usize]), "not admitted and not offered: {need:?}");
    }
    assert!(done.held.is_sorted_by(|one, other| one.vcpu < other.vcpu));
    let (offers, claimed) = &done.ledger;
    assert!(claimed.iter().zip(offers).all(|(held, offer)| held.fits(offer)), "a claim beyond the offer");
    for word in &done.words {
        assert!(*word == 0 || in_memory(*word, size_of::<ontime_vcpu>() as u64), "a vCPU word at {word:#x}");
    }
    for asked in &done.told {
        assert!(asked.vcpus.len() <= ONTIME_VCPUS_MAX as usize && asked.files.len() <= 2);
        assert!(asked.next.is_none_or(|offset| offset % u64::from(ONTIME_NEXT_ALIGN) == 0));
    }
}
