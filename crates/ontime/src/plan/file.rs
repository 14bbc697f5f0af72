//! The input file of `ontime plan`: a host and the real-time tenants that it should run.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

use ontime_plan::edf::Partition;
use ontime_plan::{Arrivals, Bandwidth, Nanos, Rta, Tenant, Vcpu};
use ontime_sched::{Beside, SchedConfig};
use ontime_tenants::config::{ConfigError, Text};
use serde::Deserialize;
use toml::Spanned;

/// The most tenants, including copies, and the most RTAs of a tenant.
const TENANTS_MAX: u32 = 10_000;
const RTAS_MAX: u32 = 1_000;
/// The most CPUs of a host.
pub(super) const CPUS_MAX: u32 = 1_024;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    host: Spanned<HostSection>,
    slack: Option<Nanos>,
    #[serde(default)]
    tenant: Vec<Spanned<Entry>>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct HostSection {
    cpus: u32,
    bulk_reserve: Option<f64>,
    reserve: Option<f64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Entry {
    name: String,
    copies: Option<u32>,
    vcpus: Option<u32>,
    slack: Option<Nanos>,
    cpus: Option<BTreeSet<u32>>,
    host: Option<u32>,
    budget: Option<Nanos>,
    period: Option<Nanos>,
    #[serde(default)]
    rta: Vec<Spanned<RtaEntry>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RtaEntry {
    slice: Nanos,
    period: Nanos,
    #[serde(default)]
    sporadic: bool,
    copies: Option<u32>,
}

/// CPU time that is kept for bulk tenants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reserve {
    /// On each host, on whatever CPUs.
    Host(Bandwidth),
    /// On each CPU, and for the cap watcher, as the daemon keeps it beside reservations that programs request.
    /// Bandwidth is then in whole millionths of a CPU, as in these.
    EachCpu(Beside),
}

/// The checked content of the file.
#[derive(Debug, Clone)]
pub(crate) struct PlanFile {
    /// CPUs of each host for tenants.
    pub cpus: u32,
    /// CPU time kept for bulk tenants.
    pub reserve: Reserve,
    /// The tenants, with copies expanded.
    pub tenants: Vec<Tenant>,
    /// For each of them, the number of the host where it is already, from 1.
    pub hosts: Vec<Option<u32>>,
}

impl PlanFile {
    /// What is kept on each host.
    pub(super) fn kept(&self) -> Bandwidth {
        match self.reserve {
            Reserve::Host(kept) => kept,
            Reserve::EachCpu(kept) => kept.of_all(self.cpus as usize),
        }
    }
}

/// Reads and checks a file.
///
/// # Errors
/// [`ConfigError`], with file and line.
pub(super) fn load(path: &Path) -> Result<PlanFile, ConfigError> {
    parse(&Text::read(path)?)
}

/// Parses and checks a file's text.
///
/// # Errors
/// [`ConfigError`], with file and line.
pub(crate) fn parse(text: &Text) -> Result<PlanFile, ConfigError> {
    let file: File = text.parse()?;
    let host = *file.host.get_ref();
    let refuse_host = |what: String| text.error(&file.host.span(), what);
    if host.cpus == 0 || host.cpus > CPUS_MAX {
        return Err(refuse_host(format!("cpus = {} is not one of 1 to {CPUS_MAX}", host.cpus)));
    }
    // Rounded up to a millionth of a CPU, once the range has been checked.
    let ppm = |reserve: f64| Bandwidth::ppm((reserve * 1e6).ceil() as u64);
    let reserve = match (host.bulk_reserve.unwrap_or(0.0), host.reserve) {
        (kept, None) if (0.0..=f64::from(host.cpus)).contains(&kept) => Reserve::Host(ppm(kept)),
        (kept, None) => {
            return Err(refuse_host(format!("bulk-reserve = {kept} is not a number of CPUs from 0 to {}", host.cpus)));
        }
        (_, Some(_)) if host.bulk_reserve.is_some() => {
            return Err(refuse_host("give reserve (of each CPU) or bulk-reserve (of the host), not both".to_owned()));
        }
        (_, Some(kept)) if (0.01..=0.85).contains(&kept) => {
            Reserve::EachCpu(SchedConfig { reserve: ppm(kept), ..SchedConfig::default() }.beside_leases())
        }
        (_, Some(kept)) => {
            return Err(refuse_host(format!("reserve = {kept} is not a part of each CPU from 0.01 to 0.85")));
        }
    };
    let (mut tenants, mut hosts) = (Vec::new(), Vec::new());
    for entry in &file.tenant {
        let span = entry.span();
        let refuse = |what: String| text.error(&span, what);
        let (entry, slack) = (entry.get_ref(), entry.get_ref().slack.or(file.slack));
        let built = tenant(entry, slack.unwrap_or(Nanos::ZERO), host.cpus);
        let tenant = built.map_err(|Wrong { at, what }| text.error(&at.unwrap_or_else(|| span.clone()), what))?;
        if entry.host == Some(0) {
            return Err(refuse("host = 0: hosts are numbered from 1".to_owned()));
        }
        let copies = entry.copies.unwrap_or(1);
        if copies == 0 || copies > TENANTS_MAX || tenants.len() + copies as usize > TENANTS_MAX as usize {
            return Err(refuse(format!("copies = {copies}: at least 1, and at most {TENANTS_MAX} tenants in all")));
        }
        for copy in 1..=copies {
            let name = if copies == 1 { entry.name.clone() } else { format!("{}-{copy}", entry.name) };
            tenants.push(Tenant { name, ..tenant.clone() });
            hosts.push(entry.host);
        }
    }
    Ok(PlanFile { cpus: host.cpus, reserve, tenants, hosts })
}

/// What is wrong with a tenant. `at` is the place in the file, or None for the tenant's whole table.
struct Wrong {
    at: Option<Range<usize>>,
    what: String,
}

impl From<String> for Wrong {
    fn from(what: String) -> Self {
        Self { at: None, what }
    }
}

fn tenant(entry: &Entry, slack: Nanos, cpus: u32) -> Result<Tenant, Wrong> {
    let name = entry.name.clone();
    if let Some(beyond) = entry.cpus.iter().flatten().find(|cpu| **cpu >= cpus) {
        return Err(format!("{name}: there is no CPU {beyond}; the host has 0 to {}", cpus - 1).into());
    }
    match (entry.budget, entry.period) {
        (None, None) => {}
        (Some(_), Some(_)) if !entry.rta.is_empty() => {
            return Err(format!("{name}: give budget and period of each vCPU, or rta, not both").into());
        }
        (Some(budget), Some(period)) => return reserving(entry, budget, period, slack),
        _ => return Err(format!("{name}: give both budget and period of each vCPU, or neither and rta").into()),
    }
    let mut rtas = Vec::new();
    for rta in &entry.rta {
        let one = rta.get_ref();
        let refuse = |what: String| Wrong { at: Some(rta.span()), what };
        let arrivals = if one.sporadic { Arrivals::Sporadic } else { Arrivals::Periodic };
        let rta = Rta::new(one.slice, one.period, arrivals).map_err(|error| refuse(format!("{name}: {error}")))?;
        let copies = one.copies.unwrap_or(1);
        if copies == 0 || rtas.len() + copies as usize > RTAS_MAX as usize {
            let what = format!("{name}: copies = {copies}: at least 1, and at most {RTAS_MAX} RTAs in a tenant");
            return Err(refuse(what));
        }
        rtas.extend(std::iter::repeat_n(rta, copies as usize));
    }
    if rtas.is_empty() {
        return Err(format!(
            "{name}: no rta; add its real-time applications (rta = [...]), or take the tenant out: it needs no plan"
        )
        .into());
    }
    let partition = partition(rtas, entry.vcpus, slack).map_err(|error| format!("{name}: {error}"))?;
    let vcpus = partition.into_vcpus().into_iter().filter(|rtas| !rtas.is_empty());
    let vcpus = vcpus.map(|rtas| Vcpu::new(rtas, slack, entry.cpus.clone())).collect::<Result<_, _>>();
    Ok(Tenant { vcpus: vcpus.map_err(|error| format!("{name}: {error}"))?, name })
}

/// A tenant each of whose vCPUs reserves this, as a program requests it from the daemon.
fn reserving(entry: &Entry, budget: Nanos, period: Nanos, slack: Nanos) -> Result<Tenant, Wrong> {
    let name = entry.name.clone();
    let count = vcpu_count(entry.vcpus.unwrap_or(1)).map_err(|error| format!("{name}: {error}"))?;
    let vcpu = Rta::new(budget, period, Arrivals::Periodic)
        .and_then(|whole| Vcpu::new(vec![whole], slack, entry.cpus.clone()))
        .map_err(|error| format!("{name}: {error}"))?;
    Ok(Tenant { vcpus: vec![vcpu; count], name })
}

fn vcpu_count(vcpus: u32) -> Result<usize, String> {
    if vcpus == 0 || vcpus > CPUS_MAX {
        return Err(format!("vcpus = {vcpus} is not one of 1 to {CPUS_MAX}"));
    }
    Ok(vcpus as usize)
}

/// Partitions RTAs onto the given number of vCPUs, or else onto as few as possible.
fn partition(rtas: Vec<Rta>, vcpus: Option<u32>, slack: Nanos) -> Result<Partition, String> {
    let place = |count: usize| {
        let mut partition = Partition::new(count, slack);
        rtas.iter().try_for_each(|rta| partition.insert(rta.clone())).map(|()| partition)
    };
    if let Some(count) = vcpus {
        return place(vcpu_count(count)?).map_err(|error| error.to_string());
    }
    let need: Bandwidth = rtas.iter().map(Rta::bandwidth).sum();
    let fewest = usize::try_from(need.whole_cpus()).unwrap_or(usize::MAX).max(1);
    let found = (fewest..rtas.len()).find_map(|count| place(count).ok());
    found.map_or_else(|| place(rtas.len()).map_err(|error| error.to_string()), Ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<PlanFile, String> {
        parse(&Text::new("t.toml", text)).map_err(|error| error.to_string())
    }

    #[test]
    fn copies_and_vcpus_are_worked_out() {
        let plan = read(
            "slack = \"500us\"\n[host]\ncpus = 4\nbulk-reserve = 0.25\n[[tenant]]\nname = \"vm\"\ncopies = 2\n\
             rta = [{ slice = \"4ms\", period = \"10ms\", copies = 3 }]\n",
        )
        .unwrap();
        let names: Vec<_> = plan.tenants.iter().map(|tenant| (tenant.name.as_str(), tenant.vcpus.len())).collect();
        assert_eq!(names, [("vm-1", 2), ("vm-2", 2)]);
        assert_eq!(plan.reserve, Reserve::Host(Bandwidth::ppm(250_000)));
        assert_eq!(plan.hosts, [None, None]);
    }

    #[test]
    fn each_vcpu_of_a_reservation_has_its_budget_and_none_has_two() {
        // As applications, the two would share a vCPU, and need more of one than is left beside the reserve.
        let plan = read(
            "[host]\ncpus = 2\nreserve = 0.05\n[[tenant]]\nname = \"pod\"\nvcpus = 2\nbudget = \"1440us\"\n\
             period = \"3ms\"\ncpus = [1]\n",
        )
        .unwrap();
        let vcpus: Vec<_> = plan.tenants[0].vcpus.iter().map(|vcpu| (vcpu.bandwidth(), vcpu.affinity())).collect();
        assert_eq!(vcpus, [(Bandwidth::ppm(480_000), Some(&[1].into())); 2]);
    }

    #[test]
    fn the_file_of_the_documentation_is_read() {
        let page = include_str!("../../../../docs/reference/plan.md");
        let (_, rest) = page.split_once("```toml\n").unwrap();
        let plan = read(rest.split_once("```").unwrap().0).unwrap();
        let names: Vec<_> = plan.tenants.iter().map(|tenant| tenant.name.as_str()).collect();
        assert_eq!((plan.cpus, names), (15, vec!["plc-1", "plc-2", "pod"]));
    }

    #[test]
    fn what_is_wrong_is_said_with_its_place() {
        let host = "[host]\ncpus = 2\n";
        let cases = [
            ("[host]\ncpus = 0\n".to_owned(), "t.toml:1:1: cpus = 0 is not one of 1 to 1024"),
            ("[host]\ncpus = 2\nbulk-reserve = nan\n".to_owned(), "bulk-reserve = NaN is not"),
            ("[host]\ncpus = 2\nreserve = 0.95\n".to_owned(), "reserve = 0.95 is not a part of each CPU"),
            ("[host]\ncpus = 2\nreserve = nan\n".to_owned(), "reserve = NaN is not a part of each CPU"),
            ("[host]\ncpus = 2\nreserve = 0.05\nbulk-reserve = 0.1\n".to_owned(), "not both"),
            (
                format!("{host}[[tenant]]\nname = \"a\"\nhost = 0\nrta = [{{slice=\"1ms\", period=\"2ms\"}}]\n"),
                "hosts are numbered from 1",
            ),
            (format!("{host}[[tenant]]\nname = \"a\"\n"), "a: no rta"),
            (format!("{host}[[tenant]]\nname = \"a\"\nbudget = \"1ms\"\n"), "a: give both budget and period"),
            (
                format!("{host}[[tenant]]\nname = \"a\"\nbudget = \"3ms\"\nperiod = \"2ms\"\n"),
                "a: an RTA of 3 ms every 2 ms",
            ),
            (
                format!("{host}[[tenant]]\nname = \"a\"\nvcpus = 0\nbudget = \"1ms\"\nperiod = \"2ms\"\n"),
                "a: vcpus = 0 is not one of 1 to 1024",
            ),
            (
                format!(
                    "{host}[[tenant]]\nname = \"a\"\nbudget = \"1ms\"\nperiod = \"2ms\"\n\
                     rta = [{{slice=\"1ms\", period=\"2ms\"}}]\n"
                ),
                "a: give budget and period of each vCPU, or rta, not both",
            ),
            (
                format!("{host}[[tenant]]\nname = \"a\"\nrta = [{{slice=\"2ms\", period=\"1ms\"}}]\n"),
                "t.toml:5:8: a: an RTA of 2 ms every 1 ms: the slice must be above 0 and at most the period",
            ),
            (format!("{host}[[tenant]]\nname = \"a\"\nrta = [{{slice=\"2\", period=\"1ms\"}}]\n"), "is no duration"),
            (format!("{host}[[tenant]]\nname = \"a\"\ncpus = [2]\nrta = []\n"), "there is no CPU 2"),
            (format!("{host}[[tenant]]\nnome = \"a\"\n"), "did you mean `name`?"),
        ];
        for (text, want) in cases {
            let said = read(&text).unwrap_err();
            assert!(said.contains(want), "{said}\n{want}");
        }
    }
}
