//! The rules on real interfaces: veth pairs with NAPI, whose threads are real kernel threads.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // a test that cannot go on fails

#[path = "support/fleet.rs"]
mod fleet;
mod support;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use ontime_hostnet::{
    CpuSet, Done, Host, Intent, Inventory, Journal, Knob, KnobError, LiveHost, NicConfig, NicId, Plan, Report, Roots,
    RuleId, SteerFrom, Value, converge, drift, plan, reset,
};
use ontime_tenants::{Class, Level, Policy, ThreadId, ThreadRole};
use support::{in_namespace, run, unshare};

fn intent(nic: &str, level: u8) -> Intent {
    let class = Class::Rt(Level::try_from(level).unwrap());
    let config = NicConfig { class: Some(class), ..NicConfig::default() };
    Intent { nics: BTreeMap::from([(nic.to_owned(), config)]), ..Intent::default() }
}

/// Plans only for the namespace's interfaces; the machine's own knobs stay unchanged.
fn look(roots: &Roots, intent: &Intent) -> Plan {
    let mut found = plan(&Inventory::scan(roots), intent);
    found.settings.retain(|setting| matches!(setting.rule, RuleId::NapiThreaded | RuleId::NapiThread));
    found
}

fn apply(roots: &Roots, intent: &Intent, journal: &mut Journal) -> Report {
    let host = LiveHost::with_roots(roots.clone());
    let report = converge(&host, journal, |_| Ok::<_, Infallible>(look(roots, intent))).unwrap();
    for item in &report.items {
        assert!(!matches!(item.done, Done::Failed(_)), "{item:?}");
    }
    report
}

fn undo(roots: &Roots, journal: &mut Journal) -> Report {
    reset(&LiveHost::with_roots(roots.clone()), journal).unwrap()
}

fn journal(dir: &Path) -> Journal {
    Journal::open(&dir.join("originals"), "boot").unwrap()
}

/// Makes a veth pair with NAPI on both ends, up.
fn pair(queues: u32) {
    run(
        "ip",
        &format!(
            "link add va numtxqueues {queues} numrxqueues {queues} type veth peer name vb numtxqueues 2 numrxqueues 2"
        ),
    );
    for end in ["va", "vb"] {
        run("ethtool", &format!("-K {end} gro on"));
        run("ip", &format!("link set {end} up"));
    }
}

fn threads(roots: &Roots, nic: &str) -> Vec<Policy> {
    let inventory = Inventory::scan(roots);
    let pids = inventory.nic(nic).unwrap().napis.iter().filter_map(|napi| napi.pid);
    pids.map(|pid| inventory.threads.iter().find(|thread| thread.id.tid == pid).unwrap().policy).collect()
}

/// Before 6.8, instances are known only once they have threads.
fn lists_napi(inventory: &Inventory) -> bool {
    inventory.kernel.version >= ontime_hostnet::rules::NAPI_LISTED
}

fn threaded(roots: &Roots, nic: &str) -> Option<u32> {
    Inventory::scan(roots).nic(nic).unwrap().threaded
}

#[test]
fn napi_is_threaded_placed_and_given_back() {
    in_namespace(|roots| {
        let state = tempfile::tempdir().unwrap();
        let mut journal = journal(state.path());
        pair(4);
        let inventory = Inventory::scan(roots);
        if lists_napi(&inventory) {
            assert_eq!(inventory.nic("va").unwrap().napis.len(), 4, "{inventory:?}");
        }
        assert_eq!((threaded(roots, "va"), threads(roots, "va").len()), (Some(0), 0));

        let first = apply(roots, &intent("va", 1), &mut journal);
        assert_eq!(threaded(roots, "va"), Some(1));
        assert_eq!(threads(roots, "va"), [Policy::Fifo(44); 4], "{first:?}");
        assert_eq!(threads(roots, "vb"), [Policy::BULK_DRIVER; 2]);
        let second = apply(roots, &intent("va", 1), &mut journal).counts();
        assert_eq!((second.changed, second.restored), (0, 0));

        // Another level moves the threads. The originals are still the kernel's policies.
        apply(roots, &intent("va", 0), &mut journal);
        assert_eq!(threads(roots, "va"), [Policy::Fifo(49); 4]);
        assert!(journal.entries().iter().all(|kept| !matches!(kept.value, Value::Policy(Policy::Fifo(_)))));

        undo(roots, &mut journal);
        assert_eq!(threaded(roots, "va"), Some(0));
        // Before 6.17 the threads stay, asleep, with their initial policy.
        assert!(threads(roots, "va").iter().all(|policy| *policy == Policy::BULK));
        assert!(journal.entries().is_empty());
        undo(roots, &mut journal);
    });
}

#[test]
fn a_nic_without_napi_refuses_and_nothing_is_kept_of_it() {
    in_namespace(|roots| {
        let state = tempfile::tempdir().unwrap();
        let mut journal = journal(state.path());
        // A veth has instances only if it has GRO.
        run("ip", "link add plain type veth peer name other");
        run("ethtool", "-K plain gro off");
        run("ip", "link set plain up");
        let host = LiveHost::with_roots(roots.clone());
        for _ in 0..2 {
            let report = converge(&host, &mut journal, |_| {
                let mut inventory = Inventory::scan(roots);
                // Rules skip a virtual interface without instances.
                inventory.nics.iter_mut().for_each(|nic| nic.physical |= nic.id.name == "plain");
                let mut found = plan(&inventory, &intent("plain", 0));
                found.settings.retain(|setting| setting.rule == RuleId::NapiThreaded);
                Ok::<_, Infallible>(found)
            });
            let done: Vec<_> = report.unwrap().items.into_iter().map(|item| item.done).collect();
            let refused = |why: &str| why.contains("the driver or device does not have this");
            assert!(matches!(done.as_slice(), [Done::Unsupported(why)] if refused(why)), "{done:?}");
            assert!(journal.entries().is_empty());
        }
    });
}

#[test]
fn an_instance_the_administrator_threaded_stays_threaded_after_reset() {
    in_namespace(|roots| {
        let state = tempfile::tempdir().unwrap();
        let mut journal = journal(state.path());
        pair(4);
        let host = LiveHost::with_roots(roots.clone());
        let inventory = Inventory::scan(roots);
        if !lists_napi(&inventory) {
            return println!("SKIPPED: this kernel does not list NAPI instances");
        }
        let va = inventory.nic("va").unwrap();
        let own = Knob::NapiThreaded { nic: va.id.clone(), napi: va.napis[2].id };
        match host.read(&own) {
            Err(KnobError::Unsupported { why, .. }) => return println!("SKIPPED: {why}"),
            found => assert_eq!(found.unwrap(), Value::Threaded(0)),
        }
        host.write(&own, &Value::Threaded(1)).unwrap();
        apply(roots, &intent("va", 0), &mut journal);
        assert_eq!(threads(roots, "va"), [Policy::Fifo(49); 4]);
        undo(roots, &mut journal);
        let inventory = Inventory::scan(roots);
        let modes: Vec<_> = inventory.nic("va").unwrap().napis.iter().map(|napi| napi.threaded).collect();
        let index = inventory.nic("va").unwrap().napis.iter().position(|napi| napi.id == va.napis[2].id).unwrap();
        assert_eq!(modes.iter().filter(|mode| **mode == Some(1)).count(), 1, "{modes:?}");
        assert_eq!(modes[index], Some(1));
        assert_eq!(threaded(roots, "va"), Some(0));
    });
}

#[test]
fn down_up_rename_queues_and_deletion_while_applied() {
    in_namespace(|roots| {
        let state = tempfile::tempdir().unwrap();
        let mut journal = journal(state.path());
        pair(4);
        let wanted = intent("va", 0);
        apply(roots, &wanted, &mut journal);

        // Down and up creates new instances, which are threaded from the start. Their threads are at SCHED_OTHER until
        // placed.
        run("ip", "link set va down");
        let down = apply(roots, &wanted, &mut journal);
        assert!(down.items.iter().all(|item| matches!(item.done, Done::Already | Done::Gone)), "{down:?}");
        run("ip", "link set va up");
        let host = LiveHost::with_roots(roots.clone());
        assert!(!drift(&host, &look(roots, &wanted), &journal).is_empty());
        apply(roots, &wanted, &mut journal);
        assert_eq!(threads(roots, "va"), [Policy::Fifo(49); 4]);

        run("ethtool", "-L va rx 2 tx 2");
        apply(roots, &wanted, &mut journal);
        assert_eq!(threads(roots, "va"), [Policy::Fifo(49); 2]);
        run("ethtool", "-L va rx 3 tx 3");
        apply(roots, &wanted, &mut journal);
        assert_eq!(threads(roots, "va"), [Policy::Fifo(49); 3]);

        // Entries of ended threads do not accumulate: two NICs, two NAPI instances of the bulk NIC, their threads, and
        // three threads of the RT NIC.
        assert!(journal.entries().len() <= 2 + 2 + 2 + 3, "{:?}", journal.entries());

        // After a rename, the journal's entry still finds the interface.
        run("ip", "link set va down");
        run("ip", "link set va name vc");
        run("ip", "link set vc up");
        assert_eq!(threaded(roots, "vc"), Some(1));
        undo(roots, &mut journal);
        assert_eq!(threaded(roots, "vc"), Some(0));

        apply(roots, &intent("vc", 0), &mut journal);
        run("ip", "link del vc");
        let report = undo(roots, &mut journal).counts();
        assert!(report.gone > 0 && report.failed == 0 && journal.entries().is_empty(), "{report:?}");
    });
}

#[test]
fn a_name_taken_over_by_another_interface_is_never_touched() {
    in_namespace(|roots| {
        let state = tempfile::tempdir().unwrap();
        let mut journal = journal(state.path());
        pair(2);
        apply(roots, &intent("va", 0), &mut journal);
        run("ip", "link del va");
        pair(2);
        std::fs::write(roots.sys.join("class/net/va/threaded"), "1").unwrap();
        undo(roots, &mut journal);
        assert_eq!(threaded(roots, "va"), Some(1), "the new interface's own setting was undone");
    });
}

#[test]
fn xps_and_clsact_are_set_and_given_back() {
    in_namespace(|roots| {
        pair(4);
        let host = LiveHost::with_roots(roots.clone());
        let inventory = Inventory::scan(roots);
        let nic = inventory.nic("va").unwrap().id.clone();
        let xps = Knob::XpsCpus { nic: nic.clone(), queue: 1 };
        let before = host.read(&xps).unwrap();
        let both = Value::Cpus(CpuSet::from_list("0-1").unwrap());
        host.write(&xps, &both).unwrap();
        assert_eq!(host.read(&xps).unwrap(), both);
        host.write(&xps, &before).unwrap();
        assert_eq!(host.read(&xps).unwrap(), before);
        let beyond = Knob::XpsCpus { nic: nic.clone(), queue: 9 };
        assert!(matches!(host.read(&beyond), Err(KnobError::Gone(_))));

        let clsact = Knob::Clsact { nic: nic.clone() };
        assert_eq!(host.read(&clsact).unwrap(), Value::Present(false));
        match host.write(&clsact, &Value::Present(true)) {
            Err(KnobError::Unsupported { why, .. }) => return println!("SKIPPED clsact: {why}"),
            other => other.unwrap(),
        }
        assert_eq!(host.read(&clsact).unwrap(), Value::Present(true));
        let source = NicId { ifindex: inventory.nic("vb").unwrap().id.ifindex, name: "vb".to_owned() };
        for from in [SteerFrom::Interface(source), SteerFrom::SourceMac([0x52, 0x54, 0, 1, 2, 3])] {
            steer_round_trip(&host, &Knob::TxSteer { nic: nic.clone(), queue: 3, from });
        }
        host.write(&clsact, &Value::Present(false)).unwrap();
        assert_eq!(host.read(&clsact).unwrap(), Value::Present(false));
    });
}

fn steer_round_trip(host: &LiveHost, knob: &Knob) {
    assert_eq!(host.read(knob).unwrap(), Value::Present(false));
    match host.write(knob, &Value::Present(true)) {
        Err(KnobError::Unsupported { why, .. }) => return println!("SKIPPED {knob}: {why}"),
        other => other.unwrap(),
    }
    assert_eq!(host.read(knob).unwrap(), Value::Present(true));
    // Setting the filter twice leaves one filter.
    host.write(knob, &Value::Present(true)).unwrap();
    host.write(knob, &Value::Present(false)).unwrap();
    assert_eq!(host.read(knob).unwrap(), Value::Present(false));
    host.write(knob, &Value::Present(false)).unwrap();
}

/// The bulk TCP flow while `cycles` ran: packets as both ends' kernels count them, per segment.
struct Flow {
    bytes: u64,
    sent: i64,
    received: i64,
}

fn with_flow(cycles: impl FnOnce(&Roots) + Send) -> Option<Flow> {
    let mut flow = None;
    in_namespace(|roots| {
        let (bytes, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        let (hello, peer) = mpsc::channel();
        let (go, ready) = mpsc::channel();
        pair(2);
        std::thread::scope(|scope| {
            let moved = &bytes;
            let receiver_thread = scope.spawn(move || receive(hello, ready, moved));
            // The receiver is a thread with its own namespace, into which vb is moved.
            let receiver: i32 = peer.recv().unwrap();
            run("ip", &format!("link set vb netns {receiver}"));
            run("ip", "addr add 10.99.0.1/24 dev va");
            go.send(0).unwrap();
            let _: i32 = peer.recv().unwrap();
            let mut stream = TcpStream::connect((Ipv4Addr::new(10, 99, 0, 2), 7)).unwrap();
            let sender = scope.spawn({
                let stop = &stop;
                move || {
                    let block = vec![7u8; 65536];
                    while !stop.load(Ordering::Relaxed) {
                        stream.write_all(&block).unwrap();
                    }
                }
            });
            cycles(roots);
            stop.store(true, Ordering::Relaxed);
            sender.join().unwrap();
            // The receiver has all bytes; only packets that are in flight can still arrive.
            let _: i32 = peer.recv().unwrap();
            let sent = sent();
            go.send(sent).unwrap();
            let received = receiver_thread.join().unwrap();
            flow = Some(Flow { bytes: bytes.load(Ordering::Relaxed), sent, received });
        });
    });
    flow
}

/// Receives the whole stream, then waits, 10 s at most, for as many packets as `ready` reports as sent. Returns the
/// number of packets received.
fn receive(hello: mpsc::Sender<i32>, ready: mpsc::Receiver<i64>, bytes: &AtomicU64) -> i64 {
    unshare();
    let tid = rustix::thread::gettid().as_raw_nonzero().get();
    hello.send(tid).unwrap();
    ready.recv().unwrap();
    run("ip", "addr add 10.99.0.2/24 dev vb");
    run("ip", "link set vb up");
    let listener = TcpListener::bind("0.0.0.0:7").unwrap();
    hello.send(tid).unwrap();
    let (mut stream, _) = listener.accept().unwrap();
    let mut block = vec![0u8; 1 << 20];
    loop {
        match stream.read(&mut block).unwrap() {
            0 => break,
            count => {
                assert!(block[..count].iter().all(|byte| *byte == 7));
                bytes.fetch_add(count as u64, Ordering::Relaxed);
            }
        }
    }
    hello.send(tid).unwrap();
    let sent = ready.recv().unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    while received() < sent && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(10));
    }
    received()
}

/// TCP segments sent from this network namespace, including retransmissions.
fn sent() -> i64 {
    counter("snmp", "Tcp: ", "OutSegs") + counter("snmp", "Tcp: ", "RetransSegs")
}

/// IPv4 packets received in this network namespace. An aggregate counts as the segments from which it was made.
fn received() -> i64 {
    ["InNoECTPkts", "InECT1Pkts", "InECT0Pkts", "InCEPkts"].map(|name| counter("netstat", "IpExt: ", name)).iter().sum()
}

/// A counter of this thread's network namespace.
fn counter(file: &str, table: &str, name: &str) -> i64 {
    let text = std::fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap();
    let mut lines = text.lines().filter_map(|line| line.strip_prefix(table));
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    let at = names.split(' ').position(|other| other == name).unwrap();
    values.split(' ').nth(at).unwrap().parse().unwrap()
}

#[test]
fn a_hundred_cycles_under_a_tcp_flow_lose_no_packet() {
    let Some(flow) = with_flow(|roots| {
        let state = tempfile::tempdir().unwrap();
        let mut journal = journal(state.path());
        let drops = || -> u64 {
            let file = |name| std::fs::read_to_string(roots.sys.join("class/net/va/statistics").join(name)).unwrap();
            ["rx_dropped", "tx_dropped", "rx_errors", "tx_errors"]
                .map(|name| file(name).trim().parse::<u64>().unwrap())
                .iter()
                .sum()
        };
        let before = drops();
        for _ in 0..100 {
            apply(roots, &intent("va", 0), &mut journal);
            undo(roots, &mut journal);
        }
        assert_eq!(drops(), before);
    }) else {
        return;
    };
    println!("{} MB moved; {} packets sent, {} received", flow.bytes >> 20, flow.sent, flow.received);
    assert!(flow.bytes > 10 << 20, "the flow stalled: {} bytes", flow.bytes);
    assert_eq!(flow.received, flow.sent, "packets were lost");
}

/// Threads of this process that sleep until dropped.
struct Sleepers {
    threads: Vec<ThreadId>,
    _wake: Vec<mpsc::Sender<()>>,
}

fn sleepers(count: usize) -> Sleepers {
    let pid = i32::try_from(std::process::id()).unwrap();
    let (mut threads, mut wake) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let (tell, told) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        std::thread::spawn(move || {
            tell.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
            let _ = ended.recv();
        });
        threads.push(ThreadId::of(pid, told.recv().unwrap()).unwrap());
        wake.push(end);
    }
    Sleepers { threads, _wake: wake }
}

/// A process in its own network namespace, with the other end of `va`. Everything ends with it.
struct Container(std::process::Child);

impl Container {
    fn start() -> Self {
        let child = std::process::Command::new("unshare").args(["--net", "sleep", "600"]).spawn().unwrap();
        let pid = child.id();
        let namespace = |of: &str| std::fs::read_link(format!("/proc/{of}/ns/net")).unwrap();
        while namespace(&pid.to_string()) == namespace("thread-self") {
            std::thread::sleep(Duration::from_millis(5));
        }
        run("ip", &format!("link add va type veth peer name eth0 netns {pid}"));
        run("ip", "addr add 10.99.0.1/24 dev va");
        run("ip", "link set va up");
        let own = Self(child);
        own.inside("ip addr add 10.99.0.2/24 dev eth0");
        own.inside("ip link set eth0 up");
        own
    }

    fn inside(&self, command: &str) {
        run("nsenter", &format!("-t {} -n {command}", self.0.id()));
    }

    /// Sends datagrams to the host, with pauses between them.
    fn send(&self, count: u32) {
        let each = "echo > /dev/udp/10.99.0.1/9; sleep 0.02";
        let all = format!("for one in $(seq {count}); do {each}; done");
        let pid = self.0.id().to_string();
        let sent = std::process::Command::new("nsenter").args(["-t", &pid, "-n", "bash", "-c", &all]).status().unwrap();
        assert!(sent.success());
    }

    fn tenant(&self) -> ontime_tenants::Tenant {
        let pid = i32::try_from(self.0.id()).unwrap();
        let mut tenant = fleet::vm(&mut Inventory::default(), 1, fleet::rt(0), 1, "va");
        tenant.kind = ontime_tenants::Kind::Container;
        tenant.process = ThreadId::of(pid, pid).unwrap();
        tenant.vnics = vec![ontime_tenants::Vnic { ifname: "va".to_owned(), ..ontime_tenants::Vnic::default() }];
        tenant.threads.clear();
        tenant
    }

    /// GRO and TSO of both ends, as ethtool(8) shows them.
    fn offloads(&self) -> [String; 2] {
        let of = |command: &str| {
            let (program, arguments) = command.split_once(' ').unwrap();
            let output = std::process::Command::new(program).args(arguments.split(' ')).output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            let wanted = |line: &&str| line.starts_with("generic-receive") || line.starts_with("tcp-segmentation");
            text.lines().filter(wanted).map(|line| line.split(": ").nth(1).unwrap()).collect::<Vec<_>>().join(" ")
        };
        [of("ethtool -k va"), of(&format!("nsenter -t {} -n ethtool -k eth0", self.0.id()))]
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// As [`look`], with the rules for an RT container's pair.
fn look_at_veth(roots: &Roots, intent: &Intent) -> Plan {
    let mut found = plan(&Inventory::scan(roots), intent);
    let ours = [RuleId::Veth, RuleId::NapiThreaded, RuleId::NapiThread];
    found.settings.retain(|setting| ours.contains(&setting.rule));
    found
}

#[test]
fn the_far_ends_originals_outlive_the_process_that_led_there() {
    in_namespace(|roots| {
        let state = tempfile::tempdir().unwrap();
        let mut journal = journal(state.path());
        let mut container = Container::start();
        let host = LiveHost::with_roots(roots.clone());
        let apply = |container: &Container, journal: &mut Journal| {
            let wanted = Intent { tenants: vec![container.tenant()], ..intent("va", 0) };
            converge(&host, journal, |_| Ok::<_, Infallible>(look_at_veth(roots, &wanted))).unwrap()
        };
        apply(&container, &mut journal);
        assert_eq!(container.offloads(), ["off on", "off on"]);
        let kept = journal.entries().len();

        let first = container.0.id().to_string();
        let second = std::process::Command::new("nsenter").args(["-t", &first, "-n", "sleep", "600"]).spawn().unwrap();
        let namespace = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/net")).unwrap();
        while namespace(&second.id().to_string()) != namespace(&first) {
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(Container(std::mem::replace(&mut container.0, second)));
        assert_eq!(apply(&container, &mut journal).counts().changed, 0);
        assert_eq!(journal.entries().len(), kept);
        undo(roots, &mut journal);
        assert_eq!(container.offloads(), ["on off", "on off"]);
        assert!(journal.entries().is_empty());
    });
}

#[test]
fn an_rt_containers_veth_leaves_the_backlog_at_both_ends_and_comes_back() {
    in_namespace(|roots| {
        let state = tempfile::tempdir().unwrap();
        let mut journal = journal(state.path());
        let container = Container::start();
        let wanted = Intent { tenants: vec![container.tenant()], ..intent("va", 0) };
        let look = |_: &Journal| Ok::<_, Infallible>(look_at_veth(roots, &wanted));
        let host = LiveHost::with_roots(roots.clone());
        assert_eq!(container.offloads(), ["on off", "on off"], "TSO, GRO");
        let report = converge(&host, &mut journal, look).unwrap();
        let failed = report.items.iter().find(|item| matches!(item.done, Done::Failed(_) | Done::Unsupported(_)));
        assert!(failed.is_none(), "{failed:?}");
        assert_eq!(container.offloads(), ["off on", "off on"]);
        // The container's packets arrive through the NAPI thread of the host's end.
        let inventory = Inventory::scan(roots);
        // The thread is found by id, because other tests' namespaces have devices, and so threads, of this name.
        let nic = inventory.nics.iter().find(|nic| nic.id.name == "va").unwrap();
        let napi = nic.napis.iter().find_map(|napi| napi.pid).unwrap();
        let thread = inventory.threads.iter().find(|thread| thread.id.tid == napi).unwrap();
        assert_eq!(thread.policy, Policy::Fifo(49));
        let switches = || {
            let status = std::fs::read_to_string(format!("/proc/{}/status", thread.id.tid)).unwrap();
            let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches")).unwrap();
            line.rsplit('\t').next().unwrap().parse::<u64>().unwrap()
        };
        let before = switches();
        // If the thread waits long for its CPU, it takes several datagrams at once: send them in up to five rounds.
        for _ in 0..5 {
            container.send(20);
            if switches() >= before + 20 {
                break;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        assert!(switches() >= before + 20, "{before} {}", switches());

        assert_eq!(converge(&host, &mut journal, look).unwrap().counts().changed, 0);
        container.inside("ethtool -K eth0 gro off");
        let drifted = drift(&host, &look(&journal).unwrap(), &journal);
        assert_eq!(drifted.len(), 1, "{drifted:?}");
        assert!(drifted[0].setting.knob.to_string().starts_with("rx-gro of the other end of va"), "{drifted:?}");
        converge(&host, &mut journal, look).unwrap();
        assert_eq!(container.offloads(), ["off on", "off on"]);

        undo(roots, &mut journal);
        assert_eq!(container.offloads(), ["on off", "on off"]);
        assert!(journal.entries().is_empty());

        // A container that ends while the rule is applied takes its end of the pair along.
        converge(&host, &mut journal, look).unwrap();
        drop(container);
        let deadline = Instant::now() + Duration::from_secs(30);
        while Inventory::scan(roots).nic("va").is_some() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(50));
        }
        let report = undo(roots, &mut journal);
        assert!(report.items.iter().all(|item| !matches!(item.done, Done::Failed(_))), "{report:?}");
        assert!(journal.entries().is_empty(), "{:?}", journal.entries());
    });
}

/// The NAPI instances end when GRO is switched off, and settings of the instances cannot be restored afterwards.
#[test]
fn what_no_rt_container_has_any_longer_is_given_back_in_order() {
    in_namespace(|roots| {
        let state = tempfile::tempdir().unwrap();
        let mut journal = journal(state.path());
        let container = Container::start();
        let host = LiveHost::with_roots(roots.clone());
        let wanted = Intent { tenants: vec![container.tenant()], ..intent("va", 0) };
        // The last pass removes the thread from the journal, because it no longer exists.
        for intent in [wanted, Intent::default(), Intent::default()] {
            converge(&host, &mut journal, |_| Ok::<_, Infallible>(look_at_veth(roots, &intent))).unwrap();
            assert_eq!(threaded(roots, "va"), Some(u32::from(!intent.tenants.is_empty())));
        }
        assert!(journal.entries().is_empty(), "{:?}", journal.entries());
        assert_eq!(container.offloads(), ["on off", "on off"]);
    });
}

/// GRO creates the NAPI of a veth, and switching GRO off by hand ends the NAPI and its thread. One pass restores both.
#[test]
fn a_veth_whose_gro_is_switched_off_by_hand_is_threaded_again_by_the_next_pass() {
    in_namespace(|roots| {
        let state = tempfile::tempdir().unwrap();
        let mut journal = journal(state.path());
        let container = Container::start();
        let wanted = Intent { tenants: vec![container.tenant()], ..intent("va", 0) };
        let host = LiveHost::with_roots(roots.clone());
        let pass = |journal: &mut Journal| {
            converge(&host, journal, |_| Ok::<_, Infallible>(look_at_veth(roots, &wanted))).unwrap();
        };
        let thread = || {
            let inventory = Inventory::scan(roots);
            let napi = inventory.nic("va")?.napis.iter().find_map(|napi| napi.pid)?;
            let thread = inventory.threads.iter().find(|thread| thread.id.tid == napi)?;
            Some((thread.id, thread.policy))
        };
        pass(&mut journal);
        let kept = journal.entries().len();
        for by_hand in ["gro off", "gro off tso on"] {
            let (before, _) = thread().unwrap();
            run("ethtool", &format!("-K va {by_hand}"));
            assert_eq!(thread(), None, "{by_hand}: the NAPI has gone");
            pass(&mut journal);
            assert_eq!(threaded(roots, "va"), Some(1), "{by_hand}");
            let (after, policy) = thread().unwrap();
            assert_eq!((after != before, policy), (true, Policy::Fifo(49)), "{by_hand}");
            assert_eq!(container.offloads(), ["off on", "off on"], "{by_hand}");
            pass(&mut journal);
            // The former NAPI and its thread are removed from the journal.
            assert!(journal.entries().len() <= kept, "{by_hand}: {:?}", journal.entries());
        }
        undo(roots, &mut journal);
        assert_eq!(threaded(roots, "va"), Some(0));
        assert_eq!(container.offloads(), ["on off", "on off"]);
        assert!(journal.entries().is_empty(), "{:?}", journal.entries());
    });
}

#[test]
fn a_hundred_vms_and_64_queues_are_looked_at_and_applied() {
    in_namespace(|roots| {
        let state = tempfile::tempdir().unwrap();
        let mut journal = journal(state.path());
        run("ip", "link add va numtxqueues 64 numrxqueues 64 type veth peer name vb");
        run("ethtool", "-K va gro on");
        run("ethtool", "-L va rx 64 tx 64");
        run("ip", "link set vb up");
        run("ip", "link set va up");
        let sleepers = sleepers(500);
        let born_with = sleepers.threads[499].policy().unwrap();
        let mut made_up = Inventory::default();
        let tenants = (0..100).zip(sleepers.threads.chunks(5)).map(|(number, threads)| {
            let mut vm = fleet::vm(&mut made_up, number, fleet::rt(0), 5, "va");
            vm.threads.retain(|thread| matches!(thread.role, ThreadRole::Vcpu(_)));
            vm.threads.iter_mut().zip(threads).for_each(|(thread, id)| thread.id = *id);
            vm
        });
        let wanted = Intent { tenants: tenants.collect(), ..intent("va", 0) };
        let look = |_: &Journal| {
            let mut found = plan(&Inventory::scan(roots), &wanted);
            let ours = [RuleId::NapiThreaded, RuleId::NapiThread, RuleId::VcpuPlace];
            found.settings.retain(|setting| ours.contains(&setting.rule));
            Ok::<_, Infallible>(found)
        };
        let host = LiveHost::with_roots(roots.clone());
        let start = Instant::now();
        let report = converge(&host, &mut journal, look).unwrap();
        let first = start.elapsed();
        let start = Instant::now();
        converge(&host, &mut journal, look).unwrap();
        println!("applied in {first:?}, again in {:?}: {:?}", start.elapsed(), report.counts());
        assert_eq!(threads(roots, "va"), [Policy::Fifo(49); 64]);
        assert_eq!(sleepers.threads[499].policy().unwrap(), Policy::Fifo(47));
        undo(roots, &mut journal);
        assert_eq!(sleepers.threads[499].policy().unwrap(), born_with);
        assert_eq!(threaded(roots, "va"), Some(0));
    });
}
