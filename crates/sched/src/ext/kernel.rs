//! The BPF scheduler: loaded with libbpf, ended by dropping its link.

use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};

use libbpf_rs::{Link, Map, MapCore, MapFlags, Object, ObjectBuilder, PrintLevel, set_print};
use ontime_tenants::ThreadId;

use crate::model::{Beyond, PacerError};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/scheduler.bpf.o"));
/// Where the kernel shows which scheduler runs.
const STATE: &str = "/sys/kernel/sched_ext";

/// The last message of libbpf, for error messages.
static SAID: Mutex<String> = Mutex::new(String::new());

fn listen(_: PrintLevel, line: String) {
    *SAID.lock().unwrap_or_else(PoisonError::into_inner) = line.trim().to_owned();
}

/// The loaded scheduler.
#[derive(Debug)]
pub(crate) struct Scheduler {
    // Dropped first: ends the scheduler before its maps go.
    _link: Link,
    object: Object,
}

fn failed(what: &str, error: &dyn std::fmt::Display) -> PacerError {
    let said = std::mem::take(&mut *SAID.lock().unwrap_or_else(PoisonError::into_inner));
    let said = if said.is_empty() { said } else { format!(" ({said})") };
    PacerError::Ext(format!(
        "{what}: {error}{said}; it takes Linux 7.1 or newer, CAP_SYS_ADMIN, and BTF that describes its functions; \
         else use backend = \"paced\""
    ))
}

impl Scheduler {
    /// # Errors
    /// [`PacerError::Ext`].
    pub(crate) fn load(beyond: Beyond) -> Result<Self, PacerError> {
        let state = std::fs::read_to_string(format!("{STATE}/state")).map_err(|error| {
            PacerError::Ext(format!(
                "{STATE}/state: {error}; this kernel has no sched_ext: boot \
                 Linux 7.1 or newer, or use backend = \"paced\""
            ))
        })?;
        if state.trim() != "disabled" {
            let other = std::fs::read_to_string(format!("{STATE}/root/ops")).unwrap_or_default();
            return Err(PacerError::Ext(format!(
                "another scheduler is loaded: {} is {}; end it, or use backend = \"paced\"",
                other.trim(),
                state.trim()
            )));
        }
        let before = set_print(Some((PrintLevel::Warn, listen)));
        let loaded = Self::try_load(beyond);
        set_print(before);
        loaded
    }

    fn try_load(beyond: Beyond) -> Result<Self, PacerError> {
        let mut open = ObjectBuilder::default().open_memory(OBJECT).map_err(|error| failed("opening it", &error))?;
        let weight: u64 = match beyond {
            Beyond::Idle => 3,
            Beyond::Other => 1024,
        };
        open.maps_mut()
            .find(|map| map.name().to_string_lossy().ends_with(".rodata"))
            .ok_or_else(|| failed("its constants", &"missing"))?
            .set_initial_value(&weight.to_ne_bytes())
            .map_err(|error| failed("its constants", &error))?;
        let mut object = open.load().map_err(|error| failed("loading it", &error))?;
        let mut operations = object.maps_mut().find(|map| map.name() == "ontime_ops");
        let operations = operations.as_mut().ok_or_else(|| failed("its operations", &"missing"))?;
        let link = operations.attach_struct_ops().map_err(|error| failed("starting it", &error))?;
        Ok(Self { _link: link, object })
    }

    fn map(&self, name: &str) -> Result<Map<'_>, PacerError> {
        self.object.maps().find(|map| map.name() == name).ok_or_else(|| failed(name, &"missing"))
    }

    /// The table of places, to be mapped.
    pub(crate) fn places(&self) -> Result<impl AsFd + use<'_>, PacerError> {
        self.map("places")
    }

    /// Gives an entry of the table to a thread.
    pub(crate) fn assign(&self, id: ThreadId, entry: usize) -> Result<(), PacerError> {
        let value = [(entry as u64).to_ne_bytes(), id.start_time.to_ne_bytes()].concat();
        let entries = self.map("entries")?;
        entries.update(&id.tid.to_ne_bytes(), &value, MapFlags::ANY).map_err(|error| failed("an entry", &error))
    }

    /// Takes a thread's entry back.
    pub(crate) fn remove(&self, id: ThreadId) {
        // If it is not there, there is nothing to do.
        let _ = self.map("entries").map(|entries| entries.delete(&id.tid.to_ne_bytes()));
    }

    /// Why the kernel has ended the scheduler, if it has.
    pub(crate) fn ended(&self) -> Option<String> {
        let said = self.map("fate").ok()?.lookup(&0u32.to_ne_bytes(), MapFlags::ANY).ok()??;
        let said = String::from_utf8_lossy(&said);
        let said = said.trim_end_matches('\0').trim();
        (!said.is_empty()).then(|| said.to_owned())
    }
}
