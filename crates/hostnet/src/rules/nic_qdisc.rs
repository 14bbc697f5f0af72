//! The methods with which VATC (sections II and IV) compares itself: Linux's traffic control on the NIC and on the VMs'
//! taps, with vhost threads unchanged.

use std::collections::BTreeSet;

use ontime_tenants::Tenant;

use super::senders::{filters, sources};
use crate::intent::Intent;
use crate::inventory::{Inventory, Nic};
use crate::knob::{Knob, Value};
use crate::method::Method;
use crate::rule::{Finding, Outcome, Refusal, RuleId, Setting, Severity, Stage};

/// The rule [`RuleId::NicQdisc`].
pub(super) fn nic_qdisc(inventory: &Inventory, intent: &Intent) -> Outcome {
    let mut outcome = Outcome::default();
    let kind = match intent.method {
        Method::Prio => "prio",
        Method::FqCodel => "fq_codel",
        _ => return outcome,
    };
    let taps: BTreeSet<&str> =
        intent.tenants.iter().flat_map(|tenant| &tenant.vnics).map(|vnic| vnic.ifname.as_str()).collect();
    for nic in &inventory.nics {
        let users: Vec<&Tenant> = intent.users(inventory, nic).collect();
        let is_tap = nic.kind.as_deref() == Some("tun") && taps.contains(nic.id.name.as_str());
        if users.is_empty() || !(nic.physical || is_tap) {
            continue;
        }
        if let Some(theirs) = &nic.qdisc_by_others {
            outcome.findings.push(kept(RuleId::NicQdisc, nic, theirs));
            continue;
        }
        let root = Knob::RootQdisc { nic: nic.id.clone() };
        outcome.settings.push(Setting::new(RuleId::NicQdisc, Stage::Steer, root, Value::Text(kind.to_owned())));
        if nic.physical && intent.method == Method::Prio {
            // RT tenants' packets go to the first band; the paper classifies high-priority domains' packets in the same
            // way.
            let first_band = sources(inventory, &users).map(|from| Knob::TxPriority { nic: nic.id.clone(), from });
            outcome.settings.extend(filters(RuleId::NicQdisc, nic, first_band));
        }
    }
    outcome
}

/// The finding for a root qdisc that stays, because the administrator or another program has set it.
pub(super) fn kept(rule: RuleId, nic: &Nic, theirs: &str) -> Finding {
    Finding {
        rule,
        severity: Severity::Warning,
        object: nic.id.name.clone(),
        found: format!(
            "its root qdisc {theirs} was set by the administrator or another program, and a reset could not restore it"
        ),
        remedy: format!("if it may go, run: tc qdisc del dev {} root, which drops what waits in it", nic.id.name),
        refusal: Some(Refusal::NotLiveSafe),
    }
}
