//! Every finding and every row of `ontime doctor` names the thing, the cause and the remedy.
//!
//! The tables below make each kind once. `found_by` is exhaustive: a new rule needs an arm. `SITES` has the number of
//! places at which rules make findings: a new one needs a case.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // a test that cannot go on fails

#[path = "support/fleet.rs"]
mod fleet;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fleet::{mixed, rt, two_vms};
use ontime_hostnet::doctor::Refused;
use ontime_hostnet::inventory::{Conflict, CpuManager, IdleState, Irq, KernelThread, KernelThreadKind, Lockdown, Nic};
use ontime_hostnet::kvm::KvmProbe;
use ontime_hostnet::{
    Check, CpuSet, Finding, Host, Intent, Inventory, IrqId, Knob, KnobError, Method, Moderation, NicConfig, NicId,
    Obstacle, Probes, RULES, RuleId, Severity, SmiCount, State, Value, examine,
};
use ontime_tenants::vmm::Delay;
use ontime_tenants::{Class, Policy, Problem, ProblemKind, ThreadId, ThreadRole};

/// Words that tell the reader to do something, and programs that a remedy may begin with.
const ORDERS: &str = "run boot give take write name correct set look place rename make leave keep lower raise pin \
    remove install load use start find choose mount lock isolate end echo sysctl systemctl cpupower \
    ethtool chrt tc turn see free wait nothing allow let switch move put report add";
/// Words that name no thing.
const VAGUE: [&str; 6] = ["somebody", "someone", "nobody", "anybody", "whoever", "whatever"];

fn tells_what_to_do(remedy: &str) -> bool {
    let first = remedy.split(|c: char| !c.is_ascii_alphabetic()).next().unwrap_or_default();
    let mut words = remedy.split(|c: char| !c.is_ascii_alphabetic());
    !["a", "an", "the", "one", "more", "it"].contains(&first)
        && words.any(|word| ORDERS.split(' ').any(|order| order == word))
}

/// What is wrong with a text.
fn faults(text: &str) -> Vec<String> {
    let words: Vec<&str> = text.split(|c: char| !c.is_ascii_alphabetic()).collect();
    let vague = VAGUE.iter().filter(|word| words.contains(word)).map(|word| format!("{text:?} says {word}"));
    let typo = ["  ", ": ;", "; ;"].iter().any(|typo| text.contains(typo)) || text.ends_with([' ', ';', ':', ',']);
    vague.chain(typo.then(|| format!("{text:?} has a typing error"))).collect()
}

fn faults_of(finding: &Finding) -> Vec<String> {
    let Finding { object, found, remedy, .. } = finding;
    let mut faults = faults(&format!("{object}: {found}; {remedy}"));
    for (is_wrong, what) in [
        (object.is_empty(), "no object"),
        (found.len() < 11, "no cause"),
        (!tells_what_to_do(remedy), "no remedy"),
        (found.len() + remedy.len() > 520, "too many words"),
    ] {
        faults.extend(is_wrong.then(|| format!("{finding:?} has {what}")));
    }
    faults
}

type Setup = fn(&mut Inventory, &mut Intent);

/// Two VMs on a NIC each, an RT and a bulk one, with a change.
fn apart(change: Setup) -> (Inventory, Intent) {
    let (mut inventory, mut intent) = two_vms();
    change(&mut inventory, &mut intent);
    (inventory, intent)
}

/// An RT and a bulk VM on one NIC, with a change.
fn together(change: Setup) -> (Inventory, Intent) {
    let (mut inventory, mut intent) = mixed(4);
    change(&mut inventory, &mut intent);
    (inventory, intent)
}

fn configure(intent: &mut Intent, nic: &str, config: NicConfig) {
    intent.nics.insert(nic.to_owned(), config);
}

fn kept_queue() -> NicConfig {
    NicConfig { queues: [(0, rt(0))].into(), ..NicConfig::default() }
}

fn of_class(class: Class) -> NicConfig {
    NicConfig { class: Some(class), ..NicConfig::default() }
}

fn cpus(text: &str) -> CpuSet {
    CpuSet::from_list(text).unwrap()
}

/// An interrupt of a device other than the NICs', and its thread.
fn device_interrupt(inventory: &mut Inventory, action: &str, network: bool, policy: Policy) {
    inventory.irqs.push(Irq {
        id: IrqId { irq: 9000, chip: "PCI-MSIX".to_owned(), hwirq: "1".to_owned() },
        actions: vec![action.to_owned()],
        affinity: cpus("0"),
        settable: true,
        device: network.then(|| "0000:09:00.0".to_owned()),
        network,
        virtual_of: network.then(|| "0000:09:00.1".to_owned()),
        elsewhere: None,
    });
    let id = ThreadId { pid: 9001, tid: 9001, start_time: 4 };
    let comm = format!("irq/9000-{action}");
    inventory.threads.push(KernelThread { id, kind: KernelThreadKind::Irq(9000), comm, policy });
}

/// A host whose only CPU the RT NIC is to poll on, or not.
fn one_cpu(inventory: &mut Inventory, intent: &mut Intent, poll_cpu: Option<u32>) {
    inventory.cpus.online = cpus("0");
    intent.method = Method::Busypoll;
    configure(intent, "eth0", NicConfig { poll_cpu, ..NicConfig::default() });
}

/// Per rule: the object of a finding, a part of its text, and a host that has it.
fn found_by(rule: RuleId) -> Vec<(&'static str, &'static str, (Inventory, Intent))> {
    match rule {
        RuleId::HostConfig => host_config(),
        RuleId::NapiThreaded => vec![
            ("eth0", "cannot thread NAPI", apart(|inventory, _| inventory.nics[0].threaded = None)),
            (
                "eth0",
                "2 NAPI threads do not exist yet; once made they get FIFO 44",
                apart(|inventory, _| {
                    inventory.nics[0].threaded = Some(0);
                    inventory.nics[0].napis.iter_mut().for_each(|napi| napi.pid = None);
                    inventory.threads.retain(|thread| !matches!(thread.kind, KernelThreadKind::Napi(_)));
                }),
            ),
            (
                "eth0",
                "does not list its NAPI instances",
                apart(|inventory, _| {
                    inventory.kernel.version = (6, 1);
                    (inventory.nics[0].threaded, inventory.nics[0].napis) = (Some(0), Vec::new());
                }),
            ),
        ],
        RuleId::IrqThread => vec![
            ("eth0", "handles an interrupt that is shared by", apart(|inventory, _| inventory.nics[1].irqs.push(100))),
            (
                "irq/1100-eth1",
                "is of eth1 (bulk) and of network controller 1-6:1.0",
                apart(|inventory, _| {
                    let irq = inventory.irqs.iter_mut().find(|irq| irq.id.irq == 1100).unwrap();
                    irq.elsewhere = Some("1-6:1.0".to_owned());
                }),
            ),
            ("eth0", "no interrupt is known", apart(|inventory, _| inventory.nics[0].irqs.clear())),
            ("kernel", "run above every thread", apart(|inventory, _| inventory.kernel.threaded_irqs = false)),
        ],
        RuleId::NapiThread => vec![
            (
                "eth0",
                "has a name that this kernel cut",
                apart(|inventory, _| inventory.nics[1].napis[0].pid = inventory.nics[0].napis[0].pid),
            ),
            ("eth0", "polls without", apart(|inventory, _| inventory.nics[0].napis[0].threaded = Some(2))),
            (
                "eth0",
                "which have names of interfaces that are not here",
                apart(|inventory, _| {
                    inventory.kernel.version = (6, 1);
                    inventory.nics[0].napis.clear();
                }),
            ),
            (
                "eth0",
                "they have the name and the place of another interface",
                apart(|inventory, _| {
                    // Another NIC has its earlier name.
                    inventory.kernel.version = (6, 1);
                    let napis = std::mem::take(&mut inventory.nics[0].napis);
                    inventory.nics[1].napis.extend(napis);
                }),
            ),
        ],
        RuleId::Veth => vec![(
            "tap1",
            "GRO gives it NAPI instances; their threads get FIFO 44 once made",
            apart(|inventory, _| {
                let tap = inventory.nics.iter_mut().find(|nic| nic.id.name == "tap1").unwrap();
                tap.kind = Some("veth".to_owned());
            }),
        )],
        RuleId::NapiWeight => vec![
            ("kernel", "ontime_napi is not loaded", apart(|inventory, _| inventory.kernel.version = (6, 12))),
            ("kernel", "ontime_napi is not loaded", apart(|inventory, _| inventory.kernel.version = (6, 16))),
        ],
        RuleId::DeviceIrq => device_irq(),
        RuleId::BusyPoll => busy_poll(),
        RuleId::Moderation => vec![(
            "eth0",
            "are held back",
            apart(|inventory, _| {
                inventory.nics[0].moderation = Some(Moderation { rx_usecs: 50, adaptive: Some(true) });
            }),
        )],
        RuleId::ExclusiveCpu => exclusive(),
        RuleId::RtTxQueue => rt_tx_queue(),
        RuleId::QdiscBypass => {
            fn bypass(inventory: &mut Inventory, intent: &mut Intent) {
                inventory.nics[0].tx_queues.truncate(1);
                intent.method = Method::Vatc;
                configure(intent, "eth0", NicConfig { qdisc_bypass: true, ..NicConfig::default() });
            }
            vec![
                (
                    "eth0",
                    "root qdisc fq was set by",
                    together(|inventory, intent| {
                        bypass(inventory, intent);
                        inventory.nics[0].qdisc_by_others = Some("fq".to_owned());
                    }),
                ),
                (
                    "eth0",
                    "bulk tenant vm2 sends by it",
                    together(|inventory, intent| {
                        bypass(inventory, intent);
                        let tap = inventory.nics.iter_mut().find(|nic| nic.id.name == "tap2").unwrap();
                        tap.kind = Some("macvtap".to_owned());
                    }),
                ),
            ]
        }
        RuleId::RtProtections => vec![
            ("protections", "lockdown denies", apart(|inventory, _| inventory.kernel.lockdown = Lockdown::Integrity)),
            ("protections", "cannot be read", apart(|inventory, _| inventory.protections.readable = false)),
            (
                "protections",
                "panic_on_warn",
                apart(|inventory, _| {
                    inventory.kernel.version = (6, 12);
                    inventory.cpus.isolated = cpus("3");
                    inventory.sysctls.insert("kernel/panic_on_warn".to_owned(), "1".to_owned());
                }),
            ),
            ("protections", "are not in force", apart(|_, intent| intent.caps_in_force = false)),
            (
                "protections",
                "CPU time is reserved",
                apart(|_, intent| {
                    intent.caps_in_force = false;
                    intent.reserved = [(intent.tenants[0].threads[1].id, Policy::BULK)].into();
                }),
            ),
        ],
        // These only make settings.
        RuleId::TapBatch
        | RuleId::Backlog
        | RuleId::SoftirqThreads
        | RuleId::VcpuPlace
        | RuleId::VnicPlace
        | RuleId::VmmPlace
        | RuleId::InterruptContext
        | RuleId::SkbDefer
        | RuleId::HaltPoll => Vec::new(),
    }
}

fn host_config() -> Vec<(&'static str, &'static str, (Inventory, Intent))> {
    vec![
        ("napi-thread", "is switched off", apart(|_, intent| intent.without = [RuleId::NapiThread].into())),
        (
            "eth0",
            "does not run",
            apart(|_, intent| {
                configure(intent, "eth0", NicConfig { tenants: vec!["gone".to_owned()], ..NicConfig::default() });
            }),
        ),
        (
            "enp7s0f1",
            "is another name of eth1",
            apart(|inventory, intent| {
                inventory.nics[1].altnames = vec!["enp7s0f1".to_owned()];
                configure(intent, "eth1", of_class(rt(4)));
                configure(intent, "enp7s0f1", of_class(rt(1)));
            }),
        ),
        (
            "eth1",
            "no NAPI of its own: its packets pass eth0",
            apart(|inventory, intent| {
                (inventory.nics[1].carried, inventory.nics[1].lower) = (true, vec![2]);
                configure(intent, "eth1", of_class(rt(1)));
            }),
        ),
        (
            "bond0",
            "is of kind bond",
            apart(|inventory, intent| {
                let id = NicId { ifindex: 900, name: "bond0".to_owned() };
                inventory.nics.push(Nic { id, kind: Some("bond".to_owned()), ..Nic::default() });
                inventory.nics[1].controller = Some(900);
                configure(intent, "bond0", of_class(rt(1)));
            }),
        ),
        ("eth0", "only RT tenants use it", apart(|_, intent| configure(intent, "eth0", of_class(Class::Bulk)))),
        (
            "eth1",
            "there is no receive queue 7",
            apart(|_, intent| {
                configure(intent, "eth1", NicConfig { queues: [(7, rt(0))].into(), ..NicConfig::default() });
            }),
        ),
        (
            "eth1",
            "NAPI 9193 serves queues",
            apart(|inventory, intent| {
                inventory.nics[1].napis[0].rx_queues = vec![0, 1];
                configure(intent, "eth1", kept_queue());
            }),
        ),
        (
            "eth1",
            "interrupt 1100 wakes NAPI instances",
            apart(|inventory, intent| {
                inventory.nics[1].napis[1].irq = Some(1100);
                configure(intent, "eth1", kept_queue());
            }),
        ),
        (
            "eth1",
            "does not say which NAPI",
            apart(|inventory, intent| {
                inventory.nics[1].napis.iter_mut().for_each(|napi| napi.rx_queues.clear());
                configure(intent, "eth1", kept_queue());
            }),
        ),
        ("eth9", "there is no such interface", apart(|_, intent| configure(intent, "eth9", of_class(rt(0))))),
        ("eth1@if4", "there is no such interface", apart(|_, intent| configure(intent, "eth1@if4", of_class(rt(0))))),
        ("vm1", "leads to no NIC", apart(|_, intent| intent.tenants[0].vnics[0].lower.clear())),
        (
            "vm1",
            "is a port of Open vSwitch",
            apart(|inventory, intent| {
                intent.tenants[0].vnics[0].lower.clear();
                let id = NicId { ifindex: 3000, name: "ovs-system".to_owned() };
                inventory.nics.push(Nic { id, kind: Some("openvswitch".to_owned()), ..Nic::default() });
                let tap = inventory.nics.iter_mut().find(|nic| nic.id.name == "tap1").unwrap();
                tap.controller = Some(3000);
            }),
        ),
    ]
}

fn device_irq() -> Vec<(&'static str, &'static str, (Inventory, Intent))> {
    let fifo = Policy::Fifo(50);
    let of = move |action: &str, network, policy| {
        let (mut inventory, intent) = two_vms();
        device_interrupt(&mut inventory, action, network, policy);
        (inventory, intent)
    };
    let mut unknown = of("platform", false, fifo);
    unknown.0.nics[0].irqs.clear();
    let mut threadless = of("mlx5", true, fifo);
    threadless.0.threads.retain(|thread| thread.kind != KernelThreadKind::Irq(9000));
    vec![
        ("interrupt 9000", "and has no thread", threadless),
        ("irq/9000-vfio", "of a passed-through device", of("vfio-msix[0](0000:09:00.0)", false, fifo)),
        ("irq/9000-mlx5", "0000:09:00.0, a virtual function of 0000:09:00.1, which has no", of("mlx5", true, fifo)),
        ("irq/9000-mlx5", "which has no interface", of("mlx5", true, Policy::BULK)),
        ("irq/9000-platform", "may be that of eth0", unknown),
        ("irq/9000-ahci", "was placed by the administrator", of("ahci", false, Policy::Fifo(60))),
    ]
}

fn busy_poll() -> Vec<(&'static str, &'static str, (Inventory, Intent))> {
    let own = |poll_cpu| NicConfig { poll_cpu: Some(poll_cpu), ..NicConfig::default() };
    let named = |poll_cpu| {
        let (inventory, mut intent) = two_vms();
        intent.method = Method::Busypoll;
        configure(&mut intent, "eth0", own(poll_cpu));
        (inventory, intent)
    };
    let old = |version| {
        let (mut inventory, intent) = two_vms();
        inventory.kernel.version = version;
        (inventory, Intent { method: Method::Busypoll, ..intent })
    };
    let mut module = old((6, 12));
    module.0.nics[0].busy_poll = Some("0".to_owned());
    let to_come = module.clone();
    let config = NicConfig { queues: [(1, Class::Bulk)].into(), ..of_class(rt(0)) };
    configure(&mut module.1, "eth0", config);
    vec![
        ("eth0", "polls all of a NIC's queues", module),
        ("eth0", "its polling threads do not exist yet; once made they get FIFO 1", to_come),
        ("eth0", "has no polling NAPI threads", old((6, 12))),
        ("eth0", "has no polling NAPI threads", old((6, 16))),
        ("eth0", "polls on the only CPU", apart(|inventory, intent| one_cpu(inventory, intent, Some(0)))),
        ("eth0", "poll_cpu 8 is not online; does not", apart(|inventory, intent| one_cpu(inventory, intent, Some(8)))),
        ("eth0", "does not poll: on the only CPU", apart(|inventory, intent| one_cpu(inventory, intent, None))),
        ("eth0", "other threads may run on CPU 5", named(5)),
        ("eth0", "poll_cpu 99 is not online", named(99)),
        ("eth0", "has no CPU of its own", apart(|_, intent| intent.method = Method::Busypoll)),
    ]
}

fn exclusive() -> Vec<(&'static str, &'static str, (Inventory, Intent))> {
    let on = |cpu| {
        let (inventory, intent) = two_vms();
        (inventory, Intent { method: Method::Exclusive, exclusive_cpu: cpu, ..intent })
    };
    let mut single = on(Some(0));
    single.0.cpus.online = cpus("0");
    let mut pinned = on(Some(3));
    for tenant in &mut pinned.1.tenants {
        tenant.threads[1].libvirt.cpus = Some("2-3".to_owned());
        "2-3".clone_into(&mut tenant.threads[1].affinity);
    }
    vec![
        ("exclusive_cpu", "no CPU is named", on(None)),
        ("exclusive_cpu", "CPU 64 is not online", on(Some(64))),
        ("exclusive_cpu", "the host has one CPU", single),
        ("vm1 (CPU 0/KVM)", "libvirt pins it to CPUs 2-3", pinned.clone()),
        ("vm2 (CPU 0/KVM)", "libvirt pins it to CPUs 2-3", pinned),
    ]
}

fn rt_tx_queue() -> Vec<(&'static str, &'static str, (Inventory, Intent))> {
    vec![
        ("eth0", "does not let a filter choose", together(|inventory, _| inventory.kernel.version = (5, 18))),
        ("eth0", "one transmit queue", together(|inventory, _| inventory.nics[0].tx_queues.truncate(1))),
        ("eth0", "taprio assigns", together(|inventory, _| inventory.nics[0].qdisc = Some("taprio".to_owned()))),
        ("eth0", "is one queue", together(|inventory, _| inventory.nics[0].qdisc = Some("fq_codel".to_owned()))),
        ("eth0", "has no XPS", together(|inventory, _| inventory.nics[0].tx_queues[0].xps_cpus = None)),
        (
            "eth0",
            "nothing tells them apart",
            together(|inventory, _| {
                let tap = inventory.nics.iter_mut().find(|nic| nic.id.name == "tap1").unwrap();
                tap.kind = Some("ipvtap".to_owned());
            }),
        ),
        ("eth0", "receive queues 0 are kept", together(|_, intent| configure(intent, "eth0", kept_queue()))),
        ("eth0", "received by the same queues", together(|_, _| ())),
    ]
}

#[test]
fn every_kind_of_finding_names_its_object_the_cause_and_a_remedy() {
    let mut wrong = BTreeSet::new();
    for rule in RULES {
        for (object, words, (inventory, intent)) in found_by(rule.id) {
            let findings = (rule.plan)(&inventory, &intent).findings;
            wrong.extend(findings.iter().flat_map(faults_of));
            let Some(told) =
                findings.iter().find(|finding| finding.found.contains(words) && finding.object.starts_with(object))
            else {
                wrong.insert(format!("{}: {words:?} of {object} is not in {findings:?}", rule.id));
                continue;
            };
            if told.rule != rule.id {
                wrong.insert(format!("{told:?} is another rule's"));
            }
            if told.severity > Severity::Info && told.remedy.starts_with("nothing;") {
                wrong.insert(format!("{told:?} delays RT packets and asks for nothing"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.into_iter().collect::<Vec<_>>().join("\n"));
}

/// Files of rules, and how often each hands out a finding.
const SITES: [(&str, &str, usize); 17] = [
    ("busy_poll", include_str!("../src/rules/busy_poll.rs"), 6),
    ("device_irq", include_str!("../src/rules/device_irq.rs"), 5),
    ("exclusive", include_str!("../src/rules/exclusive.rs"), 2),
    ("host", include_str!("../src/rules/host.rs"), 5),
    ("host_config", include_str!("../src/rules/host_config.rs"), 12),
    ("interrupt_context", include_str!("../src/rules/interrupt_context.rs"), 0),
    ("moderation", include_str!("../src/rules/moderation.rs"), 1),
    ("napi_weight", include_str!("../src/rules/napi_weight.rs"), 1),
    ("nic_threads", include_str!("../src/rules/nic_threads.rs"), 9),
    ("qdisc_bypass", include_str!("../src/rules/qdisc_bypass.rs"), 1),
    ("tap_batch", include_str!("../src/rules/tap_batch.rs"), 0),
    ("tenant_threads", include_str!("../src/rules/tenant_threads.rs"), 0),
    ("tx_queue", include_str!("../src/rules/tx_queue.rs"), 7),
    ("veth", include_str!("../src/rules/veth.rs"), 1),
    ("mod", include_str!("../src/rules/mod.rs"), 0),
    ("senders", include_str!("../src/rules/senders.rs"), 0),
    ("threads", include_str!("../src/rules/threads.rs"), 0),
];

#[test]
fn a_rule_that_finds_more_needs_a_case_in_this_file() {
    for (name, text, wanted) in SITES {
        let sites = text.matches("findings.push(").count() + text.matches("findings.extend(").count();
        assert_eq!(sites, wanted, "rules/{name}.rs: add a case to `found_by`, then change the number here");
    }
    let files = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/src/rules")).unwrap();
    let files: BTreeSet<String> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    let listed: BTreeSet<String> = SITES.iter().map(|(name, ..)| format!("{name}.rs")).collect();
    assert_eq!(files, listed, "a file of rules is not in `SITES`");
}

/// What keeps a host's knobs from being as planned.
#[derive(Clone, Copy)]
enum Knobs {
    Unset,
    Unreadable,
    Fenced,
}

impl Host for Knobs {
    fn read(&self, knob: &Knob) -> Result<Value, KnobError> {
        match self {
            Knobs::Unreadable => {
                let source = std::io::Error::from_raw_os_error(5);
                Err(KnobError::Os { knob: knob.to_string(), what: "reading", source })
            }
            Knobs::Unset | Knobs::Fenced => Ok(Value::Text("otherwise".to_owned())),
        }
    }
    fn write(&self, knob: &Knob, _: &Value) -> Result<(), KnobError> {
        Err(KnobError::Gone(knob.to_string()))
    }
    fn foresee(&self, knob: &Knob, _: &Value) -> Option<Obstacle> {
        let lasting = matches!(knob, Knob::HostFile { .. });
        let (cause, remedy) = ("cgroup /x has no real-time budget".to_owned(), "give it one".to_owned());
        matches!(self, Knobs::Fenced).then_some(Obstacle { cause, remedy, lasting })
    }
}

fn problems() -> Vec<Problem> {
    let delays = [
        Delay::NoIrqchip,
        Delay::NoVectors("virtio-net-pci".to_owned()),
        Delay::NoDoorbell("virtio-blk-pci".to_owned()),
        Delay::HiddenIdle,
    ];
    let problem = |delay| Problem { subject: "vm1".to_owned(), kind: ProblemKind::Delay(delay) };
    delays.map(problem).into()
}

/// A probe's results that are not good.
fn kvm_probes() -> Vec<KvmProbe> {
    let why = || "/dev/kvm: a reason that the probe has found".to_owned();
    let all = [KvmProbe::Works, KvmProbe::Absent(why()), KvmProbe::Broken(why()), KvmProbe::Hangs(why())];
    let is_bad = |probe: &KvmProbe| match probe {
        KvmProbe::Works => false,
        KvmProbe::Absent(_) | KvmProbe::Broken(_) | KvmProbe::Hangs(_) | KvmProbe::Unknown(_) => true,
    };
    all.into_iter().chain([KvmProbe::Unknown(why())]).filter(is_bad).collect()
}

/// The rows other than rules, with a host on which each is bad.
fn bad_rows() -> Vec<(&'static str, Setup)> {
    fn pin(intent: &mut Intent, at: &str) {
        let threads = intent.tenants[0].threads.iter_mut();
        threads.filter(|one| matches!(one.role, ThreadRole::Vcpu(_))).for_each(|one| at.clone_into(&mut one.affinity));
    }
    fn beside(inventory: &mut Inventory, service: &str) {
        inventory.conflicts = vec![Conflict { service: service.to_owned(), pid: 77 }];
    }
    vec![
        ("kernel", |inventory, _| inventory.kernel.version = (5, 10)),
        ("kernel", |inventory, _| inventory.kernel.version = (6, 12)),
        ("kernel", |inventory, _| inventory.kernel.version = (6, 1)),
        ("preempt-rt", |inventory, _| inventory.kernel.realtime = false),
        ("preempt-rt", |inventory, _| {
            (inventory.kernel.realtime, inventory.kernel.threaded_irqs) = (false, false);
        }),
        ("idle-states", |inventory, _| {
            let state = IdleState { name: "C6".to_owned(), latency_us: Some(133), enabled_on: cpus("0-3") };
            inventory.cpus.idle_states = vec![state];
        }),
        ("governor", |inventory, _| inventory.cpus.governors = [("powersave".to_owned(), cpus("0-7"))].into()),
        ("clocksource", |inventory, _| inventory.cpus.clocksource = String::new()),
        ("clocksource", |inventory, _| inventory.cpus.clocksource = "tsc-early".to_owned()),
        ("clocksource", |inventory, _| inventory.cpus.clocksource = "hpet".to_owned()),
        ("clocksource", |inventory, _| inventory.cpus.clocksource = "jiffies".to_owned()),
        ("clocksource", |inventory, _| {
            (inventory.cpus.clocksource, inventory.cpus.has_tsc) = ("acpi_pm".to_owned(), true);
        }),
        ("smt", |inventory, _| inventory.cpus.smt_active = None),
        ("smt", |inventory, _| {
            (inventory.cpus.smt_active, inventory.cpus.siblings) = (Some(true), vec![cpus("0-1")]);
        }),
        ("isolation", |inventory, intent| {
            (inventory.cpus.isolated, inventory.cpus.nohz_full) = (cpus("8-11"), cpus("8"));
            pin(intent, "10-12");
        }),
        ("isolation", |inventory, intent| {
            inventory.cpus.rcu_nocbs = cpus("8");
            pin(intent, "9");
        }),
        ("numa", |inventory, intent| {
            let nodes = [(0, (cpus("0-31"), vec![10, 21])), (1, (cpus("32-63"), vec![21, 10]))];
            (inventory.cpus.nodes, inventory.nics[0].node) = (nodes.into(), Some(1));
            pin(intent, "2");
        }),
        ("irq-cpus", |inventory, _| inventory.udev.rules = vec!["/etc/udev/rules.d/70-x.rules:4".to_owned()]),
        ("periodic-work", |inventory, _| {
            inventory.cpus.nohz_full = cpus("3");
            let values = [("kernel/nmi_watchdog", "1"), ("vm/stat_interval", "1"), ("kernel/timer_migration", "0")];
            inventory.sysctls.extend(values.map(|(name, value)| (name.to_owned(), value.to_owned())));
        }),
        ("guest-memory", |inventory, _| {
            (inventory.memory.merged, inventory.memory.balanced) = (true, true);
            inventory.memory.collapsed = Some("always".to_owned());
        }),
        ("swap", |inventory, _| inventory.memory.swap = true),
        ("vmm-settings", |_, _| ()),
        ("kvm-upkeep", |inventory, _| (inventory.kvm.clock_sync, inventory.kvm.page_recovery) = (true, true)),
        ("pressure", |inventory, _| inventory.kernel.pressure = true),
        ("budget-timer", |inventory, intent| {
            (inventory.kernel.hrtick_dl, intent.deadline_backend) = (Some(false), true);
        }),
        ("budget-timer", |inventory, intent| (inventory.kernel.hrtick_dl, intent.deadline_backend) = (None, true)),
        ("lockdown", |inventory, _| inventory.kernel.lockdown = Lockdown::Confidentiality),
        ("conflicts", |inventory, _| beside(inventory, "irqbalance")),
        ("conflicts", |inventory, _| beside(inventory, "tuned")),
        ("conflicts", |inventory, _| beside(inventory, "ovs-vswitchd")),
        ("conflicts", |inventory, _| beside(inventory, "scx_loader")),
        ("conflicts", |inventory, _| beside(inventory, "kubelet")),
        ("conflicts", |inventory, intent| {
            beside(inventory, "kubelite");
            pin(intent, "4");
            let (policy, shared, exclusive) = ("static".to_owned(), cpus("0-4"), cpus("5"));
            inventory.cpu_manager = Some(CpuManager { policy, shared, exclusive });
        }),
        ("conflicts", |inventory, _| inventory.cpus.bpf_scheduler = Some("lavd".to_owned())),
    ]
}

fn faults_of_row(check: &Check) -> Vec<String> {
    let mut faults: Vec<String> =
        [&check.found, &check.remedy, &check.cost].into_iter().flat_map(|one| faults(one)).collect();
    let remedy = check.ontime_can_apply && !check.remedy.is_empty() || tells_what_to_do(&check.remedy);
    let cases = [
        (check.title.is_empty(), "title"),
        (check.found.len() < 9, "cause"),
        (!remedy, "remedy"),
        (check.delay_us == 0, "rank"),
    ];
    for (is_wrong, what) in cases {
        faults.extend(is_wrong.then(|| format!("{check:?} has no {what}")));
    }
    faults
}

#[test]
fn every_row_of_doctor_that_is_bad_has_a_cause_and_a_remedy() {
    let (inventory, intent) = two_vms();
    let smi = |count| Probes { smi: count, ..KvmProbe::Works.into() };
    let ok = || smi(SmiCount::NoSuchThing);
    let look = |knobs, inventory: &Inventory, intent: &Intent, refused: &Refused, probes: &Probes| {
        examine(&knobs, inventory, intent, &problems(), refused, probes).checks
    };
    let mut wrong: BTreeSet<String> = BTreeSet::new();
    let mut bad: BTreeSet<String> = BTreeSet::new();
    let mut all: BTreeSet<String> = BTreeSet::new();
    let mut take = |checks: Vec<Check>, wanted: Option<&str>| {
        let is_bad = |check: &&Check| check.state != State::Ok;
        wrong.extend(checks.iter().filter(is_bad).flat_map(faults_of_row));
        if let Some(wanted) = wanted.filter(|id| !checks.iter().filter(is_bad).any(|check| check.id == *id)) {
            wrong.insert(format!("row {wanted} is not bad"));
        }
        bad.extend(checks.iter().filter(is_bad).map(|check| check.id.clone()));
        all.extend(checks.into_iter().map(|check| check.id));
    };
    for (id, change) in bad_rows() {
        let (mut inventory, mut intent) = (inventory.clone(), intent.clone());
        change(&mut inventory, &mut intent);
        take(look(Knobs::Unset, &inventory, &intent, &Refused::new(), &ok()), Some(id));
    }
    for probe in kvm_probes() {
        take(look(Knobs::Unset, &inventory, &intent, &Refused::new(), &probe.into()), Some("kvm"));
    }
    let counted = SmiCount::Counted { most: 2, cpu: 1, during: Duration::from_secs(1) };
    for count in [counted, SmiCount::Unknown("the kernel has no event for them".to_owned())] {
        take(look(Knobs::Unset, &inventory, &intent, &Refused::new(), &smi(count)), Some("smi"));
    }
    let mut far = inventory.clone();
    far.cpus.nodes = [(0, (cpus("0-31"), vec![10, 21])), (1, (cpus("32-63"), vec![21, 10]))].into();
    let unknown = Err("/proc/7/numa_maps: denied; run it as root".to_owned());
    let memory: BTreeMap<_, _> = [(intent.tenants[0].process, unknown)].into();
    take(look(Knobs::Unset, &far, &intent, &Refused::new(), &Probes { memory, ..ok() }), Some("numa"));
    // Rules: knobs that differ, that cannot be read, that have an obstacle, and that the daemon could not set.
    let knobs = ontime_hostnet::plan(&inventory, &intent).settings.into_iter().map(|setting| setting.knob.to_string());
    let refused: Refused = knobs.map(|knob| (knob, "the driver refuses; update it".to_owned())).collect();
    take(look(Knobs::Unset, &inventory, &intent, &refused, &ok()), Some("irq-thread"));
    take(look(Knobs::Unreadable, &inventory, &intent, &Refused::new(), &ok()), Some("halt-poll"));
    take(look(Knobs::Fenced, &inventory, &intent, &Refused::new(), &ok()), Some("refusals"));
    let mut unthreaded = inventory.clone();
    unthreaded.nics.iter_mut().flat_map(|nic| &mut nic.napis).for_each(|napi| napi.pid = None);
    take(look(Knobs::Unset, &unthreaded, &intent, &Refused::new(), &ok()), Some("napi-thread"));
    for rule in RULES {
        for (.., (inventory, intent)) in found_by(rule.id) {
            let mut all = intent.clone();
            all.method = if intent.method == Method::Busypoll { Method::Busypoll } else { Method::Partitioned };
            take(look(Knobs::Unset, &inventory, &all, &Refused::new(), &ok()), None);
        }
    }
    // Rules whose knobs a host of this table does not have.
    let mut old = inventory.clone();
    old.kernel.version = (6, 12);
    old.nics.iter_mut().for_each(|nic| nic.napi_weight = Some("64".to_owned()));
    let tap = old.nics.iter_mut().find(|nic| nic.id.name == "tap1").unwrap();
    tap.kind = Some("veth".to_owned());
    take(look(Knobs::Unset, &old, &intent, &Refused::new(), &ok()), Some("tap-batch"));
    wrong.extend(all.difference(&bad).map(|id| format!("no case makes row {id} bad")));
    assert!(wrong.is_empty(), "{}", wrong.into_iter().collect::<Vec<_>>().join("\n"));
    assert!(all.len() > 30, "{all:?}");
}
