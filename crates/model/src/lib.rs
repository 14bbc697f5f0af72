//! Model checks: lock-free code of the product, which `loom` executes in every order that the memory model of C11 (and
//! so of Rust) allows. Each function is one model: it starts threads and panics if its property is violated. The test
//! `models` runs them.
//!
//! The files under test are compiled here from their places in the product, with loom's atomics instead of those of the
//! standard library (`crate::atomic`).
//!
//! | model | file under test | property |
//! |---|---|---|
//! | [`ledger()`] | `sched/src/ledger/page.rs` | no mix of two tables is read, no table goes back, no claim is lost |
//! | [`room()`] | `sockets/src/room.rs` | a worker that waits for room in a ring is woken |
//! | [`places()`] | `sockets/src/free.rs` | no place is taken twice, none is lost |
//! | [`table()`] | `sockets/src/table.rs` | a held socket is open, has the requested id, and its owner |
//!
//! The models' arguments are bounds: the numbers of threads, vCPUs and steps are small. The environment variable
//! `LOOM_MAX_PREEMPTIONS` limits how often a thread is preempted within a run.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a model ends by panicking"
)]

#[path = "../../sockets/src/free.rs"]
mod free;
mod ledger;
mod places;
#[path = "../../sockets/src/room.rs"]
mod room;
mod sockets;
#[allow(dead_code, reason = "the model uses a part of this file")]
#[path = "../../sockets/src/table.rs"]
mod table;
mod waiting;

use ontime_sockets::{abi, request};

pub use self::ledger::ledger;
pub use self::places::places;
pub use self::sockets::{IDS, table};
pub use self::waiting::room;

mod atomic {
    pub(crate) use loom::sync::atomic::{
        AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
    };
}

/// Replaces the system calls: nothing is opened or closed.
mod host {
    use std::os::fd::RawFd;

    pub(crate) fn close(_: RawFd) {}

    /// For the unit tests of `table`, which clippy compiles here, too.
    #[cfg(test)]
    pub(crate) fn socket(_: crate::request::Family, _: crate::request::Protocol) -> Result<RawFd, crate::abi::Errno> {
        Ok(0)
    }
}
