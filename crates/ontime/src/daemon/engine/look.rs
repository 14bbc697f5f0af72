//! One look at the host: tenants, inventory, intent, and the plan made from them.
//!
//! In: what the daemon already knows ([`Known`]). Out: a [`Look`]. Changes nothing.

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
use crate::daemon::watches::{OverQuota, limit};
use crate::paths::Paths;

/// What was found and planned at one moment.
#[derive(Debug, Default)]
pub(crate) struct Look {
    /// Tenants.
    pub found: Discovery,
    /// Facts about the host.
    pub inventory: Inventory,
    /// What the configuration and the tenants require.
    pub intent: Intent,
    /// Threads that were created in a pause of their parent, and inherited its policy.
    pub inherited: Inherited,
    pub plan: Plan,
    /// Reserved CPU time.
    pub settled: Settled,
    /// Where the plan is shown and not applied: the CPU time that would be reserved. `settled` has no vCPU then.
    pub foreseen: Settled,
    /// NICs that poll under the method, now or when packets come.
    pub polls: Vec<NicId>,
    /// How long discovery took.
    pub discovering: Duration,
    /// Threads beyond their tenants' quotas of capped threads. They are not part of `found`.
    pub excess: Vec<OverQuota>,
}

impl Look {
    /// Looks at the host, and plans as if every knob had the original value that the journal has.
    pub(crate) fn at(sources: &Sources, config: &Config, paths: &Paths, known: Known<'_>) -> Self {
        let start = Instant::now();
        let mut found = known.found.cloned().unwrap_or_else(|| discover(sources, &config.rules));
        let discovering = start.elapsed();
        for thread in found.tenants.iter_mut().flat_map(|tenant| &mut tenant.threads) {
            thread.policy = known.pauses.map_or(thread.policy, |pauses| pauses.planned(thread.id, thread.policy));
            thread.policy = known
                .keeper
                .map_or(thread.policy, |keeper| keeper.planned_policies().planned(thread.id, thread.policy));
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
        let inventory = known.inventory.cloned().unwrap_or_else(|| Inventory::scan(&paths.roots()));
        let mut intent = Intent::new(&config.host, config.rules.table(), found.tenants.clone(), known.caps);
        intent.method = known.method.unwrap_or(intent.method);
        intent.resting = known.resting.cloned().unwrap_or_default();
        let mut settled = Settled::default();
        if let Some(keeper) = known.keeper {
            if known.held_only {
                intent.reserved = keeper.held();
            } else {
                settled = keeper.settle(&config.sched, &found.tenants, &inventory.cpus.online);
                intent.reserved = keeper.places(&settled);
            }
        }
        let mut look = Self { found, inventory, intent, inherited, settled, discovering, excess, ..Self::default() };
        look.plan_again(known.journal);
        look
    }

    /// Whether no look has succeeded yet.
    pub(crate) fn is_none(&self) -> bool {
        self.inventory.cpus.online.iter().next().is_none()
    }

    /// The plan will be shown and not applied: nothing is reserved for it.
    pub(super) fn reserves_nothing(&mut self) {
        let nothing = Settled { refused: self.settled.refused.clone(), ..Settled::default() };
        self.foreseen = std::mem::replace(&mut self.settled, nothing);
    }

    /// Why the look may lack something that exists. A plan from it would restore settings that shall stay.
    pub(crate) fn incomplete(&self) -> Option<&str> {
        self.found.incomplete.as_deref().or(self.inventory.incomplete.as_deref())
    }

    pub(super) fn replan(&mut self, journal: &Originals, caps: bool) {
        if self.intent.caps_in_force != caps {
            self.intent.caps_in_force = caps;
            self.plan_again(Some(journal));
        }
    }

    /// Puts the reason why protections stay on into the finding about them.
    pub(super) fn name_uncapped(&mut self, why: Option<(String, &str)>) {
        let Some((found, remedy)) = why else { return };
        for finding in self.plan.findings.iter_mut().filter(|of| of.refusal == Some(Refusal::NoCaps)) {
            finding.found.clone_from(&found);
            remedy.clone_into(&mut finding.remedy);
        }
    }

    /// Assumes that threads already have the policy that this pass will restore. Otherwise caps would be set up with
    /// the present policy as their place, and give that back to them.
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

/// Finds conflicts again, with every thread as it was before Ontime changed it: settings of an earlier pass that this
/// one restores are no conflict.
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

/// What a look needs to know besides the host and its configuration.
#[derive(Default, Clone, Copy)]
pub(crate) struct Known<'a> {
    /// The tenants, if they have just been discovered.
    pub found: Option<&'a Discovery>,
    /// Threads that were removed from these tenants because of quotas.
    pub excess: &'a [OverQuota],
    /// The facts about the host, if they have just been read, or are not read again.
    pub inventory: Option<&'a Inventory>,
    /// Overrides the method of the configuration.
    pub method: Option<Method>,
    /// The original values.
    pub journal: Option<&'a Originals>,
    /// Whether caps are in force.
    pub caps: bool,
    /// NICs whose polling is suspended because of low traffic, by interface index.
    pub resting: Option<&'a BTreeSet<u32>>,
    /// Threads of containers that caps have paused so far.
    pub paused: &'a [Paused],
    /// A snapshot of pauses from before this look: such threads are at SCHED_IDLE because of their caps.
    pub pauses: Option<&'a Pauses>,
    /// Keeps reserved CPU time. None: nothing is reserved.
    pub keeper: Option<&'a Keeper>,
    /// Admits nothing: threads that the keeper does not hold yet have no reserved CPU time.
    pub held_only: bool,
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
