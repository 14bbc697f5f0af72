//! Words of the crate: kinds, places, counters, budgets, errors. They import nothing else of it.

mod budget;
mod error;
mod kind;
mod place;
mod snapshot;
mod thread;
mod usage;

pub use budget::{Budget, NOTHING, Table, VCPUS};
pub use error::PacerError;
pub use kind::{BackendKind, Beyond, Pacing};
pub use place::{Place, Places};
pub use snapshot::{Segment, Snapshot, VcpuState};
pub(crate) use thread::{Counts, NEVER, PROMPT, Threads};
pub use thread::{Next, Share};
pub(crate) use usage::Tally;
pub use usage::Use;
