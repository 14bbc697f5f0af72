//! The lab's end of the agent's port: a thread reads, and the lab waits with a time limit.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::{Reply, Request};
use crate::error::{LabError, file};

/// The connection to an agent.
#[derive(Debug)]
pub struct Connection {
    writer: UnixStream,
    replies: Receiver<Reply>,
    heard: Instant,
    /// Whether the machine's time stands still while no command runs.
    stops: bool,
    /// Whether it stands still.
    stands: bool,
}

impl Connection {
    /// Connects to the port's socket, which the emulator has made. `stops`: the machine's time stands still while no
    /// command runs.
    ///
    /// # Errors
    /// The socket does not exist (yet).
    pub fn open(path: &Path, stops: bool) -> Result<Self, LabError> {
        let writer = UnixStream::connect(path).map_err(file("connect to", path))?;
        let reader = BufReader::new(writer.try_clone().map_err(file("connect to", path))?);
        let (sender, replies) = channel();
        thread::spawn(move || {
            for line in reader.lines().map_while(Result::ok) {
                // Lines that are not replies are noise from the port's opening during boot.
                let Ok(reply) = serde_json::from_str(&line) else { continue };
                if sender.send(reply).is_err() {
                    break;
                }
            }
        });
        Ok(Self { writer, replies, heard: Instant::now(), stops, stands: false })
    }

    /// Sends a request.
    ///
    /// # Errors
    /// The emulator has ended.
    pub fn send(&mut self, request: &Request) -> Result<(), LabError> {
        let mut line = serde_json::to_vec(request).map_err(|error| LabError::Protocol(error.to_string()))?;
        line.push(b'\n');
        if std::mem::take(&mut self.stands) {
            self.heard = Instant::now();
        }
        self.writer.write_all(&line).map_err(|error| LabError::Protocol(format!("the emulator has gone: {error}")))
    }

    /// The next reply within `limit`, if there is one.
    pub fn next(&mut self, limit: Duration) -> Option<Reply> {
        match self.replies.recv_timeout(limit) {
            Ok(reply) => {
                self.heard = Instant::now();
                if let Reply::Ready { idle, .. } | Reply::Exit { idle, .. } = &reply {
                    self.stands = self.stops && *idle;
                }
                Some(reply)
            }
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                // The emulator has ended; the caller sees its exit status.
                thread::sleep(limit.min(Duration::from_millis(50)));
                None
            }
        }
    }

    /// Time since the agent's last message, or since the machine's time goes on. Nothing while it stands still.
    pub fn silence(&self) -> Duration {
        if self.stands { Duration::ZERO } else { self.heard.elapsed() }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_machine_whose_time_stands_still_is_not_silent() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&path).unwrap();
        for (stops, idle) in [(true, true), (true, false), (false, true)] {
            let mut connection = Connection::open(&path, stops).unwrap();
            let (mut agent, _) = listener.accept().unwrap();
            let reply = serde_json::to_string(&Reply::Exit { id: 1, status: 0, idle }).unwrap();
            writeln!(agent, "{reply}").unwrap();
            assert!(connection.next(Duration::from_secs(30)).is_some());
            thread::sleep(Duration::from_millis(2));
            assert_eq!(connection.silence().is_zero(), stops && idle);
            connection.send(&Request::PowerOff).unwrap();
            thread::sleep(Duration::from_millis(2));
            assert!(!connection.silence().is_zero());
        }
    }
}
