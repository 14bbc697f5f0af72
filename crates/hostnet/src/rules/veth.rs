//! RT containers' veth pairs off the per-CPU backlog, which everyone shares.
//!
//! What one end sends is received by the other's NAPI where the receiver has GRO on and the sender no TSO
//! (`drivers/net/veth.c`, `veth_skb_is_eligible_for_gro`); else it waits in the backlog (`__netif_rx`). Both directions
//! take both ends, and the far one is in the container's namespace.

use crate::intent::Intent;
use crate::inventory::{Inventory, Nic};
use crate::knob::{Knob, Value};
use crate::rule::{Outcome, RuleId, Setting, Stage};

/// From here on GRO gives a veth NAPI.
const NAPI_BY_GRO: (u32, u32) = (5, 13);
/// Every kind of TSO that veth has (NETIF_F_ALL_TSO), then [`MERGING`].
const FEATURES: [(&str, &str); 6] = [
    ("tx-tcp-segmentation", "off"),
    ("tx-tcp-ecn-segmentation", "off"),
    ("tx-tcp-mangleid-segmentation", "off"),
    ("tx-tcp6-segmentation", "off"),
    // Of newer kernels.
    ("tx-tcp-accecn-segmentation", "off"),
    (MERGING, "on"),
];
/// What makes the NAPI.
const MERGING: &str = "rx-gro";

/// What gives this NIC its NAPI, where it is a veth: what is set of its NAPI cannot be given back without.
pub fn napi_maker(nic: &Nic) -> Option<Knob> {
    let feature = MERGING.to_owned();
    (nic.kind.as_deref() == Some("veth")).then(|| Knob::Feature { nic: nic.id.clone(), feature })
}

/// See [`RuleId::Veth`].
pub fn veth(inventory: &Inventory, intent: &Intent) -> Outcome {
    let mut outcome = Outcome::default();
    if inventory.kernel.version < NAPI_BY_GRO {
        return outcome;
    }
    for tenant in intent.rt_tenants() {
        let nics = tenant.vnics.iter().filter_map(|vnic| inventory.nic(&vnic.ifname));
        for nic in nics.filter(|nic| nic.kind.as_deref() == Some("veth")) {
            // A NAPI that appears is threaded and placed by the pass that follows.
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
