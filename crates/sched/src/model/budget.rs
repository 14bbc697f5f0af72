//! Budgets: CPU time in each period, as a guest and the host exchange them.

use ontime_plan::{Bandwidth, Nanos};

/// vCPUs that have an entry in the pages that they share with their guests.
pub const VCPUS: usize = 64;

/// CPU time in each period, ns; both 0: none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Budget {
    /// CPU time within each period.
    pub budget: u64,
    /// The length of a period, ns.
    pub period: u64,
}

impl Budget {
    /// Whether this is within an offer: no more bandwidth, in no shorter period.
    pub fn fits(&self, offer: &Budget) -> bool {
        self.budget == 0
            || self.period >= offer.period
                && offer.period > 0
                && u128::from(self.budget) * u128::from(offer.period)
                    <= u128::from(offer.budget) * u128::from(self.period)
    }

    /// Budget over period.
    pub fn bandwidth(&self) -> Bandwidth {
        Bandwidth::new(Nanos(self.budget), Nanos(self.period)).unwrap_or_default()
    }
}

/// Budgets by vCPU.
pub type Table = [Budget; VCPUS];

/// A table in which no vCPU holds anything.
pub const NOTHING: Table = [Budget { budget: 0, period: 0 }; VCPUS];
