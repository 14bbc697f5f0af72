//! The place of a vCPU among the host's threads, and the policies that places stand for.

use ontime_tenants::{Class, Level, Policy, PriorityTable, Role};

use crate::model::kind::Beyond;

/// The place of a vCPU among the host's threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Ahead of every other vCPU.
    Planned,
    /// Behind the planned, ahead of bulk.
    Entitled,
    /// It has used up its share.
    Beyond,
}

/// The policies of the three places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Places {
    /// Of [`Place::Planned`].
    pub planned: Policy,
    /// Of [`Place::Entitled`].
    pub entitled: Policy,
    /// Of [`Place::Beyond`].
    pub beyond: Policy,
}

impl Places {
    /// The policies of the priority table. The plan divides time among reservations, so levels do not matter: all vCPUs
    /// have the places of the first level.
    pub fn of(table: PriorityTable, beyond: Beyond) -> Self {
        let rt = Class::Rt(Level::HIGHEST);
        Self {
            planned: table.policy(rt, Role::VcpuPlanned),
            entitled: table.policy(rt, Role::VcpuEntitled),
            beyond: match beyond {
                Beyond::Idle => Policy::Idle,
                Beyond::Other => Policy::BULK,
            },
        }
    }

    /// Whether a vCPU of a pacer may have this policy.
    pub fn has(&self, policy: Policy) -> bool {
        let at_beyond = match (self.beyond, policy) {
            // The nice value may be any.
            (Policy::Other { .. }, Policy::Other { .. }) => true,
            (beyond, policy) => beyond == policy,
        };
        at_beyond || policy == self.planned || policy == self.entitled
    }

    pub(crate) fn policy(&self, place: Place) -> Policy {
        match place {
            Place::Planned => self.planned,
            Place::Entitled => self.entitled,
            Place::Beyond => self.beyond,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_the_first_levels() {
        let places = Places::of(PriorityTable::default(), Beyond::Idle);
        assert_eq!((places.planned, places.entitled), (Policy::Fifo(47), Policy::Fifo(46)));
        assert!(places.has(Policy::Idle) && places.has(Policy::Fifo(46)) && !places.has(Policy::BULK));
        let places = Places::of(PriorityTable::default(), Beyond::Other);
        assert!(places.has(Policy::Other { nice: 5 }) && !places.has(Policy::Idle));
    }
}
