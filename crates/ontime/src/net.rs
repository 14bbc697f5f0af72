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
use crate::table::visible;
use crate::unseen::Unseen;
use crate::{api, exit, table};

/// `ontime net`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: NetCommand,
}

#[derive(Debug, Subcommand)]
enum NetCommand {
    /// Show NICs, their class and tenants, and their settings: planned, actual, and why they differ
    Status(Status),
}

#[derive(Debug, clap::Args)]
struct Status {
    /// Show only these NICs, by any of their names.
    nics: Vec<String>,
    /// Print JSON: the answer of GET /v1/nics.
    #[arg(long)]
    json: bool,
}

/// Shows the packet path. Exit status 1 where a knob differs from the plan, 2 where a finding is critical, 3 where not
/// everything could be seen.
///
/// # Errors
/// Where the configuration is wrong, a NIC is unknown, or standard output is closed.
pub(crate) fn run(args: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    let NetCommand::Status(args) = &args.command;
    let own = |why: &str, missed| look(paths, why, missed).map(|(nics, missed)| (nics, missed, false));
    let (answer, missed, by_daemon) = match client::get::<api::Nics>(&paths.socket(), "/v1/nics") {
        Ok(answer) => (answer, Unseen::default(), true),
        Err(ClientError::NoDaemon { .. }) => own("no daemon runs (systemctl start ontimed)", Unseen::rights())?,
        Err(error @ ClientError::Denied { .. }) => own("the daemon could not be asked", Unseen::rights().also(error))?,
        Err(error) => return Err(error.into()),
    };
    let api::Nics { nics, mut findings, unseen, .. } = answer;
    let missed = missed.and(&unseen);
    // Where no interface could be read, it is not known whether one has the name.
    let nics = if nics.is_empty() && !missed.is_none() { nics } else { chosen(nics, &args.nics)? };
    findings.retain(|_| args.nics.is_empty());
    let states = |nic: &api::Nic| nic.knobs.iter().map(|knob| knob.state.clone()).collect::<Vec<_>>();
    let states: Vec<String> = nics.iter().flat_map(states).collect();
    let critical = api::any_critical(&findings) || nics.iter().any(|nic| api::any_critical(&nic.findings));
    let mut out = std::io::stdout().lock();
    if args.json {
        let answer = api::Nics { schema_version: api::SCHEMA_VERSION, nics, findings, unseen };
        serde_json::to_writer_pretty(&mut out, &answer)?;
        writeln!(out)?;
    } else {
        page(&mut out, &nics, &findings, missed.is_none())?;
    }
    // If a daemon answers and does not apply, that was requested, so it is no warning.
    let not_applied = |state: &str| state == "not-applied" && !by_daemon;
    let is_wrong = |state: &String| matches!(state.as_str(), "drifted" | "failed" | "would-fail") || not_applied(state);
    let status = if states.iter().any(is_wrong) { exit::WARNING } else { exit::OK };
    let status = if critical { exit::CRITICAL } else { status };
    Ok(ExitCode::from(missed.print(status)))
}

/// The NICs that have one of these names, as their own or an alternative one. Without names, all.
fn chosen(mut nics: Vec<api::Nic>, names: &[String]) -> anyhow::Result<Vec<api::Nic>> {
    let is_called = |nic: &api::Nic, name: &String| nic.name == *name || nic.altnames.contains(name);
    if let Some(unknown) = names.iter().find(|name| !nics.iter().any(|nic| is_called(nic, name))) {
        let known = nics.iter().map(|nic| visible(&nic.name)).collect::<Vec<_>>().join(", ");
        let known = if known.is_empty() { "only the loopback" } else { known.as_str() };
        exit::usage!("there is no interface {unknown} in this network namespace; there are: {known}");
    }
    nics.retain(|nic| names.is_empty() || names.iter().any(|name| is_called(nic, name)));
    Ok(nics)
}

/// Reads the host without a daemon. `why`: why no daemon could be asked.
fn look(paths: &Paths, why: &str, missed: Unseen) -> anyhow::Result<(api::Nics, Unseen)> {
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
    let missed = unread.chain(look.inventory.incomplete.clone()).fold(missed, Unseen::also);
    let unseen = view::unseen(&look.found);
    Ok((view::nics(&look.inventory, &look.intent, &look.plan, &state, unseen), missed))
}

/// All NICs, and what belongs to none. `seen_all`: all tenants and NICs could be seen.
fn page(out: &mut impl Write, nics: &[api::Nic], findings: &[api::Finding], seen_all: bool) -> std::io::Result<()> {
    if nics.is_empty() {
        let seen = if seen_all { "is in this network namespace" } else { "is among what could be seen" };
        writeln!(out, "no NIC: no network interface but the loopback {seen}")?;
    }
    for nic in nics {
        show(out, nic, seen_all)?;
    }
    for finding in findings {
        let (object, found, remedy) = (visible(&finding.object), visible(&finding.found), visible(&finding.remedy));
        writeln!(out, "{object}: {} ({}): {found}\n  {remedy}", finding.severity, finding.rule)?;
    }
    Ok(())
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

    fn nic(name: &str, altnames: &[&str]) -> api::Nic {
        api::Nic {
            name: name.to_owned(),
            altnames: altnames.iter().map(ToString::to_string).collect(),
            ifindex: 7,
            kind: "bridge".to_owned(),
            up: true,
            class: "bulk".to_owned(),
            class_by: "derived".to_owned(),
            napis: Vec::new(),
            irqs: Vec::new(),
            tenants: Vec::new(),
            knobs: Vec::new(),
            findings: Vec::new(),
        }
    }

    #[test]
    fn nics_are_chosen_by_any_of_their_names() {
        let all = || {
            vec![
                nic("eno1", &["enp0s25", "enx0c42a1d81e07"]),
                nic("wan", &["enP2p1s0f0np0", "uplink-of-the-press-line-in-hall-4"]),
                nic("br-lan.7", &[]),
            ]
        };
        let with = |names: &[&str]| -> Result<Vec<String>, String> {
            let names: Vec<String> = names.iter().map(ToString::to_string).collect();
            let chosen = chosen(all(), &names).map_err(|error| error.to_string())?;
            Ok(chosen.into_iter().map(|nic| nic.name).collect())
        };
        for (names, wanted) in [
            (&[][..], &["eno1", "wan", "br-lan.7"][..]),
            (&["enp0s25"], &["eno1"]),
            (&["enx0c42a1d81e07", "eno1"], &["eno1"]),
            (&["uplink-of-the-press-line-in-hall-4", "br-lan.7"], &["wan", "br-lan.7"]),
            (&["enP2p1s0f0np0"], &["wan"]),
        ] {
            assert_eq!(with(names).unwrap(), wanted, "{names:?}");
        }
        for unknown in ["uplink", "enp2p1s0f0np0", ""] {
            let said = with(&["wan", unknown]).unwrap_err();
            assert!(said.contains("there are: eno1, wan, br-lan.7"), "{said}");
        }
        let said = chosen(Vec::new(), &["eth0".to_owned()]).unwrap_err().to_string();
        assert!(said.ends_with("there is no interface eth0 in this network namespace; there are: only the loopback"));
    }

    #[test]
    fn a_host_without_nics_is_told_and_what_belongs_to_none_is_shown() {
        let text = |findings: &[api::Finding], seen_all| {
            let mut out = Vec::new();
            page(&mut out, &[], findings, seen_all).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(text(&[], true), "no NIC: no network interface but the loopback is in this network namespace\n");
        assert_eq!(text(&[], false), "no NIC: no network interface but the loopback is among what could be seen\n");
        let of = |text: &str| text.to_owned();
        let (rule, severity, object) = (of("host-config"), of("warning"), of("lan7"));
        let named = api::Finding { rule, severity, object, found: of("is not here"), remedy: of("correct it") };
        let said = text(&[named], true);
        assert!(said.ends_with("namespace\nlan7: warning (host-config): is not here\n  correct it\n"), "{said}");
    }

    #[test]
    fn the_reason_of_a_class_claims_only_what_was_seen() {
        let line = |class_by: &str, tenants: &[&str], seen_all| {
            let nic = api::Nic {
                class_by: class_by.to_owned(),
                tenants: tenants.iter().map(ToString::to_string).collect(),
                ..nic("x0", &[])
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
