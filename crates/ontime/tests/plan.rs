//! `ontime plan` as a user runs it, on the examples of the documentation.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test ends by panicking")]

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/examples/plan");

fn plan(file: &str, args: &[&str]) -> Output {
    let path = Path::new(EXAMPLES).join(file);
    Command::new(env!("CARGO_BIN_EXE_ontime")).arg("plan").arg(path).args(args).output().unwrap()
}

fn json(file: &str, args: &[&str]) -> Value {
    let out = plan(file, &[args, &["--json"]].concat());
    serde_json::from_slice(&out.stdout).unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&out.stderr)))
}

fn near(value: &Value, want: f64) -> bool {
    (value.as_f64().unwrap() - want).abs() < 0.0006
}

#[test]
fn table_2_of_the_paper() {
    let said = json("nh-dec.toml", &["--simulate", "10"]);
    let interfaces: Vec<_> =
        said["tenants"].as_array().unwrap().iter().map(|t| t["vcpus"][0]["prm_ns"].clone()).collect();
    let ms = |q: u64, p: u64| serde_json::json!([q * 1_000_000, p * 1_000_000]);
    assert_eq!(interfaces, [ms(4, 5), ms(3, 4), ms(2, 3), ms(1, 9)]);
    assert!(near(&said["needed_cpus"], 2.017) && near(&said["reserved_cpus"], 2.113), "{said}");
    assert!(near(&said["compositional"]["prm_cpus"], 2.328) && said["compositional"]["claimed_cpus"] == 3);
    let simulation = &said["hosts"][0]["simulation"];
    assert_eq!((&simulation["missed"], &simulation["jobs"]), (&0.into(), &1933.into()));
}

#[test]
fn every_example_fits_and_the_simulation_misses_nothing() {
    let mut count = 0;
    for entry in std::fs::read_dir(EXAMPLES).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let out = plan(&name, &["--simulate", "0.5"]);
        let text = String::from_utf8(out.stdout).unwrap();
        assert!(text.starts_with("Fits: "), "{name}: {text}{}", String::from_utf8_lossy(&out.stderr));
        assert_eq!(out.status.code(), Some(0), "{name}: {text}");
        assert!(text.contains("Simulation, host 1: 0.5 s") && text.contains(" 0 missed"), "{name}: {text}");
        count += 1;
    }
    assert!(count >= 8);
}

#[test]
fn requests_at_random_without_slack_are_late_by_less_than_what_is_said() {
    let said = json("memcached-and-video.toml", &["--simulate", "5", "--sporadic-delay-ms", "20"]);
    assert!(
        said["notes"][0].as_str().unwrap().contains("250 us from another's may be missed, by less than 500 us"),
        "{said}"
    );
    let simulation = &said["hosts"][0]["simulation"];
    let late_us = simulation["late_max_us"].as_f64().unwrap();
    assert!(simulation["missed"].as_u64().unwrap() > 0 && late_us > 0.0 && late_us < 250.0, "{simulation}");
    assert_eq!(
        plan("memcached-and-video.toml", &["--simulate", "5", "--sporadic-delay-ms", "20"]).status.code(),
        Some(1)
    );
}

#[test]
fn what_does_not_fit_is_told_why_and_more_cpus_or_hosts_help() {
    let out = plan("nh-dec.toml", &["--cpus", "2"]);
    let text = String::from_utf8(out.stdout).unwrap();
    assert_eq!(out.status.code(), Some(1));
    assert!(text.starts_with("Does not fit: ") && text.contains("no place for vm3: 2.008 CPUs asked"), "{text}");
    assert_eq!(plan("nh-dec.toml", &["--cpus", "3"]).status.code(), Some(0));
    let two = json("nh-dec.toml", &["--cpus", "2", "--hosts", "2"]);
    assert_eq!(two["fits"], true);
    let hosts: Vec<usize> =
        two["hosts"].as_array().unwrap().iter().map(|h| h["tenants"].as_array().unwrap().len()).collect();
    assert_eq!(hosts.iter().sum::<usize>(), 4);
}

#[test]
fn a_refusal_names_the_vcpu_by_its_tenant() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.toml");
    let said = |text: &str, args: &[&str]| {
        std::fs::write(&path, text).unwrap();
        let out = plan(path.to_str().unwrap(), args);
        String::from_utf8([out.stdout, out.stderr].concat()).unwrap()
    };
    let tenant = |name: &str, slice: u32, copies: u32, cpus: &str| {
        format!(
            "[[tenant]]\nname = \"{name}\"\n{cpus}rta = \
             [{{ slice = \"{slice}ms\", period = \"10ms\", copies = {copies} }}]\n"
        )
    };
    let own = ["[host]\ncpus = 3\n".to_owned(), tenant("a", 7, 2, ""), tenant("b", 6, 2, "cpus = [0]\n")].concat();
    assert!(said(&own, &[]).contains("no place for b: vCPU 1 asks for 0.600"), "{}", said(&own, &[]));
    let other = [
        "[host]\ncpus = 2\nbulk-reserve = 0.4\n".to_owned(),
        tenant("a", 6, 1, "cpus = [0, 1]\n"),
        tenant("b", 5, 1, "cpus = [0]\n"),
        tenant("c", 5, 1, "cpus = [1]\n"),
    ]
    .concat();
    let text = said(&other, &[]);
    assert!(text.contains("no place for c: beside it") && text.contains("0.600 of vCPU 0 of a;"), "{text}");
    let few = said(&other.replace("0.4", "1.5"), &["--cpus", "1"]);
    assert!(few.contains("bulk-reserve = 1.500 is more than --cpus 1"), "{few}");
}

#[test]
fn a_vcpu_that_no_slack_covers_is_not_hidden_by_another() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.toml");
    let rta = |slice: &str, period: &str| format!("{{ slice = \"{slice}\", period = \"{period}\" }}");
    let text = format!(
        "[host]\ncpus = 4\n[[tenant]]\nname = \"a\"\nrta = [{}, {}]\n",
        rta("400us", "500us"),
        rta("5ms", "10ms")
    );
    std::fs::write(&path, text).unwrap();
    let out = String::from_utf8(plan(path.to_str().unwrap(), &[]).stdout).unwrap();
    assert!(out.contains("a period of a is too short for any slack to cover that"), "{out}");
}

/// The other tenant's jobs come at any time as well, but the vCPU has no others.
#[test]
fn what_covers_jobs_that_come_at_any_time_beside_others_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.toml");
    let alone = "[[tenant]]\nname = \"b\"\nrta = [{ slice = \"1ms\", period = \"10ms\", sporadic = true }]\n";
    let note = |long: &str, copies: u32| {
        let file = format!(
            "[host]\ncpus = 4\n[[tenant]]\nname = \"a\"\ncopies = {copies}\nvcpus = 1\nrta = [{{ slice = \"1ms\", \
             period = \"10ms\", sporadic = true }}, {{ slice = \"4ms\", period = \"{long}\" }}]\n{alone}"
        );
        std::fs::write(&path, file).unwrap();
        let said = json(path.to_str().unwrap(), &[]);
        let notes: Vec<String> = said["notes"].as_array().unwrap().iter().map(|n| n.as_str().unwrap().into()).collect();
        let mut about = notes.into_iter().filter(|note| note.contains("at any time"));
        let note = about.next().unwrap_or_default();
        assert_eq!(about.next(), None);
        (note, said["tenants"].clone())
    };
    let (text, tenants) = note("40ms", 2);
    let [time, period] = [0, 1].map(|at| tenants[0]["vcpus"][0]["covering_ns"]["budget"][at].as_u64().unwrap());
    assert!(period == 5_000_000 && (1_000_000..2_000_000).contains(&time), "{tenants}");
    assert!(text.starts_with("a-1, vCPU 0: ") && text.contains("with 2 ms in each 10 ms some"), "{text}");
    assert!(text.contains("ms in each 5 ms (0.20") && text.contains(" CPUs in place of 0.200)"), "{text}");
    assert!(text.contains("more such vCPUs: 1;"), "{text}");
    assert!(tenants[2]["vcpus"].as_array().unwrap().iter().all(|vcpu| vcpu["covering_ns"].is_null()), "{tenants}");
    let (text, tenants) = note("200ms", 1);
    assert_eq!(tenants[0]["vcpus"][0]["covering_ns"], "nothing");
    assert!(text.contains("no budget keeps them: give each such RTA a vCPU of its own"), "{text}");
}

#[test]
fn the_picture_is_well_formed_and_says_simulation() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("schedule.svg");
    let out = plan("motivation.toml", &["--svg", path.to_str().unwrap(), "--span-ms", "30"]);
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
    let svg = std::fs::read_to_string(path).unwrap();
    let document = roxmltree::Document::parse(&svg).unwrap();
    assert!(
        svg.contains("<title>Simulation: ") && document.descendants().filter(|n| n.has_tag_name("rect")).count() > 9
    );
    let out = plan("motivation.toml", &["--svg", "/nonexistent/x.svg"]);
    assert_eq!(out.status.code(), Some(3));
    assert!(String::from_utf8(out.stderr).unwrap().contains("/nonexistent/x.svg: cannot be written"));
}

#[test]
fn the_picture_is_of_the_fullest_host() {
    let dir = tempfile::tempdir().unwrap();
    let [file, picture] = ["t.toml", "t.svg"].map(|name| dir.path().join(name));
    let tenant = |name: &str, slice: &str| {
        format!("[[tenant]]\nname = \"{name}\"\nrta = [{{ slice = \"{slice}\", period = \"10ms\" }}]\n")
    };
    // The last tenant makes the second host the fuller one.
    let text =
        ["[host]\ncpus = 1\n".to_owned(), tenant("a", "6ms"), tenant("b", "5ms"), tenant("c", "4500us")].concat();
    std::fs::write(&file, text).unwrap();
    let said = json(file.to_str().unwrap(), &["--hosts", "2", "--svg", picture.to_str().unwrap()]);
    assert!(near(&said["hosts"][0]["reserved_cpus"], 0.95), "{said}");
    let svg = std::fs::read_to_string(picture).unwrap();
    // vCPUs and RTAs are numbered as in their tenant.
    let runs = |tenant: &str| svg.contains(&format!(">{tenant}, vCPU 0, RTA 0, CPU 0: "));
    assert!(runs("b") && runs("c") && !svg.contains(">a, "), "{svg}");
}

#[test]
fn the_picture_of_fifteen_vms_over_200_ms_has_each_name_in_full_and_each_deadline() {
    let dir = tempfile::tempdir().unwrap();
    let [file, picture] = ["t.toml", "t.svg"].map(|name| dir.path().join(name));
    let vms: Vec<(String, u64)> = (0..15).map(|vm| (format!("controller-of-press-{vm}"), 10 + vm)).collect();
    let tenant = |(name, period): &(String, u64)| {
        format!("[[tenant]]\nname = \"{name}\"\nrta = [{{ slice = \"1ms\", period = \"{period}ms\" }}]\n")
    };
    let text = vms.iter().fold("[host]\ncpus = 4\n".to_owned(), |text, vm| text + &tenant(vm));
    std::fs::write(&file, text).unwrap();
    let out = plan(file.to_str().unwrap(), &["--svg", picture.to_str().unwrap(), "--span-ms", "200"]);
    assert_eq!(out.status.code(), Some(0), "{out:?}");
    let svg = std::fs::read_to_string(picture).unwrap();
    let document = roxmltree::Document::parse(&svg).unwrap();
    let texts = |tag: &'static str| document.descendants().filter(move |node| node.has_tag_name(tag));
    for (name, period) in vms {
        assert!(texts("text").any(|label| label.text() == Some(name.as_str())), "no label {name}: {svg}");
        let of_this = format!("{name}: deadline ");
        let marks = texts("title").filter(|title| title.text().is_some_and(|text| text.starts_with(&of_this))).count();
        // The first deadline is after one period; one at the picture's very end may be left out.
        let wanted = usize::try_from(200 / period).unwrap();
        assert!(marks == wanted || marks + 1 == wanted, "{name}: {marks} deadlines of {wanted}");
    }
}

#[test]
fn wrong_use_and_a_wrong_file_have_statuses_of_their_own() {
    let none = plan("none.toml", &[]);
    assert_eq!(none.status.code(), Some(64));
    let said = String::from_utf8(none.stderr).unwrap();
    assert!(
        said.contains("none.toml: cannot be read: No such file") && said.contains("name a file that exists"),
        "{said}"
    );
    assert_eq!(plan("nh-dec.toml", &["--simulate", "-1"]).status.code(), Some(64));
    assert_eq!(plan("nh-dec.toml", &["--cpus", "0"]).status.code(), Some(64));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.toml");
    std::fs::write(&path, "[host]\ncpus = 1\n[[tenants]]\n").unwrap();
    let out = plan(path.to_str().unwrap(), &[]);
    assert_eq!(out.status.code(), Some(78));
    assert!(String::from_utf8(out.stderr).unwrap().contains("did you mean `tenant`?"));
    std::fs::write(&path, "[host]\ncpus = 1\n").unwrap();
    let said = String::from_utf8(plan(path.to_str().unwrap(), &[]).stdout).unwrap();
    assert!(said.ends_with("\n\nno tenant: the file has no [[tenant]]\n"), "no table without a row: {said}");
    let on_third = "[host]\ncpus = 1\n[[tenant]]\nname = \"press\"\nhost = 3\nbudget = \"1ms\"\nperiod = \"9ms\"\n";
    std::fs::write(&path, on_third).unwrap();
    let out = plan(path.to_str().unwrap(), &["--hosts", "2"]);
    let said = String::from_utf8(out.stderr).unwrap();
    let wanted = "t.toml: host = 3, and --hosts is 2; give more --hosts, or correct the tenant's `host`";
    assert!(out.status.code() == Some(64) && said.contains(wanted), "{said}");
    assert_eq!(plan(path.to_str().unwrap(), &["--hosts", "3"]).status.code(), Some(0));
}
