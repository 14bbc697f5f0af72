//! Monitoring as an operator uses it: a real daemon's metrics over TCP and in a file, promtool, a real Prometheus, the
//! alert rules and the dashboard, and the log of changes.
//!
//! promtool and Prometheus are those that `support::tool` finds.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test ends by panicking")]

mod support;

use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use support::{Daemon, Guest, ROOT, Site, name, possible, promtool, tool, until};

fn packaging(file: &str) -> String {
    std::fs::read_to_string(Path::new(ROOT).join("packaging").join(file)).unwrap()
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A host with an RT VM that has reserved CPU time, an RT VM without, and a bulk VM. Its daemon serves metrics.
struct Scene {
    daemon: Daemon,
    site: Site,
    port: u16,
    guests: Vec<Guest>,
}

impl Scene {
    fn new(test: &str) -> Self {
        let site = Site::new();
        site.ip(&["link", "set", "lo", "up"]);
        let port = free_port();
        let names = ["reserved", "capped", "bulk"].map(|kind| name(&format!("{test}-{kind}")));
        let rt = |name: &str| format!("[[tenant]]\nname = \"{name}\"\nclass = \"rt\"\n");
        site.configure("tenants.toml", &format!("{}{}", rt(&names[0]), rt(&names[1])));
        let reservation = format!("[[reservation]]\nname = \"{}\"\nbudget = \"2ms\"\nperiod = \"20ms\"\n", names[0]);
        site.configure("sched.toml", &reservation);
        site.configure("daemon.conf.d/metrics.toml", &format!("[metrics]\nport = {port}\n"));
        let guests: Vec<Guest> = names.iter().map(|name| Guest::stopped(name)).collect();
        for guest in &guests {
            guest.vcpu();
        }
        let daemon = Daemon::start(&site);
        site.poke();
        let scene = Self { daemon, site, port, guests };
        until("both RT VMs have metrics", || {
            let text = scene.scrape(&[]);
            let has = |family: &str, vm: &str| text.contains(&format!("{family}{{domain=\"{vm}\""));
            (has("ontime_reserved_cpus", &names[0]) && has("ontime_cap_pauses_total", &names[1])).then_some(())
        });
        scene
    }

    /// A command in the daemon's network namespace.
    fn inside(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", self.site.netns()]).arg(program);
        command
    }

    fn scrape(&self, args: &[&str]) -> String {
        let url = format!("http://127.0.0.1:{}/metrics", self.port);
        let out = self.inside("curl").args(["-sS", "--max-time", "60"]).args(args).arg(url).output().unwrap();
        String::from_utf8(out.stdout).unwrap()
    }
}

/// Names of Ontime's metrics in a text.
fn names_in(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words.filter(|word| word.starts_with("ontime_")).map(str::to_owned).collect()
}

/// The dashboard's queries, as Grafana sends them.
fn queries() -> Vec<String> {
    fn collect(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                found.extend(fields.get("expr").and_then(Value::as_str).map(str::to_owned));
                fields.values().for_each(|field| collect(field, found));
            }
            Value::Array(items) => items.iter().for_each(|item| collect(item, found)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    collect(&serde_json::from_str(&packaging("grafana/ontime.json")).unwrap(), &mut found);
    assert!(found.len() > 15, "{found:?}");
    found.iter().map(|query| query.replace("$instance", ".*").replace("$__rate_interval", "30s")).collect()
}

#[test]
fn promtool_is_content_with_metrics_and_rules() {
    let Some(tool) = tool("promtool").filter(|_| possible()) else { return };
    assert!(promtool(&tool, &["check", "rules", "ontime.rules.yml"], "").contains("SUCCESS"));
    assert!(promtool(&tool, &["test", "rules", "ontime.rules.test.yml"], "").contains("SUCCESS"));
    let scene = Scene::new("promtool");
    let file = scene.site.path("ontime.prom");
    let out = scene.site.run(&["metrics", "--textfile", file.to_str().unwrap()]);
    assert!(out.status.success(), "{out:?}");
    for text in [scene.scrape(&[]), std::fs::read_to_string(&file).unwrap()] {
        assert_eq!(promtool(&tool, &["check", "metrics"], &text), "", "{text}");
    }
    // promtool does report a faulty text.
    let mut command = Command::new(&tool);
    command.args(["check", "metrics"]).stdin(Stdio::piped()).stderr(Stdio::null()).stdout(Stdio::null());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"# TYPE ontime_x counter\nontime_x 1\n").unwrap();
    assert!(!child.wait().unwrap().success());
}

#[test]
fn the_rules_and_the_dashboard_ask_for_metrics_that_exist() {
    if !possible() {
        return;
    }
    let scene = Scene::new("names");
    let text = scene.scrape(&[]);
    let there = names_in(&text);
    let rules = names_in(&packaging("prometheus/ontime.rules.yml"));
    let asked: BTreeSet<String> = queries().iter().flat_map(|query| names_in(query)).chain(rules).collect();
    // A host without findings does not have this metric.
    let missing: Vec<&String> =
        asked.iter().filter(|name| !there.contains(*name) && *name != "ontime_findings").collect();
    assert!(asked.len() > 15 && missing.is_empty(), "asked for and not there: {missing:?} in {text}");
    // Each metric is described in the documentation.
    let page = std::fs::read_to_string(Path::new(ROOT).join("docs/use/monitoring.md")).unwrap();
    let family = |line: &str| Some(line.strip_prefix("# TYPE ")?.split(' ').next()?.to_owned());
    let untold: Vec<String> =
        text.lines().filter_map(family).filter(|name| !page.contains(&format!("`{name}`"))).collect();
    assert!(untold.is_empty(), "docs/use/monitoring.md does not have {untold:?}");
    for guest in &scene.guests {
        assert!(!text.contains(&format!("\"{}\"", guest.vcpu())), "a thread's number: {text}");
    }
    assert!(text.contains("ontime_state{state=\"applied\"} 1\n"), "{text}");
    assert!(text.contains("ontime_method_info{method=\"partitioned\",by=\"default\"} 1\n"), "{text}");
    assert!(text.contains("ontime_vcpu_steal_seconds_total{"), "{text}");
    let open = scene.scrape(&["-H", "accept: application/openmetrics-text;version=1.0.0"]);
    assert!(open.ends_with("# EOF\n") && open.contains("# UNIT ontime_pass_seconds seconds\n"), "{open}");
}

#[test]
fn the_listener_follows_the_configuration() {
    if !possible() {
        return;
    }
    let scene = Scene::new("listener");
    let reload = |text: &str| {
        scene.site.configure("daemon.conf.d/metrics.toml", text);
        scene.site.run(&["reload"]);
    };
    reload("");
    until("the old port is closed", || scene.scrape(&[]).is_empty().then_some(()));
    reload(&format!("[metrics]\nport = {}\n", scene.port));
    until("it is open again", || scene.scrape(&[]).contains("ontime_build_info").then_some(()));
    // An address that this host does not have.
    reload(&format!("[metrics]\nport = {}\naddress = \"192.0.2.1\"\n", scene.port));
    let problem = || {
        let status = scene.site.json(&["status", "--json"]);
        status["problems"].as_array()?.iter().find(|problem| problem["subject"] == "metrics").cloned()
    };
    let problem = until("status says why metrics are not served", problem);
    assert!(problem["message"].as_str().unwrap().contains("192.0.2.1"), "{problem}");
}

#[test]
fn the_libvirt_examples_say_what_they_mean() {
    let status = |domain: &str| format!("<domstatus pid='1'>{domain}</domstatus>");
    let rt = ontime_tenants::libvirt::parse_status(&status(&packaging("libvirt/examples/rt-vm.xml"))).unwrap();
    let words = format!("{:?}", rt.metadata);
    assert!(rt.name == "plc-1" && words.contains("Rt") && words.contains("0.8"), "{words}");
    let bulk = format!("<domain><name>web</name>{}</domain>", packaging("libvirt/examples/bulk-vm.xml"));
    let bulk = ontime_tenants::libvirt::parse_status(&status(&bulk)).unwrap();
    assert!(format!("{:?}", bulk.metadata).contains("Bulk"), "{:?}", bulk.metadata);
}

/// A real Prometheus, which ends when this is dropped.
struct Prometheus(Child);

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_real_prometheus_scrapes_and_every_query_of_rules_and_dashboard_has_data() {
    let Some(tool) = tool("prometheus").filter(|_| possible()) else { return };
    let scene = Scene::new("prometheus");
    let (config, data, port) = (scene.site.path("prometheus.yml"), scene.site.path("tsdb"), free_port());
    let rules = Path::new(ROOT).join("packaging/prometheus/ontime.rules.yml").canonicalize().unwrap();
    let jobs: String = packaging("prometheus/scrape.yml").lines().map(|line| format!("  {line}\n")).collect();
    let jobs = jobs.replace("localhost:9745", &format!("127.0.0.1:{}", scene.port));
    let text = format!(
        "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [\"{}\"]\nscrape_configs:\n{jobs}",
        rules.display()
    );
    std::fs::write(&config, text).unwrap();
    let mut command = scene.inside(&tool);
    command.arg(format!("--config.file={}", config.display())).arg(format!("--storage.tsdb.path={}", data.display()));
    command.arg(format!("--web.listen-address=127.0.0.1:{port}"));
    let log = std::fs::File::create(scene.site.path("prometheus.log")).unwrap();
    let _prometheus = Prometheus(command.stdout(Stdio::null()).stderr(log).spawn().unwrap());
    let api = |path: &str, query: &str| -> Option<Value> {
        let url = format!("http://127.0.0.1:{port}/api/v1/{path}");
        let mut curl = scene.inside("curl");
        curl.args(["-sS", "-G", &url, "--data-urlencode", &format!("query={query}")]);
        serde_json::from_slice(&curl.output().unwrap().stdout).ok()
    };
    until("it has scraped a few times", || {
        let answer = api("query", "count_over_time(ontime_build_info[1m]) >= 4")?;
        (!answer["data"]["result"].as_array()?.is_empty()).then_some(())
    });
    let targets = api("targets", "").unwrap();
    assert_eq!(targets["data"]["activeTargets"][0]["health"], "up", "{targets}");
    for query in queries() {
        let answer = api("query", &query).unwrap();
        assert_eq!(answer["status"], "success", "{query}: {answer}");
        // Queries of events, such as reloads, are for a value above 0, and a host may have no finding.
        let may_be_empty = query.ends_with("> 0") || query.contains("by (instance, severity, rule)");
        let empty = answer["data"]["result"].as_array().unwrap().is_empty();
        assert!(may_be_empty || !empty, "{query} has no data: {answer}");
    }
    let loaded = until("every rule is evaluated", || {
        let loaded = api("rules", "")?;
        let rules = loaded["data"]["groups"][0]["rules"].as_array()?;
        rules.iter().all(|rule| rule["health"] != "unknown").then(|| loaded.clone())
    });
    let rules = loaded["data"]["groups"][0]["rules"].as_array().unwrap();
    assert!(rules.len() > 10 && rules.iter().all(|rule| rule["health"] == "ok"), "{loaded}");
}

#[test]
fn each_change_has_a_line_in_the_log() {
    if !possible() {
        return;
    }
    let scene = Scene::new("audit");
    let log = || scene.daemon.log();
    let first = log().lines().next().unwrap().to_owned();
    let files = scene.site.path("etc/daemon.conf.d/metrics.toml");
    assert!(first.contains(&format!("ontime {}", env!("CARGO_PKG_VERSION"))), "{first}");
    assert!(first.contains("mode enforce, method partitioned (default)"), "{first}");
    assert!(first.contains(&files.display().to_string()), "{first}");
    let thread = format!("knob policy of thread {} (", scene.guests[1].vcpu());
    let said = |words: &str| log().lines().any(|line| line.contains(&thread) && line.contains(words));
    until("the vCPU's place is in the log", || said(" -> FIFO 46 (vcpu-place)").then_some(()));
    scene.site.run(&["reset"]);
    until("that it was given back", || said(": FIFO 46 -> OTHER").then_some(()));
}

#[test]
fn a_report_has_all_parts_and_no_foreign_file() {
    if !possible() {
        return;
    }
    let scene = Scene::new("report");
    std::fs::write(scene.site.path("foreign"), "# a foreign file\n").unwrap();
    std::fs::create_dir(scene.site.path("etc/host.conf.d")).unwrap();
    std::os::unix::fs::symlink(scene.site.path("foreign"), scene.site.path("etc/host.conf.d/10.toml")).unwrap();
    let file = scene.site.path("report.tar");
    let out = scene.site.run(&["report", "--output", file.to_str().unwrap()]);
    assert!(out.status.success(), "{out:?}");
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&file).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    let dir = scene.site.path("unpacked");
    std::fs::create_dir(&dir).unwrap();
    assert!(Command::new("tar").arg("-xf").arg(&file).arg("-C").arg(&dir).status().unwrap().success());
    let read = |name: &str| std::fs::read_to_string(dir.join("ontime-report").join(name)).unwrap();
    let manifest: Value = serde_json::from_str(&read("manifest.json")).unwrap();
    assert_eq!(manifest["schema_version"], 1);
    for part in ["status.json", "tenants.json", "nics.json", "plan.json", "reservations.json", "doctor.json"] {
        let text = read(part);
        let value: Value = serde_json::from_str(text.split("\nstandard error:\n").next().unwrap()).unwrap();
        let documents = value.as_array().map_or(std::slice::from_ref(&value), Vec::as_slice);
        assert!(documents.iter().all(|document| document["schema_version"] == 1), "{part}: {value}");
    }
    assert!(read("metrics.txt").contains("ontime_build_info"));
    assert!(read("configuration/sched.toml").contains("budget"));
    assert!(read("system/proc/version").starts_with("Linux version"));
    assert_eq!(read("configuration/host.conf.d/10.toml"), "");
    let parts = manifest["parts"].as_array().unwrap();
    let link = parts.iter().find(|part| part["name"] == "configuration/host.conf.d/10.toml").unwrap();
    assert!(link["missing"].as_str().unwrap().contains("symbolic link"), "{link}");
    // A second report does not overwrite the first.
    assert!(!scene.site.run(&["report", "--output", file.to_str().unwrap()]).status.success());
}
