//! The device process: sockets for QEMU, threads and termination.
//!
//! The process serves one run of one VM. When QEMU closes a connection, the process ends, and with it every socket of
//! the VM. The service manager starts the next process.

use std::fs::{File, Permissions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{channel, sync_channel};
use std::time::Duration;

use ontime_sched::Ledger;
use ontime_tenants::{Repeats, remedy};
use rustix::fs::{FlockOperation, Mode};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use thiserror::Error;
use vhost_user_backend::VhostUserDaemon;
use vm_memory::GuestMemoryAtomic;

use crate::abi::Errno;
use crate::accepting::connections;
use crate::config::Vm;
use crate::device::Device;
use crate::entrance::Entrance;
use crate::guard_thread;
use crate::held::Held;
use crate::memory::Memory;
use crate::peer::{self, Peers};
use crate::sandbox::{self, SandboxError};
use crate::shared::Shared;
use crate::status::Status;
use crate::wait::Ring;

/// Timeout for the worker's list of sockets.
const STATUS_PATIENCE: Duration = Duration::from_secs(2);

/// Why the process cannot serve.
#[derive(Debug, Error)]
pub enum ProcessError {
    /// A directory or socket cannot be created.
    #[error("{}: {what}: {source}; {}", .path.display(), path_remedy(source))]
    Path {
        /// The directory or socket.
        path: PathBuf,
        /// What the process tried to do.
        what: &'static str,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// A descriptor or thread cannot be created.
    #[error("{what}: {source}; {}", remedy(source))]
    System {
        /// What the process tried to do.
        what: &'static str,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// Another process serves the VM.
    #[error("another process serves VM {vm} ({}); stop that process first (systemctl stop ontime-device@{vm}), or let \
        it serve", .directory.display())]
    Running {
        /// The VM's name.
        vm: String,
        /// The VM's directory.
        directory: PathBuf,
    },
    /// A vhost-user connection failed.
    #[error(
        "channel {channel}: its vhost-user connection failed: {reason}; if QEMU still runs, connect the new process \
         with `ontime attach VM --qmp SOCKET`"
    )]
    Vhost {
        /// The number of the device: 0 is main.
        channel: u32,
        /// The error message.
        reason: String,
    },
    /// Giving up privileges failed.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
}

/// The paths of a VM's sockets.
#[derive(Debug, Clone)]
pub struct Paths {
    directory: PathBuf,
}

impl Paths {
    /// The paths below the run directory.
    pub fn new(run: &Path, vm: &str) -> Self {
        Self { directory: run.join("device").join(vm) }
    }

    /// The VM's own directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The socket for QEMU's connection of a channel; 0 is main.
    pub fn device(&self, channel: u32) -> PathBuf {
        self.directory.join(if channel == 0 { "main.sock".to_owned() } else { format!("channel{channel}.sock") })
    }

    /// The socket that answers with [`Status`].
    pub fn status(&self) -> PathBuf {
        self.directory.join("status.sock")
    }

    /// The socket for the daemon, which admits the guest's deadline tasks ([`crate::deadlines`]).
    pub fn deadlines(&self) -> PathBuf {
        self.directory.join("deadlines.sock")
    }
}

/// Options of the device process.
#[derive(Debug, Clone)]
pub struct Options {
    /// The VM's name.
    pub name: String,
    /// The VM's configuration.
    pub vm: Vm,
    /// The paths of its sockets.
    pub paths: Paths,
    /// The privileges to give up.
    pub sandbox: sandbox::Options,
}

/// Serves a VM until QEMU disconnects.
///
/// # Errors
/// [`ProcessError`]
pub fn run(options: &Options) -> Result<(), ProcessError> {
    let system = |what| move |source| ProcessError::System { what, source };
    abort_on_panic();
    let host_network = sandbox::enter_network(&options.sandbox)?;
    let channels = options.vm.channels + 1;
    let (directory, listeners) = listeners(options, channels)?;
    let mut signals = Signals::new([SIGTERM, SIGINT]).map_err(system("waiting for signals"))?;
    let mut rings = rings(options, channels);
    let ledger = options.vm.deadlines.then(Ledger::create).transpose().map_err(system("making a ledger"))?;
    let filters = sandbox::restrict(&options.sandbox, &options.vm)?;

    let held = Held::open().map_err(|Errno(error)| ProcessError::System {
        what: "making sockets that keep the kernel from being switched",
        source: std::io::Error::from_raw_os_error(error),
    })?;
    let mut shared = Shared::new(&options.name, options.vm.clone(), generation(), ledger)
        .map_err(system("making event descriptors"))?;
    shared.ipv6 = held.ipv6;
    shared.host_network = host_network;
    let shared = Arc::new(shared);
    let peers = Arc::new(Peers::new(&options.name, options.vm.qemu_user, filters));
    let (ended, ends) = channel();
    for (channel, entrance) in listeners.devices.into_iter().enumerate() {
        let (shared, ended) = (shared.clone(), ended.clone());
        let ring = if channel == 0 { None } else { rings.pop() };
        let peers = peers.clone();
        let serve = move || drop(ended.send(serve(&shared, channel as u32, entrance, &peers, ring)));
        std::thread::Builder::new()
            .name(format!("vhost-user/{channel}"))
            .spawn(serve)
            .map_err(system("starting a thread"))?;
    }
    let (telling, status) = (shared.clone(), listeners.status);
    let tell = move || serve_status(&telling, &status);
    std::thread::Builder::new().name("status".to_owned()).spawn(tell).map_err(system("starting a thread"))?;
    let guarded = shared.clone();
    let watch = move || guard_thread::run(&guarded);
    std::thread::Builder::new().name("guard".to_owned()).spawn(watch).map_err(system("starting a thread"))?;
    let finishing = shared.clone();
    let finish = move || finishing.closing.run();
    std::thread::Builder::new().name("closing".to_owned()).spawn(finish).map_err(system("starting a thread"))?;
    let stop = move || {
        if signals.forever().next().is_some() {
            let _ = ended.send(Ok(()));
        }
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(stop).map_err(system("starting a thread"))?;
    if let Some(listener) = listeners.deadlines {
        let shared = shared.clone();
        let admit = move || shared.deadlines.serve(&listener);
        std::thread::Builder::new().name("deadlines".to_owned()).spawn(admit).map_err(system("starting a thread"))?;
    }
    tracing::info!(vm = options.name, channels, "waiting for the VM at {}", options.paths.directory().display());
    // The end of the first device's connection, or SIGTERM, ends the process.
    let end = ends.recv().unwrap_or(Ok(()));
    drop(directory);
    end
}

/// Aborts the process if a thread panics. Without one of its threads the VM would hang, and a poisoned lock would not
/// be noticed.
fn abort_on_panic() {
    let say = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        say(panic);
        std::process::abort();
    }));
}

/// One ring per channel, or none at all.
fn rings(options: &Options, channels: u32) -> Vec<Ring> {
    let rings: std::io::Result<Vec<_>> = (1..channels).map(|_| Ring::new()).collect();
    rings.unwrap_or_else(|error| {
        tracing::warn!(
            vm = options.name,
            "channels wait by epoll, which makes a doorbell dearer on a PREEMPT_RT host: no io_uring ({error}); it \
             takes Linux 6.1 and kernel.io_uring_disabled=0"
        );
        Vec::new()
    })
}

struct Listeners {
    devices: Vec<Entrance>,
    status: UnixListener,
    deadlines: Option<UnixListener>,
}

/// The VM's directory. It belongs to this process as long as the process holds the lock. The sockets are removed at the
/// end.
struct Directory {
    sockets: Vec<PathBuf>,
    _lock: File,
}

impl Directory {
    /// # Errors
    /// [`ProcessError::Running`] if another process holds the lock.
    fn lock(options: &Options) -> Result<Self, ProcessError> {
        let directory = options.paths.directory();
        std::fs::create_dir_all(directory).map_err(failed("making it", directory))?;
        if let Some((user, _)) = options.sandbox.user {
            // At the end that user removes the sockets.
            std::os::unix::fs::chown(directory, Some(user), None)
                .map_err(failed("giving it to the user", directory))?;
        }
        let path = directory.join("lock");
        // QEMU's group may not open the file and so cannot lock it.
        let lock = File::options().write(true).create(true).truncate(false).mode(0o600).open(&path);
        let lock = lock.map_err(failed("opening it", &path))?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self { sockets: Vec::new(), _lock: lock }),
            Err(rustix::io::Errno::WOULDBLOCK) => {
                Err(ProcessError::Running { vm: options.name.clone(), directory: directory.to_owned() })
            }
            Err(error) => Err(failed("locking it", &path)(error.into())),
        }
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        for socket in &self.sockets {
            // The service manager may have removed the socket.
            let _ = std::fs::remove_file(socket);
        }
    }
}

/// The remedy for a failed path: most often the path belongs to another user.
fn path_remedy(source: &std::io::Error) -> &'static str {
    match source.kind() {
        std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::NotFound => {
            "check that the directory exists and belongs to this user"
        }
        _ => remedy(source),
    }
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> ProcessError + use<> {
    let path = path.to_owned();
    move |source| ProcessError::Path { path, what, source }
}

fn listeners(options: &Options, channels: u32) -> Result<(Directory, Listeners), ProcessError> {
    let mut directory = Directory::lock(options)?;
    // No other user connects before a socket has its mode.
    rustix::process::umask(Mode::from_raw_mode(0o177));
    // QEMU's group also contains the other VMs' QEMUs, so it only gets access to the devices' sockets.
    let mut listen = |path: &Path| {
        // Left over from a process that was killed.
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::bind(path).map_err(failed("listening", path))?;
        directory.sockets.push(path.to_owned());
        Ok::<_, ProcessError>(listener)
    };
    let device = |channel| {
        let path = &options.paths.device(channel);
        let entrance = Entrance::new(listen(path)?, path).map_err(failed("connecting", path))?;
        std::fs::set_permissions(path, Permissions::from_mode(0o660)).map_err(failed("setting its mode", path))?;
        if let Some(group) = options.sandbox.group {
            std::os::unix::fs::chown(path, None, Some(group)).map_err(failed("giving it to the group", path))?;
        }
        Ok(entrance)
    };
    let devices = (0..channels).map(device).collect::<Result<_, ProcessError>>()?;
    let deadlines = options.vm.deadlines.then(|| listen(&options.paths.deadlines())).transpose()?;
    let status = listen(&options.paths.status())?;
    Ok((directory, Listeners { devices, status, deadlines }))
}

/// A number that differs at each start of the process.
fn generation() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    now.as_nanos() as u64 ^ u64::from(std::process::id()) << 48
}

fn serve(
    shared: &Arc<Shared>,
    channel: u32,
    entrance: Entrance,
    peers: &Peers,
    ring: Option<Ring>,
) -> Result<(), ProcessError> {
    let vhost = |error: vhost_user_backend::Error| ProcessError::Vhost { channel, reason: error.to_string() };
    let system = |what| move |source| ProcessError::System { what, source };
    let memory = GuestMemoryAtomic::new(Memory::new());
    shared.guard.watch(channel, memory.clone());
    let device = Device::new(shared.clone(), channel, memory.clone(), ring).map_err(system("making a device"))?;
    let device = Arc::new(device);
    let name = format!("ontime-vhost/{channel}");
    let mut daemon = VhostUserDaemon::new(name, device.clone(), memory).map_err(vhost)?;
    daemon.start(&mut entrance.for_daemon().map_err(system("waiting for QEMU"))?).map_err(vhost)?;
    let places = entrance.places().map_err(system("finding the first connection"))?;
    if let Some(handler) = daemon.get_epoll_handlers().first() {
        device.attach(handler.as_raw_fd()).map_err(system("waiting for sockets"))?;
    }
    let mut refusals = Repeats::default();
    let qemu =
        connections(&entrance.listener).find(|connection| admitted(shared, channel, peers, connection, &mut refusals));
    if let Some(qemu) = qemu {
        entrance.let_in(qemu, &places).map_err(system("handing over QEMU's connection"))?;
    }
    let ended = daemon.wait();
    tracing::info!(vm = shared.name, channel, "QEMU is gone");
    use vhost::vhost_user::Error::{Disconnected, PartialMessage};
    match ended {
        Ok(()) | Err(vhost_user_backend::Error::HandleRequest(Disconnected | PartialMessage)) => Ok(()),
        Err(error) => Err(vhost(error)),
    }
}

/// Whether a connection is QEMU's. Every process of QEMU's group may connect as often as it likes, other VMs' QEMUs
/// included, so its refusals are logged once a minute.
fn admitted(shared: &Shared, channel: u32, peers: &Peers, connection: &UnixStream, refusals: &mut Repeats) -> bool {
    let vm = &shared.name;
    match peer::of(connection).map(|peer| (peer, peers.admit(peer, || peer::cgroups(connection, peer)))) {
        Ok((peer, Ok(()))) => {
            tracing::info!(vm = shared.name, channel, ?peer, "connected");
            return true;
        }
        Ok((peer, Err(reason))) => {
            let line = format!("VM {vm}, channel {channel}: a connection of {peer:?} is refused: {reason}");
            refusals.warn_of("refused", &line);
        }
        Err(error) => {
            let remedy = remedy(&error);
            let line = format!("VM {vm}, channel {channel}: a connection's process is not found: {error}; {remedy}");
            refusals.warn_of("not found", &line);
        }
    }
    false
}

fn serve_status(shared: &Shared, listener: &UnixListener) {
    for stream in connections(listener) {
        // A client that does not read its answer must not stop this thread.
        let _ = answer(shared, stream);
    }
}

fn answer(shared: &Shared, mut stream: UnixStream) -> std::io::Result<()> {
    stream.set_write_timeout(Some(STATUS_PATIENCE))?;
    stream.write_all(&serde_json::to_vec(&status(shared, STATUS_PATIENCE))?)
}

/// The status, with the list of sockets if the worker sends it within `patience`.
fn status(shared: &Shared, patience: Duration) -> Status {
    let (sender, receiver) = sync_channel(1);
    let asked = shared.mail.ask(sender);
    Status {
        vm: shared.name.clone(),
        sockets: asked.ok().and_then(|()| receiver.recv_timeout(patience).ok()),
        deadlines: shared.deadlines.held(),
        counters: shared.counters.named(shared.closing.count()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log_lines::count_lines;

    #[test]
    fn processes_that_are_refused_do_not_fill_the_log() {
        let shared = Shared::new("db", Vm { channels: 1, ..Vm::default() }, 1, None).unwrap();
        let (near, _far) = UnixStream::pair().unwrap();
        let own = rustix::process::geteuid().as_raw();
        let of = |user| Peers::new("a", Some(user), sandbox::Filters::default());
        let (strict, right) = (of(own.wrapping_add(1)), of(own));
        let mut refusals = Repeats::default();
        let refuse = || (0..300).for_each(|_| assert!(!admitted(&shared, 1, &strict, &near, &mut refusals)));
        assert_eq!(count_lines(refuse), 1);
        let admit = || assert!(admitted(&shared, 1, &right, &near, &mut refusals));
        assert_eq!(count_lines(admit), 1, "QEMU's own connection is told all the same");
    }

    #[test]
    fn a_worker_that_does_not_answer_is_no_vm_without_sockets() {
        let vm = Vm { channels: 1, ..Vm::default() };
        let shared = Arc::new(Shared::new("db", vm, 1, None).unwrap());
        let worker = shared.mail.take_worker().unwrap();
        assert_eq!(status(&shared, Duration::ZERO).sockets, None, "the worker is busy");
        let asking = shared.clone();
        let thread = std::thread::spawn(move || status(&asking, Duration::from_secs(60)));
        // The first request is that of the status that has given up.
        assert!(worker.asked.recv().unwrap().try_send(Vec::new()).is_err());
        worker.asked.recv().unwrap().try_send(Vec::new()).unwrap();
        assert_eq!(thread.join().unwrap().sockets, Some(Vec::new()), "the worker has answered: no socket is open");
        drop(worker);
        assert_eq!(status(&shared, Duration::from_secs(60)).sockets, None, "the worker has ended");
    }
}
