//! What a channel's real-time thread does with its engine: it serves the call queue at each event, executes the
//! worker's orders, and closes connections that it has accepted itself.
//!
//! Nothing here allocates after its creation or takes a lock that another thread holds for long, and each loop is
//! bounded by the queue's size, the number of sockets or the call's segments.

use crate::abi::*;
use crate::call::{Call, Reply};
use crate::counters::count;
use crate::engine::Engine;
use crate::host;
use crate::limits::QUEUE_MAX;
use crate::mail::{ChannelEnd, Order, ROOM, Released};
use crate::memory::Memory;
use crate::request::Request;
use crate::table::Socket;
use crate::vring::Vring;

/// A channel's engine, and its end of the mail with the worker.
pub(crate) struct ChannelCalls {
    pub(crate) engine: Engine,
    mail: Option<ChannelEnd>,
}

impl ChannelCalls {
    /// Takes the channel's end of the mail, which works once.
    pub(crate) fn new(engine: Engine) -> Self {
        Self { mail: engine.shared.mail.take_channel(engine.channel), engine }
    }

    /// Handles an event on the real-time thread. For a socket, `ready` holds its EPOLL* bits.
    pub(crate) fn handle(&mut self, event: u16, ready: u32, vrings: &[Vring]) {
        let Some([calls, events]) = vrings.first_chunk() else { return };
        let guard = self.engine.memory();
        let memory = &*guard;
        self.engine.restarted(calls, events);
        self.orders(memory, calls);
        self.engine.catch_up(memory, calls);
        let answered = self.engine.event(memory, vrings, event, ready);
        let mut left = QUEUE_MAX;
        // The thread whose call was answered should run first, so the queue is not polled now. New calls have rung the
        // doorbell; receives posted ahead do not ring and come with a call that does.
        let queue = Some(calls).filter(|_| !answered);
        let mut later = None;
        while let Some(call) = queue.and_then(|calls| self.engine.queue.next(memory, calls, &mut left)) {
            // A receive that no guest thread waits for yet is put off behind the sends that directly follow it.
            let ahead = u32::from(call.words.flags) & ONTIME_CALL_AHEAD != 0;
            let sends = u32::from(call.words.op) == ONTIME_OP_SEND;
            let first = later.take_if(|_| !sends);
            let now = if ahead { later.replace(call) } else { Some(call) };
            first.into_iter().chain(now).for_each(|call| self.fast(memory, calls, call));
        }
        later.into_iter().for_each(|call| self.fast(memory, calls, call));
        self.engine.finish(memory, vrings);
    }

    /// Runs a call that cannot block; refuses other calls.
    fn fast(&mut self, memory: &Memory, vring: &Vring, mut call: Box<Call>) {
        match self.engine.queue.parse(&mut call) {
            Ok(request) => self.parsed(memory, vring, call, request),
            Err(error) => self.engine.queue.malformed(memory, vring, call, error),
        }
    }

    /// Runs a parsed call that cannot block; refuses other calls.
    pub(crate) fn parsed(&mut self, memory: &Memory, vring: &Vring, call: Box<Call>, request: Request) {
        if self.given(call.words.sock).is_some_and(|socket| !self.engine.sockets.owns(&socket)) {
            // The socket was given to this channel after its orders were read; the guest was already answered. The
            // orders may also release this socket and adopt the next one in its slot.
            self.orders(memory, vring);
        }
        if let Request::Close { abort } = request {
            let own = self.given(call.words.sock).filter(|socket| self.engine.sockets.owns(socket));
            if let Some(socket) = own {
                let closed = self.close(memory, vring, &socket, abort);
                return self.engine.complete(memory, vring, call, &Reply::number(closed.map(|()| 0)), None);
            }
        }
        self.engine.parsed(memory, vring, call, request);
    }

    /// The socket, if the table names this channel as its owner.
    fn given(&self, id: u32) -> Option<Socket> {
        self.engine.shared.table.find(id).ok().filter(|socket| socket.owner == self.engine.channel)
    }

    /// Executes the worker's orders.
    pub(crate) fn orders(&mut self, memory: &Memory, calls: &Vring) {
        let mut took = false;
        for _ in 0..ROOM {
            let Some(Ok(order)) = self.mail.as_mut().map(|mail| mail.orders.pop()) else { break };
            took = true;
            match order {
                Order::Adopt { index } => {
                    if self.engine.adopt(index).is_err() {
                        count(&self.engine.shared.counters.refused_limit);
                        // The guest was already answered. The socket never becomes ready, but its owner gives it back
                        // when the guest closes it or boots anew.
                        if self.engine.shared.table.at(index).is_some() {
                            self.engine.sockets.own(index, 0, false);
                            self.engine.reports.mark(&mut self.engine.sockets, index);
                        }
                    }
                }
                Order::Look { index } => self.engine.look_again(index),
                Order::Release { id, ticket, force } => {
                    // The socket may have been closed here, and its slot reused.
                    let result = self.given(id).map_or(Err(Errno(libc::EBADF)), |socket| {
                        self.engine.release(memory, calls, socket.index, force)
                    });
                    self.answer(Released { ticket, result });
                }
                Order::Forget { ticket } => {
                    self.engine.forget();
                    self.answer(Released { ticket, result: Ok(()) });
                }
                #[cfg(test)]
                Order::Meanwhile(acts) => acts(&self.engine.shared),
            }
        }
        if took {
            self.engine.shared.mail.made_room(self.engine.channel);
        }
    }

    fn answer(&mut self, released: Released) {
        // The ring has room: the worker has at most [`ROOM`] unanswered orders.
        let _ = self.mail.as_mut().map(|mail| mail.released.push(released));
        self.engine.shared.mail.ring(0);
    }

    /// Closes a connection that was accepted here. This cannot block: host sockets do not linger, and an accepted
    /// connection has no group memberships and no backlog.
    ///
    /// # Errors
    /// EOPNOTSUPP for other sockets, and if the worker holds this socket: then the guest must close it through main.
    pub(crate) fn close(&mut self, memory: &Memory, vring: &Vring, socket: &Socket, abort: bool) -> Result<(), Errno> {
        let shared = self.engine.shared.clone();
        // While `socket` was not held, the worker may have made it a listener or a group's member.
        let held = shared.table.held(socket.id).ok().filter(|(socket, _)| socket.accepted);
        let (socket, _held) = held.ok_or(Errno(libc::EOPNOTSUPP))?;
        self.engine.leave(memory, vring, socket.index);
        match shared.table.take(socket.index) {
            Some(fd) if abort => {
                host::abort_at_close(fd);
                host::close(fd);
            }
            // The thread `closing` takes a connection with data left. A socket that is not connected has nothing left.
            // With unread data the kernel resets the connection at the close.
            Some(fd) if host::unread(fd) == 0 && host::shutdown(fd, libc::SHUT_RDWR).is_ok() => shared.leave(fd),
            taken => taken.into_iter().for_each(host::close),
        }
        Ok(())
    }
}
