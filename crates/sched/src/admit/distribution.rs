//! How much each guest may claim without asking the daemon ([`crate::ledger`]). Pure.
//!
//! In: what was admitted, and the offers before. Out: an [`Offer`] for each vCPU whose guest publishes its deadlines
//! and whose device process has a ledger. The offer is what the guest holds plus an equal part of what is free on the
//! vCPU's CPU (or on all shared CPUs together, for a vCPU without a home), at most what sched.toml allows. The
//! admission test checks that all offers fit at once. Offers stay the same while each guest holds no more than its
//! offer and no vCPU comes or goes.

use std::collections::BTreeMap;

use ontime_plan::{Bandwidth, Nanos};

use crate::admit::fit::{ROUNDING_PPM, fits};
use crate::admit::offer::Offer;
use crate::admit::pacing;
use crate::admit::reservations::{Reservations, Reserved};
use crate::model::Budget;

/// Fills in all offers; removes them if they do not fit.
pub(crate) fn distribute(reservations: &mut Reservations, before: &Reservations) {
    if reservations.vcpus.iter().all(|vcpu| vcpu.offer.is_none()) || keep_offers(reservations, before) {
        return;
    }
    let free_parts = free_parts(reservations);
    for vcpu in &mut reservations.vcpus {
        let (home, holds) = (vcpu.home, vcpu.claimed());
        let Some(offer) = &mut vcpu.offer else { continue };
        let part = Bandwidth::ppm(free_parts.get(&home).copied().unwrap_or(0));
        let most = (holds.bandwidth() + part).min(offer.most).max(holds.bandwidth());
        offer.offered.budget = most.of(Nanos(offer.offered.period)).0;
    }
    let whole = |vcpu: &Reserved| vcpu.offer.as_ref().is_none_or(|offer| vcpu.claimed().fits(&offer.offered));
    let largest = reservations.vcpus.iter().map(|vcpu| match &vcpu.offer {
        Some(offer) => Reserved {
            bandwidth: offer.declared.bandwidth + offer.offered.bandwidth(),
            ..in_the_shortest_period(vcpu, offer.offered.budget)
        },
        None => vcpu.clone(),
    });
    if !reservations.vcpus.iter().all(whole) || !fits(reservations, &largest.collect::<Vec<_>>()) {
        reservations.vcpus.iter_mut().for_each(|vcpu| vcpu.offer = None);
    }
}

/// The vCPU with the shortest period that its guest may claim, if it may claim any `budget`.
fn in_the_shortest_period(vcpu: &Reserved, budget: u64) -> Reserved {
    let shortest = vcpu.offer.as_ref().filter(|_| budget > 0).map_or(vcpu.period, |offer| Nanos(offer.offered.period));
    Reserved { period: vcpu.period.min(shortest), ..vcpu.clone() }
}

/// Whether the offers of `before` are still right: the same vCPUs on the same CPUs. If so, keeps them.
fn keep_offers(reservations: &mut Reservations, before: &Reservations) -> bool {
    let place =
        |reservations: &Reservations| (reservations.cpus.clone(), reservations.shared.clone(), reservations.beside);
    let is_like = place(reservations) == place(before) && reservations.kept == before.kept;
    if reservations.vcpus.len() != before.vcpus.len() || !is_like {
        return false;
    }
    let kept = reservations.vcpus.iter().zip(&before.vcpus).map(|(vcpu, old)| {
        let same = (vcpu.id, vcpu.home) == (old.id, old.home);
        match (&vcpu.offer, &old.offer) {
            (Some(new), Some(offer)) => {
                let like = Offer { offered: new.offered, ..offer.clone() } == *new;
                (same && like && vcpu.claimed().fits(&offer.offered)).then_some(Some(offer.offered))
            }
            // Without an offer, the bandwidth must not have grown.
            (None, None) => (same && vcpu.bandwidth <= old.bandwidth).then_some(None),
            _ => None,
        }
    });
    let Some(kept) = kept.collect::<Option<Vec<Option<Budget>>>>() else { return false };
    for (vcpu, offered) in reservations.vcpus.iter_mut().zip(kept) {
        if let (Some(offer), Some(offered)) = (&mut vcpu.offer, offered) {
            offer.offered = offered;
        }
    }
    true
}

/// For each home CPU (None: all shared CPUs together), an equal part of what is free there for each vCPU with an offer,
/// in millionths of a CPU.
fn free_parts(reservations: &Reservations) -> BTreeMap<Option<u32>, u64> {
    let free = 1_000_000_u64.saturating_sub(reservations.beside.reserve.whole_ppm());
    let vcpus: Vec<Reserved> = reservations.vcpus.iter().map(|vcpu| in_the_shortest_period(vcpu, 1)).collect();
    let pacers = |home| pacing::at_home(reservations, &vcpus, home).whole_ppm();
    let of = |home: Option<u32>| {
        let here = || reservations.vcpus.iter().filter(move |vcpu| vcpu.home == home);
        let shared = reservations.shared.iter().filter(|shared| **shared).count() as u64;
        let watcher = reservations.beside.watcher.whole_ppm();
        let whole = if home.is_some() { free } else { free.saturating_mul(shared).saturating_sub(watcher) };
        let kept = reservations.kept.iter().filter(|kept| kept.cpu == home).map(|kept| kept.bandwidth);
        let taken = here().map(|vcpu| vcpu.bandwidth).chain(kept);
        let taken: u64 = taken.map(|bandwidth| bandwidth.whole_ppm() + 2 * ROUNDING_PPM).sum();
        let parts = here().filter(|vcpu| vcpu.offer.is_some()).count().max(1) as u64;
        whole.saturating_sub(taken + 2 * ROUNDING_PPM + pacers(home)) / parts
    };
    reservations.vcpus.iter().map(|vcpu| (vcpu.home, of(vcpu.home))).collect()
}

#[cfg(test)]
#[path = "distribution_tests.rs"]
mod tests;
