//! The publisher, outside the host: sends one frame per period, never two at once.
//!
//! In: the number of frames. Out: frames on the wire. On the virtual clock the emulator releases the packets that wait
//! at the RT NIC once per period. The publisher provides the next frame as soon as the last one is in the capture, so
//! that each release has one frame. If this machine is too busy, a release passes without a frame: a gap, never a
//! burst. The capture shows the actual gaps.

use std::mem::size_of;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::netdevice::name_to_index;
use rustix::net::{AddressFamily, SendFlags, SocketType, send, socket};

use super::frame::{self, PERIOD_NS, Way};
use crate::client::ClientError;
use crate::host::{Host, MeasureError};
use crate::pcap::Tail;
use crate::schema::Clock;
use crate::workload::Load;

/// Real time within which a sent frame must be released.
const LIMIT: Duration = Duration::from_secs(120);

/// A raw socket on the RT network.
#[derive(Debug)]
pub struct Publisher {
    socket: OwnedFd,
}

impl Publisher {
    /// Opens a socket on the client's interface.
    pub fn open(nic: &str) -> Result<Self, ClientError> {
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

    /// Publishes `load.requests` frames, by the host's clock.
    pub fn run(&self, host: &mut Host, load: &Load<'_>, progress: &mut dyn FnMut(&str)) -> Result<(), MeasureError> {
        let mut wire = match load.captures.first() {
            Some(capture) if host.clock == Clock::Virtual => Some(Wire::at_end(capture)?),
            _ => None,
        };
        let (mut looked, mut told, start) = (Instant::now(), Instant::now(), Instant::now());
        for number in 0..load.requests {
            self.publish(number);
            let sent = Instant::now();
            loop {
                let next = match &mut wire {
                    Some(wire) => wire.has(number)?,
                    None => start.elapsed() >= Duration::from_nanos(PERIOD_NS) * (number + 1) as u32,
                };
                if next {
                    break;
                }
                if looked.elapsed() > Duration::from_millis(200) {
                    looked = Instant::now();
                    host.alive()?;
                }
                if sent.elapsed() > LIMIT {
                    let said = format!("frame {number} was not released within {} s", LIMIT.as_secs());
                    return Err(MeasureError::Program { program: "the publisher".to_owned(), said });
                }
                thread::sleep(Duration::from_micros(100));
            }
            if told.elapsed() > Duration::from_secs(5) {
                told = Instant::now();
                progress(&format!("{}: {} frames", load.name, number + 1));
            }
        }
        // Frames in flight are answered meanwhile.
        host.shell("sleep 0.3").map(|_| ())
    }
}

/// The growing capture of the RT NIC.
struct Wire {
    tail: Tail,
    latest: Option<u64>,
}

impl Wire {
    fn at_end(capture: &Path) -> Result<Self, MeasureError> {
        let mut tail = Tail::open(capture)?;
        tail.read_new(|_| {})?;
        Ok(Self { tail, latest: None })
    }

    /// Whether frame `number` has been released.
    fn has(&mut self, number: u64) -> Result<bool, MeasureError> {
        let latest = &mut self.latest;
        self.tail.read_new(|record| {
            if let Some(Ok((Way::Published, number))) = frame::read(record.data) {
                *latest = Some(number);
            }
        })?;
        Ok(*latest >= Some(number))
    }
}
