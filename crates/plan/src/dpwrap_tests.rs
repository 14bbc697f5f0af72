use super::*;

fn busy(deadline_us: u64) -> Demand {
    Demand { deadline: Nanos::from_micros(deadline_us), idle: false }
}

#[test]
fn the_textbook_wrap_crosses_once_and_never_overlaps() {
    let mut planner = Planner::new(&[true, true]);
    for _ in 0..3 {
        planner.add(Bandwidth::new(Nanos(2), Nanos(3)).unwrap(), None);
    }
    let end = planner.plan(Nanos::ZERO, &[busy(3_000); 3]);
    assert_eq!(end, Nanos::from_millis(3));
    let shown: Vec<_> =
        planner.segments().iter().map(|s| (s.cpu, s.vcpu.0, s.start.0 / 1_000_000, s.end.0 / 1_000_000)).collect();
    assert_eq!(shown, [(0, 0, 0, 2), (0, 1, 2, 3), (1, 1, 0, 1), (1, 2, 1, 3)]);
    assert_eq!(planner.cpu(1).len(), 2);
    assert!(planner.cpu(7).is_empty());
}

#[test]
fn hostile_deadlines_are_clamped() {
    let mut planner = Planner::new(&[true]);
    planner.add(Bandwidth::ppm(500_000), None);
    let now = Nanos::from_millis(10);
    assert_eq!(planner.plan(now, &[busy(0)]), now + SLICE_MIN);
    assert_eq!(planner.plan(now, &[Demand { deadline: Nanos::MAX, idle: false }]), now + SLICE_MAX);
    assert_eq!(planner.plan(now, &[]), now + SLICE_MAX);
    assert!(planner.segments().is_empty());
    let late = Nanos(u64::MAX - 5);
    assert_eq!(planner.plan(late, &[busy(0)]), Nanos::MAX);
}

#[test]
fn a_sleeper_that_wakes_gets_its_bandwidth_of_what_is_left() {
    let mut planner = Planner::new(&[true]);
    let (a, b) = (planner.add(Bandwidth::ppm(500_000), None), planner.add(Bandwidth::ppm(500_000), None));
    planner.plan(Nanos::ZERO, &[busy(1_000), Demand { idle: true, ..busy(1_000) }]);
    assert_eq!(planner.segments().len(), 1);
    assert!(planner.wake(b, Nanos::from_micros(600)));
    let left: Vec<_> = planner.segments().iter().map(|s| (s.vcpu, s.start.0 / 1_000, s.end.0 / 1_000)).collect();
    assert_eq!(left, [(b, 600, 800)]);
    assert!(!planner.wake(b, Nanos::from_micros(600)), "it is awake");
    assert!(!planner.wake(a, Nanos::from_micros(600)), "it never slept");
    assert!(planner.sleep(b, Nanos::from_micros(700)));
    assert!(planner.wake(b, Nanos::from_micros(850)));
    assert_eq!(planner.segments().iter().map(|s| s.end.0 - s.start.0).sum::<u64>(), 50_000);
}

#[test]
fn a_removed_vcpu_leaves_and_its_place_is_used_again() {
    let mut planner = Planner::new(&[true, true]);
    let a = planner.add(Bandwidth::ppm(500_000), None);
    let b = planner.add(Bandwidth::ppm(500_000), Some(1));
    planner.plan(Nanos::ZERO, &[busy(1_000); 2]);
    planner.remove(b);
    assert!(planner.cpu(1).is_empty() && planner.cpu(0).len() == 1);
    let c = planner.add(Bandwidth::ppm(250_000), None);
    assert_eq!((a.index(), c.index()), (0, 1));
    planner.plan(Nanos::from_millis(1), &[busy(2_000); 2]);
    assert_eq!(planner.cpu(0).len(), 2);
}

#[test]
fn wake_ups_beside_a_pinned_vcpu_take_nobodys_time() {
    let half = Bandwidth::ppm(500_000);
    let mut planner = Planner::new(&[true; 3]);
    let sleepers = [planner.add(half, None), planner.add(half, None), planner.add(half, Some(1))];
    let others = [planner.add(half, None), planner.add(half, None)];
    let demand = |n: usize| Demand { idle: n < sleepers.len(), ..busy(1_000) };
    planner.plan(Nanos::ZERO, &[0, 1, 2, 3, 4].map(demand));
    let amount = |planner: &Planner, vcpu, from: u64, to: u64| -> u64 {
        let of = planner.segments().iter().filter(|segment| segment.vcpu == vcpu);
        of.map(|s| s.end.0.min(to * 1_000).saturating_sub(s.start.0.max(from * 1_000))).sum()
    };
    let had = others.map(|vcpu| amount(&planner, vcpu, 0, 500));
    for vcpu in sleepers {
        assert!(planner.wake(vcpu, Nanos::from_micros(500)));
    }
    for (vcpu, had) in others.into_iter().zip(had) {
        assert_eq!(had + amount(&planner, vcpu, 500, 1_000), 500_000);
    }
    assert_eq!(sleepers.map(|vcpu| amount(&planner, vcpu, 500, 1_000)), [250_000; 3]);
}

#[test]
fn what_a_sleeper_leaves_goes_to_who_crosses_to_its_cpu_and_comes_back() {
    let mut planner = Planner::new(&[true, true]);
    let two_thirds = Bandwidth::new(Nanos(2), Nanos(3)).unwrap();
    let [a, b, c] = [0; 3].map(|_| planner.add(two_thirds, None));
    planner.plan(Nanos::ZERO, &[busy(3_000); 3]);
    let shown = |planner: &Planner| -> Vec<_> {
        planner.segments().iter().map(|s| (s.cpu, s.vcpu, s.start.0 / 1_000, s.end.0 / 1_000)).collect()
    };
    assert!(planner.sleep(a, Nanos::from_micros(500)));
    assert_eq!(shown(&planner), [(0, b, 500, 2_000), (1, c, 500, 2_500)], "b crosses no more");
    assert!(planner.wake(a, Nanos::from_micros(500)));
    assert_eq!(shown(&planner), [(0, a, 500, 2_000), (0, b, 2_000, 3_000), (1, b, 500, 1_000), (1, c, 1_000, 3_000)]);
}

/// Three vCPUs of one third each fill a CPU. Every second slice leaves a nanosecond, which the first vCPU gets.
/// `between` changes that vCPU between the slices; the others must not lose time by it.
fn thirds_stay_exact(mut between: impl FnMut(&mut Planner, u64) -> bool) {
    let third = Bandwidth::new(Nanos(1), Nanos(3)).unwrap();
    let mut planner = Planner::new(&[true]);
    let vcpus = [0; 3].map(|_| planner.add(third, None));
    let (mut now, mut had) = (Nanos::ZERO, [0; 3]);
    for round in 0..100 {
        let idle = between(&mut planner, round);
        let deadline = now + Nanos(if round % 2 == 0 { 250_000 } else { 300_000 });
        let demands = [idle, false, false].map(|idle| Demand { deadline, idle });
        now = planner.plan(now, &demands);
        for segment in planner.segments() {
            had[segment.vcpu.index()] += segment.end.0 - segment.start.0;
        }
        for vcpu in &vcpus[1..] {
            assert!(had[vcpu.index()] >= now.0 / 3, "{} of {} in round {round}", had[vcpu.index()], now.0 / 3);
        }
    }
}

#[test]
fn who_sleeps_stays_ahead() {
    thirds_stay_exact(|_, round| round % 2 == 1);
}

#[test]
fn who_comes_in_place_of_one_that_left_ahead_begins_behind() {
    thirds_stay_exact(|planner, round| {
        if round > 0 {
            planner.remove(VcpuId(0));
            planner.add(Bandwidth::new(Nanos(1), Nanos(3)).unwrap(), None);
        }
        false
    });
}

#[test]
fn who_changes_stays_ahead() {
    thirds_stay_exact(|planner, round| {
        let period = 3_000 + 3 * (round % 2);
        planner.change(VcpuId(0), Bandwidth::new(Nanos(period / 3), Nanos(period)).unwrap(), None);
        false
    });
}
