//! One pass over the host: discover, take inventory, plan (`look`), apply; and what of it is kept for the next pass and
//! for questions (`answers`). `caps`, `reservations` and `traffic` are the engine's parts in runtime caps, reserved CPU
//! time and adaptive polling.
//!
//! The order within a pass is what makes it safe:
//! 1. threads that are no longer to be capped are released, so that only the planner places them;
//! 2. the plan is applied, with the kernel's protections on if a thread is to come to real-time priority that is not
//!    capped yet;
//! 3. vCPUs with reserved CPU time are kept to it (`keeper`), if their originals are kept and the guardian has learned
//!    them; every other thread at real-time priority is capped;
//! 4. the guardian learns what else to put back;
//! 5. only then, and only if every real-time thread of the host is capped or named by the administrator (`census`), do
//!    protections go off. They stay on where CPU time is reserved: the reserve is at least what they give to others, so
//!    that they never have to.

mod answers;
mod caps;
mod look;
mod observe;
mod reservations;
mod traffic;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use ontime_hostnet::{
    self as hostnet, ConvergeError, Done, Item, Journal, Knob, LiveHost, Method, Paused, Plan, Value,
};
use ontime_sched::{Refused, Settled};
use ontime_tenants::text::counted;
use ontime_tenants::{Discovery, PriorityTable, ProblemKind, Rules, Sources};

use self::caps::{Capping, CappingState, PastPauses, charge_for, charge_guardian};
pub use self::look::{Known, Look};
pub use self::observe::{to_be, would};
use self::traffic::Traffic;
use crate::api;
use crate::daemon::cap::Caps;
use crate::daemon::census::Census;
use crate::daemon::config::{Config, Mode};
use crate::daemon::demoted::Demoted;
use crate::daemon::guardian::{Charge, Guardian};
use crate::daemon::held::Memory;
use crate::daemon::keeper::Keeper;
use crate::daemon::metrics::Metrics;
use crate::daemon::protections;
use crate::daemon::view::{self, Owned};
use crate::daemon::watches::{Excess, Watches};
use crate::log::{LineQuota, Repeats};
use crate::paths::Paths;

/// A look in which something that is there may be missing.
#[derive(Debug, thiserror::Error)]
#[error("the host could not be read whole: {0}; all settings stay as they are, and the daemon looks again in a second")]
struct Incomplete(String);

/// Why a request to apply changed nothing.
#[derive(Debug, thiserror::Error)]
pub enum NotApplied {
    /// There is no such method.
    #[error("{0}")]
    NoMethod(String),
    /// The configuration says so.
    #[error(
        "the daemon observes and sets nothing (`mode` in daemon.toml); `ontime apply --dry-run` shows what it would \
         set; to have it set, write mode = \"enforce\" there and run `ontime reload`"
    )]
    Observing,
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
    /// The real-time threads of the host, as the last look found them.
    census: Census,
    /// Those of them that nothing holds: why protections stay on.
    uncapped: Vec<String>,
    /// Threads beyond a tenant's quota.
    demoted: Demoted,
    keeper: Keeper,
    held: Memory,
    /// Those that have metrics.
    domains: BTreeSet<Owned>,
    look: Look,
    traffic: Traffic,
    /// Protections that the pass under way put back, so that nobody else did.
    put_back: BTreeSet<String>,
    /// What the last pass wanted of every knob; nothing after a reset.
    applied: BTreeMap<String, Value>,
    state: api::State,
    errors: Vec<api::Problem>,
    /// Why metrics are not served over TCP although they are to be.
    unserved: Option<String>,
    /// What was wrong with the configuration at the last reload.
    refused: Option<api::RefusedConfiguration>,
    /// The last pass could not look at the whole host.
    looks_again: bool,
    /// The last pass set something that is to be set once more, soon.
    insists: bool,
    /// Knobs that the last pass could not set: their state, and why.
    failures: BTreeMap<String, (&'static str, String)>,
    /// For Prometheus.
    pub metrics: Metrics,
    repeats: Repeats,
    /// Of lines about changes.
    lines: LineQuota,
    /// Of lines with names that tenants and users choose: as many as they like, which keep none of the others unsaid.
    named: Repeats,
    passes: u64,
    last_pass: Duration,
}

impl Engine {
    /// The daemon's engine: caps and guardian are started, nothing is applied yet.
    ///
    /// # Errors
    /// Where the journal cannot be opened.
    pub fn new(paths: Paths, config: Config) -> anyhow::Result<Self> {
        say_start(&paths, &config);
        let journal = paths.journal()?;
        if journal.stale() > 0 {
            tracing::info!("{} original values of an earlier boot dropped", journal.stale());
        }
        let held = Memory::open(paths.held(), &hostnet::journal::running_boot_id().unwrap_or_default());
        let mut keeper = Keeper::new(&config.sched, config.rules.table());
        keeper.remember(held.held(), held.asks());
        let mut engine = Self {
            host: LiveHost::with_roots(paths.roots()),
            demoted: Demoted::open(paths.demoted()),
            paths,
            sources: Sources::host(),
            caps: Err("not started".to_owned()),
            keeper,
            held,
            method: None,
            journal,
            guardian: None,
            in_force: false,
            watches: Watches::default(),
            census: Census::default(),
            uncapped: Vec::new(),
            domains: BTreeSet::new(),
            look: Look::default(),
            traffic: Traffic::default(),
            put_back: BTreeSet::new(),
            applied: BTreeMap::new(),
            state: match config.daemon.mode {
                Mode::Enforce => api::State::Applied,
                Mode::Observe => api::State::Observing,
            },
            errors: Vec::new(),
            unserved: None,
            refused: None,
            looks_again: false,
            insists: false,
            failures: BTreeMap::new(),
            metrics: Metrics::default(),
            repeats: Repeats::default(),
            lines: LineQuota::new(Instant::now()),
            named: Repeats::default(),
            passes: 0,
            last_pass: Duration::ZERO,
            config,
        };
        // What an earlier daemon switched off and nobody caps any more, whatever the pass to come will find.
        for (knob, done) in protections::restore(&engine.host, &engine.journal) {
            if let Err(error) = done {
                tracing::error!("{knob}: {}", protections::still_off(&error));
            }
        }
        if engine.state == api::State::Applied {
            engine.start_caps();
        } else {
            engine.caps = Err(observe::NO_CAPS.to_owned());
        }
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

    /// Whether the last pass could not look at the whole host, and so changed nothing.
    pub fn looks_again(&self) -> bool {
        self.looks_again
    }

    /// Whether the last pass set something that has to be set once more, soon ([`hostnet::Setting::insists`]).
    pub fn insists(&self) -> bool {
        self.insists
    }

    /// How many passes there were.
    pub fn passes(&self) -> u64 {
        self.passes
    }

    /// How long the last pass took.
    pub fn last_pass(&self) -> Duration {
        self.last_pass
    }

    /// Where metrics are served over TCP.
    pub fn metrics_address(&self) -> Option<std::net::SocketAddr> {
        self.config.daemon.metrics()
    }

    /// Keeps why they are not, for `ontime status`; none: they are, or are not to be.
    pub fn metrics_served(&mut self, why: Option<String>) {
        if let Some(why) = &why {
            tracing::warn!("metrics: {why}");
        }
        self.unserved = why;
    }

    fn table(&self) -> PriorityTable {
        self.config.rules.table()
    }

    /// A pass. What cannot be done is kept as a problem; the next pass tries again.
    pub fn pass(&mut self, reason: &str) -> hostnet::Report {
        let start = Instant::now();
        self.errors.clear();
        self.looks_again = false;
        let report = match self.state {
            api::State::Applied => self.apply(),
            api::State::Reset => {
                self.look = self.look_now(&[]);
                hostnet::Report::default()
            }
            api::State::Observing => self.observe(),
        };
        self.insists = report.insists(&self.look.plan);
        self.passes += 1;
        self.last_pass = start.elapsed();
        tracing::debug!("a pass ({reason}) took {:?}", self.last_pass);
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

    fn apply(&mut self) -> hostnet::Report {
        self.withdraw();
        self.census = self.take_census();
        let paused = self.paused();
        let before = std::mem::take(&mut self.applied);
        let mut report = self.converge(&paused);
        // Before the first look that succeeds, nobody's reservation is known to have ended.
        if !(self.looks_again && self.look.is_none()) {
            self.before_pacing();
            if !self.keeper.set(&self.look.settled) {
                let again = self.converge(&paused);
                add_new(&mut report, again);
            }
            self.keep_held();
            self.offer();
        }
        self.cap();
        if self.look.intent.caps_in_force != self.in_force {
            self.look.replan(&self.journal, self.in_force);
            let host = PastPauses { host: &self.host, pauses: self.pauses(), paced: self.keeper.past() };
            match hostnet::apply(&host, &self.look.plan, &mut self.journal) {
                Ok(more) => add_new(&mut report, more),
                Err(error) => self.error("journal", &error),
            }
        }
        self.name_uncapped();
        report.findings.clone_from(&self.look.plan.findings);
        self.note_changes(&mut report, &before);
        self.applied = values(&self.look.plan);
        report
    }

    /// Looks, plans and applies until nothing new comes up, with protections on until all are capped; each is as soon
    /// as it has its place.
    fn converge(&mut self, paused: &[Paused]) -> hostnet::Report {
        let capped: BTreeSet<_> = self.watches.list.iter().map(|watch| watch.id).collect();
        let kernel = self.config.daemon.cap_cpu_share;
        let pauses = self.pauses();
        let (place, period) = (self.guardian_place(), self.cap_period());
        let Self {
            host,
            journal,
            sources,
            config,
            method,
            paths,
            caps,
            look,
            watches,
            in_force,
            traffic,
            keeper,
            census,
            guardian,
            repeats,
            ..
        } = self;
        let (mut unprotected, mut put_back) = (Vec::new(), BTreeSet::new());
        // A second look is for the threads that the first one's settings made: tenants need not be found again.
        let mut found: Option<(Discovery, Vec<Excess>)> = None;
        let mut discovering = Duration::ZERO;
        let state = CappingState { caps, watches, pauses, lost: None };
        let host = Capping { host, paced: keeper.past(), state: RefCell::new(state) };
        let result = hostnet::converge(&host, journal, |journal| -> Result<Plan, Incomplete> {
            let state = host.state.borrow();
            let known = Known {
                found: found.as_ref().map(|(found, _)| found),
                excess: found.as_ref().map_or(&[], |(_, excess)| excess),
                method: *method,
                journal: Some(journal),
                caps: *in_force,
                resting: Some(&traffic.resting),
                paused,
                pauses: Some(&state.pauses),
                keeper: Some(&*keeper),
            };
            let seen = Look::at(sources, config, paths, known);
            drop(state);
            discovering += seen.discovering;
            if let Some(why) = seen.incomplete() {
                return Err(Incomplete(why.to_owned()));
            }
            *look = seen;
            look.expect_given_back(journal);
            found = Some((look.found.clone(), look.excess.clone()));
            let state = &mut *host.state.borrow_mut();
            let wanted = Watches::of(&look.plan, &look.found.tenants, &look.intent, kernel);
            let before = std::mem::replace(&mut *state.watches, wanted);
            state.watches.add_devices(&census.threads, &before, kernel);
            let wanted = &state.watches.list;
            let all_capped = wanted.iter().all(|watch| capped.contains(&watch.id));
            // One that spins would keep this thread, which is to place it, from ever running again once its cap has
            // gone.
            if *in_force && state.caps.as_ref().is_ok_and(|caps| caps.leaving(wanted).any(|id| id.verify().is_ok())) {
                *in_force = false;
                let restored = protections::restore(host.host, journal);
                put_back.extend(restored.iter().map(|(knob, _)| knob.key()));
                unprotected.extend(restored.into_iter().filter_map(|(knob, done)| Some((knob, done.err()?))));
            }
            look.replan(journal, *in_force && all_capped && look.settled.vcpus.is_empty());
            if let Ok(caps) = &mut *state.caps {
                state.lost = caps.release(wanted).err().or(state.lost.take());
            }
            keeper.release(&look.settled);
            // Killed before the pass ends, the daemon leaves threads at real-time priority that it has capped since the
            // last charge.
            let charge = Charge {
                protections: protections::files(journal, host.host.roots()),
                then_protected: protections::kernel_protects(host.host, &look.inventory, journal),
                ..charge_for(&state.watches.list, period, &look.inventory)
            };
            // Refused, it is refused again when the pass ends, and protections stay on.
            let charge = charge.beside(guardian.as_ref().map(Guardian::charged));
            let _ = charge_guardian(guardian, &paths.run_dir, repeats, place, charge);
            Ok(look.plan.clone())
        });
        if let Some(error) = host.state.into_inner().lost {
            self.caps_lost(&error.to_string());
        }
        self.put_back.extend(put_back);
        for (knob, error) in unprotected {
            self.error(&knob.to_string(), &protections::still_off(&error));
        }
        self.look.discovering = discovering;
        result.unwrap_or_else(|error| {
            self.looks_again = matches!(error, ConvergeError::Look(_));
            self.error(if self.looks_again { "host" } else { "journal" }, &error);
            hostnet::Report::default()
        })
    }

    fn error(&mut self, subject: &str, what: &dyn std::fmt::Display) {
        self.repeats.warn(&format!("{subject}: {what}"));
        self.errors.push(api::Problem { subject: subject.to_owned(), message: what.to_string() });
    }

    /// Logs and counts what changed; what had been set before and was found otherwise has drifted. A protection that
    /// this pass itself put back while a thread came that was not capped yet has not.
    fn note_changes(&mut self, report: &mut hostnet::Report, before: &BTreeMap<String, Value>) {
        self.failures = report
            .items
            .iter()
            .filter_map(|item| match &item.done {
                Done::Failed(why) => Some((item.knob.key(), ("failed", why.clone()))),
                Done::Unsupported(why) => Some((item.knob.key(), ("unsupported", why.clone()))),
                _ => None,
            })
            .collect();
        let mut given_back = std::mem::take(&mut self.put_back);
        given_back.extend(report.items.iter().filter(|item| item.done == Done::Restored).map(|item| item.knob.key()));
        let drifted = |item: &Item, key: String| before.get(&key) == Some(&item.to) && !given_back.contains(&key);
        for item in &report.items {
            let rule = item.rule.map_or("none", hostnet::RuleId::name);
            match &item.done {
                Done::Changed if drifted(item, item.knob.key()) => {
                    let from = item.from.as_ref().map_or_else(String::new, |from| format!(" to {from}"));
                    self.repeats
                        .warn(&format!("{} was changed{from} by another program; set to {} again", item.knob, item.to));
                    self.metrics.drifted(rule);
                    self.metrics.knob(rule, true);
                }
                Done::Changed => self.metrics.knob(rule, true),
                Done::Failed(why) => {
                    self.repeats.warn(&format!("{}: {why}", item.knob));
                    self.metrics.knob(rule, false);
                }
                _ => {}
            }
        }
        self.log_changes(report);
        let counts = report.counts();
        if counts.changed + counts.restored > 0 {
            tracing::info!(
                method = %self.look.intent.method,
                "knobs: {} set, {} given back, {} failed, {} as they were",
                counts.changed, counts.restored, counts.failed, counts.already
            );
        }
        self.say_problems();
        for Refused { tenant, why } in self.look.settled.refused.clone() {
            self.error(&tenant, &format!("its reservation does not hold: {why}"));
        }
    }

    /// One line for each knob that was changed or given back, as far as the quota of lines goes.
    fn log_changes(&mut self, report: &hostnet::Report) {
        let mut unsaid = 0;
        for item in &report.items {
            let rule = match &item.done {
                Done::Changed => item.rule.map_or("none", hostnet::RuleId::name),
                Done::Restored => "given back",
                _ => continue,
            };
            if self.lines.take(Instant::now()) {
                tracing::info!("{}", change_line(&item.knob, item.from.as_ref(), &item.to, rule));
            } else {
                unsaid += 1;
            }
        }
        if unsaid > 0 {
            self.repeats.warn_of("changes without a line", &format!("{unsaid} more changes, too many for a line each"));
        }
    }

    /// Tells what discovery does not like. A rule that fits nothing now is no fault of the host: its VM may be stopped.
    fn say_problems(&mut self) {
        for problem in &self.look.found.problems {
            if matches!(problem.kind, ProblemKind::RuleUnused { .. }) {
                tracing::debug!("{problem}");
            } else {
                self.named.warn(&problem.to_string());
            }
        }
    }

    fn account(&mut self, reason: &str) {
        self.metrics.passed(reason, self.last_pass.as_secs_f64(), self.look.discovering.as_secs_f64());
        self.metrics.discovered(&self.look.found.costs);
        let classes = view::nic_classes(&self.look.inventory, &self.look.intent);
        let is_fault = |problem: &&ontime_tenants::Problem| !matches!(problem.kind, ProblemKind::RuleUnused { .. });
        let problems = self.look.found.problems.iter().filter(is_fault);
        self.metrics.host(
            self.look.found.tenants.iter().map(|tenant| tenant.class.to_string()),
            classes,
            self.in_force,
            self.protections_off(),
            self.uncapped.len(),
            problems.count() + self.errors.len(),
        );
        self.metrics.found(&self.look.plan.findings);
        self.metrics.doing(self.state, self.look.intent.method.name(), self.method_by());
        self.account_caps();
        self.account_reservations();
        self.account_traffic();
    }

    /// Takes a new configuration, or keeps the old one. The pass that follows applies it.
    ///
    /// # Errors
    /// What is wrong with the new one; `status` and a metric say so until a reload succeeds.
    pub fn reload(&mut self) -> Result<(), api::RefusedConfiguration> {
        let config = Config::load(&self.paths.config_dir).map_err(|error| {
            let refused = view::refused(&error);
            self.metrics.reloaded(false);
            self.refused = Some(refused.clone());
            refused
        })?;
        self.metrics.reloaded(true);
        self.refused = None;
        let other_caps = config.daemon != self.config.daemon || config.rules.table() != self.table();
        let other_keeper = config.sched != self.config.sched || config.rules.table() != self.table();
        let mode = config.daemon.mode;
        self.state = match (mode, self.state) {
            (Mode::Observe, _) => api::State::Observing,
            (Mode::Enforce, api::State::Observing) => api::State::Applied,
            (Mode::Enforce, state) => state,
        };
        self.config = config;
        // What the keeper needed may be there by now, though no file changed.
        if other_keeper || self.keeper.off().is_some() {
            self.rebuild_keeper();
        }
        // A pass that observes ends the caps itself, once nothing needs them any more.
        if other_caps && mode == Mode::Enforce {
            self.watches = Watches::default();
            for (knob, done) in protections::restore(&self.host, &self.journal) {
                if let Err(error) = done {
                    self.error(&knob.to_string(), &protections::still_off(&error));
                }
            }
            self.start_caps();
        }
        Ok(())
    }

    /// Applies on request, with another method if one is given; a dry run changes nothing.
    ///
    /// # Errors
    /// Where the method is none, or the configuration says that nothing is to be set.
    pub fn apply_request(&mut self, request: &api::ApplyRequest) -> Result<api::Report, NotApplied> {
        let method = match &request.method {
            Some(name) => Some(name.parse::<Method>().map_err(|error| NotApplied::NoMethod(error.to_string()))?),
            None => self.method,
        };
        if request.dry_run {
            return Ok(self.dry_run(method));
        }
        if self.state == api::State::Observing {
            return Err(NotApplied::Observing);
        }
        self.method = method;
        self.state = api::State::Applied;
        let report = self.pass("request");
        Ok(self.told(&report))
    }

    /// What a pass did, in the API's words.
    pub fn told(&self, report: &hostnet::Report) -> api::Report {
        view::report(report, self.look.intent.method.name(), false)
    }

    /// What came of a reload: in mode `observe`, where nothing had to be given back, what would be set.
    pub fn reloaded(&self, report: &hostnet::Report) -> api::Report {
        if self.state == api::State::Observing && report.items.is_empty() {
            return would(&self.look, &self.host, &self.journal);
        }
        self.told(report)
    }

    /// What the daemon is doing, for systemd.
    pub fn word(&self) -> &'static str {
        match self.state {
            api::State::Applied => "applied",
            api::State::Reset => "reset; nothing is applied until `ontime apply`",
            api::State::Observing => "observing; nothing is set",
        }
    }

    /// Gives every knob its original, and applies nothing more until asked.
    pub fn reset(&mut self) -> api::Report {
        let start = Instant::now();
        if self.state == api::State::Applied {
            self.state = api::State::Reset;
        }
        self.errors.clear();
        let report = self.give_back();
        self.log_changes(&report);
        if self.state == api::State::Reset {
            self.look.plan = Plan::default();
        }
        self.last_pass = start.elapsed();
        self.account("reset");
        self.told(&report)
    }

    /// Gives back what is set, and what threads have inherited of it.
    fn give_back(&mut self) -> hostnet::Report {
        let look = self.look_now(&self.paused());
        if let Err(error) = hostnet::adopt(&look.plan, &mut self.journal) {
            self.error("journal", &error);
        }
        self.applied.clear();
        self.undo()
    }

    /// Protections first, then caps, then the rest: at no moment is a thread at real-time priority with neither.
    fn undo(&mut self) -> hostnet::Report {
        self.withdraw();
        // Until each thread has its original again.
        let meanwhile = Charge {
            then_protected: protections::kernel_protects(&self.host, &self.look.inventory, &self.journal),
            ..self.charge_for_caps()
        };
        for (knob, done) in protections::restore(&self.host, &self.journal) {
            if let Err(error) = done {
                self.error(&knob.to_string(), &protections::still_off(&error));
            }
        }
        self.in_force = false;
        self.uncapped.clear();
        self.demoted.give_back();
        self.watches = Watches::default();
        self.follow_interrupts();
        self.keeper.set(&Settled::default());
        self.look.settled = Settled::default();
        self.keep_held();
        if let Ok(caps) = &mut self.caps {
            if let Err(error) = caps.set(&[]) {
                self.caps_lost(&error.to_string());
            }
        }
        self.charge_if_there(meanwhile);
        let report = hostnet::reset(&self.host, &mut self.journal).unwrap_or_else(|error| {
            self.error("journal", &error);
            hostnet::Report::default()
        });
        self.charge_if_there(Charge { then_protected: true, ..Charge::default() });
        report
    }

    /// The daemon ends. Settings stay, for tenants are not to be disturbed; caps end with the daemon, so protections
    /// come back, and the guardian looks for who spins. Where the host had none before Ontime either, nothing would
    /// hold a spinning guest: everything is reset then.
    pub fn stop(mut self) {
        self.withdraw();
        let charge = self.charge_for_caps();
        let protects = protections::kernel_protects(&self.host, &self.look.inventory, &self.journal);
        if protects {
            for (knob, done) in protections::restore(&self.host, &self.journal) {
                if let Err(error) = done {
                    tracing::error!("{knob}: {}", protections::still_off(&error));
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
            match self.state {
                api::State::Applied => {
                    tracing::info!("stopped; settings stay until `ontime reset`, kernel protections are on");
                }
                api::State::Reset | api::State::Observing => tracing::info!("stopped; nothing was applied"),
            }
        } else {
            let report = self.undo();
            tracing::warn!(
                "stopped; this host's kernel protections were off before Ontime, so a reset gave back {}",
                counted(report.counts().restored, "setting")
            );
        }
        let Self { caps, mut guardian, .. } = self;
        // Before the caps end: one that spins would keep this thread from saying it.
        let charged = guardian.as_mut().is_some_and(|guardian| protects && guardian.charge(charge).is_ok());
        drop(caps);
        match guardian {
            Some(guardian) if charged => guardian.end(),
            Some(guardian) => guardian.relieve(),
            None => {}
        }
    }
}

/// The first line: what starts, and from which files.
fn say_start(paths: &Paths, config: &Config) {
    let method = config.host.method.unwrap_or_default();
    let by = if config.host.method.is_some() { "configuration" } else { "default" };
    let files = crate::check::files(&paths.config_dir);
    let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
    let files = if files.is_empty() { "none".to_owned() } else { files.join(", ") };
    let mode = match config.daemon.mode {
        Mode::Enforce => "enforce",
        Mode::Observe => "observe",
    };
    tracing::info!("ontime {}: mode {mode}, method {method} ({by}), configuration files: {files}", crate::version());
}

/// A knob's change as a line of the log: old, new, and the rule.
pub fn change_line(knob: &Knob, from: Option<&Value>, to: &Value, rule: &str) -> String {
    let from = from.map_or_else(|| "unknown".to_owned(), ToString::to_string);
    format!("knob {knob}: {from} -> {to} ({rule})")
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
