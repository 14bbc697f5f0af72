//! The engine: one pass over the host. A pass discovers tenants, takes the inventory, plans (`look`) and applies the
//! plan. The engine keeps the result for the next pass and for requests (`answers`). `caps`, `reservations`,
//! `requests` and `traffic` are its parts for runtime caps, reserved CPU time, reservations of programs and adaptive
//! polling.
//!
//! A pass is safe because of its order:
//! 1. Threads that shall no longer be capped are released, so that only the planner changes their policies.
//! 2. The plan is applied. If it gives a thread real-time priority that is not capped yet, the kernel's protections are
//!    on meanwhile.
//! 3. vCPUs with reserved CPU time are handed to `keeper`, if their original policies are recorded and the guardian
//!    knows them. Every other thread at real-time priority is capped.
//! 4. The guardian learns the remaining things that it would have to restore.
//! 5. Only then the protections are switched off, and only if every real-time thread of the host is capped or exempted
//!    by the administrator (`census`). They stay on where CPU time is reserved: the reserve leaves other threads at
//!    least as much as the protections would, so these never have to act.

mod answers;
mod caps;
mod look;
mod newcomers;
mod observe;
mod requests;
mod reservations;
mod traffic;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ontime_hostnet::{
    self as hostnet, ConvergeError, Done, Inventory, Item, Journal, LiveHost, Method, Paused, Plan, Value,
};
use ontime_sched::{Refused, Settled};
use ontime_tenants::text::counted;
use ontime_tenants::watch::Watcher;
use ontime_tenants::{Discovery, PriorityTable, ProblemKind, Repeats, Sources};
use rustix::process::Pid;

use self::caps::{Capping, CappingState, UnpausedHost, charge_guardian, charge_meanwhile};
pub(crate) use self::look::{Known, Look};
pub(crate) use self::observe::{to_be, would};
use self::traffic::Traffic;
use crate::api;
use crate::daemon::cap::{Caps, Pauses};
use crate::daemon::census::{Census, RealTime};
use crate::daemon::config::{Config, Mode};
use crate::daemon::demoted::Demoted;
use crate::daemon::guardian::{self, Charge, Guardian};
use crate::daemon::held::Memory;
use crate::daemon::keeper::Keeper;
use crate::daemon::metrics::Metrics;
use crate::daemon::nice::{self, Hurrying, MainNice};
use crate::daemon::protections;
use crate::daemon::requested::{Requested, boot_time};
use crate::daemon::view::{self, Owned};
use crate::daemon::watches::{OverQuota, Watches};
use crate::exit::Doing;
use crate::log::{LineQuota, change_line};
use crate::paths::Paths;

/// The subject of a problem with reading the host as a whole.
const HOST: &str = "host";

/// Discovery or the inventory may have missed something that exists.
#[derive(Debug, thiserror::Error)]
#[error("the host could not be read whole: {0}; all settings stay as they are, and the daemon looks again in a second")]
struct Incomplete(String);

/// Why an apply request changed nothing.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotApplied {
    /// A method with this name does not exist.
    #[error("{0}")]
    NoMethod(String),
    /// The configuration says mode `observe`.
    #[error(
        "the daemon observes and sets nothing (`mode` in daemon.toml); `ontime apply --dry-run` shows what it would \
         set; to have it set, write mode = \"enforce\" there and run `ontime reload`"
    )]
    Observing,
}

/// The daemon's state between passes.
pub(crate) struct Engine {
    paths: Paths,
    host: LiveHost,
    sources: Rc<Sources>,
    /// Tells of new tenants and threads.
    watcher: Watcher,
    /// Newcomers that were placed while the pass in progress read the host.
    late: BTreeSet<i32>,
    config: Config,
    method: Option<Method>,
    journal: Journal,
    caps: Result<Caps, String>,
    guardian: Option<Guardian>,
    /// By this the cap watcher has the guardian restore protections.
    alarm: Arc<OwnedFd>,
    /// Whether every thread of `watches` is capped and the guardian knows.
    in_force: bool,
    watches: Watches,
    /// The real-time threads of the host, as the last look found them.
    census: Census,
    /// Threads of `census` that are neither capped nor exempted. They keep the protections on.
    uncapped: Vec<String>,
    /// Threads beyond their tenant's quota, which the daemon has moved to SCHED_OTHER.
    demoted: Demoted,
    /// When the daemon's own threads were last looked at.
    own_seen: Option<Instant>,
    keeper: Keeper,
    held: Memory,
    /// What programs requested. `config` has its leases and the classes that it gives.
    requested: Requested,
    /// The owners of capped threads that have metrics.
    domains: BTreeSet<Owned>,
    look: Look,
    traffic: Traffic,
    /// Protections that the present pass itself switched on, so that this does not count as drift.
    put_back: BTreeSet<String>,
    /// The value of every knob in the last pass; empty after a reset.
    applied: BTreeMap<String, Value>,
    state: api::State,
    errors: Vec<api::Problem>,
    /// Why metrics are not served over TCP although they are configured.
    unserved: Option<String>,
    /// The error of the last reload, if it failed.
    refused: Option<api::RefusedConfiguration>,
    /// Whether the last pass could not read the whole host.
    looks_again: bool,
    /// Whether the last pass set a knob that must be set once more soon.
    needs_second_write: bool,
    /// Knobs that the last pass could not set: `failed` or `unsupported`, and why.
    failures: BTreeMap<String, (&'static str, String)>,
    nice: MainNice,
    /// For Prometheus.
    pub metrics: Metrics,
    repeats: Repeats,
    /// Limits log lines about changes.
    lines: LineQuota,
    /// Limits log lines with names that tenants and users choose. It is separate, because such names can be arbitrarily
    /// many and must not suppress other lines.
    named: Repeats,
    passes: u64,
    last_pass: Duration,
}

impl Engine {
    /// Creates the engine and starts the caps. Applies nothing yet.
    ///
    /// # Errors
    /// Where the journal cannot be opened, or no watcher can be set up.
    pub(crate) fn new(paths: Paths, mut config: Config, nice: MainNice) -> anyhow::Result<Self> {
        say_start(&paths, &config);
        let journal = paths.journal()?;
        if journal.stale() > 0 {
            tracing::info!("{} original values of an earlier boot dropped", journal.stale());
        }
        let boot_id = hostnet::journal::running_boot_id().unwrap_or_default();
        let held = Memory::open(paths.held(), &boot_id);
        let requested = Requested::open(paths.requested(), &boot_id, boot_time());
        config.set_requested(requested.leases(), requested.grants());
        let sources = Sources::host();
        let watcher = Watcher::new(&sources).doing("watching tenants")?;
        let mut keeper = Keeper::new(&config.sched, config.rules.table());
        keeper.remember(held.held(), held.asks());
        let mut engine = Self {
            host: LiveHost::with_roots(paths.roots()),
            demoted: Demoted::open(paths.demoted()),
            paths,
            sources: Rc::new(sources),
            watcher,
            late: BTreeSet::new(),
            own_seen: None,
            caps: Err("nothing is applied, so no thread is capped; `ontime apply` starts the caps".to_owned()),
            keeper,
            held,
            requested,
            method: None,
            journal,
            guardian: None,
            alarm: guardian::alarm().doing("making the alarm of the cap watcher")?,
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
            needs_second_write: false,
            failures: BTreeMap::new(),
            nice,
            metrics: Metrics::default(),
            repeats: Repeats::default(),
            lines: LineQuota::new(Instant::now()),
            named: Repeats::default(),
            passes: 0,
            last_pass: Duration::ZERO,
            config,
        };
        // Protections that an earlier daemon switched off: no watcher caps threads now, so restore them before the
        // first pass.
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

    /// `ontime-http` is this thread.
    pub(crate) fn serve_by(&mut self, http: Pid) {
        self.nice.followed_by(http);
    }

    /// Tells of new tenants and threads.
    pub(crate) fn watcher(&self) -> &Watcher {
        &self.watcher
    }

    /// The time between two passes without an event.
    pub(crate) fn rescan(&self) -> Duration {
        self.config.daemon.rescan
    }

    /// Whether the last pass could not read the whole host, and so changed nothing.
    pub(crate) fn looks_again(&self) -> bool {
        self.looks_again
    }

    /// Whether the last pass set a knob that must be set once more soon ([`hostnet::Setting::needs_second_write`]).
    pub(crate) fn needs_second_write(&self) -> bool {
        self.needs_second_write
    }

    /// The number of passes.
    pub(crate) fn passes(&self) -> u64 {
        self.passes
    }

    /// How long the last pass took.
    pub(crate) fn last_pass(&self) -> Duration {
        self.last_pass
    }

    /// The TCP address for metrics, if one is configured.
    pub(crate) fn metrics_address(&self) -> Option<std::net::SocketAddr> {
        self.config.daemon.metrics()
    }

    /// Records why metrics are not served over TCP, for `ontime status`. None: they are served, or are not configured.
    pub(crate) fn metrics_served(&mut self, why: Option<String>) {
        if let Some(why) = &why {
            tracing::warn!("metrics: {why}");
        }
        self.unserved = why;
    }

    fn table(&self) -> PriorityTable {
        self.config.rules.table()
    }

    /// Runs a pass. What fails is recorded as a problem, and the next pass tries again.
    pub(crate) fn pass(&mut self, reason: &str) -> hostnet::Report {
        let start = Instant::now();
        self.errors.clear();
        self.looks_again = false;
        if self.state == api::State::Applied {
            self.nice.take(nice::APPLYING);
        }
        let report = match self.state {
            api::State::Applied => self.apply(),
            api::State::Reset => {
                self.look = self.look_now(&[]);
                hostnet::Report::default()
            }
            api::State::Observing => self.observe(),
        };
        self.needs_second_write = report.needs_second_write(&self.look.plan);
        self.passes += 1;
        self.last_pass = start.elapsed();
        tracing::debug!("a pass ({reason}) took {:?}", self.last_pass);
        self.account(reason);
        report
    }

    /// Looks at the host without capping or reserving anything.
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
        let start = Instant::now();
        let pauses = self.pauses();
        let found = self.discover();
        let discovering = start.elapsed();
        let inventory = self.scan();
        let devices = self.device_threads();
        let pauses = pauses.with_later(self.pauses());
        let found = self.with_newcomers(found);
        let reading = start.elapsed();
        let paused = self.paused();
        // The guardian may have restored them at an alarm since.
        if self.in_force && !self.caps.as_ref().is_ok_and(Caps::complete) {
            self.protect();
        }
        let before = std::mem::take(&mut self.applied);
        let mut report = self.converge((found, Vec::new()), inventory, pauses, &paused, &devices);
        // By these, `serve_newcomers` knows which threads have their places.
        self.applied = values(&self.look.plan);
        self.look.discovering = discovering;
        tracing::debug!(
            "discovery took {discovering:?}, then reading {:?}, planning and setting {:?}",
            reading - discovering,
            start.elapsed() - reading
        );
        // Before the first look succeeds, a missing VM does not mean that its reservation has ended.
        if !(self.looks_again && self.look.is_none()) {
            self.before_pacing();
            if !self.keeper.set(&self.look.settled) {
                let (inventory, pauses) = (self.scan(), self.pauses());
                // With the newcomers that were placed during the scan.
                let found = (self.look.found.clone(), self.look.excess.clone());
                let again = self.converge(found, inventory, pauses, &paused, &devices);
                add_new(&mut report, again);
                self.applied = values(&self.look.plan);
            }
            self.keep_held();
            self.offer();
        }
        self.serve_newcomers();
        self.cap();
        if self.look.intent.caps_in_force != self.in_force {
            self.look.replan(&self.journal, self.in_force);
            let host = UnpausedHost { host: &self.host, pauses: self.pauses(), paced: self.keeper.planned_policies() };
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

    /// Plans and applies, and looks again until a look finds nothing new. Protections are on until all threads are
    /// capped; each thread is capped as soon as it has its place. `pauses`: from before `found` was read.
    fn converge(
        &mut self,
        (found, excess): (Discovery, Vec<OverQuota>),
        inventory: Inventory,
        pauses: Pauses,
        paused: &[Paused],
        devices: &[RealTime],
    ) -> hostnet::Report {
        let capped: BTreeSet<_> = self.watches.list.iter().map(|watch| watch.id).collect();
        let kernel = self.config.daemon.cap_cpu_share;
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
            guardian,
            alarm,
            repeats,
            ..
        } = self;
        let (mut unprotected, mut put_back) = (Vec::new(), BTreeSet::new());
        // A second look is only for threads that the first one's settings created. Tenants are not discovered again.
        let (mut found, mut excess, mut inventory) = (found, excess, Some(inventory));
        let state = CappingState { caps, watches, pauses, lost: None };
        let host = Capping { host, paced: keeper.planned_policies(), state: RefCell::new(state) };
        let result = hostnet::converge(&host, journal, |journal| -> Result<Plan, Incomplete> {
            let state = host.state.borrow();
            let known = Known {
                found: Some(&found),
                inventory: inventory.as_ref(),
                excess: &excess,
                method: *method,
                journal: Some(journal),
                caps: *in_force,
                resting: Some(&traffic.resting),
                paused,
                pauses: Some(&state.pauses),
                keeper: Some(&*keeper),
                held_only: false,
            };
            let seen = Look::at(sources, config, paths, known);
            drop(state);
            inventory = None;
            if let Some(why) = seen.incomplete() {
                return Err(Incomplete(why.to_owned()));
            }
            *look = seen;
            look.expect_given_back(journal);
            (found, excess) = (look.found.clone(), look.excess.clone());
            let state = &mut *host.state.borrow_mut();
            let wanted = Watches::of(&look.plan, &look.found.tenants, &look.intent, kernel);
            let before = std::mem::replace(&mut *state.watches, wanted);
            state.watches.add_devices(devices, &before, kernel);
            let wanted = &state.watches.list;
            let all_capped = wanted.iter().all(|watch| capped.contains(&watch.id));
            // A thread whose cap ends could spin, and so keep this thread from ever running again to change its policy.
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
            let guarded = guardian.as_ref();
            let charge = charge_meanwhile(&state.watches.list, period, &look.inventory, (host.host, journal), guarded);
            // If the guardian refuses this charge, it also refuses the one at the end of the pass, and protections stay
            // on.
            let _ = charge_guardian((guardian, alarm), &paths.run_dir, repeats, place, charge);
            Ok(look.plan.clone())
        });
        if let Some(error) = host.state.into_inner().lost {
            self.caps_lost(&error.to_string());
        }
        self.put_back.extend(put_back);
        for (knob, error) in unprotected {
            self.error(&knob.to_string(), &protections::still_off(&error));
        }
        result.unwrap_or_else(|error| {
            self.looks_again = matches!(error, ConvergeError::Look(_));
            self.error(if self.looks_again { HOST } else { "journal" }, &error);
            hostnet::Report::default()
        })
    }

    fn error(&mut self, subject: &str, what: &dyn std::fmt::Display) {
        self.repeats.warn(&format!("{subject}: {what}"));
        self.errors.push(api::Problem { subject: subject.to_owned(), message: what.to_string() });
    }

    /// Logs and counts changes. A knob that had been set before and was found with another value has drifted. A
    /// protection that this pass itself switched on for a thread without a cap has not drifted.
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
                "knobs: {} set, {} restored, {} failed, {} unchanged",
                counts.changed, counts.restored, counts.failed, counts.already
            );
        }
        self.log_problems();
        for Refused { tenant, why } in self.look.settled.refused.clone() {
            self.error(&tenant, &format!("its reservation does not hold: {why}"));
        }
    }

    /// Logs one line for each knob that was changed or restored, within the quota of lines.
    fn log_changes(&mut self, report: &hostnet::Report) {
        let mut unsaid = 0;
        for item in &report.items {
            let rule = match &item.done {
                Done::Changed => item.rule.map_or("none", hostnet::RuleId::name),
                Done::Restored => "restored",
                _ => continue,
            };
            if self.lines.take(Instant::now()) {
                tracing::info!("{}", change_line(&item.knob, item.from.as_ref(), &item.to, rule));
            } else {
                unsaid += 1;
            }
        }
        if unsaid > 0 {
            let line =
                format!("{unsaid} more changes, too many for a line each; `ontime status --all` shows all knobs");
            self.repeats.warn_of("changes without a line", &line);
        }
    }

    /// Logs the problems of discovery. A rule that matches nothing is logged at debug level only: its VM may be
    /// stopped.
    fn log_problems(&mut self) {
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

    /// Loads a new configuration, or keeps the old one. The pass that follows applies it.
    ///
    /// # Errors
    /// What is wrong with the new configuration. `status` and a metric report it until a reload succeeds.
    pub(crate) fn reload(&mut self) -> Result<(), api::RefusedConfiguration> {
        let mut config = Config::load(&self.paths.config_dir).map_err(|error| {
            let refused = view::refused(&error);
            self.metrics.reloaded(false);
            self.refused = Some(refused.clone());
            refused
        })?;
        config.set_requested(self.requested.leases(), self.requested.grants());
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
        // A failed keeper is rebuilt even without a change of the files, because the missing dependency may exist now.
        if other_keeper || self.keeper.off().is_some() {
            self.rebuild_keeper();
        }
        // In mode `observe`, the pass ends the caps, once no thread needs them.
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

    /// Applies on request, with another method if the request names one. A dry run changes nothing.
    ///
    /// # Errors
    /// Where the method does not exist, or the mode is `observe`.
    pub(crate) fn apply_request(&mut self, request: &api::ApplyRequest) -> Result<api::Report, NotApplied> {
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
        Ok(self.api_report(&report))
    }

    /// The result of a pass, for the API.
    pub(crate) fn api_report(&self, report: &hostnet::Report) -> api::Report {
        view::report(report, self.look.intent.method.name(), false)
    }

    /// The result of a reload, for the API. In mode `observe`, if nothing had to be restored, it is what would be set.
    pub(crate) fn reloaded(&self, report: &hostnet::Report) -> api::Report {
        if self.state == api::State::Observing && report.items.is_empty() {
            return would(&self.look, &self.host, &self.journal, &Settled::default());
        }
        self.api_report(report)
    }

    /// What the daemon is doing, for systemd's status line.
    pub(crate) fn word(&self) -> &'static str {
        match self.state {
            api::State::Applied => "applied",
            api::State::Reset => "reset; nothing is applied until `ontime apply`",
            api::State::Observing => "observing; nothing is set",
        }
    }

    /// Restores the original of every knob, and applies nothing until an apply request.
    pub(crate) fn reset(&mut self) -> api::Report {
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
        self.api_report(&report)
    }

    /// Restores what the daemon has set, including settings that new threads inherited.
    fn give_back(&mut self) -> hostnet::Report {
        let look = self.look_now(&self.paused());
        if let Err(error) = hostnet::adopt(&look.plan, &mut self.journal) {
            self.error("journal", &error);
        }
        self.applied.clear();
        self.undo()
    }

    /// Restores protections first, then ends caps, then restores the rest: at no moment is a thread at real-time
    /// priority without protections or a cap.
    fn undo(&mut self) -> hostnet::Report {
        self.withdraw();
        // The charge of the guardian until each thread has its original policy again.
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
        // vCPUs that lose their places are ordinary threads from here on, and many settings may have to be restored.
        self.nice.take(nice::ORDINARY);
        self.charge_if_there(meanwhile);
        let host = Hurrying::new(&self.host, &mut self.nice, Instant::now());
        let restored = hostnet::reset(&host, &mut self.journal);
        self.nice.take(nice::ORDINARY);
        let report = restored.unwrap_or_else(|error| {
            self.error("journal", &error);
            hostnet::Report::default()
        });
        self.charge_if_there(Charge { then_protected: true, ..Charge::default() });
        report
    }

    /// Ends the daemon. Settings stay, so that tenants are not disturbed. Caps end with the daemon, so protections are
    /// restored, and the guardian watches for spinning threads for a while. If the host's protections were off before
    /// Ontime too, nothing would stop a spinning guest, so then everything is reset.
    pub(crate) fn stop(mut self) {
        self.withdraw();
        let charge = self.charge_for_caps_and_interrupts();
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
                "stopped; this host's kernel protections were off before Ontime, so a reset restored {}",
                counted(report.counts().restored, "setting")
            );
        }
        let Self { caps, mut guardian, .. } = self;
        // Charge the guardian before the caps end: afterwards a spinning thread could keep this thread from doing so. A
        // daemon that is killed while they end leaves the trace instance and vCPUs that are ahead.
        let charged = guardian.as_mut().is_some_and(|guardian| protects && guardian.charge(charge).is_ok());
        drop(caps);
        match guardian {
            Some(guardian) if charged => guardian.end(),
            Some(guardian) => guardian.relieve(),
            None => {}
        }
    }
}

/// Logs the first line: mode, method and configuration files.
fn say_start(paths: &Paths, config: &Config) {
    let method = config.host.method.unwrap_or_default();
    let by = if config.host.method.is_some() { "configuration" } else { "default" };
    let (files, errors) = crate::check::files(&paths.config_dir);
    let files = files.iter().map(|file| file.display().to_string());
    let files: Vec<String> = files.chain(errors.iter().map(ToString::to_string)).collect();
    let files = if files.is_empty() { "none".to_owned() } else { files.join(", ") };
    let mode = match config.daemon.mode {
        Mode::Enforce => "enforce",
        Mode::Observe => "observe",
    };
    tracing::info!("ontime {}: mode {mode}, method {method} ({by}), configuration files: {files}", crate::version());
}

/// Adds the items of a second report to the first, if they are changes or about other knobs.
fn add_new(report: &mut hostnet::Report, more: hostnet::Report) {
    let known: BTreeSet<String> = report.items.iter().map(|item| item.knob.key()).collect();
    let adds = |item: &Item| matches!(item.done, Done::Changed | Done::Restored) || !known.contains(&item.knob.key());
    report.items.extend(more.items.into_iter().filter(adds));
}

fn values(plan: &Plan) -> BTreeMap<String, Value> {
    plan.settings.iter().map(|setting| (setting.knob.key(), setting.value.clone())).collect()
}
