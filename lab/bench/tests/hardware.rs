//! `ontime-lab bench --hardware` from end to end. Two network namespaces replace the two machines, and veth pairs the
//! cables. The command, the daemon, sockperf and iperf3 (for the VMs' servers) are real. No hardware is involved, and
//! the report must state that.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test ends by panicking")]

#[path = "../../../crates/ontime/tests/support/mod.rs"]
mod support;

use std::fs;
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;
use support::{Daemon, Guest, Site, possible, until};

const RT: &str = "192.0.2.2";
const BULK: &str = "198.51.100.2";

/// Whether this test can run here; prints what is missing.
fn able() -> bool {
    let installed = |program: &str| {
        let there = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
        if !there {
            println!("SKIPPED: this test needs {program}");
        }
        there
    };
    possible() && installed("sockperf") && installed("iperf3")
}

/// A process that ends with the test.
struct Background(Child);

impl Drop for Background {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The clients' side: a namespace with one end of each cable.
struct Bench {
    site: Site,
    client: String,
    servers: Vec<Background>,
}

impl Bench {
    fn new() -> Self {
        let site = Site::new();
        let client = format!("{}-client", site.netns());
        run(&["ip", "netns", "add", &client]);
        let bench = Self { site, client, servers: Vec::new() };
        bench.site.ip(&["link", "set", "lo", "up"]);
        for (name, net) in [("rt", "192.0.2"), ("bulk", "198.51.100")] {
            let own = format!("{name}0");
            bench.site.ip(&["link", "add", &own, "type", "veth", "peer", "name", name, "netns", &bench.client]);
            bench.site.ip(&["address", "add", &format!("{net}.2/24"), "dev", &own]);
            bench.site.ip(&["link", "set", &own, "up"]);
            run(&["ip", "-n", &bench.client, "address", "add", &format!("{net}.1/24"), "dev", name]);
            run(&["ip", "-n", &bench.client, "link", "set", name, "up"]);
        }
        bench
    }

    fn serve(mut self) -> Self {
        for command in [&["sockperf", "server", "-i", RT, "-p", "11111"][..], &["iperf3", "-s", "-B", BULK]] {
            let child = Command::new("ip")
                .args(["netns", "exec", self.site.netns()])
                .args(command)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn();
            self.servers.push(Background(child.unwrap()));
        }
        self
    }

    /// The site's file, with these tenants.
    fn describe(&self, rt: &str, bulk: &str) -> String {
        let dirs = [("--run-dir", "run"), ("--state-dir", "state"), ("--config-dir", "etc"), ("--debugfs", "debug")];
        let dirs: Vec<String> =
            dirs.iter().map(|(flag, dir)| format!("{flag} {}", self.site.path(dir).display())).collect();
        format!(
            "host = \"here\"\nontime = \"{} {}\"\n[client]\nnamespace = \"{}\"\n[rt]\ntenant = \"{rt}\"\nserver \
             = \"{RT}:11111\"\nnic = \"rt\"\n[bulk]\nnic = \"bulk\"\ntenants = {{ {bulk} = \"{BULK}\" }}\n",
            support::ontime().display(),
            dirs.join(" "),
            self.client
        )
    }

    /// Runs `ontime-lab bench ARGS --hardware` with this site's file, as if typed on the host.
    fn bench(&self, site: &str, args: &[&str]) -> Output {
        let file = self.site.path("site.toml");
        fs::write(&file, site).unwrap();
        let mut command = Command::new("ip");
        command.args(["netns", "exec", self.site.netns(), env!("CARGO_BIN_EXE_ontime-lab"), "bench"]).args(args);
        command.arg("--hardware").arg(file).arg("--json").arg(self.site.path("report.json"));
        command.arg("--html").arg(self.site.path("report.html")).output().unwrap()
    }

    fn report(&self) -> Value {
        serde_json::from_slice(&fs::read(self.site.path("report.json")).unwrap()).unwrap()
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.servers.clear();
        let _ = Command::new("ip").args(["netns", "del", &self.client]).status();
    }
}

fn run(words: &[&str]) {
    assert!(Command::new(words[0]).args(&words[1..]).status().unwrap().success(), "{words:?}");
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn result<'a>(report: &'a Value, method: &str, load: &str) -> &'a Value {
    let results = report["results"].as_array().unwrap();
    results
        .iter()
        .find(|of| of["method"] == method && of["load"] == load)
        .unwrap_or_else(|| panic!("{method} {load}: {report}"))
}

fn metric(result: &Value, key: &str) -> f64 {
    let found = result["metrics"].as_array().unwrap().iter().find(|metric| metric["key"] == key);
    found.unwrap_or_else(|| panic!("{key}: {result}"))["value"].as_f64().unwrap()
}

#[test]
fn a_host_is_measured_by_its_client_and_keeps_its_method() {
    if !able() {
        return;
    }
    let bench = Bench::new().serve();
    let (rt, bulk) = (format!("plc-{}", std::process::id()), format!("hog-{}", std::process::id()));
    bench.site.configure("tenants.toml", &format!("[[tenant]]\nname = \"{rt}\"\nclass = \"rt\"\nruntime-cap = 0.5\n"));
    bench.site.configure("host.toml", "method = \"threaded\"\n");
    let _tenants = [Guest::stopped(&rt), Guest::stopped(&bulk)];
    let _daemon = Daemon::start(&bench.site);
    let args = ["rt-server", "--method", "as-is,partitioned", "--load", "none,tcp,small-packets", "--requests", "60"];
    let output = bench.bench(&bench.describe(&rt, &bulk), &args);
    assert!(output.status.success(), "{}", said(&output));

    let report = bench.report();
    // A veth has no device, so this is not hardware, and the report must not look as if it were.
    assert_eq!(report["clock"], "real");
    let notes = report["notes"].to_string();
    assert!(notes.contains("no hardware") && notes.contains("the host: "), "{notes}");
    for method in ["as-is", "partitioned"] {
        for load in ["none", "tcp", "small-packets"] {
            let of = result(&report, method, load);
            assert!(of["count"].as_u64().unwrap() >= 60 && of["lost"] == 0, "{method} {load}: {of}");
            assert!(of["latency_us"]["p50"].as_f64().unwrap() > 1.0, "{of}");
            assert!(of["notes"].to_string().contains("time stamps at rt (veth) by the client's kernel"), "{of}");
        }
        assert!(result(&report, method, "tcp")["bulk_gbps"].as_f64().unwrap() > 0.01);
    }
    assert!(fs::read_to_string(bench.site.path("report.html")).unwrap().contains("as-is"));
    // The previous method is in force again.
    assert_eq!(bench.site.json(&["status", "--json"])["method"], "threaded");

    // Other experiments over the same wire.
    let output = bench
        .bench(&bench.describe(&rt, &bulk), &["vatc", "--method", "as-is,vatc", "--streams", "0", "--requests", "20"]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(result(&bench.report(), "vatc-0", "none")["lost"], 0);
    let kbp = [
        "kbp",
        "--method",
        "napi-tuned",
        "--frame",
        "64,1518",
        "--requests",
        "20",
        "--frames-each",
        "50",
        "--trials",
        "0",
    ];
    let output = bench.bench(&bench.describe(&rt, &bulk), &kbp);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(metric(result(&bench.report(), "napi-tuned-vm-1518-fast", "small-packets"), "frame"), 1_518.0);
    let hours = ["kbp", "--method", "napi-tuned", "--frame", "64", "--hours", "0.001", "--rate", "200"];
    let output = bench.bench(&bench.describe(&rt, &bulk), &hours);
    assert!(output.status.success(), "{}", said(&output));
    let report = bench.report();
    let long = result(&report, "napi-tuned-vm-64-hours", "small-packets");
    // Requests that a busy machine did not send are not losses.
    assert!(long["duration_s"].as_f64().unwrap() > 3.0 && long["count"].as_u64().unwrap() > 100, "{long}");
    assert!(long["notes"].to_string().contains("judged while the capture grew"), "{long}");
    let output = bench.bench(&bench.describe(&rt, &bulk), &["kbp", "--place", "macvlan"]);
    assert!(said(&output).contains("place 'macvlan'"), "{}", said(&output));

    // The host's configuration names no CPU for the RT group: nothing would move.
    let exclusive = ["rt-server", "--method", "exclusive", "--load", "none", "--requests", "5"];
    let output = bench.bench(&bench.describe(&rt, &bulk), &exclusive);
    let words = said(&output);
    assert!(!output.status.success() && words.contains("critical: exclusive_cpu: no CPU is named"), "{words}");

    // A tenant that does not match the site is not measured.
    let output = bench.bench(
        &bench.describe(&bulk, &rt),
        &["rt-server", "--method", "partitioned", "--load", "none", "--requests", "5"],
    );
    let words = said(&output);
    assert!(!output.status.success() && words.contains(&bulk) && words.contains("of class bulk"), "{words}");
    let output = bench.bench(
        &bench.describe("nobody", &bulk),
        &["rt-server", "--method", "partitioned", "--load", "none", "--requests", "5"],
    );
    assert!(said(&output).contains("tenant 'nobody' is not found"), "{}", said(&output));
}

#[test]
fn a_frame_a_period_is_published_to_whoever_answers() {
    if !able() {
        return;
    }
    let bench = Bench::new();
    // As in the guest of the emulated host (lab/host/src/guest/sampled-values.sh), and as the manual's subscriber.
    let script = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/examples/subscriber.pl")).unwrap();
    let file = bench.site.path("subscriber.pl");
    fs::write(&file, script).unwrap();
    let child = Command::new("ip").args(["netns", "exec", bench.site.netns(), "perl"]).arg(&file).arg("rt0").spawn();
    let _subscriber = Background(child.unwrap());
    // The list of packet sockets has a heading.
    until("the subscriber has its socket", || {
        let mut list = Command::new("ip");
        let list = list.args(["netns", "exec", bench.site.netns(), "cat", "/proc/net/packet"]).output().unwrap();
        (String::from_utf8_lossy(&list.stdout).lines().count() > 1).then_some(())
    });
    let output = bench.bench(
        &bench.describe("plc", "hog"),
        &["sampled-values", "--method", "as-is", "--load", "none", "--frames", "2000"],
    );
    assert!(output.status.success(), "{}", said(&output));
    let of = bench.report();
    let of = result(&of, "as-is", "none");
    // How many answers are in time depends on this machine. The command must account for each of them.
    let number = |of: &Value| of.as_u64().unwrap();
    let wire = &of["wire"];
    let ends = ["counted", "lost", "open_at_end"].map(|name| number(&wire[name]));
    assert_eq!(ends.iter().sum::<u64>(), 2_000, "{of}");
    assert!(number(&of["count"]) > 0 && metric(of, "late") <= number(&of["count"]) as f64, "{of}");
}

#[test]
fn what_is_missing_is_named() {
    if !able() {
        return;
    }
    let bench = Bench::new();
    let good = bench.describe("plc", "hog");
    let args = ["rt-server", "--method", "as-is", "--load", "none", "--requests", "5"];
    for (from, to, words) in [
        ("nic = \"rt\"", "nic = \"eth77\"", "no interface 'eth77' at the client in namespace"),
        ("namespace = \"", "namespace = \"no-", "cannot be entered"),
        ("nic = \"rt\"", "nic = \"rt\"\nmonitor = \"bulk\"", "does not stamp every frame"),
        ("host = \"here\"", "host = \"root@nowhere.invalid\"", "nowhere.invalid cannot be reached"),
    ] {
        let mut site = good.replacen(from, to, 1);
        if to.contains("monitor") {
            site = site.replace("[client]", "[client]\nstamps = \"nic\"");
        }
        let output = bench.bench(&site, &args);
        assert!(!output.status.success() && said(&output).contains(words), "{to}: {}", said(&output));
    }
    // No server listens.
    let output = bench.bench(&good, &args);
    assert!(said(&output).contains(&format!("{RT}:11111 did not answer")), "{}", said(&output));
    // No privilege to capture.
    let output = Command::new("setpriv")
        .args(["--bounding-set=-net_raw", "--inh-caps=-net_raw", "ip", "netns", "exec", &bench.client])
        .args([env!("CARGO_BIN_EXE_ontime-lab"), "bench"])
        .args(args)
        .arg("--hardware")
        .arg(bench.site.path("site.toml"))
        .output()
        .unwrap();
    assert!(said(&output).contains("not permitted"), "{}", said(&output));
    // Options that only an emulated host allows, and options that only a real host allows.
    let output = bench.bench(&good, &["rt-server", "--method", "outsourcing", "--load", "none", "--requests", "5"]);
    assert!(said(&output).contains("its owner's"), "{}", said(&output));
    let output = bench.bench(&good, &["ablation"]);
    assert!(said(&output).contains("has no --hardware"), "{}", said(&output));
    let output =
        Command::new(env!("CARGO_BIN_EXE_ontime-lab")).args(["bench", "rt-server", "--method", "as-is"]).output();
    assert!(said(&output.unwrap()).contains("it takes --hardware"));
}
