//! An open loop: datagrams at a steady rate, whether or not replies come.
//!
//! In: a [`Paced`] load and a [`Clock`]. Out: datagrams on the wire. What was lost, and the rate that it really was, the captures say: the
//! sender's machine may be late, and then makes good for at most [`BURST`] datagrams at once, which a NIC's ring holds many times. An emulator
//! that gets no CPU meanwhile would find all that was sent in one instant of its own: no more than [`BURST`] are out that the
//! capture of its NIC has not shown.

use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::client::{self, ClientError};
use crate::clock::{Clock, RealClock, VirtualClock};
use crate::frame::{Frame, parse};
use crate::pcap::{PcapError, Tail};
use crate::sockperf;

/// Datagrams in a row at most.
pub const BURST: u64 = 16;
/// Real time after which a datagram that no capture shows is taken for lost on the way there.
const UNSEEN: Duration = Duration::from_secs(10);

/// What to send.
#[derive(Debug, Clone, PartialEq)]
pub struct Paced {
    /// The server.
    pub server: SocketAddr,
    /// Size of a message, bytes, [`sockperf::HEADER`] to [`sockperf::LONGEST`].
    pub message_bytes: usize,
    /// Datagrams a second, on the clock of the host under test.
    pub rate: f64,
    /// So many in all.
    pub count: u64,
    /// Captures whose stamps are the host's clock, that of the server's NIC first; empty for the real clock.
    pub captures: Vec<PathBuf>,
    /// The first guess of real seconds a virtual second.
    pub scale: f64,
}

impl Paced {
    /// Sends. `go_on` is asked all the while and may end it.
    ///
    /// # Errors
    /// The configuration, a socket, a capture.
    pub fn send(&self, go_on: impl FnMut(u64) -> ControlFlow<()>) -> Result<(), ClientError> {
        let Some(nic) = self.captures.first() else {
            return self.send_on(&mut RealClock::default(), Ok, go_on);
        };
        let mut seen = Seen::at_end(nic, self.server.port())?;
        self.send_on(&mut VirtualClock::open(&self.captures, self.scale)?, |sent| seen.of(sent), go_on)
    }

    /// As [`Self::send`], on a given clock; `seen` says how many of those sent have got to the NIC.
    ///
    /// # Errors
    /// The configuration, a socket, the clock.
    pub fn send_on(
        &self,
        clock: &mut dyn Clock,
        mut seen: impl FnMut(u64) -> Result<u64, PcapError>,
        mut go_on: impl FnMut(u64) -> ControlFlow<()>,
    ) -> Result<(), ClientError> {
        if !(sockperf::HEADER..=sockperf::LONGEST).contains(&self.message_bytes)
            || !self.rate.is_finite()
            || self.rate <= 0.0
        {
            let Self { message_bytes, rate, .. } = self;
            return Err(ClientError::Config(format!("no load: messages of {message_bytes} bytes, {rate} a second")));
        }
        let socket = client::connected(self.server)?;
        let mut message = vec![0; self.message_bytes];
        let (start, mut sent) = (clock.now_ns()?, 0_u64);
        let mut started = (start, 0_u64);
        while sent < self.count {
            let now = clock.now_ns()?;
            let due = started.1 + (now.saturating_sub(started.0) as f64 * self.rate / 1e9) as u64;
            if due > sent + BURST {
                // What was missed longer ago stays missed: a burst of all of it would be another load.
                started = (now, sent + BURST);
            }
            let up_to = due.min(seen(sent)? + BURST).min(self.count);
            while sent < up_to {
                sent += 1;
                sockperf::write_request(&mut message, sent);
                // A full queue drops, and "port unreachable" comes back from a server that is not there; the capture tells.
                let _ = socket.send(&message);
            }
            if go_on(sent).is_break() {
                break;
            }
            let gap = Duration::from_nanos((1e9 / self.rate * clock.scale()) as u64);
            std::thread::sleep(gap.clamp(Duration::from_micros(50), Duration::from_millis(2)));
        }
        Ok(())
    }
}

/// What the capture of the server's NIC has shown of the datagrams.
struct Seen {
    tail: Tail,
    port: u16,
    count: u64,
    changed: Instant,
}

impl Seen {
    fn at_end(nic: &Path, port: u16) -> Result<Self, PcapError> {
        let mut tail = Tail::open(nic)?;
        tail.read_new(|_| {})?;
        Ok(Self { tail, port, count: 0, changed: Instant::now() })
    }

    /// How many, of so many that were sent.
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
    use std::net::UdpSocket;

    use super::*;

    /// A clock that goes on by a step each time it is looked at.
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
        Paced { server, message_bytes: 18, rate: 1_000.0, count, captures: Vec::new(), scale: 1.0 }
    }

    #[test]
    fn it_sends_at_its_rate_and_makes_good_for_a_burst_at_most() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        server.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        // 2 ms a look: two datagrams each.
        let mut sent = Vec::new();
        let each = |count| {
            sent.push(count);
            ControlFlow::Continue(())
        };
        load(server.local_addr().unwrap(), 10).send_on(&mut Steps(0, 2_000_000), Ok, each).unwrap();
        assert_eq!(sent, [2, 4, 6, 8, 10]);
        let mut buffer = [0; 100];
        for number in 1..=10_u64 {
            assert_eq!(server.recv(&mut buffer).unwrap(), 18);
            assert_eq!(buffer[..8], number.to_be_bytes());
        }
        // A second at a time: a thousand would be due.
        let mut most = 0;
        let mut last = 0;
        let each = |count| {
            most = most.max(count - last);
            last = count;
            ControlFlow::Continue(())
        };
        load(server.local_addr().unwrap(), 100).send_on(&mut Steps(0, 1_000_000_000), Ok, each).unwrap();
        assert_eq!((most, last), (BURST, 100));
    }

    #[test]
    fn no_more_is_out_than_a_burst_that_the_nic_has_not_shown() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let (mut looks, mut last) = (0_u64, 0);
        // The emulator stands for five looks, then takes all at once.
        let seen = |sent| {
            looks += 1;
            Ok(if looks % 6 == 0 { sent } else { 0 })
        };
        let each = |count| {
            assert!(count - last <= BURST, "{last} to {count}");
            last = count;
            ControlFlow::Continue(())
        };
        load(server.local_addr().unwrap(), 40).send_on(&mut Steps(0, 10_000_000), seen, each).unwrap();
        assert!(looks > 6, "it did not wait");
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
