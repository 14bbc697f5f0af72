//! One look at the host: tenants, facts, what is wanted, and the plan from them.
//!
//! In: what the daemon knows already ([`Known`]). Out: a [`Look`]. Changes nothing.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use ontime_hostnet::rules::polling_nics;
use ontime_hostnet::{
    self as hostnet, Inherited, Intent, Inventory, Knob, Method, NicId, Originals, Paused, Plan, Refusal, Value,
};
use ontime_sched::Settled;
use ontime_tenants::conflict::conflicts;
use ontime_tenants::{Discovery, PriorityTable, Problem, ProblemKind, Sources, discover};

use crate::daemon::cap::Pauses;
use crate::daemon::config::Config;
use crate::daemon::keeper::Keeper;
use crate::daemon::watches::{Excess, limit};
use crate::paths::Paths;

/// What was found and planned at one moment.
#[derive(Debug, Default)]
pub struct Look {
    /// Tenants.
    pub found: Discovery,
    /// Facts.
    pub inventory: Inventory,
    /// What is wanted.
    pub intent: Intent,
    /// Threads that were made in a pause.
    pub inherited: Inherited,
    /// The plan.
    pub plan: Plan,
    /// Reserved CPU time.
    pub settled: Settled,
    /// NICs that poll under the method, now or when packets come.
    pub polls: Vec<NicId>,
    /// How long discovery took.
    pub discovering: Duration,
    /// Tenants' threads beyond their quotas of capped threads; these are not among `found`.
    pub excess: Vec<Excess>,
}

impl Look {
    /// Looks at the host, and plans as from the originals that the journal keeps.
    pub fn at(sources: &Sources, config: &Config, paths: &Paths, known: Known<'_>) -> Self {
        let start = Instant::now();
        let mut found = known.found.cloned().unwrap_or_else(|| discover(sources, &config.rules));
        let discovering = start.elapsed();
        for thread in found.tenants.iter_mut().flat_map(|tenant| &mut tenant.threads) {
            thread.policy = known.pauses.map_or(thread.policy, |pauses| pauses.past(thread.id, thread.policy));
            thread.policy = known.keeper.map_or(thread.policy, |keeper| keeper.past().past(thread.id, thread.policy));
        }
        let mut excess =
            limit(&mut found.tenants, config.rules.table(), config.daemon.pool(), config.daemon.cap_threads_per_tenant);
        excess.extend_from_slice(known.excess);
        let find = |journal| Inherited::find(&found.tenants, known.paused, journal);
        let inherited = known.journal.map(find).unwrap_or_default();
        inherited.put_right(&mut found.tenants);
        if let Some(journal) = known.journal {
            judge_as_found(&mut found, journal, config.rules.table());
        }
        let inventory = Inventory::scan(&paths.roots());
        let mut intent = Intent::new(&config.host, config.rules.table(), found.tenants.clone(), known.caps);
        intent.method = known.method.unwrap_or(intent.method);
        intent.resting = known.resting.cloned().unwrap_or_default();
        let mut settled = Settled::default();
        if let Some(keeper) = known.keeper {
            settled = keeper.settle(&config.sched, &found.tenants, &inventory.cpus.online, intent.method);
            intent.reserved = keeper.places(&settled);
        }
        let mut look = Self { found, inventory, intent, inherited, settled, discovering, excess, ..Self::default() };
        look.plan_again(known.journal);
        look
    }

    /// Whether nobody has looked yet.
    pub fn is_none(&self) -> bool {
        self.inventory.cpus.online.iter().next().is_none()
    }

    /// Why something that is there may be missing: who plans on this would give back what is to stay.
    pub fn incomplete(&self) -> Option<&str> {
        self.found.incomplete.as_deref().or(self.inventory.incomplete.as_deref())
    }

    pub(super) fn replan(&mut self, journal: &Originals, caps: bool) {
        if self.intent.caps_in_force != caps {
            self.intent.caps_in_force = caps;
            self.plan_again(Some(journal));
        }
    }

    /// Has the finding about protections say why they stay on.
    pub(super) fn name_uncapped(&mut self, why: Option<(String, &str)>) {
        let Some((found, remedy)) = why else { return };
        for finding in self.plan.findings.iter_mut().filter(|of| of.refusal == Some(Refusal::NoCaps)) {
            finding.found.clone_from(&found);
            remedy.clone_into(&mut finding.remedy);
        }
    }

    /// Takes threads to have what this pass gives back to them: who watches them where they still are would put them
    /// there again.
    pub(super) fn expect_given_back(&mut self, journal: &Originals) {
        let wanted: BTreeSet<String> = self.plan.settings.iter().map(|setting| setting.knob.key()).collect();
        for thread in self.found.tenants.iter_mut().flat_map(|tenant| &mut tenant.threads) {
            let knob = Knob::ThreadPolicy { thread: thread.id, comm: thread.comm.clone() };
            if let (false, Some(Value::Policy(original))) = (wanted.contains(&knob.key()), journal.original(&knob)) {
                thread.policy = *original;
            }
        }
    }

    fn plan_again(&mut self, journal: Option<&Originals>) {
        (self.plan, self.polls) = planned(&self.inventory, &self.intent, journal);
        self.inherited.note(&mut self.plan);
    }
}

/// Finds conflicts anew, with every thread as it was before Ontime changed it: what an earlier pass set, and this one
/// gives back, is no conflict.
fn judge_as_found(found: &mut Discovery, journal: &Originals, table: PriorityTable) {
    if journal.entries().is_empty() {
        return;
    }
    let mut tenants = found.tenants.clone();
    for thread in tenants.iter_mut().flat_map(|tenant| &mut tenant.threads) {
        let (id, comm) = (thread.id, String::new());
        if let Some(Value::Policy(original)) = journal.original(&Knob::ThreadPolicy { thread: id, comm: comm.clone() })
        {
            thread.policy = *original;
        }
        if let Some(Value::Cpus(original)) = journal.original(&Knob::ThreadAffinity { thread: id, comm }) {
            thread.affinity = original.to_string();
        }
    }
    found.problems.retain(|problem| !matches!(problem.kind, ProblemKind::Conflict(_)));
    let of = |(subject, conflict)| Problem { subject, kind: ProblemKind::Conflict(conflict) };
    found.problems.extend(conflicts(&tenants, &table).into_iter().map(of));
}

/// What a look starts from besides the host and its configuration.
#[derive(Default, Clone, Copy)]
pub struct Known<'a> {
    /// The tenants, where they have just been found.
    pub found: Option<&'a Discovery>,
    /// What was taken out of these.
    pub excess: &'a [Excess],
    /// Instead of the configuration's.
    pub method: Option<Method>,
    /// The originals.
    pub journal: Option<&'a Originals>,
    /// Whether caps are in force.
    pub caps: bool,
    /// NICs whose polling rests, by index.
    pub resting: Option<&'a BTreeSet<u32>>,
    /// Containers' threads that caps have paused up to now.
    pub paused: &'a [Paused],
    /// Who may be paused since before this look: at SCHED_IDLE by its cap, not by its own choice.
    pub pauses: Option<&'a Pauses>,
    /// Who keeps reserved CPU time; without one nothing is reserved.
    pub keeper: Option<&'a Keeper>,
}

/// The plan, and the NICs that poll under its method.
pub(super) fn planned(inventory: &Inventory, intent: &Intent, journal: Option<&Originals>) -> (Plan, Vec<NicId>) {
    let plan = |inventory: &Inventory, intent: &Intent| {
        let polls = polling_nics(inventory, intent).map(|nic| nic.id.clone()).collect();
        (hostnet::plan(inventory, intent), polls)
    };
    match journal {
        Some(journal) => {
            let (inventory, intent) = hostnet::as_found(inventory.clone(), intent.clone(), journal);
            plan(&inventory, &intent)
        }
        None => plan(inventory, intent),
    }
}
