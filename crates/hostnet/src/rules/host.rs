//! Host-wide rules: softirq threads, buffers, KVM's polling, protections against FIFO threads.

use std::collections::BTreeMap;

use ontime_tenants::PriorityTable;

use super::threads::place;
use crate::intent::Intent;
use crate::inventory::{Inventory, KernelThreadKind, Lockdown};
use crate::kernel_files::{PANIC_ON_WARN, RT_RUNTIME, SKB_DEFER_MAX};
use crate::knob::{Knob, Root, Value};
use crate::rule::{Finding, Outcome, Refusal, RuleId, Setting, Severity, Stage};

/// The module parameter of [`RuleId::HaltPoll`], below `/sys`.
pub(crate) const HALT_POLL_NS: &str = "module/kvm/parameters/halt_poll_ns";
/// The first kernel whose fair server replaces RT throttling.
const FAIR_SERVER_SINCE: (u32, u32) = (6, 12);

/// The first version without this bug: when a root domain is rebuilt, the kernel forgets its servers' bandwidth.
/// Removing a server's bandwidth then underflows in `__dl_overflow` (`kernel/sched/deadline.c`) and returns EBUSY (seen
/// on 6.12.107), unless no RT limit is in force. A write to the server of an isolated CPU that has a runnable thread
/// then warns once in `task_non_contending` (seen on 6.12.117); the kernel corrects the account.
const SERVER_ACCOUNTED_SINCE: (u32, u32) = (6, 18);

/// The rule [`RuleId::SoftirqThreads`]. Without PREEMPT_RT softirqs run on interrupt return, and these priorities
/// matter little.
pub(super) fn softirq_threads(inventory: &Inventory, _intent: &Intent) -> Outcome {
    let mut outcome = Outcome::default();
    if !inventory.kernel.realtime {
        return outcome;
    }
    for thread in &inventory.threads {
        let policy = match thread.kind {
            KernelThreadKind::Ksoftirqd(_) | KernelThreadKind::Ktimers(_) => PriorityTable::KTIMERS,
            KernelThreadKind::Rcuc(_) => PriorityTable::RCUC,
            _ => continue,
        };
        outcome.settings.push(place(RuleId::SoftirqThreads, thread, policy));
    }
    outcome
}

/// The rule [`RuleId::SkbDefer`]. A kernel without the sysctl (before 5.19) does not defer.
pub(super) fn skb_defer(inventory: &Inventory, _intent: &Intent) -> Outcome {
    let mut outcome = Outcome::default();
    if inventory.sysctls.contains_key(SKB_DEFER_MAX) {
        let knob = Knob::HostFile { root: Root::Proc, path: format!("sys/{SKB_DEFER_MAX}") };
        outcome.settings.push(Setting::new(RuleId::SkbDefer, Stage::Host, knob, Value::Text("0".to_owned())));
    }
    outcome
}

/// The rule [`RuleId::HaltPoll`]. If kvm is not loaded, there is nothing to set.
pub(super) fn halt_poll(inventory: &Inventory, _intent: &Intent) -> Outcome {
    let mut outcome = Outcome::default();
    if inventory.kvm.halt_poll_ns.is_some() {
        let knob = Knob::HostFile { root: Root::Sys, path: HALT_POLL_NS.to_owned() };
        outcome.settings.push(Setting::new(RuleId::HaltPoll, Stage::Host, knob, Value::Text("0".to_owned())));
    }
    outcome
}

/// The rule [`RuleId::RtProtections`].
pub(super) fn rt_protections(inventory: &Inventory, intent: &Intent) -> Outcome {
    let mut outcome = Outcome::default();
    if inventory.kernel.version < FAIR_SERVER_SINCE {
        rt_throttling(inventory, intent, &mut outcome);
    } else if inventory.kernel.lockdown != Lockdown::None {
        let remedy =
            "boot without lockdown (it comes with Secure Boot), or run RT tenants on nohz_full and rcu_nocbs CPUs";
        outcome.findings.push(stays("kernel lockdown denies debugfs, so they stay on", remedy, Refusal::Lockdown));
    } else if !inventory.protections.readable {
        let remedy = "mount it (mount -t debugfs debugfs /sys/kernel/debug); where it is mounted, the note on debugfs \
            has the cause";
        outcome.findings.push(stays("debugfs cannot be read, so they stay on", remedy, Refusal::Unreadable));
    } else if !intent.caps_in_force {
        outcome.findings.push(no_caps(intent));
    } else {
        servers_off(inventory, &mut outcome);
    }
    outcome
}

fn servers_off(inventory: &Inventory, outcome: &mut Outcome) {
    if inventory.kernel.version < SERVER_ACCOUNTED_SINCE && !inventory.protections.servers.is_empty() {
        let panics = inventory.sysctls.get(PANIC_ON_WARN).is_some_and(|text| text != "0");
        // Once they are off, turning them on again writes to them as well.
        let is_on = inventory.protections.servers.values().flat_map(BTreeMap::values).any(|ns| *ns > 0);
        if panics && is_on && !inventory.cpus.isolated.is_empty() {
            let found = "kernel.panic_on_warn is set, and before 6.18 the kernel may warn when the server of an \
                         isolated CPU is turned off, so they stay on";
            let remedy = "sysctl kernel.panic_on_warn=0, or a kernel from 6.18 on, or no isolated CPUs";
            outcome.findings.push(stays(found, remedy, Refusal::NotLiveSafe));
            return;
        }
        if inventory.protections.rt_runtime_us.is_some() {
            outcome.settings.push(no_rt_limit());
        }
    }
    for (server, runtimes) in &inventory.protections.servers {
        for cpu in runtimes.keys() {
            let knob = Knob::HostFile { root: Root::Debug, path: format!("sched/{server}/cpu{cpu}/runtime") };
            let value = Value::Text("0".to_owned());
            outcome.settings.push(Setting::new(RuleId::RtProtections, Stage::Protection, knob, value));
        }
    }
}

/// On kernels before the fair server, throttling stops all RT threads of a CPU for 50 ms of each second.
fn rt_throttling(inventory: &Inventory, intent: &Intent, outcome: &mut Outcome) {
    if inventory.protections.rt_runtime_us.is_none() {
        return;
    }
    if !intent.caps_in_force {
        outcome.findings.push(no_caps(intent));
        return;
    }
    outcome.settings.push(no_rt_limit());
}

fn no_rt_limit() -> Setting {
    let knob = Knob::HostFile { root: Root::Proc, path: format!("sys/{RT_RUNTIME}") };
    Setting::new(RuleId::RtProtections, Stage::Protection, knob, Value::Text("-1".to_owned()))
}

fn no_caps(intent: &Intent) -> Finding {
    if !intent.reserved.is_empty() {
        let found = "CPU time is reserved, beside which they stay on: what they give to others is within the reserve";
        return Finding { severity: Severity::Info, ..stays(found, "nothing", Refusal::NoCaps) };
    }
    let remedy =
        "nothing, where RT tenants use little CPU; else start the daemon, which caps them and then turns these off";
    stays("runtime caps of RT tenants are not in force, so they stay on", remedy, Refusal::NoCaps)
}

fn stays(found: &str, remedy: &str, refusal: Refusal) -> Finding {
    Finding {
        rule: RuleId::RtProtections,
        severity: Severity::Warning,
        object: "protections against FIFO threads".to_owned(),
        found: found.to_owned(),
        remedy: remedy.to_owned(),
        refusal: Some(refusal),
    }
}
