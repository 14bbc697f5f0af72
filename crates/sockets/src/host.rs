//! System calls on host sockets: one thin function per call, with errors as [`Errno`]. None of them blocks for long.
//!
//! Descriptors are plain numbers here; the socket table owns them (`table`).

use std::net::SocketAddr;
use std::os::fd::RawFd;

use crate::abi::{Errno, ONTIME_READY_END, ONTIME_READY_ERR, ONTIME_READY_IN, ONTIME_READY_PRI, ONTIME_READY_RDHUP};
use crate::name;
use crate::options::SO_BINDTOIFINDEX;
use crate::request::{Family, Protocol};

/// ioctl: whether the next byte is the urgent one.
pub(crate) const SIOCATMARK: libc::Ioctl = 0x8905;

/// A socket address with room for every family.
#[derive(Clone, Copy)]
pub(crate) struct Address {
    storage: libc::sockaddr_storage,
    len: libc::socklen_t,
}

impl Default for Address {
    fn default() -> Self {
        // SAFETY: a sockaddr_storage is plain bytes; zeros are AF_UNSPEC.
        let storage = unsafe { std::mem::zeroed() };
        Self { storage, len: 0 }
    }
}

impl Address {
    /// AF_UNSPEC, as for connect(2).
    pub(crate) fn unspec() -> Self {
        Self { len: size_of::<libc::sockaddr_in6>() as libc::socklen_t, ..Self::default() }
    }

    /// The address as a [`SocketAddr`]. None without an address or for another family.
    pub(crate) fn get(&self) -> Option<SocketAddr> {
        let mut bytes = [0; name::ROOM];
        // SAFETY: a sockaddr_storage is larger than ROOM, and any byte of it may be read: it was zeroed at first.
        let raw = unsafe { std::slice::from_raw_parts((&raw const self.storage).cast::<u8>(), name::ROOM) };
        bytes.copy_from_slice(raw);
        match name::parse(&bytes, (self.len as usize).min(name::ROOM)) {
            Ok(name::Name::Inet(address)) => Some(address),
            _ => None,
        }
    }
}

impl From<&SocketAddr> for Address {
    fn from(address: &SocketAddr) -> Self {
        let (bytes, len) = name::write(address);
        let mut result = Self { len: libc::socklen_t::from(len), ..Self::default() };
        // SAFETY: both are valid for ROOM bytes, which a sockaddr_storage exceeds, and do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), (&raw mut result.storage).cast::<u8>(), name::ROOM) };
        result
    }
}

fn check(result: libc::c_int) -> Result<i32, Errno> {
    if result < 0 { Err(Errno::last()) } else { Ok(result) }
}

fn check_size(result: isize) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| Errno::last())
}

/// SO_BUF_LOCK value SOCK_SNDBUF_LOCK | SOCK_RCVBUF_LOCK: the kernel does not resize the socket's buffers.
pub(crate) const BUFFERS_LOCKED: u32 = 3;

/// Opens a non-blocking socket.
///
/// # Errors
/// The errno of socket(2).
pub(crate) fn socket(family: Family, protocol: Protocol) -> Result<RawFd, Errno> {
    let family = match family {
        Family::V4 => libc::AF_INET,
        Family::V6 => libc::AF_INET6,
    };
    let kind = match protocol {
        Protocol::Tcp => libc::SOCK_STREAM,
        Protocol::Udp => libc::SOCK_DGRAM,
    };
    // SAFETY: no memory is passed.
    check(unsafe { libc::socket(family, kind | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC, 0) })
}

/// bind(2).
///
/// # Errors
/// The errno of bind(2).
pub(crate) fn bind(fd: RawFd, address: &Address) -> Result<(), Errno> {
    // SAFETY: the storage is valid for `len` bytes.
    check(unsafe { libc::bind(fd, (&raw const address.storage).cast(), address.len) }).map(drop)
}

/// connect(2).
///
/// # Errors
/// The errno of connect(2), EINPROGRESS included.
pub(crate) fn connect(fd: RawFd, address: &Address) -> Result<(), Errno> {
    // SAFETY: the storage is valid for `len` bytes.
    check(unsafe { libc::connect(fd, (&raw const address.storage).cast(), address.len) }).map(drop)
}

/// listen(2).
///
/// # Errors
/// The errno of listen(2).
pub(crate) fn listen(fd: RawFd, backlog: i32) -> Result<(), Errno> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::listen(fd, backlog) }).map(drop)
}

/// accept4(2); the new socket is non-blocking.
///
/// # Errors
/// The errno of accept4(2).
pub(crate) fn accept(fd: RawFd) -> Result<(RawFd, Address), Errno> {
    let mut peer = Address { len: size_of::<libc::sockaddr_storage>() as libc::socklen_t, ..Address::default() };
    let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: the storage is valid for `len` bytes, which the kernel updates.
    let new = check(unsafe { libc::accept4(fd, (&raw mut peer.storage).cast(), &raw mut peer.len, flags) })?;
    Ok((new, peer))
}

/// shutdown(2).
///
/// # Errors
/// The errno of shutdown(2).
pub(crate) fn shutdown(fd: RawFd, how: i32) -> Result<(), Errno> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::shutdown(fd, how) }).map(drop)
}

/// Makes the socket's close reset its connection: SO_LINGER with time 0. A socket that cannot be reset is closed
/// normally.
pub(crate) fn abort_at_close(fd: RawFd) {
    let linger = [1i32.to_ne_bytes(), 0i32.to_ne_bytes()];
    let _ = set_option(fd, libc::SOL_SOCKET, libc::SO_LINGER, linger.as_flattened());
}

/// close(2). The caller must not use the number afterwards.
pub(crate) fn close(fd: RawFd) {
    // SAFETY: the caller gives the descriptor up; it is closed even after an error.
    let _ = unsafe { libc::close(fd) };
}

/// getsockname(2) or getpeername(2).
///
/// # Errors
/// The errno of the system call.
pub(crate) fn name(fd: RawFd, peer: bool) -> Result<Address, Errno> {
    let mut name = Address { len: size_of::<libc::sockaddr_storage>() as libc::socklen_t, ..Address::default() };
    let (at, len) = ((&raw mut name.storage).cast(), &raw mut name.len);
    // SAFETY: the storage is valid for `len` bytes, which the kernel updates.
    check(if peer { unsafe { libc::getpeername(fd, at, len) } } else { unsafe { libc::getsockname(fd, at, len) } })?;
    Ok(name)
}

/// getsockopt(2) into `value`, which also holds the input; returns the length.
///
/// # Errors
/// The errno of getsockopt(2).
pub(crate) fn get_option(fd: RawFd, level: i32, option: i32, value: &mut [u8]) -> Result<usize, Errno> {
    let mut len = value.len() as libc::socklen_t;
    // SAFETY: the value is valid for `len` bytes, which the kernel updates.
    check(unsafe { libc::getsockopt(fd, level, option, value.as_mut_ptr().cast(), &raw mut len) })?;
    Ok((len as usize).min(value.len()))
}

/// setsockopt(2).
///
/// # Errors
/// The errno of setsockopt(2).
pub(crate) fn set_option(fd: RawFd, level: i32, option: i32, value: &[u8]) -> Result<(), Errno> {
    // SAFETY: the value is valid for its length; only options with values without pointers come here (`options`).
    check(unsafe { libc::setsockopt(fd, level, option, value.as_ptr().cast(), value.len() as libc::socklen_t) })
        .map(drop)
}

/// Whether the socket may share its port (SO_REUSEPORT).
///
/// # Errors
/// The errno of setsockopt(2).
pub(crate) fn share_port(fd: RawFd, may: bool) -> Result<(), Errno> {
    set_option(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, &i32::from(may).to_ne_bytes())
}

/// Dissolves a datagram socket's connection, and with it a port that the kernel chose. The socket stays bound to its
/// interface, which the kernel forgets (`__udp_disconnect`).
///
/// # Errors
/// The errno of the system calls.
pub(crate) fn give_up_port(fd: RawFd) -> Result<(), Errno> {
    let mut interface = [0; 4];
    get_option(fd, libc::SOL_SOCKET, SO_BINDTOIFINDEX, &mut interface)?;
    connect(fd, &Address::unspec())?;
    if interface == [0; 4] { Ok(()) } else { set_option(fd, libc::SOL_SOCKET, SO_BINDTOIFINDEX, &interface) }
}

/// Whether the socket has a local port.
pub(crate) fn has_port(fd: RawFd) -> bool {
    port(fd).is_some()
}

/// The socket's own port.
pub(crate) fn port(fd: RawFd) -> Option<u16> {
    let name = name(fd, false).ok()?.get()?;
    (name.port() != 0).then_some(name.port())
}

/// States of a TCP socket in TCP_INFO (include/net/tcp_states.h).
#[allow(missing_docs, reason = "the kernel's names")]
pub(crate) mod tcp {
    pub(crate) const ESTABLISHED: u8 = 1;
    pub(crate) const SYN_RECV: u8 = 3;
    pub(crate) const FIN_WAIT1: u8 = 4;
    #[cfg(test)]
    pub(crate) const FIN_WAIT2: u8 = 5;
    #[cfg(test)]
    pub(crate) const TIME_WAIT: u8 = 6;
    pub(crate) const CLOSE: u8 = 7;
    pub(crate) const CLOSE_WAIT: u8 = 8;
    pub(crate) const LAST_ACK: u8 = 9;
    pub(crate) const LISTEN: u8 = 10;
    pub(crate) const CLOSING: u8 = 11;
}

/// The state of a TCP socket; CLOSE if TCP_INFO fails.
pub(crate) fn tcp_state(fd: RawFd) -> u8 {
    let mut info = [0; 1];
    match get_option(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info) {
        Ok(1) => info[0],
        _ => tcp::CLOSE,
    }
}

/// Received bytes that are not read yet.
pub(crate) fn unread(fd: RawFd) -> i32 {
    query(fd, libc::FIONREAD as libc::Ioctl).unwrap_or(0)
}

/// Sent bytes that are not acknowledged.
pub(crate) fn unsent(fd: RawFd) -> i32 {
    query(fd, libc::TIOCOUTQ as libc::Ioctl).unwrap_or(0)
}

/// Takes and clears the socket's pending error (SO_ERROR): 0 for none.
pub(crate) fn take_error(fd: RawFd) -> i32 {
    let mut error = [0; 4];
    match get_option(fd, libc::SOL_SOCKET, libc::SO_ERROR, &mut error) {
        Ok(_) => i32::from_ne_bytes(error),
        Err(_) => 0,
    }
}

/// An ioctl that returns a number.
///
/// # Errors
/// The errno of ioctl(2).
pub(crate) fn query(fd: RawFd, request: libc::Ioctl) -> Result<i32, Errno> {
    let mut number: libc::c_int = 0;
    // SAFETY: the requests used here (SIOCINQ and the like) write one int.
    check(unsafe { libc::ioctl(fd, request, &raw mut number) })?;
    Ok(number)
}

/// The events that are ready now, as EPOLL* bits. Never waits.
pub(crate) fn ready(fd: RawFd) -> u32 {
    let events = libc::POLLIN | libc::POLLPRI | libc::POLLOUT | libc::POLLRDHUP;
    let mut poll = libc::pollfd { fd, events, revents: 0 };
    // SAFETY: one valid pollfd.
    if unsafe { libc::poll(&raw mut poll, 1, 0) } < 0 {
        return 0;
    }
    // The five possible bits have the same values for poll and epoll on Linux.
    u32::from(poll.revents as u16)
}

/// A socket's readiness as ONTIME_READY_* bits, from the kernel.
pub(crate) fn readiness(fd: RawFd, protocol: Protocol) -> u32 {
    let ready = ready(fd);
    let told = ONTIME_READY_IN | ONTIME_READY_RDHUP;
    let may_end = protocol == Protocol::Tcp && ready & (told | ONTIME_READY_PRI | ONTIME_READY_ERR) == told;
    // END saves the guest a receive call that would return 0. With urgent data END is not set: a receive would also
    // pass the urgent byte, which would then be unread at the close.
    let none = |request| query(fd, request) == Ok(0);
    let at_end = may_end && none(libc::FIONREAD as libc::Ioctl) && none(SIOCATMARK);
    if at_end { ready | ONTIME_READY_END } else { ready }
}

/// Adds a descriptor to an epoll, edge-triggered, with these events.
///
/// # Errors
/// The errno of epoll_ctl(2).
pub(crate) fn watch(epoll: RawFd, fd: RawFd, data: u64, events: u32) -> Result<(), Errno> {
    control(epoll, libc::EPOLL_CTL_ADD, fd, events, data)
}

/// Changes a descriptor's events in an epoll, edge-triggered. Events that are already ready are reported.
///
/// # Errors
/// The errno of epoll_ctl(2): ENOENT if the descriptor is not in the epoll.
pub(crate) fn change(epoll: RawFd, fd: RawFd, data: u64, events: u32) -> Result<(), Errno> {
    control(epoll, libc::EPOLL_CTL_MOD, fd, events, data)
}

fn control(epoll: RawFd, op: libc::c_int, fd: RawFd, events: u32, data: u64) -> Result<(), Errno> {
    let mut event = libc::epoll_event { events: events | libc::EPOLLET as u32, u64: data };
    // SAFETY: one valid epoll_event.
    check(unsafe { libc::epoll_ctl(epoll, op, fd, &raw mut event) }).map(drop)
}

/// Removes a descriptor from an epoll. A descriptor that is not in it is no error.
pub(crate) fn unwatch(epoll: RawFd, fd: RawFd) {
    // SAFETY: the event may be null for DEL.
    let _ = unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut()) };
}

/// Result of recvmsg(2).
pub(crate) struct Received {
    /// Received bytes.
    pub len: usize,
    /// msg_flags.
    pub flags: i32,
    /// The sender's address, if any.
    pub from: Address,
    /// Bytes of control messages.
    pub control: usize,
}

/// recvmsg(2). For one iovec without control messages recvfrom(2), which needs no msghdr copy in the kernel.
///
/// # Errors
/// The errno of the system call.
///
/// # Safety
/// Each iovec must be empty or name memory that may be written during the call.
pub(crate) unsafe fn recv(
    fd: RawFd,
    protocol: Protocol,
    iov: &mut [libc::iovec],
    control: &mut [u8],
    flags: i32,
) -> Result<Received, Errno> {
    let mut from = Address { len: size_of::<libc::sockaddr_storage>() as libc::socklen_t, ..Address::default() };
    let flagged = flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) != 0;
    if let ([one], [], false) = (&*iov, &*control, flagged) {
        // With MSG_TRUNC the kernel returns a truncated datagram's full length.
        let truncated = if protocol == Protocol::Udp { libc::MSG_TRUNC } else { 0 };
        let name = (&raw mut from.storage).cast();
        // SAFETY: the caller guarantees the iovec's memory; the storage is valid for `len` bytes, which the kernel
        // updates.
        let whole = check_size(unsafe {
            libc::recvfrom(fd, one.iov_base, one.iov_len, flags | truncated, name, &raw mut from.len)
        })?;
        let cut = protocol == Protocol::Udp && whole > one.iov_len;
        let len = if flags & libc::MSG_TRUNC == 0 { whole.min(one.iov_len) } else { whole };
        return Ok(Received { len, flags: if cut { libc::MSG_TRUNC } else { 0 }, from, control: 0 });
    }
    let mut message = header(iov, control);
    message.msg_name = (&raw mut from.storage).cast();
    message.msg_namelen = from.len;
    // SAFETY: every pointer of the header is valid for its length: the caller guarantees the iovecs, the others are
    // borrows.
    let len = check_size(unsafe { libc::recvmsg(fd, &raw mut message, flags) })?;
    from.len = message.msg_namelen;
    Ok(Received { len, flags: message.msg_flags, from, control: message.msg_controllen })
}

/// sendmsg(2). For one iovec without control messages sendto(2), which needs no msghdr copy in the kernel.
///
/// # Errors
/// The errno of the system call.
///
/// # Safety
/// Each iovec must be empty or name memory that may be read during the call.
pub(crate) unsafe fn send(
    fd: RawFd,
    iov: &mut [libc::iovec],
    to: Option<&Address>,
    control: &mut [u8],
    flags: i32,
) -> Result<usize, Errno> {
    let (name, name_len) = to.map_or((std::ptr::null(), 0), |to| (&raw const to.storage, to.len));
    if let ([one], []) = (&*iov, &*control) {
        // SAFETY: the caller guarantees the iovec's memory; the storage is valid for its length.
        return check_size(unsafe { libc::sendto(fd, one.iov_base, one.iov_len, flags, name.cast(), name_len) });
    }
    let mut message = header(iov, control);
    message.msg_name = name.cast_mut().cast();
    message.msg_namelen = name_len;
    // SAFETY: every pointer of the header is valid for its length: the caller guarantees the iovecs, the others are
    // borrows.
    check_size(unsafe { libc::sendmsg(fd, &raw const message, flags) })
}

/// A message header without an address. It refers to both slices as long as it is used.
fn header(iov: &mut [libc::iovec], control: &mut [u8]) -> libc::msghdr {
    // SAFETY: zeros are an empty message header.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iov.as_mut_ptr();
    message.msg_iovlen = iov.len();
    if !control.is_empty() {
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = control.len();
    }
    message
}
