//! GET response times from synthetic captures, and the real client with the real memcached, captured by the real
//! tcpdump.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test fails by panic")]

mod common;

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use common::process::{Background, start, tcpdump};
use common::{Capture, Format, MS, T0, Tcp, US};
use ontime_bench::client::{self, ClientConfig, ClientError};
use ontime_bench::memcached::client::Client;
use ontime_bench::memcached::wire::{Analysis, analyse};
use ontime_bench::memcached::{ACCESS, RTVIRT, Traffic};
use proptest::prelude::*;

const PORT: u16 = 11_211;
const SERVER: &str = "10.1.0.2:11211";
/// The format of the lab's capture of the RT NIC.
const CUT: Format = Format { nanoseconds: true, big_endian: false, snaplen: Some(96), virtio_header: 0, vlan: None };

fn read(capture: &Capture) -> Analysis {
    analyse(capture.file().path(), PORT, ACCESS, 0).unwrap()
}

fn get() -> Vec<u8> {
    [b"get ".as_slice(), &[b'k'; 64], b"\r\n"].concat()
}

fn set() -> Vec<u8> {
    [b"set ".as_slice(), &[b'k'; 64], b" 0 0 1024\r\n", &[b'v'; 1_026]].concat()
}

/// A connection that writes its packets into a capture.
struct Connection {
    client: String,
    to_server: u32,
    to_client: u32,
}

impl Connection {
    fn new(port: u16, start: u32) -> Self {
        Self { client: format!("10.1.0.1:{port}"), to_server: start, to_client: start.wrapping_mul(7) }
    }

    fn opens(&mut self, capture: &mut Capture, at_ns: u64) {
        let syn = Tcp { sequence: self.to_server, syn: true, ..Tcp::default() };
        capture.tcp(at_ns, &self.client, SERVER, syn);
        self.to_server = self.to_server.wrapping_add(1);
        let acknowledged = Some(self.to_server);
        capture.tcp(
            at_ns,
            SERVER,
            &self.client,
            Tcp { sequence: self.to_client, acknowledged, syn: true, ..Tcp::default() },
        );
        self.to_client = self.to_client.wrapping_add(1);
    }

    fn asks(&mut self, capture: &mut Capture, at_ns: u64, request: &[u8]) {
        let segment = Tcp { sequence: self.to_server, acknowledged: Some(self.to_client), ..Tcp::default() };
        capture.tcp_with(at_ns, &self.client, SERVER, segment, request);
        self.to_server = self.to_server.wrapping_add(request.len() as u32);
    }

    fn is_answered(&mut self, capture: &mut Capture, at_ns: u64, bytes: usize) {
        let segment = Tcp { sequence: self.to_client, acknowledged: Some(self.to_server), ..Tcp::default() };
        capture.tcp_with(at_ns, SERVER, &self.client, segment, &vec![b'a'; bytes]);
        self.to_client = self.to_client.wrapping_add(bytes as u32);
        self.acknowledges(capture, at_ns);
    }

    fn acknowledges(&self, capture: &mut Capture, at_ns: u64) {
        let segment = Tcp { sequence: self.to_server, acknowledged: Some(self.to_client), ..Tcp::default() };
        capture.tcp(at_ns, &self.client, SERVER, segment);
    }
}

#[test]
fn gets_meet_their_answers_on_one_connection_also_where_counters_wrap() {
    for start in [0, u32::MAX - 3_000] {
        for opened in [true, false] {
            let (mut capture, mut tcp) = (Capture::new(CUT), Connection::new(40_000, start));
            if opened {
                tcp.opens(&mut capture, T0);
            }
            for n in 0..100_u64 {
                let at_ns = T0 + n * 5 * MS;
                let (request, answer) = if n % 10 == 3 { (set(), 8) } else { (get(), ACCESS.answer_bytes()) };
                tcp.asks(&mut capture, at_ns, &request);
                tcp.is_answered(&mut capture, at_ns + (30 + n) * US, answer);
            }
            let Analysis { gets, sets } = read(&capture);
            assert_eq!((gets.counts.requests, gets.counts.counted, sets), (90, 90, 10));
            let expected: Vec<u64> = (0..100).filter(|n| n % 10 != 3).map(|n| (30 + n) * US).collect();
            assert_eq!(gets.latencies_ns(), expected);
            assert_eq!((gets.intervals_ns.len(), gets.intervals_ns[0]), (99, 5 * MS - 30 * US));
        }
    }
}

#[test]
fn an_answer_counts_when_its_last_byte_passed_and_a_get_when_its_last_did() {
    let (mut capture, mut tcp) = (Capture::new(CUT), Connection::new(40_000, 9));
    tcp.opens(&mut capture, T0);
    let request = get();
    tcp.asks(&mut capture, T0 + MS, &request[..10]);
    tcp.asks(&mut capture, T0 + 2 * MS, &request[10..]);
    tcp.is_answered(&mut capture, T0 + 3 * MS, 1_000);
    tcp.is_answered(&mut capture, T0 + 4 * MS, ACCESS.answer_bytes() - 1_000);
    assert_eq!(read(&capture).gets.latencies_ns(), [2 * MS]);
}

#[test]
fn retransmissions_losses_misses_and_strays_are_counted_not_dropped() {
    let (mut capture, mut tcp) = (Capture::new(CUT), Connection::new(40_000, 9));
    tcp.opens(&mut capture, T0);
    // Requested again before the answer, and answered twice: the first of each counts.
    tcp.asks(&mut capture, T0 + MS, &get());
    tcp.to_server -= get().len() as u32;
    tcp.asks(&mut capture, T0 + 2 * MS, &get());
    tcp.is_answered(&mut capture, T0 + 3 * MS, ACCESS.answer_bytes());
    tcp.to_client -= ACCESS.answer_bytes() as u32;
    tcp.is_answered(&mut capture, T0 + 4 * MS, ACCESS.answer_bytes());
    // A miss has no response time.
    tcp.asks(&mut capture, T0 + 10 * MS, &get());
    tcp.is_answered(&mut capture, T0 + 11 * MS, 5);
    // Data that is no answer: the last request has been answered, no request is outstanding, or the data does not
    // acknowledge the outstanding one.
    tcp.asks(&mut capture, T0 + 20 * MS, &get());
    tcp.to_server -= 1;
    tcp.is_answered(&mut capture, T0 + 21 * MS, 3);
    tcp.to_server += 1;
    // The request is given up, and a new connection with the same port replaces the connection.
    let mut next = Connection::new(40_000, 70_000);
    next.opens(&mut capture, T0 + 30 * MS);
    next.asks(&mut capture, T0 + 40 * MS, &get());
    next.is_answered(&mut capture, T0 + 41 * MS, ACCESS.answer_bytes());
    // The last request is outstanding when the capture ends.
    next.asks(&mut capture, T0 + 200 * MS, &get());
    let Analysis { gets, .. } = read(&capture);
    assert_eq!(gets.latencies_ns(), [2 * MS, MS]);
    let counts = gets.counts;
    assert_eq!((counts.requests, counts.counted, counts.duplicates, counts.duplicate_replies), (5, 2, 1, 1));
    assert_eq!((counts.lost, counts.open_at_end, counts.malformed, counts.stray_replies), (1, 1, 1, 1));
}

#[test]
fn warm_up_and_other_ports_do_not_count() {
    let (mut capture, mut tcp) = (Capture::new(CUT), Connection::new(40_000, 9));
    for n in 0..10 {
        tcp.asks(&mut capture, T0 + n * 10 * MS, &get());
        tcp.is_answered(&mut capture, T0 + n * 10 * MS + MS, ACCESS.answer_bytes());
        let other = Tcp { sequence: 5, acknowledged: Some(5), ..Tcp::default() };
        capture.tcp_with(T0 + n * 10 * MS, "10.1.0.1:40000", "10.1.0.2:5201", other, &get());
    }
    let gets = analyse(capture.file().path(), PORT, ACCESS, 4).unwrap().gets;
    assert_eq!((gets.counts.warmup, gets.counts.counted), (4, 6));
}

proptest! {
    /// Several connections with one outstanding request each, and answers in any order and in parts.
    #[test]
    fn gets_meet_their_answers_on_several_connections(
        plan in prop::collection::vec((0_usize..5, any::<bool>(), 1_u64..900, 1_usize..ACCESS.answer_bytes()), 1..80),
        starts in prop::collection::vec(any::<u32>(), 5),
    ) {
        let mut connections: Vec<Connection> =
            starts.iter().enumerate().map(|(n, &start)| Connection::new(40_000 + n as u16, start)).collect();
        // Events in order of time. A connection gets another request only after its answer.
        let mut free = [T0; 5];
        let mut happens: Vec<(u64, usize, Option<usize>, bool)> = Vec::new();
        let mut expected = Vec::new();
        for (n, &(which, is_get, takes_us, piece)) in plan.iter().enumerate() {
            // No two events at the same time.
            let asked = (free[which].max(T0 + n as u64 * 100 * US) / 8 + 1) * 8 + which as u64;
            let answered = asked + takes_us * US;
            happens.push((asked, which, None, is_get));
            if is_get {
                happens.push((asked + takes_us * US / 2, which, Some(piece), true));
                happens.push((answered, which, Some(ACCESS.answer_bytes() - piece), true));
                expected.push((asked, takes_us * US));
            } else {
                happens.push((answered, which, Some(8), false));
            }
            free[which] = answered + 1;
        }
        happens.sort_by_key(|&(at_ns, which, piece, _)| (at_ns, which, piece.is_some()));
        expected.sort_unstable();
        let mut capture = Capture::new(CUT);
        for (at_ns, which, piece, is_get) in happens {
            match piece {
                None => connections[which].asks(&mut capture, at_ns, &if is_get { get() } else { set() }),
                Some(bytes) => connections[which].is_answered(&mut capture, at_ns, bytes),
            }
        }
        let Analysis { gets, sets } = read(&capture);
        let found: Vec<(u64, u64)> =
            gets.exchanges.iter().map(|exchange| (exchange.at_ns, exchange.latency_ns)).collect();
        prop_assert_eq!(found, expected);
        prop_assert_eq!(sets, plan.iter().filter(|(_, is_get, ..)| !is_get).count() as u64);
        prop_assert_eq!(gets.counts.malformed + gets.counts.stray_replies + gets.counts.lost, 0);
    }

    /// Whatever a capture contains, every request is counted once.
    #[test]
    fn garbage_is_booked(
        frames in prop::collection::vec(
            (any::<bool>(), 0_u16..3, any::<u32>(), any::<Option<u32>>(), any::<bool>(), 0_usize..90),
            0..60,
        ),
    ) {
        let mut capture = Capture::new(CUT);
        for (n, (to_server, port, sequence, acknowledged, syn, length)) in frames.into_iter().enumerate() {
            let client = format!("10.1.0.1:{}", 40_000 + port);
            let (from, to) = if to_server { (client.as_str(), SERVER) } else { (SERVER, client.as_str()) };
            let segment = Tcp { sequence, acknowledged, syn, ..Tcp::default() };
            capture.tcp_with(T0 + n as u64 * MS, from, to, segment, get().get(..length).unwrap_or(&get()));
        }
        let counts = read(&capture).gets.counts;
        let sum =
            counts.counted + counts.lost + counts.open_at_end + counts.duplicates + counts.warmup;
        prop_assert_eq!(counts.requests, sum);
    }
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}

fn memcached(port: u16) -> Option<(Background, SocketAddr)> {
    let arguments = ["-u", "root", "-l", "127.0.0.1", "-p", &port.to_string(), "-t", "1"];
    Some((start("memcached", &arguments)?, SocketAddr::from((Ipv4Addr::LOCALHOST, port))))
}

/// Connects repeatedly until the server listens.
fn open(server: SocketAddr, traffic: Traffic, connections: u8) -> Client {
    let begun = Instant::now();
    loop {
        match Client::open(server, traffic, connections, 1) {
            Ok(client) => return client,
            Err(error) => assert!(begun.elapsed() < Duration::from_secs(60), "{error}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn the_real_server_answers_and_the_wire_agrees() {
    for (traffic, connections) in [(ACCESS, 1), (ACCESS, 5), (RTVIRT, 1)] {
        let port = free_port();
        let Some((_server, address)) = memcached(port) else { return };
        let mut client = open(address, traffic, connections);
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("rt.pcap");
        let Some(_tcpdump) = tcpdump(&format!("tcp port {port}"), 96, &file) else { return };
        let (requests, sets) = (traffic.requests(90), traffic.requests(90) - 90);
        let config = ClientConfig {
            min_gap_us: 0,
            max_gap_us: 2_000,
            normal_gaps: traffic.normal_gaps,
            ..ClientConfig::new(address, requests, 3)
        };
        let report = client::run_with(&config, &mut client, |_| ControlFlow::Continue(())).unwrap();
        assert_eq!((report.sent, report.answered, report.lost, report.refused), (requests, requests, 0, 0));
        // tcpdump writes the packets a little later.
        let begun = Instant::now();
        let found = loop {
            let found = analyse(&file, port, traffic, 0).unwrap();
            if (found.gets.counts.counted, found.sets) == (90, sets) || begun.elapsed() > Duration::from_secs(30) {
                break found;
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        assert_eq!((found.gets.counts.counted, found.sets), (90, sets), "{:?}", found.gets.counts);
        assert_eq!(found.gets.counts.requests - found.gets.counts.duplicates, 90, "{:?}", found.gets.counts);
        assert_eq!((found.gets.counts.malformed, found.gets.counts.stray_replies), (0, 0));
    }
}

#[test]
fn what_one_client_stored_is_answered_to_another() {
    let port = free_port();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    // The server begins to listen after the first attempt.
    let (mut attempts, mut server) = (0, None);
    let stored = Client::open_when_up(address, ACCESS, 1, 0, || {
        attempts += 1;
        if attempts == 2 {
            server = Some(memcached(port).ok_or_else(|| ClientError::Told("no memcached".to_owned()))?);
        }
        Ok::<(), ClientError>(())
    });
    match stored {
        Err(ClientError::Told(_)) => return,
        stored => drop(stored.unwrap()),
    }
    assert!(attempts >= 2);
    // The first client has closed its connection; this one stores nothing.
    let mut client = Client::connect(address, ACCESS, 3, 7).unwrap();
    let config = ClientConfig { min_gap_us: 0, max_gap_us: 100, ..ClientConfig::new(address, 40, 7) };
    let report = client::run_with(&config, &mut client, |_| ControlFlow::Continue(())).unwrap();
    assert_eq!((report.sent, report.answered, report.lost, report.refused), (40, 40, 0, 0));
    drop(server);
}

#[test]
fn a_server_of_another_kind_is_named_not_measured() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        use std::io::{Read, Write};
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 2_000]);
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n").unwrap();
    });
    let error = Client::open(address, ACCESS, 1, 1).unwrap_err();
    server.join().unwrap();
    assert!(matches!(&error, ClientError::Answer { said, .. } if said.starts_with("HTTP/1.1 400")), "{error}");
}
