//! The agent in the emulated host.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;

use super::{BEAT_SECONDS, PORT, Reply, Request, Stream};
use crate::error::{LabError, file};

/// Nice value of the agent.
const AHEAD: i32 = -20;

/// The port's writing side.
struct Outlet {
    file: Mutex<File>,
    /// Number of commands whose end was not told yet.
    running: AtomicUsize,
}

impl Outlet {
    fn new(file: File) -> Self {
        Self { file: Mutex::new(file), running: AtomicUsize::new(0) }
    }
}

type Port = Arc<Outlet>;
type Groups = Arc<Mutex<HashMap<u64, rustix::process::Pid>>>;

/// Serves the lab until it requests power-off or closes the connection.
///
/// # Errors
/// There is no port with this name: this is not the lab's host.
pub fn serve() -> Result<(), LabError> {
    let path = find_port()?;
    // Sets the priority of this thread and of the threads that it starts, so that the agent answers although the host
    // leaves normal priority little CPU time. If this is refused, the agent only answers later.
    let _ = rustix::process::setpriority_process(None, AHEAD);
    let port = OpenOptions::new().read(true).write(true).open(&path).map_err(file("open", &path))?;
    let reader = BufReader::new(port.try_clone().map_err(file("open", &path))?);
    let port: Port = Arc::new(Outlet::new(port));
    let groups = Groups::default();
    let system = rustix::system::uname();
    let kernel = format!("{} {}", system.release().to_string_lossy(), system.version().to_string_lossy());
    send(&port, &Reply::Ready { kernel, idle: true });
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
            Request::Run { id, argv, environment, ahead } => run(&port, &groups, id, &argv, environment, ahead),
            Request::Kill { id } => {
                if let Some(group) = groups.lock().unwrap_or_else(PoisonError::into_inner).get(&id) {
                    // The group may have just ended, as requested.
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
    Err(LabError::Protocol(format!(
        "no virtio-serial port {PORT}: 'ontime-lab agent' runs in the lab's emulated host only"
    )))
}

fn run(port: &Port, groups: &Groups, id: u64, argv: &[String], environment: Vec<(String, String)>, ahead: bool) {
    port.running.fetch_add(1, Ordering::Relaxed);
    let Some((program, arguments)) = argv.split_first() else {
        return send_end(port, id, 127);
    };
    let mut command = Command::new(program);
    command.args(arguments).envs(environment).process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let started = if ahead { command.spawn() } else { spawn_behind(command) };
    let child = match started {
        Ok(child) => child,
        Err(error) => {
            let text = format!("{program}: {error}\n");
            send(port, &Reply::Output { id, stream: Stream::Err, bytes: STANDARD.encode(text) });
            return send_end(port, id, 127);
        }
    };
    groups.lock().unwrap_or_else(PoisonError::into_inner).insert(id, rustix::process::Pid::from_child(&child));
    let (port, groups) = (Arc::clone(port), Arc::clone(groups));
    thread::spawn(move || follow(&port, &groups, id, child));
}

/// Starts a command at nice 0, from a separate thread: a child inherits the nice value of its starting thread.
fn spawn_behind(mut command: Command) -> io::Result<Child> {
    let spawn = move || {
        let _ = rustix::process::setpriority_process(None, 0);
        command.spawn()
    };
    thread::spawn(spawn).join().unwrap_or_else(|_| Err(io::Error::other("its starter has panicked")))
}

/// Passes on a command's output until it ends. Processes that it left in the background do not delay the end.
fn follow(port: &Port, groups: &Groups, id: u64, mut child: Child) {
    let ended = Arc::new(eventfd(0, EventfdFlags::CLOEXEC));
    let out = child.stdout.take().map(|pipe| pump(port, id, Stream::Out, pipe, &ended));
    let err = child.stderr.take().map(|pipe| pump(port, id, Stream::Err, pipe, &ended));
    let status = match child.wait() {
        Ok(status) => status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0)),
        Err(_) => 127,
    };
    groups.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
    if let Ok(ended) = ended.as_ref() {
        // The write fails only if the counter is one below its limit.
        let _ = rustix::io::write(ended, &1u64.to_ne_bytes());
    }
    for whole in [out, err].into_iter().flatten() {
        // The channel never carries a message: its end shows that everything was passed on.
        let _ = whole.recv();
    }
    send_end(port, id, status);
}

/// Passes on one of a command's outputs. The returned channel is closed after all output up to the command's end has
/// been passed on, however little CPU time this thread gets. A background process may keep the pipe open and continue
/// to write.
fn pump(
    port: &Port,
    id: u64,
    stream: Stream,
    mut pipe: impl Read + AsFd + Send + 'static,
    ended: &Arc<rustix::io::Result<OwnedFd>>,
) -> mpsc::Receiver<()> {
    let (port, ended) = (Arc::clone(port), Arc::clone(ended));
    let (whole, closed) = mpsc::channel::<()>();
    thread::spawn(move || {
        let mut buffer = [0; 16384];
        let mut pass = |pipe: &mut dyn Read, most: usize| {
            let most = most.min(buffer.len());
            let length = pipe.read(buffer.get_mut(..most).unwrap_or_default()).unwrap_or(0);
            if length > 0 {
                let bytes = STANDARD.encode(buffer.get(..length).unwrap_or_default());
                send(&port, &Reply::Output { id, stream, bytes });
            }
            length
        };
        while !has_ended(&ended, &pipe) {
            if pass(&mut pipe, usize::MAX) == 0 {
                return;
            }
        }
        let mut left = rustix::io::ioctl_fionread(&pipe).unwrap_or(0);
        while left > 0 {
            match pass(&mut pipe, left.try_into().unwrap_or(usize::MAX)) {
                0 => return,
                length => left = left.saturating_sub(length as u64),
            }
        }
        drop(whole);
        while pass(&mut pipe, usize::MAX) > 0 {}
    });
    closed
}

/// Waits until a command has ended (returns true), or its pipe is readable (returns false).
fn has_ended(ended: &rustix::io::Result<OwnedFd>, pipe: &impl AsFd) -> bool {
    // Without the event, everything up to the pipe's end is passed on, as if the command did not end before.
    let Ok(ended) = ended else { return false };
    let mut wait = [PollFd::new(ended, PollFlags::IN), PollFd::new(pipe, PollFlags::IN)];
    loop {
        match poll(&mut wait, None) {
            Err(Errno::INTR) => {}
            Err(_) => return false,
            Ok(_) => return !wait[0].revents().is_empty(),
        }
    }
}

fn send(port: &Port, reply: &Reply) {
    write(&mut port.file.lock().unwrap_or_else(PoisonError::into_inner), reply);
}

/// Sends a command's end. The count is read under the port's lock: no message comes after one with which the machine's
/// time may stop.
fn send_end(port: &Port, id: u64, status: i32) {
    let mut file = port.file.lock().unwrap_or_else(PoisonError::into_inner);
    let idle = port.running.fetch_sub(1, Ordering::Relaxed) == 1;
    write(&mut file, &Reply::Exit { id, status, idle });
}

/// Writes a message at once, because the emulator takes what one call writes for one message.
fn write(file: &mut File, reply: &Reply) {
    let Ok(mut line) = serde_json::to_vec(reply) else { return };
    line.push(b'\n');
    // A failure means that the lab outside has gone, and is about to end the host.
    let _ = file.write_all(&line);
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn all_that_a_command_wrote_comes_before_its_end_though_its_pipe_stays_open_and_nobody_reads_for_long() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let port: Port = Arc::new(Outlet::new(file.reopen().unwrap()));
        let busy = port.file.lock().unwrap();
        let argv = ["sh", "-c", "sleep 60 & head -c 60000 /dev/zero; echo $! >&2; exit 3"].map(str::to_owned);
        run(&port, &Groups::default(), 7, &argv, Vec::new(), false);
        // Meanwhile the command, whose output fits into the pipe, ends. The sleep is longer than any possible wait for
        // the CPU.
        thread::sleep(Duration::from_millis(500));
        drop(busy);
        let (begun, mut out, mut err) = (Instant::now(), 0, Vec::new());
        let replies = loop {
            assert!(begun.elapsed() < Duration::from_secs(30), "no end was told");
            let text = fs::read_to_string(file.path()).unwrap();
            if text.contains("exit") && text.ends_with('\n') {
                break text.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<Reply>>();
            }
            thread::sleep(Duration::from_millis(10));
        };
        let Some((Reply::Exit { id: 7, status: 3, idle: true }, before)) = replies.split_last() else {
            panic!("the last is not the end");
        };
        for reply in before {
            let Reply::Output { id: 7, stream, bytes } = reply else { panic!("something else") };
            let bytes = STANDARD.decode(bytes).unwrap();
            match stream {
                Stream::Out => out += bytes.len(),
                Stream::Err => err.extend(bytes),
            }
        }
        assert_eq!(out, 60_000);
        let background: i32 = String::from_utf8(err).unwrap().trim().parse().unwrap();
        rustix::process::kill_process(
            rustix::process::Pid::from_raw(background).unwrap(),
            rustix::process::Signal::KILL,
        )
        .unwrap();
    }

    #[test]
    fn the_last_of_several_commands_alone_says_that_none_runs() {
        let dir = tempfile::tempdir().unwrap();
        let (path, gate) = (dir.path().join("port"), dir.path().join("gate"));
        let port: Port = Arc::new(Outlet::new(File::create(&path).unwrap()));
        let groups = Groups::default();
        let start = |id, words: &[&str]| {
            let argv: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
            run(&port, &groups, id, &argv, Vec::new(), true);
        };
        let ends = |count: usize| {
            let begun = Instant::now();
            loop {
                let text = fs::read_to_string(&path).unwrap();
                let replies = text.lines().filter_map(|line| serde_json::from_str::<Reply>(line).ok());
                let ends: Vec<(u64, bool)> = replies
                    .filter_map(|reply| match reply {
                        Reply::Exit { id, idle, .. } => Some((id, idle)),
                        _ => None,
                    })
                    .collect();
                if ends.len() == count {
                    break ends;
                }
                assert!(begun.elapsed() < Duration::from_secs(30), "{text}");
                thread::sleep(Duration::from_millis(10));
            }
        };
        let wait = format!("while [ ! -e {} ]; do sleep 0.01; done", gate.display());
        start(1, &["sh", "-c", &wait]);
        for (id, words) in [(2, &["true"][..]), (3, &["no-such-program"]), (4, &[])] {
            start(id, words);
        }
        assert!(ends(3).iter().all(|(_, idle)| !idle));
        fs::write(&gate, "").unwrap();
        assert_eq!(ends(4).last(), Some(&(1, true)));
    }

    #[test]
    fn a_command_is_at_its_starters_place_only_if_it_is_to_be() {
        // Sets the nice value of this test's thread, which stands for the agent's. Every user may raise a nice value.
        rustix::process::setpriority_process(None, 5).unwrap();
        let told = |ahead: bool| {
            let file = tempfile::NamedTempFile::new().unwrap();
            let port: Port = Arc::new(Outlet::new(file.reopen().unwrap()));
            let argv = ["sh", "-c", "cut -d ' ' -f 19 /proc/self/stat"].map(str::to_owned);
            run(&port, &Groups::default(), 1, &argv, Vec::new(), ahead);
            let begun = Instant::now();
            loop {
                let text = fs::read_to_string(file.path()).unwrap();
                let mut replies = text.lines().filter_map(|line| serde_json::from_str(line).ok());
                if let Some(Reply::Output { bytes, .. }) = replies.next() {
                    break String::from_utf8(STANDARD.decode(bytes).unwrap()).unwrap().trim().to_owned();
                }
                assert!(begun.elapsed() < Duration::from_secs(30), "nothing was told: {text}");
                thread::sleep(Duration::from_millis(10));
            }
        };
        assert_eq!(told(true), "5");
        // Lowering a nice value needs a privilege.
        let behind = if rustix::process::geteuid().is_root() { "0" } else { "5" };
        assert_eq!(told(false), behind);
    }
}
