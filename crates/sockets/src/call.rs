//! Calls in flight: a pool that is allocated once, and lists of the calls that wait on a socket.

use std::os::fd::RawFd;

use crate::abi::{DONE_LEN, Errno, ontime_call, ontime_done};
use crate::control;
use crate::host;
use crate::memory::{Buffers, Memory, Segments};
use crate::name;
use crate::request::{Parts, Request};

/// No call.
pub(crate) const NIL: u16 = u16::MAX;

#[derive(Debug)]
pub(crate) struct Call {
    /// Head of its descriptor chain.
    pub head: u16,
    /// The guest's call header, read once.
    pub words: ontime_call,
    /// The chain's buffers.
    pub buffers: Buffers,
    /// Sizes of its data.
    pub parts: Parts,
    /// The parsed request.
    pub request: Request,
    /// Bytes moved so far.
    pub moved: usize,
    /// Slot of the socket that the call waits on.
    index: u32,
    next: u16,
}

impl Call {
    fn new(segments: usize) -> Self {
        Self {
            head: 0,
            words: ontime_call::default(),
            buffers: Buffers::with_capacity(segments),
            parts: Parts { data: 0, room: 0 },
            request: Request::Poll,
            moved: 0,
            index: 0,
            next: NIL,
        }
    }

    /// Offset of the data in the readable part.
    pub(crate) fn data_at(&self) -> usize {
        crate::abi::CALL_LEN + usize::from(self.words.control_len)
    }

    /// Bytes of received data in the writable part. With MSG_TRUNC, which is only checked for streams here, the kernel
    /// discards the bytes.
    pub(crate) fn written(&self) -> usize {
        match self.request {
            Request::Recv { flags } if flags & libc::MSG_TRUNC == 0 => self.moved,
            _ => 0,
        }
    }

    /// Offset of the data in the writable part.
    pub(crate) fn room_at(&self) -> usize {
        DONE_LEN + usize::from(self.words.control_room)
    }

    /// Tells the size of a connection's send buffer: the kernel chooses it when the connection is made. Returns as
    /// [`Self::tell`].
    pub(crate) fn tell_send_buffer(&self, memory: &Memory, fd: RawFd) -> usize {
        let mut size = [0; 4];
        if host::get_option(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, &mut size) != Ok(size.len()) {
            return 0;
        }
        self.tell(memory, libc::SO_SNDBUF, i32::from_ne_bytes(size))
    }

    /// Writes a number of SOL_SOCKET as a control message, if the call has room for it. Returns the message's length, 0
    /// without one.
    pub(crate) fn tell(&self, memory: &Memory, name: i32, number: i32) -> usize {
        let message = control::number(libc::SOL_SOCKET, name, number);
        let message = message.as_flattened();
        let fits = message.len() <= usize::from(self.words.control_room);
        if fits && self.buffers.writable.write(memory, DONE_LEN, message).is_ok() { message.len() } else { 0 }
    }
}

/// A call's result.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reply {
    /// The returned number or the errno.
    pub result: Result<u32, Errno>,
    /// Bytes of data written.
    pub data: usize,
    /// Bytes of control messages written.
    pub control: usize,
    /// msg_flags of recvmsg(2).
    pub flags: u32,
    /// An address and its length.
    pub name: ([u8; name::ROOM], u16),
}

impl Reply {
    /// A reply with a number or an error only.
    pub(crate) fn number(result: Result<u32, Errno>) -> Self {
        Self { result, data: 0, control: 0, flags: 0, name: ([0; name::ROOM], 0) }
    }

    /// Success, without further data.
    pub(crate) fn done() -> Self {
        Self::number(Ok(0))
    }

    /// Adds an address.
    pub(crate) fn named(mut self, address: Option<std::net::SocketAddr>) -> Self {
        if let Some(address) = address {
            self.name = name::write(&address);
        }
        self
    }

    /// Writes the header and returns the used length.
    ///
    /// # Errors
    /// EFAULT if the guest's buffer is not in guest memory.
    pub(crate) fn write(&self, memory: &Memory, call: &Call, ready: u32, seq: u32) -> Result<u32, Errno> {
        let header = self.write_to(memory, &call.buffers.writable, call.words.id, ready, seq)?;
        Ok(if self.data > 0 { (call.room_at() + self.data) as u32 } else { header + self.control as u32 })
    }

    /// Writes only the header.
    ///
    /// # Errors
    /// As [`Reply::write`].
    pub(crate) fn write_to(
        &self,
        memory: &Memory,
        writable: &Segments,
        id: u64,
        ready: u32,
        seq: u32,
    ) -> Result<u32, Errno> {
        let done = ontime_done {
            id,
            result: self.result.unwrap_or_else(|error| error.result() as u32),
            ready,
            seq,
            msg_flags: self.flags,
            addr_len: self.name.1,
            control_len: self.control as u16,
            addr: self.name.0,
        };
        writable.write(memory, 0, vm_memory::ByteValued::as_slice(&done))?;
        Ok(DONE_LEN as u32)
    }
}

/// An answer that is held back because its ring is stopped.
pub(crate) struct DelayedAnswer {
    /// The answered call.
    pub call: Box<Call>,
    pub reply: Reply,
    /// Readiness of the socket at that time.
    pub ready: u32,
    /// Sequence number of that readiness report.
    pub seq: u32,
}

impl From<Errno> for Reply {
    fn from(error: Errno) -> Self {
        Self::number(Err(error))
    }
}

/// The calls of one channel.
pub(crate) struct Pool {
    #[allow(clippy::vec_box, reason = "a call moves between lists and is never copied")]
    free: Vec<Box<Call>>,
    waiting: Vec<Option<Box<Call>>>,
    room: Vec<u16>,
}

/// The calls that wait on a socket in one direction, in order of arrival.
#[derive(Debug, Clone, Copy)]
pub(crate) struct List {
    first: u16,
    last: u16,
}

impl Default for List {
    fn default() -> Self {
        Self { first: NIL, last: NIL }
    }
}

impl List {
    /// Whether no call waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.first == NIL
    }
}

impl Pool {
    /// A pool of `calls` calls that may wait, one more for refusals and one that is put off. Each has buffers of
    /// `segments` segments per direction.
    pub(crate) fn new(calls: usize, segments: usize) -> Self {
        Self {
            free: (0..calls + 2).map(|_| Box::new(Call::new(segments))).collect(),
            waiting: (0..calls).map(|_| None).collect(),
            room: (0..calls as u16).rev().collect(),
        }
    }

    /// An unused call. One is always available beside the waiting calls and one that is put off.
    pub(crate) fn take(&mut self) -> Option<Box<Call>> {
        self.free.pop()
    }

    /// Returns a call to the pool.
    pub(crate) fn put(&mut self, call: Box<Call>) {
        self.free.push(call);
    }

    /// Appends a call to a list. Returns the call if too many calls wait already.
    pub(crate) fn wait(&mut self, list: &mut List, index: u32, mut call: Box<Call>) -> Option<Box<Call>> {
        let Some(at) = self.room.pop() else { return Some(call) };
        call.index = index;
        call.next = NIL;
        match self.waiting.get_mut(usize::from(list.last)).and_then(Option::as_mut) {
            Some(last) => last.next = at,
            None => list.first = at,
        }
        list.last = at;
        if let Some(place) = self.waiting.get_mut(usize::from(at)) {
            *place = Some(call);
        }
        None
    }

    /// Removes and returns a list's first call.
    pub(crate) fn first(&mut self, list: &mut List) -> Option<Box<Call>> {
        let at = list.first;
        let call = self.waiting.get_mut(usize::from(at))?.take()?;
        self.room.push(at);
        list.first = call.next;
        if list.first == NIL {
            list.last = NIL;
        }
        Some(call)
    }

    /// Puts back a call that was just taken with [`Pool::first`].
    pub(crate) fn put_first(&mut self, list: &mut List, mut call: Box<Call>) {
        let Some(at) = self.room.pop() else { return };
        call.next = list.first;
        list.first = at;
        if list.last == NIL {
            list.last = at;
        }
        if let Some(place) = self.waiting.get_mut(usize::from(at)) {
            *place = Some(call);
        }
    }

    /// Finds a waiting call by its id: the socket's slot and whether the call is a send.
    pub(crate) fn find(&self, id: u64) -> Option<(u32, bool)> {
        let call = self.waiting.iter().flatten().find(|call| call.words.id == id)?;
        Some((call.index, matches!(call.request, Request::Send { .. })))
    }

    /// Removes the call `id` from its list.
    pub(crate) fn remove(&mut self, list: &mut List, id: u64) -> Option<Box<Call>> {
        let (mut before, mut at) = (NIL, list.first);
        loop {
            let call = self.waiting.get(usize::from(at))?.as_ref()?;
            if call.words.id == id {
                break;
            }
            before = at;
            at = call.next;
        }
        let call = self.waiting.get_mut(usize::from(at))?.take()?;
        self.room.push(at);
        match self.waiting.get_mut(usize::from(before)).and_then(Option::as_mut) {
            Some(before) => before.next = call.next,
            None => list.first = call.next,
        }
        if list.last == at {
            list.last = before;
        }
        Some(call)
    }

    /// Frees every waiting call: their ring is gone.
    pub(crate) fn forget(&mut self) {
        for (at, place) in self.waiting.iter_mut().enumerate() {
            if let Some(call) = place.take() {
                self.free.push(call);
                self.room.push(at as u16);
            }
        }
    }

    /// Number of waiting calls.
    #[cfg(test)]
    fn waiting(&self) -> usize {
        self.waiting.len() - self.room.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn with_id(pool: &mut Pool, id: u64) -> Box<Call> {
        let mut call = pool.take().unwrap();
        call.words.id = id;
        call
    }

    #[test]
    fn a_list_keeps_its_order_and_a_pool_its_size() {
        let mut pool = Pool::new(3, 1);
        let mut list = List::default();
        for id in 0..3 {
            let call = with_id(&mut pool, id);
            assert!(pool.wait(&mut list, 9, call).is_none());
        }
        let call = with_id(&mut pool, 3);
        let refused = pool.wait(&mut list, 9, call).unwrap();
        pool.put(refused);
        assert_eq!(pool.find(1), Some((9, false)));
        let first = pool.first(&mut list).unwrap();
        assert_eq!(first.words.id, 0);
        pool.put_first(&mut list, first);
        let middle = pool.remove(&mut list, 1).unwrap();
        pool.put(middle);
        assert!(pool.remove(&mut list, 1).is_none());
        for id in [0, 2] {
            let call = pool.first(&mut list).unwrap();
            assert_eq!(call.words.id, id);
            pool.put(call);
        }
        assert!(list.is_empty() && pool.first(&mut list).is_none() && pool.waiting() == 0);
    }

    proptest! {
        /// Compares the lists with the standard library's deque.
        #[test]
        fn lists_do_as_a_deque_does(steps in proptest::collection::vec((0u8..4, 0usize..8), 0..200)) {
            let mut pool = Pool::new(8, 1);
            let mut list = List::default();
            let mut model = std::collections::VecDeque::new();
            let mut next = 0;
            for (step, which) in steps {
                match step {
                    0 | 1 => {
                        let call = with_id(&mut pool, next);
                        match pool.wait(&mut list, 0, call) {
                            None => model.push_back(next),
                            Some(call) => { prop_assert_eq!(model.len(), 8); pool.put(call); }
                        }
                        next += 1;
                    }
                    2 => {
                        let call = pool.first(&mut list);
                        prop_assert_eq!(call.as_ref().map(|call| call.words.id), model.pop_front());
                        if let Some(call) = call { pool.put(call); }
                    }
                    _ => {
                        let id = model.get(which).copied().unwrap_or(u64::MAX);
                        model.retain(|have| *have != id);
                        if let Some(call) = pool.remove(&mut list, id) {
                            prop_assert_eq!(call.words.id, id);
                            pool.put(call);
                        } else {
                            prop_assert_eq!(id, u64::MAX);
                        }
                    }
                }
                prop_assert_eq!(pool.waiting(), model.len());
            }
            pool.forget();
            prop_assert_eq!(pool.free.len(), 10);
            prop_assert_eq!(pool.room.len(), 8);
        }
    }
}
