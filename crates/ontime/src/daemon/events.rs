//! What wakes the main loop: signals, links that come and go, tenants that come and go, hooks, requests, and the clock.
//!
//! Nothing here says what happened in detail: an event is a reason to look, and looking finds what there is.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use super::ethtool;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use rustix::event::epoll;
use rustix::fs::inotify;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};

/// A reason to look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Event {
    /// SIGTERM or SIGINT.
    Stop,
    /// SIGHUP.
    Reload,
    /// A network interface appeared, went, was renamed or changed.
    Links,
    /// A NIC's queues or rings changed.
    Queues,
    /// A tenant or one of its threads may have come or gone.
    Tenants,
    /// A hook asks to look.
    Poked,
    /// A request waits in the channel.
    Request,
    /// A guest's device process says what bandwidth it needs, or has gone.
    Guests,
    /// The debounce or rescan time is up.
    Clock,
}

impl Event {
    const ALL: [Event; 9] = [
        Event::Stop,
        Event::Reload,
        Event::Links,
        Event::Queues,
        Event::Tenants,
        Event::Poked,
        Event::Request,
        Event::Guests,
        Event::Clock,
    ];

    /// As a metric's label.
    pub fn word(self) -> &'static str {
        match self {
            Event::Stop => "stop",
            Event::Reload => "reload",
            Event::Links => "links",
            Event::Queues => "queues",
            Event::Tenants => "tenants",
            Event::Poked => "hook",
            Event::Request => "request",
            Event::Guests => "guests",
            Event::Clock => "rescan",
        }
    }
}

/// RTMGRP_LINK: RTM_NEWLINK and RTM_DELLINK (`include/uapi/linux/rtnetlink.h`).
const LINK_GROUP: u32 = 1;

/// The sources, in one epoll set.
pub struct Events {
    epoll: OwnedFd,
    stop: UnixStream,
    reload: UnixStream,
    links: Socket,
    queues: Option<Socket>,
    poke: OwnedFd,
    request: OwnedFd,
    clock: OwnedFd,
}

impl Events {
    /// Sets up all sources. `poke` is the file that hooks touch; `request` the requests' eventfd.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(poke: &Path, request: OwnedFd) -> io::Result<Self> {
        let stop = on_signals(&[signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT])?;
        let reload = on_signals(&[signal_hook::consts::SIGHUP])?;
        let mut links = Socket::new(NETLINK_ROUTE)?;
        links.bind(&SocketAddr::new(0, LINK_GROUP))?;
        links.set_non_blocking(true)?;
        std::fs::File::create(poke)?;
        let poked = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
        inotify::add_watch(&poked, poke, inotify::WatchFlags::ATTRIB | inotify::WatchFlags::CLOSE_WRITE)?;
        let clock = rustix::time::timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::CLOEXEC.union(TimerfdFlags::NONBLOCK),
        )?;
        let events = Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            stop,
            reload,
            links,
            // Without it (before 5.6) the rescan finds what it would have told.
            queues: ethtool::monitor().ok(),
            poke: poked,
            request,
            clock,
        };
        events.add(&events.stop, Event::Stop)?;
        events.add(&events.reload, Event::Reload)?;
        events.add(&BorrowedSocket(&events.links), Event::Links)?;
        if let Some(queues) = &events.queues {
            events.add(&BorrowedSocket(queues), Event::Queues)?;
        }
        events.add(&events.poke, Event::Poked)?;
        events.add(&events.request, Event::Request)?;
        events.add(&events.clock, Event::Clock)?;
        Ok(events)
    }

    /// Adds a source that its owner drains: the tenants' watcher.
    ///
    /// # Errors
    /// The kernel's.
    pub fn add(&self, source: &impl AsFd, event: Event) -> io::Result<()> {
        epoll::add(&self.epoll, source, epoll::EventData::new_u64(event as u64), epoll::EventFlags::IN)?;
        Ok(())
    }

    /// Wakes with [`Event::Clock`] after this time, once.
    pub fn wake_in(&self, time: Duration) {
        let value = Timespec {
            tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
            // Zero would disarm it.
            tv_nsec: i64::from(time.subsec_nanos().max(1)),
        };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        let _ = rustix::time::timerfd_settime(&self.clock, TimerfdTimerFlags::empty(), &once);
    }

    /// Sleeps until there is an event.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wait(&mut self) -> io::Result<Vec<Event>> {
        let mut ready = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 16];
        let count = loop {
            match epoll::wait(&self.epoll, ready.as_mut_slice(), None) {
                Err(rustix::io::Errno::INTR) => {}
                other => break other?,
            }
        };
        let events: Vec<Event> = ready
            .iter()
            .take(count)
            .filter_map(|ready| Event::ALL.into_iter().find(|event| *event as u64 == ready.data.u64()))
            .collect();
        for event in &events {
            self.drain(*event);
        }
        Ok(events)
    }

    fn drain(&mut self, event: Event) {
        let mut buffer = [0u8; 4096];
        match event {
            Event::Stop => drain_fd(&self.stop, &mut buffer),
            Event::Reload => drain_fd(&self.reload, &mut buffer),
            // An overrun (ENOBUFS) is read like a message: it also says that something changed.
            Event::Links => while self.links.recv_from(&mut &mut buffer[..], 0).is_ok() {},
            Event::Queues => {
                while self.queues.as_ref().is_some_and(|queues| queues.recv_from(&mut &mut buffer[..], 0).is_ok()) {}
            }
            Event::Poked => drain_fd(&self.poke, &mut buffer),
            Event::Request => drain_fd(&self.request, &mut buffer),
            Event::Clock => drain_fd(&self.clock, &mut buffer),
            Event::Tenants | Event::Guests => {}
        }
    }
}

fn drain_fd(fd: &impl AsFd, buffer: &mut [u8]) {
    // One read is enough for all but pipes and inotify, and those are level-triggered.
    let _ = rustix::io::read(fd, buffer);
}

fn on_signals(signals: &[i32]) -> io::Result<UnixStream> {
    let (reader, writer) = UnixStream::pair()?;
    reader.set_nonblocking(true)?;
    for signal in signals {
        signal_hook::low_level::pipe::register(*signal, writer.try_clone()?)?;
    }
    Ok(reader)
}

/// The netlink crate's socket has only the raw form of a descriptor.
struct BorrowedSocket<'a>(&'a Socket);

impl AsFd for BorrowedSocket<'_> {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        let raw = std::os::fd::AsRawFd::as_raw_fd(self.0);
        // SAFETY: the socket is open for as long as it is borrowed.
        unsafe { std::os::fd::BorrowedFd::borrow_raw(raw) }
    }
}
