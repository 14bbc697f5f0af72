//! The admission test: whether vCPUs fit on the CPUs beside the reserve, and on which CPU each of them stays.

use std::collections::BTreeSet;

use ontime_plan::admission::PINNED_PPM;
use ontime_plan::{Admission, Admitted, Bandwidth, Refusal, Reservation};

use crate::admit::pacing::{self, Source};
use crate::admit::reservations::{Kept, Present, Reservations, Reserved, Unfit};
use crate::beside::Beside;

/// What the planner's rounding may cost on a CPU with a reserve and a vCPU, in millionths of a CPU.
pub(crate) const ROUNDING_PPM: u64 = 12;

/// The most reservations of a pinned CPU for which [`Capacity::pinned`] is enough.
const PINNED_MOST: u64 = 64;

/// What a program that only adds up bandwidths may give out of each CPU, in millionths, so that all of it is admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// On a CPU for reservations without a pin, before the watcher's time is taken from their sum. Exact: one millionth
    /// more on all such CPUs together is refused.
    pub unpinned: u64,
    /// The most that one vCPU may have: it may be on the CPU of the cap watcher while all others are busy.
    pub largest: u64,
    /// On a CPU that only reservations pinned to it use, up to 64 of them.
    pub pinned: u64,
    /// What the cap watcher needs of all CPUs for reservations without a pin together.
    pub watcher: u64,
}

impl Capacity {
    /// Beside this.
    pub fn beside(beside: Beside) -> Self {
        let free = 1_000_000_u64.saturating_sub(beside.reserve.whole_ppm());
        let watcher = beside.watcher.whole_ppm();
        Self {
            unpinned: free.saturating_sub(PINNED_PPM),
            largest: free.saturating_sub(watcher + ROUNDING_PPM),
            pinned: free.saturating_sub(watcher + PINNED_PPM * (1 + PINNED_MOST)),
            watcher,
        }
    }
}

/// Whether these vCPUs would be admitted in place of the present ones, each on its present home CPU.
pub(crate) fn fits(reservations: &Reservations, vcpus: &[Reserved]) -> bool {
    let wishes: Vec<_> = vcpus.iter().map(|vcpu| vcpu.home.map(|home| BTreeSet::from([home]))).collect();
    let fit = fit(reservations, vcpus, &wishes, &reservations.kept, &[Source::Unreserved], Present::default());
    fit.is_ok_and(|admitted| {
        let homes = admitted.home.iter().skip(reservations.cpus.len()).take(vcpus.len());
        admitted.shared == reservations.shared && homes.eq(vcpus.iter().map(|vcpu| &vcpu.home))
    })
}

/// The admission test for these vCPUs in place of the present ones, what is kept for leases, the reserves of the CPUs,
/// and the pacers' time, which each of these sources must have. `present`: what was admitted before.
pub(crate) fn fit(
    reservations: &Reservations,
    vcpus: &[Reserved],
    wishes: &[Option<BTreeSet<u32>>],
    kept: &[Kept],
    sources: &[Source],
    present: Present,
) -> Result<Admitted, Unfit> {
    let name = |at: usize| match (vcpus.get(at), kept.get(at.wrapping_sub(vcpus.len()))) {
        (Some(one), _) => format!("vCPU {} of {}", one.vcpu, one.tenant),
        (None, Some(kept)) => format!("reservation {}", kept.lease),
        (None, None) => String::new(),
    };
    let want = |vcpu: &Reserved, wish: &Option<BTreeSet<u32>>| Reservation {
        bandwidth: vcpu.bandwidth,
        affinity: wish.clone(),
    };
    let keep =
        |kept: &Kept| Reservation { bandwidth: kept.bandwidth, affinity: kept.cpu.map(|cpu| BTreeSet::from([cpu])) };
    let of_vcpus = vcpus.iter().zip(wishes).map(|(vcpu, wish)| want(vcpu, wish));
    let Reservations { beside, ref cpus, .. } = *reservations;
    let leased = |at: usize| vcpus.get(at).is_none_or(|vcpu| vcpu.leased);
    let is_new = |at: usize| match at.checked_sub(vcpus.len()) {
        None => at >= present.vcpus,
        Some(kept) => kept >= present.kept,
    };
    let admitted = fit_beside(beside, cpus, of_vcpus.chain(kept.iter().map(keep)).collect(), is_new, leased, name)?;
    // The watcher's is the last one.
    let homes = admitted.home.get(cpus.len()..cpus.len() + vcpus.len() + kept.len()).unwrap_or_default();
    for source in sources {
        pacing::check(reservations, vcpus, kept, homes, *source, present)?;
    }
    Ok(admitted)
}

/// The admission test for these reservations beside what is kept of these CPUs. Affinities are indices of `cpus`;
/// `is_new` says whether a reservation was not admitted before, perhaps beside less, `capped` whether it depends on
/// runtime caps, and `name` what it is called. In the result the reserves come first.
///
/// # Errors
/// The reason, and the remedy.
pub fn fit_beside(
    beside: Beside,
    cpus: &[u32],
    asked: Vec<Reservation>,
    is_new: impl Fn(usize) -> bool,
    capped: impl Fn(usize) -> bool,
    name: impl Fn(usize) -> String,
) -> Result<Admitted, String> {
    let count = cpus.len();
    let number = u32::try_from(count).unwrap_or(u32::MAX);
    let Beside { reserve, watcher } = beside;
    // One that depends on caps may be on the watcher's CPU while all others are busy.
    let least = |at: usize| reserve + Bandwidth::ppm(ROUNDING_PPM) + if capped(at) { watcher } else { Bandwidth::ZERO };
    let is_too_large = |(at, ask): (usize, &Reservation)| is_new(at) && ask.bandwidth + least(at) > Bandwidth::ONE;
    if let Some(at) = asked.iter().enumerate().position(is_too_large) {
        let is_watched = capped(at) && watcher > Bandwidth::ZERO;
        let watcher = if is_watched { format!(", and {watcher} for the cap watcher") } else { String::new() };
        return Err(format!(
            "{} asks for more of a CPU than is left beside the reserve ({reserve} of each CPU{watcher}); ask for less, \
             or keep less (reserve in sched.toml, cap.cpu-share in daemon.toml)",
            name(at)
        ));
    }
    let kept = beside.of_all(count);
    let total: Bandwidth = asked.iter().map(|ask| ask.bandwidth).sum();
    if total + kept > Bandwidth::cpus(count) {
        let why = Refusal::Full { total, reserve: kept, cpus: number }.to_string();
        let is_watched = watcher > Bandwidth::ZERO;
        return Err(if is_watched { format!("{why} (of these {watcher} for the cap watcher)") } else { why });
    }
    let reserves = (0..number).map(|cpu| Reservation { bandwidth: reserve, affinity: Some(BTreeSet::from([cpu])) });
    let watched = (watcher > Bandwidth::ZERO).then_some(Reservation { bandwidth: watcher, affinity: None });
    let all: Vec<Reservation> = reserves.chain(asked).chain(watched).collect();
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
    // The watcher may be on any CPU, and what stays there cannot make room for it. Where nothing is new, this was
    // decided before.
    let mut at_home = vec![(Bandwidth::ZERO, false, false); count];
    for (asked, (home, one)) in admitted.home.iter().zip(&all).skip(count).enumerate() {
        if let Some((stay, is_capped, has_new)) = home.and_then(|home| at_home.get_mut(home as usize)) {
            *stay = *stay + one.bandwidth;
            *is_capped |= capped(asked);
            *has_new |= is_new(asked);
        }
    }
    for (cpu, (stay, is_capped, has_new)) in cpus.iter().zip(at_home) {
        if has_new && is_capped && stay + reserve + watcher > Bandwidth::ONE {
            return Err(format!(
                "CPU {cpu} would have less left than its reserve ({reserve} of each CPU) and the time of the cap \
                 watcher, {watcher}; ask for less there, or for another CPU"
            ));
        }
    }
    Ok(admitted)
}
