//! Which vCPU is at which place, and until when: in the order of deadlines if every vCPU is pinned to one CPU (or there
//! is one), or else by slices that all vCPUs share.

use std::sync::Arc;

use ontime_tenants::ThreadId;

use crate::admit::Reservations;
use crate::model::{NEVER, PROMPT, Snapshot, Tally, Threads};
use crate::policy::edf::EdfCpu;
use crate::policy::slices::Slices;

/// How vCPUs are planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Planning {
    /// For each CPU in the order of deadlines if each vCPU is pinned to one, or there is one; or else by slices.
    #[default]
    Best,
    /// By slices (DP-WRAP), always.
    Slices,
}

/// The plan for all vCPUs with reservations.
#[derive(Debug)]
pub(crate) enum Schedule {
    /// By slices.
    Slices(Box<Slices>),
    /// By deadline, for each CPU.
    Edf(Vec<EdfCpu>),
}

impl Schedule {
    /// A plan for vCPUs that are at [`crate::model::Place::Entitled`] now. `tally` gives each vCPU its counters.
    pub(crate) fn new(
        reservations: &Reservations,
        planning: Planning,
        now: u64,
        tally: impl Fn(ThreadId) -> Arc<Tally>,
    ) -> Self {
        let cpus = reservations.cpus.len();
        // Nothing keeps a vCPU with a wider affinity on its home: on another CPU it would take the time of that one's.
        let stay = cpus == 1 || reservations.vcpus.iter().all(|vcpu| vcpu.home.is_some() && vcpu.pinned);
        // Prompt vCPUs are served best by slices, within which the order is free.
        let prompt = cpus == 1 && reservations.vcpus.iter().any(|vcpu| vcpu.period.0 <= PROMPT);
        if planning == Planning::Slices || !stay || prompt {
            return Self::Slices(Box::new(Slices::new(reservations, now, tally)));
        }
        Self::Edf((0..cpus).map(|cpu| EdfCpu::new(reservations, cpu, now, &tally)).collect())
    }

    /// The parts on which the pacers of different CPUs can work at the same time: by deadline one for each CPU, in
    /// their order, or else one for all CPUs.
    pub(crate) fn parts(self) -> Vec<Self> {
        match self {
            Self::Slices(_) => vec![self],
            Self::Edf(cpus) => cpus.into_iter().map(|cpu| Self::Edf(vec![cpu])).collect(),
        }
    }

    /// Whether each vCPU stays on one CPU: by the plan, and by its affinity.
    pub(crate) fn has_no_migration(&self) -> bool {
        match self {
            Self::Slices(_) => false,
            Self::Edf(cpus) => cpus.iter().all(EdfCpu::has_no_migration),
        }
    }

    /// Whether the vCPU with this number is in this plan.
    pub(crate) fn has(&self, vcpu: usize) -> bool {
        match self {
            Self::Slices(_) => true,
            Self::Edf(cpus) => cpus.iter().any(|cpu| cpu.has(vcpu)),
        }
    }

    /// Takes each vCPU's first reading; earlier CPU time is not counted. The pacer that keeps the shares from `now` on
    /// calls this: what vCPUs use between this call and the first check is charged to them.
    pub(crate) fn begin(&mut self, now: u64, threads: &mut impl Threads) {
        match self {
            Self::Slices(slices) => slices.begin(now, threads),
            Self::Edf(cpus) => cpus.iter_mut().for_each(|cpu| cpu.begin(now, threads)),
        }
    }

    /// Continues the plan `old`: vCPUs of both keep their place, debt and period. To be called after [`Self::begin`],
    /// when `old` [can be replaced](Self::can_be_replaced).
    pub(crate) fn take_over(&mut self, old: &Schedule) {
        match (self, old) {
            (Self::Slices(new), Self::Slices(old)) => new.take_over(old),
            (Self::Edf(new), Self::Edf(old)) => {
                new.iter_mut().for_each(|cpu| old.iter().for_each(|old| cpu.take_over(old)));
            }
            (Self::Slices(new), Self::Edf(old)) => {
                new.take_over_accounts(|id, now| old.iter().find_map(|cpu| cpu.account(id, now)));
            }
            (Self::Edf(new), Self::Slices(old)) => {
                new.iter_mut().for_each(|cpu| cpu.take_over_accounts(|id| old.account(id)));
            }
        }
    }

    /// Whether another plan may take over now.
    pub(crate) fn can_be_replaced(&self, now: u64) -> bool {
        match self {
            Self::Slices(slices) => slices.is_calm() || slices.is_empty() || now >= slices.end(),
            Self::Edf(_) => true,
        }
    }

    /// Whether a calm time has just ended, so that the pacers of other CPUs must check. Clears the flag.
    pub(crate) fn take_calm_ended(&mut self) -> bool {
        match self {
            Self::Slices(slices) => slices.take_calm_ended(),
            Self::Edf(_) => false,
        }
    }

    /// Records how long a step on a CPU took, ns. Checks must not follow each other so fast that vCPUs have no time to
    /// run between them.
    pub(crate) fn record_cost(&mut self, cpu: usize, ns: u64) {
        match self {
            Self::Slices(slices) => slices.record_cost(ns),
            Self::Edf(cpus) => cpus.iter_mut().filter(|one| one.is_on(cpu)).for_each(|one| one.record_cost(ns)),
        }
    }

    /// Does what is due on a CPU (by the planner's number). Returns when its pacer is to check again.
    pub(crate) fn step(&mut self, cpu: usize, now: u64, threads: &mut impl Threads) -> u64 {
        match self {
            Self::Slices(slices) => slices.step(cpu, now, threads),
            Self::Edf(cpus) => cpus.iter_mut().find(|one| one.is_on(cpu)).map_or(NEVER, |one| one.step(now, threads)),
        }
    }

    /// The state of a CPU's plan, for the trace of a test.
    #[cfg(test)]
    pub(crate) fn describe(&self, cpu: usize, now: u64) -> String {
        match self {
            Self::Slices(slices) => format!("{slices:?}"),
            Self::Edf(cpus) => cpus.iter().filter(|one| one.is_on(cpu)).map(|one| one.describe(now)).collect(),
        }
    }

    /// Adds the present state to the snapshot, as far as its lists have room.
    pub(crate) fn write_snapshot(&self, now: u64, into: &mut Snapshot) {
        match self {
            Self::Slices(slices) => slices.write_snapshot(now, into),
            Self::Edf(cpus) => cpus.iter().for_each(|cpu| cpu.write_snapshot(now, into)),
        }
    }
}

#[cfg(test)]
#[path = "schedule_tests.rs"]
mod tests;
