//! Every method on a whole host, including its global knobs. For a host that may be changed, such as the lab's emulated
//! host.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // a test that cannot go on fails

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Instant;

use ontime_hostnet::{
    Done, Host, Intent, Inventory, Journal, Knob, LiveHost, Method, Plan, Roots, RuleId, Value, converge, drift, plan,
    replan, reset,
};

fn intent(method: Method) -> Intent {
    Intent { method, caps_in_force: true, exclusive_cpu: Some(1), ..Intent::default() }
}

fn look(method: Method, journal: &Journal) -> Plan {
    replan(Inventory::scan(&Roots::default()), intent(method), journal)
}

/// Every knob that any method sets, except those of NAPI threads, which NAPI threading creates and ends.
fn snapshot(host: &LiveHost) -> BTreeMap<String, (Knob, Value)> {
    let inventory = Inventory::scan(&Roots::default());
    let plans = Method::ALL.iter().map(|method| plan(&inventory, &intent(*method)));
    plans
        .flat_map(|plan| plan.settings)
        .filter(|setting| setting.rule != RuleId::NapiThread)
        .filter_map(|setting| Some((setting.knob.key(), (setting.knob.clone(), host.read(&setting.knob).ok()?))))
        .collect()
}

#[test]
fn every_method_is_applied_switched_and_undone() {
    if std::env::var_os("ONTIME_TEST_WHOLE_HOST").is_none() {
        println!("SKIPPED: changes this host's own knobs; set ONTIME_TEST_WHOLE_HOST=1 on a host that may be changed");
        return;
    }
    let host = LiveHost::default();
    let state = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(&state.path().join("originals"), "boot").unwrap();
    let before = snapshot(&host);
    for knob in before.values() {
        println!("{}: {}", knob.0, knob.1);
    }
    for method in [Method::Partitioned].into_iter().chain(Method::ALL.iter().copied()).chain([Method::Partitioned]) {
        let start = Instant::now();
        let report = converge(&host, &mut journal, |journal| Ok::<_, Infallible>(look(method, journal))).unwrap();
        println!("{method}: {:?} in {:?}", report.counts(), start.elapsed());
        for item in report.items.iter().filter(|item| matches!(item.done, Done::Failed(_) | Done::Unsupported(_))) {
            println!("  {}: {:?}", item.knob, item.done);
        }
        assert_eq!(report.counts().failed, 0);
        let drifted = drift(&host, &look(method, &journal), &journal);
        assert!(drifted.iter().all(|drift| !drift.was_applied), "{method} did not hold: {drifted:?}");
        let again = converge(&host, &mut journal, |journal| Ok::<_, Infallible>(look(method, journal))).unwrap();
        assert_eq!((again.counts().changed, again.counts().restored), (0, 0), "{method} a second time");
    }
    let report = reset(&host, &mut journal).unwrap();
    println!("reset: {:?}", report.counts());
    assert!(journal.entries().is_empty());
    let after = snapshot(&host);
    for (key, (knob, value)) in &before {
        assert_eq!(after.get(key).map(|(_, value)| value), Some(value), "{knob} after reset");
    }
}
