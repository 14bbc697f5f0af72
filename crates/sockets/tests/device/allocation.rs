//! A channel's thread does not allocate or free memory for a request. The device process is this test program
//! ([`super::driver`]). Its allocator counts per thread in a file that the test reads.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use libc::{AF_INET, SOCK_DGRAM};
use ontime_sockets::abi::*;

use super::driver::{Call, Vm};
use super::{FREE, bind, listen, local};

/// A thread and its count; thread 0 marks an unused row.
#[repr(C)]
struct Row {
    thread: AtomicU64,
    count: AtomicU64,
}

const ROWS: usize = 256;
/// Size of the file, bytes.
pub(crate) const SIZE: usize = ROWS * size_of::<Row>();

/// The mapped file, in a device process.
static TABLE: AtomicPtr<Row> = AtomicPtr::new(null_mut());

thread_local! {
    /// The calling thread's row.
    static OWN: Cell<*const Row> = const { Cell::new(null()) };
}

/// Counts into this file of [`SIZE`] bytes from now on.
pub(crate) fn count_into(path: &Path) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let (access, fd) = (libc::PROT_READ | libc::PROT_WRITE, file.as_raw_fd());
    let at = unsafe { libc::mmap(null_mut(), SIZE, access, libc::MAP_SHARED, fd, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    TABLE.store(at.cast(), Ordering::Release);
}

/// A thread's count in the file.
pub(crate) fn of(path: &Path, thread: u32) -> u64 {
    let bytes = std::fs::read(path).unwrap();
    let numbers: Vec<u64> = bytes.chunks(8).map(|bytes| u64::from_ne_bytes(bytes.try_into().unwrap())).collect();
    numbers.chunks(2).find(|row| row[0] == u64::from(thread)).expect("a thread that has never allocated")[1]
}

fn count() {
    let table = TABLE.load(Ordering::Acquire);
    if table.is_null() {
        return;
    }
    let rows = unsafe { std::slice::from_raw_parts(table, ROWS) };
    let mut own = OWN.get();
    if own.is_null() {
        let thread = unsafe { libc::gettid() } as u64;
        let free = |row: &&Row| row.thread.compare_exchange(0, thread, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        own = rows.iter().find(free).map_or(null(), std::ptr::from_ref);
        OWN.set(own);
    }
    // Threads that find no free row are not counted.
    if let Some(row) = unsafe { own.as_ref() } {
        row.count.fetch_add(1, Ordering::Relaxed);
    }
}

struct Counting;

// All memory comes from the system allocator; counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count();
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One request of each kind that a channel accepts, and one that waits.
fn requests(vm: &mut Vm, udp: (&UdpSocket, std::net::SocketAddr), listener: std::net::SocketAddr) {
    let (client, address) = udp;
    let driver = &mut vm.channels[1];
    for wait in [true, false] {
        let receive = Call::new(ONTIME_OP_RECV, 1).room(100).control_room(100);
        let waiting = wait.then(|| {
            let waiting = driver.post(receive.clone().wait());
            driver.result(Call::new(ONTIME_OP_POLL, 1)).unwrap();
            waiting
        });
        client.send_to(b"request", address).unwrap();
        let received = match waiting {
            Some(waiting) => driver.wait(waiting),
            None => {
                driver.ready(1, ONTIME_READY_IN);
                driver.call(receive)
            }
        };
        assert_eq!(received.data, b"request");
        let answer = Call::new(ONTIME_OP_SEND, 1).to(client.local_addr().unwrap()).data(b"answer");
        assert_eq!(driver.result(answer), Ok(6));
        client.recv(&mut [0; 10]).unwrap();
    }
    let given_up = driver.post(Call::new(ONTIME_OP_RECV, 1).wait().room(10));
    assert_eq!(driver.result(Call::new(ONTIME_OP_CANCEL, ONTIME_SOCK_NONE).arg([given_up as i32])), Ok(0));
    assert_eq!(driver.wait(given_up).result(), Err(libc::ECANCELED));
    // A connection from its accept to its close, with more data than fit at once.
    let accepting = driver.post(Call::new(ONTIME_OP_ACCEPT, 2).arg([3]).wait());
    let mut peer = TcpStream::connect(listener).unwrap();
    assert_eq!(driver.wait(accepting).result(), Ok(0));
    let waiting = driver.post(Call::new(ONTIME_OP_RECV, 3).wait().room(100));
    peer.write_all(b"request").unwrap();
    assert_eq!(driver.wait(waiting).data, b"request");
    let large = driver.post(Call::new(ONTIME_OP_SEND, 3).wait().data(&[7; 1_000_000]));
    let larger = driver.post(Call::new(ONTIME_OP_SEND, 3).wait().data(&[7; 1_000_000]));
    peer.read_exact(&mut vec![0; 2_000_000]).unwrap();
    assert_eq!([large, larger].map(|sent| driver.wait(sent).result()), [Ok(1_000_000); 2]);
    assert_eq!(driver.result(Call::new(ONTIME_OP_NAME, 3).arg([1])), Ok(0));
    assert_eq!(driver.result(Call::new(ONTIME_OP_QUERY, 3).arg([ONTIME_QUERY_INQ as i32])), Ok(0));
    assert_eq!(driver.result(Call::new(ONTIME_OP_SHUTDOWN, 3).arg([1])), Ok(0));
    assert_eq!(driver.result(Call::new(ONTIME_OP_CLOSE, 3)), Ok(0));
    // Refused calls.
    assert_eq!(driver.result(Call::new(ONTIME_OP_POLL, 9)), Err(libc::EBADF));
    assert_eq!(driver.result(Call::new(ONTIME_OP_SEND, 1).arg([1 << 30]).data(b"x")), Err(libc::EINVAL));
    let beyond = Call::new(ONTIME_OP_SEND, 1).to("192.0.2.1:9".parse().unwrap()).data(b"x");
    assert_eq!(driver.result(beyond), Err(libc::EPERM));
    // Orders of the worker.
    for channel in [0, 1] {
        assert_eq!(vm.main().result(Call::new(ONTIME_OP_CHANNEL, 1).arg([channel])), Ok(0));
    }
    assert_eq!(vm.channels[1].result(Call::new(ONTIME_OP_POLL, 1)), Ok(0));
}

#[test]
fn a_channels_thread_allocates_nothing_for_a_request() {
    let mut vm = Vm::start(FREE);
    vm.channels[1].event_buffers(64);
    vm.main().socket(1, AF_INET, SOCK_DGRAM, 1);
    let address = bind(&mut vm, 1);
    let listener = listen(&mut vm, 2, 1);
    let client = UdpSocket::bind(local(0)).unwrap();
    let thread = "ontime-sock/1";
    // The first turn allocates per-thread state once (`arc_swap`'s entry for the guest's memory).
    vm.channels[1].settle();
    let before = vm.allocations(thread);
    assert_ne!(before, 0, "nothing is counted");
    for _ in 0..3 {
        requests(&mut vm, (&client, address), listener);
    }
    assert_eq!(vm.allocations(thread) - before, 0);
}
