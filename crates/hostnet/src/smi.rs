//! Counts system management interrupts (SMIs), during which the firmware stops all CPUs unnoticed by the kernel.
//!
//! In: the processor's SMI counter, through perf. Out: an [`SmiCount`]. Intel has a counter in an MSR, which the kernel
//! offers as event `smi` of event source `msr` (`arch/x86/events/msr.c`). AMD from family 17h on has event 0x2b of its
//! core counters (`ls_smi_rx`). An SMI stops every CPU, so one CPU per package is counted. If possible it is not a CPU
//! that is reserved for RT tenants.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::fd::FromRawFd;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::inventory::{Cpus, Inventory};
use crate::roots::Roots;
use crate::roots::{read, read_number};

/// The result of a count.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SmiCount {
    /// The count of the CPU with the most SMIs.
    Counted {
        /// Number of SMIs.
        most: u64,
        /// The CPU with that number.
        cpu: u32,
        /// Duration of the count.
        during: Duration,
    },
    /// This processor architecture has no SMIs.
    NoSuchThing,
    /// SMIs cannot be counted here; the reason.
    Unknown(String),
}

/// An event for `perf_event_open`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Event {
    source: u32,
    config: u64,
}

/// The event source of the processor's own events (`PERF_TYPE_RAW`).
const RAW: u32 = 4;
/// AMD's event `ls_smi_rx`, and the first family that has it.
const LS_SMI_RX: u64 = 0x2b;
const ZEN: u32 = 0x17;

/// A count in progress.
#[derive(Debug)]
pub struct Counting {
    since: Instant,
    counters: Vec<(u32, File)>,
}

impl Counting {
    /// Starts counting.
    ///
    /// # Errors
    /// If SMIs cannot be counted: the result to report instead.
    pub fn start(roots: &Roots, inventory: &Inventory) -> Result<Self, SmiCount> {
        let unknown = |why: &str| Err(SmiCount::Unknown(why.to_owned()));
        if !cfg!(target_arch = "x86_64") {
            return Err(SmiCount::NoSuchThing);
        }
        if inventory.kernel.hypervisor {
            return unknown("this host is itself a guest, which does not see the machine's SMIs");
        }
        let Some(event) = event(roots) else {
            return unknown("the kernel has no event for them: neither msr/smi/ nor AMD's ls_smi_rx");
        };
        let mut counters = Vec::new();
        for cpu in one_of_each_package(roots, &inventory.cpus) {
            match open(event, cpu) {
                Ok(counter) => counters.push((cpu, counter)),
                Err(error) => return Err(SmiCount::Unknown(refused(&error))),
            }
        }
        if counters.is_empty() {
            return unknown("the kernel does not say which CPUs are online");
        }
        Ok(Self { since: Instant::now(), counters })
    }

    /// Ends the count, at least `at_least` after its start.
    pub fn finish(mut self, at_least: Duration) -> SmiCount {
        std::thread::sleep(at_least.saturating_sub(self.since.elapsed()));
        let during = self.since.elapsed();
        let mut most = (0, 0);
        for (cpu, counter) in &mut self.counters {
            let mut count = [0; 8];
            match counter.read_exact(&mut count) {
                Ok(()) => most = most.max((u64::from_ne_bytes(count), *cpu)),
                Err(error) => return SmiCount::Unknown(format!("the counter of CPU {cpu} cannot be read: {error}")),
            }
        }
        SmiCount::Counted { most: most.0, cpu: most.1, during }
    }
}

fn event(roots: &Roots) -> Option<Event> {
    let msr = roots.sys.join("bus/event_source/devices/msr");
    if let Some(config) = read(&msr.join("events/smi")).and_then(|text| config_of(&text)) {
        return Some(Event { source: read_number(&msr.join("type"))?, config });
    }
    let cpu = read(&roots.proc.join("cpuinfo")).unwrap_or_default();
    let value = |key: &str| cpu.lines().find_map(|line| line.strip_prefix(key)?.trim_start().strip_prefix(':'));
    let family: u32 = value("cpu family")?.trim().parse().ok()?;
    let counts = roots.sys.join("bus/event_source/devices/cpu").exists();
    (value("vendor_id")?.trim() == "AuthenticAMD" && family >= ZEN && counts)
        .then_some(Event { source: RAW, config: LS_SMI_RX })
}

/// The number in `event=0x04`. According to the source's format, it is the whole configuration.
fn config_of(text: &str) -> Option<u64> {
    let number = text.strip_prefix("event=")?;
    match number.strip_prefix("0x") {
        Some(hexadecimal) => u64::from_str_radix(hexadecimal, 16).ok(),
        None => number.parse().ok(),
    }
}

/// A CPU whose package cannot be read counts as a package of its own.
fn one_of_each_package(roots: &Roots, cpus: &Cpus) -> Vec<u32> {
    let is_kept = |cpu| cpus.isolated.contains(cpu) || cpus.nohz_full.contains(cpu);
    let mut packages: BTreeMap<Result<i32, u32>, u32> = BTreeMap::new();
    for cpu in cpus.online.iter() {
        let topology = roots.sys.join(format!("devices/system/cpu/cpu{cpu}/topology"));
        let package = read_number(&topology.join("physical_package_id")).ok_or(cpu);
        let chosen = packages.entry(package).or_insert(cpu);
        if is_kept(*chosen) && !is_kept(cpu) {
            *chosen = cpu;
        }
    }
    packages.into_values().collect()
}

/// The first version of `struct perf_event_attr` (`include/uapi/linux/perf_event.h`).
#[repr(C)]
#[derive(Default)]
struct Attributes {
    source: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    bp_type: u32,
    config1: u64,
}

const FD_CLOEXEC: libc::c_ulong = 8;

fn open(event: Event, cpu: u32) -> std::io::Result<File> {
    const SIZE: u32 = 64;
    const { assert!(size_of::<Attributes>() == SIZE as usize) };
    let attributes = Attributes { source: event.source, size: SIZE, config: event.config, ..Attributes::default() };
    let cpu = i32::try_from(cpu).map_err(std::io::Error::other)?;
    let (every_process, no_group): (libc::pid_t, libc::c_int) = (-1, -1);
    // SAFETY: the attributes have the size that they state, and outlive the call, which only reads them.
    let fd = unsafe {
        libc::syscall(libc::SYS_perf_event_open, &raw const attributes, every_process, cpu, no_group, FD_CLOEXEC)
    };
    let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0).ok_or_else(std::io::Error::last_os_error)?;
    // SAFETY: the kernel has just created this descriptor for this process, and it has no other owner.
    Ok(unsafe { File::from_raw_fd(fd) })
}

fn refused(error: &std::io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => {
            "the kernel lets only root, or CAP_PERFMON, count (kernel.perf_event_paranoid; under lockdown \
             confidentiality not even these)"
                .to_owned()
        }
        _ => format!("perf_event_open failed: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::cpus::CpuSet;

    fn roots(files: &[(&str, &str)]) -> (tempfile::TempDir, Roots) {
        let tree = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let file = tree.path().join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        let roots = Roots { proc: tree.path().join("proc"), sys: tree.path().join("sys"), ..Roots::default() };
        (tree, roots)
    }

    #[test]
    fn the_event_is_the_msr_sources_or_amds() {
        let msr = "sys/bus/event_source/devices/msr";
        let core = ("sys/bus/event_source/devices/cpu/type", "4\n");
        let zen = ("proc/cpuinfo", "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\n");
        let (kind, smi) = (format!("{msr}/type"), format!("{msr}/events/smi"));
        for (files, wanted) in [
            (&[(kind.as_str(), "12\n"), (&smi, "event=0x04\n")][..], Some((12, 4))),
            (&[(&kind, "9\n"), (&smi, "event=7\n"), core, zen], Some((9, 7))),
            (&[core, zen], Some((4, 0x2b))),
            // A source without the event, as on AMD; an AMD processor before Zen; no core counters, as in some guests;
            // Intel's source without the event; a file that cannot be read.
            (&[(&kind, "12\n"), core, zen], Some((4, 0x2b))),
            (&[core, ("proc/cpuinfo", "vendor_id\t: AuthenticAMD\ncpu family\t: 16\n")], None),
            (&[zen], None),
            (&[core, ("proc/cpuinfo", "vendor_id\t: GenuineIntel\ncpu family\t: 30\n")], None),
            (&[(&kind, "12\n"), (&smi, "umask=1\n")], None),
            (&[], None),
        ] {
            let (_tree, roots) = roots(files);
            let found = event(&roots).map(|event| (event.source, event.config));
            assert_eq!(found, wanted, "{files:?}");
        }
    }

    #[test]
    fn cpus_that_are_kept_free_are_disturbed_only_where_there_is_no_other() {
        let package = |cpu: u32, package: &'static str| {
            (format!("sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"), package)
        };
        let all = [package(0, "0"), package(1, "0"), package(2, "1"), package(3, "1"), package(4, "7")];
        let files: Vec<(&str, &str)> = all.iter().map(|(name, text)| (name.as_str(), *text)).collect();
        let (_tree, roots) = roots(&files);
        let list = |text: &str| CpuSet::from_list(text).unwrap();
        let cpus = Cpus { online: list("0-4"), isolated: list("0,4"), nohz_full: list("2-3"), ..Cpus::default() };
        assert_eq!(one_of_each_package(&roots, &cpus), [1, 2, 4]);
        let cpus = Cpus { online: list("1-3"), ..Cpus::default() };
        assert_eq!(one_of_each_package(&roots, &cpus), [1, 2]);
        assert!(one_of_each_package(&roots, &Cpus::default()).is_empty());
    }

    #[test]
    fn a_cpu_whose_package_cannot_be_read_is_counted_by_itself() {
        let package = |cpu: u32| format!("sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id");
        let names = [0, 1, 3, 4, 5].map(package);
        let texts = ["0\n", "0\n", "-1\n", "-1\n", "?\n"];
        let files: Vec<(&str, &str)> = names.iter().map(String::as_str).zip(texts).collect();
        let (_tree, roots) = roots(&files);
        let cpus = Cpus { online: CpuSet::from_list("0-5").unwrap(), ..Cpus::default() };
        let mut counted = one_of_each_package(&roots, &cpus);
        counted.sort_unstable();
        assert_eq!(counted, [0, 2, 3, 5]);
    }

    #[test]
    fn a_guest_and_a_kernel_without_the_event_say_why_nothing_is_counted() {
        let (_tree, roots) = roots(&[]);
        let mut inventory = Inventory::default();
        let why = |inventory: &Inventory| match Counting::start(&roots, inventory).map(|_| ()) {
            Err(SmiCount::Unknown(why)) => why,
            Err(SmiCount::NoSuchThing) if !cfg!(target_arch = "x86_64") => String::new(),
            other => panic!("{other:?}"),
        };
        let no_event = why(&inventory);
        assert!(no_event.is_empty() || no_event.contains("no event"), "{no_event}");
        inventory.kernel.hypervisor = true;
        let guest = why(&inventory);
        assert!(guest.is_empty() || guest.contains("itself a guest"), "{guest}");
        assert!(refused(&std::io::Error::from_raw_os_error(libc::EACCES)).contains("CAP_PERFMON"));
        assert!(refused(&std::io::Error::from_raw_os_error(libc::EMFILE)).contains("perf_event_open failed"));
    }

    /// An event that every processor has, in place of an SMI: the software source's CPU clock, which counts by itself.
    #[test]
    fn what_the_kernel_counts_is_read() {
        let (source, cpu_clock) = (1, 0);
        let counter = match open(Event { source, config: cpu_clock }, 0) {
            Ok(counter) => counter,
            Err(error) => return println!("not counted here: {}", refused(&error)),
        };
        let counting = Counting { since: Instant::now(), counters: vec![(0, counter)] };
        let at_least = Duration::from_millis(20);
        match counting.finish(at_least) {
            SmiCount::Counted { most, cpu: 0, during } => assert!(most > 0 && during >= at_least, "{most} {during:?}"),
            other => panic!("{other:?}"),
        }
    }
}
