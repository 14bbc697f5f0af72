//! Mode `observe`: discovers tenants, reads the host and plans, but sets nothing.

use std::collections::{BTreeMap, BTreeSet};

use ontime_hostnet::{self as hostnet, Done, Host, Knob, KnobError, Method, Originals, Value};
use ontime_sched::{BackendKind, Refused, Reserved, Settled, ext};
use ontime_tenants::{Policy, Sources, ThreadId};

use super::caps::beyond_quotas;
use super::look::{Known, Look};
use super::{Engine, Incomplete};
use crate::api;
use crate::daemon::cap::Watch;
use crate::daemon::census::{Census, ThreadHolders};
use crate::daemon::config::Config;
use crate::daemon::keeper::{Keeper, refused};
use crate::daemon::nice;
use crate::daemon::view;
use crate::daemon::watches::Watches;
use crate::paths::Paths;

/// Why no thread is capped.
pub(super) const NO_CAPS: &str = "mode observe: nothing is set, so no thread has a place that needs a cap";

/// Why back end `sched_ext` would not keep a reservation.
const ABSENT: &str = "this ontime is built without sched_ext; build it with --features sched-ext, or use backend = \
                      \"paced\" in sched.toml";

/// Reads the host and plans what the daemon would set. In this plan, protections go off only if runtime caps would hold
/// every real-time thread. Without a running daemon, `originals` are those that the last daemon left, and `keeper` has
/// reserved nothing yet.
pub(crate) fn to_be(
    config: &Config,
    paths: &Paths,
    method: Option<Method>,
    originals: &Originals,
    keeper: &Keeper,
) -> Look {
    // This back end would fail as soon as it got a vCPU.
    let is_absent = config.sched.backend == BackendKind::SchedExt && !ext::BUILT_IN;
    let keeper = Some(keeper).filter(|_| !is_absent);
    let known = Known { method, journal: Some(originals), keeper, ..Known::default() };
    let sources = Sources::host();
    let mut look = Look::at(&sources, config, paths, known);
    if is_absent {
        look.settled = refused(&config.sched, &look.found.tenants, ABSENT);
    }
    let mut census = Census::take(&sources.proc, &[std::process::id()], config.daemon.census(), &mut || ());
    // The daemon's own threads are left out, even if a daemon runs that does not answer.
    census.threads.retain(|thread| !thread.is_daemon());
    let (caps, uncapped) = would_hold(&look, &mut census, config);
    // Protections stay on where CPU time is reserved.
    look.replan(originals, caps && look.settled.vcpus.is_empty());
    look.name_uncapped(census.why_protected(&uncapped));
    look.reserves_nothing();
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
    let held =
        ThreadHolders { capped: &capped, reserved: &look.intent.reserved, watcher, uncapped: &daemon.cap_uncapped };
    let uncapped: Vec<String> =
        census.uncapped(&held).map(ToString::to_string).chain(census.incomplete.clone()).collect();
    (uncapped.is_empty() && capped.len() == watches.list.len(), uncapped)
}

/// What applying this plan would change: knobs with another value, knobs that would get their originals back, and
/// reserved CPU time that is not in force yet.
pub(crate) fn would(look: &Look, host: &dyn Host, originals: &Originals, in_force: &Settled) -> api::Report {
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
    let has = |vcpu: &&Reserved| {
        let is_same = |now: &Reserved| (now.id, now.budget, now.period) == (vcpu.id, vcpu.budget, vcpu.period);
        in_force.vcpus.iter().any(is_same)
    };
    let (kept, new): (Vec<&Reserved>, Vec<&Reserved>) = look.foreseen.vcpus.iter().partition(has);
    unchanged += kept.len();
    changes.extend(new.into_iter().map(|vcpu| {
        let (knob, to) = view::reservation(&look.foreseen, vcpu);
        reserving(knob, to, "would-change", None)
    }));
    changes.extend(look.foreseen.refused.iter().map(|Refused { tenant, why }| {
        let (knob, to) = (format!("CPU time of {tenant}"), "as sched.toml says".to_owned());
        reserving(knob, to, "would-fail", Some(why.clone()))
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

/// A change of reserved CPU time that an apply would make or attempt.
fn reserving(knob: String, to: String, outcome: &str, why: Option<String>) -> api::Change {
    let rule = Some(view::RESERVATION.to_owned());
    api::Change { rule, knob, from: None, to, outcome: outcome.to_owned(), why }
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
                    &format!("it could not be restored: {why}; `ontime reset` tries again"),
                );
            }
        }
        if self.caps.is_ok() {
            self.caps = Err(NO_CAPS.to_owned());
        }
        // Also where an earlier mode has left nothing.
        self.nice.take(nice::ORDINARY);
        let look = to_be(&self.config, &self.paths, self.method, &self.journal, &self.keeper);
        if let Some(why) = look.incomplete() {
            self.looks_again = true;
            self.error(super::HOST, &Incomplete(why.to_owned()));
            return report;
        }
        self.look = look;
        self.failures.clear();
        self.log_problems();
        for Refused { tenant, why } in self.look.settled.refused.clone() {
            self.error(&tenant, &format!("its reservation would not hold: {why}"));
        }
        hostnet::Report { findings: self.look.plan.findings.clone(), ..report }
    }
}

#[cfg(test)]
mod tests {
    use ontime_hostnet::{Obstacle, Plan, Root, RuleId, Setting, Stage};
    use ontime_plan::Nanos;
    use ontime_sched::Held as Kept;

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
    struct HostOfOnes;

    impl Host for HostOfOnes {
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
        let look = Look { plan, ..Look::default() };
        let report = would(&look, &HostOfOnes, &Originals::default(), &Settled::default());
        let told: Vec<(&str, Option<&str>)> =
            report.changes.iter().map(|change| (change.outcome.as_str(), change.why.as_deref())).collect();
        let why = "the cause; the remedy";
        let accepted = format!("{why}; to accept it as it is: without = [\"halt-poll\"] in /etc/ontime/host.toml");
        assert_eq!(told, [("would-fail", Some(why)), ("unsupported", Some(accepted.as_str())), ("would-change", None)]);
        assert_eq!(report.unchanged, 1);
    }

    #[test]
    fn reserved_cpu_time_that_is_not_in_force_would_be_a_change() {
        let held = |tid, cpu| Kept { id: ThreadId { pid: 1, tid, start_time: 1 }, cpu };
        let mut settled = Settled::remembered(&[held(7, Some(3)), held(8, None), held(9, None)]);
        for (vcpu, number) in settled.vcpus.iter_mut().zip(0..) {
            (vcpu.tenant, vcpu.vcpu) = ("press".to_owned(), number);
            (vcpu.budget, vcpu.period) = (Nanos(2_500_000), Nanos(20_000_000));
        }
        let mut in_force = settled.clone();
        in_force.vcpus.remove(1);
        in_force.vcpus[1].budget = Nanos(1_000_000);
        settled.refused.push(Refused { tenant: "mill".to_owned(), why: "no room".to_owned() });
        let mut look = Look { settled, ..Look::default() };
        look.reserves_nothing();
        assert!(look.settled.vcpus.is_empty() && look.settled.refused.len() == 1);
        let told = |in_force: &Settled| -> (Vec<(String, String, String)>, usize) {
            let report = would(&look, &HostOfOnes, &Originals::default(), in_force);
            let changes = report.changes.into_iter().map(|change| (change.knob, change.to, change.outcome));
            (changes.collect(), report.unchanged)
        };
        let vcpu = |number: u32, to: &str| {
            let knob = format!("CPU time of vCPU {number} of press (thread {})", 7 + number);
            (knob, to.to_owned(), "would-change".to_owned())
        };
        let refused = ("CPU time of mill".to_owned(), "as sched.toml says".to_owned(), "would-fail".to_owned());
        let free = "2.5 ms of each 20 ms";
        let all = vec![vcpu(0, "2.5 ms of each 20 ms on CPU 3"), vcpu(1, free), vcpu(2, free), refused.clone()];
        assert_eq!(told(&Settled::default()), (all, 0));
        assert_eq!(told(&in_force), (vec![vcpu(1, free), vcpu(2, free), refused], 1));
    }
}
