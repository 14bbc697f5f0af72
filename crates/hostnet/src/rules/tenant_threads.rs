//! Threads of tenants: vCPU, vhost, kvm-pit, and a VMM's main thread. The tenants crate (`ownership`) decides their
//! policies.

use ontime_tenants::ownership::wanted;
use ontime_tenants::{Role, ThreadRole};

use crate::intent::Intent;
use crate::inventory::Inventory;
use crate::knob::{Knob, Value};
use crate::rule::{Outcome, RuleId, Setting, Stage};

/// The rule [`RuleId::VcpuPlace`].
pub(super) fn vcpu_place(_inventory: &Inventory, intent: &Intent) -> Outcome {
    places(intent, RuleId::VcpuPlace, |role| matches!(role, ThreadRole::Vcpu(_) | ThreadRole::Container))
}

/// The rule [`RuleId::VnicPlace`].
pub(super) fn vnic_place(_inventory: &Inventory, intent: &Intent) -> Outcome {
    places(intent, RuleId::VnicPlace, |role| matches!(role, ThreadRole::Vhost | ThreadRole::KvmPit))
}

/// The rule [`RuleId::VmmPlace`].
pub(super) fn vmm_place(_inventory: &Inventory, intent: &Intent) -> Outcome {
    places(intent, RuleId::VmmPlace, |role| role == ThreadRole::Emulator)
}

fn places(intent: &Intent, rule: RuleId, of_rule: impl Fn(ThreadRole) -> bool) -> Outcome {
    let mut outcome = Outcome::default();
    for tenant in &intent.tenants {
        for thread in tenant.threads.iter().filter(|thread| of_rule(thread.role)) {
            if let Some(policy) = wanted(tenant, thread, &intent.table) {
                let reserved = intent.reserved.get(&thread.id);
                let policy = match reserved {
                    Some(reserved) => *reserved,
                    None if rule == RuleId::VcpuPlace && intent.vcpus_change_places() => {
                        intent.table.policy(tenant.class, Role::VcpuEntitled)
                    }
                    None => policy,
                };
                let knob = Knob::ThreadPolicy { thread: thread.id, comm: thread.comm.clone() };
                let setting = Setting::new(rule, Stage::Place, knob, Value::Policy(policy));
                outcome.settings.push(Setting { handed_on: reserved.is_some(), ..setting });
            }
        }
    }
    outcome
}
