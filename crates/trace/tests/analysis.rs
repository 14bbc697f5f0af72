//! The analysis of synthetic streams: a request through a VM step by step, each kind of inversion, and random events.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test ends by panicking")]

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ontime_hostnet::RuleId;
use ontime_tenants::{Class, Level};
use ontime_trace::event::{Event, EventKind, NET_RX, Task};
use ontime_trace::inversion::Kind;
use ontime_trace::path::{Path, PathRole};
use ontime_trace::request::Segment;
use ontime_trace::{Analyser, Document, Run, Watch, html, perfetto, text};
use proptest::prelude::*;

const IRQ_THREAD: i32 = 10;
const NAPI: i32 = 11;
const VHOST: i32 = 12;
const VCPU: i32 = 13;
const BULK_NAPI: i32 = 20;
const BULK_IRQ: i32 = 21;
const BULK_VHOST: i32 = 22;
const SOMEBODY: i32 = 30;
const WATCHER: i32 = 40;

fn task(pid: i32) -> Task {
    let (comm, prio) = match pid {
        0 => ("swapper/0", 120),
        IRQ_THREAD => ("irq/30-rt0", 49),
        NAPI => ("napi/rt0-5", 50),
        VHOST => ("vhost-100", 51),
        VCPU => ("CPU 0/KVM", 52),
        BULK_NAPI => ("napi/bulk0-6", 100),
        BULK_IRQ => ("irq/31-bulk0", 49),
        // Has inherited priority 50.
        BULK_VHOST => ("vhost-200", 49),
        WATCHER => ("ontime-cap", 44),
        _ => ("make", 120),
    };
    Task { pid, prio, comm: comm.into() }
}

fn watch() -> Watch {
    let rt = Class::Rt(Level::HIGHEST);
    let threads: BTreeMap<i32, PathRole> =
        [(IRQ_THREAD, PathRole::Irq), (NAPI, PathRole::Napi), (VHOST, PathRole::Vhost), (VCPU, PathRole::Vcpu)].into();
    let path = Path {
        tenant: "plc".to_owned(),
        class: rt,
        nics: BTreeSet::from(["rt0".into()]),
        vnics: BTreeSet::from(["t-rt".into()]),
        seen_at_vnic: true,
        threads: threads.clone(),
        irqs: BTreeSet::from([30]),
        segments_only: false,
    };
    let mut classes: HashMap<i32, Class> = threads.keys().map(|pid| (*pid, rt)).collect();
    classes.extend([(BULK_NAPI, Class::Bulk), (BULK_IRQ, Class::Bulk), (BULK_VHOST, Class::Bulk)]);
    Watch {
        paths: vec![path],
        classes,
        rt_nics: BTreeSet::from(["rt0".into(), "t-rt".into()]),
        polled: BTreeSet::new(),
        cpus: vec![0],
        shared_lock: false,
        program: None,
    }
}

/// A stream of events on CPU 0.
struct Stream {
    now: u64,
    current: i32,
    events: Vec<Event>,
}

impl Stream {
    fn new() -> Self {
        Self { now: 1_000_000, current: 0, events: Vec::new() }
    }

    /// Adds an event after this many us.
    fn then(mut self, us: u64, what: EventKind) -> Self {
        self.now += us * 1_000;
        self.events.push(Event { time: self.now, cpu: 0, pid: self.current, what });
        if let EventKind::Switch { next, .. } = what {
            self.current = next.pid;
        }
        self
    }

    fn to(self, us: u64, next: i32) -> Self {
        let prev = task(self.current);
        // The idle thread and the blocking thread stay runnable; threads of the path sleep.
        let preempted = self.current == SOMEBODY;
        self.then(us, EventKind::Switch { prev, preempted, next: task(next) })
    }

    fn wake(self, us: u64, pid: i32) -> Self {
        self.then(us, EventKind::Waking { pid, prio: task(pid).prio })
    }

    fn interrupt(self, us: u64) -> Self {
        self.then(us, EventKind::IrqEntry { irq: 30, name: "rt0".into() }).then(1, EventKind::IrqExit { irq: 30 })
    }

    /// From the NAPI thread's reception to the reply's transmission.
    fn served(self, skb: u64, in_guest: u64) -> Self {
        let reply = skb + 1_000;
        self.then(2, EventKind::Receive { dev: "rt0".into(), skb, len: 60 })
            .then(2, EventKind::StartXmit { dev: "t-rt".into(), skb, protocol: 0x0800 })
            .wake(1, VHOST)
            .then(1, EventKind::NapiPoll { dev: "rt0".into(), work: 1 })
            .to(1, VHOST)
            .wake(3, VCPU)
            .to(1, VCPU)
            .then(1, EventKind::KvmEntry)
            .then(in_guest, EventKind::KvmExit { reason: 1 })
            .wake(1, VHOST)
            .to(1, VHOST)
            .then(2, EventKind::Receive { dev: "t-rt".into(), skb: reply, len: 60 })
            .then(1, EventKind::Queue { dev: "rt0".into(), skb: reply })
            .then(1, EventKind::StartXmit { dev: "rt0".into(), skb: reply, protocol: 0x0800 })
            .then(1, EventKind::Xmit { dev: "rt0".into(), skb: reply, rc: 0 })
            .to(1, 0)
    }
}

fn analyse(events: &[Event]) -> Analyser {
    let mut analyser = Analyser::new(watch(), 20_000, 5);
    for event in events {
        analyser.step(event);
    }
    analyser
}

#[test]
fn a_request_is_put_together_and_divided() {
    let stream = Stream::new().interrupt(5).wake(1, NAPI).to(1, NAPI).served(1, 30);
    let analyser = analyse(&stream.events);
    assert_eq!(analyser.counts()[0].requests, 1);
    assert_eq!(analyser.counts()[0].inexact, 0);
    let request = analyser.findings().worst[0].request;
    // Interrupt 1 + wake 1 + switch 1 + 2 + 2 + 1 + 1 + 1 + 3 + 1 + 1 up to the entry.
    assert_eq!(request.segment(Segment::HostReceive), 15_000);
    assert_eq!(request.segment(Segment::Guest), 30_000);
    assert_eq!(request.segment(Segment::HostSend), 7_000);
    assert!(analyser.findings().culprits.is_empty());
}

#[test]
fn every_request_without_reply_is_counted_however_many_come_at_once() {
    let mut stream = Stream::new();
    for skb in 0..3_000 {
        stream = stream
            .then(1, EventKind::Receive { dev: "rt0".into(), skb, len: 60 })
            .then(1, EventKind::StartXmit { dev: "t-rt".into(), skb, protocol: 0x0800 });
    }
    // More than a second later, open requests are given up.
    stream = stream.then(2_000_000, EventKind::Receive { dev: "rt0".into(), skb: 9_999, len: 60 });
    assert_eq!(analyse(&stream.events).counts()[0].unanswered, 3_000);
}

#[test]
fn bulk_packets_moved_between_interrupt_and_reception_are_named() {
    // vanilla: the bulk NIC's interrupt thread polls both NICs in its softirq.
    let stream = Stream::new()
        .to(1, BULK_IRQ)
        .then(1, EventKind::SoftirqEntry { vec: NET_RX })
        .interrupt(5)
        .then(300, EventKind::NapiPoll { dev: "bulk0".into(), work: 64 })
        .then(200, EventKind::NapiPoll { dev: "bulk0".into(), work: 64 })
        .served(1, 30);
    let analyser = analyse(&stream.events);
    let detail = &analyser.findings().worst[0];
    let worst = &detail.inversions[0];
    assert_eq!((worst.kind, worst.segment, worst.blocker.pid), (Kind::Held, Segment::HostReceive, BULK_IRQ));
    assert_eq!(worst.ns, 500_000 + 1_000 - 1_000, "from the interrupt's end to the last poll of bulk0");
    assert_eq!(worst.cure.rule, Some(RuleId::NapiThreaded));
    assert!(
        worst.text().contains("behind irq/31-bulk0 (21, FIFO 50) in NAPI of bulk0 on CPU 0, host receive"),
        "{}",
        worst.text()
    );
}

#[test]
fn a_thread_that_waits_is_named_with_what_it_waits_behind() {
    let stream = Stream::new().to(1, SOMEBODY).interrupt(5).wake(1, NAPI).to(80, NAPI).served(1, 30);
    let analyser = analyse(&stream.events);
    let worst = &analyser.findings().worst[0].inversions[0];
    assert_eq!((worst.kind, worst.blocker.pid, worst.ns), (Kind::Waited, SOMEBODY, 80_000));
    assert_eq!(worst.waiter.map(|waiter| waiter.role), Some(PathRole::Napi));
    // A thread at FIFO 49 behind SCHED_OTHER: a priority does not cure that.
    assert_eq!(worst.cure.rule, None);
    assert!(worst.cure.text().contains("cannot be preempted"));
}

/// A polling thread is paused by its cap for 100 us; a packet is received `then` us after it runs again.
fn paused(then: u64) -> Analyser {
    let off = |stream: Stream, us, next| {
        let prev = task(stream.current);
        stream.then(us, EventKind::Switch { prev, preempted: true, next: task(next) })
    };
    let stream = off(Stream::new().to(1, NAPI), 50, WATCHER).to(20, BULK_NAPI);
    let stream = off(stream, 100, WATCHER).to(20, NAPI);
    analyse(&stream.then(then, EventKind::IrqExit { irq: 31 }).served(1, 30).events)
}

#[test]
fn what_a_paused_poller_finds_may_have_waited_for_all_of_the_pause() {
    let analyser = paused(3);
    let worst = &analyser.findings().worst[0];
    assert_eq!(worst.request.received - worst.request.begin, 145_000);
    let inversion = &worst.inversions[0];
    assert_eq!((inversion.kind, inversion.blocker.pid, inversion.ns), (Kind::Waited, BULK_NAPI, 100_000));
    assert_eq!(inversion.waiter.map(|waiter| waiter.role), Some(PathRole::Napi));
    assert!(inversion.cure.text().contains("runtime cap paused it"), "{}", inversion.text());
    // A packet found in a later poll arrived later.
    assert_eq!(paused(30).findings().worst[0].request.received, paused(30).findings().worst[0].request.begin);
}

/// As `watch`, with a host process on br-rt instead of the VM.
fn watch_process() -> Watch {
    let mut watch = watch();
    let path = &mut watch.paths[0];
    (path.seen_at_vnic, path.vnics) = (false, BTreeSet::new());
    path.threads = [(IRQ_THREAD, PathRole::Irq), (NAPI, PathRole::Napi), (VCPU, PathRole::App)].into();
    watch
}

impl Stream {
    /// A packet wakes the process, which receives and answers it.
    fn answered(self, skb: u64, foreign: Option<u64>) -> Self {
        let mut stream = self
            .interrupt(5)
            .wake(1, NAPI)
            .to(1, NAPI)
            .then(2, EventKind::Receive { dev: "rt0".into(), skb, len: 60 })
            .wake(1, VCPU)
            .then(1, EventKind::NapiPoll { dev: "rt0".into(), work: 1 })
            .to(1, VCPU);
        if let Some(skb) = foreign {
            stream = stream
                .then(1, EventKind::Switch { prev: task(VCPU), preempted: true, next: task(NAPI) })
                .then(1, EventKind::Receive { dev: "rt0".into(), skb, len: 46 })
                .to(1, VCPU);
        }
        stream.sent(skb)
    }

    fn sent(self, skb: u64) -> Self {
        self.then(3, EventKind::Queue { dev: "rt0".into(), skb })
            .then(1, EventKind::StartXmit { dev: "rt0".into(), skb, protocol: 0x0800 })
            .then(1, EventKind::Xmit { dev: "rt0".into(), skb, rc: 0 })
    }
}

#[test]
fn a_packet_that_a_busy_receiver_never_answers_is_no_request() {
    let stream = Stream::new().answered(1, Some(99)).to(1, 0).answered(2, None).to(1, 0).answered(3, None);
    let mut analyser = Analyser::new(watch_process(), 20_000, 5);
    stream.events.iter().for_each(|event| drop(analyser.step(event)));
    let counts = analyser.counts()[0];
    assert_eq!((counts.requests, counts.unasked, counts.unanswered), (3, 0, 0));
    assert!(analyser.findings().worst.iter().all(|detail| detail.request.total() < 30_000));
}

#[test]
fn a_packet_that_a_busy_receiver_answers_later_is_one() {
    // The second packet arrives while the first is answered and causes no wake-up.
    let stream = Stream::new().answered(1, Some(2)).sent(2).to(1, 0);
    let mut analyser = Analyser::new(watch_process(), 20_000, 5);
    stream.events.iter().for_each(|event| drop(analyser.step(event)));
    assert_eq!(analyser.counts()[0].requests, 2);
    assert!(analyser.findings().worst.iter().all(|detail| detail.request.exact));
}

/// The cure for a delay between interrupt and reception during which `somebody` ran its own code.
fn cure_of_held(watch: Watch, somebody: i32) -> (Option<RuleId>, String) {
    let stream = Stream::new()
        .to(1, somebody)
        .interrupt(5)
        .then(80, EventKind::IrqExit { irq: 99 })
        .wake(1, NAPI)
        .to(1, NAPI)
        .served(1, 30);
    let mut analyser = Analyser::new(watch, 20_000, 5);
    stream.events.iter().for_each(|event| drop(analyser.step(event)));
    let worst = &analyser.findings().worst[0].inversions[0];
    assert_eq!((worst.kind, worst.blocker.pid), (Kind::Held, somebody));
    (worst.cure.rule, worst.cure.text().to_owned())
}

#[test]
fn threading_cures_no_napi_that_has_a_thread() {
    let (rule, text) = cure_of_held(watch(), SOMEBODY);
    assert!(rule.is_none() && text.contains("a thread that had not been woken yet"), "{text}");
    let mut unthreaded = watch();
    unthreaded.paths[0].threads.remove(&NAPI);
    assert_eq!(cure_of_held(unthreaded, SOMEBODY).0, Some(RuleId::NapiThreaded));
}

#[test]
fn interrupt_threads_have_a_rule_whether_they_are_a_nics_or_not() {
    assert_eq!(cure_of_held(watch(), BULK_IRQ).0, Some(RuleId::IrqThread));
    let mut of_a_disk = watch();
    of_a_disk.classes.remove(&BULK_IRQ);
    assert_eq!(cure_of_held(of_a_disk, BULK_IRQ).0, Some(RuleId::DeviceIrq));
}

#[test]
fn a_bulk_thread_that_was_lent_a_priority_is_not_said_to_be_outside_the_table() {
    let (rule, text) = cure_of_held(watch(), BULK_VHOST);
    assert!(rule.is_none() && text.contains("by inheritance"), "{text}");
}

#[test]
fn where_softirqs_share_a_lock_bulk_threads_that_hold_it_have_their_rules() {
    // Without the shared lock the cure is the thread's priority, for a thread that has a place.
    assert_eq!(cure_of_held(watch(), BULK_NAPI).0, Some(RuleId::NapiThread));
    let shared = || Watch { shared_lock: true, ..watch() };
    assert_eq!(cure_of_held(shared(), BULK_NAPI).0, Some(RuleId::NapiWeight));
    assert_eq!(cure_of_held(shared(), BULK_VHOST).0, Some(RuleId::TapBatch));
    // A thread that does not process packets does not hold that lock.
    assert_eq!(cure_of_held(shared(), BULK_IRQ).0, Some(RuleId::IrqThread));
}

#[test]
fn foreign_work_in_a_thread_of_the_path_is_named() {
    // The RT NIC's thread polls the bulk NIC, because both are in this CPU's poll list.
    let stream = Stream::new()
        .interrupt(5)
        .wake(1, NAPI)
        .to(1, NAPI)
        .then(1, EventKind::SoftirqEntry { vec: NET_RX })
        .then(400, EventKind::NapiPoll { dev: "bulk0".into(), work: 64 })
        .then(1, EventKind::SoftirqExit { vec: NET_RX })
        .served(1, 30);
    let analyser = analyse(&stream.events);
    let worst = &analyser.findings().worst[0].inversions[0];
    assert_eq!((worst.kind, worst.ns), (Kind::Foreign, 400_000));
    assert_eq!(worst.waiter.map(|waiter| waiter.task.pid), Some(NAPI));
    // The report lists it under its cure, with counts.
    let document = Document::new(&analyser, &Run::default());
    let (text, cures) = (text::text(&document), document.by_cure());
    fits_80_columns(&text);
    assert!(!cures.is_empty());
    assert_eq!(cures.iter().map(|of| of.inversions.len()).sum::<usize>(), document.inversions.len());
    for of in &cures {
        assert!(of.inversions.iter().all(|inversion| (inversion.rule, inversion.cure.as_str()) == (of.rule, of.cure)));
        let times: u64 = of.inversions.iter().map(|inversion| inversion.requests).sum();
        assert!(of.times() == times && text.contains(&format!("{times} x, max ")), "{text}");
    }
}

fn fits_80_columns(text: &str) {
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
}

#[test]
fn lost_events_drop_what_was_open_and_are_told() {
    let mut events = Stream::new().interrupt(5).wake(1, NAPI).to(1, NAPI).served(1, 30).events;
    let cut = events.len() / 2;
    let at = events[cut];
    events.insert(cut, Event { what: EventKind::Lost { count: 77 }, ..at });
    let analyser = analyse(&events);
    assert_eq!(analyser.counts()[0].requests, 0);
    assert_eq!(analyser.counts()[0].dropped, 1);
    let document = Document::new(&analyser, &Run::default());
    assert_eq!(document.lost(), 77);
    let text = text::text(&document);
    assert!(text.contains("LOST at least 77 events (CPU 0: 77)"));
    fits_80_columns(&text);
}

#[test]
fn only_the_worst_are_kept_and_the_forms_hold_them() {
    let mut stream = Stream::new();
    for skb in 1..=40 {
        stream = stream.interrupt(900).wake(1, NAPI).to(1, NAPI).served(skb, 10 + skb * 7 % 40);
    }
    let analyser = analyse(&stream.events);
    let worst: Vec<u64> = analyser.findings().worst.iter().map(|detail| detail.request.total()).collect();
    assert_eq!(worst.len(), 5);
    assert!(worst.is_sorted_by(|a, b| a >= b));
    assert_eq!(worst[0], analyser.findings().samples[0].total.iter().copied().max().unwrap());
    let document = Document::new(&analyser, &Run { kernel: "<script>".to_owned(), ..Run::default() });
    let text = text::text(&document);
    fits_80_columns(&text);
    // The segments are in the path's order in the JSON, too.
    let written = serde_json::to_string(&document.paths[0]).unwrap();
    let at = |name: &str| written.find(&format!("\"{name}\":{{")).unwrap();
    assert!(at("host receive") < at("guest") && at("guest") < at("host send"), "{written}");
    let page = html::html(&analyser, &document);
    assert!(page.find("The worst requests") < page.find("Priority inversions"));
    assert!(page.contains("default-src 'none'") && !page.contains("<script") && !page.contains("http://"));
    assert!(page.matches("<svg class=\"rows\"").count() == 5);
    assert!(perfetto::perfetto(&analyser).len() > 500);
    let json: serde_json::Value = serde_json::from_str(&serde_json::to_string(&document).unwrap()).unwrap();
    assert_eq!(json["paths"][0]["counts"]["requests"], 40);
}

#[test]
fn segments_alone_need_no_switches() {
    let mut watch = watch();
    watch.paths[0].segments_only = true;
    let probes: Vec<&str> = watch.filters().iter().map(|(probe, _)| probe.path()).collect();
    assert!(!probes.iter().any(|probe| probe.starts_with("sched/") || probe.contains("softirq")), "{probes:?}");
    let mut analyser = Analyser::new(watch, 20_000, 5);
    for event in Stream::new().interrupt(5).wake(1, NAPI).to(1, NAPI).served(1, 30).events {
        if !matches!(event.what, EventKind::Switch { .. } | EventKind::Waking { .. }) {
            analyser.step(&event);
        }
    }
    let request = analyser.findings().worst[0].request;
    assert_eq!(request.segment(Segment::HostReceive), 15_000);
    assert_eq!(request.segment(Segment::Guest), 30_000);
    let document = Document::new(&analyser, &Run::default());
    assert!(text::text(&document).contains("inversions were not looked for") && document.paths[0].stolen.is_none());
    assert!(!html::html(&analyser, &document).contains("No priority inversion"));
}

#[test]
fn a_buffer_used_again_is_another_packet() {
    // A reply that never left, then another one in the same buffer, which must not get the first one's time.
    let lost = Stream::new().to(1, VHOST).then(1, EventKind::Receive { dev: "t-rt".into(), skb: 1_001, len: 60 });
    let stream = lost.to(900_000, 0).interrupt(5).wake(1, NAPI).to(1, NAPI).served(1, 30);
    let analyser = analyse(&stream.events);
    assert_eq!(analyser.counts()[0].requests, 1);
    assert_eq!(analyser.findings().worst[0].request.total(), 52_000);
}

#[test]
fn filters_pass_the_path_alone() {
    let filters: HashMap<&str, Option<String>> = watch().filters().into_iter().map(|(p, f)| (p.path(), f)).collect();
    assert_eq!(filters["net/netif_receive_skb"].as_deref(), Some("name==\"rt0\"||name==\"t-rt\""));
    assert_eq!(filters["net/net_dev_xmit"].as_deref(), Some("name==\"rt0\""));
    assert_eq!(filters["kvm/kvm_exit"].as_deref(), Some("common_pid==13"));
    assert_eq!(filters["sched/sched_waking"].as_deref(), Some("pid==10||pid==11||pid==12||pid==13"));
    assert_eq!(filters["napi/napi_poll"].as_deref(), Some("dev_name==\"rt0\"||work>0"));
    let mut polled = watch();
    polled.polled.insert("rt0".into());
    polled.paths[0].threads.retain(|_, role| *role != PathRole::Vcpu);
    let filters: HashMap<&str, Option<String>> = polled.filters().into_iter().map(|(p, f)| (p.path(), f)).collect();
    assert_eq!(filters["napi/napi_poll"].as_deref(), Some("work>0"));
    assert!(!filters.contains_key("kvm/kvm_exit"));
}

fn any_what() -> impl Strategy<Value = EventKind> {
    let pid = prop::sample::select(vec![0, IRQ_THREAD, NAPI, VHOST, VCPU, BULK_NAPI, SOMEBODY]);
    let dev = prop::sample::select(vec!["rt0", "t-rt", "bulk0", "(no_device)"]);
    let skb = 0_u64..6;
    prop_oneof![
        (pid.clone(), pid.clone(), any::<bool>()).prop_map(|(prev, next, preempted)| EventKind::Switch {
            prev: task(prev),
            preempted,
            next: task(next)
        }),
        pid.prop_map(|pid| EventKind::Waking { pid, prio: 50 }),
        Just(EventKind::IrqEntry { irq: 30, name: "x".into() }),
        Just(EventKind::IrqExit { irq: 30 }),
        (0_u32..10).prop_map(|vec| EventKind::SoftirqEntry { vec }),
        (0_u32..10).prop_map(|vec| EventKind::SoftirqExit { vec }),
        dev.clone().prop_map(|dev| EventKind::NapiPoll { dev: dev.into(), work: 1 }),
        (dev.clone(), skb.clone()).prop_map(|(dev, skb)| EventKind::Receive { dev: dev.into(), skb, len: 60 }),
        (dev.clone(), skb.clone()).prop_map(|(dev, skb)| EventKind::Queue { dev: dev.into(), skb }),
        (dev.clone(), skb.clone(), prop::sample::select(vec![0x0800_u16, 0x0806]))
            .prop_map(|(dev, skb, protocol)| EventKind::StartXmit { dev: dev.into(), skb, protocol }),
        (dev, skb, 0_i32..2).prop_map(|(dev, skb, rc)| EventKind::Xmit { dev: dev.into(), skb, rc }),
        Just(EventKind::KvmEntry),
        Just(EventKind::KvmExit { reason: 0 }),
        (1_u64..9).prop_map(|count| EventKind::Lost { count }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_stream_is_analysed_without_harm(
        process in any::<bool>(),
        whats in prop::collection::vec((any_what(), 0_u64..90_000, 0_u32..2, any::<bool>()), 0..400),
    ) {
        let watch = if process { watch_process() } else { watch() };
        let (mut now, mut analyser) = (0, Analyser::new(watch, 1_000, 5));
        for (what, after, cpu, vcpu) in whats {
            now += after;
            let pid = if vcpu { VCPU } else { NAPI };
            for request in analyser.step(&Event { time: now, cpu, pid, what }) {
                let stations = [
                    request.begin, request.received, request.handed, request.entered, request.left, request.queued,
                    request.driver, request.done,
                ];
                prop_assert!(stations.is_sorted(), "{request:?}");
                let sum: u64 = Segment::ALL.into_iter().map(|segment| request.segment(segment)).sum();
                prop_assert_eq!(sum, request.total());
            }
        }
        for detail in &analyser.findings().worst {
            for inversion in &detail.inversions {
                prop_assert!(inversion.ns >= 1_000 && inversion.ns <= detail.request.total());
            }
        }
        let document = Document::new(&analyser, &Run::default());
        let _ = (text::text(&document), html::html(&analyser, &document), perfetto::perfetto(&analyser));
    }
}
