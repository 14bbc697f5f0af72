//! Plan by slices: at which place each vCPU runs, and until when. Pure: readings and the clock come in, changes of
//! place go out.
//!
//! Time is cut into slices of 250 us to 100 ms. A slice ends at the next deadline of any vCPU: the deadline that its
//! guest publishes, or else the end of its period. At the start of a slice the planner (DP-WRAP) gives every vCPU its
//! share of the slice as one or two segments. Then a vCPU is at
//!
//! | place | while |
//! |---|---|
//! | [`Place::Planned`] | it is in a segment and has time of its share left |
//! | [`Place::Entitled`] | it is in no segment and has time left: it runs behind the planned vCPUs and ahead of bulk |
//! | [`Place::Beyond`] | its share of the slice is used up |
//!
//! Use is *measured*, at every change of place and whenever a share may have been used up. Time that a planned vCPU
//! does not use goes to the entitled vCPUs. Time that no vCPU of a slice used goes to a pool, which is lent in later
//! slices, while no vCPU with time of its own needs the CPU: to the vCPU with the earliest deadline among those that
//! have used up their share, in pieces of [`POOL_PIECE_MIN`]. Bulk has the rest. So while others need the CPU, a vCPU
//! that never idles has no more than its share. A check takes time itself. The next check of
//! a vCPU comes only after it could have run for what it has left; a vCPU that waits for its segment is checked so
//! seldom that such checks take at most a fifth of the CPU. Overuse (a check comes some microseconds late) is taken off
//! the next share; unused time is taken back. In which order vCPUs use their shares within a slice does not matter: no
//! deadline is before the slice's end.
//!
//! **Sleeping vCPUs.** A vCPU that did not run in a slice, and had time left, is only entitled in the next slice, and
//! is checked at its end: this costs one reading a slice. If the vCPU wakes and spins, planned vCPUs are not delayed.
//! Entitled ones wait for it until that check, and it pays back the time. A vCPU whose guest publishes deadlines may
//! not be delayed so. If one of its tasks ran lately, it is planned like a vCPU that is awake, because its tasks are
//! released when slices begin. Otherwise it is at [`Place::Planned`] for the whole slice, and is checked as often as
//! its share could be used up. While it slept, the others ran ahead of their plan, so there is room for its share
//! whenever it wakes (on one CPU; on several CPUs it may delay a vCPU that is planned elsewhere, at most for its
//! share).
//!
//! **Missing time.** A check that comes late, or a vCPU that wakes late in the slice with its whole share, may keep
//! another vCPU from its share until the slice ends. If that vCPU still waits then, it keeps the time that it is
//! missing, at most a budget, and is planned ahead of its segment in the next slice until it has had that time. After
//! its own deadline it may wait only because a job was released then: it keeps its share of the time since.
//!
//! **Prompt vCPUs.** A vCPU whose period is at most [`PROMPT`] and whose guest publishes no deadlines answers requests:
//! it needs the CPU soon, and seldom. With one CPU for reservations the order within a slice is free. So while the vCPU
//! has at least half of a budget left, it is at [`Place::Planned`] for the whole slice and all others are at
//! [`Place::Entitled`]. Its period ends no slice: sixteen slices in the time of a video frame would cost more than the
//! vCPU itself needs. It keeps unused time up to one budget: a slice of 250 us has half of a budget of 500 us, and a
//! request must not wait for the next slice. So once it may have one budget more than its share of a slice, and the
//! others have that much less of this slice. With less than half of a budget left, it is treated as the others are.
//!
//! **Calm.** If no guest has live deadlines and no vCPU used an eighth of its share, no plan is needed. All vCPUs are
//! at [`Place::Planned`], with one check in each shortest period. If no vCPU ran at all, the time between checks
//! doubles, up to [`CALM_MAX`]. The price: a vCPU that begins to spin in a calm time delays all others until the next
//! check, once.
//!
//! Units: ns of CLOCK_MONOTONIC. Nothing is allocated after [`Slices::new`], and a step reads only vCPUs for which
//! something is due.

use std::sync::Arc;

use ontime_plan::dpwrap::SLICE_MIN;
use ontime_plan::{Demand, Nanos, Planner, VcpuId};
use ontime_tenants::ThreadId;

use crate::admit::Reservations;
use crate::model::{NEVER, PROMPT, Place, Segment, Snapshot, Tally, Threads};
use crate::policy::account::{Account, CALM_MAX, POOL_PIECE_MIN, UNUSED_MAX, signed};

/// A vCPU that is entitled and did not run is waiting. It is checked at intervals of at least this many times the
/// duration of a check.
const COST_FACTOR: u64 = 4;
/// A segment of the present plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Interval {
    cpu: usize,
    start: u64,
    end: u64,
}

/// How a vCPU is served in a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// It is planned in its intervals.
    Intervals,
    /// It slept in the slice before and its guest publishes no deadlines: it is only entitled.
    Asleep,
    /// It slept in the slice before and its guest publishes deadlines: it is planned for the whole slice.
    WholeSlice,
    /// It is planned for the whole slice, ahead of all others, and its period ends no slice.
    Prompt,
}

/// One vCPU of the plan.
#[derive(Debug)]
struct Server {
    account: Account,
    vcpu: VcpuId,
    home: Option<u32>,
    /// The most unused time that a prompt vCPU keeps, ns; 0 if the vCPU cannot be prompt.
    prompt_limit: i64,
    /// CPU time of the thread when the slice began, ns.
    ran_at_start: u64,
    mode: Mode,
    /// Whether another vCPU is prompt, so that this one is behind it.
    behind_prompt: bool,
    /// What the vCPU was granted for this slice, and what it had kept from before, ns.
    granted: u64,
    carried: i64,
    /// What it was lent in this slice, ns.
    lent: i64,
    /// What it was missing at the end of the slice before, ns: it is planned until it has had that.
    missing: u64,
    intervals: [Interval; 2],
    /// The CPU whose pacer checks it in this slice, and the time of its next check.
    cpu: usize,
    next_check: u64,
    /// The next deadline that its guest published when the slice began.
    deadline: Option<u64>,
}

impl Server {
    /// Whether the vCPU used more than 1/`part` of its grant.
    fn used_over(&self, part: u64) -> bool {
        let used = signed(self.granted).saturating_add(self.carried).saturating_sub(self.account.balance);
        used.saturating_mul(signed(part)) > signed(self.granted)
    }

    /// Applies the bandwidth that the guest claimed from its offer: for the rest of the slice, which ends at `end`,
    /// without a segment. The plan has room for it.
    fn apply_claim(&mut self, index: usize, now: u64, end: u64, planner: &mut Planner, threads: &mut impl Threads) {
        if let Some(more) = self.account.apply_claim(index, now, end, threads) {
            self.granted = self.granted.saturating_add_signed(more);
            planner.change(self.vcpu, self.account.bandwidth, self.home);
        }
    }

    /// Moves the vCPU to the place that it should have now.
    fn update_place(&mut self, index: usize, now: u64, threads: &mut impl Threads) {
        let in_turn = match self.mode {
            Mode::Intervals => self.intervals.iter().any(|interval| (interval.start..interval.end).contains(&now)),
            Mode::Asleep => false,
            Mode::WholeSlice | Mode::Prompt => true,
        };
        // On time that is lent it is behind the planned ones.
        let first = !self.behind_prompt && self.lent == 0;
        let (missing, ran_at_start) = (self.missing, self.ran_at_start);
        self.account.update_place(index, threads, |account| {
            if account.is_used_up() {
                Place::Beyond
            } else if first && (in_turn || account.counts.ran.saturating_sub(ran_at_start) < missing) {
                Place::Planned
            } else {
                Place::Entitled
            }
        });
    }

    /// When the vCPU's place may have to change next, at most `end`. A check takes `cost` ns, in which the vCPU does
    /// not run. `waited`: it did not run since the last check.
    fn next_check_time(&self, now: u64, end: u64, cost: u64, waited: bool) -> u64 {
        let Account { ended, place, grain, balance, .. } = self.account;
        if ended || self.mode == Mode::Asleep || place == Place::Beyond {
            return end;
        }
        let patience = if waited && place == Place::Entitled { cost.saturating_mul(COST_FACTOR) } else { 0 };
        let least = grain.max(patience);
        let left = u64::try_from(balance).unwrap_or(0).max(least);
        let used_up = now.saturating_add(cost).saturating_add(left);
        let missing = self.missing.saturating_sub(self.account.counts.ran.saturating_sub(self.ran_at_start));
        let made_up = if missing > 0 { now.saturating_add(cost).saturating_add(missing.max(least)) } else { end };
        // Where a vCPU is prompt, segments decide nothing.
        let in_turn = self.mode != Mode::Prompt && !self.behind_prompt;
        let borders =
            self.intervals.iter().flat_map(|interval| [interval.start, interval.end]).filter(|at| in_turn && *at > now);
        borders.chain([used_up, made_up, end]).min().unwrap_or(end)
    }
}

/// All vCPUs with reservations, and the present slice.
#[derive(Debug)]
pub(crate) struct Slices {
    planner: Planner,
    demands: Vec<Demand>,
    servers: Vec<Server>,
    start: u64,
    end: u64,
    calm: bool,
    /// Nothing is known of the vCPUs yet: the first slice is planned.
    first: bool,
    /// Length of the last calm time, ns.
    calm_length: u64,
    /// The shortest period, ns.
    shortest: u64,
    /// Pool of unused time, ns, which no vCPU has had yet.
    pool: u64,
    calm_ended: bool,
    slices: u64,
    checks: u64,
    /// Duration of a check, ns, as a moving average.
    cost: u64,
}

impl Slices {
    /// A plan for vCPUs that are at [`Place::Entitled`] now. `tally` gives each vCPU its counters.
    pub(crate) fn new(reservations: &Reservations, now: u64, tally: impl Fn(ThreadId) -> Arc<Tally>) -> Self {
        let mut planner = Planner::new(&reservations.shared);
        for cpu in (0..).take(reservations.cpus.len()) {
            planner.add(reservations.beside.reserve, Some(cpu));
        }
        let alone = reservations.cpus.len() == 1;
        let servers: Vec<Server> = reservations
            .vcpus
            .iter()
            .map(|reserved| {
                let account = Account::new(reserved, now, tally(reserved.id));
                let prompt = alone && account.period <= PROMPT;
                Server {
                    vcpu: planner.add(reserved.bandwidth, reserved.home),
                    home: reserved.home,
                    prompt_limit: if prompt { signed(account.share(account.period)) } else { 0 },
                    account,
                    ran_at_start: 0,
                    mode: Mode::Intervals,
                    behind_prompt: false,
                    granted: 0,
                    carried: 0,
                    lent: 0,
                    missing: 0,
                    intervals: [Interval::default(); 2],
                    cpu: 0,
                    next_check: 0,
                    deadline: None,
                }
            })
            .collect();
        // A prompt vCPU is ahead of all others anyway: checks that the others need are enough.
        let period = |server: &Server| server.account.period;
        let others = servers.iter().filter(|server| server.prompt_limit == 0).map(period).min();
        let shortest = others.or(servers.iter().map(period).min()).unwrap_or(CALM_MAX);
        let demands = vec![Demand { deadline: Nanos::MAX, idle: false }; reservations.cpus.len() + servers.len()];
        Self {
            planner,
            demands,
            servers,
            start: now,
            end: now,
            calm: false,
            first: true,
            calm_length: shortest,
            shortest: shortest.min(CALM_MAX),
            pool: 0,
            calm_ended: false,
            slices: 0,
            checks: 0,
            cost: 0,
        }
    }

    /// Takes each vCPU's first reading; earlier CPU time is not counted. The pacer that keeps the shares from `now` on
    /// calls this: what vCPUs use between this call and the first check is charged to them.
    pub(crate) fn begin(&mut self, now: u64, threads: &mut impl Threads) {
        for (index, server) in self.servers.iter_mut().enumerate() {
            server.account.begin(now, threads.read(index));
            server.ran_at_start = server.account.counts.ran;
        }
        (self.start, self.end) = (now, now);
    }

    /// Continues the plan `old`: vCPUs of both keep their place, debt and period. To be called at the end of a slice,
    /// after [`Self::begin`].
    pub(crate) fn take_over(&mut self, old: &Slices) {
        for server in &mut self.servers {
            let is_of = |before: &&Server| before.account.id == server.account.id && !before.account.ended;
            let Some(before) = old.servers.iter().find(is_of) else { continue };
            server.account.take_over(&before.account, 0);
            (server.granted, server.carried, server.ran_at_start) =
                (before.granted, before.carried, before.ran_at_start);
        }
        (self.slices, self.checks, self.cost, self.pool) = (old.slices, old.checks, old.cost, old.pool);
    }

    /// Continues a plan in the order of deadlines: vCPUs of both keep their place, debt and period. `old` gives a
    /// vCPU's account there, and its share of the time from the given time to the end of its window, ns.
    pub(crate) fn take_over_accounts<'a>(&mut self, old: impl Fn(ThreadId, u64) -> Option<(&'a Account, u64)>) {
        for server in &mut self.servers {
            if let Some((before, given)) = old(server.account.id, self.start) {
                server.account.take_over(before, given);
                server.account.balance = -signed(before.overuse(given));
            }
        }
    }

    /// The account of one of the vCPUs.
    pub(crate) fn account(&self, id: ThreadId) -> Option<&Account> {
        self.servers.iter().map(|server| &server.account).find(|account| account.id == id && !account.ended)
    }

    /// Whether there are no vCPUs.
    pub(crate) fn is_empty(&self) -> bool {
        self.servers.is_empty()
    }

    /// When the slice or the calm time ends: another set of vCPUs may take over from then on.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Whether no slice is planned: another set of vCPUs may take over at any time.
    pub(crate) fn is_calm(&self) -> bool {
        self.calm
    }

    /// Whether a calm time has just ended, so that the pacers of other CPUs must check. Clears the flag.
    pub(crate) fn take_calm_ended(&mut self) -> bool {
        std::mem::take(&mut self.calm_ended)
    }

    /// Records how long a step took, ns. Checks must not follow each other so fast that vCPUs have no time to run
    /// between them.
    pub(crate) fn record_cost(&mut self, ns: u64) {
        self.cost = (3 * self.cost + ns) / 4;
    }

    /// Does what is due on a CPU (by the planner's number). Returns when its pacer is to check again.
    pub(crate) fn step(&mut self, cpu: usize, now: u64, threads: &mut impl Threads) -> u64 {
        self.checks += 1;
        if self.servers.is_empty() {
            return NEVER;
        }
        if now >= self.end {
            self.begin_slice(now, threads);
        }
        if self.calm {
            return if cpu == 0 { self.end } else { NEVER };
        }
        let (end, cost) = (self.end, self.cost);
        let mut due = end;
        // Beside a prompt vCPU all are read at each check: all of them wait, and one check serves all.
        let all = self
            .servers
            .iter()
            .any(|server| (server.mode == Mode::Prompt || server.behind_prompt) && server.next_check <= now);
        for (index, server) in self.servers.iter_mut().enumerate() {
            if server.cpu == cpu {
                if all || now >= server.next_check {
                    server.apply_claim(index, now, end, &mut self.planner, threads);
                    let before = server.account.counts.ran;
                    server.update_place(index, now, threads);
                    server.next_check = server.next_check_time(now, end, cost, server.account.counts.ran == before);
                }
                due = due.min(server.next_check);
            }
        }
        due.min(self.lend(cpu, now, threads))
    }

    /// Lends a piece of the pool to a vCPU of this CPU that has used up its share, if no vCPU with time of its own
    /// needs the CPU: each has used up its share, or sleeps and publishes no deadlines, or has not run in this slice
    /// since it slept. At [`Place::Entitled`] the borrower is behind all vCPUs that wake at [`Place::Planned`]; one
    /// that wakes at `Entitled` waits for a piece at most. Returns when to check the borrower.
    ///
    /// Nothing is lent beside a prompt vCPU: there the order within the slice is free, so lent time could delay a share
    /// beyond the slice.
    fn lend(&mut self, cpu: usize, now: u64, threads: &mut impl Threads) -> u64 {
        let (end, cost) = (self.end, self.cost);
        let long_enough = self.pool >= POOL_PIECE_MIN && end.saturating_sub(now) >= POOL_PIECE_MIN;
        if !long_enough || self.servers.iter().any(|server| server.behind_prompt) {
            return end;
        }
        let throttled = |server: &Server| server.account.place == Place::Beyond && !server.account.ended;
        let here = self.servers.iter().enumerate().filter(|(_, server)| server.cpu == cpu && throttled(server));
        let due = |(_, server): &(usize, &Server)| server.deadline.unwrap_or(server.account.deadline);
        let Some((index, _)) = here.min_by_key(due) else { return end };
        let needs_nothing = |server: &Server| {
            let asleep = matches!(server.mode, Mode::Asleep | Mode::WholeSlice);
            server.account.ended || throttled(server) || asleep && server.account.counts.ran == server.ran_at_start
        };
        let mut all = self.servers.iter().enumerate();
        if !all.all(|(at, server)| needs_nothing(server) || server.deadline.is_none() && threads.is_asleep(at)) {
            return end;
        }
        let Some(server) = self.servers.get_mut(index) else { return end };
        self.pool -= POOL_PIECE_MIN;
        let more = signed(POOL_PIECE_MIN);
        (server.lent, server.carried) = (server.lent + more, server.carried + more);
        server.account.balance = server.account.balance.saturating_add(more);
        server.update_place(index, now, threads);
        server.next_check = server.next_check_time(now, end, cost, false);
        server.next_check
    }

    /// Ends a slice and begins the next, or a calm time.
    fn begin_slice(&mut self, now: u64, threads: &mut impl Threads) {
        // Slices follow each other without a gap, unless the check comes very late.
        let before = self.end;
        self.start = if now.saturating_sub(before) < SLICE_MIN.0 { before } else { now };
        let first = std::mem::take(&mut self.first);
        let (mut busy, mut ran, mut prompt) = (first, false, false);
        for (index, server) in self.servers.iter_mut().enumerate().filter(|(_, server)| !server.account.ended) {
            server.account.read(index, threads);
            server.apply_claim(index, now, now, &mut self.planner, threads);
            let next = threads.next_deadline(index, self.start);
            let passed = server.deadline.filter(|at| *at <= self.start);
            server.deadline = next.map(|next| next.at);
            let live = next.is_some_and(|next| next.live);
            busy |= live;
            // Behind bulk it may not have run although it was runnable. Interrupt threads may have taken a short slice:
            // so the kernel is asked.
            let idle = !first && !live && server.account.place != Place::Beyond;
            let slept = idle && server.account.counts.ran == server.ran_at_start && threads.is_asleep(index);
            let silent = next.is_none();
            let is_prompt = server.prompt_limit > 0 && silent && server.account.balance >= server.prompt_limit / 2;
            server.mode = match (is_prompt, slept, silent) {
                (true, ..) => Mode::Prompt,
                (_, true, true) => Mode::Asleep,
                (_, true, false) => Mode::WholeSlice,
                (_, false, _) => Mode::Intervals,
            };
            // A vCPU with time left that does not sleep has been kept from its share.
            let waits = !first && !self.calm && !slept && !is_prompt && server.account.place != Place::Beyond;
            let waits = waits && server.lent == 0 && !server.account.is_used_up() && !threads.is_asleep(index);
            prompt |= is_prompt;
            busy |= server.used_over(8) && !is_prompt;
            server.ran_at_start = server.account.counts.ran;
            ran |= !(slept && silent);
            let account = &mut server.account;
            busy |= account.balance < 0 || account.place == Place::Beyond;
            account.end_period(now);
            // Unused time is taken back, except for the grain that was left when the vCPU went to `Beyond`.
            if account.place != Place::Beyond {
                let most = match (waits, silent) {
                    (true, _) => {
                        signed(account.share(passed.map_or(account.period, |at| self.start - at).min(account.period)))
                    }
                    (_, true) => server.prompt_limit,
                    (_, false) => 0,
                };
                let carried = account.balance.min(most);
                self.pool = self.pool.saturating_add((account.balance - carried).unsigned_abs()).min(UNUSED_MAX);
                account.balance = carried;
            }
            server.missing = if waits { u64::try_from(account.balance).unwrap_or(0) } else { 0 };
        }
        for server in &mut self.servers {
            server.behind_prompt = prompt && server.mode != Mode::Prompt;
        }
        if busy {
            self.calm_ended |= std::mem::take(&mut self.calm);
            self.calm_length = self.shortest;
            self.plan();
            self.grant_gap(self.start - before);
        } else {
            self.begin_calm(if ran { self.shortest } else { (self.calm_length * 2).min(CALM_MAX) }, now, threads);
        }
    }

    fn plan(&mut self) {
        for server in &self.servers {
            if let Some(demand) = self.demands.get_mut(server.vcpu.index()) {
                let deadline = server.deadline.unwrap_or(server.account.deadline);
                demand.deadline =
                    if server.account.ended || server.mode == Mode::Prompt { Nanos::MAX } else { Nanos(deadline) };
            }
        }
        self.end = self.planner.plan(Nanos(self.start), &self.demands).0;
        self.slices += 1;
        for server in &mut self.servers {
            server.intervals = [Interval::default(); 2];
            (server.granted, server.lent) = (0, 0);
        }
        // The planner's vCPUs: first a reserve for each CPU, then the servers in their order.
        let reserves = self.demands.len() - self.servers.len();
        for segment in self.planner.segments() {
            let server = segment.vcpu.index().checked_sub(reserves).and_then(|at| self.servers.get_mut(at));
            let Some(server) = server else { continue };
            let cpu = usize::try_from(segment.cpu).unwrap_or(0);
            let [first, second] = &mut server.intervals;
            let interval = if first.end == 0 { first } else { second };
            *interval = Interval { cpu, start: segment.start.0, end: segment.end.0 };
            server.granted += segment.end.0 - segment.start.0;
        }
        for server in &mut self.servers {
            server.intervals.sort_unstable_by_key(|interval| (interval.end == 0, interval.start));
            (server.cpu, server.next_check) = (server.intervals.first().map_or(0, |interval| interval.cpu), 0);
            let balance = &mut server.account.balance;
            server.carried = (*balance).max(0);
            *balance = balance.saturating_add(signed(server.granted));
        }
    }

    /// Grants each vCPU its share of a gap of `ns` before a check that came late: it is charged for what it used then.
    fn grant_gap(&mut self, ns: u64) {
        for server in self.servers.iter_mut().filter(|_| ns > 0) {
            let more = signed(server.account.share(ns.min(server.account.period)));
            server.carried = server.carried.saturating_add(more);
            server.account.balance = server.account.balance.saturating_add(more);
        }
    }

    /// Begins a calm time of `length` ns, without a plan.
    fn begin_calm(&mut self, length: u64, now: u64, threads: &mut impl Threads) {
        self.calm = true;
        self.calm_length = length;
        self.start = now;
        self.end = now.saturating_add(length);
        for (index, server) in self.servers.iter_mut().enumerate().filter(|(_, server)| !server.account.ended) {
            let account = &mut server.account;
            server.granted = account.share(length);
            server.carried = account.balance.clamp(0, server.prompt_limit);
            account.balance = signed(server.granted).saturating_add(server.carried);
            account.move_to(index, Place::Planned, threads);
        }
    }

    /// Writes the present state to the snapshot.
    pub(crate) fn write_snapshot(&self, now: u64, into: &mut Snapshot) {
        into.add_span(now, self.start, self.end, self.calm);
        (into.slices, into.looks) = (self.slices, self.checks);
        for server in self.servers.iter().filter(|server| !server.account.ended) {
            into.add_vcpu(server.account.state());
            for interval in server.intervals.iter().filter(|interval| !self.calm && interval.end > interval.start) {
                into.add_segment(Segment {
                    cpu: interval.cpu,
                    id: server.account.id,
                    start: interval.start,
                    end: interval.end,
                });
            }
        }
    }
}
