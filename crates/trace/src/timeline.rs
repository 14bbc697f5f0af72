//! What each CPU did, as slices: which thread, and in which context.
//!
//! Input: events in time order. Output: [`Slice`]s of the recent past, a bounded number per CPU.
//!
//! `napi_poll` is recorded at the end of a poll. So the time since the previous poll, the softirq's entry or the
//! thread's last switch belongs to that poll. On PREEMPT_RT a softirq belongs to the thread that runs it and is
//! preempted together with it (`kernel/softirq.c`, `__local_bh_enable_ip`).

use std::collections::{HashMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::event::{BACKLOG, Event, EventKind, Name, Task, softirq_name};

/// Slices kept per CPU: a few hundred milliseconds during a flood.
const KEPT: usize = 16_384;
/// Most nested softirq vectors per thread; more than the kernel ever nests.
const NESTED: usize = 8;

/// The context of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CpuContext {
    /// Its own code.
    Thread,
    /// A hard interrupt's handler that interrupted the thread.
    Irq {
        /// The number in `/proc/interrupts`.
        irq: u32,
        /// The name of the handler, such as `eth0-TxRx-3`.
        name: Name,
    },
    /// A softirq that the thread runs.
    Softirq(u32),
    /// A poll of this interface's NAPI that the thread runs.
    Napi(Name),
}

impl CpuContext {
    /// As text.
    pub fn text(&self) -> String {
        match self {
            CpuContext::Thread => "its own code".to_owned(),
            CpuContext::Irq { irq, name } => format!("interrupt {irq} ({name})"),
            CpuContext::Softirq(vec) => format!("softirq {}", softirq_name(*vec)),
            CpuContext::Napi(dev) if *dev == Name::from(BACKLOG) => "the per-CPU backlog".to_owned(),
            CpuContext::Napi(dev) => format!("NAPI of {dev}"),
        }
    }
}

/// A time in which a CPU was in one context of one thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slice {
    /// Start, CLOCK_MONOTONIC, ns.
    pub start: u64,
    /// End (exclusive), ns.
    pub end: u64,
    /// The thread that had the CPU.
    pub task: Task,
    /// What the CPU did for it.
    pub place: CpuContext,
}

#[derive(Debug, Default)]
struct Cpu {
    /// The running thread, once a switch has shown it.
    task: Option<Task>,
    since: u64,
    irq: Option<(u32, Name)>,
    softirqs: Vec<u32>,
    past: VecDeque<Slice>,
}

impl Cpu {
    fn place(&self) -> CpuContext {
        match (self.irq, self.softirqs.last()) {
            (Some((irq, name)), _) => CpuContext::Irq { irq, name },
            (None, Some(vec)) => CpuContext::Softirq(*vec),
            (None, None) => CpuContext::Thread,
        }
    }

    fn close(&mut self, now: u64, place: CpuContext) {
        if let Some(task) = self.task.filter(|_| now > self.since) {
            if self.past.len() == KEPT {
                self.past.pop_front();
            }
            self.past.push_back(Slice { start: self.since, end: now, task, place });
        }
        self.since = self.since.max(now);
    }
}

/// The recent slices of all CPUs.
#[derive(Debug, Default)]
pub struct Timeline {
    cpus: HashMap<u32, Cpu>,
    /// Softirqs of threads that are preempted (PREEMPT_RT).
    preempted: HashMap<i32, Vec<u32>>,
}

impl Timeline {
    /// Processes an event.
    pub fn step(&mut self, event: &Event) {
        let cpu = self.cpus.entry(event.cpu).or_default();
        let place = cpu.place();
        match event.what {
            EventKind::Switch { prev, next, .. } => {
                cpu.close(event.time, place);
                let own = std::mem::take(&mut cpu.softirqs);
                // The idle threads share number 0; they run no softirq across a switch.
                if prev.pid != 0 && !own.is_empty() {
                    self.preempted.insert(prev.pid, own);
                }
                cpu.softirqs = self.preempted.remove(&next.pid).unwrap_or_default();
                cpu.irq = None;
                cpu.task = Some(next);
            }
            EventKind::IrqEntry { irq, name } => {
                cpu.close(event.time, place);
                cpu.irq = Some((irq, name));
            }
            EventKind::IrqExit { .. } => {
                cpu.close(event.time, place);
                cpu.irq = None;
            }
            EventKind::SoftirqEntry { vec } => {
                cpu.close(event.time, place);
                if cpu.softirqs.len() < NESTED {
                    cpu.softirqs.push(vec);
                }
            }
            EventKind::SoftirqExit { vec } => {
                cpu.close(event.time, place);
                if let Some(at) = cpu.softirqs.iter().rposition(|known| *known == vec) {
                    cpu.softirqs.truncate(at);
                }
            }
            EventKind::NapiPoll { dev, .. } if cpu.irq.is_none() => cpu.close(event.time, CpuContext::Napi(dev)),
            EventKind::Lost { .. } => {
                // Open contexts may have ended: start again at the next switch.
                *cpu = Cpu { past: std::mem::take(&mut cpu.past), since: event.time, ..Cpu::default() };
                self.preempted.clear();
            }
            _ => {}
        }
    }

    /// The CPU runs this thread, as an event of the thread shows after a loss.
    pub(crate) fn runs(&mut self, cpu: u32, task: Task, time: u64) {
        let cpu = self.cpus.entry(cpu).or_default();
        (cpu.task, cpu.since) = (Some(task), cpu.since.max(time));
    }

    /// Slices of a CPU that overlap a time, cut to it, in order. Slices older than the kept ones are missing.
    pub fn slices(&self, cpu: u32, start: u64, end: u64) -> impl Iterator<Item = Slice> + '_ {
        let past = self.cpus.get(&cpu).map(|cpu| &cpu.past);
        let from = past.map_or(0, |past| past.partition_point(|slice| slice.end <= start));
        past.into_iter()
            .flat_map(move |past| past.range(from..))
            .take_while(move |slice| slice.start < end)
            .map(move |slice| Slice { start: slice.start.max(start), end: slice.end.min(end), ..*slice })
            .filter(|slice| slice.start < slice.end)
    }

    /// The open slice of a CPU at `now`. A poll is recognised only at its end, so this slice must not be used to blame
    /// a thread.
    pub fn current(&self, cpu: u32, now: u64) -> Option<Slice> {
        let cpu = self.cpus.get(&cpu)?;
        let task = cpu.task.filter(|_| now > cpu.since)?;
        Some(Slice { start: cpu.since, end: now, task, place: cpu.place() })
    }

    /// What a CPU does now.
    pub(crate) fn context(&self, cpu: u32) -> Option<(Task, CpuContext)> {
        let cpu = self.cpus.get(&cpu)?;
        Some((cpu.task?, cpu.place()))
    }

    /// The CPUs with events, in order.
    pub fn cpus(&self) -> Vec<u32> {
        let mut cpus: Vec<u32> = self.cpus.keys().copied().collect();
        cpus.sort_unstable();
        cpus
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::event::NET_RX;

    fn task(pid: i32) -> Task {
        Task { pid, prio: 120, comm: Name::from(format!("t{pid}").as_str()) }
    }

    fn at(time: u64, what: EventKind) -> Event {
        Event { time, cpu: 0, pid: 0, what }
    }

    fn switch(prev: i32, next: i32) -> EventKind {
        EventKind::Switch { prev: task(prev), preempted: true, next: task(next) }
    }

    #[test]
    fn a_poll_has_the_time_back_to_the_one_before() {
        let mut timeline = Timeline::default();
        for event in [
            at(0, switch(0, 1)),
            at(10, EventKind::SoftirqEntry { vec: NET_RX }),
            at(30, EventKind::NapiPoll { dev: "bulk0".into(), work: 64 }),
            at(35, EventKind::NapiPoll { dev: "rt0".into(), work: 1 }),
            at(36, EventKind::SoftirqExit { vec: NET_RX }),
            at(40, switch(1, 0)),
        ] {
            timeline.step(&event);
        }
        let found: Vec<_> = timeline.slices(0, 0, 100).map(|slice| (slice.start, slice.end, slice.place)).collect();
        let bulk = CpuContext::Napi("bulk0".into());
        let wanted = [
            (0, 10, CpuContext::Thread),
            (10, 30, bulk),
            (30, 35, CpuContext::Napi("rt0".into())),
            (35, 36, CpuContext::Softirq(NET_RX)),
            (36, 40, CpuContext::Thread),
        ];
        assert_eq!(found, wanted);
        let cut: Vec<_> = timeline.slices(0, 20, 32).map(|slice| (slice.start, slice.end)).collect();
        assert_eq!(cut, [(20, 30), (30, 32)]);
    }

    #[test]
    fn a_softirq_goes_with_its_thread() {
        let mut timeline = Timeline::default();
        for event in [
            at(0, switch(0, 1)),
            at(10, EventKind::SoftirqEntry { vec: NET_RX }),
            at(20, switch(1, 2)),
            at(30, switch(2, 1)),
            at(40, EventKind::SoftirqExit { vec: NET_RX }),
        ] {
            timeline.step(&event);
        }
        let found: Vec<_> = timeline.slices(0, 0, 100).map(|slice| (slice.task.pid, slice.place)).collect();
        let softirq = CpuContext::Softirq(NET_RX);
        assert_eq!(found, [(1, CpuContext::Thread), (1, softirq), (2, CpuContext::Thread), (1, softirq)]);
    }

    fn any_what() -> impl Strategy<Value = EventKind> {
        prop_oneof![
            (0..4, 0..4).prop_map(|(prev, next)| switch(prev, next)),
            (0_u32..10).prop_map(|vec| EventKind::SoftirqEntry { vec }),
            (0_u32..10).prop_map(|vec| EventKind::SoftirqExit { vec }),
            Just(EventKind::IrqEntry { irq: 1, name: "x".into() }),
            Just(EventKind::IrqExit { irq: 1 }),
            Just(EventKind::NapiPoll { dev: "x".into(), work: 1 }),
            Just(EventKind::Lost { count: 3 }),
        ]
    }

    proptest! {
        #[test]
        fn slices_never_overlap_and_stay_inside(whats in prop::collection::vec((any_what(), 0_u64..20), 0..200),
                                                start in 0_u64..500, length in 0_u64..500) {
            let (mut timeline, mut now) = (Timeline::default(), 0);
            for (what, after) in whats {
                now += after;
                timeline.step(&at(now, what));
            }
            let slices: Vec<Slice> = timeline.slices(0, start, start + length).collect();
            prop_assert!(slices.windows(2).all(|pair| pair[0].end <= pair[1].start));
            prop_assert!(slices.iter().all(|slice| slice.start < slice.end));
            prop_assert!(slices.iter().all(|slice| slice.start >= start && slice.end <= start + length));
        }
    }
}
