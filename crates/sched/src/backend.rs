//! The back ends: how reservations are enforced.
//!
//! | | what enforces the share | price |
//! |---|---|---|
//! | `paced`, `dp-wrap` | pacers change priorities ([`crate::pacer`]) | a few changes of priority for each deadline |
//! | `sched_ext` | pacers write places for a BPF scheduler ([`crate::ext`]) | it runs all SCHED_OTHER; one CPU a vCPU |
//! | `deadline` | SCHED_DEADLINE for each vCPU, like RT-Xen's servers | no unused time; affinity to a root domain |
//!
//! A back end neither sets a thread's policy for the first time nor restores it. The daemon does that by its plan,
//! whose journal keeps the original values. The back end gives the policy for the plan ([`Backend::place`]).

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;

use ontime_tenants::{Policy, ThreadId};

use crate::admit::{Reserved, Settled};
use crate::ext::Ext;
use crate::model::{Beyond, PacerError, Places, Snapshot, Tally, Use};
use crate::pacer::{Pacers, Pacing, Seats, now};
use crate::policy::{Planning, Schedule};
use crate::seat::{Files, Guest, Hand, Seat};

/// Enforces reservations.
pub trait Backend: Debug {
    /// The policy that the daemon's plan gives a vCPU's thread before this back end takes over, and keeps in view from
    /// then on.
    fn place(&self, reserved: &Reserved) -> Policy;

    /// The policies between which this back end moves threads, so that the plan does not correct them; None if it moves
    /// none.
    fn places(&self) -> Option<Places>;

    /// Stops enforcing for vCPUs that are not in `settled`: the plan may set their policies now.
    ///
    /// # Errors
    /// [`PacerError`]: no reservation is enforced any more.
    fn release(&mut self, settled: &Settled) -> Result<(), PacerError>;

    /// Enforces the reservations of exactly these vCPUs, whose policies the plan has set.
    ///
    /// # Errors
    /// [`PacerError`]: no reservation is enforced any more.
    fn set(&mut self, settled: &Settled) -> Result<(), PacerError>;

    /// The counters of each vCPU.
    fn uses(&self) -> BTreeMap<ThreadId, Use>;

    /// The pacers' present state, if there are pacers.
    fn show(&mut self) -> Option<Snapshot>;
}

/// How pacers move vCPUs between places.
#[derive(Debug)]
pub enum Way {
    /// By policies and priorities.
    Policies(Places),
    /// Through the sched_ext scheduler, which is loaded while there are reservations.
    Ext(Beyond, Option<Ext>),
}

impl Way {
    /// Prepares for these vCPUs.
    fn prepare(&mut self, settled: &Settled) -> Result<(), PacerError> {
        let Self::Ext(beyond, ext) = self else { return Ok(()) };
        let ext = match ext {
            Some(ext) => ext,
            none => none.insert(Ext::start(*beyond)?),
        };
        ext.seat(settled)
    }

    /// How a vCPU's place is changed.
    fn hand(&self, id: ThreadId) -> Option<Hand> {
        match self {
            Self::Policies(places) => Some(Hand::Policy(*places)),
            Self::Ext(_, ext) => ext.as_ref()?.slot(id).map(Hand::Table),
        }
    }

    /// Forgets all other vCPUs, which no pacer has any more.
    fn forget_others(&mut self, settled: &Settled) {
        if let Self::Ext(_, ext) = self {
            ext.iter_mut().for_each(|ext| ext.unseat_others(settled));
            ext.take_if(|_| settled.vcpus.is_empty());
        }
    }

    /// # Errors
    /// [`PacerError::Ext`] if the scheduler does not run any more.
    fn stands(&self) -> Result<(), PacerError> {
        match self {
            Self::Ext(_, Some(ext)) => ext.stands(),
            _ => Ok(()),
        }
    }
}

/// Back ends [`crate::model::BackendKind::Paced`], [`crate::model::BackendKind::DpWrap`] and [`crate::model::BackendKind::SchedExt`].
#[derive(Debug)]
pub struct Paced {
    planning: Planning,
    /// The pacers' own policy.
    place: Policy,
    // Declared before `way`, so dropped before it: pacers that end still move their vCPUs to `Beyond`.
    pacers: Option<Pacers>,
    way: Way,
    settled: Settled,
    tallies: BTreeMap<ThreadId, Arc<Tally>>,
    /// Open files of the threads that pacers have, so that a change of one VM does not open all files again.
    files: BTreeMap<ThreadId, Arc<Files>>,
}

impl Paced {
    /// Pacers start with the first reservation, with the policy `pacer`.
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

    /// Has the pacers enforce these; ends them if that fails.
    fn work_on(&mut self, settled: Settled) -> Result<(), PacerError> {
        if settled.cpus != self.settled.cpus {
            // A CPU came or went. The vCPUs stay at `Beyond` until there are new pacers.
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

    /// Ends all enforcement.
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
        let shares = Schedule::new(settled, self.planning, now(), tally);
        pacers.replace(Some(Box::new(Pacing { shares, seats })))
    }
}

impl Backend for Paced {
    fn place(&self, _reserved: &Reserved) -> Policy {
        // A pass of the daemon may take long, and until its end nothing caps a new vCPU that spins. Among bulk threads
        // it can neither starve nor take the CPU that the pass needs. The pacers move it ahead as soon as they have it.
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
        self.tallies.iter().map(|(id, tally)| (*id, tally.usage())).collect()
    }

    fn show(&mut self) -> Option<Snapshot> {
        let vcpus = self.settled.vcpus.len();
        if vcpus == 0 {
            return None;
        }
        self.pacers.as_mut()?.show(vcpus).ok()
    }
}

/// Back end [`crate::model::BackendKind::Deadline`].
#[derive(Debug, Default)]
pub struct Deadline {
    /// CPU time of each thread when its reservation began, ns.
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
