//! Interrupts that no thread handles, and other programs' settings of interrupts' CPUs.

use ontime_tenants::Class;
use ontime_tenants::text::counted;

use super::upkeep::rt_cpus;
use super::{Check, State};
use crate::cpus::CpuSet;
use crate::intent::Intent;
use crate::inventory::{Inventory, LinkPolicy, Nic};
use crate::method::Method;
use crate::smi::SmiCount;

pub(super) fn smi(count: &SmiCount) -> Check {
    let (id, title) = ("smi", "interrupts for the firmware (SMI), which stop every CPU");
    let cost = "every CPU stops while the firmware runs, unseen by the kernel; not measured";
    match count {
        SmiCount::NoSuchThing => Check::new(id, title, State::Ok, "this processor architecture has none"),
        SmiCount::Unknown(why) => Check::new(id, title, State::Unknown, why.clone()).costs(300, cost, "").remedy(
            "run hwlatdetect (rt-tests) on the machine itself, which finds them by gaps in time, or \
             turbostat, which counts them on Intel's processors",
        ),
        SmiCount::Counted { most, during, .. } if *most == 0 => Check::new(
            id,
            title,
            State::Ok,
            format!("none came in {:.1} s; hwlatdetect (rt-tests) looks for rarer ones", during.as_secs_f64()),
        ),
        SmiCount::Counted { most, cpu, during } => {
            let found = format!("{} on CPU {cpu} in {:.1} s", counted(*most, "SMI"), during.as_secs_f64());
            Check::new(id, title, State::Warning, found).costs(300, cost, "").remedy(
                "in the firmware's set-up turn off legacy USB, power capping and memory patrol by the firmware, or \
                 choose its low-latency profile",
            )
        }
    }
}

/// How udev sets interrupts' CPUs when an interface appears.
pub(super) fn irq_cpus(inventory: &Inventory, intent: &Intent) -> Check {
    let (id, title) = ("irq-cpus", "CPUs of interrupts that udev sets");
    let udev = &inventory.udev;
    if udev.links.is_empty() && udev.rules.is_empty() {
        return Check::new(id, title, State::Ok, "udev does not set them");
    }
    let rt = rt_cpus(inventory, intent);
    let (mut told, mut faults) = (Vec::new(), false);
    for (name, policy) in &udev.links {
        let Some(nic) = inventory.nic(name) else { continue };
        let (words, fault) = of_link(inventory, intent, nic, policy, &rt);
        told.push(words);
        faults |= fault;
    }
    if !udev.rules.is_empty() {
        told.push(format!("rules that set interrupts' CPUs: {}", udev.rules.join(", ")));
        faults = true;
    }
    let at_stake = intent.rt_tenants().next().is_some();
    let check = |state| Check::new(id, title, state, told.join("; "));
    if !at_stake || !faults {
        return check(State::Ok);
    }
    check(State::Warning)
        .costs(
            100,
            "a bulk NIC's interrupts on an RT tenant's CPU, each time that an interface appears; not measured",
            "",
        )
        .remedy(
            "in the .link file name other CPUs (IRQAffinity=) or remove IRQAffinityPolicy=; remove the udev rule; then \
             udevadm control --reload, and set /proc/irq/N/smp_affinity_list",
        )
}

/// The effect of an interface's `.link` file, and whether that is a fault. It is not if the interface is an RT one, or
/// if its interrupts are on no RT tenant's CPU.
fn of_link(inventory: &Inventory, intent: &Intent, nic: &Nic, policy: &LinkPolicy, rt: &CpuSet) -> (String, bool) {
    let LinkPolicy { file, policy, among } = policy;
    let among = if among.is_empty() { String::new() } else { format!(" {among}") };
    let mut told = format!("{}: {file} has IRQAffinityPolicy={policy}{among}", nic.id.name);
    let own = inventory.irqs.iter().filter(|irq| nic.irqs.contains(&irq.id.irq));
    let cpus: CpuSet = own.flat_map(|irq| irq.affinity.iter().collect::<Vec<_>>()).collect();
    let shared: CpuSet = cpus.iter().filter(|cpu| rt.contains(*cpu)).collect();
    if intent.method == Method::Exclusive {
        told.push_str(", which method `exclusive` sets again");
        return (told, true);
    }
    let fault = !shared.is_empty() && intent.nic_class(inventory, nic) == Class::Bulk;
    if fault {
        told.push_str(&format!(": its interrupts are on CPUs {cpus}, of which RT tenants have {shared}"));
    }
    (told, fault)
}
