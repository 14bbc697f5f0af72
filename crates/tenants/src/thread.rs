//! A thread's identity, and its policy read and set without ever touching a thread that took over its number.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A thread, named so that a reused number is noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ThreadId {
    /// Process (thread group) number.
    pub pid: i32,
    /// Thread number.
    pub tid: i32,
    /// Start time in clock ticks since boot (`/proc/PID/task/TID/stat`, field 22).
    pub start_time: u64,
}

/// Why a thread could not be read or placed.
#[derive(Debug, Error)]
pub enum ThreadError {
    /// The thread ended, or another took over its number.
    #[error("thread {0:?} has ended")]
    Gone(ThreadId),
    /// The kernel refused.
    #[error("thread {tid}: {what}: {source}")]
    Os {
        /// Thread number.
        tid: i32,
        /// What was tried.
        what: &'static str,
        /// The kernel's word.
        source: std::io::Error,
    },
}
