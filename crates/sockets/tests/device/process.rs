//! The process itself: what its system call filter allows, when it refuses to start, whom it serves, and what it leaves
//! behind.

use std::io::{ErrorKind, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use libc::{c_long, pid_t};
use ontime_sockets::abi::*;
use ontime_sockets::sandbox;
use vhost::vhost_user::Frontend;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};

use super::driver::{self, Call, PANICS, PATIENCE, STRICT, USER, Vm};

/// Result of a system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// The process is killed.
    Killed,
    /// EPERM.
    Refused,
    /// The call reaches the kernel; its result does not matter.
    Passed,
}

/// A signal that no filter sends and no process waits for.
const NONE: c_long = 0;
/// pthread_create's flags.
const THREAD: c_long = 0x003d_0f00;

/// (name, number, arguments, result with the filter installed) of system calls. `own` is the process's number, `other`
/// another process's.
fn calls(own: c_long, other: c_long) -> Vec<(&'static str, c_long, [c_long; 6], Outcome)> {
    use Outcome::{Killed, Passed, Refused};
    let call = |name, number, args: &[c_long], outcome| {
        let mut all = [0; 6];
        all[..args.len()].copy_from_slice(args);
        (name, number, all, outcome)
    };
    let (exec, write) =
        (c_long::from(libc::PROT_EXEC | libc::PROT_READ), c_long::from(libc::PROT_READ | libc::PROT_WRITE));
    let private = c_long::from(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let inet = c_long::from(libc::AF_INET);
    vec![
        call("a user namespace", libc::SYS_unshare, &[c_long::from(libc::CLONE_NEWUSER)], Killed),
        call(
            "a child in a user namespace",
            libc::SYS_clone,
            &[c_long::from(libc::CLONE_NEWUSER | libc::SIGCHLD)],
            Killed,
        ),
        call("a child", libc::SYS_clone, &[c_long::from(libc::SIGCHLD)], Killed),
        call(
            "a thread with a network of its own",
            libc::SYS_clone,
            &[THREAD | c_long::from(libc::CLONE_NEWNET)],
            Refused,
        ),
        call("a thread that shares no files", libc::SYS_clone, &[THREAD & !c_long::from(libc::CLONE_FILES)], Refused),
        call("clone3", libc::SYS_clone3, &[0, 0], Passed),
        call("another namespace", libc::SYS_setns, &[0, 0], Killed),
        call("another program", libc::SYS_execve, &[0, 0, 0], Killed),
        call("memory to execute", libc::SYS_mmap, &[0, 4096, exec, private, -1, 0], Killed),
        call("memory to write and execute", libc::SYS_mmap, &[0, 4096, exec | write, private, -1, 0], Killed),
        call("memory", libc::SYS_mmap, &[0, 4096, write, private, -1, 0], Passed),
        call("memory made executable", libc::SYS_mprotect, &[0, 4096, exec], Killed),
        call("memory made writable", libc::SYS_mprotect, &[0, 4096, write], Passed),
        call("a signal", libc::SYS_kill, &[other, NONE], Killed),
        call("a signal to itself", libc::SYS_kill, &[own, NONE], Killed),
        call("a signal to a thread", libc::SYS_tkill, &[other, NONE], Killed),
        call("a signal to another's thread", libc::SYS_tgkill, &[other, other, c_long::from(libc::SIGABRT)], Killed),
        call("another signal to its own", libc::SYS_tgkill, &[own, own, c_long::from(libc::SIGTERM)], Refused),
        call("a signal by a descriptor", libc::SYS_fcntl, &[0, 8, other], Killed),
        call("another signal by a descriptor", libc::SYS_fcntl, &[0, 10, 9], Killed),
        call("a descriptor's flags", libc::SYS_fcntl, &[0, c_long::from(libc::F_GETFL)], Passed),
        call("a lock", libc::SYS_fcntl, &[0, c_long::from(libc::F_SETLK), 0], Refused),
        call("another's limits", libc::SYS_prlimit64, &[other, 7, 0, 0], Killed),
        call("its own limits", libc::SYS_prlimit64, &[0, 7, 1, 0], Killed),
        call("to ask for its limits", libc::SYS_prlimit64, &[0, 7, 0, 0], Passed),
        call("another's place", libc::SYS_sched_setscheduler, &[other, 0, 0], Killed),
        call("its own place", libc::SYS_sched_setscheduler, &[0, 0, 0], Passed),
        call("a place by attributes", libc::SYS_sched_setattr, &[0, 0, 0], Killed),
        call("another's nice value", libc::SYS_setpriority, &[0, other, 0], Killed),
        call("another's CPUs", libc::SYS_sched_setaffinity, &[other, 0, 0], Killed),
        call("another's memory", libc::SYS_process_vm_readv, &[other, 0, 0, 0, 0, 0], Killed),
        call("to trace", libc::SYS_ptrace, &[0, 0, 0, 0], Killed),
        call("another's descriptor", libc::SYS_pidfd_getfd, &[0, 0, 0], Killed),
        call("to be root", libc::SYS_setresuid, &[0, 0, 0], Killed),
        call("another ring", libc::SYS_io_uring_setup, &[1, 0], Killed),
        call("a program for the kernel", libc::SYS_bpf, &[0, 0, 0], Killed),
        call("a raw socket", libc::SYS_socket, &[inet, c_long::from(libc::SOCK_RAW), 1], Killed),
        call("SCTP", libc::SYS_socket, &[inet, c_long::from(libc::SOCK_STREAM), 132], Refused),
        call(
            "a socket of this host",
            libc::SYS_socket,
            &[c_long::from(libc::AF_UNIX), c_long::from(libc::SOCK_STREAM), 0],
            Refused,
        ),
        call("a socket", libc::SYS_socket, &[inet, c_long::from(libc::SOCK_DGRAM | libc::SOCK_NONBLOCK), 0], Passed),
        call("a file", libc::SYS_openat, &[c_long::from(libc::AT_FDCWD), 0, 0, 0], Refused),
        call("a hole in the ledger", libc::SYS_madvise, &[0, 4096, c_long::from(libc::MADV_REMOVE)], Refused),
    ]
}

/// Environment variable with which [`calls_are_filtered`] tells its child which call to make.
const MAKES: &str = "ONTIME_TEST_CALL";

/// Not a test of its own: started by [`calls_are_filtered`]. Gives up what the device process gives up and makes one
/// call.
#[test]
fn makes_a_call() {
    let Ok(which) = std::env::var(MAKES) else { return };
    let other = unsafe { libc::getppid() };
    let (_, number, a, _) =
        calls(c_long::from(std::process::id()), c_long::from(other))[which.parse::<usize>().unwrap()];
    let vm = ontime_sockets::config::Vm { priority: 37, ..Default::default() };
    sandbox::restrict(&sandbox::Options::default(), &vm).unwrap().install().unwrap();
    // No thread can get above the threads of the channels.
    let highest = rustix::process::getrlimit(rustix::process::Resource::Rtprio);
    if [highest.current, highest.maximum].iter().any(|most| most.is_none_or(|most| most > 37)) {
        unsafe { libc::_exit(13) };
    }
    // The calls must not end this process: SIGTERM is ignored, addresses are null.
    let result = unsafe { libc::syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]) };
    let error = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
    unsafe { libc::_exit(if result < 0 && error == libc::EPERM { 11 } else { 12 }) };
}

#[test]
fn calls_are_filtered() {
    for (which, (name, _, _, expected)) in calls(1, 1).iter().enumerate() {
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "process::makes_a_call", "--nocapture"])
            .env(MAKES, which.to_string())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .unwrap();
        let outcome = match (status.signal(), status.code()) {
            (Some(libc::SIGSYS), _) => Outcome::Killed,
            (None, Some(11)) => Outcome::Refused,
            (None, Some(12)) => Outcome::Passed,
            _ => panic!("{name}: {status}"),
        };
        assert_eq!(outcome, *expected, "{name}");
    }
}

#[test]
fn a_vm_is_served_under_the_filters() {
    let filters = |status: &Path| {
        let text = std::fs::read_to_string(status).unwrap();
        let number = text.lines().find_map(|line| line.strip_prefix("Seccomp_filters:"));
        number.expect("Linux 5.9").trim().parse::<u32>().unwrap()
    };
    let mut vm = Vm::start(super::FREE);
    super::hostile::alive(&mut vm);
    let own = filters(Path::new("/proc/self/status"));
    for thread in std::fs::read_dir(format!("/proc/{}/task", vm.process.id())).unwrap() {
        assert_eq!(filters(&thread.unwrap().path().join("status")), own + 3);
    }
}

/// Directories for a device process that is started manually.
struct Site(tempfile::TempDir);

impl Site {
    fn new(table: &str) -> Self {
        let site = Self(tempfile::tempdir().unwrap());
        std::fs::create_dir(site.path("etc")).unwrap();
        std::fs::write(site.path("etc/sockets.toml"), format!("[vm.test]\n{table}\n")).unwrap();
        std::fs::File::create(site.path("etc/allocations")).unwrap().set_len(super::allocation::SIZE as u64).unwrap();
        site
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }

    fn command(&self) -> Command {
        let mut command = driver::command(&self.path("run"), &self.path("etc"));
        command.stderr(Stdio::piped());
        command
    }

    fn status(&self) -> std::path::PathBuf {
        ontime_sockets::Paths::new(&self.path("run"), "test").status()
    }

    fn start(&self) -> Child {
        driver::device(&self.path("run"), &self.path("etc"))
    }

    /// The existing sockets.
    fn sockets(&self) -> Vec<String> {
        sockets(self.status().parent().unwrap())
    }
}

fn sockets(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = entries.filter(|name| name.ends_with(".sock")).collect();
    names.sort();
    names
}

fn ended(process: &mut Child) -> ExitStatus {
    let start = Instant::now();
    loop {
        if let Some(status) = process.try_wait().unwrap() {
            return status;
        }
        assert!(start.elapsed() < PATIENCE, "it stays");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn said(mut process: Child) -> (bool, String) {
    let status = ended(&mut process);
    let mut text = String::new();
    process.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    (status.success(), text)
}

fn is_root() -> bool {
    let root = unsafe { libc::geteuid() } == 0;
    if !root {
        println!("SKIPPED: this test needs root");
    }
    root
}

/// Runs the command in a network namespace of its own.
fn alone(command: &mut Command) -> &mut Command {
    let unshare = || match unsafe { libc::unshare(libc::CLONE_NEWNET) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    };
    unsafe { command.pre_exec(unshare) }
}

#[test]
fn it_refuses_the_hosts_network_and_root() {
    if !is_root() {
        return;
    }
    let site = Site::new("channels = 1");
    let (fine, text) = said(site.command().env(STRICT, "1").env(USER, "64055").spawn().unwrap());
    assert!(!fine && text.contains("HostNetwork"), "in the host's network: {text}");
    let (fine, text) = said(alone(&mut site.command()).env(STRICT, "1").spawn().unwrap());
    assert!(!fine && text.contains("Root"), "as root: {text}");
    let (fine, text) = said(alone(&mut site.command()).env(STRICT, "1").env(USER, "0").spawn().unwrap());
    assert!(!fine && text.contains("Root"), "as root, by name: {text}");
    assert!(!site.path("run").exists(), "it has made something before it was refused");
    let mut process = alone(&mut site.command()).env(STRICT, "1").env(USER, "64055").spawn().unwrap();
    let start = Instant::now();
    // The start is complete when the process answers.
    while UnixStream::connect(site.status()).is_err() {
        assert!(start.elapsed() < PATIENCE && process.try_wait().unwrap().is_none(), "{}", said(process).1);
        std::thread::sleep(Duration::from_millis(5));
    }
    UnixStream::connect(site.status()).unwrap().read_to_string(&mut String::new()).unwrap();
    // The user that the process has changed to may remove what root has created.
    assert_eq!(unsafe { libc::kill(process.id() as pid_t, libc::SIGTERM) }, 0);
    ended(&mut process);
    assert_eq!(site.sockets(), [""; 0]);
}

/// QEMU's group, which also contains the QEMUs of other VMs, may connect only to the devices.
#[test]
fn only_the_devices_are_for_qemu() {
    let vm = Vm::start("channels = 1\ndeadlines = true");
    let directory = vm.socket_path(0).parent().unwrap().to_owned();
    let mode = |name: &str| std::fs::metadata(directory.join(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!(["main.sock", "channel1.sock", "status.sock", "deadlines.sock"].map(mode), [0o660, 0o660, 0o600, 0o600]);
}

#[test]
fn a_second_process_is_refused_and_leaves_the_first_alone() {
    let mut vm = Vm::start("channels = 1");
    let directory = vm.socket_path(0).parent().unwrap().to_owned();
    // A new socket may get its predecessor's inode number.
    let made = || -> Vec<std::time::SystemTime> {
        let of = |name: &String| std::fs::metadata(directory.join(name)).ok()?.modified().ok();
        sockets(&directory).iter().filter_map(of).collect()
    };
    let before = made();
    assert_eq!(before.len(), 3);
    let config = vm.run.parent().unwrap().join("etc");
    let (fine, text) = said(driver::command(&vm.run, &config).stderr(Stdio::piped()).spawn().unwrap());
    assert!(!fine && text.contains("Running"), "{text}");
    assert_eq!(made(), before);
    super::hostile::alive(&mut vm);
    // Only the process's own user may take the lock.
    let lock = std::fs::metadata(directory.join("lock")).unwrap();
    assert_eq!(lock.permissions().mode() & 0o777, 0o600);
    // A killed process holds no lock, and its leftover sockets do not prevent a new start.
    vm.process.kill().unwrap();
    vm.process.wait().unwrap();
    assert_eq!(sockets(&directory).len(), 3);
    let mut next = driver::device(&vm.run, &config);
    let start = Instant::now();
    while made() == before {
        assert!(start.elapsed() < PATIENCE, "the next one does not come");
    }
    next.kill().unwrap();
    next.wait().unwrap();
}

#[test]
fn its_sockets_are_gone_when_it_has_ended() {
    let mut vm = Vm::start("channels = 2\ndeadlines = true");
    let directory = vm.socket_path(0).parent().unwrap().to_owned();
    assert_eq!(sockets(&directory), ["channel1.sock", "channel2.sock", "deadlines.sock", "main.sock", "status.sock"]);
    vm.channels.clear();
    assert!(ended(&mut vm.process).success());
    assert_eq!(sockets(&directory), [""; 0], "QEMU has gone");
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let site = Site::new("channels = 1");
        let mut process = site.start();
        assert_eq!(site.sockets().len(), 3);
        // The start is complete: the last socket is created before the rest.
        UnixStream::connect(site.status()).unwrap().read_to_string(&mut String::new()).unwrap();
        assert_eq!(unsafe { libc::kill(process.id() as pid_t, signal) }, 0);
        assert!(ended(&mut process).success(), "signal {signal}");
        assert_eq!(site.sockets(), [""; 0], "signal {signal}");
    }
}

#[test]
fn it_ends_where_a_thread_panics() {
    let site = Site::new("channels = 1");
    let mut process = site.command().env(PANICS, "1").spawn().unwrap();
    driver::wait_for(&site.path("run"));
    let _qemu = UnixStream::connect(ontime_sockets::Paths::new(&site.path("run"), "test").device(0)).unwrap();
    let status = ended(&mut process);
    assert_eq!(status.signal(), Some(libc::SIGABRT), "{status}");
}

/// Result for a process that connects to a device's socket and sends messages that would end the device process. True:
/// the connection is closed; false: it stays open.
fn refused(path: &Path) -> bool {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    send_memory_that_is_not_there(&stream);
    match stream.read(&mut [0; 1]) {
        Ok(read) => read == 0,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}

/// Sends guest memory of which the file is empty, and a ring in it. Reading the ring raises SIGBUS.
fn send_memory_that_is_not_there(stream: &UnixStream) {
    let at = 1 << 32;
    let empty = unsafe { libc::memfd_create(c"empty".as_ptr(), 0) };
    let empty = unsafe { OwnedFd::from_raw_fd(empty) };
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: 0,
        memory_size: 1 << 20,
        userspace_addr: at,
        mmap_offset: 0,
        mmap_handle: empty.as_raw_fd(),
    };
    let ring = VringConfigData {
        queue_max_size: 256,
        queue_size: 256,
        flags: 0,
        desc_table_addr: at,
        used_ring_addr: at + 0x2000,
        avail_ring_addr: at + 0x1000,
        log_addr: None,
    };
    // The connection may already be closed.
    let frontend = Frontend::from_stream(stream.try_clone().unwrap(), 2);
    let _ = frontend.set_mem_table(&[region]).and_then(|_| frontend.set_vring_addr(0, &ring));
}

/// Environment variable with which [`one_process_has_all_of_a_vms_devices`] tells its child where to connect.
const CONNECTS: &str = "ONTIME_TEST_CONNECT";

/// Not a test of its own: another process that connects.
#[test]
fn connects() {
    let Ok(path) = std::env::var(CONNECTS) else { return };
    std::process::exit(if refused(path.as_ref()) { 11 } else { 12 });
}

#[test]
fn one_process_has_all_of_a_vms_devices() {
    let mut vm = Vm::begin(&format!("{}\nqemu-user = {}", super::FREE, unsafe { libc::geteuid() }));
    for _ in 0..5 {
        let stranger = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "process::connects", "--nocapture"])
            .env(CONNECTS, vm.socket_path(1))
            .stdout(Stdio::null())
            .status()
            .unwrap();
        assert_eq!(stranger.code(), Some(11), "a second process is served");
    }
    // The device process continues and serves the first process.
    let channel = vm.connect(1);
    vm.channels.push(channel);
    super::hostile::alive(&mut vm);
    vm.main().socket(1, libc::AF_INET, libc::SOCK_DGRAM, 1);
    assert_eq!(vm.channels[1].result(Call::new(ONTIME_OP_POLL, 1)), Ok(0));
}

/// libvirt runs all QEMUs as one user, each in a cgroup that is named after its VM.
#[test]
fn a_qemu_of_another_vm_is_not_served() {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let mount = mounts.lines().map(|line| line.split(' ')).find(|mount| mount.clone().nth(2) == Some("cgroup2"));
    let root = mount.and_then(|mut mount| mount.nth(1)).unwrap_or("/sys/fs/cgroup").to_owned();
    let number = std::process::id();
    let groups = ["other", "test"].map(|vm| format!(r"{root}/machine-qemu\x2d{number}\x2d{vm}.scope"));
    if !is_root() || groups.iter().any(|group| std::fs::create_dir(group).is_err()) {
        println!("SKIPPED: no cgroup can be made");
        return;
    }
    let site = Site::new("");
    let mut process = site.start();
    // What an admitted process has sent ends the device process, at once or when it gets a CPU.
    let mut patience = [Duration::from_millis(200), Duration::from_secs(60)].into_iter();
    let ends = groups.clone().map(|group| {
        let procs = format!("{group}/cgroup.procs");
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "process::connects", "--nocapture"]);
        child.env(CONNECTS, ontime_sockets::Paths::new(&site.path("run"), "test").device(0));
        unsafe { child.pre_exec(move || std::fs::write(&procs, "0")) };
        assert_eq!(child.stdout(Stdio::null()).status().unwrap().code(), Some(11));
        let (begun, patience) = (Instant::now(), patience.next().unwrap());
        loop {
            let ended = process.try_wait().unwrap();
            if ended.is_some() || begun.elapsed() > patience {
                break ended.and_then(|status| status.signal());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    let _ = process.kill();
    process.wait().unwrap();
    groups.iter().for_each(|group| std::fs::remove_dir(group).unwrap());
    assert_eq!(ends, [None, Some(libc::SIGBUS)], "another VM's QEMU is refused, its own is served");
}

/// Control of the other tests' attack: the messages of a process that is admitted do end the device process.
#[test]
fn memory_that_is_not_there_ends_its_own_vms_process_alone() {
    let (site, mut other) = (Site::new(""), Vm::start(super::FREE));
    let mut process = site.start();
    let mut stream = UnixStream::connect(ontime_sockets::Paths::new(&site.path("run"), "test").device(0)).unwrap();
    send_memory_that_is_not_there(&stream);
    assert!(!matches!(stream.read(&mut [0; 1]), Ok(1..)));
    assert_eq!(process.wait().unwrap().signal(), Some(libc::SIGBUS));
    super::hostile::alive(&mut other);
}

#[test]
fn another_user_is_not_served() {
    let site = Site::new(&format!("qemu-user = {}", unsafe { libc::geteuid() } + 1));
    let mut process = site.start();
    let main = ontime_sockets::Paths::new(&site.path("run"), "test").device(0);
    for _ in 0..20 {
        assert!(refused(&main));
    }
    assert_eq!(process.try_wait().unwrap(), None, "it waits for the right one");
    process.kill().unwrap();
    process.wait().unwrap();
}
