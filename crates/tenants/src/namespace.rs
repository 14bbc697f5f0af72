//! Looking into a tenant's network namespace: for the end of its veth pair that is there, and for what stands on the
//! host's NICs.
//!
//! Only sockets are used inside, in a thread of its own that ends with the call: nothing of the tenant's files is read.

use std::fs::{self, File};
use std::io;
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::thread::ThreadId;

/// For a socket and what it answers; the daemon's memory is locked, so that a stack of the usual size would be two
/// megabytes.
const STACK: usize = 256 << 10;

/// Runs `run` in the network namespace of a process; in this thread where that is its own.
///
/// # Errors
/// `ESRCH` where the process ended, `EPERM` without CAP_SYS_ADMIN, those of `run`.
pub fn inside<T: Send>(process: ThreadId, run: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    let path = format!("/proc/{}/ns/net", process.pid);
    let namespace = File::open(&path)?;
    let other = fs::read_link(&path)?;
    // The number was still this process's when its namespace was opened.
    process.verify()?;
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
