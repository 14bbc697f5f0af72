//! Calls that cannot block, on a socket that the engine owns: send, receive, accept and queries.

use std::net::SocketAddr;

use crate::abi::*;
use crate::call::{Call, Reply};
use crate::control;
use crate::counters::count;
use crate::engine::{Engine, Outcome};
use crate::host;
use crate::memory::Memory;
use crate::name::{self, Name};
use crate::owned_sockets::Local;
use crate::request::{self, Protocol, Request};
use crate::table::Socket;

/// ioctl: unsent bytes of a TCP socket (linux/sockios.h).
const SIOCOUTQNSD: libc::Ioctl = 0x894b;

/// Attempts in a row for a call that keeps moving bytes.
const TRIES: usize = 16;

/// Result of one attempt at a call.
type Tried = Result<Outcome, Errno>;

impl Engine {
    /// Attempts a new or a waiting call on its socket.
    ///
    /// A call that moved only part of its bytes is tried again until the kernel returns EAGAIN. Only then is an edge
    /// certain to follow. (The peer may have closed the connection behind the received bytes; that edge is over.)
    pub(crate) fn attempt(&mut self, memory: &Memory, call: &mut Call, socket: &Socket) -> Outcome {
        for _ in 0..TRIES {
            let outcome = self.try_once(memory, call, socket);
            if !matches!(outcome, Outcome::Again) {
                return outcome;
            }
        }
        // Let other sockets have their turn first.
        self.sockets.come_back(socket.index);
        Outcome::Wait
    }

    fn try_once(&mut self, memory: &Memory, call: &mut Call, socket: &Socket) -> Outcome {
        let tried = match call.request {
            Request::Send { flags, to } => self.send(memory, call, socket, flags, to),
            Request::Recv { flags } => self.recv(memory, call, socket, flags),
            Request::Accept { new } => self.accept(memory, call, socket, new),
            Request::Shutdown { how } => {
                let done = host::shutdown(socket.fd, how);
                // For a datagram socket, shutdown has an effect even if it returns ENOTCONN.
                self.look(socket);
                done.map(|()| Outcome::Done(Reply::done()))
            }
            Request::Name { peer } => host::name(socket.fd, peer).map(|name| {
                let seen = name.get().map(|name| if peer { name } else { self.seen(socket.protocol, name) });
                Outcome::Done(Reply::done().named(seen))
            }),
            Request::Query(which) => query(socket, which).map(|number| Outcome::Done(Reply::number(Ok(number)))),
            Request::Poll => {
                if let Some(local) = self.sockets.local(socket.index) {
                    local.polled = true;
                }
                self.look(socket);
                Ok(Outcome::Done(Reply::done()))
            }
            _ => Err(Errno(libc::EOPNOTSUPP)),
        };
        tried.unwrap_or_else(|error| Outcome::Done(error.into()))
    }

    /// The socket's local name as the guest sees it.
    pub(crate) fn seen(&self, protocol: Protocol, name: SocketAddr) -> SocketAddr {
        self.shared.vm.policy.seen(protocol, name)
    }

    /// Polls the socket's readiness and its error: a guest that sees ERR asks for the error. If calls wait, they get
    /// the error; the pending event delivers it.
    pub(crate) fn look(&mut self, socket: &Socket) {
        let mut ready = host::readiness(socket.fd, socket.protocol);
        let Some(local) = self.sockets.local(socket.index).filter(|local| local.owned) else { return };
        if ready & ONTIME_READY_ERR != 0 && local.waiting.iter().all(crate::call::List::is_empty) {
            let error = host::take_error(socket.fd);
            if error != 0 {
                local.error = error as u16;
                ready = host::readiness(socket.fd, socket.protocol);
            }
        }
        let failed = local.error != 0;
        self.sockets.note(socket, ready);
        if failed {
            self.reports.mark(&mut self.sockets, socket.index);
        }
    }

    /// Updates the readiness after a receive. The kernel is polled only where the readiness is not known otherwise. A
    /// stream that returned less than the buffer's size is empty, and later data cause an event. A socket that the
    /// guest does not poll (`blind`) is polled again by its next receive.
    fn look_behind(&mut self, socket: &Socket, short: bool, blind: bool) {
        let Some(local) = self.sockets.local(socket.index) else { return };
        let quiet = local.ready & !(ONTIME_READY_IN | ONTIME_READY_OUT) == 0 && local.error == 0 && !local.urgent;
        if quiet && short && socket.protocol == Protocol::Tcp {
            self.unready(socket, ONTIME_READY_IN);
        } else if !(quiet && blind && !local.polled) {
            self.look(socket);
        }
    }

    /// Clears readiness bits: the kernel returned EAGAIN, so an edge will follow when they return.
    fn unready(&mut self, socket: &Socket, bits: u32) {
        if let Some(ready) = self.sockets.local(socket.index).map(|local| local.ready) {
            self.sockets.note(socket, ready & !bits);
        }
    }

    fn send(&mut self, memory: &Memory, call: &mut Call, socket: &Socket, flags: i32, to: Name) -> Tried {
        let mut near = socket.near;
        let to = match to {
            Name::None => None,
            Name::Unspec => return Err(Errno(libc::EAFNOSUPPORT)),
            Name::Inet(address) => {
                near = socket.protocol == Protocol::Udp && name::is_near(address);
                Some(self.shared.reach(socket, address)?)
            }
        };
        let to = to.as_ref().map(host::Address::from);
        let control_len = usize::from(call.words.control_len);
        let control = self.control.get_mut(..control_len).ok_or(Errno(libc::EINVAL))?;
        call.buffers.readable.read(memory, CALL_LEN, control)?;
        request::send_control(control)?;
        if self.shared.host_network {
            control::leave_interface_to_routes(control);
        }
        let left = call.parts.data - call.moved;
        call.buffers.readable.iovecs(memory, call.data_at() + call.moved, left, &mut self.iov)?;
        // SAFETY: the iovecs name guest memory, which stays mapped while `memory` is borrowed.
        let sent = unsafe { host::send(socket.fd, &mut self.iov, to.as_ref(), control, flags) };
        let wait = u32::from(call.words.flags) & ONTIME_CALL_WAIT != 0;
        let mut told = 0;
        let result = match sent {
            Ok(bytes) => {
                call.moved += bytes;
                let short = call.moved < call.parts.data && socket.protocol == Protocol::Tcp;
                if short && wait {
                    return Ok(Outcome::Again);
                }
                if short {
                    self.unready(socket, ONTIME_READY_OUT);
                }
                if near {
                    told = self.tell_refusal(memory, call, socket);
                }
                Ok(call.moved as u32)
            }
            Err(Errno(libc::EAGAIN)) => {
                self.unready(socket, ONTIME_READY_OUT);
                if wait {
                    return Ok(Outcome::Wait);
                }
                moved_or(call, Errno(libc::EAGAIN))
            }
            Err(error) => {
                self.look(socket);
                self.later(call, socket, error)
            }
        };
        Ok(Outcome::Done(Reply { control: told, ..Reply::number(result) }))
    }

    /// A datagram that stays within the host may be refused before its send returns. The answer tells the socket's
    /// pending error, without room for it an event, so that the guest knows it as soon as of a socket of its own. Calls
    /// that wait get it by the pending event. Returns the length of the control message.
    fn tell_refusal(&mut self, memory: &Memory, call: &Call, socket: &Socket) -> usize {
        let alone = |local: &mut Local| local.waiting.iter().all(crate::call::List::is_empty);
        if host::ready(socket.fd) & ONTIME_READY_ERR == 0 || !self.sockets.local(socket.index).is_some_and(alone) {
            return 0;
        }
        let error = host::take_error(socket.fd);
        self.sockets.note(socket, host::readiness(socket.fd, socket.protocol));
        let told = if error == 0 { 0 } else { call.tell(memory, libc::SO_ERROR, error) };
        if told == 0 {
            if let Some(local) = self.sockets.local(socket.index).filter(|_| error != 0) {
                local.error = error as u16;
            }
            self.reports.mark(&mut self.sockets, socket.index);
        }
        told
    }

    /// Handles an error after bytes were moved: the bytes are the result. The next call gets the error if it was the
    /// socket's own (the connection's end, or what ICMP told), which the kernel has forgotten by returning it. The
    /// kernel returns the others again (EPIPE after a shutdown, ENOTCONN).
    fn later(&mut self, call: &Call, socket: &Socket, error: Errno) -> Result<u32, Errno> {
        let own = matches!(
            error.0,
            libc::ECONNRESET
                | libc::ECONNREFUSED
                | libc::ECONNABORTED
                | libc::ETIMEDOUT
                | libc::EHOSTUNREACH
                | libc::ENETUNREACH
                | libc::EHOSTDOWN
                | libc::ENONET
                | libc::ENOPROTOOPT
                | libc::EPROTO
        );
        if call.moved > 0 && own {
            if let Some(local) = self.sockets.local(socket.index) {
                local.error = error.0 as u16;
            }
            self.reports.mark(&mut self.sockets, socket.index);
        }
        moved_or(call, error)
    }

    /// Whether a peek of too little waits for another arrival: not at the end, an error or urgent data.
    fn goes_on(&mut self, socket: &Socket) -> bool {
        self.look(socket);
        let going = |local: &mut Local| local.ready & !(ONTIME_READY_IN | ONTIME_READY_OUT) == 0 && local.error == 0;
        self.sockets.local(socket.index).is_some_and(going)
    }

    fn recv(&mut self, memory: &Memory, call: &mut Call, socket: &Socket, flags: i32) -> Tried {
        let now = flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) != 0;
        let wait = u32::from(call.words.flags) & ONTIME_CALL_WAIT != 0 && !now;
        let nothing = self.sockets.local(socket.index).is_some_and(|local| local.ready == ONTIME_READY_OUT);
        if nothing && wait && call.moved == 0 && call.parts.room > 0 {
            // Nothing has arrived since the last poll, so no system call is needed. (Readiness 0 may mean a listener,
            // on which a receive must fail.)
            return Ok(Outcome::Wait);
        }
        let urgent = self.sockets.local(socket.index).is_some_and(|local| local.ready & ONTIME_READY_PRI != 0);
        if urgent && u32::from(call.words.flags) & ONTIME_CALL_AHEAD != 0 {
            // A receive that passes the urgent byte loses it (`tcp_recvmsg`), and the guest has not requested a receive
            // yet.
            return Err(Errno(libc::ECANCELED));
        }
        let all = wait && flags & libc::MSG_WAITALL != 0 && socket.protocol == Protocol::Tcp;
        let peek = flags & libc::MSG_PEEK != 0;
        if peek {
            // Each attempt begins at the same byte.
            call.moved = 0;
        }
        if all && peek {
            // Nothing is copied before there is enough, or no more will come.
            let unread = host::unread(socket.fd) as usize;
            if (1..call.parts.room).contains(&unread) && self.goes_on(socket) {
                return Ok(Outcome::Wait);
            }
        }
        let left = call.parts.room - call.moved;
        call.buffers.writable.iovecs(memory, call.room_at() + call.moved, left, &mut self.iov)?;
        let room = self.control.get_mut(..usize::from(call.words.control_room)).ok_or(Errno(libc::EINVAL))?;
        // SAFETY: the iovecs name guest memory, which stays mapped while `memory` is borrowed.
        let received = match unsafe { host::recv(socket.fd, socket.protocol, &mut self.iov, room, flags) } {
            Ok(received) => received,
            Err(Errno(libc::EAGAIN)) => {
                self.unready(socket, ONTIME_READY_IN);
                let ended = socket.protocol == Protocol::Udp
                    && self.sockets.local(socket.index).is_some_and(|local| local.ready & ONTIME_READY_RDHUP != 0);
                return if wait && ended {
                    // The socket was shut down: waiting receives return 0. A receive posted ahead is cancelled instead.
                    let ahead = u32::from(call.words.flags) & ONTIME_CALL_AHEAD != 0;
                    if ahead { Err(Errno(libc::ECANCELED)) } else { Ok(Outcome::Done(Reply::done())) }
                } else if wait {
                    Ok(Outcome::Wait)
                } else {
                    moved_or(call, Errno(libc::EAGAIN)).map(|bytes| answer(call, bytes))
                };
            }
            Err(error) => {
                self.look(socket);
                return self.later(call, socket, error).map(|bytes| answer(call, bytes));
            }
        };
        call.buffers.writable.write(memory, DONE_LEN, self.control.get(..received.control).unwrap_or_default())?;
        call.moved += received.len;
        if all && received.len > 0 && call.moved < call.parts.room {
            if !peek {
                return Ok(Outcome::Again);
            }
            if self.goes_on(socket) {
                return Ok(Outcome::Wait);
            }
        }
        let consumes = flags & (libc::MSG_PEEK | libc::MSG_OOB | libc::MSG_ERRQUEUE) == 0;
        let short = consumes && (1..left).contains(&received.len);
        let blind = consumes && wait && u32::from(call.words.flags) & ONTIME_CALL_BLIND != 0;
        // This must come before `look_behind`, which would report the next queued message's error as new.
        let dequeued = flags & libc::MSG_ERRQUEUE != 0
            && self.control.get(..received.control).is_some_and(control::holds_icmp_error);
        let pending = if dequeued { self.pending_error(socket) } else { 0 };
        self.look_behind(socket, short, blind);
        let whole = socket.protocol == Protocol::Udp || flags & libc::MSG_ERRQUEUE != 0;
        let reply = Reply {
            data: if whole { call.moved.min(call.parts.room) } else { call.written() },
            control: received.control,
            flags: received.flags as u32 | pending,
            ..Reply::number(Ok(call.moved as u32)).named(received.from.get())
        };
        Ok(Outcome::Done(reply))
    }

    /// Takes the socket's pending error, as ONTIME_MSG_ERROR: the answer reports it, and no event does.
    fn pending_error(&mut self, socket: &Socket) -> u32 {
        let error = host::take_error(socket.fd);
        let ready = host::readiness(socket.fd, socket.protocol);
        if let Some(local) = self.sockets.local(socket.index) {
            local.error = 0;
        }
        self.sockets.note(socket, ready);
        ONTIME_MSG_ERROR | (error as u32) << ONTIME_MSG_ERRNO_SHIFT & ONTIME_MSG_ERRNO_MASK
    }

    fn accept(&mut self, memory: &Memory, call: &Call, socket: &Socket, new: u32) -> Tried {
        let table = &self.shared.table;
        let index = table.claim(new).inspect_err(|_| count(&self.shared.counters.refused_limit))?;
        match host::accept(socket.fd) {
            Ok((fd, peer)) => {
                table.set(index, fd, socket.family, socket.protocol, self.channel);
                table.set_accepted(index);
                self.look(socket);
                // Fails only without kernel memory or epoll watches. The connection is reset, which does not wait.
                if let Err(error) = self.adopt(index) {
                    count(&self.shared.counters.refused_limit);
                    if let Some(fd) = self.shared.table.take(index) {
                        host::abort_at_close(fd);
                        host::close(fd);
                    }
                    return Err(error);
                }
                if let Some(local) = self.sockets.local(index) {
                    local.prio = call.words.prio;
                }
                let failed = self.sockets.local(index).is_some_and(|local| local.ready & ONTIME_READY_ERR != 0);
                let pending = self.shared.table.at(index).filter(|_| failed).map_or(0, |new| self.pending_error(&new));
                let control = if call.words.control_room > 0 { call.tell_send_buffer(memory, fd) } else { 0 };
                Ok(Outcome::Done(Reply { flags: pending, control, ..Reply::done().named(peer.get()) }))
            }
            Err(error) => {
                table.unclaim(index);
                if error.0 != libc::EAGAIN {
                    return Err(error);
                }
                self.unready(socket, ONTIME_READY_IN);
                if u32::from(call.words.flags) & ONTIME_CALL_WAIT == 0 { Err(error) } else { Ok(Outcome::Wait) }
            }
        }
    }
}

fn moved_or(call: &Call, error: Errno) -> Result<u32, Errno> {
    if call.moved > 0 { Ok(call.moved as u32) } else { Err(error) }
}

fn answer(call: &Call, bytes: u32) -> Outcome {
    Outcome::Done(Reply { data: call.written(), ..Reply::number(Ok(bytes)) })
}

fn query(socket: &Socket, which: u32) -> Result<u32, Errno> {
    let request = match which {
        ONTIME_QUERY_INQ => libc::FIONREAD as libc::Ioctl,
        ONTIME_QUERY_OUTQ => libc::TIOCOUTQ as libc::Ioctl,
        ONTIME_QUERY_ATMARK => host::SIOCATMARK,
        _ => SIOCOUTQNSD,
    };
    host::query(socket.fd, request).map(|number| number as u32)
}
