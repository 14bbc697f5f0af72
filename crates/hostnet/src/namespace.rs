//! Looking into a tenant's network namespace: for the end of its veth pair that is there.
//!
//! Only sockets are used inside, in a thread of its own that ends with the call: nothing of the tenant's files is read.

use std::fs::{self, File};
use std::io;
use std::thread;

use ontime_tenants::ThreadId;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Runs `run` in the network namespace of a process; in this thread where that is its own.
///
/// # Errors
/// `ESRCH` where the process ended, `EPERM` without CAP_SYS_ADMIN, those of `run`.
pub(crate) fn inside<T: Send>(process: ThreadId, run: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    let path = format!("/proc/{}/ns/net", process.pid);
    let namespace = File::open(&path)?;
    let other = fs::read_link(&path)?;
    // The number was still this process's when its namespace was opened.
    process.verify()?;
    if fs::read_link("/proc/thread-self/ns/net")? == other {
        return run();
    }
    let entered = thread::scope(|scope| {
        let thread = scope.spawn(|| {
            move_into_link_name_space(std::os::fd::AsFd::as_fd(&namespace), Some(LinkNameSpaceType::Network))?;
            run()
        });
        thread.join()
    });
    entered.unwrap_or_else(|_| Err(io::Error::other("the thread in the namespace ended")))
}
