//! CPU time reserved for vCPUs: declared in `/etc/ontime/sched.toml`, admitted exactly, enforced on any kernel and VMM.
//!
//! In: the configuration, the tenants found, the CPUs online. Out: which vCPUs have a reservation, and which VMs are
//! refused and why ([`settle`]); vCPU threads that a [`Backend`] keeps to their shares; the CPU time that each used
//! ([`Use`]).
//!
//! | file | content |
//! |---|---|
//! | `model` | the crate's words: kinds, places, counters, budgets, errors |
//! | `config` | strict TOML |
//! | `memory_file` | which files a pacer can read without waiting for another process |
//! | `guest_page` | the next deadlines that guests publish, read without trusting them |
//! | `ledger` | a guest's offers and claims of bandwidth, in memory shared with its device process |
//! | `admit` | which reservations hold, and how much more guests may claim (pure; uses `ontime_plan`) |
//! | `policy` | which vCPU is at which place, and until when (pure) |
//! | `seat` | one vCPU thread: reads its CPU time and changes its place |
//! | `pacer` | the FIFO threads that enforce the plan of `policy`, and how the daemon gives them a new one |
//! | `ext` | the scheduler of back end `sched_ext`: its BPF program (`scheduler.bpf.c`), and its table in user space |
//! | `backend` | the back ends: `paced`, `dp-wrap`, `sched_ext`, `deadline` |

mod admit;
pub mod backend;
mod config;
pub mod ext;
mod guest_page;
pub mod ledger;
mod memory_file;
mod model;
mod pacer;
mod policy;
pub mod seat;
#[cfg(test)]
mod sim;

pub use admit::{Ask, Asks, GuestNeed, Held, Offer, Refused, Reserved, Settled, Taking, settle};
pub use backend::Backend;
pub use config::{Declared, SchedConfig};
pub use guest_page::{Page, Task};
pub use ledger::Ledger;
pub use model::{BackendKind, Beyond, Use};

/// What a vCPU is entitled to, and its place among the host's threads.
pub mod account {
    pub use crate::model::{Place, Share};
}

/// What guests request.
pub mod guest {
    pub use crate::admit::needs;
}

/// The next deadlines that guests publish.
pub mod published {
    pub use crate::guest_page::{ENTRIES, Follow, LINE, tasks};
    pub use crate::memory_file::is_memory;
}

/// How vCPUs are planned.
pub mod shares {
    pub use crate::policy::Planning;
}

/// Snapshots of the pacers' state.
pub mod show {
    pub use crate::model::{Planned, Snapshot, Standing};
}
