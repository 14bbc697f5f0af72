//! How the guardian notices that the daemon has died.
//!
//! A pipe's reader gets EOF when its last writing end is closed. The daemon's files are closed only when the last of
//! its threads, the main thread, has ended. But the main thread runs at normal priority. A guest that spins at
//! real-time priority on its CPU, no longer capped, could keep the main thread from ever ending. So a separate thread
//! at the guardian's priority holds the only writing end, in a descriptor table of its own. It is killed with the
//! others and ends at once.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;

use ontime_tenants::{Policy, ThreadId};
use rustix::pipe::{PipeFlags, pipe_with};

use super::cap::place::place_self;
use super::own::this_thread;

/// The thread. Dropping this ends it, and closes the pipe.
#[derive(Debug)]
pub(super) struct Life {
    /// The thread, if it has the priority that it was to have.
    pub placed: Option<ThreadId>,
    stop: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Life {
    /// Starts the thread at this policy and priority. Returns the end of the pipe that gets EOF when the thread ends.
    ///
    /// # Errors
    /// The kernel's error, where a thread, a pipe or a descriptor table cannot be created.
    pub(super) fn start(place: Policy) -> io::Result<(Self, OwnedFd)> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
        let (stopped, stop) = pipe_with(PipeFlags::CLOEXEC)?;
        let (tell, told) = sync_channel(1);
        let keep = [stopped.as_raw_fd(), writer.as_raw_fd()];
        let thread = std::thread::Builder::new().name("ontime-life".into()).stack_size(64 * 1024).spawn(move || {
            let alone = own_files(keep);
            let go = alone.is_ok();
            // Without the right to this priority the guardian notices the death later.
            let placed = place_self(place).and_then(|()| this_thread());
            let _ = tell.send(alone.map(|()| placed.ok()));
            if go {
                wait(keep[0]);
            }
        })?;
        let alone = told.recv().map_err(|_| io::Error::other("the thread that the guardian watches has ended"))?;
        // The thread has copies of these in its own descriptor table.
        drop((writer, stopped));
        Ok((Self { placed: alone?, stop: Some(stop), thread: Some(thread) }, reader))
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Gives the calling thread a descriptor table of its own with only these two, and blocks all signals: signal handlers
/// write to descriptors of the other table.
fn own_files(keep: [RawFd; 2]) -> io::Result<()> {
    let [low, high] = [keep[0].min(keep[1]), keep[0].max(keep[1])].map(|fd| libc::c_uint::try_from(fd).unwrap_or(0));
    let mut all = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: fills the set, which is this function's own.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: the set is read, and was filled; nothing is written.
    let masked = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), std::ptr::null_mut()) };
    if masked != 0 {
        return Err(io::Error::from_raw_os_error(masked));
    }
    // SAFETY: takes flags, touches no memory. From here on the thread has copies of all descriptors.
    if unsafe { libc::unshare(libc::CLONE_FILES) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let close = |from: libc::c_uint, to: libc::c_uint| {
        if from <= to {
            // SAFETY: closes descriptors of this thread's own table. The thread uses only the two that stay open.
            unsafe { libc::syscall(libc::SYS_close_range, from, to, 0) };
        }
    };
    if low > 0 {
        close(0, low - 1);
    }
    close(low + 1, high.saturating_sub(1));
    close(high + 1, libc::c_uint::MAX);
    Ok(())
}

/// Waits until the other end is closed.
fn wait(stopped: RawFd) {
    let mut byte = 0u8;
    // SAFETY: reads at most one byte into a byte. The descriptor belongs to this thread until it ends. Signals are
    // blocked, so none interrupts the read.
    unsafe { libc::read(stopped, (&raw mut byte).cast(), 1) };
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, poll};
    use rustix::time::Timespec;

    use super::*;

    fn ended(reader: &OwnedFd, ms: i64) -> bool {
        let time = Timespec { tv_sec: ms / 1_000, tv_nsec: ms % 1_000 * 1_000_000 };
        poll(&mut [PollFd::new(reader, PollFlags::IN)], Some(&time)).unwrap() > 0
    }

    #[test]
    fn the_pipe_lives_as_long_as_the_thread_and_no_longer() {
        let (life, reader) = Life::start(Policy::BULK).unwrap();
        assert!(!ended(&reader, 50));
        // This thread still has its own files.
        std::fs::read("/proc/self/stat").unwrap();
        drop(life);
        assert!(ended(&reader, 60_000));
    }
}
