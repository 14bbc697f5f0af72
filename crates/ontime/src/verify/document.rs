//! The result of `ontime verify`: measurements, their judgement by each set of limits, and the host's settings; as
//! JSON, text and a page.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};

use maud::{Markup, html};
use ontime_figures::{number, page};
use ontime_trace::text::wrapped;
use serde::Serialize;

use super::causes::Found;
use super::late::{ByCure, LISTED, Late, Lates};
use super::limits::{self, Set, Test};
use super::outputs::{OfCpu, Slow};
use crate::table::visible;
use crate::{api, exit, table};

/// The latest events of a measurement that the text has.
const SHOWN: usize = 5;
/// How many of the slowest requests `ontime trace` keeps.
pub(super) const KEPT_REQUESTS: usize = 300;
const NO_CAUSE: &str = "no cause among threads, softirqs and interrupts";

/// Whether limits are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    /// Every measurement is within its limit.
    Pass,
    /// A measurement that a limit is for is missing or has losses, and none is beyond its limit.
    Unknown,
    /// A measurement is beyond its limit.
    Fail,
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Unknown => "unknown",
            Self::Fail => "FAIL",
        }
    }

    /// The exit status.
    pub(super) fn status(self) -> u8 {
        match self {
            Self::Pass => exit::OK,
            Self::Unknown => exit::UNKNOWN,
            Self::Fail => exit::WARNING,
        }
    }
}

/// What became of a measurement.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub(super) enum Outcome {
    /// It was made.
    Measured {
        /// The longest delay, us.
        max_us: f64,
        /// The figures, by CPU.
        cpus: Vec<OfCpu>,
        /// The figures, by tenant.
        tenants: Vec<OfTenant>,
        /// Events that the trace of requests lost, at least. The figures have no request that they belong to.
        lost_events: u64,
    },
    /// It was not made, or its result could not be read.
    Missing {
        /// Why, and what to do.
        why: String,
    },
    /// It does not concern this host, so that no limit needs it.
    NotApplicable { why: String },
}

/// The requests to a tenant, us.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct OfTenant {
    pub tenant: String,
    /// Requests.
    pub samples: u64,
    pub min_us: f64,
    /// Arithmetic mean.
    pub avg_us: f64,
    pub max_us: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Measurement {
    /// What was measured.
    pub test: Test,
    /// `host` or `guest`.
    pub place: &'static str,
    pub command: String,
    /// What became of it.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// A limit, and what was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Judged {
    /// What was measured.
    pub test: Test,
    /// `host` or `guest`.
    pub place: &'static str,
    /// The limit, us.
    pub limit_us: f64,
    /// The longest delay, us; none where the measurement is missing.
    pub max_us: Option<f64>,
    /// Whether the limit is kept.
    pub verdict: Verdict,
}

/// The judgement by a set of limits.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Judgement {
    /// The name of the set.
    pub limits: String,
    /// Who states the limits.
    pub source: String,
    /// Whether the verdict of the whole depends on this set.
    pub chosen: bool,
    /// Whether all its limits are kept that were judged.
    pub verdict: Verdict,
    /// By measurement.
    pub by_test: Vec<Judged>,
    /// Limits that no measurement was held against.
    pub not_judged: Vec<NotJudged>,
}

/// A limit that was not judged.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(super) struct NotJudged {
    /// What was not measured.
    pub test: Test,
    /// `host` or `guest`.
    pub place: &'static str,
    /// `left out` by --test, or `not applicable`.
    pub why: &'static str,
}

/// The host while it was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct HostFacts {
    pub name: String,
    /// `uname -r`.
    pub kernel: String,
    /// The kernel's command line.
    pub command_line: String,
    /// Whether the kernel says that it is PREEMPT_RT.
    pub preempt_rt: bool,
    /// CPUs online.
    pub cpus: String,
    /// CPUs that the scheduler leaves alone.
    pub isolated: String,
    /// Versions: `ontime`, `rt-tests`, `rtla`, `rt-tests (guest)`, `rtla (guest)`.
    pub versions: BTreeMap<String, String>,
    /// What the daemon answered to `ontime status` after the measurements.
    pub status: Option<api::Status>,
    /// Why it did not answer.
    pub status_missing: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Document {
    /// Whether every chosen set of limits is kept.
    pub verdict: Verdict,
    /// Start, seconds since 1970.
    pub started_unix_s: u64,
    /// The duration of each measurement, seconds.
    pub duration_s: u64,
    /// The command that ran beside the measurements.
    pub load: Option<String>,
    pub host: HostFacts,
    pub measurements: Vec<Measurement>,
    /// By each set of limits.
    pub judgements: Vec<Judgement>,
    /// Delays beyond the smallest limit of a chosen set, by measurement, the longest first.
    pub late: Vec<Late>,
    /// How many there were, by measurement; `late` has the longest.
    pub late_total: BTreeMap<&'static str, u64>,
    /// The causes of all by cure, by measurement, the greatest total time first.
    pub late_by_cure: Vec<ByCure>,
    /// What the trace added to each delay at least, by measurement, us.
    pub traced_us: BTreeMap<&'static str, f64>,
    /// Missing parts.
    pub notes: Vec<String>,
}

/// What was measured, before it is judged.
pub(super) struct Measured {
    /// Start, seconds since 1970.
    pub started_unix_s: u64,
    /// The duration of each measurement, seconds.
    pub duration_s: u64,
    /// The command that ran beside the measurements.
    pub load: Option<String>,
    pub host: HostFacts,
    pub measurements: Vec<Measurement>,
    /// The slowest requests.
    pub slow: Vec<Slow>,
    /// What the traces beside the programs found.
    pub traced: Vec<(Test, Found)>,
    /// Missing parts.
    pub notes: Vec<String>,
}

/// How many probes a delay contains at least: of a wake-up, those of the timer, the wake-up and the switch; of an
/// interruption, one at each end.
fn probes(test: Test) -> f64 {
    if test == Test::Oslat { 2.0 } else { 3.0 }
}

impl Document {
    /// Judges measurements by all sets of limits. The verdict is that of the chosen ones.
    pub(super) fn new(measured: Measured, sets: &[Set], chosen: &[String]) -> Self {
        let Measured { started_unix_s, duration_s, load, host, measurements, slow, traced, mut notes } = measured;
        let is_chosen = |set: &Set| chosen.contains(&set.name);
        let judgements: Vec<Judgement> = sets.iter().map(|set| judge(set, is_chosen(set), &measurements)).collect();
        let verdict = judgements.iter().filter(|of| of.chosen).map(|of| of.verdict).max();
        let smallest = limits::smallest(sets, chosen);
        let limit = |test: Test| smallest.get(&test).copied();
        let mut lates = Lates::default();
        for (test, found) in &traced {
            let measured = measurements.iter().find(|of| of.test == *test && of.place == "host");
            // Without figures there is no late one.
            if let Some(Outcome::Measured { cpus, .. }) = measured.map(|of| &of.outcome) {
                lates.add_delays(*test, found, limit(*test), cpus);
            }
            let note = |what: String| format!("{}: {what}; causes of its delays may be missing", test.name());
            let lost =
                (found.lost > 0).then(|| format!("the trace lost at least {} events", number::count(found.lost)));
            notes.extend(lost.into_iter().chain(found.failure.clone()).map(note));
            let machine = found.machine.iter().filter(|line| !notes.contains(line)).cloned().collect::<Vec<_>>();
            notes.extend(machine);
        }
        let is_late = |of: &&Measurement| match &of.outcome {
            Outcome::Measured { max_us, .. } => limit(of.test).is_some_and(|limit| *max_us > limit),
            _ => false,
        };
        let late_in_guest = measurements.iter().filter(|of| of.place == "guest").filter(is_late);
        notes.extend(late_in_guest.map(|of| {
            format!("{} (guest): not traced; `ontime verify` in the guest finds the causes there", of.test.name())
        }));
        let limit_of_requests = limit(Test::Request);
        if slow.len() >= KEPT_REQUESTS
            && slow.last().is_some_and(|of| limit_of_requests.is_some_and(|limit| of.total_us > limit))
        {
            notes.push(format!("request: only the {KEPT_REQUESTS} slowest count as late; more were"));
        }
        lates.add_requests(slow, limit_of_requests);
        let cost = |(test, found): &(Test, Found)| (test.name(), probes(*test) * found.probe_ns / 1e3);
        Self {
            verdict: verdict.unwrap_or(Verdict::Unknown),
            started_unix_s,
            duration_s,
            load,
            host,
            late: lates.listed,
            late_total: lates.total,
            late_by_cure: lates.by_cure,
            traced_us: traced.iter().map(cost).collect(),
            notes,
            measurements,
            judgements,
        }
    }
}

fn judge(set: &Set, chosen: bool, measurements: &[Measurement]) -> Judgement {
    let by_test: Vec<Judged> = measurements
        .iter()
        .filter_map(|of| {
            let limit_us = *set.limits.get(&of.test)?;
            let (max_us, verdict) = match &of.outcome {
                Outcome::Measured { max_us, lost_events: 0, .. } if *max_us <= limit_us => {
                    (Some(*max_us), Verdict::Pass)
                }
                Outcome::Measured { max_us, .. } if *max_us <= limit_us => (Some(*max_us), Verdict::Unknown),
                Outcome::Measured { max_us, .. } => (Some(*max_us), Verdict::Fail),
                Outcome::Missing { .. } => (None, Verdict::Unknown),
                Outcome::NotApplicable { .. } => return None,
            };
            Some(Judged { test: of.test, place: of.place, limit_us, max_us, verdict })
        })
        .collect();
    let left_out = set.limits.keys().filter(|test| measurements.iter().all(|of| of.test != **test));
    let left_out = left_out.map(|test| NotJudged { test: *test, place: "host", why: "left out" });
    let applies = |of: &&Measurement| !matches!(of.outcome, Outcome::NotApplicable { .. });
    let others = measurements.iter().filter(|of| set.limits.contains_key(&of.test) && !applies(of));
    let others = others.map(|of| NotJudged { test: of.test, place: of.place, why: "not applicable" });
    let not_judged = left_out.chain(others).collect();
    // A set of which nothing was measured is not kept.
    let verdict = by_test.iter().map(|of| of.verdict).max().unwrap_or(Verdict::Unknown);
    Judgement { limits: set.name.clone(), source: set.source.clone(), chosen, verdict, by_test, not_judged }
}

fn chosen(document: &Document) -> String {
    let names = document.judgements.iter().filter(|of| of.chosen).map(|of| visible(&of.limits));
    names.collect::<Vec<_>>().join(", ")
}

/// Names the limits of the chosen sets that were not judged, for the end of the verdict's line.
fn not_judged(document: &Document) -> String {
    let all = document.judgements.iter().filter(|of| of.chosen).flat_map(|of| &of.not_judged);
    let all: BTreeSet<&NotJudged> = all.collect();
    if all.is_empty() {
        return String::new();
    }
    let words = |of: &NotJudged| format!("{} ({}, {})", of.test.name(), of.place, of.why);
    format!("; not judged: {}", all.into_iter().map(words).collect::<Vec<_>>().join(", "))
}

/// A time as ISO 8601 writes it, UTC.
fn utc(unix_s: u64) -> String {
    let (days, second) = (unix_s / 86_400, unix_s % 86_400);
    let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
    // Years begin in March here, so that the leap day is the last day of a year. 400 years have 146,097 days; 719,468
    // days lie between 1 March of year 0 and 1970.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = 400 * era + year + next;
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// A row of figures: measurement, where, samples, min, avg, max.
fn figures(measurement: &Measurement) -> Vec<[String; 6]> {
    let Outcome::Measured { cpus, tenants, .. } = &measurement.outcome else { return Vec::new() };
    let name = measurement.test.name().to_owned();
    let count = |samples: Option<u64>| samples.map_or_else(|| "-".to_owned(), number::count);
    let of_cpu = |of: &OfCpu| {
        let place = format!("{} CPU {}", measurement.place, of.cpu);
        [name.clone(), place, count(of.samples), number::us(of.min_us), number::us(of.avg_us), number::us(of.max_us)]
    };
    let of_tenant = |of: &OfTenant| {
        let samples = count(Some(of.samples));
        let times = [of.min_us, of.avg_us, of.max_us].map(number::us);
        let [min, avg, max] = times;
        [name.clone(), visible(&of.tenant), samples, min, avg, max]
    };
    cpus.iter().map(of_cpu).chain(tenants.iter().map(of_tenant)).collect()
}

/// Measurements without figures, or with losses, in words.
fn without_figures(document: &Document) -> Vec<String> {
    let line = |of: &Measurement| match &of.outcome {
        Outcome::Measured { lost_events: 0, .. } => None,
        Outcome::Measured { lost_events, .. } => {
            let (name, place, lost) = (of.test.name(), of.place, number::count(*lost_events));
            Some(format!("{name} ({place}): at least {lost} events were lost, perhaps those of slower requests"))
        }
        Outcome::Missing { why } => Some(format!("{} ({}): not measured: {why}", of.test.name(), of.place)),
        Outcome::NotApplicable { why } => Some(format!("{} ({}): not applicable: {why}", of.test.name(), of.place)),
    };
    document.measurements.iter().filter_map(line).map(|line| visible(&line)).collect()
}

/// A row for each limit: the set, the measurement, the limit, the longest delay, the verdict.
fn limits(document: &Document) -> Vec<[String; 5]> {
    let row = |set: &Judgement, of: &Judged| {
        let name = if set.chosen { visible(&set.limits) } else { format!("({})", visible(&set.limits)) };
        let max = of.max_us.map_or_else(|| "-".to_owned(), number::us);
        let measurement = format!("{} ({})", of.test.name(), of.place);
        [name, measurement, number::us(of.limit_us), max, of.verdict.word().to_owned()]
    };
    document.judgements.iter().flat_map(|set| set.by_test.iter().map(move |of| row(set, of))).collect()
}

/// The settings in force, in words.
fn settings(host: &HostFacts) -> Vec<String> {
    let kind = if host.preempt_rt { "PREEMPT_RT" } else { "not PREEMPT_RT" };
    let isolated = if host.isolated.is_empty() { "none" } else { host.isolated.as_str() };
    let mut lines = vec![format!("kernel {} ({kind}), CPUs {}, isolated: {isolated}", host.kernel, host.cpus)];
    lines.extend(host.versions.iter().map(|(name, version)| format!("{name} {version}")));
    match &host.status {
        Some(status) => {
            let state = match status.state {
                api::State::Applied => "applied",
                api::State::Reset => "reset: nothing is applied",
                api::State::Observing => "observing: nothing is set",
            };
            let wrong = status.knobs.iter().filter(|knob| knob.state != "ok").count();
            let caps = if status.caps.in_force { "in force" } else { "not in force" };
            lines.push(format!("method {}, {state}; runtime caps {caps}", status.method));
            lines.push(format!("knobs {}, {wrong} of them not as wanted", status.knobs.len()));
        }
        None => lines.extend(host.status_missing.iter().map(|why| format!("settings of Ontime not known: {why}"))),
    }
    lines.into_iter().map(|line| visible(&line)).collect()
}

/// Prints the result.
///
/// # Errors
/// Those of `out`.
pub(super) fn text(out: &mut impl Write, document: &Document) -> io::Result<()> {
    let beside = document.load.as_ref().map_or_else(|| "without a load".to_owned(), |load| format!("beside `{load}`"));
    let seconds = document.duration_s;
    let verdict = document.verdict.word();
    let (chosen, beside, not_judged) = (chosen(document), visible(&beside), not_judged(document));
    writeln!(out, "{verdict} by {chosen}: {seconds} s each, {beside}{not_judged}\n")?;
    let rows: Vec<[String; 6]> = document.measurements.iter().flat_map(figures).collect();
    if !rows.is_empty() {
        table::write(out, ["MEASUREMENT", "WHERE", "SAMPLES", "MIN US", "AVG US", "MAX US"], &rows)?;
        writeln!(out)?;
    }
    for line in without_figures(document) {
        writeln!(out, "{line}")?;
    }
    table::write(out, ["LIMITS", "MEASUREMENT", "LIMIT US", "MAX US", "VERDICT"], &limits(document))?;
    if !document.late.is_empty() {
        writeln!(out, "\n{}", lates(document).trim_end())?;
    }
    writeln!(out)?;
    let lines = settings(&document.host).into_iter().chain(trace_lines(document));
    lines.into_iter().try_for_each(|line| write!(out, "{}", wrapped(&line)))
}

/// Causes by cure, and the latest events of each measurement.
fn lates(document: &Document) -> String {
    let mut lines = Vec::new();
    for test in Test::ALL {
        let late: Vec<&Late> = document.late.iter().filter(|late| late.test == test).collect();
        if late.is_empty() {
            continue;
        }
        let cures = document.late_by_cure.iter().filter(|of| of.test == test);
        let what = match test {
            Test::Request => "late requests".to_owned(),
            Test::Oslat => "interruptions of oslat".to_owned(),
            _ => format!("late wake-ups of {}", test.name()),
        };
        lines.push(format!("{what}, by cure"));
        for of in cures {
            let rule = of.rule.map_or_else(|| "no rule".to_owned(), |rule| rule.to_string());
            let (times, max) = (number::count(of.times), number::us(of.max_us));
            lines.push(format!("  {times} x, max {max} us, cure [{rule}]: {}", of.cure));
            lines.push(format!("    {}", visible(&of.example)));
        }
        for late in late.iter().take(SHOWN) {
            lines.push(format!("  {}", visible(&late.title())));
            lines.extend(late.causes.iter().map(|cause| format!("    {}", visible(cause))));
            if late.causes.is_empty() {
                lines.push(format!("    {NO_CAUSE}"));
            }
        }
        let more = document.late_total.get(test.name()).map_or(0, |total| total.saturating_sub(SHOWN as u64));
        if more > 0 {
            let which =
                if more as usize > LISTED - SHOWN { format!("the {LISTED} longest") } else { "them".to_owned() };
            lines.push(format!("  and {} more (--json and --html have {which})", number::count(more)));
        }
    }
    lines.iter().map(|line| wrapped(line)).collect()
}

/// How many were late, by measurement.
fn totals(document: &Document) -> String {
    let of = |(test, total): (&&str, &u64)| format!("{test} {}", number::count(*total));
    let all: Vec<String> = document.late_total.iter().map(of).collect();
    format!("Beyond the smallest chosen limit: {}. At most the {LISTED} longest of each measurement:", all.join(", "))
}

/// What the trace beside the programs cost and lacks.
fn trace_lines(document: &Document) -> Vec<String> {
    let cost = |(test, us): (&&str, &f64)| format!("{test} {us:.1} us");
    let costs: Vec<String> = document.traced_us.iter().map(cost).collect();
    let cost =
        format!("in the figures, by the trace beside them, at least: {}; none with --no-trace", costs.join(", "));
    let notes = document.notes.iter().map(|note| visible(note));
    (!costs.is_empty()).then_some(cost).into_iter().chain(notes).collect()
}

fn table_of<const N: usize>(caption: &str, head: [&str; N], rows: &[[String; N]]) -> Markup {
    html! {
        div.scroll tabindex="0" role="region" aria-label=(caption) { table {
            caption { (caption) }
            thead { tr { @for name in head { th.left scope="col" { (name) } } } }
            tbody { @for row in rows { tr { @for cell in row { td.left { (cell) } } } } }
        } }
    }
}

/// The result as one self-contained page.
pub(super) fn html(document: &Document) -> String {
    let title = format!("Ontime verify: {}", document.host.name);
    let class = if document.verdict == Verdict::Pass { "lead verdict good" } else { "lead verdict bad" };
    let rows: Vec<[String; 6]> = document.measurements.iter().flat_map(figures).collect();
    let cures: Vec<[String; 6]> = document.late_by_cure.iter().map(cure).collect();
    let knobs: Vec<[String; 5]> = document.host.status.iter().flat_map(|status| &status.knobs).map(knob).collect();
    page(
        &title,
        "",
        &html! {
            h1 { "Acceptance of " (document.host.name) }
            p.soft { (document.duration_s) " s for each measurement; started at " (utc(document.started_unix_s)) }
            p class=(class) { (document.verdict.word()) " by " (chosen(document)) (not_judged(document)) }
            dl {
                dt { "Load" } dd { @match &document.load { Some(load) => { code { (load) } } None => { "none" } } }
                @for judgement in &document.judgements {
                    dt { (judgement.limits) } dd { (judgement.verdict.word()) " (" (judgement.source) ")" }
                }
            }
            h2 { "Limits" }
            (table_of("The longest delay beside each limit, µs; limits in brackets were not chosen",
                ["limits", "measurement", "limit", "longest", "verdict"], &limits(document)))
            h2 { "Measurements" }
            (table_of("Delays, µs", ["measurement", "where", "samples", "min", "mean", "max"], &rows))
            @for line in without_figures(document) { p { (line) } }
            @for measurement in &document.measurements {
                @if !measurement.command.is_empty() { pre { (measurement.command) } }
            }
            h2 { "Late wake-ups, interruptions and requests" }
            @if document.late.is_empty() { p { "None that was traced and that a chosen limit is for." } }
            @else {
                (table_of("Causes by cure: how many late ones had such a cause, and the longest, µs",
                    ["measurement", "late", "longest", "rule", "cure", "example"], &cures))
                p { (totals(document)) }
            }
            @for late in &document.late {
                h3 { (late.title()) }
                @if late.causes.is_empty() { p { (NO_CAUSE) } }
                @else { ul { @for cause in &late.causes { li { (cause) } } } }
            }
            h2 { "Versions and settings" }
            ul { @for line in settings(&document.host).into_iter().chain(trace_lines(document)) { li { (line) } } }
            pre { (document.host.command_line) }
            @if !knobs.is_empty() {
                (table_of("What Ontime wants of the host, and what is",
                    ["rule", "knob", "wanted", "actual", "state"], &knobs))
            }
        },
    )
}

fn cure(of: &ByCure) -> [String; 6] {
    let rule = of.rule.map_or_else(|| "-".to_owned(), |rule| rule.to_string());
    let (test, times) = (of.test.name().to_owned(), number::count(of.times));
    [test, times, number::us(of.max_us), rule, of.cure.clone(), of.example.clone()]
}

fn knob(knob: &api::KnobState) -> [String; 5] {
    let actual = knob.actual.clone().unwrap_or_else(|| "-".to_owned());
    [knob.rule.clone(), knob.knob.clone(), knob.wanted.clone(), actual, knob.state.clone()]
}

#[cfg(test)]
mod tests {
    use super::super::limits::built_in;
    use super::*;

    fn measured(test: Test, place: &'static str, max_us: f64) -> Measurement {
        let cpus = vec![OfCpu { cpu: 0, samples: Some(60_000), min_us: 1.0, avg_us: 3.5, max_us }];
        let outcome = Outcome::Measured { max_us, cpus, tenants: Vec::new(), lost_events: 0 };
        Measurement { test, place, command: format!("{} --duration=60", test.name()), outcome }
    }

    fn missing(test: Test, outcome: Outcome) -> Measurement {
        Measurement { test, place: "host", command: String::new(), outcome }
    }

    fn all(measurements: Vec<Measurement>) -> Measured {
        let host = HostFacts {
            name: "host<1>".to_owned(),
            kernel: "6.12-rt".to_owned(),
            command_line: "quiet".to_owned(),
            preempt_rt: true,
            cpus: "0-3".to_owned(),
            isolated: String::new(),
            versions: BTreeMap::from([("rt-tests".to_owned(), "2.80".to_owned())]),
            status: None,
            status_missing: Some("no daemon".to_owned()),
        };
        let (started_unix_s, duration_s, load) = (1_795_000_000, 60, Some("stress-ng --cpu 4".to_owned()));
        let (slow, traced, notes) = (Vec::new(), Vec::new(), Vec::new());
        Measured { started_unix_s, duration_s, load, host, measurements, slow, traced, notes }
    }

    fn document(measurements: Vec<Measurement>, slow: Vec<Slow>, chosen: &[&str]) -> Document {
        let measured = Measured { slow, ..all(measurements) };
        let chosen: Vec<String> = chosen.iter().map(ToString::to_string).collect();
        Document::new(measured, &built_in(), &chosen)
    }

    fn verdict_of(document: &Document, limits: &str) -> Verdict {
        document.judgements.iter().find(|of| of.limits == limits).unwrap().verdict
    }

    #[test]
    fn the_verdict_is_the_worst_of_the_chosen_limits() {
        let all = || vec![measured(Test::Cyclictest, "host", 40.0), measured(Test::Timerlat, "host", 41.0)];
        let by = |chosen: &[&str]| document(all(), Vec::new(), chosen).verdict;
        // A delay as long as the limit keeps it.
        assert_eq!(by(&["vmware"]), Verdict::Pass);
        assert_eq!(by(&["rhel"]), Verdict::Fail);
        assert_eq!(by(&["vmware", "rhel"]), Verdict::Fail);
        let of = document(all(), Vec::new(), &["vmware"]);
        assert_eq!((verdict_of(&of, "rhel"), of.judgements.len()), (Verdict::Fail, 3));
        // A guest is judged by the same limits.
        let guest = vec![measured(Test::Cyclictest, "host", 9.0), measured(Test::Cyclictest, "guest", 121.0)];
        assert_eq!(document(guest, Vec::new(), &["vmware"]).verdict, Verdict::Fail);
    }

    #[test]
    fn what_is_missing_is_never_a_pass_and_what_does_not_apply_is_not_judged() {
        let why = || "why".to_owned();
        let oslat = missing(Test::Oslat, Outcome::NotApplicable { why: why() });
        let good = vec![measured(Test::Cyclictest, "host", 12.0), oslat.clone()];
        assert_eq!(document(good, Vec::new(), &["rhel"]).verdict, Verdict::Pass);
        let lost = missing(Test::Timerlat, Outcome::Missing { why: why() });
        let unknown = vec![measured(Test::Cyclictest, "host", 12.0), lost.clone()];
        assert_eq!(document(unknown, Vec::new(), &["rhel"]).verdict, Verdict::Unknown);
        let fails = vec![measured(Test::Cyclictest, "host", 99.0), lost];
        assert_eq!(document(fails, Vec::new(), &["rhel"]).verdict, Verdict::Fail);
        assert_eq!(document(vec![oslat], Vec::new(), &["rhel"]).verdict, Verdict::Unknown);
        assert_eq!(document(Vec::new(), Vec::new(), &["rhel"]).verdict, Verdict::Unknown);
        let with_losses = |max_us| {
            let outcome = Outcome::Measured { max_us, cpus: Vec::new(), tenants: Vec::new(), lost_events: 1_234 };
            document(vec![missing(Test::Request, outcome)], Vec::new(), &["iec61850"])
        };
        assert_eq!([250.0, 251.0].map(|us| with_losses(us).verdict), [Verdict::Unknown, Verdict::Fail]);
        assert!(without_figures(&with_losses(9.0))[0].contains("request (host): at least 1,234 events were lost"));
        let statuses = [Verdict::Pass, Verdict::Fail, Verdict::Unknown].map(Verdict::status);
        assert_eq!(statuses, [exit::OK, exit::WARNING, exit::UNKNOWN]);
    }

    #[test]
    fn a_verdict_names_the_limits_that_were_not_judged() {
        let not_applicable = |place| Measurement {
            place,
            ..missing(Test::Oslat, Outcome::NotApplicable { why: "none isolated".to_owned() })
        };
        let said = |measurements, chosen: &[&str]| {
            let mut out = Vec::new();
            text(&mut out, &document(measurements, Vec::new(), chosen)).unwrap();
            let line = String::from_utf8(out).unwrap().lines().next().unwrap().to_owned();
            line.split_once("`; ").map(|(_, rest)| rest.to_owned())
        };
        let pass = |test| measured(test, "host", 1.0);
        let all =
            || vec![pass(Test::Cyclictest), pass(Test::Timerlat), not_applicable("host"), not_applicable("guest")];
        let oslat = "not judged: oslat (guest, not applicable), oslat (host, not applicable)";
        assert_eq!(said(all(), &["rhel"]).as_deref(), Some(oslat));
        assert_eq!(said(all(), &["vmware"]), None, "it has no limit for oslat");
        let both = "not judged: timerlat (host, left out), request (host, left out)";
        assert_eq!(said(vec![pass(Test::Cyclictest)], &["vmware", "iec61850"]).as_deref(), Some(both));
    }

    #[test]
    fn a_start_is_a_date() {
        for (unix_s, wanted) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_798_761_599, "2026-12-31T23:59:59Z"),
            (1_798_761_600, "2027-01-01T00:00:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(utc(unix_s), wanted);
        }
    }

    #[test]
    fn late_requests_have_their_causes_and_others_are_left_out() {
        let slow = |total_us: f64, words: &[&str], hint: Option<&str>| Slow {
            tenant: "plc".to_owned(),
            total_us,
            words: words.iter().map(ToString::to_string).collect(),
            inversions: Vec::new(),
            hint: hint.map(str::to_owned),
        };
        let all =
            || vec![slow(900.0, &["waited behind x"], Some("2 SMIs")), slow(251.0, &[], None), slow(250.0, &[], None)];
        let outcome = Outcome::Measured { max_us: 900.0, cpus: Vec::new(), tenants: Vec::new(), lost_events: 0 };
        let requests = || vec![missing(Test::Request, outcome.clone())];
        let late = document(requests(), all(), &["iec61850"]);
        let causes: Vec<_> = late.late.iter().map(|late| (late.total_us, late.causes.len())).collect();
        assert_eq!((causes, late.verdict), (vec![(900.0, 2), (251.0, 0)], Verdict::Fail));
        // rhel has no limit for requests.
        assert!(document(requests(), all(), &["rhel"]).late.is_empty());
        let mut out = Vec::new();
        text(&mut out, &late).unwrap();
        let said = String::from_utf8(out).unwrap();
        assert!(said.contains("  a request of plc took 900 us\n    waited behind x\n    2 SMIs\n"), "{said}");
        assert!(said.contains("took 251 us\n    no cause among threads"), "{said}");
    }

    #[test]
    fn missing_parts_and_the_traces_cost_are_told() {
        let mut of = document(vec![measured(Test::Cyclictest, "host", 12.0)], Vec::new(), &["rhel"]);
        assert_eq!(trace_lines(&of), Vec::<String>::new());
        of.traced_us = BTreeMap::from([("cyclictest", 0.84), ("oslat", 0.56)]);
        of.notes = vec!["timerlat: no causes\x1b".to_owned()];
        let cost = "in the figures, by the trace beside them, at least: cyclictest 0.8 us, oslat 0.6 us; none with \
            --no-trace";
        assert_eq!(trace_lines(&of), [cost.to_owned(), visible("timerlat: no causes\x1b")]);
        let measured = |found: Found| {
            let measurements = vec![measured(Test::Cyclictest, "host", 12.0)];
            let mut all = all(measurements);
            all.traced = vec![(Test::Cyclictest, found)];
            Document::new(all, &built_in(), &["rhel".to_owned()])
        };
        let of =
            measured(Found { lost: 1_234, probe_ns: 280.0, failure: Some("no ring".to_owned()), ..Found::default() });
        assert!((of.traced_us["cyclictest"] - 0.84).abs() < 1e-9);
        let lost = "cyclictest: the trace lost at least 1,234 events; causes of its delays may be missing";
        assert_eq!(of.notes, [lost, "cyclictest: no ring; causes of its delays may be missing"]);
    }

    #[test]
    fn the_text_and_the_page_say_the_verdict_the_limits_and_what_is_missing() {
        let lost = missing(Test::Timerlat, Outcome::Missing { why: "rtla ended with status 1".to_owned() });
        let of = document(vec![measured(Test::Cyclictest, "host", 1234.0), lost], Vec::new(), &["rhel"]);
        let mut out = Vec::new();
        text(&mut out, &of).unwrap();
        let said = String::from_utf8(out).unwrap();
        let verdict = "FAIL by rhel: 60 s each, beside `stress-ng --cpu 4`; not judged: oslat (host, left out)\n";
        assert!(said.starts_with(verdict), "{said}");
        let rows = ["cyclictest   host CPU 0  60,000   1.0     3.5     1,234\n", "(vmware)    cyclictest (host)  120"];
        let lines =
            ["timerlat (host): not measured: rtla ended with status 1\n", "settings of Ontime not known: no daemon\n"];
        for wanted in rows.into_iter().chain(lines) {
            assert!(said.contains(wanted), "{wanted}: {said}");
        }
        let page = html(&of);
        assert!(page.contains("host&lt;1&gt;") && !page.contains("host<1>"), "{page}");
        assert!(page.contains("started at 2026-11-18T11:06:40Z"), "{page}");
        assert!(
            page.contains("FAIL by rhel; not judged: oslat (host, left out)<")
                && page.contains("1,234")
                && page.contains("rtla ended"),
            "{page}"
        );
    }

    #[test]
    fn the_json_has_a_version_and_each_state() {
        let lost = missing(Test::Oslat, Outcome::NotApplicable { why: "none isolated".to_owned() });
        let of = document(vec![measured(Test::Cyclictest, "host", 12.0), lost], Vec::new(), &["rhel"]);
        let json = serde_json::to_value(api::Versioned::of(&of)).unwrap();
        assert_eq!((&json["schema_version"], &json["verdict"]), (&api::SCHEMA_VERSION.into(), &"pass".into()));
        assert_eq!(json["measurements"][0]["state"], "measured");
        assert_eq!(json["measurements"][0]["cpus"][0]["max_us"], 12.0);
        assert_eq!(json["measurements"][1]["state"], "not-applicable");
        assert_eq!(json["judgements"][0]["by_test"][0]["limit_us"], 40.0);
    }
}
