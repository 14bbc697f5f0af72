//! Forward delays of a SIP proxy, from synthetic captures.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test fails by panic")]

mod common;

use common::{Capture, Format, MS, T0, US};
use ontime_bench::voip::wire::{Analysis, analyse};
use proptest::prelude::*;

const PORT: u16 = 5_060;
const PROXY: &str = "10.1.0.2:5060";
const CALLER: &str = "10.1.0.1:5080";
const CALLED: &str = "10.1.0.1:5070";
const WHOLE: Format =
    Format { nanoseconds: true, big_endian: false, snaplen: Some(2_048), virtio_header: 0, vlan: None };
/// The six messages of a call: the start line, CSeq, and whether the caller sends it.
const SIX: [(&str, &str, bool); 6] = [
    ("INVITE sip:service@10.1.0.1:5070 SIP/2.0", "1 INVITE", true),
    ("SIP/2.0 180 Ringing", "1 INVITE", false),
    ("SIP/2.0 200 OK", "1 INVITE", false),
    ("ACK sip:service@10.1.0.1:5070 SIP/2.0", "1 ACK", true),
    ("BYE sip:service@10.1.0.1:5070 SIP/2.0", "2 BYE", true),
    ("SIP/2.0 200 OK", "2 BYE", false),
];

fn read(capture: &Capture) -> Analysis {
    analyse(capture.file().path(), PORT, 0).unwrap()
}

fn message(start: &str, call: u64, sequence: &str, vias: usize) -> Vec<u8> {
    let via = "Via: SIP/2.0/UDP 10.1.0.1:5080;branch=z9hG4bK-7-1-0\r\n".repeat(vias);
    format!(
        "{start}\r\n{via}From: sipp <sip:sipp@10.1.0.1:5080>;tag=1\r\nCall-ID: {call}-7@10.1.0.1\r\nCSeq: \
        {sequence}\r\n\r\nv=0\r\nCall-ID: body\r\n"
    )
    .into_bytes()
}

/// A message arrives, and leaves with one more Via (a request) or one less (an answer).
fn forwarded(capture: &mut Capture, (in_ns, out_ns): (u64, u64), call: u64, which: usize) {
    comes(capture, in_ns, call, which);
    goes(capture, out_ns, call, which);
}

fn comes(capture: &mut Capture, at_ns: u64, call: u64, which: usize) {
    let (start, sequence, by_caller) = SIX[which];
    let (from, vias) = if by_caller { (CALLER, 1) } else { (CALLED, 2) };
    capture.udp(at_ns, from, PROXY, &message(start, call, sequence, vias));
}

fn goes(capture: &mut Capture, at_ns: u64, call: u64, which: usize) {
    let (start, sequence, by_caller) = SIX[which];
    let (to, vias) = if by_caller { (CALLED, 2) } else { (CALLER, 1) };
    capture.udp(at_ns, PROXY, to, &message(start, call, sequence, vias));
}

#[test]
fn the_six_messages_of_a_call_are_six_delays() {
    let mut capture = Capture::new(WHOLE);
    for call in 0..20 {
        let at_ns = T0 + call * 20 * MS;
        for which in 0..6_u64 {
            let comes = at_ns + which * 2 * MS;
            forwarded(&mut capture, (comes, comes + (100 + which) * US), call, which as usize);
            if which == 0 {
                // The proxy's own message.
                capture.udp(comes + 50 * US, PROXY, CALLER, &message("SIP/2.0 100 trying", call, "1 INVITE", 1));
            }
        }
    }
    let analysis = read(&capture);
    assert_eq!([analysis.came_per_s, analysis.ended_per_s], [Some(50.0); 2]);
    assert!(analysis.kept_up(Some(52.0)).ends_with("20 calls; calls a second: 52.0 offered, 50.0 came, 50.0 ended"));
    assert!(analysis.kept_up(Some(53.0)).ends_with("the callers did not keep up with what was offered"));
    let Analysis { forwards, invites_ns, calls, .. } = analysis;
    assert_eq!((forwards.counts.requests, forwards.counts.counted, calls), (120, 120, 20));
    assert_eq!((forwards.counts.stray_replies, forwards.counts.malformed), (0, 0));
    assert_eq!(forwards.latencies_ns()[..6], [100, 101, 102, 103, 104, 105].map(|us| us * US));
    assert_eq!(invites_ns, [100 * US; 20]);
    assert_eq!(forwards.intervals_ns, [20 * MS; 19]);
}

#[test]
fn what_is_sent_again_lost_or_not_of_a_call_is_told() {
    let mut capture = Capture::new(WHOLE);
    comes(&mut capture, T0, 1, 0);
    comes(&mut capture, T0 + MS, 1, 0); // the caller's timer
    goes(&mut capture, T0 + 2 * MS, 1, 0);
    goes(&mut capture, T0 + 3 * MS, 1, 0); // the proxy's timer
    comes(&mut capture, T0 + 4 * MS, 2, 0); // never forwarded
    capture.udp(T0 + 5 * MS, CALLER, PROXY, &message("OPTIONS sip:10.1.0.2 SIP/2.0", 3, "1 OPTIONS", 1));
    capture.udp(T0 + 6 * MS, PROXY, CALLER, &message("SIP/2.0 200 OK", 3, "1 OPTIONS", 1));
    capture.udp(T0 + 7 * MS, CALLER, PROXY, b"not SIP at all");
    capture.udp(T0 + 8 * MS, CALLER, "10.1.0.2:9", b"another port");
    forwarded(&mut capture, (T0 + 200 * MS, T0 + 201 * MS), 4, 0);
    let Analysis { forwards, invites_ns, calls, came_per_s, ended_per_s } = read(&capture);
    assert_eq!((came_per_s, ended_per_s), (Some(2.0 / 0.2), None));
    let counts = forwards.counts;
    assert_eq!((counts.requests, counts.counted, counts.lost, counts.duplicates), (4, 2, 1, 1));
    assert_eq!((counts.duplicate_replies, counts.malformed, counts.stray_replies, calls), (1, 1, 0, 3));
    assert_eq!(invites_ns, [2 * MS, MS]);
}

#[test]
fn a_proxy_that_ends_calls_more_slowly_than_they_come_is_told() {
    let mut capture = Capture::new(WHOLE);
    for call in 0..11 {
        forwarded(&mut capture, (T0 + call * 10 * MS, T0 + call * 10 * MS + MS), call, 0);
    }
    for call in 0..11 {
        let at_ns = T0 + (200 + call * 20) * MS;
        forwarded(&mut capture, (at_ns, at_ns + MS), call, 5);
        goes(&mut capture, at_ns + 2 * MS, call, 5); // again
    }
    let analysis = read(&capture);
    assert_eq!((analysis.came_per_s, analysis.ended_per_s), (Some(100.0), Some(50.0)));
    assert!(analysis.kept_up(Some(100.0)).ends_with("50.0 ended; it did not keep up with what was offered"));
    assert!(analysis.kept_up(None).ends_with("- offered, 100.0 came, 50.0 ended"));
}

#[test]
fn a_capture_cut_to_headers_is_told_not_guessed() {
    let mut capture = Capture::new(Format { snaplen: Some(96), ..WHOLE });
    forwarded(&mut capture, (T0, T0 + MS), 1, 0);
    let counts = read(&capture).forwards.counts;
    assert_eq!((counts.requests, counts.malformed), (0, 2));
}

#[test]
fn warm_up_does_not_count() {
    let mut capture = Capture::new(WHOLE);
    for call in 0..4 {
        forwarded(&mut capture, (T0 + call * 10 * MS, T0 + call * 10 * MS + MS), call, 0);
    }
    let analysis = analyse(capture.file().path(), PORT, 3).unwrap();
    assert_eq!(
        (analysis.forwards.counts.warmup, analysis.forwards.counts.counted, analysis.invites_ns.len()),
        (3, 1, 1)
    );
}

proptest! {
    /// Messages of overlapping calls are kept apart.
    #[test]
    fn overlapping_calls_are_kept_apart(delays in prop::collection::vec((0_u64..50_000, 1_u64..20_000), 1..60)) {
        let mut happens = Vec::new();
        for (number, (starts_us, takes_us)) in delays.iter().enumerate() {
            // Six messages per call; no two at the same time.
            let (call, which) = (number as u64 / 6, number % 6);
            let comes = T0 + starts_us * US + number as u64;
            happens.push((comes, false, call, which));
            happens.push((comes + takes_us * US, true, call, which));
        }
        happens.sort_unstable();
        let mut capture = Capture::new(WHOLE);
        for (at_ns, out, call, which) in happens {
            if out { goes(&mut capture, at_ns, call, which) } else { comes(&mut capture, at_ns, call, which) }
        }
        let mut expected: Vec<(u64, u64)> = delays
            .iter()
            .enumerate()
            .map(|(number, (starts, takes))| (T0 + starts * US + number as u64, takes * US))
            .collect();
        expected.sort_unstable();
        let found: Vec<(u64, u64)> =
            read(&capture).forwards.exchanges.iter().map(|exchange| (exchange.at_ns, exchange.latency_ns)).collect();
        prop_assert_eq!(found, expected);
    }

    /// Any data to the proxy's port is parsed without a panic.
    #[test]
    fn garbage_is_read(payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..20)) {
        let mut capture = Capture::new(WHOLE);
        for (n, payload) in payloads.iter().enumerate() {
            capture.udp(T0 + n as u64, CALLER, PROXY, payload);
        }
        let counts = read(&capture).forwards.counts;
        prop_assert_eq!(counts.malformed + counts.requests, payloads.len() as u64);
    }
}
