//! Limits the packets per poll on kernels where softirqs share a lock on each CPU: PREEMPT_RT before 6.18.
//!
//! On these kernels, code between `local_bh_disable` and `local_bh_enable` holds one lock per CPU (`kernel/softirq.c`,
//! `softirq_ctrl.lock`). A NAPI thread holds it for a poll of up to `napi->weight` packets, 64; the per-CPU backlog for
//! up to `dev_weight` packets. User space cannot set the NAPI weight, so the rule needs the host module `ontime_napi`
//! (folder `kernel/host`), whose files are ordinary knobs.

use ontime_tenants::Class;

use super::threads::has_napi;
use crate::intent::Intent;
use crate::inventory::{Inventory, Nic};
use crate::kernel_files::{DEV_WEIGHT, WEIGHT_FILE};
use crate::knob::{Knob, Root, Value};
use crate::rule::{Finding, Outcome, Refusal, RuleId, Setting, Severity, Stage};

/// The first version in which `local_bh_disable` takes no lock on PREEMPT_RT (`PREEMPT_RT_NEEDS_BH_LOCK` off).
pub(crate) const NO_BH_LOCK: (u32, u32) = (6, 18);
/// Packets per poll. The wait is a tenth of that for 64, and no loss of small packets was measurable
/// (docs/reference/hostnet.md).
const WEIGHT: u32 = 4;
/// The first version that the module does not support: NAPI instances defer their interrupts one by one, and from 6.14
/// on `napi_list` has a lock.
pub(super) const MODULE_UNTIL: (u32, u32) = (6, 13);

/// How to install the module.
pub(super) const INSTALL: &str = "install module ontime_napi (folder kernel/host: make dkms; dkms install \
    ontime_napi/0.2.1) and load it: modprobe ontime_napi; or";

/// The rule [`RuleId::NapiWeight`].
pub(super) fn napi_weight(inventory: &Inventory, intent: &Intent) -> Outcome {
    let mut outcome = Outcome::default();
    let Some(urgent) = most_urgent(inventory, intent).filter(|_| softirqs_share_a_lock(inventory)) else {
        return outcome;
    };
    let value = Value::Text(intent.bulk_napi_weight.unwrap_or(WEIGHT).to_string());
    if inventory.sysctls.contains_key(DEV_WEIGHT) {
        let knob = Knob::HostFile { root: Root::Proc, path: format!("sys/{DEV_WEIGHT}") };
        outcome.settings.push(Setting::new(RuleId::NapiWeight, Stage::Host, knob, value.clone()));
    }
    if inventory.nics.iter().all(|nic| nic.napi_weight.is_none()) {
        outcome.findings.push(no_module(inventory));
        return outcome;
    }
    let waited_for = |nic: &&Nic| has_napi(inventory, nic) && least_urgent(inventory, intent, nic) > urgent;
    for nic in inventory.nics.iter().filter(|nic| nic.napi_weight.is_some()).filter(waited_for) {
        let knob = Knob::NicFile { nic: nic.id.clone(), path: WEIGHT_FILE.to_owned() };
        outcome.settings.push(Setting::new(RuleId::NapiWeight, Stage::Host, knob, value.clone()));
    }
    outcome
}

/// Whether, on this host, code between `local_bh_disable` and `local_bh_enable` holds one lock per CPU.
pub fn softirqs_share_a_lock(inventory: &Inventory) -> bool {
    inventory.kernel.realtime && inventory.kernel.version < NO_BH_LOCK
}

/// The highest RT level of a tenant or a NIC; none if nothing on this host is RT.
pub(super) fn most_urgent(inventory: &Inventory, intent: &Intent) -> Option<Class> {
    let tenants = intent.rt_tenants().map(|tenant| tenant.class);
    let nics = inventory.nics.iter().flat_map(|nic| classes(inventory, intent, nic));
    tenants.chain(nics).filter(|class| *class != Class::Bulk).min()
}

fn least_urgent(inventory: &Inventory, intent: &Intent, nic: &Nic) -> Class {
    classes(inventory, intent, nic).into_iter().max().unwrap_or(Class::Bulk)
}

/// Classes of the NIC's NAPI instances; the NIC's class if the kernel shows none.
fn classes(inventory: &Inventory, intent: &Intent, nic: &Nic) -> Vec<Class> {
    if nic.napis.is_empty() {
        return vec![intent.nic_class(inventory, nic)];
    }
    nic.napis.iter().map(|napi| intent.napi_class(inventory, nic, napi)).collect()
}

fn no_module(inventory: &Inventory) -> Finding {
    let kernel = &inventory.kernel;
    let module = if kernel.version < MODULE_UNTIL { INSTALL } else { "" };
    Finding {
        rule: RuleId::NapiWeight,
        severity: Severity::Warning,
        object: format!("kernel {}", kernel.release),
        found: "an RT packet waits for a bulk NIC's poll of 64 packets, and module ontime_napi is not loaded"
            .to_owned(),
        remedy: format!("{module} boot a kernel of 6.18 or later (Debian: from backports)").trim_start().to_owned(),
        refusal: Some(Refusal::Kernel),
    }
}
