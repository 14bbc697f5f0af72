//! The send buffer of a VM's tap or macvtap: bytes of its packets that may be on their way before whoever sends for it (vhost, QEMU) waits.
//!
//! A packet counts from when it is taken from the VM until the NIC has sent and freed it. The size belongs to the device, but neither netlink nor sysfs tells or sets it: only
//! who has it open can. So its monitor's descriptor is taken (`pidfd_getfd`, 5.6) for the length of a call, once the device says that it is the
//! interface that was meant. Nothing else of the monitor's is touched.
//!
//! Source: `drivers/net/tun.c` and `tap.c` (`TUNSETSNDBUF`, `tun_sock_writeable`), `net/core/sock.c` (`sock_alloc_send_pskb`, `sock_wfree`), `drivers/vhost/net.c`
//! (`handle_tx`: what the device does not take stays in the VM's ring until it can).

use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;

use ontime_tenants::ThreadId;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// Bytes.
///
/// # Errors
/// `ENODEV` where the process has no such device open, `ESRCH` where it has ended, `EPERM` without CAP_SYS_PTRACE, `ENOSYS` before 5.6.
pub(crate) fn send_buffer(process: ThreadId, ifname: &str) -> io::Result<i32> {
    let device = open(process, ifname)?;
    let mut size = 0_i32;
    // SAFETY: the kernel writes an int there, which outlives the call.
    result(unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNGETSNDBUF, &raw mut size) })?;
    Ok(size)
}

/// Sets it; a positive number.
///
/// # Errors
/// As [`send_buffer`]; `EINVAL` for other numbers.
pub(crate) fn set_send_buffer(process: ThreadId, ifname: &str, size: i32) -> io::Result<()> {
    let device = open(process, ifname)?;
    // SAFETY: the kernel reads an int there, which outlives the call.
    result(unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETSNDBUF, &raw const size) })
}

fn result(returned: libc::c_int) -> io::Result<()> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The process's descriptor of an interface.
fn open(process: ThreadId, ifname: &str) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(process.pid).ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
    // The number was still this process's when its descriptor was opened.
    process.verify()?;
    let mut refused = libc::ENODEV;
    for entry in fs::read_dir(format!("/proc/{}/fd", process.pid))?.flatten() {
        let number = entry.file_name().to_string_lossy().parse::<RawFd>().ok();
        let (Some(number), true) = (number, fs::read_link(entry.path()).is_ok_and(|target| is_device(&target))) else {
            continue;
        };
        match pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty()) {
            Ok(device) if name_of(&device).is_ok_and(|name| name == ifname) => return Ok(device),
            // Another one of its devices, or closed meanwhile.
            Ok(_) | Err(rustix::io::Errno::BADF) => {}
            Err(error) => refused = error.raw_os_error(),
        }
    }
    Err(io::Error::from_raw_os_error(refused))
}

/// `/dev/net/tun`, of a tap; `/dev/tapN`, of a macvtap.
fn is_device(target: &Path) -> bool {
    let macvtap = || target.to_str().and_then(|path| path.strip_prefix("/dev/tap"))?.parse::<u32>().ok();
    target == Path::new("/dev/net/tun") || macvtap().is_some()
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
    fn devices_are_told_by_their_path() {
        for (path, is) in [
            ("/dev/net/tun", true),
            ("/dev/tap7", true),
            ("/dev/tap", false),
            ("/dev/tape", false),
            ("/dev/net/tun2", false),
            ("socket:[7]", false),
        ] {
            assert_eq!(is_device(Path::new(path)), is, "{path}");
        }
    }

    #[test]
    fn who_has_no_such_device_open_is_told_so() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let own = ThreadId::of(pid, pid).unwrap();
        let error = send_buffer(own, "tap0").unwrap_err().raw_os_error();
        assert!(matches!(error, Some(libc::ENODEV | libc::ENOSYS)), "{error:?}");
        let ended = ThreadId { start_time: own.start_time + 1, ..own };
        assert!(set_send_buffer(ended, "tap0", 4096).is_err());
    }
}
