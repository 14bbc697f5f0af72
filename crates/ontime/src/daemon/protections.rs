//! The kernel's own protections against real-time threads: whether they are on, and their original values.
//!
//! From Linux 6.12 on, these are the servers in debugfs (`sched/fair_server`). On older kernels, and where groups have
//! real-time bandwidth of their own, it is `kernel.sched_rt_runtime_us`.

use std::path::PathBuf;

use crate::log::change_line;
use ontime_hostnet::{Done, Host, Inventory, Item, Journal, Knob, Plan, Root, Roots, Stage, Value};

/// The knobs of the plan that switch protections off.
pub(crate) fn knobs(plan: &Plan) -> Vec<&Knob> {
    plan.settings.iter().filter(|setting| setting.stage == Stage::Protection).map(|setting| &setting.knob).collect()
}

/// Whether a knob is a protection.
pub(crate) fn is_protection(knob: &Knob) -> bool {
    matches!(knob, Knob::HostFile { path, .. }
        if path == "sys/kernel/sched_rt_runtime_us"
            || (path.starts_with("sched/") && path.contains("_server/") && path.ends_with("/runtime")))
}

/// The original values of protections in the journal, as files and values.
pub(crate) fn originals(journal: &Journal, roots: &Roots) -> Vec<(PathBuf, String)> {
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

/// The same in the order in which they are written: the reverse of switching off, because Linux 6.12 accepts its RT
/// limit only after its fair servers.
pub(crate) fn files(journal: &Journal, roots: &Roots) -> Vec<(PathBuf, String)> {
    let mut files = originals(journal, roots);
    files.reverse();
    files
}

/// Writes the protections' original values, in the order that kernels need. They stay in the journal, because the
/// caller does the rest of a reset. Returns for each knob whether it failed, and why.
pub(crate) fn restore(host: &dyn Host, journal: &Journal) -> Vec<(Knob, Result<(), String>)> {
    let report = ontime_hostnet::apply::give_back(host, journal, is_protection);
    let say = |item: &Item| {
        if item.done == Done::Restored {
            tracing::info!("{}", change_line(&item.knob, item.from.as_ref(), &item.to, "restored"));
        }
    };
    report
        .items
        .into_iter()
        .inspect(say)
        .map(|item| match item.done {
            Done::Failed(why) | Done::Unsupported(why) => (item.knob, Err(why)),
            Done::Changed | Done::Already | Done::Restored | Done::Gone => (item.knob, Ok(())),
        })
        .collect()
}

/// The message to an operator about a protection that [`restore`] could not restore.
pub(crate) fn still_off(error: &str) -> String {
    format!("this kernel protection could not be restored: {error}; `ontime reset` tries again")
}

/// Whether the kernel's protections are on once the original values are in force: each server has a runtime, or there
/// is no server and RT throttling is on.
///
/// The inventory only gives the list of knobs. Their values are read now, because a pass may have restored them since.
pub(crate) fn kernel_protects(host: &dyn Host, inventory: &Inventory, journal: &Journal) -> bool {
    let original = |root, path: String| {
        let knob = Knob::HostFile { root, path };
        let value = journal.original(&knob).cloned().or_else(|| host.read(&knob).ok());
        match value {
            Some(Value::Text(text)) => text.parse::<i64>().ok(),
            _ => None,
        }
    };
    let mut servers = inventory.protections.servers.get("fair_server").into_iter().flatten().peekable();
    if servers.peek().is_some() {
        // A server that cannot be read does not count as a protection.
        return servers.all(|(cpu, _)| {
            original(Root::Debug, format!("sched/fair_server/cpu{cpu}/runtime")).is_some_and(|runtime| runtime > 0)
        });
    }
    // From Linux 6.12 on the fair server exists even if it cannot be seen, and is on by default.
    if inventory.kernel.version >= (6, 12) {
        return true;
    }
    original(Root::Proc, "sys/kernel/sched_rt_runtime_us".to_owned()).is_none_or(|runtime| runtime >= 0)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    use ontime_hostnet::inventory::{Kernel, Protections};
    use ontime_hostnet::{KnobError, Original};

    use super::*;

    /// Knobs in memory.
    struct Files(RefCell<BTreeMap<String, String>>);

    impl Host for Files {
        fn read(&self, knob: &Knob) -> Result<Value, KnobError> {
            let found = self.0.borrow().get(&knob.key()).cloned();
            found.map(Value::Text).ok_or_else(|| KnobError::Gone(knob.to_string()))
        }

        fn write(&self, knob: &Knob, value: &Value) -> Result<(), KnobError> {
            self.0.borrow_mut().insert(knob.key(), value.to_string());
            Ok(())
        }
    }

    fn server(cpu: u32) -> Knob {
        Knob::HostFile { root: Root::Debug, path: format!("sched/fair_server/cpu{cpu}/runtime") }
    }

    fn host(now: [&str; 2]) -> Files {
        Files(RefCell::new([0, 1].into_iter().zip(now).map(|(cpu, v)| (server(cpu).key(), v.to_owned())).collect()))
    }

    fn inventory(seen: u64) -> Inventory {
        let servers = BTreeMap::from([("fair_server".to_owned(), BTreeMap::from([(0, seen), (1, seen)]))]);
        Inventory {
            kernel: Kernel { version: (7, 2), ..Kernel::default() },
            protections: Protections { servers, readable: true, ..Protections::default() },
            ..Inventory::default()
        }
    }

    #[test]
    fn originals_decide_then_what_is_now_never_what_a_pass_saw_before_it_gave_them_back() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(&dir.path().join("originals"), "boot").unwrap();
        assert!(kernel_protects(&host(["5", "5"]), &inventory(0), &journal));
        assert!(!kernel_protects(&host(["5", "0"]), &inventory(5), &journal));
        let kept = [0, 1].map(|cpu| Original { knob: server(cpu), value: Value::Text("5".to_owned()) });
        journal.store(kept.to_vec()).unwrap();
        assert!(kernel_protects(&host(["0", "0"]), &inventory(0), &journal));
        let off = host(["0", "0"]);
        assert!(restore(&off, &journal).iter().all(|(_, done)| done.is_ok()));
        assert_eq!(off.read(&server(1)).unwrap(), Value::Text("5".to_owned()));
    }

    #[test]
    fn only_protections_are_protections() {
        let file = |root, path: &str| Knob::HostFile { root, path: path.to_owned() };
        assert!(is_protection(&server(3)));
        assert!(is_protection(&file(Root::Debug, "sched/ext_server/cpu0/runtime")));
        assert!(is_protection(&file(Root::Proc, "sys/kernel/sched_rt_runtime_us")));
        assert!(!is_protection(&file(Root::Proc, "sys/net/core/skb_defer_max")));
        assert!(!is_protection(&file(Root::Debug, "sched/fair_server/cpu0/period")));
    }
}
