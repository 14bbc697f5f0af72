//! Checks of the kernel's background work on RT CPUs, and of the choice of these CPUs.

use ontime_tenants::{Tenant, ThreadRole};

use super::{Check, State};
use crate::cpus::CpuSet;
use crate::intent::Intent;
use crate::inventory::Inventory;

/// Statistics that are folded at this interval or less often, s, disturb no thread.
const SELDOM: u64 = 10;

/// CPUs of a tenant's vCPUs, or of an RT container's threads, if each is pinned to some of the host's CPUs.
pub(super) fn pinned(inventory: &Inventory, tenant: &Tenant) -> CpuSet {
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

/// CPUs to which RT tenants are pinned, or that the configuration gives them.
pub(super) fn rt_cpus(inventory: &Inventory, intent: &Intent) -> CpuSet {
    let of_tenants = intent.rt_tenants().flat_map(|tenant| pinned(inventory, tenant).iter().collect::<Vec<_>>());
    let polling = inventory.nics.iter().filter_map(|nic| intent.config_of(nic)?.poll_cpu);
    of_tenants.chain(polling).chain(intent.exclusive_cpu).collect()
}

/// CPUs that are kept free, compared with the CPUs of RT tenants.
pub(super) fn isolation(inventory: &Inventory, intent: &Intent) -> Check {
    let (id, title) = (
        "isolation",
        "CPUs kept free (isolcpus, cpuset partitions, nohz_full) against those of RT \
        tenants",
    );
    let cpus = &inventory.cpus;
    let rt = rt_cpus(inventory, intent);
    let without = |all: &CpuSet, other: &CpuSet| all.iter().filter(|cpu| !other.contains(*cpu)).collect::<CpuSet>();
    let calling = without(&rt, &cpus.rcu_nocbs);
    let some_call = !cpus.rcu_nocbs.is_empty() && !calling.is_empty();
    let kept: CpuSet = cpus.isolated.iter().chain(cpus.nohz_full.iter()).collect();
    let at_stake = intent.rt_tenants().next().is_some();
    if kept.is_empty() && !(some_call && at_stake) {
        return Check::new(id, title, State::Ok, "no CPU is kept free");
    }
    if !at_stake {
        return Check::new(id, title, State::Ok, format!("CPUs {kept} are kept free; there is no RT tenant"));
    }
    let mut found = Vec::new();
    let mut remedies = Vec::new();
    let polled: CpuSet = inventory.pollers.iter().flat_map(|(_, cpus)| cpus.iter()).collect();
    let unused = without(&without(&kept, &rt), &polled);
    if !unused.is_empty() {
        found.push(format!("no RT tenant is kept to CPUs {unused}, which are kept free: nothing else runs there"));
        remedies.push(format!(
            "pin RT vCPUs there (libvirt: <vcpupin>), or take {unused} out of isolcpus and \
            nohz_full"
        ));
    }
    let open = without(&rt, &cpus.isolated);
    if !open.is_empty() && !kept.is_empty() {
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
    } else if some_call {
        found.push(format!(
            "CPUs {calling} of RT tenants run RCU callbacks, others (rcu_nocbs {}) have theirs run elsewhere",
            cpus.rcu_nocbs
        ));
        remedies.push(format!("boot with rcu_nocbs={rt}"));
    }
    if found.is_empty() {
        return Check::new(id, title, State::Ok, format!("RT tenants are kept to CPUs {rt}, which are kept free"));
    }
    Check::new(id, title, State::Warning, found.join("; "))
        .costs(
            50,
            "bulk threads, ticks and RCU callbacks on an RT tenant's CPU, or a CPU without work; not measured",
            "",
        )
        .remedy(remedies.join("; "))
}

/// The kernel's periodic work on every CPU.
pub(super) fn periodic(inventory: &Inventory) -> Check {
    let (id, title) = ("periodic-work", "the kernel's periodic work on every CPU");
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
        .costs(5, "some microseconds each time; not measured", "")
        .remedy(remedies.join(", "))
}

pub(super) fn swap(inventory: &Inventory, intent: &Intent) -> Check {
    let (id, title) = ("swap", "guests' memory is not swapped out");
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
        "there is a swap area: memory of an RT tenant that is not locked may be \
        written to it",
    )
    .costs(10_000, "a vCPU that touches such a page waits for the disk", "")
    .remedy(
        "lock RT VMs' memory (libvirt: <memoryBacking> with <locked/> or <hugepages/>), for containers \
            memory.swap.max=0; or swapoff -a",
    )
}
