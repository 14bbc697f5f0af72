//! Commands beside a simulated daemon, and without a daemon. None of them changes the host.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test ends by panicking")]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use ontime_hostnet::{Journal, Knob, NicId, Original, Root, Value, journal};

/// The user `nobody`, without any rights.
const NOBODY: u32 = 65_534;

fn ontime(dir: &Path, args: &[&str]) -> Output {
    command(env!("CARGO_BIN_EXE_ontime").as_ref(), dir, args).output().unwrap()
}

fn command(program: &Path, dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    for (flag, name) in [("--run-dir", "run"), ("--state-dir", "state"), ("--config-dir", "etc")] {
        command.arg(flag).arg(dir.join(name));
    }
    command.args(args);
    command
}

/// A copy of the program that everybody may run, and directories that everybody may read.
struct Open {
    dir: tempfile::TempDir,
    program: PathBuf,
}

impl Open {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("ontime");
        // By another process: a child that another test starts meanwhile would have this one's descriptor for writing
        // until its exec, and the copy could not be executed for so long (ETXTBSY).
        let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_ontime")).arg(&program).status().unwrap();
        assert!(copied.success());
        std::fs::create_dir(dir.path().join("etc")).unwrap();
        for path in [dir.path(), &dir.path().join("etc"), &program] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        Self { dir, program }
    }

    fn as_nobody(&self, args: &[&str]) -> Output {
        command(&self.program, self.dir.path(), args).uid(NOBODY).gid(NOBODY).output().unwrap()
    }
}

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("SKIPPED: this test needs root");
    }
    root
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A simulated daemon that answers each path with a fixed text, for as long as the test runs.
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
    daemon(dir.path(), &[("/v1/tenants", "{\"schema_version\": 1, \"tenants\": []}"), ("/v1/status", STATUS)]);
    let out = ontime(dir.path(), &["ps"]);
    let said = String::from_utf8(out.stderr).unwrap();
    assert_eq!(said, "ontime: plc: its Ontime metadata is not used: why; what to do\n");
    assert_eq!(text(&out.stdout), "no tenant: no VM and no container runs on this host\n");
    assert_eq!(out.status.code(), Some(0));
}

#[test]
fn ps_is_unknown_where_the_daemon_could_not_see_all() {
    const TENANTS: &str =
        r#"{"schema_version": 1, "tenants": [], "unseen": [{"subject": "/docker/ab", "message": "cgroup v1; boot"}]}"#;
    const STATUS: &str = r#"{"version": "1", "pid": 1, "kernel": "7.2", "state": "applied", "method": "partitioned",
        "method_by": "default", "passes": 1, "last_pass_seconds": 0.01,
        "caps": {"in_force": true, "why": null, "protections_off": true, "threads": []},
        "polling": [], "knobs": [], "drift": 0, "findings": [],
        "problems": [{"subject": "/docker/ab", "message": "cgroup v1; boot"}, {"subject": "a", "message": "b"}]}"#;
    let dir = tempfile::tempdir().unwrap();
    daemon(dir.path(), &[("/v1/tenants", TENANTS), ("/v1/status", STATUS)]);
    let out = ontime(dir.path(), &["ps"]);
    assert_eq!(text(&out.stderr), "ontime: a: b\nontime: not seen: /docker/ab: cgroup v1; boot\n");
    assert_eq!(text(&out.stdout), "no tenant: no VM and no container is among what could be seen\n");
    assert_eq!(out.status.code(), Some(3));
}

/// On a hybrid host every command says what is not seen, with and without a daemon, and none says that all is well.
#[test]
fn what_the_daemon_could_not_see_makes_every_command_unknown() {
    const UNSEEN: &str = r#"[{"subject": "/docker/ab", "message": "cgroup v1; boot"}]"#;
    const TENANTS: &str = r#"{"schema_version": 1, "tenants": [], "unseen": UNSEEN}"#;
    const NICS: &str = r#"{"schema_version": 1, "nics": [], "findings": [], "unseen": UNSEEN}"#;
    const STATUS: &str = r#"{"version": "1", "pid": 1, "kernel": "7.2", "state": "applied", "method": "partitioned",
        "method_by": "default", "passes": 1, "last_pass_seconds": 0.01,
        "caps": {"in_force": true, "why": null, "protections_off": true, "threads": []},
        "polling": [], "knobs": [], "drift": 0, "findings": [], "problems": UNSEEN, "unseen": UNSEEN}"#;
    let with = |text: &str| -> &'static str { Box::leak(text.replace("UNSEEN", UNSEEN).into_boxed_str()) };
    let answers = [("/v1/tenants", with(TENANTS)), ("/v1/nics", with(NICS)), ("/v1/status", with(STATUS))];
    let dir = tempfile::tempdir().unwrap();
    daemon(dir.path(), Box::leak(Box::new(answers)));
    for args in [
        ["ps"].as_slice(),
        &["ps", "--json"],
        &["status"],
        &["status", "--json"],
        &["net", "status"],
        &["net", "status", "--json"],
        &["net", "status", "eth0"],
    ] {
        let out = ontime(dir.path(), args);
        assert_eq!(text(&out.stderr), "ontime: not seen: /docker/ab: cgroup v1; boot\n", "{args:?}");
        assert_eq!(out.status.code(), Some(3), "{args:?}: {out:?}");
        if args.last() == Some(&"--json") && args != ["status", "--json"] {
            assert!(text(&out.stdout).contains("\"schema_version\": 1"), "{args:?}: {out:?}");
        }
    }
    let shown = text(&ontime(dir.path(), &["net", "status"]).stdout);
    assert_eq!(shown, "no NIC: no network interface but the loopback is among what could be seen\n");
}

/// The same without a daemon: a process that is in a container by cgroup v1 alone, in namespaces of the test.
#[test]
fn without_a_daemon_a_hybrid_host_is_unknown_to_every_command() {
    const HOST: &str = "set -e
        sleep 600 & sleeper=$!
        printf '5:memory:/docker/%s\\n0::/\\n' $(printf '%064d' 7) > $1/cgroup
        mount --bind $1/cgroup /proc/$sleeper/cgroup
        set +e
        for args in 'ps' 'net status' 'apply --dry-run' 'doctor --json'; do
            $2 $args --run-dir $1/run --state-dir $1/state --config-dir $1/etc > $1/out 2> $1/err
            echo \"$args: $? $(grep -c 'not seen: /docker/0' $1/err)\"
        done
        cat $1/out
        kill $sleeper";
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new("unshare");
    command.args([
        "--mount",
        "--pid",
        "--net",
        "--fork",
        "--mount-proc",
        "--propagation",
        "private",
        "sh",
        "-c",
        HOST,
        "sh",
    ]);
    let out = command.arg(dir.path()).arg(env!("CARGO_BIN_EXE_ontime")).output().unwrap();
    let said = text(&out.stdout);
    if said.is_empty() {
        println!("SKIPPED: no namespaces, or no mounts in /proc: {}", text(&out.stderr));
        return;
    }
    for args in ["ps", "net status", "apply --dry-run", "doctor --json"] {
        assert!(said.contains(&format!("{args}: 3 1\n")), "{args}: {out:?}");
    }
    let diagnosis: serde_json::Value = serde_json::from_str(&said[said.find('{').unwrap()..]).unwrap();
    let note =
        diagnosis["notes"].as_array().unwrap().iter().find(|note| note["about"].as_str().unwrap().contains("docker"));
    let why = note.unwrap()["why"].as_str().unwrap();
    assert!(why.contains("by cgroup v1 alone") && why.contains("boot with cgroup v2 alone"), "{why}");
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
    assert!(reset().contains("Nothing to restore: no original value is stored"));
    // Interfaces and a VM that no longer exist.
    let gone = |name: &str, feature: &str| Original {
        knob: Knob::Feature { nic: NicId { ifindex: 0x7fff_fff0, name: name.to_owned() }, feature: feature.to_owned() },
        value: Value::Text("on".to_owned()),
    };
    let mut journal = Journal::open(&path, &journal::running_boot_id().unwrap()).unwrap();
    journal.store(vec![gone("veth7", "rx-gro"), gone("tap9", "tx-tcp-segmentation")]).unwrap();
    drop(journal);
    let said = reset();
    assert!(said.contains("2 knobs belong to a thread, VM or interface that no longer exists"), "{said}");
    assert!(reset().contains("Nothing to restore"));
}

#[test]
fn a_reset_that_leaves_something_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state/originals");
    let mut journal = Journal::open(&path, &journal::running_boot_id().unwrap()).unwrap();
    let gone = Knob::HostFile { root: Root::Proc, path: "sys/no/such/file".to_owned() };
    journal.store(vec![Original { knob: gone.clone(), value: Value::Text("1".to_owned()) }]).unwrap();
    drop(journal);
    let out = ontime(dir.path(), &["reset"]);
    assert_eq!(out.status.code(), Some(1), "{out:?}");
    let journal = Journal::open(&path, &journal::running_boot_id().unwrap()).unwrap();
    assert!(journal.has(&gone));
}

/// After a downgrade: the journal has a knob that this version does not know, and one that it knows.
#[test]
fn a_downgrade_gives_back_what_it_knows_and_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state/originals");
    std::fs::create_dir_all(dir.path().join("state")).unwrap();
    std::fs::create_dir_all(dir.path().join("etc")).unwrap();
    let boot_id = journal::running_boot_id().unwrap();
    let gone = Original {
        knob: Knob::Feature {
            nic: NicId { ifindex: 0x7fff_fff0, name: "veth7".to_owned() },
            feature: "gro".to_owned(),
        },
        value: Value::Text("on".to_owned()),
    };
    let later = "{\"knob\":{\"knob\":\"uclamp\",\"thread\":7},\"value\":{\"clamp\":[0,1024]}}".to_owned();
    let written = journal::format(&boot_id, std::slice::from_ref(&later), &[gone]).unwrap();
    std::fs::write(&path, &written).unwrap();
    for args in [["daemon"].as_slice(), &["apply", "--dry-run"]] {
        let out = ontime(dir.path(), args);
        let said = text(&out.stderr);
        assert_ne!(out.status.code(), Some(0), "{args:?}: {said}");
        assert!(said.contains("another version of Ontime") && said.contains("`ontime reset`"), "{args:?}: {said}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), written, "{args:?}");
    }
    assert!(!text(&ontime(dir.path(), &["ps"]).stderr).contains("another version"));
    for gone in ["1 knob belongs to a thread, VM or interface that no longer exists", "no original value"] {
        let out = ontime(dir.path(), &["reset"]);
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{out:?}");
        assert!(text(&out.stdout).contains(gone), "{out:?}");
        assert!(said.contains("uclamp") && said.contains("`ontime reset` of that version, or reboot"), "{said}");
        let left = journal::format(&boot_id, std::slice::from_ref(&later), &[]).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), left);
    }
    let out = ontime(dir.path(), &["reset", "--protections"]);
    assert_eq!(out.status.code(), Some(1), "{out:?}");
}

#[test]
fn a_user_without_rights_is_told_what_was_not_seen_and_nothing_looks_well() {
    if !is_root() {
        return;
    }
    let open = Open::new();
    for args in [
        ["ps"].as_slice(),
        &["ps", "--json"],
        &["net", "status"],
        &["net", "status", "--json"],
        &["trace", "--duration", "1"],
        &["doctor"],
        &["doctor", "--json"],
        &["apply", "--dry-run"],
    ] {
        let out = open.as_nobody(args);
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(3), "{args:?}: {said}");
        // Within 80 columns, as the page of doctor.
        let wanted = "ontime: not seen: user 65534 sees neither other users' processes nor all of the\n  kernel's \
                      settings; run this as root\n";
        assert!(said.contains(wanted), "{args:?}: {said}");
    }
    let shown = text(&open.as_nobody(&["ps"]).stdout);
    assert!(!shown.contains("runs on this host"), "{shown}");
    assert_eq!(open.as_nobody(&["status"]).status.code(), Some(3));
}

#[test]
fn a_socket_that_may_not_be_opened_is_not_taken_for_no_daemon() {
    if !is_root() {
        return;
    }
    let open = Open::new();
    daemon(open.dir.path(), &[]);
    let (run, socket) = (open.dir.path().join("run"), open.dir.path().join("run/ontime.sock"));
    std::fs::set_permissions(&run, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o660)).unwrap();
    for args in [["status"].as_slice(), &["top", "--once"], &["apply"], &["reset"], &["reload"], &["ps"], &["doctor"]] {
        let out = open.as_nobody(args);
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(3), "{args:?}: {said}");
        assert!(said.contains("ermission denied") && !said.contains("no daemon"), "{args:?}: {said}");
    }
    let sockets = || text(&open.as_nobody(&["sockets", "web"]).stderr);
    assert!(sockets().contains("no device process serves web; start it"), "{}", sockets());
    std::fs::set_permissions(&run, std::fs::Permissions::from_mode(0o700)).unwrap();
    assert!(sockets().contains("whether a device process serves web cannot be seen; run as root"), "{}", sockets());
    std::fs::set_permissions(&run, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::remove_file(&socket).unwrap();
    let said = text(&open.as_nobody(&["status"]).stderr);
    assert!(said.contains("no daemon at") && said.contains("systemctl start ontimed"), "{said}");
}

#[test]
fn a_vm_without_open_sockets_is_told_and_no_empty_table() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("run/device/web");
    std::fs::create_dir_all(&place).unwrap();
    let listener = UnixListener::bind(place.join("status.sock")).unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        write!(stream, r#"{{"vm": "web", "sockets": [], "deadlines": [], "counters": [["calls", 3]]}}"#).unwrap();
    });
    let out = ontime(dir.path(), &["sockets", "web"]);
    assert_eq!(text(&out.stdout), "no socket: web has none open\n\ncalls 3\n");
    assert_eq!(out.status.code(), Some(0));
}

#[test]
fn a_usage_error_is_no_state_of_the_host() {
    let dir = tempfile::tempdir().unwrap();
    for args in [
        ["doctor", "--nosuch"].as_slice(),
        &["status", "nosuch"],
        &["nosuch"],
        &[],
        &["apply", "--dry-run", "--method", "fast"],
        &["net", "status", "nosuch0"],
        &["attach", "nosuch"],
        &["attach", "nosuch", "--libvirt"],
    ] {
        let out = ontime(dir.path(), args);
        assert_eq!(out.status.code(), Some(64), "{args:?}: {out:?}");
        assert!(out.stdout.is_empty() && !out.stderr.is_empty(), "{args:?}: {out:?}");
    }
    for args in [["--help"].as_slice(), &["--version"], &["doctor", "--help"]] {
        assert_eq!(ontime(dir.path(), args).status.code(), Some(0), "{args:?}");
    }
    let said = text(&ontime(dir.path(), &["attach", "nosuch"]).stderr);
    assert!(said.contains("no table [vm.nosuch] in") && said.contains("sockets.toml; write one"), "{said}");
    std::fs::create_dir(dir.path().join("etc")).unwrap();
    std::fs::write(dir.path().join("etc/sockets.toml"), "[vm.web]\n").unwrap();
    assert_eq!(ontime(dir.path(), &["attach", "web"]).status.code(), Some(0));
}

#[test]
fn a_wrong_file_has_one_status_in_every_command() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("etc")).unwrap();
    assert_eq!(ontime(dir.path(), &["check"]).status.code(), Some(0));
    std::fs::write(
        dir.path().join("etc/sched.toml"),
        "[[reservation]]\nname = \"plc-1\"\nbudget = \"12ms\"\nperiod = \"10ms\"\n",
    )
    .unwrap();
    std::fs::write(dir.path().join("etc/host.toml"), "\n[nic.eth0]\npoll_cpu = -7\n").unwrap();
    for args in [["check"].as_slice(), &["doctor"], &["ps"], &["net", "status"], &["apply", "--dry-run"]] {
        let out = ontime(dir.path(), args);
        assert_eq!(out.status.code(), Some(78), "{args:?}: {out:?}");
    }
    let out = ontime(dir.path(), &["check"]);
    let (shown, said) = (text(&out.stdout), text(&out.stderr));
    assert_eq!(shown.lines().filter(|line| line.starts_with("WRONG ")).count(), 2, "{shown}");
    assert!(
        said.contains("sched.toml:3:10: `plc-1`: a budget of 12 ms is not above 0 and at most the period, 10 ms"),
        "{said}"
    );
    assert!(said.contains("host.toml:3:12: ") && said.contains("expected a whole number from 0"), "{said}");
    std::fs::write(dir.path().join("etc/sched.toml"), "").unwrap();
    std::fs::write(dir.path().join("etc/host.toml"), "").unwrap();
    std::fs::write(dir.path().join("etc/tenant.toml"), "").unwrap();
    let out = ontime(dir.path(), &["check"]);
    assert_eq!(out.status.code(), Some(1), "{out:?}");
    assert!(text(&out.stdout).contains("tenant.toml: Ontime reads no file of this name"), "{out:?}");
}

#[test]
fn a_dry_run_needs_no_daemon_and_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let out = ontime(dir.path(), &["apply", "--dry-run", "--method", "partitioned", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!((&report["dry_run"], &report["method"]), (&true.into(), &"partitioned".into()));
    let knobs = report["changes"].as_array().unwrap().len() as u64 + report["unchanged"].as_u64().unwrap();
    assert!(knobs > 0, "{report}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    // Commands that change something need a daemon.
    let out = ontime(dir.path(), &["apply"]);
    assert_eq!(out.status.code(), Some(3));
    assert!(text(&out.stderr).contains("no daemon at"), "{out:?}");
    assert_eq!(ontime(dir.path(), &["reload"]).status.code(), Some(3));
}

#[test]
fn a_critical_finding_changes_the_exit_status() {
    const FINDING: &str =
        r#"[{"rule": "rt-tx-queue", "severity": "critical", "object": "eth0", "found": "shared", "remedy": "part"}]"#;
    const STATUS: &str = r#"{"version": "1", "pid": 1, "kernel": "7.2", "state": "applied", "method": "partitioned",
        "method_by": "default", "passes": 1, "last_pass_seconds": 0.01,
        "caps": {"in_force": true, "why": null, "protections_off": true, "threads": []},
        "polling": [], "knobs": [], "drift": 0, "findings": FINDING, "problems": []}"#;
    const REPORT: &str =
        r#"{"method": "partitioned", "dry_run": false, "changes": [], "unchanged": 1, "findings": FINDING}"#;
    let dir = tempfile::tempdir().unwrap();
    let with = |text: &str| -> &'static str { Box::leak(text.replace("FINDING", FINDING).into_boxed_str()) };
    let answers = [("/v1/status", with(STATUS)), ("/v1/apply", with(REPORT)), ("/v1/reload", with(REPORT))];
    daemon(dir.path(), Box::leak(Box::new(answers)));
    for args in [["status"].as_slice(), &["status", "--json"], &["apply"], &["apply", "--json"], &["reload"]] {
        let out = ontime(dir.path(), args);
        assert_eq!(out.status.code(), Some(2), "{args:?}: {out:?}");
        assert!(text(&out.stdout).contains("shared"), "{args:?}: {out:?}");
    }
}

/// As in `ontime reload | true`.
#[test]
fn an_output_whose_reader_has_gone_is_neither_an_error_nor_a_panic() {
    const REPORT: &str =
        r#"{"method": "partitioned", "dry_run": false, "changes": [], "unchanged": 1, "findings": []}"#;
    let dir = tempfile::tempdir().unwrap();
    daemon(dir.path(), &[("/v1/apply", REPORT), ("/v1/reload", REPORT), ("/v1/reset", REPORT)]);
    for args in [["reload"].as_slice(), &["reload", "--json"], &["apply"], &["reset"]] {
        let (reader, output) = std::os::unix::net::UnixStream::pair().unwrap();
        drop(reader);
        let mut command = command(env!("CARGO_BIN_EXE_ontime").as_ref(), dir.path(), args);
        let out = command.stdout(std::os::fd::OwnedFd::from(output)).output().unwrap();
        assert_eq!((out.status.code(), text(&out.stderr).as_str()), (Some(0), ""), "{args:?}");
    }
}

/// As in `ontime reload 2>&1 | true`, or on a terminal that was closed.
#[test]
fn an_error_that_nobody_reads_keeps_its_status() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("etc")).unwrap();
    std::fs::write(dir.path().join("etc/daemon.toml"), "mode = 1\n").unwrap();
    for (args, wanted) in [(["status"], 3), (["check"], 78)] {
        let (reader, errors) = std::os::unix::net::UnixStream::pair().unwrap();
        drop(reader);
        let mut command = command(env!("CARGO_BIN_EXE_ontime").as_ref(), dir.path(), &args);
        let status = command.stdout(Stdio::null()).stderr(std::os::fd::OwnedFd::from(errors)).status().unwrap();
        assert_eq!(status.code(), Some(wanted), "{args:?}");
    }
}

/// A NIC whose NAPI this kernel cannot thread, in namespaces of the test. The daemon observes and sets nothing.
#[test]
fn what_a_real_look_finds_critical_changes_the_exit_status() {
    const HOST: &str = "set -e
        ip link add crit0 type ifb; ip link set crit0 up
        mount --bind $1/net /sys/class/net
        set +e
        ($2 apply --dry-run --run-dir $1/run --state-dir $1/state --config-dir $1/etc; echo apply $?) 2>&1
        $2 daemon --run-dir $1/run --state-dir $1/state --config-dir $1/etc 2> $1/log & daemon=$!
        for i in $(seq 600); do [ -S $1/run/ontime.sock ] && break; sleep 0.1; done
        ($2 status --run-dir $1/run; echo status $?) 2>&1
        kill $daemon; wait $daemon";
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let make = |name: &str| std::fs::create_dir_all(dir.path().join(name)).unwrap();
    ["etc", "net/crit0/device", "net/crit0/queues/rx-0", "net/crit0/queues/tx-0"].iter().for_each(|name| make(name));
    std::fs::write(dir.path().join("etc/daemon.toml"), "mode = \"observe\"\n").unwrap();
    let mut command = Command::new("unshare");
    command.args(["--mount", "--net", "--propagation", "private", "sh", "-c", HOST, "sh"]);
    let out = command.arg(dir.path()).arg(env!("CARGO_BIN_EXE_ontime")).output().unwrap();
    let said = text(&out.stdout);
    if said.is_empty() {
        println!("SKIPPED: no namespaces, or no links of type ifb: {}", text(&out.stderr));
        return;
    }
    assert!(said.contains("\napply 2\n") && said.contains("\nstatus 2\n"), "{out:?}");
    assert_eq!(said.matches("cannot thread NAPI").count(), 2, "{said}");
    assert!(said.contains("observing: nothing is set"), "{said}");
}

#[test]
fn top_answers_keys_and_leaves_the_terminal_as_it_was() {
    use std::io::{Read, Write};
    const RESERVATIONS: &str = r#"{"backend": "paced", "off": null, "cpus": [0], "reserve": 0.05, "reserved": 0.3,
        "vcpus": [], "refused": [],
        "absent": ["a-vm-whose-name-is-longer-than-eighty-columns-because-names-may-be-long-xxxxxxxxxxx"],
        "slice": null}"#;
    if Command::new("script").arg("--version").output().is_err() {
        println!("SKIPPED: this test needs script (bsdutils)");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    daemon(dir.path(), &[("/v1/reservations", RESERVATIONS)]);
    let top =
        format!("{} top --interval 0.1 --run-dir {}", env!("CARGO_BIN_EXE_ontime"), dir.path().join("run").display());
    let script = format!("stty cols 80 rows 24; stty -g; {top}; echo status $?; stty -g");
    let mut child = Command::new("script")
        .args(["-qec", &script, "/dev/null"])
        .env("SHELL", "/bin/sh")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut keys, mut screen) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let mut said = String::new();
    let mut read_until = |words: &str| {
        let mut bytes = [0; 4096];
        while !said.contains(words) {
            let count = screen.read(&mut bytes).unwrap();
            assert!(count > 0, "it ended before `{words}`: {said}");
            said.push_str(&String::from_utf8_lossy(&bytes[..count]));
        }
        said.clone()
    };
    let first = read_until("CPUs reserved of 1");
    assert!(first.contains("\x1b[?1049h"), "{first:?}");
    keys.write_all(b"?").unwrap();
    read_until("sort by misses");
    keys.write_all(b"q").unwrap();
    let all = read_until("status 0\r\n");
    assert!(all.contains("\x1b[?1049l"), "{all:?}");
    let _ = child.wait();
    let mut rest = String::new();
    let _ = screen.read_to_string(&mut rest);
    let all = all + &rest;
    let modes: Vec<&str> = all.lines().filter(|line| line.matches(':').count() > 10).collect();
    assert!(modes.len() == 2 && modes[0] == modes[1], "{all:?}");
    // No line is wider than the terminal.
    let text = all.split("\x1b[?1049h").nth(1).unwrap().split("\x1b[?1049l").next().unwrap();
    for line in text.split(['\n', '\r']) {
        let line = line
            .replace("\x1b[?25l", "")
            .replace("\x1b[?25h", "")
            .replace("\x1b[H", "\n")
            .replace("\x1b[K", "")
            .replace("\x1b[J", "");
        assert!(line.split('\n').all(|line| line.chars().count() <= 80), "{line:?}");
    }
}
