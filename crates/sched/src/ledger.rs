//! CPU time that a VM's guest may claim without asking the daemon, and what it claimed: a page of memory that the VM's
//! device process, the daemon and the pacers share.
//!
//! RTVirt's guest asks its hypervisor's scheduler by a hypercall. Here the daemon decides, and a question to the daemon
//! takes two switches of processes. So the daemon decides in advance: it *offers* each vCPU a bandwidth. All offers
//! together fit on the CPUs at once. The device process *claims* what its guest requests, as long as that is within the
//! offer, and answers the guest at once. The pacer reads the claim at its next check. The device process asks the
//! daemon only for more than the offer. Then, and before each pass and each answer about reservations, the daemon
//! withdraws all offers, reads the claims, decides, and makes new offers.
//!
//! `page` is the protocol, checked in every order of its steps by the crate `ontime-model`; this file maps the page.
//!
//! **Trust.** The device process serves a guest that may be hostile, and it can write anything into the page. So the
//! daemon and the pacers remember what they offered, and ignore a claim beyond that. The file is sealed against
//! shrinking, because otherwise a reader could fault. A pacer that reads a hole in the file would wait while the kernel
//! fills the hole with zeros; the device process's seccomp filter allows no call that makes a hole (`sockets`,
//! `seccomp.json`).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::memory_file;
pub use crate::model::{Budget, NOTHING, Table, VCPUS};

mod page;

/// The atomics of `page`. The model checker compiles `page` with its own.
mod atomic {
    pub(super) use std::sync::atomic::{AtomicU64, Ordering, fence};
}

/// Bytes of the file.
const SIZE: usize = 4096;

type Page = page::Page<VCPUS>;

const _: () = assert!(size_of::<Page>() <= SIZE);

/// A mapping of the page.
#[derive(Debug, Clone)]
pub struct Ledger(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    file: OwnedFd,
    page: NonNull<Page>,
}

// SAFETY: `page` is a shared mapping of atomics that lives as long as `Inner`; it is accessed only through these
// atomics.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with this length and is used through `self` only. A failure only leaves it
        // mapped.
        let _ = unsafe { rustix::mm::munmap(self.page.as_ptr().cast(), SIZE) };
    }
}

/// Equal if they are the same mapping; contents do not count.
impl PartialEq for Ledger {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Ledger {}

impl Ledger {
    /// Creates a ledger without offers. The device process does this before its seccomp filter starts.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn create() -> io::Result<Self> {
        let file = rustix::fs::memfd_create("ontime-ledger", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&file, SIZE as u64)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::map(file)
    }

    /// Maps a ledger that a device process made.
    ///
    /// # Errors
    /// The file could make a reader fault later: it may shrink, is too short, or has huge pages (which may run out). Or
    /// it is larger, or may grow: then the last close could take long. Or it cannot be mapped.
    pub fn accept(file: OwnedFd) -> io::Result<Self> {
        match Self::is_one(&file) {
            Ok(true) => return Self::map(file),
            done => {
                memory_file::close_elsewhere(file);
                done?;
            }
        }
        Err(io::Error::other("its ledger is no memory file of one page that is sealed against shrinking and growing"))
    }

    fn is_one(file: &OwnedFd) -> io::Result<bool> {
        let sealed = rustix::fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK | SealFlags::GROW);
        let size = rustix::fs::fstat(file)?.st_size;
        Ok(sealed && usize::try_from(size) == Ok(SIZE) && memory_file::is_tmpfs(file)?)
    }

    fn map(file: OwnedFd) -> io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // POPULATE, so that a pacer's read does not fault.
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping, which overlaps nothing that exists.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), SIZE, prot, flags, &file, 0) }?;
        let page = NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self(Arc::new(Inner { file, page })))
    }

    /// The file, for the process that is to [accept](Self::accept) it.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.0.file.as_fd()
    }

    fn page(&self) -> &Page {
        // SAFETY: mapped, page-aligned and at least that long until `Inner` goes; any bytes are valid atomics; the file
        // cannot shrink.
        unsafe { self.0.page.as_ref() }
    }

    /// The present generation.
    pub fn generation(&self) -> u64 {
        self.page().generation()
    }

    /// For the device process, one thread at a time: replaces the claims by `held`, if all of them are within the
    /// offers. Returns the new generation; None: the daemon must decide.
    pub fn claim(&self, held: &Table) -> Option<u64> {
        self.page().claim(held)
    }

    /// For the daemon: withdraws all offers; no claim succeeds after this. Returns the generation of the last claim.
    pub fn withdraw(&self) -> u64 {
        self.page().withdraw()
    }

    /// For the daemon, after it has [withdrawn](Self::withdraw) the offers before: offers `offers` to vCPUs that hold
    /// `held`. Returns the generation.
    pub fn offer(&self, offers: &Table, held: &Table) -> u64 {
        self.page().offer(offers, held)
    }

    /// The claims of all vCPUs in this generation. To be called only while offers are withdrawn.
    pub fn table(&self, generation: u64) -> Table {
        self.page().table(generation)
    }

    /// For a pacer (no system call, no allocation): a vCPU's claim, if its generation is not `seen`.
    pub fn new_claim(&self, vcpu: u32, seen: &mut u64) -> Option<Budget> {
        self.page().new_claim(vcpu, seen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn table(entries: &[(usize, u64, u64)]) -> Table {
        let mut table = NOTHING;
        entries.iter().for_each(|(vcpu, budget, period)| table[*vcpu] = Budget { budget: *budget, period: *period });
        table
    }

    #[test]
    fn claims_succeed_only_within_the_offers() {
        let ledger = Ledger::create().unwrap();
        let own = table(&[(0, MS, 10 * MS)]);
        assert_eq!(ledger.claim(&own), None, "nothing is offered");
        let daemon = Ledger::accept(ledger.file().try_clone_to_owned().unwrap()).unwrap();
        let opened = daemon.offer(&table(&[(0, 5 * MS, 10 * MS), (1, MS, 20 * MS)]), &NOTHING);
        let (mut seen, mut other) = (0, 0);
        assert_eq!(daemon.new_claim(0, &mut seen), Some(Budget::default()));
        assert_eq!(ledger.claim(&own), Some(opened + 1));
        assert_eq!(daemon.new_claim(0, &mut seen), Some(own[0]));
        assert_eq!(daemon.new_claim(0, &mut seen), None, "it is known");
        assert_eq!(daemon.new_claim(64, &mut other), None);
        for beyond in [
            table(&[(0, 6 * MS, 10 * MS)]),
            table(&[(0, MS, 9 * MS)]),
            table(&[(0, MS, 10 * MS), (2, 1, 100 * MS)]),
            table(&[(0, u64::MAX, u64::MAX)]),
        ] {
            assert_eq!(ledger.claim(&beyond), None);
        }
        assert_eq!(ledger.claim(&table(&[(0, 50 * MS, 100 * MS), (1, 5 * MS, 100 * MS)])), Some(opened + 2));
        assert_eq!(daemon.withdraw(), opened + 2);
        assert_eq!(daemon.table(opened + 2)[1], Budget { budget: 5 * MS, period: 100 * MS });
        assert_eq!(ledger.claim(&own), None, "withdrawn");
        assert_eq!(daemon.new_claim(1, &mut other).unwrap().budget, 5 * MS, "what was claimed stands");
        assert_eq!(daemon.offer(&own, &own), opened + 4);
        assert_eq!(ledger.claim(&NOTHING), Some(opened + 5));
    }

    #[test]
    fn a_file_that_may_shrink_or_is_short_is_none() {
        let both = SealFlags::SHRINK | SealFlags::GROW;
        let accept = |size: usize, seals| {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = rustix::fs::memfd_create("no-ledger", flags).unwrap();
            rustix::fs::ftruncate(&file, size as u64).unwrap();
            rustix::fs::fcntl_add_seals(&file, seals).unwrap();
            Ledger::accept(file).map(drop)
        };
        accept(SIZE, both).unwrap();
        let bad = [(SIZE, SealFlags::empty()), (SIZE, SealFlags::SHRINK), (SIZE, SealFlags::GROW)];
        for (size, seals) in bad.into_iter().chain([(0, both), (SIZE - 1, both), (2 * SIZE, both)]) {
            let said = accept(size, seals).unwrap_err().to_string();
            assert!(said.contains("of one page that is sealed"), "{size}, {seals:?}: {said}");
        }
        assert!(Ledger::accept(std::fs::File::open("/dev/null").unwrap().into()).is_err());
    }
}
