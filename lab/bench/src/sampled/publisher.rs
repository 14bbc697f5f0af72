//! The publisher: sends one frame per period, never two at once.
//!
//! In: the number of frames. Out: frames on the wire. On a real host, and on the clients' CPU of an emulated one, the
//! publisher keeps the period by its own clock. Outside an emulated host on the virtual clock, the emulator releases
//! the packets that wait at the RT NIC once per period. There the publisher provides the next frame as soon as the last
//! one is in the capture, so that each release has one frame. If the publisher is late, a period passes without a
//! frame: a gap, never a burst. The capture shows the actual gaps.

use std::mem::size_of;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::netdevice::name_to_index;
use rustix::net::{AddressFamily, SendFlags, SocketType, send, socket};

use super::frame::{self, FrameDirection, PERIOD_NS};
use crate::client::ClientError;
use crate::pcap::Tail;

/// Real time within which a sent frame must be released.
const LIMIT: Duration = Duration::from_secs(120);

/// A raw socket on the RT network.
#[derive(Debug)]
pub(crate) struct Publisher {
    socket: OwnedFd,
}

impl Publisher {
    /// Opens a socket on the client's interface.
    pub(crate) fn open(nic: &str) -> Result<Self, ClientError> {
        let failed = |what| {
            move |error: Errno| ClientError::Socket {
                what,
                address: (Ipv4Addr::UNSPECIFIED, 0).into(),
                source: error.into(),
            }
        };
        // Protocol 0: the socket only sends.
        let socket =
            socket(AddressFamily::PACKET, SocketType::RAW, None).map_err(failed("open a packet socket, for"))?;
        let index = name_to_index(&socket, nic).map_err(failed("find the client's interface, for"))?;
        let address = libc::sockaddr_ll {
            sll_family: libc::AF_PACKET as libc::sa_family_t,
            sll_protocol: 0,
            sll_ifindex: index as libc::c_int,
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        let (pointer, length) = (&raw const address, size_of::<libc::sockaddr_ll>() as libc::socklen_t);
        // SAFETY: the pointer is to a live sockaddr_ll of that length, which bind(2) only reads.
        let bound = unsafe { libc::bind(socket.as_raw_fd(), pointer.cast(), length) };
        if bound != 0 {
            let source = std::io::Error::last_os_error();
            let address = (Ipv4Addr::UNSPECIFIED, 0).into();
            return Err(ClientError::Socket {
                what: "bind a packet socket to the client's interface, for",
                address,
                source,
            });
        }
        Ok(Self { socket })
    }

    /// Sends a frame. If the tap's queue is full, the frame is lost, as on a wire; the capture shows that.
    fn publish(&self, number: u64) {
        let _ = send(&self.socket, &frame::write(number), SendFlags::empty());
    }

    /// Publishes `frames` frames by this process's clock, which is that of the host under test: a real one's, or the
    /// emulated machine's. `go_on` gets the number of frames so far, and may end the run by an error.
    pub(crate) fn by_clock<E>(&self, frames: u64, mut go_on: impl FnMut(u64) -> Result<(), E>) -> Result<(), E> {
        let (start, mut due_ns) = (Instant::now(), 0);
        for number in 0..frames {
            self.publish(number);
            go_on(number + 1)?;
            due_ns = following(due_ns, start.elapsed().as_nanos() as u64);
            thread::sleep(Duration::from_nanos(due_ns).saturating_sub(start.elapsed()));
        }
        Ok(())
    }

    /// As [`Self::by_clock`], for an emulated host that releases arriving packets once per period of its virtual clock.
    /// `capture` is its RT NIC's.
    pub(crate) fn by_releases<E: From<ClientError>>(
        &self,
        frames: u64,
        capture: &Path,
        mut go_on: impl FnMut(u64) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut wire = Wire::at_end(capture)?;
        for number in 0..frames {
            self.publish(number);
            let sent = Instant::now();
            while !wire.has(number)? {
                go_on(number)?;
                if sent.elapsed() > LIMIT {
                    let seconds = LIMIT.as_secs();
                    let said = format!("the publisher: frame {number} was not released within {seconds} s");
                    return Err(ClientError::Told(said).into());
                }
                thread::sleep(Duration::from_micros(100));
            }
        }
        Ok(())
    }
}

/// The next time for a frame, ns since the start: a whole number of periods after `due`, and after `now`. A publisher
/// that was late leaves a gap.
fn following(due: u64, now: u64) -> u64 {
    due + PERIOD_NS * (now.saturating_sub(due) / PERIOD_NS + 1)
}

/// The growing capture of the RT NIC.
struct Wire {
    tail: Tail,
    latest: Option<u64>,
}

impl Wire {
    fn at_end(capture: &Path) -> Result<Self, ClientError> {
        let mut tail = Tail::open(capture)?;
        tail.read_new(|_| {})?;
        Ok(Self { tail, latest: None })
    }

    /// Whether frame `number` has been released.
    fn has(&mut self, number: u64) -> Result<bool, ClientError> {
        let latest = &mut self.latest;
        self.tail.read_new(|record| {
            if let Some(Ok((FrameDirection::Published, number))) = frame::read(record.data) {
                *latest = Some(number);
            }
        })?;
        Ok(*latest >= Some(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_publisher_leaves_a_gap_and_keeps_the_grid() {
        let period = PERIOD_NS;
        for (due, now, next) in [
            (0, 0, period),
            (0, period - 1, period),
            // A frame that is due now was missed: the next one keeps its distance.
            (0, period, 2 * period),
            (3 * period, 3 * period + 1_000, 4 * period),
            (3 * period, 9 * period + 1_000, 10 * period),
        ] {
            assert_eq!(following(due, now), next, "{due} {now}");
        }
    }

    #[test]
    fn frames_of_the_systems_clock_are_a_period_apart_and_an_error_ends_them() {
        // As a user without rights no packet socket can be opened.
        let Ok(publisher) = Publisher::open("lo") else { return };
        let begun = Instant::now();
        let mut told = Vec::new();
        publisher
            .by_clock(5, |frames| {
                told.push(frames);
                Ok::<(), ClientError>(())
            })
            .unwrap();
        assert_eq!(told, [1, 2, 3, 4, 5]);
        assert!(begun.elapsed() >= Duration::from_nanos(4 * PERIOD_NS));
        assert_eq!(publisher.by_clock(5, |frames| if frames < 3 { Ok(()) } else { Err(frames) }), Err(3));
        assert!(Publisher::open("no-such-nic").is_err());
    }
}
