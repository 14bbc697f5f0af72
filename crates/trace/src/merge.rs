//! The CPUs' events in one order of time.
//!
//! In: each CPU's events, in its order. Out: all of them, in time order, up to a moment before which no CPU can still
//! have one that was not read.

use crate::event::Event;

/// A record is stamped a little before it can be read: this much is held back, ns.
const IN_FLIGHT: u64 = 2_000_000;

/// Events that wait for those of other CPUs.
#[derive(Debug, Default)]
pub struct Merger {
    pending: Vec<Event>,
    /// Events from before this were handed out, ns.
    horizon: u64,
}

impl Merger {
    /// Adds events of one CPU, in its order.
    pub fn add(&mut self, events: impl IntoIterator<Item = Event>) {
        self.pending.extend(events);
    }

    /// Events from before `read_at` (CLOCK_MONOTONIC, ns, taken before the rings were read), less what may be in
    /// flight.
    pub fn take(&mut self, read_at: u64) -> Vec<Event> {
        self.up_to(read_at.saturating_sub(IN_FLIGHT))
    }

    /// The earliest time, ns, at which an event may still be added.
    pub fn horizon(&self) -> u64 {
        self.horizon
    }

    /// Everything: nothing more is being written.
    pub fn rest(&mut self) -> Vec<Event> {
        self.up_to(u64::MAX)
    }

    fn up_to(&mut self, horizon: u64) -> Vec<Event> {
        self.horizon = self.horizon.max(horizon);
        // Stable: events of one CPU with one time stay as they were.
        self.pending.sort_by_key(|event| event.time);
        let later = self.pending.split_off(self.pending.partition_point(|event| event.time < horizon));
        std::mem::replace(&mut self.pending, later)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::event::What;

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
                    merger.add(fresh.map(|time| Event { time: *time, cpu: cpu as u32, pid: 0, what: What::KvmEntry }));
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
