//! `ontime doctor`: what on this host makes RT packets late, what it costs, and what to do. Changes nothing.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use ontime_hostnet::doctor::{self, Check, Diagnosis, Refused, State};
use ontime_hostnet::inventory::Note;
use ontime_hostnet::{Intent, Inventory, LiveHost, Originals, as_found, kvm};
use ontime_sched::BackendKind;
use ontime_tenants::{Policy, ProblemKind, Sources, Tenant, ThreadId, discover};

use crate::daemon::config::Config;
use crate::exit::{self, Exit};
use crate::paths::Paths;
use crate::table::visible;
use crate::{api, client};

/// `ontime doctor`
#[derive(Debug, clap::Args)]
pub struct Args {
    /// As JSON.
    #[arg(long)]
    json: bool,
}

/// Examines the host. Exit status 0 ok, 1 warning, 2 critical, 3 unknown.
///
/// # Errors
/// Where the configuration is wrong.
pub fn run(args: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    // 2 would say that a check is critical.
    let config = Config::load(&paths.config_dir)
        .map_err(|error| Exit { status: exit::UNSUPPORTED, message: exit::chain(&error.into()) })?;
    let status = client::get::<api::Status>(&paths.socket(), "/v1/status").ok();
    let caps = status.as_ref().is_some_and(|status| status.caps.in_force);
    let reserved = status.as_ref().and_then(|_| client::get(&paths.socket(), "/v1/reservations").ok());
    let method = status.as_ref().and_then(|status| status.method.parse().ok());
    let polling = status.as_ref().map(|status| status.polling.clone()).unwrap_or_default();
    let tried = |knob: &api::KnobState| matches!(knob.state.as_str(), "failed" | "unsupported");
    let knobs = status.into_iter().flat_map(|status| status.knobs).filter(tried);
    let refused: Refused = knobs.map(|knob| (knob.knob, knob.why.unwrap_or_default())).collect();
    let roots = paths.roots();
    // The probe may take its two seconds; the rest is read meanwhile.
    let device = roots.dev.join("kvm");
    let probe = std::thread::spawn(move || kvm::probe(&device));
    let mut inventory = Inventory::scan(&roots);
    let originals = paths.originals().unwrap_or_else(|error| {
        inventory.notes.push(Note { about: "original values".to_owned(), why: error.to_string() });
        Originals::default()
    });
    let found = discover(&Sources::host(), &config.rules);
    let unread =
        found.problems.iter().filter(|one| matches!(one.kind, ProblemKind::CgroupV1(_) | ProblemKind::NotRead(_)));
    inventory.notes.extend(unread.map(|one| Note { about: one.subject.clone(), why: one.message() }));
    let mut intent = Intent::new(&config.host, config.rules.table(), found.tenants, caps);
    intent.method = method.unwrap_or(intent.method);
    let rests = polling.iter().filter(|nic| !nic.polling);
    intent.resting = rests.filter_map(|nic| Some(inventory.nic(&nic.nic)?.id.ifindex)).collect();
    intent.reserved = reserved.map(|reserved| kept(&reserved, &intent.tenants)).unwrap_or_default();
    let (inventory, intent) = as_found(inventory, intent, &originals);
    let probe = probe.join().unwrap_or_else(|_| kvm::KvmProbe::Unknown("the probe ended early".to_owned()));
    let diagnosis =
        doctor::examine(&LiveHost::with_roots(roots), &inventory, &intent, &found.problems, &refused, &probe);
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &diagnosis)?;
        writeln!(out)?;
    } else {
        show(&mut out, &diagnosis)?;
    }
    Ok(ExitCode::from(diagnosis.state.exit_code()))
}

/// The vCPU threads whose place is the daemon's business: whatever they have this moment, by one back end or another.
fn kept(reserved: &api::Reservations, tenants: &[Tenant]) -> BTreeMap<ThreadId, Policy> {
    let by_kernel = reserved.backend == BackendKind::Deadline.name();
    let policy = if by_kernel { Policy::Deadline { runtime: 0, deadline: 0, period: 0 } } else { Policy::BULK };
    let is_kept = |id: &ThreadId| reserved.vcpus.iter().any(|vcpu| vcpu.tid == id.tid);
    let threads = tenants.iter().flat_map(|tenant| &tenant.threads).map(|thread| thread.id);
    threads.filter(is_kept).map(|id| (id, policy)).collect()
}

fn show(out: &mut impl Write, diagnosis: &Diagnosis) -> std::io::Result<()> {
    let colour = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    writeln!(out, "kernel {}\n", visible(&diagnosis.kernel))?;
    for check in &diagnosis.checks {
        show_check(out, check, colour)?;
    }
    for note in &diagnosis.notes {
        writeln!(out, "not read  {}: {}", visible(&note.about), visible(&note.why))?;
    }
    let count = |state| diagnosis.checks.iter().filter(|check| check.state == state).count();
    let (ok, unknown) = (count(State::Ok), count(State::Unknown));
    writeln!(
        out,
        "\n{} critical, {} warnings, {unknown} unknown, {ok} ok",
        count(State::Critical),
        count(State::Warning)
    )
}

fn show_check(out: &mut impl Write, check: &Check, colour: bool) -> std::io::Result<()> {
    let (word, code) = match check.state {
        State::Ok => ("ok", "32"),
        State::Unknown => ("unknown", "36"),
        State::Warning => ("WARNING", "33"),
        State::Critical => ("CRITICAL", "31"),
    };
    let word = if colour { format!("\x1b[{code}m{word:8}\x1b[0m") } else { format!("{word:8}") };
    writeln!(out, "{word}  {:16}  {}", check.id, visible(&check.found))?;
    if check.state == State::Ok {
        return Ok(());
    }
    if !check.cost.is_empty() {
        let source = if check.cost_source.is_empty() { String::new() } else { format!(" [{}]", check.cost_source) };
        writeln!(out, "{:28}cost    {}{source}", "", check.cost)?;
    }
    if !check.remedy.is_empty() {
        let who = if check.ontime_can_apply { " (ontime applies it)" } else { "" };
        writeln!(out, "{:28}remedy  {}{who}", "", check.remedy)?;
    }
    Ok(())
}
