//! What `daemon.toml` needs of the daemon's runtime caps.
#![allow(dead_code, reason = "the targets use a part of these files")]

use std::time::Duration;

use ontime_tenants::Policy;

#[path = "../../ontime/src/daemon/cap/account.rs"]
pub mod account;

pub use account::Share;

/// As `daemon::cap::Settings`.
pub struct Settings {
    /// The period of caps.
    pub period: Duration,
    /// The most of one CPU.
    pub cpu_share: Share,
    /// The watcher's priority.
    pub watcher: Policy,
    /// The most threads.
    pub capacity: usize,
    /// What they take.
    pub descriptors: usize,
}
