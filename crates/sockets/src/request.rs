//! Parses and checks a call's header as the guest wrote it (pure: no access to sockets).

use crate::abi::*;
use crate::control;
use crate::name::{self, Name};

/// Missing in the libc crate.
const MSG_PROBE: i32 = 0x10;
/// Message flags that SEND accepts. DONTWAIT and NOSIGNAL are implied.
pub(crate) const SEND_FLAGS: u32 = (libc::MSG_OOB
    | libc::MSG_DONTROUTE
    | libc::MSG_DONTWAIT
    | libc::MSG_EOR
    | libc::MSG_CONFIRM
    | MSG_PROBE
    | libc::MSG_NOSIGNAL
    | libc::MSG_MORE) as u32;
/// Message flags that RECV accepts.
pub(crate) const RECV_FLAGS: u32 = (libc::MSG_OOB
    | libc::MSG_PEEK
    | libc::MSG_TRUNC
    | libc::MSG_DONTWAIT
    | libc::MSG_WAITALL
    | libc::MSG_NOSIGNAL
    | libc::MSG_ERRQUEUE
    | libc::MSG_CMSG_CLOEXEC) as u32;

/// Supported protocols.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Protocol {
    /// SOCK_STREAM.
    Tcp,
    /// SOCK_DGRAM.
    Udp,
}

/// Supported address families.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// AF_INET.
    V4,
    /// AF_INET6.
    V6,
}

/// A call's operation. The fields have the names of docs/reference/device.md.
#[allow(missing_docs, reason = "the fields are the call's arguments, described there")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Open a socket with the id `sock` of the call.
    Socket { family: Family, protocol: Protocol, channel: u32 },
    /// Set the local address.
    Bind(Name),
    /// Listen for connections.
    Listen { backlog: i32 },
    /// Connect, or with AF_UNSPEC disconnect.
    Connect(Name),
    /// Accept a connection as `new`.
    Accept { new: u32 },
    /// Send the readable data.
    Send { flags: i32, to: Name },
    /// Receive into the writable data.
    Recv { flags: i32 },
    /// Shut down one or both directions.
    Shutdown { how: i32 },
    /// Set an option to the readable data.
    SetOpt { level: i32, name: i32 },
    /// Read an option into the writable data.
    GetOpt { level: i32, name: i32 },
    /// Get the local or the remote address.
    Name { peer: bool },
    /// Get a queue length (ONTIME_QUERY_*).
    Query(u32),
    /// Close.
    Close { abort: bool },
    /// Cancel a waiting call of this queue.
    Cancel { id: u64 },
    /// Move the socket to another channel.
    Channel { channel: u32 },
    /// Report the readiness only.
    Poll,
}

impl Request {
    /// Whether the call cannot block, so that a channel's queue accepts it.
    pub(crate) fn is_fast(&self) -> bool {
        use Request::{Accept, Cancel, Name, Poll, Query, Recv, Send, Shutdown};
        matches!(
            self,
            Accept { .. } | Send { .. } | Recv { .. } | Shutdown { .. } | Name { .. } | Query(_) | Cancel { .. } | Poll
        )
    }
}

/// Sizes of a call's data without headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parts {
    /// Bytes of data in the readable part.
    pub data: usize,
    /// Bytes of space for data in the writable part.
    pub room: usize,
}

/// Checks the fields that every call has against the lengths of its buffers.
///
/// # Errors
/// EINVAL if they contradict each other or a reserved field is not 0, EMSGSIZE for too much data.
pub fn parts(call: &ontime_call, readable: usize, writable: usize, data_max: usize) -> Result<Parts, Errno> {
    let invalid = Errno(libc::EINVAL);
    let limit = ONTIME_CONTROL_MAX as u16;
    if call.reserved != 0
        || u32::from(call.flags) & !(ONTIME_CALL_WAIT | ONTIME_CALL_BLIND | ONTIME_CALL_AHEAD) != 0
        || call.prio > 99
        || call.control_len > limit
        || call.control_room > limit
    {
        return Err(invalid);
    }
    let data = readable.checked_sub(CALL_LEN + usize::from(call.control_len)).ok_or(invalid)?;
    let room = writable.checked_sub(DONE_LEN + usize::from(call.control_room)).ok_or(invalid)?;
    if data > data_max || room > data_max {
        return Err(Errno(libc::EMSGSIZE));
    }
    Ok(Parts { data, room })
}

/// Parses a call's operation and arguments.
///
/// # Errors
/// EOPNOTSUPP for an unknown operation; EINVAL and the like for invalid arguments.
pub fn request(call: &ontime_call, channels: u32) -> Result<Request, Errno> {
    let invalid = Errno(libc::EINVAL);
    let [a0, a1, a2, a3] = call.arg;
    let name = || name::parse(&call.addr, usize::from(call.addr_len));
    let channel = |number: u32| if number < channels { Ok(number) } else { Err(invalid) };
    // The second value is the operation's number of arguments; the others are reserved.
    let (request, used) = match u32::from(call.op) {
        ONTIME_OP_SOCKET => {
            let request = Request::Socket { family: family(a0)?, protocol: protocol(a1, a2)?, channel: channel(a3)? };
            (request, 4)
        }
        ONTIME_OP_BIND => (Request::Bind(name()?), 0),
        ONTIME_OP_LISTEN => (Request::Listen { backlog: i32::try_from(a0).unwrap_or(i32::MAX) }, 1),
        ONTIME_OP_CONNECT => (Request::Connect(name()?), 0),
        ONTIME_OP_ACCEPT => (Request::Accept { new: a0 }, 1),
        ONTIME_OP_SEND => (Request::Send { flags: flags(a0, SEND_FLAGS)?, to: name()? }, 1),
        ONTIME_OP_RECV => (Request::Recv { flags: flags(a0, RECV_FLAGS)? }, 1),
        ONTIME_OP_SHUTDOWN if a0 <= 2 => (Request::Shutdown { how: a0 as i32 }, 1),
        ONTIME_OP_SETOPT => (Request::SetOpt { level: a0 as i32, name: a1 as i32 }, 2),
        ONTIME_OP_GETOPT => (Request::GetOpt { level: a0 as i32, name: a1 as i32 }, 2),
        ONTIME_OP_NAME if a0 <= ONTIME_NAME_PEER => (Request::Name { peer: a0 == ONTIME_NAME_PEER }, 1),
        ONTIME_OP_QUERY if a0 <= ONTIME_QUERY_OUTQNSD => (Request::Query(a0), 1),
        ONTIME_OP_CLOSE if a0 <= ONTIME_CLOSE_ABORT => (Request::Close { abort: a0 == ONTIME_CLOSE_ABORT }, 1),
        ONTIME_OP_CANCEL => (Request::Cancel { id: u64::from(a0) | u64::from(a1) << 32 }, 2),
        ONTIME_OP_CHANNEL => (Request::Channel { channel: channel(a0)? }, 1),
        ONTIME_OP_POLL => (Request::Poll, 0),
        ONTIME_OP_SHUTDOWN | ONTIME_OP_NAME | ONTIME_OP_QUERY | ONTIME_OP_CLOSE => return Err(invalid),
        _ => return Err(Errno(libc::EOPNOTSUPP)),
    };
    let reserved_used = call.arg.iter().skip(used).any(|arg| *arg != 0);
    let control_unused = call.control_len != 0 && !matches!(request, Request::Send { .. });
    if reserved_used || control_unused {
        return Err(invalid);
    }
    Ok(request)
}

/// Checks the control messages of a SEND.
///
/// # Errors
/// EINVAL for a malformed message or one that is not passed.
pub fn send_control(bytes: &[u8]) -> Result<(), Errno> {
    control::check(bytes)
}

fn family(number: u32) -> Result<Family, Errno> {
    match number as i32 {
        libc::AF_INET => Ok(Family::V4),
        libc::AF_INET6 => Ok(Family::V6),
        _ => Err(Errno(libc::EAFNOSUPPORT)),
    }
}

fn protocol(kind: u32, number: u32) -> Result<Protocol, Errno> {
    match (kind as i32, number as i32) {
        (libc::SOCK_STREAM, 0 | libc::IPPROTO_TCP) => Ok(Protocol::Tcp),
        (libc::SOCK_DGRAM, 0 | libc::IPPROTO_UDP) => Ok(Protocol::Udp),
        (libc::SOCK_STREAM | libc::SOCK_DGRAM, _) => Err(Errno(libc::EPROTONOSUPPORT)),
        _ => Err(Errno(libc::ESOCKTNOSUPPORT)),
    }
}

fn flags(flags: u32, allowed: u32) -> Result<i32, Errno> {
    if flags & !allowed != 0 {
        return Err(Errno(libc::EINVAL));
    }
    Ok((flags | (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as u32) as i32)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn call(op: u32) -> ontime_call {
        ontime_call { op: op as u16, ..Default::default() }
    }

    #[test]
    fn reserved_fields_and_unknown_numbers_are_refused() {
        let invalid = Err(Errno(libc::EINVAL));
        let mut reserved = call(ONTIME_OP_POLL);
        reserved.reserved = 1;
        assert_eq!(parts(&reserved, CALL_LEN, DONE_LEN, 10), invalid);
        let mut prio = call(ONTIME_OP_POLL);
        prio.prio = 100;
        assert_eq!(parts(&prio, CALL_LEN, DONE_LEN, 10), invalid);
        let mut argument = call(ONTIME_OP_POLL);
        argument.arg[3] = 1;
        assert_eq!(request(&argument, 1), Err(Errno(libc::EINVAL)));
        let mut how = call(ONTIME_OP_SHUTDOWN);
        how.arg[0] = 3;
        assert_eq!(request(&how, 1), Err(Errno(libc::EINVAL)));
        assert_eq!(request(&call(0), 1), Err(Errno(libc::EOPNOTSUPP)));
        assert_eq!(request(&call(ONTIME_CTL_VCPU), 1), Err(Errno(libc::EOPNOTSUPP)));
    }

    #[test]
    fn the_parts_must_fit_the_buffers() {
        let mut one = call(ONTIME_OP_SEND);
        one.control_len = 8;
        assert_eq!(parts(&one, CALL_LEN + 7, DONE_LEN, 10), Err(Errno(libc::EINVAL)));
        assert_eq!(parts(&one, CALL_LEN + 8, DONE_LEN, 10), Ok(Parts { data: 0, room: 0 }));
        assert_eq!(parts(&one, CALL_LEN + 18, DONE_LEN + 10, 10), Ok(Parts { data: 10, room: 10 }));
        assert_eq!(parts(&one, CALL_LEN + 19, DONE_LEN, 10), Err(Errno(libc::EMSGSIZE)));
        assert_eq!(parts(&one, CALL_LEN + 8, DONE_LEN - 1, 10), Err(Errno(libc::EINVAL)));
    }

    #[test]
    fn a_socket_is_asked_for_as_the_system_call_would() {
        let ask = |family: i32, kind: i32, protocol: i32, channel: u32| {
            let mut ask = call(ONTIME_OP_SOCKET);
            ask.arg = [family as u32, kind as u32, protocol as u32, channel];
            request(&ask, 2)
        };
        assert_eq!(ask(2, 1, 6, 1), Ok(Request::Socket { family: Family::V4, protocol: Protocol::Tcp, channel: 1 }));
        assert_eq!(ask(10, 2, 0, 0), Ok(Request::Socket { family: Family::V6, protocol: Protocol::Udp, channel: 0 }));
        assert_eq!(ask(1, 1, 0, 0), Err(Errno(libc::EAFNOSUPPORT)));
        assert_eq!(ask(2, 3, 0, 0), Err(Errno(libc::ESOCKTNOSUPPORT)));
        assert_eq!(ask(2, 1, 132, 0), Err(Errno(libc::EPROTONOSUPPORT)));
        assert_eq!(ask(2, 1, 0, 2), Err(Errno(libc::EINVAL)));
    }

    #[test]
    fn message_flags_never_block_nor_signal() {
        let mut recv = call(ONTIME_OP_RECV);
        recv.arg[0] = libc::MSG_PEEK as u32;
        let wanted = libc::MSG_PEEK | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        assert_eq!(request(&recv, 1), Ok(Request::Recv { flags: wanted }));
        let mut send = call(ONTIME_OP_SEND);
        send.arg[0] = libc::MSG_FASTOPEN as u32;
        assert_eq!(request(&send, 1), Err(Errno(libc::EINVAL)));
    }

    proptest! {
        #[test]
        fn no_call_makes_it_panic(words: [u8; CALL_LEN], readable in 0usize..5000, writable in 0usize..5000) {
            let call: &ontime_call = vm_memory::ByteValued::from_slice(&words[..]).map_or(&DEFAULT, |call| call);
            if let Ok(parts) = parts(call, readable, writable, 4096) {
                prop_assert!(parts.data + CALL_LEN + usize::from(call.control_len) == readable);
            }
            if let Ok(Request::Socket { channel, .. } | Request::Channel { channel }) = request(call, 3) {
                prop_assert!(channel < 3);
            }
        }
    }

    static DEFAULT: ontime_call = ontime_call {
        op: 0,
        flags: 0,
        sock: 0,
        id: 0,
        arg: [0; 4],
        prio: 0,
        addr_len: 0,
        control_len: 0,
        control_room: 0,
        addr: [0; 28],
        reserved: 0,
    };
}
