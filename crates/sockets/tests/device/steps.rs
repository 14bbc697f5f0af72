//! Counts the user instructions of a thread of the device process by single-stepping (ptrace), so that the machine's
//! speed and load do not affect the figure. The kernel's instructions are not counted.

use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::driver::PATIENCE;

/// A thread that is single-stepped until [`Steps::end`].
pub(crate) struct Steps {
    thread: u32,
    taken: Arc<AtomicU64>,
    ended: Arc<AtomicBool>,
    tracer: JoinHandle<()>,
}

impl Steps {
    /// Starts single-stepping a child's thread.
    pub(crate) fn begin(thread: u32) -> Self {
        let (taken, ended) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, told) = (taken.clone(), ended.clone());
        let (seized, begun) = channel();
        let tracer = std::thread::spawn(move || step(thread as libc::pid_t, &count, &told, &seized));
        begun.recv().unwrap();
        Self { thread, taken, ended, tracer }
    }

    /// Number of instructions that the thread executes because of `event` until it sleeps again. `event` returns after
    /// the thread has started on it.
    pub(crate) fn of(&self, event: impl FnOnce()) -> u64 {
        self.sleeps();
        let before = self.taken.load(Ordering::SeqCst);
        event();
        self.sleeps();
        self.taken.load(Ordering::SeqCst) - before
    }

    /// Waits until the thread sleeps. A woken or single-stepped thread is not in the sleeping state.
    fn sleeps(&self) {
        let start = Instant::now();
        let state = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.thread)).unwrap();
            stat.rsplit(')').next().unwrap().trim_start().chars().next()
        };
        while state() != Some('S') {
            assert!(start.elapsed() < PATIENCE, "the thread does not come to rest");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends the single-stepping; `wake` wakes the thread.
    pub(crate) fn end(self, wake: impl FnOnce()) {
        self.ended.store(true, Ordering::SeqCst);
        wake();
        self.tracer.join().unwrap();
    }
}

fn step(thread: libc::pid_t, taken: &AtomicU64, ended: &AtomicBool, seized: &Sender<()>) {
    let request = |what, data: libc::c_int| {
        let done = unsafe { libc::ptrace(what, thread, null_mut::<libc::c_void>(), data as usize) };
        assert_eq!(done, 0, "ptrace: {}", std::io::Error::last_os_error());
    };
    let stopped = || {
        let mut status = 0;
        assert_eq!(unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL) }, thread);
        assert!(libc::WIFSTOPPED(status), "the thread has ended");
        libc::WSTOPSIG(status)
    };
    request(libc::PTRACE_SEIZE, 0);
    request(libc::PTRACE_INTERRUPT, 0);
    stopped();
    seized.send(()).unwrap();
    let mut signal = 0;
    while !ended.load(Ordering::SeqCst) {
        request(libc::PTRACE_SINGLESTEP, signal);
        let stop = stopped();
        signal = if stop == libc::SIGTRAP { 0 } else { stop };
        taken.fetch_add(1, Ordering::SeqCst);
    }
    request(libc::PTRACE_DETACH, 0);
}
