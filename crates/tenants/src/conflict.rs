//! Settings by libvirt, an administrator or a program that conflict with the priority table. Pure.
//!
//! Input: tenants with their threads. Output: [`Conflict`]s with remedies. Ontime reports conflicts and changes
//! nothing.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::class::{Class, Policy, PriorityTable, Role};
use crate::cpus::CpuSet;
use crate::model::{Tenant, TenantThread, ThreadRole};
use crate::ownership;

/// A conflict with the priority table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Conflict {
    /// A thread's priority is not below that of threads that must be able to preempt it.
    AbovePath {
        /// The thread's name.
        thread: String,
        /// Its present policy and priority.
        policy: Policy,
        /// The policy of virtual NIC threads for its class (for bulk: of level 0).
        limit: Policy,
        /// Whether libvirt's configuration requests the policy.
        by_libvirt: bool,
    },
    /// The priority of an RT tenant's vCPU is not above the kernel's RCU and timer threads.
    BelowKernel {
        /// The thread's name.
        thread: String,
        /// Its present policy and priority.
        policy: Policy,
    },
    /// A bulk tenant's thread has a real-time policy.
    BulkAtRealTime {
        /// The thread's name.
        thread: String,
        /// Its present policy and priority.
        policy: Policy,
    },
    /// vhost and vCPU threads of an RT tenant have no CPU in common.
    VhostApart {
        /// The vhost thread's name.
        vhost: String,
        /// The vhost thread's CPUs.
        vhost_cpus: String,
        /// The vCPUs' CPUs.
        vcpu_cpus: String,
    },
    /// vCPUs of RT tenants of one level are pinned to the same single CPU: neither preempts the other.
    SharedCpu {
        /// The only CPU of both.
        cpu: u32,
        /// The other tenant.
        other: String,
    },
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Conflict::AbovePath { thread, policy, limit, .. } => write!(
                f,
                "thread `{thread}` runs at {policy}, at or above the place of vhost threads ({limit}): while it runs, \
                 no packet reaches it or any other thread on its CPU"
            ),
            Conflict::BelowKernel { thread, policy } => write!(
                f,
                "RT thread `{thread}` runs at {policy}, not above the kernel's rcuc threads ({}): they delay it",
                PriorityTable::RCUC
            ),
            Conflict::BulkAtRealTime { thread, policy } => {
                write!(f, "bulk thread `{thread}` runs at {policy}: RT tenants may wait behind it")
            }
            Conflict::VhostApart { vhost, vhost_cpus, vcpu_cpus } => write!(
                f,
                "`{vhost}` may run on CPUs {vhost_cpus}, its vCPUs on {vcpu_cpus}: every packet crosses CPUs and waits \
                 for what runs there"
            ),
            Conflict::SharedCpu { cpu, other } => {
                write!(f, "its vCPU and one of `{other}` are both pinned to CPU {cpu} alone, at the same priority")
            }
        }
    }
}

impl Conflict {
    /// What the administrator can do about it.
    pub fn remedy(&self) -> &'static str {
        match self {
            Conflict::AbovePath { by_libvirt: true, .. } => {
                "remove <vcpusched> (<iothreadsched>, <emulatorsched>) from the domain, or give it a priority below \
                 the vhost place; Ontime then places the vCPUs"
            }
            Conflict::AbovePath { by_libvirt: false, .. } => {
                "give the thread a lower priority (chrt -f -p PRIO TID; a device process: `priority` in sockets.toml), \
                 or raise `priorities.base` in tenants.toml"
            }
            Conflict::BelowKernel { .. } => "remove <vcpusched> from the domain, so that Ontime places its vCPUs",
            Conflict::BulkAtRealTime { .. } => {
                "give the tenant class rt, or remove its real-time policy (<vcpusched>, chrt -o -p 0 TID; a device \
                 process: LimitRTPRIO=0 in its unit)"
            }
            Conflict::VhostApart { .. } => {
                "let <emulatorpin>, whose CPUs vhost threads inherit, include a CPU of the vCPUs; Ontime's priorities \
                 keep the emulator from disturbing them"
            }
            Conflict::SharedCpu { .. } => "pin them apart with <vcpupin>, or give the tenants different levels",
        }
    }
}

/// The conflicts of all tenants, with the tenants' names.
pub fn conflicts(tenants: &[Tenant], table: &PriorityTable) -> Vec<(String, Conflict)> {
    let mut found = Vec::new();
    for tenant in tenants {
        let own =
            tenant.threads.iter().filter_map(|thread| of_thread(tenant, thread, table)).chain(vhost_apart(tenant));
        found.extend(own.map(|conflict| (tenant.name.clone(), conflict)));
    }
    found.extend(shared_cpus(tenants));
    found
}

fn of_thread(tenant: &Tenant, thread: &TenantThread, table: &PriorityTable) -> Option<Conflict> {
    // The requested policy counts more than the current one, because libvirt may be about to set it. A policy that
    // Ontime is about to change is no conflict.
    let policy = thread.libvirt.sched.unwrap_or(thread.policy);
    let comm = || thread.comm.clone();
    let priority = match policy {
        Policy::Fifo(priority) | Policy::Rr(priority) => priority,
        // SCHED_DEADLINE is above every FIFO thread, but the kernel admits and throttles it: only for a bulk tenant it
        // is a conflict.
        Policy::Deadline { .. } => {
            return (tenant.class == Class::Bulk).then(|| Conflict::BulkAtRealTime { thread: comm(), policy });
        }
        _ => return None,
    };
    if ownership::wanted(tenant, thread, table).is_some() {
        return None;
    }
    let class = if tenant.class == Class::Bulk { Class::Rt(crate::Level::HIGHEST) } else { tenant.class };
    let limit = table.policy(class, Role::Vnic);
    // A device process's threads correspond to vhost threads, so the same priority is allowed.
    let is_vnic = u8::from(thread.role == ThreadRole::Device);
    if matches!(limit, Policy::Fifo(limit) if priority >= limit + is_vnic) {
        return Some(Conflict::AbovePath { thread: comm(), policy, limit, by_libvirt: thread.libvirt.sched.is_some() });
    }
    // Ontime itself sets this policy; no thread on an RT path waits for it.
    if thread.role == ThreadRole::Vhost && policy == PriorityTable::SHARED_SENDER {
        return None;
    }
    if tenant.class == Class::Bulk {
        return Some(Conflict::BulkAtRealTime { thread: comm(), policy });
    }
    let below = matches!(PriorityTable::RCUC, Policy::Fifo(rcuc) if priority <= rcuc);
    (below && matches!(thread.role, ThreadRole::Vcpu(_))).then(|| Conflict::BelowKernel { thread: comm(), policy })
}

fn cpus_of(thread: &TenantThread) -> CpuSet {
    thread.affinity.parse().unwrap_or_default()
}

fn vcpus(tenant: &Tenant) -> impl Iterator<Item = &TenantThread> {
    tenant.threads.iter().filter(|thread| matches!(thread.role, ThreadRole::Vcpu(_)))
}

fn vhost_apart(tenant: &Tenant) -> Vec<Conflict> {
    let vcpu_cpus: CpuSet = vcpus(tenant).flat_map(|vcpu| cpus_of(vcpu).iter().collect::<Vec<_>>()).collect();
    // Without the CPUs of one vCPU, it is not known that the vhost threads are apart from all.
    if tenant.class == Class::Bulk || vcpu_cpus.is_empty() || vcpus(tenant).any(|vcpu| vcpu.affinity.is_empty()) {
        return Vec::new();
    }
    let vhosts = tenant.threads.iter().filter(|thread| thread.role == ThreadRole::Vhost);
    vhosts
        .filter(|vhost| !vhost.affinity.is_empty() && !cpus_of(vhost).overlaps(&vcpu_cpus))
        .map(|vhost| Conflict::VhostApart {
            vhost: vhost.comm.clone(),
            vhost_cpus: vhost.affinity.clone(),
            vcpu_cpus: vcpu_cpus.to_string(),
        })
        .collect()
}

fn shared_cpus(tenants: &[Tenant]) -> Vec<(String, Conflict)> {
    let mut taken: std::collections::BTreeMap<(Class, u32), &str> = std::collections::BTreeMap::new();
    let mut found = Vec::new();
    for tenant in tenants.iter().filter(|tenant| tenant.class != Class::Bulk) {
        for vcpu in vcpus(tenant) {
            let cpus = cpus_of(vcpu);
            let mut numbers = cpus.iter();
            let (Some(cpu), None) = (numbers.next(), numbers.next()) else { continue };
            let other = *taken.entry((tenant.class, cpu)).or_insert(&tenant.name);
            if other != tenant.name {
                found.push((tenant.name.clone(), Conflict::SharedCpu { cpu, other: other.to_owned() }));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::class::Level;
    use crate::testing::{tenant, thread};

    fn of(class: Class, threads: Vec<TenantThread>) -> Vec<Conflict> {
        let tenant = Tenant { threads, ..tenant("t", class) };
        conflicts(&[tenant], &PriorityTable::default()).into_iter().map(|(_, conflict)| conflict).collect()
    }

    fn by_libvirt(priority: u8) -> TenantThread {
        let mut vcpu = thread(ThreadRole::Vcpu(0), Policy::BULK);
        vcpu.libvirt.sched = Some(Policy::Fifo(priority));
        vcpu
    }

    fn on(role: ThreadRole, affinity: &str) -> TenantThread {
        TenantThread { affinity: affinity.to_owned(), ..thread(role, Policy::BULK) }
    }

    const RT: Class = Class::Rt(Level::HIGHEST);

    #[test]
    fn a_vcpu_that_libvirt_puts_at_the_irqs_place_is_reported() {
        for priority in [48, 50, 99] {
            let found = of(RT, vec![by_libvirt(priority)]);
            assert!(
                matches!(found.as_slice(), [Conflict::AbovePath { by_libvirt: true, .. }]),
                "{priority}: {found:?}"
            );
            assert!(found[0].remedy().contains("<vcpusched>"));
        }
        assert!(of(RT, vec![by_libvirt(47)]).is_empty());
        assert!(of(RT, vec![by_libvirt(5)]).is_empty());
        assert!(matches!(of(RT, vec![by_libvirt(1)]).as_slice(), [Conflict::BelowKernel { .. }]));
    }

    #[test]
    fn a_vcpu_that_libvirt_puts_between_the_kernels_threads_and_the_irqs_is_no_conflict() {
        for (priority, is_above, is_below) in
            [(3, false, true), (4, false, true), (9, false, false), (46, false, false), (49, true, false)]
        {
            for policy in [Policy::Fifo(priority), Policy::Rr(priority)] {
                let mut vcpu = by_libvirt(priority);
                vcpu.libvirt.sched = Some(policy);
                let found = of(RT, vec![vcpu]);
                let above = matches!(found.as_slice(), [Conflict::AbovePath { .. }]);
                let below = matches!(found.as_slice(), [Conflict::BelowKernel { .. }]);
                assert_eq!((above, below, found.is_empty()), (is_above, is_below, !is_above && !is_below), "{policy}");
            }
        }
    }

    #[test]
    fn a_vcpu_that_ontime_will_place_is_no_conflict() {
        assert!(of(RT, vec![thread(ThreadRole::Vcpu(0), Policy::Fifo(50))]).is_empty());
        assert!(of(RT, vec![thread(ThreadRole::Vcpu(0), Policy::BULK)]).is_empty());
    }

    #[test]
    fn real_time_bulk_is_reported() {
        assert!(matches!(of(Class::Bulk, vec![by_libvirt(1)]).as_slice(), [Conflict::BulkAtRealTime { .. }]));
        let fifo = thread(ThreadRole::Vcpu(0), Policy::Fifo(60));
        assert!(matches!(of(Class::Bulk, vec![fifo]).as_slice(), [Conflict::AbovePath { by_libvirt: false, .. }]));
        let deadline = thread(ThreadRole::Container, Policy::Deadline { runtime: 1, deadline: 2, period: 2 });
        assert!(matches!(of(Class::Bulk, vec![deadline]).as_slice(), [Conflict::BulkAtRealTime { .. }]));
        assert!(of(Class::Bulk, vec![thread(ThreadRole::Vcpu(0), Policy::BULK)]).is_empty());
    }

    #[test]
    fn vhost_away_from_the_vcpus_is_reported() {
        let apart = vec![on(ThreadRole::Vcpu(0), "2-3"), on(ThreadRole::Vhost, "0-1")];
        assert!(matches!(of(RT, apart.clone()).as_slice(), [Conflict::VhostApart { .. }]));
        assert!(of(Class::Bulk, apart).is_empty());
        assert!(of(RT, vec![on(ThreadRole::Vcpu(0), "2-3"), on(ThreadRole::Vhost, "1-2")]).is_empty());
        let unread = vec![on(ThreadRole::Vcpu(0), "2-3"), on(ThreadRole::Vcpu(1), ""), on(ThreadRole::Vhost, "0-1")];
        assert!(of(RT, unread).is_empty());
    }

    #[test]
    fn equals_on_one_cpu_are_reported_once() {
        let one = |name: &str, class| Tenant { threads: vec![on(ThreadRole::Vcpu(0), "3")], ..tenant(name, class) };
        let low = Class::Rt(Level::try_from(1u8).unwrap());
        let table = PriorityTable::default();
        let found = conflicts(&[one("a", RT), one("b", RT), one("c", low)], &table);
        assert_eq!(found, [("b".to_owned(), Conflict::SharedCpu { cpu: 3, other: "a".to_owned() })]);
    }
}
