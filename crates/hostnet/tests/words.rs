//! Messages about processors, clocks and configured names, on synthetic hosts.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // a test that cannot go on fails

#[path = "support/fleet.rs"]
mod fleet;

use std::time::Duration;

use fleet::{of_rule, policies, rt, two_vms};
use ontime_hostnet::doctor::Refused;
use ontime_hostnet::inventory::{Conflict, CpuManager, IdleState, Inventory, LinkPolicy};
use ontime_hostnet::{
    Check, CpuSet, Done, Host, Intent, Journal, Knob, KnobError, Method, NicConfig, NicUse, Obstacle, Probes, RuleId,
    Severity, SmiCount, State, Value, apply, examine, kvm, plan,
};
use ontime_tenants::{Class, ThreadRole};

/// A host whose knobs cannot be read.
struct Mute;

impl Host for Mute {
    fn read(&self, knob: &Knob) -> Result<Value, KnobError> {
        Err(KnobError::Gone(knob.to_string()))
    }
    fn write(&self, knob: &Knob, _: &Value) -> Result<(), KnobError> {
        Err(KnobError::Gone(knob.to_string()))
    }
}

fn check(inventory: &Inventory, id: &str) -> Check {
    let probe = kvm::KvmProbe::Unknown(String::new());
    let found = examine(&Mute, inventory, &Intent::default(), &[], &Refused::new(), &probe.clone().into());
    found.checks.into_iter().find(|check| check.id == id).unwrap()
}

fn cpus(text: &str) -> CpuSet {
    CpuSet::from_list(text).unwrap()
}

#[test]
fn an_idle_state_counts_on_the_cpus_whose_limit_lets_it_be_entered() {
    let mut inventory = Inventory::default();
    inventory.cpus.online = cpus("0-7");
    let state =
        |name: &str, latency_us, on: &str| IdleState { name: name.to_owned(), latency_us, enabled_on: cpus(on) };
    inventory.cpus.idle_states =
        vec![state("C1", Some(1), "0-7"), state("C3", Some(33), "0-7"), state("C8", Some(260), "0-3")];
    let found = |inventory: &Inventory| check(inventory, "idle-states").found;
    assert_eq!(found(&inventory), "may be entered: C3 (33 us) on CPUs 0-7, C8 (260 us) on CPUs 0-3");
    inventory.cpus.latency_limits_us = [(0, 0), (1, 5), (2, 40), (6, 33), (7, 32)].into();
    assert_eq!(found(&inventory), "may be entered: C3 (33 us) on CPUs 2-6, C8 (260 us) on CPUs 3");
    inventory.cpus.dma_latency_us = Some(100);
    assert_eq!(found(&inventory), "may be entered: C3 (33 us) on CPUs 2-6");
    // A state that cannot be read may be slow.
    inventory.cpus.idle_states.push(state("", None, "6-7"));
    assert_eq!(
        found(&inventory),
        "may be entered: C3 (33 us) on CPUs 2-6, states of CPUs 6-7 whose latency cannot be read"
    );
    inventory.cpus.latency_limits_us.extend((2..=6).map(|cpu| (cpu, 10)));
    let unknown = check(&inventory, "idle-states");
    assert_eq!(
        (unknown.state, unknown.found.as_str()),
        (State::Unknown, "may be entered: states of CPUs 7 whose latency cannot be read")
    );
    inventory.cpus.latency_limits_us.extend([(7, 10)]);
    assert_eq!(check(&inventory, "idle-states").state, State::Ok);
}

#[test]
fn only_the_cores_that_are_shared_are_named() {
    let mut inventory = Inventory::default();
    inventory.cpus.online = cpus("0-11");
    inventory.cpus.smt_active = Some(true);
    let mut found = |cores: &[&str]| {
        inventory.cpus.siblings = cores.iter().map(|core| cpus(core)).collect();
        check(&inventory, "smt").found
    };
    let hybrid = found(&["0,6", "1,7"]);
    assert_eq!(hybrid, "some cores are shared (CPUs 0,6; CPUs 1,7); every other CPU has its own");
    assert_eq!(found(&["0-3", "4-7", "8-11"]), "every core is shared (CPUs 0-3; CPUs 4-7; CPUs 8-11)");
    let pairs = ["0-1", "2-3", "4-5", "6-7", "8-9", "10-11"];
    assert!(found(&pairs).starts_with("every core is shared (CPUs 0-1; "));
    assert_eq!(found(&[]), "CPUs share cores");
}

#[test]
fn clock_sources_of_other_processors_are_no_fault_and_get_no_advice_about_a_tsc() {
    let mut inventory = Inventory::default();
    let mut at = |name: &str, has_tsc| {
        inventory.cpus.clocksource = name.to_owned();
        inventory.cpus.has_tsc = has_tsc;
        check(&inventory, "clocksource")
    };
    for name in ["timebase", "tod", "riscv_clocksource", "Constant", "xen", "arch_sys_counter"] {
        assert_eq!(at(name, false).state, State::Ok, "{name}");
    }
    for name in ["MIPS", "stick", "jiffies"] {
        let found = at(name, false);
        assert!(found.state == State::Warning && !found.remedy.contains("tsc"), "{found:?}");
    }
    assert!(at("hpet", false).remedy.contains("why the TSC was given up"));
    assert!(at("acpi_pm", true).remedy.starts_with("echo tsc >"));
    assert!(at("tsc-early", false).remedy.contains("look again"));
}

#[test]
fn a_nic_is_known_by_its_alternative_names() {
    let (mut inventory, intent) = two_vms();
    inventory.nics[1].altnames = vec!["enp7s0f1".to_owned(), "a-fibre-to-the-plant-hall".to_owned()];
    let with = |nics: &[(&str, Class)]| {
        let config = |class: Class| NicConfig { class: Some(class), poll_cpu: Some(5), ..NicConfig::default() };
        let nics = nics.iter().map(|(name, class)| ((*name).to_owned(), config(*class))).collect();
        Intent { nics, ..intent.clone() }
    };
    for name in ["eth1", "enp7s0f1", "a-fibre-to-the-plant-hall"] {
        let said = with(&[(name, rt(2))]);
        assert_eq!(said.nic_use(&inventory, &inventory.nics[1]), NicUse::Configured(rt(2)), "{name}");
        let found = plan(&inventory, &said);
        assert!(
            found.findings.iter().all(|finding| finding.rule != RuleId::HostConfig),
            "{name}: {:?}",
            found.findings
        );
        let polls = plan(&inventory, &Intent { method: Method::Busypoll, ..said });
        assert!(
            of_rule(&polls, RuleId::BusyPoll).iter().any(|(knob, to)| knob.contains("napi/eth1") && to == "CPUs 5")
        );
    }
    // Every other setting of a NIC's table is found by such a name, too.
    for (name, config) in [
        ("enp7s0f1", NicConfig { tenants: vec!["vm1".to_owned()], ..NicConfig::default() }),
        ("a-fibre-to-the-plant-hall", NicConfig { queues: [(1, rt(2))].into(), ..NicConfig::default() }),
        ("eth1", NicConfig { qdisc_bypass: true, ..NicConfig::default() }),
    ] {
        let said = Intent { nics: [(name.to_owned(), config.clone())].into(), ..intent.clone() };
        assert_eq!(said.config_of(&inventory.nics[1]), Some(&config), "{name}");
        assert_eq!(said.config_of(&inventory.nics[0]), None, "{name}");
        let found = plan(&inventory, &said).findings;
        assert!(!found.iter().any(|finding| finding.found.contains("no such interface")), "{found:?}");
    }
    // Configured under both names: the name counts, and a finding reports it.
    let twice = plan(&inventory, &with(&[("eth1", rt(4)), ("enp7s0f1", rt(1))]));
    assert_eq!(policies(&twice)["irq/1100-eth1-TxRx-0"], ontime_tenants::Policy::Fifo(30));
    let said = twice.findings.iter().find(|finding| finding.rule == RuleId::HostConfig).unwrap();
    assert!(said.object == "enp7s0f1" && said.found.contains("another name of eth1"), "{said:?}");
}

#[test]
fn a_name_as_ip_shows_it_is_explained() {
    let (inventory, intent) = two_vms();
    let said = |name: &str| {
        let nics = [(name.to_owned(), NicConfig { class: Some(Class::Bulk), ..NicConfig::default() })].into();
        let found = plan(&inventory, &Intent { nics, ..intent.clone() });
        found.findings.into_iter().find(|finding| finding.rule == RuleId::HostConfig).unwrap()
    };
    assert!(said("eth1@if9").remedy.starts_with("write eth1 in /etc/ontime/host.toml"));
    for unknown in ["eth9@if3", "eth9"] {
        assert!(said(unknown).remedy.starts_with("correct the name"));
        assert_eq!(said(unknown).severity, Severity::Warning);
    }
}

/// A host on which every knob differs and none can be set, with a cause per knob.
struct Fenced;

impl Host for Fenced {
    fn read(&self, knob: &Knob) -> Result<Value, KnobError> {
        Ok(match knob {
            Knob::ThreadPolicy { .. } => Value::Policy(ontime_tenants::Policy::Idle),
            _ => Value::Text("elsewise".to_owned()),
        })
    }
    fn write(&self, knob: &Knob, value: &Value) -> Result<(), KnobError> {
        let Some(found) = self.foresee(knob, value) else { return Ok(()) };
        Err(KnobError::Unsupported { knob: knob.to_string(), why: format!("{}; {}", found.cause, found.remedy) })
    }
    fn foresee(&self, knob: &Knob, _: &Value) -> Option<Obstacle> {
        let (cause, remedy, lasting) = match knob {
            Knob::ThreadPolicy { comm, .. } if comm.contains("/KVM") => ("no budget in /machine", "give it one", false),
            Knob::HostFile { path, .. } if path.contains("halt_poll") => ("is read-only", "at load", true),
            _ => return None,
        };
        Some(Obstacle { cause: cause.to_owned(), remedy: remedy.to_owned(), lasting })
    }
}

#[test]
fn what_cannot_be_set_is_told_once_by_its_cause() {
    let (inventory, intent) = two_vms();
    let probe = kvm::KvmProbe::Unknown(String::new());
    let found = examine(&Fenced, &inventory, &intent, &[], &Refused::new(), &probe.clone().into());
    let check = |id: &str| found.checks.iter().find(|check| check.id == id).unwrap();
    let row = check("refusals");
    assert_eq!(row.state, State::Critical);
    assert_eq!(
        row.found,
        "is read-only (settings by rule: halt-poll 1); no budget in /machine (settings by rule: vcpu-place 2)"
    );
    assert!(row.remedy.contains("give it one") && row.remedy.contains("without = [\"halt-poll\"]"), "{row:?}");
    for rule in ["vcpu-place", "halt-poll"] {
        assert!(!check(rule).ontime_can_apply && check(rule).found.contains("which cannot be set: "), "{rule}");
    }
    assert_eq!(check("vcpu-place").remedy, "give it one");
    assert!(check("irq-thread").ontime_can_apply);
    // A report says how to accept a host-wide value; it does not for a tenant's thread.
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(&dir.path().join("originals"), "boot").unwrap();
    let report = apply(&Fenced, &plan(&inventory, &intent), &mut journal).unwrap();
    let why = |rule: RuleId| {
        let item = report.items.iter().find(|item| item.rule == Some(rule)).unwrap();
        match &item.done {
            Done::Unsupported(why) => why.clone(),
            other => panic!("{other:?}"),
        }
    };
    let accept = "; to accept it as it is: without = [\"halt-poll\"] in /etc/ontime/host.toml";
    assert_eq!(why(RuleId::HaltPoll), format!("is read-only; at load{accept}"));
    assert_eq!(why(RuleId::VcpuPlace), "no budget in /machine; give it one");
}

#[test]
fn obstacles_of_the_methods_own_rules_are_told_too() {
    /// No thread's CPUs can be set.
    struct Pinned;
    impl Host for Pinned {
        fn read(&self, knob: &Knob) -> Result<Value, KnobError> {
            Fenced.read(knob)
        }
        fn write(&self, knob: &Knob, _: &Value) -> Result<(), KnobError> {
            panic!("{knob} was written")
        }
        fn foresee(&self, knob: &Knob, _: &Value) -> Option<Obstacle> {
            let obstacle =
                || Obstacle { cause: "cpuset /vm".to_owned(), remedy: "widen it".to_owned(), lasting: false };
            matches!(knob, Knob::ThreadAffinity { .. }).then(obstacle)
        }
    }
    let (inventory, mut intent) = two_vms();
    let refusals = |intent: &Intent| {
        let probe = kvm::KvmProbe::Unknown(String::new());
        let found = examine(&Pinned, &inventory, intent, &[], &Refused::new(), &probe.into());
        found.checks.into_iter().find(|check| check.id == "refusals").unwrap()
    };
    assert_eq!(refusals(&intent).state, State::Ok);
    (intent.method, intent.exclusive_cpu) = (Method::Exclusive, inventory.cpus.online.iter().next());
    let row = refusals(&intent);
    assert!(row.state != State::Ok && row.found.contains("cpuset /vm (settings by rule: exclusive-cpu"), "{row:?}");
}

#[test]
fn a_look_that_missed_tenants_takes_absence_for_unknown() {
    let (inventory, intent) = two_vms();
    let nobody = Intent { tenants: Vec::new(), ..intent.clone() };
    for (intent, wanted) in [(&intent, State::Warning), (&nobody, State::Unknown)] {
        let probe = kvm::KvmProbe::Unknown(String::new());
        let mut found = examine(&Fenced, &inventory, intent, &[], &Refused::new(), &probe.into());
        found.doubt_absence();
        let places = found.checks.iter().find(|check| check.id == "vcpu-place").unwrap();
        assert_eq!(places.state, wanted, "{places:?}");
        let told = if rustix::process::geteuid().is_root() { "hides tenants from root" } else { "run this as root" };
        assert_eq!(places.remedy.contains(told), wanted == State::Unknown, "{places:?}");
        assert!(found.state >= State::Unknown);
    }
}

/// The result of one check for these tenants and this configuration.
fn row(inventory: &Inventory, intent: &Intent, id: &str) -> (State, String) {
    let probes = kvm::KvmProbe::Unknown(String::new()).into();
    let check = row_with(inventory, intent, &probes, id);
    (check.state, check.found)
}

fn row_with(inventory: &Inventory, intent: &Intent, probes: &Probes, id: &str) -> Check {
    let found = examine(&Mute, inventory, intent, &[], &Refused::new(), probes);
    let check = found.checks.into_iter().find(|check| check.id == id).unwrap();
    assert!(check.state == State::Ok || !check.remedy.is_empty(), "{check:?} has no remedy");
    check
}

fn pin(intent: &mut Intent, cpus: &str) {
    let vcpus = intent.tenants[0].threads.iter_mut().filter(|thread| matches!(thread.role, ThreadRole::Vcpu(_)));
    vcpus.for_each(|thread| cpus.clone_into(&mut thread.affinity));
}

#[test]
fn cpus_that_are_kept_free_are_compared_with_those_of_rt_tenants() {
    let (mut inventory, mut intent) = two_vms();
    let nobody = Intent::default();
    assert_eq!(row(&inventory, &intent, "isolation").0, State::Ok, "none is kept free");
    inventory.cpus.isolated = cpus("8-11");
    assert_eq!(row(&inventory, &nobody, "isolation").0, State::Ok);
    let unpinned = row(&inventory, &intent, "isolation");
    assert!(unpinned.0 == State::Warning && unpinned.1.contains("no RT tenant is kept to CPUs 8-11"), "{unpinned:?}");
    for (at, words) in [
        ("8-11", ""),
        (
            "10-12",
            "no RT tenant is kept to CPUs 8-9, which are kept free: nothing else runs there; RT tenants are \
            kept to CPUs 12",
        ),
        ("2-3", "RT tenants are kept to CPUs 2-3, which others may use"),
    ] {
        pin(&mut intent, at);
        let (state, found) = row(&inventory, &intent, "isolation");
        assert_eq!(state == State::Ok, words.is_empty(), "{at}: {found}");
        assert!(found.contains(words), "{at}: {found}");
    }
    inventory.cpus.nohz_full = cpus("8-9");
    pin(&mut intent, "8-11");
    assert!(row(&inventory, &intent, "isolation").1.contains("CPUs 10-11 of RT tenants have a tick"));
    (inventory.cpus.nohz_full, inventory.cpus.rcu_nocbs) = (CpuSet::new(), cpus("8-10"));
    let (state, found) = row(&inventory, &intent, "isolation");
    let words = "CPUs 11 of RT tenants run RCU callbacks, others (rcu_nocbs 8-10) have theirs run elsewhere";
    assert!(state == State::Warning && found == words, "{found}");
    inventory.cpus.isolated = CpuSet::new();
    assert_eq!(row(&inventory, &intent, "isolation").1, words, "though no CPU is kept free");
    pin(&mut intent, "9-10");
    assert_eq!(row(&inventory, &intent, "isolation").0, State::Ok);
}

#[test]
fn an_rt_tenant_far_from_its_nic_is_told_with_the_distance() {
    let (mut inventory, mut intent) = two_vms();
    let distances = [vec![10, 21, 32], vec![21, 10, 32], vec![32, 32, 10]];
    let nodes = ["0-15", "16-31", "32-63"].map(cpus).into_iter().zip(distances);
    inventory.cpus.nodes = (0..).zip(nodes).collect();
    inventory.nics[0].node = Some(1);
    assert_eq!(row(&inventory, &intent, "numa").0, State::Ok, "it is kept to no CPUs");
    for (at, words) in [
        ("16-19", ""),
        ("2", "vm1 on node 0, eth0 on node 1, distance 21"),
        (
            "40-41",
            "vm1 on node \
        2, eth0 on node 1, distance 32",
        ),
    ] {
        pin(&mut intent, at);
        let (state, found) = row(&inventory, &intent, "numa");
        assert_eq!(state == State::Ok, words.is_empty(), "{at}: {found}");
        assert!(found.contains(words), "{at}: {found}");
    }
    inventory.nics[0].node = None;
    assert_eq!(row(&inventory, &intent, "numa").0, State::Ok, "the NIC is near to none");
}

#[test]
fn memory_far_from_where_an_rt_tenant_runs_or_from_its_nic_is_told() {
    let (mut inventory, mut intent) = two_vms();
    let distances = [vec![10, 21, 32], vec![21, 10, 32], vec![32, 32, 10]];
    let nodes = ["0-15", "16-31", "32-63"].map(cpus).into_iter().zip(distances);
    inventory.cpus.nodes = (0..).zip(nodes).collect();
    inventory.nics[0].node = Some(1);
    let mut probes = Probes::from(kvm::KvmProbe::Unknown(String::new()));
    let mut told = |inventory: &Inventory, intent: &Intent, memory: Result<&[(u32, u64)], &str>| {
        let by_node = memory.map(|all| all.iter().copied().collect()).map_err(str::to_owned);
        probes.memory = [(intent.tenants[0].process, by_node)].into();
        let check = row_with(inventory, intent, &probes, "numa");
        (check.state, check.found)
    };
    pin(&mut intent, "16-19");
    assert_eq!(told(&inventory, &intent, Ok(&[(1, 8 << 30)])).0, State::Ok);
    assert_eq!(told(&inventory, &intent, Ok(&[(0, 3), (1, 97)])).0, State::Ok, "libraries");
    for (at, memory, words) in [
        (
            "16-19",
            &[(0, 40), (1, 60)][..],
            "40 % of the memory of vm1 is on node 0: it runs on node 1, distance 21, eth0 is on node 1, distance 21",
        ),
        ("16-19", &[(2, 7)], "100 % of the memory of vm1 is on node 2: it runs on node 1, distance 32, eth0"),
        (
            "2",
            &[(0, 50), (1, 50)],
            "vm1 on node 0, eth0 on node 1, distance 21; 50 % of the memory of vm1 is on node 0: eth0",
        ),
        ("0-63", &[(1, 9)], "100 % of the memory of vm1 is on node 1: it may run on every node"),
    ] {
        pin(&mut intent, at);
        let (state, found) = told(&inventory, &intent, Ok(memory));
        assert!(state == State::Warning && found.contains(words), "{at} {memory:?}: {found}");
    }
    pin(&mut intent, "16-19");
    let (state, found) = told(&inventory, &intent, Err("numa_maps: denied"));
    assert!(state == State::Unknown && found.contains("vm1 lies is not known: numa_maps: denied"), "{found}");
    assert_eq!(told(&inventory, &intent, Ok(&[])).0, State::Ok, "it has touched none");
}

#[test]
fn system_management_interrupts_are_told_and_what_cannot_be_counted_is_unknown() {
    let (inventory, intent) = two_vms();
    let told = |smi: SmiCount| {
        let probes = Probes { smi, ..kvm::KvmProbe::Unknown(String::new()).into() };
        let check = row_with(&inventory, &intent, &probes, "smi");
        (check.state, check.found)
    };
    let counted = |most, cpu, ms| SmiCount::Counted { most, cpu, during: Duration::from_millis(ms) };
    assert_eq!(told(counted(1, 5, 540)), (State::Warning, "1 SMI on CPU 5 in 0.5 s".to_owned()));
    assert_eq!(told(counted(12, 0, 2000)), (State::Warning, "12 SMIs on CPU 0 in 2.0 s".to_owned()));
    let (state, found) = told(counted(0, 3, 500));
    assert!(state == State::Ok && found.starts_with("none came in 0.5 s"), "{found}");
    assert_eq!(told(SmiCount::Unknown("not permitted".to_owned())), (State::Unknown, "not permitted".to_owned()));
    assert_eq!(told(SmiCount::NoSuchThing).0, State::Ok);
}

#[test]
fn what_a_guest_cannot_know_of_smis_is_shown_and_does_not_count() {
    let mut inventory = Inventory::default();
    (inventory.kernel.realtime, inventory.kernel.threaded_irqs, inventory.kernel.version) = (true, true, (7, 2));
    (inventory.cpus.clocksource, inventory.cpus.smt_active) = ("tsc".to_owned(), Some(false));
    inventory.protections.readable = true;
    let intent = Intent { caps_in_force: true, ..Intent::default() };
    let states = |inventory: &Inventory, smi: SmiCount| {
        let probes = Probes { smi, ..kvm::KvmProbe::Works.into() };
        let found = examine(&Mute, inventory, &intent, &[], &Refused::new(), &probes);
        let others = found.checks.iter().filter(|check| check.id != "smi").map(|check| check.state).max().unwrap();
        let row = found.checks.iter().find(|check| check.id == "smi").unwrap().state;
        (row, found.state, others)
    };
    let unknown = || SmiCount::Unknown("this host is itself a guest".to_owned());
    let (row, whole, others) = states(&inventory, unknown());
    assert_eq!((row, whole), (State::Unknown, others.max(State::Unknown)));
    inventory.kernel.hypervisor = true;
    let (row, whole, others) = states(&inventory, unknown());
    assert_eq!((row, whole, others), (State::Unknown, State::Ok, State::Ok));
}

#[test]
fn what_udev_does_with_interrupts_cpus_is_told_where_it_meets_an_rt_tenant() {
    let (mut inventory, mut intent) = two_vms();
    pin(&mut intent, "2-3");
    let told = |inventory: &Inventory, intent: &Intent| row(inventory, intent, "irq-cpus");
    assert_eq!(told(&inventory, &intent).0, State::Ok);
    let [rt_nic, bulk_nic] = [0, 1].map(|number| inventory.nics[number].id.name.clone());
    let policy = |among: &str| LinkPolicy {
        file: "/etc/systemd/network/10-x.link".to_owned(),
        policy: "spread".to_owned(),
        among: among.to_owned(),
    };
    let own = inventory.nics[1].irqs.clone();
    let place = |inventory: &mut Inventory, at: &str| {
        inventory.irqs.iter_mut().filter(|irq| own.contains(&irq.id.irq)).for_each(|irq| irq.affinity = cpus(at));
    };
    inventory.udev.links = [(bulk_nic.clone(), policy("IRQAffinity=0-3"))].into();
    place(&mut inventory, "3");
    let (state, found) = told(&inventory, &intent);
    let words = "10-x.link has IRQAffinityPolicy=spread IRQAffinity=0-3: its interrupts are on CPUs 3, of which RT \
        tenants have 3";
    assert!(state == State::Warning && found.contains(words), "{found}");
    assert_eq!(told(&inventory, &Intent::default()).0, State::Ok, "no RT tenant");
    place(&mut inventory, "0-1");
    let (state, found) = told(&inventory, &intent);
    assert!(state == State::Ok && found.ends_with("IRQAffinity=0-3"), "{found}");
    let exclusive = Intent { method: Method::Exclusive, ..intent.clone() };
    assert!(told(&inventory, &exclusive).1.contains("sets again"));
    place(&mut inventory, "3");
    inventory.udev.links = [(rt_nic, policy(""))].into();
    assert_eq!(told(&inventory, &intent).0, State::Ok, "the RT tenant's own NIC");
    inventory.udev.links.clear();
    inventory.udev.rules = vec!["/etc/udev/rules.d/70-x.rules:4".to_owned()];
    let (state, found) = told(&inventory, &intent);
    assert!(state == State::Warning && found.contains("70-x.rules:4"), "{found}");
}

#[test]
fn kubelet_matters_where_its_cpu_manager_gives_cpus() {
    let (mut inventory, mut intent) = two_vms();
    pin(&mut intent, "4-5");
    let mut told = |service: &str, policy: &str, shared: &str, exclusive: &str| {
        inventory.conflicts = vec![Conflict { service: service.to_owned(), pid: 31 }];
        inventory.cpu_manager =
            Some(CpuManager { policy: policy.to_owned(), shared: cpus(shared), exclusive: cpus(exclusive) });
        row(&inventory, &intent, "conflicts")
    };
    for service in ["kubelet", "kubelite", "k3s-server", "k3s-agent"] {
        assert_eq!(told(service, "none", "", "").0, State::Ok, "{service}");
    }
    for (shared, exclusive, words) in [
        ("0-3", "", "(CPU manager static: CPUs 0-3 for all)"),
        ("0-1", "2-3", "CPUs 0-1 for all, CPUs 2-3 for single ones)"),
        ("0-4", "5-6", "single ones), of which RT VMs have CPUs 4-5"),
    ] {
        let (state, found) = told("kubelite", "static", shared, exclusive);
        assert!(state == State::Warning && found.ends_with(words), "{found}");
    }
}

#[test]
fn a_delay_without_a_limit_is_no_number_in_json() {
    let (mut inventory, intent) = two_vms();
    inventory.cpus.idle_states =
        vec![IdleState { name: "C6".to_owned(), latency_us: Some(133), enabled_on: cpus("0-3") }];
    let why = || "it did not answer".to_owned();
    let delay = |probe: kvm::KvmProbe, id: &str| {
        let check = row_with(&inventory, &intent, &probe.into(), id);
        (serde_json::to_value(&check).unwrap()["delay_us"].clone(), check.delay_us)
    };
    for probe in [
        kvm::KvmProbe::Absent(why()),
        kvm::KvmProbe::Broken(why()),
        kvm::KvmProbe::Hangs(why()),
        kvm::KvmProbe::Unknown(why()),
    ] {
        assert_eq!(delay(probe.clone(), "kvm"), (serde_json::Value::Null, ontime_hostnet::doctor::ENDLESS));
        assert_eq!(delay(probe, "idle-states"), (133.into(), 133));
    }
    assert_eq!(delay(kvm::KvmProbe::Works, "kvm"), (0.into(), 0));
}

#[test]
fn periodic_work_and_swap_are_told() {
    let (mut inventory, intent) = two_vms();
    assert_eq!(row(&inventory, &intent, "periodic-work").0, State::Ok);
    for (name, value, told) in [
        ("kernel/nmi_watchdog", "1", "nmi_watchdog"),
        ("vm/stat_interval", "1", "every 1 s"),
        ("kernel/timer_migration", "0", "timers stay on nohz_full CPUs"),
    ] {
        inventory.cpus.nohz_full = cpus("3");
        inventory.sysctls.insert(name.to_owned(), value.to_owned());
        let (state, found) = row(&inventory, &intent, "periodic-work");
        assert!(state == State::Warning && found.contains(told), "{found}");
        inventory.sysctls.remove(name);
    }
    inventory.sysctls.insert("vm/stat_interval".to_owned(), "120".to_owned());
    assert_eq!(row(&inventory, &intent, "periodic-work").0, State::Ok);
    inventory.memory.swap = true;
    assert_eq!(row(&inventory, &intent, "swap").0, State::Warning);
    assert_eq!(row(&inventory, &Intent::default(), "swap").0, State::Ok);
}

#[test]
fn services_beside_ontime_are_told_where_they_matter() {
    let (mut inventory, intent) = two_vms();
    let told = |inventory: &mut Inventory, intent: &Intent, service: &str| {
        inventory.conflicts = vec![Conflict { service: service.to_owned(), pid: 77 }];
        row(inventory, intent, "conflicts")
    };
    for (service, words) in [
        ("irqbalance", "moves interrupts"),
        ("kubelet", "sets containers' CPUs again"),
        ("ovs-vswitchd", "first packet of each flow"),
        ("scx_loader", "loads BPF schedulers"),
    ] {
        let (state, found) = told(&mut inventory, &intent, service);
        assert!(state == State::Warning && found.contains(words) && found.contains("process 77"), "{found}");
    }
    for service in ["kubelet", "ovs-vswitchd"] {
        assert_eq!(told(&mut inventory, &Intent::default(), service).0, State::Ok, "{service} without an RT tenant");
    }
    // Open vSwitch's polling threads forward packets themselves: only their CPUs matter, and these are not idle.
    let mut pinned = intent.clone();
    pin(&mut pinned, "1");
    inventory.cpus.isolated = cpus("1-3");
    for (on, shared, unused) in [("2-3", false, None), ("3", false, Some("CPUs 2,")), ("1,3", true, Some("CPUs 2,"))] {
        inventory.pollers = vec![("pmd-c03/id:9".to_owned(), cpus(on))];
        let (state, found) = told(&mut inventory, &pinned, "ovs-vswitchd");
        assert_eq!(state == State::Warning && found.contains("pmd-c03/id:9 polls on CPU 1,3"), shared, "{on}: {found}");
        assert_eq!(state == State::Ok, !shared, "{on}: {found}");
        let (state, found) = row(&inventory, &pinned, "isolation");
        assert_eq!(state == State::Ok, unused.is_none(), "{on}: {found}");
        assert!(unused.is_none_or(|unused| found.contains(&format!("kept to {unused} which"))), "{on}: {found}");
    }
    (inventory.pollers, inventory.cpus.isolated) = (Vec::new(), CpuSet::new());
    inventory.conflicts.clear();
    inventory.cpus.bpf_scheduler = Some("lavd_1.0.19".to_owned());
    assert_eq!(
        row(&inventory, &intent, "conflicts"),
        (
            State::Warning,
            "running: BPF scheduler lavd_1.0.19 is \
        loaded"
                .to_owned()
        )
    );
    inventory.cpus.bpf_scheduler = Some("ontime".to_owned());
    assert_eq!(row(&inventory, &intent, "conflicts").0, State::Ok, "its own");
}
