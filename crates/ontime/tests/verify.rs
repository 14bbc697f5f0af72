//! `ontime verify` with the real programs where they are installed, and with stand-ins for what must not depend on how
//! fast this machine is: verdicts, files, the load, and the end at a signal.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test ends by panicking")]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

const RECORDED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/verify/testdata");

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("SKIPPED: this test needs root");
    }
    root
}

fn verify(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ontime"));
    command.arg("verify").args(args);
    for (flag, name) in [("--run-dir", "run"), ("--state-dir", "state"), ("--config-dir", "etc")] {
        command.arg(flag).arg(dir.join(name));
    }
    command
}

/// The same with programs of `dir` before those of the system.
fn verify_by(dir: &Path, args: &[&str]) -> Command {
    let mut command = verify(dir, args);
    command.env("PATH", format!("{}:{}", dir.display(), std::env::var("PATH").unwrap()));
    command
}

fn program(dir: &Path, name: &str, script: &str) {
    std::fs::write(dir.join(name), format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(dir.join(name), std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// A cyclictest and an rtla that write what real ones wrote, rtla of CPU 0 in place of 1.
fn stand_ins(dir: &Path) {
    let json =
        format!("for word; do case $word in --json=*) cat {RECORDED}/cyclictest.json > ${{word#--json=}};; esac; done");
    program(dir, "cyclictest", &format!("echo $@ >> {}/called; {json}; echo 'T: 0 noise'", dir.display()));
    let histogram =
        format!("[ $1 = --help ] && exec echo 'rtla version 6.1.0'; sed s/-001/-000/g {RECORDED}/timerlat-hist.txt");
    program(dir, "rtla", &histogram);
}

fn said(out: &Output) -> String {
    String::from_utf8(out.stderr.clone()).unwrap()
}

#[test]
fn a_missing_program_and_wrong_limits_are_told_before_anything_runs() {
    let dir = tempfile::tempdir().unwrap();
    let empty = tempfile::tempdir().unwrap();
    let out = verify(dir.path(), &["--test", "cyclictest,timerlat"]).env("PATH", empty.path()).output().unwrap();
    assert_eq!(out.status.code(), Some(3), "{out:?}");
    assert!(said(&out).contains("not installed: cyclictest, rtla; Debian: apt-get install rt-tests rtla;"), "{out:?}");
    let file = dir.path().join("own.toml");
    std::fs::write(&file, "[limits.own]\ncyclictest-us = -1\n").unwrap();
    for (args, status, wanted) in [
        (["--limits", "esx"], 64, "there are no limits `esx`"),
        (["--limits-file", file.to_str().unwrap()], 78, "own.toml:1:"),
        (["--cpus", "0,8191"], 64, "not all of these CPUs are online"),
        (["--duration", "0"], 64, "--duration"),
    ] {
        let out = verify(dir.path(), &args).output().unwrap();
        assert_eq!(out.status.code(), Some(status), "{args:?}: {out:?}");
        assert!(said(&out).contains(wanted) && out.stdout.is_empty(), "{args:?}: {out:?}");
    }
    let out = verify(dir.path(), &["--test", "request", "--guest", "sh"]).output().unwrap();
    assert_eq!(out.status.code(), Some(64), "{out:?}");
}

#[test]
fn the_result_is_judged_written_and_told_by_the_exit_status() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    stand_ins(dir.path());
    std::fs::write(dir.path().join("own.toml"), "[limits.own]\ncyclictest-us = 141\ntimerlat-us = 311\n").unwrap();
    let (own, page) = (dir.path().join("own.toml"), dir.path().join("page.html"));
    let (own, page) = (own.to_str().unwrap(), page.to_str().unwrap());
    let run = |limits: &str, more: &[&str]| {
        let fixed = ["--test", "cyclictest,timerlat", "--cpus", "0", "--duration", "1", "--limits-file", own];
        let out = verify_by(dir.path(), &[fixed.as_slice(), ["--limits", limits].as_slice(), more].concat())
            .output()
            .unwrap();
        (out.status.code(), String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap())
    };
    let (status, text, progress) = run("own", &["--load", "sleep 600"]);
    assert!(status == Some(0) && text.starts_with("pass by own: 1 s each, beside `sleep 600`"), "{text}{progress}");
    let (status, text, _) = run("own,rhel", &[]);
    assert!(status == Some(1) && text.starts_with("FAIL by rhel, own: "), "{text}");
    // A guest with the CPUs of the recorded histogram.
    let guest = |online: &str| {
        let cat = format!("cat() {{ case $1 in /sys/*) echo {online} ;; *) command cat \"$@\" ;; esac; }}");
        format!("{{ echo '{cat}'; cat; }} | sh")
    };
    let (status, json, _) = run("vmware", &["--json", "-", "--html", page, "--guest", &guest("0,12")]);
    assert_eq!(status, Some(1));
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json["schema_version"], &json["verdict"]), (&1.into(), &"fail".into()));
    let measured: Vec<_> =
        json["measurements"].as_array().unwrap().iter().map(|of| (&of["place"], &of["max_us"])).collect();
    let wanted = [("host", 141.0), ("guest", 141.0), ("host", 311.0), ("guest", 311.0)];
    let wanted = wanted.map(|(place, us)| (place.into(), us.into()));
    let wanted: Vec<(&Value, &Value)> = wanted.iter().map(|(place, us)| (place, us)).collect();
    assert_eq!(measured, wanted);
    let versions = &json["host"]["versions"];
    assert_eq!((&versions["rtla"], &versions["rtla (guest)"]), (&"6.1.0".into(), &"6.1.0".into()));
    assert_eq!(versions["rt-tests (guest)"], "2.80");
    assert!(json["host"]["status"].is_null() && json["host"]["status_missing"].as_str().unwrap().contains("no daemon"));
    assert!(std::fs::read_to_string(page).unwrap().contains("FAIL by vmware"));
    let called = std::fs::read_to_string(dir.path().join("called")).unwrap();
    assert_eq!(called.lines().filter(|line| line.contains("--duration=1")).count(), 4, "{called}");
    let (status, text, _) = run("own", &["--guest", &guest("0-1,12")]);
    let missed = "timerlat (guest): not measured: it measured nothing on CPUs 1: ";
    assert!(status == Some(3) && text.contains(missed), "{text}");
    // A file that cannot be written loses no result.
    let (status, json, progress) = run("vmware", &["--json", "-", "--html", "/dev/full"]);
    assert!(status == Some(3) && progress.contains("/dev/full: writing the result: No space left"), "{progress}");
    assert_eq!(serde_json::from_str::<Value>(&json).unwrap()["verdict"], "fail");
}

#[test]
fn what_was_not_measured_is_no_pass() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    stand_ins(dir.path());
    program(dir.path(), "rtla", "echo 'Failed to enable timerlat tracer' >&2; exit 1");
    let run = |args: &[&str]| {
        let out = verify_by(dir.path(), &[["--duration", "1"].as_slice(), args].concat()).output().unwrap();
        (out.status.code(), String::from_utf8(out.stdout.clone()).unwrap(), said(&out))
    };
    let (status, text, _) = run(&["--test", "timerlat"]);
    assert!(status == Some(3) && text.contains("not measured: rtla ended with status 1: Failed to enable"), "{text}");
    let (status, text, _) =
        run(&["--test", "cyclictest", "--guest", "PATH=/nonexistent; exit 127", "--limits", "iec61850"]);
    assert!(status == Some(3) && text.contains("cyclictest (guest): not measured: no cyclictest there"), "{text}");
    program(dir.path(), "rtla", &format!("cat {RECORDED}/timerlat-hist.txt"));
    let (status, text, _) = run(&["--test", "timerlat", "--cpus", "0"]);
    assert!(status == Some(3) && text.contains("not measured: it measured nothing on CPUs 0: "), "{text}");
    program(dir.path(), "cyclictest", "exec sleep 600");
    let (status, _, said) = run(&["--test", "cyclictest", "--load", "echo full >&2; exit 4"]);
    assert!(status == Some(3) && said.contains("ended with status 4: full; correct --load"), "{said}");
}

fn exists(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| !stat.rsplit(')').next().unwrap().starts_with(" Z"))
}

#[test]
fn a_signal_ends_the_program_and_the_load() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name);
    program(dir.path(), "cyclictest", &format!("echo $$ > {}; exec sleep 600", file("program").display()));
    let load = format!("sleep 600 & echo $! > {}; wait", file("load").display());
    let args = ["--test", "cyclictest", "--load", &load];
    let started = verify_by(dir.path(), &args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child: Child = started.unwrap();
    let pid = |name: &str| loop {
        match std::fs::read_to_string(file(name)) {
            Ok(text) if text.ends_with('\n') => break text.trim().to_owned(),
            _ => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    let (program, load) = (pid("program"), pid("load"));
    assert!(exists(&program) && exists(&load));
    let own = rustix::process::Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    rustix::process::kill_process(own, rustix::process::Signal::INT).unwrap();
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(3), "{out:?}");
    assert!(said(&out).contains("interrupted: nothing is judged") && out.stdout.is_empty(), "{out:?}");
    for pid in [program, load] {
        let gone = (0..200).any(|_| {
            std::thread::sleep(Duration::from_millis(50));
            !exists(&pid)
        });
        assert!(gone, "{pid} runs on");
    }
}

/// The real cyclictest and oslat. Their limits are so wide that only the format of their output decides.
#[test]
fn real_programs_are_run_and_read() {
    if !is_root() {
        return;
    }
    let is_there = |name: &str| Command::new(name).arg("--help").output().is_ok();
    if !is_there("cyclictest") {
        println!("SKIPPED: this test needs cyclictest (rt-tests)");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let own = dir.path().join("own.toml");
    std::fs::write(&own, "[limits.wide]\ncyclictest-us = 1e9\noslat-us = 1e9\n").unwrap();
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    let several = online.trim() != "0";
    let tests = if several && is_there("oslat") { "cyclictest,oslat" } else { "cyclictest" };
    let limits = ["--limits-file", own.to_str().unwrap(), "--limits", "wide", "--json", "-", "--duration", "1"];
    let own = ["--test", tests, "--oslat-cpus", "0"];
    let out = verify(dir.path(), &[limits.as_slice(), &own].concat()).output().unwrap();
    let json: Value = serde_json::from_slice(&out.stdout).unwrap_or_else(|_| panic!("{out:?}"));
    for measured in json["measurements"].as_array().unwrap() {
        let why = measured["why"].as_str().unwrap_or_default();
        // A container may keep real-time priority from its root.
        if ["ermission", "ermitted", "policy"].iter().any(|word| why.contains(word)) {
            println!("SKIPPED: real-time priority is not allowed here: {why}");
            return;
        }
        assert_eq!(measured["state"], "measured", "{json:#}");
        assert!(measured["max_us"].as_f64().unwrap() > 0.0, "{json:#}");
    }
    assert_eq!((out.status.code(), &json["verdict"]), (Some(0), &"pass".into()), "{json:#}");
    assert!(json["host"]["versions"]["rt-tests"].is_string(), "{json:#}");
}

/// A thread of this process with this name, SCHED_FIFO priority and CPU, which runs `work` until `end`.
fn thread(name: &str, priority: u8, end: &Arc<AtomicBool>, work: impl Fn() + Send + 'static) -> JoinHandle<()> {
    let end = Arc::clone(end);
    let run = move || {
        let (tid, mut cpus) = (rustix::thread::gettid(), rustix::thread::CpuSet::new());
        cpus.set(0);
        rustix::thread::sched_setaffinity(None, &cpus).unwrap();
        let (priority, tid) = (priority.to_string(), tid.as_raw_nonzero().to_string());
        let set = Command::new("chrt").args(["-f", "-p", &priority, &tid]).status().unwrap();
        assert!(set.success(), "chrt: {set}");
        while !end.load(Ordering::Relaxed) {
            work();
        }
    };
    std::thread::Builder::new().name(name.to_owned()).spawn(run).unwrap()
}

/// Threads of this process in place of cyclictest's, and one of a higher priority that takes their CPU for 3 ms at a
/// time.
#[test]
fn a_late_wake_up_has_its_cause() {
    if !is_root() {
        return;
    }
    if !Path::new("/sys/kernel/tracing/instances").is_dir() {
        println!("SKIPPED: this test needs tracefs");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let json = r#"{"thread": {"0": {"cpu": 0, "cycles": 9, "min": 1, "avg": 2, "max": 1000000}}}"#;
    let write = format!("for word; do case $word in --json=*) echo '{json}' > ${{word#--json=}};; esac; done");
    program(dir.path(), "cyclictest", &format!("sleep 3; {write}"));
    let end = Arc::new(AtomicBool::new(false));
    let sleep = || std::thread::sleep(Duration::from_millis(2));
    let spin = || {
        std::thread::sleep(Duration::from_millis(40));
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(3) {}
    };
    let threads = [thread("cyclictest", 95, &end, sleep), thread("culprit", 99, &end, spin)];
    let run = |more: &[&str]| {
        let args = ["--test", "cyclictest", "--cpus", "0", "--duration", "3", "--json", "-"];
        let out = verify_by(dir.path(), &[args.as_slice(), more].concat()).output().unwrap();
        assert_eq!(out.status.code(), Some(1), "{out:?}");
        serde_json::from_slice::<Value>(&out.stdout).unwrap()
    };
    let (traced, untraced) = (run(&[]), run(&["--no-trace"]));
    end.store(true, Ordering::Relaxed);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    let late = traced["late"].as_array().unwrap();
    let culprit = |late: &&Value| late["causes"][0].as_str().is_some_and(|cause| cause.contains("us for culprit ("));
    let found: Vec<&Value> = late.iter().filter(culprit).collect();
    assert!(found.len() >= 10, "{traced:#}");
    for late in found {
        assert_eq!((&late["test"], &late["cpu"]), (&"cyclictest".into(), &0.into()));
        assert!(late["total_us"].as_f64().unwrap() > 40.0, "{late:#}");
        assert!(late["causes"][0].as_str().unwrap().contains(", FIFO 99) in its own code"), "{late:#}");
    }
    let cures = traced["late_by_cure"].as_array().unwrap();
    let outside = cures.iter().find(|of| of["cure"].as_str().unwrap().contains("outside Ontime's table"));
    assert!(outside.is_some_and(|of| of["times"].as_u64().unwrap() >= 10), "{cures:#?}");
    let cost = traced["traced_us"]["cyclictest"].as_f64().unwrap();
    assert!((0.01..1_000.0).contains(&cost), "{cost}");
    assert_eq!((&untraced["late"], &untraced["traced_us"]), (&serde_json::json!([]), &serde_json::json!({})));
}
