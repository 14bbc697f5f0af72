//! Runs code in a tenant's network namespace: to find the inner end of its veth pair and interfaces on top of the
//! host's NICs.
//!
//! Inside, only sockets are used, in a separate thread that ends with the call. The tenant's files are not read.

use std::fs::{self, File};
use std::io;
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::thread::ThreadId;
use crate::{files, proc};

/// Stack size, bytes: enough for a socket and its answers. The daemon's memory is locked, and the default stack would
/// lock two megabytes.
const STACK: usize = 256 << 10;

/// Most threads of a process among which one that lives is searched.
const PROBED: usize = 16;

/// The thread. If it is a main thread that has ended, and so has no namespaces any more, another one of its process.
fn living(thread: ThreadId) -> io::Result<ThreadId> {
    let Err(gone) = thread.verify() else { return Ok(thread) };
    let ThreadId { pid, tid, start_time } = thread;
    let stat = fs::read(format!("/proc/{pid}/stat")).ok().and_then(|text| proc::parse_stat(&text));
    if pid != tid || !stat.is_some_and(|stat| stat.has_ended() && stat.start_time == start_time) {
        return Err(gone.into());
    }
    let (tids, _) = files::first_numbers(&files::directory(format!("/proc/{pid}/task"))?, PROBED);
    tids.into_iter().find_map(|tid| ThreadId::of(pid, tid).ok()).ok_or_else(|| gone.into())
}

/// Runs `run` in the network namespace of a thread, or of its process if it is a main thread that has ended; in the
/// calling thread if the namespaces are the same.
///
/// # Errors
/// `ESRCH` if the thread ended, `EPERM` without CAP_SYS_ADMIN, and errors of `run`.
pub fn inside<T: Send>(thread: ThreadId, run: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    let thread = living(thread)?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::without_main_thread;

    #[test]
    fn the_namespace_of_a_process_outlives_its_main_thread() {
        let child = without_main_thread();
        let stat = proc::parse_stat(&fs::read(format!("/proc/{}/stat", child.0)).unwrap()).unwrap();
        assert!(stat.has_ended());
        let main = ThreadId { pid: child.0, tid: child.0, start_time: stat.start_time };
        assert_eq!(inside(main, || Ok(7)).unwrap(), 7);
        let other = ThreadId { start_time: stat.start_time + 1, ..main };
        let refused = inside(other, || Ok(7)).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::ESRCH), "the number was another process's");
    }
}
