//! Readiness of an engine's sockets: the kernel's poll state, and the events to the guest.

use vhost_user_backend::VringT;

use crate::abi::*;
use crate::counters::count;
use crate::engine::{Engine, Local, awaits_out};
use crate::host;
use crate::limits::QUEUE_MAX;
use crate::memory::Memory;
use crate::request::Protocol;
use crate::vring::Vring;

impl Engine {
    /// Handles a socket's event. `said`: the EPOLL* bits of the event, if known. Returns whether a waiting call was
    /// answered.
    pub(crate) fn socket_event(&mut self, memory: &Memory, vring: &Vring, index: u32, said: Option<u32>) -> bool {
        if !self.live(vring) {
            // The VM is paused or its driver is being set up. Edges are not repeated, so all sockets are polled when
            // the VM continues.
            self.missed = true;
            return false;
        }
        let socket = self.shared.table.at(index).filter(|socket| socket.owner == self.channel);
        let Some(socket) = socket else { return false };
        let (before, out_watched, receiver) = match self.local(index) {
            Some(local) if local.owned => (local.ready, local.out_watched, !local.waiting[0].is_empty()),
            _ => return false,
        };
        let adopted = self.local(index).is_some_and(|local| std::mem::take(&mut local.adopted));
        if adopted && !receiver && before & ONTIME_READY_IN != 0 && said.is_some_and(|bits| bits & !before == 0) {
            // This event repeats what was reported when the socket was adopted.
            return false;
        }
        if out_watched && !awaits_out(before) && said.unwrap_or(0) & ONTIME_READY_OUT != 0 {
            self.watch_out(&socket, false);
        }
        // An earlier call of the same batch of events may have consumed the data. Only a waiting receiver trusts the
        // event's bits, because its attempt shows whether there is data. A stream is polled, because it may have more
        // state than the event shows.
        let more = ONTIME_READY_ERR | ONTIME_READY_HUP | ONTIME_READY_RDHUP;
        let word = |bits: &u32| bits & (ONTIME_READY_IN | more) == ONTIME_READY_IN;
        let told = said.filter(word).filter(|_| receiver && socket.protocol == Protocol::Udp);
        let mut ready = match told {
            // The event says nothing about the other bits: they are unchanged.
            Some(bits) => bits & ONTIME_READY_IN | (bits | before) & ONTIME_READY_OUT,
            None => host::readiness(socket.fd, socket.protocol),
        };
        if ready & ONTIME_READY_ERR != 0 {
            let error = host::take_error(socket.fd);
            if error != 0 {
                self.failed(memory, vring, &socket, error);
                ready = host::readiness(socket.fd, socket.protocol);
            }
        }
        self.note(&socket, ready);
        let [received, sent] = self.serve(memory, vring, &socket);
        let Some(local) = self.local(index) else { return received };
        let changed = local.ready != before && !received && !sent;
        // IN without a waiting receiver is a new arrival even if IN was reported before: edge-triggered pollers in the
        // guest need the event.
        let arrived = local.ready & ONTIME_READY_IN != 0 && !received;
        if local.error != 0 || changed || arrived {
            self.mark_dirty(index);
        }
        received || sent
    }

    pub(crate) fn look_again(&mut self, index: u32) {
        let Some(socket) = self.shared.table.at(index).filter(|socket| socket.owner == self.channel) else { return };
        let Some(before) = self.local(index).filter(|local| local.owned).map(|local| local.ready) else { return };
        self.look(&socket);
        if self.local(index).is_some_and(|local| local.ready != before) {
            self.mark_dirty(index);
        }
    }

    pub(crate) fn mark_dirty(&mut self, index: u32) {
        let Some(local) = self.locals.get_mut(index as usize) else { return };
        // Each socket is in the queue at most once, so the queue never exceeds its capacity.
        if local.owned && !local.dirty {
            local.dirty = true;
            self.dirty.push_back(index);
        }
    }

    pub(crate) fn report(&mut self, memory: &Memory, events: &Vring) {
        let mut again = false;
        // A guest may supply buffers too small for an event without end: bound the loop.
        for _ in 0..2 * QUEUE_MAX {
            if !self.due() {
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
            let Some(event) = place.as_ref().and_then(|_| self.next_event()) else {
                // The buffer is too small for an event.
                let _ = events.add_used(head, 0);
                count(&self.shared.counters.malformed);
                continue;
            };
            let written = place.is_some_and(|d| vm_memory::Bytes::write_obj(memory, event, d.addr()).is_ok());
            let _ = events.add_used(head, if written { EVENT_LEN as u32 } else { 0 });
            self.used[1] = true;
            again = false;
        }
        self.ring_again();
    }

    /// Whether an event is due. Skips sockets that are gone since they were marked.
    fn due(&mut self) -> bool {
        while let Some(index) = self.dirty.front().copied().filter(|_| !self.start_due) {
            let Some(local) = self.locals.get_mut(index as usize) else { return false };
            if local.owned && self.shared.table.at(index).is_some() {
                return true;
            }
            local.dirty = false;
            self.dirty.pop_front();
        }
        self.start_due
    }

    fn next_event(&mut self) -> Option<ontime_event> {
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
        let local = self.locals.get_mut(index as usize)?;
        local.dirty = false;
        let (ready, error, seq) = (local.ready, std::mem::take(&mut local.error), local.report());
        self.waiter = self.waiter.max(local.prio);
        Some(ontime_event { type_: ONTIME_EVENT_READY as u16, error, sock, ready, seq, generation })
    }
}

impl Local {
    /// Counts a report. 0 means "no report" and is skipped.
    pub(crate) fn report(&mut self) -> u32 {
        self.seq = self.seq.wrapping_add(1).max(1);
        self.seq
    }
}
