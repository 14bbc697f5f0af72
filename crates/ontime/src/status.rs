//! `ontime status`: shows the planned and the actual value of this host's knobs, and why they differ.

use std::io::Write;
use std::process::ExitCode;

use clap::builder::PossibleValuesParser;
use ontime_hostnet::RULES;
use ontime_tenants::text::counted;

use crate::paths::Paths;
use crate::table::visible;
use crate::unseen::Unseen;
use crate::{api, client, exit, table};

/// `ontime status`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print JSON: the answer of GET /v1/status.
    #[arg(long)]
    json: bool,
    /// Show also the knobs that have their planned value.
    #[arg(long, short)]
    all: bool,
    /// Show only knobs and findings of these rules, and derive the exit status from them.
    #[arg(long, value_name = "RULE", value_delimiter = ',', value_parser = PossibleValuesParser::new(rules()))]
    rule: Vec<String>,
}

fn rules() -> impl Iterator<Item = &'static str> {
    RULES.iter().map(|rule| rule.id.name())
}

/// Shows the daemon's state. Exit status 1 where a knob is not as planned or could not be set, or a reload was refused,
/// 2 where a finding is critical, 3 where the daemon could not see everything.
///
/// # Errors
/// Where no daemon answers.
pub(crate) fn run(args: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    let mut status: api::Status = client::get(&paths.socket(), "/v1/status")?;
    only(&args.rule, &mut status);
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &status)?;
        writeln!(out)?;
    } else {
        show(&mut out, &status, args.all)?;
    }
    Ok(ExitCode::from(Unseen::default().and(&status.unseen).print(verdict(&status))))
}

/// Leaves out the knobs and findings of other rules. Without names, all stay.
fn only(rules: &[String], status: &mut api::Status) {
    if rules.is_empty() {
        return;
    }
    status.knobs.retain(|knob| rules.contains(&knob.rule));
    status.findings.retain(|finding| rules.contains(&finding.rule));
    status.drift = status.knobs.iter().filter(|knob| knob.state == "drifted").count();
}

pub(crate) fn verdict(status: &api::Status) -> u8 {
    let is_wrong = |knob: &api::KnobState| matches!(knob.state.as_str(), "drifted" | "failed" | "would-fail");
    if api::any_critical(&status.findings) {
        exit::CRITICAL
    } else if status.knobs.iter().any(is_wrong) || status.refused_configuration.is_some() {
        exit::WARNING
    } else {
        exit::OK
    }
}

pub(crate) fn show(out: &mut impl Write, status: &api::Status, all: bool) -> std::io::Result<()> {
    let state = match status.state {
        api::State::Applied => "applied",
        api::State::Reset => "reset: nothing is applied until `ontime apply`",
        api::State::Observing => "observing: nothing is set",
    };
    writeln!(out, "method     {} (by {}), {state}", status.method, status.method_by)?;
    writeln!(out, "daemon     {}, process {}, kernel {}", status.version, status.pid, visible(&status.kernel))?;
    if let Some(refused) = &status.refused_configuration {
        writeln!(out, "config     REFUSED, the former one is in force: {}", visible(&refused.to_string()))?;
        writeln!(out, "           correct it (`ontime check` tells more), then `ontime reload`")?;
    }
    let ms = status.last_pass_seconds * 1e3;
    writeln!(out, "passes     {}, the last took {ms:.1} ms", status.passes)?;
    show_caps(out, &status.caps)?;
    if status.requested > 0 {
        let those = counted(status.requested, "reservation");
        writeln!(out, "reserved   {those} requested by programs; `ontime top` shows them")?;
    }
    for nic in &status.polling {
        let state = if nic.polling { "polls" } else { "rests" };
        let total = nic.polled_seconds + nic.saved_seconds;
        let saved = if total > 0.0 { 100.0 * nic.saved_seconds / total } else { 0.0 };
        writeln!(
            out,
            "polling    {} {state}: polled {:.1} s, saved {:.1} s of CPU ({saved:.0} %), reached its bound {}",
            visible(&nic.nic),
            nic.polled_seconds,
            nic.saved_seconds,
            counted(nic.bounded, "time")
        )?;
    }
    let ok = status.knobs.iter().filter(|knob| knob.state == "ok").count();
    let total = status.knobs.len();
    if status.state == api::State::Observing {
        let count = |state: &str| status.knobs.iter().filter(|knob| knob.state == state).count();
        let cannot = count("unsupported") + count("would-fail");
        let cannot = if cannot > 0 { format!(", {cannot} cannot be set") } else { String::new() };
        let would = count("would-change");
        writeln!(out, "knobs      {ok} of {total} as wanted{cannot}, {would} would be set in mode enforce:")?;
        writeln!(out, "           mode = \"enforce\" in daemon.toml, then `ontime reload`")?;
    } else {
        writeln!(out, "knobs      {ok} of {total} as wanted, {} drifted", status.drift)?;
    }
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
    let threads = counted(caps.threads.len(), "thread");
    let why = caps.why.as_ref().map_or_else(String::new, |why| format!(": {}", visible(why)));
    writeln!(out, "caps       {state}, {threads}, kernel protections {protections}{why}")?;
    for thread in caps.threads.iter().filter(|thread| thread.pauses > 0) {
        let of = visible(&thread.of);
        writeln!(
            out,
            "           {of} thread {}: paused by its cap {}, for {:.3} s in all",
            thread.tid,
            counted(thread.pauses, "time"),
            thread.paused_seconds
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status() -> api::Status {
        api::Status {
            schema_version: api::SCHEMA_VERSION,
            version: "1".to_owned(),
            pid: 1,
            kernel: "7.2".to_owned(),
            state: api::State::Applied,
            method: "partitioned".to_owned(),
            method_by: "default".to_owned(),
            passes: 1,
            last_pass_seconds: 0.01,
            caps: api::Caps { in_force: true, why: None, protections_off: true, threads: vec![] },
            polling: vec![],
            knobs: vec![],
            drift: 0,
            findings: vec![],
            problems: vec![],
            unseen: vec![],
            refused_configuration: None,
            requested: 0,
        }
    }

    fn shown(status: &api::Status) -> String {
        let mut out = Vec::new();
        show(&mut out, status, false).unwrap();
        String::from_utf8(out).unwrap()
    }

    fn finding(severity: &str) -> api::Finding {
        let text = || "x".to_owned();
        api::Finding { rule: text(), severity: severity.to_owned(), object: text(), found: text(), remedy: text() }
    }

    fn knob(state: &str) -> api::KnobState {
        let text = || "x".to_owned();
        api::KnobState { rule: text(), knob: text(), wanted: text(), actual: None, state: state.to_owned(), why: None }
    }

    #[test]
    fn the_exit_status_is_that_of_the_worst() {
        assert_eq!(verdict(&status()), exit::OK);
        for (severity, wanted) in [("info", exit::OK), ("warning", exit::OK), ("critical", exit::CRITICAL)] {
            let status = api::Status { findings: vec![finding("info"), finding(severity)], ..status() };
            assert_eq!(verdict(&status), wanted, "{severity}");
        }
        for (state, wanted) in [
            ("drifted", exit::WARNING),
            ("failed", exit::WARNING),
            ("would-fail", exit::WARNING),
            ("would-change", exit::OK),
            ("unsupported", exit::OK),
        ] {
            let status = api::Status { knobs: vec![knob("ok"), knob(state)], ..status() };
            assert_eq!(verdict(&status), wanted, "{state}");
        }
        let all = api::Status { knobs: vec![knob("failed")], findings: vec![finding("critical")], ..status() };
        assert_eq!(verdict(&all), exit::CRITICAL);
    }

    #[test]
    fn a_rule_leaves_knobs_findings_drift_and_status_of_others_out() {
        let of = |rule: &str, state: &str| api::KnobState { rule: rule.to_owned(), ..knob(state) };
        let knobs = vec![of("vcpu-place", "drifted"), of("vnic-place", "ok"), of("backlog", "failed")];
        let findings = vec![finding("critical"), api::Finding { rule: "vnic-place".to_owned(), ..finding("info") }];
        let mut status = api::Status { knobs, findings, drift: 1, ..status() };
        only(&[], &mut status);
        assert_eq!((status.knobs.len(), status.findings.len(), status.drift), (3, 2, 1));
        only(&["vcpu-place".to_owned(), "vnic-place".to_owned()], &mut status);
        assert_eq!((status.knobs.len(), status.findings.len(), status.drift), (2, 1, 1));
        assert_eq!(verdict(&status), exit::WARNING);
        only(&["vnic-place".to_owned()], &mut status);
        assert_eq!((status.drift, verdict(&status)), (0, exit::OK));
    }

    #[test]
    fn a_refused_configuration_is_named_with_its_line() {
        let refused = api::RefusedConfiguration {
            file: "/etc/ontime/host.toml".to_owned(),
            line: Some(7),
            reason: "no".to_owned(),
        };
        let status = api::Status { refused_configuration: Some(refused), ..status() };
        assert!(shown(&status).contains("REFUSED, the former one is in force: /etc/ontime/host.toml:7: no\n"));
        assert_eq!(verdict(&status), exit::WARNING);
    }

    #[test]
    fn who_observes_says_what_would_be_set_and_how_it_is_set() {
        let knobs = vec![knob("ok"), knob("would-change"), knob("would-change")];
        let text = shown(&api::Status { state: api::State::Observing, knobs, ..status() });
        assert!(text.contains("observing: nothing is set") && text.contains("2 would be set"), "{text}");
        assert!(text.contains("mode = \"enforce\" in daemon.toml"), "{text}");
    }
}
