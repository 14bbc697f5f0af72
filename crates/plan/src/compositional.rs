//! Reservations by compositional analysis: the periodic resource models with which CARTS configures RT-Xen.
//!
//! All times are integers in a unit that the caller chooses (CARTS works on integers; RTVirt's Table 2 is in ms, its
//! memcached reservations in us). The search finds the interface with the least bandwidth over all periods up to the
//! tasks' shortest one; among equals it takes the shortest period.
//!
//! - PRM (Shin and Lee, RTSS 2003): budget Q in each period P on one CPU.
//! - MPR (Easwaran, Shin, Lee, Real-Time Systems 43, 2009): budget Q in each period P on at most m CPUs at once.
//! - DMPR (Xu et al., ECRTS 2013): m whole CPUs and one additional PRM.

use crate::units::{Bandwidth, Nanos, gcd};

/// A periodic task in integer units: budget in each period, with the deadline at the period's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Task {
    /// At most the period.
    pub budget: u64,
    /// Greater than 0.
    pub period: u64,
}

impl Task {
    /// Budget over period.
    pub fn bandwidth(self) -> Bandwidth {
        Bandwidth::new(Nanos(self.budget), Nanos(self.period)).unwrap_or(Bandwidth::ONE)
    }
}

/// The most points in time that are tested for one set. A set that needs more has no result.
const POINTS_MAX: u64 = 50_000;
/// The most times before an arrival for which gEDF is tested.
const HORIZON_MAX: f64 = 20_000.0;
/// The longest period that is tried, units.
const PERIODS_MAX: u64 = 2_000;

/// Least supply of a PRM in any interval of `t` units.
///
/// k = floor((t - (P-Q)) / P), sbf = kQ + max(0, t - 2(P-Q) - kP); 0 below P-Q.
pub(crate) fn prm_supply(interface: Task, t: u64) -> u64 {
    let (period, budget) = (interface.period.max(1), interface.budget);
    let gap = period.saturating_sub(budget);
    let Some(after) = t.checked_sub(gap) else { return 0 };
    let k = after / period;
    k * budget + t.saturating_sub(2 * gap + k * period)
}

/// Greatest demand of tasks under EDF in any interval of `t` units.
pub(crate) fn edf_demand(tasks: &[Task], t: u64) -> u64 {
    tasks.iter().map(|task| (t / task.period.max(1)).saturating_mul(task.budget)).fold(0, u64::saturating_add)
}

fn hyperperiod(tasks: &[Task]) -> Option<u64> {
    tasks
        .iter()
        .try_fold(1_u128, |all, task| {
            let period = u128::from(task.period.max(1));
            (all / gcd(all, period)).checked_mul(period).filter(|all| *all <= u128::from(u64::MAX))
        })
        .and_then(|all| u64::try_from(all).ok())
}

/// The deadlines up to the hyperperiod. None: too many.
fn deadlines(tasks: &[Task]) -> Option<Vec<u64>> {
    let all = hyperperiod(tasks)?;
    let count: u64 = tasks.iter().map(|task| all / task.period.max(1)).fold(0, u64::saturating_add);
    if count > POINTS_MAX {
        return None;
    }
    let mut points: Vec<u64> =
        tasks.iter().flat_map(|task| (1..=all / task.period.max(1)).map(|n| n * task.period.max(1))).collect();
    points.sort_unstable();
    points.dedup();
    Some(points)
}

/// The PRM of least bandwidth with which the tasks meet their deadlines under EDF. None if they need more than a CPU,
/// or if their hyperperiod has more than 50,000 deadlines.
pub fn prm(tasks: &[Task]) -> Option<Task> {
    let longest = tasks.iter().map(|task| task.period).min()?.min(PERIODS_MAX);
    let points = deadlines(tasks)?;
    let need: Bandwidth = tasks.iter().map(|task| task.bandwidth()).sum();
    let mut best: Option<Task> = None;
    for period in 1..=longest {
        let least = need.of(Nanos(period)).0.max(1);
        if best.is_some_and(|best| Task { budget: least, period }.bandwidth() >= best.bandwidth()) {
            continue;
        }
        let fits = |budget: &u64| supplies(Task { budget: *budget, period }, tasks, &points, need);
        let Some(budget) = least_budget(least, period, fits) else { continue };
        let found = Task { budget, period };
        if best.is_none_or(|best| found.bandwidth() < best.bandwidth()) {
            best = Some(found);
        }
    }
    best
}

/// The least budget between `least` and `period` that fits. `fits` must be monotonic in the budget.
fn least_budget(least: u64, period: u64, fits: impl Fn(&u64) -> bool) -> Option<u64> {
    let (mut low, mut high) = (least, period);
    if low > high || !fits(&high) {
        return None;
    }
    while low < high {
        let middle = low + (high - low) / 2;
        if fits(&middle) { high = middle } else { low = middle + 1 }
    }
    Some(low)
}

/// Whether supply covers demand at every deadline. Demand is at most `need` x t, and supply is at least Q/P x (t -
/// 2(P-Q)). If the first is at most the second, no later time needs a test. Both repeat after the common multiple of
/// hyperperiod and P. A test of more than [`POINTS_MAX`] points counts as failed: the interface found then is safe but
/// may not be the least.
fn supplies(interface: Task, tasks: &[Task], points: &[u64], need: Bandwidth) -> bool {
    let Some(all) = points.last().copied().filter(|_| interface.bandwidth() >= need) else { return false };
    let gap = interface.period.saturating_sub(interface.budget).saturating_mul(2);
    let clear = |t: u64| {
        let supply = u128::from(interface.budget) * u128::from(t.saturating_sub(gap));
        supply * u128::from(need.period()) >= u128::from(need.runtime()) * u128::from(t) * u128::from(interface.period)
    };
    let turns = u128::from(interface.period) / gcd(u128::from(interface.period), u128::from(all)).max(1);
    let turns = u64::try_from(turns).unwrap_or(u64::MAX);
    let affordable = POINTS_MAX / u64::try_from(points.len()).unwrap_or(u64::MAX).max(1) + 1;
    for turn in 0..turns {
        let later = turn.saturating_mul(all);
        if clear(later) && turn > 0 {
            return true;
        }
        if turn >= affordable {
            return false;
        }
        if !points.iter().all(|t| edf_demand(tasks, later + t) <= prm_supply(interface, later + t)) {
            return false;
        }
    }
    true
}

/// Least supply of an MPR in any interval of `t` units: after a period that is served as early as possible, the next is
/// served as late as possible. With full concurrency, Q consists of `Q/m` units of all m CPUs and one unit of the
/// remainder. The interval begins before or after that unit.
pub(crate) fn mpr_supply(interface: Task, cpus: u64, t: u64) -> u64 {
    let (period, budget, cpus) = (interface.period.max(1), interface.budget, cpus.max(1));
    let (full, rest) = (budget / cpus, budget % cpus);
    let early = |upto: u64| upto.min(full) * cpus + if upto > full { rest } else { 0 };
    // Supply up to a time in this pattern: period 0 early, all later periods late.
    let upto = |time: u64| {
        if time <= period {
            return early(time);
        }
        let (turns, inside) = ((time - period) / period, (time - period) % period);
        budget + turns * budget + (budget - early(period - inside))
    };
    [full, full + u64::from(rest > 0)].into_iter().map(|from| upto(from + t) - upto(from)).min().unwrap_or(0)
}

/// The gEDF test of Easwaran et al. (theorem 1): whether tasks meet their deadlines with a concurrency of `cpus` CPUs
/// and this supply. Sufficient, not necessary.
///
/// For each task k and time A before its arrival: the interference of the other tasks, with carry-in of the `cpus`-1
/// largest, plus `cpus` x budget of k, must be at most the supply in A + period of k. A is tried up to `horizon`.
fn global_edf(tasks: &[Task], cpus: u64, horizon: u64, supply: impl Fn(u64) -> u64) -> bool {
    // Equal tasks have the same test and interfere alike.
    let mut kinds: Vec<(Task, u64)> = Vec::new();
    let mut sorted = tasks.to_vec();
    sorted.sort_unstable_by_key(|task| (task.period, task.budget));
    for task in sorted {
        match kinds.last_mut() {
            Some((last, count)) if *last == task => *count += 1,
            _ => kinds.push((task, 1)),
        }
    }
    let carriers = cpus.saturating_sub(1);
    let mut extra: Vec<(u64, u64)> = Vec::with_capacity(2 * kinds.len());
    kinds.iter().enumerate().all(|(k, (task, _))| {
        (0..=horizon).all(|before| {
            let t = before + task.period;
            extra.clear();
            let mut demand = cpus * task.budget;
            for (i, (other, count)) in kinds.iter().enumerate() {
                let jobs = t / other.period * other.budget;
                let carried = other.budget.min(t % other.period);
                let mut interferes = |own: u64, most: u64, count: u64| {
                    let without = jobs.saturating_sub(own).min(most);
                    demand += count * without;
                    extra.push(((jobs + carried).saturating_sub(own).min(most) - without, count));
                };
                if i == k {
                    interferes(task.budget, before, 1);
                }
                interferes(0, t - task.budget, count - u64::from(i == k));
            }
            extra.sort_unstable_by(|a, b| b.cmp(a));
            let mut left = carriers;
            for (more, count) in &extra {
                let some = left.min(*count);
                demand += some * more;
                left -= some;
            }
            demand <= supply(t)
        })
    })
}

/// The largest A that needs a test: beyond it, demand grows more slowly than supply.
fn horizon(tasks: &[Task], cpus: u64, supplied: Bandwidth, late: u64) -> Option<u64> {
    let need: f64 = tasks.iter().map(|task| task.bandwidth().as_f64()).sum();
    let rate = supplied.as_f64();
    if rate <= need {
        return None;
    }
    let largest = tasks.iter().map(|task| task.budget).max()?;
    let all: u64 = tasks.iter().map(|task| task.budget).sum();
    // demand <= U t + all budgets carried + cpus x largest; supply >= rate (t - late)
    let bound = ((all + cpus * largest) as f64 + rate * late as f64) / (rate - need);
    (bound < HORIZON_MAX).then_some(bound as u64 + 1)
}

/// An interface over several CPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MultiCpuInterface {
    /// MPR: concurrency. DMPR: number of whole CPUs.
    pub cpus: u64,
    /// MPR: budget over all CPUs. DMPR: budget on the additional CPU; `None` without one.
    pub interface: Option<Task>,
}

/// The least number of whole CPUs on which the tasks meet their deadlines under gEDF, which a host must set aside
/// (RTVirt's "claimed"). At least their bandwidth, at most one CPU per task, which is also the result if no smaller
/// number is proven. None without tasks.
pub fn whole_cpus(tasks: &[Task]) -> Option<u64> {
    let most = u64::try_from(tasks.len()).ok()?;
    let need: Bandwidth = tasks.iter().map(|task| task.bandwidth()).sum();
    (need.whole_cpus().max(1)..most)
        .find(|cpus| {
            let supplied = Bandwidth::cpus(usize::try_from(*cpus).unwrap_or(usize::MAX));
            // EDF is optimal on one CPU.
            *cpus == 1
                || horizon(tasks, *cpus, supplied, 0)
                    .is_some_and(|horizon| global_edf(tasks, *cpus, horizon, |t| cpus * t))
        })
        .or((most > 0).then_some(most))
}

/// The DMPR of least bandwidth for tasks under gEDF: whole CPUs and one partial CPU. None without tasks.
pub fn dmpr(tasks: &[Task]) -> Option<MultiCpuInterface> {
    let whole = whole_cpus(tasks)?;
    let longest = tasks.iter().map(|task| task.period).min()?.min(PERIODS_MAX);
    let Some(fewer) = whole.checked_sub(1).filter(|fewer| *fewer > 0) else {
        return Some(match prm(tasks) {
            Some(one) if one.budget < one.period => MultiCpuInterface { cpus: 0, interface: Some(one) },
            _ => MultiCpuInterface { cpus: whole, interface: None },
        });
    };
    let mut best: Option<Task> = None;
    for period in 1..=longest {
        let fits = |budget: &u64| {
            let part = Task { budget: *budget, period };
            let supplied = Bandwidth::cpus(usize::try_from(fewer).unwrap_or(usize::MAX)) + part.bandwidth();
            horizon(tasks, whole, supplied, 2 * (period - budget))
                .is_some_and(|horizon| global_edf(tasks, whole, horizon, |t| fewer * t + prm_supply(part, t)))
        };
        let Some(budget) = least_budget(1, period, fits) else { continue };
        let found = Task { budget, period };
        if budget < period && best.is_none_or(|best| found.bandwidth() < best.bandwidth()) {
            best = Some(found);
        }
    }
    Some(best.map_or(MultiCpuInterface { cpus: whole, interface: None }, |part| MultiCpuInterface {
        cpus: fewer,
        interface: Some(part),
    }))
}

/// The MPR of least bandwidth for tasks under gEDF, for each concurrency from their bandwidth up to one CPU per task.
/// None if no interface is found.
pub fn mpr(tasks: &[Task]) -> Option<MultiCpuInterface> {
    let most = u64::try_from(tasks.len()).ok()?;
    let need: Bandwidth = tasks.iter().map(|task| task.bandwidth()).sum();
    let longest = tasks.iter().map(|task| task.period).min()?.min(PERIODS_MAX);
    let mut best: Option<MultiCpuInterface> = None;
    let width = |multi: &MultiCpuInterface| multi.interface.map_or(Bandwidth::cpus(usize::MAX), Task::bandwidth);
    for cpus in need.whole_cpus().max(1)..=most {
        for period in 1..=longest {
            let fits = |budget: &u64| {
                let task = Task { budget: *budget, period };
                horizon(tasks, cpus, task.bandwidth(), 2 * period)
                    .is_some_and(|horizon| global_edf(tasks, cpus, horizon, |t| mpr_supply(task, cpus, t)))
            };
            let Some(budget) = least_budget(1, cpus * period, fits) else { continue };
            let found = MultiCpuInterface { cpus, interface: Some(Task { budget, period }) };
            if best.as_ref().is_none_or(|best| width(&found) < width(best)) {
                best = Some(found);
            }
        }
    }
    best
}

impl MultiCpuInterface {
    /// As a DMPR: whole CPUs and the partial one.
    pub fn dmpr_bandwidth(self) -> Bandwidth {
        let part = self.interface.map_or(Bandwidth::ZERO, Task::bandwidth);
        Bandwidth::cpus(usize::try_from(self.cpus).unwrap_or(usize::MAX)) + part
    }

    /// As an MPR: the budget over all CPUs.
    pub fn mpr_bandwidth(self) -> Bandwidth {
        self.interface.map_or(Bandwidth::ZERO, Task::bandwidth)
    }
}

#[cfg(test)]
#[path = "compositional_tests.rs"]
mod tests;
