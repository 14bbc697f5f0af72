//! `ontime-lab bench path`: where the instructions of a request go.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use ontime_cli::{OK, WARNING, print_stderr, usage};
use ontime_lab::{Clock, Kernel};

use super::{Emulated, Experiment, chosen, command, created, judge, to_write};
use crate::baseline::Tolerance;
use crate::path::{self, Document, Measured, PATH_VERSION, Program};
use crate::report;
use crate::trial::CaseResults;

/// Methods that are traced by default.
const DEFAULTS: [&str; 3] = ["partitioned", "outsourcing", "host-process"];

#[derive(Debug, clap::Args)]
struct Options {
    /// Methods: vanilla (with --kernel 7.2), rt-default, threaded, exclusive (with --cpus 2), partitioned, outsourcing,
    /// outsourcing-interrupt, outsourcing-only, host-process; default: partitioned, outsourcing, host-process
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',')]
    methods: Vec<String>,
    /// The server: sockperf, memcached (over one connection) or kamailio (asked by OPTIONS)
    #[arg(long, value_name = "SERVER", default_value = "sockperf")]
    server: Program,
    #[command(flatten)]
    emulated: Emulated,
    /// Requests traced under each method
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    requests: u64,
    /// Seed of the gaps between requests
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write the results (docs/results/bench/path.schema.json)
    #[arg(long, value_parser = to_write)]
    json: Option<PathBuf>,
    /// Write the functions of each method's median request, in order
    #[arg(long, value_parser = to_write)]
    sequence: Option<PathBuf>,
    /// Compare the instructions of the median request and of the 40th percentile with results that `--json` wrote;
    /// status 2 if both have more
    #[arg(long, value_name = "FILE", value_parser = stored)]
    baseline: Option<Document>,
    /// By how many percent they may have more instructions than the baseline's
    #[arg(long, value_name = "PERCENT", default_value = "1", requires = "baseline")]
    tolerance: Tolerance,
    /// Refused: a real processor does not report every instruction
    #[arg(long, value_name = "SITE", hide = true)]
    hardware: Option<PathBuf>,
}

/// Reads the results of an earlier run.
fn stored(path: &str) -> Result<Document, String> {
    let text = fs::read_to_string(path).map_err(|error| error.to_string())?;
    let document: Document = serde_json::from_str(&text).map_err(|error| {
        format!(
            "not version {PATH_VERSION} of what path's --json writes (docs/results/bench/path.schema.json): {error}"
        )
    })?;
    if document.path_version != PATH_VERSION {
        let found = document.path_version;
        return Err(format!(
            "version {found} of path's results; this Ontime reads {PATH_VERSION}: make it anew by --json"
        ));
    }
    Ok(document)
}

/// Traces every method on one emulated host.
fn execute(args: &Options) -> anyhow::Result<ExitCode> {
    let methods = methods(args)?;
    let outsourced = methods.iter().any(|method| method.starts_with("outsourcing"));
    let found = args.emulated.measure(outsourced, |site, images| {
        let plan = path::PathPlan { site, methods, program: args.server, requests: args.requests, seed: args.seed };
        path::measure(&plan, images)
    })?;
    report(args, found)
}

/// The methods to trace. Refuses options that this experiment does not support.
fn methods(args: &Options) -> anyhow::Result<Vec<String>> {
    if args.hardware.is_some() {
        usage!(
            "path has no --hardware: only an emulated CPU tells every instruction; `ontime trace` shows a real host's \
             segments"
        );
    }
    if args.emulated.clock == Clock::Real {
        usage!("path is for the virtual clock, on which tracing takes no time; leave out --clock real");
    }
    let asked = chosen("method", &args.methods, &path::METHODS)?;
    let methods = if args.methods.is_empty() { DEFAULTS.map(str::to_owned).to_vec() } else { asked };
    if methods.iter().any(|method| method == "exclusive") && args.emulated.cpus.is_none_or(|cpus| cpus < 2) {
        usage!("exclusive keeps a CPU of the host for the RT VM, and another for the rest: add --cpus 2");
    }
    let is_plain = args.emulated.kernel == Kernel::Plain72;
    if methods.iter().any(|method| (method == "vanilla") != is_plain) {
        usage!(
            "vanilla is the kernel without PREEMPT_RT, and the others need it: `--kernel 7.2 --method vanilla` alone, \
             or neither"
        );
    }
    Ok(methods)
}

fn report(args: &Options, found: CaseResults<Measured>) -> anyhow::Result<ExitCode> {
    let CaseResults { results: measured, missing } = found;
    let Some(kernel) = measured.first().map(|of| of.kernel.clone()) else {
        bail!("nothing could be traced: {}", missing.join("; "));
    };
    let sequences: String = measured.iter().map(|of| path::sequence(&of.method.method, &of.median)).collect();
    let words: Vec<String> = std::env::args().skip(1).collect();
    let document = Document {
        path_version: PATH_VERSION,
        kernel,
        cpus: args.emulated.machine().cpus,
        command: format!("ontime-lab {}", words.join(" ")),
        created: created()?,
        methods: measured.into_iter().map(|of| of.method).collect(),
        notes: missing.clone(),
    };
    let json = serde_json::to_string_pretty(&document).context("the results as JSON")?;
    let files = [(&args.json, json + "\n"), (&args.sequence, sequences)];
    // The table is printed even if a file cannot be written.
    let written = files.iter().try_for_each(|(path, text)| -> anyhow::Result<()> {
        let Some(path) = path else { return Ok(()) };
        fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
        print_stderr(format_args!("wrote {}", path.display()));
        Ok(())
    });
    ontime_cli::print(report::fitted(&path::table(&document)) + "\n")?;
    written?;
    let status = if missing.is_empty() { OK } else { WARNING };
    match &args.baseline {
        Some(baseline) => judge(&path::compare(&document, baseline, args.tolerance), args.tolerance, status),
        None => Ok(ExitCode::from(status)),
    }
}

/// The instructions of a request.
#[derive(Debug)]
pub(super) struct Path;

impl Experiment for Path {
    command!(
        "path",
        "Where the instructions of a request go: every instruction of host and guest, by stage and by function",
        Options,
        execute
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::options_of;

    fn methods_of(words: &[&str]) -> Result<Vec<String>, String> {
        let options: Options = options_of(words).map_err(|error| error.to_string())?;
        methods(&options).map_err(|error| error.to_string())
    }

    #[test]
    fn what_it_cannot_have_is_refused_with_what_to_do() {
        assert_eq!(methods_of(&[]).unwrap(), DEFAULTS);
        assert_eq!(methods_of(&["--kernel", "7.2", "--method", "vanilla"]).unwrap(), ["vanilla"]);
        for (words, said) in [
            (vec!["--hardware", "site.toml"], "emulated CPU"),
            (vec!["--clock", "real"], "virtual clock"),
            (vec!["--method", "vanilla"], "--kernel 7.2"),
            (vec!["--kernel", "7.2"], "vanilla"),
            (vec!["--method", "exclusive"], "--cpus 2"),
            (vec!["--method", "shared"], "not one of"),
            (vec!["--requests", "0"], "1..=100000"),
            (vec!["--server", "nginx"], "sockperf, memcached or kamailio"),
            (vec!["--baseline", "no-such-file"], "No such file"),
            (vec!["--baseline", "Cargo.toml"], "docs/results/bench/path.schema.json"),
            (vec!["--tolerance", "2"], "--baseline"),
            (vec!["--sequence", "no-such-directory/steps"], "no-such-directory is no directory"),
        ] {
            let error = methods_of(&words).unwrap_err();
            assert!(error.contains(said), "{words:?}: {error}");
        }
    }
}
