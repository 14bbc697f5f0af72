//! The CPU time that a guest's deadline tasks request, and what the host has to supply for it. Pure.
//!
//! A guest requests `budget` in each `period` of a vCPU: the sum of its tasks' bandwidths, in the shortest of their
//! periods. The guest's periods begin when its tasks are released, but the host's slices end at the deadlines of all
//! vCPUs. A guest may publish its next deadlines ([`crate::guest_page`]), as RTVirt's guests do. Then slices end there,
//! and the host supplies just what the guest requests. For other guests the host supplies a periodic resource of
//! unknown phase (Shin and Lee's PRM): at least `Q` in each `P`, in the worst case after nothing for `2 (P - Q)`. The
//! additional bandwidth is the price of not knowing the deadlines ([`supply`]).

use std::collections::BTreeMap;

use ontime_plan::{Bandwidth, Nanos};

use crate::guest_page::Page;
use crate::ledger::Ledger;
use crate::model::{Budget, NOTHING, Table};

/// The shortest period of a supply: a slice costs some changes of place.
pub(crate) const PERIOD_MIN: Nanos = Nanos::from_millis(1);
/// The longest period of a supply; longer ones have no advantage.
const PERIOD_MAX: Nanos = Nanos::from_millis(50);
/// The supply's period is this part of the guest's period. Shorter periods cost less bandwidth and more changes of
/// place.
const PART: u64 = 8;

/// The CPU time that a vCPU needs for its guest's deadline tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestNeed {
    /// The vCPU's number in the VM.
    pub vcpu: u32,
    /// CPU time within each period.
    pub budget: Nanos,
    /// The shortest period of these tasks.
    pub period: Nanos,
}

/// What a VM's guest requests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ask {
    /// For each vCPU that needs CPU time.
    pub needs: Vec<GuestNeed>,
    /// Where the guest publishes its next deadlines, if it does.
    pub page: Option<Page>,
    /// The guest was admitted as a publishing one before; `page` is not known yet.
    pub published: bool,
    /// Where the guest claims from its offers.
    pub taking: Option<Taking>,
}

/// Where a guest claims from its offers, and up to which generation its claims are known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taking {
    /// The memory shared with the device process.
    pub ledger: Ledger,
    /// Generation of the last claim that is part of [`Ask::needs`].
    pub claimed: u64,
    /// Generation of the last offer.
    pub offered: u64,
}

impl Taking {
    /// A guest with no offers yet.
    pub fn new(ledger: Ledger, claimed: u64) -> Self {
        Self { ledger, claimed, offered: 0 }
    }

    /// The last generation whose claims are known.
    pub fn known(&self) -> u64 {
        self.claimed.max(self.offered)
    }
}

impl Ask {
    /// The claims as a table by vCPU.
    pub fn held(&self) -> Table {
        let mut table = NOTHING;
        for need in &self.needs {
            if let Some(held) = table.get_mut(need.vcpu as usize) {
                *held = Budget { budget: need.budget.0, period: need.period.0 };
            }
        }
        table
    }
}

/// The same from a table by vCPU, without empty entries.
pub fn needs(held: &Table) -> Vec<GuestNeed> {
    let some = (0..).zip(held).filter(|(_, held)| held.budget > 0);
    some.map(|(vcpu, held)| GuestNeed { vcpu, budget: Nanos(held.budget), period: Nanos(held.period) }).collect()
}

/// The requests of all guests, by VM.
pub type Asks = BTreeMap<String, Ask>;

/// The host's budget and period that give a guest its `budget` in every `period`, wherever that period begins. None if
/// a whole CPU is not enough.
///
/// The smallest Q with Q (t - 2 (P - Q)) / P >= t budget / period for t = period. The left side is the least supply in
/// any interval of length t (its linear bound); for longer t it grows faster than the right side.
pub(crate) fn supply(budget: Nanos, period: Nanos) -> Option<(Nanos, Nanos)> {
    let own = Nanos((period.0 / PART).clamp(PERIOD_MIN.0, PERIOD_MAX.0));
    let (need, length, per) = (i128::from(budget.0), i128::from(period.0), i128::from(own.0));
    let enough = |q: u64| {
        let q = i128::from(q);
        q * (length - 2 * (per - q)) >= need * per
    };
    if budget.0 == 0 || budget > period || !enough(own.0) {
        return None;
    }
    // The left side may fall only where it is below 0, then it rises.
    let (mut low, mut high) = (0, own.0);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if enough(middle) { high = middle } else { low = middle }
    }
    Some((Nanos(high), own))
}

/// The host's bandwidth and period for a need: exactly the guest's own if the guest publishes its deadlines.
pub(crate) fn bandwidth(need: &GuestNeed, published: bool) -> Option<(Bandwidth, Nanos)> {
    // In shorter periods, of a few least slices, slices do not end exactly enough at the deadline.
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

    /// The least supply in any interval of length `t` (Shin and Lee, 2003).
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
        // The period is too short for slices to end exactly there.
        assert!(bandwidth(&need(100_000, 500_000), true).is_none_or(|(more, _)| more > Bandwidth::ppm(200_000)));
        assert_eq!(bandwidth(&need(3, 2), true), None);
        assert_eq!(bandwidth(&need(0, 2_000_000), true), None);
    }

    proptest! {
        /// Every interval as long as the period, or a multiple of it, has the requested time.
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
