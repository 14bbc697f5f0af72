//! Calls that the policy and the limits refuse.

use std::io::Read;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use libc::{AF_INET, AF_INET6, SOCK_DGRAM, SOCK_STREAM};
use ontime_sockets::abi::*;
use vhost::VhostBackend;

use super::driver::{Call, Driver, Vm};
use super::{bind, listen, local};

/// Missing in the libc crate.
const IP_LOCAL_PORT_RANGE: i32 = 51;

#[test]
fn without_rules_nothing_is_allowed() {
    let mut vm = Vm::start("");
    let server = TcpListener::bind(local(0)).unwrap().local_addr().unwrap();
    let main = vm.main();
    main.socket(1, AF_INET, SOCK_STREAM, 0);
    main.socket(2, AF_INET, SOCK_DGRAM, 0);
    for (call, error) in [
        (Call::new(ONTIME_OP_BIND, 1).to(local(0)), libc::EACCES),
        (Call::new(ONTIME_OP_BIND, 2).to(local(5353)), libc::EACCES),
        (Call::new(ONTIME_OP_LISTEN, 1).arg([1]), libc::EACCES),
        (Call::new(ONTIME_OP_CONNECT, 1).to(server), libc::EPERM),
        (Call::new(ONTIME_OP_CONNECT, 1).to("0.0.0.0:80".parse().unwrap()), libc::EPERM),
        (Call::new(ONTIME_OP_CONNECT, 2).to(server), libc::EPERM),
        (Call::new(ONTIME_OP_SEND, 2).to(server).data(b"x"), libc::EPERM),
    ] {
        assert_eq!(main.result(call.clone()), Err(error), "op {}", call.words.op);
    }
    let group = [239, 1, 2, 3, 0, 0, 0, 0];
    let join = Call::new(ONTIME_OP_SETOPT, 2).arg([libc::IPPROTO_IP, libc::IP_ADD_MEMBERSHIP]).data(&group);
    assert_eq!(main.result(join), Err(libc::EPERM));
    assert_eq!((vm.counter("refused_bind"), vm.counter("refused_reach")), (3, 5));
}

/// A connection's port is released at its disconnect. A listen after that would get a port from the kernel.
#[test]
fn no_port_is_had_without_a_rule() {
    let port = TcpListener::bind(local(0)).unwrap().local_addr().unwrap().port();
    let mut vm = Vm::start(&format!("bind = [\"tcp/{port}\"]\nreach = [\"127.0.0.0/8\"]"));
    let main = vm.main();
    main.socket(1, AF_INET, SOCK_STREAM, 0);
    assert_eq!(main.result(Call::new(ONTIME_OP_BIND, 1).to(local(port))), Ok(0));
    assert_eq!(main.result(Call::new(ONTIME_OP_LISTEN, 1).arg([1])), Ok(0));
    let accepting = main.post(Call::new(ONTIME_OP_ACCEPT, 1).arg([2]).wait());
    let _client = TcpStream::connect(local(port)).unwrap();
    assert_eq!(main.wait(accepting).result(), Ok(0));
    let mut dissolve = Call::new(ONTIME_OP_CONNECT, 2);
    dissolve.words.addr_len = size_of::<libc::sockaddr_in>() as u16;
    assert_eq!(main.result(dissolve), Ok(0));
    assert_eq!(main.result(Call::new(ONTIME_OP_LISTEN, 2).arg([1])), Err(libc::EACCES));
    // Ports that the kernel may choose.
    let mut among = |lowest: u16, highest: u16| {
        let range = u32::from(highest) << 16 | u32::from(lowest);
        let option = [libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE];
        main.result(Call::new(ONTIME_OP_SETOPT, 2).arg(option).data(&range.to_le_bytes()))
    };
    for (lowest, highest) in [(port, port + 1), (port - 1, port), (port, 0), (0, port)] {
        assert_eq!(among(lowest, highest), Err(libc::EACCES), "{lowest} to {highest}");
    }
    for (lowest, highest) in [(port, port), (0, 0)] {
        // Before Linux 6.3 a socket has no range of ports.
        assert_ne!(among(lowest, highest), Err(libc::EACCES), "{lowest} to {highest}");
    }
}

/// The guest's module decides whose sockets share a port. It does not know of ports that the kernel chose without a
/// bind.
#[test]
fn a_port_is_shared_only_after_a_bind_and_until_it_is_given_up() {
    let mut vm = Vm::start("bind = [\"udp/0-65535\"]\nreach = [\"127.0.0.0/8\"]");
    let receiver = UdpSocket::bind(local(0)).unwrap();
    let to = receiver.local_addr().unwrap();
    let main = vm.main();
    let option = [libc::SOL_SOCKET, libc::SO_REUSEPORT];
    let share = |sock| Call::new(ONTIME_OP_SETOPT, sock).arg(option).data(&1i32.to_le_bytes());
    let dissolve = |sock| {
        let mut call = Call::new(ONTIME_OP_CONNECT, sock);
        call.words.addr_len = size_of::<libc::sockaddr_in>() as u16;
        call
    };
    for sock in 1..=4 {
        main.socket(sock, AF_INET, SOCK_DGRAM, 0);
        assert_eq!(main.result(share(sock)), Ok(0));
        let shares = main.call(Call::new(ONTIME_OP_GETOPT, sock).arg(option).room(4));
        assert_eq!((shares.result(), &shares.data[..4]), (Ok(4), &[1, 0, 0, 0][..]));
    }
    let send = |main: &mut Driver, sock| {
        assert_eq!(main.result(Call::new(ONTIME_OP_SEND, sock).to(to).data(b"x")), Ok(1));
        main.call(Call::new(ONTIME_OP_NAME, sock).arg([0])).name().port()
    };
    let take = |main: &mut Driver, port| main.result(Call::new(ONTIME_OP_BIND, 4).to(local(port)));
    let port = send(main, 1);
    assert_eq!(take(main, port), Err(libc::EADDRINUSE));
    // A bind tells the guest its port. With the disconnect the socket gives that up, and gets another at the send.
    let bound = main.call(Call::new(ONTIME_OP_BIND, 2).to(local(0)));
    assert_eq!(bound.result(), Ok(0));
    assert_eq!(main.result(dissolve(2)), Ok(0));
    let port = send(main, 2);
    assert_eq!(take(main, port), Err(libc::EADDRINUSE));
    // Also if the option comes after the disconnect, and again after the send.
    main.socket(5, AF_INET, SOCK_DGRAM, 0);
    assert_eq!(main.call(Call::new(ONTIME_OP_BIND, 5).to(local(0))).result(), Ok(0));
    assert_eq!(main.result(dissolve(5)), Ok(0));
    assert_eq!(main.result(share(5)), Ok(0));
    let port = send(main, 5);
    assert_eq!(take(main, port), Err(libc::EADDRINUSE));
    assert_eq!(main.result(share(5)), Ok(0));
    assert_eq!(take(main, port), Err(libc::EADDRINUSE));
    let port = main.call(Call::new(ONTIME_OP_BIND, 3).to(local(0))).name().port();
    assert_eq!(take(main, port), Ok(0));
}

#[test]
fn only_tcp_and_udp_of_ip_exist() {
    let mut vm = Vm::start("");
    for (family, kind, protocol, error) in [
        (libc::AF_UNIX, SOCK_STREAM, 0, libc::EAFNOSUPPORT),
        (libc::AF_NETLINK, SOCK_DGRAM, 0, libc::EAFNOSUPPORT),
        (AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP, libc::ESOCKTNOSUPPORT),
        (AF_INET, SOCK_STREAM | libc::SOCK_NONBLOCK, 0, libc::ESOCKTNOSUPPORT),
        (AF_INET6, SOCK_STREAM, 262, libc::EPROTONOSUPPORT),
    ] {
        let call = Call::new(ONTIME_OP_SOCKET, 1).arg([family, kind, protocol, 0]);
        assert_eq!(vm.main().result(call), Err(error), "{family} {kind} {protocol}");
    }
}

#[test]
fn a_mapped_port_is_the_guests_inside_and_the_hosts_outside() {
    let free = UdpSocket::bind(local(0)).unwrap().local_addr().unwrap().port();
    let mut vm = Vm::start(&format!("bind = [\"udp/53\"]\nreach = [\"127.0.0.0/8\"]\nmap = {{ \"udp/53\" = {free} }}"));
    let main = vm.main();
    main.socket(1, AF_INET, SOCK_DGRAM, 0);
    let bound = main.call(Call::new(ONTIME_OP_BIND, 1).to(local(53)));
    assert_eq!((bound.result(), bound.name()), (Ok(0), local(53)));
    assert_eq!(main.call(Call::new(ONTIME_OP_NAME, 1).arg([0])).name(), local(53));
    let client = UdpSocket::bind(local(0)).unwrap();
    client.send_to(b"question", local(free)).unwrap();
    assert_eq!(main.result(Call::new(ONTIME_OP_RECV, 1).wait().room(20)), Ok(8));
    // The guest's own server, by the guest's port number.
    main.socket(2, AF_INET, SOCK_DGRAM, 0);
    assert_eq!(main.result(Call::new(ONTIME_OP_SEND, 2).to(local(53)).data(b"own")), Ok(3));
    assert_eq!(main.result(Call::new(ONTIME_OP_RECV, 1).wait().room(20)), Ok(3));
    let shown = &vm.sockets()[0];
    assert_eq!((&shown.local, &shown.guest), (&local(free).to_string(), &Some(local(53).to_string())));
}

#[test]
fn sockets_are_limited_and_none_is_leaked() {
    let mut vm = Vm::start("bind = [\"tcp/0\"]\nreach = [\"127.0.0.0/8\"]\nsockets = 8\nchannels = 1");
    let mut before = 0;
    for round in 0..50u32 {
        for index in 0..8 {
            let id = round << ONTIME_SOCK_INDEX_BITS | index;
            vm.main().socket(id, AF_INET, SOCK_STREAM, index % 2);
        }
        let beyond = Call::new(ONTIME_OP_SOCKET, 8).arg([AF_INET, SOCK_STREAM, 0, 0]);
        assert_eq!(vm.main().result(beyond), Err(libc::EMFILE));
        let twice = Call::new(ONTIME_OP_SOCKET, 3).arg([AF_INET, SOCK_STREAM, 0, 0]);
        assert_eq!(vm.main().result(twice), Err(libc::EBUSY));
        for index in 0..8 {
            let id = round << ONTIME_SOCK_INDEX_BITS | index;
            assert_eq!(vm.main().result(Call::new(ONTIME_OP_CLOSE, id).arg([index as i32 & 1])), Ok(0));
            assert_eq!(vm.main().result(Call::new(ONTIME_OP_CLOSE, id)), Err(libc::EBADF));
        }
        if round == 0 {
            // A process that answers this message has received all descriptors that were sent before.
            for channel in &vm.channels {
                channel.frontend.get_features().unwrap();
            }
            before = vm.descriptors();
        }
    }
    assert_eq!(vm.descriptors(), before);
}

/// Waits until the process has received all descriptors: a descriptor that it cannot receive ends the connection.
fn take_descriptors(vm: &mut Vm) {
    for channel in &mut vm.channels {
        channel.frontend.get_features().unwrap();
        channel.settle();
    }
}

/// Limits the process's descriptors. Open descriptors stay open.
fn allow_descriptors(vm: &Vm, count: u64) {
    let process = vm.process.id() as libc::pid_t;
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    assert_eq!(unsafe { libc::prlimit(process, libc::RLIMIT_NOFILE, std::ptr::null(), &raw mut limit) }, 0);
    limit.rlim_cur = count.min(limit.rlim_max);
    assert_eq!(unsafe { libc::prlimit(process, libc::RLIMIT_NOFILE, &raw const limit, std::ptr::null_mut()) }, 0);
}

/// The process may have fewer descriptors than the policy has sockets. The guest gets an error, nothing waits for ever
/// or spins, and the process continues when a descriptor is free.
#[test]
fn out_of_descriptors_is_told_and_passes() {
    let mut vm = Vm::start(super::FREE);
    for channel in 0..2 {
        vm.main().socket(channel, AF_INET, SOCK_DGRAM, channel);
    }
    let bound = [bind(&mut vm, 0), bind(&mut vm, 1)];
    let listeners = [listen(&mut vm, 2, 0), listen(&mut vm, 3, 1)];
    take_descriptors(&mut vm);
    let before = vm.descriptors();
    // A few more than are open; how many are usable depends on the free numbers below.
    let most = before as u64 + 4;
    allow_descriptors(&vm, most);
    for round in 0..20u32 {
        let id = |index: u32| round << ONTIME_SOCK_INDEX_BITS | index;
        let socket = |index, kind| Call::new(ONTIME_OP_SOCKET, id(index)).arg([AF_INET, kind, 0, 0]);
        let filled: Vec<u32> =
            (100..900).take_while(|index| vm.main().result(socket(*index, SOCK_DGRAM)) == Ok(0)).collect();
        assert!((3..100).contains(&filled.len()), "{} sockets, round {round}", filled.len());
        assert_eq!(vm.main().result(socket(900, SOCK_STREAM)), Err(libc::EMFILE));
        let _peers = listeners.map(|address| TcpStream::connect(address).unwrap());
        for channel in 0..2u32 {
            let driver = &mut vm.channels[channel as usize];
            let accept = Call::new(ONTIME_OP_ACCEPT, 2 + channel).arg([id(30 + channel) as i32]);
            assert_eq!(driver.result(accept.clone()), Err(libc::EMFILE), "channel {channel}");
            assert_eq!(driver.result(accept.wait()), Err(libc::EMFILE), "channel {channel}");
            // Other sockets are served.
            let waiting = driver.post(Call::new(ONTIME_OP_RECV, channel).wait().room(10));
            UdpSocket::bind(local(0)).unwrap().send_to(b"x", bound[channel as usize]).unwrap();
            assert_eq!(driver.wait(waiting).result(), Ok(1));
        }
        for index in filled {
            assert_eq!(vm.main().result(Call::new(ONTIME_OP_CLOSE, id(index))), Ok(0));
        }
        // The connections were not lost.
        for channel in 0..2u32 {
            let driver = &mut vm.channels[channel as usize];
            let accept = Call::new(ONTIME_OP_ACCEPT, 2 + channel).arg([id(30 + channel) as i32]).wait();
            assert_eq!(driver.result(accept), Ok(0), "round {round}, channel {channel}");
        }
        for channel in 0..2u32 {
            assert_eq!(vm.main().result(Call::new(ONTIME_OP_CLOSE, id(30 + channel))), Ok(0));
        }
        // A connection keeps its descriptor until the other end has acknowledged its FIN.
        let start = Instant::now();
        while vm.counter("closing") > 0 {
            assert!(start.elapsed() < super::driver::PATIENCE, "round {round}");
        }
    }
    assert_eq!(vm.descriptors(), before);
}

/// Nor does a thread that accepts connections spin when it has no descriptor for a waiting one.
#[test]
fn without_descriptors_nobody_spins() {
    let mut vm = Vm::start(&format!("{}\ndeadlines = true", super::FREE));
    take_descriptors(&mut vm);
    allow_descriptors(&vm, 0);
    let paths = ontime_sockets::Paths::new(&vm.run, "test");
    // The threads that accept connections have a descriptor for the first one.
    let _first = [paths.status(), paths.deadlines()].map(|path| UnixStream::connect(path).unwrap());
    let mut asking = UnixStream::connect(paths.status()).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let before = vm.cpu_time();
    std::thread::sleep(Duration::from_secs(1));
    let used = vm.cpu_time() - before;
    assert!(used < Duration::from_millis(330), "a thread spins: {used:?} of CPU time in 1 s without calls");
    allow_descriptors(&vm, u64::MAX);
    let mut answer = String::new();
    asking.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("\"vm\""), "{answer:?}");
}
