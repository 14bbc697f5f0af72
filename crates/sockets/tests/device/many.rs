//! Many connections in one VM: memory of the process per connection, instructions per request, and the cost of idle
//! connections.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use libc::{AF_INET, SOCK_STREAM};
use ontime_sockets::abi::*;

use super::driver::{Call, Vm};
use super::local;
use super::steps::Steps;

const CONNECTIONS: u32 = 10_000;
/// Goal: most bytes per connection, without the kernel's memory.
const MOST: u64 = 4_096;
/// Connections of the baseline VM, which may have no more: it shows the memory that does not depend on their number.
const FEW: u32 = 1;
/// When no thread has run for this long, the process is idle. It must become idle within [`SETTLED`]. Then no thread
/// may run for [`QUIET`].
const STILL: Duration = Duration::from_secs(2);
const SETTLED: Duration = Duration::from_secs(60);
const QUIET: Duration = Duration::from_secs(30);
/// Number of requests whose instructions are counted; the minimum is used.
const COUNTED: u32 = 6;

/// A VM with one channel and this many connections. Prints a line and returns `None` if the limits do not allow them.
fn start(connections: u32) -> Option<Vm> {
    let wanted = u64::from(CONNECTIONS) + 1_000;
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    let raised = libc::rlimit { rlim_cur: wanted.max(limit.rlim_cur), rlim_max: wanted.max(limit.rlim_max) };
    // The device process inherits the limit.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const raised) } != 0 {
        println!("SKIPPED: {wanted} descriptors are not allowed (RLIMIT_NOFILE)");
        return None;
    }
    Some(Vm::start(&format!("{}\nsockets = {}", super::FREE, connections)))
}

/// Connects sockets up to `to` of the VM, on the channel, to a server in this process.
fn connect(vm: &mut Vm, server: &TcpListener, peers: &mut Vec<TcpStream>, to: u32) {
    let address = server.local_addr().unwrap();
    for sock in peers.len() as u32..to {
        vm.main().socket(sock, AF_INET, SOCK_STREAM, 1);
        let connecting = vm.main().result(Call::new(ONTIME_OP_CONNECT, sock).to(address));
        assert!(matches!(connecting, Ok(0) | Err(libc::EINPROGRESS)), "{connecting:?}");
        peers.push(server.accept().unwrap().0);
    }
}

/// A request and its answer through a socket of the VM.
fn exchange(vm: &mut Vm, peers: &mut [TcpStream], sock: u32) {
    let peer = &mut peers[sock as usize];
    let posted = vm.channels[1].post(Call::new(ONTIME_OP_RECV, sock).wait().room(100));
    peer.write_all(b"request").unwrap();
    assert_eq!(vm.channels[1].wait(posted).data, b"request");
    assert_eq!(vm.channels[1].result(Call::new(ONTIME_OP_SEND, sock).data(b"answer")), Ok(6));
    // Take the events as a guest does.
    while vm.channels[1].try_event().is_some() {}
    let mut answer = [0; 6];
    peer.read_exact(&mut answer).unwrap();
}

/// For each of the process's threads: how often it was scheduled, and its CPU time, ns.
fn runs(vm: &Vm) -> Vec<(String, u64, u64)> {
    let of = |task: &PathBuf| {
        let read = |file| std::fs::read_to_string(task.join(file)).unwrap();
        let stat: Vec<u64> = read("schedstat").split_whitespace().map(|word| word.parse().unwrap()).collect();
        (read("comm").trim_end().to_owned(), stat[2], stat[0])
    };
    vm.threads().iter().map(of).collect()
}

/// Instructions of the channel's thread for a request and its answer: a waiting receive, the arrival, the send.
fn instructions(vm: &mut Vm, peers: &mut [TcpStream]) -> u64 {
    let steps = Steps::begin(vm.thread("ontime-sock/1"));
    // The thread is single-stepped. First it reports pending events.
    vm.channels[1].settle();
    while steps.of(|| while vm.channels[1].try_event().is_some() {}) > 0 {}
    let (peer, driver) = (&mut peers[0], &mut vm.channels[1]);
    let counted = (0..COUNTED).map(|_| {
        let (mut posted, mut taken) = (0, [0; 3]);
        taken[0] = steps.of(|| posted = driver.post(Call::new(ONTIME_OP_RECV, 0).wait().room(100)));
        taken[1] = steps.of(|| {
            peer.write_all(b"request").unwrap();
            assert_eq!(driver.wait(posted).data, b"request");
        });
        let answer = Call::new(ONTIME_OP_SEND, 0).data(b"answer");
        taken[2] = steps.of(|| assert_eq!(driver.result(answer), Ok(6)));
        peer.read_exact(&mut [0; 6]).unwrap();
        taken.iter().sum::<u64>()
    });
    let least = counted.min().unwrap();
    steps.end(|| driver.settle());
    least
}

/// The system call and its arguments in which each thread waits.
fn waits(vm: &Vm) -> Vec<(String, Vec<u64>)> {
    let of = |task: &PathBuf| {
        let read = |file| std::fs::read_to_string(task.join(file)).unwrap();
        let number =
            |word: &str| word.strip_prefix("0x").map_or_else(|| word.parse(), |hex| u64::from_str_radix(hex, 16));
        let words = read("syscall").split_whitespace().map(|word| number(word).unwrap_or(u64::MAX)).collect();
        (read("comm").trim_end().to_owned(), words)
    };
    vm.threads().iter().map(of).collect()
}

/// Whether this wait has no timeout.
fn has_no_timer(wait: &[u64]) -> bool {
    let [number, arguments @ ..] = wait else { return false };
    match *number as libc::c_long {
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait => arguments[3] as i32 == -1,
        libc::SYS_futex => arguments[3] == 0,
        // Without IORING_ENTER_EXT_ARG, which a timeout would need.
        libc::SYS_io_uring_enter => arguments[3] & 8 == 0,
        libc::SYS_accept4 | libc::SYS_recvmsg | libc::SYS_recvfrom | libc::SYS_read => true,
        _ => false,
    }
}

#[test]
fn a_connection_costs_little_and_a_quiet_vm_nothing() {
    let server = TcpListener::bind(local(0)).unwrap();
    // The table has all slots from the start, so a VM with few connections is the baseline.
    let [few, many] = [FEW, CONNECTIONS].map(|connections| {
        let mut vm = start(connections)?;
        let mut peers = Vec::new();
        vm.channels[1].event_buffers(64);
        connect(&mut vm, &server, &mut peers, connections);
        // Use each connection, so that memory allocated at the first use counts, too.
        for sock in 0..connections {
            exchange(&mut vm, &mut peers, sock);
        }
        let memory = vm.own_memory();
        Some((memory, instructions(&mut vm, &mut peers), vm, peers))
    });
    let (Some((before, alone, ..)), Some((after, among, vm, _peers))) = (few, many) else { return };
    let each = after.saturating_sub(before) / u64::from(CONNECTIONS - FEW);
    println!("figures: {each} bytes of memory a connection, {CONNECTIONS} open");
    assert!(each <= MOST, "{each} bytes a connection");
    assert_ne!(alone, 0, "nothing is counted");
    println!("figures: {alone} instructions a request of a connection alone, {among} among {CONNECTIONS}");
    assert!(among <= alone + alone / 100, "{among} instructions a request among {CONNECTIONS}, {alone} alone");

    let start = Instant::now();
    let stands = || {
        let stood = runs(&vm);
        std::thread::sleep(STILL);
        runs(&vm) == stood
    };
    while !stands() {
        assert!(start.elapsed() < SETTLED, "threads of a quiet VM run");
    }
    let stood = runs(&vm);
    std::thread::sleep(QUIET);
    assert_eq!(runs(&vm), stood, "threads of a quiet VM run");
    let waits = waits(&vm);
    assert!(waits.iter().all(|(_, wait)| has_no_timer(wait)), "a thread has a timer: {waits:x?}");
}

/// For the measurement, on an idle machine: `cargo test --release -p ontime-sockets --test device -- --ignored
/// --nocapture among_many`. Measures a request and its answer through one socket, alone and among many open ones,
/// alternately.
#[test]
#[ignore = "measures"]
fn among_many() {
    const ROUNDS: u32 = 2_000;
    let Some(mut vm) = start(CONNECTIONS) else { return };
    let server = TcpListener::bind(local(0)).unwrap();
    let mut peers = Vec::new();
    let median = |vm: &mut Vm, peers: &mut Vec<TcpStream>| {
        let mut took: Vec<Duration> = (0..ROUNDS)
            .map(|_| {
                let start = Instant::now();
                exchange(vm, peers, 0);
                start.elapsed()
            })
            .collect();
        took.sort_unstable();
        took[took.len() / 2]
    };
    for many in [1, CONNECTIONS] {
        connect(&mut vm, &server, &mut peers, many);
        println!("figures: {:?} a request and answer, median of {ROUNDS}, {many} open", median(&mut vm, &mut peers));
    }
}
