//! `inversion`: switches off each row of hostnet's table alone, under a flood, and measures the response times of the
//! RT server and the result of `ontime doctor`.
//!
//! In: names of rows, on one emulated host. Out: a [`MethodResult`] for `all` (every rule in force, measured first and
//! again last) and for each `without-RULE`. The load is `rt-server`'s, with small packets. In addition, a bulk process
//! of the host reads a disk all the time, for the rule of disks' interrupts. A rule is switched off by `without` in
//! `host.toml`, as an administrator would do it.

use std::fs;
use std::process::ExitCode;

use ontime_hostnet::{Method, RULES, RuleId};
use ontime_lab::Kernel;
use ontime_lab::images::Images;
use serde::Deserialize;

use super::{Emulated, Experiment, Measured, Output, chosen, command};
use crate::error::MeasureError;
use crate::goals::Figure;
use crate::host::{BULK_VMS, Host, RT_VM, Site, boot_vm};
use crate::progress::progress;
use crate::schema::{Load, MethodResult, Metric, Unit};
use crate::server;
use crate::trial::{self, CaseResults, Requests, Trial};
use crate::workload::SOCKPERF;

/// Every rule in force.
const ALL: &str = "all";
/// The same, measured again at the end: the difference is noise.
const AGAIN: &str = "all-again";
/// Requests at the start of each case that do not count.
const WARM_UP: u64 = 10;

/// Name of a row in results.
fn name(rule: &str) -> String {
    format!("without-{rule}")
}

/// What a row needs to have an effect, but this setup lacks. For such a row, a figure equal to that of `all` proves
/// nothing.
fn lacks(rule: &str, kernel: Kernel, cpus: u8) -> Option<&'static str> {
    Some(match rule {
        "rt-tx-queue" => {
            "a NIC with several transmit queues that both classes use: here each class has a NIC, of one queue"
        }
        "backlog" | "veth" => {
            "a path by the per-CPU backlog, such as a container's veth without GRO: here a VM is asked by tap and \
             bridge"
        }
        "skb-defer" if cpus < 2 => "several CPUs: buffers are deferred to the CPU that allocated them, and here is one",
        "halt-poll" if cpus < 2 => {
            "an RT vCPU that is alone on its CPU after its hlt: KVM does not poll where another thread is runnable, \
             and here all share one CPU"
        }
        "rt-protections" => {
            "bulk threads that are starved for a second: runtime caps and an RT VM that sleeps leave them more than \
             the fair server would"
        }
        "napi-weight" | "tap-batch" if !kernel.takes_host_module() => {
            "a kernel whose softirqs share a lock on each CPU: --kernel 6.12-rt"
        }
        "tap-batch" => "bulk VMs that send small packets, such as TCP's acknowledgements: here they receive UDP",
        "vmm-place" => {
            "a vCPU that leaves its guest for a device that QEMU emulates, and a tool that asks QEMU something: here \
             requests pass vhost"
        }
        "moderation" => {
            "packets that come sooner after each other than the driver's interval, 50 us and more: here 1 to 10 ms are \
             between requests"
        }
        "softirq-threads" => "timers of the request's path, such as TCP's: here requests are UDP",
        _ => return None,
    })
}

/// Boots the host and its VMs and measures every case. If a case fails, the remaining cases are measured while the host
/// lives.
fn measure(args: &Options, site: &Site, images: &Images) -> Result<CaseResults, MeasureError> {
    let mut host = Host::start(site, images, &BULK_VMS, &server::CONFIG)?;
    boot_vm(host.lab()?, &RT_VM)?;
    // Direct I/O, so that every block causes an interrupt of the disk. The process ends with the host.
    host.shell(
        "{ while dd if=/dev/vdb of=/dev/null bs=4k count=20000 iflag=direct 2> /dev/null; do :; done; } > /dev/null \
         2>&1 < /dev/null &",
    )?;
    let rows = args.rules.iter().map(|rule| (name(rule), Some(rule.as_str())));
    let cases = [(ALL.to_owned(), None)].into_iter().chain(rows).chain([(AGAIN.to_owned(), None)]);
    let mut p99_of_all = None;
    trial::each(
        host,
        cases,
        |(case, _)| case.clone(),
        |host, (case, rule)| {
            let mut result = measure_case(host, args, case, *rule)?;
            let p99 = result.latency_us.map(|times| times.p99);
            result.metrics.extend(against(p99, p99_of_all));
            if case == ALL {
                p99_of_all = p99;
            }
            if let Some(lacks) = rule.and_then(|rule| lacks(rule, site.machine.kernel, site.machine.cpus)) {
                result.notes.push(format!("no difference is to be expected here; it takes {lacks}"));
            }
            Ok(result)
        },
    )
}

fn measure_case(host: &mut Host, args: &Options, case: &str, rule: Option<&str>) -> Result<MethodResult, MeasureError> {
    progress(format_args!("{case}: applying"));
    switch_off(host, rule)?;
    let finding = rule.map(|rule| doctor(host, rule)).transpose()?;
    let label = rule.map_or_else(|| "every rule of partitioned".to_owned(), |rule| format!("without {rule}"));
    let trial = Trial {
        method: case,
        label: &label,
        load: Load::SmallPackets,
        requests: Requests::Client { workload: SOCKPERF, count: args.requests + WARM_UP, seed: args.seed },
        warmup: WARM_UP,
    };
    let mut result = trial.run(host)?;
    result.metrics.extend(finding.unwrap_or_default());
    Ok(result)
}

/// Gives the daemon a `host.toml` that switches off this rule, or none, and waits until that is applied.
fn switch_off(host: &mut Host, rule: Option<&str>) -> Result<(), MeasureError> {
    let without = rule.map_or_else(String::new, |rule| format!("without = [\"{rule}\"]\n"));
    let text: String = server::CONFIG.iter().map(|(_, text)| *text).collect();
    let said = |rule: &str| format!("ontime status | grep -q 'rule {rule} is switched off'");
    let holds = rule.map_or_else(|| "! ontime status | grep -q 'is switched off'".to_owned(), said);
    host.configure(&format!("{without}{text}"))?;
    host.shell(&format!(
        "for try in $(seq 200); do {{ {holds}; }} && break; sleep 0.1; done; {{ {holds}; }} || \
         {{ tail -n 5 /lab/daemon.log; exit 1; }}"
    ))?;
    host.apply("partitioned")
}

/// The fields of `ontime doctor --json` (docs/reference/doctor.md) that are used.
#[derive(Debug, Deserialize)]
struct Diagnosis {
    checks: Vec<Check>,
}

#[derive(Debug, Deserialize)]
struct Check {
    id: String,
    state: String,
    found: String,
    remedy: String,
}

fn doctor(host: &mut Host, rule: &str) -> Result<Vec<Metric>, MeasureError> {
    host.shell(
        "ontime doctor --json > /lab/doctor.json 2> /lab/doctor.err; [ -s /lab/doctor.json ] || \
        { cat /lab/doctor.err; exit 1; }",
    )?;
    let path = host.dir.join("files/doctor.json");
    let text = fs::read_to_string(&path).map_err(|source| MeasureError::File { path: path.clone(), source })?;
    let diagnosis: Diagnosis =
        serde_json::from_str(&text).map_err(|error| MeasureError::Doctor(format!("no report: {error}")))?;
    let check = diagnosis.checks.into_iter().find(|check| check.id == rule);
    let check = check.ok_or_else(|| MeasureError::Doctor(format!("it has no row {rule}")))?;
    Ok(vec![
        Metric::text("doctor", Unit::Word, check.state),
        Metric::text("found", Unit::Sentence, check.found),
        Metric::text("remedy", Unit::Sentence, check.remedy),
    ])
}

#[derive(Debug, Clone, clap::Args)]
struct Options {
    /// Rules to switch off, one after the other; default: all of method partitioned
    #[arg(long = "rule", value_name = "RULE", value_delimiter = ',')]
    rules: Vec<String>,
    #[command(flatten)]
    emulated: Emulated,
    /// Counted requests a case
    #[arg(long, default_value_t = 300)]
    requests: u64,
    /// Seed of the gaps between requests
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    output: Output,
}

/// Measures with every rule, and without each of them, on one emulated host.
fn execute(args: &Options) -> anyhow::Result<ExitCode> {
    let all = rules();
    let rules = chosen("rule", &args.rules, &all.iter().map(String::as_str).collect::<Vec<_>>())?;
    let args = &Options { rules, ..args.clone() };
    let found = args.emulated.measure(false, |site, images| measure(args, &site, images))?;
    let notes = vec![format!(
        "a row's cost here is that of this set-up: two NICs, each of one class, {}; a note says which rows it cannot \
         show",
        args.emulated.cpus_in_words()
    )];
    Measured { experiment: "inversion", seed: args.seed, found, notes }.report(&args.output)
}

/// The rules that can be switched off: those of `partitioned` that set something.
pub(super) fn rules() -> Vec<String> {
    let rows = RULES.iter().map(|rule| rule.id);
    rows.filter(|id| Method::Partitioned.has(*id) && *id != RuleId::HostConfig).map(|id| id.to_string()).collect()
}

/// The p99 divided by that with every rule in force, if that was measured.
fn against(own: Option<f64>, all: Option<f64>) -> Option<Metric> {
    let (own, all) = own.zip(all)?;
    (all > 0.0).then(|| Metric::number("p99-by-all", Unit::Times, own / all))
}

/// Every rule switched off alone.
#[derive(Debug)]
pub(super) struct Inversion;

impl Experiment for Inversion {
    command!(
        "inversion",
        "Each rule of hostnet's table switched off alone under a flood: what it costs, and what `ontime doctor` says",
        Options,
        execute
    );

    fn cases(&self) -> Vec<(String, Load)> {
        let rows = rules().into_iter().map(|rule| name(&rule));
        rows.chain([ALL, AGAIN].map(str::to_owned)).map(|case| (case, Load::SmallPackets)).collect()
    }

    fn columns(&self) -> &'static [Figure] {
        &[Figure::Count, Figure::Lost, Figure::P50, Figure::P99, Figure::Max]
    }

    fn meaning(&self) -> &'static str {
        "The 99th percentile by that of every rule in force, and what `ontime doctor` says of the rule that is \
         switched off."
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_switched_off_as_host_toml_allows_it() {
        let rules = rules();
        assert!(rules.len() >= 12 && rules.iter().any(|rule| rule == "device-irq"), "{rules:?}");
        let dir = tempfile::tempdir().unwrap();
        for rule in &rules {
            fs::write(dir.path().join("host.toml"), format!("without = [\"{rule}\"]\n")).unwrap();
            let config = ontime_hostnet::HostConfig::load(dir.path()).unwrap();
            assert_eq!(config.without.iter().map(ToString::to_string).collect::<Vec<_>>(), std::slice::from_ref(rule));
        }
    }

    #[test]
    fn what_the_set_up_cannot_show_are_rows_of_the_table() {
        let rules = rules();
        let hidden = |cpus| rules.iter().filter(|rule| lacks(rule, Kernel::Rt72, cpus).is_some()).count();
        assert_eq!([hidden(1), hidden(2)], [11, 9], "a rule was renamed, or a new one cannot be shown");
    }
}
