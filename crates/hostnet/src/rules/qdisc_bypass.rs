//! Method `vatc` on a NIC with one transmit queue that both classes use: packets bypass the qdisc, as in the paper
//! (VATC, III-B 1), if the administrator has confirmed that only VMs send through the NIC.
//!
//! The thread that runs a qdisc also sends the packets that other threads enqueue meanwhile. Since 7.2 the other
//! threads put their packets on a list (`net/core/dev.c`, `__dev_xmit_skb`, `defer_list`), without priority
//! inheritance. If a bulk thread is preempted there, an RT packet waits until no real-time thread is runnable. Without
//! a qdisc each sender takes the queue's own lock for its packet, which has priority inheritance on PREEMPT_RT.
//!
//! Then no packet waits in the host: a packet that the driver cannot take is dropped, of either class. Therefore the
//! bytes that bulk VMs have in flight are limited at their taps, and their other packets wait in the VM's ring. When
//! the NIC has completed packets, the senders' priorities decide which one sends next. BQL would stop the queue sooner,
//! so its limit is raised. Not limited are the host's own packets, and the copies of a VM's broadcasts that a bridge
//! sends, which belong to no sender. That is why the administrator must confirm.

use ontime_tenants::{Class, Tenant};

use super::senders;
use crate::intent::{Intent, attached_to, leads_to};
use crate::inventory::{Inventory, Nic};
use crate::knob::{Knob, Value};
use crate::netlink::qdisc::NONE;
use crate::rule::{Finding, Outcome, Refusal, RuleId, Setting, Severity, Stage};

/// The kernel's highest BQL limit (`include/linux/dynamic_queue_limits.h`, `DQL_MAX_LIMIT`).
const BQL_OPEN: u64 = 1_879_048_192;
/// Descriptors of a transmit ring, if the driver does not report them.
const RING: u32 = 256;
/// Minimum of bytes that a packet takes of a send buffer, whatever its size (`include/linux/skbuff.h`, `SKB_TRUESIZE`).
/// It also takes a descriptor.
const PACKET: u32 = 768;
/// Minimum of a send buffer, bytes: a full frame.
const LEAST: u32 = 4_096;

/// The rule [`RuleId::QdiscBypass`].
pub(super) fn qdisc_bypass(inventory: &Inventory, intent: &Intent) -> Outcome {
    let mut outcome = Outcome::default();
    for nic in inventory.nics.iter().filter(|nic| is_asked(inventory, intent, nic)) {
        match taps(inventory, intent, nic) {
            Ok(taps) => outcome.settings.extend(bypass(inventory, nic, &taps)),
            Err(kept) => outcome.findings.push(kept.finding(intent, nic)),
        }
    }
    outcome
}

/// Whether packets bypass this NIC's qdisc.
pub(super) fn is_possible(inventory: &Inventory, intent: &Intent, nic: &Nic) -> bool {
    intent.has(RuleId::QdiscBypass) && is_asked(inventory, intent, nic) && taps(inventory, intent, nic).is_ok()
}

fn is_asked(inventory: &Inventory, intent: &Intent, nic: &Nic) -> bool {
    let said = intent.config_of(nic).is_some_and(|config| config.qdisc_bypass);
    said && senders::is_shared(inventory, intent, nic)
}

fn bypass(inventory: &Inventory, nic: &Nic, taps: &[Knob]) -> Vec<Setting> {
    let set = |knob: Knob, text: String| Setting::new(RuleId::QdiscBypass, Stage::Steer, knob, Value::Text(text));
    // Bulk VMs share half of the ring. The other half is for RT packets and for packets without a limit.
    let packets = nic.tx_ring.unwrap_or(RING) / 2;
    // Each queue of a tap has its own buffer of that size.
    let queues =
        taps.iter().map(|tap| inventory.nic_of(tap).map_or(1, |tap| tap.tx_queues.len().max(1))).sum::<usize>();
    let each = packets.saturating_mul(PACKET) / u32::try_from(queues.max(1)).unwrap_or(u32::MAX);
    // The size also decides whether packets come in batches.
    let overwrites = |tap: &Knob| match tap {
        Knob::SendBuffer { nic, process } => vec![Knob::TapBatch { nic: nic.clone(), process: *process }],
        _ => Vec::new(),
    };
    let bounded = |tap: &Knob| Setting { overwrites: overwrites(tap), ..set(tap.clone(), each.max(LEAST).to_string()) };
    let mut settings: Vec<Setting> = taps.iter().map(bounded).collect();
    if nic.tx_queues.iter().any(|queue| queue.bql_limit_max.is_some()) {
        for limit in ["limit_max", "limit_min"] {
            let path = format!("queues/tx-0/byte_queue_limits/{limit}");
            settings.push(set(Knob::NicFile { nic: nic.id.clone(), path }, BQL_OPEN.to_string()));
        }
    }
    // Without these limits, bulk VMs would cause drops of RT packets.
    let needs = settings.iter().map(|setting| setting.knob.clone()).collect();
    settings.push(Setting { needs, ..set(Knob::RootQdisc { nic: nic.id.clone() }, NONE.to_owned()) });
    settings
}

/// Why packets still go through the qdisc.
enum QdiscReason<'a> {
    /// The administrator or another program chose the qdisc.
    Theirs(&'a str),
    /// This bulk tenant sends through an interface that is not a tap.
    Unheld(&'a str),
}

/// The taps through which bulk tenants send to this NIC.
fn taps<'a>(inventory: &'a Inventory, intent: &'a Intent, nic: &'a Nic) -> Result<Vec<Knob>, QdiscReason<'a>> {
    if let Some(theirs) = &nic.qdisc_by_others {
        return Err(QdiscReason::Theirs(theirs));
    }
    let mut taps = Vec::new();
    for tenant in intent.users(inventory, nic).filter(|tenant| tenant.class == Class::Bulk) {
        let own = taps_of(inventory, nic, tenant).filter(|own| !own.is_empty());
        taps.extend(own.ok_or(QdiscReason::Unheld(&tenant.name))?);
    }
    Ok(taps)
}

/// The taps of one tenant; `None` if the tenant also has another kind of interface that leads to this NIC.
fn taps_of(inventory: &Inventory, nic: &Nic, tenant: &Tenant) -> Option<Vec<Knob>> {
    if attached_to(inventory, tenant, nic).next().is_some() {
        return None;
    }
    let own = tenant.vnics.iter().filter(|vnic| leads_to(inventory, vnic, nic));
    let taps = own.map(|vnic| {
        let tap = inventory.nic(&vnic.ifname)?;
        // A macvtap's buffer size can be set, for each queue, but not read (`drivers/net/tap.c`, `tap_ioctl`), so it
        // could not be restored.
        let is_tap = tap.kind.as_deref() == Some("tun");
        is_tap.then(|| Knob::SendBuffer { nic: tap.id.clone(), process: tenant.process })
    });
    taps.collect()
}

impl QdiscReason<'_> {
    fn finding(&self, intent: &Intent, nic: &Nic) -> Finding {
        let tenant = match self {
            QdiscReason::Theirs(theirs) => return kept(nic, theirs),
            QdiscReason::Unheld(tenant) => tenant,
        };
        let table = intent.table_of(nic);
        Finding {
            rule: RuleId::QdiscBypass,
            severity: Severity::Warning,
            object: nic.id.name.clone(),
            found: format!(
                "bulk tenant {tenant} sends by it otherwise than by a VM's tap on a bridge, and nothing would hold it \
                 back"
            ),
            remedy: format!(
                "give it a NIC of its own, or a tap in place of a macvtap; or take qdisc_bypass out of [{table}] in \
                 /etc/ontime/host.toml"
            ),
            refusal: Some(Refusal::Device),
        }
    }
}

/// The finding for a root qdisc that stays, because the administrator or another program has set it.
fn kept(nic: &Nic, theirs: &str) -> Finding {
    Finding {
        rule: RuleId::QdiscBypass,
        severity: Severity::Warning,
        object: nic.id.name.clone(),
        found: format!(
            "its root qdisc {theirs} was set by the administrator or another program, and a reset could not restore it"
        ),
        remedy: format!("if it may go, run: tc qdisc del dev {} root, which drops what waits in it", nic.id.name),
        refusal: Some(Refusal::NotLiveSafe),
    }
}
