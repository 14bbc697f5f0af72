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
    /// Its own account is even only at the end of a pause: the next interval starts there. A pause for its CPU's sake does
    /// not forgive what it used itself.
    overdrawn: bool,
}

/// The watched threads of a host and its CPUs.
#[derive(Debug)]
pub struct Table {
    /// As long as the highest slot ever used; its capacity is the table's.
    slots: Vec<Option<Slot>>,
    capacity: usize,
    cpus: Vec<Account>,
    cpu_share: Share,
    period: u64,
}

impl Table {
    /// A table for at most `capacity` threads on `cpus` CPUs; nothing is allocated after this.
    pub fn new(capacity: usize, cpus: usize, cpu_share: Share, period: u64, now: u64) -> Self {
        Self {
            slots: Vec::with_capacity(capacity),
            capacity,
            cpus: vec![Account::new(cpu_share, period, now); cpus],
            cpu_share,
            period,
        }
    }

    /// Watches a thread in this slot from `now` on.
    pub fn watch(&mut self, slot: SlotIndex, share: Share, cpu: u32, now: u64) {
        while self.slots.len() <= slot && self.slots.len() < self.capacity {
            self.slots.push(None);
        }
        if let Some(entry) = self.slots.get_mut(slot) {
            *entry = Some(Slot { account: Account::new(share, self.period, now), cpu, until: None, overdrawn: false });
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

    /// Whether a reading of this slot belongs with one on `cpu`: it runs at RT priority and was last seen there.
    pub fn shares(&self, slot: SlotIndex, cpu: u32) -> bool {
        self.get(slot).is_some_and(|slot| slot.until.is_none() && slot.cpu == cpu)
    }

    /// Charges `ran` ns of RT time of a thread, seen on `cpu`, and says who has to pause.
    ///
    /// A charge of a paused slot (a reading that was under way) only counts.
    pub fn charge(&mut self, index: SlotIndex, cpu: u32, ran: u64, now: u64, mut act: impl FnMut(Action)) {
        let Some(slot) = self.slots.get_mut(index).and_then(Option::as_mut) else { return };
        slot.cpu = cpu;
        let own = slot.account.charge(now, ran);
        if let Verdict::Over { until } = own {
            slot.overdrawn = true;
            pause(slot, until, || act(Action::Demote(index)));
        }
        let Some(account) = self.cpus.get_mut(cpu as usize) else { return };
        let Verdict::Over { until } = account.charge(now, ran) else { return };
        account.restart(until);
        for (index, slot) in self.slots.iter_mut().enumerate() {
            if let Some(slot) = slot.as_mut().filter(|slot| slot.cpu == cpu) {
                pause(slot, until, || act(Action::Demote(index)));
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

    /// After how much CPU time, ns, a thread should be read: its own budget, or where `crowd` watched threads may run on one
    /// CPU, half its part of the CPU's, so that what all of them have taken unread is at most half of that. Not below
    /// [`MIN_GRAIN`], so that a crowd cannot make the watcher the load.
    pub fn grain(&self, share: Share, crowd: usize) -> u64 {
        let cpu = self.cpu_share.of(self.period);
        let part = if crowd > 1 { cpu / (2 * crowd as u64) } else { cpu };
        share.of(self.period).min(part).max(MIN_GRAIN)
    }

    fn get(&self, slot: SlotIndex) -> Option<&Slot> {
        self.slots.get(slot).and_then(Option::as_ref)
    }
}

/// The finest reading, ns of CPU time.
pub const MIN_GRAIN: u64 = 250_000;

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
            table.watch(slot, whole_but_five, 0, 0);
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
        assert_eq!(acts, [Action::Demote(0), Action::Demote(1)]);
        assert!(!table.paused(2));
    }

    #[test]
    fn unknown_slots_and_cpus_are_ignored() {
        let mut table = table(1);
        let mut acts = Vec::new();
        table.charge(77, 0, 10 * MS, 10 * MS, |a| acts.push(a));
        table.charge(0, 99, 1, 1, |a| acts.push(a));
        table.watch(99, Share::new(0.5).unwrap(), 0, 0);
        assert!(!table.forget(99));
        assert!(acts.is_empty());
    }

    #[test]
    fn the_grain_shrinks_with_the_crowd_and_has_a_floor() {
        let table = table(0);
        let share = Share::new(0.95).unwrap();
        assert_eq!(table.grain(share, 1), 4_750_000);
        assert_eq!(table.grain(share, 2), 1_187_500);
        assert_eq!(table.grain(Share::new(0.2).unwrap(), 2), 1_000_000);
        assert_eq!(table.grain(share, 1000), MIN_GRAIN);
    }

    proptest! {
        /// Threads that all spin on one CPU, the highest in priority first: whatever their number and caps, together they
        /// leave the CPU its rest over any run.
        #[test]
        fn spinners_leave_their_cpu_the_rest(caps in proptest::collection::vec(10u32..=99, 1..6)) {
            let cpu_share = Share::new(0.9).unwrap();
            let period = 5 * MS;
            let mut table = Table::new(caps.len(), 1, cpu_share, period, 0);
            let shares: Vec<Share> = caps.iter().map(|c| Share::new(f64::from(*c) / 100.0).unwrap()).collect();
            for (slot, share) in shares.iter().enumerate() {
                table.watch(slot, *share, 0, 0);
            }
            let step = 50_000;
            let mut since = vec![0u64; caps.len()];
            let mut total = vec![0u64; caps.len()];
            let mut fair = 0;
            let mut fair_gap = 0;
            let mut now = 0;
            while now < 2_000 * MS {
                now += step;
                match (0..caps.len()).find(|slot| !table.paused(*slot)) {
                    None => { fair += step; fair_gap = 0; }
                    Some(slot) => {
                        fair_gap += step;
                        since[slot] += step;
                        total[slot] += step;
                        if since[slot] >= table.grain(shares[slot], caps.len()) {
                            // As the watcher does: who shares the CPU is read too.
                            let peers: Vec<_> = (0..caps.len()).filter(|peer| table.shares(*peer, 0)).collect();
                            for peer in peers {
                                table.charge(peer, 0, std::mem::take(&mut since[peer]), now, |_| ());
                            }
                        }
                    }
                }
                let unread: u64 = shares.iter().map(|share| table.grain(*share, caps.len()) + step).sum();
                let bound = 2 * (cpu_share.of(period) + unread + step);
                prop_assert!(fair_gap <= bound, "{fair_gap} ns without a turn for others");
                table.expire(now, |_| ());
            }
            prop_assert!(fair * 100 >= now * 9, "others got {fair} of {now}");
            for (slot, share) in shares.iter().enumerate() {
                prop_assert!(total[slot] <= share.of(now) + 2 * period, "slot {slot}");
            }
        }
    }
}
