//! A thread's scheduling policy.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A thread's scheduling policy as in `sched_setattr(2)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// SCHED_OTHER with a nice value, -20 to 19.
    Other {
        /// Nice value, -20 to 19.
        nice: i8,
    },
    /// SCHED_BATCH with a nice value, -20 to 19.
    Batch {
        /// Nice value, -20 to 19.
        nice: i8,
    },
    /// SCHED_IDLE.
    Idle,
    /// SCHED_FIFO, 1 to 99.
    Fifo(u8),
    /// SCHED_RR, 1 to 99.
    Rr(u8),
    /// SCHED_DEADLINE; all values in ns.
    Deadline {
        /// Runtime per period, ns.
        runtime: u64,
        /// Relative deadline, ns.
        deadline: u64,
        /// Period, ns.
        period: u64,
    },
    /// SCHED_EXT.
    Ext {
        /// Nice value, -20 to 19.
        nice: i8,
    },
}

impl Policy {
    /// The policy of bulk threads.
    pub const BULK: Policy = Policy::Other { nice: 0 };
    /// The policy of interrupt and NAPI threads of bulk NICs: below every RT thread, but ahead of the bulk tenants' own
    /// threads, as softirqs are without threaded interrupts. At equal nice values, a NIC's ring overflows while bulk
    /// threads use up their slices.
    pub const BULK_DRIVER: Policy = Policy::Other { nice: -20 };
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Policy::Other { nice: 0 } => f.write_str("OTHER"),
            Policy::Other { nice } => write!(f, "OTHER nice {nice}"),
            Policy::Batch { nice } => write!(f, "BATCH nice {nice}"),
            Policy::Idle => f.write_str("IDLE"),
            Policy::Fifo(priority) => write!(f, "FIFO {priority}"),
            Policy::Rr(priority) => write!(f, "RR {priority}"),
            Policy::Deadline { runtime, period, .. } => write!(f, "DEADLINE {runtime}/{period} ns"),
            Policy::Ext { nice } => write!(f, "EXT nice {nice}"),
        }
    }
}
