//! Readiness of an engine's sockets: the kernel's poll state, and which of it the guest is told.

use crate::abi::*;
use crate::engine::Engine;
use crate::host;
use crate::memory::Memory;
use crate::owned_sockets::awaits_out;
use crate::request::Protocol;
use crate::vring::Vring;

impl Engine {
    /// Handles a socket's event. `said`: the EPOLL* bits of the event, if known. Returns whether a waiting call was
    /// answered.
    pub(crate) fn socket_event(&mut self, memory: &Memory, vring: &Vring, index: u32, said: Option<u32>) -> bool {
        if !self.queue.live(vring) {
            // The VM is paused or its driver is being set up. Edges are not repeated, so all sockets are polled when
            // the VM continues.
            self.sockets.missed = true;
            return false;
        }
        let socket = self.shared.table.at(index).filter(|socket| socket.owner == self.channel);
        let Some(socket) = socket else { return false };
        let (before, out_watched, receiver) = match self.sockets.local(index) {
            Some(local) if local.owned => (local.ready, local.out_watched, !local.waiting[0].is_empty()),
            _ => return false,
        };
        let adopted = self.sockets.local(index).is_some_and(|local| std::mem::take(&mut local.adopted));
        if adopted && !receiver && before & ONTIME_READY_IN != 0 && said.is_some_and(|bits| bits & !before == 0) {
            // This event repeats what was reported when the socket was adopted.
            return false;
        }
        if out_watched && !awaits_out(before) && said.unwrap_or(0) & ONTIME_READY_OUT != 0 {
            self.sockets.watch_out(&socket, false);
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
        self.sockets.note(&socket, ready);
        let [received, sent] = self.serve(memory, vring, &socket);
        let Some(local) = self.sockets.local(index) else { return received };
        let changed = local.ready != before && !received && !sent;
        // IN without a waiting receiver is a new arrival even if IN was reported before: edge-triggered pollers in the
        // guest need the event.
        let arrived = local.ready & ONTIME_READY_IN != 0 && !received;
        if local.error != 0 || changed || arrived {
            self.reports.mark(&mut self.sockets, index);
        }
        received || sent
    }

    pub(crate) fn look_again(&mut self, index: u32) {
        let Some(socket) = self.shared.table.at(index).filter(|socket| socket.owner == self.channel) else { return };
        let Some(before) = self.sockets.local(index).filter(|local| local.owned).map(|local| local.ready) else {
            return;
        };
        self.look(&socket);
        if self.sockets.local(index).is_some_and(|local| local.ready != before) {
            self.reports.mark(&mut self.sockets, index);
        }
    }
}
