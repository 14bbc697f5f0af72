//! The emulator's monitor (QMP): a connection, and the commands used.
//!
//! In: the lab's directory, which contains the monitor's socket. Out: the emulator's answers. The monitor serves one
//! connection at a time: while a [`Monitor`] exists, other connections wait.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use crate::error::{LabError, file};

/// Limit of the real time for an answer. The emulator may be executing a long stretch of instructions.
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

    /// Runs one command and returns its result.
    ///
    /// # Errors
    /// [`LabError::Protocol`] if the emulator refuses the command; [`LabError::File`] if it does not answer.
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
            // Greetings and events have neither field.
            if let Some(found) = answer.get_mut("return") {
                return Ok(found.take());
            }
        }
    }

    /// Runs one command of the human monitor, for functions that QMP does not have.
    ///
    /// # Errors
    /// As [`Self::ask`]. Any output of the command is an error message.
    pub(crate) fn tell(&mut self, line: &str) -> Result<(), LabError> {
        let said = self.ask("human-monitor-command", &json!({ "command-line": line }))?;
        match said.as_str().map(str::trim) {
            None | Some("") => Ok(()),
            Some(said) => Err(LabError::Protocol(format!("the emulator refuses '{line}': {said}"))),
        }
    }
}

/// Quotes a path as one word for the human monitor.
fn quoted(path: &Path) -> String {
    format!("\"{}\"", path.to_string_lossy().replace('\\', "\\\\").replace('"', "\\\""))
}

/// Commands that make the emulator write a line for every instruction that it executes (`-d exec`, one instruction per
/// translated block) to this pipe. An instruction takes the same virtual time as without the log, but about 2.5 us of
/// real time. While the pipe is not read, the host stops.
pub(crate) fn log_on(pipe: &Path) -> [String; 3] {
    [format!("logfile {}", quoted(pipe)), "singlestep on".to_owned(), "log exec,nochain".to_owned()]
}

/// Commands that end the log. If its trace messages go to the same log, the emulator never closes the file.
pub(crate) const LOG_OFF: [&str; 3] = ["log none", "singlestep off", "logfile /dev/null"];

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    /// An emulator that sends a greeting, and then answers each line with the next of `answers`.
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
        let mut monitor = Monitor::open(dir.path()).unwrap();
        let commands = log_on(Path::new("/a \"b\""));
        let said = commands.iter().try_for_each(|command| monitor.tell(command)).unwrap_err().to_string();
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
