//! Back end `deadline`: the kernel's SCHED_DEADLINE.

use std::collections::BTreeMap;

use ontime_tenants::{Policy, ThreadId};

use crate::admit::{Reservations, Reserved};
use crate::model::{PacerError, Places, Snapshot, Use};
use crate::run::backend::Backend;

/// Back end `deadline`.
#[derive(Debug, Default)]
pub struct Deadline {
    /// CPU time of each thread when its reservation began, ns.
    had: BTreeMap<ThreadId, u64>,
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
            self.had.entry(vcpu.id).or_insert_with(|| vcpu.id.cpu_time().unwrap_or(0));
        }
        Ok(())
    }

    fn uses(&self) -> BTreeMap<ThreadId, Use> {
        let used = |(id, had): (&ThreadId, &u64)| {
            let ran = id.cpu_time().unwrap_or(0).saturating_sub(*had);
            (*id, Use { ran, ..Use::default() })
        };
        self.had.iter().map(used).collect()
    }

    fn show(&mut self) -> Option<Snapshot> {
        None
    }
}
