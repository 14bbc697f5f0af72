//! What a VM's guest may take without asking, and what it took: a page that the VM's device process, the daemon and the pacers share.
//!
//! RTVirt's guest asks by a hypercall, which the scheduler itself answers. Here the daemon decides, and it is a process away. So it decides beforehand: it *offers*
//! each vCPU a bandwidth, no more than is free whoever takes what is offered to him. The device process *claims* what its guest asks for, as long as it is within the offer, and the
//! guest has its answer without the daemon; the pacer reads the claim at its next look, before it judges what is left of a share. Whatever is beyond the offer the daemon is
//! asked for, and then, as before each pass and each answer about reservations, it withdraws all offers, reads what was claimed meanwhile, decides, and offers anew.
//!
//! **Form.** One word: the generation, and whether claims may be made; offers; and two tables of what is held, of which the generation's parity says which
//! one counts. Whoever claims writes the other one, then moves the word from its generation to the next; where the daemon was faster that fails, and nothing was claimed. The daemon moves on by
//! two, so that who is about to claim does not write what counts, and has readers wait meanwhile.
//!
//! **Trust.** The device process serves a guest that may be hostile, and can write the page as it likes. So the daemon and the pacers keep what they offered to themselves, and a claim beyond that
//! is none. The file is sealed against shrinking, or a reader would fault. For a hole in it a pacer would wait while that is made, and read
//! zeros: the device process's filter has no call that makes one (`sockets`, `seccomp.json`).

use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use ontime_plan::{Bandwidth, Nanos};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::published;

/// vCPUs that have a place in it.
pub const VCPUS: usize = 64;
/// Bytes of the file.
const SIZE: usize = 4096;
/// Of the word: claims may be made; the daemon writes what is held.
const OPEN: u64 = 1;
const BUSY: u64 = 2;
/// Above these, the generation.
const SHIFT: u32 = 2;
/// How often a reader tries that somebody claims beside.
const TRIES: usize = 3;

/// CPU time in each period, ns; both 0: none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Budget {
    /// CPU time within each period.
    pub budget: u64,
    /// The period.
    pub period: u64,
}

impl Budget {
    /// Whether it is within an offer: no more bandwidth, in no shorter period.
    pub fn fits(&self, offer: &Budget) -> bool {
        self.budget == 0
            || self.period >= offer.period
                && offer.period > 0
                && u128::from(self.budget) * u128::from(offer.period)
                    <= u128::from(offer.budget) * u128::from(self.period)
    }

    /// As bandwidth.
    pub fn bandwidth(&self) -> Bandwidth {
        Bandwidth::new(Nanos(self.budget), Nanos(self.period)).unwrap_or_default()
    }
}

/// By vCPU.
pub type Table = [Budget; VCPUS];

/// Nobody holds anything.
pub const NOTHING: Table = [Budget { budget: 0, period: 0 }; VCPUS];

#[derive(Debug, Default)]
#[repr(C)]
struct Cell {
    budget: AtomicU64,
    period: AtomicU64,
}

impl Cell {
    fn get(&self) -> Budget {
        Budget { budget: self.budget.load(Ordering::Relaxed), period: self.period.load(Ordering::Relaxed) }
    }

    fn set(&self, to: Budget) {
        self.budget.store(to.budget, Ordering::Relaxed);
        self.period.store(to.period, Ordering::Relaxed);
    }
}

#[repr(C)]
struct Words {
    word: AtomicU64,
    offers: [Cell; VCPUS],
    held: [[Cell; VCPUS]; 2],
}

const _: () = assert!(size_of::<Words>() <= SIZE && offset_of!(Words, word) == 0);

impl Words {
    fn held(&self, generation: u64) -> &[Cell; VCPUS] {
        let [even, odd] = &self.held;
        if generation & 1 == 0 { even } else { odd }
    }
}

/// See above.
#[derive(Debug, Clone)]
pub struct Ledger(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    file: OwnedFd,
    words: NonNull<Words>,
}

// SAFETY: `words` is a shared mapping of atomics that lives as long as `Inner`; it is never written but through them.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with this length and is used through `self` only. That it may fail is nobody's loss.
        let _ = unsafe { rustix::mm::munmap(self.words.as_ptr().cast(), SIZE) };
    }
}

/// The same page, not one with the same in it.
impl PartialEq for Ledger {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Ledger {}

impl Ledger {
    /// A new one, with nothing offered. For a device process, before it gives up its system calls.
    ///
    /// # Errors
    /// The kernel's.
    pub fn create() -> io::Result<Self> {
        let file = rustix::fs::memfd_create("ontime-ledger", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&file, SIZE as u64)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::map(file)
    }

    /// One that a device process made.
    ///
    /// # Errors
    /// A reader could fault on it for good: it may shrink, is too short, or of huge pages, of which there may be none any more; or it cannot be mapped.
    pub fn accept(file: OwnedFd) -> io::Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(&file)?;
        let size = rustix::fs::fstat(&file)?.st_size;
        if !seals.contains(SealFlags::SHRINK)
            || usize::try_from(size).unwrap_or(0) < SIZE
            || !published::is_tmpfs(&file)?
        {
            return Err(io::Error::other("its ledger is no memory file of a page that is sealed against shrinking"));
        }
        Self::map(file)
    }

    fn map(file: OwnedFd) -> io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // Populated: a pacer reads it.
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping, which overlaps nothing that exists.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), SIZE, prot, flags, &file, 0) }?;
        let words = NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self(Arc::new(Inner { file, words })))
    }

    /// For who is to [accept](Self::accept) it.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.0.file.as_fd()
    }

    fn words(&self) -> &Words {
        // SAFETY: mapped, page-aligned and at least that long until `Inner` goes; any bytes are valid atomics; the file cannot shrink.
        unsafe { self.0.words.as_ref() }
    }

    /// The generation of what is held now.
    pub fn generation(&self) -> u64 {
        self.words().word.load(Ordering::Acquire) >> SHIFT
    }

    /// Has `held` instead of what was held, if all of it is offered. Its generation; None: the daemon is to be asked. Of one thread at a time: the device process's.
    pub fn claim(&self, held: &Table) -> Option<u64> {
        let words = self.words();
        let seen = words.word.load(Ordering::Acquire);
        if seen & OPEN == 0 || !words.offers.iter().zip(held).all(|(offer, held)| held.fits(&offer.get())) {
            return None;
        }
        let next = (seen >> SHIFT) + 1;
        // Who reads the table that is written now, of the generation before the present one, sees that it is over.
        fence(Ordering::SeqCst);
        words.held(next).iter().zip(held).for_each(|(cell, held)| cell.set(*held));
        let to = next << SHIFT | OPEN;
        words.word.compare_exchange(seen, to, Ordering::AcqRel, Ordering::Relaxed).is_ok().then_some(next)
    }

    /// No claim is made any more; the generation up to which they were. The daemon's.
    pub fn withdraw(&self) -> u64 {
        self.words().word.fetch_and(!OPEN, Ordering::AcqRel) >> SHIFT
    }

    /// Offers this to who holds that, after [withdrawing](Self::withdraw) what was offered; its generation. The daemon's.
    pub fn offer(&self, offers: &Table, held: &Table) -> u64 {
        let words = self.words();
        let next = self.generation().wrapping_add(2) & (u64::MAX >> SHIFT);
        words.word.store(next << SHIFT | BUSY, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        words.offers.iter().zip(offers).for_each(|(cell, offer)| cell.set(*offer));
        words.held(next).iter().zip(held).for_each(|(cell, held)| cell.set(*held));
        words.word.store(next << SHIFT | OPEN, Ordering::Release);
        next
    }

    /// What all hold, of this generation. While nobody claims.
    pub fn table(&self, generation: u64) -> Table {
        let mut table = NOTHING;
        let held = self.words().held(generation);
        table.iter_mut().zip(held).for_each(|(to, cell)| *to = cell.get());
        table
    }

    /// What a vCPU holds, where that is of another generation than `seen`. On a pacer: no system call, nothing allocated.
    pub fn news(&self, vcpu: u32, seen: &mut u64) -> Option<Budget> {
        let words = self.words();
        let vcpu = usize::try_from(vcpu).ok()?;
        for _ in 0..TRIES {
            let word = words.word.load(Ordering::Acquire);
            let generation = word >> SHIFT;
            if generation == *seen || word & BUSY != 0 {
                return None;
            }
            let held = words.held(generation).get(vcpu)?.get();
            fence(Ordering::Acquire);
            let still = words.word.load(Ordering::Relaxed);
            if still >> SHIFT == generation && still & BUSY == 0 {
                *seen = generation;
                return Some(held);
            }
        }
        // Somebody claims faster than this reads: at the next look.
        None
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    const MS: u64 = 1_000_000;

    fn table(entries: &[(usize, u64, u64)]) -> Table {
        let mut table = NOTHING;
        entries.iter().for_each(|(vcpu, budget, period)| table[*vcpu] = Budget { budget: *budget, period: *period });
        table
    }

    #[test]
    fn what_is_offered_is_claimed_and_nothing_beyond() {
        let ledger = Ledger::create().unwrap();
        let own = table(&[(0, MS, 10 * MS)]);
        assert_eq!(ledger.claim(&own), None, "nothing is offered");
        let daemon = Ledger::accept(ledger.file().try_clone_to_owned().unwrap()).unwrap();
        let opened = daemon.offer(&table(&[(0, 5 * MS, 10 * MS), (1, MS, 20 * MS)]), &NOTHING);
        let (mut seen, mut other) = (0, 0);
        assert_eq!(daemon.news(0, &mut seen), Some(Budget::default()));
        assert_eq!(ledger.claim(&own), Some(opened + 1));
        assert_eq!(daemon.news(0, &mut seen), Some(own[0]));
        assert_eq!(daemon.news(0, &mut seen), None, "it is known");
        assert_eq!(daemon.news(64, &mut other), None);
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
        assert_eq!(daemon.news(1, &mut other).unwrap().budget, 5 * MS, "what was claimed stands");
        assert_eq!(daemon.offer(&own, &own), opened + 4);
        assert_eq!(ledger.claim(&NOTHING), Some(opened + 5));
    }

    #[test]
    fn a_file_that_may_shrink_or_is_short_is_none() {
        let memfd = |flags| rustix::fs::memfd_create("no-ledger", MemfdFlags::CLOEXEC | flags).unwrap();
        let unsealed = memfd(MemfdFlags::ALLOW_SEALING);
        rustix::fs::ftruncate(&unsealed, SIZE as u64).unwrap();
        assert!(Ledger::accept(unsealed).is_err());
        let short = memfd(MemfdFlags::ALLOW_SEALING);
        rustix::fs::fcntl_add_seals(&short, SealFlags::SHRINK).unwrap();
        assert!(Ledger::accept(short).is_err());
        assert!(Ledger::accept(std::fs::File::open("/dev/null").unwrap().into()).is_err());
    }

    /// One claims as fast as it can, the daemon withdraws and offers anew, a pacer reads: nobody sees half of a table, and what is withdrawn is the last that was claimed.
    #[test]
    fn claims_withdrawals_and_readings_at_once() {
        let ledger = Ledger::create().unwrap();
        let offers = table(&[(0, 1 << 40, 1 << 40), (63, 1 << 40, 1 << 40)]);
        let both = |number: u64| table(&[(0, number, (1 << 40) + number), (63, number, (1 << 40) + number)]);
        ledger.offer(&offers, &both(0));
        let end = AtomicBool::new(false);
        let last = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut number = 0;
                while !end.load(Ordering::Relaxed) {
                    if ledger.claim(&both(number + 1)).is_some() {
                        number += 1;
                        last.store(number, Ordering::Release);
                    }
                }
            });
            scope.spawn(|| {
                let (mut seen, mut newest) = (0, 0);
                while !end.load(Ordering::Relaxed) {
                    if let Some(held) = ledger.news(63, &mut seen) {
                        assert_eq!(held.period, (1 << 40) + held.budget, "torn");
                        assert!(held.budget >= newest, "it goes back");
                        newest = held.budget;
                    }
                }
            });
            for _ in 0..20_000 {
                let before = last.load(Ordering::Acquire);
                let generation = ledger.withdraw();
                let held = ledger.table(generation);
                assert_eq!(held[0], held[63]);
                assert_eq!(held[0].period, (1 << 40) + held[0].budget, "torn");
                assert!(held[0].budget >= before, "a claim was lost");
                ledger.offer(&offers, &held);
            }
            end.store(true, Ordering::Relaxed);
        });
        assert!(last.load(Ordering::Relaxed) > 0);
    }
}
