//! Plans of method vatc on synthetic hosts.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // a test that cannot go on fails

#[path = "support/fleet.rs"]
mod fleet;

use std::collections::{BTreeMap, BTreeSet};

use fleet::{host, of_rule, policies, refusals, rt, vm};
use ontime_hostnet::host_config::NicConfig;
use ontime_hostnet::inventory::{Inventory, TxQueue};
use ontime_hostnet::{Intent, Knob, Method, NicUse, Refusal, RuleId, Severity, plan};
use ontime_tenants::{Class, Policy};

#[test]
fn vatc_has_a_thread_for_each_level_and_receives_before_them_all() {
    let mut inventory = host(1, 2, true);
    let tenants = vec![
        vm(&mut inventory, 1, rt(0), 1, "eth0"),
        vm(&mut inventory, 2, rt(1), 1, "eth0"),
        vm(&mut inventory, 3, Class::Bulk, 1, "eth0"),
    ];
    let intent = Intent { tenants, method: Method::Vatc, ..Intent::default() };
    let nic = inventory.nic("eth0").unwrap();
    assert_eq!(intent.nic_use(&inventory, nic), NicUse::Mixed(rt(0)));
    let found = plan(&inventory, &intent);
    let threads = policies(&found);
    for (comm, policy) in [
        ("irq/100-eth0-TxRx-0", Policy::Fifo(50)),
        ("napi/eth0-8193", Policy::Fifo(49)),
        ("vhost-1000100", Policy::Fifo(48)),
        ("vhost-1000200", Policy::Fifo(43)),
    ] {
        assert_eq!(threads.get(comm), Some(&policy), "{comm}");
    }
    assert!(!threads.contains_key("vhost-1000300"), "a bulk VM's thread stays as it was found");
    assert!(!of_rule(&found, RuleId::RtTxQueue).is_empty(), "lower levels' packets do not hold up the RT queue");
    // This settles reception; under `partitioned` it would be a critical finding.
    assert!(found.findings.iter().all(|of| of.severity < Severity::Critical), "{:?}", found.findings);
    let partitioned = plan(&inventory, &Intent { method: Method::Partitioned, ..intent });
    assert_eq!(policies(&partitioned)["napi/eth0-8193"], Policy::BULK_DRIVER);
    assert!(partitioned.findings.iter().any(|of| of.severity == Severity::Critical));
}

#[test]
fn on_a_nic_of_one_queue_bulk_senders_go_before_other_bulk_threads() {
    let mut inventory = host(1, 1, true);
    let tenants = vec![vm(&mut inventory, 1, rt(0), 1, "eth0"), vm(&mut inventory, 2, Class::Bulk, 1, "eth0")];
    let intent = Intent { tenants, method: Method::Vatc, ..Intent::default() };
    let found = plan(&inventory, &intent);
    assert_eq!(policies(&found)["vhost-1000200"], Policy::Fifo(1), "below every thread on an RT path");
    assert!(!policies(&found).contains_key("CPU 0/KVM") || policies(&found)["CPU 0/KVM"] != Policy::Fifo(1));
    assert!(refusals(&found, RuleId::RtTxQueue).contains(&Refusal::Device), "and it is still said that they share it");
    // Under `partitioned` bulk threads stay as they are; under `vatc` too if the NIC has no RT tenant.
    let partitioned = plan(&inventory, &Intent { method: Method::Partitioned, ..intent.clone() });
    assert!(!policies(&partitioned).contains_key("vhost-1000200"));
    let alone = plan(&inventory, &Intent { tenants: intent.tenants[1..].to_vec(), ..intent });
    assert!(!policies(&alone).contains_key("vhost-1000200"));
}

#[test]
fn where_only_vms_send_packets_bypass_the_qdisc_and_bulk_vms_wait_at_their_taps() {
    let mut inventory = host(1, 1, true);
    inventory.nics[0].tx_ring = Some(512);
    let bulk = |inventory: &mut Inventory, number| vm(inventory, number, Class::Bulk, 1, "eth0");
    let tenants = vec![vm(&mut inventory, 1, rt(0), 1, "eth0"), bulk(&mut inventory, 2), bulk(&mut inventory, 3)];
    let said = |qdisc_bypass| BTreeMap::from([("eth0".to_owned(), NicConfig { qdisc_bypass, ..NicConfig::default() })]);
    let intent = Intent { tenants, method: Method::Vatc, nics: said(true), ..Intent::default() };
    let found = plan(&inventory, &intent);
    // Half of the ring for both VMs, counted in packets of the minimum size.
    let wanted = [
        ("tap2 send buffer, bytes, by process 1000200", "98304"),
        ("tap3 send buffer, bytes, by process 1000300", "98304"),
        ("eth0 queues/tx-0/byte_queue_limits/limit_max", "1879048192"),
        ("eth0 queues/tx-0/byte_queue_limits/limit_min", "1879048192"),
        ("eth0 root qdisc", "noqueue"),
    ];
    let wanted = wanted.map(|(knob, value)| (knob.to_owned(), value.to_owned()));
    assert_eq!(of_rule(&found, RuleId::QdiscBypass), wanted);
    // Batches end with the limit. If they had ended before, that setting is restored after it.
    let held = found.settings.iter().filter(|of| matches!(of.knob, Knob::SendBuffer { .. }));
    assert!(held.map(|of| of.overwrites.len()).eq([1, 1]));
    assert!(!policies(&found).contains_key("vhost-1000200"), "a bulk VM's thread stays as it was found");
    assert!(refusals(&found, RuleId::RtTxQueue).contains(&Refusal::Device), "and it is still said that they share it");
    let none = |inventory: &Inventory, intent: &Intent| {
        let found = plan(inventory, intent);
        assert!(of_rule(&found, RuleId::QdiscBypass).is_empty(), "{found:?}");
        refusals(&found, RuleId::QdiscBypass)
    };
    assert!(
        none(&inventory, &Intent { nics: said(false), ..intent.clone() }).is_empty(),
        "it is the administrator's word"
    );
    // Under `partitioned` nothing changes; under `vatc` neither if the NIC has no RT tenant.
    assert!(none(&inventory, &Intent { method: Method::Partitioned, ..intent.clone() }).is_empty());
    assert!(none(&inventory, &Intent { tenants: intent.tenants[1..].to_vec(), ..intent.clone() }).is_empty());
    let with = |change: fn(&mut Inventory)| {
        let mut inventory = inventory.clone();
        change(&mut inventory);
        inventory
    };
    assert!(none(&with(|of| of.nics[0].tx_queues.push(TxQueue::default())), &intent).is_empty());
    // Another program's qdisc is not replaced, nor is a qdisc if some sender could fill the ring without a limit. Then
    // senders run before other bulk threads.
    let at_sender = |inventory: &Inventory| policies(&plan(inventory, &intent)).get("vhost-1000200").copied();
    assert_eq!(at_sender(&inventory), None);
    let theirs = with(|of| of.nics[0].qdisc_by_others = Some("htb 1:".to_owned()));
    assert_eq!(none(&theirs, &intent), [Refusal::NotLiveSafe]);
    let container = with(|of| {
        of.nics.iter_mut().filter(|nic| nic.id.name == "tap3").for_each(|nic| nic.kind = Some("veth".to_owned()))
    });
    assert_eq!(none(&container, &intent), [Refusal::Device]);
    // A macvtap, whose buffer size the kernel sets but does not report.
    let macvtap = with(|of| {
        of.nics.iter_mut().filter(|nic| nic.id.name == "tap3").for_each(|nic| nic.kind = Some("macvtap".to_owned()))
    });
    assert_eq!(none(&macvtap, &intent), [Refusal::Device]);
    assert_eq!([at_sender(&theirs), at_sender(&container)], [Some(Policy::Fifo(1)); 2]);
    let without = Intent { without: BTreeSet::from([RuleId::QdiscBypass]), ..intent.clone() };
    assert_eq!(policies(&plan(&inventory, &without)).get("vhost-1000200"), Some(&Policy::Fifo(1)));
    let queues = with(|of| {
        let tap = of.nics.iter_mut().find(|nic| nic.id.name == "tap3").unwrap();
        tap.tx_queues = vec![TxQueue::default(); 3];
    });
    assert_eq!(of_rule(&plan(&queues, &intent), RuleId::QdiscBypass)[1].1, "49152", "four queues in all");
    // A driver that reports nothing, and many VMs.
    inventory.nics[0].tx_ring = None;
    inventory.nics[0].tx_queues[0].bql_limit_max = None;
    let mut intent = intent;
    intent.tenants.extend((4..40).map(|number| bulk(&mut inventory, number)));
    let settings = of_rule(&plan(&inventory, &intent), RuleId::QdiscBypass);
    assert_eq!((settings.len(), settings[0].1.as_str()), (39, "4096"));
}

#[test]
fn on_a_nic_of_one_queue_what_was_sent_is_freed_behind_rt_paths() {
    let mut inventory = host(1, 1, true);
    let tenants = vec![vm(&mut inventory, 1, rt(0), 1, "eth0"), vm(&mut inventory, 2, Class::Bulk, 1, "eth0")];
    let intent = Intent { tenants, method: Method::Vatc, ..Intent::default() };
    let of = |inventory: &Inventory, intent: &Intent| policies(&plan(inventory, intent));
    let place = |inventory: &Inventory, intent: &Intent| of(inventory, intent)["irq/100-eth0-TxRx-0"];
    assert_eq!(place(&inventory, &intent), Policy::Fifo(50), "it receives, too");
    for (name, completes) in
        [("eth0-tx-0", true), ("virtio0-output.0", true), ("eth0-rx-0", false), ("eth0-tx-", false), ("eth0", false)]
    {
        inventory.irqs[0].actions = vec![name.to_owned()];
        let wanted = if completes { Policy::Fifo(2) } else { Policy::Fifo(50) };
        assert_eq!(place(&inventory, &intent), wanted, "{name}");
    }
    inventory.irqs[0].actions = ["eth0-tx-0", "eth0-rx-0"].map(str::to_owned).into();
    assert_eq!(place(&inventory, &intent), Policy::Fifo(50), "one interrupt for both");
    inventory.irqs[0].actions = vec!["eth0-tx-0".to_owned()];
    assert_eq!(of(&inventory, &intent)["napi/eth0-8193"], Policy::Fifo(49));
    inventory.nics[0].napis[0].rx_queues.clear();
    assert_eq!(of(&inventory, &intent)["napi/eth0-8193"], Policy::Fifo(2), "one that only sends");
    let alone = Intent { tenants: intent.tenants[..1].to_vec(), ..intent.clone() };
    assert_eq!(place(&inventory, &alone), Policy::Fifo(50), "no bulk tenant sends by it");
    inventory.nics[0].tx_queues.push(TxQueue::default());
    assert_eq!(place(&inventory, &intent), Policy::Fifo(50), "RT packets have a queue of their own");
}
