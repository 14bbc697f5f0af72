//! The emulator's monitor (QMP): a connection, and what is asked over it.
//!
//! In: the lab's directory, in which its socket lies. Out: the emulator's answers. It serves one connection at a time:
//! a [`Monitor`] that is kept keeps all others waiting.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use crate::error::{LabError, file};

/// Real time that the emulator has for an answer: it may be in the middle of a long stretch.
const PATIENCE: Duration = Duration::from_secs(30);

/// A connection to the monitor.
#[derive(Debug)]
pub(crate) struct Monitor {
    stream: BufReader<UnixStream>,
    path: PathBuf,
}

impl Monitor {
    /// # Errors
    /// [`LabError::File`]: the emulator has ended; [`LabError::Protocol`].
    pub(crate) fn open(dir: &Path) -> Result<Self, LabError> {
        let path = dir.join("qmp.sock");
        let stream = UnixStream::connect(&path).map_err(file("connect to", &path))?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(file("use", &path))?;
        let mut monitor = Self { stream: BufReader::new(stream), path };
        monitor.ask("qmp_capabilities", &json!({}))?;
        Ok(monitor)
    }

    /// One command; gives what it returns.
    ///
    /// # Errors
    /// [`LabError::Protocol`] where the emulator refuses it; [`LabError::File`] where it does not answer.
    pub(crate) fn ask(&mut self, command: &str, arguments: &Value) -> Result<Value, LabError> {
        let request = json!({ "execute": command, "arguments": arguments });
        writeln!(self.stream.get_mut(), "{request}").map_err(file("write to", &self.path))?;
        let refused = |said: &str| LabError::Protocol(format!("the emulator refuses {command}: {said}"));
        loop {
            let mut line = String::new();
            if self.stream.read_line(&mut line).map_err(file("read", &self.path))? == 0 {
                return Err(refused("it has ended the connection"));
            }
            let mut answer: Value = serde_json::from_str(&line).map_err(|error| refused(&error.to_string()))?;
            if answer.get("error").is_some() {
                return Err(refused(line.trim()));
            }
            // Greetings and events have neither.
            if let Some(found) = answer.get_mut("return") {
                return Ok(found.take());
            }
        }
    }

    /// One command of the human monitor, for what QMP itself has not.
    ///
    /// # Errors
    /// As [`Self::ask`]; what it prints is why it did not do it.
    pub(crate) fn tell(&mut self, line: &str) -> Result<(), LabError> {
        let said = self.ask("human-monitor-command", &json!({ "command-line": line }))?;
        match said.as_str().map(str::trim) {
            None | Some("") => Ok(()),
            Some(said) => Err(LabError::Protocol(format!("the emulator refuses '{line}': {said}"))),
        }
    }
}

/// A path as a word of the human monitor.
fn quoted(path: &Path) -> String {
    format!("\"{}\"", path.to_string_lossy().replace('\\', "\\\\").replace('"', "\\\""))
}

/// The emulator's log of every instruction (`-d exec`, one instruction a translated block): a line an instruction that
/// is executed while it is on. An instruction takes the virtual time that it takes without, but some 2.5 us of real
/// time.
#[derive(Debug)]
pub struct InstructionLog {
    monitor: Monitor,
    pipe: String,
}

impl InstructionLog {
    pub(crate) fn open(dir: &Path, pipe: &Path) -> Result<Self, LabError> {
        Ok(Self { monitor: Monitor::open(dir)?, pipe: quoted(pipe) })
    }

    /// Writes a line for every instruction from now on. What reads the pipe must do so until [`Self::off`] has
    /// returned, or else the host stands still.
    ///
    /// # Errors
    /// [`LabError::Protocol`], [`LabError::File`].
    pub fn on(&mut self) -> Result<(), LabError> {
        self.monitor.tell(&format!("logfile {}", self.pipe))?;
        self.monitor.tell("singlestep on")?;
        self.monitor.tell("log exec,nochain")
    }

    /// No longer; the emulator closes the pipe.
    ///
    /// # Errors
    /// As [`Self::on`].
    pub fn off(&mut self) -> Result<(), LabError> {
        self.monitor.tell("log none")?;
        self.monitor.tell("singlestep off")?;
        // With its traces in the same log the emulator never thinks that it is done with a file.
        self.monitor.tell("logfile /dev/null")
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    /// An emulator that greets and then answers each line by the next of `answers`.
    fn emulator(dir: &Path, answers: &'static [&'static str]) -> thread::JoinHandle<Vec<String>> {
        let listener = UnixListener::bind(dir.join("qmp.sock")).unwrap();
        thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            writeln!(&stream, r#"{{"QMP": {{"version": {{}}, "capabilities": []}}}}"#).unwrap();
            let mut heard = vec![lines.next().unwrap().unwrap()];
            writeln!(&stream, r#"{{"return": {{}}}}"#).unwrap();
            for answer in answers {
                heard.push(lines.next().unwrap().unwrap());
                writeln!(&stream, "{answer}").unwrap();
            }
            heard
        })
    }

    #[test]
    fn what_the_human_monitor_prints_is_why_it_did_not_do_it() {
        let dir = tempfile::tempdir().unwrap();
        let emulator =
            emulator(dir.path(), &[r#"{"return": ""}"#, r#"{"return": "unknown command: 'singlestep'\r\n"}"#]);
        let mut log = InstructionLog::open(dir.path(), Path::new("/a \"b\"")).unwrap();
        let said = log.on().unwrap_err().to_string();
        assert!(said.contains("unknown command"), "{said}");
        let heard = emulator.join().unwrap();
        assert!(heard[0].contains("qmp_capabilities") && heard[1].contains(r#"logfile \"/a \\\"b\\\"\""#), "{heard:?}");
    }

    #[test]
    fn an_event_is_no_answer_and_an_error_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let answers = &["{\"event\": \"RESUME\"}\r\n{\"return\": 7}", r#"{"error": {"desc": "no"}}"#];
        let emulator = emulator(dir.path(), answers);
        let mut monitor = Monitor::open(dir.path()).unwrap();
        assert_eq!(monitor.ask("query-x", &json!({})).unwrap(), 7);
        assert!(monitor.ask("query-y", &json!({})).unwrap_err().to_string().contains("refuses query-y"));
        emulator.join().unwrap();
        assert!(Monitor::open(&dir.path().join("none")).is_err());
    }
}
