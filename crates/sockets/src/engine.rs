//! An engine: what the worker and each channel's thread have in common. It has a queue of calls, the sockets that the
//! thread owns, and the reports of their readiness. It runs calls that cannot block on the thread's own sockets.
//! `channel_calls` adds what only a channel's real-time thread does, `worker` what only the worker does.
//!
//! After its creation an engine does not allocate, takes no lock that another thread holds for long, and bounds each
//! loop by the queue's size, the number of sockets or the call's segments.

use std::sync::Arc;

use vm_memory::{GuestAddressSpace, GuestMemoryAtomic};

use crate::abi::*;
use crate::call::Reply;
use crate::call_queue::CallQueue;
use crate::memory::{Iovecs, Memory};
use crate::notify::Notifier;
use crate::owned_sockets::{OwnedSockets, SOCKET_EVENTS};
use crate::reports::Reports;
use crate::shared::Shared;
use crate::table::NOBODY;
use crate::vring::Vring;
use crate::wait::Wait;

/// Event number of the thread's bell. The queues and vhost-user-backend use lower numbers.
pub(crate) const BELL_EVENT: u16 = 8;

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
    pub(crate) queue: CallQueue,
    pub(crate) sockets: OwnedSockets,
    pub(crate) reports: Reports,
    pub(crate) iov: Iovecs,
    pub(crate) control: Vec<u8>,
    notifier: Notifier,
    /// The vCPU word when the thread last saw a live ring, as [`Shared::vcpu_named`] returns it.
    word: u64,
}

impl Engine {
    /// The engine of a channel, with the wait for its sockets; channel 0 is the worker's.
    pub(crate) fn new(shared: Arc<Shared>, channel: u32, memory: GuestMemoryAtomic<Memory>, wait: Wait) -> Self {
        Self {
            channel,
            memory,
            queue: CallQueue::new(shared.clone(), channel),
            sockets: OwnedSockets::new(shared.clone(), channel, wait),
            reports: Reports::new(shared.clone(), channel),
            iov: Iovecs::with_capacity((Shared::segments(channel) as usize).min(1024)),
            control: vec![0; ONTIME_CONTROL_MAX as usize],
            notifier: Notifier::new(channel),
            word: 0,
            shared,
        }
    }

    /// The guest's current memory map.
    pub(crate) fn memory(&self) -> impl std::ops::Deref<Target = Memory> + use<> {
        self.memory.memory()
    }

    /// Sends the answers that were held back while the ring was stopped. Serves the sockets that are to be served
    /// again. Serves all sockets if events were missed meanwhile.
    pub(crate) fn catch_up(&mut self, memory: &Memory, calls: &Vring) {
        self.queue.catch_up(memory, calls);
        for _ in 0..self.sockets.again() {
            let Some(index) = self.sockets.next_again() else { break };
            self.socket_event(memory, calls, index, None);
        }
        if self.sockets.missed && self.queue.live(calls) {
            self.sockets.missed = false;
            for index in 0..self.sockets.locals.len() as u32 {
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

    /// Detects that the guest set up its rings anew. Returns true if the call queue was set up anew and had been used
    /// before.
    pub(crate) fn restarted(&mut self, calls: &Vring, events: &Vring) -> bool {
        // Read this before checking whether the ring is live: then it belongs to the live ring's driver.
        let named = self.shared.vcpu_named(self.channel);
        let (anew, was_used) = self.queue.restarted(calls);
        if anew {
            for local in &mut self.sockets.locals {
                local.waiting = Default::default();
            }
            // The vCPU word belongs to the old ring, too, unless the new driver has already named its own.
            self.shared.drop_vcpu(self.channel, self.word);
        }
        // A word that is named while this ring is not live belongs to the next driver. That driver names it through
        // main and may do so before this ring's connection is set up.
        if self.queue.live(calls) {
            self.word = named;
        }
        self.reports.restarted(events, &mut self.sockets);
        anew && was_used
    }

    /// Adopts a socket and reports its readiness.
    ///
    /// # Errors
    /// As [`OwnedSockets::adopt`].
    pub(crate) fn adopt(&mut self, index: u32) -> Result<(), Errno> {
        self.sockets.adopt(index)?;
        self.reports.mark(&mut self.sockets, index);
        Ok(())
    }

    /// Releases a socket.
    ///
    /// # Errors
    /// EBUSY if calls wait on it and `force` is not set.
    pub(crate) fn release(&mut self, memory: &Memory, vring: &Vring, index: u32, force: bool) -> Result<(), Errno> {
        let local = self.sockets.local(index);
        if !force && local.is_some_and(|local| local.waiting.iter().any(|list| !list.is_empty())) {
            return Err(Errno(libc::EBUSY));
        }
        let seq = self.leave(memory, vring, index);
        // The worker may close a socket that has no owner. If this thread's poll still kept the socket open, this
        // thread would do the last close, which can wait for `rtnl` or end a listener's queued connections.
        self.sockets.wait.flush();
        self.shared.table.set_reports(index, seq);
        self.shared.table.set_owner(index, NOBODY);
        Ok(())
    }

    /// Ends the calls that wait on an owned socket, drops its state, and returns the number of its reports.
    pub(crate) fn leave(&mut self, memory: &Memory, vring: &Vring, index: u32) -> u32 {
        self.end_waiting(memory, vring, index);
        self.sockets.leave(index)
    }

    /// Releases every socket without answers: the driver that could read them is gone.
    pub(crate) fn forget(&mut self) {
        self.queue.forget();
        self.sockets.forget();
    }

    /// Reports readiness while event buffers are available, and notifies the guest if any buffer was used.
    pub(crate) fn finish(&mut self, memory: &Memory, vrings: &[Vring]) {
        let Some([_, events]) = vrings.first_chunk::<2>() else { return };
        self.reports.report(memory, events, &mut self.sockets);
        let used = [std::mem::take(&mut self.queue.used), std::mem::take(&mut self.reports.used)];
        let waiter = std::mem::take(&mut self.queue.waiter).max(std::mem::take(&mut self.reports.waiter));
        if used != [false; 2] {
            self.notifier.used(&self.shared, memory, vrings, used, waiter);
        }
    }
}
