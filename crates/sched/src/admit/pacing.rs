//! The pacers' own time, which is admitted like a reservation. Pure.
//!
//! A vCPU has a window in each of its periods, and in each 100 ms of a longer one. Where the order of deadlines
//! decides, a window costs two checks: one at its end, and one when the share is used up. By slices, the end of each
//! vCPU's period ends a slice for all vCPUs; equal periods end together, unless guests publish their deadlines. A set
//! is refused if the windows of a CPU, or the slices of all CPUs, take more time than they may ([`Source`]). A vCPU
//! that publishes further deadlines has more windows: it pays for these ([`crate::policy`]).

use std::collections::{BTreeMap, BTreeSet};

use ontime_plan::dpwrap::{SLICE_MAX, SLICE_MIN};
use ontime_plan::{Bandwidth, Nanos};

use crate::admit::reservations::{Kept, Present, Reservations, Reserved, Unfit};
use crate::beside::Beside;
use crate::model::{PROMPT, Pacing};

/// The duration of a check without its calls, ns; and of each call: reading a thread's counters, asking whether it
/// sleeps, reading a published deadline, having the reader read one of these two (an estimate: two changes of thread),
/// changing a place. Counted as instructions on the emulated host, traced in experiment `rta-scale`, at 1 ns each.
pub(crate) const CHECK: u64 = 12_000;
pub(crate) const READ: u64 = 3_300;
pub(crate) const STATE: u64 = 13_500;
pub(crate) const NEXT: u64 = 3_000;
pub(crate) const HANDED_OVER: u64 = 8_000;
pub(crate) const PLACE: u64 = 5_500;

/// What a window costs on a CPU with this many vCPUs, ns.
fn window(vcpus: usize) -> u64 {
    2 * (CHECK + READ * vcpus as u64) + STATE + NEXT + 2 * (HANDED_OVER + PLACE)
}

/// What a slice costs on all CPUs together, ns: its begin reads all vCPUs, half of which have time left, and each has
/// two borders.
fn slice(vcpus: usize, cpus: usize) -> u64 {
    let reads = READ + NEXT + HANDED_OVER + (STATE + HANDED_OVER) / 2;
    CHECK * cpus as u64 + vcpus as u64 * (reads + 2 * (CHECK + READ + PLACE))
}

/// A bandwidth of `cost` ns in each of these periods.
fn each(cost: u64, periods: impl Iterator<Item = Nanos>) -> Bandwidth {
    periods.map(|period| Bandwidth::new(Nanos(cost), period).unwrap_or(Bandwidth::ONE)).sum()
}

/// What the pacers' time is taken from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// What reservations and the reserve leave has the time for vCPUs of `sched.toml`, as if there were no others.
    Unreserved,
    /// Half of the reserve has what leased vCPUs need in addition. Programs give out all that is not reserved by adding
    /// up bandwidths alone, so nothing else is sure to be there.
    Reserve,
}

/// A vCPU that pacers serve.
#[derive(Debug, Clone)]
struct Served {
    name: String,
    period: Nanos,
    publishes: bool,
    leased: bool,
    pinned: bool,
}

impl From<&Reserved> for Served {
    fn from(vcpu: &Reserved) -> Self {
        let name = format!("vCPU {} of {}", vcpu.vcpu, vcpu.tenant);
        let &Reserved { period, leased, pinned, .. } = vcpu;
        Self { name, period, publishes: vcpu.page.is_some(), leased, pinned }
    }
}

impl Served {
    /// Whether the vCPU is planned ahead of all others, if there is one CPU for reservations. It is not while it has
    /// used up half of its budget, which a leased one may do at any time.
    fn is_prompt(&self) -> bool {
        self.period.0 <= PROMPT && !self.publishes && !self.leased
    }
}

/// vCPUs whose pacers share their time.
struct Group<'a> {
    /// The CPU, by its index and by the host's number; None: all CPUs together, by slices.
    cpu: Option<(u32, u32)>,
    cpus: usize,
    /// Whether there is one CPU for reservations.
    alone: bool,
    vcpus: Vec<&'a Served>,
}

impl<'a> Group<'a> {
    /// The vCPUs whose periods cost time. The period of a prompt vCPU ends no slice.
    fn costly(&self) -> impl Iterator<Item = &'a Served> {
        let alone = self.alone;
        self.vcpus.iter().copied().filter(move |vcpu| !(alone && vcpu.is_prompt()))
    }

    /// The times after which windows or slices end. No window is longer than [`SLICE_MAX`].
    fn periods(&self) -> Vec<Nanos> {
        if self.cpu.is_some() {
            return self.costly().map(|vcpu| vcpu.period.min(SLICE_MAX)).collect();
        }
        let (publish, silent): (Vec<&Served>, Vec<&Served>) = self.costly().partition(|vcpu| vcpu.publishes);
        let equal: BTreeSet<Nanos> = silent.iter().map(|vcpu| vcpu.period).collect();
        publish.iter().map(|vcpu| vcpu.period).chain(equal).collect()
    }

    /// The pacers' time, in CPUs.
    fn needs(&self) -> Bandwidth {
        let periods = self.periods().into_iter();
        if self.cpu.is_some() {
            return each(window(self.vcpus.len()), periods);
        }
        let cost = slice(self.vcpus.len(), self.cpus);
        each(cost, periods).min(each(cost, std::iter::once(SLICE_MIN)))
    }

    /// How many windows or slices end in a second.
    fn number(&self) -> u64 {
        self.periods().iter().map(|period| 1_000_000_000 / period.0.max(1)).sum()
    }

    /// That `number` windows or slices which need so much do not fit. `beside`: what there is.
    fn refusal(&self, number: u64, needs: Bandwidth, beside: &str, remedy: &str) -> Unfit {
        let shortest = self.costly().min_by_key(|vcpu| vcpu.period);
        let (shortest, whose) = shortest.map_or((Nanos::ZERO, ""), |vcpu| (vcpu.period, vcpu.name.as_str()));
        let (what, of) = match self.cpu {
            Some((_, cpu)) => ("windows", format!("CPU {cpu}")),
            None => ("slices", "all CPUs".to_owned()),
        };
        let free = self.vcpus.iter().find(|vcpu| self.cpu.is_none() && !self.alone && !vcpu.pinned);
        let pin = free.map_or_else(String::new, |vcpu| format!("pin {} to one CPU, ", vcpu.name));
        let why = format!(
            "{number} {what} a second would cost the pacers {needs} of {of}, {beside}; the shortest period is \
             {shortest}, of {whose}: {pin}{remedy}"
        );
        Unfit { why, cpu: self.cpu.map(|(at, _)| at) }
    }
}

/// The groups whose pacers' time must fit. `homes`: the home CPUs of the vCPUs, as indices of `cpus`.
fn groups<'a>(pacing: Pacing, cpus: &[u32], vcpus: &'a [Served], homes: &[Option<u32>]) -> Vec<Group<'a>> {
    let alone = cpus.len() == 1;
    let on = |at: u32| {
        let here = vcpus.iter().zip(homes).filter(move |(_, home)| alone || **home == Some(at));
        here.map(|(vcpu, _)| vcpu).collect()
    };
    let each = (0_u32..).zip(cpus).map(|(at, cpu)| Group { cpu: Some((at, *cpu)), cpus: 1, alone, vcpus: on(at) });
    let mut groups: Vec<Group> = each.filter(|_| pacing == Pacing::Best).collect();
    let migrate = !alone && vcpus.iter().zip(homes).any(|(vcpu, home)| home.is_none() || !vcpu.pinned);
    // As `Schedule::new` decides: also where a vCPU with such a period publishes deadlines.
    let may_be_prompt = alone && vcpus.iter().any(|vcpu| vcpu.period.0 <= PROMPT);
    let by_slices = pacing == Pacing::Slices || migrate || may_be_prompt;
    if by_slices && pacing != Pacing::None {
        groups.push(Group { cpu: None, cpus: cpus.len(), alone, vcpus: vcpus.iter().collect() });
    }
    groups
}

/// The vCPUs of `sched.toml` with their home CPUs. `homes`: the home CPUs of `vcpus`.
fn declared(vcpus: &[Reserved], homes: &[Option<u32>]) -> (Vec<Served>, Vec<Option<u32>>) {
    let declared = vcpus.iter().zip(homes).filter(|(vcpu, _)| !vcpu.leased);
    declared.map(|(vcpu, home)| (Served::from(vcpu), *home)).unzip()
}

/// For each of these CPUs, the pacers' time in these groups, in millionths of a CPU: what its windows take, or an equal
/// part of what slices take.
fn on_each(groups: &[Group<'_>], cpus: usize) -> Vec<u64> {
    let needs = |at: Option<u32>| {
        let of = groups.iter().filter(|group| group.cpu.map(|(at, _)| at) == at);
        of.map(|group| group.needs().whole_ppm()).max().unwrap_or_default()
    };
    let by_slices = needs(None).div_ceil(cpus.max(1) as u64);
    (0..).take(cpus).map(|at| needs(Some(at)).max(by_slices)).collect()
}

/// For each CPU for reservations, the time that the pacers of `sched.toml`'s vCPUs need of it, in millionths of a CPU.
pub fn pacers_of_declared(reservations: &Reservations) -> BTreeMap<u32, u64> {
    let Reservations { pacing, ref vcpus, ref cpus, .. } = *reservations;
    let homes: Vec<Option<u32>> = vcpus.iter().map(|vcpu| vcpu.home).collect();
    let (declared, homes) = declared(vcpus, &homes);
    cpus.iter().copied().zip(on_each(&groups(pacing, cpus, &declared, &homes), cpus.len())).collect()
}

/// Whether `source` has the pacers' time for these vCPUs. `homes`: the home CPUs of the vCPUs, then of what is kept.
/// `present`: those that were admitted before. Where the time lacked before, it is no reason against what is elsewhere.
///
/// # Errors
/// The reason and the remedy, if not.
pub(crate) fn check(
    reservations: &Reservations,
    vcpus: &[Reserved],
    kept: &[Kept],
    homes: &[Option<u32>],
    source: Source,
    present: Present,
) -> Result<(), Unfit> {
    let Reservations { pacing, ref cpus, .. } = *reservations;
    let (declared, their_homes) = declared(vcpus, homes);
    let of_declared = groups(pacing, cpus, &declared, &their_homes);
    match source {
        Source::Unreserved => {
            let bandwidths = vcpus.iter().map(|vcpu| vcpu.bandwidth).chain(kept.iter().map(|kept| kept.bandwidth));
            let capped = vcpus.iter().map(|vcpu| vcpu.leased).chain(kept.iter().map(|_| true));
            let all = bandwidths.zip(homes).zip(capped);
            let all: Vec<Held> =
                all.map(|((bandwidth, home), capped)| Held { bandwidth, home: *home, capped }).collect();
            let (of_vcpus, of_kept) = homes.split_at(homes.len().min(vcpus.len()));
            let new = of_vcpus.iter().skip(present.vcpus).chain(of_kept.iter().skip(present.kept));
            unreserved(reservations, &of_declared, &all, &new.copied().collect::<Vec<_>>())
        }
        Source::Reserve => {
            let served: Vec<Served> = vcpus.iter().map(Served::from).collect();
            half_of_reserve(reservations.beside.reserve, &of_declared, &groups(pacing, cpus, &served, homes))
        }
    }
}

/// A reservation with its home CPU.
struct Held {
    bandwidth: Bandwidth,
    home: Option<u32>,
    /// Whether it depends on runtime caps.
    capped: bool,
}

/// Whether the pacers of these groups have their time beside all that is held, the reserve and the cap watcher.
/// `new`: the home CPUs of what is new.
fn unreserved(
    reservations: &Reservations,
    groups: &[Group<'_>],
    all: &[Held],
    new: &[Option<u32>],
) -> Result<(), Unfit> {
    let remedy = "choose a longer one, or reserve less";
    let Beside { reserve, watcher } = reservations.beside;
    // What stays on a CPU cannot make room for the watcher elsewhere, and all that may migrate can on one.
    let kept = |here: &[&Held], cpus: usize| {
        let watched: BTreeSet<Option<u32>> = here.iter().filter(|one| one.capped).map(|one| one.home).collect();
        let watcher = std::iter::repeat_n(watcher, watched.len().min(cpus));
        std::iter::repeat_n(reserve, cpus).chain(watcher).sum::<Bandwidth>()
    };
    for group in groups {
        let is_on = |home: Option<u32>| group.alone || group.cpu.is_none_or(|(at, _)| home == Some(at));
        let here: Vec<&Held> = all.iter().filter(|one| is_on(one.home)).collect();
        let reserved: Bandwidth = here.iter().map(|one| one.bandwidth).sum();
        let (reserve, needs) = (kept(&here, group.cpus), group.needs());
        let fits = needs == Bandwidth::ZERO || reserved + reserve + needs <= Bandwidth::cpus(group.cpus);
        if !fits && new.iter().any(|home| is_on(*home)) {
            let beside = format!("beside {reserved} reserved and the reserve of {reserve}");
            return Err(group.refusal(group.number(), needs, &beside, remedy));
        }
    }
    // What may migrate counts on no CPU alone, and takes the time of any.
    let cpus = reservations.cpus.len();
    if cpus < 2 || all.iter().all(|one| one.home.is_some()) {
        return Ok(());
    }
    // The vCPUs of all CPUs are planned in one of the two ways.
    let by_windows = groups.iter().filter(|group| group.cpu.is_some()).map(Group::needs).sum::<Bandwidth>();
    let by_slices = groups.iter().filter(|group| group.cpu.is_none()).map(Group::needs).sum::<Bandwidth>();
    let needs = by_windows.max(by_slices);
    let reserved: Bandwidth = all.iter().map(|one| one.bandwidth).sum();
    let reserve = kept(&all.iter().collect::<Vec<_>>(), cpus);
    if needs == Bandwidth::ZERO || reserved + reserve + needs <= Bandwidth::cpus(cpus) {
        return Ok(());
    }
    let costly = groups.iter().max_by_key(|group| group.needs());
    costly.map_or(Ok(()), |group| {
        let beside =
            format!("and all pacers {needs} of {cpus} CPUs, beside {reserved} reserved and the reserve of {reserve}");
        Err(Unfit { cpu: None, ..group.refusal(group.number(), group.needs(), &beside, remedy) })
    })
}

/// Whether half of the reserve has what pacers take in `all` groups more than in those without leases.
fn half_of_reserve(reserve: Bandwidth, without: &[Group<'_>], all: &[Group<'_>]) -> Result<(), Unfit> {
    all.iter().try_for_each(|group| {
        let without = without.iter().find(|without| without.cpu == group.cpu);
        let (before, number) = without.map_or((0, 0), |group| (group.needs().whole_ppm(), group.number()));
        let needs = Bandwidth::ppm(group.needs().whole_ppm().saturating_sub(before));
        let reserve: Bandwidth = std::iter::repeat_n(reserve, group.cpus).sum();
        if needs + needs <= reserve {
            return Ok(());
        }
        let beside = format!("and may take half of the reserve of {reserve}");
        let remedy = "choose a longer one, or raise `reserve` in sched.toml; until then the vCPUs are capped at budget \
                      over period instead";
        Err(group.refusal(group.number().saturating_sub(number), needs, &beside, remedy))
    })
}

/// The pacers' time for these vCPUs at `home`, an index of `cpus` (None: for those without a home), in CPUs.
pub(crate) fn at_home(reservations: &Reservations, vcpus: &[Reserved], home: Option<u32>) -> Bandwidth {
    let Reservations { pacing, ref cpus, .. } = *reservations;
    let homes: Vec<Option<u32>> = vcpus.iter().map(|vcpu| vcpu.home).collect();
    let home = home.or((cpus.len() == 1).then_some(0));
    let served: Vec<Served> = vcpus.iter().map(Served::from).collect();
    let groups = groups(pacing, cpus, &served, &homes);
    let needs = |at: Option<u32>| {
        let of = groups.iter().filter(|group| group.cpu.map(|(at, _)| at) == at);
        of.map(Group::needs).max()
    };
    needs(home).max(needs(None)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use ontime_tenants::{Class, ThreadId};

    use super::*;

    const NONE: Present = Present { vcpus: 0, kept: 0 };

    fn reserve(reserve: Bandwidth) -> Beside {
        Beside { reserve, watcher: Bandwidth::ZERO }
    }

    fn on(pacing: Pacing, cpus: &[u32]) -> Reservations {
        Reservations { pacing, cpus: cpus.to_vec(), ..Reservations::default() }
    }

    fn vcpu(number: u32, budget_us: u64, period_us: u64) -> Reserved {
        let (budget, period) = (Nanos::from_micros(budget_us), Nanos::from_micros(period_us));
        Reserved {
            id: ThreadId { pid: 1, tid: 100 + i32::try_from(number).unwrap(), start_time: 1 },
            tenant: format!("vm{number}"),
            class: Class::Bulk,
            vcpu: 0,
            budget,
            period,
            bandwidth: Bandwidth::new(budget, period).unwrap(),
            guest: None,
            page: None,
            offer: None,
            home: None,
            pinned: true,
            leased: false,
        }
    }

    fn said(pacing: Pacing, cpus: &[u32], vcpus: &[Reserved], homes: &[Option<u32>]) -> Option<String> {
        check(&on(pacing, cpus), vcpus, &[], homes, Source::Unreserved, NONE).err().map(|unfit| unfit.why)
    }

    #[test]
    fn more_windows_a_second_than_the_cpu_can_serve_are_refused_and_the_period_is_named() {
        // 50 us in 3 ms are 1.7 % of a CPU each. The pacer would read all vCPUs twice in each window.
        let mut set: Vec<Reserved> = (0..20).map(|number| vcpu(number, 50, 3_000)).collect();
        set.push(vcpu(20, 100, 2_000));
        let homes = vec![Some(0); set.len()];
        let said_all = said(Pacing::Best, &[3], &set, &homes).unwrap();
        assert!(said_all.starts_with("7160 windows a second would cost the pacers 1."), "{said_all}");
        assert!(said_all.contains("of CPU 3") && said_all.contains("is 2 ms, of vCPU 0 of vm20:"), "{said_all}");
        // The same on four CPUs, and in longer periods.
        let spread: Vec<Option<u32>> = (0..21).map(|number| Some(number % 4)).collect();
        assert_eq!(said(Pacing::Best, &[0, 1, 2, 3], &set, &spread), None);
        let slower: Vec<Reserved> = (0..21).map(|number| vcpu(number, 1_000, 60_000)).collect();
        assert_eq!(said(Pacing::Best, &[3], &slower, &homes), None);
        assert_eq!(said(Pacing::None, &[3], &set, &homes), None, "there are no pacers");
    }

    #[test]
    fn slices_cost_time_on_all_cpus_and_equal_periods_end_together() {
        let cpus = [0, 1];
        let equal: Vec<Reserved> = (0..20).map(|number| vcpu(number, 300, 5_000)).collect();
        let homes = vec![None; equal.len()];
        assert_eq!(said(Pacing::Best, &cpus, &equal, &homes), None);
        let differ: Vec<Reserved> = (0..20).map(|number| vcpu(number, 300, 5_000 + u64::from(number))).collect();
        let why = said(Pacing::Best, &cpus, &differ, &homes).unwrap();
        assert!(why.contains("slices a second") && why.contains("of all CPUs") && why.contains("is 5 ms"), "{why}");
        assert!(said(Pacing::Slices, &[0], &differ, &homes).is_some());
        // Beside others on the only CPU, a prompt vCPU ends no slice.
        let prompt = [vcpu(0, 60, 500), vcpu(1, 9_000, 20_000)];
        assert_eq!(said(Pacing::Best, &[0], &prompt, &[None, None]), None);
        assert_eq!(at_home(&on(Pacing::Best, &[0]), &prompt[..0], None), Bandwidth::ZERO);
    }

    #[test]
    fn slices_count_where_a_vcpu_has_a_home_and_may_run_elsewhere() {
        let mut set: Vec<Reserved> = (0..20).map(|number| vcpu(number, 300, 5_000 + u64::from(number))).collect();
        let homes: Vec<Option<u32>> = (0..20).map(|number| Some(number % 4)).collect();
        assert_eq!(said(Pacing::Best, &[0, 1, 2, 3], &set, &homes), None);
        set[7].pinned = false;
        let why = said(Pacing::Best, &[0, 1, 2, 3], &set, &homes).unwrap();
        assert!(why.contains("slices a second") && why.contains("of all CPUs"), "{why}");
        assert!(why.contains("pin vCPU 0 of vm7 to one CPU, choose a longer one"), "{why}");
    }

    /// Either windows or slices end, never both.
    #[test]
    fn beside_unpinned_vcpus_the_costlier_way_to_plan_counts_alone() {
        let mut set: Vec<Reserved> = (0..10).map(|number| vcpu(number, 50, 5_000)).collect();
        set.extend((10..12).map(|number| Reserved { pinned: false, ..vcpu(number, 3_750, 5_000) }));
        let homes: Vec<Option<u32>> = (0..12).map(|number| (number < 10).then_some(0)).collect();
        let on = Reservations { beside: reserve(Bandwidth::ppm(50_000)), ..on(Pacing::Best, &[0, 1]) };
        assert_eq!(check(&on, &set, &[], &homes, Source::Unreserved, NONE), Ok(()));
        set[11].bandwidth = Bandwidth::ppm(790_000);
        let why = check(&on, &set, &[], &homes, Source::Unreserved, NONE).unwrap_err().why;
        assert!(why.contains("of 2 CPUs"), "{why}");
    }

    #[test]
    fn short_periods_cost_windows_where_there_are_several_cpus() {
        let set: Vec<Reserved> = (0..4).map(|number| vcpu(number, 50, 500)).collect();
        let why = said(Pacing::Best, &[2, 3], &set, &[Some(1); 4]).unwrap();
        assert!(why.starts_with("8000 windows a second") && why.contains("of CPU 3"), "{why}");
        assert_eq!(said(Pacing::Best, &[2, 3], &set, &[Some(0), Some(0), Some(1), Some(1)]), None);
        assert_eq!(said(Pacing::Best, &[3], &set, &[Some(0); 4]), None, "all are prompt, and end no slice");
    }

    #[test]
    fn a_long_period_has_several_windows() {
        let set: Vec<Reserved> = (0..60).map(|number| vcpu(number, 12_500, 1_000_000)).collect();
        let homes = vec![Some(0); set.len()];
        let why = said(Pacing::Best, &[3], &set, &homes).unwrap();
        assert!(why.starts_with("600 windows a second") && why.contains("is 1000 ms, of vCPU 0 of vm0:"), "{why}");
        assert_eq!(said(Pacing::Best, &[3], &set[..40], &homes[..40]), None);
    }

    #[test]
    fn slices_count_where_a_vcpu_with_a_short_period_publishes_deadlines() {
        let served = [Served { publishes: true, ..Served::from(&vcpu(0, 60, 500)) }];
        let slices = |cpus: &[u32]| {
            let groups = groups(Pacing::Best, cpus, &served, &[Some(0)]);
            groups.iter().find(|group| group.cpu.is_none()).map(|group| group.needs() > Bandwidth::ZERO)
        };
        assert_eq!((slices(&[0]), slices(&[0, 1])), (Some(true), None));
    }

    #[test]
    fn what_is_kept_takes_no_pacers_time_and_leaves_less_for_it() {
        let set: Vec<Reserved> = (0..8).map(|number| vcpu(number, 50, 3_000)).collect();
        let kept =
            |number: u64| Kept { lease: format!("pod{number}"), bandwidth: Bandwidth::ppm(10_000), cpu: Some(0) };
        let kept: Vec<Kept> = (0..60).map(kept).collect();
        let said = |kept: &[Kept]| {
            let homes = vec![Some(0); set.len() + kept.len()];
            check(&on(Pacing::Best, &[0]), &set, kept, &homes, Source::Unreserved, NONE).err().map(|unfit| unfit.why)
        };
        assert_eq!(said(&kept[..50]), None);
        let why = said(&kept).unwrap();
        assert!(why.contains("beside 0.733") && why.contains("is 3 ms, of vCPU 0 of vm0:"), "{why}");
        let elsewhere = |at: u32| Kept { cpu: Some(at), ..kept[0].clone() };
        let homes = [vec![Some(0); set.len()], vec![Some(1); 60]].concat();
        let beside: Vec<Kept> = (0..60).map(|_| elsewhere(1)).collect();
        assert_eq!(check(&on(Pacing::Best, &[0, 1]), &set, &beside, &homes, Source::Unreserved, NONE), Ok(()));
    }

    #[test]
    fn pacers_of_leases_may_take_half_of_the_reserve_however_much_is_unreserved() {
        let reservations =
            |ppm: u64| Reservations { beside: reserve(Bandwidth::ppm(ppm)), ..on(Pacing::Best, &[4, 5]) };
        let said = |ppm: u64, vcpus: &[Reserved], homes: &[Option<u32>]| {
            check(&reservations(ppm), vcpus, &[], homes, Source::Reserve, NONE).err().map(|unfit| unfit.why)
        };
        let leased = |number: u32, period: u64| Reserved { leased: true, ..vcpu(number, 10, period) };
        let needs = window(1) / 4;
        assert_eq!(said(2 * needs + 2, &[leased(0, 4_000)], &[Some(0)]), None);
        let why = said(2 * needs - 2, &[leased(0, 4_000)], &[Some(0)]).unwrap();
        assert!(why.starts_with("250 windows a second") && why.contains("half of the reserve of 0.03"), "{why}");
        assert!(why.contains("is 4 ms, of vCPU 0 of vm0:") && why.ends_with("over period instead"), "{why}");

        // What VMs of sched.toml need is theirs, on this CPU or another one.
        let declared = [vcpu(1, 10, 2_000), vcpu(2, 10, 2_000)];
        let mut set = vec![leased(0, 40_000), declared[0].clone(), declared[1].clone()];
        for homes in [[Some(0), Some(1), Some(1)], [Some(0), Some(0), Some(1)]] {
            assert_eq!(said(20_000, &set, &homes), None);
        }
        // An unpinned vCPU has all others planned by slices, which they do not need themselves.
        let declared: Vec<Reserved> = (0..4).map(|number| vcpu(number, 10, 3_000 + 10 * u64::from(number))).collect();
        let four = Reservations { beside: reserve(Bandwidth::ppm(50_000)), ..on(Pacing::Best, &[4, 5, 6, 7]) };
        let with_unpinned = [declared, vec![leased(9, 100_000)]].concat();
        let homes = [Some(0), Some(1), Some(2), Some(3), None];
        assert!(check(&four, &with_unpinned, &[], &homes, Source::Reserve, NONE).is_err());
        assert_eq!(
            check(&four, &with_unpinned, &[], &homes, Source::Unreserved, NONE),
            Ok(()),
            "it refuses none of them"
        );
        // But not what they need more, because there are more vCPUs to read.
        set.extend((3..12).map(|number| vcpu(number, 10, 2_000)));
        assert!(said(20_000, &set, &[Some(0); 12]).is_some());
        // A short period has no precedence for nothing, also if there is one CPU.
        let one = Reservations { beside: reserve(Bandwidth::ppm(50_000)), ..on(Pacing::Best, &[4]) };
        assert!(check(&one, &[leased(0, 500)], &[], &[None], Source::Reserve, NONE).is_err());
    }
}
