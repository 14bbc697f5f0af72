//! What the policy and the limits refuse.

use std::net::{TcpListener, TcpStream, UdpSocket};

use libc::{AF_INET, AF_INET6, SOCK_DGRAM, SOCK_STREAM};
use ontime_sockets::abi::*;
use vhost::VhostBackend;

use super::driver::{Call, Vm};
use super::local;

/// Not in the libc crate.
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

/// A connection's port goes with the connection: who listens then has one that the kernel chooses.
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
    let range =
        Call::new(ONTIME_OP_SETOPT, 1).arg([libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE]).data(&[0x40, 0x9c, 0x40, 0x9c]);
    assert_eq!(main.result(range), Err(libc::ENOPROTOOPT));
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
    // Its own server, by the guest's number.
    main.socket(2, AF_INET, SOCK_DGRAM, 0);
    assert_eq!(main.result(Call::new(ONTIME_OP_SEND, 2).to(local(53)).data(b"own")), Ok(3));
    assert_eq!(main.result(Call::new(ONTIME_OP_RECV, 1).wait().room(20)), Ok(3));
    let shown = &vm.status().sockets[0];
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
            // Who answers this has taken all descriptors it was sent before.
            for channel in &vm.channels {
                channel.frontend.get_features().unwrap();
            }
            before = vm.descriptors();
        }
    }
    assert_eq!(vm.descriptors(), before);
}
