//! A packet socket with time stamps: only the system calls (packet(7), `Documentation/networking/timestamping.rst`).

use std::ffi::CStr;
use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::site::Stamps;

/// Maximum of bytes that are kept of a frame.
pub(super) const LONGEST: usize = 2_048;
/// Size of the receive buffer, bytes.
const BUFFER: libc::c_int = 256 << 20;
/// `HWTSTAMP_FILTER_NONE`, `HWTSTAMP_FILTER_ALL` (`include/uapi/linux/net_tstamp.h`).
const FILTER_ALL: libc::c_int = 1;
const SIOCGHWTSTAMP: libc::c_ulong = 0x89b1;
const SIOCSHWTSTAMP: libc::c_ulong = 0x89b0;
const SIOCETHTOOL: libc::c_ulong = 0x8946;
const ETHTOOL_GDRVINFO: u32 = 3;

/// `struct hwtstamp_config`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StampConfig {
    flags: libc::c_int,
    tx_type: libc::c_int,
    rx_filter: libc::c_int,
}

/// `struct ethtool_drvinfo` (`include/uapi/linux/ethtool.h`).
#[repr(C)]
struct DriverInfo {
    command: u32,
    driver: [libc::c_char; 32],
    version: [libc::c_char; 32],
    firmware: [libc::c_char; 32],
    bus: [libc::c_char; 32],
    erom: [libc::c_char; 32],
    reserved: [libc::c_char; 12],
    numbers: [u32; 5],
}

/// `struct ifreq` whose argument is a pointer.
#[repr(C)]
struct Request<T> {
    name: [libc::c_char; libc::IFNAMSIZ],
    data: *mut T,
    rest: [u8; 16],
}

/// A received frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Frame {
    /// Time of passage, ns since the epoch of the stamp; `None` if the frame has no stamp of the chosen kind.
    pub at_ns: Option<u64>,
    /// Number of bytes kept.
    pub kept: usize,
    /// Length of the frame, bytes.
    pub length: usize,
}

/// An open packet socket on one interface, for both directions.
#[derive(Debug)]
pub(super) struct Socket {
    fd: OwnedFd,
    stamps: Stamps,
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

impl Socket {
    /// Opens a socket on interface `index`.
    pub(super) fn open(index: u32, stamps: Stamps) -> io::Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: takes integers and accesses no memory. Protocol 0: nothing is received before the socket is bound.
        let fd = check(unsafe { libc::socket(libc::AF_PACKET, kind, 0) })?;
        // SAFETY: the descriptor was just created and has no other owner.
        let socket = Self { fd: unsafe { OwnedFd::from_raw_fd(fd) }, stamps };
        let wanted = match stamps {
            Stamps::Kernel => libc::SOF_TIMESTAMPING_RX_SOFTWARE | libc::SOF_TIMESTAMPING_SOFTWARE,
            Stamps::Nic => libc::SOF_TIMESTAMPING_RX_HARDWARE | libc::SOF_TIMESTAMPING_RAW_HARDWARE,
        };
        socket.set(libc::SOL_SOCKET, libc::SO_TIMESTAMPING, &wanted)?;
        if socket.set(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &BUFFER).is_err() {
            socket.set(libc::SOL_SOCKET, libc::SO_RCVBUF, &BUFFER)?;
        }
        // Frames at a mirror port have other hosts' addresses.
        let all = libc::packet_mreq {
            mr_ifindex: index as libc::c_int,
            mr_type: libc::PACKET_MR_PROMISC as libc::c_ushort,
            mr_alen: 0,
            mr_address: [0; 8],
        };
        socket.set(libc::SOL_PACKET, libc::PACKET_ADD_MEMBERSHIP, &all)?;
        Ok(socket)
    }

    /// Starts receiving the frames that pass the interface.
    pub(super) fn bind(&self, index: u32) -> io::Result<()> {
        let address = libc::sockaddr_ll {
            sll_family: libc::AF_PACKET as libc::sa_family_t,
            sll_protocol: (libc::ETH_P_ALL as u16).to_be(),
            sll_ifindex: index as libc::c_int,
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the pointer is to a live sockaddr_ll of that length, which bind(2) only reads.
        check(unsafe { libc::bind(self.fd.as_raw_fd(), (&raw const address).cast(), length) }).map(|_| ())
    }

    /// Passes only TCP, and one in 64 of all other frames, which is enough for a flood's sums. For IPv4 and IPv6
    /// without tags or options.
    pub(super) fn thin(&self) -> io::Result<()> {
        let code = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
        const RANDOM: u32 = (libc::SKF_AD_OFF + libc::SKF_AD_RANDOM) as u32;
        // BPF_LD|H|ABS 0x28, BPF_LD|B|ABS 0x30, BPF_JMP|JEQ|K 0x15, BPF_LD|W|ABS 0x20, BPF_JMP|JSET|K 0x45, BPF_RET|K
        // 0x06.
        let program = [
            code(0x28, 0, 0, 12),
            code(0x15, 0, 2, libc::ETH_P_IP as u32),
            code(0x30, 0, 0, 23),
            code(0x15, 5, 3, libc::IPPROTO_TCP as u32),
            code(0x15, 0, 2, libc::ETH_P_IPV6 as u32),
            code(0x30, 0, 0, 20),
            code(0x15, 2, 0, libc::IPPROTO_TCP as u32),
            code(0x20, 0, 0, RANDOM),
            code(0x45, 1, 0, 63),
            code(0x06, 0, 0, u32::MAX),
            code(0x06, 0, 0, 0),
        ];
        let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_ptr().cast_mut() };
        self.set(libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &filter)
    }

    /// The next frame, in `buffer`; `None` if there is none yet.
    pub(super) fn receive(&self, buffer: &mut [u8]) -> io::Result<Option<Frame>> {
        // SAFETY: a msghdr of zeros is valid.
        let mut message: libc::msghdr = unsafe { zeroed() };
        let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        let mut control = [0u64; 16];
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        (message.msg_control, message.msg_controllen) = (control.as_mut_ptr().cast(), size_of_val(&control));
        // SAFETY: the message contains a live buffer and live space for control messages, with their lengths.
        let length = unsafe { libc::recvmsg(self.fd.as_raw_fd(), &raw mut message, libc::MSG_TRUNC) };
        let Ok(length) = usize::try_from(length) else {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) };
        };
        Ok(Some(Frame { at_ns: self.stamp(&message), kept: length.min(buffer.len()), length }))
    }

    /// The stamp of the chosen kind. In `struct scm_timestamping` the first is the kernel's, and the third the NIC's.
    fn stamp(&self, message: &libc::msghdr) -> Option<u64> {
        // SAFETY: the message is unchanged since recvmsg(2), and its control buffer is alive.
        let mut header = unsafe { libc::CMSG_FIRSTHDR(message) };
        while !header.is_null() {
            // SAFETY: the pointer is not null, so it is within the control buffer.
            let of = unsafe { header.read_unaligned() };
            if of.cmsg_level == libc::SOL_SOCKET && of.cmsg_type == libc::SCM_TIMESTAMPING {
                // SAFETY: the kernel wrote a cmsghdr there, which is followed by its data.
                let data = unsafe { libc::CMSG_DATA(header) };
                // SAFETY: a message of this type contains three timespecs.
                let stamps = unsafe { data.cast::<[libc::timespec; 3]>().read_unaligned() };
                let [software, _, hardware] = stamps;
                let at = if self.stamps == Stamps::Nic { hardware } else { software };
                let ns = at.tv_sec as u64 * 1_000_000_000 + at.tv_nsec as u64;
                return (ns > 0).then_some(ns);
            }
            // SAFETY: both pointers belong to this message.
            header = unsafe { libc::CMSG_NXTHDR(message, header) };
        }
        None
    }

    /// Frames that were dropped for lack of room since the last call.
    pub(super) fn dropped(&self) -> io::Result<u64> {
        // struct tpacket_stats.
        let mut counts = [0u32; 2];
        let mut length = size_of_val(&counts) as libc::socklen_t;
        let (fd, level, name) = (self.fd.as_raw_fd(), libc::SOL_PACKET, libc::PACKET_STATISTICS);
        // SAFETY: the kernel writes at most length bytes, the size of counts.
        check(unsafe { libc::getsockopt(fd, level, name, counts.as_mut_ptr().cast(), &raw mut length) })?;
        Ok(u64::from(counts[1]))
    }

    /// Waits until a frame can be received, or until the limit.
    pub(super) fn wait(&self, limit_ms: i32) -> io::Result<()> {
        let mut of = libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: the pointer is to one live pollfd.
        match check(unsafe { libc::poll(&raw mut of, 1, limit_ms) }) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
            _ => Ok(()),
        }
    }

    /// Makes the NIC stamp every received frame. Returns the previous configuration.
    pub(super) fn stamp_all(&self, nic: &str) -> io::Result<StampConfig> {
        let mut before = StampConfig::default();
        self.ask(nic, SIOCGHWTSTAMP, &mut before)?;
        let mut wanted = StampConfig { rx_filter: FILTER_ALL, ..before };
        self.set_stamps(nic, &mut wanted)?;
        // A driver may set less than was requested, and returns what it has set.
        if wanted.rx_filter == FILTER_ALL {
            return Ok(before);
        }
        self.set_stamps(nic, &mut before.clone())?;
        Err(io::Error::from_raw_os_error(libc::ERANGE))
    }

    /// Restores the previous configuration of time stamps.
    pub(super) fn set_stamps(&self, nic: &str, config: &mut StampConfig) -> io::Result<()> {
        self.ask(nic, SIOCSHWTSTAMP, config)
    }

    /// The interface's driver, and the bus address of its device, which is empty if it has no device.
    pub(super) fn driver(&self, nic: &str) -> io::Result<(String, String)> {
        // SAFETY: a DriverInfo of zeros is valid.
        let mut info: DriverInfo = unsafe { zeroed() };
        info.command = ETHTOOL_GDRVINFO;
        self.ask(nic, SIOCETHTOOL, &mut info)?;
        let text = |field: &[libc::c_char; 32]| {
            let bytes = field.map(|byte| byte as u8);
            CStr::from_bytes_until_nul(&bytes)
                .map_or_else(|_| String::new(), |text| text.to_string_lossy().into_owned())
        };
        Ok((text(&info.driver), text(&info.bus)))
    }

    fn ask<T>(&self, nic: &str, request: libc::c_ulong, data: &mut T) -> io::Result<()> {
        let mut name = [0; libc::IFNAMSIZ];
        if nic.len() >= name.len() {
            return Err(io::Error::from_raw_os_error(libc::ENODEV));
        }
        for (to, from) in name.iter_mut().zip(nic.bytes()) {
            *to = from as libc::c_char;
        }
        let mut order = Request { name, data: std::ptr::from_mut(data), rest: [0; 16] };
        // SAFETY: the order has the size of a struct ifreq, and its pointer is to the live structure that this request
        // takes.
        check(unsafe { libc::ioctl(self.fd.as_raw_fd(), request as _, &raw mut order) }).map(|_| ())
    }

    fn set<T>(&self, level: libc::c_int, name: libc::c_int, value: &T) -> io::Result<()> {
        let (pointer, length) = (std::ptr::from_ref(value).cast(), size_of::<T>() as libc::socklen_t);
        // SAFETY: the kernel reads length bytes of value, which outlives the call.
        check(unsafe { libc::setsockopt(self.fd.as_raw_fd(), level, name, pointer, length) }).map(|_| ())
    }
}
