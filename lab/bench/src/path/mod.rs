//! `path`: the exact number of instructions of a request, by function. No paper has it; it is Access'18's IV-D at the
//! finest possible resolution.
//!
//! In: methods on one emulated host (virtual clock), without load, with clients inside. Out: a [`Document`]. The
//! emulator logs every instruction that it executes, of host and guest, while requests are sent. The log takes no
//! virtual time.
//!
//! ```text
//! emulator --a line an instruction--> pipe --> line (CPU, address, level)     (capture: the thread that reads)
//!   --> symbols (function, by what host and guest said of themselves: sources)
//!   --> window (each request's runs of functions) --> stages (phase, CPU, thread, level) --> report (document, table)
//! ```
//!
//! Only [`capture`], [`sources`] and this file do I/O.

mod capture;
mod compare;
mod elf;
pub(crate) mod line;
mod report;
mod sources;
pub(crate) mod stages;
pub(crate) mod symbols;
pub(crate) mod window;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use ontime_lab::images::Images;
use ontime_lab::isolate;
use ontime_lab::role::SYMBOLS;

pub(crate) use compare::compare;
use ontime_figures::stats::Summary;
pub(crate) use report::{Document, Method, PATH_VERSION, ReportError, sequence, table};

use crate::client::ClientConfig;
use crate::client_side::Order;
use crate::error::MeasureError;
use crate::experiments::rt_server::Case;
use crate::host::{Host, PlannedHost, Site, size};
use crate::memcached;
use crate::progress::progress;
use crate::schema::Load;
use crate::server::{self, PlacedServer, ServerPlace};
use crate::trial::{self, CaseResults};
use crate::workload::{self, Client, SOCKPERF, Workload};
use capture::Reader;
use stages::Request;
use symbols::Names;

/// The methods.
pub(crate) const METHODS: [&str; 9] = [
    "vanilla",
    "rt-default",
    "threaded",
    "exclusive",
    "partitioned",
    "outsourcing",
    "outsourcing-interrupt",
    "outsourcing-only",
    "host-process",
];
/// Requests before the first that counts.
const WARM_UP: u64 = 20;
/// How often the host is made to do something so that the emulator closes its log.
const LOG_CLOSES: u32 = 30;

/// Why requests could not be traced.
#[derive(Debug, thiserror::Error)]
pub enum PathError {
    /// An operation on the pipe failed.
    #[error("the pipe for instructions {path}: {source}; is TMPDIR on a file system that has \
        pipes?", path = path.display())]
    Pipe {
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The emulator did not close its log.
    #[error("the emulator did not close its log within {seconds} s; run it again on a machine with less other work")]
    Unclosed {
        /// Real seconds.
        seconds: u64,
    },
    /// The figures are inconsistent.
    #[error(transparent)]
    Report(#[from] ReportError),
}

impl From<PathError> for MeasureError {
    fn from(error: PathError) -> Self {
        MeasureError::Program { program: "the trace of instructions".to_owned(), said: error.to_string() }
    }
}

/// The program whose requests are traced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Program {
    /// `sockperf server`: one datagram in each direction.
    Sockperf,
    /// memcached: GETs and SETs over one TCP connection, as in Access'18, IV-G 2.
    Memcached,
    /// Kamailio, which answers OPTIONS.
    Kamailio,
}

impl Program {
    /// All programs, by name.
    pub(crate) const NAMES: [(&'static str, Self); 3] =
        [("sockperf", Self::Sockperf), ("memcached", Self::Memcached), ("kamailio", Self::Kamailio)];

    fn workload(self) -> Workload {
        match self {
            Self::Sockperf => SOCKPERF,
            Self::Memcached => Workload::Memcached { traffic: memcached::ACCESS, connections: 1 },
            Self::Kamailio => Workload::Voip,
        }
    }

    /// Sends its requests, from a client that is ready.
    fn send(self, client: Client, host: &mut Host, load: &workload::Load<'_>) -> Result<(), MeasureError> {
        let workload = self.workload();
        if self == Self::Kamailio {
            let config = ClientConfig::new(workload.on(host), load.requests, load.seed);
            let mut tell = |line: &str| progress(format_args!("{}: {line}", load.name));
            return Order::SipOptions(config).run(host.lab()?, &mut tell);
        }
        workload.send(client, host, load)
    }

    /// Response times on the wire, us: the median and the longest. None for Kamailio, because the analysis there reads
    /// the messages of calls, not answers to OPTIONS.
    fn times(self, capture: &Path, plan: &PathPlan) -> Result<Option<(f64, f64)>, MeasureError> {
        if self == Self::Kamailio {
            return Ok(None);
        }
        let asked = (plan.requests, plan.seed);
        let (analysis, _) = self.workload().analyse(capture, self.workload().server().port, WARM_UP, asked)?;
        let times: Vec<u64> = analysis.exchanges.iter().map(|exchange| exchange.latency_ns).collect();
        Ok(Summary::of(&times).map(|times| (times.p50 as f64 / 1e3, times.max as f64 / 1e3)))
    }
}

impl FromStr for Program {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = Self::NAMES.into_iter().find(|(name, _)| *name == text);
        named.map(|(_, program)| program).ok_or_else(|| "sockperf, memcached or kamailio".to_owned())
    }
}

/// What to trace on one emulated host.
#[derive(Debug, Clone)]
pub(crate) struct PathPlan {
    pub site: Site,
    /// Methods from [`METHODS`].
    pub methods: Vec<String>,
    pub program: Program,
    /// Traced requests per method.
    pub requests: u64,
    /// Seed of the gaps between requests.
    pub seed: u64,
}

/// The result of a method.
#[derive(Debug)]
pub(crate) struct Measured {
    /// Instructions by stages and functions.
    pub method: Method,
    /// The median request.
    pub median: Request,
    /// The host kernel's release.
    pub kernel: String,
}

/// Boots the host and traces requests under every method. If a method fails, the remaining methods are traced while the
/// host lives.
pub(crate) fn measure(plan: &PathPlan, images: &Images) -> Result<CaseResults<Measured>, MeasureError> {
    let cases: Vec<Case> = plan.methods.iter().map(|name| Case { name: name.clone(), load: Load::None }).collect();
    let ground = PlannedHost::Emulated(&plan.site, images);
    let mut placed =
        PlacedServer::new(plan.program.workload().server(), &ground, cases.iter().any(Case::is_outsourced))?;
    SYMBOLS.bring(&plan.site.dir.join("files"))?;
    let host = ground.start(&[], &server::CONFIG)?;
    let mut told = None;
    trial::each(
        host,
        &cases,
        |case| case.name.clone(),
        |host, case| {
            let place = case.place();
            if placed.place() != Some(place) {
                told = None;
            }
            placed.put(host, place)?;
            if told.is_none() && place != ServerPlace::Process {
                progress("the guest tells what its addresses mean");
                told = Some(sources::guest_symbols(host)?);
            }
            measure_case(host, plan, case, told.as_deref())
        },
    )
}

fn measure_case(host: &mut Host, plan: &PathPlan, case: &Case, guest: Option<&str>) -> Result<Measured, MeasureError> {
    progress(format_args!("{}: applying", case.name));
    host.apply(case.method())?;
    let sources = sources::gather(host, &plan.site.programs.ontime, guest)?;
    let unnamed = case.place() != ServerPlace::Process && sources.guest_kernel.is_empty();
    let cpus = usize::from(plan.site.machine.cpus);
    let reader = Reader::start(&isolate::enter()?.join("instructions"), cpus, Names::new(sources))?;
    let capture = host.capture("rt");
    let from = size(&capture);
    let requests = WARM_UP + plan.requests;
    let load = workload::Load { requests, seed: plan.seed, dir: &host.dir.clone(), name: &case.name };
    let client = plan.program.workload().ready(host, plan.seed)?;
    let begun = host.lab()?.log_instructions(Some(reader.path()));
    let sent = begun.map_err(MeasureError::from).and_then(|()| plan.program.send(client, host, &load));
    let ended = host.lab()?.log_instructions(None);
    sent?;
    ended?;
    // While the clock stands still, the emulator's CPU may be where it keeps the log from being closed.
    for _ in 0..LOG_CLOSES {
        if reader.wait(Duration::from_secs(1)) {
            break;
        }
        host.shell("true")?;
    }
    let (traced, names) = reader.end()?;
    let (mut requests, mut missed) = (Vec::new(), BTreeMap::new());
    for one in traced.into_iter().skip(WARM_UP as usize).take(plan.requests as usize) {
        match one {
            Ok(runs) => requests.push(Request::of(&runs, &names)),
            Err(why) => *missed.entry(why.to_string()).or_default() += 1,
        }
    }
    let (mut method, median) = Method::new((&case.name, case.label()), &requests, &missed).map_err(PathError::from)?;
    method.check().map_err(PathError::from)?;
    let cut = host.dir.join(format!("{}-rt.pcap", case.name));
    host.cut(&capture, from, &cut)?;
    if let Some((p50, max)) = plan.program.times(&cut, plan)? {
        (method.wire_p50_us, method.wire_max_us) = (Some(p50), Some(max));
    }
    if unnamed {
        method.notes.push("the guest did not tell its symbols: its functions are in one".to_owned());
    }
    Ok(Measured { method, median, kernel: host.kernel.clone() })
}

#[cfg(test)]
mod tests;
