//! The calls of bpf(2) that the counters take: make a map, change an entry, load a program, attach it to a tracepoint.
//! (include/uapi/linux/bpf.h, `union bpf_attr`.)

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Commands of bpf(2).
const MAP_CREATE: libc::c_int = 0;
const MAP_UPDATE_ELEM: libc::c_int = 2;
const MAP_DELETE_ELEM: libc::c_int = 3;
const PROG_LOAD: libc::c_int = 5;
const RAW_TRACEPOINT_OPEN: libc::c_int = 17;
/// Types of maps and programs, where a program is to be attached, and that a map's memory can be mapped.
const HASH: u32 = 1;
const ARRAY: u32 = 2;
const TRACING: u32 = 26;
const TRACE_RAW_TP: u32 = 23;
const MMAPABLE: u32 = 1 << 10;
/// As this repository's. The kernel's function that reads the memory of user space takes it.
const LICENSE: &CStr = c"GPL";
/// Bytes of the verifier's messages that are kept.
const LOG: usize = 64 * 1024;

#[repr(C)]
#[derive(Default)]
struct MapAttr {
    kind: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
    inner: u32,
    numa_node: u32,
    name: [u8; 16],
}

#[repr(C)]
#[derive(Default)]
struct EntryAttr {
    map: u32,
    _unused: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
#[derive(Default)]
struct ProgramAttr {
    kind: u32,
    instructions_count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    attach_type: u32,
    _btf: [u32; 9],
    attach_to: u32,
    _unused: [u32; 2],
}

#[repr(C)]
#[derive(Default)]
struct TracepointAttr {
    name: u64,
    program: u32,
    _unused: u32,
}

/// # Errors
/// The kernel's.
fn bpf<T>(command: libc::c_int, attr: &T) -> io::Result<libc::c_long> {
    let size = size_of::<T>() as libc::c_uint;
    // SAFETY: the kernel reads `size` bytes of attr, which outlives the call; so does what its addresses name.
    let done = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attr), size) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(done) }
}

fn file(command: libc::c_int, attr: &impl Sized) -> io::Result<OwnedFd> {
    let number = bpf(command, attr)?;
    // SAFETY: these commands return a new descriptor, which nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(number as libc::c_int) })
}

fn address<T: ?Sized>(of: &T) -> u64 {
    std::ptr::from_ref(of).cast::<u8>().addr() as u64
}

fn name(name: &str) -> [u8; 16] {
    let mut bytes = [0; 16];
    // The last byte ends it.
    bytes.iter_mut().take(15).zip(name.bytes()).for_each(|(to, from)| *to = from);
    bytes
}

/// A map from thread numbers to numbers of counters.
pub(crate) fn threads(entries: u32) -> io::Result<OwnedFd> {
    let attr = MapAttr {
        kind: HASH,
        key_size: 4,
        value_size: 4,
        max_entries: entries,
        name: name("ontime_threads"),
        ..MapAttr::default()
    };
    file(MAP_CREATE, &attr)
}

/// Memory of this many bytes that programs and this process share.
pub(crate) fn memory(bytes: u32) -> io::Result<OwnedFd> {
    let attr = MapAttr {
        kind: ARRAY,
        key_size: 4,
        value_size: bytes,
        max_entries: 1,
        flags: MMAPABLE,
        name: name("ontime_counters"),
        ..MapAttr::default()
    };
    file(MAP_CREATE, &attr)
}

/// Sets a thread's entry.
pub(crate) fn insert(map: BorrowedFd<'_>, thread: i32, counter: u32) -> io::Result<()> {
    let (key, value) = (thread.to_ne_bytes(), counter.to_ne_bytes());
    let attr =
        EntryAttr { map: map.as_raw_fd() as u32, key: address(&key), value: address(&value), ..EntryAttr::default() };
    bpf(MAP_UPDATE_ELEM, &attr).map(drop)
}

/// Removes a thread's entry. One that is not there is no error.
pub(crate) fn remove(map: BorrowedFd<'_>, thread: i32) {
    let key = thread.to_ne_bytes();
    let _ =
        bpf(MAP_DELETE_ELEM, &EntryAttr { map: map.as_raw_fd() as u32, key: address(&key), ..EntryAttr::default() });
}

/// Loads a program, and attaches it to the tracepoint whose type has the number `attach_to` in the kernel's BTF, until
/// the descriptor is closed.
///
/// # Errors
/// The kernel's, with the verifier's last line.
pub(crate) fn attach(program: &[u64], title: &str, attach_to: u32) -> io::Result<OwnedFd> {
    let mut attr = ProgramAttr {
        kind: TRACING,
        instructions_count: u32::try_from(program.len()).unwrap_or(u32::MAX),
        instructions: address(program),
        license: LICENSE.as_ptr().addr() as u64,
        name: name(title),
        attach_type: TRACE_RAW_TP,
        attach_to,
        ..ProgramAttr::default()
    };
    // The verifier's messages are asked for only where it refuses: with too little room for them it always does.
    let loaded = file(PROG_LOAD, &attr).map_err(|error| {
        let mut log = vec![0_u8; LOG];
        (attr.log_level, attr.log_size, attr.log) = (1, LOG as u32, log.as_mut_ptr().addr() as u64);
        let _ = file(PROG_LOAD, &attr);
        let said = String::from_utf8_lossy(log.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned();
        let mut lines = said.lines().rev().filter(|line| !line.starts_with("processed "));
        let why = format!("{title}: {error} {}", lines.next().unwrap_or_default());
        io::Error::new(error.kind(), why)
    })?;
    // The link holds the program.
    file(RAW_TRACEPOINT_OPEN, &TracepointAttr { program: loaded.as_raw_fd() as u32, ..TracepointAttr::default() })
}
