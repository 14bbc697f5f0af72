//! Whether vCPUs fit a host, exactly, and where pinned ones go.
//!
//! Unpinned vCPUs need two things: none above one CPU, and together, with the reserve for bulk, at most all CPUs; DP-WRAP then meets
//! every deadline (Levin et al., theorem 6). A vCPU with an affinity is given one CPU in it and stays there, as RTVirt excludes such VMs from
//! migration (section 6). Unpinned vCPUs wrap over the CPUs whose remaining room holds the largest of them, so that each crosses at
//! most one border.

use std::collections::BTreeSet;

use thiserror::Error;

use crate::model::Vcpu;
use crate::units::Bandwidth;

/// Rounding of a pinned vCPU: 1 ns in the planner's shortest slice.
const PINNED_PPM: u64 = 4;

/// Rounding of an unpinned vCPU that runs beside pinned ones: 2 ns in the planner's shortest slice.
const BESIDE_PPM: u64 = 8;

/// What a vCPU asks of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reservation {
    /// Of one CPU, at most 1.
    pub bandwidth: Bandwidth,
    /// CPUs it may run on; None is all.
    pub affinity: Option<BTreeSet<u32>>,
}

impl From<&Vcpu> for Reservation {
    fn from(vcpu: &Vcpu) -> Self {
        Self { bandwidth: vcpu.bandwidth(), affinity: vcpu.affinity().cloned() }
    }
}

/// A host's CPUs for real-time tenants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admission {
    cpus: u32,
    reserve: Bandwidth,
}

/// Where admitted vCPUs may run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admitted {
    /// Of each vCPU, in the order asked: the CPU it stays on; None if it may wrap.
    pub home: Vec<Option<u32>>,
    /// Of each CPU: whether unpinned vCPUs run there.
    pub shared: Vec<bool>,
    /// What is reserved, without the reserve for bulk.
    pub total: Bandwidth,
}

/// Why a set of vCPUs is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refusal {
    /// More than all CPUs.
    #[error(
        "{total} CPUs asked, {reserve} kept for bulk: more than the {cpus} there are; add a CPU, ask for less, or keep less for bulk"
    )]
    Full {
        /// What all ask.
        total: Bandwidth,
        /// What is kept for bulk.
        reserve: Bandwidth,
        /// CPUs there are.
        cpus: u32,
    },
    /// One vCPU asks for more than a CPU.
    #[error("vCPU {vcpu} asks for {bandwidth} of a CPU: more than 1; spread its RTAs over more vCPUs")]
    TooLarge {
        /// Its place in the list.
        vcpu: usize,
        /// What it asks.
        bandwidth: Bandwidth,
    },
    /// No CPU of its affinity has room.
    #[error("vCPU {vcpu} asks for {bandwidth} of a CPU and no CPU of its affinity has that room; widen its affinity")]
    Affinity {
        /// Its place in the list.
        vcpu: usize,
        /// What it asks.
        bandwidth: Bandwidth,
    },
    /// Pinned vCPUs leave too little in one piece.
    #[error(
        "unpinned vCPUs ask for {total} CPUs; pinned ones leave them {shared} CPUs with room for the largest of them and {pinned} CPUs are taken \
         there; widen the affinity of pinned vCPUs"
    )]
    Scattered {
        /// What unpinned vCPUs ask.
        total: Bandwidth,
        /// CPUs they may wrap over.
        shared: usize,
        /// What pinned vCPUs take of those.
        pinned: Bandwidth,
    },
}

impl Admission {
    /// A host with `cpus` CPUs for tenants, `reserve` of them kept for bulk, so that nothing starves.
    pub fn new(cpus: u32, reserve: Bandwidth) -> Self {
        Self { cpus, reserve }
    }

    /// Admits all of these vCPUs, or none.
    ///
    /// # Errors
    /// See [`Refusal`].
    pub fn admit(&self, asked: &[Reservation]) -> Result<Admitted, Refusal> {
        if let Some((vcpu, large)) = asked.iter().enumerate().find(|(_, ask)| ask.bandwidth > Bandwidth::ONE) {
            return Err(Refusal::TooLarge { vcpu, bandwidth: large.bandwidth });
        }
        let total: Bandwidth = asked.iter().map(|ask| ask.bandwidth).sum();
        let count = usize::try_from(self.cpus).unwrap_or(usize::MAX);
        if total + self.reserve > Bandwidth::cpus(count) {
            return Err(Refusal::Full { total, reserve: self.reserve, cpus: self.cpus });
        }
        let mut pinned = vec![Bandwidth::ZERO; count];
        let home = pin(asked, &mut pinned)?;
        let free: Vec<Bandwidth> =
            home.iter().zip(asked).filter_map(|(home, ask)| home.is_none().then_some(ask.bandwidth)).collect();
        let largest = free.iter().max().copied().unwrap_or(Bandwidth::ZERO);
        let beside = largest + Bandwidth::ppm(BESIDE_PPM);
        let shared: Vec<bool> =
            pinned.iter().map(|taken| *taken == Bandwidth::ZERO || *taken + beside <= Bandwidth::ONE).collect();
        let wrapped: Bandwidth = free.into_iter().sum();
        let taken: Bandwidth = pinned.iter().zip(&shared).filter_map(|(taken, is)| is.then_some(*taken)).sum();
        let room = shared.iter().filter(|is| **is).count();
        if wrapped + taken > Bandwidth::cpus(room) {
            return Err(Refusal::Scattered { total: wrapped, shared: room, pinned: taken });
        }
        Ok(Admitted { home, shared, total })
    }
}

/// Gives each vCPU with an affinity a CPU: those with the least choice first, then the largest; the fullest CPU that holds it.
fn pin(asked: &[Reservation], pinned: &mut [Bandwidth]) -> Result<Vec<Option<u32>>, Refusal> {
    let mut home = vec![None; asked.len()];
    let mut order: Vec<(usize, &BTreeSet<u32>, Bandwidth)> = asked
        .iter()
        .enumerate()
        .filter_map(|(vcpu, ask)| ask.affinity.as_ref().map(|cpus| (vcpu, cpus, ask.bandwidth)))
        .collect();
    order.sort_by_key(|(_, cpus, bandwidth)| (cpus.len(), std::cmp::Reverse(*bandwidth)));
    for (vcpu, cpus, bandwidth) in order {
        // A whole CPU needs no rounding.
        let charged = if bandwidth == Bandwidth::ONE { bandwidth } else { bandwidth + Bandwidth::ppm(PINNED_PPM) };
        let best = cpus
            .iter()
            .filter_map(|cpu| {
                let taken = *pinned.get(usize::try_from(*cpu).ok()?)?;
                let filled = taken + charged;
                (filled <= Bandwidth::ONE).then_some((filled, *cpu))
            })
            .max();
        let Some((filled, cpu)) = best else { return Err(Refusal::Affinity { vcpu, bandwidth }) };
        if let Some(slot) = usize::try_from(cpu).ok().and_then(|cpu| pinned.get_mut(cpu)) {
            *slot = filled;
        }
        if let Some(slot) = home.get_mut(vcpu) {
            *slot = Some(cpu);
        }
    }
    Ok(home)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(percent: u64, cpus: Option<&[u32]>) -> Reservation {
        Reservation {
            bandwidth: Bandwidth::ppm(percent * 10_000),
            affinity: cpus.map(|cpus| cpus.iter().copied().collect()),
        }
    }

    #[test]
    fn exactly_full_fits_and_a_millionth_more_does_not() {
        let host = Admission::new(2, Bandwidth::ppm(50_000));
        let mut asked = vec![ask(65, None); 3];
        assert_eq!(host.admit(&asked).unwrap().total, Bandwidth::ppm(1_950_000));
        asked.push(Reservation { bandwidth: Bandwidth::ppm(1), affinity: None });
        assert!(matches!(host.admit(&asked), Err(Refusal::Full { .. })));
        assert!(matches!(host.admit(&[ask(101, None)]), Err(Refusal::TooLarge { vcpu: 0, .. })));
    }

    #[test]
    fn pinned_vcpus_stay_in_their_affinity_and_off_full_cpus() {
        let host = Admission::new(3, Bandwidth::ZERO);
        let admitted = host.admit(&[ask(60, Some(&[0, 1])), ask(60, Some(&[1])), ask(30, None)]).unwrap();
        assert_eq!(admitted.home, [Some(0), Some(1), None]);
        assert_eq!(admitted.shared, [true; 3]);
        let refused = host.admit(&[ask(60, Some(&[1])), ask(60, Some(&[1]))]);
        assert!(matches!(refused, Err(Refusal::Affinity { vcpu: 1, .. })), "{refused:?}");
        let refused = host.admit(&[ask(60, Some(&[7]))]);
        assert!(matches!(refused, Err(Refusal::Affinity { vcpu: 0, .. })), "{refused:?}");
        let scattered = host.admit(&[ask(60, Some(&[0])), ask(60, Some(&[1])), ask(60, None), ask(60, None)]);
        assert!(matches!(scattered, Err(Refusal::Scattered { shared: 1, .. })), "{scattered:?}");
    }
}
