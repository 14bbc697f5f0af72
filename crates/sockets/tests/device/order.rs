//! Order in which a guest learns of data, ends and errors.

use std::io::{Read, Write};
use std::net::{TcpListener, UdpSocket};
use std::os::fd::AsRawFd;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use libc::{AF_INET, SOCK_DGRAM, SOCK_STREAM};
use ontime_sockets::abi::*;
use vhost::vhost_user::VhostUserFrontend;

use super::driver::{Call, Done, Driver, Vm};
use super::{FREE, bind, local, nobodys, send_queued};

/// A reset and the data before it arrive in one event: a waiting call gets the data, the next call the error.
#[test]
fn a_stream_gives_its_data_before_its_reset() {
    let mut vm = Vm::start(FREE);
    let server = TcpListener::bind(local(0)).unwrap();
    for channel in 0..2u32 {
        vm.channels[channel as usize].event_buffers(64);
        vm.main().socket(channel, AF_INET, SOCK_STREAM, channel);
        let _ = vm.main().result(Call::new(ONTIME_OP_CONNECT, channel).to(server.local_addr().unwrap()));
        let (mut peer, _) = server.accept().unwrap();
        let driver = &mut vm.channels[channel as usize];
        let waiting = driver.post(Call::new(ONTIME_OP_RECV, channel).wait().room(100));
        assert_eq!(driver.result(Call::new(ONTIME_OP_POLL, channel)), Ok(0));
        let stood = driver.stop();
        peer.write_all(b"last words").unwrap();
        let reset = libc::linger { l_onoff: 1, l_linger: 0 };
        let (at, len) = ((&raw const reset).cast(), size_of::<libc::linger>() as libc::socklen_t);
        assert_eq!(unsafe { libc::setsockopt(peer.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, at, len) }, 0);
        drop(peer);
        std::thread::sleep(Duration::from_millis(50));
        driver.start_at(&stood);
        let last = driver.wait(waiting);
        assert_eq!((last.result(), &last.data[..]), (Ok(10), &b"last words"[..]), "channel {channel}");
        let mut event = driver.ready(channel, ONTIME_READY_HUP);
        while event.error == 0 {
            event = driver.ready(channel, ONTIME_READY_HUP);
        }
        assert_eq!(i32::from(event.error), libc::ECONNRESET, "channel {channel}");
    }
}

/// Data left behind a blind receive are reported once the guest polls, and from then on as for any socket.
#[test]
fn a_blind_receive_hides_nothing_from_who_asks() {
    let mut vm = Vm::start(FREE);
    for channel in 0..2u32 {
        vm.channels[channel as usize].event_buffers(64);
        vm.main().socket(channel, AF_INET, SOCK_DGRAM, channel);
        let address = bind(&mut vm, channel);
        let client = UdpSocket::bind(local(0)).unwrap();
        let driver = &mut vm.channels[channel as usize];
        let blind = || Call::new(ONTIME_OP_RECV, channel).wait().blind().room(100);
        let waiting = driver.post(blind());
        driver.settle();
        let stood = driver.stop();
        for number in 0..3u8 {
            send_queued(&client, &[number], address);
        }
        driver.start_at(&stood);
        assert_eq!(driver.wait(waiting).data, [0], "channel {channel}");
        let asked = driver.call(Call::new(ONTIME_OP_POLL, channel));
        assert_ne!(asked.header.ready & ONTIME_READY_IN, 0, "channel {channel}: two datagrams are there");
        // Now the device knows that the guest polls.
        let second = driver.call(blind());
        assert_eq!((&second.data[..], second.header.ready & ONTIME_READY_IN), (&[1][..], ONTIME_READY_IN));
        let third = driver.call(blind());
        assert_eq!((&third.data[..], third.header.ready & ONTIME_READY_IN), (&[2][..], 0), "channel {channel}");
        client.send_to(&[3], address).unwrap();
        driver.ready(channel, ONTIME_READY_IN);
    }
}

/// A receive posted ahead does not pass urgent data. A receive that a guest thread waits for does.
#[test]
fn a_receive_ahead_leaves_urgent_data_alone() {
    let mut vm = Vm::start(FREE);
    let server = TcpListener::bind(local(0)).unwrap();
    vm.channels[1].event_buffers(64);
    vm.main().socket(0, AF_INET, SOCK_STREAM, 1);
    let _ = vm.main().result(Call::new(ONTIME_OP_CONNECT, 0).to(server.local_addr().unwrap()));
    let (mut peer, _) = server.accept().unwrap();
    let driver = &mut vm.channels[1];
    let ahead = || Call::new(ONTIME_OP_RECV, 0).wait().ahead().room(100);
    let usual = driver.post(ahead());
    peer.write_all(b"usual").unwrap();
    assert_eq!(driver.wait(usual).data, b"usual");
    let urgent = driver.post(ahead());
    driver.settle();
    let sent = unsafe { libc::send(peer.as_raw_fd(), c"!".as_ptr().cast(), 1, libc::MSG_OOB) };
    assert_eq!(sent, 1);
    assert_eq!(driver.wait(urgent).result(), Err(libc::ECANCELED));
    let byte = driver.call(Call::new(ONTIME_OP_RECV, 0).arg([libc::MSG_OOB]).room(1));
    assert_eq!((byte.result(), &byte.data[..]), (Ok(1), &b"!"[..]));
    peer.write_all(b"again").unwrap();
    assert_eq!(driver.call(Call::new(ONTIME_OP_RECV, 0).wait().room(100)).data, b"again");
}

/// END is reported only after all data were received.
#[test]
fn the_end_of_a_stream_is_told_once_nothing_is_left() {
    let mut vm = Vm::start(FREE);
    for channel in 0..2u32 {
        let server = TcpListener::bind(local(0)).unwrap();
        vm.channels[channel as usize].event_buffers(64);
        vm.main().socket(channel, AF_INET, SOCK_STREAM, channel);
        let _ = vm.main().result(Call::new(ONTIME_OP_CONNECT, channel).to(server.local_addr().unwrap()));
        let (mut peer, _) = server.accept().unwrap();
        peer.write_all(b"last words").unwrap();
        drop(peer);
        let driver = &mut vm.channels[channel as usize];
        assert_eq!(driver.ready(channel, ONTIME_READY_RDHUP).ready & ONTIME_READY_END, 0, "channel {channel}");
        let mut receive = |room| driver.call(Call::new(ONTIME_OP_RECV, channel).room(room));
        let (part, rest) = (receive(4), receive(100));
        assert_eq!((&part.data[..], part.header.ready & ONTIME_READY_END), (&b"last"[..], 0));
        assert_eq!((&rest.data[..], rest.header.ready & ONTIME_READY_END), (&b" words"[..], ONTIME_READY_END));
        assert_eq!(receive(100).result(), Ok(0));
    }
}

/// A receive at the end would pass the urgent byte; closing with it unread causes a reset.
#[test]
fn an_urgent_byte_is_something_left() {
    let mut vm = Vm::start(FREE);
    let server = TcpListener::bind(local(0)).unwrap();
    vm.channels[1].event_buffers(64);
    vm.main().socket(0, AF_INET, SOCK_STREAM, 1);
    let _ = vm.main().result(Call::new(ONTIME_OP_CONNECT, 0).to(server.local_addr().unwrap()));
    let (peer, _) = server.accept().unwrap();
    assert_eq!(unsafe { libc::send(peer.as_raw_fd(), c"!".as_ptr().cast(), 1, libc::MSG_OOB) }, 1);
    drop(peer);
    let driver = &mut vm.channels[1];
    driver.ready(0, ONTIME_READY_RDHUP);
    let byte = driver.call(Call::new(ONTIME_OP_RECV, 0).arg([libc::MSG_OOB]).room(1));
    assert_eq!((&byte.data[..], byte.header.ready & ONTIME_READY_END), (&b"!"[..], 0));
    let end = driver.call(Call::new(ONTIME_OP_RECV, 0).room(1));
    assert_eq!((end.result(), end.header.ready & ONTIME_READY_END), (Ok(0), ONTIME_READY_END));
}

/// For a message that was queued before the call, and for one that arrived after it.
#[test]
fn a_receive_says_whether_it_waited() {
    let mut vm = Vm::start(FREE);
    for channel in 0..2u32 {
        vm.main().socket(channel, AF_INET, SOCK_DGRAM, channel);
        let address = bind(&mut vm, channel);
        let client = UdpSocket::bind(local(0)).unwrap();
        let driver = &mut vm.channels[channel as usize];
        let receive = || Call::new(ONTIME_OP_RECV, channel).wait().room(100);
        let waited = |done: &Done| done.header.msg_flags & ONTIME_MSG_WAITED != 0;
        let waiting = driver.post(receive());
        driver.settle();
        client.send_to(b"late", address).unwrap();
        let late = driver.wait(waiting);
        assert_eq!((&late.data[..], waited(&late)), (&b"late"[..], true), "channel {channel}");
        send_queued(&client, b"there", address);
        let there = driver.call(receive());
        assert_eq!((&there.data[..], waited(&there)), (&b"there"[..], false), "channel {channel}");
    }
}

/// A receive posted ahead must not delay an answer that a guest thread waits for.
#[test]
fn a_receive_ahead_comes_behind_the_calls_of_its_notification() {
    let mut vm = Vm::start(FREE);
    vm.main().socket(0, AF_INET, SOCK_DGRAM, 1);
    let address = bind(&mut vm, 0);
    let client = UdpSocket::bind(local(0)).unwrap();
    let driver = &mut vm.channels[1];
    driver.settle();
    let stood = driver.stop();
    send_queued(&client, b"request", address);
    let ahead = [(); 2].map(|()| driver.post(Call::new(ONTIME_OP_RECV, 0).wait().ahead().room(100)));
    let sent = driver.post(Call::new(ONTIME_OP_SEND, 0).to(client.local_addr().unwrap()).data(b"answer"));
    driver.start_at(&stood);
    let [first, sent] = [ahead[0], sent].map(|call| driver.wait(call));
    assert_eq!((&first.data[..], sent.result()), (&b"request"[..], Ok(6)));
    // Only one of several receives ahead is put off: the guest posts one per socket.
    assert!(first.nth < sent.nth, "in their order");
    client.send_to(b"another", address).unwrap();
    let second = driver.wait(ahead[1]);
    assert_eq!((&second.data[..], second.header.msg_flags & ONTIME_MSG_WAITED), (&b"another"[..], ONTIME_MSG_WAITED));
    let stood = driver.stop();
    send_queued(&client, b"third", address);
    let ahead = driver.post(Call::new(ONTIME_OP_RECV, 0).wait().ahead().room(100));
    let sent = driver.post(Call::new(ONTIME_OP_SEND, 0).to(client.local_addr().unwrap()).data(b"answer"));
    driver.start_at(&stood);
    let [ahead, sent] = [ahead, sent].map(|call| driver.wait(call));
    assert_eq!(&ahead.data[..], b"third");
    assert!(sent.nth < ahead.nth, "the answer first");
    let stood = driver.stop();
    let ahead = driver.post(Call::new(ONTIME_OP_RECV, 0).wait().ahead().room(100));
    let cancel = driver.post(Call::new(ONTIME_OP_CANCEL, 0).arg([ahead as i32]));
    driver.start_at(&stood);
    let [ahead, cancel] = [ahead, cancel].map(|call| driver.wait(call));
    assert_eq!((ahead.result(), cancel.result()), (Err(libc::ECANCELED), Ok(0)), "one that is called off at once");
}

/// The device watches EPOLLOUT only while the socket is not writable. Each return of EPOLLOUT is reported.
#[test]
fn room_to_send_is_told_each_time_it_comes_back() {
    let mut vm = Vm::start(FREE);
    let server = TcpListener::bind(local(0)).unwrap();
    for channel in 0..2u32 {
        vm.channels[channel as usize].event_buffers(64);
        vm.main().socket(channel, AF_INET, SOCK_STREAM, channel);
        let _ = vm.main().result(Call::new(ONTIME_OP_CONNECT, channel).to(server.local_addr().unwrap()));
        let (mut peer, _) = server.accept().unwrap();
        peer.set_nonblocking(true).unwrap();
        let driver = &mut vm.channels[channel as usize];
        for round in 0..3 {
            // The socket stays writable while messages leave.
            let mut ready = ONTIME_READY_OUT;
            let mut sent = 0;
            while ready & ONTIME_READY_OUT != 0 {
                let done = driver.call(Call::new(ONTIME_OP_SEND, channel).data(&[7; 2000]));
                ready = done.header.ready;
                sent += done.result().unwrap_or(0) as usize;
            }
            // The kernel may make room again by itself, by late acknowledgements or when other sockets free memory. The
            // socket is full when a send fails after all that was told.
            loop {
                while driver.try_event().is_some() {}
                let full = driver.call(Call::new(ONTIME_OP_SEND, channel).data(&[7; 10]));
                match full.result() {
                    Ok(bytes) => sent += bytes as usize,
                    result => {
                        assert_eq!((result, full.header.ready & ONTIME_READY_OUT), (Err(libc::EAGAIN), 0));
                        break;
                    }
                }
            }
            let mut left = vec![0; 1 << 20];
            while sent > 0 {
                match peer.read(&mut left) {
                    Ok(bytes) => sent -= bytes,
                    Err(_) => std::thread::sleep(Duration::from_millis(1)),
                }
            }
            let event = driver.ready(channel, ONTIME_READY_OUT);
            assert_eq!(event.error, 0, "channel {channel}, round {round}");
        }
    }
}

/// When the VMM is told that a ring is stopped, its memory may be reused at once. The first event of a ring that is set
/// up anew is START, even if the device was busy meanwhile.
#[test]
fn rings_stand_at_once_and_start_with_start() {
    let mut vm = Vm::start(FREE);
    for channel in 0..2 {
        vm.main().socket(channel, AF_INET, SOCK_DGRAM, channel);
    }
    let addresses = [bind(&mut vm, 0), bind(&mut vm, 1)];
    let client = UdpSocket::bind(local(0)).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Keeps the device busy at all times.
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                addresses.iter().for_each(|address| drop(client.send_to(b"x", address)));
            }
        });
        let held = std::panic::catch_unwind(AssertUnwindSafe(|| stop_and_start(&mut vm)));
        done.store(true, Ordering::Relaxed);
        held.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

fn stop_and_start(vm: &mut Vm) {
    // Setting up main's call queue anew would close all sockets, so main's rings only pause.
    vm.channels[0].event_buffers(4);
    for round in 0..200 {
        vm.channels[1].event_buffers(4);
        let first = vm.channels[1].event().unwrap();
        assert_eq!(u32::from(first.type_), ONTIME_EVENT_START, "round {round}");
        for channel in 0..2u32 {
            let driver = &mut vm.channels[channel as usize];
            driver.post(Call::new(ONTIME_OP_RECV, channel).wait().room(100));
            let stood = driver.stop();
            let used = |driver: &Driver| [driver.calls.used_index(), driver.events.used_index()];
            let before = used(driver);
            std::thread::sleep(Duration::from_micros(200));
            assert_eq!(used(driver), before, "channel {channel}, round {round}");
            if channel == 0 {
                driver.start_at(&stood);
                driver.settle();
                while driver.try_event().is_some() {}
            } else {
                driver.reset();
            }
        }
    }
}

/// A guest checks with PING that its device process is alive; this works even while the worker is busy.
#[test]
fn a_ping_is_answered_at_once() {
    let mut vm = Vm::start(FREE);
    assert_eq!(vm.main().control_call(ONTIME_CTL_PING, 0, &[]), 0);
    assert_eq!(vm.main().control_call(ONTIME_CTL_PING, 91, &[]), 0);
    assert_eq!(vm.counter("stayed_local"), 91);
    assert_eq!(vm.main().control_call(ONTIME_CTL_PING, 0, &[0; 8]), -libc::EINVAL);
    assert_eq!(vm.main().control_call(ONTIME_CTL_INC_BW, 0, &[]), -libc::EOPNOTSUPP);
}

/// A connect that fails after its answer: no answer may show the failure before its reason is reported.
#[test]
fn a_socket_fails_not_before_its_reason_is_told() {
    let mut vm = Vm::start(FREE);
    vm.channels[0].event_buffers(64);
    let closed = nobodys(2);
    for sock in 0..50 {
        vm.main().socket(sock, AF_INET, SOCK_STREAM, 0);
        let answer = vm.main().call(Call::new(ONTIME_OP_CONNECT, sock).to(closed));
        if answer.result() == Err(libc::ECONNREFUSED) {
            continue;
        }
        assert_eq!(answer.result(), Err(libc::EINPROGRESS));
        let mut ready = answer.header.ready;
        while ready & ONTIME_READY_HUP == 0 {
            ready = vm.main().call(Call::new(ONTIME_OP_POLL, sock)).header.ready;
        }
        let mut event = vm.main().ready(sock, ONTIME_READY_HUP);
        while event.error == 0 {
            event = vm.main().try_event().expect("it failed, and no event says why");
        }
        assert_eq!(i32::from(event.error), libc::ECONNREFUSED);
    }
}

/// A report of the previous owner may arrive after the new owner's first report: the one with the higher count is
/// valid, whichever queue it is in.
#[test]
fn the_count_of_reports_goes_on_when_a_socket_moves() {
    let mut vm = Vm::start(FREE);
    vm.main().socket(1, AF_INET, SOCK_DGRAM, 0);
    bind(&mut vm, 1);
    let mut last = 0;
    for channel in [0usize, 1, 0, 1] {
        assert_eq!(vm.main().result(Call::new(ONTIME_OP_CHANNEL, 1).arg([channel as i32])), Ok(0));
        for _ in 0..3 {
            let seq = vm.channels[channel].call(Call::new(ONTIME_OP_POLL, 1)).header.seq;
            assert!((seq.wrapping_sub(last)) as i32 > 0, "{seq} after {last}, channel {channel}");
            last = seq;
        }
    }
}

/// Doorbells are edge-triggered and not read. Each ring's doorbell works, also after a pause, when the device watches
/// an eventfd with an old count anew; and an idle thread sleeps.
#[test]
fn doorbells_are_answered_across_pauses_and_nobody_spins() {
    let mut vm = Vm::start(FREE);
    for channel in 0..2 {
        vm.main().socket(channel, AF_INET, SOCK_DGRAM, channel);
    }
    let call = |vm: &mut Vm, channel: u32| {
        let answer = vm.channels[channel as usize].result(Call::new(ONTIME_OP_POLL, channel));
        assert_eq!(answer, Ok(0), "channel {channel}");
    };
    for _ in 0..10 {
        for channel in 0..2 {
            call(&mut vm, channel);
            call(&mut vm, channel);
            let driver = &mut vm.channels[channel as usize];
            let stood = driver.stop();
            driver.start_at(&stood);
            call(&mut vm, channel);
            let mut frontend = vm.channels[channel as usize].frontend.clone();
            frontend.set_vring_enable(0, false).unwrap();
            frontend.set_vring_enable(0, true).unwrap();
        }
    }
    let before = vm.cpu_time();
    std::thread::sleep(Duration::from_millis(300));
    let used = vm.cpu_time() - before;
    assert!(used < Duration::from_millis(100), "a thread spins: {used:?} of CPU time in 300 ms without calls");
}
