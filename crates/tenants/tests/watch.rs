//! The watcher with real processes.
#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing)]

mod common;

use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ontime_tenants::watch::{Change, SPACING};
use ontime_tenants::{Rules, Sources, ThreadRole, Watcher, discover};

/// Timeout on a busy machine. It is shorter than the interval of rescans, so that no rescan stands for an event.
const PATIENCE: Duration = Duration::from_secs(50);
const LONG: Option<Duration> = Some(PATIENCE);

/// Sources with the test's own libvirt directory, so that nothing else on the machine interferes.
fn sources(host: &common::Host) -> Sources {
    Sources { libvirt: host.path("run/libvirt/qemu"), ..Sources::host() }
}

fn watcher(sources: &Sources) -> Option<Watcher> {
    let watcher = Watcher::new(sources).unwrap();
    if let Some(why) = watcher.rescan_reasons().next() {
        println!("SKIPPED: {why}");
        return None;
    }
    Some(watcher)
}

fn qemu(name: &str, more: &[&str]) -> Option<Child> {
    if !common::has("qemu-system-x86_64") {
        println!("SKIPPED: qemu-system-x86_64 is not installed");
        return None;
    }
    let named = format!("guest={name},debug-threads=on");
    let fixed = ["-S", "-nodefaults", "-display", "none", "-accel", "tcg", "-m", "32", "-name", &named];
    let child =
        Command::new("qemu-system-x86_64").args(fixed).args(more).stdin(Stdio::null()).stderr(Stdio::null()).spawn();
    Some(child.unwrap())
}

/// Follows changes as the daemon does until discovery finds the awaited state. False: timeout.
fn until(watcher: &mut Watcher, sources: &Sources, name: &str, awaited: impl Fn(Option<usize>) -> bool) -> bool {
    let (deadline, rules) = (Instant::now() + PATIENCE, Rules::default());
    while Instant::now() < deadline {
        let found = discover(sources, &rules);
        watcher.follow(&found, &rules).unwrap();
        let vcpus =
            found.tenants.iter().find(|tenant| tenant.name == name).map(|tenant| {
                tenant.threads.iter().filter(|thread| matches!(thread.role, ThreadRole::Vcpu(_))).count()
            });
        if awaited(vcpus) {
            return true;
        }
        // A VM of this or another test may have changed between discovery and `follow`, which then has it looked at
        // again soon. A watcher without events looks every 5 s.
        let start = Instant::now();
        let told = watcher.wait(LONG).unwrap();
        let by_itself = told == Some(Change::Rescan) && start.elapsed() > SPACING * 15;
        assert!(!by_itself, "found by looking, not by an event");
    }
    false
}

#[test]
fn a_vm_that_starts_and_ends_is_told_without_looking() {
    let host = common::Host::new();
    let sources = sources(&host);
    let Some(mut watcher) = watcher(&sources) else { return };
    let name = format!("watched-{}", std::process::id());
    let Some(mut vm) = qemu(&name, &["-smp", "2"]) else { return };
    assert!(until(&mut watcher, &sources, &name, |vcpus| vcpus == Some(2)), "start");
    vm.kill().unwrap();
    vm.wait().unwrap();
    assert!(until(&mut watcher, &sources, &name, |vcpus| vcpus.is_none()), "end");
}

/// Threads of QEMU's worker pool: as many as there are concurrent reads; each ends 10 s after its last read.
#[test]
fn threads_that_read_a_vms_disk_tell_nothing() {
    let host = common::Host::new();
    let sources = sources(&host);
    let Some(mut watcher) = watcher(&sources) else { return };
    let name = format!("reading-{}", std::process::id());
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(1 << 20).unwrap();
    let drive = format!("if=none,id=d,format=raw,file={}", image.path().display());
    if !common::has("qemu-system-x86_64") {
        return println!("SKIPPED: qemu-system-x86_64 is not installed");
    }
    let named = format!("guest={name},debug-threads=on");
    let fixed =
        ["-S", "-nodefaults", "-display", "none", "-accel", "tcg", "-m", "32", "-monitor", "stdio", "-name", &named];
    let mut command = Command::new("qemu-system-x86_64");
    let mut vm =
        command.args(fixed).args(["-drive", &drive]).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    assert!(until(&mut watcher, &sources, &name, |vcpus| vcpus == Some(1)), "start");
    let pid = vm.id();
    let workers = || {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
        let comm = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        tasks.map(comm).filter(|comm| comm.trim() == "worker").count()
    };
    let mut monitor = vm.stdin.take().unwrap();
    // Other processes on this machine may cause an event in between; then more threads are made to read.
    let undisturbed = (1..=8).any(|turn| {
        let rules = Rules::default();
        while watcher.wait(Some(SPACING * 3)).unwrap().is_some() {}
        watcher.follow(&discover(&sources, &rules), &rules).unwrap();
        let before = workers();
        for read in 0..turn * 4 {
            writeln!(monitor, "qemu-io d \"aio_read {}k 4k\"", read * 4).unwrap();
        }
        let seen = watcher.wait(Some(SPACING * 3)).unwrap();
        println!("{before} workers, then {}: {seen:?}", workers());
        workers() > before && seen.is_none()
    });
    vm.kill().unwrap();
    vm.wait().unwrap();
    assert!(undisturbed);
}

#[test]
fn a_vm_that_ended_before_it_was_followed_is_looked_at_again_soon() {
    let host = common::Host::new();
    let sources = sources(&host);
    let Some(mut watcher) = watcher(&sources) else { return };
    let Some(mut vm) = qemu(&format!("unfollowed-{}", std::process::id()), &[]) else { return };
    // Until the VM is found and its start was notified.
    let of_vm = |tenant: &ontime_tenants::Tenant| u32::try_from(tenant.process.pid) == Ok(vm.id());
    let deadline = Instant::now() + PATIENCE;
    let rules = Rules::default();
    let found = loop {
        assert!(Instant::now() < deadline, "it is not found");
        let told = watcher.wait(Some(SPACING * 3)).unwrap().is_some();
        let found = discover(&sources, &rules);
        if !told && found.tenants.iter().any(of_vm) {
            break found;
        }
    };
    vm.kill().unwrap();
    vm.wait().unwrap();
    watcher.follow(&found, &rules).unwrap();
    assert!(watcher.wait(Some(SPACING * 50)).unwrap().is_some());
}

#[test]
fn libvirts_files_are_noticed_also_when_the_directory_comes_later() {
    let host = common::Host::new();
    std::fs::remove_dir_all(host.path("run/libvirt")).unwrap();
    let sources = sources(&host);
    let mut watcher = Watcher::new(&sources).unwrap();
    std::fs::create_dir_all(host.path("run/libvirt/qemu")).unwrap();
    assert!(matches!(watcher.wait(LONG).unwrap(), Some(Change::Seen | Change::Lost)));
    std::thread::sleep(SPACING);
    while watcher.wait(Some(SPACING)).unwrap().is_some() {}
    std::fs::write(host.path("run/libvirt/qemu/a.xml.new"), "x").unwrap();
    std::fs::rename(host.path("run/libvirt/qemu/a.xml.new"), host.path("run/libvirt/qemu/a.xml")).unwrap();
    assert_eq!(watcher.wait(LONG).unwrap(), Some(Change::Seen));
    std::fs::write(host.path("run/libvirt/qemu/autostart.log"), "x").unwrap();
}

#[test]
fn a_storm_of_other_processes_tells_nothing_and_costs_little() {
    let host = common::Host::new();
    let sources = sources(&host);
    let Some(mut watcher) = watcher(&sources) else { return };
    let rules = Rules::default();
    watcher.follow(&discover(&sources, &rules), &rules).unwrap();
    let storm = std::thread::spawn(|| {
        for _ in 0..300 {
            Command::new("true").status().unwrap();
        }
    });
    let (mut looks, start) = (0u32, Instant::now());
    while !storm.is_finished() {
        // Other tests' VMs may cause notifications; the many started programs may not.
        watcher.wait(Some(Duration::from_millis(100))).unwrap();
        looks += 1;
    }
    storm.join().unwrap();
    let most = start.elapsed().as_millis() / 100 + start.elapsed().as_millis() / SPACING.as_millis() + 2;
    assert!(u128::from(looks) <= most, "{looks} of {most}");
}

#[test]
fn changes_in_quick_succession_are_told_together() {
    let host = common::Host::new();
    let sources = sources(&host);
    let mut watcher = Watcher::new(&sources).unwrap();
    let (mut told, start) = (0u32, Instant::now());
    while told < 4 {
        std::fs::write(host.path("run/libvirt/qemu/a.xml"), "x").unwrap();
        told += u32::from(watcher.wait(Some(Duration::from_millis(1))).unwrap().is_some());
    }
    assert!(start.elapsed() >= SPACING * 3, "told 4 times in {:?}", start.elapsed());
}

#[test]
fn a_vm_whose_vcpus_could_not_be_told_is_looked_at_again_soon() {
    let host = common::Host::new();
    host.process(100, "/usr/bin/qemu-system-x86_64", "/", 0, &["qemu", "-name", "plain"]);
    for tid in 101..104 {
        host.thread(100, tid, "qemu-system-x86", 0);
    }
    let text = ontime_tenants::config::Text::new("f", "[[tenant]]\nname = \"plain\"\nclass = \"rt\"\n");
    let rules = Rules::parse(&[text]).unwrap();
    let found = discover(&host.sources(), &rules);
    assert_eq!(found.problems.len(), 1, "{:?}", found.problems);
    // Other processes on this machine may cause an event in between; then repeat.
    let undisturbed = (0..10).find_map(|_| {
        let mut watcher = Watcher::new(&host.sources()).unwrap();
        let mut next = || {
            // Before the watcher's own clock starts: the test may lose its CPU in between.
            let start = Instant::now();
            watcher.follow(&found, &rules).unwrap();
            (watcher.wait(LONG).unwrap() == Some(Change::Rescan)).then(|| start.elapsed().as_millis())
        };
        Some((next()?, next()?))
    });
    let (first, second) = undisturbed.unwrap();
    assert!(first >= 900 && second >= 1900, "{first} ms, {second} ms");
}

#[test]
fn an_idle_watcher_sleeps() {
    let host = common::Host::new();
    let sources = sources(&host);
    let mut watcher = Watcher::new(&sources).unwrap();
    let own = || {
        let pid = i32::try_from(std::process::id()).unwrap();
        let tid = rustix::thread::gettid().as_raw_nonzero().get();
        ontime_tenants::ThreadId::of(pid, tid).unwrap().cpu_time().unwrap()
    };
    // Other tests start processes meanwhile: use the minimum of three seconds.
    let spent = (0..3).map(|_| {
        let before = own();
        let _ = watcher.wait(Some(Duration::from_secs(1))).unwrap();
        own() - before
    });
    let least = spent.min().unwrap();
    // A watcher that spins takes the whole second, or its share of a busy CPU.
    assert!(least < 100_000_000, "{least} ns in a second");
}
