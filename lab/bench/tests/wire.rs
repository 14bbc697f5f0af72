//! The monitor's analysis of synthetic captures: what it counts, and which errors it tolerates.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test fails by panic")]

mod common;

use common::{CLIENT, Capture, Format, MS, SERVER, T0, Tcp, US};
use ontime_bench::bulk::{self, BulkBasis, BulkFlows};
use ontime_bench::pcap::{Decoder, PcapError};
use ontime_bench::wire::{self, Monitor, RtFlow, WireAnalysis, WireCounts};
use proptest::prelude::*;

fn analyse(capture: &Capture) -> WireAnalysis {
    wire::analyse(capture.file().path(), RtFlow::new(11_111)).unwrap()
}

/// Every request is in exactly one class.
fn sum(counts: &WireCounts) -> u64 {
    counts.counted + counts.lost + counts.open_at_end + counts.duplicates + counts.warmup
}

#[test]
fn requests_meet_their_replies_in_every_format() {
    let formats = [
        Format::default(),
        Format { nanoseconds: true, ..Format::default() },
        Format { big_endian: true, ..Format::default() },
        Format { nanoseconds: true, big_endian: true, snaplen: Some(64), ..Format::default() },
        Format { virtio_header: 10, ..Format::default() },
        Format { virtio_header: 12, snaplen: Some(80), ..Format::default() },
        Format { vlan: Some(7), ..Format::default() },
    ];
    for format in formats {
        let mut capture = Capture::new(format);
        for n in 0..100 {
            capture.request(T0 + n * 5 * MS, n);
            capture.reply(T0 + n * 5 * MS + (30 + n) * US, n);
        }
        let analysis = analyse(&capture);
        assert_eq!(analysis.counts.counted, 100);
        assert_eq!(analysis.latencies_ns(), (30..130).map(|us| us * US).collect::<Vec<_>>());
        assert_eq!(analysis.exchanges[3].at_ns, T0 + 15 * MS);
        assert_eq!(analysis.resolution_ns, if format.nanoseconds { 1 } else { 1_000 });
        assert_eq!(analysis.span_ns, Some((T0, T0 + 495 * MS)));
        assert_eq!(analysis.intervals_ns.len(), 99);
        assert_eq!(analysis.intervals_ns[0], 5 * MS - 30 * US);
    }
}

#[test]
fn ipv6_and_vlan_are_passed_through() {
    let mut capture = Capture::new(Format { vlan: Some(100), ..Format::default() });
    let (client, server) = ("[fd00::1]:4000", "[fd00::2]:11111");
    capture.udp(T0, client, server, &common::message(9));
    capture.udp(T0 + 40 * US, server, client, &common::message(9));
    assert_eq!(analyse(&capture).latencies_ns(), [40 * US]);
}

#[test]
fn losses_duplicates_and_strays_are_counted_not_dropped() {
    let mut capture = Capture::new(Format::default());
    capture.reply(T0, 77); // to no request
    capture.request(T0 + MS, 1);
    capture.request(T0 + 2 * MS, 1); // retransmitted: the first one counts
    capture.reply(T0 + 3 * MS, 1);
    capture.reply(T0 + 3 * MS, 1); // again
    capture.request(T0 + 10 * MS, 2); // lost
    capture.request(T0 + 20 * MS, 3);
    capture.udp(T0 + 20 * MS, "10.1.0.3:40000", SERVER, &common::message(3)); // another client
    capture.udp(T0 + 21 * MS, SERVER, "10.1.0.3:40000", &common::message(3));
    capture.reply(T0 + 22 * MS, 3);
    capture.udp(T0 + 23 * MS, CLIENT, SERVER, b"short");
    capture.udp(T0 + 24 * MS, CLIENT, "10.1.0.2:22222", &common::message(4)); // another port
    capture.request(T0 + 200 * MS, 5); // open at the end
    capture.udp(T0 + 210 * MS, CLIENT, "10.1.0.2:22222", &common::message(4));
    let analysis = analyse(&capture);
    let expected = WireCounts {
        requests: 6,
        counted: 3,
        lost: 1,
        open_at_end: 1,
        duplicates: 1,
        duplicate_replies: 1,
        stray_replies: 1,
        malformed: 1,
        ..WireCounts::default()
    };
    assert_eq!(analysis.counts, expected);
    assert_eq!(analysis.latencies_ns(), [2 * MS, 2 * MS, MS]);
    assert!(analysis.intervals_ns.is_empty(), "the gap after a lost request has no beginning");
}

#[test]
fn a_late_reply_is_a_latency_and_an_out_of_order_capture_is_sorted() {
    let mut capture = Capture::new(Format::default());
    capture.reply(T0 + 5_000 * MS, 1);
    capture.request(T0 + 2 * MS, 2);
    capture.reply(T0 + 3 * MS, 2);
    capture.request(T0 + MS, 1);
    let analysis = analyse(&capture);
    assert_eq!(analysis.latencies_ns(), [4_999 * MS, MS]);
    assert_eq!(sum(&analysis.counts), analysis.counts.requests);
}

#[test]
fn window_and_warmup_leave_out_and_say_so() {
    let mut capture = Capture::new(Format::default());
    for n in 0..20 {
        capture.request(T0 + n * MS, n);
        capture.reply(T0 + n * MS + 50 * US, n);
    }
    let flow = RtFlow { window: Some((T0 + 5 * MS, T0 + 14 * MS)), warmup: 3, ..RtFlow::new(11_111) };
    let analysis = wire::analyse(capture.file().path(), flow).unwrap();
    assert_eq!((analysis.counts.counted, analysis.counts.warmup), (7, 13));
    assert_eq!(analysis.span_ns, Some((T0 + 8 * MS, T0 + 14 * MS)));
}

#[test]
fn a_capture_cut_at_any_byte_gives_what_is_whole() {
    let mut capture = Capture::new(Format::default());
    for n in 0..5 {
        capture.request(T0 + n * MS, n);
        capture.reply(T0 + n * MS + 50 * US, n);
    }
    let whole = capture.bytes.clone();
    let frame = (whole.len() - 24) / 10;
    for cut in 0..whole.len() {
        capture.bytes = whole[..cut].to_vec();
        let analysis = analyse(&capture);
        let packets = cut.saturating_sub(24) / frame;
        assert_eq!(analysis.counts.counted, packets as u64 / 2, "cut at {cut}");
        let left = if cut < 24 { cut } else { (cut - 24) % frame };
        assert_eq!(analysis.counts.truncated_bytes, left as u64, "cut at {cut}");
    }
}

#[test]
fn what_is_no_capture_is_refused_and_damage_is_told() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), b"\x0a\x0d\x0d\x0a pcapng, in fact, and long enough").unwrap();
    assert!(matches!(wire::analyse(file.path(), RtFlow::new(1)), Err(PcapError::NotPcap { .. })));
    let missing = wire::analyse(std::path::Path::new("/nonexistent/rt.pcap"), RtFlow::new(1)).unwrap_err();
    assert!(missing.to_string().contains("/nonexistent/rt.pcap"), "{missing}");

    let mut capture = Capture::new(Format::default());
    capture.request(T0, 1);
    capture.reply(T0 + MS, 1);
    capture.bytes.extend([0xff; 64]);
    let analysis = analyse(&capture);
    assert_eq!(analysis.counts.counted, 1);
    assert!(analysis.damage.unwrap().contains("damaged at byte"));

    let mut capture = Capture::new(Format::default());
    capture.bytes[20] = 113; // LINUX_SLL, as `tcpdump -i any` writes
    let refused = wire::analyse(capture.file().path(), RtFlow::new(1)).unwrap_err();
    assert!(refused.to_string().contains("link type 113"), "{refused}");
}

const SENDER: &str = "10.2.0.1:50000";
const RECEIVER: &str = "10.2.0.11:5201";

#[test]
fn goodput_is_what_was_acknowledged() {
    for (format, first) in [
        (Format { snaplen: Some(96), ..Format::default() }, 1_000_u32),
        (Format { snaplen: Some(96), vlan: Some(3), ..Format::default() }, u32::MAX - 5_000), // wraps
    ] {
        let mut capture = Capture::new(format);
        let data = |n: u32| Tcp {
            sequence: first.wrapping_add(1 + n * 1_000),
            acknowledged: Some(1),
            len: 1_000,
            ..Tcp::default()
        };
        let ack = |n: u32| Tcp { sequence: 1, acknowledged: Some(first.wrapping_add(1 + n * 1_000)), ..Tcp::default() };
        capture.tcp(T0, SENDER, RECEIVER, Tcp { sequence: first, syn: true, ..Tcp::default() });
        capture.tcp(T0, RECEIVER, SENDER, Tcp { sequence: 0, syn: true, ..ack(0) });
        for n in 0..10 {
            capture.tcp(T0 + u64::from(n) * MS, SENDER, RECEIVER, data(n));
        }
        capture.tcp(T0 + 10 * MS, SENDER, RECEIVER, data(4)); // retransmitted
        capture.tcp(T0 + 11 * MS, RECEIVER, SENDER, ack(8)); // two of ten never arrived
        capture.tcp(T0 + 20 * MS, RECEIVER, SENDER, ack(8));
        let flows = BulkFlows { ports: vec![5_201], window: None };
        let analysis = bulk::analyse(capture.file().path(), flows).unwrap();
        assert_eq!(analysis.receivers.len(), 1);
        assert_eq!((analysis.receivers[0].bytes, analysis.receivers[0].basis), (8_000, BulkBasis::Acknowledged));
        assert_eq!(analysis.resent_bytes, 1_000);
        let gbps = analysis.gbps().unwrap();
        assert!((gbps - 8_000.0 * 8.0 / (20.0 * MS as f64)).abs() < 1e-12, "{gbps}");
    }
}

#[test]
fn goodput_counts_the_window_only_and_no_syn_or_fin() {
    let mut capture = Capture::new(Format::default());
    let ack = |value| Tcp { acknowledged: Some(value), ..Tcp::default() };
    for (ms, value) in [(0, 100), (10, 5_100), (20, 9_100), (30, 99_100)] {
        capture.tcp(T0 + ms * MS, RECEIVER, SENDER, ack(value));
        capture.tcp(T0 + ms * MS, "10.2.0.12:5201", "10.2.0.1:50001", ack(value));
    }
    let window = Some((T0 + 10 * MS, T0 + 20 * MS));
    let analysis = bulk::analyse(capture.file().path(), BulkFlows { ports: vec![5_201], window }).unwrap();
    assert_eq!(analysis.receivers.iter().map(|receiver| receiver.bytes).collect::<Vec<_>>(), [4_000, 4_000]);

    let mut capture = Capture::new(Format::default());
    capture.tcp(T0, SENDER, RECEIVER, Tcp { sequence: 7, syn: true, ..Tcp::default() });
    capture.tcp(T0, RECEIVER, SENDER, Tcp { syn: true, acknowledged: Some(8), ..Tcp::default() });
    capture.tcp(T0 + MS, SENDER, RECEIVER, Tcp { sequence: 8, len: 10, fin: true, ..Tcp::default() });
    capture.tcp(T0 + MS, RECEIVER, SENDER, ack(19));
    let analysis = bulk::analyse(capture.file().path(), BulkFlows { ports: vec![], window: None }).unwrap();
    assert_eq!(analysis.receivers.iter().map(|receiver| receiver.bytes).sum::<u64>(), 10);
}

#[test]
fn goodput_of_a_one_way_capture_says_that_it_is_what_was_sent() {
    let mut capture = Capture::new(Format::default());
    for n in 0..3 {
        let segment = Tcp { sequence: n * 1_448, len: 1_448, ..Tcp::default() };
        capture.tcp(T0 + u64::from(n) * MS, SENDER, RECEIVER, segment);
    }
    let analysis = bulk::analyse(capture.file().path(), BulkFlows { ports: vec![5_201], window: None }).unwrap();
    assert_eq!((analysis.receivers[0].bytes, analysis.receivers[0].basis), (3 * 1_448, BulkBasis::Sent));
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..600), step in 1_usize..100) {
        let mut decoder = Decoder::default();
        let mut monitor = Monitor::new(RtFlow::new(11_111));
        for part in bytes.chunks(step) {
            decoder.push(part);
            while let Ok(Some(record)) = decoder.next_record() {
                monitor.record(&record);
            }
        }
        let _ = monitor.finish();
    }

    #[test]
    fn no_damaged_frame_makes_it_panic_or_lose_count(
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..40),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut capture = Capture::new(Format::default());
        for n in 0..4 {
            capture.request(T0 + n * MS, n);
            capture.reply(T0 + n * MS + 50 * US, n);
            capture.tcp(T0 + n * MS, SENDER, RECEIVER, Tcp { sequence: n as u32, len: 20, ..Tcp::default() });
        }
        for (place, byte) in damage {
            let place = 24 + place.index(capture.bytes.len() - 24);
            capture.bytes[place] = byte;
        }
        capture.bytes.truncate(24 + cut.index(capture.bytes.len() - 24));
        let analysis = analyse(&capture);
        prop_assert_eq!(sum(&analysis.counts), analysis.counts.requests);
        prop_assert_eq!(analysis.exchanges.len() as u64, analysis.counts.counted);
        let _ = bulk::analyse(capture.file().path(), BulkFlows { ports: vec![], window: None }).unwrap();
    }

    #[test]
    fn any_order_of_requests_and_replies_keeps_the_books(
        events in prop::collection::vec((0_u64..50, any::<bool>(), 0_u64..8), 0..60),
        warmup in 0_u64..4,
    ) {
        let mut capture = Capture::new(Format::default());
        for (ms, is_request, sequence) in &events {
            if *is_request { capture.request(T0 + ms * MS, *sequence) } else { capture.reply(T0 + ms * MS, *sequence) }
        }
        let flow = RtFlow { warmup, ..RtFlow::new(11_111) };
        let analysis = wire::analyse(capture.file().path(), flow).unwrap();
        let requests = events.iter().filter(|(_, is_request, _)| *is_request).count() as u64;
        prop_assert_eq!(analysis.counts.requests, requests);
        prop_assert_eq!(sum(&analysis.counts), requests);
        let replies = events.len() as u64 - requests;
        let matched = replies - analysis.counts.stray_replies - analysis.counts.duplicate_replies;
        prop_assert!(analysis.counts.counted <= matched);
    }
}
