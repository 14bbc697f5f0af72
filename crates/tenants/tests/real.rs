//! Discovery and placement of real QEMU processes on this machine.
#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing)]

mod common;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ontime_tenants::config::Text;
use ontime_tenants::{
    Class, Discovery, Kind, Level, Policy, PriorityTable, ProblemKind, Rules, Sources, Tenant, ThreadError, ThreadRole,
    discover, wanted,
};

const QEMU: &str = "qemu-system-x86_64";

/// Timeout on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// A VM that is stopped before its first instruction. It ends with the test.
struct Vm(Child);

impl Vm {
    fn start(arguments: &[&str]) -> Option<Self> {
        Self::start_by(&[], arguments)
    }

    /// Runs `BEFORE qemu ARGUMENTS`; the program in `BEFORE` executes QEMU.
    fn start_by(before: &[&str], arguments: &[&str]) -> Option<Self> {
        if !common::has(QEMU) {
            println!("SKIPPED: {QEMU} is not installed");
            return None;
        }
        let fixed = ["-S", "-nodefaults", "-display", "none", "-accel", "tcg", "-smp", "2", "-m", "32"];
        let line: Vec<&str> = before.iter().chain(&[QEMU]).chain(&fixed).chain(arguments).copied().collect();
        let child = Command::new(line[0]).args(&line[1..]).stdin(Stdio::null()).stderr(Stdio::null()).spawn();
        Some(Self(child.unwrap()))
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.0.id()).unwrap()
    }

    /// Runs discovery until this VM has two vCPU threads.
    fn discover(&self, sources: &Sources, rules: &Rules) -> (Tenant, Discovery) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let found = discover(sources, rules);
            let own = found.tenants.iter().find(|tenant| tenant.process.pid == self.pid());
            if let Some(tenant) = own.filter(|tenant| vcpus(tenant).len() == 2) {
                return (tenant.clone(), found);
            }
            assert!(Instant::now() < deadline, "not found: {found:#?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn vcpus(tenant: &Tenant) -> Vec<u32> {
    let mut numbers: Vec<u32> = tenant
        .threads
        .iter()
        .filter_map(|thread| match thread.role {
            ThreadRole::Vcpu(number) => Some(number),
            _ => None,
        })
        .collect();
    numbers.sort_unstable();
    numbers
}

fn rules(name: &str) -> Rules {
    let text = format!("[[tenant]]\nname = \"{name}\"\nclass = \"rt\"\nlevel = 1\nruntime-cap = 0.5\n");
    Rules::parse(&[Text::new("/etc/ontime/tenants.toml", text)]).unwrap()
}

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("SKIPPED: needs root");
    }
    root
}

#[test]
fn a_real_qemu_is_found_with_class_and_threads_placed_and_put_back() {
    let name = format!("rt-{}", std::process::id());
    let Some(vm) = Vm::start(&["-name", &format!("guest={name},debug-threads=on"), "-object", "iothread,id=iothread1"])
    else {
        return;
    };
    if !is_root() {
        return;
    }
    let (sources, rules) = (Sources::host(), rules(&name));
    let (tenant, _) = vm.discover(&sources, &rules);
    assert_eq!((tenant.name.as_str(), tenant.kind, tenant.owner), (name.as_str(), Kind::Qemu, 0));
    assert_eq!((tenant.class, tenant.runtime_cap), (Class::Rt(Level::try_from(1u8).unwrap()), 0.5));
    assert_eq!(vcpus(&tenant), [0, 1]);
    assert!(tenant.threads.iter().any(|thread| thread.role == ThreadRole::Iothread && thread.comm == "IO iothread1"));
    assert!(tenant.threads.iter().any(|thread| thread.id == tenant.process && thread.role == ThreadRole::Emulator));

    let table = rules.table();
    for thread in tenant.threads.iter().filter(|thread| wanted(&tenant, thread, &table).is_some()) {
        thread.id.set_policy(wanted(&tenant, thread, &table).unwrap()).unwrap();
    }
    let (placed, _) = vm.discover(&sources, &rules);
    for (before, thread) in tenant.threads.iter().zip(&placed.threads) {
        assert_eq!(before.id, thread.id);
        let expected = match thread.role {
            ThreadRole::Vcpu(_) => Policy::Fifo(42),
            ThreadRole::Emulator if thread.id == tenant.process => PriorityTable::VMM,
            _ => before.policy,
        };
        assert_eq!(thread.policy, expected, "{}", thread.comm);
        assert_eq!(thread.affinity, thread.id.affinity().unwrap().to_string());
    }
    for (before, after) in tenant.threads.iter().zip(&placed.threads) {
        after.id.set_policy(before.policy).unwrap();
        assert_eq!(after.id.policy().unwrap(), before.policy);
    }

    let ids: Vec<_> = tenant.threads.iter().map(|thread| thread.id).collect();
    drop(vm);
    for id in ids {
        assert!(matches!(id.set_policy(Policy::Fifo(42)), Err(ThreadError::Gone(_))));
    }
    assert!(!discover(&sources, &rules).tenants.iter().any(|left| left.process == tenant.process));
}

#[test]
fn a_qemu_without_thread_names_is_asked_by_its_monitor() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("qmp");
    let name = format!("unnamed-{}", std::process::id());
    let qmp = format!("unix:{},server=on,wait=off", socket.display());
    // debug-threads is on by default since QEMU 10.x, so it is switched off here.
    let Some(vm) = Vm::start(&["-name", &format!("guest={name},debug-threads=off"), "-qmp", &qmp]) else { return };
    let sources = Sources::host();
    wait_for(&socket);
    let (tenant, found) = vm.discover(&sources, &rules(&name));
    assert_eq!(vcpus(&tenant), [0, 1]);
    assert!(!has_unnamed(&found, &name));
    // The monitor is free again for another client.
    let other = Sources::host();
    vm.discover(&other, &rules(&name));
}

#[test]
fn a_qemu_that_cannot_be_asked_is_reported_and_costs_no_wait_twice() {
    let name = format!("mute-{}", std::process::id());
    let Some(vm) = Vm::start(&["-name", &format!("guest={name},debug-threads=off")]) else { return };
    let sources = Sources::host();
    let deadline = Instant::now() + PATIENCE;
    while !has_unnamed(&discover(&sources, &rules(&name)), &name) {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(!has_unnamed(&discover(&sources, &Rules::default()), &name), "a bulk VM is nobody's problem");
    drop(vm);
}

#[test]
fn a_monitor_held_by_another_client_delays_once_only() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("qmp");
    let name = format!("held-{}", std::process::id());
    let qmp = format!("unix:{},server=on,wait=off", socket.display());
    let Some(vm) = Vm::start(&["-name", &format!("guest={name},debug-threads=off"), "-qmp", &qmp]) else { return };
    wait_for(&socket);
    // While QEMU has a client, its socket keeps the connection of each query, even after the query's end. So there are
    // the listener, the holder's connection, and one of each query: two discoveries in a row make one query. On a busy
    // machine so much time may pass between the two that the second one asks again; then repeat.
    let asks_once = || {
        let mut holder = std::os::unix::net::UnixStream::connect(&socket).unwrap();
        std::io::Read::read(&mut holder, &mut [0u8; 16]).unwrap();
        let sources = Sources::host();
        let both = [(); 2].map(|()| has_unnamed(&discover(&sources, &rules(&name)), &name));
        both == [true, true] && at_path(&socket).len() == 3
    };
    let deadline = Instant::now() + PATIENCE;
    while !asks_once() {
        assert!(Instant::now() < deadline, "a held monitor is asked in each discovery");
    }
    drop(vm);
}

#[test]
fn a_libvirt_status_file_makes_a_real_qemu_a_domain() {
    let name = format!("dom-{}", std::process::id());
    let Some(vm) = Vm::start(&["-name", &format!("guest={name},debug-threads=on")]) else { return };
    let host = common::Host::new();
    let sources = Sources { libvirt: host.path("run/libvirt/qemu"), ..Sources::host() };
    let inside = "<metadata><o:tenant xmlns:o='https://ontime.dev/xmlns/tenant/1' class='rt'/></metadata>\
                  <cputune><vcpusched vcpus='1' scheduler='fifo' priority='50'/></cputune>";
    host.domain(&name, vm.pid(), "3f1c9a52-0d52-4c1b-9e0a-6f4b7f1d2c33", inside);
    let (tenant, found) = vm.discover(&sources, &Rules::default());
    assert_eq!((tenant.kind, tenant.class), (Kind::Libvirt, Class::Rt(Level::HIGHEST)));
    let places: Vec<_> = tenant
        .threads
        .iter()
        .filter(|thread| matches!(thread.role, ThreadRole::Vcpu(_)))
        .map(|thread| wanted(&tenant, thread, &Rules::default().table()))
        .collect();
    assert_eq!(places, [Some(Policy::Fifo(47)), None], "vCPU 1 is libvirt's");
    let conflict = |kind: &ProblemKind| matches!(kind, ProblemKind::Conflict(_));
    assert!(found.problems.iter().any(|problem| problem.subject == name && conflict(&problem.kind)));
}

#[test]
fn a_storm_of_starting_and_ending_vms_never_places_a_stranger() {
    if !common::has(QEMU) || !is_root() {
        return;
    }
    let prefix = format!("storm-{}-", std::process::id());
    let rules = rules(&format!("{prefix}*"));
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let ended = stop.clone();
    let names = prefix.clone();
    let start = Instant::now();
    let storm = std::thread::spawn(move || {
        let mut started = 0;
        while !ended.load(std::sync::atomic::Ordering::Relaxed) {
            let vm = Vm::start(&["-name", &format!("guest={names}{started},debug-threads=on")]);
            // Where a discovery takes longer than a VM lives, they live longer and longer.
            std::thread::sleep(Duration::from_millis((60 + 37 * (started % 5)) * (1 + start.elapsed().as_secs() / 4)));
            drop(vm);
            started += 1;
        }
        started
    });
    let (sources, table) = (Sources::host(), rules.table());
    let (mut placed, mut gone) = (0u32, 0u32);
    while start.elapsed() < Duration::from_secs(4) || placed < 4 {
        assert!(start.elapsed() < PATIENCE, "placed {placed}, gone {gone}");
        for tenant in discover(&sources, &rules).tenants.iter().filter(|tenant| tenant.name.starts_with(&prefix)) {
            for thread in &tenant.threads {
                let Some(policy) = wanted(tenant, thread, &table) else { continue };
                match thread.id.set_policy(policy) {
                    Ok(()) => placed += 1,
                    Err(ThreadError::Gone(_)) => gone += 1,
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    println!("{} VMs, {placed} placed, {gone} gone", storm.join().unwrap());
}

/// A tap that is removed with its VM.
#[test]
fn the_tap_of_a_real_qemu_is_found_by_its_open_file() {
    if !is_root() || !Path::new("/dev/net/tun").exists() {
        println!("SKIPPED: needs root and /dev/net/tun");
        return;
    }
    let id = std::process::id();
    let (name, tap) = (format!("tap-{id}"), format!("ot{id}"));
    let netdev = format!("tap,id=n0,ifname={tap},script=no,downscript=no");
    let device = ["-netdev", &netdev, "-device", "virtio-net-pci,netdev=n0"];
    let named = format!("guest={name},debug-threads=on");
    let Some(vm) = Vm::start(&[&["-name", named.as_str()][..], &device[..]].concat()) else { return };
    let (tenant, _) = vm.discover(&Sources::host(), &Rules::default());
    assert_eq!(tenant.vnics.len(), 1);
    assert_eq!(tenant.vnics[0].ifname, tap);
    assert!(tenant.vnics[0].lower.is_empty());
}

fn has_unnamed(found: &Discovery, name: &str) -> bool {
    found.problems.iter().any(|one| one.subject == name && matches!(one.kind, ProblemKind::VcpusUnnamed { .. }))
}

/// The flags of each socket with this path: the listener, its accepted connections and those that wait.
fn at_path(path: &Path) -> Vec<String> {
    // "Num RefCount Protocol Flags Type St Inode Path" (`net/unix/af_unix.c`, unix_seq_show).
    let flags = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        fields.last().filter(|last| Path::new(last) == path)?;
        fields.get(3).map(|flags| (*flags).to_owned())
    };
    std::fs::read_to_string("/proc/net/unix").unwrap().lines().filter_map(flags).collect()
}

/// Waits until a process listens there: the path exists a moment earlier.
fn wait_for(path: &Path) {
    let deadline = Instant::now() + PATIENCE;
    // __SO_ACCEPTCON
    while !at_path(path).iter().any(|flags| flags == "00010000") {
        assert!(Instant::now() < deadline, "nobody listens at {}", path.display());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_tap_in_another_network_namespace_is_not_the_hosts_of_that_name() {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/net/tun").exists() {
        return println!("SKIPPED: this test needs root and /dev/net/tun");
    }
    let name = format!("elsewhere-{}", std::process::id());
    let net = tempfile::tempdir().unwrap();
    std::fs::create_dir(net.path().join("tapx")).unwrap();
    let tap = ["-netdev", "tap,id=n,ifname=tapx,script=no,downscript=no", "-device", "virtio-net-pci,netdev=n"];
    let guest = format!("guest={name},debug-threads=on");
    let arguments = [&["-name", &guest], tap.as_slice()].concat();
    let Some(vm) = Vm::start_by(&["unshare", "--net"], &arguments) else { return };
    let sources = Sources { net: net.path().to_owned(), ..Sources::host() };
    let (tenant, found) = vm.discover(&sources, &Rules::default());
    assert!(tenant.vnics.is_empty(), "{tenant:?}");
    let is_told = |problem: &ontime_tenants::Problem| {
        problem.subject == name && matches!(&problem.kind, ProblemKind::VnicElsewhere(ifname) if ifname == "tapx")
    };
    assert!(found.problems.iter().any(is_told), "{:?}", found.problems);
}

/// A VM as in a pod: its tap is beside the end of a pair, and a macvlan is on one of the host's interfaces.
#[test]
fn a_vm_in_another_network_namespace_is_reached_by_what_leads_there() {
    if !is_root() || !Path::new("/dev/net/tun").exists() {
        return println!("SKIPPED: this test needs root and /dev/net/tun");
    }
    let id = std::process::id();
    let (guest, end, nic) = (format!("guest=pod-{id},debug-threads=on"), format!("otp{id}"), format!("otn{id}"));
    let tap = ["-netdev", "tap,id=n,ifname=tap0,script=no,downscript=no", "-device", "virtio-net-pci,netdev=n"];
    let arguments = [&["-name", &guest], tap.as_slice()].concat();
    let Some(vm) = Vm::start_by(&["unshare", "--net"], &arguments) else { return };
    vm.discover(&Sources::host(), &Rules::default());
    let ip =
        |arguments: &str| Command::new("ip").args(arguments.split(' ')).status().is_ok_and(|status| status.success());
    let there = vm.pid();
    // All of them end with the VM's namespace.
    if !ip(&format!("link add {end} type veth peer name eth0 netns {there}"))
        || !ip(&format!("link add {nic} type veth peer name eth9 netns {there}"))
        || !ip(&format!("link add link {nic} name net1 netns {there} type macvlan"))
    {
        return println!("SKIPPED: needs ip(8), veth and macvlan");
    }
    let (tenant, found) = vm.discover(&Sources::host(), &Rules::default());
    let ends: Vec<&str> = tenant.vnics.iter().map(|vnic| vnic.ifname.as_str()).collect();
    assert_eq!(ends, [nic.as_str(), end.as_str()], "{:?}", found.problems);
    assert_eq!(tenant.attached.iter().map(|own| own.name.as_str()).collect::<Vec<_>>(), ["net1"]);
}

/// A process in its own cgroup and network namespace. Process and cgroup end with the test.
struct Contained {
    process: Child,
    cgroup: std::path::PathBuf,
}

impl Contained {
    fn start(name: &str) -> Option<Self> {
        let mounts = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
        let mount = mounts.iter().map(Path::new).find(|mount| mount.join("cgroup.procs").exists())?;
        let cgroup = mount.join(name);
        std::fs::create_dir(&cgroup).ok()?;
        let process = Command::new("unshare").args(["--net", "sleep", "600"]).spawn().unwrap();
        let this = Self { process, cgroup };
        std::fs::write(this.cgroup.join("cgroup.procs"), this.process.id().to_string()).unwrap();
        let namespace = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/net")).ok();
        let deadline = Instant::now() + PATIENCE;
        while namespace(&this.process.id().to_string()) == namespace("self") {
            assert!(Instant::now() < deadline, "no namespace");
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(this)
    }
}

impl Drop for Contained {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir(&self.cgroup);
    }
}

#[test]
fn a_containers_macvlan_leads_to_the_hosts_nic() {
    if !is_root() {
        return;
    }
    let id = std::process::id();
    let (name, nic) = (format!("ontime-test-{id}"), format!("otr{id}"));
    let Some(container) = Contained::start(&name) else { return println!("SKIPPED: needs a cgroup v2 mount") };
    let ip =
        |arguments: &str| Command::new("ip").args(arguments.split(' ')).status().is_ok_and(|status| status.success());
    if !ip(&format!("link add {nic} type veth peer name eth9 netns {}", container.process.id()))
        || !ip(&format!("link add link {nic} name eth0 netns {} type macvlan", container.process.id()))
    {
        return println!("SKIPPED: needs ip(8), veth and macvlan");
    }
    // The host's sysfs as if the NIC had a device; the rest comes from the kernel's table.
    let index = std::fs::read_to_string(format!("/sys/class/net/{nic}/ifindex")).unwrap();
    let net = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(net.path().join(&nic).join("device")).unwrap();
    std::fs::write(net.path().join(&nic).join("ifindex"), index).unwrap();
    let sources = Sources { net: net.path().to_owned(), ..Sources::host() };
    let rule = format!("[[tenant]]\ncgroup = \"/{name}\"\nclass = \"rt\"\n");
    let found = discover(&sources, &Rules::parse(&[Text::new("/etc/ontime/tenants.toml", rule)]).unwrap());
    let tenant = found.tenants.iter().find(|tenant| tenant.name == name).unwrap_or_else(|| panic!("{found:#?}"));
    assert_eq!(tenant.class, Class::Rt(Level::HIGHEST));
    let attached: Vec<_> =
        tenant.attached.iter().map(|own| (own.name.as_str(), own.mac.is_some(), &own.lower)).collect();
    assert_eq!(attached, [("eth0", true, &vec![nic])], "and not the far end of the pair");
}
