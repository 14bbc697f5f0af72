//! Which tenants send by a NIC, and how their packets are recognised on egress.

use ontime_tenants::{Class, Tenant};

use crate::intent::Intent;
use crate::inventory::{Inventory, Nic};
use crate::knob::{Knob, SteerFrom, Value};
use crate::method::Method;
use crate::rule::{RuleId, Setting, Stage};

/// Whether method `vatc` sends RT and bulk packets through one queue, because the NIC has only one.
pub(super) fn is_shared(inventory: &Inventory, intent: &Intent, nic: &Nic) -> bool {
    let users: Vec<&Tenant> = intent.users(inventory, nic).collect();
    intent.method == Method::Vatc && nic.physical && nic.tx_queues.len() < 2 && are_mixed(&users)
}

pub(super) fn are_mixed(users: &[&Tenant]) -> bool {
    let is_bulk = |tenant: &&Tenant| tenant.class == Class::Bulk;
    users.iter().any(is_bulk) && !users.iter().all(is_bulk)
}

/// The settings for these filters, with clsact before them; empty if there are no filters. If an `ingress` qdisc is in
/// clsact's place, egress filters would become ingress filters (`net/sched/sch_ingress.c`, `ingress_tcf_block`).
pub(super) fn filters(rule: RuleId, nic: &Nic, knobs: impl Iterator<Item = Knob>) -> Vec<Setting> {
    let present = |knob| Setting::new(rule, Stage::Steer, knob, Value::Present(true));
    let clsact = Knob::Clsact { nic: nic.id.clone() };
    let filters: Vec<Setting> = knobs.map(|knob| Setting { needs: vec![clsact.clone()], ..present(knob) }).collect();
    let first = (!filters.is_empty()).then(|| present(clsact));
    first.into_iter().chain(filters).collect()
}

/// The criteria by which packets of RT tenants are recognised on egress.
pub(super) fn sources<'a>(inventory: &'a Inventory, users: &'a [&Tenant]) -> impl Iterator<Item = SteerFrom> + 'a {
    let rt = users.iter().filter(|tenant| tenant.class != Class::Bulk);
    let attached = rt.clone().flat_map(|tenant| &tenant.attached).filter_map(|own| own.mac.map(SteerFrom::SourceMac));
    let vnics = rt.flat_map(|tenant| &tenant.vnics).filter_map(|vnic| inventory.nic(&vnic.ifname));
    let vnics = vnics.filter_map(|vnic| match vnic.kind.as_deref() {
        // These interfaces pass packets to the lower device directly, so there is no ingress interface to match.
        Some("macvtap" | "macvlan" | "ipvlan" | "ipvtap") => vnic.mac.map(SteerFrom::SourceMac),
        _ => Some(SteerFrom::Interface(vnic.id.clone())),
    });
    vnics.chain(attached)
}
