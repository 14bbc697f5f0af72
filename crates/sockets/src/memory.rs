//! Guest memory as a call's buffers: segments that are read from the ring once, byte copies in both directions, and
//! iovecs for the kernel.
//!
//! Segments hold guest addresses, not pointers. A waiting call is translated anew at each attempt, so a change of the
//! guest's memory map in between causes EFAULT instead of an access to other memory.

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, VolatileSlice};

use crate::abi::Errno;

/// The guest's memory as shared by QEMU.
pub(crate) type Memory = GuestMemoryMmap<()>;

/// A piece of a buffer, in guest-physical addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment {
    pub address: u64,
    /// Its length, bytes.
    pub len: u32,
}

/// Space for a system call's iovecs, allocated once.
#[derive(Debug)]
pub(crate) struct Iovecs(Vec<libc::iovec>);

// SAFETY: `Segments::iovecs` fills in the pointers just before each system call; they are not used in between.
unsafe impl Send for Iovecs {}

impl Iovecs {
    /// Space for at most `max` iovecs.
    pub(crate) fn with_capacity(max: usize) -> Self {
        Self(Vec::with_capacity(max))
    }
}

impl std::ops::Deref for Iovecs {
    type Target = [libc::iovec];

    fn deref(&self) -> &[libc::iovec] {
        &self.0
    }
}

impl std::ops::DerefMut for Iovecs {
    fn deref_mut(&mut self) -> &mut [libc::iovec] {
        &mut self.0
    }
}

/// A snapshot of one descriptor chain, so that later changes of the descriptors have no effect.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    /// The part that the device reads.
    pub readable: Segments,
    /// The part that the device writes.
    pub writable: Segments,
    /// Set if there were more segments than allowed, or a readable one after a writable one.
    pub malformed: Option<Errno>,
}

/// The readable or writable part of a chain.
#[derive(Debug, Default)]
pub(crate) struct Segments {
    list: Vec<Segment>,
    /// Total length, bytes.
    pub len: usize,
}

impl Segments {
    /// Adds a segment unless there are `max` already.
    fn push(&mut self, segment: Segment, max: usize) {
        if self.list.len() < max {
            self.len = self.len.saturating_add(segment.len as usize);
            self.list.push(segment);
        }
    }

    /// The pieces of `len` bytes starting at `offset`.
    fn pieces(&self, offset: usize, len: usize) -> impl Iterator<Item = Segment> {
        let (mut skip, mut left) = (offset as u64, len as u64);
        let mut segments = self.list.iter();
        std::iter::from_fn(move || {
            while left > 0 {
                let segment = segments.next()?;
                let skipped = skip.min(u64::from(segment.len));
                skip -= skipped;
                let taken = left.min(u64::from(segment.len) - skipped);
                left -= taken;
                if taken > 0 {
                    return Some(Segment { address: segment.address.wrapping_add(skipped), len: taken as u32 });
                }
            }
            None
        })
    }

    /// Copies bytes from the guest. After an error the contents of `out` are undefined.
    ///
    /// # Errors
    /// EFAULT for addresses outside guest memory, EINVAL if the part is too short.
    pub(crate) fn read(&self, memory: &Memory, offset: usize, out: &mut [u8]) -> Result<(), Errno> {
        let mut rest = out;
        let wanted = rest.len();
        for piece in self.pieces(offset, wanted) {
            let (now, later) =
                std::mem::take(&mut rest).split_at_mut_checked(piece.len as usize).ok_or(Errno(libc::EINVAL))?;
            match piece.whole(memory) {
                Some(slice) => drop(slice.copy_to(now)),
                None => memory.read_slice(now, GuestAddress(piece.address)).map_err(|_| Errno(libc::EFAULT))?,
            }
            rest = later;
        }
        if rest.is_empty() { Ok(()) } else { Err(Errno(libc::EINVAL)) }
    }

    /// Copies bytes to the guest.
    ///
    /// # Errors
    /// As for `read`.
    pub(crate) fn write(&self, memory: &Memory, offset: usize, bytes: &[u8]) -> Result<(), Errno> {
        let mut rest = bytes;
        for piece in self.pieces(offset, bytes.len()) {
            let (now, later) = rest.split_at_checked(piece.len as usize).ok_or(Errno(libc::EINVAL))?;
            match piece.whole(memory) {
                Some(slice) => slice.copy_from(now),
                None => memory.write_slice(now, GuestAddress(piece.address)).map_err(|_| Errno(libc::EFAULT))?,
            }
            rest = later;
        }
        if rest.is_empty() { Ok(()) } else { Err(Errno(libc::EINVAL)) }
    }

    /// Fills `out` with iovecs of `len` bytes starting at `offset`. They are valid as long as `memory` is. The guest
    /// may change the memory at any time. Never allocates: `out`'s capacity is the limit.
    ///
    /// # Errors
    /// EFAULT as for `read`, E2BIG if `out`'s capacity is too small.
    pub(crate) fn iovecs(
        &self,
        memory: &Memory,
        offset: usize,
        len: usize,
        Iovecs(out): &mut Iovecs,
    ) -> Result<(), Errno> {
        out.clear();
        let mut near = LastRegion::default();
        for piece in self.pieces(offset, len) {
            if near.add(piece, out) {
                continue;
            }
            let (mut address, mut left) = (GuestAddress(piece.address), u64::from(piece.len));
            // A piece may span adjacent memory regions.
            while left > 0 {
                let (region, start) = memory.to_region_addr(address).ok_or(Errno(libc::EFAULT))?;
                let here = left.min(region.len() - start.0);
                let slice = region.get_slice(start, here as usize).map_err(|_| Errno(libc::EFAULT))?;
                if out.len() == out.capacity() {
                    return Err(Errno(libc::E2BIG));
                }
                out.push(libc::iovec { iov_base: slice.ptr_guard_mut().as_ptr().cast(), iov_len: slice.len() });
                address = GuestAddress(address.0.checked_add(here).ok_or(Errno(libc::EFAULT))?);
                left -= here;
                near = LastRegion { start: region.start_addr().0, len: region.len(), at: region.as_ptr() };
            }
        }
        Ok(())
    }
}

impl Segment {
    /// The whole segment, if it is within one memory region: a faster path for the usual case.
    fn whole(self, memory: &Memory) -> Option<VolatileSlice<'_>> {
        let (region, start) = memory.to_region_addr(GuestAddress(self.address))?;
        region.get_slice(start, self.len as usize).ok()
    }
}

/// The memory region of the last piece: the next piece is mostly in the same region.
struct LastRegion {
    start: u64,
    len: u64,
    at: *mut u8,
}

impl Default for LastRegion {
    fn default() -> Self {
        Self { start: 0, len: 0, at: std::ptr::null_mut() }
    }
}

impl LastRegion {
    /// Adds a piece that is in this region. False: it is not, or `out` is full.
    fn add(&self, piece: Segment, out: &mut Vec<libc::iovec>) -> bool {
        let Some(offset) = piece.address.checked_sub(self.start) else { return false };
        let inside = self.len.checked_sub(u64::from(piece.len)).is_some_and(|last| offset <= last);
        if !inside || out.len() == out.capacity() {
            return false;
        }
        out.push(libc::iovec { iov_base: self.at.wrapping_add(offset as usize).cast(), iov_len: piece.len as usize });
        true
    }
}

impl Buffers {
    /// With room for `max` segments per direction, so that reading a chain never allocates.
    pub(crate) fn with_capacity(max: usize) -> Self {
        let part = || Segments { list: Vec::with_capacity(max), len: 0 };
        Self { readable: part(), writable: part(), malformed: None }
    }

    /// Reads a chain's descriptors: (address, bytes, writable). More than `max` in both directions together are an
    /// error. Further descriptors are still read, up to `max` per direction, because the error answer needs the space.
    pub(crate) fn fill(&mut self, chain: impl Iterator<Item = (u64, u32, bool)>, max: usize) {
        self.malformed = None;
        for part in [&mut self.readable, &mut self.writable] {
            part.list.clear();
            part.len = 0;
        }
        for (index, (address, len, writable)) in chain.take(2 * max + 1).enumerate() {
            let part = if writable { &mut self.writable } else { &mut self.readable };
            part.push(Segment { address, len }, max);
            if index >= max {
                self.malformed.get_or_insert(Errno(libc::E2BIG));
            } else if !writable && !self.writable.list.is_empty() {
                self.malformed.get_or_insert(Errno(libc::EINVAL));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn memory() -> Memory {
        Memory::from_ranges(&[
            (GuestAddress(0x1000), 0x1000),
            (GuestAddress(0x2000), 0x1000),
            (GuestAddress(0x8000), 0x1000),
        ])
        .unwrap()
    }

    fn buffers(descriptors: &[(u64, u32, bool)], max: usize) -> Buffers {
        let mut buffers = Buffers::with_capacity(max);
        buffers.fill(descriptors.iter().copied(), max);
        buffers
    }

    #[test]
    fn bytes_cross_segments_and_regions() {
        let memory = memory();
        let chain = buffers(&[(0x1ffe, 4, true), (0x8000, 3, true)], 4);
        assert_eq!(chain.writable.len, 7);
        chain.writable.write(&memory, 1, b"abcdef").unwrap();
        let mut back = [0; 6];
        chain.writable.read(&memory, 1, &mut back).unwrap();
        assert_eq!(&back, b"abcdef");
        let mut iov = Iovecs::with_capacity(4);
        chain.writable.iovecs(&memory, 1, 6, &mut iov).unwrap();
        assert_eq!(iov.iter().map(|v| v.iov_len).collect::<Vec<_>>(), [1, 2, 3]);
    }

    #[test]
    fn foreign_addresses_and_short_buffers_are_refused() {
        let memory = memory();
        let foreign = buffers(&[(0x8ff0, 0x20, true)], 4);
        assert_eq!(foreign.writable.write(&memory, 0, &[0; 0x20]), Err(Errno(libc::EFAULT)));
        assert_eq!(foreign.writable.iovecs(&memory, 0, 0x20, &mut Iovecs::with_capacity(4)), Err(Errno(libc::EFAULT)));
        assert_eq!(foreign.writable.iovecs(&memory, 0, 0x10, &mut Iovecs::with_capacity(0)), Err(Errno(libc::E2BIG)));
        let wraps = buffers(&[(u64::MAX - 1, 16, false)], 4);
        assert_eq!(wraps.readable.read(&memory, 0, &mut [0; 16]), Err(Errno(libc::EFAULT)));
        assert_eq!(wraps.readable.iovecs(&memory, 8, 8, &mut Iovecs::with_capacity(4)), Err(Errno(libc::EFAULT)));
        let short = buffers(&[(0x1000, 8, false)], 4);
        assert_eq!(short.readable.read(&memory, 0, &mut [0; 9]), Err(Errno(libc::EINVAL)));
    }

    #[test]
    fn disorder_and_excess_are_seen() {
        assert_eq!(buffers(&[(0, 1, true), (0, 1, false)], 4).malformed, Some(Errno(libc::EINVAL)));
        assert_eq!(buffers(&[(0, 1, false); 5], 4).malformed, Some(Errno(libc::E2BIG)));
        let endless = std::iter::repeat((0, 1, false));
        let mut chain = Buffers::with_capacity(4);
        chain.fill(endless, 4);
        assert_eq!(chain.malformed, Some(Errno(libc::E2BIG)));
        chain.fill([(0x1000, 1, false)].into_iter(), 4);
        assert_eq!((chain.malformed, chain.readable.len, chain.writable.len), (None, 1, 0));
    }

    /// `segments_max` counts both directions of a call. A call beyond it is refused and can still be answered.
    #[test]
    fn descriptors_of_both_directions_count_together() {
        let chain = |readable, writable| {
            let part = |count, direction| std::iter::repeat_n((0x1000, 8, direction), count);
            buffers(&part(readable, false).chain(part(writable, true)).collect::<Vec<_>>(), 4)
        };
        let too_many = Some(Errno(libc::E2BIG));
        for (readable, writable, malformed) in
            [(1, 3, None), (3, 1, None), (2, 2, None), (4, 0, None), (0, 4, None), (4, 1, too_many), (3, 2, too_many)]
        {
            let chain = chain(readable, writable);
            assert_eq!(chain.malformed, malformed, "{readable} readable, {writable} writable");
            assert_eq!((chain.readable.len, chain.writable.len), (8 * readable, 8 * writable));
        }
        // The space for the answer is found behind the excess descriptors.
        let chain = chain(7, 1);
        assert_eq!((chain.malformed, chain.readable.len, chain.writable.len), (too_many, 32, 8));
        assert_eq!((chain.readable.list.capacity(), chain.writable.list.capacity()), (4, 4), "nothing was allocated");
    }

    proptest! {
        #[test]
        fn iovecs_stay_in_memory(
            descriptors in proptest::collection::vec((0u64..0xa000, 0u32..0x3000, any::<bool>()), 0..8),
            offset in 0usize..0x4000,
            len in 0usize..0x4000,
        ) {
            let memory = memory();
            let chain = buffers(&descriptors, 8);
            let mut iov = Iovecs::with_capacity(16);
            if chain.writable.iovecs(&memory, offset, len, &mut iov).is_ok() {
                let total: usize = iov.iter().map(|v| v.iov_len).sum();
                prop_assert_eq!(total, chain.writable.len.saturating_sub(offset).min(len));
                for v in iov.iter() {
                    let inside = memory.iter().any(|region| {
                        let base = region.as_ptr() as usize;
                        (base..=base + region.len() as usize).contains(&(v.iov_base as usize + v.iov_len))
                            && v.iov_base as usize >= base
                    });
                    prop_assert!(inside);
                }
            }
        }
    }
}
