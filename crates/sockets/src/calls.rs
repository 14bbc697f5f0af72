//! Calls of an engine's queue: take, check, run, store while they wait, answer.

use vhost_user_backend::VringT;

use crate::abi::*;
use crate::call::{Call, DelayedAnswer, Reply};
use crate::counters::count;
use crate::engine::{Engine, Local, Outcome};
use crate::host;
use crate::limits::QUEUE_MAX;
use crate::memory::Memory;
use crate::request::{self, Protocol, Request};
use crate::shared::Shared;
use crate::table::Socket;
use crate::vring::Vring;

impl Engine {
    /// The next call, until the queue is empty or `left` calls were taken; then the remaining calls are run in the next
    /// turn.
    ///
    /// The queue is polled at every event except one that answers a waiting call. A call that arrives meanwhile then
    /// needs no wake-up of its own.
    pub(crate) fn next(&mut self, memory: &Memory, calls: &Vring, left: &mut usize) -> Option<Box<Call>> {
        // A ring with an invalid index always seems to hold more: retry once, not for ever.
        for _ in 0..2 {
            if !self.live(calls) {
                return None;
            }
            if *left == 0 {
                self.ring_again();
                return None;
            }
            if let Some(call) = self.next_call(memory, calls) {
                *left -= 1;
                return Some(call);
            }
            if !matches!(calls.enable_notification(), Ok(true)) {
                return None;
            }
        }
        None
    }

    /// The next call of the queue, after the checks that all calls share. Buffers that hold no valid call are returned
    /// as used.
    fn next_call(&mut self, memory: &Memory, vring: &Vring) -> Option<Box<Call>> {
        if !self.live(vring) {
            return None;
        }
        let segments = Shared::segments(self.channel) as usize;
        for _ in 0..QUEUE_MAX {
            let Ok(chain) = vring.pop(memory)? else {
                count(&self.shared.counters.malformed);
                continue;
            };
            let mut call = self.pool.take()?;
            call.head = chain.head_index();
            call.moved = 0;
            call.buffers.fill(
                chain.map(|descriptor| (descriptor.addr().0, descriptor.len(), descriptor.is_write_only())),
                segments,
            );
            let words = vm_memory::ByteValued::as_mut_slice(&mut call.words);
            if call.buffers.writable.len >= DONE_LEN && call.buffers.readable.read(memory, 0, words).is_ok() {
                count(&self.shared.counters.calls);
                return Some(call);
            }
            count(&self.shared.counters.malformed);
            self.give_back(vring, call, 0);
        }
        None
    }

    /// Checks the call's fields and parses its request.
    pub(crate) fn parse(&self, call: &mut Call) -> Result<Request, Errno> {
        let (readable, writable) = (call.buffers.readable.len, call.buffers.writable.len);
        if let Some(error) = call.buffers.malformed {
            return Err(error);
        }
        call.parts = request::parts(&call.words, readable, writable, crate::limits::DATA_MAX as usize)?;
        call.request = request::request(&call.words, self.shared.channels())?;
        Ok(call.request)
    }

    /// Runs a call that cannot block; refuses other calls.
    pub(crate) fn fast(&mut self, memory: &Memory, vring: &Vring, mut call: Box<Call>) {
        match self.parse(&mut call) {
            Ok(request) => self.parsed(memory, vring, call, request),
            Err(error) => self.malformed(memory, vring, call, error),
        }
    }

    /// Runs a parsed call that cannot block; refuses other calls.
    pub(crate) fn parsed(&mut self, memory: &Memory, vring: &Vring, mut call: Box<Call>, request: Request) {
        if let Request::Cancel { id } = request {
            let reply = self.cancel(memory, vring, id);
            return self.complete(memory, vring, call, &reply, None);
        }
        let mut found = self.shared.table.find(call.words.sock);
        if found.is_ok_and(|socket| socket.owner == self.channel && !self.owns(&socket)) {
            // The socket was given to this channel after its orders were read; the guest was already answered. The
            // orders may also release this socket and adopt the next one in its slot, so the socket is looked up again.
            self.orders(memory, vring);
            found = self.shared.table.find(call.words.sock);
        }
        let socket = match found {
            Ok(socket) => socket,
            Err(error) => return self.complete(memory, vring, call, &error.into(), None),
        };
        let owned = self.owns(&socket);
        // Only the worker may query another channel's socket; holding it prevents its close.
        let anywhere = self.channel == 0 && matches!(request, Request::Name { .. } | Request::Query(_));
        let shared = (anywhere && !owned).then(|| self.shared.clone());
        let held = shared.as_ref().map(|shared| shared.table.held(socket.id));
        let (socket, _held) = match held {
            Some(Err(error)) => return self.complete(memory, vring, call, &error.into(), None),
            Some(Ok((socket, held))) => (socket, Some(held)),
            None => (socket, None),
        };
        if !owned && !anywhere {
            let error = if request.is_fast() { libc::EXDEV } else { libc::EOPNOTSUPP };
            return self.complete(memory, vring, call, &Errno(error).into(), None);
        }
        if let (Request::Close { abort }, true) = (request, owned) {
            let closed = self.close(memory, vring, &socket, abort);
            return self.complete(memory, vring, call, &Reply::number(closed.map(|()| 0)), None);
        }
        let prio = call.words.prio;
        if let Some(local) = self.local(socket.index).filter(|_| owned) {
            local.prio = prio;
        }
        let place = owned.then_some(socket.index);
        if owned && self.others_wait(&call, socket.index) {
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

    fn owns(&self, socket: &Socket) -> bool {
        socket.owner == self.channel && self.locals.get(socket.index as usize).is_some_and(|local| local.owned)
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
        let list = self.locals.get(index as usize).and_then(|local| local.waiting.get(side));
        queues && list.is_some_and(|list| !list.is_empty())
    }

    pub(crate) fn malformed(&mut self, memory: &Memory, vring: &Vring, call: Box<Call>, error: Errno) {
        count(&self.shared.counters.malformed);
        self.complete(memory, vring, call, &error.into(), None);
    }

    fn wait(&mut self, memory: &Memory, vring: &Vring, call: Box<Call>, index: u32) {
        let side = usize::from(matches!(call.request, Request::Send { .. }));
        let Some(list) = self.locals.get_mut(index as usize).and_then(|local| local.waiting.get_mut(side)) else {
            return;
        };
        if let Some(refused) = self.pool.wait(list, index, call) {
            count(&self.shared.counters.refused_limit);
            self.complete(memory, vring, refused, &Errno(libc::EBUSY).into(), Some(index));
        }
    }

    fn cancel(&mut self, memory: &Memory, vring: &Vring, id: u64) -> Reply {
        let found = self.pool.find(id).and_then(|(index, send)| {
            let list = self.locals.get_mut(index as usize)?.waiting.get_mut(usize::from(send))?;
            Some((index, self.pool.remove(list, id)?))
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
        self.pool.first(self.locals.get_mut(index as usize)?.waiting.get_mut(side)?)
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
        let (ready, seq) = place.and_then(|index| self.local(index)).map_or((0, 0), shown);
        self.give(memory, vring, DelayedAnswer { call, reply: *reply, ready, seq });
    }

    /// Sends an answer. If the ring is stopped the answer is held back: its memory may be reused until the ring runs
    /// again or is set up anew.
    pub(crate) fn give(&mut self, memory: &Memory, vring: &Vring, owed: DelayedAnswer) {
        if !self.live(vring) {
            self.owed.push_back(owed);
            return;
        }
        let DelayedAnswer { call, reply, ready, seq } = owed;
        let len = reply.write(memory, &call, ready, seq).unwrap_or(0);
        self.waiter = self.waiter.max(call.words.prio);
        self.give_back(vring, call, len);
    }

    fn give_back(&mut self, vring: &Vring, call: Box<Call>, len: u32) {
        // If the used ring is outside guest memory, the answer is lost: the guest cannot be notified.
        let _ = vring.add_used(call.head, len);
        self.used[0] = true;
        self.pool.put(call);
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
                        if let Some(list) =
                            self.locals.get_mut(socket.index as usize).and_then(|local| local.waiting.get_mut(side))
                        {
                            self.pool.put_first(list, call);
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
                if let Some(local) = self.local(index) {
                    local.error = error as u16;
                }
            }
        }
    }
}
