//! The kernel's trace rings: a private instance, its probes, and reading.
//!
//! Input: a [`Watch`]. Output: its events. The instance has its own rings, filters, clock and CPUs
//! (`Documentation/trace/ftrace.rst`, "Instances"), so other users' traces are not affected. An instance outlives its
//! process. [`Instance`] removes it when dropped, a guardian process if this process is killed ([`remove`]), and
//! otherwise the next start.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ontime_base::clock::now;
use ontime_hostnet::CpuSet;
use ontime_tenants::remedy;

use crate::event::{Event, EventKind};
use crate::format::{Decoder, Format, FormatError, Probe};
use crate::merge::Merger;
use crate::page::Page;
use crate::path::Watch;

/// The usual mount point of tracefs.
pub const TRACEFS: &str = "/sys/kernel/tracing";
/// Most pages read of one CPU at a time, so that a flood on one CPU does not delay reading the others.
const PAGES: usize = 4_096;

/// Why tracing is impossible.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// tracefs is not mounted and cannot be mounted.
    #[error(
        "{root}: no tracefs there ({source}); mount it: mount -t tracefs none {root}. Where the kernel has none \
         (CONFIG_FTRACE), ontime trace cannot work"
    )]
    NoTracefs {
        /// Where tracefs is looked for.
        root: PathBuf,
        /// Why it could not be mounted.
        source: io::Error,
    },
    /// Permission denied.
    #[error(
        "{path}: {source}. ontime trace needs root; under kernel lockdown \"confidentiality\" the kernel allows no \
         tracing at all (cat /sys/kernel/security/lockdown), \"integrity\" does"
    )]
    Denied {
        /// The file or directory in tracefs.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// A tracepoint is missing.
    #[error(
        "this kernel has no tracepoint {0}, which Ontime needs to trace; boot a kernel that has it \
         (docs/reference/trace.md)"
    )]
    NoProbe(&'static str),
    /// A record's format is unknown.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// Another failure.
    #[error("{what} {path}: {source}; {}", remedy(source))]
    Io {
        /// What Ontime tried to do with the file.
        what: &'static str,
        /// The file or directory in tracefs.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
}

pub(crate) fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> TraceError {
    let path = path.to_owned();
    move |source| match source.kind() {
        ErrorKind::PermissionDenied => TraceError::Denied { path, source },
        _ => TraceError::Io { what, path, source },
    }
}

/// A private tracing instance; removed when dropped.
#[derive(Debug)]
pub struct Instance {
    dir: PathBuf,
}

impl Instance {
    /// The directory of this process's instance for a purpose. Removes instances of dead Ontime processes.
    ///
    /// # Errors
    /// If tracefs cannot be used.
    pub fn place(root: &Path, purpose: &str) -> Result<PathBuf, TraceError> {
        let instances = instances(root)?;
        sweep(&instances);
        Ok(instances.join(format!("ontime-{purpose}-{}", std::process::id())))
    }

    /// Creates an instance there, with the monotonic clock and nothing enabled.
    ///
    /// # Errors
    /// If tracefs cannot be used.
    pub fn create(dir: PathBuf) -> Result<Self, TraceError> {
        match fs::create_dir(&dir) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(failed("making", &dir)(error)),
            _ => {}
        }
        let instance = Self { dir };
        instance.write("trace_clock", "mono")?;
        // The records contain the names, so recording them at each switch would be useless.
        let _ = instance.write("options/record-cmd", "0");
        Ok(instance)
    }

    /// The directory of the trace instance.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Writes to one of its files.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub fn write(&self, file: &str, text: &str) -> Result<(), TraceError> {
        let path = self.dir.join(file);
        fs::write(&path, text).map_err(failed("writing", &path))
    }

    /// Sets a filter (none passes everything).
    fn filter(&self, probe: &str, filter: Option<&str>) -> Result<(), TraceError> {
        self.write(&format!("events/{probe}/filter"), filter.unwrap_or("0"))
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        remove(&self.dir);
    }
}

/// Disables and removes an instance. Its rings must be closed. If a killed process is just closing them, waits up to 5
/// s. A missing instance is no error.
pub fn remove(dir: &Path) {
    let _ = fs::write(dir.join("events/enable"), "0");
    for _ in 0..250 {
        match fs::remove_dir(dir) {
            Err(error) if error.kind() == ErrorKind::ResourceBusy => std::thread::sleep(Duration::from_millis(20)),
            _ => return,
        }
    }
}

fn sweep(instances: &Path) {
    for entry in fs::read_dir(instances).into_iter().flatten().filter_map(Result::ok) {
        let name = entry.file_name();
        let Some(pid) =
            name.to_str().and_then(|name| name.strip_prefix("ontime-")?.rsplit_once('-')).map(|(_, pid)| pid)
        else {
            continue;
        };
        if pid.parse::<u32>().is_ok() && !Path::new("/proc").join(pid).exists() {
            remove(&entry.path());
        }
    }
}

/// The directory of instances. Mounts tracefs if necessary.
fn instances(root: &Path) -> Result<PathBuf, TraceError> {
    let dir = root.join("instances");
    let found = fs::metadata(&dir);
    if let Err(error) = &found {
        if error.kind() == ErrorKind::PermissionDenied {
            return Err(failed("opening", &dir)(io::Error::from(ErrorKind::PermissionDenied)));
        }
        let no_options: Option<&std::ffi::CStr> = None;
        rustix::mount::mount("none", root, "tracefs", rustix::mount::MountFlags::empty(), no_options)
            .map_err(|error| TraceError::NoTracefs { root: root.to_owned(), source: error.into() })?;
    }
    Ok(dir)
}

/// Size of a ring's page with header, bytes.
pub(crate) fn page_size(root: &Path) -> usize {
    let text = fs::read_to_string(root.join("events/header_page")).unwrap_or_default();
    let data = text.lines().find(|line| line.contains(" data;"));
    let size = data.and_then(|line| line.split("size:").nth(1)?.split(';').next()?.parse::<usize>().ok());
    size.map_or(4_096, |size| size + 16)
}

/// Most memory of all rings together, KiB.
const RINGS: u32 = 512 * 1_024;

/// The ring of one CPU.
#[derive(Debug)]
struct Ring {
    file: File,
    reach: Reach,
}

/// How far a CPU's ring was read.
#[derive(Debug)]
struct Reach {
    cpu: u32,
    /// Time of the last record, ns; initially the start of the trace.
    last: u64,
    /// Records after `last` were lost, and none was read since.
    gap: bool,
}

impl Reach {
    /// A page's events. A gap before them is reported at its start, but not before the `horizon` up to which events
    /// were already returned, and at its end. Between these times this CPU's events are missing beside other CPUs'
    /// events.
    fn events(
        &mut self,
        page: Page<'_>,
        horizon: u64,
        mut decode: impl FnMut(u64, &[u8]) -> Option<Event>,
    ) -> Vec<Event> {
        let cpu = self.cpu;
        let lost = |time, count| Event { time, cpu, pid: 0, what: EventKind::Lost { count } };
        let mut events = Vec::new();
        if page.lost() > 0 {
            events.push(lost(self.last.max(horizon), page.lost()));
            self.gap = true;
        }
        for (time, record) in page {
            if std::mem::take(&mut self.gap) {
                events.push(lost(time, 0));
            }
            self.last = time;
            events.extend(decode(time, record));
        }
        events
    }
}

/// A running trace.
#[derive(Debug)]
pub struct Session {
    // Must be closed before the instance is removed.
    rings: Vec<Ring>,
    instance: Instance,
    decoder: Decoder,
    merger: Merger,
    page: Vec<u8>,
    /// Missing parts, for the report.
    notes: Vec<String>,
    seen: u64,
    undecoded: u64,
}

impl Session {
    /// Starts the trace in an instance at this [`Instance::place`], with rings of `ring_kib` KiB per CPU.
    ///
    /// # Errors
    /// If tracefs cannot be used or a tracepoint is missing.
    pub fn start(root: &Path, place: PathBuf, watch: &Watch, ring_kib: u32) -> Result<Self, TraceError> {
        let instance = Instance::create(place)?;
        let cpus: CpuSet = watch.cpus.iter().copied().collect();
        let share = RINGS / (watch.cpus.len().max(1) as u32);
        let notes = if ring_kib > share {
            vec![format!("rings of {share} KiB, not {ring_kib}: all together take at most {} MiB", RINGS / 1_024)]
        } else {
            Vec::new()
        };
        let ring_kib = ring_kib.min(share);
        // All probes start together: an interrupt whose poll was not traced would be assigned to the next request.
        instance.write("tracing_on", "0")?;
        instance.write("tracing_cpumask", &cpus.to_mask())?;
        let mut rings = Vec::new();
        for cpu in &watch.cpus {
            instance.write(&format!("per_cpu/cpu{cpu}/buffer_size_kb"), &ring_kib.to_string())?;
            let path = instance.dir().join(format!("per_cpu/cpu{cpu}/trace_pipe_raw"));
            let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
            let file = OpenOptions::new()
                .read(true)
                .custom_flags(nonblocking)
                .open(&path)
                .map_err(failed("opening", &path))?;
            rings.push(Ring { file, reach: Reach { cpu: *cpu, last: now(), gap: false } });
        }
        let mut session = Self {
            rings,
            decoder: Decoder::default(),
            merger: Merger::default(),
            page: vec![0; page_size(root)],
            notes,
            seen: 0,
            undecoded: 0,
            instance,
        };
        session.probes(watch)?;
        Ok(session)
    }

    fn probes(&mut self, watch: &Watch) -> Result<(), TraceError> {
        let mut wanted = watch.filters();
        let place = |probe: Probe| self.instance.dir().join("events").join(probe.path());
        wanted.retain(|(probe, _)| !probe.may_be_missing() || place(*probe).exists());
        let mut formats = Vec::new();
        for (probe, _) in &wanted {
            let path = place(*probe).join("format");
            let text = match fs::read_to_string(&path) {
                Err(error) if error.kind() == ErrorKind::NotFound => return Err(TraceError::NoProbe(probe.path())),
                read => read.map_err(failed("reading", &path))?,
            };
            formats.push(Format::parse(*probe, &text)?);
        }
        self.decoder = Decoder::new(formats);
        self.apply(&wanted)?;
        for (probe, _) in &wanted {
            self.instance.write(&format!("events/{}/enable", probe.path()), "1")?;
        }
        self.instance.write("tracing_on", "1")
    }

    /// Sets the filters, also while tracing: the kernel replaces them under RCU.
    fn apply(&mut self, wanted: &[(Probe, Option<String>)]) -> Result<(), TraceError> {
        for (probe, filter) in wanted {
            if let Err(error) = self.instance.filter(probe.path(), filter.as_deref()) {
                self.notes.push(format!("no filter in the kernel for {}: {error}", probe.path()));
                self.instance.filter(probe.path(), None)?;
            }
        }
        Ok(())
    }

    /// Traces other threads from now on, on the same CPUs.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub fn rewatch(&mut self, watch: &Watch) -> Result<(), TraceError> {
        let new = watch.cpus.iter().filter(|cpu| !self.rings.iter().any(|ring| ring.reach.cpu == **cpu));
        let new: Vec<String> = new.map(ToString::to_string).collect();
        let note = format!("the path now uses CPUs that are not traced ({}): start again to see them", new.join(", "));
        if !new.is_empty() && !self.notes.contains(&note) {
            self.notes.push(note);
        }
        self.apply(&watch.filters())
    }

    /// Missing parts.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Records read so far, and how many of them were damaged or of an unknown probe.
    pub fn read_counts(&self) -> (u64, u64) {
        (self.seen, self.undecoded)
    }

    /// The events since the last call, in order, including losses ([`EventKind::Lost`]).
    ///
    /// # Errors
    /// A ring cannot be read.
    pub fn poll(&mut self) -> Result<Vec<Event>, TraceError> {
        let read_at = now();
        let all_read = self.drain()?;
        // A CPU whose ring was not emptied may have older events than the others.
        Ok(if all_read { self.merger.take(read_at) } else { Vec::new() })
    }

    /// Stops the probes. Returns the remaining events and [`Self::read_counts`].
    ///
    /// # Errors
    /// A ring cannot be read.
    pub fn finish(mut self) -> Result<(Vec<Event>, (u64, u64)), TraceError> {
        self.instance.write("events/enable", "0")?;
        while !self.drain()? {}
        Ok((self.merger.rest(), self.read_counts()))
    }

    /// Reads every ring. Returns whether all of them were emptied.
    fn drain(&mut self) -> Result<bool, TraceError> {
        let mut all = true;
        for ring in &mut self.rings {
            let mut pages = 0;
            loop {
                let length = match ring.file.read(&mut self.page) {
                    Ok(0) => break,
                    Ok(length) => length,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                    Err(error) => return Err(failed("reading the ring of", self.instance.dir())(error)),
                };
                let Some(page) = self.page.get(..length).and_then(Page::new) else {
                    self.undecoded += 1;
                    continue;
                };
                let cpu = ring.reach.cpu;
                let events = ring.reach.events(page, self.merger.horizon(), |time, record| {
                    self.seen += 1;
                    let event = self.decoder.decode(time, cpu, record);
                    self.undecoded += u64::from(event.is_none());
                    event
                });
                self.merger.add(events);
                pages += 1;
                if pages == PAGES {
                    all = false;
                    break;
                }
            }
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn why_nothing_can_be_traced_has_a_remedy() {
        let io = |number| failed("making", Path::new("/t/instances/x"))(io::Error::from_raw_os_error(number));
        let field = FormatError::NoField { probe: "sched/sched_switch", field: "next_pid" };
        for (error, wanted) in [
            (TraceError::NoProbe("net/netif_rx"), "; boot a kernel that has it"),
            (io(28), "/t/instances/x: No space left on device (os error 28); make room"),
            (io(12), "; free memory"),
            (FormatError::NoId("irq/softirq_entry").into(), "`ontime report`"),
            (field.into(), "; report it"),
        ] {
            let said = error.to_string();
            assert!(said.contains(wanted), "{said}");
        }
    }

    /// A page with one-word records, one per 10 ns, after `lost` lost ones.
    fn page(time: u64, records: usize, lost: u32) -> Vec<u8> {
        let missed = if lost > 0 { 3_u64 << 30 } else { 0 };
        let mut bytes = [time.to_ne_bytes(), ((8 * records as u64) | missed).to_ne_bytes()].concat();
        let words = [1 | 10 << 5, 0].repeat(records).into_iter().chain([lost, 0]);
        bytes.extend(words.flat_map(u32::to_ne_bytes));
        bytes
    }

    #[test]
    fn what_the_last_look_finds_unreadable_is_counted() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("events")).unwrap();
        let ring = dir.path().join("ring");
        fs::write(&ring, []).unwrap();
        let reach = Reach { cpu: 0, last: 0, gap: false };
        let bytes = page(100, 2, 0);
        let mut session = Session {
            rings: vec![Ring { file: File::open(&ring).unwrap(), reach }],
            instance: Instance { dir: dir.path().to_owned() },
            decoder: Decoder::default(),
            merger: Merger::default(),
            page: vec![0; bytes.len()],
            notes: Vec::new(),
            seen: 0,
            undecoded: 0,
        };
        assert!(session.poll().unwrap().is_empty());
        assert_eq!(session.read_counts(), (0, 0));
        // A record of an unknown probe: the decoder has no format for it.
        fs::write(&ring, bytes).unwrap();
        let (events, counts) = session.finish().unwrap();
        assert_eq!((events, counts), (Vec::new(), (2, 2)));
    }

    #[test]
    fn a_gap_is_told_where_it_begins_and_where_it_ends() {
        let mut reach = Reach { cpu: 3, last: 50, gap: false };
        let mut read = |bytes: Vec<u8>, horizon| {
            let decode = |time, _: &[u8]| Some(Event { time, cpu: 3, pid: 1, what: EventKind::KvmEntry });
            let events = reach.events(Page::new(&bytes).unwrap(), horizon, decode);
            events.iter().map(|event| (event.time, event.what)).collect::<Vec<_>>()
        };
        let (run, lost) = (EventKind::KvmEntry, |count| EventKind::Lost { count });
        assert_eq!(read(page(100, 2, 7), 0), [(50, lost(7)), (110, lost(0)), (110, run), (120, run)]);
        assert_eq!(read(page(130, 1, 0), 0), [(140, run)]);
        // Returned events cannot be taken back. A page without records still reports its gap.
        assert_eq!(read(page(900, 0, 2), 500), [(500, lost(2))]);
        assert_eq!(read(page(990, 1, 0), 500), [(1_000, lost(0)), (1_000, run)]);
    }
}
