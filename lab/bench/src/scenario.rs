//! Scenarios: files that describe a host, its tenants, their load, and limits of what is measured.
//!
//! In: a TOML file (docs/design/lab.md). Out: a [`Scenario`], in which everything is checked that the file alone
//! decides. Each error names file, line and column, the fault and the allowed values. Classes, reservations and the
//! host's settings are checked by the same parsers that the daemon uses for them.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::ops::Range;
use std::path::Path;

use ontime_hostnet::{HostConfig, Method};
use ontime_lab::Kernel;
use ontime_sched::SchedConfig;
use ontime_tenants::config::{ConfigError, Text};
use ontime_tenants::rules::Rules;
use serde::Deserialize;
use toml::Spanned;

use crate::goals::Figure;
use crate::schema::{Bound, Load};
use crate::several::{WORST_P99, WORST_SD};

/// Largest number of the host's CPUs: the emulator has eight, and the last is the clients'.
pub(crate) const MOST_CPUS: u8 = 7;
/// Longest name of a tenant: its tap's name has two more characters, and an interface's has at most 15.
pub(crate) const LONGEST_NAME: usize = 13;
/// Names that the lab has given already: the clients' network namespace. A container's has its name, and ending a VM
/// ends the namespace of its name.
pub(crate) const TAKEN: [&str; 1] = ["clients"];
/// Largest number of VMs. Each has 192 MiB of the memory of the machine that emulates.
const MOST_VMS: usize = 102;
/// Figures that a limit can be of.
const FIGURES: [(&str, Figure); 14] = [
    ("lost", Figure::Lost),
    ("mean", Figure::Mean),
    ("p50", Figure::P50),
    ("p90", Figure::P90),
    ("p95", Figure::P95),
    ("p99", Figure::P99),
    ("p99.9", Figure::P99_9),
    ("p99.99", Figure::P99_99),
    ("max", Figure::Max),
    ("sd", Figure::Sd),
    ("bulk", Figure::Bulk),
    ("cpu", Figure::Cpu),
    (WORST_P99, Figure::Own(WORST_P99)),
    (WORST_SD, Figure::Own(WORST_SD)),
];

/// What to run and to measure.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Scenario {
    /// The host's kernel.
    pub(crate) kernel: Kernel,
    /// Number of the host's CPUs, without the clients' CPU.
    pub(crate) cpus: u8,
    /// The tenants, in the order in which they start.
    pub(crate) tenants: Vec<Tenant>,
    /// The methods of `ontime apply`, in the order of measurement.
    pub(crate) methods: Vec<Method>,
    /// The loads under each method.
    pub(crate) loads: Vec<Load>,
    /// Counted requests to each server, requests before these, and the seed of the gaps between them.
    pub(crate) requests: Requests,
    /// Limits of the figures.
    pub(crate) limits: Vec<Limit>,
    /// Files for `/etc/ontime`: name and contents.
    pub(crate) config: Vec<(&'static str, String)>,
}

/// A VM or a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tenant {
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) program: Program,
    pub(crate) nic: Nic,
    pub(crate) address: Ipv4Addr,
    /// Whether it has reserved CPU time.
    pub(crate) reserved: bool,
}

/// The kind of a tenant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Kind {
    /// QEMU, virtio-net, vhost-net and a bridge.
    #[default]
    Vm,
    /// A cgroup, and a network namespace with a macvlan on its NIC.
    Container,
}

/// What runs in a tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Program {
    /// `sockperf server`: its response times are measured.
    Sockperf,
    /// `iperf3 -s`: receives the load.
    Iperf3,
    /// A loop at SCHED_FIFO.
    Spin,
    /// Nothing.
    Idle,
}

impl Program {
    /// The role of a VM (`lab-vm`).
    pub(crate) fn role(self) -> &'static str {
        match self {
            Program::Sockperf => "rt",
            Program::Iperf3 => "bulk",
            Program::Spin => "spin",
            Program::Idle => "idle",
        }
    }
}

/// A NIC of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Nic {
    /// With network 10.1.0.0/24, whose capture shows response times.
    Rt0,
    /// With network 10.2.0.0/24.
    Bulk0,
}

impl Nic {
    /// The network's name (`lab-vm`), and its third byte.
    pub(crate) fn network(self) -> (&'static str, u8) {
        match self {
            Nic::Rt0 => ("rt", 1),
            Nic::Bulk0 => ("bulk", 2),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(crate) struct Requests {
    /// Counted requests to each server.
    pub(crate) requests: u32,
    /// Requests to each server before these.
    pub(crate) warm_up: u32,
    /// Seed of the gaps.
    pub(crate) seed: u64,
}

impl Default for Requests {
    fn default() -> Self {
        Self { requests: 300, warm_up: 20, seed: 1 }
    }
}

/// A limit of a figure.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Limit {
    /// The method; `None` for each.
    pub(crate) method: Option<Method>,
    /// The load; `None` for each.
    pub(crate) load: Option<Load>,
    /// The figure, and its name in the file.
    pub(crate) figure: (&'static str, Figure),
    /// Which side is good.
    pub(crate) bound: Bound,
    /// In us, Gbit/s, or as a share.
    pub(crate) target: f64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    methods: Spanned<Vec<Spanned<Method>>>,
    #[serde(default)]
    loads: Vec<Spanned<Load>>,
    #[serde(default)]
    host: HostTable,
    #[serde(default)]
    measure: Option<Spanned<Requests>>,
    tenant: Vec<Spanned<TenantTable>>,
    #[serde(default)]
    limit: Vec<Spanned<LimitTable>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct HostTable {
    kernel: Option<Kernel>,
    cpus: Option<Spanned<u8>>,
    /// `host.toml`.
    settings: Option<Spanned<String>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct TenantTable {
    name: Spanned<String>,
    #[serde(default)]
    kind: Kind,
    program: Spanned<Program>,
    nic: Spanned<Nic>,
    address: Spanned<Ipv4Addr>,
    class: Option<String>,
    level: Option<u8>,
    runtime_cap: Option<f64>,
    reservation: Option<Spanned<Reservation>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Reservation {
    budget: String,
    period: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct LimitTable {
    method: Option<Spanned<Method>>,
    load: Option<Spanned<Load>>,
    figure: Spanned<String>,
    at_most: Option<f64>,
    at_least: Option<f64>,
}

impl Scenario {
    /// Reads a scenario's file.
    ///
    /// # Errors
    /// [`ConfigError`], with file, line, the fault and the allowed values.
    pub(crate) fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = Text::read(path)?;
        let content =
            std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source });
        Self::parse(&text, path, &content?)
    }

    pub(crate) fn parse(text: &Text, path: &Path, content: &str) -> Result<Self, ConfigError> {
        let file: File = text.parse()?;
        let cpus = cpus(text, &file)?;
        let methods = methods(text, &file.methods, cpus)?;
        let tenants = tenants(text, &file.tenant)?;
        let loads: Vec<Load> = file.loads.iter().map(|load| *load.get_ref()).collect();
        if let Some(flood) = file.loads.iter().find(|load| load.get_ref().floods()) {
            if !tenants.iter().any(|tenant| tenant.program == Program::Iperf3) {
                let what = "this load has no receiver: add a [[tenant]] with program = \"iperf3\" on nic = \"bulk0\"";
                return Err(text.error(&flood.span(), what));
            }
        }
        let loads = if loads.is_empty() { vec![Load::None] } else { loads };
        let requests = file.measure.as_ref().map_or_else(Requests::default, |measure| *measure.get_ref());
        if requests.requests == 0 {
            let span = file.measure.as_ref().map_or(0..0, Spanned::span);
            return Err(text.error(&span, "requests = 0 measures nothing: it is 1 or more"));
        }
        let limit = |table| limit(text, table, &methods, &loads);
        let limits = file.limit.iter().map(limit).collect::<Result<_, _>>()?;
        let config = config(text, &file, path, content, cpus)?;
        let kernel = file.host.kernel.unwrap_or(Kernel::Rt72);
        Ok(Self { kernel, cpus, tenants, methods, loads, requests, limits, config })
    }

    /// Names and addresses of the tenants with this program.
    pub(crate) fn with_program(&self, program: Program) -> impl Iterator<Item = (&str, Ipv4Addr)> {
        let with = self.tenants.iter().filter(move |tenant| tenant.program == program);
        with.map(|tenant| (tenant.name.as_str(), tenant.address))
    }
}

fn cpus(text: &Text, file: &File) -> Result<u8, ConfigError> {
    let Some(cpus) = &file.host.cpus else { return Ok(1) };
    let count = *cpus.get_ref();
    if !(1..=MOST_CPUS).contains(&count) {
        let what = format!("cpus = {count} is not one of 1 to {MOST_CPUS}; one more is the clients'");
        return Err(text.error(&cpus.span(), what));
    }
    Ok(count)
}

fn methods(text: &Text, list: &Spanned<Vec<Spanned<Method>>>, cpus: u8) -> Result<Vec<Method>, ConfigError> {
    if list.get_ref().is_empty() {
        let what = format!("methods is empty: name one or more of {}", Method::names());
        return Err(text.error(&list.span(), what));
    }
    let exclusive = list.get_ref().iter().find(|method| *method.get_ref() == Method::Exclusive);
    if let Some(method) = exclusive.filter(|_| cpus < 2) {
        let what = "exclusive keeps a CPU for the RT group, and this host has one: set cpus = 2 under [host]";
        return Err(text.error(&method.span(), what));
    }
    Ok(list.get_ref().iter().map(|method| *method.get_ref()).collect())
}

fn tenants(text: &Text, tables: &[Spanned<TenantTable>]) -> Result<Vec<Tenant>, ConfigError> {
    let (mut names, mut addresses) = (BTreeSet::new(), BTreeSet::new());
    let mut all = Vec::new();
    for table in tables.iter().map(Spanned::get_ref) {
        let tenant = tenant(text, table)?;
        if !names.insert(tenant.name.clone()) {
            let what = format!("two tenants have the name \"{}\": give each its own", tenant.name);
            return Err(text.error(&table.name.span(), what));
        }
        if !addresses.insert(tenant.address) {
            let what = format!("two tenants have the address {}: give each its own", tenant.address);
            return Err(text.error(&table.address.span(), what));
        }
        all.push(tenant);
    }
    let on_rt0 = all.iter().filter(|tenant| tenant.nic == Nic::Rt0).count();
    if let Some(container) = tables.iter().find(|table| table.get_ref().kind == Kind::Container && on_rt0 > 1) {
        let what = "a container takes rt0 out of its bridge, so it must be the only tenant on rt0: move the others";
        return Err(text.error(&container.get_ref().nic.span(), what));
    }
    if !all.iter().any(|tenant| tenant.program == Program::Sockperf) {
        let what = "no tenant has program = \"sockperf\", so there is nothing to measure: add one on nic = \"rt0\"";
        let last = tables.last().map_or(0..0, Spanned::span);
        return Err(text.error(&last, what));
    }
    let mut vms = tables.iter().filter(|table| table.get_ref().kind == Kind::Vm);
    if let Some(table) = vms.nth(MOST_VMS) {
        return Err(text.error(&table.span(), format!("this host has room for {MOST_VMS} VMs: remove the others")));
    }
    Ok(all)
}

fn tenant(text: &Text, table: &TenantTable) -> Result<Tenant, ConfigError> {
    let name = table.name.get_ref();
    let is_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if !(1..=LONGEST_NAME).contains(&name.len()) || !name.chars().all(is_word) || name.starts_with('-') {
        let what = format!(
            "name \"{name}\" is not 1 to {LONGEST_NAME} of the characters a to z, 0 to 9 and '-', not '-' first"
        );
        return Err(text.error(&table.name.span(), what));
    }
    if TAKEN.contains(&name.as_str()) {
        let what = format!("name \"{name}\" is that of the lab's own network namespace: give the tenant another");
        return Err(text.error(&table.name.span(), what));
    }
    let (program, nic, address) = (*table.program.get_ref(), *table.nic.get_ref(), *table.address.get_ref());
    let (_, network) = nic.network();
    let [first, second, third, host] = address.octets();
    if [first, second, third] != [10, network, 0] || !(2..=254).contains(&host) {
        let what =
            format!("address {address} is not one of 10.{network}.0.2 to 10.{network}.0.254, this NIC's network");
        return Err(text.error(&table.address.span(), what));
    }
    let fitting = match program {
        Program::Sockperf => Some((Nic::Rt0, "sockperf is measured at nic = \"rt0\"")),
        Program::Iperf3 => Some((Nic::Bulk0, "iperf3 receives its load by nic = \"bulk0\"")),
        Program::Spin | Program::Idle => None,
    };
    if let Some((_, what)) = fitting.filter(|(fitting, _)| *fitting != nic) {
        return Err(text.error(&table.nic.span(), format!("{what}: set that")));
    }
    if table.kind == Kind::Container && program != Program::Sockperf {
        let what = "a container has program = \"sockperf\": set that, or kind = \"vm\"";
        return Err(text.error(&table.program.span(), what));
    }
    let reserved = table.reservation.is_some();
    Ok(Tenant { name: name.clone(), kind: table.kind, program, nic, address, reserved })
}

fn limit(text: &Text, table: &Spanned<LimitTable>, methods: &[Method], loads: &[Load]) -> Result<Limit, ConfigError> {
    let LimitTable { method, load, figure, at_most, at_least } = table.get_ref();
    if let Some(method) = method.as_ref().filter(|method| !methods.contains(method.get_ref())) {
        let what = format!("{} is not measured: add it to methods", method.get_ref());
        return Err(text.error(&method.span(), what));
    }
    if let Some(load) = load.as_ref().filter(|load| !loads.contains(load.get_ref())) {
        return Err(text.error(&load.span(), format!("{} is not measured: add it to loads", load.get_ref().name())));
    }
    let known = FIGURES.into_iter().find(|(name, _)| name == figure.get_ref());
    let Some(known) = known else {
        let names = FIGURES.map(|(name, _)| name).join(", ");
        let what = format!("figure \"{}\" is not one of {names}", figure.get_ref());
        return Err(text.error(&figure.span(), what));
    };
    let with_tcp = load.as_ref().map_or_else(|| loads.contains(&Load::Tcp), |load| *load.get_ref() == Load::Tcp);
    if known.1 == Figure::Bulk && !with_tcp {
        let what = "bulk throughput is measured under load \"tcp\" only: add that to loads, or set load = \"tcp\"";
        return Err(text.error(&figure.span(), what));
    }
    let (bound, target) = match (at_most, at_least) {
        (Some(most), None) => (Bound::AtMost, *most),
        (None, Some(least)) => (Bound::AtLeast, *least),
        _ => return Err(text.error(&table.span(), "a limit has one of at-most and at-least: set one")),
    };
    if !target.is_finite() {
        return Err(text.error(&table.span(), format!("{target} is no limit: set a number")));
    }
    let (method, load) = (method.as_ref().map(|of| *of.get_ref()), load.as_ref().map(|of| *of.get_ref()));
    Ok(Limit { method, load, figure: known, bound, target })
}

/// The files for `/etc/ontime`, as the daemon reads them. No time is reserved on the clients' CPU, the last one.
fn config(
    text: &Text,
    file: &File,
    path: &Path,
    content: &str,
    cpus: u8,
) -> Result<Vec<(&'static str, String)>, ConfigError> {
    let mut files = Vec::new();
    if let Some(settings) = &file.host.settings {
        let mut host = HostConfig::default();
        host.add(&inside(path, content, settings))?;
        if let Some(cpu) = host.exclusive_cpu.filter(|cpu| *cpu >= u32::from(cpus)) {
            let what = format!("exclusive_cpu = {cpu} is none of this host's CPUs, 0 to {}", cpus - 1);
            return Err(text.error(&settings.span(), what));
        }
        files.push(("host.toml", settings.get_ref().clone()));
    }
    let (mut rules, mut reservations) = (String::new(), String::new());
    for tenant in &file.tenant {
        let (table, span) = (tenant.get_ref(), tenant.span());
        if let Some(rule) = rule(table) {
            Rules::parse(&[Text::new(path, rule.as_str())]).map_err(|error| at(text, &span, error))?;
            rules.push_str(&rule);
        } else if table.level.is_some() || table.runtime_cap.is_some() {
            let what = "level and runtime-cap are for class = \"rt\" only: set that, or remove them";
            return Err(text.error(&span, what));
        }
        if let Some(reservation) = &table.reservation {
            if table.kind == Kind::Container || table.class.as_deref() != Some("rt") {
                let what = "a reservation is for VMs of class = \"rt\": set that, or remove it";
                return Err(text.error(&reservation.span(), what));
            }
            let Reservation { budget, period } = reservation.get_ref();
            let (name, [budget, period]) = (table.name.get_ref(), [budget, period].map(|of| format!("{of:?}")));
            let entry = format!("[[reservation]]\nname = \"{name}\"\nbudget = {budget}\nperiod = {period}\n");
            let checked = SchedConfig::default().add(&Text::new(path, entry.as_str()));
            checked.map_err(|error| at(text, &reservation.span(), error))?;
            reservations.push_str(&entry);
        }
    }
    files.push(("tenants.toml", rules));
    if !reservations.is_empty() {
        files.push(("sched.toml", format!("cpus = \"0-{}\"\n{reservations}", cpus - 1)));
    }
    Ok(files)
}

/// The rule of a tenant with a class.
fn rule(table: &TenantTable) -> Option<String> {
    let (class, name) = (table.class.as_ref()?, table.name.get_ref());
    let whose = match table.kind {
        Kind::Vm => format!("name = \"{name}\""),
        Kind::Container => format!("cgroup = \"/{name}.scope\""),
    };
    let mut rule = format!("[[tenant]]\n{whose}\nclass = {class:?}\n");
    if let Some(level) = table.level {
        let _ = writeln!(rule, "level = {level}");
    }
    if let Some(cap) = table.runtime_cap {
        let _ = writeln!(rule, "runtime-cap = {cap:?}");
    }
    Some(rule)
}

/// An error of a text that was made from a table, at the table's place.
fn at(text: &Text, span: &Range<usize>, error: ConfigError) -> ConfigError {
    match error {
        ConfigError::Invalid { what, .. } => text.error(span, what),
        error => error,
    }
}

/// The file in a string of the scenario. Lines before it are empty, so that its errors name the scenario's lines.
fn inside(path: &Path, content: &str, string: &Spanned<String>) -> Text {
    let Range { start, end } = string.span();
    let before = content.get(..start).unwrap_or_default().matches('\n').count();
    let raw = content.get(start..end).unwrap_or_default();
    // A line break right behind the opening quotes is no part of the string.
    let opened = ["'''\n", "\"\"\"\n", "'''\r\n", "\"\"\"\r\n"].iter().any(|quotes| raw.starts_with(quotes));
    Text::new(path, "\n".repeat(before + usize::from(opened)) + string.get_ref())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"methods = ["threaded", "partitioned"]
loads = ["tcp", "none"]

[host]
kernel = "7.2-rt"
cpus = 2
settings = '''
[nic.rt0]
class = "rt"
'''

[measure]
requests = 200

[[tenant]]
name = "plc"
program = "sockperf"
nic = "rt0"
address = "10.1.0.2"
class = "rt"
level = 1
runtime-cap = 0.5
reservation = { budget = "3ms", period = "10ms" }

[[tenant]]
name = "bulk1"
program = "iperf3"
nic = "bulk0"
address = "10.2.0.2"

[[limit]]
method = "partitioned"
load = "tcp"
figure = "p99"
at-most = 100
"#;

    fn parse(text: &str) -> Result<Scenario, String> {
        let path = Path::new("a.toml");
        Scenario::parse(&Text::new(path, text), path, text).map_err(|error| error.to_string())
    }

    #[test]
    fn a_scenario_is_read_with_its_defaults() {
        let scenario = parse(GOOD).unwrap();
        assert_eq!((scenario.kernel, scenario.cpus), (Kernel::Rt72, 2));
        assert_eq!(scenario.methods, [Method::Threaded, Method::Partitioned]);
        assert_eq!(scenario.loads, [Load::Tcp, Load::None]);
        assert_eq!(scenario.requests, Requests { requests: 200, warm_up: 20, seed: 1 });
        assert_eq!(scenario.with_program(Program::Iperf3).collect::<Vec<_>>(), [("bulk1", Ipv4Addr::new(10, 2, 0, 2))]);
        assert_eq!((scenario.limits[0].figure, scenario.limits[0].target), (("p99", Figure::P99), 100.0));
        let config: Vec<&str> = scenario.config.iter().map(|(_, text)| text.as_str()).collect();
        assert_eq!(
            scenario.config.iter().map(|(name, _)| *name).collect::<Vec<_>>(),
            ["host.toml", "tenants.toml", "sched.toml"]
        );
        assert_eq!(config[1], "[[tenant]]\nname = \"plc\"\nclass = \"rt\"\nlevel = 1\nruntime-cap = 0.5\n");
        assert!(config[2].contains("name = \"plc\"\nbudget = \"3ms\"\nperiod = \"10ms\"\n"));
        // The third CPU is the clients'.
        let mut sched = SchedConfig::default();
        sched.add(&Text::new("sched.toml", config[2])).unwrap();
        assert_eq!(sched.cpus_of(&"0-2".parse().unwrap()), [0, 1]);
        assert_eq!(scenario.tenants.iter().map(|tenant| tenant.reserved).collect::<Vec<_>>(), [true, false]);
        let least = r#"methods = ["partitioned"]
            [[tenant]]
            name = "a"
            program = "sockperf"
            nic = "rt0"
            address = "10.1.0.9"
        "#;
        let scenario = parse(least).unwrap();
        assert_eq!((scenario.cpus, scenario.loads, scenario.requests), (1, vec![Load::None], Requests::default()));
        assert_eq!(scenario.config, [("tenants.toml", String::new())]);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line_and_the_remedy() {
        for (from, to, line, said) in [
            ("cpus = 2", "cpus = 0", 6, "cpus = 0 is not one of 1 to 7"),
            ("cpus = 2", "cpus = 8", 6, "one more is the clients'"),
            ("cpus = 2", "cpus = 9", 6, "1 to 7"),
            ("cpus = 2", "cpus = 300", 6, "a whole number from 0 to 255"),
            ("cpus = 2", "cpu = 2", 6, "unknown field `cpu`"),
            ("7.2-rt", "5.10", 5, "7.2-rt"),
            ("class = \"rt\"\n'''", "class = \"urgent\"\n'''", 9, "rt"),
            ("class = \"rt\"\n'''", "clas = \"rt\"\n'''", 9, "clas"),
            ("\"threaded\", ", "\"fast\", ", 1, "fast"),
            ("[\"threaded\", \"partitioned\"]", "[]", 1, "methods is empty: name one or more of vanilla"),
            ("\"tcp\", \"none\"", "\"udp\"", 2, "small-packets"),
            ("[nic.rt0]", "exclusive_cpu = 2\n[nic.rt0]", 7, "exclusive_cpu = 2 is none of this host's CPUs, 0 to 1"),
            ("requests = 200", "requests = 0", 12, "1 or more"),
            ("requests = 200", "requests = -1", 13, "requests"),
            ("name = \"plc\"", "name = \"PLC 1\"", 16, "a to z"),
            ("name = \"plc\"", "name = \"a-name-too-long\"", 16, "1 to 13"),
            ("name = \"plc\"", "name = \"clients\"", 16, "the lab's own network namespace"),
            ("name = \"bulk1\"", "name = \"clients\"", 26, "the lab's own network namespace"),
            ("name = \"plc\"", "name = \"bulk1\"", 26, "two tenants have the name \"bulk1\""),
            ("program = \"sockperf\"", "program = \"nginx\"", 17, "sockperf"),
            ("program = \"sockperf\"", "program = \"idle\"", 25, "nothing to measure: add one"),
            ("nic = \"rt0\"", "nic = \"eth0\"", 18, "rt0"),
            ("nic = \"rt0\"", "nic = \"bulk0\"", 19, "10.2.0.2 to 10.2.0.254"),
            ("10.1.0.2", "10.1.0.1", 19, "10.1.0.2 to 10.1.0.254"),
            ("10.1.0.2", "10.1.0", 19, "address"),
            ("class = \"rt\"\nlevel", "class = \"hard\"\nlevel", 15, "rt"),
            ("class = \"rt\"\nlevel", "level", 15, "level and runtime-cap are for class = \"rt\" only"),
            ("class = \"rt\"\nlevel = 1\nruntime-cap = 0.5", "class = \"bulk\"", 21, "for VMs of class = \"rt\""),
            ("level = 1", "level = 9", 15, "9"),
            ("runtime-cap = 0.5", "runtime-cap = 1.5", 15, "1.5"),
            ("budget = \"3ms\"", "budget = \"12ms\"", 23, "12"),
            ("budget = \"3ms\"", "budget = \"soon\"", 23, "soon"),
            ("program = \"iperf3\"", "program = \"idle\"", 2, "program = \"iperf3\" on nic = \"bulk0\""),
            ("method = \"partitioned\"", "method = \"vanilla\"", 32, "add it to methods"),
            ("load = \"tcp\"", "load = \"large-packets\"", 33, "add it to loads"),
            ("figure = \"p99\"", "figure = \"p98\"", 34, "lost, mean, p50"),
            ("load = \"tcp\"\nfigure = \"p99\"", "load = \"none\"\nfigure = \"bulk\"", 34, "under load \"tcp\" only"),
            ("at-most = 100\n", "", 31, "one of at-most and at-least"),
            ("at-most = 100", "at-most = 100\nat-least = 1", 31, "one of at-most and at-least"),
            ("at-most = 100", "at-most = nan", 31, "set a number"),
            ("[measure]", "[measures]", 12, "measures"),
        ] {
            assert!(GOOD.contains(from), "{from}");
            let error = parse(&GOOD.replacen(from, to, 1)).unwrap_err();
            assert!(error.starts_with(&format!("a.toml:{line}:")) && error.contains(said), "{from} -> {to}: {error}");
        }
        // With one CPU.
        let error = parse(&GOOD.replace("cpus = 2", "cpus = 1").replace("threaded", "exclusive")).unwrap_err();
        assert!(error.starts_with("a.toml:1:") && error.contains("set cpus = 2"), "{error}");
        // A container beside a VM on its NIC, and one with another program.
        let both = GOOD.replace("bulk1", "other").replace("iperf3", "spin").replace("bulk0", "rt0");
        let both = both.replace("10.2.0.2", "10.1.0.3").replace("\"tcp\", ", "").replace("load = \"tcp\"\n", "");
        assert!(parse(&both).is_ok(), "{:?}", parse(&both));
        let both = both.replace("name = \"plc\"\n", "name = \"plc\"\nkind = \"container\"\n");
        let error = parse(&both).unwrap_err();
        assert!(error.starts_with("a.toml:19:") && error.contains("the only tenant on rt0"), "{error}");
        let error = parse(&GOOD.replace("name = \"bulk1\"\n", "name = \"bulk1\"\nkind = \"container\"\n")).unwrap_err();
        assert!(error.starts_with("a.toml:28:") && error.contains("kind = \"vm\""), "{error}");
        // A container of the name of the lab's namespace, and more VMs than there is room for.
        let alone = "methods = [\"partitioned\"]\n[[tenant]]\nname = \"clients\"\nkind = \"container\"\nprogram = \
                     \"sockperf\"\nnic = \"rt0\"\naddress = \"10.1.0.2\"\n";
        let error = parse(alone).unwrap_err();
        assert!(error.starts_with("a.toml:3:") && error.contains("\"clients\" is that of the lab's own"), "{error}");
        assert!(parse(&alone.replace("clients", "client")).is_ok());
        let idle = |vms: usize| {
            let vm = |at| {
                format!(
                    "[[tenant]]\nname = \"vm{at}\"\nprogram = \"idle\"\nnic = \"bulk0\"\naddress = \"10.2.0.{at}\"\n"
                )
            };
            parse(&(alone.replace("clients", "rt") + &(2..vms + 2).map(vm).collect::<String>()))
        };
        assert_eq!(idle(102).unwrap().tenants.len(), 103);
        let error = idle(103).unwrap_err();
        assert!(error.starts_with("a.toml:518:") && error.contains("room for 102 VMs"), "{error}");
        let error = Scenario::read(Path::new("/nowhere/a.toml")).unwrap_err().to_string();
        assert!(error.starts_with("/nowhere/a.toml: cannot be read"), "{error}");
    }

    #[test]
    fn the_examples_of_the_documentation_are_read() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/examples/lab");
        let mut read = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let scenario = Scenario::read(&path).unwrap_or_else(|error| panic!("{error}"));
            assert!(!scenario.limits.is_empty(), "{} has no limit", path.display());
            read += 1;
        }
        assert!(read >= 3, "{read}");
    }
}
