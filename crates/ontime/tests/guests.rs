//! Requests of a guest's deadline tasks at the daemon: the real program, a real QEMU guest, and the test in place of
//! the device process.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test ends by panicking")]

mod support;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use ontime_sched::Ledger;
use ontime_sched::ledger::{Budget, NOTHING};
use ontime_sockets::abi::{Errno, ONTIME_CTL_INC_BW, ontime_bw};
use ontime_sockets::deadlines::{DeadlinePage, Deadlines};
use serde_json::Value;
use support::{Daemon, Guest, Site, a_cpu, name, possible, until};

/// The device process's end of `deadlines.sock`.
struct Device {
    listener: UnixListener,
    daemon: Option<BufReader<UnixStream>>,
    seq: u64,
}

impl Device {
    fn of(site: &Site, vm: &str) -> Self {
        let path = ontime_sockets::Paths::new(&site.path("run"), vm).deadlines();
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        Self { listener, daemon: None, seq: 0 }
    }

    /// Waits for the daemon's connection.
    fn connected(&mut self, site: &Site) {
        let stream = until("the daemon connects", || {
            site.poke();
            self.listener.accept().ok()
        });
        stream.0.set_nonblocking(false).unwrap();
        stream.0.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        self.daemon = Some(BufReader::new(stream.0));
    }

    /// Requests this bandwidth for vCPU 0, us. Returns why the daemon refuses it.
    fn asks(&mut self, budget_us: u64, period_us: u64) -> Option<String> {
        self.seq += 1;
        let need = format!("{{\"vcpu\":0,\"budget\":{},\"period\":{}}}", budget_us * 1_000, period_us * 1_000);
        let vcpus = if budget_us == 0 { String::new() } else { need };
        let daemon = self.daemon.as_mut().unwrap();
        daemon.get_mut().write_all(format!("{{\"seq\":{},\"vcpus\":[{vcpus}]}}\n", self.seq).as_bytes()).unwrap();
        let mut line = String::new();
        daemon.read_line(&mut line).unwrap();
        let answer: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(answer["seq"], self.seq, "{line}");
        answer["refused"].as_str().map(str::to_owned)
    }
}

/// A rule that gives the VM class rt.
fn class(vm: &str) -> String {
    format!("[[tenant]]\nname = \"{vm}\"\nclass = \"rt\"\n")
}

/// A VM whose guest may request half of a CPU, in addition to the declared 2 ms in 20 ms.
fn configure(site: &Site, vm: &str) {
    site.configure("tenants.toml", &class(vm));
    let reservation =
        format!("[[reservation]]\nname = \"{vm}\"\nbudget = \"2ms\"\nperiod = \"20ms\"\ndeadlines = 0.5\n");
    site.configure("sched.toml", &reservation);
}

fn vcpu(site: &Site, vm: &str) -> Option<Value> {
    let top = site.json(&["top", "--once", "--json", "--interval", "0.1"]);
    top["reservations"]["vcpus"].as_array().unwrap().iter().find(|vcpu| vcpu["vm"] == *vm).cloned()
}

/// Like the next test, but with the back end that sets a thread's policy once and does not move the thread.
#[test]
fn so_it_is_where_nobody_is_moved() {
    let Some(site) = Site::if_possible() else { return };
    let vm = name("unplaced");
    configure(&site, &vm);
    let sched = std::fs::read_to_string(site.path("etc/sched.toml")).unwrap();
    site.configure("sched.toml", &format!("backend = \"deadline\"\n{sched}"));
    let _daemon = Daemon::start(&site);
    std::fs::create_dir(site.path("state/originals.new")).unwrap();
    let guest = Guest::stopped(&vm);
    guest.vcpu();
    let mut device = Device::of(&site, &vm);
    device.connected(&site);
    let why = device.asks(2_000, 20_000).expect("its vCPU is not placed");
    assert!(why.contains("could not be kept"), "{why}");
    std::fs::remove_dir(site.path("state/originals.new")).unwrap();
}

#[test]
fn a_guest_is_refused_while_its_vms_originals_cannot_be_kept() {
    let Some(site) = Site::if_possible() else { return };
    let vm = name("unkept");
    configure(&site, &vm);
    let daemon = Daemon::start(&site);
    // Has the effect of a full disk: the file that replaces the journal cannot be written.
    let obstacle = site.path("state/originals.new");
    std::fs::create_dir(&obstacle).unwrap();
    let guest = Guest::stopped(&vm);
    guest.vcpu();
    let mut device = Device::of(&site, &vm);
    device.connected(&site);
    let why = device.asks(2_000, 20_000).expect("nothing of this VM is reserved");
    assert!(why.contains("could not be kept"), "{why}");
    assert!(vcpu(&site, &vm).is_none());
    let metrics = site.curl(&["http://o/metrics"]).1;
    assert!(!metrics.contains(&format!("ontime_deadlines_admitted_total{{domain=\"{vm}\"")), "{metrics}");
    assert!(
        metrics.contains(&format!("ontime_deadlines_refused_total{{domain=\"{vm}\",class=\"rt0\"}} 1")),
        "{metrics}"
    );
    // A refused request does not take effect later by itself.
    std::fs::remove_dir(&obstacle).unwrap();
    let seen = until("it has what is declared", || {
        site.poke();
        vcpu(&site, &vm)
    });
    assert!(seen["guest"].is_null(), "{seen}");
    assert_eq!(device.asks(2_000, 20_000), None);
    let seen = vcpu(&site, &vm).unwrap();
    assert_eq!(seen["guest"]["budget_us"].as_f64().unwrap().round(), 2_000.0, "{seen}");
    // More than half of a CPU.
    assert!(device.asks(15_000, 20_000).is_some());
    assert_eq!(device.asks(0, 0), None);
    assert!(vcpu(&site, &vm).unwrap()["guest"].is_null());
    drop(daemon);
}

#[test]
fn a_daemon_that_is_restarted_knows_who_held_what() {
    let Some(site) = Site::if_possible() else { return };
    let (first, second) = (name("first"), name("second"));
    site.configure("tenants.toml", &(class(&first) + &class(&second)));
    // One CPU: only one of the VMs fits, with the request of its guest.
    let cpu = a_cpu();
    let reserve = |vm: &str, budget: u64| {
        format!("[[reservation]]\nname = \"{vm}\"\nbudget = \"{budget}ms\"\nperiod = \"20ms\"\ndeadlines = 0.5\n")
    };
    let head = format!("cpus = \"{cpu}\"\n");
    site.configure("sched.toml", &(head.clone() + &reserve(&second, 8)));
    let one = Guest::stopped(&first);
    one.vcpu();
    std::thread::sleep(Duration::from_millis(50));
    let two = Guest::stopped(&second);
    two.vcpu();
    let mut daemon = Daemon::start(&site);
    let mut device = Device::of(&site, &second);
    device.connected(&site);
    until("the second has its reservation", || vcpu(&site, &second));
    assert_eq!(device.asks(6_000, 20_000), None);
    // The first VM was started earlier, but its reservation comes later: 8 of 20 ms, where 6 and the reserve are left.
    site.configure("sched.toml", &(head + &reserve(&first, 8) + &reserve(&second, 8)));
    daemon.signal(rustix::process::Signal::HUP);
    let refused = || {
        let top = site.json(&["top", "--once", "--json", "--interval", "0.1"]);
        let refused = top["reservations"]["refused"].as_array().unwrap().clone();
        refused.iter().any(|refused| refused["subject"] == *first).then_some(())
    };
    until("the first is refused", refused);
    daemon.kill();
    let _daemon = Daemon::start(&site);
    // The device process has sent nothing to the new daemon.
    until("the first is refused", refused);
    let seen = vcpu(&site, &second).expect("the second keeps its reservation");
    assert_eq!(seen["guest"]["budget_us"].as_f64().unwrap().round(), 6_000.0, "{seen}");
    device.connected(&site);
    assert_eq!(device.asks(7_000, 20_000), None);
    // The device process ends: its guest holds nothing.
    drop(device);
    until("what the guest held is free", || vcpu(&site, &second).filter(|seen| seen["guest"].is_null()));
}

/// The device process's code without its device: a guest that publishes its deadlines.
fn asking(site: &Site, vm: &str) -> (Arc<Deadlines>, Ledger) {
    let memory = rustix::fs::memfd_create("vm", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memory, 64 * ontime_sched::published::LINE as u64).unwrap();
    let ledger = Ledger::create().unwrap();
    let deadlines = Arc::new(Deadlines::new(Some(ledger.clone())));
    deadlines.publish(Some(DeadlinePage { file: memory.into(), offset: 0 })).unwrap();
    let listener = Device::of(site, vm).listener;
    listener.set_nonblocking(false).unwrap();
    let serving = Arc::clone(&deadlines);
    std::thread::spawn(move || serving.serve(&listener));
    (deadlines, ledger)
}

/// While the daemon is stopped, a guest may claim what it was offered, and no more. When the daemon runs again, it
/// counts what was claimed.
#[test]
fn what_is_free_is_taken_without_the_daemon_and_counts() {
    if !possible() {
        return;
    }
    if std::fs::read_to_string("/proc/swaps").unwrap().lines().count() > 1 {
        println!("SKIPPED: memory may be swapped out here, so nobody is offered anything");
        return;
    }
    let site = Site::new();
    let (one, other) = (name("taking"), name("waiting"));
    site.configure("tenants.toml", &(class(&one) + &class(&other)));
    let cpu = a_cpu();
    // Of 0.95 CPUs, each VM has 0.1: 0.375 are offered to each.
    let reserve =
        |vm: &str| format!("[[reservation]]\nname = \"{vm}\"\nbudget = \"2ms\"\nperiod = \"20ms\"\ndeadlines = 0.8\n");
    site.configure("sched.toml", &(format!("cpus = \"{cpu}\"\n") + &reserve(&one) + &reserve(&other)));
    let guests = [Guest::stopped(&one), Guest::stopped(&other)];
    guests.iter().for_each(|guest| _ = guest.vcpu());
    let ((taking, ledger), (waiting, _)) = (asking(&site, &one), asking(&site, &other));
    let mut daemon = Daemon::start(&site);
    let asks = |deadlines: &Deadlines, ms: u64| {
        let need = ontime_bw { vcpu: 0, reserved: 0, budget: ms * 1_000_000, period: 20_000_000 };
        deadlines.change(ONTIME_CTL_INC_BW, &[need])
    };
    let busy = Err(Errno(libc::EBUSY));
    let holds = |vm: &str, ms: f64| {
        vcpu(&site, vm).filter(|seen| seen["guest"]["budget_us"].as_f64().map(f64::round) == Some(ms * 1_000.0))
    };
    until("both have their reservations", || vcpu(&site, &one).and(vcpu(&site, &other)));
    until("the daemon answers", || (asks(&taking, 1) == Ok(()) && asks(&waiting, 1) == Ok(())).then_some(()));
    until("it knows", || holds(&one, 1.0).and(holds(&other, 1.0)));

    daemon.signal(rustix::process::Signal::STOP);
    assert_eq!(asks(&taking, 7), Ok(()), "it was offered");
    daemon.signal(rustix::process::Signal::CONT);
    // 0.2 are declared, 0.35 claimed without the daemon's knowledge, and 0.45 requested.
    assert_eq!(asks(&waiting, 9), busy);
    assert!(holds(&one, 7.0).is_some() && holds(&other, 1.0).is_some());
    assert_eq!(asks(&waiting, 7), Ok(()));
    assert!(holds(&one, 7.0).is_some() && holds(&other, 7.0).is_some());

    assert!(site.run(&["reset"]).status.success());
    assert_eq!(asks(&taking, 8), busy, "nothing is offered after a reset");
    // A device process that writes an offer for itself and claims it does not make the daemon reserve anything.
    let mut held = NOTHING;
    held[0] = Budget { budget: 7_000_000, period: 20_000_000 };
    ledger.offer(&held, &held);
    assert!(ledger.claim(&held).is_some() && vcpu(&site, &one).is_none());
    assert!(ledger.claim(&NOTHING).is_some() && vcpu(&site, &one).is_none());
    daemon.kill();
    assert_eq!(asks(&waiting, 8), busy, "nor without a daemon");
    let _daemon = Daemon::start(&site);
    until("the next one knows", || holds(&one, 7.0).and(holds(&other, 7.0)));
}

/// Measures the cost of a change of need: `cargo test --release -p ontime --test guests -- --ignored --nocapture cost`.
#[test]
#[ignore = "tells, checks nothing"]
fn what_a_change_costs() {
    if !possible() {
        return;
    }
    let (site, vm, changes) =
        (Site::new(), name("cost"), std::env::var("CHANGES").map_or(1_000, |count| count.parse().unwrap()));
    configure(&site, &vm);
    let guest = Guest::stopped(&vm);
    guest.vcpu();
    let daemon = Daemon::start(&site);
    let mut device = Device::of(&site, &vm);
    device.connected(&site);
    until("reserved", || vcpu(&site, &vm));
    let ran = || {
        let text = std::fs::read_to_string(format!("/proc/{0}/task/{0}/schedstat", daemon.pid())).unwrap();
        text.split(' ').next().unwrap().parse::<u64>().unwrap()
    };
    std::thread::sleep(Duration::from_secs(2));
    for (what, budgets) in [("nothing changes", [3_000, 3_000]), ("another need each time", [3_000, 4_000])] {
        let before = ran();
        for turn in 0..changes {
            assert_eq!(device.asks(budgets[turn % 2], 20_000), None);
        }
        println!("{what}: {} us of the daemon's main thread", (ran() - before) / changes as u64 / 1_000);
    }
}
