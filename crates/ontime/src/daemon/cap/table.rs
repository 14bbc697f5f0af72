//! The accounts of all watched threads and of their CPUs: which thread pauses until when, and when to look next.
//!
//! Pure: readings come in ([`Table::charge`]), [`Action`]s go out. Each reading is charged to the account of the
//! thread, with its tenant's cap; to that of the CPU, because two threads at 95 % each on one CPU would leave nothing
//! to other threads; and to that of the reservation by which the thread has its place, because all threads of a pod
//! together may take no more than was reserved for it.

use super::account::{Account, Share, Verdict};
use super::boost::{Boost, Move, OUT};

/// The index of a watched thread.
pub(crate) type SlotIndex = usize;

/// What the watcher has to do with a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Pause it: SCHED_IDLE.
    Demote(SlotIndex),
    /// Give it its place back.
    Promote(SlotIndex),
    /// Put it ahead of its level, also from a pause.
    Raise(SlotIndex),
    /// Move it behind the other vCPUs that are ahead.
    Again(SlotIndex),
    /// Move it from ahead to its place, behind the threads that wait there.
    Lower(SlotIndex),
}

impl Action {
    /// The thread whose policy changes.
    pub(crate) fn slot(self) -> SlotIndex {
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

/// Which threads of a CPU pause first when the CPU's share is used up ([`Table::looked`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rank {
    /// Polling NAPI, or vhost that sends for bulk tenants. It has the lowest RT priority, so it takes what other
    /// threads leave: it is paused first, and alone.
    Poller,
    /// A tenant's program: a vCPU, or a thread of a container. It may begin to spin at any time.
    Guest,
    /// A thread of a VMM that works for the VM's vCPUs.
    Monitor,
    /// Moves packets and interrupts for all tenants of its kind.
    Backend,
    /// Reports interrupts to the watcher. It pauses for its own cap only, because its CPU time is a cost of the
    /// watcher.
    Teller,
}

/// A thread to watch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Watched {
    pub share: Share,
    /// The CPU that it was last seen on.
    pub cpu: u32,
    /// Decides which threads pause first.
    pub rank: Rank,
    /// Whether it is put ahead while an interrupt is pending for it.
    pub boosted: bool,
    /// The account that it shares with other threads.
    pub pool: Option<Pool>,
}

/// An account that threads share, wherever they run: what they may take together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pool {
    /// Its number: below the table's capacity.
    pub number: usize,
    /// The same for all its threads.
    pub share: Share,
}

/// One watched thread.
#[derive(Debug, Clone, Copy)]
struct ThreadState {
    account: Account,
    /// The CPU it was last seen on.
    cpu: u32,
    /// Paused until this instant, ns.
    until: Option<u64>,
    rank: Rank,
    /// Whether it ran since the last reading.
    ran: bool,
    /// The thread's own account is over, so its next interval starts at the end of the pause. A pause for the sake of
    /// its CPU does not clear its own account.
    overdrawn: bool,
    /// Decides when it is ahead. None: never.
    boost: Option<Boost>,
    /// It is paused, but runs ahead for the moment, because an interrupt is pending.
    out: bool,
    /// How much longer it may run so in this pause, ns.
    out_left: u64,
    /// The last interval of its CPU's account in which the thread ran.
    took: u64,
    /// The number of its pool, and the last interval of that account in which the thread ran.
    pool: Option<(usize, u64)>,
}

/// A CPU's account. `taken` is the CPU time, ns, that the readings in progress found. It is judged once, after all
/// readings: each reading covers the time since the last one, so a verdict between two readings could end the interval,
/// and the next thread's time would be charged to the wrong interval.
#[derive(Debug, Clone, Copy)]
struct Cpu {
    account: Account,
    taken: u64,
    /// CPU time in the account's present interval, ns, and the part of it that tenants' programs took.
    since: u64,
    by_guests: u64,
    /// The number of the account's present interval.
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

/// What the threads of a pool have taken. Like a CPU it is judged once, after all readings.
#[derive(Debug, Clone, Copy)]
struct PoolState {
    account: Account,
    taken: u64,
    /// The number of the account's present interval.
    interval: u64,
    /// How many threads it has.
    threads: u64,
}

/// The watched threads of a host and its CPUs.
#[derive(Debug)]
pub(crate) struct Table {
    /// As long as the highest slot used so far; never longer than `capacity`.
    slots: Vec<Option<ThreadState>>,
    capacity: usize,
    cpus: Vec<Cpu>,
    /// As long as the highest number used so far; never longer than `capacity`.
    pools: Vec<Option<PoolState>>,
    period: u64,
    /// When the threads or their processes were last looked at, ns.
    looked: u64,
    /// When all threads were last read, ns.
    read: u64,
    /// The largest single reading since then, ns.
    most: u64,
    /// How many budgets to wait until the next look, 1 to [`Table::calmest`]. `spun`: how long a thread may have been
    /// spinning already at the last look, ns.
    calm: u64,
    spun: u64,
    /// What the last look cost the watcher, ns.
    cost: u64,
}

impl Table {
    /// A table for at most `capacity` threads on `cpus` CPUs. It does not allocate after this.
    pub(crate) fn new(capacity: usize, cpus: usize, cpu_share: Share, period: u64, now: u64) -> Self {
        Self {
            slots: Vec::with_capacity(capacity),
            capacity,
            cpus: vec![Cpu::new(Account::new(cpu_share, period, now)); cpus],
            pools: Vec::with_capacity(capacity),
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
    pub(crate) fn watch(&mut self, slot: SlotIndex, watched: Watched, now: u64) {
        grow(&mut self.slots, slot, self.capacity);
        if let Some(entry) = self.slots.get_mut(slot) {
            *entry = Some(ThreadState {
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
                pool: watched.pool.map(|pool| (pool.number, 0)),
            });
        }
        if let Some(Pool { number, share }) = watched.pool {
            grow(&mut self.pools, number, self.capacity);
            if let Some(pool) = self.pools.get_mut(number) {
                let account = Account::new(share, self.period, now);
                pool.get_or_insert(PoolState { account, taken: 0, interval: 1, threads: 0 }).threads += 1;
            }
        }
        self.calm = self.calm.min(self.calmest());
    }

    /// Forgets the thread in this slot. Returns whether the thread is paused or ahead, so that it must be given its
    /// place back.
    pub(crate) fn forget(&mut self, slot: SlotIndex) -> bool {
        let gone = self.slots.get_mut(slot).and_then(Option::take);
        if let Some(pool) = gone.and_then(|slot| self.pools.get_mut(slot.pool?.0)) {
            *pool = pool.filter(|pool| pool.threads > 1).map(|pool| PoolState { threads: pool.threads - 1, ..pool });
        }
        gone.is_some_and(|slot| slot.until.is_some() || slot.boost.is_some_and(|boost| boost.is_ahead()))
    }

    /// Whether the thread in this slot is paused and not let out for an interrupt.
    pub(crate) fn paused(&self, slot: SlotIndex) -> bool {
        self.get(slot).is_some_and(ThreadState::is_off)
    }

    /// Until when the thread in this slot is paused, ns.
    pub(crate) fn paused_until(&self, slot: SlotIndex) -> Option<u64> {
        self.get(slot).filter(|slot| slot.is_off())?.until
    }

    /// Whether the thread in this slot is ahead of its level.
    pub(crate) fn ahead(&self, slot: SlotIndex) -> bool {
        self.get(slot).and_then(|slot| slot.boost).is_some_and(|boost| boost.is_ahead())
    }

    /// An interrupt is pending for the vCPU in this slot. `own`: the vCPU raised it itself, so it runs and takes the
    /// interrupt. Otherwise the caller has read and charged the vCPU before.
    pub(crate) fn interrupt(&mut self, index: SlotIndex, own: bool, now: u64, mut act: impl FnMut(Action)) {
        let Some(slot) = self.slots.get_mut(index).and_then(Option::as_mut) else { return };
        let off = slot.is_off();
        let Some(boost) = slot.boost.as_mut().filter(|_| !off || (slot.out_left > 0 && !own)) else { return };
        if let Some(change) = boost.interrupt(own, now) {
            slot.out = off;
            act(Action::of(index, change));
        }
    }

    /// The first vCPU that is ahead and due for a check. The caller reads it, charges it, and calls [`Self::checked`].
    pub(crate) fn due(&self, now: u64) -> Option<SlotIndex> {
        let due = |slot: &ThreadState| slot.check().is_some_and(|at| at <= now);
        self.slots.iter().position(|slot| slot.as_ref().is_some_and(due))
    }

    /// The vCPU was checked and had taken `ran` ns. `asleep` is called only if that is 0.
    pub(crate) fn checked(&mut self, index: SlotIndex, ran: u64, now: u64, asleep: impl FnOnce() -> bool) {
        if let Some(boost) = self.slots.get_mut(index).and_then(Option::as_mut).and_then(|slot| slot.boost.as_mut()) {
            boost.checked(ran, now, asleep);
        }
    }

    /// When the next check of a vCPU that is ahead is due, ns.
    pub(crate) fn next_check(&self) -> Option<u64> {
        self.slots.iter().flatten().filter_map(ThreadState::check).min()
    }

    /// The CPU on which the thread in this slot was last seen.
    pub(crate) fn cpu(&self, slot: SlotIndex) -> Option<u32> {
        self.get(slot).map(|slot| slot.cpu)
    }

    /// Charges `ran` ns of RT time to a thread that was seen on `cpu`, and pauses the thread if it is over its own cap.
    /// The accounts of the CPU and of the pool are judged in [`Self::looked`].
    ///
    /// For a thread that is paused already this only counts the time, and may make the pause longer.
    pub(crate) fn charge(&mut self, index: SlotIndex, cpu: u32, ran: u64, now: u64, mut act: impl FnMut(Action)) {
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
        if let Some((number, took)) = &mut slot.pool {
            if let Some(Some(pool)) = self.pools.get_mut(*number) {
                pool.taken = pool.taken.saturating_add(ran);
                *took = if ran > 0 { pool.interval } else { *took };
            }
        }
        if let Some(cpu) = self.cpus.get_mut(cpu as usize) {
            cpu.taken = cpu.taken.saturating_add(ran);
            cpu.by_guests += if rank == Rank::Guest { ran } else { 0 };
            slot.took = if ran > 0 { cpu.interval } else { slot.took };
        }
    }

    /// Records what a look cost the watcher. Looks are at least [`COST_FACTOR`] times that apart.
    pub(crate) fn cost(&mut self, took: u64) {
        self.cost = took;
    }

    /// Charges the CPU time of the watcher and its readers to the CPU on which they ran, because other threads did not
    /// have that time either. Otherwise a thread that is below its share only because the watcher looks so often, or
    /// because of the many interrupts that it causes, would never pause, and the two would take the whole CPU.
    pub(crate) fn spent(&mut self, cpu: u32, took: u64) {
        if let Some(cpu) = self.cpus.get_mut(cpu as usize) {
            cpu.taken = cpu.taken.saturating_add(took);
        }
    }

    /// Judges every CPU. Where the threads of a CPU together took too much, the pollers of that CPU pause alone;
    /// without pollers the tenants' programs pause, if they took at least half of the time; else all threads pause. So
    /// a guest that computes does not delay packets, not even its own.
    ///
    /// A change of policy costs about a tenth of a pause, and a CPU may have many idle tenants. So a thread that took
    /// nothing for [`IDLE_FOR`] intervals is not paused. But a thread that waits for the CPU takes nothing either, and
    /// then has this pause to itself. Its time in the pause counts for the next interval, in which more time is used
    /// than has passed; at the end of that interval all threads pause. So at least every other pause belongs to threads
    /// without RT priority, however many RT threads wait.
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
            // A poller that this reading has just paused for its own cap also took the CPU's share.
            let polling =
                |slot: &ThreadState| slot.cpu == number && slot.rank == Rank::Poller && (!slot.is_off() || slot.ran);
            let highest = if self.slots.iter().flatten().any(polling) {
                Rank::Poller
            } else if by_guests * 2 >= since {
                Rank::Guest
            } else {
                Rank::Backend
            };
            let lowest = if highest == Rank::Poller { Rank::Poller } else { Rank::Guest };
            for (index, slot) in self.slots.iter_mut().enumerate() {
                let pauses = |slot: &&mut ThreadState| {
                    let took = all || interval.saturating_sub(slot.took) <= IDLE_FOR;
                    slot.cpu == number && took && (lowest..=highest).contains(&slot.rank)
                };
                if let Some(slot) = slot.as_mut().filter(pauses) {
                    pause(slot, until, || act(Action::Demote(index)));
                }
            }
        }
    }

    /// Judges every pool. Where its threads together took too much, those that ran in the last [`IDLE_FOR`] intervals
    /// pause, wherever they run. One that waited for a CPU until then runs in the pause of the others; as soon as that
    /// is seen, all threads of the pool pause.
    fn judge_pools(&mut self, now: u64, mut act: impl FnMut(Action)) {
        for (number, pool) in self.pools.iter_mut().enumerate() {
            let Some(pool) = pool else { continue };
            let taken = std::mem::take(&mut pool.taken);
            let all = taken > 0 && pool.account.begins() > now;
            if let Verdict::Over { until } = pool.account.charge(now, taken) {
                pool.account.restart(until);
            } else if !all {
                pool.interval += u64::from(pool.account.is_new());
                continue;
            }
            let until = pool.account.begins();
            let interval = pool.interval;
            pool.interval += 1;
            if until.saturating_sub(now) < LEAST_PAUSE {
                continue;
            }
            let ran = |took| all || interval.saturating_sub(took) <= IDLE_FOR;
            let pauses = |slot: &ThreadState| slot.pool.is_some_and(|(of, took)| of == number && ran(took));
            for (index, slot) in self.slots.iter_mut().enumerate() {
                if let Some(slot) = slot.as_mut().filter(|slot| pauses(slot)) {
                    pause(slot, until, || act(Action::Demote(index)));
                }
            }
        }
    }

    /// Ends every pause that is due.
    pub(crate) fn expire(&mut self, now: u64, mut act: impl FnMut(Action)) {
        for (index, slot) in self.slots.iter_mut().enumerate() {
            if let Some(slot) = slot.as_mut().filter(|slot| slot.until.is_some_and(|until| until <= now)) {
                slot.until = None;
                if std::mem::take(&mut slot.overdrawn) {
                    slot.account.restart(now);
                } else {
                    // A pause for the sake of the CPU also ends the thread's own interval, if its use is within the cap
                    // by now. Otherwise the next look would come soon, for the small rest of a budget that is in fact
                    // full again.
                    let _ = slot.account.charge(now, 0);
                }
                if !std::mem::take(&mut slot.out) {
                    act(Action::Promote(index));
                }
            }
        }
    }

    /// Whether a vCPU is paused that an interrupt may put ahead.
    pub(crate) fn pauses_boosted(&self) -> bool {
        self.slots.iter().flatten().any(|slot| slot.until.is_some() && slot.boost.is_some())
    }

    /// When the next pause ends, ns.
    pub(crate) fn next_expiry(&self) -> Option<u64> {
        self.slots.iter().flatten().filter_map(|slot| slot.until).min()
    }

    /// Whether no thread can be over its cap: all watched processes together took `ran` ns since the last look, which
    /// is no more than half of one CPU, and no more than the smallest cap. Then no thread is read or charged; a thread
    /// that is read later is charged for the whole time since its last reading.
    pub(crate) fn may_rest(&mut self, ran: u64, now: u64) -> bool {
        let recent = now.saturating_sub(self.read) < READ_EVERY;
        let accounts = self.slots.iter().flatten().map(|slot| slot.account);
        let accounts = accounts.chain(self.pools.iter().flatten().map(|pool| pool.account));
        let least = accounts.map(|account| account.share()).min().map_or(Share::HALF, |least| least.min(Share::HALF));
        let rest = recent && ran <= least.of(now.saturating_sub(self.looked));
        if rest {
            (self.calm, self.spun) = ((self.calm * 2).min(self.calmest()), ran);
            self.looked = now;
        }
        rest
    }

    /// Records that every thread was read, or is known to have taken next to nothing. Judges the CPUs, which may pause
    /// threads. If no thread took more than half of the time since the last look, the next interval between looks
    /// doubles, up to [`Self::calmest`] budgets.
    pub(crate) fn looked(&mut self, now: u64, mut act: impl FnMut(Action)) {
        self.judge_cpus(now, &mut act);
        self.judge_pools(now, act);
        for slot in self.slots.iter_mut().flatten() {
            // Also end the old interval of a thread that was not read: old use is no reason for an early look.
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

    /// When to look again, ns. Until then no thread can exceed its cap, except after a calm time: then by as much as
    /// the interval was stretched, which includes what the thread may have taken before the last look. `None` if no
    /// thread is at RT priority.
    pub(crate) fn next_look(&self) -> Option<u64> {
        let running = self.slots.iter().flatten().filter(|slot| !slot.is_off());
        let left = running
            .map(|slot| {
                let own = slot.account.left_after(self.looked);
                let Some(cpu) = self.cpus.get(slot.cpu as usize) else { return own };
                let cpus = cpu.account.left_after(self.looked);
                // A thread whose budget is not below its CPU's budget cannot use it up before the CPU's is used up.
                if slot.account.budget() >= cpu.account.budget() { cpus } else { own.min(cpus) }
            })
            .min()?;
        // The threads of a pool may run on as many CPUs at once.
        let pools = self.pools.iter().flatten().map(|pool| {
            let at_once = pool.threads.min(self.cpus.len() as u64).max(1);
            pool.account.left_after(self.looked) / at_once
        });
        let left = pools.fold(left, u64::min);
        let least = SHORTEST_LOOK.max(self.cost.saturating_mul(COST_FACTOR));
        let left = left.max(least);
        Some(self.looked.saturating_add(left.saturating_mul(self.calm).saturating_sub(self.spun).max(left)))
    }

    /// The most budgets between two looks.
    fn calmest(&self) -> u64 {
        let any = self.slots.iter().flatten().any(|slot| slot.rank == Rank::Guest);
        if any { CALM } else { CALM_BACKENDS }
    }

    fn get(&self, slot: SlotIndex) -> Option<&ThreadState> {
        self.slots.get(slot).and_then(Option::as_ref)
    }
}

/// A shorter pause, ns, is not worth its cost. The excess is carried over to the next interval, whose pause is longer
/// by that.
pub(crate) const LEAST_PAUSE: u64 = 75_000;
/// A thread that took nothing in this many intervals of its CPU or its pool does not pause for their sake.
pub(crate) const IDLE_FOR: u64 = 16;
/// The most budgets between two looks after a calm time. A thread that begins to spin may delay others for that long,
/// plus one budget, because its interval began in the calm time: 9.5 ms at the default period.
pub(crate) const CALM: u64 = 4;
/// The same while no tenant's program is watched (vCPUs with reserved time are not watched). Other threads work on
/// behalf of tenants and have no reason to spin.
pub(crate) const CALM_BACKENDS: u64 = 16;
/// The longest time without reading every thread, ns: reported CPU times may be this old.
pub(crate) const READ_EVERY: u64 = 10_000_000_000;
/// The shortest time between two looks, ns.
pub(crate) const SHORTEST_LOOK: u64 = 250_000;
/// The shortest time between two looks, as a multiple of what a look costs.
pub(crate) const COST_FACTOR: u64 = 10;

impl ThreadState {
    /// Paused, and not let out for an interrupt.
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

/// Makes room for this index, up to `capacity`, which is allocated.
fn grow<Entry>(entries: &mut Vec<Option<Entry>>, index: usize, capacity: usize) {
    while entries.len() <= index && entries.len() < capacity {
        entries.push(None);
    }
}

/// Pauses the thread. If an interrupt is pending for it, it stays ahead until it has taken the interrupt.
fn pause(slot: &mut ThreadState, until: u64, demote: impl FnOnce()) {
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
