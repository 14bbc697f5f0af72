//! An emulated host from start to end: boots it, runs commands in it, and checks all the time that it lives.

use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::agent::outside::Connection;
use crate::agent::{Reply, Request, Stream};
use crate::error::{LabError, file, tail};
use crate::events::EVENTS;
use crate::images::{Images, OVERLAY};
use crate::isolate;
use crate::link::{self, Link, Way};
use crate::monitor::{LOG_OFF, Monitor, log_on};
use crate::network;
use crate::qemu::{Clients, Clock, Console, Machine, capture};

/// Console messages after which the host cannot be used any more.
const LAST_WORDS: [&str; 4] = ["Kernel panic", "LAB-FAILED", "double fault:", "Unable to mount root"];

/// The kernel's message for an unknown breakpoint. The kernel sets a breakpoint for a moment when it changes its code
/// (static keys, `smp_text_poke_batch_finish`). If one emulated CPU translates that code while another changes it back,
/// the emulator may miss the change: it checks whether the page has translations before it enters the page as writable,
/// and another CPU's first translation may come in between (QEMU's `tlb_set_page_full` and `tlb_protect_code`). The
/// breakpoint then stays in the translation.
const STALE_CODE: &str = "Oops: int3";

/// Prints the host's clock, its threads that run or are blocked (policy, priority, state, CPU time, kernel function,
/// command line) with the kernel stack of each blocked one, and the processes that started last.
const STATE: &str = "echo up $(cut -d' ' -f1 /proc/uptime) s; format=tid,cls,rtprio,ni,stat,time,wchan:24,args; \
    ps -eLo $format | awk 'NR == 1 || $5 ~ /^[RD]/' | cut -c1-150 | head -n 20; \
    for task in $(ps -eLo tid,stat | awk '$2 ~ /^D/ {print $1}' | head -n 5); do echo stack of $task:; head -n 8 \
    /proc/$task/stack; done; echo started last:; ps -eo pid,cls,rtprio,ni,stat,time,wchan:24,args --sort=start_time | \
    tail -n 12 | cut -c1-150; echo w > /proc/sysrq-trigger";

/// Limit of real time for the answer to [`STATE`].
const STATE_PATIENCE: Duration = Duration::from_secs(60);

/// Limit of real time for the end of a command that was killed.
const KILLED: Duration = Duration::from_secs(10);
/// By how many times the host is slower while its instructions are logged; so long may it be silent.
const LOGGED: u32 = 20;
/// A file in `/lab`: the emulator has taken what its monitor was told.
const TOLD: &str = "monitor-told";
/// Limit of the real time until the host sees that file.
const FOLLOWED: Duration = Duration::from_secs(60);

/// Least room on the disk of the lab's directory, bytes.
const ROOM: u64 = 1 << 20;

/// The result of a command in the emulated host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Exit status as in a shell: 128 + N for signal N, 127 if the command could not be started.
    pub status: i32,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
}

impl Outcome {
    /// Standard output as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Standard output, or an error if the command failed.
    fn checked(self, argv: &[&str]) -> Result<String, LabError> {
        if self.status == 0 {
            return Ok(self.text());
        }
        let output = format!("status {}: {}{}", self.status, self.text(), String::from_utf8_lossy(&self.stderr));
        let (command, output) = (argv.join(" "), output.trim().to_owned());
        let remedy = "try it by hand in `ontime-lab shell`, or see the console log that --out DIR keeps";
        Err(LabError::Command { command, output, remedy })
    }
}

/// The binaries that are copied into the emulated host.
#[derive(Debug, Clone)]
pub struct Programs {
    /// `ontime`, the program under test.
    pub ontime: PathBuf,
    /// `ontime-lab`, which runs the commands there ([`crate::agent`]).
    pub lab: PathBuf,
}

/// An emulated host. Dropping it kills the emulator.
#[derive(Debug)]
pub struct Lab {
    dir: PathBuf,
    emulator: Child,
    connection: Option<Connection>,
    clock: Clock,
    /// Whether the host's time stands still while no command runs.
    time_stops: bool,
    link: Option<Link>,
    silence: Duration,
    /// Whether the emulator logs each instruction.
    is_logged: bool,
    next: u64,
    /// Keeps other labs from using the directory.
    _lock: Option<File>,
}

impl Lab {
    /// Starts an emulated host and waits until its user land is up. `dir` receives `files/` (`/lab` inside),
    /// `console.log` and the captures; `programs` go to `/usr/local/bin` inside. Call [`crate::isolate::enter`] first.
    ///
    /// # Errors
    /// The machine is invalid; another lab uses `dir`; a program is missing; the disk is full; the host hangs, crashes
    /// or ends while it boots.
    pub fn start(machine: &Machine, images: &Images, dir: &Path, programs: &Programs) -> Result<Self, LabError> {
        machine.check()?;
        fs::create_dir_all(dir.join("files")).map_err(file("make", dir))?;
        let dir = dir.canonicalize().map_err(file("find", dir))?;
        let lock = isolate::lock(&dir.join("files")).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => {
                let said = format!("another lab uses {}: give each a directory of its own (--out)", dir.display());
                LabError::Machine(said)
            }
            _ => file("lock", &dir)(error),
        })?;
        if machine.clients == Clients::Outside {
            network::set_up()?;
        }
        let mut lab = match Self::boot(machine, images, &dir, programs) {
            // A kernel changes most of its code while it boots. The caller has not started anything yet, so a second
            // boot is safe.
            Err(error @ LabError::StaleCode { .. }) => {
                let _ = writeln!(io::stderr(), "ontime-lab: {error}; it boots again");
                Self::boot(machine, images, &dir, programs)?
            }
            other => other?,
        };
        lab._lock = Some(lock);
        Ok(lab)
    }

    /// Boots once. A lab removes its initrd when it ends, so each boot writes its own.
    fn boot(machine: &Machine, images: &Images, dir: &Path, programs: &Programs) -> Result<Self, LabError> {
        for old in ["agent.sock", "qmp.sock", "console.log", "rt.pcap", "bulk.pcap", EVENTS] {
            // A file of an earlier run in the same directory must not be mistaken for a file of this run.
            let _ = fs::remove_file(dir.join(old));
        }
        let initrd = dir.join("initrd");
        with_overlay(&images.initrd(machine.kernel), programs, &initrd)?;
        let arguments = machine.arguments(images, dir, &initrd);
        let (program, rest) = arguments.split_first().ok_or_else(|| LabError::Machine("no emulator".into()))?;
        let mut command = Command::new(program);
        command.args(rest);
        // The captures' time stamps depend on the emulator's time zone. What the host writes to its disk is in TMPDIR.
        command.env("TZ", "UTC0").env("TMPDIR", dir);
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
            time_stops: machine.time_stops(),
            link: machine.link(),
            silence: Duration::from_secs(machine.silence_seconds),
            is_logged: false,
            next: 0,
            _lock: None,
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

    /// Runs a command that must succeed, and returns its standard output.
    ///
    /// # Errors
    /// [`LabError::Command`] with the output if the command fails; otherwise as [`Lab::run`].
    pub fn check(&mut self, argv: &[&str], limit: Duration) -> Result<String, LabError> {
        self.output(argv, limit)?.checked(argv)
    }

    /// As [`Lab::check`], at nice -20 for the command and its children. For short commands while normal priority gets
    /// little CPU time.
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

    /// Runs a command and returns its status. `sink` gets the output as it arrives.
    ///
    /// # Errors
    /// The host hangs, crashes or ends; the command takes longer than `limit` of real time (then it is killed).
    pub fn run(
        &mut self,
        argv: &[&str],
        environment: &[(&str, &str)],
        limit: Duration,
        sink: &mut dyn FnMut(Stream, &[u8]),
    ) -> Result<i32, LabError> {
        self.order(argv, false, environment, limit, sink)
    }

    /// As [`Lab::run`], without a limit: `go_on` is called at least four times per second of real time. When it breaks,
    /// the command is killed, and has no status.
    ///
    /// # Errors
    /// The host hangs, crashes or ends.
    pub fn run_while(
        &mut self,
        argv: &[&str],
        sink: &mut dyn FnMut(Stream, &[u8]),
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Option<i32>, LabError> {
        let id = self.begin(argv, false, &[])?;
        match self.follow(id, go_on, sink)? {
            Some(status) => self.has_room().map(|()| Some(status)),
            None => self.kill(id).map(|()| None),
        }
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
        match self.follow(id, &mut within(limit), sink)? {
            Some(status) => self.has_room().map(|()| status),
            None => {
                let state = self.state();
                self.kill(id)?;
                Err(LabError::Timeout { command: argv.join(" "), seconds: limit.as_secs(), state })
            }
        }
    }

    /// Starts a command and returns its number.
    fn begin(&mut self, argv: &[&str], ahead: bool, environment: &[(&str, &str)]) -> Result<u64, LabError> {
        self.next += 1;
        let id = self.next;
        let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let words = argv.iter().map(|word| (*word).to_owned()).collect();
        self.send(&Request::Run { id, argv: words, environment, ahead })?;
        Ok(id)
    }

    /// Kills a command and waits for its end, which must not be taken for that of a later command.
    fn kill(&mut self, id: u64) -> Result<(), LabError> {
        self.send(&Request::Kill { id })?;
        let _ = self.follow(id, &mut within(KILLED), &mut |_, _| {});
        Ok(())
    }

    /// Passes on a command's output until it ends (then returns its status) or `go_on` breaks.
    fn follow(
        &mut self,
        id: u64,
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
        sink: &mut dyn FnMut(Stream, &[u8]),
    ) -> Result<Option<i32>, LabError> {
        loop {
            match self.reply()? {
                Some(Reply::Output { id: of, stream, bytes }) if of == id => {
                    let bytes = STANDARD.decode(bytes).map_err(|error| LabError::Protocol(error.to_string()))?;
                    sink(stream, &bytes);
                }
                Some(Reply::Exit { id: of, status, .. }) if of == id => return Ok(Some(status)),
                _ => {}
            }
            if go_on().is_break() {
                return Ok(None);
            }
        }
    }

    /// The present state of the host's threads, as far as the host still answers.
    fn state(&mut self) -> String {
        let mut said = Vec::new();
        let asked = self.begin(&["sh", "-c", STATE], true, &[]);
        let answered = asked
            .and_then(|id| self.follow(id, &mut within(STATE_PATIENCE), &mut |_, bytes| said.extend_from_slice(bytes)));
        if let Err(error) = answered {
            said.extend_from_slice(error.to_string().as_bytes());
        }
        String::from_utf8_lossy(&said).trim_end().to_owned()
    }

    /// Checks that the emulated host lives. To be called regularly while the caller waits for something else.
    ///
    /// # Errors
    /// The host hangs, crashed or ended.
    pub fn alive(&mut self) -> Result<(), LabError> {
        while self.reply_within(Duration::ZERO)?.is_some() {}
        Ok(())
    }

    /// Frames that the link of a NIC (`rt` or `bulk`) has dropped so far. 0 without clients inside.
    ///
    /// # Errors
    /// The emulator's file cannot be read.
    pub fn dropped(&self, nic: &str, way: Way) -> Result<u64, LabError> {
        if self.link.is_none() {
            return Ok(0);
        }
        link::dropped(nic, way, &self.dir)
    }

    /// The link of each NIC to clients inside.
    pub fn link(&self) -> Option<Link> {
        self.link
    }

    /// Starts a log of every instruction of the host, its guests and the clients' CPU, to this pipe, or ends it. The
    /// pipe must be read meanwhile; otherwise the host stops.
    ///
    /// # Errors
    /// The clock is the real one, on which the log would slow the host down by a factor of thousands; the emulator
    /// refuses; as [`Self::run`].
    pub fn log_instructions(&mut self, pipe: Option<&Path>) -> Result<(), LabError> {
        if self.clock == Clock::Real {
            let said = "instructions are traced on the virtual clock, which such a trace does not slow down; use \
                --clock virtual";
            return Err(LabError::Machine(said.into()));
        }
        let commands = pipe.map_or_else(|| LOG_OFF.map(str::to_owned), log_on);
        self.is_logged = pipe.is_some();
        // The emulator does not serve its monitor while the clock stands still: meanwhile the host does something.
        let told = self.dir.join("files").join(TOLD);
        let command = ["sh", "-c", &format!("until [ -e /lab/{TOLD} ]; do :; done")];
        let id = self.begin(&command, false, &[])?;
        let answer = Monitor::open(&self.dir).and_then(|mut at| commands.iter().try_for_each(|line| at.tell(line)));
        let written = fs::write(&told, "").map_err(file("write", &told));
        let ended = self.follow(id, &mut within(FOLLOWED), &mut |_, _| {});
        let _ = fs::remove_file(&told);
        if ended?.is_none() {
            self.kill(id)?;
            written?;
            let seconds = FOLLOWED.as_secs();
            return Err(LabError::Timeout { command: command.join(" "), seconds, state: self.state() });
        }
        answer
    }

    /// Shuts the emulated host down in order.
    ///
    /// # Errors
    /// The host does not shut down; the emulator is killed then.
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

    /// Waits until the emulator ends by itself, for a machine with a shell on its console.
    ///
    /// # Errors
    /// The wait failed.
    pub fn wait(mut self) -> Result<i32, LabError> {
        let status = self.emulator.wait().map_err(file("wait for the emulator in", &self.dir))?;
        Ok(status.code().unwrap_or(1))
    }

    fn wait_until_up(&mut self) -> Result<(), LabError> {
        let socket = self.dir.join("agent.sock");
        let start = Instant::now();
        loop {
            match Connection::open(&socket, self.time_stops) {
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
        let allowed = self.silence * if self.is_logged { LOGGED } else { 1 };
        if silence > allowed {
            return Err(self.hung(allowed.as_secs()));
        }
        Ok(None)
    }

    /// Without room the emulator cuts captures short, and stops the host when its disk grows.
    fn has_room(&self) -> Result<(), LabError> {
        let disk = rustix::fs::statvfs(&self.dir).map_err(|error| file("examine", &self.dir)(error.into()))?;
        if disk.f_blocks > 0 && disk.f_bfree.saturating_mul(disk.f_frsize) < ROOM {
            return Err(file("write to", &self.dir)(rustix::io::Errno::NOSPC.into()));
        }
        Ok(())
    }

    fn still_running(&mut self) -> Result<(), LabError> {
        self.has_room()?;
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

/// Breaks when `limit` of real time is over.
fn within(limit: Duration) -> impl FnMut() -> ControlFlow<()> {
    let end = Instant::now() + limit;
    move || if Instant::now() > end { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}

/// The crash that the console shows, if any.
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
        // The emulator may have ended already; errors do not matter.
        let _ = self.emulator.kill();
        let _ = self.emulator.wait();
        let _ = fs::remove_file(self.dir.join("initrd"));
    }
}

/// Appends the programs and the lab's scripts, in `/overlay`, to the kernel's first user land. The kernel unpacks
/// concatenated archives.
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

/// The name of an archive's last entry.
const TRAILER: &str = "TRAILER!!!";

/// Writes an archive of executable files, to be appended to a guest's initrd.
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

/// Appends an executable file in the kernel's archive format ("newc", Documentation/driver-api/early-userspace).
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
        // With one CPU, no other CPU can change the code.
        assert!(matches!(crash(console, Clock::Virtual, log), Some(LabError::Crashed { .. })));
        let other = "[    5.3] Kernel panic - not syncing: Attempted to kill init! exitcode=0x00007e00\n";
        assert!(
            matches!(crash(other, Clock::Real, log), Some(LabError::Crashed { line, .. }) if line.contains("kill init"))
        );
        assert!(crash("[    5.3] all is well\n", Clock::Real, log).is_none());
    }
}
