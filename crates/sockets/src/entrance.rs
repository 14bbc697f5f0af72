//! The socket at which QEMU connects to one device. No message of a process is read before the process is admitted.
//!
//! vhost-user-backend accepts a connection itself and reads its messages at once: a hostile process could send memory
//! that ends or blocks this process when it is used. The daemon therefore starts with a connection that this process
//! has made to its own socket, before any other process could connect. QEMU's connection is accepted here, checked,
//! and then put in the place of the first one (dup3(2)).

use std::io::{self, Write};
use std::mem::ManuallyDrop;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::io::DupFlags;
use rustix::process::{Resource, getrlimit};
use vhost::vhost_user::Listener;
use vhost::vhost_user::message::FrontendReq;

/// Highest descriptor number that is searched.
const DESCRIPTORS: u64 = 1 << 20;
/// The protocol's version, in a message's flags.
const VERSION: u32 = 1;

/// A device's socket, and the first connection to it.
pub(crate) struct Entrance {
    pub listener: UnixListener,
    path: PathBuf,
    own: UnixStream,
}

impl Entrance {
    /// Makes the first connection. No other process may be able to connect yet.
    ///
    /// # Errors
    /// Those of connect(2).
    pub(crate) fn new(listener: UnixListener, path: &Path) -> io::Result<Self> {
        Ok(Self { listener, path: path.to_owned(), own: UnixStream::connect(path)? })
    }

    /// The socket for the daemon, which accepts the first connection.
    ///
    /// # Errors
    /// Those of dup(2).
    pub(crate) fn for_daemon(&self) -> io::Result<Listener> {
        self.listener.try_clone().map(Listener::from)
    }

    /// The descriptors with which the daemon holds the first connection. vhost-user-backend does not expose them, but
    /// an accepted socket has its listener's name. Called before another connection is accepted.
    ///
    /// # Errors
    /// ENOENT if there is none.
    pub(crate) fn places(&self) -> io::Result<Vec<RawFd>> {
        let most = getrlimit(Resource::Nofile).current.unwrap_or(DESCRIPTORS).min(DESCRIPTORS) as RawFd;
        let places: Vec<RawFd> = (0..most).filter(|fd| is_connection(*fd, &self.path)).collect();
        if places.is_empty() { Err(io::ErrorKind::NotFound.into()) } else { Ok(places) }
    }

    /// Puts a connection in the place of the first one: the daemon now reads its messages.
    ///
    /// # Errors
    /// Those of dup3(2).
    pub(crate) fn let_in(mut self, connection: UnixStream, places: &[RawFd]) -> io::Result<()> {
        for place in places {
            // SAFETY: the daemon owns the descriptor and keeps it open while the first connection lives, so the number
            // is the daemon's. It is a stream socket of the same family before and after, and is not closed here.
            let mut place = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(*place) });
            rustix::io::dup3(&connection, &mut place, DupFlags::CLOEXEC)?;
        }
        // The daemon's thread most likely waits in recvmsg(2) for the first connection. A message without effect and
        // without an answer ends that; the next recvmsg(2) is for QEMU's connection. If the thread was not waiting yet,
        // the first connection is closed, and writing fails.
        let message = [u32::from(FrontendReq::RESET_OWNER), VERSION, 0].map(u32::to_ne_bytes);
        let _ = self.own.write(message.as_flattened());
        // The listener is closed last: a process that is refused here knows that the other descriptors are closed.
        drop((connection, self.own));
        drop(self.listener);
        Ok(())
    }
}

fn is_connection(fd: RawFd, path: &Path) -> bool {
    // SAFETY: the number is only borrowed for two calls, which fail for a closed descriptor.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    let name = rustix::net::getsockname(socket).ok().and_then(|name| rustix::net::SocketAddrUnix::try_from(name).ok());
    let named = name.as_ref().and_then(|name| name.path_bytes()) == Some(path.as_os_str().as_encoded_bytes());
    named && rustix::net::sockopt::socket_acceptconn(socket) == Ok(false)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_connection_takes_the_place_of_the_first() {
        let directory = tempfile::tempdir().unwrap();
        let [path, beside] = ["a.sock", "b.sock"].map(|name| directory.path().join(name));
        let [entrance, other] =
            [&path, &beside].map(|path| Entrance::new(UnixListener::bind(path).unwrap(), path).unwrap());
        let _other = other.for_daemon().unwrap().accept().unwrap();
        assert!(entrance.places().is_err(), "not accepted yet");
        let mut daemons = entrance.for_daemon().unwrap().accept().unwrap().unwrap();
        let mut copy = daemons.try_clone().unwrap();
        let places = entrance.places().unwrap();
        assert_eq!(places.len(), 2);
        let mut waiting = daemons.try_clone().unwrap();
        let mut qemu = UnixStream::connect(&path).unwrap();
        qemu.write_all(b"qemu").unwrap();
        let (accepted, _) = entrance.listener.accept().unwrap();
        entrance.let_in(accepted, &places).unwrap();
        let mut seen = [0; 12];
        waiting.read_exact(&mut seen).unwrap();
        assert_eq!(seen, *[4u32, 1, 0].map(u32::to_ne_bytes).as_flattened(), "it wakes the thread that waits");
        daemons.read_exact(&mut seen[..4]).unwrap();
        assert_eq!(&seen[..4], b"qemu");
        copy.shutdown(std::net::Shutdown::Both).unwrap();
        assert_eq!(qemu.read(&mut seen).unwrap(), 0, "both descriptors are QEMU's connection");
        assert_eq!(copy.read(&mut seen).unwrap(), 0);
    }
}
