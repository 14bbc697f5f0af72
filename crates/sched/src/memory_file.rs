//! Kinds of files that hold memory: which of them a reader can use without waiting for another process.

use std::io;
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

/// `statfs`: hugetlbfs, tmpfs (linux/magic.h).
const HUGETLBFS: i64 = 0x9584_58f6;
const TMPFS: i64 = 0x0102_1994;

/// Whether a file is memory: on tmpfs or hugetlbfs, or made by memfd_create. Only these files have seals, and the
/// kernel answers a question about seals without asking the file system. A question about another file's size or kind
/// may block for ever, in a process that serves the file (FUSE).
pub fn is_memory(file: impl AsFd) -> bool {
    rustix::fs::fcntl_get_seals(file).is_ok()
}

/// The most files that wait to be closed.
const CLOSING: usize = 64;
type Closing = Box<dyn Send>;

/// Closes a file of a VM's memory in a thread of its own (`ontime-close`, at the policy of the first caller, which is
/// no real-time thread, and nice 0 at the least: freeing memory comes before no other work). If nothing else has the
/// file open, that frees the memory, for a large VM in seconds. Without a thread, or if too many files wait, it is
/// closed here.
pub fn close_elsewhere(file: impl Send + 'static) {
    static CLOSER: OnceLock<Option<SyncSender<Closing>>> = OnceLock::new();
    let start = || {
        let (give, take) = sync_channel::<Closing>(CLOSING);
        let thread = std::thread::Builder::new().name("ontime-close".to_owned()).stack_size(64 * 1024);
        let serve = move || {
            if rustix::process::getpriority_process(None).is_ok_and(|nice| nice < 0) {
                let _ = rustix::process::setpriority_process(None, 0);
            }
            take.into_iter().for_each(drop);
        };
        thread.spawn(serve).ok().map(|_| give)
    };
    if let Some(closer) = CLOSER.get_or_init(start) {
        if let Err(TrySendError::Full(here) | TrySendError::Disconnected(here)) = closer.try_send(Box::new(file)) {
            drop(here);
        }
    }
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    /// Ends only when the other end is dropped, as a close that frees much memory ends late.
    struct Slow(Receiver<()>);

    impl Drop for Slow {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    struct Tells(std::sync::mpsc::Sender<std::thread::ThreadId>);

    impl Drop for Tells {
        fn drop(&mut self) {
            let _ = self.0.send(std::thread::current().id());
        }
    }

    #[test]
    fn a_close_that_takes_long_delays_nobody() {
        let (end, ended) = channel();
        close_elsewhere(Slow(ended));
        let (tell, told) = channel();
        for _ in 0..CLOSING / 2 {
            close_elsewhere(Tells(tell.clone()));
        }
        assert!(told.try_recv().is_err(), "the slow close comes first");
        drop(end);
        assert!((0..CLOSING / 2).all(|_| told.recv().unwrap() != std::thread::current().id()));
        // However many come at once, each is closed.
        for _ in 0..4 * CLOSING {
            close_elsewhere(Tells(tell.clone()));
        }
        assert_eq!((0..4 * CLOSING).filter(|_| told.recv().is_ok()).count(), 4 * CLOSING);
    }
}
