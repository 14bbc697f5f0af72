//! The daemon as users see it: the real program, real signals, real QEMU guests (software emulation).

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test ends by panicking")]

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit};
use support::{Daemon, EXEMPT, Guest, Site, name, policy, possible, until};

const FIFO: i32 = libc::SCHED_FIFO;

fn rt(name: &str) -> String {
    format!("[[tenant]]\nname = \"{name}\"\nclass = \"rt\"\nruntime-cap = 0.5\n")
}

#[test]
fn the_second_daemon_is_told_about_the_first_and_a_dead_ones_socket_is_replaced() {
    let Some(site) = Site::if_possible() else { return };
    let mut first = Daemon::start(&site);
    let second = site.run(&["daemon"]);
    assert_eq!(second.status.code(), Some(3));
    let said = String::from_utf8(second.stderr).unwrap();
    assert!(said.contains(&format!("process {}", first.pid())), "{said}");
    first.kill();
    assert!(site.path("run/ontime.sock").exists());
    let mut third = Daemon::start(&site);
    assert!(third.stop().success());
    assert!(!site.path("run/ontime.sock").exists());
    let nobody = site.run(&["status"]);
    assert_eq!(nobody.status.code(), Some(3));
    assert!(String::from_utf8(nobody.stderr).unwrap().contains("no daemon at"));
}

#[test]
fn a_guest_is_placed_kept_there_and_given_back_after_kill_9() {
    let Some(site) = Site::if_possible() else { return };
    let name = name("kept");
    site.configure("tenants.toml", &rt(&name));
    let guest = Guest::stopped(&name);
    assert_eq!(guest.policy(), (0, 0));
    let mut daemon = Daemon::start(&site);
    site.poke();
    until("the vCPU is placed", || (guest.policy() == (FIFO, 47)).then_some(()));
    until("protections are off", || site.unprotected().then_some(()));
    let shown = String::from_utf8(site.run(&["ps"]).stdout).unwrap();
    let row = shown.lines().find(|line| line.contains(&name)).unwrap();
    assert!(row.contains("rt0") && row.contains("tenants.toml:"), "{row}");
    assert!(shown.lines().any(|line| line.contains("vcpu0") && line.contains("FIFO 47")), "{shown}");

    // Another program changes the vCPU's policy.
    let moved = std::process::Command::new("chrt").args(["-o", "-p", "0", &guest.vcpu().to_string()]).status();
    assert!(moved.unwrap().success());
    site.poke();
    until("the vCPU is back", || (guest.policy() == (FIFO, 47)).then_some(()));
    until("the drift is counted", || {
        site.curl(&["http://o/metrics"]).1.contains("ontime_drift_total{rule=\"vcpu-place\"} 1").then_some(())
    });

    // kill -9: tenants are undisturbed, protections are back at once, everything is restored on reset.
    let guardian = daemon.guardian();
    daemon.kill();
    until("the guardian puts protections back", || site.protected().then_some(()));
    until("the guardian is gone", || (!std::path::Path::new(&format!("/proc/{guardian}/stat")).exists()).then_some(()));
    assert_eq!(guest.policy(), (FIFO, 47));
    let reset = site.run(&["reset"]);
    assert!(reset.status.success(), "{reset:?}");
    assert_eq!(guest.policy(), (0, 0));
    let journal = fs::read_to_string(site.path("state/originals")).unwrap();
    assert!(journal.contains("\"entries\":0"), "{journal}");
}

#[test]
fn with_its_guardian_killed_as_well_reset_protections_puts_them_back() {
    let Some(site) = Site::if_possible() else { return };
    let mut daemon = Daemon::start(&site);
    until("protections are off", || site.unprotected().then_some(()));
    let guardian = Pid::from_raw(daemon.guardian()).unwrap();
    rustix::process::kill_process(guardian, Signal::KILL).unwrap();
    // The next pass would start another guardian, but this daemon is killed before it.
    daemon.kill();
    assert!(site.unprotected());
    let reset = site.run(&["reset", "--protections"]);
    assert!(reset.status.success(), "{reset:?}");
    assert!(site.protected());
}

/// A program that ends with the test.
struct Program(std::process::Child);

impl Program {
    fn sleeps() -> Self {
        Self(std::process::Command::new("sleep").arg("600").spawn().unwrap())
    }

    fn takes(&self, args: &[&str]) {
        let pid = self.0.id().to_string();
        assert!(std::process::Command::new("chrt").args(args).arg(pid).status().unwrap().success());
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_thread_of_no_tenant_keeps_protections_on_and_is_named() {
    let Some(site) = Site::if_possible() else { return };
    let mut daemon = Daemon::start(&site);
    until("protections are off", || site.unprotected().then_some(()));
    let program = Program::sleeps();
    program.takes(&["-f", "-p", "1"]);
    // From now on no cgroup is exempt.
    fs::remove_file(site.path("etc").join(EXEMPT)).unwrap();
    daemon.signal(Signal::HUP);
    until("protections are on", || site.protected().then_some(()));
    let shown = String::from_utf8(site.run(&["status"]).stdout).unwrap();
    let caps = shown.lines().find(|line| line.starts_with("caps ")).unwrap();
    assert!(caps.contains("protections on: thread ") && caps.contains("cap.uncapped"), "{caps}");
    assert!(daemon.log().contains("no cap holds it"), "{}", daemon.log());
    // The finding names the thread too, and does not blame runtime caps, which are in order.
    let status = site.json(&["status", "--json"]);
    let finding = status["findings"].as_array().unwrap().iter().find(|of| of["rule"] == "rt-protections").unwrap();
    let number = format!("thread {} ", program.0.id());
    assert!(finding["found"].as_str().unwrap().contains(&number), "{finding}");
    assert!(finding["remedy"].as_str().unwrap().contains("cap.uncapped"), "{finding}");
    let count = || {
        let metrics = site.curl(&["http://o/metrics"]).1;
        let line = metrics.lines().find_map(|line| line.strip_prefix("ontime_uncapped_threads ")).unwrap();
        line.parse::<u32>().unwrap()
    };
    assert!(count() >= 1);
    // Whether this machine has other real-time threads does not depend on this test.
    program.takes(&["-o", "-p", "0"]);
    site.poke();
    let end = Instant::now() + Duration::from_secs(10);
    while Instant::now() < end && !site.unprotected() {
        std::thread::sleep(Duration::from_millis(50));
    }
    if site.unprotected() {
        assert_eq!(count(), 0);
        program.takes(&["-r", "-p", "1"]);
        until("protections are on without an event", || site.protected().then_some(()));
    } else {
        println!("SKIPPED in part: other programs of this machine have real-time threads");
    }
    site.configure(EXEMPT, "[cap]\nuncapped = [\"/\"]\n");
    daemon.signal(Signal::HUP);
    until("protections are off", || site.unprotected().then_some(()));
    assert!(daemon.stop().success());
}

#[test]
fn a_tenant_beyond_its_quota_has_the_rest_at_normal_priority_and_protections_off() {
    let Some(site) = Site::if_possible() else { return };
    let name = name("wide");
    site.configure("tenants.toml", &rt(&name));
    site.configure("daemon.toml", "[cap]\nthreads-per-tenant = 16\n");
    // No cgroup is exempt: only caps and the quota hold the threads.
    fs::remove_file(site.path("etc").join(EXEMPT)).unwrap();
    let guest = Guest::wide(&name, 20);
    let daemon = Daemon::start(&site);
    let placed = || guest.policies().iter().filter(|policy| **policy == (FIFO, 47)).count();
    until("as many as may are placed", || (placed() >= 15).then_some(()));
    // If other programs of this machine have real-time threads, protections are on because of them.
    let is_held = || {
        until("protections are off, or on because of another program", || {
            let status = site.json(&["status", "--json"]);
            let why = status["caps"]["why"].as_str().unwrap_or_default().to_owned();
            let own = format!("of process {} ", guest.pid());
            assert!(!why.contains(&own), "{why}");
            (site.unprotected() || why.contains("no cap holds it")).then_some(())
        });
    };
    is_held();
    // The VMM's main thread is the sixteenth.
    assert_eq!((guest.policies().len(), placed()), (20, 15));
    let shown = String::from_utf8(site.run(&["status"]).stdout).unwrap();
    assert!(shown.contains(&format!("problem: {name}: it has 5 threads at SCHED_OTHER")), "{shown}");
    // The VMM raises all of its threads, which causes no event.
    let raised = std::process::Command::new("chrt").args(["-a", "-f", "-p", "9", &guest.pid().to_string()]).status();
    assert!(raised.unwrap().success());
    until("the rest is put back", || {
        let normal = guest.policies().iter().filter(|policy| **policy == (0, 0)).count();
        (normal == 5).then_some(())
    });
    is_held();
    // A killed daemon leaves the list of demoted threads to the next daemon, and to a reset without a daemon.
    let raised = || guest.policies().iter().filter(|policy| **policy == (FIFO, 9)).count();
    let mut daemon = daemon;
    daemon.kill();
    assert_eq!(raised(), 0);
    let reset = site.run(&["reset"]);
    assert!(reset.status.success(), "{reset:?}");
    assert_eq!(raised(), 5);
}

#[test]
fn a_lost_guardian_is_replaced() {
    let Some(site) = Site::if_possible() else { return };
    let mut daemon = Daemon::start(&site);
    let first = daemon.guardian();
    rustix::process::kill_process(Pid::from_raw(first).unwrap(), Signal::KILL).unwrap();
    site.poke();
    // The line is logged once the guardian has its charge; without a charge it would restore nothing.
    until("another guardian", || {
        let new = daemon.guardian();
        (new != first && daemon.log().contains(&format!("guardian is process {new}"))).then_some(())
    });
    until("protections are off", || site.unprotected().then_some(()));
    daemon.kill();
    until("the new guardian puts protections back", || site.protected().then_some(()));
}

#[test]
fn stopping_keeps_settings_and_puts_protections_back() {
    let Some(site) = Site::if_possible() else { return };
    let name = name("stays");
    site.configure("tenants.toml", &rt(&name));
    let guest = Guest::stopped(&name);
    guest.vcpu();
    let mut daemon = Daemon::start(&site);
    site.poke();
    until("the vCPU is placed", || (guest.policy() == (FIFO, 47)).then_some(()));
    until("protections are off", || site.unprotected().then_some(()));
    assert!(daemon.stop().success());
    assert!(site.protected());
    assert_eq!(guest.policy(), (FIFO, 47));
    // A new daemon finds everything as planned, and its reset knows the originals that the first one recorded.
    let mut daemon = Daemon::start(&site);
    site.poke();
    until("the vCPU is watched", || {
        let status = site.json(&["status", "--json"]);
        (!status["caps"]["threads"].as_array()?.is_empty()).then_some(())
    });
    let reset = site.run(&["reset"]);
    assert!(reset.status.success(), "{reset:?}");
    assert_eq!(guest.policy(), (0, 0));
    assert!(site.protected());
    // After a reset nothing is applied again without a request.
    site.poke();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(guest.policy(), (0, 0));
    let (status, off) = until("a pass after the reset", || {
        let status = site.json(&["status", "--json"]);
        let off = status["knobs"].as_array()?.iter().find(|knob| knob["state"] == "not-applied")?.clone();
        Some((status, off))
    });
    assert_eq!((&status["state"], &status["drift"]), (&"reset".into(), &0.into()), "{status}");
    assert!(off["why"].as_str().unwrap().contains("`ontime reset` was called"), "{off}");
    for command in [["status"].as_slice(), &["net", "status"]] {
        let shown = site.run(command);
        assert_eq!(shown.status.code(), Some(0), "{shown:?}");
    }
    // Status 1: placed, but another knob could not be set (a kernel that denies one).
    assert!(matches!(site.run(&["apply"]).status.code(), Some(0 | 1)));
    assert_eq!(guest.policy(), (FIFO, 47));
    daemon.stop();
}

#[test]
fn a_spinning_guest_is_held_to_its_cap_and_given_its_place_back_when_the_daemon_dies() {
    let Some(site) = Site::if_possible() else { return };
    let name = name("spins");
    site.configure("tenants.toml", &rt(&name));
    let guest = Guest::spinning(&name);
    let vcpu = guest.vcpu();
    let mut daemon = Daemon::start(&site);
    site.poke();
    let of_guest = || {
        let status = site.json(&["status", "--json"]);
        let threads = status["caps"]["threads"].as_array()?.clone();
        threads.into_iter().find(|thread| thread["of"] == name.as_str() && thread["tid"] == vcpu)
    };
    until("it is over its cap", || of_guest().filter(|thread| thread["pauses"].as_u64() > Some(20)));
    // A paused thread does not count as drift.
    assert_eq!(site.json(&["status", "--json"])["drift"], 0);
    daemon.kill();
    until("it has its place for good", || {
        let steady = (0..20).all(|_| {
            std::thread::sleep(Duration::from_millis(5));
            guest.policy() == (FIFO, 47)
        });
        steady.then_some(())
    });
    assert!(site.protected());
}

#[test]
fn a_spinning_guest_that_becomes_bulk_is_given_back_and_not_watched_at_its_former_place() {
    let Some(site) = Site::if_possible() else { return };
    let name = name("becomes-bulk");
    site.configure("tenants.toml", &rt(&name));
    let guest = Guest::spinning(&name);
    guest.vcpu();
    let daemon = Daemon::start(&site);
    site.poke();
    until("it has its place", || (guest.policy() == (FIFO, 47)).then_some(()));
    site.configure("tenants.toml", "");
    daemon.signal(Signal::HUP);
    until("it is an ordinary thread", || (guest.policy() == (libc::SCHED_OTHER, 0)).then_some(()));
    // Longer than several pauses would take.
    for _ in 0..200 {
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(guest.policy(), (libc::SCHED_OTHER, 0));
    }
    let status = site.json(&["status", "--json"]);
    let watched = status["caps"]["threads"].as_array().unwrap();
    assert!(watched.iter().all(|thread| thread["of"] != name.as_str()), "{watched:?}");
}

#[test]
fn a_bad_configuration_is_refused_with_its_place_and_the_old_one_stays() {
    let Some(site) = Site::if_possible() else { return };
    site.configure("host.toml", "method = \"vanilla\"\n");
    let daemon = Daemon::start(&site);
    assert_eq!(site.json(&["status", "--json"])["method"], "vanilla");
    site.configure("host.toml", "# changed\nmethod = \"fast\"\n");
    daemon.signal(Signal::HUP);
    let place = format!("{}:2:", site.path("etc/host.toml").display());
    until("the log names file and line", || daemon.log().contains(&place).then_some(()));
    let status = site.json(&["status", "--json"]);
    assert_eq!(status["method"], "vanilla");
    let refused = &status["refused_configuration"];
    assert_eq!(
        (&refused["file"], &refused["line"]),
        (&site.path("etc/host.toml").display().to_string().into(), &2.into())
    );
    assert!(refused["reason"].as_str().unwrap().starts_with("'fast' is not a method"), "{refused}");
    let is_refused = || site.curl(&["http://o/metrics"]).1.contains("ontime_config_refused 1");
    assert!(is_refused());
    // This lasts until a reload succeeds. `ontime reload` reports the error.
    site.configure("host.toml", "\n\nbulk_napi_weight = -3\n");
    let reload = site.run(&["reload"]);
    assert_eq!(reload.status.code(), Some(78), "{reload:?}");
    let said = String::from_utf8(reload.stderr).unwrap();
    assert!(said.contains("host.toml:3: ") && said.contains("a whole number from 0 to 4294967295"), "{said}");
    let shown = site.run(&["status"]);
    assert_eq!(shown.status.code(), Some(1), "{shown:?}");
    assert!(String::from_utf8(shown.stdout).unwrap().contains("host.toml:3: "));
    assert!(is_refused());
    site.configure("host.toml", "method = \"threaded\"\n");
    let reload = site.run(&["reload"]);
    assert!(matches!(reload.status.code(), Some(0 | 1)), "{reload:?}");
    let status = site.json(&["status", "--json"]);
    assert_eq!((&status["method"], &status["refused_configuration"]), (&"threaded".into(), &serde_json::Value::Null));
    assert!(!is_refused());
    drop(daemon);
    site.configure("daemon.toml", "rescan-seconds = 0\n");
    let refused = site.run(&["daemon"]);
    assert_eq!(refused.status.code(), Some(78));
    assert!(String::from_utf8(refused.stderr).unwrap().contains("daemon.toml:1:"));
}

#[test]
fn the_guardian_and_what_it_watches_stand_where_the_base_says_after_a_reload() {
    let Some(site) = Site::if_possible() else { return };
    let daemon = Daemon::start(&site);
    let standing = |priority: i32| {
        let tasks = [daemon.pid(), daemon.guardian()].map(|pid| fs::read_dir(format!("/proc/{pid}/task")));
        let at = |task: fs::DirEntry| {
            let comm = fs::read_to_string(task.path().join("comm")).ok()?;
            let is_main = task.file_name().to_str() == Some(daemon.guardian().to_string().as_str());
            (is_main || comm.trim() == "ontime-life").then(|| policy(task.path().join("stat")))
        };
        let all: Vec<_> = tasks.into_iter().flatten().flatten().flatten().filter_map(at).collect();
        (all == [(FIFO, priority); 2]).then_some(())
    };
    until("both stand by the default base", || standing(56));
    site.configure("tenants.toml", "[priorities]\nbase = 60\n");
    daemon.signal(Signal::HUP);
    until("another guardian", || (daemon.log().matches("guardian is process").count() == 2).then_some(()));
    until("both stand by the new base", || standing(66));
}

/// The subcommands that have the option --json, such as `net status`.
fn with_json(command: &clap::Command, path: &str) -> BTreeSet<String> {
    let own = command.get_arguments().any(|of| of.get_id() == "json").then(|| path.to_owned());
    let below = command.get_subcommands().filter(|of| !of.is_hide_set());
    own.into_iter().chain(below.flat_map(|of| with_json(of, format!("{path} {}", of.get_name()).trim()))).collect()
}

/// With a daemon and, where the command has an answer of its own, without.
#[test]
fn every_json_output_says_its_schema_version() {
    let Some(site) = Site::if_possible() else { return };
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/examples/plan/motivation.toml");
    let has_version = |args: &[&str]| {
        let document = site.json(&[args, &["--json"]].concat());
        assert_eq!(document["schema_version"], 1, "{args:?}: {document}");
    };
    let alone: [&[&str]; 6] =
        [&["ps"], &["net", "status"], &["doctor"], &["plan", example], &["apply", "--dry-run"], &["reset"]];
    alone.into_iter().for_each(has_version);
    let _daemon = Daemon::start(&site);
    let with_daemon: [&[&str]; 5] =
        [&["status"], &["top", "--once", "--interval", "0.1"], &["apply"], &["reload"], &["apply", "--dry-run"]];
    let all: Vec<&[&str]> = with_daemon.into_iter().chain(alone).collect();
    all.iter().copied().for_each(has_version);
    // What these write, other tests read: verify.rs, trace.rs and ontime's own test of `sockets`.
    let elsewhere = ["sockets", "trace", "verify"].map(str::to_owned);
    let known = with_json(&ontime::command(), "");
    let tried = known.iter().filter(|of| all.iter().any(|args| args.join(" ").starts_with(of.as_str())));
    assert_eq!(tried.chain(&elsewhere).cloned().collect::<BTreeSet<_>>(), known);
}

/// Beside ordinary VMs, as in mode `observe` and after a reset, the daemon takes no more time than they.
#[test]
fn the_daemon_is_ahead_of_ordinary_threads_only_while_it_applies() {
    let Some(site) = Site::if_possible() else { return };
    site.configure("daemon.toml", "mode = \"observe\"\n");
    let daemon = Daemon::start_as(&site, &["nice", "-n", "7"]);
    let tasks = || fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap().flatten().map(|task| task.path());
    let called = |names: &[&str]| -> Vec<i32> {
        let comm = |task: &std::path::Path| fs::read_to_string(task.join("comm")).unwrap_or_default();
        let threads = tasks().filter(|task| names.contains(&comm(task).trim()));
        threads.map(|task| task.file_name().unwrap().to_str().unwrap().parse().unwrap()).collect()
    };
    let nice = |tid: i32| rustix::process::getpriority_process(Pid::from_raw(tid)).unwrap();
    let http = called(&["ontime-http"])[0];
    let both = || [nice(daemon.pid()), nice(http)];
    assert_eq!(both(), [0, 0], "it observes, and inherited 7");
    site.configure("daemon.toml", "mode = \"enforce\"\n");
    daemon.signal(Signal::HUP);
    until("protections are off", || site.unprotected().then_some(()));
    assert_eq!(both(), [-20, -20], "it applies");
    assert!(called(&["ontime-sight"]).into_iter().all(|reader| nice(reader) == -20));
    // Root changes the value, as SysRq n does.
    rustix::process::setpriority_process(Pid::from_raw(daemon.pid()), 0).unwrap();
    site.poke();
    until("a pass takes it again", || (both() == [-20, -20]).then_some(()));
    assert!(site.run(&["reset"]).status.success());
    assert_eq!(both(), [0, 0], "a reset has ended the caps");
    site.poke();
    assert!(matches!(site.run(&["apply"]).status.code(), Some(0 | 1)));
    assert_eq!(both(), [-20, -20], "it applies again");
    site.configure("daemon.toml", "mode = \"observe\"\n");
    daemon.signal(Signal::HUP);
    until("it observes again", || (both() == [0, 0]).then_some(()));
}

/// As SysRq n does with every real-time thread of a program.
#[test]
fn real_time_threads_that_root_has_moved_get_their_places_back_the_daemons_own_too() {
    let Some(site) = Site::if_possible() else { return };
    let name = name("moved");
    site.configure("tenants.toml", &rt(&name));
    let guest = Guest::stopped(&name);
    let vcpu = guest.vcpu();
    let mut daemon = Daemon::start(&site);
    site.poke();
    until("the vCPU is placed", || (guest.policy() == (FIFO, 47)).then_some(()));
    until("protections are off", || site.unprotected().then_some(()));
    let tasks = || fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap().flatten().map(|task| task.path());
    let called = |name: &str| {
        let comm = |task: &std::path::Path| fs::read_to_string(task.join("comm")).unwrap_or_default();
        tasks().find(|task| comm(task).trim() == name).unwrap()
    };
    let guardian = format!("/proc/{}/task/{0}", daemon.guardian()).into();
    let all = [(called("ontime-cap"), 55), (called("ontime-life"), 56), (guardian, 56)];
    let threads = all.iter().map(|(task, _)| task.file_name().unwrap().to_str().unwrap().parse().unwrap());
    for thread in threads.chain([vcpu]) {
        let param = libc::sched_param { sched_priority: 0 };
        // SAFETY: the kernel copies param, which outlives the call.
        let done = unsafe { libc::sched_setscheduler(thread, libc::SCHED_OTHER, &raw const param) };
        assert_eq!(done, 0);
    }
    let placed = || all.iter().all(|(task, priority)| policy(task.join("stat")) == (FIFO, *priority));
    until("all have their places", || (placed() && guest.policy() == (FIFO, 47)).then_some(()));
    assert!(daemon.log().contains("changed by another program: ontime-cap FIFO 55 -> OTHER"), "{}", daemon.log());
    assert!(daemon.stop().success());
}

#[test]
fn a_look_that_fails_gives_nothing_back() {
    let Some(site) = Site::if_possible() else { return };
    let name = name("unseen");
    site.configure("tenants.toml", &rt(&name));
    let guest = Guest::stopped(&name);
    guest.vcpu();
    let daemon = Daemon::start(&site);
    site.poke();
    until("the vCPU is placed", || (guest.policy() == (FIFO, 47)).then_some(()));
    let (pid, maximum) = (Pid::from_raw(daemon.pid()), getrlimit(Resource::Nofile).maximum);
    let limit = |current| prlimit(pid, Resource::Nofile, Rlimit { current, maximum }).unwrap();
    // Descriptors that are open stay open.
    limit(Some(3));
    site.poke();
    until("it looks in vain", || daemon.log().contains("could not be read whole").then_some(()));
    assert_eq!(guest.policy(), (FIFO, 47));
    limit(maximum);
    let problems = || site.json(&["status", "--json"])["problems"].as_array().unwrap().clone();
    until("it looks again", || problems().iter().all(|problem| problem["subject"] != "host").then_some(()));
    assert_eq!(guest.policy(), (FIFO, 47));
}

#[test]
fn clients_that_ask_without_a_pause_do_not_keep_the_daemon_from_ending() {
    let Some(site) = Site::if_possible() else { return };
    let mut daemon = Daemon::start(&site);
    let socket = site.path("run/ontime.sock");
    let (answers, until_then) = (AtomicU32::new(0), Instant::now() + Duration::from_secs(120));
    let ask = || -> std::io::Result<usize> {
        let mut stream = UnixStream::connect(&socket)?;
        stream.write_all(b"GET /v1/tenants HTTP/1.1\r\nhost: o\r\nconnection: close\r\n\r\n")?;
        stream.read_to_end(&mut Vec::new())
    };
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while Instant::now() < until_then && ask().is_ok() {
                    answers.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        until("they are answered", || (answers.load(Ordering::Relaxed) > 16).then_some(()));
        assert!(daemon.stop().success());
        assert!(Instant::now() < until_then, "the daemon ended only when its clients did");
    });
}

#[test]
fn methods_are_switched_tried_and_refused() {
    let Some(site) = Site::if_possible() else { return };
    let _daemon = Daemon::start(&site);
    until("protections are off", || site.unprotected().then_some(()));
    let dry = site.json(&["apply", "--method", "vanilla", "--dry-run", "--json"]);
    assert_eq!(dry["dry_run"], true);
    assert!(dry["changes"].as_array().unwrap().iter().any(|change| change["outcome"] == "would-restore"), "{dry}");
    assert!(site.unprotected());
    let switched = site.json(&["apply", "--method", "vanilla", "--json"]);
    assert_eq!(switched["method"], "vanilla");
    assert!(site.protected());
    let status = site.json(&["status", "--json"]);
    assert_eq!((&status["method"], &status["method_by"]), (&"vanilla".into(), &"request".into()));
    for (method, word) in [("outsourcing", "`ontime device`"), ("fast", "partitioned")] {
        let refused = site.run(&["apply", "--method", method]);
        assert_eq!(refused.status.code(), Some(64));
        assert!(String::from_utf8(refused.stderr).unwrap().contains(word));
    }
}

#[test]
fn mode_observe_shows_what_would_be_set_and_sets_nothing_until_it_is_told_to_enforce() {
    let Some(site) = Site::if_possible() else { return };
    let name = name("observed");
    site.configure("tenants.toml", &rt(&name));
    site.configure("daemon.toml", include_str!("../../../packaging/ontime/daemon.toml"));
    let guest = Guest::stopped(&name);
    let vcpu = guest.vcpu();
    let mut daemon = Daemon::start(&site);
    site.poke();
    let status = || site.json(&["status", "--json"]);
    let of_vcpu = |status: &serde_json::Value| {
        let knobs = status["knobs"].as_array().unwrap().clone();
        knobs.into_iter().find(|knob| knob["knob"].as_str().unwrap().contains(&vcpu.to_string()))
    };
    let knob = until("the vCPU is found", || of_vcpu(&status()));
    assert_eq!((&knob["state"], &knob["wanted"]), (&"would-change".into(), &"FIFO 47".into()), "{knob}");
    // In this plan, runtime caps replace the protections.
    let seen = status();
    assert!(seen["knobs"].as_array().unwrap().iter().any(|knob| knob["rule"] == "rt-protections"), "{seen}");
    assert_eq!(
        (&seen["state"], &seen["drift"], &seen["caps"]["in_force"]),
        (&"observing".into(), &0.into(), &false.into())
    );
    let unset = || {
        let journal = fs::read_to_string(site.path("state/originals")).unwrap_or_default();
        assert!(guest.policy() == (0, 0) && site.protected() && !journal.contains("\"comm\""), "{journal}");
    };
    unset();
    let text = site.run(&["status"]);
    assert_eq!(text.status.code(), Some(0), "{text:?}");
    assert!(String::from_utf8(text.stdout).unwrap().contains("observing: nothing is set"));
    let refused = site.run(&["apply"]);
    assert_eq!(refused.status.code(), Some(3), "{refused:?}");
    assert!(String::from_utf8(refused.stderr).unwrap().contains("mode = \"enforce\""));
    let dry = site.json(&["apply", "--dry-run", "--json"]);
    assert!(dry["changes"].as_array().unwrap().iter().any(|change| change["outcome"] == "would-change"), "{dry}");
    assert!(site.run(&["reset"]).status.success());
    assert_eq!(status()["state"], "observing");
    assert!(site.curl(&["http://o/metrics"]).1.contains("ontime_observing 1"));
    unset();
    let reload = site.json(&["reload", "--json"]);
    let is_vcpus = |change: &serde_json::Value| change["knob"].as_str().unwrap().contains(&vcpu.to_string());
    let told = reload["changes"].as_array().unwrap().iter().find(|change| is_vcpus(change));
    assert_eq!(told.unwrap()["outcome"], "would-change", "{reload}");
    unset();

    // A reload is answered once the new configuration is in force.
    site.configure("daemon.toml", "mode = \"enforce\"\n");
    let reload = site.run(&["reload"]);
    assert!(matches!(reload.status.code(), Some(0 | 1)), "{reload:?}");
    assert_eq!((guest.policy(), &status()["state"]), ((FIFO, 47), &"applied".into()));
    until("protections are off", || site.unprotected().then_some(()));
    // And back: everything that was set is restored first, including what a killed daemon has left.
    site.configure("daemon.toml", "mode = \"observe\"\n");
    assert!(site.run(&["reload"]).status.success());
    unset();
    site.configure("daemon.toml", "");
    assert!(matches!(site.run(&["reload"]).status.code(), Some(0 | 1)));
    assert_eq!(guest.policy(), (FIFO, 47));
    daemon.kill();
    site.configure("daemon.toml", "mode = \"observe\"\n");
    let mut daemon = Daemon::start(&site);
    until("what the former daemon has left is given back", || (guest.policy() == (0, 0)).then_some(()));
    unset();
    assert!(daemon.stop().success());
}

#[test]
fn what_would_be_set_counts_on_no_cap_beside_a_thread_that_none_would_hold() {
    let Some(site) = Site::if_possible() else { return };
    site.configure("daemon.toml", "mode = \"observe\"\n");
    let program = Program::sleeps();
    program.takes(&["-r", "-p", "7"]);
    let of =
        |list: &serde_json::Value| list.as_array().unwrap().iter().find(|of| of["rule"] == "rt-protections").cloned();
    let dry = || site.json(&["apply", "--dry-run", "--json"]);
    let stay_on = |report: &serde_json::Value, set: &str| {
        let finding = of(&report["findings"]).unwrap();
        assert!(of(&report[set]).is_none(), "{report}");
        assert!(finding["found"].as_str().unwrap().contains("no cap holds it"), "{finding}");
        assert!(finding["remedy"].as_str().unwrap().contains("cap.uncapped"), "{finding}");
    };
    let go_off = dry();
    assert!(of(&go_off["changes"]).is_some(), "the site exempts every cgroup: {go_off}");
    fs::remove_file(site.path("etc").join(EXEMPT)).unwrap();
    stay_on(&dry(), "changes");
    let mut daemon = Daemon::start(&site);
    stay_on(&dry(), "changes");
    let seen =
        until("a pass is over", || Some(site.json(&["status", "--json"])).filter(|status| status["passes"] != 0));
    stay_on(&seen, "knobs");
    drop(program);
    assert!(daemon.stop().success());
}

#[test]
fn what_ontime_itself_has_set_is_no_problem_once_the_class_is_another() {
    let Some(site) = Site::if_possible() else { return };
    let (name, other) = (name("was-rt"), name("bulk-at-rt"));
    site.configure("tenants.toml", &rt(&name));
    let (guest, strange) = (Guest::stopped(&name), Guest::stopped(&other));
    let moved = std::process::Command::new("chrt").args(["-f", "-p", "5", &strange.vcpu().to_string()]).status();
    assert!(moved.unwrap().success());
    guest.vcpu();
    let _daemon = Daemon::start(&site);
    site.poke();
    until("the vCPU is placed", || (guest.policy() == (FIFO, 47)).then_some(()));
    let problems = || {
        let status = site.json(&["status", "--json"]);
        let problems = status["problems"].as_array().unwrap().clone();
        problems.into_iter().map(|problem| problem["subject"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    // A policy that another program has set is reported, before and after.
    until("the bulk VM's own place is told", || problems().contains(&other).then_some(()));
    site.configure("tenants.toml", "");
    assert!(matches!(site.run(&["reload"]).status.code(), Some(0 | 1)));
    assert_eq!(guest.policy(), (0, 0));
    let told = problems();
    assert!(!told.contains(&name) && told.contains(&other), "{told:?}");
    let metrics = site.curl(&["http://o/metrics"]).1;
    assert!(metrics.contains("ontime_drift_total{rule=\"vcpu-place\"} 0\n"), "{metrics}");
}

#[test]
fn links_that_come_and_go_are_noticed_by_themselves() {
    let Some(site) = Site::if_possible() else { return };
    let _daemon = Daemon::start(&site);
    site.ip(&["link", "add", "va0", "type", "veth", "peer", "name", "va1"]);
    let names = || {
        let (code, body) = site.curl(&["http://o/v1/nics"]);
        assert_eq!(code, 200);
        body
    };
    until("the new link is seen", || names().contains("\"va0\"").then_some(()));
    site.ip(&["link", "set", "va0", "name", "vb0"]);
    until("its new name is seen", || names().contains("\"vb0\"").then_some(()));
    site.ip(&["link", "del", "vb0"]);
    until("its end is seen", || (!names().contains("\"vb0\"")).then_some(()));
}

#[test]
fn queue_changes_are_noticed_and_passes_cause_no_passes() {
    if !possible() {
        return;
    }
    if std::process::Command::new("ethtool").arg("--version").output().is_err() {
        println!("SKIPPED: this test needs ethtool");
        return;
    }
    let site = Site::new();
    site.ip(&["link", "add", "va0", "numrxqueues", "2", "numtxqueues", "2", "type", "veth", "peer", "name", "va1"]);
    let ethtool = |args: &[&str]| {
        let mut command = std::process::Command::new("ip");
        command.args(["netns", "exec", site.netns(), "ethtool"]).args(args);
        assert!(command.status().unwrap().success(), "ethtool {args:?}");
    };
    // With GRO a veth has NAPI, so that passes have something to thread.
    ethtool(&["-K", "va0", "gro", "on"]);
    ethtool(&["-L", "va0", "rx", "1"]);
    site.ip(&["link", "set", "va0", "up"]);
    site.ip(&["link", "set", "va1", "up"]);
    let _daemon = Daemon::start(&site);
    let passes = |reason: &str| -> u64 {
        let text = site.curl(&["http://o/metrics"]).1;
        let line = text.lines().filter(|line| line.starts_with(&format!("ontime_passes_total{{reason=\"{reason}")));
        line.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
    };
    until("NAPI is threaded", || {
        let nics: serde_json::Value = serde_json::from_str(&site.curl(&["http://o/v1/nics"]).1).unwrap();
        let va0 = nics["nics"].as_array()?.iter().find(|nic| nic["name"] == "va0")?.clone();
        va0["napis"].as_array()?.iter().any(|napi| napi["thread"].is_object()).then_some(())
    });
    until("passes that cause no passes", || {
        let settled = passes("links") + passes("queues");
        std::thread::sleep(Duration::from_millis(1000));
        (passes("links") + passes("queues") == settled).then_some(())
    });
    // If the interface is up, the change may also cause a change of carrier, which is a link event. If it is down, only
    // ethtool reports the change.
    site.ip(&["link", "set", "va0", "down"]);
    std::thread::sleep(Duration::from_millis(500));
    let before = passes("queues");
    ethtool(&["-L", "va0", "rx", "2"]);
    until("a pass because of the queues", || (passes("queues") > before).then_some(()));
}
