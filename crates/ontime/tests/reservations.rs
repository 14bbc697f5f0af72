//! Reserved CPU time as an administrator sees it: the real program, real QEMU guests (software emulation). How exactly
//! shares are kept is tested on the emulated host (lab/tests/src/cases/reservations.rs), because this machine has
//! other work.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test ends by panicking")]

mod support;

use rustix::process::Signal;
use serde_json::Value;
use support::{Daemon, Guest, Site, a_cpu, name, until};

const FIFO: i32 = libc::SCHED_FIFO;

fn rt(names: &[&str]) -> String {
    names.iter().map(|name| format!("[[tenant]]\nname = \"{name}\"\nclass = \"rt\"\n")).collect()
}

fn reserve(name: &str, budget: &str) -> String {
    format!("[[reservation]]\nname = \"{name}\"\nbudget = \"{budget}\"\nperiod = \"20ms\"\n")
}

fn top(site: &Site) -> Value {
    site.json(&["top", "--once", "--json", "--interval", "0.2"])
}

fn vcpu(site: &Site, name: &str) -> Option<Value> {
    let top = top(site);
    top["reservations"]["vcpus"].as_array().unwrap().iter().find(|vcpu| vcpu["vm"] == *name).cloned()
}

#[test]
fn a_reservation_is_kept_through_kill_9_and_given_back() {
    let Some(site) = Site::if_possible() else { return };
    let (name, other) = (name("kept"), name("other"));
    site.configure("tenants.toml", &rt(&[&name, &other]));
    site.configure("sched.toml", &reserve(&name, "4ms"));
    let guest = Guest::spinning(&name);
    let without = Guest::stopped(&other);
    assert_eq!((guest.policy(), without.policy()), ((0, 0), (0, 0)));
    let mut daemon = Daemon::start(&site);
    site.poke();
    // The guest never idles: in each slice it uses up its share, and is then moved to a lower place.
    let seen = until("shares are used up", || {
        vcpu(&site, &name)
            .filter(|vcpu| vcpu["overruns"].as_u64().unwrap() > 5 && vcpu["ran_seconds"].as_f64() > Some(0.0))
    });
    assert_eq!(seen["budget_us"].as_f64().unwrap().round(), 4000.0, "{seen}");
    assert_eq!(seen["refused"], 0, "{seen}");
    until("who has none stands behind the planned", || (without.policy() == (FIFO, 46)).then_some(()));
    assert!(site.protected(), "protections are on beside reservations");
    let status = String::from_utf8(site.run(&["status"]).stdout).unwrap();
    assert!(!status.contains("drifted  vcpu-place"), "{status}");
    let metrics = site.curl(&["http://o/metrics"]).1;
    assert!(metrics.contains(&format!("ontime_reserved_cpus{{domain=\"{name}\",class=\"rt0\"}} 0.2")), "{metrics}");
    assert!(metrics.contains("ontime_drift_total{rule=\"vcpu-place\"} 0\n"), "{metrics}");

    daemon.kill();
    until("the guardian gives the original", || (guest.policy() == (0, 0)).then_some(()));
    let mut daemon = Daemon::start(&site);
    until("the reservation is taken up again", || vcpu(&site, &name));
    until("and kept", || vcpu(&site, &name).filter(|vcpu| vcpu["overruns"].as_u64().unwrap() > 0));

    // After an orderly end, no vCPU is left at a pacer's place.
    assert!(daemon.stop().success());
    assert_eq!(guest.policy(), (0, 0));
    assert_eq!(without.policy(), (FIFO, 46), "other settings stay");
    let mut daemon = Daemon::start(&site);
    until("taken up once more", || vcpu(&site, &name));
    let reset = site.run(&["reset"]);
    assert!(reset.status.success(), "{reset:?}");
    assert_eq!((guest.policy(), without.policy()), ((0, 0), (0, 0)));
    assert!(vcpu(&site, &name).is_none());
    assert!(daemon.stop().success());
}

#[test]
fn what_would_be_reserved_is_shown_and_nothing_is_reserved() {
    let Some(site) = Site::if_possible() else { return };
    let (name, greedy) = (name("foreseen"), name("greedy"));
    site.configure("tenants.toml", &rt(&[&name, &greedy]));
    let reservations = [reserve(&name, "4ms"), reserve(&greedy, "19.9ms")].concat();
    site.configure("sched.toml", &format!("cpus = \"{}\"\n{reservations}", a_cpu()));
    let (guest, other) = (Guest::stopped(&name), Guest::stopped(&greedy));
    let thread = guest.vcpu().to_string();
    other.vcpu();
    let rows = |document: &Value, list: &str| -> Vec<Value> {
        let all = document[list].as_array().unwrap().iter();
        all.filter(|row| row["rule"] == "reservation").cloned().collect()
    };
    let planned = |dry: &Value| {
        let rows = rows(dry, "changes");
        let of = |vm: &str| rows.iter().find(|row| row["knob"].as_str().unwrap().contains(vm)).unwrap().clone();
        let (fits, refused) = (of(&name), of(&greedy));
        assert_eq!((&fits["outcome"], &refused["outcome"]), (&"would-change".into(), &"would-fail".into()), "{dry}");
        assert!(fits["to"].as_str().unwrap().starts_with("4 ms of each 20 ms"), "{fits}");
        assert!(fits["knob"].as_str().unwrap().contains(&thread), "{fits}");
    };
    let dry = || site.json(&["apply", "--dry-run", "--json"]);
    // A back end that is not built in keeps nothing.
    if !ontime_sched::ext::BUILT_IN {
        let file = site.path("etc/sched.toml");
        let paced = std::fs::read_to_string(&file).unwrap();
        site.configure("sched.toml", &format!("backend = \"sched_ext\"\n{paced}"));
        let refused = rows(&dry(), "changes");
        let is_refused = |row: &Value| row["why"].as_str().unwrap_or_default().contains("built without sched_ext");
        assert!(refused.len() == 2 && refused.iter().all(is_refused), "{refused:?}");
        site.configure("sched.toml", &paced);
    }
    // Without a daemon, and with one that observes.
    planned(&dry());
    site.configure("daemon.toml", "mode = \"observe\"\n");
    let mut daemon = Daemon::start(&site);
    site.poke();
    let shown = until("the VM is found", || vcpu(&site, &name));
    assert_eq!((&shown["place"], shown["budget_us"].as_f64()), (&Value::Null, Some(4000.0)), "{shown}");
    assert_eq!(top(&site)["reservations"]["foreseen"], true);
    planned(&dry());
    let status = site.json(&["status", "--json"]);
    let knobs = rows(&status, "knobs");
    assert!(knobs.len() == 1 && knobs[0]["state"] == "would-change", "{knobs:?}");
    assert!(status["problems"].to_string().contains("its reservation would not hold"), "{status}");
    let metrics = site.curl(&["http://o/metrics"]).1;
    assert!(!metrics.contains("ontime_reserved_cpus{"), "{metrics}");
    assert_eq!((guest.policy(), other.policy()), ((0, 0), (0, 0)));

    // What is reserved is no longer a change.
    site.configure("daemon.toml", "mode = \"enforce\"\n");
    assert!(matches!(site.run(&["reload"]).status.code(), Some(0..=2)));
    until("it is reserved", || (top(&site)["reservations"]["foreseen"] == false).then(|| vcpu(&site, &name)).flatten());
    assert!(rows(&dry(), "changes").iter().all(|row| row["outcome"] == "would-fail"), "{}", dry());
    assert!(daemon.stop().success());
}

#[test]
fn vms_and_reservations_come_and_go_and_what_does_not_fit_is_named() {
    let Some(site) = Site::if_possible() else { return };
    let names = [name("first"), name("second"), name("third")];
    let [first, second, third] = [&names[0], &names[1], &names[2]];

    site.configure("tenants.toml", &rt(&[first, second, third]));
    // The reservations are for one CPU: two fit, a third does not.
    let all = |budgets: [&str; 3]| {
        let reservations: String = names.iter().zip(budgets).map(|(name, budget)| reserve(name, budget)).collect();
        format!("cpus = \"{}\"\n{reservations}", a_cpu())
    };
    site.configure("sched.toml", &all(["8ms", "8ms", "8ms"]));
    let one = Guest::stopped(first);
    one.vcpu();
    let daemon = Daemon::start(&site);
    site.poke();
    until("the first has its reservation", || vcpu(&site, first));
    let absent = top(&site)["reservations"]["absent"].to_string();
    assert!(absent.contains(second.as_str()), "{absent}");
    let two = Guest::spinning(second);
    two.vcpu();
    until("the second has its reservation", || vcpu(&site, second));
    let three = Guest::stopped(third);
    three.vcpu();
    until("the third is refused by name", || {
        let shown = String::from_utf8(site.run(&["top", "--once", "--interval", "0.1"]).stdout).unwrap();
        shown.lines().find(|line| line.starts_with("refused: ") && line.contains(third.as_str())).map(str::to_owned)
    });
    assert!(vcpu(&site, first).is_some() && vcpu(&site, second).is_some());
    until("it is an RT VM like any other", || (three.policy() == (FIFO, 46)).then_some(()));

    // A VM that ends while it is paced makes room.
    drop(two);
    until("the third has its reservation", || vcpu(&site, third));
    assert!(vcpu(&site, second).is_none());

    // Another configuration, and then a wrong one, which changes nothing.
    site.configure("sched.toml", &all(["2ms", "2ms", "2ms"]));
    daemon.signal(Signal::HUP);
    until("another budget", || vcpu(&site, first).filter(|vcpu| vcpu["budget_us"].as_f64().unwrap() < 2001.0));
    site.configure("sched.toml", "reserve = 2.0\n");
    daemon.signal(Signal::HUP);
    until("the wrong file is named", || daemon.log().contains("sched.toml:1").then_some(()));
    assert!(vcpu(&site, first).is_some());
    site.configure("sched.toml", "");
    daemon.signal(Signal::HUP);
    until("none is left", || vcpu(&site, first).is_none().then_some(()));
    until("all RT VMs are planned again", || {
        [one.policy(), three.policy()].iter().all(|policy| *policy == (FIFO, 47)).then_some(())
    });
}

#[test]
fn another_back_end_is_no_other_programs_doing() {
    let Some(site) = Site::if_possible() else { return };
    let name = name("moved");
    let with = |backend: &str| format!("backend = \"{backend}\"\n{}", reserve(&name, "4ms"));
    site.configure("tenants.toml", &rt(&[&name]));
    site.configure("sched.toml", &with("paced"));
    let guest = Guest::spinning(&name);
    guest.vcpu();
    let mut daemon = Daemon::start(&site);
    site.poke();
    let kept = || vcpu(&site, &name).filter(|vcpu| vcpu["overruns"].as_u64().unwrap() > 0);
    until("shares are used up", kept);
    for backend in ["dp-wrap", "paced", "deadline", "dp-wrap"] {
        site.configure("sched.toml", &with(backend));
        assert!(matches!(site.run(&["reload"]).status.code(), Some(0 | 1)));
        until("the other back end has it", || (top(&site)["reservations"]["backend"] == backend).then_some(()));
        std::thread::sleep(std::time::Duration::from_millis(300));
    }
    let metrics = site.curl(&["http://o/metrics"]).1;
    assert!(metrics.contains("ontime_drift_total{rule=\"vcpu-place\"} 0\n"), "{metrics}");
    let log = daemon.log();
    assert!(!log.lines().any(|line| line.contains("CPU 0/") && line.contains("another program")), "{log}");
    let reset = site.run(&["reset"]);
    assert!(reset.status.success(), "{reset:?}");
    assert_eq!(guest.policy(), (0, 0));
    assert!(daemon.stop().success());
}

/// A dependency of the back end may exist now although no file has changed: the message says that a reload tries again.
#[test]
fn a_reload_tries_again_what_could_not_be_kept() {
    let Some(site) = Site::if_possible() else { return };
    let name = name("again");
    site.configure("tenants.toml", &rt(&[&name]));
    site.configure("sched.toml", &format!("backend = \"sched_ext\"\n{}", reserve(&name, "4ms")));
    let guest = Guest::spinning(&name);
    let mut only = rustix::thread::CpuSet::new();
    only.set(a_cpu());
    rustix::thread::sched_setaffinity(rustix::process::Pid::from_raw(guest.vcpu()), &only).unwrap();
    let mut daemon = Daemon::start(&site);
    site.poke();
    let tries = || {
        let log = daemon.log();
        let tried = |line: &&str| line.contains("reservations are not kept: sched_ext") && !line.contains("hold");
        log.lines().filter(tried).count()
    };
    until("the back end cannot start", || (tries() == 1).then_some(()));
    let status = String::from_utf8(site.run(&["status"]).stdout).unwrap();
    assert!(status.contains("then run `ontime reload`"), "{status}");
    assert!(matches!(site.run(&["reload"]).status.code(), Some(0..=2)));
    until("it is tried again", || (tries() == 2).then_some(()));
    assert!(daemon.stop().success());
}
