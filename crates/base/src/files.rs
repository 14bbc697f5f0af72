//! Reads many small files of `/proc` with few system calls: relative to an open directory, and with one read per file.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{CWD, Mode, OFlags, RawDir};
use rustix::io::Errno;
use rustix::path::Arg;

use crate::wait_limit::limit_waits;

/// Buffer size, bytes. `/proc` creates a file's text at the read, so text that fits comes in one read.
const ONE_READ: usize = 4096;
/// Size of a directory entry with a short name, bytes.
const ENTRY: usize = 32;
/// Size limits of directory buffers, bytes: an entry with the longest name fits into the smallest buffer.
const MIN_BUFFER: usize = 512;
const MAX_BUFFER: usize = 32 << 10;
/// Larger than any file that is read here, bytes.
const SIZE_MAX: usize = 1 << 20;

thread_local! {
    static EXHAUSTED: Cell<Option<Errno>> = const { Cell::new(None) };
}

/// Returns and clears the last failure in this thread that was caused by a lack of descriptors or memory. The file
/// itself may well exist.
pub fn exhausted() -> Option<Errno> {
    EXHAUSTED.take()
}

/// Stores a failure for [`exhausted`].
pub fn note(error: &io::Error) {
    let error = Errno::from_io_error(error);
    if matches!(error, Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM)) {
        EXHAUSTED.set(error);
    }
}

fn noted<T>(result: Result<T, Errno>) -> Result<T, Errno> {
    result.inspect_err(|error| note(&(*error).into()))
}

/// Opens a directory for reading files below it.
pub fn directory(path: impl Arg) -> Result<OwnedFd, Errno> {
    noted(rustix::fs::openat(CWD, path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()))
}

/// Reads a file, at most its first MiB.
pub fn read_at(directory: impl AsFd, path: impl Arg) -> Result<Vec<u8>, Errno> {
    limit_waits(|| read_whole(directory, path))
}

fn read_whole(directory: impl AsFd, path: impl Arg) -> Result<Vec<u8>, Errno> {
    let file = noted(rustix::fs::openat(directory, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()))?;
    let mut text = Vec::with_capacity(ONE_READ);
    loop {
        let room = text.capacity() - text.len();
        match noted(rustix::io::read(&file, rustix::buffer::spare_capacity(&mut text))) {
            Ok(count) if count < room || text.len() >= SIZE_MAX => return Ok(text),
            Ok(_) => text.reserve(text.len()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

/// The target of a symbolic link.
pub fn link_at(directory: impl AsFd, path: impl Arg) -> Result<String, Errno> {
    let target = limit_waits(|| noted(rustix::fs::readlinkat(directory, path, Vec::new())))?;
    Ok(target.to_string_lossy().into_owned())
}

/// The first `limit` entries of a newly opened directory, and whether these are all. Entries that vanish are skipped.
pub fn names(directory: &OwnedFd, limit: usize) -> (Vec<String>, bool) {
    first(directory, limit, |name| (name != "." && name != "..").then(|| name.to_owned()))
}

/// The entries of a directory that are positive numbers, such as processes.
pub fn numbers(directory: &OwnedFd) -> Vec<i32> {
    first_numbers(directory, usize::MAX).0
}

/// The first `limit` entries that are positive numbers, and whether these are all.
pub fn first_numbers(directory: &OwnedFd, limit: usize) -> (Vec<i32>, bool) {
    first(directory, limit, |name| name.parse().ok().filter(|number| *number > 0))
}

/// The kernel creates an inode for each entry of `/proc` that it lists, so the buffer holds little more than `limit`
/// entries.
fn first<T>(directory: &OwnedFd, limit: usize, read: impl Fn(&str) -> Option<T>) -> (Vec<T>, bool) {
    let size = limit.saturating_add(3).saturating_mul(ENTRY).clamp(MIN_BUFFER, MAX_BUFFER);
    let mut buffer = Vec::with_capacity(size);
    let mut entries = RawDir::new(directory, buffer.spare_capacity_mut());
    let mut first = Vec::new();
    while let Some(entry) = entries.next() {
        let Ok(entry) = noted(entry) else { break };
        let Some(value) = entry.file_name().to_str().ok().and_then(&read) else { continue };
        if first.len() >= limit {
            return (first, false);
        }
        first.push(value);
    }
    (first, true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_longer_than_one_read_come_whole() {
        let dir = tempfile::tempdir().unwrap();
        for length in [0, 1, ONE_READ - 1, ONE_READ, ONE_READ + 1, 5 * ONE_READ + 7] {
            std::fs::write(dir.path().join("f"), vec![b'x'; length]).unwrap();
            let opened = directory(dir.path()).unwrap();
            assert_eq!(read_at(&opened, "f").unwrap().len(), length);
        }
    }

    #[test]
    fn directories_are_listed_and_what_is_missing_is_an_error() {
        let (all, whole) = names(&directory("/proc/self").unwrap(), usize::MAX);
        assert!(whole && all.contains(&"stat".to_owned()));
        let own = directory("/proc/self").unwrap();
        assert_eq!(names(&own, 3), (all.get(..3).unwrap().to_vec(), false));
        assert!(link_at(&own, "exe").unwrap().starts_with('/'));
        assert_eq!(read_at(&own, "nothing").unwrap_err(), Errno::NOENT);
        let pid = i32::try_from(std::process::id()).unwrap();
        assert!(numbers(&directory("/proc").unwrap()).contains(&pid));
    }
}
