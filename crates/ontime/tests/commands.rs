//! Commands beside a daemon that is made up, and without one. None of them changes the host.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test ends by panicking"
)]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output};

use ontime_hostnet::{Journal, Knob, NicId, Original, Root, Value, journal};

fn ontime(dir: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ontime"));
    for (flag, name) in [("--run-dir", "run"), ("--state-dir", "state"), ("--config-dir", "etc")] {
        command.arg(flag).arg(dir.join(name));
    }
    command.args(args).output().unwrap()
}

/// Answers each path with a text, as long as the test runs.
fn daemon(dir: &Path, answers: &'static [(&'static str, &'static str)]) {
    std::fs::create_dir(dir.join("run")).unwrap();
    let listener = UnixListener::bind(dir.join("run/ontime.sock")).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut asked = String::new();
            BufReader::new(&stream).read_line(&mut asked).unwrap();
            let path = asked.split(' ').nth(1).unwrap();
            let (_, body) = answers.iter().find(|(known, _)| *known == path).unwrap();
            write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
        }
    });
}

#[test]
fn ps_says_what_the_daemon_does_not_like() {
    const STATUS: &str = r#"{"version": "1", "pid": 1, "kernel": "7.2", "state": "applied", "method": "partitioned",
        "method_by": "default", "passes": 1, "last_pass_seconds": 0.01,
        "caps": {"in_force": true, "why": null, "protections_off": true, "threads": []},
        "polling": [], "knobs": [], "drift": 0, "findings": [],
        "problems": [{"subject": "plc", "message": "its Ontime metadata is not used: why; what to do"}]}"#;
    let dir = tempfile::tempdir().unwrap();
    daemon(dir.path(), &[("/v1/tenants", "[]"), ("/v1/status", STATUS)]);
    let out = ontime(dir.path(), &["ps"]);
    let said = String::from_utf8(out.stderr).unwrap();
    assert_eq!(said, "ontime: plc: its Ontime metadata is not used: why; what to do\n");
    assert_eq!(out.status.code(), Some(0));
}

#[test]
fn a_reset_with_nothing_to_give_back_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state/originals");
    let reset = || {
        let out = ontime(dir.path(), &["reset"]);
        assert_eq!(out.status.code(), Some(0), "{out:?}");
        String::from_utf8(out.stdout).unwrap()
    };
    assert!(reset().contains("Nothing to give back: no original value is kept"));
    // Interfaces and a VM that have gone since.
    let gone = |name: &str, feature: &str| Original {
        knob: Knob::Feature { nic: NicId { ifindex: 0x7fff_fff0, name: name.to_owned() }, feature: feature.to_owned() },
        value: Value::Text("on".to_owned()),
    };
    let mut journal = Journal::open(&path, &journal::running_boot_id().unwrap()).unwrap();
    journal.keep(vec![gone("veth7", "rx-gro"), gone("tap9", "tx-tcp-segmentation")]).unwrap();
    drop(journal);
    let said = reset();
    assert!(said.contains("2 knobs belong to a thread, VM or interface that no longer exists"), "{said}");
    assert!(reset().contains("Nothing to give back"));
}

#[test]
fn a_reset_that_leaves_something_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state/originals");
    let mut journal = Journal::open(&path, &journal::running_boot_id().unwrap()).unwrap();
    let gone = Knob::HostFile { root: Root::Proc, path: "sys/no/such/file".to_owned() };
    journal.keep(vec![Original { knob: gone.clone(), value: Value::Text("1".to_owned()) }]).unwrap();
    drop(journal);
    let out = ontime(dir.path(), &["reset"]);
    assert_eq!(out.status.code(), Some(1), "{out:?}");
    let journal = Journal::open(&path, &journal::running_boot_id().unwrap()).unwrap();
    assert!(journal.has(&gone));
}
