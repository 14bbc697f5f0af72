//! CPU time reserved for vCPUs, and kept: declared in `/etc/ontime/sched.toml`, admitted exactly, enforced on any
//! kernel and VMM.
//!
//! In: the configuration, the tenants found, the CPUs that are online. Out: which vCPUs have a reservation and which
//! are refused and why ([`settle`]); vCPU threads kept to their shares by a [`Backend`]; what each had ([`Use`]).
//!
//! | file | |
//! |---|---|
//! | `config` | strict TOML |
//! | `guest` | what guests ask for by themselves, as a supply of the host (pure) |
//! | `published` | the next deadlines that guests publish, read without trusting them |
//! | `ledger` | what a guest may take without asking, and what it took: memory shared with its device process |
//! | `offer` | how much that is (pure) |
//! | `settle` | reservations of the VMs that run: who is admitted (pure; on `ontime_plan`) |
//! | `account` | one vCPU's account: its place, what is left of its share, its periods (pure) |
//! | `shares` | who is at which place until when: one of the next two (pure) |
//! | `ordered` | CPU by CPU, in the order of deadlines (pure) |
//! | `wrapped` | by the planner's slices, which all share (pure) |
//! | `show` | what pacers are doing, for people to see |
//! | `seat` | one vCPU thread: what it has used, and its change of place |
//! | `pacer` | the FIFO threads that do what `shares` says, and how they are told of changes |
//! | `ext` | the scheduler of back end `sched_ext`: in the kernel (`scheduler.bpf.c`), and its table from this side |
//! | `backend` | the back ends: `paced`, `dp-wrap`, `sched_ext`, `deadline` |

pub mod account;
pub mod backend;
pub mod config;
pub mod ext;
pub mod guest;
pub mod ledger;
pub mod offer;
pub mod ordered;
pub mod pacer;
pub mod published;
pub mod seat;
pub mod settle;
pub mod shares;
pub mod show;
#[cfg(test)]
mod sim;
pub mod wrapped;

pub use backend::{Backend, BackendKind, Use};
pub use config::{Beyond, Declared, SchedConfig};
pub use guest::{Ask, Asks, GuestNeed, Taking};
pub use ledger::Ledger;
pub use offer::Offer;
pub use published::{Page, Task};
pub use settle::{Held, Refused, Reserved, Settled, settle};
