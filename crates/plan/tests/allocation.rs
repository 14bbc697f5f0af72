//! A slice, a wake-up and a sleep do not allocate.

#![allow(clippy::unwrap_used, reason = "a test ends by panicking")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use ontime_plan::{Bandwidth, Demand, Nanos, Planner};

thread_local! {
    /// Per thread, because the test framework's threads allocate, too.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

fn allocations() -> u64 {
    ALLOCATIONS.with(Cell::get)
}

struct Counting;

// SAFETY: all memory comes from the system allocator. Counting does not allocate: the counter is neither created nor
// dropped dynamically.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller guarantees the same contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller guarantees the same contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_slice_allocates_nothing() {
    let mut planner = Planner::new(&[true; 16]);
    let ids: Vec<_> =
        (0..100u32).map(|n| planner.add(Bandwidth::ppm(155_000), (n % 10 == 0).then_some(n / 10))).collect();
    let mut demands = vec![Demand { deadline: Nanos::ZERO, idle: false }; 100];
    let before = allocations();
    assert_ne!(before, 0, "nothing is counted");
    let mut now = Nanos::ZERO;
    for round in 0..100_usize {
        for (index, demand) in demands.iter_mut().enumerate() {
            demand.idle = (index + round) % 3 == 0;
            demand.deadline = now + Nanos::from_micros(300);
        }
        let end = planner.plan(now, &demands);
        for id in &ids {
            planner.sleep(*id, now + Nanos::from_micros(100));
            planner.wake(*id, now + Nanos::from_micros(200));
        }
        now = end;
    }
    assert_eq!(allocations(), before);
    assert!(!planner.segments().is_empty());
}
