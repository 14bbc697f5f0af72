//! A real host during a measurement: runs commands on it, captures the traffic at the client, and restores its method
//! at the end.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde::Deserialize;

use super::monitor::{Monitor, Watch};
use super::site::{Site, Stamps};
use super::{HardwareError, NO_EXCLUSIVE_CPU};

/// Time limit of a command.
const LIMIT: Duration = Duration::from_secs(900);
/// ssh's exit status for its own failures (ssh(1), EXIT STATUS).
const SSH_FAILED: i32 = 255;

/// An open host.
#[derive(Debug)]
pub struct Target {
    site: Site,
    dir: PathBuf,
    rt: Monitor,
    bulk: Option<Monitor>,
    /// The network namespace for commands on this machine, if the client uses another one.
    own: Option<File>,
    /// The host's method before the first switch.
    method: Option<String>,
}

/// The fields of `ontime status --json` that are used.
#[derive(Debug, Deserialize)]
struct Status {
    state: String,
    method: String,
}

/// The fields of `ontime ps --json` that are used.
#[derive(Debug, Deserialize)]
struct Tenants {
    tenants: Vec<Tenant>,
}

#[derive(Debug, Deserialize)]
struct Tenant {
    name: String,
    class: String,
}

impl Target {
    /// Moves this thread into the client's namespace, starts capturing into `dir`, and checks that the host answers.
    /// `captured` is the number of bytes kept of an RT frame.
    pub fn open(site: Site, dir: &Path, captured: usize) -> Result<Self, HardwareError> {
        let own = match &site.client.namespace {
            Some(name) => enter(name)?,
            None => None,
        };
        let place = site.client.namespace.as_ref().map_or_else(String::new, |name| format!(" in namespace {name}"));
        let stamps = site.client.stamps;
        let (nic, place) = (site.monitor(), place.as_str());
        let rt = Monitor::start(Watch { nic, place, stamps, captured, thin: false }, &dir.join("rt.pcap"))?;
        // For throughput, the kernel's time stamps are sufficient.
        let watch = |nic| Watch { nic, place, stamps: Stamps::Kernel, captured: 96, thin: true };
        let bulk = site.bulk.as_ref().map(|of| Monitor::start(watch(&of.nic), &dir.join("bulk.pcap"))).transpose()?;
        let mut target = Self { site, dir: dir.to_owned(), rt, bulk, own, method: None };
        target.shell("true")?;
        Ok(target)
    }

    /// Directory of captures and logs.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The site's description.
    pub fn site(&self) -> &Site {
        &self.site
    }

    /// Notes for the reader about the host and the wire.
    pub fn notes(&mut self) -> Result<Vec<String>, HardwareError> {
        let script = "sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1; nproc; uname -rv; cat /proc/cmdline";
        let said = self.shell(script)?;
        let mut lines = said.lines();
        let mut next = || lines.next().unwrap_or_default();
        let mut notes = vec![
            format!("the host: {}, {} CPUs, {}", next(), next(), next()),
            format!("its kernel's parameters: {}", next()),
        ];
        if !self.is_hardware() {
            let lacks = "no hardware: what joins client and host here is virtual, so these figures show that the \
                         set-up works, and this machine's scheduling; they are no measurement of a NIC";
            notes.push(lacks.to_owned());
        }
        Ok(notes)
    }

    /// The capture of the RT network (`rt`) or the bulk network.
    pub fn capture(&self, network: &str) -> PathBuf {
        match (&self.bulk, network) {
            (Some(bulk), "bulk") => bulk.file().to_owned(),
            // Without a bulk network this file is empty.
            (None, "bulk") => self.dir.join("bulk.pcap"),
            _ => self.rt.file().to_owned(),
        }
    }

    /// Whether both NICs have a hardware device.
    pub(crate) fn is_hardware(&self) -> bool {
        self.rt.is_device() && self.bulk.as_ref().is_none_or(Monitor::is_device)
    }

    /// The source of the RT capture's time stamps.
    pub fn stamps(&self) -> String {
        self.rt.description()
    }

    /// Frames that passed the RT monitor but are missing in its capture, so far.
    pub fn missed(&self) -> u64 {
        self.rt.missed()
    }

    /// Waits until the captures contain all frames that have passed.
    pub fn settle(&self) -> Result<(), HardwareError> {
        self.rt.settle()?;
        self.bulk.as_ref().map_or(Ok(()), Monitor::settle)
    }

    /// Checks that the captures still grow.
    pub fn alive(&self) -> Result<(), HardwareError> {
        self.rt.alive()?;
        self.bulk.as_ref().map_or(Ok(()), Monitor::alive)
    }

    /// Runs a shell command on the host, which must succeed. Returns its standard output.
    pub fn shell(&mut self, script: &str) -> Result<String, HardwareError> {
        let host = self.site.host.clone();
        let failed = |said: String| HardwareError::Command { host: host.clone(), command: script.to_owned(), said };
        let child = self.command(script).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let child = child.map_err(|error| failed(error.to_string()))?;
        let Some(output) = end_of(child, LIMIT).map_err(|error| failed(error.to_string()))? else {
            return Err(HardwareError::TooLong { host, command: script.to_owned(), seconds: LIMIT.as_secs() });
        };
        if output.status == Some(0) {
            return Ok(output.out);
        }
        let said = format!("{}{}", output.out, output.error).trim().to_owned();
        if !self.site.is_here() && output.status == Some(SSH_FAILED) {
            return Err(HardwareError::Unreachable { host, said });
        }
        Err(failed(said))
    }

    fn command(&self, script: &str) -> Command {
        let mut command = match (&self.own, self.site.is_here()) {
            (Some(own), true) => {
                let mut command = Command::new("nsenter");
                command.arg(format!("--net=/proc/{}/fd/{}", std::process::id(), own.as_raw_fd())).arg("sh");
                command
            }
            (None, true) => Command::new("sh"),
            (own, false) => {
                let mut command = match own {
                    Some(own) => {
                        let mut command = Command::new("nsenter");
                        command.arg(format!("--net=/proc/{}/fd/{}", std::process::id(), own.as_raw_fd())).arg("ssh");
                        command
                    }
                    None => Command::new("ssh"),
                };
                command.args(["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", &self.site.host, "sh"]);
                command.arg("-c").arg(quoted(script));
                return command;
            }
        };
        command.arg("-c").arg(script);
        command
    }

    /// Switches the host to a method. Before the first switch, checks that its tenants are those of the site, and
    /// stores the method in force.
    pub fn apply(&mut self, method: &str) -> Result<(), HardwareError> {
        self.know_the_host()?;
        let script = format!("{} apply --method {method} 2>&1; [ $? -le 2 ]", self.site.ontime);
        let said = self.shell(&script)?;
        if let Some(line) = said.lines().find(|line| line.starts_with(NO_EXCLUSIVE_CPU)) {
            return Err(HardwareError::NotHere(line.to_owned()));
        }
        // The output is kept for later readers of the figures.
        let _ = std::fs::write(self.dir.join(format!("{method}.applied")), said);
        Ok(())
    }

    /// Undoes the method in force.
    pub fn reset(&mut self) -> Result<(), HardwareError> {
        self.know_the_host()?;
        self.shell(&format!("{} reset 2>&1", self.site.ontime)).map(|_| ())
    }

    fn know_the_host(&mut self) -> Result<(), HardwareError> {
        if self.method.is_some() {
            return Ok(());
        }
        let ontime = self.site.ontime.clone();
        let Tenants { tenants } = self.json(&format!("{ontime} ps --json"))?;
        let class_of = |name: &str| tenants.iter().find(|of| of.name == name).map(|of| of.class.as_str());
        let wanted = std::iter::once((self.site.rt.tenant.as_str(), "rt"));
        let bulk = self.site.bulk.iter().flat_map(|of| of.tenants.keys().map(|name| (name.as_str(), "bulk")));
        for (name, wanted) in wanted.chain(bulk) {
            let found = class_of(name);
            if !found.is_some_and(|class| class.starts_with(wanted)) {
                let found = found.map_or_else(|| "not found".to_owned(), |class| format!("of class {class}"));
                return Err(HardwareError::Tenant {
                    name: name.to_owned(),
                    host: self.site.host.clone(),
                    found,
                    wanted,
                });
            }
        }
        let status: Status = self.json(&format!("{ontime} status --json; [ $? -le 2 ]"))?;
        self.method = Some(if status.state == "reset" { String::new() } else { status.method });
        Ok(())
    }

    fn json<T: for<'a> Deserialize<'a>>(&mut self, script: &str) -> Result<T, HardwareError> {
        let text = self.shell(script)?;
        serde_json::from_str(&text).map_err(|error| HardwareError::Command {
            host: self.site.host.clone(),
            command: script.to_owned(),
            said: format!("{error}: {text:.200}"),
        })
    }

    /// Restores the method that the host had before the first switch.
    pub fn leave(&mut self) -> Result<(), HardwareError> {
        let ontime = self.site.ontime.clone();
        match self.method.take() {
            None => Ok(()),
            Some(method) if method.is_empty() => self.shell(&format!("{ontime} reset 2>&1")).map(|_| ()),
            Some(method) => self.shell(&format!("{ontime} apply --method {method} 2>&1; [ $? -le 2 ]")).map(|_| ()),
        }
    }
}

/// Moves this thread into the named namespace. Returns the previous one.
fn enter(name: &str) -> Result<Option<File>, HardwareError> {
    let go = || -> io::Result<File> {
        let own = File::open("/proc/thread-self/ns/net")?;
        let path = if name.contains('/') { PathBuf::from(name) } else { Path::new("/run/netns").join(name) };
        let namespace = File::open(path)?;
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
        Ok(own)
    };
    go().map(Some).map_err(|source| HardwareError::Namespace { name: name.to_owned(), source })
}

/// Quotes a script as one word of a shell's command line.
fn quoted(script: &str) -> String {
    format!("'{}'", script.replace('\'', "'\\''"))
}

struct Output {
    status: Option<i32>,
    out: String,
    error: String,
}

/// The child's output at its end; `None` if it ran longer than `limit` and was killed.
fn end_of(mut child: Child, limit: Duration) -> io::Result<Option<Output>> {
    fn read(pipe: Option<impl Read + Send + 'static>) -> thread::JoinHandle<String> {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            // If the pipe breaks, the bytes read so far are used.
            let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
            String::from_utf8_lossy(&bytes).into_owned()
        })
    }
    let (out, error) = (read(child.stdout.take()), read(child.stderr.take()));
    let end = Instant::now() + limit;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() > end {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(5));
    };
    let text = |of: thread::JoinHandle<String>| of.join().unwrap_or_default();
    Ok(Some(Output { status: status.code(), out: text(out), error: text(error) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_is_one_word_for_ssh() {
        assert_eq!(quoted("echo 'a b' $x"), r"'echo '\''a b'\'' $x'");
        let said =
            Command::new("sh").arg("-c").arg(format!("sh -c {}", quoted("x='a b'; echo \"$x\""))).output().unwrap();
        assert_eq!(said.stdout, b"a b\n");
    }

    #[test]
    fn a_command_that_does_not_end_is_killed() {
        let child = Command::new("sleep").arg("60").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        assert!(end_of(child, Duration::from_millis(50)).unwrap().is_none());
    }
}
