//! Which process may connect as QEMU: a process of the configured user, and the same process for all devices of a VM.
//!
//! The sockets' mode lets in every process of QEMU's group, the QEMUs of other VMs included. The first process that is
//! admitted serves the VM. A second process that connects to one of its channels is refused, so that no other guest
//! becomes a part of this VM.

use std::fmt;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};

use crate::abi::Errno;
use crate::host;

/// The process at the other end of a connection, at the time when it connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Peer {
    process: i32,
    user: u32,
}

/// Why a process is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PeerError {
    /// It does not belong to the user that `qemu-user` names.
    User(u32),
    /// Another process has connected before.
    Process(i32),
}

impl fmt::Display for PeerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(user) => {
                write!(f, "qemu-user in sockets.toml is user {user}; run QEMU as that user, or correct qemu-user")
            }
            Self::Process(process) => {
                write!(f, "process {process} has the VM's other devices; give each VM a device process of its own")
            }
        }
    }
}

/// The admission of peers for one VM.
#[derive(Debug)]
pub(crate) struct Peers {
    user: Option<u32>,
    first: Mutex<Option<Peer>>,
}

impl Peers {
    /// Admits processes of this user, or of any user.
    pub(crate) fn new(user: Option<u32>) -> Self {
        Self { user, first: Mutex::new(None) }
    }

    /// Admits or refuses a process. After the first admission only that process is admitted.
    ///
    /// # Errors
    /// [`PeerError`]
    pub(crate) fn admit(&self, peer: Peer) -> Result<(), PeerError> {
        if let Some(user) = self.user.filter(|user| *user != peer.user) {
            return Err(PeerError::User(user));
        }
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        let first = *first.get_or_insert(peer);
        if first == peer { Ok(()) } else { Err(PeerError::Process(first.process)) }
    }
}

/// The process that has made this connection.
///
/// # Errors
/// The errno of getsockopt(2).
pub(crate) fn of(connection: &UnixStream) -> io::Result<Peer> {
    let mut credentials = [0; size_of::<libc::ucred>()];
    host::get_option(connection.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, &mut credentials)
        .map_err(|Errno(error)| io::Error::from_raw_os_error(error))?;
    let word = |at: usize| credentials.get(at..).and_then(|rest| rest.first_chunk::<4>()).copied().unwrap_or_default();
    Ok(Peer { process: i32::from_ne_bytes(word(0)), user: u32::from_ne_bytes(word(4)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_of_the_right_user_is_admitted() {
        let (qemu, other) = (Peer { process: 7, user: 64055 }, Peer { process: 8, user: 64055 });
        let stranger = Peer { process: 9, user: 1000 };
        let peers = Peers::new(Some(64055));
        assert_eq!(peers.admit(stranger), Err(PeerError::User(64055)));
        assert_eq!((peers.admit(qemu), peers.admit(qemu)), (Ok(()), Ok(())), "a refused process is not the first");
        assert_eq!(peers.admit(other), Err(PeerError::Process(7)));
        let anybody = Peers::new(None);
        assert_eq!((anybody.admit(stranger), anybody.admit(qemu)), (Ok(()), Err(PeerError::Process(9))));
    }

    #[test]
    fn a_connection_tells_its_process() {
        let (near, _far) = UnixStream::pair().unwrap();
        let own = Peer { process: std::process::id() as i32, user: rustix::process::geteuid().as_raw() };
        assert_eq!(of(&near).unwrap(), own);
    }
}
