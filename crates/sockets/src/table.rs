//! The VM's sockets: the host socket of each id, and the channel whose thread owns it.
//!
//! All threads share the table without locks. Rules: the thread that claims a slot opens its socket. Only the channel
//! in `owner` makes data calls on the descriptor; other threads use the descriptor only while they hold it
//! ([`Table::hold`]). The worker closes descriptors after the owner has released them; a channel closes a connection
//! that it has accepted and holds. So no thread uses a descriptor number that was closed and reused for another file.

use std::os::fd::RawFd;

use crate::abi::{Errno, ONTIME_SOCK_INDEX_BITS, ONTIME_SOCK_NONE};
use crate::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU32, Ordering};
use crate::host;
use crate::request::{Family, Protocol};

/// The owner of a socket that is between two owners.
pub(crate) const NOBODY: u32 = u32::MAX;

const UDP: u8 = 1;
const V6: u8 = 2;
const BOUND: u8 = 4;
const ACCEPTED: u8 = 8;
const SHARES: u8 = 16;
const NEAR: u8 = 32;

struct SocketSlot {
    id: AtomicU32,
    fd: AtomicI32,
    owner: AtomicU32,
    facts: AtomicU8,
    /// Number of readiness reports so far, while the socket has no owner.
    reports: AtomicU32,
    /// A thread holds the socket: for a call that the owner does not make, or for closing it.
    held: AtomicBool,
}

/// A snapshot of a table entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Socket {
    pub index: u32,
    /// The guest's id for the socket.
    pub id: u32,
    /// The host's descriptor.
    pub fd: RawFd,
    /// The channel that owns the socket, or [`NOBODY`].
    pub owner: u32,
    /// TCP or UDP.
    pub protocol: Protocol,
    /// IPv4 or IPv6.
    pub family: Family,
    /// Whether the guest gave it a local port, or had one chosen by a bind.
    pub bound: bool,
    /// Whether it is a datagram socket with SO_REUSEPORT.
    pub shares: bool,
    /// Whether it is a connection accepted from a listener and was not changed into anything else since.
    pub accepted: bool,
    /// Whether it is a datagram socket whose peer is within the host.
    pub near: bool,
}

/// While this guard lives, no other thread closes the socket.
#[derive(Debug)]
pub(crate) struct SocketGuard<'a>(&'a AtomicBool);

impl Drop for SocketGuard<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// The slot that an id names.
pub(crate) fn place(id: u32) -> u32 {
    id & ((1 << ONTIME_SOCK_INDEX_BITS) - 1)
}

pub(crate) struct Table {
    slots: Box<[SocketSlot]>,
    open: AtomicU32,
}

impl Table {
    /// A table of `sockets` slots.
    pub(crate) fn new(sockets: u32) -> Self {
        let slot = || SocketSlot {
            id: AtomicU32::new(ONTIME_SOCK_NONE),
            fd: AtomicI32::new(-1),
            owner: AtomicU32::new(NOBODY),
            facts: AtomicU8::new(0),
            reports: AtomicU32::new(0),
            held: AtomicBool::new(false),
        };
        Self { slots: (0..sockets).map(|_| slot()).collect(), open: AtomicU32::new(0) }
    }

    /// Number of slots.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Number of claimed slots.
    #[allow(dead_code, reason = "for tests and the model")]
    pub(crate) fn open(&self) -> u32 {
        self.open.load(Ordering::Relaxed)
    }

    /// Claims the slot that an id names. Lookups do not find the socket before [`Table::set`].
    ///
    /// # Errors
    /// EMFILE for an index beyond the limit, EBUSY for a claimed slot, EINVAL for [`ONTIME_SOCK_NONE`].
    pub(crate) fn claim(&self, id: u32) -> Result<u32, Errno> {
        let index = place(id);
        if id == ONTIME_SOCK_NONE {
            return Err(Errno(libc::EINVAL));
        }
        let slot = self.slots.get(index as usize).ok_or(Errno(libc::EMFILE))?;
        slot.id
            .compare_exchange(ONTIME_SOCK_NONE, id, Ordering::AcqRel, Ordering::Relaxed)
            .map_err(|_| Errno(libc::EBUSY))?;
        self.open.fetch_add(1, Ordering::Relaxed);
        Ok(index)
    }

    /// Fills a claimed slot with a socket that has no local port from the guest.
    pub(crate) fn set(&self, index: u32, fd: RawFd, family: Family, protocol: Protocol, owner: u32) {
        let Some(slot) = self.slots.get(index as usize) else { return };
        let udp = if protocol == Protocol::Udp { UDP } else { 0 };
        let v6 = if family == Family::V6 { V6 } else { 0 };
        slot.facts.store(udp | v6, Ordering::Relaxed);
        slot.owner.store(owner, Ordering::Relaxed);
        slot.fd.store(fd, Ordering::Release);
    }

    /// Frees a slot without closing its descriptor.
    pub(crate) fn unclaim(&self, index: u32) {
        let Some(slot) = self.slots.get(index as usize) else { return };
        slot.owner.store(NOBODY, Ordering::Relaxed);
        slot.fd.store(-1, Ordering::Relaxed);
        slot.id.store(ONTIME_SOCK_NONE, Ordering::Release);
        self.open.fetch_sub(1, Ordering::Relaxed);
    }

    /// Excludes other holders: threads that are not the owner, and the owner when it closes the socket. None: another
    /// thread holds it. Callers never wait for the hold, because a channel's thread may be what preempts the holder.
    pub(crate) fn hold(&self, index: u32) -> Option<SocketGuard<'_>> {
        let held = &self.slots.get(index as usize)?.held;
        held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).ok().map(|_| SocketGuard(held))
    }

    /// The socket that an id names, held: it stays the same until the guard is dropped.
    ///
    /// # Errors
    /// EBADF, also for a socket that is being closed.
    pub(crate) fn held(&self, id: u32) -> Result<(Socket, SocketGuard<'_>), Errno> {
        let held = self.hold(place(id)).ok_or(Errno(libc::EBADF))?;
        Ok((self.find(id)?, held))
    }

    /// Closes a socket that was never connected and frees its slot. Only for the worker, when the socket has no owner.
    pub(crate) fn close(&self, index: u32) {
        self.take(index).into_iter().for_each(host::close);
    }

    /// Frees a socket's slot and gives its descriptor to the caller. For the worker, when the socket has no owner, and
    /// for an owner that holds the socket.
    pub(crate) fn take(&self, index: u32) -> Option<RawFd> {
        let fd = self.slots.get(index as usize)?.fd.swap(-1, Ordering::AcqRel);
        self.unclaim(index);
        (fd >= 0).then_some(fd)
    }

    /// The socket that an id names. Not held: while its channel closes it, it may seem to have no owner.
    ///
    /// # Errors
    /// EBADF if there is none.
    pub(crate) fn find(&self, id: u32) -> Result<Socket, Errno> {
        self.at(place(id)).filter(|socket| socket.id == id).ok_or(Errno(libc::EBADF))
    }

    /// The socket in a slot.
    pub(crate) fn at(&self, index: u32) -> Option<Socket> {
        let slot = self.slots.get(index as usize)?;
        let id = slot.id.load(Ordering::Acquire);
        let fd = slot.fd.load(Ordering::Acquire);
        if id == ONTIME_SOCK_NONE || fd < 0 {
            return None;
        }
        let facts = slot.facts.load(Ordering::Relaxed);
        Some(Socket {
            index,
            id,
            fd,
            owner: slot.owner.load(Ordering::Acquire),
            protocol: if facts & UDP == 0 { Protocol::Tcp } else { Protocol::Udp },
            family: if facts & V6 == 0 { Family::V4 } else { Family::V6 },
            bound: facts & BOUND != 0,
            shares: facts & SHARES != 0,
            accepted: facts & ACCEPTED != 0,
            near: facts & NEAR != 0,
        })
    }

    /// Records whether the guest gave the socket a local port.
    pub(crate) fn set_bound(&self, index: u32, is: bool) {
        self.note(index, BOUND, is);
    }

    /// Records whether the guest set SO_REUSEPORT of a datagram socket.
    pub(crate) fn set_shares(&self, index: u32, is: bool) {
        self.note(index, SHARES, is);
    }

    /// Records that the socket was accepted from a listener.
    pub(crate) fn set_accepted(&self, index: u32) {
        self.note(index, ACCEPTED, true);
    }

    /// Records that the socket may be more than an accepted connection: a group member or a listener.
    pub(crate) fn set_more(&self, index: u32) {
        self.note(index, ACCEPTED, false);
    }

    /// Records whether a datagram socket's peer is within the host.
    pub(crate) fn set_near(&self, index: u32, is: bool) {
        self.note(index, NEAR, is);
    }

    fn note(&self, index: u32, fact: u8, is: bool) {
        let Some(slot) = self.slots.get(index as usize) else { return };
        if is {
            slot.facts.fetch_or(fact, Ordering::Relaxed);
        } else {
            slot.facts.fetch_and(!fact, Ordering::Relaxed);
        }
    }

    pub(crate) fn set_owner(&self, index: u32, owner: u32) {
        if let Some(slot) = self.slots.get(index as usize) {
            slot.owner.store(owner, Ordering::Release);
        }
    }

    /// Stores the number of a socket's readiness reports for its next owner.
    pub(crate) fn set_reports(&self, index: u32, reports: u32) {
        if let Some(slot) = self.slots.get(index as usize) {
            slot.reports.store(reports, Ordering::Relaxed);
        }
    }

    /// The number that the last owner stored.
    pub(crate) fn reports(&self, index: u32) -> u32 {
        self.slots.get(index as usize).map_or(0, |slot| slot.reports.load(Ordering::Relaxed))
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        for slot in &self.slots {
            let fd = slot.fd.load(Ordering::Relaxed);
            if fd >= 0 {
                host::close(fd);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_index_and_generation() {
        let table = Table::new(4);
        let id = 7 << ONTIME_SOCK_INDEX_BITS | 2;
        let index = table.claim(id).unwrap();
        assert_eq!(table.find(id), Err(Errno(libc::EBADF)), "not before it is set");
        let fd = host::socket(Family::V6, Protocol::Udp).unwrap();
        table.set(index, fd, Family::V6, Protocol::Udp, 1);
        assert_eq!(table.find(id).map(|socket| (socket.fd, socket.owner)), Ok((fd, 1)));
        assert_eq!(table.find(2), Err(Errno(libc::EBADF)), "another generation");
        assert_eq!(table.claim(2), Err(Errno(libc::EBUSY)));
        assert_eq!(table.claim(4), Err(Errno(libc::EMFILE)));
        assert_eq!(table.claim(ONTIME_SOCK_NONE), Err(Errno(libc::EINVAL)));
        assert_eq!(table.open(), 1);
        table.close(index);
        assert!(table.open() == 0 && table.claim(2).is_ok());
    }

    #[test]
    fn one_holds_a_socket_at_a_time_and_sees_what_it_is_then() {
        let table = Table::new(4);
        let open = |id| {
            let index = table.claim(id).unwrap();
            let fd = host::socket(Family::V4, Protocol::Tcp).unwrap();
            table.set(index, fd, Family::V4, Protocol::Tcp, 1);
            fd
        };
        let first = open(2);
        assert!(!table.at(2).unwrap().accepted);
        table.set_accepted(2);
        let (socket, held) = table.held(2).unwrap();
        assert_eq!((socket.fd, socket.accepted), (first, true));
        assert!(table.hold(2).is_none() && table.held(2).is_err() && table.hold(4).is_none());
        drop(held);
        table.close(2);
        assert!(table.held(2).is_err(), "it is gone, and not held for that");
        let second = open(2);
        let (socket, _held) = table.held(2).unwrap();
        assert_eq!((socket.fd, socket.accepted), (second, false));
    }
}
