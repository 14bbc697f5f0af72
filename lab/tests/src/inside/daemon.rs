//! The daemon, and the operator's commands that ask it.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;

use super::command::{Running, Words, attempt, read, start_to, within, write};

/// The daemon's log.
pub(crate) const LOG: &str = "/run/daemon.log";
const SOCKET: &str = "/run/ontime/ontime.sock";

/// Writes a file of `/etc/ontime`: `configure("tenants.toml", "...")`.
pub(crate) fn configure(file: &str, text: &str) -> Result<()> {
    let path = Path::new("/etc/ontime").join(file);
    let folder = path.parent().context("a file without a folder")?;
    fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    write(&path, text)
}

/// An RT tenant in tenants.toml, with these settings: `rt_tenant("a", "level = 0")`.
pub(crate) fn rt_tenant(name: &str, settings: &str) -> String {
    format!("[[tenant]]\nname = \"{name}\"\nclass = \"rt\"\n{settings}\n")
}

/// A running daemon. It continues to run if this value is dropped.
#[derive(Debug)]
pub(crate) struct Daemon(Running);

impl Daemon {
    /// Starts the daemon, and waits until it answers.
    pub(crate) fn start() -> Result<Self> {
        Self::start_with("")
    }

    /// As [`Self::start`], with further arguments.
    pub(crate) fn start_with(arguments: &str) -> Result<Self> {
        let daemon = Self::begin(arguments)?;
        within(60, "the daemon answers", answers)?;
        Ok(daemon)
    }

    /// Starts the daemon, and does not wait.
    pub(crate) fn begin(arguments: &str) -> Result<Self> {
        Ok(Self(start_to(format!("ontime daemon {arguments}"), LOG)?))
    }

    pub(crate) fn pid(&self) -> i32 {
        self.0.pid()
    }

    /// Whether it runs.
    pub(crate) fn runs(&mut self) -> Result<bool> {
        Ok(!self.0.is_over()?)
    }

    /// Lets it read its configuration again. A pass follows.
    pub(crate) fn reload(&self) -> Result<()> {
        self.0.signal(Signal::HUP)
    }

    pub(crate) fn dies(self) -> Result<()> {
        self.0.end(Signal::KILL).map(drop)
    }

    /// Ends it as systemd does. It must succeed.
    pub(crate) fn ends(self) -> Result<()> {
        self.0.signal(Signal::TERM)?;
        let ended = self.0.wait()?;
        ensure!(ended.status == 0, "the daemon ended with {}", ended.status);
        Ok(())
    }

    /// Its log so far, and that of the daemons before it.
    pub(crate) fn log() -> Result<String> {
        read(LOG)
    }
}

/// Whether a daemon answers, with any findings.
pub(crate) fn answers() -> Result<bool> {
    Ok(attempt("timeout 10 ontime status")?.status <= 2)
}

/// What a command of the operator prints, with any findings (statuses 0 to 3): `report("ontime status --all")`.
pub(crate) fn report(words: impl Into<Words>) -> Result<String> {
    attempt(words)?.expect(&[0, 1, 2, 3])
}

/// As [`report`], of a command that prints JSON.
pub(crate) fn json(line: &str) -> Result<Value> {
    let text = report(line)?;
    serde_json::from_str(&text).with_context(|| format!("'{line}' printed no JSON: {text}"))
}

/// One check of `ontime doctor`.
pub(crate) struct Check {
    /// `ok`, `warning`, `critical`, `unknown`.
    pub(crate) state: String,
    /// The whole check as JSON, in one line.
    pub(crate) text: String,
}

/// The check of `ontime doctor` with this id: a rule's name, or `kernel`, `lockdown`, ...
pub(crate) fn check(id: &str) -> Result<Check> {
    let diagnosis = json("ontime doctor --json")?;
    let checks = diagnosis.get("checks").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let check = checks.iter().find(|check| check.get("id").and_then(Value::as_str) == Some(id));
    let check = check.with_context(|| format!("ontime doctor has no check {id}: {diagnosis}"))?;
    let state = check.get("state").and_then(Value::as_str).unwrap_or_default();
    Ok(Check { state: state.to_owned(), text: check.to_string() })
}

/// Applies a method, with any findings; what was printed.
pub(crate) fn apply(method: &str) -> Result<String> {
    attempt(format!("ontime apply --method {method}"))?.expect(&[0, 1, 2])
}

/// Resets everything, which must succeed.
pub(crate) fn reset() -> Result<()> {
    attempt("ontime reset")?.expect(&[0]).map(drop)
}

/// The daemon's metrics.
pub(crate) fn metrics() -> Result<String> {
    request("GET", "/metrics", "")
}

/// The daemon's answer to a request with this content, with its status and headers.
pub(crate) fn request(method: &str, path: &str, content: &str) -> Result<String> {
    let mut daemon = UnixStream::connect(SOCKET).context("no daemon answers")?;
    daemon.set_read_timeout(Some(Duration::from_secs(30))).context(SOCKET)?;
    let headers = format!("content-type: application/json\r\ncontent-length: {}", content.len());
    write!(daemon, "{method} {path} HTTP/1.0\r\n{headers}\r\n\r\n{content}").context(SOCKET)?;
    let mut text = String::new();
    daemon.read_to_string(&mut text).context("the daemon does not answer in 30 s")?;
    Ok(text)
}

/// The sum of the daemon's metrics whose lines begin so: `metric("ontime_boosts_total{domain=\"rt\"")`.
pub(crate) fn metric(beginning: &str) -> Result<f64> {
    sum(&metrics()?, beginning)
}

fn sum(metrics: &str, beginning: &str) -> Result<f64> {
    let lines = metrics.lines().filter(|line| line.starts_with(beginning));
    let value = |line: &str| line.rsplit(' ').next().and_then(|value| value.parse::<f64>().ok());
    let values = lines.map(|line| value(line).with_context(|| format!("a metric without a value: {line}")));
    // The sum of no floating-point numbers is -0.
    Ok(values.sum::<Result<f64>>()? + 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_of_one_beginning_are_added_up() {
        let text = "HTTP/1.0 200 OK\r\n\r\nmore_total 7\na_total{of=\"x\"} 2\na_total{of=\"y\"} 3.5\n";
        assert_eq!(sum(text, "a_total").unwrap(), 5.5);
        assert_eq!(sum(text, "a_total{of=\"y\"").unwrap(), 3.5);
        assert_eq!(sum(text, "b_total").unwrap().to_string(), "0");
        assert!(sum("a_total many", "a_total").is_err());
    }
}
