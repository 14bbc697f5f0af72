//! Threads of network interfaces: interrupts, NAPI, backlog.

use std::collections::{BTreeMap, BTreeSet};

use ontime_tenants::{Class, Policy, PriorityTable, Role, ThreadId};

use super::busy_poll::{self, POLLING};
use super::threads::{DELAYS_RT, NAPI_LISTED, delays_rt, has_napi, napi_knob, place, thread_of};
use super::{senders, veth};
use crate::intent::Intent;
use crate::inventory::{Inventory, Irq, KernelThread, KernelThreadKind, Napi, Nic};
use crate::kernel_files::UNTHREADING_WAITS;
use crate::knob::{Knob, Value};
use crate::rule::{Finding, Outcome, Refusal, RuleId, Setting, Severity, Stage};

/// The rule [`RuleId::NapiThreaded`]. RT NICs have threads, too, although a poll in the interrupt's thread would take
/// 2,000 instructions of 57,000 less: while a bulk thread of the CPU polls in softirq (another network namespace's
/// interface, say), the kernel leaves every further poll to that thread (`net/core/dev.c`, `in_net_rx_action`).
pub(super) fn napi_threaded(inventory: &Inventory, intent: &Intent) -> Outcome {
    let mut outcome = Outcome::default();
    for nic in inventory.nics.iter().filter(|nic| has_napi(inventory, nic)) {
        let Some(mode) = nic.threaded else {
            outcome.findings.push(Finding {
                rule: RuleId::NapiThreaded,
                severity: Severity::Critical,
                object: nic.id.name.clone(),
                found: format!("kernel {} cannot thread NAPI", inventory.kernel.release),
                remedy: "boot a kernel of 5.12 or later".to_owned(),
                refusal: Some(Refusal::Kernel),
            });
            continue;
        };
        if mode == 0 && nic.physical && !nic.up && inventory.kernel.version >= UNTHREADING_WAITS {
            // A thread made while the interface is down could not be ended before the interface is up. The pass after
            // the interface comes up makes the threads.
            continue;
        }
        let needs: Vec<Knob> = veth::napi_maker(nic).into_iter().collect();
        // Polling by a thread exceeds this rule's aim, and another program chose it.
        if mode < POLLING {
            let knob = Knob::NicFile { nic: nic.id.clone(), path: "threaded".to_owned() };
            let mut setting = Setting::new(RuleId::NapiThreaded, Stage::Thread, knob, Value::Text("1".to_owned()));
            setting.overwrites = separately_threaded(nic).map(|napi| napi_knob(nic, napi)).collect();
            setting.needs = needs.clone();
            outcome.settings.push(setting);
        }
        if mode == 0 {
            outcome.findings.extend(threads_to_come(inventory, intent, nic));
        }
        if mode == 1 {
            // The busy-poll rule sets the instances that it polls. Instances that poll by another program's choice stay
            // as they are.
            let ours = nic.napis.iter().filter(|napi| !busy_poll::polls(inventory, intent, nic, napi));
            for napi in ours.filter(|napi| napi.threaded.is_some_and(|mode| mode < POLLING)) {
                let value = Value::Threaded(1);
                let setting = Setting::new(RuleId::NapiThreaded, Stage::Thread, napi_knob(nic, napi), value);
                outcome.settings.push(Setting { needs: needs.clone(), ..setting });
            }
        }
    }
    outcome
}

/// All instances whose mode the kernel stores separately from the interface's (6.17). The journal must record which of
/// them differ, because after the first apply none does.
fn separately_threaded(nic: &Nic) -> impl Iterator<Item = &Napi> {
    nic.napis.iter().filter(|napi| napi.threaded.is_some())
}

/// Tells which places an interface's NAPI threads that do not exist yet will get, and by which rules.
fn threads_to_come(inventory: &Inventory, intent: &Intent, nic: &Nic) -> Option<Finding> {
    let unlisted = nic.napis.is_empty() && inventory.kernel.version < NAPI_LISTED;
    let unknown = unlisted.then(Napi::default);
    let placed_by = |napi: &Napi| {
        if is_polled_by_kernel(inventory, intent, nic, napi) { RuleId::BusyPoll } else { RuleId::NapiThread }
    };
    let is_to_come = |napi: &&Napi| thread_of(inventory, napi).is_none() && intent.has(placed_by(napi));
    let mut places: Vec<(String, usize)> = Vec::new();
    let mut rules: BTreeSet<&str> = BTreeSet::new();
    for napi in nic.napis.iter().chain(&unknown).filter(is_to_come) {
        let rule = placed_by(napi);
        let policy = if rule == RuleId::BusyPoll {
            PriorityTable::POLLER
        } else {
            napi_place(inventory, intent, nic, intent.napi_class(inventory, nic, napi), sends_only(napi))
        };
        let place = busy_poll::place_text(policy, busy_poll::cpu_of(inventory, intent, nic, napi));
        rules.insert(rule.name());
        match places.iter_mut().find(|(known, _)| *known == place) {
            Some((_, count)) => *count += 1,
            None => places.push((place, 1)),
        }
    }
    let rules: Vec<&str> = rules.into_iter().collect();
    let rules = rules.join(", ");
    let text = match places.as_slice() {
        [] => return None,
        [(place, _)] => place.clone(),
        several => {
            let several: Vec<String> = several.iter().map(|(place, count)| format!("{place} ({count})")).collect();
            several.join(" and ")
        }
    };
    let found = match places.iter().map(|(_, count)| count).sum::<usize>() {
        _ if unlisted => format!(
            "kernel {} does not list its NAPI instances: threads that are made for them get {text} ({rules})",
            inventory.kernel.release
        ),
        1 => format!("its NAPI thread does not exist yet; once made it gets {text} ({rules})"),
        count => format!("its {count} NAPI threads do not exist yet; once made they get {text} ({rules})"),
    };
    Some(Finding {
        rule: RuleId::NapiThreaded,
        severity: Severity::Info,
        object: nic.id.name.clone(),
        found,
        remedy: "nothing; Ontime makes them where it may set this NIC's `threaded`, and then places them".to_owned(),
        refusal: None,
    })
}

/// The rule [`RuleId::IrqThread`]. An interrupt that several NICs share gets the place of the most urgent of them. The
/// class of one in another network namespace is unknown, so bulk NICs here do not decide then.
pub(super) fn irq_thread(inventory: &Inventory, intent: &Intent) -> Outcome {
    let mut outcome = Outcome::default();
    let mut shared = Shared::new();
    let delays = delays_rt(intent);
    for thread in &inventory.threads {
        let KernelThreadKind::Irq(irq) = thread.kind else { continue };
        let nics = inventory.nics.iter().filter(|nic| nic.irqs.contains(&irq));
        let classes: Vec<(Class, &Nic)> = nics.map(|nic| (intent.irq_class(inventory, nic, irq), nic)).collect();
        let elsewhere = inventory.irqs.iter().find(|of| of.id.irq == irq).and_then(|of| of.elsewhere.as_deref());
        if let Some(device) = elsewhere.filter(|_| classes.iter().all(|(class, _)| *class == Class::Bulk)) {
            outcome.findings.push(serves_elsewhere(thread, &classes, device, delays(thread.policy)));
            continue;
        }
        let completes = only_completes(inventory, irq);
        let policy = |nic: &Nic, class| {
            if completes && senders::is_shared(inventory, intent, nic) {
                PriorityTable::SHARED_COMPLETIONS
            } else {
                intent.table.policy(class, Role::Irq)
            }
        };
        outcome.settings.extend(most_urgent(RuleId::IrqThread, thread, classes, policy, &mut shared));
    }
    outcome.findings.extend(shared_findings(RuleId::IrqThread, shared));
    outcome.findings.extend(without_interrupts(inventory, intent).map(|nic| {
        Finding {
            rule: RuleId::IrqThread,
            severity: Severity::Warning,
            object: nic.id.name.clone(),
            found: "no interrupt is known to be its own, by its device or by a handler's name: no thread has its place"
                .to_owned(),
            remedy: format!(
                "look for it in /proc/interrupts, and place its thread by hand at {}",
                intent.table.policy(intent.nic_class(inventory, nic), Role::Irq)
            ),
            refusal: None,
        }
    }));
    if !inventory.kernel.threaded_irqs {
        outcome.findings.push(Finding {
            rule: RuleId::IrqThread,
            severity: Severity::Warning,
            object: format!("kernel {}", inventory.kernel.release),
            found: "interrupt handlers run above every thread, not in threads".to_owned(),
            remedy: "boot a PREEMPT_RT kernel (Debian: linux-image-rt-amd64), or this one with threadirqs".to_owned(),
            refusal: Some(Refusal::Kernel),
        });
    }
    outcome
}

/// The finding for an interrupt of bulk NICs that also serves a NIC in another network namespace.
fn serves_elsewhere(thread: &KernelThread, nics: &[(Class, &Nic)], device: &str, delays: bool) -> Finding {
    let names: Vec<&str> = nics.iter().map(|(_, nic)| nic.id.name.as_str()).collect();
    let (severity, delays) = if delays { (Severity::Warning, DELAYS_RT) } else { (Severity::Info, "") };
    Finding {
        rule: RuleId::IrqThread,
        severity,
        object: thread.comm.clone(),
        found: format!(
            "thread {} is of {} (bulk) and of network controller {device}, which has no interface in the host's \
             network namespace: it stays at {}{delays}",
            thread.id.tid,
            names.join(", "),
            thread.policy
        ),
        remedy: format!(
            "leave it where an RT container or VM has that interface; where a bulk one has: chrt --other --pid 0 {}",
            thread.id.tid
        ),
        refusal: None,
    }
}

/// Drivers whose interrupts have no thread: Hyper-V's bus has no interrupt per device, and the channel subsystem of
/// s390 (qeth, lcs, ctcm, netiucv) has no interrupt descriptors.
const WITHOUT_IRQ: [&str; 5] = ["hv_netvsc", "qeth", "lcs", "ctcm", "netiucv"];

/// RT NICs without known interrupts. Excluded are interfaces above others and those of drivers without interrupt
/// threads, which have none.
pub(super) fn without_interrupts<'a>(inventory: &'a Inventory, intent: &'a Intent) -> impl Iterator<Item = &'a Nic> {
    let has_none = |nic: &Nic| nic.driver.as_deref().is_some_and(|driver| WITHOUT_IRQ.contains(&driver));
    let may_have = move |nic: &&Nic| nic.physical && nic.up && nic.lower.is_empty() && !has_none(nic);
    let nics = inventory.nics.iter().filter(may_have);
    nics.filter(|nic| nic.irqs.is_empty() && intent.nic_class(inventory, nic) != Class::Bulk)
}

/// Whether an interrupt signals only the completion of sent packets, by the names that drivers give such handlers
/// (`eth0-tx-0`: e1000e, igb, igc, ixgbe, vmxnet3, tg3; `virtio0-output.0`).
fn only_completes(inventory: &Inventory, irq: u32) -> bool {
    let completes = |action: &String| {
        let name = action.trim_end_matches(|digit: char| digit.is_ascii_digit());
        name.len() < action.len() && (name.ends_with("-tx-") || name.ends_with("-output."))
    };
    let mut of_irq = inventory.irqs.iter().filter(|of| of.id.irq == irq);
    of_irq.any(|of| !of.actions.is_empty() && of.actions.iter().all(completes))
}

/// A NAPI thread, and the NICs that it may poll.
struct Polls<'a> {
    thread: &'a KernelThread,
    nics: Vec<(Class, &'a Nic)>,
    /// The thread serves only transmit queues.
    sends_only: bool,
}

/// The rule [`RuleId::NapiThread`].
pub(super) fn napi_thread(inventory: &Inventory, intent: &Intent) -> Outcome {
    let mut outcome = Outcome::default();
    // If a thread's name was cut, the thread is in the list of each NIC to which it may belong.
    let mut threads: BTreeMap<ThreadId, Polls> = BTreeMap::new();
    for nic in &inventory.nics {
        for napi in &nic.napis {
            if is_polled_by_kernel(inventory, intent, nic, napi) {
                continue;
            }
            let Some(thread) = thread_of(inventory, napi) else { continue };
            if napi.threaded == Some(POLLING) {
                outcome.findings.push(polling(nic, thread));
                continue;
            }
            let polls = threads.entry(thread.id).or_insert(Polls { thread, nics: Vec::new(), sends_only: true });
            polls.nics.push((intent.napi_class(inventory, nic, napi), nic));
            polls.sends_only &= sends_only(napi);
        }
    }
    let mut shared = Shared::new();
    for Polls { thread, nics, sends_only } in threads.into_values() {
        let policy = |nic: &Nic, class| napi_place(inventory, intent, nic, class, sends_only);
        outcome.settings.extend(most_urgent(RuleId::NapiThread, thread, nics, policy, &mut shared));
    }
    outcome.findings.extend(shared_findings(RuleId::NapiThread, shared));
    outcome.findings.extend(renamed(inventory, intent));
    outcome
}

/// Whether an instance's own thread polls it without pause. The host module has its own threads; the NAPI threads take
/// over when those do not poll.
fn is_polled_by_kernel(inventory: &Inventory, intent: &Intent, nic: &Nic, napi: &Napi) -> bool {
    busy_poll::polls(inventory, intent, nic, napi) && !busy_poll::by_module(inventory, nic)
}

/// Whether an instance serves only transmit queues.
fn sends_only(napi: &Napi) -> bool {
    napi.rx_queues.is_empty() && !napi.tx_queues.is_empty()
}

/// The place of a NAPI thread of this class.
fn napi_place(inventory: &Inventory, intent: &Intent, nic: &Nic, class: Class, sends_only: bool) -> Policy {
    if sends_only && senders::is_shared(inventory, intent, nic) {
        PriorityTable::SHARED_COMPLETIONS
    } else {
        intent.table.policy(class, Role::Napi)
    }
}

/// Most threads that a finding names.
const NAMED: usize = 4;

/// Before 6.8: threaded RT NICs of which no NAPI thread is known. A thread keeps the name that its NIC had when the
/// kernel made it (`net/core/dev.c`, `napi_kthread_create`). A USB NIC may have no NAPI, so it is reported only while
/// threads have names of interfaces that are not here.
fn renamed(inventory: &Inventory, intent: &Intent) -> Vec<Finding> {
    if inventory.kernel.version >= NAPI_LISTED {
        return Vec::new();
    }
    let known: BTreeSet<i32> = inventory.nics.iter().flat_map(|nic| &nic.napis).filter_map(|napi| napi.pid).collect();
    let polls = inventory.threads_of(|kind| matches!(kind, KernelThreadKind::Napi(_) | KernelThreadKind::NapiCut));
    let others = polls.filter(|thread| !known.contains(&thread.id.tid));
    let others: Vec<String> = others.take(NAMED).map(|one| format!("{} ({})", one.id.tid, one.comm)).collect();
    let is_own = |irq: &Irq| !irq.actions.iter().any(|action| action.contains("hcd"));
    let has_own = |nic: &Nic| inventory.irqs.iter().any(|irq| nic.irqs.contains(&irq.id.irq) && is_own(irq));
    let has_none = |nic: &&Nic| nic.physical && nic.up && nic.threaded == Some(1) && nic.napis.is_empty();
    let lacks = |nic: &&Nic| intent.nic_class(inventory, nic) != Class::Bulk && (!others.is_empty() || has_own(nic));
    let these = match others.as_slice() {
        [] => "have the name and the place of another interface".to_owned(),
        others => format!("may be {}, which have names of interfaces that are not here", others.join(", ")),
    };
    let finding = |nic: &Nic| Finding {
        rule: RuleId::NapiThread,
        severity: Severity::Warning,
        object: nic.id.name.clone(),
        found: format!("no NAPI thread has its name: if it was renamed after its threads were made, they {these}"),
        remedy: format!(
            "give it its earlier name while it is down (ip link set {} name EARLIER), or boot a kernel of 6.8 or \
             later, which tells whose threads these are",
            nic.id.name
        ),
        refusal: None,
    };
    inventory.nics.iter().filter(has_none).filter(lacks).map(finding).collect()
}

/// Threads that may work for NICs of several classes, by the name of the most urgent NIC and the text of all these
/// NICs.
type Shared = BTreeMap<(String, String), Vec<String>>;

/// Gives a thread the place of the most urgent NIC that it may work for, and notes it if these NICs have several
/// classes.
fn most_urgent(
    rule: RuleId,
    thread: &KernelThread,
    mut nics: Vec<(Class, &Nic)>,
    policy: impl Fn(&Nic, Class) -> Policy,
    shared: &mut Shared,
) -> Option<Setting> {
    nics.sort_by_key(|(class, nic)| (*class, nic.id.ifindex));
    let (class, nic) = nics.first().copied()?;
    if nics.iter().any(|(other, _)| *other != class) {
        let all: Vec<String> = nics.iter().map(|(class, nic)| format!("{} ({class})", nic.id.name)).collect();
        shared.entry((nic.id.name.clone(), all.join(", "))).or_default().push(thread.id.tid.to_string());
    }
    Some(place(rule, thread, policy(nic, class)))
}

fn shared_findings(rule: RuleId, shared: Shared) -> impl Iterator<Item = Finding> {
    let (why, remedy) = if rule == RuleId::IrqThread {
        (
            "handles an interrupt that is shared by",
            "give these NICs one class in /etc/ontime/host.toml, or move one to another controller or function",
        )
    } else {
        (
            "has a name that this kernel cut, and may be that of",
            "rename all but one while it is down (ip link set NIC name SHORTER), or boot a kernel of 5.17 or later",
        )
    };
    shared.into_iter().map(move |((nic, nics), threads)| Finding {
        rule,
        severity: Severity::Warning,
        object: nic,
        found: format!("thread {} {why} {nics}: it has the place of the most urgent", threads.join(", ")),
        remedy: remedy.to_owned(),
        refusal: None,
    })
}

fn polling(nic: &Nic, thread: &KernelThread) -> Finding {
    Finding {
        rule: RuleId::NapiThread,
        severity: Severity::Info,
        object: nic.id.name.clone(),
        found: format!("{} polls without interrupts and is left at {}", thread.comm, thread.policy),
        remedy: "give a polling thread a CPU of its own, or a place below the lowest vCPU".to_owned(),
        refusal: None,
    }
}

/// The rule [`RuleId::Backlog`].
pub(super) fn backlog(inventory: &Inventory, _intent: &Intent) -> Outcome {
    let mut outcome = Outcome::default();
    for thread in inventory.threads_of(|kind| matches!(kind, KernelThreadKind::BacklogNapi(_))) {
        outcome.settings.push(place(RuleId::Backlog, thread, PriorityTable::KTIMERS));
    }
    outcome
}
