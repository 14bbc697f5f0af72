use std::fs;

use super::*;
use crate::common;
use crate::config::Text;
use crate::discover::{discover, discover_between};
use crate::problem::Problem;

fn rules(text: &str) -> Rules {
    Rules::parse(&[Text::new("/etc/ontime/tenants.toml", text)]).unwrap()
}

/// A rule for each RT container and VM of these tests.
fn rt() -> Rules {
    rules("[[tenant]]\ncgroup = \"/rt*/**\"\nclass = \"rt\"\n[[tenant]]\nname = \"plc\"\nclass = \"rt\"\n")
}

fn cgroup(parent: &str, number: i32) -> String {
    format!("/{parent}/docker-{number:064x}.scope")
}

fn ids(found: &Discovery) -> Vec<i32> {
    let threads = found.tenants.iter().flat_map(|tenant| &tenant.threads);
    let mut all: Vec<i32> = threads.map(|thread| thread.id.tid).collect();
    all.sort_unstable();
    all
}

fn only(pid: i32) -> BTreeSet<i32> {
    BTreeSet::from([pid])
}

fn started_later(host: &common::Host, pid: i32) {
    for path in [format!("proc/{pid}/stat"), format!("proc/{pid}/task/{pid}/stat")] {
        let path = host.path(&path);
        let line = fs::read_to_string(&path).unwrap().replace(&format!(" {} ", pid + 1_000_000), " 2000000 ");
        fs::write(path, line).unwrap();
    }
}

#[test]
fn what_starts_during_a_discovery_is_found_before_its_end_and_is_in_its_result_once() {
    let (host, rules) = (common::Host::new(), rt());
    for pid in 100..140 {
        host.process(pid, "/bin/program", &cgroup("rt", pid), 0, &["program"]);
    }
    let known = discover(&host.sources(), &rules);
    let (mut early, mut turns) = (None, 0);
    let sources = host.sources();
    let mut found = discover_between(&sources, &rules, &mut || {
        turns += 1;
        // The processes have been listed; the first one's threads have not been read.
        if turns == 4 {
            host.thread(139, 239, "program", 0);
            host.process(300, "/bin/program", &cgroup("rt", 300), 0, &["program"]);
            early = Some(newcomers(&host.sources(), &rules, &known, &[139, 300].into()));
        }
    });
    assert!(turns > 40, "{turns} turns between 40 processes");
    assert_eq!(ids(&early.unwrap()), [139, 239, 300]);
    assert!(!ids(&found).contains(&300), "the list of processes is older");
    let late = newcomers(&sources, &rules, &found, &[139, 300].into());
    found.take_in(late.clone());
    found.take_in(late);
    assert_eq!(ids(&found), (100..140).chain([239, 300]).collect::<Vec<_>>());
    let whole = discover(&sources, &rules);
    assert_eq!((&found.tenants, found.tenants.len()), (&whole.tenants, 41));
}

#[test]
fn a_reused_number_has_the_place_of_its_new_process_only() {
    let (host, rules) = (common::Host::new(), rt());
    host.process(100, "/bin/program", &cgroup("rt", 1), 0, &["program"]);
    let sources = host.sources();
    let known = discover(&sources, &rules);
    let old = known.tenants.first().unwrap().threads.first().unwrap().id;
    let becomes = |parent: &str, number| {
        fs::remove_dir_all(host.path("proc/100")).unwrap();
        host.process(100, "/bin/program", &cgroup(parent, number), 0, &["program"]);
        started_later(&host, 100);
        newcomers(&sources, &rules, &known, &only(100))
    };
    assert_eq!(ids(&becomes("bulk", 2)), [0; 0]);
    for container in [1, 3] {
        let mut found = known.clone();
        found.take_in(becomes("rt", container));
        let [tenant] = found.tenants.as_slice() else { panic!("{found:?}") };
        let [thread] = tenant.threads.as_slice() else { panic!("{tenant:?}") };
        assert!(thread.id != old && thread.id == tenant.process && thread.id.start_time == 2_000_000, "{tenant:?}");
        assert_eq!(tenant.cgroup, Some(cgroup("rt", container)));
    }
    // The number passes on while the process is looked at.
    fs::remove_dir_all(host.path("proc/100")).unwrap();
    assert_eq!(ids(&newcomers(&sources, &rules, &known, &only(100))), [0; 0]);
}

#[test]
fn a_vms_new_threads_are_its_own_whichever_way_the_kernel_lists_them() {
    let (host, rules) = (common::Host::new(), rt());
    host.vm(100, "plc", "/machine/plc");
    host.vm(200, "other", "/machine/other");
    let sources = host.sources();
    let mut known = discover(&sources, &rules);
    host.thread(100, 150, "CPU 2/KVM", 0);
    host.kernel_thread(301, "vhost-100");
    host.kernel_thread(302, "kvm-pit/100");
    host.kernel_thread(303, "vhost-200");
    host.thread(200, 250, "CPU 2/KVM", 0);
    let news = newcomers(&sources, &rules, &known, &[100, 200, 301, 302, 303].into());
    assert!(news.tenants.iter().all(|tenant| tenant.name == "plc"), "bulk VMs are left to the next discovery");
    known.take_in(news);
    let plc = known.tenants.iter().find(|tenant| tenant.name == "plc").unwrap();
    let role = |tid: i32| plc.threads.iter().find(|thread| thread.id.tid == tid).map(|thread| thread.role);
    assert_eq!([150, 301].map(role), [Some(ThreadRole::Vcpu(2)), Some(ThreadRole::Vhost)]);
    assert_eq!([302, 303].map(role), [None; 2], "a timer is left to the next discovery");
    assert_eq!(plc.vnics.len(), 1, "its interfaces stay");
    assert_eq!(known.tenants.len(), 2);
}

#[test]
fn a_program_of_a_container_that_becomes_a_vms_monitor_is_no_containers_thread() {
    let (host, rules) = (common::Host::new(), rt());
    host.process(100, "/bin/busybox", &cgroup("rt", 1), 0, &["busybox"]);
    let sources = host.sources();
    let mut known = discover(&sources, &rules);
    fs::remove_dir_all(host.path("proc/100")).unwrap();
    host.vm(100, "plc", &cgroup("rt", 1));
    known.take_in(newcomers(&sources, &rules, &known, &only(100)));
    let kinds: Vec<Kind> = known.tenants.iter().map(|tenant| tenant.kind).collect();
    assert_eq!(kinds, [Kind::Qemu]);
}

#[test]
fn what_a_look_at_one_process_does_not_tell_is_left_to_a_discovery() {
    let (host, rules) = (common::Host::new(), rt());
    let sources = host.sources();
    // libvirt has not written what it does with the threads.
    host.vm(100, "plc", "/machine.slice/machine-qemu\\x2d1\\x2dplc.scope/libvirt/emulator");
    assert_eq!(ids(&newcomers(&sources, &rules, &Discovery::default(), &only(100))), [0; 0]);
    // No name tells which threads are vCPUs.
    host.process(200, "/usr/bin/qemu-system-x86_64", "/a", 0, &["qemu-system-x86_64", "-name", "plc"]);
    host.thread(200, 201, "qemu-system-x86", 0);
    host.thread(200, 202, "qemu-system-x86", 0);
    assert_eq!(ids(&newcomers(&sources, &rules, &Discovery::default(), &only(200))), [0; 0]);
    assert!(!discover(&sources, &rules).tenants.is_empty());
}

/// A QEMU of this user, in an RT cgroup.
fn qemu(host: &common::Host, pid: i32, name: &str, uid: u32) {
    let line = ["qemu-system-x86_64", "-name", name];
    host.process(pid, "/usr/bin/qemu-system-x86_64", &format!("/rt/{pid}"), uid, &line);
    host.thread(pid, pid + 1, "CPU 0/KVM", 0);
}

fn names(found: &Discovery) -> Vec<(i32, &str)> {
    found.tenants.iter().map(|tenant| (tenant.process.pid, tenant.name.as_str())).collect()
}

#[test]
fn a_newcomer_of_a_user_does_not_keep_the_name_of_roots_tenant() {
    let (host, rules) = (common::Host::new(), rt());
    qemu(&host, 100, "plc", 0);
    let sources = host.sources();
    let known = discover(&sources, &rules);
    qemu(&host, 200, "plc", 1000);
    // A device process for the VM of that name, which root's system started.
    let line = ["ontime", "device", "--vm", "plc"];
    host.process(300, "/usr/bin/ontime", "/system.slice/other.service", 0, &line);
    let news = newcomers(&sources, &rules, &known, &[200, 300].into());
    assert_eq!(names(&news), [(200, "vm-200")]);
    assert_eq!(ids(&news), [200, 201], "the device process is not that VM's");
    let mut found = known;
    found.take_in(news);
    assert_eq!(names(&found), [(100, "plc"), (200, "vm-200")]);
}

#[test]
fn a_users_tenant_gives_its_name_up_to_a_newcomer_of_roots() {
    let (host, rules) = (common::Host::new(), rt());
    qemu(&host, 200, "plc", 1000);
    let sources = host.sources();
    let mut found = discover(&sources, &rules);
    assert_eq!(names(&found), [(200, "plc")]);
    qemu(&host, 100, "plc", 0);
    for _ in 0..2 {
        let news = newcomers(&sources, &rules, &found, &only(100));
        found.take_in(news);
    }
    assert_eq!(names(&found), [(100, "plc"), (200, "vm-200")]);
    let told: Vec<&str> = found.problems.iter().map(Problem::word).filter(|word| word.contains("name")).collect();
    assert_eq!(told.len(), 1, "{:?}", found.problems);
}
