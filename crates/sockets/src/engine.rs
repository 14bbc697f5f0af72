//! What a thread does that owns sockets: takes calls from its queue, runs those that cannot block, keeps those that
//! wait, reports readiness. The real-time thread of a channel is an engine; the worker is one with more calls
//! (`worker`).
//!
//! After it is made, an engine allocates nothing, takes no lock another thread holds for long, and bounds each loop by
//! the queue's size, the number of sockets or the call's segments.

use std::collections::VecDeque;
use std::sync::Arc;

use vm_memory::{GuestAddressSpace, GuestMemoryAtomic};

use crate::abi::*;
use crate::call::{List, Owed, Pool, Reply};
use crate::host;
use crate::mail::{ChannelEnd, Order, ROOM, Released};
use crate::memory::{Iovecs, Memory};
use crate::notify::Notifier;
use crate::readiness;
use crate::shared::{QUEUE_MAX, Shared, count};
use crate::table::{NOBODY, Socket};
use crate::vring::Vring;
use crate::wait::Wait;

/// Numbers of what the thread waits for: below are the queues and the backend's own.
pub const BELL_EVENT: u16 = 8;
/// The socket at place 0.
pub const SOCKET_EVENTS: u16 = 16;

/// What the engine keeps about a socket it owns.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Local {
    pub owned: bool,
    pub dirty: bool,
    pub again: bool,
    /// EPOLLOUT is waited for, too.
    pub out_watched: bool,
    /// Somebody asked how ready it is, and means to be told.
    pub polled: bool,
    /// What it was ready for when it was adopted is still to come as an event, too.
    pub adopted: bool,
    /// A stream that has had urgent data: a receive may end at their mark, with more behind it.
    pub urgent: bool,
    pub prio: u16,
    pub error: u16,
    pub ready: u32,
    pub seq: u32,
    /// Calls that wait: for something to receive or accept, and to send.
    pub waiting: [List; 2],
}

/// What came of a call.
pub(crate) enum Outcome {
    /// It is finished.
    Done(Reply),
    /// It can go on when the socket is ready.
    Wait,
    /// It moved bytes and may move more.
    Again,
}

/// See above.
pub struct Engine {
    pub(crate) shared: Arc<Shared>,
    pub(crate) channel: u32,
    memory: GuestMemoryAtomic<Memory>,
    /// For its sockets.
    pub(crate) wait: Wait,
    pub(crate) locals: Box<[Local]>,
    pub(crate) pool: Pool,
    /// Never more than the pool has calls.
    pub(crate) owed: VecDeque<Owed>,
    pub(crate) dirty: VecDeque<u32>,
    again: VecDeque<u32>,
    pub(crate) iov: Iovecs,
    pub(crate) control: Vec<u8>,
    /// The worker has none: it gives the orders.
    mail: Option<ChannelEnd>,
    notifier: Notifier,
    /// The vCPU word when the thread last looked at a ring that lived, as [`Shared::vcpu_named`] gives it.
    word: u64,
    /// The rings' `set_up` that this engine has taken note of.
    calls_seen: u32,
    events_seen: u32,
    pub(crate) start_due: bool,
    pub(crate) missed: bool,
    pub(crate) used: [bool; 2],
    pub(crate) waiter: u16,
}

impl Engine {
    /// Of a channel, whose sockets are waited for by this.
    pub fn new(shared: Arc<Shared>, channel: u32, memory: GuestMemoryAtomic<Memory>, wait: Wait) -> Self {
        let segments = Shared::segments(channel) as usize;
        Self {
            channel,
            memory,
            wait,
            locals: vec![Local::default(); shared.table.len()].into(),
            pool: Pool::new(QUEUE_MAX, segments),
            owed: VecDeque::with_capacity(QUEUE_MAX + 1),
            dirty: VecDeque::with_capacity(shared.table.len()),
            again: VecDeque::with_capacity(shared.table.len()),
            iov: Iovecs::with_capacity(segments.min(1024)),
            control: vec![0; ONTIME_CONTROL_MAX as usize],
            mail: shared.mail.take_channel(channel),
            notifier: Notifier::new(channel),
            word: 0,
            calls_seen: 0,
            events_seen: 0,
            start_due: false,
            missed: false,
            used: [false; 2],
            waiter: 0,
            shared,
        }
    }

    /// The guest's memory as it is now.
    pub(crate) fn memory(&self) -> impl std::ops::Deref<Target = Memory> + use<> {
        self.memory.memory()
    }

    /// The real-time thread's reaction to an event; of a socket's, `ready` are its EPOLL* bits.
    pub fn handle(&mut self, event: u16, ready: u32, vrings: &[Vring]) {
        let Some([calls, events]) = vrings.first_chunk() else { return };
        let guard = self.memory();
        let memory = &*guard;
        self.restarted(calls, events);
        self.orders(memory, calls);
        self.catch_up(memory, calls);
        let answered = self.event(memory, vrings, event, ready);
        let mut left = QUEUE_MAX;
        // Whose call was answered goes on first. Calls that came meanwhile have rung; those that do not (receives
        // ahead) come with one that does.
        let queue = Some(calls).filter(|_| !answered);
        let mut later = None;
        while let Some(call) = queue.and_then(|calls| self.next(memory, calls, &mut left)) {
            // What nobody waits for yet comes behind an answer.
            let ahead = u32::from(call.words.flags) & ONTIME_CALL_AHEAD != 0;
            let sends = u32::from(call.words.op) == ONTIME_OP_SEND;
            let first = later.take_if(|_| !sends);
            let now = if ahead { later.replace(call) } else { Some(call) };
            first.into_iter().chain(now).for_each(|call| self.fast(memory, calls, call));
        }
        later.into_iter().for_each(|call| self.fast(memory, calls, call));
        self.finish(memory, vrings);
    }

    /// Gives the answers that were held back while the ring stood still; looks at the sockets whose turn was over, and
    /// at every one if events were missed meanwhile.
    pub(crate) fn catch_up(&mut self, memory: &Memory, calls: &Vring) {
        for _ in 0..self.owed.len() {
            let Some(owed) = self.owed.pop_front() else { break };
            self.give(memory, calls, owed);
        }
        // Those that come back once more have their turn next time.
        for _ in 0..self.again.len() {
            let Some(index) = self.again.pop_front() else { break };
            if let Some(local) = self.local(index) {
                local.again = false;
            }
            self.socket_event(memory, calls, index, None);
        }
        if self.missed && self.live(calls) {
            self.missed = false;
            for index in 0..self.locals.len() as u32 {
                self.socket_event(memory, calls, index, None);
            }
        }
    }

    /// What an event asks for, besides a look at the queue. Whether it was a socket's, and a call that waited for it
    /// was answered.
    pub(crate) fn event(&mut self, memory: &Memory, vrings: &[Vring], event: u16, ready: u32) -> bool {
        match (event, vrings) {
            (BELL_EVENT, _) => self.notifier.again(&self.shared, memory, vrings),
            (SOCKET_EVENTS.., [calls, ..]) => {
                return self.socket_event(memory, calls, u32::from(event - SOCKET_EVENTS), Some(ready));
            }
            _ => {}
        }
        false
    }

    /// Looks at a socket again, after what else is waiting.
    pub(crate) fn come_back(&mut self, index: u32) {
        // As with `dirty`: each socket once.
        if let Some(local) = self.locals.get_mut(index as usize).filter(|local| !local.again) {
            local.again = true;
            self.again.push_back(index);
        }
        self.ring_again();
    }

    /// Comes back after what else is waiting.
    pub(crate) fn ring_again(&self) {
        self.shared.mail.ring(self.channel);
    }

    /// Notices that the guest set its rings up anew. True for the call queue, if it had been used before.
    pub(crate) fn restarted(&mut self, calls: &Vring, events: &Vring) -> bool {
        let before = self.calls_seen;
        // Read before it is asked whether the ring lives: then it is the living ring's driver's.
        let named = self.shared.vcpu_named(self.channel);
        let [calls_anew, events_anew] =
            [calls.anew_since(&mut self.calls_seen), events.anew_since(&mut self.events_seen)];
        if calls_anew {
            // What waited belongs to the old ring, whose memory may be anything by now.
            self.forget_calls();
            for local in &mut self.locals {
                local.waiting = Default::default();
            }
            // So does the vCPU word, unless the new driver has named its own by now.
            self.shared.drop_vcpu(self.channel, self.word);
        }
        // What is named while the ring is not up is the next driver's, who names by main, and may be ahead of this
        // ring's connection.
        if self.live(calls) {
            self.word = named;
        }
        if events_anew {
            self.start_due = true;
            for index in 0..self.locals.len() as u32 {
                self.mark_dirty(index);
            }
        }
        calls_anew && before != 0
    }

    /// Whether the call queue may be touched: one that was set up only now is not known to [`Self::restarted`] yet. The
    /// doorbell that follows brings the engine back.
    pub(crate) fn live(&self, calls: &Vring) -> bool {
        calls.running() && self.calls_seen == calls.set_up()
    }

    /// Carries out what the worker ordered. (For the worker's own engine, nothing.)
    pub(crate) fn orders(&mut self, memory: &Memory, calls: &Vring) {
        let mut took = false;
        for _ in 0..ROOM {
            let Some(Ok(order)) = self.mail.as_mut().map(|mail| mail.orders.pop()) else { break };
            took = true;
            match order {
                Order::Adopt { index } => {
                    if self.adopt(index).is_err() {
                        count(&self.shared.counters.refused_limit);
                    }
                }
                Order::Look { index } => self.look_again(index),
                Order::Release { id, ticket, force } => {
                    // It may have been closed here meanwhile, and another one be at its place.
                    let ours = self.shared.table.find(id).ok().filter(|socket| socket.owner == self.channel);
                    let result =
                        ours.map_or(Err(Errno(libc::EBADF)), |socket| self.release(memory, calls, socket.index, force));
                    self.answer(Released { ticket, result });
                }
                Order::Forget { ticket } => {
                    self.forget();
                    self.answer(Released { ticket, result: Ok(()) });
                }
            }
        }
        if took {
            self.shared.mail.made_room(self.channel);
        }
    }

    fn answer(&mut self, released: Released) {
        // There is room: the worker sends no more orders that are answered than the ring has places.
        let _ = self.mail.as_mut().map(|mail| mail.released.push(released));
        self.shared.mail.ring(0);
    }

    /// Makes a socket this engine's. Its readiness is reported.
    pub(crate) fn adopt(&mut self, index: u32) -> Result<(), Errno> {
        let socket = self.shared.table.at(index).ok_or(Errno(libc::EBADF))?;
        let ready = readiness::ask(&socket);
        let out_watched = awaits_out(ready);
        // What came since is an event at once.
        self.wait.watch(socket_event(index), socket.fd, awaited(out_watched))?;
        // The count goes on: the last owner's reports may still be on their way, in another queue.
        let seq = self.shared.table.reports(index);
        if let Some(local) = self.local(index) {
            let Local { dirty, again, .. } = *local;
            let urgent = ready & ONTIME_READY_PRI != 0;
            *local =
                Local { owned: true, adopted: true, dirty, again, out_watched, seq, ready, urgent, ..Local::default() };
        }
        self.shared.table.set_owner(index, self.channel);
        self.mark_dirty(index);
        Ok(())
    }

    /// Notes how ready a socket is. The kernel tells of EPOLLOUT only where that is awaited: else each message that has
    /// left would be an event.
    pub(crate) fn note(&mut self, socket: &Socket, ready: u32) {
        let Some(local) = self.local(socket.index) else { return };
        local.ready = ready;
        local.urgent |= ready & ONTIME_READY_PRI != 0;
        if awaits_out(ready) && local.owned && !local.out_watched {
            self.watch_out(socket, true);
        }
    }

    pub(crate) fn watch_out(&mut self, socket: &Socket, wanted: bool) {
        // It is waited for as long as it is owned: this does not fail.
        let done = self.wait.change(socket_event(socket.index), socket.fd, awaited(wanted));
        if let Some(local) = self.local(socket.index).filter(|_| done.is_ok()) {
            local.out_watched = wanted;
        }
    }

    /// Lets go of a socket.
    ///
    /// # Errors
    /// EBUSY where calls wait on it, unless they are to be ended.
    pub(crate) fn release(&mut self, memory: &Memory, vring: &Vring, index: u32, force: bool) -> Result<(), Errno> {
        let waiting = self.local(index).is_some_and(|local| local.waiting.iter().any(|list| !list.is_empty()));
        if waiting && !force {
            return Err(Errno(libc::EBUSY));
        }
        let seq = self.leave(memory, vring, index);
        self.shared.table.set_reports(index, seq);
        self.shared.table.set_owner(index, NOBODY);
        Ok(())
    }

    /// Has nothing more to do with a socket that is this engine's; gives the number of its reports.
    fn leave(&mut self, memory: &Memory, vring: &Vring, index: u32) -> u32 {
        self.end_waiting(memory, vring, index);
        if let Some(socket) = self.shared.table.at(index) {
            self.wait.unwatch(socket_event(index), socket.fd);
        }
        let Some(local) = self.local(index) else { return 0 };
        local.owned = false;
        local.ready = 0;
        local.error = 0;
        local.seq
    }

    /// Closes a connection that was accepted here: of that nothing blocks, as no host socket lingers, and an accepted
    /// one has no members of groups and no connections that wait.
    ///
    /// # Errors
    /// EOPNOTSUPP for other sockets, and where the worker uses it just now: then it is main's to close.
    pub(crate) fn close(&mut self, memory: &Memory, vring: &Vring, socket: &Socket, abort: bool) -> Result<(), Errno> {
        let shared = self.shared.clone();
        let held = shared.table.hold(socket.index).filter(|_| socket.accepted && self.channel != 0);
        let _held = held.ok_or(Errno(libc::EOPNOTSUPP))?;
        self.leave(memory, vring, socket.index);
        match shared.table.take(socket.index) {
            Some(fd) if abort => {
                host::abort_at_close(fd);
                host::close(fd);
            }
            // What is left of it is another thread's; of one that is not connected any more, nothing.
            // Beside unread data the kernel resets the connection, at once.
            Some(fd) if host::unread(fd) == 0 && host::shutdown(fd, libc::SHUT_RDWR).is_ok() => shared.leave(fd),
            taken => taken.into_iter().for_each(host::close),
        }
        Ok(())
    }

    /// Forgets the calls that wait, and the answers that were held back.
    fn forget_calls(&mut self) {
        self.pool.forget();
        while let Some(owed) = self.owed.pop_front() {
            self.pool.put(owed.call);
        }
    }

    /// Lets go of every socket, answering nothing: the driver that could read it is gone.
    pub(crate) fn forget(&mut self) {
        self.forget_calls();
        for index in 0..self.locals.len() as u32 {
            let Some(local) = self.local(index) else { continue };
            let owned = std::mem::take(&mut local.owned);
            local.waiting = Default::default();
            if !owned {
                continue;
            }
            if let Some(socket) = self.shared.table.at(index).filter(|socket| socket.owner == self.channel) {
                self.wait.unwatch(socket_event(index), socket.fd);
                self.shared.table.set_owner(index, NOBODY);
            }
        }
    }

    pub(crate) fn local(&mut self, index: u32) -> Option<&mut Local> {
        self.locals.get_mut(index as usize)
    }

    /// Reports readiness while there are event buffers, and notifies the guest if anything was used.
    pub(crate) fn finish(&mut self, memory: &Memory, vrings: &[Vring]) {
        let Some([_, events]) = vrings.first_chunk::<2>() else { return };
        if events.running() && self.events_seen == events.set_up() {
            self.report(memory, events);
        }
        let used = std::mem::take(&mut self.used);
        let waiter = std::mem::take(&mut self.waiter);
        if used != [false; 2] {
            self.notifier.used(&self.shared, memory, vrings, used, waiter);
        }
    }
}

/// Whether EPOLLOUT is news of a socket that is so ready: it cannot be sent to now, or is not connected (HUP) and may
/// be some day.
pub(crate) fn awaits_out(ready: u32) -> bool {
    ready & (ONTIME_READY_OUT | ONTIME_READY_HUP) != ONTIME_READY_OUT
}

/// A socket's number among what the thread waits for ([`SOCKETS_MAX`](crate::policy::SOCKETS_MAX) is the bound).
fn socket_event(index: u32) -> u16 {
    SOCKET_EVENTS + index as u16
}

/// The EPOLL* bits that a socket is waited for by: everything, or all but EPOLLOUT.
fn awaited(out: bool) -> u32 {
    let out = if out { libc::EPOLLOUT } else { 0 };
    (libc::EPOLLIN | libc::EPOLLPRI | libc::EPOLLRDHUP | out) as u32
}
