//! One pass over the host: discover, take inventory, plan, apply; and what of it is kept for the next pass and for questions
//! (`answers`).
//!
//! The order within a pass is what makes it safe:
//! 1. threads that are no longer to be capped are released, so that only the planner places them;
//! 2. the plan is applied, with the kernel's protections on if a thread is to come to real-time priority that is not capped yet;
//! 3. every thread at real-time priority is capped;
//! 4. the guardian learns what to put back;
//! 5. only then, and only if every thread is capped, do protections go off.

mod answers;

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::time::{Duration, Instant};

use ontime_hostnet::{
    self as hostnet, Done, Host, Intent, Inventory, Item, Journal, Knob, LiveHost, Method, Plan, Value,
};
use ontime_tenants::{Discovery, Policy, PriorityTable, Rules, Sources, discover};

use crate::api;
use crate::daemon::cap::Caps;
use crate::daemon::config::Config;
use crate::daemon::guardian::{Charge, Guardian};
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
    /// The plan.
    pub plan: Plan,
    /// How long discovery took.
    pub discovering: Duration,
}

impl Look {
    fn at(sources: &Sources, config: &Config, method: Option<Method>, paths: &Paths, caps: bool) -> Self {
        let start = Instant::now();
        let found = discover(sources, &config.rules);
        let discovering = start.elapsed();
        let inventory = Inventory::scan(&paths.roots());
        let mut intent = Intent::new(&config.host, config.rules.table(), found.tenants.clone(), caps);
        intent.method = method.unwrap_or(intent.method);
        let plan = hostnet::plan(&inventory, &intent);
        Self { found, inventory, intent, plan, discovering }
    }

    fn replan(&mut self, caps: bool) {
        if self.intent.caps_in_force != caps {
            self.intent.caps_in_force = caps;
            self.plan = hostnet::plan(&self.inventory, &self.intent);
        }
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
    /// Those that have metrics.
    domains: BTreeSet<Owned>,
    look: Look,
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
            config,
            method: None,
            journal,
            guardian: None,
            in_force: false,
            watches: Watches::default(),
            domains: BTreeSet::new(),
            look: Look::default(),
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
                self.look = self.look_now(false);
                hostnet::Report::default()
            }
        };
        self.passes += 1;
        self.last_pass = start.elapsed();
        self.account(reason);
        report
    }

    fn look_now(&self, caps: bool) -> Look {
        Look::at(&self.sources, &self.config, self.method, &self.paths, caps)
    }

    fn apply(&mut self) -> hostnet::Report {
        let before = values(&self.look.plan);
        let mut report = self.converge();
        self.cap();
        if self.look.intent.caps_in_force != self.in_force {
            self.look.replan(self.in_force);
            match hostnet::apply(&self.host, &self.look.plan, &mut self.journal) {
                Ok(more) => add_new(&mut report, more),
                Err(error) => self.error("journal", &error),
            }
            report.findings.clone_from(&self.look.plan.findings);
        }
        self.note_changes(&mut report, &before);
        report
    }

    /// Looks, plans and applies until nothing new comes up, with protections on for threads that are not capped yet.
    fn converge(&mut self) -> hostnet::Report {
        let capped: BTreeSet<_> = self.watches.list.iter().map(|watch| watch.id).collect();
        let kernel = self.config.daemon.cap_cpu_share;
        let Self { host, journal, sources, config, method, paths, caps, look, watches, in_force, .. } = self;
        let mut lost = None;
        let result = hostnet::converge(&*host, journal, |_| -> Result<Plan, Infallible> {
            *look = Look::at(sources, config, *method, paths, *in_force);
            *watches = Watches::of(&look.plan, &look.found.tenants, look.intent.table, kernel, &watches.list);
            look.replan(*in_force && watches.list.iter().all(|watch| capped.contains(&watch.id)));
            if let Ok(caps) = caps {
                lost = caps.release(&watches.list).err().or(lost.take());
            }
            Ok(look.plan.clone())
        });
        if let Some(error) = lost {
            self.caps_lost(&error.to_string());
        }
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
        let intent = Intent { caps_in_force: complete, ..self.look.intent.clone() };
        let plan = hostnet::plan(&self.look.inventory, &intent);
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

    /// Logs and counts what changed; what had been set before and was found otherwise has drifted. A thread that its cap had
    /// paused that moment has not.
    fn note_changes(&mut self, report: &mut hostnet::Report, before: &BTreeMap<String, Value>) {
        report.items.retain(|item| !(item.done == Done::Changed && self.is_paused(item)));
        self.failures = report
            .items
            .iter()
            .filter_map(|item| match &item.done {
                Done::Failed(why) => Some((item.knob.key(), why.clone())),
                _ => None,
            })
            .collect();
        for item in &report.items {
            let rule = item.rule.map_or("none", hostnet::RuleId::name);
            match &item.done {
                Done::Changed if before.get(&item.knob.key()) == Some(&item.to) => {
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
    }

    fn is_paused(&self, item: &Item) -> bool {
        matches!((&item.knob, &item.from), (Knob::ThreadPolicy { thread, .. }, Some(Value::Policy(Policy::Idle)))
            if self.watches.of.contains_key(thread))
    }

    fn account(&mut self, reason: &str) {
        self.metrics.passed(reason, self.last_pass.as_secs_f64(), self.look.discovering.as_secs_f64());
        let nics = view::nics(&self.look.inventory, &self.look.intent);
        self.metrics.host(
            self.look.found.tenants.iter().map(|tenant| tenant.class.to_string()),
            nics.into_iter().map(|nic| (nic.name, nic.class)),
            self.in_force,
            self.protections_off(),
            self.look.found.problems.len() + self.errors.len(),
        );
        self.account_caps();
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
        self.config = config;
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
        let report = self.undo();
        self.look.plan = Plan::default();
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
            self.look.replan(false);
            if self.state == api::State::Applied {
                if let Err(error) = hostnet::apply(&self.host, &self.look.plan, &mut self.journal) {
                    tracing::error!("{error}");
                }
            }
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

/// The first report says what changed; of the second, what it adds to that.
fn add_new(report: &mut hostnet::Report, more: hostnet::Report) {
    let known: BTreeSet<String> = report.items.iter().map(|item| item.knob.key()).collect();
    let adds = |item: &Item| matches!(item.done, Done::Changed | Done::Restored) || !known.contains(&item.knob.key());
    report.items.extend(more.items.into_iter().filter(adds));
}

fn values(plan: &Plan) -> BTreeMap<String, Value> {
    plan.settings.iter().map(|setting| (setting.knob.key(), setting.value.clone())).collect()
}
