//! Device processes (`ontime device --vm NAME`) and the VM that each one serves.
//!
//! The process that serves a VM is under the VM's runtime cap. A guest that has taken over such a process may make it
//! overwrite its own command line. So the mapping is determined once and stays until the process ends. For a process
//! that is seen for the first time after a restart of the daemon, its unit (`ontime-device@NAME.service`) counts first,
//! because a process cannot leave its cgroup by itself.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use crate::thread::ThreadId;

/// The VM that a process serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Served {
    /// The VM's name.
    pub(crate) vm: String,
    /// The user whose VMs the process may serve. `None`: a device process of the system, which may serve any VM.
    pub(crate) user: Option<u32>,
}

/// The VM of each known device process, by the process's main thread.
#[derive(Debug, Default)]
pub struct Devices {
    known: Mutex<BTreeMap<ThreadId, Served>>,
}

impl Devices {
    /// Records that a process serves this VM. Only the first call for a process counts.
    pub(crate) fn note(&self, process: ThreadId, served: Served) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.entry(process).or_insert(served);
    }

    /// All known device processes with their VMs.
    pub(crate) fn known(&self) -> Vec<(ThreadId, Served)> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.iter().map(|(process, served)| (*process, served.clone())).collect()
    }

    /// Forgets a process that has ended.
    pub(crate) fn forget(&self, process: ThreadId) {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).remove(&process);
    }
}

/// The VM in the name of a process's unit.
pub(crate) fn by_unit(cgroup: &str) -> Option<&str> {
    cgroup.split('/').find_map(|part| part.strip_prefix("ontime-device@")?.strip_suffix(".service"))
}
