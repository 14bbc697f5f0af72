//! What `host.toml` names and the host does not have, or has in one piece where two classes are wanted of it.

use std::collections::BTreeSet;

use ontime_tenants::Class;

use crate::host_config::NicConfig;
use crate::intent::Intent;
use crate::inventory::{Inventory, Nic};
use crate::rule::{Finding, Outcome, RuleId, Severity};

/// See [`RuleId::HostConfig`].
pub fn host_config(inventory: &Inventory, intent: &Intent) -> Outcome {
    let mut outcome = Outcome::default();
    for rule in intent.without.iter().filter(|rule| intent.method.has(**rule)) {
        outcome.findings.push(finding(
            Severity::Info,
            rule.name(),
            format!("rule {rule} is switched off: its knobs are as they were found"),
            "take it out of `without` in /etc/ontime/host.toml",
        ));
    }
    for (name, config) in &intent.nics {
        for tenant in config.tenants.iter().filter(|wanted| !intent.tenants.iter().any(|found| found.name == **wanted))
        {
            outcome.findings.push(finding(
                Severity::Info,
                name,
                format!("tenant {tenant}, which is to use it, does not run"),
                "nothing, if it is stopped; else correct the name (`ontime ps` has those that run)",
            ));
        }
        match inventory.nic(name) {
            Some(nic) => queues(intent, inventory, nic, config, &mut outcome),
            None => outcome.findings.push(finding(
                Severity::Warning,
                name,
                "there is no such interface".to_owned(),
                "correct the name in /etc/ontime/host.toml, or plug it in: it is taken up when it appears",
            )),
        }
    }
    outcome
}

fn queues(intent: &Intent, inventory: &Inventory, nic: &Nic, config: &NicConfig, outcome: &mut Outcome) {
    let count = nic.rx_queues;
    for queue in config.queues.keys().filter(|queue| **queue >= count) {
        outcome.findings.push(finding(
            Severity::Warning,
            &nic.id.name,
            format!("there is no receive queue {queue}, it has {count} (numbered from 0)"),
            "correct /etc/ontime/host.toml, or give it more: ethtool -L, which may reset the NIC",
        ));
    }
    let whole = intent.nic_class(inventory, nic);
    let class_of = |queue: &u32| config.queues.get(queue).copied().unwrap_or(whole);
    if config.queues.is_empty() {
        return;
    }
    for napi in &nic.napis {
        let classes: BTreeSet<Class> = napi.rx_queues.iter().map(class_of).collect();
        if classes.len() > 1 {
            outcome.findings.push(claimed_twice(nic, &format!("NAPI {} serves queues", napi.id), &classes));
        }
    }
    for irq in &nic.irqs {
        let woken = nic.napis.iter().filter(|napi| napi.irq == Some(*irq));
        let classes: BTreeSet<Class> = woken.map(|napi| intent.napi_class(inventory, nic, napi)).collect();
        if classes.len() > 1 {
            outcome.findings.push(claimed_twice(nic, &format!("interrupt {irq} wakes NAPI instances"), &classes));
        }
    }
    if !nic.napis.is_empty() && nic.napis.iter().all(|napi| napi.rx_queues.is_empty()) {
        outcome.findings.push(finding(
            Severity::Warning,
            &nic.id.name,
            "its driver does not say which NAPI serves which queue, so all have the NIC's class".to_owned(),
            "a kernel and driver that report queues by netlink (6.8), or a class for the whole NIC",
        ));
    }
}

fn claimed_twice(nic: &Nic, what: &str, classes: &BTreeSet<Class>) -> Finding {
    let names: Vec<String> = classes.iter().map(Class::to_string).collect();
    let found = format!("{what} of {}: all run at the most urgent", names.join(" and "));
    finding(Severity::Warning, &nic.id.name, found, "give queues that share a NAPI or interrupt one class")
}

fn finding(severity: Severity, object: &str, found: String, remedy: &str) -> Finding {
    Finding {
        rule: RuleId::HostConfig,
        severity,
        object: object.to_owned(),
        found,
        remedy: remedy.to_owned(),
        refusal: None,
    }
}
