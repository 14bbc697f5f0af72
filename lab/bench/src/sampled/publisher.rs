//! The publisher: sends one frame per period, never two at once.
//!
//! In: the number of frames. Out: frames on the wire. The publisher keeps the period by its own clock. If it is late, a
//! period passes without a frame: a gap, never a burst. The capture shows the actual gaps.

use std::mem::size_of;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::netdevice::name_to_index;
use rustix::net::{AddressFamily, SendFlags, SocketType, send, socket};

use super::frame::{self, PERIOD_NS};
use crate::client::ClientError;

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

    /// Publishes `frames` frames. `go_on` gets the number of frames so far, and may end the run by an error.
    pub(crate) fn run<E>(&self, frames: u64, mut go_on: impl FnMut(u64) -> Result<(), E>) -> Result<(), E> {
        let (start, mut due_ns) = (Instant::now(), 0);
        for number in 0..frames {
            self.publish(number);
            go_on(number + 1)?;
            due_ns = following(due_ns, start.elapsed().as_nanos() as u64);
            thread::sleep(Duration::from_nanos(due_ns).saturating_sub(start.elapsed()));
        }
        Ok(())
    }
}

/// The next time for a frame, ns since the start: a whole number of periods after `due`, and after `now`. A publisher
/// that was late leaves a gap.
fn following(due: u64, now: u64) -> u64 {
    due + PERIOD_NS * (now.saturating_sub(due) / PERIOD_NS + 1)
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
            .run(5, |frames| {
                told.push(frames);
                Ok::<(), ClientError>(())
            })
            .unwrap();
        assert_eq!(told, [1, 2, 3, 4, 5]);
        assert!(begun.elapsed() >= Duration::from_nanos(4 * PERIOD_NS));
        assert_eq!(publisher.run(5, |frames| if frames < 3 { Ok(()) } else { Err(frames) }), Err(3));
        assert!(Publisher::open("no-such-nic").is_err());
    }
}
