//! The plan: what every rule in force wants on this host, in the order in which it is made.
//!
//! In: an [`Inventory`] and an [`Intent`]. Out: a [`Plan`]. Pure.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::intent::Intent;
use crate::inventory::Inventory;
use crate::journal::Originals;
use crate::knob::{Knob, Value};
use crate::rule::{Finding, Setting, Severity};
use crate::rules::RULES;

/// What is wanted of this host's knobs, and what no knob cures.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// Settings by stage, each knob once.
    pub settings: Vec<Setting>,
    /// What stays.
    pub findings: Vec<Finding>,
}

/// Asks every rule that is in force.
///
/// Where two rules want different values of one knob, the later in [`RULES`] is not followed and a finding says so; the
/// core rules never do (tested).
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
    // Stable: within a stage, rules keep the order of the table.
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

/// As [`plan`], on the host as it was before Ontime changed it.
pub fn replan(inventory: Inventory, intent: Intent, journal: &Originals) -> Plan {
    let (inventory, intent) = as_found(inventory, intent, journal);
    plan(&inventory, &intent)
}

/// The host as it was before Ontime changed it, as far as rules start from what they find: where one takes something
/// away (a CPU from an interrupt's or a thread's CPUs, a queue from XPS), a changed wish is not to add up with an
/// earlier one; and that an instance polls, or where a kernel thread stands, is somebody's choice only if Ontime did
/// not do it.
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
