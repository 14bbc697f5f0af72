//! Requests of guests' deadline tasks for bandwidth: the daemon's side of the device processes' `deadlines.sock`
//! (`ontime_sockets::deadlines`).
//!
//! The daemon connects to the device process, so that a device process needs no access to the daemon. It connects only
//! for VMs whose reservation allows requests (`deadlines` in sched.toml). A device process serves a VM that may be
//! hostile, so it is not trusted either. Lines have a maximum length. If a device process violates the protocol or does
//! not read its answers, the daemon closes the connection and frees the VM's bandwidth. File descriptors that are not
//! memory are closed in `receiver` and never reach this module.
//!
//! In: lines with the needs of all vCPUs of a VM. Out: the same, checked; answers.

pub(crate) mod lines;
mod receiver;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::io::{ErrorKind, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::Sender;
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use ontime_plan::Nanos;
use ontime_sched::published::close_elsewhere;
use ontime_sched::{Ask, GuestNeed, Ledger, Page, Taking};
use ontime_sockets::deadlines::{AttachedFile, BandwidthAnswer, BandwidthRequest};
use ontime_tenants::{Repeats, remedy};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, recvmsg};

use self::receiver::{Started, Tokens};
use super::events::{Event, Events};
use crate::device::connect;

/// The most reads of one connection in a round of events. The rest is read in the next round.
const READS: usize = 4;
/// The most files that come with one read (a line brings at most two), and that may wait for their line.
const FILES: usize = 4;
const FILES_MAX: usize = 16;
/// What admissions may take, of all VMs together for each of [`REFILL`]. The rate of lines limits them.
const ADMISSIONS: Duration = Duration::from_millis(5);
/// The longest reason in an answer, bytes. The device process accepts lines of 4 KiB.
const WHY_MAX: usize = 1024;

/// A VM's request for bandwidth.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Question {
    /// The name of the VM.
    pub vm: String,
    /// Number of the request, for the answer. None: the connection has ended, and the VM needs nothing any more.
    pub seq: Option<u64>,
    /// What its vCPUs need, and where it publishes its next deadlines.
    pub ask: Ask,
}

impl Question {
    fn end(vm: &str) -> Self {
        Self { vm: vm.to_owned(), seq: None, ask: Ask::default() }
    }
}

/// All connections to device processes.
#[derive(Debug, Default)]
pub(crate) struct Guests {
    links: BTreeMap<String, Link>,
    /// Threads that receive, or that still close received files, by VM. A VM has at most one.
    receivers: BTreeMap<String, JoinHandle<()>>,
    /// The tokens of each VM. A new connection has no others than the last one.
    tokens: BTreeMap<String, Tokens>,
    /// Limits log lines, because a device process could cause any number of them.
    repeats: Repeats,
}

#[derive(Debug)]
struct Link {
    /// For answers. It is closed before `received`.
    stream: UnixStream,
    /// Data that the receiver thread has passed on from the device process.
    received: UnixStream,
    /// Has the receiver thread pass on the next line.
    answered: Sender<()>,
    buffer: Vec<u8>,
    /// Received files whose line has not been read yet.
    files: VecDeque<OwnedFd>,
    /// The memory of the VM.
    memory: Option<OwnedFd>,
    /// The page where the guest publishes its next deadlines, according to its last line.
    page: Option<Page>,
    /// The shared table of the bandwidth that the guest is offered and has taken.
    ledger: Option<Ledger>,
}

impl Guests {
    /// Connects to the device processes of these VMs, where they exist, and closes other connections. Returns the VMs
    /// whose connections were closed.
    pub(crate) fn follow(&mut self, wanted: &BTreeSet<String>, run_dir: &Path, events: &Events) -> Vec<String> {
        let gone: Vec<String> = self.links.keys().filter(|vm| !wanted.contains(*vm)).cloned().collect();
        self.links.retain(|vm, _| wanted.contains(vm));
        self.reap();
        self.tokens.retain(|vm, _| wanted.contains(vm));
        for vm in wanted {
            if self.links.contains_key(vm) || crate::device::vm_name(vm).is_err() {
                continue;
            }
            let path = ontime_sockets::Paths::new(run_dir, vm).deadlines();
            if self.receivers.contains_key(vm) {
                let what = "its guest gets no bandwidth";
                let cause = "the last connection of its device process is not closed yet, as a file that it sent waits";
                log_fault(&mut self.repeats, vm, what, &cause);
                continue;
            }
            // The socket does not exist yet, nobody listens, or its backlog is full: the next pass tries again.
            let stream = match connect(&path, SocketFlags::NONBLOCK) {
                Err(error) if error.kind() == ErrorKind::InvalidInput => {
                    log_fault(&mut self.repeats, vm, "its guest gets no bandwidth", &error);
                    continue;
                }
                Err(_) => continue,
                Ok(stream) => stream,
            };
            match self.add(vm, stream, |received| events.add(received, Event::Guests)) {
                Ok(()) => self.repeats.info(&format!("{vm}: its guest may ask for bandwidth")),
                Err(error) => {
                    let (path, advice) = (path.display(), remedy(&error));
                    self.repeats.warn(&format!("{path}: receiving what the guest of {vm} asks for: {error}; {advice}"));
                }
            }
        }
        gone
    }

    /// Forgets the receivers that have ended.
    fn reap(&mut self) {
        self.receivers.retain(|_, receiver| !receiver.is_finished());
    }

    /// Adds a connection. `watch` adds its receiving end to the event loop.
    fn add(
        &mut self,
        vm: &str,
        stream: UnixStream,
        watch: impl FnOnce(&UnixStream) -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        self.reap();
        let tokens = Arc::clone(self.tokens.entry(vm.to_owned()).or_default());
        let Started { received, answered, thread } = receiver::start::<FILES>(&stream, tokens)?;
        self.receivers.insert(vm.to_owned(), thread);
        let link = Link::new(stream, received, answered);
        watch(&link.received)?;
        self.links.insert(vm.to_owned(), link);
        Ok(())
    }

    /// Whether a VM's device process is connected.
    pub(crate) fn has(&self, vm: &str) -> bool {
        self.links.contains_key(vm)
    }

    /// Reads all pending requests.
    pub(crate) fn take(&mut self) -> Vec<Question> {
        let mut questions = Vec::new();
        let Self { links, repeats, .. } = self;
        links.retain(|vm, link| match link.take() {
            Ok(asked) => {
                questions.extend(asked.into_iter().map(|asked| link.question(vm, &asked, repeats)));
                true
            }
            Err(error) => {
                // The error may quote what the device process has sent.
                let why: String = error.to_string().chars().take(WHY_MAX / 4).collect();
                let gone = format!("{vm}: its device process is gone, its guest holds no bandwidth");
                repeats.info_of(&gone, &format!("{gone}: {why}"));
                questions.push(Question::end(vm));
                false
            }
        });
        questions
    }

    /// A question of this VM, which was answered or was the end of its connection, has taken the main thread `time`. If
    /// that was more than a VM's part of [`ADMISSIONS`], it counts: all VMs together may take a quarter of the main
    /// thread's time, and each VM the same part of that, as far as it does not wait longer than [`Bucket`] allows.
    pub(crate) fn charge(&mut self, vm: &str, time: Duration) {
        let vms = u32::try_from(self.links.len()).unwrap_or(u32::MAX).max(1);
        if let Some(tokens) = self.tokens.get(vm).filter(|_| time > ADMISSIONS / vms) {
            let time = time.saturating_mul(vms.saturating_mul(4));
            tokens.lock().unwrap_or_else(PoisonError::into_inner).spend(time);
        }
        if let Some(link) = self.links.get(vm) {
            // The receiver may have ended.
            let _ = link.answered.send(());
        }
    }

    /// Sends an answer. Returns true if that failed and the connection was closed.
    pub(crate) fn answer(&mut self, vm: &str, seq: u64, refused: Option<&str>) -> bool {
        let refused = refused.map(|why| why.chars().take(WHY_MAX / 4).collect());
        let Some(link) = self.links.get_mut(vm) else { return false };
        let line = serde_json::to_vec(&BandwidthAnswer { seq, refused }).map(|mut line| {
            line.push(b'\n');
            line
        });
        let done = line.map_err(std::io::Error::other).and_then(|line| link.stream.write_all(&line));
        if let Err(error) = &done {
            log_fault(&mut self.repeats, vm, "its device process does not take answers", error);
            self.links.remove(vm);
        }
        done.is_err()
    }
}

/// Logs a fault of a VM's device process, at most once a minute, as that process may choose the causes.
fn log_fault(repeats: &mut Repeats, vm: &str, what: &str, cause: &dyn std::fmt::Display) {
    repeats.warn_of(&format!("{vm}: {what}"), &at_device(vm, what, cause));
}

/// A fault of a VM's device process, with the cause and the remedy.
fn at_device(vm: &str, what: &str, cause: &dyn std::fmt::Display) -> String {
    format!(
        "{vm}: {what}: {cause}; see the device process's log (journalctl -u ontime-device@{vm}), and if it stays, \
         start the VM again"
    )
}

/// The last close of memory frees it: that of the VM, or whatever the device process sent instead.
impl Drop for Link {
    fn drop(&mut self) {
        self.memory.take().into_iter().chain(self.files.drain(..)).for_each(close_elsewhere);
    }
}

impl Link {
    fn new(stream: UnixStream, received: UnixStream, answered: Sender<()>) -> Self {
        let (buffer, files) = (Vec::new(), VecDeque::new());
        Self { stream, received, answered, buffer, files, memory: None, page: None, ledger: None }
    }

    /// Takes the files that belong to a line. A file that the line names but that was not received counts as absent.
    fn unpack(&mut self, vm: &str, files: &[AttachedFile], repeats: &mut Repeats) {
        for file in files {
            let came = self.files.pop_front();
            match file {
                AttachedFile::Other => came.into_iter().for_each(close_elsewhere),
                AttachedFile::Memory => std::mem::replace(&mut self.memory, came).into_iter().for_each(close_elsewhere),
                AttachedFile::Ledger => {
                    let ledger = came.map(Ledger::accept).transpose();
                    if let Err(error) = &ledger {
                        log_fault(repeats, vm, "its guest is offered nothing", error);
                    }
                    self.ledger = ledger.ok().flatten();
                    // Offers of an earlier daemon are withdrawn.
                    self.ledger.iter().for_each(|ledger| _ = ledger.withdraw());
                }
            }
        }
    }

    fn question(&mut self, vm: &str, asked: &BandwidthRequest, repeats: &mut Repeats) -> Question {
        self.unpack(vm, &asked.files, repeats);
        self.page = asked.next.zip(self.memory.as_ref()).and_then(|(offset, memory)| {
            if let Some(page) = self.page.take_if(|page| page.is_at(memory, offset)) {
                return Some(page);
            }
            let page = memory.try_clone().and_then(|memory| Page::new(File::from(memory), offset));
            if let Err(error) = &page {
                log_fault(repeats, vm, "the deadlines that its guest publishes are not read", error);
            }
            page.ok()
        });
        let need = |need: &ontime_sockets::deadlines::Need| GuestNeed {
            vcpu: need.vcpu,
            budget: Nanos(need.budget),
            period: Nanos(need.period),
        };
        let page = self.page.clone();
        let taking = self.ledger.clone().map(|ledger| Taking::new(ledger, asked.generation));
        let ask = Ask { needs: asked.vcpus.iter().map(need).collect(), published: page.is_some(), page, taking };
        Question { vm: vm.to_owned(), seq: Some(asked.seq), ask }
    }

    fn take(&mut self) -> std::io::Result<Vec<BandwidthRequest>> {
        let mut chunk = [0; 4096];
        for _ in 0..READS {
            match self.receive(&mut chunk) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    self.buffer.extend(chunk.iter().take(count));
                    // A device process waits for its answer, so usually this was the last line. epoll reports any
                    // further data again.
                    if count < chunk.len() && self.buffer.last() == Some(&b'\n') {
                        break;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        lines::take(&mut self.buffer)
    }

    /// Reads data, and keeps the files that came with it.
    fn receive(&mut self, chunk: &mut [u8]) -> std::io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = recvmsg(&self.received, &mut [IoSliceMut::new(chunk)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                self.files.extend(files);
            }
        }
        if self.files.len() > FILES_MAX {
            return Err(ErrorKind::InvalidData.into());
        }
        Ok(received.bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek};
    use std::os::fd::AsFd;

    use ontime_base::bucket::{BURST, REFILL};
    use ontime_sockets::abi::{ONTIME_CTL_INC_BW, ontime_bw};
    use ontime_sockets::deadlines::{DeadlinePage, Deadlines};
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[test]
    fn a_fault_of_a_device_process_names_the_vm_the_cause_and_where_to_look() {
        for cause in ["the file can shrink", "Broken pipe (os error 32)"] {
            let said = at_device("plc", "its guest is offered nothing", &cause);
            let (fault, remedy) = said.split_once("; ").unwrap();
            assert_eq!(fault, format!("plc: its guest is offered nothing: {cause}"));
            assert!(remedy.contains("ontime-device@plc") && remedy.contains("start the VM again"), "{remedy}");
        }
    }

    fn guests() -> (Guests, UnixStream) {
        let (own, other) = UnixStream::pair().unwrap();
        own.set_nonblocking(true).unwrap();
        let mut guests = Guests::default();
        guests.add("a", own, |_| Ok(())).unwrap();
        (guests, other)
    }

    /// A device process chooses what it sends, and so the error for which the connection is closed.
    #[test]
    fn a_device_process_does_not_fill_the_log_with_what_it_sends() {
        let mut file = tempfile::tempfile().unwrap();
        let writer = Arc::new(file.try_clone().unwrap());
        let layer = tracing_subscriber::fmt::layer().with_writer(writer).with_ansi(false);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            let (mut guests, mut other) = guests();
            for number in 0..20 {
                writeln!(other, "{{\"seq\": \"{number}{}\"}}", "x".repeat(8000)).unwrap();
                assert_eq!(next(&mut guests), [Question::end("a")]);
                let (own, again) = UnixStream::pair().unwrap();
                own.set_nonblocking(true).unwrap();
                guests.add("a", own, |_| Ok(())).unwrap();
                other = again;
            }
        });
        let mut said = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut said).unwrap();
        assert!(
            said.lines().count() == 1 && said.contains("its device process is gone") && said.len() < 1024,
            "{said}"
        );
    }

    /// The next requests. The receiver thread passes them on.
    fn next(guests: &mut Guests) -> Vec<Question> {
        let end = std::time::Instant::now() + Duration::from_secs(60);
        loop {
            let asked = guests.take();
            if !asked.is_empty() || std::time::Instant::now() > end {
                asked.iter().for_each(|asked| guests.charge(&asked.vm, Duration::ZERO));
                return asked;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Its drop ends when the other end is dropped.
    struct Slow(std::sync::mpsc::Receiver<()>);

    impl Drop for Slow {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    #[test]
    fn no_file_of_a_device_process_is_closed_in_a_pass() {
        let pair = || UnixStream::pair().unwrap();
        let ((stream, _device), (received, _give)) = (pair(), pair());
        let mut link = Link::new(stream, received, std::sync::mpsc::channel().0);
        let (mut other, mut left) = (pair(), pair());
        link.files.push_back(OwnedFd::from(other.1));
        link.files.push_back(OwnedFd::from(left.1));
        let (end, ended) = std::sync::mpsc::channel();
        close_elsewhere(Slow(ended));
        link.unpack("a", &[AttachedFile::Other], &mut Repeats::default());
        drop(link);
        for open in [&mut other.0, &mut left.0] {
            open.set_nonblocking(true).unwrap();
            assert_eq!(open.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock, "it waits to be closed");
        }
        drop(end);
        for closed in [&mut other.0, &mut left.0] {
            closed.set_nonblocking(false).unwrap();
            assert_eq!(closed.read(&mut [0]).unwrap(), 0);
        }
    }

    /// Sends a line with files.
    fn send(device: &UnixStream, line: &[u8], files: &[std::os::fd::BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
        assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(files)));
        let line = [std::io::IoSlice::new(line)];
        rustix::net::sendmsg(device, &line, &mut control, rustix::net::SendFlags::empty()).unwrap();
    }

    /// A TCP connection with more to send than its peer reads: closing it blocks.
    fn lingers() -> (std::net::TcpStream, std::net::TcpStream) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let own = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (reader, _) = listener.accept().unwrap();
        own.set_nonblocking(true).unwrap();
        while (&own).write(&[0; 65_536]).is_ok() {}
        rustix::net::sockopt::set_socket_linger(&own, Some(Duration::from_secs(600))).unwrap();
        (own, reader)
    }

    #[test]
    fn a_file_that_makes_who_closes_it_wait_is_left_to_the_receiver() {
        // With a line that names the file, without a line, and behind a line that will not be read.
        for lines in [&[&b"{\"seq\":1,\"vcpus\":[],\"files\":[\"memory\"]}\n"[..]][..], &[b"x"], &[b"nonsense\n", b"x"]]
        {
            let (own, device) = UnixStream::pair().unwrap();
            own.set_nonblocking(true).unwrap();
            let (file, reader) = lingers();
            let (last, others) = lines.split_last().unwrap();
            others.iter().for_each(|line| (&device).write_all(line).unwrap());
            send(&device, last, &[file.as_fd()]);
            // The last holder blocks in close. From now on that is the receiver.
            drop(file);
            let mut guests = Guests::default();
            guests.add("a", own, |_| Ok(())).unwrap();
            assert_eq!(next(&mut guests), [Question::end("a")]);
            assert!(guests.links.is_empty() && !guests.receivers["a"].is_finished());
            drop((reader, device));
            guests.receivers.remove("a").unwrap().join().unwrap();
        }
    }

    #[test]
    fn questions_come_whole_and_the_end_gives_all_back() {
        let (mut guests, mut device) = guests();
        device.write_all(b"{\"seq\":1,\"vcpus\":[]}\n{\"seq\":2,\"vcp").unwrap();
        assert_eq!(next(&mut guests), [Question { seq: Some(1), ..Question::end("a") }]);
        device.write_all(b"us\":[{\"vcpu\":3,\"budget\":1000,\"period\":2000}]}\n").unwrap();
        let asked = next(&mut guests);
        assert_eq!(asked[0].seq, Some(2));
        assert_eq!(asked[0].ask.needs, [GuestNeed { vcpu: 3, budget: Nanos(1_000), period: Nanos(2_000) }]);
        assert!(!guests.answer("a", 2, Some("full")));
        let mut said = [0; 64];
        let count = device.read(&mut said).unwrap();
        assert_eq!(&said[..count], b"{\"seq\":2,\"refused\":\"full\"}\n");
        drop(device);
        assert_eq!(next(&mut guests), [Question::end("a")]);
        assert!(guests.links.is_empty());
    }

    #[test]
    fn a_later_device_process_is_served_and_what_only_it_knows_is_ignored() {
        let (mut guests, device) = guests();
        let memory = File::from(rustix::fs::memfd_create("vm", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        let size = 64 * ontime_sched::published::LINE as u64;
        memory.set_len(size).unwrap();
        let line =
            b"{\"seq\":5,\"urgency\":[1],\"vcpus\":[{\"vcpu\":1,\"node\":0,\"budget\":7,\"period\":9}],\"next\":0,\
            \"files\":[\"ledger-2\",\"memory\"]}\n";
        let other = File::from(rustix::fs::memfd_create("later", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        send(&device, line, &[other.as_fd(), memory.as_fd()]);
        let asked = next(&mut guests);
        assert_eq!(asked[0].seq, Some(5));
        assert_eq!(asked[0].ask.needs, [GuestNeed { vcpu: 1, budget: Nanos(7), period: Nanos(9) }]);
        assert_eq!((asked[0].ask.published, asked[0].ask.taking.is_some()), (true, false));
        // Fields that a later daemon adds to its answer are ignored.
        let answer: BandwidthAnswer = serde_json::from_slice(b"{\"seq\":5,\"refused\":null,\"until\":3}").unwrap();
        assert_eq!(answer, BandwidthAnswer { seq: 5, refused: None });
    }

    /// From the device process to the page that pacers read.
    #[test]
    fn where_a_guest_publishes_comes_with_what_it_asks() {
        assert_eq!(size_of::<ontime_sockets::abi::ontime_next_vcpu>(), ontime_sched::published::LINE);
        assert_eq!(ontime_sched::ledger::VCPUS, ontime_sockets::abi::ONTIME_VCPUS_MAX as usize);
        let (mut guests, other) = guests();
        let deadlines = Deadlines::new(Ledger::create().ok());
        let whole = 64 * ontime_sched::published::LINE as u64;
        let memory = || {
            let file = File::from(rustix::fs::memfd_create("vm", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
            file.set_len(4_096 + whole).unwrap();
            file
        };
        let (file, same) = (memory(), memory());
        let place = |file: &File, offset| DeadlinePage { file: file.try_clone().unwrap(), offset };
        deadlines.publish(Some(place(&file, 4_096))).unwrap();
        let device = std::thread::spawn(move || {
            deadlines.connect(other).unwrap();
            let need = ontime_bw { vcpu: 0, reserved: 0, budget: 1_000_000, period: 10_000_000 };
            deadlines.change(ONTIME_CTL_INC_BW, &[need]).unwrap();
            deadlines.publish(Some(place(&same, 8_192))).unwrap();
            deadlines.publish(None).unwrap();
        });
        let mut pages = Vec::new();
        while !guests.links.is_empty() {
            for question in guests.take() {
                let Some(seq) = question.seq else { continue };
                pages.push(question.ask.page);
                assert!(question.ask.taking.is_some());
                assert!(!guests.answer("a", seq, None));
                guests.charge("a", Duration::ZERO);
            }
        }
        device.join().unwrap();
        let there = Page::new(file, 4_096).ok();
        // Page of the connection, page of the request, a page beyond the VM's memory, no page.
        assert_eq!(pages, [there.clone(), there, None, None]);
    }

    #[test]
    fn who_accepts_nobody_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deadlines.sock");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let first = connect(&path, SocketFlags::NONBLOCK).unwrap();
        assert_eq!(connect(&path, SocketFlags::NONBLOCK).unwrap_err().kind(), ErrorKind::WouldBlock);
        let mut byte = [0];
        assert_eq!((&first).read(&mut byte).unwrap_err().kind(), ErrorKind::WouldBlock);
    }

    /// Each request makes the daemon test an admission.
    #[test]
    fn a_device_process_asks_no_faster_than_its_guest_may() {
        let (mut guests, mut device) = guests();
        let (more, start) = (12, std::time::Instant::now());
        let lines = BURST + more;
        for seq in 0..lines {
            writeln!(device, "{{\"seq\":{seq},\"vcpus\":[]}}").unwrap();
        }
        let mut asked = 0;
        while asked < lines {
            asked += next(&mut guests).len() as u32;
        }
        assert!(start.elapsed() >= REFILL * (more - 2), "{more} beyond the burst took {:?}", start.elapsed());
    }

    #[test]
    fn a_device_process_that_connects_again_and_again_asks_no_faster() {
        let (mut guests, rounds, start) = (Guests::default(), 3, std::time::Instant::now());
        for _ in 0..rounds {
            let (own, mut device) = UnixStream::pair().unwrap();
            own.set_nonblocking(true).unwrap();
            guests.add("a", own, |_| Ok(())).unwrap();
            (0..BURST).for_each(|seq| writeln!(device, "{{\"seq\":{seq},\"vcpus\":[]}}").unwrap());
            let mut asked = 0;
            while asked < BURST as usize {
                asked += next(&mut guests).len();
            }
            drop(device);
            while guests.has("a") {
                next(&mut guests);
            }
            while !guests.receivers["a"].is_finished() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let lines = BURST * rounds;
        assert!(start.elapsed() >= REFILL * (lines - BURST - 2), "{lines} lines took {:?}", start.elapsed());
    }

    /// Nothing is held for a VM whose process ended while its request waited for a token.
    #[test]
    fn the_end_of_a_device_process_does_not_wait_for_a_token() {
        let (mut guests, mut device) = guests();
        guests.charge("a", Duration::from_secs(60));
        device.write_all(b"{\"seq\":1,\"vcpus\":[]}\n").unwrap();
        drop(device);
        let asked: Vec<Question> =
            std::iter::from_fn(|| guests.has("a").then(|| next(&mut guests))).flatten().collect();
        assert_eq!(asked, [Question::end("a")]);
    }

    /// A guest may choose requests for which the daemon looks at the whole host.
    #[test]
    fn a_request_that_takes_the_daemons_time_makes_the_next_one_wait() {
        for vms in [1, 2] {
            let (mut guests, mut device) = guests();
            let others: Vec<_> = (1..vms).map(|_| UnixStream::pair().unwrap()).collect();
            for (other, _) in &others {
                guests.add("b", other.try_clone().unwrap(), |_| Ok(())).unwrap();
            }
            device.write_all(&b"{\"seq\":1,\"vcpus\":[]}\n".repeat(3)).unwrap();
            let took = REFILL * BURST / 2 / vms;
            let start = std::time::Instant::now();
            for round in 0..3 {
                let asked = loop {
                    let asked = guests.take();
                    if !asked.is_empty() {
                        break asked;
                    }
                    std::thread::sleep(Duration::from_millis(1));
                };
                assert_eq!(asked.len(), 1, "the next one comes when this one is answered");
                let least = took * 4 * vms * round;
                let least = least.saturating_sub(REFILL * (BURST + 2));
                assert!(start.elapsed() >= least, "round {round} after {:?}, not {least:?}", start.elapsed());
                guests.charge("a", took);
            }
            // What the other VM may ask is its own.
            assert!(guests.tokens.get("b").is_none_or(|tokens| tokens.lock().unwrap().take()));
        }
    }

    #[test]
    fn whoever_breaks_the_protocol_is_let_go() {
        for bad in [b"\n".to_vec(), b"nonsense\n".to_vec(), b"{\"seq\":1}\n".to_vec(), vec![b'x'; lines::LINE_MAX + 1]]
        {
            let (mut guests, mut device) = guests();
            device.set_nonblocking(true).unwrap();
            let mut sent = 0;
            let mut asked = Vec::new();
            while sent < bad.len() && asked.is_empty() {
                sent += device.write(&bad[sent..]).unwrap_or(0);
                asked = guests.take();
            }
            while asked.is_empty() && !guests.links.is_empty() {
                asked = guests.take();
            }
            assert_eq!(asked, [Question::end("a")]);
        }
    }
}
