//! The queue through which a guest's calls come, for the one thread that serves it: takes calls, checks their form,
//! keeps those that wait, and sends answers.
//!
//! After its creation a queue does not allocate.

use std::collections::VecDeque;
use std::sync::Arc;

use vhost_user_backend::VringT;

use crate::abi::*;
use crate::call::{Call, DelayedAnswer, Pool};
use crate::counters::count;
use crate::limits::QUEUE_MAX;
use crate::memory::Memory;
use crate::request::{self, Request};
use crate::shared::Shared;
use crate::vring::Vring;

/// A queue of calls; see the module's comment.
pub(crate) struct CallQueue {
    shared: Arc<Shared>,
    channel: u32,
    /// Most descriptors of one call.
    segments: usize,
    pub(crate) pool: Pool,
    /// Answers for a ring that is stopped. Never more than the pool has calls.
    pub(crate) owed: VecDeque<DelayedAnswer>,
    /// The ring's `set_up` count that was processed.
    set_up: u32,
    /// Whether buffers were used since the last notification.
    pub(crate) used: bool,
    /// The highest priority of the guest's threads whose calls were answered since then.
    pub(crate) waiter: u16,
}

impl CallQueue {
    /// The queue of a channel; 0 is main.
    pub(crate) fn new(shared: Arc<Shared>, channel: u32) -> Self {
        let segments = Shared::segments(channel) as usize;
        let pool = Pool::new(QUEUE_MAX, segments);
        let owed = VecDeque::with_capacity(QUEUE_MAX + 1);
        Self { shared, channel, segments, pool, owed, set_up: 0, used: false, waiter: 0 }
    }

    /// Detects that the guest set up its ring anew, and drops the calls then: they belong to the old ring, whose memory
    /// may be reused for anything. Returns whether it was set up anew, and whether it had been used before.
    pub(crate) fn restarted(&mut self, ring: &Vring) -> (bool, bool) {
        let before = self.set_up;
        let anew = ring.anew_since(&mut self.set_up);
        if anew {
            self.forget();
        }
        (anew, before != 0)
    }

    /// Whether the ring may be accessed. False for a ring that was set up after the last [`Self::restarted`]; the
    /// doorbell that follows runs the thread again.
    pub(crate) fn live(&self, ring: &Vring) -> bool {
        ring.running() && self.set_up == ring.set_up()
    }

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
                self.shared.mail.ring(self.channel);
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
                self.segments,
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

    /// Refuses a call that is malformed.
    pub(crate) fn malformed(&mut self, memory: &Memory, vring: &Vring, call: Box<Call>, error: Errno) {
        count(&self.shared.counters.malformed);
        self.give(memory, vring, DelayedAnswer { call, reply: error.into(), ready: 0, seq: 0 });
    }

    /// Drops the waiting calls and the answers that were held back.
    pub(crate) fn forget(&mut self) {
        self.pool.forget();
        while let Some(owed) = self.owed.pop_front() {
            self.pool.put(owed.call);
        }
    }

    /// Sends the answers that were held back while the ring was stopped.
    pub(crate) fn catch_up(&mut self, memory: &Memory, ring: &Vring) {
        for _ in 0..self.owed.len() {
            let Some(owed) = self.owed.pop_front() else { break };
            self.give(memory, ring, owed);
        }
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
        self.used = true;
        self.pool.put(call);
    }
}
