//! The offer to a vCPU's guest: bandwidth that the guest may claim without asking the daemon ([`crate::ledger`]).

use ontime_plan::{Bandwidth, Nanos};

use crate::admit::request::PERIOD_MIN;
use crate::ledger::Ledger;
use crate::model::{Budget, Share};

/// The offer to a vCPU's guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// Where the guest claims.
    pub ledger: Ledger,
    /// The vCPU's share without what its guest holds.
    pub declared: Share,
    /// The most that sched.toml allows the guest.
    pub most: Bandwidth,
    /// The offer: this bandwidth, including what the guest holds, in no shorter period.
    pub offered: Budget,
}

impl Offer {
    /// Nothing is offered yet; `shortest` is the shortest period that sched.toml allows.
    pub(crate) fn new(ledger: Ledger, declared: Share, most: Bandwidth, shortest: Nanos) -> Self {
        // In shorter periods slices do not end exactly enough at the deadline, so a need costs more than its bandwidth.
        let period = shortest.max(PERIOD_MIN).0;
        Self { ledger, declared, most, offered: Budget { budget: 0, period } }
    }

    /// The vCPU's share if its guest holds this; None if that is beyond the offer.
    pub fn share(&self, held: &Budget) -> Option<Share> {
        let Share { bandwidth, period } = self.declared;
        let nothing = held.budget == 0;
        held.fits(&self.offered).then(|| Share {
            bandwidth: bandwidth + held.bandwidth(),
            period: if nothing { period } else { period.min(held.period) },
        })
    }
}
