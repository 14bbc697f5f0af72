//! Connections that the guest has closed but that still exist: the kernel still sends data, or waits for the other end.
//!
//! A TCP socket that is closed with unsent data, or whose FIN is not acknowledged, lives on in the kernel as an orphan
//! for minutes, with all its buffers. The guest's socket limit does not count orphans. The kernel's own limit
//! (`tcp_max_orphans`) applies to the whole host: beyond it the kernel resets orphans of other tenants. So the process
//! keeps such a socket's descriptor until the kernel has nothing left to send. There are as many places for these as
//! the VM may have sockets. A connection that finds no place is reset.
//!
//! A channel's thread puts a descriptor here instead of closing it. This takes two or three atomic operations, and a
//! wake-up if the thread `closing` is parked. That thread runs at normal priority, closes the descriptors, and resets
//! connections that make no progress.

use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use crate::free::Free;
use crate::host;

/// Interval between checks.
const EVERY: Duration = Duration::from_millis(50);
/// A connection whose other end has taken no data for this long is reset. The kernel waits about as long for an orphan.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest time that the kernel waits for the other end's FIN without a socket, s (TCP_TIMEWAIT_LEN). For a longer one
/// the socket would be an orphan at first.
const LONGEST_WAIT: i32 = 60;
/// No descriptor.
const FREE: RawFd = -1;

/// The closed connections of one VM.
pub(crate) struct Closing {
    places: Box<[AtomicI32]>,
    /// Any thread takes a place; only the thread `closing` returns one.
    free: Free,
    thread: OnceLock<Thread>,
    rests: AtomicBool,
}

/// What to do with a closed socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// The kernel still has data to send: keep it.
    Keep,
    /// Close it: nothing is left that needs a descriptor, or the kernel resets the connection by itself.
    Close,
    /// Reset it: the other end takes no data.
    Reset,
}

/// Unacknowledged bytes of a connection, and since when this number has not changed.
#[derive(Debug, Clone, Copy)]
struct Progress {
    unsent: i32,
    since: Instant,
}

impl Closing {
    /// Places for `most` connections.
    pub(crate) fn new(most: u32) -> Self {
        let places = (0..most).map(|_| AtomicI32::new(FREE)).collect();
        Self { places, free: Free::new(most), thread: OnceLock::new(), rests: AtomicBool::new(false) }
    }

    /// Takes over the descriptor of a connection whose FIN was sent. False: no place is free, and the caller keeps the
    /// descriptor.
    pub(crate) fn put(&self, fd: RawFd) -> bool {
        let Some(place) = self.free.take().and_then(|at| self.places.get(at)) else { return false };
        place.store(fd, Ordering::SeqCst);
        // Either the thread sees the descriptor before it parks, or this thread sees that it is parked.
        if self.rests.load(Ordering::SeqCst) && self.rests.swap(false, Ordering::SeqCst) {
            if let Some(thread) = self.thread.get() {
                thread.unpark();
            }
        }
        true
    }

    /// Number of connections.
    pub(crate) fn count(&self) -> usize {
        self.places.iter().filter(|place| place.load(Ordering::Relaxed) != FREE).count()
    }

    /// The thread `closing`; never returns.
    pub(crate) fn run(&self) {
        let _ = self.thread.set(std::thread::current());
        let mut progress = vec![None; self.places.len()];
        loop {
            if self.look(&mut progress) {
                std::thread::sleep(EVERY);
                continue;
            }
            self.rests.store(true, Ordering::SeqCst);
            if self.look(&mut progress) {
                self.rests.store(false, Ordering::SeqCst);
            }
            while self.rests.load(Ordering::SeqCst) {
                std::thread::park();
            }
        }
    }

    /// Checks each connection once. Returns whether one is left. Only for the thread `closing`: no other thread empties
    /// a place.
    fn look(&self, progress: &mut [Option<Progress>]) -> bool {
        let mut left = false;
        for ((place, progress), at) in self.places.iter().zip(progress).zip(0..) {
            let fd = place.load(Ordering::SeqCst);
            if fd == FREE {
                continue;
            }
            let verdict = verdict(host::tcp_state(fd), host::unread(fd), host::unsent(fd), progress, Instant::now());
            if verdict == Verdict::Keep {
                left = true;
                continue;
            }
            *progress = None;
            if verdict == Verdict::Reset {
                host::abort_at_close(fd);
            }
            end(fd);
            place.store(FREE, Ordering::SeqCst);
            self.free.give(at);
        }
        left
    }
}

/// Closes a socket for which the kernel has no data left to send.
///
/// The kernel then waits for the other end's FIN as long as TCP_LINGER2 says, up to [`LONGEST_WAIT`] without a socket.
/// The guest's time holds within these limits; one below 0 is the shortest, as the kernel would reset the connection.
pub(crate) fn end(fd: RawFd) {
    let mut time = [0; 4];
    let _ = host::get_option(fd, libc::IPPROTO_TCP, libc::TCP_LINGER2, &mut time);
    let wanted = i32::from_ne_bytes(time);
    let allowed = wanted.clamp(1, LONGEST_WAIT);
    if allowed != wanted {
        let _ = host::set_option(fd, libc::IPPROTO_TCP, libc::TCP_LINGER2, &allowed.to_ne_bytes());
    }
    host::close(fd);
}

/// Whether a socket in this state would become an orphan at its close: data or a FIN must still be sent or
/// acknowledged.
pub(crate) fn leaves_an_orphan(state: u8) -> bool {
    use host::tcp;
    matches!(state, tcp::ESTABLISHED | tcp::SYN_RECV | tcp::CLOSE_WAIT | tcp::FIN_WAIT1 | tcp::CLOSING | tcp::LAST_ACK)
}

fn verdict(state: u8, unread: i32, unsent: i32, progress: &mut Option<Progress>, now: Instant) -> Verdict {
    // The kernel resets a connection that is closed with unread data.
    if !leaves_an_orphan(state) || unread > 0 {
        return Verdict::Close;
    }
    match progress {
        Some(Progress { unsent: before, since }) if *before == unsent => {
            if now.duration_since(*since) >= PATIENCE {
                Verdict::Reset
            } else {
                Verdict::Keep
            }
        }
        _ => {
            *progress = Some(Progress { unsent, since: now });
            Verdict::Keep
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::IntoRawFd;
    use std::sync::Arc;

    use super::*;
    use crate::host::tcp;

    #[test]
    fn a_connection_is_kept_while_the_other_end_takes_what_is_left() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut progress = None;
        for (state, unread, unsent, seconds, expected) in [
            (tcp::SYN_RECV, 0, 900, 0, Verdict::Keep),
            (tcp::FIN_WAIT1, 0, 900, 0, Verdict::Keep),
            (tcp::FIN_WAIT1, 0, 900, 59, Verdict::Keep),
            (tcp::FIN_WAIT1, 0, 899, 59, Verdict::Keep),
            (tcp::LAST_ACK, 0, 899, 118, Verdict::Keep),
            (tcp::LAST_ACK, 0, 899, 119, Verdict::Reset),
            (tcp::CLOSING, 1, 5, 119, Verdict::Close),
            (tcp::FIN_WAIT2, 0, 0, 119, Verdict::Close),
            (tcp::TIME_WAIT, 0, 0, 119, Verdict::Close),
            (tcp::CLOSE, 0, 0, 119, Verdict::Close),
        ] {
            assert_eq!(
                verdict(state, unread, unsent, &mut progress, at(seconds)),
                expected,
                "state {state}, {seconds} s"
            );
        }
    }

    /// The state, the timer's kind and its time left, s, of the kernel's entry for a connection with these ports
    /// (/proc/net/tcp). Connections to other servers may have the same local port.
    fn entry(near: u16, far: u16) -> Option<(u8, u8, f64)> {
        let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
        let ports = [near, far].map(|port| format!(":{port:04X}"));
        let mut lines = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let fields = lines.find(|fields| fields[1].ends_with(&ports[0]) && fields[2].ends_with(&ports[1]))?;
        let (kind, ticks) = fields[5].split_once(':').unwrap();
        let hexadecimal = |text| u32::from_str_radix(text, 16).unwrap();
        // SAFETY: no memory is passed.
        let ticks_per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
        let left = f64::from(hexadecimal(ticks)) / ticks_per_second as f64;
        Some((hexadecimal(fields[3]) as u8, hexadecimal(kind) as u8, left))
    }

    /// The kernel waits for the other end's FIN as long as the guest says, and never with a socket (timer 3).
    #[test]
    fn a_closed_connection_waits_as_long_as_the_guest_says() {
        const WITHOUT_A_SOCKET: u8 = 3;
        for (linger2, longest) in [(0, 60.0), (5, 10.0), (20, 30.0), (120, 60.0), (-1, 10.0)] {
            let server = TcpListener::bind("127.0.0.1:0").unwrap();
            let near = TcpStream::connect(server.local_addr().unwrap()).unwrap();
            let _far = server.accept().unwrap().0;
            let ports = [near.local_addr(), near.peer_addr()].map(|address| address.unwrap().port());
            let fd = near.into_raw_fd();
            host::set_option(fd, libc::IPPROTO_TCP, libc::TCP_LINGER2, &i32::to_ne_bytes(linger2)).unwrap();
            host::shutdown(fd, libc::SHUT_RDWR).unwrap();
            while host::tcp_state(fd) != tcp::FIN_WAIT2 {
                std::thread::sleep(Duration::from_millis(1));
            }
            end(fd);
            // A short wait may be over.
            if let Some((state, timer, left)) = entry(ports[0], ports[1]) {
                assert_eq!((state, timer), (tcp::FIN_WAIT2, WITHOUT_A_SOCKET), "TCP_LINGER2 {linger2}");
                assert!(left <= longest, "TCP_LINGER2 {linger2}: {left} s are left");
            }
        }
    }

    /// Connections that stay must not hide free places, wherever they are.
    #[test]
    fn every_free_place_is_found() {
        let closing = Closing::new(1000);
        assert!(!Closing::new(0).put(1));
        for round in 0..5 {
            // No thread runs, so the numbers need not be descriptors.
            assert!((0..1000).all(|number| closing.put(7000 + number)), "round {round}");
            assert!(!closing.put(9000) && closing.count() == 1000);
            // All but one in a hundred end, in a different order each round.
            for at in (0..1000u32).map(|at| (at * 7 + round) % 1000).filter(|at| at % 100 != round) {
                closing.places[at as usize].store(FREE, Ordering::SeqCst);
                closing.free.give(at);
            }
            assert_eq!(closing.count(), 10);
            assert!((0..990).all(|number| closing.put(8000 + number)) && !closing.put(9000));
            for at in 0..1000 {
                closing.places[at as usize].store(FREE, Ordering::SeqCst);
                closing.free.give(at);
            }
        }
        // Several threads take places and one returns them: none is lost and none is given twice.
        let taken = std::thread::scope(|scope| {
            let all: Vec<_> = (0..4)
                .map(|thread| {
                    scope.spawn({
                        let closing = &closing;
                        move || (0..300).filter(|number| closing.put(thread * 1000 + number)).count()
                    })
                })
                .collect();
            all.into_iter().map(|thread| thread.join().unwrap()).sum::<usize>()
        });
        assert_eq!((taken, closing.count()), (1000, 1000));
    }

    /// Real connections: the number of places limits how many are kept, and each is closed after its other end has read
    /// all data.
    #[test]
    fn there_are_no_more_than_places_and_each_comes_to_its_end() {
        let closing = Arc::new(Closing::new(3));
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let connection = || {
            let mut near = TcpStream::connect(server.local_addr().unwrap()).unwrap();
            let far = server.accept().unwrap().0;
            near.set_nonblocking(true).unwrap();
            while std::io::Write::write(&mut near, &[7; 1 << 16]).is_ok() {}
            near.shutdown(std::net::Shutdown::Both).unwrap();
            (near.into_raw_fd(), far)
        };
        let mut connections: Vec<_> = (0..4).map(|_| connection()).collect();
        let put: Vec<bool> = connections.iter().map(|(fd, _)| closing.put(*fd)).collect();
        assert_eq!((put, closing.count()), (vec![true, true, true, false], 3));
        let (refused, _) = connections.pop().unwrap();
        host::close(refused);
        let thread = closing.clone();
        std::thread::spawn(move || thread.run());
        std::thread::sleep(4 * EVERY);
        assert_eq!(closing.count(), 3, "nobody has read yet");
        // The thread parks when all are gone and is woken for the next.
        for _ in 0..2 {
            for (_, mut far) in connections.drain(..) {
                assert!(far.read_to_end(&mut Vec::new()).unwrap() > 1 << 16);
            }
            let start = Instant::now();
            while closing.count() > 0 || !closing.rests.load(Ordering::SeqCst) {
                assert!(start.elapsed() < PATIENCE, "{} are left", closing.count());
                std::thread::sleep(Duration::from_millis(5));
            }
            connections.push(connection());
            assert!(closing.put(connections[0].0));
        }
    }
}
