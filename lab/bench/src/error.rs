//! Why an experiment could not measure.

use std::path::PathBuf;

use ontime_lab::LabError;
use thiserror::Error;

use crate::client::ClientError;
use crate::hardware::HardwareError;
use crate::pcap::PcapError;

/// Why a measurement failed.
#[derive(Debug, Error)]
pub enum MeasureError {
    /// A failure of the emulated host.
    #[error(transparent)]
    Lab(#[from] LabError),
    /// The host ended during another measurement.
    #[error("the emulated host ended during an earlier measurement, whose message has the cause; run the case again")]
    NoHost,
    /// A failure of the real host.
    #[error(transparent)]
    Hardware(#[from] HardwareError),
    /// A failure of the client.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A failure with a capture.
    #[error(transparent)]
    Capture(#[from] PcapError),
    /// A failure with a file.
    #[error("{path}: {source}; {remedy}", path = path.display(), remedy = ontime_tenants::remedy(source))]
    File {
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The flood does not arrive.
    #[error("the flood does not reach VM {vm}: {said}; see its console log (--out DIR keeps it)")]
    Flood {
        /// The VM that should receive it.
        vm: String,
        /// Details.
        said: String,
    },
    /// A failure of a program that the load needs.
    #[error("{program} failed: {said}")]
    Program {
        /// The program.
        program: String,
        /// Details.
        said: String,
    },
    /// The host's CPU accounting could not be parsed.
    #[error("the host printed {0:?} instead of its CPU times; run it again, with --out DIR to keep its console log")]
    Accounting(String),
    /// The report of the trace in the host is invalid.
    #[error(
        "{path}: no report of ontime trace: {what}; give --ontime a program of this version",
        path = path.display()
    )]
    Trace {
        /// The report's path.
        path: PathBuf,
        /// The error.
        what: String,
    },
    /// A failure of `ontime doctor` in the host.
    #[error("ontime doctor in the emulated host: {0}")]
    Doctor(String),
}
