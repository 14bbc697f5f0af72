//! Metrics for Prometheus. Names are `ontime_*_seconds` and `_total`; labels are domain, class, nic, and never a
//! thread's number. `format` has the two text formats, `listener` serves them over TCP.

mod format;
mod listener;

use std::collections::{BTreeMap, BTreeSet};

use ontime_hostnet::{Finding, RULES};
use ontime_sched::{Reserved, Settled, Use};
use ontime_tenants::ThreadId;
use ontime_tenants::budget::{Account, Costs};
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::cap;
use super::view::{self, Owned};
use crate::api;

pub(crate) use self::format::Format;
pub(crate) use self::listener::Server;

/// Defines sets of labels.
macro_rules! labels {
    ($($name:ident { $($label:ident),* })*) => {$(
        #[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
        struct $name {
            $($label: String,)*
        }
    )*};
}

labels! {
    Build { version }
    ByAccount { account }
    ByClass { class }
    ByReason { reason }
    ByRule { rule }
    Domain { domain, class }
    InForce { method, by }
    NicClass { nic, class }
    OfNic { nic }
    OfSeverity { rule, severity }
    OfState { state }
}

/// The most users with a label of their own. The costs of further users have one common label.
const USERS: usize = 64;

type Seconds = Counter<f64, std::sync::atomic::AtomicU64>;
type Number = Gauge<f64, std::sync::atomic::AtomicU64>;

/// Lengths from 1 ms on: a pass over a host with 100 VMs must take less than 100 ms.
fn lengths() -> Histogram {
    Histogram::new([0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0])
}

/// Counters of a thread at the last reading.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    pauses: u64,
    paused_ns: u64,
    ran_ns: u64,
    raised: u64,
    ahead_ns: u64,
}

/// What was seen before, by which counters go on and domains that are gone are removed.
#[derive(Default)]
struct Before {
    users: BTreeSet<u32>,
    used: BTreeMap<ThreadId, Use>,
    /// Domains with reservations, as name and class.
    reserving: BTreeSet<(String, String)>,
    seen: BTreeMap<ThreadId, Seen>,
    /// How long each vCPU had waited for a CPU, ns.
    waited: BTreeMap<ThreadId, u64>,
    /// Domains with stolen time.
    stealing: BTreeSet<Owned>,
}

/// Defines [`Metrics`] by a row for each of them: field, type and first value; name, with the unit if it is seconds;
/// help.
macro_rules! metrics {
    ($($field:ident: $kind:ty $(= $new:expr)?, $name:literal $($unit:ident)?, $help:literal;)*) => {
        pub(crate) struct Metrics {
            registry: Registry,
            before: Before,
            $($field: $kind,)*
        }

        impl Metrics {
            /// All metrics, registered in the order of the rows.
            fn new() -> Self {
                let mut registry = Registry::with_prefix("ontime");
                $(
                    let $field: $kind = metrics!(@new $($new)?);
                    metrics!(@register registry, $name $($unit)?, $help, $field);
                )*
                Self { registry, before: Before::default(), $($field,)* }
            }
        }
    };
    (@new) => { Default::default() };
    (@new $new:expr) => { $new };
    (@register $registry:ident, $name:literal, $help:literal, $field:ident) => {
        $registry.register($name, $help, $field.clone());
    };
    (@register $registry:ident, $name:literal seconds, $help:literal, $field:ident) => {
        $registry.register_with_unit($name, $help, Unit::Seconds, $field.clone());
    };
}

metrics! {
    build: Family<Build, Gauge>, "build_info", "1, with the daemon's version";
    passes: Family<ByReason, Counter>, "passes", "Passes over the host, by what caused them";
    pass_seconds: Histogram = lengths(), "pass" seconds, "Length of a pass";
    discover_seconds: Histogram = lengths(), "discover" seconds, "Length of finding tenants";
    discovered: Family<ByAccount, Seconds>, "discover_account" seconds,
        "Time that reading processes took, by the user whose they are";
    changes: Family<ByRule, Counter>, "knob_changes", "Knobs changed";
    failures: Family<ByRule, Counter>, "knob_failures", "Knobs that could not be set";
    drift: Family<ByRule, Counter>, "drift", "Knobs found changed by another program, and set again";
    reloads: Family<ByReason, Counter>, "config_reloads", "Reloads of the configuration, by result";
    reloaded_at: Number, "config_last_reload_success_timestamp_seconds",
        "When the configuration was last read without a mistake, seconds since 1970";
    knobs: Family<OfState, Gauge>, "knobs", "Knobs by state: ok, or why the wanted value is not in force";
    method: Family<InForce, Gauge>, "method_info", "1 for the method in force and what said so";
    state: Family<OfState, Gauge>, "state", "1 for what the daemon does, 0 for the other states";
    stolen: Family<Domain, Seconds>, "vcpu_steal" seconds,
        "Time that vCPUs were ready to run and did not: stolen time, in the guest's words";
    config_refused: Gauge, "config_refused",
        "Whether the configuration was refused at the last reload, and the former one is in force";
    observing: Gauge, "observing", "Whether mode observe keeps the daemon from setting anything";
    findings: Family<OfSeverity, Gauge>, "findings", "What no knob cures, by rule and severity";
    tenants: Family<ByClass, Gauge>, "tenants", "Tenants on this host";
    nics: Family<NicClass, Gauge>, "nic_class", "1 for each NIC and the class of its threads";
    caps_in_force: Gauge, "caps_in_force", "Whether every RT thread is held to its cap";
    protections_off: Gauge, "protections_off", "Whether kernel protections are off";
    uncapped: Gauge, "uncapped_threads",
        "Real-time threads without a cap, of which each keeps kernel protections on";
    problems: Gauge, "problems", "Problems now";
    pauses: Family<Domain, Counter>, "cap_pauses", "Times a thread was over its runtime cap";
    paused: Family<Domain, Seconds>, "cap_paused" seconds, "Time off real-time priority";
    raised: Family<Domain, Counter>, "boosts", "Times a vCPU was put ahead because of a pending interrupt";
    ahead: Family<Domain, Seconds>, "boost" seconds, "CPU time that it took ahead";
    polled: Family<OfNic, Seconds>, "busypoll" seconds, "Time that a NIC polled";
    saved: Family<OfNic, Seconds>, "busypoll_saved" seconds, "Time that it did not need to";
    reserved: Family<Domain, Number>, "reserved_cpus", "CPU time reserved, in CPUs";
    shares: Family<Domain, Seconds>, "share" seconds, "CPU time had within reserved shares";
    beyond: Family<Domain, Seconds>, "beyond_share" seconds, "CPU time had beyond them";
    admitted: Family<Domain, Counter>, "deadlines_admitted", "Changes of a guest's deadline bandwidth";
    denied: Family<Domain, Counter>, "deadlines_refused", "Of these refused: the guest saw EBUSY";
    tasks: Family<Domain, Gauge>, "deadline_tasks", "Deadline tasks that a guest publishes";
    overruns: Family<Domain, Counter>, "share_overruns", "Times a vCPU used up its share of a slice";
    periods: Family<Domain, Counter>, "share_periods", "Periods of vCPUs with reserved CPU time";
    misses: Family<Domain, Counter>, "share_misses", "Of those, with less than the budget although it was wanted";
    refused: Gauge, "reservations_refused", "VMs whose reservation does not hold";
    ran: Family<Domain, Seconds>, "rt_cpu" seconds, "CPU time at real-time priority";
}

/// Seconds since 1970.
fn unix_time() -> f64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

impl Default for Metrics {
    fn default() -> Self {
        let metrics = Self::new();
        metrics.build.get_or_create(&Build { version: crate::version().to_owned() }).set(1);
        // Counters start from zero, so that a query also sees the first increase.
        for rule in RULES {
            for family in [&metrics.changes, &metrics.failures, &metrics.drift] {
                drop(family.get_or_create(&ByRule { rule: rule.id.name().to_owned() }));
            }
        }
        metrics.reloaded_at.set(unix_time());
        metrics
    }
}

impl Metrics {
    /// Counts a pass.
    pub(crate) fn passed(&self, reason: &str, length: f64, discovering: f64) {
        self.passes.get_or_create(&ByReason { reason: reason.to_owned() }).inc();
        self.pass_seconds.observe(length);
        self.discover_seconds.observe(discovering);
    }

    /// Counts the time that discovery took, by the user whose processes were read.
    pub(crate) fn discovered(&mut self, costs: &Costs) {
        for (account, cost) in &costs.0 {
            let account = match account {
                // Containers' cgroups come and go: too many names for metrics.
                Account::Container(_) => "containers".to_owned(),
                Account::User(user) if self.before.users.len() >= USERS && !self.before.users.contains(user) => {
                    "other users".to_owned()
                }
                Account::User(user) => {
                    self.before.users.insert(*user);
                    account.to_string()
                }
                Account::System => account.to_string(),
            };
            self.discovered.get_or_create(&ByAccount { account }).inc_by(cost.as_secs_f64());
        }
    }

    /// Counts what adaptive polling has taken and saved. A NIC that starts over begins at zero, as a counter may.
    pub(crate) fn polling(&self, all: &[api::Polling]) {
        for one in all {
            let nic = OfNic { nic: one.nic.clone() };
            for (family, value) in [(&self.polled, one.polled_seconds), (&self.saved, one.saved_seconds)] {
                let counter = family.get_or_create(&nic);
                let before = counter.get();
                counter.inc_by(if value < before { 0.0 } else { value - before });
            }
        }
    }

    /// Counts a knob that was changed, or could not be.
    pub(crate) fn knob(&self, rule: &str, changed: bool) {
        let family = if changed { &self.changes } else { &self.failures };
        family.get_or_create(&ByRule { rule: rule.to_owned() }).inc();
    }

    /// Counts a knob that another program had changed.
    pub(crate) fn drifted(&self, rule: &str) {
        self.drift.get_or_create(&ByRule { rule: rule.to_owned() }).inc();
    }

    /// Counts a reload of the configuration.
    pub(crate) fn reloaded(&self, taken: bool) {
        let reason = if taken { "taken" } else { "refused" };
        self.reloads.get_or_create(&ByReason { reason: reason.to_owned() }).inc();
        self.config_refused.set((!taken).into());
        if taken {
            self.reloaded_at.set(unix_time());
        }
    }

    /// Sets the findings of the last plan. Old findings are removed.
    pub(crate) fn found(&self, findings: &[Finding]) {
        self.findings.clear();
        for finding in findings {
            let severity = view::severity(finding.severity).to_owned();
            self.findings.get_or_create(&OfSeverity { rule: finding.rule.to_string(), severity }).inc();
        }
    }

    /// Sets the daemon's state, and the method with the reason for it.
    pub(crate) fn doing(&self, state: api::State, method: &str, by: &str) {
        self.observing.set((state == api::State::Observing).into());
        for (name, of) in
            [("applied", api::State::Applied), ("reset", api::State::Reset), ("observing", api::State::Observing)]
        {
            self.state.get_or_create(&OfState { state: name.to_owned() }).set((state == of).into());
        }
        self.method.clear();
        self.method.get_or_create(&InForce { method: method.to_owned(), by: by.to_owned() }).set(1);
    }

    /// Sets the number of knobs in each state.
    pub(crate) fn knobs<'a>(&self, states: impl Iterator<Item = &'a str>) {
        self.knobs.clear();
        // States that alerts use are present even if their count is 0.
        for state in ["ok", "drifted", "failed", "unsupported"] {
            drop(self.knobs.get_or_create(&OfState { state: state.to_owned() }));
        }
        for state in states {
            self.knobs.get_or_create(&OfState { state: state.to_owned() }).inc();
        }
    }

    /// Counts how long vCPUs have waited for a CPU, from the first reading on; the values are totals, ns. Domains
    /// without a vCPU are removed.
    pub(crate) fn stolen(&mut self, waited: &BTreeMap<ThreadId, (Owned, u64)>) {
        for (id, (owned, now)) in waited {
            let last = self.before.waited.insert(*id, *now).unwrap_or(*now);
            let domain = Domain { domain: owned.name.clone(), class: owned.class.clone() };
            self.stolen.get_or_create(&domain).inc_by(now.saturating_sub(last) as f64 / 1e9);
        }
        self.before.waited.retain(|id, _| waited.contains_key(id));
        let stealing: BTreeSet<Owned> = waited.values().map(|(owned, _)| owned.clone()).collect();
        for gone in self.before.stealing.difference(&stealing) {
            self.stolen.remove(&Domain { domain: gone.name.clone(), class: gone.class.clone() });
        }
        self.before.stealing = stealing;
    }

    /// Sets the present numbers of tenants by class, the classes of NICs, and states.
    pub(crate) fn host(
        &self,
        classes: impl Iterator<Item = String>,
        nics: impl Iterator<Item = (String, String)>,
        caps_in_force: bool,
        protections_off: bool,
        uncapped: usize,
        problems: usize,
    ) {
        self.tenants.clear();
        for class in classes {
            self.tenants.get_or_create(&ByClass { class }).inc();
        }
        self.nics.clear();
        for (nic, class) in nics {
            self.nics.get_or_create(&NicClass { nic, class }).set(1);
        }
        self.caps_in_force.set(caps_in_force.into());
        self.protections_off.set(protections_off.into());
        self.uncapped.set(i64::try_from(uncapped).unwrap_or(i64::MAX));
        self.problems.set(i64::try_from(problems).unwrap_or(i64::MAX));
    }

    /// Counts what capped threads have done since the last call. The threads that are gone are forgotten.
    pub(crate) fn caps(&mut self, uses: &[cap::CapUsage], of: &BTreeMap<ThreadId, Owned>) {
        for used in uses {
            let Some(owned) = of.get(&used.id) else { continue };
            let domain = Domain { domain: owned.name.clone(), class: owned.class.clone() };
            let last = self.before.seen.entry(used.id).or_default();
            self.pauses.get_or_create(&domain).inc_by(used.pauses.saturating_sub(last.pauses));
            self.paused.get_or_create(&domain).inc_by(used.paused_ns.saturating_sub(last.paused_ns) as f64 / 1e9);
            self.ran.get_or_create(&domain).inc_by(used.ran_ns.saturating_sub(last.ran_ns) as f64 / 1e9);
            self.raised.get_or_create(&domain).inc_by(used.raised.saturating_sub(last.raised));
            self.ahead.get_or_create(&domain).inc_by(used.ahead_ns.saturating_sub(last.ahead_ns) as f64 / 1e9);
            let cap::CapUsage { pauses, paused_ns, ran_ns, raised, ahead_ns, .. } = *used;
            *last = Seen { pauses, paused_ns, ran_ns, raised, ahead_ns };
        }
        self.before.seen.retain(|id, _| uses.iter().any(|used| used.id == *id));
    }

    /// Counts reserved CPU time, and what was used of it since the last call. Domains without reservations are removed.
    pub(crate) fn reservations(&mut self, settled: &Settled, uses: &BTreeMap<ThreadId, Use>) {
        let domain = |vcpu: &Reserved| Domain { domain: vcpu.tenant.clone(), class: vcpu.class.to_string() };
        let mut reserved: BTreeMap<(String, String), f64> = BTreeMap::new();
        for vcpu in &settled.vcpus {
            let domain = domain(vcpu);
            *reserved.entry((domain.domain.clone(), domain.class.clone())).or_default() += vcpu.bandwidth.as_f64();
            let now = uses.get(&vcpu.id).copied().unwrap_or_default();
            let last = self.before.used.insert(vcpu.id, now).unwrap_or_default();
            let seconds = |now: u64, last: u64| now.saturating_sub(last) as f64 / 1e9;
            self.shares.get_or_create(&domain).inc_by(seconds(now.ran, last.ran));
            self.beyond.get_or_create(&domain).inc_by(seconds(now.beyond, last.beyond));
            self.overruns.get_or_create(&domain).inc_by(now.overruns.saturating_sub(last.overruns));
            self.periods.get_or_create(&domain).inc_by(now.periods.saturating_sub(last.periods));
            self.misses.get_or_create(&domain).inc_by(now.misses.saturating_sub(last.misses));
        }
        self.tasks.clear();
        let mut unread = Vec::new();
        for vcpu in &settled.vcpus {
            match vcpu.tasks() {
                Some(tasks) => {
                    let count = i64::try_from(tasks.len()).unwrap_or(i64::MAX);
                    self.tasks.get_or_create(&domain(vcpu)).inc_by(count);
                }
                None => unread.push(domain(vcpu)),
            }
        }
        // The sum of a domain is not known without each of its vCPUs.
        for domain in unread {
            self.tasks.remove(&domain);
        }
        self.before.used.retain(|id, _| settled.vcpus.iter().any(|vcpu| vcpu.id == *id));
        let gone = self.before.reserving.iter().filter(|domain| !reserved.contains_key(*domain));
        for (domain, class) in gone.cloned().collect::<Vec<_>>() {
            let domain = Domain { domain, class };
            for family in [&self.shares, &self.beyond] {
                family.remove(&domain);
            }
            for family in [&self.overruns, &self.periods, &self.misses, &self.admitted, &self.denied] {
                family.remove(&domain);
            }
        }
        self.before.reserving = reserved.keys().cloned().collect();
        self.reserved.clear();
        for ((domain, class), cpus) in reserved {
            self.reserved.get_or_create(&Domain { domain, class }).set(cpus);
        }
        self.refused.set(i64::try_from(settled.refused.len()).unwrap_or(i64::MAX));
    }

    /// Counts requests of a guest for bandwidth, or claims from its offer.
    pub(crate) fn deadlines(&self, vm: &str, class: String, admitted: bool, times: u64) {
        let domain = Domain { domain: vm.to_owned(), class };
        let family = if admitted { &self.admitted } else { &self.denied };
        family.get_or_create(&domain).inc_by(times);
    }

    /// Removes a domain that is gone.
    pub(crate) fn forget(&self, owned: &Owned) {
        let domain = Domain { domain: owned.name.clone(), class: owned.class.clone() };
        self.pauses.remove(&domain);
        self.paused.remove(&domain);
        self.ran.remove(&domain);
        self.raised.remove(&domain);
        self.ahead.remove(&domain);
    }

    /// All metrics in OpenMetrics text format.
    pub(crate) fn text(&self) -> String {
        let mut out = String::new();
        // Writing to a String cannot fail.
        let _ = text::encode(&mut out, &self.registry);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::cap::Cover;

    #[test]
    fn counters_go_on_over_readings_and_name_no_thread() {
        let mut metrics = Metrics::default();
        let id = ThreadId { pid: 4711, tid: 4712, start_time: 1 };
        let owned = Owned { name: "vm \"a\"\n".to_owned(), class: "rt0".to_owned() };
        let of = BTreeMap::from([(id, owned.clone())]);
        let used = |pauses| cap::CapUsage {
            id,
            cover: Cover::Watched,
            pauses,
            paused_ns: 500_000_000 * pauses,
            ran_ns: 0,
            paused: false,
            refused: 0,
            raised: 7 * pauses,
            escaped: 0,
            ahead_ns: 0,
        };
        metrics.caps(&[used(2)], &of);
        metrics.caps(&[used(3)], &of);
        metrics.passed("links", 0.002, 0.001);
        let text = metrics.text();
        assert!(text.contains("ontime_cap_pauses_total{domain=\"vm \\\"a\\\"\\n\",class=\"rt0\"} 3"), "{text}");
        assert!(
            text.contains("ontime_cap_paused_seconds_total{domain=\"vm \\\"a\\\"\\n\",class=\"rt0\"} 1.5"),
            "{text}"
        );
        assert!(text.contains("ontime_boosts_total{domain=\"vm \\\"a\\\"\\n\",class=\"rt0\"} 21"), "{text}");
        assert!(text.contains("ontime_pass_seconds_count 1"), "{text}");
        assert!(text.ends_with("# EOF\n"));
        assert!(!text.contains("4712"), "{text}");
        metrics.forget(&owned);
        assert!(!metrics.text().contains("rt0"));
    }

    #[test]
    fn findings_are_metrics_by_rule_and_severity_for_as_long_as_they_hold() {
        use ontime_hostnet::{RuleId, Severity};
        let metrics = Metrics::default();
        let finding = |rule, severity| Finding {
            rule,
            severity,
            object: "eth0\n".to_owned(),
            found: "x".to_owned(),
            remedy: "y".to_owned(),
            refusal: None,
        };
        let critical = finding(RuleId::NapiThread, Severity::Critical);
        metrics.found(&[critical.clone(), finding(RuleId::HostConfig, Severity::Warning), critical.clone()]);
        let text = metrics.text();
        for line in [
            "ontime_findings{rule=\"napi-thread\",severity=\"critical\"} 2\n",
            "ontime_findings{rule=\"host-config\",severity=\"warning\"} 1\n",
        ] {
            assert!(text.contains(line), "{text}");
        }
        metrics.found(&[finding(RuleId::HostConfig, Severity::Warning)]);
        assert!(!metrics.text().contains("severity=\"critical\""));
    }

    #[test]
    fn deadline_tasks_that_cannot_be_read_have_no_sample() {
        use std::fs::File;
        use std::os::unix::fs::FileExt;

        use ontime_sched::{Held, Page};

        const LINE: u64 = ontime_sched::published::LINE as u64;
        let memory = File::from(rustix::fs::memfd_create("vm", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        memory.set_len(64 * LINE).unwrap();
        // The guest has read the clock once, and has a task with a period of 20 ms that sleeps.
        let entries: Vec<u8> = [1u64, 0, 1, 20_000_000].into_iter().flat_map(u64::to_le_bytes).collect();
        memory.write_all_at(&entries, 0).unwrap();
        let Ok(page) = Page::new(memory.try_clone().unwrap(), 0) else {
            println!("SKIPPED: memory may be swapped out here");
            return;
        };
        let held = [1, 2, 3].map(|tid| Held { id: ThreadId { pid: 1, tid, start_time: 1 }, cpu: None });
        let mut settled = Settled::remembered(&held);
        let parts = [("plc", 0, Some(page.clone())), ("plc", 63, Some(page)), ("web", 0, None)];
        for (vcpu, (tenant, number, page)) in settled.vcpus.iter_mut().zip(parts) {
            (vcpu.tenant, vcpu.vcpu, vcpu.page) = (tenant.to_owned(), number, page);
        }
        let mut metrics = Metrics::default();
        let mut samples = || {
            metrics.reservations(&settled, &BTreeMap::new());
            let text = metrics.text();
            let samples = text.lines().filter_map(|line| line.strip_prefix("ontime_deadline_tasks{"));
            samples.map(str::to_owned).collect::<BTreeSet<String>>().into_iter().collect::<Vec<String>>()
        };
        let web = "domain=\"web\",class=\"bulk\"} 0";
        assert_eq!(samples(), ["domain=\"plc\",class=\"bulk\"} 1", web]);
        // The process that holds the memory truncates it: only entries of vCPU 0 are left.
        memory.set_len(LINE).unwrap();
        assert_eq!(samples(), [web]);
    }

    #[test]
    fn what_reading_costs_is_told_by_user_with_a_bounded_number_of_labels() {
        use std::time::Duration;
        let mut metrics = Metrics::default();
        let second = Duration::from_secs(1);
        let pods = ["/a.scope", "/b.scope"].map(|cgroup| (Account::Container(cgroup.to_owned()), second));
        let users = (0..1000).map(|user| (Account::User(user), second));
        metrics.discovered(&Costs(pods.into_iter().chain(users).collect()));
        let text = metrics.text();
        let of = |account: &str| {
            let start = format!("ontime_discover_account_seconds_total{{account=\"{account}\"}} ");
            text.lines().find_map(|line| line.strip_prefix(start.as_str())).map(|value| value.parse::<f64>().unwrap())
        };
        assert_eq!((of("containers"), of("user 5")), (Some(2.0), Some(1.0)));
        let labels = text.lines().filter(|line| line.starts_with("ontime_discover_account_seconds_total")).count();
        assert_eq!((labels, of("other users")), (USERS + 2, Some((1000 - USERS) as f64)));
    }
}
