//! A vCPU with reserved CPU time is handed on to another component, which changes its policy from then on. Whatever
//! policy it has then, a reset restores its original. And threads that get their places beside a plan in force.
#![allow(clippy::unwrap_used)] // a test that cannot go on fails

use std::process::{Child, Command};

use ontime_hostnet::{Done, Journal, Knob, LiveHost, Plan, RuleId, Setting, Stage, Value, add, apply, reset};
use ontime_tenants::{Policy, ThreadId};

/// A process that stands for a vCPU; it ends with the test.
struct Sleeper(Child);

impl Sleeper {
    fn start() -> (Self, ThreadId) {
        let child = Command::new("sleep").arg("600").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let id = ThreadId::of(pid, pid).unwrap();
        (Self(child), id)
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn plan(thread: ThreadId, handed_on: bool) -> Plan {
    let knob = Knob::ThreadPolicy { thread, comm: "sleep".to_owned() };
    let setting = Setting::new(RuleId::VcpuPlace, Stage::Place, knob, Value::Policy(Policy::BULK));
    Plan { settings: vec![Setting { handed_on, ..setting }], findings: Vec::new() }
}

#[test]
fn its_original_is_kept_although_it_has_the_wanted_policy_already() {
    let (_sleeper, thread) = Sleeper::start();
    // The user who runs the tests may have set another nice value.
    thread.set_policy(Policy::BULK).unwrap();
    let host = LiveHost::default();
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(&dir.path().join("originals"), "boot").unwrap();

    let report = apply(&host, &plan(thread, false), &mut journal).unwrap();
    assert_eq!((report.counts().already, journal.entries().len()), (1, 0), "nobody changes it, nothing to give back");

    for _ in 0..2 {
        let report = apply(&host, &plan(thread, true), &mut journal).unwrap();
        assert!(report.items.iter().all(|item| item.done == Done::Already), "{report:?}");
        assert_eq!(journal.entries().len(), 1);
    }
    thread.set_policy(Policy::Idle).unwrap();
    reset(&host, &mut journal).unwrap();
    assert_eq!(thread.policy().unwrap(), Policy::BULK);
    assert!(journal.entries().is_empty());
}

#[test]
fn what_is_added_restores_nothing_and_a_whole_plan_finds_it_made() {
    let sleepers = [Sleeper::start(), Sleeper::start()];
    let [first, second] = [&sleepers[0], &sleepers[1]].map(|(_, thread)| *thread);
    let settings = |threads: &[ThreadId]| {
        let knob = |thread: &ThreadId| Knob::ThreadPolicy { thread: *thread, comm: "sleep".to_owned() };
        let idle = |knob| Setting::new(RuleId::VcpuPlace, Stage::Place, knob, Value::Policy(Policy::Idle));
        threads.iter().map(knob).map(idle).collect::<Vec<_>>()
    };
    let whole = |threads: &[ThreadId]| Plan { settings: settings(threads), findings: Vec::new() };
    let policies = || [first, second].map(|thread| thread.policy().unwrap());
    let before = policies();
    let host = LiveHost::default();
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(&dir.path().join("originals"), "boot").unwrap();

    apply(&host, &whole(&[first]), &mut journal).unwrap();
    let report = add(&host, &settings(&[second]), &mut journal).unwrap();
    assert_eq!((report.counts().changed, report.items.len(), policies()), (1, 1, [Policy::Idle; 2]));
    let report = apply(&host, &whole(&[first, second]), &mut journal).unwrap();
    assert_eq!((report.counts().already, journal.entries().len()), (2, 2));
    apply(&host, &whole(&[first]), &mut journal).unwrap();
    assert_eq!((policies(), journal.entries().len()), ([Policy::Idle, before[1]], 1));
    reset(&host, &mut journal).unwrap();
    assert_eq!(policies(), before);
}
