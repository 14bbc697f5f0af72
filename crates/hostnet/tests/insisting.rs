//! A setting whose driver says that it is so and may do otherwise is written in every pass.

use std::cell::Cell;

use ontime_hostnet::{
    Done, Host, Journal, Knob, KnobError, Moderation, NicId, Plan, RuleId, Setting, Stage, Value, apply, reset,
};

/// Says that it has what it was told last.
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
    let plan = |insists| Plan { settings: vec![Setting { insists, ..setting.clone() }], findings: Vec::new() };

    let report = apply(&driver, &plan(true), &mut journal).unwrap();
    assert!(report.counts().changed == 1 && report.insists(&plan(true)) && !report.insists(&plan(false)));
    for writes in 2..4 {
        let report = apply(&driver, &plan(true), &mut journal).unwrap();
        assert!(report.counts().already == 1 && !report.insists(&plan(true)), "{report:?}");
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
