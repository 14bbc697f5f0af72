//! Which threads are watched, what each and each CPU has used, and who must pause until when.
//!
//! Pure: readings come in ([`Table::charge`]), [`Action`]s go out. Two kinds of account are charged: the thread's own,
//! with its tenant's cap, and the CPU's, because two threads at 95 % each on one CPU would leave nothing for anybody
//! else.

use super::account::{Account, Share, Verdict};
use super::boost::{Boost, Move, OUT};

/// A watched thread's place in the table.
pub type SlotIndex = usize;

/// What the I/O side has to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Take this thread off RT priority.
    Demote(SlotIndex),
    /// Give this thread its place back.
    Promote(SlotIndex),
    /// Put it ahead of its level, off a pause too.
    Raise(SlotIndex),
    /// Put it behind the others that are ahead.
    Again(SlotIndex),
    /// From ahead to its place, behind those who wait there.
    Lower(SlotIndex),
}

impl Action {
    /// Whose place changes.
    pub fn slot(self) -> SlotIndex {
        match self {
            Action::Demote(slot)
            | Action::Promote(slot)
            | Action::Raise(slot)
            | Action::Again(slot)
            | Action::Lower(slot) => slot,
        }
    }

    fn of(slot: SlotIndex, change: Move) -> Self {
        match change {
            Move::Raise => Action::Raise(slot),
            Move::Again => Action::Again(slot),
            Move::Lower => Action::Lower(slot),
        }
    }
}

/// Who goes without where a CPU's share is used up: the lowest that alone took enough of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    /// Polls, or sends for bulk tenants, below every other: what its CPU lacks is what it took.
    Poller,
    /// A tenant's program: a vCPU, a container's thread. It may begin to spin at any time.
    Guest,
    /// Works for a VM's vCPUs: a monitor's threads.
    Monitor,
    /// Moves packets and interrupts, all tenants' of its kind.
    Backend,
    /// Tells the watcher of interrupts. It pauses for its own cap only: what it takes is the watcher's cost.
    Teller,
}

/// A thread to watch.
#[derive(Debug, Clone, Copy)]
pub struct Watched {
    /// Its cap.
    pub share: Share,
    /// The CPU that it was last seen on.
    pub cpu: u32,
    /// Who goes without first.
    pub rank: Rank,
    /// Whether it is put ahead while an interrupt is pending.
    pub boosted: bool,
}

/// One watched thread.
#[derive(Debug, Clone, Copy)]
struct Slot {
    account: Account,
    /// The CPU it was last seen on.
    cpu: u32,
    /// Paused until then, ns.
    until: Option<u64>,
    rank: Rank,
    /// It ran since the last reading.
    ran: bool,
    /// Its own account is even only at the end of a pause: the next interval starts there. A pause for its CPU's sake
    /// does not forgive what it used itself.
    overdrawn: bool,
    /// Ahead of its level at times.
    boost: Option<Boost>,
    /// It runs although it is paused, ahead, because an interrupt is pending.
    out: bool,
    /// How much more of this pause it may, ns.
    out_left: u64,
    /// The last interval of its CPU in which it took something.
    took: u64,
}

/// A CPU's account, and what the slots of the reading under way took of it, ns. Judged once a reading: each slot's time
/// is since the last reading, so one that was judged after another's would be charged for an interval that the other
/// had ended.
#[derive(Debug, Clone, Copy)]
struct Cpu {
    account: Account,
    taken: u64,
    /// What was taken in the account's interval, and what of that by tenants' programs.
    since: u64,
    by_guests: u64,
    /// The account's interval, counted.
    interval: u64,
}

impl Cpu {
    fn new(account: Account) -> Self {
        Self { account, taken: 0, since: 0, by_guests: 0, interval: 1 }
    }

    fn next_interval(&mut self) {
        (self.by_guests, self.since) = (0, 0);
        self.interval += 1;
    }
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
    /// Budgets to wait until the next look: 1 to [`Table::calmest`]; and how long somebody may have been spinning
    /// already at the last one, ns.
    calm: u64,
    spun: u64,
    /// What the last look cost the watcher, ns.
    cost: u64,
}

impl Table {
    /// A table for at most `capacity` threads on `cpus` CPUs; nothing is allocated after this.
    pub fn new(capacity: usize, cpus: usize, cpu_share: Share, period: u64, now: u64) -> Self {
        Self {
            slots: Vec::with_capacity(capacity),
            capacity,
            cpus: vec![Cpu::new(Account::new(cpu_share, period, now)); cpus],
            period,
            looked: now,
            read: now,
            most: 0,
            calm: 1,
            spun: 0,
            cost: 0,
        }
    }

    /// Watches a thread in this slot from `now` on.
    pub fn watch(&mut self, slot: SlotIndex, watched: Watched, now: u64) {
        while self.slots.len() <= slot && self.slots.len() < self.capacity {
            self.slots.push(None);
        }
        if let Some(entry) = self.slots.get_mut(slot) {
            *entry = Some(Slot {
                account: Account::new(watched.share, self.period, now),
                cpu: watched.cpu,
                until: None,
                rank: watched.rank,
                ran: false,
                overdrawn: false,
                boost: watched.boosted.then(|| Boost::new(self.period, now)),
                out: false,
                out_left: 0,
                took: 0,
            });
        }
        self.calm = self.calm.min(self.calmest());
    }

    /// Forgets the thread in this slot. Says whether it is anywhere but at its place.
    pub fn forget(&mut self, slot: SlotIndex) -> bool {
        let gone = self.slots.get_mut(slot).and_then(Option::take);
        gone.is_some_and(|slot| slot.until.is_some() || slot.boost.is_some_and(|boost| boost.is_ahead()))
    }

    /// Whether the thread in this slot is off its place, paused.
    pub fn paused(&self, slot: SlotIndex) -> bool {
        self.get(slot).is_some_and(Slot::is_off)
    }

    /// Whether the thread in this slot stands ahead of its level.
    pub fn ahead(&self, slot: SlotIndex) -> bool {
        self.get(slot).and_then(|slot| slot.boost).is_some_and(|boost| boost.is_ahead())
    }

    /// An interrupt is pending for the vCPU in this slot; `own`: it runs, and takes it. It was read before, and
    /// charged.
    pub fn interrupt(&mut self, index: SlotIndex, own: bool, now: u64, mut act: impl FnMut(Action)) {
        let Some(slot) = self.slots.get_mut(index).and_then(Option::as_mut) else { return };
        let off = slot.is_off();
        let Some(boost) = slot.boost.as_mut().filter(|_| !off || (slot.out_left > 0 && !own)) else { return };
        if let Some(change) = boost.interrupt(own, now) {
            slot.out = off;
            act(Action::of(index, change));
        }
    }

    /// The first vCPU that is ahead and due to be looked at: to be read and charged, then [`Self::checked`].
    pub fn due(&self, now: u64) -> Option<SlotIndex> {
        let due = |slot: &Slot| slot.check().is_some_and(|at| at <= now);
        self.slots.iter().position(|slot| slot.as_ref().is_some_and(due))
    }

    /// It was looked at, and had taken `ran` ns; whether it sleeps is asked where it did not run.
    pub fn checked(&mut self, index: SlotIndex, ran: u64, now: u64, asleep: impl FnOnce() -> bool) {
        if let Some(boost) = self.slots.get_mut(index).and_then(Option::as_mut).and_then(|slot| slot.boost.as_mut()) {
            boost.checked(ran, now, asleep);
        }
    }

    /// When the next vCPU that is ahead is to be looked at, ns.
    pub fn next_check(&self) -> Option<u64> {
        self.slots.iter().flatten().filter_map(Slot::check).min()
    }

    /// The CPU the thread in this slot was last seen on.
    pub fn cpu(&self, slot: SlotIndex) -> Option<u32> {
        self.get(slot).map(|slot| slot.cpu)
    }

    /// Charges `ran` ns of RT time of a thread, seen on `cpu`, and says whether it has to pause; what its CPU has to
    /// say comes with [`Self::looked`].
    ///
    /// A charge of a paused slot (a reading that was under way) only counts.
    pub fn charge(&mut self, index: SlotIndex, cpu: u32, ran: u64, now: u64, mut act: impl FnMut(Action)) {
        let Some(slot) = self.slots.get_mut(index).and_then(Option::as_mut) else { return };
        slot.cpu = cpu;
        slot.ran = ran > 0;
        self.most = self.most.max(ran);
        let own = slot.account.charge(now, ran);
        let change = slot.boost.as_mut().and_then(|boost| boost.charge(ran, now));
        let was_out = slot.out;
        match own {
            Verdict::Over { until } if slot.until.is_none() && until.saturating_sub(now) < LEAST_PAUSE => {
                slot.account.restart(until);
            }
            Verdict::Over { until } => {
                slot.overdrawn = true;
                pause(slot, until, || act(Action::Demote(index)));
            }
            Verdict::Within => {}
        }
        if was_out {
            slot.out_left = slot.out_left.saturating_sub(ran);
        }
        match change {
            _ if slot.out && (slot.out_left == 0 || change == Some(Move::Lower)) => {
                slot.go_back_in();
                act(Action::Demote(index));
            }
            Some(change) if !slot.is_off() => act(Action::of(index, change)),
            _ => {}
        }
        let rank = slot.rank;
        if let Some(cpu) = self.cpus.get_mut(cpu as usize) {
            cpu.taken = cpu.taken.saturating_add(ran);
            cpu.by_guests += if rank == Rank::Guest { ran } else { 0 };
            slot.took = if ran > 0 { cpu.interval } else { slot.took };
        }
    }

    /// What a look cost the watcher: the longer, the rarer they are.
    pub fn cost(&mut self, took: u64) {
        self.cost = took;
    }

    /// Charges what the watcher took to the CPU it ran on: nobody else had that time either. Without it a thread that
    /// has less than its share only because it is looked at so often, or asks for so many interrupts, is never paused,
    /// and the two of them take all there is.
    pub fn spent(&mut self, cpu: u32, took: u64) {
        if let Some(cpu) = self.cpus.get_mut(cpu as usize) {
            cpu.taken = cpu.taken.saturating_add(took);
        }
    }

    /// Judges every CPU: where its slots together took too much, who polls there pauses alone; else the tenants'
    /// programs, if they took half of it; else all. So a guest that computes does not keep packets waiting, its own
    /// neither.
    ///
    /// A change of place costs about a tenth of a pause, so who took nothing for [`IDLE_FOR`] intervals is left at its
    /// place: a CPU may have many idle tenants. Who waits for the CPU takes nothing either, and has this pause to
    /// itself then; it counts for the next interval, in which more was used than time went by, and then all pause. So
    /// at least every other pause is the others', beside many that wait too.
    fn judge_cpus(&mut self, now: u64, mut act: impl FnMut(Action)) {
        for (number, cpu) in (0..).zip(&mut self.cpus) {
            cpu.since = cpu.since.saturating_add(cpu.taken);
            let verdict = cpu.account.charge(now, std::mem::take(&mut cpu.taken));
            let Verdict::Over { until } = verdict else {
                if cpu.account.is_new() {
                    cpu.next_interval();
                }
                continue;
            };
            let Cpu { since, by_guests, interval, .. } = *cpu;
            let all = cpu.account.used_before(now) > LEAST_PAUSE / 2;
            cpu.next_interval();
            cpu.account.restart(until);
            if until.saturating_sub(now) < LEAST_PAUSE {
                continue;
            }
            // One that this very reading paused for its own sake is who took the CPU's share, too.
            let polling = |slot: &Slot| slot.cpu == number && slot.rank == Rank::Poller && (!slot.is_off() || slot.ran);
            let highest = if self.slots.iter().flatten().any(polling) {
                Rank::Poller
            } else if by_guests * 2 >= since {
                Rank::Guest
            } else {
                Rank::Backend
            };
            let lowest = if highest == Rank::Poller { Rank::Poller } else { Rank::Guest };
            for (index, slot) in self.slots.iter_mut().enumerate() {
                let pauses = |slot: &&mut Slot| {
                    let took = all || interval.saturating_sub(slot.took) <= IDLE_FOR;
                    slot.cpu == number && took && (lowest..=highest).contains(&slot.rank)
                };
                if let Some(slot) = slot.as_mut().filter(pauses) {
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
                } else {
                    // A pause for its CPU's sake ends its own interval too, where that is even by now: else it would be
                    // looked at soon for the rest of a budget that it has again.
                    let _ = slot.account.charge(now, 0);
                }
                if !std::mem::take(&mut slot.out) {
                    act(Action::Promote(index));
                }
            }
        }
    }

    /// Whether somebody is paused, or let out of a pause, whom an interrupt puts ahead.
    pub fn pauses_boosted(&self) -> bool {
        self.slots.iter().flatten().any(|slot| slot.until.is_some() && slot.boost.is_some())
    }

    /// When the next pause ends, ns.
    pub fn next_expiry(&self) -> Option<u64> {
        self.slots.iter().flatten().filter_map(|slot| slot.until).min()
    }

    /// Whether nobody can be over a cap: all watched processes together took `ran` ns since the last look, no more than
    /// half of one CPU. Nobody is charged then; who is read later is charged for all of the time since.
    pub fn may_rest(&mut self, ran: u64, now: u64) -> bool {
        let recent = now.saturating_sub(self.read) < READ_EVERY;
        let rest = recent && ran <= now.saturating_sub(self.looked) / 2;
        if rest {
            (self.calm, self.spun) = ((self.calm * 2).min(self.calmest()), ran);
            self.looked = now;
        }
        rest
    }

    /// Notes that every slot was read, or is known to have taken next to nothing, and says who has to pause for its
    /// CPU's sake. Where nobody took half of what it might have, the next look can wait twice as long, up to
    /// [`Self::calmest`] budgets.
    pub fn looked(&mut self, now: u64, act: impl FnMut(Action)) {
        self.judge_cpus(now, act);
        for slot in self.slots.iter_mut().flatten() {
            // Who was not read has an interval that may be over, too: what it used long ago is no reason to look soon.
            if !std::mem::take(&mut slot.ran) && slot.until.is_none() {
                let _ = slot.account.charge(now, 0);
            }
        }
        let half = now.saturating_sub(self.looked) / 2;
        self.calm = if self.most > half { 1 } else { (self.calm * 2).min(self.calmest()) };
        self.spun = std::mem::take(&mut self.most);
        self.looked = now;
        self.read = now;
    }

    /// When, ns, to read all slots again: nobody can be over its cap before, except after a calm time, by as much as it
    /// was calm, what it may have taken before the last look included. `None` where nobody is at RT priority.
    pub fn next_look(&self) -> Option<u64> {
        let running = self.slots.iter().flatten().filter(|slot| !slot.is_off());
        let left = running
            .map(|slot| {
                let own = slot.account.left_after(self.looked);
                let Some(cpu) = self.cpus.get(slot.cpu as usize) else { return own };
                let cpus = cpu.account.left_after(self.looked);
                // One that may have as much as its CPU cannot take that without the CPU's share being used up.
                if slot.account.budget() >= cpu.account.budget() { cpus } else { own.min(cpus) }
            })
            .min()?;
        let least = SHORTEST_LOOK.max(self.cost.saturating_mul(COST_FACTOR));
        let left = left.max(least);
        Some(self.looked.saturating_add(left.saturating_mul(self.calm).saturating_sub(self.spun).max(left)))
    }

    /// The most budgets that there may be between two looks now.
    fn calmest(&self) -> u64 {
        let any = self.slots.iter().flatten().any(|slot| slot.rank == Rank::Guest);
        if any { CALM } else { CALM_BACKENDS }
    }

    fn get(&self, slot: SlotIndex) -> Option<&Slot> {
        self.slots.get(slot).and_then(Option::as_ref)
    }
}

/// A pause, ns, that is not worth what it costs: what it should have paid back counts for the next interval, whose
/// pause is the longer.
pub const LEAST_PAUSE: u64 = 75_000;
/// Intervals of its CPU in which a thread took nothing, after which it is not paused for the CPU's sake.
pub const IDLE_FOR: u64 = 16;
/// The most budgets between two looks, after a calm time: one that begins to spin may keep others waiting for so long,
/// and for one budget more, as its interval began in the calm time. At the default period 9.5 ms.
pub const CALM: u64 = 4;
/// The same where no tenant's program is watched (vCPUs with reserved time are not): the others work for somebody, and
/// have nothing to spin for.
pub const CALM_BACKENDS: u64 = 16;
/// The longest time without reading every thread, ns: how old reported CPU times may be.
pub const READ_EVERY: u64 = 10_000_000_000;
/// The least time between two looks, ns.
pub const SHORTEST_LOOK: u64 = 250_000;
/// The least time between two looks, in costs of one.
pub const COST_FACTOR: u64 = 10;

impl Slot {
    /// Paused, and not let out.
    fn is_off(&self) -> bool {
        self.until.is_some() && !self.out
    }

    fn check(&self) -> Option<u64> {
        self.boost.filter(|_| !self.is_off())?.check()
    }

    fn go_back_in(&mut self) {
        self.out = false;
        if let Some(boost) = &mut self.boost {
            boost.end();
        }
    }
}

/// Pauses it; one that is about to take an interrupt stays ahead until it has.
fn pause(slot: &mut Slot, until: u64, demote: impl FnOnce()) {
    if let Some(already) = slot.until {
        slot.until = Some(already.max(until));
        return;
    }
    (slot.until, slot.out_left) = (Some(until), OUT);
    slot.out = slot.boost.is_some_and(|boost| boost.is_pending());
    if !slot.out {
        slot.go_back_in();
        demote();
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
