//! vCPUs whose RTAs come and go while they run (RTVirt, section 4.3).
//!
//! Input: arrival and departure times of RTAs. Output: jobs and misses of each, and every vCPU's reservation over time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::{Options, Outcome, RtaResult, SimulatedVcpu, Simulation, Source};
use crate::admission::{Admission, Admitted, Reservation};
use crate::dpwrap::Demand;
use crate::model::{Rta, Vcpu};
use crate::units::{Bandwidth, Nanos};

/// An RTA that is present for a part of the time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemporaryRta {
    /// Index of its vCPU.
    pub vcpu: usize,
    /// CPU time in each period.
    pub rta: Rta,
    /// Its first job arrives this long after its request, but not before its admission.
    pub lead: Nanos,
    /// Time of its request. It is admitted at the end of the slice that runs then.
    pub from: Nanos,
    /// Its end: no job with a later deadline is released.
    pub until: Nanos,
}

/// A vCPU's reservation without RTAs, and its slack with RTAs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdleReservation {
    /// The reservation without RTAs.
    pub idle: Bandwidth,
    /// Slack added to its RTAs' needs, once per shortest period.
    pub slack: Nanos,
}

/// A change of a vCPU's bandwidth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// Time of the change.
    pub at: Nanos,
    /// Index of the vCPU.
    pub vcpu: usize,
    /// The new bandwidth.
    pub bandwidth: Bandwidth,
}

/// Simulates `vcpus` unpinned vCPUs on `cpus` CPUs whose RTAs come and go (RTVirt, section 4.3). Each new RTA is
/// admitted beside the current reservations, or refused: then none of its jobs arrives. Returns a [`RtaResult`] per
/// temporary RTA, in the given order, and every change of bandwidth.
pub fn simulate_stays(
    cpus: u32,
    vcpus: usize,
    stays: &[TemporaryRta],
    between: IdleReservation,
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
    // The results are sorted by vCPU.
    outcome.rtas = turnover.given_order(outcome.rtas);
    (outcome, turnover.changes)
}

/// The RTAs that come and go.
struct Turnover {
    admission: Admission,
    between: IdleReservation,
    /// (index in the caller's list, RTA), sorted by vCPU, then by time.
    stays: Vec<(usize, TemporaryRta)>,
    /// Whether each of these is present.
    presence: Vec<Presence>,
    held: Vec<Bandwidth>,
    changes: Vec<Change>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Presence {
    Future,
    Present,
    Ended,
}

impl Turnover {
    fn new(admission: Admission, vcpus: usize, stays: &[TemporaryRta], between: IdleReservation) -> Self {
        let mut stays: Vec<(usize, TemporaryRta)> =
            stays.iter().filter(|stay| stay.vcpu < vcpus).cloned().enumerate().collect();
        stays.sort_by_key(|(_, stay)| (stay.vcpu, stay.from));
        let presence = vec![Presence::Future; stays.len()];
        let held = vec![between.idle; vcpus];
        Self { admission, between, stays, presence, held, changes: Vec::new() }
    }

    /// A vCPU's reservation for its present RTAs.
    fn need(&self, vcpu: usize) -> Bandwidth {
        let there = self
            .stays
            .iter()
            .zip(&self.presence)
            .filter(|((_, stay), is)| stay.vcpu == vcpu && **is == Presence::Present);
        let rtas: Vec<Rta> = there.map(|((_, stay), _)| stay.rta.clone()).collect();
        if rtas.is_empty() {
            return self.between.idle;
        }
        Vcpu::new(rtas, self.between.slack, None).map_or(Bandwidth::ONE, |vcpu| vcpu.bandwidth())
    }

    /// Tries to admit the vCPU's current need beside all others. False: nothing has changed.
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

    fn set(&mut self, at: usize, presence: Presence) {
        if let Some(is) = self.presence.get_mut(at) {
            *is = presence;
        }
    }

    fn given_order(&self, rtas: Vec<RtaResult>) -> Vec<RtaResult> {
        let mut placed: Vec<(usize, RtaResult)> = self.stays.iter().map(|(place, _)| *place).zip(rtas).collect();
        placed.sort_by_key(|(place, _)| *place);
        placed.into_iter().map(|(_, result)| result).collect()
    }
}

impl Simulation<'_> {
    /// Adds vCPUs without RTAs, and the sources of all RTAs that will come.
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
            self.guests.push(SimulatedVcpu { id, jobs: BinaryHeap::new(), rtas, slice_max: None, last_cpu: None });
            self.demands.push(Demand::NONE);
        }
    }

    /// At the start of a slice: removes RTAs that end; admits or refuses RTAs that arrive.
    fn turn_over(&mut self, turnover: &mut Turnover) {
        let now = self.now;
        for wanted in [Presence::Present, Presence::Future] {
            for at in 0..turnover.stays.len() {
                let (Some((_, stay)), Some(is)) = (turnover.stays.get(at), turnover.presence.get(at)) else { continue };
                let (vcpu, from) = (stay.vcpu, stay.from + stay.lead);
                let due = if wanted == Presence::Present { stay.until } else { stay.from };
                if *is != wanted || due > now {
                    continue;
                }
                let next = if wanted == Presence::Present { Presence::Ended } else { Presence::Present };
                turnover.set(at, next);
                if !turnover.admit(vcpu, now) {
                    turnover.set(at, Presence::Ended);
                    continue;
                }
                let (Some(guest), Some(source)) = (self.guests.get(vcpu), self.sources.get_mut(at)) else { continue };
                source.there = next == Presence::Present;
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

    fn stay(vcpu: usize, slice_ms: u64, period_ms: u64, from_ms: u64, until_ms: u64) -> TemporaryRta {
        let rta = Rta::new(MS(slice_ms), MS(period_ms), Arrivals::Periodic).unwrap();
        TemporaryRta { vcpu, rta, lead: Nanos::ZERO, from: MS(from_ms), until: MS(until_ms) }
    }

    fn run(cpus: u32, vcpus: usize, stays: &[TemporaryRta]) -> (Outcome, Vec<Change>) {
        let between = IdleReservation { idle: Bandwidth::ppm(100_000), slack: Nanos::from_micros(500) };
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
        // In the order of the list, not of time or vCPU.
        let stays = [stay(1, 9, 20, 500, 1_500), stay(0, 15, 16, 0, 2_000), stay(1, 17, 20, 1_600, 1_900)];
        let (outcome, changes) = run(2, 2, &stays);
        let jobs: Vec<u64> = outcome.rtas.iter().map(|rta| rta.jobs).collect();
        // RTAs are admitted at the end of a slice, so up to one job of each is missing.
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
        // The first RTA is refused, too: another vCPU has a tenth beside it.
        assert_eq!(outcome.rtas.iter().map(|rta| rta.jobs).collect::<Vec<_>>(), [0, 45, 8]);
        assert!(changes.iter().all(|change| change.bandwidth <= Bandwidth::ONE));
    }
}
