//! Asks QEMU for its vCPU threads, if QEMU does not name its threads.
//!
//! Input: a Unix socket on which a QEMU process listens for QMP. Output: vCPU number by thread number, or an error
//! text. Source: QEMU `docs/interop/qmp-spec.rst`, `query-cpus-fast`.
//!
//! A monitor serves one client at a time. So it is asked only if names do not identify the vCPUs, with a short timeout,
//! and never if libvirt uses it. An answer is kept while its threads live. The socket's path comes from a process of
//! any user, who may name other users' sockets. A connection by root alone has effects there: another VM's monitor
//! serves nobody else meanwhile, and a device process takes it for the daemon's or for QEMU's. So the file must belong
//! to the process's user, and nothing is sent before the socket is known to be that process's (`SO_PEERCRED`).
//!
//! A monitor may send any descriptors along with its answer. Nobody receives them, so the kernel closes them in the
//! reading thread, which may wait for the process (`wait_limit`), and not every such wait ends at a signal. So a thread
//! of its own asks, and is abandoned if it does not end.
//!
//! Each account, of a user or a container, has a number of these threads, and less time for each further monitor while
//! others of the account do not answer. So monitors that never answer delay and exclude only VMs of their own account.
//! However many accounts have such monitors, one thread is left for each other account, up to [`MOST`] in all, and the
//! system has threads of its own.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::Deserialize;

use crate::budget::Account;
use crate::files;
use crate::proc::{parse_uids, printable};
use crate::thread::ThreadId;
use crate::wait_limit::{limit_waits, refuse_descriptors};

/// Larger than any answer, bytes: 1,024 vCPUs give about 200 KiB.
const ANSWER_MAX: u64 = 1 << 20;
/// The most sockets that are tried per process, because its command line may name any number.
const SOCKETS: usize = 4;
/// How long the first refusal is kept before the monitor is asked again: a starting QEMU listens before it answers.
/// Each further refusal is kept twice as long, up to the maximum.
const RETRY: Duration = Duration::from_millis(500);
const RETRY_MAX: Duration = Duration::from_secs(30);
/// How long an answer is kept while its threads live (vCPUs may be hot-plugged).
const KEEP: Duration = Duration::from_secs(60);
/// How long a thread has, beyond the timeout of its monitor, until it is abandoned; less while other threads of its
/// account have not ended.
const MARGIN: Duration = Duration::from_millis(200);
/// How long the end of a thread that has told its answer is waited for, so that the process can be asked again.
const CLOSES: Duration = Duration::from_millis(100);
/// The most threads that ask or are abandoned at a time, one for each process: for one account, in all where their
/// account has one already, and in all. Those of the system's account are not counted in the latter two.
const ACCOUNT_THREADS: usize = 6;
const THREADS: usize = 4 * ACCOUNT_THREADS;
const MOST: usize = 2 * THREADS;
/// Stack size of such a thread, bytes: enough for nested JSON. The daemon's memory is locked.
const STACK: usize = 1 << 20;

/// vCPU numbers by thread number.
pub type VcpuThreads = BTreeMap<i32, u32>;

/// QEMU monitors with their last answers.
#[derive(Debug)]
pub struct Monitors {
    timeout: Duration,
    asked: Mutex<HashMap<ThreadId, Asked>>,
}

#[derive(Debug, Clone)]
struct Asked {
    account: Account,
    /// Whether all the time that its monitors had passed without an answer.
    silent: bool,
    when: Instant,
    believed: Duration,
    answer: Result<VcpuThreads, String>,
}

impl Asked {
    fn is_good(&self, alive: &[i32]) -> bool {
        let current = match &self.answer {
            Ok(vcpus) => vcpus.keys().all(|tid| alive.contains(tid)),
            Err(_) => true,
        };
        current && self.when.elapsed() < self.believed
    }
}

/// How long to keep an answer, depending on the previous one.
fn believed(answer: &Result<VcpuThreads, String>, before: Option<&Asked>) -> Duration {
    match (answer, before) {
        (Ok(_), _) => KEEP,
        (Err(_), Some(Asked { answer: Err(_), believed, .. })) => (*believed * 2).min(RETRY_MAX),
        (Err(_), _) => RETRY,
    }
}

impl Monitors {
    /// Waits at most `timeout` for the answers of one process's monitors, and for a fraction of that while monitors of
    /// other processes of its account do not answer: for N silent ones about `timeout` * ln(N) in all.
    pub(crate) fn asking_for(timeout: Duration) -> Self {
        Self { timeout, asked: Mutex::default() }
    }

    /// The vCPU threads of an account's QEMU process, from the first of its sockets that answers.
    ///
    /// # Errors
    /// A sentence with the reason.
    pub fn vcpus(
        &self,
        process: ThreadId,
        account: &Account,
        alive: &[i32],
        sockets: &[String],
    ) -> Result<VcpuThreads, String> {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kept) = asked.get(&process).filter(|kept| kept.is_good(alive)) {
            return kept.answer.clone();
        }
        let mut answer =
            Err("QEMU was started without -qmp unix:PATH,server=on, by which it could be asked".to_owned());
        let sockets = sockets.get(..SOCKETS).unwrap_or(sockets);
        let is_beside = |(other, of): &(&ThreadId, &Asked)| **other != process && of.account == *account && of.silent;
        let silent = asked.iter().filter(is_beside).count();
        let count = u32::try_from(sockets.len() * (1 + silent)).unwrap_or(u32::MAX);
        let part = self.timeout.checked_div(count).unwrap_or_default();
        let start = Instant::now();
        for socket in sockets {
            answer = ask(process, account, Path::new(socket), part)
                .map(|vcpus| vcpus.into_iter().filter(|(tid, _)| alive.contains(tid)).collect())
                .map_err(|error| {
                    format!("its QMP monitor {} does not tell them: {error}", printable(socket.as_bytes()))
                });
            if answer.is_ok() {
                break;
            }
        }
        let believed = believed(&answer, asked.get(&process));
        let silent = answer.is_err() && !sockets.is_empty() && start.elapsed() >= part;
        asked.retain(|_, old| old.when.elapsed() < 2 * KEEP);
        let when = Instant::now();
        asked.insert(process, Asked { account: account.clone(), silent, when, believed, answer: answer.clone() });
        answer
    }
}

fn ask(process: ThreadId, account: &Account, path: &Path, timeout: Duration) -> io::Result<VcpuThreads> {
    static RUNNING: Running = Running::new(BTreeMap::new());
    let (until, path) = (Instant::now() + timeout, path.to_owned());
    in_thread(&RUNNING, process, account, timeout, move |tell| {
        match own_table().and_then(|()| connect(process.pid, &path)) {
            Ok(stream) => talk(stream, until, tell),
            Err(error) => tell(Err(error)),
        }
    })
}

fn talk(stream: UnixStream, until: Instant, tell: &dyn Fn(io::Result<VcpuThreads>)) {
    let says = Bounded { stream: &stream, until };
    tell(converse(says, |command| (&stream).write_all(command.as_bytes())));
    // Closes what was sent and not read.
    limit_waits(|| drop(stream));
}

/// The processes that are asked by threads which have not ended, each with its account.
type Running = Mutex<BTreeMap<ThreadId, Account>>;

/// Counts a thread for its process until it ends or is not started.
struct Counted {
    running: &'static Running,
    process: ThreadId,
}

impl Counted {
    /// Also returns how many other threads the account has.
    fn start(running: &'static Running, process: ThreadId, account: &Account) -> io::Result<(Self, u32)> {
        let mut all = running.lock().unwrap_or_else(PoisonError::into_inner);
        if all.contains_key(&process) {
            return Err(io::Error::other("a thread that asked this process before has not ended"));
        }
        let own = all.values().filter(|other| *other == account).count();
        if own >= ACCOUNT_THREADS {
            return Err(io::Error::other(format!(
                "{ACCOUNT_THREADS} threads wait for other monitors of {account} already; end the processes that do not \
                 answer"
            )));
        }
        let others = all.values().filter(|other| **other != Account::System).count();
        if *account != Account::System && others >= if own == 0 { MOST } else { THREADS } {
            return Err(io::Error::other(format!(
                "{others} threads wait for other monitors already; end the processes that do not answer"
            )));
        }
        all.insert(process, account.clone());
        Ok((Self { running, process }, own as u32))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.running.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.process);
    }
}

/// Runs `ask` in a thread and returns what it tells; abandons the thread if it takes longer than `patience` and a
/// margin. Does not start it while another thread for this process runs.
fn in_thread<T: Send + 'static>(
    running: &'static Running,
    process: ThreadId,
    account: &Account,
    patience: Duration,
    ask: impl FnOnce(&dyn Fn(io::Result<T>)) + Send + 'static,
) -> io::Result<T> {
    let (counted, beside) = Counted::start(running, process, account)?;
    let (tell, told) = sync_channel(1);
    let run = move || {
        ask(&|answer| {
            // Nobody waits any more if the thread was abandoned.
            let _ = tell.try_send(answer);
        });
        drop(counted);
        // Now the process may be asked again.
        drop(tell);
    };
    std::thread::Builder::new().name("ontime-ask".to_owned()).stack_size(STACK).spawn(run)?;
    let answer = told
        .recv_timeout(patience + MARGIN / (1 + beside))
        .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "the thread that asked did not end in time"))?;
    let _ = told.recv_timeout(CLOSES);
    answer
}

/// Gives the thread a descriptor table of its own, with the standard streams only: a thread that is abandoned keeps no
/// descriptor of the daemon open. Nothing may be logged from then on.
fn own_table() -> io::Result<()> {
    // The first use of the timer may log.
    limit_waits(|| {
        // SAFETY: takes numbers only. The descriptors that are closed are this thread's own copies.
        let closed = unsafe {
            libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_UNSHARE as libc::c_uint)
        };
        if closed == 0 { Ok(()) } else { own_table_by_list() }
    })
}

/// The same before Linux 5.9.
fn own_table_by_list() -> io::Result<()> {
    // SAFETY: takes a number only.
    if unsafe { libc::unshare(libc::CLONE_FILES) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // Among these is the directory itself, which is closed by then.
    let listed = {
        let directory = files::directory("/proc/thread-self/fd")?;
        files::numbers(&directory)
    };
    for number in listed.into_iter().filter(|number| *number > 2) {
        // SAFETY: closes this thread's own copy, which nothing in this thread uses.
        unsafe { libc::close(number) };
    }
    Ok(())
}

/// Runs the QMP dialog: sends commands by `say` and reads the replies from `says`.
///
/// # Errors
/// The monitor does not speak QMP, its answer is too long, or it refuses.
#[doc(hidden)]
pub fn converse(says: impl Read, mut say: impl FnMut(&str) -> io::Result<()>) -> io::Result<VcpuThreads> {
    let mut lines = BufReader::new(says.take(ANSWER_MAX));
    let mut reply = |command: &str| -> io::Result<serde_json::Value> {
        if !command.is_empty() {
            say(command)?;
        }
        loop {
            let mut line = Vec::new();
            if lines.read_until(b'\n', &mut line)? == 0 {
                return Err(io::Error::other("QEMU closed the connection"));
            }
            let value: serde_json::Value = serde_json::from_slice(&line)
                .map_err(|error| io::Error::other(format!("its answer is no JSON: {error}")))?;
            // Events may arrive between any two replies.
            if value.get("event").is_none() {
                return Ok(value);
            }
        }
    };
    if reply("")?.get("QMP").is_none() {
        return Err(io::Error::other("what listens there does not greet as QMP"));
    }
    reply("{\"execute\":\"qmp_capabilities\"}\n")?;
    vcpus_in(reply("{\"execute\":\"query-cpus-fast\"}\n")?)
}

fn vcpus_in(mut reply: serde_json::Value) -> io::Result<VcpuThreads> {
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    struct Cpu {
        cpu_index: u32,
        thread_id: i32,
    }
    let list = reply
        .get_mut("return")
        .map(serde_json::Value::take)
        .ok_or_else(|| io::Error::other("QEMU refused query-cpus-fast"))?;
    let cpus: Vec<Cpu> = serde_json::from_value(list)
        .map_err(|error| io::Error::other(format!("its list of vCPUs is not as specified: {error}")))?;
    Ok(cpus.into_iter().map(|cpu| (cpu.thread_id, cpu.cpu_index)).collect())
}

/// Finds the socket at a path that a process has named, without connecting to it. The process may be in a container:
/// links lead nowhere outside of its root directory.
///
/// # Errors
/// The file is no socket, or does not belong to the process's user.
fn named(pid: i32, path: &Path) -> io::Result<OwnedFd> {
    let (from, resolve) =
        if path.is_absolute() { ("root", ResolveFlags::IN_ROOT) } else { ("cwd", ResolveFlags::NO_SYMLINKS) };
    let place = OFlags::PATH | OFlags::CLOEXEC;
    let directory = rustix::fs::open(format!("/proc/{pid}/{from}"), place | OFlags::DIRECTORY, Mode::empty())?;
    let file = rustix::fs::openat2(&directory, path, place, Mode::empty(), resolve)?;
    let stat = rustix::fs::fstat(&file)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Err(io::Error::other("it is no socket"));
    }
    let status = files::read_at(CWD, format!("/proc/{pid}/status"))?;
    let (real, effective) = parse_uids(&status).ok_or(io::ErrorKind::InvalidData)?;
    if ![real, effective].contains(&stat.st_uid) {
        let owner = stat.st_uid;
        return Err(io::Error::other(format!("the socket belongs to user {owner}, and the process to user {real}")));
    }
    Ok(file)
}

/// Connects without waiting and checks which process listens.
fn connect(pid: i32, path: &Path) -> io::Result<UnixStream> {
    let file = named(pid, path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // Older kernels cannot.
    let _ = refuse_descriptors(&socket);
    // The file that was looked at, whatever the path names by now.
    let path = format!("/proc/thread-self/fd/{}", file.as_raw_fd());
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Err(rustix::io::Errno::AGAIN) => return Err(io::Error::other("other clients wait to be served already")),
        result => result?,
    }
    let peer = rustix::net::sockopt::socket_peercred(&socket)?;
    if peer.pid.as_raw_nonzero().get() != pid {
        return Err(io::Error::other("another process listens there"));
    }
    Ok(UnixStream::from(socket))
}

/// Reads from a stream until a deadline, however often something arrives.
#[derive(Debug)]
pub struct Bounded<'a> {
    /// The stream, of which this is the only reader.
    pub stream: &'a UnixStream,
    /// The deadline. A read after it fails with [`io::ErrorKind::TimedOut`].
    pub until: Instant,
}

impl Read for Bounded<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.until.saturating_duration_since(Instant::now());
        let left = rustix::time::Timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        let mut polled = [rustix::event::PollFd::new(self.stream, rustix::event::PollFlags::IN)];
        if (left.tv_sec, left.tv_nsec) == (0, 0) || rustix::event::poll(&mut polled, Some(&left))? == 0 {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "it did not answer in time, as while it serves another client",
            ));
        }
        limit_waits(|| self.stream.read(buffer))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;

    use super::*;

    fn me() -> i32 {
        i32::try_from(std::process::id()).unwrap()
    }

    /// This process. Each test has its own number: a process is asked by one thread at a time.
    fn process(test: i32) -> ThreadId {
        ThreadId { pid: me(), tid: test, start_time: 0 }
    }

    const USER: Account = Account::User(1000);

    /// A monitor that sends these lines, one before and one after each command.
    fn monitor(lines: &'static [&'static str]) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut commands = BufReader::new(stream.try_clone().unwrap());
            for line in lines {
                let _ = stream.write_all(line.as_bytes());
                let _ = commands.read_line(&mut String::new());
            }
        });
        (dir, path)
    }

    const WAIT: Duration = Duration::from_millis(300);

    #[test]
    fn an_answer_with_events_in_between_is_read() {
        let (_dir, path) = monitor(&[
            "{\"QMP\":{}}\n{\"event\":\"RESUME\"}\n",
            "{\"return\":{}}\n",
            "{\"event\":\"X\"}\n{\"return\":[{\"cpu-index\":0,\"thread-id\":11,\"more\":1},\
             {\"cpu-index\":1,\"thread-id\":12}]}\n",
        ]);
        assert_eq!(ask(process(3), &USER, &path, 100 * WAIT).unwrap(), BTreeMap::from([(11, 0), (12, 1)]));
    }

    #[test]
    fn monitors_that_say_nothing_do_not_add_up() {
        let dir = tempfile::tempdir().unwrap();
        let silent: Vec<_> = (0..40).map(|number| dir.path().join(number.to_string())).collect();
        let listeners: Vec<_> = silent.iter().map(|path| UnixListener::bind(path).unwrap()).collect();
        let mut sockets: Vec<String> = silent.iter().map(|path| path.display().to_string()).collect();
        let monitors = Monitors::asking_for(WAIT);
        assert!(monitors.vcpus(process(1), &USER, &[11], &sockets).is_err());
        let was_asked = |listener: &&UnixListener| {
            listener.set_nonblocking(true).unwrap();
            listener.accept().is_ok()
        };
        let asked = listeners.iter().filter(was_asked).count();
        assert!(asked <= SOCKETS, "{asked} of 40 monitors were waited for one after the other");
        // A monitor that another client uses does not prevent the next one from being asked.
        let (_dir, path) =
            monitor(&["{\"QMP\":{}}\n", "{\"return\":{}}\n", "{\"return\":[{\"cpu-index\":0,\"thread-id\":11}]}\n"]);
        sockets.insert(1, path.display().to_string());
        let monitors = Monitors::asking_for(100 * WAIT);
        assert_eq!(monitors.vcpus(process(2), &USER, &[11], &sockets), Ok(BTreeMap::from([(11, 0)])));
    }

    #[test]
    fn odd_monitors_are_refused_in_time() {
        for (lines, cause) in [
            (&["hello\n"][..], "is no JSON"),
            (&["{\"QMP\":{}}\n", "{\"return\":{}}\n", "{\"error\":{}}\n"], "QEMU refused query-cpus-fast"),
            (&["{\"QMP\":{}}\n", "{\"return\":{}}\n", "{\"return\":7}\n"], "is not as specified"),
            (&["{\"not\":1}\n"], "does not greet as QMP"),
            (&[], "QEMU closed the connection"),
        ] {
            let (_dir, path) = monitor(lines);
            let start = Instant::now();
            // The whole time is this test's own: on a busy machine the monitor may not answer within it.
            let said = ask(process(4), &USER, &path, Duration::from_secs(30)).unwrap_err().to_string();
            assert!(said.contains(cause), "{lines:?}: {said}");
            assert!(start.elapsed() < Duration::from_secs(60));
        }
    }

    /// Each line carries a socket that lingers, to which only the connection has a reference. The last line is not
    /// read.
    #[test]
    fn descriptors_that_a_monitor_sends_along_are_not_waited_for() {
        use std::os::fd::AsFd;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let (stream, monitor) = UnixStream::pair().unwrap();
        let mut fars = Vec::new();
        for line in [
            "{\"QMP\":{}}\n",
            "{\"return\":{}}\n",
            "{\"return\":[{\"cpu-index\":0,\"thread-id\":11}]}\n",
            "{\"event\":\"X\"}\n",
        ] {
            let (near, far) = crate::testing::lingering(&listener);
            let files = [near.as_fd()];
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
            assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&files)));
            let line = [io::IoSlice::new(line.as_bytes())];
            rustix::net::sendmsg(&monitor, &line, &mut control, rustix::net::SendFlags::empty()).unwrap();
            fars.push(far);
        }
        let (tell, told) = sync_channel(1);
        let asking = std::thread::spawn(move || {
            talk(stream, Instant::now() + Duration::from_secs(3600), &|answer| tell.send(answer).unwrap());
            tell.send(Err(io::Error::other("closed"))).unwrap();
        });
        let next = || told.recv_timeout(Duration::from_secs(60)).unwrap();
        assert_eq!(next().unwrap(), BTreeMap::from([(11, 0)]));
        assert_eq!(next().unwrap_err().to_string(), "closed");
        asking.join().unwrap();
    }

    #[test]
    fn threads_that_do_not_end_are_abandoned_and_limited() {
        static RUNNING: Running = Running::new(BTreeMap::new());
        let long = Duration::from_secs(60);
        let answer = |number, user| in_thread(&RUNNING, process(number), &user, long, |tell| tell(Ok(5)));
        let user_of = Account::User;
        let short = Duration::from_millis(10);
        let mut holding = Vec::new();
        for number in (0..).take(THREADS) {
            let user = user_of(1 + u32::try_from(number as usize / ACCOUNT_THREADS).unwrap());
            let (hold, held) = sync_channel::<()>(0);
            holding.push(hold);
            let stuck = in_thread(&RUNNING, process(number), &user, short, move |_: &dyn Fn(io::Result<()>)| {
                let _ = held.recv();
            });
            assert_eq!(stuck.unwrap_err().kind(), io::ErrorKind::TimedOut);
            // It takes no other thread, whatever it is asked by.
            assert!(answer(number, user.clone()).unwrap_err().to_string().contains("asked this process before"));
            if holding.len() == ACCOUNT_THREADS {
                let refused = answer(100, user.clone()).unwrap_err().to_string();
                assert!(refused.contains("monitors of user 1"), "{refused}");
            }
            if holding.len() < THREADS {
                // A process of its own each time: the thread that answered last may still be about to end.
                assert_eq!(
                    answer(200 + number, user_of(7)).unwrap(),
                    5,
                    "another user's is asked beside {} that hang",
                    holding.len()
                );
            }
        }
        // Four users have all threads but those that are kept: one for each other user, and root's.
        for user in (11..).take(MOST - THREADS) {
            let (hold, held) = sync_channel::<()>(0);
            holding.push(hold);
            let number = i32::try_from(user).unwrap();
            let stuck = in_thread(
                &RUNNING,
                process(number + 1_000),
                &user_of(user),
                short,
                move |_: &dyn Fn(io::Result<()>)| {
                    let _ = held.recv();
                },
            );
            assert_eq!(stuck.unwrap_err().kind(), io::ErrorKind::TimedOut, "user {user}");
            let second = answer(100, user_of(user)).unwrap_err().to_string();
            assert!(second.contains("wait for other monitors"), "{second}");
        }
        assert!(answer(100, user_of(7)).unwrap_err().to_string().contains("wait for other monitors"));
        assert_eq!(answer(100, Account::System).unwrap(), 5);
        drop(holding);
        let start = Instant::now();
        while !RUNNING.lock().unwrap().is_empty() {
            assert!(start.elapsed() < long, "the threads do not end");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(answer(0, Account::System).unwrap(), 5);
    }

    /// A monitor that sends a byte now and then keeps its reader no longer than a silent one.
    #[test]
    fn a_monitor_that_drips_has_no_more_time() {
        let (stream, mut monitor) = UnixStream::pair().unwrap();
        monitor.write_all(b"{\"QMP\"").unwrap();
        let read = |until| Bounded { stream: &stream, until }.read(&mut [0; 1]).map_err(|error| error.kind());
        assert_eq!(read(Instant::now() + Duration::from_secs(3600)), Ok(1));
        assert_eq!(read(Instant::now()), Err(io::ErrorKind::TimedOut), "although there is more to read");
    }

    /// A user with many silent monitors costs little more than with one; another user's monitor has all its time.
    #[test]
    fn silent_monitors_of_a_user_share_the_time_of_that_user() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let _listener = UnixListener::bind(&path).unwrap();
        let silent = [path.display().to_string()];
        let monitors = Monitors::asking_for(WAIT);
        let parts: Vec<_> = (0..20)
            .map(|number| {
                assert!(monitors.vcpus(process(200 + number), &USER, &[11], &silent).is_err());
                let asked = monitors.asked.lock().unwrap();
                asked.values().filter(|of| of.account == USER && of.silent).count()
            })
            .collect();
        assert_eq!(parts, (1..=20).collect::<Vec<_>>(), "each silent one shortens the time of the next");
        let asked = monitors.asked.lock().unwrap().len();
        assert_eq!(asked, 20);
        let (_dir, path) =
            monitor(&["{\"QMP\":{}}\n", "{\"return\":{}}\n", "{\"return\":[{\"cpu-index\":0,\"thread-id\":11}]}\n"]);
        let answers = Monitors { timeout: 100 * WAIT, asked: monitors.asked };
        let answer = answers.vcpus(process(300), &Account::User(1001), &[11], &[path.display().to_string()]);
        assert_eq!(answer, Ok(BTreeMap::from([(11, 0)])));
    }

    /// A thread that has told and hangs as it closes what it was sent is one that has not ended.
    #[test]
    fn a_process_is_not_asked_again_while_a_thread_that_has_told_hangs() {
        static RUNNING: Running = Running::new(BTreeMap::new());
        let (hold, held) = sync_channel::<()>(0);
        let told = in_thread(&RUNNING, process(1), &USER, Duration::from_secs(60), move |tell| {
            tell(Ok(7));
            let _ = held.recv();
        });
        assert_eq!(told.unwrap(), 7);
        assert!(in_thread(&RUNNING, process(1), &USER, WAIT, |tell| tell(Ok(8))).is_err());
        assert_eq!(in_thread(&RUNNING, process(2), &USER, Duration::from_secs(60), |tell| tell(Ok(9))).unwrap(), 9);
        drop(hold);
    }

    #[test]
    fn a_thread_has_a_table_of_its_own_with_the_standard_streams_only() {
        for make in [own_table, own_table_by_list] {
            let file = std::fs::File::open("/proc/self/stat").unwrap();
            let left = std::thread::spawn(move || {
                make().unwrap();
                files::numbers(&files::directory("/proc/thread-self/fd").unwrap())
            });
            // Without the first number, 0; with the directory's own.
            let left = left.join().unwrap();
            assert!(left.iter().all(|number| *number <= 3), "{left:?}");
            assert!(file.metadata().is_ok(), "this thread's stay open");
        }
    }

    #[test]
    fn refusals_are_believed_longer_each_time_and_answers_for_a_minute() {
        let (mut before, mut waits) = (None, Vec::new());
        for _ in 0..8 {
            let answer = Err(String::new());
            let wait = believed(&answer, before.as_ref());
            waits.push(wait.as_millis());
            before = Some(Asked { account: USER, silent: true, when: Instant::now(), believed: wait, answer });
        }
        assert_eq!(waits, [500, 1000, 2000, 4000, 8000, 16000, 30000, 30000]);
        assert_eq!(believed(&Ok(BTreeMap::new()), before.as_ref()), KEEP);
    }

    #[test]
    fn a_monitor_cannot_send_descriptors_along() {
        use std::os::fd::AsFd;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        if refuse_descriptors(&listener).is_err() {
            println!("SKIPPED: before Linux 6.16 no socket refuses descriptors");
            return;
        }
        let stream = connect(me(), &path).unwrap();
        let monitor = listener.accept().unwrap().0;
        let send = |from: &UnixStream| {
            let files = [listener.as_fd()];
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
            assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&files)));
            let line = [io::IoSlice::new(b"x")];
            rustix::net::sendmsg(from, &line, &mut control, rustix::net::SendFlags::empty())
        };
        assert_eq!(send(&monitor), Err(rustix::io::Errno::PERM), "to the daemon's end");
        assert_eq!(send(&stream), Err(rustix::io::Errno::PERM), "to a socket accepted from one that refuses");
    }

    #[test]
    fn a_socket_of_another_process_is_sent_nothing() {
        let (_dir, path) = monitor(&["{\"QMP\":{}}\n"]);
        let parent = rustix::process::getppid().unwrap().as_raw_nonzero().get();
        let other = ThreadId { pid: parent, tid: 5, start_time: 0 };
        let error = ask(other, &USER, &path, 100 * WAIT).unwrap_err().to_string();
        assert!(error.contains("another process listens"), "{error}");
    }

    /// A connection by root is the daemon's to a device process, and the only client of a monitor.
    #[test]
    fn no_connection_is_made_to_a_socket_of_another_user() {
        let dir = tempfile::tempdir().unwrap();
        let [path, link, file] = ["qmp", "link", "file"].map(|name| dir.path().join(name));
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        std::fs::write(&file, "").unwrap();
        assert!(connect(me(), &file).unwrap_err().to_string().contains("is no socket"));
        assert!(connect(me(), &link).is_ok() && listener.accept().is_ok(), "its own");
        if std::os::unix::fs::chown(&path, Some(rustix::process::geteuid().as_raw() + 1), None).is_err() {
            println!("SKIPPED: only root can give a file to another user");
            return;
        }
        for path in [path, link] {
            let error = connect(me(), &path).unwrap_err().to_string();
            assert!(error.contains("belongs to user"), "{error}");
        }
        assert!(listener.accept().is_err(), "nobody has connected");
    }
}
