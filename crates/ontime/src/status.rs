//! `ontime status`: what is wanted of this host, what is, and why they differ.

use std::io::Write;
use std::process::ExitCode;

use crate::paths::Paths;
use crate::table::visible;
use crate::{api, client, exit, table};

/// `ontime status`
#[derive(Debug, clap::Args)]
pub struct Args {
    /// As JSON (as GET /v1/status answers).
    #[arg(long)]
    json: bool,
    /// Also the knobs that are as wanted.
    #[arg(long, short)]
    all: bool,
}

/// Shows the daemon's state. Exit status 1 where something is not as wanted.
///
/// # Errors
/// Where no daemon answers.
pub fn run(args: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    let status: api::Status = client::get(&paths.socket(), "/v1/status")?;
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &status)?;
        writeln!(out)?;
    } else {
        show(&mut out, &status, args.all)?;
    }
    let wrong = status.knobs.iter().any(|knob| matches!(knob.state.as_str(), "drifted" | "failed"));
    Ok(ExitCode::from(if wrong { exit::THRESHOLD } else { exit::OK }))
}

fn show(out: &mut impl Write, status: &api::Status, all: bool) -> std::io::Result<()> {
    let state = match status.state {
        api::State::Applied => "applied",
        api::State::Reset => "reset: nothing is applied until `ontime apply`",
    };
    writeln!(out, "method     {} (by {}), {state}", status.method, status.method_by)?;
    writeln!(out, "daemon     {}, process {}, kernel {}", status.version, status.pid, visible(&status.kernel))?;
    let ms = status.last_pass_seconds * 1e3;
    writeln!(out, "passes     {}, the last took {ms:.1} ms", status.passes)?;
    show_caps(out, &status.caps)?;
    for nic in &status.polling {
        let state = if nic.polling { "polls" } else { "rests" };
        let total = nic.polled_seconds + nic.saved_seconds;
        let saved = if total > 0.0 { 100.0 * nic.saved_seconds / total } else { 0.0 };
        writeln!(
            out,
            "polling    {} {state}: polled {:.1} s, saved {:.1} s of CPU ({saved:.0} %), reached its bound {} times",
            visible(&nic.nic),
            nic.polled_seconds,
            nic.saved_seconds,
            nic.bounded
        )?;
    }
    let ok = status.knobs.iter().filter(|knob| knob.state == "ok").count();
    writeln!(out, "knobs      {ok} of {} as wanted, {} drifted", status.knobs.len(), status.drift)?;
    let shown: Vec<[String; 6]> = status
        .knobs
        .iter()
        .filter(|knob| all || knob.state != "ok")
        .map(|knob| {
            let actual = knob.actual.clone().unwrap_or_else(|| "-".to_owned());
            let why = knob.why.clone().unwrap_or_default();
            [knob.state.clone(), knob.rule.clone(), knob.knob.clone(), knob.wanted.clone(), actual, why]
        })
        .collect();
    if !shown.is_empty() {
        writeln!(out)?;
        table::write(out, ["STATE", "RULE", "KNOB", "WANTED", "ACTUAL", "WHY"], &shown)?;
    }
    for finding in &status.findings {
        let (found, remedy) = (visible(&finding.found), visible(&finding.remedy));
        writeln!(out, "\n{}: {} ({}): {found}\n  {remedy}", finding.severity, visible(&finding.object), finding.rule)?;
    }
    for problem in &status.problems {
        writeln!(out, "\nproblem: {}: {}", visible(&problem.subject), visible(&problem.message))?;
    }
    Ok(())
}

fn show_caps(out: &mut impl Write, caps: &api::Caps) -> std::io::Result<()> {
    let state = if caps.in_force { "in force" } else { "not in force" };
    let protections = if caps.protections_off { "off" } else { "on" };
    let threads = caps.threads.len();
    let why = caps.why.as_ref().map_or_else(String::new, |why| format!(": {}", visible(why)));
    writeln!(out, "caps       {state}, {threads} threads, kernel protections {protections}{why}")?;
    for thread in caps.threads.iter().filter(|thread| thread.pauses > 0) {
        let of = visible(&thread.of);
        writeln!(
            out,
            "           {of} thread {}: over its cap {} times, off its place {:.3} s",
            thread.tid, thread.pauses, thread.paused_seconds
        )?;
    }
    Ok(())
}
