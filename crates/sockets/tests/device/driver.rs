//! The driver's side of the device, as a guest's module implements it: rings in shared memory, calls and events. The
//! device process is the real one.

use std::collections::HashMap;
use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use ontime_sockets::abi::*;
use ontime_sockets::sandbox::Options as Sandbox;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{ByteValued, Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

use super::allocation;

pub(crate) const MEMORY: u64 = 64 << 20;
const SIZE: u16 = 256;
/// Each device's rings and slots have their own part of the memory; memory above FREE is for the tests.
const PART: u64 = 8 << 20;
pub(crate) const FREE: u64 = 32 << 20;
const SLOT: u64 = 16 << 10;
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A running device process and a driver that is connected to it.
pub(crate) struct Vm {
    pub process: Child,
    pub memory: Arc<GuestMemoryMmap>,
    pub channels: Vec<Driver>,
    pub run: PathBuf,
    allocations: PathBuf,
    file: File,
    _directory: tempfile::TempDir,
}

impl Vm {
    /// Starts a VM with this table in sockets.toml (without its header).
    pub(crate) fn start(table: &str) -> Self {
        let mut vm = Self::begin(table);
        let channels = vm.channels[0].config.channels;
        for channel in 1..channels {
            let driver = vm.connect(channel);
            vm.channels.push(driver);
        }
        vm
    }

    /// The same with only the main device connected.
    pub(crate) fn begin(table: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (run, config) = (directory.path().join("run"), directory.path().join("etc"));
        std::fs::create_dir(&config).unwrap();
        std::fs::write(config.join("sockets.toml"), format!("[vm.test]\n{table}\n")).unwrap();
        let allocations = config.join(ALLOCATIONS);
        File::create(&allocations).unwrap().set_len(allocation::SIZE as u64).unwrap();
        let process = device(&run, &config);
        let fd = unsafe { libc::memfd_create(c"guest".as_ptr(), 0) };
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(MEMORY).unwrap();
        let range = (GuestAddress(0), MEMORY as usize, Some(FileOffset::new(file.try_clone().unwrap(), 0)));
        let memory = Arc::new(GuestMemoryMmap::from_ranges_with_files([range]).unwrap());
        let mut vm = Self { process, memory, channels: Vec::new(), run, allocations, file, _directory: directory };
        let main = vm.connect(0);
        vm.channels.push(main);
        vm
    }

    pub(crate) fn socket_path(&self, channel: u32) -> PathBuf {
        ontime_sockets::Paths::new(&self.run, "test").device(channel)
    }

    pub(crate) fn connect(&self, channel: u32) -> Driver {
        Driver::connect(&self.socket_path(channel), channel, self.memory.clone(), &self.file)
    }

    pub(crate) fn main(&mut self) -> &mut Driver {
        &mut self.channels[0]
    }

    /// The output of `ontime sockets test --json`.
    pub(crate) fn status(&self) -> ontime_sockets::status::Status {
        let stream = UnixStream::connect(ontime_sockets::Paths::new(&self.run, "test").status()).unwrap();
        serde_json::from_reader(stream).unwrap()
    }

    /// The open sockets, as the worker lists them.
    pub(crate) fn sockets(&self) -> Vec<ontime_sockets::status::SocketStatus> {
        let start = Instant::now();
        loop {
            if let Some(sockets) = self.status().sockets {
                return sockets;
            }
            assert!(start.elapsed() < PATIENCE, "the worker does not answer");
        }
    }

    pub(crate) fn counter(&self, name: &str) -> u64 {
        self.status().counters.iter().find(|(have, _)| have == name).unwrap().1
    }

    /// Resident private memory of the device process, bytes, without the guest's memory and shared mappings.
    pub(crate) fn own_memory(&self) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1_024
    }

    /// The device process's threads in /proc, without the main thread, which belongs to the test framework and polls a
    /// clock.
    pub(crate) fn threads(&self) -> Vec<PathBuf> {
        let process = self.process.id().to_string();
        let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap().map(|task| task.unwrap());
        tasks.filter(|task| task.file_name().to_str() != Some(&process)).map(|task| task.path()).collect()
    }

    /// CPU time of the device process's threads.
    pub(crate) fn cpu_time(&self) -> Duration {
        let ran = |task: &PathBuf| {
            let stat = std::fs::read_to_string(task.join("schedstat")).unwrap();
            stat.split(' ').next().unwrap().parse::<u64>().unwrap()
        };
        Duration::from_nanos(self.threads().iter().map(ran).sum())
    }

    /// The device process's thread with this name.
    pub(crate) fn thread(&self, name: &str) -> u32 {
        let is_it = |task: &&PathBuf| std::fs::read_to_string(task.join("comm")).unwrap().trim_end() == name;
        let threads = self.threads();
        threads.iter().find(is_it).unwrap().file_name().unwrap().to_str().unwrap().parse().unwrap()
    }

    /// Number of allocations and frees by the thread of that name.
    pub(crate) fn allocations(&self, name: &str) -> u64 {
        allocation::of(&self.allocations, self.thread(name))
    }

    /// Number of open descriptors of the device process, without those that it closes once a device is connected.
    pub(crate) fn descriptors(&self) -> usize {
        for channel in 0..self.channels.len() as u32 {
            while UnixStream::connect(self.socket_path(channel)).is_ok() {}
        }
        // Other threads may still be closing theirs.
        let count = || std::fs::read_dir(format!("/proc/{}/fd", self.process.id())).unwrap().count();
        let (mut last, mut same) = (count(), 0);
        while same < 20 {
            std::thread::sleep(Duration::from_millis(5));
            let now = count();
            same = if now == last { same + 1 } else { 0 };
            last = now;
        }
        last
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Environment variable with which [`device`] passes the directories to its child.
const AS_DEVICE: &str = "ONTIME_TEST_DEVICE";

/// Environment variables: refuse what an administrator must allow; the user to change to.
pub(crate) const STRICT: &str = "ONTIME_TEST_STRICT";
pub(crate) const USER: &str = "ONTIME_TEST_USER";
/// Environment variable: one of its threads panics once it serves.
pub(crate) const PANICS: &str = "ONTIME_TEST_PANICS";

/// Name of the allocation counters' file in the configuration directory.
const ALLOCATIONS: &str = "allocations";

/// Not a test of its own: [`device`] starts this program as the device process, complete except for the command line.
#[test]
fn device_process() {
    let Ok(directories) = std::env::var(AS_DEVICE) else { return };
    let (run, config) = directories.split_once(':').unwrap();
    allocation::count_into(&Path::new(config).join(ALLOCATIONS));
    let vm = ontime_sockets::config::load(config.as_ref(), "test").unwrap().unwrap();
    let paths = ontime_sockets::Paths::new(run.as_ref(), "test");
    let allowed = std::env::var_os(STRICT).is_none();
    let user = std::env::var(USER).ok().map(|user| user.parse().unwrap()).map(|user| (user, user));
    let sandbox = Sandbox { allow_root: allowed, allow_host_network: allowed, user, ..Default::default() };
    if std::env::var_os(PANICS).is_some() {
        std::thread::spawn(|| {
            // With the filters installed.
            while File::open("/proc/self/status").is_ok() {
                std::thread::sleep(Duration::from_millis(5));
            }
            panic!("as a thread that has a bug");
        });
    }
    ontime_sockets::run(&ontime_sockets::Options { name: "test".to_owned(), vm, paths, sandbox }).unwrap();
}

/// The command that starts a device process.
pub(crate) fn command(run: &Path, config: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "driver::device_process", "--nocapture"])
        .env(AS_DEVICE, format!("{}:{}", run.display(), config.display()))
        .stdout(std::process::Stdio::null());
    command
}

/// Starts a device process and waits until it listens.
pub(crate) fn device(run: &Path, config: &Path) -> Child {
    let child = command(run, config).spawn().unwrap();
    wait_for(run);
    child
}

/// Waits until the device process has made its sockets, of which this one is the last.
pub(crate) fn wait_for(run: &Path) {
    let status = ontime_sockets::Paths::new(run, "test").status();
    let start = Instant::now();
    while UnixStream::connect(&status).is_err() {
        assert!(start.elapsed() < PATIENCE, "the device process does not start");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn write_descriptor(memory: &GuestMemoryMmap, at: u64, address: u64, len: u32, flags: u16, next: u16) {
    memory.write_obj(address, GuestAddress(at)).unwrap();
    memory.write_obj(len, GuestAddress(at + 8)).unwrap();
    memory.write_obj(flags, GuestAddress(at + 12)).unwrap();
    memory.write_obj(next, GuestAddress(at + 14)).unwrap();
}

/// The driver's side of one virtqueue.
pub(crate) struct Ring {
    memory: Arc<GuestMemoryMmap>,
    base: u64,
    pub available: u16,
    used: u16,
    pub kick: EventFd,
    pub call: EventFd,
}

impl Ring {
    fn new(memory: Arc<GuestMemoryMmap>, base: u64) -> Self {
        let event = || EventFd::new(libc::EFD_NONBLOCK).unwrap();
        // Clear what the event queue and a previous driver left.
        memory.write_slice(&[0; 0x4000], GuestAddress(base)).unwrap();
        Self { memory, base, available: 0, used: 0, kick: event(), call: event() }
    }

    pub(crate) fn descriptors(&self) -> u64 {
        self.base
    }

    fn avail(&self) -> u64 {
        self.base + 0x1000
    }

    fn used_ring(&self) -> u64 {
        self.base + 0x2000
    }

    pub(crate) fn descriptor(&self, index: u16, address: u64, len: u32, flags: u16, next: u16) {
        self.write_descriptor(self.descriptors() + u64::from(index) * 16, address, len, flags, next);
    }

    /// Writes a descriptor of an indirect table.
    pub(crate) fn write_descriptor(&self, at: u64, address: u64, len: u32, flags: u16, next: u16) {
        write_descriptor(&self.memory, at, address, len, flags, next);
    }

    pub(crate) fn offer(&mut self, head: u16) {
        self.memory.write_obj(head, GuestAddress(self.avail() + 4 + u64::from(self.available % SIZE) * 2)).unwrap();
        self.available = self.available.wrapping_add(1);
        fence(Ordering::SeqCst);
        self.memory.store(self.available, GuestAddress(self.avail() + 2), Ordering::Release).unwrap();
        fence(Ordering::SeqCst);
    }

    /// Pretends to have offered this many more chains.
    pub(crate) fn jump(&mut self, by: u16) {
        self.available = self.available.wrapping_add(by);
        self.memory.store(self.available, GuestAddress(self.avail() + 2), Ordering::Release).unwrap();
    }

    pub(crate) fn notify(&self) {
        self.kick.write(1).unwrap();
    }

    /// The device's used index, modulo 2^16.
    pub(crate) fn used_index(&self) -> u16 {
        self.memory.load(GuestAddress(self.used_ring() + 2), Ordering::Acquire).unwrap()
    }

    /// Chains that the device has not used yet.
    pub(crate) fn outstanding(&self) -> u16 {
        self.available.wrapping_sub(self.used)
    }

    pub(crate) fn take(&mut self) -> Option<(u16, u32)> {
        if self.used_index() == self.used {
            return None;
        }
        let at = self.used_ring() + 4 + u64::from(self.used % SIZE) * 8;
        self.used = self.used.wrapping_add(1);
        let head: u32 = self.memory.read_obj(GuestAddress(at)).unwrap();
        Some((head as u16, self.memory.read_obj(GuestAddress(at + 4)).unwrap()))
    }
}

/// A call to be made.
#[derive(Clone, Default)]
pub(crate) struct Call {
    pub words: ontime_call,
    pub control: Vec<u8>,
    pub data: Vec<u8>,
    pub room: usize,
}

impl Call {
    pub(crate) fn new(op: u32, sock: u32) -> Self {
        Self { words: ontime_call { op: op as u16, sock, ..Default::default() }, ..Default::default() }
    }

    pub(crate) fn arg<const N: usize>(mut self, args: [i32; N]) -> Self {
        for (arg, value) in self.words.arg.iter_mut().zip(args) {
            *arg = value as u32;
        }
        self
    }

    pub(crate) fn to(mut self, address: SocketAddr) -> Self {
        let (bytes, len) = ontime_sockets::name::write(&address);
        (self.words.addr, self.words.addr_len) = (bytes, len);
        self
    }

    pub(crate) fn data(mut self, data: &[u8]) -> Self {
        self.data = data.to_vec();
        self
    }

    pub(crate) fn control(mut self, control: &[u8]) -> Self {
        self.control = control.to_vec();
        self.words.control_len = control.len() as u16;
        self
    }

    pub(crate) fn room(mut self, room: usize) -> Self {
        self.room = room;
        self
    }

    pub(crate) fn control_room(mut self, room: u16) -> Self {
        self.words.control_room = room;
        self
    }

    pub(crate) fn wait(mut self) -> Self {
        self.words.flags |= ONTIME_CALL_WAIT as u16;
        self
    }

    pub(crate) fn ahead(mut self) -> Self {
        self.words.flags |= ONTIME_CALL_AHEAD as u16;
        self
    }

    pub(crate) fn blind(mut self) -> Self {
        self.words.flags |= ONTIME_CALL_BLIND as u16;
        self
    }

    pub(crate) fn prio(mut self, prio: u16) -> Self {
        self.words.prio = prio;
        self
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Done {
    /// Its number among all answers that were not drained.
    pub nth: u64,
    pub len: u32,
    pub header: ontime_done,
    pub control: Vec<u8>,
    pub data: Vec<u8>,
}

impl Done {
    /// The returned number or the errno.
    pub(crate) fn result(&self) -> Result<u32, i32> {
        let result = self.header.result as i32;
        if result < 0 { Err(-result) } else { Ok(self.header.result) }
    }

    pub(crate) fn name(&self) -> SocketAddr {
        match ontime_sockets::name::parse(&self.header.addr, usize::from(self.header.addr_len)).unwrap() {
            ontime_sockets::name::Name::Inet(address) => address,
            other => panic!("{other:?} instead of an address"),
        }
    }
}

/// The driver of one device.
pub(crate) struct Driver {
    pub frontend: Frontend,
    pub config: ontime_config,
    pub calls: Ring,
    pub events: Ring,
    pub control: Option<Ring>,
    memory: Arc<GuestMemoryMmap>,
    slots: u64,
    next_id: u64,
    free: Vec<u16>,
    out: HashMap<u16, (u64, Call)>,
    done: HashMap<u64, Done>,
    answers: u64,
}

impl Driver {
    fn connect(path: &Path, channel: u32, memory: Arc<GuestMemoryMmap>, file: &File) -> Self {
        let queues = if channel == 0 { ONTIME_VQS_MAIN } else { ONTIME_VQS_CHANNEL };
        let mut frontend = Frontend::connect(path, u64::from(queues)).unwrap();
        let features = frontend.get_features().unwrap();
        frontend.set_owner().unwrap();
        assert_ne!(features & 1 << 32, 0, "VERSION_1");
        frontend.set_features(features & !(1 << 29)).unwrap();
        frontend.get_protocol_features().unwrap();
        let wanted = VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::MQ;
        frontend.set_protocol_features(wanted).unwrap();
        let zeros = [0; size_of::<ontime_config>()];
        let (_, bytes) = frontend.get_config(0, zeros.len() as u32, VhostUserConfigFlags::WRITABLE, &zeros).unwrap();
        let config = *ontime_config::from_slice(&bytes).unwrap();
        let base = PART * u64::from(channel);
        let mut driver = Self {
            calls: Ring::new(memory.clone(), base),
            events: Ring::new(memory.clone(), base + 0x4000),
            control: (channel == 0).then(|| Ring::new(memory.clone(), base + 0x8000)),
            slots: base + 0x10000,
            frontend,
            config,
            memory,
            next_id: 1,
            free: (0..128).rev().collect(),
            out: HashMap::new(),
            done: HashMap::new(),
            answers: 0,
        };
        driver.share(file);
        driver.start();
        driver
    }

    fn share(&self, file: &File) {
        let host = self.memory.get_host_address(GuestAddress(0)).unwrap() as u64;
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: MEMORY,
            userspace_addr: host,
            mmap_offset: 0,
            mmap_handle: file.as_raw_fd(),
        };
        self.frontend.set_mem_table(&[region]).unwrap();
    }

    fn rings(&self) -> Vec<&Ring> {
        [Some(&self.calls), Some(&self.events), self.control.as_ref()].into_iter().flatten().collect()
    }

    /// Passes the rings as they are to the device and enables them.
    pub(crate) fn start(&mut self) {
        let used: Vec<u32> = self.rings().iter().map(|ring| u32::from(ring.used)).collect();
        self.start_at(&used);
    }

    /// Continues like QEMU after a pause, from the indexes at which the device stopped.
    pub(crate) fn start_at(&mut self, stood: &[u32]) {
        for (index, stood) in stood.iter().enumerate() {
            self.start_ring(index, *stood as u16);
        }
    }

    pub(crate) fn start_ring(&mut self, index: usize, stood: u16) {
        let host = self.memory.get_host_address(GuestAddress(0)).unwrap() as u64;
        let mut frontend = self.frontend.clone();
        let ring = self.rings()[index];
        frontend.set_vring_num(index, SIZE).unwrap();
        let addresses = VringConfigData {
            queue_max_size: SIZE,
            queue_size: SIZE,
            flags: 0,
            desc_table_addr: host + ring.descriptors(),
            used_ring_addr: host + ring.used_ring(),
            avail_ring_addr: host + ring.avail(),
            log_addr: None,
        };
        frontend.set_vring_addr(index, &addresses).unwrap();
        frontend.set_vring_base(index, stood).unwrap();
        frontend.set_vring_call(index, &ring.call).unwrap();
        frontend.set_vring_kick(index, &ring.kick).unwrap();
        frontend.set_vring_enable(index, true).unwrap();
    }

    /// Stops the rings and returns the device's index in each.
    pub(crate) fn stop(&mut self) -> Vec<u32> {
        (0..self.rings().len()).map(|index| self.frontend.get_vring_base(index).unwrap()).collect()
    }

    /// Sets up new rings, like a rebooted guest.
    pub(crate) fn reset(&mut self) {
        self.renew();
        self.start();
    }

    /// Like [`Driver::reset`] without the start.
    pub(crate) fn renew(&mut self) {
        self.stop();
        self.calls = Ring::new(self.memory.clone(), self.calls.base);
        self.events = Ring::new(self.memory.clone(), self.events.base);
        self.control = self.control.as_ref().map(|ring| Ring::new(self.memory.clone(), ring.base));
        self.free = (0..128).rev().collect();
        self.out.clear();
        self.done.clear();
    }

    pub(crate) fn event_buffers(&mut self, count: u16) {
        for index in 0..count {
            self.events.descriptor(index, self.slots + 128 * SLOT + u64::from(index) * 32, EVENT_LEN as u32, 2, 0);
            self.events.offer(index);
        }
        self.events.notify();
    }

    /// The next event. Its buffer is offered again.
    pub(crate) fn event(&mut self) -> Option<ontime_event> {
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            if let Some(event) = self.try_event() {
                return Some(event);
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        None
    }

    pub(crate) fn try_event(&mut self) -> Option<ontime_event> {
        let (head, len) = self.events.take()?;
        assert_eq!(len as usize, EVENT_LEN);
        let event = self.memory.read_obj(GuestAddress(self.slots + 128 * SLOT + u64::from(head) * 32)).unwrap();
        self.events.offer(head);
        self.events.notify();
        Some(event)
    }

    /// Waits until an event of the socket shows one of the bits, or an error.
    pub(crate) fn ready(&mut self, sock: u32, bits: u32) -> ontime_event {
        loop {
            let event = self.event().expect("no event came");
            if u32::from(event.type_) == ONTIME_EVENT_READY
                && event.sock == sock
                && (event.ready & bits != 0 || event.error != 0)
            {
                return event;
            }
        }
    }

    /// Posts a call in two descriptors.
    pub(crate) fn post(&mut self, mut call: Call) -> u64 {
        let slot = self.free.pop().expect("too many calls in flight");
        let at = self.slots + u64::from(slot) * SLOT;
        let id = self.next_id;
        self.next_id += 1;
        call.words.id = id;
        let mut bytes = call.words.as_slice().to_vec();
        bytes.extend(&call.control);
        bytes.extend(&call.data);
        let writable = DONE_LEN + usize::from(call.words.control_room) + call.room;
        // Large buffers, up to 1 MiB per direction, are in the tests' memory.
        let large = FREE + u64::from(slot % 16) * (2 << 20);
        let (from, to) = if bytes.len().max(writable) > SLOT as usize / 2 {
            (large, large + (1 << 20))
        } else {
            (at, at + SLOT / 2)
        };
        self.memory.write_slice(&bytes, GuestAddress(from)).unwrap();
        self.calls.descriptor(2 * slot, from, bytes.len() as u32, 1, 2 * slot + 1);
        self.calls.descriptor(2 * slot + 1, to, writable as u32, 2, 0);
        self.out.insert(2 * slot, (to, call));
        self.calls.offer(2 * slot);
        self.calls.notify();
        id
    }

    fn collect(&mut self) {
        while let Some((head, len)) = self.calls.take() {
            let (at, call) = self.out.remove(&head).expect("an answer without a call");
            self.free.push(head / 2);
            let header: ontime_done = self.memory.read_obj(GuestAddress(at)).unwrap();
            let mut rest = vec![0; (len as usize).saturating_sub(DONE_LEN)];
            self.memory.read_slice(&mut rest, GuestAddress(at + DONE_LEN as u64)).unwrap();
            let data = rest.get(usize::from(call.words.control_room)..).unwrap_or_default().to_vec();
            rest.truncate(usize::from(header.control_len));
            self.answers += 1;
            self.done.insert(call.words.id, Done { nth: self.answers, len, header, control: rest, data });
        }
    }

    /// Takes and drops answers, also those to manually offered chains.
    pub(crate) fn drain(&mut self) {
        while self.take().is_some() {}
    }

    /// Takes one answer: the head and the written length.
    pub(crate) fn take(&mut self) -> Option<(u16, u32)> {
        let (head, len) = self.calls.take()?;
        if self.out.remove(&head).is_some() {
            self.free.push(head / 2);
        }
        Some((head, len))
    }

    /// Drains until the device has processed the last offered chain.
    pub(crate) fn settle(&mut self) {
        let last = self.post(Call::new(ONTIME_OP_POLL, ONTIME_SOCK_NONE));
        let start = Instant::now();
        while self.out.values().any(|(_, call)| call.words.id == last) {
            assert!(start.elapsed() < PATIENCE, "the calls are not taken");
            self.drain();
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Makes this many calls without effect and waits for the answers.
    pub(crate) fn settle_many(&mut self, count: u16) {
        let posted: Vec<u64> = (0..count).map(|_| self.post(Call::new(ONTIME_OP_POLL, ONTIME_SOCK_NONE))).collect();
        for id in posted {
            self.wait(id);
        }
    }

    /// Probes the device as a driver does before its setup: reads the configuration.
    pub(crate) fn probe(&mut self) {
        let zeros = [0; size_of::<ontime_config>()];
        self.frontend.get_config(0, zeros.len() as u32, VhostUserConfigFlags::WRITABLE, &zeros).unwrap();
    }

    pub(crate) fn write(&self, address: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(address)).unwrap();
    }

    pub(crate) fn read(&self, address: u64) -> [u8; 4] {
        self.memory.read_obj(GuestAddress(address)).unwrap()
    }

    pub(crate) fn poll(&mut self, id: u64) -> Option<Done> {
        self.collect();
        self.done.remove(&id)
    }

    pub(crate) fn wait(&mut self, id: u64) -> Done {
        let start = Instant::now();
        loop {
            if let Some(done) = self.poll(id) {
                assert_eq!(done.header.id, id);
                return done;
            }
            assert!(start.elapsed() < PATIENCE, "call {id} is not answered");
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Makes a call and waits for its answer.
    pub(crate) fn call(&mut self, call: Call) -> Done {
        let id = self.post(call);
        self.wait(id)
    }

    pub(crate) fn result(&mut self, call: Call) -> Result<u32, i32> {
        self.call(call).result()
    }

    /// Makes a SOCKET call.
    pub(crate) fn socket(&mut self, sock: u32, family: i32, kind: i32, channel: u32) {
        assert_eq!(self.result(Call::new(ONTIME_OP_SOCKET, sock).arg([family, kind, 0, channel as i32])), Ok(0));
    }

    /// Makes a CTL_VCPU call.
    pub(crate) fn name_vcpu(&mut self, channel: u32, address: u64) -> i32 {
        self.control_call(ONTIME_CTL_VCPU, channel, &address.to_le_bytes())
    }

    /// Makes a call on the control queue. Written by hand, because `calls` is the call ring.
    pub(crate) fn control_call(&mut self, op: u32, arg: u32, data: &[u8]) -> i32 {
        let (memory, ring) = (self.memory.clone(), self.control.as_mut().unwrap());
        let words = ontime_call { op: op as u16, sock: ONTIME_SOCK_NONE, arg: [arg, 0, 0, 0], ..Default::default() };
        let (from, to) = (FREE - 0x2000, FREE - 0x1000);
        memory.write_obj(words, GuestAddress(from)).unwrap();
        memory.write_slice(data, GuestAddress(from + CALL_LEN as u64)).unwrap();
        ring.descriptor(0, from, (CALL_LEN + data.len()) as u32, 1, 1);
        ring.descriptor(1, to, DONE_LEN as u32, 2, 0);
        ring.offer(0);
        ring.notify();
        let start = Instant::now();
        while ring.take().is_none() {
            assert!(start.elapsed() < PATIENCE, "the control call is not answered");
        }
        let done: ontime_done = memory.read_obj(GuestAddress(to)).unwrap();
        done.result as i32
    }
}
