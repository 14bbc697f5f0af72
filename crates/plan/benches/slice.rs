//! One slice of the planner: 100 vCPUs on 16 CPUs, and 10,000 on 128, at nearly full load, with periods that do not
//! divide each other; the same with fractions whose products need 128 bits; and a wake-up in the middle of a slice.

#![allow(missing_docs)] // criterion's macros make public functions without any

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use ontime_plan::{Bandwidth, Demand, Nanos, Planner};

/// `wide`: bandwidths like sums of several RTAs whose periods have no common divisor.
fn planner(cpus: usize, vcpus: u64, wide: bool) -> (Planner, Vec<Demand>) {
    let mut planner = Planner::new(&vec![true; cpus]);
    let mut demands = Vec::new();
    for n in 0..vcpus {
        // Slack and whole microseconds cause large fractions, as in practice.
        let period = Nanos::from_micros(5_000 + 37 * (n % 1_000));
        let slice = Nanos(period.0 * cpus as u64 * 99 / 100 / vcpus + n % 7);
        let (slice, of) = if wide { (Nanos(slice.0 << 34 | 1), Nanos(period.0 << 34)) } else { (slice, period) };
        planner.add(Bandwidth::new(slice, of).unwrap_or(Bandwidth::ZERO), None);
        demands.push(Demand { deadline: period, idle: false });
    }
    (planner, demands)
}

fn bench(criterion: &mut Criterion) {
    for (cpus, vcpus) in [(16, 100), (128, 10_000)] {
        for (name, wide) in [("", false), ("_wide", true)] {
            let (mut planner, demands) = planner(cpus, vcpus, wide);
            let mut now = Nanos::ZERO;
            criterion.bench_function(&format!("slice_{vcpus}_vcpus_{cpus}_cpus{name}"), |bencher| {
                bencher.iter(|| {
                    now = now + Nanos::from_micros(777);
                    black_box(planner.plan(now, black_box(&demands)))
                });
            });
        }
        let (mut planner, mut demands) = planner(cpus, vcpus - 1, false);
        let sleeper = planner.add(Bandwidth::ppm(10_000), None);
        demands.push(Demand { idle: true, ..Demand::NONE });
        planner.plan(Nanos::ZERO, &demands);
        criterion.bench_function(&format!("wake_and_sleep_{vcpus}_vcpus_{cpus}_cpus"), |bencher| {
            bencher.iter(|| planner.wake(sleeper, Nanos(100)) && planner.sleep(sleeper, Nanos(100)));
        });
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
