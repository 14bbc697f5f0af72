//! The send buffer of a VM's tap or macvtap: bytes of its packets that may be on their way before whoever sends for it (vhost, QEMU) waits.
//!
//! A packet counts from when it is taken from the VM until the NIC has sent and freed it. The size belongs to the device, but neither netlink nor sysfs tells or sets it: only
//! who has it open can. So its monitor's descriptor is taken (`pidfd_getfd`, 5.6) for the length of a call, once the kernel says that it is of the driver, and the driver that it is
//! the interface that was meant. What a process has open by such a name may be anything, a file of its own file system too, which answers when it likes: nothing is asked of it
//! before (`AT_STATX_DONT_SYNC`).
//!
//! Source: `drivers/net/tun.c` and `tap.c` (`TUNSETSNDBUF`, `tun_sock_writeable`), `net/core/sock.c` (`sock_alloc_send_pskb`, `sock_wfree`), `drivers/vhost/net.c`
//! (`handle_tx`: what the device does not take stays in the VM's ring until it can).

use std::ffi::{CStr, OsStr};
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;

use ontime_tenants::ThreadId;
use rustix::fs::{AtFlags, CWD, FileType, Statx, StatxFlags, statx};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// The driver's number of `/dev/net/tun` (`include/linux/miscdevice.h`: MISC_MAJOR, TUN_MINOR).
const TUN: (u32, u32) = (10, 200);

/// An interface that a monitor has open.
pub(crate) struct Tap<'a> {
    name: &'a str,
    device: (u32, u32),
}

impl<'a> Tap<'a> {
    /// The one of this directory in `/sys/class/net`; a macvtap has a device of its own there.
    pub(crate) fn of(dir: &'a Path, ifindex: u32) -> Self {
        let said = fs::read_to_string(dir.join(format!("tap{ifindex}/dev"))).ok();
        let device = said.as_deref().and_then(number).unwrap_or(TUN);
        Self { name: dir.file_name().and_then(OsStr::to_str).unwrap_or_default(), device }
    }

    fn is(&self, found: rustix::io::Result<Statx>) -> bool {
        found.is_ok_and(|of| {
            FileType::from_raw_mode(of.stx_mode.into()) == FileType::CharacterDevice
                && (of.stx_rdev_major, of.stx_rdev_minor) == self.device
        })
    }
}

/// `241:3`.
fn number(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.trim().split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Bytes.
///
/// # Errors
/// `ENODEV` where the process has no such device open, `ESRCH` where it has ended, `EPERM` without CAP_SYS_PTRACE, `ENOSYS` before 5.6.
pub(crate) fn send_buffer(process: ThreadId, tap: &Tap<'_>) -> io::Result<i32> {
    let device = open(process, tap)?;
    let mut size = 0_i32;
    // SAFETY: the kernel writes an int there, which outlives the call.
    result(unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNGETSNDBUF, &raw mut size) })?;
    Ok(size)
}

/// Sets it; a positive number.
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

/// The process's descriptor of an interface.
fn open(process: ThreadId, tap: &Tap<'_>) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(process.pid).ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
    // The number was still this process's when its descriptor was opened.
    process.verify()?;
    let mut refused = libc::ENODEV;
    for entry in fs::read_dir(format!("/proc/{}/fd", process.pid))?.flatten() {
        let theirs = statx(CWD, entry.path(), AtFlags::STATX_DONT_SYNC, StatxFlags::BASIC_STATS);
        let number = entry.file_name().to_string_lossy().parse::<RawFd>().ok();
        let (Some(number), true) = (number, tap.is(theirs)) else { continue };
        match pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty()) {
            Ok(device) => {
                // It may have become another since.
                let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
                let ours = statx(&device, "", flags, StatxFlags::BASIC_STATS);
                if tap.is(ours) && name_of(&device).is_ok_and(|name| name == tap.name) {
                    return Ok(device);
                }
            }
            Err(rustix::io::Errno::BADF) => {}
            Err(error) => refused = error.raw_os_error(),
        }
    }
    Err(io::Error::from_raw_os_error(refused))
}

/// The interface of an open tap or macvtap.
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
    use super::*;

    #[test]
    fn devices_are_told_by_their_drivers_number() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm0");
        fs::create_dir_all(path.join("tap7")).unwrap();
        for (said, device) in [("241:3\n", (241, 3)), ("", TUN), ("241", TUN), ("a:b", TUN), ("4294967296:1", TUN)] {
            fs::write(path.join("tap7/dev"), said).unwrap();
            let tap = Tap::of(&path, 7);
            assert_eq!((tap.name, tap.device), ("vm0", device), "{said}");
        }
        let tap = Tap { name: "", device: (1, 3) };
        let found = |path: &str| statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::BASIC_STATS);
        assert!(tap.is(found("/dev/null")) && !tap.is(found("/dev/zero")) && !tap.is(found("/")));
        assert!(!tap.is(found("/nowhere")));
    }

    #[test]
    fn who_has_no_such_device_open_is_told_so() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let own = ThreadId::of(pid, pid).unwrap();
        let tap = Tap { name: "tap0", device: TUN };
        let error = send_buffer(own, &tap).unwrap_err().raw_os_error();
        assert!(matches!(error, Some(libc::ENODEV | libc::ENOSYS)), "{error:?}");
        let ended = ThreadId { start_time: own.start_time + 1, ..own };
        assert!(set_send_buffer(ended, &tap, 4096).is_err());
    }
}
