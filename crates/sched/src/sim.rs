//! A simulated host, on which plans are tested. CPUs run the vCPUs with the highest places first, as the kernel's
//! SCHED_FIFO with push and pull does, and bulk below them.

use std::collections::BTreeSet;
use std::sync::Arc;

use ontime_plan::{Bandwidth, Nanos};
use ontime_tenants::{Class, ThreadId};

use crate::admit::pacing::{CHECK, HANDED_OVER, NEXT, PLACE, READ, STATE};
use crate::admit::{Reservations, Reserved};
use crate::beside::Beside;
use crate::guest_page::{self, Follow};
use crate::model::{Counts, Next, Place, Share, Snapshot, Tally, Threads};
use crate::policy::{Planning, Schedule};

pub(crate) const MS: u64 = 1_000_000;
/// The time step of the simulation, ns.
pub(crate) const TICK: u64 = 10_000;

/// What a simulated guest does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Guest {
    Spins,
    Sleeps,
    /// Needs this much CPU time from the beginning of each period on.
    Wants(u64),
    /// Sleeps until this time, then spins.
    SpinsFrom(u64),
    /// Has deadline tasks, which it publishes ([`Vm::tasks`]).
    Tasks,
}

/// A deadline task of a simulated guest, which is periodic.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Job {
    work: u64,
    period: u64,
    /// Release of the next job; deadline of the present one, 0 before the first.
    release: u64,
    due: u64,
    left: u64,
    pub jobs: u64,
    pub late: u64,
}

impl Job {
    pub(crate) fn new(work: u64, period: u64, release: u64) -> Self {
        Self { work, period, release, ..Self::default() }
    }

    fn tick(&mut self, now: u64) {
        if now >= self.release {
            self.jobs += 1;
            self.late += u64::from(self.left > 0);
            self.left = self.work;
            self.release += self.period;
            self.due = self.release;
        }
    }
}

#[derive(Debug)]
pub(crate) struct Vm {
    pub guest: Guest,
    pub period: u64,
    /// When the vCPU's periods begin, counted from the clock's zero; whether its guest publishes that.
    pub phase: u64,
    pub publishes: bool,
    place: Place,
    pub counts: Counts,
    /// CPU time that it still needs.
    work: u64,
    pub alive: bool,
    /// CPU time ahead of bulk: in the present period, and the least of all whole periods.
    had: u64,
    pub least: u64,
    pub tasks: Vec<Job>,
    follow: Follow,
    /// How often a pacer has read the guest's deadlines.
    pub asked: u64,
    /// The vCPU's new share after a claim of its guest, until the pacer has read it.
    pub claimed: Option<Share>,
    /// The CPU to which the vCPU is pinned.
    home: Option<usize>,
    /// Whether the vCPU was runnable in the last tick; its position among vCPUs at the same place.
    awake: bool,
    turn: i64,
}

/// How many calls of each kind a pacer made.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Calls {
    pub reads: u64,
    pub states: u64,
    pub nexts: u64,
    pub places: u64,
}

impl Calls {
    /// Duration of a check with these calls, ns.
    pub(crate) fn cost(self) -> u64 {
        let handed_over = HANDED_OVER * (self.states + self.nexts);
        CHECK + READ * self.reads + STATE * self.states + NEXT * self.nexts + handed_over + PLACE * self.places
    }
}

pub(crate) struct Host {
    pub cpus: usize,
    pub vms: Vec<Vm>,
    pub now: u64,
    /// CPU time of bulk, which is always runnable.
    pub bulk: u64,
    pub flips: u64,
    /// Duration of a check, ns; and how long the only CPU is still busy with a check.
    pub cost: u64,
    taken: u64,
    turns: i64,
    /// Interrupts take one of this many ticks; 0: none.
    pub noise: u64,
    /// How often threads ahead of vCPUs take the CPU, and for how long, ns; 0: never.
    pub storms: (u64, u64),
    /// Whether a check takes the time of its calls instead of `cost`.
    pub counted: bool,
    calls: Calls,
    pub pacing: u64,
    pub tallies: Vec<Arc<Tally>>,
}

fn rank(place: Place) -> u8 {
    match place {
        Place::Planned => 0,
        Place::Entitled => 1,
        Place::Beyond => 2,
    }
}

impl Threads for Host {
    fn read(&mut self, vcpu: usize) -> Option<Counts> {
        self.calls.reads += 1;
        self.vms.get(vcpu).filter(|vm| vm.alive).map(|vm| vm.counts)
    }

    fn is_asleep(&mut self, vcpu: usize) -> bool {
        self.calls.states += 1;
        self.vms.get(vcpu).is_some_and(|vm| !vm.awake)
    }

    fn next_deadline(&mut self, vcpu: usize, after: u64) -> Option<Next> {
        self.vms.get_mut(vcpu)?.asked += 1;
        if let Some(vm) = self.vms.get_mut(vcpu).filter(|vm| !vm.tasks.is_empty()) {
            self.calls.nexts += 1;
            let mut entries: Vec<(u64, u64)> = vm.tasks.iter().map(|task| (task.due, task.period)).collect();
            entries.sort_unstable();
            let told: Vec<_> = entries.into_iter().filter(|(due, _)| *due > 0).take(guest_page::ENTRIES).collect();
            return vm.follow.next(&guest_page::line(1, &told), after, 0);
        }
        let vm = self.vms.get(vcpu).filter(|vm| vm.publishes)?;
        let at = (after - after.min(vm.phase)) / vm.period * vm.period + vm.phase;
        Some(Next { at: if at > after { at } else { at + vm.period }, live: true })
    }

    fn claimed(&mut self, vcpu: usize) -> Option<Share> {
        self.vms.get_mut(vcpu)?.claimed.take()
    }

    fn set_place(&mut self, vcpu: usize, place: Place) -> Option<Counts> {
        self.flips += 1;
        self.calls.places += 1;
        self.turns += 1;
        let vm = self.vms.get_mut(vcpu).filter(|vm| vm.alive)?;
        // As in SCHED_FIFO: a raised thread goes to the tail, a lowered thread to the head.
        vm.turn = if rank(place) < rank(vm.place) { self.turns } else { -self.turns };
        vm.place = place;
        Some(vm.counts)
    }
}

impl Host {
    pub(crate) fn new(cpus: usize, reservations: &Reservations, guests: &[Guest]) -> Self {
        let vm = |(reserved, guest): (&Reserved, &Guest)| Vm {
            guest: *guest,
            period: reserved.period.0,
            phase: 0,
            publishes: false,
            place: Place::Entitled,
            counts: Counts::default(),
            work: 0,
            alive: true,
            had: 0,
            least: u64::MAX,
            tasks: Vec::new(),
            follow: Follow::new(reserved.period.0),
            asked: 0,
            claimed: None,
            home: reserved.home.map(|home| home as usize),
            awake: false,
            turn: 0,
        };
        Self {
            cpus,
            vms: reservations.vcpus.iter().zip(guests).map(vm).collect(),
            now: 0,
            bulk: 0,
            flips: 0,
            cost: 0,
            taken: 0,
            turns: 0,
            noise: 0,
            storms: (0, 0),
            counted: false,
            calls: Calls::default(),
            pacing: 0,
            tallies: reservations.vcpus.iter().map(|_| Arc::default()).collect(),
        }
    }

    /// A plan for these vCPUs, as the pacers of this host begin it.
    pub(crate) fn schedule(&mut self, reservations: &Reservations, planning: Planning) -> Schedule {
        let number = |id: ThreadId| reservations.vcpus.iter().position(|vcpu| vcpu.id == id).unwrap();
        let mut schedule = Schedule::new(reservations, planning, self.now, |id| Arc::clone(&self.tallies[number(id)]));
        schedule.begin(self.now, self);
        schedule
    }

    fn wants(&self, vm: &Vm) -> bool {
        vm.alive
            && match vm.guest {
                Guest::Spins => true,
                Guest::Sleeps => false,
                Guest::Wants(_) => vm.work > 0,
                Guest::SpinsFrom(from) => self.now >= from,
                Guest::Tasks => vm.tasks.iter().any(|task| task.left > 0),
            }
    }

    pub(crate) fn tick(&mut self) {
        for vm in &mut self.vms {
            vm.tasks.iter_mut().for_each(|task| task.tick(self.now));
            if self.now >= vm.phase && (self.now - vm.phase) % vm.period == 0 {
                if self.now >= vm.phase + 2 * vm.period {
                    vm.least = vm.least.min(vm.had);
                }
                vm.had = 0;
                if let Guest::Wants(work) = vm.guest {
                    vm.work = work;
                }
            }
        }
        let wants: Vec<bool> = self.vms.iter().map(|vm| self.wants(vm)).collect();
        for (vm, wants) in self.vms.iter_mut().zip(&wants) {
            if *wants && !vm.awake {
                self.turns += 1;
                vm.turn = self.turns;
            }
            vm.awake = *wants;
        }
        let mut order: Vec<usize> = (0..self.vms.len()).filter(|vm| wants[*vm]).collect();
        order.sort_by_key(|vm| (rank(self.vms[*vm].place), self.vms[*vm].turn));
        let (every, length) = self.storms;
        let interrupted = self.noise > 0 && self.now / TICK % self.noise == 0 || every > 0 && self.now % every < length;
        let mut free = vec![self.taken == 0 && !interrupted; self.cpus];
        self.taken = self.taken.saturating_sub(TICK);
        for vm in order {
            let vm = &mut self.vms[vm];
            // Bulk is always runnable, and runs before vCPUs beyond their shares.
            let cpu = match vm.home {
                Some(home) => free.get(home).is_some_and(|free| *free).then_some(home),
                None => free.iter().position(|free| *free),
            };
            if let Some(cpu) = cpu.filter(|_| vm.place != Place::Beyond) {
                free[cpu] = false;
                vm.counts.ran += TICK;
                vm.had += TICK;
                vm.work = vm.work.saturating_sub(TICK);
                if let Some(task) = vm.tasks.iter_mut().filter(|task| task.left > 0).min_by_key(|task| task.due) {
                    task.left = task.left.saturating_sub(TICK);
                }
            } else {
                vm.counts.waited += TICK;
            }
        }
        self.bulk += free.iter().filter(|free| **free).count() as u64 * TICK;
        self.now += TICK;
    }

    /// Runs with pacers that come `late` ns after they are due. Returns how often they woke.
    pub(crate) fn run(&mut self, schedule: &mut Schedule, until: u64, late: u64) -> u64 {
        let mut due = vec![self.now; self.cpus];
        let mut wakes = 0;
        while self.now < until {
            for cpu in 0..self.cpus {
                if due[cpu] <= self.now && self.taken == 0 {
                    wakes += 1;
                    self.calls = Calls::default();
                    due[cpu] = schedule.step(cpu, self.now, self).saturating_add(late);
                    let cost = if self.counted { self.calls.cost() } else { self.cost };
                    schedule.record_cost(cpu, cost);
                    self.taken = cost;
                    self.pacing += cost;
                    if schedule.take_calm_ended() {
                        due.fill(self.now + late);
                    }
                }
            }
            self.tick();
        }
        wakes
    }
}

/// VMs whose vCPUs may run anywhere, or are pinned to the CPUs in turn.
pub(crate) fn reservations(cpus: u32, reserve_ppm: u64, asked: &[(u64, u64)], pinned: bool) -> Option<Reservations> {
    let home = |number: u32| pinned.then_some(number % cpus);
    let reserved = |(number, (budget, period)): (u32, &(u64, u64))| Reserved {
        id: ThreadId { pid: 1, tid: 100 + i32::try_from(number).unwrap(), start_time: 1 },
        tenant: "vm".to_owned(),
        class: Class::Bulk,
        vcpu: number,
        budget: Nanos(*budget),
        period: Nanos(*period),
        bandwidth: Bandwidth::new(Nanos(*budget), Nanos(*period)).unwrap(),
        guest: None,
        page: None,
        offer: None,
        home: home(number),
        pinned: cpus == 1 || pinned,
        leased: false,
    };
    admitted(cpus, Bandwidth::ppm(reserve_ppm), (0..).zip(asked).map(reserved).collect())
}

/// A result with these vCPUs, if they are admitted.
pub(crate) fn admitted(cpus: u32, reserve: Bandwidth, vcpus: Vec<Reserved>) -> Option<Reservations> {
    let reserves =
        (0..cpus).map(|cpu| ontime_plan::Reservation { bandwidth: reserve, affinity: Some(BTreeSet::from([cpu])) });
    let free = vcpus.iter().map(|vcpu| ontime_plan::Reservation {
        bandwidth: vcpu.bandwidth,
        affinity: vcpu.home.map(|home| BTreeSet::from([home])),
    });
    let all: Vec<_> = reserves.chain(free).collect();
    let admitted = ontime_plan::Admission::new(cpus, Bandwidth::ZERO).admit(&all).ok()?;
    let (cpus, shared) = ((0..cpus).collect(), admitted.shared);
    let beside = Beside { reserve, watcher: Bandwidth::ZERO };
    Some(Reservations { vcpus, cpus, shared, beside, ..Reservations::default() })
}

pub(crate) fn start(planning: Planning, cpus: u32, asked: &[(u64, u64)], guests: &[Guest]) -> (Schedule, Host) {
    let reservations = reservations(cpus, 50_000, asked, false).unwrap();
    let mut host = Host::new(cpus as usize, &reservations, guests);
    (host.schedule(&reservations, planning), host)
}

pub(crate) fn shown(schedule: &Schedule, host: &Host) -> Snapshot {
    let mut shown = Snapshot::with_room(host.vms.len());
    shown.clear();
    schedule.write_snapshot(host.now, &mut shown);
    shown
}
