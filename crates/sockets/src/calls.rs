//! Calls of an engine: run them on their sockets, store them while they wait, answer.

use crate::abi::*;
use crate::call::{Call, DelayedAnswer, Reply};
use crate::counters::count;
use crate::engine::{Engine, Outcome};
use crate::host;
use crate::memory::Memory;
use crate::owned_sockets::Local;
use crate::request::{Protocol, Request};
use crate::table::Socket;
use crate::vring::Vring;

impl Engine {
    /// Runs a parsed call that cannot block, on a socket of this engine; refuses other calls.
    pub(crate) fn parsed(&mut self, memory: &Memory, vring: &Vring, mut call: Box<Call>, request: Request) {
        if let Request::Cancel { id } = request {
            let reply = self.cancel(memory, vring, id);
            return self.complete(memory, vring, call, &reply, None);
        }
        let socket = match self.shared.table.find(call.words.sock) {
            Ok(socket) => socket,
            Err(error) => return self.complete(memory, vring, call, &error.into(), None),
        };
        if !self.sockets.owns(&socket) {
            let error = if request.is_fast() { libc::EXDEV } else { libc::EOPNOTSUPP };
            return self.complete(memory, vring, call, &Errno(error).into(), None);
        }
        let prio = call.words.prio;
        if let Some(local) = self.sockets.local(socket.index) {
            local.prio = prio;
        }
        let place = Some(socket.index);
        if self.others_wait(&call, socket.index) {
            // Bytes of two sends must not mix, and waiting calls are served in order of arrival.
            return if u32::from(call.words.flags) & ONTIME_CALL_WAIT != 0 {
                self.wait(memory, vring, call, socket.index)
            } else {
                self.complete(memory, vring, call, &Errno(libc::EAGAIN).into(), place)
            };
        }
        match self.attempt(memory, &mut call, &socket) {
            Outcome::Done(reply) => self.complete(memory, vring, call, &reply, place),
            Outcome::Wait | Outcome::Again => self.wait(memory, vring, call, socket.index),
        }
    }

    /// Whether the call must wait behind others of its kind: a send, or a receive or accept that would wait.
    fn others_wait(&self, call: &Call, index: u32) -> bool {
        let waits = u32::from(call.words.flags) & ONTIME_CALL_WAIT != 0;
        let queues = match call.request {
            Request::Send { .. } => true,
            Request::Recv { flags } => waits && flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) == 0,
            Request::Accept { .. } => waits,
            _ => false,
        };
        let side = usize::from(matches!(call.request, Request::Send { .. }));
        let list = self.sockets.locals.get(index as usize).and_then(|local| local.waiting.get(side));
        queues && list.is_some_and(|list| !list.is_empty())
    }

    fn wait(&mut self, memory: &Memory, vring: &Vring, call: Box<Call>, index: u32) {
        let side = usize::from(matches!(call.request, Request::Send { .. }));
        let Some(list) = self.sockets.waiting(index, side) else { return };
        if let Some(refused) = self.queue.pool.wait(list, index, call) {
            count(&self.shared.counters.refused_limit);
            self.complete(memory, vring, refused, &Errno(libc::EBUSY).into(), Some(index));
        }
    }

    fn cancel(&mut self, memory: &Memory, vring: &Vring, id: u64) -> Reply {
        let found = self.queue.pool.find(id).and_then(|(index, send)| {
            let list = self.sockets.waiting(index, usize::from(send))?;
            Some((index, self.queue.pool.remove(list, id)?))
        });
        let Some((index, call)) = found else { return Errno(libc::ENOENT).into() };
        self.end(memory, vring, call, index);
        Reply::done()
    }

    /// Completes a waiting call that will not continue. A peek for all bytes, which has copied none, gives those there
    /// are.
    fn end(&mut self, memory: &Memory, vring: &Vring, mut call: Box<Call>, index: u32) {
        let all = libc::MSG_PEEK | libc::MSG_WAITALL;
        let peeks_all = matches!(call.request, Request::Recv { flags } if flags & all == all);
        if let Some(socket) = peeks_all.then(|| self.shared.table.at(index)).flatten() {
            call.words.flags = (u32::from(call.words.flags) & !ONTIME_CALL_WAIT) as u16;
            match self.attempt(memory, &mut call, &socket) {
                Outcome::Done(reply) if reply.result != Err(Errno(libc::EAGAIN)) => {
                    return self.complete(memory, vring, call, &reply, Some(index));
                }
                _ => call.moved = 0,
            }
        }
        let reply = match call.moved {
            0 => Errno(libc::ECANCELED).into(),
            moved => Reply { data: call.written(), ..Reply::number(Ok(moved as u32)) },
        };
        self.complete(memory, vring, call, &reply, Some(index));
    }

    /// Ends all calls that wait on a socket.
    pub(crate) fn end_waiting(&mut self, memory: &Memory, vring: &Vring, index: u32) {
        for side in 0..2 {
            while let Some(call) = self.take_waiting(index, side) {
                self.end(memory, vring, call, index);
            }
        }
    }

    fn take_waiting(&mut self, index: u32, side: usize) -> Option<Box<Call>> {
        self.queue.pool.first(self.sockets.waiting(index, side)?)
    }

    /// Answers a call. `place`: the slot of the socket whose readiness the answer reports, if this engine owns it.
    pub(crate) fn complete(
        &mut self,
        memory: &Memory,
        vring: &Vring,
        call: Box<Call>,
        reply: &Reply,
        place: Option<u32>,
    ) {
        // While an error is pending its readiness is reported as 0, so that the guest cannot see the failure before its
        // reason.
        let shown = |local: &mut Local| (if local.error == 0 { local.ready } else { 0 }, local.report());
        let (ready, seq) = place.and_then(|index| self.sockets.local(index)).map_or((0, 0), shown);
        self.queue.give(memory, vring, DelayedAnswer { call, reply: *reply, ready, seq });
    }

    /// Tries the calls that wait on a socket, in order. Returns for each side whether a call was completed.
    pub(crate) fn serve(&mut self, memory: &Memory, vring: &Vring, socket: &Socket) -> [bool; 2] {
        let mut served = [false; 2];
        for (side, served) in served.iter_mut().enumerate() {
            while let Some(mut call) = self.take_waiting(socket.index, side) {
                match self.attempt(memory, &mut call, socket) {
                    Outcome::Done(mut reply) => {
                        if matches!(call.request, Request::Recv { .. }) {
                            reply.flags |= ONTIME_MSG_WAITED;
                        }
                        self.complete(memory, vring, call, &reply, Some(socket.index));
                        *served = true;
                    }
                    Outcome::Wait | Outcome::Again => {
                        if let Some(list) = self.sockets.waiting(socket.index, side) {
                            self.queue.pool.put_first(list, call);
                        }
                        break;
                    }
                }
            }
        }
        served
    }

    /// Delivers a socket's error to a waiting call, or else as an event. A stream's data come before its error.
    pub(crate) fn failed(&mut self, memory: &Memory, vring: &Vring, socket: &Socket, error: i32) {
        let index = socket.index;
        let data = socket.protocol == Protocol::Tcp
            && host::query(socket.fd, libc::FIONREAD as libc::Ioctl).is_ok_and(|bytes| bytes > 0);
        let first = (usize::from(data)..2).find_map(|side| self.take_waiting(index, side));
        match first {
            Some(call) if call.moved == 0 => self.complete(memory, vring, call, &Errno(error).into(), Some(index)),
            other => {
                if let Some(call) = other {
                    self.end(memory, vring, call, index);
                }
                if let Some(local) = self.sockets.local(index) {
                    local.error = error as u16;
                }
            }
        }
    }
}
