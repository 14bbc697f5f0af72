//! Back end `deadline`: the kernel's SCHED_DEADLINE.

use std::cell::Cell;
use std::collections::BTreeMap;

use ontime_tenants::{Policy, ThreadId};

use crate::admit::{Reservations, Reserved};
use crate::model::{PacerError, Places, Snapshot, Use};
use crate::run::backend::Backend;

/// Back end `deadline`.
#[derive(Debug, Default)]
pub struct Deadline {
    /// By thread with a reservation.
    had: BTreeMap<ThreadId, Ran>,
}

/// CPU time of a thread since its reservation began.
#[derive(Debug, Default)]
struct Ran {
    /// The thread's CPU time at the first reading, ns.
    from: Cell<Option<u64>>,
    /// CPU time since then, at the last reading, ns.
    ran: Cell<u64>,
}

impl Ran {
    /// Takes a reading of the thread's whole CPU time. Where the kernel did not tell it, the former value stays: a
    /// counter that went back to 0 would count the whole time again at the next reading.
    fn read(&self, whole: Option<u64>) -> u64 {
        if let Some(whole) = whole {
            let from = self.from.get().unwrap_or(whole);
            self.from.set(Some(from));
            self.ran.set(whole.saturating_sub(from));
        }
        self.ran.get()
    }
}

impl Backend for Deadline {
    fn place(&self, reserved: &Reserved) -> Policy {
        Policy::Deadline { runtime: reserved.budget.0, deadline: reserved.period.0, period: reserved.period.0 }
    }

    fn places(&self) -> Option<Places> {
        None
    }

    fn release(&mut self, reservations: &Reservations) -> Result<(), PacerError> {
        self.had.retain(|id, _| reservations.vcpus.iter().any(|vcpu| vcpu.id == *id));
        Ok(())
    }

    fn set(&mut self, reservations: &Reservations) -> Result<(), PacerError> {
        self.release(reservations)?;
        for vcpu in &reservations.vcpus {
            self.had.entry(vcpu.id).or_default().read(vcpu.id.cpu_time().ok());
        }
        Ok(())
    }

    fn uses(&self) -> BTreeMap<ThreadId, Use> {
        let used = |(id, had): (&ThreadId, &Ran)| (*id, Use { ran: had.read(id.cpu_time().ok()), ..Use::default() });
        self.had.iter().map(used).collect()
    }

    fn show(&mut self) -> Option<Snapshot> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_that_cannot_be_read_is_neither_nothing_nor_counted_twice() {
        let ran = Ran::default();
        assert_eq!(ran.read(None), 0);
        // The time before the first reading does not belong to the reservation.
        assert_eq!(ran.read(Some(80_000)), 0);
        assert_eq!(ran.read(Some(83_500)), 3_500);
        assert_eq!(ran.read(None), 3_500);
        assert_eq!(ran.read(Some(84_000)), 4_000);
    }
}
