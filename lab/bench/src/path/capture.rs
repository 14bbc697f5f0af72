//! Traces requests while they are sent. This is the only file that reads the emulator's log.
//!
//! In: a host and its [`Names`]. Out: a [`Stretch`] per request. The emulator writes into a pipe (a FIFO). A separate
//! thread reads the pipe and keeps only runs of functions: a request of 60,000 instructions, which are 5 MB of log,
//! becomes about ten thousand small records. The log is on from just before a request is sent until its reply has
//! arrived. Between requests the emulator runs at its normal speed.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ontime_lab::{InstructionLog, LabError};
use rustix::fs::{Mode, OFlags};

use super::PathError;
use super::symbols::Names;
use super::window::{Cutter, Incomplete, Run};
use crate::client::{ClientError, Peer, ReplyOutcome};

/// The runs that were read between the log's start and its end.
pub(super) type Stretch = Result<Vec<Run>, Incomplete>;

/// Size of the pipe, and of one read, bytes.
const PIPE: usize = 1 << 20;
/// Real time between reads of an empty pipe.
const LOOK: Duration = Duration::from_millis(1);
/// Limit of the real time until the host is idle.
const BEGINNING: Duration = Duration::from_secs(5);
/// Limit of the real time until the emulator closes its log.
const CLOSING: Duration = Duration::from_secs(30);

/// The pipe, and the thread that reads it.
#[derive(Debug)]
pub(super) struct Reader {
    path: PathBuf,
    stretches: Receiver<Stretch>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<io::Result<Names>>>,
}

/// State shared by the thread and its owner.
#[derive(Debug, Default)]
struct Shared {
    /// The thread must end.
    stop: AtomicBool,
    /// The present stretch has started with an idle host.
    begun: AtomicBool,
}

impl Reader {
    /// Makes the pipe `path` and starts reading.
    pub(super) fn start(path: &Path, names: Names) -> Result<Self, PathError> {
        let failed = |source: io::Error| PathError::Pipe { path: path.to_owned(), source };
        let _ = fs::remove_file(path);
        rustix::fs::mkfifoat(rustix::fs::CWD, path, Mode::RUSR | Mode::WUSR).map_err(|error| failed(error.into()))?;
        // Opens without waiting for a writer: the emulator opens the pipe each time the log is switched on.
        let pipe = rustix::fs::open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())
            .map_err(|error| failed(error.into()))?;
        // If the size cannot be set, the default size works too.
        let _ = rustix::pipe::fcntl_setpipe_size(&pipe, PIPE);
        let (sender, stretches) = channel();
        let shared = Arc::new(Shared::default());
        let own = Arc::clone(&shared);
        let thread = thread::spawn(move || read(File::from(pipe), names, &sender, &own));
        Ok(Self { path: path.to_owned(), stretches, shared, thread: Some(thread) })
    }

    /// The path of the pipe.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Waits until the log has started with an idle host. The emulated CPU notices the change at its next timer. If the
    /// host is never idle, the request is sent nevertheless.
    fn begun(&self) {
        let start = Instant::now();
        while !self.shared.begun.load(Ordering::Relaxed) && start.elapsed() < BEGINNING {
            thread::sleep(LOOK);
        }
    }

    /// The log since it was last switched on. To be called after it is off.
    fn stretch(&self) -> Result<Stretch, PathError> {
        self.stretches.recv_timeout(CLOSING).map_err(|_| PathError::Unclosed { seconds: CLOSING.as_secs() })
    }

    /// Ends the thread. Returns the names, including all that were added.
    pub(super) fn end(mut self) -> Result<Names, PathError> {
        self.shared.stop.store(true, Ordering::Relaxed);
        let failed = |source| PathError::Pipe { path: self.path.clone(), source };
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(names)) => names.map_err(failed),
            Some(Err(_)) | None => Err(failed(io::Error::other("its reader has ended"))),
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        let _ = fs::remove_file(&self.path);
    }
}

/// Reads until `stop` is set. Sends a stretch each time the writer closes the pipe.
fn read(mut pipe: File, mut names: Names, stretches: &Sender<Stretch>, shared: &Shared) -> io::Result<Names> {
    let mut buffer = vec![0; PIPE];
    let mut cutter: Option<Cutter> = None;
    loop {
        match pipe.read(&mut buffer) {
            Ok(0) => {
                if let Some(stretch) = cutter.take() {
                    shared.begun.store(false, Ordering::Relaxed);
                    // The receiver may have given up.
                    let _ = stretches.send(stretch.finish(&names));
                }
            }
            Ok(length) => {
                let bytes = buffer.get(..length).unwrap_or_default();
                let cutter = cutter.get_or_insert_default();
                cutter.read(bytes, &mut names);
                shared.begun.store(cutter.saw_idle(), Ordering::Relaxed);
                continue;
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
        if shared.stop.load(Ordering::Relaxed) {
            return Ok(names);
        }
        thread::sleep(LOOK);
    }
}

/// Sends requests as another peer does, and traces each request after the first `warmup`.
pub(super) struct Traced<'a> {
    peer: Box<dyn Peer>,
    log: InstructionLog,
    reader: &'a Reader,
    warmup: u64,
    is_on: bool,
    stretches: Vec<Stretch>,
}

impl<'a> Traced<'a> {
    /// The log must be off.
    pub(super) fn new(peer: Box<dyn Peer>, log: InstructionLog, reader: &'a Reader, warmup: u64) -> Self {
        Self { peer, log, reader, warmup, is_on: false, stretches: Vec::new() }
    }

    /// The traced stretches, one per request. The log is off afterwards, and its connection ends.
    pub(super) fn into_stretches(mut self) -> Vec<Stretch> {
        // The log is still on only after a failure, which the sender of the requests reports.
        let _ = self.off(false);
        self.stretches
    }

    fn off(&mut self, answered: bool) -> Result<(), ClientError> {
        if std::mem::take(&mut self.is_on) {
            self.log.off().map_err(|error| client_error(&error))?;
            let stretch = self.reader.stretch().map_err(|error| ClientError::Told(error.to_string()))?;
            self.stretches.push(if answered { stretch } else { Err(Incomplete::Unanswered) });
        }
        Ok(())
    }
}

fn client_error(error: &LabError) -> ClientError {
    ClientError::Told(error.to_string())
}

impl Peer for Traced<'_> {
    fn ask(&mut self, sequence: u64) -> Result<bool, ClientError> {
        if sequence > self.warmup {
            self.log.on().map_err(|error| client_error(&error))?;
            self.is_on = true;
            self.reader.begun();
        }
        self.peer.ask(sequence)
    }

    fn wait_reply(&mut self, sequence: u64, limit: Duration) -> Result<ReplyOutcome, ClientError> {
        let outcome = self.peer.wait_reply(sequence, limit)?;
        if outcome == ReplyOutcome::Answer {
            self.off(true)?;
        }
        Ok(outcome)
    }

    fn give_up(&mut self) -> Result<(), ClientError> {
        self.off(false)?;
        self.peer.give_up()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::super::tests::{LOG, names};
    use super::*;

    #[test]
    fn a_stretch_is_what_one_writer_wrote() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        let reader = Reader::start(&path, names()).unwrap();
        for (log, whole) in [(LOG, true), ("nothing of it\n", false), (LOG, true)] {
            let mut writer = File::options().write(true).open(&path).unwrap();
            for part in log.as_bytes().chunks(1_000) {
                writer.write_all(part).unwrap();
            }
            drop(writer);
            assert_eq!(reader.stretch().unwrap().is_ok(), whole);
        }
        let names = reader.end().unwrap();
        assert!(names.get(0).is_some() && !path.exists());
    }
}
