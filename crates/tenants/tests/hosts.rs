//! Tenants on differently configured hosts (runtimes, monitors, namespaces, machines), and processes with misleading
//! names.
#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing)]

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::time::{Duration, SystemTime};

use common::Host;
use ontime_tenants::config::Text;
use ontime_tenants::{Class, Discovery, Kind, Level, Rules, Tenant, ThreadRole, discover};

const RT: Class = Class::Rt(Level::HIGHEST);
const UUID: &str = "8a4e7c11-91b3-4d43-8d61-2b2f5a0c9e77";

fn rules(text: &str) -> Rules {
    Rules::parse(&[Text::new("/etc/ontime/tenants.toml", text)]).unwrap()
}

fn words(found: &Discovery) -> Vec<(&str, &'static str)> {
    found.problems.iter().map(|one| (one.subject.as_str(), one.word())).collect()
}

fn named<'a>(found: &'a Discovery, name: &str) -> &'a Tenant {
    let tenant = found.tenants.iter().find(|tenant| tenant.name == name);
    assert!(tenant.is_some(), "no {name}: {found:#?}");
    tenant.unwrap()
}

fn names(found: &Discovery) -> Vec<(&str, Kind, Class)> {
    found.tenants.iter().map(|tenant| (tenant.name.as_str(), tenant.kind, tenant.class)).collect()
}

fn of_role(tenant: &Tenant, role: ThreadRole) -> Vec<i32> {
    tenant.threads.iter().filter(|thread| thread.role == role).map(|thread| thread.id.tid).collect()
}

fn id(digit: char) -> String {
    digit.to_string().repeat(64)
}

#[test]
fn a_container_of_an_unknown_runtime_is_found_and_told() {
    let (host, known, unknown) = (Host::new(), id('1'), id('2'));
    let storage = host.path("var/lib/containers/storage/vfs-containers");
    fs::create_dir_all(&storage).unwrap();
    fs::write(storage.join("containers.json"), format!(r#"[{{"id":"{known}","names":["mill"]}}]"#)).unwrap();
    host.process(10, "/usr/bin/app", &format!("/press.slice/press.service/libpod-payload-{known}"), 0, &["app"]);
    host.process(20, "/usr/bin/app", &format!("/jobs.slice/quark-{unknown}.scope/x"), 0, &["app"]);
    let found = discover(&host.sources(), &rules("[[tenant]]\nname = \"mill\"\nclass = \"rt\"\n"));
    assert_eq!(names(&found), [("222222222222", Kind::Container, Class::Bulk), ("mill", Kind::Container, RT)]);
    let scope = format!("/jobs.slice/quark-{unknown}.scope");
    assert_eq!(named(&found, "222222222222").cgroup.as_ref(), Some(&scope), "its identifier stays visible");
    assert_eq!(words(&found), [(scope.as_str(), "runtime-unknown")]);
}

#[test]
fn a_rule_whose_name_fits_nothing_is_told_with_the_containers_that_have_no_name() {
    let host = Host::new();
    host.vm(100, "press", "/vm.slice/press.service");
    let rt = rules("[[tenant]]\nname = \"pres\"\nclass = \"rt\"\n");
    let found = discover(&host.sources(), &rt);
    assert_eq!(words(&found), [("/etc/ontime/tenants.toml:3", "rule-unused")]);
    assert!(!found.problems[0].message().contains("on record"), "{}", found.problems[0]);
    for digit in "3456789".chars() {
        let pid = 200 + digit.to_digit(10).unwrap() as i32;
        let cgroup = format!("/kubepods.slice/kubepods-pod1.slice/cri-containerd-{}.scope", id(digit));
        host.process(pid, "/usr/bin/app", &cgroup, 0, &["app"]);
    }
    let found = discover(&host.sources(), &rt);
    assert_eq!(words(&found), [("/etc/ontime/tenants.toml:3", "rule-unused")]);
    let message = found.problems[0].message();
    assert!(message.contains("333333333333") && message.contains("and 2 more"), "{message}");
    assert!(found.problems[0].remedy().contains("cgroup"), "{}", found.problems[0]);
}

#[test]
fn lxcs_number_is_no_part_of_the_name_unless_the_name_without_it_is_anothers() {
    let host = Host::new();
    for (pid, cgroup) in
        [(10, "/lxc.payload.cell-2"), (20, "/lxc.payload.cell"), (30, "/lxc.payload.mill-4/x"), (40, "/lxc/saw-1/ns")]
    {
        host.process(pid, "/sbin/init", cgroup, 0, &["init"]);
    }
    fs::create_dir_all(host.path("var/lib/lxc/saw-1")).unwrap();
    let found = discover(&host.sources(), &Rules::default());
    let seen: Vec<&str> = found.tenants.iter().map(|tenant| tenant.name.as_str()).collect();
    assert_eq!(seen, ["cell", "cell-2", "mill", "saw-1"]);
}

#[test]
fn monitors_of_likely_names_are_vms_where_they_run_a_guest() {
    let host = Host::new();
    for (pid, executable) in [(100, "firecracker-jailed"), (110, "firecracker-containerd"), (120, "kvm-helper")] {
        host.process(pid, &format!("/opt/{executable}"), "/vm.slice", 0, &[executable, "--id", executable]);
    }
    host.thread(100, 101, "fc_vcpu 0", 0);
    host.open_file(120, 3, "anon_inode:kvm-vm", "");
    host.open_file(110, 3, "socket:[1]", "");
    let found = discover(&host.sources(), &Rules::default());
    let seen: Vec<(&str, Kind)> = found.tenants.iter().map(|tenant| (tenant.name.as_str(), tenant.kind)).collect();
    assert_eq!(seen, [("firecracker-jailed", Kind::Vmm), ("kvm-helper", Kind::Qemu)]);
    assert_eq!(of_role(&found.tenants[0], ThreadRole::Vcpu(0)), [101]);
}

#[test]
fn a_monitor_of_any_name_is_known_by_kvms_descriptors_and_the_time_in_a_guest() {
    let host = Host::new();
    for (pid, executable, comm, cgroup) in [
        (100, "/opt/vendor/hv-engine", "vcpu0", "/vm.slice/a.service"),
        (110, "/lib64/ld-linux-x86-64.so.2", "CPU 0/KVM", "/vm.slice/b.service"),
        (120, "/opt/vendor/was-one", "vcpu0", "/vm.slice/c.service"),
        (130, "/usr/bin/crun", "fc_vcpu 0", &format!("/machine.slice/libpod-{}.scope", id('a'))),
    ] {
        host.process(pid, executable, cgroup, 0, &[executable, "-name", "guest=loader"]);
        host.alter(pid, 1, 70);
        host.thread(pid, pid + 1, comm, 0);
    }
    for pid in [100, 110, 130] {
        host.open_file(pid, 7, "anon_inode:kvm-vcpu:0", "");
    }
    // Xen's device model is QEMU, but Xen runs the guest.
    host.process(
        150,
        "/usr/lib/xen/bin/qemu-system-i386",
        "/",
        0,
        &["qemu-system-i386", "-xen-domid", "3", "-name", "x"],
    );
    // libvirt asks a QEMU without a machine for its features.
    for (pid, machine) in [(160, "none,accel=kvm:tcg"), (161, "accel=tcg,type=none")] {
        let line = ["qemu-system-arm", "-S", "-nodefaults", "-machine", machine, "-daemonize"];
        host.process(pid, "/usr/bin/qemu-system-arm", "/system.slice/libvirtd.service", 64_055, &line);
    }
    // It has KVM's descriptors but never ran a guest: a program that queries KVM's capabilities.
    host.process(140, "/usr/bin/prober", "/", 0, &["prober"]);
    host.open_file(140, 7, "anon_inode:kvm-vm", "");
    let found = discover(&host.sources(), &Rules::default());
    let seen: Vec<(&str, Kind)> = found.tenants.iter().map(|tenant| (tenant.name.as_str(), tenant.kind)).collect();
    assert_eq!(seen, [("guest=loader", Kind::Vmm), ("loader", Kind::Qemu), ("aaaaaaaaaaaa", Kind::Container)]);
    for (tenant, tid) in found.tenants.iter().zip([101, 111]) {
        assert_eq!(of_role(tenant, ThreadRole::Vcpu(0)), [tid]);
    }
}

#[test]
fn a_monitor_of_any_name_is_known_before_its_guest_has_run() {
    let host = Host::new();
    // One starts 10,000 s after boot, the other 10,100 s.
    for (pid, comm) in [(1100, "vcpu1"), (11_100, "kvm-vcpu-0"), (1200, "worker"), (1300, "vcpu0")] {
        host.process(pid, "/opt/vendor/hv-engine", "/vm.slice/a.service", 0, &["hv-engine"]);
        host.thread(pid, pid + 1, comm, 0);
        if pid != 1300 {
            host.open_file(pid, 7, "anon_inode:kvm-vm", "");
        }
    }
    for (uptime, wanted) in [
        ("10030.99 1.00\n", vec![1100, 11_100]),
        ("10200.00 1.00\n", vec![11_100]),
        ("20000.00 1.00\n", vec![]),
        // Without the host's uptime each may be new.
        ("\n", vec![1100, 11_100]),
    ] {
        fs::write(host.path("proc/uptime"), uptime).unwrap();
        let found = discover(&host.sources(), &Rules::default());
        let mut seen: Vec<i32> = found.tenants.iter().map(|tenant| tenant.process.pid).collect();
        seen.sort_unstable();
        assert_eq!(seen, wanted, "{uptime}");
    }
}

#[test]
fn what_a_monitor_forks_is_no_vm() {
    let host = Host::new();
    for (pid, executable) in [(100, "cloud-hypervisor"), (200, "crosvm"), (300, "qemu-system-x86_64")] {
        for child in [0, 10, 20] {
            host.process(pid + child, &format!("/usr/bin/{executable}"), "/vm.slice", 0, &[executable, "-name", "x"]);
        }
        host.alter(pid + 10, pid, 0);
        host.alter(pid + 20, pid + 10, 0);
    }
    for (pid, comm) in [(100, "vcpu0"), (200, "crosvm_vcpu0"), (300, "CPU 0/KVM")] {
        host.thread(pid, pid + 1, comm, 0);
    }
    // A monitor that was started by a monitor is a VM, too.
    host.thread(310, 311, "CPU 0/KVM", 0);
    let found = discover(&host.sources(), &Rules::default());
    let pids: Vec<i32> = found.tenants.iter().map(|tenant| tenant.process.pid).collect();
    assert_eq!(pids, [100, 200, 300, 310]);
}

#[test]
fn kvms_timer_belongs_to_the_vm_of_that_number_in_its_own_namespace() {
    let host = Host::new();
    let pod = format!("/kubepods.slice/kubepods-pod9.slice/crio-{}.scope", id('b'));
    for (pid, name, inner) in [(4100, "cell", 88), (5200, "mill", 88), (6300, "saw", 12)] {
        host.vm(pid, name, &format!("{pod}/{name}"));
        host.in_namespace(pid, 107, inner);
    }
    host.vm(88, "hosts", "/vm.slice/hosts.service");
    for (pid, comm) in [(4150, "kvm-pit/88"), (5250, "kvm-pit/88"), (90, "kvm-pit/88"), (6350, "kvm-pit/12")] {
        host.kernel_thread(pid, comm);
    }
    // It belongs to no VM: on the host, only a container's process has this number.
    host.kernel_thread(6360, "kvm-pit/6300");
    let found = discover(&host.sources(), &Rules::default());
    for (name, pit) in [("hosts", 90), ("cell", 4150), ("mill", 5250), ("saw", 6350)] {
        assert_eq!(of_role(named(&found, name), ThreadRole::KvmPit), [pit], "{name}");
    }
    // A vhost thread before Linux 6.4 has the host's number in its name.
    host.kernel_thread(4170, "vhost-4100");
    let found = discover(&host.sources(), &Rules::default());
    assert_eq!(of_role(named(&found, "cell"), ThreadRole::Vhost), [4108, 4170]);
}

/// Sets when a kernel thread started.
fn started_at(host: &Host, pid: i32, start: u64) {
    for path in [format!("proc/{pid}/stat"), format!("proc/{pid}/task/{pid}/stat")] {
        let path = host.path(&path);
        let line = fs::read_to_string(&path).unwrap().replace(&format!(" {} ", pid + 1_000_000), &format!(" {start} "));
        fs::write(path, line).unwrap();
    }
}

#[test]
fn a_timer_of_a_vms_number_that_another_process_may_have_made_is_no_vms() {
    let host = Host::new();
    host.vm(5000, "plc", "/vm.slice/plc.service");
    let pits = |host: &Host| of_role(named(&discover(&host.sources(), &Rules::default()), "plc"), ThreadRole::KvmPit);
    // The monitor's number in another PID namespace: the thread is older than the only VM of this number.
    host.kernel_thread(4000, "kvm-pit/5000");
    assert_eq!(pits(&host), [0; 0]);
    // Before Linux 6.4: of a process that had the VM's number before.
    host.kernel_thread(4001, "vhost-5000");
    let found = discover(&host.sources(), &Rules::default());
    assert_eq!(of_role(named(&found, "plc"), ThreadRole::Vhost), [5008]);
    // The VM's own.
    host.kernel_thread(5100, "kvm-pit/5000");
    assert_eq!(pits(&host), [5100]);
    // An hour later.
    for pid in [5200, 5300] {
        host.kernel_thread(pid, "kvm-pit/5000");
        started_at(&host, pid, 1_365_000 + pid as u64);
    }
    assert_eq!(pits(&host), [5100], "a VM has one timer");
    // While the monitor starts, another process makes one. Which one is the VM's is not known.
    host.kernel_thread(5050, "kvm-pit/5000");
    assert_eq!(pits(&host), [0; 0]);
}

#[test]
fn device_processes_of_a_user_have_no_more_threads_than_that_users_vms() {
    let host = Host::new();
    let line = ["qemu-system-x86_64", "-name", "x"];
    host.process(100, "/usr/bin/qemu-system-x86_64", "/user.slice/user-1000.slice/a", 1000, &line);
    host.thread(100, 101, "CPU 0/KVM", 0);
    for pid in (10_000..).step_by(10_000).take(10) {
        let line = ["ontime", "device", "--vm", "x"];
        host.process(pid, "/home/u/ontime", "/user.slice/user-1000.slice/b", 1000, &line);
        for tid in pid + 1..pid + 2000 {
            host.thread(pid, tid, "x", 0);
        }
    }
    let sources = host.sources();
    // When they are first seen, and when they are known.
    for _ in 0..2 {
        let found = discover(&sources, &Rules::default());
        let threads = of_role(named(&found, "x"), ThreadRole::Device).len();
        assert!((1..=1024 + 10 * 32).contains(&threads), "{threads}");
        assert_eq!(words(&found), [("user 1000", "not-read")]);
    }
}

#[test]
fn a_machines_scope_is_its_vms_and_gives_helpers_nothing() {
    let host = Host::new();
    let vmspawn = "/machine.slice/machine-cell7.scope";
    host.vm(100, "cell7", vmspawn);
    host.process(110, "/usr/bin/swtpm", vmspawn, 0, &["swtpm", "socket"]);
    host.process(120, "/usr/libexec/virtiofsd", vmspawn, 0, &["virtiofsd"]);
    // A VM inside a container was named in the container, even if root started it there.
    let payload = "/machine.slice/machine-box.scope/payload";
    host.vm(200, "inner", &format!("{payload}/vm"));
    host.process(210, "/sbin/init", payload, 0, &["init"]);
    host.process(220, "/usr/bin/systemd-nspawn", "/machine.slice/machine-box.scope/supervisor", 0, &["systemd-nspawn"]);
    host.process(
        300,
        "/usr/bin/cloud-hypervisor",
        r"/machine.slice/machine-ch\x2d2\x2dsaw.scope",
        0,
        &["ch", "--name", "saw"],
    );
    host.process(310, "/usr/bin/swtpm", r"/machine.slice/machine-ch\x2d2\x2dsaw.scope", 0, &["swtpm"]);
    // A VM without a given name gets its scope's name.
    let untold = r"/machine.slice/machine-ch\x2d5\x2dthe\x2dmill.scope/libvirt/emulator";
    host.process(400, "/usr/bin/cloud-hypervisor", untold, 0, &["cloud-hypervisor", "--api-socket", "fd=9"]);
    for text in ["name = \"*\"", "cgroup = \"/machine.slice/*\"\nname = \"cell7\""] {
        let found = discover(&host.sources(), &rules(&format!("[[tenant]]\n{text}\nclass = \"rt\"\n")));
        let vm = named(&found, "cell7");
        assert_eq!((vm.class, vm.cgroup.as_deref(), vm.kind), (RT, Some(vmspawn), Kind::Qemu), "{text}");
        assert_eq!(named(&found, "inner").class, Class::Bulk);
        assert_eq!(named(&found, "the-mill").process.pid, 400);
        let processes = |tenant: &Tenant| tenant.threads.iter().map(|thread| thread.id.pid).collect::<Vec<_>>();
        let all: Vec<i32> = found.tenants.iter().flat_map(processes).collect();
        assert!(![110, 120, 220, 310].iter().any(|helper| all.contains(helper)), "{text}: {all:?}");
        assert_eq!(processes(named(&found, "box")), [210]);
    }
}

#[test]
fn ports_of_a_switch_in_user_space_are_no_interfaces() {
    let host = Host::new();
    host.interface("vnet3", 3);
    host.vm(100, "dom", r"/machine.slice/machine-qemu\x2d1\x2ddom.scope");
    host.domain(
        "dom",
        100,
        UUID,
        "<devices><interface type='vhostuser'><target dev='vhu-1'/></interface>\
         <interface type='network'><actual type='vhostuser'/><target dev='vhu-2'/></interface>\
         <interface type='network'><actual type='bridge'/><target dev='vnet3'/></interface>\
         <interface type='network'><target dev='vnet9'/></interface></devices>",
    );
    let found = discover(&host.sources(), &Rules::default());
    assert_eq!(named(&found, "dom").vnics.len(), 1);
    assert_eq!(words(&found), [("dom", "vnic-elsewhere")]);
    assert!(found.problems[0].message().contains("vnet9"));
    // Of a switch in user space alone: Open vSwitch with DPDK as server or client, VPP, and a network that has chosen.
    for (interface, options) in [
        (
            "<interface type='vhostuser'><source type='unix' path='/run/openvswitch/vhu-weld' mode='server'/>\
             <target dev='vhuweld-0'/></interface>",
            "vhost-user,id=hostnet0,chardev=charnet0",
        ),
        (
            "<interface type='vhostuser'><source type='unix' path='/run/vpp/weld.sock' mode='client'>\
             <reconnect enabled='yes'/></source><target dev='vnet3'/></interface>",
            "{\"type\":\"vhost-user\",\"chardev\":\"charnet0\",\"id\":\"hostnet0\"}",
        ),
        (
            "<interface type='network'><source network='dpdk' portgroup='rt'/>\
             <actual type='vhostuser'><source type='unix' path='/run/ovs/a' mode='server'/></actual>\
             <target dev='vhost-user-1'/></interface>",
            "vhost-user,chardev=charnet0,id=hostnet0,queues=4",
        ),
    ] {
        let host = Host::new();
        host.interface("vnet3", 3);
        let called = ["qemu-system-x86_64", "-name", "guest=weld,debug-threads=on", "-netdev", options];
        host.process(100, "/usr/bin/qemu-system-x86_64", "/vm.slice/weld.service", 0, &called);
        host.thread(100, 101, "CPU 0/KVM", 0);
        // By its command line, and by libvirt's file.
        for by_libvirt in [false, true] {
            if by_libvirt {
                host.domain("weld", 100, UUID, &format!("<devices>{interface}</devices>"));
            }
            let found = discover(&host.sources(), &Rules::default());
            assert!(named(&found, "weld").vnics.is_empty(), "{interface}");
            assert!(!words(&found).iter().any(|(_, word)| *word == "vnic-elsewhere"), "{:?}", found.problems);
        }
    }
}

#[test]
fn a_domain_in_a_slice_of_its_own_with_a_passed_through_nic_is_whole() {
    // At the kernel's rcuc threads, between these and vhost, and at vhost.
    for (priority, conflicts) in [(4, 2), (20, 0), (48, 2)] {
        let host = Host::new();
        host.interface("vnet3", 3);
        host.vm(100, "weld", r"/machine.slice/machine-rt.slice/machine-qemu\x2d7\x2dweld.scope");
        let tuning = format!("<vcpusched vcpus='0-1' scheduler='fifo' priority='{priority}'/>");
        let devices = "<interface type='hostdev'><alias name='hostdev0'/></interface>\
                       <interface type='bridge'><target dev='vnet3'/></interface>";
        let inside = format!("<cputune>{tuning}</cputune><devices>{devices}</devices>");
        host.domain("weld", 100, UUID, &inside);
        let found = discover(&host.sources(), &rules("[[tenant]]\nname = \"weld\"\nclass = \"rt\"\n"));
        let tenant = named(&found, "weld");
        assert_eq!((tenant.kind, tenant.class, tenant.vnics.len()), (Kind::Libvirt, RT, 1));
        let told = ontime_tenants::conflict::conflicts(&found.tenants, &ontime_tenants::PriorityTable::default());
        assert_eq!(told.len(), conflicts, "{told:?}");
        assert!(!words(&found).contains(&("weld", "vnic-elsewhere")), "{:?}", found.problems);
    }
}

#[test]
fn containers_of_cgroup_v1_are_told_and_no_others() {
    let host = Host::new();
    let a = id('d');
    let with = |pid: i32, cgroups: &str| {
        host.process(pid, "/usr/bin/app", "/", 0, &["app"]);
        fs::write(host.path(&format!("proc/{pid}/cgroup")), cgroups).unwrap();
    };
    with(10, &format!("9:cpuset:/system.slice/docker-{a}.scope\n0::/system.slice/docker.service\n"));
    with(20, "4:memory:/lxc.payload.box\n");
    with(30, "4:memory:/system.slice/ssh.service\n1:name=systemd:/system.slice\n0::/system.slice/ssh.service\n");
    with(40, &format!("4:memory:/docker/{a}\n0::/docker/{a}\n"));
    let found = discover(&host.sources(), &Rules::default());
    assert_eq!(found.tenants.len(), 1);
    let v1: Vec<_> = found.problems.iter().filter(|one| one.word() == "cgroup-v1").collect();
    assert!(v1.len() == 1 && v1[0].message().starts_with("2 processes"), "{v1:?}");
}

/// An attack by an ordinary user: starting a process with the VM's name.
#[test]
fn another_vm_of_its_name_takes_no_device_thread_out_of_a_vms_cap() {
    let host = Host::new();
    let device = |pid: i32, cgroup: &str, uid: u32| {
        host.process(pid, "/usr/bin/ontime", cgroup, uid, &["ontime", "device", "--vm", "web"]);
        host.thread_at(pid, pid + 1, "ontime-sock/0", 0, (1, 48), "0-3");
    };
    let impostor = |pid: i32| {
        host.process(pid, "/tmp/kvm", "/user.slice/user-1000.slice/session-4.scope", 1000, &["kvm", "-name", "web"]);
    };
    device(200, "/system.slice/ontime-device@web.service", 990);
    let served = |sources: &ontime_tenants::Sources| -> Vec<(String, i32)> {
        let found = discover(sources, &Rules::default());
        let of = |tenant: &Tenant| {
            let threads = of_role(tenant, ThreadRole::Device);
            threads.into_iter().map(|tid| (tenant.name.clone(), tid)).collect::<Vec<_>>()
        };
        found.tenants.iter().flat_map(of).collect()
    };
    let webs = [("web".to_owned(), 200), ("web".to_owned(), 201)];
    // Before the VM, and before the daemon has seen the VM's device process.
    impostor(90);
    let sources = host.sources();
    served(&sources);
    host.vm(100, "web", "/vm.slice/web.service");
    assert_eq!(served(&sources), webs);
    assert_eq!(served(&host.sources()), webs, "a daemon that was restarted");
    impostor(300);
    assert_eq!(served(&sources), webs);
    let found = discover(&sources, &Rules::default());
    let web: Vec<i32> = found.tenants.iter().filter(|one| one.name == "web").map(|one| one.process.pid).collect();
    assert_eq!(web, [100], "nor is it called so");
    let taken = |pid: &str| words(&found).contains(&(pid, "name-taken"));
    assert!(taken("vm-90") && taken("vm-300"), "{:?}", found.problems);
    // The user's own device process serves the user's VM, or none.
    device(210, "/user.slice/user-1000.slice/session-4.scope", 1000);
    assert_eq!(served(&sources), webs);
    // So does one of a service's account that is no device process's.
    device(230, "/system.slice/apache2.service", 33);
    assert_eq!(served(&sources), webs);
    // One in a container without a cgroup of its own serves none.
    device(220, "/system.slice/starter.service", 0);
    host.in_namespace(220, 0, 7);
    assert_eq!(served(&sources), webs);
}

#[test]
fn stale_files_of_libvirts_give_a_later_process_nothing() {
    let metadata = "<metadata><o:tenant xmlns:o='https://ontime.dev/xmlns/tenant/1' class='rt'/></metadata>";
    let dac = "<seclabel type='dynamic' model='dac'><label>+107:+107</label></seclabel>";
    let libvirts = r"/machine.slice/machine-qemu\x2d1\x2ddom.scope";
    let users = "/user.slice/user-1000.slice/session-1.scope";
    let container = format!("/system.slice/docker-{}.scope", id('e'));
    // The process starts 10,001 s after boot.
    for (cgroup, uid, label, written_after_boot, class) in [
        ("/system.slice/libvirtd.service", 107, "", 10_500, RT),
        ("/system.slice/libvirtd.service", 107, dac, 10_500, RT),
        ("/system.slice/libvirtd.service", 107, "", 9000, Class::Bulk),
        ("/system.slice/cron.service", 1000, dac, 10_500, Class::Bulk),
        (users, 1000, "", 10_500, Class::Bulk),
        (&container, 107, "", 10_500, Class::Bulk),
        // Only libvirt moves a process there, so the time does not matter if the clock was set.
        (libvirts, 107, dac, 9000, RT),
    ] {
        for file in ["xml", "pid"] {
            let host = Host::new();
            host.process(100, "/usr/bin/qemu-system-x86_64", cgroup, uid, &["qemu", "-name", "guest=dom"]);
            host.thread(100, 101, "CPU 0/KVM", 0);
            let boot = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
            fs::write(host.path("proc/stat"), "cpu 1\nbtime 1700000000\n").unwrap();
            match file {
                "xml" => host.domain("dom", 100, UUID, &format!("{metadata}{label}")),
                _ => fs::write(host.path("run/libvirt/qemu/dom.pid"), "100").unwrap(),
            }
            let opened =
                fs::File::options().write(true).open(host.path(&format!("run/libvirt/qemu/dom.{file}"))).unwrap();
            opened.set_modified(boot + Duration::from_secs(written_after_boot)).unwrap();
            let found = discover(&host.sources(), &rules("[[tenant]]\nname = \"dom\"\nclass = \"rt\"\n"));
            let is_stale = class == Class::Bulk && (file == "xml" || label.is_empty());
            let expected = if file == "pid" && !label.is_empty() && uid == 1000 { continue } else { class };
            let vm = found.tenants.iter().find(|tenant| tenant.process.pid == 100).unwrap();
            assert_eq!(vm.class, expected, "{cgroup} {uid} {label} {written_after_boot} {file}");
            assert_eq!(vm.kind == Kind::Libvirt, !is_stale, "{cgroup} {file}");
        }
    }
}

#[test]
fn a_delegated_cgroup_is_its_owners() {
    let host = Host::new();
    let (a, b) = (id('4'), id('5'));
    let delegated = "/system.slice/lab.service";
    if !host.cgroup(delegated, 1000) {
        println!("SKIPPED: needs root");
        return;
    }
    for (path, uid) in [
        (format!("{delegated}/docker-{a}.scope"), 1000),
        (format!("{delegated}/vms/press"), 1000),
        (format!("{delegated}/ontime-device@mill.service"), 1000),
        ("/rt.slice".to_owned(), 0),
        // A container with a user namespace owns its own cgroup, but root created it and chose its name.
        (format!("/machine.slice/libpod-{b}.scope"), 100_000),
        ("/vm.slice/mill.service".to_owned(), 0),
    ] {
        assert!(host.cgroup(&path, uid));
    }
    host.process(10, "/usr/bin/app", &format!("{delegated}/docker-{a}.scope"), 1000, &["app"]);
    host.process(20, "/usr/bin/app", &format!("/machine.slice/libpod-{b}.scope"), 100_000, &["app"]);
    host.vm(100, "press", &format!("{delegated}/vms/press"));
    host.in_namespace(100, 1000, 100);
    host.vm(200, "mill", "/vm.slice/mill.service");
    let in_unit = format!("{delegated}/ontime-device@mill.service");
    host.process(300, "/usr/bin/ontime", &in_unit, 1000, &["ontime", "device", "--vm", "mill"]);
    let rt = |text: &str| discover(&host.sources(), &rules(&format!("[[tenant]]\n{text}\nclass = \"rt\"\n")));
    let found = rt("cgroup = \"/{system,machine}.slice/**\"");
    assert_eq!(named(&found, "444444444444").class, Class::Bulk, "{:?}", found.problems);
    assert_eq!(named(&found, "555555555555").class, RT);
    assert_eq!(named(&found, "press").class, Class::Bulk);
    let withheld = found.problems.iter().filter(|one| one.word() == "rule-withheld").count();
    assert_eq!(withheld, 3, "the third is lab.service, which the rule makes a tenant: {:?}", found.problems);
    assert!(of_role(named(&found, "mill"), ThreadRole::Device).is_empty(), "its unit's name is a user's choice");
    let found = rt("cgroup = \"/system.slice/**\"\nuser = 1000");
    assert_eq!((named(&found, "444444444444").class, named(&found, "press").class), (RT, RT));
    // A cgroup that is a tenant only because of a rule.
    assert!(host.cgroup("/system.slice/lab.service/plain", 1000));
    host.process(30, "/usr/bin/app", "/system.slice/lab.service/plain", 1000, &["app"]);
    let found = rt("cgroup = \"/system.slice/lab.service/plain\"\nkind = \"container\"");
    assert_eq!(named(&found, "plain").class, Class::Bulk);
}

#[test]
fn hostile_processes_cost_no_more_than_one_and_leave_others_whole() {
    let host = Host::new();
    let user = "/user.slice/user-1000.slice/session-1.scope";
    for n in 0..12_i32 {
        let pid = 1000 + n * 10;
        let long = "x".repeat(100_000);
        // Subordinate user numbers give the user no more.
        let uid = if n % 2 == 0 { 1000 } else { 100_000 + n.unsigned_abs() };
        host.process(pid, "/home/u/kvm", user, uid, &["kvm", "-name", &format!("web{n}"), "-append", &long]);
        let open = host.path(&format!("proc/{pid}/fd"));
        (0..1500).for_each(|fd| symlink("socket:[1]", open.join(fd.to_string())).unwrap());
    }
    for pid in [100, 200] {
        host.vm(pid, &format!("plc{pid}"), &format!("/vm.slice/{pid}.service"));
    }
    host.vm(300, "small", "/user.slice/user-1001.slice/session-2.scope");
    host.in_namespace(300, 1001, 300);
    let found = discover(&host.sources(), &rules("[[tenant]]\nname = \"plc*\"\nclass = \"rt\"\n"));
    for name in ["plc100", "plc200", "small"] {
        let vm = named(&found, name);
        assert_eq!((vm.threads.len(), vm.vnics.len()), (8, 1), "{name}");
    }
    assert_eq!(found.tenants.len(), 15, "each of the hostile ones is found, too");
    let unread: Vec<_> = found.problems.iter().filter(|one| one.word() == "not-read").collect();
    assert_eq!(unread.len(), 1, "{unread:?}");
    assert_eq!(unread[0].subject, "user 1000");
    let message = unread[0].message();
    // The first process has all 1,024 descriptors that are read for the user; two command lines fit in 256 KiB.
    assert!(message.contains("descriptors of 12 processes"), "{message}");
    assert!(message.contains("command lines of 10 processes"), "{message}");
}

/// Root in a container is not the host's root, also where no cgroup tells the container: it is of cgroup v1, or has no
/// cgroup of its own.
#[test]
fn a_vm_in_a_container_that_no_cgroup_tells_gets_no_real_time_by_its_name() {
    let place = "/jobs.slice/starter.service";
    for is_v1 in [true, false] {
        let host = Host::new();
        host.vm(100, "plc", place);
        if is_v1 {
            let paths = format!("4:memory:/docker/{}\n0::{place}\n", id('d'));
            fs::write(host.path("proc/100/cgroup"), paths).unwrap();
        } else {
            host.in_namespace(100, 0, 7);
        }
        host.vm(200, "plc", "/vm.slice/plc.service");
        let found = discover(&host.sources(), &rules("[[tenant]]\nname = \"plc\"\nclass = \"rt\"\n"));
        assert_eq!(names(&found), [("plc", Kind::Qemu, RT), ("vm-100", Kind::Qemu, Class::Bulk)], "{is_v1}");
        assert!(words(&found).contains(&("plc", "rule-withheld")), "{:?}", found.problems);
        let by_place = format!("[[tenant]]\ncgroup = \"{place}\"\nclass = \"rt\"\n");
        assert_eq!(named(&discover(&host.sources(), &rules(&by_place)), "vm-100").class, RT, "{is_v1}");
    }
}

#[test]
fn what_root_in_a_container_without_a_cgroup_of_its_own_has_is_limited_too() {
    let (host, place) = (Host::new(), "/jobs.slice/starter.service");
    let long = "x".repeat(100_000);
    for n in 0..12_i32 {
        let pid = 1000 + n * 10;
        host.process(pid, "/usr/bin/kvm", place, 0, &["kvm", "-name", &format!("web{n}"), "-append", &long]);
        host.in_namespace(pid, 0, 7 + n);
    }
    let found = discover(&host.sources(), &Rules::default());
    let unread: Vec<_> = found.problems.iter().filter(|one| one.word() == "not-read").collect();
    assert!(unread.len() == 1 && unread[0].subject == place, "{:?}", found.problems);
    // Two command lines fit in 256 KiB.
    assert!(unread[0].message().contains("command lines of 10 processes"), "{}", unread[0].message());
}

#[test]
fn a_thousand_processes_of_a_user_that_look_like_vms_are_read_and_no_more() {
    let host = Host::new();
    let user = "/user.slice/user-1000.slice/session-1.scope";
    for n in 0..1_100 {
        host.process(1000 + n, "/home/u/kvm", user, 1000, &["kvm", "-name", &format!("web{n}")]);
    }
    host.vm(5000, "plc", "/vm.slice/plc.service");
    host.vm(5100, "small", "/user.slice/user-1001.slice/session-2.scope");
    host.in_namespace(5100, 1001, 5100);
    let found = discover(&host.sources(), &rules("[[tenant]]\nname = \"plc\"\nclass = \"rt\"\n"));
    assert_eq!((named(&found, "plc").threads.len(), named(&found, "small").threads.len()), (8, 8));
    assert_eq!(found.tenants.len(), 1_026);
    let unread: Vec<_> = found.problems.iter().filter(|one| one.word() == "not-read").collect();
    assert_eq!(unread.len(), 1, "{unread:?}");
    assert_eq!(unread[0].subject, "user 1000");
    assert!(unread[0].message().contains("everything of 76 processes"), "{}", unread[0].message());
}

#[test]
fn containers_without_a_record_have_the_name_that_conmon_was_told() {
    let host = Host::new();
    let user = "/user.slice/user-1000.slice/user@1000.service";
    let conmon = |pid, cgroup: &str, uid, of: char, name: &str| {
        let arguments = ["/usr/bin/conmon", "--api-version", "1", "-c", &id(of), "-u", &id(of), "-n", name, "-s"];
        host.process(pid, "/usr/bin/conmon", cgroup, uid, &arguments);
    };
    let container = |pid, cgroup: &str, uid, parent| {
        host.process(pid, "/usr/bin/app", cgroup, uid, &["app"]);
        host.alter(pid, parent, 0);
    };
    // A user's containers in both of Podman's layouts; root's with --rootfs; a unit's; a CRI-O pod's.
    conmon(100, &format!("{user}/user.slice/libpod-conmon-{}.scope", id('1')), 1000, '1', "press");
    container(110, &format!("{user}/user.slice/libpod-{}.scope/container", id('1')), 100_000, 100);
    container(111, &format!("{user}/user.slice/libpod-{}.scope/container", id('1')), 100_001, 110);
    conmon(120, &format!("{user}/app.slice/saw.service/supervisor"), 1000, '2', "saw");
    container(130, &format!("{user}/app.slice/saw.service/libpod-payload-{}", id('2')), 100_000, 120);
    conmon(200, &format!("/machine.slice/libpod-conmon-{}.scope", id('3')), 0, '3', "mill");
    container(210, &format!("/machine.slice/libpod-{}.scope/container", id('3')), 0, 200);
    conmon(220, "/system.slice/lathe.service/supervisor", 0, '4', "lathe");
    container(230, &format!("/system.slice/lathe.service/libpod-payload-{}", id('4')), 0, 220);
    conmon(240, &format!("/kubepods.slice/crio-conmon-{}.scope", id('5')), 0, '5', "k8s_loop_cell-0_plant_0f6e-77_0");
    container(250, &format!("/kubepods.slice/kubepods-pod7.slice/crio-{}.scope", id('5')), 0, 240);
    // None of these: a user's conmon for a container of root's; a program of that name inside the container; a conmon
    // that is no parent of the container's processes; one with another container's identifier.
    let inside = format!("/system.slice/docker-{}.scope", id('6'));
    conmon(300, &inside, 0, '6', "inside");
    container(310, &inside, 0, 300);
    conmon(400, "/system.slice/odd.service", 0, '7', "stranger");
    container(410, &format!("/system.slice/docker-{}.scope", id('7')), 0, 1);
    conmon(600, "/system.slice/cron.service", 1000, 'a', "mine");
    container(610, &format!("/system.slice/docker-{}.scope", id('a')), 0, 600);
    conmon(500, "/system.slice/odd.service", 0, '9', "other");
    container(510, &format!("/system.slice/docker-{}.scope", id('8')), 0, 500);
    let seen = |text: &str| {
        let found = discover(&host.sources(), &rules(text));
        let mut seen: Vec<(String, Class)> = found.tenants.iter().map(|one| (one.name.clone(), one.class)).collect();
        seen.sort();
        (seen, found.problems.iter().map(|one| one.word()).collect::<Vec<_>>())
    };
    let wanted = |rt: &[&str]| -> Vec<(String, Class)> {
        let digits = ["666666666666", "777777777777", "888888888888", "aaaaaaaaaaaa"];
        let names = digits.into_iter().chain(["cell-0/loop", "lathe", "mill", "press", "saw"]);
        names.map(|name| (name.to_owned(), if rt.contains(&name) { RT } else { Class::Bulk })).collect()
    };
    let (tenants, problems) = seen("[[tenant]]\nname = \"{press,mill,cell-0/*}\"\nclass = \"rt\"\n");
    assert_eq!(
        (tenants, problems),
        (wanted(&["mill", "cell-0/loop"]), vec!["rule-withheld"]),
        "a user's has no authority"
    );
    let (tenants, problems) = seen("[[tenant]]\nname = \"press\"\nuser = 1000\nclass = \"rt\"\n");
    assert_eq!((tenants, problems), (wanted(&["press"]), vec![]));
}

/// `podman run --cgroups=disabled`, and LXC with `lxc.cgroup.dir.container`: nothing on the host tells of a container.
#[test]
fn a_container_without_a_cgroup_of_its_own_is_told_by_roots_monitor() {
    let host = Host::new();
    // Mount namespaces: the host's, and a container's.
    let (outside, own) = (1, 2);
    let start = |monitor: i32, program: &str, cgroup: &str, uid: u32, line: &[&str], children: &[(&str, &str, u32)]| {
        host.process(monitor, program, cgroup, uid, line);
        host.mounts(monitor, outside);
        let numbers: Vec<String> = (monitor + 1..).zip(children).map(|(pid, _)| pid.to_string()).collect();
        fs::write(host.path(&format!("proc/{monitor}/task/{monitor}/children")), numbers.join(" ") + "\n").unwrap();
        for (pid, (program, cgroup, mounts)) in (monitor + 1..).zip(children) {
            host.process(pid, program, cgroup, uid, &[*program]);
            host.mounts(pid, *mounts);
            host.alter(pid, monitor, 0);
        }
    };
    let [cell, mill, saw, door, gate, haul] = ['1', '2', '3', '4', '5', '6'].map(id);
    let conmon = "/usr/bin/conmon";
    let unit = "/system.slice/cell.service";
    start(100, conmon, unit, 0, &["conmon", "-c", &cell, "-n", "cell"], &[("/usr/bin/app", unit, own)]);
    let (lxc, title) = ("/usr/bin/lxc-start", ["[lxc monitor] /srv/my lxc press"]);
    start(200, lxc, "/plc-monitor", 0, &title, &[("/sbin/init", "/plc/x", own)]);
    // Ordinary ones: Podman's, LXC's, a VM of KVM as the container's program.
    let scope = format!("/machine.slice/libpod-{mill}.scope/container");
    let beside = format!("/machine.slice/libpod-conmon-{mill}.scope");
    start(300, conmon, &beside, 0, &["conmon", "-c", &mill, "-n", "mill"], &[("/usr/bin/app", &scope, own)]);
    let title = ["[lxc monitor] /var/lib/lxc web"];
    start(400, lxc, "/lxc.monitor.web", 0, &title, &[("/sbin/init", "/lxc.payload.web/init.scope", own)]);
    let of_vm = "/system.slice/saw.service";
    let qemu = ("/usr/bin/qemu-system-x86_64", of_vm, own);
    start(500, conmon, of_vm, 0, &["conmon", "-c", &saw, "-n", "saw"], &[qemu]);
    host.thread(501, 502, "CPU 0/KVM", 0);
    // The runtime has not made the container yet, or removes it: crun from memory or from a file on no mount, others by
    // any name; LXC's hooks, and its first process that is on its way to the container.
    let runtimes = ["/usr/bin/crun", "/memfd:runc_cloned:/proc/self/exe (deleted)", "/usr/bin/runc.amd64"];
    let runtimes = runtimes.map(|program| (program, unit, outside));
    start(600, conmon, unit, 0, &["conmon", "-c", &door, "-n", "door"], &runtimes);
    let beside = format!("/kubepods.slice/crio-conmon-{haul}.scope");
    let runtimes = ["/", "/memfd:crun_cloned:/proc/self/exe (deleted)", "/usr/bin/nvidia-container-runtime"];
    let runtimes = runtimes.map(|program| (program, beside.as_str(), outside));
    start(900, conmon, &beside, 0, &["conmon", "-c", &haul, "-n", "haul"], &runtimes);
    let title = ["[lxc monitor] /var/lib/incus/containers c1"];
    let hooks = [("/opt/hook", "/lxc.monitor.c1", outside), ("/usr/libexec/incus/hook", "/lxc.monitor.c1", own)];
    start(1000, "/usr/libexec/incus/incusd", "/lxc.monitor.c1", 0, &title, &hooks);
    start(1100, lxc, "/session", 0, &["[lxc monitor] /srv c2"], &[(lxc, "/session", own), ("/bin/sh", "/x", outside)]);
    // A user's, and one in a container, count for nothing.
    start(700, conmon, unit, 1000, &["conmon", "-c", &gate, "-n", "gate"], &[("/usr/bin/app", unit, own)]);
    let inside = format!("/machine.slice/libpod-{mill}.scope/x");
    start(800, conmon, &inside, 0, &["conmon", "-c", &gate, "-n", "gate"], &[("/usr/bin/app", "/", own)]);
    let found = discover(&host.sources(), &Rules::default());
    assert_eq!(words(&found), [("cell", "no-own-cgroup"), ("press", "no-own-cgroup")]);
    let told: Vec<String> = found.problems.iter().map(|problem| problem.message()).collect();
    assert!(told[0].contains("cgroup /system.slice/cell.service,") && told[1].contains("cgroup /plc/x,"), "{told:?}");
    assert!(found.problems.iter().all(|problem| problem.hides_tenants()), "{:?}", found.problems);
    // A rule names their cgroups.
    let text = "[[tenant]]\ncgroup = \"/{plc,system.slice/cell.service}\"\nclass = \"rt\"\n";
    let found = discover(&host.sources(), &rules(text));
    assert!(found.problems.is_empty(), "{:?}", found.problems);
    let rt: Vec<i32> = found.tenants.iter().filter(|one| one.class == RT).map(|one| one.process.pid).collect();
    assert_eq!(rt, [101, 201]);
}

/// Podman by cgroupfs, on a host of OpenRC with both hierarchies.
#[test]
fn a_container_of_cgroup_v1_is_told_as_that_alone() {
    let (host, cell, service) = (Host::new(), id('6'), "/openrc.podman");
    host.process(100, "/usr/bin/conmon", service, 0, &["conmon", "-c", &cell, "-n", "cell"]);
    fs::write(host.path("proc/100/task/100/children"), "101\n").unwrap();
    host.process(101, "/usr/bin/app", service, 0, &["app"]);
    [100, 101].into_iter().zip(1..).for_each(|(pid, mounts)| host.mounts(pid, mounts));
    host.alter(101, 100, 0);
    assert_eq!(words(&discover(&host.sources(), &Rules::default())), [("cell", "no-own-cgroup")]);
    let path = format!("/libpod_parent/libpod-{cell}");
    fs::write(host.path("proc/101/cgroup"), format!("5:memory:{path}\n0::{service}\n")).unwrap();
    assert_eq!(words(&discover(&host.sources(), &Rules::default())), [(path.as_str(), "cgroup-v1")]);
}

#[test]
fn containers_that_a_client_of_containerds_named_are_found() {
    let host = Host::new();
    for task in [
        "containerd/io.containerd.runtime.v2.task/default/press",
        "k0s/containerd/io.containerd.runtime.v2.task/plant/mill",
    ] {
        fs::create_dir_all(host.path("run").join(task)).unwrap();
    }
    for (pid, cgroup) in [
        (10, "/default/press"),
        (20, "/plant/mill/worker"),
        (21, "/plant/mill"),
        (30, "/default/other"),
        (40, "/plant"),
    ] {
        host.process(pid, "/usr/bin/app", cgroup, 0, &["app"]);
    }
    // Names inside the container are chosen inside.
    host.vm(100, "inner", "/default/press/vm");
    let found = discover(&host.sources(), &rules("[[tenant]]\nname = \"*\"\nclass = \"rt\"\n"));
    let wanted = [("inner", Kind::Qemu, Class::Bulk), ("mill", Kind::Container, RT), ("press", Kind::Container, RT)];
    assert_eq!(names(&found), wanted);
    assert_eq!(named(&found, "mill").cgroup.as_deref(), Some("/plant/mill"));
    assert_eq!(words(&found), [("inner", "rule-withheld")]);
}

#[test]
fn new_processes_of_a_user_are_searched_for_a_guest_up_to_a_number_of_threads() {
    let host = Host::new();
    fs::write(host.path("proc/uptime"), "10030.00 1.00\n").unwrap();
    let user = |uid: u32| format!("/user.slice/user-{uid}.slice/session-1.scope");
    let start = |pid: i32, uid: u32, comm: &str| {
        host.process(pid, "/opt/vendor/hv-engine", &user(uid), uid, &["hv-engine"]);
        host.thread(pid, pid + 1, comm, 0);
        host.open_file(pid, 7, "anon_inode:kvm-vm", "");
    };
    let of_user = |n: i32| 2000 + 2 * n;
    (0..600).for_each(|n| start(of_user(n), 1000, "vcpu0"));
    start(4100, 1001, "vcpu0");
    (0..600).for_each(|n| start(10_000 + 2 * n, 0, "worker"));
    start(20_000, 0, "vcpu0");
    let count = |found: &Discovery, uid: u32| found.tenants.iter().filter(|vm| vm.owner == uid).count();
    let found = discover(&host.sources(), &Rules::default());
    // Two threads each.
    assert_eq!([1000, 1001, 0].map(|uid| count(&found, uid)), [512, 1, 1]);
    // A guest that has run is found all the same.
    (0..600).for_each(|n| host.alter(of_user(n), 1, 5));
    let found = discover(&host.sources(), &Rules::default());
    assert_eq!([1000, 1001, 0].map(|uid| count(&found, uid)), [600, 1, 1]);
    assert!(words(&found).iter().all(|(_, word)| *word != "not-read"), "{:?}", words(&found));
}

/// Each of these paths would take a hundredth of a second if its parts were walked from the top again and again.
#[test]
fn the_depth_of_cgroups_costs_little_and_frees_no_process_from_its_container() {
    let host = Host::new();
    let manager = "/user.slice/user-1000.slice/user@1000.service";
    let container = format!("/docker/{}", id('c'));
    let paths = [
        "/a".repeat(2_000),
        format!("{manager}{}", "/a".repeat(2_000)),
        format!("{manager}{}", "/a.scope".repeat(506)),
        format!("/system.slice/x.service{}", "/a-b-c-d.scope".repeat(290)),
    ];
    for (n, path) in (0..).zip(paths.iter().cycle().take(1_000)) {
        host.process(10_000 + n, "/home/u/app", path, 1000, &["app"]);
    }
    for (n, below) in (0..).zip(["/a".repeat(2_000), "/machine-x.scope/libvirt".repeat(160), String::new()]) {
        host.process(20_000 + n, "/usr/bin/app", &format!("{container}{below}"), 0, &["app"]);
    }
    let found = discover(&host.sources(), &Rules::default());
    assert_eq!(names(&found), [("cccccccccccc", Kind::Container, Class::Bulk)]);
    assert_eq!(found.tenants[0].threads.len(), 3);
    assert_eq!(found.tenants[0].cgroup.as_deref(), Some(container.as_str()));
    assert_eq!(words(&found), []);
}

#[test]
fn a_rule_for_cgroups_gives_helpers_of_vms_and_containers_nothing() {
    let (host, a) = (Host::new(), id('a'));
    // Monitors of containers.
    host.process(10, "/usr/bin/conmon", &format!("/machine.slice/libpod-conmon-{a}.scope"), 0, &["conmon"]);
    host.process(11, "/usr/bin/conmon", "/edge.slice/cell.service/supervisor", 0, &["conmon"]);
    host.process(12, "/usr/bin/systemd-nspawn", "/machine.slice/machine-box.scope/supervisor", 0, &["systemd-nspawn"]);
    host.process(13, "/usr/bin/lxc-start", "/edge.slice/lxc.monitor.web", 0, &["lxc-start"]);
    // Helpers of VMs that no manager has put into scopes: of a unit, of libvirt's session, of systemd-run.
    for (pid, unit) in [(100, "press.service"), (200, "run-u7.scope"), (300, "vm@saw.service")] {
        host.vm(pid, unit, &format!("/edge.slice/{unit}"));
        host.process(pid + 20, "/usr/bin/swtpm", &format!("/edge.slice/{unit}"), 0, &["swtpm"]);
        host.process(pid + 30, "/usr/libexec/virtiofsd", &format!("/edge.slice/{unit}/helpers"), 0, &["virtiofsd"]);
    }
    // The containers themselves, and other processes in the slice.
    host.process(20, "/usr/bin/app", &format!("/machine.slice/libpod-{a}.scope/container"), 0, &["app"]);
    host.process(21, "/usr/bin/app", &format!("/edge.slice/cell.service/libpod-payload-{}", id('b')), 0, &["app"]);
    host.process(22, "/sbin/init", "/machine.slice/machine-box.scope/payload", 0, &["init"]);
    host.process(23, "/usr/bin/loop", "/edge.slice/loop.service", 0, &["loop"]);
    let found = discover(&host.sources(), &rules("[[tenant]]\ncgroup = \"/{edge,machine}.slice/*\"\nclass = \"rt\"\n"));
    let of = |tenant: &Tenant| tenant.threads.iter().map(|thread| thread.id.pid).collect::<Vec<_>>();
    let contained: Vec<i32> =
        found.tenants.iter().filter(|tenant| tenant.kind == Kind::Container).flat_map(of).collect();
    assert_eq!(
        {
            let mut all = contained;
            all.sort_unstable();
            all
        },
        [20, 21, 22, 23]
    );
    assert!(found.tenants.iter().all(|tenant| tenant.class == RT), "{found:?}");
}

#[test]
fn the_hosts_container_daemons_tell_where_they_keep_their_state() {
    let host = Host::new();
    for (place, digit, name) in [
        ("srv/fast", 'a', "press"),
        ("home/u/docker", 'b', "users"),
        ("inner", 'c', "inner"),
        ("of-a-task", 'e', "of-a-task"),
        ("confined", 'f', "confined"),
    ] {
        let directory = host.path(place).join("containers").join(id(digit));
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("config.v2.json"), format!(r#"{{"Name":"/{name}"}}"#)).unwrap();
    }
    let dockerd = |pid, cgroup: &str, uid, place: &str| {
        host.process(pid, "/usr/bin/dockerd", cgroup, uid, &["dockerd", "--data-root", place]);
    };
    dockerd(10, "/system.slice/docker.service", 0, "/srv/fast");
    // Daemons of a user and of a container are ignored.
    dockerd(11, "/user.slice/user-1000.slice/user@1000.service/docker.service", 1000, "/home/u/docker");
    dockerd(12, &format!("/system.slice/docker-{}.scope", id('d')), 0, "/inner");
    fs::create_dir_all(host.path("run").join("containerd/io.containerd.runtime.v2.task/default/mill")).unwrap();
    dockerd(13, "/default/mill", 0, "/of-a-task");
    // Nor are those of containers that no cgroup tells: without one of its own, and of cgroup v1.
    dockerd(14, "/system.slice/starter.service", 0, "/confined");
    host.in_namespace(14, 0, 7);
    dockerd(15, "/system.slice/starter.service", 0, "/confined");
    let paths = format!("4:memory:/docker/{}\n0::/system.slice/starter.service\n", id('d'));
    fs::write(host.path("proc/15/cgroup"), paths).unwrap();
    for (pid, digit) in [(20, 'a'), (30, 'b'), (40, 'c'), (50, 'e'), (60, 'f')] {
        host.process(pid, "/usr/bin/app", &format!("/system.slice/docker-{}.scope", id(digit)), 0, &["app"]);
    }
    let found = discover(&host.sources(), &Rules::default());
    let seen: Vec<&str> = found.tenants.iter().map(|tenant| tenant.name.as_str()).collect();
    let digits = ['b', 'c', 'd', 'e', 'f'].map(|digit| digit.to_string().repeat(12));
    assert_eq!(seen, digits.iter().map(String::as_str).chain(["mill", "press"]).collect::<Vec<_>>());
}

#[test]
fn a_process_lives_on_after_its_main_thread() {
    let host = Host::new();
    let scope = format!("/system.slice/docker-{}.scope", id('a'));
    host.process(10, "/usr/bin/tini", &scope, 0, &["tini"]);
    for (pid, executable, cgroup, comm) in [
        (20, "/opt/soft-plc/runtime", scope.as_str(), "cycle"),
        (30, "/opt/motion/axis", "/rt.slice/axis.service", "axis-0"),
        (40, "/usr/bin/cloud-hypervisor", "/vm.slice/cell.service", "vcpu0"),
        (60, "/usr/bin/app", &format!("/machine.slice/libpod-{}.scope", id('b')), "worker"),
    ] {
        host.process(pid, executable, cgroup, 0, &[executable, "--id", "cell"]);
        host.thread(pid, pid + 1, comm, 0);
        host.thread(pid, pid + 2, "helper", 0);
    }
    host.open_file(40, 5, "/dev/net/tun", "iff:\ttap40\n");
    host.interface("tap40", 40);
    let conmon = ["conmon", "-c", &id('b'), "-n", "mill"];
    host.process(50, "/usr/bin/conmon", &format!("/machine.slice/libpod-conmon-{}.scope", id('b')), 0, &conmon);
    host.alter(60, 50, 0);
    [20, 30, 40, 60].iter().for_each(|pid| host.end_main_thread(*pid, pid + 1));
    // It has ended as a whole, and was not waited for.
    host.process(70, "/usr/bin/app", &scope, 0, &["app"]);
    host.thread(70, 71, "thread", 0);
    host.end_main_thread(70, 71);
    fs::remove_dir_all(host.path("proc/70/task/71")).unwrap();
    let found =
        discover(&host.sources(), &rules("[[tenant]]\ncgroup = \"/{system,rt,vm}.slice/**\"\nclass = \"rt\"\n"));
    let tids = |tenant: &Tenant| {
        let mut tids: Vec<i32> = tenant.threads.iter().map(|thread| thread.id.tid).collect();
        tids.sort_unstable();
        tids
    };
    let seen: Vec<(&str, Vec<i32>, Class)> =
        found.tenants.iter().map(|one| (one.name.as_str(), tids(one), one.class)).collect();
    let wanted = [
        ("cell", vec![41, 42], RT),
        ("aaaaaaaaaaaa", vec![10, 21, 22], RT),
        ("axis.service", vec![31, 32], RT),
        ("mill", vec![61, 62], Class::Bulk),
    ];
    assert_eq!(seen, wanted, "{:?}", found.problems);
    let vm = named(&found, "cell");
    assert_eq!((of_role(vm, ThreadRole::Vcpu(0)), vm.vnics.len(), vm.process.tid), (vec![41], 1, 40));
}

#[test]
fn lxcs_monitor_says_which_number_is_a_part_of_the_name() {
    let host = Host::new();
    let of_user = "/user.slice/user-1000.slice/user@1000.service/app.slice";
    for (pid, uid, below, cgroup, title, name) in [
        // A container of that name, and one whose earlier cgroup is left over; in a place that no file tells.
        (100, 0, "", "cell-1", "[lxc monitor] /srv/lxc cell-1", "cell-1"),
        (110, 0, "", "press-1", "[lxc monitor] /srv/lxc press", "press"),
        (120, 0, "", "mill-2-1", "[lxc monitor] /srv/my lxc mill-2", "mill-2"),
        // Both run, in different places.
        (130, 0, "", "saw", "[lxc monitor] /srv/a saw", "saw"),
        (140, 0, "", "saw-1", "[lxc monitor] /srv/b saw", "saw"),
        // A user's monitor tells of the user's container only, and no monitor another name than the cgroup's.
        (150, 1000, of_user, "door-1", "[lxc monitor] /home/u/lxc door-1", "door-1"),
        (160, 1000, "", "gate-1", "[lxc monitor] /home/u/lxc gate-1", "gate"),
        (170, 0, "", "lift-1", "[lxc monitor] /srv/lxc press", "lift"),
        (180, 0, "", "weld-1", "lxc-start weld-1", "weld"),
    ] {
        host.process(pid, "/usr/bin/lxc-start", &format!("{below}/lxc.monitor.{cgroup}"), uid, &[title]);
        host.process(pid + 1, "/sbin/init", &format!("{below}/lxc.payload.{cgroup}/init.scope"), uid, &["init"]);
        host.alter(pid + 1, pid, 0);
        let found = discover(&host.sources(), &Rules::default());
        let tenant = found.tenants.iter().find(|tenant| tenant.process.pid == pid + 1);
        assert_eq!(tenant.map(|tenant| tenant.name.as_str()), Some(name), "{cgroup} {title}");
    }
    // Inside a container, a process may call itself anything.
    host.process(200, "/sbin/init", "/lxc.payload.box/x", 0, &["init"]);
    host.process(201, "/sbin/init", "/lxc.payload.box/lxc.monitor.oven-1", 0, &["[lxc monitor] /srv oven-1"]);
    host.process(202, "/sbin/init", "/lxc.payload.oven-1", 0, &["init"]);
    host.alter(202, 201, 0);
    // A link to a directory that exists only in the mount namespace of LXD's snap.
    let place = host.path("var/snap/lxd/common/lxd/containers");
    fs::create_dir_all(&place).unwrap();
    symlink("/var/snap/lxd/common/lxd/storage-pools/a/containers/web-3", place.join("web-3")).unwrap();
    host.process(210, "/sbin/init", "/lxc.payload.web-3", 0, &["init"]);
    let found = discover(&host.sources(), &Rules::default());
    let name = |pid: i32| found.tenants.iter().find(|one| one.process.pid == pid).map(|one| one.name.as_str());
    assert_eq!((name(202), name(210)), (Some("oven"), Some("web-3")));
}

#[test]
fn monitors_of_containers_get_nothing_by_a_rule_for_any_cgroup() {
    let (host, a) = (Host::new(), id('a'));
    for (pid, executable, cgroup) in [
        // Podman and CRI-O with cgroupfs, in a pod of Podman's, and in a Kubernetes pod.
        (10, "/usr/bin/conmon", "/libpod_parent/conmon".to_owned()),
        (11, "/usr/libexec/podman/conmon", "/plc/pod7/conmon".to_owned()),
        (12, "/usr/bin/conmon", format!("/kubepods/burstable/pod7/crio-conmon-{a}")),
        (13, "/usr/bin/bash", format!("/kubepods/burstable/pod7/crio-conmon-{a}")),
        // A unit that podman generate systemd wrote, with Slice=rt.slice; others without cgroups of their own.
        (14, "/usr/bin/conmon", "/rt.slice/container-press.service".to_owned()),
        (15, "/usr/bin/conmonrs", "/rt.slice/crio.service".to_owned()),
        (16, "/usr/bin/containerd-shim-runc-v2", "/rt.slice/containerd.service".to_owned()),
        (17, "/usr/bin/systemd-nspawn", "/rt.slice/box.service".to_owned()),
        // Containers, and programs that are no monitors.
        (20, "/usr/bin/app", format!("/rt.slice/libpod-{}.scope/container", id('b'))),
        (21, "/usr/bin/app", format!("/kubepods/burstable/pod7/crio-{a}")),
        (22, "/usr/bin/conmon-exporter", "/rt.slice/exporter.service".to_owned()),
        // A program of that name is the container's own.
        (23, "/usr/bin/conmon", format!("/rt.slice/libpod-{}.scope/container", id('c'))),
    ] {
        host.process(pid, executable, &cgroup, 0, &[executable]);
    }
    let text = "[[tenant]]\ncgroup = \"/{rt.slice,libpod_parent,plc,kubepods}/**\"\nclass = \"rt\"\n";
    let found = discover(&host.sources(), &rules(text));
    let mut seen: Vec<i32> = found.tenants.iter().flat_map(|one| &one.threads).map(|thread| thread.id.pid).collect();
    seen.sort_unstable();
    assert_eq!(seen, [20, 21, 22, 23], "{found:#?}");
    assert!(found.tenants.iter().all(|tenant| tenant.class == RT));
}

#[test]
fn vms_have_the_names_that_machined_has_recorded() {
    let host = Host::new();
    let qemu = "/usr/bin/qemu-system-x86_64";
    for (pid, unit, name, class, path) in [
        // systemd 258's vmspawn, earlier ones', a service of any name, the monitor in a cgroup below.
        (100, "cell.scope", "cell", "vm", "/machine.slice/cell.scope"),
        (110, "machine-12345678-press.scope", "press", "vm", "/machine.slice/machine-12345678-press.scope"),
        (120, "run-p7-i8.service", "mill", "vm", "/system.slice/run-p7-i8.service/vm/qemu"),
        (130, "machine-saw.scope", "saw", "vm", "/machine.slice/machine-saw.scope/monitor"),
        (140, r"machine-the\x2dlathe.scope", "the-lathe", "vm", r"/machine.slice/machine-the\x2dlathe.scope/payload"),
        // Without a record.
        (150, "", "door", "", "/machine.slice/machine-door.scope/vm"),
        (160, "", "vm-160", "", "/machine.slice/gate.scope"),
    ] {
        host.process(pid, qemu, path, 0, &["qemu-system-x86_64", "-nodefaults", "-name", "debug-threads=on"]);
        host.thread(pid, pid + 1, "CPU 0/KVM", 0);
        host.process(pid + 2, "/usr/bin/swtpm", path, 0, &["swtpm"]);
        if !unit.is_empty() {
            host.machine(unit, name, class);
            let end = path.find(unit).unwrap() + unit.len();
            host.process(pid + 3, "/usr/libexec/virtiofsd", &format!("{}/fs", &path[..end]), 0, &["virtiofsd"]);
        }
        let found = discover(&host.sources(), &rules("[[tenant]]\ncgroup = \"/*.slice/**\"\nclass = \"rt\"\n"));
        let tenant = named(&found, name);
        assert_eq!((tenant.process.pid, tenant.kind, tenant.class), (pid, Kind::Qemu, RT), "{path}");
        let pids: Vec<i32> = found.tenants.iter().flat_map(|one| &one.threads).map(|thread| thread.id.pid).collect();
        assert!(pids.iter().all(|pid| pid % 10 == 0), "helpers get nothing: {path} {pids:?}");
    }
    let found = discover(&host.sources(), &Rules::default());
    assert_eq!(named(&found, "saw").cgroup.as_deref(), Some("/machine.slice/machine-saw.scope"));
    assert_eq!(named(&found, "mill").cgroup.as_deref(), Some("/system.slice/run-p7-i8.service"));
}

#[test]
fn a_machines_record_gives_nothing_to_what_is_a_container_or_a_users() {
    let host = Host::new();
    let vm = |pid: i32, path: &str, uid: u32| {
        host.process(pid, "/usr/bin/qemu-system-x86_64", path, uid, &["qemu-system-x86_64", "-m", "1G"]);
        host.thread(pid, pid + 1, "CPU 0/KVM", 0);
    };
    host.machine("press.scope", "press", "vm");
    host.machine("machine-box.scope", "box", "container");
    // A user's unit of that name, a cgroup of that name inside a container, and a container whose processes are
    // directly in its scope, or below.
    vm(100, "/user.slice/user-1000.slice/user@1000.service/app.slice/press.scope", 1000);
    vm(200, &format!("/system.slice/docker-{}.scope/press.scope", id('a')), 0);
    vm(300, "/machine.slice/machine-box.scope", 0);
    vm(400, "/machine.slice/machine-box.scope/vm", 0);
    // Without a record: the container's own manager has units there.
    vm(500, "/machine.slice/machine-lab.scope/system.slice/vm.service", 0);
    let found = discover(&host.sources(), &rules("[[tenant]]\nname = \"*\"\nkind = \"qemu\"\nclass = \"rt\"\n"));
    let seen: Vec<(&str, Class)> = found.tenants.iter().map(|one| (one.name.as_str(), one.class)).collect();
    let bulk = ["vm-100", "vm-200", "vm-300", "vm-400", "vm-500"].map(|name| (name, Class::Bulk));
    assert_eq!(seen, bulk);
}

#[test]
fn containers_in_units_of_any_name_are_known_by_machineds_record() {
    let host = Host::new();
    for (pid, unit, path) in [
        (100, "press.scope", "/machine.slice/press.scope/init.scope"),
        (110, "mill.service", "/plc.slice/mill.service"),
        (120, "run-p1-i2.scope", "/system.slice/run-p1-i2.scope/payload/x"),
    ] {
        host.machine(unit, &format!("box{pid}"), "container");
        let scope = &path[..path.find(unit).unwrap() + unit.len()];
        host.process(pid, "/sbin/init", path, 0, &["init"]);
        host.process(pid + 1, "/usr/bin/systemd-nspawn", scope, 0, &["systemd-nspawn"]);
        host.process(pid + 2, "/usr/bin/systemd-nspawn", &format!("{scope}/supervisor"), 0, &["systemd-nspawn"]);
        // A VM in the container is not root's.
        host.vm(pid * 10, "inner", path);
        let text = format!("[[tenant]]\nname = \"{{box{pid},inner}}\"\nclass = \"rt\"\n");
        let found = discover(&host.sources(), &rules(&text));
        let rt: Vec<(&str, i32)> = found
            .tenants
            .iter()
            .filter(|one| one.class == RT)
            .flat_map(|one| one.threads.iter().map(|thread| (one.cgroup.as_deref().unwrap(), thread.id.pid)))
            .collect();
        assert_eq!(rt, [(scope, pid)], "{path}");
    }
    // A user's unit of a recorded name, and a unit that machined calls the host's.
    host.machine("door.scope", "door", "container");
    host.machine("gate.scope", "gate", "host");
    host.process(200, "/bin/app", "/user.slice/user-1000.slice/user@1000.service/door.scope", 1000, &["app"]);
    host.process(210, "/bin/app", "/system.slice/gate.scope", 0, &["app"]);
    let found = discover(&host.sources(), &Rules::default());
    assert!(!found.tenants.iter().any(|one| matches!(one.process.pid, 200 | 210)), "{found:#?}");
}

#[test]
fn helpers_of_a_vm_in_a_part_of_a_unit_or_in_no_unit_get_nothing() {
    let container = format!("/edge.slice/cell.service/libpod-payload-{}", id('a'));
    for (vm, beside, helpers) in [
        ("/edge.slice/cell.service/vmm", "/edge.slice/cell.service/virtiofsd", true),
        ("/edge.slice/cell.service/a/b", "/edge.slice/cell.service", true),
        ("/edge.slice/run-u1.scope/vmm", "/edge.slice/run-u1.scope/tpm/x", true),
        ("/edge/cell", "/edge/cell", true),
        ("/edge/cell", "/edge/cell/fs", true),
        ("/edge/cell", "/edge/mill", false),
        ("/edge.slice/cell.service/vmm", "/edge.slice/mill.service/vmm", false),
        // A container of the same unit is no helper.
        ("/edge.slice/cell.service/vmm", &container, false),
        ("/edge.slice", "/edge.slice", true),
        ("/edge.slice", "/edge.slice/mill.service", false),
        ("/edge/user@0.service/cell", "/edge/user@0.service/cell", true),
        ("/edge/user@0.service/cell", "/edge/user@0.service/mill", false),
    ] {
        let host = Host::new();
        host.process(100, "/usr/bin/cloud-hypervisor", vm, 0, &["cloud-hypervisor"]);
        host.thread(100, 101, "vcpu0", 0);
        host.process(110, "/usr/libexec/virtiofsd", beside, 0, &["virtiofsd"]);
        let text = "[[tenant]]\ncgroup = \"/{edge,edge.slice}\"\nclass = \"rt\"\n";
        let found = discover(&host.sources(), &rules(text));
        let processes: Vec<i32> = found.tenants.iter().map(|tenant| tenant.process.pid).collect();
        assert_eq!(processes, if helpers { vec![100] } else { vec![100, 110] }, "{vm} {beside}");
    }
}

#[test]
fn a_monitor_on_a_kernel_without_pid_namespaces_is_in_the_hosts() {
    for (numbers, is_hosts) in [("", true), ("NSpid:\t100\n", true), ("NSpid:\t100\t7\n", false)] {
        let host = Host::new();
        let sandbox = id('d');
        let state = host.path(&format!("run/containerd/io.containerd.runtime.v2.task/k8s.io/{sandbox}"));
        fs::create_dir_all(&state).unwrap();
        let record = r#"{"annotations":{"io.kubernetes.cri.sandbox-name":"robot-0"}}"#;
        fs::write(state.join("config.json"), record).unwrap();
        let cgroup = format!("/kubepods.slice/kubepods-pod3.slice/cri-containerd-{sandbox}.scope");
        let line = ["qemu-system-x86_64", "-name", &format!("sandbox-{sandbox},debug-threads=on")];
        host.process(100, "/opt/kata/bin/qemu-system-x86_64", &cgroup, 0, &line);
        host.thread(100, 101, "CPU 0/KVM", 0);
        fs::write(host.path("proc/100/status"), format!("Name:\tqemu\nUid:\t0\t0\t0\t0\n{numbers}")).unwrap();
        let found = discover(&host.sources(), &rules("[[tenant]]\nname = \"robot-0\"\nclass = \"rt\"\n"));
        assert_eq!(found.tenants[0].class == RT, is_hosts, "{numbers} {found:?}");
    }
}

#[test]
fn containers_in_a_podman_pod_with_any_parent_are_found_by_the_pods_record() {
    let host = Host::new();
    let (pod, unknown, [cell, press]) = (id('e'), id('f'), ['1', '2'].map(id));
    let storage = host.path("var/lib/containers/storage/overlay-containers");
    fs::create_dir_all(&storage).unwrap();
    let record = format!(
        r#"[{{"id":"{}","names":["{}-infra"]}},{{"id":"{cell}","names":["cell"]}},
            {{"id":"{press}","names":["press"]}}]"#,
        id('3'),
        &pod[..12]
    );
    fs::write(storage.join("containers.json"), record).unwrap();
    host.process(10, "/usr/bin/app", &format!("/plc/{pod}/libpod-{cell}"), 0, &["app"]);
    host.process(11, "/usr/bin/app", &format!("/plc/{pod}/libpod-{}/x", id('4')), 0, &["app"]);
    host.process(12, "/usr/bin/conmon", &format!("/plc/{pod}/conmon"), 0, &["conmon"]);
    // A container that is no pod has made a cgroup that looks like another container's.
    host.process(20, "/usr/bin/app", &format!("/jobs/{unknown}/libpod-{press}"), 0, &["app"]);
    let found = discover(&host.sources(), &rules("[[tenant]]\nname = \"{cell,press}\"\nclass = \"rt\"\n"));
    let seen: Vec<(&str, i32, Class)> =
        found.tenants.iter().map(|one| (one.name.as_str(), one.process.pid, one.class)).collect();
    assert_eq!(seen, [("444444444444", 11, Class::Bulk), ("cell", 10, RT), ("ffffffffffff", 20, Class::Bulk)]);
}

#[test]
fn containers_in_a_podman_pod_without_an_infra_container_are_found_by_a_conmon() {
    let host = Host::new();
    let [pod, contained, users, cell, saw, mill] = ['e', 'f', 'a', '1', '2', '3'].map(id);
    let conmon = |pid, of: &str, uid, started: &str, name: &str| {
        let line = ["conmon", "-c", started, "-n", name];
        host.process(pid, "/usr/bin/conmon", &format!("{of}/conmon"), uid, &line);
    };
    conmon(10, &format!("/plc/{pod}"), 0, &cell, "cell");
    host.process(11, "/usr/bin/app", &format!("/plc/{pod}/libpod-{cell}/x"), 0, &["app"]);
    host.alter(11, 10, 0);
    // A container that is no pod: its conmon has a PID namespace of its own.
    conmon(20, &format!("/plc/{contained}"), 0, &saw, "cell");
    host.in_namespace(20, 0, 7);
    host.process(21, "/usr/bin/app", &format!("/plc/{contained}/libpod-{saw}"), 0, &["app"]);
    // Root made this cgroup, and not the user whose conmon it is.
    conmon(30, &format!("/plc/{users}"), 1000, &mill, "cell");
    host.process(31, "/usr/bin/app", &format!("/plc/{users}/libpod-{mill}"), 0, &["app"]);
    let found = discover(&host.sources(), &rules("[[tenant]]\nname = \"cell\"\nclass = \"rt\"\n"));
    assert_eq!(
        names(&found),
        [
            ("aaaaaaaaaaaa", Kind::Container, Class::Bulk),
            ("cell", Kind::Container, RT),
            ("ffffffffffff", Kind::Container, Class::Bulk)
        ]
    );
    let threads: Vec<i32> = named(&found, "cell").threads.iter().map(|thread| thread.id.pid).collect();
    assert_eq!(threads, [11], "conmon is beside the container");
    // Nor has conmon a place by a rule for the pod's cgroup.
    let found = discover(&host.sources(), &rules("[[tenant]]\ncgroup = \"/plc/eee*\"\nclass = \"rt\"\n"));
    let rt = found.tenants.iter().filter(|tenant| tenant.class == RT).flat_map(|tenant| &tenant.threads);
    assert_eq!(rt.map(|thread| thread.id.pid).collect::<Vec<_>>(), [11]);
}

#[test]
fn storage_of_any_place_is_told_by_crios_and_conmons_command_lines_and_the_environment() {
    let host = Host::new();
    let write = |path: &str, text: String| {
        let path = host.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    for (place, digit, name) in [
        ("srv/pods", 'a', "press"),
        ("srv/crio", 'b', "k8s_loop_arm-0_plant_u_0"),
        ("data/st", 'c', "mill"),
        ("home/u/st", 'd', "users"),
    ] {
        let record = format!(r#"[{{"id":"{}","names":["{name}"]}},{{"id":"x","names":null}}]"#, id(digit));
        write(&format!("{place}/overlay-containers/containers.json"), record);
    }
    write("srv/storage.conf", "[storage]\ngraphroot = \"/srv/pods\"\n".to_owned());
    write("home/u/storage.conf", "[storage]\ngraphroot = \"/home/u/st\"\n".to_owned());
    host.process(10, "/usr/bin/podman", "/system.slice/podman.service", 0, &["podman", "system", "service"]);
    write("proc/10/environ", "A=b\0CONTAINERS_STORAGE_CONF=/srv/storage.conf\0".to_owned());
    host.process(11, "/usr/bin/crio", "/system.slice/crio.service", 0, &["crio", "--root=/srv/crio"]);
    let bundle = format!("/data/st/overlay-containers/{}/userdata", id('c'));
    let line = ["conmon", "-c", &id('c'), "-b", &bundle];
    host.process(12, "/usr/bin/conmon", &format!("/machine.slice/libpod-conmon-{}.scope", id('c')), 0, &line);
    // A user's program is not believed.
    host.process(13, "/usr/bin/podman", "/system.slice/x.service", 1000, &["podman", "system", "service"]);
    write("proc/13/environ", "CONTAINERS_STORAGE_CONF=/home/u/storage.conf\0".to_owned());
    for (pid, digit) in [(20, 'a'), (21, 'b'), (22, 'c'), (23, 'd')] {
        host.process(pid, "/usr/bin/app", &format!("/machine.slice/libpod-{}.scope", id(digit)), 0, &["app"]);
    }
    let found = discover(&host.sources(), &Rules::default());
    let seen: Vec<(&str, i32)> = found.tenants.iter().map(|one| (one.name.as_str(), one.process.pid)).collect();
    assert_eq!(seen, [("arm-0/loop", 21), ("dddddddddddd", 23), ("mill", 22), ("press", 20)]);
}

#[test]
fn records_that_are_too_large_or_damaged_are_told() {
    let host = Host::new();
    let (storage, docker) = ("var/lib/containers/storage/vfs-containers", "var/lib/docker/containers");
    // Docker takes an empty configuration for none.
    fs::create_dir_all(host.path("etc/docker")).unwrap();
    fs::write(host.path("etc/docker/daemon.json"), "").unwrap();
    for directory in [storage.to_owned(), format!("{docker}/{}", id('b')), format!("{docker}/{}", id('c'))] {
        fs::create_dir_all(host.path(&directory)).unwrap();
    }
    let large = fs::File::create(host.path(&format!("{storage}/containers.json"))).unwrap();
    large.set_len((4 << 20) + 1).unwrap();
    fs::write(host.path(&format!("{docker}/{}/config.v2.json", id('b'))), r#"{"Name":"/we"#).unwrap();
    fs::write(host.path(&format!("{docker}/{}/config.v2.json", id('c'))), r#"{"Name":"/saw"}"#).unwrap();
    for (pid, cgroup) in [
        (10, format!("/machine.slice/libpod-{}.scope", id('a'))),
        (11, format!("/system.slice/docker-{}.scope", id('b'))),
        (12, format!("/system.slice/docker-{}.scope", id('c'))),
    ] {
        host.process(pid, "/usr/bin/app", &cgroup, 0, &["app"]);
    }
    let found = discover(&host.sources(), &Rules::default());
    let told: Vec<(String, String)> =
        found.problems.iter().map(|problem| (problem.subject.clone(), problem.message())).collect();
    assert!(words(&found).iter().all(|(_, word)| *word == "record-unread") && told.len() == 2, "{told:?}");
    assert!(told[0].0.ends_with("vfs-containers/containers.json") && told[0].1.contains("it has 5 MiB, of which 4"));
    assert!(told[1].0.contains(&id('b')) && told[1].1.contains("damaged in line 1, column "), "{told:?}");
    assert_eq!(named(&found, "saw").process.pid, 12);
}

#[test]
fn containers_of_a_containerd_in_another_program_and_of_its_clients_have_their_names() {
    let host = Host::new();
    let state = "var/lib/solo/containerd/state/io.containerd.runtime.v2.task";
    let record = |place: &str, id: &str, pod: &str, namespace: &str| {
        let directory = host.path(&format!("{place}/k8s.io/{id}"));
        fs::create_dir_all(&directory).unwrap();
        let text = format!(
            r#"{{"annotations":{{"{cri}sandbox-name":"{pod}","{cri}container-name":"loop",
                "{cri}sandbox-namespace":"{namespace}"}}}}"#,
            cri = "io.kubernetes.cri."
        );
        fs::write(directory.join("config.json"), text).unwrap();
    };
    let shim = |pid: i32, cgroup: &str, uid: u32, directory: &str| {
        host.process(pid, "/usr/local/bin/containerd-shim-runc-v2", cgroup, uid, &["containerd-shim-runc-v2"]);
        symlink(directory, host.path(&format!("proc/{pid}/cwd"))).unwrap();
    };
    record(state, &id('a'), "press-0", "plant");
    record(state, &id('b'), "press-0", "test");
    record("home/u/io.containerd.runtime.v2.task", &id('c'), "users", "x");
    record("inner/io.containerd.runtime.v2.task", &id('d'), "inner", "x");
    shim(10, "/system.slice/solo.service", 0, &format!("/{state}/k8s.io/{}", id('a')));
    shim(11, "/system.slice/cron.service", 1000, &format!("/home/u/io.containerd.runtime.v2.task/k8s.io/{}", id('c')));
    shim(12, &format!("/system.slice/docker-{}.scope", id('9')), 0, "/inner/io.containerd.runtime.v2.task/k8s.io/x");
    shim(13, "/system.slice/odd.service", 0, "/");
    for (pid, digit) in [(20, 'a'), (30, 'b'), (40, 'c'), (50, 'd')] {
        host.process(pid, "/usr/bin/app", &format!("/kubepods/burstable/pod{pid}/{}", id(digit)), 0, &["app"]);
    }
    // ctr run --runc-systemd-cgroup --cgroup SLICE:PREFIX:NAME, and scopes that only look so.
    for task in ["weld-2", "2"] {
        fs::create_dir_all(host.path("run/containerd/io.containerd.runtime.v2.task/default").join(task)).unwrap();
    }
    for (pid, cgroup) in [
        (60, "/plc.slice/ctr-weld-2.scope/x"),
        (70, "/plc.slice/ctr-weld.scope"),
        (80, "/user.slice/user-1000.slice/user@1000.service/app.slice/ctr-weld-2.scope"),
        (90, "/user.slice/user-0.slice/session-2.scope"),
    ] {
        host.process(pid, "/usr/bin/app", cgroup, 0, &["app"]);
    }
    let text = "[[tenant]]\nname = \"plant/press-0/loop\"\nclass = \"rt\"\n";
    let found = discover(&host.sources(), &rules(&format!("{text}[[tenant]]\nname = \"weld-2\"\nclass = \"rt\"\n")));
    let seen: Vec<(i32, &str, Class)> =
        found.tenants.iter().map(|one| (one.process.pid, one.name.as_str(), one.class)).collect();
    let bulk = Class::Bulk;
    let wanted = [
        (12, "999999999999", bulk),
        (40, "cccccccccccc", bulk),
        (50, "dddddddddddd", bulk),
        (20, "press-0/loop", RT),
        (30, "press-0/loop", bulk),
        (60, "weld-2", RT),
    ];
    assert_eq!(seen, wanted);
    assert_eq!(named(&found, "weld-2").cgroup.as_deref(), Some("/plc.slice/ctr-weld-2.scope"));
}

#[test]
fn vms_are_called_by_their_own_options_and_uuids() {
    let host = Host::new();
    let qemu = "/usr/bin/qemu-system-x86_64";
    let ch = "/usr/bin/cloud-hypervisor";
    let vbox = "/usr/lib/virtualbox/VBoxHeadless";
    for (pid, executable, line, name, uuid) in [
        (100, qemu, "qemu -name debug-threads=on", "vm-100", None),
        (110, qemu, "qemu -name process=plc -nodefaults", "vm-110", None),
        (120, qemu, "qemu --name guest=cell -name debug-threads=on", "cell", None),
        (130, qemu, "qemu -device x,id=y --id mill -name process=x", "vm-130", None),
        (
            140,
            ch,
            "cloud-hypervisor --platform num_pci_segments=2,uuid=8A4E7C11-91B3-4D43-8D61-2B2F5A0C9E77",
            "vm-140",
            Some(UUID),
        ),
        (150, ch, "cloud-hypervisor --platform=uuid=8a4e7c11-91b3-4d43-8d61-2b2f5a0c9e77", "vm-150", Some(UUID)),
        (160, vbox, "VBoxHeadless --comment press --startvm 8a4e7c11-91b3-4d43-8d61-2b2f5a0c9e77", "press", Some(UUID)),
        (170, vbox, "VBoxHeadless -startvm saw", "vm-170", None),
        (
            180,
            "/usr/bin/stratovirt",
            "stratovirt -name lathe -uuid 8a4e7c11-91b3-4d43-8d61-2b2f5a0c9e77",
            "lathe",
            Some(UUID),
        ),
        (190, "/memfd:firecracker (deleted)", "fc --id weld", "weld", None),
    ] {
        host.process(pid, executable, "/vm.slice/vms.service", 0, &line.split(' ').collect::<Vec<_>>());
        let found = discover(&host.sources(), &rules(&format!("[[tenant]]\nuuid = \"{UUID}\"\nclass = \"rt\"\n")));
        let vm = found.tenants.iter().find(|tenant| tenant.process.pid == pid).unwrap();
        assert_eq!((vm.name.as_str(), vm.uuid.as_deref()), (name, uuid), "{line}");
        assert_eq!(vm.class == RT, uuid.is_some(), "{line}");
    }
}
