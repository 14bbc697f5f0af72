//! The queue by which a guest learns of its sockets' readiness, for the one thread that serves it.

use std::collections::VecDeque;
use std::sync::Arc;

use vhost_user_backend::VringT;

use crate::abi::*;
use crate::counters::count;
use crate::limits::QUEUE_MAX;
use crate::memory::Memory;
use crate::owned_sockets::OwnedSockets;
use crate::shared::Shared;
use crate::vring::Vring;

/// Reports that are due, and the state of their queue.
pub(crate) struct Reports {
    shared: Arc<Shared>,
    channel: u32,
    /// Sockets whose readiness is to be reported.
    dirty: VecDeque<u32>,
    start_due: bool,
    /// The ring's `set_up` count that was processed.
    set_up: u32,
    /// Whether buffers were used since the last notification.
    pub(crate) used: bool,
    /// The highest priority of the guest's threads whose sockets were reported since then.
    pub(crate) waiter: u16,
}

impl Reports {
    /// Nothing to report yet.
    pub(crate) fn new(shared: Arc<Shared>, channel: u32) -> Self {
        let dirty = VecDeque::with_capacity(shared.table.len());
        Self { shared, channel, dirty, start_due: false, set_up: 0, used: false, waiter: 0 }
    }

    /// If the guest set up its ring anew, everything is to be reported to it.
    pub(crate) fn restarted(&mut self, ring: &Vring, sockets: &mut OwnedSockets) {
        if ring.anew_since(&mut self.set_up) {
            self.start_due = true;
            for index in 0..sockets.locals.len() as u32 {
                self.mark(sockets, index);
            }
        }
    }

    /// The readiness of this socket is to be reported.
    pub(crate) fn mark(&mut self, sockets: &mut OwnedSockets, index: u32) {
        let Some(local) = sockets.local(index) else { return };
        // Each socket is in the queue at most once, so the queue never exceeds its capacity.
        if local.owned && !local.dirty {
            local.dirty = true;
            self.dirty.push_back(index);
        }
    }

    /// Reports readiness while event buffers are available.
    pub(crate) fn report(&mut self, memory: &Memory, events: &Vring, sockets: &mut OwnedSockets) {
        if !events.running() || self.set_up != events.set_up() {
            return;
        }
        let mut again = false;
        // A guest may supply buffers too small for an event without end: bound the loop.
        for _ in 0..2 * QUEUE_MAX {
            if !self.due(sockets) {
                return;
            }
            let Some(popped) = events.pop(memory) else {
                // No buffer left: request a notification for new buffers. Buffers that were added just before cause no
                // notification, so try again; then once more only after a buffer was used (a ring with an invalid index
                // always seems to hold more).
                if matches!(events.enable_notification(), Ok(true)) && !std::mem::replace(&mut again, true) {
                    continue;
                }
                return;
            };
            let Ok(chain) = popped else {
                count(&self.shared.counters.malformed);
                continue;
            };
            let head = chain.head_index();
            let place = chain.into_iter().next().filter(|d| d.is_write_only() && d.len() as usize >= EVENT_LEN);
            let Some(event) = place.as_ref().and_then(|_| self.next_event(sockets)) else {
                // The buffer is too small for an event.
                let _ = events.add_used(head, 0);
                count(&self.shared.counters.malformed);
                continue;
            };
            let written = place.is_some_and(|d| vm_memory::Bytes::write_obj(memory, event, d.addr()).is_ok());
            let _ = events.add_used(head, if written { EVENT_LEN as u32 } else { 0 });
            self.used = true;
            again = false;
        }
        self.shared.mail.ring(self.channel);
    }

    /// Whether an event is due. Skips sockets that are gone since they were marked.
    fn due(&mut self, sockets: &mut OwnedSockets) -> bool {
        while let Some(index) = self.dirty.front().copied().filter(|_| !self.start_due) {
            let Some(local) = sockets.local(index) else { return false };
            if local.owned && self.shared.table.at(index).is_some() {
                return true;
            }
            local.dirty = false;
            self.dirty.pop_front();
        }
        self.start_due
    }

    fn next_event(&mut self, sockets: &mut OwnedSockets) -> Option<ontime_event> {
        let generation = self.shared.generation();
        if std::mem::take(&mut self.start_due) {
            return Some(ontime_event {
                type_: ONTIME_EVENT_START as u16,
                sock: ONTIME_SOCK_NONE,
                generation,
                ..Default::default()
            });
        }
        let index = self.dirty.pop_front()?;
        let sock = self.shared.table.at(index)?.id;
        let local = sockets.local(index)?;
        local.dirty = false;
        let (ready, error, seq) = (local.ready, std::mem::take(&mut local.error), local.report());
        self.waiter = self.waiter.max(local.prio);
        Some(ontime_event { type_: ONTIME_EVENT_READY as u16, error, sock, ready, seq, generation })
    }
}
