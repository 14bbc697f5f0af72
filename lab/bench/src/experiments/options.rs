//! Shared code of the experiments' command lines: the host that is measured, the output files of a report, and its
//! assembly.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, bail};
use ontime_cli::{CRITICAL, Exit, OK, WARNING, print_stderr, usage};
use ontime_lab::images::Images;
use ontime_lab::{Clients, Clock, Kernel, Link, Machine, isolate};

use super::find;
use crate::baseline::{self, Comparison, Tolerance};
use crate::command::lab;
use crate::command::product::Product;
use crate::error::MeasureError;
use crate::hardware::{self, Target};
use crate::host::{self, AS_IS, PlannedHost, Site};
use crate::paper::Figures;
use crate::schema::{Goal, MethodResult, Report, SCHEMA_VERSION};
use crate::trial::CaseResults;
use crate::{goals, report};

/// The one emulated host of an experiment.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Emulated {
    /// The host's clock: virtual or real
    #[arg(long, default_value = "virtual")]
    pub(crate) clock: Clock,
    /// CPUs of the host, 1 to 8 (default: 1 on the virtual clock, 2 on the real one)
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=8))]
    pub(crate) cpus: Option<u8>,
    /// The host's kernel: 7.2-rt, 7.2 or 6.12-rt
    #[arg(long, default_value = "7.2-rt")]
    pub(crate) kernel: Kernel,
    /// Real seconds without a sign of life after which the host counts as hung, 30 to 86400; raise it on a busy machine
    #[arg(long, default_value_t = 180)]
    pub(crate) silence: u64,
    /// Directory for captures and logs (default: removed at the end)
    #[arg(long)]
    pub(crate) out: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) product: Product,
    /// The link to clients inside, for experiments with this option
    #[arg(skip)]
    pub(crate) link: Option<Link>,
    /// For experiments to which nothing is sent: the captures stay empty
    #[arg(skip)]
    pub(crate) without_clients: bool,
}

impl Emulated {
    /// The same host for an experiment without clients.
    pub(crate) fn without_clients(&self) -> Self {
        Self { without_clients: true, ..self.clone() }
    }

    /// # Errors
    /// The clock is the real one, which an experiment that needs its clients inside cannot have.
    pub(crate) fn refuse_real_clock(&self, experiment: &str) -> anyhow::Result<()> {
        if self.clock == Clock::Real {
            usage!(
                "{experiment} has its clients on a CPU of the emulated host, on the virtual clock; leave out --clock \
                 real"
            );
        }
        Ok(())
    }

    /// Measures on this host, in separate namespaces. `with_module` if guests need the module.
    pub(crate) fn measure<T>(
        &self,
        with_module: bool,
        measure: impl FnOnce(Site, &Images) -> Result<T, MeasureError>,
    ) -> anyhow::Result<T> {
        self.product.find()?;
        // Missing parts are built here, with network access; the namespaces have none.
        let images = lab::images()?;
        if with_module {
            lab::guest_module(&images)?;
        }
        lab::host_module(&images, self.kernel)?;
        self.measure_inside(&images, measure)
    }

    pub(crate) fn machine(&self) -> Machine {
        let mut machine = host::machine(self.clock, self.kernel);
        machine.cpus = self.cpus.unwrap_or(machine.cpus);
        // Without clients the virtual clock jumps while the host is idle. The real one cannot.
        if self.without_clients && self.clock == Clock::Virtual {
            machine.clients = Clients::None;
        }
        machine.link = self.link;
        machine.silence_seconds = self.silence;
        machine
    }

    /// The number of the host's CPUs, for notes.
    pub(crate) fn cpus_in_words(&self) -> String {
        match self.machine().cpus {
            1 => "one CPU".to_owned(),
            cpus => format!("{cpus} CPUs"),
        }
    }

    /// Measures on this host, in separate namespaces, after all parts have been built.
    pub(crate) fn measure_inside<T>(
        &self,
        images: &Images,
        measure: impl FnOnce(Site, &Images) -> Result<T, MeasureError>,
    ) -> anyhow::Result<T> {
        let scratch = isolate::enter()?;
        let machine = self.machine();
        let dir = self.out.clone().unwrap_or(scratch);
        fs::create_dir_all(&dir).with_context(|| format!("directory {}", dir.display()))?;
        remove_former(&dir.join("files"))
            .with_context(|| format!("the files of an earlier run in {}", dir.display()))?;
        let programs = self.product.find()?;
        measure(Site { machine, dir: dir.clone(), programs }, images).map_err(|error| {
            // The error message may name the console log, which must then outlive this process.
            if !matches!(&error, MeasureError::Lab(error) if !error.names_log()) {
                isolate::keep(&dir);
            }
            error.into()
        })
    }
}

/// Removes what an earlier experiment with the same directory brought for its host: configuration, guests' roles and
/// words for their kernels. The next host would have them too.
fn remove_former(files: &Path) -> io::Result<()> {
    if !files.exists() {
        return Ok(());
    }
    for entry in fs::read_dir(files)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name == "etc" {
            fs::remove_dir_all(&path)?;
        } else if name.starts_with("role-") || name.starts_with("append-") {
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}

/// A real host, in place of an emulated one.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Hardware {
    /// Measure a real host with its owner's VMs, which this file describes (docs/results/hardware.md), in place of an
    /// emulated one
    #[arg(long, value_name = "SITE", conflicts_with_all = ["clock", "cpus", "kernel", "silence"])]
    pub(crate) hardware: Option<PathBuf>,
}

impl Hardware {
    /// Measures on the real host, and returns notes for the reader too. `captured` is the number of bytes kept of an RT
    /// frame. `None` if the host is emulated.
    pub(crate) fn measure<T>(
        &self,
        out: Option<&Path>,
        captured: u32,
        measure: impl FnOnce(PlannedHost<'static>) -> Result<T, MeasureError>,
    ) -> anyhow::Result<Option<(T, Vec<String>)>> {
        let Some(path) = &self.hardware else { return Ok(None) };
        let site = hardware::Site::read(path)?;
        let kept = tempfile::tempdir().context("a directory for captures")?;
        let dir = out.unwrap_or(kept.path());
        fs::create_dir_all(dir).with_context(|| format!("directory {}", dir.display()))?;
        let mut target = Target::open(site, dir, captured as usize)?;
        let notes = target.notes()?;
        Ok(Some((measure(PlannedHost::Real(Box::new(target)))?, notes)))
    }

    /// The chosen methods, or `defaults`. Refuses methods of the other kind of host; `all` are the experiment's own.
    pub(crate) fn methods(&self, asked: &[String], defaults: &[&str], all: &[&str]) -> anyhow::Result<Vec<String>> {
        let (as_is, own): (Vec<_>, Vec<_>) = asked.iter().cloned().partition(|method| method == AS_IS);
        if !as_is.is_empty() && self.hardware.is_none() {
            usage!("method '{AS_IS}' is a real host's as it stands: it takes --hardware");
        }
        chosen("method", &own, all)?;
        Ok(if asked.is_empty() { defaults.iter().map(|&name| name.to_owned()).collect() } else { asked.to_vec() })
    }
}

/// An experiment's host, of either kind.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct HostArgs {
    #[command(flatten)]
    pub(crate) emulated: Emulated,
    #[command(flatten)]
    pub(crate) hardware: Hardware,
}

impl HostArgs {
    /// Measures on the host, and returns notes for the reader too if it is real. `captured` is the number of bytes kept
    /// of a real host's RT frame.
    pub(crate) fn measure<T>(
        &self,
        captured: u32,
        mut measure: impl FnMut(PlannedHost<'_>) -> Result<T, MeasureError>,
    ) -> anyhow::Result<(T, Vec<String>)> {
        if let Some(found) = self.hardware.measure(self.emulated.out.as_deref(), captured, &mut measure)? {
            return Ok(found);
        }
        let emulated = |site: Site, images: &Images| measure(PlannedHost::Emulated(&site, images));
        Ok((self.emulated.measure(false, emulated)?, Vec::new()))
    }
}

/// The chosen values, or all.
pub(crate) fn chosen(what: &str, asked: &[String], all: &[&str]) -> anyhow::Result<Vec<String>> {
    if let Some(unknown) = asked.iter().find(|name| !all.contains(&name.as_str())) {
        usage!("{what} '{unknown}' is not one of {}", all.join(", "));
    }
    Ok(if asked.is_empty() { all.iter().map(|&name| name.to_owned()).collect() } else { asked.to_vec() })
}

/// The options that a command line without the program's name gives.
#[cfg(test)]
pub(crate) fn options_of<T: clap::Args>(words: &[&str]) -> Result<T, clap::Error> {
    let command = T::augment_args(clap::Command::new("bench").no_binary_name(true));
    T::from_arg_matches(&command.try_get_matches_from(words)?)
}

/// Where a report goes, besides the terminal.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Output {
    /// Write the results (docs/results/bench.schema.json)
    #[arg(long, value_parser = to_write)]
    pub(crate) json: Option<PathBuf>,
    /// Write the table as CSV
    #[arg(long, value_parser = to_write)]
    pub(crate) csv: Option<PathBuf>,
    /// Write the report page
    #[arg(long, value_parser = to_write)]
    pub(crate) html: Option<PathBuf>,
    /// Write the response times' histogram in the layout of `rtla timerlat hist`
    #[arg(long, value_parser = to_write)]
    pub(crate) rtla: Option<PathBuf>,
    /// Write each result's percentile distribution as METHOD-LOAD-KERNEL.hgrm, HDR histogram's layout, into this
    /// directory; -2 and so on behind it where results of several runs have the same
    #[arg(long, value_name = "DIR")]
    pub(crate) hgrm: Option<PathBuf>,
    /// Compare p99, maximum, histogram and losses with results that `--json` wrote; status 2 if any is worse
    #[arg(long, value_name = "FILE", value_parser = stored)]
    pub(crate) baseline: Option<Report>,
    /// By how many percent figures may be worse than the baseline's, besides what chance explains
    /// (docs/results/bench.md)
    #[arg(long, value_name = "PERCENT", default_value = "5", requires = "baseline")]
    pub(crate) tolerance: Tolerance,
}

/// Parses the path of a file to write. A directory that is not there is told before hours of measurement.
pub(crate) fn to_write(path: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(path);
    match path.parent() {
        Some(directory) if directory != Path::new("") && !directory.is_dir() => {
            Err(format!("{} is no directory; make it first", directory.display()))
        }
        _ => Ok(path),
    }
}

/// Reads the results of an earlier run. The command line's parser calls it, so that a wrong file is told before hours
/// of measurement.
fn stored(path: &str) -> Result<Report, String> {
    let text = fs::read_to_string(path).map_err(|error| error.to_string())?;
    Report::from_json(&text).map_err(|error| error.to_string())
}

/// Refuses a baseline of another experiment, before anything is measured.
pub(crate) fn check_baseline(experiment: &str, arguments: &clap::ArgMatches) -> anyhow::Result<()> {
    match arguments.try_get_one::<Report>("baseline") {
        Ok(Some(baseline)) => baseline_is_of(baseline, experiment),
        // No baseline, or one of `path`, which is no report.
        _ => Ok(()),
    }
}

fn baseline_is_of(baseline: &Report, experiment: &str) -> anyhow::Result<()> {
    let other = &baseline.experiment;
    if other != experiment {
        usage!("the baseline is of {other}, not of {experiment}: give results of this experiment");
    }
    Ok(())
}

/// Shows a comparison. The exit status is [`CRITICAL`] if a figure is worse, otherwise `status`.
pub(crate) fn judge(comparison: &Comparison, tolerance: Tolerance, status: u8) -> anyhow::Result<ExitCode> {
    ontime_cli::print(comparison.description(tolerance))?;
    if comparison.compared == 0 {
        let message = "no result has a counterpart in the baseline: measure the same methods under the same \
                       conditions, or make the baseline anew by --json";
        return Err(Exit::unknown(message).into());
    }
    Ok(ExitCode::from(if comparison.regressions.is_empty() { status } else { CRITICAL }))
}

#[derive(Debug, clap::Args)]
pub(crate) struct Show {
    /// What `--json` wrote; results of several are put together
    #[arg(required = true)]
    pub(crate) results: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// A measured experiment.
#[derive(Debug)]
pub(crate) struct Measured {
    pub(crate) experiment: &'static str,
    pub(crate) seed: u64,
    pub(crate) found: CaseResults,
    /// Further notes for the reader.
    pub(crate) notes: Vec<String>,
}

impl Measured {
    /// Builds the report and shows it. The exit status shows whether a case is missing.
    pub(crate) fn report(self, output: &Output) -> anyhow::Result<ExitCode> {
        self.report_with(Vec::new(), output)
    }

    /// As [`Self::report`], with goals besides those of the experiment.
    pub(crate) fn report_with(self, mut goals: Vec<Goal>, output: &Output) -> anyhow::Result<ExitCode> {
        let Self { experiment, seed, found: CaseResults { results, missing }, mut notes } = self;
        let Some(clock) = results.first().map(|result| result.clock) else {
            bail!("nothing could be measured: {}", missing.join("; "));
        };
        let figures = Figures::load()?;
        let known = find(experiment).with_context(|| format!("no experiment '{experiment}' in this ontime-lab"))?;
        notes.extend(known.remarks(&figures));
        notes.extend(missing.iter().cloned());
        let kernel = kernel_of(&results);
        goals.extend(goals::evaluate(&known.goals(), &results, clock, &kernel));
        let words: Vec<String> = std::env::args().skip(1).collect();
        let report = Report {
            schema_version: SCHEMA_VERSION,
            experiment: experiment.to_owned(),
            clock,
            goals,
            kernel,
            seed,
            command: format!("ontime-lab {}", words.join(" ")),
            created: created()?,
            machine: machine_name(),
            results,
            paper: known.paper(&figures),
            notes,
        };
        for line in &missing {
            print_stderr(format_args!("ontime-lab: {line}"));
        }
        write(&report, output, if missing.is_empty() { OK } else { WARNING })
    }
}

/// The present time, RFC 3339.
pub(crate) fn created() -> anyhow::Result<String> {
    let said = Command::new("date").arg("--iso-8601=seconds").output().context("running date")?.stdout;
    Ok(String::from_utf8_lossy(&said).trim().to_owned())
}

/// The processor of this machine. It matters on the real clock only.
fn machine_name() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")).and_then(|rest| rest.split(':').nth(1));
    let cpus = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    format!("{}, {cpus} CPUs", model.unwrap_or("unknown processor").trim())
}

pub(crate) fn show(args: &Show) -> anyhow::Result<ExitCode> {
    let mut all: Option<Report> = None;
    for path in &args.results {
        let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        let next = Report::from_json(&text).with_context(|| path.display().to_string())?;
        match &mut all {
            None => all = Some(next),
            Some(all) => {
                if all.experiment != next.experiment {
                    usage!("{} is of {}, not of {}", path.display(), next.experiment, all.experiment);
                }
                all.command = format!("{}; {}", all.command, next.command);
                all.results.extend(next.results);
                all.goals.extend(next.goals);
                let notes: Vec<String> = next.notes.into_iter().filter(|note| !all.notes.contains(note)).collect();
                all.notes.extend(notes);
            }
        }
    }
    let Some(mut report) = all else { bail!("no results: name a file that --json wrote") };
    report.kernel = kernel_of(&report.results);
    let specs = super::goals_of(&report.experiment);
    // The goals of a scenario are the limits of its file.
    if !specs.is_empty() {
        report.goals = goals::evaluate(&specs, &report.results, report.clock, &report.kernel);
    }
    if let Some(baseline) = &args.output.baseline {
        baseline_is_of(baseline, &report.experiment)?;
    }
    write(&report, &args.output, OK)
}

/// The kernel of a report: the newest, and with equal versions the one with PREEMPT_RT.
fn kernel_of(results: &[MethodResult]) -> String {
    results.iter().map(|result| result.kernel.as_str()).max().unwrap_or_default().to_owned()
}

/// Writes the report everywhere. `status` is the exit status unless the baseline's figures are better. The table is
/// printed even if a file cannot be written: the measurement may have taken hours.
fn write(report: &Report, output: &Output, status: u8) -> anyhow::Result<ExitCode> {
    let written = write_files(report, output);
    ontime_cli::print(report::terminal(report))?;
    written?;
    match &output.baseline {
        Some(baseline) => judge(&baseline::compare(report, baseline, output.tolerance), output.tolerance, status),
        None => Ok(ExitCode::from(status)),
    }
}

fn write_files(report: &Report, output: &Output) -> anyhow::Result<()> {
    let put = |path: &Path, text: String| {
        fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
        print_stderr(format_args!("wrote {}", path.display()));
        anyhow::Ok(())
    };
    if let Some(path) = &output.json {
        put(path, report.to_json()?)?;
    }
    if let Some(path) = &output.csv {
        put(path, report::csv(report))?;
    }
    if let Some(path) = &output.html {
        put(path, report::html(report))?;
    }
    if let Some(path) = &output.rtla {
        put(path, report::rtla(report))?;
    }
    if let Some(dir) = &output.hgrm {
        fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
        for (name, text) in report::hgrm_files(report) {
            put(&dir.join(name), text)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema;

    fn report(experiment: &str) -> Report {
        Report {
            schema_version: SCHEMA_VERSION,
            experiment: experiment.to_owned(),
            clock: schema::Clock::Virtual,
            kernel: "7.2".into(),
            seed: 1,
            command: String::new(),
            created: String::new(),
            machine: String::new(),
            results: Vec::new(),
            paper: Vec::new(),
            goals: Vec::new(),
            notes: Vec::new(),
        }
    }

    #[test]
    fn a_directory_that_is_not_there_is_told_before_anything_is_measured() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
        for option in ["--json", "--csv", "--html", "--rtla"] {
            let parse = |path: &str| options_of::<Output>(&[option, path]).map_err(|error| error.to_string());
            for good in ["report", &at("report")] {
                parse(good).unwrap();
            }
            let error = parse(&at("none/report")).unwrap_err();
            assert!(error.contains("none is no directory; make it first"), "{error}");
        }
    }

    #[test]
    fn a_wrong_baseline_is_told_before_anything_is_measured() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
        fs::write(at("good"), report("rt-server").to_json().unwrap()).unwrap();
        let older = report("rt-server").to_json().unwrap().replace("\"schema_version\": ", "\"schema_version\": 9");
        fs::write(at("old"), older).unwrap();
        fs::write(at("text"), "no JSON").unwrap();
        let output: Output = options_of(&["--baseline", &at("good")]).unwrap();
        assert_eq!(output.baseline.unwrap().experiment, "rt-server");
        assert_eq!(output.tolerance, "5".parse().unwrap());
        for (words, said) in [
            (vec!["--baseline".to_owned(), at("none")], "No such file"),
            (vec!["--baseline".to_owned(), at("text")], "docs/results/bench.schema.json"),
            (vec!["--baseline".to_owned(), at("old")], "schema version 913"),
            (vec!["--tolerance".to_owned(), "3".to_owned()], "--baseline"),
            (vec!["--baseline".to_owned(), at("good"), "--tolerance=-3".to_owned()], "0 to 1000"),
        ] {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let error = options_of::<Output>(&words).unwrap_err().to_string();
            assert!(error.contains(said), "{words:?}: {error}");
        }
        let matches = <Output as clap::Args>::augment_args(clap::Command::new("bench"))
            .try_get_matches_from(["bench", "--baseline", &at("good")])
            .unwrap();
        assert!(check_baseline("rt-server", &matches).is_ok());
        let error = check_baseline("kbp", &matches).unwrap_err().to_string();
        assert!(error.contains("of rt-server, not of kbp"), "{error}");
        // An experiment without this option.
        let matches = clap::Command::new("path").try_get_matches_from(["path"]).unwrap();
        assert!(check_baseline("path", &matches).is_ok());
    }

    #[test]
    fn a_host_has_nothing_of_an_earlier_one_in_the_same_directory() {
        let dir = tempfile::tempdir().unwrap();
        let files = dir.path().join("files");
        assert!(remove_former(&files).is_ok());
        fs::create_dir_all(files.join("etc")).unwrap();
        for name in ["etc/sched.toml", "role-rt.cpio", "append-rt", "daemon.log", "partitioned.applied"] {
            fs::write(files.join(name), "").unwrap();
        }
        remove_former(&files).unwrap();
        let mut left: Vec<_> = fs::read_dir(&files).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["daemon.log", "partitioned.applied"]);
    }

    #[test]
    fn a_machine_that_cannot_be_is_told_with_what_can() {
        let check = |words: &[&str]| {
            let host: Emulated = options_of(words).map_err(|error| error.to_string())?;
            host.machine().check().map_err(|error| error.to_string())
        };
        for words in [&[][..], &["--cpus", "7"], &["--clock", "real", "--cpus", "8"]] {
            assert_eq!(check(words), Ok(()), "{words:?}");
        }
        let words = |words: &[&str]| options_of::<Emulated>(words).unwrap().cpus_in_words();
        assert_eq!([words(&[]), words(&["--cpus", "4"])], ["one CPU", "4 CPUs"]);
        let [exact, real] = [&[][..], &["--clock", "real"]].map(|words| options_of::<Emulated>(words).unwrap());
        assert_eq!([&exact, &real].map(|host| host.machine().clients), [Clients::Inside, Clients::Outside]);
        let without = [&exact, &real].map(|host| host.without_clients().machine().clients);
        assert_eq!(without, [Clients::None, Clients::Outside]);
        assert!(exact.refuse_real_clock("duel").is_ok());
        assert!(real.refuse_real_clock("duel").unwrap_err().to_string().contains("leave out --clock real"));
        for (words, said) in [
            (&["--cpus", "0"][..], "0 is not in 1..=8"),
            (&["--cpus", "9"], "9 is not in 1..=8"),
            (&["--cpus=-1"], "invalid value '-1' for '--cpus"),
            (&["--cpus", "two"], "two"),
            (&["--cpus", "8"], "--cpus 8: 1 to 7 CPUs, beside that of clients inside"),
            (&["--silence", "29"], "30 to 86400 seconds"),
            (&["--kernel", "5.10"], "7.2-rt, 7.2, 6.12-rt"),
        ] {
            let error = check(words).unwrap_err();
            assert!(error.contains(said), "{words:?}: {error}");
        }
    }

    #[test]
    fn a_worse_figure_is_the_status_and_a_baseline_of_nothing_is_an_error() {
        let tolerance: Tolerance = "5".parse().unwrap();
        let status = |compared, regressions: &[&str]| {
            let regressions = regressions.iter().map(|&line| line.to_owned()).collect();
            judge(&Comparison { compared, regressions, left_out: Vec::new() }, tolerance, WARNING)
        };
        let code = |status: u8| format!("{:?}", ExitCode::from(status));
        assert_eq!(format!("{:?}", status(1, &[]).unwrap()), code(WARNING));
        assert_eq!(format!("{:?}", status(1, &["p99"]).unwrap()), code(CRITICAL));
        assert!(status(0, &[]).unwrap_err().to_string().contains("no result has a counterpart"));
    }
}
