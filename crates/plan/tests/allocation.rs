//! A slice, a wake-up and a sleep allocate nothing.

#![allow(clippy::unwrap_used, reason = "a test ends by panicking")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use ontime_plan::{Bandwidth, Demand, Nanos, Planner};

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

struct Counting;

// SAFETY: everything is the system allocator's; counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// The only test here: others would allocate beside it.
#[test]
fn a_slice_allocates_nothing() {
    let mut planner = Planner::new(&[true; 16]);
    let ids: Vec<_> =
        (0..100u32).map(|n| planner.add(Bandwidth::ppm(155_000), (n % 10 == 0).then_some(n / 10))).collect();
    let mut demands = vec![Demand { deadline: Nanos::ZERO, idle: false }; 100];
    let before = ALLOCATIONS.load(Ordering::Relaxed);
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
    assert_eq!(ALLOCATIONS.load(Ordering::Relaxed) - before, 0);
    assert!(!planner.segments().is_empty());
}
