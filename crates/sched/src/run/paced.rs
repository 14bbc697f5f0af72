//! The back ends with pacers: they give the pacers schedules and open vCPU threads.

use std::collections::BTreeMap;
use std::sync::Arc;

use ontime_base::clock::now;
use ontime_tenants::{Policy, ThreadId};

use crate::admit::{Reservations, Reserved};
use crate::ext::Ext;
use crate::model::{Beyond, PacerError, Places, Snapshot, Tally, Use};
use crate::policy::{Planning, Schedule};
use crate::run::backend::Backend;
use crate::run::counters::Counters;
use crate::run::files::ThreadFiles;
use crate::run::guest::GuestReader;
use crate::run::pacer::{Pacers, Pacing};
use crate::run::threads::VcpuThreads;
use crate::run::vcpu::{Placement, VcpuThread};

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
    fn prepare(&mut self, reservations: &Reservations) -> Result<(), PacerError> {
        let Self::Ext(beyond, ext) = self else { return Ok(()) };
        let ext = match ext {
            Some(ext) => ext,
            none => none.insert(Ext::start(*beyond)?),
        };
        ext.assign(reservations)
    }

    /// How a vCPU's place is changed.
    fn placement(&self, id: ThreadId) -> Option<Placement> {
        match self {
            Self::Policies(places) => Some(Placement::Policy(*places)),
            Self::Ext(_, ext) => ext.as_ref()?.entry(id).map(Placement::Table),
        }
    }

    /// Forgets all other vCPUs, which no pacer has any more.
    fn forget_others(&mut self, reservations: &Reservations) {
        if let Self::Ext(_, ext) = self {
            ext.iter_mut().for_each(|ext| ext.release_others(reservations));
            ext.take_if(|_| reservations.vcpus.is_empty());
        }
    }

    /// # Errors
    /// [`PacerError::Ext`] if the scheduler does not run any more.
    fn check(&self) -> Result<(), PacerError> {
        match self {
            Self::Ext(_, Some(ext)) => ext.check(),
            _ => Ok(()),
        }
    }
}

/// Back ends `paced`, `dp-wrap` and `sched_ext`.
#[derive(Debug)]
pub struct Paced {
    planning: Planning,
    /// The pacers' own policy.
    place: Policy,
    // Declared before `way`, so dropped before it: pacers that end still move their vCPUs to `Beyond`.
    pacers: Option<Pacers>,
    way: Way,
    /// The kernel's counters of the vCPU threads, or why there are none. They start with the first reservation.
    counters: Option<Result<Counters, String>>,
    reservations: Reservations,
    tallies: BTreeMap<ThreadId, Arc<Tally>>,
    /// Open files of the threads that pacers have, so that a change of one VM does not open all files again.
    files: BTreeMap<ThreadId, Arc<ThreadFiles>>,
}

impl Paced {
    /// Pacers start with the first reservation, with the policy `pacer`.
    pub fn new(planning: Planning, way: Way, pacer: Policy) -> Self {
        Self {
            planning,
            place: pacer,
            pacers: None,
            way,
            counters: None,
            reservations: Reservations::default(),
            tallies: BTreeMap::new(),
            files: BTreeMap::new(),
        }
    }

    /// Has the pacers enforce these; ends them if that fails.
    fn work_on(&mut self, reservations: Reservations) -> Result<(), PacerError> {
        // A CPU came or went, or a pacer cannot read any more. The vCPUs stay at `Beyond` until there are new pacers.
        let moved = reservations.cpus != self.reservations.cpus;
        let hangs = self.hangs();
        if hangs {
            // The reader may hold the lock of an open file (`fs/seq_file.c`), for which the next one would wait.
            self.files.clear();
        }
        self.pacers.take_if(|_| hangs || moved);
        let done = self.try_work_on(&reservations);
        if done.is_err() {
            self.end();
            return done;
        }
        self.forget_others(&reservations);
        self.tallies.retain(|id, _| reservations.vcpus.iter().any(|vcpu| vcpu.id == *id));
        self.reservations = reservations;
        done
    }

    /// Ends all enforcement.
    fn end(&mut self) {
        self.pacers = None;
        self.reservations = Reservations::default();
        self.files.clear();
        self.forget_others(&Reservations::default());
    }

    /// Forgets all other vCPUs, which no pacer has any more.
    fn forget_others(&mut self, reservations: &Reservations) {
        self.way.forget_others(reservations);
        if let Some(Ok(counters)) = &mut self.counters {
            counters.release_others(|id| reservations.vcpus.iter().any(|vcpu| vcpu.id == id));
        }
        self.counters.take_if(|_| reservations.vcpus.is_empty());
    }

    fn try_work_on(&mut self, reservations: &Reservations) -> Result<(), PacerError> {
        if reservations.vcpus.is_empty() {
            self.files.clear();
            return self.pacers.as_mut().map_or(Ok(()), |pacers| pacers.replace(None));
        }
        self.way.prepare(reservations)?;
        let pacers = match &mut self.pacers {
            Some(pacers) => pacers,
            none => none.insert(Pacers::start(&reservations.cpus, self.place)?),
        };
        for vcpu in &reservations.vcpus {
            self.tallies.entry(vcpu.id).or_default();
        }
        let tally = |id| self.tallies.get(&id).map(Arc::clone).unwrap_or_default();
        let counters = self.counters.get_or_insert_with(|| {
            let remedy = "a kernel with CONFIG_BPF_SYSCALL and CONFIG_DEBUG_INFO_BTF, such as Debian's, has them";
            Counters::start().map_err(|error| format!("the kernel's counters of vCPUs: {error}; {remedy}"))
        });
        let mut opened = BTreeMap::new();
        let open = |vcpu: &Reserved| {
            let placement = self.way.placement(vcpu.id)?;
            let files = match self.files.get(&vcpu.id) {
                Some(files) => Arc::clone(files),
                None => Arc::new(ThreadFiles::open(vcpu.id).ok()?),
            };
            opened.insert(vcpu.id, Arc::clone(&files));
            let counter = counters.as_mut().ok().and_then(|all| all.of(vcpu, &files));
            let guest = GuestReader::of(vcpu);
            Some(VcpuThread::new(files, counter, vcpu.id, placement, tally(vcpu.id), guest))
        };
        let vcpus = VcpuThreads(reservations.vcpus.iter().map(open).collect());
        self.files = opened;
        let schedule = Schedule::new(reservations, self.planning, now(), tally);
        pacers.replace(Some(Box::new(Pacing::new(schedule, vcpus))))
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

    fn release(&mut self, reservations: &Reservations) -> Result<(), PacerError> {
        let stays = |vcpu: &Reserved| reservations.vcpus.iter().any(|other| other.id == vcpu.id);
        if self.reservations.vcpus.iter().all(stays) {
            return Ok(());
        }
        let mut rest = self.reservations.clone();
        rest.vcpus.retain(stays);
        self.work_on(rest)
    }

    fn set(&mut self, reservations: &Reservations) -> Result<(), PacerError> {
        if !self.hangs() && reservations.differs_only_in_claims(&self.reservations) {
            let running = self.way.check();
            match running {
                Ok(()) => self.reservations = reservations.clone(),
                Err(_) => self.end(),
            }
            return running;
        }
        self.work_on(reservations.clone())
    }

    fn uses(&self) -> BTreeMap<ThreadId, Use> {
        self.tallies.iter().map(|(id, tally)| (*id, tally.usage())).collect()
    }

    fn hangs(&mut self) -> bool {
        self.counters.iter().flatten().for_each(Counters::take_found);
        self.pacers.as_mut().is_some_and(Pacers::cannot_read)
    }

    fn uncounted(&self) -> Option<&str> {
        self.counters.as_ref()?.as_ref().err().map(String::as_str)
    }

    fn threads(&self) -> Vec<(ThreadId, Policy)> {
        let pacers = self.pacers.iter().flat_map(Pacers::ids);
        pacers.map(|id| (id, self.place)).collect()
    }

    fn show(&mut self) -> Option<Snapshot> {
        let vcpus = self.reservations.vcpus.len();
        if vcpus == 0 {
            return None;
        }
        self.pacers.as_mut()?.snapshot(vcpus).ok()
    }
}

#[cfg(test)]
mod tests {
    use ontime_tenants::PriorityTable;

    use super::*;

    #[test]
    fn pacers_with_a_reader_that_hangs_are_given_up() {
        let places = Places::of(PriorityTable::default(), Beyond::Idle);
        let mut paced = Paced::new(Planning::Best, Way::Policies(places), Policy::BULK);
        assert!(!paced.hangs());
        paced.pacers = Some(Pacers::hanging());
        assert!(paced.hangs());
        paced.set(&Reservations::default()).unwrap();
        assert!(paced.pacers.is_none() && !paced.hangs());
    }
}
