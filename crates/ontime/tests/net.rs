//! `ontime net status`: planned and actual values, and why they differ, with a daemon and without.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test ends by panicking")]

mod support;

use serde_json::Value;
use support::{Daemon, Site, until};

fn nic<'a>(all: &'a Value, name: &str) -> &'a Value {
    all["nics"]
        .as_array()
        .unwrap()
        .iter()
        .find(|nic| nic["name"] == name)
        .unwrap_or_else(|| panic!("no {name} in {all}"))
}

fn states(nic: &Value) -> Vec<&str> {
    nic["knobs"].as_array().unwrap().iter().map(|knob| knob["state"].as_str().unwrap()).collect()
}

/// Without a daemon, original values that cannot be read are reported, and no file is created where there is none.
#[test]
fn who_looks_without_a_daemon_reads_the_originals_and_leaves_them_alone() {
    let Some(site) = Site::if_possible() else { return };
    let left = || std::fs::read_dir(site.path("state")).unwrap().count();
    let said = |args: &[&str]| {
        let out = site.run(args);
        String::from_utf8([out.stdout, out.stderr].concat()).unwrap()
    };
    for args in [["net", "status"], ["doctor", "--json"]] {
        assert!(!said(&args).contains("originals"));
        assert_eq!(left(), 0, "{args:?}");
    }
    std::fs::write(site.path("state/originals"), "{}").unwrap();
    for args in [["net", "status"], ["doctor", "--json"]] {
        let said = said(&args);
        assert!(said.contains("state/originals: damaged"), "{said}");
        assert_eq!(left(), 1, "{args:?}");
    }
    std::fs::remove_file(site.path("state/originals")).unwrap();
}

#[test]
fn the_path_is_shown_nic_by_nic_with_why() {
    let Some(site) = Site::if_possible() else { return };
    site.configure("host.toml", "[nic.va0]\nclass = \"rt\"\nlevel = 1\n[nic.eth77]\nclass = \"bulk\"\n");
    for args in [
        ["link", "add", "va0", "type", "veth", "peer", "name", "va1"].as_slice(),
        &["link", "set", "va0", "up"],
        &["link", "set", "va1", "up"],
    ] {
        site.ip(args);
    }
    // A veth has NAPI where GRO is on.
    let ethtool = std::process::Command::new("ip")
        .args(["netns", "exec", site.netns(), "ethtool", "-K", "va0", "gro", "on"])
        .status();
    if !ethtool.is_ok_and(|status| status.success()) {
        println!("SKIPPED: this test needs ethtool");
        return;
    }
    let before = site.run(&["net", "status", "va0", "--json"]);
    assert_eq!(before.status.code(), Some(1), "{before:?}");
    let all: Value = serde_json::from_slice(&before.stdout).unwrap();
    assert_eq!((&nic(&all, "va0")["class"], &nic(&all, "va0")["class_by"]), (&"rt1".into(), &"configured".into()));
    assert!(states(nic(&all, "va0")).contains(&"not-applied"), "{all}");
    assert_eq!(site.run(&["net", "status", "eth77"]).status.code(), Some(64));
    // Every name of the interface is accepted.
    site.ip(&["link", "property", "add", "dev", "va0", "altname", "port-to-the-plant-hall"]);
    let all = site.json(&["net", "status", "port-to-the-plant-hall", "--json"]);
    assert_eq!((all["nics"].as_array().unwrap().len(), &all["schema_version"]), (1, &1.into()));
    assert_eq!(nic(&all, "va0")["altnames"][0], "port-to-the-plant-hall");

    let _daemon = Daemon::start(&site);
    let applied = until("all of va0 is as wanted", || {
        let all = site.json(&["net", "status", "va0", "--json"]);
        states(nic(&all, "va0")).iter().all(|state| *state == "ok").then_some(all)
    });
    let knobs = nic(&applied, "va0")["knobs"].as_array().unwrap();
    assert!(knobs.iter().any(|knob| knob["rule"] == "napi-threaded" && knob["actual"] == "1"), "{applied}");
    // A name that no interface has stands beside the interfaces.
    let findings = |all: &Value| all["findings"].as_array().unwrap().iter().any(|of| of["object"] == "eth77");
    assert!(findings(&site.json(&["net", "status", "--json"])) && !findings(&applied), "{applied}");
    let text = site.run(&["net", "status", "va0"]);
    assert_eq!(text.status.code(), Some(0));
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("va0  rt1 (by host.toml), veth, up"), "{text}");
    let status = site.json(&["status", "--json"]);
    let findings = status["findings"].as_array().unwrap();
    assert!(findings.iter().any(|of| of["rule"] == "host-config" && of["object"] == "eth77"), "{status}");
}
