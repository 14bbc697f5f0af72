//! Lets NAPI poll a bulk NIC again after a pause, before the NIC's interrupts are switched on again.
//!
//! Under load, PREEMPT_RT handles a bulk NIC's packets in small groups, because each interrupt wakes two threads at once:
//! the interrupt's and NAPI's. With `napi_defer_hard_irqs`, a poll that found packets leaves the interrupt off, and a
//! timer polls again after `gro_flush_timeout` (`net/core/dev.c`, `napi_complete_done`). More packets come by each
//! poll, and GRO merges more of them. A packet that comes in a pause waits for its end; after [`ROUNDS`] pauses without
//! a packet the interrupt is on.

use ontime_tenants::Class;

use super::threads::has_napi;
use crate::intent::{Intent, reaches};
use crate::inventory::{Deferral, Inventory, Nic};
use crate::kernel_files::{FLUSH_FILE, ROUNDS_FILE};
use crate::knob::{Knob, Value};
use crate::rule::{Outcome, RuleId, Setting, Stage};

/// A pause, ns. Of 20, 30, 50, 100 and 200 us the shortest two cost no throughput (docs/reference/hostnet.md); the
/// shorter it is, the more timers.
const FLUSH_NS: u64 = 30_000;
/// Pauses without a packet before the interrupt is on again.
const ROUNDS: u32 = 2;

/// The rule [`RuleId::BulkPoll`]. Values that another program chose stay.
pub(super) fn bulk_poll(inventory: &Inventory, intent: &Intent) -> Outcome {
    let mut outcome = Outcome::default();
    let nics = inventory.nics.iter().filter(|nic| nic.physical && has_napi(inventory, nic));
    for nic in nics.filter(|nic| is_bulk(inventory, intent, nic) && is_free(nic)) {
        for (file, value) in [(FLUSH_FILE, FLUSH_NS.to_string()), (ROUNDS_FILE, ROUNDS.to_string())] {
            let knob = Knob::NicFile { nic: nic.id.clone(), path: file.to_owned() };
            outcome.settings.push(Setting::new(RuleId::BulkPoll, Stage::Host, knob, Value::Text(value)));
        }
    }
    outcome
}

/// Whether no RT tenant's packets pass through a NIC, and none of its queues is for such.
fn is_bulk(inventory: &Inventory, intent: &Intent, nic: &Nic) -> bool {
    let classes = nic.napis.iter().map(|napi| intent.napi_class(inventory, nic, napi));
    classes.chain([intent.nic_class(inventory, nic)]).all(|class| class == Class::Bulk)
        && !intent.rt_tenants().any(|tenant| reaches(inventory, tenant, nic))
}

/// Whether a NIC's values are the kernel's or this rule's, also those of each of its NAPI instances. A kernel before 5.8
/// has none.
fn is_free(nic: &Nic) -> bool {
    let is_known = |of: Deferral| [0, FLUSH_NS].contains(&of.flush_ns) && [0, ROUNDS].contains(&of.rounds);
    nic.deferral.is_some_and(is_known) && nic.napis.iter().filter_map(|napi| napi.deferral).all(is_known)
}
