//! Facts and checks of the machine the tests run on: whatever it is, they are read, and nothing is changed.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // a test that cannot go on fails

use std::time::Instant;

use ontime_hostnet::doctor::Refused;
use ontime_hostnet::{Intent, Inventory, LiveHost, Method, Roots, examine, kvm, plan};

#[test]
fn facts_are_read() {
    let start = Instant::now();
    let inventory = Inventory::scan(&Roots::default());
    println!(
        "{:?}: {} NICs, {} IRQs, {} threads",
        start.elapsed(),
        inventory.nics.len(),
        inventory.irqs.len(),
        inventory.threads.len()
    );
    println!("{}", serde_json::to_string_pretty(&inventory).unwrap());
    let again = Inventory::scan(&Roots::default());
    assert!(!inventory.kernel.release.is_empty() && inventory.kernel.version.0 >= 5);
    assert!(!inventory.cpus.online.is_empty() && !inventory.irqs.is_empty());
    assert_eq!(inventory.cpus.online, again.cpus.online);
    assert!(inventory.threads.iter().any(|thread| thread.comm.starts_with("ksoftirqd/")));
}

#[test]
fn every_method_can_be_planned_here() {
    let inventory = Inventory::scan(&Roots::default());
    for method in Method::ALL {
        let found = plan(&inventory, &Intent { method, exclusive_cpu: Some(0), ..Intent::default() });
        let keys: std::collections::BTreeSet<_> = found.settings.iter().map(|setting| setting.knob.key()).collect();
        assert_eq!(keys.len(), found.settings.len(), "a knob is set twice by {method}");
        println!("{method}: {} settings, {} findings", found.settings.len(), found.findings.len());
    }
}

#[test]
fn the_doctor_examines_this_host() {
    let start = Instant::now();
    let inventory = Inventory::scan(&Roots::default());
    let probe = kvm::probe("/dev/kvm".as_ref());
    let diagnosis =
        examine(&LiveHost::default(), &inventory, &Intent::default(), &[], &Refused::new(), &probe.clone().into());
    println!("{:?}\n{}", start.elapsed(), serde_json::to_string_pretty(&diagnosis).unwrap());
    for check in &diagnosis.checks {
        assert!(!check.found.is_empty() && !check.title.is_empty(), "{check:?}");
        let bad = check.state != ontime_hostnet::State::Ok;
        assert!(!bad || !check.remedy.is_empty(), "{check:?} has no remedy");
    }
    let worst = diagnosis.checks.iter().map(|check| check.state).max();
    assert_eq!(worst, Some(diagnosis.state));
}
