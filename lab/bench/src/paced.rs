//! An open loop: sends datagrams at a steady rate, whether or not replies arrive.
//!
//! In: a [`Paced`] load. Out: datagrams on the wire. Losses and the actual rate are read from the captures.
//!
//! The sender keeps the rate by its own clock, and catches up with at most [`BURST`] datagrams at once if its machine
//! is late.

use std::net::{SocketAddr, UdpSocket};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::client::{self, ClientError};
use crate::sockperf;

/// Maximum of datagrams in a row. A NIC's ring holds many times as many.
pub(crate) const BURST: u64 = 16;
/// Shortest time to sleep between two datagrams.
const SLEEP: Duration = Duration::from_micros(50);

/// The load to send.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Paced {
    /// The server.
    pub server: SocketAddr,
    /// Size of a message, bytes, [`sockperf::HEADER`] to [`sockperf::LONGEST`].
    pub message_bytes: usize,
    /// Datagrams a second.
    pub rate: f64,
    /// Number of datagrams.
    pub count: u64,
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

    /// Sends all datagrams. `go_on` is called repeatedly with their number so far, and may end the load.
    pub fn send(&self, go_on: impl FnMut(u64) -> ControlFlow<()>) -> Result<(), ClientError> {
        let start = Instant::now();
        self.send_by(|| start.elapsed().as_nanos() as u64, go_on)
    }

    /// `clock` returns the time, ns.
    fn send_by(
        &self,
        mut clock: impl FnMut() -> u64,
        mut go_on: impl FnMut(u64) -> ControlFlow<()>,
    ) -> Result<(), ClientError> {
        let mut sender = Sender::open(self)?;
        let mut started = (clock(), 0_u64);
        while sender.sent < self.count {
            let now = clock();
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
            std::thread::sleep(gap.clamp(SLEEP, Duration::from_millis(2)));
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A clock that advances by a step each time it is read.
    fn steps(step: u64) -> impl FnMut() -> u64 {
        let mut now = 0;
        move || {
            now += step;
            now
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
        load(server.local_addr().unwrap(), 10).send_by(steps(2_000_000), each).unwrap();
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
        load(server.local_addr().unwrap(), 100).send_by(steps(1_000_000_000), each).unwrap();
        assert_eq!((most, last), (BURST, 100));
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
