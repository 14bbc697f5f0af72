//! Finds what delayed a request, and the cure.
//!
//! Input: a request, the CPUs' timeline, the threads' waits, the classes of threads and NICs. Output: [`Inversion`]s.
//!
//! No inversions are: the path's own threads, threads of tenants of its level or a more urgent one, and an idle CPU. No
//! time is counted twice: time that a thread's wait explains is not counted for the packet as well.

use ontime_hostnet::{RULES, RuleId};
use ontime_tenants::Class;
use serde::Serialize;

use crate::event::{BACKLOG, NET_RX, NET_TX, Name, Task};
use crate::path::{Path, PathRole, Watch};
use crate::request::{Request, Segment};
use crate::timeline::{CpuContext, Slice, Timeline};
use crate::waits::{Wait, Waits};

/// The daemon's thread that enforces the runtime caps (`crates/ontime/src/daemon/cap`).
const WATCHER: &str = "ontime-cap";

// Cures without a rule.
const WATCHED: &str = "Ontime's own cap watcher: above every RT thread, so that it can stop one that spins; by right, \
    and not for nothing. A longer cap.period-ms makes it rarer (daemon.toml)";
const PAUSED: &str = "the runtime cap paused it: it, or the RT threads of its CPU together, had used up their share, \
    and the rest is everybody else's (cap.cpu-share in daemon.toml). More CPUs, or one of its own: exclusive-cpu, \
    poll_cpu for a NIC that is polled";
const OUTSIDE: &str = "a real-time thread outside Ontime's table: lower its priority, or give its tenant a class \
    (ontime ps, ontime doctor)";
const LENT: &str = "a bulk thread at a real-time priority, which it has by inheritance while an RT thread waits for \
    its lock (a queue's or driver's that both send by: an own NIC or transmit queue for RT keeps these apart), or \
    which another program gave it (ontime ps)";
const SECTION: &str = "a thread of lower priority held the CPU in a kernel section that cannot be preempted: a \
    PREEMPT_RT kernel, or a CPU of its own (exclusive-cpu)";
const NOBODY_WOKEN: &str =
    "the NIC's NAPI has a thread that had not been woken yet: the NIC said late that there was a packet (ethtool -c)";

/// How a request was delayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A thread of the path was runnable while another thread ran on its CPU.
    Waited,
    /// A thread of the path did other work: another NIC's poll, a foreign softirq, an interrupt.
    Foreign,
    /// The packet waited on the CPU between interrupt and hand-over, and no thread of the path was runnable to process
    /// it.
    Held,
    /// The reply was delayed between the NIC's qdisc and its driver.
    Queued,
}

/// A delay of one request by other work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Inversion {
    /// How the request was delayed.
    pub kind: Kind,
    /// The segment in which the delay began.
    pub segment: Segment,
    /// Start, CLOCK_MONOTONIC, ns.
    pub start: u64,
    /// Total duration, ns.
    pub ns: u64,
    /// The CPU on which it happened.
    pub cpu: u32,
    /// The delayed thread of the path; none for the packet itself.
    pub waiter: Option<Waiter>,
    /// The blocking thread.
    pub blocker: Task,
    /// What the blocking thread did.
    pub place: CpuContext,
    /// What to do about it.
    pub cure: Cure,
}

/// A delayed thread of the path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Waiter {
    /// The part of the path that it serves.
    pub role: PathRole,
    /// The delayed thread.
    #[serde(flatten)]
    pub task: Task,
}

/// The cure: a rule of `ontime doctor`, if one is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct Cure {
    /// The rule of `ontime doctor` and docs/reference/hostnet.md.
    pub rule: Option<RuleId>,
    /// The text, if there is no rule.
    text: &'static str,
}

impl Cure {
    const fn rule(rule: RuleId) -> Self {
        Self { rule: Some(rule), text: "" }
    }

    pub(crate) const fn other(text: &'static str) -> Self {
        Self { rule: None, text }
    }

    /// As text.
    pub fn text(&self) -> &'static str {
        let rule = RULES.iter().find(|rule| Some(rule.id) == self.rule);
        rule.map_or(self.text, |rule| rule.cure)
    }
}

impl Inversion {
    /// As one line: the delayed thread, duration, blocking thread, position.
    pub fn text(&self) -> String {
        let us = self.ns as f64 / 1e3;
        let behind = doing(&self.blocker, &self.place);
        let who = |waiter: &Waiter| {
            format!("{} {} ({}, {})", waiter.role.text(), waiter.task.comm, waiter.task.pid, waiter.task.policy())
        };
        let (cpu, segment) = (self.cpu, self.segment.name());
        match (self.kind, &self.waiter) {
            (Kind::Foreign, Some(waiter)) => {
                format!("{} did {} for {us:.0} us on CPU {cpu}, {segment}", who(waiter), self.place.text())
            }
            (Kind::Queued, _) => {
                format!("the reply took {us:.0} us from the NIC's qdisc to its driver on CPU {cpu}, {segment}")
            }
            (_, Some(waiter)) => format!("{} waited {us:.0} us behind {behind} on CPU {cpu}, {segment}", who(waiter)),
            (_, None) => format!("the packet waited {us:.0} us behind {behind} on CPU {cpu}, {segment}"),
        }
    }
}

/// The data for the analysis.
#[derive(Debug, Clone, Copy)]
pub struct Judge<'a> {
    /// Paths and classes.
    pub watch: &'a Watch,
    /// The CPUs' past slices.
    pub timeline: &'a Timeline,
    /// The threads' waits.
    pub waits: &'a Waits,
    /// Shorter delays are the ordinary cost of context switches, ns.
    pub floor: u64,
}

impl Judge<'_> {
    /// The inversions of a request, longest first.
    pub fn inversions(&self, request: &Request) -> Vec<Inversion> {
        // If only segments are traced, no thread can be blamed or excluded.
        let Some(path) = self.watch.paths.get(request.path).filter(|path| !path.segments_only) else {
            return Vec::new();
        };
        let waits: Vec<Wait> = self.waits_of(path, request);
        let mut found = Vec::new();
        for wait in &waits {
            self.waited(path, request, wait, &mut found);
        }
        self.held(path, request, &waits, &mut found);
        for cpu in self.timeline.cpus() {
            self.foreign(path, request, cpu, &waits, &mut found);
        }
        self.queued(request, &waits, &mut found);
        found.retain(|inversion| inversion.ns >= self.floor);
        found.iter_mut().for_each(|inversion| inversion.cure = self.cure(path, inversion));
        found.sort_by_key(|inversion| std::cmp::Reverse(inversion.ns));
        found
    }

    /// Waits of the path's threads during the request.
    pub(crate) fn waits_of(&self, path: &Path, request: &Request) -> Vec<Wait> {
        let own = |wait: &Wait| path.threads.contains_key(&wait.task.pid);
        self.waits.within(request.begin, request.done).filter(own).collect()
    }

    fn waited(&self, path: &Path, request: &Request, wait: &Wait, found: &mut Vec<Inversion>) {
        let Some(role) = path.threads.get(&wait.task.pid) else { return };
        let waiter = Waiter { role: *role, task: wait.task };
        for slice in self.timeline.slices(wait.cpu, wait.start, wait.end) {
            if self.in_the_way(path, &slice) {
                add(found, Kind::Waited, request, wait.cpu, Some(waiter), &slice, slice.end - slice.start);
            }
        }
    }

    fn held(&self, path: &Path, request: &Request, waits: &[Wait], found: &mut Vec<Inversion>) {
        let cpu = request.receive_cpu;
        for slice in self.timeline.slices(cpu, request.begin, request.handed) {
            let own = path.threads.contains_key(&slice.task.pid);
            // Another thread's softirq may process the path's own packets.
            let moves_ours = matches!(slice.place, CpuContext::Napi(dev) if !self.is_bulk(dev));
            if !own && !moves_ours && self.in_the_way(path, &slice) {
                add(found, Kind::Held, request, cpu, None, &slice, unexplained(&slice, cpu, waits));
            }
        }
    }

    fn foreign(&self, path: &Path, request: &Request, cpu: u32, waits: &[Wait], found: &mut Vec<Inversion>) {
        for slice in self.timeline.slices(cpu, request.begin, request.done) {
            let Some(role) = path.threads.get(&slice.task.pid) else { continue };
            if self.is_foreign(path, slice.place) {
                let waiter = Waiter { role: *role, task: slice.task };
                add(found, Kind::Foreign, request, cpu, Some(waiter), &slice, unexplained(&slice, cpu, waits));
            }
        }
    }

    fn queued(&self, request: &Request, waits: &[Wait], found: &mut Vec<Inversion>) {
        let cpu = request.send_cpu;
        let nobody = Task { pid: 0, prio: 120, comm: Name::from("qdisc") };
        let slice = Slice { start: request.queued, end: request.driver, task: nobody, place: CpuContext::Thread };
        let ns = unexplained(&slice, cpu, waits);
        add(found, Kind::Queued, request, cpu, None, &slice, ns);
    }

    /// The cure: the rule that sets the table's priority for the blocking or the delayed thread.
    pub(crate) fn cure(&self, path: &Path, inversion: &Inversion) -> Cure {
        let Inversion { kind, place, blocker, waiter, .. } = inversion;
        if *kind == Kind::Queued {
            return Cure::rule(RuleId::RtTxQueue);
        }
        let named = |prefix: &str| blocker.comm.starts_with(prefix);
        match place {
            _ if named(WATCHER) => return Cure::other(WATCHED),
            _ if named("backlog_napi/") => return Cure::rule(RuleId::Backlog),
            CpuContext::Napi(dev) if *dev == Name::from(BACKLOG) => return Cure::rule(RuleId::Backlog),
            CpuContext::Napi(_) | CpuContext::Softirq(NET_RX | NET_TX) if !named("napi/") => {
                return Cure::rule(RuleId::NapiThreaded);
            }
            CpuContext::Irq { .. } => return Cure::rule(RuleId::ExclusiveCpu),
            CpuContext::Softirq(_) => return Cure::rule(RuleId::SoftirqThreads),
            _ => {}
        }
        let of_bulk = self.watch.classes.get(&blocker.pid) == Some(&Class::Bulk);
        // At any priority: its own, or one inherited from a thread that waits for the lock.
        if self.watch.shared_lock && of_bulk && matches!(place, CpuContext::Thread | CpuContext::Napi(_)) {
            match () {
                () if named("vhost-") => return Cure::rule(RuleId::TapBatch),
                () if named("napi/") => return Cure::rule(RuleId::NapiWeight),
                () => {}
            }
        }
        // A thread below the delayed one is already at the table's priority.
        let above = waiter.is_none_or(|waiter| blocker.prio <= waiter.task.prio);
        let of_a_nic = self.watch.classes.contains_key(&blocker.pid);
        match () {
            () if named("napi/") && above => return Cure::rule(RuleId::NapiThread),
            () if named("irq/") && above && of_a_nic => return Cure::rule(RuleId::IrqThread),
            () if named("irq/") && above => return Cure::rule(RuleId::DeviceIrq),
            () if ["ksoftirqd/", "ktimers/", "rcuc/"].into_iter().any(named) => {
                return Cure::rule(RuleId::SoftirqThreads);
            }
            () => {}
        }
        if !blocker.is_rt() && self.is_pause(inversion) {
            return Cure::other(PAUSED);
        }
        match waiter {
            // The delayed thread is not at the table's priority.
            Some(waiter) if !waiter.task.is_rt() => Cure::rule(match waiter.role {
                PathRole::Irq => RuleId::IrqThread,
                PathRole::Napi => RuleId::NapiThread,
                PathRole::Vhost => RuleId::VnicPlace,
                PathRole::Vcpu | PathRole::App => RuleId::VcpuPlace,
            }),
            _ if blocker.is_rt() && of_bulk => Cure::other(LENT),
            _ if blocker.is_rt() => Cure::other(OUTSIDE),
            // Longer than a non-preemptible kernel section: the fair server or RT throttling.
            Some(_) if inversion.ns > 1_000_000 => Cure::rule(RuleId::RtProtections),
            Some(_) => Cure::other(SECTION),
            None if path.has(PathRole::Napi) => Cure::other(NOBODY_WOKEN),
            // In softirq, by any thread that runs it.
            None => Cure::rule(RuleId::NapiThreaded),
        }
    }

    /// Whether the cap watcher ran immediately before: it has lowered the delayed thread's priority.
    fn is_pause(&self, inversion: &Inversion) -> bool {
        let Inversion { cpu, start, waiter, .. } = inversion;
        let mut before = self.timeline.slices(*cpu, start.saturating_sub(1), *start);
        waiter.is_some_and(|waiter| waiter.task.is_rt()) && before.any(|slice| slice.task.comm.starts_with(WATCHER))
    }

    /// Whether a slice delays the path without being entitled to run.
    fn in_the_way(&self, path: &Path, slice: &Slice) -> bool {
        let Task { pid, .. } = slice.task;
        if pid == 0 && slice.place == CpuContext::Thread {
            return false;
        }
        let entitled = match (self.watch.classes.get(&pid), path.class) {
            (Some(Class::Rt(other)), Class::Rt(own)) => *other <= own,
            (Some(Class::Rt(_)), Class::Bulk) => true,
            _ => false,
        };
        if path.threads.contains_key(&pid) || entitled { self.is_foreign(path, slice.place) } else { true }
    }

    /// Whether a context of an entitled thread serves other tenants.
    fn is_foreign(&self, path: &Path, place: CpuContext) -> bool {
        match place {
            CpuContext::Thread | CpuContext::Softirq(NET_RX | NET_TX) => false,
            CpuContext::Softirq(_) => true,
            CpuContext::Irq { irq, .. } => !path.irqs.contains(&irq),
            CpuContext::Napi(dev) => self.is_bulk(dev),
        }
    }

    fn is_bulk(&self, dev: Name) -> bool {
        dev != Name::from(BACKLOG) && !self.watch.rt_nics.contains(&dev)
    }
}

/// A thread, and what its CPU did for it.
pub(crate) fn doing(task: &Task, place: &CpuContext) -> String {
    format!("{} ({}, {}) in {}", task.comm, task.pid, task.policy(), place.text())
}

/// The part of a slice that no wait explains, ns.
fn unexplained(slice: &Slice, cpu: u32, waits: &[Wait]) -> u64 {
    let mut spans: Vec<(u64, u64)> =
        waits.iter().filter(|wait| wait.cpu == cpu).map(|wait| (wait.start, wait.end)).collect();
    spans.sort_unstable();
    let (mut left, mut from) = (0, slice.start);
    for (start, end) in spans {
        left += start.min(slice.end).saturating_sub(from);
        from = from.max(end);
    }
    left + slice.end.saturating_sub(from)
}

/// Adds a slice. Slices of the same thread with the same work become one inversion.
fn add(
    found: &mut Vec<Inversion>,
    kind: Kind,
    request: &Request,
    cpu: u32,
    waiter: Option<Waiter>,
    slice: &Slice,
    ns: u64,
) {
    if ns == 0 {
        return;
    }
    let same = |other: &&mut Inversion| {
        other.kind == kind
            && other.cpu == cpu
            && other.waiter.map(|waiter| waiter.task.pid) == waiter.map(|waiter| waiter.task.pid)
            && other.blocker.pid == slice.task.pid
            && same_work(other.place, slice.place)
    };
    if let Some(other) = found.iter_mut().find(same) {
        other.ns += ns;
        // A poll is more specific than the softirq around it.
        if matches!(slice.place, CpuContext::Napi(_)) {
            other.place = slice.place;
        }
        return;
    }
    found.push(Inversion {
        kind,
        segment: request.at(slice.start),
        start: slice.start,
        ns,
        cpu,
        waiter,
        blocker: slice.task,
        place: slice.place,
        cure: Cure::other(""),
    });
}

/// Parts of a softirq and the polls in it are the same work.
pub(crate) fn same_work(a: CpuContext, b: CpuContext) -> bool {
    a == b
        || matches!(
            (a, b),
            (CpuContext::Napi(_), CpuContext::Softirq(NET_RX)) | (CpuContext::Softirq(NET_RX), CpuContext::Napi(_))
        )
}
