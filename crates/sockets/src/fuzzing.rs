//! Private parts of this crate for the fuzz targets of the crate `ontime-fuzz`. Not a public interface.
//!
//! Input: the contents of a guest's memory with a virtqueue. Output: what the device's own code read from it and did.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use ontime_sched::Ledger;
use ontime_sched::ledger::{NOTHING, Table};
use vhost_user_backend::VringT;
use vm_memory::{
    ByteValued, Bytes, FileOffset, GuestAddress, GuestMemoryAtomic, GuestMemoryBackend, GuestMemoryRegion,
};

use crate::abi::{DONE_LEN, Errno, ontime_call};
use crate::config::Vm;
use crate::control;
pub use crate::control::holds_icmp_error;
use crate::control_queue::ControlQueue;
use crate::deadlines::{BandwidthAnswer, BandwidthRequest, Need};
use crate::limits::{DATA_MAX, QUEUE_MAX, SEGMENTS_CHANNEL};
use crate::memory::{Buffers, Iovecs, Memory};
use crate::options;
pub use crate::options::{Access, Group, access};
use crate::request::{self, Parts, Request};
use crate::shared::Shared;
use crate::vring::Vring;

/// Number of entries of the virtqueue. Its parts are at the following addresses in the guest's memory.
pub const QUEUE: u16 = 16;
/// The descriptor table.
pub const DESCRIPTORS: u64 = 0;
/// The available ring.
pub(crate) const AVAILABLE: u64 = 0x100;
/// The used ring.
pub const USED: u64 = 0x180;
/// The first address behind the rings.
pub const FREE: u64 = 0x240;
/// Start and length of each memory region of the guest: two adjacent ones, and one behind a hole.
pub const REGIONS: [(u64, usize); 3] = [(0, 0x4000), (0x4000, 0x4000), (0x1_0000, 0x4000)];
/// The VM's channels, main included.
pub const CHANNELS: u32 = 3;

/// What a channel does to the control messages of a guest in the host's own network.
pub fn leave_interface_to_routes(messages: &mut [u8]) {
    control::leave_interface_to_routes(messages);
}

/// What the worker does to the value of an option before the kernel reads it. False: it refuses the value.
pub fn limit_value(access: Access, value: &mut [u8]) -> bool {
    match access {
        Access::Filter(group) => group.limit_sources(value).is_ok(),
        Access::Stamps => options::limit_stamps(value).is_ok(),
        _ => true,
    }
}

/// A guest's memory that begins with these bytes.
fn memory(image: &[u8]) -> io::Result<Memory> {
    let file: OwnedFd = rustix::fs::memfd_create("ontime-fuzz", rustix::fs::MemfdFlags::CLOEXEC)?;
    let file = Arc::new(File::from(file));
    let length: usize = REGIONS.iter().map(|(_, length)| length).sum();
    file.set_len(length as u64)?;
    let mut from = 0;
    let ranges = REGIONS.map(|(start, length)| {
        let offset = FileOffset::from_arc(Arc::clone(&file), from);
        from += length as u64;
        (GuestAddress(start), length, Some(offset))
    });
    let memory = Memory::from_ranges_with_files(ranges).map_err(io::Error::other)?;
    let image = image.get(..0x8000).unwrap_or(image);
    memory.write_slice(image, GuestAddress(0)).map_err(io::Error::other)?;
    Ok(memory)
}

/// The virtqueue in this memory, running, with `base` as the next index.
fn ring(memory: &Memory, event_idx: bool, base: u16) -> io::Result<Vring> {
    let vring = Vring::new(GuestMemoryAtomic::new(memory.clone()), QUEUE_MAX as u16).map_err(io::Error::other)?;
    vring.set_queue_size(QUEUE);
    vring.set_queue_info(DESCRIPTORS, AVAILABLE, USED).map_err(io::Error::other)?;
    vring.set_queue_event_idx(event_idx);
    vring.set_queue_next_avail(base);
    vring.set_queue_next_used(base);
    vring.set_queue_ready(true);
    vring.set_enabled(true);
    Ok(vring)
}

fn used_index(memory: &Memory) -> u16 {
    memory.read_obj(GuestAddress(USED + 2)).map_or(0, u16::from_le)
}

/// A descriptor chain as a channel reads it.
#[derive(Debug)]
pub struct Chain {
    /// Its head. None: beyond the table.
    pub head: Option<u16>,
    /// Its descriptors: address, bytes, whether the device may write to it.
    pub descriptors: Vec<(u64, u32, bool)>,
    /// Total length of the readable and of the writable part, bytes.
    pub lengths: (usize, usize),
    /// The call's header, if it can be read.
    pub call: Option<ontime_call>,
    /// The parsed request.
    pub request: Result<(Parts, Request), Errno>,
    /// Whether the iovecs of the data space are in guest memory, and their total length, bytes.
    pub room: Result<(bool, usize), Errno>,
    /// Result of writing the answer.
    pub answer: Option<Result<(), Errno>>,
}

/// Takes up to `most` chains from the queue as a channel does, and answers each. Also returns the used ring's index.
///
/// # Errors
/// If memory cannot be allocated.
pub fn chains(image: &[u8], event_idx: bool, base: u16, most: usize) -> io::Result<(Vec<Chain>, u16)> {
    let memory = memory(image)?;
    let vring = ring(&memory, event_idx, base)?;
    let segments = SEGMENTS_CHANNEL as usize;
    let mut buffers = Buffers::with_capacity(segments);
    let mut iovecs = Iovecs::with_capacity(2 * segments);
    let mut found = Vec::new();
    while found.len() < most {
        let Some(popped) = vring.pop(&memory) else { break };
        let Ok(chain) = popped else {
            found.push(Chain {
                head: None,
                descriptors: Vec::new(),
                lengths: (0, 0),
                call: None,
                request: Err(Errno(libc::EINVAL)),
                room: Err(Errno(libc::EINVAL)),
                answer: None,
            });
            continue;
        };
        let head = chain.head_index();
        let triple = |d: virtio_queue::desc::split::Descriptor| (d.addr().0, d.len(), d.is_write_only());
        let descriptors: Vec<_> = chain.clone().map(triple).collect();
        buffers.fill(chain.map(triple), segments);
        let lengths = (buffers.readable.len, buffers.writable.len);
        let mut words = ontime_call::default();
        let read = lengths.1 >= DONE_LEN && buffers.readable.read(&memory, 0, words.as_mut_slice()).is_ok();
        let request = buffers.malformed.map_or_else(
            || {
                let parts = request::parts(&words, lengths.0, lengths.1, DATA_MAX as usize)?;
                Ok((parts, request::request(&words, CHANNELS)?))
            },
            Err,
        );
        let room = buffers.writable.iovecs(&memory, DONE_LEN, DATA_MAX as usize, &mut iovecs).map(|()| {
            let inside = |iovec: &libc::iovec| {
                memory.iter().any(|region| {
                    let start = region.as_ptr() as usize;
                    let at = iovec.iov_base as usize;
                    at >= start && at + iovec.iov_len <= start + region.len() as usize
                })
            };
            (iovecs.iter().all(inside), iovecs.iter().map(|iovec| iovec.iov_len).sum())
        });
        let answer = read.then(|| buffers.writable.write(&memory, 0, &[0; DONE_LEN]));
        let _ = vring.add_used(head, if read { DONE_LEN as u32 } else { 0 });
        let call = read.then_some(words);
        found.push(Chain { head: Some(head), descriptors, lengths, call, request, room, answer });
    }
    Ok((found, used_index(&memory)))
}

/// Results of calls on the control queue.
#[derive(Debug)]
pub struct Controlled {
    /// The bandwidth that the guest holds.
    pub held: Vec<Need>,
    /// The ledger's tables: offered and claimed bandwidth.
    pub ledger: (Table, Table),
    /// The address of each channel's vCPU word.
    pub words: Vec<u64>,
    /// The messages to the daemon.
    pub told: Vec<BandwidthRequest>,
}

/// Makes the control queue answer the calls in the guest's memory. A daemon offers `offers` and admits all requests or
/// none.
///
/// # Errors
/// If memory or a descriptor cannot be allocated.
pub fn control(image: &[u8], offers: &Table, admits: bool) -> io::Result<Controlled> {
    let memory = memory(image)?;
    let vring = ring(&memory, false, 0)?;
    let ledger = Ledger::create()?;
    let vm = Vm { channels: CHANNELS - 1, deadlines: true, ..Vm::default() };
    let shared = Arc::new(Shared::new("fuzz", vm, 1, Some(ledger.clone()))?);
    let (own, daemon) = UnixStream::pair()?;
    // The daemon's answers are written in advance: at most one for each chain and one for the connection.
    for seq in 1..=2 * u64::from(QUEUE) + 2 {
        let refused = (!admits).then(|| "full".to_owned());
        let mut line = serde_json::to_vec(&BandwidthAnswer { seq, refused })?;
        line.push(b'\n');
        (&daemon).write_all(&line)?;
    }
    // A guest whose ring is rewritten by its answers may send more requests: the daemon has then disconnected.
    daemon.shutdown(std::net::Shutdown::Write)?;
    shared.deadlines.connect(own)?;
    let generation = ledger.offer(offers, &NOTHING);
    ControlQueue::new(Arc::clone(&shared), GuestMemoryAtomic::new(memory.clone())).handle(&vring);
    let held = shared.deadlines.held();
    let claimed = ledger.table(ledger.generation().max(generation));
    daemon.set_nonblocking(true)?;
    let lines = BufReader::new(&daemon).split(b'\n').map_while(Result::ok);
    let told = lines.map(|line| serde_json::from_slice(&line)).collect::<Result<_, _>>()?;
    let words = (0..CHANNELS).map(|channel| shared.vcpu(channel)).collect();
    Ok(Controlled { held, ledger: (*offers, claimed), words, told })
}
