//! `scenario`, and `ontime-lab run FILE`: measures what a file describes ([`crate::scenario`]).
//!
//! In: a scenario's file. Out: a [`MethodResult`] for each method under each load ([`crate::several`]). The file's
//! limits are the report's goals.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use ontime_cli::{CONFIG, CRITICAL, Exit};
use ontime_figures::number;
use ontime_hostnet::Method;
use ontime_lab::Clock;
use ontime_lab::images::Images;
use ontime_tenants::config::Text;
use serde::Deserialize;

use super::{Emulated, Experiment, Measured, Output, command};
use crate::command::product::Product;
use crate::error::MeasureError;
use crate::goals::Figure;
use crate::host::{Host, Site, Vm, boot_vm};
use crate::progress::progress;
use crate::scenario::{Kind, Limit, Program, Scenario, Tenant};
use crate::schema::{Bound, Goal, Load, MethodResult};
use crate::server::{self, Net};
use crate::several::SeveralServers;
use crate::trial::{self, CaseResults};
use crate::twin::{Change, Report};

/// The name of the experiment.
const NAME: &str = "scenario";
/// Number of looks at the reservations until the daemon has admitted them; each takes 0.1 s of the host's time.
const LOOKS: u32 = 100;

/// What to run.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// The scenario (docs/design/lab.md)
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    #[command(flatten)]
    pub(crate) run: RunArgs,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// How to run it.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct RunArgs {
    /// Real seconds without a sign of life after which the host counts as hung, 30 to 86400; raise it on a busy machine
    #[arg(long, default_value_t = 180)]
    pub(crate) silence: u64,
    /// Directory for captures and logs (default: removed at the end)
    #[arg(long)]
    pub(crate) out: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) product: Product,
}

/// What to compare.
#[derive(Debug, clap::Args)]
pub(crate) struct TwinOptions {
    /// The tar file that `ontime report` has written
    #[arg(value_name = "REPORT")]
    report: PathBuf,
    /// A change of the scenario: methods=vanilla, host.cpus=2, tenant.NAME.level=1, tenant.NAME.reservation= (removes
    /// it)
    #[arg(long, value_name = "PATH=VALUE")]
    change: Vec<Change>,
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    output: Output,
}

/// Reads the file. A fault of it is an error in a configuration file.
fn read(path: &Path) -> anyhow::Result<Scenario> {
    Ok(Scenario::read(path).map_err(|error| Exit { status: CONFIG, message: error.to_string() })?)
}

/// Runs a scenario. The exit status is [`CRITICAL`] if a limit does not hold.
pub(crate) fn execute(args: &Options) -> anyhow::Result<ExitCode> {
    let scenario = read(&args.file)?;
    let found = results(&scenario, &args.run)?;
    let goals: Vec<Goal> = scenario.limits.iter().flat_map(|limit| goals(limit, &scenario, &found.results)).collect();
    let broken = goals.iter().any(|goal| goal.met == Some(false));
    let notes = vec![format!("the scenario: {}", args.file.display())];
    let seed = scenario.requests.seed;
    let status = Measured { experiment: NAME, seed, found, notes }.report_with(goals, &args.output)?;
    Ok(if broken { ExitCode::from(CRITICAL) } else { status })
}

/// The scenario's results on a host of its own.
fn results(scenario: &Scenario, args: &RunArgs) -> anyhow::Result<CaseResults> {
    let emulated = Emulated {
        clock: Clock::Virtual,
        cpus: Some(scenario.cpus),
        kernel: scenario.kernel,
        silence: args.silence,
        out: args.out.clone(),
        product: args.product.clone(),
        link: None,
        without_clients: false,
    };
    emulated.machine().check()?;
    emulated.measure(false, |site, images| {
        let vms = scenario.tenants.iter().filter(|tenant| tenant.kind == Kind::Vm).count();
        measure(scenario, &site.with_room_for(vms as u32), images)
    })
}

/// Prints the scenario of a live host. With changes, measures it before and after them instead.
pub(crate) fn twin(args: &TwinOptions) -> anyhow::Result<ExitCode> {
    let (before, mut notes) = Report::read(&args.report)?.twin()?;
    let mut after = before.clone();
    args.change.iter().try_for_each(|change| change.apply(&mut after))?;
    // Both are checked before one is measured.
    let [before, after] = [(before, "before"), (after, "after")].map(|(table, when)| {
        let text = toml::to_string(&table).context("the twin as TOML")?;
        let parsed = Scenario::parse(&Text::new(when, text.as_str()), Path::new(when), &text);
        let parsed = parsed.map_err(|error| Exit { status: CONFIG, message: format!("{error}\n{text}") });
        anyhow::Ok((when, text, parsed?))
    });
    let (before, after) = (before?, after?);
    if args.change.is_empty() {
        let (_, text, _) = before;
        let notes: String = notes.iter().map(|note| format!("# {note}\n")).collect();
        ontime_cli::print(notes + &text)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut all = CaseResults::default();
    let seed = before.2.requests.seed;
    for (when, text, scenario) in [before, after] {
        notes.push(format!("{when}:\n{text}"));
        let mut found = results(&scenario, &args.run)?;
        found.results.iter_mut().for_each(|result| result.method = format!("{when}-{}", result.method));
        all.results.append(&mut found.results);
        all.missing.extend(found.missing.iter().map(|what| format!("{when}: {what}")));
    }
    Measured { experiment: NAME, seed, found: all, notes }.report(&args.output)
}

/// Boots the host and its tenants and measures every method under every load. If a case fails, the remaining cases are
/// measured while the host lives.
fn measure(scenario: &Scenario, site: &Site, images: &Images) -> Result<CaseResults, MeasureError> {
    let config: Vec<(&str, &str)> = scenario.config.iter().map(|(name, text)| (*name, text.as_str())).collect();
    let mut host = Host::start(site, images, &[], &config)?;
    for tenant in &scenario.tenants {
        start(&mut host, tenant)?;
    }
    let servers: Vec<_> = scenario
        .with_program(Program::Sockperf)
        .map(|(name, address)| (name.to_owned(), SocketAddr::from((address, server::SOCKPERF.port))))
        .collect();
    let bulk: Vec<_> =
        scenario.with_program(Program::Iperf3).map(|(name, address)| (name.to_owned(), address.to_string())).collect();
    let reserved: Vec<&str> =
        scenario.tenants.iter().filter(|tenant| tenant.reserved).map(|tenant| tenant.name.as_str()).collect();
    let cases = scenario.methods.iter().flat_map(|method| scenario.loads.iter().map(move |load| (*method, *load)));
    let mut in_force: Option<Method> = None;
    trial::each(
        host,
        cases,
        |(method, load)| format!("{method} ({})", load.description()),
        |host, (method, load)| {
            if in_force != Some(*method) {
                in_force = None;
                host.apply(method.name())?;
                if !reserved.is_empty() {
                    wait_for_reservations(host, &reserved)?;
                }
                in_force = Some(*method);
            }
            let several = SeveralServers {
                case: method.name(),
                label: "as the scenario describes",
                servers: &servers,
                load: *load,
                bulk: &bulk,
                requests: scenario.requests.requests.into(),
                warmup: scenario.requests.warm_up.into(),
                seed: scenario.requests.seed,
            };
            several.run(host)
        },
    )
}

/// Waits until the daemon has admitted the reservations of these VMs.
fn wait_for_reservations(host: &mut Host, vms: &[&str]) -> Result<(), MeasureError> {
    let failed = |said: String| MeasureError::Program { program: "a reservation".to_owned(), said };
    for _ in 0..LOOKS {
        let said = host.ask("ontime top --once --json --interval 0.1")?;
        let look: Look = serde_json::from_str(&said).map_err(|error| failed(format!("{error}: {said}")))?;
        if look.reservations.hold(vms).map_err(failed)? {
            return Ok(());
        }
    }
    Err(failed(format!("the daemon has not admitted all of {}", vms.join(", "))))
}

/// What `ontime top --json` prints.
#[derive(Debug, Deserialize)]
struct Look {
    reservations: Reservations,
}

/// The reservations (docs/reference/openapi.json).
#[derive(Debug, Deserialize)]
struct Reservations {
    /// Why none is kept.
    off: Option<String>,
    vcpus: Vec<Vcpu>,
    refused: Vec<Refused>,
}

#[derive(Debug, Deserialize)]
struct Vcpu {
    vm: String,
}

#[derive(Debug, Deserialize)]
struct Refused {
    subject: String,
    message: String,
}

impl Reservations {
    /// Whether those of all these VMs are admitted already.
    ///
    /// # Errors
    /// The daemon's reason why one is not.
    fn hold(&self, vms: &[&str]) -> Result<bool, String> {
        if let Some(off) = &self.off {
            return Err(off.clone());
        }
        if let Some(Refused { subject, message }) = self.refused.first() {
            return Err(format!("{subject}: {message}"));
        }
        Ok(vms.iter().all(|name| self.vcpus.iter().any(|vcpu| vcpu.vm == *name)))
    }
}

/// Starts a tenant and waits for its program.
fn start(host: &mut Host, tenant: &Tenant) -> Result<(), MeasureError> {
    let (name, address) = (tenant.name.as_str(), tenant.address.to_string());
    let (net, _) = tenant.nic.network();
    match tenant.kind {
        Kind::Vm => boot_vm(host.lab()?, &Vm { name, role: tenant.program.role(), net, address: &address }),
        Kind::Container => {
            progress(format_args!("starting the container {name}"));
            server::contain(host, (name, &address), Net::Macvlan, server::SOCKPERF.command)
        }
    }
}

/// The limit as goals, one for each case that it is about.
fn goals(limit: &Limit, scenario: &Scenario, results: &[MethodResult]) -> Vec<Goal> {
    let methods = scenario.methods.iter().filter(|method| limit.method.is_none_or(|of| of == **method));
    let loads = |method| scenario.loads.iter().map(move |load| (method, *load));
    let cases = methods.flat_map(|method| loads(method.name()));
    cases.filter(|(_, load)| limit.load.is_none_or(|of| of == *load)).map(|case| goal(limit, case, results)).collect()
}

fn goal(limit: &Limit, (method, load): (&str, Load), results: &[MethodResult]) -> Goal {
    let (name, figure) = limit.figure;
    let result = results.iter().find(|result| result.method == method && result.load == load);
    let actual = result.and_then(|result| figure.of(result)).map(|(value, _)| value);
    let side = if limit.bound == Bound::AtMost { "at most" } else { "at least" };
    let unit = match figure {
        Figure::Lost | Figure::Cpu => "",
        Figure::Bulk => " Gbit/s",
        _ => " us",
    };
    let case = format!("{method} ({})", load.description());
    let figures = match (result, actual) {
        (_, Some(actual)) => format!("{case} {}{unit}", number::significant(actual)),
        (Some(_), None) => format!("{case} has no figure '{name}'"),
        (None, None) => format!("{case} was not measured"),
    };
    Goal {
        id: format!("{name}-{method}-{}", load.name()),
        text: format!("{case}: {name} {side} {}{unit}", limit.target),
        bound: limit.bound,
        target: limit.target,
        actual,
        met: actual.map(|actual| match limit.bound {
            Bound::AtLeast => actual >= limit.target,
            Bound::AtMost => actual <= limit.target,
        }),
        figures,
        kernel_series: result.map_or_else(String::new, |result| result.kernel_series().to_owned()),
        binding: true,
    }
}

/// A host, its tenants and their load, from a file.
#[derive(Debug)]
pub(crate) struct FromFile;

impl Experiment for FromFile {
    command!(
        "scenario",
        "A host, its tenants and their load as a file describes them: response times, bulk throughput, and limits",
        Options,
        execute
    );

    fn columns(&self) -> &'static [Figure] {
        &[Figure::Count, Figure::Lost, Figure::P50, Figure::P99, Figure::Max, Figure::Sd, Figure::Bulk, Figure::Cpu]
    }

    fn meaning(&self) -> &'static str {
        "Response times of all servers together, then of each. Goals are the limits of the scenario's file."
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::{self, Run};
    use crate::wire::{Exchange, WireAnalysis};

    #[test]
    fn a_limit_is_judged_for_each_case_that_it_names() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/examples/lab/rt-beside-bulk.toml");
        let scenario = read(Path::new(file)).unwrap();
        let wire = WireAnalysis {
            exchanges: (0..100).map(|at| Exchange { at_ns: at, latency_ns: 90_000, sequence: at }).collect(),
            ..WireAnalysis::default()
        };
        let result = |method| {
            MethodResult::new(&Run {
                load: Load::Tcp,
                wire: &wire,
                ..Run::of(method, "", "7.2.12-rt", schema::Clock::Virtual)
            })
        };
        let limit = |target, method| Limit {
            method,
            load: Some(Load::Tcp),
            figure: ("p99", Figure::P99),
            bound: Bound::AtMost,
            target,
        };
        let [first, second] = scenario.methods[..] else { panic!("{:?}", scenario.methods) };
        let results = [result(second.name())];
        let judged = |limit: &Limit| goals(limit, &scenario, &results).iter().map(|goal| goal.met).collect::<Vec<_>>();
        assert_eq!(judged(&limit(90.0, None)), [None, Some(true)]);
        assert_eq!(judged(&limit(89.9, Some(second))), [Some(false)]);
        assert_eq!(judged(&limit(90.0, Some(first))), [None]);
        let goal = &goals(&limit(90.0, Some(second)), &scenario, &results)[0];
        assert_eq!(goal.text, format!("{second} (TCP flood): p99 at most 90 us"));
        let missing = &goals(&limit(90.0, Some(first)), &scenario, &results)[0];
        assert!(missing.figures.contains("was not measured"), "{}", missing.figures);
        let bulk = Limit { figure: ("bulk", Figure::Bulk), ..limit(1.0, Some(second)) };
        assert!(goals(&bulk, &scenario, &results)[0].figures.contains("has no figure 'bulk'"));
    }

    #[test]
    fn a_reservation_that_does_not_hold_is_told_and_one_that_is_not_decided_is_awaited() {
        let look = |off: &str, vcpus: &str, refused: &str| {
            let text = format!(
                r#"{{"seconds":0.1,"reservations":{{"backend":"paced","off":{off},"cpus":[0,1],"reserve":0.05,
                "vcpus":[{vcpus}],"refused":[{refused}],"absent":["b"]}},"used":[]}}"#
            );
            serde_json::from_str::<Look>(&text).unwrap().reservations
        };
        let [a, b] = ["a", "b"].map(|vm| format!(r#"{{"vm":"{vm}","vcpu":0,"tid":7,"bandwidth":0.3}}"#));
        let both = format!("{a},{b}");
        assert_eq!(look("null", "", "").hold(&["a"]), Ok(false));
        assert_eq!(look("null", &a, "").hold(&["a", "b"]), Ok(false));
        assert_eq!(look("null", &both, "").hold(&["a", "b"]), Ok(true));
        let refused = r#"{"subject":"b","message":"0.9 of a CPU is not free"}"#;
        assert_eq!(look("null", &a, refused).hold(&["a"]), Err("b: 0.9 of a CPU is not free".to_owned()));
        assert_eq!(look("\"no timer\"", &both, "").hold(&["a"]), Err("no timer".to_owned()));
    }

    #[test]
    fn a_wrong_file_is_an_error_of_configuration() {
        let error = read(Path::new("/nowhere/a.toml")).unwrap_err();
        assert_eq!(ontime_cli::status(&error, |_| None), CONFIG);
    }
}
