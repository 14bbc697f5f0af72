//! The worst requests for ui.perfetto.dev: a TrackEvent trace.
//!
//! In: an [`Analyser`]. Out: protobuf. Perfetto's own documentation recommends TrackEvent and keeps its JSON form for
//! legacy traces only (perfetto.dev, FAQ: "The JSON trace format is considered a legacy trace format"). The messages
//! are the few fields needed of `protos/perfetto/trace/trace_packet.proto`, `track_event.proto`,
//! `track_descriptor.proto` and `debug_annotation.proto`, by their numbers there.
//!
//! Tracks: a group a tenant with its requests and their segments, its threads' waits and what was in the way; a group
//! of the CPUs with what each did. Times are the machine's CLOCK_MONOTONIC, given without a clock, as the documentation
//! does for traces converted from elsewhere. Of requests that were under way together the later one is cut.

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

/// `TrackEvent.Type`: a slice begins.
const BEGIN: i32 = 1;
/// It ends.
const END: i32 = 2;
/// One writer wrote it all.
const SEQUENCE: u32 = 1;

/// Slices of one track: name, from, to, annotations.
type Span = (String, u64, u64, Vec<(&'static str, String)>);

/// The worst requests as a Perfetto trace.
pub fn perfetto(analyser: &Analyser) -> Vec<u8> {
    let mut tracks: BTreeMap<(String, String), Vec<Span>> = BTreeMap::new();
    // A CPU's slice may be in the pictures of several requests.
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

/// Begins and ends in order; a slice that would outlive the one it is in is cut, as the format demands.
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
