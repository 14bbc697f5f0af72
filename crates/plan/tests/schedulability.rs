//! The simulator against an exact test: a set with deadlines on the planner's grid meets all of them if and only if its
//! bandwidth is at most that of the CPUs, and each vCPU's is at most one (optimality of DP-WRAP, Levin et al., theorem
//! 6).

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test ends by panicking")]

use std::collections::BTreeSet;

use ontime_plan::simulate::{Options, Outcome, simulate};
use ontime_plan::{Admission, Admitted, Arrivals, Bandwidth, Nanos, Refusal, Reservation, Rta, Vcpu};
use proptest::prelude::*;

const OPTIONS: Options =
    Options { duration: Nanos(0), record: Nanos::ZERO, sporadic_delay: Nanos::ZERO, seed: 1, scattered: false };

/// Periods in units of 250 us with a hyperperiod of 15 ms.
const PERIODS: [u64; 8] = [2, 3, 4, 5, 6, 10, 12, 20];

fn vcpu(rtas: &[(u64, u64)], arrivals: Arrivals, slack: Nanos) -> Option<Vcpu> {
    let rtas = rtas.iter().map(|(slice, period)| Rta::new(Nanos(*slice), Nanos(*period), arrivals).unwrap()).collect();
    Vcpu::new(rtas, slack, None).ok()
}

fn admit(vcpus: &[Vcpu], cpus: u32) -> Result<Admitted, Refusal> {
    Admission::new(cpus, Bandwidth::ZERO).admit(&vcpus.iter().map(Reservation::from).collect::<Vec<_>>())
}

fn run(vcpus: &[Vcpu], admitted: &Admitted, duration: Nanos, sporadic_delay: Nanos, seed: u64) -> Outcome {
    simulate(vcpus, admitted, &Options { duration, sporadic_delay, seed, ..OPTIONS })
}

/// Whether a vCPU is pinned, and to which CPU.
fn pins() -> impl Strategy<Value = Option<u32>> {
    prop::option::weighted(0.3, any::<u32>())
}

fn affinity(pin: Option<u32>, cpus: u32) -> Option<BTreeSet<u32>> {
    pin.map(|pin| [pin % cpus].into())
}

/// vCPUs with one to three RTAs, each as (thousandths of its period, period).
fn guests(most: usize) -> impl Strategy<Value = Vec<Vec<(u64, usize)>>> {
    let rta = (1u64..=1000, 0usize..PERIODS.len());
    prop::collection::vec(prop::collection::vec(rta, 1..=most), 1..12)
}

fn build(set: &[Vec<(u64, usize)>], arrivals: Arrivals, slack: Nanos) -> Vec<Vcpu> {
    let rta = |&(part, period): &(u64, usize), count: usize| {
        let period = PERIODS[period] * 250_000;
        ((period * part / 1000 / count as u64).max(1), period)
    };
    let guest = |rtas: &Vec<(u64, usize)>| {
        let rtas: Vec<_> = rtas.iter().map(|one| rta(one, rtas.len())).collect();
        vcpu(&rtas, arrivals, slack)
    };
    set.iter().filter_map(guest).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn periodic_sets_meet_all_deadlines_if_and_only_if_they_fit(set in guests(3), cpus in 1u32..6) {
        let vcpus = build(&set, Arrivals::Periodic, Nanos::ZERO);
        let hyperperiod = Nanos::from_millis(15);
        // The exact test, in nanoseconds of work per hyperperiod; vCPUs near a whole CPU count as one.
        let work: u64 = vcpus.iter().map(|vcpu| vcpu.bandwidth().of(hyperperiod).0).sum();
        let fits = work <= u64::from(cpus) * hyperperiod.0;
        let admitted = admit(&vcpus, cpus);
        prop_assert_eq!(admitted.is_ok(), fits);
        match admitted {
            Ok(admitted) => {
                let outcome = run(&vcpus, &admitted, Nanos(3 * hyperperiod.0), Nanos::ZERO, 1);
                prop_assert_eq!(outcome.missed(), 0);
                let jobs: u64 = vcpus.iter().flat_map(Vcpu::rtas).map(|rta| 3 * hyperperiod.0 / rta.period().0).sum();
                prop_assert_eq!(outcome.jobs(), jobs);
            }
            Err(_) => {
                let need: Bandwidth = vcpus.iter().map(Vcpu::need).sum();
                prop_assume!(need > Bandwidth::cpus(cpus as usize));
                let forced = Admitted { home: vec![None; vcpus.len()], shared: vec![true; cpus as usize], total: need };
                let outcome = run(&vcpus, &forced, hyperperiod, Nanos::ZERO, 1);
                prop_assert!(outcome.missed() > 0, "more work than time, and no miss");
            }
        }
    }

    /// One sporadic RTA per vCPU, some pinned, with arrivals at any nanosecond. The periods are long enough that the
    /// shortest slice does not matter beside the slack.
    #[test]
    fn sporadic_sets_with_slack_meet_all_deadlines(
        set in prop::collection::vec((1u64..=1000, 8_000_000u64..30_000_000, pins()), 1..12),
        cpus in 1u32..5, delay in 0u64..20_000_000, seed in any::<u64>(),
    ) {
        let slack = Nanos::from_micros(500);
        let vcpus: Vec<Vcpu> = set
            .iter()
            .filter_map(|(part, period, pin)| {
                let slice = Nanos((period - 1_000_000) * part / 1000);
                let rta = Rta::new(slice, Nanos(*period), Arrivals::Sporadic).unwrap();
                Vcpu::new(vec![rta], slack, affinity(*pin, cpus)).ok()
            })
            .collect();
        let Ok(admitted) = admit(&vcpus, cpus) else { return Ok(()) };
        let outcome = run(&vcpus, &admitted, Nanos::from_millis(300), Nanos(delay), seed);
        prop_assert_eq!(outcome.missed(), 0, "{:?}", outcome.rtas);
    }

    /// Several RTAs per vCPU, some sporadic, some vCPUs pinned: the slices are then as short as the slack.
    #[test]
    fn mixed_guests_with_slack_meet_all_deadlines(
        set in prop::collection::vec(
            (prop::collection::vec((1u64..=1000, 12_000_000u64..40_000_000, any::<bool>()), 1..4), pins()),
            1..6,
        ),
        cpus in 1u32..4, delay in 0u64..20_000_000, seed in any::<u64>(), scattered in any::<bool>(),
    ) {
        let slack = Nanos::from_micros(1_000);
        let guest = |(rtas, pin): &(Vec<(u64, u64, bool)>, Option<u32>)| {
            let count = rtas.len() as u64;
            let rta = |&(part, period, sporadic): &(u64, u64, bool)| {
                let slice = ((period - 2_000_000) * part / 1000 / count).max(1_000);
                let arrivals = if sporadic { Arrivals::Sporadic } else { Arrivals::Periodic };
                Rta::new(Nanos(slice), Nanos(period), arrivals).unwrap()
            };
            Vcpu::new(rtas.iter().map(rta).collect(), slack, affinity(*pin, cpus)).ok()
        };
        let vcpus: Vec<Vcpu> = set.iter().filter_map(guest).collect();
        let Ok(admitted) = admit(&vcpus, cpus) else { return Ok(()) };
        let options = Options {
            duration: Nanos::from_millis(200), sporadic_delay: Nanos(delay), seed, scattered, ..OPTIONS
        };
        let outcome = simulate(&vcpus, &admitted, &options);
        prop_assert_eq!(outcome.missed(), 0, "{:?}", outcome.rtas);
    }
}

#[test]
fn a_set_of_both_kinds_misses_only_what_has_no_slack_and_by_less_than_a_slice() {
    // RTVirt's Figure 5b: memcached, then video, in us.
    let set = [(58, 500, 5), (19_000, 41_000, 3), (18_000, 33_000, 3), (17_000, 20_000, 2), (15_000, 16_000, 2)];
    let vcpus: Vec<Vcpu> = set
        .iter()
        .flat_map(|&(slice, period, copies)| {
            let (arrivals, slack) = if period == 500 { (Arrivals::Sporadic, 0) } else { (Arrivals::Periodic, 500_000) };
            let one = vcpu(&[(slice * 1_000, period * 1_000)], arrivals, Nanos(slack)).unwrap();
            std::iter::repeat_n(one, copies)
        })
        .collect();
    let admitted = admit(&vcpus, 15).unwrap();
    let duration = Nanos::from_millis(5_000);
    assert_eq!(run(&vcpus, &admitted, duration, Nanos::ZERO, 1).missed(), 0);
    let outcome = run(&vcpus, &admitted, duration, Nanos::from_millis(20), 1);
    let (memcached, video) = outcome.rtas.split_at(5);
    assert!(memcached.iter().all(|of| of.missed > 0 && of.late_max < Nanos::from_micros(250)), "{memcached:?}");
    assert!(video.iter().all(|of| of.jobs > 0 && of.missed == 0), "{video:?}");
}

/// A sporadic RTA that leaves little of its CPU, without slack, beside a small periodic one.
#[test]
fn jobs_without_slack_may_be_late_by_more_than_a_slice_but_by_less_than_the_bound() {
    let mut worst = Nanos::ZERO;
    for (slice, seed) in (860..=980).step_by(8).zip(1..) {
        let vcpus = [
            vcpu(&[(slice * 1_000, 1_000_000)], Arrivals::Sporadic, Nanos::ZERO).unwrap(),
            vcpu(&[(20_000, 3_000_000)], Arrivals::Periodic, Nanos::ZERO).unwrap(),
        ];
        let admitted = admit(&vcpus, 1).unwrap();
        let outcome = run(&vcpus, &admitted, Nanos::from_millis(2_000), Nanos::from_micros(900), seed);
        for of in &outcome.rtas {
            assert!(of.late_max < vcpus[of.vcpu].late_bound(), "{slice} us: {of:?}");
            worst = worst.max(of.late_max);
        }
    }
    assert!(worst > Nanos::from_micros(250), "the bound could be a slice: {worst}");
}

#[test]
fn nothing_is_counted_of_what_comes_after_the_simulated_time() {
    let vcpus = [vcpu(&[(30_000_000, 60_000_000)], Arrivals::Periodic, Nanos::ZERO).unwrap()];
    let admitted = admit(&vcpus, 1).unwrap();
    for (simulated, used) in [(10, 10), (60, 30), (100, 60)]
        .map(|(simulated, used)| (Nanos::from_millis(simulated), Nanos::from_millis(used)))
    {
        let outcome = run(&vcpus, &admitted, simulated, Nanos::ZERO, 1);
        assert_eq!((outcome.used, outcome.missed()), (used, 0), "in {simulated}");
    }
}

#[test]
fn the_motivation_of_the_paper_is_cured() {
    // Figure 1: two RTAs in VM1 (1 and 4 in 15), beside VMs with (5, 10) and (5, 30): the CPU is exactly full.
    let ms = |n: u64| n * 1_000_000;
    let vm1 = vcpu(&[(ms(1), ms(15)), (ms(4), ms(15))], Arrivals::Periodic, Nanos::ZERO).unwrap();
    let vm2 = vcpu(&[(ms(5), ms(10))], Arrivals::Periodic, Nanos::ZERO).unwrap();
    let vm3 = vcpu(&[(ms(5), ms(30))], Arrivals::Periodic, Nanos::ZERO).unwrap();
    let vcpus = [vm1, vm2, vm3];
    let admitted = admit(&vcpus, 1).unwrap();
    let outcome = run(&vcpus, &admitted, Nanos::from_millis(3_000), Nanos::ZERO, 1);
    assert_eq!((outcome.jobs(), outcome.missed()), (200 + 200 + 300 + 100, 0));
    assert_eq!(outcome.used, Nanos::from_millis(3_000));
}
