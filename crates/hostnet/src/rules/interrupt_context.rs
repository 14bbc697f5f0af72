//! Xen-ARM's order among vCPUs of one level: a vCPU with a pending interrupt runs first. The daemon changes the vCPUs'
//! priorities (its `cap`); this rule makes the settings that the daemon needs.

use super::threads::place;
use crate::intent::Intent;
use crate::inventory::{Inventory, KernelThreadKind};
use crate::rule::{Outcome, RuleId};

/// The rule [`RuleId::InterruptContext`]. The kernel reports an interrupt through its trace ring. On PREEMPT_RT
/// `irq_work/N` wakes the ring's reader; at its default of FIFO 1, a computing vCPU would keep that thread from
/// running. Other kernels wake the reader from the interrupt itself.
pub(super) fn interrupt_context(inventory: &Inventory, intent: &Intent) -> Outcome {
    let threads = inventory.threads_of(|kind| matches!(kind, KernelThreadKind::IrqWork(_)));
    let settings = threads.map(|thread| place(RuleId::InterruptContext, thread, intent.table.teller())).collect();
    Outcome { settings, ..Outcome::default() }
}
