//! Partitioned EDF in the guest: assigns RTAs to vCPUs (RTVirt, section 3.2).
//!
//! Best fit, so that large gaps remain for large RTAs. If no vCPU has enough capacity but all together have, the RTAs
//! are placed anew, largest first. The guest module does the same. This is its reference implementation, and the
//! planner uses it for tenants whose RTAs have no vCPU.

use thiserror::Error;

use crate::model::{Rta, reserve};
use crate::units::{Bandwidth, Nanos};

/// Why an RTA cannot be placed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PlaceError {
    /// All vCPUs together have too little capacity.
    #[error("{need} CPUs needed on {vcpus} vCPUs; give the tenant more vCPUs")]
    Full {
        /// The need of all RTAs, without slack.
        need: Bandwidth,
        /// Number of vCPUs.
        vcpus: usize,
    },
    /// All together have enough capacity, but no placement was found.
    #[error(
        "{need} CPUs needed on {vcpus} vCPUs, but an RTA of {slice} every {period} fits none of them, slack included, \
         also after placing all anew; give the tenant one more vCPU, or less slack"
    )]
    Fragmented {
        /// The need of all RTAs, without slack.
        need: Bandwidth,
        /// Number of vCPUs.
        vcpus: usize,
        /// Slice of the RTA without a place.
        slice: Nanos,
        /// Period of the RTA without a place.
        period: Nanos,
    },
}

/// The RTAs of a guest on its vCPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    vcpus: Vec<Vec<Rta>>,
    slack: Nanos,
}

impl Partition {
    /// Empty vCPUs, each with `slack` once per shortest period when it holds an RTA.
    pub fn new(vcpus: usize, slack: Nanos) -> Self {
        Self { vcpus: vec![Vec::new(); vcpus], slack }
    }

    /// The RTAs of each vCPU.
    pub fn vcpus(&self) -> &[Vec<Rta>] {
        &self.vcpus
    }

    /// The RTAs of each vCPU.
    pub fn into_vcpus(self) -> Vec<Vec<Rta>> {
        self.vcpus
    }

    /// Places an RTA. After an error nothing has changed.
    ///
    /// # Errors
    /// See [`PlaceError`].
    pub fn insert(&mut self, rta: Rta) -> Result<(), PlaceError> {
        let Err(rta) = self.best_fit(rta) else { return Ok(()) };
        self.reshuffle(rta)
    }

    /// Removes one RTA with these needs from that vCPU. False: there is none.
    pub fn remove(&mut self, vcpu: usize, rta: &Rta) -> bool {
        let Some(rtas) = self.vcpus.get_mut(vcpu) else { return false };
        let Some(at) = rtas.iter().position(|other| other == rta) else { return false };
        rtas.remove(at);
        true
    }

    /// Places an RTA on the fullest vCPU with enough capacity. Returns the RTA if there is none.
    fn best_fit(&mut self, rta: Rta) -> Result<(), Rta> {
        let slack = self.slack;
        let best = self
            .vcpus
            .iter_mut()
            .filter_map(|rtas| {
                rtas.push(rta.clone());
                let filled = reserve(rtas, slack).ok();
                rtas.pop();
                filled.map(|filled| (filled, rtas))
            })
            .max_by_key(|(filled, _)| *filled);
        match best {
            Some((_, rtas)) => {
                rtas.push(rta);
                Ok(())
            }
            None => Err(rta),
        }
    }

    /// Places all RTAs anew, largest first.
    fn reshuffle(&mut self, rta: Rta) -> Result<(), PlaceError> {
        let mut all: Vec<Rta> = self.vcpus.iter().flatten().cloned().collect();
        all.push(rta);
        let need: Bandwidth = all.iter().map(Rta::bandwidth).sum();
        let vcpus = self.vcpus.len();
        if need > Bandwidth::cpus(vcpus) {
            return Err(PlaceError::Full { need, vcpus });
        }
        all.sort_by_key(|rta| std::cmp::Reverse(rta.bandwidth()));
        let mut anew = Self::new(vcpus, self.slack);
        for rta in all {
            anew.best_fit(rta).map_err(|left| PlaceError::Fragmented {
                need,
                vcpus,
                slice: left.slice(),
                period: left.period(),
            })?;
        }
        *self = anew;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::model::Arrivals;

    fn rta(percent: u64) -> Rta {
        Rta::new(Nanos::from_millis(percent), Nanos::from_millis(100), Arrivals::Periodic).unwrap()
    }

    fn loads(partition: &Partition) -> Vec<u64> {
        partition.vcpus().iter().map(|rtas| rtas.iter().map(|rta| rta.slice().0 / 1_000_000).sum()).collect()
    }

    #[test]
    fn the_fullest_vcpu_that_takes_it_gets_it() {
        let mut partition = Partition::new(2, Nanos::ZERO);
        for percent in [30, 75, 20] {
            partition.insert(rta(percent)).unwrap();
        }
        let mut loads = loads(&partition);
        loads.sort_unstable();
        assert_eq!(loads, [30, 95]);
    }

    #[test]
    fn fragmented_bandwidth_is_put_together() {
        let mut partition = Partition::new(2, Nanos::ZERO);
        for percent in [40, 40, 40, 40] {
            partition.insert(rta(percent)).unwrap();
        }
        assert!(partition.remove(0, &rta(40)) && partition.remove(1, &rta(40)));
        assert_eq!(loads(&partition), [40, 40]);
        partition.insert(rta(70)).unwrap();
        assert_eq!(loads(&partition).iter().sum::<u64>(), 150);
        let full = partition.clone();
        assert!(matches!(partition.insert(rta(60)), Err(PlaceError::Full { .. })));
        assert!(matches!(partition.insert(rta(40)), Err(PlaceError::Fragmented { .. })));
        assert_eq!(partition, full, "a refusal changes nothing");
    }

    proptest! {
        #[test]
        fn nothing_is_lost_and_no_vcpu_overfull(sizes in prop::collection::vec(1u64..=100, 0..30), vcpus in 0usize..6) {
            let mut partition = Partition::new(vcpus, Nanos::ZERO);
            let placed: u64 = sizes.iter().filter(|size| partition.insert(rta(**size)).is_ok()).sum();
            let loads = loads(&partition);
            prop_assert_eq!(loads.iter().sum::<u64>(), placed);
            prop_assert!(loads.iter().all(|load| *load <= 100));
        }
    }
}
