//! Kinds of files that hold memory: which of them a reader can use without waiting for another process.

use std::io;
use std::os::fd::AsFd;

/// `statfs`: hugetlbfs, tmpfs (linux/magic.h).
const HUGETLBFS: i64 = 0x9584_58f6;
const TMPFS: i64 = 0x0102_1994;

/// Whether a file is memory: on tmpfs or hugetlbfs, or made by memfd_create. Only these files have seals, and the
/// kernel answers a question about seals without asking the file system. A question about another file's size or kind
/// may block for ever, in a process that serves the file (FUSE).
pub fn is_memory(file: impl AsFd) -> bool {
    rustix::fs::fcntl_get_seals(file).is_ok()
}

/// The type of the file's file system.
#[allow(clippy::unnecessary_cast, reason = "its type differs between architectures")]
fn file_system(file: impl AsFd) -> io::Result<i64> {
    Ok(rustix::fs::fstatfs(file)?.f_type as i64)
}

/// Whether a file is memory in ordinary pages.
pub(crate) fn is_tmpfs(file: impl AsFd) -> io::Result<bool> {
    Ok(file_system(file)? == TMPFS)
}

/// Whether a file is memory that the kernel never swaps out: huge pages, or ordinary pages on a host without swap.
pub(crate) fn stays_resident(file: impl AsFd) -> io::Result<bool> {
    Ok(match file_system(file)? {
        HUGETLBFS => true,
        TMPFS => std::fs::read_to_string("/proc/swaps").is_ok_and(|swaps| swaps.lines().count() <= 1),
        _ => false,
    })
}
