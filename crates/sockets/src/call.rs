//! Calls in flight: a pool made once, and lists of those that wait on a socket.

use crate::abi::{DONE_LEN, Errno, ontime_call, ontime_done};
use crate::memory::{Buffers, Memory, Segments};
use crate::name;
use crate::request::{Parts, Request};

/// No call.
pub const NIL: u16 = u16::MAX;

/// One call.
#[derive(Debug)]
pub struct Call {
    /// Its descriptor chain.
    pub head: u16,
    /// The guest's words, read once.
    pub words: ontime_call,
    /// Its buffers.
    pub buffers: Buffers,
    /// Sizes of its data.
    pub parts: Parts,
    /// What it asks for.
    pub request: Request,
    /// Bytes moved so far.
    pub moved: usize,
    /// Place of the socket it waits on.
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

    /// Where data begin in the readable part.
    pub fn data_at(&self) -> usize {
        crate::abi::CALL_LEN + usize::from(self.words.control_len)
    }

    /// Bytes of data that it has received into its room. With MSG_TRUNC it is asked of streams only, whose bytes go
    /// nowhere then.
    pub fn written(&self) -> usize {
        match self.request {
            Request::Recv { flags } if flags & libc::MSG_TRUNC == 0 => self.moved,
            _ => 0,
        }
    }

    /// Where data begin in the writable part.
    pub fn room_at(&self) -> usize {
        DONE_LEN + usize::from(self.words.control_room)
    }
}

/// What a call gives.
#[derive(Debug, Clone, Copy)]
pub struct Reply {
    /// The number, or the error.
    pub result: Result<u32, Errno>,
    /// Bytes of data written.
    pub data: usize,
    /// Bytes of control messages written.
    pub control: usize,
    /// recvmsg's flags.
    pub flags: u32,
    /// An address.
    pub name: ([u8; name::ROOM], u16),
}

impl Reply {
    /// Only a number or an error.
    pub fn number(result: Result<u32, Errno>) -> Self {
        Self { result, data: 0, control: 0, flags: 0, name: ([0; name::ROOM], 0) }
    }

    /// Done, without anything to say.
    pub fn done() -> Self {
        Self::number(Ok(0))
    }

    /// With an address.
    pub fn named(mut self, address: Option<std::net::SocketAddr>) -> Self {
        if let Some(address) = address {
            self.name = name::write(&address);
        }
        self
    }

    /// Writes the header, and gives the used length.
    ///
    /// # Errors
    /// EFAULT where the guest's buffer is not its memory.
    pub fn write(&self, memory: &Memory, call: &Call, ready: u32, seq: u32) -> Result<u32, Errno> {
        let header = self.write_to(memory, &call.buffers.writable, call.words.id, ready, seq)?;
        Ok(if self.data > 0 { (call.room_at() + self.data) as u32 } else { header + self.control as u32 })
    }

    /// Writes the header only.
    ///
    /// # Errors
    /// As [`Reply::write`].
    pub fn write_to(&self, memory: &Memory, writable: &Segments, id: u64, ready: u32, seq: u32) -> Result<u32, Errno> {
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

/// An answer that is known, and cannot be given while its ring stands.
pub struct Owed {
    /// To what.
    pub call: Box<Call>,
    /// What.
    pub reply: Reply,
    /// How ready the socket was.
    pub ready: u32,
    /// The number of that report.
    pub seq: u32,
}

impl From<Errno> for Reply {
    fn from(error: Errno) -> Self {
        Self::number(Err(error))
    }
}

/// The calls of one channel.
pub struct Pool {
    #[allow(clippy::vec_box, reason = "a call moves between lists and is never copied")]
    free: Vec<Box<Call>>,
    waiting: Vec<Option<Box<Call>>>,
    room: Vec<u16>,
}

/// The calls that wait on a socket in one direction, in the order they came.
#[derive(Debug, Clone, Copy)]
pub struct List {
    first: u16,
    last: u16,
}

impl Default for List {
    fn default() -> Self {
        Self { first: NIL, last: NIL }
    }
}

impl List {
    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.first == NIL
    }
}

impl Pool {
    /// `calls` that may wait, with buffers of `segments` in each direction, one more for refusals, and one that is put
    /// off.
    pub fn new(calls: usize, segments: usize) -> Self {
        Self {
            free: (0..calls + 2).map(|_| Box::new(Call::new(segments))).collect(),
            waiting: (0..calls).map(|_| None).collect(),
            room: (0..calls as u16).rev().collect(),
        }
    }

    /// An unused call. There always is one beside those that wait and one that is put off.
    pub fn take(&mut self) -> Option<Box<Call>> {
        self.free.pop()
    }

    /// Gives a call back.
    pub fn put(&mut self, call: Box<Call>) {
        self.free.push(call);
    }

    /// Lets a call wait at the end of a list. Gives it back where too many wait already.
    pub fn wait(&mut self, list: &mut List, index: u32, mut call: Box<Call>) -> Option<Box<Call>> {
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

    /// Takes the first of a list out.
    pub fn first(&mut self, list: &mut List) -> Option<Box<Call>> {
        let at = list.first;
        let call = self.waiting.get_mut(usize::from(at))?.take()?;
        self.room.push(at);
        list.first = call.next;
        if list.first == NIL {
            list.last = NIL;
        }
        Some(call)
    }

    /// Puts one back that was just taken by [`Pool::first`].
    pub fn put_first(&mut self, list: &mut List, mut call: Box<Call>) {
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

    /// Where a waiting call is, by its id: the socket's place and the direction.
    pub fn find(&self, id: u64) -> Option<(u32, bool)> {
        let call = self.waiting.iter().flatten().find(|call| call.words.id == id)?;
        Some((call.index, matches!(call.request, Request::Send { .. })))
    }

    /// Takes the call `id` out of the list it is in.
    pub fn remove(&mut self, list: &mut List, id: u64) -> Option<Box<Call>> {
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

    /// Forgets every waiting call: the ring they came by is gone.
    pub fn forget(&mut self) {
        for (at, place) in self.waiting.iter_mut().enumerate() {
            if let Some(call) = place.take() {
                self.free.push(call);
                self.room.push(at as u16);
            }
        }
    }

    /// How many wait.
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
        /// Against a list of the standard library.
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
