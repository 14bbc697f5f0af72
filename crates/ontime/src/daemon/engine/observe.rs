//! Mode `observe`: tenants are found and the host is read and planned for, and nothing is set.

use std::collections::BTreeSet;

use ontime_hostnet::{self as hostnet, Done, Host, Knob, KnobError, Method, Originals};
use ontime_sched::Refused;
use ontime_tenants::Sources;

use super::look::{Known, Look};
use super::{Engine, Incomplete};
use crate::api;
use crate::daemon::config::Config;
use crate::daemon::keeper::Keeper;
use crate::daemon::view;
use crate::paths::Paths;

/// Why no thread is capped.
pub(super) const NO_CAPS: &str = "mode observe: nothing is set, so no thread has a place that needs a cap";

/// Looks at the host and plans what the daemon would set, runtime caps being in force. Without the daemon `originals`
/// are those that it left, and `keeper` has reserved nothing yet.
pub fn to_be(config: &Config, paths: &Paths, method: Option<Method>, originals: &Originals, keeper: &Keeper) -> Look {
    let known = Known { method, journal: Some(originals), keeper: Some(keeper), ..Known::default() };
    let mut look = Look::at(&Sources::host(), config, paths, known);
    // Protections stay on beside reserved CPU time.
    look.replan(originals, look.settled.vcpus.is_empty());
    look
}

/// What applying this plan would change: knobs that have another value, and those that would have their originals back.
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
            Ok(found) => changes.push(change(Some(found.to_string()), "would-change", None)),
            Err(error) => {
                let outcome = match &error {
                    KnobError::Gone(_) => "gone",
                    KnobError::Unsupported { .. } => "unsupported",
                    _ => "unreadable",
                };
                changes.push(change(None, outcome, Some(error.to_string())));
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
    /// A pass that sets nothing, after what an earlier mode or daemon has left was given back.
    pub(super) fn observe(&mut self) -> hostnet::Report {
        let left = !self.journal.entries().is_empty();
        let report = if left { self.give_back() } else { hostnet::Report::default() };
        for item in &report.items {
            if let Done::Failed(why) = &item.done {
                self.error(&item.knob.to_string(), &format!("it could not be given back: {why}"));
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
        self.look.settled.vcpus.clear();
        hostnet::Report { findings: self.look.plan.findings.clone(), ..report }
    }
}
