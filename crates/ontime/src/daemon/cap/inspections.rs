//! When the policies of paused threads are read: a thread that may set its policy could end its pause. Pure.
//!
//! Each thread has inspections of its own, so no thread delays those of another by its pauses. A thread is inspected at
//! a random instant of a pause, because it could otherwise begin its pause again just before that.

use super::table::SlotIndex;

/// The least time between two inspections of a thread, ns, so that they cost next to nothing.
const GAP: u64 = 10_000_000;
/// The same for each watched thread: with many threads, all inspections together are no more than one in this time.
const GAP_PER_THREAD: u64 = 1_000_000;
/// The longest time to an inspection beyond that, ns.
const SPREAD: u64 = 100_000_000;

/// The inspections of one thread.
#[derive(Debug, Clone, Copy, Default)]
struct Inspected {
    watched: bool,
    /// When the last one was, ns; 0: there was none.
    last: u64,
    next: Option<u64>,
}

/// The inspections of all watched threads.
#[derive(Debug)]
pub(super) struct Inspections {
    /// As long as the highest slot used so far. It does not allocate after its start.
    slots: Vec<Inspected>,
    /// How many threads are watched.
    watched: u64,
    /// No inspection is due before this, ns.
    soonest: Option<u64>,
    /// The state of the random numbers.
    random: u64,
}

impl Inspections {
    /// For at most `capacity` threads. `seed`: any number.
    pub(super) fn new(capacity: usize, seed: u64) -> Self {
        Self { slots: Vec::with_capacity(capacity), watched: 0, soonest: None, random: seed | 1 }
    }

    /// A thread is watched in this slot from now on.
    pub(super) fn watch(&mut self, slot: SlotIndex) {
        self.forget(slot);
        while self.slots.len() <= slot && self.slots.len() < self.slots.capacity() {
            self.slots.push(Inspected::default());
        }
        if let Some(entry) = self.slots.get_mut(slot) {
            entry.watched = true;
            self.watched += 1;
        }
    }

    /// No thread is watched in this slot.
    pub(super) fn forget(&mut self, slot: SlotIndex) {
        if let Some(entry) = self.slots.get_mut(slot) {
            self.watched -= u64::from(std::mem::take(entry).watched);
        }
    }

    /// The thread is paused `until` then. Plans an inspection, unless one is planned or the pause ends too soon after
    /// the last one.
    pub(super) fn plan(&mut self, slot: SlotIndex, now: u64, until: u64) {
        let gap = GAP.max(GAP_PER_THREAD.saturating_mul(self.watched));
        let Some(entry) = self.slots.get_mut(slot).filter(|entry| entry.watched && entry.next.is_none()) else {
            return;
        };
        // xorshift64 (Marsaglia 2003): the thread must not know the instant, and this must not allocate or wait.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let from = if entry.last == 0 { now } else { now.max(entry.last.saturating_add(gap)) };
        let length = until.saturating_sub(from).min(SPREAD);
        entry.next = self.random.checked_rem(length).map(|part| from.saturating_add(part));
        self.soonest = self.soonest.into_iter().chain(entry.next).min();
    }

    /// When to call [`Self::due`], ns.
    pub(super) fn next(&self) -> Option<u64> {
        self.soonest
    }

    /// Takes a thread whose inspection is due. The caller says whether it was [`Self::inspected`].
    pub(super) fn due(&mut self, now: u64) -> Option<SlotIndex> {
        self.soonest.filter(|at| *at <= now)?;
        let is_due = |entry: &mut Inspected| entry.next.take_if(|at| *at <= now).is_some();
        let slot = self.slots.iter_mut().position(is_due);
        self.soonest = self.slots.iter().filter_map(|entry| entry.next).min();
        slot
    }

    /// The thread in this slot was inspected.
    pub(super) fn inspected(&mut self, slot: SlotIndex, now: u64) {
        if let Some(entry) = self.slots.get_mut(slot) {
            entry.last = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Pauses threads as `pauses` says (the length, and the time from one pause to the next, ns) for ten seconds.
    /// Returns how often each was inspected.
    fn inspections(pauses: &[(u64, u64)]) -> Vec<u64> {
        let mut inspections = Inspections::new(pauses.len(), 1);
        (0..pauses.len()).for_each(|slot| inspections.watch(slot));
        let mut counts = vec![0; pauses.len()];
        let until = |slot: usize, now: u64| now - now % pauses[slot].1 + pauses[slot].0;
        for now in (MS..10_000 * MS).step_by(50_000) {
            while let Some(slot) = inspections.due(now) {
                inspections.inspected(slot, now);
                inspections.plan(slot, now, until(slot, now));
                counts[slot] += 1;
            }
            for slot in (0..pauses.len()).filter(|slot| now % pauses[*slot].1 == 0) {
                inspections.plan(slot, now, until(slot, now));
            }
        }
        counts
    }

    /// A tenant that wants to end its pauses unseen has other threads paused, for long or just before its own.
    #[test]
    fn no_thread_is_left_out_for_the_pauses_of_others() {
        let (short, long) = ((150_000, 2 * MS), (5_000 * MS, 5_001 * MS));
        let alone = inspections(&[short])[0];
        assert!(alone > 500, "{alone}");
        for decoys in [vec![long], vec![(1_900_000, 2 * MS); 8], [vec![long; 4], vec![short; 4]].concat()] {
            let beside = *inspections(&[decoys.clone(), vec![short]].concat()).last().unwrap();
            assert!(beside > alone / 2, "{beside} inspections beside {decoys:?}, {alone} alone");
        }
    }

    #[test]
    fn many_threads_are_inspected_no_more_often_than_once_a_millisecond() {
        let counts = inspections(&vec![(150_000, 2 * MS); 400]);
        assert!(counts.iter().sum::<u64>() <= 10_000 + 400);
        assert!(counts.iter().all(|count| *count > 10), "{counts:?}");
    }

    #[test]
    fn a_thread_that_is_no_longer_watched_is_not_inspected() {
        let mut inspections = Inspections::new(2, 1);
        inspections.plan(0, 1, MS);
        assert_eq!(inspections.next(), None, "nothing is watched");
        inspections.watch(1);
        inspections.watch(1);
        inspections.plan(1, 1, MS);
        assert!(inspections.next().is_some_and(|at| at < MS));
        inspections.forget(1);
        assert_eq!((inspections.due(MS), inspections.next(), inspections.watched), (None, None, 0));
        inspections.watch(2);
        assert_eq!(inspections.watched, 0, "there is no room for it");
    }
}
