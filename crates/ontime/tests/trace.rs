//! `ontime trace` on this machine: a server in a cgroup of its own behind a veth pair, with requests from another
//! network namespace.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test ends by panicking")]

mod support;

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::Value;
use support::until;

/// The server's address.
const SERVER: &str = "10.99.7.1";

/// One test at a time, because traces are counted on a quiet path.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Whether these tests can run here. Prints what is missing.
fn possible() -> bool {
    let answers = |program: &str, argument: &str| {
        let run = Command::new(program).arg(argument).stdout(Stdio::null()).stderr(Stdio::null()).status();
        run.is_ok_and(|status| status.success())
    };
    let missing = if !rustix::process::geteuid().is_root() {
        "root"
    } else if !Path::new("/sys/kernel/tracing").is_dir() {
        "a kernel with tracefs"
    } else if cgroups().is_none() {
        "cgroup v2"
    } else if !answers("sockperf", "--version") || !answers("ip", "-V") {
        "sockperf and ip"
    } else {
        return true;
    };
    println!("SKIPPED: this test needs {missing}");
    false
}

/// The mount point of cgroup v2.
fn cgroups() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/mounts").ok()?;
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some("cgroup2"))?;
    line.split(' ').nth(1).map(PathBuf::from)
}

/// The server in its cgroup, two network namespaces, and an RT rule for the server.
struct Place {
    _alone: MutexGuard<'static, ()>,
    dir: tempfile::TempDir,
    tenant: String,
    cgroup: PathBuf,
    inside: String,
    outside: String,
    server: Option<Child>,
}

impl Place {
    fn if_possible() -> Option<Self> {
        possible().then(Self::new)
    }

    fn new() -> Self {
        let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let pid = std::process::id();
        let tenant = format!("ontime-test-{pid}.scope");
        let mut place = Self {
            _alone: alone,
            dir: tempfile::tempdir().unwrap(),
            cgroup: cgroups().unwrap().join(&tenant),
            inside: format!("ontime-in-{pid}"),
            outside: format!("ontime-out-{pid}"),
            tenant,
            server: None,
        };
        fs::create_dir(&place.cgroup).unwrap();
        let rule = format!("[[tenant]]\ncgroup = \"/{}\"\nclass = \"rt\"\nlevel = 0\n", place.tenant);
        fs::write(place.dir.path().join("tenants.toml"), rule).unwrap();
        let (inside, outside) = (place.inside.clone(), place.outside.clone());
        for words in [
            format!("netns add {inside}"),
            format!("netns add {outside}"),
            format!("-n {inside} link add rtn type veth peer name peer netns {outside}"),
            format!("-n {inside} address add {SERVER}/24 dev rtn"),
            format!("-n {outside} address add 10.99.7.2/24 dev peer"),
            format!("-n {inside} link set rtn up"),
            format!("-n {outside} link set peer up"),
        ] {
            assert!(Command::new("ip").args(words.split(' ')).status().unwrap().success(), "ip {words}");
        }
        // Enter the cgroup first: `ip netns exec` mounts another /sys, which hides a cgroup file system mounted below
        // it.
        let serve = format!(
            "echo $$ > {}/cgroup.procs && exec ip netns exec {inside} sockperf server -i {SERVER} -p 7007",
            place.cgroup.display()
        );
        let server = Command::new("sh").args(["-c", &serve]).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        place.server = Some(server.unwrap());
        until("the server", || {
            let sockets = place.at(&place.inside, "cat").arg("/proc/net/udp").output().unwrap();
            String::from_utf8_lossy(&sockets.stdout).contains(":1B5F").then_some(())
        });
        place
    }

    fn at(&self, namespace: &str, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", namespace, program]);
        command
    }

    /// Sends this many requests a second until dropped.
    fn ask(&self, rate: &str) -> Killed {
        let ask = ["ping-pong", "-i", SERVER, "-p", "7007", "-t", "600", "--mps", rate];
        let mut command = self.at(&self.outside, "sockperf");
        Killed(command.args(ask).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }

    fn trace(&self, words: &[&str]) -> Command {
        let mut command = self.at(&self.inside, env!("CARGO_BIN_EXE_ontime"));
        command.arg("--config-dir").arg(self.dir.path()).arg("trace").args(words);
        command
    }

    fn traced(&self, words: &[&str]) -> Output {
        let own = ["--container", &self.tenant, "--nic", "rtn", "--quiet"];
        self.trace(&[&own, words].concat()).output().unwrap()
    }

    /// Traces for longer and longer until there are three requests, because the machine may have other work. Returns
    /// the last run's output and report, and the number of its requests.
    fn traced_requests(&self, words: &[&str], report: impl Fn(&Output) -> Vec<u8>) -> (Output, Value, u64) {
        for duration in ["3", "15", "75"] {
            let output = self.traced(&[&["--duration", duration], words].concat());
            assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
            let report: Value = serde_json::from_slice(&report(&output)).unwrap();
            assert_eq!(report["schema_version"], 1, "{report}");
            let requests = report["paths"][0]["counts"]["requests"].as_u64().unwrap();
            if requests >= 3 {
                return (output, report, requests);
            }
            println!("{requests} requests in {duration} s: {report}");
        }
        panic!("fewer than three requests in 75 seconds");
    }

    fn file(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(mut server) = self.server.take() {
            let _ = server.kill();
            let _ = server.wait();
        }
        for name in [&self.inside, &self.outside] {
            let _ = Command::new("ip").args(["netns", "del", name]).status();
        }
        // The directory can be removed only once the kernel has released the process.
        for _ in 0..100 {
            if fs::remove_dir(&self.cgroup).is_ok() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Tracing instances whose names begin with this prefix.
fn instances(prefix: &str) -> Vec<String> {
    let output = Command::new("sh")
        .args(["-c", "mount -t tracefs none /sys/kernel/tracing 2> /dev/null; ls /sys/kernel/tracing/instances"])
        .output();
    let text = String::from_utf8(output.unwrap().stdout).unwrap();
    text.lines().filter(|name| name.starts_with(prefix)).map(str::to_owned).collect()
}

#[test]
fn requests_of_a_running_server_are_divided_and_reported_in_every_form() {
    let Some(place) = Place::if_possible() else { return };
    let _asked = place.ask("200");
    let [json, html, perfetto, record] = ["t.json", "t.html", "t.pftrace", "t.jsonl"].map(|name| place.file(name));
    let words = ["--json", &json, "--html", &html, "--perfetto", &perfetto, "--record", &record, "--worst", "3"];
    let (output, report, requests) = place.traced_requests(&words, |_| fs::read(&json).unwrap());
    let path = &report["paths"][0];
    assert_eq!(
        (&path["tenant"], &path["class"], &path["vm"]),
        (&place.tenant.as_str().into(), &"rt0".into(), &false.into())
    );
    let mean = |figures: &Value| figures["mean"].as_f64().unwrap();
    let parts: f64 = ["host receive", "guest", "host send"].iter().map(|name| mean(&path["segments"][name])).sum();
    assert!((parts - mean(&path["total"])).abs() < 0.1, "{path}");
    assert!(report["tracing"]["probe_ns"].as_f64().unwrap() > 10.0);
    let worst = report["worst"].as_array().unwrap();
    assert_eq!(worst.len(), 3);
    assert_eq!(worst[0]["total_us"], path["max_us"]);
    let page = fs::read_to_string(&html).unwrap();
    assert!(page.matches("<svg class=\"rows\"").count() == 3 && !page.contains("<script"));
    assert!(fs::metadata(&perfetto).unwrap().len() > 300);
    // The record starts with what is watched; the events follow.
    let recorded = fs::read_to_string(&record).unwrap();
    assert!(recorded.starts_with("{\"paths\":") && recorded.lines().count() as u64 > 8 * requests);
    assert!(String::from_utf8(output.stdout).unwrap().contains("host receive"));
    assert_eq!(instances("ontime-"), Vec::<String>::new());
}

#[test]
fn promtool_is_content_with_the_histograms() {
    let Some(tool) = support::tool("promtool") else { return };
    let Some(place) = Place::if_possible() else { return };
    let _asked = place.ask("200");
    let file = place.file("trace.prom");
    place.traced_requests(&["--textfile", &file, "--json", "-"], |output| output.stdout.clone());
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains("\nontime_trace_request_seconds_bucket{"), "{text}");
    assert_eq!(support::promtool(&tool, &["check", "metrics"], &text), "", "{text}");
}

#[test]
fn segments_alone_take_fewer_events() {
    let Some(place) = Place::if_possible() else { return };
    let _asked = place.ask("200");
    let (_, report, requests) =
        place.traced_requests(&["--segments-only", "--json", "-"], |output| output.stdout.clone());
    let events: u64 =
        report["tracing"]["events"].as_object().unwrap().values().map(|count| count.as_u64().unwrap()).sum();
    // Events: receive, wake-up, switch, two each of queue and driver; and packets that are no requests.
    assert!(events < 10 * (requests + 20), "{events} events for {requests} requests");
}

/// Whether a counter of a trace's rings is above 0. `what` is its name in `per_cpu/cpu*/stats`.
fn counted(what: &str) -> Option<()> {
    let dirs = instances("ontime-trace-").into_iter().map(|name| Path::new("/sys/kernel/tracing/instances").join(name));
    let cpus = dirs.flat_map(|dir| fs::read_dir(dir.join("per_cpu")).unwrap()).map(|cpu| cpu.unwrap().path());
    let is_it = |line: &str| line.strip_prefix(what).is_some_and(|rest| rest.starts_with(": ") && rest != ": 0");
    cpus.flat_map(|cpu| fs::read_to_string(cpu.join("stats"))).any(|text| text.lines().any(is_it)).then_some(())
}

#[test]
fn a_flood_of_events_is_lost_in_the_open() {
    let Some(place) = Place::if_possible() else { return };
    let _asked = place.ask("max");
    let own = ["--container", &place.tenant, "--nic", "rtn", "--quiet", "--duration", "600", "--ring", "64"];
    let mut trace = Killed(place.trace(&own).stdout(Stdio::piped()).spawn().unwrap());
    let signal = |name: &str| Command::new("kill").args([name, &trace.0.id().to_string()]).status().unwrap();
    until("the first records read", || counted("read events"));
    // The reader is stopped until a ring is full, as a real-time thread might do.
    signal("-STOP");
    until("a loss", || counted("overrun"));
    signal("-CONT");
    signal("-INT");
    let mut text = String::new();
    trace.0.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(trace.0.wait().unwrap().code(), Some(0));
    assert!(text.contains("LOST at least "), "{text}");
}

#[test]
fn the_first_slow_request_ends_it() {
    let Some(place) = Place::if_possible() else { return };
    let _asked = place.ask("100");
    let output = place.traced(&["--break", "0", "--duration", "60"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains(&format!("a request of {} took", place.tenant)), "{text}");
}

#[test]
fn nothing_stays_when_it_is_killed() {
    let Some(place) = Place::if_possible() else { return };
    let own = ["--container", &place.tenant, "--nic", "rtn", "--quiet"];
    let mut trace = Killed(place.trace(&own).stdout(Stdio::null()).spawn().unwrap());
    // If the process is killed before its guardian exists, the instance stays until the next trace starts.
    until("the guardian's start", || {
        let line = format!("trace-guardian /sys/kernel/tracing/instances/ontime-trace-{}", trace.0.id());
        Command::new("pgrep").args(["-f", &line]).stdout(Stdio::null()).status().unwrap().success().then_some(())
    });
    // `ip netns exec` has become ontime by exec, so this kills ontime itself.
    trace.0.kill().unwrap();
    until("the guardian", || instances("ontime-").is_empty().then_some(()));
}

#[test]
fn what_is_not_there_is_named() {
    let Some(place) = Place::if_possible() else { return };
    let vm = support::name("without-nic");
    let guest = support::Guest::stopped(&vm);
    guest.vcpu();
    for (words, said) in [
        (
            ["--vm", vm.as_str()],
            format!("{vm}: no NIC of this host is known to lead to its interfaces (none), as behind NAT"),
        ),
        (["--container", "nobody"], format!("there is no container nobody; there are: {}", place.tenant)),
        (["--vm", "nobody"], "there is no VM nobody; there are: ".to_owned()),
        (["--nic", "nowhere"], "there is no interface nowhere; there are: ".to_owned()),
    ] {
        let output = place.trace(&words).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(64), "{error}");
        assert!(error.contains(&said), "{error}");
    }
}
