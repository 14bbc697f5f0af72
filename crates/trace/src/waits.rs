//! When a thread of a path was runnable but did not run.
//!
//! Input: `sched_waking` and `sched_switch` in time order. Output: [`Wait`]s of the recent past. A wait's CPU is the
//! one on which the thread ran afterwards; that CPU's timeline shows what ran meanwhile.

use std::collections::{BTreeSet, HashMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::event::{Event, EventKind, Task};

/// Most waits kept: more than a request can have.
const KEPT: usize = 4_096;

/// A thread's wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wait {
    /// The thread, as it was when it ran afterwards.
    pub task: Task,
    /// The CPU on which it waited.
    pub cpu: u32,
    /// Start, ns.
    pub start: u64,
    /// End, ns.
    pub end: u64,
    /// It was preempted before; else it was asleep and woken.
    pub preempted: bool,
}

/// The watched threads' waits.
#[derive(Debug, Default)]
pub struct Waits {
    watched: BTreeSet<i32>,
    waiting: HashMap<i32, (u64, bool)>,
    past: VecDeque<Wait>,
}

impl Waits {
    /// Watches these threads. Waits of threads that are already watched continue.
    pub fn watch(&mut self, threads: BTreeSet<i32>) {
        self.waiting.retain(|pid, _| threads.contains(pid));
        self.watched = threads;
    }

    /// Processes an event.
    pub fn step(&mut self, event: &Event) {
        match event.what {
            // Only the first waking counts: the kernel may report another one before the thread runs.
            EventKind::Waking { pid, .. } if self.watched.contains(&pid) => {
                self.waiting.entry(pid).or_insert((event.time, false));
            }
            EventKind::Switch { prev, preempted, next } => {
                if self.watched.contains(&prev.pid) {
                    if preempted {
                        self.waiting.insert(prev.pid, (event.time, true));
                    } else {
                        self.waiting.remove(&prev.pid);
                    }
                }
                if let Some((start, preempted)) = self.waiting.remove(&next.pid) {
                    self.push(Wait { task: next, cpu: event.cpu, start, end: event.time.max(start), preempted });
                }
            }
            // Switches may be among the lost events.
            EventKind::Lost { .. } => self.waiting.clear(),
            _ => {}
        }
    }

    fn push(&mut self, wait: Wait) {
        if self.past.len() == KEPT {
            self.past.pop_front();
        }
        self.past.push_back(wait);
    }

    /// Waits that overlap a time, cut to it.
    pub fn within(&self, start: u64, end: u64) -> impl Iterator<Item = Wait> + '_ {
        // The waits are sorted by their ends.
        let from = self.past.partition_point(|wait| wait.end <= start);
        self.past.range(from..).filter(move |wait| wait.start < end).map(move |wait| Wait {
            start: wait.start.max(start),
            end: wait.end.min(end),
            ..*wait
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(pid: i32) -> Task {
        Task { pid, prio: 50, comm: "x".into() }
    }

    fn at(time: u64, what: EventKind) -> Event {
        Event { time, cpu: 1, pid: 0, what }
    }

    #[test]
    fn woken_and_preempted_threads_wait_until_they_run() {
        let mut waits = Waits::default();
        waits.watch(BTreeSet::from([7]));
        let switch = |prev, preempted, next| EventKind::Switch { prev: task(prev), preempted, next: task(next) };
        for event in [
            at(10, EventKind::Waking { pid: 7, prio: 50 }),
            at(12, EventKind::Waking { pid: 7, prio: 50 }),
            at(15, switch(1, true, 7)),
            at(20, switch(7, true, 1)),
            at(26, switch(1, true, 7)),
            at(30, switch(7, false, 1)),
            at(40, switch(1, true, 9)),
        ] {
            waits.step(&event);
        }
        let found: Vec<_> = waits.within(0, 100).map(|wait| (wait.start, wait.end, wait.preempted)).collect();
        assert_eq!(found, [(10, 15, false), (20, 26, true)]);
        let cut: Vec<_> = waits.within(14, 22).map(|wait| (wait.start, wait.end)).collect();
        assert_eq!(cut, [(14, 15), (20, 22)]);
    }
}
