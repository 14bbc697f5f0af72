//! `ontime verify`: whether this host, and a guest, are fit for their load. It measures the way that hosts are
//! accepted: with cyclictest, `rtla timerlat` and oslat, then with `ontime trace`. Named limits judge the longest
//! delays. A trace beside each of the programs finds their causes (`causes`).
//!
//! In: those programs and their outputs (`outputs`), limits (`limits`), the daemon's status. Out: a
//! `document::Document`. Every program is limited in time and ends with this one (`child`).

mod causes;
mod child;
mod document;
mod late;
pub(crate) mod limits;
mod outputs;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ontime_cli::print_stderr;
use ontime_hostnet::{CpuSet, Inventory};
use rustix::process::Signal;

use self::causes::{Found, Tracer};
use self::child::{Ended, Load, OUTPUT_MAX, Running, last_line};
use self::document::{Document, HostFacts, Measured, Measurement, OfTenant, Outcome, Verdict};
use self::limits::Test;
use self::outputs::{OfCpu, Slow};
use crate::exit::{Doing, Exit};
use crate::output::Output;
use crate::paths::Paths;
use crate::unseen::Unseen;
use crate::{api, client, exit};

/// How much longer than its measurement a program may take.
const GRACE: Duration = Duration::from_secs(30);

/// `ontime verify`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The duration of each measurement.
    #[arg(long, value_name = "S", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=604_800))]
    duration: u64,
    /// A shell command that loads the host during the measurements; it is started again when it ends.
    #[arg(long, value_name = "COMMAND")]
    load: Option<String>,
    /// The measurements to make.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Test::ALL)]
    test: Vec<Test>,
    /// The limits to be kept: rhel, vmware, iec61850, or names of --limits-file.
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_value = "rhel")]
    limits: Vec<String>,
    /// A TOML file with limits of your own (format: /usr/share/doc/ontime/reference/verify.md).
    #[arg(long, value_name = "FILE")]
    limits_file: Option<PathBuf>,
    /// Measure on these CPUs with cyclictest and timerlat, such as 2-5 (default: all).
    #[arg(long, value_name = "CPUS", value_parser = CpuSet::from_list)]
    cpus: Option<CpuSet>,
    /// Measure on these CPUs with oslat, which occupies them fully (default: the isolated CPUs).
    #[arg(long, value_name = "CPUS", value_parser = CpuSet::from_list)]
    oslat_cpus: Option<CpuSet>,
    /// SCHED_FIFO priority of cyclictest's and timerlat's threads.
    #[arg(long, value_name = "N", default_value_t = 95, value_parser = clap::value_parser!(u8).range(1..=99))]
    priority: u8,
    /// Do not trace the measuring threads: late ones then have no cause, and the figures no cost of the trace.
    #[arg(long)]
    no_trace: bool,
    /// Measure in a guest too, except requests: a command that runs a shell's script from its standard input there,
    /// such as "ssh plc-1 sh". oslat takes the CPUs that are isolated there.
    #[arg(long, value_name = "COMMAND")]
    guest: Option<String>,
    /// Write the result here as JSON; - for standard output, in place of the text.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the result here as one self-contained page.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Measures and judges. Exit status 1 where a limit is exceeded, 3 where a limit's measurement is missing.
///
/// # Errors
/// Where a program is missing, limits are wrong, or a file cannot be written.
pub(crate) fn run(args: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    let mut sets = limits::built_in();
    if let Some(file) = &args.limits_file {
        sets.extend(limits::load(file)?);
    }
    limits::check(&sets, &args.limits)?;
    if args.guest.is_some() && args.test.iter().all(|test| test.program().is_none()) {
        exit::usage!("--test leaves out all that --guest measures; name cyclictest, timerlat or oslat there");
    }
    let inventory = Inventory::scan(&paths.roots());
    let cpus = &inventory.cpus;
    let plan = VerifyPlan {
        args,
        cpus: chosen(args.cpus.as_ref(), "--cpus", &cpus.online, &cpus.online)?,
        oslat_cpus: chosen(args.oslat_cpus.as_ref(), "--oslat-cpus", &cpus.isolated, &cpus.online)?,
        online: &cpus.online,
        tests: Test::ALL.into_iter().filter(|test| args.test.contains(test)).collect(),
        limits: limits::smallest(&sets, &args.limits),
    };
    plan.check_programs(|program| std::env::var_os("PATH").is_some_and(|path| is_in(&path, program)))?;
    let missed = Unseen::rights();
    if !missed.is_none() {
        print_stderr("ontime: nothing was measured: the kernel gives real-time priority to root alone");
        return Ok(ExitCode::from(missed.print(exit::UNKNOWN)));
    }
    let files = Files::create(args)?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).doing("catching signals")?;
    }
    let measured = Bench::new(&plan, paths, &stop).measure(&inventory)?;
    let document = Document::new(measured, &sets, &args.limits);
    files.write(&document)?;
    Ok(ExitCode::from(document.verdict.status()))
}

/// The CPUs to measure on: the asked ones, or those of `or` that are online. The kernel also lists isolated CPUs that
/// are offline, such as hardware threads with `nosmt`.
fn chosen(asked: Option<&CpuSet>, flag: &str, or: &CpuSet, online: &CpuSet) -> Result<CpuSet, Exit> {
    let Some(asked) = asked else { return Ok(or.intersection(online)) };
    if asked.is_empty() {
        return Err(Exit::usage(format!("{flag} names no CPU; online are {online}")));
    }
    if !asked.is_subset(online) {
        return Err(Exit::usage(format!("{flag} {asked}: not all of these CPUs are online; online are {online}")));
    }
    Ok(asked.clone())
}

fn is_in(path: &std::ffi::OsStr, program: &str) -> bool {
    let is_executable =
        |file: PathBuf| file.metadata().is_ok_and(|of| of.is_file() && of.permissions().mode() & 0o111 != 0);
    std::env::split_paths(path).any(|folder| is_executable(folder.join(program)))
}

/// What is measured where.
struct VerifyPlan<'a> {
    args: &'a Args,
    cpus: CpuSet,
    oslat_cpus: CpuSet,
    online: &'a CpuSet,
    tests: Vec<Test>,
    /// The smallest chosen limit of each, us.
    limits: BTreeMap<Test, f64>,
}

impl VerifyPlan<'_> {
    /// Refuses to start without a program that is needed.
    fn check_programs(&self, is_there: impl Fn(&str) -> bool) -> Result<(), Exit> {
        let is_needed = |test: &Test| *test != Test::Oslat || self.oslat_place().is_ok();
        let needed = self.tests.iter().filter(|test| is_needed(test)).filter_map(|test| test.program());
        let missing: Vec<_> = needed.filter(|(program, _)| !is_there(program)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let names: Vec<&str> = missing.iter().map(|(program, _)| *program).collect();
        let packages: BTreeSet<&str> = missing.iter().map(|(_, package)| *package).collect();
        Err(Exit::unknown(format!(
            "not installed: {}; Debian: apt-get install {}; or name other measurements with --test",
            names.join(", "),
            packages.into_iter().collect::<Vec<_>>().join(" ")
        )))
    }

    /// The CPU of oslat's main thread; or why oslat cannot run.
    fn oslat_place(&self) -> Result<u32, String> {
        if self.oslat_cpus.is_empty() {
            let why = "no CPU is isolated for a thread that polls alone; --oslat-cpus names CPUs";
            return Err(why.to_owned());
        }
        let free = self.online.iter().find(|cpu| !self.oslat_cpus.contains(*cpu));
        free.ok_or_else(|| format!("oslat takes CPUs {} and leaves no other", self.oslat_cpus))
    }

    fn cyclictest(&self, place: &[String]) -> Vec<String> {
        let Args { priority, duration, .. } = self.args;
        // Without --default-system, cyclictest keeps CPUs out of idle states, which tenants do not.
        let fixed = ["--mlockall", "--default-system", "--quiet", "--interval=1000", "--distance=0"].map(str::to_owned);
        let own = [format!("--priority={priority}"), format!("--duration={duration}")];
        fixed.into_iter().chain(own).chain(place.iter().cloned()).collect()
    }

    fn on_host(&self, json: &Path) -> Vec<String> {
        let place = [
            format!("--affinity={}", self.cpus),
            format!("--threads={}", self.cpus.len()),
            format!("--json={}", json.display()),
        ];
        self.cyclictest(&place)
    }

    /// A shell's script for the guest. oslat's prints nothing if no CPU is isolated there.
    fn in_guest(&self, test: Test) -> String {
        match test {
            Test::Cyclictest => rt_tests_script(&format!("cyclictest {} --smp", self.cyclictest(&[]).join(" "))),
            Test::Timerlat => format!(
                "echo \"{} $(cat /sys/devices/system/cpu/online)\"\nrtla --help 2>&1\nexec rtla {}\n",
                outputs::ONLINE,
                self.timerlat(None).join(" ")
            ),
            Test::Oslat => {
                let isolated = "cpus=$(cat /sys/devices/system/cpu/isolated)\n[ -n \"$cpus\" ] || exit 0\n";
                let own = "oslat --cpu-list=\"$cpus\" --rtprio=1 --quiet";
                isolated.to_owned() + &rt_tests_script(&format!("{own} --duration={}", self.args.duration))
            }
            Test::Request => String::new(),
        }
    }

    /// rtla's arguments, for these CPUs or for all.
    fn timerlat(&self, cpus: Option<&CpuSet>) -> Vec<String> {
        let Args { priority, duration, .. } = self.args;
        let words = ["timerlat", "hist", "-p", "1000", "-P", &format!("f:{priority}"), "-d", &duration.to_string()];
        let cpus = cpus.into_iter().flat_map(|cpus| ["-c".to_owned(), cpus.to_string()]);
        words.map(str::to_owned).into_iter().chain(cpus).collect()
    }

    fn oslat(&self, main: u32, json: &Path) -> Vec<String> {
        vec![
            format!("--cpu-list={}", self.oslat_cpus),
            format!("--cpu-main-thread={main}"),
            "--rtprio=1".to_owned(),
            format!("--duration={}", self.args.duration),
            "--quiet".to_owned(),
            format!("--json={}", json.display()),
        ]
    }
}

/// A script that runs this program of rt-tests and prints its JSON. The JSON goes through a file, because the program's
/// other output is on the same standard output.
fn rt_tests_script(command: &str) -> String {
    let run = format!("file=$(mktemp) || exit 1\n{command} --json=\"$file\" >&2\nstatus=$?\n");
    run + "cat \"$file\"\nrm -f \"$file\"\nexit $status\n"
}

/// The measurements in progress.
struct Bench<'a> {
    plan: &'a VerifyPlan<'a>,
    paths: &'a Paths,
    stop: &'a AtomicBool,
    versions: BTreeMap<String, String>,
    /// Beside the measurement in progress.
    tracer: Option<Tracer>,
    traced: Vec<(Test, Found)>,
    notes: Vec<String>,
}

impl<'a> Bench<'a> {
    fn new(plan: &'a VerifyPlan<'a>, paths: &'a Paths, stop: &'a AtomicBool) -> Self {
        let (versions, traced, notes) = (BTreeMap::new(), Vec::new(), Vec::new());
        Self { plan, paths, stop, versions, tracer: None, traced, notes }
    }

    fn measure(mut self, inventory: &Inventory) -> anyhow::Result<Measured> {
        let (args, plan) = (self.plan.args, self.plan);
        let started_unix_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let mut load = args.load.as_deref().map(Load::start).transpose().doing("starting the load (--load)")?;
        let (mut measurements, mut slow) = (Vec::new(), Vec::new());
        for test in &plan.tests {
            self.start_causes(*test, inventory);
            measurements.push(match test {
                Test::Cyclictest => self.cyclictest(&mut load)?,
                Test::Timerlat => self.timerlat(&mut load)?,
                Test::Oslat => self.oslat(&mut load)?,
                Test::Request => {
                    let (measurement, found) = self.requests(&mut load)?;
                    slow = found;
                    measurement
                }
            });
            self.traced.extend(self.tracer.take().map(|tracer| (*test, tracer.finish())));
            if let Some(guest) = args.guest.as_ref().filter(|_| test.program().is_some()) {
                measurements.push(self.guest(*test, guest, &mut load)?);
            }
        }
        self.go_on(&mut load)?;
        drop(load);
        let (traced, notes) = (std::mem::take(&mut self.traced), std::mem::take(&mut self.notes));
        let host = self.host(inventory);
        let (duration_s, load) = (args.duration, args.load.clone());
        Ok(Measured { started_unix_s, duration_s, load, host, measurements, slow, traced, notes })
    }

    /// Starts the trace that finds the causes of this measurement's delays. Without it the measurement is made, too.
    fn start_causes(&mut self, test: Test, inventory: &Inventory) {
        let cpus = match test {
            Test::Oslat if self.plan.oslat_place().is_ok() => &self.plan.oslat_cpus,
            Test::Cyclictest | Test::Timerlat => &self.plan.cpus,
            Test::Oslat | Test::Request => return,
        };
        if self.plan.args.no_trace {
            return;
        }
        match Tracer::start(test, cpus, self.plan.limits.get(&test).copied(), inventory, self.paths) {
            Ok(tracer) => self.tracer = tracer,
            Err(why) => self.notes.push(format!("{}: no causes of its delays: {why:#}", test.name())),
        }
    }

    /// Why a measurement ends before its time.
    fn why_stop(&self, load: &mut Option<Load>) -> Option<String> {
        if self.stop.load(Ordering::Relaxed) {
            return Some("interrupted: nothing is judged".to_owned());
        }
        load.as_mut().and_then(Load::keep)
    }

    /// An error if the measurements cannot go on.
    fn go_on(&self, load: &mut Option<Load>) -> Result<(), Exit> {
        self.why_stop(load).map_or(Ok(()), |why| Err(Exit::unknown(why)))
    }

    /// Runs a program for the duration of a measurement; in a guest, the program that runs this script there. The inner
    /// error says why there is no result.
    fn program(
        &mut self,
        command: Command,
        in_guest: Option<(Test, &str)>,
        load: &mut Option<Load>,
    ) -> anyhow::Result<Result<(Vec<u8>, String), String>> {
        let name = command.get_program().to_string_lossy().into_owned();
        let duration = Duration::from_secs(self.plan.args.duration);
        let mut running =
            Running::start(command, in_guest.map(|(_, script)| script)).doing(format_args!("starting {name}"))?;
        let mut tracer = self.tracer.take();
        let ended = running.wait(duration + GRACE, || {
            tracer.iter_mut().for_each(Tracer::poll);
            self.why_stop(load)
        });
        self.tracer = tracer;
        let ended = ended.doing(format_args!("waiting for {name}"))?;
        let (out, err) = running.output().doing(format_args!("reading what {name} wrote"))?;
        let said = last_line(&err).map_or_else(String::new, |line| format!(": {line}"));
        let needed = in_guest.and_then(|(test, _)| test.program());
        Ok(match (ended, needed) {
            (Ended::Itself(Some(0)), _) => Ok((out, err)),
            (Ended::Itself(Some(127)), Some((program, package))) => {
                Err(format!("no {program} there{said}; install {package} in the guest, or name others with --test"))
            }
            (Ended::Itself(Some(status)), _) => Err(format!("{name} ended with status {status}{said}")),
            (Ended::Itself(None), _) => Err(format!("a signal ended {name}{said}")),
            (Ended::Late, _) => Err(format!("{name} did not end within {} s after its time{said}", GRACE.as_secs())),
            (Ended::TooMuch, _) => {
                Err(format!("{name} wrote more than {} MiB and was ended; a result is smaller", OUTPUT_MAX >> 20))
            }
            (Ended::Because(why), _) => return Err(Exit::unknown(why).into()),
        })
    }

    /// Runs a program of rt-tests, which writes JSON to a file.
    fn rt_tests(
        &mut self,
        test: Test,
        arguments: impl Fn(&Path) -> Vec<String>,
        load: &mut Option<Load>,
    ) -> anyhow::Result<Measurement> {
        let json = tempfile::NamedTempFile::new().doing("making a file for the result")?;
        let name = test.name();
        let mut command = Command::new(name);
        command.args(arguments(json.path()));
        let words = format!("{name} {}", arguments(Path::new("FILE")).join(" "));
        print_stderr(&words);
        let result = match self.program(command, None, load)? {
            Ok(_) => outputs::rt_tests(&fs::read(json.path()).doing(format_args!("reading {name}'s JSON"))?),
            Err(why) => Err(why),
        };
        Ok(self.by_cpu(test, "host", words, "rt-tests", result))
    }

    /// A measurement of a program of rt-tests.
    fn by_cpu(
        &mut self,
        test: Test,
        place: &'static str,
        command: String,
        package: &str,
        result: Result<outputs::RtTests, String>,
    ) -> Measurement {
        let result = result.map(|read| {
            self.versions.extend(read.version.map(|version| (package.to_owned(), version)));
            read.cpus
        });
        Measurement { test, place, command, outcome: outcome(result) }
    }

    fn cyclictest(&mut self, load: &mut Option<Load>) -> anyhow::Result<Measurement> {
        let plan = self.plan;
        self.rt_tests(Test::Cyclictest, |json| plan.on_host(json), load)
    }

    fn oslat(&mut self, load: &mut Option<Load>) -> anyhow::Result<Measurement> {
        let plan = self.plan;
        match plan.oslat_place() {
            Ok(main) => self.rt_tests(Test::Oslat, |json| plan.oslat(main, json), load),
            Err(why) => {
                let outcome = Outcome::NotApplicable { why };
                Ok(Measurement { test: Test::Oslat, place: "host", command: String::new(), outcome })
            }
        }
    }

    fn guest(&mut self, test: Test, guest: &str, load: &mut Option<Load>) -> anyhow::Result<Measurement> {
        let script = self.plan.in_guest(test);
        let mut command = Command::new("sh");
        command.args(["-c", guest]);
        print_stderr(format_args!("{} in the guest, by {guest}", test.name()));
        let words = format!("{guest}\n{script}");
        let result = self.program(command, Some((test, &script)), load)?.map(|(out, _)| out);
        if test == Test::Oslat && result.as_ref().is_ok_and(Vec::is_empty) {
            let why = "no CPU is isolated there for a thread that polls alone".to_owned();
            return Ok(Measurement { test, place: "guest", command: words, outcome: Outcome::NotApplicable { why } });
        }
        let result = result.and_then(|out| match test {
            Test::Timerlat => outputs::guests_timerlat(&String::from_utf8_lossy(&out)),
            _ => outputs::rt_tests(&out),
        });
        let package = test.program().map_or("", |(_, package)| package);
        Ok(self.by_cpu(test, "guest", words, &format!("{package} (guest)"), result))
    }

    fn timerlat(&mut self, load: &mut Option<Load>) -> anyhow::Result<Measurement> {
        let mut help = Command::new("rtla");
        help.arg("--help");
        let mut running = Running::start(help, None).doing("starting rtla")?;
        running.wait(GRACE, || None).doing("waiting for rtla")?;
        let (out, err) = running.output().doing("reading what rtla wrote")?;
        let version = outputs::rtla_version(&(String::from_utf8_lossy(&out) + err.as_str()));
        self.versions.extend(version.map(|version| ("rtla".to_owned(), version)));
        let arguments = self.plan.timerlat(Some(&self.plan.cpus));
        let words = format!("rtla {}", arguments.join(" "));
        print_stderr(&words);
        let mut command = Command::new("rtla");
        command.args(arguments);
        let result = self.program(command, None, load)?;
        let result = result.and_then(|(out, _)| outputs::timerlat(&String::from_utf8_lossy(&out)));
        let result = result.and_then(|of| outputs::complete(of, &self.plan.cpus));
        Ok(Measurement { test: Test::Timerlat, place: "host", command: words, outcome: outcome(result) })
    }

    /// Traces requests, while no other measurement disturbs them.
    fn requests(&self, load: &mut Option<Load>) -> anyhow::Result<(Measurement, Vec<Slow>)> {
        let program = std::env::current_exe().doing("finding the program `ontime`")?;
        let worst = document::KEPT_REQUESTS.to_string();
        let arguments = ["trace", "--quiet", "--json", "-", "--worst", &worst];
        let mut command = Command::new(program);
        command.args(arguments).args(self.paths.arguments());
        let words = format!("ontime {}", arguments.join(" "));
        let duration = self.plan.args.duration;
        print_stderr(format_args!("{words}, {duration} s"));
        let mut running = Running::start(command, None).doing("starting ontime trace")?;
        if let Ended::Because(why) = running.wait(Duration::from_secs(duration), || self.why_stop(load))? {
            return Err(Exit::unknown(why).into());
        }
        of_requests(&mut running, words)
    }

    fn host(self, inventory: &Inventory) -> HostFacts {
        let name = rustix::system::uname();
        let read = |file: &str| fs::read_to_string(file).unwrap_or_default().trim().to_owned();
        let mut versions = self.versions;
        versions.insert("ontime".to_owned(), crate::version().to_owned());
        let status = client::get::<api::Status>(&self.paths.socket(), "/v1/status");
        let status_missing = status.as_ref().err().map(ToString::to_string);
        HostFacts {
            name: name.nodename().to_string_lossy().into_owned(),
            kernel: name.release().to_string_lossy().into_owned(),
            command_line: read("/proc/cmdline"),
            preempt_rt: inventory.kernel.realtime,
            cpus: self.plan.online.to_string(),
            isolated: inventory.cpus.isolated.to_string(),
            versions,
            status: status.ok(),
            status_missing,
        }
    }
}

fn outcome(result: Result<Vec<OfCpu>, String>) -> Outcome {
    match result {
        Ok(cpus) => {
            let max_us = cpus.iter().map(|of| of.max_us).fold(0.0, f64::max);
            Outcome::Measured { max_us, cpus, tenants: Vec::new(), lost_events: 0 }
        }
        Err(why) => Outcome::Missing { why },
    }
}

/// Ends the trace, and reads what it found.
fn of_requests(running: &mut Running, command: String) -> anyhow::Result<(Measurement, Vec<Slow>)> {
    let status = running.end(Signal::INT).doing("ending ontime trace")?;
    let (out, err) = running.output().doing("reading what ontime trace wrote")?;
    let found = if status == Some(i32::from(exit::OK)) {
        outputs::trace(&out)
    } else {
        Err(last_line(&err).unwrap_or("ontime trace said nothing and failed").to_owned())
    };
    let (outcome, slow) = match found {
        Ok(trace) => (of_trace(&trace), trace.worst),
        Err(why) => (Outcome::Missing { why }, Vec::new()),
    };
    Ok((Measurement { test: Test::Request, place: "host", command, outcome }, slow))
}

fn of_trace(trace: &outputs::Trace) -> Outcome {
    let of_path = |path: &outputs::Path| {
        let total = path.total?;
        let (samples, min_us, avg_us, max_us) = (total.count, total.min, total.mean, path.max_us);
        Some(OfTenant { tenant: path.tenant.clone(), samples, min_us, avg_us, max_us })
    };
    let tenants: Vec<OfTenant> = trace.paths.iter().filter_map(of_path).collect();
    let lost_events: u64 = trace.tracing.lost.values().sum();
    if tenants.is_empty() {
        let why = match lost_events {
            0 => "no RT tenant was sent a request; send some meanwhile",
            _ => "the trace lost events, and all requests with them; send fewer meanwhile",
        };
        return Outcome::Missing { why: why.to_owned() };
    }
    let max_us = tenants.iter().map(|of| of.max_us).fold(0.0, f64::max);
    Outcome::Measured { max_us, cpus: Vec::new(), tenants, lost_events }
}

/// The output files.
struct Files {
    json: Option<Output>,
    html: Option<Output>,
    text: bool,
}

impl Files {
    fn create(args: &Args) -> anyhow::Result<Self> {
        let file = |path: &Option<PathBuf>| path.as_deref().map(Output::create).transpose();
        let to_stdout = args.json.as_deref() == Some(Path::new("-"));
        let json = if to_stdout { Some(Output::standard()) } else { file(&args.json)? };
        Ok(Self { json, html: file(&args.html)?, text: !to_stdout })
    }

    /// Writes each of them. The others stay whole where one cannot be written.
    fn write(self, document: &Document) -> anyhow::Result<()> {
        let html = self.html.map(|file| file.put(|out| out.write_all(document::html(document).as_bytes())));
        let json = self.json.map(|file| {
            file.put(|out| {
                serde_json::to_writer_pretty(&mut *out, &api::Versioned::of(document))?;
                writeln!(out)
            })
        });
        let text = self.text.then(|| show(document));
        [html, json, text].into_iter().flatten().collect()
    }
}

fn show(document: &Document) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    document::text(&mut out, document)?;
    if document.verdict == Verdict::Fail && document.late.is_empty() {
        writeln!(out, "no cause was found: rtla timerlat top -a LIMIT, while the load runs, stops at a late wake-up")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn args(words: &[&str]) -> Args {
        Line::try_parse_from(std::iter::once(&"verify").chain(words)).unwrap().args
    }

    fn plan<'a>(args: &'a Args, online: &'a CpuSet, isolated: &str) -> VerifyPlan<'a> {
        let (cpus, oslat_cpus) = (online.clone(), CpuSet::from_list(isolated).unwrap());
        VerifyPlan { args, cpus, oslat_cpus, online, tests: args.test.clone(), limits: BTreeMap::new() }
    }

    #[test]
    fn isolated_cpus_that_are_offline_are_left_out_and_asked_ones_are_refused() {
        let [online, isolated] = ["0-3", "2-3,6-7"].map(|list| CpuSet::from_list(list).unwrap());
        let flag = "--oslat-cpus";
        assert_eq!(chosen(None, flag, &isolated, &online).unwrap(), CpuSet::from_list("2-3").unwrap());
        let said = |asked: &str| {
            let asked = CpuSet::from_list(asked).unwrap();
            chosen(Some(&asked), flag, &isolated, &online).unwrap_err().message
        };
        assert!(said("2,6").contains("--oslat-cpus 2,6: not all of these CPUs are online"), "{}", said("2,6"));
        assert!(said("").contains("--oslat-cpus names no CPU"), "{}", said(""));
    }

    #[test]
    fn a_missing_program_is_named_with_its_package_and_only_if_it_is_needed() {
        let online = CpuSet::from_list("0-3").unwrap();
        let all = args(&[]);
        let said = |args: &Args, isolated: &str, there: &[&str]| {
            let found = plan(args, &online, isolated).check_programs(|program| there.contains(&program));
            found.err().map(|error| (error.status, error.message))
        };
        let (status, none) = said(&all, "3", &[]).unwrap();
        assert_eq!(status, exit::UNKNOWN);
        assert!(none.contains("cyclictest, rtla, oslat; Debian: apt-get install rt-tests rtla;"), "{none}");
        let (_, rtla) = said(&all, "3", &["cyclictest", "oslat"]).unwrap();
        assert!(rtla.contains("not installed: rtla; Debian: apt-get install rtla;"), "{rtla}");
        assert_eq!(said(&all, "", &["cyclictest", "rtla"]), None, "oslat has no CPU");
        assert_eq!(said(&args(&["--test", "request"]), "3", &[]), None);
        assert!(said(&args(&["--test", "timerlat,request"]), "3", &["cyclictest"]).is_some());
    }

    #[test]
    fn programs_get_the_chosen_cpus_time_and_priority() {
        let online = CpuSet::from_list("0-5").unwrap();
        let args = args(&["--duration", "7", "--priority", "80"]);
        let mut plan = plan(&args, &online, "0,4");
        plan.cpus = CpuSet::from_list("1,3-4").unwrap();
        let cyclictest = plan.on_host(Path::new("/tmp/x")).join(" ");
        for word in
            ["--affinity=1,3-4 --threads=3", "--priority=80", "--duration=7", "--json=/tmp/x", "--default-system"]
        {
            assert!(cyclictest.contains(word), "{word}: {cyclictest}");
        }
        assert_eq!(plan.timerlat(Some(&plan.cpus)).join(" "), "timerlat hist -p 1000 -P f:80 -d 7 -c 1,3-4");
        assert!(plan.in_guest(Test::Timerlat).ends_with("exec rtla timerlat hist -p 1000 -P f:80 -d 7\n"));
        assert_eq!(plan.oslat_place(), Ok(1));
        let oslat = plan.oslat(1, Path::new("/tmp/y")).join(" ");
        assert_eq!(oslat, "--cpu-list=0,4 --cpu-main-thread=1 --rtprio=1 --duration=7 --quiet --json=/tmp/y");
        plan.oslat_cpus = online.clone();
        assert!(plan.oslat_place().unwrap_err().contains("leaves no other"));
    }

    #[test]
    fn the_guests_script_gives_the_json_alone_and_the_programs_status() {
        let online = CpuSet::from_list("0").unwrap();
        let args = args(&["--duration", "3"]);
        let plan = plan(&args, &online, "");
        let run = |test: Test, fake: &str| {
            let script = plan.in_guest(test);
            let mut shell = Command::new("sh");
            shell.arg("-s");
            let mut running = Running::start(shell, Some(&format!("{fake}\n{script}"))).unwrap();
            let ended = running.wait(Duration::from_secs(60), || None).unwrap();
            (ended, String::from_utf8(running.output().unwrap().0).unwrap())
        };
        let writes = "cyclictest() { for word; do case $word in --json=*) echo '{}' > ${word#--json=};; esac; done
            echo T: 0 noise; return 5; }";
        assert_eq!(run(Test::Cyclictest, writes), (Ended::Itself(Some(5)), "{}\n".to_owned()));
        let nothing = "PATH=/nonexistent; mktemp() { echo /dev/null; }; cat() { echo 1; }; rm() { :; }";
        for test in [Test::Cyclictest, Test::Timerlat, Test::Oslat] {
            assert_eq!(run(test, nothing).0, Ended::Itself(Some(127)), "{test:?}");
        }
        let isolated = |cpus: &str| {
            format!(
                "cat() {{ case $1 in /sys/*) echo {cpus} ;; *) command cat \"$1\" ;; esac; }}
            oslat() {{ for word; do case $word in --json=*) echo \"$1\" > ${{word#--json=}} ;; esac; done; }}"
            )
        };
        assert_eq!(run(Test::Oslat, &isolated("2-3")), (Ended::Itself(Some(0)), "--cpu-list=2-3\n".to_owned()));
        assert_eq!(run(Test::Oslat, &isolated("")), (Ended::Itself(Some(0)), String::new()));
    }

    #[test]
    fn requests_are_judged_by_tenant_and_their_absence_is_told() {
        let path = |tenant: &str, count: u64, max_us: f64| outputs::Path {
            tenant: tenant.to_owned(),
            total: (count > 0).then_some(outputs::Total { count, min: 5.0, mean: 9.0 }),
            max_us,
        };
        let lost = |count: u64| outputs::Tracing { lost: [("3".to_owned(), count)].into() };
        let trace = |paths: Vec<outputs::Path>| outputs::Trace { paths, worst: Vec::new(), tracing: lost(0) };
        let Outcome::Measured { max_us, tenants, .. } =
            of_trace(&trace(vec![path("a", 3, 40.0), path("idle", 0, 0.0), path("b", 9, 70.0)]))
        else {
            panic!("nothing was measured")
        };
        assert_eq!((max_us, tenants.len()), (70.0, 2));
        assert!(matches!(of_trace(&trace(vec![path("idle", 0, 0.0)])), Outcome::Missing { .. }));
        let with_losses = |paths| of_trace(&outputs::Trace { tracing: lost(7), ..trace(paths) });
        let measured = with_losses(vec![path("a", 3, 40.0)]);
        assert!(matches!(measured, Outcome::Measured { lost_events: 7, .. }), "{measured:?}");
        let missing = with_losses(Vec::new());
        assert!(matches!(&missing, Outcome::Missing { why } if why.contains("lost events")), "{missing:?}");
    }

    #[test]
    fn a_program_is_looked_up_in_the_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = std::env::join_paths([Path::new("/nonexistent"), dir.path()]).unwrap();
        assert!(!is_in(&path, "tool"));
        fs::write(dir.path().join("tool"), "").unwrap();
        assert!(!is_in(&path, "tool"), "not executable");
        fs::set_permissions(dir.path().join("tool"), fs::Permissions::from_mode(0o755)).unwrap();
        assert!(is_in(&path, "tool"));
        fs::create_dir(dir.path().join("folder")).unwrap();
        assert!(!is_in(&path, "folder"));
    }
}
