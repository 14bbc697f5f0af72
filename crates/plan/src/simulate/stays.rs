//! vCPUs whose RTAs come and go while they run (RTVirt, section 4.3).
//!
//! In: who comes when, and for how long. Out: jobs and misses of each, and what every vCPU had reserved from when to
//! when.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::{Guest, Options, Outcome, RtaResult, Simulation, Source};
use crate::admission::{Admission, Admitted, Reservation};
use crate::dpwrap::Demand;
use crate::model::{Rta, Vcpu};
use crate::units::{Bandwidth, Nanos};

/// An RTA that is there for a part of the time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stay {
    /// Index of its vCPU.
    pub vcpu: usize,
    /// What it needs.
    pub rta: Rta,
    /// Its first job comes so long after it asked, at the earliest when it is admitted.
    pub lead: Nanos,
    /// When it asks to be admitted; it is at the end of the slice that runs then.
    pub from: Nanos,
    /// It ends: no job is released whose deadline is later.
    pub until: Nanos,
}

/// What a vCPU has while it has no RTA, and beside one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Between {
    /// Reserved while it has none.
    pub idle: Bandwidth,
    /// Added to the need of those it has, once in the shortest period.
    pub slack: Nanos,
}

/// A vCPU's bandwidth from a time on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// From.
    pub at: Nanos,
    /// Index of the vCPU.
    pub vcpu: usize,
    /// What it has.
    pub bandwidth: Bandwidth,
}

/// Simulates `vcpus` unpinned vCPUs on `cpus` CPUs whose RTAs come and go (RTVirt, section 4.3). Each coming is
/// admitted beside what all hold then, or refused: then none of its jobs comes. Of [`RtaResult`]s there is one for each
/// stay, in the order given, and every change of bandwidth.
pub fn simulate_stays(
    cpus: u32,
    vcpus: usize,
    stays: &[Stay],
    between: Between,
    options: &Options,
) -> (Outcome, Vec<Change>) {
    let shared = vec![true; usize::try_from(cpus).unwrap_or(0)];
    let empty = Admitted { home: Vec::new(), shared, total: Bandwidth::ZERO };
    let mut run = Simulation::new(&[], &empty, options);
    let mut turnover = Turnover::new(Admission::new(cpus, Bandwidth::ZERO), vcpus, stays, between);
    run.enter(&turnover);
    while run.now < options.duration {
        run.turn_over(&mut turnover);
        run.release(false);
        run.plan();
        while run.now < run.slice_end {
            run.step();
        }
    }
    let mut outcome = run.finish();
    // They were sorted by vCPU.
    outcome.rtas = turnover.given_order(outcome.rtas);
    (outcome, turnover.changes)
}

/// Who comes and goes when.
struct Turnover {
    admission: Admission,
    between: Between,
    /// By vCPU, then by time, and their places in the caller's list.
    stays: Vec<(usize, Stay)>,
    /// Of each of these.
    standing: Vec<Standing>,
    held: Vec<Bandwidth>,
    changes: Vec<Change>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    ToCome,
    There,
    Gone,
}

impl Turnover {
    fn new(admission: Admission, vcpus: usize, stays: &[Stay], between: Between) -> Self {
        let mut stays: Vec<(usize, Stay)> =
            stays.iter().filter(|stay| stay.vcpu < vcpus).cloned().enumerate().collect();
        stays.sort_by_key(|(_, stay)| (stay.vcpu, stay.from));
        let standing = vec![Standing::ToCome; stays.len()];
        let held = vec![between.idle; vcpus];
        Self { admission, between, stays, standing, held, changes: Vec::new() }
    }

    /// What a vCPU needs for those that are there.
    fn need(&self, vcpu: usize) -> Bandwidth {
        let there = self
            .stays
            .iter()
            .zip(&self.standing)
            .filter(|((_, stay), is)| stay.vcpu == vcpu && **is == Standing::There);
        let rtas: Vec<Rta> = there.map(|((_, stay), _)| stay.rta.clone()).collect();
        if rtas.is_empty() {
            return self.between.idle;
        }
        Vcpu::new(rtas, self.between.slack, None).map_or(Bandwidth::ONE, |vcpu| vcpu.bandwidth())
    }

    /// Whether all hold what this vCPU needs now; if not, nothing has changed.
    fn admit(&mut self, vcpu: usize, now: Nanos) -> bool {
        let bandwidth = self.need(vcpu);
        let mut held = self.held.clone();
        if let Some(own) = held.get_mut(vcpu) {
            *own = bandwidth;
        }
        let asked: Vec<Reservation> =
            held.iter().map(|bandwidth| Reservation { bandwidth: *bandwidth, affinity: None }).collect();
        let admitted = self.admission.admit(&asked).is_ok();
        if admitted {
            self.held = held;
            self.changes.push(Change { at: now, vcpu, bandwidth });
        }
        admitted
    }

    fn set(&mut self, at: usize, standing: Standing) {
        if let Some(is) = self.standing.get_mut(at) {
            *is = standing;
        }
    }

    fn given_order(&self, rtas: Vec<RtaResult>) -> Vec<RtaResult> {
        let mut placed: Vec<(usize, RtaResult)> = self.stays.iter().map(|(place, _)| *place).zip(rtas).collect();
        placed.sort_by_key(|(place, _)| *place);
        placed.into_iter().map(|(_, result)| result).collect()
    }
}

impl Simulation<'_> {
    /// Takes in vCPUs without RTAs, and all who will come.
    fn enter(&mut self, turnover: &Turnover) {
        for (vcpu, bandwidth) in turnover.held.iter().enumerate() {
            let id = self.planner.add(*bandwidth, None);
            self.by_id.resize(self.by_id.len().max(id.index() + 1), vcpu);
            let from = self.sources.len();
            for (_, stay) in turnover.stays.iter().filter(|(_, stay)| stay.vcpu == vcpu) {
                let (rta, until) = (stay.rta.clone(), stay.until);
                self.sources.push(Source { rta, vcpu, pending: 0, next: Nanos::ZERO, there: false, until });
                self.outcome.rtas.push(RtaResult { vcpu, ..RtaResult::default() });
            }
            let rtas = from..self.sources.len();
            self.guests.push(Guest { id, jobs: BinaryHeap::new(), rtas, slice_max: None, last_cpu: None });
            self.demands.push(Demand::NONE);
        }
    }

    /// At a slice's beginning: who is to go goes, who is to come is admitted or refused.
    fn turn_over(&mut self, turnover: &mut Turnover) {
        let now = self.now;
        for wanted in [Standing::There, Standing::ToCome] {
            for at in 0..turnover.stays.len() {
                let (Some((_, stay)), Some(is)) = (turnover.stays.get(at), turnover.standing.get(at)) else { continue };
                let (vcpu, from) = (stay.vcpu, stay.from + stay.lead);
                let due = if wanted == Standing::There { stay.until } else { stay.from };
                if *is != wanted || due > now {
                    continue;
                }
                let next = if wanted == Standing::There { Standing::Gone } else { Standing::There };
                turnover.set(at, next);
                if !turnover.admit(vcpu, now) {
                    turnover.set(at, Standing::Gone);
                    continue;
                }
                let (Some(guest), Some(source)) = (self.guests.get(vcpu), self.sources.get_mut(at)) else { continue };
                source.there = next == Standing::There;
                if source.there {
                    source.next = now.max(from);
                    self.arrivals.push(Reverse((source.next, at)));
                }
                let held = turnover.held.get(vcpu).copied().unwrap_or_default();
                self.planner.change(guest.id, held, None);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Arrivals;

    const MS: fn(u64) -> Nanos = Nanos::from_millis;

    fn stay(vcpu: usize, slice_ms: u64, period_ms: u64, from_ms: u64, until_ms: u64) -> Stay {
        let rta = Rta::new(MS(slice_ms), MS(period_ms), Arrivals::Periodic).unwrap();
        Stay { vcpu, rta, lead: Nanos::ZERO, from: MS(from_ms), until: MS(until_ms) }
    }

    fn run(cpus: u32, vcpus: usize, stays: &[Stay]) -> (Outcome, Vec<Change>) {
        let between = Between { idle: Bandwidth::ppm(100_000), slack: Nanos::from_micros(500) };
        let options = Options {
            duration: MS(2_000),
            record: Nanos::ZERO,
            sporadic_delay: Nanos::ZERO,
            seed: 1,
            scattered: false,
        };
        simulate_stays(cpus, vcpus, stays, between, &options)
    }

    #[test]
    fn who_comes_and_goes_has_its_jobs_and_disturbs_nobody() {
        // In the order of their places in the list, not of time or vCPU.
        let stays = [stay(1, 9, 20, 500, 1_500), stay(0, 15, 16, 0, 2_000), stay(1, 17, 20, 1_600, 1_900)];
        let (outcome, changes) = run(2, 2, &stays);
        let jobs: Vec<u64> = outcome.rtas.iter().map(|rta| rta.jobs).collect();
        // It is admitted where a slice ends, so that up to one job of each is not there.
        assert!((49..=50).contains(&jobs[0]) && jobs[1] == 125 && (14..=15).contains(&jobs[2]), "{jobs:?}");
        assert_eq!(outcome.missed(), 0);
        assert_eq!(outcome.rtas.iter().map(|rta| rta.vcpu).collect::<Vec<_>>(), [1, 0, 1]);
        let of: Vec<(usize, u64)> =
            changes.iter().map(|change| (change.vcpu, change.bandwidth.of(MS(1_000)).0 / 1_000_000)).collect();
        // 15.5 in 16; 9.5 in 20; idle; 17.5 in 20; idle.
        assert_eq!(of, [(0, 968), (1, 475), (1, 100), (1, 875), (1, 100)]);
    }

    #[test]
    fn who_does_not_fit_is_refused_and_has_no_job() {
        let stays = [stay(0, 15, 16, 0, 2_000), stay(1, 17, 20, 100, 1_000), stay(1, 1, 100, 1_100, 1_900)];
        let (outcome, changes) = run(1, 2, &stays);
        assert_eq!(outcome.missed(), 0);
        // The first is refused too: beside it another vCPU has its tenth.
        assert_eq!(outcome.rtas.iter().map(|rta| rta.jobs).collect::<Vec<_>>(), [0, 45, 8]);
        assert!(changes.iter().all(|change| change.bandwidth <= Bandwidth::ONE));
    }
}
