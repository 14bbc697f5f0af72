//! The kernel's own protections against threads at real-time priority: whether they are on, and what they were.
//!
//! From Linux 6.12 these are the servers in debugfs (`sched/fair_server`); before, and where groups have real-time bandwidth
//! of their own, `kernel.sched_rt_runtime_us`.

use std::path::PathBuf;

use ontime_hostnet::{Host, Inventory, Journal, Knob, KnobError, Plan, Roots, Stage, Value};

/// The knobs of the plan that switch protections off, and those in the journal that an earlier daemon switched off.
pub fn knobs(plan: &Plan) -> Vec<&Knob> {
    plan.settings.iter().filter(|setting| setting.stage == Stage::Protection).map(|setting| &setting.knob).collect()
}

/// Whether a knob is a protection, wherever it comes from.
pub fn is_protection(knob: &Knob) -> bool {
    matches!(knob, Knob::HostFile { path, .. }
        if path == "sys/kernel/sched_rt_runtime_us"
            || (path.starts_with("sched/") && path.contains("_server/") && path.ends_with("/runtime")))
}

/// The originals of protections that the journal keeps, as files and values.
pub fn originals(journal: &Journal, roots: &Roots) -> Vec<(PathBuf, String)> {
    journal
        .entries()
        .iter()
        .filter(|entry| is_protection(&entry.knob))
        .filter_map(|entry| match (&entry.knob, &entry.value) {
            (Knob::HostFile { root, path }, Value::Text(text)) => Some((roots.path(*root, path), text.clone())),
            _ => None,
        })
        .collect()
}

/// Writes the protections' originals. They stay in the journal: the rest of a reset is somebody else's.
pub fn restore(host: &dyn Host, journal: &Journal) -> Vec<(Knob, Result<(), KnobError>)> {
    journal
        .entries()
        .iter()
        .filter(|entry| is_protection(&entry.knob))
        .map(|entry| (entry.knob.clone(), host.write(&entry.knob, &entry.value)))
        .collect()
}

/// Whether the kernel protects itself with the originals in force: each server has a runtime, or there is none and RT
/// throttling is on.
pub fn kernel_protects(inventory: &Inventory, journal: &Journal) -> bool {
    let original = |knob: &Knob, now: i64| match journal.original(knob) {
        Some(Value::Text(text)) => text.parse().unwrap_or(now),
        _ => now,
    };
    let protections = &inventory.protections;
    let mut servers = protections.servers.get("fair_server").into_iter().flatten().peekable();
    if servers.peek().is_some() {
        return servers.all(|(cpu, now)| {
            let path = format!("sched/fair_server/cpu{cpu}/runtime");
            original(&Knob::HostFile { root: ontime_hostnet::Root::Debug, path }, i64::try_from(*now).unwrap_or(1)) > 0
        });
    }
    // From 6.12 the fair server is there whether or not it can be seen, on unless somebody switched it off.
    if inventory.kernel.version >= (6, 12) {
        return true;
    }
    let knob = Knob::HostFile { root: ontime_hostnet::Root::Proc, path: "sys/kernel/sched_rt_runtime_us".to_owned() };
    protections.rt_runtime_us.is_none_or(|now| original(&knob, now) >= 0)
}
