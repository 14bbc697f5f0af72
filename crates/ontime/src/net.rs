//! `ontime net status`: the packet path NIC by NIC: class and why, tenants, and every knob: wanted, actual, why they differ.

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
    /// Only these NICs.
    nics: Vec<String>,
    /// As JSON (as GET /v1/nics answers).
    #[arg(long)]
    json: bool,
}

/// Shows the path. Exit status 1 where something is not as wanted.
///
/// # Errors
/// Where the configuration is wrong, a NIC is unknown, or standard output is closed.
pub fn run(args: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    let What::Status(args) = &args.what;
    let (mut nics, by_daemon): (Vec<api::Nic>, bool) = match client::get(&paths.socket(), "/v1/nics") {
        Ok(nics) => (nics, true),
        Err(ClientError::NoDaemon { .. }) => (look(paths, "no daemon runs (systemctl start ontimed)")?, false),
        Err(error @ ClientError::Denied { .. }) => (look(paths, &error.to_string())?, false),
        Err(error) => return Err(error.into()),
    };
    if let Some(unknown) = args.nics.iter().find(|name| !nics.iter().any(|nic| nic.name == **name)) {
        anyhow::bail!("there is no interface {unknown}");
    }
    nics.retain(|nic| args.nics.is_empty() || args.nics.contains(&nic.name));
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &nics)?;
        writeln!(out)?;
    } else {
        for nic in &nics {
            show(&mut out, nic)?;
        }
    }
    let states = nics.iter().flat_map(|nic| &nic.knobs).map(|knob| knob.state.as_str());
    // A daemon that does not apply was asked not to.
    let is_wrong = |state| matches!(state, "drifted" | "failed") || (state == "not-applied" && !by_daemon);
    let wrong = states.into_iter().any(is_wrong);
    Ok(ExitCode::from(if wrong { exit::THRESHOLD } else { exit::OK }))
}

/// Looks for ourselves, where no daemon can be asked, and why.
fn look(paths: &Paths, why: &str) -> anyhow::Result<Vec<api::Nic>> {
    let config = Config::load(&paths.config_dir)?;
    let originals = paths.originals().unwrap_or_else(|error| {
        eprintln!("ontime: {error}");
        Originals::default()
    });
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
    Ok(view::nics(&look.inventory, &look.intent, &look.plan, &state))
}

fn show(out: &mut impl Write, nic: &api::Nic) -> std::io::Result<()> {
    let why = match nic.class_by.as_str() {
        "configured" => "by host.toml".to_owned(),
        "mixed" => format!("tenants of both classes use it: {}", visible(&nic.tenants.join(", "))),
        _ if nic.tenants.is_empty() => "no tenant uses it".to_owned(),
        _ => format!("used by {}", visible(&nic.tenants.join(", "))),
    };
    let state = if nic.up { "up" } else { "down" };
    writeln!(out, "{}  {} ({why}), {}, {state}", visible(&nic.name), nic.class, visible(&nic.kind))?;
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
