//! Device processes (`ontime device --vm NAME`), and the VM that each was found to serve.
//!
//! Who serves a VM is under the VM's runtime cap. Such a process is as hostile as its guest once that has taken it
//! over, and may write what it likes where its command line is read from. So it is believed once: whoever was found to
//! serve a VM does so until it ends. Of a process that is seen for the first time, by a daemon that was restarted, the
//! unit that it is in (`ontime-device@NAME.service`) counts first, for a process cannot leave its cgroup by itself.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use crate::thread::ThreadId;

/// The VM that a process serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Served {
    /// The VM's name.
    pub(crate) vm: String,
    /// The user whose VMs the process may serve; `None` for the system's device processes, which may serve any.
    pub(crate) user: Option<u32>,
}

/// Whom processes were found to serve, by their main threads.
#[derive(Debug, Default)]
pub struct Devices {
    known: Mutex<BTreeMap<ThreadId, Served>>,
}

impl Devices {
    /// It was found to serve this VM; counts the first time.
    pub(crate) fn note(&self, process: ThreadId, served: Served) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.entry(process).or_insert(served);
    }

    /// All that were found, and whom they serve.
    pub(crate) fn known(&self) -> Vec<(ThreadId, Served)> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.iter().map(|(process, served)| (*process, served.clone())).collect()
    }

    /// It has ended.
    pub(crate) fn forget(&self, process: ThreadId) {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).remove(&process);
    }
}

/// The VM that a process serves by its unit.
pub(crate) fn by_unit(cgroup: &str) -> Option<&str> {
    cgroup.split('/').find_map(|part| part.strip_prefix("ontime-device@")?.strip_suffix(".service"))
}
