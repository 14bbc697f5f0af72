//! A process's open taps (`/dev/net/tun`): copies of their descriptors, and in which network namespace the interfaces
//! are.
//!
//! A descriptor of a process may be any file, also one of the process's own file system, which may never answer. So it
//! is copied (`pidfd_getfd`, 5.6) only after the kernel has reported that it belongs to the tun driver, and until then
//! nothing is requested from it (`AT_STATX_DONT_SYNC`).
//!
//! Source: `drivers/net/tun.c` (`TUNGETDEVNETNS`, 5.7).

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{AtFlags, CWD, FileType, Statx, StatxFlags, statx};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::thread::ThreadId;
use crate::wait_limit::limit_waits;

/// Maximum of copied descriptors that turned out to be another file's and are not closed yet. Beyond it none is copied.
#[doc(hidden)]
pub const STRANGERS: usize = 8;
/// Their present number.
#[doc(hidden)]
pub static CLOSING: AtomicUsize = AtomicUsize::new(0);

/// Device number of `/dev/net/tun` (`include/linux/miscdevice.h`: MISC_MAJOR, TUN_MINOR).
const TUN: (u32, u32) = (10, 200);

/// Whether the file is the character device with this number.
fn is_device(found: rustix::io::Result<Statx>, number: (u32, u32)) -> bool {
    found.is_ok_and(|of| {
        FileType::from_raw_mode(of.stx_mode.into()) == FileType::CharacterDevice
            && (of.stx_rdev_major, of.stx_rdev_minor) == number
    })
}

/// Whether the open file at this path (`/proc/PID/fd/NUMBER`) belongs to the tun driver.
pub fn is_tap(path: &Path) -> bool {
    is_device(statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::BASIC_STATS), TUN)
}

/// A process, by a descriptor.
///
/// # Errors
/// `ESRCH` if it has ended; `EBUSY` while too many descriptors that were copied by mistake are not closed yet.
pub fn pidfd(process: ThreadId) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(process.pid).ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
    // The number still belonged to this process when the pidfd was opened.
    process.verify()?;
    if CLOSING.load(Ordering::Relaxed) >= STRANGERS {
        return Err(io::Error::from_raw_os_error(libc::EBUSY));
    }
    Ok(pidfd)
}

/// A copy of a process's descriptor that [`is_tap`] has found.
///
/// # Errors
/// `EBADF` if it is closed, `ENODEV` if it has become another file, `EPERM` without CAP_SYS_PTRACE, `ENOSYS` before
/// 5.6.
pub fn copy(pidfd: impl AsFd, number: RawFd) -> io::Result<OwnedFd> {
    let device = pidfd_getfd(pidfd, number, PidfdGetfdFlags::empty())?;
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    if is_device(statx(&device, "", flags, StatxFlags::BASIC_STATS), TUN) {
        return Ok(device);
    }
    close_elsewhere(device);
    Err(io::Error::from_raw_os_error(libc::ENODEV))
}

/// Whether the interface of this descriptor of a process is in this thread's network namespace. Its name alone does not
/// tell: in a namespace of their own, users give their interfaces the names of the host's.
///
/// # Errors
/// As [`pidfd`] and [`copy`]; `EPERM` without CAP_NET_ADMIN, `EINVAL` before 5.7.
pub(crate) fn is_here(process: ThreadId, number: RawFd) -> io::Result<bool> {
    limit_waits(|| {
        let pidfd = pidfd(process)?;
        if !is_tap(Path::new(&format!("/proc/{}/fd/{number}", process.pid))) {
            return Ok(false);
        }
        let device = copy(&pidfd, number)?;
        // SAFETY: returns a new descriptor, or an error.
        let namespace = unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNGETDEVNETNS) };
        if namespace < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was made for this call.
        let namespace = rustix::fs::fstat(unsafe { OwnedFd::from_raw_fd(namespace) })?;
        let own = rustix::fs::stat("/proc/thread-self/ns/net")?;
        Ok((namespace.st_dev, namespace.st_ino) == (own.st_dev, own.st_ino))
    })
}

/// Closes a file of unknown type. A file system or a socket may block the closing thread for any time, so a separate
/// thread closes it.
#[doc(hidden)]
pub fn close_elsewhere(file: OwnedFd) {
    CLOSING.fetch_add(1, Ordering::Relaxed);
    let raw = file.into_raw_fd();
    // If no thread can be created, the descriptor stays open, and counts.
    let closing = std::thread::Builder::new().name("ontime-close".into()).stack_size(64 * 1024).spawn(move || {
        // Closing may free much memory, which comes before no other work.
        if rustix::process::getpriority_process(None).is_ok_and(|nice| nice < 0) {
            let _ = rustix::process::setpriority_process(None, 0);
        }
        // SAFETY: this descriptor was given up above, and belongs to this thread alone.
        drop(unsafe { OwnedFd::from_raw_fd(raw) });
        CLOSING.fetch_sub(1, Ordering::Relaxed);
    });
    drop(closing);
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn devices_are_told_by_their_drivers_number() {
        let is_null =
            |path: &str| is_device(statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::BASIC_STATS), (1, 3));
        assert!(is_null("/dev/null") && !is_null("/dev/zero") && !is_null("/"));
        assert!(!is_null("/nowhere"));
    }

    /// A tap in this thread's network namespace.
    fn tap(name: &str) -> io::Result<File> {
        let file = File::options().read(true).write(true).open("/dev/net/tun")?;
        // SAFETY: zeroes are a valid ifreq: numbers and a name without letters.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        request.ifr_name.iter_mut().zip(name.bytes()).for_each(|(to, byte)| *to = byte as libc::c_char);
        request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as libc::c_short;
        // SAFETY: the kernel reads and writes an ifreq there, which outlives the call.
        let made = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
        if made < 0 { Err(io::Error::last_os_error()) } else { Ok(file) }
    }

    /// Runs this in a new network namespace; not at all without the right to make one.
    fn in_new_namespace<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let thread = std::thread::spawn(|| {
            // SAFETY: only this thread, which ends with the call, moves.
            let moved = unsafe { libc::unshare(libc::CLONE_NEWNET) };
            (moved == 0).then(run)
        });
        thread.join().unwrap()
    }

    #[test]
    fn a_tap_of_the_same_name_in_another_namespace_is_not_here() {
        let tested = in_new_namespace(|| {
            let elsewhere = in_new_namespace(|| tap("tap0").ok()).flatten();
            let (Ok(here), Some(there)) = (tap("tap0"), elsewhere) else { return false };
            let pid = i32::try_from(std::process::id()).unwrap();
            let own = ThreadId::of(pid, pid).unwrap();
            let null = File::open("/dev/null").unwrap();
            for (file, wanted) in [(&here, true), (&there, false), (&null, false)] {
                assert_eq!(is_here(own, file.as_raw_fd()).unwrap(), wanted);
            }
            let ended = ThreadId { start_time: own.start_time + 1, ..own };
            assert!(is_here(ended, here.as_raw_fd()).is_err());
            true
        });
        if tested != Some(true) {
            println!("SKIPPED: needs root and /dev/net/tun");
        }
    }
}
