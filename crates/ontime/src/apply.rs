//! `ontime apply`: asks the daemon to apply, with another method if one is given. With `--dry-run` it also works
//! without a daemon.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;

use ontime_hostnet::{LiveHost, Method, Originals};
use ontime_sched::Settled;
use ontime_tenants::text::counted;

use crate::client::ClientError;
use crate::daemon::config::Config;
use crate::daemon::engine::{to_be, would};
use crate::daemon::keeper::Keeper;
use crate::daemon::view;
use crate::paths::Paths;
use crate::table::visible;
use crate::unseen::Unseen;
use crate::{api, client, exit, table};

/// `ontime apply`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Switch to this method until the daemon ends: vanilla, threaded, exclusive, partitioned, busypoll, vatc or
    /// interrupt-context.
    #[arg(long, value_name = "METHOD")]
    method: Option<String>,
    /// Show what would change, and change nothing; works without a daemon.
    #[arg(long)]
    dry_run: bool,
    /// Print JSON: the answer of POST /v1/apply.
    #[arg(long)]
    json: bool,
}

/// Asks the daemon to apply. Exit status 1 where a knob could not be set, 2 where a finding is critical.
///
/// # Errors
/// Where no daemon answers or it refuses.
pub(crate) fn run(args: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    let request = api::ApplyRequest { method: args.method.clone(), dry_run: args.dry_run };
    let (report, missed) = match client::post::<api::Report>(&paths.socket(), "/v1/apply", &request) {
        Ok(report) => (report, Unseen::default()),
        Err(ClientError::NoDaemon { .. }) if args.dry_run => look(args, paths, Unseen::rights())?,
        Err(error @ ClientError::Denied { .. }) if args.dry_run => look(args, paths, Unseen::rights().also(error))?,
        Err(error) => return Err(error.into()),
    };
    let status = show(&report, args.json, &["failed", "would-fail"])?;
    Ok(ExitCode::from(missed.print(status)))
}

/// What a daemon would change, if no daemon can be asked.
fn look(args: &Args, paths: &Paths, missed: Unseen) -> anyhow::Result<(api::Report, Unseen)> {
    let config = Config::load(&paths.config_dir)?;
    let method = args.method.as_ref().map(|name| name.parse::<Method>()).transpose();
    let method = method.map_err(|error| exit::Exit::usage(error.to_string()))?;
    let (originals, missed) = match paths.originals() {
        Ok(originals) => (originals, missed),
        Err(error) => (Originals::default(), missed.also(error)),
    };
    let keeper = Keeper::new(&config.sched, config.rules.table());
    let seen = to_be(&config, paths, method, &originals, &keeper);
    let missed = seen.inventory.incomplete.iter().fold(missed.and(&view::unseen(&seen.found)), Unseen::also);
    Ok((would(&seen, &LiveHost::with_roots(paths.roots()), &originals, &Settled::default()), missed))
}

/// What was done, in numbers: changes, then what had another outcome, then what was as wanted before.
fn summary(report: &api::Report) -> String {
    let mut others: BTreeMap<&str, usize> = BTreeMap::new();
    let mut made = 0;
    for change in &report.changes {
        match change.outcome.as_str() {
            "changed" | "restored" | "would-change" | "would-restore" => made += 1,
            other => *others.entry(other).or_default() += 1,
        }
    }
    let would = if report.dry_run { "would be " } else { "" };
    let others: String = others.iter().map(|(outcome, count)| format!("{count} {outcome}, ")).collect();
    let (changes, unchanged) = (counted(made, "change"), counted(report.unchanged, "knob"));
    format!("method {}: {changes} {would}made, {others}{unchanged} as wanted", report.method)
}

/// Shows a report. Returns [`exit::WARNING`] where a knob has one of the outcomes `wrong`, [`exit::CRITICAL`] where a
/// finding is critical.
///
/// # Errors
/// Where standard output is closed.
pub(crate) fn show(report: &api::Report, json: bool, wrong: &[&str]) -> anyhow::Result<u8> {
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
        writeln!(out, "{}", summary(report))?;
    }
    let is_wrong = report.changes.iter().any(|change| wrong.contains(&change.outcome.as_str()));
    let status = if is_wrong { exit::WARNING } else { exit::OK };
    Ok(if api::any_critical(&report.findings) { exit::CRITICAL } else { status })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_counts_as_made_what_was_made() {
        let report = |dry_run, outcomes: &[&str]| {
            let change = |outcome: &&str| api::Change {
                rule: None,
                knob: "x".to_owned(),
                from: None,
                to: "1".to_owned(),
                outcome: (*outcome).to_owned(),
                why: None,
            };
            let changes = outcomes.iter().map(change).collect();
            let method = "partitioned".to_owned();
            let schema_version = api::SCHEMA_VERSION;
            summary(&api::Report { schema_version, method, dry_run, changes, unchanged: 2, findings: Vec::new() })
        };
        for (dry_run, outcomes, wanted) in [
            (false, &[][..], "0 changes made, 2 knobs as wanted"),
            (false, &["changed", "restored"], "2 changes made, 2 knobs as wanted"),
            (false, &["unsupported"], "0 changes made, 1 unsupported, 2 knobs as wanted"),
            (false, &["failed", "changed", "gone", "failed"], "1 change made, 2 failed, 1 gone, 2 knobs as wanted"),
            (true, &["would-change", "would-fail"], "1 change would be made, 1 would-fail, 2 knobs as wanted"),
        ] {
            assert_eq!(report(dry_run, outcomes), format!("method partitioned: {wanted}"));
        }
    }
}
