//! Socket states that a guest must see as with its own kernel: ends, errors, urgent data.

use std::io::Write;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::Duration;

use libc::{AF_INET, SOCK_DGRAM, SOCK_STREAM};
use ontime_sockets::abi::*;

use super::driver::{Call, Done, Driver, Vm};
use super::{FREE, listen, local, nobodys};

/// Missing in the libc crate.
const IP_MSFILTER: i32 = 41;
const MSG_PROBE: i32 = 0x10;

/// Runs a test on main and on channel 1. Channel 1's sockets are answered on its queue, all others on main's.
fn both(test: impl Fn(&mut Vm, usize)) {
    for channel in 0..2 {
        let mut vm = Vm::start(FREE);
        vm.channels[channel].event_buffers(16);
        test(&mut vm, channel);
    }
}

fn queue(vm: &mut Vm, channel: usize) -> &mut Driver {
    &mut vm.channels[channel]
}

/// The error in an answer, if any.
fn told(done: &Done) -> Option<u32> {
    let flags = done.header.msg_flags;
    (flags & ONTIME_MSG_ERROR != 0).then_some((flags & ONTIME_MSG_ERRNO_MASK) >> ONTIME_MSG_ERRNO_SHIFT)
}

fn reset(stream: TcpStream) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let (at, len) = ((&raw const linger).cast(), size_of::<libc::linger>() as u32);
    assert_eq!(unsafe { libc::setsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, at, len) }, 0);
}

#[test]
fn shutdown_ends_what_waits_for_datagrams() {
    both(|vm, channel| {
        for (sock, connected) in [(1, true), (2, false)] {
            vm.main().socket(sock, AF_INET, SOCK_DGRAM, channel as u32);
            if connected {
                assert_eq!(vm.main().result(Call::new(ONTIME_OP_CONNECT, sock).to(local(9))), Ok(0));
            }
            let queue = queue(vm, channel);
            let waiting: Vec<_> = (0..3).map(|_| queue.post(Call::new(ONTIME_OP_RECV, sock).wait().room(10))).collect();
            let ended = queue.result(Call::new(ONTIME_OP_SHUTDOWN, sock).arg([2]));
            assert_eq!(ended, if connected { Ok(0) } else { Err(libc::ENOTCONN) });
            for id in waiting {
                assert_eq!(queue.wait(id).result(), Ok(0));
            }
            assert_eq!(queue.result(Call::new(ONTIME_OP_RECV, sock).wait().room(10)), Ok(0), "nor does the next");
            assert_eq!(queue.result(Call::new(ONTIME_OP_RECV, sock).room(10)), Err(libc::EAGAIN));
            assert_eq!(queue.result(Call::new(ONTIME_OP_RECV, sock).ahead().wait().room(10)), Err(libc::ECANCELED));
        }
    });
}

/// Connects the socket to a listener of the test's; returns the accepted end.
fn connected(vm: &mut Vm, sock: u32, channel: usize) -> TcpStream {
    let server = TcpListener::bind(local(0)).unwrap();
    vm.main().socket(sock, AF_INET, SOCK_STREAM, channel as u32);
    let _ = vm.main().result(Call::new(ONTIME_OP_CONNECT, sock).to(server.local_addr().unwrap()));
    queue(vm, channel).ready(sock, ONTIME_READY_OUT);
    server.accept().unwrap().0
}

/// EPIPE and ENOTCONN are states, not errors that SO_ERROR would tell.
#[test]
fn a_send_that_a_shutdown_ends_leaves_no_error() {
    both(|vm, channel| {
        let peer = connected(vm, 1, channel);
        let small =
            Call::new(ONTIME_OP_SETOPT, 1).arg([libc::SOL_SOCKET, libc::SO_SNDBUF]).data(&4096i32.to_le_bytes());
        assert_eq!(vm.main().result(small), Ok(0));
        let queue = queue(vm, channel);
        let (mut posted, mut last) = (Vec::new(), None);
        // Until a send waits.
        while last.is_none() {
            let id = queue.post(Call::new(ONTIME_OP_SEND, 1).wait().data(&[7; 900_000]));
            queue.settle_many(1);
            match queue.poll(id) {
                Some(done) => posted.push(done.result().unwrap()),
                None => last = Some(id),
            }
        }
        assert_eq!(queue.result(Call::new(ONTIME_OP_SHUTDOWN, 1).arg([libc::SHUT_WR])), Ok(0));
        let sent = queue.wait(last.unwrap()).result().unwrap();
        assert!(sent < 900_000, "{sent} bytes after {posted:?}");
        assert_eq!(queue.result(Call::new(ONTIME_OP_SEND, 1).wait().data(&[7])), Err(libc::EPIPE));
        queue.settle();
        while let Some(event) = queue.try_event() {
            assert_eq!(event.error, 0, "an error is told although a send was only cut short");
        }
        drop(peer);
    });
}

#[test]
fn a_peek_for_all_bytes_waits_for_them_and_takes_none() {
    both(|vm, channel| {
        let mut peer = connected(vm, 1, channel);
        let queue = queue(vm, channel);
        let flags = libc::MSG_PEEK | libc::MSG_WAITALL;
        peer.write_all(b"abc").unwrap();
        queue.ready(1, ONTIME_READY_IN);
        assert_eq!(queue.result(Call::new(ONTIME_OP_RECV, 1).arg([flags]).room(6)), Ok(3), "if it may not wait");
        let peek = queue.post(Call::new(ONTIME_OP_RECV, 1).arg([flags]).wait().room(6));
        queue.settle_many(1);
        assert!(queue.poll(peek).is_none(), "three of six bytes are not enough");
        peer.write_all(b"de").unwrap();
        std::thread::sleep(Duration::from_millis(20));
        queue.settle_many(1);
        assert!(queue.poll(peek).is_none(), "nor are five");
        peer.write_all(b"fg").unwrap();
        let done = queue.wait(peek);
        assert_eq!((done.result(), &done.data[..]), (Ok(6), &b"abcdef"[..]));
        // A wait that is cut short gives what there is, as does the end of the stream.
        let peek = queue.post(Call::new(ONTIME_OP_RECV, 1).arg([flags]).wait().room(9));
        queue.settle_many(1);
        assert_eq!(queue.result(Call::new(ONTIME_OP_CANCEL, ONTIME_SOCK_NONE).arg([peek as i32])), Ok(0));
        let done = queue.wait(peek);
        assert_eq!((done.result(), &done.data[..]), (Ok(7), &b"abcdefg"[..]));
        let peek = queue.post(Call::new(ONTIME_OP_RECV, 1).arg([flags]).wait().room(9));
        queue.settle_many(1);
        drop(peer);
        assert_eq!(queue.wait(peek).result(), Ok(7));
        assert_eq!(queue.result(Call::new(ONTIME_OP_RECV, 1).room(9)), Ok(7), "nothing was taken");
    });
}

/// What is no group is the kernel's to refuse, whatever the policy.
#[test]
fn an_address_that_is_no_group_is_invalid() {
    both(|vm, channel| {
        vm.main().socket(1, AF_INET, SOCK_DGRAM, channel as u32);
        let mut set = |name: i32, group: [u8; 4]| {
            let value = [group, [0; 4]].concat();
            vm.main().result(Call::new(ONTIME_OP_SETOPT, 1).arg([libc::IPPROTO_IP, name]).data(&value))
        };
        assert_eq!(set(libc::IP_ADD_MEMBERSHIP, [198, 51, 100, 7]), Err(libc::EINVAL));
        assert_eq!(set(libc::IP_ADD_MEMBERSHIP, [239, 9, 9, 9]), Err(libc::EPERM), "the policy has no such network");
        assert_ne!(set(libc::IP_DROP_MEMBERSHIP, [198, 51, 100, 7]), Err(libc::EPERM));
    });
}

#[test]
fn a_probe_sends_no_datagram() {
    both(|vm, channel| {
        let server = UdpSocket::bind(local(0)).unwrap();
        vm.main().socket(1, AF_INET, SOCK_DGRAM, channel as u32);
        let to = server.local_addr().unwrap();
        let queue = queue(vm, channel);
        assert_eq!(queue.result(Call::new(ONTIME_OP_SEND, 1).to(to).arg([MSG_PROBE]).data(b"probe")), Ok(5));
        assert_eq!(queue.result(Call::new(ONTIME_OP_SEND, 1).to(to).data(b"real")), Ok(4));
        let mut bytes = [0; 9];
        assert_eq!((server.recv(&mut bytes).unwrap(), &bytes[..4]), (4, &b"real"[..]));
    });
}

#[test]
fn a_connection_that_was_reset_while_it_waited_says_so() {
    both(|vm, channel| {
        let address = listen(vm, 1, channel as u32);
        reset(TcpStream::connect(address).unwrap());
        let whole = TcpStream::connect(address).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        let queue = queue(vm, channel);
        let errors: Vec<_> = [2, 3]
            .map(|new| {
                let done = queue.call(Call::new(ONTIME_OP_ACCEPT, 1).arg([new]).wait());
                assert_eq!(done.result(), Ok(0));
                told(&done)
            })
            .into();
        assert_eq!(errors, [Some(libc::ECONNRESET as u32), None]);
        let event = queue.ready(2, ONTIME_READY_HUP);
        assert_eq!((event.error, event.ready & ONTIME_READY_ERR), (0, 0), "it is told once");
        drop(whole);
    });
}

/// The kernel chooses the size of a connection's send buffer. The answer has it where the call has room for it.
#[test]
fn a_connection_says_how_large_its_send_buffer_is() {
    both(|vm, channel| {
        let address = listen(vm, 1, channel as u32);
        let buffer = [libc::SOL_SOCKET, libc::SO_SNDBUF];
        let expected = |vm: &mut Vm, sock: u32| {
            let size = vm.main().call(Call::new(ONTIME_OP_GETOPT, sock).arg(buffer).room(4)).data;
            let header = [20, 0, buffer[0], buffer[1]].map(i32::to_le_bytes);
            [header.as_flattened(), &size].concat()
        };
        for (room, told) in [(20, true), (19, false), (0, false)] {
            // A connection within this machine stands when connect(2) returns, unless the machine is busy.
            let connected = (10..110).find(|sock| {
                vm.main().socket(*sock, AF_INET, SOCK_STREAM, 0);
                let done = vm.main().call(Call::new(ONTIME_OP_CONNECT, *sock).to(address).control_room(room));
                let accept = Call::new(ONTIME_OP_ACCEPT, 1).arg([*sock as i32 + 200]).wait().control_room(room);
                let accepted = queue(vm, channel).call(accept);
                assert_eq!(accepted.result(), Ok(0));
                assert_eq!(accepted.control, if told { expected(vm, *sock + 200) } else { Vec::new() });
                let said = !done.control.is_empty();
                assert!(!said || done.control == expected(vm, *sock), "{done:?}");
                for sock in [*sock, *sock + 200] {
                    assert_eq!(vm.main().result(Call::new(ONTIME_OP_CLOSE, sock).arg([1])), Ok(0));
                }
                said || !told
            });
            assert!(connected.is_some(), "no answer to CONNECT had it");
        }
    });
}

/// An error that was read from the error queue is no longer the socket's pending error, even if no event has reported
/// it yet. The next error in the queue is.
#[test]
fn the_error_queue_and_the_pending_error_move_together() {
    both(|vm, channel| {
        let nobody = nobodys(4);
        vm.main().socket(1, AF_INET, SOCK_DGRAM, channel as u32);
        let option = Call::new(ONTIME_OP_SETOPT, 1).arg([libc::IPPROTO_IP, libc::IP_RECVERR]);
        assert_eq!(vm.main().result(option.data(&1i32.to_ne_bytes())), Ok(0));
        let queue = queue(vm, channel);
        for byte in [b"a", b"b"] {
            assert_eq!(queue.result(Call::new(ONTIME_OP_SEND, 1).to(nobody).data(byte)), Ok(1));
            queue.ready(1, ONTIME_READY_ERR);
        }
        let refused = libc::ECONNREFUSED as u32;
        for (data, error) in [(b'a', refused), (b'b', 0)] {
            let read = Call::new(ONTIME_OP_RECV, 1).arg([libc::MSG_ERRQUEUE]).room(10).control_room(512);
            let done = queue.call(read);
            assert_eq!((done.result(), done.data[0], told(&done)), (Ok(1), data, Some(error)));
        }
        assert_eq!(queue.result(Call::new(ONTIME_OP_RECV, 1).room(10)), Err(libc::EAGAIN));
        assert_eq!(queue.result(Call::new(ONTIME_OP_SEND, 1).to(nobody).data(b"c")), Ok(1), "nothing is pending");
    });
}

/// That no socket of this host has a datagram's port is in the answer to its send, if the call has room for it.
#[test]
fn a_refusal_within_this_host_comes_with_the_answer() {
    both(|vm, channel| {
        let nobody = nobodys(5);
        let header = [20, 0, libc::SOL_SOCKET, libc::SO_ERROR, libc::ECONNREFUSED].map(i32::to_le_bytes);
        let expected = header.as_flattened();
        for (sock, named, room) in [(1, false, 20), (2, true, 20), (3, false, 19), (4, true, 0)] {
            vm.main().socket(sock, AF_INET, SOCK_DGRAM, channel as u32);
            assert_eq!(vm.main().result(Call::new(ONTIME_OP_CONNECT, sock).to(nobody)), Ok(0));
            let send = Call::new(ONTIME_OP_SEND, sock).data(b"x").control_room(room);
            let send = if named { send.to(nobody) } else { send };
            let queue = queue(vm, channel);
            if room < 20 {
                let done = queue.call(send);
                assert_eq!((done.result(), done.control), (Ok(1), Vec::new()));
                assert_eq!(i32::from(queue.ready(sock, 0).error), libc::ECONNREFUSED, "an event tells it");
                continue;
            }
            // On a busy machine the refusal may come late: then an event or the next call tells it.
            let told = (0..10_000).find_map(|sent| {
                // Many in a row are late while the kernel's thread for received packets (ksoftirqd) waits for a CPU.
                std::thread::sleep(Duration::from_millis(sent.min(5)));
                let done = queue.call(send.clone());
                assert!(matches!(done.result(), Ok(1) | Err(libc::ECONNREFUSED)), "{done:?}");
                (!done.control.is_empty()).then_some((sent, done.control))
            });
            let (sent, control) = told.expect("no refusal comes with an answer");
            assert_eq!(control, expected);
            // Those of earlier sends may still come.
            if sent == 0 {
                assert_eq!(queue.result(Call::new(ONTIME_OP_RECV, sock).room(10)), Err(libc::EAGAIN), "told once");
            }
        }
    });
}

#[test]
fn what_is_behind_the_urgent_mark_is_readable() {
    both(|vm, channel| {
        let address = listen(vm, 1, channel as u32);
        let mut client = TcpStream::connect(address).unwrap();
        let queue = queue(vm, channel);
        assert_eq!(queue.result(Call::new(ONTIME_OP_ACCEPT, 1).arg([2]).wait()), Ok(0));
        let urgent = b"hello";
        let at = urgent.as_ptr().cast();
        assert_eq!(unsafe { libc::send(client.as_raw_fd(), at, urgent.len(), libc::MSG_OOB) }, 5);
        client.write_all(b"world").unwrap();
        queue.ready(2, ONTIME_READY_PRI);
        assert_eq!(queue.result(Call::new(ONTIME_OP_RECV, 2).arg([libc::MSG_OOB]).room(1)), Ok(1));
        let before = queue.call(Call::new(ONTIME_OP_RECV, 2).room(100));
        assert_eq!((before.result(), before.header.ready & ONTIME_READY_IN), (Ok(4), ONTIME_READY_IN), "to the mark");
        let behind = queue.call(Call::new(ONTIME_OP_RECV, 2).room(100));
        assert_eq!((behind.result(), behind.header.ready & ONTIME_READY_IN), (Ok(5), 0));
    });
}

/// Options that the policy limits, and groups in all kinds of structures.
#[test]
fn the_policy_holds_for_each_kind_of_option() {
    let mut vm = Vm::start("bind = [\"tcp/0\"]\nreach = [\"239.1.0.0/16\"]\nbacklog = 7");
    let main = vm.main();
    main.socket(1, AF_INET, SOCK_STREAM, 0);
    main.socket(2, AF_INET, SOCK_DGRAM, 0);
    let set = |sock, level, name, value: &[u8]| Call::new(ONTIME_OP_SETOPT, sock).arg([level, name]).data(value);
    let fastopen = set(1, libc::IPPROTO_TCP, libc::TCP_FASTOPEN, &100i32.to_ne_bytes());
    assert_eq!(main.result(fastopen), Ok(0));
    let get = Call::new(ONTIME_OP_GETOPT, 1).arg([libc::IPPROTO_TCP, libc::TCP_FASTOPEN]);
    assert_eq!(main.call(get.data(&[0; 4]).room(4)).data, 7i32.to_ne_bytes());
    for (group, result) in [([239, 1, 0, 1], Ok(0)), ([239, 2, 0, 1], Err(libc::EPERM))] {
        // struct group_source_req: the interface, then two sockaddr_storage.
        let mut source = [0u8; 264];
        source[0] = 1;
        for (at, address) in [(8, group), (136, [127, 0, 0, 1])] {
            source[at..at + 2].copy_from_slice(&(AF_INET as u16).to_ne_bytes());
            source[at + 4..at + 8].copy_from_slice(&address);
        }
        // struct ip_msfilter: group, interface, mode (MCAST_EXCLUDE), number of sources.
        let filter = [group, [127, 0, 0, 1], [0; 4], [0; 4]].concat();
        // The last one is a struct group_req, which ends where the source begins.
        for (name, value) in [
            (libc::MCAST_JOIN_SOURCE_GROUP, &source[..]),
            (IP_MSFILTER, &filter[..]),
            (libc::MCAST_LEAVE_GROUP, &source[..136]),
        ] {
            assert_eq!(main.result(set(2, libc::IPPROTO_IP, name, value)), result, "{name} {group:?}");
        }
        assert_eq!(main.result(set(2, libc::IPPROTO_IP, IP_MSFILTER, &filter[..3])), Err(libc::EINVAL));
    }
}
