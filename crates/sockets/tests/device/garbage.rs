//! Random descriptors, descriptor tables and calls on all queues, also changed while the device reads them. The process
//! must continue, return every buffer that it was given, and leak no descriptor.

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use libc::{AF_INET, AF_INET6, SOCK_DGRAM, SOCK_STREAM};
use ontime_sockets::abi::*;
use ontime_sockets::deadlines::{BandwidthAnswer, BandwidthRequest};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, TestRunner};
use vhost::VhostBackend;
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestMemoryMmap};

use super::driver::{Call, FREE, MEMORY, PATIENCE, Ring, Vm};
use super::hostile::alive;
use super::nobodys;

/// Slots of random descriptors; valid calls use the slots below.
const PLACES: std::ops::Range<u16> = 128..256;
/// Addresses of calls, of descriptor tables and of other data.
const HEADERS: u64 = FREE;
const HEADER: u64 = 0x400;
const TABLES: u64 = FREE + 0x1_0000;
const TABLE: u64 = 0x800;
const DATA: u64 = FREE + 0x10_0000;
/// Number of headers and of tables. The last headers are calls about the VM.
const COUNT: u64 = 16;
const ABOUT_VM: std::ops::Range<u64> = 12..COUNT;
/// Number of different call ids, which CANCEL uses.
const IDS: u64 = 8;
/// Number of cases until all waiting calls are cancelled, and until the guest reboots.
const ROUND: u64 = 64;
const LIFE: u64 = 20 * ROUND;
/// Allowed growth of the process's memory, bytes: the calls' buffers are touched gradually.
const GROWTH: u64 = 16 << 20;

#[derive(Debug, Clone, Copy)]
struct Descriptor {
    address: u64,
    len: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    fn write(self, ring: &Ring, at: u64) {
        ring.write_descriptor(at, self.address, self.len, self.flags, self.next);
    }
}

#[derive(Debug, Clone)]
struct Header {
    words: ontime_call,
    payload: Vec<u8>,
}

impl Header {
    fn write(&self, memory: &GuestMemoryMmap, at: u64) {
        memory.write_slice(&[self.words.as_slice(), &self.payload].concat(), GuestAddress(at)).unwrap();
    }
}

/// Data to write and chains to offer.
#[derive(Debug, Clone)]
struct Case {
    queue: usize,
    heads: Vec<u16>,
    chain: Vec<(u16, Descriptor)>,
    tables: Vec<(u64, Vec<Descriptor>)>,
    headers: Vec<(u64, Header)>,
    /// Heads of valid chains and the addresses of their answers.
    answers: Vec<(u16, u64)>,
}

fn address() -> impl Strategy<Value = u64> {
    prop_oneof![
        6 => (0..COUNT).prop_map(|at| HEADERS + at * HEADER),
        4 => (0..COUNT).prop_map(|at| TABLES + at * TABLE),
        4 => (0u64..1 << 20).prop_map(|at| DATA + at),
        1 => (0u64..8192).prop_map(|before| MEMORY - before),
        1 => (0u64..8192).prop_map(|before| u64::MAX - before),
        1 => any::<u64>().prop_filter("no ring", |address| *address >= FREE),
    ]
}

fn length() -> impl Strategy<Value = u32> {
    let headers = [CALL_LEN as u32, DONE_LEN as u32, CALL_LEN as u32 + 8, EVENT_LEN as u32];
    prop_oneof![
        4 => 0u32..400,
        4 => select(headers.to_vec()),
        3 => (0u32..130).prop_map(|descriptors| descriptors * 16),
        1 => 0u32..2 << 20,
        1 => any::<u32>(),
    ]
}

/// NEXT 1, WRITE 2, INDIRECT 4; the other bits have no meaning.
fn flags() -> impl Strategy<Value = u16> {
    prop_oneof![8 => 0u16..4, 3 => 4u16..8, 1 => any::<u16>()]
}

/// Within a table, loops are as short as possible.
fn descriptor() -> impl Strategy<Value = Descriptor> {
    let next = prop_oneof![3 => PLACES, 3 => 0u16..6, 1 => any::<u16>()];
    (address(), length(), flags(), next).prop_map(|(address, len, flags, next)| Descriptor {
        address,
        len,
        flags,
        next,
    })
}

fn table() -> impl Strategy<Value = (u64, Vec<Descriptor>)> {
    let at = (0..COUNT).prop_map(|at| TABLES + at * TABLE);
    (at, proptest::collection::vec(descriptor(), 1..8))
}

/// A combination that random data rarely produce: a call's two parts, in a table or not.
fn ordered() -> impl Strategy<Value = (u16, bool, [Descriptor; 2])> {
    let given = prop_oneof![3 => select(vec![0u32, 8, 24, 48]), 1 => 0u32..300];
    let room = select(vec![0u32, 1, 100, 2_000, 100_000]);
    let from = (0..COUNT).prop_map(|at| HEADERS + at * HEADER);
    (PLACES.start..PLACES.end - 1, any::<bool>(), from, given, 0u64..1 << 20, room).prop_map(
        |(place, indirect, from, given, to, room)| {
            let next = if indirect { 1 } else { place + 1 };
            let read = Descriptor { address: from, len: CALL_LEN as u32 + given, flags: 1, next };
            let write = Descriptor { address: DATA + to, len: DONE_LEN as u32 + room, flags: 2, next: 0 };
            (place, indirect, [read, write])
        },
    )
}

/// A socket's id, an id with another generation at the same index, any number, or none.
fn sock() -> impl Strategy<Value = u32> {
    let generation = (0u32..6, 0u32..1 << 12).prop_map(|(index, of)| index | of << ONTIME_SOCK_INDEX_BITS);
    prop_oneof![12 => 0u32..6, 2 => generation, 1 => any::<u32>(), 3 => Just(ONTIME_SOCK_NONE)]
}

/// The same call without most of what would only be refused.
fn sane(mut words: ontime_call) -> ontime_call {
    let op = u32::from(words.op);
    if op >= ONTIME_CTL_VCPU {
        // Calls about the VM have few arguments beside their data.
        let arg = [u32::from(op == ONTIME_CTL_VCPU), 0, 0, 0];
        return ontime_call { op: words.op, sock: ONTIME_SOCK_NONE, id: words.id, arg, ..ontime_call::default() };
    }
    let [first, second, ..] = words.arg;
    words.arg = match op {
        ONTIME_OP_SOCKET => [[AF_INET, AF_INET6][first as usize % 2] as u32, 1 + second % 2, 0, first % 2],
        ONTIME_OP_SETOPT | ONTIME_OP_GETOPT => {
            [[0, 1, 6, 17, 41][first as usize % 5], [second % 70, second][second as usize % 2], 0, 0]
        }
        ONTIME_OP_SHUTDOWN => [first % 3, 0, 0, 0],
        ONTIME_OP_CLOSE | ONTIME_OP_NAME | ONTIME_OP_CHANNEL => [first % 2, 0, 0, 0],
        ONTIME_OP_QUERY => [first % 4, 0, 0, 0],
        ONTIME_OP_CANCEL => [first % IDS as u32, 0, 0, 0],
        ONTIME_OP_BIND | ONTIME_OP_CONNECT | ONTIME_OP_POLL => [0; 4],
        ONTIME_OP_ACCEPT => [first % 6, 0, 0, 0],
        _ => [first, 0, 0, 0],
    };
    words.reserved = 0;
    words.flags %= 8;
    words.prio %= 100;
    words.control_len = 0;
    words.control_room %= ONTIME_CONTROL_MAX as u16;
    words
}

fn words(place: SocketAddr, about_vm: bool) -> impl Strategy<Value = ontime_call> {
    let control = [
        ONTIME_CTL_VCPU,
        ONTIME_CTL_PING,
        ONTIME_CTL_INC_BW,
        ONTIME_CTL_DEC_BW,
        ONTIME_CTL_INC_DEC_BW,
        ONTIME_CTL_NEXT,
    ];
    let usual = if about_vm { control.map(|op| op as u16).to_vec() } else { (0..18).collect() };
    let op = prop_oneof![30 => select(usual), 1 => any::<u16>()];
    let flags = prop_oneof![8 => 0u16..8, 1 => any::<u16>()];
    let said = [libc::MSG_WAITALL, libc::MSG_TRUNC, libc::MSG_ERRQUEUE, SOCK_STREAM, AF_INET6];
    let arg = prop_oneof![
        8 => Just(0u32),
        3 => 0u32..12,
        1 => select(said.map(|arg| arg as u32).to_vec()),
        1 => any::<u32>(),
    ];
    let len = || prop_oneof![6 => Just(0u16), 1 => 0u16..64, 1 => any::<u16>()];
    let address_len = prop_oneof![2 => Just(0u16), 3 => Just(16u16), 2 => Just(28u16), 1 => 0u16..30];
    let port = prop_oneof![Just(place.port()), Just(0u16), any::<u16>()];
    let name = (0u8..4, port, any::<[u8; 28]>(), address_len);
    let ip = place.ip();
    (op, flags, sock(), 0..IDS, proptest::array::uniform4(arg), 0u16..104, name, (len(), len()), 0u8..32).prop_map(
        move |(
            op,
            flags,
            sock,
            id,
            arg,
            prio,
            (family, port, mut addr, addr_len),
            (control_len, control_room),
            reserved,
        )| {
            let address: Option<SocketAddr> = match family {
                0 => Some((ip, port).into()),
                1 => Some((std::net::Ipv6Addr::LOCALHOST, port).into()),
                // Not allowed by the policy.
                2 => Some(([192, 0, 2, 1], port).into()),
                _ => None,
            };
            addr = address.map_or(addr, |address| ontime_sockets::name::write(&address).0);
            let reserved = u32::from(reserved == 0);
            let words =
                ontime_call { op, flags, sock, id, arg, prio, addr_len, control_len, control_room, addr, reserved };
            if id < 2 { words } else { sane(words) }
        },
    )
}

/// A header and its address.
fn header(place: SocketAddr) -> impl Strategy<Value = (u64, Header)> {
    let at = |range: std::ops::Range<u64>| range.prop_map(|at| HEADERS + at * HEADER);
    prop_oneof![
        4 => (at(0..ABOUT_VM.start), contents(place, false)),
        1 => (at(ABOUT_VM), contents(place, true)),
    ]
}

fn contents(place: SocketAddr, about_vm: bool) -> impl Strategy<Value = Header> {
    let period = select(vec![0u64, 1_000_000, u64::from(ONTIME_BW_PERIOD_MIN), u64::from(ONTIME_BW_PERIOD_MAX)]);
    let entry = (0u32..70, 0u32..8, select(vec![0u64, 1, 100_000, u64::MAX]), period).prop_map(
        |(vcpu, reserved, budget, period)| {
            let reserved = u32::from(reserved == 0);
            ontime_bw { vcpu, reserved, budget, period }.as_slice().to_vec()
        },
    );
    // The address of a vCPU word, or at which deadlines are published.
    let place_of = prop_oneof![
        (0u64..64).prop_map(|at| DATA + at * 64),
        (0u64..64).prop_map(|at| DATA + at * 4096),
        Just(0u64),
        address(),
    ];
    let payload = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..300),
        proptest::collection::vec(entry, 0..4).prop_map(|entries| entries.concat()),
        place_of.prop_map(|address| address.to_le_bytes().to_vec()),
    ];
    (words(place, about_vm), payload).prop_map(|(words, payload)| Header { words, payload })
}

fn case(place: SocketAddr) -> impl Strategy<Value = Case> {
    let wild = proptest::collection::vec((PLACES, descriptor()), 0..6);
    let headers = proptest::collection::vec(header(place), 1..3);
    let queue =
        prop_oneof![4 => Just(0usize), 1 => Just(1usize), 2 => Just(2usize), 4 => Just(3usize), 1 => Just(4usize)];
    let tables = proptest::collection::vec(table(), 0..2);
    let good = proptest::collection::vec(ordered(), 0..3);
    (queue, wild, tables, headers, good).prop_map(|(queue, mut chain, mut tables, headers, good)| {
        let heads = chain.iter().step_by(3).map(|(place, _)| *place);
        let heads = heads.chain(good.iter().map(|(place, ..)| *place)).collect();
        let answers = good.iter().map(|(place, _, parts)| (*place, parts[1].address)).collect();
        for (place, indirect, mut parts) in good {
            if (queue == 2) != (parts[0].address >= HEADERS + ABOUT_VM.start * HEADER) {
                let from = if queue == 2 { ABOUT_VM } else { 0..ABOUT_VM.start };
                parts[0].address = HEADERS + (from.start + u64::from(place) % (from.end - from.start)) * HEADER;
            }
            if indirect {
                let at = TABLES + u64::from(place) % COUNT * TABLE;
                tables.push((at, parts.to_vec()));
                chain.push((place, Descriptor { address: at, len: 32, flags: 4, next: 0 }));
            } else {
                chain.extend((place..).zip(parts));
            }
        }
        Case { queue, heads, chain, tables, headers, answers }
    })
}

/// Sockets for random calls, which often close sockets but rarely open any. Some are a listener's connections.
struct Sockets {
    turns: u32,
    place: SocketAddr,
    peers: VecDeque<TcpStream>,
}

impl Sockets {
    fn new() -> Self {
        let place = nobodys(3);
        Self { turns: 0, place, peers: VecDeque::new() }
    }

    fn turn(&mut self, vm: &mut Vm) {
        let (turn, sock) = (self.turns % 16, self.turns / 16 % 4);
        self.turns = self.turns.wrapping_add(1);
        match turn {
            0 => {
                let kind = if sock < 2 { SOCK_DGRAM } else { SOCK_STREAM };
                vm.main().post(Call::new(ONTIME_OP_SOCKET, sock).arg([AF_INET, kind, 0, (sock % 2) as i32]));
            }
            4 if sock == 3 => {
                vm.main().post(Call::new(ONTIME_OP_BIND, sock).to(self.place));
                vm.main().post(Call::new(ONTIME_OP_LISTEN, sock).arg([9]));
            }
            8 => {
                let peer = TcpStream::connect_timeout(&self.place, Duration::from_millis(10)).ok();
                self.peers.extend(peer.inspect(|peer| peer.set_nonblocking(true).unwrap()));
                self.peers.drain(..self.peers.len().saturating_sub(8));
                let new = 4 + self.turns / 64 % 2;
                vm.channels[1].post(Call::new(ONTIME_OP_ACCEPT, 3).arg([new as i32]));
            }
            // Data to receive. A connection may be closed.
            12 => self.peers.iter_mut().for_each(|peer| drop(peer.write(&[0xaa; 500]))),
            _ => {}
        }
    }
}

/// Rewrites offered descriptors and their data as long as this value lives.
struct Changes {
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Changes {
    fn start(vm: &Vm, place: SocketAddr, runner: &mut TestRunner) -> Self {
        let mut some = |count| (0..count).map(|_| descriptor().new_tree(runner).unwrap().current()).collect();
        let descriptors: Vec<Descriptor> = some(4099);
        let headers: Vec<(u64, Header)> = (0..509).map(|_| header(place).new_tree(runner).unwrap().current()).collect();
        let memory = vm.memory.clone();
        let tables: Vec<u64> = rings(vm).iter().map(|ring| ring.descriptors()).collect();
        let ended = Arc::new(AtomicBool::new(false));
        let told = ended.clone();
        let change = move || {
            // The numbers of entries have no common divisor, so all combinations occur.
            let mut turn = 0;
            while !told.load(Ordering::Relaxed) {
                let descriptor = descriptors[turn % descriptors.len()];
                let at = match turn % 3 {
                    0 => TABLES + turn as u64 % COUNT * TABLE + turn as u64 / 16 % 8 * 16,
                    _ => tables[turn % tables.len()] + 16 * (PLACES.start as usize + turn % PLACES.len()) as u64,
                };
                super::driver::write_descriptor(
                    &memory,
                    at,
                    descriptor.address,
                    descriptor.len,
                    descriptor.flags,
                    descriptor.next,
                );
                if turn % 5 == 0 {
                    let (at, header) = &headers[turn % headers.len()];
                    header.write(&memory, *at);
                }
                turn += 1;
                // Pauses, so that some calls are read as they were written.
                if turn % 16 == 0 {
                    std::thread::sleep(Duration::from_micros(100));
                }
            }
        };
        Self { ended, thread: Some(std::thread::spawn(change)) }
    }
}

impl Drop for Changes {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        self.thread.take().map(JoinHandle::join);
    }
}

/// Prints the last cases if a test fails.
#[derive(Default)]
struct Last(VecDeque<Case>);

impl Drop for Last {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.iter().for_each(|case| eprintln!("{case:?}"));
        }
    }
}

/// A daemon that admits most requests until the process ends.
fn admit(vm: &Vm) {
    let stream = UnixStream::connect(ontime_sockets::Paths::new(&vm.run, "test").deadlines()).unwrap();
    let mut answers = stream.try_clone().unwrap();
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines() {
            let Some(asked) = line.ok().and_then(|line| serde_json::from_str::<BandwidthRequest>(&line).ok()) else {
                return;
            };
            let refused = (asked.seq % 4 == 0).then(|| "no room".to_owned());
            let mut answer = serde_json::to_vec(&BandwidthAnswer { seq: asked.seq, refused }).unwrap();
            answer.push(b'\n');
            if answers.write_all(&answer).is_err() {
                return;
            }
        }
    });
}

/// The rings for calls, events and control of main, and for calls and events of the channel.
fn rings(vm: &Vm) -> [&Ring; 5] {
    let [main, channel] = [&vm.channels[0], &vm.channels[1]];
    [&main.calls, &main.events, main.control.as_ref().unwrap(), &channel.calls, &channel.events]
}

fn ring(vm: &mut Vm, queue: usize) -> &mut Ring {
    let driver = &mut vm.channels[queue / 3];
    match queue {
        0 | 3 => &mut driver.calls,
        1 | 4 => &mut driver.events,
        _ => driver.control.as_mut().unwrap(),
    }
}

/// Results of calls that were read as they were written: success or an errno, with counts.
type Results = BTreeMap<Result<(), i32>, u64>;

/// Takes the answers and counts their results.
fn take(vm: &mut Vm, case: &Case, results: &mut Results) {
    let memory = vm.memory.clone();
    for (channel, driver) in vm.channels.iter_mut().enumerate() {
        while let Some((head, len)) = driver.take() {
            let answer = case.answers.iter().find(|(place, _)| *place == head);
            let Some((_, at)) = answer.filter(|_| case.queue == 3 * channel && len > 0) else { continue };
            let done: ontime_done = memory.read_obj(GuestAddress(*at)).unwrap();
            let result = done.result as i32;
            *results.entry(if result < 0 { Err(-result) } else { Ok(()) }).or_default() += 1;
        }
    }
}

fn offer(vm: &mut Vm, case: &Case) {
    let memory = vm.memory.clone();
    let ring = ring(vm, case.queue);
    case.headers.iter().for_each(|(at, header)| header.write(&memory, *at));
    for (at, table) in &case.tables {
        (0..).zip(table).for_each(|(index, descriptor)| descriptor.write(ring, at + 16 * index));
    }
    for (place, descriptor) in &case.chain {
        descriptor.write(ring, ring.descriptors() + 16 * u64::from(*place));
    }
    if case.queue % 3 != 0 {
        while ring.take().is_some() {}
    }
    // Chains that wait for the daemon or for an event to report do not exceed the ring's size.
    if ring.outstanding() < 64 {
        case.heads.iter().for_each(|head| ring.offer(*head));
    }
    ring.notify();
}

/// After all waiting calls are cancelled, every call is answered; valid calls work, too.
fn comes_back(vm: &mut Vm) {
    let start = Instant::now();
    while vm.channels.iter().any(|driver| driver.calls.outstanding() > 0) {
        assert!(start.elapsed() < PATIENCE, "calls do not come back");
        for driver in &mut vm.channels {
            for id in 0..IDS {
                driver.post(Call::new(ONTIME_OP_CANCEL, ONTIME_SOCK_NONE).arg([id as i32]));
            }
            driver.settle();
        }
    }
    let control = ring(vm, 2);
    while control.outstanding() > 0 {
        assert!(start.elapsed() < PATIENCE, "calls on the control queue do not come back");
        while control.take().is_some() {}
    }
    alive(vm);
    assert_eq!(vm.main().control_call(ONTIME_CTL_PING, 0, &[]), 0);
}

/// Reboots the guest: none of its state may be left. Returns the process's number of descriptors.
fn boots_anew(vm: &mut Vm, expected: Option<usize>) -> usize {
    for channel in [1, 0] {
        vm.channels[channel].reset();
    }
    for driver in &mut vm.channels {
        driver.event_buffers(4);
        assert_eq!(driver.event().map(|event| u32::from(event.type_)), Some(ONTIME_EVENT_START));
        driver.settle();
        // A process that answers this message has received all descriptors that were sent before.
        driver.frontend.get_features().unwrap();
    }
    assert_eq!(vm.main().control_call(ONTIME_CTL_PING, 0, &[]), 0);
    let start = Instant::now();
    loop {
        let (sockets, descriptors) = (vm.sockets().len(), vm.descriptors());
        if sockets == 0 && expected.is_none_or(|expected| expected == descriptors) {
            return descriptors;
        }
        assert!(start.elapsed() < PATIENCE, "{sockets} sockets, {descriptors} descriptors, not {expected:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn no_garbage_ends_the_process() {
    let cases = std::env::var("ONTIME_HOSTILE_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(4 * LIFE);
    let mut vm = Vm::start(&format!("{}\nsockets = 64\ndeadlines = true", super::FREE));
    admit(&vm);
    let mut runner = TestRunner::new(Config { failure_persistence: None, ..Config::default() });
    let mut sockets = Sockets::new();
    let garbage = case(sockets.place);
    boots_anew(&mut vm, None);
    std::thread::sleep(Duration::from_millis(200));
    let descriptors = boots_anew(&mut vm, None);
    let changes = Changes::start(&vm, sockets.place, &mut runner);
    let (mut last, mut results, mut memory) = (Last::default(), Results::new(), None);
    for number in 1..=cases {
        sockets.turn(&mut vm);
        let case = garbage.new_tree(&mut runner).unwrap().current();
        last.0.push_back(case.clone());
        last.0.drain(..last.0.len().saturating_sub(ROUND as usize));
        offer(&mut vm, &case);
        std::thread::yield_now();
        take(&mut vm, &case, &mut results);
        if number % ROUND == 0 {
            assert_eq!(vm.process.try_wait().unwrap(), None, "the process is gone");
            comes_back(&mut vm);
        }
        if number % LIFE == 0 {
            boots_anew(&mut vm, Some(descriptors));
            memory.get_or_insert(vm.own_memory());
        }
    }
    drop(changes);
    comes_back(&mut vm);
    boots_anew(&mut vm, Some(descriptors));
    let grown = vm.own_memory().saturating_sub(memory.unwrap_or(u64::MAX));
    println!("figures: {cases} cases, {grown} bytes of memory grown, {:?}, {results:?}", vm.status().counters);
    assert!(grown < GROWTH, "{grown} bytes of memory more than after {LIFE} cases");
}
