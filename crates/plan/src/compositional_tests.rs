use proptest::prelude::*;

use super::*;

fn task(budget: u64, period: u64) -> Task {
    Task { budget, period }
}

#[test]
fn the_interfaces_that_rtvirt_quotes() {
    let ours = [(23, 30), (13, 20), (5, 10), (10, 100)].map(|(budget, period)| prm(&[task(budget, period)]).unwrap());
    assert_eq!(ours, [task(4, 5), task(3, 4), task(2, 3), task(1, 9)]);
    let total: Bandwidth = ours.iter().map(|one| one.bandwidth()).sum();
    assert_eq!(total.to_string(), "2.328");
}

#[test]
fn rt_xens_allocation_for_h_equiv_and_h_dec() {
    let total = |set: [(u64, u64); 4]| -> Bandwidth {
        set.iter().map(|(budget, period)| prm(&[task(*budget, *period)]).unwrap().bandwidth()).sum()
    };
    assert_eq!(total([(13, 20), (25, 40), (49, 80), (19, 100)]).to_string(), "2.283");
    // The paper: 0.807 of 3 CPUs are wasted.
    assert_eq!(total([(7, 10), (13, 20), (18, 40), (13, 100)]).to_string(), "2.193");
}

#[test]
fn the_memcached_reservations() {
    // The paper has (2, 14): the same bandwidth.
    assert_eq!(prm(&[task(66, 500)]).unwrap(), task(1, 7));
    for (budget, period) in [(2, 14), (66, 283), (33, 177)] {
        assert!(prm_supply(task(budget, period), 500) >= 66);
        assert!(prm_supply(task(budget - 1, period), 500) < 66, "({budget}, {period}) is the least of its period");
        assert!(prm_supply(task(budget, period + 1), 500) < 66, "({budget}, {period}) is the longest of its budget");
    }
}

#[test]
fn more_than_a_cpu_has_no_prm_and_absurd_hyperperiods_none_either() {
    assert_eq!(prm(&[task(6, 10), task(5, 10)]), None);
    assert_eq!(prm(&[]), None);
    assert_eq!(prm(&[task(1, 999_983), task(1, 999_979)]), None);
}

/// Supply of a periodic resource for every placement of its budget, unit by unit.
fn worst_supply(budget: u64, period: u64, cpus: u64, t: u64) -> u64 {
    // Two placements per period suffice for the worst case: all early or all late, each with the greatest concurrency.
    let unit = |turn: u64, inside: u64| {
        let place = if turn == 0 { inside } else { period - 1 - inside };
        budget.saturating_sub(place * cpus).min(cpus)
    };
    (0..=period).map(|from| (from..from + t).map(|at| unit(at / period, at % period)).sum()).min().unwrap()
}

proptest! {
    #[test]
    fn supplies_are_those_of_a_walk(period in 1u64..12, cpus in 1u64..4, part in 0u64..100, t in 0u64..60) {
        let budget = period * cpus * part / 99;
        prop_assert_eq!(mpr_supply(task(budget, period), cpus, t), worst_supply(budget, period, cpus, t));
        if cpus == 1 {
            prop_assert_eq!(prm_supply(task(budget, period), t), worst_supply(budget, period, 1, t));
        }
    }

    #[test]
    fn an_interface_holds_the_need_and_no_smaller_budget_does(
        set in prop::collection::vec((1u64..8, 8u64..25), 1..4)
    ) {
        let tasks: Vec<Task> = set.iter().map(|(budget, period)| task(*budget, *period)).collect();
        let need: Bandwidth = tasks.iter().map(|one| one.bandwidth()).sum();
        match prm(&tasks) {
            None => prop_assert!(need > Bandwidth::ONE),
            Some(found) => {
                prop_assert!(found.bandwidth() >= need);
                let less = task(found.budget - 1, found.period);
                let all = 40_000;
                prop_assert!((1..all).all(|t| edf_demand(&tasks, t) <= prm_supply(found, t)));
                prop_assert!((1..all).any(|t| edf_demand(&tasks, t) > prm_supply(less, t)));
            }
        }
    }

    #[test]
    fn multi_interfaces_cover_the_need(set in prop::collection::vec((1u64..8, 8u64..16), 1..5)) {
        let tasks: Vec<Task> = set.iter().map(|(budget, period)| task(*budget, *period)).collect();
        let need: Bandwidth = tasks.iter().map(|one| one.bandwidth()).sum();
        let whole = whole_cpus(&tasks).unwrap();
        prop_assert!(need <= Bandwidth::cpus(usize::try_from(whole).unwrap()));
        let dmpr = dmpr(&tasks).unwrap().dmpr_bandwidth();
        prop_assert!(dmpr >= need && dmpr <= Bandwidth::cpus(usize::try_from(whole).unwrap()));
        if let Some(mpr) = mpr(&tasks) {
            prop_assert!(mpr.mpr_bandwidth() >= need);
        }
    }
}
