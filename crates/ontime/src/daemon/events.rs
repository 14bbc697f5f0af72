//! The main loop's event sources: signals, network links, tenants, CPUs, hooks, requests, and the clock.
//!
//! An event carries no details: it is a reason to look at the host, and the look finds what has changed.

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
use ontime_base::remedy::of_limits;
use rustix::event::epoll;
use rustix::fs::inotify;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use strum::{IntoStaticStr, VariantArray};

/// Why the main loop wakes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "lowercase")]
pub(crate) enum Event {
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
    /// A tenant or one of its threads may have started or ended.
    Tenants,
    /// A hook touched the file `poke`.
    #[strum(serialize = "hook")]
    Poked,
    /// A request waits in the queue.
    Request,
    /// A device process asks for bandwidth for its guest, or has ended.
    Guests,
    /// The timer for debounce, rescan or another deadline has expired.
    #[strum(serialize = "rescan")]
    Clock,
    /// The lease of a reservation has ended. No source wakes the loop for it: the timer does.
    #[strum(serialize = "lease")]
    Lease,
}

impl Event {
    /// The name as a metric's label.
    pub(crate) fn word(self) -> &'static str {
        self.into()
    }
}

/// RTMGRP_LINK: RTM_NEWLINK and RTM_DELLINK (`include/uapi/linux/rtnetlink.h`).
const LINK_GROUP: u32 = 1;
/// NLMSG_ALIGNTO: messages in a datagram begin at multiples of this.
const NETLINK_ALIGNMENT: usize = 4;
/// The kernel's own device events, which udevd receives too. The other group carries udevd's events
/// (`lib/kobject_uevent.c`).
const UEVENT_GROUP: u32 = 1;

/// Requirements of the sources that a host may lack.
const UEVENTS_AND_ETHTOOL: &str = "run in the host's own namespaces, on a kernel with CONFIG_ETHTOOL_NETLINK";

/// All sources, in one epoll set.
pub(crate) struct Events {
    epoll: OwnedFd,
    stop: UnixStream,
    reload: UnixStream,
    links: Socket,
    queues: Option<Socket>,
    devices: Option<Socket>,
    rescan_reasons: Vec<String>,
    poke: OwnedFd,
    request: OwnedFd,
    clock: OwnedFd,
}

impl Events {
    /// Sets up all sources. `poke` is the file that hooks touch; `request` is the eventfd of requests.
    ///
    /// # Errors
    /// The kernel's error.
    pub(crate) fn new(poke: &Path, request: OwnedFd) -> io::Result<Self> {
        let stop = on_signals(&[signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT])?;
        let reload = on_signals(&[signal_hook::consts::SIGHUP])?;
        let links = netlink(NETLINK_ROUTE, LINK_GROUP)?;
        std::fs::File::create(poke)?;
        let poked = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
        inotify::add_watch(&poked, poke, inotify::WatchFlags::ATTRIB | inotify::WatchFlags::CLOSE_WRITE)?;
        // Leases also end while the host sleeps.
        let clock = rustix::time::timerfd_create(
            TimerfdClockId::Boottime,
            TimerfdFlags::CLOEXEC.union(TimerfdFlags::NONBLOCK),
        )?;
        let mut rescan_reasons = Vec::new();
        // Linux before 5.6 does not tell.
        let queues = or_rescan("changes of a NIC's queues and rings", ethtool::monitor(), &mut rescan_reasons);
        // Nor does any Linux in a network namespace that does not belong to the initial user namespace.
        let devices = netlink(NETLINK_KOBJECT_UEVENT, UEVENT_GROUP);
        let devices = or_rescan("CPUs that go offline or come back", devices, &mut rescan_reasons);
        let events = Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            stop,
            reload,
            links,
            queues,
            devices,
            rescan_reasons,
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

    /// Why some changes are found only by rescans, if so.
    pub(crate) fn rescan_reasons(&self) -> &[String] {
        &self.rescan_reasons
    }

    /// Adds a source that its owner drains, such as the tenants' watcher.
    ///
    /// # Errors
    /// The kernel's error.
    pub(crate) fn add(&self, source: &impl AsFd, event: Event) -> io::Result<()> {
        epoll::add(&self.epoll, source, epoll::EventData::new_u64(event as u64), epoll::EventFlags::IN)?;
        Ok(())
    }

    /// Wakes the main loop once with [`Event::Clock`] after this time.
    pub(crate) fn wake_in(&self, time: Duration) {
        let value = Timespec {
            tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
            // Zero would disarm the timer.
            tv_nsec: i64::from(time.subsec_nanos().max(1)),
        };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        let _ = rustix::time::timerfd_settime(&self.clock, TimerfdTimerFlags::empty(), &once);
    }

    /// Wakes the main loop with [`Event::Request`] at once, because requests are left.
    pub(crate) fn wake_for_requests(&self) {
        // If the write fails because the counter is full, the eventfd is ready anyway.
        let _ = rustix::io::write(&self.request, &1u64.to_ne_bytes());
    }

    /// Waits for events.
    ///
    /// # Errors
    /// The kernel's error.
    pub(crate) fn wait(&mut self) -> io::Result<Vec<Event>> {
        let mut ready = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 16];
        let count = loop {
            match epoll::wait(&self.epoll, ready.as_mut_slice(), None) {
                Err(rustix::io::Errno::INTR) => {}
                other => break other?,
            }
        };
        let ready = ready.iter().take(count);
        let mut events: Vec<Event> = ready
            .filter_map(|ready| Event::VARIANTS.iter().copied().find(|event| *event as u64 == ready.data.u64()))
            .collect();
        events.retain(|event| self.drain(*event));
        Ok(events)
    }

    /// Reads all pending data of a source. False: the data is no reason to look.
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
            Event::Tenants | Event::Guests | Event::Lease => {}
        }
        true
    }
}

/// A source that the host may lack; then why is added to `rescan_reasons`.
fn or_rescan(changes: &str, source: io::Result<Socket>, rescan_reasons: &mut Vec<String>) -> Option<Socket> {
    match source {
        Ok(socket) => Some(socket),
        Err(error) => {
            rescan_reasons.push(format!(
                "the kernel does not report {changes} ({error}); they are found after `rescan-seconds` (daemon.toml) \
                 instead; for events, {}",
                of_limits(&error).map_or(UEVENTS_AND_ETHTOOL, |(_, remedy)| remedy)
            ));
            None
        }
    }
}

/// A non-blocking netlink socket that receives the messages of a group.
fn netlink(protocol: isize, group: u32) -> io::Result<Socket> {
    let mut socket = Socket::new(protocol)?;
    socket.bind(&SocketAddr::new(0, group))?;
    socket.set_non_blocking(true)?;
    Ok(socket)
}

/// Reads all messages. Returns whether one of them is a reason to look, or some were lost (ENOBUFS), which may have
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

/// Whether messages of `RTMGRP_LINK` are a reason to look. A bridge often reports about its ports in this group
/// (`br_ifinfo_notify`, net/bridge/br_netlink.c). These messages are no reason: an interface that joins or leaves the
/// bridge causes a message of its own. A message that cannot be parsed is a reason.
fn is_of_link(messages: &[u8]) -> bool {
    // The family is the first byte of `struct ifinfomsg`.
    any_but(messages, libc::AF_BRIDGE as u8)
}

/// Whether messages of family `ethtool` are a reason to look. A change of interrupt moderation is none: a pass changes
/// it itself, with some drivers each time ([`ontime_hostnet::Setting::needs_second_write`]), so each pass would cause
/// the next. A change by another program is found at the next rescan.
fn is_of_queues(messages: &[u8]) -> bool {
    // The command is the first byte of `struct genlmsghdr`. ETHTOOL_MSG_COALESCE_NTF,
    // include/uapi/linux/ethtool_netlink.h.
    any_but(messages, 21)
}

/// Whether one of the messages has a payload that begins with another byte than `first`, or cannot be parsed.
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

/// Whether a uevent is about a CPU: `offline@/devices/system/cpu/cpu1`, then `NAME=VALUE` pairs separated by zero
/// bytes.
fn is_of_cpu(message: &[u8]) -> bool {
    let head = message.split(|byte| *byte == 0).next().unwrap_or_default();
    [&b"offline@"[..], b"online@"]
        .iter()
        .any(|action| head.strip_prefix(*action).is_some_and(|path| path.starts_with(b"/devices/system/cpu/cpu")))
}

fn drain_fd(fd: &impl AsFd, buffer: &mut [u8]) {
    // One read empties all sources but pipes and inotify, and those are level-triggered.
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

/// The netlink crate's socket offers a raw descriptor only.
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
    fn a_source_that_is_missing_is_told() {
        let mut reasons = Vec::new();
        let source = Socket::new(NETLINK_ROUTE).unwrap();
        assert!(or_rescan("a", Ok(source), &mut reasons).is_some() && reasons.is_empty());
        for (errno, remedy) in [(libc::EMFILE, "limit of open files"), (libc::EPERM, "own namespaces")] {
            let source = Err(io::Error::from_raw_os_error(errno));
            assert!(or_rescan("b", source, &mut reasons).is_none());
            let reason = reasons.pop().unwrap();
            assert!(reason.contains("report b (") && reason.contains("`rescan-seconds`"), "{reason}");
            assert!(reason.contains(remedy), "{reason}");
        }
    }

    #[test]
    fn what_a_bridge_says_of_its_ports_is_no_reason_to_look() {
        // RTM_NEWLINK with 17 bytes of payload: not aligned, as the last attribute may be.
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
        // Cut short, or with a length that is less than its own header: cannot be parsed.
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
