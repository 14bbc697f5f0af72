//! Limits how long a thread waits for a socket of another process while it reads that process's files in `/proc`.
//!
//! Such a read holds a reference for some microseconds: to an open file (`fd`, `fdinfo`: `fs/proc/fd.c`), or to the
//! address space, whose mappings hold files (`stat`, `status`, `cmdline`: `get_task_mm`). If the process drops its own
//! reference in that time, the reading thread has the last one, and closes the file before it returns from the system
//! call (`fs/file_table.c`, `fput`). Closing a socket with SO_LINGER and unsent data waits for the linger time, which
//! the socket's owner chose and which may be years.
//!
//! A thread also closes descriptors that another process sends it over a Unix socket and that it does not receive
//! (`include/net/scm.h`, `scm_destroy`). From Linux 6.16 on a socket can refuse them ([`refuse_descriptors`]).
//!
//! The kernel ends the wait if the thread has a signal pending: TCP and MPTCP (`net/core/stream.c`,
//! `sk_stream_wait_close`), SCTP (`sctp_wait_for_close`), vsock (`virtio_transport_wait_close`), SMC
//! (`smc_close_stream_wait`) and Bluetooth (`bt_sock_wait_state`). So while a thread reads, a timer sends the thread a
//! signal every [`LIMIT`]. The handler does nothing, and the read itself is complete: its result is not lost. Files
//! that one system call closes together wait for [`LIMIT`] together, because the signal stays pending until the thread
//! returns from the system call.
//!
//! The alternative is a thread for each read that is abandoned if it takes too long. It would also cover closes that no
//! signal ends (docs/reference/security.md, "Known gaps"), but it cannot tell a file that waits from a machine that is
//! busy: then it would miss the threads of a VM that has done nothing wrong.
//!
//! On PREEMPT_RT the timer expires in `ktimers/N`, at FIFO 1 or 2. A thread that waits leaves its CPU to it, but the
//! signal is late as long as other real-time threads keep that CPU busy. Of the daemon's real-time threads only a
//! pacer's reader and `ontime-change`, below the guardian, read `stat` of other processes, both for 0.2 ms.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;
use std::sync::Once;
use std::time::Duration;

/// The longest wait in one system call.
const LIMIT: Duration = Duration::from_millis(10);

/// Missing in the libc crate.
const SO_PASSRIGHTS: libc::c_int = 83;

/// Has the kernel refuse descriptors that are sent to this Unix socket, or to those accepted from it, so that nobody
/// here has to close them (EPERM for the sender).
///
/// # Errors
/// ENOPROTOOPT before Linux 6.16.
pub fn refuse_descriptors(socket: impl AsFd) -> io::Result<()> {
    let off: libc::c_int = 0;
    let length = size_of::<libc::c_int>() as libc::socklen_t;
    let socket = socket.as_fd().as_raw_fd();
    // SAFETY: the value lives across the call, and is as long as is said.
    let done = unsafe { libc::setsockopt(socket, libc::SOL_SOCKET, SO_PASSRIGHTS, (&raw const off).cast(), length) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

thread_local! {
    static TIMER: RefCell<Option<Timer>> = const { RefCell::new(None) };
    /// Whether the timer runs.
    static RUNS: Cell<bool> = const { Cell::new(false) };
}

/// Reads another process's files, or from its Unix socket, by `read`, in which no close of a socket waits longer than
/// [`LIMIT`]. May be nested.
/// System calls that wait for other things must stay outside, unless they are restarted after a signal (SA_RESTART).
pub fn limit_waits<T>(read: impl FnOnce() -> T) -> T {
    let _running = Running::start();
    read()
}

/// The outermost call in a thread. Stops the timer at its end.
struct Running {
    outermost: bool,
}

impl Running {
    fn start() -> Self {
        let outermost = !RUNS.get() && TIMER.with_borrow_mut(start).inspect_err(warn).is_ok();
        if outermost {
            RUNS.set(true);
        }
        Self { outermost }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.outermost {
            RUNS.set(false);
            // Stopping a timer that exists does not fail.
            let _ = TIMER.with_borrow(|timer| timer.as_ref().map_or(Ok(()), |timer| timer.set(Duration::ZERO)));
        }
    }
}

/// Starts the thread's timer, which is created at the first use.
fn start(timer: &mut Option<Timer>) -> io::Result<()> {
    let timer = match timer {
        Some(timer) => timer,
        None => timer.insert(Timer::new()?),
    };
    timer.set(LIMIT)
}

/// Without a timer, reading goes on: a kernel without memory for one must not keep VMs from being found.
fn warn(error: &io::Error) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        tracing::warn!(
            "no timer limits the waits for other processes' sockets: {error}; see RLIMIT_SIGPENDING of this user"
        );
    });
}

/// A timer that sends a signal to the thread that created it. A process that is forked has no timers of its parent.
struct Timer(libc::timer_t);

impl Timer {
    fn new() -> io::Result<Self> {
        extern "C" fn ignore(_: libc::c_int) {}
        // SAFETY: zeroes are a valid sigaction: no flags, an empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = ignore as extern "C" fn(libc::c_int) as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
        // SAFETY: the kernel reads the action, which outlives the call. The handler touches nothing.
        result(unsafe { libc::sigaction(signal(), &raw const action, ptr::null_mut()) })?;
        // A blocked signal ends no wait.
        mask(libc::SIG_UNBLOCK)?;
        // SAFETY: zeroes are a valid sigevent.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = signal();
        event.sigev_notify_thread_id = rustix::thread::gettid().as_raw_nonzero().get();
        let mut timer: libc::timer_t = ptr::null_mut();
        // SAFETY: the event is read, the timer's number is written; both outlive the call.
        result(unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) })?;
        Ok(Self(timer))
    }

    /// Signals every `interval` from now on; zero stops the timer.
    fn set(&self, interval: Duration) -> io::Result<()> {
        let interval = libc::timespec { tv_sec: 0, tv_nsec: interval.subsec_nanos().into() };
        let times = libc::itimerspec { it_interval: interval, it_value: interval };
        // SAFETY: the timer exists as long as this value; the times are read and outlive the call.
        result(unsafe { libc::timer_settime(self.0, 0, &raw const times, ptr::null_mut()) })
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        // SAFETY: the timer exists, and nothing uses its number afterwards.
        unsafe { libc::timer_delete(self.0) };
    }
}

/// `hostnet::kvm` uses SIGRTMIN.
fn signal() -> libc::c_int {
    libc::SIGRTMIN() + 1
}

/// Blocks or unblocks the signal in this thread.
fn mask(how: libc::c_int) -> io::Result<()> {
    // SAFETY: zeroes are a valid set of signals, as sigemptyset would make it.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: the number is that of a signal; the set is this function's own.
    result(unsafe { libc::sigaddset(&raw mut set, signal()) })?;
    // SAFETY: the set is read and outlives the call; only the mask of this thread changes.
    match unsafe { libc::pthread_sigmask(how, &raw const set, ptr::null_mut()) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

fn result(returned: libc::c_int) -> io::Result<()> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;
    use std::thread;

    use super::*;
    use crate::files;

    /// A connection that lingers for a day when it is closed, because the other side reads nothing.
    fn lingering(listener: &TcpListener) -> (TcpStream, TcpStream) {
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        near.set_nonblocking(true).unwrap();
        while near.write(&[0; 65_536]).is_ok() {}
        near.set_nonblocking(false).unwrap();
        rustix::net::sockopt::set_socket_linger(&near, Some(Duration::from_secs(24 * 3600))).unwrap();
        (near, far)
    }

    /// Whether a thread that runs this ends long before the linger time.
    fn ends(run: impl FnOnce() + Send + 'static) -> bool {
        let (tell, told) = mpsc::channel();
        let thread = thread::spawn(move || {
            run();
            tell.send(()).unwrap();
        });
        let ended = told.recv_timeout(Duration::from_secs(60)).is_ok();
        ended && thread.join().is_ok()
    }

    fn own_files() -> std::os::fd::OwnedFd {
        files::directory(format!("/proc/{}/fd", std::process::id())).unwrap()
    }

    /// The last close, as at the end of a read whose file was closed meanwhile.
    #[test]
    fn closing_another_process_socket_does_not_wait_for_its_linger_time() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (nears, _fars): (Vec<_>, Vec<_>) = (0..3).map(|_| lingering(&listener)).unzip();
        assert!(ends(|| limit_waits(|| drop(nears))));
    }

    /// One thread replaces and closes descriptors while another reads their links. With each round, either may be the
    /// one that has the last reference. Only with luck does a round find the reading thread there.
    #[test]
    fn reading_links_of_sockets_that_are_closed_meanwhile_ends() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (nears, _fars): (Vec<_>, Vec<_>) = (0..20).map(|_| lingering(&listener)).unzip();
        let stop = std::sync::Arc::new(AtomicBool::new(false));
        let stopped = std::sync::Arc::clone(&stop);
        let numbers: Vec<_> = nears.iter().map(|near| near.as_raw_fd().to_string()).collect();
        let reader = thread::spawn(move || {
            let open = own_files();
            while !stopped.load(Ordering::Relaxed) {
                for number in &numbers {
                    let _ = files::link_at(&open, number.as_str());
                }
            }
        });
        let closed = ends(|| nears.into_iter().for_each(|near| limit_waits(|| drop(near))));
        stop.store(true, Ordering::Relaxed);
        assert!(closed && ends(move || reader.join().unwrap()));
    }

    /// A signal in the middle changes no result, and none comes later.
    #[test]
    fn what_is_read_is_whole_and_waits_outside_are_not_interrupted() {
        let sleep = |time: Duration| {
            let time = rustix::time::Timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
            rustix::thread::nanosleep(&time)
        };
        let whole = limit_waits(|| {
            let interrupted = matches!(sleep(10 * LIMIT), rustix::thread::NanosleepRelativeResult::Interrupted(_));
            let nested = limit_waits(|| files::names(&own_files(), usize::MAX).1);
            let again = matches!(sleep(10 * LIMIT), rustix::thread::NanosleepRelativeResult::Interrupted(_));
            interrupted && nested && again
        });
        assert!(whole);
        assert!(matches!(sleep(10 * LIMIT), rustix::thread::NanosleepRelativeResult::Ok));
    }

    /// A thread may have the signal blocked.
    #[test]
    fn a_thread_that_blocks_the_signal_is_not_kept_either() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (near, _far) = lingering(&listener);
        assert!(ends(|| {
            mask(libc::SIG_BLOCK).unwrap();
            limit_waits(|| drop(near));
        }));
    }
}
