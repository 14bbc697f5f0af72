//! The instructions of a method's requests, as a document and a table.
//!
//! In: [`Request`]s. Out: a [`Document`] (`--json`; docs/results/bench/path.schema.json is generated from it), the
//! table for the terminal, and the median request's steps (`--sequence`). For every method, stages and functions must
//! add up to the whole; otherwise nothing is written.

use std::collections::BTreeMap;

use ontime_figures::number;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::line::Level;
use super::stages::{Phase, Request, Stage};

/// The version of the document; any change of a field raises it.
pub(crate) const PATH_VERSION: u32 = 3;
/// Number of functions per method in the table.
const SHOWN: usize = 20;

/// The experiment's results.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Document {
    /// [`PATH_VERSION`].
    pub path_version: u32,
    /// The host kernel's release.
    pub kernel: String,
    /// Number of the host's CPUs.
    pub cpus: u8,
    /// The command that makes this again.
    pub command: String,
    /// When it was made, RFC 3339.
    pub created: String,
    /// One a method.
    pub methods: Vec<Method>,
    /// What a reader must know besides.
    pub notes: Vec<String>,
}

/// Requests under one method.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Method {
    /// Its name on the command line.
    pub method: String,
    /// In words.
    pub label: String,
    /// Instructions of every request that was traced whole, in the order of time.
    pub requests: Vec<u64>,
    /// Those of the median request (the lower of two).
    pub median: u64,
    /// Those of the slowest.
    pub slowest: u64,
    /// Median of the response times at the wire, us; `null` where nothing was answered.
    pub wire_p50_us: Option<f64>,
    /// The longest of them, us.
    pub wire_max_us: Option<f64>,
    /// Of both, in order; each column sums to the whole.
    pub stages: Vec<StageRow>,
    /// Of both, the largest first; each column sums to the whole.
    pub functions: Vec<FunctionRow>,
    /// What a reader must know.
    pub notes: Vec<String>,
}

/// Instructions of a stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct StageRow {
    /// Part of the way.
    pub phase: Phase,
    /// Number of the host's CPU.
    pub cpu: usize,
    /// Whose thread.
    pub thread: String,
    /// Kernel or program, host or guest.
    pub level: Level,
    /// In the median request.
    pub median: u64,
    /// In the slowest.
    pub slowest: u64,
}

/// Instructions of a function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct FunctionRow {
    /// Kernel or program, host or guest.
    pub level: Level,
    /// Its name, with its module or program; a program's file where it has no symbols.
    pub function: String,
    /// In the median request.
    pub median: u64,
    /// In the slowest.
    pub slowest: u64,
}

/// Why a document cannot be written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReportError {
    /// No request was traced whole.
    #[error("no request was traced whole: {0}; ask for more --requests")]
    Nothing(String),
    /// The stages or functions do not add up to the whole.
    #[error("{method}: {what} sum to {sum} of {whole} instructions: nothing is written; this is a defect of Ontime")]
    NotWhole {
        /// The method.
        method: String,
        /// The kind of parts.
        what: &'static str,
        /// Their sum.
        sum: u64,
        /// The expected sum.
        whole: u64,
    },
}

impl Method {
    /// Builds the result from these requests, in order of time. `missed` counts the others by reason.
    pub(crate) fn new(
        (method, label): (&str, &str),
        requests: &[Request],
        missed: &BTreeMap<String, u64>,
    ) -> Result<(Self, Request), ReportError> {
        let of = |(why, count): (&String, &u64)| format!("{count} of them not: {why}");
        let missed: Vec<String> = missed.iter().map(of).collect();
        let mut ordered: Vec<&Request> = requests.iter().collect();
        ordered.sort_by_key(|request| request.instructions);
        let middle = ordered.get(ordered.len().saturating_sub(1) / 2);
        let (Some(median), Some(slowest)) = (middle, ordered.last()) else {
            return Err(ReportError::Nothing(missed.join("; ")));
        };
        let made = Self {
            method: method.to_owned(),
            label: label.to_owned(),
            requests: requests.iter().map(|request| request.instructions).collect(),
            median: median.instructions,
            slowest: slowest.instructions,
            wire_p50_us: None,
            wire_max_us: None,
            stages: stages(median, slowest),
            functions: functions(median, slowest),
            notes: missed,
        };
        Ok((made, (*median).clone()))
    }

    /// Checks that stages and functions add up to the whole.
    pub(crate) fn check(&self) -> Result<(), ReportError> {
        let stages = |of: fn(&StageRow) -> u64| self.stages.iter().map(of).sum::<u64>();
        let functions = |of: fn(&FunctionRow) -> u64| self.functions.iter().map(of).sum::<u64>();
        for (what, sum, whole) in [
            ("the median request's stages", stages(|row| row.median), self.median),
            ("the slowest request's stages", stages(|row| row.slowest), self.slowest),
            ("the median request's functions", functions(|row| row.median), self.median),
            ("the slowest request's functions", functions(|row| row.slowest), self.slowest),
        ] {
            if sum != whole {
                return Err(ReportError::NotWhole { method: self.method.clone(), what, sum, whole });
            }
        }
        Ok(())
    }

    /// Number of instructions that this share of the requests does not exceed, by nearest rank.
    fn percentile(&self, share: f64) -> u64 {
        let mut ordered = self.requests.clone();
        ordered.sort_unstable();
        let rank = (share * ordered.len() as f64).ceil() as usize;
        ordered.get(rank.saturating_sub(1)).copied().unwrap_or_default()
    }
}

/// The median's stages. A stage that only the slowest request has comes after the stage that it follows there.
fn stages(median: &Request, slowest: &Request) -> Vec<StageRow> {
    let mut order: Vec<_> = median.stages.iter().map(|(stage, _)| stage).collect();
    let mut at = 0;
    for (stage, _) in &slowest.stages {
        match order.iter().position(|known| *known == stage) {
            Some(known) => at = known + 1,
            None => {
                order.insert(at, stage);
                at += 1;
            }
        }
    }
    order.sort_by_key(|stage| stage.phase);
    let of = |request: &Request, stage: &Stage| {
        request.stages.iter().find(|(known, _)| known == stage).map_or(0, |(_, sum)| *sum)
    };
    let row = |stage: &Stage| StageRow {
        phase: stage.phase,
        cpu: stage.cpu,
        thread: stage.thread.description().to_owned(),
        level: stage.level,
        median: of(median, stage),
        slowest: of(slowest, stage),
    };
    order.into_iter().map(row).collect()
}

fn functions(median: &Request, slowest: &Request) -> Vec<FunctionRow> {
    let mut both: BTreeMap<&(Level, String), [u64; 2]> = BTreeMap::new();
    for (function, count) in &median.functions {
        both.entry(function).or_default()[0] = *count;
    }
    for (function, count) in &slowest.functions {
        both.entry(function).or_default()[1] = *count;
    }
    let row = |((level, function), [median, slowest]): (&(Level, String), [u64; 2])| FunctionRow {
        level: *level,
        function: function.clone(),
        median,
        slowest,
    };
    let mut rows: Vec<FunctionRow> = both.into_iter().map(row).collect();
    rows.sort_by_key(|row| std::cmp::Reverse((row.median, row.slowest)));
    rows
}

/// The document for the terminal.
pub(crate) fn table(document: &Document) -> String {
    let mut text = document.methods.iter().map(method_table).collect::<Vec<_>>().join("\n");
    for note in &document.notes {
        text.push_str(&format!("note: {note}\n"));
    }
    text
}

fn method_table(of: &Method) -> String {
    let mut text = format!("{}: {}\n", of.method, of.label);
    text.push_str(&format!(
        "{} requests; instructions: median {}, p99 {}, slowest {}",
        of.requests.len(),
        number::count(of.median),
        number::count(of.percentile(0.99)),
        number::count(of.slowest)
    ));
    if let (Some(median), Some(longest)) = (of.wire_p50_us, of.wire_max_us) {
        text.push_str(&format!("; at the wire: p50 {}, max {} us", number::us(median), number::us(longest)));
    }
    text.push_str(&format!(
        "\n\n{:<13} {:<4} {:<20} {:<13} {:>9} {:>9}\n",
        "phase", "CPU", "thread", "level", "median", "slowest"
    ));
    for row in &of.stages {
        let (phase, cpu, level) = (row.phase.description(), row.cpu.to_string(), row.level.description());
        text.push_str(&line([phase, &cpu, &row.thread, level], row.median, row.slowest));
    }
    text.push_str(&line(["in all", "", "", ""], of.median, of.slowest));
    text.push_str(&format!(
        "\n{:>9} {:>9}  functions of the median request, of {}\n",
        "median",
        "slowest",
        of.functions.len()
    ));
    of.functions.iter().take(SHOWN).for_each(|row| text.push_str(&function_line(row)));
    let mut more: Vec<&FunctionRow> = of.functions.iter().filter(|row| row.slowest > row.median).collect();
    more.sort_by_key(|row| std::cmp::Reverse(row.slowest - row.median));
    text.push_str(&format!("\n{:>9} {:>9}  where the slowest has most beyond the median\n", "median", "slowest"));
    more.into_iter().take(SHOWN).for_each(|row| text.push_str(&function_line(row)));
    of.notes.iter().for_each(|note| text.push_str(&format!("note: {note}\n")));
    text
}

fn line([phase, cpu, thread, level]: [&str; 4], median: u64, slowest: u64) -> String {
    let [median, slowest] = [median, slowest].map(number::count);
    format!("{phase:<13} {cpu:<4} {thread:<20} {level:<13} {median:>9} {slowest:>9}\n")
}

fn function_line(row: &FunctionRow) -> String {
    let [median, slowest] = [row.median, row.slowest].map(number::count);
    format!("{median:>9} {slowest:>9}  {:<12}  {}\n", row.level.description(), row.function)
}

/// A request's functions in order: instructions before it, its own, phase, CPU, thread, level and name, separated by
/// tabs.
pub(crate) fn sequence(method: &str, request: &Request) -> String {
    let mut text = format!("# {method}: the median request, {} instructions\n", request.instructions);
    text.push_str("# start\tcount\tphase\tCPU\tthread\tlevel\tfunction\n");
    let mut start = 0;
    for step in &request.steps {
        let stage = &step.stage;
        let (phase, thread, level) = (stage.phase.description(), stage.thread.description(), stage.level.description());
        let (cpu, count) = (stage.cpu, step.count);
        text.push_str(&format!("{start}\t{count}\t{phase}\t{cpu}\t{thread}\t{level}\t{}\n", step.function));
        start += step.count;
    }
    text
}
