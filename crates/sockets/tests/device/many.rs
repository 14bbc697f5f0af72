//! Many connections in one VM: what one costs in memory of the process, and what all cost while nothing happens.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use libc::{AF_INET, SOCK_STREAM};
use ontime_sockets::abi::*;

use super::driver::{Call, Vm};
use super::local;

const CONNECTIONS: u32 = 10_000;
/// The goal, bytes a connection beyond the kernel's own.
const MOST: u64 = 4_096;
/// Open in a VM that may have no more: what the process has however many sockets there are, is in its reading.
const FEW: u32 = 16;
/// Nothing may run for so long; that it is so must come to pass in [`SETTLED`].
const STILL: Duration = Duration::from_secs(2);
const SETTLED: Duration = Duration::from_secs(60);

/// A VM with one channel that may have so many connections. `None`, and a line that says so, where this process may not.
fn start(connections: u32) -> Option<Vm> {
    let wanted = u64::from(CONNECTIONS) + 1_000;
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    let raised = libc::rlimit { rlim_cur: wanted.max(limit.rlim_cur), rlim_max: wanted.max(limit.rlim_max) };
    // The device process inherits it.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const raised) } != 0 {
        println!("SKIPPED: {wanted} descriptors are not allowed (RLIMIT_NOFILE)");
        return None;
    }
    Some(Vm::start(&format!("{}\nsockets = {}", super::FREE, connections)))
}

/// Connects sockets `from` to `to` of the VM to a server here, on the channel.
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
    let mut answer = [0; 6];
    peer.read_exact(&mut answer).unwrap();
}

/// Memory of its own that a process has in RAM, bytes: without the guest's and what it shares with others.
fn own_memory(vm: &Vm) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/status", vm.process.id())).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1_024
}

/// How often the process's threads were put on a CPU.
fn runs(vm: &Vm) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", vm.process.id())).unwrap();
    let of = |task: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("schedstat")).unwrap();
        stat.split_whitespace().nth(2).unwrap().parse::<u64>().unwrap()
    };
    tasks.map(|task| of(task.unwrap())).sum()
}

#[test]
fn a_connection_costs_little_and_a_quiet_vm_nothing() {
    let server = TcpListener::bind(local(0)).unwrap();
    // The tables of all places are there from the start, so that a VM of few is what many are compared to.
    let [few, many] = [FEW, CONNECTIONS].map(|connections| {
        let mut vm = start(connections)?;
        let mut peers = Vec::new();
        vm.channels[1].event_buffers(64);
        connect(&mut vm, &server, &mut peers, connections);
        // Each of them is used, so that what is made on use counts too.
        for sock in 0..connections {
            exchange(&mut vm, &mut peers, sock);
        }
        Some((own_memory(&vm), vm, peers))
    });
    let (Some((before, ..)), Some((after, vm, _peers))) = (few, many) else { return };
    let each = after.saturating_sub(before) / u64::from(CONNECTIONS - FEW);
    println!("figures: {each} bytes of memory a connection, {CONNECTIONS} open");
    assert!(each <= MOST, "{each} bytes a connection");

    let start = Instant::now();
    loop {
        let stood = runs(&vm);
        std::thread::sleep(STILL);
        let ran = runs(&vm) - stood;
        if ran == 0 {
            break;
        }
        assert!(start.elapsed() < SETTLED, "threads of a quiet VM run: {ran} times in {} s", STILL.as_secs());
    }
}

/// For the figure, on a machine with nothing else to do: `cargo test --release -p ontime-sockets --test device -- --ignored
/// --nocapture among_many`. A request and its answer through one socket, alone and among many open ones, in turn.
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
