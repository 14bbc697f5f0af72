//! Shares on a simulated host: CPUs that run the highest places first, as the kernel's FIFO with push and pull does, and bulk beneath.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

use ontime_plan::Bandwidth;
use ontime_tenants::Class;
use proptest::prelude::*;

use super::*;
use crate::account::Counts;
use crate::published::Next;
use crate::settle::Reserved;

const MS: u64 = 1_000_000;
/// Of the simulation.
const TICK: u64 = 10_000;

/// What a simulated guest does.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Guest {
    Spins,
    Sleeps,
    /// Wants this much from each period's beginning on.
    Wants(u64),
    /// Sleeps until then, then spins.
    SpinsFrom(u64),
}

#[derive(Debug)]
struct Vm {
    guest: Guest,
    period: u64,
    /// When its periods begin, counted from the clock's zero; and whether its guest says so.
    phase: u64,
    publishes: bool,
    place: Place,
    counts: Counts,
    /// What it still wants.
    work: u64,
    alive: bool,
    /// What it had at a place ahead of bulk, in its present period, and the least of any whole one.
    had: u64,
    least: u64,
}

struct Host {
    cpus: usize,
    vms: Vec<Vm>,
    now: u64,
    /// CPU time that bulk, which always wants all, had.
    bulk: u64,
    flips: u64,
    /// What a pacer's look takes of its CPU; and how long the only CPU is still taken by one.
    cost: u64,
    taken: u64,
}

impl Threads for Host {
    fn read(&mut self, seat: usize) -> Option<Counts> {
        self.vms.get(seat).filter(|vm| vm.alive).map(|vm| vm.counts)
    }

    fn next(&mut self, seat: usize, after: u64) -> Option<Next> {
        let vm = self.vms.get(seat).filter(|vm| vm.publishes)?;
        let at = (after - after.min(vm.phase)) / vm.period * vm.period + vm.phase;
        Some(Next { at: if at > after { at } else { at + vm.period }, live: true })
    }

    fn place(&mut self, seat: usize, place: Place) -> Option<Counts> {
        self.flips += 1;
        let vm = self.vms.get_mut(seat).filter(|vm| vm.alive)?;
        vm.place = place;
        Some(vm.counts)
    }
}

impl Host {
    fn new(cpus: usize, settled: &Settled, guests: &[Guest]) -> Self {
        let vm = |(reserved, guest): (&Reserved, &Guest)| Vm {
            guest: *guest,
            period: reserved.period.0,
            phase: 0,
            publishes: false,
            place: Place::Entitled,
            counts: Counts::default(),
            work: 0,
            alive: true,
            had: 0,
            least: u64::MAX,
        };
        Self {
            cpus,
            vms: settled.vcpus.iter().zip(guests).map(vm).collect(),
            now: 0,
            bulk: 0,
            flips: 0,
            cost: 0,
            taken: 0,
        }
    }

    fn wants(&self, vm: &Vm) -> bool {
        vm.alive
            && match vm.guest {
                Guest::Spins => true,
                Guest::Sleeps => false,
                Guest::Wants(_) => vm.work > 0,
                Guest::SpinsFrom(from) => self.now >= from,
            }
    }

    fn tick(&mut self) {
        for vm in &mut self.vms {
            if self.now >= vm.phase && (self.now - vm.phase) % vm.period == 0 {
                if self.now >= vm.phase + 2 * vm.period {
                    vm.least = vm.least.min(vm.had);
                }
                vm.had = 0;
                if let Guest::Wants(work) = vm.guest {
                    vm.work = work;
                }
            }
        }
        let rank = |place| match place {
            Place::Planned => 0,
            Place::Entitled => 1,
            Place::Beyond => 2,
        };
        let mut order: Vec<usize> = (0..self.vms.len()).filter(|vm| self.wants(&self.vms[*vm])).collect();
        order.sort_by_key(|vm| rank(self.vms[*vm].place));
        let mut left = if self.taken > 0 { 0 } else { self.cpus };
        self.taken = self.taken.saturating_sub(TICK);
        for vm in order {
            let vm = &mut self.vms[vm];
            // Bulk always wants the CPU, and comes before who is beyond its share.
            if left > 0 && vm.place != Place::Beyond {
                left -= 1;
                vm.counts.ran += TICK;
                vm.had += TICK;
                vm.work = vm.work.saturating_sub(TICK);
            } else {
                vm.counts.waited += TICK;
            }
        }
        self.bulk += u64::try_from(left).unwrap() * TICK;
        self.now += TICK;
    }

    /// Runs with pacers that come `late` after they are due. Returns their wake-ups.
    fn run(&mut self, shares: &mut Shares, until: u64, late: u64) -> u64 {
        let mut due = vec![self.now; self.cpus];
        let mut wakes = 0;
        while self.now < until {
            for cpu in 0..self.cpus {
                if due[cpu] <= self.now && self.taken == 0 {
                    wakes += 1;
                    due[cpu] = shares.step(cpu, self.now, self).saturating_add(late);
                    shares.took(self.cost);
                    self.taken = self.cost;
                    if shares.take_stirred() {
                        due.fill(self.now + late);
                    }
                }
            }
            self.tick();
        }
        wakes
    }
}

fn settled(cpus: u32, reserve_ppm: u64, asked: &[(u64, u64)]) -> Option<Settled> {
    let reserved = |(number, (budget, period)): (u32, &(u64, u64))| Reserved {
        id: ThreadId { pid: 1, tid: 100 + i32::try_from(number).unwrap(), start_time: 1 },
        tenant: "vm".to_owned(),
        class: Class::Bulk,
        vcpu: number,
        budget: Nanos(*budget),
        period: Nanos(*period),
        bandwidth: Bandwidth::new(Nanos(*budget), Nanos(*period)).unwrap(),
        guest: None,
        page: None,
        home: None,
    };
    let vcpus: Vec<Reserved> = (0..).zip(asked).map(reserved).collect();
    let reserve = Bandwidth::ppm(reserve_ppm);
    let pinned =
        (0..cpus).map(|cpu| ontime_plan::Reservation { bandwidth: reserve, affinity: Some(BTreeSet::from([cpu])) });
    let free = vcpus.iter().map(|vcpu| ontime_plan::Reservation { bandwidth: vcpu.bandwidth, affinity: None });
    let all: Vec<_> = pinned.chain(free).collect();
    let admitted = ontime_plan::Admission::new(cpus, Bandwidth::ZERO).admit(&all).ok()?;
    Some(Settled { vcpus, refused: Vec::new(), cpus: (0..cpus).collect(), shared: admitted.shared, reserve })
}

fn start(cpus: u32, asked: &[(u64, u64)], guests: &[Guest]) -> (Shares, Host) {
    let settled = settled(cpus, 50_000, asked).unwrap();
    let mut host = Host::new(cpus as usize, &settled, guests);
    let mut shares = Shares::new(&settled, 0, |_| Arc::default());
    shares.begin(host.now, &mut host);
    (shares, host)
}

fn tally(shares: &Shares, seat: usize) -> &Tally {
    &shares.seats[seat].account.tally
}

fn count(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// Periods that begin when nobody else's do: without the guest's word its share may be planned where it is of no use.
#[test]
fn a_published_deadline_makes_the_guests_own_periods_whole() {
    let work = 5_400_000;
    let least = |publishes: bool| {
        let asked = [(4_600_000, 13 * MS), (2_200_000, 7 * MS), (work + 100_000, 20 * MS)];
        let guests = [Guest::Spins, Guest::Spins, Guest::Wants(work)];
        let (mut shares, mut host) = start(1, &asked, &guests);
        (host.vms[2].phase, host.vms[2].publishes) = (9 * MS, publishes);
        host.run(&mut shares, 5_000 * MS, 0);
        host.vms.iter().map(|vm| vm.least).collect::<Vec<_>>()
    };
    let with = least(true);
    assert!(with[2] >= work, "{with:?}");
    assert!(with[0] >= 4_500_000 && with[1] >= 2_100_000, "nobody else loses by it: {with:?}");
    assert!(least(false)[2] < work, "it would have it anyway");
}

/// Requests each 10 ms to a VM with 58 us in 500 us, beside two that never idle.
fn prompt(cpus: u32, work: u64) -> (Shares, Host) {
    let asked = [(3 * MS, 10 * MS), (8 * MS, 20 * MS), (58_000, 500_000)];
    let (mut shares, mut host) = start(cpus, &asked, &[Guest::Spins, Guest::Spins, Guest::Wants(work)]);
    (host.vms[2].period, host.vms[2].phase) = (10 * MS, 3_330_000);
    host.run(&mut shares, 2_000 * MS, 0);
    (shares, host)
}

#[test]
fn a_prompt_vcpu_is_served_at_once_and_cuts_nobodys_slices() {
    let (shares, host) = prompt(1, 50_000);
    let requests = 2_000 / 10;
    // A tick or two of each request's time goes to a look.
    assert!(host.vms[2].counts.waited <= requests * 2 * TICK, "{} in {requests}", host.vms[2].counts.waited);
    assert_eq!(host.vms[2].least, 50_000);
    for (vm, share) in [(0, 3 * MS), (1, 8 * MS)] {
        assert!(host.vms[vm].least + share / 50 >= share, "VM {vm}: {}", host.vms[vm].least);
    }
    assert!(shares.slices <= 2_000 / 10 + 2, "{} slices in 200 periods of 10 ms", shares.slices);
}

/// A slice of 300 us each 10 ms, whose share is 35 us, in which a request for 50 us comes.
#[test]
fn a_prompt_vcpu_does_not_wait_for_the_end_of_a_short_slice() {
    let asked = [(3 * MS, 10 * MS), (2 * MS, 10 * MS), (58_000, 500_000)];
    let (mut shares, mut host) = start(1, &asked, &[Guest::Spins, Guest::Wants(2 * MS), Guest::Wants(50_000)]);
    (host.vms[1].phase, host.vms[1].publishes) = (300_000, true);
    (host.vms[2].period, host.vms[2].phase) = (10 * MS, 100_000);
    host.run(&mut shares, 2_000 * MS, 0);
    assert!(host.vms[2].counts.waited <= 200 * 2 * TICK, "{}", host.vms[2].counts.waited);
    assert_eq!(host.vms[2].least, 50_000);
    assert!(host.vms[0].least + 3 * MS / 50 >= 3 * MS && host.vms[1].least + 2 * MS / 50 >= 2 * MS, "{:?}", host.vms);
}

#[test]
fn who_says_to_be_prompt_and_spins_has_its_share_and_no_more() {
    let (shares, host) = prompt(1, 10 * MS);
    let ran = host.vms[2].counts.ran;
    let share = 2_000 * MS / 500_000 * 58_000;
    assert!(ran <= share + share / 50 + MS, "{ran} of {share}");
    for (vm, share) in [(0, 3 * MS), (1, 8 * MS)] {
        assert!(host.vms[vm].least + share / 50 >= share, "VM {vm}: {}", host.vms[vm].least);
    }
    assert!(shares.slices >= 2_000, "its period ends slices: {}", shares.slices);
}

#[test]
fn spinners_have_their_shares_in_every_period_and_bulk_has_the_rest() {
    let (mut shares, mut host) =
        start(1, &[(3 * MS, 10 * MS), (4 * MS, 20 * MS), (MS, 10 * MS)], &[Guest::Spins, Guest::Spins, Guest::Sleeps]);
    host.run(&mut shares, 2_000 * MS, TICK);
    for (vm, share) in [(0, 3 * MS), (1, 4 * MS)] {
        let least = host.vms[vm].least;
        assert!(least + share / 50 >= share, "VM {vm}: {least} of {share}");
        let expected = 2_000 * MS / host.vms[vm].period * share;
        let ran = host.vms[vm].counts.ran;
        assert!(ran.abs_diff(expected) <= expected / 200, "VM {vm}: {ran} of {expected}");
    }
    assert_eq!(host.vms[2].counts.ran, 0);
    assert!(count(&tally(&shares, 2).flips) <= 6, "a sleeper's place is changed");
    assert!(host.bulk >= 990 * MS, "{}", host.bulk);
    for seat in 0..3 {
        assert_eq!(count(&tally(&shares, seat).misses), 0, "seat {seat}");
    }
    assert!(count(&tally(&shares, 0).overruns) >= 190);
    assert_eq!(count(&tally(&shares, 2).overruns), 0);
}

#[test]
fn what_one_does_not_use_another_has_at_once_and_then_bulk() {
    // The first is planned first and wants little; the second starts as soon as that is done.
    let (mut shares, mut host) =
        start(1, &[(5 * MS, 10 * MS), (4 * MS, 10 * MS)], &[Guest::Wants(MS), Guest::Wants(4 * MS)]);
    host.run(&mut shares, 20 * MS, 0);
    let before = host.vms[1].counts.ran;
    host.run(&mut shares, 26 * MS, 0);
    assert!(host.vms[1].counts.ran - before >= 4 * MS, "{}", host.vms[1].counts.ran - before);
    host.run(&mut shares, 1_000 * MS, 0);
    assert!(host.bulk >= 490 * MS, "{}", host.bulk);
    assert_eq!(host.vms[1].least, 4 * MS);
    assert_eq!(count(&tally(&shares, 0).overruns), 0, "who stays below its share is never put behind");
}

#[test]
fn sleepers_cost_nearly_nothing_and_no_change_of_place() {
    let (mut shares, mut host) = start(2, &[(3 * MS, 10 * MS); 4], &[Guest::Sleeps; 4]);
    host.run(&mut shares, 500 * MS, 0);
    let flips = host.flips;
    let wakes = host.run(&mut shares, 10_500 * MS, 0);
    assert_eq!(host.flips, flips);
    assert!(wakes <= 10_000 / 50 + 2, "{wakes} wake-ups in 10 s");
}

#[test]
fn one_that_begins_to_spin_in_calm_times_pays_back_and_others_are_served_from_then_on() {
    let guests = [Guest::SpinsFrom(700 * MS), Guest::SpinsFrom(701 * MS)];
    let (mut shares, mut host) = start(1, &[(3 * MS, 10 * MS), (2 * MS, 10 * MS)], &guests);
    host.run(&mut shares, 700 * MS + CALM_MAX + 10 * MS, 0);
    let waited = host.vms[1].counts.ran;
    assert!(waited > 0, "the second was never served");
    host.run(&mut shares, 5_000 * MS, 0);
    for (vm, share) in [(0, 30), (1, 20)] {
        let ran = host.vms[vm].counts.ran;
        // Its share of the calm time in which it woke was not used up yet.
        let most = (4_300 * MS + CALM_MAX) * share / 100 + MS;
        assert!(ran <= most, "VM {vm} had {ran}, more than its share {most}");
    }
    assert_eq!(count(&tally(&shares, 0).misses), 0, "what it pays back it has not missed");
    assert!(host.vms[1].counts.ran >= 4_200 * MS / 5 - CALM_MAX, "{}", host.vms[1].counts.ran);
}

/// A look takes longer than the rest of a share: it must not be followed by the next before that could be used up.
#[test]
fn looks_leave_time_to_run() {
    let asked = [(6 * MS, 20 * MS), (4 * MS, 20 * MS), (2 * MS, 20 * MS)];
    for cost in [20_000, 30_000, 40_000, 60_000, 90_000] {
        let (mut shares, mut host) = start(1, &asked, &[Guest::Spins, Guest::Spins, Guest::Wants(100_000)]);
        host.cost = cost;
        let wakes = host.run(&mut shares, 4_000 * MS, 0);
        for (vm, share) in [(0, 6 * MS), (1, 4 * MS)] {
            let least = host.vms[vm].least;
            // It may have been late for the last look, and pays that back.
            assert!(least + share / 50 + COST_FACTOR * cost >= share, "{cost}: VM {vm}: {least} of {share}");
        }
        let looks = wakes * cost;
        assert!(looks <= 4_000 * MS / 8, "{cost}: looks took {looks}");
        assert!(host.bulk >= 1_000 * MS, "{cost}: bulk had {}", host.bulk);
    }
}

/// Behind bulk it does not run, and sleeps no more than one that waits: else it would be let loose for a slice again and again.
#[test]
fn who_pays_back_is_not_asleep() {
    let guests = [Guest::Spins, Guest::SpinsFrom(705 * MS)];
    let (mut shares, mut host) = start(1, &[(6 * MS, 20 * MS), (4 * MS, 20 * MS)], &guests);
    // It woke in a slice in which nobody looked at it.
    host.run(&mut shares, 1_000 * MS, 0);
    host.vms.iter_mut().for_each(|vm| vm.least = u64::MAX);
    host.run(&mut shares, 3_000 * MS, 0);
    for (vm, share) in [(0, 6 * MS), (1, 4 * MS)] {
        let least = host.vms[vm].least;
        assert!(least + share / 50 >= share, "VM {vm}: {least} of {share}");
    }
}

/// From the making of a set to its taking over pacers' maker may wait long, and vCPUs run meanwhile.
#[test]
fn what_was_had_before_anybody_looked_is_nobodys_debt() {
    let asked = [(6 * MS, 20 * MS), (4 * MS, 20 * MS)];
    let (mut shares, mut host) = start(1, &asked, &[Guest::Spins, Guest::Spins]);
    while host.now < 500 * MS {
        host.tick();
    }
    shares.begin(host.now, &mut host);
    host.run(&mut shares, 520 * MS, 0);
    host.vms.iter_mut().for_each(|vm| vm.least = u64::MAX);
    host.run(&mut shares, 1_000 * MS, 0);
    for (vm, share) in [(0, 6 * MS), (1, 4 * MS)] {
        let least = host.vms[vm].least;
        assert!(least + share / 50 >= share, "VM {vm}: {least} of {share}");
    }
}

#[test]
fn one_that_ends_is_left_alone_and_the_others_go_on() {
    let (mut shares, mut host) = start(1, &[(3 * MS, 10 * MS), (3 * MS, 10 * MS)], &[Guest::Spins, Guest::Spins]);
    host.run(&mut shares, 104 * MS, 0);
    host.vms[0].alive = false;
    host.run(&mut shares, 1_104 * MS, 0);
    assert!(shares.seats[0].account.gone);
    assert!(host.vms[1].least >= 29 * MS / 10, "{}", host.vms[1].least);
    let mut shown = Snapshot::with_room(2);
    shares.show(host.now, &mut shown);
    assert_eq!(shown.standings.len(), 1);
}

#[test]
fn another_set_takes_over_without_a_gap_for_who_stays() {
    let (mut shares, mut host) = start(1, &[(3 * MS, 10 * MS)], &[Guest::Spins]);
    for _ in 0..20 {
        // In the middle of a period, at the end of its slice.
        host.run(&mut shares, host.now + 17 * MS, 0);
        while host.now < shares.end() {
            host.run(&mut shares, host.now + TICK, 0);
        }
        let again = settled(1, 50_000, &[(3 * MS, 10 * MS)]).unwrap();
        let old = shares;
        let known = Arc::clone(&old.seats[0].account.tally);
        shares = Shares::new(&again, host.now, |_| Arc::clone(&known));
        shares.begin(host.now, &mut host);
        shares.take_over(&old);
    }
    assert!(host.vms[0].least >= 29 * MS / 10, "{}", host.vms[0].least);
    let expected = host.now / 10 * 3;
    assert!(host.vms[0].counts.ran.abs_diff(expected) <= MS, "{} of {expected}", host.vms[0].counts.ran);
}

#[test]
fn who_is_kept_waiting_by_others_than_the_plan_has_missed() {
    // Something that is not of this plan takes the only CPU: no VM gets a place that helps.
    let (mut shares, mut host) = start(1, &[(3 * MS, 10 * MS)], &[Guest::Spins]);
    host.cpus = 0;
    let mut due = 0;
    while host.now < 1_000 * MS {
        if due <= host.now {
            due = shares.step(0, host.now, &mut host);
        }
        // The waiting itself shows in the count only once the thread has run.
        if host.now % (7 * MS) == 0 {
            host.vms[0].counts.ran += TICK;
        }
        host.tick();
    }
    assert!(count(&tally(&shares, 0).misses) >= 20, "{:?}", tally(&shares, 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever set is admitted, on one or several CPUs: whoever spins has its share in every one of its periods, nobody has more than
    /// its share while bulk wants the CPU, and bulk has what is left.
    #[test]
    fn admitted_shares_are_kept(
        cpus in 1u32..=3,
        asked in prop::collection::vec((2u64..=60, 0usize..4, any::<bool>()), 1..8),
        late in 0u64..3,
    ) {
        let periods = [5 * MS, 10 * MS, 20 * MS, 40 * MS];
        let wants: Vec<(u64, u64)> =
            asked.iter().map(|(percent, period, _)| (periods[*period] / 100 * percent, periods[*period])).collect();
        let Some(settled) = settled(cpus, 50_000, &wants) else { return Ok(()) };
        let guests: Vec<Guest> =
            asked.iter().map(|(_, _, spins)| if *spins { Guest::Spins } else { Guest::Sleeps }).collect();
        let mut host = Host::new(cpus as usize, &settled, &guests);
        let mut shares = Shares::new(&settled, 0, |_| Arc::default());
        shares.begin(host.now, &mut host);
        let length = 800 * MS;
        host.run(&mut shares, length, late * TICK);
        let mut spinning = 0;
        for ((vm, guest), (budget, period)) in host.vms.iter().zip(&guests).zip(&wants) {
            if *guest == Guest::Sleeps {
                prop_assert_eq!(vm.counts.ran, 0);
                continue;
            }
            // A pacer comes late, the simulation has ticks: a few of them a slice, which may be an eighth of this period.
            let slack = budget / 50 + 10 * (late + 1) * TICK;
            prop_assert!(vm.least + slack >= *budget, "{} of {} in {}", vm.least, budget, period);
            let share = length / period * budget;
            prop_assert!(vm.counts.ran <= share + share / 100 + slack, "{} of {}", vm.counts.ran, share);
            spinning += vm.counts.ran;
        }
        prop_assert_eq!(host.bulk + spinning, length * u64::from(cpus));
    }
}
