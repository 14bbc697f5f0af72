//! Plans of every method on synthetic hosts.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // a test that cannot go on fails

#[path = "support/fleet.rs"]
mod fleet;

use std::collections::BTreeMap;

use fleet::{host, hundred_vms, mixed, of_rule, policies, refusals, rt, two_vms, vm};
use ontime_hostnet::doctor::Refused;
use ontime_hostnet::inventory::{Kernel, Lockdown, Napi, Nic};
use ontime_hostnet::{
    CpuSet, Host, Intent, Inventory, Knob, KnobError, Method, Moderation, NicConfig, NicId, NicUse, Plan, RULES,
    Refusal, RuleId, Setting, Severity, State, SteerFrom, Value, examine, kvm, plan, rules,
};
use ontime_tenants::vmm::Delay;
use ontime_tenants::{Attached, Class, Kind, Policy, PriorityTable, Problem, ProblemKind, Tenant, ThreadRole, Vnic};

#[test]
fn partitioned_places_every_thread_by_the_table() {
    let (inventory, intent) = two_vms();
    let found = policies(&plan(&inventory, &intent));
    for (comm, policy) in [
        ("irq/100-eth0-TxRx-0", Policy::Fifo(45)),
        ("napi/eth0-8193", Policy::Fifo(44)),
        ("vhost-1000100", Policy::Fifo(43)),
        ("kvm-pit/1000100", Policy::Fifo(43)),
        ("CPU 1/KVM", Policy::Fifo(42)),
        ("qemu-system-x86", Policy::Fifo(3)),
        ("irq/1101-eth1-TxRx-1", Policy::BULK_DRIVER),
        ("napi/eth1-9194", Policy::BULK_DRIVER),
        ("ksoftirqd/3", Policy::Fifo(2)),
        ("ktimers/3", Policy::Fifo(2)),
        ("rcuc/3", Policy::Fifo(4)),
        ("backlog_napi/3", Policy::Fifo(2)),
    ] {
        assert_eq!(found.get(comm), Some(&policy), "{comm}");
    }
    // Threads of bulk tenants stay as they are.
    assert!(!found.contains_key("vhost-1000200"));
    assert_eq!(of_rule(&plan(&inventory, &intent), RuleId::VmmPlace).len(), 1);
}

#[test]
fn a_method_sets_what_the_paper_sets_and_no_more() {
    let (inventory, intent) = two_vms();
    let by = |method| plan(&inventory, &Intent { method, exclusive_cpu: Some(3), ..intent.clone() });
    let vanilla = by(Method::Vanilla);
    let threads: Vec<String> = policies(&vanilla).into_keys().collect();
    assert_eq!(threads, ["CPU 0/KVM", "CPU 1/KVM", "kvm-pit/1000100", "vhost-1000100"]);
    assert_eq!(vanilla.settings.len(), 4);
    let threaded = by(Method::Threaded);
    assert_eq!(policies(&threaded).len(), 4 + 4);
    assert!(of_rule(&threaded, RuleId::NapiThreaded).is_empty() && of_rule(&threaded, RuleId::NapiThread).is_empty());
    assert_eq!(policies(&by(Method::Exclusive)), policies(&threaded));
    assert!(!of_rule(&by(Method::Partitioned), RuleId::NapiThreaded).is_empty());
}

#[test]
fn an_interface_that_is_down_is_threaded_when_it_comes_up_where_that_could_not_be_undone_before() {
    let (mut inventory, intent) = two_vms();
    for nic in inventory.nics.iter_mut().filter(|nic| nic.id.name == "eth1") {
        (nic.up, nic.threaded, nic.napis) = (false, Some(0), Vec::new());
    }
    let wanted = |inventory: &Inventory| {
        let found = of_rule(&plan(inventory, &intent), RuleId::NapiThreaded);
        found.iter().any(|(knob, value)| knob.contains("eth1") && value == "1")
    };
    assert!(!wanted(&inventory));
    for (version, up, mode, is) in [((6, 12), false, 0, true), ((7, 2), true, 0, true), ((6, 17), false, 1, true)] {
        inventory.kernel.version = version;
        for nic in inventory.nics.iter_mut().filter(|nic| nic.id.name == "eth1") {
            (nic.up, nic.threaded) = (up, Some(mode));
        }
        assert_eq!(wanted(&inventory), is, "{version:?} {up} {mode}");
    }
}

/// As a host is before Ontime first sets anything.
#[test]
fn napi_threads_that_do_not_exist_yet_are_told_with_their_places() {
    let mut inventory = host(3, 3, false);
    let tenants = vec![vm(&mut inventory, 1, rt(1), 1, "eth0"), vm(&mut inventory, 2, Class::Bulk, 1, "eth1")];
    let queues = BTreeMap::from([(2, rt(0))]);
    let nics = BTreeMap::from([("eth2".to_owned(), NicConfig { queues, ..NicConfig::default() })]);
    let intent = Intent { tenants, nics, ..Intent::default() };
    let told = |inventory: &Inventory, intent: &Intent| -> Vec<String> {
        let found = plan(inventory, intent).findings.into_iter().filter(|of| of.rule == RuleId::NapiThreaded);
        found.map(|of| format!("{:?} {}: {}", of.severity, of.object, of.found)).collect()
    };
    let bulk = Policy::BULK_DRIVER;
    let wanted = |nic: &str, places: &str| {
        format!("Info {nic}: its 3 NAPI threads do not exist yet; once made they get {places} (napi-thread)")
    };
    let all = [
        wanted("eth0", "FIFO 44"),
        wanted("eth1", &bulk.to_string()),
        wanted("eth2", &format!("{bulk} (2) and FIFO 49 (1)")),
    ];
    assert_eq!(told(&inventory, &intent), all);
    assert!(told(&inventory, &Intent { without: [RuleId::NapiThread].into(), ..intent.clone() }).is_empty());
    // Some have threads, by the kernel's setting for single instances.
    for nic in &mut inventory.nics[..2] {
        nic.napis.truncate(1);
    }
    inventory.nics[1].napis[0].pid = Some(77);
    let threads = host(2, 1, true).threads.into_iter().filter(|thread| thread.comm.starts_with("napi/eth1"));
    inventory.threads.extend(threads.map(|thread| {
        let id = ontime_tenants::ThreadId { pid: 77, tid: 77, ..thread.id };
        ontime_hostnet::inventory::KernelThread { id, ..thread }
    }));
    let one = "Info eth0: its NAPI thread does not exist yet; once made it gets FIFO 44 (napi-thread)".to_owned();
    assert_eq!(told(&inventory, &intent), [one, all[2].clone()]);
    // A kernel that lists no instance.
    inventory.kernel = Kernel { release: "6.1.0".to_owned(), version: (6, 1), ..inventory.kernel };
    inventory.nics.truncate(1);
    inventory.nics[0].napis.clear();
    let unlisted =
        "Info eth0: kernel 6.1.0 does not list its NAPI instances: threads that are made for them get FIFO 44";
    assert_eq!(told(&inventory, &intent), [format!("{unlisted} (napi-thread)")]);
    assert!(told(&host(3, 3, true), &intent).is_empty());
}

/// GRO is off, so the kernel has no NAPI instance of the pair that it could list.
#[test]
fn the_threads_of_an_rt_containers_veth_are_told_once_before_they_exist() {
    let (mut inventory, mut intent) = two_vms();
    let is_tap = |nic: &&mut Nic| nic.id.name.starts_with("tap");
    inventory.nics.iter_mut().filter(is_tap).for_each(|nic| nic.kind = Some("veth".to_owned()));
    // Another container of the pod.
    intent.tenants.push(Tenant { name: "beside".to_owned(), ..intent.tenants[0].clone() });
    let told = |inventory: &Inventory, intent: &Intent| -> Vec<String> {
        let found = plan(inventory, intent).findings.into_iter().filter(|of| of.rule == RuleId::Veth);
        found.map(|of| format!("{:?} {}: {}", of.severity, of.object, of.found)).collect()
    };
    let what = "GRO gives it NAPI instances; their threads get FIFO 44 once made (napi-threaded, napi-thread)";
    assert_eq!(told(&inventory, &intent), [format!("Info tap1: {what}")]);
    for rule in [RuleId::NapiThreaded, RuleId::NapiThread] {
        assert!(told(&inventory, &Intent { without: [rule].into(), ..intent.clone() }).is_empty(), "{rule}");
    }
    let mut older = inventory.clone();
    older.kernel.version = (6, 7);
    assert!(told(&older, &intent).is_empty(), "napi-threaded tells it");
    inventory.nics.iter_mut().for_each(|nic| nic.napis.push(Napi::default()));
    assert!(told(&inventory, &intent).is_empty());
}

#[test]
fn a_rule_that_is_switched_off_sets_nothing_and_says_so() {
    let (inventory, mut intent) = two_vms();
    let all = plan(&inventory, &intent);
    intent.without = [RuleId::NapiThread, RuleId::ExclusiveCpu].into();
    let found = plan(&inventory, &intent);
    assert!(of_rule(&found, RuleId::NapiThread).is_empty() && !of_rule(&all, RuleId::NapiThread).is_empty());
    assert_eq!(of_rule(&found, RuleId::NapiThreaded), of_rule(&all, RuleId::NapiThreaded));
    let said: Vec<_> = found.findings.iter().filter(|of| of.found.contains("switched off")).collect();
    assert_eq!(said.len(), 1, "only what the method has: {said:?}");
    assert_eq!((said[0].rule, said[0].object.as_str()), (RuleId::HostConfig, "napi-thread"));
}

#[test]
fn exclusive_keeps_one_cpu_for_the_rt_group() {
    let (inventory, mut intent) = two_vms();
    intent.method = Method::Exclusive;
    intent.exclusive_cpu = Some(3);
    let found = plan(&inventory, &intent);
    let settings: BTreeMap<_, _> = of_rule(&found, RuleId::ExclusiveCpu).into_iter().collect();
    for (knob, cpus) in [
        ("CPUs of interrupt 100 (PCI-MSIX-0000:00:00.0)", "CPUs 3"),
        ("CPUs of interrupt 1100 (PCI-MSIX-0000:01:00.0)", "CPUs 0-2,4-63"),
        ("/proc/irq/default_smp_affinity", "CPUs 0-2,4-63"),
        ("CPUs of thread 1000101 (CPU 0/KVM)", "CPUs 3"),
        ("CPUs of thread 1000150 (vhost-1000100)", "CPUs 3"),
        ("CPUs of thread 1000100 (qemu-system-x86)", "CPUs 0-2,4-63"),
        ("CPUs of thread 1000201 (CPU 0/KVM)", "CPUs 0-2,4-63"),
    ] {
        assert_eq!(settings.get(knob).map(String::as_str), Some(cpus), "{knob}: {settings:?}");
    }
    for (cpu, word) in [(None, "no CPU is named"), (Some(64), "not online")] {
        let refused = plan(&inventory, &Intent { exclusive_cpu: cpu, ..intent.clone() });
        assert!(of_rule(&refused, RuleId::ExclusiveCpu).is_empty());
        assert!(refused.findings.iter().any(|finding| finding.found.contains(word)), "{refused:?}");
    }
    // libvirt's pinning stays.
    intent.tenants[1].threads[1].libvirt.cpus = Some("3".to_owned());
    intent.tenants[1].threads[1].affinity = "3".to_owned();
    let found = plan(&inventory, &intent);
    assert!(found.findings.iter().any(|finding| finding.found.contains("libvirt pins it to CPUs 3")), "{found:?}");
    assert!(!of_rule(&found, RuleId::ExclusiveCpu).iter().any(|(knob, _)| knob.contains("thread 1000201")));
}

#[test]
fn a_nic_has_the_class_of_its_tenants_unless_configured() {
    let mut inventory = host(3, 1, true);
    let tenants = vec![
        vm(&mut inventory, 1, rt(2), 1, "eth0"),
        vm(&mut inventory, 2, rt(1), 1, "eth0"),
        vm(&mut inventory, 3, rt(0), 1, "eth1"),
        vm(&mut inventory, 4, Class::Bulk, 1, "eth1"),
    ];
    let mut intent = Intent { tenants, ..Intent::default() };
    let used = |intent: &Intent, name: &str| intent.nic_use(&inventory, inventory.nic(name).unwrap());
    assert_eq!(used(&intent, "eth0"), NicUse::Derived(rt(1)));
    assert_eq!(used(&intent, "eth1"), NicUse::Mixed(rt(0)));
    assert_eq!(used(&intent, "eth2"), NicUse::Derived(Class::Bulk));
    assert_eq!(used(&intent, "tap3"), NicUse::Derived(rt(0)));
    let class = |class| NicConfig { class: Some(class), ..NicConfig::default() };
    intent.nics = BTreeMap::from([("eth1".to_owned(), class(rt(4))), ("eth0".to_owned(), class(Class::Bulk))]);
    let named = |name: &str| NicConfig { tenants: vec![name.to_owned()], ..NicConfig::default() };
    intent.nics.insert("eth2".to_owned(), named(&intent.tenants[0].name.clone()));
    let impostor = Tenant { class: Class::Bulk, vnics: Vec::new(), ..intent.tenants[0].clone() };
    intent.tenants.push(impostor);
    assert_eq!(used(&intent, "eth2"), NicUse::Derived(rt(2)));
    intent.nics.insert("eth2".to_owned(), named(&intent.tenants[3].name.clone()));
    assert_eq!(intent.users(&inventory, inventory.nic("eth2").unwrap()).count(), 1);
    assert_eq!(used(&intent, "eth1").class(), rt(4));
    assert_eq!(used(&intent, "eth0").class(), Class::Bulk);
}

/// Findings of rule `host-config`, with their severity.
fn said(inventory: &Inventory, intent: &Intent) -> Vec<(Severity, String)> {
    let found = plan(inventory, intent).findings.into_iter().filter(|finding| finding.rule == RuleId::HostConfig);
    found.map(|of| (of.severity, format!("{}: {}; {}", of.object, of.found, of.remedy))).collect()
}

#[test]
fn a_nic_configured_as_bulk_that_only_rt_tenants_use_is_told() {
    let (inventory, mut intent) = two_vms();
    let bulk = NicConfig { class: Some(Class::Bulk), ..NicConfig::default() };
    intent.nics = BTreeMap::from([("eth0".to_owned(), bulk.clone()), ("eth1".to_owned(), bulk.clone())]);
    let told = said(&inventory, &intent);
    let [(Severity::Warning, text)] = told.as_slice() else { panic!("one, of the RT VM's NIC: {told:?}") };
    assert!(text.starts_with("eth0: ") && text.contains("(vm1)") && text.contains("[nic.eth0]"), "{text}");
    // A bulk tenant on the NIC too is reported by rule rt-tx-queue; a queue for RT packets is a solution; without a
    // class there is no conflict.
    let mut shared = intent.clone();
    shared.nics.insert("eth0".to_owned(), NicConfig { tenants: vec!["vm2".to_owned()], ..bulk.clone() });
    assert!(said(&inventory, &shared).is_empty());
    assert!(plan(&inventory, &shared).findings.iter().any(|of| of.severity == Severity::Critical));
    intent.nics.insert("eth0".to_owned(), NicConfig { queues: BTreeMap::from([(1, rt(1))]), ..bulk });
    assert!(said(&inventory, &intent).is_empty());
    intent.nics.clear();
    assert!(said(&inventory, &intent).is_empty());
}

#[test]
fn every_nic_of_a_bond_is_its_tenants_and_the_bond_itself_is_none() {
    let mut inventory = host(3, 2, true);
    let bond = NicId { ifindex: 900, name: "bond0".to_owned() };
    inventory.nics.push(Nic { id: bond, kind: Some("bond".to_owned()), up: true, ..Nic::default() });
    for name in ["eth0", "eth1"] {
        inventory.nics.iter_mut().find(|nic| nic.id.name == name).unwrap().controller = Some(900);
    }
    let mut tenant = vm(&mut inventory, 1, rt(0), 1, "eth0");
    tenant.vnics[0].lower = vec!["eth0".to_owned(), "eth1".to_owned()];
    let mut intent = Intent { tenants: vec![tenant], ..Intent::default() };
    let found = policies(&plan(&inventory, &intent));
    let of_nic =
        |at: usize| inventory.threads.iter().filter(move |thread| thread.comm.starts_with(&format!("napi/eth{at}-")));
    for (at, policy) in [(0, Policy::Fifo(49)), (1, Policy::Fifo(49)), (2, Policy::BULK_DRIVER)] {
        assert_eq!(of_nic(at).count(), 2);
        assert!(of_nic(at).all(|thread| found.get(&thread.comm) == Some(&policy)), "eth{at}: {found:?}");
    }
    intent.nics = BTreeMap::from([("bond0".to_owned(), NicConfig { class: Some(rt(0)), ..NicConfig::default() })]);
    let told = said(&inventory, &intent);
    let [(Severity::Warning, text)] = told.as_slice() else { panic!("{told:?}") };
    assert!(text.starts_with("bond0: ") && text.ends_with(": eth0, eth1"), "{text}");
}

#[test]
fn a_name_that_decides_nothing_is_told_with_the_nics_below_it() {
    let mut inventory = host(2, 1, true);
    let index = |name: &str| inventory.nic(name).unwrap().id.ifindex;
    let (eth0, eth1) = (index("eth0"), index("eth1"));
    let mut add = |ifindex, name: &str, kind: &str, lower: &[u32]| {
        let id = NicId { ifindex, name: name.to_owned() };
        inventory.nics.push(Nic { id, kind: Some(kind.to_owned()), lower: lower.to_vec(), up: true, ..Nic::default() });
    };
    add(901, "hsr0", "hsr", &[eth0, eth1]);
    add(902, "macsec0", "macsec", &[eth1]);
    add(903, "vx7", "vxlan", &[902]);
    add(904, "lone", "dummy", &[]);
    // These two are above each other, which no kernel allows.
    add(905, "round", "macvlan", &[906]);
    add(906, "trip", "ipvlan", &[905]);
    // These have NAPI while they are up, or the kernel lists NAPI for them.
    add(907, "veth9", "veth", &[]);
    add(908, "wg0", "wireguard", &[]);
    add(909, "tap9", "tun", &[]);
    let napi = inventory.nic("eth0").unwrap().napis.clone();
    inventory.nics.iter_mut().find(|nic| nic.id.name == "tap9").unwrap().napis = napi;
    for (name, wanted) in [
        ("hsr0", Some(": eth0, eth1")),
        ("macsec0", Some(": eth1")),
        ("vx7", Some(": eth1")),
        ("lone", Some("in its place")),
        ("round", Some("in its place")),
        ("veth9", None),
        ("wg0", None),
        ("tap9", None),
    ] {
        let config = NicConfig { class: Some(rt(0)), ..NicConfig::default() };
        let intent = Intent { nics: BTreeMap::from([(name.to_owned(), config)]), ..Intent::default() };
        let told = said(&inventory, &intent);
        match wanted {
            Some(end) => {
                let [(Severity::Warning, text)] = told.as_slice() else { panic!("{name}: {told:?}") };
                assert!(text.starts_with(&format!("{name}: ")) && text.ends_with(end), "{text}");
            }
            None => assert!(told.is_empty(), "{name}: {told:?}"),
        }
    }
}

#[test]
fn an_rt_tenant_whose_nic_nobody_can_tell_is_asked_for() {
    let (mut inventory, mut intent) = two_vms();
    for tenant in &mut intent.tenants {
        tenant.vnics[0].lower.clear();
    }
    let told = said(&inventory, &intent);
    let [(Severity::Info, text)] = told.as_slice() else { panic!("one, of the RT VM: {told:?}") };
    assert!(text.starts_with("vm1: tap1 ") && text.contains("tenants = [\"vm1\"]"), "{text}");
    // A port of a datapath, whatever its name, and an interface above an internal port.
    let port = |ifindex, name: &str| Nic {
        id: NicId { ifindex, name: name.to_owned() },
        kind: Some("openvswitch".to_owned()),
        ..Nic::default()
    };
    inventory.nics.push(port(3000, "my-datapath"));
    let tap = inventory.nics.iter().position(|nic| nic.id.name == "tap1").unwrap();
    for (controller, link) in [(Some(3000), None), (None, Some(3000))] {
        (inventory.nics[tap].controller, inventory.nics[tap].link) = (controller, link);
        let told = said(&inventory, &intent);
        let [(Severity::Warning, text)] = told.as_slice() else { panic!("{told:?}") };
        assert!(text.contains("Open vSwitch") && text.contains("tenants = [\"vm1\"]"), "{text}");
    }
    intent.nics.insert("eth0".to_owned(), NicConfig { tenants: vec!["vm1".to_owned()], ..NicConfig::default() });
    assert!(said(&inventory, &intent).is_empty());
    assert_eq!(intent.nic_use(&inventory, inventory.nic("eth0").unwrap()), NicUse::Derived(rt(1)));
}

#[test]
fn a_queue_kept_for_rt_has_its_own_threads_class() {
    let (inventory, mut intent) = mixed(4);
    let queues = BTreeMap::from([(3, rt(1))]);
    intent.nics = BTreeMap::from([("eth0".to_owned(), NicConfig { queues, ..NicConfig::default() })]);
    let found = plan(&inventory, &intent);
    let threads = policies(&found);
    for (comm, policy) in [
        ("irq/103-eth0-TxRx-3", Policy::Fifo(45)),
        ("napi/eth0-8196", Policy::Fifo(44)),
        ("irq/102-eth0-TxRx-2", Policy::BULK_DRIVER),
        ("napi/eth0-8195", Policy::BULK_DRIVER),
    ] {
        assert_eq!(threads.get(comm), Some(&policy), "{comm}");
    }
    // Reception is now separated. It remains to make the NIC put RT packets there.
    assert!(found.findings.iter().all(|finding| finding.severity < Severity::Critical), "{:?}", found.findings);
    assert!(found.findings.iter().any(|finding| finding.found.contains("receive queues 3 are kept")));
}

#[test]
fn what_host_toml_names_and_the_host_has_not_is_found() {
    let (mut inventory, mut intent) = two_vms();
    let config = |queues: &[(u32, Class)], tenants: &[&str]| NicConfig {
        queues: queues.iter().copied().collect(),
        tenants: tenants.iter().map(|name| (*name).to_owned()).collect(),
        ..NicConfig::default()
    };
    intent.nics = BTreeMap::from([
        ("eth9".to_owned(), config(&[(0, rt(0))], &[])),
        ("eth1".to_owned(), config(&[(7, rt(0))], &["vm1", "gone"])),
    ]);
    let words = |found: &Plan| -> Vec<String> {
        let of = found.findings.iter().filter(|finding| finding.rule == RuleId::HostConfig);
        of.map(|finding| format!("{}: {}", finding.object, finding.found)).collect()
    };
    assert_eq!(
        words(&plan(&inventory, &intent)),
        [
            "eth1: tenant gone, which host.toml names for this NIC, does not run",
            "eth1: there is no receive queue 7, it has 2 (numbered from 0)",
            "eth9: there is no such interface",
        ]
    );
    // Discovery sees the RT VM on eth0 only; the configuration makes eth1 a shared NIC.
    assert_eq!(intent.nic_use(&inventory, inventory.nic("eth1").unwrap()), NicUse::Mixed(rt(1)));
    // A NAPI instance that serves queues of both classes runs at the more urgent class, and a finding reports it.
    inventory.nics[1].napis[0].rx_queues = vec![0, 1];
    intent.nics = BTreeMap::from([("eth1".to_owned(), config(&[(1, rt(0))], &[]))]);
    let found = plan(&inventory, &intent);
    assert_eq!(policies(&found)["napi/eth1-9193"], Policy::Fifo(49));
    assert!(words(&found).iter().any(|words| words.contains("serves queues of rt0 and bulk")), "{:?}", words(&found));
    // A driver that does not report which NAPI instance serves which queue.
    for napi in &mut inventory.nics[1].napis {
        napi.rx_queues.clear();
    }
    let found = words(&plan(&inventory, &intent));
    assert!(found.iter().any(|words| words.contains("does not say which NAPI")), "{found:?}");
}

#[test]
fn an_rt_nic_does_not_hold_its_interrupts_back() {
    let (mut inventory, intent) = two_vms();
    assert!(of_rule(&plan(&inventory, &intent), RuleId::Moderation).is_empty(), "a driver that does not say");
    for nic in &mut inventory.nics {
        nic.moderation = Some(Moderation { rx_usecs: 3, adaptive: None });
        nic.driver = Some("e1000e".to_owned());
    }
    let wanted = ("eth0 receive interrupt moderation".to_owned(), "rx-usecs 0".to_owned());
    assert_eq!(of_rule(&plan(&inventory, &intent), RuleId::Moderation), [wanted]);
    let needs_second_write = |inventory: &Inventory| {
        let settings = plan(inventory, &intent).settings;
        settings.into_iter().find(|set| set.rule == RuleId::Moderation).unwrap().needs_second_write
    };
    assert!(needs_second_write(&inventory), "e1000e may write its adaptive mode's last word after that");
    inventory.nics[0].driver = Some("igb".to_owned());
    assert!(!needs_second_write(&inventory));
    // Another driver's effect on its queues is unknown: one finding reports it, and none if nothing can be gained.
    inventory.nics[0].driver = Some("mlx5_core".to_owned());
    inventory.nics[0].moderation = Some(Moderation { rx_usecs: 8, adaptive: Some(true) });
    let found = plan(&inventory, &intent);
    assert!(of_rule(&found, RuleId::Moderation).is_empty());
    let finding = found.findings.iter().find(|finding| finding.rule == RuleId::Moderation).unwrap();
    assert!(finding.found.contains("held back (rx-usecs 8, adaptive)"), "{finding:?}");
    assert_eq!(finding.remedy, "run while it is idle: ethtool -C eth0 adaptive-rx off rx-usecs 0");
    inventory.nics[0].moderation = Some(Moderation { rx_usecs: 0, adaptive: Some(false) });
    assert!(refusals(&plan(&inventory, &intent), RuleId::Moderation).is_empty());
}

#[test]
fn every_rule_is_a_row_of_the_docs_and_says_where_its_cost_is_from() {
    let docs = include_str!("../../../docs/reference/hostnet.md");
    for rule in RULES {
        assert!(docs.contains(&format!("\n| `{}` | ", rule.id)), "docs/reference/hostnet.md has no row {}", rule.id);
        assert!(rule.id == RuleId::HostConfig || !rule.cost.source.is_empty(), "{}: whose figure is it?", rule.id);
        // Each row has a rank; a figure of three is in it.
        let us = rule.cost.text.replace(',', "");
        let threes = us.split_whitespace().filter_map(|word| word.trim_end_matches(';').rsplit_once('/'));
        let largest = threes.filter_map(|(_, last)| last.parse::<u32>().ok()).max().unwrap_or(1);
        assert!(rule.cost.delay_us >= largest, "{}: {} us", rule.id, rule.cost.delay_us);
    }
}

#[test]
fn packets_of_vms_that_rt_packets_wait_for_come_one_by_one_where_softirqs_share_a_lock() {
    let (mut inventory, mut intent) = two_vms();
    assert!(of_rule(&plan(&inventory, &intent), RuleId::TapBatch).is_empty(), "7.2 has no such lock");
    inventory.kernel.version = (6, 12);
    let batches = |tap: &str, process| (format!("{tap} batches of packets, by process {process}"), "absent".to_owned());
    let found = plan(&inventory, &intent);
    assert_eq!(of_rule(&found, RuleId::TapBatch), [batches("tap2", 1_000_200)], "not the RT VM's");
    // A higher level also waits for the taps of a lower level. A method that leaves RT packets in softirqs gains
    // nothing.
    intent.tenants[1].class = rt(3);
    assert_eq!(of_rule(&plan(&inventory, &intent), RuleId::TapBatch).len(), 1);
    assert!(
        of_rule(&plan(&inventory, &Intent { method: Method::Threaded, ..intent.clone() }), RuleId::TapBatch).is_empty()
    );
    intent.tenants[1].class = intent.tenants[0].class;
    assert!(of_rule(&plan(&inventory, &intent), RuleId::TapBatch).is_empty(), "all are of the highest level");
    intent.tenants[1].class = Class::Bulk;
    // A macvtap's driver disables softirqs for one packet at a time.
    let kinds = |inventory: &mut Inventory, kind: &str| {
        inventory.nics.iter_mut().filter(|nic| nic.id.name == "tap2").for_each(|nic| nic.kind = Some(kind.to_owned()));
    };
    kinds(&mut inventory, "macvtap");
    assert!(of_rule(&plan(&inventory, &intent), RuleId::TapBatch).is_empty());
    kinds(&mut inventory, "tun");
    // QEMU itself sends packets one by one.
    let mut emulated = intent.clone();
    emulated.tenants[1].threads.retain(|thread| thread.role != ThreadRole::Vhost);
    assert!(of_rule(&plan(&inventory, &emulated), RuleId::TapBatch).is_empty());
    for (realtime, version) in [(false, (6, 12)), (true, (6, 18))] {
        (inventory.kernel.realtime, inventory.kernel.version) = (realtime, version);
        assert!(of_rule(&plan(&inventory, &intent), RuleId::TapBatch).is_empty(), "no such lock");
    }
}

#[test]
fn polls_that_rt_packets_wait_for_are_short_where_softirqs_share_a_lock() {
    let (mut inventory, mut intent) = two_vms();
    inventory.sysctls.insert("net/core/dev_weight".to_owned(), "64".to_owned());
    let with_module = |inventory: &mut Inventory| {
        for nic in &mut inventory.nics {
            nic.napi_weight = Some("default".to_owned());
        }
    };
    assert!(of_rule(&plan(&inventory, &intent), RuleId::NapiWeight).is_empty(), "7.2 has no such lock");
    inventory.kernel.version = (6, 12);
    let found = plan(&inventory, &intent);
    let backlog = ("/proc/sys/net/core/dev_weight".to_owned(), "4".to_owned());
    assert_eq!(of_rule(&found, RuleId::NapiWeight), std::slice::from_ref(&backlog));
    let finding = found.findings.iter().find(|finding| finding.rule == RuleId::NapiWeight).unwrap();
    assert!(finding.remedy.contains("modprobe ontime_napi"), "{finding:?}");
    with_module(&mut inventory);
    let bulk = |weight: &str| ("eth1 ontime/napi_weight".to_owned(), weight.to_owned());
    let found = plan(&inventory, &intent);
    assert_eq!(
        of_rule(&found, RuleId::NapiWeight),
        [backlog, bulk("4")],
        "not the RT NIC's, nor a tap's, which has none"
    );
    assert!(refusals(&found, RuleId::NapiWeight).is_empty());
    // A higher level also waits for a NIC of a lower level.
    intent.bulk_napi_weight = Some(8);
    intent.nics.insert("eth1".to_owned(), NicConfig { class: Some(rt(3)), ..NicConfig::default() });
    assert!(of_rule(&plan(&inventory, &intent), RuleId::NapiWeight).contains(&bulk("8")));
    // Without PREEMPT_RT there is no such lock; without RT tenants nothing waits.
    inventory.kernel.realtime = false;
    assert!(of_rule(&plan(&inventory, &intent), RuleId::NapiWeight).is_empty());
    inventory.kernel.realtime = true;
    intent.nics.clear();
    intent.tenants.clear();
    assert!(of_rule(&plan(&inventory, &intent), RuleId::NapiWeight).is_empty());
    // Kernels that the module does not support.
    let (mut inventory, intent) = two_vms();
    inventory.kernel.version = (6, 16);
    let found = plan(&inventory, &intent);
    let finding = found.findings.iter().find(|finding| finding.rule == RuleId::NapiWeight).unwrap();
    assert_eq!(finding.remedy, "boot a kernel of 6.18 or later (Debian: from backports)");
}

#[test]
fn a_shared_nic_keeps_its_last_transmit_queue_for_rt() {
    let (inventory, intent) = mixed(4);
    let found = plan(&inventory, &intent);
    let settings = of_rule(&found, RuleId::RtTxQueue);
    let last = settings.iter().find(|(knob, _)| knob == "eth0 XPS CPUs of transmit queue 3").unwrap();
    assert_eq!(last.1, "no CPU");
    let mut covered: Vec<u32> = Vec::new();
    for setting in &found.settings {
        if let (Knob::XpsCpus { queue: 0..=2, .. }, Value::Cpus(cpus)) = (&setting.knob, &setting.value) {
            covered.extend(cpus.iter());
        }
    }
    covered.sort_unstable();
    assert_eq!(covered, (0..fleet::CPUS).collect::<Vec<_>>(), "every CPU has one other queue");
    let filters = ["eth0 clsact qdisc", "eth0 filter: from tap1 to transmit queue 3"];
    let first: Vec<_> = settings.iter().take(2).map(|(knob, _)| knob.as_str()).collect();
    assert_eq!(first, filters);
    // No filter if another qdisc is in clsact's place, and no reserved queue without a filter that uses it.
    let needs = |setting: &Setting| setting.needs.iter().map(ToString::to_string).collect::<Vec<_>>();
    for setting in found.settings.iter().filter(|setting| setting.rule == RuleId::RtTxQueue) {
        let wanted = match setting.knob {
            Knob::TxSteer { .. } => &filters[..1],
            Knob::XpsCpus { .. } => &filters[..],
            _ => &[],
        };
        assert_eq!(needs(setting), wanted, "{}", setting.knob);
    }
    assert_eq!(policies(&found)["irq/100-eth0-TxRx-0"], Policy::BULK_DRIVER);
    let critical = found.findings.iter().find(|finding| finding.severity == Severity::Critical).unwrap();
    assert!(critical.found.contains("received by the same queues"));
}

#[test]
fn a_macvtap_is_known_by_its_address() {
    let (mut inventory, mut intent) = mixed(2);
    inventory.nics.push(Nic {
        id: NicId { ifindex: 77, name: "macvtap0".to_owned() },
        kind: Some("macvtap".to_owned()),
        mac: Some([0x52, 0x54, 0, 9, 8, 7]),
        link: Some(2),
        ..Nic::default()
    });
    intent.tenants[0].vnics = vec![Vnic { ifname: "macvtap0".to_owned(), ..Vnic::default() }];
    let found = plan(&inventory, &intent);
    let steer = Knob::TxSteer {
        nic: NicId { ifindex: 2, name: "eth0".to_owned() },
        queue: 1,
        from: SteerFrom::SourceMac([0x52, 0x54, 0, 9, 8, 7]),
    };
    assert!(found.settings.iter().any(|setting| setting.knob == steer), "{found:?}");
}

#[test]
fn a_containers_macvlan_is_its_nics_tenant_and_known_by_its_address() {
    let (inventory, mut intent) = mixed(2);
    let mac = [0x02, 0, 0, 0, 0, 7];
    let attached = |mac| Attached { name: "eth0".to_owned(), mac, lower: vec!["eth0".to_owned()], below: Vec::new() };
    let container = &mut intent.tenants[0];
    (container.kind, container.vnics) = (Kind::Container, Vec::new());
    container.attached = vec![attached(Some(mac))];
    let nic = inventory.nic("eth0").unwrap();
    assert_eq!(intent.nic_use(&inventory, nic), NicUse::Mixed(rt(0)));
    let filters = |intent: &Intent| -> Vec<SteerFrom> {
        let knobs = plan(&inventory, intent).settings.into_iter().map(|setting| setting.knob);
        knobs.filter_map(|knob| if let Knob::TxSteer { from, .. } = knob { Some(from) } else { None }).collect()
    };
    assert_eq!(filters(&intent), [SteerFrom::SourceMac(mac)]);
    // An ipvlan has the address of its NIC, as all packets there.
    intent.tenants[0].attached = vec![attached(None)];
    assert!(filters(&intent).is_empty());
    let found = plan(&inventory, &intent);
    assert!(of_rule(&found, RuleId::RtTxQueue).is_empty());
    assert!(refusals(&found, RuleId::RtTxQueue).contains(&Refusal::Device));
    intent.tenants.truncate(1);
    assert_eq!(intent.nic_use(&inventory, nic), NicUse::Derived(rt(0)));
    assert!(said(&inventory, &intent).is_empty());
}

#[test]
fn a_nic_that_cannot_be_shared_live_is_a_finding_with_a_remedy() {
    type Spoil = fn(&mut Inventory);
    let one_queue: Spoil = |inventory| inventory.nics[0].tx_queues.truncate(1);
    let root_qdisc: Spoil = |inventory| inventory.nics[0].qdisc = Some("fq_codel".to_owned());
    let mqprio: Spoil = |inventory| inventory.nics[0].qdisc = Some("mqprio".to_owned());
    let no_xps: Spoil = |inventory| inventory.nics[0].tx_queues[0].xps_cpus = None;
    let old_kernel: Spoil = |inventory| inventory.kernel.version = (5, 18);
    for (spoil, refusal) in [
        (one_queue, Refusal::Device),
        (root_qdisc, Refusal::NotLiveSafe),
        (mqprio, Refusal::NotLiveSafe),
        (no_xps, Refusal::Device),
        (old_kernel, Refusal::Kernel),
    ] {
        let (mut inventory, intent) = mixed(4);
        spoil(&mut inventory);
        let found = plan(&inventory, &intent);
        assert!(of_rule(&found, RuleId::RtTxQueue).is_empty());
        assert!(refusals(&found, RuleId::RtTxQueue).contains(&refusal), "{found:?}");
        assert!(found.findings.iter().all(|finding| !finding.remedy.is_empty()));
    }
}

#[test]
fn protections_go_off_only_under_caps_and_never_under_lockdown() {
    let (inventory, intent) = two_vms();
    let off = plan(&inventory, &intent);
    let settings = of_rule(&off, RuleId::RtProtections);
    assert_eq!(settings.len(), 2 * fleet::CPUS as usize);
    assert!(settings.contains(&("/sys/kernel/debug/sched/fair_server/cpu63/runtime".to_owned(), "0".to_owned())));
    // The protections are switched off last.
    assert_eq!(off.settings.last().unwrap().rule, RuleId::RtProtections);

    let uncapped = plan(&inventory, &Intent { caps_in_force: false, ..intent.clone() });
    assert!(of_rule(&uncapped, RuleId::RtProtections).is_empty());
    assert_eq!(refusals(&uncapped, RuleId::RtProtections), [Refusal::NoCaps]);

    for lockdown in [Lockdown::Integrity, Lockdown::Confidentiality] {
        let kernel = Kernel { lockdown, ..inventory.kernel.clone() };
        let locked = plan(&Inventory { kernel, ..inventory.clone() }, &intent);
        assert!(of_rule(&locked, RuleId::RtProtections).is_empty());
        assert_eq!(refusals(&locked, RuleId::RtProtections), [Refusal::Lockdown]);
    }
    // 6.12 refuses to stop a server while there is a limit. The limit is therefore removed first, and restored last.
    let kernel = Kernel { version: (6, 12), ..inventory.kernel.clone() };
    let settings = of_rule(&plan(&Inventory { kernel, ..inventory.clone() }, &intent), RuleId::RtProtections);
    assert_eq!(settings.len(), 1 + 2 * fleet::CPUS as usize);
    assert_eq!(settings[0], ("/proc/sys/kernel/sched_rt_runtime_us".to_owned(), "-1".to_owned()));
    // A host that panics at a warning, which these kernels may give for an isolated CPU, keeps them.
    let refused = |version, panic_on_warn: &str, isolated| {
        let mut host = Inventory { kernel: Kernel { version, ..inventory.kernel.clone() }, ..inventory.clone() };
        host.sysctls.insert("kernel/panic_on_warn".to_owned(), panic_on_warn.to_owned());
        host.cpus.isolated = isolated;
        let found = plan(&host, &intent);
        assert_eq!(
            of_rule(&found, RuleId::RtProtections).is_empty(),
            !refusals(&found, RuleId::RtProtections).is_empty()
        );
        refusals(&found, RuleId::RtProtections)
    };
    let three = CpuSet::from_list("3").unwrap();
    assert_eq!(refused((6, 12), "1", three.clone()), [Refusal::NotLiveSafe]);
    assert!(refused((6, 12), "0", three.clone()).is_empty());
    assert!(refused((6, 12), "1", CpuSet::default()).is_empty());
    assert!(refused((6, 18), "1", three).is_empty());
    // Before the fair server there was RT throttling, under the same condition.
    let kernel = Kernel { version: (6, 1), ..inventory.kernel.clone() };
    let old = Inventory { kernel, protections: Default::default(), ..inventory };
    assert!(of_rule(&plan(&old, &intent), RuleId::RtProtections).is_empty(), "nothing is known of throttling");
    let mut old = old;
    old.protections.rt_runtime_us = Some(950_000);
    let throttled = plan(&old, &intent);
    assert_eq!(
        of_rule(&throttled, RuleId::RtProtections),
        [("/proc/sys/kernel/sched_rt_runtime_us".to_owned(), "-1".to_owned())]
    );
    let uncapped = plan(&old, &Intent { caps_in_force: false, ..intent });
    assert_eq!(refusals(&uncapped, RuleId::RtProtections), [Refusal::NoCaps]);
}

#[test]
fn old_kernels_degrade_with_a_finding() {
    let (mut inventory, intent) = two_vms();
    inventory.kernel = Kernel { release: "5.10".to_owned(), version: (5, 10), ..Kernel::default() };
    for nic in &mut inventory.nics {
        nic.threaded = None;
    }
    inventory.sysctls.clear();
    let found = plan(&inventory, &intent);
    assert_eq!(refusals(&found, RuleId::NapiThreaded), [Refusal::Kernel; 2]);
    assert_eq!(refusals(&found, RuleId::IrqThread), [Refusal::Kernel]);
    assert!(of_rule(&found, RuleId::SkbDefer).is_empty() && of_rule(&found, RuleId::SoftirqThreads).is_empty());
}

#[test]
fn a_polling_napi_is_left_as_it_is() {
    let (mut inventory, intent) = two_vms();
    inventory.nics[0].threaded = Some(2);
    for napi in &mut inventory.nics[0].napis {
        napi.threaded = Some(2);
    }
    let found = plan(&inventory, &intent);
    assert!(!found.settings.iter().any(|setting| setting.knob.to_string().starts_with("eth0 threaded")));
    assert!(!policies(&found).contains_key("napi/eth0-8193"));
    assert!(found.findings.iter().any(|finding| finding.found.contains("polls without interrupts")));
}

#[test]
fn an_interrupt_shared_by_two_classes_is_a_finding() {
    let (mut inventory, intent) = two_vms();
    inventory.nics[1].irqs.push(100);
    let found = plan(&inventory, &intent);
    assert_eq!(policies(&found)["irq/100-eth0-TxRx-0"], Policy::Fifo(45));
    let said = found.findings.iter().find(|finding| finding.found.contains("eth0 (rt1), eth1 (bulk)")).unwrap();
    assert!(said.found.contains("interrupt that is shared by"), "{}", said.found);
    // The order of the NICs makes no difference.
    inventory.nics[1].irqs.clear();
    inventory.nics[0].irqs.extend([1_100, 1_101]);
    let found = plan(&inventory, &intent);
    assert_eq!(policies(&found)["irq/1100-eth1-TxRx-0"], Policy::Fifo(45));
}

#[test]
fn a_hundred_vms_are_planned_without_contradiction() {
    let (inventory, intent) = hundred_vms();
    for &method in Method::ALL {
        let found = plan(&inventory, &Intent { method, exclusive_cpu: Some(1), ..intent.clone() });
        let keys: std::collections::BTreeSet<_> = found.settings.iter().map(|setting| setting.knob.key()).collect();
        assert_eq!(keys.len(), found.settings.len());
        assert!(found.settings.is_sorted_by_key(|setting| setting.stage));
        assert!(!found.findings.iter().any(|finding| finding.remedy.contains("claimed twice")), "{:?}", found.findings);
    }
    let found = plan(&inventory, &intent);
    assert_eq!(of_rule(&found, RuleId::IrqThread).len(), 64);
    assert_eq!(of_rule(&found, RuleId::NapiThread).len(), 64);
    assert_eq!(of_rule(&found, RuleId::VcpuPlace).len(), 10 * 4);
    assert_eq!(of_rule(&found, RuleId::VnicPlace).len(), 10 * 2);
}

#[test]
fn every_rule_is_complete_and_belongs_to_a_method() {
    for rule in RULES {
        for text in [rule.title, rule.waits_behind, rule.cost.text, rule.cure, rule.live_safe] {
            assert!(!text.is_empty(), "{}", rule.id);
        }
        assert!(rule.live_safe.contains(".c") || rule.id == RuleId::VcpuPlace, "{} names no kernel file", rule.id);
        assert!(Method::ALL.iter().any(|method| method.has(rule.id)), "{} is in no method", rule.id);
        assert_eq!(rules::rule(rule.id).unwrap().id, rule.id);
    }
    let ids: std::collections::BTreeSet<RuleId> = RULES.iter().map(|rule| rule.id).collect();
    assert_eq!(ids.len(), RULES.len(), "a rule has two rows");
}

#[test]
fn levels_stay_apart_down_to_the_last() {
    let mut inventory = host(9, 1, true);
    let tenants = (0..9).map(|level| vm(&mut inventory, level.into(), rt(level), 1, &format!("eth{level}"))).collect();
    let intent = Intent { tenants, table: PriorityTable::default(), ..Intent::default() };
    let found = policies(&plan(&inventory, &intent));
    for level in 0..9u8 {
        let irq = found.iter().find(|(comm, _)| comm.contains(&format!("-eth{level}-TxRx-0"))).unwrap();
        assert_eq!(*irq.1, Policy::Fifo(50 - 5 * level));
    }
}

/// A host whose knobs all have other values.
struct Otherwise;

impl Host for Otherwise {
    fn read(&self, _: &Knob) -> Result<Value, KnobError> {
        Ok(Value::Policy(Policy::Idle))
    }

    fn write(&self, knob: &Knob, _: &Value) -> Result<(), KnobError> {
        Err(KnobError::Unsupported { knob: knob.to_string(), why: "read only".to_owned() })
    }
}

#[test]
fn what_the_kernel_does_by_itself_is_told_with_its_remedy() {
    let (mut inventory, intent) = two_vms();
    let probe = kvm::KvmProbe::Unknown("not asked".to_owned());
    let check = |inventory: &Inventory, id: &str| {
        let found = examine(&Otherwise, inventory, &intent, &[], &Refused::new(), &probe.clone().into());
        found.checks.into_iter().find(|check| check.id == id).unwrap()
    };
    assert_eq!(check(&inventory, "guest-memory").state, State::Ok);
    assert_eq!(check(&inventory, "kvm-upkeep").state, State::Ok);
    assert_eq!(check(&inventory, "pressure").state, State::Ok);
    inventory.memory.balanced = true;
    inventory.kvm.clock_sync = true;
    inventory.kernel.pressure = true;
    let pressure = check(&inventory, "pressure");
    assert!(pressure.state == State::Warning && pressure.remedy.contains("psi=0"), "{pressure:?}");
    let (memory, upkeep) = (check(&inventory, "guest-memory"), check(&inventory, "kvm-upkeep"));
    assert_eq!((memory.state, upkeep.state), (State::Warning, State::Warning));
    assert!(memory.remedy.contains("kernel.numa_balancing=0") && !memory.remedy.contains("ksm"), "{memory:?}");
    assert!(upkeep.remedy.contains("options kvm kvmclock_periodic_sync=0'"), "{upkeep:?}");
    assert!(!memory.ontime_can_apply && !upkeep.ontime_can_apply);
}

#[test]
fn how_an_rt_vms_qemu_was_started_is_told_with_its_remedy() {
    let (inventory, intent) = two_vms();
    let probe = kvm::KvmProbe::Unknown("not asked".to_owned());
    let check = |problems: &[Problem]| {
        let found = examine(&Otherwise, &inventory, &intent, problems, &Refused::new(), &probe.clone().into());
        found.checks.into_iter().find(|check| check.id == "vmm-settings").unwrap()
    };
    let problem = |kind| Problem { subject: "vm1".to_owned(), kind };
    assert_eq!(check(&[problem(ProblemKind::SameName)]).state, State::Ok);
    let found = check(&[
        problem(ProblemKind::Delay(Delay::HiddenIdle)),
        problem(ProblemKind::Delay(Delay::NoVectors("virtio-net-pci".to_owned()))),
    ]);
    assert!(found.state == State::Warning && !found.ontime_can_apply, "{found:?}");
    assert!(
        found.found.contains("vm1: ") && found.found.contains("cpu-pm=on") && found.found.contains("vectors=0"),
        "{found:?}"
    );
    assert!(found.remedy.contains("-overcommit") && found.remedy.contains("-device virtio-net-pci"), "{found:?}");
}

#[test]
fn what_a_daemon_could_not_set_is_not_promised() {
    let (inventory, intent) = two_vms();
    let probe = kvm::KvmProbe::Unknown("not asked".to_owned());
    let check = |refused: &Refused| {
        let found = examine(&Otherwise, &inventory, &intent, &[], refused, &probe.clone().into());
        found.checks.into_iter().find(|check| check.id == "napi-threaded").unwrap()
    };
    let without = check(&Refused::new());
    assert!(without.ontime_can_apply && without.state == State::Critical, "{without:?}");
    let all = plan(&inventory, &intent).settings;
    let knobs: Vec<String> =
        all.iter().filter(|set| set.rule == RuleId::NapiThreaded).map(|set| set.knob.to_string()).collect();
    let refused = |knobs: &[String]| knobs.iter().map(|knob| (knob.clone(), "it says no".to_owned())).collect();
    let with = check(&refused(&knobs));
    assert!(!with.ontime_can_apply && with.state == State::Critical, "{with:?}");
    assert!(with.found.contains("could not set: it says no"), "{with:?}");
    assert!(check(&refused(&knobs[1..])).ontime_can_apply, "one is left that it can set");
}

#[test]
fn reserved_cpu_time_is_no_lack() {
    let (inventory, mut intent) = two_vms();
    let probe = kvm::KvmProbe::Unknown("not asked".to_owned());
    let check = |intent: &Intent, id: &str| {
        let found = examine(&Otherwise, &inventory, intent, &[], &Refused::new(), &probe.clone().into());
        found.checks.into_iter().find(|check| check.id == id).unwrap()
    };
    intent.caps_in_force = false;
    let (places, protections) = (check(&intent, "vcpu-place"), check(&intent, "rt-protections"));
    assert_eq!((places.state, protections.state), (State::Warning, State::Warning));
    // The component that provides the reservation changes these threads, and no protection is switched off beside it.
    let vcpus = intent.tenants[0].threads.iter().filter(|thread| matches!(thread.role, ThreadRole::Vcpu(_)));
    intent.reserved = vcpus.map(|thread| (thread.id, Policy::BULK)).collect();
    let (places, protections) = (check(&intent, "vcpu-place"), check(&intent, "rt-protections"));
    assert_eq!((places.state, protections.state), (State::Ok, State::Ok), "{places:?} {protections:?}");
    assert!(protections.found.contains("reserved"), "{protections:?}");
}

#[test]
fn a_remedy_names_the_table_as_the_file_has_to() {
    for (name, altnames, configured, wanted) in [
        ("eth0", &[][..], &[][..], "nic.eth0"),
        ("lan.1", &[], &[], "nic.\"lan.1\""),
        ("eno1", &["enp0s31f6", "mac-bond"], &["enp0s31f6"], "nic.enp0s31f6"),
        ("eno1", &["enp0s31f6"], &["eno1", "enp0s31f6"], "nic.eno1"),
        ("eno1", &["up:1"], &["up:1"], "nic.\"up:1\""),
    ] {
        let id = NicId { ifindex: 2, name: name.to_owned() };
        let nic = Nic { id, altnames: altnames.iter().map(ToString::to_string).collect(), ..Nic::default() };
        let nics = configured.iter().map(|name| ((*name).to_owned(), NicConfig::default())).collect();
        let table = Intent { nics, ..Intent::default() }.table_of(&nic);
        assert_eq!(table, wanted);
        let file = format!("[{table}]\nclass = \"rt\"\n").parse::<toml::Table>().unwrap();
        let given = file["nic"].as_table().unwrap().keys().next().unwrap();
        assert!(given == name || altnames.contains(&given.as_str()), "{table}");
    }
}
