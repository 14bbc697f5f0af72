//! Discovery on fake hosts.
#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing)]

mod common;

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

use common::{Host, PF_KTHREAD};
use ontime_tenants::config::Text;
use ontime_tenants::rules::Namer;
use ontime_tenants::{
    Class, ClassSource, Discovery, Kind, Level, Policy, PriorityTable, ProblemKind, Rules, Tenant, ThreadRole, discover,
};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

const UUID: &str = "3f1c9a52-0d52-4c1b-9e0a-6f4b7f1d2c33";
const RT: Class = Class::Rt(Level::HIGHEST);

fn rules(text: &str) -> Rules {
    Rules::parse(&[Text::new("/etc/ontime/tenants.toml", text)]).unwrap()
}

fn words(found: &Discovery) -> Vec<(String, &'static str)> {
    found.problems.iter().map(|one| (one.subject.clone(), one.word())).collect()
}

fn only(found: &Discovery) -> &Tenant {
    assert_eq!(found.tenants.len(), 1, "{found:#?}");
    &found.tenants[0]
}

fn roles(tenant: &Tenant) -> Vec<(i32, ThreadRole)> {
    let mut roles: Vec<_> = tenant.threads.iter().map(|thread| (thread.id.tid, thread.role)).collect();
    roles.sort_unstable_by_key(|(tid, _)| *tid);
    roles
}

#[test]
fn an_empty_host_has_no_tenants_and_no_problems() {
    let host = Host::new();
    assert_eq!(discover(&host.sources(), &Rules::default()), Discovery::default());
}

#[test]
fn a_host_that_cannot_be_read_is_one_problem() {
    let host = Host::new();
    fs::remove_dir_all(host.path("proc")).unwrap();
    assert_eq!(words(&discover(&host.sources(), &Rules::default()))[0].1, "unreadable");
}

#[test]
fn processes_that_may_not_be_looked_into_are_counted_and_the_rest_is_found() {
    let closed = |host: &Host, pids: &[i32], mode: u32| {
        let set = |pid: &i32| {
            fs::set_permissions(host.path(&format!("proc/{pid}")), fs::Permissions::from_mode(mode)).unwrap();
        };
        pids.iter().for_each(set);
    };
    // Directories that may be read and not searched, as without CAP_SYS_PTRACE, or not opened, as with hidepid=1.
    for (pids, mode, words) in [
        (&[][..], 0o444, None),
        // The host's init is no tenant, whatever hides it.
        (&[1], 0o000, None),
        (&[301], 0o444, Some("1 process may not be looked into; tenants may be missing")),
        (&[302], 0o000, Some("1 process may not be looked into; tenants may be missing")),
        (&[301, 1, 302, 303], 0o444, Some("3 processes may not be looked into; tenants may be missing")),
    ] {
        let host = Host::new();
        host.vm(100, "a", "/vm.slice/a.service");
        [1, 301, 302, 303].iter().for_each(|pid| host.process(*pid, "/usr/bin/app", "/", 1000, &["app"]));
        closed(&host, pids, mode);
        // A thread of its own, because it gives up the rights that open every file.
        let look = || {
            let mut rights = capabilities(None).unwrap();
            rights.effective -= CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
            set_capabilities(None, rights).unwrap();
            discover(&host.sources(), &Rules::default())
        };
        let found = std::thread::scope(|scope| scope.spawn(look).join().unwrap());
        closed(&host, pids, 0o755);
        assert_eq!(only(&found).name, "a");
        let told: Vec<String> = found.problems.iter().map(ToString::to_string).collect();
        assert_eq!(told.len(), usize::from(words.is_some()), "{told:?}");
        // Root without rights is not told to become root.
        let remedy = if rustix::process::geteuid().is_root() { "run it on the host" } else { "run as root" };
        let is_said = |words: &str| told[0].starts_with(&format!("/proc: {words}; ")) && told[0].contains(remedy);
        assert!(words.is_none_or(is_said), "{told:?}");
    }
}

#[test]
fn a_vm_is_found_with_all_its_threads() {
    let host = Host::new();
    host.vm(100, "a", "/vm.slice/a.service");
    host.kernel_thread(150, "kvm-pit/100");
    host.kernel_thread(151, "kvm-pit/999");
    host.process(60, "/usr/bin/bash", "/user.slice/session-1.scope", 0, &["bash"]);
    host.thread(60, 61, "CPU 0/KVM", 0);
    let found = discover(&host.sources(), &Rules::default());
    let vm = only(&found);
    assert_eq!((vm.name.as_str(), vm.kind, vm.class), ("a", Kind::Qemu, Class::Bulk));
    assert_eq!(vm.cgroup.as_deref(), Some("/vm.slice/a.service"));
    assert_eq!(
        roles(vm),
        [
            (100, ThreadRole::Emulator),
            (101, ThreadRole::Vcpu(0)),
            (102, ThreadRole::Vcpu(1)),
            (103, ThreadRole::Iothread),
            (104, ThreadRole::Emulator),
            (105, ThreadRole::Emulator),
            (106, ThreadRole::Emulator),
            (108, ThreadRole::Vhost),
            (150, ThreadRole::KvmPit),
        ]
    );
    let pit = vm.threads.iter().find(|thread| thread.role == ThreadRole::KvmPit).unwrap();
    assert_eq!((pit.id.pid, pit.id.tid), (150, 150), "a kernel thread is its own process");
    assert_eq!(vm.vnics[0].ifname, "tap100");
    assert!(found.problems.is_empty(), "{:?}", found.problems);
}

#[test]
fn vhost_before_linux_6_4_is_a_kernel_thread_named_after_the_thread_that_made_it() {
    let host = Host::new();
    host.vm(100, "a", "/");
    host.kernel_thread(150, "vhost-100");
    host.kernel_thread(151, "vhost-103");
    host.process(70, "/usr/bin/evil", "/", 1000, &["evil"]);
    host.thread(70, 70, "vhost-100", 0);
    let vm_roles = roles(only(&discover(&host.sources(), &Rules::default())));
    assert!(vm_roles.contains(&(150, ThreadRole::Vhost)) && vm_roles.contains(&(151, ThreadRole::Vhost)));
    assert!(!vm_roles.iter().any(|(tid, _)| *tid == 70), "a user's process may not pose as a kernel thread");
}

#[test]
fn a_device_process_belongs_to_the_one_vm_that_it_serves() {
    let host = Host::new();
    host.vm(100, "a", "/vm.slice/a.service");
    let device = |pid, cgroup, uid, vm| {
        host.process(pid, "/usr/bin/ontime", cgroup, uid, &["ontime", "device", "--vm", vm]);
        host.thread_at(pid, pid + 1, "ontime-sock/1", 0, (1, 48), "0-3");
    };
    device(200, "/system.slice/ontime-device@a.service", 990, "a");
    device(210, "/user.slice/user-1000.slice/session-1.scope", 1000, "a");
    device(220, "/system.slice/ontime-device@b.service", 990, "b");
    host.process(230, "/usr/bin/ontime", "/", 0, &["ontime", "trace", "--vm", "a"]);
    let id = "0123456789abcdef".repeat(4);
    let inside = format!("/system.slice/docker-{id}.scope");
    host.process(240, "/usr/bin/ontime", &inside, 0, &["ontime", "device", "--vm", "a"]);
    let of_device = |found: &Discovery| -> Vec<(i32, i32, Policy)> {
        let threads = found.tenants.iter().flat_map(|tenant| &tenant.threads);
        let devices = threads.filter(|thread| thread.role == ThreadRole::Device);
        devices.map(|thread| (thread.id.pid, thread.id.tid, thread.policy)).collect()
    };
    let rt = rules("[[tenant]]\nname = \"a\"\nclass = \"rt\"\n");
    let found = discover(&host.sources(), &rt);
    assert_eq!(of_device(&found), [(200, 200, Policy::BULK), (200, 201, Policy::Fifo(48))]);
    assert!(found.problems.is_empty(), "level with vhost threads is its place: {:?}", found.problems);
    assert_eq!(words(&discover(&host.sources(), &Rules::default())), [("a".into(), "bulk-at-real-time")]);
    // Another VM of that name, started by any user, must not take a thread out of the first VM's runtime cap.
    host.vm(300, "a", "/vm.slice/other.service");
    assert_eq!(of_device(&discover(&host.sources(), &rt)), [(200, 200, Policy::BULK), (200, 201, Policy::Fifo(48))]);
}

/// A guest that has taken over its device process can change its command line; the process stays under the VM's cap.
#[test]
fn a_device_process_serves_its_vm_until_it_ends() {
    let host = Host::new();
    host.vm(100, "a", "/vm.slice/a.service");
    host.vm(110, "b", "/vm.slice/b.service");
    let says = |pid: i32, line: &str| {
        fs::write(host.path(&format!("proc/{pid}/cmdline")), line.replace(' ', "\0") + "\0").unwrap();
    };
    host.process(
        200,
        "/usr/bin/ontime",
        "/system.slice/ontime-device@a.service",
        990,
        &["ontime", "device", "--vm", "a"],
    );
    host.process(210, "/usr/bin/ontime", "/", 0, &["ontime", "device", "--vm", "a"]);
    // The unit is configured to serve another VM than its name says.
    let unit = "/system.slice/ontime-device@of-b.service";
    host.process(220, "/usr/bin/ontime", unit, 990, &["ontime", "device", "--vm", "b"]);
    let served = |sources: &ontime_tenants::Sources| -> Vec<(String, i32)> {
        let found = discover(sources, &Rules::default());
        let of = |tenant: &Tenant| -> Vec<(String, i32)> {
            let devices = tenant.threads.iter().filter(|thread| thread.role == ThreadRole::Device);
            devices.map(|thread| (tenant.name.clone(), thread.id.pid)).collect()
        };
        let mut served: Vec<_> = found.tenants.iter().flat_map(of).collect();
        served.sort();
        served
    };
    let sources = host.sources();
    let all = [("a".to_owned(), 200), ("a".to_owned(), 210), ("b".to_owned(), 220)];
    assert_eq!(served(&sources), all);
    for line in ["", "sleep 1", "ontime device --vm b", "ontime device --vm c"] {
        says(200, line);
        says(210, line);
        says(220, "ontime trace");
        assert_eq!(served(&sources), all, "{line}");
    }
    // Its main thread ends, and /proc/PID/exe with it; other threads live.
    host.thread(210, 211, "ontime-sock/1", 0);
    fs::remove_file(host.path("proc/210/exe")).unwrap();
    fs::remove_dir_all(host.path("proc/210/task/210")).unwrap();
    assert_eq!(served(&sources), all);
    // A daemon that is started after that uses the unit's name.
    assert_eq!(served(&host.sources()), [("a".to_owned(), 200)]);
    // Another process has the number.
    fs::remove_dir_all(host.path("proc/210")).unwrap();
    host.process(210, "/usr/bin/ontime", "/", 0, &["ontime", "status"]);
    let stat = fs::read_to_string(host.path("proc/210/stat")).unwrap().replace("1000210", "1000999");
    fs::write(host.path("proc/210/stat"), stat).unwrap();
    assert_eq!(served(&sources), [all[0].clone(), all[2].clone()]);
}

#[test]
fn a_kernel_thread_with_an_odd_name_does_no_harm() {
    let host = Host::new();
    for (n, name) in ["vhost-", "vhost-99999999999", "kvm-pit/-1", "kvm-pit/x", "a) (b"].iter().enumerate() {
        host.kernel_thread(50 + i32::try_from(n).unwrap(), name);
    }
    assert_eq!(discover(&host.sources(), &Rules::default()), Discovery::default());
}

#[test]
fn libvirts_domains_take_name_class_interfaces_and_tuning_from_its_file() {
    let host = Host::new();
    host.vm(100, "dom", r"/machine.slice/machine-qemu\x2d1\x2ddom.scope/libvirt/emulator");
    host.interface("vnet0", 7);
    host.domain(
        "dom",
        100,
        UUID,
        "<metadata><o:tenant xmlns:o='https://ontime.dev/xmlns/tenant/1' class='rt' runtime-cap='0.6'/></metadata>\
         <cputune><vcpusched vcpus='0' scheduler='rr' priority='3'/></cputune>\
         <devices><interface type='bridge'><target dev='vnet0'/></interface>\
         <interface type='bridge'><target dev='gone0'/></interface></devices>",
    );
    let found = discover(&host.sources(), &rules("[[tenant]]\nname = \"dom\"\nclass = \"bulk\"\n"));
    let vm = only(&found);
    assert_eq!((vm.kind, vm.class, &vm.class_source, vm.runtime_cap), (Kind::Libvirt, RT, &ClassSource::Metadata, 0.6));
    assert_eq!(vm.uuid.as_deref(), Some(UUID));
    assert_eq!(vm.cgroup.as_deref(), Some(r"/machine.slice/machine-qemu\x2d1\x2ddom.scope"));
    assert_eq!(vm.vnics.iter().map(|vnic| vnic.ifname.as_str()).collect::<Vec<_>>(), ["vnet0"]);
    let vcpu = vm.threads.iter().find(|thread| thread.role == ThreadRole::Vcpu(0)).unwrap();
    assert_eq!(vcpu.libvirt.sched, Some(Policy::Rr(3)));
    assert_eq!(words(&found), [("dom".into(), "vnic-elsewhere"), ("dom".into(), "below-kernel")]);
}

#[test]
fn bad_libvirt_files_are_reported_and_the_rest_goes_on() {
    let host = Host::new();
    host.vm(100, "good", "/");
    host.domain("good", 100, UUID, "<metadata><o:tenant xmlns:o='https://ontime.dev/xmlns/tenant/1'/></metadata>");
    host.domain("stale", 555, UUID, "");
    fs::write(host.path("run/libvirt/qemu/broken.xml"), "<domstatus").unwrap();
    fs::write(host.path("run/libvirt/qemu/binary.xml"), [0xff, 0xfe, 0]).unwrap();
    fs::write(host.path("run/libvirt/qemu/good.pid"), "100").unwrap();
    let found = discover(&host.sources(), &Rules::default());
    assert_eq!((only(&found).kind, only(&found).class), (Kind::Libvirt, Class::Bulk));
    let mut kinds: Vec<_> = words(&found).into_iter().map(|(_, word)| word).collect();
    kinds.sort_unstable();
    assert_eq!(kinds, ["bad-metadata", "bad-status", "stale-domain", "unreadable"]);
    assert!(found.problems.iter().all(|problem| !problem.remedy().is_empty()));
}

#[test]
fn a_domain_whose_status_is_damaged_is_still_libvirts_by_its_pid_file() {
    let host = Host::new();
    host.vm(100, "dom", "/");
    fs::write(host.path("proc/100/status"), "Uid:\t64055\t64055\t64055\t64055\n").unwrap();
    fs::write(host.path("run/libvirt/qemu/dom.xml"), "<domst").unwrap();
    fs::write(host.path("run/libvirt/qemu/dom.pid"), "100\n").unwrap();
    host.process(200, "/usr/libexec/vhost-user-gpu", "/", 0, &["vhost-user-gpu", "--fd=3"]);
    fs::write(host.path("run/libvirt/qemu/1-dom-vhost-user-gpu.pid"), "200").unwrap();
    fs::write(host.path("run/libvirt/qemu/odd.pid"), "-3x").unwrap();
    let found = discover(&host.sources(), &rules("[[tenant]]\nname = \"dom\"\nclass = \"rt\"\n"));
    assert_eq!((only(&found).kind, only(&found).class, only(&found).owner), (Kind::Libvirt, RT, 0));
    assert_eq!(only(&found).vnics[0].ifname, "tap100", "by its open files instead");
    assert_eq!(found.problems.len(), 1, "{:?}", found.problems);
}

#[test]
fn a_stale_domain_does_not_adopt_the_process_that_has_its_number_now() {
    let host = Host::new();
    host.vm(100, "other", "/");
    host.process(200, "/usr/bin/bash", "/", 0, &["bash"]);
    host.domain(
        "old",
        100,
        UUID,
        "<metadata><o:tenant xmlns:o='https://ontime.dev/xmlns/tenant/1' class='rt'/></metadata>",
    );
    host.domain("older", 200, UUID, "");
    let found = discover(&host.sources(), &Rules::default());
    assert_eq!((only(&found).name.as_str(), only(&found).kind, only(&found).class), ("other", Kind::Qemu, Class::Bulk));
    assert_eq!(words(&found), [("old".into(), "stale-domain"), ("older".into(), "stale-domain")]);
}

#[test]
fn libvirt_with_an_emulator_of_another_name_is_a_vm() {
    let host = Host::new();
    host.process(100, "/opt/wrapped-emulator", "/", 64055, &["x", "-name", "guest=dom,debug-threads=on"]);
    host.thread(100, 101, "CPU 0/KVM", 0);
    host.domain("dom", 100, UUID, "");
    let found = discover(&host.sources(), &Rules::default());
    assert_eq!((only(&found).kind, only(&found).owner), (Kind::Libvirt, 0));
}

#[test]
fn vcpus_without_names_come_from_libvirts_record_or_are_reported() {
    let host = Host::new();
    let unnamed = |pid, name: &str| {
        host.process(pid, "/usr/bin/qemu-system-x86_64", "/", 0, &["qemu", "-name", name]);
        for tid in 1..=3 {
            host.thread(pid, pid + tid, "qemu-system-x86", 0);
        }
    };
    unnamed(100, "dom");
    unnamed(200, "plain");
    host.domain("dom", 100, UUID, "");
    let path = host.path("run/libvirt/qemu/dom.xml");
    let with_vcpus = fs::read_to_string(&path)
        .unwrap()
        .replace("<vcpus/>", "<vcpus><vcpu id='0' pid='102'/><vcpu id='1' pid='103'/><vcpu id='2' pid='100'/></vcpus>");
    fs::write(&path, with_vcpus).unwrap();
    let found = discover(&host.sources(), &rules("[[tenant]]\nname = \"plain\"\nclass = \"rt\"\n"));
    let dom = found.tenants.iter().find(|tenant| tenant.name == "dom").unwrap();
    assert_eq!(roles(dom)[2..], [(102, ThreadRole::Vcpu(0)), (103, ThreadRole::Vcpu(1))]);
    assert_eq!(roles(dom)[0], (100, ThreadRole::Emulator), "the main thread is no vCPU, whatever is recorded");
    assert_eq!(words(&found), [("plain".into(), "vcpus-unnamed")]);
}

#[test]
fn the_remedy_for_vcpus_without_names_is_their_monitors() {
    let host = Host::new();
    for (pid, name, executable) in [
        (100, "q", "qemu-system-x86_64"),
        (200, "ch", "cloud-hypervisor"),
        (300, "fc", "firecracker"),
        (400, "cr", "crosvm"),
    ] {
        host.process(pid, &format!("/usr/bin/{executable}"), "/", 0, &[executable, "--name", name]);
        for tid in 1..=3 {
            host.thread(pid, pid + tid, "worker", 0);
        }
    }
    let found = discover(&host.sources(), &rules("[[tenant]]\nname = \"*\"\nclass = \"rt\"\n"));
    assert!(words(&found).iter().all(|(_, word)| *word == "vcpus-unnamed"), "{:?}", found.problems);
    let remedy = |name: &str| found.problems.iter().find(|of| of.subject == name).unwrap().remedy();
    assert!(remedy("q").contains("debug-threads=on"));
    for (name, vcpu) in [
        ("ch", "cloud-hypervisor itself names the vCPUs of one that runs `vcpuN`"),
        ("fc", "`fc_vcpu N`"),
        ("cr", "`crosvm_vcpuN`"),
    ] {
        assert!(remedy(name).contains(vcpu) && !remedy(name).contains("QEMU"), "{}", remedy(name));
    }
}

#[test]
fn threads_that_pose_as_vcpus_are_none() {
    let host = Host::new();
    host.vm(100, "plain", "/");
    host.thread(100, 120, "CPU 1/KVM", 0);
    host.vm(200, "dom", "/");
    host.thread(200, 220, "CPU 7/KVM", 0);
    host.domain("dom", 200, UUID, "");
    let path = host.path("run/libvirt/qemu/dom.xml");
    let recorded = "<vcpus><vcpu id='0' pid='201'/><vcpu id='1' pid='202'/></vcpus>";
    fs::write(&path, fs::read_to_string(&path).unwrap().replace("<vcpus/>", recorded)).unwrap();
    for tenant in discover(&host.sources(), &Rules::default()).tenants {
        let base = tenant.process.pid;
        let vcpus: Vec<_> =
            roles(&tenant).into_iter().filter(|(_, role)| matches!(role, ThreadRole::Vcpu(_))).collect();
        assert_eq!(vcpus, [(base + 1, ThreadRole::Vcpu(0)), (base + 2, ThreadRole::Vcpu(1))], "{}", tenant.name);
    }
}

#[test]
fn a_bulk_vm_without_names_is_no_problem_and_its_vcpus_show_by_their_guest_time() {
    let host = Host::new();
    host.process(100, "/usr/bin/qemu-system-x86_64", "/", 0, &["qemu", "-name", "plain"]);
    for tid in [103, 101, 102] {
        host.thread(100, tid, "qemu-system-x86", 0);
    }
    for tid in [102, 103] {
        let path = host.path(&format!("proc/100/task/{tid}/stat"));
        let line = fs::read_to_string(&path).unwrap();
        // Field 43, guest time, is the second field after the three policy fields.
        fs::write(&path, line.replace(" 0 0 0 0 0 0 0 0 0 0 0 0\n", " 0 0 9 0 0 0 0 0 0 0 0 0\n")).unwrap();
        assert_ne!(fs::read_to_string(&path).unwrap(), line);
    }
    let found = discover(&host.sources(), &Rules::default());
    assert_eq!(roles(only(&found))[2..], [(102, ThreadRole::Vcpu(0)), (103, ThreadRole::Vcpu(1))]);
    assert!(found.problems.is_empty(), "{:?}", found.problems);
}

#[test]
fn a_vm_inside_a_container_does_not_take_real_time_by_its_name() {
    let host = Host::new();
    let id = "ef".repeat(32);
    let scope = format!("/machine.slice/libpod-{id}.scope");
    host.vm(100, "plc", &format!("{scope}/container"));
    host.process(90, "/bin/sh", &format!("{scope}/container"), 0, &["sh"]);
    let found = discover(&host.sources(), &rules("[[tenant]]\nkind = \"qemu\"\nclass = \"rt\"\n"));
    assert!(found.tenants.len() == 2 && found.tenants.iter().all(|tenant| tenant.class == Class::Bulk));
    assert_eq!(words(&found), [("plc".into(), "rule-withheld")]);
    let place = rules(&format!("[[tenant]]\ncgroup = \"{scope}\"\nclass = \"rt\"\n"));
    // The VM matches by its path; the shell beside it only by a rule that names the container.
    let of_rt = |place: &Rules| {
        let found = discover(&host.sources(), place);
        let rt = found.tenants.into_iter().filter(|tenant| tenant.class == RT);
        rt.map(|tenant| tenant.process.pid).collect::<Vec<_>>()
    };
    assert_eq!(of_rt(&place), [100]);
    let container = format!("[[tenant]]\ncgroup = \"{scope}\"\nkind = \"container\"\nclass = \"rt\"\n");
    assert_eq!(of_rt(&rules(&container)), [90]);
}

#[test]
fn containers_of_every_kind_are_found_by_cgroup() {
    let host = Host::new();
    let id = "ab".repeat(32);
    host.process(10, "/usr/bin/app", &format!("/machine.slice/libpod-{id}.scope/container"), 0, &["app"]);
    host.process(11, "/usr/bin/app", &format!("/machine.slice/libpod-{id}.scope/container/sub"), 0, &["app"]);
    host.thread(11, 12, "worker", 0);
    host.process(20, "/usr/bin/conmon", &format!("/machine.slice/libpod-conmon-{id}.scope"), 0, &["conmon"]);
    host.process(30, "/sbin/init", "/lxc.payload.web", 0, &["init"]);
    host.process(40, "/sbin/init", "/system.slice/ssh.service", 0, &["sshd"]);
    let found = discover(&host.sources(), &rules("[[tenant]]\nname = \"web\"\nclass = \"rt\"\n"));
    let seen: Vec<_> =
        found.tenants.iter().map(|t| (t.name.as_str(), t.class, t.threads.len(), t.process.pid)).collect();
    assert_eq!(seen, [("abababababab", Class::Bulk, 3, 10), ("web", RT, 1, 30)]);
    assert!(found.tenants.iter().all(|tenant| tenant.kind == Kind::Container));
}

#[test]
fn a_cgroup_that_a_rule_names_is_a_tenant() {
    let host = Host::new();
    host.process(1, "/sbin/init", "/rt.slice", 0, &["init"]);
    host.process(10, "/usr/bin/plc", "/rt.slice/plc.service", 0, &["plc"]);
    host.process(11, "/usr/bin/other", "/rt.slice", 0, &["other"]);
    host.vm(100, "vm", "/rt.slice/vm.service");
    let found = discover(&host.sources(), &rules("[[tenant]]\ncgroup = \"/rt.slice\"\nclass = \"rt\"\nlevel = 2\n"));
    let seen: Vec<_> = found.tenants.iter().map(|t| (t.name.as_str(), t.kind, t.threads.len())).collect();
    assert_eq!(seen, [("vm", Kind::Qemu, 8), ("rt.slice", Kind::Container, 2)], "process 1 is never a tenant's");
    assert!(found.tenants.iter().all(|tenant| tenant.class == Class::Rt(Level::try_from(2u8).unwrap())));
}

#[test]
fn a_users_tenant_is_not_real_time_by_its_name() {
    let host = Host::new();
    host.vm(100, "plc", "/user.slice/user-1000.slice/session-2.scope");
    fs::write(host.path("proc/100/status"), "Uid:\t1000\t1000\t1000\t1000\n").unwrap();
    let id = "cd".repeat(32);
    let cgroup = format!("/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{id}.scope");
    host.process(200, "/bin/app", &cgroup, 100_000, &["app"]);
    let found = discover(&host.sources(), &rules("[[tenant]]\nname = \"*\"\nclass = \"rt\"\n"));
    assert!(found.tenants.iter().all(|tenant| tenant.class == Class::Bulk && tenant.owner == 1000));
    let withheld = |problem: &&ontime_tenants::Problem| {
        matches!(problem.kind, ProblemKind::RuleWithheld { namer: Namer::User(1000), .. })
    };
    assert_eq!(found.problems.iter().filter(withheld).count(), 2);
    let named = rules("[[tenant]]\nname = \"*\"\nuser = 1000\nclass = \"rt\"\n");
    assert!(discover(&host.sources(), &named).tenants.iter().all(|tenant| tenant.class == RT));
}

#[test]
fn a_process_whose_owner_cannot_be_read_is_not_taken_for_roots() {
    let host = Host::new();
    host.vm(100, "plc", "/");
    fs::remove_file(host.path("proc/100/status")).unwrap();
    let found = discover(&host.sources(), &rules("[[tenant]]\nname = \"plc\"\nclass = \"rt\"\n"));
    assert_eq!(only(&found).class, Class::Bulk);
}

#[test]
fn what_vanishes_or_is_odd_spoils_nothing() {
    let host = Host::new();
    host.vm(100, "good", "/");
    // A directory only; no threads; threads without stat; an invalid stat; a zombie; names that are no numbers.
    fs::create_dir_all(host.path("proc/300")).unwrap();
    host.process(301, "/usr/bin/qemu-system-x86_64", "/", 0, &["qemu"]);
    fs::remove_dir_all(host.path("proc/301/task")).unwrap();
    host.process(302, "/usr/bin/qemu-system-x86_64", "/", 0, &[]);
    fs::remove_file(host.path("proc/302/task/302/stat")).unwrap();
    host.process(303, "/usr/bin/qemu-system-x86_64", "/", 0, &[]);
    fs::write(host.path("proc/303/task/303/stat"), b"\xff(((").unwrap();
    host.process(304, "/usr/bin/qemu-system-x86_64", "/", 0, &[]);
    let line = fs::read_to_string(host.path("proc/304/task/304/stat")).unwrap();
    fs::write(host.path("proc/304/task/304/stat"), line.replace(") S ", ") Z ")).unwrap();
    for name in ["self", "-5", "99999999999", "0", "task"] {
        fs::create_dir_all(host.path(&format!("proc/{name}"))).unwrap();
    }
    fs::create_dir_all(host.path("proc/100/task/notes")).unwrap();
    symlink("/dev/net/tun", host.path("proc/100/fd/999")).unwrap();
    let found = discover(&host.sources(), &Rules::default());
    assert_eq!(only(&found).name, "good");
    assert!(found.problems.is_empty(), "{:?}", found.problems);
}

#[test]
fn hostile_names_do_not_reach_a_terminal() {
    let host = Host::new();
    host.process(
        100,
        "/usr/bin/qemu-system-x86_64",
        "/",
        0,
        &["qemu", "-name", "guest=\u{1b}[2Jx\ny", "-uuid", "\u{7}"],
    );
    let found = discover(&host.sources(), &Rules::default());
    assert_eq!(only(&found).name, "?[2Jx?y");
    assert_eq!(only(&found).uuid.as_deref(), Some("?"));
}

#[test]
fn two_of_one_name_are_told() {
    let host = Host::new();
    host.vm(100, "a", "/");
    host.vm(200, "a", "/");
    assert_eq!(words(&discover(&host.sources(), &Rules::default())), [("a".into(), "same-name")]);
}

#[test]
fn conflicts_are_found_on_the_way() {
    let host = Host::new();
    host.vm(100, "bulk", "/");
    host.thread_at(100, 101, "CPU 0/KVM", 0, (1, 50), "0-3");
    host.vm(200, "rt", "/");
    host.thread_at(200, 201, "CPU 0/KVM", 0, (0, 0), "2");
    host.thread_at(200, 202, "CPU 1/KVM", 0, (0, 0), "3");
    host.thread_at(200, 208, "vhost-200", common::PF_USER_WORKER, (0, 0), "0-1");
    let found = discover(&host.sources(), &rules("[[tenant]]\nname = \"rt\"\nclass = \"rt\"\n"));
    assert_eq!(words(&found), [("bulk".into(), "above-path"), ("rt".into(), "vhost-apart")]);
    assert_eq!(PriorityTable::default(), Rules::default().table());
}

#[test]
fn a_discovery_is_json_with_remedies() {
    let host = Host::new();
    host.vm(100, "a", "/");
    host.vm(200, "a", "/");
    host.thread(100, 50, "x", PF_KTHREAD);
    let json = serde_json::to_value(discover(&host.sources(), &Rules::default())).unwrap();
    assert_eq!(json["tenants"][0]["kind"], "qemu");
    assert_eq!(json["problems"][0]["kind"], "same-name");
    assert!(json["problems"][0]["remedy"].as_str().is_some_and(|remedy| !remedy.is_empty()));
    let back: Vec<Tenant> = serde_json::from_value(json["tenants"].clone()).unwrap();
    assert_eq!(back.len(), 2);
}

#[test]
fn how_an_rt_vm_was_started_is_told_where_that_delays_it() {
    let host = Host::new();
    let line = ["kvm", "-name", "a", "-overcommit", "cpu-pm=on", "-device", "virtio-net-pci,netdev=n,vectors=0"];
    host.process(100, "/usr/bin/kvm", "/vm.slice/a.service", 0, &line);
    host.thread(100, 101, "CPU 0/KVM", 0);
    let class = |class: &str| {
        words(&discover(&host.sources(), &rules(&format!("[[tenant]]\nname = \"a\"\nclass = \"{class}\"\n"))))
    };
    let settings = || ("a".to_owned(), "vmm-settings");
    assert_eq!(class("rt"), [settings(), settings()]);
    assert!(class("bulk").is_empty(), "nobody waits for a bulk VM");
}
