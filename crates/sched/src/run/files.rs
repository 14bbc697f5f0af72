//! A vCPU thread's files in /proc: `schedstat` (`fs/proc/base.c`, `proc_pid_schedstat`) has its times, `stat`
//! (`fs/proc/array.c`, `do_task_stat`) whether it sleeps.
//!
//! An open file belongs to the thread and not to its number: reading it fails with ESRCH after the thread has ended,
//! even if another thread has that number by then. A file is read under a lock of its own (`fs/seq_file.c`): while
//! pacers have one, the daemon's thread must not read it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use ontime_tenants::ThreadId;

use crate::model::Counts;
use crate::run::reader::Reader;

/// Bytes of `stat` that are read: the number and the name, which the kernel limits to 15 bytes, and the state fit well.
const STAT: usize = 64;

/// A thread's open files.
#[derive(Debug)]
pub(crate) struct ThreadFiles {
    schedstat: File,
    stat: Arc<File>,
}

/// The error of a thread that has ended.
pub(crate) fn ended() -> io::Error {
    io::Error::from_raw_os_error(libc::ESRCH)
}

impl ThreadFiles {
    /// Opens the files of thread `id`.
    ///
    /// # Errors
    /// ESRCH or ENOENT if the thread has ended.
    pub(crate) fn open(id: ThreadId) -> io::Result<Self> {
        let open = |name: &str| File::open(format!("/proc/{}/task/{}/{name}", id.pid, id.tid));
        let files = Self { schedstat: open("schedstat")?, stat: Arc::new(open("stat")?) };
        // The files are open, and the number still means this thread: so they are its files.
        id.verify().map_err(|_| ended())?;
        Ok(files)
    }

    /// The thread's counters.
    ///
    /// # Errors
    /// ESRCH if the thread has ended.
    pub(crate) fn counts(&self) -> io::Result<Counts> {
        let mut line = [0; 96];
        let length = self.schedstat.read_at(&mut line, 0)?;
        line.get(..length).and_then(counts).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Whether the thread sleeps now; false if that cannot be read. Not for pacers: reading may take long.
    pub(crate) fn sleeps(&self) -> bool {
        let mut line = [0; STAT];
        let length = self.stat.read_at(&mut line, 0).unwrap_or(0);
        line.get(..length).and_then(sleeps) == Some(true)
    }

    /// Whether the thread sleeps, is stopped, or has ended, for a pacer with its reader. False if that cannot be read
    /// in time.
    pub(crate) fn is_asleep(&self, reader: &mut Reader) -> bool {
        let mut line = [0; STAT];
        let Ok(length) = reader.read_at(&self.stat, 0, &mut line) else { return false };
        line.get(..length).and_then(sleeps).unwrap_or(true)
    }
}

fn counts(line: &[u8]) -> Option<Counts> {
    let mut numbers = line.split(|byte| byte.is_ascii_whitespace()).map(number);
    Some(Counts { ran: numbers.next()??, waited: numbers.next()?? })
}

/// Whether a thread sleeps, is stopped, or has ended, by the start of its `stat`; None if that is not there.
fn sleeps(line: &[u8]) -> Option<bool> {
    state(line).map(|letter| matches!(letter, b'S' | b'T' | b't' | b'Z' | b'X'))
}

/// The state's letter. It follows the name in parentheses, and the name may contain parentheses.
fn state(line: &[u8]) -> Option<u8> {
    let name = line.iter().rposition(|byte| *byte == b')')?;
    line.get(name + 2).copied()
}

/// Digits only. `str::parse` takes three times as long, and a pacer reads ten of these numbers at a check.
fn number(digits: &[u8]) -> Option<u64> {
    let add = |sum: u64, digit: &u8| {
        let digit = digit.wrapping_sub(b'0');
        sum.checked_mul(10)?.checked_add(digit.into()).filter(|_| digit < 10)
    };
    digits.iter().try_fold(0, add).filter(|_| !digits.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedstat_is_read() {
        assert_eq!(counts(b"123 45 6\n"), Some(Counts { ran: 123, waited: 45 }));
        assert_eq!(counts(b"18446744073709551615 0 6\n"), Some(Counts { ran: u64::MAX, waited: 0 }));
        for bad in [&b""[..], b"12", b"x 1 2", b"1 y 2", b" 1 2", b"-1 2", b"18446744073709551616 0", b"1 9/"] {
            assert_eq!(counts(bad), None);
        }
    }

    #[test]
    fn a_state_is_read() {
        assert_eq!(state(b"7 (CPU 0/KVM) S 1 7"), Some(b'S'));
        assert_eq!(state(b"7 (a) R (b) R) D 1 7"), Some(b'D'));
        for bad in [&b""[..], b"7 (CPU", b"7 (CPU)", b"7 (CPU) "] {
            assert_eq!(state(bad), None);
        }
    }
}
