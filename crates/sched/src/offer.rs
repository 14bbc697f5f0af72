//! What each guest is offered, to be taken without asking ([`crate::ledger`]). Pure.
//!
//! In: what was admitted, and what was offered before. Out: an [`Offer`] for each vCPU whose guest publishes its
//! deadlines and whose device process has a ledger: what it holds, and an equal part of what is left on its CPU (of all
//! CPUs that are shared, where it has none of its own), at the most what sched.toml allows it. All of that fits
//! together, whoever takes it: the admission is asked. As long as everybody holds within what he is offered, and nobody
//! came or went, offers stay.

use std::collections::BTreeMap;

use ontime_plan::{Bandwidth, Nanos};

use crate::account::Share;
use crate::guest::PERIOD_MIN;
use crate::ledger::{Budget, Ledger};
use crate::settle::{ROUNDING_PPM, Reserved, Settled, fits};

/// What a vCPU's guest is offered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// Where it is taken.
    pub ledger: Ledger,
    /// What the vCPU has beside what its guest holds.
    pub declared: Share,
    /// What sched.toml allows its guest.
    pub most: Bandwidth,
    /// In all, with what it holds; in no shorter period.
    pub offered: Budget,
}

impl Offer {
    /// With nothing offered yet; `shortest` is what sched.toml allows.
    pub(crate) fn new(ledger: Ledger, declared: Share, most: Bandwidth, shortest: Nanos) -> Self {
        // In shorter ones the end of a slice is not exact enough: then a need costs more than it says.
        let period = shortest.max(PERIOD_MIN).0;
        Self { ledger, declared, most, offered: Budget { budget: 0, period } }
    }

    /// The vCPU's share where its guest holds this; None where that is not offered.
    pub fn share(&self, held: &Budget) -> Option<Share> {
        let Share { bandwidth, period } = self.declared;
        let nothing = held.budget == 0;
        held.fits(&self.offered).then(|| Share {
            bandwidth: bandwidth + held.bandwidth(),
            period: if nothing { period } else { period.min(held.period) },
        })
    }
}

/// What a vCPU's guest holds.
pub fn held(vcpu: &Reserved) -> Budget {
    vcpu.guest.map_or_else(Budget::default, |need| Budget { budget: need.budget.0, period: need.period.0 })
}

/// Fills the offers of all that have one; takes them away where they do not fit.
pub(crate) fn spread(settled: &mut Settled, before: &Settled) {
    if settled.vcpus.iter().all(|vcpu| vcpu.offer.is_none()) || stays(settled, before) {
        return;
    }
    let left = left(settled);
    for vcpu in &mut settled.vcpus {
        let (home, holds) = (vcpu.home, held(vcpu));
        let Some(offer) = &mut vcpu.offer else { continue };
        let part = Bandwidth::ppm(left.get(&home).copied().unwrap_or(0));
        let most = (holds.bandwidth() + part).min(offer.most).max(holds.bandwidth());
        offer.offered.budget = most.of(Nanos(offer.offered.period)).0;
    }
    let whole = |vcpu: &Reserved| vcpu.offer.as_ref().is_none_or(|offer| held(vcpu).fits(&offer.offered));
    let largest = settled.vcpus.iter().map(|vcpu| Reserved {
        bandwidth: vcpu
            .offer
            .as_ref()
            .map_or(vcpu.bandwidth, |offer| offer.declared.bandwidth + offer.offered.bandwidth()),
        ..vcpu.clone()
    });
    if !settled.vcpus.iter().all(whole) || !fits(settled, &largest.collect::<Vec<_>>()) {
        settled.vcpus.iter_mut().for_each(|vcpu| vcpu.offer = None);
    }
}

/// Whether what was offered before still is, to the same vCPUs in the same places; takes it over.
fn stays(settled: &mut Settled, before: &Settled) -> bool {
    let place = |settled: &Settled| (settled.cpus.clone(), settled.shared.clone(), settled.reserve);
    if settled.vcpus.len() != before.vcpus.len() || place(settled) != place(before) {
        return false;
    }
    let kept = settled.vcpus.iter().zip(&before.vcpus).map(|(vcpu, old)| {
        let same = (vcpu.id, vcpu.home) == (old.id, old.home);
        match (&vcpu.offer, &old.offer) {
            (Some(new), Some(offer)) => {
                let like = Offer { offered: new.offered, ..offer.clone() } == *new;
                (same && like && held(vcpu).fits(&offer.offered)).then_some(Some(offer.offered))
            }
            // What is not offered has not grown.
            (None, None) => (same && vcpu.bandwidth <= old.bandwidth).then_some(None),
            _ => None,
        }
    });
    let Some(kept) = kept.collect::<Option<Vec<Option<Budget>>>>() else { return false };
    for (vcpu, offered) in settled.vcpus.iter_mut().zip(kept) {
        if let (Some(offer), Some(offered)) = (&mut vcpu.offer, offered) {
            offer.offered = offered;
        }
    }
    true
}

/// By CPU (None: those that are shared, together), each one's part of what is left there, in millionths of a CPU.
fn left(settled: &Settled) -> BTreeMap<Option<u32>, u64> {
    let ppm = |bandwidth: Bandwidth| {
        let parts = (u128::from(bandwidth.runtime()) * 1_000_000).div_ceil(u128::from(bandwidth.period()));
        u64::try_from(parts).unwrap_or(u64::MAX)
    };
    let free = 1_000_000_u64.saturating_sub(ppm(settled.reserve));
    let of = |home: Option<u32>| {
        let here = || settled.vcpus.iter().filter(move |vcpu| vcpu.home == home);
        let shared = settled.shared.iter().filter(|shared| **shared).count() as u64;
        let whole = if home.is_some() { free } else { free.saturating_mul(shared) };
        let taken: u64 = here().map(|vcpu| ppm(vcpu.bandwidth) + 2 * ROUNDING_PPM).sum();
        let parts = here().filter(|vcpu| vcpu.offer.is_some()).count().max(1) as u64;
        whole.saturating_sub(taken + 2 * ROUNDING_PPM) / parts
    };
    settled.vcpus.iter().map(|vcpu| (vcpu.home, of(vcpu.home))).collect()
}

#[cfg(test)]
#[path = "offer_tests.rs"]
mod tests;
