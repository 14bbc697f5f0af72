//! The device process with a test driver instead of a guest, with real host sockets: its services, its refusals, and
//! attacks by a guest.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::undocumented_unsafe_blocks,
    reason = "a test ends by panicking"
)]

mod allocation;
mod driver;
mod garbage;
mod hostile;
mod limits;
mod many;
mod order;
mod process;
mod refusals;
mod states;
mod steps;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use driver::{Call, Vm};
use libc::{AF_INET, AF_INET6, SOCK_DGRAM, SOCK_STREAM};
use ontime_sockets::abi::*;

/// Missing in the libc crate.
const SO_BINDTOIFINDEX: i32 = 62;
const TCP_RTO_MAX_MS: i32 = 44;
const TCP_RTO_MIN_US: i32 = 45;
const TCP_DELACK_MAX_US: i32 = 46;

/// Everything on this host is allowed.
const FREE: &str = "bind = [\"tcp/0-65535\", \"udp/0-65535\"]\nreach = [\"127.0.0.0/8\", \"::1/128\"]\nchannels = 1";

fn local(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

/// An address at which nobody listens, where every other test's port is on another one: a port that is free now may be
/// another test's in the next moment. Each caller names a last byte of its own.
fn nobodys(last: u8) -> SocketAddr {
    TcpListener::bind(SocketAddr::from(([127, 99, 0, last], 0))).unwrap().local_addr().unwrap()
}

fn bind(vm: &mut Vm, sock: u32) -> SocketAddr {
    let done = vm.main().call(Call::new(ONTIME_OP_BIND, sock).to(local(0)));
    assert_eq!(done.result(), Ok(0));
    done.name()
}

/// Sends to a UDP socket of the device that nobody reads meanwhile, and waits until the kernel has queued the datagram.
/// On a busy host that may come after the call.
fn send_queued(client: &UdpSocket, data: &[u8], address: SocketAddr) {
    let queued = || -> u64 {
        let local = format!("0100007F:{:04X}", address.port());
        let sockets = std::fs::read_to_string("/proc/net/udp").unwrap();
        let fields = sockets.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let of_address = fields.filter(|fields| fields.get(1).is_some_and(|field| *field == local));
        of_address.map(|fields| u64::from_str_radix(fields[4].split_once(':').unwrap().1, 16).unwrap()).sum()
    };
    let (before, start) = (queued(), Instant::now());
    client.send_to(data, address).unwrap();
    while queued() <= before {
        assert!(start.elapsed() < driver::PATIENCE, "the datagram does not arrive");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn listen(vm: &mut Vm, sock: u32, channel: u32) -> SocketAddr {
    vm.main().socket(sock, AF_INET, SOCK_STREAM, channel);
    let address = bind(vm, sock);
    assert_eq!(vm.main().result(Call::new(ONTIME_OP_LISTEN, sock).arg([16])), Ok(0));
    address
}

#[test]
fn the_configuration_space_says_what_there_is() {
    let vm = Vm::start(FREE);
    let [main, channel] = [&vm.channels[0].config, &vm.channels[1].config];
    assert_eq!(
        (main.magic, main.version, main.role, main.channels),
        (ONTIME_MAGIC, ONTIME_VERSION, ONTIME_ROLE_MAIN, 2)
    );
    assert_eq!((channel.role, channel.channel, channel.wake), (ONTIME_ROLE_CHANNEL, 1, ONTIME_WAKE_IDLE));
    assert_eq!(main.generation, channel.generation);
    assert_eq!(main.sockets_max, 1024);
}

#[test]
fn udp_is_answered_on_the_worker_and_on_a_channel() {
    let mut vm = Vm::start(FREE);
    for channel in 0..2 {
        let sock = 10 + channel;
        vm.main().socket(sock, AF_INET, SOCK_DGRAM, channel);
        let address = bind(&mut vm, sock);
        let client = UdpSocket::bind(local(0)).unwrap();
        let driver = &mut vm.channels[channel as usize];
        for round in 0..50u8 {
            let posted = driver.post(Call::new(ONTIME_OP_RECV, sock).wait().room(100));
            client.send_to(&[round; 40], address).unwrap();
            let received = driver.wait(posted);
            assert_eq!((received.result(), received.name()), (Ok(40), client.local_addr().unwrap()));
            assert_eq!(received.data, [round; 40]);
            assert_eq!(received.len as usize, DONE_LEN + 40);
            assert_eq!(driver.result(Call::new(ONTIME_OP_SEND, sock).to(received.name()).data(&[round; 30])), Ok(30));
            let mut answer = [0; 100];
            assert_eq!(client.recv(&mut answer).unwrap(), 30);
        }
    }
}

#[test]
fn tcp_connections_are_taken_and_served() {
    let mut vm = Vm::start(FREE);
    for channel in 0..2 {
        let (sock, new) = (20 + 2 * channel, 21 + 2 * channel);
        let address = listen(&mut vm, sock, channel);
        let driver = &mut vm.channels[channel as usize];
        let accepting = driver.post(Call::new(ONTIME_OP_ACCEPT, sock).arg([new as i32]).wait());
        let mut client = TcpStream::connect(address).unwrap();
        let accepted = driver.wait(accepting);
        assert_eq!((accepted.result(), accepted.name()), (Ok(0), client.local_addr().unwrap()));
        assert_eq!(driver.call(Call::new(ONTIME_OP_NAME, new).arg([0])).name(), address, "the accepted one's own name");
        assert_eq!(driver.call(Call::new(ONTIME_OP_NAME, new).arg([1])).name(), client.local_addr().unwrap());
        client.write_all(b"request").unwrap();
        let peeked = driver.call(Call::new(ONTIME_OP_RECV, new).arg([libc::MSG_PEEK]).wait().room(3));
        assert_eq!((peeked.result(), &peeked.data[..]), (Ok(3), &b"req"[..]));
        assert_eq!(driver.result(Call::new(ONTIME_OP_QUERY, new).arg([ONTIME_QUERY_INQ as i32])), Ok(7));
        let received = driver.call(Call::new(ONTIME_OP_RECV, new).room(100));
        assert_eq!((received.result(), &received.data[..]), (Ok(7), &b"request"[..]));
        assert_eq!(driver.result(Call::new(ONTIME_OP_RECV, new).room(100)), Err(libc::EAGAIN));
        assert_eq!(driver.result(Call::new(ONTIME_OP_SEND, new).data(b"answer")), Ok(6));
        let mut answer = [0; 6];
        client.read_exact(&mut answer).unwrap();
        // WAITALL across two pieces.
        let all = driver.post(Call::new(ONTIME_OP_RECV, new).arg([libc::MSG_WAITALL]).wait().room(8));
        client.write_all(b"half").unwrap();
        std::thread::sleep(Duration::from_millis(30));
        assert!(driver.poll(all).is_none());
        client.write_all(b"half").unwrap();
        assert_eq!(driver.wait(all).data, b"halfhalf");
        // The same with dropped data: the call waits, too.
        let flags = libc::MSG_WAITALL | libc::MSG_TRUNC;
        let all = driver.post(Call::new(ONTIME_OP_RECV, new).arg([flags]).wait().room(8));
        client.write_all(b"half").unwrap();
        std::thread::sleep(Duration::from_millis(30));
        assert!(driver.poll(all).is_none());
        client.write_all(b"half").unwrap();
        let dropped = driver.wait(all);
        assert_eq!((dropped.result(), dropped.len as usize), (Ok(8), DONE_LEN), "nothing was written but the header");
        // Half close in both directions.
        assert_eq!(driver.result(Call::new(ONTIME_OP_SHUTDOWN, new).arg([1])), Ok(0));
        assert_eq!(client.read(&mut answer).unwrap(), 0);
        client.write_all(b"late").unwrap();
        drop(client);
        assert_eq!(driver.call(Call::new(ONTIME_OP_RECV, new).arg([libc::MSG_WAITALL]).wait().room(100)).data, b"late");
        assert_eq!(driver.result(Call::new(ONTIME_OP_RECV, new).wait().room(100)), Ok(0), "the end");
        for closed in [sock, new] {
            assert_eq!(vm.main().result(Call::new(ONTIME_OP_CLOSE, closed)), Ok(0));
            assert_eq!(vm.main().result(Call::new(ONTIME_OP_POLL, closed)), Err(libc::EBADF));
        }
    }
    assert!(vm.sockets().is_empty());
}

#[test]
fn a_listener_receives_nothing_and_says_so() {
    let mut vm = Vm::start(FREE);
    for channel in 0..2 {
        listen(&mut vm, channel, channel);
        let driver = &mut vm.channels[channel as usize];
        for _ in 0..2 {
            let receive = Call::new(ONTIME_OP_RECV, channel).wait().room(100);
            assert_eq!(driver.result(receive), Err(libc::ENOTCONN), "channel {channel}");
        }
    }
}

#[test]
fn connects_succeed_and_fail_with_their_reason() {
    let mut vm = Vm::start(FREE);
    vm.channels[0].event_buffers(64);
    vm.channels[1].event_buffers(64);
    let server = TcpListener::bind(local(0)).unwrap();
    let closed = nobodys(1);
    for channel in 0..2u32 {
        let sock = 1 + 2 * channel;
        vm.main().socket(sock, AF_INET, SOCK_STREAM, channel);
        let connecting = vm.main().call(Call::new(ONTIME_OP_CONNECT, sock).to(server.local_addr().unwrap()));
        assert!(matches!(connecting.result(), Ok(0) | Err(libc::EINPROGRESS)));
        // The answer itself or an event may report it. The unconnected socket was ready with HUP, too.
        let connected = |ready: u32| ready & ONTIME_READY_OUT != 0 && ready & ONTIME_READY_HUP == 0;
        let mut ready = connecting.header.ready;
        while !connected(ready) {
            let event = vm.channels[channel as usize].ready(sock, ONTIME_READY_OUT);
            assert_eq!(event.error, 0, "{event:?}");
            ready = event.ready;
        }
        let (_, peer) = server.accept().unwrap();
        assert_eq!(connecting.name(), peer);
        let refused = sock + 1;
        vm.main().socket(refused, AF_INET, SOCK_STREAM, channel);
        // The report of the unconnected socket (HUP) comes first.
        let answer = vm.main().result(Call::new(ONTIME_OP_CONNECT, refused).to(closed));
        if answer != Err(libc::ECONNREFUSED) {
            assert_eq!(answer, Err(libc::EINPROGRESS));
            let mut event = vm.channels[channel as usize].ready(refused, ONTIME_READY_HUP);
            while event.error == 0 {
                event = vm.channels[channel as usize].ready(refused, ONTIME_READY_HUP);
            }
            assert_eq!(i32::from(event.error), libc::ECONNREFUSED);
        }
    }
}

#[test]
fn readiness_is_reported_once_per_change_and_arrival() {
    let mut vm = Vm::start(FREE);
    vm.channels[1].event_buffers(4);
    vm.main().socket(5, AF_INET, SOCK_DGRAM, 1);
    let address = bind(&mut vm, 5);
    let driver = &mut vm.channels[1];
    let start = driver.event().unwrap();
    assert_eq!((u32::from(start.type_), start.generation), (ONTIME_EVENT_START, driver.config.generation));
    let first = driver.ready(5, ONTIME_READY_OUT);
    assert_eq!(first.ready, ONTIME_READY_OUT);
    let client = UdpSocket::bind(local(0)).unwrap();
    client.send_to(b"1", address).unwrap();
    let second = driver.ready(5, ONTIME_READY_IN);
    client.send_to(b"2", address).unwrap();
    let third = driver.ready(5, ONTIME_READY_IN);
    assert!(
        (third.seq - second.seq) as i32 > 0,
        "an arrival while IN stands is told again, for edge-triggered pollers"
    );
    let one = driver.call(Call::new(ONTIME_OP_RECV, 5).room(9));
    assert_eq!(one.header.ready, ONTIME_READY_IN | ONTIME_READY_OUT, "one more is there");
    let two = driver.call(Call::new(ONTIME_OP_RECV, 5).room(9));
    assert_eq!(two.header.ready, ONTIME_READY_OUT);
    assert!((two.header.seq - one.header.seq) as i32 > 0 && (one.header.seq - third.seq) as i32 > 0);
    std::thread::sleep(Duration::from_millis(20));
    assert!(driver.try_event().is_none(), "nothing else happened");
}

#[test]
fn without_event_buffers_nothing_is_lost() {
    let mut vm = Vm::start(FREE);
    let clients: Vec<UdpSocket> = (0..40).map(|_| UdpSocket::bind(local(0)).unwrap()).collect();
    for (sock, client) in clients.iter().enumerate() {
        vm.main().socket(sock as u32, AF_INET, SOCK_DGRAM, 1);
        let address = bind(&mut vm, sock as u32);
        send_queued(client, b"x", address);
    }
    let driver = &mut vm.channels[1];
    driver.event_buffers(3);
    let mut ready = std::collections::BTreeSet::new();
    while ready.len() < 40 {
        let event = driver.event().expect("a report is missing");
        if event.ready & ONTIME_READY_IN != 0 {
            ready.insert(event.sock);
        }
    }
}

#[test]
fn cancelling_ends_a_wait_and_only_that() {
    let mut vm = Vm::start(FREE);
    vm.main().socket(1, AF_INET, SOCK_DGRAM, 1);
    let address = bind(&mut vm, 1);
    let driver = &mut vm.channels[1];
    let [first, second] = [0; 2].map(|_| driver.post(Call::new(ONTIME_OP_RECV, 1).wait().room(10)));
    let cancel = |id: u64| Call::new(ONTIME_OP_CANCEL, ONTIME_SOCK_NONE).arg([id as i32, (id >> 32) as i32]);
    assert_eq!(driver.result(cancel(first)), Ok(0));
    assert_eq!(driver.poll(first).expect("answered before CANCEL is").result(), Err(libc::ECANCELED));
    assert_eq!(driver.result(cancel(first)), Err(libc::ENOENT));
    assert!(driver.poll(second).is_none());
    UdpSocket::bind(local(0)).unwrap().send_to(b"data", address).unwrap();
    assert_eq!(driver.wait(second).result(), Ok(4));
    let waiting = driver.post(Call::new(ONTIME_OP_RECV, 1).wait().room(10));
    // A round trip, so that the call certainly waits.
    assert_eq!(driver.result(Call::new(ONTIME_OP_POLL, 1)), Ok(0));
    assert_eq!(vm.main().result(Call::new(ONTIME_OP_CHANNEL, 1).arg([0])), Err(libc::EBUSY));
    assert_eq!(vm.main().result(Call::new(ONTIME_OP_CLOSE, 1)), Ok(0));
    assert_eq!(vm.channels[1].wait(waiting).result(), Err(libc::ECANCELED));
}

#[test]
fn sockets_move_between_channels() {
    let mut vm = Vm::start(FREE);
    vm.main().socket(1, AF_INET, SOCK_DGRAM, 0);
    let address = bind(&mut vm, 1);
    let client = UdpSocket::bind(local(0)).unwrap();
    for channel in [1usize, 0, 1] {
        assert_eq!(vm.main().result(Call::new(ONTIME_OP_CHANNEL, 1).arg([channel as i32])), Ok(0));
        client.send_to(b"there", address).unwrap();
        assert_eq!(vm.channels[channel].result(Call::new(ONTIME_OP_RECV, 1).wait().room(10)), Ok(5));
        assert_eq!(vm.channels[1 - channel].result(Call::new(ONTIME_OP_RECV, 1).wait().room(10)), Err(libc::EXDEV));
    }
    assert_eq!(vm.channels[1].result(Call::new(ONTIME_OP_CLOSE, 1)), Err(libc::EOPNOTSUPP), "the worker's");
}

/// Only accepted connections are closed without the worker: the close of other sockets may block.
#[test]
fn a_channel_closes_the_connections_it_has_accepted() {
    let mut vm = Vm::start(&FREE.replace("127.0.0.0/8", "127.0.0.0/8\", \"224.0.0.0/4"));
    vm.main().socket(1, AF_INET, SOCK_STREAM, 1);
    let address = bind(&mut vm, 1);
    assert_eq!(vm.main().result(Call::new(ONTIME_OP_LISTEN, 1).arg([9])), Ok(0));
    let close = |abort: i32| Call::new(ONTIME_OP_CLOSE, 2).arg([abort]);
    for abort in [0, 1, 0] {
        let mut peer = TcpStream::connect(address).unwrap();
        let driver = &mut vm.channels[1];
        assert_eq!(driver.result(Call::new(ONTIME_OP_ACCEPT, 1).arg([2]).wait()), Ok(0));
        let waiting = driver.post(Call::new(ONTIME_OP_RECV, 2).wait().room(10));
        assert_eq!(driver.result(close(abort)), Ok(0));
        assert_eq!(driver.poll(waiting).expect("answered before CLOSE is").result(), Err(libc::ECANCELED));
        assert_eq!(driver.result(Call::new(ONTIME_OP_RECV, 2).room(10)), Err(libc::EBADF));
        let ended = peer.read(&mut [0; 1]).map_err(|error| error.raw_os_error());
        assert_eq!(ended, if abort == 0 { Ok(0) } else { Err(Some(libc::ECONNRESET)) });
        assert_eq!(vm.main().result(close(0)), Err(libc::EBADF));
    }
    assert_eq!(
        vm.channels[1].result(Call::new(ONTIME_OP_CLOSE, 1)),
        Err(libc::EOPNOTSUPP),
        "a listener is the worker's"
    );
    let _peer = TcpStream::connect(address).unwrap();
    assert_eq!(vm.channels[1].result(Call::new(ONTIME_OP_ACCEPT, 1).arg([2]).wait()), Ok(0));
    assert_eq!(vm.main().result(close(0)), Ok(0), "by the worker, too");
    // A connection with additional state may block at its close.
    let mut group = 0u32.to_ne_bytes().repeat(34);
    group[8..16].copy_from_slice(&[2, 0, 0, 0, 224, 0, 0, 251]);
    let join = Call::new(ONTIME_OP_SETOPT, 2).arg([libc::IPPROTO_IP, libc::MCAST_JOIN_GROUP]).data(&group);
    for more in [Call::new(ONTIME_OP_LISTEN, 2).arg([9]), join] {
        let _peer = TcpStream::connect(address).unwrap();
        assert_eq!(vm.channels[1].result(Call::new(ONTIME_OP_ACCEPT, 1).arg([2]).wait()), Ok(0));
        let _ = vm.main().result(more);
        assert_eq!(vm.channels[1].result(close(0)), Err(libc::EOPNOTSUPP));
        assert_eq!(vm.main().result(close(0)), Ok(0));
    }
    assert_eq!(vm.main().result(Call::new(ONTIME_OP_CLOSE, 1)), Ok(0));
    assert!(vm.sockets().is_empty(), "{:?}", vm.sockets());
}

#[test]
fn large_sends_wait_for_a_slow_reader_and_lose_nothing() {
    let mut vm = Vm::start(FREE);
    let server = TcpListener::bind(local(0)).unwrap();
    for channel in 0..2 {
        let sock = 30 + channel;
        vm.main().socket(sock, AF_INET, SOCK_STREAM, channel);
        let _ = vm.main().result(Call::new(ONTIME_OP_CONNECT, sock).to(server.local_addr().unwrap()));
        let (mut peer, _) = server.accept().unwrap();
        let data: Vec<u8> = (0..1_000_000u32).map(|n| (n % 251) as u8).collect();
        let driver = &mut vm.channels[channel as usize];
        let posted: Vec<u64> =
            (0..8).map(|_| driver.post(Call::new(ONTIME_OP_SEND, sock).wait().data(&data))).collect();
        // Other calls are served meanwhile.
        assert_eq!(driver.result(Call::new(ONTIME_OP_NAME, sock).arg([0])), Ok(0));
        let mut received = vec![0; 8 * data.len()];
        peer.read_exact(&mut received).unwrap();
        for id in posted {
            assert_eq!(driver.wait(id).result(), Ok(data.len() as u32));
        }
        assert!(received.chunks(data.len()).all(|chunk| chunk == data), "the same bytes, in order");
        peer.write_all(&data).unwrap();
        let back = driver.call(Call::new(ONTIME_OP_RECV, sock).arg([libc::MSG_WAITALL]).wait().room(data.len()));
        assert!(back.result() == Ok(data.len() as u32) && back.data == data);
    }
}

#[test]
fn options_reach_the_host_or_are_refused() {
    let mut vm = Vm::start(&format!("{FREE}\nbuffer = 65536"));
    vm.main().socket(1, AF_INET6, SOCK_STREAM, 1);
    let mut set = |level: i32, name: i32, value: i32| {
        vm.main().result(Call::new(ONTIME_OP_SETOPT, 1).arg([level, name]).data(&value.to_le_bytes()))
    };
    assert_eq!(set(libc::IPPROTO_TCP, libc::TCP_NODELAY, 1), Ok(0));
    assert_eq!(set(libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1), Ok(0));
    assert_eq!(set(libc::SOL_SOCKET, libc::SO_SNDBUF, 1 << 30), Ok(0));
    assert_eq!(set(libc::SOL_SOCKET, libc::SO_RCVBUF, -1), Ok(0));
    assert_eq!(set(libc::SOL_SOCKET, libc::SO_MARK, 1), Err(libc::ENOPROTOOPT));
    assert_eq!(set(libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, 1), Err(libc::ENOPROTOOPT));
    assert_eq!(set(libc::SOL_SOCKET, libc::SO_TYPE, 1), Err(libc::ENOPROTOOPT));
    let mut get = |level: i32, name: i32, room: usize| {
        vm.main().call(Call::new(ONTIME_OP_GETOPT, 1).arg([level, name]).room(room))
    };
    let number = |done: driver::Done| i32::from_le_bytes(done.data[..4].try_into().unwrap());
    assert_eq!(number(get(libc::IPPROTO_TCP, libc::TCP_NODELAY, 4)), 1);
    assert_eq!(number(get(libc::SOL_SOCKET, libc::SO_SNDBUF, 4)), 2 * 65536, "clamped; the kernel doubles it");
    assert_eq!(number(get(libc::SOL_SOCKET, libc::SO_RCVBUF, 4)), 2 * 65536, "a negative size is a huge one");
    assert_eq!(number(get(libc::SOL_SOCKET, libc::SO_TYPE, 4)), SOCK_STREAM);
    assert!(get(libc::IPPROTO_TCP, libc::TCP_INFO, 232).result().unwrap() > 100);
    assert_eq!(get(libc::SOL_SOCKET, libc::SO_PEERCRED, 12).result(), Err(libc::ENOPROTOOPT));
    assert_eq!(vm.counter("refused_option"), 3);
    let mut set = |name: i32, value: i32| {
        vm.main().result(Call::new(ONTIME_OP_SETOPT, 1).arg([libc::SOL_SOCKET, name]).data(&value.to_le_bytes()))
    };
    // The size that the policy allows; of a negative one the smallest.
    for name in [libc::SO_SNDBUFFORCE, libc::SO_RCVBUFFORCE] {
        assert_eq!([1 << 30, 65536, 5000, -1].map(|size| set(name, size)), [Ok(65536), Ok(65536), Ok(5000), Ok(0)]);
    }
    // Interfaces that the host may have.
    assert_eq!([-1, 2, (1 << 30) - 1].map(|index| set(SO_BINDTOIFINDEX, index)), [Err(libc::ENOPROTOOPT); 3]);
    assert_eq!([0, 1].map(|loopback| set(SO_BINDTOIFINDEX, loopback)), [Ok(0); 2]);
    // The kernel refuses them before 6.15 and 6.16, the device never.
    for name in [TCP_RTO_MAX_MS, TCP_RTO_MIN_US, TCP_DELACK_MAX_US] {
        let time = Call::new(ONTIME_OP_SETOPT, 1).arg([libc::IPPROTO_TCP, name]).data(&40_000i32.to_le_bytes());
        let result = vm.main().result(time);
        assert!(matches!(result, Ok(0) | Err(libc::ENOPROTOOPT)), "{name}: {result:?}");
    }
    assert_eq!(vm.counter("refused_option"), 6);
}

#[test]
fn control_messages_go_both_ways() {
    let mut vm = Vm::start(FREE);
    vm.main().socket(1, AF_INET, SOCK_DGRAM, 1);
    let address = bind(&mut vm, 1);
    let on = 1i32.to_le_bytes();
    assert_eq!(
        vm.main().result(Call::new(ONTIME_OP_SETOPT, 1).arg([libc::IPPROTO_IP, libc::IP_PKTINFO]).data(&on)),
        Ok(0)
    );
    assert_eq!(
        vm.main().result(Call::new(ONTIME_OP_SETOPT, 1).arg([libc::SOL_SOCKET, libc::SO_TIMESTAMPNS]).data(&on)),
        Ok(0)
    );
    let client = UdpSocket::bind(local(0)).unwrap();
    client.send_to(b"123456", address).unwrap();
    let driver = &mut vm.channels[1];
    let got = driver.call(Call::new(ONTIME_OP_RECV, 1).wait().room(4).control_room(256));
    assert_eq!((got.result(), &got.data[..]), (Ok(4), &b"1234"[..]));
    assert_ne!(got.header.msg_flags & libc::MSG_TRUNC as u32, 0, "the datagram was longer");
    let types: Vec<(i32, i32)> = messages(&got.control).into_iter().map(|(level, kind, _)| (level, kind)).collect();
    assert!(
        types.contains(&(libc::IPPROTO_IP, libc::IP_PKTINFO))
            && types.contains(&(libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS)),
        "{types:?}"
    );
    let ttl = [
        20u64.to_le_bytes().to_vec(),
        0i32.to_le_bytes().to_vec(),
        libc::IP_TTL.to_le_bytes().to_vec(),
        7i32.to_le_bytes().to_vec(),
    ]
    .concat();
    assert_eq!(driver.result(Call::new(ONTIME_OP_SEND, 1).to(got.name()).control(&ttl).data(b"x")), Ok(1));
    let rights = [
        20u64.to_le_bytes().to_vec(),
        libc::SOL_SOCKET.to_le_bytes().to_vec(),
        libc::SCM_RIGHTS.to_le_bytes().to_vec(),
        0i32.to_le_bytes().to_vec(),
    ]
    .concat();
    assert_eq!(
        driver.result(Call::new(ONTIME_OP_SEND, 1).to(got.name()).control(&rights).data(b"x")),
        Err(libc::EINVAL)
    );
}

fn messages(mut bytes: &[u8]) -> Vec<(i32, i32, Vec<u8>)> {
    let mut found = Vec::new();
    while bytes.len() >= 16 {
        let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let number = |at: usize| i32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        found.push((number(8), number(12), bytes[16..len].to_vec()));
        bytes = bytes.get(len.next_multiple_of(8)..).unwrap_or_default();
    }
    found
}
