//! The worst requests for ui.perfetto.dev, as a TrackEvent trace.
//!
//! Input: an [`Analyser`]. Output: protobuf. Perfetto recommends TrackEvent and keeps its JSON format only for legacy
//! traces (perfetto.dev, FAQ: "The JSON trace format is considered a legacy trace format"). The messages contain the
//! few needed fields of `protos/perfetto/trace/trace_packet.proto`, `track_event.proto`, `track_descriptor.proto` and
//! `debug_annotation.proto`, with their field numbers.
//!
//! Tracks: per tenant, a group with its requests and segments, its threads' waits and the inversions; and a group with
//! the slices of each CPU. Times are CLOCK_MONOTONIC without a clock id, as the documentation recommends for converted
//! traces. If requests overlap, the later one is cut.

use std::collections::BTreeMap;

use prost::Message;

use crate::analyser::{Analyser, Detail};
use crate::event::policy;
use crate::request::Segment;

#[derive(Clone, PartialEq, Message)]
struct Trace {
    #[prost(message, repeated, tag = "1")]
    packet: Vec<Packet>,
}

#[derive(Clone, PartialEq, Message)]
struct Packet {
    #[prost(uint64, optional, tag = "8")]
    timestamp: Option<u64>,
    #[prost(uint32, optional, tag = "10")]
    trusted_packet_sequence_id: Option<u32>,
    #[prost(message, optional, tag = "11")]
    track_event: Option<TrackEvent>,
    #[prost(message, optional, tag = "60")]
    track_descriptor: Option<TrackDescriptor>,
}

#[derive(Clone, PartialEq, Message)]
struct TrackEvent {
    #[prost(message, repeated, tag = "4")]
    debug_annotations: Vec<Annotation>,
    #[prost(int32, optional, tag = "9")]
    r#type: Option<i32>,
    #[prost(uint64, optional, tag = "11")]
    track_uuid: Option<u64>,
    #[prost(string, repeated, tag = "22")]
    categories: Vec<String>,
    #[prost(string, optional, tag = "23")]
    name: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
struct Annotation {
    #[prost(string, optional, tag = "6")]
    string_value: Option<String>,
    #[prost(string, optional, tag = "10")]
    name: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
struct TrackDescriptor {
    #[prost(uint64, optional, tag = "1")]
    uuid: Option<u64>,
    #[prost(string, optional, tag = "2")]
    name: Option<String>,
    #[prost(uint64, optional, tag = "5")]
    parent_uuid: Option<u64>,
}

/// `TrackEvent.Type`: begin of a slice.
const BEGIN: i32 = 1;
/// End of a slice.
const END: i32 = 2;
/// Sequence id: there is only one writer.
const SEQUENCE: u32 = 1;

/// A slice of a track: name, start, end, annotations.
type Span = (String, u64, u64, Vec<(&'static str, String)>);

/// The worst requests as a Perfetto trace.
pub fn perfetto(analyser: &Analyser) -> Vec<u8> {
    let mut tracks: BTreeMap<(String, String), Vec<Span>> = BTreeMap::new();
    // A CPU's slice may be in several requests.
    for detail in &analyser.findings().worst {
        let tenant = analyser.watch().paths.get(detail.request.path).map_or("", |path| path.tenant.as_str());
        of_tenant(detail, &format!("tenant {tenant}"), &mut tracks);
        of_cpus(detail, &mut tracks);
    }
    let mut packet = Vec::new();
    let mut groups: BTreeMap<String, u64> = BTreeMap::new();
    for ((group, name), mut spans) in tracks {
        let next = groups.len() as u64 + 1;
        let parent = *groups.entry(group.clone()).or_insert_with(|| {
            packet.push(track(next, &group, None));
            next
        });
        let uuid = 1_000 + packet.len() as u64;
        packet.push(track(uuid, &name, Some(parent)));
        spans.sort_by_key(|(_, start, end, _)| (*start, u64::MAX - *end));
        spans.dedup_by(|a, b| a.0 == b.0 && a.1 == b.1 && a.2 == b.2);
        nest(uuid, spans, &mut packet);
    }
    Trace { packet }.encode_to_vec()
}

/// Emits begins and ends in order. A slice that exceeds the enclosing one is cut, as the format requires.
fn nest(uuid: u64, spans: Vec<Span>, packet: &mut Vec<Packet>) {
    let mut open: Vec<u64> = Vec::new();
    for (name, start, end, notes) in spans {
        while let Some(outer) = open.last().copied().filter(|outer| *outer <= start) {
            packet.push(event(uuid, END, outer, None, Vec::new()));
            open.pop();
        }
        let end = open.last().map_or(end, |outer| end.min(*outer));
        packet.push(event(uuid, BEGIN, start, Some(name), notes));
        open.push(end);
    }
    while let Some(end) = open.pop() {
        packet.push(event(uuid, END, end, None, Vec::new()));
    }
}

fn of_tenant(detail: &Detail, group: &str, tracks: &mut BTreeMap<(String, String), Vec<Span>>) {
    let request = &detail.request;
    let mut add = |track: &str, span: Span| tracks.entry((group.to_owned(), track.to_owned())).or_default().push(span);
    let us = |ns: u64| format!("{:.1} us", ns as f64 / 1e3);
    let words = detail.inversions.iter().map(|inversion| ("inversion", inversion.text())).collect();
    add("requests", (format!("request {}", us(request.total())), request.begin, request.done, words));
    let borders = [request.begin, request.entered, request.left, request.done];
    for (segment, border) in Segment::ALL.into_iter().zip(borders.windows(2)) {
        if let [from, to] = border {
            add("segments", (segment.name().to_owned(), *from, *to, Vec::new()));
        }
    }
    for wait in &detail.waits {
        let notes = vec![("policy", wait.task.policy()), ("cpu", wait.cpu.to_string())];
        let track = format!("{} ({})", wait.task.comm, wait.task.pid);
        add(&track, ("runnable, waiting".to_owned(), wait.start, wait.end, notes));
    }
}

fn of_cpus(detail: &Detail, tracks: &mut BTreeMap<(String, String), Vec<Span>>) {
    for (cpu, slices) in &detail.cpus {
        let track = tracks.entry(("CPUs".to_owned(), format!("CPU {cpu:03}"))).or_default();
        for slice in slices {
            let notes = vec![("policy", policy(slice.task.prio)), ("tid", slice.task.pid.to_string())];
            track.push((format!("{}: {}", slice.task.comm, slice.place.text()), slice.start, slice.end, notes));
        }
    }
}

fn track(uuid: u64, name: &str, parent: Option<u64>) -> Packet {
    let descriptor = TrackDescriptor { uuid: Some(uuid), name: Some(name.to_owned()), parent_uuid: parent };
    Packet { trusted_packet_sequence_id: Some(SEQUENCE), track_descriptor: Some(descriptor), ..Packet::default() }
}

fn event(uuid: u64, kind: i32, time: u64, name: Option<String>, notes: Vec<(&'static str, String)>) -> Packet {
    let debug_annotations = notes
        .into_iter()
        .map(|(name, text)| Annotation { name: Some(name.to_owned()), string_value: Some(text) })
        .collect();
    let categories = if kind == BEGIN { vec!["ontime".to_owned()] } else { Vec::new() };
    Packet {
        timestamp: Some(time),
        trusted_packet_sequence_id: Some(SEQUENCE),
        track_event: Some(TrackEvent {
            debug_annotations,
            r#type: Some(kind),
            track_uuid: Some(uuid),
            categories,
            name,
        }),
        ..Packet::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_nest_and_every_begin_has_its_end() {
        let spans = [(0, 100), (10, 50), (40, 120), (200, 210)];
        let spans = spans.map(|(start, end)| ("x".to_owned(), start, end, Vec::new())).to_vec();
        let mut packets = Vec::new();
        nest(7, spans, &mut packets);
        let mut depth = 0;
        let mut last = 0;
        for packet in &packets {
            let event = packet.track_event.as_ref().unwrap();
            assert!(packet.timestamp.unwrap() >= last);
            last = packet.timestamp.unwrap();
            depth += if event.r#type == Some(BEGIN) { 1 } else { -1 };
            assert!(depth >= 0);
        }
        assert_eq!((depth, packets.len()), (0, 8));
    }
}
