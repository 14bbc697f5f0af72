//! Programs that measure, and the load beside them: each in a process group of its own, so that it ends with all that
//! it started. A measurement ends at its time limit, at a signal, or if the load fails.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

/// How often a program is looked at.
const LOOK: Duration = Duration::from_millis(50);
/// How long a program that was asked to end may take. `ontime trace` writes its report then.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long it has before SIGTERM: a program that a shell started in the background may ignore SIGINT.
const UNTIL_TERM: Duration = Duration::from_secs(5);
/// The most that a program may write to standard output, and to standard error, bytes. A guest's is what it likes.
pub(super) const OUTPUT_MAX: u64 = 16 << 20;
/// The shortest time between two starts of the load.
const PAUSE: Duration = Duration::from_secs(1);

/// How a program ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ended {
    /// By itself, with this status; none if a signal ended it.
    Itself(Option<i32>),
    /// It took too long, and was ended.
    Late,
    /// It wrote more than [`OUTPUT_MAX`], and was ended.
    TooMuch,
    /// It was ended for a reason from outside.
    Because(String),
}

/// A running program. Dropping it ends its process group.
#[derive(Debug)]
pub(super) struct Running {
    child: Child,
    group: Option<Pid>,
    out: File,
    err: File,
}

impl Running {
    /// Starts a program. `script` is its standard input.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn start(mut command: Command, script: Option<&str>) -> io::Result<Self> {
        let (out, err) = (tempfile::tempfile()?, tempfile::tempfile()?);
        let input = match script {
            Some(script) => {
                let mut file = tempfile::tempfile()?;
                file.write_all(script.as_bytes())?;
                file.seek(SeekFrom::Start(0))?;
                Stdio::from(file)
            }
            None => Stdio::null(),
        };
        let child = command.process_group(0).stdin(input).stdout(out.try_clone()?).stderr(err.try_clone()?).spawn()?;
        let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        Ok(Self { child, group, out, err })
    }

    /// Whether the program has ended. Its process group exists until `end`.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn has_ended(&self) -> io::Result<bool> {
        let Some(pid) = self.group else { return Ok(true) };
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        Ok(waitid(WaitId::Pid(pid), options)?.is_some())
    }

    /// Waits until the program ends, for `limit` at most. `why_stop` is asked again and again: its answer ends the
    /// program.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn wait(&mut self, limit: Duration, mut why_stop: impl FnMut() -> Option<String>) -> io::Result<Ended> {
        let start = Instant::now();
        loop {
            if self.written()? > OUTPUT_MAX {
                self.end(Signal::KILL)?;
                return Ok(Ended::TooMuch);
            }
            if self.has_ended()? {
                return Ok(Ended::Itself(self.end(Signal::INT)?));
            }
            if let Some(why) = why_stop() {
                self.end(Signal::INT)?;
                return Ok(Ended::Because(why));
            }
            if start.elapsed() >= limit {
                self.end(Signal::INT)?;
                return Ok(Ended::Late);
            }
            std::thread::sleep(LOOK);
        }
    }

    /// The size of the larger output.
    fn written(&self) -> io::Result<u64> {
        Ok(self.out.metadata()?.len().max(self.err.metadata()?.len()))
    }

    /// Empties the outputs if they are large.
    fn forget_output(&mut self) -> io::Result<()> {
        if self.written()? <= OUTPUT_MAX {
            return Ok(());
        }
        for file in [&mut self.out, &mut self.err] {
            // The position is the program's too, so that it goes on at the start.
            file.seek(SeekFrom::Start(0))?;
            file.set_len(0)?;
        }
        Ok(())
    }

    /// Asks the process group to end, kills it after a while, and returns the program's status. rtla and `ontime trace`
    /// remove their tracing instances at SIGINT.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn end(&mut self, signal: Signal) -> io::Result<Option<i32>> {
        let Some(group) = self.group else { return Ok(self.child.wait()?.code()) };
        let (asked, mut terminated) = (Instant::now(), false);
        // The group has the program's number until the program is waited for below.
        let _ = kill_process_group(group, signal);
        while !self.has_ended()? && asked.elapsed() < PATIENCE {
            if !terminated && asked.elapsed() >= UNTIL_TERM {
                let _ = kill_process_group(group, Signal::TERM);
                terminated = true;
            }
            std::thread::sleep(LOOK);
        }
        let _ = kill_process_group(group, Signal::KILL);
        let status = self.child.wait()?;
        self.group = None;
        Ok(status.code())
    }

    /// What the program wrote to standard output, and to standard error.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn output(&mut self) -> io::Result<(Vec<u8>, String)> {
        let read = |file: &mut File| -> io::Result<Vec<u8>> {
            let mut bytes = Vec::new();
            file.seek(SeekFrom::Start(0))?;
            file.take(OUTPUT_MAX).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        let out = read(&mut self.out)?;
        Ok((out, String::from_utf8_lossy(&read(&mut self.err)?).into_owned()))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.group.is_some() {
            let _ = self.end(Signal::INT);
        }
    }
}

/// The last line that is not empty: what a program says before it fails.
pub(super) fn last_line(text: &str) -> Option<&str> {
    text.lines().map(str::trim).rfind(|line| !line.is_empty())
}

/// The load beside the measurements: a shell's command that is started again whenever it ends well.
#[derive(Debug)]
pub(super) struct Load {
    command: String,
    running: Running,
    started: Instant,
}

impl Load {
    /// Starts it.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn start(command: &str) -> io::Result<Self> {
        Ok(Self { command: command.to_owned(), running: Self::run(command)?, started: Instant::now() })
    }

    fn run(command: &str) -> io::Result<Running> {
        let mut shell = Command::new("sh");
        shell.args(["-c", command]);
        Running::start(shell, None)
    }

    /// Starts the load again if it has ended. Returns what is wrong if it failed.
    pub(super) fn keep(&mut self) -> Option<String> {
        self.restart().unwrap_or_else(|error| Some(format!("the load `{}` cannot run: {error}", self.command)))
    }

    fn restart(&mut self) -> io::Result<Option<String>> {
        // It may run for days, and only its last words are of interest.
        self.running.forget_output()?;
        if !self.running.has_ended()? {
            return Ok(None);
        }
        let status = self.running.end(Signal::TERM)?;
        if status != Some(0) {
            let status = status.map_or_else(|| "by a signal".to_owned(), |status| format!("with status {status}"));
            let (_, said) = self.running.output()?;
            let said = last_line(&said).map_or_else(String::new, |line| format!(": {line}"));
            return Ok(Some(format!("the load `{}` ended {status}{said}; correct --load", self.command)));
        }
        if self.started.elapsed() >= PAUSE {
            self.running = Self::run(&self.command)?;
            self.started = Instant::now();
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    fn shell(script: &str) -> Running {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Running::start(command, None).unwrap()
    }

    fn exists(pid: i32) -> bool {
        // A killed process is a zombie until its new parent waits for it.
        std::fs::read_to_string(format!("/proc/{pid}/stat"))
            .is_ok_and(|stat| !stat.rsplit(')').next().unwrap().starts_with(" Z"))
    }

    fn gone(pid: i32) -> bool {
        (0..200).any(|_| {
            std::thread::sleep(Duration::from_millis(50));
            !exists(pid)
        })
    }

    /// The number of a process that the program started and wrote to standard output.
    fn started_by(running: &mut Running) -> i32 {
        for _ in 0..200 {
            std::thread::sleep(Duration::from_millis(50));
            // Not by `output`, whose seek would move the program's own position.
            let mut bytes = [0; 32];
            let count = running.out.read_at(&mut bytes, 0).unwrap();
            let text = String::from_utf8_lossy(&bytes[..count]).into_owned();
            if let Some(line) = text.strip_suffix('\n') {
                return line.trim().parse().unwrap();
            }
        }
        panic!("it wrote no number");
    }

    #[test]
    fn a_program_that_ends_gives_its_status_and_both_outputs() {
        let mut running = shell("echo out; echo err >&2; exit 7");
        assert_eq!(running.wait(Duration::from_secs(60), || None).unwrap(), Ended::Itself(Some(7)));
        assert_eq!(running.output().unwrap(), (b"out\n".to_vec(), "err\n".to_owned()));
        let mut killed = shell("kill -9 $$");
        assert_eq!(killed.wait(Duration::from_secs(60), || None).unwrap(), Ended::Itself(None));
        let mut reads = Running::start(Command::new("sh"), Some("echo $((6 * 7)); exit 3")).unwrap();
        assert_eq!(reads.wait(Duration::from_secs(60), || None).unwrap(), Ended::Itself(Some(3)));
        assert_eq!(reads.output().unwrap().0, b"42\n");
        assert!(Running::start(Command::new("/nonexistent/program"), None).is_err());
    }

    #[test]
    fn what_a_program_started_ends_with_it_at_a_limit_a_reason_and_a_drop() {
        let script = "sleep 600 & echo $!; wait";
        let mut late = shell(script);
        let child = started_by(&mut late);
        assert_eq!(late.wait(Duration::from_millis(1), || None).unwrap(), Ended::Late);
        assert!(gone(child));
        let mut stopped = shell(script);
        let child = started_by(&mut stopped);
        let why = || Some("Ctrl-C".to_owned());
        assert_eq!(stopped.wait(Duration::from_secs(60), why).unwrap(), Ended::Because("Ctrl-C".to_owned()));
        assert!(gone(child));
        let mut dropped = shell(script);
        let child = started_by(&mut dropped);
        drop(dropped);
        assert!(gone(child));
        // Also if the program itself has ended.
        let mut left = shell("sleep 600 & echo $!");
        let child = started_by(&mut left);
        assert_eq!(left.wait(Duration::from_secs(60), || None).unwrap(), Ended::Itself(Some(0)));
        assert!(gone(child));
    }

    #[test]
    fn a_program_that_writes_without_end_is_ended_and_a_loads_output_is_forgotten() {
        for to in ["1", "2"] {
            let mut floods = shell(&format!("head -c 17000000 /dev/zero >&{to}; exec sleep 600"));
            assert_eq!(floods.wait(Duration::from_secs(60), || None).unwrap(), Ended::TooMuch);
        }
        let mut load = Load::start("head -c 17000000 /dev/zero; exec sleep 600").unwrap();
        while load.running.written().unwrap() < 17_000_000 {
            assert!(load.started.elapsed() < Duration::from_secs(60));
            std::thread::sleep(LOOK);
        }
        assert_eq!(load.keep(), None);
        assert_eq!(load.running.written().unwrap(), 0);
    }

    #[test]
    fn a_load_that_ends_well_runs_again_and_one_that_fails_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let runs = dir.path().join("runs");
        let mut load = Load::start(&format!("echo run >> {}", runs.display())).unwrap();
        let often = || std::fs::read_to_string(&runs).unwrap_or_default().lines().count();
        while often() < 2 {
            assert_eq!(load.keep(), None);
            std::thread::sleep(LOOK);
        }
        let mut bad = Load::start("echo first; echo why >&2; exit 9").unwrap();
        let why = loop {
            if let Some(why) = bad.keep() {
                break why;
            }
            std::thread::sleep(LOOK);
        };
        assert!(why.contains("ended with status 9: why; correct --load"), "{why}");
    }

    #[test]
    fn the_last_line_of_a_complaint_is_found() {
        assert_eq!(last_line("a\nb  \n\n  \n"), Some("b"));
        assert_eq!(last_line("\n"), None);
    }
}
