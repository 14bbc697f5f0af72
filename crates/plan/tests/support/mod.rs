//! Shared parts of the planner's property tests: random sets, and the properties of every plan.

use ontime_plan::{Admission, Admitted, Bandwidth, Nanos, Planner, Reservation, Segment};
use proptest::prelude::*;

/// Properties of every plan: never two vCPUs on a CPU at once, no vCPU on two CPUs at once, each on its allowed CPUs,
/// at most m-1 vCPUs on two CPUs. `admitted.home` is indexed by [`ontime_plan::VcpuId::index`].
pub(crate) fn check_layout(planner: &Planner, admitted: &Admitted, from: Nanos) {
    let segments = planner.segments();
    let cpus = admitted.shared.len();
    for pair in segments.windows(2) {
        assert!((pair[0].cpu, pair[0].end) <= (pair[1].cpu, pair[1].start) || pair[0].cpu < pair[1].cpu, "overlap");
    }
    let flat: Vec<Segment> = (0..cpus).flat_map(|cpu| planner.cpu(cpu).to_vec()).collect();
    assert_eq!(flat, segments);
    for segment in segments {
        assert!(segment.start < segment.end && segment.start >= from && segment.end <= planner.end());
        let home = admitted.home[segment.vcpu.index()];
        assert!(home.is_none_or(|home| home == segment.cpu), "affinity");
        assert!(home.is_some() || admitted.shared[segment.cpu as usize]);
    }
    let mut by_vcpu = segments.to_vec();
    by_vcpu.sort_by_key(|segment| (segment.vcpu, segment.start));
    let crossings = by_vcpu.windows(2).filter(|pair| pair[0].vcpu == pair[1].vcpu).count();
    assert!(crossings < cpus.max(1), "{crossings} migrations on {cpus} CPUs");
    for pair in by_vcpu.windows(2) {
        assert!(pair[0].vcpu != pair[1].vcpu || pair[0].end <= pair[1].start, "on two CPUs at once");
    }
}

/// Any period, or one of a few whose sums have small divisors, so that a set can be made exactly full.
pub(crate) fn periods() -> impl Strategy<Value = u64> {
    let few = prop::sample::select(vec![3_000, 7_000, 13_000, 1_001_000, 4_096_000, 9_000_000, 100_000_000]);
    prop_oneof![1 => 1000u64..100_000_000, 8 => few]
}

/// Adds a vCPU with the remaining capacity: the set is then exactly full.
pub(crate) fn top_up(cpus: u32, asked: &mut Vec<Reservation>) -> Option<Admitted> {
    let total: Bandwidth = asked.iter().map(|ask| ask.bandwidth).sum();
    let left = u64::from(cpus).checked_mul(total.period())?.checked_sub(total.runtime())?;
    let bandwidth = Bandwidth::new(Nanos(left), Nanos(total.period()))?;
    if bandwidth < Bandwidth::ppm(10) || bandwidth > Bandwidth::ppm(999_990) {
        return None;
    }
    asked.push(Reservation { bandwidth, affinity: None });
    Admission::new(cpus, Bandwidth::ZERO).admit(asked).ok()
}

/// The remaining time of each vCPU in the plan after `now`, ns.
pub(crate) fn left(planner: &Planner, vcpus: usize, now: Nanos) -> Vec<u64> {
    let mut left = vec![0u64; vcpus];
    for segment in planner.segments() {
        left[segment.vcpu.index()] += segment.end.0.saturating_sub(segment.start.max(now).0);
    }
    left
}
