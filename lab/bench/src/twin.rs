//! The twin of a live host: a scenario ([`crate::scenario`]) from what `ontime report` collected there, and changes.
//!
//! In: the report's tar file. Out: the scenario's TOML, and notes of what the laboratory has not. RT tenants answer
//! `sockperf` on `rt0`, bulk tenants receive `iperf3` on `bulk0`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::str::FromStr;

use anyhow::{Context, bail};
use ontime_lab::Kernel;
use serde::Deserialize;
use toml::{Table, Value};

use crate::scenario::{LONGEST_NAME, MOST_CPUS, TAKEN};

/// The most bytes of a report that are read.
const MOST: u64 = 256 << 20;
/// The first kernel without need of the host module; the lab has 6.12 from before it and 7.2.
const NEW: (u32, u32) = (6, 18);

/// The files of a report, by name.
#[derive(Debug, Default)]
pub(crate) struct Report(BTreeMap<String, String>);

#[derive(Debug, Deserialize)]
struct Tenants {
    tenants: Vec<Tenant>,
}

/// A tenant of `ontime ps --json`.
#[derive(Debug, Deserialize)]
struct Tenant {
    kind: String,
    name: String,
    /// `bulk`, or `rt` and its level.
    class: String,
    runtime_cap: f64,
    threads: Vec<Thread>,
}

#[derive(Debug, Deserialize)]
struct Thread {
    role: String,
}

#[derive(Debug, Default, Deserialize)]
struct Status {
    method: String,
}

/// `sched.toml`, as far as the scenario takes it.
#[derive(Debug, Default, Deserialize)]
struct Sched {
    #[serde(default)]
    reservation: Vec<Reservation>,
}

#[derive(Debug, Deserialize)]
struct Reservation {
    name: String,
    budget: String,
    period: String,
}

impl Report {
    /// Reads the file that `ontime report` has written.
    pub(crate) fn read(path: &Path) -> anyhow::Result<Self> {
        let file = File::open(path).with_context(|| path.display().to_string())?;
        let mut files = BTreeMap::new();
        let read = |files: &mut BTreeMap<String, String>| -> std::io::Result<()> {
            for entry in tar::Archive::new(file.take(MOST)).entries()? {
                let mut entry = entry?;
                let name = entry.path()?.to_string_lossy().into_owned();
                let mut bytes = Vec::new();
                entry.read_to_end(&mut bytes)?;
                let name = name.strip_prefix("ontime-report/").unwrap_or(&name).to_owned();
                files.insert(name, String::from_utf8_lossy(&bytes).into_owned());
            }
            Ok(())
        };
        read(&mut files).with_context(|| format!("{}: not what `ontime report` writes", path.display()))?;
        Ok(Self(files))
    }

    fn text(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }

    /// The scenario, and notes.
    pub(crate) fn twin(&self) -> anyhow::Result<(Table, Vec<String>)> {
        let tenants: Tenants = serde_json::from_str(self.text("tenants.json"))
            .context("the report's tenants.json: make the report anew, as root, by `ontime report`")?;
        // Without a daemon there is no status, and none of its methods in force.
        let Status { method } = serde_json::from_str(self.text("status.json")).unwrap_or_default();
        let sched: Sched = toml::from_str(self.text("configuration/sched.toml")).unwrap_or_default();
        let mut notes = Vec::new();
        let tenants = twins(&tenants.tenants, &sched.reservation, &mut notes)?;
        let has_bulk = tenants.iter().any(|tenant| tenant.get("program") == Some(&"iperf3".into()));
        let mut host = Table::new();
        host.insert("kernel".into(), self.kernel(&mut notes).to_string().into());
        host.insert("cpus".into(), i64::from(self.cpus(&mut notes)).into());
        host.insert("settings".into(), "[nic.rt0]\nclass = \"rt\"\n".into());
        let mut scenario = Table::new();
        let method = if method.is_empty() { "partitioned".to_owned() } else { method };
        scenario.insert("methods".into(), vec![method].into());
        scenario.insert("loads".into(), vec![if has_bulk { "tcp" } else { "none" }].into());
        scenario.insert("host".into(), host.into());
        scenario.insert("tenant".into(), tenants.into_iter().map(Value::from).collect::<Vec<_>>().into());
        Ok((scenario, notes))
    }

    fn cpus(&self, notes: &mut Vec<String>) -> u8 {
        let line = self.text("cpus.txt").lines().find_map(|line| line.strip_prefix("CPU(s):"));
        let Some(count) = line.and_then(|count| count.trim().parse::<u32>().ok()) else {
            notes.push("the report does not tell the number of CPUs: 1".to_owned());
            return 1;
        };
        if count > u32::from(MOST_CPUS) {
            notes.push(format!("the host has {count} CPUs, the laboratory {MOST_CPUS}"));
        }
        u8::try_from(count).unwrap_or(MOST_CPUS).clamp(1, MOST_CPUS)
    }

    /// The lab's kernel that is most like the host's.
    fn kernel(&self, notes: &mut Vec<String>) -> Kernel {
        let version = self.text("system/proc/version").trim();
        let release = version.split_whitespace().nth(2).unwrap_or_default();
        let mut numbers = release.split(['.', '-']).map_while(|number| number.parse::<u32>().ok());
        let series = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        let kernel = match (version.contains("PREEMPT_RT"), series < NEW) {
            (false, _) => Kernel::Plain72,
            (true, true) => Kernel::Rt612,
            (true, false) => Kernel::Rt72,
        };
        notes.push(format!("the host's kernel is {release}, the laboratory's {kernel}"));
        kernel
    }
}

/// The tenants of the scenario.
fn twins(tenants: &[Tenant], reservations: &[Reservation], notes: &mut Vec<String>) -> anyhow::Result<Vec<Table>> {
    let rt = tenants.iter().filter(|tenant| tenant.class != "bulk").count();
    if rt == 0 {
        bail!("the report has no RT tenant, so there is nothing to measure: give a tenant class \"rt\" on that host");
    }
    let mut names = BTreeSet::new();
    let mut at = [2_u32; 2];
    let mut twins = Vec::new();
    for tenant in tenants {
        let level = tenant.class.strip_prefix("rt").map(|level| level.parse::<u8>().unwrap_or(0));
        let name = name(&tenant.name, &names);
        let (program, nic, network) = if level.is_some() { ("sockperf", "rt0", 1) } else { ("iperf3", "bulk0", 2) };
        let [on_rt, on_bulk] = &mut at;
        let host = if level.is_some() { on_rt } else { on_bulk };
        let mut twin = Table::from_iter([
            ("name".to_owned(), Value::from(name.as_str())),
            ("program".to_owned(), program.into()),
            ("nic".to_owned(), nic.into()),
            ("address".to_owned(), format!("10.{network}.0.{host}").into()),
        ]);
        *host += 1;
        if let Some(level) = level {
            twin.insert("class".into(), "rt".into());
            twin.insert("level".into(), i64::from(level).into());
            twin.insert("runtime-cap".into(), tenant.runtime_cap.into());
        }
        if tenant.kind == "container" {
            // A container of the laboratory is alone on its NIC, and answers sockperf.
            if level.is_some() && rt == 1 {
                twin.insert("kind".into(), "container".into());
            } else {
                notes.push(format!("{}: a VM in place of a container", tenant.name));
            }
        }
        let reserved = reservations.iter().find(|of| of.name == tenant.name && level.is_some());
        if let Some(Reservation { budget, period, .. }) = reserved {
            let values = [("budget", budget), ("period", period)];
            let values = values.map(|(name, value)| (name.to_owned(), Value::from(value.as_str())));
            twin.insert("reservation".into(), Table::from_iter(values).into());
        }
        let vcpus = tenant.threads.iter().filter(|thread| thread.role.starts_with("vcpu")).count();
        if vcpus > 1 {
            notes.push(format!("{}: one vCPU in place of {vcpus}", tenant.name));
        }
        names.insert(name);
        twins.push(twin);
    }
    Ok(twins)
}

/// A name that the laboratory takes, and that no other tenant has.
fn name(of: &str, others: &BTreeSet<String>) -> String {
    let is_taken = |name: &str| TAKEN.contains(&name) || others.contains(name);
    let letters =
        of.to_lowercase().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect::<String>();
    let letters = match letters.trim_matches('-') {
        "" => "tenant",
        letters => letters,
    };
    let plain = letters.get(..LONGEST_NAME.min(letters.len())).unwrap_or(letters).to_owned();
    let numbered = |number: u32| {
        let end = format!("-{number}");
        format!("{}{end}", plain.get(..(LONGEST_NAME - end.len()).min(plain.len())).unwrap_or(&plain))
    };
    std::iter::once(plain.clone()).chain((2..).map(numbered)).find(|name| !is_taken(name)).unwrap_or_default()
}

/// A change of a scenario: `methods=vanilla`, `host.cpus=2`, `tenant.NAME.level=1`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Change {
    path: Vec<String>,
    /// None removes the entry.
    value: Option<Value>,
}

impl FromStr for Change {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (path, value) = text
            .split_once('=')
            .ok_or("a change is PATH=VALUE, such as methods=vanilla, host.cpus=2 or tenant.NAME.level=1")?;
        let read = |value: &str| {
            let table: Option<Table> = toml::from_str(&format!("value = {value}")).ok();
            table.and_then(|mut table| table.remove("value")).unwrap_or_else(|| value.into())
        };
        let path = path.split('.').map(str::to_owned).collect();
        Ok(Self { path, value: (!value.is_empty()).then(|| read(value)) })
    }
}

impl Change {
    /// Changes a scenario. Whether it is one that can be run is checked where it is read.
    pub(crate) fn apply(&self, scenario: &mut Table) -> anyhow::Result<()> {
        let path: Vec<&str> = self.path.iter().map(String::as_str).collect();
        let (table, key) = match *path.as_slice() {
            [key] => (scenario, key),
            ["tenant", name, key] => {
                let tenants = scenario.get_mut("tenant").and_then(Value::as_array_mut).into_iter().flatten();
                let mut tenants = tenants.filter_map(Value::as_table_mut);
                let named = tenants.find(|tenant| tenant.get("name").and_then(Value::as_str) == Some(name));
                (named.with_context(|| format!("--change: no tenant \"{name}\" in the twin"))?, key)
            }
            [name, key] => {
                let table = scenario.entry(name).or_insert_with(|| Table::new().into()).as_table_mut();
                (table.with_context(|| format!("--change: \"{name}\" is no table of a scenario"))?, key)
            }
            _ => bail!("--change: {} is not KEY, TABLE.KEY or tenant.NAME.KEY", path.join(".")),
        };
        match &self.value {
            None => drop(table.remove(key)),
            // A list of one.
            Some(value) if table.get(key).is_some_and(Value::is_array) && !value.is_array() => {
                table.insert(key.to_owned(), vec![value.clone()].into());
            }
            Some(value) => drop(table.insert(key.to_owned(), value.clone())),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(tenants: &str) -> Report {
        let files = [
            ("tenants.json", tenants),
            ("status.json", r#"{"schema_version": 1, "method": "threaded"}"#),
            ("cpus.txt", "Architecture:  x86_64\nCPU(s):                  16\nOn-line CPU(s) list: 0-15\n"),
            ("system/proc/version", "Linux version 6.12.30+deb13-rt-amd64 (x) #1 SMP PREEMPT_RT Debian\n"),
            ("configuration/sched.toml", "[[reservation]]\nname = \"PLC 1\"\nbudget = \"3ms\"\nperiod = \"10ms\"\n"),
        ];
        Report(files.map(|(name, text)| (name.to_owned(), text.to_owned())).into())
    }

    fn tenant(name: &str, kind: &str, class: &str, vcpus: usize) -> String {
        let threads = (0..vcpus).map(|vcpu| format!(r#"{{"tid": 9, "role": "vcpu{vcpu}"}}"#)).collect::<Vec<_>>();
        format!(
            r#"{{"kind": "{kind}", "name": "{name}", "class": "{class}", "runtime_cap": 0.5, "nics": [],
            "threads": [{}]}}"#,
            threads.join(",")
        )
    }

    #[test]
    fn a_report_becomes_a_scenario_that_can_be_run() {
        let tenants = [
            tenant("PLC 1", "libvirt", "rt0", 1),
            tenant("plc-1", "qemu", "rt2", 2),
            tenant("clients", "container", "rt1", 0),
            tenant("a very long name", "libvirt", "bulk", 1),
        ];
        let all = format!(r#"{{"schema_version": 1, "tenants": [{}], "unseen": []}}"#, tenants.join(","));
        let (mut scenario, notes) = report(&all).twin().unwrap();
        let read = |scenario: &Table| {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("a.toml");
            std::fs::write(&path, toml::to_string(scenario).unwrap()).unwrap();
            crate::scenario::Scenario::read(&path).map_err(|error| error.to_string())
        };
        let twin = read(&scenario).unwrap();
        let names: Vec<_> = twin.tenants.iter().map(|tenant| (tenant.name.as_str(), tenant.reserved)).collect();
        assert_eq!(names, [("plc-1", true), ("plc-1-2", false), ("clients-2", false), ("a-very-long-n", false)]);
        assert_eq!((twin.kernel, twin.cpus), (Kernel::Rt612, MOST_CPUS));
        assert_eq!(twin.methods.iter().map(|method| method.name()).collect::<Vec<_>>(), ["threaded"]);
        assert!(twin.config.iter().any(|(_, text)| text.contains("name = \"plc-1-2\"\nclass = \"rt\"\nlevel = 2\n")));
        for wanted in ["16 CPUs", "plc-1: one vCPU in place of 2", "clients: a VM in place", "6.12.30+deb13-rt-amd64"] {
            assert!(notes.iter().any(|note| note.contains(wanted)), "{wanted}: {notes:?}");
        }
        for change in [
            "methods=exclusive",
            "host.cpus=2",
            "tenant.plc-1.reservation=",
            "tenant.plc-1-2.level=1",
            "measure.requests=50",
            "loads=[\"none\", \"tcp\"]",
        ] {
            change.parse::<Change>().unwrap().apply(&mut scenario).unwrap();
        }
        let changed = read(&scenario).unwrap();
        assert_eq!((changed.cpus, changed.requests.requests, changed.loads.len()), (2, 50, 2));
        assert_eq!(changed.methods.iter().map(|method| method.name()).collect::<Vec<_>>(), ["exclusive"]);
        assert!(changed.tenants.iter().all(|tenant| !tenant.reserved));
        for (change, said) in [("tenant.x.level=1", "no tenant \"x\""), ("methods.x=1", "\"methods\" is no table")] {
            let error = change.parse::<Change>().unwrap().apply(&mut scenario).unwrap_err().to_string();
            assert!(error.contains(said), "{change}: {error}");
        }
        assert!("methods".parse::<Change>().unwrap_err().contains("PATH=VALUE"));
    }

    #[test]
    fn a_container_alone_on_its_nic_stays_one_and_a_host_without_rt_has_no_twin() {
        let of = |tenants: &str| report(&format!(r#"{{"tenants": [{tenants}]}}"#)).twin();
        let (scenario, _) = of(&tenant("control", "container", "rt0", 0)).unwrap();
        assert!(toml::to_string(&scenario).unwrap().contains("kind = \"container\""));
        assert_eq!(scenario.get("loads"), Some(&vec!["none"].into()));
        let error = of(&tenant("a", "qemu", "bulk", 1)).unwrap_err().to_string();
        assert!(error.contains("no RT tenant"), "{error}");
        assert!(Report::default().twin().is_err());
    }
}
