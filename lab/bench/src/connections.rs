//! The clients of experiment `connections`: TCP connections to a memcached with one request each.
//!
//! In: [`Connecting`]. Out: connections on the wire, as fast as possible.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::client::ClientError;

/// A client's request, and the answer (memcached's text protocol).
const REQUEST: &[u8] = b"get nothing\r\n";
pub(crate) const ANSWER: &[u8] = b"END\r\n";
/// Limit of the time of a connection, and until the server listens.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time between two attempts to reach the server.
const RETRY: Duration = Duration::from_millis(200);

/// The connections to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Connecting {
    pub(crate) server: SocketAddr,
    /// Number of connections.
    pub(crate) count: u64,
    /// Number of clients at a time.
    pub(crate) clients: u32,
}

impl Connecting {
    /// Makes all connections. If only one is asked for, waits until the server listens.
    pub(crate) fn make(&self) -> Result<(), ClientError> {
        let made = if self.count == 1 { self.first() } else { self.all() };
        made.map_err(|error| {
            ClientError::Told(format!("a connection to memcached at {}: {error}; check that it runs", self.server))
        })
    }

    fn first(&self) -> io::Result<()> {
        let start = Instant::now();
        loop {
            match self.ask() {
                Err(_) if start.elapsed() < PATIENCE => thread::sleep(RETRY),
                asked => return asked,
            }
        }
    }

    fn all(&self) -> io::Result<()> {
        let begun = AtomicU64::new(0);
        let client = || {
            while begun.fetch_add(1, Ordering::Relaxed) < self.count {
                self.ask()?;
            }
            Ok(())
        };
        thread::scope(|scope| {
            let clients: Vec<_> = (0..self.clients).map(|_| scope.spawn(client)).collect();
            let ended = |client: thread::ScopedJoinHandle<'_, io::Result<()>>| {
                client.join().unwrap_or_else(|_| Err(io::Error::other("a client's thread panicked")))
            };
            // The scope waits for the other clients too.
            clients.into_iter().try_for_each(ended)
        })
    }

    /// Makes one connection, from its first packet until its end has been sent.
    fn ask(&self) -> io::Result<()> {
        let mut stream = TcpStream::connect_timeout(&self.server, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(REQUEST)?;
        let mut answer = [0; ANSWER.len()];
        stream.read_exact(&mut answer)?;
        if answer == *ANSWER { Ok(()) } else { Err(io::Error::new(io::ErrorKind::InvalidData, "another answer")) }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn each_connection_has_one_request_and_a_wrong_answer_is_told() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = listener.local_addr().unwrap();
        let served = thread::spawn(move || {
            let mut served = 0;
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut request = [0; REQUEST.len()];
                if stream.read_exact(&mut request).is_err() {
                    return served;
                }
                served += 1;
                stream.write_all(if served <= 21 { ANSWER } else { b"WHAT?" }).unwrap();
            }
            served
        });
        Connecting { server, count: 1, clients: 1 }.make().unwrap();
        Connecting { server, count: 20, clients: 3 }.make().unwrap();
        let error = Connecting { server, count: 2, clients: 1 }.make().unwrap_err().to_string();
        assert!(error.contains(&server.to_string()) && error.contains("another answer"), "{error}");
        // A connection without a request ends the server.
        drop(TcpStream::connect(server).unwrap());
        assert_eq!(served.join().unwrap(), 22);
    }
}
