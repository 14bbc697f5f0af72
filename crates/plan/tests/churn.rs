//! A host whose tenants come, go, change, sleep and wake at any time: at every global deadline each admitted, awake
//! vCPU has had its bandwidth times the elapsed time.
//!
//! The test acts like the daemon: it asks admission for every change, updates the planner, and executes the plans like
//! the CPUs. The time of a vCPU is counted from the segments only.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test ends by panicking")]

mod support;

use std::collections::{BTreeMap, BTreeSet};

use ontime_plan::{Admission, Admitted, Bandwidth, Demand, Nanos, Planner, Reservation, VcpuId};
use proptest::prelude::*;

use support::{check_layout, left, periods, top_up};

#[derive(Debug, Clone)]
enum Event {
    Sleep(usize),
    Wake(usize),
    /// A new vCPU with this bandwidth (parts of a period) and affinity.
    Come(u64, u64, BTreeSet<u32>),
    /// A new vCPU that takes all remaining capacity.
    Fill,
    Go(usize),
    /// A new bandwidth.
    Change(usize, u64, u64),
}

/// The time since which a vCPU is due its bandwidth without interruption, the time it has had since then, and the
/// allowed deficit, ns.
struct Account {
    from: Nanos,
    had: u64,
    short: u128,
}

struct Vcpu {
    id: VcpuId,
    ask: Reservation,
    home: Option<u32>,
    /// Its bandwidth in the current slice. None if it was added in this slice.
    bandwidth: Option<Bandwidth>,
    awake: bool,
    /// It changed, or slept after being awake, in this slice.
    broken: bool,
    account: Option<Account>,
}

struct Host {
    cpus: u32,
    planner: Planner,
    vcpus: Vec<Vcpu>,
    shared: Vec<bool>,
    /// The admission result for the current slice, by index.
    slice: Admitted,
    /// By index: the CPUs on which it ran in this slice.
    ran_on: BTreeMap<usize, BTreeSet<u32>>,
    now: Nanos,
    slices: u64,
}

fn bandwidth(parts: u64, of: u64) -> Bandwidth {
    Bandwidth::new(Nanos(parts * of / 1000), Nanos(of)).unwrap().clamp(Bandwidth::ppm(10), Bandwidth::ppm(999_990))
}

impl Host {
    fn new(cpus: u32) -> Self {
        let shared = vec![true; cpus as usize];
        let slice = Admitted { home: Vec::new(), shared: shared.clone(), total: Bandwidth::ZERO };
        let planner = Planner::new(&shared);
        Self { cpus, planner, vcpus: Vec::new(), shared, slice, ran_on: BTreeMap::new(), now: Nanos::ZERO, slices: 0 }
    }

    fn asked(&self) -> Vec<Reservation> {
        self.vcpus.iter().map(|vcpu| vcpu.ask.clone()).collect()
    }

    /// Updates the planner with the admission result: the existing vCPUs, one of them with a new bandwidth, or a new
    /// one at the end.
    fn take(&mut self, asked: Vec<Reservation>, admitted: &Admitted) {
        self.planner.set_shared(&admitted.shared);
        self.shared.clone_from(&admitted.shared);
        let known = self.vcpus.len();
        for ((vcpu, ask), home) in self.vcpus.iter_mut().zip(&asked).zip(&admitted.home) {
            vcpu.broken |= vcpu.ask.bandwidth != ask.bandwidth;
            (vcpu.ask, vcpu.home) = (ask.clone(), *home);
            self.planner.change(vcpu.id, ask.bandwidth, *home);
        }
        for (ask, home) in asked.into_iter().zip(&admitted.home).skip(known) {
            let id = self.planner.add(ask.bandwidth, *home);
            self.vcpus.push(Vcpu { id, ask, home: *home, bandwidth: None, awake: true, broken: false, account: None });
        }
    }

    fn come(&mut self, ask: Reservation) {
        let mut asked = self.asked();
        asked.push(ask);
        if let Ok(admitted) = Admission::new(self.cpus, Bandwidth::ZERO).admit(&asked) {
            self.take(asked, &admitted);
        }
    }

    /// After a vCPU was removed, the others may be placed anew. If no placement is found, they stay.
    fn settle(&mut self) {
        let asked = self.asked();
        if let Ok(admitted) = Admission::new(self.cpus, Bandwidth::ZERO).admit(&asked) {
            self.take(asked, &admitted);
        }
    }

    /// Plans a new slice for the current vCPUs.
    fn plan(&mut self, length: u64) {
        let slots = self.vcpus.iter().map(|vcpu| vcpu.id.index() + 1).max().unwrap_or(0);
        let mut home = vec![None; slots];
        let mut demands = vec![Demand::NONE; slots];
        for vcpu in &mut self.vcpus {
            let index = vcpu.id.index();
            home[index] = vcpu.home;
            demands[index] = Demand { deadline: self.now + Nanos(length), idle: !vcpu.awake };
            let short = u128::from(self.slices > 0);
            if vcpu.awake && vcpu.account.is_none() {
                vcpu.account = Some(Account { from: self.now, had: 0, short });
            }
            vcpu.bandwidth = Some(vcpu.ask.bandwidth);
            vcpu.broken = false;
        }
        self.planner.plan(self.now, &demands);
        self.slice = Admitted { home, shared: self.shared.clone(), total: Bandwidth::ZERO };
        self.ran_on.clear();
        self.slices += 1;
        check_layout(&self.planner, &self.slice, self.now);
    }

    /// Executes the plan until then.
    fn run_to(&mut self, until: Nanos) {
        for segment in self.planner.segments() {
            let ran = segment.end.min(until) - segment.start.max(self.now);
            if ran == Nanos::ZERO {
                continue;
            }
            self.ran_on.entry(segment.vcpu.index()).or_default().insert(segment.cpu);
            let vcpu = self.vcpus.iter_mut().find(|vcpu| vcpu.id == segment.vcpu).unwrap();
            assert!(vcpu.awake, "a sleeper runs");
            if let Some(account) = &mut vcpu.account {
                account.had += ran.0;
            }
        }
        self.now = until;
    }

    /// At a global deadline: checks the time of each vCPU.
    fn check(&mut self) -> Result<(), TestCaseError> {
        let moved = self.ran_on.values().filter(|cpus| cpus.len() > 1).count();
        prop_assert!(moved < self.cpus as usize, "{} vCPUs ran on several CPUs", moved);
        for vcpu in &mut self.vcpus {
            let (Some(account), Some(bandwidth)) = (&vcpu.account, vcpu.bandwidth) else { continue };
            let fluid = u128::from(bandwidth.runtime()) * u128::from((self.now - account.from).0);
            let (due, had) = (fluid / u128::from(bandwidth.period()), u128::from(account.had));
            prop_assert!(had + account.short >= due, "{:?}: {} ns since {}, due {}", vcpu.id, had, account.from, due);
            prop_assert!(had <= due + 2, "{:?}: {} ns since {}, due {} only", vcpu.id, had, account.from, due);
            if vcpu.broken {
                vcpu.account = None;
            }
        }
        Ok(())
    }

    fn sleep(&mut self, vcpu: usize) {
        let Some(vcpu) = self.vcpus.get_mut(vcpu).filter(|vcpu| vcpu.awake) else { return };
        self.planner.sleep(vcpu.id, self.now);
        (vcpu.awake, vcpu.broken, vcpu.account) = (false, true, None);
    }

    fn wake(&mut self, vcpu: usize) {
        let Some(vcpu) = self.vcpus.get_mut(vcpu).filter(|vcpu| !vcpu.awake) else { return };
        self.planner.wake(vcpu.id, self.now);
        vcpu.awake = true;
        // A vCPU that slept or changed in this slice has only the rest of its share until the next slice.
        if !vcpu.broken && vcpu.bandwidth.is_some() {
            vcpu.account = Some(Account { from: self.now, had: 0, short: 3 });
        }
    }

    /// An event in the middle of a slice must not change other vCPUs' time.
    fn happen(&mut self, event: Event) -> Result<(), TestCaseError> {
        let slots = self.slice.home.len();
        let before = left(&self.planner, slots, self.now);
        let who = match &event {
            Event::Sleep(vcpu) | Event::Wake(vcpu) | Event::Go(vcpu) => self.vcpus.get(*vcpu).map(|vcpu| vcpu.id),
            _ => None,
        };
        let mut laid = false;
        match event {
            Event::Sleep(vcpu) => {
                self.sleep(vcpu);
                laid = who.is_some();
            }
            Event::Wake(vcpu) => {
                self.wake(vcpu);
                laid = who.is_some();
            }
            Event::Come(parts, of, cpus) => {
                let affinity = (!cpus.is_empty()).then_some(cpus);
                self.come(Reservation { bandwidth: bandwidth(parts, of), affinity });
            }
            Event::Fill => {
                let mut asked = self.asked();
                if let Some(admitted) = top_up(self.cpus, &mut asked) {
                    self.take(asked, &admitted);
                }
            }
            Event::Go(vcpu) => {
                if vcpu < self.vcpus.len() {
                    self.planner.remove(self.vcpus.remove(vcpu).id);
                    self.settle();
                }
            }
            Event::Change(vcpu, parts, of) => {
                let mut asked = self.asked();
                let Some(ask) = asked.get_mut(vcpu) else { return Ok(()) };
                ask.bandwidth = bandwidth(parts, of);
                if let Ok(admitted) = Admission::new(self.cpus, Bandwidth::ZERO).admit(&asked) {
                    self.take(asked, &admitted);
                }
            }
        }
        let after = left(&self.planner, slots, self.now);
        for index in (0..slots).filter(|index| who.is_none_or(|who| who.index() != *index)) {
            prop_assert_eq!(before[index], after[index], "another's time changed");
        }
        if laid && before != after {
            check_layout(&self.planner, &self.slice, self.now);
        }
        Ok(())
    }
}

/// Events on a host of `cpus` CPUs. Half of the vCPUs never sleep, change or leave: only other vCPUs' events can affect
/// them.
fn events(cpus: u32) -> impl Strategy<Value = Event> {
    let restless = (0usize..12).prop_map(|vcpu| 2 * vcpu);
    let affinity = prop_oneof![2 => Just(BTreeSet::new()), 1 => prop::collection::btree_set(0..cpus, 1..3)];
    prop_oneof![
        6 => restless.clone().prop_map(Event::Sleep),
        6 => restless.clone().prop_map(Event::Wake),
        3 => (1u64..700, periods(), affinity).prop_map(|(parts, of, cpus)| Event::Come(parts, of, cpus)),
        2 => Just(Event::Fill),
        1 => restless.clone().prop_map(Event::Go),
        1 => (restless, 1u64..700, periods()).prop_map(|(vcpu, parts, of)| Event::Change(vcpu, parts, of)),
    ]
}

/// A slice: its length, and its events, each with the delay after the previous one.
type Slice = (u64, Vec<(u64, Event)>);

fn histories() -> impl Strategy<Value = (u32, Vec<Event>, Vec<Slice>)> {
    (1u32..6).prop_flat_map(|cpus| {
        let slice = (1u64..3_000_000, prop::collection::vec((1u64..200_000, events(cpus)), 0..12));
        (Just(cpus), prop::collection::vec(events(cpus), 0..40), prop::collection::vec(slice, 1..20))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn who_is_admitted_has_its_share_at_every_global_deadline((cpus, first, slices) in histories()) {
        let mut host = Host::new(cpus);
        for event in first {
            host.happen(event)?;
        }
        for (length, events) in slices {
            host.plan(length);
            for (after, event) in events {
                let at = host.now + Nanos(after);
                if at >= host.planner.end() {
                    break;
                }
                host.run_to(at);
                host.happen(event)?;
            }
            host.run_to(host.planner.end());
            host.check()?;
        }
    }
}
