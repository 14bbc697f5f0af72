//! `discover` on this host without and with 100 processes of an ordinary user that look like VMs and have 19,900
//! descriptors, 200 threads and a command line of 100 KiB each. Needs root to run them as another user. The time of a
//! discovery is the time by which they delay the placement of a new RT VM.

#![allow(missing_docs)] // criterion's macros make public functions without any

use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use criterion::{Criterion, criterion_group};
use ontime_tenants::{Rules, Sources, discover};

const PROCESSES: usize = 100;
const DESCRIPTORS: u64 = 19_900;
const THREADS: usize = 200;
const USER: u32 = 65_533;
const HOSTILE: &str = "ONTIME_BENCH_HOSTILE";

/// What each process does: opens descriptors, creates threads, and waits for its end.
fn be_hostile() -> io::Result<()> {
    let _open = (0..DESCRIPTORS).map(|_| rustix::io::dup(io::stdin())).collect::<Result<Vec<_>, _>>()?;
    for _ in 0..THREADS {
        std::thread::Builder::new().stack_size(16 << 10).spawn(std::thread::park)?;
    }
    io::stdout().write_all(b".")?;
    io::stdout().flush()?;
    io::stdin().read(&mut [0]).map(|_| ())
}

/// The hostile process; ends when this is dropped.
struct Hostile(Child);

impl Hostile {
    fn start(program: &Path) -> io::Result<Self> {
        let long = "x".repeat(100 << 10);
        let mut command = Command::new(program);
        command.args(["-name", "web", "-append", &long]).env(HOSTILE, "1").uid(USER).gid(USER);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        if let Some(out) = &mut child.stdout {
            out.read_exact(&mut [0])?;
        }
        Ok(Self(child))
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

fn hostile_host(directory: &Path) -> io::Result<Vec<Hostile>> {
    let limit = rustix::process::Rlimit { current: Some(DESCRIPTORS + 100), maximum: Some(DESCRIPTORS + 100) };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit)?;
    let program = directory.join("kvm");
    std::fs::copy(std::env::current_exe()?, &program)?;
    (0..PROCESSES).map(|_| Hostile::start(&program)).collect()
}

/// CPU time of this thread, so that the machine's load does not affect the figure.
fn cpu_time<T>(looks: u64, look: impl Fn() -> T) -> Duration {
    let now = || {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
    };
    let start = now();
    (0..looks).for_each(|_| drop(look()));
    now().saturating_sub(start)
}

fn bench(criterion: &mut Criterion) {
    let Ok(directory) =
        tempfile::Builder::new().permissions(std::os::unix::fs::PermissionsExt::from_mode(0o755)).tempdir()
    else {
        return;
    };
    let (sources, rules) = (Sources::host(), Rules::default());
    let mut group = criterion.benchmark_group("discover_with_hostile_processes");
    group.sample_size(20).measurement_time(Duration::from_secs(10));
    group.bench_function("none", |bencher| bencher.iter_custom(|looks| cpu_time(looks, || discover(&sources, &rules))));
    let hostile = match hostile_host(directory.path()) {
        Ok(hostile) => hostile,
        Err(error) => return println!("SKIPPED: {error}"),
    };
    let found = discover(&sources, &rules);
    let theirs = found.tenants.iter().filter(|tenant| tenant.owner == USER).count();
    assert_eq!(theirs, PROCESSES, "{:?}", found.problems);
    found.problems.iter().filter(|one| one.word() == "not-read").for_each(|problem| println!("{problem}"));
    group.bench_function("100", |bencher| bencher.iter_custom(|looks| cpu_time(looks, || discover(&sources, &rules))));
    drop(hostile);
}

criterion_group!(benches, bench);

fn main() {
    if std::env::var_os(HOSTILE).is_some() {
        if let Err(error) = be_hostile() {
            eprintln!("{error}");
        }
        return;
    }
    benches();
    Criterion::default().configure_from_args().final_summary();
}
