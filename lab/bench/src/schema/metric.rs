//! Figures of an experiment besides response times: key, unit, value. Tables, CSV and the page show them.

use ontime_figures::number;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::MethodResult;

/// Key: answers later than this, us, are late ([`LATE`]).
pub const LATE_OVER: &str = "late-over";
/// Key: number of late answers. Missing answers are `lost`.
pub const LATE: &str = "late";
/// Key: jobs that applications did.
pub const JOBS: &str = "jobs";
/// Key: jobs that missed their deadlines.
pub const MISSED: &str = "missed";
/// Key: applications that did no job.
pub const REFUSED: &str = "refused";

/// What a figure is counted in. Times are on the result's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Unit {
    /// Microseconds.
    Us,
    /// Seconds.
    S,
    /// CPUs.
    Cpus,
    /// A number of things.
    Count,
    /// Bytes.
    Bytes,
    /// Nanoseconds a byte.
    NsPerByte,
    /// A second.
    PerS,
    /// A ratio.
    Times,
    /// A share of a whole, 0 to 1.
    Share,
    /// A word.
    Word,
    /// A sentence; terminal tables leave it out.
    Sentence,
}

impl Unit {
    /// The unit as printed after a figure; empty if the figure includes it.
    pub fn description(self) -> &'static str {
        match self {
            Unit::Us => "µs",
            Unit::S => "s",
            Unit::Cpus => "CPUs",
            Unit::Bytes => "bytes",
            Unit::NsPerByte => "ns a byte",
            Unit::PerS => "a second",
            Unit::Count | Unit::Times | Unit::Share | Unit::Word | Unit::Sentence => "",
        }
    }

    /// The end of a column's name in CSV.
    pub fn suffix(self) -> &'static str {
        match self {
            Unit::Us => "_us",
            Unit::S => "_s",
            Unit::Cpus => "_cpus",
            Unit::Bytes => "_bytes",
            Unit::NsPerByte => "_ns_per_byte",
            Unit::PerS => "_per_s",
            Unit::Share => "_share",
            Unit::Count | Unit::Times | Unit::Word | Unit::Sentence => "",
        }
    }

    /// A number in the format of tables.
    pub fn print(self, value: f64) -> String {
        match self {
            Unit::Us => number::us(value),
            Unit::Count | Unit::Bytes => number::count(value as u64),
            Unit::Share => number::percent(value),
            _ => number::significant(value),
        }
    }
}

/// A number, or words.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Value {
    /// In the metric's unit.
    Number(f64),
    /// Of units `word` and `sentence`.
    Text(String),
}

/// A figure of an experiment's own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Metric {
    /// The part of the result that it is of: a segment, an application, an inversion; `null` for the result as a whole.
    pub part: Option<String>,
    /// Its name; the page that `--html` writes says what it is.
    pub key: String,
    /// What it is counted in.
    pub unit: Unit,
    /// The figure.
    pub value: Value,
}

impl Metric {
    /// A number.
    pub fn number(key: &str, unit: Unit, value: f64) -> Self {
        Self { part: None, key: key.to_owned(), unit, value: Value::Number(value) }
    }

    /// A count.
    pub fn count(key: &str, value: u64) -> Self {
        Self::number(key, Unit::Count, value as f64)
    }

    /// A text.
    pub fn text(key: &str, unit: Unit, value: impl Into<String>) -> Self {
        Self { part: None, key: key.to_owned(), unit, value: Value::Text(value.into()) }
    }

    /// The same figure of a part of the result.
    pub fn of(self, part: &str) -> Self {
        Self { part: Some(part.to_owned()), ..self }
    }

    /// The value in the format of tables.
    pub fn print(&self) -> String {
        match &self.value {
            Value::Number(value) => self.unit.print(*value),
            Value::Text(words) => words.clone(),
        }
    }
}

impl MethodResult {
    /// A figure of the result as a whole.
    pub fn metric(&self, key: &str) -> Option<&Metric> {
        self.metrics.iter().find(|metric| metric.part.is_none() && metric.key == key)
    }

    /// The number of a figure of the result as a whole.
    pub fn number(&self, key: &str) -> Option<f64> {
        match self.metric(key)?.value {
            Value::Number(value) => Some(value),
            Value::Text(_) => None,
        }
    }
}
