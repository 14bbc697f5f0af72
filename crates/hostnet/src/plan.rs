//! The plan: the settings of all rules in force on this host, in the order of applying.
//!
//! In: an [`Inventory`] and an [`Intent`]. Out: a [`Plan`]. Does no I/O.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::intent::Intent;
use crate::inventory::Inventory;
use crate::journal::Originals;
use crate::knob::{Knob, Value};
use crate::rule::{Finding, Setting, Severity};
use crate::rules::RULES;

/// The planned knob values, and the problems that no knob removes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// Settings in order of stage, each knob once.
    pub settings: Vec<Setting>,
    /// Remaining problems.
    pub findings: Vec<Finding>,
}

/// Collects the settings of every rule that is in force.
///
/// If two rules plan different values for one knob, the rule that is later in [`RULES`] loses, and a finding reports
/// it. This never happens among the core rules (tested).
pub fn plan(inventory: &Inventory, intent: &Intent) -> Plan {
    let mut result = Plan::default();
    let mut taken: BTreeMap<String, Setting> = BTreeMap::new();
    for rule in RULES.iter().filter(|rule| intent.has(rule.id)) {
        let outcome = (rule.plan)(inventory, intent);
        result.findings.extend(outcome.findings);
        for setting in outcome.settings {
            match taken.get(&setting.knob.key()) {
                None => {
                    taken.insert(setting.knob.key(), setting.clone());
                    result.settings.push(setting);
                }
                Some(first) if first.value == setting.value => {}
                Some(first) => result.findings.push(contradiction(first, &setting)),
            }
        }
    }
    // The sort is stable: within a stage, rules keep the order of the table.
    result.settings.sort_by_key(|setting| setting.stage);
    result
}

fn contradiction(first: &Setting, second: &Setting) -> Finding {
    Finding {
        rule: second.rule,
        severity: Severity::Warning,
        object: second.knob.to_string(),
        found: format!("{} wants {}, {} wants {}", first.rule, first.value, second.rule, second.value),
        remedy: "one NIC, queue or thread is claimed twice: give it one class in /etc/ontime".to_owned(),
        refusal: None,
    }
}

/// As [`plan`], for the host as it was before Ontime changed it.
pub fn replan(inventory: Inventory, intent: Intent, journal: &Originals) -> Plan {
    let (inventory, intent) = as_found(inventory, intent, journal);
    plan(&inventory, &intent)
}

/// Restores, in the data, the host as it was before Ontime changed it, for the facts that rules start from. Where a
/// rule removes something (a CPU from an interrupt's or a thread's affinity, a queue from XPS), a changed configuration
/// must not add to an earlier one. And where an instance polls, or a kernel thread has a policy, it is another
/// program's choice only if Ontime has not set it.
pub fn as_found(mut inventory: Inventory, mut intent: Intent, journal: &Originals) -> (Inventory, Intent) {
    let originals = journal.by_key();
    let cpus = |knob: Knob| match originals.get(&knob.key()) {
        Some(Value::Cpus(cpus)) => Some(cpus.clone()),
        _ => None,
    };
    for irq in &mut inventory.irqs {
        if let Some(original) = cpus(Knob::IrqAffinity { irq: irq.id.clone() }) {
            irq.affinity = original;
        }
    }
    for nic in &mut inventory.nics {
        for (number, queue) in (0..).zip(&mut nic.tx_queues) {
            if let Some(original) = cpus(Knob::XpsCpus { nic: nic.id.clone(), queue: number }) {
                queue.xps_cpus = Some(original);
            }
        }
    }
    for nic in &mut inventory.nics {
        for napi in &mut nic.napis {
            let knob = Knob::NapiThreaded { nic: nic.id.clone(), napi: napi.id };
            if let Some(Value::Threaded(original)) = originals.get(&knob.key()) {
                napi.threaded = Some(*original);
            }
        }
    }
    for thread in &mut inventory.threads {
        let knob = Knob::ThreadPolicy { thread: thread.id, comm: String::new() };
        if let Some(Value::Policy(original)) = originals.get(&knob.key()) {
            thread.policy = *original;
        }
    }
    for thread in intent.tenants.iter_mut().flat_map(|tenant| &mut tenant.threads) {
        if let Some(original) = cpus(Knob::ThreadAffinity { thread: thread.id, comm: String::new() }) {
            thread.affinity = original.to_string();
        }
    }
    (inventory, intent)
}
