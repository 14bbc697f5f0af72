//! `ontime reset`: restores every knob's original value, through the daemon if one runs, else from the journal that it
//! left.

use std::process::ExitCode;

use ontime_cli::print_stderr;
use ontime_hostnet::{Journal, LiveHost};
use ontime_tenants::text::counted;

use crate::client::{self, ClientError};
use crate::daemon::demoted::Demoted;
use crate::daemon::{protections, view};
use crate::paths::Paths;
use crate::{api, apply, exit};

/// `ontime reset`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Restore only the kernel's protections against threads at real-time priority (for systemd's ExecStopPost=).
    #[arg(long)]
    protections: bool,
    /// Print JSON: the answer of POST /v1/reset.
    #[arg(long)]
    json: bool,
}

/// Outcomes of knobs that were not restored: their originals stay in the journal.
const KEPT: [&str; 2] = ["failed", "unsupported"];

/// Resets. Exit status 1 where a knob could not be restored; its original value stays in the journal.
///
/// # Errors
/// Where the daemon refuses, or the journal cannot be read.
pub(crate) fn run(args: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    if args.protections {
        return protections_only(paths);
    }
    match client::post::<api::Report>(&paths.socket(), "/v1/reset", &()) {
        Ok(report) => return show(&report, args.json),
        Err(ClientError::NoDaemon { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    let host = LiveHost::with_roots(paths.roots());
    let mut journal = paths.journal_to_reset()?;
    let report = ontime_hostnet::reset(&host, &mut journal)?;
    // The kernel's protections are on again, so threads beyond a quota may get their policies back.
    let demoted = Demoted::open(paths.demoted()).give_back();
    if demoted > 0 {
        print_stderr(format_args!(
            "ontime: threads beyond a tenant's quota that have their real-time policy again: {demoted}"
        ));
    }
    let shown = show(&view::report(&report, "reset", false), args.json)?;
    Ok(if print_foreign(&journal) { ExitCode::from(exit::WARNING) } else { shown })
}

/// Prints the original values that only another version of Ontime can restore. Returns whether there are any.
fn print_foreign(journal: &Journal) -> bool {
    for line in journal.foreign() {
        print_stderr(format_args!("ontime: not restored: another version of Ontime stored {}", line.escape_default()));
    }
    let any = !journal.foreign().is_empty();
    if any {
        let path = journal.path().display();
        print_stderr(format_args!("ontime: {path} still has these; run `ontime reset` of that version, or reboot"));
    }
    any
}

fn show(report: &api::Report, json: bool) -> anyhow::Result<ExitCode> {
    let status = apply::show(report, json, &KEPT)?;
    if let Some(said) = nothing_to_restore(report).filter(|_| !json) {
        ontime_cli::print(format_args!("{said}\n"))?;
    }
    Ok(ExitCode::from(status))
}

/// A note about what a reset had nothing to do for. Such a reset is a success.
fn nothing_to_restore(report: &api::Report) -> Option<String> {
    if report.changes.is_empty() && report.unchanged == 0 {
        return Some("Nothing to restore: no original value is stored, so Ontime has changed nothing.".to_owned());
    }
    let gone = report.changes.iter().filter(|change| change.outcome == "gone").count();
    let (knobs, belong) = (counted(gone, "knob"), if gone == 1 { "belongs" } else { "belong" });
    (gone > 0).then(|| {
        format!("{knobs} {belong} to a thread, VM or interface that no longer exists: nothing to restore there.")
    })
}

/// Restores the protections only. The journal still has all entries, so a later reset finds the protections restored.
fn protections_only(paths: &Paths) -> anyhow::Result<ExitCode> {
    let host = LiveHost::with_roots(paths.roots());
    let journal = paths.journal_to_reset()?;
    let mut status = if print_foreign(&journal) { exit::WARNING } else { exit::OK };
    for (knob, done) in protections::restore(&host, &journal) {
        match done {
            Ok(()) => print_stderr(format_args!("{knob}: restored")),
            Err(error) => {
                print_stderr(format_args!("ontime: {knob}: {}", protections::still_off(&error)));
                status = exit::WARNING;
            }
        }
    }
    Ok(ExitCode::from(status))
}
