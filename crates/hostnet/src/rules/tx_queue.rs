//! A separate transmit queue for RT packets, on a NIC that bulk tenants use too.

use ontime_tenants::{Class, PriorityTable, Tenant, ThreadRole};

use super::qdisc_bypass;
use super::senders::{are_mixed, filters, is_shared, sources};
use crate::cpus::CpuSet;
use crate::intent::Intent;
use crate::inventory::{Inventory, Nic};
use crate::knob::{Knob, Value};
use crate::rule::{Finding, Outcome, Refusal, RuleId, Setting, Severity, Stage};

/// The first version in which `skbedit queue_mapping` on egress decides the queue.
const SKBEDIT_DECIDES_SINCE: (u32, u32) = (5, 19);

/// The rule [`RuleId::RtTxQueue`].
pub(super) fn rt_tx_queue(inventory: &Inventory, intent: &Intent) -> Outcome {
    let mut outcome = Outcome::default();
    for nic in inventory.nics.iter().filter(|nic| nic.physical) {
        let users: Vec<&Tenant> = intent.users(inventory, nic).collect();
        if are_mixed(&users) {
            outcome.findings.extend(shared_receive(inventory, intent, nic));
            separate(inventory, intent, nic, &users, &mut outcome);
        }
    }
    outcome
}

fn separate(inventory: &Inventory, intent: &Intent, nic: &Nic, users: &[&Tenant], outcome: &mut Outcome) {
    let queues = u32::try_from(nic.tx_queues.len()).unwrap_or(u32::MAX);
    if is_shared(inventory, intent, nic) && !qdisc_bypass::is_possible(inventory, intent, nic) {
        outcome.settings.extend(users.iter().flat_map(|tenant| senders(tenant)));
    }
    let remedy_own = "give the RT tenant a NIC or a virtual function of its own";
    if inventory.kernel.version < SKBEDIT_DECIDES_SINCE {
        let found = format!("kernel {} does not let a filter choose the transmit queue", inventory.kernel.release);
        outcome.findings.push(shared(nic, &found, "boot a kernel of 5.19 or later", Refusal::Kernel));
        return;
    }
    if queues < 2 {
        let remedy =
            format!("{remedy_own}, or give it more queues while it is idle: ethtool -L {} combined 2", nic.id.name);
        outcome.findings.push(shared(nic, "one transmit queue for both classes", &remedy, Refusal::Device));
        return;
    }
    match nic.qdisc.as_deref() {
        Some("mq") => {}
        Some(kind @ ("mqprio" | "taprio")) => {
            let remedy = format!("give RT packets a traffic class of their own in that {kind}, or {remedy_own}");
            outcome.findings.push(shared(nic, &format!("{kind} assigns its queues"), &remedy, Refusal::NotLiveSafe));
            return;
        }
        other => {
            let found = format!("root qdisc {} is one queue for both classes", other.unwrap_or("unknown"));
            let remedy = format!("run while it is idle: tc qdisc replace dev {} root mq; or {remedy_own}", nic.id.name);
            outcome.findings.push(shared(nic, &found, &remedy, Refusal::NotLiveSafe));
            return;
        }
    }
    let Some(masks) = nic.tx_queues.iter().map(|queue| queue.xps_cpus.clone()).collect::<Option<Vec<CpuSet>>>() else {
        outcome.findings.push(shared(nic, "its driver has no XPS", remedy_own, Refusal::Device));
        return;
    };
    let Ok(last) = u16::try_from(queues - 1) else { return };
    let steer = |from| Knob::TxSteer { nic: nic.id.clone(), queue: last, from };
    let steering = filters(RuleId::RtTxQueue, nic, sources(inventory, users).map(steer));
    if steering.is_empty() {
        let found = "RT packets have the NIC's own address, as bulk ones may: nothing tells them apart";
        let remedy = format!("give it a macvlan in place of an ipvlan or VLAN; or {remedy_own}");
        outcome.findings.push(shared(nic, found, &remedy, Refusal::Device));
        return;
    }
    // Without the filters, no packet would use the reserved queue.
    let needs: Vec<Knob> = steering.iter().map(|setting| setting.knob.clone()).collect();
    outcome.settings.extend(steering);
    for (queue, cpus) in (0..).zip(without_last(&masks, &inventory.cpus.online)) {
        let knob = Knob::XpsCpus { nic: nic.id.clone(), queue };
        let setting = Setting::new(RuleId::RtTxQueue, Stage::Steer, knob, Value::Cpus(cpus));
        outcome.settings.push(Setting { needs: needs.clone(), ..setting });
    }
}

/// The threads of a bulk tenant that send through a qdisc and a queue which RT packets use too. The thread that runs
/// the qdisc also sends the packets that other threads enqueue meanwhile. Since 7.2 (`net/core/dev.c`,
/// `__dev_xmit_skb`: `defer_list` in place of `busylock`) it inherits no priority from the waiting threads. If it is
/// preempted at bulk priority, an RT packet waits as long as other bulk threads run. At the lowest real-time priority
/// it continues as soon as no RT thread is runnable, like the paper's thread of a lower level.
fn senders(tenant: &Tenant) -> impl Iterator<Item = Setting> + '_ {
    let vhost = tenant.threads.iter().filter(|thread| {
        tenant.class == Class::Bulk && thread.role == ThreadRole::Vhost && thread.libvirt.sched.is_none()
    });
    vhost.map(|thread| {
        let knob = Knob::ThreadPolicy { thread: thread.id, comm: thread.comm.clone() };
        Setting::new(RuleId::RtTxQueue, Stage::Place, knob, Value::Policy(PriorityTable::SHARED_SENDER))
    })
}

/// XPS masks that assign the last queue to no CPU, and another queue to every online CPU. A CPU without a queue would
/// hash its packets over all queues.
///
/// Queues that the administrator or the driver has assigned stay assigned, and the last queue's CPUs are distributed
/// over the others. If XPS is not in use, every CPU gets all other queues, so that packets are still distributed by
/// flow.
fn without_last(masks: &[CpuSet], online: &CpuSet) -> Vec<CpuSet> {
    let Some((_, others)) = masks.split_last() else { return Vec::new() };
    let in_use = masks.iter().any(|mask| !mask.is_empty());
    let mut wanted: Vec<CpuSet> =
        if in_use { others.to_vec() } else { others.iter().map(|_| online.clone()).collect() };
    let covered: CpuSet = wanted.iter().flat_map(CpuSet::iter).collect();
    for (turn, cpu) in online.iter().filter(|cpu| !covered.contains(*cpu)).enumerate() {
        let count = wanted.len();
        if let Some(mask) = wanted.get_mut(turn % count) {
            *mask = mask.iter().chain([cpu]).collect();
        }
    }
    wanted.push(CpuSet::new());
    wanted
}

fn shared(nic: &Nic, found: &str, remedy: &str, refusal: Refusal) -> Finding {
    Finding {
        rule: RuleId::RtTxQueue,
        severity: Severity::Warning,
        object: nic.id.name.clone(),
        found: found.to_owned(),
        remedy: remedy.to_owned(),
        refusal: Some(refusal),
    }
}

/// Transmission can be separated. Reception on a shared NIC is separated only if the administrator reserves receive
/// queues for RT and makes the NIC put RT packets there.
fn shared_receive(inventory: &Inventory, intent: &Intent, nic: &Nic) -> Option<Finding> {
    let rt = |class: &Class| *class != Class::Bulk;
    if let Some(config) = intent.config_of(nic).filter(|config| config.queues.values().any(rt)) {
        let queues: Vec<String> =
            config.queues.iter().filter(|(_, class)| rt(class)).map(|(queue, _)| queue.to_string()).collect();
        return Some(Finding {
            rule: RuleId::RtTxQueue,
            severity: Severity::Info,
            object: nic.id.name.clone(),
            found: format!(
                "receive queues {} are kept for RT packets; the NIC's filters decide which packets come there",
                queues.join(", ")
            ),
            remedy: format!(
                "ethtool -N {} flow-type ether dst RT-TENANTS-ADDRESS action QUEUE, and ethtool -X to keep others off",
                nic.id.name
            ),
            refusal: None,
        });
    }
    (intent.nic_class(inventory, nic) == Class::Bulk).then(|| Finding {
        rule: RuleId::RtTxQueue,
        severity: Severity::Critical,
        object: nic.id.name.clone(),
        found: "RT and bulk packets are received by the same queues, whose threads are at bulk priority".to_owned(),
        remedy: format!(
            "give the RT tenant a NIC or a virtual function of its own, or in /etc/ontime/host.toml a receive queue \
             ([{0}.queue.N] class = \"rt\"), or say there: [{0}] class = \"rt\", which lets bulk packets of \
             this NIC run at RT priority too",
            intent.table_of(nic)
        ),
        refusal: Some(Refusal::NotLiveSafe),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn masks(texts: &[&str]) -> Vec<CpuSet> {
        texts.iter().map(|text| CpuSet::from_list(text).unwrap()).collect()
    }

    #[test]
    fn the_last_queue_is_left_and_every_cpu_keeps_one() {
        let online = CpuSet::from_list("0-3").unwrap();
        assert_eq!(without_last(&masks(&["0", "1", "2", "3"]), &online), masks(&["0,3", "1", "2", ""]));
        assert_eq!(without_last(&masks(&["", "", ""]), &online), masks(&["0-3", "0-3", ""]));
        assert_eq!(without_last(&masks(&["0-1", "2-3"]), &online), masks(&["0-3", ""]));
        assert_eq!(without_last(&[], &online), Vec::<CpuSet>::new());
        // The result is stable: applied to itself it does not change.
        for start in [masks(&["0", "1", "2", "3"]), masks(&["", "", ""])] {
            let once = without_last(&start, &online);
            assert_eq!(without_last(&once, &online), once);
        }
    }
}
