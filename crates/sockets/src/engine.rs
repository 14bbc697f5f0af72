//! An engine: the state of a thread that owns sockets. It takes calls from its queue, runs those that cannot block,
//! stores those that wait, and reports readiness. A channel's real-time thread runs one engine. The worker is an engine
//! with additional calls (`worker`).
//!
//! After its creation an engine does not allocate, takes no lock that another thread holds for long, and bounds each
//! loop by the queue's size, the number of sockets or the call's segments.

use std::collections::VecDeque;
use std::sync::Arc;

use vm_memory::{GuestAddressSpace, GuestMemoryAtomic};

use crate::abi::*;
use crate::call::{DelayedAnswer, List, Pool, Reply};
use crate::counters::count;
use crate::host;
use crate::limits::QUEUE_MAX;
use crate::mail::{ChannelEnd, Order, ROOM, Released};
use crate::memory::{Iovecs, Memory};
use crate::notify::Notifier;
use crate::shared::Shared;
use crate::table::{NOBODY, Socket};
use crate::vring::Vring;
use crate::wait::Wait;

/// Event number of the thread's bell. The queues and vhost-user-backend use lower numbers.
pub(crate) const BELL_EVENT: u16 = 8;
/// Event number of the socket in slot 0.
pub(crate) const SOCKET_EVENTS: u16 = 16;

/// An engine's state for a socket that it owns.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Local {
    pub owned: bool,
    pub dirty: bool,
    pub again: bool,
    /// EPOLLOUT is watched, too.
    pub out_watched: bool,
    /// The guest has polled this socket and expects events.
    pub polled: bool,
    /// The wait will still report the readiness that the socket had when it was adopted.
    pub adopted: bool,
    /// A stream that has had urgent data: a receive may stop at the urgent mark although more data follow.
    pub urgent: bool,
    pub prio: u16,
    pub error: u16,
    pub ready: u32,
    pub seq: u32,
    /// Waiting calls: first those to receive or accept, then those to send.
    pub waiting: [List; 2],
}

/// Result of one attempt at a call.
pub(crate) enum Outcome {
    /// The call is finished.
    Done(Reply),
    /// The call can continue when the socket is ready.
    Wait,
    /// The call moved bytes and may move more.
    Again,
}

/// An engine; see the module's comment.
pub(crate) struct Engine {
    pub(crate) shared: Arc<Shared>,
    pub(crate) channel: u32,
    memory: GuestMemoryAtomic<Memory>,
    /// Waits for the engine's sockets.
    pub(crate) wait: Wait,
    pub(crate) locals: Box<[Local]>,
    pub(crate) pool: Pool,
    /// Answers for a ring that is stopped. Never more than the pool has calls.
    pub(crate) owed: VecDeque<DelayedAnswer>,
    pub(crate) dirty: VecDeque<u32>,
    again: VecDeque<u32>,
    pub(crate) iov: Iovecs,
    pub(crate) control: Vec<u8>,
    /// None for the worker, which sends the orders.
    mail: Option<ChannelEnd>,
    notifier: Notifier,
    /// The vCPU word when the thread last saw a live ring, as [`Shared::vcpu_named`] returns it.
    word: u64,
    /// The rings' `set_up` counts that this engine has processed.
    calls_seen: u32,
    events_seen: u32,
    pub(crate) start_due: bool,
    pub(crate) missed: bool,
    pub(crate) used: [bool; 2],
    pub(crate) waiter: u16,
}

impl Engine {
    /// The engine of a channel, with the wait for its sockets.
    pub(crate) fn new(shared: Arc<Shared>, channel: u32, memory: GuestMemoryAtomic<Memory>, wait: Wait) -> Self {
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

    /// The guest's current memory map.
    pub(crate) fn memory(&self) -> impl std::ops::Deref<Target = Memory> + use<> {
        self.memory.memory()
    }

    /// Handles an event on the real-time thread. For a socket, `ready` holds its EPOLL* bits.
    pub(crate) fn handle(&mut self, event: u16, ready: u32, vrings: &[Vring]) {
        let Some([calls, events]) = vrings.first_chunk() else { return };
        let guard = self.memory();
        let memory = &*guard;
        self.restarted(calls, events);
        self.orders(memory, calls);
        self.catch_up(memory, calls);
        let answered = self.event(memory, vrings, event, ready);
        let mut left = QUEUE_MAX;
        // The thread whose call was answered should run first, so the queue is not polled now. New calls have rung the
        // doorbell; receives posted ahead do not ring and come with a call that does.
        let queue = Some(calls).filter(|_| !answered);
        let mut later = None;
        while let Some(call) = queue.and_then(|calls| self.next(memory, calls, &mut left)) {
            // A receive that no guest thread waits for yet is put off behind the sends that directly follow it.
            let ahead = u32::from(call.words.flags) & ONTIME_CALL_AHEAD != 0;
            let sends = u32::from(call.words.op) == ONTIME_OP_SEND;
            let first = later.take_if(|_| !sends);
            let now = if ahead { later.replace(call) } else { Some(call) };
            first.into_iter().chain(now).for_each(|call| self.fast(memory, calls, call));
        }
        later.into_iter().for_each(|call| self.fast(memory, calls, call));
        self.finish(memory, vrings);
    }

    /// Sends the answers that were held back while the ring was stopped. Serves the sockets in `again`. Serves all
    /// sockets if events were missed meanwhile.
    pub(crate) fn catch_up(&mut self, memory: &Memory, calls: &Vring) {
        for _ in 0..self.owed.len() {
            let Some(owed) = self.owed.pop_front() else { break };
            self.give(memory, calls, owed);
        }
        // Sockets that are added again are served in the next turn.
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

    /// Handles an event, except for the queue. Returns whether the event was a socket's and answered a waiting call.
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

    /// Serves a socket again after the other pending events.
    pub(crate) fn come_back(&mut self, index: u32) {
        // As with `dirty`: each socket at most once.
        if let Some(local) = self.locals.get_mut(index as usize).filter(|local| !local.again) {
            local.again = true;
            self.again.push_back(index);
        }
        self.ring_again();
    }

    /// Runs this thread again after the other pending events.
    pub(crate) fn ring_again(&self) {
        self.shared.mail.ring(self.channel);
    }

    /// Detects that the guest set up its rings anew. Returns true if the call queue was set up anew and had been used
    /// before.
    pub(crate) fn restarted(&mut self, calls: &Vring, events: &Vring) -> bool {
        let before = self.calls_seen;
        // Read this before checking whether the ring is live: then it belongs to the live ring's driver.
        let named = self.shared.vcpu_named(self.channel);
        let [calls_anew, events_anew] =
            [calls.anew_since(&mut self.calls_seen), events.anew_since(&mut self.events_seen)];
        if calls_anew {
            // Waiting calls belong to the old ring, whose memory may be reused for anything.
            self.forget_calls();
            for local in &mut self.locals {
                local.waiting = Default::default();
            }
            // So does the vCPU word, unless the new driver has already named its own.
            self.shared.drop_vcpu(self.channel, self.word);
        }
        // A word that is named while this ring is not live belongs to the next driver. That driver names it through
        // main and may do so before this ring's connection is set up.
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

    /// Whether the call queue may be accessed. False for a ring that was set up after the last [`Self::restarted`]; the
    /// doorbell that follows runs the engine again.
    pub(crate) fn live(&self, calls: &Vring) -> bool {
        calls.running() && self.calls_seen == calls.set_up()
    }

    /// Executes the worker's orders. (Does nothing in the worker's own engine.)
    pub(crate) fn orders(&mut self, memory: &Memory, calls: &Vring) {
        let mut took = false;
        for _ in 0..ROOM {
            let Some(Ok(order)) = self.mail.as_mut().map(|mail| mail.orders.pop()) else { break };
            took = true;
            match order {
                Order::Adopt { index } => {
                    if self.adopt(index).is_err() {
                        count(&self.shared.counters.refused_limit);
                        // The guest was already answered. The socket never becomes ready, but its owner gives it back
                        // when the guest closes it or boots anew.
                        if self.shared.table.at(index).is_some() {
                            self.own(index, 0, false);
                        }
                    }
                }
                Order::Look { index } => self.look_again(index),
                Order::Release { id, ticket, force } => {
                    // The socket may have been closed here, and its slot reused.
                    let ours = self.shared.table.find(id).ok().filter(|socket| socket.owner == self.channel);
                    let result =
                        ours.map_or(Err(Errno(libc::EBADF)), |socket| self.release(memory, calls, socket.index, force));
                    self.answer(Released { ticket, result });
                }
                Order::Forget { ticket } => {
                    self.forget();
                    self.answer(Released { ticket, result: Ok(()) });
                }
                #[cfg(test)]
                Order::Meanwhile(acts) => acts(&self.shared),
            }
        }
        if took {
            self.shared.mail.made_room(self.channel);
        }
    }

    fn answer(&mut self, released: Released) {
        // The ring has room: the worker has at most [`ROOM`] unanswered orders.
        let _ = self.mail.as_mut().map(|mail| mail.released.push(released));
        self.shared.mail.ring(0);
    }

    /// Adopts a socket and reports its readiness.
    ///
    /// # Errors
    /// EBADF if there is no socket; the errno of epoll_ctl(2). The socket has no new owner then.
    pub(crate) fn adopt(&mut self, index: u32) -> Result<(), Errno> {
        let socket = self.shared.table.at(index).ok_or(Errno(libc::EBADF))?;
        let ready = host::readiness(socket.fd, socket.protocol);
        let out_watched = awaits_out(ready);
        // Readiness since the poll above is reported as an event at once.
        self.wait.watch(socket_event(index), socket.fd, awaited(out_watched))?;
        self.own(index, ready, out_watched);
        Ok(())
    }

    /// Becomes the owner of a socket with this readiness.
    fn own(&mut self, index: u32, ready: u32, out_watched: bool) {
        // Continue the count: reports of the previous owner may still be in another queue.
        let seq = self.shared.table.reports(index);
        if let Some(local) = self.local(index) {
            let Local { dirty, again, .. } = *local;
            let urgent = ready & ONTIME_READY_PRI != 0;
            *local =
                Local { owned: true, adopted: true, dirty, again, out_watched, seq, ready, urgent, ..Local::default() };
        }
        self.shared.table.set_owner(index, self.channel);
        self.mark_dirty(index);
    }

    /// Stores a socket's readiness. EPOLLOUT is watched only while the socket is not writable; otherwise each sent
    /// message would cause an event.
    pub(crate) fn note(&mut self, socket: &Socket, ready: u32) {
        let Some(local) = self.local(socket.index) else { return };
        local.ready = ready;
        local.urgent |= ready & ONTIME_READY_PRI != 0;
        if awaits_out(ready) && local.owned && !local.out_watched {
            self.watch_out(socket, true);
        }
    }

    pub(crate) fn watch_out(&mut self, socket: &Socket, wanted: bool) {
        // The socket is watched while it is owned, so this does not fail.
        let done = self.wait.change(socket_event(socket.index), socket.fd, awaited(wanted));
        if let Some(local) = self.local(socket.index).filter(|_| done.is_ok()) {
            local.out_watched = wanted;
        }
    }

    /// Releases a socket.
    ///
    /// # Errors
    /// EBUSY if calls wait on it and `force` is not set.
    pub(crate) fn release(&mut self, memory: &Memory, vring: &Vring, index: u32, force: bool) -> Result<(), Errno> {
        let waiting = self.local(index).is_some_and(|local| local.waiting.iter().any(|list| !list.is_empty()));
        if waiting && !force {
            return Err(Errno(libc::EBUSY));
        }
        let seq = self.leave(memory, vring, index);
        // The worker may close a socket that has no owner. If this thread's poll still kept the socket open, this
        // thread would do the last close, which can wait for `rtnl` or end a listener's queued connections.
        self.wait.flush();
        self.shared.table.set_reports(index, seq);
        self.shared.table.set_owner(index, NOBODY);
        Ok(())
    }

    /// Drops all state of an owned socket and returns the number of its reports.
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

    /// Closes a connection that was accepted here. This cannot block: host sockets do not linger, and an accepted
    /// connection has no group memberships and no backlog.
    ///
    /// # Errors
    /// EOPNOTSUPP for other sockets, and if the worker holds this socket: then the guest must close it through main.
    pub(crate) fn close(&mut self, memory: &Memory, vring: &Vring, socket: &Socket, abort: bool) -> Result<(), Errno> {
        let shared = self.shared.clone();
        // While `socket` was not held, the worker may have made it a listener or a group's member.
        let held = shared.table.held(socket.id).ok().filter(|(socket, _)| socket.accepted && self.channel != 0);
        let (socket, _held) = held.ok_or(Errno(libc::EOPNOTSUPP))?;
        self.leave(memory, vring, socket.index);
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

    /// Drops the waiting calls and the answers that were held back.
    fn forget_calls(&mut self) {
        self.pool.forget();
        while let Some(owed) = self.owed.pop_front() {
            self.pool.put(owed.call);
        }
    }

    /// Releases every socket without answers: the driver that could read them is gone.
    pub(crate) fn forget(&mut self) {
        self.forget_calls();
        for index in 0..self.locals.len() as u32 {
            let Some(local) = self.local(index) else { continue };
            local.waiting = Default::default();
            let owned = local.owned;
            if let Some(socket) = self.shared.table.at(index).filter(|_| owned) {
                self.wait.unwatch(socket_event(index), socket.fd);
            }
        }
        // As in `release`.
        self.wait.flush();
        for index in 0..self.locals.len() as u32 {
            if self.local(index).is_some_and(|local| std::mem::take(&mut local.owned)) {
                self.shared.table.set_owner(index, NOBODY);
            }
        }
    }

    pub(crate) fn local(&mut self, index: u32) -> Option<&mut Local> {
        self.locals.get_mut(index as usize)
    }

    /// Reports readiness while event buffers are available, and notifies the guest if any buffer was used.
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

/// Whether EPOLLOUT must be watched: the socket is not writable now, or it is not connected (HUP) and may become so.
pub(crate) fn awaits_out(ready: u32) -> bool {
    ready & (ONTIME_READY_OUT | ONTIME_READY_HUP) != ONTIME_READY_OUT
}

/// A socket's event number ([`SOCKETS_MAX`](crate::policy::SOCKETS_MAX) keeps it within 16 bits).
fn socket_event(index: u32) -> u16 {
    SOCKET_EVENTS + index as u16
}

/// The watched EPOLL* bits of a socket, with or without EPOLLOUT.
fn awaited(out: bool) -> u32 {
    let out = if out { libc::EPOLLOUT } else { 0 };
    (libc::EPOLLIN | libc::EPOLLPRI | libc::EPOLLRDHUP | out) as u32
}
