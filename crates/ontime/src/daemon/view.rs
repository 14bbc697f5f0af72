//! Converts the crates' own types to those of the API. Pure, except that [`knob_state`] reads a knob.

use std::collections::BTreeMap;
use std::time::Duration;

use ontime_hostnet::inventory::{self, KernelThreadKind};
use ontime_hostnet::{self as hostnet, Done, Host, Intent, Inventory, Item, Knob, NicUse, RuleId, Setting, Severity};
use ontime_sched::{Reserved, Settled};
use ontime_tenants::text::counted;
use ontime_tenants::{
    self as tenants, ClassSource, ConfigError, Discovery, PriorityTable, ProblemKind, ThreadId, ThreadRole, ownership,
};

use super::cap::{CapUsage, Cover};
use crate::api;

/// A tenant as `ontime ps` shows it.
pub(crate) fn tenant(tenant: &tenants::Tenant, table: PriorityTable) -> api::Tenant {
    api::Tenant {
        name: tenant.name.clone(),
        uuid: tenant.uuid.clone(),
        kind: tenant.kind.to_string(),
        class: tenant.class.to_string(),
        source: source(&tenant.class_source),
        runtime_cap: tenant.runtime_cap,
        pid: tenant.process.pid,
        cgroup: tenant.cgroup.clone(),
        threads: tenant.threads.iter().map(|thread| tenant_thread(tenant, thread, table)).collect(),
        nics: nics_of(tenant),
    }
}

fn nics_of(tenant: &tenants::Tenant) -> Vec<api::TenantNic> {
    let of = |name: String, lower: &[String], below: &[String]| api::TenantNic { name, lower: [lower, below].concat() };
    let vnics = tenant.vnics.iter().map(|vnic| of(vnic.ifname.clone(), &vnic.lower, &vnic.below));
    let attached = tenant.attached.iter().map(|own| of(format!("{} (inside)", own.name), &own.lower, &own.below));
    vnics.chain(attached).collect()
}

fn tenant_thread(tenant: &tenants::Tenant, thread: &tenants::TenantThread, table: PriorityTable) -> api::Thread {
    api::Thread {
        role: role(thread.role),
        comm: thread.comm.clone(),
        tid: thread.id.tid,
        policy: thread.policy.to_string(),
        wanted: ownership::wanted(tenant, thread, &table).map(|policy| policy.to_string()),
        affinity: thread.affinity.clone(),
        last_cpu: thread.last_cpu,
    }
}

fn source(source: &ClassSource) -> String {
    match source {
        ClassSource::Metadata => "metadata".to_owned(),
        ClassSource::Rule(place) => place.clone(),
        ClassSource::Reservation { name, .. } => format!("reservation {name}"),
        ClassSource::Default => "default".to_owned(),
    }
}

fn role(role: ThreadRole) -> String {
    match role {
        ThreadRole::Vcpu(number) => format!("vcpu{number}"),
        ThreadRole::Vhost => "vhost".to_owned(),
        ThreadRole::Iothread => "iothread".to_owned(),
        ThreadRole::Emulator => "emulator".to_owned(),
        ThreadRole::KvmPit => "kvm-pit".to_owned(),
        ThreadRole::Device => "device".to_owned(),
        ThreadRole::Container => "container".to_owned(),
    }
}

/// Names and classes of the host's NICs.
pub(crate) fn nic_classes(inventory: &Inventory, intent: &Intent) -> impl Iterator<Item = (String, String)> {
    inventory.nics.iter().map(|nic| (nic.id.name.clone(), intent.nic_class(inventory, nic).to_string()))
}

/// The host's NICs, with the planned value of each knob. `state` gives the present value, `unseen` what is missing.
pub(crate) fn nics(
    inventory: &Inventory,
    intent: &Intent,
    plan: &hostnet::Plan,
    state: &dyn Fn(&Setting) -> api::KnobState,
    unseen: Vec<api::Problem>,
) -> api::Nics {
    let mut knobs: BTreeMap<u32, Vec<api::KnobState>> = BTreeMap::new();
    for setting in &plan.settings {
        if let Some(nic) = inventory.nic_of(&setting.knob).or_else(|| nic_of_vhost(inventory, intent, &setting.knob)) {
            knobs.entry(nic.id.ifindex).or_default().push(state(setting));
        }
    }
    let of_nic = |nic: &inventory::Nic| api::Nic {
        knobs: knobs.remove(&nic.id.ifindex).unwrap_or_default(),
        findings: plan.findings.iter().filter(|of| of.object == nic.id.name).map(finding).collect(),
        ..self::nic(inventory, intent, nic)
    };
    let nics = inventory.nics.iter().map(of_nic).collect();
    let is_left = |of: &&hostnet::Finding| {
        let about_path =
            matches!(of.rule, RuleId::HostConfig | RuleId::IrqThread | RuleId::NapiThread | RuleId::DeviceIrq);
        about_path && inventory.nics.iter().all(|nic| of.object != nic.id.name)
    };
    let findings = plan.findings.iter().filter(is_left).map(finding).collect();
    api::Nics { schema_version: api::SCHEMA_VERSION, nics, findings, unseen }
}

/// The tap of the tenant to which this vhost thread belongs.
fn nic_of_vhost<'a>(inventory: &'a Inventory, intent: &Intent, knob: &Knob) -> Option<&'a inventory::Nic> {
    let Knob::ThreadPolicy { thread, .. } = knob else { return None };
    let is_it = |of: &&tenants::TenantThread| of.id == *thread && of.role == ThreadRole::Vhost;
    let tenant = intent.tenants.iter().find(|tenant| tenant.threads.iter().any(|of| is_it(&of)))?;
    inventory.nic(&tenant.vnics.first()?.ifname)
}

/// A knob: the planned value, and the value that was read now.
pub(crate) fn knob_state(host: &dyn Host, setting: &Setting) -> api::KnobState {
    let (actual, state, why) = match host.read(&setting.knob) {
        Ok(found) if found == setting.value => (Some(found), "ok", None),
        Ok(found) => (Some(found), "drifted", None),
        Err(error) => {
            let state = match &error {
                hostnet::KnobError::Gone(_) => "gone",
                hostnet::KnobError::Unsupported { .. } => "unsupported",
                _ => "failed",
            };
            (None, state, Some(error.why()))
        }
    };
    api::KnobState {
        rule: setting.rule.to_string(),
        knob: setting.knob.to_string(),
        wanted: setting.value.to_string(),
        actual: actual.map(|value| value.to_string()),
        state: state.to_owned(),
        why,
    }
}

fn nic(inventory: &Inventory, intent: &Intent, nic: &inventory::Nic) -> api::Nic {
    let used = intent.nic_use(inventory, nic);
    let class_by = match used {
        NicUse::Configured(_) => "configured",
        NicUse::Derived(_) if nic.passes_on() => "passes-on",
        NicUse::Derived(_) => "derived",
        NicUse::Mixed(_) => "mixed",
    };
    let irqs = nic.napis.iter().filter_map(|napi| napi.irq).chain(nic.irqs.iter().copied());
    let mut numbers: Vec<u32> = irqs.collect();
    numbers.sort_unstable();
    numbers.dedup();
    api::Nic {
        name: nic.id.name.clone(),
        altnames: nic.altnames.clone(),
        ifindex: nic.id.ifindex,
        kind: nic.kind.clone().or_else(|| nic.driver.clone()).unwrap_or_default(),
        up: nic.up,
        class: intent.nic_class(inventory, nic).to_string(),
        class_by: class_by.to_owned(),
        napis: nic
            .napis
            .iter()
            .map(|napi| api::Napi { id: napi.id, thread: kernel_thread(inventory, KernelThreadKind::Napi(napi.id)) })
            .collect(),
        irqs: numbers
            .into_iter()
            .map(|irq| api::Irq {
                irq,
                affinity: inventory
                    .irqs
                    .iter()
                    .find(|known| known.id.irq == irq)
                    .map_or_else(String::new, |known| known.affinity.to_string()),
                thread: kernel_thread(inventory, KernelThreadKind::Irq(irq)),
            })
            .collect(),
        tenants: intent.users(inventory, nic).map(|tenant| tenant.name.clone()).collect(),
        knobs: Vec::new(),
        findings: Vec::new(),
    }
}

fn kernel_thread(inventory: &Inventory, kind: KernelThreadKind) -> Option<api::KernelThread> {
    inventory
        .threads_of(|other| other == kind)
        .next()
        .map(|thread| api::KernelThread { tid: thread.id.tid, policy: thread.policy.to_string() })
}

/// A severity as a word.
pub(crate) fn severity(severity: Severity) -> &'static str {
    match severity {
        Severity::Info => "info",
        Severity::Warning => "warning",
        Severity::Critical => "critical",
    }
}

pub(crate) fn finding(finding: &hostnet::Finding) -> api::Finding {
    api::Finding {
        rule: finding.rule.to_string(),
        severity: severity(finding.severity).to_owned(),
        object: finding.object.clone(),
        found: finding.found.clone(),
        remedy: finding.remedy.clone(),
    }
}

/// A configuration that was refused.
pub(crate) fn refused(error: &ConfigError) -> api::RefusedConfiguration {
    match error {
        ConfigError::Read { path, source } => {
            api::RefusedConfiguration { file: path.display().to_string(), line: None, reason: source.to_string() }
        }
        ConfigError::Invalid { place, what, hint, .. } => {
            let hint = hint.as_ref().map_or_else(String::new, |hint| format!("; did you mean `{hint}`?"));
            api::RefusedConfiguration {
                file: place.path.display().to_string(),
                line: Some(place.line as u64),
                reason: format!("{what}{hint}"),
            }
        }
    }
}

/// A problem that discovery found.
pub(crate) fn problem(problem: &tenants::Problem) -> api::Problem {
    api::Problem { subject: problem.subject.clone(), message: format!("{}; {}", problem.message(), problem.remedy()) }
}

/// In place of a rule's name, for reserved CPU time.
pub(crate) const RESERVATION: &str = "reservation";

/// A vCPU's reserved CPU time as a knob and its value.
pub(crate) fn reservation(settled: &Settled, vcpu: &Reserved) -> (String, String) {
    let knob = format!("CPU time of vCPU {} of {} (thread {})", vcpu.vcpu, vcpu.tenant, vcpu.id.tid);
    let cpu = settled.cpu(vcpu).map_or_else(String::new, |cpu| format!(" on CPU {cpu}"));
    (knob, format!("{} of each {}{cpu}", vcpu.budget, vcpu.period))
}

/// Why tenants may be missing from what was found.
pub(crate) fn unseen(found: &Discovery) -> Vec<api::Problem> {
    let mut unseen: Vec<api::Problem> =
        found.problems.iter().filter(|problem| problem.hides_tenants()).map(problem).collect();
    // Such a problem has the same cause.
    let is_told = found.problems.iter().any(|problem| matches!(problem.kind, ProblemKind::Unreadable(_)));
    let incomplete = found.incomplete.iter().filter(|_| !is_told);
    let message = |why: &String| format!("{why}; end processes that are not needed, and look again");
    let incomplete: Vec<api::Problem> =
        incomplete.map(|why| api::Problem { subject: "host".to_owned(), message: message(why) }).collect();
    unseen.extend(incomplete);
    unseen
}

/// An outcome as a word, and why.
pub(crate) fn outcome(done: &Done) -> (&'static str, Option<String>) {
    match done {
        Done::Changed => ("changed", None),
        Done::Already => ("ok", None),
        Done::Restored => ("restored", None),
        Done::Gone => ("gone", None),
        Done::Unsupported(why) => ("unsupported", Some(why.clone())),
        Done::Failed(why) => ("failed", Some(why.clone())),
    }
}

/// What would happen to a setting that cannot be made, as a word, and why. None if no obstacle is known.
pub(crate) fn foreseen(host: &dyn Host, setting: &Setting) -> Option<(&'static str, Option<String>)> {
    let obstacle = host.foresee(&setting.knob, &setting.value)?;
    let (outcome, end) =
        if obstacle.lasting { ("unsupported", hostnet::accepting(setting)) } else { ("would-fail", String::new()) };
    Some((outcome, Some(format!("{}; {}{end}", obstacle.cause, obstacle.remedy))))
}

/// What an apply or reset did.
pub(crate) fn report(report: &hostnet::Report, method: &str, dry_run: bool) -> api::Report {
    let (unchanged, changes): (Vec<&Item>, Vec<&Item>) =
        report.items.iter().partition(|item| item.done == Done::Already);
    api::Report {
        schema_version: api::SCHEMA_VERSION,
        method: method.to_owned(),
        dry_run,
        changes: changes.into_iter().map(change).collect(),
        unchanged: unchanged.len(),
        findings: report.findings.iter().map(finding).collect(),
    }
}

fn change(item: &Item) -> api::Change {
    let (outcome, why) = outcome(&item.done);
    api::Change {
        rule: item.rule.map(|rule| rule.to_string()),
        knob: item.knob.to_string(),
        from: item.from.as_ref().map(ToString::to_string),
        to: item.to.to_string(),
        outcome: outcome.to_owned(),
        why,
    }
}

/// A capped thread. `of` has the owners.
pub(crate) fn cap_thread(used: &CapUsage, of: &BTreeMap<ThreadId, Owned>) -> api::CapThread {
    let watched = match &used.cover {
        _ if used.refused > 0 => format!(
            "not: the kernel has refused {} to change its policy; journalctl -k and `ontime doctor` (row refusals) \
             show the cause",
            counted(used.refused, "time")
        ),
        _ if used.escaped > 0 => format!(
            "not: {} of its cap ended early, by itself or another program; take RLIMIT_RTPRIO and CAP_SYS_NICE from \
             its process, and restart it",
            counted(used.escaped, "pause")
        ),
        Cover::Watched => "yes".to_owned(),
        Cover::Whole => {
            "not: its runtime cap is a whole CPU; give it a runtime-cap below 1 in /etc/ontime/tenants.toml, unless \
             this is meant"
                .to_owned()
        }
        Cover::Gone => "not: it has ended; nothing to do".to_owned(),
        Cover::Failed(why) => format!("not: {why}"),
    };
    api::CapThread {
        of: of.get(&used.id).map_or_else(String::new, |owned| owned.name.clone()),
        tid: used.id.tid,
        watched,
        paused: used.paused,
        pauses: used.pauses,
        paused_seconds: used.paused_ns as f64 / 1e9,
        rt_seconds: used.ran_ns as f64 / 1e9,
        raised: used.raised,
        ahead_seconds: used.ahead_ns as f64 / 1e9,
    }
}

/// Why protections stay on though every thread stays in its pauses now.
pub(crate) fn escaped(since: Duration) -> String {
    format!(
        "a thread ended a pause of its cap {} s ago, by itself or another program; protections stay on for some time: \
         take RLIMIT_RTPRIO and CAP_SYS_NICE from tenants",
        since.as_secs()
    )
}

/// The owner of a thread.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Owned {
    /// The tenant's name, or a name for a group of kernel threads.
    pub name: String,
    /// The tenant's class, or `rt` for kernel threads.
    pub class: String,
}
