//! The typed rule: one row of the table "what an RT packet can wait behind".
//!
//! In: an [`Inventory`] (facts) and an [`Intent`] (configuration). Out, by a pure function: the [`Setting`]s that
//! remove the wait on this host, and [`Finding`]s for waits that no setting removes.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::intent::Intent;
use crate::inventory::Inventory;
use crate::knob::{Knob, Value};
pub use crate::rule_id::RuleId;

/// The cost of a row while its wait is not removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Cost {
    /// How late a packet may be, us: the largest latency in the text, or an estimate if it has none.
    pub delay_us: u32,
    /// The cost in words and figures (us; three figures together are p50/p99/max).
    pub text: &'static str,
    /// Source of the figures: kernel, clock, load. Empty while there is no figure.
    pub source: &'static str,
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    /// The rule's name.
    pub id: RuleId,
    /// The aim, in one line.
    pub title: &'static str,
    /// The work that an RT packet can wait behind.
    pub waits_behind: &'static str,
    /// The cost of that wait.
    pub cost: Cost,
    /// How the rule removes the wait.
    pub cure: &'static str,
    /// Why applying the rule on a live host is safe, with the kernel file that shows it.
    pub live_safe: &'static str,
    /// Plans the settings and findings for this host.
    pub plan: fn(&Inventory, &Intent) -> Outcome,
}

/// The step within a pass in which a setting is made. All settings of a stage are made before those of a later stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// Settings that create threads. A plan that was made before does not know these threads yet.
    Thread,
    /// The CPUs of threads and interrupts.
    Affinity,
    /// Priorities.
    Place,
    /// Queues and filters.
    Steer,
    /// Host-wide values.
    Host,
    /// Switching kernel protections off: last on apply, when everything else is set; first on reset.
    Protection,
}

/// A knob and the value that a rule plans for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Setting {
    /// The rule that plans it.
    pub rule: RuleId,
    /// The step of the pass in which it is made.
    pub stage: Stage,
    /// The knob to set.
    pub knob: Knob,
    /// The planned value.
    pub value: Value,
    /// Other knobs that this one overwrites. Their originals are stored with its own, and restored after it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub overwrites: Vec<Knob>,
    /// Dependencies. If one of them cannot be set, or is being restored, this setting is not made, and is restored if
    /// it was made before. A knob that no longer exists is ignored.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub needs: Vec<Knob>,
    /// The original to store, if not the value found on the host ([`crate::inherit`]).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub original: Option<Value>,
    /// Another component changes the knob from now on. Its original is stored even if it has the planned value already.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub handed_on: bool,
    /// Written in every pass, and once more soon after the first write: reading the planned value back does not prove
    /// that the device uses it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub needs_second_write: bool,
}

impl Setting {
    /// The first of the dependencies whose key is in this set.
    pub(crate) fn lacks(&self, missing: &BTreeSet<String>) -> Option<&Knob> {
        self.needs.iter().find(|knob| missing.contains(&knob.key()))
    }

    /// A setting that overwrites no other knob and has no dependencies.
    pub fn new(rule: RuleId, stage: Stage, knob: Knob, value: Value) -> Self {
        let (overwrites, needs) = (Vec::new(), Vec::new());
        Self {
            rule,
            stage,
            knob,
            value,
            overwrites,
            needs,
            original: None,
            handed_on: false,
            needs_second_write: false,
        }
    }
}

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// For information; no effect on an RT packet.
    Info,
    /// An RT packet waits longer than necessary.
    Warning,
    /// The class guarantee does not hold.
    Critical,
}

/// Why a helpful change is not made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Refusal {
    /// Kernel lockdown forbids it.
    Lockdown,
    /// The RT tenants have no runtime caps in force.
    NoCaps,
    /// The kernel lacks the feature.
    Kernel,
    /// The device or driver lacks the feature.
    Device,
    /// It would disturb live traffic.
    NotLiveSafe,
    /// The host's facts could not be read.
    Unreadable,
}

/// A wait or a problem that no setting removes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The rule that found it.
    pub rule: RuleId,
    /// How severe it is.
    pub severity: Severity,
    /// The NIC, tenant, thread or file concerned.
    pub object: String,
    /// What was found.
    pub found: String,
    /// What the administrator can do about it.
    pub remedy: String,
    /// Why Ontime does not apply the remedy.
    pub refusal: Option<Refusal>,
}

/// The result of planning a rule on this host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Outcome {
    /// Settings that remove the wait.
    pub settings: Vec<Setting>,
    /// Remaining problems, and their reasons.
    pub findings: Vec<Finding>,
}
