//! Which threads are watched, what each and each CPU has used, and who must pause until when.
//!
//! Pure: readings come in ([`Table::charge`]), [`Action`]s go out. Two kinds of account are charged: the thread's own, with
//! its tenant's cap, and the CPU's, because two threads at 95 % each on one CPU would leave nothing for anybody else.

use super::account::{Account, Share, Verdict};

/// A watched thread's place in the table.
pub type SlotIndex = usize;

/// What the I/O side has to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Take this thread off RT priority.
    Demote(SlotIndex),
    /// Give this thread its place back.
    Promote(SlotIndex),
}

/// One watched thread.
#[derive(Debug, Clone, Copy)]
struct Slot {
    account: Account,
    /// The CPU it was last seen on.
    cpu: u32,
    /// Paused until then, ns.
    until: Option<u64>,
    /// It polls, below every other: what its CPU lacks is what it took.
    polls: bool,
    /// It ran since the last reading.
    ran: bool,
    /// Its own account is even only at the end of a pause: the next interval starts there. A pause for its CPU's sake does
    /// not forgive what it used itself.
    overdrawn: bool,
}

/// A CPU's account, and what the slots of the reading under way took of it, ns. Judged once a reading: each slot's time is since
/// the last reading, so one that was judged after another's would be charged for an interval that the other had ended.
#[derive(Debug, Clone, Copy)]
struct Cpu {
    account: Account,
    taken: u64,
}

/// The watched threads of a host and its CPUs.
#[derive(Debug)]
pub struct Table {
    /// As long as the highest slot ever used; its capacity is the table's.
    slots: Vec<Option<Slot>>,
    capacity: usize,
    cpus: Vec<Cpu>,
    period: u64,
    /// When all slots, or their processes, were last looked at, ns.
    looked: u64,
    /// When all slots were last read, ns.
    read: u64,
    /// The most that one slot or CPU took since, ns.
    most: u64,
    /// Budgets to wait until the next look: 1 to [`CALM`].
    calm: u64,
    /// What the last look cost the watcher, ns.
    cost: u64,
}

impl Table {
    /// A table for at most `capacity` threads on `cpus` CPUs; nothing is allocated after this.
    pub fn new(capacity: usize, cpus: usize, cpu_share: Share, period: u64, now: u64) -> Self {
        Self {
            slots: Vec::with_capacity(capacity),
            capacity,
            cpus: vec![Cpu { account: Account::new(cpu_share, period, now), taken: 0 }; cpus],
            period,
            looked: now,
            read: now,
            most: 0,
            calm: 1,
            cost: 0,
        }
    }

    /// Watches a thread in this slot from `now` on; `polls`: it takes whatever the others of its CPU leave.
    pub fn watch(&mut self, slot: SlotIndex, share: Share, cpu: u32, polls: bool, now: u64) {
        while self.slots.len() <= slot && self.slots.len() < self.capacity {
            self.slots.push(None);
        }
        if let Some(entry) = self.slots.get_mut(slot) {
            *entry = Some(Slot {
                account: Account::new(share, self.period, now),
                cpu,
                until: None,
                polls,
                ran: false,
                overdrawn: false,
            });
        }
    }

    /// Forgets the thread in this slot. Says whether it was paused.
    pub fn forget(&mut self, slot: SlotIndex) -> bool {
        self.slots.get_mut(slot).and_then(Option::take).is_some_and(|slot| slot.until.is_some())
    }

    /// Whether the thread in this slot is paused.
    pub fn paused(&self, slot: SlotIndex) -> bool {
        self.get(slot).is_some_and(|slot| slot.until.is_some())
    }

    /// The CPU the thread in this slot was last seen on.
    pub fn cpu(&self, slot: SlotIndex) -> Option<u32> {
        self.get(slot).map(|slot| slot.cpu)
    }

    /// Charges `ran` ns of RT time of a thread, seen on `cpu`, and says whether it has to pause; what its CPU has to say comes with
    /// [`Self::looked`].
    ///
    /// A charge of a paused slot (a reading that was under way) only counts.
    pub fn charge(&mut self, index: SlotIndex, cpu: u32, ran: u64, now: u64, mut act: impl FnMut(Action)) {
        let Some(slot) = self.slots.get_mut(index).and_then(Option::as_mut) else { return };
        slot.cpu = cpu;
        slot.ran = ran > 0;
        self.most = self.most.max(ran);
        let own = slot.account.charge(now, ran);
        if let Verdict::Over { until } = own {
            slot.overdrawn = true;
            pause(slot, until, || act(Action::Demote(index)));
        }
        if let Some(cpu) = self.cpus.get_mut(cpu as usize) {
            cpu.taken = cpu.taken.saturating_add(ran);
        }
    }

    /// Charges what a look cost the watcher to the CPU it ran on: nobody else had that time either. Without it a thread that has less
    /// than its share only because it is looked at so often is never paused, and the two of them take all there is.
    pub fn cost(&mut self, cpu: u32, took: u64) {
        self.cost = took;
        if let Some(cpu) = self.cpus.get_mut(cpu as usize) {
            cpu.taken = cpu.taken.saturating_add(took);
        }
    }

    /// Judges every CPU: where its slots together took too much, all of them pause, or who polls there alone.
    fn judge_cpus(&mut self, now: u64, mut act: impl FnMut(Action)) {
        for (number, cpu) in (0..).zip(&mut self.cpus) {
            let Verdict::Over { until } = cpu.account.charge(now, std::mem::take(&mut cpu.taken)) else { continue };
            cpu.account.restart(until);
            // One that this very reading paused for its own sake is who took the CPU's share, too.
            let polling = |slot: &Slot| slot.cpu == number && slot.polls && (slot.until.is_none() || slot.ran);
            let polls = self.slots.iter().flatten().any(polling);
            for (index, slot) in self.slots.iter_mut().enumerate() {
                if let Some(slot) = slot.as_mut().filter(|slot| slot.cpu == number && slot.polls == polls) {
                    pause(slot, until, || act(Action::Demote(index)));
                }
            }
        }
    }

    /// Ends every pause that is due.
    pub fn expire(&mut self, now: u64, mut act: impl FnMut(Action)) {
        for (index, slot) in self.slots.iter_mut().enumerate() {
            if let Some(slot) = slot.as_mut().filter(|slot| slot.until.is_some_and(|until| until <= now)) {
                slot.until = None;
                if std::mem::take(&mut slot.overdrawn) {
                    slot.account.restart(now);
                }
                act(Action::Promote(index));
            }
        }
    }

    /// When the next pause ends, ns.
    pub fn next_expiry(&self) -> Option<u64> {
        self.slots.iter().flatten().filter_map(|slot| slot.until).min()
    }

    /// Whether nobody can be over a cap: all watched processes together took `ran` ns since the last look, no more than half of
    /// one CPU. Nobody is charged then; who is read later is charged for all of the time since.
    pub fn may_rest(&mut self, ran: u64, now: u64) -> bool {
        let recent = now.saturating_sub(self.read) < READ_EVERY;
        let rest = recent && ran <= now.saturating_sub(self.looked) / 2;
        if rest {
            self.calm = (self.calm * 2).min(CALM);
            self.looked = now;
        }
        rest
    }

    /// Notes that every slot was read, and says who has to pause for its CPU's sake. Where nobody took half of what it might have,
    /// the next look can wait twice as long, up to [`CALM`] budgets.
    pub fn looked(&mut self, now: u64, act: impl FnMut(Action)) {
        self.judge_cpus(now, act);
        self.slots.iter_mut().flatten().for_each(|slot| slot.ran = false);
        let half = now.saturating_sub(self.looked) / 2;
        self.calm = if self.most > half { 1 } else { (self.calm * 2).min(CALM) };
        self.most = 0;
        self.looked = now;
        self.read = now;
    }

    /// When, ns, to read all slots again: nobody can be over its cap before, except after a calm time, by as much as it was
    /// calm. `None` where nobody is at RT priority.
    pub fn next_look(&self) -> Option<u64> {
        let running = self.slots.iter().flatten().filter(|slot| slot.until.is_none());
        let left = running
            .map(|slot| {
                let cpu = self.cpus.get(slot.cpu as usize).map_or(u64::MAX, |cpu| cpu.account.left());
                slot.account.left().min(cpu)
            })
            .min()?;
        let least = SHORTEST_LOOK.max(self.cost.saturating_mul(COST_FACTOR));
        Some(self.looked.saturating_add(left.max(least).saturating_mul(self.calm)))
    }

    fn get(&self, slot: SlotIndex) -> Option<&Slot> {
        self.slots.get(slot).and_then(Option::as_ref)
    }
}

/// The most budgets between two looks, after a calm time.
pub const CALM: u64 = 16;
/// The longest time without reading every thread, ns: how old reported CPU times may be.
pub const READ_EVERY: u64 = 10_000_000_000;
/// The least time between two looks, ns.
pub const SHORTEST_LOOK: u64 = 250_000;
/// The least time between two looks, in costs of one.
pub const COST_FACTOR: u64 = 10;

fn pause(slot: &mut Slot, until: u64, demote: impl FnOnce()) {
    match slot.until {
        Some(already) => slot.until = Some(already.max(until)),
        None => {
            slot.until = Some(until);
            demote();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;

    fn table(threads: usize) -> Table {
        let whole_but_five = Share::new(0.95).unwrap();
        let mut table = Table::new(8, 2, whole_but_five, 5 * MS, 0);
        for slot in 0..threads {
            table.watch(slot, whole_but_five, 0, false, 0);
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
        table.charge(2, 1, 1000, 1000, |_| ()); // lives on CPU 1
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
        // A tenth of a CPU each for ten seconds, then read one after the other.
        let now = 10_000 * MS;
        for slot in 0..4 {
            table.charge(slot, 0, 1_000 * MS, now + slot as u64, |a| acts.push(a));
        }
        table.looked(now + 4, |a| acts.push(a));
        assert!(acts.is_empty(), "{acts:?}");
        // Nearly all of it together is too much.
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
        // A spinner that has six tenths of its CPU, because looking takes the rest.
        for _ in 0..100 {
            now += MS / 2;
            table.charge(0, 0, 3 * MS / 10, now, |a| acts.push(a));
            table.cost(0, 2 * MS / 10);
            table.looked(now, |a| acts.push(a));
            paused += acts.drain(..).filter(|act| *act == Action::Demote(0)).count();
            now = table.next_expiry().unwrap_or(now);
            table.expire(now, |_| ());
        }
        assert!(paused >= 8, "paused {paused} times in {} ms", now / MS);
        // And it is not looked at all the time.
        let next = table.next_look().unwrap();
        assert!(next - now >= 10 * 2 * MS / 10, "the next look comes after {} ns", next - now);
    }

    #[test]
    fn who_polls_pauses_alone() {
        let mut table = table(1);
        table.watch(1, Share::NINETY_FIVE, 0, true, 0);
        let mut acts = Vec::new();
        let charge = |table: &mut Table, of: [u64; 2], now, acts: &mut Vec<Action>| {
            for (slot, ran) in of.into_iter().enumerate() {
                table.charge(slot, 0, ran, now, |a| acts.push(a));
            }
            table.looked(now, |a| acts.push(a));
        };
        charge(&mut table, [2 * MS, 2_800_000], 4_800_000, &mut acts);
        assert_eq!(acts, [Action::Demote(1)]);
        // With nobody polling any more, it was the others.
        charge(&mut table, [9 * MS, 0], 11 * MS, &mut acts);
        assert_eq!(acts, [Action::Demote(1), Action::Demote(0)]);
    }

    #[test]
    fn who_polls_pauses_alone_when_it_is_over_its_own_cap_too() {
        let mut table = table(1);
        table.watch(1, Share::NINETY_FIVE, 0, true, 0);
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
        table.watch(99, Share::new(0.5).unwrap(), 0, false, 0);
        assert!(!table.forget(99));
        assert!(acts.is_empty());
    }

    #[test]
    fn a_calm_table_is_looked_at_seldom_and_a_busy_one_before_its_budget_is_used() {
        let mut table = table(1);
        let budget = 4_750_000;
        assert_eq!(table.next_look(), Some(budget));
        let mut now = 0;
        for calm in [2, 4, 8, 16, 16] {
            now = table.next_look().unwrap();
            table.charge(0, 0, 1000, now, |_| ());
            table.looked(now, |_| ());
            assert_eq!(table.calm, calm);
        }
        assert!(table.next_look().unwrap() - now > 15 * (budget - 20_000));
        table.charge(0, 0, 3 * MS, now + 5 * MS, |_| ());
        table.looked(now + 5 * MS, |_| ());
        assert!(table.next_look().unwrap() <= now + 5 * MS + budget);
        // A paused thread is not looked at.
        table.charge(0, 0, 50 * MS, now + 6 * MS, |_| ());
        assert!(table.paused(0));
        assert_eq!(table.next_look(), None);
    }

    proptest! {
        /// Threads that all spin on one CPU, the highest in priority first: whatever their number and caps, together they
        /// leave the CPU its rest over any run, and after a calm time as after a busy one.
        #[test]
        fn spinners_leave_their_cpu_the_rest(
            caps in proptest::collection::vec(10u32..=99, 1..6),
            calm in 0u64..200,
        ) {
            let cpu_share = Share::new(0.9).unwrap();
            let period = 5 * MS;
            let mut table = Table::new(caps.len(), 1, cpu_share, period, 0);
            let shares: Vec<Share> = caps.iter().map(|c| Share::new(f64::from(*c) / 100.0).unwrap()).collect();
            for (slot, share) in shares.iter().enumerate() {
                table.watch(slot, *share, 0, false, 0);
            }
            let step = 50_000;
            let mut since = vec![0u64; caps.len()];
            let mut total = vec![0u64; caps.len()];
            let (mut fair, mut fair_gap) = (0, 0);
            let mut seen: u64 = 0;
            let mut now = 0;
            let begin = calm * MS;
            while now < begin + 2_000 * MS {
                now += step;
                match (0..caps.len()).find(|slot| now > begin && !table.paused(*slot)) {
                    None => { fair += step; fair_gap = 0; }
                    Some(slot) => {
                        fair_gap += step;
                        since[slot] += step;
                        total[slot] += step;
                    }
                }
                let look = table.next_look().is_some_and(|at| at <= now);
                if look && !table.may_rest(total.iter().sum::<u64>() - seen, now) {
                    for (slot, since) in since.iter_mut().enumerate() {
                        table.charge(slot, 0, std::mem::take(since), now, |_| ());
                    }
                    table.looked(now, |_| ());
                }
                if look {
                    seen = total.iter().sum();
                }
                // It may begin right after a calm look, and have taken less than half at the next.
                let bound = (CALM + CALM / 2 + 2) * (cpu_share.of(period) + 2 * step);
                prop_assert!(fair_gap <= bound, "{fair_gap} ns without a turn for others");
                table.expire(now, |_| ());
            }
            let ran = now - begin;
            prop_assert!((fair - begin) * 100 >= ran * 9, "others got {} of {ran}", fair - begin);
            for (slot, share) in shares.iter().enumerate() {
                prop_assert!(total[slot] <= share.of(ran) + (CALM + CALM / 2 + 2) * period, "slot {slot}");
            }
        }
    }
}
