//! The sockets that a thread owns: their state, and the wait for their events. The worker and each channel's thread
//! have some.
//!
//! After its creation nothing here allocates, and each loop is bounded by the number of sockets.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::abi::*;
use crate::call::List;
use crate::host;
use crate::shared::Shared;
use crate::table::{NOBODY, Socket};
use crate::wait::Wait;

/// Event number of the socket in slot 0.
pub(crate) const SOCKET_EVENTS: u16 = 16;

/// A thread's state for a socket that it owns.
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

impl Local {
    /// Counts a report. 0 means "no report" and is skipped.
    pub(crate) fn report(&mut self) -> u32 {
        self.seq = self.seq.wrapping_add(1).max(1);
        self.seq
    }
}

/// The sockets of one thread.
pub(crate) struct OwnedSockets {
    shared: Arc<Shared>,
    channel: u32,
    /// Waits for the sockets.
    pub(crate) wait: Wait,
    pub(crate) locals: Box<[Local]>,
    /// Sockets to serve again after the other pending events.
    again: VecDeque<u32>,
    /// Events came while the call queue was not live.
    pub(crate) missed: bool,
}

impl OwnedSockets {
    /// No sockets yet.
    pub(crate) fn new(shared: Arc<Shared>, channel: u32, wait: Wait) -> Self {
        let locals = vec![Local::default(); shared.table.len()].into();
        let again = VecDeque::with_capacity(shared.table.len());
        Self { shared, channel, wait, locals, again, missed: false }
    }

    pub(crate) fn local(&mut self, index: u32) -> Option<&mut Local> {
        self.locals.get_mut(index as usize)
    }

    /// The calls that wait on a socket: to receive or accept, or on side 1 to send.
    pub(crate) fn waiting(&mut self, index: u32, side: usize) -> Option<&mut List> {
        self.local(index)?.waiting.get_mut(side)
    }

    pub(crate) fn owns(&self, socket: &Socket) -> bool {
        socket.owner == self.channel && self.locals.get(socket.index as usize).is_some_and(|local| local.owned)
    }

    /// Serves a socket again after the other pending events.
    pub(crate) fn come_back(&mut self, index: u32) {
        // As with `dirty`: each socket at most once.
        if let Some(local) = self.locals.get_mut(index as usize).filter(|local| !local.again) {
            local.again = true;
            self.again.push_back(index);
        }
        self.shared.mail.ring(self.channel);
    }

    /// Number of sockets to serve again. Sockets that are added meanwhile are served in the next turn.
    pub(crate) fn again(&self) -> usize {
        self.again.len()
    }

    /// The next socket to serve again.
    pub(crate) fn next_again(&mut self) -> Option<u32> {
        let index = self.again.pop_front()?;
        if let Some(local) = self.local(index) {
            local.again = false;
        }
        Some(index)
    }

    /// Adopts a socket.
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
    pub(crate) fn own(&mut self, index: u32, ready: u32, out_watched: bool) {
        // Continue the count: reports of the previous owner may still be in another queue.
        let seq = self.shared.table.reports(index);
        if let Some(local) = self.local(index) {
            let Local { dirty, again, .. } = *local;
            let urgent = ready & ONTIME_READY_PRI != 0;
            *local =
                Local { owned: true, adopted: true, dirty, again, out_watched, seq, ready, urgent, ..Local::default() };
        }
        self.shared.table.set_owner(index, self.channel);
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

    /// Drops all state of an owned socket and returns the number of its reports.
    pub(crate) fn leave(&mut self, index: u32) -> u32 {
        if let Some(socket) = self.shared.table.at(index) {
            self.wait.unwatch(socket_event(index), socket.fd);
        }
        let Some(local) = self.local(index) else { return 0 };
        local.owned = false;
        local.ready = 0;
        local.error = 0;
        local.seq
    }

    /// Releases every socket; the waiting calls must be gone already.
    pub(crate) fn forget(&mut self) {
        for index in 0..self.locals.len() as u32 {
            let Some(local) = self.local(index) else { continue };
            local.waiting = Default::default();
            let owned = local.owned;
            if let Some(socket) = self.shared.table.at(index).filter(|_| owned) {
                self.wait.unwatch(socket_event(index), socket.fd);
            }
        }
        // As in `Engine::release`.
        self.wait.flush();
        for index in 0..self.locals.len() as u32 {
            if self.local(index).is_some_and(|local| std::mem::take(&mut local.owned)) {
                self.shared.table.set_owner(index, NOBODY);
            }
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
