//! Settings with special handling: a setting whose driver may report a value that the device does not use is written in
//! every pass, and a setting with dependencies is made only with them.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;

use ontime_hostnet::{
    Done, Host, Journal, Knob, KnobError, Moderation, NicId, Plan, Root, RuleId, Setting, Stage, Value, apply, reset,
};

/// A driver that reports the value written last.
struct Driver {
    has: Cell<Moderation>,
    writes: Cell<u32>,
    refuses: Cell<bool>,
}

impl Host for Driver {
    fn read(&self, _: &Knob) -> Result<Value, KnobError> {
        Ok(Value::Moderation(self.has.get()))
    }

    fn write(&self, knob: &Knob, value: &Value) -> Result<(), KnobError> {
        match value {
            Value::Moderation(value) if !self.refuses.get() => {
                self.writes.set(self.writes.get() + 1);
                self.has.set(*value);
                Ok(())
            }
            _ => Err(KnobError::Unsupported { knob: knob.to_string(), why: "no".to_owned() }),
        }
    }
}

#[test]
fn it_is_written_in_every_pass_and_once_more_after_a_change() {
    let [none, adaptive] = [0, 3].map(|rx_usecs| Moderation { rx_usecs, adaptive: None });
    let driver = Driver { has: Cell::new(adaptive), writes: Cell::new(0), refuses: Cell::new(false) };
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(&dir.path().join("originals"), "boot").unwrap();
    let knob = Knob::Moderation { nic: NicId { ifindex: 2, name: "eth0".to_owned() } };
    let setting = Setting::new(RuleId::Moderation, Stage::Steer, knob, Value::Moderation(none));
    let plan = |needs_second_write| Plan {
        settings: vec![Setting { needs_second_write, ..setting.clone() }],
        findings: Vec::new(),
    };

    let report = apply(&driver, &plan(true), &mut journal).unwrap();
    assert!(
        report.counts().changed == 1
            && report.needs_second_write(&plan(true))
            && !report.needs_second_write(&plan(false))
    );
    for writes in 2..4 {
        let report = apply(&driver, &plan(true), &mut journal).unwrap();
        assert!(report.counts().already == 1 && !report.needs_second_write(&plan(true)), "{report:?}");
        assert_eq!(driver.writes.get(), writes);
    }
    apply(&driver, &plan(false), &mut journal).unwrap();
    assert_eq!(driver.writes.get(), 3, "what the driver says is what the device has");
    driver.refuses.set(true);
    let report = apply(&driver, &plan(true), &mut journal).unwrap();
    assert!(matches!(report.items[0].done, Done::Unsupported(_)), "{report:?}");
    driver.refuses.set(false);
    reset(&driver, &mut journal).unwrap();
    assert_eq!(driver.has.get(), adaptive);
}

/// Files of which some cannot be read and some cannot be written.
#[derive(Default)]
struct Files(RefCell<BTreeMap<String, String>>);

impl Files {
    fn refuse(knob: &Knob, path: &str, by: &str) -> Result<(), KnobError> {
        let refused = KnobError::Unsupported { knob: knob.to_string(), why: "no".to_owned() };
        if path.starts_with(by) { Err(refused) } else { Ok(()) }
    }
}

fn path(knob: &Knob) -> &str {
    match knob {
        Knob::HostFile { path, .. } => path,
        _ => "",
    }
}

impl Host for Files {
    fn read(&self, knob: &Knob) -> Result<Value, KnobError> {
        Self::refuse(knob, path(knob), "unreadable")?;
        if path(knob) == "failing" {
            let source = io::Error::from_raw_os_error(libc::EMFILE);
            return Err(KnobError::Os { knob: knob.to_string(), what: "reading", source });
        }
        Ok(Value::Text(self.0.borrow().get(path(knob)).cloned().unwrap_or_default()))
    }

    fn write(&self, knob: &Knob, value: &Value) -> Result<(), KnobError> {
        Self::refuse(knob, path(knob), "unwritable")?;
        self.0.borrow_mut().insert(path(knob).to_owned(), value.to_string());
        Ok(())
    }
}

fn file(path: &str) -> Knob {
    Knob::HostFile { root: Root::Sys, path: path.to_owned() }
}

fn set(path: &str) -> Setting {
    Setting::new(RuleId::QdiscBypass, Stage::Steer, file(path), Value::Text("1".to_owned()))
}

#[test]
fn what_overwrites_others_is_set_only_if_these_can_be_restored() {
    for (other, is_set) in [("plain", true), ("unreadable", true), ("failing", false)] {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(&dir.path().join("originals"), "boot").unwrap();
        let first = Setting { overwrites: vec![file(other)], ..set("first") };
        let settings = vec![first, Setting { needs: vec![file("first")], ..set("second") }];
        let (files, plan) = (Files::default(), Plan { settings, findings: Vec::new() });
        let report = apply(&files, &plan, &mut journal).unwrap();
        for name in ["first", "second"] {
            let done = (files.0.borrow().contains_key(name), journal.has(&file(name)));
            assert_eq!(done, (is_set, is_set), "{name} {other}: {report:?}");
        }
        assert_eq!(journal.has(&file(other)), other == "plain");
        let failed = matches!(&report.items[0].done, Done::Failed(why) if why.contains("the next pass tries again"));
        assert_eq!(failed, !is_set, "{report:?}");
    }
}

#[test]
fn what_needs_others_is_set_only_with_them() {
    for (first, is_set) in [("plain", true), ("unreadable", false), ("unwritable", false)] {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(&dir.path().join("originals"), "boot").unwrap();
        let settings = vec![set(first), Setting { needs: vec![file(first)], ..set("second") }];
        let (files, plan) = (Files::default(), Plan { settings, findings: Vec::new() });
        let report = apply(&files, &plan, &mut journal).unwrap();
        assert_eq!(files.0.borrow().contains_key("second"), is_set, "{first}: {report:?}");
        assert_eq!(journal.has(&file("second")), is_set, "{first}: nothing was changed there");
        let second = report.items.iter().find(|item| item.knob == file("second")).unwrap();
        match &second.done {
            Done::Unsupported(why) => assert!(why.contains(first) && !is_set, "{why}"),
            done => assert!(is_set && *done == Done::Changed, "{done:?}"),
        }
    }
    // A further dependency that cannot be set: the setting that was made without it is restored.
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(&dir.path().join("originals"), "boot").unwrap();
    let files = Files::default();
    let mut settings = vec![set("second")];
    apply(&files, &Plan { settings: settings.clone(), findings: Vec::new() }, &mut journal).unwrap();
    assert_eq!(files.0.borrow()["second"], "1");
    settings[0].needs = vec![file("unreadable")];
    settings.insert(0, set("unreadable"));
    apply(&files, &Plan { settings, findings: Vec::new() }, &mut journal).unwrap();
    assert!(files.0.borrow()["second"].is_empty() && !journal.has(&file("second")));
}
