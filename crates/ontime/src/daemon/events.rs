//! What wakes the main loop: signals, links that come and go, tenants that come and go, hooks, requests, and the clock.
//!
//! Nothing here says what happened in detail: an event is a reason to look, and looking finds what there is.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use super::ethtool;
use netlink_packet_core::NetlinkBuffer;
use netlink_sys::{
    Socket, SocketAddr,
    protocols::{NETLINK_KOBJECT_UEVENT, NETLINK_ROUTE},
};
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
    /// A CPU went offline or came back.
    Cpus,
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
    const ALL: [Event; 10] = [
        Event::Stop,
        Event::Reload,
        Event::Links,
        Event::Queues,
        Event::Cpus,
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
            Event::Cpus => "cpus",
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
/// NLMSG_ALIGNTO: messages in a datagram begin at multiples of it.
const NETLINK_ALIGNMENT: usize = 4;
/// The kernel's own events of devices, as udevd hears them; the other group is udevd's (`lib/kobject_uevent.c`).
const UEVENT_GROUP: u32 = 1;

/// The sources, in one epoll set.
pub struct Events {
    epoll: OwnedFd,
    stop: UnixStream,
    reload: UnixStream,
    links: Socket,
    queues: Option<Socket>,
    devices: Option<Socket>,
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
        let links = netlink(NETLINK_ROUTE, LINK_GROUP)?;
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
            // The same, in a network namespace that is not the first user namespace's.
            devices: netlink(NETLINK_KOBJECT_UEVENT, UEVENT_GROUP).ok(),
            poke: poked,
            request,
            clock,
        };
        events.add(&events.stop, Event::Stop)?;
        events.add(&events.reload, Event::Reload)?;
        events.add(&BorrowedSocket(&events.links), Event::Links)?;
        for (socket, event) in [(&events.queues, Event::Queues), (&events.devices, Event::Cpus)] {
            if let Some(socket) = socket {
                events.add(&BorrowedSocket(socket), event)?;
            }
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

    /// Wakes with [`Event::Request`] at once: not all were answered.
    pub fn wake_for_requests(&self) {
        // Where it is too full to be rung, it is heard all the same.
        let _ = rustix::io::write(&self.request, &1u64.to_ne_bytes());
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
        let ready = ready.iter().take(count);
        let mut events: Vec<Event> =
            ready.filter_map(|ready| Event::ALL.into_iter().find(|event| *event as u64 == ready.data.u64())).collect();
        events.retain(|event| self.drain(*event));
        Ok(events)
    }

    /// Reads what there is. False: it was no reason to look.
    fn drain(&mut self, event: Event) -> bool {
        let mut buffer = [0u8; 4096];
        match event {
            Event::Stop => drain_fd(&self.stop, &mut buffer),
            Event::Reload => drain_fd(&self.reload, &mut buffer),
            Event::Links => return tells(&self.links, &mut buffer, is_of_link),
            Event::Queues => {
                return self.queues.as_ref().is_some_and(|queues| tells(queues, &mut buffer, is_of_queues));
            }
            Event::Cpus => return self.devices.as_ref().is_some_and(|devices| tells(devices, &mut buffer, is_of_cpu)),
            Event::Poked => drain_fd(&self.poke, &mut buffer),
            Event::Request => drain_fd(&self.request, &mut buffer),
            Event::Clock => drain_fd(&self.clock, &mut buffer),
            Event::Tenants | Event::Guests => {}
        }
        true
    }
}

/// A non-blocking socket that hears a group.
fn netlink(protocol: isize, group: u32) -> io::Result<Socket> {
    let mut socket = Socket::new(protocol)?;
    socket.bind(&SocketAddr::new(0, group))?;
    socket.set_non_blocking(true)?;
    Ok(socket)
}

/// Reads all there is: whether something of it is such a reason to look, or some was lost (ENOBUFS), which may have
/// been one.
fn tells(socket: &Socket, buffer: &mut [u8], is_reason: fn(&[u8]) -> bool) -> bool {
    let mut told = false;
    loop {
        match socket.recv_from(&mut &mut buffer[..], 0) {
            Ok((count, _)) => told |= buffer.get(..count).is_some_and(is_reason),
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => told = true,
            Err(_) => return told,
        }
    }
}

/// Messages of `RTMGRP_LINK`. A bridge tells there of its ports, too, and often (`br_ifinfo_notify`,
/// net/bridge/br_netlink.c): an interface that enters or leaves it is told in a message of its own, so what the bridge
/// says is no reason to look. What cannot be read is one.
fn is_of_link(messages: &[u8]) -> bool {
    // `struct ifinfomsg`: the family is its first byte.
    any_but(messages, libc::AF_BRIDGE as u8)
}

/// Messages of family `ethtool`. That somebody set a NIC's moderation is no reason to look: a pass does itself, each
/// time for some drivers ([`ontime_hostnet::Setting::insists`]), and would be the reason of the next. Another's change
/// is found at the next rescan.
fn is_of_queues(messages: &[u8]) -> bool {
    // `struct genlmsghdr`: the command is its first byte. ETHTOOL_MSG_COALESCE_NTF,
    // include/uapi/linux/ethtool_netlink.h.
    any_but(messages, 21)
}

/// Whether there is a message whose payload begins with another byte than this, or one that cannot be read.
fn any_but(mut messages: &[u8], first: u8) -> bool {
    while !messages.is_empty() {
        let Ok(message) = NetlinkBuffer::new_checked(messages) else { return true };
        if message.payload().first() != Some(&first) {
            return true;
        }
        let length = (message.length() as usize).next_multiple_of(NETLINK_ALIGNMENT);
        messages = messages.get(length..).unwrap_or_default();
    }
    false
}

/// `offline@/devices/system/cpu/cpu1`, then `NAME=VALUE` each after a zero.
fn is_of_cpu(message: &[u8]) -> bool {
    let head = message.split(|byte| *byte == 0).next().unwrap_or_default();
    [&b"offline@"[..], b"online@"]
        .iter()
        .any(|action| head.strip_prefix(*action).is_some_and(|path| path.starts_with(b"/devices/system/cpu/cpu")))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_cpus_that_go_and_come_are_a_reason_to_look() {
        let message = |head: &str| [head.as_bytes(), b"\0ACTION=x\0SUBSYSTEM=cpu\0"].concat();
        for (head, told) in [
            ("offline@/devices/system/cpu/cpu1", true),
            ("online@/devices/system/cpu/cpu12", true),
            ("add@/devices/system/cpu/cpu1", false),
            ("offline@/devices/system/memory/memory3", false),
            ("", false),
        ] {
            assert_eq!(is_of_cpu(&message(head)), told, "{head}");
        }
        assert!(!is_of_cpu(&[]));
    }

    #[test]
    fn what_a_bridge_says_of_its_ports_is_no_reason_to_look() {
        // RTM_NEWLINK, 17 bytes of payload: not aligned, as the last attribute may be.
        let message = |family: i32| {
            let mut bytes = vec![33u8, 0, 0, 0, 16, 0];
            bytes.resize(16, 0);
            bytes.push(family as u8);
            bytes.resize(36, 0);
            bytes
        };
        let (link, port) = (message(libc::AF_UNSPEC), message(libc::AF_BRIDGE));
        assert!(is_of_link(&link));
        assert!(!is_of_link(&port));
        assert!(!is_of_link(&[port.clone(), port.clone()].concat()));
        assert!(is_of_link(&[port.clone(), link].concat()));
        // Cut short, or with a length that ends before its own header: not understood.
        assert!(is_of_link(&port[..20]));
        assert!(is_of_link(&[4, 0, 0, 0]));
        assert!(is_of_link(&[0; 36]));
        assert!(!is_of_link(&[]));
        let moderation = [&[20, 0, 0, 0][..], &[0; 12], &[21, 1, 0, 0]].concat();
        let rings = [&[20, 0, 0, 0][..], &[0; 12], &[17, 1, 0, 0]].concat();
        assert!(!is_of_queues(&moderation));
        assert!(is_of_queues(&[moderation, rings].concat()));
    }
}
