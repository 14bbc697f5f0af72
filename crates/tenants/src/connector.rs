//! The kernel's process events (`NETLINK_CONNECTOR`, `CN_IDX_PROC`), filtered in the kernel for tenants.
//!
//! Input: the processes to follow. Output: [`Event`]s. Source: `include/uapi/linux/cn_proc.h`,
//! `drivers/connector/cn_proc.c`.
//!
//! Every fork and exit on the host causes an event. A classic BPF filter on the socket drops, before the reader wakes
//! up, all events except: programs that start (exec); threads that are created, renamed or ended in a followed process;
//! children of a followed process; and new kernel threads. The filter costs a few compares per event.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use netlink_sys::protocols::NETLINK_CONNECTOR;
use netlink_sys::{Socket, SocketAddr};
use rustix::event::{PollFd, PollFlags};
use rustix::time::Timespec;

use crate::budget::Account;

const CN_IDX_PROC: u32 = 1;
const CN_VAL_PROC: u32 = 1;
const PROC_CN_MCAST_LISTEN: u32 = 1;

const PROC_EVENT_NONE: u32 = 0;
const PROC_EVENT_FORK: u32 = 1;
const PROC_EVENT_EXEC: u32 = 2;
const PROC_EVENT_COMM: u32 = 0x200;
const PROC_EVENT_EXIT: u32 = 0x8000_0000;

/// `struct nlmsghdr` (16) and `struct cn_msg` (20) come before `struct proc_event`.
const EVENT_AT: usize = 36;
/// `what`, `cpu` and `timestamp_ns` come before the event's own data.
const DATA_AT: usize = EVENT_AT + 16;
const KTHREADD: u32 = 2;

/// Classic BPF jumps reach 255 instructions. With more processes than this, the filter passes every event.
pub(crate) const FOLLOWED_MAX: usize = 240;

/// Receive buffer, bytes: about 1,300 events.
const RECEIVE_BUFFER: libc::c_int = 1 << 20;

/// An event that may concern a tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A process runs a new program.
    Exec {
        /// The number of the process.
        pid: i32,
    },
    /// A process or thread was created.
    Fork {
        /// The parent process.
        parent: i32,
        /// The new process, or the process of the new thread.
        child: i32,
        /// The new thread's number.
        tid: i32,
    },
    /// A thread changed its name.
    Comm {
        /// The number of its process.
        pid: i32,
        /// The thread's number.
        tid: i32,
    },
    /// A thread ended.
    Exit {
        /// The number of its process.
        pid: i32,
        /// The thread's number.
        tid: i32,
    },
}

/// Parses one message. `None`: it is not an event of interest.
pub fn parse(message: &[u8]) -> Option<Event> {
    let word = |at: usize| Some(u32::from_ne_bytes(message.get(at..at + 4)?.try_into().ok()?));
    let number = |index: usize| i32::try_from(word(DATA_AT + 4 * index)?).ok();
    Some(match word(EVENT_AT)? {
        PROC_EVENT_EXEC => Event::Exec { pid: number(1)? },
        PROC_EVENT_FORK => Event::Fork { parent: number(1)?, tid: number(2)?, child: number(3)? },
        PROC_EVENT_COMM => Event::Comm { tid: number(0)?, pid: number(1)? },
        PROC_EVENT_EXIT => Event::Exit { tid: number(0)?, pid: number(1)? },
        _ => return None,
    })
}

/// The processes to follow: those of real-time tenants, then of each other account as many as of the next, while the
/// filter has room. So only the tenants that the administrator calls real-time can have it pass every event.
pub(crate) fn followed(rt: BTreeSet<i32>, others: &BTreeMap<Account, BTreeSet<i32>>) -> BTreeSet<i32> {
    let mut followed = rt;
    let mut others: Vec<_> = others.values().map(|processes| processes.iter().copied()).collect();
    while !others.is_empty() && followed.len() < FOLLOWED_MAX {
        others.retain_mut(|processes| match processes.next() {
            Some(process) if followed.len() < FOLLOWED_MAX => {
                followed.insert(process);
                true
            }
            _ => false,
        });
    }
    followed
}

/// A subscription to process events.
#[derive(Debug)]
pub struct Connector {
    socket: Socket,
}

impl Connector {
    /// Subscribes. Needs CAP_NET_ADMIN, the initial network, process and user namespaces, and `CONFIG_PROC_EVENTS`.
    ///
    /// # Errors
    /// The kernel's error, or no acknowledgement within 500 ms.
    pub fn open() -> io::Result<Self> {
        let connector = Self { socket: open_socket()? };
        // While no process is followed, only exec events and new kernel threads pass. The acknowledgement (event NONE)
        // always passes.
        connector.follow(&BTreeSet::new())?;
        connector.listen()?;
        connector.wait_for_acknowledgement()?;
        Ok(connector)
    }

    /// Replaces the followed processes.
    ///
    /// # Errors
    /// The kernel's error for the filter; the previous filter stays.
    pub fn follow(&self, processes: &BTreeSet<i32>) -> io::Result<()> {
        let mut program = filter(processes);
        let length = u16::try_from(program.len()).map_err(io::Error::other)?;
        let attached = libc::sock_fprog { len: length, filter: program.as_mut_ptr() };
        set_option(&self.socket, libc::SO_ATTACH_FILTER, &attached)
    }

    /// The events since the last call. `None`: events were lost because the buffer was full.
    ///
    /// # Errors
    /// The error of recv(2).
    pub fn take(&self) -> io::Result<Option<Vec<Event>>> {
        let mut events = Vec::new();
        let mut lost = false;
        loop {
            match self.receive() {
                Ok(message) => events.extend(parse(&message)),
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN) => return Ok((!lost).then_some(events)),
                    Some(libc::ENOBUFS) => lost = true,
                    Some(libc::EINTR) => {}
                    _ => return Err(error),
                },
            }
        }
    }

    /// One message, from the kernel only: another process may send to a netlink socket, too.
    fn receive(&self) -> io::Result<Vec<u8>> {
        let mut buffer = Vec::with_capacity(256);
        let (_, from) = self.socket.recv_from(&mut buffer, 0)?;
        Ok(if from.port_number() == 0 { buffer } else { Vec::new() })
    }

    fn listen(&self) -> io::Result<()> {
        let mut message = Vec::new();
        let payload = PROC_CN_MCAST_LISTEN.to_ne_bytes();
        let length = u32::try_from(EVENT_AT + payload.len()).map_err(io::Error::other)?;
        // struct nlmsghdr: length, type NLMSG_DONE, flags, sequence, sender (0: the kernel fills it in).
        message.extend(length.to_ne_bytes());
        message.extend(3u16.to_ne_bytes());
        message.extend(0u16.to_ne_bytes());
        message.extend([0u8; 8]);
        // struct cn_msg: index, value, sequence, acknowledgement, length, flags.
        message.extend(CN_IDX_PROC.to_ne_bytes());
        message.extend(CN_VAL_PROC.to_ne_bytes());
        message.extend([0u8; 8]);
        message.extend(4u16.to_ne_bytes());
        message.extend(0u16.to_ne_bytes());
        message.extend(payload);
        self.socket.send(&message, 0).map(|_| ())
    }

    /// The kernel answers LISTEN with an event NONE that carries an errno. Outside the initial namespaces it does not
    /// answer.
    fn wait_for_acknowledgement(&self) -> io::Result<()> {
        let deadline = Instant::now() + Duration::from_millis(500);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec { tv_sec: 0, tv_nsec: left.subsec_nanos().into() };
            let mut polled = [PollFd::new(&self.socket, PollFlags::IN)];
            if left.is_zero() || rustix::event::poll(&mut polled, Some(&timeout))? == 0 {
                return Err(io::Error::other("the kernel did not acknowledge; is this the host's own namespace?"));
            }
            let message = self.receive()?;
            let word = |at: usize| message.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes);
            if word(EVENT_AT) == Some(PROC_EVENT_NONE) {
                return match word(DATA_AT) {
                    Some(0) => Ok(()),
                    Some(error) => Err(io::Error::from_raw_os_error(i32::try_from(error).unwrap_or(libc::EPERM))),
                    None => Err(io::Error::other("the kernel's acknowledgement is cut short")),
                };
            }
        }
    }
}

impl AsFd for Connector {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn open_socket() -> io::Result<Socket> {
    let mut socket = Socket::new(NETLINK_CONNECTOR)?;
    socket.set_non_blocking(true)?;
    socket.bind(&SocketAddr::new(0, CN_IDX_PROC))?;
    // Buffer for events that arrive while a change settles. If this fails, overflow is detected and causes a full
    // discovery.
    let _ = set_option(&socket, libc::SO_RCVBUFFORCE, &RECEIVE_BUFFER);
    Ok(socket)
}

fn set_option<T>(socket: &Socket, option: libc::c_int, value: &T) -> io::Result<()> {
    let length = size_of::<T>() as libc::socklen_t;
    let value = std::ptr::from_ref(value).cast();
    // SAFETY: the value is live and has this length; for a filter the kernel copies the program that it points to.
    let set = unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, value, length) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The filter's verdict that keeps the event.
const ACCEPT: u32 = u32::MAX;

fn load(at: usize) -> libc::sock_filter {
    libc::sock_filter { code: (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16, jt: 0, jf: 0, k: at as u32 }
}

/// Compares with a word in this machine's byte order; BPF loads use network order.
fn jump_if(word: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16, jt, jf, k: word.to_be() }
}

fn verdict(keep: u32) -> libc::sock_filter {
    libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: keep }
}

/// The filter described at the top of this file.
///
/// Each kind of event has its own block: load a process number, compare it with each followed one, drop. Jumps stay
/// within a block, so [`FOLLOWED_MAX`] limits the block's size.
fn filter(processes: &BTreeSet<i32>) -> Vec<libc::sock_filter> {
    if processes.len() > FOLLOWED_MAX {
        return vec![verdict(ACCEPT)];
    }
    // Keeps the event if the word at one of these offsets is one of these numbers.
    let block = |tests: &[(usize, Vec<u32>)]| {
        let mut code = Vec::new();
        for (at, numbers) in tests {
            code.push(load(*at));
            for (left, number) in (0..numbers.len()).rev().zip(numbers) {
                // On a match, jump over the remaining compares and the skip below, to the verdict.
                code.push(jump_if(*number, u8::try_from(left + 1).unwrap_or(u8::MAX), 0));
            }
            // No match: jump over the verdict.
            code.push(libc::sock_filter { code: (libc::BPF_JMP | libc::BPF_JA) as u16, jt: 0, jf: 0, k: 1 });
            code.push(verdict(ACCEPT));
        }
        code.push(verdict(0));
        code
    };
    let followed: Vec<u32> = processes.iter().filter_map(|pid| u32::try_from(*pid).ok()).collect();
    let (parent, first, child) = (DATA_AT + 4, DATA_AT + 4, DATA_AT + 12);
    let mut fork_parents = followed.clone();
    fork_parents.push(KTHREADD);
    let fork = block(&[(parent, fork_parents), (child, followed.clone())]);
    let same_process = block(&[(first, followed)]);
    let mut code = vec![load(EVENT_AT)];
    for (what, body) in [(PROC_EVENT_FORK, &fork), (PROC_EVENT_COMM, &same_process), (PROC_EVENT_EXIT, &same_process)] {
        code.push(jump_if(what, 1, 0));
        // Conditional jumps reach only 255 instructions; an unconditional jump skips any body.
        code.push(libc::sock_filter {
            code: (libc::BPF_JMP | libc::BPF_JA) as u16,
            jt: 0,
            jf: 0,
            k: u32::try_from(body.len()).unwrap_or(u32::MAX),
        });
        code.extend(body.iter().copied());
    }
    code.extend([jump_if(PROC_EVENT_EXEC, 1, 0), jump_if(PROC_EVENT_NONE, 0, 1), verdict(ACCEPT), verdict(0)]);
    code
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(what: u32, numbers: [i32; 4]) -> Vec<u8> {
        let mut bytes = vec![0u8; EVENT_AT];
        bytes.extend(what.to_ne_bytes());
        bytes.extend([0u8; 12]);
        bytes.extend(numbers.iter().flat_map(|number| number.to_ne_bytes()));
        bytes
    }

    /// Interprets these few instructions as the kernel does.
    fn run(program: &[libc::sock_filter], packet: &[u8]) -> bool {
        let (mut at, mut register) = (0usize, 0u32);
        loop {
            let one = program[at];
            at += 1;
            match u32::from(one.code) {
                code if code == libc::BPF_LD | libc::BPF_W | libc::BPF_ABS => {
                    let Some(word) = packet.get(one.k as usize..one.k as usize + 4) else { return false };
                    register = u32::from_be_bytes(word.try_into().unwrap());
                }
                code if code == libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K => {
                    at += usize::from(if register == one.k { one.jt } else { one.jf });
                }
                code if code == libc::BPF_JMP | libc::BPF_JA => at += one.k as usize,
                code if code == libc::BPF_RET | libc::BPF_K => return one.k != 0,
                code => panic!("instruction {code:#x}"),
            }
        }
    }

    #[test]
    fn the_filter_keeps_what_concerns_followed_processes_only() {
        for followed in [vec![], vec![10], vec![10, 20, 30], (10..10 + FOLLOWED_MAX as i32).collect()] {
            let program = filter(&followed.iter().copied().collect());
            let keeps = |what, numbers| run(&program, &message(what, numbers));
            assert!(keeps(PROC_EVENT_NONE, [0; 4]));
            assert!(keeps(PROC_EVENT_EXEC, [5, 5, 0, 0]));
            assert!(keeps(PROC_EVENT_FORK, [2, 2, 900, 900]), "kthreadd makes a kernel thread");
            assert!(!keeps(PROC_EVENT_FORK, [5, 5, 6, 6]));
            assert!(!keeps(PROC_EVENT_EXIT, [5, 5, 0, 0]));
            assert!(!keeps(PROC_EVENT_COMM, [5, 5, 0, 0]));
            assert!(!keeps(4, [10, 10, 10, 10]), "a change of user");
            for pid in followed {
                assert!(keeps(PROC_EVENT_FORK, [99, pid, 100, pid]), "thread of {pid}");
                assert!(keeps(PROC_EVENT_FORK, [99, pid, 100, 100]), "child of {pid}");
                assert!(keeps(PROC_EVENT_FORK, [5, 5, 100, pid]), "CLONE_PARENT into {pid}");
                assert!(keeps(PROC_EVENT_EXIT, [99, pid, 0, 0]));
                assert!(keeps(PROC_EVENT_COMM, [99, pid, 0, 0]));
            }
        }
        let many = filter(&(1..1000).collect());
        assert!(run(&many, &message(PROC_EVENT_EXIT, [5, 5, 0, 0])), "too many to compare: all pass");
    }

    #[test]
    fn many_vms_of_one_user_have_the_filter_pass_no_strangers_events() {
        let rt = BTreeSet::from([1_000_000]);
        let others = [(Account::User(0), (1..=9).collect()), (Account::User(1000), (100..400).collect())];
        let chosen = followed(rt.clone(), &others.into());
        assert_eq!(chosen.len(), FOLLOWED_MAX);
        let program = filter(&chosen);
        let keeps = |pid| run(&program, &message(PROC_EVENT_FORK, [pid, pid, 900, 900]));
        assert!(!keeps(5000), "a stranger's");
        assert!(keeps(1_000_000) && (1..=9).all(keeps) && (100..300).all(keeps));
        // Two users with many share what is left.
        let many = |user, first: i32| (Account::User(user), (first..first + 300).collect());
        let chosen = followed(rt, &[many(1, 1000), many(2, 2000)].into());
        let of = |first| chosen.range(first..first + 300).count();
        assert_eq!((of(1000), of(2000), chosen.len()), (120, 119, FOLLOWED_MAX));
        // The administrator's choice is followed whole.
        assert_eq!(followed((1..=300).collect(), &[many(1, 1000)].into()), (1..=300).collect());
    }

    #[test]
    fn messages_are_read() {
        assert_eq!(parse(&message(PROC_EVENT_EXEC, [8, 7, 0, 0])), Some(Event::Exec { pid: 7 }));
        let fork = parse(&message(PROC_EVENT_FORK, [1, 2, 3, 4]));
        assert_eq!(fork, Some(Event::Fork { parent: 2, child: 4, tid: 3 }));
        assert_eq!(parse(&message(PROC_EVENT_EXIT, [8, 7, 0, 0])), Some(Event::Exit { pid: 7, tid: 8 }));
        assert_eq!(parse(&message(4, [8, 7, 0, 0])), None);
        assert_eq!(parse(&message(PROC_EVENT_FORK, [1, 2, 3, 4])[..60]), None);
    }

    proptest! {
        #[test]
        fn no_message_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..120)) {
            let _ = parse(&bytes);
        }
    }
}
