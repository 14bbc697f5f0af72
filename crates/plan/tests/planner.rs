//! The planner with random sets, sleeps and wake-ups: never two vCPUs on a CPU, never a vCPU on two CPUs, exact sums.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test ends by panicking")]

mod support;

use ontime_plan::{Admission, Admitted, Bandwidth, Demand, Nanos, Planner, Reservation};
use proptest::prelude::*;

use support::{check_layout, left, periods, top_up};

/// Bandwidths as (parts, of), scaled so that their sum is just at most `cpus`; some pinned.
fn sets() -> impl Strategy<Value = (u32, Vec<(u64, u64, Option<u32>)>)> {
    (1u32..6).prop_flat_map(|cpus| {
        let one = (1u64..1000, periods(), prop::option::weighted(0.2, 0..cpus));
        (Just(cpus), prop::collection::vec(one, 1..40))
    })
}

/// Admits them one by one, so that the set is nearly full.
fn fill(cpus: u32, set: &[(u64, u64, Option<u32>)], scale: u64) -> (Vec<Reservation>, Admitted) {
    let host = Admission::new(cpus, Bandwidth::ZERO);
    let mut asked = Vec::new();
    let mut admitted = host.admit(&[]).unwrap();
    for (parts, of, pin) in set {
        let bandwidth = Bandwidth::new(Nanos(parts * of * scale / 1000 / 10), Nanos(*of)).unwrap();
        let bandwidth = bandwidth.clamp(Bandwidth::ppm(10), Bandwidth::ppm(999_990));
        asked.push(Reservation { bandwidth, affinity: pin.map(|cpu| [cpu].into()) });
        match host.admit(&asked) {
            Ok(now) => admitted = now,
            Err(_) => drop(asked.pop()),
        }
    }
    (asked, admitted)
}

/// Plans a slice and executes its events: (vCPU, whether it wakes, delay after the previous event).
fn sleep_and_wake(
    cpus: u32,
    set: &[(u64, u64, Option<u32>)],
    scale: u64,
    events: Vec<(usize, bool, u64)>,
    idle: &[bool],
) -> Result<(), TestCaseError> {
    let (asked, admitted) = fill(cpus, set, scale);
    let mut planner = Planner::new(&admitted.shared);
    let ids: Vec<_> = asked.iter().zip(&admitted.home).map(|(ask, home)| planner.add(ask.bandwidth, *home)).collect();
    let demand = |n: usize| Demand { deadline: Nanos::from_millis(5), idle: idle[n] };
    let demands: Vec<_> = (0..ids.len()).map(demand).collect();
    let end = planner.plan(Nanos::ZERO, &demands);
    let mut touched: Vec<bool> = idle.to_vec();
    let mut now = Nanos::ZERO;
    for (vcpu, wake, after) in events {
        now = now + Nanos(after);
        let Some(id) = ids.get(vcpu).copied() else { continue };
        if now >= end {
            break;
        }
        let before = left(&planner, ids.len(), now);
        let changed = if wake { planner.wake(id, now) } else { planner.sleep(id, now) };
        if !changed {
            continue;
        }
        check_layout(&planner, &admitted, now);
        let after = left(&planner, ids.len(), now);
        for other in 0..ids.len() {
            if other != id.index() {
                prop_assert_eq!(before[other], after[other], "another's time changed");
            }
        }
        if wake && touched[id.index()] {
            let ask = asked[id.index()].bandwidth;
            let due = u128::from(ask.runtime()) * u128::from(end.0 - now.0) / u128::from(ask.period());
            prop_assert!(u128::from(after[id.index()]) + 1 >= due, "{} instead of {}", after[id.index()], due);
            touched[id.index()] = false;
        }
        if !wake {
            prop_assert_eq!(after[id.index()], 0);
            touched[id.index()] = false;
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Always busy: at each global deadline every vCPU has had its bandwidth x time, exact to a nanosecond, even on an
    /// exactly full host.
    #[test]
    fn sums_are_exact(
        (cpus, set) in sets(),
        scale in 1u64..10,
        steps in prop::collection::vec(1u64..3_000_000, 1..40),
    ) {
        let (mut asked, mut admitted) = fill(cpus, &set, scale);
        let before = asked.len();
        match top_up(cpus, &mut asked) {
            Some(full) => admitted = full,
            None => asked.truncate(before),
        }
        let mut planner = Planner::new(&admitted.shared);
        let ids: Vec<_> =
            asked.iter().zip(&admitted.home).map(|(ask, home)| planner.add(ask.bandwidth, *home)).collect();
        let mut had = vec![0u128; asked.len()];
        let mut now = Nanos::ZERO;
        for step in steps {
            let demands = vec![Demand { deadline: now + Nanos(step), idle: false }; asked.len()];
            let end = planner.plan(now, &demands);
            prop_assert_eq!(end, now + Nanos(step.max(250_000)));
            check_layout(&planner, &admitted, now);
            for segment in planner.segments() {
                had[segment.vcpu.index()] += u128::from(segment.end.0 - segment.start.0);
            }
            now = end;
            for (id, ask) in ids.iter().zip(&asked) {
                let (runtime, period) = (u128::from(ask.bandwidth.runtime()), u128::from(ask.bandwidth.period()));
                let due = runtime * u128::from(now.0);
                let have = had[id.index()];
                prop_assert!(have >= due / period, "{} ns instead of {} at {}", have, due / period, now.0);
                prop_assert!(have <= due.div_ceil(period));
            }
        }
    }

    /// With any sleeps and wake-ups, awake vCPUs get their planned time, and a waking one gets bandwidth x remaining
    /// time.
    #[test]
    fn sleepers_harm_nobody(
        (cpus, set) in sets(), scale in 1u64..10,
        events in prop::collection::vec((0usize..40, any::<bool>(), 1u64..200_000), 1..60),
        idle in prop::collection::vec(any::<bool>(), 40),
    ) {
        let anywhere: Vec<_> = set.into_iter().map(|(runtime, period, _)| (runtime, period, None)).collect();
        sleep_and_wake(cpus, &anywhere, scale, events, &idle)?;
    }

    /// The same with some pinned vCPUs.
    #[test]
    fn sleepers_harm_nobody_beside_pinned_ones(
        (cpus, set) in sets(), scale in 1u64..10,
        events in prop::collection::vec((0usize..40, any::<bool>(), 1u64..200_000), 1..60),
        idle in prop::collection::vec(any::<bool>(), 40),
    ) {
        sleep_and_wake(cpus, &set, scale, events, &idle)?;
    }

    /// Any deadlines, any bandwidths, admitted or not: no panic, no overlap.
    #[test]
    fn hostile_input_is_harmless(
        cpus in 0usize..4, asked in prop::collection::vec((any::<u64>(), 1..=u64::MAX), 0..10),
        slices in prop::collection::vec(
            (any::<u64>(), prop::collection::vec((any::<u64>(), any::<bool>()), 0..12)),
            1..10,
        ),
    ) {
        let admitted = Admitted { home: vec![None; asked.len()], shared: vec![true; cpus], total: Bandwidth::ZERO };
        let mut planner = Planner::new(&admitted.shared);
        for (runtime, period) in &asked {
            planner.add(Bandwidth::new(Nanos(*runtime), Nanos(*period)).unwrap(), None);
        }
        for (now, published) in slices {
            let demand = |(at, idle): &(u64, bool)| Demand { deadline: Nanos(*at), idle: *idle };
            let demands: Vec<_> = published.iter().map(demand).collect();
            planner.plan(Nanos(now), &demands);
            check_layout(&planner, &admitted, Nanos(now));
        }
    }
}
