//! `ontime apply`: asks the daemon to apply, with another method if one is given.

use std::io::Write;
use std::process::ExitCode;

use crate::paths::Paths;
use crate::table::visible;
use crate::{api, client, exit, table};

/// `ontime apply`
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Switch to this method until the daemon ends (docs/hostnet.md has all): vanilla, partitioned, busypoll, ...
    #[arg(long, value_name = "METHOD")]
    method: Option<String>,
    /// Say what would change, and change nothing.
    #[arg(long)]
    dry_run: bool,
    /// As JSON (as POST /v1/apply answers).
    #[arg(long)]
    json: bool,
}

/// Asks the daemon. Exit status 1 where a knob could not be set.
///
/// # Errors
/// Where no daemon answers or it refuses.
pub fn run(args: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    let request = api::ApplyRequest { method: args.method.clone(), dry_run: args.dry_run };
    let report: api::Report = client::post(&paths.socket(), "/v1/apply", &request)?;
    show(&report, args.json, &["failed"])
}

/// Shows a report; the exit status says whether a knob came out in one of these ways.
///
/// # Errors
/// Where standard output is closed.
pub fn show(report: &api::Report, json: bool, wrong: &[&str]) -> anyhow::Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut out, report)?;
        writeln!(out)?;
    } else {
        let rows: Vec<[String; 6]> = report
            .changes
            .iter()
            .map(|change| {
                let rule = change.rule.clone().unwrap_or_default();
                let from = change.from.clone().unwrap_or_else(|| "-".to_owned());
                let why = change.why.clone().unwrap_or_default();
                [change.outcome.clone(), rule, change.knob.clone(), from, change.to.clone(), why]
            })
            .collect();
        if !rows.is_empty() {
            table::write(&mut out, ["OUTCOME", "RULE", "KNOB", "FROM", "TO", "WHY"], &rows)?;
        }
        for finding in &report.findings {
            writeln!(
                out,
                "{}: {}: {}; {}",
                finding.severity,
                visible(&finding.object),
                visible(&finding.found),
                visible(&finding.remedy)
            )?;
        }
        writeln!(out, "{} changes, {} knobs as wanted", report.changes.len(), report.unchanged)?;
    }
    let is_wrong = report.changes.iter().any(|change| wrong.contains(&change.outcome.as_str()));
    Ok(ExitCode::from(if is_wrong { exit::THRESHOLD } else { exit::OK }))
}
