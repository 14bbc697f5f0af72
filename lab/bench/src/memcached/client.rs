//! The client: sends requests over one TCP connection, or over several in turn, and checks every answer.
//!
//! In: the server. Out: requests on the wire, at the times that [`client::run_with`](crate::client::run_with) decides.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{KEYS, STORED, Traffic};
use crate::client::{ClientError, Peer, ReplyOutcome, is_timeout};

/// Limit of the real time for connecting, and for an answer while keys are stored: an emulated host under flood is
/// slow.
const PATIENCE: Duration = Duration::from_secs(30);
/// Limit of the time until the server listens.
const STARTS_WITHIN: Duration = Duration::from_secs(300);
/// Time between two attempts to connect.
const RETRY: Duration = Duration::from_millis(500);
/// Length of a wrong answer in messages, bytes.
const TOLD: usize = 60;

/// Connections to a memcached.
#[derive(Debug)]
pub struct Client {
    server: SocketAddr,
    traffic: Traffic,
    streams: Vec<TcpStream>,
    /// The connection of the last request.
    current: usize,
    mix: ChaCha8Rng,
    /// The position of the SET among the requests of a group.
    set_at: u64,
    expected: Vec<u8>,
    received: Vec<u8>,
}

impl Client {
    /// Connects, and stores a value for every key.
    ///
    /// # Errors
    /// [`ClientError::Socket`] if nothing listens yet, [`ClientError::Answer`].
    pub fn open(server: SocketAddr, traffic: Traffic, connections: u8, seed: u64) -> Result<Self, ClientError> {
        let mut client = Self::connect(server, traffic, connections, seed)?;
        client.store()?;
        Ok(client)
    }

    /// Connects only: another client has stored the values.
    ///
    /// # Errors
    /// [`ClientError::Socket`].
    pub fn connect(server: SocketAddr, traffic: Traffic, connections: u8, seed: u64) -> Result<Self, ClientError> {
        let streams = (0..connections.max(1)).map(|_| connect(server)).collect::<Result<_, _>>()?;
        let mix = ChaCha8Rng::seed_from_u64(seed);
        let (expected, received) = (Vec::new(), Vec::new());
        Ok(Self { server, traffic, streams, current: 0, mix, set_at: 0, expected, received })
    }

    /// As [`Self::open`], again and again until the server listens. `go_on` is called before each attempt.
    ///
    /// # Errors
    /// See [`Self::open`]; what `go_on` returns.
    pub fn open_when_up<E: From<ClientError>>(
        server: SocketAddr,
        traffic: Traffic,
        connections: u8,
        seed: u64,
        mut go_on: impl FnMut() -> Result<(), E>,
    ) -> Result<Self, E> {
        let start = Instant::now();
        loop {
            go_on()?;
            match Self::open(server, traffic, connections, seed) {
                Err(ClientError::Socket { .. }) if start.elapsed() < STARTS_WITHIN => thread::sleep(RETRY),
                opened => return Ok(opened?),
            }
        }
    }

    /// Stores a value for every key.
    fn store(&mut self) -> Result<(), ClientError> {
        let (server, traffic) = (self.server, self.traffic);
        for number in 0..KEYS {
            let sent = self.send(&traffic.set(number), STORED.to_vec());
            // In the worst case the answer arrives byte by byte.
            let outcome = STORED
                .iter()
                .map(|_| self.wait_reply(0, PATIENCE))
                .find(|outcome| !matches!(outcome, Ok(ReplyOutcome::Nothing)));
            match outcome {
                Some(Err(error)) => return Err(error),
                Some(Ok(ReplyOutcome::Answer)) if sent => {}
                _ => return Err(ClientError::NoReply { server, requests: 1, report: Box::default() }),
            }
        }
        Ok(())
    }

    /// Sends through the next connection. Returns whether the system accepted the data.
    fn send(&mut self, request: &[u8], expected: Vec<u8>) -> bool {
        self.current = (self.current + 1) % self.streams.len();
        self.expected = expected;
        self.received.clear();
        self.streams.get_mut(self.current).is_some_and(|stream| stream.write_all(request).is_ok())
    }
}

impl Peer for Client {
    fn ask(&mut self, sequence: u64) -> Result<bool, ClientError> {
        let traffic = self.traffic;
        let is_set = traffic.set_of.is_some_and(|of| {
            let place = sequence.saturating_sub(1) % of.max(1);
            if place == 0 {
                self.set_at = self.mix.random_range(0..of.max(1));
            }
            place == self.set_at
        });
        let number = self.mix.random_range(0..KEYS);
        Ok(if is_set {
            self.send(&traffic.set(number), STORED.to_vec())
        } else {
            self.send(&traffic.get(number), traffic.get_answer(number))
        })
    }

    fn wait_reply(&mut self, _: u64, limit: Duration) -> Result<ReplyOutcome, ClientError> {
        let Some(stream) = self.streams.get_mut(self.current) else { return Ok(ReplyOutcome::Refused) };
        let address = self.server;
        let error = |source| ClientError::Socket { what: "set a receive timeout for", address, source };
        stream.set_read_timeout(Some(limit)).map_err(error)?;
        let mut buffer = [0; 2_048];
        match stream.read(&mut buffer) {
            Ok(0) => return Ok(ReplyOutcome::Refused),
            Ok(length) => self.received.extend_from_slice(buffer.get(..length).unwrap_or_default()),
            Err(error) if is_timeout(&error) => return Ok(ReplyOutcome::Nothing),
            Err(_) => return Ok(ReplyOutcome::Refused),
        }
        if self.received == self.expected {
            Ok(ReplyOutcome::Answer)
        } else if self.expected.starts_with(&self.received) {
            Ok(ReplyOutcome::Nothing)
        } else {
            let said = self.received.get(..TOLD).unwrap_or(&self.received);
            Err(ClientError::Answer { server: address, said: String::from_utf8_lossy(said).into_owned() })
        }
    }

    /// A late answer must not count as that of the next request, so a new connection replaces this one.
    fn give_up(&mut self) -> Result<(), ClientError> {
        if let Some(stream) = self.streams.get_mut(self.current) {
            *stream = connect(self.server)?;
        }
        Ok(())
    }
}

fn connect(address: SocketAddr) -> Result<TcpStream, ClientError> {
    let error = |source| ClientError::Socket { what: "connect to", address, source };
    let stream = TcpStream::connect_timeout(&address, PATIENCE).map_err(error)?;
    stream.set_nodelay(true).map_err(error)?;
    stream.set_write_timeout(Some(PATIENCE)).map_err(error)?;
    Ok(stream)
}
