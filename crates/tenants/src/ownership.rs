//! Who decides about a thread, libvirt or Ontime, and what Ontime wants of it. Pure.
//!
//! `vcpupin`, `vcpusched`, `emulatorpin` and their kin stay libvirt's: where the domain says something, Ontime keeps
//! its hands off and at most reports a conflict. vhost and kvm-pit threads, for which libvirt has no words, are
//! Ontime's.

use serde::{Deserialize, Serialize};

use crate::class::{Class, Level, Policy, PriorityTable, Role};
use crate::model::{Tenant, TenantThread, ThreadRole};

/// Who decides about a thread's policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Owner {
    /// libvirt, because the domain's `<cputune>` says something about it.
    Libvirt,
    /// Ontime, by the priority table.
    Ontime,
    /// Its own program: Ontime has no place for it.
    Itself,
}

/// Who decides about a thread's policy.
pub fn owner(tenant: &Tenant, thread: &TenantThread) -> Owner {
    if thread.libvirt.sched.is_some() {
        Owner::Libvirt
    } else if role_of(tenant, thread).is_some() {
        Owner::Ontime
    } else {
        Owner::Itself
    }
}

/// The policy Ontime wants the thread to have; `None` where it leaves the thread alone.
///
/// Bulk tenants are left alone whole: they keep what they have, and a bulk thread at a real-time place is reported, not
/// demoted. So are iothreads of RT VMs: they serve block devices, off the request's path. Its monitor's main thread
/// serves management, and holds meanwhile the lock that a vCPU takes which leaves its guest for a device that the
/// monitor emulates: QEMU's has no priority inheritance.
///
/// A container's thread is to it what a vCPU is to a VM. One that chose its own real-time policy keeps it: the
/// program's author knew the threads' order. A thread at one of the table's own vCPU places is taken as placed by
/// Ontime, so a changed level moves it.
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

/// The thread's place in the table, where it has one.
fn role_of(tenant: &Tenant, thread: &TenantThread) -> Option<Role> {
    if tenant.class == Class::Bulk {
        return None;
    }
    match thread.role {
        ThreadRole::Vcpu(_) | ThreadRole::Container => Some(Role::VcpuPlanned),
        // kvm-pit raises the guest's timer interrupt. Like vhost it works for a vCPU that may be spinning on the same
        // CPU, so it must come before the vCPU; it is no NIC interrupt, so it stays after those.
        ThreadRole::Vhost | ThreadRole::KvmPit => Some(Role::Vnic),
        ThreadRole::Emulator if thread.id.tid == thread.id.pid => Some(Role::Vmm),
        // Device processes take the place that sockets.toml gives them.
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
