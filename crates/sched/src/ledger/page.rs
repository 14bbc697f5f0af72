//! The protocol of the ledger's page: a seqlock with two writers, whose readers never wait.
//!
//! A word holds the generation and a bit that allows claims. After it come the offers, and two tables of claims. The
//! parity of the generation says which table is valid. The claiming thread writes the other table, then moves the word
//! to the next generation by a compare-and-exchange. If the daemon changed the word first, the exchange fails and
//! nothing is claimed. The daemon advances the generation by two, so that a claim in progress does not write the valid
//! table, and sets a busy bit while it writes that table.
//!
//! In and out: values, through shared memory. The crate `ontime-model` also compiles this file, with the model
//! checker's atomics in `super::atomic`.

use super::Budget;
use super::atomic::{AtomicU64, Ordering, fence};

/// Bits of the word: claims are allowed; the daemon is writing the valid table.
const OPEN: u64 = 1;
const BUSY: u64 = 2;
/// The generation is above these bits.
const SHIFT: u32 = 2;
/// How often a reader retries because of a claim in progress.
const TRIES: usize = 3;

/// A [`Budget`] in shared memory.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Cell {
    budget: AtomicU64,
    period: AtomicU64,
}

impl Cell {
    fn get(&self) -> Budget {
        Budget { budget: self.budget.load(Ordering::Relaxed), period: self.period.load(Ordering::Relaxed) }
    }

    fn set(&self, to: Budget) {
        self.budget.store(to.budget, Ordering::Relaxed);
        self.period.store(to.period, Ordering::Relaxed);
    }
}

/// The page, for this many vCPUs.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Page<const VCPUS: usize> {
    pub(super) word: AtomicU64,
    pub(super) offers: [Cell; VCPUS],
    pub(super) held: [[Cell; VCPUS]; 2],
}

impl<const VCPUS: usize> Page<VCPUS> {
    fn held(&self, generation: u64) -> &[Cell; VCPUS] {
        let [even, odd] = &self.held;
        if generation & 1 == 0 { even } else { odd }
    }

    /// Each function is described at the function of [`Ledger`](super::Ledger) with its name.
    pub(super) fn generation(&self) -> u64 {
        self.word.load(Ordering::Acquire) >> SHIFT
    }

    pub(super) fn claim(&self, held: &[Budget; VCPUS]) -> Option<u64> {
        let seen = self.word.load(Ordering::Acquire);
        if seen & OPEN == 0 || !self.offers.iter().zip(held).all(|(offer, held)| held.fits(&offer.get())) {
            return None;
        }
        let next = (seen >> SHIFT) + 1;
        // A reader may still be reading this table, for the previous generation. If it reads one of the new values,
        // this fence ensures that it then sees a newer generation in the word.
        fence(Ordering::SeqCst);
        self.held(next).iter().zip(held).for_each(|(cell, held)| cell.set(*held));
        let to = next << SHIFT | OPEN;
        self.word.compare_exchange(seen, to, Ordering::AcqRel, Ordering::Relaxed).is_ok().then_some(next)
    }

    pub(super) fn withdraw(&self) -> u64 {
        self.word.fetch_and(!OPEN, Ordering::AcqRel) >> SHIFT
    }

    pub(super) fn offer(&self, offers: &[Budget; VCPUS], held: &[Budget; VCPUS]) -> u64 {
        let next = self.generation().wrapping_add(2) & (u64::MAX >> SHIFT);
        self.word.store(next << SHIFT | BUSY, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.offers.iter().zip(offers).for_each(|(cell, offer)| cell.set(*offer));
        self.held(next).iter().zip(held).for_each(|(cell, held)| cell.set(*held));
        self.word.store(next << SHIFT | OPEN, Ordering::Release);
        next
    }

    pub(super) fn table(&self, generation: u64) -> [Budget; VCPUS] {
        let mut table = [Budget::default(); VCPUS];
        let held = self.held(generation);
        table.iter_mut().zip(held).for_each(|(to, cell)| *to = cell.get());
        table
    }

    pub(super) fn new_claim(&self, vcpu: u32, seen: &mut u64) -> Option<Budget> {
        let vcpu = usize::try_from(vcpu).ok()?;
        for _ in 0..TRIES {
            let word = self.word.load(Ordering::Acquire);
            let generation = word >> SHIFT;
            if generation == *seen || word & BUSY != 0 {
                return None;
            }
            let held = self.held(generation).get(vcpu)?.get();
            fence(Ordering::Acquire);
            let still = self.word.load(Ordering::Relaxed);
            if still >> SHIFT == generation && still & BUSY == 0 {
                *seen = generation;
                return Some(held);
            }
        }
        // Claims come faster than this thread reads. The pacer tries again at its next check.
        None
    }
}

#[cfg(test)]
mod tests {
    use std::array::from_fn;
    use std::sync::atomic::AtomicBool;

    use super::*;

    const VCPUS: usize = 2;
    const PERIOD: u64 = 1 << 40;

    /// A thread claims as fast as it can, the daemon withdraws and makes new offers, a pacer reads. No reader sees half
    /// a table, and the daemon finds the last claim. Also for Miri, which finds data races and simulates weak memory.
    #[test]
    fn claims_withdrawals_and_readings_at_once() {
        let cells = || from_fn::<Cell, VCPUS, _>(|_| Cell::default());
        let page = Page { word: AtomicU64::new(0), offers: cells(), held: [cells(), cells()] };
        let offers = [Budget { budget: PERIOD, period: PERIOD }; VCPUS];
        let all = |number: u64| [Budget { budget: number, period: PERIOD + number }; VCPUS];
        let rounds = if cfg!(miri) { 30 } else { 20_000 };
        page.offer(&offers, &all(0));
        let end = AtomicBool::new(false);
        let last = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut number = 0;
                while !end.load(Ordering::Relaxed) {
                    if page.claim(&all(number + 1)).is_some() {
                        number += 1;
                        last.store(number, Ordering::Release);
                    }
                }
            });
            scope.spawn(|| {
                let (mut seen, mut newest) = (0, 0);
                while !end.load(Ordering::Relaxed) {
                    if let Some(held) = page.new_claim(1, &mut seen) {
                        assert_eq!(held.period, PERIOD + held.budget, "torn");
                        assert!(held.budget >= newest, "it goes back");
                        newest = held.budget;
                    }
                }
            });
            let mut round = 0;
            while round < rounds || last.load(Ordering::Relaxed) == 0 {
                round += 1;
                let before = last.load(Ordering::Acquire);
                let held = page.table(page.withdraw());
                assert_eq!(held[0], held[1]);
                assert_eq!(held[0].period, PERIOD + held[0].budget, "torn");
                assert!(held[0].budget >= before, "a claim was lost");
                page.offer(&offers, &held);
                std::thread::yield_now();
            }
            end.store(true, Ordering::Relaxed);
        });
    }
}
