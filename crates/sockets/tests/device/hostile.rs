//! Attacks by a guest, and actions of QEMU in between. The process must answer or ignore them and continue.

use std::net::UdpSocket;
use std::time::Duration;

use libc::{AF_INET, SOCK_DGRAM};
use ontime_sockets::abi::*;
use vm_memory::ByteValued;

use super::driver::{Call, FREE, MEMORY, Vm};
use super::{bind, local};

const EVERYTHING: &str = super::FREE;

/// Checks that the process still serves.
pub(crate) fn alive(vm: &mut Vm) {
    assert_eq!(vm.process.try_wait().unwrap(), None, "the process is gone");
    for channel in 0..2 {
        let unknown = Call::new(ONTIME_OP_POLL, 0xfffff);
        assert_eq!(vm.channels[channel].result(unknown), Err(libc::EBADF), "channel {channel}");
    }
}

#[test]
fn half_written_and_disordered_chains_are_used_up() {
    let mut vm = Vm::start(EVERYTHING);
    for channel in 0..2 {
        let ring = &mut vm.channels[channel].calls;
        // Too short to read, too short to write, outside memory, a loop, an index beyond the table, an empty chain.
        ring.descriptor(200, FREE, 10, 1, 201);
        ring.descriptor(201, FREE, 4096, 2, 0);
        ring.descriptor(202, FREE, 4096, 1, 203);
        ring.descriptor(203, FREE, 10, 2, 0);
        ring.descriptor(204, MEMORY - 8, 4096, 1, 205);
        ring.descriptor(205, u64::MAX - 8, 4096, 2, 0);
        ring.descriptor(206, FREE, 72, 1, 206);
        ring.descriptor(207, FREE, 72, 1, 999);
        ring.descriptor(208, 0, 0, 0, 0);
        // Writable part first. Indirect tables: with a partial descriptor, outside memory, pointing to itself, with
        // descriptors in a cycle.
        ring.descriptor(209, FREE, 4096, 3, 210);
        ring.descriptor(210, FREE, 4096, 0, 0);
        ring.descriptor(211, FREE, 15, 4, 0);
        ring.descriptor(212, MEMORY, 4096, 4, 0);
        ring.descriptor(213, FREE + 0x4000, 16, 4, 0);
        ring.write_descriptor(FREE + 0x4000, FREE + 0x4000, 16, 4, 0);
        ring.descriptor(214, FREE + 0x5000, 32, 4, 0);
        ring.write_descriptor(FREE + 0x5000, FREE, 72, 1, 1);
        ring.write_descriptor(FREE + 0x5010, FREE, 72, 1, 0);
        let heads = [200, 202, 204, 206, 207, 208, 209, 211, 212, 213, 214];
        for head in heads {
            ring.offer(head);
        }
        let settled = heads.len() as u16 + 1;
        vm.channels[channel].settle();
        assert_eq!(vm.channels[channel].calls.used_index(), settled, "each head comes back");
        assert_eq!(vm.counter("malformed"), (channel as u64 + 1) * heads.len() as u64);
    }
    alive(&mut vm);
}

#[test]
fn heads_beyond_the_table_are_counted_and_not_used() {
    let mut vm = Vm::start(EVERYTHING);
    let driver = vm.main();
    for head in [256, u16::MAX] {
        driver.calls.offer(head);
        driver.events.offer(head);
        driver.control.as_mut().unwrap().offer(head);
    }
    let rings = [&driver.calls, &driver.events, driver.control.as_ref().unwrap()];
    rings.iter().for_each(|ring| ring.notify());
    let start = std::time::Instant::now();
    while vm.counter("malformed") < 6 {
        assert!(start.elapsed() < super::driver::PATIENCE, "{} of 6", vm.counter("malformed"));
    }
    std::thread::sleep(Duration::from_millis(20));
    let driver = vm.main();
    for ring in [&driver.calls, &driver.events, driver.control.as_ref().unwrap()] {
        assert_eq!(ring.used_index(), 0);
        assert!(ring.call.read().is_err(), "notified of nothing");
    }
    assert_eq!(vm.process.try_wait().unwrap(), None, "the process is gone");
}

#[test]
fn a_ring_whose_index_is_nonsense_stops_nobody_else() {
    let mut vm = Vm::start(EVERYTHING);
    vm.channels[1].calls.jump(5000);
    vm.channels[1].events.jump(5000);
    vm.channels[1].calls.notify();
    vm.channels[1].events.notify();
    std::thread::sleep(Duration::from_millis(50));
    let used = |vm: &Vm| {
        // Fields 14 and 15, in hundredths of a second; the name in field 2 may contain spaces.
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", vm.process.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    };
    let before = used(&vm);
    std::thread::sleep(Duration::from_millis(500));
    assert!(used(&vm) - before < 20, "it spins");
    assert_eq!(vm.main().result(Call::new(ONTIME_OP_POLL, 1)), Err(libc::EBADF));
}

#[test]
fn the_same_chain_offered_again_while_it_waits_is_limited() {
    let mut vm = Vm::start(EVERYTHING);
    vm.main().socket(1, AF_INET, SOCK_DGRAM, 1);
    bind(&mut vm, 1);
    let driver = &mut vm.channels[1];
    let words = Call::new(ONTIME_OP_RECV, 1).wait().words;
    driver.write(FREE, words.as_slice());
    driver.calls.descriptor(254, FREE, CALL_LEN as u32, 1, 255);
    driver.calls.descriptor(255, FREE + 4096, 256, 2, 0);
    for _ in 0..3 {
        for _ in 0..200 {
            driver.calls.offer(254);
        }
        driver.settle();
    }
    assert!(vm.counter("refused_limit") >= 600 - 256);
    assert_eq!(vm.main().result(Call::new(ONTIME_OP_CLOSE, 1)), Ok(0));
    vm.channels[1].drain();
    alive(&mut vm);
}

#[test]
fn a_guest_that_boots_anew_has_no_sockets_and_its_memory_is_left_alone() {
    let mut vm = Vm::start(EVERYTHING);
    for channel in 0..2 {
        vm.main().socket(channel, AF_INET, SOCK_DGRAM, channel);
    }
    let addresses = [bind(&mut vm, 0), bind(&mut vm, 1)];
    for channel in 0..2u32 {
        vm.channels[channel as usize].post(Call::new(ONTIME_OP_RECV, channel).wait().room(100));
        vm.channels[channel as usize].result(Call::new(ONTIME_OP_POLL, channel)).unwrap();
    }
    for channel in (0..2).rev() {
        vm.channels[channel].reset();
    }
    let client = UdpSocket::bind(local(0)).unwrap();
    for address in addresses {
        let _ = client.send_to(&[0xaa; 100], address);
    }
    alive(&mut vm);
    let start = std::time::Instant::now();
    while !vm.sockets().is_empty() {
        assert!(start.elapsed() < super::driver::PATIENCE, "{:?}", vm.sockets());
    }
    vm.main().socket(0, AF_INET, SOCK_DGRAM, 1);
}

#[test]
fn a_paused_vm_goes_on_where_it_was() {
    let mut vm = Vm::start(EVERYTHING);
    vm.main().socket(1, AF_INET, SOCK_DGRAM, 1);
    let address = bind(&mut vm, 1);
    let waiting = vm.channels[1].post(Call::new(ONTIME_OP_RECV, 1).wait().room(100));
    vm.channels[1].result(Call::new(ONTIME_OP_POLL, 1)).unwrap();
    let stood = vm.channels[1].stop();
    UdpSocket::bind(local(0)).unwrap().send_to(b"meanwhile", address).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert!(vm.channels[1].poll(waiting).is_none(), "a stopped ring is left alone");
    vm.channels[1].start_at(&stood);
    assert_eq!(vm.channels[1].wait(waiting).result(), Ok(9));
}

/// Results that main's queue causes for a channel's calls are answered when the channel's ring runs again, and never to
/// another driver.
#[test]
fn a_stopped_ring_is_not_answered_into() {
    let mut vm = Vm::start(EVERYTHING);
    for anew in [false, true] {
        vm.main().socket(1, AF_INET, SOCK_DGRAM, 1);
        let driver = &mut vm.channels[1];
        let waiting = driver.post(Call::new(ONTIME_OP_RECV, 1).wait().room(100));
        driver.settle();
        let before = driver.calls.used_index();
        let stood = driver.stop();
        assert_eq!(vm.main().result(Call::new(ONTIME_OP_CLOSE, 1)), Ok(0));
        let driver = &mut vm.channels[1];
        assert_eq!(driver.calls.used_index(), before, "it stands");
        if anew {
            driver.reset();
            driver.settle();
            assert_eq!(driver.calls.used_index(), 1, "an answer to a call of the driver before");
        } else {
            driver.start_at(&stood);
            assert_eq!(driver.wait(waiting).result(), Err(libc::ECANCELED));
        }
    }
    alive(&mut vm);
}

#[test]
fn the_vcpu_word_decides_who_is_woken() {
    let mut vm = Vm::start(EVERYTHING);
    vm.main().socket(1, AF_INET, SOCK_DGRAM, 1);
    let address = bind(&mut vm, 1);
    let word = FREE + 0x1000;
    let run = |prio: u32| ONTIME_VCPU_RUN | prio << ONTIME_VCPU_PRIO_SHIFT;
    assert_eq!(vm.main().name_vcpu(1, word + 8), -libc::EINVAL);
    assert_eq!(vm.main().name_vcpu(1, MEMORY), -libc::EFAULT);
    assert_eq!(vm.main().name_vcpu(0, word), -libc::EINVAL);
    assert_eq!(vm.main().name_vcpu(2, word), -libc::EINVAL);
    assert_eq!(vm.main().name_vcpu(1, word), 0);
    let client = UdpSocket::bind(local(0)).unwrap();
    let mut answered = |state: u32, prio: u16, due: (bool, bool)| {
        vm.channels[1].write(word, &ONTIME_VCPU_LOOKING.to_le_bytes());
        let waiting = vm.channels[1].post(Call::new(ONTIME_OP_RECV, 1).wait().prio(prio).room(10));
        vm.channels[1].result(Call::new(ONTIME_OP_POLL, 1).prio(prio)).unwrap();
        let control = vm.channels[0].control.as_ref().unwrap();
        let _ = (vm.channels[1].calls.call.read(), control.call.read());
        vm.channels[1].write(word, &state.to_le_bytes());
        client.send_to(b"x", address).unwrap();
        vm.channels[1].wait(waiting);
        // The notification follows the answer: wait for expected ones, and give unexpected ones some time to arrive.
        let control = vm.channels[0].control.as_ref().unwrap();
        let (mut signs, start) = ((false, false), std::time::Instant::now());
        while signs != due || signs == (false, false) {
            signs.0 |= vm.channels[1].calls.call.read().is_ok();
            signs.1 |= control.call.read().is_ok();
            let patience = if due == (false, false) { Duration::from_millis(3) } else { super::driver::PATIENCE };
            if start.elapsed() > patience {
                break;
            }
        }
        assert_eq!(signs, due);
        u32::from_le_bytes(vm.channels[1].read(word))
    };
    assert_eq!(answered(ONTIME_VCPU_HALTING, 0, (true, false)), ONTIME_VCPU_WOKEN, "woken");
    assert_eq!(answered(ONTIME_VCPU_LOOKING, 99, (false, false)), ONTIME_VCPU_LOOKING, "it looks by itself");
    assert_eq!(answered(run(50), 50, (false, false)), run(50), "first in, first out");
    assert_eq!(answered(run(50), 51, (false, true)), run(50), "more urgent");
    assert_eq!(answered(run(0), 0, (false, true)), run(0), "normal threads");
    assert_eq!(vm.counter("wakes"), 1);
    assert_eq!(u32::from_le_bytes(vm.channels[1].read(word + 4)), 1, "attention is set");
    assert_eq!(vm.main().name_vcpu(1, 0), 0, "taken back");
}

/// When a guest reboots, a channel may be set up before main. The old vCPU word's memory may then hold anything.
#[test]
fn an_old_drivers_vcpu_word_is_left_alone() {
    let mut vm = Vm::start(EVERYTHING);
    let word = FREE + 0x1000;
    assert_eq!(vm.main().name_vcpu(1, word), 0);
    vm.channels[1].settle();
    vm.channels[1].reset();
    vm.channels[1].settle();
    vm.channels[1].write(word, &[ONTIME_VCPU_RUN.to_le_bytes(), [0; 4]].concat());
    vm.channels[1].event_buffers(4);
    assert_eq!(u32::from(vm.channels[1].event().unwrap().type_), ONTIME_EVENT_START);
    vm.channels[1].settle();
    assert_eq!(vm.channels[1].read(word + 4), [0; 4], "written to");
}

/// A driver that has made no call on a channel, or a multiple of 2^16 calls, leaves the ring at index 0. The next
/// driver starts at 0, often at the same address because it is the same program. A paused VM continues in the same way,
/// but without a probe of the device before.
#[test]
fn a_ring_that_is_set_up_anew_at_0_is_noticed() {
    let mut vm = Vm::start(EVERYTHING);
    // The number of START events tells how often the device has noticed.
    vm.channels[1].event_buffers(4);
    assert_eq!(u32::from(vm.channels[1].event().unwrap().type_), ONTIME_EVENT_START);
    vm.main().socket(1, AF_INET, SOCK_DGRAM, 0);
    let word = FREE + 0x1000;
    assert_eq!(vm.main().name_vcpu(1, word), 0);
    // Makes main's ring index 0 again. The calls are posted manually, 128 at a time, for speed.
    let main = vm.main();
    while main.calls.available != 0 {
        main.settle_many(main.calls.available.wrapping_neg().min(128));
    }
    for (probes, sockets) in [(false, 1), (true, 0)] {
        for channel in [1, 0] {
            let driver = &mut vm.channels[channel];
            let stood = driver.stop();
            assert_eq!(stood[0], 0, "channel {channel}");
            if probes {
                driver.probe();
            }
            driver.start_at(&stood);
            driver.calls.notify();
        }
        let start = std::time::Instant::now();
        while vm.sockets().len() != sockets {
            assert!(start.elapsed() < super::driver::PATIENCE, "probed {probes}: {:?}", vm.sockets());
        }
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(vm.sockets().len(), sockets, "probed {probes}");
    }
    alive(&mut vm);
}

/// The queues of one driver are not ordered with each other: what the driver set through one queue must not be dropped
/// because another queue is new, too.
#[test]
fn a_new_drivers_vcpu_word_is_kept() {
    let mut vm = Vm::start(EVERYTHING);
    let word = FREE + 0x1000;
    assert_eq!(vm.main().name_vcpu(1, word), 0);
    vm.main().settle();
    vm.channels[1].reset();
    let main = vm.main();
    main.renew();
    main.start_ring(2, 0);
    assert_eq!(main.name_vcpu(1, word), 0);
    main.start_ring(0, 0);
    main.start_ring(1, 0);
    main.settle();
    let channel = &mut vm.channels[1];
    channel.write(word, &[ONTIME_VCPU_RUN.to_le_bytes(), [0; 4]].concat());
    channel.settle();
    let start = std::time::Instant::now();
    while channel.read(word + 4) == [0; 4] {
        assert!(start.elapsed() < super::driver::PATIENCE, "the word is forgotten");
    }
}

/// Each device has its own connection: a word may be named before the channel's rings are set up.
#[test]
fn a_word_named_ahead_of_its_channel_is_kept() {
    let mut vm = Vm::start(EVERYTHING);
    let word = FREE + 0x1000;
    vm.channels[1].settle();
    vm.channels[1].renew();
    assert_eq!(vm.main().name_vcpu(1, word), 0);
    // The channel's thread sees the word after its bell was rung.
    std::thread::sleep(Duration::from_millis(100));
    let channel = &mut vm.channels[1];
    channel.start();
    channel.write(word, &[ONTIME_VCPU_RUN.to_le_bytes(), [0; 4]].concat());
    let start = std::time::Instant::now();
    while channel.read(word + 4) == [0; 4] {
        channel.settle();
        assert!(start.elapsed() < super::driver::PATIENCE, "the word is forgotten");
    }
}

#[test]
fn a_wake_up_that_shows_no_effect_is_sent_again() {
    let mut vm = Vm::start(EVERYTHING);
    vm.main().socket(1, AF_INET, SOCK_DGRAM, 1);
    let address = bind(&mut vm, 1);
    let word = FREE + 0x1000;
    assert_eq!(vm.main().name_vcpu(1, word), 0);
    let waiting = vm.channels[1].post(Call::new(ONTIME_OP_RECV, 1).wait().room(10));
    vm.channels[1].result(Call::new(ONTIME_OP_POLL, 1)).unwrap();
    vm.channels[1].write(word, &ONTIME_VCPU_HALTING.to_le_bytes());
    UdpSocket::bind(local(0)).unwrap().send_to(b"x", address).unwrap();
    vm.channels[1].wait(waiting);
    let start = std::time::Instant::now();
    while vm.counter("rewakes") < 2 {
        assert!(start.elapsed() < super::driver::PATIENCE, "the guest has not gone on, and is not woken again");
    }
    vm.channels[1].write(word, &ONTIME_VCPU_LOOKING.to_le_bytes());
    // A wake-up may be in progress.
    let stands = (0..10).any(|_| {
        let before = vm.counter("rewakes");
        std::thread::sleep(Duration::from_millis(100));
        vm.counter("rewakes") == before
    });
    assert!(stands, "the guest has gone on, and is woken again");
}

#[test]
fn when_qemu_goes_the_process_goes_too() {
    let mut vm = Vm::start(EVERYTHING);
    vm.channels.clear();
    let start = std::time::Instant::now();
    while vm.process.try_wait().unwrap().is_none() {
        assert!(start.elapsed() < super::driver::PATIENCE, "it stays");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(vm.process.wait().unwrap().success());
}

#[test]
fn another_process_has_another_generation() {
    let generation = |vm: &Vm| vm.channels[0].config.generation;
    assert_ne!(generation(&Vm::start("")), generation(&Vm::start("")));
}

/// The kernel copies as many sources of a filter as the value says, whatever the value's length: more than the process
/// has room for must not be asked of it.
#[test]
fn a_source_filter_is_no_longer_than_its_room() {
    const MCAST_MSFILTER: i32 = 48;
    const SOURCES: u8 = 64;
    let mut vm = Vm::start("reach = [\"ff02::/16\"]\nchannels = 1");
    let main = vm.main();
    main.socket(1, libc::AF_INET6, SOCK_DGRAM, 0);
    // A sockaddr_storage with the last byte of the address in a network of two bytes.
    let address = |network: [u8; 2], last: u8| {
        let mut storage = [0; 128];
        storage[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
        storage[8..10].copy_from_slice(&network);
        storage[23] = last;
        storage
    };
    let group = address([0xff, 0x02], 9);
    let loopback = [1, 0, 0, 0, 0, 0, 0, 0];
    for last in 1..=SOURCES {
        // struct group_source_req
        let join = [&loopback[..], &group, &address([0xfd, 0], last)].concat();
        let call = Call::new(ONTIME_OP_SETOPT, 1).arg([libc::IPPROTO_IPV6, libc::MCAST_JOIN_SOURCE_GROUP]);
        assert_eq!(main.result(call.data(&join)), Ok(0), "source {last}");
    }
    for (room, length) in [(144, 144), (144 + 2 * 128 + 127, 144 + 2 * 128), (4_000, 144 + 30 * 128)] {
        // struct group_filter: interface, group, mode, number of sources.
        let filter = [&loopback[..], &group, &[0; 4], &[SOURCES, 0, 0, 0]].concat();
        let call = Call::new(ONTIME_OP_GETOPT, 1).arg([libc::IPPROTO_IPV6, MCAST_MSFILTER]);
        let done = main.call(call.data(&filter).room(room));
        assert_eq!(done.result(), Ok(length));
        assert_eq!(done.data.len(), length as usize);
        assert_eq!(done.data[140], SOURCES, "the number of all");
    }
    alive(&mut vm);
}
