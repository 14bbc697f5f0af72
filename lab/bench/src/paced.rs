//! An open loop: sends datagrams at a steady rate, whether or not replies arrive.
//!
//! In: a [`Paced`] load. Out: datagrams on the wire. Losses and the actual rate are read from the captures.
//!
//! On the real clock the sender keeps the rate, and catches up with at most [`BURST`] datagrams at once if its machine
//! is late. It cannot follow a clock that counts instructions. There the emulator keeps the rate: it releases the
//! packets that have arrived at the NIC at fixed times of its own clock ([`Pace`]). The sender provides the datagrams
//! of the next release as soon as the capture shows those of the last one. If it is too late, a release passes without
//! datagrams, which is a gap and never a burst.

use std::net::{SocketAddr, UdpSocket};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::client::{self, ClientError};
use crate::clock::{Clock, RealClock};
use crate::frame::{Frame, parse};
use crate::pcap::{PcapError, Tail};
use crate::sockperf;

/// Maximum of datagrams in a row. A NIC's ring holds many times as many.
pub(crate) const BURST: u64 = 16;
/// Releases per second of the emulated host's time, unless bursts would become too long. On a real machine, a
/// millisecond of that time is long enough to prepare the next datagrams.
const RELEASES: f64 = 1_000.0;
/// Real time after which a datagram that no capture shows counts as lost on the way to the NIC.
const UNSEEN: Duration = Duration::from_secs(10);
/// Real time between reads of the capture.
const LOOK: Duration = Duration::from_micros(50);

/// The load to send.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Paced {
    /// The server.
    pub server: SocketAddr,
    /// Size of a message, bytes, [`sockperf::HEADER`] to [`sockperf::LONGEST`].
    pub message_bytes: usize,
    /// Datagrams a second, on the clock of the host under test.
    pub rate: f64,
    /// Number of datagrams.
    pub count: u64,
}

/// A rate as the release times of an emulated host's NIC: a number of datagrams at each release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pace {
    /// Datagrams, 1 to [`BURST`].
    pub burst: u64,
    /// Time between two releases, us of the emulated host's clock.
    pub every_us: u32,
}

impl Pace {
    /// The pace for this number of datagrams per second.
    pub(crate) fn of(rate: f64) -> Self {
        let burst = (rate / RELEASES).ceil().clamp(1.0, BURST as f64);
        Self { burst: burst as u64, every_us: (burst / rate * 1e6).round().clamp(1.0, f64::from(u32::MAX)) as u32 }
    }
}

impl Paced {
    /// Returns an error if the load is invalid.
    pub fn check(&self) -> Result<(), ClientError> {
        let Self { message_bytes, rate, .. } = self;
        if (sockperf::HEADER..=sockperf::LONGEST).contains(message_bytes) && rate.is_finite() && *rate > 0.0 {
            return Ok(());
        }
        Err(ClientError::Config(format!("no load: messages of {message_bytes} bytes, {rate} a second")))
    }

    /// Sends by the real clock. `go_on` is called repeatedly, and may end the load.
    pub fn send(&self, go_on: impl FnMut(u64) -> ControlFlow<()>) -> Result<(), ClientError> {
        self.send_by(&mut RealClock::default(), go_on)
    }

    /// Sends to an emulated host that releases arrivals by [`Pace::of`] this rate. `nic` is its NIC's capture.
    pub(crate) fn send_by_releases(
        &self,
        nic: &Path,
        go_on: impl FnMut(u64) -> ControlFlow<()>,
    ) -> Result<(), ClientError> {
        let mut seen = Seen::at_end(nic, self.server.port())?;
        self.send_as_seen(|sent| seen.of(sent), go_on)
    }

    fn send_by(&self, clock: &mut dyn Clock, mut go_on: impl FnMut(u64) -> ControlFlow<()>) -> Result<(), ClientError> {
        let mut sender = Sender::open(self)?;
        let mut started = (clock.now_ns()?, 0_u64);
        while sender.sent < self.count {
            let now = clock.now_ns()?;
            let due = started.1 + (now.saturating_sub(started.0) as f64 * self.rate / 1e9) as u64;
            if due > sender.sent + BURST {
                // Older missed datagrams stay missed: a burst of all of them would be a different load.
                started = (now, sender.sent + BURST);
            }
            sender.send_up_to(due.min(sender.sent + BURST).min(self.count));
            if go_on(sender.sent).is_break() {
                break;
            }
            let gap = Duration::from_nanos((1e9 / self.rate) as u64);
            std::thread::sleep(gap.clamp(LOOK, Duration::from_millis(2)));
        }
        Ok(())
    }

    /// `seen` returns how many of the sent datagrams have reached the NIC.
    fn send_as_seen(
        &self,
        mut seen: impl FnMut(u64) -> Result<u64, PcapError>,
        mut go_on: impl FnMut(u64) -> ControlFlow<()>,
    ) -> Result<(), ClientError> {
        let mut sender = Sender::open(self)?;
        let burst = Pace::of(self.rate).burst;
        while sender.sent < self.count {
            if seen(sender.sent)? >= sender.sent {
                sender.send_up_to((sender.sent + burst).min(self.count));
            }
            if go_on(sender.sent).is_break() {
                break;
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }
}

/// A socket, and the number of datagrams that it has sent.
struct Sender {
    socket: UdpSocket,
    message: Vec<u8>,
    sent: u64,
}

impl Sender {
    fn open(load: &Paced) -> Result<Self, ClientError> {
        load.check()?;
        Ok(Self { socket: client::connected(load.server)?, message: vec![0; load.message_bytes], sent: 0 })
    }

    fn send_up_to(&mut self, up_to: u64) {
        while self.sent < up_to {
            self.sent += 1;
            sockperf::write_request(&mut self.message, self.sent);
            // A full queue drops, and a missing server causes "port unreachable". The capture shows both.
            let _ = self.socket.send(&self.message);
        }
    }
}

/// The datagrams that the capture of the server's NIC has shown.
struct Seen {
    tail: Tail,
    port: u16,
    count: u64,
    changed: Instant,
}

impl Seen {
    fn at_end(nic: &Path, port: u16) -> Result<Self, PcapError> {
        Ok(Self { tail: Tail::open_at_end(nic)?, port, count: 0, changed: Instant::now() })
    }

    /// The number of datagrams shown, of `sent` datagrams.
    fn of(&mut self, sent: u64) -> Result<u64, PcapError> {
        let (port, before) = (self.port, self.count);
        let count = &mut self.count;
        self.tail.read_new(|record| {
            *count += u64::from(matches!(parse(&record), Some(Frame::Udp(datagram)) if datagram.to.port() == port));
        })?;
        if self.count != before || self.count >= sent {
            self.changed = Instant::now();
        } else if self.changed.elapsed() > UNSEEN {
            (self.count, self.changed) = (sent, Instant::now());
        }
        Ok(self.count.min(sent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A clock that advances by a step each time it is read.
    struct Steps(u64, u64);

    impl Clock for Steps {
        fn now_ns(&mut self) -> Result<u64, PcapError> {
            self.0 += self.1;
            Ok(self.0)
        }
        fn scale(&self) -> f64 {
            1e-3
        }
        fn patience(&self) -> Duration {
            Duration::from_millis(1)
        }
    }

    fn load(server: SocketAddr, count: u64) -> Paced {
        Paced { server, message_bytes: 18, rate: 1_000.0, count }
    }

    #[test]
    fn it_sends_at_its_rate_and_makes_good_for_a_burst_at_most() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        server.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        // 2 ms per reading: two datagrams each.
        let mut sent = Vec::new();
        let each = |count| {
            sent.push(count);
            ControlFlow::Continue(())
        };
        load(server.local_addr().unwrap(), 10).send_by(&mut Steps(0, 2_000_000), each).unwrap();
        assert_eq!(sent, [2, 4, 6, 8, 10]);
        let mut buffer = [0; 100];
        for number in 1..=10_u64 {
            assert_eq!(server.recv(&mut buffer).unwrap(), 18);
            assert_eq!(buffer[..8], number.to_be_bytes());
        }
        // One second per reading: a thousand datagrams would be due.
        let mut most = 0;
        let mut last = 0;
        let each = |count| {
            most = most.max(count - last);
            last = count;
            ControlFlow::Continue(())
        };
        load(server.local_addr().unwrap(), 100).send_by(&mut Steps(0, 1_000_000_000), each).unwrap();
        assert_eq!((most, last), (BURST, 100));
    }

    #[test]
    fn a_rate_is_so_many_datagrams_at_each_release() {
        for (rate, burst, every_us) in [
            (1_000.0, 1, 1_000),
            (250.0, 1, 4_000),
            (1_001.0, 2, 1_998),
            (16_000.0, 16, 1_000),
            (64_000.0, 16, 250),
            (1e9, 16, 1),
            (1e-9, 1, u32::MAX),
        ] {
            assert_eq!(Pace::of(rate), Pace { burst, every_us }, "{rate}");
        }
    }

    #[test]
    fn the_next_datagrams_wait_until_the_nic_has_shown_the_last_ones() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let (mut looks, mut last) = (0_u64, 0);
        // The emulator releases all packets at every sixth reading, and once only some of them.
        let seen = |sent: u64| {
            looks += 1;
            Ok(if looks % 6 == 0 {
                sent.saturating_sub(u64::from(looks == 12))
            } else {
                sent.saturating_sub(1).min(sent / 2)
            })
        };
        let mut bursts = Vec::new();
        let each = |count| {
            if count > last {
                bursts.push(count - last);
                last = count;
            }
            ControlFlow::Continue(())
        };
        let load = Paced { rate: 4_000.0, ..load(server.local_addr().unwrap(), 10) };
        load.send_as_seen(seen, each).unwrap();
        assert_eq!((bursts, last), (vec![4, 4, 2], 10));
        assert!(looks > 12, "it did not wait");
    }

    #[test]
    fn what_is_no_load_is_refused() {
        let server = "127.0.0.1:9".parse().unwrap();
        for wrong in [
            Paced { rate: 0.0, ..load(server, 1) },
            Paced { rate: f64::NAN, ..load(server, 1) },
            Paced { message_bytes: 13, ..load(server, 1) },
        ] {
            assert!(matches!(wrong.send(|_| ControlFlow::Continue(())), Err(ClientError::Config(_))), "{wrong:?}");
        }
    }
}
