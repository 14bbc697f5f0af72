//! CPU time reserved for vCPUs: declared in `/etc/ontime/sched.toml`, admitted exactly, enforced on any kernel and VMM.
//!
//! In: the configuration, the tenants found, the CPUs online. Out: which vCPUs have a reservation, and which VMs are
//! refused and why ([`settle`]); vCPU threads that a [`Backend`] keeps to their shares; the CPU time that each used
//! ([`Use`]).
//!
//! | file | content |
//! |---|---|
//! | `model` | the crate's words: kinds, places, counters, budgets, errors |
//! | `lease` | reservations that programs requested from the daemon |
//! | `beside` | what is kept of the CPUs beside reservations |
//! | `config` | strict TOML |
//! | `memory_file` | which files a pacer can read without waiting for another process |
//! | `guest_page` | the next deadlines that guests publish, read without trusting them |
//! | `ledger` | a guest's offers and claims of bandwidth, in memory shared with its device process |
//! | `admit` | which reservations hold, and how much more guests may claim (pure; uses `ontime_plan`) |
//! | `policy` | which vCPU is at which place, and until when (pure) |
//! | `ext` | the scheduler of back end `sched_ext`: its BPF program (`scheduler.bpf.c`), and its table in user space |
//! | `run` | the FIFO threads that enforce the plan of `policy`; the back ends |
//!
//! A module imports only modules above it in this table. The small modules below give other crates their paths.

#![cfg_attr(not(test), warn(unreachable_pub))]

mod admit;
mod beside;
mod config;
pub mod ext;
#[cfg(test)]
mod families;
mod guest_page;
mod lease;
pub mod ledger;
mod memory_file;
mod model;
mod policy;
mod run;
#[cfg(test)]
mod sim;

pub use admit::{
    Ask, Asks, Capacity, GuestNeed, Held, LeaseState, Offer, Refused, Reservations as Settled, Reserved, Taking,
    admit as settle, fit_beside, pacers_of_declared,
};
pub use beside::{Beside, WATCHER_PPM};
pub use config::{Declared, PERIODS, SchedConfig};
pub use guest_page::{Page, Task};
pub use lease::Lease;
pub use ledger::Ledger;
pub use model::{BackendKind, Beyond, PacerError, Pacing, Use};
pub use run::Backend;

/// What a vCPU is entitled to, and its place among the host's threads.
pub mod account {
    pub use crate::model::{Place, Share};
}

/// The back ends.
pub mod backend {
    pub use crate::run::{Deadline, Paced, Way};
}

/// What guests request.
pub mod guest {
    pub use crate::admit::needs;
}

/// The next deadlines that guests publish.
pub mod published {
    pub use crate::guest_page::{ENTRIES, Follow, LINE, tasks};
    pub use crate::memory_file::{close_elsewhere, is_memory};
    pub use crate::model::Next;
}

/// The policies of the places.
pub mod places {
    pub use crate::model::Places;
}

/// How vCPUs are planned.
pub mod shares {
    pub use crate::policy::Planning;
}

/// Snapshots of the pacers' state.
pub mod show {
    pub use crate::model::{Segment, Snapshot, VcpuState};
}
