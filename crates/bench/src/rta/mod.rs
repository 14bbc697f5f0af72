//! `rta-periodic`: periodic real-time applications, one a VM, four VMs on one CPU beside bulk work (RTVirt, section 4.2, Tables 1 and 2,
//! Figure 3). [`group`]: which.
//!
//! In: groups and methods, on one emulated host. Out: a [`MethodResult`] for each pair, named `METHOD-GROUP`: deadlines missed, and what was
//! reserved for how much need. The applications are stock rt-app at SCHED_DEADLINE in the guests; a miss is what its own log says, on its
//! guest's clock. `vanilla` is the kernel's own scheduling, nothing applied and no module in the guests; with `deadline` and `paced` the guests' applications ask
//! the daemon for their bandwidth, and that back end keeps it.

pub mod group;

use std::fmt::Write as _;

use ontime_lab::images::Images;
use ontime_lab::module::GUEST;
use ontime_lab::role::RTA;
use serde::Deserialize;

use self::group::Rta;
use crate::host::{Host, MeasureError, Site, Vm, boot_vm};
use crate::schema::{Distribution, HistogramBin, Load, MethodResult, RtaRow, Rtas, Run};
use crate::wire::WireAnalysis;
use crate::{histogram::LogLinear, number, stats::Summary, trial};

/// The methods, in the order in which they are measured: the guests' module cannot be there for the first.
pub const METHODS: [&str; 3] = ["vanilla", "deadline", "paced"];
/// Of an application's slice, how much a job computes, in percent: the rest is for its system calls and its kernel's ticks, which count as its
/// run time too.
pub const WORK_PERCENT: u64 = 80;
/// What each VM has for its guest's kernel and for slack, us in each [`DECLARED_PERIOD_US`].
const DECLARED_US: u64 = 1_000;
const DECLARED_PERIOD_US: u64 = 20_000;
/// Threads of the host that want the CPU all the time.
const BULK_THREADS: usize = 4;
/// From an application's start to its first release, us: meanwhile all are admitted, and the bulk threads start. With `deadline` a guest has its declared
/// budget and no more to start it with.
const DELAY_US: u64 = 2_000_000;
const DELAY_DEADLINE_US: u64 = 9_000_000;
/// VMs, as the groups have applications.
const VMS: [&str; 4] = ["rta1", "rta2", "rta3", "rta4"];
/// Looks for an application's end, half a second apart.
const LOOKS: u32 = 400;

/// What to measure on one emulated host.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The host.
    pub site: Site,
    /// Of [`METHODS`].
    pub methods: Vec<String>,
    /// Of [`group::NAMES`], with their applications.
    pub groups: Vec<(String, Vec<Rta>)>,
    /// How long each application runs, seconds of its guest's time.
    pub seconds: u32,
}

/// A case's name in results.
pub fn name(method: &str, group: &str) -> String {
    format!("{method}-{group}")
}

/// Boots the host and four VMs and measures every group by every method. A case that fails is passed to `missing`, and the rest is measured, as
/// long as the host lives.
///
/// # Errors
/// The host or a VM does not come up.
pub fn measure(
    plan: &Plan,
    images: &Images,
    progress: &mut dyn FnMut(&str),
    missing: &mut dyn FnMut(&str, MeasureError),
) -> Result<Vec<MethodResult>, MeasureError> {
    let module = GUEST.ready(&images.guest_version()?, progress)?;
    RTA.bring_with_module(&plan.site.dir.join("files"), &module)?;
    let mut host = Host::start(&plan.site, images, &[], &[], progress)?;
    let tables: String = VMS.iter().map(|vm| format!("[vm.{vm}]\ndeadlines = true\n")).collect();
    let tenants: String = VMS.iter().map(|vm| format!("[[tenant]]\nname = \"{vm}\"\nclass = \"rt\"\n")).collect();
    host.shell(&format!(
        "ontime reset > /dev/null; printf '%s' '{tables}' > /etc/ontime/sockets.toml; printf '%s' '{tenants}' > /etc/ontime/tenants.toml"
    ))?;
    for name in VMS {
        boot_vm(host.lab()?, &Vm { name, role: RTA.name, net: "none", address: "none" }, progress)?;
    }
    let mut state = State::default();
    let ordered = METHODS.iter().filter(|method| plan.methods.iter().any(|wanted| wanted == *method));
    let cases = ordered.flat_map(|method| plan.groups.iter().map(move |(group, rtas)| (*method, group, rtas)));
    trial::each(
        host,
        cases,
        |(method, group, _)| name(method, group),
        missing,
        |host, &(method, group, rtas), results| {
            progress(&format!("{}: applying", name(method, group)));
            state.apply(host, method)?;
            progress(&format!("{}: measuring", name(method, group)));
            results.push(measure_case(host, plan, method, group, rtas)?);
            Ok(())
        },
    )
}

/// What is in force.
#[derive(Debug, Default)]
struct State {
    module: bool,
    method: Option<&'static str>,
}

impl State {
    fn apply(&mut self, host: &mut Host, method: &'static str) -> Result<(), MeasureError> {
        if self.method == Some(method) {
            return Ok(());
        }
        self.method = None;
        if method != "vanilla" {
            let reservations: String = VMS.iter().map(|vm| reservation(vm)).collect();
            host.shell(&format!(
                "printf '%s' 'backend = \"{method}\"\n{reservations}' > /etc/ontime/sched.toml; kill -HUP $(pgrep -x -f 'ontime daemon')"
            ))?;
            host.apply("partitioned")?;
            if !self.module {
                for vm in VMS {
                    host.shell(&format!("lab-vm tell {vm} 'insmod /dev/role-ontime.ko steer=none'"))?;
                }
                self.module = true;
            }
            // The daemon finds the VMs, and the guests' modules their device.
            let held = format!(
                "[ \"$(ontime top --once --json --interval 0.1 | grep -o '\"tid\":' | wc -l)\" -ge {} ]",
                VMS.len()
            );
            host.shell(&format!("for try in $(seq 100); do {held} && break; sleep 0.3; done; {held}; sleep 5"))?;
        }
        self.method = Some(method);
        Ok(())
    }
}

fn reservation(vm: &str) -> String {
    format!(
        "[[reservation]]\nname = \"{vm}\"\nbudget = \"{DECLARED_US}us\"\nperiod = \"{}ms\"\ndeadlines = 0.9\n",
        DECLARED_PERIOD_US / 1_000
    )
}

fn measure_case(
    host: &mut Host,
    plan: &Plan,
    method: &'static str,
    group: &str,
    rtas: &[Rta],
) -> Result<MethodResult, MeasureError> {
    let case = name(method, group);
    host.shell("rm -f /run/hogs")?;
    let before = host.cpu_time()?;
    let ran = run_all(host, plan, &case, rtas, method);
    let after = host.cpu_time()?;
    host.shell("[ ! -e /run/hogs ] || kill $(cat /run/hogs)")?;
    let (held, logs) = ran?;
    let mut result = MethodResult::new(&Run {
        method: &case,
        label: &format!("{}; {}", words(method), group.to_uppercase()),
        kernel: &host.kernel,
        clock: host.clock,
        cpus: u32::from(host.cpus),
        load: Load::None,
        wire: &WireAnalysis::default(),
        bulk: None,
        cpu_share: after.share_since(&before, host.cpus),
        late_ns: None,
    });
    summarise(&mut result, rtas, &logs, held);
    Ok(result)
}

/// Has every VM run its application; what was reserved for them meanwhile, if anything, and what each said at its end.
fn run_all(
    host: &mut Host,
    plan: &Plan,
    case: &str,
    rtas: &[Rta],
    method: &str,
) -> Result<(Option<f64>, Vec<Log>), MeasureError> {
    let delay = if method == "deadline" { DELAY_DEADLINE_US } else { DELAY_US };
    let mut tell = String::new();
    for (vm, rta) in VMS.iter().zip(rtas) {
        let Rta { slice_us: slice, period_us: period } = *rta;
        let (work, jobs) = (slice * WORK_PERCENT / 100, u64::from(plan.seconds) * 1_000_000 / period);
        let _ = write!(tell, "lab-vm tell {vm} 'rta {case} SCHED_DEADLINE {slice} {period} {work} {jobs} {delay}' & ");
    }
    host.shell(&format!("{tell} wait"))?;
    let held = if method == "vanilla" {
        None
    } else {
        let all = format!(
            "[ \"$(ontime top --once --json --interval 0.1 | grep -o '\"guest\":{{' | wc -l)\" -ge {} ]",
            rtas.len()
        );
        host.shell(&format!("for try in $(seq {}); do {all} && break; sleep 0.3; done", delay / 400_000))?;
        let text = host.shell("ontime top --once --json --interval 0.1")?;
        Some(reserved(&text).ok_or(MeasureError::Accounting(text))?)
    };
    host.shell(&format!(
        "for n in $(seq {BULK_THREADS}); do {{ sh -c 'while :; do :; done' & echo $! >> /run/hogs; }}; done > /dev/null 2>&1 < /dev/null"
    ))?;
    let mut logs = Vec::new();
    for (vm, rta) in VMS.iter().zip(rtas) {
        let said = format!("lab-vm log {vm} | tr -d '\\r' | sed -n 's/^RTA {case} \\(.*\\) end$/\\1/p'");
        let wait = format!("for look in $(seq {LOOKS}); do [ -z \"$({said})\" ] || break; sleep 0.5; done; {said}");
        let text = host.shell(&wait)?;
        let log = Log::parse(&text, rta.period_us).ok_or_else(|| MeasureError::Program {
            program: format!("rt-app in {vm}"),
            said: if text.trim().is_empty() { "it does not end".to_owned() } else { text.trim().to_owned() },
        })?;
        logs.push(log);
    }
    Ok((held, logs))
}

#[derive(Deserialize)]
struct Look {
    reservations: Reservations,
}

#[derive(Deserialize)]
struct Reservations {
    vcpus: Vec<Vcpu>,
}

#[derive(Deserialize)]
struct Vcpu {
    bandwidth: f64,
}

/// What the daemon reserves beyond what is declared, CPUs; of `ontime top --json` (docs/api.md).
fn reserved(text: &str) -> Option<f64> {
    let look: Look = serde_json::from_str(text).ok()?;
    let declared = DECLARED_US as f64 / DECLARED_PERIOD_US as f64;
    Some(look.reservations.vcpus.iter().map(|vcpu| (vcpu.bandwidth - declared).max(0.0)).sum())
}

/// What an application said at its end.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Log {
    /// rt-app's exit status: not 0 where it was refused its bandwidth.
    status: i32,
    /// From release to end of each job, us; above the period it is a miss.
    response_us: Vec<u64>,
}

impl Log {
    /// Of `STATUS SLACK...`; slack is what was left of the period, us.
    fn parse(text: &str, period_us: u64) -> Option<Self> {
        let mut words = text.split_whitespace().map(str::parse::<i64>);
        let status = i32::try_from(words.next()?.ok()?).ok()?;
        let period = i64::try_from(period_us).ok()?;
        let response = |slack: Result<i64, _>| Some(u64::try_from(period.checked_sub(slack.ok()?)?).unwrap_or(0));
        Some(Self { status, response_us: words.map(response).collect::<Option<_>>()? })
    }
}

fn summarise(result: &mut MethodResult, rtas: &[Rta], logs: &[Log], reserved_cpus: Option<f64>) {
    let row = |(rta, log): (&Rta, &Log)| RtaRow {
        slice_us: rta.slice_us as f64,
        period_us: rta.period_us as f64,
        jobs: log.response_us.len() as u64,
        missed: log.response_us.iter().filter(|took| **took > rta.period_us).count() as u64,
        worst_us: log.response_us.iter().max().map(|took| *took as f64),
    };
    let rows: Vec<RtaRow> = rtas.iter().zip(logs).map(row).collect();
    for (log, vm) in logs.iter().zip(VMS) {
        if log.status != 0 {
            result.notes.push(format!("rt-app of {vm} ended with status {}: it was refused its bandwidth", log.status));
        }
    }
    let all: Vec<u64> = logs.iter().flat_map(|log| &log.response_us).map(|us| us * 1_000).collect();
    result.count = rows.iter().map(|row| row.jobs).sum();
    result.latency_us = Summary::of(&all).map(|summary| Distribution::from(&summary));
    result.histogram = LogLinear::of(&all).bins().iter().map(HistogramBin::from).collect();
    result.rtas = Some(Rtas {
        needed_cpus: rtas.iter().copied().map(Rta::bandwidth).sum(),
        slack_cpus: DECLARED_US as f64 / DECLARED_PERIOD_US as f64 * rtas.len() as f64,
        reserved_cpus,
        missed: rows.iter().map(|row| row.missed).sum(),
        rows,
    });
}

fn words(method: &str) -> &str {
    match method {
        "vanilla" => "Linux' defaults on host and guest",
        "deadline" => "asked for by the guests, kept by SCHED_DEADLINE on the host",
        "paced" => "asked for by the guests, kept by pacers",
        other => other,
    }
}

/// Table 1 and Figure 3 as a table.
pub fn table(results: &[MethodResult]) -> String {
    let mut text = String::from(
        "case                 needed  reserved  beyond need and slack    jobs  missed   worst of each application, of its period\n",
    );
    for (result, rtas) in results.iter().filter_map(|result| Some((result, result.rtas.as_ref()?))) {
        let reserved = rtas.reserved_cpus.map_or_else(|| "-".to_owned(), |cpus| format!("{cpus:.3}"));
        let beyond = rtas.excess().map_or_else(|| "-".to_owned(), |share| format!("{:+.1} %", share * 100.0));
        let worst: Vec<String> = rtas
            .rows
            .iter()
            .map(|row| row.worst_us.map_or_else(|| "-".to_owned(), |worst| number::percent(worst / row.period_us)))
            .collect();
        let _ = writeln!(
            text,
            "{:<20} {:>6.3} {reserved:>9} {beyond:>22} {:>7} {:>7}   {}",
            result.method,
            rtas.needed_cpus,
            number::count(result.count),
            number::count(rtas.missed),
            worst.join(", ")
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_read_by_its_slack() {
        let log = Log::parse("0 5000 -1 19999\n", 20_000).unwrap();
        assert_eq!(log, Log { status: 0, response_us: vec![15_000, 20_001, 1] });
        assert_eq!(Log::parse("1", 20_000).unwrap().response_us, Vec::<u64>::new());
        for bad in ["", "x", "0 5 y"] {
            assert_eq!(Log::parse(bad, 20_000), None, "{bad:?}");
        }
    }

    #[test]
    fn what_is_declared_is_not_counted_as_reserved_for_applications() {
        let text = r#"{"seconds":0.1,"reservations":{"backend":"paced","vcpus":[{"vm":"a","bandwidth":0.35},{"vm":"b","bandwidth":0.05}],"refused":[]}}"#;
        assert!((reserved(text).unwrap() - 0.3).abs() < 1e-9);
        assert_eq!(reserved("no daemon"), None);
    }
}
