//! Rules: accepted and refused values, error messages, and precedence.
#![allow(missing_docs, clippy::unwrap_used)]

use ontime_tenants::config::Text;
use ontime_tenants::rules::{Grant, Namer, RUNTIME_CAP, ReservedFor, Subject, Verdict};
use ontime_tenants::{Class, ClassSource, Kind, Level, Policy, Role, Rules, RuntimeCap};
use proptest::prelude::*;

const UUID: &str = "3f1c9a52-0d52-4c1b-9e0a-6f4b7f1d2c33";

fn parse(text: &str) -> Rules {
    Rules::parse(&[Text::new("/etc/ontime/tenants.toml", text)]).unwrap()
}

fn refused(text: &str) -> String {
    Rules::parse(&[Text::new("/etc/ontime/tenants.toml", text)]).unwrap_err().to_string()
}

fn rt(level: u8) -> Class {
    Class::Rt(Level::try_from(level).unwrap())
}

fn vm(name: &str) -> Subject<'_> {
    Subject {
        name,
        namespace: None,
        uuid: Some(UUID),
        cgroup: Some("/rt.slice/vm.scope"),
        cgroup_owner: 0,
        kind: Kind::Qemu,
        owner: 0,
        namer: Namer::User(0),
        beside_vm: false,
        in_pod_of_vm: false,
    }
}

#[test]
fn the_first_rule_that_matches_wins_and_is_named() {
    let rules = parse(
        "[[tenant]]\nname = \"web-*\"\nclass = \"rt\"\nlevel = 1\nruntime-cap = 0.5\n\n\
         [[tenant]]\nkind = \"qemu\"\nclass = \"rt\"\n",
    );
    let web = rules.decide(&vm("web-1"), None);
    assert_eq!((web.class, web.runtime_cap), (rt(1), 0.5));
    assert_eq!(web.source, ClassSource::Rule("/etc/ontime/tenants.toml:3".to_owned()));
    let other = rules.decide(&vm("db"), None);
    assert_eq!((other.class, other.runtime_cap), (rt(0), RUNTIME_CAP));
    let container = rules.decide(&Subject { kind: Kind::Container, ..vm("db") }, None);
    assert_eq!((container.class, container.source, container.runtime_cap), (Class::Bulk, ClassSource::Default, 1.0));
}

#[test]
fn every_matcher_must_fit() {
    let rules = parse(&format!(
        "[[tenant]]\nname = \"a\"\nuuid = \"{}\"\ncgroup = \"/rt.slice\"\nkind = \"qemu\"\nuser = 7\nclass = \"rt\"\n",
        UUID.to_uppercase()
    ));
    let good = Subject { owner: 7, ..vm("a") };
    assert_eq!(rules.decide(&good, None).class, rt(0));
    for bad in [
        Subject { name: "b", ..good },
        Subject { uuid: None, ..good },
        Subject { cgroup: None, ..good },
        Subject { cgroup: Some("/rt.slice2"), ..good },
        Subject { kind: Kind::Libvirt, ..good },
        Subject { owner: 8, ..good },
        Subject { owner: 0, ..good },
    ] {
        assert_eq!(rules.decide(&bad, None).class, Class::Bulk, "{bad:?}");
    }
}

#[test]
fn metadata_beats_rules_and_override_beats_metadata() {
    let metadata = Some(Verdict { class: rt(3), runtime_cap: None });
    let rule = "[[tenant]]\nname = \"*\"\nclass = \"bulk\"\n";
    let decided = parse(rule).decide(&vm("a"), metadata);
    assert_eq!((decided.class, decided.source), (rt(3), ClassSource::Metadata));
    let decided = parse(&format!("{rule}override = true\n")).decide(&vm("a"), metadata);
    assert_eq!(decided.class, Class::Bulk);
    let late = format!("[[tenant]]\nname = \"a\"\nclass = \"rt\"\n{rule}override = true\n");
    assert_eq!(parse(&late).decide(&vm("a"), None).class, Class::Bulk, "an override wins from any position");
}

#[test]
fn a_reservation_decides_the_class_of_its_tenants_until_an_override() {
    let grant = |name: &str, to| Grant {
        reservation: name.to_owned(),
        to,
        level: Level::try_from(2_u8).unwrap(),
        runtime_cap: RuntimeCap::try_from(0.25).ok(),
        vcpus: 3,
    };
    let mut rules = parse("[[tenant]]\nname = \"late\"\nclass = \"bulk\"\noverride = true\n");
    rules.set_grants(vec![
        grant("by-name", ReservedFor::Vm("cell".to_owned())),
        grant("by-pod", ReservedFor::Pod("7f0c0f5e-3b6e".to_owned())),
        grant("by-path", ReservedFor::Cgroup("/rt.slice/cells".to_owned())),
        grant("never", ReservedFor::Vm("late".to_owned())),
    ]);
    let scope = format!("/kubepods.slice/kubepods-burstable-pod7f0c0f5e_3b6e.slice/crio-{}.scope", "a".repeat(64));
    let other = scope.replace("3b6e", "3b6f");
    let users = Subject { owner: 7, cgroup_owner: 7, namer: Namer::User(7), ..vm("x") };
    let container = Subject { kind: Kind::Container, cgroup: Some(&scope), ..vm("x") };
    let metadata = Some(Verdict { class: Class::Bulk, runtime_cap: None });
    let by = |subject: &Subject<'_>| {
        let decided = rules.decide(subject, metadata);
        match decided.source {
            ClassSource::Reservation { name, vcpus } => {
                assert_eq!((decided.class, decided.runtime_cap, vcpus), (rt(2), 0.25, 3));
                name
            }
            _ => String::new(),
        }
    };
    for (subject, reservation) in [
        (vm("cell"), "by-name"),
        (vm("cell2"), ""),
        (vm("late"), ""),
        (Subject { name: "cell", ..users }, ""),
        (Subject { name: "cell", kind: Kind::Container, ..vm("x") }, ""),
        (container, "by-pod"),
        (Subject { cgroup: Some(&other), ..container }, ""),
        (Subject { cgroup_owner: 7, ..container }, ""),
        (Subject { beside_vm: true, ..container }, ""),
        (Subject { in_pod_of_vm: true, ..container }, ""),
        (Subject { kind: Kind::Qemu, in_pod_of_vm: true, namer: Namer::Container, owner: 107, ..container }, "by-pod"),
        (Subject { cgroup: Some("/rt.slice/cells/1.scope"), ..vm("x") }, "by-path"),
        (Subject { cgroup: Some("/rt.slice/cells2"), ..vm("x") }, ""),
        (Subject { cgroup: Some("/rt.slice/cells"), ..users }, ""),
    ] {
        assert_eq!(by(&subject), reservation, "{subject:?}");
    }
    assert!(rules.names_cgroup("/rt.slice/cells") && !rules.names_cgroup("/rt.slice"));
}

#[test]
fn a_user_gets_no_real_time_by_choosing_a_name() {
    let users = Subject {
        owner: 1000,
        namer: Namer::User(1000),
        cgroup: Some("/user.slice/user-1000.slice/a"),
        cgroup_owner: 1000,
        ..vm("plc")
    };
    let rules = parse("[[tenant]]\nname = \"plc\"\nclass = \"rt\"\n");
    let decided = rules.decide(&users, None);
    assert_eq!(decided.class, Class::Bulk);
    assert_eq!(decided.withheld.as_deref(), Some("/etc/ontime/tenants.toml:3"));
    let by_path = parse("[[tenant]]\ncgroup = \"/user.slice/**/a\"\nclass = \"rt\"\n");
    assert_eq!(by_path.decide(&users, None).class, Class::Bulk, "users name cgroups in their own slice");
    let named = parse("[[tenant]]\nname = \"plc\"\nuser = 1000\nclass = \"rt\"\n");
    assert_eq!(named.decide(&users, None).class, rt(0));
    let root = parse("[[tenant]]\nname = \"plc\"\nuser = \"root\"\nclass = \"rt\"\n");
    assert_eq!(root.decide(&vm("plc"), None).class, rt(0));
    assert_eq!(root.decide(&users, None).withheld, None);
    let bulk = parse("[[tenant]]\nname = \"plc\"\nclass = \"bulk\"\n");
    assert_eq!(bulk.decide(&users, None).withheld, None);
}

#[test]
fn a_vm_in_a_container_gets_no_real_time_by_its_name_though_its_user_is_root() {
    let inside = Subject { namer: Namer::Container, ..vm("plc") };
    for text in [
        "name = \"plc\"",
        "kind = \"qemu\"",
        "name = \"plc\"\nuser = 0",
        "uuid = \"3f1c9a52-0d52-4c1b-9e0a-6f4b7f1d2c33\"",
    ] {
        let rules = parse(&format!("[[tenant]]\n{text}\nclass = \"rt\"\n"));
        assert_eq!(rules.decide(&inside, None).class, Class::Bulk, "{text}");
        assert!(rules.decide(&inside, None).withheld.is_some());
    }
    let by_place = parse("[[tenant]]\ncgroup = \"/rt.slice\"\nclass = \"rt\"\n");
    assert_eq!(by_place.decide(&inside, None).class, rt(0));
    let delegated = Subject { cgroup_owner: 1000, ..inside };
    assert_eq!(by_place.decide(&delegated, None).class, Class::Bulk, "the path is a user's choice");
    let trusted = parse("[[tenant]]\ncgroup = \"/rt.slice\"\nuser = 1000\nclass = \"rt\"\n");
    let users = Subject { owner: 1000, namer: Namer::User(1000), ..delegated };
    assert_eq!(by_place.decide(&users, None).class, Class::Bulk);
    assert_eq!(trusted.decide(&users, None).class, rt(0));
}

#[test]
fn rt_rules_that_no_tenant_fits_are_told_with_the_condition() {
    let rule = |text: &str| format!("[[tenant]]\n{text}\nclass = \"rt\"\n");
    let cell = vm("cell");
    let press = Subject { uuid: None, cgroup: None, kind: Kind::Container, owner: 7, ..vm("press") };
    for (text, what) in [
        ("name = \"c*\"", None),
        ("name = \"{press,x}\"\nkind = \"container\"\nuser = 7", None),
        ("cgroup = \"/rt.slice\"", None),
        ("name = \"mill-*\"", Some("has a name like `mill-*`")),
        ("name = \"mill-*\"\nkind = \"qemu\"", Some("has a name like `mill-*`")),
        ("uuid = \"0d1c9a52-0d52-4c1b-9e0a-6f4b7f1d2c33\"", Some("has the UUID 0d1c9a52-0d52-4c1b-9e0a-6f4b7f1d2c33")),
        ("cgroup = \"/plc.slice/*\"", Some("is in a cgroup like `/plc.slice/*`")),
        ("kind = \"vmm\"", Some("is of kind `vmm`")),
        ("user = 8\nname = \"cell\"", Some("is of user 8")),
        ("name = \"cell\"\nkind = \"libvirt\"", Some("is of kind `libvirt`")),
        (
            "name = \"cell\"\nkind = \"container\"",
            Some("fits all of its conditions: `cell` is not of kind `container`"),
        ),
        (
            "name = \"press\"\ncgroup = \"/rt.slice\"\nkind = \"container\"",
            Some("fits all of its conditions: `press` is in no cgroup like `/rt.slice`"),
        ),
        (
            "user = 7\nkind = \"qemu\"\ncgroup = \"/rt.slice\"",
            Some("fits all of its conditions: `cell` is not of user 7"),
        ),
    ] {
        let unused = parse(&rule(text)).unused(&[cell, press]);
        assert_eq!(unused.iter().map(|one| one.what.as_str()).collect::<Vec<_>>(), Vec::from_iter(what), "{text}");
        assert_eq!(unused.iter().any(|one| one.by_name), text.contains("mill"), "{text}");
    }
    // A misspelt `bulk` rule with `override`, or before an `rt` rule, leaves a tenant at real-time priority.
    let bulk = |name: &str| format!("[[tenant]]\nname = \"{name}\"\nclass = \"bulk\"\n");
    let (libvirts, named) = (rule("kind = \"libvirt\""), rule("name = \"{a,b}\""));
    let several = parse(&format!("{libvirts}{}{named}{}override = true\n", bulk("web"), bulk("pres")));
    let places: Vec<String> = several.unused(&[]).into_iter().map(|one| one.place).collect();
    let wanted = [3, 6, 9, 12].map(|line| format!("/etc/ontime/tenants.toml:{line}"));
    assert_eq!(places, wanted, "of a host without tenants");
    let told: Vec<String> = several.unused(&[press]).into_iter().map(|one| one.what).collect();
    let web = "has a name like `web`";
    assert_eq!(told, ["is of kind `libvirt`", web, "has a name like `{a,b}`", "has a name like `pres`"]);
    // Without an `rt` rule after it that is no override, a `bulk` rule changes nothing.
    let prior = rule("kind = \"container\"\noverride = true");
    for (text, lines) in [
        (format!("{}{prior}", bulk("web")), &[][..]),
        (format!("{}{}", rule("name = \"press\""), bulk("web")), &[]),
        (format!("{}{}{}", bulk("press"), bulk("ci-runer"), rule("cgroup = \"/machine.slice/**\"")), &[6, 9]),
    ] {
        let places: Vec<String> = parse(&text).unused(&[press]).into_iter().map(|one| one.place).collect();
        let wanted: Vec<String> = lines.iter().map(|line| format!("/etc/ontime/tenants.toml:{line}")).collect();
        assert_eq!(places, wanted, "{text}");
    }
}

#[test]
fn a_name_of_three_parts_tells_pods_of_two_namespaces_apart() {
    let of = |namespace| Subject { namespace: Some(namespace), kind: Kind::Container, ..vm("press-0/loop") };
    for (pattern, plant, test) in [
        ("plant/press-0/loop", true, false),
        ("plant/*/loop", true, false),
        ("*/press-0/loop", true, true),
        ("press-0/loop", true, true),
        ("press-?/*", true, true),
        ("plant/loop/press-0", false, false),
        // A namespace is no part of a shorter pattern: these mean VMs and other containers.
        ("plant*", false, false),
        ("plant/*", false, false),
        ("test", false, false),
    ] {
        let rules = parse(&format!("[[tenant]]\nname = \"{pattern}\"\nclass = \"rt\"\n"));
        let is_rt = |subject: &Subject<'_>| rules.decide(subject, None).class == rt(0);
        assert_eq!((is_rt(&of("plant")), is_rt(&of("test"))), (plant, test), "{pattern}");
        let unknown = Subject { namespace: None, ..of("plant") };
        assert_eq!(is_rt(&unknown), plant && test && !pattern.starts_with("*/"), "{pattern}");
        assert_eq!(rules.name_namespaces(), pattern.matches('/').count() == 2, "{pattern}");
    }
    let of_user = Subject { owner: 1000, namer: Namer::User(1000), cgroup_owner: 1000, ..of("plant") };
    let rules = parse("[[tenant]]\nname = \"plant/*/*\"\nclass = \"rt\"\n");
    assert_eq!(rules.decide(&of_user, None).class, Class::Bulk, "a user's choice");
}

#[test]
fn cgroups_cover_what_lies_below_and_stars_stay_within_a_component() {
    let rules = parse("[[tenant]]\ncgroup = \"/machine.slice/*-rt.scope\"\nclass = \"rt\"\n");
    for (path, class) in [
        ("/machine.slice/a-rt.scope", rt(0)),
        ("/machine.slice/a-rt.scope/payload/x", rt(0)),
        ("/machine.slice/deep/a-rt.scope", Class::Bulk),
        ("/machine.slice", Class::Bulk),
    ] {
        assert_eq!(rules.decide(&Subject { cgroup: Some(path), ..vm("x") }, None).class, class, "{path}");
    }
    assert!(rules.names_cgroup("/machine.slice/a-rt.scope"));
    assert!(!rules.names_cgroup("/machine.slice"));
    let escaped = parse("[[tenant]]\ncgroup = '/machine.slice/machine-my\\x2dbox.scope'\nclass = \"rt\"\n");
    assert!(escaped.names_cgroup(r"/machine.slice/machine-my\x2dbox.scope"), "systemd's escapes are plain text");
}

#[test]
fn priorities_and_defaults_are_the_hosts() {
    let rules =
        parse("[priorities]\nbase = 80\n[defaults]\nruntime-cap = 0.7\n[[tenant]]\nname = \"a\"\nclass = \"rt\"\n");
    assert_eq!(rules.table().policy(rt(0), Role::Irq), Policy::Fifo(80));
    assert_eq!(rules.decide(&vm("a"), None).runtime_cap, 0.7);
    let metadata = Some(Verdict { class: rt(0), runtime_cap: None });
    assert_eq!(rules.decide(&vm("x"), metadata).runtime_cap, 0.7);
}

#[test]
fn everything_wrong_is_refused_with_place_and_what_is_allowed() {
    let rule = "[[tenant]]\nname = \"a\"\n";
    for (text, place, expected) in [
        ("[[tenants]]\n", "1:3", "unknown field `tenants`, expected one of `priorities`, `defaults`, `tenant`"),
        (&format!("{rule}clas = \"rt\"\n"), "3:1", "did you mean `class`?"),
        (&format!("{rule}class = \"fast\"\n"), "3:9", "unknown variant `fast`, expected `rt` or `bulk`"),
        (&format!("{rule}class = \"rt\"\nlevel = 9\n"), "4:9", "level 9 is not one of 0 (most urgent) to 8"),
        (&format!("{rule}class = \"rt\"\nlevel = -1\n"), "4:9", "level -1 is not one of 0 (most urgent) to 8"),
        (&format!("{rule}class = \"rt\"\nlevel = 300\n"), "4:9", "level 300 is not one of"),
        (
            &format!("{rule}class = \"rt\"\nlevel = \"high\"\n"),
            "4:9",
            "a level, a whole number from 0 (most urgent) to 8",
        ),
        (
            &format!("{rule}class = \"rt\"\nruntime-cap = 80\n"),
            "4:15",
            "runtime-cap 80 is not a fraction of one CPU from 0.000001 to 1",
        ),
        (
            &format!("{rule}class = \"rt\"\nruntime-cap = 9e-7\n"),
            "4:15",
            "runtime-cap 0.0000009 is not a fraction of one CPU from 0.000001 to 1",
        ),
        ("[defaults]\nruntime-cap = 0.0\n", "2:15", "runtime-cap 0 is not a fraction of one CPU from 0.000001 to 1"),
        (&format!("{rule}class = \"rt\"\nruntime-cap = nan\n"), "4:15", "not a fraction of one CPU"),
        (&format!("{rule}class = \"bulk\"\nlevel = 1\n"), "4:9", "`level` is for class = \"rt\" only"),
        (&format!("{rule}class = \"bulk\"\nruntime-cap = 0.5\n"), "4:15", "`runtime-cap` is for class = \"rt\" only"),
        ("[[tenant]]\nclass = \"rt\"\n", "2:9", "matches nothing: give at least one of `name`, `uuid`"),
        (rule, "1:1", "missing field `class`"),
        ("[[tenant]]\nname = \"a[\"\nclass = \"rt\"\n", "2:8", "allowed are `*`, `?`, `[abc]`"),
        ("[[tenant]]\nuuid = \"12\"\nclass = \"rt\"\n", "2:8", "is not a UUID"),
        ("[[tenant]]\ncgroup = \"rt.slice\"\nclass = \"rt\"\n", "2:10", "starts with `/`"),
        ("[[tenant]]\ncgroup = \"/**\"\nclass = \"rt\"\n", "2:10", "names something"),
        (
            "[[tenant]]\nkind = \"pod\"\nclass = \"rt\"\n",
            "2:8",
            "expected one of `libvirt`, `qemu`, `vmm`, `container`",
        ),
        ("[[tenant]]\nuser = \"nobody-here\"\nclass = \"rt\"\n", "2:8", "not in /etc/passwd"),
        ("[[tenant]]\nuser = -1\nclass = \"rt\"\n", "2:8", "a user's name or number"),
        ("[priorities]\nbase = 99\n", "2:8", "base 99 is not one of 49 to 90"),
        ("[priorities]\nbase = -5\n", "2:8", "base -5 is not one of 49 to 90"),
        ("[priorities]\nbase = 306\n", "2:8", "base 306 is not one of 49 to 90"),
        ("[priorities]\nbase = 50\nbase = 51\n", "3:1", "duplicate key"),
    ] {
        let message = refused(text);
        assert!(message.starts_with(&format!("/etc/ontime/tenants.toml:{place}: ")), "{text:?}\n{message}");
        assert!(message.contains(expected), "{text:?}\n{message}");
    }
}

#[test]
fn a_host_has_one_base_in_one_place() {
    let one = Text::new("/etc/ontime/tenants.toml", "[priorities]\nbase = 50\n");
    let two = Text::new("/etc/ontime/tenants.conf.d/x.toml", "\n[priorities]\nbase = 60\n");
    let message = Rules::parse(&[one, two]).unwrap_err().to_string();
    assert!(message.starts_with("/etc/ontime/tenants.conf.d/x.toml:3:8: "), "{message}");
    assert!(message.contains("already set at /etc/ontime/tenants.toml:2:8"), "{message}");
}

#[test]
fn no_files_mean_no_rules() {
    let dir = tempfile::tempdir().unwrap();
    let rules = Rules::load(dir.path()).unwrap();
    assert_eq!(rules.decide(&vm("a"), None).class, Class::Bulk);
    std::fs::create_dir(dir.path().join("tenants.conf.d")).unwrap();
    std::fs::write(dir.path().join("tenants.conf.d/a.toml"), "[[tenant]]\nname = \"a\"\nclass = \"rt\"\n").unwrap();
    assert_eq!(Rules::load(dir.path()).unwrap().decide(&vm("a"), None).class, rt(0));
}

proptest! {
    #[test]
    fn no_rule_file_makes_it_panic(
        lines in proptest::collection::vec(
            "(\\[\\[tenant\\]\\]|\\[priorities\\]|base|name|class|level|cgroup|user|uuid)? ?=? \
             ?(\"[^\"]{0,8}\"|-?[0-9]{1,20}|nan|\\PC{0,9})",
            0..10,
        ),
    ) {
        if let Err(error) = Rules::parse(&[Text::new("f", lines.join("\n"))]) {
            prop_assert!(error.to_string().starts_with("f:"));
        }
    }

    #[test]
    fn no_glob_or_subject_makes_it_panic(pattern in "\\PC{0,12}", name in "\\PC{0,12}", cgroup in "/\\PC{0,20}") {
        let file = format!("[[tenant]]\nname = {}\nclass = \"rt\"\n", toml::Value::String(pattern));
        if let Ok(rules) = Rules::parse(&[Text::new("f", file)]) {
            let users = Subject { uuid: None, cgroup_owner: 5, owner: 5, namer: Namer::User(5), ..vm(&name) };
            let _ = rules.decide(&Subject { cgroup: Some(&cgroup), ..users }, None);
        }
    }
}
