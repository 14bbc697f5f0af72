//! Exact admission of vCPUs to a host, and placement of pinned vCPUs.
//!
//! Unpinned vCPUs must satisfy two conditions: none needs more than one CPU, and together with the reserve for bulk
//! they need at most all CPUs. DP-WRAP then meets every deadline (Levin et al., theorem 6). A vCPU with an affinity
//! gets one CPU in it and stays there, as RTVirt excludes such VMs from migration (section 6). Unpinned vCPUs wrap over
//! the CPUs whose remaining capacity is at least that of the largest unpinned vCPU, so that each crosses at most one
//! CPU border.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use num_bigint::BigUint;
use thiserror::Error;

use crate::model::Vcpu;
use crate::units::Bandwidth;

/// Rounding reserve of a pinned vCPU, ppm: 1 ns in the planner's shortest slice.
pub const PINNED_PPM: u64 = 4;

/// Rounding reserve of an unpinned vCPU that runs beside pinned ones, ppm: 2 ns in the planner's shortest slice.
const BESIDE_PPM: u64 = 8;

/// Limits of [`search`]: how often it reads a CPU's capacity (about 50 ms), and the number of vCPUs.
const SEARCH_STEPS: u64 = 4_000_000;
const SEARCH_VCPUS: usize = 500;
/// One CPU in the units of `search`.
const WHOLE: u64 = 1 << 40;

/// A vCPU's request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reservation {
    /// Bandwidth, at most 1 CPU.
    pub bandwidth: Bandwidth,
    /// CPUs that it may run on. None: all.
    pub affinity: Option<BTreeSet<u32>>,
}

impl From<&Vcpu> for Reservation {
    fn from(vcpu: &Vcpu) -> Self {
        Self { bandwidth: vcpu.bandwidth(), affinity: vcpu.affinity().cloned() }
    }
}

/// The host's CPUs for real-time tenants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admission {
    cpus: u32,
    reserve: Bandwidth,
}

/// Where admitted vCPUs may run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admitted {
    /// For each vCPU in the order of the request: the CPU that it stays on. None: it may wrap.
    pub home: Vec<Option<u32>>,
    /// For each CPU: whether unpinned vCPUs run there.
    pub shared: Vec<bool>,
    /// The reserved bandwidth, without the reserve for bulk.
    pub total: Bandwidth,
}

/// Why a set of vCPUs is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refusal {
    /// The sum exceeds all CPUs.
    #[error(
        "{total} CPUs asked, {reserve} kept for bulk: more than the {cpus} there are; add a CPU, ask for less, or keep \
         less for bulk"
    )]
    Full {
        /// The requested sum.
        total: Bandwidth,
        /// The reserve for bulk.
        reserve: Bandwidth,
        /// Number of CPUs.
        cpus: u32,
    },
    /// A vCPU requests more than one CPU.
    #[error("vCPU {vcpu} asks for {bandwidth} of a CPU: more than 1; spread its RTAs over more vCPUs")]
    TooLarge {
        /// Its index in the request.
        vcpu: usize,
        /// The bandwidth that it requests, slack included.
        bandwidth: Bandwidth,
    },
    /// No CPU of its affinity has enough capacity.
    #[error("vCPU {vcpu} asks for {bandwidth} of a CPU and no CPU of its affinity has that room; widen its affinity")]
    Affinity {
        /// Its index in the request.
        vcpu: usize,
        /// The bandwidth that it requests, slack included.
        bandwidth: Bandwidth,
    },
    /// Pinned vCPUs leave too little contiguous capacity.
    #[error(
        "unpinned vCPUs ask for {total} CPUs; pinned ones leave them {shared} CPUs with room for the largest of them \
         and {pinned} CPUs are taken there; widen the affinity of pinned vCPUs"
    )]
    Scattered {
        /// The request of the unpinned vCPUs.
        total: Bandwidth,
        /// Number of CPUs that they may wrap over.
        shared: usize,
        /// Bandwidth of pinned vCPUs on those CPUs.
        pinned: Bandwidth,
    },
}

impl Admission {
    /// A host with `cpus` CPUs for tenants, of which `reserve` is kept for bulk so that no thread starves.
    pub fn new(cpus: u32, reserve: Bandwidth) -> Self {
        Self { cpus, reserve }
    }

    /// Admits all of these vCPUs or none.
    ///
    /// # Errors
    /// See [`Refusal`].
    pub fn admit(&self, asked: &[Reservation]) -> Result<Admitted, Refusal> {
        let total = self.total(Bandwidth::ZERO, &[], asked)?;
        let mut pinned = vec![Bandwidth::ZERO; self.count()];
        let home = place(asked, &mut pinned)?;
        let free: Vec<Bandwidth> = home.iter().zip(asked).filter_map(unpinned).collect();
        let largest = free.iter().max().copied().unwrap_or_default();
        let shared = shared(&pinned, largest, free.iter().copied().sum(), || free.iter().copied())?;
        Ok(Admitted { home, shared, total })
    }

    fn count(&self) -> usize {
        usize::try_from(self.cpus).unwrap_or(usize::MAX)
    }

    /// The sum of `before`, which is `sum`, and `more`, if none of `more` is too large and the sum fits.
    fn total(&self, sum: Bandwidth, before: &[Reservation], more: &[Reservation]) -> Result<Bandwidth, Refusal> {
        if let Some((at, large)) = more.iter().enumerate().find(|(_, ask)| ask.bandwidth > Bandwidth::ONE) {
            return Err(Refusal::TooLarge { vcpu: before.len() + at, bandwidth: large.bandwidth });
        }
        let total = more.iter().fold(sum, |sum, ask| sum + ask.bandwidth);
        let parts = || before.iter().chain(more).map(|ask| ask.bandwidth).chain([self.reserve]);
        match fits(total + self.reserve, self.count(), parts) {
            true => Ok(total),
            false => Err(Refusal::Full { total, reserve: self.reserve, cpus: self.cpus }),
        }
    }
}

/// The bandwidth of a vCPU without a home.
fn unpinned((home, ask): (&Option<u32>, &Reservation)) -> Option<Bandwidth> {
    home.is_none().then_some(ask.bandwidth)
}

/// The CPUs over which unpinned vCPUs wrap, beside this much of pinned ones on each CPU. `free`: the unpinned vCPUs,
/// `sum` in total.
fn shared<I: Iterator<Item = Bandwidth>>(
    pinned: &[Bandwidth],
    largest: Bandwidth,
    sum: Bandwidth,
    free: impl Fn() -> I,
) -> Result<Vec<bool>, Refusal> {
    let beside = largest + Bandwidth::ppm(BESIDE_PPM);
    let shared: Vec<bool> =
        pinned.iter().map(|taken| *taken == Bandwidth::ZERO || *taken + beside <= Bandwidth::ONE).collect();
    let there = || pinned.iter().zip(&shared).filter_map(|(taken, is)| is.then_some(*taken));
    let taken: Bandwidth = there().sum();
    let room = shared.iter().filter(|is| **is).count();
    if fits(sum + taken, room, || free().chain(there())) {
        return Ok(shared);
    }
    Err(Refusal::Scattered { total: sum, shared: room, pinned: taken })
}

/// A host that gets its vCPUs one tenant after the other. A tenant costs time for its own vCPUs only, unless the
/// affinity of some vCPU requires another placement of all.
#[derive(Debug, Clone)]
pub struct Filling {
    host: Admission,
    asked: Vec<Reservation>,
    admitted: Admitted,
    /// For each CPU: what pinned vCPUs have of it.
    pinned: Vec<Bandwidth>,
    /// Of the unpinned vCPUs: the sum, and the largest.
    free: Bandwidth,
    largest: Bandwidth,
}

/// The homes of new vCPUs; for each CPU, what pinned vCPUs have of it then, and whether it is shared.
struct PinnedUse {
    home: Vec<Option<u32>>,
    pinned: Vec<Bandwidth>,
    shared: Vec<bool>,
}

impl Filling {
    /// An empty host.
    pub fn new(host: Admission) -> Self {
        let count = host.count();
        let admitted = Admitted { home: Vec::new(), shared: vec![true; count], total: Bandwidth::ZERO };
        let (free, largest) = (Bandwidth::ZERO, Bandwidth::ZERO);
        Self { host, asked: Vec::new(), admitted, pinned: vec![Bandwidth::ZERO; count], free, largest }
    }

    /// Where the vCPUs run, in the order in which they were added.
    pub fn admitted(&self) -> &Admitted {
        &self.admitted
    }

    /// The same, at the end.
    pub fn into_admitted(self) -> Admitted {
        self.admitted
    }

    /// Admits these vCPUs beside those that are there, or changes nothing. The vCPUs that are there may get other home
    /// CPUs.
    ///
    /// # Errors
    /// See [`Refusal`]. vCPUs are numbered in the order in which they were added, these last.
    pub fn add(&mut self, more: &[Reservation]) -> Result<(), Refusal> {
        let total = self.host.total(self.admitted.total, &self.asked, more)?;
        if let Ok(PinnedUse { home, pinned, shared }) = self.beside(more) {
            self.admitted.home.extend(home);
            (self.admitted.shared, self.admitted.total, self.pinned) = (shared, total, pinned);
            self.asked.extend_from_slice(more);
        } else {
            let mut all = self.asked.clone();
            all.extend_from_slice(more);
            self.admitted = self.host.admit(&all)?;
            self.asked = all;
            self.pinned = load(&self.asked, &self.admitted.home, self.pinned.len());
        }
        // A vCPU has a home if it has an affinity.
        for ask in more.iter().filter(|ask| ask.affinity.is_none()) {
            (self.free, self.largest) = (self.free + ask.bandwidth, self.largest.max(ask.bandwidth));
        }
        Ok(())
    }

    /// A placement in which all other vCPUs stay where they are.
    fn beside(&self, more: &[Reservation]) -> Result<PinnedUse, Refusal> {
        let mut pinned = self.pinned.clone();
        let home = pin(more, &mut pinned)?;
        let new = || home.iter().zip(more).filter_map(unpinned);
        if pinned.iter().all(|taken| *taken == Bandwidth::ZERO) {
            // All CPUs are shared, and the sum fits.
            return Ok(PinnedUse { home, pinned, shared: self.admitted.shared.clone() });
        }
        let sum = new().fold(self.free, |sum, one| sum + one);
        let largest = new().fold(self.largest, Bandwidth::max);
        let before = || self.admitted.home.iter().zip(&self.asked).filter_map(unpinned);
        let shared = shared(&pinned, largest, sum, || before().chain(new()))?;
        Ok(PinnedUse { home, pinned, shared })
    }
}

/// Whether these parts, whose rounded sum is `sum`, are at most this many CPUs. Exact.
pub(crate) fn fits<I: Iterator<Item = Bandwidth>>(sum: Bandwidth, cpus: usize, parts: impl Fn() -> I) -> bool {
    // A sum is rounded up by less than this.
    let nearly = sum.as_f64() <= cpus as f64 + 1e-6;
    sum <= Bandwidth::cpus(cpus) || nearly && exactly(parts()).is_some_and(|(above, below)| above <= below * cpus)
}

/// A sum as a fraction of arbitrarily large integers. None if it would take minutes.
fn exactly(parts: impl Iterator<Item = Bandwidth>) -> Option<(BigUint, BigUint)> {
    let mut alike = std::collections::BTreeMap::<u64, u128>::new();
    for part in parts {
        *alike.entry(part.period()).or_default() += u128::from(part.runtime());
    }
    if alike.len() > 10_000 {
        return None;
    }
    let start = (BigUint::ZERO, BigUint::from(1_u8));
    Some(
        alike
            .into_iter()
            .fold(start, |(above, below), (period, runtime)| (above * period + &below * runtime, below * period)),
    )
}

/// Assigns a CPU to each vCPU with an affinity.
fn place(asked: &[Reservation], pinned: &mut [Bandwidth]) -> Result<Vec<Option<u32>>, Refusal> {
    let refused = match pin(asked, pinned) {
        Ok(home) => return Ok(home),
        Err(refused) => refused,
    };
    let home = search(asked, pinned.len()).ok_or(refused)?;
    pinned.copy_from_slice(&load(asked, &home, pinned.len()));
    Ok(home)
}

/// What pinned vCPUs have of each CPU.
fn load(asked: &[Reservation], home: &[Option<u32>], cpus: usize) -> Vec<Bandwidth> {
    let mut pinned = vec![Bandwidth::ZERO; cpus];
    for (ask, home) in asked.iter().zip(home) {
        let slot = home.and_then(|cpu| pinned.get_mut(usize::try_from(cpu).ok()?));
        slot.into_iter().for_each(|slot| *slot = *slot + charged(ask.bandwidth));
    }
    pinned
}

/// The bandwidth that a pinned vCPU is charged on its CPU. A whole CPU needs no rounding.
fn charged(bandwidth: Bandwidth) -> Bandwidth {
    if bandwidth == Bandwidth::ONE { bandwidth } else { bandwidth + Bandwidth::ppm(PINNED_PPM) }
}

/// Searches for a placement that best fit misses, within a limited number of steps. Repeatedly takes the vCPU with the
/// fewest possible CPUs (among these the largest) and places it on the fullest CPU with enough capacity; backtracks to
/// the next CPU if that fails.
fn search(asked: &[Reservation], cpus: usize) -> Option<Vec<Option<u32>>> {
    let part = |ask: &Reservation| {
        let charged = charged(ask.bandwidth);
        let parts = (u128::from(charged.runtime()) * u128::from(WHOLE)).div_ceil(u128::from(charged.period()));
        u64::try_from(parts).unwrap_or(u64::MAX)
    };
    let mut left: Vec<(usize, &BTreeSet<u32>, u64)> = asked
        .iter()
        .enumerate()
        .filter_map(|(vcpu, ask)| ask.affinity.as_ref().map(|on| (vcpu, on, part(ask))))
        .collect();
    let sum = left.iter().fold(0_u64, |sum, (.., part)| sum.saturating_add(*part));
    if left.len() > SEARCH_VCPUS || sum > (cpus as u64).saturating_mul(WHOLE) {
        return None;
    }
    let mut home = vec![None; asked.len()];
    let mut room = vec![WHOLE; cpus];
    let mut steps = SEARCH_STEPS;
    descend(&mut left, &mut room, &mut home, &mut steps).then_some(home)
}

/// The CPUs in `on` with this much capacity left, fullest first.
fn holding(on: &BTreeSet<u32>, part: u64, room: &[u64]) -> Vec<(u64, u32)> {
    let held = |cpu: &u32| {
        let room = *room.get(usize::try_from(*cpu).ok()?)?;
        (room >= part).then_some((room, *cpu))
    };
    let mut cpus: Vec<_> = on.iter().filter_map(held).collect();
    cpus.sort_unstable();
    cpus
}

fn descend(
    left: &mut Vec<(usize, &BTreeSet<u32>, u64)>,
    room: &mut [u64],
    home: &mut [Option<u32>],
    steps: &mut u64,
) -> bool {
    let looked: usize = left.iter().map(|(_, on, _)| on.len()).sum();
    *steps = steps.saturating_sub(looked as u64);
    let choices = |(at, (_, on, part)): (usize, &(usize, &BTreeSet<u32>, u64))| {
        let count =
            on.iter().filter_map(|cpu| room.get(usize::try_from(*cpu).ok()?)).filter(|room| *room >= part).count();
        (count, Reverse(*part), at)
    };
    let Some((_, _, at)) = left.iter().enumerate().map(choices).min() else { return true };
    if *steps == 0 {
        return false;
    }
    let (vcpu, on, part) = left.swap_remove(at);
    for (_, cpu) in holding(on, part, room) {
        let Some(slot) = usize::try_from(cpu).ok().and_then(|cpu| room.get_mut(cpu)) else { continue };
        *slot -= part;
        if descend(left, room, home, steps) {
            if let Some(home) = home.get_mut(vcpu) {
                *home = Some(cpu);
            }
            return true;
        }
        if let Some(slot) = usize::try_from(cpu).ok().and_then(|cpu| room.get_mut(cpu)) {
            *slot += part;
        }
        if *steps == 0 {
            break;
        }
    }
    left.push((vcpu, on, part));
    false
}

/// Best fit: vCPUs with the smallest affinity first, then the largest; each on the fullest CPU with enough capacity.
fn pin(asked: &[Reservation], pinned: &mut [Bandwidth]) -> Result<Vec<Option<u32>>, Refusal> {
    let mut home = vec![None; asked.len()];
    let mut order: Vec<(usize, &BTreeSet<u32>, Bandwidth)> = asked
        .iter()
        .enumerate()
        .filter_map(|(vcpu, ask)| ask.affinity.as_ref().map(|cpus| (vcpu, cpus, ask.bandwidth)))
        .collect();
    order.sort_by_key(|(_, cpus, bandwidth)| (cpus.len(), Reverse(*bandwidth)));
    for (vcpu, cpus, bandwidth) in order {
        let charged = charged(bandwidth);
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
    use crate::units::{ADDITIONS, Nanos};

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

    /// Sevenths, elevenths and so on of large primes: the sum of any two needs more than 62 bits.
    #[test]
    fn a_host_that_is_exactly_full_by_any_fractions_is_full_and_no_more() {
        let primes = [999_999_761_u64, 999_999_757, 999_999_751, 999_999_739, 999_999_733];
        let part = |runtime, period| Reservation {
            bandwidth: Bandwidth::new(Nanos(runtime), Nanos(period)).unwrap(),
            affinity: None,
        };
        let pair =
            |(prime, part_of): (&u64, u64)| [part(prime / part_of, *prime), part(prime - prime / part_of, *prime)];
        let mut asked: Vec<Reservation> = primes.iter().zip([3, 7, 11, 13, 2]).flat_map(pair).collect();
        asked.sort_by_key(|ask| ask.bandwidth);
        let host = Admission::new(5, Bandwidth::ZERO);
        assert_eq!(host.admit(&asked).unwrap().shared, [true; 5]);
        // One part in 10^9 of a CPU more.
        let (runtime, period) = (asked[0].bandwidth.runtime(), asked[0].bandwidth.period());
        asked[0] = part(runtime + 1, period);
        assert!(matches!(host.admit(&asked), Err(Refusal::Full { .. })));
    }

    /// Sets made by filling CPUs to nine tenths, so a placement exists.
    #[test]
    fn pinned_sets_that_can_be_placed_mostly_are() {
        let (mut best_fit, mut refused) = (0, 0);
        for seed in 1_u64..=300 {
            let mut state = seed;
            let mut draw = |below: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) % below
            };
            let cpus = 3 + draw(6);
            let mut asked = Vec::new();
            for cpu in 0..cpus {
                let mut room = 900_000;
                while room > 0 {
                    let part = (50_000 + draw(450_000)).min(room);
                    room -= part;
                    let some = (0..1 + draw(2)).map(|_| u32::try_from(draw(cpus)).unwrap());
                    let affinity = some.chain([u32::try_from(cpu).unwrap()]).collect();
                    asked.push(Reservation { bandwidth: Bandwidth::ppm(part), affinity: Some(affinity) });
                }
            }
            let count = usize::try_from(cpus).unwrap();
            best_fit += u64::from(pin(&asked, &mut vec![Bandwidth::ZERO; count]).is_err());
            let admitted = Admission::new(u32::try_from(cpus).unwrap(), Bandwidth::ZERO).admit(&asked);
            refused += u64::from(admitted.is_err());
            let Ok(admitted) = admitted else { continue };
            for cpu in 0..cpus {
                let on = asked.iter().zip(&admitted.home).filter(|(_, home)| home.map(u64::from) == Some(cpu));
                assert!(on.map(|(ask, _)| ask.bandwidth).sum::<Bandwidth>() <= Bandwidth::ONE);
            }
            assert!(
                asked.iter().zip(&admitted.home).all(|(ask, home)| ask
                    .affinity
                    .as_ref()
                    .unwrap()
                    .contains(&home.unwrap()))
            );
        }
        println!("figures: best fit refuses {best_fit} of 300, the search {refused}");
        assert!(best_fit > 60 && refused <= 6, "best fit refuses {best_fit} of 300, the search {refused}");
    }

    /// Tenants of up to three vCPUs, some of them pinned: one after the other, or all at once.
    #[test]
    fn a_host_that_is_filled_tenant_by_tenant_admits_what_it_would_admit_at_once() {
        let (mut taken, mut refused, mut anew) = (0, 0, 0);
        for seed in 1_u64..=200 {
            let mut state = seed;
            let mut draw = |below: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) % below
            };
            let cpus = u32::try_from(1 + draw(4)).unwrap();
            let host = Admission::new(cpus, Bandwidth::ppm(draw(3) * 50_000));
            let (mut filling, mut there) = (Filling::new(host.clone()), Vec::new());
            for _ in 0..12 {
                let pinned = draw(3) == 0;
                let more: Vec<Reservation> = (0..1 + draw(3))
                    .map(|_| Reservation {
                        bandwidth: Bandwidth::new(Nanos(1 + draw(400)), Nanos(997)).unwrap(),
                        affinity: pinned
                            .then(|| (0..2).map(|_| u32::try_from(draw(u64::from(cpus))).unwrap()).collect()),
                    })
                    .collect();
                let all: Vec<Reservation> = there.iter().chain(&more).cloned().collect();
                let (at_once, before) = (host.admit(&all), filling.clone());
                match filling.add(&more) {
                    Ok(()) => {
                        taken += 1;
                        let admitted = filling.admitted();
                        anew += u64::from(!admitted.home.starts_with(&before.admitted.home));
                        let pinned = load(&all, &admitted.home, cpus as usize);
                        assert!(pinned.iter().all(|taken| *taken <= Bandwidth::ONE));
                        let homes = all.iter().zip(&admitted.home);
                        assert!(homes.clone().all(|(ask, home)| ask.affinity.is_none() == home.is_none()));
                        assert!(
                            homes.clone().all(|(ask, home)| home.is_none_or(|cpu| ask
                                .affinity
                                .as_ref()
                                .unwrap()
                                .contains(&cpu)))
                        );
                        let free: Vec<Bandwidth> = admitted.home.iter().zip(&all).filter_map(unpinned).collect();
                        let largest = free.iter().max().copied().unwrap_or_default();
                        let again = shared(&pinned, largest, free.iter().copied().sum(), || free.iter().copied());
                        assert_eq!(again.as_ref(), Ok(&admitted.shared));
                        assert_eq!(admitted.total, all.iter().map(|ask| ask.bandwidth).sum());
                        assert_eq!((&filling.pinned, filling.largest), (&pinned, largest));
                        there = all;
                    }
                    Err(refusal) => {
                        refused += 1;
                        assert_eq!(at_once, Err(refusal));
                        assert_eq!(filling.admitted, before.admitted);
                    }
                }
            }
        }
        assert!(
            taken > 500 && refused > 200 && anew > 0,
            "{taken} taken, {anew} with all placed anew, {refused} refused"
        );
    }

    #[test]
    fn a_tenants_work_does_not_grow_with_the_tenants_before_it() {
        for pinned in [false, true] {
            let mut filling = Filling::new(Admission::new(16, Bandwidth::ONE));
            let additions = |filling: &mut Filling, numbers: std::ops::Range<u32>| {
                let before = ADDITIONS.get();
                for number in numbers {
                    let on = BTreeSet::from([number % 16, (number + 1) % 16]);
                    let bandwidth = Bandwidth::new(Nanos(u64::from(1 + number % 7)), Nanos(1_000)).unwrap();
                    let more = [Reservation { bandwidth, affinity: pinned.then_some(on) }];
                    filling.add(&more).unwrap_or_else(|refusal| panic!("{number}: {refusal}"));
                }
                ADDITIONS.get() - before
            };
            let first = additions(&mut filling, 0..100);
            additions(&mut filling, 100..2_900);
            let last = additions(&mut filling, 2_900..3_000);
            assert!(last <= 2 * first, "{first} additions for the first 100, {last} for the last");
            assert_eq!(filling.admitted().home.len(), 3_000);
        }
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
