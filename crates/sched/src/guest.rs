//! What a guest's deadline tasks ask for, and what the host has to supply so that they have it. Pure.
//!
//! A guest asks for `budget` in each `period` of a vCPU: the sum of its tasks' shares in the shortest of their periods.
//! Its periods begin when its tasks say, the host's slices when all vCPUs' do. As RTVirt's guests do, one may publish
//! its next deadlines ([`crate::published`]): slices end there, and it needs what it asks for, no more. For one that
//! does not, the host supplies as a periodic resource whose phase nobody knows (Shin and Lee's PRM): in each `P` at
//! least `Q`, in the worst case nothing for `2 (P - Q)` first. What that costs is the price of not knowing the deadline
//! ([`supply`]).

use std::collections::BTreeMap;

use ontime_plan::{Bandwidth, Nanos};

use crate::ledger::{self, Budget, Ledger, NOTHING};
use crate::published::Page;

/// Shorter than this a supply's period is not: a slice takes some changes of place.
pub(crate) const PERIOD_MIN: Nanos = Nanos::from_millis(1);
/// Longer it need not be.
const PERIOD_MAX: Nanos = Nanos::from_millis(50);
/// The supply's period, as a part of the guest's: shorter costs less bandwidth and more changes of place.
const PART: u64 = 8;

/// What one vCPU of a guest needs for its deadline tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestNeed {
    /// Which.
    pub vcpu: u32,
    /// CPU time within each period.
    pub budget: Nanos,
    /// The period.
    pub period: Nanos,
}

/// What a guest asks for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ask {
    /// For each vCPU that needs any.
    pub needs: Vec<GuestNeed>,
    /// Where it publishes its next deadlines, if it does.
    pub page: Option<Page>,
    /// It was admitted as one that does; where is to be told.
    pub published: bool,
    /// Where it takes what it is offered.
    pub taking: Option<Taking>,
}

/// Where a guest takes what it is offered, and up to where that is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taking {
    /// There.
    pub ledger: Ledger,
    /// The generation of its last claim that is in [`Ask::needs`].
    pub claimed: u64,
    /// That of the last offer.
    pub offered: u64,
}

impl Taking {
    /// Of one to whom nothing was offered yet.
    pub fn new(ledger: Ledger, claimed: u64) -> Self {
        Self { ledger, claimed, offered: 0 }
    }

    /// The last generation of which what is held is known.
    pub fn known(&self) -> u64 {
        self.claimed.max(self.offered)
    }
}

impl Ask {
    /// What it holds, by vCPU.
    pub fn held(&self) -> ledger::Table {
        let mut table = NOTHING;
        for need in &self.needs {
            if let Some(held) = table.get_mut(need.vcpu as usize) {
                *held = Budget { budget: need.budget.0, period: need.period.0 };
            }
        }
        table
    }
}

/// What is held by vCPU, as needs.
pub fn needs(held: &ledger::Table) -> Vec<GuestNeed> {
    let some = (0..).zip(held).filter(|(_, held)| held.budget > 0);
    some.map(|(vcpu, held)| GuestNeed { vcpu, budget: Nanos(held.budget), period: Nanos(held.period) }).collect()
}

/// What guests ask for, by VM.
pub type Asks = BTreeMap<String, Ask>;

/// Budget and period of the host that give a guest its `budget` in every `period`, wherever that begins; None where a
/// whole CPU does not.
///
/// The smallest Q with Q (t - 2 (P - Q)) / P >= t budget / period for t = period: the left side is the least supply of
/// any interval of t (its linear bound), and for longer t it grows faster than the right one.
pub fn supply(budget: Nanos, period: Nanos) -> Option<(Nanos, Nanos)> {
    let own = Nanos((period.0 / PART).clamp(PERIOD_MIN.0, PERIOD_MAX.0));
    let (need, length, per) = (i128::from(budget.0), i128::from(period.0), i128::from(own.0));
    let enough = |q: u64| {
        let q = i128::from(q);
        q * (length - 2 * (per - q)) >= need * per
    };
    if budget.0 == 0 || budget > period || !enough(own.0) {
        return None;
    }
    // The left side falls, if at all, only below 0, then rises.
    let (mut low, mut high) = (0, own.0);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if enough(middle) { high = middle } else { low = middle }
    }
    Some((Nanos(high), own))
}

/// The same as bandwidth; where its deadlines are published, what it asks for, in its own period.
pub fn bandwidth(need: &GuestNeed, published: bool) -> Option<(Bandwidth, Nanos)> {
    // In a period of a few least slices, where these end is not exact enough.
    if published && need.period >= PERIOD_MIN {
        let bandwidth = Bandwidth::new(need.budget, need.period)?;
        return (need.budget.0 > 0 && bandwidth <= Bandwidth::ONE).then_some((bandwidth, need.period));
    }
    let (budget, period) = supply(need.budget, need.period)?;
    Some((Bandwidth::new(budget, period)?, period))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The least supply of any interval of `t` (Shin and Lee, 2003).
    fn least(q: u64, p: u64, t: u64) -> u64 {
        let gap = p - q;
        let Some(rest) = t.checked_sub(gap) else { return 0 };
        let k = rest / p;
        k * q + (t - gap - k * p).saturating_sub(gap)
    }

    #[test]
    fn what_not_knowing_the_deadline_costs() {
        let of = |budget: u64, period: u64| {
            let (q, p) = supply(Nanos::from_micros(budget), Nanos::from_micros(period)).unwrap();
            (q.0 / 1_000, p.0 / 1_000)
        };
        assert_eq!(of(6_000, 20_000), (893, 2_500), "0.357 for 0.300");
        assert_eq!(of(1_000, 4_000), (366, 1_000), "0.366 for 0.250");
        assert_eq!(of(10_000, 100_000), (1_598, 12_500), "0.128 for 0.100");
        assert_eq!(of(20_000, 20_000), (2_500, 2_500));
        assert_eq!(supply(Nanos::from_millis(3), Nanos::from_millis(2)), None);
        assert_eq!(supply(Nanos::ZERO, Nanos::from_millis(2)), None);
    }

    #[test]
    fn knowing_it_costs_nothing() {
        let need = |budget, period| GuestNeed { vcpu: 0, budget: Nanos(budget), period: Nanos(period) };
        let (exact, period) = bandwidth(&need(6_000_000, 20_000_000), true).unwrap();
        assert_eq!((exact, period), (Bandwidth::ppm(300_000), Nanos::from_millis(20)));
        assert!(bandwidth(&need(6_000_000, 20_000_000), false).unwrap().0 > exact);
        // Too short for slices to end there exactly.
        assert!(bandwidth(&need(100_000, 500_000), true).is_none_or(|(more, _)| more > Bandwidth::ppm(200_000)));
        assert_eq!(bandwidth(&need(3, 2), true), None);
        assert_eq!(bandwidth(&need(0, 2_000_000), true), None);
    }

    proptest! {
        /// Every interval of the period's length and of its multiples has what was asked for.
        #[test]
        fn every_interval_has_it(period in 100_000u64..4_000_000_000, part in 1u64..1_000, times in 1u64..20) {
            let budget = (period / 1_000 * part).max(1);
            let (q, p) = supply(Nanos(budget), Nanos(period)).unwrap();
            prop_assert!(q <= p);
            prop_assert!(least(q.0, p.0, period * times) >= budget * times, "{} in {}", q.0, p.0);
            let less = q.0 - 1;
            let (need, per) = (i128::from(budget), i128::from(p.0));
            let linear = i128::from(less) * (i128::from(period) - 2 * (per - i128::from(less)));
            prop_assert!(linear < need * per, "no more than is needed");
        }
    }
}
