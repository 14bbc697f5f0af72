//! Datagrams at a steady rate: the flood of `small-packets` and `large-packets`.

use std::net::UdpSocket;
use std::thread;
use std::time::{Duration, Instant};

/// iperf3's port.
pub(crate) const PORT: u16 = 5_201;
/// Payload of a small datagram, bytes. iperf3 cannot send 1 byte, and both sizes are the same frame of minimum length.
pub(crate) const SMALL: u16 = 16;
/// Largest payload of a datagram in one frame with an MTU of 1,500, bytes.
pub(crate) const LARGE: u16 = 1_472;
/// Datagrams per second of the clients' time to each VM.
pub(crate) const RATE: u32 = 200_000;
/// Maximum of datagrams in a row, between two sleeps of a millisecond: the capacity of a tap's queue. A sender that did
/// not get the CPU catches up with this many.
const BURST: u128 = 1_000;

/// A socket for datagrams to [`PORT`] of this IP address.
pub(crate) fn socket(address: &str) -> std::io::Result<UdpSocket> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.connect((address, PORT))?;
    Ok(socket)
}

/// Sends datagrams with a payload of `bytes`, [`RATE`] per second of this process's clock, until `stop` returns true.
pub(crate) fn send(socket: &UdpSocket, bytes: u16, stop: impl Fn() -> bool) {
    let payload = vec![0; usize::from(bytes)];
    let mut last = Instant::now();
    while !stop() {
        thread::sleep(Duration::from_millis(1));
        let due = last.elapsed().as_micros() * u128::from(RATE) / 1_000_000;
        last = Instant::now();
        for _ in 0..due.min(BURST) {
            // A VM with free CPU time answers "port unreachable", and a full queue drops. Neither ends the flood.
            let _ = socket.send(&payload);
        }
    }
}
