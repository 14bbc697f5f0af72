//! The scheduler of back end `sched_ext`, from this side: a table of places, one for each vCPU that has a seat.
//!
//! A change of place is a store into memory that the scheduler reads (`scheduler.bpf.c`) when it next looks for
//! somebody to run on the vCPU's CPU; the pacer of that CPU makes it do so by having run. No system call, no
//! allocation.
//!
//! All threads of SCHED_OTHER, SCHED_BATCH and SCHED_IDLE are the scheduler's while it is loaded, so that vCPUs can
//! stand ahead of them. It is as long as this process holds it: when the process ends, however it does, the kernel puts
//! everybody back into its own.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ontime_tenants::{ThreadId, remedy};
use rustix::mm::{MapFlags, ProtFlags};

use crate::account::Place;
use crate::config::Beyond;
use crate::pacer::PacerError;
use crate::settle::Settled;

#[cfg(feature = "sched-ext")]
#[path = "kernel.rs"]
mod kernel;
#[cfg(not(feature = "sched-ext"))]
#[path = "absent.rs"]
mod kernel;

use kernel::Scheduler;

/// Whether there is a scheduler to load.
pub const BUILT_IN: bool = cfg!(feature = "sched-ext");
/// vCPUs that may have a seat; scheduler.bpf.c has the same.
const SEATS: usize = 128;

/// The places of all seats, in memory that the kernel's scheduler reads.
#[derive(Debug)]
struct Table(NonNull<AtomicU64>);

// SAFETY: it is memory of atomics, unmapped by its one owner's drop.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

impl Table {
    const BYTES: usize = SEATS * size_of::<u64>();

    fn map(places: impl AsFd) -> std::io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), Self::BYTES, access, MapFlags::SHARED, places, 0) }?;
        NonNull::new(at.cast()).map(Self).ok_or_else(|| std::io::ErrorKind::InvalidData.into())
    }

    fn place(&self, seat: usize) -> Option<&AtomicU64> {
        // SAFETY: SEATS of them are mapped as long as the table lives, and aligned as a page is.
        let all = unsafe { std::slice::from_raw_parts(self.0.as_ptr(), SEATS) };
        all.get(seat)
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `map`, which nobody has a reference into any more.
        let _ = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), Self::BYTES) };
    }
}

/// A vCPU's seat.
#[derive(Debug, Clone)]
pub struct Slot {
    table: Arc<Table>,
    seat: usize,
}

impl Slot {
    /// Gives it a place, from when its CPU next looks for somebody.
    pub fn place(&self, place: Place) {
        let place = match place {
            Place::Beyond => 0,
            Place::Entitled => 1,
            Place::Planned => 2,
        };
        if let Some(cell) = self.table.place(self.seat) {
            cell.store(place, Ordering::Release);
        }
    }
}

/// The scheduler, loaded and in force, and who has a seat.
#[derive(Debug)]
pub struct Ext {
    scheduler: Scheduler,
    table: Arc<Table>,
    seats: BTreeMap<ThreadId, usize>,
}

impl Ext {
    /// Loads it.
    ///
    /// # Errors
    /// [`PacerError::Ext`] where it is not built in, the kernel cannot take it, or another one is loaded.
    pub fn start(beyond: Beyond) -> Result<Self, PacerError> {
        let scheduler = Scheduler::load(beyond)?;
        let table = Table::map(scheduler.places()?)
            .map_err(|error| PacerError::Ext(format!("mapping its table: {error}; {}", remedy(&error))))?;
        Ok(Self { scheduler, table: Arc::new(table), seats: BTreeMap::new() })
    }

    /// Gives everybody a seat who has none.
    ///
    /// # Errors
    /// [`PacerError::Ext`] where a vCPU may go from CPU to CPU, there are more than [`SEATS`], or the kernel has ended
    /// the scheduler.
    pub fn seat(&mut self, settled: &Settled) -> Result<(), PacerError> {
        self.stands()?;
        if settled.cpus.len() > 1 {
            if let Some(vcpu) = settled.vcpus.iter().find(|vcpu| vcpu.home.is_none()) {
                return Err(PacerError::Ext(format!(
                    "vCPU {} of {} may run on several CPUs; pin it to one (libvirt: vcpupin), or use backend \
                     = \"paced\"",
                    vcpu.vcpu, vcpu.tenant
                )));
            }
        }
        for vcpu in &settled.vcpus {
            if self.seats.contains_key(&vcpu.id) {
                continue;
            }
            let free = (0..SEATS).find(|seat| !self.seats.values().any(|taken| taken == seat));
            let Some(seat) = free else {
                return Err(PacerError::Ext(format!("it takes no more than {SEATS} vCPUs; use backend = \"paced\"")));
            };
            Slot { table: Arc::clone(&self.table), seat }.place(Place::Beyond);
            self.scheduler.seat(vcpu.id, seat)?;
            self.seats.insert(vcpu.id, seat);
        }
        Ok(())
    }

    /// Takes the seats of all others back.
    pub fn unseat_others(&mut self, settled: &Settled) {
        self.seats.retain(|id, _| {
            let stays = settled.vcpus.iter().any(|vcpu| vcpu.id == *id);
            if !stays {
                self.scheduler.unseat(*id);
            }
            stays
        });
    }

    /// The seat of one that has one.
    pub fn slot(&self, id: ThreadId) -> Option<Slot> {
        let seat = *self.seats.get(&id)?;
        Some(Slot { table: Arc::clone(&self.table), seat })
    }

    /// # Errors
    /// [`PacerError::Ext`] where the kernel has ended the scheduler; why.
    pub fn stands(&self) -> Result<(), PacerError> {
        self.scheduler.ended().map_or(Ok(()), |why| {
            Err(PacerError::Ext(format!(
                "the kernel has ended the scheduler: {why}; report it (`ontime report` \
                 collects what is needed), or use backend = \"paced\""
            )))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_where_the_scheduler_reads_them() {
        let file = rustix::fs::memfd_create("places", rustix::fs::MemfdFlags::empty()).unwrap();
        rustix::fs::ftruncate(&file, Table::BYTES as u64).unwrap();
        let table = Arc::new(Table::map(&file).unwrap());
        let slot = |seat| Slot { table: Arc::clone(&table), seat };
        slot(SEATS - 1).place(Place::Planned);
        slot(3).place(Place::Entitled);
        slot(SEATS).place(Place::Planned);
        let mut read = [1; Table::BYTES];
        rustix::io::pread(&file, &mut read, 0).unwrap();
        let places: Vec<u64> = read.chunks_exact(8).map(|cell| u64::from_ne_bytes(cell.try_into().unwrap())).collect();
        let wanted = |seat| u64::from(seat == 3) + 2 * u64::from(seat == SEATS - 1);
        assert_eq!(places, (0..SEATS).map(wanted).collect::<Vec<_>>());
        slot(3).place(Place::Beyond);
        assert_eq!(table.place(3).unwrap().load(Ordering::Relaxed), 0);
    }

    #[test]
    #[cfg(not(feature = "sched-ext"))]
    fn where_it_is_not_built_in_the_remedy_is_named() {
        let error = Ext::start(Beyond::Idle).unwrap_err().to_string();
        assert!(error.contains("--features sched-ext") && error.contains("\"paced\""), "{error}");
    }
}
