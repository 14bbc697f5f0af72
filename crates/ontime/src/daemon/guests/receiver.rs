//! Receives from one device process, in a thread with a descriptor table of its own.
//!
//! A device process may send any descriptor. Reading its size, or even closing it, may block on the process that made
//! it: a FUSE file system may answer FLUSH as late as it likes, and not even a signal ends that wait; a TCP socket may
//! linger. The kernel also closes descriptors that nobody has received when a connection is closed. So all of this
//! happens in this thread, which can be abandoned: because its descriptor table is separate, it then holds no
//! descriptor of the daemon.
//!
//! In: a connection. Out: the same bytes, and the descriptors that are memory ([`is_memory`]), for which no operation
//! blocks. At the first descriptor of another kind the connection ends.
//!
//! Each line makes the daemon test an admission, and perhaps look at the whole host. So the next line is passed on when
//! the daemon has answered the last one and the bucket has a token; the daemon takes tokens for its time. Data without
//! an end of line counts as a line. Meanwhile the device process waits.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

use ontime_base::Bucket;
use ontime_base::bucket::REFILL;
use ontime_sched::published::is_memory;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

use crate::daemon::nice;

/// The stack size, bytes. The daemon's memory is locked, so it is not larger than necessary.
const STACK: usize = 256 << 10;

/// The tokens of a VM, for lines and for the daemon's time.
pub(super) type Tokens = Arc<Mutex<Bucket>>;

/// A receiver and its ends for the main thread.
#[derive(Debug)]
pub(super) struct Started {
    /// Received data.
    pub received: UnixStream,
    /// Takes a message when a line has been answered.
    pub answered: Sender<()>,
    pub thread: JoinHandle<()>,
}

/// Starts the receiver. Answers are written to `stream`. The thread ends some time after `stream` and the ends of
/// [`Started`] are closed; close `stream` first. It takes a token for each line.
///
/// # Errors
/// The kernel's error; `ENOSYS` before Linux 5.9.
pub(super) fn start<const FILES: usize>(stream: &UnixStream, tokens: Tokens) -> io::Result<Started> {
    let (received, give) = UnixStream::pair()?;
    received.set_nonblocking(true)?;
    let numbers = (stream.as_raw_fd(), give.as_raw_fd());
    let (tell, told) = sync_channel(1);
    let (answered, answers) = channel();
    let thread = Builder::new().name("ontime-guest".to_owned()).stack_size(STACK).spawn(move || {
        // A guest waits for the answer to each request. While no method is applied, the main thread refuses it.
        nice::of_this_thread(nice::APPLYING);
        match own_table(numbers) {
            Ok((stream, give)) => {
                let _ = tell.send(Ok(()));
                relay::<FILES>(&stream, &give, &tokens, &answers);
                // Descriptors that were not received are closed with the last reference to the stream. Wait here, so
                // that this thread and not the daemon closes it last.
                let _ = give.shutdown(std::net::Shutdown::Write);
                let _ = (&give).read(&mut [0]);
            }
            Err(error) => drop(tell.send(Err(error))),
        }
    })?;
    // Until then the thread still needs these descriptor numbers.
    told.recv().map_err(io::Error::other)??;
    drop(give);
    Ok(Started { received, answered, thread })
}

/// Closes all descriptors of this thread but the standard streams and these two.
fn own_table((stream, give): (RawFd, RawFd)) -> io::Result<(UnixStream, UnixStream)> {
    // SAFETY: takes flags only; from then on this thread has a descriptor table of its own.
    if unsafe { libc::unshare(libc::CLONE_FILES) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let (first, second) = (stream.min(give), stream.max(give));
    for (from, to) in [(3, first - 1), (first + 1, second - 1), (second + 1, RawFd::MAX)] {
        if from <= to {
            // SAFETY: takes numbers only. They are this thread's own copies, and the thread uses no other of them.
            let closed = unsafe { libc::syscall(libc::SYS_close_range, from, to, 0) };
            if closed != 0 {
                return Err(io::Error::last_os_error());
            }
        }
    }
    // SAFETY: it is open in this thread's table, and nothing else in this table owns it.
    let stream = unsafe { UnixStream::from_raw_fd(stream) };
    // SAFETY: as above.
    let give = unsafe { UnixStream::from_raw_fd(give) };
    Ok((stream, give))
}

/// Passes data on until one end is closed or a descriptor arrives that is not memory.
fn relay<const FILES: usize>(stream: &UnixStream, give: &UnixStream, tokens: &Tokens, answers: &Receiver<()>) {
    let mut chunk = [0; 4096];
    // Waits for a token. Returns whether the device process and the main thread still have their ends.
    let may_go_on = || loop {
        if tokens.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return true;
        }
        let mut ends = [PollFd::new(stream, PollFlags::RDHUP), PollFd::new(give, PollFlags::IN)];
        match poll(&mut ends, Timespec::try_from(REFILL).ok().as_ref()) {
            Ok(0) | Err(Errno::INTR) => {}
            _ => return false,
        }
    };
    loop {
        let mut ready = [PollFd::new(stream, PollFlags::IN), PollFd::new(give, PollFlags::IN)];
        match poll(&mut ready, None) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(_) => return,
        }
        let [_, gone] = ready.map(|of| !of.revents().is_empty());
        if gone {
            return;
        }
        let (count, mut files) = match receive::<FILES>(stream, &mut chunk) {
            Ok((0, _)) => return,
            Ok(received) => received,
            Err(Errno::INTR | Errno::AGAIN) => continue,
            Err(_) => return,
        };
        if !files.iter().all(is_memory) {
            let _ = give.shutdown(std::net::Shutdown::Write);
            return;
        }
        let bytes = chunk.get(..count).unwrap_or_default();
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            if !may_go_on() || pass_on::<FILES>(give, part, &std::mem::take(&mut files)).is_err() {
                return;
            }
            if part.ends_with(b"\n") && answers.recv().is_err() {
                return;
            }
        }
    }
}

fn receive<const FILES: usize>(stream: &UnixStream, chunk: &mut [u8]) -> rustix::io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(stream, &mut [IoSliceMut::new(chunk)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            files.extend(more);
        }
    }
    Ok((received.bytes, files))
}

fn pass_on<const FILES: usize>(mut give: &UnixStream, bytes: &[u8], files: &[OwnedFd]) -> io::Result<()> {
    let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let sent = sendmsg(give, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    give.write_all(bytes.get(sent..).unwrap_or_default())
}
