//! The analysis of streams that `ontime trace --record` recorded on running hosts (`tests/data`; names of other
//! processes are replaced).
//!
//! container.jsonl, container-hindered.jsonl: kernel 6.18, an echo server at FIFO 40 in a cgroup behind a veth pair,
//! with a request every 4 ms from another namespace on the same CPU. In the second file a foreign thread at FIFO 45
//! spins for 1.5 ms at a time. vanilla-rt.jsonl: Debian's 7.2-rt in the lab, virtual clock, method `vanilla`, an echo
//! server (perl) at FIFO 47 in a cgroup, requests through rt0, small packets flooding bulk0 (`trace` of lab/tests).
//! partitioned-rt.jsonl: the same with method `partitioned`; an ARP packet arrives while the server is awake.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test ends by panicking")]

use std::fs;

use ontime_hostnet::RuleId;
use ontime_trace::event::{Event, Name, What};
use ontime_trace::inversion::Kind;
use ontime_trace::path::PathRole;
use ontime_trace::request::Segment;
use ontime_trace::{Analyser, Document, Run, Watch};

fn recorded(name: &str) -> (Watch, Vec<Event>) {
    let path = format!("{}/tests/data/{name}.jsonl", env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(path).unwrap();
    let mut lines = text.lines();
    let watch = serde_json::from_str(lines.next().unwrap()).unwrap();
    (watch, lines.map(|line| serde_json::from_str(line).unwrap()).collect())
}

fn analyse(watch: Watch, events: &[Event]) -> Analyser {
    let mut analyser = Analyser::new(watch, 20_000, 20);
    events.iter().for_each(|event| drop(analyser.step(event)));
    analyser
}

/// Replies that left through the NIC, counted in the stream itself.
fn replies(watch: &Watch, events: &[Event]) -> usize {
    let nics = &watch.paths[0].nics;
    events.iter().filter(|event| matches!(event.what, What::Xmit { dev, rc: 0, .. } if nics.contains(&dev))).count()
}

#[test]
fn a_containers_requests_are_all_found_and_nobody_is_blamed() {
    let (watch, events) = recorded("container");
    let left = replies(&watch, &events);
    let analyser = analyse(watch, &events);
    let counts = analyser.counts()[0];
    // The first reply's request arrived before the stream begins.
    assert_eq!(counts.requests as usize, left - 1);
    assert_eq!((counts.unanswered, counts.dropped), (0, 0));
    assert!(analyser.findings().culprits.is_empty(), "{:?}", analyser.findings().culprits);
    let document = Document::new(&analyser, &Run::default());
    let total = document.paths[0].total.unwrap();
    assert!(total.max < 200.0 && total.min > 1.0, "{total:?}");
    let sum: f64 =
        Segment::ALL.iter().map(|segment| document.paths[0].segments.get(segment.name()).unwrap().mean).sum();
    assert!((sum - total.mean).abs() < 0.01, "the segments' means add up: {sum} and {}", total.mean);
}

#[test]
fn the_thread_that_spun_is_named_with_how_long() {
    let (watch, events) = recorded("container-hindered");
    let analyser = analyse(watch, &events);
    let worst = &analyser.findings().worst[0];
    let inversion = &worst.inversions[0];
    assert_eq!((inversion.kind, inversion.segment), (Kind::Waited, Segment::HostReceive));
    assert_eq!(inversion.waiter.map(|waiter| waiter.role), Some(PathRole::App));
    assert_eq!((inversion.blocker.comm, inversion.blocker.policy()), (Name::from("python3"), "FIFO 45".to_owned()));
    assert!((1_400_000..1_600_000).contains(&inversion.ns), "{}", inversion.ns);
    assert!(inversion.ns <= worst.request.segment(Segment::HostReceive));
    assert!(inversion.cure.rule.is_none() && inversion.cure.text().contains("outside Ontime's table"));
    assert_eq!(analyser.findings().hindered, 1);
}

#[test]
fn a_recorded_stream_with_a_gap_is_never_taken_for_whole() {
    let (watch, mut events) = recorded("container");
    let whole = analyse(watch.clone(), &events).counts()[0].requests;
    let (from, to) = (events.len() / 3, events.len() / 2);
    let gap = Event { what: What::Lost { count: (to - from) as u64 }, ..events[to] };
    events.splice(from..to, [gap]);
    let analyser = analyse(watch, &events);
    assert!(analyser.counts()[0].requests < whole);
    assert_eq!(Document::new(&analyser, &Run::default()).lost(), (to - from) as u64);
    assert!(analyser.findings().culprits.is_empty(), "a gap makes no culprit");
}

#[test]
fn vanilla_on_preempt_rt_is_what_the_papers_describe() {
    let (watch, events) = recorded("vanilla-rt");
    let analyser = analyse(watch, &events);
    assert!(analyser.counts()[0].requests >= 3);
    // Every request: RT threads with priorities of 40 and more process the bulk NIC's packets (Access'18, II-A and
    // II-C).
    assert_eq!(analyser.findings().hindered, analyser.counts()[0].requests);
    let document = Document::new(&analyser, &Run::default());
    // perl itself polls bulk0, and it waits behind interrupt threads of its own NIC that do so.
    for (kind, behind) in [(Kind::Foreign, "perl (FIFO 47)"), (Kind::Waited, "irq/31-rt0-tx-0 (FIFO 50)")] {
        let same = |inversion: &&ontime_trace::report::InversionReport| {
            (inversion.kind, inversion.behind.as_str(), inversion.place.as_str()) == (kind, behind, "NAPI of bulk0")
        };
        let inversion = document.inversions.iter().find(same);
        let inversion = inversion.unwrap_or_else(|| panic!("no {behind} in {:#?}", document.inversions));
        assert_eq!(inversion.waiter.as_deref(), Some("thread perl (FIFO 47)"));
        assert_eq!(inversion.rule, Some(RuleId::NapiThreaded));
        assert!(inversion.max_us > 2_000.0, "{inversion:?}");
    }
    // The cap watcher is entitled to run; the report says what can be changed.
    let watcher = document.inversions.iter().find(|inversion| inversion.behind.starts_with("ontime-cap"));
    assert!(watcher.is_some_and(|inversion| inversion.rule.is_none() && inversion.cure.contains("cap.period-ms")));
}

#[test]
fn a_packet_for_somebody_else_puts_no_request_out_of_step() {
    let (watch, events) = recorded("partitioned-rt");
    let answers = |event: &&Event| matches!(event.what, What::StartXmit { protocol: 0x0800, .. });
    let answers = events.iter().filter(answers).count() as u64;
    let analyser = analyse(watch, &events);
    let counts = analyser.counts()[0];
    assert_eq!((counts.requests, counts.unasked), (answers, 0));
    // With a wrong assignment, each would take as long as the client's pause: milliseconds.
    let slowest = analyser.findings().max_ns[0];
    assert!(slowest < 1_000_000, "{slowest} ns");
}
