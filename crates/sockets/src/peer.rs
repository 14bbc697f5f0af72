//! Which process may connect as QEMU: a process of the configured user that is no QEMU of another VM of libvirt's, and
//! the same process for all devices of a VM.
//!
//! The sockets' mode lets in every process of QEMU's group, and libvirt runs all QEMUs as one user. But it starts each
//! in a cgroup of its own, named after the VM, and QEMU cannot leave that. A process in no such cgroup is admitted if
//! it is the first. Any later process is refused, so that no other guest becomes a part of this VM.
//!
//! The filters let this process open no files. So they are installed when the cgroup of the first admitted process has
//! been read: before that, no message of a process that a guest may have taken over has been read.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};

use ontime_tenants::container::other_libvirt_vm;
use rustix::event::{PollFd, PollFlags, poll};

use crate::abi::Errno;
use crate::host;
use crate::sandbox::Filters;

/// The process at the other end of a connection, at the time when it connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Peer {
    process: i32,
    user: u32,
}

/// Why a process is refused.
#[derive(Debug)]
pub(crate) enum PeerError {
    /// It does not belong to the user that `qemu-user` names.
    User(u32),
    /// It is in the cgroup of this VM.
    Vm(String),
    /// Its cgroup cannot be read.
    Unknown(io::Error),
    /// Another process has connected before.
    Process(i32),
}

impl fmt::Display for PeerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(user) => {
                write!(f, "qemu-user in sockets.toml is user {user}; run QEMU as that user, or correct qemu-user")
            }
            Self::Vm(vm) => {
                write!(
                    f,
                    "it is in the cgroup of VM {vm:?}; start the device process with --vm NAME as libvirt names \
                    its VM, and have each VM connect to its own"
                )
            }
            Self::Unknown(error) => {
                write!(f, "its cgroup, and so its VM, is not known: {error}; give each VM a device process of its own")
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
    vm: String,
    user: Option<u32>,
    filters: Filters,
    first: Mutex<Option<Peer>>,
}

impl Peers {
    /// Admits processes of this user, or of any user.
    pub(crate) fn new(vm: &str, user: Option<u32>, filters: Filters) -> Self {
        Self { vm: vm.to_owned(), user, filters, first: Mutex::new(None) }
    }

    /// Admits or refuses a process, whose cgroups `cgroups` returns. After the first admission only that process is
    /// admitted, and this process is confined to the system calls that it then needs.
    ///
    /// # Errors
    /// [`PeerError`]
    pub(crate) fn admit(&self, peer: Peer, cgroups: impl FnOnce() -> io::Result<String>) -> Result<(), PeerError> {
        if let Some(user) = self.user.filter(|user| *user != peer.user) {
            return Err(PeerError::User(user));
        }
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(first) = *first {
            return if first == peer { Ok(()) } else { Err(PeerError::Process(first.process)) };
        }
        let text = cgroups().map_err(PeerError::Unknown)?;
        // NUMBER:CONTROLLERS:PATH
        let mut paths = text.lines().filter_map(|line| line.splitn(3, ':').nth(2));
        if let Some(other) = paths.find_map(|path| other_libvirt_vm(path, &self.vm)) {
            return Err(PeerError::Vm(other));
        }
        if let Err(error) = self.filters.install() {
            tracing::error!(vm = self.vm, "{error}");
            std::process::abort();
        }
        *first = Some(peer);
        Ok(())
    }
}

/// The cgroups of the process that has made this connection, as `/proc/PID/cgroup` has them; empty where this process
/// is not shown other users' processes.
///
/// # Errors
/// Those of open(2) and getsockopt(2).
pub(crate) fn cgroups(connection: &UnixStream, peer: Peer) -> io::Result<String> {
    // 0: it is in another PID namespace.
    if peer.process == 0 || std::fs::metadata("/proc/1/cgroup").is_err() {
        tracing::warn!(
            "the VM of process {} is not known: /proc does not show it (hidepid=, or another PID namespace); give \
             each QEMU a user, and name it as qemu-user in sockets.toml",
            peer.process
        );
        return Ok(String::new());
    }
    let text = std::fs::read_to_string(format!("/proc/{}/cgroup", peer.process))?;
    // If the process has ended, the number may be another's by now. Linux 6.5 tells that.
    let mut pidfd = [0; 4];
    match host::get_option(connection.as_raw_fd(), libc::SOL_SOCKET, SO_PEERPIDFD, &mut pidfd) {
        Err(Errno(libc::ENOPROTOOPT)) => return Ok(text),
        Err(Errno(error)) => return Err(io::Error::from_raw_os_error(error)),
        Ok(_) => {}
    }
    // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(i32::from_ne_bytes(pidfd)) };
    text_if_alive(text, &pidfd)
}

/// What was read of a process, if the process has not ended since.
fn text_if_alive(text: String, pidfd: &OwnedFd) -> io::Result<String> {
    let ended = poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&Default::default()))? > 0;
    if ended { Err(io::ErrorKind::NotFound.into()) } else { Ok(text) }
}

/// `include/uapi/asm-generic/socket.h`.
const SO_PEERPIDFD: i32 = 77;

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
        let admit = |peers: &Peers, peer| peers.admit(peer, || Ok("0::/user.slice\n".to_owned()));
        let peers = Peers::new("web", Some(64055), Filters::default());
        assert!(matches!(admit(&peers, stranger), Err(PeerError::User(64055))));
        assert!(
            matches!((admit(&peers, qemu), admit(&peers, qemu)), (Ok(()), Ok(()))),
            "a refused one is not the first"
        );
        assert!(matches!(admit(&peers, other), Err(PeerError::Process(7))));
        let anybody = Peers::new("web", None, Filters::default());
        assert!(matches!((admit(&anybody, stranger), admit(&anybody, qemu)), (Ok(()), Err(PeerError::Process(9)))));
    }

    /// libvirt runs all QEMUs as one user. One that its guest has taken over is the first to connect.
    #[test]
    fn a_qemu_of_another_vm_of_libvirts_is_refused() {
        let (qemu, other) = (Peer { process: 7, user: 64055 }, Peer { process: 8, user: 64055 });
        let scope =
            |vm: &str| Ok(format!("1:name=systemd:/machine.slice/machine-qemu\\x2d3\\x2d{vm}.scope/libvirt\n0::/\n"));
        let peers = Peers::new("web", Some(64055), Filters::default());
        assert!(matches!(peers.admit(other, || scope("db")), Err(PeerError::Vm(vm)) if vm == "db"));
        let ended = || Err(io::ErrorKind::NotFound.into());
        assert!(matches!(peers.admit(other, ended), Err(PeerError::Unknown(_))));
        assert!(peers.admit(qemu, || scope("web")).is_ok(), "its own is served all the same");
        assert!(matches!(peers.admit(other, || scope("web")), Err(PeerError::Process(7))));
    }

    #[test]
    fn the_cgroups_of_a_process_that_has_ended_are_not_known() {
        let (near, _far) = UnixStream::pair().unwrap();
        let own = of(&near).unwrap();
        assert!(cgroups(&near, own).unwrap().contains(":/"));
        let ended = std::process::Command::new("true").spawn().unwrap();
        let gone = Peer { process: ended.id() as i32, ..own };
        ended.wait_with_output().unwrap();
        assert!(cgroups(&near, gone).is_err());
    }

    /// Its number may be another process's when the file is read.
    #[test]
    fn what_was_read_counts_only_if_the_process_lives_after_that() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        let text = || text_if_alive("0::/a\n".to_owned(), &pidfd);
        let alive = text();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(alive.unwrap(), "0::/a\n");
        assert_eq!(text().unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_connection_tells_its_process() {
        let (near, _far) = UnixStream::pair().unwrap();
        let own = Peer { process: std::process::id() as i32, user: rustix::process::geteuid().as_raw() };
        assert_eq!(of(&near).unwrap(), own);
    }
}
