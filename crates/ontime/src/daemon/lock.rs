//! Lock files that contain the process number of their holder: one daemon per host, and one guardian.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ontime_base::lock_file;
use ontime_tenants::remedy;
use rustix::fs::FlockOperation;
use thiserror::Error;

/// Why the lock was not taken.
#[derive(Debug, Error)]
pub(super) enum LockError {
    /// Another process holds the lock.
    #[error(
        "another daemon runs as process {pid} ({path} is locked); stop it first: systemctl stop ontimed, or kill {pid}"
    )]
    Held {
        /// The lock file.
        path: PathBuf,
        /// The process number in the file.
        pid: String,
    },
    /// The file cannot be used.
    #[error("{path}: {source}; {}", remedy(source))]
    Io {
        /// The lock file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
}

/// The held lock; released when dropped, and by the kernel when the process dies.
#[derive(Debug)]
pub(super) struct Lock {
    _file: File,
}

/// Takes the lock and writes our process number into it.
///
/// # Errors
/// See [`LockError`].
pub(super) fn take(path: &Path) -> Result<Lock, LockError> {
    let fail = |source| LockError::Io { path: path.to_owned(), source };
    let mut file = lock_file::open(path).map_err(fail)?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let mut holder = String::new();
            // A process that has just started may not have written its number yet.
            let _ = file.read_to_string(&mut holder);
            let pid = if holder.trim().is_empty() { "(unknown)".to_owned() } else { holder.trim().to_owned() };
            return Err(LockError::Held { path: path.to_owned(), pid });
        }
        Err(error) => return Err(fail(error.into())),
    }
    file.set_len(0).map_err(fail)?;
    file.rewind().map_err(fail)?;
    writeln!(file, "{}", std::process::id()).map_err(fail)?;
    Ok(Lock { _file: file })
}

/// Waits at most `most` until no process holds the lock. Returns whether it is free.
pub(super) fn wait_until_free(path: &Path, most: Duration) -> bool {
    let start = Instant::now();
    loop {
        match take(path) {
            Err(LockError::Held { .. }) if start.elapsed() < most => std::thread::sleep(Duration::from_millis(10)),
            Err(LockError::Held { .. }) => return false,
            Ok(_) | Err(LockError::Io { .. }) => return true,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_second_is_told_who_holds_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("daemon.lock");
        std::fs::write(&path, "99999999\n").unwrap();
        let held = take(&path).unwrap();
        let refused = take(&path).unwrap_err().to_string();
        assert!(refused.contains(&format!("process {}", std::process::id())), "{refused}");
        assert!(!refused.contains("99999999"), "{refused}");
        drop(held);
        // A child that another test is just starting has a copy of the file until it executes its program.
        let start = Instant::now();
        while let Err(error) = take(&path) {
            assert!(start.elapsed().as_secs() < 60, "{error}");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(matches!(take(&dir.path().join("no/such")), Err(LockError::Io { .. })));
    }

    #[test]
    fn no_other_user_can_hold_the_daemons_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("daemon.lock");
        let _held = take(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_holder_that_goes_is_waited_for_and_one_that_stays_is_not_waited_for_for_ever() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("guardian.lock");
        assert!(wait_until_free(&path, Duration::ZERO), "there is no file yet");
        let held = take(&path).unwrap();
        assert!(!wait_until_free(&path, Duration::from_millis(30)));
        let goes = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            drop(held);
        });
        assert!(wait_until_free(&path, Duration::from_secs(60)));
        goes.join().unwrap();
    }
}
