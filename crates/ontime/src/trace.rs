//! `ontime trace`: shows where RT requests spend their time, and what delays them.

mod latency;

use std::io::{self, BufRead, IsTerminal, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ontime_base::clock;
use ontime_cli::print_stderr;
use ontime_hostnet::{Intent, Inventory};
use ontime_tenants::{Sources, discover};
use ontime_trace::event::Event;
use ontime_trace::hints::{Counters, Hints};
use ontime_trace::request::Request;
use ontime_trace::tracefs::Instance;
use ontime_trace::{Analyser, Choice, Document, Run, Session, Watch, cost, html, perfetto, text, tracefs};

use self::latency::Latency;
use crate::api;
use crate::daemon::config::Config;
use crate::daemon::view;
use crate::exit::{self, Doing};
use crate::output::Output;
use crate::paths::Paths;
use crate::table::visible;
use crate::unseen::Unseen;

/// How often the trace rings are read.
const READ: Duration = Duration::from_millis(100);
/// How often the live view is drawn.
const DRAW: Duration = Duration::from_secs(1);
/// How often tenants' threads are looked up again.
const LOOK: Duration = Duration::from_secs(15);

/// `ontime trace`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Trace the requests of this VM (default: of every RT tenant).
    #[arg(long, value_name = "NAME", conflicts_with = "container")]
    vm: Option<String>,
    /// Trace the requests of this container.
    #[arg(long, value_name = "NAME")]
    container: Option<String>,
    /// Trace requests that arrive by this NIC; may be given several times.
    #[arg(long, value_name = "IFACE")]
    nic: Vec<String>,
    /// Stop at the first request that takes longer, and show it (exit status 1).
    #[arg(long = "break", value_name = "US")]
    break_us: Option<u64>,
    /// Stop after this duration (default: at Ctrl-C).
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    duration: Option<u64>,
    /// Measure segments only, with few probes per request; find no priority inversions.
    #[arg(long)]
    segments_only: bool,
    /// Ignore priority inversions that delay a request by less than this.
    #[arg(long, value_name = "US", default_value_t = 20)]
    floor: u64,
    /// Keep all events of this many of the slowest requests.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=1_000))]
    worst: u16,
    /// Size of each watched CPU's ring in the kernel, KiB.
    #[arg(long, value_name = "KIB", default_value_t = 8_192)]
    #[arg(value_parser = clap::value_parser!(u32).range(64..=1_048_576))]
    ring: u32,
    /// Write the report here as JSON; - for standard output, in place of the text.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the report here as one self-contained page.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write the worst requests here for ui.perfetto.dev.
    #[arg(long, value_name = "FILE")]
    perfetto: Option<PathBuf>,
    /// Write latency histograms to this file each second, for node_exporter's textfile collector.
    #[arg(long, value_name = "FILE")]
    textfile: Option<PathBuf>,
    /// Write the traced threads and every event to this file, a JSON line each, to analyse again or report a fault.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Show no live view.
    #[arg(long)]
    quiet: bool,
}

/// Traces. Exit status 1 where `--break` ended the trace, 3 where the kernel does not allow tracing, or tenants could
/// not be seen.
///
/// # Errors
/// Where the tenant or NIC does not exist, tracing is not available, or a file cannot be written.
pub(crate) fn run(args: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    let missed = Unseen::rights();
    if !missed.is_none() {
        print_stderr("ontime: nothing was traced: the kernel lets root alone trace");
        return Ok(ExitCode::from(missed.print(exit::UNKNOWN)));
    }
    let config = Config::load(&paths.config_dir)?;
    let choice = Choice {
        vm: args.vm.clone(),
        container: args.container.clone(),
        nics: args.nic.clone(),
        segments_only: args.segments_only,
    };
    let (watch, unseen) = look(&choice, &config, paths);
    let status = Unseen::default().and(&unseen).print(exit::OK);
    let watch = watch?;
    let root = Path::new(tracefs::TRACEFS);
    let probe_ns = cost::of_a_probe(root).map_err(unsupported)?;
    let mut files = Files::create(args)?;
    files.record(&watch)?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).doing("catching signals")?;
    }
    let place = Instance::place(root, "trace").map_err(unsupported)?;
    // Start the guard first: this process may be killed while the probes are being enabled.
    let guard = Guard::start(&place)?;
    let session = Session::start(root, place, &watch, args.ring).map_err(unsupported)?;
    let mut trace = Trace {
        args,
        analyser: Analyser::new(watch.clone(), args.floor.saturating_mul(1_000), usize::from(args.worst)),
        counters: Counters::new(&watch.cpus),
        run: Run {
            kernel: release(),
            started_unix_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            probe_ns: Some(probe_ns),
            ..Run::default()
        },
        files: &mut files,
        broke: None,
        latency: Latency::default(),
    };
    trace.follow(session, &stop, || look(&choice, &config, paths).0.ok())?;
    drop(guard);
    let (analyser, run, broke) = (trace.analyser, trace.run, trace.broke);
    files.write(&analyser, &Document::new(&analyser, &run))?;
    Ok(ExitCode::from(if broke.is_some() { exit::WARNING } else { status }))
}

fn unsupported(error: ontime_trace::TraceError) -> anyhow::Error {
    exit::Exit::unknown(error.to_string()).into()
}

fn release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// Finds the present packet path, and what hides tenants.
fn look(choice: &Choice, config: &Config, paths: &Paths) -> (anyhow::Result<Watch>, Vec<api::Problem>) {
    let inventory = Inventory::scan(&paths.roots());
    let (intent, unseen) = intent(config);
    let affinity = |tid: i32| {
        let thread = inventory.threads.iter().find(|thread| thread.id.tid == tid)?;
        thread.id.affinity().ok()
    };
    let watch = Watch::new(choice, &inventory, &intent, affinity);
    (watch.map_err(|error| exit::Exit::usage(error.to_string()).into()), unseen)
}

/// Tenants and their classes, and what hides tenants.
pub(crate) fn intent(config: &Config) -> (Intent, Vec<api::Problem>) {
    let found = discover(&Sources::host(), &config.rules);
    let unseen = view::unseen(&found);
    (Intent::new(&config.host, config.rules.table(), found.tenants, false), unseen)
}

/// A trace in progress.
struct Trace<'a> {
    args: &'a Args,
    analyser: Analyser,
    counters: Counters,
    run: Run,
    files: &'a mut Files,
    /// The latency of the request that exceeded `--break`, ns.
    broke: Option<u64>,
    latency: Latency,
}

impl Trace<'_> {
    /// Reads until a signal arrives, the time is over, or a request is too slow.
    fn follow(
        &mut self,
        mut session: Session,
        stop: &AtomicBool,
        look: impl Fn() -> Option<Watch>,
    ) -> anyhow::Result<()> {
        let start = Instant::now();
        let (mut drawn, mut looked, mut from) = (start, start, clock::now());
        let over =
            |start: Instant| self.args.duration.is_some_and(|limit| start.elapsed() >= Duration::from_secs(limit));
        while !stop.load(Ordering::Relaxed) && !over(start) && self.broke.is_none() {
            std::thread::sleep(READ);
            let events = session.poll()?;
            self.take(&events)?;
            from = self.hints(from);
            self.run.records = session.read_counts();
            if drawn.elapsed() >= DRAW {
                drawn = Instant::now();
                self.draw()?;
                self.write_latency()?;
            }
            if looked.elapsed() >= LOOK {
                looked = Instant::now();
                if let Some(watch) = look().filter(|watch| self.is_news(watch)) {
                    session.rewatch(&watch)?;
                    self.files.record(&watch)?;
                    self.analyser.rewatch(watch);
                }
            }
        }
        self.run.notes.extend(session.notes().iter().map(|note| visible(note)));
        let (rest, records) = session.finish()?;
        self.run.records = records;
        self.take(&rest)?;
        self.hints(from);
        self.write_latency()
    }

    /// Whether the same paths have other threads. A path that comes or goes needs a new trace.
    fn is_news(&self, watch: &Watch) -> bool {
        let names = |watch: &Watch| watch.paths.iter().map(|path| path.tenant.clone()).collect::<Vec<_>>();
        let own = self.analyser.watch();
        names(own) == names(watch) && own != watch
    }

    fn take(&mut self, events: &[Event]) -> anyhow::Result<()> {
        self.files.events(events)?;
        for event in events {
            if self.broke.is_some() {
                break;
            }
            let limit = self.args.break_us.map(|us| us.saturating_mul(1_000));
            let slow = |total: &u64| limit.is_some_and(|limit| *total > limit);
            let done = self.analyser.step(event);
            done.iter().for_each(|request| self.latency.add(self.analyser.watch(), request));
            self.broke = done.iter().map(Request::total).find(slow);
            self.run.broke_at_us = self.broke.map(|ns| ns as f64 / 1e3);
        }
        Ok(())
    }

    /// Notes what took time from the whole machine since `from`. Returns the present time.
    fn hints(&mut self, from: u64) -> u64 {
        let (now, hints): (u64, Hints) = (clock::now(), self.counters.look());
        if let Some(words) = hints.words() {
            self.analyser.hint(from, now, &words);
        }
        self.run.hints.add(hints);
        now
    }

    fn write_latency(&self) -> anyhow::Result<()> {
        let Some(file) = &self.args.textfile else { return Ok(()) };
        self.latency.write(file).doing(format_args!("{}: writing histograms (--textfile)", file.display()))
    }

    fn draw(&self) -> anyhow::Result<()> {
        if self.args.quiet || !io::stderr().is_terminal() {
            return Ok(());
        }
        let document = Document::new(&self.analyser, &self.run);
        let mut err = io::stderr().lock();
        // Start at the top and clear each line's rest by itself, because clearing the whole screen flickers.
        let body = text::text(&document).replace('\n', "\x1b[K\n");
        write!(err, "\x1b[H{body}\x1b[J")?;
        Ok(err.flush()?)
    }
}

/// The output files.
struct Files {
    json: Option<Output>,
    html: Option<Output>,
    perfetto: Option<Output>,
    record: Option<Output>,
    text: bool,
}

impl Files {
    fn create(args: &Args) -> anyhow::Result<Self> {
        let file = |path: &Option<PathBuf>| path.as_deref().map(Output::create).transpose();
        let to_stdout = args.json.as_deref() == Some(Path::new("-"));
        let json = if to_stdout { Some(Output::standard()) } else { file(&args.json)? };
        let (html, perfetto, record) = (file(&args.html)?, file(&args.perfetto)?, file(&args.record)?);
        Ok(Self { json, html, perfetto, record, text: !to_stdout })
    }

    fn record(&mut self, watch: &Watch) -> anyhow::Result<()> {
        let Some(file) = &mut self.record else { return Ok(()) };
        file.write(|out| {
            serde_json::to_writer(&mut *out, watch)?;
            writeln!(out)
        })
    }

    fn events(&mut self, events: &[Event]) -> anyhow::Result<()> {
        let Some(file) = &mut self.record else { return Ok(()) };
        file.write(|out| {
            for event in events {
                serde_json::to_writer(&mut *out, event)?;
                writeln!(out)?;
            }
            Ok(())
        })
    }

    /// Writes each of them. The others stay whole where one cannot be written.
    fn write(self, analyser: &Analyser, document: &Document) -> anyhow::Result<()> {
        let json = self.json.map(|file| {
            file.put(|out| {
                serde_json::to_writer_pretty(&mut *out, document)?;
                writeln!(out)
            })
        });
        let html = self.html.map(|file| file.put(|out| out.write_all(html::html(analyser, document).as_bytes())));
        let perfetto = self.perfetto.map(|file| file.put(|out| out.write_all(&perfetto::perfetto(analyser))));
        let record = self.record.map(Output::finish);
        let text = self.text.then(|| show(document));
        [json, html, perfetto, record, text].into_iter().flatten().collect()
    }
}

fn show(document: &Document) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    if let (Some(us), Some(worst)) = (document.broke_at_us, document.worst.first()) {
        writeln!(out, "a request of {} took {us:.1} us:", visible(&worst.tenant))?;
        worst.segments_us.iter().try_for_each(|(name, us)| writeln!(out, "  {name:14}{us:>10.1}"))?;
        worst.words.iter().try_for_each(|words| writeln!(out, "  {words}"))?;
        writeln!(out)?;
    }
    Ok(out.write_all(text::text(document).as_bytes())?)
}

/// Removes the tracing instance if this process is killed. Otherwise the instance would go on tracing.
pub(crate) struct Guard {
    child: Child,
    pipe: Option<ChildStdin>,
}

impl Guard {
    /// Guards the instance at this place, which may not exist yet.
    ///
    /// # Errors
    /// Where no process can be started.
    pub(crate) fn start(instance: &Path) -> anyhow::Result<Self> {
        let program = std::env::current_exe().doing("finding the program `ontime`")?;
        let mut child = Command::new(program)
            .arg("trace-guardian")
            .arg(instance)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            // Ctrl-C must not reach the guardian, which has to outlive this process.
            .process_group(0)
            .spawn()
            .doing("starting the trace's guardian process")?;
        let pipe = child.stdin.take();
        Ok(Self { child, pipe })
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.pipe.take());
        let _ = self.child.wait();
    }
}

/// `ontime trace-guardian`: waits until its parent has ended, then removes the instance.
pub(crate) mod guardian {
    use super::{BufRead, ExitCode, PathBuf, Paths, io, tracefs};

    /// The instance.
    #[derive(Debug, clap::Args)]
    pub(crate) struct Args {
        /// Its directory.
        instance: PathBuf,
    }

    /// Waits for the end of standard input.
    ///
    /// # Errors
    /// None.
    pub(crate) fn run(args: &Args, _: &Paths) -> anyhow::Result<ExitCode> {
        let mut line = String::new();
        while io::stdin().lock().read_line(&mut line).is_ok_and(|length| length > 0) {
            line.clear();
        }
        tracefs::remove(&args.instance);
        Ok(ExitCode::SUCCESS)
    }
}
