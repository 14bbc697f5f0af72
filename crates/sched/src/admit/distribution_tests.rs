//! How large offers are, and when they stay the same.

use ontime_tenants::{Class, ThreadId};
use proptest::prelude::*;

use super::*;
use crate::admit::request::GuestNeed;
use crate::ledger::Ledger;
use crate::model::{Pacing, Share};
use crate::sim::admitted;

const MS: u64 = 1_000_000;

/// VMs of one vCPU each, with a tenth of a CPU declared. Each holds `holds` ms in 20 ms (None: the vCPU has no offer).
/// None if they are not admitted.
fn reservations(
    cpus: u32,
    home: impl Fn(u32) -> Option<u32>,
    holds: &[Option<u64>],
    ledger: &Ledger,
) -> Option<Reservations> {
    let declared = Bandwidth::ppm(100_000);
    let vcpu = |(number, holds): (u32, &Option<u64>)| {
        let need = holds.filter(|ms| *ms > 0);
        let guest = need.map(|ms| GuestNeed { vcpu: 0, budget: Nanos(ms * MS), period: Nanos(20 * MS) });
        let more = guest.map_or(Bandwidth::ZERO, |need| Bandwidth::new(need.budget, need.period).unwrap());
        let bandwidth = declared + more;
        Reserved {
            id: ThreadId { pid: 1, tid: 100 + i32::try_from(number).unwrap(), start_time: 1 },
            tenant: format!("vm{number}"),
            class: Class::Bulk,
            vcpu: 0,
            budget: bandwidth.of(Nanos(20 * MS)),
            period: Nanos(20 * MS),
            bandwidth,
            guest,
            page: None,
            offer: holds.map(|_| {
                Offer::new(
                    ledger.clone(),
                    Share { bandwidth: declared, period: 20 * MS },
                    Bandwidth::ppm(800_000),
                    Nanos(4 * MS),
                )
            }),
            home: home(number),
            pinned: false,
            leased: false,
        }
    };
    admitted(cpus, Bandwidth::ppm(50_000), (0..).zip(holds).map(vcpu).collect())
}

/// The offers in thousandths of a CPU; None: no offer.
fn offered(reservations: &Reservations) -> Vec<Option<u64>> {
    let of = |vcpu: &Reserved| vcpu.offer.as_ref().map(|offer| offer.offered.budget * 1_000 / offer.offered.period);
    reservations.vcpus.iter().map(of).collect()
}

fn distribute_anew(reservations: Option<Reservations>) -> Reservations {
    let mut reservations = reservations.unwrap();
    distribute(&mut reservations, &Reservations::default());
    reservations
}

#[test]
fn free_time_is_offered_in_equal_parts_up_to_the_allowed_limit() {
    let ledger = Ledger::create().unwrap();
    let none = |_| None;
    // 0.95 of a CPU can be reserved, 0.1 is declared.
    assert_eq!(offered(&distribute_anew(reservations(1, none, &[Some(0)], &ledger))), [Some(800)]);
    let two = distribute_anew(reservations(1, none, &[Some(0), Some(4)], &ledger));
    // 0.55 is free.
    assert_eq!(offered(&two), [Some(274), Some(474)]);
    assert_eq!(offered(&distribute_anew(reservations(1, none, &[Some(0), None], &ledger))), [Some(749), None]);
    // For each CPU if all vCPUs have a home.
    let homes = distribute_anew(reservations(2, |number| Some(number % 2), &[Some(0), Some(4), Some(0)], &ledger));
    assert_eq!(offered(&homes), [Some(374), Some(800), Some(374)]);
    let full = distribute_anew(reservations(1, none, &[Some(7), Some(7)], &ledger));
    let held: Vec<_> = full.vcpus.iter().map(Reserved::claimed).collect();
    let offers: Vec<_> = full.vcpus.iter().map(|vcpu| vcpu.offer.as_ref().unwrap().offered).collect();
    assert!(held.iter().zip(&offers).all(|(held, offer)| held.fits(offer)), "{offers:?}");
}

/// Guests may claim in periods of 4 ms: the pacers' time for these windows is not offered.
#[test]
fn the_pacers_time_is_not_offered() {
    let ledger = Ledger::create().unwrap();
    for (cpus, homes) in [(1, None), (2, Some(2)), (2, None)] {
        let home = |number: u32| homes.map(|homes| number % homes);
        let paced = |pacing| {
            let mut now = reservations(cpus, home, &[Some(0), Some(4), Some(0)], &ledger).unwrap();
            now.pacing = pacing;
            distribute(&mut now, &Reservations::default());
            now
        };
        let (without, with) = (paced(Pacing::None), paced(Pacing::Best));
        for (without, with) in offered(&without).into_iter().zip(offered(&with)) {
            assert!(with.unwrap() + 10 < without.unwrap() || without == Some(800), "{with:?} of {without:?}");
        }
        let claimed = |vcpu: &Reserved| {
            let offer = vcpu.offer.as_ref().unwrap();
            let share = offer.share(&offer.offered).unwrap();
            Reserved { bandwidth: share.bandwidth, period: Nanos(share.period), ..vcpu.clone() }
        };
        let all: Vec<Reserved> = with.vcpus.iter().map(claimed).collect();
        assert!(all.iter().all(|vcpu| vcpu.period == Nanos(4 * MS)) && fits(&with, &all), "{cpus} CPUs: {all:?}");
    }
}

#[test]
fn offers_stay_while_all_hold_within_them() {
    let ledger = Ledger::create().unwrap();
    let at = |holds: &[Option<u64>], before: &Reservations| {
        let mut now = reservations(1, |_| None, holds, &ledger).unwrap();
        distribute(&mut now, before);
        now
    };
    let first = distribute_anew(reservations(1, |_| None, &[Some(0), Some(4), None], &ledger));
    let (second, third) = (at(&[Some(3), Some(4), None], &first), at(&[Some(9), Some(0), None], &first));
    assert_eq!(offered(&second), offered(&first), "taken within");
    assert_ne!(offered(&third), offered(&first), "beyond: all anew");
    assert_ne!(offered(&at(&[Some(3), Some(4)], &first)), offered(&first)[..2], "one is gone");
    let mut pinned = first.clone();
    pinned.vcpus[0].home = Some(0);
    assert!(
        !keep_offers(&mut reservations(1, |_| None, &[Some(0), Some(4), None], &ledger).unwrap(), &pinned),
        "elsewhere"
    );
    let another = Ledger::create().unwrap();
    let mut other = reservations(1, |_| None, &[Some(0), Some(4), None], &another).unwrap();
    assert!(!keep_offers(&mut other, &first), "another device process");
}

#[test]
fn a_claim_beyond_the_offer_is_ignored() {
    let ledger = Ledger::create().unwrap();
    let one = distribute_anew(reservations(1, |_| None, &[Some(0)], &ledger));
    let offer = one.vcpus[0].offer.as_ref().unwrap();
    let share = |budget, period| offer.share(&Budget { budget, period });
    let is = |ppm, period| Some(Share { bandwidth: Bandwidth::ppm(ppm), period });
    assert_eq!(share(0, 0), is(100_000, 20 * MS));
    assert_eq!(share(8 * MS, 16 * MS), is(600_000, 16 * MS));
    assert_eq!(share(8 * MS, 80 * MS), is(200_000, 20 * MS));
    for (budget, period) in [(MS, 3 * MS), (9 * MS, 10 * MS), (1, 0), (u64::MAX, u64::MAX)] {
        assert_eq!(share(budget, period), None, "{budget} in {period}");
    }
}

proptest! {
    /// If every guest claims its whole offer, whatever it held before, all are admitted.
    #[test]
    fn all_offers_fit_at_once(
        cpus in 1u32..4,
        holds in proptest::collection::vec((any::<bool>(), 0u64..16), 1..8),
        pinned in any::<bool>(),
    ) {
        let ledger = Ledger::create().unwrap();
        let holds: Vec<Option<u64>> = holds.into_iter().map(|(offered, ms)| offered.then_some(ms)).collect();
        let home = |number: u32| (pinned && cpus > 1).then_some(number % cpus);
        let before = reservations(cpus, home, &holds, &ledger);
        prop_assume!(before.is_some());
        let now = distribute_anew(before);
        prop_assert_eq!(now.vcpus.iter().filter(|vcpu| vcpu.offer.is_some()).count(), holds.iter().flatten().count());
        let mut all = now.vcpus.clone();
        for vcpu in &mut all {
            let holds = vcpu.claimed();
            if let Some(offer) = &vcpu.offer {
                prop_assert!(holds.fits(&offer.offered));
                vcpu.bandwidth = offer.share(&offer.offered).unwrap().bandwidth;
            }
        }
        prop_assert!(fits(&now, &all));
    }
}
