//! Runs code in a tenant's network namespace: to find the inner end of its veth pair and interfaces on top of the
//! host's NICs.
//!
//! Inside, only sockets are used, in a separate thread that ends with the call. The tenant's files are not read.

use std::fs::{self, File};
use std::io;
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::thread::ThreadId;

/// Stack size, bytes: enough for a socket and its answers. The daemon's memory is locked, and the default stack would
/// lock two megabytes.
const STACK: usize = 256 << 10;

/// Runs `run` in the network namespace of a thread; in the calling thread if the namespaces are the same.
///
/// # Errors
/// `ESRCH` if the thread ended, `EPERM` without CAP_SYS_ADMIN, and errors of `run`.
pub fn inside<T: Send>(thread: ThreadId, run: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    let path = format!("/proc/{}/task/{}/ns/net", thread.pid, thread.tid);
    let namespace = File::open(&path)?;
    let other = fs::read_link(&path)?;
    // Verify that the number still meant this thread when its namespace was opened.
    thread.verify()?;
    if fs::read_link("/proc/thread-self/ns/net")? == other {
        return run();
    }
    thread::scope(|scope| {
        let thread = thread::Builder::new().stack_size(STACK).spawn_scoped(scope, || {
            move_into_link_name_space(std::os::fd::AsFd::as_fd(&namespace), Some(LinkNameSpaceType::Network))?;
            run()
        })?;
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread in the namespace ended")))
    })
}
