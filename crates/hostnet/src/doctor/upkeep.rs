//! Checks of what the kernel does by itself on RT CPUs, and of where these are.

use std::collections::{BTreeMap, BTreeSet};

use ontime_tenants::{Tenant, ThreadRole};

use super::{Check, State};
use crate::cpus::CpuSet;
use crate::intent::Intent;
use crate::inventory::Inventory;

/// Statistics that are folded so seldom, s, disturb nobody.
const SELDOM: u64 = 10;

/// CPUs of a tenant's vCPUs and of an RT container's threads, where each is kept to some of the host's.
fn pinned(inventory: &Inventory, tenant: &Tenant) -> CpuSet {
    let runs = |role: ThreadRole| matches!(role, ThreadRole::Vcpu(_) | ThreadRole::Container);
    let sets: Vec<CpuSet> = tenant
        .threads
        .iter()
        .filter(|thread| runs(thread.role))
        .filter_map(|thread| CpuSet::from_list(&thread.affinity).ok())
        .collect();
    let everywhere = |cpus: &CpuSet| inventory.cpus.online.iter().all(|cpu| cpus.contains(cpu));
    if sets.iter().any(everywhere) { CpuSet::new() } else { sets.iter().flat_map(CpuSet::iter).collect() }
}

fn rt_cpus(inventory: &Inventory, intent: &Intent) -> CpuSet {
    let of_tenants = intent.rt_tenants().flat_map(|tenant| pinned(inventory, tenant).iter().collect::<Vec<_>>());
    let polling = inventory.nics.iter().filter_map(|nic| intent.config_of(nic)?.poll_cpu);
    of_tenants.chain(polling).chain(intent.exclusive_cpu).collect()
}

/// CPUs that are kept free, against those where RT tenants run.
pub(super) fn isolation(inventory: &Inventory, intent: &Intent) -> Check {
    let (id, title) = (
        "isolation",
        "CPUs kept free (isolcpus, cpuset partitions, nohz_full) against those of RT \
        tenants",
    );
    let cpus = &inventory.cpus;
    let rt = rt_cpus(inventory, intent);
    let kept: CpuSet = cpus.isolated.iter().chain(cpus.nohz_full.iter()).collect();
    if kept.is_empty() {
        return Check::new(id, title, State::Ok, "no CPU is kept free");
    }
    if intent.rt_tenants().next().is_none() {
        return Check::new(id, title, State::Ok, format!("CPUs {kept} are kept free; there is no RT tenant"));
    }
    let without = |all: &CpuSet, other: &CpuSet| all.iter().filter(|cpu| !other.contains(*cpu)).collect::<CpuSet>();
    let mut found = Vec::new();
    let mut remedies = Vec::new();
    let unused = without(&kept, &rt);
    if !unused.is_empty() {
        found.push(format!("no RT tenant is kept to CPUs {unused}, which are kept free: nothing else runs there"));
        remedies.push(format!(
            "pin RT vCPUs there (libvirt: <vcpupin>), or take {unused} out of isolcpus and \
            nohz_full"
        ));
    }
    let open = without(&rt, &cpus.isolated);
    if !open.is_empty() {
        found.push(format!("RT tenants are kept to CPUs {open}, which others may use, too"));
        remedies.push(format!("isolate {open} as well (isolcpus, or an isolated cpuset partition)"));
    }
    let ticking = without(&rt, &cpus.nohz_full);
    if !cpus.nohz_full.is_empty() && !ticking.is_empty() {
        found.push(format!(
            "CPUs {ticking} of RT tenants have a tick, others (nohz_full {}) have \
            none",
            cpus.nohz_full
        ));
        remedies.push(format!("boot with nohz_full={rt}, which takes RCU callbacks off them, too"));
    }
    if found.is_empty() {
        return Check::new(id, title, State::Ok, format!("RT tenants are kept to CPUs {rt}, which are kept free"));
    }
    Check::new(id, title, State::Warning, found.join("; "))
        .costs("bulk threads, ticks and RCU callbacks on an RT tenant's CPU, or a CPU without work; not measured", "")
        .remedy(remedies.join("; "))
}

/// RT tenants that are kept to CPUs far from a NIC that they use.
pub(super) fn numa(inventory: &Inventory, intent: &Intent) -> Check {
    let (id, title) = ("numa", "RT tenants near their NICs");
    let nodes = &inventory.cpus.nodes;
    if nodes.len() < 2 {
        return Check::new(id, title, State::Ok, "the host has one NUMA node");
    }
    let node_of = |cpu: u32| nodes.iter().find(|(_, (cpus, _))| cpus.contains(cpu)).map(|(node, _)| *node);
    let numbers: Vec<u32> = nodes.keys().copied().collect();
    let mut far = BTreeMap::new();
    for nic in inventory.nics.iter().filter(|nic| nic.physical) {
        let Some(node) = nic.node.filter(|node| nodes.contains_key(node)) else { continue };
        for tenant in
            intent.users(inventory, nic).filter(|tenant| intent.rt_tenants().any(|rt| rt.process == tenant.process))
        {
            let at: BTreeSet<u32> = pinned(inventory, tenant).iter().filter_map(node_of).collect();
            for other in at.into_iter().filter(|other| *other != node) {
                let distance = nodes.get(&other).and_then(|(_, all)| {
                    let place = numbers.iter().position(|number| *number == node)?;
                    all.get(place)
                });
                let distance = distance.map_or_else(String::new, |distance| format!(", distance {distance}"));
                let told = format!("{} on node {other}, {} on node {node}{distance}", tenant.name, nic.id.name);
                far.insert((tenant.name.clone(), nic.id.name.clone(), other), told);
            }
        }
    }
    if far.is_empty() {
        return Check::new(id, title, State::Ok, "no RT tenant is kept to CPUs of another node than its NIC's");
    }
    Check::new(id, title, State::Warning, far.into_values().collect::<Vec<_>>().join("; "))
        .costs("each packet's buffers and rings are read across nodes; not measured", "")
        .remedy("pin the tenant to the NIC's node (libvirt: <vcpupin>, <numatune>), or give it a NIC of its own node")
}

/// What the kernel does now and then on every CPU.
pub(super) fn periodic(inventory: &Inventory) -> Check {
    let (id, title) = ("periodic-work", "what the kernel does now and then on every CPU");
    let value = |name: &str| inventory.sysctls.get(name).and_then(|text| text.parse::<u64>().ok());
    let mut found = Vec::new();
    let mut remedies = Vec::new();
    if value("kernel/nmi_watchdog").is_some_and(|on| on > 0) {
        found.push("a performance counter interrupts each busy CPU (nmi_watchdog)".to_owned());
        remedies.push("sysctl kernel.nmi_watchdog=0".to_owned());
    }
    if let Some(seconds) = value("vm/stat_interval").filter(|seconds| *seconds < SELDOM) {
        found.push(format!("a kworker folds each CPU's memory statistics every {seconds} s (vm.stat_interval)"));
        remedies.push(format!("sysctl vm.stat_interval={SELDOM} or more"));
    }
    if !inventory.cpus.nohz_full.is_empty() && value("kernel/timer_migration") == Some(0) {
        found.push("timers stay on nohz_full CPUs that armed them (timer_migration)".to_owned());
        remedies.push("sysctl kernel.timer_migration=1".to_owned());
    }
    if found.is_empty() {
        return Check::new(id, title, State::Ok, "neither a watchdog's interrupts nor frequent statistics");
    }
    Check::new(id, title, State::Warning, found.join("; "))
        .costs("some microseconds each time; not measured", "")
        .remedy(remedies.join(", "))
}

pub(super) fn swap(inventory: &Inventory, intent: &Intent) -> Check {
    let (id, title) = ("swap", "guests' memory stays in memory");
    if !inventory.memory.swap {
        return Check::new(id, title, State::Ok, "there is no swap area");
    }
    if intent.rt_tenants().next().is_none() {
        return Check::new(id, title, State::Ok, "there is a swap area, and no RT tenant");
    }
    Check::new(
        id,
        title,
        State::Warning,
        "there is a swap area: what is not locked of an RT tenant's memory may be \
        written to it",
    )
    .costs("a vCPU that touches such a page waits for the disk", "")
    .remedy(
        "lock RT VMs' memory (libvirt: <memoryBacking> with <locked/> or <hugepages/>), for containers \
            memory.swap.max=0; or swapoff -a",
    )
}
