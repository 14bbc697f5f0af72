//! Scheduling policies: which vCPU is at which place, and until when. Pure: readings of the threads' counters and of
//! the clock come in, changes of place go out ([`crate::model::Threads`]). Nothing is allocated after a schedule is
//! made.
//!
//! | file | content |
//! |---|---|
//! | `account` | one vCPU's account: its place, what is left of its share, its periods |
//! | `edf` | each CPU by itself, by the earliest deadline first |
//! | `slices` | all CPUs together, by the planner's slices (DP-WRAP) |
//! | `schedule` | the choice between the two |

mod account;
mod edf;
mod schedule;
mod slices;

pub use schedule::Planning;
pub(crate) use schedule::Schedule;
