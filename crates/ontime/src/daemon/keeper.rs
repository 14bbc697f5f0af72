//! Reserved CPU time in the daemon: which back end keeps it, for which threads, and what a pass must know of it.
//!
//! In: the configuration, tenants as found. Out: whose reservations hold ([`Keeper::settle`]); their threads looked
//! after by a back end of `ontime_sched`; a view of policies past its changes ([`Past`]).
//!
//! Who does what: the plan gives a thread its first place and the journal keeps its original, as for every thread; from
//! then on the back end moves it, and the plan sees it at the place it gave. Whoever is not looked after any more is
//! placed by the same pass.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use ontime_hostnet::{CpuSet, Method, RuleId};
use ontime_sched::backend::{Deadline, Paced, Way};
use ontime_sched::seat::Places;
use ontime_sched::shares::Planning;
use ontime_sched::show::Snapshot;
use ontime_sched::{Asks, Backend, BackendKind, Beyond, Refused, SchedConfig, Settled, Use, settle};
use ontime_tenants::{Policy, PriorityTable, Tenant, ThreadId};

/// Whom a back end looks after, and the policy that the plan gave each.
type Held = Rc<RefCell<BTreeMap<ThreadId, Policy>>>;

/// The back end in force, and whom it looks after.
#[derive(Debug)]
pub struct Keeper {
    kind: BackendKind,
    beyond: Beyond,
    backend: Box<dyn Backend>,
    held: Held,
    /// What holds since the last [`Keeper::set`].
    before: Settled,
    /// Why nothing is kept although it is configured.
    off: Option<String>,
    /// What guests ask for beside what is declared.
    asks: Asks,
}

/// What a back end does to policies, so that they can be read past it. Follows the [`Keeper`] it is of.
#[derive(Debug, Clone, Default)]
pub struct Past {
    places: Option<Places>,
    held: Held,
}

impl Past {
    /// The place that the plan gave a thread which was read to have this policy.
    pub fn past(&self, id: ThreadId, read: Policy) -> Policy {
        match (self.places, self.held.borrow().get(&id)) {
            (Some(places), Some(given)) if places.has(read) => *given,
            _ => read,
        }
    }

    /// Whether a back end moves this thread.
    pub fn moves(&self, id: ThreadId) -> bool {
        self.places.is_some() && self.held.borrow().contains_key(&id)
    }
}

impl Keeper {
    /// The configuration's back end; it starts with the first reservation.
    pub fn new(config: &SchedConfig, table: PriorityTable) -> Self {
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
            asks: Asks::new(),
        }
    }

    /// What an earlier daemon kept, and its guests asked for, holds until something else does.
    pub fn remember(&mut self, before: Settled, asks: Asks) {
        self.before = before;
        self.asks = asks;
    }

    /// Whether the other one's back end would do the same.
    pub fn like(&self, other: &Keeper) -> bool {
        (self.kind, self.beyond, self.backend.places()) == (other.kind, other.beyond, other.backend.places())
    }

    /// What guests ask for; counts from the next time that it settles.
    pub fn asks(&mut self) -> &mut Asks {
        &mut self.asks
    }

    /// Its back end.
    pub fn kind(&self) -> BackendKind {
        self.kind
    }

    /// Whether its back end moves those whom it looks after.
    pub fn moves(&self) -> bool {
        self.backend.places().is_some()
    }

    /// For reading policies from now on.
    pub fn past(&self) -> Past {
        Past { places: self.backend.places(), held: Rc::clone(&self.held) }
    }

    /// Whose reservations hold, among these tenants on these CPUs.
    pub fn settle(&self, config: &SchedConfig, tenants: &[Tenant], online: &CpuSet, method: Method) -> Settled {
        if config.reservations.is_empty() {
            return Settled::default();
        }
        let why = match &self.off {
            Some(why) => Some(why.clone()),
            None if !method.has(RuleId::VcpuPlace) => Some(format!(
                "method {method} leaves vCPUs where they are; use one that places them, such as partitioned"
            )),
            None => None,
        };
        let Some(why) = why else {
            return settle(config, tenants, &online.iter().collect(), &self.before, &self.asks);
        };
        let refuse = |tenant: &Tenant| Refused { tenant: tenant.name.clone(), why: why.clone() };
        let named = |tenant: &&Tenant| config.reservations.iter().any(|declared| declared.name == tenant.name);
        Settled { refused: tenants.iter().filter(named).map(refuse).collect(), ..Settled::default() }
    }

    /// The policy that the plan is to give each thread.
    pub fn places(&self, settled: &Settled) -> BTreeMap<ThreadId, Policy> {
        settled.vcpus.iter().map(|vcpu| (vcpu.id, self.backend.place(vcpu))).collect()
    }

    /// Looks no longer after who is not in `settled`.
    pub fn release(&mut self, settled: &Settled) {
        if let Err(error) = self.backend.release(settled) {
            self.switch_off(&error.to_string());
        }
        let stay = settled.ids();
        self.held.borrow_mut().retain(|id, _| stay.contains(id));
        self.before.vcpus.retain(|vcpu| stay.contains(&vcpu.id));
    }

    /// Looks after exactly these, which the plan has placed. False: it cannot, and they are to be placed as if nothing
    /// were reserved.
    pub fn set(&mut self, settled: &Settled) -> bool {
        if self.off.is_some() {
            return settled.vcpus.is_empty();
        }
        match self.backend.set(settled) {
            Ok(()) => {
                *self.held.borrow_mut() = self.places(settled);
                self.before = settled.clone();
                true
            }
            Err(error) => {
                self.switch_off(&error.to_string());
                false
            }
        }
    }

    fn switch_off(&mut self, why: &str) {
        tracing::error!("{why}");
        self.off = Some(format!("{why}; correct that, then run `ontime reload`"));
        self.held.borrow_mut().clear();
        self.before = Settled::default();
    }

    /// Why nothing is kept although it is configured.
    pub fn off(&self) -> Option<&str> {
        self.off.as_deref()
    }

    /// What each has had.
    pub fn uses(&self) -> BTreeMap<ThreadId, Use> {
        self.backend.uses()
    }

    /// The present slice, where there is one.
    pub fn show(&mut self) -> Option<Snapshot> {
        self.backend.show()
    }
}
