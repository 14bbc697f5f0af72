//! Makes vhost send packets one by one on kernels where softirqs share a lock on each CPU: PREEMPT_RT before 6.18.
//!
//! A tap takes vhost's batch of up to 64 small packets in one section between `local_bh_disable` and `local_bh_enable`,
//! and sends each packet all the way to the NIC in it (`drivers/vhost/net.c`, `VHOST_NET_BATCH`; `drivers/net/tun.c`,
//! `tun_sendmsg`). In this section it holds the lock that rule `napi_weight` is about. vhost uses batches only while
//! the send buffer has no limit (`handle_tx_copy`, `sock_can_batch`), so the highest possible limit ends batches
//! without delaying any packet.

use ontime_tenants::{Tenant, ThreadRole};

use super::napi_weight::{most_urgent, softirqs_share_a_lock};
use crate::intent::Intent;
use crate::inventory::{Inventory, Nic};
use crate::knob::{Knob, Value};
use crate::rule::{Outcome, RuleId, Setting, Stage};

/// The rule [`RuleId::TapBatch`].
pub(super) fn tap_batch(inventory: &Inventory, intent: &Intent) -> Outcome {
    let mut outcome = Outcome::default();
    let Some(urgent) = most_urgent(inventory, intent).filter(|_| softirqs_share_a_lock(inventory)) else {
        return outcome;
    };
    let waited_for = |tenant: &&Tenant| tenant.class > urgent && by_vhost(tenant);
    for tenant in intent.tenants.iter().filter(waited_for) {
        let one_by_one = taps(inventory, tenant).map(|tap| {
            let knob = Knob::TapBatch { nic: tap.id.clone(), process: tenant.process };
            Setting::new(RuleId::TapBatch, Stage::Host, knob, Value::Present(false))
        });
        outcome.settings.extend(one_by_one);
    }
    outcome
}

/// The tenant's taps. A macvtap's driver disables softirqs for one packet at a time, so its batches delay nothing
/// (`drivers/net/tap.c`).
fn taps<'a>(inventory: &'a Inventory, tenant: &'a Tenant) -> impl Iterator<Item = &'a Nic> {
    let own = tenant.vnics.iter().filter_map(|vnic| inventory.nic(&vnic.ifname));
    own.filter(|nic| nic.kind.as_deref() == Some("tun"))
}

fn by_vhost(tenant: &Tenant) -> bool {
    tenant.threads.iter().any(|thread| thread.role == ThreadRole::Vhost)
}
