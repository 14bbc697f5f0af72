//! The parts of the daemon's runtime caps that `daemon.toml` needs.
#![allow(dead_code, reason = "the targets use a part of these files")]

use std::time::Duration;

use ontime_tenants::Policy;

#[path = "../../ontime/src/daemon/cap/account.rs"]
pub(crate) mod account;

pub(crate) use account::Share;

/// A copy of `daemon::cap::Settings`.
pub(crate) struct Settings {
    /// The caps' period.
    pub period: Duration,
    /// The greatest share of one CPU.
    pub cpu_share: Share,
    /// The watcher's priority.
    pub watcher: Policy,
    /// Most threads.
    pub capacity: usize,
    /// Number of file descriptors for them.
    pub descriptors: usize,
}
