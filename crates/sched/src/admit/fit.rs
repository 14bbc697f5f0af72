//! The admission test: whether vCPUs fit on the CPUs beside the reserve, and on which CPU each of them stays.

use std::collections::BTreeSet;

use ontime_plan::{Admission, Admitted, Bandwidth, Refusal, Reservation};

use crate::admit::pacing;
use crate::admit::reservations::{Reservations, Reserved};

/// What the planner's rounding may cost on a CPU with a reserve and a vCPU, in millionths of a CPU.
pub(crate) const ROUNDING_PPM: u64 = 12;

/// Whether these vCPUs would be admitted in place of the present ones, each on its present home CPU.
pub(crate) fn fits(reservations: &Reservations, vcpus: &[Reserved]) -> bool {
    let wishes: Vec<_> = vcpus.iter().map(|vcpu| vcpu.home.map(|home| BTreeSet::from([home]))).collect();
    fit(reservations, vcpus, &wishes).is_ok_and(|admitted| {
        let homes = admitted.home.iter().skip(reservations.cpus.len());
        admitted.shared == reservations.shared && homes.eq(vcpus.iter().map(|vcpu| &vcpu.home))
    })
}

/// The admission test for these vCPUs in place of the present ones, the reserves of the CPUs and the pacers' time.
pub(crate) fn fit(
    reservations: &Reservations,
    vcpus: &[Reserved],
    wishes: &[Option<BTreeSet<u32>>],
) -> Result<Admitted, String> {
    let Reservations { reserve, pacing, .. } = *reservations;
    let cpus = &reservations.cpus;
    let count = cpus.len();
    let number = u32::try_from(count).unwrap_or(u32::MAX);
    let name = |at: usize| vcpus.get(at).map_or_else(String::new, |one| format!("vCPU {} of {}", one.vcpu, one.tenant));
    let want = |vcpu: &Reserved, wish: &Option<BTreeSet<u32>>| Reservation {
        bandwidth: vcpu.bandwidth,
        affinity: wish.clone(),
    };
    let asked: Vec<Reservation> = vcpus.iter().zip(wishes).map(|(vcpu, wish)| want(vcpu, wish)).collect();
    let beside = reserve + Bandwidth::ppm(ROUNDING_PPM);
    if let Some(at) = vcpus.iter().position(|vcpu| vcpu.bandwidth + beside > Bandwidth::ONE) {
        return Err(format!(
            "{} asks for more of a CPU than is left beside the reserve ({reserve} of each CPU); ask for less, or \
             reserve less",
            name(at)
        ));
    }
    let kept: Bandwidth = std::iter::repeat_n(reserve, count).sum();
    let total: Bandwidth = asked.iter().map(|ask| ask.bandwidth).sum();
    if total + kept > Bandwidth::cpus(count) {
        return Err(Refusal::Full { total, reserve: kept, cpus: number }.to_string());
    }
    let reserves = (0..number).map(|cpu| Reservation { bandwidth: reserve, affinity: Some(BTreeSet::from([cpu])) });
    let all: Vec<Reservation> = reserves.chain(asked).collect();
    let admitted = Admission::new(number, Bandwidth::ZERO).admit(&all).map_err(|refusal| match refusal {
        Refusal::Affinity { vcpu, bandwidth } => match (vcpu.checked_sub(count), cpus.get(vcpu)) {
            (None, Some(cpu)) => format!(
                "CPU {cpu} would have less than its reserve ({reserve} of each CPU) left; widen the pinning to it"
            ),
            (at, _) => format!(
                "{} asks for {bandwidth} of a CPU, and no CPU that it may run on has that room; widen its pinning",
                name(at.unwrap_or_default())
            ),
        },
        // The room that is left is less than what the planner's rounding takes.
        Refusal::Full { .. } => "it would fill the CPUs to less than the planner's rounding (10 millionths of a CPU \
                                 for each vCPU); ask for a little less"
            .to_owned(),
        other => other.to_string(),
    })?;
    pacing::check(pacing, reserve, cpus, vcpus, admitted.home.get(count..).unwrap_or_default())?;
    Ok(admitted)
}
