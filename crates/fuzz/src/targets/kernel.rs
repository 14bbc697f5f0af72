//! Data from the kernel with names and bytes that users choose: trace rings, netlink. And the journal.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use ontime_hostnet::Originals;
use ontime_hostnet::inventory::Napi;
use ontime_hostnet::journal::{self, JournalError};
use ontime_hostnet::netlink::link::{self, Link};
use ontime_hostnet::netlink::{Answer, Attributes, ethtool, netdev, qdisc, tc};
use ontime_tenants::{connector, peers};
use ontime_trace::event::{Event, EventKind, Name, Task};
use ontime_trace::format::{Decoder, Format, Probe};
use ontime_trace::merge::Merger;
use ontime_trace::page::Page;
use ontime_trace::request::{Request, Segment};
use ontime_trace::{Analyser, Document, Run, Watch, html, perfetto, text};

use crate::input::Input;

/// The formats of all probes, with all fields that are read, as from a kernel.
fn decoder() -> &'static Decoder {
    static DECODER: OnceLock<Decoder> = OnceLock::new();
    DECODER.get_or_init(|| {
        let field = |name: &str, offset: usize, size: usize| {
            format!("\tfield:int {name};\toffset:{offset};\tsize:{size};\tsigned:0;\n")
        };
        let probes = Probe::ALL.into_iter().chain([Probe::Interrupt]).chain(Probe::vectors()).zip(1..);
        let formats = probes.map(|(probe, id)| {
            let mut text =
                format!("name: x\nID: {id}\nformat:\n{}{}", field("common_type", 0, 2), field("common_pid", 4, 4));
            let numbers = ["irq", "vec", "work", "len", "rc", "pid", "prio", "exit_reason", "apicid", "vector"];
            numbers.iter().zip(2..).for_each(|(name, word)| text += &field(name, 4 * word, 4));
            text += &(field("skbaddr", 8, 8) + &field("protocol", 16, 2) + &field("prev_state", 24, 8));
            text += &(field("hrtimer", 8, 8) + &field("expires", 16, 8));
            ["prev_comm", "next_comm"].iter().zip([32, 48]).for_each(|(name, at)| text += &field(name, at, 16));
            for (name, at) in ["prev_pid", "prev_prio", "next_pid", "next_prio"].iter().zip([8, 12, 16, 20]) {
                text += &field(name, at, 4);
            }
            text += "\tfield:__data_loc char[] name;\toffset:20;\tsize:4;\tsigned:0;\n";
            text += "\tfield:__rel_loc char[] dev_name;\toffset:24;\tsize:4;\tsigned:0;\n";
            Format::parse(probe, &text).unwrap()
        });
        Decoder::new(formats)
    })
}

/// Pages of a trace ring, or a format file. Input: 0 and a page, or a probe's number (1 or more) and the text of a
/// format file.
///
/// Property: records are parts of the page, so their total length is at most the page's; an event has its record's time
/// and names that are fit for a terminal; the merger returns all events in order; a valid format file decodes or
/// refuses any record.
pub fn trace(data: &[u8]) {
    let mut input = Input::new(data);
    let kind = usize::from(input.byte());
    let rest = input.rest();
    if kind > 0 {
        let probe = Probe::ALL[kind % Probe::ALL.len()];
        let text = String::from_utf8_lossy(rest);
        if let Ok(format) = Format::parse(probe, &text) {
            let id = format.id();
            let decoder = Decoder::new([format]);
            let mut record = [0xff; 64];
            record[..2].copy_from_slice(&id.to_ne_bytes());
            for length in [0, 2, 8, 64] {
                let event = decoder.decode(1, 2, &record[..length]);
                assert!(event.is_none_or(|event| (event.time, event.cpu) == (1, 2)));
            }
        }
        return;
    }
    let Some(page) = Page::new(rest) else { return };
    let has_lost = page.lost() > 0;
    assert!(!has_lost || rest[11] & 0x80 != 0, "the page does not say so");
    let (mut bytes, mut events, mut merger) = (0, 0, Merger::default());
    for (time, record) in page {
        bytes += record.len() + 4;
        let Some(event) = decoder().decode(time, 3, record) else { continue };
        assert_eq!((event.time, event.cpu), (time, 3));
        assert!(names(&event).iter().all(|name| !name.text().contains(char::is_control) && name.bytes().len() <= 15));
        merger.add([event]);
        events += 1;
    }
    assert!(bytes <= rest.len(), "{bytes} bytes of records in {}", rest.len());
    let mut out = merger.take(1 << 40);
    assert!(out.iter().all(|event| event.time < 1 << 40));
    out.extend(merger.rest());
    // An event with the greatest possible time stays in the merger.
    assert!(out.len() <= events && out.is_sorted_by_key(|event| event.time));
}

fn names(event: &Event) -> Vec<Name> {
    match event.what {
        EventKind::IrqEntry { name, .. } => vec![name],
        EventKind::NapiPoll { dev, .. } | EventKind::Receive { dev, .. } | EventKind::Queue { dev, .. } => vec![dev],
        EventKind::StartXmit { dev, .. } | EventKind::Xmit { dev, .. } => vec![dev],
        EventKind::Switch { prev, next, .. } => vec![prev.comm, next.comm],
        _ => Vec::new(),
    }
}

/// A VM and a container, with interrupts, NAPI and vhost.
fn watch() -> &'static Watch {
    static WATCH: OnceLock<Watch> = OnceLock::new();
    WATCH.get_or_init(|| {
        let text = r#"{"paths":[
            {"tenant":"<script>vm","class":{"rt":0},"nics":["eth0"],"vnics":["tap0"],"seen_at_vnic":true,
             "threads":{"1":"irq","2":"napi","3":"vhost","4":"vcpu"},"irqs":[5]},
            {"tenant":"box","class":{"rt":1},"nics":["eth1"],"vnics":[],"seen_at_vnic":false,
             "threads":{"6":"app","7":"napi"},"irqs":[]}],
            "classes":{"1":{"rt":0},"2":{"rt":0},"3":{"rt":0},"4":{"rt":0},"6":{"rt":1},"8":"bulk"},
            "rt_nics":["eth0"],"polled":[],"cpus":[0,1],"shared_lock":true}"#;
        serde_json::from_str(text).unwrap()
    })
}

/// An event on the watched host. Input: kind, CPU and time, thread, packet, another thread.
fn event(input: &mut Input<'_>, time: &mut u64) -> Event {
    let [kind, step, pid, skb, other] = input.bytes();
    *time += u64::from(step & 0x7f) << (kind >> 4);
    let pid = i32::from(pid % 10);
    let other = i32::from(other % 10);
    let dev = Name::from(["eth0", "eth1", "tap0", "(no_device)"][usize::from(skb >> 6)]);
    let skb = u64::from(skb & 7);
    let comm = |pid: i32| Name::from(["swapper", "<i>x", "\u{1b}[2J", "\"a&b", "CPU 0/KVM"][pid as usize % 5]);
    let task = |pid: i32| Task { pid, prio: [120, 49, 50, 51, 52, 99, 60, 48, 139, -1][pid as usize], comm: comm(pid) };
    let what = match kind & 15 {
        0 => EventKind::IrqEntry { irq: 5, name: comm(other) },
        1 => EventKind::IrqExit { irq: 5 },
        2 => EventKind::SoftirqEntry { vec: 2 + (skb as u32 & 1) },
        3 => EventKind::SoftirqExit { vec: 2 + (skb as u32 & 1) },
        4 => EventKind::NapiPoll { dev, work: other },
        5 => EventKind::Receive { dev, skb, len: 60 },
        6 => EventKind::Queue { dev, skb },
        7 => EventKind::StartXmit { dev, skb, protocol: if other > 7 { 0x0806 } else { 0x0800 } },
        8 => EventKind::Xmit { dev, skb, rc: i32::from(other > 8) },
        9 | 10 => EventKind::Switch { prev: task(pid), preempted: skb & 1 != 0, next: task(other) },
        11 => EventKind::Waking { pid: other, prio: task(other).prio },
        12 => EventKind::KvmEntry,
        13 => EventKind::KvmExit { reason: skb as u32 },
        14 => EventKind::Interrupt { vcpu: skb as u32 },
        _ => EventKind::Lost { count: skb },
    };
    Event { time: *time, cpu: u32::from(step >> 7), pid, what }
}

/// The analysis of a trace and its report. Input: events of the watched threads, five bytes each.
///
/// Property: a request's stations are in time order, and its segments add up to the total; the report's JSON is valid;
/// its HTML page contains no markup from a thread's or tenant's name, and its text no control characters.
pub fn analysis(data: &[u8]) {
    let mut input = Input::new(data);
    let mut analyser = Analyser::new(watch().clone(), 0, 4);
    let mut time = 1_000_000;
    while !input.is_empty() {
        let event = event(&mut input, &mut time);
        analyser.step(&event).iter().for_each(in_order);
    }
    analyser.hint(0, time, "a hint");
    assert!(analyser.findings().span.is_none_or(|(from, to)| from <= to));
    let document = Document::new(&analyser, &Run::default());
    let json = serde_json::to_vec(&document).unwrap();
    serde_json::from_slice::<serde_json::Value>(&json).unwrap();
    let page = html::html(&analyser, &document);
    assert!(!page.contains("<script>vm") && !page.contains("<i>x"), "markup of a name");
    let said = text::text(&document);
    assert!(!said.contains(|c: char| c.is_control() && c != '\n'), "{said:?}");
    let _ = perfetto::perfetto(&analyser);
}

fn in_order(request: &Request) {
    let Request { begin, received, handed, entered, left, queued, driver, done, .. } = *request;
    assert!([begin, received, handed, entered, left, queued, driver, done].is_sorted(), "{request:?}");
    let parts: u64 = Segment::ALL.iter().map(|segment| request.segment(*segment)).sum();
    assert_eq!(parts, request.total());
}

/// Answers of netlink sockets, and process events. Input: a datagram; each part of it, and the whole, is parsed as
/// every known message.
///
/// Property: the parts of an answer are no longer than the datagram; a parsed link is the same after writing and
/// parsing it again; names of interfaces in a container's namespace are no longer than the datagram; process events
/// have no negative numbers.
pub fn netlink(data: &[u8]) {
    // The kernel's datagrams are shorter.
    let data = &data[..data.len().min(16_384)];
    let sequence = data.get(8..12).map_or(0, |bytes| u32::from_ne_bytes(bytes.try_into().unwrap()));
    let mut answer = Answer { consistent: true, ..Answer::default() };
    let _ = answer.take(data, sequence);
    let length: usize = answer.parts.iter().map(|part| part.len() + 16).sum();
    assert!(length <= data.len(), "{length} bytes in {}", data.len());
    answer.parts.iter().map(Vec::as_slice).chain([data]).for_each(part);
    if let Ok(names) = peers::names_in(data) {
        // Each invalid UTF-8 byte is replaced by three bytes.
        assert!(names.iter().all(|name| !name.is_empty()));
        assert!(names.iter().map(String::len).sum::<usize>() <= 3 * data.len());
    }
    if let Some(event) = connector::parse(data) {
        let numbers = match event {
            connector::Event::Exec { pid } => vec![pid],
            connector::Event::Fork { parent, child, tid } => vec![parent, child, tid],
            connector::Event::Comm { pid, tid } | connector::Event::Exit { pid, tid } => vec![pid, tid],
        };
        assert!(numbers.iter().all(|number| *number >= 0), "{event:?}");
    }
}

fn part(bytes: &[u8]) {
    if let Some(link) = link::parse_link(bytes) {
        assert!(!link.name.is_empty() && !link.name.contains('\0'));
        assert!(link.peer.is_none() || link.link.is_none());
        assert_eq!(link::parse_link(link_message(&link).bytes()), Some(link));
    }
    let _ = (ethtool::parse(bytes), ethtool::parse_ring(bytes), ethtool::parse_features(bytes));
    let (ifindex, napi) = netdev::parse_napi(bytes);
    assert!(napi.rx_queues.is_empty() && napi.tx_queues.is_empty());
    let mut napis: BTreeMap<u32, Vec<Napi>> = BTreeMap::from([(ifindex, vec![napi])]);
    netdev::add_queue(&mut napis, bytes);
    let queues: usize = napis.values().flatten().map(|napi| napi.rx_queues.len() + napi.tx_queues.len()).sum();
    assert!(napis.len() == 1 && queues <= 1);
    let _ = (qdisc::root_of(bytes), tc::kind_of(bytes), tc::queue_of(bytes));
}

/// A link message as the kernel writes it (`net/core/rtnetlink.c`).
fn link_message(link: &Link) -> Attributes {
    let flags = u32::from(link.up) | u32::from(link.loopback) << 3;
    let header: Vec<u8> = [0, link.ifindex, flags, 0].iter().flat_map(|word| word.to_ne_bytes()).collect();
    let mut message = Attributes::after(&header)
        .with_text(3, &link.name)
        .with_u32(31, link.tx_queues)
        .with_u32(32, link.rx_queues)
        .with(33, &[u8::from(link.carrier)]);
    if let Some(mac) = link.mac {
        message = message.with(1, &mac);
    }
    if let Some(lower) = link.link.or(link.peer) {
        message = message.with_u32(5, lower);
    }
    if link.peer.is_some() {
        message = message.with_u32(37, 0);
    }
    if let Some(qdisc) = &link.qdisc {
        message = message.with_text(6, qdisc);
    }
    if let Some(controller) = link.controller {
        message = message.with_u32(10, controller);
    }
    if let Some(kind) = &link.kind {
        message = message.with_nested(18, Attributes::default().with_text(1, kind));
    }
    let names = link.altnames.iter().fold(Attributes::default(), |names, name| names.with_text(53, name));
    message.with_nested(52, names)
}

/// The boot id with which the journal is read.
const BOOT: &str = "3f1c9a52-0d52-4c1b-9e0a-6f4b7f1d2c33";

/// The journal of original values. Input: a file; or after a zero byte the lines of one, to which a valid header is
/// added.
///
/// Property: a parsed journal is the same after writing and parsing it again; a file without its last byte is refused;
/// an error names the file.
pub fn journal(data: &[u8]) {
    let sealed = data.strip_prefix(b"\0").and_then(|body| std::str::from_utf8(body).ok()).map(|body| {
        let (checksum, entries) = (journal::checksum(BOOT, body), body.lines().count());
        format!("{{\"format\":1,\"boot_id\":\"{BOOT}\",\"entries\":{entries},\"checksum\":\"{checksum}\"}}\n{body}")
    });
    let file = sealed.as_deref().map_or(data, str::as_bytes);
    let originals = match Originals::parse(file, BOOT) {
        Ok(originals) => originals,
        Err(error) => {
            assert!(matches!(error, JournalError::OtherVersion { .. } | JournalError::Damaged { .. }), "{error}");
            return assert!(error.to_string().starts_with(journal::DEFAULT_PATH));
        }
    };
    for entry in originals.entries() {
        assert!(originals.has(&entry.knob) && originals.original(&entry.knob).is_some());
        let _ = (entry.knob.to_string(), entry.value.to_string());
    }
    assert!(originals.by_key().len() <= originals.entries().len());
    if originals.entries().is_empty() {
        return;
    }
    let text = journal::format(BOOT, &[], originals.entries()).unwrap();
    assert_eq!(Originals::parse(text.as_bytes(), BOOT).unwrap().entries(), originals.entries());
    let mut torn = text.into_bytes();
    torn.pop();
    assert!(Originals::parse(&torn, BOOT).is_err(), "a torn file is taken for whole");
}
