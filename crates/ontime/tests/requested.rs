//! Reservations that programs request over the socket: the real daemon, real users, real QEMU guests (software
//! emulation), and real cgroups where this host has cgroup v2.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test ends by panicking")]

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use rustix::process::Signal;
use serde_json::{Value, json};
use support::{Daemon, Guest, Site, name, policy, possible, until};

const FIFO: i32 = libc::SCHED_FIFO;
const JSON: &str = "content-type: application/json";

fn url(name: &str) -> String {
    format!("http://o/v1/reservations/{name}")
}

/// Sends PUT for a reservation of this name. Returns status and answer.
fn put(site: &Site, name: &str, request: &Value) -> (u16, Value) {
    let (status, body) = site.curl(&["-X", "PUT", "-H", JSON, "-d", &request.to_string(), &url(name)]);
    (status, serde_json::from_str(&body).unwrap_or_else(|error| panic!("{name}: {error}: {body}")))
}

fn delete(site: &Site, name: &str) -> u16 {
    site.curl(&["-X", "DELETE", &url(name)]).0
}

fn all(site: &Site) -> Value {
    serde_json::from_str(&site.curl(&["http://o/v1/reservations"]).1).unwrap()
}

fn requested(site: &Site, name: &str) -> Option<Value> {
    all(site)["requested"].as_array().unwrap().iter().find(|one| one["name"] == name).cloned()
}

/// A request of so much of a CPU, in thousandths, for a VM.
fn for_vm(vm: &str, thousandths: u64) -> Value {
    json!({"for": {"vm": vm}, "budget_us": thousandths * 20, "period_us": 20_000, "lease_seconds": 3600})
}

fn with(mut request: Value, field: &str, value: Value) -> Value {
    request[field] = value;
    request
}

#[test]
fn a_requested_reservation_holds_its_bandwidth_and_its_vm_gets_it() {
    if !possible() {
        return;
    }
    let site = Site::new();
    let vm = name("cell");
    let _daemon = Daemon::start(&site);
    let free = all(&site);
    let cpus = free["cpus"].as_array().unwrap().len() as u64;
    assert!(cpus > 0 && free["off"].is_null(), "{free}");
    let per_cpu = free["capacity"]["unpinned_micro_cpus_per_cpu"].as_u64().unwrap();
    assert_eq!((per_cpu, &free["capacity"]["other_micro_cpus"]), (949_996, &json!(0)));
    let watcher = free["capacity"]["watcher_micro_cpus"].as_u64().unwrap();
    assert_eq!(watcher, 100_000, "a tenth of a CPU");

    let (status, held) = put(&site, "one", &with(for_vm(&vm, 200), "owner", json!("test")));
    assert_eq!((status, &held["state"], &held["held"]), (201, &json!("waiting"), &json!(true)), "{held}");
    assert_eq!((&held["micro_cpus"], &held["uid"], &held["owner"]), (&json!(200_000), &json!(0), &json!("test")));
    // The rest to the millionth, as periods of 1 s: on each CPU as much as one vCPU may have, and what is left of that.
    let largest = free["capacity"]["largest_micro_cpus"].as_u64().unwrap();
    let mut left = cpus * per_cpu - watcher - 200_000;
    let mut count = 0;
    let micros =
        |micros: u64| json!({"for": {"vm": "x"}, "budget_us": micros, "period_us": 1_000_000, "lease_seconds": 3600});
    while left > 0 {
        let part = left.min(largest);
        let (status, answer) = put(&site, &format!("fill-{count}"), &micros(part));
        assert_eq!(status, 201, "{part} of {left}: {answer}");
        (left, count) = (left - part, count + 1);
    }
    let (status, refused) = put(&site, "more", &micros(1));
    assert_eq!(status, 409, "{refused}");
    assert!(refused["error"].as_str().unwrap().contains("CPUs"), "{refused}");
    // A change that does not fit leaves what was.
    let (status, refused) = put(&site, "one", &for_vm(&vm, 201));
    assert_eq!((status, &requested(&site, "one").unwrap()["micro_cpus"]), (409, &json!(200_000)), "{refused}");
    assert!(requested(&site, "more").is_none());
    assert_eq!(put(&site, "one", &with(for_vm(&vm, 200), "owner", json!("test"))).0, 200, "a renewal");

    // The VM starts, and has what was held for it.
    let guest = Guest::spinning(&vm);
    guest.vcpu();
    site.poke();
    until("its vCPU is paced", || {
        let all = all(&site);
        let vcpu = all["vcpus"].as_array().unwrap().iter().find(|vcpu| vcpu["vm"] == *vm)?;
        assert_eq!((&vcpu["budget_us"], &vcpu["class"]), (&json!(4000.0), &json!("rt0")));
        (vcpu["overruns"].as_u64() > Some(0)).then_some(())
    });
    let bound = requested(&site, "one").unwrap();
    assert_eq!((&bound["state"], &bound["tenants"]), (&json!("bound"), &json!([vm])), "{bound}");
    let shown = String::from_utf8(site.run(&["top", "--once", "--interval", "0.1"]).stdout).unwrap();
    let line = format!("requested: one (test, user 0) for VM {vm}: 1 x 4 / 20 ms, rt0, bound, ");
    assert!(shown.contains(&line), "{shown}\n{line}");
    let shown = String::from_utf8(site.run(&["status"]).stdout).unwrap();
    assert!(shown.contains(&format!("reserved   {} reservations requested", count + 1)), "{shown}");
    let shown = String::from_utf8(site.run(&["ps"]).stdout).unwrap();
    assert!(shown.lines().any(|line| line.contains(&vm) && line.contains("reservation one")), "{shown}");

    // The VM ends: its bandwidth is still held. It is free once the reservation is deleted.
    drop(guest);
    until("nobody has it", || (requested(&site, "one").unwrap()["state"] == "waiting").then_some(()));
    assert_eq!(put(&site, "more", &micros(1)).0, 409);
    assert_eq!((delete(&site, "one"), delete(&site, "one")), (204, 204));
    assert_eq!(put(&site, "more", &micros(1)).0, 201);
}

/// 10 us in 500 us are 2 % of a CPU, and pacing them takes longer than half of the reserve.
#[test]
fn a_vm_for_which_pacers_lack_time_is_capped_at_what_is_reserved() {
    if !possible() {
        return;
    }
    let site = Site::new();
    let vm = name("short");
    let guest = Guest::spinning(&vm);
    let _daemon = Daemon::start(&site);
    let short = json!({"for": {"vm": vm}, "budget_us": 10, "period_us": 500, "lease_seconds": 3600});
    let (status, held) = put(&site, "short", &short);
    assert_eq!((status, &held["held"]), (201, &json!(true)), "{held}");
    site.poke();
    let idle = (libc::SCHED_IDLE, 0);
    until("it is at the place of a VM with a cap", || [(FIFO, 46), idle].contains(&guest.policy()).then_some(()));
    until("it is paused", || (guest.policy() == idle).then_some(()));
    let all = all(&site);
    assert_eq!((&all["vcpus"], &all["reserved"]), (&json!([]), &json!(0.02)), "{all}");
    let why = requested(&site, "short").unwrap()["why"].as_str().unwrap().to_owned();
    assert!(why.contains("half of the reserve") && why.contains("capped at budget over period"), "{why}");
    let shown = String::from_utf8(site.run(&["top", "--once", "--interval", "0.1"]).stdout).unwrap();
    assert!(shown.contains("half of the reserve"), "{shown}");
}

#[test]
fn a_lease_that_nobody_renews_ends_and_a_killed_daemon_keeps_the_others() {
    if !possible() {
        return;
    }
    let site = Site::new();
    let mut daemon = Daemon::start(&site);
    let short = with(for_vm("short", 100), "lease_seconds", json!(20));
    assert_eq!(put(&site, "short", &short).0, 201);
    assert_eq!(put(&site, "long", &with(for_vm("long", 100), "count", json!(2))).0, 201);
    assert_eq!(put(&site, "class", &json!({"for": {"vm": "c"}, "level": 3, "lease_seconds": 3600})).0, 201);
    daemon.kill();
    let daemon = Daemon::start(&site);
    let both = all(&site);
    let names: Vec<&str> =
        both["requested"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["class", "long", "short"], "{both}");
    assert!((both["reserved"].as_f64().unwrap() - 0.3).abs() < 1e-9, "{both}");
    until("the lease has ended", || requested(&site, "short").is_none().then_some(()));
    until("the bandwidth is free", || ((all(&site)["reserved"].as_f64()? - 0.2).abs() < 1e-9).then_some(()));
    assert!(daemon.log().contains("reservation short of user 0 has ended"), "{}", daemon.log());
    // Another configuration leaves them.
    site.configure("sched.toml", "reserve = 0.1\n");
    daemon.signal(Signal::HUP);
    until("the reserve is another", || (all(&site)["reserve"] == 0.1).then_some(()));
    assert_eq!(requested(&site, "long").unwrap()["held"], true);
    // A damaged file is told, and stops nothing.
    drop(daemon);
    fs::write(site.path("run/requested"), "{\"boot_id\": ").unwrap();
    let mut daemon = Daemon::start(&site);
    let status = String::from_utf8(site.run(&["status"]).stdout).unwrap();
    assert!(status.contains("problem: reservations: ") && status.contains("must request them again"), "{status}");
    assert_eq!(put(&site, "long", &for_vm("long", 100)).0, 201);
    assert!(!String::from_utf8(site.run(&["status"]).stdout).unwrap().contains("must request them again"));
    assert!(daemon.stop().success());
}

#[test]
fn a_listed_user_reserves_for_itself_alone_and_others_not_at_all() {
    if !possible() {
        return;
    }
    let site = Site::new();
    site.configure(
        "daemon.toml",
        "[reservations]\nusers = [65533]\nfor = [\"vm:x\"]\nper-user = 2\ncpus-per-user = 0.5\n",
    );
    let _daemon = Daemon::start(&site);
    let socket = site.path("run/ontime.sock");
    for (path, mode) in [(site.path("."), 0o755), (site.path("run"), 0o755), (socket.clone(), 0o666)] {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let by = |uid: u32, verb: &str, name: &str, thousandths: u64| {
        let mut command = Command::new("curl");
        command.args(["-sS", "-w", "\n%{http_code}", "--unix-socket"]).arg(&socket).args(["-X", verb, "-H", JSON]);
        command.args(["-d", &for_vm("x", thousandths).to_string(), &url(name)]);
        let said = String::from_utf8(command.uid(uid).gid(uid).output().unwrap().stdout).unwrap();
        let (body, status) = said.rsplit_once('\n').unwrap();
        (status.parse::<u16>().unwrap(), body.to_owned())
    };
    assert_eq!(put(&site, "roots", &for_vm("x", 10)).0, 201);
    for (uid, verb, name, thousandths, status, word) in [
        (65534, "PUT", "a", 10, 403, "reservations.users"),
        (65534, "DELETE", "roots", 10, 403, "reservations.users"),
        (65533, "PUT", "roots", 10, 403, "another user"),
        (65533, "DELETE", "roots", 10, 403, "another user"),
        (65533, "PUT", "a", 501, 429, "cpus-per-user"),
        (65533, "PUT", "a", 300, 201, "\"uid\":65533"),
        (65533, "PUT", "b", 201, 429, "cpus-per-user"),
        (65533, "PUT", "b", 200, 201, ""),
        (65533, "PUT", "c", 1, 429, "per-user"),
        (65533, "PUT", "a", 300, 200, ""),
        (65533, "DELETE", "b", 1, 204, ""),
        (65534, "PUT", "a", 300, 403, "reservations.users"),
        (0, "DELETE", "a", 1, 204, ""),
    ] {
        let (got, body) = by(uid, verb, name, thousandths);
        assert!(got == status && body.contains(word), "{uid} {verb} {name}: {got} {body}");
    }
    // What else changes the host is still root's.
    let mut command = Command::new("curl");
    command.args(["-sS", "-o", "/dev/null", "-w", "%{http_code}", "--unix-socket"]).arg(&socket);
    command.args(["-X", "POST", "http://o/v1/reset"]).uid(65533).gid(65533);
    assert_eq!(command.output().unwrap().stdout, b"403");
}

#[test]
fn what_cannot_be_reserved_is_refused_with_its_reason() {
    if !possible() {
        return;
    }
    let site = Site::new();
    let vm = name("pinned");
    let guest = Guest::stopped(&vm);
    guest.vcpu();
    let daemon = Daemon::start(&site);
    let (good, long) = (for_vm(&vm, 100), "a".repeat(129));
    for (name, request, status, word) in [
        ("-a", good.clone(), 400, "name of a reservation"),
        ("a%2Fb", good.clone(), 400, "name of a reservation"),
        ("%ff", good.clone(), 400, ""),
        (long.as_str(), good.clone(), 400, "name of a reservation"),
        ("a", json!({}), 400, "for"),
        ("a", json!([]), 400, ""),
        ("a", with(good.clone(), "budget_us", json!(0)), 400, "budget_us 0"),
        ("a", with(good.clone(), "period_us", json!(0)), 400, "period_us 0"),
        ("a", with(good.clone(), "budget_us", json!(1e300)), 400, ""),
        ("a", with(good.clone(), "class", json!("rt")), 400, "class"),
        ("a", with(good.clone(), "owner", json!("x".repeat(20_000))), 400, ""),
        ("a", with(good.clone(), "budget_us", json!(20_000)), 409, "beside the reserve"),
        ("a", with(good.clone(), "cpus", json!([4_000_000_000_u32])), 409, "CPU 4000000000 is offline"),
    ] {
        let (got, answer) = put(&site, name, &request);
        let said = answer["error"].as_str().unwrap();
        assert!(got == status && said.contains(word), "{name} {request}: {got} {said}");
    }
    assert_eq!(all(&site)["requested"], json!([]));
    // A VM whose vCPU is not pinned as its reservation says does not lose what is held.
    let cpu = all(&site)["cpus"][0].clone();
    let (status, answer) = put(&site, "a", &with(good.clone(), "cpus", json!([cpu])));
    assert_eq!((status, &answer["held"]), (201, &json!(true)), "{answer}");
    if all(&site)["cpus"].as_array().unwrap().len() > 1 {
        assert!(answer["why"].as_str().unwrap().contains("pin it there"), "{answer}");
        let pinned = Command::new("taskset").args(["-cp", &cpu.to_string(), &guest.vcpu().to_string()]).output();
        assert!(pinned.unwrap().status.success());
        site.poke();
        until("the vCPU has it", || (requested(&site, "a").unwrap()["state"] == "bound").then_some(()));
    }
    // After a reset, and in mode observe, nothing is reserved.
    let refused = |word: &str| {
        let (status, answer) = put(&site, "b", &good);
        assert!(status == 409 && answer["error"].as_str().unwrap().contains(word), "{answer}");
        let (held, all) = (requested(&site, "a").unwrap(), all(&site));
        assert!(held["held"] == false && held["state"] == "refused", "{held}");
        assert!(all["off"].as_str().unwrap().contains(word), "{all}");
        assert_eq!(put(&site, "a", &with(good.clone(), "cpus", json!([cpu]))).0, 200, "a renewal");
    };
    assert!(site.run(&["reset"]).status.success());
    refused("`ontime reset` was called");
    site.configure("daemon.toml", "mode = \"observe\"\n");
    daemon.signal(Signal::HUP);
    until("it observes", || (site.json(&["status", "--json"])["state"] == "observing").then_some(()));
    refused("mode observe");
    site.configure("daemon.toml", "");
    assert!(matches!(site.run(&["reload"]).status.code(), Some(0..=2)));
    assert!(matches!(site.run(&["apply", "--method", "partitioned"]).status.code(), Some(0..=2)));
    until("it is held again", || (requested(&site, "a").unwrap()["held"] == true).then_some(()));
    assert_eq!(put(&site, "b", &good).0, 201);
}

/// The cgroup v2 mount, if cgroups can be made there.
fn cgroups() -> Option<PathBuf> {
    let mounts = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(PathBuf::from);
    let mount = mounts.into_iter().find(|mount| mount.join("cgroup.controllers").exists())?;
    let probe = mount.join(format!("ontime-probe-{}", std::process::id()));
    fs::create_dir(&probe).and_then(|()| fs::remove_dir(&probe)).ok().map(|()| mount)
}

/// A pod's cgroup with containers, as the kubelet makes it with the cgroupfs driver.
struct Pod {
    number: u32,
    uid: String,
    directory: PathBuf,
    processes: Vec<Child>,
}

impl Pod {
    fn new(mount: &Path, number: u32) -> Self {
        let uid = format!("{:08x}-0d52-4c1b-9e0a-{number:012x}", std::process::id());
        let directory = mount.join(format!("kubepods/burstable/pod{uid}"));
        fs::create_dir_all(&directory).unwrap();
        Self { number, uid, directory, processes: Vec::new() }
    }

    /// Puts a process into the container of this number.
    fn takes(&self, container: u32, pid: i32) {
        let (test, number) = (std::process::id(), self.number * 16 + container);
        let container = self.directory.join(format!("{test:08x}{number:04x}{:052x}", 0));
        fs::create_dir_all(&container).unwrap();
        fs::write(container.join("cgroup.procs"), pid.to_string()).unwrap();
    }

    /// Starts a process in the container of this number.
    fn runs(&mut self, container: u32) -> i32 {
        let process = Command::new("sleep").arg("600").spawn().unwrap();
        let pid = process.id() as i32;
        self.processes.push(process);
        self.takes(container, pid);
        pid
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
        for container in fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            let _ = fs::remove_dir(container.path());
        }
        for directory in self.directory.ancestors().take(3) {
            let _ = fs::remove_dir(directory);
        }
    }
}

#[test]
fn a_pod_has_the_class_of_its_reservation_and_its_vm_alone_where_it_has_one() {
    if !possible() {
        return;
    }
    let Some(mount) = cgroups() else {
        println!("SKIPPED: this test needs cgroup v2 in which it may make cgroups");
        return;
    };
    let site = Site::new();
    let (mut pod, mut launcher) = (Pod::new(&mount, 1), Pod::new(&mount, 2));
    let vm = name("launched");
    let guest = Guest::stopped(&vm);
    guest.vcpu();
    launcher.takes(1, guest.pid());
    let (main, beside, sidecar) = (pod.runs(1), launcher.runs(1), launcher.runs(2));
    let of = |pid: i32| policy(format!("/proc/{pid}/stat"));
    let _daemon = Daemon::start(&site);
    let class = |pod: &Pod, level: u64| {
        let (status, answer) =
            put(&site, &pod.uid, &json!({"for": {"pod": pod.uid}, "level": level, "lease_seconds": 3600}));
        assert_eq!((status, &answer["micro_cpus"], &answer["count"]), (201, &json!(0), &json!(0)), "{answer}");
        assert_eq!(answer["state"], "bound", "{answer}");
    };
    assert_eq!((of(main), guest.policy()), ((0, 0), (0, 0)));
    class(&pod, 1);
    until("the container has the place of level 1", || (of(main) == (FIFO, 42)).then_some(()));
    assert_eq!(guest.policy(), (0, 0), "another pod's");
    // As for libvirt's VMs: the vCPU, and the monitor's main thread. Neither its helpers nor other containers.
    class(&launcher, 0);
    until("the vCPU has its place", || (guest.policy() == (FIFO, 47)).then_some(()));
    until("the main thread has its place", || (of(guest.pid()) == (FIFO, 3)).then_some(()));
    assert_eq!((of(beside), of(sidecar)), ((0, 0), (0, 0)));
    // With CPU time: the VM's vCPU has it.
    let with_time =
        json!({"for": {"pod": launcher.uid}, "budget_us": 4000, "period_us": 20_000, "lease_seconds": 3600});
    let (status, answer) = put(&site, &launcher.uid, &with_time);
    assert_eq!((status, &answer["tenants"]), (200, &json!([vm])), "{answer}");
    until("its vCPU is paced", || {
        all(&site)["vcpus"].as_array().unwrap().iter().any(|vcpu| vcpu["vm"] == *vm).then_some(())
    });
    // And given back.
    assert_eq!((delete(&site, &launcher.uid), delete(&site, &pod.uid)), (204, 204));
    until("all are as they were", || ([of(main), guest.policy(), of(guest.pid())] == [(0, 0); 3]).then_some(()));
}
