//! Findings about `host.toml`: objects that the host does not have, objects that cannot have two classes, and missing
//! information that Ontime cannot find by itself.

use std::collections::BTreeSet;

use ontime_tenants::{Class, Tenant};

use crate::host_config::NicConfig;
use crate::intent::{Intent, reaches};
use crate::inventory::{Inventory, Nic};
use crate::rule::{Finding, Outcome, RuleId, Severity};

/// The kind of a datapath's own port and of internal ports (`net/openvswitch/vport-internal_dev.c`). The datapath's own
/// port is the master of its ports.
const OPEN_VSWITCH: &str = "openvswitch";

/// The rule [`RuleId::HostConfig`].
pub(super) fn host_config(inventory: &Inventory, intent: &Intent) -> Outcome {
    let mut outcome = Outcome::default();
    for rule in intent.without.iter().filter(|rule| intent.method.has(**rule)) {
        outcome.findings.push(finding(
            Severity::Info,
            rule.name(),
            format!("rule {rule} is switched off: its knobs keep the values that they had"),
            "take it out of `without` in /etc/ontime/host.toml",
        ));
    }
    for (name, config) in &intent.nics {
        for tenant in config.tenants.iter().filter(|wanted| !intent.tenants.iter().any(|found| found.name == **wanted))
        {
            outcome.findings.push(finding(
                Severity::Info,
                name,
                format!("tenant {tenant}, which host.toml names for this NIC, does not run"),
                "nothing, if it is stopped; else correct the name (`ontime ps` has those that run)",
            ));
        }
        match inventory.nic(name) {
            Some(nic) if intent.config_of(nic) != Some(config) => outcome.findings.push(finding(
                Severity::Warning,
                name,
                format!(
                    "is another name of {}, for which host.toml has another table: this table is ignored",
                    nic.id.name
                ),
                "take one of the two out of /etc/ontime/host.toml",
            )),
            Some(nic) => {
                outcome.findings.extend(goes_by_others(inventory, nic));
                outcome.findings.extend(stands_on_others(inventory, nic));
                outcome.findings.extend(bulk_for_rt(intent, inventory, nic, config));
                queues(intent, inventory, nic, config, &mut outcome);
            }
            None => outcome.findings.push(missing(inventory, name)),
        }
    }
    outcome.findings.extend(intent.rt_tenants().filter_map(|tenant| leads_nowhere(intent, inventory, tenant)));
    outcome
}

fn missing(inventory: &Inventory, name: &str) -> Finding {
    let known = |name: &str| inventory.nic(name).is_some();
    let remedy = match name.split_once('@') {
        Some((own, _)) if known(own) => {
            format!("write {own} in /etc/ontime/host.toml: what `ip` shows behind the @ is no part of the name")
        }
        _ => "correct the name in /etc/ontime/host.toml, or plug it in: it is taken up when it appears".to_owned(),
    };
    finding(Severity::Warning, name, "there is no such interface".to_owned(), &remedy)
}

/// A port of a switch, or the upper interface of a pair: its configuration applies to the NICs below it.
fn goes_by_others(inventory: &Inventory, nic: &Nic) -> Option<Finding> {
    let below: Vec<&str> =
        nic.lower.iter().filter_map(|index| inventory.nic_by_index(*index)).map(|one| one.id.name.as_str()).collect();
    let found =
        format!("has no interrupt and no NAPI of its own: its packets pass {}, which get its class", below.join(", "));
    nic.carried.then(|| finding(Severity::Info, &nic.id.name, found, "nothing; or name these in its place"))
}

/// A virtual interface without interrupts and NAPI: its configuration has no effect.
fn stands_on_others(inventory: &Inventory, nic: &Nic) -> Option<Finding> {
    if !nic.passes_on() {
        return None;
    }
    let kind = nic.kind.as_deref().unwrap_or("virtual");
    let names = below(inventory, nic);
    let which = if names.is_empty() { String::new() } else { format!(": {}", names.join(", ")) };
    let found = format!("is of kind {kind}, which has no interrupt and no NAPI of its own: this table has no effect");
    let remedy = format!("name the NICs below it in /etc/ontime/host.toml in its place{which}");
    Some(finding(Severity::Warning, &nic.id.name, found, &remedy))
}

/// The names of the physical NICs below an interface, at any depth.
fn below<'a>(inventory: &'a Inventory, nic: &Nic) -> Vec<&'a str> {
    let mut known = BTreeSet::from([nic.id.ifindex]);
    let mut next = vec![nic];
    let mut names = BTreeSet::new();
    while let Some(upper) = next.pop() {
        let carries = |one: &&Nic| {
            let index = one.id.ifindex;
            upper.lower.contains(&index) || upper.link == Some(index) || one.controller == Some(upper.id.ifindex)
        };
        for lower in inventory.nics.iter().filter(carries) {
            if !known.insert(lower.id.ifindex) {
                continue;
            }
            if lower.physical && !lower.carried {
                names.insert(lower.id.name.as_str());
            } else {
                next.push(lower);
            }
        }
    }
    names.into_iter().collect()
}

/// A NIC with configured class bulk that only RT tenants use. If both classes use it, rule `rt-tx-queue` reports that.
fn bulk_for_rt(intent: &Intent, inventory: &Inventory, nic: &Nic, config: &NicConfig) -> Option<Finding> {
    let rt = |class: &Class| *class != Class::Bulk;
    let users: Vec<&Tenant> = intent.users(inventory, nic).collect();
    let only_rt = !users.is_empty() && users.iter().all(|tenant| rt(&tenant.class));
    if config.class != Some(Class::Bulk) || !only_rt || config.queues.values().any(rt) {
        return None;
    }
    let names: Vec<&str> = users.iter().map(|tenant| tenant.name.as_str()).collect();
    let table = intent.table_of(nic);
    let found = format!(
        "is of class bulk, and only RT tenants use it ({}): its threads are at bulk priority",
        names.join(", ")
    );
    let remedy = format!(
        "take class = \"bulk\" out of [{table}] in /etc/ontime/host.toml, so that it has its tenants' class; or \
         keep a receive queue for them: [{table}.queue.N] class = \"rt\""
    );
    Some(finding(Severity::Warning, &nic.id.name, found, &remedy))
}

/// An RT tenant with interfaces of which none leads to a NIC. The kernel does not show through which NIC a switch of
/// Open vSwitch sends.
fn leads_nowhere(intent: &Intent, inventory: &Inventory, tenant: &Tenant) -> Option<Finding> {
    let named = intent.nics.values().any(|config| config.tenants.contains(&tenant.name));
    let leads = |nic: &Nic| reaches(inventory, tenant, nic);
    let vnic = tenant.vnics.first()?;
    if named || inventory.nics.iter().filter(|nic| nic.physical).any(leads) {
        return None;
    }
    let naming = format!(
        "write [nic.X] tenants = [\"{}\"] into /etc/ontime/host.toml, where X is the NIC by which they leave",
        tenant.name
    );
    let switched = tenant.vnics.iter().find(|vnic| is_switched(inventory, &vnic.ifname));
    Some(match switched {
        Some(vnic) => {
            let what = "is a port of Open vSwitch, which does not say by which NIC its packets leave: that NIC has no \
                RT class for them";
            finding(Severity::Warning, &tenant.name, format!("{} {what}", vnic.ifname), &naming)
        }
        None => {
            let what = "leads to no NIC that is known: its network is the host's own, or behind a router or NAT";
            let remedy = format!("nothing, if its packets leave by none; else {naming}");
            finding(Severity::Info, &tenant.name, format!("{} {what}", vnic.ifname), &remedy)
        }
    })
}

/// Whether an interface is a port of a datapath, or is above an internal port.
fn is_switched(inventory: &Inventory, ifname: &str) -> bool {
    let around = inventory.nic(ifname).map(|nic| [nic.controller, nic.link]);
    let nics = around.into_iter().flatten().flatten().filter_map(|index| inventory.nic_by_index(index));
    nics.into_iter().any(|nic| nic.kind.as_deref() == Some(OPEN_VSWITCH))
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
            "boot a kernel (6.8) with a driver that reports queues by netlink, or give the whole NIC one class in \
             /etc/ontime/host.toml",
        ));
    }
}

fn claimed_twice(nic: &Nic, what: &str, classes: &BTreeSet<Class>) -> Finding {
    let names: Vec<String> = classes.iter().map(Class::to_string).collect();
    let found = format!("{what} of {}: all run at the priority of the most urgent", names.join(" and "));
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
