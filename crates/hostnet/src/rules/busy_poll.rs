//! A polling thread for each RT receive queue (Kernel Busy Poll, IEICE'22). It uses the kernel's `NAPI_SET threaded=2`,
//! or before 6.19 the host module `ontime_napi`, whose threads poll as a process does that busy-polls a socket.
//!
//! The paper's thread owns a CPU; here it does if `poll_cpu` names one. In any case it polls at FIFO 1: every vCPU,
//! `rcuc`, `ktimers` and `ksoftirqd` run before it, so that timers, RCU and other softirqs continue, and the runtime
//! cap leaves threads without real-time priority their share. On a host with one CPU it polls only if `poll_cpu` names
//! that CPU, because that share is small for a whole host.

use ontime_tenants::{Class, Policy, PriorityTable};

use super::napi_weight::{INSTALL, MODULE_UNTIL};
use super::threads::{napi_knob, place, thread_of};
use crate::CpuSet;
use crate::intent::Intent;
use crate::inventory::{Inventory, KernelThread, KernelThreadKind, Napi, Nic};
use crate::kernel_files::POLL_FILE;
use crate::knob::{Knob, Value};
use crate::rule::{Finding, Outcome, Refusal, RuleId, Setting, Severity, Stage};

/// The instance is polled by its thread, without interrupts (`NETDEV_NAPI_THREADED_BUSY_POLL`).
pub(super) const POLLING: u32 = 2;
/// The first kernel version with that mode.
pub(crate) const POLLING_SINCE: (u32, u32) = (6, 19);

/// Whether the host module polls because the kernel cannot: all instances of a NIC or none.
pub(super) fn by_module(inventory: &Inventory, nic: &Nic) -> bool {
    inventory.kernel.version < POLLING_SINCE && nic.busy_poll.is_some()
}

/// Whether the method polls this instance now. Only physical NICs are polled: a virtual interface's packets come from a
/// thread of this host, and polling could only take the CPU from that thread.
pub(super) fn polls(inventory: &Inventory, intent: &Intent, nic: &Nic, napi: &Napi) -> bool {
    may_poll(inventory, intent, nic, napi) && !intent.resting.contains(&nic.id.ifindex)
}

/// Whether the method polls this instance, now or when packets arrive.
fn may_poll(inventory: &Inventory, intent: &Intent, nic: &Nic, napi: &Napi) -> bool {
    intent.method.has(RuleId::BusyPoll)
        && nic.physical
        && (has_thread(inventory, napi) || by_module(inventory, nic) && is_rt(inventory, intent, nic))
        && (inventory.cpus.online.len() > 1
            || named_cpu(intent, nic).is_some_and(|cpu| inventory.cpus.online.contains(cpu)))
        && intent.napi_class(inventory, nic, napi) != Class::Bulk
}

/// Whether the kernel's own thread can poll, and no other program has made it poll.
fn has_thread(inventory: &Inventory, napi: &Napi) -> bool {
    inventory.kernel.version >= POLLING_SINCE && napi.threaded.is_some_and(|mode| mode < POLLING)
}

/// Whether all receive queues of the NIC are RT.
fn is_rt(inventory: &Inventory, intent: &Intent, nic: &Nic) -> bool {
    nic.napis.iter().all(|napi| intent.napi_class(inventory, nic, napi) != Class::Bulk)
}

fn named_cpu(intent: &Intent, nic: &Nic) -> Option<u32> {
    intent.config_of(nic)?.poll_cpu
}

/// The CPU on which the method keeps the kernel's thread of this instance, whether or not the thread polls now.
pub(super) fn cpu_of(inventory: &Inventory, intent: &Intent, nic: &Nic, napi: &Napi) -> Option<u32> {
    let is_kept = intent.has(RuleId::BusyPoll) && may_poll(inventory, intent, nic, napi) && !by_module(inventory, nic);
    let online = &inventory.cpus.online;
    named_cpu(intent, nic).filter(|cpu| is_kept && online.len() > 1 && online.contains(*cpu))
}

/// A thread's place as text, with its CPU if it has one of its own.
pub(super) fn place_text(policy: Policy, cpu: Option<u32>) -> String {
    cpu.map_or_else(|| policy.to_string(), |cpu| format!("{policy} on CPU {cpu}"))
}

/// NICs with an instance that the method polls, now or when packets arrive.
pub fn polling_nics<'a>(inventory: &'a Inventory, intent: &'a Intent) -> impl Iterator<Item = &'a Nic> {
    inventory.nics.iter().filter(|nic| nic.napis.iter().any(|napi| may_poll(inventory, intent, nic, napi)))
}

/// The rule [`RuleId::BusyPoll`].
pub(super) fn busy_poll(inventory: &Inventory, intent: &Intent) -> Outcome {
    let mut outcome = Outcome::default();
    for nic in inventory.nics.iter().filter(|nic| nic.physical) {
        let rt: Vec<&Napi> =
            nic.napis.iter().filter(|napi| intent.napi_class(inventory, nic, napi) != Class::Bulk).collect();
        if rt.is_empty() {
            continue;
        }
        let module = by_module(inventory, nic);
        if let Some(found) = lacks(inventory, intent, nic, &rt) {
            outcome.findings.push(found);
            continue;
        }
        let own = own_cpu(inventory, intent, nic, &mut outcome);
        if module && rt.iter().any(|napi| polls(inventory, intent, nic, napi)) {
            let knob = Knob::NicFile { nic: nic.id.clone(), path: POLL_FILE.to_owned() };
            outcome.settings.push(Setting::new(RuleId::BusyPoll, Stage::Thread, knob, Value::Text("1".to_owned())));
            if rt.iter().all(|napi| poller_of(inventory, napi).is_none()) {
                let place = place_text(PriorityTable::POLLER, own);
                let found = format!("its polling threads do not exist yet; once made they get {place}");
                let remedy = "nothing; module ontime_napi makes them, and Ontime then places them".to_owned();
                outcome.findings.push(finding(nic, Severity::Info, found, remedy, None));
            }
        }
        for napi in rt.into_iter().filter(|napi| may_poll(inventory, intent, nic, napi)) {
            let now = polls(inventory, intent, nic, napi);
            if now && !module {
                let knob = napi_knob(nic, napi);
                outcome.settings.push(Setting::new(RuleId::BusyPoll, Stage::Thread, knob, Value::Threaded(POLLING)));
            }
            let thread = if module { poller_of(inventory, napi) } else { thread_of(inventory, napi) };
            let Some(thread) = thread else { continue };
            // The thread stays on its CPU whether or not it polls.
            if let Some(cpu) = own {
                let knob = Knob::ThreadAffinity { thread: thread.id, comm: thread.comm.clone() };
                let cpus = Value::Cpus(CpuSet::from_iter([cpu]));
                outcome.settings.push(Setting::new(RuleId::BusyPoll, Stage::Affinity, knob, cpus));
            }
            if now {
                outcome.settings.push(place(RuleId::BusyPoll, thread, PriorityTable::POLLER));
            }
        }
    }
    outcome
}

/// The host module's thread for an instance.
fn poller_of<'a>(inventory: &'a Inventory, napi: &Napi) -> Option<&'a KernelThread> {
    inventory.threads.iter().find(|thread| thread.kind == KernelThreadKind::NapiPoll(napi.id))
}

/// Why a NIC with these RT instances cannot be polled.
fn lacks(inventory: &Inventory, intent: &Intent, nic: &Nic, rt: &[&Napi]) -> Option<Finding> {
    if by_module(inventory, nic) {
        return (!is_rt(inventory, intent, nic)).then(|| {
            let found =
                "module ontime_napi polls all of a NIC's queues, and some of these are bulk: it waits for interrupts"
                    .to_owned();
            let remedy = "give RT tenants a NIC of their own, or boot a kernel of 6.19 or later".to_owned();
            finding(nic, Severity::Warning, found, remedy, Some(Refusal::Kernel))
        });
    }
    if inventory.kernel.version >= POLLING_SINCE && rt.iter().any(|napi| napi.threaded.is_some()) {
        return None;
    }
    let found = format!("kernel {} has no polling NAPI threads: it waits for interrupts", inventory.kernel.release);
    let install = if inventory.kernel.version < MODULE_UNTIL { INSTALL } else { "" };
    let remedy = format!("{install} boot a kernel of 6.19 or later (Debian: from backports)").trim_start().to_owned();
    Some(finding(nic, Severity::Warning, found, remedy, Some(Refusal::Kernel)))
}

/// The CPU for a NIC's polling threads, if one is configured and usable. Adds findings about it.
fn own_cpu(inventory: &Inventory, intent: &Intent, nic: &Nic, outcome: &mut Outcome) -> Option<u32> {
    let cpus = &inventory.cpus;
    let named = named_cpu(intent, nic);
    let table = intent.table_of(nic);
    let set = format!("set poll_cpu of [{table}] in /etc/ontime/host.toml to an online CPU kept for it");
    if cpus.online.len() < 2 {
        let found = match named {
            Some(cpu) if cpus.online.contains(cpu) => {
                "polls on the only CPU: bulk work and housekeeping get what the runtime cap leaves, 5 % while it polls"
                    .to_owned()
            }
            other => {
                let offline = other.map_or_else(String::new, |cpu| format!("poll_cpu {cpu} is not online; "));
                format!("{offline}does not poll: on the only CPU that would leave bulk work and housekeeping 5 % of it")
            }
        };
        let remedy = format!(
            "run it on a host with more CPUs; or, knowing this, set poll_cpu in [{table}], best with [busypoll] \
             adaptive = true and a bound"
        );
        outcome.findings.push(finding(nic, Severity::Warning, found, remedy, None));
        return None;
    }
    match named {
        Some(cpu) if cpus.online.contains(cpu) => {
            if !cpus.isolated.contains(cpu) {
                let found = format!("other threads may run on CPU {cpu}, where only its runtime cap lets them");
                let remedy = format!(
                    "boot with isolcpus={cpu} nohz_full={cpu} rcu_nocbs={cpu}, make it an isolated cpuset partition \
                     (cgroup v2), or leave it \
                     to this NIC otherwise"
                );
                outcome.findings.push(finding(nic, Severity::Info, found, remedy, None));
            }
            Some(cpu)
        }
        Some(cpu) => {
            let found = format!("poll_cpu {cpu} is not online (online: {})", cpus.online);
            outcome.findings.push(finding(nic, Severity::Warning, found, set, None));
            None
        }
        None => {
            let found =
                "its polling thread has no CPU of its own: it runs below every vCPU, above bulk work".to_owned();
            outcome.findings.push(finding(nic, Severity::Info, found, set, None));
            None
        }
    }
}

fn finding(nic: &Nic, severity: Severity, found: String, remedy: String, refusal: Option<Refusal>) -> Finding {
    Finding { rule: RuleId::BusyPoll, severity, object: nic.id.name.clone(), found, remedy, refusal }
}
