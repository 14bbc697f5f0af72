//! `sched_setattr(2)` and related system calls, with the kernel's layouts.
//!
//! Input: thread numbers. Output: the kernel's answers. A thread's identity is not checked here but in
//! [`crate::thread`]. Source: `include/uapi/linux/sched/types.h`, `include/uapi/linux/sched.h`.

use std::io;

use crate::cpus::{CPU_MAX, CpuSet};
use crate::policy::Policy;

const SCHED_OTHER: u32 = 0;
const SCHED_FIFO: u32 = 1;
const SCHED_RR: u32 = 2;
const SCHED_BATCH: u32 = 3;
const SCHED_IDLE: u32 = 5;
const SCHED_DEADLINE: u32 = 6;
const SCHED_EXT: u32 = 7;

/// Children of the thread start at SCHED_OTHER.
const FLAG_RESET_ON_FORK: u64 = 0x01;

/// The first version of `struct sched_attr` (48 bytes). It has no utilisation clamps, so a change does not affect them.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

const SCHED_ATTR_SIZE: u32 = 48;
const _: () = assert!(size_of::<SchedAttr>() == SCHED_ATTR_SIZE as usize);

/// The policy for a policy number, nice value and real-time priority. `None` for an unknown number.
///
/// The caller must fill in the deadline parameters, which `/proc` does not contain.
pub(crate) fn policy_from(number: u32, nice: i64, priority: u32) -> Option<Policy> {
    let nice = i8::try_from(nice.clamp(-20, 19)).unwrap_or(0);
    let priority = u8::try_from(priority.min(99)).unwrap_or(99);
    Some(match number {
        SCHED_OTHER => Policy::Other { nice },
        SCHED_BATCH => Policy::Batch { nice },
        SCHED_IDLE => Policy::Idle,
        SCHED_FIFO => Policy::Fifo(priority),
        SCHED_RR => Policy::Rr(priority),
        SCHED_DEADLINE => Policy::Deadline { runtime: 0, deadline: 0, period: 0 },
        SCHED_EXT => Policy::Ext { nice },
        _ => return None,
    })
}

fn attr_from(policy: Policy) -> SchedAttr {
    let base = SchedAttr { size: SCHED_ATTR_SIZE, ..SchedAttr::default() };
    match policy {
        Policy::Other { nice } => SchedAttr { policy: SCHED_OTHER, nice: nice.into(), ..base },
        Policy::Batch { nice } => SchedAttr { policy: SCHED_BATCH, nice: nice.into(), ..base },
        Policy::Ext { nice } => SchedAttr { policy: SCHED_EXT, nice: nice.into(), ..base },
        Policy::Idle => SchedAttr { policy: SCHED_IDLE, ..base },
        Policy::Fifo(priority) => SchedAttr { policy: SCHED_FIFO, priority: priority.into(), ..base },
        Policy::Rr(priority) => SchedAttr { policy: SCHED_RR, priority: priority.into(), ..base },
        Policy::Deadline { runtime, deadline, period } => {
            SchedAttr { policy: SCHED_DEADLINE, runtime, deadline, period, ..base }
        }
    }
}

fn getattr(tid: i32) -> io::Result<SchedAttr> {
    let mut attr = SchedAttr::default();
    // SAFETY: the kernel writes at most the given 48 bytes into a live struct of that size.
    let result = unsafe { libc::syscall(libc::SYS_sched_getattr, tid, &raw mut attr, SCHED_ATTR_SIZE, 0u32) };
    if result == 0 { Ok(attr) } else { Err(io::Error::last_os_error()) }
}

/// The thread's policy.
pub fn policy(tid: i32) -> io::Result<Policy> {
    let attr = getattr(tid)?;
    match policy_from(attr.policy, attr.nice.into(), attr.priority) {
        Some(Policy::Deadline { .. }) => {
            Ok(Policy::Deadline { runtime: attr.runtime, deadline: attr.deadline, period: attr.period })
        }
        Some(policy) => Ok(policy),
        None => Err(io::Error::other(format!("scheduling policy number {} is unknown to this Ontime", attr.policy))),
    }
}

/// Sets the thread's policy; its reset-on-fork flag stays unchanged.
pub(crate) fn set_policy(tid: i32, policy: Policy) -> io::Result<()> {
    let kept = getattr(tid)?.flags & FLAG_RESET_ON_FORK;
    setattr(tid, SchedAttr { flags: kept, ..attr_from(policy) })
}

/// Sets the thread's policy; its children do not inherit a real-time policy.
pub(crate) fn set_policy_alone(tid: i32, policy: Policy) -> io::Result<()> {
    // A SCHED_DEADLINE thread without the flag cannot fork at all (sched(7)).
    let realtime = matches!(policy, Policy::Fifo(_) | Policy::Rr(_) | Policy::Deadline { .. });
    setattr(tid, SchedAttr { flags: if realtime { FLAG_RESET_ON_FORK } else { 0 }, ..attr_from(policy) })
}

fn setattr(tid: i32, attr: SchedAttr) -> io::Result<()> {
    // SAFETY: the kernel reads the 48 bytes given by `size` from a live struct of that size.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, tid, &raw const attr, 0u32) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The CPUs the thread may run on.
pub fn affinity(tid: i32) -> io::Result<CpuSet> {
    let mut mask = [0u8; (CPU_MAX as usize + 1) / 8];
    // SAFETY: the kernel writes at most `mask.len()` bytes into the live array.
    let written = unsafe { libc::syscall(libc::SYS_sched_getaffinity, tid, mask.len(), mask.as_mut_ptr()) };
    let written = usize::try_from(written).map_err(|_| io::Error::last_os_error())?;
    Ok(CpuSet::from_bits(mask.get(..written).unwrap_or_default()))
}

/// Restricts the thread to these CPUs.
pub(crate) fn set_affinity(tid: i32, cpus: &CpuSet) -> io::Result<()> {
    let mask = cpus.to_bits();
    // SAFETY: the kernel reads `mask.len()` bytes from the live vector.
    let result = unsafe { libc::syscall(libc::SYS_sched_setaffinity, tid, mask.len(), mask.as_ptr()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_survives_the_way_to_the_kernels_form_and_back() {
        for policy in [
            Policy::Other { nice: -20 },
            Policy::Batch { nice: 19 },
            Policy::Idle,
            Policy::Fifo(1),
            Policy::Fifo(99),
            Policy::Rr(47),
            Policy::Ext { nice: 3 },
        ] {
            let attr = attr_from(policy);
            assert_eq!(policy_from(attr.policy, attr.nice.into(), attr.priority), Some(policy));
        }
        assert_eq!(policy_from(4, 0, 0), None);
        assert_eq!(policy_from(99, 0, 0), None);
    }
}
