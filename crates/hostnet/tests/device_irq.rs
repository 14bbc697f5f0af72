//! Plans for interrupt threads of disks, consoles and other devices, on synthetic hosts.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // a test that cannot go on fails

#[path = "support/fleet.rs"]
mod fleet;

use std::collections::BTreeSet;

use fleet::{of_rule, policies, two_vms};
use ontime_hostnet::inventory::{Inventory, Irq, KernelThread, KernelThreadKind};
use ontime_hostnet::{CpuSet, Intent, IrqId, Journal, Knob, Method, Original, RuleId, Severity, Value, plan, replan};
use ontime_tenants::{Policy, ThreadId};

const RULE: RuleId = RuleId::DeviceIrq;

/// Adds interrupt `number` with its thread, named as by the kernel.
fn device(inventory: &mut Inventory, number: u32, handler: &str, policy: Policy) -> ThreadId {
    let tid = 70_000 + i32::try_from(number).unwrap();
    let id = ThreadId { pid: tid, tid, start_time: 9 };
    inventory.irqs.push(Irq {
        id: IrqId { irq: number, chip: "PCI-MSI".to_owned(), hwirq: number.to_string() },
        actions: vec![handler.to_owned()],
        affinity: CpuSet::from_iter([0]),
        settable: true,
        device: None,
        network: false,
        virtual_of: None,
        elsewhere: None,
    });
    let comm = format!("irq/{number}-{handler}");
    inventory.threads.push(KernelThread { id, kind: KernelThreadKind::Irq(number), comm, policy });
    id
}

#[test]
fn disks_and_consoles_go_below_every_rt_thread_and_ahead_of_bulk() {
    let (mut inventory, intent) = two_vms();
    device(&mut inventory, 9_001, "ahci", Policy::Fifo(50));
    device(&mut inventory, 9_002, "ttyS0", Policy::Fifo(50));
    let found = policies(&plan(&inventory, &intent));
    assert_eq!(found["irq/9001-ahci"], Policy::BULK_DRIVER);
    assert_eq!(found["irq/9002-ttyS0"], Policy::BULK_DRIVER);
    // NICs' interrupts belong to the other rule, and other kernel threads to no rule.
    assert_eq!(found["irq/100-eth0-TxRx-0"], Policy::Fifo(45));
    assert_eq!(of_rule(&plan(&inventory, &intent), RULE).len(), 2);
    for (method, count) in [(Method::Vanilla, 0), (Method::Threaded, 0), (Method::Vatc, 0), (Method::Busypoll, 2)] {
        let found = plan(&inventory, &Intent { method, ..intent.clone() });
        assert_eq!(of_rule(&found, RULE).len(), count, "{method}");
    }
}

#[test]
fn what_somebody_placed_stays_and_is_said_where_it_delays() {
    let (mut inventory, intent) = two_vms();
    device(&mut inventory, 9_001, "nvme0q1", Policy::Fifo(60));
    device(&mut inventory, 9_002, "rtc0", Policy::Fifo(5));
    device(&mut inventory, 9_003, "s-ahci", Policy::Fifo(1));
    let found = plan(&inventory, &intent);
    assert!(of_rule(&found, RULE).is_empty(), "{found:?}");
    let said: Vec<_> = found.findings.iter().filter(|finding| finding.rule == RULE).collect();
    assert_eq!(said.len(), 1, "only what delays is said: {said:?}");
    assert_eq!((said[0].object.as_str(), said[0].severity), ("irq/9001-nvme0q1", Severity::Warning));
    let nobody = Intent { tenants: Vec::new(), ..intent };
    assert!(plan(&inventory, &nobody).findings.iter().all(|finding| finding.rule != RULE), "nobody is delayed");
}

#[test]
fn a_passed_through_device_and_a_nic_elsewhere_are_left_alone() {
    let (mut inventory, intent) = two_vms();
    device(&mut inventory, 9_001, "vfio-msix[0](0000:01:00.0)", Policy::Fifo(50));
    device(&mut inventory, 9_002, "mlx5_comp0@pci:0000:02:00.0", Policy::Fifo(50));
    inventory.irqs.iter_mut().find(|irq| irq.id.irq == 9_002).unwrap().network = true;
    // An interrupt whose handlers could not be read.
    device(&mut inventory, 9_003, "ahci", Policy::Fifo(50));
    inventory.irqs.retain(|irq| irq.id.irq != 9_003);
    let found = plan(&inventory, &intent);
    assert!(of_rule(&found, RULE).is_empty(), "{found:?}");
    let said: Vec<_> = found.findings.iter().filter(|finding| finding.rule == RULE).collect();
    assert_eq!(said.len(), 2, "{said:?}");
    assert_eq!(said[0].severity, Severity::Info);
    assert!(said[0].object.contains("vfio"));
    assert_eq!(said[1].severity, Severity::Warning);
}

#[test]
fn a_network_interrupt_that_no_interface_here_claims_is_reported() {
    let (mut inventory, intent) = two_vms();
    for (number, device, policy) in [
        (9_001, Some("0000:5e:02.3"), Policy::Fifo(50)),
        (9_002, Some("virtio11"), Policy::Fifo(42)),
        (9_003, None, Policy::Fifo(50)),
        // Below the entitled place of the VM's level, no RT thread waits for the interrupt.
        (9_004, Some("0000:5e:02.4"), Policy::Fifo(40)),
        (9_005, Some("0000:5e:02.5"), Policy::BULK),
    ] {
        network_device(&mut inventory, number, device, policy);
    }
    let found = plan(&inventory, &intent);
    assert!(of_rule(&found, RULE).is_empty(), "{found:?}");
    let said: Vec<_> = found.findings.iter().filter(|finding| finding.rule == RULE).collect();
    let severities: Vec<Severity> = said.iter().map(|finding| finding.severity).collect();
    assert_eq!(severities, [Severity::Warning, Severity::Warning, Severity::Warning, Severity::Info, Severity::Info]);
    assert!(said[0].found.contains("network controller 0000:5e:02.3, which has no interface"), "{}", said[0].found);
    let chrt = "chrt --other --pid 0 79001";
    assert!(
        said[0].remedy.contains(chrt) && said[0].remedy.contains("/proc/irq/9001/smp_affinity"),
        "{}",
        said[0].remedy
    );
    for (function, words) in
        [("up0", ", a virtual function of up0, which"), ("0000:5e:00.1", ", a virtual function of 0000:5e:00.1, which")]
    {
        inventory.irqs.iter_mut().for_each(|irq| irq.virtual_of = Some(function.to_owned()));
        let found = plan(&inventory, &intent);
        assert!(found.findings.iter().any(|one| one.rule == RULE && one.found.contains(words)), "{function}");
    }
    // One interface with this interrupt is enough, whatever its class.
    inventory.nics[1].irqs.extend([9_001, 9_002, 9_003, 9_004, 9_005]);
    assert!(plan(&inventory, &intent).findings.iter().all(|finding| finding.rule != RULE));
}

#[test]
fn a_network_interrupt_without_a_thread_that_no_interface_here_claims_is_reported_once() {
    let (mut inventory, intent) = two_vms();
    for (number, device) in [(9_001, Some("0000:5e:02.3")), (9_002, Some("virtio11")), (9_003, None)] {
        network_device(&mut inventory, number, device, Policy::Fifo(50));
    }
    // Never reported: a disk and a passed-through NIC.
    device(&mut inventory, 9_004, "ahci", Policy::Fifo(50));
    network_device(&mut inventory, 9_005, Some("0000:5e:02.4"), Policy::Fifo(50));
    let passed_through = inventory.irqs.iter_mut().find(|irq| irq.id.irq == 9_005).unwrap();
    passed_through.actions = vec!["vfio-msi[0](0000:5e:02.4)".to_owned()];
    inventory.threads.retain(|thread| !matches!(thread.kind, KernelThreadKind::Irq(9_001..)));
    // With a thread, only the thread is reported.
    network_device(&mut inventory, 9_007, Some("0000:5e:02.5"), Policy::Fifo(50));
    let found = plan(&inventory, &intent);
    assert!(of_rule(&found, RULE).is_empty(), "{found:?}");
    let said: Vec<_> = found.findings.iter().filter(|finding| finding.rule == RULE).collect();
    let objects: BTreeSet<&str> = said.iter().map(|finding| finding.object.as_str()).collect();
    let wanted = ["interrupt 9001", "interrupt 9002", "interrupt 9003", "irq/9007-queue-0"];
    assert_eq!((objects, said.len()), (BTreeSet::from(wanted), 4), "{said:?}");
    for (number, words) in [(9_001, "0000:5e:02.3"), (9_002, "virtio11"), (9_003, "(by its handler's name)")] {
        let one = said.iter().find(|finding| finding.object == format!("interrupt {number}")).unwrap();
        assert_eq!(one.severity, Severity::Info);
        assert!(one.found.contains(&format!("network controller {words}, which has no interface")), "{one:?}");
        assert!(one.remedy.contains(&format!("/proc/irq/{number}/smp_affinity_list")), "{one:?}");
    }
    inventory.nics[1].irqs.extend([9_001, 9_002, 9_003, 9_007]);
    assert!(plan(&inventory, &intent).findings.iter().all(|finding| finding.rule != RULE));
}

/// A network controller's interrupt.
fn network_device(inventory: &mut Inventory, number: u32, name: Option<&str>, policy: Policy) {
    device(inventory, number, "queue-0", policy);
    let irq = inventory.irqs.iter_mut().find(|irq| irq.id.irq == number).unwrap();
    (irq.device, irq.network) = (name.map(str::to_owned), true);
}

#[test]
fn where_it_was_found_counts_while_it_is_applied() {
    let (mut inventory, intent) = two_vms();
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(&dir.path().join("originals"), "boot").unwrap();
    // The rule placed the thread, then another program changed it: this is drift and is set again, not a choice to
    // respect.
    let thread = device(&mut inventory, 9_001, "ahci", Policy::Fifo(33));
    let knob = Knob::ThreadPolicy { thread, comm: "irq/9001-ahci".to_owned() };
    assert!(of_rule(&replan(inventory.clone(), intent.clone(), &journal), RULE).is_empty());
    journal.store(vec![Original { knob, value: Value::Policy(Policy::Fifo(50)) }]).unwrap();
    let found = replan(inventory, intent, &journal);
    assert_eq!(policies(&found)["irq/9001-ahci"], Policy::BULK_DRIVER);
}
