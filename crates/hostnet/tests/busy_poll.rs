//! Plans of method busypoll on synthetic hosts.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)] // a test that cannot go on fails

#[path = "support/fleet.rs"]
mod fleet;

use std::collections::BTreeMap;

use fleet::{policies, refusals, rt, two_vms};
use ontime_hostnet::doctor::Refused;
use ontime_hostnet::{
    CpuSet, Host, Intent, Inventory, Journal, Knob, KnobError, KvmProbe, Method, NicConfig, Original, Plan, Refusal,
    RuleId, State, Value, as_found, examine, plan, replan, rules,
};
use ontime_tenants::{Policy, Role};

/// `two_vms` under method busypoll, on a kernel that can poll.
fn polling() -> (Inventory, Intent) {
    let (mut inventory, intent) = two_vms();
    inventory.kernel.version = (7, 2);
    (inventory, Intent { method: Method::Busypoll, ..intent })
}

/// Planned settings of single NAPI instances, and of the CPUs of NAPI threads.
fn napi_settings(plan: &Plan) -> Vec<(String, String)> {
    let of = plan.settings.iter().filter(|setting| {
        matches!(&setting.knob, Knob::NapiThreaded { .. })
            || matches!(&setting.knob, Knob::ThreadAffinity { comm, .. } if comm.starts_with("napi/"))
    });
    of.map(|setting| (setting.knob.to_string(), setting.value.to_string())).collect()
}

fn wanted(settings: &[(&str, &str)]) -> Vec<(String, String)> {
    settings.iter().map(|(knob, value)| ((*knob).to_owned(), (*value).to_owned())).collect()
}

#[test]
fn busypoll_polls_rt_queues_below_every_vcpu_and_nothing_else() {
    let (inventory, intent) = polling();
    let found = plan(&inventory, &intent);
    assert_eq!(
        napi_settings(&found),
        wanted(&[
            ("eth1 threading of NAPI 9193", "1"),
            ("eth1 threading of NAPI 9194", "1"),
            ("eth0 threading of NAPI 8193", "2"),
            ("eth0 threading of NAPI 8194", "2"),
        ])
    );
    let threads = policies(&found);
    assert_eq!(threads["napi/eth0-8193"], Policy::Fifo(1));
    assert_eq!(threads["napi/eth1-9193"], Policy::BULK_DRIVER);
    let Policy::Fifo(lowest) = intent.table.policy(rt(8), Role::VcpuEntitled) else { panic!() };
    assert!(lowest > 4, "a polling thread would run before ktimers or a vCPU");
    assert!(!found.findings.iter().any(|finding| finding.remedy.contains("claimed twice")), "{:?}", found.findings);
    // Every other rule is as under `partitioned`.
    let partitioned = plan(&inventory, &Intent { method: Method::Partitioned, ..intent });
    let others = |plan: &Plan| {
        let of = plan
            .settings
            .iter()
            .filter(|of| !matches!(of.rule, RuleId::BusyPoll | RuleId::NapiThread | RuleId::NapiThreaded));
        of.map(|of| (of.knob.key(), of.value.clone())).collect::<Vec<_>>()
    };
    assert_eq!(others(&found), others(&partitioned));
}

#[test]
fn a_polling_thread_has_the_cpu_that_is_named_for_it() {
    let (mut inventory, mut intent) = polling();
    let on = |cpu| BTreeMap::from([("eth0".to_owned(), NicConfig { poll_cpu: Some(cpu), ..NicConfig::default() })]);
    intent.nics = on(5);
    let found = plan(&inventory, &intent);
    assert!(napi_settings(&found).contains(&("CPUs of thread 60000 (napi/eth0-8193)".to_owned(), "CPUs 5".to_owned())));
    assert_eq!(policies(&found)["napi/eth0-8193"], Policy::Fifo(1), "rcuc and ktimers of its CPU go before it");
    let words = |plan: &Plan, word: &str| {
        plan.findings.iter().any(|of| of.rule == RuleId::BusyPoll && of.object == "eth0" && of.found.contains(word))
    };
    assert!(words(&found, "other threads may run on CPU 5"));
    inventory.cpus.isolated = CpuSet::from_iter([5]);
    assert!(!words(&plan(&inventory, &intent), "other threads"));
    intent.nics = on(64);
    let found = plan(&inventory, &intent);
    assert!(words(&found, "not online"));
    assert_eq!(policies(&found)["napi/eth0-8193"], Policy::Fifo(1));
    // The only CPU cannot be exclusive, and is not used for polling by default.
    inventory.cpus.online = CpuSet::from_iter([0]);
    intent.nics = on(0);
    let found = plan(&inventory, &intent);
    assert!(words(&found, "polls on the only CPU"));
    assert_eq!(policies(&found)["napi/eth0-8193"], Policy::Fifo(1));
    // Nor is it used if the configured CPU does not exist any more.
    intent.nics = on(5);
    let found = plan(&inventory, &intent);
    assert!(words(&found, "poll_cpu 5 is not online; does not poll"), "{:?}", found.findings);
    assert!(napi_settings(&found).iter().all(|(_, value)| value == "1"));
    intent.nics.clear();
    let found = plan(&inventory, &intent);
    assert!(words(&found, "does not poll"));
    assert!(napi_settings(&found).iter().all(|(_, value)| value == "1"));
    assert_eq!(policies(&found)["napi/eth0-8193"], Policy::Fifo(44));
}

/// As a host is before Ontime first sets anything.
#[test]
fn polling_threads_that_do_not_exist_yet_are_told_with_their_place_and_cpu() {
    let (mut inventory, mut intent) = polling();
    for nic in &mut inventory.nics {
        nic.threaded = Some(0);
        nic.napis.iter_mut().for_each(|napi| (napi.pid, napi.threaded) = (None, Some(0)));
    }
    inventory.threads.retain(|thread| !thread.comm.starts_with("napi/"));
    let told = |intent: &Intent| -> Vec<String> {
        let found = plan(&inventory, intent).findings.into_iter();
        let of = found.filter(|of| of.rule == RuleId::NapiThreaded && of.object == "eth0");
        of.map(|of| of.found).collect()
    };
    let wanted = |place: &str| [format!("its 2 NAPI threads do not exist yet; once made they get {place}")];
    assert_eq!(told(&intent), wanted("FIFO 1 (busy-poll)"));
    for (poll_cpu, place) in [(5, "FIFO 1 on CPU 5 (busy-poll)"), (64, "FIFO 1 (busy-poll)")] {
        let config = NicConfig { poll_cpu: Some(poll_cpu), ..NicConfig::default() };
        intent.nics = BTreeMap::from([("eth0".to_owned(), config)]);
        assert_eq!(told(&intent), wanted(place));
    }
    let queues = BTreeMap::from([(1, ontime_tenants::Class::Bulk)]);
    let config = NicConfig { poll_cpu: Some(7), queues, ..NicConfig::default() };
    intent.nics = BTreeMap::from([("eth0".to_owned(), config)]);
    let bulk = Policy::BULK_DRIVER;
    assert_eq!(told(&intent), wanted(&format!("FIFO 1 on CPU 7 (1) and {bulk} (1) (busy-poll, napi-thread)")));
    // A thread that rests waits for interrupts on its CPU.
    intent.resting = std::collections::BTreeSet::from([inventory.nic("eth0").unwrap().id.ifindex]);
    assert_eq!(told(&intent), wanted(&format!("FIFO 44 on CPU 7 (1) and {bulk} (1) (napi-thread)")));
}

/// A host whose knobs have the values of this plan.
struct AsPlanned(Plan);

impl Host for AsPlanned {
    fn read(&self, knob: &Knob) -> Result<Value, KnobError> {
        let of = self.0.settings.iter().find(|setting| setting.knob == *knob);
        of.map(|setting| setting.value.clone()).ok_or_else(|| KnobError::Gone(knob.to_string()))
    }

    fn write(&self, knob: &Knob, _: &Value) -> Result<(), KnobError> {
        Err(KnobError::Gone(knob.to_string()))
    }
}

#[test]
fn what_polls_by_our_doing_is_as_wanted_while_the_method_is_in_force_and_no_longer() {
    let (before, intent) = polling();
    let host = AsPlanned(plan(&before, &intent));
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(&dir.path().join("originals"), "boot").unwrap();
    let mut inventory = before.clone();
    for (setting, mode) in host.0.settings.iter().filter_map(|set| Some((set, poll_mode(&set.value)?))) {
        journal.store(vec![Original { knob: setting.knob.clone(), value: Value::Threaded(0) }]).unwrap();
        let napis = inventory.nics.iter_mut().flat_map(|nic| &mut nic.napis);
        let is_it = |id: u32| matches!(setting.knob, Knob::NapiThreaded { napi, .. } if napi == id);
        napis.filter(|napi| is_it(napi.id)).for_each(|napi| napi.threaded = Some(mode));
    }
    let state = |method, id: &str| {
        let (inventory, intent) = as_found(inventory.clone(), Intent { method, ..intent.clone() }, &journal);
        let found = examine(&host, &inventory, &intent, &[], &Refused::new(), &KvmProbe::Unknown(String::new()).into());
        found.checks.into_iter().find(|check| check.id == id).map(|check| (check.state, check.found))
    };
    for id in ["napi-threaded", "napi-thread", "busy-poll"] {
        let (state, found) = state(Method::Busypoll, id).unwrap();
        assert!(state == State::Ok && !found.contains("is left at"), "{id}: {found}");
    }
    let (state_now, found) = state(Method::Partitioned, "napi-threaded").unwrap();
    assert!(state_now == State::Critical && found.contains("threading of NAPI 8193: 2, wanted 1"), "{found}");
    assert!(state(Method::Partitioned, "busy-poll").is_none());
}

fn poll_mode(value: &Value) -> Option<u32> {
    match value {
        Value::Threaded(mode) => Some(*mode),
        _ => None,
    }
}

#[test]
fn a_resting_nic_waits_for_interrupts_at_its_place() {
    let (inventory, mut intent) = polling();
    intent.resting = std::collections::BTreeSet::from([inventory.nic("eth0").unwrap().id.ifindex]);
    let found = plan(&inventory, &intent);
    assert!(napi_settings(&found).iter().all(|(_, value)| value == "1"), "{:?}", napi_settings(&found));
    assert_eq!(policies(&found)["napi/eth0-8193"], Policy::Fifo(44));
    let names: Vec<_> = rules::polling_nics(&inventory, &intent).map(|nic| nic.id.name.clone()).collect();
    assert_eq!(names, ["eth0"], "it is looked at still");
}

#[test]
fn a_kernel_that_cannot_poll_is_a_finding_and_a_method_without_it_takes_polling_back() {
    let (mut inventory, intent) = polling();
    // Ontime made the instance poll; the original in the journal shows that.
    inventory.nics[0].napis[0].threaded = Some(2);
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(&dir.path().join("originals"), "boot").unwrap();
    let knob = Knob::NapiThreaded { nic: inventory.nics[0].id.clone(), napi: 8193 };
    let value_of = |plan: &Plan| plan.settings.iter().find(|of| of.knob == knob).map(|of| of.value.clone());
    let partitioned = Intent { method: Method::Partitioned, ..intent.clone() };
    assert_eq!(value_of(&replan(inventory.clone(), partitioned.clone(), &journal)), None, "somebody else's choice");
    journal.store(vec![Original { knob: knob.clone(), value: Value::Threaded(0) }]).unwrap();
    assert_eq!(value_of(&replan(inventory.clone(), partitioned, &journal)), Some(Value::Threaded(1)));
    assert_eq!(value_of(&replan(inventory.clone(), intent.clone(), &journal)), Some(Value::Threaded(2)));

    // Adaptive polling still checks a NIC whose queues poll at present because Ontime set it.
    let (before, wanted) = as_found(inventory.clone(), intent.clone(), &journal);
    assert!(rules::polling_nics(&before, &wanted).any(|nic| nic.napis.iter().any(|napi| napi.id == 8193)));
    for napi in &mut inventory.nics[0].napis {
        napi.threaded = Some(2);
    }
    assert_eq!(rules::polling_nics(&inventory, &intent).count(), 0, "without the journal it is somebody's choice");

    inventory.kernel.version = (6, 18);
    let found = plan(&inventory, &intent);
    assert_eq!(refusals(&found, RuleId::BusyPoll), [Refusal::Kernel]);
    assert!(!napi_settings(&found).iter().any(|(_, value)| value == "2"));
}

/// `two_vms` under method busypoll on 6.12, where the kernel shows no mode of single instances.
fn polling_by_module() -> (Inventory, Intent) {
    let (mut inventory, intent) = polling();
    inventory.kernel.version = (6, 12);
    for nic in &mut inventory.nics {
        nic.busy_poll = Some("0".to_owned());
        for napi in &mut nic.napis {
            napi.threaded = None;
        }
    }
    (inventory, intent)
}

#[test]
fn before_6_19_the_host_module_polls_and_its_threads_have_the_place() {
    let (mut inventory, mut intent) = polling_by_module();
    let file = |plan: &Plan| -> Vec<String> {
        let of = plan.settings.iter().filter(|of| of.rule == RuleId::BusyPoll);
        of.map(|of| format!("{}: {}", of.knob, of.value)).collect()
    };
    let found = plan(&inventory, &intent);
    assert_eq!(file(&found), ["eth0 ontime/busy_poll: 1"], "its threads are there with the next look");
    assert_eq!(policies(&found)["napi/eth0-8193"], Policy::Fifo(44), "the kernel's thread keeps its place");
    let to_come = |inventory: &Inventory, intent: &Intent| -> Vec<String> {
        let found = plan(inventory, intent).findings.into_iter().map(|of| of.found);
        found.filter(|found| found.starts_with("its polling threads do not exist yet")).collect()
    };
    let place = "its polling threads do not exist yet; once made they get FIFO 1";
    assert_eq!(to_come(&inventory, &intent), [place]);
    let id = ontime_tenants::ThreadId { pid: 70_000, tid: 70_000, start_time: 1 };
    let comm = "napi-poll/eth0-8193".to_owned();
    let kind = ontime_hostnet::inventory::KernelThreadKind::NapiPoll(8193);
    inventory.threads.push(ontime_hostnet::inventory::KernelThread { id, kind, comm, policy: Policy::BULK });
    intent.nics = BTreeMap::from([("eth0".to_owned(), NicConfig { poll_cpu: Some(5), ..NicConfig::default() })]);
    assert!(to_come(&inventory, &intent).is_empty());
    let mut earlier = inventory.clone();
    earlier.threads.pop();
    assert_eq!(to_come(&earlier, &intent), [format!("{place} on CPU 5")]);
    let found = plan(&inventory, &intent);
    assert_eq!(policies(&found)["napi-poll/eth0-8193"], Policy::Fifo(1));
    assert!(
        file(&found).iter().any(|line| line.contains("napi-poll/eth0-8193") && line.ends_with("CPUs 5")),
        "{:?}",
        file(&found)
    );
    // When the NIC rests, or the method ends, the file is restored.
    intent.resting = std::collections::BTreeSet::from([inventory.nic("eth0").unwrap().id.ifindex]);
    assert!(!file(&plan(&inventory, &intent)).iter().any(|line| line.contains("ontime/busy_poll")));
    assert_eq!(rules::polling_nics(&inventory, &intent).count(), 1);
    intent.resting.clear();
    let partitioned = plan(&inventory, &Intent { method: Method::Partitioned, ..intent.clone() });
    assert!(file(&partitioned).is_empty());

    // A NIC with bulk queues too is not polled, and without the module no NIC is.
    let mut mixed = intent.clone();
    let queues = BTreeMap::from([(1, ontime_tenants::Class::Bulk)]);
    mixed.nics = BTreeMap::from([("eth0".to_owned(), NicConfig { queues, ..NicConfig::default() })]);
    let found = plan(&inventory, &mixed);
    assert!(file(&found).is_empty() && refusals(&found, RuleId::BusyPoll) == [Refusal::Kernel]);
    inventory.nics[0].busy_poll = None;
    let found = plan(&inventory, &intent);
    assert!(file(&found).is_empty());
    let remedy = &found.findings.iter().find(|of| of.rule == RuleId::BusyPoll).unwrap().remedy;
    assert!(remedy.contains("modprobe ontime_napi") && remedy.contains("6.19"), "{remedy}");
}
