//! One pass over the host: discover, take inventory, plan, apply; and what of it is kept for the next pass and for questions
//! (`answers`).
//!
//! The order within a pass is what makes it safe:
//! 1. threads that are no longer to be capped are released, so that only the planner places them;
//! 2. the plan is applied, with the kernel's protections on if a thread is to come to real-time priority that is not capped yet;
//! 3. vCPUs with reserved CPU time are kept to it (`keeper`), every other thread at real-time priority is capped;
//! 4. the guardian learns what to put back;
//! 5. only then, and only if every thread is capped, do protections go off. They stay on where CPU time is reserved: the reserve is at
//!    least what they give to others, so that they never have to.

mod answers;
mod reservations;
mod traffic;

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::time::{Duration, Instant};

use ontime_hostnet::rules::polling_nics;
use ontime_hostnet::{
    self as hostnet, Done, Host, Inherited, Intent, Inventory, Item, Journal, Knob, KnobError, LiveHost, Method, NicId,
    Paused, Plan, Value,
};
use ontime_sched::{Refused, Settled};
use ontime_tenants::{Discovery, Policy, PriorityTable, Rules, Sources, ThreadId, discover};

use self::traffic::Traffic;
use crate::api;
use crate::daemon::cap::{Caps, Pauses};
use crate::daemon::config::Config;
use crate::daemon::guardian::{Charge, Guardian};
use crate::daemon::keeper::{Keeper, Past};
use crate::daemon::metrics::Metrics;
use crate::daemon::protections;
use crate::daemon::view::{self, Owned};
use crate::daemon::watches::Watches;
use crate::log::Repeats;
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
        let find = |journal| Inherited::find(&found.tenants, known.paused, journal);
        let inherited = known.journal.map(find).unwrap_or_default();
        inherited.put_right(&mut found.tenants);
        let inventory = Inventory::scan(&paths.roots());
        let mut intent = Intent::new(&config.host, config.rules.table(), found.tenants.clone(), known.caps);
        intent.method = known.method.unwrap_or(intent.method);
        intent.resting = known.resting.cloned().unwrap_or_default();
        let mut settled = Settled::default();
        if let Some(keeper) = known.keeper {
            settled = keeper.settle(&config.sched, &found.tenants, &inventory.cpus.online, intent.method);
            intent.reserved = keeper.places(&settled);
        }
        let mut look = Self { found, inventory, intent, inherited, settled, discovering, ..Self::default() };
        look.plan_again(known.journal);
        look
    }

    fn replan(&mut self, journal: &Journal, caps: bool) {
        if self.intent.caps_in_force != caps {
            self.intent.caps_in_force = caps;
            self.plan_again(Some(journal));
        }
    }

    fn plan_again(&mut self, journal: Option<&Journal>) {
        (self.plan, self.polls) = planned(&self.inventory, &self.intent, journal);
        self.inherited.note(&mut self.plan);
    }
}

/// What a look starts from besides the host and its configuration.
#[derive(Default, Clone, Copy)]
pub struct Known<'a> {
    /// The tenants, where they have just been found.
    pub found: Option<&'a Discovery>,
    /// Instead of the configuration's.
    pub method: Option<Method>,
    /// The originals.
    pub journal: Option<&'a Journal>,
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
fn planned(inventory: &Inventory, intent: &Intent, journal: Option<&Journal>) -> (Plan, Vec<NicId>) {
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

/// The daemon's state between passes.
pub struct Engine {
    paths: Paths,
    host: LiveHost,
    sources: Sources,
    config: Config,
    method: Option<Method>,
    journal: Journal,
    caps: Result<Caps, String>,
    guardian: Option<Guardian>,
    /// Every thread of `watches` is capped, and the guardian knows.
    in_force: bool,
    watches: Watches,
    keeper: Keeper,
    /// Those that have metrics.
    domains: BTreeSet<Owned>,
    look: Look,
    traffic: Traffic,
    /// What the last pass wanted of every knob; nothing after a reset.
    applied: BTreeMap<String, Value>,
    state: api::State,
    errors: Vec<api::Problem>,
    /// Knobs that the last pass could not set, and why.
    failures: BTreeMap<String, String>,
    /// For Prometheus.
    pub metrics: Metrics,
    repeats: Repeats,
    passes: u64,
    last_pass: Duration,
}

impl Engine {
    /// The daemon's engine: caps and guardian are started, nothing is applied yet.
    ///
    /// # Errors
    /// Where the journal cannot be opened.
    pub fn new(paths: Paths, config: Config) -> anyhow::Result<Self> {
        let journal = paths.journal()?;
        if journal.stale() > 0 {
            tracing::info!("{} original values of an earlier boot dropped", journal.stale());
        }
        let mut engine = Self {
            host: LiveHost::with_roots(paths.roots()),
            paths,
            sources: Sources::host(),
            caps: Err("not started".to_owned()),
            keeper: Keeper::new(&config.sched, config.rules.table()),
            config,
            method: None,
            journal,
            guardian: None,
            in_force: false,
            watches: Watches::default(),
            domains: BTreeSet::new(),
            look: Look::default(),
            traffic: Traffic::default(),
            applied: BTreeMap::new(),
            state: api::State::Applied,
            errors: Vec::new(),
            failures: BTreeMap::new(),
            metrics: Metrics::default(),
            repeats: Repeats::default(),
            passes: 0,
            last_pass: Duration::ZERO,
        };
        // What an earlier daemon switched off and nobody caps any more, whatever the pass to come will find.
        for (knob, done) in protections::restore(&engine.host, &engine.journal) {
            if let Err(error) = done {
                tracing::error!("restoring {knob}: {error}");
            }
        }
        engine.start_caps();
        Ok(engine)
    }

    /// The host as discovery sees it.
    pub fn sources(&self) -> &Sources {
        &self.sources
    }

    /// What the last pass found.
    pub fn found(&self) -> &Discovery {
        &self.look.found
    }

    /// The rules in force.
    pub fn rules(&self) -> &Rules {
        &self.config.rules
    }

    /// How often to look for what no event tells.
    pub fn rescan(&self) -> Duration {
        self.config.daemon.rescan
    }

    /// How long the last pass took.
    pub fn last_pass(&self) -> Duration {
        self.last_pass
    }

    fn start_caps(&mut self) {
        self.in_force = false;
        // The old watcher ends before the new one starts: two would fight over the same threads.
        self.caps = Err("being restarted".to_owned());
        self.caps = Caps::start(self.config.daemon.caps(self.table())).map_err(|error| error.to_string());
        match &self.caps {
            Ok(caps) => tracing::info!("cap watcher is thread {}", caps.watcher_tid),
            Err(why) => self.repeats.warn(why),
        }
    }

    fn table(&self) -> PriorityTable {
        self.config.rules.table()
    }

    /// A pass. What cannot be done is kept as a problem; the next pass tries again.
    pub fn pass(&mut self, reason: &str) -> hostnet::Report {
        let start = Instant::now();
        self.errors.clear();
        let report = match self.state {
            api::State::Applied => self.apply(),
            api::State::Reset => {
                self.look = self.look_now(&[]);
                hostnet::Report::default()
            }
        };
        self.passes += 1;
        self.last_pass = start.elapsed();
        self.account(reason);
        report
    }

    /// As of a host without caps.
    fn look_now(&self, paused: &[Paused]) -> Look {
        let pauses = self.pauses();
        let known = Known {
            method: self.method,
            journal: Some(&self.journal),
            resting: Some(&self.traffic.resting),
            paused,
            pauses: Some(&pauses),
            ..Known::default()
        };
        Look::at(&self.sources, &self.config, &self.paths, known)
    }

    /// The containers' threads of the last pass that caps have paused.
    fn paused(&self) -> Vec<Paused> {
        let caps = self.caps.as_ref().map(Caps::report).unwrap_or_default();
        let paused: BTreeSet<ThreadId> = caps.iter().filter(|used| used.pauses > 0).map(|used| used.id).collect();
        Paused::of(&self.look.found.tenants, &self.journal, |id| paused.contains(&id))
    }

    fn apply(&mut self) -> hostnet::Report {
        let paused = self.paused();
        let before = std::mem::take(&mut self.applied);
        let mut report = self.converge(&paused);
        if !self.keeper.set(&self.look.settled) {
            let again = self.converge(&paused);
            add_new(&mut report, again);
        }
        self.cap();
        if self.look.intent.caps_in_force != self.in_force {
            self.look.replan(&self.journal, self.in_force);
            let host = PastPauses { host: &self.host, pauses: self.pauses(), paced: self.keeper.past() };
            match hostnet::apply(&host, &self.look.plan, &mut self.journal) {
                Ok(more) => add_new(&mut report, more),
                Err(error) => self.error("journal", &error),
            }
            report.findings.clone_from(&self.look.plan.findings);
        }
        self.note_changes(&mut report, &before);
        self.applied = values(&self.look.plan);
        report
    }

    fn pauses(&self) -> Pauses {
        self.caps.as_ref().map(Caps::pauses).unwrap_or_default()
    }

    /// Looks, plans and applies until nothing new comes up, with protections on for threads that are not capped yet.
    fn converge(&mut self, paused: &[Paused]) -> hostnet::Report {
        let capped: BTreeSet<_> = self.watches.list.iter().map(|watch| watch.id).collect();
        let kernel = self.config.daemon.cap_cpu_share;
        let pauses = self.pauses();
        let Self {
            host, journal, sources, config, method, paths, caps, look, watches, in_force, traffic, keeper, ..
        } = self;
        let mut lost = None;
        let mut unprotected = Vec::new();
        // A second look is for the threads that the first one's settings made: tenants need not be found again.
        let mut found: Option<Discovery> = None;
        let mut discovering = Duration::ZERO;
        let host = PastPauses { host, pauses, paced: keeper.past() };
        let result = hostnet::converge(&host, journal, |journal| -> Result<Plan, Infallible> {
            let known = Known {
                found: found.as_ref(),
                method: *method,
                journal: Some(journal),
                caps: *in_force,
                resting: Some(&traffic.resting),
                paused,
                pauses: Some(&host.pauses),
                keeper: Some(&*keeper),
            };
            *look = Look::at(sources, config, paths, known);
            discovering += look.discovering;
            found = Some(look.found.clone());
            let reserved = &look.intent.reserved;
            *watches = Watches::of(&look.plan, &look.found.tenants, look.intent.table, kernel, reserved);
            let all_capped = watches.list.iter().all(|watch| capped.contains(&watch.id));
            // One that spins would keep this thread, which is to place it, from ever running again once its cap has gone.
            if *in_force && caps.as_ref().is_ok_and(|caps| caps.leaving(&watches.list).any(|id| id.verify().is_ok())) {
                *in_force = false;
                let restored = protections::restore(host.host, journal);
                unprotected.extend(restored.into_iter().filter_map(|(knob, done)| Some((knob, done.err()?))));
            }
            look.replan(journal, *in_force && all_capped && look.settled.vcpus.is_empty());
            if let Ok(caps) = caps {
                lost = caps.release(&watches.list).err().or(lost.take());
            }
            keeper.release(&look.settled);
            Ok(look.plan.clone())
        });
        if let Some(error) = lost {
            self.caps_lost(&error.to_string());
        }
        for (knob, error) in unprotected {
            self.error(&knob.to_string(), &error);
        }
        self.look.discovering = discovering;
        result.unwrap_or_else(|error| {
            self.error("journal", &error);
            hostnet::Report::default()
        })
    }

    /// Caps every thread of the plan and charges the guardian; says in `in_force` whether both hold.
    fn cap(&mut self) {
        if self.caps.is_err() {
            self.start_caps();
        }
        let set = match &mut self.caps {
            Ok(caps) => caps.set(&self.watches.list).map(|()| caps.complete()).map_err(|error| error.to_string()),
            Err(why) => Err(why.clone()),
        };
        let complete = set.unwrap_or_else(|why| {
            self.caps_lost(&why);
            false
        });
        let complete = complete && self.look.settled.vcpus.is_empty();
        let intent = Intent { caps_in_force: complete, ..self.look.intent.clone() };
        let (plan, _) = planned(&self.look.inventory, &intent, Some(&self.journal));
        let charge = self.charge_for(&plan);
        self.in_force = match self.charge(charge) {
            Ok(()) => complete,
            Err(error) => {
                self.error("guardian", &format!("{}; kernel protections stay on", crate::exit::chain(&error)));
                false
            }
        };
    }

    /// What the guardian would have to do if this plan were applied and the daemon died.
    fn charge_for(&self, plan: &Plan) -> Charge {
        let roots = self.paths.roots();
        let mut files = protections::originals(&self.journal, &roots);
        for knob in protections::knobs(plan) {
            if let (Knob::HostFile { root, path }, None) = (knob, self.journal.original(knob)) {
                if let Ok(Value::Text(text)) = self.host.read(knob) {
                    files.push((roots.path(*root, path), text));
                }
            }
        }
        // In the reverse order of switching off, as a reset: 6.12 takes its RT limit back only after its fair servers.
        files.reverse();
        Charge {
            protections: files,
            then_protected: protections::kernel_protects(&self.host, &self.look.inventory, &self.journal),
            threads: self.watches.list.iter().map(|watch| (watch.id, watch.place)).collect(),
            paced: self.paced_originals(),
            relieved: false,
        }
    }

    fn charge(&mut self, charge: Charge) -> anyhow::Result<()> {
        if let Some(guardian) = &mut self.guardian {
            match guardian.charge(charge.clone()) {
                Ok(()) => return Ok(()),
                Err(error) => self.repeats.warn(&format!("{}; starting another", crate::exit::chain(&error))),
            }
            // Whatever it was, it is not to act on an old charge while a new one stands beside it.
            if let Some(old) = self.guardian.take() {
                old.relieve();
            }
        }
        let place = match self.table().watcher() {
            Policy::Fifo(priority) => Policy::Fifo(priority.saturating_add(1).min(99)),
            other => other,
        };
        let mut guardian = Guardian::start(place)?;
        guardian.charge(charge)?;
        tracing::info!("guardian is process {}", guardian.pid());
        self.guardian = Some(guardian);
        Ok(())
    }

    fn caps_lost(&mut self, why: &str) {
        self.error("runtime caps", &why);
        self.in_force = false;
        if self.caps.is_ok() {
            self.caps = Err(why.to_owned());
        }
        for (knob, done) in protections::restore(&self.host, &self.journal) {
            if let Err(error) = done {
                self.error(&knob.to_string(), &error);
            }
        }
    }

    fn error(&mut self, subject: &str, what: &dyn std::fmt::Display) {
        self.repeats.warn(&format!("{subject}: {what}"));
        self.errors.push(api::Problem { subject: subject.to_owned(), message: what.to_string() });
    }

    /// Logs and counts what changed; what had been set before and was found otherwise has drifted. A protection that this pass
    /// itself put back while a thread came that was not capped yet has not.
    fn note_changes(&mut self, report: &mut hostnet::Report, before: &BTreeMap<String, Value>) {
        self.failures = report
            .items
            .iter()
            .filter_map(|item| match &item.done {
                Done::Failed(why) => Some((item.knob.key(), why.clone())),
                _ => None,
            })
            .collect();
        let given_back: BTreeSet<String> =
            report.items.iter().filter(|item| item.done == Done::Restored).map(|item| item.knob.key()).collect();
        let drifted = |item: &Item, key: String| before.get(&key) == Some(&item.to) && !given_back.contains(&key);
        for item in &report.items {
            let rule = item.rule.map_or("none", hostnet::RuleId::name);
            match &item.done {
                Done::Changed if drifted(item, item.knob.key()) => {
                    let from = item.from.as_ref().map_or_else(String::new, |from| format!(" to {from}"));
                    self.repeats
                        .warn(&format!("{} was changed{from} behind our back; set to {} again", item.knob, item.to));
                    self.metrics.drifted(rule);
                    self.metrics.knob(rule, true);
                }
                Done::Changed => {
                    tracing::debug!("{}: {} ({rule})", item.knob, item.to);
                    self.metrics.knob(rule, true);
                }
                Done::Failed(why) => {
                    self.repeats.warn(&format!("{}: {why}", item.knob));
                    self.metrics.knob(rule, false);
                }
                _ => {}
            }
        }
        let counts = report.counts();
        if counts.changed + counts.restored > 0 {
            tracing::info!(
                method = %self.look.intent.method,
                "{} knobs set, {} given back, {} failed, {} as they were",
                counts.changed, counts.restored, counts.failed, counts.already
            );
        }
        for problem in self.look.found.problems.clone() {
            self.repeats.warn(&problem.to_string());
        }
        for Refused { tenant, why } in self.look.settled.refused.clone() {
            self.error(&tenant, &format!("its reservation does not hold: {why}"));
        }
    }

    fn account(&mut self, reason: &str) {
        self.metrics.passed(reason, self.last_pass.as_secs_f64(), self.look.discovering.as_secs_f64());
        let classes = view::nic_classes(&self.look.inventory, &self.look.intent);
        self.metrics.host(
            self.look.found.tenants.iter().map(|tenant| tenant.class.to_string()),
            classes,
            self.in_force,
            self.protections_off(),
            self.look.found.problems.len() + self.errors.len(),
        );
        self.account_caps();
        self.account_reservations();
        self.account_traffic();
    }

    fn account_caps(&mut self) {
        let domains: BTreeSet<Owned> = self.watches.of.values().cloned().collect();
        for gone in self.domains.difference(&domains) {
            self.metrics.forget(gone);
        }
        self.domains = domains;
        if let Ok(caps) = &self.caps {
            self.metrics.caps(&caps.report(), &self.watches.of);
        }
    }

    fn protections_off(&self) -> bool {
        self.journal.entries().iter().any(|entry| protections::is_protection(&entry.knob))
    }

    /// Takes a new configuration, or keeps the old one.
    ///
    /// # Errors
    /// What is wrong with the new one, with file and line.
    pub fn reload(&mut self) -> anyhow::Result<()> {
        let config = Config::load(&self.paths.config_dir).inspect_err(|_| self.metrics.reloaded(false))?;
        self.metrics.reloaded(true);
        let other_caps = config.daemon != self.config.daemon || config.rules.table() != self.table();
        let other_keeper = config.sched != self.config.sched || config.rules.table() != self.table();
        self.config = config;
        if other_keeper {
            self.rebuild_keeper();
        }
        if other_caps {
            self.watches = Watches::default();
            for (knob, done) in protections::restore(&self.host, &self.journal) {
                if let Err(error) = done {
                    self.error(&knob.to_string(), &error);
                }
            }
            self.start_caps();
        }
        Ok(())
    }

    /// Applies on request, with another method if one is given; a dry run changes nothing.
    ///
    /// # Errors
    /// Where the method is none.
    pub fn apply_request(&mut self, request: &api::ApplyRequest) -> Result<api::Report, String> {
        let method = match &request.method {
            Some(name) => Some(name.parse::<Method>().map_err(|error| error.to_string())?),
            None => self.method,
        };
        if request.dry_run {
            return Ok(self.dry_run(method));
        }
        self.method = method;
        self.state = api::State::Applied;
        let report = self.pass("request");
        Ok(view::report(&report, self.look.intent.method.name(), false))
    }

    /// Gives every knob its original, and applies nothing more until asked.
    pub fn reset(&mut self) -> api::Report {
        self.state = api::State::Reset;
        self.errors.clear();
        let look = self.look_now(&self.paused());
        if let Err(error) = hostnet::adopt(&look.plan, &mut self.journal) {
            self.error("journal", &error);
        }
        let report = self.undo();
        self.look.plan = Plan::default();
        self.applied.clear();
        self.account("reset");
        view::report(&report, self.look.intent.method.name(), false)
    }

    /// Protections first, then caps, then the rest: at no moment is a thread at real-time priority with neither.
    fn undo(&mut self) -> hostnet::Report {
        for (knob, done) in protections::restore(&self.host, &self.journal) {
            if let Err(error) = done {
                self.error(&knob.to_string(), &error);
            }
        }
        self.in_force = false;
        self.watches = Watches::default();
        self.keeper.set(&Settled::default());
        self.look.settled = Settled::default();
        if let Ok(caps) = &mut self.caps {
            if let Err(error) = caps.set(&[]) {
                self.caps_lost(&error.to_string());
            }
        }
        if let Some(guardian) = &mut self.guardian {
            // Should it be dead, there is nothing left that it could do.
            let _ = guardian.charge(Charge { then_protected: true, ..Charge::default() });
        }
        hostnet::reset(&self.host, &mut self.journal).unwrap_or_else(|error| {
            self.error("journal", &error);
            hostnet::Report::default()
        })
    }

    /// The daemon ends. Settings stay, for tenants are not to be disturbed; caps end with the daemon, so protections come
    /// back. Where the host had none before Ontime either, nothing would hold a spinning guest: everything is reset then.
    pub fn stop(mut self) {
        let protects = protections::kernel_protects(&self.host, &self.look.inventory, &self.journal);
        if protects {
            for (knob, done) in protections::restore(&self.host, &self.journal) {
                if let Err(error) = done {
                    tracing::error!("restoring {knob}: {error}");
                }
            }
            self.look.replan(&self.journal, false);
            self.keeper.set(&Settled::default());
            if self.state == api::State::Applied {
                if let Err(error) = hostnet::apply(&self.host, &self.look.plan, &mut self.journal) {
                    tracing::error!("{error}");
                }
            }
            self.give_back_paced();
            tracing::info!("stopped; settings stay until `ontime reset`, kernel protections are on");
        } else {
            let report = self.undo();
            tracing::warn!(
                "stopped; this host's kernel protections were off before Ontime, so {} settings were reset",
                report.counts().restored
            );
        }
        let Self { caps, guardian, .. } = self;
        drop(caps);
        if let Some(guardian) = guardian {
            guardian.relieve();
        }
    }
}

/// The host, read past the pauses of caps and the changes of pacers.
struct PastPauses<'a> {
    host: &'a LiveHost,
    pauses: Pauses,
    paced: Past,
}

impl Host for PastPauses<'_> {
    fn read(&self, knob: &Knob) -> Result<Value, KnobError> {
        let value = self.host.read(knob)?;
        Ok(match (knob, value) {
            (Knob::ThreadPolicy { thread, .. }, Value::Policy(read)) => {
                Value::Policy(self.paced.past(*thread, self.pauses.past(*thread, read)))
            }
            (_, value) => value,
        })
    }

    fn write(&self, knob: &Knob, value: &Value) -> Result<(), KnobError> {
        self.host.write(knob, value)
    }
}

/// The first report says what changed; of the second, what it adds to that.
fn add_new(report: &mut hostnet::Report, more: hostnet::Report) {
    let known: BTreeSet<String> = report.items.iter().map(|item| item.knob.key()).collect();
    let adds = |item: &Item| matches!(item.done, Done::Changed | Done::Restored) || !known.contains(&item.knob.key());
    report.items.extend(more.items.into_iter().filter(adds));
}

fn values(plan: &Plan) -> BTreeMap<String, Value> {
    plan.settings.iter().map(|setting| (setting.knob.key(), setting.value.clone())).collect()
}
