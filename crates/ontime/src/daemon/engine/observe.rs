//! Mode `observe`: discovers tenants, reads the host and plans, but sets nothing.

use std::collections::{BTreeMap, BTreeSet};

use ontime_hostnet::{self as hostnet, Done, Host, Knob, KnobError, Method, Originals, Value};
use ontime_sched::{Refused, Settled};
use ontime_tenants::{Policy, Sources, ThreadId};

use super::caps::beyond_quotas;
use super::look::{Known, Look};
use super::{Engine, Incomplete};
use crate::api;
use crate::daemon::cap::Watch;
use crate::daemon::census::{Census, Held};
use crate::daemon::config::Config;
use crate::daemon::keeper::Keeper;
use crate::daemon::view;
use crate::daemon::watches::Watches;
use crate::paths::Paths;

/// Why no thread is capped.
pub(super) const NO_CAPS: &str = "mode observe: nothing is set, so no thread has a place that needs a cap";

/// Reads the host and plans what the daemon would set. In this plan, protections go off only if runtime caps would hold
/// every real-time thread. Without a running daemon, `originals` are those that the last daemon left, and `keeper` has
/// reserved nothing yet.
pub fn to_be(config: &Config, paths: &Paths, method: Option<Method>, originals: &Originals, keeper: &Keeper) -> Look {
    let known = Known { method, journal: Some(originals), keeper: Some(keeper), ..Known::default() };
    let sources = Sources::host();
    let mut look = Look::at(&sources, config, paths, known);
    let mut census = Census::take(&sources.proc, &[std::process::id()], config.daemon.census());
    // The daemon's own threads are left out, even if a daemon runs that does not answer.
    census.threads.retain(|thread| !thread.is_daemon());
    let (caps, uncapped) = would_hold(&look, &mut census, config);
    // Protections stay on where CPU time is reserved.
    look.replan(originals, caps && look.settled.vcpus.is_empty());
    look.name_uncapped(census.why_protected(&uncapped));
    look
}

/// Whether runtime caps would hold every real-time thread of the host if this look's plan were applied, and the threads
/// that they would not hold.
fn would_hold(look: &Look, census: &mut Census, config: &Config) -> (bool, Vec<String>) {
    let (daemon, watcher) = (&config.daemon, config.rules.table().watcher());
    let mut watches = Watches::of(&look.plan, &look.found.tenants, &look.intent, daemon.cap_cpu_share);
    watches.add_devices(&census.threads, &Watches::default(), daemon.cap_cpu_share);
    let planned = look.plan.settings.iter().filter_map(|setting| match (&setting.knob, &setting.value) {
        (Knob::ThreadPolicy { thread, .. }, Value::Policy(place)) => Some((*thread, *place)),
        _ => None,
    });
    let mut places: BTreeMap<ThreadId, Policy> = planned.collect();
    places.extend(watches.list.iter().map(|watch| (watch.id, watch.place)));
    let beyond = beyond_quotas(look, census, &BTreeSet::new(), daemon.cap_threads_per_tenant);
    places.extend(beyond.into_keys().map(|id| (id, Policy::BULK)));
    census.plan(&places);
    let is_capped = |watch: &&Watch| !watch.share.is_whole();
    let capped: BTreeSet<ThreadId> =
        watches.list.iter().take(daemon.cap_threads).filter(is_capped).map(|watch| watch.id).collect();
    let held = Held { capped: &capped, reserved: &look.intent.reserved, watcher, uncapped: &daemon.cap_uncapped };
    let uncapped: Vec<String> =
        census.uncapped(&held).map(ToString::to_string).chain(census.incomplete.clone()).collect();
    (uncapped.is_empty() && capped.len() == watches.list.len(), uncapped)
}

/// What applying this plan would change: knobs with another value, and knobs that would get their originals back.
pub fn would(look: &Look, host: &dyn Host, originals: &Originals) -> api::Report {
    let mut changes = Vec::new();
    let mut unchanged = 0;
    for setting in &look.plan.settings {
        let change = |from, outcome: &str, why| api::Change {
            rule: Some(setting.rule.to_string()),
            knob: setting.knob.to_string(),
            from,
            to: setting.value.to_string(),
            outcome: outcome.to_owned(),
            why,
        };
        match host.read(&setting.knob) {
            Ok(found) if found == setting.value => unchanged += 1,
            Ok(found) => {
                let (outcome, why) = view::foreseen(host, setting).unwrap_or(("would-change", None));
                changes.push(change(Some(found.to_string()), outcome, why));
            }
            Err(error) => {
                let outcome = match &error {
                    KnobError::Gone(_) => "gone",
                    KnobError::Unsupported { .. } => "unsupported",
                    _ => "unreadable",
                };
                changes.push(change(None, outcome, Some(error.why())));
            }
        }
    }
    let wanted: BTreeSet<String> = look
        .plan
        .settings
        .iter()
        .flat_map(|setting| std::iter::once(&setting.knob).chain(&setting.overwrites))
        .map(Knob::key)
        .collect();
    let given_back = originals.entries().iter().filter(|entry| !wanted.contains(&entry.knob.key()));
    changes.extend(given_back.map(|entry| api::Change {
        rule: None,
        knob: entry.knob.to_string(),
        from: host.read(&entry.knob).ok().map(|value| value.to_string()),
        to: entry.value.to_string(),
        outcome: "would-restore".to_owned(),
        why: None,
    }));
    api::Report {
        schema_version: api::SCHEMA_VERSION,
        method: look.intent.method.name().to_owned(),
        dry_run: true,
        changes,
        unchanged,
        findings: look.plan.findings.iter().map(view::finding).collect(),
    }
}

impl Engine {
    /// A pass that sets nothing. First it restores what an earlier mode or daemon has left.
    pub(super) fn observe(&mut self) -> hostnet::Report {
        let left = !self.journal.entries().is_empty() || !self.demoted.is_empty();
        let report = if left { self.give_back() } else { hostnet::Report::default() };
        for item in &report.items {
            if let Done::Failed(why) = &item.done {
                self.error(
                    &item.knob.to_string(),
                    &format!("it could not be given back: {why}; `ontime reset` tries again"),
                );
            }
        }
        if self.caps.is_ok() {
            self.caps = Err(NO_CAPS.to_owned());
        }
        let look = to_be(&self.config, &self.paths, self.method, &self.journal, &self.keeper);
        if let Some(why) = look.incomplete() {
            self.looks_again = true;
            self.error("host", &Incomplete(why.to_owned()));
            return report;
        }
        self.look = look;
        self.failures.clear();
        self.say_problems();
        for Refused { tenant, why } in self.look.settled.refused.clone() {
            self.error(&tenant, &format!("its reservation would not hold: {why}"));
        }
        self.look.settled = Settled { refused: std::mem::take(&mut self.look.settled.refused), ..Settled::default() };
        hostnet::Report { findings: self.look.plan.findings.clone(), ..report }
    }
}

#[cfg(test)]
mod tests {
    use ontime_hostnet::{Obstacle, Plan, Root, RuleId, Setting, Stage};

    use super::*;
    use crate::daemon::census::RealTime;

    fn thread(tid: i32, policy: Policy) -> RealTime {
        let id = ThreadId { pid: 1, tid, start_time: 1 };
        RealTime { id, comm: "x".to_owned(), policy, user: Some(0), cgroup: Some("/a".to_owned()) }
    }

    /// Whether these threads would be held under a plan that gives some of them places, and how many would not.
    fn held(threads: Vec<RealTime>, places: &[(i32, Policy)], config: &Config) -> (bool, usize) {
        let setting = |(tid, place): &(i32, Policy)| {
            let knob = Knob::ThreadPolicy { thread: thread(*tid, *place).id, comm: "x".to_owned() };
            Setting::new(RuleId::IrqThread, Stage::Place, knob, Value::Policy(*place))
        };
        let plan = Plan { settings: places.iter().map(setting).collect(), ..Plan::default() };
        let look = Look { plan, ..Look::default() };
        let mut census = Census::of(threads);
        let (holds, uncapped) = would_hold(&look, &mut census, config);
        (holds, uncapped.len())
    }

    #[test]
    fn a_plan_counts_on_caps_only_where_they_would_hold_every_thread() {
        let mut config = Config::load(std::path::Path::new("/nowhere")).unwrap();
        let other = thread(7, Policy::Rr(3));
        assert_eq!(held(Vec::new(), &[], &config), (true, 0));
        assert_eq!(held(vec![other.clone()], &[], &config), (false, 1), "a thread of no tenant");
        // Capped at the place that the plan gives to it, whatever its present priority. The watcher is below 99.
        let high = vec![thread(8, Policy::Fifo(99))];
        assert_eq!(held(high.clone(), &[], &config), (false, 1));
        assert_eq!(held(high.clone(), &[(8, Policy::Fifo(47))], &config), (true, 0));
        assert_eq!(held(high, &[(8, Policy::BULK)], &config), (true, 0), "it loses its place");
        // More threads than can be capped.
        let places: Vec<(i32, Policy)> = (100..117).map(|tid| (tid, Policy::Fifo(47))).collect();
        assert_eq!(held(Vec::new(), &places, &config), (true, 0));
        config.daemon.cap_threads = 16;
        assert_eq!(held(Vec::new(), &places, &config), (false, 0));
        config.daemon.cap_uncapped = vec!["/a".to_owned()];
        assert_eq!(held(vec![other], &[], &config), (true, 0), "the administrator's word");
    }
    /// A host on which every knob has the value 1. Setting it to 2 has an obstacle for a while, to 3 a lasting one.
    struct Ones;

    impl Host for Ones {
        fn read(&self, _: &Knob) -> Result<Value, KnobError> {
            Ok(Value::Text("1".to_owned()))
        }

        fn write(&self, knob: &Knob, _: &Value) -> Result<(), KnobError> {
            panic!("{knob} was written")
        }

        fn foresee(&self, _: &Knob, value: &Value) -> Option<Obstacle> {
            let lasting = *value == Value::Text("3".to_owned());
            let obstacle = || Obstacle { cause: "the cause".to_owned(), remedy: "the remedy".to_owned(), lasting };
            (lasting || *value == Value::Text("2".to_owned())).then(obstacle)
        }
    }

    #[test]
    fn a_dry_run_promises_nothing_that_is_known_to_fail() {
        let setting = |value: &str| {
            let knob = Knob::HostFile { root: Root::Sys, path: format!("of/{value}") };
            Setting::new(RuleId::HaltPoll, Stage::Place, knob, Value::Text(value.to_owned()))
        };
        let plan = Plan { settings: ["1", "2", "3", "4"].map(setting).into(), ..Plan::default() };
        let report = would(&Look { plan, ..Look::default() }, &Ones, &Originals::default());
        let told: Vec<(&str, Option<&str>)> =
            report.changes.iter().map(|change| (change.outcome.as_str(), change.why.as_deref())).collect();
        let why = Some("the cause; the remedy");
        assert_eq!(told, [("would-fail", why), ("unsupported", why), ("would-change", None)]);
        assert_eq!(report.unchanged, 1);
    }
}
