//! From events to findings: requests with their segments, inversions, and the worst requests in full.
//!
//! Input: a [`Watch`], and events in time order. Output: a [`Findings`] that grows, and each request when it completes.
//! Memory is bounded: samples of the last [`SAMPLES`] requests per path, [`Analyser::keep`] worst requests,
//! [`CULPRITS`] named inversions.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use ontime_hostnet::RuleId;
use serde::Serialize;

use crate::event::{Event, EventKind, Name, policy};
use crate::format::Probe;
use crate::inversion::{Inversion, Judge, Kind};
use crate::path::{PathRole, Watch};
use crate::request::{Assembler, Counts, Request, Segment};
use crate::timeline::{Slice, Timeline};
use crate::waits::{Wait, Waits};

/// Most requests per path whose times are kept for the percentiles.
pub const SAMPLES: usize = 1 << 20;
/// Most distinct inversions; further ones are only counted.
pub(crate) const CULPRITS: usize = 256;
/// Most slices per CPU that are kept for one of the worst requests.
const PICTURED: usize = 400;

/// Times of the last requests of a path, ns.
#[derive(Debug, Clone, Default)]
pub struct Samples {
    /// From begin to done.
    pub total: VecDeque<u64>,
    /// Per segment.
    pub segments: [VecDeque<u64>; 3],
    /// Time that a vCPU, or a container's thread, was runnable but did not run: the guest sees it as steal time. Empty
    /// if only segments are traced.
    pub stolen: VecDeque<u64>,
}

impl Samples {
    fn add(&mut self, request: &Request, stolen: Option<u64>) {
        let push = |queue: &mut VecDeque<u64>, value| {
            if queue.len() == SAMPLES {
                queue.pop_front();
            }
            queue.push_back(value);
        };
        push(&mut self.total, request.total());
        for (queue, segment) in self.segments.iter_mut().zip(Segment::ALL) {
            push(queue, request.segment(segment));
        }
        stolen.into_iter().for_each(|stolen| push(&mut self.stolen, stolen));
    }
}

/// Identifies an inversion: equal values are the same finding.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Culprit {
    /// The path's index in the watch.
    pub path: usize,
    /// How the request was delayed.
    pub kind: Kind,
    /// The segment in which the delay began.
    pub segment: Segment,
    /// The delayed thread: role, name and policy; none for the packet itself.
    pub waiter: Option<(PathRole, Name, String)>,
    /// The blocking thread: name and policy.
    pub blocker: (Name, String),
    /// What the blocking thread did.
    pub place: String,
}

/// How often and how long an inversion occurred.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Tally {
    /// Number of delayed requests.
    pub requests: u64,
    /// Total delay, ns.
    pub total_ns: u64,
    /// Longest delay, ns.
    pub max_ns: u64,
    /// Description of the longest one.
    pub example: String,
    /// The rule of `ontime doctor`.
    pub rule: Option<RuleId>,
    /// What to do about it: the setting of the rule, or other advice.
    pub cure: &'static str,
}

/// One of the worst requests in full.
#[derive(Debug, Clone)]
pub struct Detail {
    /// When it passed each station.
    pub request: Request,
    /// Its inversions, longest first.
    pub inversions: Vec<Inversion>,
    /// The waits of its threads.
    pub waits: Vec<Wait>,
    /// What its CPUs did meanwhile; at most [`PICTURED`] slices each.
    pub cpus: Vec<(u32, Vec<Slice>)>,
    /// Number of slices that are left out.
    pub left_out: usize,
    /// Steal time or SMIs at that time.
    pub hint: Option<String>,
}

/// What the analysis has found so far.
#[derive(Debug, Default)]
pub struct Findings {
    /// By path.
    pub samples: Vec<Samples>,
    /// The longest request of each path, ns.
    pub max_ns: Vec<u64>,
    /// Inversions by identity.
    pub culprits: BTreeMap<Culprit, Tally>,
    /// Inversions beyond [`CULPRITS`].
    pub unnamed: u64,
    /// Requests with at least one inversion.
    pub hindered: u64,
    /// The worst requests, slowest first.
    pub worst: Vec<Detail>,
    /// Events by probe.
    pub events: BTreeMap<&'static str, u64>,
    /// Lost events by CPU: a lower bound.
    pub lost: BTreeMap<u32, u64>,
    /// Time of the first and of the last event, ns.
    pub span: Option<(u64, u64)>,
}

/// Finds requests, their segments and their inversions in a stream of events.
#[derive(Debug)]
pub struct Analyser {
    watch: Watch,
    timeline: Timeline,
    waits: Waits,
    assemblers: Vec<Assembler>,
    floor: u64,
    keep: usize,
    findings: Findings,
}

impl Analyser {
    /// Analyses the paths of a watch. Delays of less than `floor` ns are no inversions. Keeps the `keep` worst
    /// requests.
    pub fn new(watch: Watch, floor: u64, keep: usize) -> Self {
        let paths = watch.paths.len();
        let mut analyser = Self {
            watch: Watch::default(),
            timeline: Timeline::default(),
            waits: Waits::default(),
            assemblers: (0..paths).map(|_| Assembler::default()).collect(),
            floor,
            keep,
            findings: Findings {
                samples: vec![Samples::default(); paths],
                max_ns: vec![0; paths],
                ..Findings::default()
            },
        };
        analyser.rewatch(watch);
        analyser
    }

    /// Continues with other threads on the same paths, after a restart of a tenant.
    pub fn rewatch(&mut self, watch: Watch) {
        let threads: BTreeSet<i32> = watch.paths.iter().flat_map(|path| path.threads.keys().copied()).collect();
        self.waits.watch(threads);
        self.watch = watch;
    }

    /// The watched paths.
    pub fn watch(&self) -> &Watch {
        &self.watch
    }

    /// The findings so far.
    pub fn findings(&self) -> &Findings {
        &self.findings
    }

    /// Requests that could not be analysed, by path.
    pub fn counts(&self) -> Vec<Counts> {
        self.assemblers.iter().map(Assembler::counts).collect()
    }

    /// Number of worst requests that are kept.
    pub fn keep(&self) -> usize {
        self.keep
    }

    /// Processes an event and returns the requests that it completes.
    pub fn step(&mut self, event: &Event) -> Vec<Request> {
        self.count(event);
        self.timeline.step(event);
        self.waits.step(event);
        let done: Vec<Request> = (self.assemblers.iter_mut().zip(&self.watch.paths).enumerate())
            .filter_map(|(index, (assembler, path))| assembler.step(index, path, event))
            .collect();
        done.iter().for_each(|request| self.complete(request));
        done
    }

    /// Adds a hint about the cause to the worst requests in this time, ns.
    pub fn hint(&mut self, from: u64, to: u64, words: &str) {
        let inside = |detail: &&mut Detail| detail.request.done >= from && detail.request.begin <= to;
        self.findings.worst.iter_mut().filter(inside).for_each(|detail| detail.hint = Some(words.to_owned()));
    }

    fn count(&mut self, event: &Event) {
        let findings = &mut self.findings;
        let from = findings.span.map_or(event.time, |(from, _)| from);
        findings.span = Some((from, event.time));
        match probe(&event.what) {
            Some(probe) => *findings.events.entry(probe.path()).or_default() += 1,
            None => {
                if let EventKind::Lost { count } = event.what {
                    *findings.lost.entry(event.cpu).or_default() += count;
                }
            }
        }
    }

    fn complete(&mut self, request: &Request) {
        let judge = Judge { watch: &self.watch, timeline: &self.timeline, waits: &self.waits, floor: self.floor };
        let inversions = judge.inversions(request);
        let Some(path) = self.watch.paths.get(request.path) else { return };
        let waits = judge.waits_of(path, request);
        let guest = |wait: &&Wait| matches!(path.threads.get(&wait.task.pid), Some(PathRole::Vcpu | PathRole::App));
        let stolen = waits.iter().filter(guest).map(|wait| wait.end - wait.start).sum();
        if let Some(samples) = self.findings.samples.get_mut(request.path) {
            samples.add(request, (!path.segments_only).then_some(stolen));
        }
        if let Some(max) = self.findings.max_ns.get_mut(request.path) {
            *max = request.total().max(*max);
        }
        self.findings.hindered += u64::from(!inversions.is_empty());
        inversions.iter().for_each(|inversion| self.findings.tally(request, inversion));
        let worst = &mut self.findings.worst;
        let place = worst.partition_point(|detail| detail.request.total() >= request.total());
        if place < self.keep {
            worst.insert(place, detail(request, inversions, waits, &self.timeline));
            worst.truncate(self.keep);
        }
    }
}

impl Findings {
    fn tally(&mut self, request: &Request, inversion: &Inversion) {
        let culprit = Culprit {
            path: request.path,
            kind: inversion.kind,
            segment: inversion.segment,
            waiter: inversion.waiter.map(|waiter| (waiter.role, waiter.task.comm, waiter.task.policy())),
            blocker: (inversion.blocker.comm, policy(inversion.blocker.prio)),
            place: inversion.place.text(),
        };
        if self.culprits.len() >= CULPRITS && !self.culprits.contains_key(&culprit) {
            self.unnamed += 1;
            return;
        }
        let tally = self.culprits.entry(culprit).or_insert_with(|| Tally {
            requests: 0,
            total_ns: 0,
            max_ns: 0,
            example: String::new(),
            rule: None,
            cure: "",
        });
        tally.requests += 1;
        tally.total_ns += inversion.ns;
        if inversion.ns > tally.max_ns {
            tally.max_ns = inversion.ns;
            tally.example = inversion.text();
            (tally.rule, tally.cure) = (inversion.cure.rule, inversion.cure.text());
        }
    }
}

fn detail(request: &Request, inversions: Vec<Inversion>, waits: Vec<Wait>, timeline: &Timeline) -> Detail {
    let mut left_out = 0;
    let cpus = timeline.cpus().into_iter().map(|cpu| {
        let mut slices: Vec<Slice> = timeline.slices(cpu, request.begin, request.done).collect();
        let now = timeline.current(cpu, request.done);
        slices.extend(now.map(|slice| Slice { start: slice.start.max(request.begin), ..slice }));
        left_out += slices.len().saturating_sub(PICTURED);
        // The shortest slices are the least visible.
        if slices.len() > PICTURED {
            slices.sort_by_key(|slice| slice.start.wrapping_sub(slice.end));
            slices.truncate(PICTURED);
            slices.sort_by_key(|slice| slice.start);
        }
        (cpu, slices)
    });
    let cpus = cpus.filter(|(_, slices)| !slices.is_empty()).collect();
    Detail { request: *request, inversions, waits, cpus, left_out, hint: None }
}

pub(crate) fn probe(what: &EventKind) -> Option<Probe> {
    Some(match what {
        EventKind::IrqEntry { .. } => Probe::IrqEntry,
        EventKind::IrqExit { .. } => Probe::IrqExit,
        EventKind::SoftirqEntry { .. } => Probe::SoftirqEntry,
        EventKind::SoftirqExit { .. } => Probe::SoftirqExit,
        EventKind::NapiPoll { .. } => Probe::NapiPoll,
        EventKind::Receive { .. } => Probe::Receive,
        EventKind::Queue { .. } => Probe::Queue,
        EventKind::StartXmit { .. } => Probe::StartXmit,
        EventKind::Xmit { .. } => Probe::Xmit,
        EventKind::Switch { .. } => Probe::Switch,
        EventKind::Waking { .. } => Probe::Waking,
        EventKind::KvmEntry => Probe::KvmEntry,
        EventKind::KvmExit { .. } => Probe::KvmExit,
        EventKind::Interrupt { .. } => Probe::Interrupt,
        EventKind::TimerStart { .. } => Probe::TimerStart,
        EventKind::TimerExpire { .. } => Probe::TimerExpire,
        EventKind::Lost { .. } => return None,
    })
}
