//! The real client with the real sockperf server, captured by the real tcpdump, on loopback.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panic"
)]

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use common::process::{Background, start, tcpdump, wait_for_header};
use ontime_bench::client::{self, ClientConfig, ClientError, Peer, ReplyOutcome};
use ontime_bench::wire::{self, RtFlow};
use ontime_figures::stats::Summary;

mod common;

/// A peer whose answers have arrived, while this process does not get a CPU between two checks.
struct Starved(bool);

impl Peer for Starved {
    fn ask(&mut self, _: u64) -> Result<bool, ClientError> {
        self.0 = false;
        Ok(true)
    }

    fn wait_reply(&mut self, _: u64, _: Duration) -> Result<ReplyOutcome, ClientError> {
        if std::mem::replace(&mut self.0, true) {
            return Ok(ReplyOutcome::Answer);
        }
        std::thread::sleep(Duration::from_millis(5));
        Ok(ReplyOutcome::Nothing)
    }
}

#[test]
fn an_answer_that_came_while_the_client_waited_for_a_cpu_is_not_lost() {
    let config = ClientConfig { timeout_us: 1_000, ..ClientConfig::new("127.0.0.1:9".parse().unwrap(), 3, 1) };
    let report = client::run_with(&config, &mut Starved(false), |_| ControlFlow::Continue(())).unwrap();
    assert_eq!((report.answered, report.lost), (3, 0));
}

/// A free UDP port below the ephemeral range, so that no client's own port can take it before the server does.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let start = u16::try_from(std::process::id() % 10_000).unwrap();
    let candidates = (0..1_000).map(|_| 20_000 + (start + NEXT.fetch_add(1, Ordering::Relaxed)) % 10_000);
    let is_free = |port: &u16| UdpSocket::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
    candidates.into_iter().find(is_free).expect("a free port of 1,000")
}

fn sockperf(port: u16) -> Option<Background> {
    let server = start("sockperf", &["server", "-i", "127.0.0.1", "-p", &port.to_string()])?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    client::run(&ClientConfig::probe(address, 100), |_| ControlFlow::Continue(())).expect("sockperf answers in 10 s");
    Some(server)
}

/// A capture's analysis, once the capture has this many exchanges: its writer may be late.
fn captured(file: &Path, port: u16, exchanges: u64) -> wire::WireAnalysis {
    let begun = Instant::now();
    loop {
        let analysis = wire::analyse(file, RtFlow::new(port)).unwrap();
        if analysis.counts.counted >= exchanges || begun.elapsed() > Duration::from_secs(30) {
            return analysis;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn config(port: u16, requests: u64) -> ClientConfig {
    ClientConfig::new(SocketAddr::from((Ipv4Addr::LOCALHOST, port)), requests, 42)
}

#[test]
fn the_client_and_a_stock_sockperf_server_as_tcpdump_sees_them() {
    let port = free_port();
    let Some(_server) = sockperf(port) else { return };
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("lo.pcap");
    // With whole frames tcpdump's ring has room for eight, and would lose the ninth while tcpdump waits for a CPU.
    let Some(_dump) = tcpdump(&format!("udp port {port}"), 256, &file) else { return };

    let report = client::run(&config(port, 200), |_| ControlFlow::Continue(())).unwrap();
    assert_eq!((report.answered, report.lost, report.sent), (200, 0, 200));

    let analysis = captured(&file, port, 200);
    assert_eq!(analysis.counts.counted, 200, "{:?}", analysis.counts);
    assert_eq!((analysis.counts.lost, analysis.counts.stray_replies, analysis.counts.duplicates), (0, 0, 0));
    let sequences: Vec<u64> = analysis.exchanges.iter().map(|exchange| exchange.sequence).collect();
    assert_eq!(sequences, (1..=200).collect::<Vec<_>>());
    let latency = Summary::of(&analysis.latencies_ns()).unwrap();
    assert!(latency.p50 > 0, "{latency:?}");
    // Gaps are 1 to 10 ms and never shorter. A busy machine may lengthen them.
    let gaps = Summary::of(&analysis.intervals_ns).unwrap();
    assert!(gaps.min >= 990_000, "{gaps:?}");
    assert!(gaps.p50 >= 4_500_000, "{gaps:?}");
}

#[test]
fn a_dead_server_is_an_error_with_a_remedy_not_a_hang() {
    let mut order = config(free_port(), 10);
    order.timeout_us = 5_000;
    order.give_up_after = 5;
    let error = client::run(&order, |_| ControlFlow::Continue(())).unwrap_err();
    assert!(matches!(error, ClientError::NoReply { requests: 5, .. }), "{error}");
    assert!(error.to_string().contains("sockperf server"), "{error}");
}

#[test]
fn a_server_that_drops_and_delays_is_booked() {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = socket.local_addr().unwrap().port();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let server = std::thread::spawn(move || {
        let mut buffer = [0; 64];
        let mut held = None;
        for n in 0..10 {
            let Ok((length, peer)) = socket.recv_from(&mut buffer) else { return };
            buffer[9] &= !1; // the server's half of the protocol: clear the client flag
            let reply = buffer[..length].to_vec();
            match n {
                3 => held = Some(reply), // answered after the next request
                5 => {}                  // never answered
                _ => {
                    if let Some(late) = held.take() {
                        socket.send_to(&late, peer).unwrap();
                    }
                    socket.send_to(&reply, peer).unwrap();
                }
            }
        }
    });
    let mut order = config(port, 8);
    order.timeout_us = 2_000_000;
    let report = client::run(&order, |_| ControlFlow::Continue(())).unwrap();
    server.join().unwrap();
    assert_eq!((report.sent, report.answered, report.lost, report.late), (10, 8, 2, 1), "{report:?}");
}

#[test]
fn the_caller_is_told_how_far_it_is_and_can_end_it() {
    let port = free_port();
    let Some(_server) = sockperf(port) else { return };
    let mut told = String::new();
    let report = client::run(&config(port, 1_000_000), |progress| {
        told = progress.to_string();
        ControlFlow::Break(())
    });
    let report = report.unwrap();
    assert!(report.stopped && report.answered > 0);
    assert!(told.contains(" of 1,000,000 replies, 0 lost, "), "{told}");
}

/// Two UDP ports for QEMU's socket back end, whose datagrams are frames.
#[test]
fn a_capture_by_qemu_itself_has_every_request() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("rt.pcap");
    let (ours, theirs) = (UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap(), free_port());
    let back_end = format!("socket,id=n0,udp={},localaddr=127.0.0.1:{theirs}", ours.local_addr().unwrap());
    let dump = format!("filter-dump,id=f0,netdev=n0,maxlen=96,file={}", file.display());
    let arguments = ["-machine", "none", "-display", "none", "-nodefaults", "-netdev", &back_end];
    // A hub accepts frames only while another port can receive them.
    let other = format!("socket,id=n1,udp={},localaddr=127.0.0.1:{}", ours.local_addr().unwrap(), free_port());
    let hub =
        ["-netdev", "hubport,id=h0,hubid=0,netdev=n0", "-netdev", &other, "-netdev", "hubport,id=h1,hubid=0,netdev=n1"];
    let rest = [&hub[..], &["-object", &dump]].concat();
    let Some(_qemu) = start("qemu-system-x86_64", &[&arguments[..], &rest[..]].concat()) else { return };
    wait_for_header(&file);
    for n in 0..20 {
        let mut crafted = common::Capture::new(common::Format::default());
        crafted.request(0, n);
        let request = crafted.bytes.split_off(24 + 16);
        let mut crafted = common::Capture::new(common::Format::default());
        crafted.reply(0, n);
        let reply = crafted.bytes.split_off(24 + 16);
        let written = || std::fs::metadata(&file).unwrap().len();
        let (before, begun) = (written(), Instant::now());
        ours.send_to(&request, (Ipv4Addr::LOCALHOST, theirs)).unwrap();
        // QEMU may wait for a CPU: the reply is to come 5 ms or more after the request has its stamp.
        while written() == before {
            assert!(begun.elapsed() < Duration::from_secs(30), "request {n} is not in the capture");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(5));
        ours.send_to(&reply, (Ipv4Addr::LOCALHOST, theirs)).unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
    let analysis = captured(&file, 11_111, 20);
    assert_eq!((analysis.counts.requests, analysis.counts.counted), (20, 20), "{:?}", analysis.counts);
    let latency = Summary::of(&analysis.latencies_ns()).unwrap();
    assert!(latency.p50 >= 4_000_000, "{latency:?}");
}
