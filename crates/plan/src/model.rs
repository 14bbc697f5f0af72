//! Real-time applications (RTAs), the vCPUs that run them, and the tenants of these vCPUs.

use std::collections::BTreeSet;

use thiserror::Error;

use crate::dpwrap::SLICE_MIN;
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
