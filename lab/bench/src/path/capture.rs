//! Reads the emulator's log while requests are sent. This is the only file that does.
//!
//! In: a host's [`Names`]. Out: its requests. The emulator writes into a pipe (a FIFO). A separate thread reads the
//! pipe and keeps only runs of functions: a request of 60,000 instructions, which are 5 MB of log, becomes about ten
//! thousand small records.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};

use super::PathError;
use super::symbols::Names;
use super::window::{Cutter, Incomplete, Run};

/// Requests in the order of their arrivals, those that were not traced whole with the reason; and the names of their
/// functions.
pub(super) type Traced = (Vec<Result<Vec<Run>, Incomplete>>, Names);

/// Size of the pipe, and of one read, bytes.
const PIPE: usize = 1 << 20;
/// Real time between reads of an empty pipe.
const LOOK: Duration = Duration::from_millis(1);
/// Limit of the real time until the emulator closes its log.
const CLOSING: Duration = Duration::from_secs(30);

/// The pipe, and the thread that reads it until the emulator has closed it.
#[derive(Debug)]
pub(super) struct Reader {
    path: PathBuf,
    /// The thread ends where the log has not begun.
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<io::Result<Traced>>>,
}

impl Reader {
    /// Makes the pipe `path` and starts reading, for a host with this number of CPUs.
    pub(super) fn start(path: &Path, cpus: usize, names: Names) -> Result<Self, PathError> {
        let failed = |source: io::Error| PathError::Pipe { path: path.to_owned(), source };
        let _ = fs::remove_file(path);
        rustix::fs::mkfifoat(rustix::fs::CWD, path, Mode::RUSR | Mode::WUSR).map_err(|error| failed(error.into()))?;
        // Opens without waiting for a writer: the emulator opens the pipe when the log is switched on.
        let pipe = rustix::fs::open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())
            .map_err(|error| failed(error.into()))?;
        // If the size cannot be set, the default size works too.
        let _ = rustix::pipe::fcntl_setpipe_size(&pipe, PIPE);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || read(File::from(pipe), Cutter::new(cpus), names, &stopped));
        Ok(Self { path: path.to_owned(), stop, thread: Some(thread) })
    }

    /// The path of the pipe.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Waits until the emulator has closed the pipe, for at most this time. Returns whether it has.
    pub(super) fn wait(&self, limit: Duration) -> bool {
        let start = Instant::now();
        while self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            if start.elapsed() > limit {
                return false;
            }
            thread::sleep(LOOK);
        }
        true
    }

    /// The requests. To be called after the log is off.
    pub(super) fn end(mut self) -> Result<Traced, PathError> {
        if !self.wait(CLOSING) {
            return Err(PathError::Unclosed { seconds: CLOSING.as_secs() });
        }
        let failed = |source| PathError::Pipe { path: self.path.clone(), source };
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(traced)) => traced.map_err(failed),
            Some(Err(_)) | None => Err(failed(io::Error::other("its reader has ended"))),
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = fs::remove_file(&self.path);
    }
}

/// Reads until the writer closes the pipe, or until `stopped` is set.
fn read(mut pipe: File, mut cutter: Cutter, mut names: Names, stopped: &AtomicBool) -> io::Result<Traced> {
    let mut buffer = vec![0; PIPE];
    let mut has_begun = false;
    while !stopped.load(Ordering::Relaxed) {
        match pipe.read(&mut buffer) {
            Ok(0) if has_begun => break,
            Ok(0) => thread::sleep(LOOK),
            Ok(length) => {
                has_begun = true;
                cutter.read(buffer.get(..length).unwrap_or_default(), &mut names);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(LOOK),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok((cutter.finish(&names), names))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::super::tests::{LOG, names};
    use super::*;

    #[test]
    fn requests_are_those_until_the_writer_closes_the_pipe() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        let reader = Reader::start(&path, 1, names()).unwrap();
        let mut writer = File::options().write(true).open(&path).unwrap();
        for part in [LOG, "nothing of it\n", LOG].concat().as_bytes().chunks(1_000) {
            writer.write_all(part).unwrap();
        }
        drop(writer);
        let (requests, names) = reader.end().unwrap();
        assert_eq!(requests.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, true]);
        assert!(names.get(0).is_some() && !path.exists());
    }
}
