//! The agent in the emulated host.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::{BEAT_SECONDS, PORT, Reply, Request, Stream};
use crate::error::{LabError, file};

type Port = Arc<Mutex<File>>;
type Groups = Arc<Mutex<HashMap<u64, rustix::process::Pid>>>;

/// Serves the lab until it asks for power-off or goes away.
///
/// # Errors
/// There is no port of that name: this is not the lab's host.
pub fn serve() -> Result<(), LabError> {
    let path = find_port()?;
    let port = OpenOptions::new().read(true).write(true).open(&path).map_err(file("open", &path))?;
    let reader = BufReader::new(port.try_clone().map_err(file("open", &path))?);
    let port: Port = Arc::new(Mutex::new(port));
    let groups = Groups::default();
    let system = rustix::system::uname();
    let kernel = format!("{} {}", system.release().to_string_lossy(), system.version().to_string_lossy());
    send(&port, &Reply::Ready { kernel });
    let beating = Arc::clone(&port);
    thread::spawn(move || {
        loop {
            thread::sleep(Duration::from_secs(BEAT_SECONDS));
            send(&beating, &Reply::Beat);
        }
    });
    for line in reader.lines() {
        let line = line.map_err(file("read", &path))?;
        let request = serde_json::from_str(&line).map_err(|error| LabError::Protocol(error.to_string()))?;
        match request {
            Request::Run { id, argv, environment } => run(&port, &groups, id, &argv, environment),
            Request::Kill { id } => {
                if let Some(group) = groups.lock().unwrap_or_else(PoisonError::into_inner).get(&id) {
                    // A group that has just ended is what was asked for.
                    let _ = rustix::process::kill_process_group(*group, rustix::process::Signal::KILL);
                }
            }
            Request::PowerOff => break,
        }
    }
    Ok(())
}

fn find_port() -> Result<PathBuf, LabError> {
    let class = Path::new("/sys/class/virtio-ports");
    for entry in fs::read_dir(class).map_err(file("read", class))?.flatten() {
        let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
        if name.trim() == PORT {
            return Ok(Path::new("/dev").join(entry.file_name()));
        }
    }
    Err(LabError::Protocol(format!("no virtio-serial port {PORT}: 'lab agent' runs in the lab's emulated host only")))
}

fn run(port: &Port, groups: &Groups, id: u64, argv: &[String], environment: Vec<(String, String)>) {
    let Some((program, arguments)) = argv.split_first() else {
        return send(port, &Reply::Exit { id, status: 127 });
    };
    let started = Command::new(program)
        .args(arguments)
        .envs(environment)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn();
    let child = match started {
        Ok(child) => child,
        Err(error) => {
            let text = format!("{program}: {error}\n");
            send(port, &Reply::Output { id, stream: Stream::Err, bytes: STANDARD.encode(text) });
            return send(port, &Reply::Exit { id, status: 127 });
        }
    };
    groups.lock().unwrap_or_else(PoisonError::into_inner).insert(id, rustix::process::Pid::from_child(&child));
    let (port, groups) = (Arc::clone(port), Arc::clone(groups));
    thread::spawn(move || follow(&port, &groups, id, child));
}

/// Passes a command's output on until it ends. What it left running in the background keeps no one waiting.
fn follow(port: &Port, groups: &Groups, id: u64, mut child: Child) {
    let out = child.stdout.take().map(|pipe| pump(port, id, Stream::Out, pipe));
    let err = child.stderr.take().map(|pipe| pump(port, id, Stream::Err, pipe));
    let status = match child.wait() {
        Ok(status) => status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0)),
        Err(_) => 127,
    };
    groups.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
    for pump in [out, err].into_iter().flatten() {
        // A background process may hold the pipe open: what came so far is enough.
        for _ in 0..20 {
            if pump.is_finished() {
                break;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
    send(port, &Reply::Exit { id, status });
}

fn pump(port: &Port, id: u64, stream: Stream, mut pipe: impl Read + Send + 'static) -> thread::JoinHandle<()> {
    let port = Arc::clone(port);
    thread::spawn(move || {
        let mut buffer = [0; 16384];
        while let Ok(length @ 1..) = pipe.read(&mut buffer) {
            let bytes = STANDARD.encode(buffer.get(..length).unwrap_or_default());
            send(&port, &Reply::Output { id, stream, bytes });
        }
    })
}

fn send(port: &Port, reply: &Reply) {
    let Ok(mut line) = serde_json::to_vec(reply) else { return };
    line.push(b'\n');
    // Nobody outside any more: the host is about to be ended.
    let _ = port.lock().unwrap_or_else(PoisonError::into_inner).write_all(&line);
}
