//! Main's control queue: calls about the VM. It has its own thread, so that bandwidth requests do not queue behind bulk
//! data. These requests may wait here for the daemon's answer ([`crate::deadlines`]).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use vhost_user_backend::VringT;
use vm_memory::{
    ByteValued, GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryBackend, GuestMemoryRegion,
};

use crate::abi::*;
use crate::call::Reply;
use crate::counters::count;
use crate::deadlines::DeadlinePage;
use crate::limits::QUEUE_MAX;
use crate::memory::{Buffers, Memory};
use crate::notify;
use crate::request;
use crate::shared::Shared;
use crate::vring::Vring;

/// Most data of a control call, bytes.
const DATA_MAX: usize = ONTIME_BW_ENTRIES_MAX as usize * size_of::<ontime_bw>();
/// Most segments of a control call, both directions together, however headers and data are split.
const SEGMENTS: usize = 8;

/// The control queue of a VM.
pub(crate) struct ControlQueue {
    shared: Arc<Shared>,
    memory: GuestMemoryAtomic<Memory>,
    buffers: Buffers,
    /// The ring's `set_up` count that was processed last.
    seen: u32,
}

impl ControlQueue {
    /// The control queue of a VM.
    pub(crate) fn new(shared: Arc<Shared>, memory: GuestMemoryAtomic<Memory>) -> Self {
        Self { shared, memory, buffers: Buffers::with_capacity(SEGMENTS), seen: 0 }
    }

    /// Answers all calls in the queue.
    pub(crate) fn handle(&mut self, vring: &Vring) {
        let guard = self.memory.memory();
        let memory = &*guard;
        if vring.anew_since(&mut self.seen) {
            self.forget();
        }
        let (mut used, mut again) = (false, false);
        while vring.running() {
            for _ in 0..QUEUE_MAX {
                let Some(popped) = vring.pop(memory) else { break };
                again = false;
                let Ok(chain) = popped else {
                    count(&self.shared.counters.malformed);
                    continue;
                };
                let head = chain.head_index();
                self.buffers.fill(chain.map(|d| (d.addr().0, d.len(), d.is_write_only())), SEGMENTS);
                let _ = vring.add_used(head, self.answer(memory, vring));
                used = true;
            }
            // A ring with an invalid index always seems to hold more: if nothing arrived, retry once, not for ever.
            if !matches!(vring.enable_notification(), Ok(true)) || std::mem::replace(&mut again, true) {
                break;
            }
        }
        if used && vring.needs_notification().unwrap_or(true) {
            let _ = vring.signal_used_queue();
        }
    }

    /// Drops what the previous driver set through this queue. Must run before the new driver's first call, which
    /// arrives on this queue, too.
    fn forget(&self) {
        for channel in 1..self.shared.channels() {
            if self.shared.name_vcpu(channel, 0).is_err() {
                let vm = self.shared.name.as_str();
                tracing::warn!(
                    vm,
                    channel,
                    "the guest's driver is set up anew though a thread may still use its memory; if its sockets fail \
                     afterwards, restart the VM"
                );
            }
        }
        self.shared.deadlines.forget();
    }

    /// Answers a call and returns the used length.
    fn answer(&mut self, memory: &Memory, vring: &Vring) -> u32 {
        let mut words = ontime_call::default();
        let (readable, writable) = (&self.buffers.readable, &self.buffers.writable);
        if writable.len < DONE_LEN || readable.read(memory, 0, words.as_mut_slice()).is_err() {
            count(&self.shared.counters.malformed);
            return 0;
        }
        let result = self.run(memory, vring, &words);
        if result.is_err_and(|error| error.0 != libc::EBUSY) {
            count(&self.shared.counters.malformed);
        }
        let reply = Reply::number(result.map(|()| 0));
        reply.write_to(memory, &self.buffers.writable, words.id, 0, 0).unwrap_or(0)
    }

    fn run(&self, memory: &Memory, vring: &Vring, words: &ontime_call) -> Result<(), Errno> {
        if let Some(error) = self.buffers.malformed {
            return Err(error);
        }
        let parts = request::parts(words, self.buffers.readable.len, self.buffers.writable.len, DATA_MAX)?;
        match u32::from(words.op) {
            ONTIME_CTL_VCPU => self.vcpu(memory, vring, words, parts.data),
            ONTIME_CTL_PING => self.ping(words, parts.data),
            op @ (ONTIME_CTL_INC_BW | ONTIME_CTL_DEC_BW | ONTIME_CTL_INC_DEC_BW) if self.shared.vm.deadlines => {
                self.bandwidth(memory, op, words, parts.data)
            }
            ONTIME_CTL_NEXT if self.shared.vm.deadlines => self.next(memory, words, parts.data),
            _ => Err(Errno(libc::EOPNOTSUPP)),
        }
    }

    /// PING: a check that the device is alive. Its argument is a counter of the guest.
    fn ping(&self, words: &ontime_call, data: usize) -> Result<(), Errno> {
        let [stayed_local, a1, a2, a3] = words.arg;
        if data != 0 || [a1, a2, a3] != [0; 3] {
            return Err(Errno(libc::EINVAL));
        }
        self.shared.counters.stayed_local.store(stayed_local.into(), Ordering::Relaxed);
        Ok(())
    }

    /// NEXT: the address at which the guest publishes its next deadlines. The daemon gets that part of the guest's
    /// memory.
    fn next(&self, memory: &Memory, words: &ontime_call, data: usize) -> Result<(), Errno> {
        let unused =
            words.sock == ONTIME_SOCK_NONE && words.flags == 0 && words.control_len == 0 && words.arg == [0; 4];
        if !unused || data != 8 {
            return Err(Errno(libc::EINVAL));
        }
        let mut address = [0; 8];
        self.buffers.readable.read(memory, CALL_LEN, &mut address)?;
        let address = u64::from_le_bytes(address);
        if address == 0 {
            return self.shared.deadlines.publish(None);
        }
        if address % u64::from(ONTIME_NEXT_ALIGN) != 0 {
            return Err(Errno(libc::EINVAL));
        }
        let fault = Errno(libc::EFAULT);
        let (region, start) = memory.to_region_addr(GuestAddress(address)).ok_or(fault)?;
        let length = u64::from(ONTIME_VCPUS_MAX) * size_of::<ontime_next_vcpu>() as u64;
        if region.len() - start.0 < length {
            return Err(fault);
        }
        let file = region.file_offset().ok_or(fault)?;
        let offset = file.start().checked_add(start.0).ok_or(fault)?;
        let file = file.file().try_clone().map_err(|_| fault)?;
        self.shared.deadlines.publish(Some(DeadlinePage { file, offset }))
    }

    fn bandwidth(&self, memory: &Memory, op: u32, words: &ontime_call, data: usize) -> Result<(), Errno> {
        let unused =
            words.sock == ONTIME_SOCK_NONE && words.flags == 0 && words.control_len == 0 && words.arg == [0; 4];
        if !unused || data % size_of::<ontime_bw>() != 0 {
            return Err(Errno(libc::EINVAL));
        }
        let mut entries = [ontime_bw::default(); ONTIME_BW_ENTRIES_MAX as usize];
        let entries = entries.get_mut(..data / size_of::<ontime_bw>()).unwrap_or_default();
        for (index, entry) in entries.iter_mut().enumerate() {
            self.buffers.readable.read(memory, CALL_LEN + index * size_of::<ontime_bw>(), entry.as_mut_slice())?;
        }
        count(&self.shared.counters.deadlines);
        let done = self.shared.deadlines.change(op, entries);
        if done == Err(Errno(libc::EBUSY)) {
            count(&self.shared.counters.refused_deadlines);
        }
        done
    }

    fn vcpu(&self, memory: &Memory, vring: &Vring, words: &ontime_call, data: usize) -> Result<(), Errno> {
        let invalid = Errno(libc::EINVAL);
        let [channel, _vcpu, a2, a3] = words.arg;
        if !(1..self.shared.channels()).contains(&channel) {
            return Err(invalid);
        }
        let unused = words.sock == ONTIME_SOCK_NONE && words.flags == 0 && words.control_len == 0 && a2 == 0 && a3 == 0;
        if !unused || data != 8 {
            return Err(invalid);
        }
        let mut address = [0; 8];
        self.buffers.readable.read(memory, CALL_LEN, &mut address)?;
        let address = u64::from_le_bytes(address);
        if address % size_of::<ontime_vcpu>() as u64 != 0 {
            return Err(invalid);
        }
        if address != 0 && !notify::word_fits(memory, address) {
            return Err(Errno(libc::EFAULT));
        }
        self.shared.attention.get_or_init(|| vring.clone());
        self.shared.name_vcpu(channel, address)
    }
}
