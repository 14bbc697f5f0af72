//! Whether libvirt or Ontime sets a thread's policy, and which policy Ontime sets. Pure.
//!
//! `vcpupin`, `vcpusched`, `emulatorpin` and similar settings belong to libvirt: Ontime does not override them and at
//! most reports a conflict. vhost and kvm-pit threads, for which libvirt has no settings, belong to Ontime.

use serde::{Deserialize, Serialize};

use crate::class::{Class, Level, Policy, PriorityTable, Role};
use crate::model::{Tenant, TenantThread, ThreadRole};

/// The program that sets a thread's policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Owner {
    /// libvirt sets it: the domain's `<cputune>` has a policy for the thread.
    Libvirt,
    /// Ontime sets it, by the priority table.
    Ontime,
    /// The thread's own program sets it: Ontime has no place for the thread.
    Itself,
}

/// Which program sets a thread's policy.
pub fn owner(tenant: &Tenant, thread: &TenantThread) -> Owner {
    if thread.libvirt.sched.is_some() {
        Owner::Libvirt
    } else if role_of(tenant, thread).is_some() {
        Owner::Ontime
    } else {
        Owner::Itself
    }
}

/// The policy that Ontime sets for the thread. `None`: Ontime does not change it.
///
/// Ontime does not change bulk tenants: a bulk thread at a real-time priority is reported, not demoted. It does not
/// change iothreads of RT VMs either: they serve block devices, off the request's path. The monitor's main thread
/// serves management requests. Meanwhile it holds a lock that a vCPU needs when it exits to a device that the monitor
/// emulates, and QEMU's lock has no priority inheritance; so the main thread gets a real-time priority.
///
/// A container's thread is treated like a VM's vCPU. If its program set a real-time policy or SCHED_IDLE, it keeps
/// that: the program's author knew the threads' order. A thread at one of the table's own vCPU priorities counts as
/// placed by Ontime, so a changed level moves it.
pub fn wanted(tenant: &Tenant, thread: &TenantThread, table: &PriorityTable) -> Option<Policy> {
    if thread.libvirt.sched.is_some() {
        return None;
    }
    let role = role_of(tenant, thread)?;
    if thread.role == ThreadRole::Container && chose_its_own(thread.policy, *table) {
        return None;
    }
    Some(table.policy(tenant.class, role))
}

/// The thread's role in the priority table, if any.
fn role_of(tenant: &Tenant, thread: &TenantThread) -> Option<Role> {
    if tenant.class == Class::Bulk {
        return None;
    }
    match thread.role {
        ThreadRole::Vcpu(_) | ThreadRole::Container => Some(Role::VcpuPlanned),
        // kvm-pit raises the guest's timer interrupt. Like vhost it works for a vCPU that may be spinning on the same
        // CPU, so it must preempt the vCPU. It is not a NIC interrupt, so it stays below those.
        ThreadRole::Vhost | ThreadRole::KvmPit => Some(Role::Vnic),
        ThreadRole::Emulator if thread.id.tid == thread.id.pid => Some(Role::Vmm),
        // Device processes set the priority of sockets.toml themselves.
        ThreadRole::Iothread | ThreadRole::Emulator | ThreadRole::Device => None,
    }
}

fn chose_its_own(policy: Policy, table: PriorityTable) -> bool {
    match policy {
        Policy::Fifo(_) => !is_vcpu_place(policy, table),
        Policy::Rr(_) | Policy::Deadline { .. } | Policy::Idle => true,
        Policy::Other { .. } | Policy::Batch { .. } | Policy::Ext { .. } => false,
    }
}

fn is_vcpu_place(policy: Policy, table: PriorityTable) -> bool {
    let mut levels = (0..=Level::MAX).filter_map(|level| Level::try_from(level).ok()).map(Class::Rt);
    levels.any(|class| [Role::VcpuPlanned, Role::VcpuEntitled].iter().any(|role| table.policy(class, *role) == policy))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{tenant, thread};

    fn rt(level: u8) -> Class {
        Class::Rt(Level::try_from(level).unwrap())
    }

    #[test]
    fn the_table_places_vcpus_vhost_the_pit_and_the_main_thread_and_nothing_else() {
        let table = PriorityTable::default();
        let vm = tenant("rt1", rt(1));
        for (role, policy) in [
            (ThreadRole::Vcpu(0), Some(Policy::Fifo(42))),
            (ThreadRole::Vhost, Some(Policy::Fifo(43))),
            (ThreadRole::KvmPit, Some(Policy::Fifo(43))),
            (ThreadRole::Iothread, None),
            (ThreadRole::Device, None),
            (ThreadRole::Emulator, None),
            (ThreadRole::Container, Some(Policy::Fifo(42))),
        ] {
            assert_eq!(wanted(&vm, &thread(role, Policy::BULK), &table), policy, "{role:?}");
        }
        let mut main = thread(ThreadRole::Emulator, Policy::BULK);
        main.id.tid = main.id.pid;
        assert_eq!(wanted(&vm, &main, &table), Some(Policy::Fifo(3)));
        assert_eq!(wanted(&tenant("bulk", Class::Bulk), &main, &table), None);
        main.libvirt.sched = Some(Policy::Fifo(1));
        assert_eq!((owner(&vm, &main), wanted(&vm, &main, &table)), (Owner::Libvirt, None));
    }

    #[test]
    fn bulk_is_left_alone() {
        let vm = tenant("bulk", Class::Bulk);
        for policy in [Policy::BULK, Policy::Fifo(50), Policy::Idle] {
            let vcpu = thread(ThreadRole::Vcpu(0), policy);
            assert_eq!(wanted(&vm, &vcpu, &PriorityTable::default()), None);
            assert_eq!(owner(&vm, &vcpu), Owner::Itself);
        }
    }

    #[test]
    fn what_libvirt_was_told_stays_libvirts() {
        let vm = tenant("rt1", rt(0));
        let mut vcpu = thread(ThreadRole::Vcpu(0), Policy::BULK);
        assert_eq!(owner(&vm, &vcpu), Owner::Ontime);
        vcpu.libvirt.sched = Some(Policy::Fifo(1));
        assert_eq!(owner(&vm, &vcpu), Owner::Libvirt);
        assert_eq!(wanted(&vm, &vcpu, &PriorityTable::default()), None);
        vcpu.libvirt.sched = None;
        vcpu.libvirt.cpus = Some("1".to_owned());
        assert_eq!(
            wanted(&vm, &vcpu, &PriorityTable::default()),
            Some(Policy::Fifo(47)),
            "a pin says nothing of policy"
        );
    }

    #[test]
    fn a_containers_own_real_time_policies_stay() {
        let table = PriorityTable::default();
        let container = tenant("plc", rt(0));
        for (found, policy) in [
            (Policy::Batch { nice: 0 }, Some(Policy::Fifo(47))),
            (Policy::Fifo(47), Some(Policy::Fifo(47))),
            (Policy::Fifo(42), Some(Policy::Fifo(47))),
            (Policy::Fifo(80), None),
            (Policy::Rr(47), None),
            (Policy::Idle, None),
        ] {
            assert_eq!(wanted(&container, &thread(ThreadRole::Container, found), &table), policy, "{found}");
        }
    }
}
