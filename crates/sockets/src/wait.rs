//! How the thread of an engine waits for its sockets, and a channel's for its doorbells and its bell as well: by
//! io_uring, where there is one, or by epoll. All by edge.
//!
//! Why not by epoll alone: a doorbell's eventfd is signalled by the vCPU thread, and epoll wakes its waiter with the
//! epoll's own lock held (`fs/eventpoll.c`, `ep_poll_callback`). On a PREEMPT_RT host the waiter, who stands above the
//! vCPU, preempts it at once, finds that lock taken, lends its priority, and two more changes of thread follow.
//! io_uring's wake-up (`io_uring/poll.c`, `io_poll_wake`) leaves a note for the waiter and wakes it, and what the
//! waiter does then takes no lock of the eventfd. And the note is the event: nobody has to ask an epoll for it.
//!
//! A ring can do more than wait, past the system call filter. It is made before the filter, is restricted to polls and
//! their end for good (IORING_REGISTER_RESTRICTIONS), and the filter lets no other be made. A poll keeps a socket open
//! that is closed: until the wait after [`Wait::unwatch`], which ends the thread's turn.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use io_uring::register::Restriction;
use io_uring::{IoUring, cqueue, opcode, types};
use ontime_tenants::remedy;

use crate::abi::Errno;
use crate::host;

/// Doorbells, and the bell: numbers below.
pub const DOORBELLS: usize = 9;
/// Events that one wait gives at most.
const AT_ONCE: usize = 64;
/// Requests that are queued for the kernel at most; then it is given them.
const QUEUED: u32 = 32;
/// Completions that the ring has room for. A poll for which there is none ends, and is armed again.
const ROOM: u32 = 1024;
/// Of a request whose answer says nothing.
const NOBODY: u64 = u64::MAX;

/// `io_uring_enter`: wait for completions; do not count the thread as one that waits for a disk (6.15).
const GETEVENTS: u32 = 1;
const NO_IOWAIT: u32 = 1 << 7;

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// The number it was waited for by.
    pub number: u16,
    /// EPOLL* bits: what the wake-up was for. That is all there is to know of a datagram socket; a stream's may say
    /// EPOLLPRI with every arrival (`sock_def_readable`).
    pub ready: u32,
}

/// A ring that can do nothing but wait. The thread that enables it is the only one that may use it.
pub struct Ring {
    uring: IoUring,
    /// Entries that the kernel has not been given yet.
    queued: u32,
    flags: u32,
}

impl Ring {
    /// Made before the system call filter.
    ///
    /// # Errors
    /// The kernel's: EPERM where it is not allowed (`kernel.io_uring_disabled`, a container's filter), EINVAL before
    /// 6.1, ENOSYS.
    pub fn new() -> io::Result<Self> {
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

    /// Has the kernel tell each time that one of these happens. What is so already is told at once.
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
        // SAFETY: a poll has no memory that would have to outlive it.
        unsafe { self.uring.submission().push(entry) }.map_err(|_| io::Error::from_raw_os_error(libc::EBUSY))?;
        self.queued += 1;
        Ok(())
    }

    /// Gives the kernel what is queued, and waits for `wanted` completions.
    fn enter(&mut self, wanted: u32) -> io::Result<()> {
        // SAFETY: there is no argument, and no entry refers to memory.
        let taken = unsafe { self.uring.submitter().enter::<libc::sigset_t>(self.queued, wanted, self.flags, None) }?;
        self.queued = self.queued.saturating_sub(taken as u32);
        Ok(())
    }
}

/// What a number stands for.
#[derive(Debug, Clone, Copy)]
struct Place {
    /// -1: nothing.
    fd: RawFd,
    /// EPOLL* bits that are waited for, by edge.
    events: u32,
    /// How often the ring was told to wait here, or no longer: a completion of an earlier time says nothing.
    armed: u32,
}

/// Nothing is waited for.
const NOTHING: Place = Place { fd: -1, events: 0, armed: 0 };

/// See above.
pub struct Wait {
    epoll: RawFd,
    ring: Option<Ring>,
    /// By number. None where another waits.
    places: Box<[Place]>,
    /// Waited for, and never read.
    doorbells: [Option<OwnedFd>; DOORBELLS],
    ready: Box<[libc::epoll_event; AT_ONCE]>,
    /// The epoll's, if it was made here.
    _own: Option<OwnedFd>,
}

impl Wait {
    /// By this ring (see [`Ring::new`]); by epoll where there is none. Numbers are below `numbers`.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(ring: Option<Ring>, numbers: usize) -> io::Result<Self> {
        // SAFETY: no memory is passed.
        let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if epoll < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor that nobody else has.
        let own = unsafe { OwnedFd::from_raw_fd(epoll) };
        let places = vec![NOTHING; numbers.max(DOORBELLS)].into();
        Ok(Self { ring, places, _own: Some(own), ..Self::by(epoll) })
    }

    /// Of sockets that another waits for, by this epoll: for [`Self::watch`] and what undoes it only.
    pub fn by(epoll: RawFd) -> Self {
        let ready = Box::new([libc::epoll_event { events: 0, u64: 0 }; AT_ONCE]);
        Self { epoll, ring: None, places: Box::default(), doorbells: Default::default(), ready, _own: None }
    }

    /// Makes the calling thread the one that waits.
    pub fn begin(&mut self) {
        let enabled = self.ring.as_ref().map_or(Ok(()), Ring::enable);
        self.without_ring(enabled);
    }

    /// Waits for this doorbell by this number, below [`DOORBELLS`], and no longer for the one before it. Rung already
    /// is an event.
    pub fn doorbell(&mut self, number: u16, fd: OwnedFd) {
        let raw = fd.as_raw_fd();
        let Some(place) = self.doorbells.get_mut(usize::from(number)) else { return };
        // Open until it is no longer waited for: its number is not another's.
        if let Some(before) = place.replace(fd) {
            self.unwatch(number, before.as_raw_fd());
        }
        if let Err(error) = self.watch(number, raw, libc::EPOLLIN as u32) {
            tracing::warn!(
                number,
                "the guest's calls on this doorbell are not heard: {error}; {}",
                remedy(&io::Error::from_raw_os_error(error.0))
            );
        }
    }

    /// Waits for these events of a descriptor by this number. What is so already is an event.
    ///
    /// # Errors
    /// The kernel's.
    pub fn watch(&mut self, number: u16, fd: RawFd, events: u32) -> Result<(), Errno> {
        self.set(number, fd, events);
        if self.ring.is_none() {
            return host::watch(self.epoll, fd, u64::from(number), events);
        }
        self.arm(number);
        Ok(())
    }

    /// Waits for other events of a descriptor that [`Self::watch`] has. What is so already is an event.
    ///
    /// # Errors
    /// The kernel's.
    pub fn change(&mut self, number: u16, fd: RawFd, events: u32) -> Result<(), Errno> {
        let before = self.set(number, fd, events);
        if self.ring.is_none() {
            return host::change(self.epoll, fd, u64::from(number), events);
        }
        self.call_off(number, before);
        self.arm(number);
        Ok(())
    }

    /// No longer waits for a descriptor, and holds it open no longer than until the next wait. Not having waited is no
    /// error.
    pub fn unwatch(&mut self, number: u16, fd: RawFd) {
        let before = self.set(number, -1, 0);
        if self.ring.is_none() {
            return host::unwatch(self.epoll, fd);
        }
        self.call_off(number, before);
    }

    /// Notes what is waited for by a number from now on, and gives what was.
    fn set(&mut self, number: u16, fd: RawFd, events: u32) -> Place {
        let Some(place) = self.places.get_mut(usize::from(number)) else { return NOTHING };
        let armed = place.armed.wrapping_add(1);
        std::mem::replace(place, Place { fd, events, armed })
    }

    /// Has the ring wait here (again).
    fn arm(&mut self, number: u16) {
        let Some(Place { fd, events, armed }) = self.places.get(usize::from(number)).copied() else { return };
        let queued = self.ring.as_mut().filter(|_| fd >= 0).map(|ring| ring.arm(fd, events, user_data(number, armed)));
        self.without_ring(queued.unwrap_or(Ok(())));
    }

    fn call_off(&mut self, number: u16, before: Place) {
        let ring = self.ring.as_mut().filter(|_| before.fd >= 0);
        let queued = ring.map(|ring| ring.call_off(user_data(number, before.armed)));
        self.without_ring(queued.unwrap_or(Ok(())));
    }

    /// Goes on by epoll where the ring failed: edges that are not told yet are told by it.
    fn without_ring(&mut self, result: io::Result<()>) {
        let Err(error) = result else { return };
        let by = if self.ring.is_some() { "; by epoll from now on, nothing is to be done" } else { "; restart the VM" };
        tracing::warn!("waiting for doorbells and sockets failed: {error}{by}");
        if self.ring.take().is_none() {
            return;
        }
        for (number, place) in self.places.iter().enumerate().filter(|(_, place)| place.fd >= 0) {
            if let Err(error) = host::watch(self.epoll, place.fd, number as u64, place.events) {
                tracing::warn!(
                    number,
                    "this socket's readiness is not heard: {error}; {}",
                    remedy(&io::Error::from_raw_os_error(error.0))
                );
            }
        }
    }

    /// Waits, and puts what happened into `events`, in place of what is there. Never allocates: [`Events`] has room for
    /// all.
    ///
    /// # Errors
    /// The kernel's, where waiting is not possible at all.
    pub fn wait(&mut self, Events(events): &mut Events) -> io::Result<()> {
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

    /// Takes events from the epoll.
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

/// Room for what one wait gives.
pub struct Events(Vec<Event>);

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

/// The number in the lowest 16 bits.
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

    /// By epoll, and by a ring where this machine lets one be made.
    fn ways() -> Vec<Wait> {
        let ring = Ring::new().inspect_err(|error| println!("SKIPPED: no io_uring: {error}")).ok();
        let rings = ring.map(|ring| Wait::new(Some(ring), NUMBERS).unwrap());
        let mut ways: Vec<_> = rings.into_iter().chain([Wait::new(None, NUMBERS).unwrap()]).collect();
        ways.iter_mut().for_each(Wait::begin);
        ways
    }

    fn doorbell(wait: &mut Wait, number: u16) -> EventFd {
        let event = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        // SAFETY: the event has it open.
        let copy = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }.try_clone_to_owned();
        wait.doorbell(number, copy.unwrap());
        event
    }

    /// The numbers of the next events, of which there must be some.
    fn next(wait: &mut Wait) -> Vec<u16> {
        let mut events = Events::default();
        while events.is_empty() {
            wait.wait(&mut events).unwrap();
        }
        events.iter().map(|event| event.number).collect()
    }

    #[test]
    fn doorbells_and_sockets_are_heard_each_time() {
        for mut wait in ways() {
            let (call, bell) = (doorbell(&mut wait, 0), doorbell(&mut wait, 8));
            let (socket, client) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
            wait.watch(17, socket.as_raw_fd(), READING).unwrap();
            for _ in 0..300 {
                // Never read.
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
            // Rung before it is waited for.
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

    /// The kernel ends a poll for many occasions where its queue of completions is full.
    #[test]
    fn a_poll_that_ended_is_armed_again() {
        for mut wait in ways().into_iter().filter(|wait| wait.ring.is_some()) {
            let bell = doorbell(&mut wait, 8);
            bell.write(1).unwrap();
            assert_eq!(next(&mut wait), [8]);
            let Place { fd, events, .. } = wait.places[8];
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
            let mut events = Events::default();
            wait.wait(&mut events).unwrap();
            assert_eq!(*events, [Event { number: 17, ready: libc::EPOLLOUT as u32 }], "it can be sent to already");
            wait.change(17, socket.as_raw_fd(), READING).unwrap();
            client.send_to(b"one", socket.local_addr().unwrap()).unwrap();
            wait.wait(&mut events).unwrap();
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
            drop(socket);
            bell.write(1).unwrap();
            assert_eq!(next(&mut wait), [8], "nothing more of the socket");
            peer.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            assert_eq!(peer.read(&mut told).expect("the peer is not told"), 0);
        }
    }
}
