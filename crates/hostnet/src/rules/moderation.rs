//! Interrupt moderation of RT NICs: a packet's interrupt is not delayed.

use ontime_tenants::Class;

use crate::intent::Intent;
use crate::inventory::{Inventory, Nic};
use crate::knob::{Knob, Moderation, Value};
use crate::rule::{Finding, Outcome, Refusal, RuleId, Setting, Severity, Stage};

/// Drivers that only write the new interval to the NIC (their `*_set_coalesce`). Others may stop their queues for it.
const LIVE_SAFE: [&str; 6] = ["e1000e", "i40e", "ice", "igb", "igc", "virtio_net"];

/// A driver whose NIC may not use the set interval. With MSI-X, the result of its adaptive mode is written to the NIC
/// at the next interrupt of the receive queue, even if another interval was set meanwhile (`e1000_set_itr` and
/// `e1000_intr_msix_rx` in netdev.c). The latest such interrupt is the watchdog's, every 2 s. The result is written
/// again whenever the link is set up (`e1000_configure_msix`). The driver still reports the set interval.
const FORGETS: &str = "e1000e";

/// The rule [`RuleId::Moderation`].
pub(super) fn moderation(inventory: &Inventory, intent: &Intent) -> Outcome {
    let mut outcome = Outcome::default();
    for nic in inventory.nics.iter().filter(|nic| nic.physical && intent.nic_class(inventory, nic) != Class::Bulk) {
        let Some(found) = nic.moderation else { continue };
        let wanted = Moderation { rx_usecs: 0, adaptive: found.adaptive.map(|_| false) };
        if nic.driver.as_deref().is_some_and(|driver| LIVE_SAFE.contains(&driver)) {
            let knob = Knob::Moderation { nic: nic.id.clone() };
            let setting = Setting::new(RuleId::Moderation, Stage::Steer, knob, Value::Moderation(wanted));
            outcome.settings.push(Setting { needs_second_write: nic.driver.as_deref() == Some(FORGETS), ..setting });
        } else if found != wanted {
            outcome.findings.push(held_back(nic, found));
        }
    }
    outcome
}

fn held_back(nic: &Nic, found: Moderation) -> Finding {
    let driver = nic.driver.as_deref().unwrap_or("unknown");
    let adaptive = if found.adaptive == Some(true) { "adaptive-rx off " } else { "" };
    Finding {
        rule: RuleId::Moderation,
        severity: Severity::Warning,
        object: nic.id.name.clone(),
        found: format!(
            "receive interrupts are held back ({found}), and driver {driver} may stop its queues to change that"
        ),
        remedy: format!("run while it is idle: ethtool -C {} {adaptive}rx-usecs 0", nic.id.name),
        refusal: Some(Refusal::NotLiveSafe),
    }
}
