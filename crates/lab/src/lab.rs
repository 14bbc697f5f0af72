//! An emulated host from start to end: boots, runs commands, is watched all the while.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::agent::outside::Connection;
use crate::agent::{Reply, Request, Stream};
use crate::error::{LabError, file};
use crate::images::{Images, OVERLAY, tail};
use crate::monitor::{InstructionLog, Monitor};
use crate::network;
use crate::qemu::{Clock, Console, Machine, RELEASE, capture};

/// What a console says when the host is beyond help.
const LAST_WORDS: [&str; 4] = ["Kernel panic", "LAB-FAILED", "double fault:", "Unable to mount root"];

/// What a kernel says of a breakpoint that nobody has set. It sets one for a moment where it changes its code (static
/// keys, `smp_text_poke_batch_finish`). Where one emulated CPU translates that code while another changes it back, the
/// emulator may miss the change: it asks whether the page has translations before it enters the page as writable, and
/// another CPU's first one may come between (QEMU's `tlb_set_page_full` and `tlb_protect_code`). The breakpoint stays
/// in the translation then.
const STALE_CODE: &str = "Oops: int3";

/// Prints the host's clock, its threads that run or are blocked (policy, priority, state, CPU time, kernel function,
/// command line) with the kernel stack of each blocked one, and the processes that started last.
const STATE: &str = "echo up $(cut -d' ' -f1 /proc/uptime) s; format=tid,cls,rtprio,ni,stat,time,wchan:24,args; \
    ps -eLo $format | awk 'NR == 1 || $5 ~ /^[RD]/' | cut -c1-150 | head -n 20; \
    for task in $(ps -eLo tid,stat | awk '$2 ~ /^D/ {print $1}' | head -n 5); do echo stack of $task:; head -n 8 \
    /proc/$task/stack; done; echo started last:; ps -eo pid,cls,rtprio,ni,stat,time,wchan:24,args --sort=start_time | \
    tail -n 12 | cut -c1-150; echo w > /proc/sysrq-trigger";

/// How long an answer to [`STATE`] may take, of real time.
const STATE_PATIENCE: Duration = Duration::from_secs(60);

/// How a command in the emulated host ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// As a shell gives it: 128 + N for signal N, 127 where it could not be started.
    pub status: i32,
    /// Its standard output.
    pub stdout: Vec<u8>,
    /// Its standard error.
    pub stderr: Vec<u8>,
}

impl Outcome {
    /// Its standard output as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Its standard output, where it succeeded.
    fn checked(self, argv: &[&str]) -> Result<String, LabError> {
        if self.status == 0 {
            return Ok(self.text());
        }
        let output = format!("status {}: {}{}", self.status, self.text(), String::from_utf8_lossy(&self.stderr));
        Err(LabError::Command { command: argv.join(" "), output: output.trim().to_owned() })
    }
}

/// The binaries that go into the emulated host.
#[derive(Debug, Clone)]
pub struct Programs {
    /// `ontime`, the program under test.
    pub ontime: PathBuf,
    /// `ontime-lab`, which runs the commands there ([`crate::agent`]).
    pub lab: PathBuf,
}

/// An emulated host. It ends when this is dropped.
#[derive(Debug)]
pub struct Lab {
    dir: PathBuf,
    emulator: Child,
    connection: Option<Connection>,
    clock: Clock,
    takes_turns: bool,
    /// In which steps what arrives at the RT NIC is released, us, where it is.
    release_us: Option<u32>,
    silence: Duration,
    next: u64,
}

impl Lab {
    /// Starts an emulated host and waits until its user land is up. `dir` receives `files/` (`/lab` inside),
    /// `console.log` and the captures; `programs` go to `/usr/local/bin` inside. Call [`crate::isolate::enter`] first.
    ///
    /// # Errors
    /// The machine cannot be; a program is missing; the host hangs, crashes or ends while it boots.
    pub fn start(machine: &Machine, images: &Images, dir: &Path, programs: &Programs) -> Result<Self, LabError> {
        machine.check()?;
        fs::create_dir_all(dir.join("files")).map_err(file("make", dir))?;
        let dir = dir.canonicalize().map_err(file("find", dir))?;
        let initrd = dir.join("initrd");
        with_overlay(&images.initrd(machine.kernel), programs, &initrd)?;
        if !machine.client_cpu {
            network::set_up()?;
        }
        match Self::boot(machine, images, &dir, &initrd) {
            // A kernel changes most of its code while it boots. Nothing of the caller's has begun then.
            Err(error @ LabError::StaleCode { .. }) => {
                eprintln!("ontime-lab: {error}; it boots again");
                Self::boot(machine, images, &dir, &initrd)
            }
            other => other,
        }
    }

    fn boot(machine: &Machine, images: &Images, dir: &Path, initrd: &Path) -> Result<Self, LabError> {
        for old in ["agent.sock", "qmp.sock", "console.log", "rt.pcap", "bulk.pcap"] {
            // Nothing of an earlier run in the same directory may be taken for this one's.
            let _ = fs::remove_file(dir.join(old));
        }
        let arguments = machine.arguments(images, dir, initrd);
        let (program, rest) = arguments.split_first().ok_or_else(|| LabError::Machine("no emulator".into()))?;
        let mut command = Command::new(program);
        command.args(rest).env("QEMU_MODULE_DIR", images.emulator_modules());
        if machine.console == Console::Log {
            let log = File::create(dir.join("emulator.log")).map_err(file("write", dir))?;
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        }
        let emulator = command.spawn().map_err(|source| LabError::Program {
            program: program.clone(),
            source,
            remedy: "remove the lab's cache so that its images are built again",
        })?;
        let mut lab = Self {
            dir: dir.to_path_buf(),
            emulator,
            connection: None,
            clock: machine.clock,
            takes_turns: machine.takes_turns(),
            release_us: machine.releases_arrivals().then_some(machine.release_us),
            silence: Duration::from_secs(machine.silence_seconds),
            next: 0,
        };
        if machine.console == Console::Log {
            lab.wait_until_up()?;
        }
        Ok(lab)
    }

    /// The capture of a NIC (`rt` or `bulk`) made outside the emulated host.
    pub fn capture(&self, nic: &str) -> PathBuf {
        capture(&self.dir, nic)
    }

    /// Runs a command and keeps its output.
    ///
    /// # Errors
    /// See [`Lab::run`].
    pub fn output(&mut self, argv: &[&str], limit: Duration) -> Result<Outcome, LabError> {
        self.keep(argv, false, limit)
    }

    /// Runs a command that must succeed, and gives its standard output.
    ///
    /// # Errors
    /// [`LabError::Command`] with what it printed where it fails; else as [`Lab::run`].
    pub fn check(&mut self, argv: &[&str], limit: Duration) -> Result<String, LabError> {
        self.output(argv, limit)?.checked(argv)
    }

    /// As [`Lab::check`], at nice -20, as is whatever the command starts: for short questions to a host that leaves
    /// normal priority little CPU time.
    ///
    /// # Errors
    /// As [`Lab::check`].
    pub fn ask(&mut self, argv: &[&str], limit: Duration) -> Result<String, LabError> {
        self.keep(argv, true, limit)?.checked(argv)
    }

    fn keep(&mut self, argv: &[&str], ahead: bool, limit: Duration) -> Result<Outcome, LabError> {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let status = self.order(argv, ahead, &[], limit, &mut |stream, bytes| match stream {
            Stream::Out => stdout.extend_from_slice(bytes),
            Stream::Err => stderr.extend_from_slice(bytes),
        })?;
        Ok(Outcome { status, stdout, stderr })
    }

    /// Runs a command; `sink` gets its output as it comes. Returns its status.
    ///
    /// # Errors
    /// The host hangs, crashes or ends; the command takes longer than `limit` of real time (it is killed then).
    pub fn run(
        &mut self,
        argv: &[&str],
        environment: &[(&str, &str)],
        limit: Duration,
        sink: &mut dyn FnMut(Stream, &[u8]),
    ) -> Result<i32, LabError> {
        self.order(argv, false, environment, limit, sink)
    }

    fn order(
        &mut self,
        argv: &[&str],
        ahead: bool,
        environment: &[(&str, &str)],
        limit: Duration,
        sink: &mut dyn FnMut(Stream, &[u8]),
    ) -> Result<i32, LabError> {
        let id = self.begin(argv, ahead, environment)?;
        match self.follow(id, limit, sink)? {
            Some(status) => Ok(status),
            None => {
                let state = self.state();
                self.send(&Request::Kill { id })?;
                Err(LabError::Timeout { command: argv.join(" "), seconds: limit.as_secs(), state })
            }
        }
    }

    /// Starts a command; gives its number.
    fn begin(&mut self, argv: &[&str], ahead: bool, environment: &[(&str, &str)]) -> Result<u64, LabError> {
        self.next += 1;
        let id = self.next;
        let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let words = argv.iter().map(|word| (*word).to_owned()).collect();
        self.send(&Request::Run { id, argv: words, environment, ahead })?;
        Ok(id)
    }

    /// Passes on what a command prints until it ends (its status) or `limit` of real time is over.
    fn follow(
        &mut self,
        id: u64,
        limit: Duration,
        sink: &mut dyn FnMut(Stream, &[u8]),
    ) -> Result<Option<i32>, LabError> {
        let end = Instant::now() + limit;
        loop {
            match self.reply()? {
                Some(Reply::Output { id: of, stream, bytes }) if of == id => {
                    let bytes = STANDARD.decode(bytes).map_err(|error| LabError::Protocol(error.to_string()))?;
                    sink(stream, &bytes);
                }
                Some(Reply::Exit { id: of, status }) if of == id => return Ok(Some(status)),
                _ => {}
            }
            if Instant::now() > end {
                return Ok(None);
            }
        }
    }

    /// What the host's threads do at this moment, as far as it still answers.
    fn state(&mut self) -> String {
        let mut said = Vec::new();
        let asked = self.begin(&["sh", "-c", STATE], true, &[]);
        let answered =
            asked.and_then(|id| self.follow(id, STATE_PATIENCE, &mut |_, bytes| said.extend_from_slice(bytes)));
        if let Err(error) = answered {
            said.extend_from_slice(error.to_string().as_bytes());
        }
        String::from_utf8_lossy(&said).trim_end().to_owned()
    }

    /// Whether the emulated host still lives; call it now and then while waiting for something else.
    ///
    /// # Errors
    /// It hangs, crashed or ended.
    pub fn alive(&mut self) -> Result<(), LabError> {
        while self.reply_within(Duration::ZERO)?.is_some() {}
        Ok(())
    }

    /// Stamps arrivals on the RT NIC exactly from now on (or no longer). On the real clock, and from clients that have
    /// a CPU of the emulated machine, they always are.
    ///
    /// # Errors
    /// The emulator refuses.
    pub fn stamp_arrivals(&mut self, on: bool) -> Result<(), LabError> {
        self.set_release("status", if on { "on" } else { "off" }.into())
    }

    /// Has what arrives at the RT NIC released in these steps of its clock, us; `None`: as it was started. From the
    /// next release on, on the virtual clock, while arrivals are stamped ([`Self::stamp_arrivals`]).
    ///
    /// # Errors
    /// The emulator refuses.
    pub fn release_every(&self, us: Option<u32>) -> Result<(), LabError> {
        self.release_us.map_or(Ok(()), |default| self.set_release("interval", us.unwrap_or(default).into()))
    }

    /// Of the object that releases arrivals, where there is one.
    fn set_release(&self, property: &str, value: serde_json::Value) -> Result<(), LabError> {
        if self.release_us.is_none() {
            return Ok(());
        }
        let path = format!("/objects/{RELEASE}");
        let arguments = serde_json::json!({ "path": path, "property": property, "value": value });
        Monitor::open(&self.dir)?.ask("qom-set", &arguments).map(drop)
    }

    /// A log of every instruction of the host and its guests, to this pipe; it is off at first. While it is kept,
    /// nothing else can be asked of the emulator ([`Lab::stamp_arrivals`]).
    ///
    /// # Errors
    /// The clock is the real one, on which it would show a host that is thousands of times too slow; the host has
    /// several CPUs, whose lines nothing tells apart yet; the emulator refuses.
    pub fn instruction_log(&self, pipe: &Path) -> Result<InstructionLog, LabError> {
        if self.clock == Clock::Real {
            let said = "instructions are traced on the virtual clock, which such a trace does not slow down; use \
                --clock virtual";
            return Err(LabError::Machine(said.into()));
        }
        if self.takes_turns {
            let said = "instructions are traced on one CPU; leave out --cpus and --client-cpu";
            return Err(LabError::Machine(said.into()));
        }
        InstructionLog::open(&self.dir, pipe)
    }

    /// Ends the emulated host in order.
    ///
    /// # Errors
    /// It does not end; it is killed then all the same.
    pub fn power_off(mut self) -> Result<(), LabError> {
        self.send(&Request::PowerOff)?;
        let end = Instant::now() + self.silence;
        while Instant::now() < end {
            if self.emulator.try_wait().map_err(file("wait for the emulator in", &self.dir))?.is_some() {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(50));
        }
        Err(self.hung(self.silence.as_secs()))
    }

    /// Waits until the emulator ends by itself: for a machine with a shell on its console.
    ///
    /// # Errors
    /// The system refuses to wait.
    pub fn wait(mut self) -> Result<i32, LabError> {
        let status = self.emulator.wait().map_err(file("wait for the emulator in", &self.dir))?;
        Ok(status.code().unwrap_or(1))
    }

    fn wait_until_up(&mut self) -> Result<(), LabError> {
        let socket = self.dir.join("agent.sock");
        let start = Instant::now();
        loop {
            match Connection::open(&socket) {
                Ok(connection) => break self.connection = Some(connection),
                Err(error) if start.elapsed() > Duration::from_secs(20) => return Err(error),
                Err(_) => thread::sleep(Duration::from_millis(50)),
            }
            self.still_running()?;
        }
        loop {
            if let Some(Reply::Ready { .. }) = self.reply()? {
                return Ok(());
            }
        }
    }

    fn send(&mut self, request: &Request) -> Result<(), LabError> {
        match &mut self.connection {
            Some(connection) => connection.send(request),
            None => Err(LabError::Protocol("this machine has a shell on its console, and no agent".into())),
        }
    }

    fn reply(&mut self) -> Result<Option<Reply>, LabError> {
        self.reply_within(Duration::from_millis(250))
    }

    fn reply_within(&mut self, limit: Duration) -> Result<Option<Reply>, LabError> {
        let Some(connection) = &mut self.connection else { return Ok(None) };
        if let Some(reply) = connection.next(limit) {
            return Ok(Some(reply));
        }
        let silence = connection.silence();
        self.still_running()?;
        if silence > self.silence {
            return Err(self.hung(self.silence.as_secs()));
        }
        Ok(None)
    }

    fn still_running(&mut self) -> Result<(), LabError> {
        let log = self.dir.join("console.log");
        let text = String::from_utf8_lossy(&fs::read(&log).unwrap_or_default()).into_owned();
        if let Some(crash) = crash(&text, self.clock, &log) {
            return Err(crash);
        }
        let Some(status) = self.emulator.try_wait().map_err(file("wait for the emulator in", &self.dir))? else {
            return Ok(());
        };
        let own = fs::read_to_string(self.dir.join("emulator.log")).unwrap_or_default();
        Err(LabError::Ended { status: status.to_string(), tail: format!("{}\n{own}", tail(&text, 10)), log })
    }

    fn hung(&self, seconds: u64) -> LabError {
        let log = self.dir.join("console.log");
        let text = String::from_utf8_lossy(&fs::read(&log).unwrap_or_default()).into_owned();
        LabError::Hung { seconds, tail: tail(&text, 10), log }
    }
}

/// What a console says of a host that is beyond help, if it is.
fn crash(console: &str, clock: Clock, log: &Path) -> Option<LabError> {
    let line = console.lines().find(|line| LAST_WORDS.iter().any(|words| line.contains(words)))?;
    let log = log.to_path_buf();
    if clock == Clock::Real && console.contains(STALE_CODE) {
        return Some(LabError::StaleCode { log });
    }
    Some(LabError::Crashed { line: line.to_owned(), log })
}

impl Drop for Lab {
    fn drop(&mut self) {
        // Already ended, or ended now: either way it is gone.
        let _ = self.emulator.kill();
        let _ = self.emulator.wait();
        let _ = fs::remove_file(self.dir.join("initrd"));
    }
}

/// The kernel's first user land with the programs and the lab's scripts in `/overlay`: the kernel unpacks archives that
/// follow each other.
fn with_overlay(initrd: &str, programs: &Programs, out: &Path) -> Result<(), LabError> {
    let mut archive = fs::read(initrd).map_err(file("read", initrd))?;
    archive.resize(archive.len().next_multiple_of(4), 0);
    for (name, path) in [("overlay/ontime", &programs.ontime), ("overlay/ontime-lab", &programs.lab)] {
        cpio_file(&mut archive, name, &fs::read(path).map_err(file("read", path))?);
    }
    for (name, text) in OVERLAY {
        cpio_file(&mut archive, &format!("overlay/{name}"), text.as_bytes());
    }
    cpio_file(&mut archive, TRAILER, &[]);
    fs::write(out, &archive).map_err(file("write", out))
}

/// The name that ends an archive.
const TRAILER: &str = "TRAILER!!!";

/// Writes an archive of executable files that goes behind a guest's initrd.
///
/// # Errors
/// [`LabError::File`].
pub(crate) fn write_archive(files: &[(&str, &[u8])], out: &Path) -> Result<(), LabError> {
    let mut archive = Vec::new();
    for (name, data) in files {
        cpio_file(&mut archive, name, data);
    }
    cpio_file(&mut archive, TRAILER, &[]);
    if let Some(parent) = out.parent() {
        fs::create_dir_all(parent).map_err(file("make", parent))?;
    }
    fs::write(out, &archive).map_err(file("write", out))
}

/// An executable file in the kernel's archive format ("newc", Documentation/driver-api/early-userspace).
fn cpio_file(archive: &mut Vec<u8>, name: &str, data: &[u8]) {
    let [mode, links] = [0o100_755, 1];
    let fields = [0, mode, 0, 0, links, 0, data.len(), 0, 0, 0, 0, name.len() + 1, 0];
    archive.extend_from_slice(b"070701");
    for field in fields {
        archive.extend_from_slice(format!("{field:08X}").as_bytes());
    }
    archive.extend_from_slice(name.as_bytes());
    archive.push(0);
    archive.resize(archive.len().next_multiple_of(4), 0);
    archive.extend_from_slice(data);
    archive.resize(archive.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_breakpoint_that_nobody_set_is_the_emulators_and_other_crashes_are_not() {
        let log = Path::new("/x/console.log");
        let console = "[    5.2] Oops: int3: 0000 [#1] SMP NOPTI\n[    5.3] Kernel panic - not syncing: Fatal \
            exception in interrupt\n";
        assert!(matches!(crash(console, Clock::Real, log), Some(LabError::StaleCode { .. })));
        // With one CPU there is nobody else to change the code.
        assert!(matches!(crash(console, Clock::Virtual, log), Some(LabError::Crashed { .. })));
        let other = "[    5.3] Kernel panic - not syncing: Attempted to kill init! exitcode=0x00007e00\n";
        assert!(
            matches!(crash(other, Clock::Real, log), Some(LabError::Crashed { line, .. }) if line.contains("kill init"))
        );
        assert!(crash("[    5.3] all is well\n", Clock::Real, log).is_none());
    }
}
