//! Socket states that a guest must see as with its own kernel: ends, errors, urgent data.

use std::io::Write;
use std::net::{TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::Duration;

use libc::{AF_INET, SOCK_DGRAM};
use ontime_sockets::abi::*;

use super::driver::{Call, Done, Driver, Vm};
use super::{FREE, listen, local};

/// Missing in the libc crate.
const IP_MSFILTER: i32 = 41;

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

/// An error that was read from the error queue is no longer the socket's pending error, even if no event has reported
/// it yet. The next error in the queue is.
#[test]
fn the_error_queue_and_the_pending_error_move_together() {
    both(|vm, channel| {
        let nobody = UdpSocket::bind(local(0)).unwrap().local_addr().unwrap();
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
    main.socket(1, AF_INET, libc::SOCK_STREAM, 0);
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
