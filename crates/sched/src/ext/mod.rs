//! The scheduler of back end `sched_ext`, from user space: a table of places, with an entry for each vCPU.
//!
//! A change of place is a store into memory that the BPF scheduler (`scheduler.bpf.c`) reads when it next chooses a
//! thread for the vCPU's CPU. The pacer of that CPU causes that choice by having run. No system call, no allocation.
//!
//! While the scheduler is loaded, it runs all threads of SCHED_OTHER, SCHED_BATCH and SCHED_IDLE, so that vCPUs can be
//! ahead of them. It stays loaded while this process holds it: when the process ends in any way, the kernel moves all
//! threads back to its own scheduler.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ontime_tenants::{ThreadId, remedy};
use rustix::mm::{MapFlags, ProtFlags};

use crate::admit::Reservations;
use crate::model::{Beyond, PacerError, Place};

#[cfg(feature = "sched-ext")]
#[path = "kernel.rs"]
mod kernel;
#[cfg(not(feature = "sched-ext"))]
#[path = "absent.rs"]
mod kernel;

use kernel::Scheduler;

/// Whether the scheduler is built in.
pub const BUILT_IN: bool = cfg!(feature = "sched-ext");
/// The most vCPUs that can have an entry; the same as in scheduler.bpf.c.
const ENTRIES: usize = 128;

/// The places of all vCPUs, in memory shared with the BPF scheduler.
#[derive(Debug)]
struct Table(NonNull<AtomicU64>);

// SAFETY: memory of atomics, which only its owner unmaps, when dropped.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

impl Table {
    const BYTES: usize = ENTRIES * size_of::<u64>();

    fn map(places: impl AsFd) -> std::io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), Self::BYTES, access, MapFlags::SHARED, places, 0) }?;
        NonNull::new(at.cast()).map(Self).ok_or_else(|| std::io::ErrorKind::InvalidData.into())
    }

    fn place(&self, index: usize) -> Option<&AtomicU64> {
        // SAFETY: ENTRIES of them are mapped as long as the table lives, with the alignment of a page.
        let all = unsafe { std::slice::from_raw_parts(self.0.as_ptr(), ENTRIES) };
        all.get(index)
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `map`; no reference into it is left.
        let _ = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), Self::BYTES) };
    }
}

/// A vCPU's entry in the table.
#[derive(Debug, Clone)]
pub struct TableEntry {
    table: Arc<Table>,
    index: usize,
}

impl TableEntry {
    /// Sets the vCPU's place, for the next time that its CPU chooses a thread.
    pub fn place(&self, place: Place) {
        let place = match place {
            Place::Beyond => 0,
            Place::Entitled => 1,
            Place::Planned => 2,
        };
        if let Some(cell) = self.table.place(self.index) {
            cell.store(place, Ordering::Release);
        }
    }
}

/// The loaded scheduler, and the entries of vCPUs.
#[derive(Debug)]
pub struct Ext {
    scheduler: Scheduler,
    table: Arc<Table>,
    entries: BTreeMap<ThreadId, usize>,
}

impl Ext {
    /// Loads and starts the scheduler.
    ///
    /// # Errors
    /// [`PacerError::Ext`] if it is not built in, the kernel does not accept it, or another one is loaded.
    pub fn start(beyond: Beyond) -> Result<Self, PacerError> {
        let scheduler = Scheduler::load(beyond)?;
        let table = Table::map(scheduler.places()?)
            .map_err(|error| PacerError::Ext(format!("mapping its table: {error}; {}", remedy(&error))))?;
        Ok(Self { scheduler, table: Arc::new(table), entries: BTreeMap::new() })
    }

    /// Gives an entry to each vCPU that has none.
    ///
    /// # Errors
    /// [`PacerError::Ext`] if a vCPU may run on several CPUs, there are more than `ENTRIES`, or the kernel has ended
    /// the scheduler.
    pub fn assign(&mut self, reservations: &Reservations) -> Result<(), PacerError> {
        self.check()?;
        check_pinned(reservations)?;
        for vcpu in &reservations.vcpus {
            if self.entries.contains_key(&vcpu.id) {
                continue;
            }
            let free = (0..ENTRIES).find(|index| !self.entries.values().any(|taken| taken == index));
            let Some(index) = free else {
                return Err(PacerError::Ext(format!("it takes no more than {ENTRIES} vCPUs; use backend = \"paced\"")));
            };
            TableEntry { table: Arc::clone(&self.table), index }.place(Place::Beyond);
            self.scheduler.assign(vcpu.id, index)?;
            self.entries.insert(vcpu.id, index);
        }
        Ok(())
    }

    /// Takes back the entries of all other vCPUs.
    pub(crate) fn release_others(&mut self, reservations: &Reservations) {
        self.entries.retain(|id, _| {
            let stays = reservations.vcpus.iter().any(|vcpu| vcpu.id == *id);
            if !stays {
                self.scheduler.remove(*id);
            }
            stays
        });
    }

    /// A vCPU's entry.
    pub fn entry(&self, id: ThreadId) -> Option<TableEntry> {
        let index = *self.entries.get(&id)?;
        Some(TableEntry { table: Arc::clone(&self.table), index })
    }

    /// Checks that the scheduler still runs.
    ///
    /// # Errors
    /// [`PacerError::Ext`] with the reason, if the kernel has ended the scheduler.
    pub fn check(&self) -> Result<(), PacerError> {
        self.scheduler.ended().map_or(Ok(()), |why| {
            Err(PacerError::Ext(format!(
                "the kernel has ended the scheduler: {why}; report it (`ontime report` \
                 collects what is needed), or use backend = \"paced\""
            )))
        })
    }
}

/// The scheduler takes each vCPU to be pinned to one CPU. The CPUs for reservations may be fewer than the host's, and a
/// home CPU pins no vCPU.
fn check_pinned(reservations: &Reservations) -> Result<(), PacerError> {
    let free = reservations.vcpus.iter().find(|vcpu| !vcpu.pinned);
    free.map_or(Ok(()), |vcpu| {
        Err(PacerError::Ext(format!(
            "vCPU {} of {} may run on several CPUs; pin it to one (libvirt: vcpupin), or use backend = \"paced\"",
            vcpu.vcpu, vcpu.tenant
        )))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::{MS, reservations};

    #[test]
    fn vcpus_that_may_run_on_several_cpus_are_refused_also_with_a_home() {
        let mut reservations = reservations(2, 50_000, &[(MS, 10 * MS); 2], true).unwrap();
        check_pinned(&reservations).unwrap();
        reservations.vcpus[1].pinned = false;
        assert!(reservations.vcpus[1].home.is_some());
        let error = check_pinned(&reservations).unwrap_err().to_string();
        assert!(error.contains("vCPU 1 of vm may run on several CPUs") && error.contains("vcpupin"), "{error}");
    }

    #[test]
    fn places_are_where_the_scheduler_reads_them() {
        let file = rustix::fs::memfd_create("places", rustix::fs::MemfdFlags::empty()).unwrap();
        rustix::fs::ftruncate(&file, Table::BYTES as u64).unwrap();
        let table = Arc::new(Table::map(&file).unwrap());
        let entry = |index| TableEntry { table: Arc::clone(&table), index };
        entry(ENTRIES - 1).place(Place::Planned);
        entry(3).place(Place::Entitled);
        entry(ENTRIES).place(Place::Planned);
        let mut read = [1; Table::BYTES];
        rustix::io::pread(&file, &mut read, 0).unwrap();
        let places: Vec<u64> = read.chunks_exact(8).map(|cell| u64::from_ne_bytes(cell.try_into().unwrap())).collect();
        let wanted = |index| u64::from(index == 3) + 2 * u64::from(index == ENTRIES - 1);
        assert_eq!(places, (0..ENTRIES).map(wanted).collect::<Vec<_>>());
        entry(3).place(Place::Beyond);
        assert_eq!(table.place(3).unwrap().load(Ordering::Relaxed), 0);
    }

    #[test]
    #[cfg(not(feature = "sched-ext"))]
    fn where_it_is_not_built_in_the_remedy_is_named() {
        let error = Ext::start(Beyond::Idle).unwrap_err().to_string();
        assert!(error.contains("--features sched-ext") && error.contains("\"paced\""), "{error}");
    }
}
