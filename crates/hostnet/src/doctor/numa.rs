//! The NUMA nodes of RT tenants' CPUs, memory and NICs.

use std::collections::{BTreeMap, BTreeSet};

use ontime_tenants::{Tenant, ThreadId};

use super::upkeep::pinned;
use super::{Check, State};
use crate::cpus::CpuSet;
use crate::intent::Intent;
use crate::inventory::Inventory;
use crate::placement::ByNode;

/// A smaller part of a tenant's memory, percent, is not reported: libraries that other processes loaded first.
const SHARE: u64 = 5;

/// RT tenants that are pinned to CPUs far from a NIC that they use, or that have memory far from either.
pub(super) fn check(
    inventory: &Inventory,
    intent: &Intent,
    memory: &BTreeMap<ThreadId, Result<ByNode, String>>,
) -> Check {
    let (id, title) = ("numa", "RT tenants near their NICs and their memory");
    if inventory.cpus.nodes.len() < 2 {
        return Check::new(id, title, State::Ok, "the host has one NUMA node");
    }
    let (mut found, mut unknown) = (Vec::new(), Vec::new());
    for tenant in intent.rt_tenants() {
        let runs = nodes_of(inventory, &pinned(inventory, tenant));
        let nics = nics_of(inventory, intent, tenant);
        found.extend(far_nics(inventory, tenant, &runs, &nics));
        match memory.get(&tenant.process) {
            Some(Ok(by_node)) => found.extend(far_memory(inventory, tenant, &runs, &nics, by_node)),
            Some(Err(why)) => unknown.push(format!("where the memory of {} lies is not known: {why}", tenant.name)),
            None => {}
        }
    }
    let state = match (found.is_empty(), unknown.is_empty()) {
        (false, _) => State::Warning,
        (true, false) => State::Unknown,
        (true, true) => return Check::new(id, title, State::Ok, "no RT tenant is far from its NICs or its memory"),
    };
    found.extend(unknown);
    Check::new(id, title, state, found.join("; "))
        .costs(5, "each packet's buffers and rings, or each of a guest's accesses, cross nodes; not measured", "")
        .remedy(
            "pin the tenant to the node of its NIC and give it memory there (libvirt: <vcpupin>, <numatune> strict; \
             cgroup: cpuset.cpus, cpuset.mems), or give it a NIC of its own node",
        )
}

fn nodes_of(inventory: &Inventory, cpus: &CpuSet) -> BTreeSet<u32> {
    let all = inventory.cpus.nodes.iter();
    all.filter(|(_, (of_node, _))| cpus.iter().any(|cpu| of_node.contains(cpu))).map(|(node, _)| *node).collect()
}

/// The NICs through which a tenant's packets pass, with the node of each, if known.
fn nics_of(inventory: &Inventory, intent: &Intent, tenant: &Tenant) -> Vec<(String, u32)> {
    let physical = inventory.nics.iter().filter(|nic| nic.physical);
    let near = physical.filter_map(|nic| Some((nic, nic.node.filter(|node| inventory.cpus.nodes.contains_key(node))?)));
    let used = near.filter(|(nic, _)| intent.users(inventory, nic).any(|user| user.process == tenant.process));
    used.map(|(nic, node)| (nic.id.name.clone(), node)).collect()
}

fn far_nics(inventory: &Inventory, tenant: &Tenant, runs: &BTreeSet<u32>, nics: &[(String, u32)]) -> Vec<String> {
    let pairs = nics.iter().flat_map(|nic| runs.iter().map(move |node| (nic, *node)));
    let far = pairs.filter(|((_, near), node)| near != node);
    far.map(|((nic, near), node)| {
        format!("{} on node {node}, {nic} on node {near}{}", tenant.name, distance(inventory, node, *near))
    })
    .collect()
}

/// One sentence per node that has a part of a tenant's memory and is not a node of its CPUs or its NICs.
fn far_memory(
    inventory: &Inventory,
    tenant: &Tenant,
    runs: &BTreeSet<u32>,
    nics: &[(String, u32)],
    by_node: &ByNode,
) -> Vec<String> {
    let total = by_node.values().copied().fold(0, u64::saturating_add).max(1);
    let mut found = Vec::new();
    for (node, bytes) in by_node {
        let share = bytes.saturating_mul(100) / total;
        if share < SHARE {
            continue;
        }
        let mut others = Vec::new();
        if runs.is_empty() {
            others.push("it may run on every node".to_owned());
        }
        let elsewhere = runs.iter().filter(|other| *other != node);
        others.extend(elsewhere.map(|other| format!("it runs on node {other}{}", distance(inventory, *other, *node))));
        let elsewhere = nics.iter().filter(|(_, other)| other != node);
        others.extend(
            elsewhere.map(|(nic, other)| format!("{nic} is on node {other}{}", distance(inventory, *other, *node))),
        );
        if !others.is_empty() {
            found.push(format!("{share} % of the memory of {} is on node {node}: {}", tenant.name, others.join(", ")));
        }
    }
    found
}

/// The distance between two nodes, if the firmware states it, as the end of a sentence.
fn distance(inventory: &Inventory, from: u32, to: u32) -> String {
    let place = inventory.cpus.nodes.keys().position(|node| *node == to);
    let distance = inventory.cpus.nodes.get(&from).and_then(|(_, all)| all.get(place?));
    distance.map_or_else(String::new, |distance| format!(", distance {distance}"))
}
