//! A daemon for a test, with directories, network namespace and simulated debugfs of its own, and guests that are real
//! QEMU processes.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test ends by panicking")]
#![allow(dead_code, reason = "each test file uses a part")]

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

/// The product's binary. The laboratory's test of real hosts uses this file too; there it is the binary beside the
/// test's.
pub(crate) fn ontime() -> PathBuf {
    let beside = || {
        let path = std::env::current_exe().unwrap().ancestors().nth(2).unwrap().join("ontime");
        assert!(path.is_file(), "{} is not built: cargo build -p ontime", path.display());
        path
    };
    option_env!("CARGO_BIN_EXE_ontime").map_or_else(beside, PathBuf::from)
}

/// Whether daemons can be tested here. Prints what is missing.
pub(crate) fn possible() -> bool {
    let missing = if !rustix::process::geteuid().is_root() {
        Some("root")
    } else if !works(Command::new("ip").arg("-V")) {
        Some("ip (iproute2)")
    } else if !works(Command::new("qemu-system-x86_64").arg("--version")) {
        Some("qemu-system-x86_64")
    } else {
        None
    };
    if let Some(missing) = missing {
        println!("SKIPPED: this test needs {missing}");
    }
    missing.is_none()
}

fn works(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// The repository.
pub(crate) const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// A program of Debian's package `prometheus`, unpacked by `scripts/prometheus.sh` (`make test` runs it), or in PATH.
/// Elsewhere, prints what is missing.
pub(crate) fn tool(name: &str) -> Option<PathBuf> {
    let unpacked = Path::new(ROOT).join("target/prometheus/usr/bin").join(name);
    let path = std::env::var_os("PATH").unwrap();
    let mut found = std::iter::once(unpacked).chain(std::env::split_paths(&path).map(|dir| dir.join(name)));
    let found = found.find(|file| file.is_file());
    if found.is_none() {
        println!("SKIPPED: this test needs {name} (scripts/prometheus.sh)");
    }
    found
}

/// Runs promtool, which must succeed. Returns what it prints.
pub(crate) fn promtool(tool: &Path, args: &[&str], input: &str) -> String {
    let mut command = Command::new(tool);
    command.args(args).current_dir(Path::new(ROOT).join("packaging/prometheus"));
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let out = child.wait_with_output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "promtool {args:?}: {said}");
    said
}

/// A CPU on which this process, and so its guests, may run.
pub(crate) fn a_cpu() -> usize {
    let may = rustix::thread::sched_getaffinity(None).unwrap();
    (0..rustix::thread::CpuSet::MAX_CPU).find(|cpu| may.is_set(*cpu)).unwrap()
}

/// A VM name that no other run of the tests uses.
pub(crate) fn name(test: &str) -> String {
    format!("{test}-{}", std::process::id())
}

/// Waits until `done` returns a value, up to 60 s, because the machine may have other work.
pub(crate) fn until<T>(what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(value) = done() {
            return value;
        }
        assert!(Instant::now() < end, "waited 60 s in vain: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A daemon caps every real-time thread that it finds, including other tests' guests, so only one daemon runs at a
/// time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The directories and the network namespace of a test.
pub(crate) struct Site {
    _alone: MutexGuard<'static, ()>,
    dir: tempfile::TempDir,
    netns: String,
}

static COUNT: AtomicU32 = AtomicU32::new(0);

/// Removes namespaces of interrupted tests: `ontime-PID-NUMBER...` of processes that no longer exist.
fn remove_abandoned() {
    for name in fs::read_dir("/run/netns").into_iter().flatten().flatten().map(|entry| entry.file_name()) {
        let name = name.to_string_lossy();
        let owner = name.strip_prefix("ontime-").and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = Command::new("ip").args(["netns", "delete", &name]).status();
        }
    }
}

/// A file that exempts every cgroup from caps. A test of the census removes it.
pub(crate) const EXEMPT: &str = "daemon.conf.d/exempt.toml";

/// The fair server's runtime in the simulated debugfs, the kernel's default.
pub(crate) const FAIR: &str = "50000000";

impl Site {
    /// A site where daemons can be tested. Elsewhere, prints what is missing.
    pub(crate) fn if_possible() -> Option<Self> {
        possible().then(Self::new)
    }

    pub(crate) fn new() -> Self {
        let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let dir = tempfile::tempdir().unwrap();
        for name in ["run", "state", "etc", "debug"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        remove_abandoned();
        let netns = format!("ontime-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::SeqCst));
        assert!(Command::new("ip").args(["netns", "add", &netns]).status().unwrap().success());
        let site = Self { _alone: alone, dir, netns };
        for cpu in 0..std::thread::available_parallelism().unwrap().get() {
            let server = site.dir.path().join(format!("debug/sched/fair_server/cpu{cpu}"));
            fs::create_dir_all(&server).unwrap();
            fs::write(server.join("runtime"), FAIR).unwrap();
            fs::write(server.join("period"), "1000000000").unwrap();
        }
        // The machine may have other real-time threads, such as those of another test.
        fs::create_dir(site.path("etc/daemon.conf.d")).unwrap();
        site.configure(EXEMPT, "[cap]\nuncapped = [\"/\"]\n");
        site
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn netns(&self) -> &str {
        &self.netns
    }

    pub(crate) fn ip(&self, args: &[&str]) {
        assert!(Command::new("ip").args(["-n", &self.netns]).args(args).status().unwrap().success(), "ip {args:?}");
    }

    pub(crate) fn configure(&self, file: &str, text: &str) {
        fs::write(self.path("etc").join(file), text).unwrap();
    }

    fn directories(&self) -> Vec<String> {
        [("--run-dir", "run"), ("--state-dir", "state"), ("--config-dir", "etc"), ("--debugfs", "debug")]
            .into_iter()
            .flat_map(|(flag, name)| [flag.to_owned(), self.path(name).display().to_string()])
            .collect()
    }

    /// The command `ontime ARGS` in the namespace.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        self.command_as(&[], args)
    }

    /// The command `BEFORE ontime ARGS` in the namespace.
    pub(crate) fn command_as(&self, before: &[&str], args: &[&str]) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.netns]).args(before).arg(ontime());
        command.args(args).args(self.directories());
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    pub(crate) fn json(&self, args: &[&str]) -> Value {
        let out = self.run(args);
        serde_json::from_slice(&out.stdout).unwrap_or_else(|error| panic!("{args:?}: {error}: {out:?}"))
    }

    /// Makes the daemon look, as the libvirt hook does.
    pub(crate) fn poke(&self) {
        fs::File::create(self.path("run/poke")).unwrap();
    }

    /// Sends a real request with curl. Returns the HTTP status and the body.
    pub(crate) fn curl(&self, args: &[&str]) -> (u16, String) {
        let socket = self.path("run/ontime.sock");
        let out = Command::new("curl")
            .args(["-sS", "-w", "\n%{http_code}", "--unix-socket"])
            .arg(&socket)
            .args(args)
            .output()
            .unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        let (body, code) = text.rsplit_once('\n').unwrap();
        (code.parse().unwrap(), body.to_owned())
    }

    pub(crate) fn fair_server(&self) -> Vec<String> {
        let mut all: Vec<(PathBuf, String)> = fs::read_dir(self.path("debug/sched/fair_server"))
            .unwrap()
            .map(|cpu| cpu.unwrap().path().join("runtime"))
            .map(|path| (path.clone(), fs::read_to_string(path).unwrap()))
            .collect();
        all.sort();
        all.into_iter().map(|(_, value)| value).collect()
    }

    pub(crate) fn protected(&self) -> bool {
        self.fair_server().iter().all(|value| value == FAIR)
    }

    pub(crate) fn unprotected(&self) -> bool {
        self.fair_server().iter().all(|value| value == "0")
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = self.run(&["reset"]);
        let _ = Command::new("ip").args(["netns", "del", &self.netns]).status();
    }
}

/// A running daemon. When dropped, it is killed, and its guardian is waited for.
pub(crate) struct Daemon {
    child: Child,
    log: PathBuf,
}

impl Daemon {
    pub(crate) fn start(site: &Site) -> Self {
        Self::start_as(site, &[])
    }

    /// Starts `BEFORE ontime daemon`.
    pub(crate) fn start_as(site: &Site, before: &[&str]) -> Self {
        let log = site.path("log");
        let file = fs::File::create(&log).unwrap();
        let child = site.command_as(before, &["daemon"]).stderr(file).stdout(Stdio::null()).spawn().unwrap();
        let daemon = Self { child, log };
        until("the daemon answers", || site.run(&["status"]).stdout.starts_with(b"method").then_some(()));
        daemon
    }

    /// The daemon's process number (`ip netns exec` becomes the daemon by exec).
    pub(crate) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.pid()).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    pub(crate) fn kill(&mut self) {
        self.signal(rustix::process::Signal::KILL);
        self.child.wait().unwrap();
    }

    /// Sends SIGTERM and waits for the end.
    pub(crate) fn stop(&mut self) -> std::process::ExitStatus {
        self.signal(rustix::process::Signal::TERM);
        self.child.wait().unwrap()
    }

    /// The guardian's process number.
    pub(crate) fn guardian(&self) -> i32 {
        let children = format!("/proc/{0}/task/{0}/children", self.pid());
        until("the guardian runs", || fs::read_to_string(&children).ok()?.split_whitespace().next()?.parse().ok())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", self.pid())).unwrap_or_default();
            self.kill();
            // The guardian still needs the simulated debugfs.
            for child in children.split_whitespace() {
                until("the guardian is done", || (!Path::new(&format!("/proc/{child}/stat")).exists()).then_some(()));
            }
        }
    }
}

/// A QEMU process with software emulation. Its vCPU is stopped, or spins in a boot sector that jumps to itself.
pub(crate) struct Guest(Child, Option<tempfile::NamedTempFile>);

impl Guest {
    pub(crate) fn stopped(name: &str) -> Self {
        Self(qemu(name).arg("-S").spawn().unwrap(), None)
    }

    /// A guest with this many vCPUs, which are stopped.
    pub(crate) fn wide(name: &str, vcpus: usize) -> Self {
        let guest = Self(qemu(name).args(["-S", "-smp", &vcpus.to_string()]).spawn().unwrap(), None);
        until("QEMU has all vCPU threads", || (guest.policies().len() == vcpus).then_some(()));
        guest
    }

    /// Policy and priority of each vCPU thread.
    pub(crate) fn policies(&self) -> Vec<(i32, i32)> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap().flatten().map(|task| task.path());
        let is_vcpu = |task: &PathBuf| fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.starts_with("CPU "));
        tasks.filter(is_vcpu).map(|task| policy(task.join("stat"))).collect()
    }

    pub(crate) fn spinning(name: &str) -> Self {
        let mut sector = vec![0u8; 512];
        // jmp $; boot signature.
        sector[..2].copy_from_slice(&[0xeb, 0xfe]);
        sector[510..].copy_from_slice(&[0x55, 0xaa]);
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), &sector).unwrap();
        let drive = format!("file={},format=raw,if=floppy", file.path().display());
        Self(qemu(name).args(["-boot", "a", "-drive", &drive]).spawn().unwrap(), Some(file))
    }

    pub(crate) fn pid(&self) -> i32 {
        self.0.id() as i32
    }

    /// The thread of vCPU 0.
    pub(crate) fn vcpu(&self) -> i32 {
        let tasks = format!("/proc/{}/task", self.pid());
        until("QEMU has a vCPU thread", || {
            fs::read_dir(&tasks).ok()?.flatten().find_map(|task| {
                let comm = fs::read_to_string(task.path().join("comm")).ok()?;
                comm.starts_with("CPU 0/").then(|| task.file_name().to_str().unwrap().parse().unwrap())
            })
        })
    }

    pub(crate) fn policy(&self) -> (i32, i32) {
        policy(format!("/proc/{}/task/{}/stat", self.pid(), self.vcpu()))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn qemu(name: &str) -> Command {
    let mut command = Command::new("qemu-system-x86_64");
    command
        .args(["-accel", "tcg", "-m", "32", "-nodefaults", "-display", "none", "-no-user-config", "-name"])
        .arg(format!("guest={name},debug-threads=on"))
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    command
}

/// Policy and real-time priority from a `stat` file (proc(5), fields 41 and 40).
pub(crate) fn policy(stat: impl AsRef<Path>) -> (i32, i32) {
    let text = fs::read_to_string(stat).unwrap();
    let fields: Vec<&str> = text[text.rfind(')').unwrap() + 2..].split(' ').collect();
    (fields[41 - 3].trim().parse().unwrap(), fields[40 - 3].parse().unwrap())
}
