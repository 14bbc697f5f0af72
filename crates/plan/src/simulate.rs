//! Discrete-event simulation of the planner: RTAs in guests under EDF, their vCPUs under DP-WRAP, without overheads.
//!
//! Input: tenants, CPUs, duration. Output: jobs and misses of each RTA, the planner's work, and the schedule's
//! beginning. Every vCPU gets only its planned time. A host gives unused time to backlogs and to bulk; this simulation
//! does not, so it may count a miss that would not occur on a host.
//!
//! The simulated guests publish what the guest module publishes: a pending job's deadline; for a vCPU with one waiting
//! RTA, the earliest next arrival plus its period; beside other RTAs, a waiting periodic RTA's next arrival. A waiting
//! sporadic RTA beside others limits the slices to the vCPU's slack, because at its arrival other jobs may have used
//! time already.

mod stays;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::admission::Admitted;
use crate::dpwrap::{Demand, Planner, SLICE_MIN};
use crate::model::{Arrivals, Rta, Vcpu};
use crate::segment::{Segment, VcpuId};
use crate::units::Nanos;

pub use stays::{Change, IdleReservation, TemporaryRta, simulate_stays};

/// Options of a simulation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Simulated time.
    pub duration: Nanos,
    /// Length of the recorded schedule from the beginning.
    pub record: Nanos,
    /// Sporadic RTAs: greatest additional delay of an arrival. Each is drawn uniformly from 0.
    pub sporadic_delay: Nanos,
    /// Seed of the random numbers; the same seed gives the same arrivals.
    pub seed: u64,
    /// Whether periodic RTAs start at a random time of their first period instead of all together.
    pub scattered: bool,
}

/// The results of an RTA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RtaResult {
    /// Index of its vCPU.
    pub vcpu: usize,
    /// Jobs with a deadline within the simulated time.
    pub jobs: u64,
    /// How many of those missed their deadline.
    pub missed: u64,
    /// The longest time from arrival to completion.
    pub response_max: Nanos,
    /// The longest time from deadline to completion.
    pub late_max: Nanos,
}

/// An interval of the recorded schedule: an RTA on a CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The CPU, from 0.
    pub cpu: u32,
    /// Index of the vCPU.
    pub vcpu: usize,
    /// Index of the RTA, in the order of vCPUs and RTAs.
    pub rta: usize,
    /// Start.
    pub start: Nanos,
    /// End.
    pub end: Nanos,
}

/// The results of a simulation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Outcome {
    /// Per RTA, in the order of vCPUs and RTAs.
    pub rtas: Vec<RtaResult>,
    /// Number of planned slices.
    pub slices: u64,
    /// Number of plans made in the middle of a slice.
    pub replans: u64,
    /// How often a vCPU started on another CPU than its last.
    pub migrations: u64,
    /// How often a CPU started another vCPU than its last.
    pub switches: u64,
    /// CPU time used by RTAs.
    pub used: Nanos,
    /// The recorded schedule.
    pub runs: Vec<Run>,
    /// The deadlines within it: (RTA, time).
    pub deadlines: Vec<(usize, Nanos)>,
}

impl Outcome {
    /// Jobs of all RTAs.
    pub fn jobs(&self) -> u64 {
        self.rtas.iter().map(|rta| rta.jobs).sum()
    }

    /// Missed deadlines of all RTAs.
    pub fn missed(&self) -> u64 {
        self.rtas.iter().map(|rta| rta.missed).sum()
    }
}

/// Simulates vCPUs as admitted. vCPUs without RTAs stay idle. An overloaded set (a manually created `admitted`) is
/// planned as far as the CPUs suffice.
pub fn simulate(vcpus: &[Vcpu], admitted: &Admitted, options: &Options) -> Outcome {
    let mut run = Simulation::new(vcpus, admitted, options);
    while run.now < options.duration {
        run.release(false);
        run.plan();
        while run.now < run.slice_end {
            run.step();
        }
    }
    run.finish()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Job {
    deadline: Nanos,
    rta: usize,
    arrival: Nanos,
    left: Nanos,
}

struct Source {
    rta: Rta,
    vcpu: usize,
    pending: u64,
    /// The earliest next arrival; for a periodic RTA the next arrival.
    next: Nanos,
    /// Whether the RTA is present. It releases no job with a deadline after `until`.
    there: bool,
    until: Nanos,
}

struct SimulatedVcpu {
    id: VcpuId,
    jobs: BinaryHeap<Reverse<Job>>,
    rtas: std::ops::Range<usize>,
    /// The longest slice, if the mix of RTAs requires a limit.
    slice_max: Option<Nanos>,
    last_cpu: Option<u32>,
}

struct Simulation<'a> {
    options: &'a Options,
    planner: Planner,
    guests: Vec<SimulatedVcpu>,
    sources: Vec<Source>,
    arrivals: BinaryHeap<Reverse<(Nanos, usize)>>,
    demands: Vec<Demand>,
    /// Per CPU: the running guest and the end of its segment.
    running: Vec<Option<(usize, Nanos)>>,
    on_cpu: Vec<Option<usize>>,
    by_id: Vec<usize>,
    random: u64,
    now: Nanos,
    slice_end: Nanos,
    outcome: Outcome,
}

impl<'a> Simulation<'a> {
    fn new(vcpus: &[Vcpu], admitted: &Admitted, options: &'a Options) -> Self {
        let mut planner = Planner::new(&admitted.shared);
        let mut guests = Vec::new();
        let mut sources = Vec::new();
        let mut by_id = Vec::new();
        for (index, vcpu) in vcpus.iter().enumerate() {
            let id = planner.add(vcpu.bandwidth(), admitted.home.get(index).copied().flatten());
            by_id.resize(by_id.len().max(id.index() + 1), index);
            let from = sources.len();
            sources.extend(vcpu.rtas().iter().map(|rta| Source {
                rta: rta.clone(),
                vcpu: index,
                pending: 0,
                next: Nanos::ZERO,
                there: true,
                until: Nanos::MAX,
            }));
            let mixed = vcpu.rtas().len() > 1 && vcpu.sporadic();
            let slice_max = mixed.then(|| vcpu.slack().max(SLICE_MIN));
            guests.push(SimulatedVcpu {
                id,
                jobs: BinaryHeap::new(),
                rtas: from..sources.len(),
                slice_max,
                last_cpu: None,
            });
        }
        let cpus = admitted.shared.len();
        let rtas = sources.iter().map(|source| RtaResult { vcpu: source.vcpu, ..RtaResult::default() }).collect();
        let mut run = Self {
            options,
            planner,
            demands: vec![Demand::NONE; guests.len()],
            guests,
            sources,
            arrivals: BinaryHeap::new(),
            running: vec![None; cpus],
            on_cpu: vec![None; cpus],
            by_id,
            random: options.seed,
            now: Nanos::ZERO,
            slice_end: Nanos::ZERO,
            outcome: Outcome { rtas, ..Outcome::default() },
        };
        run.first_arrivals();
        run
    }

    fn first_arrivals(&mut self) {
        for index in 0..self.sources.len() {
            let Some((period, arrivals)) = self.sources.get(index).map(|s| (s.rta.period(), s.rta.arrivals())) else {
                continue;
            };
            let first = match arrivals {
                Arrivals::Periodic if !self.options.scattered => Nanos::ZERO,
                Arrivals::Periodic => self.draw(period - Nanos(1)),
                Arrivals::Sporadic => self.draw(self.options.sporadic_delay),
            };
            if let Some(source) = self.sources.get_mut(index).filter(|_| arrivals == Arrivals::Periodic) {
                source.next = first;
            }
            self.arrivals.push(Reverse((first, index)));
        }
    }

    /// Uniform from 0 to `most` (splitmix64; the bias of the remainder is below 2^-20 for all times here).
    fn draw(&mut self, most: Nanos) -> Nanos {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Nanos((z ^ (z >> 31)) % most.0.saturating_add(1))
    }

    /// Releases due jobs; in the middle of a slice also wakes vCPUs. True if the plan changed.
    fn release(&mut self, inside: bool) -> bool {
        let mut changed = false;
        while let Some(&Reverse((at, index))) = self.arrivals.peek().filter(|due| due.0.0 <= self.now) {
            self.arrivals.pop();
            let Some(source) = self.sources.get_mut(index) else { continue };
            let (period, vcpu) = (source.rta.period(), source.vcpu);
            if at + period > source.until {
                source.there = false;
                continue;
            }
            source.pending += 1;
            source.next = at + period;
            let job = Job { deadline: at + period, rta: index, arrival: at, left: source.rta.slice() };
            if job.deadline <= self.options.record {
                self.outcome.deadlines.push((index, job.deadline));
            }
            let sporadic = source.rta.arrivals() == Arrivals::Sporadic;
            let delay = if sporadic { self.draw(self.options.sporadic_delay) } else { Nanos::ZERO };
            self.arrivals.push(Reverse((at + period + delay, index)));
            if let Some(guest) = self.guests.get_mut(vcpu) {
                guest.jobs.push(Reverse(job));
                if inside && self.planner.wake(guest.id, self.now) {
                    self.outcome.replans += 1;
                    changed = true;
                }
            }
        }
        changed
    }

    fn plan(&mut self) {
        let mut longest = Nanos::MAX;
        for guest in &self.guests {
            let sources = self.sources.get(guest.rtas.clone()).unwrap_or_default();
            let waiting = sources.iter().filter(|source| source.there && source.pending == 0);
            let next = if sources.iter().filter(|source| source.there).count() == 1 {
                waiting.map(|one| one.next.max(self.now) + one.rta.period()).min()
            } else {
                waiting.filter(|s| s.rta.arrivals() == Arrivals::Periodic).map(|s| s.next).min()
            };
            let pending = guest.jobs.peek().map(|job| job.0.deadline);
            let deadline = next.into_iter().chain(pending).min().unwrap_or(Nanos::MAX);
            if let Some(demand) = self.demands.get_mut(guest.id.index()) {
                *demand = Demand { deadline, idle: guest.jobs.is_empty() };
            }
            longest = guest.slice_max.map_or(longest, |most| longest.min(most));
        }
        self.planner.set_slices(SLICE_MIN, longest.min(crate::dpwrap::SLICE_MAX));
        // Events after the simulated time are not counted.
        self.slice_end = self.planner.plan(self.now, &self.demands).min(self.options.duration);
        self.outcome.slices += 1;
        self.dispatch();
    }

    /// Sets the running guest of each CPU according to the plan.
    fn dispatch(&mut self) {
        for cpu in 0..self.running.len() {
            let segments = self.planner.cpu(cpu);
            let at = segments.partition_point(|segment| segment.end <= self.now);
            let current = segments.get(at).filter(|segment| segment.start <= self.now).copied();
            let now = current.and_then(|Segment { vcpu, end, .. }| Some((*self.by_id.get(vcpu.index())?, end)));
            if let Some(running) = self.running.get_mut(cpu) {
                *running = now;
            }
            let (Some((guest, _)), Some(last)) = (now, self.on_cpu.get_mut(cpu)) else { continue };
            if *last == Some(guest) {
                continue;
            }
            *last = Some(guest);
            self.outcome.switches += 1;
            let cpu = u32::try_from(cpu).ok();
            if let Some(guest) = self.guests.get_mut(guest) {
                self.outcome.migrations += u64::from(guest.last_cpu.is_some() && guest.last_cpu != cpu);
                guest.last_cpu = cpu;
            }
        }
    }

    /// Advances to the next event: an arrival, a job's completion, or a segment's end.
    fn step(&mut self) {
        let mut until = self.slice_end;
        if let Some(Reverse((arrival, _))) = self.arrivals.peek() {
            until = until.min(*arrival);
        }
        for (guest, end) in self.running.iter().flatten() {
            until = until.min(*end);
            if let Some(Reverse(job)) = self.guests.get(*guest).and_then(|guest| guest.jobs.peek()) {
                until = until.min(self.now + job.left);
            }
        }
        let slept = self.advance(until);
        self.now = until;
        let mut changed = false;
        if self.now < self.slice_end {
            changed = self.release(true);
            for guest in slept {
                let Some(guest) = self.guests.get(guest).filter(|guest| guest.jobs.is_empty()) else { continue };
                if self.planner.sleep(guest.id, self.now) {
                    self.outcome.replans += 1;
                    changed = true;
                }
            }
        }
        let ended = self.running.iter().flatten().any(|(_, end)| *end <= self.now);
        // An idle CPU stays idle until the slice or the plan ends, because segments have no gaps.
        if self.now < self.slice_end && (changed || ended) {
            self.dispatch();
        }
    }

    /// Runs all CPUs until then. Returns guests that completed their last pending job.
    fn advance(&mut self, until: Nanos) -> Vec<usize> {
        let mut slept = Vec::new();
        let ran = until - self.now;
        for (cpu, running) in (0_u32..).zip(&self.running) {
            let Some((index, _)) = running else { continue };
            let Some(guest) = self.guests.get_mut(*index) else { continue };
            let Some(mut top) = guest.jobs.peek_mut() else { continue };
            let job = &mut top.0;
            job.left = job.left - ran;
            self.outcome.used = self.outcome.used + ran;
            let (rta, done) = (job.rta, (job.left == Nanos::ZERO).then_some(*job));
            if done.is_some() {
                std::collections::binary_heap::PeekMut::pop(top);
            } else {
                drop(top);
            }
            if self.now < self.options.record {
                record(&mut self.outcome.runs, Run { cpu, vcpu: *index, rta, start: self.now, end: until });
            }
            if let Some(job) = done {
                if let Some(source) = self.sources.get_mut(job.rta) {
                    source.pending -= 1;
                }
                if let Some(result) = self.outcome.rtas.get_mut(job.rta) {
                    result.ended(&job, until, self.options.duration);
                }
                if guest.jobs.is_empty() {
                    slept.push(*index);
                }
            }
        }
        slept
    }

    /// Counts the jobs that were never completed.
    fn finish(mut self) -> Outcome {
        for guest in &mut self.guests {
            for Reverse(job) in guest.jobs.drain() {
                if let Some(result) = self.outcome.rtas.get_mut(job.rta) {
                    result.ended(&job, self.now.max(job.deadline + Nanos(1)), self.options.duration);
                }
            }
        }
        self.outcome.runs.sort_by_key(|run| (run.cpu, run.start));
        self.outcome
    }
}

impl RtaResult {
    fn ended(&mut self, job: &Job, at: Nanos, horizon: Nanos) {
        if job.deadline > horizon {
            return;
        }
        self.jobs += 1;
        self.missed += u64::from(at > job.deadline);
        self.response_max = self.response_max.max(at - job.arrival);
        self.late_max = self.late_max.max(at - job.deadline);
    }
}

/// Adds a run, merged with the CPU's last one if it continues that.
fn record(runs: &mut Vec<Run>, run: Run) {
    if run.start == run.end {
        return;
    }
    let last = runs.iter_mut().rev().take(256).find(|last| last.cpu == run.cpu);
    match last {
        Some(last) if last.end == run.start && last.rta == run.rta => last.end = run.end,
        _ => runs.push(run),
    }
}
