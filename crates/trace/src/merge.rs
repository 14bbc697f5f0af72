//! Merges the CPUs' events in time order.
//!
//! Input: each CPU's events in order. Output: all events in time order, up to a time before which no CPU can have
//! unread events.

use crate::event::Event;

/// A record becomes readable some time after its time stamp: events newer than this are held back, ns.
const IN_FLIGHT: u64 = 2_000_000;

/// Events that wait for other CPUs' events.
#[derive(Debug, Default)]
pub struct Merger {
    pending: Vec<Event>,
    /// Events before this time were returned, ns.
    horizon: u64,
}

impl Merger {
    /// Adds events of one CPU, in order.
    pub fn add(&mut self, events: impl IntoIterator<Item = Event>) {
        self.pending.extend(events);
    }

    /// Events before `read_at` (CLOCK_MONOTONIC, ns, taken before the rings were read) minus the hold-back time.
    pub fn take(&mut self, read_at: u64) -> Vec<Event> {
        self.up_to(read_at.saturating_sub(IN_FLIGHT))
    }

    /// The earliest time at which an event may still be added, ns.
    pub fn horizon(&self) -> u64 {
        self.horizon
    }

    /// All events, when no more are written.
    pub fn rest(&mut self) -> Vec<Event> {
        self.up_to(u64::MAX)
    }

    fn up_to(&mut self, horizon: u64) -> Vec<Event> {
        self.horizon = self.horizon.max(horizon);
        // Stable sort: events of one CPU with equal times keep their order.
        self.pending.sort_by_key(|event| event.time);
        let later = self.pending.split_off(self.pending.partition_point(|event| event.time < horizon));
        std::mem::replace(&mut self.pending, later)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::event::EventKind;

    proptest! {
        #[test]
        fn all_events_come_once_and_in_order(
            times in prop::collection::vec((0_u32..4, 0_u64..1_000), 0..100),
            step in 1_u64..300,
        ) {
            let mut per_cpu: Vec<Vec<u64>> = vec![Vec::new(); 4];
            for (cpu, time) in &times {
                per_cpu[*cpu as usize].push(*time + IN_FLIGHT);
            }
            per_cpu.iter_mut().for_each(|times| times.sort_unstable());
            let (mut merger, mut out) = (Merger::default(), Vec::new());
            let mut from = 0;
            while from < IN_FLIGHT + 1_001 {
                let to = if from == 0 { IN_FLIGHT } else { from + step };
                for (cpu, times) in per_cpu.iter().enumerate() {
                    let fresh = times.iter().filter(|time| (from..to).contains(*time));
                    let event = |time: &u64| Event { time: *time, cpu: cpu as u32, pid: 0, what: EventKind::KvmEntry };
                    merger.add(fresh.map(event));
                }
                out.extend(merger.take(to));
                from = to;
            }
            out.extend(merger.rest());
            prop_assert_eq!(out.len(), times.len());
            prop_assert!(out.windows(2).all(|pair| pair[0].time <= pair[1].time));
        }
    }
}
