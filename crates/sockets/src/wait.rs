//! How a channel's thread waits: for its doorbells and its bell by io_uring, where there is one, and for its sockets by epoll.
//!
//! Why not by epoll alone: a doorbell's eventfd is signalled by the vCPU thread, and epoll wakes its waiter with the epoll's own lock
//! held (`fs/eventpoll.c`, `ep_poll_callback`). On a PREEMPT_RT host the waiter, who stands above the vCPU, preempts it at once,
//! finds that lock taken, lends its priority, and two more changes of thread follow. io_uring's wake-up (`io_uring/poll.c`,
//! `io_poll_wake`) leaves a note for the waiter and wakes it, and what the waiter does then takes no lock of the eventfd. An epoll
//! that is waited for itself tells of it after its lock was released, so the ring waits for the sockets' epoll, too.
//!
//! A ring can do more than wait, past the system call filter. It is made before the filter, is restricted to polls and their end for good
//! (IORING_REGISTER_RESTRICTIONS), and the filter lets no other be made.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use io_uring::register::Restriction;
use io_uring::{IoUring, cqueue, opcode, types};

use crate::host;

/// Doorbells, and the bell: numbers below.
pub const DOORBELLS: usize = 9;
/// Events of sockets that one look at the epoll takes.
const SOCKETS_AT_ONCE: usize = 64;

/// The ring's number for the sockets' epoll.
const SOCKETS: usize = DOORBELLS;
/// What is waited for.
const PLACES: usize = DOORBELLS + 1;
/// Entries of the ring: each place is armed and called off once in a round at most.
const ENTRIES: u32 = 2 * PLACES as u32;
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
    /// EPOLL* bits.
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
    /// The kernel's: EPERM where it is not allowed (`kernel.io_uring_disabled`, a container's filter), EINVAL before 6.1, ENOSYS.
    pub fn new() -> io::Result<Self> {
        let uring = IoUring::builder()
            .setup_r_disabled()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .dontfork()
            .build(ENTRIES.next_power_of_two())?;
        let mut polls = [opcode::PollAdd::CODE, opcode::AsyncCancel::CODE].map(Restriction::sqe_op);
        uring.submitter().register_restrictions(&mut polls)?;
        let iowait = if uring.params().is_feature_no_iowait() { NO_IOWAIT } else { 0 };
        Ok(Self { uring, queued: 0, flags: GETEVENTS | iowait })
    }

    fn enable(&self) -> io::Result<()> {
        self.uring.submitter().register_enable_rings()
    }

    /// Has the kernel tell each time that there is something to read.
    fn arm(&mut self, fd: RawFd, data: u64) -> io::Result<()> {
        let poll = opcode::PollAdd::new(types::Fd(fd), libc::POLLIN as u32).multi(true).build();
        self.push(&poll.user_data(data))
    }

    fn call_off(&mut self, data: u64) -> io::Result<()> {
        self.push(&opcode::AsyncCancel::new(data).build().user_data(NOBODY))
    }

    fn push(&mut self, entry: &io_uring::squeue::Entry) -> io::Result<()> {
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

/// One that is waited for by edge, and never read.
#[derive(Default)]
struct Doorbell {
    fd: Option<OwnedFd>,
    /// How often the ring was told to wait here: a completion of an earlier time says nothing.
    armed: u32,
}

/// See above.
pub struct Wait {
    epoll: OwnedFd,
    ring: Option<Ring>,
    doorbells: [Doorbell; PLACES],
    ready: Box<[libc::epoll_event; SOCKETS_AT_ONCE]>,
    /// The epoll may hold more sockets' events than were taken.
    more: bool,
}

impl Wait {
    /// By this ring (see [`Ring::new`]); by epoll alone where there is none.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(ring: Option<Ring>) -> io::Result<Self> {
        // SAFETY: no memory is passed.
        let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if epoll < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor that nobody else has.
        let epoll = unsafe { OwnedFd::from_raw_fd(epoll) };
        let ready = Box::new([libc::epoll_event { events: 0, u64: 0 }; SOCKETS_AT_ONCE]);
        Ok(Self { epoll, ring, doorbells: Default::default(), ready, more: true })
    }

    /// The epoll to which sockets are added, by edge, with numbers from [`DOORBELLS`] on.
    pub fn epoll(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    /// Makes the calling thread the one that waits.
    pub fn begin(&mut self) {
        let enabled = self.ring.as_ref().map(Ring::enable);
        let result = enabled.unwrap_or(Ok(())).and_then(|()| self.arm(SOCKETS));
        self.without_ring(result);
    }

    /// Waits for this doorbell by this number, below [`DOORBELLS`], and no longer for the one before it. Rung already is an event.
    pub fn doorbell(&mut self, number: u16, fd: OwnedFd) {
        let result = self.replace(usize::from(number), fd);
        self.without_ring(result);
    }

    fn replace(&mut self, number: usize, fd: OwnedFd) -> io::Result<()> {
        let Some(doorbell) = self.doorbells.get_mut(number) else { return Ok(()) };
        let before = doorbell.fd.replace(fd);
        match (&mut self.ring, before) {
            (Some(ring), Some(_)) => ring.call_off(user_data(number, doorbell.armed))?,
            (None, Some(before)) => host::unwatch(self.epoll.as_raw_fd(), before.as_raw_fd()),
            (_, None) => {}
        }
        self.arm(number)
    }

    /// Waits here (again), where there is a ring; by epoll, for ever.
    fn arm(&mut self, number: usize) -> io::Result<()> {
        let Some(doorbell) = self.doorbells.get_mut(number) else { return Ok(()) };
        let fd = match &doorbell.fd {
            _ if number == SOCKETS => self.epoll.as_raw_fd(),
            Some(fd) => fd.as_raw_fd(),
            None => return Ok(()),
        };
        doorbell.armed = doorbell.armed.wrapping_add(1);
        match &mut self.ring {
            Some(ring) => ring.arm(fd, user_data(number, doorbell.armed)),
            None if number == SOCKETS => Ok(()),
            None => host::watch_reading(self.epoll.as_raw_fd(), fd, number as u64)
                .map_err(|error| io::Error::from_raw_os_error(error.0)),
        }
    }

    /// Goes on by epoll where the ring failed: edges that are not told yet are told by it.
    fn without_ring(&mut self, result: io::Result<()>) {
        let Err(error) = result else { return };
        tracing::warn!("waiting: {error}{}", if self.ring.is_some() { "; by epoll from now on" } else { "" });
        self.more = true;
        if self.ring.take().is_some() {
            for number in 0..DOORBELLS {
                if let Err(error) = self.arm(number) {
                    tracing::warn!("waiting: {error}");
                }
            }
        }
    }

    /// Waits, and puts what happened into `events`, in place of what is there. Never allocates: [`Events`] has room for all.
    ///
    /// # Errors
    /// The kernel's, where waiting is not possible at all.
    pub fn wait(&mut self, Events(events): &mut Events) -> io::Result<()> {
        events.clear();
        let Some(ring) = &mut self.ring else { return self.look(events, -1) };
        let entered = ring.enter(u32::from(!self.more));
        if !entered.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::Interrupted) {
            let result = entered.and_then(|()| self.completions(events));
            self.without_ring(result);
        }
        if self.more { self.look(events, 0) } else { Ok(()) }
    }

    fn completions(&mut self, events: &mut Vec<Event>) -> io::Result<()> {
        // The ring's size is the bound.
        for _ in 0..COMPLETIONS {
            let Some(done) = self.ring.as_mut().and_then(|ring| ring.uring.completion().next()) else { break };
            let (data, result) = (done.user_data(), done.result());
            let number = (data & 0xffff) as usize;
            if self.doorbells.get(number).is_none_or(|doorbell| data != user_data(number, doorbell.armed)) {
                continue;
            }
            if result < 0 {
                return Err(io::Error::from_raw_os_error(-result));
            }
            if !cqueue::more(done.flags()) {
                self.arm(number)?;
            }
            if number == SOCKETS {
                self.more = true;
            } else {
                events.push(Event { number: number as u16, ready: result as u32 });
            }
        }
        Ok(())
    }

    /// Takes events from the epoll.
    fn look(&mut self, events: &mut Vec<Event>, timeout: i32) -> io::Result<()> {
        let (at, most) = (self.ready.as_mut_ptr(), SOCKETS_AT_ONCE as i32);
        // SAFETY: room for `most` events.
        let count = unsafe { libc::epoll_wait(self.epoll.as_raw_fd(), at, most, timeout) };
        if count < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(error) };
        }
        self.more = count == most;
        let event = |event: &libc::epoll_event| Event { number: event.u64 as u16, ready: event.events };
        events.extend(self.ready.iter().take(count as usize).map(event));
        Ok(())
    }
}

/// Completions taken in a row.
const COMPLETIONS: usize = 4 * PLACES;

/// Room for what one wait gives.
pub struct Events(Vec<Event>);

impl Default for Events {
    fn default() -> Self {
        Self(Vec::with_capacity(COMPLETIONS + SOCKETS_AT_ONCE))
    }
}

impl std::ops::Deref for Events {
    type Target = [Event];

    fn deref(&self) -> &[Event] {
        &self.0
    }
}

fn user_data(number: usize, armed: u32) -> u64 {
    number as u64 | u64::from(armed) << 32
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::BorrowedFd;

    use vmm_sys_util::eventfd::EventFd;

    use super::*;

    /// By epoll, and by a ring where this machine lets one be made.
    fn ways() -> Vec<Wait> {
        let ring = Ring::new().inspect_err(|error| println!("SKIPPED: no io_uring: {error}")).ok();
        let rings = ring.map(|ring| Wait::new(Some(ring)).unwrap());
        let mut ways: Vec<_> = rings.into_iter().chain([Wait::new(None).unwrap()]).collect();
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
            host::watch(wait.epoll(), socket.as_raw_fd(), 17, false).unwrap();
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
            let sockets: Vec<_> = (0..3 * SOCKETS_AT_ONCE).map(|_| UdpSocket::bind("127.0.0.1:0").unwrap()).collect();
            for (number, socket) in sockets.iter().enumerate() {
                host::watch(wait.epoll(), socket.as_raw_fd(), 16 + number as u64, false).unwrap();
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
            let one_shot = opcode::PollAdd::new(types::Fd(bell.as_raw_fd()), libc::POLLIN as u32).build();
            let armed = wait.doorbells[8].armed;
            let ring = wait.ring.as_mut().unwrap();
            ring.call_off(user_data(8, armed)).unwrap();
            ring.push(&one_shot.user_data(user_data(8, armed + 1))).unwrap();
            wait.doorbells[8].armed += 1;
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
            wait.without_ring(Err(io::Error::from_raw_os_error(libc::ENOMEM)));
            bell.write(1).unwrap();
            assert_eq!(next(&mut wait), [8]);
            assert!(wait.ring.is_none());
        }
    }
}
