//! The back ends: how a reservation is kept.
//!
//! | | what keeps the share | price |
//! |---|---|---|
//! | `paced`, `dp-wrap` | [`crate::pacer`] changes priorities as [`crate::shares`] says; what is left goes to others | a few changes of priority a deadline |
//! | `sched_ext` | the same pacers, which write places into the table of a scheduler in BPF ([`crate::ext`]) | everybody of SCHED_OTHER is that scheduler's; vCPUs on one CPU each |
//! | `deadline` | the kernel's SCHED_DEADLINE, one reservation a vCPU: each on its own, as RT-Xen's servers | no share of what is left; each thread's affinity must be all CPUs of its root domain |
//!
//! Neither sets a thread's policy for the first time, nor gives it back: that is the daemon's plan, whose journal keeps
//! originals. A back end says which policy the plan is to give ([`Backend::place`]).

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ontime_tenants::{Policy, ThreadId};
use serde::Deserialize;

use crate::account::Tally;
use crate::config::Beyond;
use crate::ext::Ext;
use crate::pacer::{PacerError, Pacers, Pacing, Seats, now};
use crate::seat::{Files, Guest, Hand, Places, Seat};
use crate::settle::{Reserved, Settled};
use crate::shares::{Planning, Shares};
use crate::show::Snapshot;

/// The back ends there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BackendKind {
    /// By pacers, in the order of deadlines where no vCPU has to go to another CPU.
    #[default]
    Paced,
    /// By pacers, by DP-WRAP's slices always.
    DpWrap,
    /// By pacers, through a scheduler of `sched_ext`.
    #[serde(rename = "sched_ext")]
    SchedExt,
    /// By SCHED_DEADLINE.
    Deadline,
}

impl BackendKind {
    /// Its word.
    pub fn name(self) -> &'static str {
        match self {
            BackendKind::Paced => "paced",
            BackendKind::DpWrap => "dp-wrap",
            BackendKind::SchedExt => "sched_ext",
            BackendKind::Deadline => "deadline",
        }
    }
}

/// What a vCPU with a reservation has had since it has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Use {
    /// CPU time within its shares, ns; by `deadline`, all.
    pub ran: u64,
    /// CPU time beyond them, which nobody else wanted, ns.
    pub beyond: u64,
    /// Times that it used its share of a slice up.
    pub overruns: u64,
    /// Periods.
    pub periods: u64,
    /// Of those, in how many it had less than its budget although it wanted it.
    pub misses: u64,
    /// Changes of its place.
    pub flips: u64,
    /// Of those, how many the kernel refused.
    pub refused: u64,
}

/// How reservations are kept.
pub trait Backend: Debug {
    /// The policy that a vCPU's thread has when this back end takes it over, and that its plan sees from then on.
    fn place(&self, reserved: &Reserved) -> Policy;

    /// The policies that this back end moves threads between, so that they are not to be put right; None where it moves
    /// none.
    fn places(&self) -> Option<Places>;

    /// Looks no longer after vCPUs that are not in `settled`: the plan may place them now.
    ///
    /// # Errors
    /// [`PacerError`]: nothing is looked after any more.
    fn release(&mut self, settled: &Settled) -> Result<(), PacerError>;

    /// Looks after exactly these vCPUs: the plan has placed them.
    ///
    /// # Errors
    /// [`PacerError`]: nothing is looked after any more.
    fn set(&mut self, settled: &Settled) -> Result<(), PacerError>;

    /// What each has had.
    fn uses(&self) -> BTreeMap<ThreadId, Use>;

    /// The present slice, where there is one.
    fn show(&mut self) -> Option<Snapshot>;
}

/// How pacers give places.
#[derive(Debug)]
pub enum Way {
    /// By policies.
    Policies(Places),
    /// By the sched_ext scheduler; loaded while there are reservations.
    Ext(Beyond, Option<Ext>),
}

impl Way {
    /// Makes all ready to be given places.
    fn prepare(&mut self, settled: &Settled) -> Result<(), PacerError> {
        let Self::Ext(beyond, ext) = self else { return Ok(()) };
        let ext = match ext {
            Some(ext) => ext,
            none => none.insert(Ext::start(*beyond)?),
        };
        ext.seat(settled)
    }

    /// How one of them is given its place.
    fn hand(&self, id: ThreadId) -> Option<Hand> {
        match self {
            Self::Policies(places) => Some(Hand::Policy(*places)),
            Self::Ext(_, ext) => ext.as_ref()?.slot(id).map(Hand::Table),
        }
    }

    /// Lets go of all others, whom no pacer has any more.
    fn forget_others(&mut self, settled: &Settled) {
        if let Self::Ext(_, ext) = self {
            ext.iter_mut().for_each(|ext| ext.unseat_others(settled));
            ext.take_if(|_| settled.vcpus.is_empty());
        }
    }

    /// # Errors
    /// [`PacerError::Ext`] where places count no more.
    fn stands(&self) -> Result<(), PacerError> {
        match self {
            Self::Ext(_, Some(ext)) => ext.stands(),
            _ => Ok(()),
        }
    }
}

/// See [`BackendKind::Paced`], [`BackendKind::DpWrap`] and [`BackendKind::SchedExt`].
#[derive(Debug)]
pub struct Paced {
    planning: Planning,
    /// The pacers' own.
    place: Policy,
    // They put vCPUs behind when they end: before their way of doing so goes.
    pacers: Option<Pacers>,
    way: Way,
    settled: Settled,
    tallies: BTreeMap<ThreadId, Arc<Tally>>,
    /// Of those that pacers have: a change of one VM's share does not have all others' opened anew.
    files: BTreeMap<ThreadId, Arc<Files>>,
}

impl Paced {
    /// Pacers, started with the first reservation, at the place `pacer`.
    pub fn new(planning: Planning, way: Way, pacer: Policy) -> Self {
        Self {
            planning,
            place: pacer,
            pacers: None,
            way,
            settled: Settled::default(),
            tallies: BTreeMap::new(),
            files: BTreeMap::new(),
        }
    }

    /// Works on these; ends the pacers where that fails.
    fn work_on(&mut self, settled: Settled) -> Result<(), PacerError> {
        if settled.cpus != self.settled.cpus {
            // A CPU came or went. Threads stay behind everybody until there are new pacers.
            self.pacers = None;
        }
        let done = self.try_work_on(&settled);
        if done.is_err() {
            self.end();
            return done;
        }
        self.way.forget_others(&settled);
        self.tallies.retain(|id, _| settled.vcpus.iter().any(|vcpu| vcpu.id == *id));
        self.settled = settled;
        done
    }

    /// Looks after nobody any more.
    fn end(&mut self) {
        self.pacers = None;
        self.settled = Settled::default();
        self.files.clear();
        self.way.forget_others(&self.settled);
    }

    fn try_work_on(&mut self, settled: &Settled) -> Result<(), PacerError> {
        if settled.vcpus.is_empty() {
            self.files.clear();
            return self.pacers.as_mut().map_or(Ok(()), |pacers| pacers.replace(None));
        }
        self.way.prepare(settled)?;
        let pacers = match &mut self.pacers {
            Some(pacers) => pacers,
            none => none.insert(Pacers::start(&settled.cpus, self.place)?),
        };
        for vcpu in &settled.vcpus {
            self.tallies.entry(vcpu.id).or_default();
        }
        let tally = |id| self.tallies.get(&id).map(Arc::clone).unwrap_or_default();
        let open = |vcpu: &Reserved| {
            let guest = Guest::of(vcpu);
            let hand = self.way.hand(vcpu.id)?;
            match self.files.get(&vcpu.id) {
                Some(files) => Some(Seat::with(Arc::clone(files), vcpu.id, hand, tally(vcpu.id), guest)),
                None => Seat::open(vcpu.id, hand, tally(vcpu.id), guest).ok(),
            }
        };
        let seats = Seats(settled.vcpus.iter().map(open).collect());
        let opened = settled.vcpus.iter().zip(&seats.0);
        self.files = opened.filter_map(|(vcpu, seat)| Some((vcpu.id, seat.as_ref()?.files()))).collect();
        let shares = Shares::new(settled, self.planning, now(), tally);
        pacers.replace(Some(Box::new(Pacing { shares, seats })))
    }
}

impl Backend for Paced {
    fn place(&self, _reserved: &Reserved) -> Policy {
        // A pass may take long, and until its end nobody keeps a new one that spins from taking the CPU that the pass
        // needs: among the bulk it neither starves nor has its way. The pacers put it ahead as soon as they have it.
        Policy::BULK
    }

    fn places(&self) -> Option<Places> {
        match self.way {
            Way::Policies(places) => Some(places),
            Way::Ext(..) => None,
        }
    }

    fn release(&mut self, settled: &Settled) -> Result<(), PacerError> {
        let stays = |vcpu: &Reserved| settled.vcpus.iter().any(|other| other.id == vcpu.id);
        if self.settled.vcpus.iter().all(stays) {
            return Ok(());
        }
        let mut rest = self.settled.clone();
        rest.vcpus.retain(stays);
        self.work_on(rest)
    }

    fn set(&mut self, settled: &Settled) -> Result<(), PacerError> {
        if settled.is_heard(&self.settled) {
            let stands = self.way.stands();
            match stands {
                Ok(()) => self.settled = settled.clone(),
                Err(_) => self.end(),
            }
            return stands;
        }
        self.work_on(settled.clone())
    }

    fn uses(&self) -> BTreeMap<ThreadId, Use> {
        let used = |tally: &Tally| Use {
            ran: tally.ran.load(Ordering::Relaxed),
            beyond: tally.beyond.load(Ordering::Relaxed),
            overruns: tally.overruns.load(Ordering::Relaxed),
            periods: tally.periods.load(Ordering::Relaxed),
            misses: tally.misses.load(Ordering::Relaxed),
            flips: tally.flips.load(Ordering::Relaxed),
            refused: tally.refused.load(Ordering::Relaxed),
        };
        self.tallies.iter().map(|(id, tally)| (*id, used(tally))).collect()
    }

    fn show(&mut self) -> Option<Snapshot> {
        let vcpus = self.settled.vcpus.len();
        if vcpus == 0 {
            return None;
        }
        self.pacers.as_mut()?.show(vcpus).ok()
    }
}

/// See [`BackendKind::Deadline`].
#[derive(Debug, Default)]
pub struct Deadline {
    /// What each had had when it was taken over, ns.
    had: BTreeMap<ThreadId, u64>,
}

impl Backend for Deadline {
    fn place(&self, reserved: &Reserved) -> Policy {
        Policy::Deadline { runtime: reserved.budget.0, deadline: reserved.period.0, period: reserved.period.0 }
    }

    fn places(&self) -> Option<Places> {
        None
    }

    fn release(&mut self, settled: &Settled) -> Result<(), PacerError> {
        self.had.retain(|id, _| settled.vcpus.iter().any(|vcpu| vcpu.id == *id));
        Ok(())
    }

    fn set(&mut self, settled: &Settled) -> Result<(), PacerError> {
        self.release(settled)?;
        for vcpu in &settled.vcpus {
            self.had.entry(vcpu.id).or_insert_with(|| vcpu.id.cpu_time().unwrap_or(0));
        }
        Ok(())
    }

    fn uses(&self) -> BTreeMap<ThreadId, Use> {
        let used = |(id, had): (&ThreadId, &u64)| {
            let ran = id.cpu_time().unwrap_or(0).saturating_sub(*had);
            (*id, Use { ran, ..Use::default() })
        };
        self.had.iter().map(used).collect()
    }

    fn show(&mut self) -> Option<Snapshot> {
        None
    }
}
