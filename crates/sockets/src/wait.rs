//! Waiting for events: an engine's thread waits for its sockets, a channel's thread also for its doorbells and its
//! bell. All waits are edge-triggered. They use io_uring where it is available, else epoll.
//!
//! Why epoll is not enough: the vCPU thread signals a doorbell's eventfd, and epoll wakes its waiter while it holds the
//! epoll's own lock (`fs/eventpoll.c`, `ep_poll_callback`). On a PREEMPT_RT host the waiter has a higher priority than
//! the vCPU thread. So it preempts the vCPU thread at once, blocks on that lock, boosts the vCPU thread's priority, and
//! two more context switches follow. io_uring's wake-up (`io_uring/poll.c`, `io_poll_wake`) queues task work for the
//! waiter and wakes it; the waiter then takes no lock of the eventfd. The completion is the event, so no epoll_wait
//! call is needed.
//!
//! A ring could do more than wait, and the system call filter does not see its requests. So the ring is created before
//! the filter is installed and permanently restricted to polls and their cancellation (IORING_REGISTER_RESTRICTIONS);
//! the filter allows no further rings. A poll keeps a closed socket open until the [`Wait::flush`] or the wait that
//! follows [`Wait::unwatch`].

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use io_uring::register::Restriction;
use io_uring::{IoUring, cqueue, opcode, types};
use ontime_tenants::remedy;

use crate::abi::Errno;
use crate::host;

/// Number of doorbells including the bell: numbers below this.
pub(crate) const DOORBELLS: usize = 9;
/// Most events per wait.
const AT_ONCE: usize = 64;
/// Most requests queued before they are submitted to the kernel.
const QUEUED: u32 = 32;
/// Size of the completion queue. The kernel ends a poll whose completion does not fit; it is then armed again.
const ROOM: u32 = 1024;
/// User data of requests whose completions are ignored.
const NOBODY: u64 = u64::MAX;

/// `io_uring_enter` flags: wait for completions; do not count the waiting thread as I/O wait (6.15).
const GETEVENTS: u32 = 1;
const NO_IOWAIT: u32 = 1 << 7;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Event {
    /// The number under which the descriptor is watched.
    pub number: u16,
    /// EPOLL* bits of the wake-up. For a datagram socket they are complete. For a stream they may contain EPOLLPRI with
    /// every arrival (`sock_def_readable`).
    pub ready: u32,
}

/// An io_uring that can only poll. Only the thread that enables it may use it.
pub(crate) struct Ring {
    uring: IoUring,
    /// Entries that were not submitted yet.
    queued: u32,
    flags: u32,
}

impl Ring {
    /// Must be called before the system call filter is installed.
    ///
    /// # Errors
    /// EPERM if io_uring is not allowed (`kernel.io_uring_disabled`, a container's filter), EINVAL before Linux 6.1,
    /// ENOSYS.
    pub(crate) fn new() -> io::Result<Self> {
        let uring = IoUring::builder()
            .setup_r_disabled()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_cqsize(ROOM)
            .dontfork()
            .build(QUEUED)?;
        let mut polls = [opcode::PollAdd::CODE, opcode::AsyncCancel::CODE].map(Restriction::sqe_op);
        uring.submitter().register_restrictions(&mut polls)?;
        let iowait = if uring.params().is_feature_no_iowait() { NO_IOWAIT } else { 0 };
        Ok(Self { uring, queued: 0, flags: GETEVENTS | iowait })
    }

    fn enable(&self) -> io::Result<()> {
        self.uring.submitter().register_enable_rings()
    }

    /// Arms a multishot poll. Events that are already ready are reported at once.
    fn arm(&mut self, fd: RawFd, events: u32, data: u64) -> io::Result<()> {
        let poll = opcode::PollAdd::new(types::Fd(fd), events).multi(true).build();
        self.push(&poll.user_data(data))
    }

    fn call_off(&mut self, data: u64) -> io::Result<()> {
        self.push(&opcode::AsyncCancel::new(data).build().user_data(NOBODY))
    }

    fn push(&mut self, entry: &io_uring::squeue::Entry) -> io::Result<()> {
        if self.queued == QUEUED {
            self.enter(0)?;
        }
        // SAFETY: a poll request refers to no memory.
        unsafe { self.uring.submission().push(entry) }.map_err(|_| io::Error::from_raw_os_error(libc::EBUSY))?;
        self.queued += 1;
        Ok(())
    }

    /// Submits the queued entries and waits for `wanted` completions.
    fn enter(&mut self, wanted: u32) -> io::Result<()> {
        // SAFETY: there is no argument, and no entry refers to memory.
        let taken = unsafe { self.uring.submitter().enter::<libc::sigset_t>(self.queued, wanted, self.flags, None) }?;
        self.queued = self.queued.saturating_sub(taken as u32);
        Ok(())
    }
}

/// The descriptor watched under a number.
#[derive(Debug, Clone, Copy)]
struct PollEntry {
    /// The descriptor; -1 for none.
    fd: RawFd,
    /// The watched EPOLL* bits, edge-triggered.
    events: u32,
    /// How often this number was armed or disarmed. Completions from an earlier arming are ignored.
    armed: u32,
}

/// No descriptor is watched.
const NOTHING: PollEntry = PollEntry { fd: -1, events: 0, armed: 0 };

/// How one engine's thread waits.
pub(crate) struct Wait {
    epoll: RawFd,
    ring: Option<Ring>,
    /// By number. Empty if another thread waits ([`Wait::by`]).
    places: Box<[PollEntry]>,
    /// Doorbells: watched, never read.
    doorbells: [Option<OwnedFd>; DOORBELLS],
    ready: Box<[libc::epoll_event; AT_ONCE]>,
    /// The epoll, if it was created here.
    _own: Option<OwnedFd>,
}

impl Wait {
    /// Waits by this ring (see [`Ring::new`]), or by epoll if there is none. Numbers are below `numbers`.
    ///
    /// # Errors
    /// The errno of epoll_create1(2).
    pub(crate) fn new(ring: Option<Ring>, numbers: usize) -> io::Result<Self> {
        // SAFETY: no memory is passed.
        let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if epoll < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor that nothing else owns.
        let own = unsafe { OwnedFd::from_raw_fd(epoll) };
        let places = vec![NOTHING; numbers.max(DOORBELLS)].into();
        Ok(Self { ring, places, _own: Some(own), ..Self::by(epoll) })
    }

    /// For sockets that another thread waits for with this epoll. Supports only [`Self::watch`] and its counterparts.
    pub(crate) fn by(epoll: RawFd) -> Self {
        let ready = Box::new([libc::epoll_event { events: 0, u64: 0 }; AT_ONCE]);
        Self { epoll, ring: None, places: Box::default(), doorbells: Default::default(), ready, _own: None }
    }

    /// Makes the calling thread the only one that may wait.
    pub(crate) fn begin(&mut self) {
        let enabled = self.ring.as_ref().map_or(Ok(()), Ring::enable);
        self.without_ring(enabled);
    }

    /// Watches this doorbell under this number, below [`DOORBELLS`], in place of the one before. A doorbell that was
    /// rung before is an event at once.
    pub(crate) fn doorbell(&mut self, number: u16, fd: OwnedFd) {
        let raw = fd.as_raw_fd();
        let Some(place) = self.doorbells.get_mut(usize::from(number)) else { return };
        // The old doorbell stays open until it is unwatched, so that its descriptor number is not reused.
        if let Some(before) = place.replace(fd) {
            self.unwatch(number, before.as_raw_fd());
        }
        if let Err(error) = self.watch(number, raw, libc::EPOLLIN as u32) {
            tracing::warn!(
                number,
                "cannot watch this doorbell, so the guest's calls on it are not served: {error}; {}",
                remedy(&io::Error::from_raw_os_error(error.0))
            );
        }
    }

    /// Watches these events of a descriptor under this number. Events that are already ready are reported.
    ///
    /// # Errors
    /// The errno of epoll_ctl(2).
    pub(crate) fn watch(&mut self, number: u16, fd: RawFd, events: u32) -> Result<(), Errno> {
        self.set(number, fd, events);
        if self.ring.is_none() {
            return host::watch(self.epoll, fd, u64::from(number), events);
        }
        self.arm(number);
        Ok(())
    }

    /// Changes the events of a descriptor that [`Self::watch`] watches. Events that are already ready are reported.
    ///
    /// # Errors
    /// The errno of epoll_ctl(2).
    pub(crate) fn change(&mut self, number: u16, fd: RawFd, events: u32) -> Result<(), Errno> {
        let before = self.set(number, fd, events);
        if self.ring.is_none() {
            return host::change(self.epoll, fd, u64::from(number), events);
        }
        self.call_off(number, before);
        self.arm(number);
        Ok(())
    }

    /// Stops watching a descriptor. The kernel keeps it open until the next wait or [`Self::flush`] at most. A
    /// descriptor that is not watched is no error.
    pub(crate) fn unwatch(&mut self, number: u16, fd: RawFd) {
        let before = self.set(number, -1, 0);
        if self.ring.is_none() {
            return host::unwatch(self.epoll, fd);
        }
        self.call_off(number, before);
    }

    /// Submits the queued requests without waiting: the kernel no longer keeps unwatched descriptors open.
    pub(crate) fn flush(&mut self) {
        let submitted = self.ring.as_mut().filter(|ring| ring.queued > 0).map(|ring| ring.enter(0));
        self.without_ring(submitted.unwrap_or(Ok(())));
    }

    /// Stores what is watched under a number and returns the previous entry.
    fn set(&mut self, number: u16, fd: RawFd, events: u32) -> PollEntry {
        let Some(place) = self.places.get_mut(usize::from(number)) else { return NOTHING };
        let armed = place.armed.wrapping_add(1);
        std::mem::replace(place, PollEntry { fd, events, armed })
    }

    /// Arms the ring's poll for this number (again).
    fn arm(&mut self, number: u16) {
        let Some(PollEntry { fd, events, armed }) = self.places.get(usize::from(number)).copied() else { return };
        let queued = self.ring.as_mut().filter(|_| fd >= 0).map(|ring| ring.arm(fd, events, user_data(number, armed)));
        self.without_ring(queued.unwrap_or(Ok(())));
    }

    fn call_off(&mut self, number: u16, before: PollEntry) {
        let ring = self.ring.as_mut().filter(|_| before.fd >= 0);
        let queued = ring.map(|ring| ring.call_off(user_data(number, before.armed)));
        self.without_ring(queued.unwrap_or(Ok(())));
    }

    /// Continues with epoll after an error of the ring. epoll reports edges that the ring has not reported.
    fn without_ring(&mut self, result: io::Result<()>) {
        let Err(error) = result else { return };
        let by =
            if self.ring.is_some() { "; epoll is used from now on, nothing is to be done" } else { "; restart the VM" };
        tracing::warn!("waiting for doorbells and sockets failed: {error}{by}");
        if self.ring.take().is_none() {
            return;
        }
        for (number, place) in self.places.iter().enumerate().filter(|(_, place)| place.fd >= 0) {
            if let Err(error) = host::watch(self.epoll, place.fd, number as u64, place.events) {
                tracing::warn!(
                    number,
                    "cannot watch this socket, so the guest is not told when it is ready: {error}; {}",
                    remedy(&io::Error::from_raw_os_error(error.0))
                );
            }
        }
    }

    /// Waits and replaces the contents of `events`. Never allocates: [`Events`] has enough capacity.
    ///
    /// # Errors
    /// The errno of epoll_wait(2), if no wait is possible.
    pub(crate) fn wait(&mut self, Events(events): &mut Events) -> io::Result<()> {
        events.clear();
        let Some(ring) = &mut self.ring else { return self.look(events) };
        let entered = ring.enter(1);
        if !entered.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::Interrupted) {
            let result = entered.and_then(|()| self.completions(events));
            self.without_ring(result);
        }
        Ok(())
    }

    fn completions(&mut self, events: &mut Vec<Event>) -> io::Result<()> {
        for _ in 0..AT_ONCE {
            let Some(done) = self.ring.as_mut().and_then(|ring| ring.uring.completion().next()) else { break };
            let (data, result) = (done.user_data(), done.result());
            let number = data as u16;
            let waited = self.places.get(usize::from(number)).filter(|place| place.fd >= 0);
            if waited.is_none_or(|place| data != user_data(number, place.armed)) {
                continue;
            }
            if result < 0 {
                return Err(io::Error::from_raw_os_error(-result));
            }
            if !cqueue::more(done.flags()) {
                if let Some(place) = self.places.get_mut(usize::from(number)) {
                    place.armed = place.armed.wrapping_add(1);
                }
                self.arm(number);
            }
            events.push(Event { number, ready: result as u32 });
        }
        Ok(())
    }

    /// Waits with epoll.
    fn look(&mut self, events: &mut Vec<Event>) -> io::Result<()> {
        let (at, most) = (self.ready.as_mut_ptr(), AT_ONCE as i32);
        // SAFETY: room for `most` events.
        let count = unsafe { libc::epoll_wait(self.epoll, at, most, -1) };
        if count < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(error) };
        }
        let event = |event: &libc::epoll_event| Event { number: event.u64 as u16, ready: event.events };
        events.extend(self.ready.iter().take(count as usize).map(event));
        Ok(())
    }
}

/// Room for the events of one wait.
pub(crate) struct Events(Vec<Event>);

impl Default for Events {
    fn default() -> Self {
        Self(Vec::with_capacity(AT_ONCE))
    }
}

impl std::ops::Deref for Events {
    type Target = [Event];

    fn deref(&self) -> &[Event] {
        &self.0
    }
}

/// The number is in the lowest 16 bits.
fn user_data(number: u16, armed: u32) -> u64 {
    u64::from(number) | u64::from(armed) << 32
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::os::fd::BorrowedFd;
    use std::time::Duration;

    use vmm_sys_util::eventfd::EventFd;

    use super::*;

    const NUMBERS: usize = 1000;
    const READING: u32 = libc::EPOLLIN as u32;

    /// One wait by epoll, and one by a ring if this machine allows it.
    fn ways() -> Vec<Wait> {
        let ring = Ring::new().inspect_err(|error| println!("SKIPPED: no io_uring: {error}")).ok();
        let rings = ring.map(|ring| Wait::new(Some(ring), NUMBERS).unwrap());
        let mut ways: Vec<_> = rings.into_iter().chain([Wait::new(None, NUMBERS).unwrap()]).collect();
        ways.iter_mut().for_each(Wait::begin);
        ways
    }

    fn doorbell(wait: &mut Wait, number: u16) -> EventFd {
        let event = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        // SAFETY: the event keeps the descriptor open.
        let copy = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }.try_clone_to_owned();
        wait.doorbell(number, copy.unwrap());
        event
    }

    /// The next events; at least one must arrive. A wait may end without one, by the answer to a poll's end.
    fn next_events(wait: &mut Wait) -> Events {
        let mut events = Events::default();
        while events.is_empty() {
            wait.wait(&mut events).unwrap();
        }
        events
    }

    /// The numbers of the next events.
    fn next(wait: &mut Wait) -> Vec<u16> {
        next_events(wait).iter().map(|event| event.number).collect()
    }

    #[test]
    fn doorbells_and_sockets_are_heard_each_time() {
        for mut wait in ways() {
            let (call, bell) = (doorbell(&mut wait, 0), doorbell(&mut wait, 8));
            let (socket, client) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
            wait.watch(17, socket.as_raw_fd(), READING).unwrap();
            for _ in 0..300 {
                // The counter is never read.
                call.write(1).unwrap();
                assert_eq!(next(&mut wait), [0]);
                bell.write(1).unwrap();
                assert_eq!(next(&mut wait), [8]);
                client.send_to(b"one", socket.local_addr().unwrap()).unwrap();
                assert_eq!(next(&mut wait), [17]);
                socket.recv(&mut [0; 3]).unwrap();
            }
            call.write(1).unwrap();
            client.send_to(b"one", socket.local_addr().unwrap()).unwrap();
            let mut both = next(&mut wait);
            while both.len() < 2 {
                both.extend(next(&mut wait));
            }
            both.sort_unstable();
            assert_eq!(both, [0, 17]);
        }
    }

    #[test]
    fn a_doorbell_is_replaced() {
        for mut wait in ways() {
            let before = doorbell(&mut wait, 0);
            before.write(1).unwrap();
            assert_eq!(next(&mut wait), [0]);
            let after = doorbell(&mut wait, 0);
            // Rung before it is watched.
            after.write(1).unwrap();
            assert_eq!(next(&mut wait), [0]);
            let bell = doorbell(&mut wait, 8);
            before.write(1).unwrap();
            bell.write(1).unwrap();
            assert_eq!(next(&mut wait), [8], "the old one is not waited for");
        }
    }

    #[test]
    fn more_sockets_than_one_look_takes() {
        for mut wait in ways() {
            let client = UdpSocket::bind("127.0.0.1:0").unwrap();
            let sockets: Vec<_> = (0..3 * AT_ONCE).map(|_| UdpSocket::bind("127.0.0.1:0").unwrap()).collect();
            for (number, socket) in sockets.iter().enumerate() {
                wait.watch(16 + number as u16, socket.as_raw_fd(), READING).unwrap();
                client.send_to(b"one", socket.local_addr().unwrap()).unwrap();
            }
            let mut seen = Vec::new();
            while seen.len() < sockets.len() {
                seen.extend(next(&mut wait));
            }
            seen.sort_unstable();
            assert!(seen.iter().enumerate().all(|(at, number)| usize::from(*number) == 16 + at));
        }
    }

    /// The kernel ends a multishot poll if many events arrive while its completion queue is full.
    #[test]
    fn a_poll_that_ended_is_armed_again() {
        for mut wait in ways().into_iter().filter(|wait| wait.ring.is_some()) {
            let bell = doorbell(&mut wait, 8);
            bell.write(1).unwrap();
            assert_eq!(next(&mut wait), [8]);
            let PollEntry { fd, events, .. } = wait.places[8];
            let before = wait.set(8, fd, events);
            wait.call_off(8, before);
            let one_shot =
                opcode::PollAdd::new(types::Fd(fd), events).build().user_data(user_data(8, wait.places[8].armed));
            wait.ring.as_mut().unwrap().push(&one_shot).unwrap();
            for _ in 0..10 {
                assert_eq!(next(&mut wait), [8]);
                bell.write(1).unwrap();
            }
        }
    }

    #[test]
    fn a_ring_that_fails_is_replaced_by_the_epoll() {
        for mut wait in ways() {
            let bell = doorbell(&mut wait, 8);
            let (socket, client) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
            wait.watch(17, socket.as_raw_fd(), READING).unwrap();
            wait.without_ring(Err(io::Error::from_raw_os_error(libc::ENOMEM)));
            bell.write(1).unwrap();
            assert_eq!(next(&mut wait), [8]);
            client.send_to(b"one", socket.local_addr().unwrap()).unwrap();
            assert_eq!(next(&mut wait), [17]);
            assert!(wait.ring.is_none());
        }
    }

    #[test]
    fn what_is_waited_for_can_change() {
        for mut wait in ways() {
            let (socket, client) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
            wait.watch(17, socket.as_raw_fd(), READING).unwrap();
            wait.change(17, socket.as_raw_fd(), READING | libc::EPOLLOUT as u32).unwrap();
            let events = next_events(&mut wait);
            assert_eq!(*events, [Event { number: 17, ready: libc::EPOLLOUT as u32 }], "it can be sent to already");
            wait.change(17, socket.as_raw_fd(), READING).unwrap();
            client.send_to(b"one", socket.local_addr().unwrap()).unwrap();
            let events = next_events(&mut wait);
            let ready: Vec<_> = events.iter().map(|event| event.ready & (READING | libc::EPOLLOUT as u32)).collect();
            assert_eq!(ready, [READING]);
        }
    }

    #[test]
    fn a_socket_that_is_no_longer_waited_for_closes() {
        for mut wait in ways() {
            let bell = doorbell(&mut wait, 8);
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (socket, _) = listener.accept().unwrap();
            wait.watch(17, socket.as_raw_fd(), READING).unwrap();
            peer.write_all(b"one").unwrap();
            assert_eq!(next(&mut wait), [17]);
            let mut told = [0; 3];
            (&socket).read_exact(&mut told).unwrap();
            wait.unwatch(17, socket.as_raw_fd());
            wait.flush();
            drop(socket);
            peer.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            assert_eq!(peer.read(&mut told).expect("the peer is not told"), 0);
            bell.write(1).unwrap();
            assert_eq!(next(&mut wait), [8], "nothing more of the socket");
        }
    }
}
