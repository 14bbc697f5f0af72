//! Real-time applications (RTAs), the vCPUs that run them, and the tenants of these vCPUs.

use std::collections::BTreeSet;

use thiserror::Error;

use crate::dpwrap::{SLICE_MAX, SLICE_MIN};
use crate::units::{Bandwidth, Nanos};

/// The longest period of an RTA: one hour.
pub const PERIOD_MAX: Nanos = Nanos(3_600_000_000_000);
/// The shortest period of an RTA: with a shorter one, no slice of the planner could separate two of its deadlines.
pub const PERIOD_MIN: Nanos = Nanos(1_000);

/// Addition to a sporadic RTA's budget. An arrival in the middle of a slice loses less than 1 ns to each of these: the
/// time that its vCPU was ahead, and the rounding of the slice's share, at the wake-up and at the share's end. Together
/// less than 4 ns, so at most 3.
const ROUNDING: Nanos = Nanos(3);

/// When an RTA's jobs arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arrivals {
    /// One per period.
    Periodic,
    /// At any time, at least a period apart.
    Sporadic,
}

/// A real-time application: each of its jobs needs `slice` of CPU time within `period` of its arrival.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Rta {
    slice: Nanos,
    period: Nanos,
    arrivals: Arrivals,
}

/// Values that are no valid RTA or vCPU.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ModelError {
    /// The slice is 0 or longer than the period.
    #[error("an RTA of {slice} every {period}: the slice must be above 0 and at most the period; correct either")]
    Slice {
        /// CPU time of each job.
        slice: Nanos,
        /// The least time between two jobs.
        period: Nanos,
    },
    /// The period is out of range.
    #[error("a period of {period} is not between {PERIOD_MIN} and {PERIOD_MAX}; choose one that is")]
    Period {
        /// The least time between two jobs.
        period: Nanos,
    },
    /// The RTAs need more than one CPU on one vCPU.
    #[error("{bandwidth} of a CPU, slack included, on one vCPU: more than 1; use more vCPUs, or less slack")]
    Overfull {
        /// What the vCPU would have to reserve, slack included.
        bandwidth: Bandwidth,
    },
}

impl Rta {
    /// An RTA with these needs.
    ///
    /// # Errors
    /// [`ModelError::Slice`], [`ModelError::Period`].
    pub fn new(slice: Nanos, period: Nanos, arrivals: Arrivals) -> Result<Self, ModelError> {
        if !(PERIOD_MIN..=PERIOD_MAX).contains(&period) {
            return Err(ModelError::Period { period });
        }
        if slice == Nanos::ZERO || slice > period {
            return Err(ModelError::Slice { slice, period });
        }
        Ok(Self { slice, period, arrivals })
    }

    /// CPU time of a job.
    pub fn slice(&self) -> Nanos {
        self.slice
    }

    /// Time between arrivals, and from an arrival to its deadline.
    pub fn period(&self) -> Nanos {
        self.period
    }

    /// When jobs arrive.
    pub fn arrivals(&self) -> Arrivals {
        self.arrivals
    }

    /// Its need, without slack.
    pub fn bandwidth(&self) -> Bandwidth {
        Bandwidth::new(self.slice, self.period).unwrap_or(Bandwidth::ONE)
    }
}

/// A vCPU and the RTAs on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vcpu {
    rtas: Vec<Rta>,
    affinity: Option<BTreeSet<u32>>,
    slack: Nanos,
    bandwidth: Bandwidth,
}

impl Vcpu {
    /// The smallest reservation, and the smallest remainder beside one, ppm: the planner's rounding needs 2 ns in its
    /// shortest slice. Reservations between this and a whole CPU minus this are unchanged; larger ones become a whole
    /// CPU.
    pub(crate) const GRAIN_PPM: u64 = 10;

    /// A vCPU with these RTAs. `slack` is added to their needs once per shortest period (RTVirt, section 3.3: 500 us
    /// for the scheduling overhead of both levels). `affinity`: the CPUs that it may run on. None: all.
    ///
    /// # Errors
    /// [`ModelError::Overfull`].
    pub fn new(rtas: Vec<Rta>, slack: Nanos, affinity: Option<BTreeSet<u32>>) -> Result<Self, ModelError> {
        let bandwidth = reserve(&rtas, slack)?;
        Ok(Self { rtas, affinity, slack, bandwidth })
    }

    /// The RTAs that run on it.
    pub fn rtas(&self) -> &[Rta] {
        &self.rtas
    }

    /// CPUs that it may run on. None: all.
    pub fn affinity(&self) -> Option<&BTreeSet<u32>> {
        self.affinity.as_ref()
    }

    /// CPU time reserved beyond the need of its RTAs, once in its shortest period.
    pub fn slack(&self) -> Nanos {
        self.slack
    }

    /// The need of its RTAs, without slack.
    pub fn need(&self) -> Bandwidth {
        self.rtas.iter().map(Rta::bandwidth).sum()
    }

    /// Its reservation, slack included.
    pub fn bandwidth(&self) -> Bandwidth {
        self.bandwidth
    }

    /// The shortest period of its RTAs. None without RTAs.
    pub fn period(&self) -> Option<Nanos> {
        self.rtas.iter().map(Rta::period).min()
    }

    /// Whether some arrivals cannot be predicted.
    pub fn sporadic(&self) -> bool {
        self.rtas.iter().any(|rta| rta.arrivals == Arrivals::Sporadic)
    }

    /// A bound L that the lateness of an admitted vCPU's jobs stays below, whatever its slack is.
    ///
    /// Between an arrival and its deadline the plan may lack the vCPU's work for less than L: for less than a slice at
    /// each end; for a sporadic arrival beside other RTAs of the same vCPU, for up to the slack at the beginning. So in
    /// a time t from an arrival on the vCPU has at least bandwidth x (t - L). The work due by then is at most need x t,
    /// which is at most bandwidth x t: it is done before t + L.
    pub fn late_bound(&self) -> Nanos {
        let mixed = self.rtas.len() > 1 && self.sporadic();
        SLICE_MIN + if mixed { self.slack.max(SLICE_MIN) } else { SLICE_MIN }
    }

    /// The slack with which every deadline is guaranteed, whatever other tenants' deadlines are. With less slack, a
    /// deadline that is less than the shortest slice (250 us) away from another one may be missed, by less than
    /// [`Vcpu::late_bound`]. None: no slack guarantees it because the period is too short.
    ///
    /// Between an arrival and its deadline, d apart, the guaranteed time, bandwidth x (d - L), must be at least need x
    /// d (see [`Vcpu::late_bound`]).
    pub fn slack_for_all(&self) -> Option<Nanos> {
        let period = self.period()?;
        let blind = self.late_bound();
        let sure = period - blind;
        if sure == Nanos::ZERO {
            return None;
        }
        let stretched = Bandwidth::new(period, sure)?;
        let lost = self.need().of(blind);
        let slack = stretched.of(lost);
        (self.need().of(period) + slack <= period).then_some(slack)
    }

    /// (budget, period) with which a host that runs vCPUs in the order of deadlines keeps every deadline, also of jobs
    /// that arrive at any time beside others of this vCPU. For those it is half of the shortest period, and the least
    /// bandwidth U with which the RTAs need, in any time t, at most U (t - SLICE_MIN - ahead). `ahead` is (1 - U) times
    /// the longest window, for t shorter than the longest period, and else 0. None: no budget does, half of the
    /// shortest period is below 2 SLICE_MIN, or the longest one is above SLICE_MAX.
    ///
    /// Proof. A window of length L supplies U L before it ends, if the vCPU can use that. L is at most half of the
    /// shortest period and SLICE_MIN; if the window was prolonged, it counts from when the vCPU woke. Let a job miss
    /// its deadline d, and let r be the last time before d when no job with a deadline up to d was pending. From r on
    /// the guest (EDF) runs such jobs only: they need what all jobs need in the time d - r.
    ///
    /// At r the vCPU may have used up its share of the present window. Then its guest can publish nothing, but the
    /// vCPU runs before the next window ends, half of the shortest period later at most, when d is not over. From then
    /// on a window ends at d, or SLICE_MIN later at most: up to U SLICE_MIN comes too late.
    ///
    /// 1. d - r is shorter than the longest period. The vCPU has run for x of the present window, at most U L, and so
    ///    for x ns at least since the window began. So of what U supplies in the time until the window ends, at most
    ///    (1 - U) x is missing, at most U (1 - U) L. All other windows supply U.
    /// 2. Otherwise all jobs before r have their deadlines up to d, and are done. If the vCPU has run for more of the
    ///    present window than U times the time since that began, let r be when the busy time began in which it did so
    ///    last, and so on. Nothing was pending just before, all jobs since then have their deadlines up to d, and each
    ///    window that began since then was used up: a busy time goes on past its end. So in the time d - r, the longest
    ///    period at least, all jobs together need more than U supplies less U SLICE_MIN.
    ///
    /// Both contradict the condition. What the vCPU runs beyond its share before a check is paid from its saved time:
    /// its jobs are ahead of U by one of each RTA at most, less than its share of SLICE_MAX, which it may save.
    pub fn covering_budget(&self) -> Option<(Nanos, Nanos)> {
        let (shortest, longest) = (self.period()?, self.rtas.iter().map(Rta::period).max()?);
        if self.rtas.len() < 2 || !self.sporadic() {
            return self.budget();
        }
        let period = shortest.0 / 2;
        if period < 2 * SLICE_MIN.0 || longest > SLICE_MAX {
            return None;
        }
        let needs_in = |time: u64| -> u64 {
            let jobs = |rta: &Rta| time / rta.period.0 * rta.slice.0;
            self.rtas.iter().map(jobs).sum::<u64>() + time / shortest.0 * self.slack.0
        };
        // From the horizon on U supplies more than the sum of the bandwidths.
        let horizon = 8 * longest.0;
        let times = self.rtas.iter().flat_map(|rta| (1..=horizon / rta.period.0).map(|number| number * rta.period.0));
        let all = (horizon, self.bandwidth.of(Nanos(horizon)).0);
        let needs: Vec<(u64, u64)> = times.map(|time| (time, needs_in(time))).chain([all]).collect();
        let enough = |budget: u64| {
            let ahead = (period + SLICE_MIN.0) * (period - budget) / period + 1;
            needs.iter().all(|(time, need)| {
                let missing = SLICE_MIN.0 + if *time < longest.0 { ahead } else { 0 };
                let supply = u128::from(budget) * u128::from(time.saturating_sub(missing));
                u128::from(*need) * u128::from(period) <= supply
            })
        };
        let (mut low, mut high) = (self.bandwidth.of(Nanos(period)).0, period);
        if !enough(high) {
            return None;
        }
        while low < high {
            let middle = low + (high - low) / 2;
            if enough(middle) { high = middle } else { low = middle + 1 }
        }
        Some((Nanos(low), Nanos(period)))
    }

    /// (budget, period) in its shortest period, as in the paper's Table 2. None without RTAs.
    pub fn budget(&self) -> Option<(Nanos, Nanos)> {
        self.period().map(|period| (self.bandwidth.of(period), period))
    }
}

/// The bandwidth to reserve for a vCPU with these RTAs.
pub(crate) fn reserve(rtas: &[Rta], slack: Nanos) -> Result<Bandwidth, ModelError> {
    let Some(period) = rtas.iter().map(Rta::period).min() else { return Ok(Bandwidth::ZERO) };
    let sporadic = rtas.iter().any(|rta| rta.arrivals == Arrivals::Sporadic);
    let extra = if sporadic { slack + ROUNDING } else { slack };
    let need: Bandwidth = rtas.iter().map(Rta::bandwidth).sum();
    let bandwidth = need + Bandwidth::new(extra, period).unwrap_or(Bandwidth::ONE);
    if bandwidth > Bandwidth::ONE {
        return Err(ModelError::Overfull { bandwidth });
    }
    if bandwidth + Bandwidth::ppm(Vcpu::GRAIN_PPM) > Bandwidth::ONE {
        return Ok(Bandwidth::ONE);
    }
    Ok(bandwidth.max(Bandwidth::ppm(Vcpu::GRAIN_PPM)))
}

/// A VM or container with real-time vCPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tenant {
    /// The name of the VM or container.
    pub name: String,
    /// Its vCPUs with RTAs.
    pub vcpus: Vec<Vcpu>,
}

impl Tenant {
    /// The need of its RTAs, without slack.
    pub fn need(&self) -> Bandwidth {
        self.vcpus.iter().map(Vcpu::need).sum()
    }

    /// The sum of what its vCPUs reserve, slack included.
    pub fn bandwidth(&self) -> Bandwidth {
        self.vcpus.iter().map(Vcpu::bandwidth).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rta(slice_ms: u64, period_ms: u64) -> Rta {
        Rta::new(Nanos::from_millis(slice_ms), Nanos::from_millis(period_ms), Arrivals::Periodic).unwrap()
    }

    #[test]
    fn the_budgets_of_table_2() {
        let budgets = [(23, 30), (13, 20), (5, 10), (10, 100)].map(|(slice, period)| {
            Vcpu::new(vec![rta(slice, period)], Nanos::from_micros(500), None).unwrap().budget().unwrap()
        });
        let paper = [(23_500, 30), (13_500, 20), (5_500, 10), (10_500, 100)]
            .map(|(us, ms)| (Nanos::from_micros(us), Nanos::from_millis(ms)));
        assert_eq!(budgets, paper);
    }

    #[test]
    fn the_papers_slack_is_enough_for_its_tasks() {
        for (slice, period) in [(23, 30), (13, 20), (5, 10), (10, 100)] {
            let vcpu = Vcpu::new(vec![rta(slice, period)], Nanos::ZERO, None).unwrap();
            let enough = vcpu.slack_for_all().unwrap();
            assert!(enough <= Nanos::from_micros(500) && enough > Nanos::ZERO, "{enough}");
        }
        let memcached = Rta::new(Nanos::from_micros(58), Nanos::from_micros(500), Arrivals::Sporadic).unwrap();
        assert_eq!(Vcpu::new(vec![memcached], Nanos::ZERO, None).unwrap().slack_for_all(), None);
    }

    #[test]
    fn jobs_at_any_time_beside_longer_ones_need_more_than_the_sum() {
        let us = Nanos::from_micros;
        let covering = |rtas: &[(u64, u64)], arrivals, slack| {
            let rta = |(slice, period): &(u64, u64)| Rta::new(us(*slice), us(*period), arrivals).unwrap();
            Vcpu::new(rtas.iter().map(rta).collect(), us(slack), None).unwrap().covering_budget()
        };
        let sporadic = |rtas: &[(u64, u64)]| covering(rtas, Arrivals::Sporadic, 0);
        // 1.5 ms are needed by 5 ms, of which U may lack (1 - U) 2.75 ms and 250 us.
        let short = [(1_500, 5_000), (2_000, 100_000)];
        let (budget, period) = sporadic(&short).unwrap();
        assert_eq!((budget.0.div_ceil(1_000), period), (1_149, us(2_500)));
        // The longer job leaves that much: only the last 250 us count, at the end of its period.
        let (budget, _) = sporadic(&[(500, 5_000), (20_000, 100_000)]).unwrap();
        assert_eq!(budget.0.div_ceil(1_000), 752);
        // With slack, one alone, and periodic ones.
        assert!(covering(&short, Arrivals::Sporadic, 60) > sporadic(&short));
        assert_eq!(sporadic(&short[..1]), Some((us(1_500) + Nanos(3), us(5_000))));
        assert_eq!(covering(&short, Arrivals::Periodic, 0), Some((us(1_600), us(5_000))));
        assert_eq!(sporadic(&[(100, 900), (2_000, 100_000)]), None);
        assert_eq!(sporadic(&[(100, 5_000), (2_000, 101_000)]), None);
        assert_eq!(sporadic(&[(2_000, 4_000), (39_900, 80_000)]), None, "too much for one vCPU");
    }

    #[test]
    fn absurd_needs_are_refused() {
        let ask = |slice, period| Rta::new(Nanos(slice), Nanos(period), Arrivals::Sporadic);
        assert!(matches!(ask(0, 1_000_000), Err(ModelError::Slice { .. })));
        assert!(matches!(ask(2_000_000, 1_000_000), Err(ModelError::Slice { .. })));
        assert!(matches!(ask(1, 0), Err(ModelError::Period { .. })));
        assert!(matches!(ask(1, u64::MAX), Err(ModelError::Period { .. })));
        let two = Vcpu::new(vec![rta(6, 10), rta(5, 10)], Nanos::ZERO, None);
        assert!(matches!(two, Err(ModelError::Overfull { .. })));
    }
}
