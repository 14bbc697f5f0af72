//! The reserved CPU time that vCPUs hold, stored for the next daemon in the run directory, because it is valid for this
//! boot only.
//!
//! Without this file a restarted daemon would admit VMs in the order of their start, on the CPUs that fit best. A VM
//! that held its reservation could lose it to a VM that was refused before, or lose its CPU. And what guests hold for
//! their deadline tasks could be given to other guests until the device processes have reported it again.
//!
//! The content is checked like any request: threads that have ended and VMs that are gone do not count. Unknown fields
//! of another version of Ontime are ignored: none changes the meaning of the others.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use ontime_plan::Nanos;
use ontime_sched::{Ask, Asks, GuestNeed, Held, Settled};
use ontime_sockets::deadlines::Need;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
struct Record {
    boot_id: String,
    vcpus: Vec<Held>,
    guests: BTreeMap<String, GuestRecord>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct GuestRecord {
    needs: Vec<Need>,
    published: bool,
}

/// The file and its content.
#[derive(Debug)]
pub(super) struct Memory {
    path: PathBuf,
    written: Record,
}

impl Memory {
    /// Reads what an earlier daemon of this boot has stored, if possible.
    pub(super) fn open(path: PathBuf, boot_id: &str) -> Self {
        let read = match std::fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map_err(io::Error::from),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Record::default()),
            Err(error) => Err(error),
        };
        let written = read.unwrap_or_else(|error| {
            tracing::warn!(
                "{}: which vCPUs had reserved CPU time is not known: {error}; they are admitted anew, \
                 nothing is to be done",
                path.display()
            );
            Record::default()
        });
        let written = if written.boot_id == boot_id { written } else { Record::default() };
        Self { path, written: Record { boot_id: boot_id.to_owned(), ..written } }
    }

    /// The vCPUs that held reservations, and their CPUs.
    pub(super) fn held(&self) -> Settled {
        Settled::remembered(&self.written.vcpus)
    }

    /// What guests held in addition.
    pub(super) fn asks(&self) -> Asks {
        let need = |need: &Need| GuestNeed { vcpu: need.vcpu, budget: Nanos(need.budget), period: Nanos(need.period) };
        let ask = |guest: &GuestRecord| Ask {
            needs: guest.needs.iter().map(need).collect(),
            page: None,
            published: guest.published,
            taking: None,
        };
        self.written.guests.iter().map(|(vm, guest)| (vm.clone(), ask(guest))).collect()
    }

    /// Stores this.
    ///
    /// # Errors
    /// The kernel's error; then the former content stays.
    pub(super) fn keep(&mut self, settled: &Settled, asks: &Asks) -> io::Result<()> {
        let need = |need: &GuestNeed| Need { vcpu: need.vcpu, budget: need.budget.0, period: need.period.0 };
        let guest = |ask: &Ask| GuestRecord { needs: ask.needs.iter().map(need).collect(), published: ask.published };
        let record = Record {
            boot_id: self.written.boot_id.clone(),
            vcpus: settled.held(),
            guests: asks.iter().map(|(vm, ask)| (vm.clone(), guest(ask))).collect(),
        };
        if record == self.written {
            return Ok(());
        }
        write(&self.path, &serde_json::to_vec(&record)?)?;
        self.written = record;
        Ok(())
    }

    /// Whether the stored content is at least this. Then a lower need of a guest need not be written at once; the next
    /// pass does it.
    pub(super) fn covers(&self, settled: &Settled, asks: &Asks) -> bool {
        let covered = |need: &GuestNeed, kept: &Need| {
            kept.vcpu == need.vcpu
                && need.period.0 >= kept.period
                && u128::from(need.budget.0) * u128::from(kept.period)
                    <= u128::from(kept.budget) * u128::from(need.period.0)
        };
        let knows = |vm: &String, ask: &Ask| match self.written.guests.get(vm) {
            Some(kept) => {
                kept.published == ask.published
                    && ask.needs.iter().all(|need| kept.needs.iter().any(|kept| covered(need, kept)))
            }
            None => ask.needs.is_empty(),
        };
        settled.held() == self.written.vcpus && asks.iter().all(|(vm, ask)| knows(vm, ask))
    }
}

/// Replaces the file atomically. It is valid for this boot only, so it need not be synced to a disk.
pub(super) fn write(path: &Path, text: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    std::fs::write(&new, text)?;
    std::fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_of_this_boot_and_damage_is_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("reservations");
        let id = ontime_tenants::ThreadId { pid: 1, tid: 2, start_time: 3 };
        let settled = Settled::remembered(&[Held { id, cpu: Some(5) }]);
        let asks = |budget: u64| {
            let needs = vec![GuestNeed { vcpu: 0, budget: Nanos(budget), period: Nanos(20_000) }];
            Asks::from([("a".to_owned(), Ask { needs, page: None, published: true, taking: None })])
        };
        let mut memory = Memory::open(path.clone(), "boot");
        assert!(memory.covers(&Settled::default(), &Asks::new()) && !memory.covers(&settled, &Asks::new()));
        memory.keep(&settled, &asks(2_000)).unwrap();
        assert!(memory.covers(&settled, &asks(1_000)) && !memory.covers(&settled, &asks(2_001)));
        let next = Memory::open(path.clone(), "boot");
        assert_eq!((next.held().held(), next.asks()), (settled.held(), asks(2_000)));
        assert!(Memory::open(path.clone(), "another").asks().is_empty());
        // As a later version may write it.
        let mut later = std::fs::read_to_string(&path).unwrap();
        for (field, more) in [
            ("{\"boot_id\"", "{\"written_by\":\"9.0\",\"boot_id\""),
            ("\"cpu\"", "\"node\":0,\"cpu\""),
            ("\"vcpu\"", "\"slack\":1,\"vcpu\""),
            ("\"published\"", "\"since\":\"now\",\"published\""),
        ] {
            assert!(later.contains(field), "{later}");
            later = later.replacen(field, more, 1);
        }
        std::fs::write(&path, later).unwrap();
        let older = Memory::open(path.clone(), "boot");
        assert_eq!((older.held().held(), older.asks()), (settled.held(), asks(2_000)));
        std::fs::write(&path, "{").unwrap();
        assert_eq!(Memory::open(path, "boot").held(), Settled::default());
    }
}
