//! The ledger: a device process that claims, the daemon that withdraws and offers, and a pacer that reads.

use std::array::from_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use loom::thread;
use ontime_sched::ledger::Budget;

use self::page::{Cell, Page};
use crate::atomic;

#[path = "../../sched/src/ledger/page.rs"]
mod page;

/// vCPUs in the model, each with two words in every table.
const VCPUS: usize = 1;
const PERIOD: u64 = 1 << 40;

/// The budget of the claim with this number: a reader that mixes two claims is detected.
fn claim(number: u64) -> [Budget; VCPUS] {
    [Budget { budget: number, period: PERIOD + number }; VCPUS]
}

fn is_whole(held: &Budget) -> bool {
    held.period == PERIOD + held.budget
}

/// The daemon withdraws and offers again `rounds` times, concurrently with `claims` claims and `looks` reads of a
/// pacer.
pub fn ledger(claims: u64, looks: usize, rounds: usize) {
    let cells = || from_fn::<Cell, VCPUS, _>(|_| Cell::default());
    let page = Arc::new(Page { word: atomic::AtomicU64::new(0), offers: cells(), held: [cells(), cells()] });
    let offers = [Budget { budget: PERIOD, period: PERIOD }; VCPUS];
    page.offer(&offers, &claim(0));
    // The number of the last claim. It is not part of the model: loom runs one thread at a time.
    let last = Arc::new(AtomicU64::new(0));
    let device = {
        let (page, last) = (Arc::clone(&page), Arc::clone(&last));
        thread::spawn(move || {
            for _ in 0..claims {
                let number = last.load(Ordering::SeqCst) + 1;
                if page.claim(&claim(number)).is_some() {
                    last.store(number, Ordering::SeqCst);
                }
            }
        })
    };
    let pacer = {
        let page = Arc::clone(&page);
        (looks > 0).then(|| {
            thread::spawn(move || {
                let (mut seen, mut newest) = (0, 0);
                for _ in 0..looks {
                    if let Some(held) = page.new_claim(0, &mut seen) {
                        assert!(is_whole(&held), "torn: {held:?}");
                        assert!(held.budget >= newest, "{held:?} after {newest}");
                        newest = held.budget;
                    }
                }
            })
        })
    };
    for _ in 0..rounds {
        let before = last.load(Ordering::SeqCst);
        let generation = page.withdraw();
        let held = page.table(generation);
        assert!(is_whole(&held[0]), "torn: {held:?}");
        assert!(held[0].budget >= before, "claim {before} is lost: {held:?}");
        page.offer(&offers, &held);
    }
    device.join().unwrap();
    pacer.into_iter().for_each(|pacer| pacer.join().unwrap());
    let generation = page.withdraw();
    assert_eq!((page.table(generation), page.generation()), (claim(last.load(Ordering::SeqCst)), generation));
}
