//! Classes and the priority table of the system.
//!
//! Source: Access'18, Table 2 (IRQ 50, vNIC 48, vCPU 47), extended by a NAPI place, an entitled-vCPU place and levels.

use std::fmt;

pub use ontime_base::Policy;
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// An RT tenant's level: 0 is the most urgent, [`Level::MAX`] the least.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Level(u8);

impl<'de> Deserialize<'de> for Level {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Number;
        impl Visitor<'_> for Number {
            type Value = Level;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a level, a whole number from 0 (most urgent) to {}", Level::MAX)
            }
            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Level, E> {
                Level::try_from(value).map_err(E::custom)
            }
            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Level, E> {
                Level::try_from(i64::try_from(value).unwrap_or(i64::MAX)).map_err(E::custom)
            }
        }
        deserializer.deserialize_i64(Number)
    }
}

impl Level {
    /// The least urgent level. With five priorities per level and a base of 50, level 8 is still above ktimers and
    /// ksoftirqd.
    pub const MAX: u8 = 8;
    /// The most urgent level.
    pub const HIGHEST: Level = Level(0);
    /// The level as a number, 0 to [`Level::MAX`].
    pub fn get(self) -> u8 {
        self.0
    }
}

impl TryFrom<u8> for Level {
    type Error = String;
    fn try_from(value: u8) -> Result<Self, Self::Error> {
        if value <= Level::MAX {
            Ok(Level(value))
        } else {
            Err(format!("level {value} is not one of 0 to {}", Level::MAX))
        }
    }
}

impl TryFrom<i64> for Level {
    type Error = String;
    fn try_from(value: i64) -> Result<Self, Self::Error> {
        u8::try_from(value)
            .ok()
            .and_then(|small| Level::try_from(small).ok())
            .ok_or_else(|| format!("level {value} is not one of 0 (most urgent) to {}", Level::MAX))
    }
}

impl From<Level> for u8 {
    fn from(level: Level) -> u8 {
        level.0
    }
}

/// The urgency of a tenant, a NIC or a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// Latency matters: SCHED_FIFO by level.
    Rt(Level),
    /// Throughput matters: SCHED_OTHER.
    Bulk,
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Class::Rt(level) => write!(f, "rt{}", level.get()),
            Class::Bulk => f.write_str("bulk"),
        }
    }
}

/// The role of a thread on the path of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// A NIC's interrupt thread (`irq/N-NAME`).
    Irq,
    /// A NIC's threaded NAPI (`napi/NIC-ID`).
    Napi,
    /// A virtual NIC's or outsourced socket's thread (`vhost-PID`).
    Vnic,
    /// A vCPU thread in its planned slice, and every vCPU thread while no planner runs.
    VcpuPlanned,
    /// A vCPU thread that has reserved time left, outside its planned slice.
    VcpuEntitled,
    /// A VM monitor's main thread.
    Vmm,
}

/// The priority table: it gives every thread on the path of an RT request its priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PriorityTable {
    base: u8,
}

impl PriorityTable {
    /// Priorities per level: IRQ, NAPI, vNIC, planned and entitled vCPU.
    pub const STEP: u8 = 5;
    /// The lowest base that keeps the last level's vCPUs above `rcuc` (4).
    pub(crate) const BASE_MIN: u8 = 4 + Self::STEP * (Level::MAX + 1);
    /// The highest base that leaves room for the daemon's cap watcher above it.
    pub(crate) const BASE_MAX: u8 = 90;
    /// `ktimers` and `ksoftirqd`, with the priority that tuned's realtime profiles use.
    pub const KTIMERS: Policy = Policy::Fifo(2);
    /// A polling thread: below all priorities here, so that these threads and every vCPU can run.
    pub const POLLER: Policy = Policy::Fifo(1);
    /// vhost thread of a bulk tenant that sends through a transmit queue that RT tenants also use (method `vatc`):
    /// below all other RT threads here, ahead of every thread without real-time priority.
    pub const SHARED_SENDER: Policy = Policy::Fifo(1);
    /// Interrupt and NAPI threads that only free the sent packets of such a queue (method `vatc`): ahead of the queue's
    /// bulk senders, which fill it, and below every thread of an RT path, which they would otherwise interrupt for bulk
    /// packets.
    pub const SHARED_COMPLETIONS: Policy = Policy::Fifo(2);
    /// Main threads of RT VMs' monitors, for all levels: ahead of every thread without real-time priority, below every
    /// vCPU, also of other tenants.
    pub const VMM: Policy = Policy::Fifo(3);
    /// `rcuc`, with the priority that tuned's realtime profiles use.
    pub const RCUC: Policy = Policy::Fifo(4);

    /// A table in which the level-0 IRQ thread has priority `base`.
    ///
    /// # Errors
    /// A sentence with the allowed range if `base` is outside [`Self::BASE_MIN`]..=[`Self::BASE_MAX`].
    pub(crate) fn with_base(base: u8) -> Result<Self, String> {
        if (Self::BASE_MIN..=Self::BASE_MAX).contains(&base) {
            Ok(Self { base })
        } else {
            Err(format!("base priority {base} is not one of {} to {}", Self::BASE_MIN, Self::BASE_MAX))
        }
    }

    /// The priority of the daemon's cap watcher: above every thread that it may have to stop.
    pub fn watcher(self) -> Policy {
        Policy::Fifo(self.base + 5)
    }

    /// The priority of the daemon's pacers: above every thread that they preempt, below the cap watcher.
    pub fn pacer(self) -> Policy {
        Policy::Fifo(self.base + 4)
    }

    /// The priority of the kernel threads that wake the cap watcher about interrupts (`irq_work/N`): the watcher's own
    /// priority, above every thread that may have to be stopped. With a lower priority, the watcher would preempt such
    /// a thread during the wake-up, wait for the queue's lock that the thread holds, and need another context switch
    /// (on PREEMPT_RT that lock sleeps).
    pub fn teller(self) -> Policy {
        self.watcher()
    }

    /// The policy for a thread of this role on a path of this class.
    pub fn policy(self, class: Class, role: Role) -> Policy {
        let Class::Rt(level) = class else {
            return match role {
                Role::Irq | Role::Napi => Policy::BULK_DRIVER,
                Role::Vnic | Role::VcpuPlanned | Role::VcpuEntitled | Role::Vmm => Policy::BULK,
            };
        };
        let below_irq = match role {
            Role::Irq => 0,
            Role::Napi => 1,
            Role::Vnic => 2,
            Role::VcpuPlanned => 3,
            Role::VcpuEntitled => 4,
            Role::Vmm => return Self::VMM,
        };
        Policy::Fifo(self.base - Self::STEP * level.get() - below_irq)
    }
}

impl Default for PriorityTable {
    fn default() -> Self {
        Self { base: 50 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn level_zero_is_table_two_of_the_paper() {
        let table = PriorityTable::default();
        let rt = Class::Rt(Level::HIGHEST);
        assert_eq!(table.policy(rt, Role::Irq), Policy::Fifo(50));
        assert_eq!(table.policy(rt, Role::Napi), Policy::Fifo(49));
        assert_eq!(table.policy(rt, Role::Vnic), Policy::Fifo(48));
        assert_eq!(table.policy(rt, Role::VcpuPlanned), Policy::Fifo(47));
        assert_eq!(table.policy(Class::Bulk, Role::Irq), Policy::Other { nice: -20 });
        assert_eq!(table.policy(Class::Bulk, Role::VcpuPlanned), Policy::BULK);
        assert_eq!(
            (table.policy(rt, Role::Vmm), table.policy(Class::Bulk, Role::Vmm)),
            (Policy::Fifo(3), Policy::BULK)
        );
    }

    #[test]
    fn no_place_of_any_level_is_shared_or_below_rcuc() {
        for base in [PriorityTable::BASE_MIN, 50, PriorityTable::BASE_MAX] {
            let table = PriorityTable::with_base(base).unwrap();
            let mut seen = std::collections::BTreeSet::new();
            for level in 0..=Level::MAX {
                for role in [Role::Irq, Role::Napi, Role::Vnic, Role::VcpuPlanned, Role::VcpuEntitled] {
                    let Policy::Fifo(p) = table.policy(Class::Rt(Level(level)), role) else { panic!("not FIFO") };
                    assert!(seen.insert(p), "priority {p} given twice");
                    assert!(p > 4, "level {level} {role:?} at {p} is not above rcuc");
                }
            }
        }
        assert!(PriorityTable::with_base(PriorityTable::BASE_MIN - 1).is_err());
        assert!(PriorityTable::with_base(PriorityTable::BASE_MAX + 1).is_err());
    }
}
