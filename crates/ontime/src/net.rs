//! `ontime net status`: shows the packet path, NIC by NIC: class and the reason for it, tenants, and for every knob the
//! planned value, the actual value, and why they differ.

use std::io::Write;
use std::process::ExitCode;

use clap::Subcommand;
use ontime_hostnet::{LiveHost, Originals};
use ontime_tenants::Sources;

use crate::client::{self, ClientError};
use crate::daemon::config::Config;
use crate::daemon::engine::{Known, Look};
use crate::daemon::view;
use crate::paths::Paths;
use crate::sight::Missed;
use crate::table::visible;
use crate::{api, exit, table};

/// `ontime net`
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Show NICs, their class and tenants, and what is wanted of each, what is, and why they differ
    Status(Status),
}

#[derive(Debug, clap::Args)]
struct Status {
    /// Only these NICs, by any of their names.
    nics: Vec<String>,
    /// As JSON (as GET /v1/nics answers).
    #[arg(long)]
    json: bool,
}

/// Shows the packet path. Exit status 1 where a knob differs from the plan, 2 where a finding is critical, 3 where not
/// everything could be seen.
///
/// # Errors
/// Where the configuration is wrong, a NIC is unknown, or standard output is closed.
pub fn run(args: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    let What::Status(args) = &args.what;
    let own = |why: &str, missed| look(paths, why, missed).map(|(nics, missed)| (nics, Some(missed)));
    let (answer, missed): (api::Nics, Option<Missed>) = match client::get::<api::Nics>(&paths.socket(), "/v1/nics") {
        Ok(answer) => (answer, None),
        Err(ClientError::NoDaemon { .. }) => own("no daemon runs (systemctl start ontimed)", Missed::rights())?,
        Err(error @ ClientError::Denied { .. }) => own("the daemon could not be asked", Missed::rights().also(error))?,
        Err(error) => return Err(error.into()),
    };
    let api::Nics { mut nics, mut findings, .. } = answer;
    let is_called = |nic: &api::Nic, name: &String| nic.name == *name || nic.altnames.contains(name);
    if let Some(unknown) = args.nics.iter().find(|name| !nics.iter().any(|nic| is_called(nic, name))) {
        let known = nics.iter().map(|nic| visible(&nic.name)).collect::<Vec<_>>().join(", ");
        exit::usage!("there is no interface {unknown} in this network namespace; there are: {known}");
    }
    findings.retain(|_| args.nics.is_empty());
    nics.retain(|nic| args.nics.is_empty() || args.nics.iter().any(|name| is_called(nic, name)));
    let states = |nic: &api::Nic| nic.knobs.iter().map(|knob| knob.state.clone()).collect::<Vec<_>>();
    let states: Vec<String> = nics.iter().flat_map(states).collect();
    let critical = api::any_critical(&findings) || nics.iter().any(|nic| api::any_critical(&nic.findings));
    let mut out = std::io::stdout().lock();
    if args.json {
        let answer = api::Nics { schema_version: api::SCHEMA_VERSION, nics, findings };
        serde_json::to_writer_pretty(&mut out, &answer)?;
        writeln!(out)?;
    } else {
        if nics.is_empty() {
            writeln!(out, "no network interface in this network namespace but the loopback")?;
        }
        let seen_all = missed.as_ref().is_none_or(Missed::is_none);
        for nic in &nics {
            show(&mut out, nic, seen_all)?;
        }
        for finding in &findings {
            let (object, found, remedy) = (visible(&finding.object), visible(&finding.found), visible(&finding.remedy));
            writeln!(out, "{object}: {} ({}): {found}\n  {remedy}", finding.severity, finding.rule)?;
        }
    }
    // If a daemon answers and does not apply, that was requested, so it is no warning.
    let not_applied = |state: &str| state == "not-applied" && missed.is_some();
    let is_wrong = |state: &String| matches!(state.as_str(), "drifted" | "failed") || not_applied(state);
    let status = if states.iter().any(is_wrong) { exit::WARNING } else { exit::OK };
    let status = if critical { exit::CRITICAL } else { status };
    Ok(ExitCode::from(missed.map_or(status, |missed| missed.tell(status))))
}

/// Reads the host without a daemon. `why`: why no daemon could be asked.
fn look(paths: &Paths, why: &str, missed: Missed) -> anyhow::Result<(api::Nics, Missed)> {
    let config = Config::load(&paths.config_dir)?;
    let (originals, missed) = match paths.originals() {
        Ok(originals) => (originals, missed),
        Err(error) => (Originals::default(), missed.also(error)),
    };
    let known = Known { journal: Some(&originals), ..Known::default() };
    let look = Look::at(&Sources::host(), &config, paths, known);
    let host = LiveHost::with_roots(paths.roots());
    let state = |setting: &ontime_hostnet::Setting| {
        let mut known = view::knob_state(&host, setting);
        if known.state == "drifted" {
            "not-applied".clone_into(&mut known.state);
            known.why = Some(why.to_owned());
        }
        known
    };
    let notes = look.inventory.notes.iter().map(|note| format!("{}: {}", note.about, note.why));
    // With root's rights, a fact that cannot be read does not exist on this host.
    let unread = notes.take(if missed.is_none() { 0 } else { usize::MAX });
    let missed = unread.fold(missed.and(&look.found.problems), Missed::also);
    Ok((view::nics(&look.inventory, &look.intent, &look.plan, &state), missed))
}

/// `seen_all`: all tenants could be seen.
fn show(out: &mut impl Write, nic: &api::Nic, seen_all: bool) -> std::io::Result<()> {
    let class = match nic.class_by.as_str() {
        "configured" => format!("{} (by host.toml)", nic.class),
        "mixed" => format!("{} (tenants of both classes use it: {})", nic.class, visible(&nic.tenants.join(", "))),
        "passes-on" if nic.tenants.is_empty() => "no class of its own (packets only pass through it)".to_owned(),
        _ if nic.tenants.is_empty() && !seen_all => format!("{} (no tenant that could be seen uses it)", nic.class),
        _ if nic.tenants.is_empty() => format!("{} (no tenant uses it)", nic.class),
        _ => format!("{} (used by {})", nic.class, visible(&nic.tenants.join(", "))),
    };
    let state = if nic.up { "up" } else { "down" };
    writeln!(out, "{}  {class}, {}, {state}", visible(&nic.name), visible(&nic.kind))?;
    let rows: Vec<[String; 7]> = nic
        .knobs
        .iter()
        .map(|knob| {
            let actual = knob.actual.clone().unwrap_or_else(|| "-".to_owned());
            let why = knob.why.clone().unwrap_or_default();
            let (state, rule, name) = (knob.state.clone(), knob.rule.clone(), knob.knob.clone());
            [" ".to_owned(), state, rule, name, knob.wanted.clone(), actual, why]
        })
        .collect();
    if !rows.is_empty() {
        table::write(out, [" ", "STATE", "RULE", "KNOB", "WANTED", "ACTUAL", "WHY"], &rows)?;
    }
    for finding in &nic.findings {
        let (found, remedy) = (visible(&finding.found), visible(&finding.remedy));
        writeln!(out, "  {} ({}): {found}\n    {remedy}", finding.severity, finding.rule)?;
    }
    writeln!(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_of_a_class_claims_only_what_was_seen() {
        let line = |class_by: &str, tenants: &[&str], seen_all| {
            let nic = api::Nic {
                name: "x0".to_owned(),
                altnames: Vec::new(),
                ifindex: 7,
                kind: "bridge".to_owned(),
                up: true,
                class: "bulk".to_owned(),
                class_by: class_by.to_owned(),
                napis: Vec::new(),
                irqs: Vec::new(),
                tenants: tenants.iter().map(ToString::to_string).collect(),
                knobs: Vec::new(),
                findings: Vec::new(),
            };
            let mut out = Vec::new();
            show(&mut out, &nic, seen_all).unwrap();
            String::from_utf8(out).unwrap()
        };
        for (class_by, tenants, seen_all, wanted) in [
            ("derived", &[][..], true, "bulk (no tenant uses it)"),
            ("derived", &[], false, "bulk (no tenant that could be seen uses it)"),
            ("derived", &["vm"], false, "bulk (used by vm)"),
            ("passes-on", &[], true, "no class of its own (packets only pass through it)"),
            ("passes-on", &["vm"], true, "bulk (used by vm)"),
            ("configured", &[], false, "bulk (by host.toml)"),
        ] {
            assert_eq!(line(class_by, tenants, seen_all), format!("x0  {wanted}, bridge, up\n\n"));
        }
    }
}
