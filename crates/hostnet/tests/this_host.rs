//! Facts and checks of the machine on which the tests run. They are read on any machine, and nothing is changed.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // a test that cannot go on fails

use std::fs;
use std::process::{Child, Command};
use std::time::Instant;

use ontime_hostnet::doctor::Refused;
use ontime_hostnet::{Host, Intent, Inventory, Knob, KnobError, LiveHost, Method, Roots, Value, examine, kvm, plan};
use ontime_tenants::{Policy, ThreadId};

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
    for &method in Method::ALL {
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
    // Unknown SMIs of a guest do not count.
    let counts = diagnosis.checks.iter().filter(|check| check.id != "smi" || !inventory.kernel.hypervisor);
    assert_eq!(counts.map(|check| check.state).max(), Some(diagnosis.state));
}

/// A process that sleeps in its own cgroup, and the cgroup; both end with the test.
struct Sleeper(Child, std::path::PathBuf);

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = (self.0.kill(), self.0.wait());
        let _ = fs::remove_dir(&self.1);
    }
}

#[test]
fn this_kernels_refusal_of_a_place_without_budget_has_its_cause_and_remedy() {
    let controller = std::path::Path::new("/sys/fs/cgroup/cpu");
    let limit = fs::read_to_string("/proc/sys/kernel/sched_rt_runtime_us").unwrap();
    let cgroup = controller.join(format!("ontime-test-{}", std::process::id()));
    let has_budgets = controller.join("cpu.rt_runtime_us").exists() && limit.trim() != "-1";
    if !has_budgets || fs::create_dir(&cgroup).is_err() {
        println!("SKIPPED: needs root, cgroup v1 and CONFIG_RT_GROUP_SCHED");
        return;
    }
    let sleeper = Sleeper(Command::new("sleep").arg("600").spawn().unwrap(), cgroup);
    let pid = i32::try_from(sleeper.0.id()).unwrap();
    fs::write(sleeper.1.join("cgroup.procs"), pid.to_string()).unwrap();
    let knob = Knob::ThreadPolicy { thread: ThreadId::of(pid, pid).unwrap(), comm: "sleep".to_owned() };
    let host = LiveHost::default();
    let refused = host.write(&knob, &Value::Policy(Policy::Fifo(1))).unwrap_err();
    let KnobError::Refused { cause, remedy, .. } = &refused else { panic!("{refused}") };
    let name = sleeper.1.file_name().unwrap().to_str().unwrap();
    assert!(cause.contains("CONFIG_RT_GROUP_SCHED") && cause.contains(&format!("cgroup /{name}")), "{cause}");
    assert!(remedy.contains(&format!("{}/cpu.rt_runtime_us", sleeper.1.display())), "{remedy}");
    // With a budget it is set.
    if fs::write(sleeper.1.join("cpu.rt_runtime_us"), "1000").is_ok() {
        host.write(&knob, &Value::Policy(Policy::Fifo(1))).unwrap();
    }
}
