//! Keeps RT containers' veth pairs off the per-CPU backlog, which all tenants share.
//!
//! A packet is received by the other end's NAPI if the receiving end has GRO on and the sending end has TSO off
//! (`drivers/net/veth.c`, `veth_skb_is_eligible_for_gro`). Otherwise it waits in the backlog (`__netif_rx`). For both
//! directions, both ends need both settings, and the far end is in the container's namespace.

use std::collections::BTreeSet;

use ontime_tenants::Role;

use super::threads::NAPI_LISTED;
use crate::intent::Intent;
use crate::inventory::{Inventory, Nic};
use crate::knob::{Knob, Value};
use crate::rule::{Finding, Outcome, RuleId, Setting, Severity, Stage};

/// The first version in which GRO gives a veth NAPI.
const NAPI_BY_GRO: (u32, u32) = (5, 13);
/// All kinds of TSO of a veth (NETIF_F_ALL_TSO), then [`MERGING`].
const FEATURES: [(&str, &str); 6] = [
    ("tx-tcp-segmentation", "off"),
    ("tx-tcp-ecn-segmentation", "off"),
    ("tx-tcp-mangleid-segmentation", "off"),
    ("tx-tcp6-segmentation", "off"),
    // Only in newer kernels.
    ("tx-tcp-accecn-segmentation", "off"),
    (MERGING, "on"),
];
/// The feature that creates the NAPI instances.
const MERGING: &str = "rx-gro";

/// The knob that creates this NIC's NAPI instances, if it is a veth. Without it, settings of its NAPI cannot be
/// restored.
pub(super) fn napi_maker(nic: &Nic) -> Option<Knob> {
    let feature = MERGING.to_owned();
    (nic.kind.as_deref() == Some("veth")).then(|| Knob::Feature { nic: nic.id.clone(), feature })
}

/// The rule [`RuleId::Veth`].
pub(super) fn veth(inventory: &Inventory, intent: &Intent) -> Outcome {
    let mut outcome = Outcome::default();
    if inventory.kernel.version < NAPI_BY_GRO {
        return outcome;
    }
    // A pod's containers have one pair.
    let mut told = BTreeSet::new();
    for tenant in intent.rt_tenants() {
        let nics = tenant.vnics.iter().filter_map(|vnic| inventory.nic(&vnic.ifname));
        for nic in nics.filter(|nic| nic.kind.as_deref() == Some("veth")) {
            if told.insert(nic.id.ifindex) {
                outcome.findings.extend(threads_to_come(inventory, intent, nic));
            }
            // The next pass threads and places new NAPI instances.
            let mut set = |knob, value: &str| {
                outcome.settings.push(Setting::new(RuleId::Veth, Stage::Thread, knob, Value::Text(value.to_owned())));
            };
            for (feature, value) in FEATURES {
                set(Knob::Feature { nic: nic.id.clone(), feature: feature.to_owned() }, value);
            }
            let Some(peer) = nic.peer else { continue };
            for (feature, value) in FEATURES {
                let (nic, process) = (nic.id.clone(), tenant.process);
                set(Knob::PeerFeature { nic, process, peer, feature: feature.to_owned() }, value);
            }
        }
    }
    outcome
}

/// Tells the place of the threads of the NAPI instances that GRO will give a veth: the kernel has none to list yet. Of
/// kernels that list none at all, rule [`RuleId::NapiThreaded`] tells.
fn threads_to_come(inventory: &Inventory, intent: &Intent, nic: &Nic) -> Option<Finding> {
    let is_placed = intent.has(RuleId::NapiThreaded) && intent.has(RuleId::NapiThread);
    let to_come = nic.napis.is_empty() && inventory.kernel.version >= NAPI_LISTED;
    (is_placed && to_come).then(|| Finding {
        rule: RuleId::Veth,
        severity: Severity::Info,
        object: nic.id.name.clone(),
        found: format!(
            "GRO gives it NAPI instances; their threads get {} once made (napi-threaded, napi-thread)",
            intent.table.policy(intent.nic_class(inventory, nic), Role::Napi)
        ),
        remedy: "nothing; Ontime makes and places them once the interface is up with GRO on".to_owned(),
        refusal: None,
    })
}
