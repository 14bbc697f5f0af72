//! Reserved CPU time in the daemon: which back end keeps it, for which threads, and what a pass must know about that.
//!
//! In: the configuration and the tenants. Out: the reservations that hold ([`Keeper::settle`]); their threads, handed
//! to a back end of `ontime_sched`; a view of policies without the back end's changes ([`PlannedPolicies`]).
//!
//! The plan gives a thread its first place and the journal records its original policy, as for every thread. From then
//! on the back end moves the thread, and the plan sees it at its first place. A thread that leaves the back end is
//! placed by the same pass.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use ontime_hostnet::CpuSet;
use ontime_sched::backend::{Deadline, Paced, Way};
use ontime_sched::places::Places;
use ontime_sched::shares::Planning;
use ontime_sched::show::Snapshot;
use ontime_sched::{Asks, Backend, BackendKind, Beyond, LeaseState, Refused, SchedConfig, Settled, Use, settle};
use ontime_tenants::{Policy, PriorityTable, Tenant, ThreadId};

use super::own::OwnThread;

/// The threads of a back end, and the policy that the plan gave to each.
type BackendThreads = Rc<RefCell<BTreeMap<ThreadId, Policy>>>;

/// The back end in force, and its threads.
#[derive(Debug)]
pub(crate) struct Keeper {
    kind: BackendKind,
    beyond: Beyond,
    backend: Box<dyn Backend>,
    held: BackendThreads,
    /// The settlement since the last [`Keeper::set`].
    before: Settled,
    /// Why nothing is kept although reservations are configured.
    off: Option<String>,
    /// Why pacers lack the kernel's counters, as it was logged last.
    uncounted: Option<String>,
    /// What guests request in addition to the declared reservations.
    asks: Asks,
}

/// Hides a back end's changes of policies from readers. It shares the list of threads with its [`Keeper`].
#[derive(Debug, Clone, Default)]
pub(crate) struct PlannedPolicies {
    places: Option<Places>,
    held: BackendThreads,
}

impl PlannedPolicies {
    /// The policy that the plan gave to a thread, if the policy just read is one of the back end's places.
    pub(crate) fn planned(&self, id: ThreadId, read: Policy) -> Policy {
        match (self.places, self.held.borrow().get(&id)) {
            (Some(places), Some(given)) if places.has(read) => *given,
            _ => read,
        }
    }

    /// Whether a back end moves this thread.
    pub(crate) fn moves(&self, id: ThreadId) -> bool {
        self.places.is_some() && self.held.borrow().contains_key(&id)
    }
}

/// All of these tenants' reservations and all leases are refused.
pub(crate) fn refused(config: &SchedConfig, tenants: &[Tenant], why: &str) -> Settled {
    let refuse = |tenant: &Tenant| Refused { tenant: tenant.name.clone(), why: why.to_owned() };
    let named = |tenant: &&Tenant| config.reservations.iter().any(|declared| declared.name == tenant.name);
    let unheld = |why: &str| LeaseState { held: false, why: Some(why.to_owned()) };
    let leases = config.leases.iter().map(|lease| (lease.name.clone(), unheld(why)));
    let refused = tenants.iter().filter(named).map(refuse).collect();
    Settled { refused, leases: leases.collect(), ..Settled::default() }
}

impl Keeper {
    /// The configured back end. It starts with the first reservation.
    pub(crate) fn new(config: &SchedConfig, table: PriorityTable) -> Self {
        let paced = |planning, way| Box::new(Paced::new(planning, way, table.pacer()));
        let policies = Way::Policies(Places::of(table, config.beyond));
        let backend: Box<dyn Backend> = match config.backend {
            BackendKind::Paced => paced(Planning::Best, policies),
            BackendKind::DpWrap => paced(Planning::Slices, policies),
            BackendKind::SchedExt => paced(Planning::Best, Way::Ext(config.beyond, None)),
            BackendKind::Deadline => Box::<Deadline>::default(),
        };
        Self {
            kind: config.backend,
            beyond: config.beyond,
            backend,
            held: Rc::default(),
            before: Settled::default(),
            off: None,
            uncounted: None,
            asks: Asks::new(),
        }
    }

    /// Takes over what an earlier daemon kept and its guests requested.
    pub(crate) fn remember(&mut self, before: Settled, asks: Asks) {
        self.before = before;
        self.asks = asks;
    }

    /// Whether both have the same kind of back end with the same places.
    pub(crate) fn like(&self, other: &Keeper) -> bool {
        (self.kind, self.beyond, self.backend.places()) == (other.kind, other.beyond, other.backend.places())
    }

    /// The requests of guests. A change counts from the next [`Self::settle`] on.
    pub(crate) fn asks(&mut self) -> &mut Asks {
        &mut self.asks
    }

    pub(crate) fn kind(&self) -> BackendKind {
        self.kind
    }

    /// Whether the back end changes its threads' policies.
    pub(crate) fn moves(&self) -> bool {
        self.backend.places().is_some()
    }

    /// A view of policies without the back end's changes.
    pub(crate) fn planned_policies(&self) -> PlannedPolicies {
        PlannedPolicies { places: self.backend.places(), held: Rc::clone(&self.held) }
    }

    /// Decides which of these tenants' reservations hold on these CPUs.
    pub(crate) fn settle(&self, config: &SchedConfig, tenants: &[Tenant], online: &CpuSet) -> Settled {
        if config.is_empty() {
            return Settled::default();
        }
        let Some(why) = &self.off else {
            return settle(config, tenants, online, &self.before, &self.asks);
        };
        refused(config, tenants, why)
    }

    /// Why nothing can be kept.
    pub(crate) fn why_off(&self) -> Option<String> {
        self.off.clone()
    }

    /// The first place that the plan gives to each thread.
    pub(crate) fn places(&self, settled: &Settled) -> BTreeMap<ThreadId, Policy> {
        settled.vcpus.iter().map(|vcpu| (vcpu.id, self.backend.place(vcpu))).collect()
    }

    /// The threads of the back end, and the first place that the plan gave to each.
    pub(crate) fn held(&self) -> BTreeMap<ThreadId, Policy> {
        self.held.borrow().clone()
    }

    /// Takes threads that are not in `settled` away from the back end.
    pub(crate) fn release(&mut self, settled: &Settled) {
        if let Err(error) = self.backend.release(settled) {
            self.switch_off(&error.to_string());
        }
        let stay = settled.ids();
        self.held.borrow_mut().retain(|id, _| stay.contains(id));
        self.before.vcpus.retain(|vcpu| stay.contains(&vcpu.id));
    }

    /// Hands exactly these threads, which the plan has placed, to the back end. Returns false if that failed; then the
    /// threads must be placed as if nothing were reserved.
    pub(crate) fn set(&mut self, settled: &Settled) -> bool {
        if self.off.is_some() {
            return settled.vcpus.is_empty();
        }
        match self.backend.set(settled) {
            Ok(()) => {
                *self.held.borrow_mut() = self.places(settled);
                self.before = settled.clone();
                self.log_uncounted();
                true
            }
            Err(error) => {
                self.switch_off(&error.to_string());
                false
            }
        }
    }

    fn log_uncounted(&mut self) {
        let why = self.uncounted().map(str::to_owned);
        if let Some(why) = why.as_ref().filter(|_| why != self.uncounted) {
            tracing::warn!("pacers read vCPUs' files instead, which takes more CPU time: {why}");
        }
        self.uncounted = why;
    }

    /// Why pacers lack the kernel's counters of vCPUs; None if they have them, or there are no pacers.
    pub(crate) fn uncounted(&self) -> Option<&str> {
        self.backend.uncounted()
    }

    fn switch_off(&mut self, why: &str) {
        tracing::error!("{why}");
        self.off = Some(format!("{why}; correct that, then run `ontime reload`"));
        self.held.borrow_mut().clear();
        self.before = Settled::default();
    }

    /// Why nothing is kept although reservations are configured.
    pub(crate) fn off(&self) -> Option<&str> {
        self.off.as_deref()
    }

    /// Whether [`Self::set`] has to be called although nothing has changed. To be asked once a second.
    pub(crate) fn hangs(&mut self) -> bool {
        self.backend.hangs()
    }

    /// The back end's own real-time threads.
    pub(crate) fn own_threads(&self) -> impl Iterator<Item = OwnThread> {
        self.backend.threads().into_iter().map(|(id, place)| OwnThread { name: "ontime-pace", id, place })
    }

    /// The counters of each thread.
    pub(crate) fn uses(&self) -> BTreeMap<ThreadId, Use> {
        self.backend.uses()
    }

    /// The present slice, if the back end has one.
    pub(crate) fn show(&mut self) -> Option<Snapshot> {
        self.backend.show()
    }
}
