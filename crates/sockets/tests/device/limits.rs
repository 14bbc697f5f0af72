//! Effects of a guest's allowed calls on the rest of the host: none beyond the guest's limits, and none on other
//! tenants' CPUs.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use libc::{AF_INET, AF_INET6, SOCK_DGRAM, SOCK_STREAM};
use ontime_sockets::abi::*;

use super::driver::{Call, PATIENCE, Vm};
use super::{FREE, bind, listen};

/// State of a connection whose FIN was sent and not acknowledged (include/net/tcp_states.h).
const FIN_WAIT1: &str = "04";

/// Function call interrupts of all CPUs so far. None if /proc/interrupts does not list them.
fn function_calls() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/interrupts").unwrap();
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix("CAL:"))?;
    Some(line.split_whitespace().map_while(|word| word.parse::<u64>().ok()).sum())
}

/// The kernel patches its code when the first socket of the host enables some options, and when the last such socket is
/// closed. Each patch interrupts every CPU. All options that the guest may set are tried, by their numbers.
#[test]
fn no_option_interrupts_the_hosts_cpus() {
    const ROUNDS: u32 = 100;
    // What other programs and tests on this machine may add: half of what one patched option costs.
    const OTHERS: u64 = 3 * ROUNDS as u64;
    const LEVELS: [i32; 5] =
        [libc::SOL_SOCKET, libc::IPPROTO_IP, libc::IPPROTO_IPV6, libc::IPPROTO_TCP, libc::IPPROTO_UDP];
    if function_calls().is_none() {
        println!("SKIPPED: /proc/interrupts has no CAL");
        return;
    }
    // On one CPU the test and the process wake each other without an interrupt: waking a thread on another CPU is a
    // function call interrupt, too.
    let mut here = rustix::thread::CpuSet::new();
    here.set(rustix::thread::sched_getcpu());
    rustix::thread::sched_setaffinity(None, &here).unwrap();
    let mut vm = Vm::start("");
    // The interrupts while new sockets get the option and are closed. None if the option is refused.
    let mut rounds = |family: i32, kind: i32, level: i32, option: i32| {
        let before = function_calls().unwrap();
        for round in 0..ROUNDS {
            let id = round << ONTIME_SOCK_INDEX_BITS | 1;
            let main = vm.main();
            main.socket(id, family, kind, 0);
            let set = main.result(Call::new(ONTIME_OP_SETOPT, id).arg([level, option]).data(&1i32.to_le_bytes()));
            assert_eq!(main.result(Call::new(ONTIME_OP_CLOSE, id)), Ok(0), "level {level}, option {option}");
            if set.is_err() {
                return None;
            }
        }
        Some(function_calls().unwrap() - before)
    };
    let mut tried = BTreeSet::new();
    for (family, kind) in [AF_INET, AF_INET6].into_iter().flat_map(|of| [(of, SOCK_DGRAM), (of, SOCK_STREAM)]) {
        for (level, option) in LEVELS.into_iter().flat_map(|level| (1..=128).map(move |option| (level, option))) {
            let Some(mut switching) = rounds(family, kind, level, option) else { continue };
            tried.insert((family, level, option));
            // Other programs and tests on this machine interrupt CPUs, too, some of them all the time. So the option is
            // compared with one that has no static key, before and after it, until they leave room for the comparison.
            let (mut before, mut after) = (0, 0);
            for _ in 0..50 {
                if switching <= before.min(after) + OTHERS {
                    break;
                }
                before = rounds(family, kind, libc::SOL_SOCKET, libc::SO_BROADCAST).unwrap();
                switching = rounds(family, kind, level, option).unwrap();
                after = rounds(family, kind, libc::SOL_SOCKET, libc::SO_BROADCAST).unwrap();
            }
            assert!(
                switching <= before.min(after) + OTHERS,
                "family {family}, kind {kind}, level {level}, option {option}: {switching} interrupts in {ROUNDS} \
                 rounds, {before} and {after} without it before and after"
            );
        }
    }
    // These have a static key.
    for known in [
        (AF_INET, libc::IPPROTO_UDP, libc::UDP_GRO),
        (AF_INET6, libc::IPPROTO_UDP, libc::UDP_GRO),
        (AF_INET, libc::SOL_SOCKET, libc::SO_TIMESTAMP),
        (AF_INET6, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS),
        (AF_INET, libc::IPPROTO_IP, libc::IP_MINTTL),
        (AF_INET6, libc::IPPROTO_IPV6, libc::IPV6_MINHOPCOUNT),
    ] {
        assert!(tried.contains(&known), "{known:?} was refused");
    }
}

/// The kernel writes a line to the host's log for each attempt to choose a NIC's clock for stamps, and a NIC stamps one
/// sent packet at a time, for the whole host.
#[test]
fn no_time_stamp_concerns_the_hosts_log_or_nics() {
    const SO_TIMESTAMPING_NEW: i32 = 65;
    let mut vm = Vm::start("");
    let main = vm.main();
    main.socket(1, AF_INET, SOCK_DGRAM, 0);
    let log = std::fs::File::options().read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg");
    let mut log = log.inspect_err(|error| println!("SKIPPED: the host's log cannot be read: {error}")).ok();
    if let Some(log) = &mut log {
        log.seek(SeekFrom::End(0)).unwrap();
    }
    for option in [libc::SO_TIMESTAMPING, SO_TIMESTAMPING_NEW] {
        let set = |value: &[u8]| Call::new(ONTIME_OP_SETOPT, 1).arg([libc::SOL_SOCKET, option]).data(value);
        // SOF_TIMESTAMPING_BIND_PHC, with the clock's number and without.
        for bind in [&[0x10, 0x80, 0, 0, 3, 0, 0, 0][..], &[0x10, 0x80, 0, 0][..]] {
            assert_eq!(main.result(set(bind)), Err(libc::EOPNOTSUPP));
        }
        // SOF_TIMESTAMPING_TX_HARDWARE is left out, and nothing else.
        assert_eq!(main.result(set(&0x5bu32.to_ne_bytes())), Ok(0));
        let got = main.call(Call::new(ONTIME_OP_GETOPT, 1).arg([libc::SOL_SOCKET, option]).room(8));
        assert_eq!(got.data[..4], 0x5au32.to_ne_bytes(), "option {option}");
    }
    let mut record = [0; 8192];
    while let Some(Ok(length)) = log.as_mut().map(|log| log.read(&mut record)) {
        let text = String::from_utf8_lossy(&record[..length]);
        assert!(!text.contains("sock not bind to device"), "{text}");
    }
}

/// Joining a group takes a host-wide lock. So does a change of the family, even where the kernel then finds no peer.
#[test]
fn groups_are_joined_no_faster_than_they_may() {
    let group = [239, 1, 2, 3, 127, 0, 0, 1];
    let v4 = AF_INET.to_le_bytes();
    let groups = [libc::IP_ADD_MEMBERSHIP, libc::IP_DROP_MEMBERSHIP];
    for (family, level, options, value, result) in [
        (AF_INET, libc::IPPROTO_IP, groups, &group[..], Ok(0)),
        (AF_INET6, libc::IPPROTO_IPV6, [IPV6_ADDRFORM; 2], &v4[..], Err(libc::ENOTCONN)),
    ] {
        let mut vm = Vm::start("reach = [\"239.0.0.0/8\"]");
        vm.main().socket(1, family, SOCK_DGRAM, 0);
        let (burst, more, start) = (32, 52, Instant::now());
        for turn in 0..burst + more {
            let call = Call::new(ONTIME_OP_SETOPT, 1).arg([level, options[turn as usize % 2]]).data(value);
            assert_eq!(vm.main().result(call), result, "turn {turn}");
        }
        let took = start.elapsed();
        assert!(took >= Duration::from_millis(20) * (more - 2), "{more} beyond the burst took {took:?}");
    }
}

/// A user of the guest that asks for groups which the policy refuses keeps nobody from those that it allows.
#[test]
fn refused_groups_leave_the_tokens_to_allowed_ones() {
    let mut vm = Vm::start("reach = [\"239.0.0.0/8\"]");
    vm.main().socket(1, AF_INET, SOCK_DGRAM, 0);
    let join = |first: u8| {
        let option = [libc::IPPROTO_IP, libc::IP_ADD_MEMBERSHIP];
        Call::new(ONTIME_OP_SETOPT, 1).arg(option).data(&[first, 1, 2, 3, 127, 0, 0, 1])
    };
    // More than there are tokens, and than may wait for one.
    let refused: Vec<u64> = (0..120).map(|_| vm.main().post(join(224))).collect();
    let allowed = vm.main().post(join(239));
    let results: Vec<_> = refused.into_iter().map(|id| vm.main().wait(id).result()).collect();
    assert!(results.iter().all(|result| *result == Err(libc::EPERM)), "{results:?}");
    assert_eq!(vm.main().wait(allowed).result(), Ok(0));
}

/// One user of the guest that joins groups without end keeps no other one waiting, nor takes the whole queue.
#[test]
fn calls_that_wait_for_their_turn_delay_no_others() {
    let group = [239, 1, 2, 3, 127, 0, 0, 1];
    let mut vm = Vm::start("reach = [\"239.0.0.0/8\"]");
    for boot in 0..2 {
        vm.main().socket(1, AF_INET, SOCK_DGRAM, 0);
        let join = |turn: usize| {
            let option = [libc::IP_ADD_MEMBERSHIP, libc::IP_DROP_MEMBERSHIP][turn % 2];
            Call::new(ONTIME_OP_SETOPT, 1).arg([libc::IPPROTO_IP, option]).data(&group)
        };
        let joins: Vec<u64> = (0..96).map(|turn| vm.main().post(join(turn))).collect();
        let other = vm.main().post(Call::new(ONTIME_OP_BIND, 1));
        let other = vm.main().wait(other).nth;
        let last = joins.into_iter().map(|id| vm.main().wait(id).nth).max().unwrap();
        assert!(other < last, "boot {boot}: {other} and {last}");
        // More than may wait at a time.
        let more: Vec<u64> = (0..120).map(|turn| vm.main().post(join(turn))).collect();
        let results: Vec<_> = more.into_iter().map(|id| vm.main().wait(id).result()).collect();
        assert!(results.iter().all(|result| matches!(result, Ok(0) | Err(libc::ENOBUFS))), "{results:?}");
        assert_eq!(vm.main().result(join(0)), Ok(0), "boot {boot}: later it may again");
        // What waits when the guest boots anew is gone.
        (0..96).for_each(|turn| _ = vm.main().post(join(turn)));
        vm.main().reset();
    }
}

/// Number of the host's connections in a state whose local or remote address is this one. Each is counted once: the
/// kernel writes the file piece by piece and repeats a connection if another one is created meanwhile.
fn connections(local: bool, address: SocketAddr, state: &str) -> usize {
    let text = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let port = format!(":{:04X}", address.port());
    let ends = |line| {
        let words: Vec<&str> = str::split_whitespace(line).collect();
        let ends = (*words.get(1)?, *words.get(2)?);
        let own = if local { ends.0 } else { ends.1 };
        (own.ends_with(&port) && words.get(3) == Some(&state)).then_some(ends)
    };
    text.lines().filter_map(ends).collect::<BTreeSet<_>>().len()
}

/// Sends until nothing more fits; returns the number of bytes.
fn fill(driver: &mut super::driver::Driver, sock: u32) -> usize {
    let data = vec![0x5a; 1 << 19];
    let (mut sent, start) = (0, Instant::now());
    loop {
        match driver.result(Call::new(ONTIME_OP_SEND, sock).data(&data)) {
            Ok(bytes) => sent += bytes as usize,
            // The other end may still receive some data.
            Err(libc::EAGAIN) if sent > 0 => return sent,
            Err(libc::EAGAIN | libc::ENOTCONN) if start.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(1))
            }
            Err(error) => panic!("cannot send: {error}"),
        }
    }
}

/// Reads all data of a connection; returns their number and whether the connection was reset.
fn read_all(peer: &mut TcpStream) -> (usize, bool) {
    let (mut read, mut room) = (0, vec![0; 1 << 20]);
    loop {
        match peer.read(&mut room) {
            Ok(0) => return (read, false),
            Ok(bytes) => read += bytes,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return (read, true),
            Err(error) => panic!("{error}"),
        }
    }
}

/// A guest with few sockets opens, fills and closes connections whose other ends do not read. Closed connections live
/// on in the kernel with their buffers, but at most as many as the VM may have sockets; the others are reset. The kept
/// data arrive as soon as the other end reads.
#[test]
fn closed_connections_count() {
    const SOCKETS: usize = 4;
    const ROUNDS: u32 = 20;
    let mut vm = Vm::start(&format!("{FREE}\nsockets = {SOCKETS}"));
    // Through main, which has connected.
    let server = TcpListener::bind(super::local(0)).unwrap();
    let address = server.local_addr().unwrap();
    let mut peers = Vec::new();
    for round in 0..ROUNDS {
        let id = round << ONTIME_SOCK_INDEX_BITS | 1;
        vm.main().socket(id, AF_INET, SOCK_STREAM, 0);
        let connecting = vm.main().result(Call::new(ONTIME_OP_CONNECT, id).to(address));
        assert!(matches!(connecting, Ok(0) | Err(libc::EINPROGRESS)), "{connecting:?}");
        let peer = server.accept().unwrap().0;
        peers.push((peer, fill(vm.main(), id)));
        assert_eq!(vm.main().result(Call::new(ONTIME_OP_CLOSE, id)), Ok(0));
        assert!(connections(false, address, FIN_WAIT1) <= SOCKETS, "round {round}");
    }
    ends(&vm, SOCKETS, &mut peers);
    // Through a channel, which has accepted.
    let listener = 2;
    let address = listen(&mut vm, listener, 1);
    for round in 0..ROUNDS {
        let id = round << ONTIME_SOCK_INDEX_BITS | 3;
        let peer = TcpStream::connect(address).unwrap();
        let driver = &mut vm.channels[1];
        assert_eq!(driver.result(Call::new(ONTIME_OP_ACCEPT, listener).arg([id as i32]).wait()), Ok(0));
        peers.push((peer, fill(driver, id)));
        assert_eq!(driver.result(Call::new(ONTIME_OP_CLOSE, id)), Ok(0));
        assert!(connections(true, address, FIN_WAIT1) <= SOCKETS, "round {round}");
    }
    ends(&vm, SOCKETS, &mut peers);
    assert_eq!(vm.counter("reset_limit"), 2 * (u64::from(ROUNDS) - SOCKETS as u64));
}

/// As many connections as there are places were kept and can be read completely; then none is left.
fn ends(vm: &Vm, places: usize, peers: &mut Vec<(TcpStream, usize)>) {
    assert_eq!(vm.counter("closing"), places as u64);
    let read: Vec<(usize, bool)> = peers.iter_mut().map(|(peer, _)| read_all(peer)).collect();
    let whole = peers.iter().zip(&read).filter(|((_, sent), read)| **read == (*sent, false)).count();
    assert_eq!((whole, read.iter().filter(|(_, reset)| *reset).count()), (places, peers.len() - places));
    peers.clear();
    let start = Instant::now();
    while vm.counter("closing") > 0 {
        assert!(start.elapsed() < PATIENCE, "{} connections are left", vm.counter("closing"));
    }
}

/// A guest that reboots in a loop leaves no more connections behind.
#[test]
fn sockets_of_a_guest_that_boots_anew_count() {
    const SOCKETS: usize = 3;
    let mut vm = Vm::start(&format!("{FREE}\nsockets = {SOCKETS}"));
    let server = TcpListener::bind(super::local(0)).unwrap();
    let address = server.local_addr().unwrap();
    let mut peers = Vec::new();
    for _ in 0..4 {
        for id in 0..SOCKETS as u32 {
            vm.main().socket(id, AF_INET, SOCK_STREAM, 0);
            let _ = vm.main().result(Call::new(ONTIME_OP_CONNECT, id).to(address));
            peers.push(server.accept().unwrap().0);
            fill(vm.main(), id);
        }
        vm.main().reset();
        vm.main().settle();
        assert!(vm.sockets().is_empty());
        assert!(connections(false, address, FIN_WAIT1) <= SOCKETS);
    }
}

/// Fill levels and limits of a socket's buffers (SO_MEMINFO), bytes.
#[derive(Debug, Clone, Copy)]
struct Buffers {
    received: u32,
    to_receive: u32,
    unsent: u32,
    to_send: u32,
}

fn buffers(vm: &mut Vm, sock: u32) -> Buffers {
    let call = Call::new(ONTIME_OP_GETOPT, sock).arg([libc::SOL_SOCKET, libc::SO_MEMINFO]).room(36);
    let data = vm.main().call(call).data;
    let word = |at: usize| u32::from_ne_bytes(data[at * 4..][..4].try_into().unwrap());
    // UDP has no send queue: the allocated memory counts.
    Buffers { received: word(0), to_receive: word(1), unsent: word(2).max(word(5)), to_send: word(3) }
}

/// All options by which a guest could enlarge a buffer. Whether the kernel accepts them does not matter.
fn grow(vm: &mut Vm, sock: u32, tcp: bool) {
    let own = [(libc::SO_SNDBUF, 1 << 30), (libc::SO_RCVBUF, 1 << 30), (libc::SO_SNDBUF, -1), (libc::SO_RCVBUF, -1)];
    let forced = [(libc::SO_SNDBUFFORCE, 1 << 30), (libc::SO_RCVBUFFORCE, 1 << 30)];
    let others = [(SO_BUF_LOCK, 0), (libc::SO_RCVLOWAT, 1 << 30), (SO_BUF_LOCK, 4)];
    for (option, value) in own.into_iter().chain(forced).chain(others) {
        let call = Call::new(ONTIME_OP_SETOPT, sock).arg([libc::SOL_SOCKET, option]).data(&i32::to_le_bytes(value));
        let _ = vm.main().result(call);
    }
    if tcp {
        let clamp = Call::new(ONTIME_OP_SETOPT, sock).arg([libc::IPPROTO_TCP, libc::TCP_WINDOW_CLAMP]);
        let _ = vm.main().result(clamp.data(&(1i32 << 30).to_le_bytes()));
    }
    let low = Call::new(ONTIME_OP_SETOPT, sock).arg([libc::SOL_SOCKET, libc::SO_RCVLOWAT]).data(&1i32.to_le_bytes());
    let _ = vm.main().result(low);
}

/// Repeats until no data fits for a while.
fn until_full(mut fits: impl FnMut() -> bool) {
    let mut full = 0;
    while full < 20 {
        full = if fits() { 0 } else { full + 1 };
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn write_all_that_fits(peer: &mut TcpStream) {
    peer.set_nonblocking(true).unwrap();
    let data = vec![0xa5; 1 << 18];
    until_full(|| std::io::Write::write(peer, &data).is_ok());
}

const SO_BUF_LOCK: i32 = 72;
const IPV6_ADDRFORM: i32 = 1;

/// With `memory`, the limit holds for everything that guest and clients do: connections whose other ends send all they
/// can and read nothing, before and after they are accepted; reads from time to time that would make the kernel enlarge
/// the buffers; and datagrams.
#[test]
fn no_guest_has_the_host_hold_more_than_its_memory() {
    hold_all_that_it_may(|_, _, _| ());
    hold_all_that_it_may(grow);
}

fn hold_all_that_it_may(grow: impl Fn(&mut Vm, u32, bool)) {
    const SOCKETS: u32 = 6;
    const BUFFER: u32 = 2 * (32 << 10);
    const PACKET: u32 = 128 << 10;
    const MEMORY: u32 = 4 * SOCKETS * (BUFFER + PACKET);
    let mut vm = Vm::start(&format!("{FREE}\nsockets = {SOCKETS}\nmemory = {MEMORY}"));
    let mut peers = Vec::new();
    // Two connections through main (connected), two through a channel (accepted), a datagram socket, and the listener.
    let server = TcpListener::bind(super::local(0)).unwrap();
    for sock in [0, 1] {
        vm.main().socket(sock, AF_INET, SOCK_STREAM, 0);
        grow(&mut vm, sock, true);
        let _ = vm.main().result(Call::new(ONTIME_OP_CONNECT, sock).to(server.local_addr().unwrap()));
        peers.push(server.accept().unwrap().0);
    }
    let address = listen(&mut vm, 5, 1);
    grow(&mut vm, 5, true);
    for sock in [2, 3] {
        let mut peer = TcpStream::connect(address).unwrap();
        write_all_that_fits(&mut peer);
        peers.push(peer);
        let accept = Call::new(ONTIME_OP_ACCEPT, 5).arg([sock as i32]).wait();
        assert_eq!(vm.channels[1].result(accept), Ok(0));
        grow(&mut vm, sock, true);
    }
    vm.main().socket(4, AF_INET, SOCK_DGRAM, 0);
    grow(&mut vm, 4, false);
    let datagrams = bind(&mut vm, 4);
    let client = std::net::UdpSocket::bind(super::local(0)).unwrap();
    for _ in 0..200 {
        let _ = client.send_to(&[1; 8_000], datagrams);
        let _ = vm.main().result(Call::new(ONTIME_OP_SEND, 4).to(client.local_addr().unwrap()).data(&[2; 8_000]));
    }
    for _ in 0..10 {
        for (sock, peer) in (0..4).zip(&mut peers) {
            write_all_that_fits(peer);
            let driver = &mut vm.channels[if sock < 2 { 0 } else { 1 }];
            for _ in 0..4 {
                let _ = driver.result(Call::new(ONTIME_OP_RECV, sock).room(1 << 16));
            }
        }
    }
    // The other end's kernel eventually takes data even though they are not read: fill the buffers again.
    let start = Instant::now();
    while (0..4).any(|sock| buffers(&mut vm, sock).unsent == 0) {
        assert!(start.elapsed() < PATIENCE, "the buffers do not fill");
        for (sock, peer) in (0..4).zip(&mut peers) {
            write_all_that_fits(peer);
            let driver = &mut vm.channels[if sock < 2 { 0 } else { 1 }];
            until_full(|| driver.result(Call::new(ONTIME_OP_SEND, sock).data(&[3; 1 << 16])).is_ok());
        }
    }
    let mut all = 0;
    for sock in 0..SOCKETS - 1 {
        let found = buffers(&mut vm, sock);
        assert!(found.to_receive <= BUFFER && found.to_send <= BUFFER, "socket {sock}: {found:?}");
        assert!(found.received <= BUFFER + PACKET && found.unsent <= BUFFER + PACKET, "socket {sock}: {found:?}");
        assert!(found.received > 0, "socket {sock}: {found:?}");
        all += found.received + found.unsent;
    }
    assert!(all <= MEMORY / 2, "{all} bytes in open sockets, for which half of the memory is");
}

/// Connections in a backlog are sockets of the host, too.
#[test]
fn backlogs_count() {
    let mut vm = Vm::start("bind = [\"tcp/0\"]\nsockets = 64\nbacklog = 24");
    // For a listener, TCP_INFO has the backlog in the field `sacked`.
    let backlog = |vm: &mut Vm, sock: u32, wanted: i32| {
        vm.main().socket(sock, AF_INET, SOCK_STREAM, 0);
        bind(vm, sock);
        assert_eq!(vm.main().result(Call::new(ONTIME_OP_LISTEN, sock).arg([wanted])), Ok(0));
        let info = Call::new(ONTIME_OP_GETOPT, sock).arg([libc::IPPROTO_TCP, libc::TCP_INFO]).room(104);
        u32::from_le_bytes(vm.main().call(info).data[28..32].try_into().unwrap())
    };
    let first: Vec<u32> =
        [-1, 5, i32::MAX, 0].into_iter().zip(0..).map(|(wanted, at)| backlog(&mut vm, at, wanted)).collect();
    assert_eq!(first, [24, 5, 17, 0], "no more than `backlog`, and than half of what the others have left");
    let all: u32 = first.iter().sum::<u32>() + (4..40).map(|at| backlog(&mut vm, at, 1_000)).sum::<u32>();
    assert!(all <= 64 + 40, "{all} in all");
    // The backlog of closed listeners is available to others again.
    for sock in 0..40 {
        assert_eq!(vm.main().result(Call::new(ONTIME_OP_CLOSE, sock)), Ok(0));
    }
    assert_eq!(backlog(&mut vm, 40, 1_000), 24);
    // Connections that are queued stay queued if a listener makes its backlog smaller: they still count.
    let mut all = 24;
    for sock in 41..55 {
        assert_eq!(vm.main().result(Call::new(ONTIME_OP_LISTEN, sock - 1).arg([0])), Ok(0));
        all += backlog(&mut vm, sock, 1_000);
    }
    assert!(all <= 64 + 15, "{all} in all");
}
