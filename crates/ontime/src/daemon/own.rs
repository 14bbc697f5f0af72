//! The places of the daemon's own real-time threads. Root may change them from outside: `chrt`, or SysRq `n`, which
//! moves every real-time thread of a program to SCHED_OTHER. A change of policy causes no event, so the daemon looks.
//! Without this, a cap watcher at normal priority would count as one that holds every thread.

use std::fmt;
use std::io;
use std::time::Duration;

use ontime_tenants::{Policy, ThreadError, ThreadId};

/// The time from one look to the next, while the daemon caps or paces a thread.
pub(super) const EVERY: Duration = Duration::from_secs(1);

/// A thread of the daemon or its guardian, and its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OwnThread {
    /// What it does, as its name says.
    pub name: &'static str,
    pub id: ThreadId,
    /// The policy and priority that it was started with.
    pub place: Policy,
}

/// A change that was undone.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Changed {
    own: OwnThread,
    found: Policy,
}

impl fmt::Display for Changed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { own: OwnThread { name, place, .. }, found } = self;
        write!(f, "changed by another program: {name} {place} -> {found}; restored; look for who sets its policy")
    }
}

/// The calling thread.
///
/// # Errors
/// Where `/proc` cannot be read.
pub(super) fn this_thread() -> io::Result<ThreadId> {
    let process = rustix::process::getpid().as_raw_nonzero().get();
    Ok(ThreadId::of(process, rustix::thread::gettid().as_raw_nonzero().get())?)
}

/// Gives a thread its place back. None: the thread has its place, or has ended.
///
/// # Errors
/// The kernel refuses.
pub(super) fn keep(own: OwnThread) -> Result<Option<Changed>, ThreadError> {
    match restore(own) {
        Err(ThreadError::Gone(_)) => Ok(None),
        done => done,
    }
}

fn restore(own: OwnThread) -> Result<Option<Changed>, ThreadError> {
    let found = own.id.policy()?;
    if found == own.place {
        return Ok(None);
    }
    own.id.set_policy(own.place)?;
    Ok(Some(Changed { own, found }))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_thread_that_was_moved_gets_its_place_back() {
        let (tell, told) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            tell.send(this_thread().unwrap()).unwrap();
            let _ = ended.recv();
        });
        let id = told.recv().unwrap();
        // The real places need CAP_SYS_NICE; any user may lower a thread.
        let real_time = rustix::process::geteuid().is_root();
        let place = if real_time { Policy::Fifo(1) } else { Policy::Idle };
        let own = OwnThread { name: "ontime-cap", id, place };
        let said = keep(own).unwrap().unwrap().to_string();
        assert!(said.contains(&format!("ontime-cap {place} -> OTHER")) && said.contains("; restored"), "{said}");
        assert_eq!((id.policy().unwrap(), keep(own).unwrap()), (place, None));
        // As SysRq n does.
        if real_time {
            id.set_policy(Policy::BULK).unwrap();
            assert_eq!(keep(own).unwrap(), Some(Changed { own, found: Policy::BULK }));
            assert_eq!(id.policy().unwrap(), place);
        }
        drop(end);
        thread.join().unwrap();
        // The kernel may take a moment to unhash the thread.
        while id.verify().is_ok() {
            std::thread::yield_now();
        }
        assert_eq!(keep(own).unwrap(), None, "it has ended");
    }
}
