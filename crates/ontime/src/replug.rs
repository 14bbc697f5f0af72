//! Connects a running VM to a new device process: QEMU's devices of the old process are unplugged and plugged in again.
//!
//! QEMU (10.2 to 11.1) cannot reconnect such a device: with `reconnect-ms` it ends with a failed assertion, because it
//! clears the device's state when the first process goes (`hw/virtio/vhost-user-base.c`).

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use ontime_tenants::qmp::Bounded;
use serde_json::{Value, json};

use crate::exit::{self, Exit};

/// How long QEMU may take to answer a command.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a guest may take to release a device. It waits 5 s for a new process.
const RELEASE: Duration = Duration::from_secs(60);
/// The longest message of QEMU, bytes. It may be another user's process.
const MESSAGE_MAX: u64 = 1 << 20;
/// The most removals that are remembered: device main and 63 channels.
const GONE_MAX: usize = 64;

/// QEMU has ended, or has closed its monitor.
const GONE: &str = "QEMU closed the connection; see whether the VM still runs, then try again";

/// One command of QEMU's monitor (`docs/interop/qmp-spec.rst`).
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Command {
    /// The command as it is sent.
    pub json: Value,
    /// Its object may be gone already; then an error is ignored.
    optional: bool,
    /// The device whose removal is complete only when an event reports it.
    deleted: Option<String>,
}

/// One device of a VM.
pub(crate) struct Plug<'a> {
    /// The device's channel.
    pub channel: u32,
    /// The socket of its device process.
    pub socket: &'a Path,
    /// Its properties other than bus and chardev: those after the driver's name in `-device`.
    pub properties: Vec<(&'static str, u32)>,
}

/// The commands that replace these devices.
pub(crate) fn commands(plugs: &[Plug]) -> Vec<Command> {
    let command = |name: &str, arguments: Value| Command {
        json: json!({ "execute": name, "arguments": arguments }),
        optional: false,
        deleted: None,
    };
    let mut all = Vec::new();
    for Plug { channel, .. } in plugs {
        let (device, chardev) = (format!("ontime-dev{channel}"), format!("ontime{channel}"));
        let del = command("device_del", json!({ "id": device }));
        all.push(Command { optional: true, deleted: Some(device), ..del });
        all.push(Command { optional: true, ..command("chardev-remove", json!({ "id": chardev })) });
    }
    for Plug { channel, socket, properties } in plugs {
        let chardev = format!("ontime{channel}");
        let address = json!({ "type": "unix", "data": { "path": socket } });
        let backend = json!({ "type": "socket", "data": { "server": false, "addr": address } });
        all.push(command("chardev-add", json!({ "id": chardev, "backend": backend })));
        let named = [
            ("driver", "vhost-user-test-device-pci".to_owned()),
            ("id", format!("ontime-dev{channel}")),
            ("bus", format!("ontime-port{channel}")),
            ("chardev", chardev),
        ];
        let named = named.into_iter().map(|(name, value)| (name.to_owned(), json!(value)));
        let numbers = properties.iter().map(|(name, value)| ((*name).to_owned(), json!(value)));
        all.push(command("device_add", Value::Object(named.chain(numbers).collect())));
    }
    all
}

/// Sends the commands to a QEMU process.
///
/// # Errors
/// Where its monitor cannot be reached, or refuses a command.
pub(crate) fn run(monitor: &Path, commands: &[Command]) -> anyhow::Result<()> {
    run_within(monitor, commands, RELEASE)
}

fn run_within(monitor: &Path, commands: &[Command], release: Duration) -> anyhow::Result<()> {
    replace(monitor, commands, release).map_err(|error| {
        // The chain ends with the system's error, which caused the failure.
        let said = exit::chain(&error);
        Exit::unknown(format!("{}: {said}", monitor.display())).into()
    })
}

fn replace(monitor: &Path, commands: &[Command], release: Duration) -> anyhow::Result<()> {
    let stream = UnixStream::connect(monitor)
        .context("QEMU does not listen there; name the socket of its option `-qmp unix:SOCKET,server=on`")?;
    let mut client = QmpClient::new(&stream);
    let mut ignored = String::new();
    client
        .next(Instant::now() + PATIENCE)
        .context("QEMU does not greet; end the other client of this monitor, or give QEMU a second `-qmp`")?;
    let enter = Command { json: json!({ "execute": "qmp_capabilities" }), optional: false, deleted: None };
    for command in std::iter::once(&enter).chain(commands) {
        (&stream).write_all(format!("{}\n", command.json).as_bytes()).context(GONE)?;
        let reply = client.reply(PATIENCE)?;
        let reason = |error: &Value| error.get("desc").and_then(Value::as_str).unwrap_or("no reason given").to_owned();
        let refused = reply.get("error").map(reason);
        match (refused, &command.deleted) {
            // It may be the cause of a later refusal.
            (Some(reason), _) if command.optional => {
                if ignored.is_empty() {
                    ignored = format!(" (before that it refused {}: {reason})", command.json);
                }
            }
            (Some(reason), _) => bail!(
                "QEMU refuses {}: {reason}{ignored}; see that the VM was started with the devices that `ontime attach` \
                 prints",
                command.json
            ),
            (None, Some(device)) => client.gone(device, release)?,
            (None, None) => {}
        }
    }
    Ok(())
}

struct QmpClient<'a> {
    lines: BufReader<Bounded<'a>>,
    gone: Vec<String>,
}

impl<'a> QmpClient<'a> {
    fn new(stream: &'a UnixStream) -> Self {
        Self { lines: BufReader::new(Bounded { stream, until: Instant::now() }), gone: Vec::new() }
    }

    fn next(&mut self, until: Instant) -> anyhow::Result<Value> {
        self.receive(until)?.context("QEMU does not answer; see whether the VM still runs, then try again")
    }

    /// The next message; none if it is not complete by then.
    fn receive(&mut self, until: Instant) -> anyhow::Result<Option<Value>> {
        self.lines.get_mut().until = until;
        let mut line = String::new();
        let read = self.lines.by_ref().take(MESSAGE_MAX).read_line(&mut line);
        if read.as_ref().is_err_and(|error| error.kind() == ErrorKind::TimedOut) {
            return Ok(None);
        }
        if read.context(GONE)? == 0 {
            bail!(GONE);
        }
        let value: Value = serde_json::from_str(&line)
            .context("this is no QMP monitor, its answer is no JSON; name the socket of `-qmp`, not of `-monitor`")?;
        let deleted = value.get("event").is_some_and(|event| event == "DEVICE_DELETED");
        let device =
            value.pointer("/data/device").and_then(Value::as_str).filter(|_| deleted && self.gone.len() < GONE_MAX);
        self.gone.extend(device.map(str::to_owned));
        Ok(Some(value))
    }

    /// The next message that is no event.
    fn reply(&mut self, within: Duration) -> anyhow::Result<Value> {
        let until = Instant::now() + within;
        loop {
            let value = self.next(until)?;
            if value.get("event").is_none() {
                return Ok(value);
            }
        }
    }

    /// Waits until the guest has released a device.
    fn gone(&mut self, device: &str, release: Duration) -> anyhow::Result<()> {
        let until = Instant::now() + release;
        while !self.gone.iter().any(|gone| gone == device) {
            if self.receive(until)?.is_none() {
                bail!(
                    "QEMU has asked the guest to release {device}, and the guest has not within {} s; wait until it is \
                     up, see that its machine has PCIe (q35) and that its kernel has PCIe hotplug, then try again",
                    release.as_secs()
                );
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn two() -> Vec<Command> {
        let plug = |channel, socket| Plug { channel, socket, properties: vec![("num_vqs", 3 - channel)] };
        commands(&[plug(0, "/run/main".as_ref()), plug(1, "/run/one".as_ref())])
    }

    #[test]
    fn all_go_before_the_first_comes() {
        let names: Vec<String> =
            two().iter().map(|command| command.json["execute"].as_str().unwrap().to_owned()).collect();
        let (del, add) = (["device_del", "chardev-remove"], ["chardev-add", "device_add"]);
        assert_eq!(names, [del, del, add, add].concat());
        let device = &two()[7].json["arguments"];
        assert_eq!((&device["id"], &device["bus"]), (&json!("ontime-dev1"), &json!("ontime-port1")));
        assert_eq!(device["num_vqs"], 2);
    }

    /// A monitor that sends these answers, one after each command, and then waits for the client's end. Returns the
    /// commands that it answered.
    fn monitor(answers: Vec<&'static str>) -> (tempfile::TempDir, std::thread::JoinHandle<Vec<String>>) {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("qmp")).unwrap();
        let thread = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"{\"QMP\":{}}\n").unwrap();
            let mut commands = BufReader::new(stream.try_clone().unwrap()).lines();
            let told = answers.iter().map(|answer| {
                let line = commands.next().unwrap().unwrap();
                stream.write_all(answer.as_bytes()).unwrap();
                line
            });
            let told = told.collect();
            commands.for_each(drop);
            told
        });
        (dir, thread)
    }

    const DONE: &str = "{\"return\":{}}\n";

    #[test]
    fn a_device_is_waited_for_and_one_that_is_gone_is_not() {
        let deleted = "{\"return\":{}}\n{\"event\":\"X\"}\n\
            {\"event\":\"DEVICE_DELETED\",\"data\":{\"device\":\"ontime-dev1\"}}\n";
        let missing = "{\"error\":{\"desc\":\"not found\"}}\n";
        let (dir, thread) = monitor(vec![DONE, missing, missing, deleted, DONE, DONE, DONE, DONE, DONE]);
        run(&dir.path().join("qmp"), &two()).unwrap();
        assert_eq!(thread.join().unwrap().len(), 9);
    }

    #[test]
    fn a_refusal_is_told() {
        let refusal = "{\"error\":{\"desc\":\"no such bus\"}}\n";
        let (dir, _thread) = monitor(vec![DONE, refusal, refusal, refusal, refusal, DONE, refusal]);
        let error = run(&dir.path().join("qmp"), &two()).unwrap_err().to_string();
        assert!(error.contains("no such bus") && error.contains("device_add"), "{error}");
        assert!(error.ends_with("with the devices that `ontime attach` prints"), "{error}");
    }

    /// QEMU answers, and the guest does not do its part: that is what the message says.
    #[test]
    fn a_guest_that_keeps_its_device_is_told_from_a_monitor_that_is_silent() {
        let (dir, thread) = monitor(vec![DONE, "{\"return\":{}}\n{\"event\":\"X\"}\n"]);
        let qmp = dir.path().join("qmp");
        let error = run_within(&qmp, &two(), Duration::from_millis(1)).unwrap_err().to_string();
        assert!(error.contains("has asked the guest to release ontime-dev0, and the guest has not"), "{error}");
        assert!(error.contains("; wait until it is up") && !error.contains("does not answer"), "{error}");
        assert_eq!(thread.join().unwrap().len(), 2);
    }

    /// However often it sends something, and however long its message is.
    #[test]
    fn a_monitor_that_drips_is_not_waited_for() {
        let short = Duration::from_millis(30);
        for bytes in ["{", "{\"event\":\"X\"}\n"] {
            let (stream, mut far) = UnixStream::pair().unwrap();
            let thread = std::thread::spawn(move || {
                while far.write_all(bytes.as_bytes()).is_ok() {
                    std::thread::sleep(Duration::from_micros(100));
                }
            });
            let said = QmpClient::new(&stream).reply(short).unwrap_err().to_string();
            assert!(said.contains("does not answer"), "{bytes}: {said}");
            drop(stream);
            thread.join().unwrap();
        }
        let (stream, mut far) = UnixStream::pair().unwrap();
        let thread = std::thread::spawn(move || while far.write_all(&[b'{'; 4096]).is_ok() {});
        let said = QmpClient::new(&stream).reply(PATIENCE).unwrap_err().to_string();
        assert!(said.contains("its answer is no JSON"), "{said}");
        drop(stream);
        thread.join().unwrap();
    }

    #[test]
    fn removals_of_other_devices_take_no_memory_without_bound() {
        let (stream, mut far) = UnixStream::pair().unwrap();
        let mut client = QmpClient::new(&stream);
        let event = |device: usize| format!("{{\"event\":\"DEVICE_DELETED\",\"data\":{{\"device\":\"{device}\"}}}}\n");
        for device in 0..2 * GONE_MAX {
            far.write_all(event(device).as_bytes()).unwrap();
            assert!(client.receive(Instant::now() + PATIENCE).unwrap().is_some());
        }
        assert_eq!(client.gone.len(), GONE_MAX);
    }

    #[test]
    fn an_earlier_refusal_is_told_where_it_may_be_the_cause() {
        let pending = "{\"error\":{\"desc\":\"ontime-dev0 is already in the process of unplug\"}}\n";
        let refusal = "{\"error\":{\"desc\":\"Chardev 'ontime0' already exists\"}}\n";
        let (dir, _thread) = monitor(vec![DONE, pending, refusal, pending, refusal, refusal]);
        let error = run(&dir.path().join("qmp"), &two()).unwrap_err().to_string();
        assert!(error.contains("already exists (before that it refused ") && error.contains("of unplug)"), "{error}");
    }

    /// A failed write to the monitor is a broken pipe. It must not count as a closed standard output, which would end
    /// with status 0.
    #[test]
    fn a_monitor_that_cannot_be_talked_to_is_named_with_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mon");
        for (greeting, wanted) in [
            (None, "name the socket of its option `-qmp"),
            (Some(""), "give QEMU a second `-qmp`"),
            (Some("QEMU 11.1 monitor\n(qemu) "), "name the socket of `-qmp`, not of `-monitor`"),
            (Some("{\"QMP\":{}}\n"), "then try again"),
        ] {
            let thread = greeting.map(|greeting| {
                let _ = std::fs::remove_file(&path);
                let listener = UnixListener::bind(&path).unwrap();
                std::thread::spawn(move || {
                    let (mut stream, _) = listener.accept().unwrap();
                    stream.write_all(greeting.as_bytes()).unwrap();
                })
            });
            let error = run(&path, &two()).unwrap_err();
            let said = error.to_string();
            assert!(said.starts_with(&format!("{}: ", path.display())) && said.contains(wanted), "{said}");
            assert_eq!(ontime_cli::status(&error, exit::status), exit::UNKNOWN);
            if let Some(thread) = thread {
                thread.join().unwrap();
            }
        }
    }
}
