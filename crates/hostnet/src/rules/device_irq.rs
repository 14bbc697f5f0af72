//! Interrupt threads of devices other than NICs: disks, consoles, USB, GPUs.
//!
//! PREEMPT_RT and `threadirqs` start every interrupt thread at FIFO 50 (`kernel/irq/manage.c`, `setup_irq_thread`,
//! `sched_set_fifo`): level with an RT NIC's thread, above its NAPI thread and every vCPU. This rule gives them the
//! place of a bulk NIC's thread: before bulk tenants, so that disks and consoles work, and never before an RT thread.
//! They get no real-time priority, however low: with the kernel's protections off, an interrupt storm would then keep
//! housekeeping from the CPU permanently, and no runtime cap covers these threads.

use std::collections::BTreeSet;

use ontime_tenants::Policy;

use super::nic_threads::without_interrupts;
use super::threads::{DELAYS_RT, delays_rt, place};
use crate::intent::Intent;
use crate::inventory::{Inventory, Irq, KernelThread, KernelThreadKind};
use crate::rule::{Finding, Outcome, RuleId, Severity};

/// The policy with which the kernel starts interrupt threads.
const AS_STARTED: Policy = Policy::Fifo(50);

/// The rule [`RuleId::DeviceIrq`]. It changes only threads with the kernel's policy; another policy is the choice of
/// the administrator or another program. NICs' interrupts belong to another rule. Interrupts that may be an RT NIC's
/// stay as they are, those of NICs in other network namespaces are reported, with a thread or without, and those of
/// passed-through devices belong to their VM.
pub(super) fn device_irq(inventory: &Inventory, intent: &Intent) -> Outcome {
    let of_nics: BTreeSet<u32> = inventory.nics.iter().flat_map(|nic| nic.irqs.iter().copied()).collect();
    let delays = delays_rt(intent);
    let lacking: Vec<&str> = without_interrupts(inventory, intent).map(|nic| nic.id.name.as_str()).collect();
    let may_be = format!("may be that of {}, of whose interrupts nothing is known,", lacking.join(" or "));
    // A function with several interfaces, or a scalable function's parent.
    let has_interface = |irq: &Irq| {
        let is_of_device = |other: &Irq| other.device.is_some() && other.device == irq.device;
        inventory.irqs.iter().any(|other| is_of_device(other) && of_nics.contains(&other.id.irq))
    };
    let mut outcome = Outcome::default();
    for thread in &inventory.threads {
        let KernelThreadKind::Irq(number) = thread.kind else { continue };
        // Without its handlers' names, the interrupt's device is unknown.
        let Some(irq) = inventory.irqs.iter().find(|irq| irq.id.irq == number) else { continue };
        let above = delays(thread.policy);
        if passed_through(irq) {
            if above {
                outcome.findings.push(left(thread, Severity::Info, "is of a passed-through device", PASSED_THROUGH));
            }
            continue;
        }
        if of_nics.contains(&number) {
            continue;
        }
        if irq.network {
            outcome.findings.push(unclaimed(irq, has_interface(irq), thread, above));
            continue;
        }
        if irq.device.is_none() && !lacking.is_empty() && thread.policy == AS_STARTED {
            outcome.findings.push(left(thread, Severity::Warning, &may_be, UNKNOWN));
            continue;
        }
        if [AS_STARTED, Policy::BULK_DRIVER].contains(&thread.policy) {
            outcome.settings.push(place(RuleId::DeviceIrq, thread, Policy::BULK_DRIVER));
        } else if above {
            outcome.findings.push(left(
                thread,
                Severity::Warning,
                "was placed by the administrator or another program",
                CHOSEN,
            ));
        }
    }
    let threaded: BTreeSet<u32> = inventory
        .threads
        .iter()
        .filter_map(|thread| match thread.kind {
            KernelThreadKind::Irq(number) => Some(number),
            _ => None,
        })
        .collect();
    let is_told = |irq: &&Irq| {
        let claimed = of_nics.contains(&irq.id.irq) || passed_through(irq);
        irq.network && !claimed && !threaded.contains(&irq.id.irq)
    };
    let told = inventory.irqs.iter().filter(is_told);
    outcome.findings.extend(told.map(|irq| threadless(irq, has_interface(irq))));
    outcome
}

const PASSED_THROUGH: &str = "nothing for an RT VM's device; for a bulk VM's: chrt --other --pid 0 THREAD";
const UNKNOWN: &str = "if it is another device's: chrt --other --pid 0 THREAD";
const NAMESPACES: &str = "`ip netns` and `lsns -t net` list the namespaces";
const CHOSEN: &str =
    "lower it below every RT vCPU (chrt), or keep its interrupt off RT CPUs (/proc/irq/N/smp_affinity_list)";

/// The handler's name is `vfio-msix[0](0000:01:00.0)`, `vfio-msi[0](...)`, or `vfio-intx(...)`
/// (`drivers/vfio/pci/vfio_pci_intrs.c`).
fn passed_through(irq: &Irq) -> bool {
    irq.actions.iter().any(|action| action.starts_with("vfio-"))
}

/// Why an interrupt of a network controller that no interface here has is told: its interface is in a container's
/// network namespace, or a program has taken the device over. The owner of the packets is unknown, so it has no class.
/// `others`: the controller has an interface here.
fn without_interface(irq: &Irq, others: bool) -> String {
    // Without a device, only the handler's name shows that the interrupt is a network controller's.
    let device = irq.device.as_deref().unwrap_or("(by its handler's name)");
    let of =
        irq.virtual_of.as_deref().map_or_else(String::new, |function| format!(", a virtual function of {function}"));
    let or_renamed = if irq.device.is_none() { " or was renamed" } else { "" };
    let but = if others { "but of none of its interfaces" } else { "which has no interface" };
    format!("is of network controller {device}{of}, {but} in the host's network namespace{or_renamed},")
}

/// The finding for the thread of such an interrupt.
fn unclaimed(irq: &Irq, others: bool, thread: &KernelThread, above: bool) -> Finding {
    let why = without_interface(irq, others);
    let severity = if above { Severity::Warning } else { Severity::Info };
    let delays = if above { DELAYS_RT } else { "" };
    let found = format!("thread {} {why} and stays at {}{delays}", thread.id.tid, thread.policy);
    let remedy = format!(
        "leave it where an RT container or VM has this interface; where a bulk one has: chrt --other --pid 0 {}, or \
         keep it off RT tenants' CPUs (/proc/irq/{}/smp_affinity_list). {NAMESPACES}",
        thread.id.tid, irq.id.irq
    );
    Finding { found, ..left(thread, severity, "", &remedy) }
}

/// The finding for such an interrupt without a thread: of a kernel without threaded interrupts, or one whose driver
/// forbids a thread (`IRQF_NO_THREAD`).
fn threadless(irq: &Irq, others: bool) -> Finding {
    let number = irq.id.irq;
    Finding {
        rule: RuleId::DeviceIrq,
        severity: Severity::Info,
        object: format!("interrupt {number}"),
        found: format!("{} and has no thread: its handler runs above every thread", without_interface(irq, others)),
        remedy: format!(
            "leave it where an RT container or VM has this interface; where a bulk one has: keep it off RT tenants' \
             CPUs (/proc/irq/{number}/smp_affinity_list). {NAMESPACES}"
        ),
        refusal: None,
    }
}

fn left(thread: &KernelThread, severity: Severity, why: &str, remedy: &str) -> Finding {
    Finding {
        rule: RuleId::DeviceIrq,
        severity,
        object: thread.comm.clone(),
        found: format!("thread {} {why} and stays at {}{DELAYS_RT}", thread.id.tid, thread.policy),
        remedy: remedy.replace("THREAD", &thread.id.tid.to_string()),
        refusal: None,
    }
}
