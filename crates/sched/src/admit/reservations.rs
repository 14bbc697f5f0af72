//! The result of an admission: the vCPUs with a reservation, and the VMs that are refused.

use std::collections::{BTreeMap, BTreeSet};

use ontime_plan::{Admitted, Bandwidth, Nanos};
use ontime_tenants::{Class, ThreadId};
use serde::{Deserialize, Serialize};

use crate::admit::offer::Offer;
use crate::admit::request::GuestNeed;
use crate::beside::Beside;
use crate::guest_page::{Page, Task};
use crate::model::{Budget, NOTHING, Pacing, Table};

/// A vCPU with a reservation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reserved {
    /// The vCPU's thread.
    pub id: ThreadId,
    /// The name of the VM.
    pub tenant: String,
    /// The VM's class.
    pub class: Class,
    /// The vCPU's number in the VM.
    pub vcpu: u32,
    /// CPU time in each period.
    pub budget: Nanos,
    /// The length of the interval in which the budget is given.
    pub period: Nanos,
    /// Budget over period.
    pub bandwidth: Bandwidth,
    /// The part of it that the guest's deadline tasks requested.
    pub guest: Option<GuestNeed>,
    /// Where the guest publishes its next deadlines.
    pub page: Option<Page>,
    /// What the guest may claim without asking.
    pub offer: Option<Offer>,
    /// The CPU on which the plan keeps the vCPU, an index of [`Reservations::cpus`]; None if the vCPU may migrate.
    pub home: Option<u32>,
    /// Whether the vCPU may run on one CPU only. A wider affinity may have a home CPU too, and the kernel may move the
    /// vCPU to another one, also to one without reservations.
    pub pinned: bool,
    /// Whether it has its reservation by a lease.
    pub leased: bool,
}

impl Reserved {
    /// What the vCPU's guest holds, from its admitted need.
    pub fn claimed(&self) -> Budget {
        self.guest.map_or_else(Budget::default, |need| Budget { budget: need.budget.0, period: need.period.0 })
    }

    /// The vCPU's deadline tasks, as its guest publishes them, the earliest deadline first: empty if the guest
    /// publishes none, None if they cannot be read. Reading may block.
    pub fn tasks(&self) -> Option<Vec<Task>> {
        self.page.as_ref().map_or_else(|| Some(Vec::new()), |page| page.tasks(self.vcpu))
    }
}

/// A vCPU with a reservation, and its CPU: what is remembered over a restart of the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// The vCPU's thread.
    pub id: ThreadId,
    /// The host's CPU; None if the vCPU may migrate.
    pub cpu: Option<u32>,
}

/// A VM whose reservation was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The name of the VM.
    pub tenant: String,
    /// The reason, and the remedy.
    pub why: String,
}

/// Why vCPUs are not admitted.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unfit {
    /// The reason, and the remedy.
    pub(crate) why: String,
    /// The CPU whose pacer lacks time, an index of [`Reservations::cpus`]: another one may have it.
    pub(crate) cpu: Option<u32>,
}

impl From<String> for Unfit {
    fn from(why: String) -> Self {
        Self { why, cpu: None }
    }
}

/// Bandwidth that is held for a lease while no vCPU has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    /// The name of the lease.
    pub lease: String,
    /// How much.
    pub bandwidth: Bandwidth,
    /// On which CPU, an index of [`Reservations::cpus`]; None if it is not pinned.
    pub cpu: Option<u32>,
}

/// How many vCPUs, and how much of what is kept, were admitted before what is new now; they come first.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Present {
    pub(crate) vcpus: usize,
    pub(crate) kept: usize,
}

/// What became of a lease.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeaseState {
    /// Whether its bandwidth is held.
    pub held: bool,
    /// Why it is not held, or why its tenants do not have it.
    pub why: Option<String>,
}

/// The result of an admission.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reservations {
    /// The vCPUs with a reservation, in the order of admission.
    pub vcpus: Vec<Reserved>,
    /// What is held for leases besides.
    pub kept: Vec<Kept>,
    /// The leases, by name.
    pub leases: BTreeMap<String, LeaseState>,
    /// The VMs without.
    pub refused: Vec<Refused>,
    /// The host's CPUs for reservations, by number; the planner calls them 0, 1, 2...
    pub cpus: Vec<u32>,
    /// For each of these CPUs: whether vCPUs without a home run there.
    pub shared: Vec<bool>,
    /// What is kept of the CPUs for others.
    pub beside: Beside,
    /// How pacers plan the vCPUs: their own time is admitted too.
    pub pacing: Pacing,
}

impl Reservations {
    /// The sum of all reservations, in CPUs.
    pub fn total(&self) -> Bandwidth {
        self.vcpus.iter().map(|vcpu| vcpu.bandwidth).chain(self.kept.iter().map(|kept| kept.bandwidth)).sum()
    }

    /// The host's CPU on which the plan keeps a vCPU; None if the vCPU may migrate.
    pub fn cpu(&self, vcpu: &Reserved) -> Option<u32> {
        self.cpus.get(usize::try_from(vcpu.home?).ok()?).copied()
    }

    /// Sets the admitted vCPUs, their home CPUs, and what is kept besides.
    pub(crate) fn set_admitted(&mut self, vcpus: Vec<Reserved>, kept: Vec<Kept>, admitted: Admitted) {
        self.vcpus = vcpus;
        self.kept = kept;
        let homes = admitted.home.into_iter().skip(self.cpus.len());
        for (vcpu, home) in self.vcpus.iter_mut().zip(homes) {
            vcpu.home = home;
        }
        self.shared = admitted.shared;
    }

    /// Refuses each VM that has a vCPU which is not `held`.
    pub fn keep_only(&mut self, held: impl Fn(ThreadId) -> bool, why: &str) {
        let unheld = self.vcpus.iter().filter(|vcpu| !held(vcpu.id));
        let refused: BTreeSet<String> = unheld.map(|vcpu| vcpu.tenant.clone()).collect();
        self.vcpus.retain(|vcpu| !refused.contains(&vcpu.tenant));
        self.refused.extend(refused.into_iter().map(|tenant| Refused { tenant, why: why.to_owned() }));
    }

    /// The reservations to be remembered: which thread has one, and on which of the host's CPUs.
    pub fn held(&self) -> Vec<Held> {
        self.vcpus.iter().map(|vcpu| Held { id: vcpu.id, cpu: self.cpu(vcpu) }).collect()
    }

    /// A `before` for [`crate::admit::admit`], from remembered reservations. All else is unknown.
    pub fn remembered(held: &[Held]) -> Self {
        let cpus: Vec<u32> = held.iter().filter_map(|one| one.cpu).collect::<BTreeSet<_>>().into_iter().collect();
        let vcpu = |one: &Held| Reserved {
            id: one.id,
            tenant: String::new(),
            class: Class::Bulk,
            vcpu: 0,
            budget: Nanos(0),
            period: Nanos(0),
            bandwidth: Bandwidth::ZERO,
            guest: None,
            page: None,
            offer: None,
            home: one.cpu.and_then(|cpu| (0..).zip(&cpus).find(|(_, one)| **one == cpu).map(|(at, _)| at)),
            pinned: false,
            leased: false,
        };
        let vcpus = held.iter().map(vcpu).collect();
        Self { vcpus, cpus, ..Self::default() }
    }

    /// Whether a guest has the bandwidth that it requested.
    ///
    /// # Errors
    /// The reason, if not.
    pub fn has(&self, tenant: &str, needs: &[GuestNeed]) -> Result<(), String> {
        let has = |need: &GuestNeed| {
            self.vcpus.iter().any(|vcpu| vcpu.tenant == tenant && vcpu.vcpu == need.vcpu && vcpu.guest == Some(*need))
        };
        if needs.iter().all(has) {
            return Ok(());
        }
        let refused = self.refused.iter().find(|refused| refused.tenant == tenant);
        Err(refused
            .map_or_else(|| "its VM is not found any more; see `ontime ps`".to_owned(), |refused| refused.why.clone()))
    }

    /// The offers to a VM's guest, by vCPU.
    pub fn offers(&self, tenant: &str) -> Table {
        let mut table = NOTHING;
        for vcpu in self.vcpus.iter().filter(|vcpu| vcpu.tenant == tenant) {
            if let (Some(place), Some(offer)) = (table.get_mut(vcpu.vcpu as usize), &vcpu.offer) {
                *place = offer.offered;
            }
        }
        table
    }

    /// Whether this differs from `before` only in what guests claimed from their offers: pacers read claims themselves.
    pub(crate) fn differs_only_in_claims(&self, before: &Reservations) -> bool {
        let only_claims = |(vcpu, old): (&Reserved, &Reserved)| {
            let as_before = Reserved {
                budget: old.budget,
                period: old.period,
                bandwidth: old.bandwidth,
                guest: old.guest,
                ..vcpu.clone()
            };
            vcpu == old || vcpu.offer.is_some() && as_before == *old
        };
        (self.vcpus.len(), &self.cpus, &self.shared, self.beside)
            == (before.vcpus.len(), &before.cpus, &before.shared, before.beside)
            && self.vcpus.iter().zip(&before.vcpus).all(only_claims)
    }

    /// The threads of the admitted vCPUs.
    pub fn ids(&self) -> BTreeSet<ThreadId> {
        self.vcpus.iter().map(|vcpu| vcpu.id).collect()
    }
}
