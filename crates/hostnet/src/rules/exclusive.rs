//! Reserves one CPU for the RT group (Access'18, section II-D).

use std::collections::BTreeSet;

use ontime_tenants::{Class, Tenant, TenantThread, ThreadRole};

use crate::cpus::CpuSet;
use crate::intent::Intent;
use crate::inventory::Inventory;
use crate::knob::{Knob, Root, Value};
use crate::rule::{Finding, Outcome, RuleId, Setting, Severity, Stage};

/// The rule [`RuleId::ExclusiveCpu`].
pub(super) fn exclusive_cpu(inventory: &Inventory, intent: &Intent) -> Outcome {
    let mut outcome = Outcome::default();
    let online = &inventory.cpus.online;
    let cpu = match intent.exclusive_cpu {
        Some(cpu) if online.contains(cpu) && online.len() > 1 => cpu,
        other => {
            outcome.findings.push(no_cpu(other, online));
            return outcome;
        }
    };
    let rest = online.without(cpu);
    let rt_irqs: BTreeSet<u32> = inventory
        .nics
        .iter()
        .flat_map(|nic| nic.irqs.iter().map(move |irq| (nic, *irq)))
        .filter(|(nic, irq)| intent.irq_class(inventory, nic, *irq) != Class::Bulk)
        .map(|(_, irq)| irq)
        .collect();
    for irq in inventory.irqs.iter().filter(|irq| irq.settable) {
        let only = CpuSet::from_iter([cpu]);
        let cpus = if rt_irqs.contains(&irq.id.irq) { only } else { elsewhere(&irq.affinity, cpu, &rest) };
        outcome.settings.push(setting(Knob::IrqAffinity { irq: irq.id.clone() }, cpus));
    }
    // For interrupts that are set up later.
    let default = Knob::HostCpus { root: Root::Proc, path: "irq/default_smp_affinity".to_owned() };
    outcome.settings.push(setting(default, rest.clone()));
    for tenant in &intent.tenants {
        for thread in &tenant.threads {
            place(tenant, thread, cpu, &rest, &mut outcome);
        }
    }
    outcome
}

fn place(tenant: &Tenant, thread: &TenantThread, cpu: u32, rest: &CpuSet, outcome: &mut Outcome) {
    let of_rt_group = tenant.class != Class::Bulk
        && matches!(thread.role, ThreadRole::Vcpu(_) | ThreadRole::Vhost | ThreadRole::Container);
    // libvirt's pinning stays. If it contradicts the method, a finding reports that.
    if thread.libvirt.cpus.is_some() {
        let pinned = CpuSet::from_list(&thread.affinity).unwrap_or_default();
        if pinned.contains(cpu) != of_rt_group || (of_rt_group && pinned.len() > 1) {
            outcome.findings.push(pinned_by_libvirt(tenant, thread, cpu, of_rt_group));
        }
        return;
    }
    let knob = Knob::ThreadAffinity { thread: thread.id, comm: thread.comm.clone() };
    if of_rt_group {
        outcome.settings.push(setting(knob, CpuSet::from_iter([cpu])));
    } else if let Ok(affinity) = CpuSet::from_list(&thread.affinity) {
        outcome.settings.push(setting(knob, elsewhere(&affinity, cpu, rest)));
    }
}

/// The CPUs for a thread or interrupt that must leave the RT CPU: its present CPUs without that one, or all others.
fn elsewhere(affinity: &CpuSet, cpu: u32, rest: &CpuSet) -> CpuSet {
    let left = affinity.without(cpu).intersection(rest);
    if left.is_empty() { rest.clone() } else { left }
}

fn setting(knob: Knob, cpus: CpuSet) -> Setting {
    Setting::new(RuleId::ExclusiveCpu, Stage::Affinity, knob, Value::Cpus(cpus))
}

fn no_cpu(asked: Option<u32>, online: &CpuSet) -> Finding {
    let found = match asked {
        None => "no CPU is named for the RT group".to_owned(),
        Some(cpu) if !online.contains(cpu) => format!("CPU {cpu} is not online (online: {online})"),
        Some(_) => "the host has one CPU, which cannot be kept for the RT group alone".to_owned(),
    };
    Finding {
        rule: RuleId::ExclusiveCpu,
        severity: Severity::Critical,
        object: "exclusive_cpu".to_owned(),
        found,
        remedy: "set exclusive_cpu in /etc/ontime/host.toml to an online CPU of a host with at least two".to_owned(),
        refusal: None,
    }
}

fn pinned_by_libvirt(tenant: &Tenant, thread: &TenantThread, cpu: u32, of_rt_group: bool) -> Finding {
    let where_to = if of_rt_group { format!("on CPU {cpu} alone") } else { format!("off CPU {cpu}") };
    Finding {
        rule: RuleId::ExclusiveCpu,
        severity: Severity::Warning,
        object: format!("{} ({})", tenant.name, thread.comm),
        found: format!("libvirt pins it to CPUs {}", thread.affinity),
        remedy: format!("pin it {where_to} in the domain's <cputune>, or remove the pinning there"),
        refusal: None,
    }
}
