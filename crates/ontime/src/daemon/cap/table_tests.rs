use ontime_sched::{Capacity, SchedConfig};
use proptest::prelude::*;

use super::*;
use crate::daemon::cap::boost::GRANT;

const MS: u64 = 1_000_000;

fn watched(share: Share, rank: Rank) -> Watched {
    Watched { share, cpu: 0, rank, boosted: false, pool: None }
}

fn table(threads: usize) -> Table {
    let whole_but_five = Share::new(0.95).unwrap();
    let mut table = Table::new(8, 2, whole_but_five, 5 * MS, 0);
    for slot in 0..threads {
        table.watch(slot, watched(whole_but_five, Rank::Guest), 0);
    }
    table
}

#[test]
fn a_spinner_pauses_and_comes_back() {
    let mut table = table(1);
    let mut acts = Vec::new();
    table.charge(0, 0, 4_750_000, 4_750_000, |a| acts.push(a));
    assert_eq!(acts, [Action::Demote(0)]);
    assert!(table.paused(0));
    assert_eq!(table.next_expiry(), Some(5 * MS));
    table.expire(5 * MS - 1, |a| acts.push(a));
    assert_eq!(acts.len(), 1);
    table.expire(5 * MS, |a| acts.push(a));
    assert_eq!(acts, [Action::Demote(0), Action::Promote(0)]);
    assert_eq!(table.next_expiry(), None);
}

#[test]
fn two_half_spinners_on_one_cpu_pause_together() {
    let mut table = table(3);
    table.charge(2, 1, 1000, 1000, |_| ()); // seen on CPU 1
    let mut acts = Vec::new();
    table.charge(0, 0, 2_400_000, 4_800_000, |a| acts.push(a));
    assert!(acts.is_empty());
    table.charge(1, 0, 2_400_000, 4_800_000, |a| acts.push(a));
    assert!(acts.is_empty());
    table.looked(4_800_000, |a| acts.push(a));
    assert_eq!(acts, [Action::Demote(0), Action::Demote(1)]);
    assert!(!table.paused(2));
}

#[test]
fn threads_that_were_not_read_for_long_are_not_charged_for_less() {
    let mut table = table(4);
    let mut acts = Vec::new();
    // A tenth of a CPU for each thread in ten seconds, all read one after the other.
    let now = 10_000 * MS;
    for slot in 0..4 {
        table.charge(slot, 0, 1_000 * MS, now + slot as u64, |a| acts.push(a));
    }
    table.looked(now + 4, |a| acts.push(a));
    assert!(acts.is_empty(), "{acts:?}");
    // Together they now take nearly all of the CPU, which is too much.
    for slot in 0..4 {
        table.charge(slot, 0, 2_450 * MS, 2 * now + slot as u64, |a| acts.push(a));
    }
    table.looked(2 * now + 4, |a| acts.push(a));
    assert_eq!(acts.len(), 4, "{acts:?}");
}

#[test]
fn what_looking_costs_is_not_left_to_others_either() {
    let mut table = table(1);
    let mut acts = Vec::new();
    let (mut now, mut paused) = (0, 0);
    // A spinner that gets 60 % of its CPU, because looking takes the rest.
    for _ in 0..100 {
        now += MS / 2;
        table.charge(0, 0, 3 * MS / 10, now, |a| acts.push(a));
        table.spent(0, 2 * MS / 10);
        table.looked(now, |a| acts.push(a));
        paused += acts.drain(..).filter(|act| *act == Action::Demote(0)).count();
        now = table.next_expiry().unwrap_or(now);
        table.expire(now, |_| ());
    }
    assert!(paused >= 8, "paused {paused} times in {} ms", now / MS);
    // And the looks are not too frequent.
    let next = table.next_look().unwrap();
    assert!(next - now >= 10 * 2 * MS / 10, "the next look comes after {} ns", next - now);
}

#[test]
fn who_polls_pauses_alone() {
    let mut table = table(1);
    table.watch(1, watched(Share::NINETY_FIVE, Rank::Poller), 0);
    let mut acts = Vec::new();
    let charge = |table: &mut Table, of: [u64; 2], now, acts: &mut Vec<Action>| {
        for (slot, ran) in of.into_iter().enumerate() {
            table.charge(slot, 0, ran, now, |a| acts.push(a));
        }
        table.looked(now, |a| acts.push(a));
    };
    charge(&mut table, [2 * MS, 2_800_000], 4_800_000, &mut acts);
    assert_eq!(acts, [Action::Demote(1)]);
    // Once no poller ran, the other threads took the share.
    charge(&mut table, [9 * MS, 0], 11 * MS, &mut acts);
    assert_eq!(acts, [Action::Demote(1), Action::Demote(0)]);
}

#[test]
fn who_polls_pauses_alone_when_it_is_over_its_own_cap_too() {
    let mut table = table(1);
    table.watch(1, watched(Share::NINETY_FIVE, Rank::Poller), 0);
    let mut acts = Vec::new();
    for slot in 0..2 {
        table.charge(slot, 0, [100_000, 4_800_000][slot], 4_900_000, |a| acts.push(a));
    }
    table.looked(4_900_000, |a| acts.push(a));
    assert_eq!(acts, [Action::Demote(1)]);
}

#[test]
fn unknown_slots_and_cpus_are_ignored() {
    let mut table = table(1);
    let mut acts = Vec::new();
    table.charge(77, 0, 10 * MS, 10 * MS, |a| acts.push(a));
    table.charge(0, 99, 1, 1, |a| acts.push(a));
    table.watch(99, watched(Share::new(0.5).unwrap(), Rank::Guest), 0);
    assert!(!table.forget(99));
    assert!(acts.is_empty());
}

#[test]
fn a_calm_table_is_looked_at_seldom_and_a_busy_one_before_its_budget_is_used() {
    let mut table = table(1);
    let budget = 4_750_000;
    assert_eq!(table.next_look(), Some(budget));
    let mut now = 0;
    for calm in [2, 4, 4] {
        now = table.next_look().unwrap();
        table.charge(0, 0, 1000, now, |_| ());
        table.looked(now, |_| ());
        assert_eq!(table.calm, calm);
    }
    assert!(table.next_look().unwrap() - now > 3 * (budget - 20_000));
    table.charge(0, 0, 3 * MS, now + 5 * MS, |_| ());
    table.looked(now + 5 * MS, |_| ());
    assert!(table.next_look().unwrap() <= now + 5 * MS + budget);
    // A paused thread needs no look.
    table.charge(0, 0, 50 * MS, now + 6 * MS, |_| ());
    assert!(table.paused(0));
    assert_eq!(table.next_look(), None);
}

/// The result of threads that all spin on CPU 0. The first slot has the highest priority, and so on.
struct Spun {
    /// Time since they began to spin, ns.
    ran: u64,
    /// CPU time in it that was left to other threads, ns.
    others: u64,
    /// The longest time without CPU time for other threads, ns: in the whole run, and after the first second.
    gap: u64,
    late_gap: u64,
    /// CPU time of each thread, ns.
    total: Vec<u64>,
}

const CPU_SHARE: Share = Share::NINETY_FIVE;
const STEP: u64 = 50_000;

/// Spins with threads of these caps for two seconds, after `calm` ns without load.
fn spin(shares: &[Share], period: u64, calm: u64) -> Spun {
    let mut table = Table::new(shares.len(), 1, CPU_SHARE, period, 0);
    for (slot, share) in shares.iter().enumerate() {
        table.watch(slot, watched(*share, Rank::Guest), 0);
    }
    let mut since = vec![0u64; shares.len()];
    let mut spun = Spun { ran: 2_000 * MS, others: 0, gap: 0, late_gap: 0, total: since.clone() };
    let (mut seen, mut now, mut gap) = (0, 0, 0);
    while now < calm + spun.ran {
        now += STEP;
        match (0..shares.len()).find(|slot| now > calm && !table.paused(*slot)) {
            None => {
                spun.others += if now > calm { STEP } else { 0 };
                gap = 0;
            }
            Some(slot) => {
                gap += STEP;
                since[slot] += STEP;
                spun.total[slot] += STEP;
            }
        }
        let look = table.next_look().is_some_and(|at| at <= now);
        if look && !table.may_rest(spun.total.iter().sum::<u64>() - seen, now) {
            for (slot, since) in since.iter_mut().enumerate() {
                table.charge(slot, 0, std::mem::take(since), now, |_| ());
            }
            table.looked(now, |_| ());
        }
        if look {
            seen = spun.total.iter().sum();
        }
        spun.gap = spun.gap.max(gap);
        if now > calm + 1_000 * MS {
            spun.late_gap = spun.late_gap.max(gap);
        }
        table.expire(now, |_| ());
    }
    spun
}

proptest! {
    /// Threads of different priorities that all spin on one CPU. Whatever their number and caps, together they leave
    /// the CPU's rest to other threads in any run, after a calm time as well as after a busy one.
    #[test]
    fn spinners_leave_their_cpu_the_rest(
        caps in proptest::collection::vec(10u32..=99, 1..6),
        calm in 0u64..200,
    ) {
        let period = 5 * MS;
        let shares: Vec<Share> = caps.iter().map(|c| Share::new(f64::from(*c) / 100.0).unwrap()).collect();
        let spun = spin(&shares, period, calm * MS);
        // They may begin right after a calm look, and have taken less than half of the time at the next.
        let calm_looks = CALM + 2;
        prop_assert!(spun.gap <= calm_looks * (CPU_SHARE.of(period) + 2 * STEP), "{} ns without a turn for \
            others", spun.gap);
        prop_assert!(spun.others * 1000 >= spun.ran * 45, "others got {} of {}", spun.others, spun.ran);
        for (slot, share) in shares.iter().enumerate() {
            prop_assert!(spun.total[slot] <= share.of(spun.ran) + calm_looks * period, "slot {slot}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Threads of a pod, each within its own cap, spin on one or several CPUs, and some of them wait for a CPU.
    /// Together they take no more than was reserved.
    #[test]
    fn threads_of_a_pool_take_what_it_has_together_however_many_they_are(
        percent in 5u32..=95,
        vcpus in 1u32..=3,
        cpus in 1usize..=4,
        threads in 1usize..40,
    ) {
        let one = Share::new(f64::from(percent) / 100.0).unwrap();
        let pool = Pool { number: 3, share: one.times(vcpus) };
        let mut table = Table::new(threads.max(4), cpus, Share::NINETY_FIVE, 2 * MS, 0);
        for slot in 0..threads {
            let cpu = (slot % cpus) as u32;
            table.watch(slot, Watched { cpu, pool: Some(pool), ..watched(one, Rank::Guest) }, 0);
        }
        let (mut since, mut total, mut seen, mut now) = (vec![0u64; threads], 0, 0, 0);
        while now < 1_000 * MS {
            now += STEP;
            // Each CPU runs the first of its threads that is not paused.
            for cpu in 0..cpus {
                if let Some(slot) = (cpu..threads).step_by(cpus).find(|slot| !table.paused(*slot)) {
                    since[slot] += STEP;
                    total += STEP;
                }
            }
            if table.next_look().is_some_and(|at| at <= now) {
                if !table.may_rest(total - seen, now) {
                    for (slot, since) in since.iter_mut().enumerate() {
                        table.charge(slot, (slot % cpus) as u32, std::mem::take(since), now, |_| ());
                    }
                    table.looked(now, |_| ());
                }
                seen = total;
            }
            table.expire(now, |_| ());
        }
        let may = pool.share.of(now) + 8 * 2 * MS * cpus as u64;
        prop_assert!(total <= may, "{total} of {may} ns");
        // It is a limit, not a way to take away what is reserved.
        let could = pool.share.of(now).min(one.min(Share::NINETY_FIVE).of(now) * cpus.min(threads) as u64);
        prop_assert!(total * 100 >= could * 70, "{total} of {could} ns");
    }
}

/// What spinning pods of one thread on one CPU have of what they reserve, in percent, the one that has least, and what
/// is left to others. The kernel runs them in the order in which they became ready. Looks take as much as they may.
fn pods(shares: &[Share]) -> (u64, u64) {
    const STEP: u64 = 5_000;
    const LOOK: u64 = SHORTEST_LOOK / COST_FACTOR;
    let mut table = Table::new(shares.len(), 1, CPU_SHARE, 2 * MS, 0);
    for (slot, share) in shares.iter().enumerate() {
        let pool = Some(Pool { number: slot, share: *share });
        table.watch(slot, Watched { pool, ..watched(*share, Rank::Guest) }, 0);
    }
    let mut ready: Vec<SlotIndex> = (0..shares.len()).collect();
    let (mut since, mut total) = (vec![0; shares.len()], vec![0; shares.len()]);
    let (mut now, mut others) = (0, 0);
    while now < 2_000 * MS {
        now += STEP;
        match ready.first() {
            Some(slot) => (since[*slot], total[*slot]) = (since[*slot] + STEP, total[*slot] + STEP),
            None => others += STEP,
        }
        let mut acts = Vec::new();
        if table.next_look().is_some_and(|at| at <= now) {
            for (slot, since) in since.iter_mut().enumerate() {
                table.charge(slot, 0, std::mem::take(since), now, |act| acts.push(act));
            }
            table.looked(now, |act| acts.push(act));
            table.cost(LOOK);
            table.spent(0, LOOK);
            now += LOOK;
        }
        table.expire(now, |act| acts.push(act));
        for act in acts {
            ready.retain(|slot| *slot != act.slot());
            ready.extend(matches!(act, Action::Promote(_)).then(|| act.slot()));
        }
    }
    let has = shares.iter().zip(&total).map(|(share, total)| total * 100 / share.of(now));
    (has.min().unwrap(), others * 100 / now)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Pods that fill what may be reserved of a CPU have it, however often the watcher has to look.
    #[test]
    fn what_may_be_reserved_of_a_cpu_is_kept_beside_the_watcher(
        parts in proptest::collection::vec(20u64..100, 1..6),
    ) {
        let capacity = Capacity::beside(SchedConfig::default().beside_leases());
        let (all, sum) = (capacity.unpinned - capacity.watcher, parts.iter().sum::<u64>());
        let share = |part: &u64| Share::new((all * part / sum).min(capacity.largest) as f64 / 1e6).unwrap();
        let shares: Vec<Share> = parts.iter().map(share).collect();
        let (least, others) = pods(&shares);
        prop_assert!(least >= 95, "{shares:?} have {least} % of it");
        prop_assert!(others >= 4, "others have {others} % beside {shares:?}");
    }
}

#[test]
fn a_pool_lasts_as_long_as_one_of_its_threads() {
    let mut table = Table::new(4, 2, Share::NINETY_FIVE, 2 * MS, 0);
    let pool = |percent: f64| Some(Pool { number: 0, share: Share::new(percent).unwrap() });
    for slot in [0, 1] {
        table.watch(slot, Watched { pool: pool(0.5), ..watched(Share::NINETY_FIVE, Rank::Guest) }, 0);
    }
    table.forget(0);
    let mut acts = Vec::new();
    table.charge(1, 1, MS, MS, |act| acts.push(act));
    table.looked(MS, |act| acts.push(act));
    assert_eq!(acts, [Action::Demote(1)], "half of 2 ms is used up");
    table.forget(1);
    // Its number is another reservation's now.
    table.watch(2, Watched { pool: pool(0.9), ..watched(Share::NINETY_FIVE, Rank::Guest) }, MS);
    acts.clear();
    table.charge(2, 0, MS, 2 * MS, |act| acts.push(act));
    table.looked(2 * MS, |act| acts.push(act));
    assert!(acts.is_empty(), "{acts:?}");
}

/// What all together take says nothing where a cap is below half of a CPU.
#[test]
fn a_spinner_with_a_small_cap_is_seen() {
    let share = Share::new(0.1).unwrap();
    for pool in [None, Some(Pool { number: 0, share })] {
        let own = if pool.is_some() { Share::NINETY_FIVE } else { share };
        let mut table = Table::new(4, 1, Share::NINETY_FIVE, 2 * MS, 0);
        table.watch(0, Watched { pool, ..watched(own, Rank::Guest) }, 0);
        assert!(table.may_rest(MS / 10, MS));
        assert!(!table.may_rest(4 * MS / 10, 2 * MS), "{pool:?}");
    }
}

/// Looks are rarer where no watched thread can begin to spin. vCPUs with reserved time are not watched.
#[test]
fn looks_are_as_rare_as_who_is_watched_allows() {
    for (rank, calm) in [(Rank::Guest, CALM), (Rank::Monitor, CALM_BACKENDS), (Rank::Backend, CALM_BACKENDS)] {
        let share = Share::NINETY_FIVE;
        let mut table = Table::new(8, 2, share, 2 * MS, 0);
        table.watch(0, watched(share, rank), 0);
        let mut looked = 0;
        for _ in 0..10 {
            looked = table.next_look().unwrap();
            assert!(table.may_rest(0, looked));
        }
        let gap = table.next_look().unwrap() - looked;
        assert_eq!(gap, calm * share.of(2 * MS), "{rank:?}");
        // A guest thread that is watched from now on shortens the interval to that of guests.
        table.watch(1, watched(share, Rank::Guest), looked);
        assert_eq!(table.next_look().unwrap() - looked, CALM * share.of(2 * MS), "{rank:?}");
    }
}

/// A poller that never stops, beside threads that took a part of their budgets once and little since. The watcher does
/// not read those.
#[test]
fn a_cpu_that_is_polled_on_is_looked_at_once_a_budget() {
    let share = Share::NINETY_FIVE;
    let mut table = Table::new(8, 1, share, 2 * MS, 0);
    table.watch(0, watched(share, Rank::Poller), 0);
    for (slot, used) in [(1, MS), (2, 1_700_000)] {
        table.watch(slot, watched(share, Rank::Backend), 0);
        table.charge(slot, 0, used, 2_000_000 * slot as u64 - 10_000, |_| ());
    }
    let (mut now, mut looks, mut since) = (4 * MS, 0, 0);
    table.looked(now, |_| ());
    let end = now + 100 * MS;
    while now < end {
        let next = table.next_expiry().into_iter().chain(table.next_look()).min().unwrap().max(now);
        since += if table.paused(0) { 0 } else { next - now };
        now = next;
        if table.next_look().is_some_and(|at| at <= now) {
            looks += 1;
            // The watcher's own CPU time.
            now += 20_000;
            if !table.paused(0) {
                table.charge(0, 0, std::mem::take(&mut since), now, |_| ());
            }
            table.looked(now, |_| ());
        }
        let before = table.paused(0);
        table.expire(now, |_| ());
        if before && !table.paused(0) {
            now += 20_000;
        }
        table.spent(0, 20_000);
    }
    assert!(looks <= 100 / 2 + 4, "{looks} looks in 100 ms");
}

/// The thread that reports interrupts is charged to its CPU, and other threads pause for that.
#[test]
fn who_tells_of_interrupts_is_charged_and_goes_on() {
    let mut table = table(1);
    table.watch(1, watched(Share::NINETY_FIVE, Rank::Teller), 0);
    table.watch(2, watched(Share::NINETY_FIVE, Rank::Backend), 0);
    let mut acts = Vec::new();
    for (slot, ran) in [(0, MS), (1, 2 * MS), (2, MS)] {
        table.charge(slot, 0, ran, 4_800_000, |act| acts.push(act));
    }
    table.spent(0, 750_000);
    assert!(acts.is_empty());
    table.looked(4_800_000, |act| acts.push(act));
    assert_eq!(acts, [Action::Demote(0), Action::Demote(2)]);
}

/// With the default period, at whatever point between two looks the thread begins to spin.
#[test]
fn one_that_begins_to_spin_keeps_others_waiting_for_10_ms_at_most() {
    for calm in (0..100).map(|tenth| 50 * MS + tenth * MS / 10) {
        let spun = spin(&[Share::NINETY_FIVE], 2 * MS, calm);
        assert!(spun.gap <= 10 * MS, "{} ns without a turn for others, after {calm} ns", spun.gap);
    }
}

/// Threads of the lowest priorities wait and take nothing of the CPU's share, so they do not pause for it.
#[test]
fn spinners_that_wait_leave_their_cpu_the_rest() {
    for count in [2, 5, 17, 40] {
        let period = 2 * MS;
        let spun = spin(&vec![Share::NINETY_FIVE; count], period, 0);
        assert!(spun.others * 1000 >= spun.ran * 45, "{count}: others got {} of {}", spun.others, spun.ran);
        assert!(spun.late_gap <= 2 * period, "{count}: {} ns without a turn for others", spun.late_gap);
    }
}

#[test]
fn who_took_nothing_for_long_is_not_paused_for_its_cpus_sake() {
    let mut table = table(2);
    let mut acts = Vec::new();
    let mut now = 0;
    for interval in 0..=IDLE_FOR + 1 {
        let ran = 4_800_000;
        now += ran;
        table.charge(0, 0, ran, now, |act| acts.push(act));
        table.looked(now, |act| acts.push(act));
        let both = [Action::Demote(0), Action::Demote(1)];
        assert_eq!(acts, if interval < IDLE_FOR { &both[..] } else { &both[..1] }, "interval {interval}");
        now = table.next_expiry().unwrap();
        table.expire(now, |_| ());
        acts.clear();
    }
    // If the pause before was used by an RT thread, the table cannot know which threads waited for it, so all pause.
    now += 4_700_000;
    table.charge(0, 0, 4_800_000, now, |act| acts.push(act));
    table.looked(now, |act| acts.push(act));
    assert_eq!(acts, [Action::Demote(0), Action::Demote(1)]);
}

#[test]
fn a_pause_lets_an_interrupt_be_taken_and_gets_longer_by_it() {
    let share = Share::NINETY_FIVE;
    let mut table = Table::new(2, 1, share, 3 * MS, 0);
    table.watch(0, Watched { boosted: true, ..watched(share, Rank::Guest) }, 0);
    let mut acts = Vec::new();
    let mut now = 2_850_000;
    assert!(!table.pauses_boosted());
    table.charge(0, 0, now, now, |act| acts.push(act));
    assert!(table.pauses_boosted());
    let until = table.next_expiry().unwrap();
    assert_eq!((acts.pop(), until), (Some(Action::Demote(0)), 3 * MS));
    now += 10_000;
    table.interrupt(0, false, now, |act| acts.push(act));
    assert_eq!(acts.pop(), Some(Action::Raise(0)));
    assert!(!table.paused(0));
    // After it has taken the interrupt, it goes on computing.
    assert_eq!(table.next_check(), Some(now + GRANT));
    now += GRANT;
    assert_eq!(table.due(now), Some(0));
    table.charge(0, 0, GRANT, now, |act| acts.push(act));
    table.checked(0, GRANT, now, || false);
    assert_eq!(acts.pop(), Some(Action::Demote(0)));
    let longer = table.next_expiry().unwrap() - until;
    assert_eq!(longer, share.stretch(GRANT), "and the others lose nothing");
    // Three interrupts are taken in a pause; the fourth waits until the pause ends.
    for _ in 0..2 {
        table.interrupt(0, false, now, |act| acts.push(act));
        assert_eq!(acts.pop(), Some(Action::Raise(0)));
        now += GRANT;
        table.charge(0, 0, GRANT, now, |act| acts.push(act));
        assert_eq!(acts.pop(), Some(Action::Demote(0)));
    }
    table.interrupt(0, false, now, |act| acts.push(act));
    assert!(acts.is_empty() && table.paused(0));
    table.expire(table.next_expiry().unwrap(), |act| acts.push(act));
    assert!(acts == [Action::Promote(0)] && !table.pauses_boosted());
}

#[test]
fn who_is_about_to_take_an_interrupt_is_paused_once_it_has() {
    let mut table = Table::new(2, 1, Share::NINETY_FIVE, 3 * MS, 0);
    table.watch(0, Watched { boosted: true, ..watched(Share::NINETY_FIVE, Rank::Guest) }, 0);
    let mut acts = Vec::new();
    table.charge(0, 0, 2_650_000, 2_650_000, |act| acts.push(act));
    table.interrupt(0, false, 2_650_000, |act| acts.push(act));
    assert_eq!(acts, [Action::Raise(0)]);
    table.charge(0, 0, 40_000, 2_690_000, |act| acts.push(act));
    assert!(
        acts.len() == 1 && table.next_expiry().is_some() && !table.paused(0),
        "over its cap, and not off: {acts:?}"
    );
    table.charge(0, 0, 60_000, 2_750_000, |act| acts.push(act));
    assert_eq!(acts.last(), Some(&Action::Demote(0)));
    assert!(table.paused(0));
}

#[test]
fn a_guest_that_computes_does_not_stop_what_moves_packets() {
    let mut table = Table::new(4, 1, Share::new(0.9).unwrap(), 3 * MS, 0);
    table.watch(0, watched(Share::new(0.99).unwrap(), Rank::Guest), 0);
    table.watch(1, watched(Share::new(0.99).unwrap(), Rank::Backend), 0);
    let mut acts = Vec::new();
    table.charge(0, 0, 2_500_000, 2_800_000, |act| acts.push(act));
    table.charge(1, 0, 250_000, 2_800_000, |act| acts.push(act));
    table.looked(2_800_000, |act| acts.push(act));
    assert_eq!(acts, [Action::Demote(0)]);
    // If the packet threads take most of the CPU, they pause too.
    let at = table.next_expiry().unwrap();
    table.expire(at, |_| ());
    acts.clear();
    let now = at + 2_800_000;
    table.charge(0, 0, 250_000, now, |act| acts.push(act));
    table.charge(1, 0, 2_500_000, now, |act| acts.push(act));
    table.looked(now, |act| acts.push(act));
    assert_eq!(acts, [Action::Demote(0), Action::Demote(1)]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// vCPUs of one level that all compute, under a storm of interrupts, beside a thread that moves packets: other
    /// threads get the CPU's rest, each vCPU is held to its cap, and only a vCPU with an interrupt is ahead.
    #[test]
    fn interrupts_cost_the_rest_nothing(
        caps in prop::collection::vec(10u32..=99, 1..5),
        every in 1u64..60,
        backend in 0u64..40,
    ) {
        let (cpu_share, period, step) = (Share::new(0.9).unwrap(), 3 * MS, 10_000);
        let count = caps.len();
        let mut table = Table::new(count + 1, 1, cpu_share, period, 0);
        let shares: Vec<Share> = caps.iter().map(|cap| Share::new(f64::from(*cap) / 100.0).unwrap()).collect();
        for (slot, share) in shares.iter().enumerate() {
            table.watch(slot, Watched { boosted: true, ..watched(*share, Rank::Guest) }, 0);
        }
        table.watch(count, watched(Share::NINETY_FIVE, Rank::Backend), 0);
        let (mut since, mut total) = (vec![0u64; count + 1], vec![0u64; count + 1]);
        let (mut rest, mut now, mut turn) = (0u64, 0u64, 0u64);
        let length = 300 * MS;
        while now < length {
            now += step;
            turn += 1;
            // The packet thread has work in this many of 100 steps.
            let moves = turn % 100 < backend && !table.paused(count);
            let ahead = (0..count).find(|slot| table.ahead(*slot) && !table.paused(*slot));
            let who = if moves { Some(count) } else { ahead.or((0..count).find(|slot| !table.paused(*slot))) };
            match who {
                Some(slot) => {
                    since[slot] += step;
                    total[slot] += step;
                }
                None => rest += step,
            }
            if turn % every == 0 {
                let slot = usize::try_from(turn / every).unwrap() % count;
                if !table.ahead(slot) && !table.paused(slot) {
                    table.charge(slot, 0, std::mem::take(&mut since[slot]), now, |_| ());
                }
                table.interrupt(slot, who == Some(slot), now, |_| ());
            }
            for _ in 0..count {
                let Some(slot) = table.due(now) else { break };
                let ran = std::mem::take(&mut since[slot]);
                table.charge(slot, 0, ran, now, |_| ());
                table.checked(slot, ran, now, || false);
            }
            if table.next_look().is_some_and(|at| at <= now) {
                for (slot, since) in since.iter_mut().enumerate() {
                    if !table.paused(slot) {
                        table.charge(slot, 0, std::mem::take(since), now, |_| ());
                    }
                }
                table.looked(now, |_| ());
            }
            table.expire(now, |_| ());
        }
        // The caps may leave more. The CPU's share leaves a tenth, less the delay of the first looks and the last pause
        // if it is not over.
        let late = 4 * period;
        prop_assert!((rest + late) * 10 >= now, "the rest had {rest} of {now}");
        for (slot, share) in shares.iter().enumerate() {
            prop_assert!(total[slot] <= share.of(now) + late, "slot {slot}: {} of {now}", total[slot]);
        }
    }
}

#[test]
fn a_pause_that_is_not_worth_its_cost_is_put_off_not_dropped() {
    let mut table = Table::new(4, 1, Share::new(1.0).unwrap(), 3 * MS, 0);
    let share = Share::NINETY_FIVE;
    table.watch(0, watched(share, Rank::Guest), 0);
    let mut acts = Vec::new();
    // Read late: 50 of the 150 us of the pause are left.
    table.charge(0, 0, 2_850_000, 2_950_000, |act| acts.push(act));
    assert!(acts.is_empty() && table.next_expiry().is_none());
    // It goes on and is read in time. The interval began at 3 ms, with 50 us used before that.
    table.charge(0, 0, 2_850_000, 5_800_000, |act| acts.push(act));
    assert_eq!((acts.pop(), table.next_expiry()), (Some(Action::Demote(0)), Some(6 * MS)));
}
