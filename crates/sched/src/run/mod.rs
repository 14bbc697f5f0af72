//! Enforcement: pacer threads, vCPU threads and the back ends that use them.
//!
//! | file | content |
//! |---|---|
//! | `reader` | the threads that read, for pacers, what other processes can make long |
//! | `guest` | reads what a vCPU's guest publishes and claims |
//! | `counters` | the kernel's counters of vCPU threads: two BPF programs |
//! | `files` | a vCPU thread's files in /proc, where there are no counters |
//! | `vcpu` | one vCPU thread: reads its CPU time and changes its place |
//! | `threads` | all vCPU threads of a schedule |
//! | `pacer` | the FIFO threads that enforce a schedule, and how the daemon gives them a new one |
//! | `backend` | what a back end does for the daemon |
//! | `paced` | back ends `paced`, `dp-wrap` and `sched_ext` |
//! | `deadline` | back end `deadline` |

mod backend;
mod counters;
mod deadline;
mod files;
mod guest;
mod paced;
mod pacer;
mod reader;
mod threads;
mod vcpu;

pub use backend::Backend;
pub use deadline::Deadline;
pub use paced::{Paced, Way};
