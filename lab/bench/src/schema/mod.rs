//! The JSON schema of every experiment's report.
//!
//! In: a measured [`Run`]. Out: a [`Report`] as JSON, and back. `docs/results/bench.schema.json` is generated from
//! these types, and a test compares the two. Any change of a field raises [`SCHEMA_VERSION`]. Names contain the units:
//! us are microseconds on the result's own clock, Gbit are 10^9 bit. [`Report`] is in this file; `condition` has clock
//! and load, `result` [`MethodResult`], `metric` an experiment's own figures, and `run` the input.

mod condition;
mod metric;
mod result;
mod run;

use schemars::{JsonSchema, Schema, schema_for};
use serde::{Deserialize, Serialize};

pub use self::condition::{Clock, Load, kernel_series};
pub use self::metric::{JOBS, LATE, LATE_OVER, MISSED, Metric, REFUSED, Unit, Value};
pub(crate) use self::result::{CLIENTS_INSIDE, LINK};
pub use self::result::{Distribution, HistogramBin, MethodResult};
pub use self::run::Run;

/// The version that this code writes and reads.
pub const SCHEMA_VERSION: u32 = 13;

/// Why a report could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum SchemaError {
    /// The text is not JSON, or does not have the fields of this version.
    #[error(
        "the report is not version {SCHEMA_VERSION} of the benchmark schema: {0}; see docs/results/bench.schema.json"
    )]
    Invalid(#[from] serde_json::Error),
    /// The report contains a figure that JSON cannot represent.
    #[error(
        "a figure of the report is NaN or infinite, or its version is not {SCHEMA_VERSION}: it is not written; this is \
         a defect of Ontime"
    )]
    NotANumber,
    /// The report has no version.
    #[error("the report has no whole number `schema_version`, so it is not from `ontime-lab bench --json`")]
    NoVersion,
    /// Another version of Ontime wrote the report.
    #[error("the report has schema version {found}, this Ontime reads {SCHEMA_VERSION}; {}", remedy(*found))]
    Version {
        /// The report's version.
        found: u64,
    },
}

fn remedy(found: u64) -> &'static str {
    if found > u64::from(SCHEMA_VERSION) {
        "read it with the newer Ontime that wrote it"
    } else {
        "run the experiment again, or read it with the older Ontime that wrote it"
    }
}

/// A report: one experiment, its methods, and the paper's figures beside them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// The experiment's name on the command line (`rt-server`).
    pub experiment: String,
    /// The clock that the experiment was asked to run on; a result's own clock is what counts for it.
    pub clock: Clock,
    /// The host kernel release that the experiment is about; a result's own kernel is what counts for it.
    pub kernel: String,
    /// Seed of everything random in the load.
    pub seed: u64,
    /// The command that makes this report again.
    pub command: String,
    /// When it was made, RFC 3339.
    pub created: String,
    /// The machine it was made on, in words.
    pub machine: String,
    /// One a method and condition.
    pub results: Vec<MethodResult>,
    /// The paper's figures, where its text states them.
    pub paper: Vec<PaperRow>,
    /// What was to be reached, and whether it was.
    pub goals: Vec<Goal>,
    /// What a reader must know besides: limits, incidents, unfavourable figures.
    pub notes: Vec<String>,
}

/// A line of a paper's table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PaperRow {
    /// The method's name here.
    pub method: String,
    /// Where it stands.
    pub source: String,
    /// The paper's machine and load, in words.
    pub conditions: String,
    /// Mean, us.
    pub mean_us: f64,
    /// 99th percentile, us.
    pub p99_us: f64,
    /// Standard deviation, us.
    pub sd_us: f64,
    /// Bulk throughput, Gbit/s.
    pub bulk_gbps: f64,
}

/// Which side of the target is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Bound {
    /// The target or more.
    AtLeast,
    /// The target or less.
    AtMost,
}

/// A goal and what became of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Goal {
    /// A short name.
    pub id: String,
    /// The goal in words.
    pub text: String,
    /// Which side is good.
    pub bound: Bound,
    /// The figure to reach.
    pub target: f64,
    /// The figure reached; `null` where what it compares was not measured.
    pub actual: Option<f64>,
    /// Whether it was met; `null` where it was not measured.
    pub met: Option<bool>,
    /// The figures it was computed from, or what is missing.
    pub figures: String,
    /// The kernel series (`7.2`) it was computed for.
    pub kernel_series: String,
    /// Whether the project promises it for this series; otherwise it is for information.
    pub binding: bool,
}

impl Report {
    /// The report as JSON. It is parsed again before it is returned, so that it can be read later.
    ///
    /// # Errors
    /// [`SchemaError::NotANumber`] if a figure is NaN or infinite.
    pub fn to_json(&self) -> Result<String, SchemaError> {
        let mut json = serde_json::to_string_pretty(self)?;
        // JSON has no NaN and no infinity: they would be read back as "not measured".
        if Self::from_json(&json).ok().as_ref() != Some(self) {
            return Err(SchemaError::NotANumber);
        }
        json.push('\n');
        Ok(json)
    }

    /// Parses a report of this version.
    ///
    /// # Errors
    /// See [`SchemaError`].
    pub fn from_json(json: &str) -> Result<Self, SchemaError> {
        let value: serde_json::Value = serde_json::from_str(json)?;
        let version = value.get("schema_version").and_then(serde_json::Value::as_u64).ok_or(SchemaError::NoVersion)?;
        if version != u64::from(SCHEMA_VERSION) {
            return Err(SchemaError::Version { found: version });
        }
        Ok(serde_json::from_str(json)?)
    }
}

/// The JSON Schema (draft 2020-12) of [`Report`].
pub fn json_schema() -> Schema {
    schema_for!(Report)
}
