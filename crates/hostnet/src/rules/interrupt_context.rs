//! Xen-ARM's order among vCPUs of one level: who has a pending interrupt goes first. The daemon raises and lowers them
//! (its `cap`); what is set here is what that needs.

use super::nic_threads::place;
use crate::intent::Intent;
use crate::inventory::{Inventory, KernelThreadKind};
use crate::rule::{Outcome, RuleId};

/// See [`RuleId::InterruptContext`]. The kernel tells of an interrupt by its trace ring, whose reader `irq_work/N`
/// wakes on PREEMPT_RT: at its place of FIFO 1 a vCPU that computes would keep it from running. Other kernels wake from
/// the interrupt itself.
pub fn interrupt_context(inventory: &Inventory, intent: &Intent) -> Outcome {
    let threads = inventory.threads_of(|kind| matches!(kind, KernelThreadKind::IrqWork(_)));
    let settings = threads.map(|thread| place(RuleId::InterruptContext, thread, intent.table.teller())).collect();
    Outcome { settings, ..Outcome::default() }
}
