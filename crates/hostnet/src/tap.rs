//! The send buffer of a VM's tap: the bytes of its packets that may be in flight before the sending thread (vhost,
//! QEMU) waits.
//!
//! A packet counts from the moment it is taken from the VM until the NIC has sent and freed it. The size belongs to the
//! device, but neither netlink nor sysfs can read or set it: only a process that has the device open can. Therefore a
//! descriptor of the VMM is copied for the duration of a call (`ontime_tenants::tap`), after the driver has reported
//! that it is the right interface.
//!
//! Source: `drivers/net/tun.c` (`TUNSETSNDBUF`, `tun_sock_writeable`), `net/core/sock.c` (`sock_alloc_send_pskb`,
//! `sock_wfree`), `drivers/vhost/net.c` (`handle_tx`: packets that the device does not take stay in the VM's ring until
//! it can).

use std::ffi::{CStr, OsStr};
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;

use ontime_tenants::{ThreadId, limit_waits, tap};

/// An interface that a VMM has open.
pub(crate) struct Tap<'a> {
    name: &'a str,
}

impl<'a> Tap<'a> {
    /// The interface of this directory in `/sys/class/net`.
    pub(crate) fn of(dir: &'a Path) -> Self {
        Self { name: dir.file_name().and_then(OsStr::to_str).unwrap_or_default() }
    }
}

/// Without a limit, vhost sends packets in batches (`drivers/vhost/net.c`, `sock_can_batch`).
const UNLIMITED: i32 = i32::MAX;
/// A limit that no sender reaches, but that makes vhost send packets one by one.
const ONE_BY_ONE: i32 = i32::MAX - 1;

/// Whether vhost sends this tap's packets in batches.
///
/// # Errors
/// As [`send_buffer`].
pub(crate) fn batches(process: ThreadId, tap: &Tap<'_>) -> io::Result<bool> {
    Ok(send_buffer(process, tap)? == UNLIMITED)
}

/// Switches batches on or off. A limit that another program set stays.
///
/// # Errors
/// As [`send_buffer`].
pub(crate) fn set_batches(process: ThreadId, tap: &Tap<'_>, on: bool) -> io::Result<()> {
    let (from, to) = if on { (ONE_BY_ONE, UNLIMITED) } else { (UNLIMITED, ONE_BY_ONE) };
    if send_buffer(process, tap)? == from { set_send_buffer(process, tap, to) } else { Ok(()) }
}

/// Size of the send buffer, bytes.
///
/// # Errors
/// `ENODEV` if the process has no such device open, `ESRCH` if it has ended, `EPERM` without CAP_SYS_PTRACE, `ENOSYS`
/// before 5.6.
pub(crate) fn send_buffer(process: ThreadId, tap: &Tap<'_>) -> io::Result<i32> {
    let device = open(process, tap)?;
    let mut size = 0_i32;
    // SAFETY: the kernel writes an int there, which outlives the call.
    result(unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNGETSNDBUF, &raw mut size) })?;
    Ok(size)
}

/// Sets the size of the send buffer, bytes; it must be positive.
///
/// # Errors
/// As [`send_buffer`]; `EINVAL` for other numbers.
pub(crate) fn set_send_buffer(process: ThreadId, tap: &Tap<'_>, size: i32) -> io::Result<()> {
    let device = open(process, tap)?;
    // SAFETY: the kernel reads an int there, which outlives the call.
    result(unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETSNDBUF, &raw const size) })
}

fn result(returned: libc::c_int) -> io::Result<()> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A copy of the process's descriptor of an interface.
fn open(process: ThreadId, tap: &Tap<'_>) -> io::Result<OwnedFd> {
    limit_waits(|| find(process, tap))
}

fn find(process: ThreadId, wanted: &Tap<'_>) -> io::Result<OwnedFd> {
    let pidfd = tap::pidfd(process)?;
    let mut refused = io::Error::from_raw_os_error(libc::ENODEV);
    for entry in fs::read_dir(format!("/proc/{}/fd", process.pid))?.flatten() {
        let number = entry.file_name().to_string_lossy().parse::<RawFd>().ok();
        let Some(number) = number.filter(|_| tap::is_tap(&entry.path())) else { continue };
        match tap::copy(&pidfd, number) {
            Ok(device) if name_of(&device).is_ok_and(|name| name == wanted.name) => return Ok(device),
            Ok(_) => {}
            Err(error) => match error.raw_os_error() {
                Some(libc::EBADF) => {}
                // It has become another file since it was found.
                Some(libc::ENODEV) => return Err(error),
                _ => refused = error,
            },
        }
    }
    Err(refused)
}

/// The name of an open tap's interface.
fn name_of(device: &OwnedFd) -> io::Result<String> {
    // SAFETY: zeroes are a valid ifreq: numbers and a name without letters.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes an ifreq there, which outlives the call.
    result(unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNGETIFF, &raw mut request) })?;
    let name: Vec<u8> = request.ifr_name.iter().map(|byte| byte.to_ne_bytes()[0]).collect();
    let name = CStr::from_bytes_until_nul(&name).map_err(io::Error::other)?;
    Ok(name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::Ordering;

    use ontime_tenants::tap::{CLOSING, STRANGERS, close_elsewhere};

    use super::*;

    /// Held by the test that looks at this process's descriptors.
    static DESCRIPTORS: Mutex<()> = Mutex::new(());

    /// A connection that lingers at its end while the other side reads nothing stands for a process's own file system.
    /// The test ends the wait, so it sees the closing thread wait.
    #[test]
    fn a_file_that_became_another_is_closed_by_a_thread_that_may_wait() {
        use std::io::Write;
        use std::net::{TcpListener, TcpStream};
        let _one = DESCRIPTORS.lock().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut pairs: Vec<(TcpStream, TcpStream)> = Vec::new();
        for _ in 0..STRANGERS {
            let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let far = listener.accept().unwrap().0;
            near.set_nonblocking(true).unwrap();
            while near.write(&[0; 65_536]).is_ok() {}
            near.set_nonblocking(false).unwrap();
            rustix::net::sockopt::set_socket_linger(&near, Some(std::time::Duration::from_secs(600))).unwrap();
            pairs.push((near, far));
        }
        let pid = i32::try_from(std::process::id()).unwrap();
        let own = ThreadId::of(pid, pid).unwrap();
        let asked = || send_buffer(own, &Tap { name: "tap0" }).unwrap_err().raw_os_error();
        assert_ne!(asked(), Some(libc::EBUSY));
        let fars: Vec<TcpStream> = pairs
            .into_iter()
            .map(|(near, far)| {
                close_elsewhere(near.into());
                far
            })
            .collect();
        // Asked when the limit is reached, or this thread would look at the descriptors that are being closed, and the
        // last to use a file is the one that waits for its end.
        assert_eq!((CLOSING.load(Ordering::Relaxed), asked()), (STRANGERS, Some(libc::EBUSY)));
        // The other side resets the connections.
        drop(fars);
        while CLOSING.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
        assert_ne!(asked(), Some(libc::EBUSY));
    }

    #[test]
    fn who_has_no_such_device_open_is_told_so() {
        let _one = DESCRIPTORS.lock().unwrap();
        let pid = i32::try_from(std::process::id()).unwrap();
        let own = ThreadId::of(pid, pid).unwrap();
        let tap = Tap { name: "tap0" };
        let error = send_buffer(own, &tap).unwrap_err().raw_os_error();
        assert!(matches!(error, Some(libc::ENODEV | libc::ENOSYS)), "{error:?}");
        let ended = ThreadId { start_time: own.start_time + 1, ..own };
        assert!(set_send_buffer(ended, &tap, 4096).is_err());
    }
}
